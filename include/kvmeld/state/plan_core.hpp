#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/rope_table.hpp>
#include <kvmeld/cache/seal.hpp>
#include <kvmeld/state/fragment_set.hpp>
#include <kvmeld/state/render_work.hpp>
#include <kvmeld/state/target.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One fragment encoding that a plan reads; keeps the bytes alive.
struct PlanSource {
  Fragment fragment;
  std::size_t payload_index = 0;
  float weight = 1.0F;
  bool own = false;  ///< made by the plan: a copy of the local cache, or mapped from another model (and then mostly un-rotated, all at position 0)

  KVMELD_LAZY [[nodiscard]] const Payload& payload() const noexcept { return fragment.payloads()[payload_index]; }
};

/// Owner of the arrays behind a `RowGroup`.
struct GroupArrays {
  std::vector<std::uint32_t> row_begin{0};
  std::vector<RowInput> inputs;
  std::vector<std::uint32_t> out_shift;
  std::vector<std::uint32_t> run;
  std::vector<std::uint32_t> direct;  // (inputs) turn straight to the output; empty without head weights
  std::vector<std::uint32_t> origin;  // (inputs) index of the contribution, likewise
};

/// The part of a plan that does not depend on the merger's type.
struct PlanCore {
  std::shared_ptr<const Geometry> geometry;
  std::vector<PlanSource> sources;
  std::size_t local_source = static_cast<std::size_t>(-1);  // the copy of the local cache, if there is one
  std::vector<std::int64_t> positions;       // (outputs)
  std::vector<TokenId> tokens;               // (outputs)
  std::vector<Hole> holes;
  std::vector<std::int64_t> shifts{0};       // distinct turns; index 0 turns nothing
  std::vector<GroupArrays> groups;
  std::vector<std::uint32_t> layer_group;    // (layers)
  std::vector<std::vector<float>> head_weights;  // (layers) each (head, input of the group), or empty
  std::vector<std::size_t> layer_needed_from;  // (layers) first output whose row some query reads
  std::vector<RopeTable> ropes;
  std::vector<std::int32_t> layer_rope;      // (layers) −1: keys are not turned
  std::int64_t bytes = 0;
  Digest128 render_id;

  KVMELD_LAZY [[nodiscard]] std::int64_t outputs() const noexcept { return static_cast<std::int64_t>(positions.size()); }
  /// Whether a run writes this output's row in this layer.
  [[nodiscard]] bool rendered(std::size_t layer, std::int64_t output) const noexcept {
    const GroupArrays& rows = groups[layer_group[layer]];
    return rows.row_begin[static_cast<std::size_t>(output)] != rows.row_begin[static_cast<std::size_t>(output) + 1];
  }
  KVMELD_LAZY [[nodiscard]] std::size_t planes() const noexcept {
    std::size_t count = 0;
    for (const LayerShape& layer : geometry->layers) count += layer.planes.size();
    return count;
  }
};

/// Numbers distinct turns. Positions repeat over layers, so this is called once a contribution and group, not a row.
class ShiftIndex {
 public:
  explicit ShiftIndex(std::vector<std::int64_t>& shifts) : shifts_(shifts) {}

  KVMELD_LAZY [[nodiscard]] std::uint32_t operator()(std::int64_t shift) {
    if (shift == 0) return 0;
    if (shift == last_shift_) return last_;
    const auto at = std::lower_bound(sorted_.begin(), sorted_.end(), std::pair<std::int64_t, std::uint32_t>{shift, 0});
    if (at != sorted_.end() && at->first == shift) {
      last_ = at->second;
    } else {
      last_ = static_cast<std::uint32_t>(shifts_.size());
      sorted_.insert(at, {shift, last_});
      shifts_.push_back(shift);
    }
    last_shift_ = shift;
    return last_;
  }

 private:
  std::vector<std::int64_t>& shifts_;
  std::vector<std::pair<std::int64_t, std::uint32_t>> sorted_;
  std::int64_t last_shift_ = 0;
  std::uint32_t last_ = 0;
};

/// Row of a token among those that a layer holds, or −1.
KVMELD_LAZY [[nodiscard]] std::int64_t payload_row(const Payload& payload, std::size_t layer, std::uint32_t token) {
  const TokenSet& set = payload.token_sets[payload.layer_set[layer]];
  if (set.all) return token;
  const auto at = std::lower_bound(set.present.begin(), set.present.end(), static_cast<std::int32_t>(token));
  return at != set.present.end() && *at == static_cast<std::int32_t>(token) ? at - set.present.begin() : -1;
}

/// What the frame of a row depends on.
struct FuserTraits {
  bool equivariant = false;
  bool keeps_single = false;
};

