#pragma once

/// Kernels over rows of channels: conversion, vectors of each instruction set, streaming copies.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

// How 32 stored elements become 32 f32 values and back, for every element type.

namespace extend {

/// Channels that a row body handles at once: g++ -O2 vectorises only loops whose trip count is
/// known at compile time.
inline constexpr std::ptrdiff_t row_block = 32;

}  // namespace extend

namespace detail {

/// Rounds to the nearest integer, ties to even, within [-128, 127]; NaN gives 0.
[[nodiscard]] KVMELD_HD constexpr std::int32_t round_to_i8(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // 128
  const std::uint32_t limited = select(mask_if(magnitude > 0x43000000u), 0x43000000u, magnitude);
  const float doubled = bits_float(limited & mask_if(magnitude <= 0x7f800000u)) * 2.0f;  // exact
  const std::int32_t halves = static_cast<std::int32_t>(doubled);
  const std::int32_t sticky = static_cast<std::int32_t>(static_cast<float>(halves) != doubled);
  const std::int32_t rounded = (halves >> 1) + (halves & 1 & (sticky | (halves >> 1)));
  const std::int32_t negative = -static_cast<std::int32_t>(bits >> 31);
  const std::int32_t result = (rounded ^ negative) - negative;
  return result > 127 ? 127 : result;
}

/// Rounds a value of magnitude below 2^30 to the nearest integer, ties away from zero: C's roundf.
[[nodiscard]] KVMELD_HD constexpr std::int32_t round_half_away(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::int32_t magnitude =
      (static_cast<std::int32_t>(bits_float(bits & 0x7fffffffu) * 2.0f) + 1) >> 1;
  const std::int32_t negative = -static_cast<std::int32_t>(bits >> 31);
  return (magnitude ^ negative) - negative;
}

/// Sets the quiet bit of a NaN: whether a conversion between f32 and f64 does so is the compiler's
/// choice.
[[nodiscard]] KVMELD_HD constexpr float quieted(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  return bits_float(bits | (mask_if((bits & 0x7fffffffu) > 0x7f800000u) & 0x00400000u));
}

/// Storage form of one element and its two conversions, all of them branch-free.
template <ElementType type>
struct ElementCodec;

template <>
struct ElementCodec<ElementType::f64> {
  using Storage = double;
  [[nodiscard]] static KVMELD_HD constexpr float load(double stored) noexcept {
    return quieted(static_cast<float>(stored));
  }
  [[nodiscard]] static KVMELD_HD constexpr double store(float value) noexcept {
    return static_cast<double>(quieted(value));
  }
};
template <>
struct ElementCodec<ElementType::f32> {
  using Storage = float;
  [[nodiscard]] static KVMELD_HD constexpr float load(float stored) noexcept { return stored; }
  [[nodiscard]] static KVMELD_HD constexpr float store(float value) noexcept { return value; }
};
template <>
struct ElementCodec<ElementType::i8> {
  using Storage = std::int8_t;
  [[nodiscard]] static KVMELD_HD constexpr float load(std::int8_t stored) noexcept {
    return static_cast<float>(stored);
  }
  [[nodiscard]] static KVMELD_HD constexpr std::int8_t store(float value) noexcept {
    return static_cast<std::int8_t>(round_to_i8(value));
  }
};
template <class T, class Bits>
struct NarrowFloatCodec {
  using Storage = Bits;
  [[nodiscard]] static KVMELD_HD constexpr float load(Bits stored) noexcept {
    return to_float(T{stored});
  }
  [[nodiscard]] static KVMELD_HD constexpr Bits store(float value) noexcept {
    return from_float<T>(value).bits;
  }
};
template <>
struct ElementCodec<ElementType::f16> : NarrowFloatCodec<f16, std::uint16_t> {};
template <>
struct ElementCodec<ElementType::bf16> : NarrowFloatCodec<bf16, std::uint16_t> {};
template <>
struct ElementCodec<ElementType::f8_e4m3> : NarrowFloatCodec<f8_e4m3, std::uint8_t> {};
template <>
struct ElementCodec<ElementType::f8_e5m2> : NarrowFloatCodec<f8_e5m2, std::uint8_t> {};

template <class Storage>
struct Unaligned {
  typedef Storage type __attribute__((aligned(1), may_alias));
};
/// A `Storage` at any address: one unaligned vector access instead of a copy through the stack.
template <class Storage>
using unaligned_t = typename Unaligned<Storage>::type;

/// The reference quantisation of ggml: scale = max|x| / 127 in f32, value = roundf(x · (1 /
/// scale)), scale stored as f16.
///
/// Two cases that it leaves undefined are defined here. A NaN or infinity in the block stores a NaN
/// scale and zeros, so that the loss is visible. A largest magnitude so small that 1 / scale
/// overflows stores zeros.
KVMELD_HD KVMELD_ALWAYS_INLINE void store_q8_0(const float* __restrict in,
                                               std::byte* __restrict out) noexcept {
  // as bits: magnitudes order like integers, and integers have an exact, associative max
  std::int32_t largest = 0;
  for (std::ptrdiff_t i = 0; i < row_block; ++i) {
    const std::int32_t magnitude = static_cast<std::int32_t>(float_bits(in[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool finite = largest < 0x7f800000;
  const float scale = finite ? bits_float(static_cast<std::uint32_t>(largest)) / 127.0f : 0.0f;
  const float reciprocal = scale >= 0x1p-127f ? 1.0f / scale : 0.0f;
  const f16 stored_scale = finite ? from_float<f16>(scale) : f16{0x7e00};
  std::memcpy(out, &stored_scale, sizeof(stored_scale));
  unaligned_t<std::int8_t>* __restrict values =
      reinterpret_cast<unaligned_t<std::int8_t>*>(out + 2);
  for (std::ptrdiff_t i = 0; i < row_block; ++i) {
    const float scaled = bits_float(float_bits(in[i]) & mask_if(reciprocal > 0.0f)) * reciprocal;
    values[i] = static_cast<std::int8_t>(round_half_away(scaled));
  }
}
}  // namespace detail

// Blocks of 32 elements by x86 vector code, where compilers make slow code of the portable loops.

#if KVMELD_X86_DISPATCH

namespace detail {

// Compiler vectors and builtins instead of <immintrin.h>, which costs every user 0.3 s for each
// file under g++ 12.
template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
  typedef T unaligned __attribute__((vector_size(bytes), aligned(1), may_alias));
};

}  // namespace detail

namespace extend {

/// A register of `bytes` bytes of T, in the compiler's own vector type.
template <class T, int bytes>
using vector_t = typename detail::VectorOf<T, bytes>::type;

/// The same at any address, and allowed to alias other types.
template <class T, int bytes>
using unaligned_vector_t = typename detail::VectorOf<T, bytes>::unaligned;

}  // namespace extend

namespace detail {

/// Two vectors of 8 words, each at most 0xffff, to 16 halfwords in order.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE vector_t<std::uint16_t, 32> pack_words(
    vector_t<int, 32> a, vector_t<int, 32> b) noexcept {
  const auto packed = reinterpret_cast<vector_t<long long, 32>>(__builtin_ia32_packusdw256(a, b));
  return reinterpret_cast<vector_t<std::uint16_t, 32>>(
      __builtin_shufflevector(packed, packed, 0, 2, 1, 3));
}

}  // namespace detail

#endif  // KVMELD_X86_DISPATCH

// Contiguous elements to f32 and back, in a given instruction set.

namespace extend {

/// Reads `n` contiguous elements at any address as f32. `in` and `out` must not overlap.
///
/// f64 narrows to nearest even; i8 comes without scale; q8_0 starts at a block. An unknown type
/// leaves `out` unchanged; plans refuse it before. Bytes are the same for every `isa`.
KVMELD_API void load_row(ElementType type, Isa isa, const std::byte* in, std::ptrdiff_t n,
                         float* out) noexcept;

/// Writes `n` f32 values as contiguous elements at any address, rounded to nearest even. The ranges
/// must not overlap.
///
/// i8 rounds to nearest even and saturates, NaN becomes 0, and no scale is applied; q8_0 quantises
/// as ggml's reference does and pads a last partial block with zeros. Bytes are the same for every
/// `isa`.
KVMELD_API void store_row(ElementType type, Isa isa, const float* in, std::ptrdiff_t n,
                          std::byte* out) noexcept;

}  // namespace extend

namespace detail {

/// Copies one element to or from any address. Devices access whole words only where the compiler
/// knows that they are aligned, as nearly all elements are.
template <std::size_t size>
KVMELD_HD inline void copy_element(void* to, const void* from, const std::byte* stored) noexcept {
  if (reinterpret_cast<std::uintptr_t>(stored) % size == 0) {
    __builtin_memcpy(__builtin_assume_aligned(to, size), __builtin_assume_aligned(from, size),
                     size);
  } else {
    __builtin_memcpy(to, from, size);
  }
}

template <ElementType type>
[[nodiscard]] KVMELD_HD inline float load_one(const std::byte* base,
                                              std::ptrdiff_t index) noexcept {
  using Codec = ElementCodec<type>;
  typename Codec::Storage stored;
  const std::byte* at = base + index * static_cast<std::ptrdiff_t>(sizeof(stored));
  copy_element<sizeof(stored)>(&stored, at, at);
  return Codec::load(stored);
}

template <ElementType type>
KVMELD_HD inline void store_one(std::byte* base, std::ptrdiff_t index, float value) noexcept {
  using Codec = ElementCodec<type>;
  const typename Codec::Storage stored = Codec::store(value);
  std::byte* at = base + index * static_cast<std::ptrdiff_t>(sizeof(stored));
  copy_element<sizeof(stored)>(at, &stored, at);
}

/// One element as f32, with the bits that `load_row` gives; `index` counts elements from `base`, a
/// block's start for q8_0.
[[nodiscard]] KVMELD_HD inline float load_element(ElementType type, const std::byte* base,
                                                  std::ptrdiff_t index) noexcept {
  switch (type) {
    case ElementType::f64:
      return load_one<ElementType::f64>(base, index);
    case ElementType::f32:
      return load_one<ElementType::f32>(base, index);
    case ElementType::f16:
      return load_one<ElementType::f16>(base, index);
    case ElementType::bf16:
      return load_one<ElementType::bf16>(base, index);
    case ElementType::f8_e4m3:
      return load_one<ElementType::f8_e4m3>(base, index);
    case ElementType::f8_e5m2:
      return load_one<ElementType::f8_e5m2>(base, index);
    case ElementType::i8:
      return load_one<ElementType::i8>(base, index);
    case ElementType::q8_0: {
      const std::byte* block = base + index / 32 * static_cast<std::ptrdiff_t>(sizeof(q8_0_block));
      f16 scale;
      std::int8_t value;
      std::memcpy(&scale, block, sizeof(scale));
      std::memcpy(&value, block + sizeof(scale) + index % 32, sizeof(value));
      return to_float(scale) * static_cast<float>(value);
    }
  }
  return 0.0f;
}

/// Stores one element with the bits that `store_row` gives. Not for q8_0, whose elements share a
/// scale: it writes nothing.
KVMELD_HD inline void store_element(ElementType type, std::byte* base, std::ptrdiff_t index,
                                    float value) noexcept {
  switch (type) {
    case ElementType::f64:
      return store_one<ElementType::f64>(base, index, value);
    case ElementType::f32:
      return store_one<ElementType::f32>(base, index, value);
    case ElementType::f16:
      return store_one<ElementType::f16>(base, index, value);
    case ElementType::bf16:
      return store_one<ElementType::bf16>(base, index, value);
    case ElementType::f8_e4m3:
      return store_one<ElementType::f8_e4m3>(base, index, value);
    case ElementType::f8_e5m2:
      return store_one<ElementType::f8_e5m2>(base, index, value);
    case ElementType::i8:
      return store_one<ElementType::i8>(base, index, value);
    case ElementType::q8_0:
      return;
  }
}

}  // namespace detail

// Eight and sixteen stored elements as f32 vectors: the registers of kernels that read, compute
// and store in one loop.

#if KVMELD_X86_DISPATCH

namespace extend {

/// Eight floats: a register of AVX2.
using FloatLanes = vector_t<float, 32>;

/// Eight words of 32 bits.
using WordLanes = vector_t<unsigned, 32>;

/// a * b + c in eight lanes, one rounding each.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes fma_lanes(FloatLanes a,
                                                                           FloatLanes b,
                                                                           FloatLanes c) noexcept {
  return __builtin_ia32_vfmaddps256(a, b, c);
}

/// Eight floats from any address.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes
load_lanes(const float* in) noexcept {
  return *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in);
}

}  // namespace extend

