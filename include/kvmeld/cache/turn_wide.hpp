#pragma once

/// bf16 rows turned in 512-bit registers: rounding is most of their work, and these halve it.

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/stream_copy.hpp>
#include <kvmeld/cache/turn.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

#if KVMELD_X86_DISPATCH

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Whether `turn_rows_wide` takes rows of this shape: all channels turn, and vectors fill them.
[[nodiscard]] inline bool turns_wide(const Turn& turn) noexcept {
  return turn.first_channel == 0 && turn.rotary_channels == turn.channels &&
         turn.channels % (turn.pairing == RopePairing::half_split ? 64 : 32) == 0;
}

template <bool streams>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void put_wide(WideFloats even, WideFloats odd,
                                                        std::byte* out) noexcept {
  const WideWords words = Avx512Lanes32<ElementType::bf16>::round(even, odd);
  if constexpr (streams) {
    stream_wide(words, out);
  } else {
    *reinterpret_cast<unaligned_vector_t<unsigned, 64>*>(out) = words;
  }
}

/// One row: the expressions of `rotate_pair`. A 32-bit word holds channels 2i and 2i + 1, for
/// interleaved rows one pair.
template <bool streams>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void turn_row_wide(bool halves, std::int32_t half,
                                                             const float* cos, const float* sin,
                                                             const std::byte* in,
                                                             std::byte* out) noexcept {
  if (!halves) {
    for (std::int32_t i = 0; i < half; i += 16) {
      const auto words = reinterpret_cast<WideWords>(load_wide(in + 4 * i));
      const auto a = reinterpret_cast<WideFloats>(words << 16),
                 b = reinterpret_cast<WideFloats>(words & 0xffff0000U);
      const WideFloats c = load_wide(cos + i), s = load_wide(sin + i);
      put_wide<streams>(fma_wide(a, c, -(b * s)), fma_wide(a, s, b * c), out + 4 * i);
    }
    return;
  }
  const std::int64_t second = 2 * std::int64_t{half};
  for (std::int32_t i = 0; i < half; i += 32) {
    const auto first_words = reinterpret_cast<WideWords>(load_wide(in + 2 * i));
    const auto second_words = reinterpret_cast<WideWords>(load_wide(in + second + 2 * i));
    const auto a = reinterpret_cast<WideFloats>(first_words << 16),
               a2 = reinterpret_cast<WideFloats>(first_words & 0xffff0000U);
    const auto b = reinterpret_cast<WideFloats>(second_words << 16),
               b2 = reinterpret_cast<WideFloats>(second_words & 0xffff0000U);
    const WideFloats c = load_wide(cos + i), c2 = load_wide(cos + i + 16);
    const WideFloats s = load_wide(sin + i), s2 = load_wide(sin + i + 16);
    put_wide<streams>(fma_wide(a, c, -(b * s)), fma_wide(a2, c2, -(b2 * s2)), out + 2 * i);
    put_wide<streams>(fma_wide(a, s, b * c), fma_wide(a2, s2, b2 * c2), out + second + 2 * i);
  }
}

/// Turns rows that follow each other on both sides by one angle. Where they stream, `out` is a
/// multiple of 64.
KVMELD_LAZY KVMELD_TARGET_AVX512 KVMELD_NOINLINE void turn_rows_wide(const Turn& turn,
                                                                     const std::byte* in,
                                                                     std::byte* out,
                                                                     std::int64_t rows,
                                                                     bool streams) noexcept {
  constexpr std::int32_t most = 512;
  alignas(64) float cos[most];
  alignas(64) float sin[most];
  const std::int32_t half = turn.rotary_channels / 2;
  const bool halves = turn.pairing == RopePairing::half_split;
  // of each 32 pairs the even ones, then the odd ones, as words hold them
  for (std::int32_t i = 0; i < half; ++i) {
    const std::int32_t at = halves ? i / 32 * 32 + i % 2 * 16 + i % 32 / 2 : i;
    cos[at] = turn.table[i];
    sin[at] = turn.table[half + i];
  }
  const std::int64_t bytes = 2 * std::int64_t{turn.channels};
  std::int64_t row = 0;
  if (!streams) {
    for (; row < rows; ++row) {
      const std::int64_t at = row * bytes;
      for (std::int64_t line = 0; line < bytes; line += 64) {
        __builtin_prefetch(in + at + stream_ahead + line);
        __builtin_prefetch(out + at + stream_ahead + line, 1);
      }
      turn_row_wide<false>(halves, half, cos, sin, in + at, out + at);
    }
    return;
  }
  const std::int64_t stretch = bytes < stream_stretch ? stream_stretch / bytes : 1;
  for (; streams_four_pages() && row + 4 * stretch <= rows; row += 4 * stretch) {
    const std::int64_t ahead = row + 8 * stretch <= rows ? 4 * stretch * bytes : 0;
    for (std::int64_t k = row; k < row + stretch; ++k) {
      for (std::int64_t at = k * bytes, i = 0; i < 4; ++i, at += stretch * bytes) {
        for (std::int64_t line = 0; line < bytes; line += 64)
          __builtin_prefetch(in + at + ahead + line);
        turn_row_wide<true>(halves, half, cos, sin, in + at, out + at);
      }
    }
  }
  for (; row < rows; ++row) {
    const std::int64_t at = row * bytes;
    for (std::int64_t line = 0; line < bytes; line += 64)
      __builtin_prefetch(in + at + stream_ahead + line);
    turn_row_wide<true>(halves, half, cos, sin, in + at, out + at);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
