#pragma once

/// Inner loops of attention on hosts: q · k by the 32-lane rule, softmax of a block, weighted sums of value rows. The same bytes in
/// every instruction set (docs/numerics.md).

#include <cstddef>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/math.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Tokens whose weights are made together. Sums within a block are f32, sums of blocks f64, so it is part of the result.
inline constexpr std::size_t attended_block = 64;
/// Value rows that are added in one go: an accumulator is loaded and stored once for so many.
inline constexpr std::size_t added_rows = 4;

/// One instruction set's loops. Rows have `n` floats, a multiple of 32; queries and accumulators follow each other n apart.
struct AttentionSteps {
  /// out[q · stride] = queries[q] · key
  void (*dots)(const float* queries, std::size_t count, const float* key, std::size_t n, float* out, std::size_t stride) noexcept;
  /// weights[i] = e^(dots[i] · factor − top) for one block; returns their sum in eight strands.
  double (*weigh)(const float* dots, double factor, double top, float* weights) noexcept;
  /// acc[q] += weights[q · stride + j] · rows[j], j < added_rows in order
  void (*add)(const float* weights, std::size_t stride, std::size_t count, const float* const* rows, std::size_t n, float* acc) noexcept;
  /// total[i] = total[i] · scale + block[i]; block[i] = 0
  void (*carry)(float* block, double scale, std::size_t n, double* total) noexcept;
};