namespace detail {

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

}  // namespace detail

namespace extend {

/// Sixteen elements in two vectors. The order of elements in lanes depends on the type
/// (`even_odd`): code that treats all elements alike need not know it, and no shuffle is needed.
template <ElementType type>
struct Lanes16 {
  static constexpr bool even_odd = false;  ///< false: the first eight elements, then the last eight
  static constexpr std::ptrdiff_t half = 8 * block_bytes(type);

  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* in, FloatLanes& first,
                                                           FloatLanes& second) noexcept {
    first = detail::Lanes8<type>::load(in);
    second = detail::Lanes8<type>::load(in + half);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(FloatLanes first, FloatLanes second,
                                                            std::byte* out) noexcept {
    detail::Lanes8<type>::store(first, out);
    detail::Lanes8<type>::store(second, out + half);
  }
};

}  // namespace extend

namespace detail {

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

}  // namespace detail

namespace extend {

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
    const Halves upper = detail::blend_halves(e >> 16, o), lower = detail::blend_halves(e, o << 16);
    Halves stored = upper + (detail::average_halves(lower, (upper & 1U) + 0x7ffeU) >> 15);
    constexpr int unordered = 3;
    if (__builtin_expect(__builtin_ia32_movmskps256(__builtin_ia32_cmpps256(even, odd, unordered)),
                         0) != 0) {
      const auto nan = detail::blend_halves(reinterpret_cast<WordLanes>(even != even),
                                            reinterpret_cast<WordLanes>(odd != odd));
      stored = (stored & ~nan) | ((upper | 0x40U) & nan);
    }
    *reinterpret_cast<unaligned_vector_t<std::uint16_t, 32>*>(out) = stored;
  }
};

}  // namespace extend

