#pragma once

/// 16- and 8-bit floats, converted by bit operations alone, so that host and device agree to the
/// bit.

#include <cstdint>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// IEEE binary16 as bits. Equality compares bits, so +0 and -0 differ and a NaN equals itself.
struct f16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(f16, f16) = default;
};

/// The upper half of a binary32 as bits.
struct bf16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bf16, bf16) = default;
};

/// OCP E4M3 (the "fn" variant): 0x7f and 0xff are NaN, there is no infinity, and the largest value
/// is 448.
struct f8_e4m3 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(f8_e4m3, f8_e4m3) = default;
};

/// OCP E5M2: infinities and NaNs as in IEEE, the largest finite value is 57344.
struct f8_e5m2 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(f8_e5m2, f8_e5m2) = default;
};

namespace detail {

// Below, every choice is a mask and not a branch, so that loops over these functions become vector
// code; no product reaches an addition, and products are exact, so that neither contraction nor
// flush-to-zero can change a bit.

[[nodiscard]] KVMELD_HD constexpr std::uint32_t float_bits(float value) noexcept {
  return __builtin_bit_cast(std::uint32_t, value);
}
[[nodiscard]] KVMELD_HD constexpr float bits_float(std::uint32_t bits) noexcept {
  return __builtin_bit_cast(float, bits);
}
[[nodiscard]] KVMELD_HD constexpr std::uint32_t mask_if(bool condition) noexcept {
  return 0u - static_cast<std::uint32_t>(condition);
}
[[nodiscard]] KVMELD_HD constexpr std::uint32_t select(std::uint32_t mask, std::uint32_t yes,
                                                       std::uint32_t no) noexcept {
  return (mask & yes) | (~mask & no);
}
[[nodiscard]] KVMELD_HD constexpr float small_int_to_float(std::uint32_t value) noexcept {
  // signed: the conversion that vector units have
  return static_cast<float>(static_cast<std::int32_t>(value));
}

/// Rounds |x|, given as binary32 bits, to the nearest even code of a narrow float without sign.
///
/// Overflow gives the code of the largest exponent and beyond; the caller clamps it. Below the
/// smallest normal the value is cut to an integer with 13 guard bits and a sticky bit, because a
/// float addition that rounds by itself could be contracted with a product of the caller.
template <int Mantissa, int Bias>
[[nodiscard]] KVMELD_HD constexpr std::uint32_t round_to_code(std::uint32_t magnitude) noexcept {
  constexpr int shift = 23 - Mantissa;
  constexpr std::uint32_t rebias = static_cast<std::uint32_t>(127 - Bias) << 23;
  constexpr std::uint32_t smallest_normal = static_cast<std::uint32_t>(128 - Bias) << 23;
  const std::uint32_t normal =
      (magnitude - rebias + ((1u << (shift - 1)) - 1u) + ((magnitude >> shift) & 1u)) >> shift;

  constexpr float to_units =
      bits_float(static_cast<std::uint32_t>(127 + Bias + Mantissa - 1 + 13) << 23);
  const std::uint32_t is_subnormal = mask_if(magnitude < smallest_normal);
  const float scaled = bits_float(magnitude & is_subnormal) * to_units;
  const std::int32_t cut = static_cast<std::int32_t>(scaled);
  const std::uint32_t sticky = static_cast<std::uint32_t>(static_cast<float>(cut) != scaled);
  const std::uint32_t units = static_cast<std::uint32_t>(cut);
  const std::uint32_t subnormal = (units + 0xfffu + (((units >> 13) & 1u) | sticky)) >> 13;
  return select(is_subnormal, subnormal, normal);
}

/// Bits of the binary32 with the value of a narrow float whose `code` has no sign and is neither
/// infinite nor NaN.
template <int Mantissa, int Bias>
[[nodiscard]] KVMELD_HD constexpr std::uint32_t finite_code_to_bits(std::uint32_t code) noexcept {
  constexpr float unit = bits_float(static_cast<std::uint32_t>(127 + 1 - Bias - Mantissa) << 23);
  const std::uint32_t is_subnormal = mask_if(code < (1u << Mantissa));
  const std::uint32_t subnormal = float_bits(small_int_to_float(code & is_subnormal) * unit);
  return select(is_subnormal, subnormal,
                (code << (23 - Mantissa)) + (static_cast<std::uint32_t>(127 - Bias) << 23));
}

}  // namespace detail

