// The f64 routines against 113-bit (or, on compilers without it, 64-bit) references; the bounds are
// the documented ones.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <kvmeld/math.hpp>

#include "support/catch.hpp"
#include "support/tensor_forms.hpp"

using namespace kvmeld;

namespace {

// 64 bits on x86: 2^-11 of a double's last place, against bounds of half and more
using Real = long double;

/// Error in units of the last place of the right value.
double ulps(double got, Real want) {
  const double rounded = static_cast<double>(want);
  if (got == rounded && (std::isinf(rounded) || rounded == 0.0)) return 0.0;
  int exponent = 0;
  std::frexp(rounded, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 53, -1074));
  return static_cast<double>(std::abs((static_cast<Real>(got) - want) / static_cast<Real>(unit)));
}

/// Uniform in [0, 1), the same everywhere.
struct Random {
  std::uint64_t state = 88172645463325252u;
  double operator()() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<double>(state >> 11) * 0x1p-53;
  }
};

constexpr int samples = 200000;

}  // namespace

TEST_CASE("sine and cosine within 0.75 ulp up to 1e9") {
  Random random;
  double worst = 0.0;
  for (int i = 0; i < samples; ++i) {
    double x = std::min(std::exp2(random() * 60.0 - 30.0), 1e9) * (i % 2 == 0 ? 1.0 : -1.0);
    // nearly a multiple of pi/2
    if (i % 4 == 0) x = std::nearbyint(random() * 6e8) * 1.5707963267948966;
    if (i % 4 == 1)
      x = std::nearbyint(random() * 131072.0) *
          std::pow(10000.0, -std::floor(random() * 64.0) / 64.0);
    const math::SinCos got = math::sin_cos(x);
    // The C library's own long double reduction is exact enough for the multiples of pi/2 too.
    worst = std::max({worst, ulps(got.sin, std::sin(static_cast<Real>(x))),
                      ulps(got.cos, std::cos(static_cast<Real>(x)))});
  }
  REQUIRE(worst < 0.75);
}

TEST_CASE("sine and cosine at exact and hard arguments") {
  REQUIRE(math::sin_cos(0.0).sin == 0.0);
  REQUIRE_FALSE(std::signbit(math::sin_cos(0.0).sin));
  REQUIRE(math::sin_cos(0.0).cos == 1.0);
  REQUIRE(math::sin_cos(0x1p-40).sin == 0x1p-40);
  for (double x = 1.0; x < 1e9; x *= 1.01) {  // odd and even to the bit
    REQUIRE(math::sin_cos(-x).sin == -math::sin_cos(x).sin);
    REQUIRE(math::sin_cos(-x).cos == math::sin_cos(x).cos);
  }
  REQUIRE(std::isnan(math::sin_cos(std::numeric_limits<double>::infinity()).sin));
}

TEST_CASE("exp within 0.6 ulp, 0.75 below the normal numbers") {
  Random random;
  double normal = 0.0, subnormal = 0.0;
  for (int i = 0; i < samples; ++i) {
    const double x = (random() - 0.5) * 1490.0 * (i % 2 == 0 ? 1.0 : std::exp2(-30.0 * random()));
    double& worst = x < -708.0 ? subnormal : normal;
    worst = std::max(worst, ulps(math::exp(x), std::exp(static_cast<Real>(x))));
  }
  REQUIRE(normal < 0.6);
  REQUIRE(subnormal < 0.75);
  REQUIRE(math::exp(0.0) == 1.0);
  REQUIRE(std::isinf(math::exp(709.79)));
  REQUIRE(math::exp(-745.2) == 0.0);
  REQUIRE(math::exp(-std::numeric_limits<double>::infinity()) == 0.0);
  REQUIRE(std::isinf(math::exp(std::numeric_limits<double>::infinity())));
  REQUIRE(std::isnan(math::exp(std::nan(""))));
}

TEST_CASE("log within 0.51 ulp") {
  Random random;
  double worst = 0.0;
  for (int i = 0; i < samples; ++i) {
    const double wide = std::ldexp(1.0 + random(), static_cast<int>(random() * 2100.0) - 1074);
    const double x = i % 2 == 0 ? wide : 1.0 + (random() - 0.5) * std::exp2(-40.0 * random());
    if (std::isfinite(x) && x > 0.0)
      worst = std::max(worst, ulps(math::log(x), std::log(static_cast<Real>(x))));
  }
  REQUIRE(worst < 0.51);
  REQUIRE(math::log(1.0) == 0.0);
  REQUIRE(math::log(0.0) == -std::numeric_limits<double>::infinity());
  REQUIRE(std::isnan(math::log(-1.0)));
  REQUIRE(std::isinf(math::log(std::numeric_limits<double>::infinity())));
  REQUIRE(std::isnan(math::log(std::nan(""))));
}

TEST_CASE("pow within 1.2e-16 of the value") {
  Random random;
  double frequencies = 0.0, worst = 0.0;
  for (const double base : {10000.0, 500000.0, 1000000.0, 10000000.0, 8192.0}) {
    for (const int rotary : {64, 80, 96, 128, 256}) {
      for (int i = 0; 2 * i < rotary; ++i) {
        const double y = -2.0 * i / rotary;
        const Real want = std::pow(static_cast<Real>(base), static_cast<Real>(y));
        frequencies = std::max(
            frequencies,
            static_cast<double>(std::abs((static_cast<Real>(math::pow(base, y)) - want) / want)));
      }
    }
  }
  for (int i = 0; i < samples; ++i) {
    const double x = std::exp2((random() - 0.5) * 60.0), y = (random() - 0.5) * 46.0;
    const Real want = std::pow(static_cast<Real>(x), static_cast<Real>(y));
    if (want < 1e-300L || want > 1e300L) continue;
    worst = std::max(
        worst, static_cast<double>(std::abs((static_cast<Real>(math::pow(x, y)) - want) / want)));
  }
  REQUIRE(frequencies < 1.2e-16);
  REQUIRE(worst < 1.2e-16);
  REQUIRE(math::pow(0.0, 0.0) == 1.0);
  REQUIRE(math::pow(0.0, 2.0) == 0.0);
  REQUIRE(std::isinf(math::pow(0.0, -2.0)));
  REQUIRE(math::pow(2.0, 10.0) == 1024.0);
  REQUIRE(std::isnan(math::pow(-2.0, 2.0)));
  REQUIRE(std::isinf(math::pow(10.0, 400.0)));
  REQUIRE(math::pow(10.0, -400.0) == 0.0);
}

TEST_CASE("tanh within 2.5 ulp") {
  Random random;
  double worst = 0.0;
  for (int i = 0; i < samples; ++i) {
    const double x = (random() - 0.5) * 50.0 * (i % 2 == 0 ? 1.0 : std::exp2(-60.0 * random()));
    worst = std::max(worst, ulps(math::tanh(x), std::tanh(static_cast<Real>(x))));
  }
  REQUIRE(worst < 2.5);
  REQUIRE(math::tanh(30.0) == 1.0);
  REQUIRE(math::tanh(-std::numeric_limits<double>::infinity()) == -1.0);
  REQUIRE(std::signbit(math::tanh(-0.0)));
  REQUIRE(std::isnan(math::tanh(std::nan(""))));
}

TEST_CASE("square roots are IEEE") {
  REQUIRE(math::sqrt(2.0) == 0x1.6a09e667f3bcdp+0);
  REQUIRE(math::sqrt(2.0f) == 0x1.6a09e6p+0f);
  REQUIRE(math::sqrt(0x1p-1074) == 0x1p-537);
}