namespace detail {

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

}  // namespace detail

namespace extend {

/// Sixteen floats: a register of AVX-512.
using WideFloats = vector_t<float, 64>;

/// Sixteen words of 32 bits.
using WideWords = vector_t<unsigned, 64>;

/// Sixteen floats from any address.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
load_wide(const void* in) noexcept {
  return *static_cast<const unaligned_vector_t<float, 64>*>(in);
}

/// Sixteen floats to any address.
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void store_wide(WideFloats v, void* out) noexcept {
  *static_cast<unaligned_vector_t<float, 64>*>(out) = v;
}

}  // namespace extend

namespace detail {

/// Writes a line past the caches; `out` is a multiple of 64.
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void stream_wide(WideWords v, void* out) noexcept {
  typedef long long Line __attribute__((vector_size(64), may_alias));
#if defined(__clang__)
  __builtin_nontemporal_store(reinterpret_cast<Line>(v), static_cast<Line*>(out));
#else
  __builtin_ia32_movntdq512(static_cast<Line*>(out), reinterpret_cast<Line>(v));
#endif
}
}  // namespace detail

namespace extend {

/// a * b + c in sixteen lanes, one rounding each.
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

}  // namespace extend

#endif  // KVMELD_X86_DISPATCH

// Conversions between stored elements, f32 and f64, by builtin: otherwise g++ converts two halves
// and combines them.

