#pragma once

/// How 32 stored elements become 32 f32 values and back, for every element type.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Channels that a row body handles at once: a trip count known at compile time is what g++ -O2
/// vectorises.
inline constexpr std::ptrdiff_t row_block = 32;

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

template <ElementType type>
KVMELD_ALWAYS_INLINE void load_block(const std::byte* __restrict in,
                                     float* __restrict out) noexcept {
  if constexpr (type == ElementType::f32) {
    std::memcpy(out, in, sizeof(float) * row_block);
  } else {
    using Codec = ElementCodec<type>;
    const unaligned_t<typename Codec::Storage>* __restrict stored =
        reinterpret_cast<const unaligned_t<typename Codec::Storage>*>(in);
    for (std::ptrdiff_t i = 0; i < row_block; ++i) out[i] = Codec::load(stored[i]);
  }
}

template <ElementType type>
KVMELD_ALWAYS_INLINE void store_block(const float* __restrict in,
                                      std::byte* __restrict out) noexcept {
  if constexpr (type == ElementType::f32) {
    std::memcpy(out, in, sizeof(float) * row_block);
  } else {
    using Codec = ElementCodec<type>;
    unaligned_t<typename Codec::Storage>* __restrict stored =
        reinterpret_cast<unaligned_t<typename Codec::Storage>*>(out);
    for (std::ptrdiff_t i = 0; i < row_block; ++i) stored[i] = Codec::store(in[i]);
  }
}

template <>
KVMELD_ALWAYS_INLINE void load_block<ElementType::q8_0>(const std::byte* __restrict in,
                                                        float* __restrict out) noexcept {
  f16 stored_scale;
  std::memcpy(&stored_scale, in, sizeof(stored_scale));
  const float scale = to_float(stored_scale);
  const unaligned_t<std::int8_t>* __restrict values =
      reinterpret_cast<const unaligned_t<std::int8_t>*>(in + 2);
  for (std::ptrdiff_t i = 0; i < row_block; ++i) out[i] = scale * static_cast<float>(values[i]);
}

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
template <>
KVMELD_ALWAYS_INLINE void store_block<ElementType::q8_0>(const float* __restrict in,
                                                         std::byte* __restrict out) noexcept {
  store_q8_0(in, out);
}

// All of a row: whole blocks, then the rest through a padded one, so that the same expressions make
// every byte. Macros, because a function that calls one for a wider instruction set must itself be
// compiled for it.
#define KVMELD_LOAD_BLOCKS(BLOCK)                                                    \
  constexpr std::ptrdiff_t kvmeld_bytes = byte_size(type, row_block);                \
  std::ptrdiff_t i = 0;                                                              \
  for (; i + row_block <= n; i += row_block, in += kvmeld_bytes) BLOCK(in, out + i); \
  if (i < n) {                                                                       \
    std::byte padded[static_cast<std::size_t>(kvmeld_bytes)] = {};                   \
    float values[row_block];                                                         \
    std::memcpy(padded, in, static_cast<std::size_t>(byte_size(type, n - i)));       \
    BLOCK(padded, values);                                                           \
    std::memcpy(out + i, values, sizeof(float) * static_cast<std::size_t>(n - i));   \
  }
#define KVMELD_STORE_BLOCKS(BLOCK)                                                    \
  constexpr std::ptrdiff_t kvmeld_bytes = byte_size(type, row_block);                 \
  std::ptrdiff_t i = 0;                                                               \
  for (; i + row_block <= n; i += row_block, out += kvmeld_bytes) BLOCK(in + i, out); \
  if (i < n) {                                                                        \
    float values[row_block] = {};                                                     \
    std::byte padded[static_cast<std::size_t>(kvmeld_bytes)];                         \
    std::memcpy(values, in + i, sizeof(float) * static_cast<std::size_t>(n - i));     \
    BLOCK(values, padded);                                                            \
    std::memcpy(out, padded, static_cast<std::size_t>(byte_size(type, n - i)));       \
  }

template <ElementType type>
KVMELD_ALWAYS_INLINE void load_elements(const std::byte* in, std::ptrdiff_t n,
                                        float* out) noexcept {
  KVMELD_LOAD_BLOCKS(load_block<type>);
}
template <ElementType type>
KVMELD_ALWAYS_INLINE void store_elements(const float* in, std::ptrdiff_t n,
                                         std::byte* out) noexcept {
  KVMELD_STORE_BLOCKS(store_block<type>);
}

}  // namespace detail
KVMELD_NAMESPACE_END
