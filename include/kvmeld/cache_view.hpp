#pragma once

/// Non-owning views of K/V caches, and the copying of their rows.

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

/// The memory in which a view's elements and scales lie, and so who may read them. Callers declare
/// it, as they declare a layout; no driver is queried. Slot tables are in host memory wherever the
/// elements are; docs/cuda.md has the exception.
enum class MemorySpace : std::uint8_t {
  host,     ///< this process's own memory, which a device cannot access
  pinned,   ///< page-locked host memory: host and device both reach it
  managed,  ///< migrates between host and device: both reach it
  device,   ///< a device's memory, which the host must not touch
};

/// How messages name a memory space.
[[nodiscard]] constexpr const char* to_string(MemorySpace space) noexcept {
  switch (space) {
    case MemorySpace::host:
      return "host";
    case MemorySpace::pinned:
      return "pinned";
    case MemorySpace::managed:
      return "managed";
    case MemorySpace::device:
      return "device";
  }
  return "unknown";
}
/// Whether code on the host may touch such memory.
[[nodiscard]] constexpr bool host_reaches(MemorySpace space) noexcept {
  return space < MemorySpace::device;
}
/// Whether a kernel may touch such memory.
[[nodiscard]] constexpr bool device_reaches(MemorySpace space) noexcept {
  return space > MemorySpace::host && space <= MemorySpace::device;
}

/// How a logical token finds its slot in memory.
enum class SlotKind : std::uint8_t {
  identity,         ///< slot = first + token
  block_table_i32,  ///< slot = table[token / block_size] * block_size + token % block_size
  block_table_i64,
  slot_list_i32,  ///< slot = table[token]; negative: this token has no row here
  slot_list_i64,
};

/// The token axis of a plane: identity, block table, or slot list; slots in any order, and holes.
///
/// The caller owns the table, which outlives the view. A slot lies at `(slot / block_size) *
/// block_stride + (slot % block_size) * token_stride` elements, or at `slot * token_stride` where
/// `block_size` is 0.
struct TokenSlots {
  SlotKind kind = SlotKind::identity;
  const void* table = nullptr;
  std::int64_t first = 0;
  std::int64_t block_size = 0;    ///< tokens a block; 0: the slots are evenly spaced
  std::int64_t block_stride = 0;  ///< elements from one block to the next

  /// The slot of a token, or a negative number for a hole.
  [[nodiscard]] KVMELD_HD std::int64_t slot(std::int64_t token) const noexcept {
    switch (kind) {
      case SlotKind::identity:
        return first + token;
      case SlotKind::block_table_i32:
        return paged(static_cast<const std::int32_t*>(table)[token / block_size], token);
      case SlotKind::block_table_i64:
        return paged(static_cast<const std::int64_t*>(table)[token / block_size], token);
      case SlotKind::slot_list_i32:
        return static_cast<const std::int32_t*>(table)[token];
      case SlotKind::slot_list_i64:
        return static_cast<const std::int64_t*>(table)[token];
    }
    return -1;
  }

 private:
  [[nodiscard]] KVMELD_HD std::int64_t paged(std::int64_t block,
                                             std::int64_t token) const noexcept {
    return block < 0 ? -1 : block * block_size + token % block_size;
  }
};

/// Scales of an integer plane, f32: element = stored * scale.
struct ScaleRef {
  const float* data = nullptr;
  std::int64_t slot_stride = 0;  ///< floats from one slot to the next (0: `per_tensor`)
  std::int64_t head_stride = 0;
  std::int64_t group_stride = 0;  ///< floats from one channel group to the next

  [[nodiscard]] KVMELD_HD float at(std::int64_t slot, std::int64_t head,
                                   std::int64_t group) const noexcept {
    return data[slot * slot_stride + head * head_stride + group * group_stride];
  }
};

/// A non-owning view of one plane of one layer: rows of `channels` elements, addressed by (token,
/// head).
///
/// Strides are signed and count elements. Copying the view copies no elements. Channels lie
/// `channel_stride` apart; in split-channel layouts ([B, H, D/x, N, x]) channel c lies at `(c /
/// channel_split) * split_stride + c % channel_split`.
/// @tparam Byte `std::byte` for views that may be written, `const std::byte` otherwise.
template <class Byte>
struct BasicPlaneRef {
  Byte* data = nullptr;
  MemorySpace space = MemorySpace::host;  ///< of `data` and of the scales
  PlaneShape shape{};
  std::int64_t tokens = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t channel_stride = 1;
  std::int64_t channel_split = 0;  ///< x of a split-channel layout; 0: not split
  std::int64_t split_stride = 0;
  TokenSlots slots{};
  ScaleRef scales{};