#if KVMELD_X86_DISPATCH

namespace detail {

using WideDoubles = vector_t<double, 64>;

[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideDoubles
widen_lanes(FloatLanes x) noexcept {
#if defined(__clang__)
  return __builtin_convertvector(x, WideDoubles);
#else
  constexpr char all = -1;
  constexpr int current_rounding = 4;
  return __builtin_ia32_cvtps2pd512_mask(x, WideDoubles{}, all, current_rounding);
#endif
}
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE FloatLanes
narrow_lanes(WideDoubles x) noexcept {
#if defined(__clang__)
  return __builtin_convertvector(x, FloatLanes);
#else
  constexpr char all = -1;
  constexpr int current_rounding = 4;
  return __builtin_ia32_cvtpd2ps512_mask(x, FloatLanes{}, all, current_rounding);
#endif
}

/// Eight elements in order, as `Lanes8` has them.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes
load_eight(const std::byte* in) noexcept {
#if !defined(__clang__)
  if constexpr (type == ElementType::bf16) {
    const vector_t<short, 16> stored = *reinterpret_cast<const unaligned_vector_t<short, 16>*>(in);
    return reinterpret_cast<FloatLanes>(__builtin_ia32_pmovzxwd256(stored) << 16);
  }
#endif
  return Lanes8<type>::load(in);
}
/// Sixteen elements in order.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
load_sixteen(const std::byte* in) noexcept {
  if constexpr (type == ElementType::f16) {
    constexpr int current_rounding = 4;
    const vector_t<short, 32> stored = *reinterpret_cast<const unaligned_vector_t<short, 32>*>(in);
    return __builtin_ia32_vcvtph2ps512_mask(
        stored, WideFloats{}, Avx512Lanes32<ElementType::f16>::all_loaded, current_rounding);
  } else if constexpr (type == ElementType::bf16) {
#if defined(__clang__)
    const vector_t<std::uint16_t, 32> stored =
        *reinterpret_cast<const unaligned_vector_t<std::uint16_t, 32>*>(in);
    return reinterpret_cast<WideFloats>(__builtin_convertvector(stored, WideWords) << 16);
#else
    const vector_t<short, 32> stored = *reinterpret_cast<const unaligned_vector_t<short, 32>*>(in);
    const vector_t<int, 64> words = __builtin_ia32_pmovzxwd512_mask(
        stored, vector_t<int, 64>{},
        static_cast<unsigned short>(Avx512Lanes32<ElementType::f16>::all_loaded));
    return reinterpret_cast<WideFloats>(words << 16);
#endif
  } else {
    return load_wide(in);
  }
}

}  // namespace detail

#endif  // KVMELD_X86_DISPATCH

// One vector type, so that a kernel is written once, as a template without a target attribute that
// is inlined as a whole into an entry function for each instruction set. A kernel must not name the
// compiler's own vector types, which g++ would lower to scalars before inlining. For the same
// reason a vector's operations are plain inline functions, which are inlined with the kernel.

#if KVMELD_X86_DISPATCH

namespace extend {

/// `bytes` of numbers: 16 or 32 need AVX2, 64 need AVX-512.
template <class T, int bytes>
struct Vec {
  using Raw = vector_t<T, bytes>;
  using Stored = unaligned_vector_t<T, bytes>;
  static constexpr std::size_t lanes = static_cast<std::size_t>(bytes) / sizeof(T);

