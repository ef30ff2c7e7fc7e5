#pragma once

/// Checks of views before use: bounds, overlaps, sizes, and whether keys rotate as declared.

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

// Which slots, elements and bytes a plane view touches.

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

[[nodiscard]] constexpr bool sane(std::int64_t stride) noexcept {
  return stride <= max_extent && stride >= -max_extent;
}

/// Entry of a table of either width.
[[nodiscard]] KVMELD_API std::int64_t table_entry(const TokenSlots& slots,
                                                  std::int64_t index) noexcept;
}  // namespace detail

namespace extend {

/// Whether slots are found through a table of blocks.
[[nodiscard]] constexpr bool is_block_table(SlotKind kind) noexcept {
  return kind == SlotKind::block_table_i32 || kind == SlotKind::block_table_i64;
}

}  // namespace extend

namespace extend {

/// Checks the token axis: kinds, table present, entries in a range that cannot overflow. O(table
/// entries).
/// @param slot_count slots that exist; entries at or above it are refused.
[[nodiscard]] KVMELD_API Status check_slots(const TokenSlots& slots, std::int64_t tokens,
                                            std::int64_t slot_count = detail::max_extent);

}  // namespace extend

/// The bytes that a view spans, exact at both ends; bytes in between may belong to other views.
/// O(table entries).
///
/// Requires a view that passed `check_view`.
[[nodiscard]] KVMELD_API Footprint footprint(const PlaneRef& plane) noexcept;

// Whether two views share memory, and whether a view addresses each of its bytes only once.

namespace detail {

[[nodiscard]] constexpr std::int64_t magnitude(std::int64_t x) noexcept { return x < 0 ? -x : x; }

}  // namespace detail

namespace extend {

/// Bytes [first, last) in memory.
struct Segment {
  std::uintptr_t first = 0;
  std::uintptr_t last = 0;
  bool operator<(const Segment& other) const noexcept { return first < other.first; }
};

}  // namespace extend

namespace detail {

/// Every contiguous segment of a plane, sorted by address: rows, or whole blocks where they are
/// contiguous. O(segments log segments).
[[nodiscard]] KVMELD_API std::vector<Segment> segments(const PlaneRef& plane);

[[nodiscard]] KVMELD_API bool same_lattice(const PlaneRef& a, const PlaneRef& b) noexcept;

}  // namespace detail

namespace extend {

/// The bytes from the first to the last that a plane may touch; empty where it has no rows.
[[nodiscard]] KVMELD_API Segment extent_in_memory(const PlaneRef& plane) noexcept;

}  // namespace extend

/// Whether two caches share a byte: the test behind `aliasing`.
///
/// Exact. Two sequences of one engine's pool do not overlap merely because their blocks alternate.
/// Requires caches that passed `check_view`. O(planes²) comparisons of footprints; only planes
/// whose footprints meet are compared slot by slot or segment by segment.
[[nodiscard]] KVMELD_API bool overlaps(const KvCacheRef& a, const KvCacheRef& b);

namespace detail {

[[nodiscard]] KVMELD_API Status check_steps(const PlaneRef& plane);

/// Checks that no two tokens share a slot. The caller's `scratch` holds one number for each token.
[[nodiscard]] KVMELD_API Status check_slots_apart(const TokenSlots& slots, std::int64_t tokens,
                                                  std::int64_t* scratch);

}  // namespace detail

/// Checks that no two indices of a view address the same element, so that no write overwrites
/// another.
///
/// Errors: `aliasing`, naming the two tokens that share a slot, or the strides that step into each
/// other (a stride of 0 over more than one head or token, say). O(tokens log tokens).
[[nodiscard]] KVMELD_API Status check_writable(const MutablePlaneRef& plane);

// Whether a plane view stays inside its buffer.

namespace detail {

[[nodiscard]] KVMELD_API Status check_strides(const PlaneRef& plane);

/// `check_view`, told which code to return for a short buffer and how many slots exist.
[[nodiscard]] KVMELD_API Status check_plane_view(const PlaneRef& plane, std::size_t capacity_bytes,
                                                 std::size_t bytes_before, ErrorCode too_small,
                                                 std::int64_t slot_count = max_extent);

}  // namespace detail

/// Checks that every element of a view lies inside its buffer, holes aside.
///
/// The buffer starts `bytes_before` bytes before `data` and holds `capacity_bytes`. Tables are read
/// on the host. Nothing is dereferenced but the table, so `data` may lie in any memory space.
/// O(table entries); no overflow whatever the numbers. Errors: `truncated` (the byte and the
/// capacity), `unknown_layout`, `unknown_field`, `unsupported` (block elements that do not lie in
/// rows), `invalid_argument` (strides, extents, missing table, data or scales).
[[nodiscard]] inline Status check_view(const PlaneRef& plane, std::size_t capacity_bytes,
                                       std::size_t bytes_before = 0) {
  return detail::check_plane_view(plane, capacity_bytes, bytes_before, ErrorCode::truncated);
}

// Planes from a caller's own tensor type.

