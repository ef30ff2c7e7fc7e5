// Narrow floats against decoding by formula, and rounding against the nearest value found in
// double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <kvmeld/tensor.hpp>

#include "support/catch.hpp"

using namespace kvmeld;

namespace {

/// A format by its parameters: `largest` is the greatest finite value, `saturates` that it has no
/// infinity.
struct Format {
  int mantissa, bias;
  double largest;
  bool saturates;
};
constexpr Format half{10, 15, 65504.0, false};
constexpr Format brain{7, 127, 0x1.fep127, false};
constexpr Format e4m3{3, 7, 448.0, true};
constexpr Format e5m2{2, 15, 57344.0, false};

double decoded(const Format& f, unsigned code) {  // without sign
  const int exponent = static_cast<int>(code >> f.mantissa);
  const double fraction = static_cast<double>(code & ((1u << f.mantissa) - 1u));
  if (exponent == 0) return std::ldexp(fraction, 1 - f.bias - f.mantissa);
  return std::ldexp(fraction + std::ldexp(1.0, f.mantissa), exponent - f.bias - f.mantissa);
}

/// The nearest value of the format, ties to the even code; std::nearbyint rounds so.
double nearest(const Format& f, double x) {
  const double magnitude = std::abs(x);
  const int lowest = 1 - f.bias;
  const int exponent =
      magnitude == 0.0 || std::isinf(magnitude) ? lowest : std::max(lowest, std::ilogb(magnitude));
  const double unit = std::ldexp(1.0, exponent - f.mantissa);
  double rounded = std::isinf(magnitude) ? magnitude : std::nearbyint(magnitude / unit) * unit;
  if (rounded > f.largest)
    rounded = f.saturates ? f.largest : std::numeric_limits<double>::infinity();
  return std::copysign(rounded, x);
}

template <class T>
bool rounds_right(const Format& f, float x) {
  const T stored = from_float<T>(x);
  const float back = to_float(stored);
  if (std::isnan(x)) return std::isnan(back);
  return static_cast<double>(back) == nearest(f, static_cast<double>(x)) &&
         std::signbit(back) == std::signbit(x);
}

/// Decodes all codes, rounds every value, every midpoint and their neighbours, and a sweep over all
/// floats.
template <class T>
void check(const Format& f, unsigned codes, unsigned infinity_code) {
  unsigned wrong = 0;
  for (unsigned code = 0; code < codes; ++code) {
    const auto sign = static_cast<unsigned>(codes);
    const float up = to_float(T{static_cast<decltype(T::bits)>(code)});
    const float down = to_float(T{static_cast<decltype(T::bits)>(code | sign)});
    if (code > infinity_code || (f.saturates && code == codes - 1)) {
      wrong += !std::isnan(up) || !std::isnan(down) || std::signbit(up) || !std::signbit(down);
      wrong += !std::isnan(to_float(from_float<T>(up)));
      continue;
    }
    const double value =
        code == infinity_code ? std::numeric_limits<double>::infinity() : decoded(f, code);
    wrong += static_cast<double>(up) != value || static_cast<double>(down) != -value ||
             !std::signbit(down);
    if (code == infinity_code) continue;
    wrong += from_float<T>(up).bits != code || from_float<T>(down).bits != (code | sign);
    const float next = static_cast<float>(decoded(f, code + 1));
    const float middle =
        static_cast<float>((static_cast<double>(up) + static_cast<double>(next)) / 2.0);
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, next),
                          std::nextafter(up, next)}) {
      wrong += !rounds_right<T>(f, x) || !rounds_right<T>(f, -x);
    }
  }
  REQUIRE(wrong == 0);
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 4099) {
    wrong += !rounds_right<T>(f, detail::bits_float(static_cast<std::uint32_t>(bits)));
  }
  for (const std::uint32_t bits : {0x7f800000u, 0x7f800001u, 0x7fffffffu, 0x7f7fffffu, 0x00000001u,
                                   0x007fffffu, 0x00800000u}) {
    wrong += !rounds_right<T>(f, detail::bits_float(bits)) ||
             !rounds_right<T>(f, detail::bits_float(bits | 0x80000000u));
  }
  REQUIRE(wrong == 0);
}

}  // namespace

TEST_CASE("f16: all codes, all midpoints, a sweep") { check<f16>(half, 0x8000, 0x7c00); }
TEST_CASE("bf16: all codes, all midpoints, a sweep") { check<bf16>(brain, 0x8000, 0x7f80); }
TEST_CASE("e5m2: all codes, all midpoints, a sweep") { check<f8_e5m2>(e5m2, 0x80, 0x7c); }
TEST_CASE("e4m3: all codes, all midpoints, a sweep; saturates") {
  check<f8_e4m3>(e4m3, 0x80, 0x80);
  REQUIRE(from_float<f8_e4m3>(1e9f).bits == 0x7e);
  REQUIRE(from_float<f8_e4m3>(-std::numeric_limits<float>::infinity()).bits == 0xfe);
  REQUIRE(to_float(f8_e4m3{0x7e}) == 448.0f);
}

TEST_CASE("overflow of f16 and e5m2 is an infinity, and its tie rounds up") {
  REQUIRE(from_float<f16>(65519.996f).bits == 0x7bff);
  REQUIRE(from_float<f16>(65520.0f).bits == 0x7c00);
  REQUIRE(from_float<f8_e5m2>(61439.996f).bits == 0x7b);
  REQUIRE(from_float<f8_e5m2>(-61440.0f).bits == 0xfc);
  REQUIRE(from_float<bf16>(0x1.ffp127f).bits == 0x7f80);
}

// a cache tagged f16 that was bf16: fluent nonsense
TEST_CASE("the same bits are another number in another type") {
  REQUIRE(to_float(bf16{0x433c}) == 188.0f);
  REQUIRE(to_float(f16{0x433c}) == 3.6171875f);
}

TEST_CASE("sizes of element types") {
  REQUIRE(byte_size(ElementType::f64, 3) == 24);
  REQUIRE(byte_size(ElementType::bf16, 3) == 6);
  REQUIRE(byte_size(ElementType::f8_e4m3, 5) == 5);
  REQUIRE(byte_size(ElementType::q8_0, 64) == 68);
  REQUIRE(byte_size(ElementType::q8_0, 33) == 68);  // a partial block counts whole
  REQUIRE(byte_size(ElementType::q8_0, 0) == 0);
  REQUIRE(block_elements(ElementType::q8_0) == 32);
  REQUIRE(to_string(ElementType::f8_e5m2) == "f8_e5m2");
  STATIC_REQUIRE(element_type_of_v<bf16> == ElementType::bf16);
  // also at compile time
  STATIC_REQUIRE(to_float(from_float<f16>(0.333251953125f)) == 0.333251953125f);
}
