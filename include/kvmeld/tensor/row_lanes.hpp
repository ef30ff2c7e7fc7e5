#pragma once

/// Eight and sixteen stored elements as f32 vectors: the registers of kernels that read, compute
/// and store in one loop.

#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/rows_x86.hpp>

#if KVMELD_X86_DISPATCH

KVMELD_NAMESPACE_BEGIN
namespace detail {

using FloatLanes = vector_t<float, 32>;
using WordLanes = vector_t<unsigned, 32>;

/// a * b + c in eight lanes, one rounding each.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes fma_lanes(FloatLanes a,
                                                                           FloatLanes b,
                                                                           FloatLanes c) noexcept {
  return __builtin_ia32_vfmaddps256(a, b, c);
}

[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes
load_lanes(const float* in) noexcept {
  return *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in);
}
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void store_lanes(FloatLanes v, float* out) noexcept {
  *reinterpret_cast<unaligned_vector_t<float, 32>*>(out) = v;
}

/// Eight elements in order; the bytes that `load_element` and `store_element` give.
template <ElementType type>
struct Lanes8;

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
    *reinterpret_cast<unaligned_vector_t<short, 16>*>(out) =
        __builtin_ia32_vcvtps2ph256(v, to_nearest_even);
  }
};
template <>
struct Lanes8<ElementType::bf16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static FloatLanes load(const std::byte* in) noexcept {
    const vector_t<std::uint16_t, 16> stored =
        *reinterpret_cast<const unaligned_vector_t<std::uint16_t, 16>*>(in);
    return reinterpret_cast<FloatLanes>(__builtin_convertvector(stored, WordLanes) << 16);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes v, std::byte* out) noexcept {
    const auto bits = reinterpret_cast<WordLanes>(v);
    const auto is_nan = reinterpret_cast<WordLanes>(v != v);
    const WordLanes half = (((bits >> 16) & 1U) + 0x7fffU) & ~is_nan;
    const auto rounded =
        reinterpret_cast<vector_t<int, 32>>(((bits + half) >> 16) | (is_nan & 0x40U));
    const vector_t<std::uint16_t, 32> packed = pack_words(rounded, rounded);
    *reinterpret_cast<unaligned_vector_t<std::uint16_t, 16>*>(out) =
        __builtin_shufflevector(packed, packed, 0, 1, 2, 3, 4, 5, 6, 7);
  }
};

/// Sixteen elements in two vectors. Which element lies in which lane is the type's own affair
/// (`even_odd`): what treats all elements alike need not know, and no shuffle is spent on it.
template <ElementType type>
struct Lanes16 {
  static constexpr bool even_odd = false;  ///< the first eight elements, then the last eight
  static constexpr std::ptrdiff_t half = 8 * block_bytes(type);

  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* in, FloatLanes& first,
                                                           FloatLanes& second) noexcept {
    first = Lanes8<type>::load(in);
    second = Lanes8<type>::load(in + half);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes first, FloatLanes second,
                                                            std::byte* out) noexcept {
    Lanes8<type>::store(first, out);
    Lanes8<type>::store(second, out + half);
  }
};
/// Even halves of a's words, odd halves of b's.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE vector_t<std::uint16_t, 32> blend_halves(
    WordLanes a, WordLanes b) noexcept {
  using Halves = vector_t<std::uint16_t, 32>;
  return __builtin_shufflevector(reinterpret_cast<Halves>(a), reinterpret_cast<Halves>(b), 0, 17, 2,
                                 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31);
}
/// (a + b + 1) / 2 without overflow.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE vector_t<std::uint16_t, 32> average_halves(
    vector_t<std::uint16_t, 32> a, vector_t<std::uint16_t, 32> b) noexcept {
  using Signed = vector_t<short, 32>;
  return reinterpret_cast<vector_t<std::uint16_t, 32>>(
      __builtin_ia32_pavgw256(reinterpret_cast<Signed>(a), reinterpret_cast<Signed>(b)));
}

template <>
struct Lanes16<ElementType::bf16> {
  /// The even elements, then the odd ones: halves of a 32-bit word.
  static constexpr bool even_odd = true;

  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* in, FloatLanes& even,
                                                           FloatLanes& odd) noexcept {
    const WordLanes words = *reinterpret_cast<const unaligned_vector_t<unsigned, 32>*>(in);
    even = reinterpret_cast<FloatLanes>(words << 16);
    odd = reinterpret_cast<FloatLanes>(words & 0xffff0000U);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes even, FloatLanes odd,
                                                            std::byte* out) noexcept {
    using Halves = vector_t<std::uint16_t, 32>;
    const auto e = reinterpret_cast<WordLanes>(even);
    const auto o = reinterpret_cast<WordLanes>(odd);
    // Upper and lower halves of all sixteen words side by side: one addition then rounds both. An
    // average by 0x7ffe, or 0x7fff where the upper half is odd, has its highest bit set where the
    // lower half rounds up, to even at the tie.
    const Halves upper = blend_halves(e >> 16, o), lower = blend_halves(e, o << 16);
    Halves stored = upper + (average_halves(lower, (upper & 1U) + 0x7ffeU) >> 15);
    constexpr int unordered = 3;
    if (__builtin_expect(__builtin_ia32_movmskps256(__builtin_ia32_cmpps256(even, odd, unordered)),
                         0) != 0) {
      const auto nan = blend_halves(reinterpret_cast<WordLanes>(even != even),
                                    reinterpret_cast<WordLanes>(odd != odd));
      stored = (stored & ~nan) | ((upper | 0x40U) & nan);
    }
    *reinterpret_cast<unaligned_vector_t<std::uint16_t, 32>*>(out) = stored;
  }
};

