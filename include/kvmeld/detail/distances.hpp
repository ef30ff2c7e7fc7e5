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
  using Widen = void (*)(const std::byte* in, std::size_t n, double* out);

  Widen widen = nullptr;      ///< of f32
  Widen raw_widen = nullptr;  ///< of stored rows; null: this type has none
  /// Adds two pairs at once, (a0, b0) and (a1, b1), since a single pair would wait for the latency
  /// of its sums. lanes: (2, 32), taken as zeros if `first`
  void (*add)(const double* a0, const double* b0, const double* a1, const double* b1, std::size_t n,
              bool first, double* lanes) = nullptr;
  /// The sum of 32 lanes, by the tree; overwrites the lanes.
  double (*join)(double* lanes) = nullptr;
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

template <int bytes, ElementType type>
struct WidenRow {
  KVMELD_ALWAYS_INLINE static void run(const std::byte* in, std::size_t n, double* out) noexcept {
    for (std::size_t c = 0; c < n; c += 8, in += 8 * block_bytes(type)) {
      const extend::Vec<float, 32> x = extend::load_eight<type>(in);
      if constexpr (bytes == 64) {
        widen(x).store(out + c);
      } else {
        widen(lower_half(x)).store(out + c);
        widen(upper_half(x)).store(out + c + 4);
      }
    }
  }
};

template <int bytes>
struct AddSquares {
  using Doubles = extend::Vec<double, bytes>;
  using Sums = extend::Vecs<Doubles, 4>;
  static constexpr std::size_t step = Doubles::lanes;

  KVMELD_ALWAYS_INLINE static void load(const double* from, Sums& sums) noexcept {
    sums.each([&](Doubles& sum, std::size_t i)
                  KVMELD_INLINE_LAMBDA { sum = Doubles::load(from + i * step); });
  }
  KVMELD_ALWAYS_INLINE static void store(Sums& sums, double* to) noexcept {
    sums.each([&](Doubles& sum, std::size_t i) KVMELD_INLINE_LAMBDA { sum.store(to + i * step); });
  }
  KVMELD_ALWAYS_INLINE static void add(const double* a, const double* b, Sums& sums) noexcept {
    sums.each([&](Doubles& sum, std::size_t i) KVMELD_INLINE_LAMBDA {
      const Doubles d = Doubles::load(a + i * step) - Doubles::load(b + i * step);
      sum = multiply_add(d, d, sum);
    });
  }
  KVMELD_ALWAYS_INLINE static void run(const double* a0, const double* b0, const double* a1,
                                       const double* b1, std::size_t n, bool first,
                                       double* lanes) noexcept {
    for (std::size_t l = 0; l < 32; l += 4 * step) {
      Sums s{}, t{};
      if (!first) {
        load(lanes + l, s);
        load(lanes + 32 + l, t);
      }
      for (std::size_t at = l; at < n; at += 32) {
        add(a0 + at, b0 + at, s);
        add(a1 + at, b1 + at, t);
      }
      store(s, lanes + l);
      store(t, lanes + 32 + l);
    }
  }
};

template <int bytes>
struct JoinLanes {
  KVMELD_ALWAYS_INLINE static double run(double* lanes) noexcept {
    if constexpr (bytes == 64) {
      using Doubles = extend::Vec<double, 64>;
      const Doubles eight = (Doubles::load(lanes) + Doubles::load(lanes + 16)) +
                            (Doubles::load(lanes + 8) + Doubles::load(lanes + 24));
      const extend::Vec<double, 32> four = lower_half(eight) + upper_half(eight);
      return (four.raw[0] + four.raw[2]) + (four.raw[1] + four.raw[3]);
    } else {
      return join_lanes_body(lanes);
    }
  }
};

[[nodiscard]] inline DistanceSteps::Widen of_type(ElementType type, DistanceSteps::Widen f32,
                                                  DistanceSteps::Widen f16,
                                                  DistanceSteps::Widen bf16) noexcept {
  return type == ElementType::f32    ? f32
         : type == ElementType::f16  ? f16
         : type == ElementType::bf16 ? bf16
                                     : nullptr;
}

#endif  // KVMELD_X86_DISPATCH

/// The steps of one instruction set, raw ones for rows of `type`.
[[nodiscard]] inline DistanceSteps distance_steps([[maybe_unused]] Isa isa,
                                                  [[maybe_unused]] ElementType type) noexcept {
#if KVMELD_X86_DISPATCH
  using extend::Kernel;
  constexpr ElementType f32 = ElementType::f32, f16 = ElementType::f16, bf16 = ElementType::bf16;
  if (isa == Isa::avx512) {
    return {Kernel<WidenRow<64, f32>>::avx512,
            of_type(type, Kernel<WidenRow<64, f32>>::avx512, Kernel<WidenRow<64, f16>>::avx512,
                    Kernel<WidenRow<64, bf16>>::avx512),
            Kernel<AddSquares<64>>::avx512, Kernel<JoinLanes<64>>::avx512};
  }
  if (isa == Isa::avx2) {
    return {Kernel<WidenRow<32, f32>>::avx2,
            of_type(type, Kernel<WidenRow<32, f32>>::avx2, Kernel<WidenRow<32, f16>>::avx2,
                    Kernel<WidenRow<32, bf16>>::avx2),
            Kernel<AddSquares<32>>::avx2, Kernel<JoinLanes<32>>::avx2};
  }
#endif
  return {widen_baseline, nullptr, add_squares_baseline, join_lanes_baseline};
}

}  // namespace detail

KVMELD_NAMESPACE_END
