#pragma once

/// Bodies of check_view.hpp: the checks of views, and the check of a rope against keys.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

__extension__ typedef __int128 Wide;  // NOLINT: `using` gives a pedantic warning

KVMELD_API std::int64_t table_entry(const TokenSlots& slots, std::int64_t index) noexcept {
  const bool narrow =
      slots.kind == SlotKind::block_table_i32 || slots.kind == SlotKind::slot_list_i32;
  return narrow ? static_cast<const std::int32_t*>(slots.table)[index]
                : static_cast<const std::int64_t*>(slots.table)[index];
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

}  // namespace detail

namespace extend {

KVMELD_API Status check_slots(const TokenSlots& slots, std::int64_t tokens,
                              std::int64_t slot_count) {
  if (slots.kind > SlotKind::slot_list_i64) {
    return error(ErrorCode::unknown_layout, "slot kind ", static_cast<int>(slots.kind),
                 " is none that this build knows");
  }
  if (tokens < 0 || tokens > detail::max_extent)
    return error(ErrorCode::invalid_argument, "a view of ", tokens, " tokens");
  if (slots.block_size < 0 || slots.block_size > detail::max_extent ||
      !detail::sane(slots.block_stride)) {
    return error(ErrorCode::invalid_argument, "blocks of ", slots.block_size, " tokens, ",
                 slots.block_stride, " elements apart");
  }
  if (slots.kind == SlotKind::identity) {
    if (slots.first < 0 || slots.first > detail::max_extent)
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
    if (detail::table_entry(slots, i) >= bound) {
      return error(ErrorCode::invalid_argument, "table entry ", i, " is ",
                   blocks ? "block " : "slot ", detail::table_entry(slots, i), "; there are ",
                   bound);
    }
  }
  return {};
}

}  // namespace extend