  Raw raw;

  [[nodiscard]] KVMELD_TARGET_AVX2 static Vec load(const void* in) noexcept {
    return {*static_cast<const Stored*>(in)};
  }
  KVMELD_TARGET_AVX2 void store(void* out) const noexcept { *static_cast<Stored*>(out) = raw; }
  [[nodiscard]] KVMELD_TARGET_AVX2 static Vec spread(T x) noexcept { return {x - Raw{}}; }

  KVMELD_TARGET_AVX2 friend Vec operator+(Vec a, Vec b) noexcept { return {a.raw + b.raw}; }
  KVMELD_TARGET_AVX2 friend Vec operator-(Vec a, Vec b) noexcept { return {a.raw - b.raw}; }
  KVMELD_TARGET_AVX2 friend Vec operator*(Vec a, Vec b) noexcept { return {a.raw * b.raw}; }
  KVMELD_TARGET_AVX2 friend Vec operator/(Vec a, Vec b) noexcept { return {a.raw / b.raw}; }
  KVMELD_TARGET_AVX2 friend Vec operator-(Vec a) noexcept { return {-a.raw}; }
  KVMELD_TARGET_AVX2 friend Vec if_less(Vec a, Vec b, Vec yes, Vec no) noexcept {
    return {a.raw < b.raw ? yes.raw : no.raw};
  }
  KVMELD_TARGET_AVX2 friend Vec if_equal(Vec a, Vec b, Vec yes, Vec no) noexcept {
    return {a.raw == b.raw ? yes.raw : no.raw};
  }
};
template <class T>
struct Vec<T, 64> {
  using Raw = vector_t<T, 64>;
  using Stored = unaligned_vector_t<T, 64>;
  static constexpr std::size_t lanes = 64 / sizeof(T);

  Raw raw;

  [[nodiscard]] KVMELD_TARGET_AVX512 static Vec load(const void* in) noexcept {
    return {*static_cast<const Stored*>(in)};
  }
  KVMELD_TARGET_AVX512 void store(void* out) const noexcept { *static_cast<Stored*>(out) = raw; }
  [[nodiscard]] KVMELD_TARGET_AVX512 static Vec spread(T x) noexcept { return {x - Raw{}}; }

