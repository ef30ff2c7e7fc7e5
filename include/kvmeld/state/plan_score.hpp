#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plan_core.hpp>
#include <kvmeld/state/row_distances.hpp>
#include <kvmeld/tensor/span_of.hpp>

/// Weights that fusers give, worked out once an output token when a plan is made; weights of 0
/// leave the alignment.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Contributions of one output that are compared in pairs.
inline constexpr std::size_t max_scored = 2048;

/// A fuser's `score`, of any type.
struct ScoreCall {
  const void* fuser = nullptr;
  Status (*call)(const void*, const Scoring&, std::span<double>) = nullptr;
  bool norms = false;  ///< whether it reads them
};

template <class F>
[[nodiscard]] ScoreCall score_call([[maybe_unused]] const F& fuser) {
  if constexpr (ScoreForm<F>) {
    constexpr bool norms = requires { requires F::reads_norms; };
    return {&fuser,
            [](const void* f, const Scoring& scoring, std::span<double> weights) {
              return static_cast<const F*>(f)->score(scoring, weights);
            },
            norms};
  } else {
    return {};
  }
}

/// The sources of a plan give their weights to the contributions; then `score` has its say, and
/// weights of 0 leave their rows.
///
/// Errors: `non_finite` for weights that are negative, not finite, or all 0; `oversized`; those of
/// the score.
KVMELD_LAZY Status weigh(PlanCore& core, Alignment& alignment, ScoreCall score,
                         std::span<const std::uint8_t> recompute, std::int64_t context_length) {
  std::vector<std::size_t> covered(core.geometry->layers.size());
  for (std::size_t l = 0; l < covered.size(); ++l) {
    while (covered[l] < alignment.groups.size() && !alignment.groups[covered[l]].layers.contains(l))
      ++covered[l];
  }
  for (std::size_t g = 0; g < alignment.groups.size(); ++g) {
    AlignmentGroup& group = alignment.groups[g];
    for (Contribution& c : group.contributions)
      c.weight = rounded_product(c.weight, core.sources[c.source].weight);
    ScoreBatch batch;
    std::unique_ptr<RowDistances> distances;
    std::vector<double> weights;
    const auto finish_batch = [&]() -> Status {
      if (batch.rows.empty()) return {};
      distances->measure(core, batch, score.norms);
      for (const ScoredRow& row : batch.rows) {
        const std::span<const Contribution> inputs =
            span_of(batch.inputs.data() + row.begin, row.count);
        weights.clear();
        for (const Contribution& c : inputs) weights.push_back(static_cast<double>(c.weight));
        const Scoring scoring{span_of(batch.distances.data() + row.pairs, row.count * row.count),
                              span_of(batch.norms.data() + row.begin, row.count)};
        const Status scored = score.call(score.fuser, scoring, span_of(weights));
        if (!scored) {
          return error(scored.code(), "output ", row.output, " at position ",
                       core.positions[row.output], ": ", scored.message());
        }
        for (std::size_t i = 0; i < row.count; ++i) {
          group.contributions[group.row_begin[row.output] + batch.place[row.begin + i]].weight =
              static_cast<float>(weights[i]);
        }
      }
      batch.clear();
      return {};
    };
    const auto check_row = [&](std::size_t o, const char* whose) -> Status {
      double total = 0;
      for (const Contribution& c : group.row(o)) {
        if (!(c.weight >= 0.0F) || !std::isfinite(c.weight)) {
          return error(ErrorCode::non_finite, "the ", group.row(o).size(), " weights of output ", o,
                       " at position ", core.positions[o], " hold ", c.weight, " for fragment ",
                       core.sources[c.source].fragment.id().hex(), whose,
                       "; weights are finite and at least 0");
        }
        total += static_cast<double>(c.weight);
      }
      if (total > 0) return {};
      return error(ErrorCode::non_finite, "the ", group.row(o).size(), " weights of output ", o,
                   " at position ", core.positions[o], " add up to ", total, whose,
                   "; one at least must be above 0");
    };
    const auto fused = [&](std::size_t o) { return group.row(o).size() > 1 && recompute[o] == 0; };
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      if (!fused(o)) continue;
      KVMELD_TRY(check_row(o, ""));
      if (score.call == nullptr) continue;
      const std::span<const Contribution> inputs = group.row(o);
      if (inputs.size() > max_scored) {
        return error(ErrorCode::oversized, "output ", o, " has ", inputs.size(),
                     " contributions, of which at most ", max_scored, " can be scored");
      }
      if (distances == nullptr) {
        std::vector<std::size_t> layers;
        for (std::size_t l = 0; l < covered.size(); ++l) {
          if (covered[l] == g) layers.push_back(l);
        }
        auto made = RowDistances::of(core, std::move(layers), group, context_length);
        if (!made) return made.error();
        distances = std::make_unique<RowDistances>(*std::move(made));
      }
      const ScoredRow row{o, batch.inputs.size(), inputs.size(), batch.distances.size(),
                          RowDistances::unequal(core, inputs)};
      batch.rows.push_back(row);
      for (std::uint32_t i = 0; i < inputs.size(); ++i) batch.place.push_back(i);
      std::sort(batch.place.begin() + static_cast<std::ptrdiff_t>(row.begin), batch.place.end(),
                [&](std::uint32_t a, std::uint32_t b) {
                  const FragmentId& x = core.sources[inputs[a].source].fragment.id();
                  const FragmentId& y = core.sources[inputs[b].source].fragment.id();
                  return x != y                               ? x < y
                         : inputs[a].token != inputs[b].token ? inputs[a].token < inputs[b].token
                                                              : a < b;
                });
      for (std::size_t i = 0; i < row.count; ++i)
        batch.inputs.push_back(inputs[batch.place[row.begin + i]]);
      batch.distances.resize(row.pairs + row.count * row.count);
      if (batch.rows.size() == 64 || batch.distances.size() >= 65536) KVMELD_TRY(finish_batch());
    }
    KVMELD_TRY(finish_batch());
    // Rows close ranks over what weighs nothing. Weights by head leave it out by themselves.
    std::uint32_t kept = 0, begin = 0;
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      const std::uint32_t end = group.row_begin[o + 1];
      if (score.call != nullptr && end - begin > 1 && recompute[o] == 0) {
        group.row_begin[o] = begin;  // as it was, for the check
        KVMELD_TRY(check_row(o, " after scoring"));
      }
      const bool drops = end - begin > 1 && recompute[o] == 0 && group.head_weights.empty();
      group.row_begin[o] = kept;
      for (std::uint32_t i = begin; i < end; ++i) {
        if (!drops || group.contributions[i].weight != 0.0F)
          group.contributions[kept++] = group.contributions[i];
      }
      begin = end;
    }
    group.row_begin.back() = kept;
    group.contributions.resize(kept);
  }
  for (PlanSource& source : core.sources) source.weight = 1.0F;
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