  BasicPlaneRef() = default;
  /// A view that may be written is also a view that may be read.
  template <class Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicPlaneRef(const BasicPlaneRef<Other>& o)  // NOLINT: implicit on purpose
      : data(o.data),
        space(o.space),
        shape(o.shape),
        tokens(o.tokens),
        token_stride(o.token_stride),
        head_stride(o.head_stride),
        channel_stride(o.channel_stride),
        channel_split(o.channel_split),
        split_stride(o.split_stride),
        slots(o.slots),
        scales(o.scales) {}

  /// Element offset of slot `slot`, head `head`, channel 0.
  [[nodiscard]] KVMELD_HD std::int64_t row_offset(std::int64_t slot,
                                                  std::int64_t head) const noexcept {
    const std::int64_t token_part = slots.block_size == 0
                                        ? slot * token_stride
                                        : (slot / slots.block_size) * slots.block_stride +
                                              (slot % slots.block_size) * token_stride;
    return token_part + head * head_stride;
  }
  /// Element offset of a channel inside its row.
  [[nodiscard]] KVMELD_HD std::int64_t channel_offset(std::int64_t channel) const noexcept {
    return channel_split == 0 ? channel * channel_stride
                              : (channel / channel_split) * split_stride +
                                    (channel % channel_split) * channel_stride;
  }
  /// Whether a row's channels lie one after the other in memory.
  [[nodiscard]] KVMELD_HD bool contiguous_rows() const noexcept {
    return channel_split == 0 && channel_stride == 1;
  }
  /// Bytes of one element, or of one block of a block type.
  [[nodiscard]] KVMELD_HD std::int64_t byte_offset(std::int64_t elements) const noexcept {
    return elements / block_elements(shape.type) * block_bytes(shape.type);
  }
};

/// A plane that may be read.
using PlaneRef = BasicPlaneRef<const std::byte>;
/// A plane that may be written.
using MutablePlaneRef = BasicPlaneRef<std::byte>;

/// A non-owning view of a whole cache: a geometry and one plane view per (layer, plane), all over
/// the same tokens.
///
/// `tokens()` counts what every plane holds, holes included. Layout factories make views that keep
/// this; every function that reads a view put together by hand checks it against its geometry and
/// its planes. Copies share the geometry and copy the plane descriptors, never elements. Planes of
/// one layer have the same holes.
/// @tparam Byte `std::byte` for caches that may be written, `const std::byte` otherwise.
template <class Byte>
class BasicKvCacheRef {
 public:
  using plane_type = BasicPlaneRef<Byte>;

  BasicKvCacheRef() = default;
  /// @param planes layer-major, in the order of `geometry->layers[l].planes`.
  BasicKvCacheRef(std::shared_ptr<const Geometry> geometry, std::vector<plane_type> planes,
                  std::int64_t tokens)
      : geometry_(std::move(geometry)), planes_(std::move(planes)), tokens_(tokens) {
    std::size_t first = 0;
    for (const LayerShape& layer : geometry_->layers) {
      first_plane_.push_back(first);
      first += layer.planes.size();
    }
  }
  template <class Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicKvCacheRef(const BasicKvCacheRef<Other>& o)  // NOLINT: implicit on purpose
      : BasicKvCacheRef(o.shared_geometry(),
                        std::vector<plane_type>(o.planes().begin(), o.planes().end()), o.tokens()) {
  }

