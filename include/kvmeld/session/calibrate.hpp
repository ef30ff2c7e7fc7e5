#pragma once

#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/session/candidate.hpp>

KVMELD_NAMESPACE_BEGIN

/// One entry of a validation set: what agents hold, and where a merge of it goes. The engine knows
/// the questions by its index.
struct ValidationCase {
  FragmentSet set{};
  Target target{};
};

/// What an engine found out with one merged cache.
struct CaseScore {
  double score = 0;  ///< of the task, larger is better: answers that were right, or their share
  /// Mean KL(full context ‖ merged cache) of next-token distributions, nats; may be infinite.
  double divergence = 0;
  /// Of the case; below 0: the time that plan and renders took, as `CandidateRender::milliseconds`
  /// has it.
  double cost_ms = -1;
};

/// What a candidate came to on the whole validation set.
struct CalibrationRow {
  std::string name{};
  Digest128 merger{};     ///< the merger's digest
  std::size_t cases = 0;  ///< scored
  double score = 0;       ///< means over the cases scored
  double divergence = 0;
  double cost_ms = 0;
  Status status{};  ///< without error the candidate took part to the end; else why it is out
};

/// The table of a calibration, a row for each candidate in their order, and the row of the best
/// one.
struct Calibration {
  std::vector<CalibrationRow> rows{};
  std::optional<std::size_t> best{};  ///< none: every candidate was refused
};

struct CalibrateOptions {
  std::size_t threads = 1;  ///< that a render runs on
};

/// A candidate's merge of one case, planned and ready to be rendered into memory of the engine's
/// own.
class CandidateRender {
 public:
  CandidateRender(const Candidate& candidate, CandidatePlan plan, const exec::Threads& exec,
                  double plan_ms)
      : candidate_(&candidate), plan_(std::move(plan)), exec_(&exec), milliseconds_(plan_ms) {}

  [[nodiscard]] const Candidate& candidate() const noexcept { return *candidate_; }
  [[nodiscard]] const CandidatePlan& plan() const noexcept { return plan_; }
  /// Renders, and counts the time. Errors: those of `run`; the candidate is then refused, whatever
  /// the callback goes on to say.
  [[nodiscard]] Result<RenderReport> into(const MutableKvCacheRef& out,
                                          const RunOptions& options = {}) {
    std::vector<std::byte> workspace(plan_.workspace_bytes());
    const auto start = std::chrono::steady_clock::now();
    auto report = plan_.run(*exec_, workspace, out, options);
    milliseconds_ +=
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (!report) status_ = report.error();
    return report;
  }
  /// Time of the plan and of the renders so far.
  [[nodiscard]] double milliseconds() const noexcept { return milliseconds_; }
  /// Of the renders so far.
  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  const Candidate* candidate_;
  CandidatePlan plan_;
  const exec::Threads* exec_;
  double milliseconds_;
  Status status_;
};

/// An engine as calibration sees it: `engine(render, i)` renders the merge of case i, loads it,
/// works on the task and scores it.
template <class E>
concept CalibrationEngine = requires(E& engine, CandidateRender& render, std::size_t index) {
  { engine(render, index) } -> std::convertible_to<Result<CaseScore>>;
};

/// The row that a host should take: highest score; then smallest divergence, smallest cost, first
/// in the list. None: all are refused.
[[nodiscard]] inline std::optional<std::size_t> best_row(std::span<const CalibrationRow> rows) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].status || rows[i].cases == 0) continue;
    if (!best) {
      best = i;
      continue;
    }
    const CalibrationRow& a = rows[i];
    const CalibrationRow& b = rows[*best];
    const bool better = a.score != b.score             ? a.score > b.score
                        : a.divergence != b.divergence ? a.divergence < b.divergence
                                                       : a.cost_ms < b.cost_ms;
    if (better) best = i;
  }
  return best;
}

