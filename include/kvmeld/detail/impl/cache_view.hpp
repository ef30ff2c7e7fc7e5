#pragma once

/// Bodies of cache_view.hpp: tables of slots, rows read and written by strides.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

KVMELD_API Status check_host_reaches(MemorySpace space, const char* who) {
  if (host_reaches(space)) return {};
  return error(ErrorCode::memory_space, who, ": a plane lies in ", to_string(space),
               " memory, which the host cannot reach; copy it to host memory and view the copy, or "
               "give the view to a ",
               "gpu::Stream");
}

}  // namespace detail

KVMELD_API TokenPlacement TokenPlacement::block_table(std::span<const std::int32_t> table,
                                                      std::int64_t tokens) noexcept {
  return {.tokens = tokens,
          .kind = SlotKind::block_table_i32,
          .table = table.data(),
          .entries = std::ssize(table)};
}

KVMELD_API TokenPlacement TokenPlacement::block_table(std::span<const std::int64_t> table,
                                                      std::int64_t tokens) noexcept {
  return {.tokens = tokens,
          .kind = SlotKind::block_table_i64,
          .table = table.data(),
          .entries = std::ssize(table)};
}

KVMELD_API TokenPlacement TokenPlacement::slot_list(std::span<const std::int32_t> table) noexcept {
  return {.tokens = std::ssize(table),
          .kind = SlotKind::slot_list_i32,
          .table = table.data(),
          .entries = std::ssize(table)};
}

KVMELD_API TokenPlacement TokenPlacement::slot_list(std::span<const std::int64_t> table) noexcept {
  return {.tokens = std::ssize(table),
          .kind = SlotKind::slot_list_i64,
          .table = table.data(),
          .entries = std::ssize(table)};
}

KVMELD_API Result<std::vector<std::int64_t>> ring_slots(std::int64_t seen, std::int64_t window,
                                                        std::int64_t view_tokens) {
  if (window < 1 || seen < 0 || view_tokens > seen) {
    return extend::error(ErrorCode::invalid_argument, "a ring of ", window, " slots that saw ",
                         seen, " tokens cannot show ", view_tokens);
  }
  const std::int64_t held = seen < window ? seen : window;
  const std::int64_t shown = view_tokens < 0 ? held : view_tokens;
  std::vector<std::int64_t> slots;
  slots.reserve(static_cast<std::size_t>(shown));
  for (std::int64_t t = seen - shown; t < seen; ++t)
    slots.push_back(t < seen - held ? -1 : t % window);
  return slots;
}

namespace detail {

KVMELD_API Status check_table(const TokenPlacement& placement, std::int64_t block_size) {
  if (placement.kind > SlotKind::slot_list_i64) {
    return error(ErrorCode::unknown_layout, "slot kind ", static_cast<int>(placement.kind),
                 " is none that this build knows");
  }
  if (placement.tokens < 0)
    return error(ErrorCode::invalid_argument, "a view of ", placement.tokens, " tokens");
  if (placement.kind == SlotKind::identity) return {};
  const bool blocks =
      placement.kind == SlotKind::block_table_i32 || placement.kind == SlotKind::block_table_i64;
  if (blocks && block_size <= 0) {
    return error(ErrorCode::invalid_argument,
                 "a block table, and a layout without blocks; use paged_view or give a slot list");
  }
  const std::int64_t needed = placement.tokens == 0 ? 0
                              : blocks              ? (placement.tokens - 1) / block_size + 1
                                                    : placement.tokens;
  if (placement.entries < needed) {
    return error(ErrorCode::token_count_mismatch, "the table has ", placement.entries, " entries; ",
                 placement.tokens, " tokens need ", needed);
  }
  return {};
}

/// Copies bytes that do not overlap; planes without channels have no bytes and may have no memory.
inline void copy_bytes(std::byte* to, const std::byte* from, std::int64_t count) noexcept {
  if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count));
}

}  // namespace detail

namespace extend {

KVMELD_API void gather_row(const PlaneRef& plane, std::int64_t slot, std::int64_t head,
                           std::byte* out) noexcept {
  const std::int64_t offset = plane.row_offset(slot, head);
  if (plane.contiguous_rows()) {
    detail::copy_bytes(out, plane.data + plane.byte_offset(offset), row_bytes(plane.shape));
    return;
  }
  const auto size = static_cast<std::size_t>(block_bytes(plane.shape.type));
  for (std::int64_t c = 0; c < plane.shape.channels; ++c) {
    std::memcpy(out + static_cast<std::size_t>(c) * size,
                plane.data + plane.byte_offset(offset + plane.channel_offset(c)), size);
  }
}

KVMELD_API void scatter_row(const MutablePlaneRef& plane, std::int64_t slot, std::int64_t head,
                            const std::byte* in) noexcept {
  const std::int64_t offset = plane.row_offset(slot, head);
  if (plane.contiguous_rows()) {
    detail::copy_bytes(plane.data + plane.byte_offset(offset), in, row_bytes(plane.shape));
    return;
  }
  const auto size = static_cast<std::size_t>(block_bytes(plane.shape.type));
  for (std::int64_t c = 0; c < plane.shape.channels; ++c) {
    std::memcpy(plane.data + plane.byte_offset(offset + plane.channel_offset(c)),
                in + static_cast<std::size_t>(c) * size, size);
  }
}

KVMELD_API void gather_heads(const PlaneRef& plane, std::int64_t slot, std::byte* out) noexcept {
  const std::int64_t bytes = row_bytes(plane.shape);
  if (contiguous_heads(plane)) {
    detail::copy_bytes(out, plane.data + plane.byte_offset(plane.row_offset(slot, 0)),
                       bytes * plane.shape.heads);
    return;
  }
  for (std::int64_t head = 0; head < plane.shape.heads; ++head)
    gather_row(plane, slot, head, out + head * bytes);
}

KVMELD_API void gather_scales(const PlaneRef& plane, std::int64_t slot, float* out) noexcept {
  const std::int64_t groups = row_scales(plane.shape);
  for (std::int64_t head = 0; head < plane.shape.heads; ++head) {
    for (std::int64_t g = 0; g < groups; ++g) *out++ = plane.scales.at(slot, head, g);
  }
}

KVMELD_API std::size_t first_non_finite(ElementType type, const std::byte* bytes,
                                        std::size_t byte_count, std::size_t row_size) noexcept {
  std::size_t row = 0;
  while ((row + 1) * row_size <= byte_count &&
         is_finite(detail::peak_of(type, bytes + row * row_size, row_size)))
    ++row;
  return row;
}

}  // namespace extend

KVMELD_NAMESPACE_END