  [[nodiscard]] const Geometry& geometry() const noexcept { return *geometry_; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return geometry_;
  }
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::span<const plane_type> planes() const noexcept { return planes_; }
  [[nodiscard]] const plane_type& plane(std::size_t layer, std::size_t index) const noexcept {
    return planes_[first_plane_[layer] + index];
  }
  /// The same memory, its first `count` tokens: all of them where there are fewer, none where
  /// `count` is below 0.
  [[nodiscard]] BasicKvCacheRef first(std::int64_t count) const {
    BasicKvCacheRef out = *this;
    out.tokens_ = (std::max)((std::min)(count, tokens_), std::int64_t{0});
    for (plane_type& plane : out.planes_) plane.tokens = (std::min)(plane.tokens, out.tokens_);
    return out;
  }
  /// The same view, its elements and scales declared to lie in `space`.
  ///
  /// Factories and hand-made views assume host memory; `dlpack_view` takes the tensors' device
  /// type. Declare device memory as `device`: functions that would read it on the host then refuse
  /// it with `memory_space`.
  [[nodiscard]] BasicKvCacheRef in(MemorySpace space) const {
    BasicKvCacheRef out = *this;
    for (plane_type& plane : out.planes_) plane.space = space;
    return out;
  }
  [[nodiscard]] bool valid() const noexcept { return geometry_ != nullptr; }

 private:
  std::shared_ptr<const Geometry> geometry_;
  std::vector<plane_type> planes_;
  std::vector<std::size_t> first_plane_;
  std::int64_t tokens_ = 0;
};

/// A cache that may be read.
using KvCacheRef = BasicKvCacheRef<const std::byte>;
/// A cache that may be written.
using MutableKvCacheRef = BasicKvCacheRef<std::byte>;

namespace detail {

/// One plane of `check_view_planes`. O(1).
template <class Byte>
[[nodiscard]] Status check_view_plane(const BasicKvCacheRef<Byte>& view, std::size_t l,
                                      std::size_t p, const char* who) {
  const BasicPlaneRef<Byte>& plane = view.plane(l, p);
  const PlaneShape& declared = view.geometry().layers[l].planes[p];
  if (plane.shape != declared) {
    return error(ErrorCode::geometry_mismatch, who, ": layer ", l, " plane ", p, " is viewed as ",
                 plane.shape.heads, " heads of ", plane.shape.channels, " ",
                 to_string(plane.shape.type), ", the geometry declares ", declared.heads, " of ",
                 declared.channels, " ", to_string(declared.type),
                 "; give PlaneRef::shape the geometry's");
  }
  if (plane.tokens < view.tokens() || view.tokens() < 0) {
    return error(ErrorCode::token_count_mismatch, who, ": layer ", l, " plane ", p, " holds ",
                 plane.tokens, " tokens, the view says ", view.tokens());
  }
  return {};
}

/// Refuses a view without geometry, or with another number of planes. O(layers).
template <class Byte>
[[nodiscard]] Status check_view_count(const BasicKvCacheRef<Byte>& view, const char* who) {
  if (!view.valid()) return error(ErrorCode::invalid_argument, who, ": the view has no geometry");
  std::size_t planes = 0;
  for (const LayerShape& layer : view.geometry().layers) planes += layer.planes.size();
  if (view.planes().size() == planes) return {};
  return error(ErrorCode::invalid_argument, who, ": a view of ", view.planes().size(),
               " planes over a geometry of ", planes);
}

}  // namespace detail

namespace extend {

/// Refuses a view whose planes do not match it: their number and shapes are those of the geometry,
/// and each covers at least the view's tokens.
///
/// A view made by a layout factory passes; one put together by hand may not. O(planes). Errors:
/// `invalid_argument` (no geometry, another number of planes), `geometry_mismatch`,
/// `token_count_mismatch`.
template <class Byte>
[[nodiscard]] Status check_view_planes(const BasicKvCacheRef<Byte>& view, const char* who) {
  KVMELD_TRY(detail::check_view_count(view, who));
  for (std::size_t l = 0; l < view.geometry().layers.size(); ++l) {
    for (std::size_t p = 0; p < view.geometry().layers[l].planes.size(); ++p) {
      KVMELD_TRY(detail::check_view_plane(view, l, p, who));
    }
  }
  return {};
}

}  // namespace extend

namespace detail {

/// Refuses a plane that the host cannot reach; the message says what to do.
[[nodiscard]] KVMELD_API Status check_host_reaches(MemorySpace space, const char* who);

}  // namespace detail