namespace detail {

[[nodiscard]] inline Status check_score(const CaseScore& score) {
  if (!std::isfinite(score.score))
    return error(ErrorCode::non_finite, "the engine's score is ", score.score);
  if (std::isnan(score.divergence) || score.divergence == -INFINITY)
    return error(ErrorCode::non_finite, "the engine's divergence is ", score.divergence);
  if (!std::isfinite(score.cost_ms))
    return error(ErrorCode::non_finite, "the engine's cost is ", score.cost_ms, " ms");
  return {};
}

[[nodiscard]] inline Status check_candidates(std::span<const ValidationCase> cases,
                                             std::span<const Candidate> candidates) {
  if (cases.empty())
    return error(ErrorCode::invalid_argument,
                 "calibrate: a validation set of 0 cases decides nothing between ",
                 candidates.size(), " candidates");
  if (candidates.empty())
    return error(ErrorCode::invalid_argument, "calibrate: 0 candidates for ", cases.size(),
                 " cases");
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (candidates[i].name() == candidates[j].name()) {
        return error(ErrorCode::invalid_argument, "calibrate: candidates ", j, " and ", i,
                     " are both called ", candidates[i].name());
      }
    }
  }
  return {};
}

}  // namespace detail

/// Tries every candidate on every case of a validation set, and says which one to take: a policy
/// chosen by data, not by taste.
///
/// Cases are outermost, so that an engine prepares each once and candidates are compared under the
/// same load. A candidate whose plan, render or score fails on a case is out from there on, with
/// the case and the reason in its row; the others go on. Rows hold means over cases. The best row
/// is `best_row`'s, so equal figures from the engine give an equal answer; where scores and
/// divergences are equal to the bit it has to give costs as well, since measured times differ from
/// run to run. Scores tell candidates apart only as far as the set is large: over n questions a
/// share has a standard error of up to 0.5 / √n. Time: a plan, a render and a callback for each
/// (case, candidate). Errors: `invalid_argument` (no cases, no candidates, a name twice). A row's
/// reasons: those of `plan` and `run`, the engine's own, `non_finite` (score or cost not finite,
/// divergence NaN or −∞).
template <CalibrationEngine E>
[[nodiscard]] Result<Calibration> calibrate(std::span<const ValidationCase> cases,
                                            std::span<const Candidate> candidates, E&& engine,
                                            const CalibrateOptions& options = {}) {
  KVMELD_TRY(detail::check_candidates(cases, candidates));
  const exec::Threads exec(options.threads);
  Calibration out;
  for (const Candidate& candidate : candidates)
    out.rows.push_back({.name = candidate.name(), .merger = candidate.digest()});
  const auto score = [&](const Candidate& candidate, std::size_t index) -> Result<CaseScore> {
    const auto start = std::chrono::steady_clock::now();
    auto plan = candidate.plan(cases[index].set, cases[index].target);
    if (!plan) return plan.error();
    CandidateRender render(
        candidate, *std::move(plan), exec,
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
    Result<CaseScore> scored = engine(render, index);
    if (!render.status()) return render.status();
    if (!scored) return scored;
    KVMELD_TRY(detail::check_score(*scored));
    if (scored->cost_ms < 0) scored->cost_ms = render.milliseconds();
    return scored;
  };
  for (std::size_t index = 0; index < cases.size(); ++index) {
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      CalibrationRow& row = out.rows[c];
      if (!row.status) continue;
      const auto scored = score(candidates[c], index);
      if (!scored) {
        row.status =
            detail::error(scored.error().code(), "case ", index, ": ", scored.error().message());
        continue;
      }
      ++row.cases;
      row.score += scored->score;
      row.divergence += scored->divergence;
      row.cost_ms += scored->cost_ms;
    }
  }
  for (CalibrationRow& row : out.rows) {
    if (row.cases == 0) continue;
    const auto n = static_cast<double>(row.cases);
    row.score /= n;
    row.divergence /= n;
    row.cost_ms /= n;
  }
  out.best = best_row(out.rows);
  return out;
}

KVMELD_NAMESPACE_END
