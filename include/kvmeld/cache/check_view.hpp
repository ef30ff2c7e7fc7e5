#pragma once

/// Whether a plane view stays inside its buffer; with `overlaps` and `check_writable`, whether
/// views disturb each other.

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/layout_overlap.hpp>
#include <kvmeld/cache/layout_range.hpp>
#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

KVMELD_LAZY [[nodiscard]] Status check_strides(const PlaneRef& plane) {
  const PlaneShape& shape = plane.shape;
  const std::int64_t unit = block_elements(shape.type);
  if (shape.type > ElementType::q8_0 || shape.plane > Plane::scale ||
      shape.scales > ScaleScheme::per_channel_group) {
    return error(ErrorCode::unknown_field, "element type ", static_cast<int>(shape.type),
                 ", plane ", static_cast<int>(shape.plane), " or scale scheme ",
                 static_cast<int>(shape.scales), " is none that this build knows");
  }
  if (shape.heads < 0 || shape.channels < 0 || shape.channels % unit != 0) {
    return error(ErrorCode::invalid_argument, shape.heads, " heads of ", shape.channels,
                 " channels in blocks of ", unit);
  }
  if (!sane(plane.token_stride) || !sane(plane.head_stride) || !sane(plane.channel_stride) ||
      !sane(plane.split_stride)) {
    return error(ErrorCode::invalid_argument, "a stride is beyond 2^48 elements: token ",
                 plane.token_stride, ", head ", plane.head_stride, ", channel ",
                 plane.channel_stride, ", split ", plane.split_stride);
  }
  if (plane.channel_split < 0 ||
      (plane.channel_split > 0 && shape.channels % plane.channel_split != 0)) {
    return error(ErrorCode::invalid_argument, shape.channels,
                 " channels do not split into groups of ", plane.channel_split);
  }
  if (unit > 1 && !plane.contiguous_rows()) {
    return error(ErrorCode::unsupported, "elements stored in blocks of ", unit,
                 " need contiguous rows; channel stride is ", plane.channel_stride);
  }
  if (unit > 1 && (plane.token_stride % unit != 0 || plane.head_stride % unit != 0 ||
                   plane.slots.block_stride % unit != 0)) {
    return error(ErrorCode::invalid_argument, "token stride ", plane.token_stride, ", head stride ",
                 plane.head_stride, " and block stride ", plane.slots.block_stride,
                 " are multiples of ", unit, " elements, or rows would cut a block");
  }
  if (shape.scales != ScaleScheme::none && plane.scales.data == nullptr) {
    return error(ErrorCode::invalid_argument, "the plane declares scales and gives none");
  }
  return {};
}

/// `check_view` with the code that a short buffer gives and the number of slots that exist.
KVMELD_LAZY [[nodiscard]] Status check_plane_view(const PlaneRef& plane, std::size_t capacity_bytes,
                                                  std::size_t bytes_before, ErrorCode too_small,
                                                  std::int64_t slot_count = max_extent) {
  KVMELD_TRY(check_strides(plane));
  if (Status status = check_slots(plane.slots, plane.tokens, slot_count); !status) {
    return status.code() == ErrorCode::truncated ? Status(too_small, status.message()) : status;
  }
  Wide low = 0, high = 0;
  if (!element_range(plane, low, high)) return {};
  if (plane.data == nullptr)
    return error(ErrorCode::invalid_argument, "a view of ", plane.tokens, " tokens over no memory");
  const Wide unit = block_elements(plane.shape.type), size = block_bytes(plane.shape.type);
  const Wide begin = Wide{static_cast<std::int64_t>(bytes_before & 0x7fffffffffffffffU)};
  const Wide first = begin + low / unit * size, end = begin + (high / unit + 1) * size;
  if (low % unit != 0)
    return error(ErrorCode::invalid_argument, "the first row starts inside a block of elements");
  if (first < 0) {
    return error(too_small, "the view begins ", static_cast<std::int64_t>(-first),
                 " bytes before its buffer");
  }
  if (end > Wide{static_cast<std::int64_t>(capacity_bytes & 0x7fffffffffffffffU)}) {
    const Wide most = Wide{INT64_MAX};
    return error(too_small, "the view reaches byte ",
                 static_cast<std::int64_t>(end - 1 < most ? end - 1 : most), " of a buffer of ",
                 capacity_bytes);
  }
  return {};
}

}  // namespace detail

/// Checks that every element of a view lies inside its buffer, holes aside.
///
/// The buffer starts `bytes_before` bytes before `data` and holds `capacity_bytes`. Tables are read
/// on the host. Nothing is dereferenced but the table, so `data` may lie in any memory space.
/// O(table entries); no overflow whatever the numbers. Errors: `truncated` (the byte and the
/// capacity), `unknown_layout`, `unknown_field`, `unsupported` (block elements that do not lie in
/// rows), `invalid_argument` (strides, extents, missing table, data or scales).
KVMELD_LAZY [[nodiscard]] Status check_view(const PlaneRef& plane, std::size_t capacity_bytes,
                                            std::size_t bytes_before = 0) {
  return detail::check_plane_view(plane, capacity_bytes, bytes_before, ErrorCode::truncated);
}

KVMELD_NAMESPACE_END