namespace extend {

/// Refuses a plane that declares separate scales but has no pointer to them; every reader of scales
/// calls it.
template <class Byte>
[[nodiscard]] Status check_scales(const BasicPlaneRef<Byte>& plane, const char* who) {
  if (plane.shape.scales == ScaleScheme::none || plane.scales.data != nullptr) return {};
  return error(ErrorCode::invalid_argument, who, ": a plane of ", plane.shape.heads, " heads of ",
               plane.shape.channels, " ", to_string(plane.shape.type),
               " declares scales and gives none; set PlaneRef::scales");
}

/// The check that precedes every read or write of a view's rows on the host: `check_view_planes`,
/// and that the host reaches the elements. Errors: those of `check_view_planes`, and
/// `memory_space`.
template <class Byte>
[[nodiscard]] Status check_on_host(const BasicKvCacheRef<Byte>& view, const char* who) {
  KVMELD_TRY(detail::check_view_planes(view, who));
  for (const BasicPlaneRef<Byte>& plane : view.planes())
    KVMELD_TRY(detail::check_host_reaches(plane.space, who));
  return {};
}

}  // namespace extend

/// A cache that can be read in place: it hands out plane views over its own memory.
///
/// Semantic requirements: `kv_cache_ref()` costs no copy of elements and stays valid while the
/// cache lives unchanged.
template <class C>
concept KvCacheView = std::convertible_to<const C&, KvCacheRef> || requires(const C& cache) {
  { cache.kv_cache_ref() } -> std::convertible_to<KvCacheRef>;
};

// What an engine declares about its tokens: which slots hold them, in which order, and per layer
// where layers differ.

/// Which slots hold a view's tokens, in logical order. The caller owns the tables; they are in host
/// memory and outlive the view.
///
/// A negative table entry is a hole: that token has no row here. Entries after the last one that
/// the tokens need (the padding of engines' tables) are not read.
struct TokenPlacement {
  std::int64_t tokens = 0;
  SlotKind kind = SlotKind::identity;
  const void* table = nullptr;
  std::int64_t entries = 0;  ///< of the table
  std::int64_t first = 0;    ///< slot of token 0, for `identity`

  /// Token t lies in slot `first + t`.
  [[nodiscard]] static TokenPlacement in_order(std::int64_t tokens,
                                               std::int64_t first = 0) noexcept {
    return {.tokens = tokens, .first = first};
  }
  /// Token t lies in block `table[t / block_size]`.
  [[nodiscard]] KVMELD_API static TokenPlacement block_table(std::span<const std::int32_t> table,
                                                             std::int64_t tokens) noexcept;
  [[nodiscard]] KVMELD_API static TokenPlacement block_table(std::span<const std::int64_t> table,
                                                             std::int64_t tokens) noexcept;
  /// Token t lies in slot `table[t]`; in a paged layout a slot is `block * block_size + offset`, as
  /// in vLLM's slot mapping.
  [[nodiscard]] KVMELD_API static TokenPlacement slot_list(
      std::span<const std::int32_t> table) noexcept;
  [[nodiscard]] KVMELD_API static TokenPlacement slot_list(
      std::span<const std::int64_t> table) noexcept;
};

/// One value for all layers, or one for each: sliding-window layers have pools and tables of their
/// own.
template <class T>
class PerLayer {
 public:
  PerLayer() : values_(1) {}
  PerLayer(T value) : values_{std::move(value)} {}  // NOLINT: implicit on purpose
  // NOLINT: implicit on purpose
  PerLayer(std::vector<T> values) : values_(std::move(values)), each_(true) {}

  [[nodiscard]] const T& operator[](std::size_t layer) const noexcept {
    return values_[each_ ? layer : 0];
  }
  [[nodiscard]] bool covers(std::size_t layers) const noexcept {
    return !each_ || values_.size() == layers;
  }
  [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }

 private:
  std::vector<T> values_;
  bool each_ = false;
};

/// Slots of a ring buffer's tokens in temporal order, for `TokenPlacement::slot_list`.
///
/// A ring of `window` slots that has seen `seen` tokens holds the last min(seen, window), token t
/// of the sequence in slot t % window. The list is for the last `view_tokens` tokens of the
/// sequence, -1 for those that the ring has overwritten, so that a view can hold sliding-window
/// layers beside full ones; where `view_tokens` is below 0, it lists only the tokens that the ring
/// holds. A ring's write cursor alone does not give the order: it also depends on how many tokens
/// the ring has seen. Errors: `invalid_argument` (window below 1, seen below 0, more view tokens
/// than were seen).
[[nodiscard]] KVMELD_API Result<std::vector<std::int64_t>> ring_slots(
    std::int64_t seen, std::int64_t window, std::int64_t view_tokens = -1);