KVMELD_ALWAYS_INLINE double weigh_body(const float* __restrict dots, double factor, double top, float* __restrict weights) noexcept {
  double sums[8] = {};
  for (std::size_t i = 0; i < attended_block; i += 8) {
    double mass[8];
    KVMELD_KEEP_LOOP
    for (std::size_t j = 0; j < 8; ++j) mass[j] = math::exp(fma(static_cast<double>(dots[i + j]), factor, -top));
    for (std::size_t j = 0; j < 8; ++j) {
      weights[i + j] = static_cast<float>(mass[j]);
      sums[j] += static_cast<double>(weights[i + j]);
    }
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}
KVMELD_ALWAYS_INLINE void carry_body(float* __restrict block, double scale, std::size_t n, double* __restrict total) noexcept {
  for (std::size_t at = 0; at < n; at += 32) {
    for (std::size_t c = at; c < at + 32; ++c) total[c] = fma(total[c], scale, static_cast<double>(block[c]));
    for (std::size_t c = at; c < at + 32; ++c) block[c] = 0.0F;
  }
}

KVMELD_NOINLINE inline double weigh_baseline(const float* dots, double factor, double top, float* weights) noexcept {
  return weigh_body(dots, factor, top, weights);
}
KVMELD_NOINLINE inline void carry_baseline(float* block, double scale, std::size_t n, double* total) noexcept { carry_body(block, scale, n, total); }
KVMELD_NOINLINE inline void dots_baseline(const float* queries, std::size_t count, const float* key, std::size_t n, float* out, std::size_t stride) noexcept {
  for (std::size_t q = 0; q < count; ++q, queries += n) {
    float lanes[32] = {};
    for (std::size_t at = 0; at < n; at += 32) {
      for (std::size_t l = 0; l < 32; ++l) lanes[l] = fma(queries[at + l], key[at + l], lanes[l]);
    }
    for (std::size_t half = 16; half > 0; half /= 2) {
      for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    out[q * stride] = lanes[0];
  }
}
KVMELD_NOINLINE inline void add_baseline(const float* weights, std::size_t stride, std::size_t count, const float* const* rows, std::size_t n,
                                         float* acc) noexcept {
  for (std::size_t q = 0; q < count; ++q, acc += n) {
    for (std::size_t j = 0; j < added_rows; ++j) {
      const float w = weights[q * stride + j];
      for (std::size_t c = 0; c < n; ++c) acc[c] = fma(w, rows[j][c], acc[c]);
    }
  }
}

#if KVMELD_X86_DISPATCH

KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline double weigh_avx2(const float* dots, double factor, double top, float* weights) noexcept {
  return weigh_body(dots, factor, top, weights);
}
KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline double weigh_avx512(const float* dots, double factor, double top, float* weights) noexcept {
  return weigh_body(dots, factor, top, weights);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void carry_avx2(float* block, double scale, std::size_t n, double* total) noexcept {
  carry_body(block, scale, n, total);
}

/// The levels 4, 2, 1 of the tree over eight lanes.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE float join_eight(FloatLanes s) noexcept {
  s = s + __builtin_shufflevector(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
  s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5);
  s = s + __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6);
  return s[0];
}

KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void dots_avx2(const float* queries, std::size_t count, const float* key, std::size_t n, float* out,
                                                         std::size_t stride) noexcept {
  std::size_t q = 0;
  for (; q + 2 <= count; q += 2, queries += 2 * n) {  // two queries share each load of the key
    FloatLanes a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
    for (std::size_t at = 0; at < n; at += 32) {
      const float* const a = queries + at;
      const float* const b = a + n;
      FloatLanes k = load_lanes(key + at);
      a0 = fma_lanes(load_lanes(a), k, a0);
      b0 = fma_lanes(load_lanes(b), k, b0);
      k = load_lanes(key + at + 8);
      a1 = fma_lanes(load_lanes(a + 8), k, a1);
      b1 = fma_lanes(load_lanes(b + 8), k, b1);
      k = load_lanes(key + at + 16);
      a2 = fma_lanes(load_lanes(a + 16), k, a2);
      b2 = fma_lanes(load_lanes(b + 16), k, b2);
      k = load_lanes(key + at + 24);
      a3 = fma_lanes(load_lanes(a + 24), k, a3);
      b3 = fma_lanes(load_lanes(b + 24), k, b3);
    }
    out[q * stride] = join_eight((a0 + a2) + (a1 + a3));
    out[(q + 1) * stride] = join_eight((b0 + b2) + (b1 + b3));
  }
  for (; q < count; ++q, queries += n) {
    FloatLanes a0{}, a1{}, a2{}, a3{};
    for (std::size_t at = 0; at < n; at += 32) {
      a0 = fma_lanes(load_lanes(queries + at), load_lanes(key + at), a0);
      a1 = fma_lanes(load_lanes(queries + at + 8), load_lanes(key + at + 8), a1);
      a2 = fma_lanes(load_lanes(queries + at + 16), load_lanes(key + at + 16), a2);
      a3 = fma_lanes(load_lanes(queries + at + 24), load_lanes(key + at + 24), a3);
    }
    out[q * stride] = join_eight((a0 + a2) + (a1 + a3));
  }
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void add_avx2(const float* weights, std::size_t stride, std::size_t count, const float* const* rows,
                                                        std::size_t n, float* acc) noexcept {
  const float* const r0 = rows[0];
  const float* const r1 = rows[1];
  const float* const r2 = rows[2];
  const float* const r3 = rows[3];
  for (std::size_t q = 0; q < count; ++q, acc += n) {
    const float* const w = weights + q * stride;
    const FloatLanes w0 = FloatLanes{} + w[0], w1 = FloatLanes{} + w[1], w2 = FloatLanes{} + w[2], w3 = FloatLanes{} + w[3];
    for (std::size_t c = 0; c < n; c += 8) {
      FloatLanes s = load_lanes(acc + c);
      s = fma_lanes(w0, load_lanes(r0 + c), s);
      s = fma_lanes(w1, load_lanes(r1 + c), s);
      s = fma_lanes(w2, load_lanes(r2 + c), s);
      s = fma_lanes(w3, load_lanes(r3 + c), s);
      store_lanes(s, acc + c);
    }
  }
}

[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats fma_wide(WideFloats a, WideFloats b, WideFloats c) noexcept {
  constexpr int current_rounding = 4;
  return __builtin_ia32_vfmaddps512_mask(a, b, c, Avx512Lanes32<ElementType::f16>::all_loaded, current_rounding);
}
/// The levels 8, 4, 2, 1 of the tree over sixteen lanes.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE float join_sixteen(WideFloats s) noexcept {
  return join_eight(__builtin_shufflevector(s, s, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(s, s, 8, 9, 10, 11, 12, 13, 14, 15));
}
KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline void dots_avx512(const float* queries, std::size_t count, const float* key, std::size_t n, float* out,
                                                             std::size_t stride) noexcept {
  std::size_t q = 0;
  for (; q + 4 <= count; q += 4, queries += 4 * n) {  // four queries share the loads of the key, and the shuffles of the tree
    WideFloats a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
    for (std::size_t at = 0; at < n; at += 32) {
      const float* const a = queries + at;
      const WideFloats k0 = load_wide(key + at), k1 = load_wide(key + at + 16);
      a0 = fma_wide(load_wide(a), k0, a0);
      a1 = fma_wide(load_wide(a + 16), k1, a1);
      b0 = fma_wide(load_wide(a + n), k0, b0);
      b1 = fma_wide(load_wide(a + n + 16), k1, b1);
      c0 = fma_wide(load_wide(a + 2 * n), k0, c0);
      c1 = fma_wide(load_wide(a + 2 * n + 16), k1, c1);
      d0 = fma_wide(load_wide(a + 3 * n), k0, d0);
      d1 = fma_wide(load_wide(a + 3 * n + 16), k1, d1);
    }
    a0 = a0 + a1;
    b0 = b0 + b1;
    c0 = c0 + c1;
    d0 = d0 + d1;
    const WideFloats ab = __builtin_shufflevector(a0, b0, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                          __builtin_shufflevector(a0, b0, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const WideFloats cd = __builtin_shufflevector(c0, d0, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                          __builtin_shufflevector(c0, d0, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    WideFloats s = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                   __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    s = s + __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    out[q * stride] = s[0];
    out[(q + 1) * stride] = s[4];
    out[(q + 2) * stride] = s[8];
    out[(q + 3) * stride] = s[12];
  }
  for (; q < count; ++q, queries += n) {
    WideFloats a0{}, a1{};
    for (std::size_t at = 0; at < n; at += 32) {
      a0 = fma_wide(load_wide(queries + at), load_wide(key + at), a0);
      a1 = fma_wide(load_wide(queries + at + 16), load_wide(key + at + 16), a1);
    }
    out[q * stride] = join_sixteen(a0 + a1);
  }
}
KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline void add_avx512(const float* weights, std::size_t stride, std::size_t count, const float* const* rows,
                                                            std::size_t n, float* acc) noexcept {
  const float* const r0 = rows[0];
  const float* const r1 = rows[1];
  const float* const r2 = rows[2];
  const float* const r3 = rows[3];
  for (std::size_t q = 0; q < count; ++q, acc += n) {
    const float* const w = weights + q * stride;
    const WideFloats w0 = WideFloats{} + w[0], w1 = WideFloats{} + w[1], w2 = WideFloats{} + w[2], w3 = WideFloats{} + w[3];
    for (std::size_t c = 0; c < n; c += 16) {
      WideFloats s = load_wide(acc + c);
      s = fma_wide(w0, load_wide(r0 + c), s);
      s = fma_wide(w1, load_wide(r1 + c), s);
      s = fma_wide(w2, load_wide(r2 + c), s);
      s = fma_wide(w3, load_wide(r3 + c), s);
      store_wide(s, acc + c);
    }
  }
}

#endif  // KVMELD_X86_DISPATCH

[[nodiscard]] inline AttentionSteps attention_steps([[maybe_unused]] Isa isa) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512) return {dots_avx512, weigh_avx512, add_avx512, carry_avx2};
  if (isa == Isa::avx2) return {dots_avx2, weigh_avx2, add_avx2, carry_avx2};
#endif
  return {dots_baseline, weigh_baseline, add_baseline, carry_baseline};
}

}  // namespace detail
KVMELD_NAMESPACE_END