namespace detail {

/// The range of element offsets; false where there is none. Exact: each axis is linear, so its
/// extremes are at its ends.
[[nodiscard]] inline bool element_range(const PlaneRef& plane, Wide& low, Wide& high) noexcept {
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

KVMELD_API Footprint footprint(const PlaneRef& plane) noexcept {
  detail::Wide low = 0, high = 0;
  if (!detail::element_range(plane, low, high)) return {};
  const auto unit = block_elements(plane.shape.type), size = block_bytes(plane.shape.type);
  return {static_cast<std::int64_t>(low / unit * size),
          static_cast<std::int64_t>((high / unit + 1) * size - 1)};
}

namespace detail {

/// One axis of a plane: how many steps, how far a step. Bytes in overlap code, elements in the
/// writable check.
struct Axis {
  std::int64_t extent = 1;
  std::int64_t stride = 0;
};

/// The head and channel axes of a plane in units of one element block.
inline void row_axes(const PlaneRef& plane, std::int64_t scale, std::int64_t unit,
                     Axis (&axes)[4]) noexcept {
  const std::int64_t channels = plane.shape.channels;
  axes[1] = {plane.shape.heads, plane.head_stride / unit * scale};
  if (plane.channel_split == 0) {
    axes[2] = {channels / unit, (unit > 1 ? 1 : plane.channel_stride) * scale};
    axes[3] = {1, 0};
  } else {
    axes[2] = {plane.channel_split, plane.channel_stride * scale};
    axes[3] = {channels / plane.channel_split, plane.split_stride * scale};
  }
}

inline void sort_axes(Axis* first, std::size_t count) noexcept {
  std::sort(first, first + count,
            [](const Axis& a, const Axis& b) { return magnitude(a.stride) < magnitude(b.stride); });
}

/// The lowest and highest slot in use; `high < low` where there is none.
struct SlotRange {
  std::int64_t low = max_extent;
  std::int64_t high = -1;

  explicit SlotRange(const PlaneRef& plane) noexcept {
    for_each_run(plane.slots, plane.tokens,
                 [this](std::int64_t, std::int64_t slot, std::int64_t count) {
                   low = (std::min)(low, slot);
                   high = (std::max)(high, slot + count - 1);
                   return true;
                 });
  }
};

/// Whether no two (slot, head, channel) share an element: the stride of each axis is at least the
/// span of all axes with smaller strides.
[[nodiscard]] inline bool nested(const PlaneRef& plane, const SlotRange& range) noexcept {
  if (range.high < range.low) return true;
  const std::int64_t unit = block_elements(plane.shape.type), block = plane.slots.block_size;
  const std::int64_t slots = range.high - range.low + 1;
  Axis row[4];
  row_axes(plane, 1, unit, row);
  Axis axes[5] = {row[1], row[2], row[3]};
  axes[3] = {block == 0 ? slots : (std::min)(block, slots), plane.token_stride / unit};
  axes[4] = block == 0
                ? Axis{}
                : Axis{range.high / block - range.low / block + 1, plane.slots.block_stride / unit};
  sort_axes(axes, 5);
  std::int64_t span = 1;
  for (const Axis& axis : axes) {
    if (axis.extent <= 1) continue;
    if (magnitude(axis.stride) < span) return false;
    span += (axis.extent - 1) * magnitude(axis.stride);
  }
  return true;
}

KVMELD_API std::vector<Segment> segments(const PlaneRef& plane) {
  std::vector<Segment> out;
  const std::int64_t unit = block_elements(plane.shape.type), size = block_bytes(plane.shape.type);
  if (plane.shape.heads == 0 || plane.shape.channels == 0) return out;
  for_each_run(plane.slots, plane.tokens, [&](std::int64_t, std::int64_t slot, std::int64_t count) {
    Axis axes[4];
    row_axes(plane, size, unit, axes);
    axes[0] = {count, plane.token_stride / unit * size};
    std::int64_t base = plane.byte_offset(plane.row_offset(slot, 0));
    for (Axis& axis : axes) {
      if (axis.stride < 0) base += (axis.extent - 1) * axis.stride;
      axis.stride = magnitude(axis.stride);
      if (axis.stride == 0) axis.extent = 1;
    }
    sort_axes(axes, 4);
    std::int64_t length = size;
    std::size_t outer = 0;
    for (; outer < 4 && (axes[outer].extent == 1 || axes[outer].stride == length); ++outer)
      length *= axes[outer].extent;
    std::int64_t index[4] = {};
    for (;;) {
      std::int64_t at = base;
      for (std::size_t a = outer; a < 4; ++a) at += index[a] * axes[a].stride;
      const std::uintptr_t first =
          reinterpret_cast<std::uintptr_t>(plane.data) + static_cast<std::uintptr_t>(at);
      out.push_back({first, first + static_cast<std::uintptr_t>(length)});
      std::size_t a = outer;
      while (a < 4 && ++index[a] == axes[a].extent) index[a++] = 0;
      if (a == 4) break;
    }
    return true;
  });
  std::sort(out.begin(), out.end());
  return out;
}

[[nodiscard]] inline bool intersect(const std::vector<Segment>& a,
                                    const std::vector<Segment>& b) noexcept {
  std::uintptr_t reach_a = 0,
                 // segments of one plane may overlap each other, so the furthest end is remembered
      reach_b = 0;
  for (std::size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    if (j == b.size() || (i < a.size() && a[i].first <= b[j].first)) {
      if (a[i].first < reach_b) return true;
      reach_a = (std::max)(reach_a, a[i++].last);
    } else {
      if (b[j].first < reach_a) return true;
      reach_b = (std::max)(reach_b, b[j++].last);
    }
  }
  return false;
}

/// Slots of a plane, each with the first token that uses it; sorted.
[[nodiscard]] inline std::vector<std::pair<std::int64_t, std::int64_t>> used_slots(
    const TokenSlots& slots, std::int64_t tokens) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t slot = slots.slot(t);
    if (slot >= 0) out.emplace_back(slot, t);
  }
  std::sort(out.begin(), out.end());
  return out;
}

KVMELD_API bool same_lattice(const PlaneRef& a, const PlaneRef& b) noexcept {
  return a.data == b.data && a.shape.type == b.shape.type && a.shape.heads == b.shape.heads &&
         a.shape.channels == b.shape.channels && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && a.channel_stride == b.channel_stride &&
         a.channel_split == b.channel_split && a.split_stride == b.split_stride &&
         a.slots.block_size == b.slots.block_size && a.slots.block_stride == b.slots.block_stride;
}

[[nodiscard]] inline bool planes_overlap(const PlaneRef& a, const PlaneRef& b) {
  if (!same_lattice(a, b)) return intersect(segments(a), segments(b));
  const auto x = used_slots(a.slots, a.tokens), y = used_slots(b.slots, b.tokens);
  for (std::size_t i = 0, j = 0; i < x.size() && j < y.size();) {
    if (x[i].first == y[j].first) return true;
    x[i].first < y[j].first ? ++i : ++j;
  }
  SlotRange both(a);
  const SlotRange other(b);
  both.low = (std::min)(both.low, other.low);
  both.high = (std::max)(both.high, other.high);
  return !nested(a, both) && intersect(segments(a), segments(b));
}

}  // namespace detail