namespace detail {

/// Checks a table's length against the tokens; `check_slots` checks its entries.
[[nodiscard]] KVMELD_API Status check_table(const TokenPlacement& placement,
                                            std::int64_t block_size);

}  // namespace detail

namespace extend {

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

}  // namespace extend

namespace detail {

/// Whether all heads of consecutive tokens lie in one run of memory.
template <class Byte>
[[nodiscard]] bool contiguous_tokens(const BasicPlaneRef<Byte>& plane) noexcept {
  return contiguous_heads(plane) && plane.slots.kind == SlotKind::identity &&
         plane.slots.block_size == 0 &&
         plane.token_stride == static_cast<std::int64_t>(plane.shape.heads) * plane.shape.channels;
}

}  // namespace detail

namespace extend {

/// Copies the elements of one row out of a view into contiguous bytes.
KVMELD_API void gather_row(const PlaneRef& plane, std::int64_t slot, std::int64_t head,
                           std::byte* out) noexcept;

/// Copies contiguous bytes into the elements of one row of a view.
KVMELD_API void scatter_row(const MutablePlaneRef& plane, std::int64_t slot, std::int64_t head,
                            const std::byte* in) noexcept;

/// Copies the canonical bytes of all heads of one slot; `out` takes heads * row_bytes.
KVMELD_API void gather_heads(const PlaneRef& plane, std::int64_t slot, std::byte* out) noexcept;

/// Copies the scales of all heads of one slot in the order (head, group).
KVMELD_API void gather_scales(const PlaneRef& plane, std::int64_t slot, float* out) noexcept;

}  // namespace extend

// Copying a row with 32 lanes, in the widest words that the addresses allow.

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

// One pass over stored elements that replaces −0 by +0 and finds the largest magnitude.

namespace detail {

template <class Bits>
[[nodiscard]] const unaligned_t<Bits>* elements_of(const std::byte* bytes) noexcept {
  return reinterpret_cast<const unaligned_t<Bits>*>(bytes);
}
template <class Bits>
[[nodiscard]] unaligned_t<Bits>* elements_of(std::byte* bytes) noexcept {
  return reinterpret_cast<unaligned_t<Bits>*>(bytes);
}

/// The largest magnitude among `count` floats, as bits without sign: magnitudes order like
/// integers, and infinities and NaNs come last. Where `Byte` is mutable, −0 is replaced by +0;
/// subnormals stay.
/// @tparam Bits the unsigned integer of the element's width.
template <class Bits, class Byte>
KVMELD_ALWAYS_INLINE Bits largest_body(Byte* bytes, std::size_t count) noexcept {
  constexpr Bits sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr Bits rest = static_cast<Bits>(~sign);
  auto* const x = elements_of<Bits>(bytes);
  Bits most[row_block] = {};
  std::size_t i = 0;
  for (; i + row_block <= count; i += row_block) {
    KVMELD_KEEP_LOOP
    for (std::size_t c = 0; c < row_block; ++c) {
      const Bits v = x[i + c], magnitude = static_cast<Bits>(v & rest);
      most[c] = magnitude > most[c] ? magnitude : most[c];
      if constexpr (!std::is_const_v<Byte>) x[i + c] = v == sign ? Bits{0} : v;
    }
  }
  for (; i < count; ++i) {
    const Bits v = x[i], magnitude = static_cast<Bits>(v & rest);
    most[0] = magnitude > most[0] ? magnitude : most[0];
    if constexpr (!std::is_const_v<Byte>) x[i] = v == sign ? Bits{0} : v;
  }
  for (const Bits m : most) most[0] = m > most[0] ? m : most[0];
  return most[0];
}
template <class Bits, class Byte>
KVMELD_NOINLINE Bits largest_baseline(Byte* bytes, std::size_t count) noexcept {
  return largest_body<Bits>(bytes, count);
}
template <class Bits, class Byte>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE Bits largest_avx2(Byte* bytes, std::size_t count) noexcept {
  return largest_body<Bits>(bytes, count);
}
template <class Bits, class Byte>
[[nodiscard]] Bits largest_bits(Byte* bytes, std::size_t byte_count) noexcept {
  const std::size_t count = byte_count / sizeof(Bits);
  return best_isa() == Isa::baseline ? largest_baseline<Bits>(bytes, count)
                                     : largest_avx2<Bits>(bytes, count);
}

/// The same for blocks of a f16 scale and 32 bytes, whose magnitudes are at most 128.
template <class Byte>
[[nodiscard]] std::uint16_t largest_scale(Byte* bytes, std::size_t byte_count) noexcept {
  std::uint16_t most = 0;
  for (std::size_t at = 0; at + sizeof(q8_0_block) <= byte_count; at += sizeof(q8_0_block)) {
    const std::uint16_t scale = largest_body<std::uint16_t>(bytes + at, 1);
    most = scale > most ? scale : most;
  }
  return most;
}

/// The largest magnitude of contiguous elements, infinity where one is not finite. For blocks with
/// a scale it is an upper bound.
template <class Byte>
[[nodiscard]] double largest_magnitude(ElementType type, Byte* bytes,
                                       std::size_t byte_count) noexcept {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto value = [&](auto number) {
    return number <= (std::numeric_limits<decltype(number)>::max)() ? static_cast<double>(number)
                                                                    : infinity;
  };
  switch (type) {
    case ElementType::f64:
      return value(__builtin_bit_cast(double, largest_bits<std::uint64_t>(bytes, byte_count)));
    case ElementType::f32:
      return value(bits_float(largest_bits<std::uint32_t>(bytes, byte_count)));
    case ElementType::f16:
      return value(to_float(f16{largest_bits<std::uint16_t>(bytes, byte_count)}));
    case ElementType::bf16:
      return value(to_float(bf16{largest_bits<std::uint16_t>(bytes, byte_count)}));
    case ElementType::f8_e5m2:
      return value(to_float(f8_e5m2{largest_bits<std::uint8_t>(bytes, byte_count)}));
    case ElementType::f8_e4m3:
      return value(to_float(f8_e4m3{largest_bits<std::uint8_t>(bytes, byte_count)}));
    case ElementType::i8:
      return 128;
    case ElementType::q8_0:
      return 128 * value(to_float(f16{largest_scale(bytes, byte_count)}));
  }
  return infinity;
}

}  // namespace detail