/// Thirty-two elements between memory and an array that compilers keep in registers, in the order
/// of `Lanes16`'s halves.
template <ElementType type>
struct Avx2Lanes32 {
  static constexpr std::ptrdiff_t half = 16 * block_bytes(type);

  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* in, float* x) noexcept {
    FloatLanes a, b;
    Lanes16<type>::load(in, a, b);
    store_lanes(a, x);
    store_lanes(b, x + 8);
    Lanes16<type>::load(in + half, a, b);
    store_lanes(a, x + 16);
    store_lanes(b, x + 24);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(const float* x,
                                                            std::byte* out) noexcept {
    Lanes16<type>::store(load_lanes(x), load_lanes(x + 8), out);
    Lanes16<type>::store(load_lanes(x + 16), load_lanes(x + 24), out + half);
  }
};

using WideFloats = vector_t<float, 64>;
using WideWords = vector_t<unsigned, 64>;

[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
load_wide(const void* in) noexcept {
  return *static_cast<const unaligned_vector_t<float, 64>*>(in);
}
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void store_wide(WideFloats v, void* out) noexcept {
  *static_cast<unaligned_vector_t<float, 64>*>(out) = v;
}
/// Writes a line past the caches; `out` is a multiple of 64.
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void stream_wide(WideWords v, void* out) noexcept {
  typedef long long Line __attribute__((vector_size(64), may_alias));
#if defined(__clang__)
  __builtin_nontemporal_store(reinterpret_cast<Line>(v), static_cast<Line*>(out));
#else
  __builtin_ia32_movntdq512(static_cast<Line*>(out), reinterpret_cast<Line>(v));
#endif
}
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats fma_wide(WideFloats a,
                                                                            WideFloats b,
                                                                            WideFloats c) noexcept {
#if defined(__clang__)
  constexpr unsigned short all = 0xffff;
#else
  constexpr short all = -1;
#endif
  constexpr int current_rounding = 4;
  return __builtin_ia32_vfmaddps512_mask(a, b, c, all, current_rounding);
}

/// The same in 512-bit registers.
template <ElementType type>
struct Avx512Lanes32;

template <>
struct Avx512Lanes32<ElementType::f32> {
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void load(const std::byte* in,
                                                             float* x) noexcept {
    store_wide(load_wide(in), x);
    store_wide(load_wide(in + 64), x + 16);
  }
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void store(const float* x,
                                                              std::byte* out) noexcept {
    store_wide(load_wide(x), out);
    store_wide(load_wide(x + 16), out + 64);
  }
};
template <>
struct Avx512Lanes32<ElementType::f16> {
#if defined(__clang__)
  static constexpr unsigned short all_loaded = 0xffff;
#else
  static constexpr short all_loaded = -1;  // the builtin's own type
#endif
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void load(const std::byte* in,
                                                             float* x) noexcept {
    constexpr int current_rounding = 4;
    for (int i = 0; i < 2; ++i) {
      const vector_t<short, 32> stored =
          *reinterpret_cast<const unaligned_vector_t<short, 32>*>(in + 32 * i);
      store_wide(
          __builtin_ia32_vcvtph2ps512_mask(stored, WideFloats{}, all_loaded, current_rounding),
          x + 16 * i);
    }
  }
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void store(const float* x,
                                                              std::byte* out) noexcept {
    constexpr int to_nearest_even = 0;
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<unaligned_vector_t<short, 32>*>(out + 32 * i) =
          __builtin_ia32_vcvtps2ph512_mask(load_wide(x + 16 * i), to_nearest_even,
                                           vector_t<short, 32>{}, 0xffff);
    }
  }
};
template <>
struct Avx512Lanes32<ElementType::bf16> {
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void load(const std::byte* in,
                                                             float* x) noexcept {
    const WideWords words = *reinterpret_cast<const unaligned_vector_t<unsigned, 64>*>(in);
    store_wide(reinterpret_cast<WideFloats>(words << 16), x);
    store_wide(reinterpret_cast<WideFloats>(words & 0xffff0000U), x + 16);
  }
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void store(const float* x,
                                                              std::byte* out) noexcept {
    *reinterpret_cast<unaligned_vector_t<unsigned, 64>*>(out) =
        round(load_wide(x), load_wide(x + 16));
  }
  /// Even and odd elements as the halves of 16 words.
  [[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static WideWords round(
      WideFloats even, WideFloats odd) noexcept {
    const auto e = reinterpret_cast<WideWords>(even);
    const auto o = reinterpret_cast<WideWords>(odd);
    WideWords low = e + 0x7fffU + ((e >> 16) & 1U);
    WideWords high = o + 0x7fffU + ((o >> 16) & 1U);
    constexpr int unordered = 3, current_rounding = 4;
    if (__builtin_expect(
            __builtin_ia32_cmpps512_mask(even, odd, unordered, 0xffff, current_rounding), 0) != 0) {
      low = even != even ? e | 0x400000U : low;
      high = odd != odd ? o | 0x400000U : high;
    }
    return (low >> 16) | (high & 0xffff0000U);
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