namespace extend {

KVMELD_API Segment extent_in_memory(const PlaneRef& plane) noexcept {
  const Footprint f = footprint(plane);
  const auto base = reinterpret_cast<std::uintptr_t>(plane.data);
  if (f.empty()) return {};
  return {base + static_cast<std::uintptr_t>(f.first_byte),
          base + static_cast<std::uintptr_t>(f.last_byte) + 1};
}

}  // namespace extend

KVMELD_API bool overlaps(const KvCacheRef& a, const KvCacheRef& b) {
  std::vector<detail::Segment> extents;
  for (const PlaneRef& plane : b.planes()) extents.push_back(detail::extent_in_memory(plane));
  for (const PlaneRef& x : a.planes()) {
    const detail::Segment extent = detail::extent_in_memory(x);
    for (std::size_t j = 0; j < extents.size(); ++j) {
      const bool apart = extent.last <= extents[j].first || extents[j].last <= extent.first;
      if (!apart && detail::planes_overlap(x, b.planes()[j])) return true;
    }
  }
  return false;
}

namespace detail {

KVMELD_API Status check_steps(const PlaneRef& plane) {
  if (plane.tokens == 0 || plane.shape.heads == 0 || plane.shape.channels == 0 ||
      nested(plane, SlotRange(plane)))
    return {};
  return error(ErrorCode::aliasing, "strides step into each other: token ", plane.token_stride,
               ", head ", plane.head_stride, ", channel ", plane.channel_stride, ", block ",
               plane.slots.block_stride);
}

KVMELD_API Status check_slots_apart(const TokenSlots& slots, std::int64_t tokens,
                                    std::int64_t* scratch) {
  if (slots.kind == SlotKind::identity) return {};
  std::int64_t* end = scratch;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t slot = slots.slot(t);
    if (slot >= 0) *end++ = slot;
  }
  std::sort(scratch, end);
  const std::int64_t* const twice = std::adjacent_find(scratch, end);
  if (twice == end) return {};
  std::int64_t first = 0;
  while (slots.slot(first) != *twice) ++first;
  std::int64_t second = first + 1;
  while (slots.slot(second) != *twice) ++second;
  return error(ErrorCode::aliasing, "tokens ", first, " and ", second, " share slot ", *twice,
               " of a view that may be written");
}

}  // namespace detail

KVMELD_API Status check_writable(const MutablePlaneRef& plane) {
  KVMELD_TRY(detail::check_steps(plane));
  if (plane.tokens == 0 || plane.shape.heads == 0 || plane.shape.channels == 0) return {};
  std::vector<std::int64_t> scratch(
      static_cast<std::size_t>(plane.slots.kind == SlotKind::identity ? 0 : plane.tokens));
  return detail::check_slots_apart(plane.slots, plane.tokens, scratch.data());
}

