#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/fuse/distances.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plan_core.hpp>

/// Weights that fusers give, worked out once an output token when a plan is made; weights of 0 leave the alignment.

KVMELD_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::size_t max_scored = 2048;  ///< contributions of one output that are compared in pairs

/// Several rows whose contributions are compared in one pass over the layers.
struct ScoredRow {
  std::size_t output = 0;
  bool turned = false;                 ///< positions differ: keys are compared un-rotated
  std::vector<Contribution> inputs;    ///< ascending by fragment id, then token
  std::vector<std::size_t> place;      ///< where each of `inputs` stands in the alignment's row
  std::vector<double> distances;       ///< (n, n)
  std::vector<double> norms;           ///< (n)
};

/// Measures squared distances between the contributions of rows: all layers of one group, ascending.
class RowDistances {
 public:
  /// @param layers  those of the group; context_length: picks frequencies where they depend on it.
  KVMELD_LAZY static Result<RowDistances> of(const PlanCore& core, std::vector<std::size_t> layers, const AlignmentGroup& group,
                                             std::int64_t context_length) {
    RowDistances out;
    out.layers_ = std::move(layers);
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      if (!unequal(core, group.row(o))) continue;
      for (const Contribution& c : group.row(o)) out.shifts_.push_back(-core.sources[c.source].payload().positions[c.token]);
    }
    std::sort(out.shifts_.begin(), out.shifts_.end());
    out.shifts_.erase(std::unique(out.shifts_.begin(), out.shifts_.end()), out.shifts_.end());
    for (const std::size_t l : out.layers_) {
      const LayerShape& layer = core.geometry->layers[l];
      const bool turns = !out.shifts_.empty() && layer.rope.kind != RopeKind::none && layer.key_form == KeyForm::post_rope;
      std::int32_t table = -1;
      for (std::size_t p = 0; p < layer.planes.size(); ++p) {
        if (!turns || !layer.planes[p].rotary || !compared(layer.planes[p].plane)) continue;
        if (layer.planes[p].hadamard != 0) {
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ", layer.planes[p].hadamard,
                       " at different positions cannot be compared; use unquantised keys, or positions that do not differ");
        }
        table = 0;
      }
      if (table == 0) {
        std::size_t known = 0;
        while (known < out.specs_.size() && !(*out.specs_[known] == layer.rope)) ++known;
        if (known == out.specs_.size()) {
          auto built = RopeTable::build(layer.rope, out.shifts_, context_length);
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
      if (core.sources[c.source].payload().positions[c.token] != core.sources[row[0].source].payload().positions[row[0].token]) return true;
    }
    return false;
  }