/// Exact; a signalling NaN becomes quiet, as in the F16C instructions.
[[nodiscard]] KVMELD_HD constexpr float to_float(f16 value) noexcept {
  const std::uint32_t code = value.bits & 0x7fffu;
  const std::uint32_t finite = detail::finite_code_to_bits<10, 15>(code);
  const std::uint32_t top =
      0x7f800000u | ((code & 0x3ffu) << 13) | (static_cast<std::uint32_t>(code > 0x7c00u) << 22);
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  return detail::bits_float(sign | detail::select(detail::mask_if(code >= 0x7c00u), top, finite));
}

/// Exact.
[[nodiscard]] KVMELD_HD constexpr float to_float(bf16 value) noexcept {
  return detail::bits_float(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Exact; both NaN codes become a quiet NaN of their sign.
[[nodiscard]] KVMELD_HD constexpr float to_float(f8_e4m3 value) noexcept {
  const std::uint32_t code = value.bits & 0x7fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t finite = detail::finite_code_to_bits<3, 7>(code);
  return detail::bits_float(sign |
                            detail::select(detail::mask_if(code == 0x7fu), 0x7fc00000u, finite));
}

/// Exact; a signalling NaN becomes quiet.
[[nodiscard]] KVMELD_HD constexpr float to_float(f8_e5m2 value) noexcept {
  return to_float(f16{static_cast<std::uint16_t>(value.bits << 8)});
}

/// Converts an f32 to `T`, rounding to nearest even. A NaN stays a NaN.
template <class T>
[[nodiscard]] KVMELD_HD constexpr T from_float(float value) noexcept;

/// Overflow gives infinity, subnormals are kept, NaN payloads keep their upper bits: the F16C
/// instruction's result.
template <>
[[nodiscard]] KVMELD_HD constexpr f16 from_float<f16>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t code = detail::round_to_code<10, 15>(magnitude);
  const std::uint32_t clamped = detail::select(detail::mask_if(code > 0x7c00u), 0x7c00u, code);
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const std::uint32_t chosen =
      detail::select(detail::mask_if(magnitude > 0x7f800000u), nan, clamped);
  return f16{static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | chosen)};
}

/// Overflow gives infinity, subnormals are kept.
template <>
[[nodiscard]] KVMELD_HD constexpr bf16 from_float<bf16>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t is_nan = detail::mask_if((bits & 0x7fffffffu) > 0x7f800000u);
  const std::uint32_t half = (0x7fffu + ((bits >> 16) & 1u)) & ~is_nan;
  return bf16{static_cast<std::uint16_t>(((bits + half) >> 16) | (is_nan & 0x40u))};
}

/// Saturates: what would round beyond 448, infinity included, becomes ±448, as inference kernels
/// store caches.
template <>
[[nodiscard]] KVMELD_HD constexpr f8_e4m3 from_float<f8_e4m3>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t code = detail::round_to_code<3, 7>(magnitude);
  const std::uint32_t clamped = detail::select(detail::mask_if(code > 0x7eu), 0x7eu, code);
  const std::uint32_t chosen =
      detail::select(detail::mask_if(magnitude > 0x7f800000u), 0x7fu, clamped);
  return f8_e4m3{static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | chosen)};
}

/// Overflow gives infinity, as in IEEE: this format has one, so a lost value stays visible.
template <>
[[nodiscard]] KVMELD_HD constexpr f8_e5m2 from_float<f8_e5m2>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t code = detail::round_to_code<2, 15>(magnitude);
  const std::uint32_t clamped = detail::select(detail::mask_if(code > 0x7cu), 0x7cu, code);
  const std::uint32_t nan = 0x7eu | ((magnitude >> 21) & 0x3u);
  const std::uint32_t chosen =
      detail::select(detail::mask_if(magnitude > 0x7f800000u), nan, clamped);
  return f8_e5m2{static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | chosen)};
}

KVMELD_NAMESPACE_END
