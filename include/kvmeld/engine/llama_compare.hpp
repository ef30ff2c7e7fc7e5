#pragma once

/// Whether two states of one geometry hold the same cells and the same K and V bytes, wherever in
/// the bytes each cell lies.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <kvmeld/engine/llama_form.hpp>

KVMELD_NAMESPACE_BEGIN
namespace llama {
namespace detail {

/// One plane of one layer in two states: key rows and plain values are rows, transposed values are
/// columns.
struct ComparedPlane {
  const std::byte* a = nullptr;
  const std::byte* b = nullptr;
  std::size_t row = 0;      // bytes a cell
  std::size_t element = 0;  // bytes of an element; 0 where rows are whole
  std::size_t cells = 0;
};

[[nodiscard]] inline bool same_cell(const ComparedPlane& plane, std::size_t in_a,
                                    std::size_t in_b) noexcept {
  if (plane.element == 0)
    return std::memcmp(plane.a + in_a * plane.row, plane.b + in_b * plane.row, plane.row) == 0;
  const std::size_t stride = plane.cells * plane.element;
  for (std::size_t c = 0; c < plane.row / plane.element; ++c) {
    if (std::memcmp(plane.a + c * stride + in_a * plane.element,
                    plane.b + c * stride + in_b * plane.element, plane.element) != 0)
      return false;
  }
  return true;
}

}  // namespace detail

/// Compares two states cell by cell in position order; sequence ids and the order of cells do not
/// count.
///
/// Both layouts are those of `parse_state` or `make_state` for this geometry. O(bytes).
/// Errors: `probe_failed` with the layer and position of the first difference.
[[nodiscard]] inline Status same_state(std::span<const std::byte> a, const StateLayout& layout_a,
                                       std::span<const std::byte> b, const StateLayout& layout_b,
                                       const Geometry& geometry) {
  using detail::error;
  if (layout_a.sections.size() != layout_b.sections.size() ||
      (layout_a.form.transposed_values != layout_b.form.transposed_values &&
       layout_a.form.complete && layout_b.form.complete))
    return error(ErrorCode::probe_failed, "llama: the engine lays out ", layout_b.sections.size(),
                 " sections unlike the ", layout_a.sections.size(), " written");
  for (std::size_t s = 0; s < layout_a.sections.size(); ++s) {
    const StateSection& x = layout_a.sections[s];
    const StateSection& y = layout_b.sections[s];
    if (x.cells() != y.cells())
      return error(ErrorCode::probe_failed, "llama: ", x.cells(), " cells were written, ",
                   y.cells(), " are there");
    for (std::size_t i = 0; i < x.cells(); ++i) {
      const std::int64_t p = x.positions[static_cast<std::size_t>(x.by_position[i])];
      const std::int64_t q = y.positions[static_cast<std::size_t>(y.by_position[i])];
      if (p != q)
        return error(ErrorCode::probe_failed, "llama: position ", p, " was written, ", q,
                     " is there");
    }
    const bool same_order = x.by_position == y.by_position;
    for (std::size_t l = 0; l < x.layers.size(); ++l) {
      const std::vector<PlaneShape>& planes = geometry.layers[x.layers[l]].planes;
      for (std::size_t k = 0; k < planes.size(); ++k) {
        detail::ComparedPlane plane;
        plane.a = a.data() + (k == 0 ? x.keys : x.values)[l];
        plane.b = b.data() + (k == 0 ? y.keys : y.values)[l];
        plane.row = static_cast<std::size_t>(detail::cell_bytes(planes[k]));
        plane.cells = x.cells();
        if (k == 1 && layout_a.form.transposed_values)
          plane.element = static_cast<std::size_t>(block_bytes(planes[k].type));
        if (same_order &&
            (plane.cells == 0 || std::memcmp(plane.a, plane.b, plane.cells * plane.row) == 0))
          continue;
        for (std::size_t i = 0; i < x.cells(); ++i) {
          if (!detail::same_cell(plane, static_cast<std::size_t>(x.by_position[i]),
                                 static_cast<std::size_t>(y.by_position[i])))
            return error(ErrorCode::probe_failed, "llama: layer ", x.layers[l],
                         k == 0 ? " keys" : " values", " at position ",
                         x.positions[static_cast<std::size_t>(x.by_position[i])],
                         " came back with other bytes");
        }
      }
    }
  }
  return {};
}

}  // namespace llama
KVMELD_NAMESPACE_END
