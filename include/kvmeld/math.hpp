#pragma once

/// Elementary functions with equal bytes on every machine.

#include <cstdint>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace math {

/// The two results of `sin_cos`.
struct SinCos {
  double sin;
  double cos;
};

/// Correctly rounded, as IEEE demands of the processor.
[[nodiscard]] KVMELD_HD inline float sqrt(float x) noexcept { return __builtin_sqrtf(x); }
[[nodiscard]] KVMELD_HD inline double sqrt(double x) noexcept { return __builtin_sqrt(x); }

}  // namespace math

namespace detail {

/// An unevaluated sum whose `low` part lies below the last place of `high`.
struct DoubleDouble {
  double high;
  double low;
};

/// The exact sum of two doubles (Knuth's two-sum; no order of magnitude is assumed).
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE DoubleDouble two_sum(double a, double b) noexcept {
  const double sum = a + b;
  const double b_part = sum - a;
  return {sum, (a - (sum - b_part)) + (b - b_part)};
}

[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE std::uint64_t double_bits(double x) noexcept {
  return __builtin_bit_cast(std::uint64_t, x);
}
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double bits_double(std::uint64_t bits) noexcept {
  return __builtin_bit_cast(double, bits);
}
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double select(bool condition, double yes,
                                                           double no) noexcept {
  const std::uint64_t mask = 0 - static_cast<std::uint64_t>(condition);
  return bits_double((double_bits(yes) & mask) | (double_bits(no) & ~mask));
}

/// 1.5 * 2^52: adding it rounds to an integer, which then is the low bits of the sum.
inline constexpr double integer_magic = 0x1.8p52;

/// 2^k for -1022 <= k <= 1023, where `magic` is k + integer_magic.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double power_of_two(std::int64_t k) noexcept {
  return bits_double(static_cast<std::uint64_t>(k + 1023) << 52);
}

/// The reduced argument of exp, and its integer part: x + low = k ln 2 + r.
struct ExpParts {
  std::int64_t k;
  DoubleDouble r;  ///< |r| <= 0.3466
  double q;        ///< e^r - 1 - r.high, that is, r.low included
};

[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE ExpParts exp_parts(double x, double low) noexcept {
  const double magic = fma(x, 0x1.71547652b82fep+0, integer_magic);
  const double k = magic - integer_magic;
  const double first = fma(-k, 0x1.62e42fefa3800p-1, x);  // exact: this part of ln 2 has 42 bits
  const double second = fma(-k, 0x1.ef35793c76730p-45, low);
  const DoubleDouble r = two_sum(first, second);
  const double z = r.high;
  double p = 0x1.1f730349868cep-29;
  p = fma(p, z, 0x1.af4de97ca4194p-26);
  p = fma(p, z, 0x1.27e4db646b17ep-22);
  p = fma(p, z, 0x1.71de0231960ebp-19);
  p = fma(p, z, 0x1.a01a01a6d889cp-16);
  p = fma(p, z, 0x1.a01a01abe7fe1p-13);
  p = fma(p, z, 0x1.6c16c16c162d4p-10);
  p = fma(p, z, 0x1.11111111100dcp-7);
  p = fma(p, z, 0x1.5555555555556p-5);
  p = fma(p, z, 0x1.5555555555557p-3);
  p = fma(p, z, 0.5);
  const std::int64_t integer =
      static_cast<std::int64_t>(double_bits(magic) - double_bits(integer_magic));
  return {integer, r, fma(z * z, p, fma(r.low, z, r.low))};
}

/// e^(x + low) for |low| below the last place of x.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double exp_of_sum(double x, double low) noexcept {
  // Beyond these bounds the result is 0 or infinity anyway, and k would leave its range. A NaN
  // passes both.
  const double below = select(x > 720.0, 720.0, x);
  const double bounded = select(below < -760.0, -760.0, below);
  const ExpParts parts = exp_parts(bounded, select(bounded == x, low, 0.0));
  const DoubleDouble one_plus_r = two_sum(1.0, parts.r.high);
  const double mantissa = one_plus_r.high + (one_plus_r.low + parts.q);
  const std::int64_t half = parts.k >> 1;
  // only a NaN's k is out of range
  const std::int64_t first = half < -1000 ? -1000 : (half > 1000 ? 1000 : half);
  const std::int64_t rest = parts.k - half;
  const std::int64_t second = rest < -1000 ? -1000 : (rest > 1000 ? 1000 : rest);
  // in two steps: subnormals round once
  const double value = mantissa * power_of_two(first) * power_of_two(second);
  // also keeps the product from being contracted with a caller's sum
  return select(bounded < -746.0, 0.0, value);
}

/// ln x as a sum accurate to 2^-62 of its value, for positive finite x.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE DoubleDouble log_of_positive(double x) noexcept {
  const bool tiny = x < 0x1p-1022;
  const double normal = select(tiny, x * 0x1p54, x);
  // Adding the distance from sqrt(1/2) to 1 lets the exponent field count up where the mantissa
  // passes sqrt(2).
  const std::uint64_t shifted = double_bits(normal) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu);
  const std::int64_t exponent = static_cast<std::int64_t>(shifted >> 52) - 1023;
  // in [sqrt(1/2), sqrt(2))
  const double m = bits_double((shifted & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu);
  const double k = static_cast<double>(exponent - (tiny ? 54 : 0));

  // ln m = 2 atanh(s) = 2 s + 2 s^3 / 3 + ..., s = (m - 1) / (m + 1) with its rounding error.
  const double numerator = m - 1.0;  // exact
  const DoubleDouble denominator = two_sum(m, 1.0);
  const double s = numerator / denominator.high;
  const double s_low =
      fma(-s, denominator.low, fma(-s, denominator.high, numerator)) / denominator.high;
  const double w = s * s;
  const double w_low = fma(2.0 * s, s_low, fma(s, s, -w));
  double p = 0x1.e02e6fff27908p-5;
  p = fma(p, w, 0x1.df7cc8e5fa539p-5);
  p = fma(p, w, 0x1.1118c7e4b0917p-4);
  p = fma(p, w, 0x1.3b1395d2190c1p-4);
  p = fma(p, w, 0x1.745d177a96056p-4);
  p = fma(p, w, 0x1.c71c71c6eaa10p-4);
  p = fma(p, w, 0x1.2492492492521p-3);
  p = fma(p, w, 0x1.999999999999ap-3);
  // c = w/3 + w^2 p, then ln m = 2 (s + s_low) (1 + c): the third carried in two parts, the rest in
  // one.
  const double third = fma(w, 0x1.5555555555555p-2, w * 0x1.5555555555555p-56);
  const double third_low = fma(w_low, 0x1.5555555555555p-2,
                               fma(w, 0x1.5555555555555p-56, fma(w, 0x1.5555555555555p-2, -third)));
  const double c = fma(w * w, p, third);
  const double c_low = fma(w * w, p, third - c) + third_low;
  const double cubic = s * c;
  const double cubic_low = fma(s_low, c, fma(s, c_low, fma(s, c, -cubic)));
  const DoubleDouble mantissa = two_sum(2.0 * s, 2.0 * cubic);  // doubling is exact
  const double mantissa_low = mantissa.low + 2.0 * (s_low + cubic_low);

  // exact product: 42 bits by 11
  const DoubleDouble total = two_sum(k * 0x1.62e42fefa3800p-1, mantissa.high);
  const double low = fma(k, 0x1.ef35793c76730p-45, total.low + mantissa_low);
  return two_sum(total.high, low);
}

}  // namespace detail

