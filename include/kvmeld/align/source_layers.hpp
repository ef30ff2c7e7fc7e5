#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <kvmeld/align/projection_map.hpp>

KVMELD_NAMESPACE_BEGIN

/// The source layer as far from the last one as the target layer is: deep layers meet deep layers,
/// and the first source layer serves all target layers before it.
[[nodiscard]] inline std::vector<std::int32_t> last_aligned(std::int32_t target_layer,
                                                            std::int32_t target_layers,
                                                            std::int32_t source_layers) {
  return {(std::max)(0, source_layers - target_layers + target_layer)};
}

/// The k source layers whose relative depth, (l + ½) ÷ layers, is nearest to the target layer's, in
/// ascending order; ties go to the smaller. All of them where k is larger.
[[nodiscard]] inline std::vector<std::int32_t> k_nearest(std::int32_t target_layer,
                                                         std::int32_t target_layers,
                                                         std::int32_t source_layers,
                                                         std::int32_t k) {
  // Distances times 2 · target_layers · source_layers, in integers.
  const auto distance = [&](std::int32_t s) {
    const std::int64_t d = (2 * std::int64_t{s} + 1) * target_layers -
                           (2 * std::int64_t{target_layer} + 1) * source_layers;
    return d < 0 ? -d : d;
  };
  std::int32_t first = 0;  // the nearest k are consecutive
  while (first + k < source_layers && distance(first + k) < distance(first)) ++first;
  std::vector<std::int32_t> out;
  for (std::int32_t s = first; s < (std::min)(first + k, source_layers); ++s) out.push_back(s);
  return out;
}

/// Every head of some source layers: layers in the order given, heads ascending.
[[nodiscard]] inline std::vector<HeadRef> heads_of(const Geometry& source, Plane plane,
                                                   const std::vector<std::int32_t>& layers) {
  std::vector<HeadRef> out;
  for (const std::int32_t l : layers) {
    const PlaneShape* const shape =
        detail::find_plane(source.layers[static_cast<std::size_t>(l)], plane);
    for (std::int32_t h = 0; shape != nullptr && h < shape->heads; ++h) out.push_back({l, h});
  }
  return out;
}

KVMELD_NAMESPACE_END
