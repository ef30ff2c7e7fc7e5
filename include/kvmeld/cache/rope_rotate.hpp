#pragma once

/// Turning one key by one table row: the expression, its lane form for devices, and its row form
/// for host vectors.

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/rope.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Turns the pair (a, b) by the angle whose cosine and sine are given; two roundings a result.
///
/// The one expression for every backend: row form, lane form and tests reach it, so that bytes
/// agree. cos = 0, sin = 1 gives exactly (-b, a).
KVMELD_HD KVMELD_ALWAYS_INLINE void rotate_pair(float& a, float& b, float cos, float sin) noexcept {
  const float first = fma(a, cos, -(b * sin));
  const float second = fma(a, sin, b * cos);
  a = first;
  b = second;
}

/// Where a channel's partner is, and which pair of the table turns them.
struct RopePair {
  std::int32_t partner = -1;  ///< The other channel of the pair, or -1: the channel passes through.
  /// Pair number: cosine at `index`, sine at `index + rotary_channels / 2` of a table row.
  std::int32_t index = 0;
};

/// The pair of one channel, for code that owns one channel at a time.
[[nodiscard]] KVMELD_HD inline RopePair rope_pair(RopePairing pairing, std::int32_t first_channel,
                                                  std::int32_t rotary_channels,
                                                  std::int32_t channel) noexcept {
  const std::int32_t c = channel - first_channel;
  if (c < 0 || c >= rotary_channels) return {};
  if (pairing == RopePairing::interleaved) return {first_channel + (c ^ 1), c >> 1};
  const std::int32_t half = rotary_channels / 2;
  return c < half ? RopePair{first_channel + c + half, c}
                  : RopePair{first_channel + c - half, c - half};
}

/// The partner of one channel, or -1 where the channel passes through.
[[nodiscard]] KVMELD_HD inline std::int32_t pair_of(RopePairing pairing, std::int32_t first_channel,
                                                    std::int32_t rotary_channels,
                                                    std::int32_t channel) noexcept {
  return rope_pair(pairing, first_channel, rotary_channels, channel).partner;
}

/// One channel of a turned row, read from the row before: the lane form.
///
/// Lanes write elsewhere, or all read before any writes, since a channel needs its partner's old
/// value.
[[nodiscard]] KVMELD_HD inline float rotated_channel(RopePairing pairing,
                                                     std::int32_t first_channel,
                                                     std::int32_t rotary_channels,
                                                     const float* table_row, const float* row,
                                                     std::int32_t channel) noexcept {
  const RopePair pair = rope_pair(pairing, first_channel, rotary_channels, channel);
  if (pair.partner < 0) return row[channel];
  const bool is_first = channel < pair.partner;
  float a = row[is_first ? channel : pair.partner];
  float b = row[is_first ? pair.partner : channel];
  rotate_pair(a, b, table_row[pair.index], table_row[pair.index + rotary_channels / 2]);
  return is_first ? a : b;
}

namespace detail {

/// `Pairs` pairs at once. Local arrays, because the loads of one block then cannot alias its stores
/// and compilers keep the block in registers; a constant trip count, because g++ -O2 vectorises no
/// other loop.
template <std::size_t Pairs>
KVMELD_ALWAYS_INLINE void rotate_block(const float* cos, const float* sin, float* first,
                                       float* second) noexcept {
  float a[Pairs], b[Pairs];
  for (std::size_t i = 0; i < Pairs; ++i) {
    a[i] = first[i];
    b[i] = second[i];
    rotate_pair(a[i], b[i], cos[i], sin[i]);
  }
  for (std::size_t i = 0; i < Pairs; ++i) first[i] = a[i];
  for (std::size_t i = 0; i < Pairs; ++i) second[i] = b[i];
}

template <std::size_t Pairs>
KVMELD_ALWAYS_INLINE void rotate_block_interleaved(const float* cos, const float* sin,
                                                   float* row) noexcept {
  float out[2 * Pairs];
  KVMELD_KEEP_LOOP
  for (std::size_t i = 0; i < Pairs; ++i) {
    out[2 * i] = row[2 * i];
    out[2 * i + 1] = row[2 * i + 1];
    rotate_pair(out[2 * i], out[2 * i + 1], cos[i], sin[i]);
  }
  for (std::size_t i = 0; i < 2 * Pairs; ++i) row[i] = out[i];
}

}  // namespace detail

/// Turns one key in place: the host's row form. (channel)
///
/// `row` is a whole head in f32, `table_row` a row of `RopeTable`. Inlined, so that it is compiled
/// for the instruction set of the function that calls it. A shift of 0 is the caller's to skip: it
/// copies bytes. The arguments are a validated spec's.
KVMELD_ALWAYS_INLINE void rotate_row(RopePairing pairing, std::int32_t first_channel,
                                     std::int32_t rotary_channels, const float* table_row,
                                     float* row) noexcept {
  const std::int32_t half = rotary_channels / 2;
  const float* cos = table_row;
  const float* sin = table_row + half;
  float* const part = row + first_channel;
  std::int32_t i = 0;
  if (pairing == RopePairing::half_split) {
    for (; i + 16 <= half; i += 16)
      detail::rotate_block<16>(cos + i, sin + i, part + i, part + half + i);
    for (; i + 8 <= half; i += 8)
      detail::rotate_block<8>(cos + i, sin + i, part + i, part + half + i);
    for (; i < half; ++i) detail::rotate_block<1>(cos + i, sin + i, part + i, part + half + i);
  } else {
    for (; i + 16 <= half; i += 16)
      detail::rotate_block_interleaved<16>(cos + i, sin + i, part + 2 * i);
    for (; i + 8 <= half; i += 8)
      detail::rotate_block_interleaved<8>(cos + i, sin + i, part + 2 * i);
    for (; i < half; ++i) detail::rotate_block_interleaved<1>(cos + i, sin + i, part + 2 * i);
  }
}

KVMELD_NAMESPACE_END
