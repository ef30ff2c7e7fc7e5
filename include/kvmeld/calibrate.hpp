#pragma once

/// Calibration of mergers on validation cases, mergers chosen at run time, and soft updates.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A plan with the merger's type erased: what an engine needs to allocate room for it and to render
/// it. A copy shares the plan.
class CandidatePlan {
 public:
  template <class M>
  explicit CandidatePlan(Plan<M> plan) {
    auto shared = std::make_shared<const Plan<M>>(std::move(plan));
    core_ = &shared->core();
    run_ = [](const void* self, const exec::Threads& exec, std::span<std::byte> workspace,
              const MutableKvCacheRef& out, const RunOptions& options) {
      return kvmeld::run(exec, *static_cast<const Plan<M>*>(self), workspace, out, options);
    };
    workspace_bytes_ = shared->workspace_bytes();
    plan_ = std::move(shared);
  }

  /// Output tokens, holes included: rows that `out` must have.
  [[nodiscard]] std::int64_t tokens() const noexcept { return core_->outputs(); }
  [[nodiscard]] std::span<const std::int64_t> positions() const noexcept {
    return core_->positions;
  }
  /// Id of each output token; −1 where it is not known.
  [[nodiscard]] std::span<const TokenId> token_ids() const noexcept { return core_->tokens; }
  /// Output tokens that the engine computes after the render, ascending.
  [[nodiscard]] std::span<const Hole> holes() const noexcept { return core_->holes; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return core_->geometry;
  }
  [[nodiscard]] const Digest128& render_id() const noexcept { return core_->render_id; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept { return workspace_bytes_; }

  /// `kvmeld::run` with the plan's own merger: the same bytes and errors.
  [[nodiscard]] Result<RenderReport> run(const exec::Threads& exec, std::span<std::byte> workspace,
                                         const MutableKvCacheRef& out,
                                         const RunOptions& options = {}) const {
    return run_(plan_.get(), exec, workspace, out, options);
  }

 private:
  std::shared_ptr<const void> plan_;
  const extend::PlanCore* core_ = nullptr;
  Result<RenderReport> (*run_)(const void*, const exec::Threads&, std::span<std::byte>,
                               const MutableKvCacheRef&, const RunOptions&) = nullptr;
  std::size_t workspace_bytes_ = 0;
};

/// A named merger with its type erased, so that one list holds mergers of different policies and
/// one is chosen at run time.
///
/// Two calls through a pointer a render; rows are fused by the merger's own code. A copy shares the
/// merger.
class Candidate {
 public:
  template <class M>
  Candidate(std::string name, M merger)
      : name_(std::move(name)),
        digest_(merger.digest()),
        reproducible_(M::reproducible),
        merger_(std::make_shared<const M>(std::move(merger))),
        plan_([](const void* self, const FragmentSet& set,
                 const Target& target) -> Result<CandidatePlan> {
          auto made = kvmeld::plan(set, *static_cast<const M*>(self), target);
          if (!made) return made.error();
          return CandidatePlan(*std::move(made));
        }) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// The digest of the merger, which replicas compare.
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }
  [[nodiscard]] bool reproducible() const noexcept { return reproducible_; }
  /// `kvmeld::plan` with the candidate's merger: the same errors.
  [[nodiscard]] Result<CandidatePlan> plan(const FragmentSet& set, const Target& target) const {
    return plan_(merger_.get(), set, target);
  }

 private:
  std::string name_;
  Digest128 digest_;
  bool reproducible_ = false;
  std::shared_ptr<const void> merger_;
  Result<CandidatePlan> (*plan_)(const void*, const FragmentSet&, const Target&) = nullptr;
};

/// One entry of a validation set: the fragments that agents hold, and the target of their merge.
/// The engine finds the questions by the entry's index.
struct ValidationCase {
  FragmentSet set{};
  Target target{};
};

/// What an engine measured with one merged cache.
struct CaseScore {
  double score = 0;  ///< of the task, larger is better: right answers, or their share
  /// Mean KL(full context ‖ merged cache) of next-token distributions, nats; may be infinite.
  double divergence = 0;
  /// Cost of the case; below 0: the time of plan and renders, as `CandidateRender::milliseconds`
  /// reports it.
  double cost_ms = -1;
};