  /// Fills distances and norms of some rows, layer by layer, so that payloads are read in order.
  KVMELD_LAZY void measure(const PlanCore& core, std::span<ScoredRow> rows) {
    for (ScoredRow& row : rows) {
      row.distances.assign(row.inputs.size() * row.inputs.size(), 0.0);
      row.norms.assign(row.inputs.size(), 0.0);
    }
    std::size_t plane = 0, layer = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      for (; layer < layers_[i]; ++layer) plane += core.geometry->layers[layer].planes.size();
      const LayerShape& shape = core.geometry->layers[layer];
      for (std::size_t p = 0; p < shape.planes.size(); ++p) {
        if (!compared(shape.planes[p].plane)) continue;
        for (ScoredRow& row : rows) add(core, row, layer, plane + p, shape.planes[p], layer_table_[i]);
      }
    }
    for (ScoredRow& row : rows) {  // what overflowed is far from everything, itself perhaps a liar's
      for (double& d : row.distances) d = std::isfinite(d) ? d : 1e300;
      for (double& d : row.norms) d = std::isfinite(d) ? d : 1e300;
    }
  }

 private:
  [[nodiscard]] static bool compared(Plane plane) noexcept {
    return plane == Plane::key || plane == Plane::latent || plane == Plane::rope_part;
  }

  KVMELD_LAZY void add(const PlanCore& core, ScoredRow& row, std::size_t layer, std::size_t plane, const PlaneShape& shape, std::int32_t table) {
    const std::size_t n = row.inputs.size();
    const auto padded = (static_cast<std::size_t>(shape.channels) + 31) / 32 * 32;
    const std::size_t width = padded * static_cast<std::size_t>(shape.heads);
    if (rows_.size() < n * width) rows_.resize(n * width);
    if (zeros_.size() < width) zeros_.resize(width);  // norms are distances from it
    for (std::size_t i = 0; i < n; ++i) {
      const Contribution& c = row.inputs[i];
      const Payload& payload = core.sources[c.source].payload();
      const std::int64_t at = payload_row(payload, layer, c.token);
      if (at < 0) return;  // a layer that lacks one contribution compares none
      const std::byte* from = payload.bytes.get() + payload.plane_offsets[plane] + at * shape.heads * row_bytes(shape);
      float* to = rows_.data() + i * width;
      if (padded == static_cast<std::size_t>(shape.channels)) {
        load_row(shape.type, isa_, from, static_cast<std::ptrdiff_t>(width), to);
      } else {
        for (std::int32_t h = 0; h < shape.heads; ++h) {
          float* const head = to + static_cast<std::size_t>(h) * padded;
          load_row(shape.type, isa_, from + h * row_bytes(shape), shape.channels, head);
          std::fill(head + shape.channels, head + padded, 0.0F);
        }
      }
      if (!row.turned || !shape.rotary || table < 0) continue;
      const std::int64_t shift = -payload.positions[c.token];
      const auto index = static_cast<std::size_t>(std::lower_bound(shifts_.begin(), shifts_.end(), shift) - shifts_.begin());
      const RopeSpec& rope = core.geometry->layers[layer].rope;
      const Turn turn{tables_[static_cast<std::size_t>(table)].row(index), shape.channels, rope.first_channel, rope.rotary_channels, rope.pairing};
      for (std::int32_t h = 0; h < shape.heads && shift != 0; ++h) turn_row(turn, isa_, to + static_cast<std::size_t>(h) * padded);
    }
    const LaneDistance distance = lane_distance(isa_);
    const auto length = static_cast<std::ptrdiff_t>(width);
    for (std::size_t i = 0; i < n; ++i) {
      row.norms[i] += distance(rows_.data() + i * width, zeros_.data(), length);
      for (std::size_t j = 0; j < i; ++j) {
        row.distances[i * n + j] += distance(rows_.data() + i * width, rows_.data() + j * width, length);
        row.distances[j * n + i] = row.distances[i * n + j];
      }
    }
  }

  Isa isa_ = best_isa();
  std::vector<std::size_t> layers_;
  std::vector<std::int64_t> shifts_;            // distinct, ascending
  std::vector<const RopeSpec*> specs_;
  std::vector<RopeTable> tables_;
  std::vector<std::int32_t> layer_table_;       // −1: keys are not turned
  std::vector<float> rows_;   // (contributions, width)
  std::vector<float> zeros_;  // (width)
};

/// A fuser's `score`, of any type.
struct ScoreCall {
  const void* fuser = nullptr;
  Status (*call)(const void*, const Scoring&, std::span<double>) = nullptr;
};

template <class F>
[[nodiscard]] ScoreCall score_call([[maybe_unused]] const F& fuser) {
  if constexpr (ScoreForm<F>) {
    return {&fuser, [](const void* f, const Scoring& scoring, std::span<double> weights) { return static_cast<const F*>(f)->score(scoring, weights); }};
  } else {
    return {};
  }
}

