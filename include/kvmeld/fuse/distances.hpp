#pragma once

/// Squared distances between rows in f64, by the 32-lane rule (docs/numerics.md).

#include <cstddef>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Joins 32 lanes by the tree 16, 8, 4, 2, 1.
KVMELD_ALWAYS_INLINE double join_lane_sums(double* lanes) noexcept {
  for (int half = 16; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

/// |a − b|² over n channels, a multiple of 32: lane l takes channels l, l + 32, …, then the tree.
KVMELD_NOINLINE inline double lane_distance_baseline(const float* a, const float* b, std::ptrdiff_t n) noexcept {
  alignas(64) double lanes[32] = {};
  for (std::ptrdiff_t at = 0; at < n; at += 32) {
    for (std::ptrdiff_t l = 0; l < 32; ++l) {
      const double d = static_cast<double>(a[at + l]) - static_cast<double>(b[at + l]);
      lanes[l] = fma(d, d, lanes[l]);
    }
  }
  return join_lane_sums(lanes);
}

#if KVMELD_X86_DISPATCH

// Accumulators in named registers: compilers keep an array of them in memory.
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline double lane_distance_avx2(const float* a, const float* b, std::ptrdiff_t n) noexcept {
  using Doubles = vector_t<double, 32>;
  using Floats = unaligned_vector_t<float, 16>;
  Doubles s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{};
  for (std::ptrdiff_t at = 0; at < n; at += 32) {
    const auto* x = reinterpret_cast<const Floats*>(a + at);
    const auto* y = reinterpret_cast<const Floats*>(b + at);
#define KVMELD_ADD_SQUARES(sum, i)                                                                                     \
  {                                                                                                                    \
    const Doubles d = __builtin_convertvector(x[i], Doubles) - __builtin_convertvector(y[i], Doubles);                 \
    sum = __builtin_ia32_vfmaddpd256(d, d, sum);                                                                       \
  }
    KVMELD_ADD_SQUARES(s0, 0)
    KVMELD_ADD_SQUARES(s1, 1)
    KVMELD_ADD_SQUARES(s2, 2)
    KVMELD_ADD_SQUARES(s3, 3)
    KVMELD_ADD_SQUARES(s4, 4)
    KVMELD_ADD_SQUARES(s5, 5)
    KVMELD_ADD_SQUARES(s6, 6)
    KVMELD_ADD_SQUARES(s7, 7)
#undef KVMELD_ADD_SQUARES
  }
  s0 = (s0 + s4) + (s2 + s6);
  s1 = (s1 + s5) + (s3 + s7);
  s0 = s0 + s1;
  return (s0[0] + s0[2]) + (s0[1] + s0[3]);
}
KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline double lane_distance_avx512(const float* a, const float* b, std::ptrdiff_t n) noexcept {
  using Doubles = vector_t<double, 64>;
  using Floats = unaligned_vector_t<float, 32>;
  constexpr int current_rounding = 4;
  Doubles s0{}, s1{}, s2{}, s3{};
  for (std::ptrdiff_t at = 0; at < n; at += 32) {
    const auto* x = reinterpret_cast<const Floats*>(a + at);
    const auto* y = reinterpret_cast<const Floats*>(b + at);
#define KVMELD_ADD_SQUARES(sum, i)                                                                                     \
  {                                                                                                                    \
    const Doubles d = __builtin_convertvector(x[i], Doubles) - __builtin_convertvector(y[i], Doubles);                 \
    sum = __builtin_ia32_vfmaddpd512_mask(d, d, sum, 0xff, current_rounding);                                          \
  }
    KVMELD_ADD_SQUARES(s0, 0)
    KVMELD_ADD_SQUARES(s1, 1)
    KVMELD_ADD_SQUARES(s2, 2)
    KVMELD_ADD_SQUARES(s3, 3)
#undef KVMELD_ADD_SQUARES
  }
  s0 = (s0 + s2) + (s1 + s3);
  const double f0 = s0[0] + s0[4], f1 = s0[1] + s0[5], f2 = s0[2] + s0[6], f3 = s0[3] + s0[7];
  return (f0 + f2) + (f1 + f3);
}

#endif  // KVMELD_X86_DISPATCH

using LaneDistance = double (*)(const float*, const float*, std::ptrdiff_t) noexcept;
[[nodiscard]] inline LaneDistance lane_distance([[maybe_unused]] Isa isa) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512) return lane_distance_avx512;
  if (isa == Isa::avx2) return lane_distance_avx2;
#endif
  return lane_distance_baseline;
}

}  // namespace detail
KVMELD_NAMESPACE_END
