#pragma once

/// Copying a row with 32 lanes, in the widest words that the addresses allow.

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

template <int word>
KVMELD_HD inline void lane_copy_words(const std::byte* in, std::byte* out, std::int64_t bytes,
                                      int lane) noexcept {
  for (std::int64_t i = std::int64_t{lane} * word; i < bytes; i += 32 * word) {
    __builtin_memcpy(__builtin_assume_aligned(out + i, word),
                     __builtin_assume_aligned(in + i, word), word);
  }
}

/// Copies contiguous bytes; every lane of the row calls it.
KVMELD_HD inline void lane_copy(const std::byte* in, std::byte* out, std::int64_t bytes,
                                int lane) noexcept {
  const auto low = reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out) |
                   static_cast<std::uintptr_t>(bytes);
  if ((low & 15U) == 0) {
    lane_copy_words<16>(in, out, bytes, lane);
  } else if ((low & 3U) == 0) {
    lane_copy_words<4>(in, out, bytes, lane);
  } else if ((low & 1U) == 0) {
    lane_copy_words<2>(in, out, bytes, lane);
  } else {
    lane_copy_words<1>(in, out, bytes, lane);
  }
}

/// Copies one element (or block) of a row to the same channel of another; rows start at element
/// offsets.
KVMELD_HD inline void move_element(const PlaneRef& in, std::int64_t from,
                                   const MutablePlaneRef& out, std::int64_t to,
                                   std::int64_t channel) noexcept {
  const std::int64_t size = block_bytes(out.shape.type);
  const std::byte* source = in.data + in.byte_offset(from + in.channel_offset(channel));
  std::byte* target = out.data + out.byte_offset(to + out.channel_offset(channel));
  for (std::int64_t k = 0; k < size; ++k) target[k] = source[k];
}

/// Copies contiguous bytes into the elements of one row, which starts `offset` elements into a
/// view: `scatter_row` by lanes.
KVMELD_HD inline void lane_scatter(const MutablePlaneRef& plane, std::int64_t offset,
                                   const std::byte* in, int lane) noexcept {
  if (plane.contiguous_rows()) {
    lane_copy(in, plane.data + plane.byte_offset(offset), row_bytes(plane.shape), lane);
    return;
  }
  const std::int64_t size = block_bytes(plane.shape.type);
  for (std::int64_t c = lane; c < plane.shape.channels;
       c += 32) {  // blocks lie in contiguous rows, so these are elements
    std::byte* out = plane.data + plane.byte_offset(offset + plane.channel_offset(c));
    for (std::int64_t k = 0; k < size; ++k) out[k] = in[c * size + k];
  }
}

/// Copies one row of a view into one of another, which have the same shape.
KVMELD_HD inline void lane_move(const PlaneRef& in, std::int64_t from, const MutablePlaneRef& out,
                                std::int64_t to, int lane) noexcept {
  if (in.contiguous_rows()) {
    lane_scatter(out, to, in.data + in.byte_offset(from), lane);
    return;
  }
  for (std::int64_t c = lane; c < out.shape.channels; c += 32) move_element(in, from, out, to, c);
}

}  // namespace detail
KVMELD_NAMESPACE_END