/// The sources of a plan give their weights to the contributions; then `score` has its say, and weights of 0 leave their rows.
///
/// Errors: `non_finite` for weights that are negative, not finite, or all 0; `oversized`; those of the score.
KVMELD_LAZY Status weigh(PlanCore& core, Alignment& alignment, ScoreCall score, std::span<const std::uint8_t> recompute, std::int64_t context_length) {
  std::vector<std::size_t> covered(core.geometry->layers.size());
  for (std::size_t l = 0; l < covered.size(); ++l) {
    while (covered[l] < alignment.groups.size() && !alignment.groups[covered[l]].layers.contains(l)) ++covered[l];
  }
  for (std::size_t g = 0; g < alignment.groups.size(); ++g) {
    AlignmentGroup& group = alignment.groups[g];
    for (Contribution& c : group.contributions) c.weight = rounded_product(c.weight, core.sources[c.source].weight);
    std::vector<ScoredRow> rows;
    std::unique_ptr<RowDistances> distances;
    std::vector<double> weights;
    std::size_t pairs = 0;
    const auto finish_rows = [&]() -> Status {
      if (rows.empty()) return {};
      distances->measure(core, rows);
      for (ScoredRow& row : rows) {
        weights.clear();
        for (const Contribution& c : row.inputs) weights.push_back(static_cast<double>(c.weight));
        const Status scored = score.call(score.fuser, Scoring{row.distances, row.norms}, weights);
        if (!scored) {
          return error(scored.code(), "output ", row.output, " at position ", core.positions[row.output], ": ", scored.message());
        }
        for (std::size_t i = 0; i < weights.size(); ++i) {
          group.contributions[group.row_begin[row.output] + row.place[i]].weight = static_cast<float>(weights[i]);
        }
      }
      rows.clear();
      pairs = 0;
      return {};
    };
    const auto check_row = [&](std::size_t o, const char* whose) -> Status {
      double total = 0;
      for (const Contribution& c : group.row(o)) {
        if (!(c.weight >= 0.0F) || !std::isfinite(c.weight)) {
          return error(ErrorCode::non_finite, "the ", group.row(o).size(), " weights of output ", o, " at position ", core.positions[o], " hold ", c.weight,
                       " for fragment ", core.sources[c.source].fragment.id().hex(), whose, "; weights are finite and at least 0");
        }
        total += static_cast<double>(c.weight);
      }
      if (total > 0) return {};
      return error(ErrorCode::non_finite, "the ", group.row(o).size(), " weights of output ", o, " at position ", core.positions[o], " add up to ", total,
                   whose, "; one at least must be above 0");
    };
    const auto fused = [&](std::size_t o) { return group.row(o).size() > 1 && recompute[o] == 0; };
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      if (!fused(o)) continue;
      KVMELD_TRY(check_row(o, ""));
      if (score.call == nullptr) continue;
      const std::span<const Contribution> inputs = group.row(o);
      if (inputs.size() > max_scored) {
        return error(ErrorCode::oversized, "output ", o, " has ", inputs.size(), " contributions, of which at most ", max_scored, " can be scored");
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
      ScoredRow row{o, RowDistances::unequal(core, inputs), {}, {}, {}, {}};
      for (std::size_t i = 0; i < inputs.size(); ++i) row.place.push_back(i);
      std::sort(row.place.begin(), row.place.end(), [&](std::size_t a, std::size_t b) {
        const FragmentId& x = core.sources[inputs[a].source].fragment.id();
        const FragmentId& y = core.sources[inputs[b].source].fragment.id();
        return x != y ? x < y : inputs[a].token != inputs[b].token ? inputs[a].token < inputs[b].token : a < b;
      });
      for (const std::size_t i : row.place) row.inputs.push_back(inputs[i]);
      pairs += inputs.size() * inputs.size();
      rows.push_back(std::move(row));
      if (rows.size() == 64 || pairs >= 65536) KVMELD_TRY(finish_rows());
    }
    KVMELD_TRY(finish_rows());
    // Rows close ranks over what weighs nothing.
    std::uint32_t kept = 0, begin = 0;
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      const std::uint32_t end = group.row_begin[o + 1];
      if (score.call != nullptr && end - begin > 1 && recompute[o] == 0) {
        group.row_begin[o] = begin;  // as it was, for the check
        KVMELD_TRY(check_row(o, " after scoring"));
      }
      const bool drops = end - begin > 1 && recompute[o] == 0;
      group.row_begin[o] = kept;
      for (std::uint32_t i = begin; i < end; ++i) {
        if (!drops || group.contributions[i].weight != 0.0F) group.contributions[kept++] = group.contributions[i];
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