/// The result of a candidate on the whole validation set.
struct CalibrationRow {
  std::string name{};
  Digest128 merger{};     ///< the merger's digest
  std::size_t cases = 0;  ///< scored
  double score = 0;       ///< means over the cases scored
  double divergence = 0;
  double cost_ms = 0;
  Status status{};  ///< ok: the candidate completed all cases; otherwise why it was excluded
};

/// The table of a calibration, a row for each candidate in their order, and the row of the best
/// one.
struct Calibration {
  std::vector<CalibrationRow> rows{};
  std::optional<std::size_t> best{};  ///< none: every candidate was excluded
};

/// How candidates are rendered and compared.
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
  /// Renders, and counts the time. Errors: those of `run`; the candidate is then excluded, whatever
  /// the callback returns.
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
  /// The status of the renders so far.
  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  const Candidate* candidate_;
  CandidatePlan plan_;
  const exec::Threads* exec_;
  double milliseconds_;
  Status status_;
};

/// An engine for calibration: `engine(render, i)` renders the merge of case i, loads it, runs the
/// task and scores it.
template <class E>
concept CalibrationEngine = requires(E& engine, CandidateRender& render, std::size_t index) {
  { engine(render, index) } -> std::convertible_to<Result<CaseScore>>;
};

/// The row to choose: highest score, then smallest divergence, smallest cost, first in the list.
/// None: all candidates were excluded.
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

/// Scores every candidate on every case of a validation set, and returns the best one.
///
/// Cases are outermost, so that an engine prepares each once and candidates are compared under the
/// same load. A candidate whose plan, render or score fails on a case is excluded from there on,
/// with the case and the reason in its row; the others continue. Rows hold means over cases. The
/// best row is `best_row`'s, so equal figures from the engine give an equal answer; where scores
/// and divergences may tie exactly, it must return costs as well, since measured times differ from
/// run to run. A small set distinguishes only large differences: over n questions a share has a
/// standard error of up to 0.5 / √n. Time: a plan, a render and a callback for each (case,
/// candidate). Errors: `invalid_argument` (no cases, no candidates, a name twice). A row's reasons:
/// those of `plan` and `run`, the engine's own, `non_finite` (score or cost not finite, divergence
/// NaN or −∞).
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
            extend::error(scored.error().code(), "case ", index, ": ", scored.error().message());
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

/// Which recipe to encode and merge by, chosen by the user's own text, without labels.
namespace recipes {

/// A way to make what agents hold (a lead-in, rounds of refresh, nothing) and to merge it (a
/// merger, with its seams).
struct Recipe {
  Candidate candidate;  ///< its name is the recipe's
  /// Case i of every recipe is the same sample, encoded as this one says.
  std::vector<ValidationCase> cases{};
  /// What agents computed for all cases before anything was asked.
  std::int64_t tokens_before = 0;
};

/// What a recipe came to.
struct Row {
  CalibrationRow figures{};  ///< means over the cases
  double tokens_before = 0;  ///< a case
  double tokens_after = 0;   ///< a case: holes, which the engine computes once the cache is needed
};

/// The table, a row for each recipe in their order, and the row to take.
struct Choice {
  std::vector<Row> rows{};
  std::optional<std::size_t> best{};  ///< none: no recipe is within the loss
};

/// The cheapest recipe whose mean KL to full text is at most `max_divergence` nats: fewest tokens
/// after, then before, then the smallest KL, then first in the list.
[[nodiscard]] inline std::optional<std::size_t> cheapest(std::span<const Row> rows,
                                                         double max_divergence) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const CalibrationRow& figures = rows[i].figures;
    if (!figures.status || figures.cases == 0 || !(figures.divergence <= max_divergence)) continue;
    const auto cost = [&](std::size_t r) {
      return std::tuple(rows[r].tokens_after, rows[r].tokens_before, rows[r].figures.divergence);
    };
    if (!best || cost(i) < cost(*best)) best = i;
  }
  return best;
}

