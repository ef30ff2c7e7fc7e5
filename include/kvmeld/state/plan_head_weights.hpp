#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plan_core.hpp>

/// Weights that differ by head, from the alignment's numbering to that of the compiled rows.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Notes which rows of `head_weights` are each layer's: those of the first group that covers it,
/// before other groups come in front.
KVMELD_LAZY void number_head_rows(const Geometry& geometry, Alignment& alignment) {
  std::vector<std::uint32_t> next(alignment.groups.size());
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < next.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == next.size()) continue;  // refused when rows are compiled
    if (alignment.groups[g].head_rows.empty())
      alignment.groups[g].head_rows.assign(geometry.layers.size(), 0);
    alignment.groups[g].head_rows[l] = next[g];
    next[g] += static_cast<std::uint32_t>(layer_heads(geometry.layers[l]));
  }
}

/// The weights of one layer's heads, contribution by contribution become input by input.
KVMELD_LAZY std::vector<float> compile_head_weights(const Geometry& geometry,
                                                    const AlignmentGroup& alignment,
                                                    std::size_t layer, const GroupArrays& rows) {
  std::vector<float> out;
  if (alignment.head_weights.empty()) return out;
  const std::size_t at = alignment.head_rows[layer];
  const std::size_t contributions = alignment.contributions.size();
  for (std::size_t h = 0; h < layer_heads(geometry.layers[layer]); ++h) {
    const float* const weights = alignment.head_weights.data() + (at + h) * contributions;
    for (std::size_t i = 0; i < rows.inputs.size(); ++i)
      out.push_back(rounded_product(rows.inputs[i].weight, weights[rows.origin[i]]));
  }
  return out;
}

}  // namespace detail
KVMELD_NAMESPACE_END