/// Compiles the rows of one layer (and of all that hold the same tokens): token indices become payload rows, positions become turns.
///
/// The frame: one contribution is turned straight to its output position; equally turned contributions of a
/// rotation-equivariant fuser are fused as they lie and turned once; anything else is fused un-rotated.
KVMELD_LAZY void compile_rows(const PlanCore& core, const AlignmentGroup& alignment, std::size_t layer, FuserTraits fuser,
                         std::span<const std::uint8_t> recompute, ShiftIndex& shift_of, GroupArrays& out) {
  const bool pre_rope = core.geometry->layers[layer].key_form == KeyForm::pre_rope;
  const bool by_head = !alignment.head_weights.empty();
  for (std::size_t o = 0; o < core.positions.size(); ++o) {
    const std::size_t first = out.inputs.size();
    std::uint32_t out_shift = 0;
    if (recompute[o] == 0) {
      bool equal = true, any = false;
      std::int64_t common = 0;
      for (const Contribution& c : alignment.row(o)) {
        const Payload& payload = core.sources[c.source].payload();
        const std::int64_t row = payload_row(payload, layer, c.token);
        if (row < 0) continue;
        if (by_head) out.origin.push_back(static_cast<std::uint32_t>(&c - alignment.contributions.data()));
        const std::int64_t shift = pre_rope ? 0 : core.positions[o] - payload.positions[c.token];
        if (!by_head || c.source != core.local_source) {  // the local cache has its heads to itself
          equal = equal && (!any || shift == common);
          common = shift;
          any = true;
        }
        out.inputs.push_back({c.source, static_cast<std::uint32_t>(row), rounded_product(c.weight, core.sources[c.source].weight), shift_of(shift)});
      }
      if (by_head && !any) {  // nothing but the local cache: the heads of the set lack their row
        out.inputs.resize(first);
        out.origin.resize(first);
      }
      const std::size_t count = out.inputs.size() - first;
      for (std::size_t i = first; by_head && i < out.inputs.size(); ++i) out.direct.push_back(out.inputs[i].shift);
      if (!pre_rope && (count > 1 || (count == 1 && !fuser.keeps_single))) {
        if (equal && fuser.equivariant) {
          out_shift = shift_of(common);
          for (std::size_t i = first; i < out.inputs.size(); ++i) out.inputs[i].shift = 0;
        } else {
          out_shift = shift_of(core.positions[o]);
          std::size_t i = first;
          for (const Contribution& c : alignment.row(o)) {
            const Payload& payload = core.sources[c.source].payload();
            if (payload_row(payload, layer, c.token) >= 0) out.inputs[i++].shift = shift_of(-payload.positions[c.token]);
          }
        }
      }
    }
    out.out_shift.push_back(out_shift);
    out.row_begin.push_back(static_cast<std::uint32_t>(out.inputs.size()));
  }
  const std::size_t n = core.positions.size();
  out.run.assign(n, 1);
  const auto single = [&](std::size_t o) { return out.row_begin[o + 1] - out.row_begin[o] == 1; };
  for (std::size_t o = n; o-- > 1;) {
    if (!single(o) || !single(o - 1)) continue;
    const RowInput& a = out.inputs[out.row_begin[o - 1]];
    const RowInput& b = out.inputs[out.row_begin[o]];
    if (a.source == b.source && a.row + 1 == b.row && a.shift == b.shift) out.run[o - 1] = out.run[o] + 1;
  }
}

/// Heads of a layer: those of its first plane.
KVMELD_LAZY [[nodiscard]] std::size_t layer_heads(const LayerShape& layer) noexcept {
  return layer.planes.empty() ? 0 : static_cast<std::size_t>(layer.planes[0].heads);
}

/// Notes which rows of `head_weights` are each layer's: those of the first group that covers it, before other groups come in front.
KVMELD_LAZY void number_head_rows(const Geometry& geometry, Alignment& alignment) {
  std::vector<std::uint32_t> next(alignment.groups.size());
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < next.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == next.size()) continue;  // refused when rows are compiled
    if (alignment.groups[g].head_rows.empty()) alignment.groups[g].head_rows.assign(geometry.layers.size(), 0);
    alignment.groups[g].head_rows[l] = next[g];
    next[g] += static_cast<std::uint32_t>(layer_heads(geometry.layers[l]));
  }
}

/// The weights of one layer's heads, contribution by contribution become input by input.
KVMELD_LAZY std::vector<float> compile_head_weights(const Geometry& geometry, const AlignmentGroup& alignment, std::size_t layer,
                                                    const GroupArrays& rows) {
  std::vector<float> out;
  if (alignment.head_weights.empty()) return out;
  const std::size_t at = alignment.head_rows[layer];
  const std::size_t contributions = alignment.contributions.size();
  for (std::size_t h = 0; h < layer_heads(geometry.layers[layer]); ++h) {
    const float* const weights = alignment.head_weights.data() + (at + h) * contributions;
    for (std::size_t i = 0; i < rows.inputs.size(); ++i) out.push_back(rounded_product(rows.inputs[i].weight, weights[rows.origin[i]]));
  }
  return out;
}