  KVMELD_TARGET_AVX512 friend Vec operator+(Vec a, Vec b) noexcept { return {a.raw + b.raw}; }
  KVMELD_TARGET_AVX512 friend Vec operator-(Vec a, Vec b) noexcept { return {a.raw - b.raw}; }
  KVMELD_TARGET_AVX512 friend Vec operator*(Vec a, Vec b) noexcept { return {a.raw * b.raw}; }
  KVMELD_TARGET_AVX512 friend Vec operator/(Vec a, Vec b) noexcept { return {a.raw / b.raw}; }
  KVMELD_TARGET_AVX512 friend Vec operator-(Vec a) noexcept { return {-a.raw}; }
  KVMELD_TARGET_AVX512 friend Vec if_less(Vec a, Vec b, Vec yes, Vec no) noexcept {
    return {a.raw < b.raw ? yes.raw : no.raw};
  }
  KVMELD_TARGET_AVX512 friend Vec if_equal(Vec a, Vec b, Vec yes, Vec no) noexcept {
    return {a.raw == b.raw ? yes.raw : no.raw};
  }
};

/// a * b + c, one rounding in each lane.
KVMELD_TARGET_AVX2 inline Vec<float, 32> multiply_add(Vec<float, 32> a, Vec<float, 32> b,
                                                      Vec<float, 32> c) noexcept {
  return {fma_lanes(a.raw, b.raw, c.raw)};
}
KVMELD_TARGET_AVX512 inline Vec<float, 64> multiply_add(Vec<float, 64> a, Vec<float, 64> b,
                                                        Vec<float, 64> c) noexcept {
  return {fma_wide(a.raw, b.raw, c.raw)};
}
KVMELD_TARGET_AVX2 inline Vec<double, 32> multiply_add(Vec<double, 32> a, Vec<double, 32> b,
                                                       Vec<double, 32> c) noexcept {
  return {__builtin_ia32_vfmaddpd256(a.raw, b.raw, c.raw)};
}
KVMELD_TARGET_AVX512 inline Vec<double, 64> multiply_add(Vec<double, 64> a, Vec<double, 64> b,
                                                         Vec<double, 64> c) noexcept {
  return {__builtin_ia32_vfmaddpd512_mask(a.raw, b.raw, c.raw, 0xff, 4)};
}

/// The smaller, b where either is NaN: as `b < a ? ...` of `exchange` chooses.
KVMELD_TARGET_AVX2 inline Vec<float, 32> min_of(Vec<float, 32> a, Vec<float, 32> b) noexcept {
  return {__builtin_ia32_minps256(a.raw, b.raw)};
}
/// The larger, b where either is NaN.
KVMELD_TARGET_AVX2 inline Vec<float, 32> max_of(Vec<float, 32> a, Vec<float, 32> b) noexcept {
  return {__builtin_ia32_maxps256(a.raw, b.raw)};
}
KVMELD_TARGET_AVX512 inline Vec<float, 64> min_of(Vec<float, 64> a, Vec<float, 64> b) noexcept {
#if defined(__clang__)
  return {a.raw < b.raw ? a.raw : b.raw};
#else  // g++ compares and chooses
  return {__builtin_ia32_minps512_mask(a.raw, b.raw, WideFloats{}, -1, 4)};
#endif
}
KVMELD_TARGET_AVX512 inline Vec<float, 64> max_of(Vec<float, 64> a, Vec<float, 64> b) noexcept {
#if defined(__clang__)
  return {a.raw > b.raw ? a.raw : b.raw};
#else
  return {__builtin_ia32_maxps512_mask(a.raw, b.raw, WideFloats{}, -1, 4)};
#endif
}

/// Floats of half the size as doubles.
KVMELD_TARGET_AVX2 inline Vec<double, 32> widen(Vec<float, 16> x) noexcept {
  return {__builtin_convertvector(x.raw, vector_t<double, 32>)};
}
KVMELD_TARGET_AVX512 inline Vec<double, 64> widen(Vec<float, 32> x) noexcept {
  return {detail::widen_lanes(x.raw)};
}
/// Doubles rounded to floats of half the size.
KVMELD_TARGET_AVX2 inline Vec<float, 16> narrow(Vec<double, 32> x) noexcept {
  return {__builtin_convertvector(x.raw, vector_t<float, 16>)};
}
KVMELD_TARGET_AVX512 inline Vec<float, 32> narrow(Vec<double, 64> x) noexcept {
  return {detail::narrow_lanes(x.raw)};
}

/// x · 2^k, the lowest bits of `k` being those of a whole number.
KVMELD_TARGET_AVX2 inline Vec<double, 32> add_exponent(Vec<double, 32> x,
                                                       Vec<double, 32> k) noexcept {
  using Words = vector_t<unsigned long long, 32>;
  return {reinterpret_cast<Vec<double, 32>::Raw>(reinterpret_cast<Words>(x.raw) +
                                                 (reinterpret_cast<Words>(k.raw) << 52))};
}
KVMELD_TARGET_AVX512 inline Vec<double, 64> add_exponent(Vec<double, 64> x,
                                                         Vec<double, 64> k) noexcept {
  using Words = vector_t<unsigned long long, 64>;
  return {reinterpret_cast<Vec<double, 64>::Raw>(reinterpret_cast<Words>(x.raw) +
                                                 (reinterpret_cast<Words>(k.raw) << 52))};
}

/// The first half of the lanes.
KVMELD_TARGET_AVX2 inline Vec<float, 16> lower_half(Vec<float, 32> x) noexcept {
  return {__builtin_shufflevector(x.raw, x.raw, 0, 1, 2, 3)};
}
/// The last half of the lanes.
KVMELD_TARGET_AVX2 inline Vec<float, 16> upper_half(Vec<float, 32> x) noexcept {
  return {__builtin_shufflevector(x.raw, x.raw, 4, 5, 6, 7)};
}
KVMELD_TARGET_AVX512 inline Vec<double, 32> lower_half(Vec<double, 64> x) noexcept {
  return {__builtin_shufflevector(x.raw, x.raw, 0, 1, 2, 3)};
}
KVMELD_TARGET_AVX512 inline Vec<double, 32> upper_half(Vec<double, 64> x) noexcept {
  return {__builtin_shufflevector(x.raw, x.raw, 4, 5, 6, 7)};
}

/// Eight elements in order. The vector has a name, because nvcc drops braces around such calls.
template <ElementType type>
KVMELD_TARGET_AVX2 inline Vec<float, 32> load_eight(const std::byte* in) noexcept {
  Vec<float, 32> x;
  x.raw = detail::load_eight<type>(in);
  return x;
}

/// Thirty-two elements between memory and an array that compilers keep in registers, in an order
/// that depends on the type.
template <ElementType type, int bytes>
struct Lanes32 {
  KVMELD_TARGET_AVX2 static void load(const std::byte* in, float* x) noexcept {
    detail::Avx2Lanes32<type>::load(in, x);
  }
  KVMELD_TARGET_AVX2 static void store(const float* x, std::byte* out) noexcept {
    detail::Avx2Lanes32<type>::store(x, out);
  }
};
template <ElementType type>
struct Lanes32<type, 64> {
  KVMELD_TARGET_AVX512 static void load(const std::byte* in, float* x) noexcept {
    Avx512Lanes32<type>::load(in, x);
  }
  KVMELD_TARGET_AVX512 static void store(const float* x, std::byte* out) noexcept {
    Avx512Lanes32<type>::store(x, out);
  }
};

/// Prefetches ahead of a step of 32 elements, which for f32 may be two lines.
template <ElementType type, int written>
KVMELD_ALWAYS_INLINE void prefetch_step(const std::byte* at) noexcept {
  __builtin_prefetch(at, written);
  if constexpr (block_bytes(type) == 4) __builtin_prefetch(at + 64, written);
}

/// The entry functions of a kernel, which is `Body::run`.
template <class Body, class Function = decltype(Body::run)>
struct Kernel;
template <class Body, class R, class... A, bool quiet>
struct Kernel<Body, R(A...) noexcept(quiet)> {
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE __attribute__((flatten)) static R avx2(A... a) {
    return Body::run(a...);
  }
  KVMELD_TARGET_AVX512 KVMELD_NOINLINE __attribute__((flatten)) static R avx512(A... a) {
    return Body::run(a...);
  }
};

/// A few vectors as separate members: compilers would keep an array of them in memory.
template <class V, int n>
struct Vecs {
  V first;
  Vecs<V, n - 1> rest;