/// Tries every recipe on its encodings of the same sample, and says which is the cheapest within a
/// stated loss.
///
/// The engine scores as in `calibrate`; its `divergence` decides, so that no labels are needed: KL
/// to full text on what the text itself goes on with (`completions`). Hold back a part of the
/// sample and ask the engine for the chosen recipe's figure on it: what was chosen on few cases
/// looks better there than it is. Time: a plan, a render and a callback for each (case, recipe).
/// Errors: those of `calibrate`; `invalid_argument` where recipes have unlike numbers of cases, or
/// the loss is NaN.
template <CalibrationEngine E>
[[nodiscard]] Result<Choice> choose(std::span<const Recipe> recipes, double max_divergence,
                                    E&& engine, const CalibrateOptions& options = {}) {
  if (recipes.empty() || std::isnan(max_divergence)) {
    return extend::error(ErrorCode::invalid_argument, "recipes: ", recipes.size(),
                         " recipes within a loss of ", max_divergence);
  }
  for (std::size_t i = 0; i < recipes.size(); ++i) {
    if (recipes[i].cases.size() != recipes[0].cases.size()) {
      return extend::error(ErrorCode::invalid_argument, "recipes: ", recipes[i].candidate.name(),
                           " has ", recipes[i].cases.size(), " cases, ",
                           recipes[0].candidate.name(), " has ", recipes[0].cases.size());
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (recipes[i].candidate.name() == recipes[j].candidate.name())
        return extend::error(ErrorCode::invalid_argument, "recipes: two are called ",
                             recipes[i].candidate.name());
    }
  }
  Choice out;
  for (const Recipe& recipe : recipes) {
    std::size_t holes = 0;
    const auto count = [&](CandidateRender& render, std::size_t index) -> Result<CaseScore> {
      holes += render.plan().holes().size();
      return engine(render, index);
    };
    auto table = calibrate(recipe.cases, std::span(&recipe.candidate, 1), count, options);
    if (!table) return table.error();
    const auto n = static_cast<double>(recipe.cases.size());
    out.rows.push_back({std::move(table->rows[0]), static_cast<double>(recipe.tokens_before) / n,
                        static_cast<double>(holes) / n});
  }
  out.best = cheapest(out.rows, max_divergence);
  return out;
}

/// A question that a text asks of itself: its tokens `begin` to `answer` as a prompt, those from
/// `answer` to `end` as what follows.
struct Completion {
  std::int64_t begin = 0;
  std::int64_t answer = 0;
  std::int64_t end = 0;

  bool operator==(const Completion&) const = default;
};

/// Sentences of a text, each cut in the middle: at most `count`, spread evenly.
///
/// @param ends ids that end a sentence. A sentence of fewer than `shortest` tokens is left out, as
/// is what follows the last end. O(tokens · ends).
[[nodiscard]] inline std::vector<Completion> completions(std::span<const TokenId> tokens,
                                                         std::span<const TokenId> ends,
                                                         std::size_t count,
                                                         std::int64_t shortest = 8) {
  std::vector<Completion> all;
  std::int64_t begin = 0;
  for (std::int64_t t = 0; t < std::ssize(tokens); ++t) {
    if (std::find(ends.begin(), ends.end(), tokens[static_cast<std::size_t>(t)]) == ends.end())
      continue;
    const std::int64_t size = t + 1 - begin;
    if (size >= shortest) all.push_back({begin, begin + size / 2, t + 1});
    begin = t + 1;
  }
  if (all.size() <= count) return all;
  std::vector<Completion> out;
  for (std::size_t i = 0; i < count; ++i) out.push_back(all[i * all.size() / count]);
  return out;
}

}  // namespace recipes

namespace detail {

/// Blends rows: row r is one token of one (layer, plane), all heads. Models `RowWork`; one lane
/// does a row's work.
struct SoftUpdateWork {
  using State = NoState;
  struct Task {
    PlaneRef fused, local;
    MutablePlaneRef out;
  };

  const Task* tasks = nullptr;
  std::int64_t tokens = 0;
  float beta = 0;

