#pragma once

/// Many rows turned by one angle, vectorised: what a concatenation spends its time on.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache/rope_rotate.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Which channels of a row turn, how they pair, and by what.
struct Turn {
  const float* table = nullptr;  ///< cosines, then sines (rotary_channels)
  std::int32_t channels = 0;
  std::int32_t first_channel = 0;
  std::int32_t rotary_channels = 0;
  RopePairing pairing = RopePairing::half_split;
};

#if KVMELD_X86_DISPATCH

/// Eight stored elements to f32 lanes and back; the bytes that `load_element` and `store_element` give.
template <ElementType type>
struct Lanes8;

using FloatLanes = vector_t<float, 32>;

template <>
struct Lanes8<ElementType::f32> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static FloatLanes load(const std::byte* in) noexcept {
    return *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes v, std::byte* out) noexcept {
    *reinterpret_cast<unaligned_vector_t<float, 32>*>(out) = v;
  }
};
template <>
struct Lanes8<ElementType::f16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static FloatLanes load(const std::byte* in) noexcept {
    const vector_t<short, 16> stored = *reinterpret_cast<const unaligned_vector_t<short, 16>*>(in);
    return __builtin_ia32_vcvtph2ps256(stored);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes v, std::byte* out) noexcept {
    constexpr int to_nearest_even = 0;
    *reinterpret_cast<unaligned_vector_t<short, 16>*>(out) = __builtin_ia32_vcvtps2ph256(v, to_nearest_even);
  }
};
template <>
struct Lanes8<ElementType::bf16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static FloatLanes load(const std::byte* in) noexcept {
    const vector_t<std::uint16_t, 16> stored = *reinterpret_cast<const unaligned_vector_t<std::uint16_t, 16>*>(in);
    const vector_t<unsigned, 32> wide = __builtin_convertvector(stored, vector_t<unsigned, 32>) << 16;
    return reinterpret_cast<FloatLanes>(wide);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes v, std::byte* out) noexcept {
    const auto bits = reinterpret_cast<vector_t<unsigned, 32>>(v);
    const auto is_nan = reinterpret_cast<vector_t<unsigned, 32>>(v != v);
    const vector_t<unsigned, 32> half = (((bits >> 16) & 1U) + 0x7fffU) & ~is_nan;
    const auto rounded = reinterpret_cast<vector_t<int, 32>>(((bits + half) >> 16) | (is_nan & 0x40U));
    const vector_t<std::uint16_t, 32> packed = pack_words(rounded, rounded);
    *reinterpret_cast<unaligned_vector_t<std::uint16_t, 16>*>(out) = __builtin_shufflevector(packed, packed, 0, 1, 2, 3, 4, 5, 6, 7);
  }
};

/// a * b + c in eight lanes, one rounding each.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes fma_lanes(FloatLanes a, FloatLanes b, FloatLanes c) noexcept {
  return __builtin_ia32_vfmaddps256(a, b, c);
}

/// Turns `rows` rows by one angle: `rotate_pair`, lane by lane. Strides count bytes; the ranges do not overlap.
template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void turn_rows_avx2(const Turn& turn, const std::byte* in, std::int64_t in_stride, std::byte* out,
                                                       std::int64_t out_stride, std::int64_t rows) noexcept {
  using Lanes = Lanes8<type>;
  constexpr std::int64_t size = block_bytes(type);
  const std::int32_t half = turn.rotary_channels / 2;
  const float* const cos = turn.table;
  const float* const sin = turn.table + half;
  const std::int64_t first = turn.first_channel * size;
  const std::int64_t tail = (turn.first_channel + turn.rotary_channels) * size;
  const std::int64_t end = turn.channels * size;
  const bool halves = turn.pairing == RopePairing::half_split;
  // Interleaved pairs (a, b) become fma((a, a), (cos, sin), (b, b) * (-sin, cos)): tables in that order, once for all rows.
  alignas(32) float by_first[1024];
  alignas(32) float by_second[1024];
  if (!halves) {
    for (std::int32_t i = 0; i < half; ++i) {
      by_first[2 * i] = cos[i];
      by_first[2 * i + 1] = sin[i];
      by_second[2 * i] = -sin[i];
      by_second[2 * i + 1] = cos[i];
    }
  }
  for (std::int64_t row = 0; row < rows; ++row, in += in_stride, out += out_stride) {
    if (first != 0) std::memcpy(out, in, static_cast<std::size_t>(first));
    if (tail != end) std::memcpy(out + tail, in + tail, static_cast<std::size_t>(end - tail));
    std::int32_t i = 0;  // pairs done
    if (halves) {
      const std::byte* const a_in = in + first;
      const std::byte* const b_in = a_in + half * size;
      std::byte* const a_out = out + first;
      std::byte* const b_out = a_out + half * size;
      for (; i + 8 <= half; i += 8) {
        const FloatLanes c = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(cos + i);
        const FloatLanes s = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(sin + i);
        const FloatLanes a = Lanes::load(a_in + i * size);
        const FloatLanes b = Lanes::load(b_in + i * size);
        Lanes::store(fma_lanes(a, c, -(b * s)), a_out + i * size);
        Lanes::store(fma_lanes(a, s, b * c), b_out + i * size);
      }
    } else {
      for (; i + 4 <= half; i += 4) {
        const FloatLanes v = Lanes::load(in + first + 2 * i * size);
        const FloatLanes a = __builtin_shufflevector(v, v, 0, 0, 2, 2, 4, 4, 6, 6);
        const FloatLanes b = __builtin_shufflevector(v, v, 1, 1, 3, 3, 5, 5, 7, 7);
        const FloatLanes f = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(by_first + 2 * i);
        const FloatLanes g = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(by_second + 2 * i);
        Lanes::store(fma_lanes(a, f, b * g), out + first + 2 * i * size);
      }
    }
    for (; i < half; ++i) {
      const std::int32_t first_of_pair = turn.first_channel + (halves ? i : 2 * i);
      const std::int32_t second_of_pair = first_of_pair + (halves ? half : 1);
      float a = load_element(type, in, first_of_pair);
      float b = load_element(type, in, second_of_pair);
      rotate_pair(a, b, cos[i], sin[i]);
      store_element(type, out, first_of_pair, a);
      store_element(type, out, second_of_pair, b);
    }
  }
}

#endif  // KVMELD_X86_DISPATCH

/// Turns contiguous rows of `type`, reading each once: the vector code where there is one, `rotate_row` elsewhere.
template <Isa isa>
KVMELD_ALWAYS_INLINE void turn_rows(ElementType type, const Turn& turn, const std::byte* in, std::int64_t in_stride, std::byte* out,
                                    std::int64_t out_stride, std::int64_t rows) noexcept {
#if KVMELD_X86_DISPATCH
  if constexpr (isa != Isa::baseline) {
    if (type == ElementType::f16) return turn_rows_avx2<ElementType::f16>(turn, in, in_stride, out, out_stride, rows);
    if (type == ElementType::bf16) return turn_rows_avx2<ElementType::bf16>(turn, in, in_stride, out, out_stride, rows);
    if (type == ElementType::f32) return turn_rows_avx2<ElementType::f32>(turn, in, in_stride, out, out_stride, rows);
  }
#endif
  for (std::int64_t row = 0; row < rows; ++row, in += in_stride, out += out_stride) {
    alignas(64) float values[1024];
    load_row<isa>(type, in, turn.channels, values);
    rotate_row(turn.pairing, turn.first_channel, turn.rotary_channels, turn.table, values);
    store_row<isa>(type, values, turn.channels, out);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
