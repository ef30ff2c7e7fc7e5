#pragma once

/// Which slots, elements and bytes a plane view touches.

#include <cstdint>

#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// The lowest and highest byte that a view addresses, counted from its `data`.
struct Footprint {
  std::int64_t first_byte = 0;
  std::int64_t last_byte = -1;  ///< inclusive; below `first_byte` where the view addresses nothing

  [[nodiscard]] bool empty() const noexcept { return last_byte < first_byte; }
  bool operator==(const Footprint&) const = default;
};

namespace detail {

/// Strides, slots and extents beyond this are refused, so that sums of products of two stay far
/// below 127 bits.
inline constexpr std::int64_t max_extent = std::int64_t{1} << 48;

__extension__ typedef __int128 Wide;  // NOLINT: `using` gives a pedantic warning

[[nodiscard]] constexpr bool sane(std::int64_t stride) noexcept {
  return stride <= max_extent && stride >= -max_extent;
}

/// Entry of a table of either width.
[[nodiscard]] inline std::int64_t table_entry(const TokenSlots& slots,
                                              std::int64_t index) noexcept {
  const bool narrow =
      slots.kind == SlotKind::block_table_i32 || slots.kind == SlotKind::slot_list_i32;
  return narrow ? static_cast<const std::int32_t*>(slots.table)[index]
                : static_cast<const std::int64_t*>(slots.table)[index];
}
[[nodiscard]] constexpr bool is_block_table(SlotKind kind) noexcept {
  return kind == SlotKind::block_table_i32 || kind == SlotKind::block_table_i64;
}

/// Calls `visit(first token, first slot, count)` for runs of tokens in consecutive slots of one
/// block; holes are skipped. Stops when `visit` returns false. O(table entries), O(blocks) for
/// identity. The slots were checked by `check_slots`.
template <class Visit>
void for_each_run(const TokenSlots& slots, std::int64_t tokens, Visit&& visit) {
  const std::int64_t block = slots.block_size;
  const auto room = [block](std::int64_t slot) {
    return block == 0 ? max_extent : block - slot % block;
  };
  std::int64_t token = 0;
  while (token < tokens) {
    std::int64_t slot = 0, count = 0;
    if (slots.kind == SlotKind::identity) {
      slot = slots.first + token;
      count = room(slot) < tokens - token ? room(slot) : tokens - token;
    } else if (is_block_table(slots.kind)) {
      slot = slots.slot(token);
      count = block < tokens - token ? block : tokens - token;
    } else {
      slot = table_entry(slots, token);
      for (count = 1; token + count < tokens && count < room(slot); ++count) {
        if (slot < 0 || table_entry(slots, token + count) != slot + count) break;
      }
    }
    if (slot >= 0 && !visit(token, slot, count)) return;
    token += count;
  }
}

/// Checks the token axis: kinds, table present, entries in a range that cannot overflow. O(table
/// entries).
/// @param slot_count slots that exist; entries at or above it are refused.
KVMELD_LAZY [[nodiscard]] Status check_slots(const TokenSlots& slots, std::int64_t tokens,
                                             std::int64_t slot_count = max_extent) {
  if (slots.kind > SlotKind::slot_list_i64) {
    return error(ErrorCode::unknown_layout, "slot kind ", static_cast<int>(slots.kind),
                 " is none that this build knows");
  }
  if (tokens < 0 || tokens > max_extent)
    return error(ErrorCode::invalid_argument, "a view of ", tokens, " tokens");
  if (slots.block_size < 0 || slots.block_size > max_extent || !sane(slots.block_stride)) {
    return error(ErrorCode::invalid_argument, "blocks of ", slots.block_size, " tokens, ",
                 slots.block_stride, " elements apart");
  }
  if (slots.kind == SlotKind::identity) {
    if (slots.first < 0 || slots.first > max_extent)
      return error(ErrorCode::invalid_argument, "first slot is ", slots.first);
    if (tokens > 0 && (slots.first >= slot_count || tokens > slot_count - slots.first)) {
      return error(ErrorCode::truncated, "slots ", slots.first, " to ", slots.first + tokens - 1,
                   " of ", slot_count);
    }
    return {};
  }
  if (tokens == 0) return {};
  if (slots.table == nullptr)
    return error(ErrorCode::invalid_argument, "slots come from a table, and there is none");
  const bool blocks = is_block_table(slots.kind);
  if (blocks && slots.block_size == 0)
    return error(ErrorCode::invalid_argument, "a block table with blocks of 0 tokens");
  const std::int64_t entries = blocks ? (tokens - 1) / slots.block_size + 1 : tokens;
  const std::int64_t bound = blocks ? slot_count / slots.block_size : slot_count;
  for (std::int64_t i = 0; i < entries; ++i) {
    if (table_entry(slots, i) >= bound) {
      return error(ErrorCode::invalid_argument, "table entry ", i, " is ",
                   blocks ? "block " : "slot ", table_entry(slots, i), "; there are ", bound);
    }
  }
  return {};
}

/// The range of element offsets; false where there is none. Exact: each axis is linear, so its ends
/// are at its ends.
KVMELD_LAZY [[nodiscard]] bool element_range(const PlaneRef& plane, Wide& low,
                                             Wide& high) noexcept {
  if (plane.shape.heads <= 0 || plane.shape.channels <= 0) return false;
  bool any = false;
  for_each_run(plane.slots, plane.tokens, [&](std::int64_t, std::int64_t slot, std::int64_t count) {
    const std::int64_t block = plane.slots.block_size;
    const Wide first = block == 0 ? Wide{slot} * plane.token_stride
                                  : Wide{slot / block} * plane.slots.block_stride +
                                        Wide{slot % block} * plane.token_stride;
    const Wide last = first + Wide{count - 1} * plane.token_stride;
    const Wide least = first < last ? first : last, most = first < last ? last : first;
    if (!any || least < low) low = least;
    if (!any || most > high) high = most;
    any = true;
    return true;
  });
  const auto stretch = [&](std::int64_t extent, std::int64_t stride) {
    (stride < 0 ? low : high) += Wide{extent - 1} * stride;
  };
  if (!any) return false;
  stretch(plane.shape.heads, plane.head_stride);
  const std::int64_t channels = plane.shape.channels, split = plane.channel_split;
  if (split == 0) {
    stretch(channels, plane.channel_stride);
  } else {
    stretch((channels + split - 1) / split, plane.split_stride);
    stretch(split < channels ? split : channels, plane.channel_stride);
  }
  return true;
}

}  // namespace detail

/// The bytes that a view spans, exact at both ends; what lies between may be another's. O(table
/// entries).
///
/// The view passed `check_view`.
KVMELD_LAZY [[nodiscard]] Footprint footprint(const PlaneRef& plane) noexcept {
  detail::Wide low = 0, high = 0;
  if (!detail::element_range(plane, low, high)) return {};
  const auto unit = block_elements(plane.shape.type), size = block_bytes(plane.shape.type);
  return {static_cast<std::int64_t>(low / unit * size),
          static_cast<std::int64_t>((high / unit + 1) * size - 1)};
}

KVMELD_NAMESPACE_END
