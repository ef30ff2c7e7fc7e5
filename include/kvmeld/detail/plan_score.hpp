#pragma once

/// Scores of contributions, by rows' distances.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/distances.hpp>
#include <kvmeld/extend/plan.hpp>
#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

// Distances between the contributions of one output token: of their keys without position, over
// heads and layers.

namespace detail {

/// One output whose contributions are compared in pairs.
struct ScoredRow {
  std::size_t output = 0;
  std::size_t begin = 0;  ///< its part of the batch's inputs
  std::size_t count = 0;
  std::size_t pairs = 0;  ///< its part of the batch's distances
  bool rotated = false;   ///< positions differ: keys are compared un-rotated
};

/// Rows that are compared in one pass over the layers, so that payloads are read in order.
struct ScoreBatch {
  std::vector<ScoredRow> rows;
  std::vector<Contribution> inputs;  ///< of each row ascending by fragment id, then token
  std::vector<std::uint32_t> place;  ///< where each of `inputs` stands in the alignment's row
  std::vector<double> distances;     ///< (count, count) a row
  std::vector<double> norms;         ///< (count) a row

  void clear() {
    rows.clear();
    inputs.clear();
    place.clear();
    distances.clear();
    norms.clear();
  }
};

/// Measures squared distances between the contributions of rows: all layers of one group,
/// ascending.
class RowDistances {
 public:
  /// @param layers  those of the group; context_length: picks frequencies where they depend on it.
  static Result<RowDistances> of(const PlanCore& core, std::vector<std::size_t> layers,
                                 const AlignmentGroup& group, std::int64_t context_length) {
    RowDistances out;
    out.layers_ = std::move(layers);
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      if (!unequal(core, group.row(o))) continue;
      for (const Contribution& c : group.row(o))
        out.shifts_.push_back(-core.sources[c.source].payload().positions[c.token]);
    }
    std::sort(out.shifts_.begin(), out.shifts_.end());
    out.shifts_.erase(std::unique(out.shifts_.begin(), out.shifts_.end()), out.shifts_.end());
    for (const std::size_t l : out.layers_) {
      const LayerShape& layer = core.geometry->layers[l];
      const bool rotates = !out.shifts_.empty() && layer.rope.kind != RopeKind::none &&
                           layer.key_form == KeyForm::post_rope;
      std::int32_t table = -1;
      for (std::size_t p = 0; p < layer.planes.size(); ++p) {
        if (!rotates || !layer.planes[p].rotary || !compared(layer.planes[p].plane)) continue;
        if (layer.planes[p].hadamard != 0) {
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ",
                       layer.planes[p].hadamard,
                       " at different positions cannot be compared; use unquantised keys, or "
                       "positions that do not differ");
        }
        table = 0;
      }
      if (table == 0) {
        std::size_t known = 0;
        while (known < out.specs_.size() && !(*out.specs_[known] == layer.rope)) ++known;
        if (known == out.specs_.size()) {
          auto built = RopeTable::build(layer.rope, span_of(out.shifts_), context_length);
          if (!built) return built.error();
          out.specs_.push_back(&layer.rope);
          out.tables_.push_back(*std::move(built));
        }
        table = static_cast<std::int32_t>(known);
      }
      out.layer_table_.push_back(table);
    }
    return out;
  }

  /// Whether a row's contributions stand at different positions.
  [[nodiscard]] static bool unequal(const PlanCore& core, std::span<const Contribution> row) {
    for (const Contribution& c : row) {
      if (core.sources[c.source].payload().positions[c.token] !=
          core.sources[row[0].source].payload().positions[row[0].token])
        return true;
    }
    return false;
  }

  /// Fills distances, and norms where they are read, layer by layer.
  void measure(const PlanCore& core, ScoreBatch& batch, bool norms) {
    batch.norms.assign(batch.inputs.size(), norms ? 0.0 : NAN);
    std::size_t plane = 0, layer = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      for (; layer < layers_[i]; ++layer) plane += core.geometry->layers[layer].planes.size();
      const LayerShape& shape = core.geometry->layers[layer];
      for (std::size_t p = 0; p < shape.planes.size(); ++p) {
        if (!compared(shape.planes[p].plane)) continue;
        for (const ScoredRow& row : batch.rows)
          add(core, batch, row, norms, layer, plane + p, shape.planes[p], layer_table_[i]);
      }
    }
    // what overflows is far from everything
    for (double& d : batch.distances) d = std::isfinite(d) ? d : 1e300;
    for (double& d : batch.norms) d = !norms || std::isfinite(d) ? d : 1e300;
  }

 private:
  [[nodiscard]] static bool compared(Plane plane) noexcept {
    return plane == Plane::key || plane == Plane::latent || plane == Plane::rope_part;
  }

  void add(const PlanCore& core, ScoreBatch& batch, const ScoredRow& row, bool norms,
           std::size_t layer, std::size_t plane, const PlaneShape& shape, std::int32_t table) {
    const std::size_t n = row.count;
    const auto padded = (static_cast<std::size_t>(shape.channels) + 31) / 32 * 32;
    const std::size_t width = padded * static_cast<std::size_t>(shape.heads);
    if (width == 0) return;
    const DistanceSteps steps = distance_steps(isa_, shape.type);
    const bool rotates = row.rotated && shape.rotary && table >= 0;
    if (rows_.size() < n * width) rows_.resize(n * width);
    from_.clear();
    for (std::size_t i = 0; i < n; ++i) {
      const Contribution& c = batch.inputs[row.begin + i];
      const Payload& payload = core.sources[c.source].payload();
      const std::int64_t at = payload_row(payload, layer, c.token);
      if (at < 0) return;  // a layer that lacks one contribution compares none
      const std::byte* from =
          payload.bytes.get() + payload.plane_offsets[plane] + at * shape.heads * row_bytes(shape);
      const bool whole = padded == static_cast<std::size_t>(shape.channels);
      const std::int64_t shift = -payload.positions[c.token];
      if (whole && steps.raw_widen != nullptr && !(rotates && shift != 0)) {
        from_.push_back({from, steps.raw_widen, static_cast<std::size_t>(block_bytes(shape.type))});
        continue;
      }
      float* to = rows_.data() + i * width;
      from_.push_back({reinterpret_cast<const std::byte*>(to), steps.widen, sizeof(float)});
      const bool rotated = rotates && shift != 0;
      const RopeSpec& rope = core.geometry->layers[layer].rope;
      const auto index =
          rotated ? static_cast<std::size_t>(
                        std::lower_bound(shifts_.begin(), shifts_.end(), shift) - shifts_.begin())
                  : std::size_t{0};
      const Rotation rotation{
          rotated ? tables_[static_cast<std::size_t>(table)].row(index) : nullptr, shape.channels,
          rope.first_channel, rope.rotary_channels, rope.pairing};
      if (whole) {
        rotated ? load_rotated(shape.type, isa_, rotation, from, shape.heads, to)
                : load_row(shape.type, isa_, from, static_cast<std::ptrdiff_t>(width), to);
        continue;
      }
      for (std::int32_t h = 0; h < shape.heads; ++h) {
        float* const head = to + static_cast<std::size_t>(h) * padded;
        load_row(shape.type, isa_, from + h * row_bytes(shape), shape.channels, head);
        std::fill(head + shape.channels, head + padded, 0.0F);
        if (rotated) rotate_channels(rotation, isa_, head);
      }
    }
    // Every pair in turn over a few channels, which stay in the first cache as doubles, and then
    // the next ones. The pair of a row and itself is its norm: its distance from zeros.
    const std::size_t pairs = norms ? n * (n + 1) / 2 : n * (n - 1) / 2;
    if (n != most_of_) {
      most_of_ = n;
      most_ = (std::max)(compared_bytes / sizeof(double) / (n + 1) / 32 * 32, std::size_t{128});
    }
    const std::size_t block = (std::min)(most_, width);
    if (lanes_.size() < pairs * 32 + 32) lanes_.resize(pairs * 32 + 32);
    if (wide_.size() < (n + 1) * block + 8) wide_.resize((n + 1) * block + 8);
    // no vector lies across lines
    double* const wide = wide_.data() + (64 - reinterpret_cast<std::uintptr_t>(wide_.data()) % 64) %
                                            64 / sizeof(double);
    if (norms) std::fill_n(wide + n * block, block, 0.0);
    for (std::size_t at = 0; at < width; at += block) {
      const std::size_t part = (std::min)(block, width - at);
      for (std::size_t i = 0; i < n; ++i)
        from_[i].widen(from_[i].data + at * from_[i].size, part, wide + i * block);
      std::size_t i = norms ? 0 : 1, j = 0;
      const auto next = [&](const double*& a, const double*& b) {
        a = wide + i * block;
        b = wide + (i == j ? n : j) * block;
        if (++j == (norms ? i + 1 : i)) ++i, j = 0;
      };
      for (std::size_t pair = 0; pair < pairs; pair += 2) {
        const double *a = nullptr, *b = nullptr, *c = wide, *d = wide;
        next(a, b);
        if (pair + 1 < pairs) next(c, d);
        steps.add(a, b, c, d, part, at == 0, lanes_.data() + pair * 32);
      }
    }
    double* lanes = lanes_.data();
    double* const distances = batch.distances.data() + row.pairs;
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < i; ++j, lanes += 32)
        distances[j * n + i] = distances[i * n + j] += steps.join(lanes);
      if (!norms) continue;
      batch.norms[row.begin + i] += steps.join(lanes);
      lanes += 32;
    }
  }

  /// Where the channels of a row come from: as they are stored, or as f32 without their rotation.
  struct ComparedRow {
    const std::byte* data;
    DistanceSteps::Widen widen;
    std::size_t size;  ///< bytes a channel
  };
  /// Of rows as doubles: what the first cache holds beside the sums.
  static constexpr std::size_t compared_bytes = 32768;

  Isa isa_ = best_isa();
  std::vector<std::size_t> layers_;
  std::vector<std::int64_t> shifts_;  // distinct, ascending
  std::vector<const RopeSpec*> specs_;
  std::vector<RopeTable> tables_;
  std::vector<std::int32_t> layer_table_;  // −1: keys are not rotated
  std::size_t most_of_ = 0;                // contributions
  std::size_t most_ = 0;                   // channels of a block of so many
  std::vector<float> rows_;  // (contributions, width) of those that do not come as they are stored
  std::vector<ComparedRow> from_;  // (contributions)
  std::vector<double> wide_;       // (contributions + 1, block) the last row: zeros
  std::vector<double> lanes_;      // (pairs, 32)
};

}  // namespace detail

// Weights that fusers give, worked out once an output token when a plan is made; weights of 0
// leave the alignment.

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
inline Status weigh(PlanCore& core, Alignment& alignment, ScoreCall score,
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
