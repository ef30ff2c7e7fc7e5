#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>

KVMELD_NAMESPACE_BEGIN

/// Where a view's elements and scales lie, and so who may read them. Declared, as a layout is;
/// nothing is asked of a driver. Slot tables are host memory wherever the elements lie;
/// docs/cuda.md has the exception.
enum class MemorySpace : std::uint8_t {
  host,     ///< this process's own memory; a device does not reach it
  pinned,   ///< page-locked host memory: host and device both reach it
  managed,  ///< moves between host and device by itself: both reach it
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
/// Whether kernels may.
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

/// The token axis of a plane: identity, block table, or slot list; unordered, with holes.
///
/// The table is the caller's and outlives the view. A slot lies at `(slot / block_size) *
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

using PlaneRef = BasicPlaneRef<const std::byte>;
using MutablePlaneRef = BasicPlaneRef<std::byte>;

KVMELD_NAMESPACE_END