namespace math {

/// Sine and cosine together; each within 0.75 ulp for |x| <= 1e9, beyond which the reduction has
/// too few bits.
///
/// The multiple of pi/2 is subtracted in four parts (152 bits) by fma and exact products;
/// polynomials on [-pi/4, pi/4] then use both parts of the reduced argument.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE SinCos sin_cos(double x) noexcept {
  using namespace detail;
  const double magic = fma(x, 0x1.45f306dc9c883p-1, integer_magic);
  const double k = magic - integer_magic;
  const std::uint64_t quadrant = double_bits(magic);  // its two low bits

  const double first = fma(-k, 0x1.921fb54442d18p+0, x);  // exact
  // exact product: 30 bits by 23
  const DoubleDouble second = two_sum(first, -k * 0x1.1a62600000000p-54);
  const DoubleDouble third = two_sum(second.high, -k * 0x1.98a2e00000000p-77);  // exact product
  const double rest = fma(-k, 0x1.b839a252049c1p-104, second.low + third.low);
  const DoubleDouble r = two_sum(third.high, rest);

  const double z = r.high * r.high;
  double s = -0x1.ab17a79237a19p-41;
  s = fma(s, z, 0x1.61217ec01749dp-33);
  s = fma(s, z, -0x1.ae64541266378p-26);
  s = fma(s, z, 0x1.71de3a54605eep-19);
  s = fma(s, z, -0x1.a01a01a019936p-13);
  s = fma(s, z, 0x1.1111111111110p-7);
  s = fma(s, z, -0x1.5555555555555p-3);
  const double sine = r.high + fma(r.high * z, s, fma(r.low * z, -0.5, r.low));

