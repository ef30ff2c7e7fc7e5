#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache/plane_ref.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Bytes of one row (one token, one head) of a plane in canonical form.
[[nodiscard]] KVMELD_HD constexpr std::int64_t row_bytes(const PlaneShape& shape) noexcept {
  return byte_size(shape.type, shape.channels);
}

/// Scales that one (token, head) row of a plane carries in canonical form; a `per_tensor` scale is
/// kept for each row.
[[nodiscard]] constexpr std::int64_t row_scales(const PlaneShape& shape) noexcept {
  switch (shape.scales) {
    case ScaleScheme::none:
      return 0;
    case ScaleScheme::per_tensor:
    case ScaleScheme::per_token_head:
      return 1;
    case ScaleScheme::per_channel_group:
      return shape.scale_group == 0 ? 0 : shape.channels / shape.scale_group;
  }
  return 0;
}

/// Whether all heads of a slot lie in one run of memory.
template <class Byte>
[[nodiscard]] bool contiguous_heads(const BasicPlaneRef<Byte>& plane) noexcept {
  return plane.contiguous_rows() &&
         (plane.head_stride == plane.shape.channels || plane.shape.heads == 1);
}

/// Whether all heads of consecutive tokens lie in one run of memory.
template <class Byte>
[[nodiscard]] bool contiguous_tokens(const BasicPlaneRef<Byte>& plane) noexcept {
  return contiguous_heads(plane) && plane.slots.kind == SlotKind::identity &&
         plane.slots.block_size == 0 &&
         plane.token_stride == static_cast<std::int64_t>(plane.shape.heads) * plane.shape.channels;
}

/// Copies bytes that do not overlap; planes without channels have none, and no memory either.
KVMELD_LAZY inline void copy_bytes(std::byte* to, const std::byte* from,
                                   std::int64_t count) noexcept {
  if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count));
}

/// Copies the elements of one row out of a view into contiguous bytes.
KVMELD_LAZY inline void gather_row(const PlaneRef& plane, std::int64_t slot, std::int64_t head,
                                   std::byte* out) noexcept {
  const std::int64_t offset = plane.row_offset(slot, head);
  if (plane.contiguous_rows()) {
    copy_bytes(out, plane.data + plane.byte_offset(offset), row_bytes(plane.shape));
    return;
  }
  const auto size = static_cast<std::size_t>(block_bytes(plane.shape.type));
  for (std::int64_t c = 0; c < plane.shape.channels; ++c) {
    std::memcpy(out + static_cast<std::size_t>(c) * size,
                plane.data + plane.byte_offset(offset + plane.channel_offset(c)), size);
  }
}

/// Copies contiguous bytes into the elements of one row of a view.
KVMELD_LAZY inline void scatter_row(const MutablePlaneRef& plane, std::int64_t slot,
                                    std::int64_t head, const std::byte* in) noexcept {
  const std::int64_t offset = plane.row_offset(slot, head);
  if (plane.contiguous_rows()) {
    copy_bytes(plane.data + plane.byte_offset(offset), in, row_bytes(plane.shape));
    return;
  }
  const auto size = static_cast<std::size_t>(block_bytes(plane.shape.type));
  for (std::int64_t c = 0; c < plane.shape.channels; ++c) {
    std::memcpy(plane.data + plane.byte_offset(offset + plane.channel_offset(c)),
                in + static_cast<std::size_t>(c) * size, size);
  }
}

/// Copies the canonical bytes of all heads of one slot; `out` takes heads * row_bytes.
KVMELD_LAZY inline void gather_heads(const PlaneRef& plane, std::int64_t slot,
                                     std::byte* out) noexcept {
  const std::int64_t bytes = row_bytes(plane.shape);
  if (contiguous_heads(plane)) {
    copy_bytes(out, plane.data + plane.byte_offset(plane.row_offset(slot, 0)),
               bytes * plane.shape.heads);
    return;
  }
  for (std::int64_t head = 0; head < plane.shape.heads; ++head)
    gather_row(plane, slot, head, out + head * bytes);
}

/// Copies the scales of all heads of one slot in the order (head, group).
KVMELD_LAZY inline void gather_scales(const PlaneRef& plane, std::int64_t slot,
                                      float* out) noexcept {
  const std::int64_t groups = row_scales(plane.shape);
  for (std::int64_t head = 0; head < plane.shape.heads; ++head) {
    for (std::int64_t g = 0; g < groups; ++g) *out++ = plane.scales.at(slot, head, g);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
