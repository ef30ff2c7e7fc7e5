#pragma once

/// Squared distances between rows in f64, by the 32-lane rule (docs/numerics.md): lane l takes channels l, l + 32, …, and the
/// lanes are joined by the tree 16, 8, 4, 2, 1.

#include <cstddef>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Channels that are compared in one go: of a dozen rows they fit into the first cache as doubles.
inline constexpr std::size_t compared_channels = 256;

/// How rows are widened, and how squares of differences are added to 32 lanes. Counts are multiples of 32.
struct DistanceSteps {
  void (*widen)(const float* in, std::size_t n, double* out) noexcept;
  void (*add)(const double* a, const double* b, std::size_t n, double* lanes) noexcept;
};

KVMELD_NOINLINE inline void widen_baseline(const float* __restrict in, std::size_t n, double* __restrict out) noexcept {
  for (std::size_t c = 0; c < n; ++c) out[c] = static_cast<double>(in[c]);
}
KVMELD_NOINLINE inline void add_squares_baseline(const double* __restrict a, const double* __restrict b, std::size_t n, double* __restrict lanes) noexcept {
  for (std::size_t at = 0; at < n; at += 32) {
    for (std::size_t l = 0; l < 32; ++l) {
      const double d = a[at + l] - b[at + l];
      lanes[l] = fma(d, d, lanes[l]);
    }
  }
}

#if KVMELD_X86_DISPATCH

// Accumulators are named: compilers keep an array of them in memory.
#define KVMELD_DISTANCE_STEPS(NAME, TARGET, BYTES, FMA)                                                                       \
  TARGET KVMELD_NOINLINE inline void widen_##NAME(const float* in, std::size_t n, double* out) noexcept {                     \
    for (std::size_t c = 0; c < n; c += BYTES / 8) {                                                                          \
      *reinterpret_cast<unaligned_vector_t<double, BYTES>*>(out + c) = __builtin_convertvector(                               \
          *reinterpret_cast<const unaligned_vector_t<float, BYTES / 2>*>(in + c), vector_t<double, BYTES>);                   \
    }                                                                                                                         \
  }                                                                                                                           \
  TARGET KVMELD_NOINLINE inline void add_squares_##NAME(const double* a, const double* b, std::size_t n, double* lanes) noexcept { \
    using Doubles = vector_t<double, BYTES>;                                                                                  \
    using Stored = unaligned_vector_t<double, BYTES>;                                                                         \
    constexpr std::size_t step = BYTES / 8;                                                                                   \
    for (std::size_t l = 0; l < 32; l += 4 * step) {                                                                          \
      auto* const sums = reinterpret_cast<Stored*>(lanes + l);                                                                \
      Doubles s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];                                                         \
      for (std::size_t at = l; at < n; at += 32) {                                                                            \
        const auto* const x = reinterpret_cast<const Stored*>(a + at);                                                        \
        const auto* const y = reinterpret_cast<const Stored*>(b + at);                                                        \
        const Doubles d0 = x[0] - y[0], d1 = x[1] - y[1], d2 = x[2] - y[2], d3 = x[3] - y[3];                                 \
        s0 = FMA(d0, s0);                                                                                                     \
        s1 = FMA(d1, s1);                                                                                                     \
        s2 = FMA(d2, s2);                                                                                                     \
        s3 = FMA(d3, s3);                                                                                                     \
      }                                                                                                                       \
      sums[0] = s0;                                                                                                           \
      sums[1] = s1;                                                                                                           \
      sums[2] = s2;                                                                                                           \
      sums[3] = s3;                                                                                                           \
    }                                                                                                                         \
  }
#define KVMELD_SQUARE_256(d, s) __builtin_ia32_vfmaddpd256(d, d, s)
#define KVMELD_SQUARE_512(d, s) __builtin_ia32_vfmaddpd512_mask(d, d, s, 0xff, 4)
KVMELD_DISTANCE_STEPS(avx2, KVMELD_TARGET_AVX2, 32, KVMELD_SQUARE_256)
KVMELD_DISTANCE_STEPS(avx512, KVMELD_TARGET_AVX512, 64, KVMELD_SQUARE_512)
#undef KVMELD_SQUARE_256
#undef KVMELD_SQUARE_512
#undef KVMELD_DISTANCE_STEPS

#endif  // KVMELD_X86_DISPATCH

[[nodiscard]] inline DistanceSteps distance_steps([[maybe_unused]] Isa isa) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512) return {widen_avx512, add_squares_avx512};
  if (isa == Isa::avx2) return {widen_avx2, add_squares_avx2};
#endif
  return {widen_baseline, add_squares_baseline};
}

/// The sum of 32 lanes, by the tree.
[[nodiscard]] inline double join_lane_sums(double* lanes) noexcept {
  for (int half = 16; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace detail
KVMELD_NAMESPACE_END