  [[nodiscard]] NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] static NoState join(NoState, NoState) noexcept { return {}; }
  void finish(std::int64_t row, int lane, NoState) const noexcept {
    if (lane != 0) return;
    const Task& task = tasks[row / tokens];
    const std::int64_t t = row % tokens;
    const std::int64_t a = task.fused.slots.slot(t), b = task.local.slots.slot(t),
                       o = task.out.slots.slot(t);
    if (o < 0 || a < 0 || b < 0) return;
    for (std::int64_t head = 0; head < task.out.shape.heads; ++head) blend(task, a, b, o, head);
  }

 private:
  void blend(const Task& task, std::int64_t a, std::int64_t b, std::int64_t o,
             std::int64_t head) const noexcept {
    alignas(64) std::byte fused[max_bytes], local[max_bytes];
    alignas(64) float x[max_channels], y[max_channels];
    const PlaneShape& shape = task.out.shape;
    gather_row(task.fused, a, head, fused);
    gather_row(task.local, b, head, local);
    if (beta == 0.0F || beta == 1.0F)
      return scatter_row(task.out, o, head, beta == 0.0F ? local : fused);
    load_row(shape.type, Isa::baseline, fused, shape.channels, x);
    load_row(shape.type, Isa::baseline, local, shape.channels, y);
    for (std::int32_t c = 0; c < shape.channels; ++c) {
      // Where the difference overflows f32, the halves are subtracted, which are exact.
      const float apart = x[c] - y[c];
      const float half = fma(beta, fma(0.5F, x[c], -0.5F * y[c]), 0.5F * y[c]);
      y[c] = apart - apart == 0.0F ? fma(beta, apart, y[c]) : half + half;
    }
    store_row(shape.type, Isa::baseline, y, shape.channels, fused);
    scatter_row(task.out, o, head, fused);
  }

 public:
  static constexpr std::int32_t max_channels = 1024;
  static constexpr std::size_t max_bytes = std::size_t{max_channels} * 4;
};

/// Refuses NaNs and infinities in the rows of a side that is read (`fused` unless β is 0, `local`
/// unless β is 1), for tokens that are written.
inline Status check_blended(const SoftUpdateWork::Task& task, std::int64_t tokens, float beta,
                            std::size_t index) {
  const PlaneShape& shape = task.out.shape;
  std::vector<std::byte> heads(static_cast<std::size_t>(row_bytes(shape) * shape.heads));
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (task.out.slots.slot(t) < 0 || task.fused.slots.slot(t) < 0 || task.local.slots.slot(t) < 0)
      continue;
    for (const bool is_fused : {true, false}) {
      if (beta == (is_fused ? 0.0F : 1.0F)) continue;
      const PlaneRef& side = is_fused ? task.fused : task.local;
      gather_heads(side, side.slots.slot(t), heads.data());
      const double peak = peak_of(shape.type, heads.data(), heads.size());
      if (peak <= largest_stored(shape.type)) continue;
      return error(ErrorCode::non_finite, "soft_update: plane ", index, " of the ",
                   is_fused ? "fused" : "local", " cache reaches ", peak, " at token ", t,
                   ", beyond the numbers of ", to_string(shape.type));
    }
  }
  return {};
}

/// Whether two views map the same tokens to the same elements, so that each row is read before it
/// is overwritten.
[[nodiscard]] inline bool same_rows(const KvCacheRef& a, const KvCacheRef& b) {
  if (a.planes().size() != b.planes().size()) return false;
  for (std::size_t p = 0; p < a.planes().size(); ++p) {
    const PlaneRef& x = a.planes()[p];
    const PlaneRef& y = b.planes()[p];
    if (!same_lattice(x, y) || x.slots.kind != y.slots.kind || x.slots.table != y.slots.table ||
        x.slots.first != y.slots.first)
      return false;
  }
  return true;
}

}  // namespace detail