namespace detail {

/// A mutable view where the tensor's elements are mutable.
template <class View>
using TensorByte =
    std::conditional_t<std::is_const_v<typename View::element_type>, const std::byte, std::byte>;

}  // namespace detail

/// Views a tensor (token, head, channel) as a plane. O(1).
///
/// Strides are the tensor's, so transposed and sliced views need no copy. `shape` says what the
/// plane is; its type, heads and channels must be the tensor's. An element of `q8_0_block` counts
/// as 32 channels. A caller's own half or bfloat16 type takes part through a specialisation of
/// `element_type_of`. Errors: `geometry_mismatch` (type, heads or channels), `aliasing` (a mutable
/// tensor whose strides overlap), and those of `check_view`.
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
    return extend::error(ErrorCode::geometry_mismatch, "the tensor holds ", to_string(type),
                         ", the plane declares ", to_string(shape.type));
  }
  for (std::size_t a = 0; a < 3; ++a) {
    if (extent(a) < 0 || extent(a) > detail::max_extent / unit ||
        stride(a) > detail::max_extent / unit || stride(a) < -detail::max_extent / unit) {
      return extend::error(ErrorCode::invalid_argument, "axis ", a, " has extent ", extent(a),
                           " and stride ", stride(a));
    }
  }
  if (extent(1) != shape.heads || extent(2) * unit != shape.channels) {
    return extend::error(ErrorCode::geometry_mismatch, "the tensor has ", extent(1), " heads of ",
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
    return extend::error(ErrorCode::invalid_argument, "a tensor of ", plane.tokens,
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
    return extend::error(ErrorCode::invalid_argument, "a cache needs a geometry");
  KVMELD_TRY(validate(*geometry));
  std::vector<BasicPlaneRef<detail::TensorByte<View>>> planes;
  for (const LayerShape& layer : geometry->layers) {
    for (const PlaneShape& shape : layer.planes) {
      if (planes.size() == tensors.size()) {
        return extend::error(ErrorCode::invalid_argument, tensors.size(),
                             " tensors, and the geometry declares more planes");
      }
      if (shape.scales != ScaleScheme::none) {
        return extend::error(ErrorCode::unsupported, "plane ", planes.size(),
                             " has scales; set `PlaneRef::scales` of a plane_from_tensor yourself");
      }
      auto plane = plane_from_tensor(tensors[planes.size()], shape);
      if (!plane) return plane.error();
      if (!planes.empty() && plane->tokens != planes[0].tokens) {
        return extend::error(ErrorCode::token_count_mismatch, "tensor ", planes.size(), " holds ",
                             plane->tokens, " tokens, tensor 0 holds ", planes[0].tokens);
      }
      planes.push_back(*plane);
    }
  }
  if (planes.size() != tensors.size()) {
    return extend::error(ErrorCode::invalid_argument, tensors.size(), " tensors for ",
                         planes.size(), " planes");
  }
  const std::int64_t tokens = planes.empty() ? 0 : planes[0].tokens;
  return BasicKvCacheRef<detail::TensorByte<View>>(std::move(geometry), std::move(planes), tokens);
}

// The self-check that tells whether a declared rope is the one by which an engine rotated its keys.

/// How well a declared rope carries keys from one position to another. Errors are L2 norms relative
/// to the keys at the target.
struct RopeCheck {
  double relative_error = 0.0;          ///< Declared rope.
  double error_without_rotation = 0.0;  ///< Keys left as they are.
  double error_other_pairing = 0.0;     ///< Same frequencies, the other pairing.
  std::int64_t shift = 0;               ///< q - p.
  /// Factor on the rotated keys that fits best; 1 where the engine kept the magnitude.
  double common_scale = 1.0;
};

/// Smallest distance at which pairings and bases can be told apart: near each other, wrong
/// rotations look right.
inline constexpr std::int64_t verify_rope_min_distance = 64;

/// Checks a declared rope against an engine's own keys for the same tokens at two positions.
///
/// Token t of `keys_at_p` was encoded at position p + t, of `keys_at_q` at q + t, so every key
/// moves by q - p. Take layer 0 of the model, where keys depend on nothing before them. The first
/// position may be any; the distance q - p must be at least 64. `tolerance` bounds the relative L2
/// error: 0.01 passes f16 and bf16 caches and engines that compute angles in f32, and is a
/// hundredth of what a wrong pairing leaves. `context_length` as for `inverse_frequencies`. Errors:
/// those of `validate`; `token_count_mismatch` (spans unequal, or not whole tokens); `non_finite`;
/// `invalid_argument` (distance below 64, no keys, all keys zero, or keys that hardly change and so
/// prove nothing); `rope_mismatch` with the figures and what would fit instead. O(keys).
[[nodiscard]] KVMELD_API Result<RopeCheck> verify_rope(const RopeSpec& rope, std::int32_t heads,
                                                       std::int32_t channels,
                                                       // (token, head, channel)
                                                       std::span<const float> keys_at_p,
                                                       // (token, head, channel)
                                                       std::span<const float> keys_at_q,
                                                       std::int64_t p, std::int64_t q,
                                                       double tolerance = 0.01,
                                                       std::int64_t context_length = 0);

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/check_view.hpp>
#endif