  /// Calls f(vector, number) for each.
  template <class F>
  KVMELD_ALWAYS_INLINE void each(const F& f, std::size_t number = 0) noexcept {
    f(first, number);
    rest.each(f, number + 1);
  }
};
template <class V>
struct Vecs<V, 1> {
  V first;

  template <class F>
  KVMELD_ALWAYS_INLINE void each(const F& f, std::size_t number = 0) noexcept {
    f(first, number);
  }
};

}  // namespace extend

#endif  // KVMELD_X86_DISPATCH

// How a render writes outputs that are larger than the caches, and how the method is chosen for the
// processor.

namespace exec {

/// The order in which lines go past the caches. The bytes that are written are the same for each.
enum class StreamWay : std::uint8_t {
  off,       ///< through the caches, whatever the size
  one_page,  ///< line after line
  /// Alternately lines of four stretches of 4 KiB, so that one core waits for four pages at once.
  four_pages,
};

/// The name of a way as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(StreamWay way) noexcept {
  switch (way) {
    case StreamWay::off:
      return "off";
    case StreamWay::one_page:
      return "one_page";
    case StreamWay::four_pages:
      return "four_pages";
  }
  return "unknown";
}

/// How large outputs are written.
struct Streaming {
  StreamWay way = StreamWay::off;
  std::int64_t threshold_bytes = 0;  ///< bytes of output from which on they stream

