#pragma once

/// Distances between rows, in blocks.

#include <cstddef>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// How rows are widened, and how squares of differences are added to 32 lanes. Counts of channels
/// are multiples of 32.
struct DistanceSteps {
  using Widen = void (*)(const std::byte* in, std::size_t n, double* out) noexcept;

  Widen widen = nullptr;      ///< of f32
  Widen raw_widen = nullptr;  ///< of stored rows; null: this type has none
  /// Two pairs at once, (a0, b0) and (a1, b1), since one leaves the processor waiting for its own
  /// sums. lanes: (2, 32), which count as zeros if `first`
  void (*add)(const double* a0, const double* b0, const double* a1, const double* b1, std::size_t n,
              bool first, double* lanes) noexcept = nullptr;
  /// The sum of 32 lanes, by the tree; the lanes are spent.
  double (*join)(double* lanes) noexcept = nullptr;
};

KVMELD_ALWAYS_INLINE double join_lanes_body(double* lanes) noexcept {
  for (int l = 0; l < 16; ++l) lanes[l] += lanes[l + 16];
  for (int l = 0; l < 8; ++l) lanes[l] += lanes[l + 8];
  for (int l = 0; l < 4; ++l) lanes[l] += lanes[l + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

KVMELD_NOINLINE inline void widen_baseline(const std::byte* __restrict in, std::size_t n,
                                           double* __restrict out) noexcept {
  const float* const x = reinterpret_cast<const float*>(in);
  for (std::size_t c = 0; c < n; ++c) out[c] = static_cast<double>(x[c]);
}
KVMELD_NOINLINE inline void add_squares_baseline(const double* a0, const double* b0,
                                                 const double* a1, const double* b1, std::size_t n,
                                                 bool first, double* lanes) noexcept {
  for (std::size_t l = 0; first && l < 64; ++l) lanes[l] = 0;
  for (std::size_t at = 0; at < n; at += 32) {
    for (std::size_t l = 0; l < 32; ++l) {
      const double d = a0[at + l] - b0[at + l], e = a1[at + l] - b1[at + l];
      lanes[l] = fma(d, d, lanes[l]);
      lanes[32 + l] = fma(e, e, lanes[32 + l]);
    }
  }
}
KVMELD_NOINLINE inline double join_lanes_baseline(double* lanes) noexcept {
  return join_lanes_body(lanes);
}

#if KVMELD_X86_DISPATCH

KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void store_doubles_avx2(FloatLanes x,
                                                                double* out) noexcept {
  auto* const to = reinterpret_cast<unaligned_vector_t<double, 32>*>(out);
  to[0] = __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3), vector_t<double, 32>);
  to[1] = __builtin_convertvector(__builtin_shufflevector(x, x, 4, 5, 6, 7), vector_t<double, 32>);
}
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void store_doubles_avx512(FloatLanes x,
                                                                    double* out) noexcept {
  *reinterpret_cast<unaligned_vector_t<double, 64>*>(out) = widen_lanes(x);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline double join_lanes_avx2(double* lanes) noexcept {
  return join_lanes_body(lanes);
}
KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline double join_lanes_avx512(double* lanes) noexcept {
  const auto* const v = reinterpret_cast<const unaligned_vector_t<double, 64>*>(lanes);
  WideDoubles s = (v[0] + v[2]) + (v[1] + v[3]);
  s = s + __builtin_shufflevector(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
  s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5);
  return s[0] + s[1];
}

// Accumulators are named: compilers keep an array of them in memory.
#define KVMELD_DISTANCE_STEPS(NAME, TARGET, BYTES, FMA)                                       \
  template <ElementType type>                                                                 \
  TARGET KVMELD_NOINLINE void widen_##NAME(const std::byte* in, std::size_t n,                \
                                           double* out) noexcept {                            \
    for (std::size_t c = 0; c < n; c += 8, in += 8 * block_bytes(type))                       \
      store_doubles_##NAME(load_eight<type>(in), out + c);                                    \
  }                                                                                           \
  TARGET KVMELD_NOINLINE inline void add_squares_##NAME(                                      \
      const double* a0, const double* b0, const double* a1, const double* b1, std::size_t n,  \
      bool first, double* lanes) noexcept {                                                   \
    using Doubles = vector_t<double, BYTES>;                                                  \
    using Stored = unaligned_vector_t<double, BYTES>;                                         \
    constexpr std::size_t step = BYTES / 8;                                                   \
    for (std::size_t l = 0; l < 32; l += 4 * step) {                                          \
      auto* const s = reinterpret_cast<Stored*>(lanes + l);                                   \
      auto* const t = reinterpret_cast<Stored*>(lanes + 32 + l);                              \
      Doubles s0{}, s1{}, s2{}, s3{}, t0{}, t1{}, t2{}, t3{};                                 \
      if (!first) {                                                                           \
        s0 = s[0];                                                                            \
        s1 = s[1];                                                                            \
        s2 = s[2];                                                                            \
        s3 = s[3];                                                                            \
        t0 = t[0];                                                                            \
        t1 = t[1];                                                                            \
        t2 = t[2];                                                                            \
        t3 = t[3];                                                                            \
      }                                                                                       \
      for (std::size_t at = l; at < n; at += 32) {                                            \
        const auto* const x = reinterpret_cast<const Stored*>(a0 + at);                       \
        const auto* const y = reinterpret_cast<const Stored*>(b0 + at);                       \
        const Doubles d0 = x[0] - y[0], d1 = x[1] - y[1], d2 = x[2] - y[2], d3 = x[3] - y[3]; \
        s0 = FMA(d0, s0);                                                                     \
        s1 = FMA(d1, s1);                                                                     \
        s2 = FMA(d2, s2);                                                                     \
        s3 = FMA(d3, s3);                                                                     \
        const auto* const z = reinterpret_cast<const Stored*>(a1 + at);                       \
        const auto* const w = reinterpret_cast<const Stored*>(b1 + at);                       \
        const Doubles e0 = z[0] - w[0], e1 = z[1] - w[1], e2 = z[2] - w[2], e3 = z[3] - w[3]; \
        t0 = FMA(e0, t0);                                                                     \
        t1 = FMA(e1, t1);                                                                     \
        t2 = FMA(e2, t2);                                                                     \
        t3 = FMA(e3, t3);                                                                     \
      }                                                                                       \
      s[0] = s0;                                                                              \
      s[1] = s1;                                                                              \
      s[2] = s2;                                                                              \
      s[3] = s3;                                                                              \
      t[0] = t0;                                                                              \
      t[1] = t1;                                                                              \
      t[2] = t2;                                                                              \
      t[3] = t3;                                                                              \
    }                                                                                         \
  }                                                                                           \
  [[nodiscard]] inline DistanceSteps distance_steps_##NAME(ElementType type) noexcept {       \
    return {widen_##NAME<ElementType::f32>,                                                   \
            type == ElementType::f32    ? widen_##NAME<ElementType::f32>                      \
            : type == ElementType::f16  ? widen_##NAME<ElementType::f16>                      \
            : type == ElementType::bf16 ? widen_##NAME<ElementType::bf16>                     \
                                        : nullptr,                                            \
            add_squares_##NAME, join_lanes_##NAME};                                           \
  }
#define KVMELD_SQUARE_256(d, s) __builtin_ia32_vfmaddpd256(d, d, s)
#define KVMELD_SQUARE_512(d, s) __builtin_ia32_vfmaddpd512_mask(d, d, s, 0xff, 4)
KVMELD_DISTANCE_STEPS(avx2, KVMELD_TARGET_AVX2, 32, KVMELD_SQUARE_256)
KVMELD_DISTANCE_STEPS(avx512, KVMELD_TARGET_AVX512, 64, KVMELD_SQUARE_512)
#undef KVMELD_SQUARE_256
#undef KVMELD_SQUARE_512
#undef KVMELD_DISTANCE_STEPS

#endif  // KVMELD_X86_DISPATCH

/// The steps of one instruction set, raw ones for rows of `type`.
[[nodiscard]] inline DistanceSteps distance_steps([[maybe_unused]] Isa isa,
                                                  [[maybe_unused]] ElementType type) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512) return distance_steps_avx512(type);
  if (isa == Isa::avx2) return distance_steps_avx2(type);
#endif
  return {widen_baseline, nullptr, add_squares_baseline, join_lanes_baseline};
}

}  // namespace detail

KVMELD_NAMESPACE_END
