#pragma once

/// Whether two views share memory, and whether one may be written without writing twice to one
/// place.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/layout_range.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// One axis of a plane: how many steps, how far a step. Bytes in overlap code, elements in the
/// writable check.
struct Axis {
  std::int64_t extent = 1;
  std::int64_t stride = 0;
};
[[nodiscard]] constexpr std::int64_t magnitude(std::int64_t x) noexcept { return x < 0 ? -x : x; }

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
KVMELD_LAZY void sort_axes(Axis* first, std::size_t count) noexcept {
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

/// Whether no two (slot, head, channel) share an element: each axis steps over all that the smaller
/// ones span.
KVMELD_LAZY [[nodiscard]] bool nested(const PlaneRef& plane, const SlotRange& range) noexcept {
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

/// Bytes [first, last) in memory.
struct Segment {
  std::uintptr_t first = 0;
  std::uintptr_t last = 0;
  bool operator<(const Segment& other) const noexcept { return first < other.first; }
};

/// Every contiguous piece of a plane, sorted. O(pieces log pieces): rows, or whole blocks where
/// they are contiguous.
KVMELD_LAZY [[nodiscard]] std::vector<Segment> segments(const PlaneRef& plane) {
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

KVMELD_LAZY [[nodiscard]] bool intersect(const std::vector<Segment>& a,
                                         const std::vector<Segment>& b) noexcept {
  std::uintptr_t reach_a = 0,
                 // segments of one plane may overlap each other, so remember how far any went
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
KVMELD_LAZY [[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> used_slots(
    const TokenSlots& slots, std::int64_t tokens) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t slot = slots.slot(t);
    if (slot >= 0) out.emplace_back(slot, t);
  }
  std::sort(out.begin(), out.end());
  return out;
}

[[nodiscard]] inline bool same_lattice(const PlaneRef& a, const PlaneRef& b) noexcept {
  return a.data == b.data && a.shape.type == b.shape.type && a.shape.heads == b.shape.heads &&
         a.shape.channels == b.shape.channels && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && a.channel_stride == b.channel_stride &&
         a.channel_split == b.channel_split && a.split_stride == b.split_stride &&
         a.slots.block_size == b.slots.block_size && a.slots.block_stride == b.slots.block_stride;
}

KVMELD_LAZY [[nodiscard]] bool planes_overlap(const PlaneRef& a, const PlaneRef& b) {
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

KVMELD_LAZY [[nodiscard]] Segment extent_in_memory(const PlaneRef& plane) noexcept {
  const Footprint f = footprint(plane);
  const auto base = reinterpret_cast<std::uintptr_t>(plane.data);
  if (f.empty()) return {};
  return {base + static_cast<std::uintptr_t>(f.first_byte),
          base + static_cast<std::uintptr_t>(f.last_byte) + 1};
}

}  // namespace detail

/// Whether two caches share a byte: the test behind `aliasing`.
///
/// Exact. Two sequences of one engine's pool do not overlap merely because their blocks alternate.
/// Both passed `check_view`. O(planes²) comparisons of footprints; only planes whose footprints
/// meet are compared slot by slot or piece by piece.
KVMELD_LAZY [[nodiscard]] bool overlaps(const KvCacheRef& a, const KvCacheRef& b) {
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

KVMELD_LAZY [[nodiscard]] Status check_steps(const PlaneRef& plane) {
  if (plane.tokens == 0 || plane.shape.heads == 0 || plane.shape.channels == 0 ||
      nested(plane, SlotRange(plane)))
    return {};
  return error(ErrorCode::aliasing, "strides step into each other: token ", plane.token_stride,
               ", head ", plane.head_stride, ", channel ", plane.channel_stride, ", block ",
               plane.slots.block_stride);
}

/// Whether no two of the tokens share a slot, in memory of the caller: `scratch` takes a number for
/// each token.
KVMELD_LAZY [[nodiscard]] Status check_slots_apart(const TokenSlots& slots, std::int64_t tokens,
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

/// Checks that no element of a view has two names, so that a write leaves what was written.
///
/// Errors: `aliasing`, naming the two tokens that share a slot, or the strides that step into each
/// other (a stride of 0 over more than one head or token, say). O(tokens log tokens).
KVMELD_LAZY [[nodiscard]] Status check_writable(const MutablePlaneRef& plane) {
  KVMELD_TRY(detail::check_steps(plane));
  if (plane.tokens == 0 || plane.shape.heads == 0 || plane.shape.channels == 0) return {};
  std::vector<std::int64_t> scratch(
      static_cast<std::size_t>(plane.slots.kind == SlotKind::identity ? 0 : plane.tokens));
  return detail::check_slots_apart(plane.slots, plane.tokens, scratch.data());
}

KVMELD_NAMESPACE_END
