#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/plan_group_rows.hpp>
#include <kvmeld/state/plan_head_weights.hpp>
#include <kvmeld/state/plan_holes.hpp>
#include <kvmeld/tensor/span_of.hpp>

/// An alignment becomes what a run executes.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A table of turns for each layer whose keys are turned; layers of one RoPE share one. Errors:
/// `unsupported` for keys in a Hadamard basis; those of `RopeTable::build`.
KVMELD_LAZY Status build_ropes(PlanCore& core, std::int64_t context_length) {
  const Geometry& geometry = *core.geometry;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const LayerShape& layer = geometry.layers[l];
    std::int32_t table = -1;
    const bool turned = core.shifts.size() > 1 && layer.rope.kind != RopeKind::none &&
                        layer.key_form == KeyForm::post_rope &&
                        std::any_of(layer.planes.begin(), layer.planes.end(),
                                    [](const PlaneShape& p) { return p.rotary; });
    if (turned) {
      for (const PlaneShape& shape : layer.planes) {
        if (shape.rotary && shape.hadamard != 0) {
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ",
                       shape.hadamard,
                       " cannot be turned; use unquantised keys, or positions that do not move");
        }
      }
      for (std::size_t m = 0; m < l && table < 0; ++m) {
        if (core.layer_rope[m] >= 0 && geometry.layers[m].rope == layer.rope)
          table = core.layer_rope[m];
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

/// Compiles the rows of every layer; outputs of `recompute` get none. Layers that read alike share
/// a group.
KVMELD_LAZY Status compile_groups(PlanCore& core, const Alignment& alignment, FuserTraits fuser,
                                  std::span<const std::uint8_t> recompute) {
  const Geometry& geometry = *core.geometry;
  core.shifts = {0};
  core.groups.clear();
  core.layer_group.clear();
  core.head_weights.clear();
  core.bytes = 0;
  ShiftIndex shift_of(core.shifts);
  struct Key {
    std::size_t alignment_group;
    bool pre_rope;
    std::vector<const TokenSet*> sets;

    [[nodiscard]] bool alike(const Key& other) const {
      return alignment_group == other.alignment_group && pre_rope == other.pre_rope &&
             std::equal(sets.begin(), sets.end(), other.sets.begin(),
                        [](const TokenSet* a, const TokenSet* b) { return *a == *b; });
    }
  };
  std::vector<Key> keys;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < alignment.groups.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == alignment.groups.size())
      return error(ErrorCode::invalid_argument, "no group of the alignment covers layer ", l);
    Key key{g, geometry.layers[l].key_form == KeyForm::pre_rope, {}};
    for (const PlanSource& source : core.sources) {
      key.sets.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    }
    std::size_t k = 0;
    while (k < keys.size() && !keys[k].alike(key)) ++k;
    if (k == keys.size()) {
      keys.push_back(std::move(key));
      compile_rows(core, alignment.groups[g], l, fuser, recompute, shift_of,
                   core.groups.emplace_back());
    }
    core.layer_group.push_back(static_cast<std::uint32_t>(k));
    const GroupArrays& rows = core.groups[k];
    core.head_weights.push_back(compile_head_weights(geometry, alignment.groups[g], l, rows));
    std::int64_t token_bytes = 0;
    for (const PlaneShape& shape : geometry.layers[l].planes)
      token_bytes += row_bytes(shape) * shape.heads;
    for (std::size_t o = 0; o < core.positions.size(); ++o)
      core.bytes += rows.row_begin[o] == rows.row_begin[o + 1] ? 0 : token_bytes;
  }
  return {};
}

/// Compiles every layer group, finds the holes, builds the rope tables. An output that one layer
/// lacks is the engine's in all of them: a hole has no rows, whatever contributions other layers
/// hold for it.
KVMELD_LAZY Status compile(PlanCore& core, const Alignment& alignment, FuserTraits fuser,
                           std::span<const std::uint8_t> recompute, std::int64_t context_length) {
  std::vector<std::uint8_t> is_hole(recompute.begin(), recompute.end());
  for (bool found = true; found;) {
    KVMELD_TRY(compile_groups(core, alignment, fuser, span_of(is_hole)));
    std::vector<std::uint8_t> holes = find_holes(core, span_of(is_hole));
    found = holes != is_hole;
    is_hole = std::move(holes);
  }
  for (std::size_t o = 0; o < is_hole.size(); ++o) {
    if (is_hole[o] != 0)
      core.holes.push_back({static_cast<std::int64_t>(o), core.positions[o], core.tokens[o]});
  }
  return build_ropes(core, context_length);
}

}  // namespace detail
KVMELD_NAMESPACE_END
