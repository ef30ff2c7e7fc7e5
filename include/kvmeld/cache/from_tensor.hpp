#pragma once

/// Planes from a caller's own tensor type.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/cache/check_view.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/tensor_view.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// A view that may be written where the tensor's elements may.
template <class View>
using TensorByte =
    std::conditional_t<std::is_const_v<typename View::element_type>, const std::byte, std::byte>;

}  // namespace detail

/// Views a tensor (token, head, channel) as a plane. O(1).
///
/// Strides are the tensor's, so transposed and sliced views need no copy. `shape` says what the
/// plane is; its type, heads and channels must be the tensor's. An element of `q8_0_block` counts
/// as 32 channels. A caller's own half or bfloat16 type takes part through a specialisation of
/// `element_type_of`. Errors: `geometry_mismatch` (type, heads or channels), `aliasing` (a tensor
/// that may be written steps onto itself), and those of `check_view`.
template <TensorView View>
[[nodiscard]] Result<BasicPlaneRef<detail::TensorByte<View>>> plane_from_tensor(
    const View& view, const PlaneShape& shape) {
  static_assert(View::rank() == 3,
                "kvmeld::plane_from_tensor takes a TensorView of rank 3: (token, head, channel)");
  using Element = std::remove_cv_t<typename View::element_type>;
  constexpr ElementType type = element_type_of_v<Element>;
  static_assert(sizeof(Element) == block_bytes(type),
                "element_type_of names a type of another size");
  constexpr std::int64_t unit = block_elements(type);
  const auto extent = [&](std::size_t a) { return static_cast<std::int64_t>(view.extent(a)); };
  const auto stride = [&](std::size_t a) { return static_cast<std::int64_t>(view.stride(a)); };
  if (shape.type != type) {
    return detail::error(ErrorCode::geometry_mismatch, "the tensor holds ", to_string(type),
                         ", the plane declares ", to_string(shape.type));
  }
  for (std::size_t a = 0; a < 3; ++a) {
    if (extent(a) < 0 || extent(a) > detail::max_extent / unit ||
        stride(a) > detail::max_extent / unit || stride(a) < -detail::max_extent / unit) {
      return detail::error(ErrorCode::invalid_argument, "axis ", a, " has extent ", extent(a),
                           " and stride ", stride(a));
    }
  }
  if (extent(1) != shape.heads || extent(2) * unit != shape.channels) {
    return detail::error(ErrorCode::geometry_mismatch, "the tensor has ", extent(1), " heads of ",
                         extent(2) * unit, " channels, the plane ", shape.heads, " of ",
                         shape.channels);
  }
  BasicPlaneRef<detail::TensorByte<View>> plane;
  plane.data = reinterpret_cast<detail::TensorByte<View>*>(view.data_handle());
  plane.shape = shape;
  plane.tokens = extent(0);
  plane.token_stride = stride(0) * unit;
  plane.head_stride = stride(1) * unit;
  plane.channel_stride =
      unit == 1 ? stride(2) : (stride(2) == 1 || extent(2) <= 1 ? 1 : stride(2) * unit);
  KVMELD_TRY(detail::check_strides(plane));
  if (plane.tokens > 0 && shape.heads > 0 && shape.channels > 0 && plane.data == nullptr) {
    return detail::error(ErrorCode::invalid_argument, "a tensor of ", plane.tokens,
                         " tokens over no memory");
  }
  if constexpr (!std::is_const_v<typename View::element_type>) KVMELD_TRY(check_writable(plane));
  return plane;
}

/// Views tensors (token, head, channel), one for each plane, layer-major, as a cache. O(planes).
///
/// Errors: those of `plane_from_tensor`; `token_count_mismatch` where tensors hold different
/// numbers of tokens; `unsupported` for planes with scales, which a tensor does not carry.
template <TensorView View>
[[nodiscard]] Result<BasicKvCacheRef<detail::TensorByte<View>>> cache_from_tensors(
    std::shared_ptr<const Geometry> geometry, const std::vector<View>& tensors) {
  if (geometry == nullptr)
    return detail::error(ErrorCode::invalid_argument, "a cache needs a geometry");
  KVMELD_TRY(validate(*geometry));
  std::vector<BasicPlaneRef<detail::TensorByte<View>>> planes;
  for (const LayerShape& layer : geometry->layers) {
    for (const PlaneShape& shape : layer.planes) {
      if (planes.size() == tensors.size()) {
        return detail::error(ErrorCode::invalid_argument, tensors.size(),
                             " tensors, and the geometry declares more planes");
      }
      if (shape.scales != ScaleScheme::none) {
        return detail::error(ErrorCode::unsupported, "plane ", planes.size(),
                             " has scales; set `PlaneRef::scales` of a plane_from_tensor yourself");
      }
      auto plane = plane_from_tensor(tensors[planes.size()], shape);
      if (!plane) return plane.error();
      if (!planes.empty() && plane->tokens != planes[0].tokens) {
        return detail::error(ErrorCode::token_count_mismatch, "tensor ", planes.size(), " holds ",
                             plane->tokens, " tokens, tensor 0 holds ", planes[0].tokens);
      }
      planes.push_back(*plane);
    }
  }
  if (planes.size() != tensors.size()) {
    return detail::error(ErrorCode::invalid_argument, tensors.size(), " tensors for ",
                         planes.size(), " planes");
  }
  const std::int64_t tokens = planes.empty() ? 0 : planes[0].tokens;
  return BasicKvCacheRef<detail::TensorByte<View>>(std::move(geometry), std::move(planes), tokens);
}

KVMELD_NAMESPACE_END
