#pragma once

/// Blocks of 32 elements by x86 vector code, where what compilers make of the portable loops is too
/// slow.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/row_codecs.hpp>

#if KVMELD_X86_DISPATCH

KVMELD_NAMESPACE_BEGIN
namespace detail {

// Compiler vectors and builtins rather than <immintrin.h>, which costs every user 0.3 s a file
// under g++ 12.
template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
  typedef T unaligned __attribute__((vector_size(bytes), aligned(1), may_alias));
};

template <class T, int bytes>
using vector_t = typename VectorOf<T, bytes>::type;
template <class T, int bytes>
using unaligned_vector_t = typename VectorOf<T, bytes>::unaligned;

/// Portable blocks, unless specialised below.
template <ElementType type>
struct Avx2Block {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* __restrict in,
                                                           float* __restrict out) noexcept {
    load_block<type>(in, out);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(const float* __restrict in,
                                                            std::byte* __restrict out) noexcept {
    store_block<type>(in, out);
  }
};

template <>
struct Avx2Block<ElementType::f16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* __restrict in,
                                                           float* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 8) {
      const vector_t<short, 16> stored =
          *reinterpret_cast<const unaligned_vector_t<short, 16>*>(in + 2 * i);
      *reinterpret_cast<unaligned_vector_t<float, 32>*>(out + i) =
          __builtin_ia32_vcvtph2ps256(stored);
    }
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(const float* __restrict in,
                                                            std::byte* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 8) {
      const vector_t<float, 32> values =
          *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in + i);
      constexpr int to_nearest_even = 0;
      *reinterpret_cast<unaligned_vector_t<short, 16>*>(out + 2 * i) =
          __builtin_ia32_vcvtps2ph256(values, to_nearest_even);
    }
  }
};

/// Two vectors of 8 words, each at most 0xffff, to 16 halfwords in order.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE vector_t<std::uint16_t, 32> pack_words(
    vector_t<int, 32> a, vector_t<int, 32> b) noexcept {
  const auto packed = reinterpret_cast<vector_t<long long, 32>>(__builtin_ia32_packusdw256(a, b));
  return reinterpret_cast<vector_t<std::uint16_t, 32>>(
      __builtin_shufflevector(packed, packed, 0, 2, 1, 3));
}

template <>
struct Avx2Block<ElementType::bf16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* __restrict in,
                                                           float* __restrict out) noexcept {
    load_block<ElementType::bf16>(in, out);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static vector_t<int, 32> round(const float* in) noexcept {
    const vector_t<float, 32> values = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in);
    const auto bits = reinterpret_cast<vector_t<unsigned, 32>>(values);
    const auto is_nan = reinterpret_cast<vector_t<unsigned, 32>>(values != values);
    const vector_t<unsigned, 32> half = (((bits >> 16) & 1u) + 0x7fffu) & ~is_nan;
    return reinterpret_cast<vector_t<int, 32>>(((bits + half) >> 16) | (is_nan & 0x40u));
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(const float* __restrict in,
                                                            std::byte* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 16) {
      *reinterpret_cast<unaligned_vector_t<std::uint16_t, 32>*>(out + 2 * i) =
          pack_words(round(in + i), round(in + i + 8));
    }
  }
};

/// Both 8-bit floats pass through binary16, of which they are a part once E4M3 is scaled by 2^-8.
///
/// Storing rounds to odd there (towards zero, a lost remainder sets the last bit), so that the
/// second rounding, to nearest even, gives what one rounding would.
template <ElementType type>
struct Avx2Float8Block {
  static constexpr bool is_e4m3 = type == ElementType::f8_e4m3;
  using Halfwords = vector_t<std::uint16_t, 32>;
  using Codes = vector_t<std::uint8_t, 16>;

  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* __restrict in,
                                                           float* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 16) {
      const Codes codes = *reinterpret_cast<const unaligned_vector_t<std::uint8_t, 16>*>(in + i);
      const Halfwords wide = __builtin_convertvector(codes, Halfwords);
      Halfwords halves = wide << 8;
      if constexpr (is_e4m3) {
        const Halfwords magnitude = wide & 0x7f;
        const auto is_nan = magnitude == 0x7f;
        halves = (halves & 0x8000) | (is_nan ? ((wide & 0) + 0x7e00) : (magnitude << 7));
      }
      const auto signed_halves = reinterpret_cast<vector_t<short, 32>>(halves);
      vector_t<float, 32> first = __builtin_ia32_vcvtph2ps256(
          __builtin_shufflevector(signed_halves, signed_halves, 0, 1, 2, 3, 4, 5, 6, 7));
      vector_t<float, 32> second = __builtin_ia32_vcvtph2ps256(
          __builtin_shufflevector(signed_halves, signed_halves, 8, 9, 10, 11, 12, 13, 14, 15));
      if constexpr (is_e4m3) {
        first = first * 256.0f;
        second = second * 256.0f;
      }
      *reinterpret_cast<unaligned_vector_t<float, 32>*>(out + i) = first;
      *reinterpret_cast<unaligned_vector_t<float, 32>*>(out + i + 8) = second;
    }
  }

  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(const float* __restrict in,
                                                            std::byte* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 16) {
      vector_t<float, 32> first = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in + i);
      vector_t<float, 32> second =
          *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in + i + 8);
      if constexpr (is_e4m3) {
        first = first * 0x1p-8f;
        second = second * 0x1p-8f;
      }
      constexpr int toward_zero = 3;
      const vector_t<short, 16> low = __builtin_ia32_vcvtps2ph256(first, toward_zero);
      const vector_t<short, 16> high = __builtin_ia32_vcvtps2ph256(second, toward_zero);
      const vector_t<int, 32> low_inexact = (__builtin_ia32_vcvtph2ps256(low) != first) & 1;
      const vector_t<int, 32> high_inexact = (__builtin_ia32_vcvtph2ps256(high) != second) & 1;
      const auto halves = reinterpret_cast<Halfwords>(
          __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
      const Halfwords odd = (halves & 0x7fff) | pack_words(low_inexact, high_inexact);
      constexpr int shift = is_e4m3 ? 7 : 8;
      const Halfwords largest = (odd & 0) + static_cast<std::uint16_t>(is_e4m3 ? 0x7e : 0x7c);
      Halfwords code =
          (odd + static_cast<std::uint16_t>((1 << (shift - 1)) - 1) + ((odd >> shift) & 1)) >>
          shift;
      code = code > largest ? largest : code;
      const auto is_nan = odd > 0x7c00;  // an infinity is never inexact
      const Halfwords nan = is_e4m3 ? (odd & 0) + 0x7f : (odd >> 8) | 0x02;
      code = (is_nan ? nan : code) | ((halves >> 8) & 0x80);
      *reinterpret_cast<unaligned_vector_t<std::uint8_t, 16>*>(out + i) =
          __builtin_convertvector(code, Codes);
    }
  }
};
template <>
struct Avx2Block<ElementType::f8_e4m3> : Avx2Float8Block<ElementType::f8_e4m3> {};
template <>
struct Avx2Block<ElementType::f8_e5m2> : Avx2Float8Block<ElementType::f8_e5m2> {};

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