/// Blends a fused cache into an agent's own: new = β · fused + (1 − β) · local, for that agent's
/// cache only.
///
/// Never seal the result into a replicated set: averages are not associative, so replicas would not
/// converge. Token i of both caches is at the same position, which the caller declares by
/// `positions`; keys then have the same rotation and may be averaged directly. Computed as fma(β,
/// fused − local, local) in f32: equal rows are unchanged, β = 0 and β = 1 copy the bytes of one
/// side, and a blend of two finite numbers is finite. `out` may be `local` itself. A row that
/// either side does not hold is left alone. O(bytes). Errors, with the output untouched:
/// `non_finite` (a NaN or an infinity in a row of either side, by plane and token),
/// `invalid_argument` (β outside [0, 1] or not finite), `geometry_mismatch`,
/// `token_count_mismatch`, `duplicate_position` or `position_gap` (positions differ),
/// `output_too_small`, `aliasing`, `unsupported` (scales, f64, or more than 1,024 channels a head),
/// `memory_space`, `float_environment`.
template <ExecutionPolicy E>
requires(!E::on_device) [[nodiscard]] Status
    soft_update(const E& exec, const KvCacheRef& fused,
                std::span<const std::int64_t> fused_positions, const KvCacheRef& local,
                std::span<const std::int64_t> local_positions, float beta,
                const MutableKvCacheRef& out) {
  using extend::error;
  KVMELD_TRY(exec::check_float_environment());
  if (!(beta >= 0.0F && beta <= 1.0F))
    return error(ErrorCode::invalid_argument, "soft_update: beta ", beta, " is not in [0, 1]");
  if (!fused.valid() || !local.valid() || !out.valid())
    return error(ErrorCode::invalid_argument, "soft_update: a view has no geometry");
  KVMELD_TRY(validate(local.geometry()));
  KVMELD_TRY(check_same(local.geometry(), fused.geometry()));
  KVMELD_TRY(check_same(local.geometry(), out.geometry()));
  KVMELD_TRY(extend::check_on_host(fused, "soft_update"));
  KVMELD_TRY(extend::check_on_host(local, "soft_update"));
  KVMELD_TRY(extend::check_on_host(out, "soft_update"));
  const std::int64_t tokens = local.tokens();
  if (fused.tokens() != tokens || std::ssize(fused_positions) != tokens ||
      std::ssize(local_positions) != tokens) {
    return error(ErrorCode::token_count_mismatch, "soft_update: ", fused.tokens(),
                 " fused tokens at ", fused_positions.size(), " positions, ", tokens,
                 " local ones at ", local_positions.size());
  }
  for (std::size_t t = 0; t < fused_positions.size(); ++t) {
    if (fused_positions[t] == local_positions[t]) continue;
    return error(fused_positions[t] > local_positions[t] ? ErrorCode::position_gap
                                                         : ErrorCode::duplicate_position,
                 "soft_update: token ", t, " lies at position ", fused_positions[t],
                 " in one cache, at ", local_positions[t], " in the other");
  }
  if (out.tokens() < tokens)
    return error(ErrorCode::output_too_small, "soft_update: ", tokens, " tokens, the output holds ",
                 out.tokens());
  const MutableKvCacheRef written = out.first(tokens);
  const KvCacheRef target(written);
  if (overlaps(fused, target) || (overlaps(local, target) && !detail::same_rows(local, target))) {
    return error(
        ErrorCode::aliasing,
        "soft_update: the output shares memory with an input and is not the local cache itself");
  }
  std::vector<detail::SoftUpdateWork::Task> tasks;
  for (std::size_t p = 0; p < written.planes().size(); ++p) {
    const PlaneShape& shape = written.planes()[p].shape;
    if (shape.scales != ScaleScheme::none || shape.type == ElementType::f64 ||
        shape.channels > detail::SoftUpdateWork::max_channels) {
      return error(ErrorCode::unsupported, "soft_update: plane ", p, " of ", shape.channels,
                   " channels of ", to_string(shape.type),
                   " cannot be blended: no scales apart, no f64, at most ",
                   detail::SoftUpdateWork::max_channels, " channels");
    }
    KVMELD_TRY(check_writable(written.planes()[p]));
    tasks.push_back({fused.planes()[p], local.planes()[p], written.planes()[p]});
  }
  for (std::size_t p = 0; p < tasks.size(); ++p)
    KVMELD_TRY(detail::check_blended(tasks[p], tokens, beta, p));
  const auto rows = static_cast<std::int64_t>(tasks.size()) * tokens;
  if (rows == 0) return {};
  return exec.bulk(rows, detail::SoftUpdateWork{tasks.data(), tokens, beta});
}

KVMELD_NAMESPACE_END