  bool operator==(const Streaming&) const = default;
};

}  // namespace exec

namespace exec {

/// The default for this processor, unless `set_streaming` changes it: `four_pages` on Intel's,
/// `one_page` on others, from a quarter of the last-level cache that a core can have on, and from 4
/// MiB at least; `off` where there are no streaming stores.
///
/// A copy reads as much as it writes, and its result is read next. From a quarter of the cache on,
/// streaming and then reading from memory is faster than writing through the caches and then
/// finding part of the result there. docs/performance.md has the rates of both ways.
[[nodiscard]] KVMELD_API Streaming default_streaming() noexcept;

}  // namespace exec

namespace exec {

/// How large outputs are written in this process now.
[[nodiscard]] KVMELD_API Streaming streaming() noexcept;

/// Sets how renders that start from now on write large outputs; a running one that streams may
/// change to the new order. Thread-safe; bytes do not change.
///
/// Where there are no streaming stores all ways are `off`. Errors: `invalid_argument` (a negative
/// threshold), `unknown_field`.
KVMELD_API Status set_streaming(const Streaming& chosen);

}  // namespace exec

// Writing large outputs past the caches: a line that is overwritten completely need not be read
// first.

namespace detail {

/// Bytes of each of the four stretches that are streamed alternately.
inline constexpr std::int64_t stream_stretch = 4096;
/// Bytes ahead of a single stream that its source is prefetched.
inline constexpr std::int64_t stream_ahead = 1024;

/// Whether an output of so many bytes is written past the caches.
[[nodiscard]] KVMELD_API bool streams_output(std::int64_t bytes) noexcept;
/// Whether lines of four stretches are streamed alternately.
[[nodiscard]] KVMELD_API bool streams_four_pages() noexcept;

}  // namespace detail

namespace extend {

/// Copies bytes without keeping their destination in the caches, whatever their number;
/// `stream_fence` orders the stores. No overlap.
KVMELD_API void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) noexcept;

}  // namespace extend

namespace detail {

/// Orders streamed stores before this thread's later stores.
inline void stream_fence() noexcept {
#if KVMELD_X86_DISPATCH
  __builtin_ia32_sfence();
#endif
}

}  // namespace detail

namespace exec {

/// Measures which way to stream is the fastest here, in the caller's memory: copies of half of
/// `scratch` to its other half by `memcpy` and by both ways, the best of three each. It neither
/// changes the setting nor allocates: pass the result to `set_streaming`.
///
/// The way is `off` where `memcpy` was the fastest; the threshold stays that of
/// `default_streaming`. Takes some 30 ms for 64 MiB, which should be several times the threshold,
/// since data that fits the caches is copied fastest through them. Errors: `invalid_argument` (less
/// than 2 MiB).
[[nodiscard]] KVMELD_API Result<Streaming> measure_streaming(std::span<std::byte> scratch);

}  // namespace exec

namespace extend {

/// How many bytes ahead of the loads to prefetch where `inputs` rows are read together; rows of
/// consecutive tokens are contiguous in a payload. Far enough to reach the next page, near enough
/// for all inputs together to stay in the L1 cache.
[[nodiscard]] constexpr std::ptrdiff_t prefetch_bytes(int inputs) noexcept {
  return inputs <= 4 ? 4096 : inputs >= 16 ? 1024 : 16384 / inputs / 64 * 64;
}

/// How many bytes ahead of the stores to prefetch, since a line is fetched before it is written.
inline constexpr std::ptrdiff_t written_ahead = 1024;

}  // namespace extend

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/rows.hpp>
#endif