/// Which outputs the engine has to compute, and from which output on each layer's rows are read (`layer_needed_from`).
///
/// A window of w needs no row for tokens that no query sees; queries are what comes after the last output, and the holes
/// themselves, so a hole can ask for earlier rows whose absence makes further holes: repeated until nothing changes.
KVMELD_LAZY std::vector<std::uint8_t> find_holes(PlanCore& core, std::span<const std::uint8_t> recompute) {
  std::vector<std::uint8_t> is_hole(recompute.begin(), recompute.end());
  const Geometry& geometry = *core.geometry;
  core.layer_needed_from.assign(geometry.layers.size(), 0);
  for (bool changed = true; changed;) {
    changed = false;
    const auto first_hole = static_cast<std::size_t>(std::find(is_hole.begin(), is_hole.end(), std::uint8_t{1}) - is_hole.begin());
    const std::int64_t query = first_hole < is_hole.size() ? core.positions[first_hole] : core.positions.empty() ? 0 : core.positions.back() + 1;
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      if (geometry.layers[l].planes.empty()) continue;
      const std::int64_t window = geometry.layers[l].window;
      std::size_t from = 0;
      while (window > 0 && from < core.positions.size() && core.positions[from] <= query - window) ++from;
      core.layer_needed_from[l] = from;
      const GroupArrays& rows = core.groups[core.layer_group[l]];
      for (std::size_t o = from; o < is_hole.size(); ++o) {
        if (is_hole[o] == 0 && rows.row_begin[o] == rows.row_begin[o + 1]) is_hole[o] = changed = true;
      }
    }
  }
  return is_hole;
}

/// Compiles every layer group, finds the holes, builds the rope tables.
KVMELD_LAZY Status compile(PlanCore& core, const Alignment& alignment, FuserTraits fuser, std::span<const std::uint8_t> recompute,
                      std::int64_t context_length) {
  const Geometry& geometry = *core.geometry;
  ShiftIndex shift_of(core.shifts);
  struct Key {
    std::size_t alignment_group;
    bool pre_rope;
    std::vector<const TokenSet*> sets;
  };
  std::vector<Key> keys;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < alignment.groups.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == alignment.groups.size()) return error(ErrorCode::invalid_argument, "no group of the alignment covers layer ", l);
    Key key{g, geometry.layers[l].key_form == KeyForm::pre_rope, {}};
    for (const PlanSource& source : core.sources) {
      key.sets.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    }
    std::size_t k = 0;
    while (k < keys.size() &&
           !(keys[k].alignment_group == g && keys[k].pre_rope == key.pre_rope &&
             std::equal(keys[k].sets.begin(), keys[k].sets.end(), key.sets.begin(), [](auto* a, auto* b) { return *a == *b; }))) {
      ++k;
    }
    if (k == keys.size()) {
      keys.push_back(std::move(key));
      compile_rows(core, alignment.groups[g], l, fuser, recompute, shift_of, core.groups.emplace_back());
    }
    core.layer_group.push_back(static_cast<std::uint32_t>(k));
    const GroupArrays& rows = core.groups[k];
    core.head_weights.push_back(compile_head_weights(geometry, alignment.groups[g], l, rows));
    std::int64_t token_bytes = 0;
    for (const PlaneShape& shape : geometry.layers[l].planes) token_bytes += row_bytes(shape) * shape.heads;
    for (std::size_t o = 0; o < core.positions.size(); ++o) core.bytes += rows.row_begin[o] == rows.row_begin[o + 1] ? 0 : token_bytes;
  }
  const std::vector<std::uint8_t> is_hole = find_holes(core, recompute);
  for (std::size_t o = 0; o < is_hole.size(); ++o) {
    if (is_hole[o] != 0) core.holes.push_back({static_cast<std::int64_t>(o), core.positions[o], core.tokens[o]});
  }
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const LayerShape& layer = geometry.layers[l];
    std::int32_t table = -1;
    const bool turned = core.shifts.size() > 1 && layer.rope.kind != RopeKind::none && layer.key_form == KeyForm::post_rope &&
                        std::any_of(layer.planes.begin(), layer.planes.end(), [](const PlaneShape& p) { return p.rotary; });
    if (turned) {
      for (const PlaneShape& shape : layer.planes) {
        if (shape.rotary && shape.hadamard != 0) {
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ", shape.hadamard,
                       " cannot be turned; use unquantised keys, or positions that do not move");
        }
      }
      for (std::size_t m = 0; m < l && table < 0; ++m) {
        if (core.layer_rope[m] >= 0 && geometry.layers[m].rope == layer.rope) table = core.layer_rope[m];
      }
      if (table < 0) {
        auto built = RopeTable::build(layer.rope, span_of(core.shifts), context_length);
        if (!built) return built.error();
        table = static_cast<std::int32_t>(core.ropes.size());
        core.ropes.push_back(*std::move(built));
      }
    }
    core.layer_rope.push_back(table);
  }
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