  double c = -0x1.907d7aebd5e3dp-37;
  c = fma(c, z, 0x1.1eeb68b109173p-29);
  c = fma(c, z, -0x1.27e4fa17a41b4p-22);
  c = fma(c, z, 0x1.a01a019f4e867p-16);
  c = fma(c, z, -0x1.6c16c16c16966p-10);
  c = fma(c, z, 0x1.5555555555555p-5);
  const double head = fma(-0.5, z, 1.0);
  const double head_low = fma(-0.5, z, 1.0 - head);   // exact: what head lost
  const double square_low = fma(r.high, r.high, -z);  // what z lost
  const double tail = fma(z * z, c, fma(-r.high, r.low, fma(-0.5, square_low, head_low)));
  const double cosine = head + tail;

  const bool swap = (quadrant & 1u) != 0;
  const std::uint64_t sine_sign = (quadrant & 2u) << 62;
  const std::uint64_t cosine_sign = ((quadrant + 1u) & 2u) << 62;
  return {bits_double(double_bits(select(swap, cosine, sine)) ^ sine_sign),
          bits_double(double_bits(select(swap, sine, cosine)) ^ cosine_sign)};
}

/// e^x within 0.6 ulp (0.75 where the result is subnormal); infinity above 709.78, subnormal and
/// then 0 below -708.4, NaN for NaN.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double exp(double x) noexcept {
  return detail::exp_of_sum(x, 0.0);
}

/// Natural logarithm within 0.51 ulp; -infinity for 0, NaN below it.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double log(double x) noexcept {
  const double infinity = __builtin_huge_val();
  const bool positive = x > 0.0 && x < infinity;
  const double value = detail::log_of_positive(detail::select(positive, x, 1.0)).high;
  const double other = detail::select(x == 0.0, -infinity,
                                      detail::select(x == infinity, infinity, __builtin_nan("")));
  return detail::select(positive, value, other);
}

/// x^y for x >= 0; relative error below 1.2e-16 wherever the result is normal. NaN for a negative
/// x.
[[nodiscard]] KVMELD_HD inline double pow(double x, double y) noexcept {
  const double infinity = __builtin_huge_val();
  if (y == 0.0 || x == 1.0) return 1.0;
  if (!(x >= 0.0) || y != y) return __builtin_nan("");
  if (x == 0.0) return y > 0.0 ? 0.0 : infinity;
  if (x == infinity) return y > 0.0 ? infinity : 0.0;
  const detail::DoubleDouble log_x = detail::log_of_positive(x);
  const double high = y * log_x.high;
  if (high > 720.0) return infinity;
  if (high < -760.0) return 0.0;
  return detail::exp_of_sum(high, fma(y, log_x.low, fma(y, log_x.high, -high)));
}

/// Hyperbolic tangent within 2.5 ulp; odd to the bit, ±1 beyond 22.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double tanh(double x) noexcept {
  using namespace detail;
  const std::uint64_t sign = double_bits(x) & 0x8000000000000000u;
  const double magnitude = bits_double(double_bits(x) ^ sign);
  const double bounded = select(magnitude > 22.0, 22.0, magnitude);
  // e^2a - 1 = (2^k - 1) + 2^k (r + q), which keeps its relative precision where it is near 0,
  // because there k = 0.
  const ExpParts parts = exp_parts(2.0 * bounded, 0.0);
  const double scale = power_of_two(parts.k & 1023);
  const double minus_one = (scale - 1.0) + fma(scale, parts.q, scale * parts.r.high);
  const double value = minus_one / (minus_one + 2.0);
  return bits_double(double_bits(value) | sign);
}

}  // namespace math

KVMELD_NAMESPACE_END