namespace detail {

KVMELD_API Status check_strides(const PlaneRef& plane) {
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

KVMELD_API Status check_plane_view(const PlaneRef& plane, std::size_t capacity_bytes,
                                   std::size_t bytes_before, ErrorCode too_small,
                                   std::int64_t slot_count) {
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

/// Residual of `scale * rotate(at_p)` against `at_q`, and the scale that would make it smallest.
struct RopeFit {
  double error = 0.0;         // relative to at_q, scale 1
  double scale = 1.0;         // best
  double scaled_error = 0.0;  // relative to at_q, best scale
};

/// Plain f64, a pair at a time: this checks what the fast path assumes, so it shares no code with
/// the fast path.
[[nodiscard]] inline RopeFit fit_rope(const RopeSpec& rope, RopePairing pairing,
                                      std::int32_t channels, const std::vector<double>& cosines,
                                      const std::vector<double>& sines, std::span<const float> at_p,
                                      std::span<const float> at_q) {
  const auto width = static_cast<std::size_t>(channels);
  const auto first = static_cast<std::size_t>(rope.first_channel);
  const std::size_t pairs = cosines.size();
  double rotated_q = 0.0, rotated_rotated = 0.0, q_q = 0.0, off = 0.0;
  const auto add = [&](double rotated, double target) {
    rotated_q = fma(rotated, target, rotated_q);
    rotated_rotated = fma(rotated, rotated, rotated_rotated);
    q_q = fma(target, target, q_q);
    off = fma(rotated - target, rotated - target, off);
  };
  for (std::size_t row = 0; row + width <= at_p.size(); row += width) {
    for (std::size_t c = 0; c < width; ++c)
      if (c < first || c >= first + 2 * pairs)
        add(static_cast<double>(at_p[row + c]), static_cast<double>(at_q[row + c]));
    for (std::size_t i = 0; i < pairs; ++i) {
      const bool adjacent = pairing == RopePairing::interleaved;
      const std::size_t a = row + first + (adjacent ? 2 * i : i);
      const std::size_t b = row + first + (adjacent ? 2 * i + 1 : i + pairs);
      const double x = static_cast<double>(at_p[a]), y = static_cast<double>(at_p[b]);
      add(fma(x, cosines[i], -(y * sines[i])), static_cast<double>(at_q[a]));
      add(fma(x, sines[i], y * cosines[i]), static_cast<double>(at_q[b]));
    }
  }
  RopeFit fit;
  if (q_q <= 0.0 || rotated_rotated <= 0.0) return fit;
  fit.error = __builtin_sqrt(off / q_q);
  fit.scale = rotated_q / rotated_rotated;
  const double rest = fma(-fit.scale, rotated_q, q_q);
  fit.scaled_error = rest > 0.0 ? __builtin_sqrt(rest / q_q) : 0.0;
  return fit;
}

/// Refuses samples that `verify_rope` cannot use: (token, head, channel) keys at p and at q.
inline Status check_rope_samples(std::int32_t heads, std::int32_t channels,
                                 std::span<const float> keys_at_p, std::span<const float> keys_at_q,
                                 std::int64_t p, std::int64_t q, double tolerance) {
  if (heads <= 0) return error(ErrorCode::invalid_argument, "verify_rope: ", heads, " heads");
  if (!finite_positive(tolerance))
    return error(ErrorCode::invalid_argument, "verify_rope: tolerance is ", tolerance,
                 "; it is finite and above 0");
  if (p < 0 || q < 0 || p > max_rope_shift || q > max_rope_shift)
    return error(ErrorCode::invalid_argument, "verify_rope: positions ", p, " and ", q,
                 "; they lie between 0 and ", max_rope_shift);
  const std::int64_t distance = q > p ? q - p : p - q;
  if (distance < verify_rope_min_distance)
    return error(ErrorCode::invalid_argument, "verify_rope: positions ", p, " and ", q, " are ",
                 distance, " apart; wrong pairings look right nearby, take at least ",
                 verify_rope_min_distance);
  const auto token = static_cast<std::size_t>(heads) * static_cast<std::size_t>(channels);
  if (keys_at_p.size() != keys_at_q.size() || keys_at_p.size() % token != 0)
    return error(ErrorCode::token_count_mismatch, "verify_rope: ", keys_at_p.size(), " and ",
                 keys_at_q.size(), " key values; both hold the same whole number of tokens of ",
                 token);
  if (keys_at_p.empty()) return error(ErrorCode::invalid_argument, "verify_rope: no keys to check");
  double size_p = 0.0, size_q = 0.0;
  for (std::size_t i = 0; i < keys_at_p.size(); ++i) {
    const double x = static_cast<double>(keys_at_p[i]), y = static_cast<double>(keys_at_q[i]);
    if (!(x - x == 0.0) || !(y - y == 0.0))
      return error(ErrorCode::non_finite, "verify_rope: key value ", i, " is not finite");
    size_p = fma(x, x, size_p);
    size_q = fma(y, y, size_q);
  }
  if (size_p > 0.0 && size_q > 0.0) return {};
  return error(ErrorCode::invalid_argument, "verify_rope: all keys at position ",
               size_p <= 0.0 ? p : q, " are zero");
}

/// The errors of four hypotheses about the keys.
struct RopeFits {
  RopeFit declared, swapped, still, reverse;
};

/// @param frequencies  (pairs) of the declared rope; distance: q − p
[[nodiscard]] inline RopeFits fit_ropes(const RopeSpec& rope, std::int32_t channels,
                                        std::span<const double> frequencies,
                                        std::span<const float> keys_at_p,
                                        std::span<const float> keys_at_q, std::int64_t distance) {
  std::vector<double> cosines, sines, backward;
  for (const double frequency : frequencies) {
    const auto [sine, cosine] = math::sin_cos(static_cast<double>(distance) * frequency);
    cosines.push_back(cosine);
    sines.push_back(sine);
    backward.push_back(-sine);
  }
  const std::vector<double> ones(cosines.size(), 1.0), zeros(cosines.size(), 0.0);
  const RopePairing other =
      rope.pairing == RopePairing::interleaved ? RopePairing::half_split : RopePairing::interleaved;
  const auto fit = [&](RopePairing pairing, const std::vector<double>& cos,
                       const std::vector<double>& sin) {
    return fit_rope(rope, pairing, channels, cos, sin, keys_at_p, keys_at_q);
  };
  return {fit(rope.pairing, cosines, sines), fit(other, cosines, sines),
          fit(rope.pairing, ones, zeros), fit(rope.pairing, cosines, backward)};
}

/// A guess at what the caller declared wrongly.
[[nodiscard]] inline std::string rope_hint(const RopeSpec& rope, const RopeFits& fits,
                                           double tolerance) {
  if (fits.still.error <= tolerance)
    return "the keys do not move at all: this layer has no rope, or its keys were taken before "
           "rotation";
  if (rope.kind == RopeKind::none)
    return "the keys do move with position: declare the layer's rope";
  if (fits.swapped.error <= tolerance)
    return rope.pairing == RopePairing::half_split ? "the interleaved pairing fits"
                                                   : "the half_split pairing fits";
  if (fits.reverse.error <= tolerance)
    return "the opposite direction fits: p and q, or the two spans, are swapped";
  if (fits.declared.scaled_error <= tolerance) {
    std::string hint = "a common scale of ";
    append_decimal(hint, fits.declared.scale);
    return hint +
           " fits: the keys at the second position were scaled, as by an engine that applies "
           "YaRN's magnitude again in a shift";
  }
  return "neither pairing fits, nor no rotation: check base, scaling, rotary_channels and "
         "first_channel";
}

}  // namespace detail

KVMELD_API Result<RopeCheck> verify_rope(const RopeSpec& rope, std::int32_t heads,
                                         std::int32_t channels,
                                         // (token, head, channel)
                                         std::span<const float> keys_at_p,
                                         // (token, head, channel)
                                         std::span<const float> keys_at_q, std::int64_t p,
                                         std::int64_t q, double tolerance,
                                         std::int64_t context_length) {
  KVMELD_TRY(validate(rope, channels));
  KVMELD_TRY(detail::check_rope_samples(heads, channels, keys_at_p, keys_at_q, p, q, tolerance));
  const Result<std::vector<double>> frequencies = inverse_frequencies(rope, context_length);
  if (!frequencies) return frequencies.error();
  const detail::RopeFits fits =
      detail::fit_ropes(rope, channels, extend::span_of(*frequencies), keys_at_p, keys_at_q, q - p);
  const std::int64_t distance = q > p ? q - p : p - q;
  if (fits.declared.error > tolerance) {
    return extend::error(ErrorCode::rope_mismatch,
                         "verify_rope: the declared rope leaves a relative error of ",
                         fits.declared.error, " over ", distance, " positions (", fits.still.error,
                         " without rotation, ", fits.swapped.error, " with the other pairing); ",
                         detail::rope_hint(rope, fits, tolerance));
  }
  if (rope.kind == RopeKind::rotary && fits.still.error <= tolerance) {
    return extend::error(ErrorCode::invalid_argument, "verify_rope: keys move by ",
                         fits.still.error, " over ", distance,
                         " positions, less than the tolerance ", tolerance,
                         ", and tell nothing; take a larger distance or other tokens");
  }
  return RopeCheck{fits.declared.error, fits.still.error, fits.swapped.error, q - p,
                   fits.declared.scale};
}

KVMELD_NAMESPACE_END