namespace extend {

/// Normalises contiguous elements before they are hashed: −0 becomes +0. Returns their largest
/// magnitude, infinity where one is not finite. O(bytes).
[[nodiscard]] inline double normalise(ElementType type, std::byte* bytes,
                                      std::size_t byte_count) noexcept {
  return detail::largest_magnitude(type, bytes, byte_count);
}

}  // namespace extend

namespace detail {

/// The largest magnitude of contiguous elements, infinity where one is not finite. O(bytes).
[[nodiscard]] inline double peak_of(ElementType type, const std::byte* bytes,
                                    std::size_t byte_count) noexcept {
  return largest_magnitude(type, bytes, byte_count);
}

}  // namespace detail

namespace extend {

/// Whether a largest magnitude says that all elements are finite.
[[nodiscard]] inline bool is_finite(double peak) noexcept {
  return peak <= (std::numeric_limits<double>::max)();
}

}  // namespace extend

namespace detail {

/// The largest f32 magnitude that an element type stores without it becoming an infinity or a NaN.
/// e4m3 and integers saturate by their definition, f64 takes all of f32.
[[nodiscard]] constexpr double largest_stored(ElementType type) noexcept {
  switch (type) {
    case ElementType::f16:
      return 65504;
    case ElementType::bf16:
      return static_cast<double>(to_float(bf16{0x7f7f}));
    case ElementType::f8_e5m2:
      return 57344;
    case ElementType::q8_0:
      return 127.0 * 65504;
    default:
      return static_cast<double>((std::numeric_limits<float>::max)());
  }
}

}  // namespace detail

namespace extend {

/// The index of the first row of `row_size` bytes that holds a NaN or an infinity; the number of
/// rows where none does.
[[nodiscard]] KVMELD_API std::size_t first_non_finite(ElementType type, const std::byte* bytes,
                                                      std::size_t byte_count,
                                                      std::size_t row_size) noexcept;

}  // namespace extend

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/cache_view.hpp>
#endif
