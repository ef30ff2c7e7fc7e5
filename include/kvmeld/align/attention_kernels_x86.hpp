#pragma once

/// The loops of `AttentionSteps` in AVX2, and those of a softmax in AVX-512.

#include <cstddef>
#include <cstdint>

#include <kvmeld/align/attention_kernels.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fuse/wide_lanes.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

#if KVMELD_X86_DISPATCH

KVMELD_NAMESPACE_BEGIN
namespace detail {

// The expressions of `weight_exp`, which compilers spread over registers they do not have.
#define KVMELD_WEIGH(NAME, TARGET, BYTES, FMA, WIDEN, NARROW)                                                                        \
  TARGET KVMELD_NOINLINE inline double NAME(const float* dots, double factor, double top, float* weights) noexcept {                 \
    using Doubles = vector_t<double, BYTES>;                                                                                         \
    using Words = vector_t<unsigned long long, BYTES>;                                                                               \
    using Floats = vector_t<float, BYTES / 2>;                                                                                       \
    const Doubles by = Doubles{} + factor, from = Doubles{} - top, magic = Doubles{} + integer_magic;                                \
    const Doubles least = Doubles{} - 104.0, one = Doubles{} + 1.0;                                                                  \
    alignas(64) double sums[8];                                                                                                      \
    for (std::size_t l = 0; l < 8; l += BYTES / 8) {                                                                                 \
      Doubles sum{};                                                                                                                 \
      for (std::size_t i = l; i < attended_block; i += 8) {                                                                          \
        const Floats dot = *reinterpret_cast<const unaligned_vector_t<float, BYTES / 2>*>(dots + i);                                 \
        const Doubles x = FMA(WIDEN(dot), by, from);                                                                                 \
        const Doubles bounded = x < least ? least : x;                                                                               \
        const Doubles k = FMA(bounded, Doubles{} + 0x1.71547652b82fep+0, magic);                                                     \
        const Doubles r = FMA(magic - k, Doubles{} + 0x1.62e42fefa39efp-1, bounded);                                                 \
        Doubles p = FMA(Doubles{} + 0x1.a15179d80ae96p-13, r, Doubles{} + 0x1.6d7543e4127b8p-10);                                    \
        p = FMA(p, r, Doubles{} + 0x1.1110c632a3088p-7);                                                                             \
        p = FMA(p, r, Doubles{} + 0x1.5554accfdb593p-5);                                                                             \
        p = FMA(p, r, Doubles{} + 0x1.55555567532adp-3);                                                                             \
        p = FMA(p, r, Doubles{} + 0x1.000000287f871p-1);                                                                             \
        p = FMA(p, r, one);                                                                                                          \
        p = FMA(p, r, one);                                                                                                          \
        p = reinterpret_cast<Doubles>(reinterpret_cast<Words>(p) + (reinterpret_cast<Words>(k) << 52));                              \
        p = x < least ? Doubles{} : p;                                                                                               \
        p = x == x ? p : x;                                                                                                          \
        const Floats w = NARROW(p);                                                                                                  \
        *reinterpret_cast<unaligned_vector_t<float, BYTES / 2>*>(weights + i) = w;                                                   \
        sum = sum + WIDEN(w);                                                                                                        \
      }                                                                                                                              \
      *reinterpret_cast<Doubles*>(sums + l) = sum;                                                                                   \
    }                                                                                                                                \
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));                                \
  }
#define KVMELD_FMA_256(a, b, c) __builtin_ia32_vfmaddpd256(a, b, c)
#define KVMELD_FMA_512(a, b, c) __builtin_ia32_vfmaddpd512_mask(a, b, c, 0xff, 4)
#define KVMELD_WIDEN_256(x) __builtin_convertvector(x, Doubles)
#define KVMELD_NARROW_256(x) __builtin_convertvector(x, Floats)
KVMELD_WEIGH(weigh_avx2, KVMELD_TARGET_AVX2, 32, KVMELD_FMA_256, KVMELD_WIDEN_256, KVMELD_NARROW_256)
KVMELD_WEIGH(weigh_avx512, KVMELD_TARGET_AVX512, 64, KVMELD_FMA_512, widen_lanes, narrow_lanes)
#undef KVMELD_WIDEN_256
#undef KVMELD_NARROW_256
#undef KVMELD_FMA_256
#undef KVMELD_FMA_512
#undef KVMELD_WEIGH

KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline float largest_avx2(const float* dots) noexcept { return largest_body(dots); }
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void finish_avx2(const double* total, double sum, std::size_t n, float* out) noexcept {
  finish_body(total, sum, n, out);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void carry_avx2(float* block, double scale, std::size_t n, double* total) noexcept {
  carry_body(block, scale, n, total);
}

KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline void carry_avx512(float* block, double scale, std::size_t n, double* total) noexcept {
  using Doubles = vector_t<double, 64>;
  constexpr int current_rounding = 4;
  const Doubles by = Doubles{} + scale;
  for (std::size_t c = 0; c < n; c += 8) {
    auto* const sum = reinterpret_cast<unaligned_vector_t<double, 64>*>(total + c);
    *sum = __builtin_ia32_vfmaddpd512_mask(*sum, by, widen_lanes(load_lanes(block + c)), 0xff, current_rounding);
    store_lanes(FloatLanes{}, block + c);
  }
}

/// The levels 4, 2, 1 of the tree over eight lanes.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE float join_eight(FloatLanes s) noexcept {
  s = s + __builtin_shufflevector(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
  s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5);
  s = s + __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6);
  return s[0];
}

template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void widen_parts_avx2(const RowParts& rows, float* out) noexcept {
  for (std::size_t r = 0; r < rows.count; ++r, out += rows.n) {
    const std::byte* const in = rows.rows[r] + rows.offset;
    for (std::size_t c = 0; c < rows.n; c += 8) {
      const std::byte* const at = in + static_cast<std::ptrdiff_t>(c) * block_bytes(type);
      if (c % 32 == 0) ask_for(at, rows.ahead);
      store_lanes(Lanes8<type>::load(at), out + c);
    }
  }
}
template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void dots_avx2(const float* queries, std::size_t count, const RowParts& keys, float* out, std::size_t stride) noexcept {
  using Lanes = Lanes8<type>;
  constexpr std::ptrdiff_t step = 8 * block_bytes(type);
  const std::size_t n = keys.n;
  for (std::size_t k = 0; k < keys.count; ++k) {
    const float* query = queries;
    std::size_t q = 0;
    for (; q + 2 <= count; q += 2, query += 2 * n) {  // two queries share each load of the key
      const std::byte* key = keys.rows[k] + keys.offset;
      FloatLanes a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
      for (std::size_t at = 0; at < n; at += 32, key += 4 * step) {
        const float* const a = query + at;
        const float* const b = a + n;
        if (q == 0) ask_for(key, keys.ahead);
        FloatLanes x = Lanes::load(key);
        a0 = fma_lanes(load_lanes(a), x, a0);
        b0 = fma_lanes(load_lanes(b), x, b0);
        x = Lanes::load(key + step);
        a1 = fma_lanes(load_lanes(a + 8), x, a1);
        b1 = fma_lanes(load_lanes(b + 8), x, b1);
        x = Lanes::load(key + 2 * step);
        a2 = fma_lanes(load_lanes(a + 16), x, a2);
        b2 = fma_lanes(load_lanes(b + 16), x, b2);
        x = Lanes::load(key + 3 * step);
        a3 = fma_lanes(load_lanes(a + 24), x, a3);
        b3 = fma_lanes(load_lanes(b + 24), x, b3);
      }
      out[q * stride + k] = join_eight((a0 + a2) + (a1 + a3));
      out[(q + 1) * stride + k] = join_eight((b0 + b2) + (b1 + b3));
    }
    if (q == count) continue;
    const std::byte* key = keys.rows[k] + keys.offset;
    FloatLanes a0{}, a1{}, a2{}, a3{};
    for (std::size_t at = 0; at < n; at += 32, key += 4 * step) {
      ask_for(key, keys.ahead);
      a0 = fma_lanes(load_lanes(query + at), Lanes::load(key), a0);
      a1 = fma_lanes(load_lanes(query + at + 8), Lanes::load(key + step), a1);
      a2 = fma_lanes(load_lanes(query + at + 16), Lanes::load(key + 2 * step), a2);
      a3 = fma_lanes(load_lanes(query + at + 24), Lanes::load(key + 3 * step), a3);
    }
    out[q * stride + k] = join_eight((a0 + a2) + (a1 + a3));
  }
}
template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void add_avx2(const float* weights, std::size_t stride, std::size_t count, const RowParts& rows, float* acc) noexcept {
  using Lanes = Lanes8<type>;
  constexpr std::ptrdiff_t size = block_bytes(type);
  for (std::size_t q = 0; q < count; ++q, acc += rows.n, weights += stride) {
    for (std::size_t j = 0; j < rows.count; j += added_rows) {
      const std::byte* r0 = rows.rows[j] + rows.offset;
      const std::byte* r1 = rows.rows[j + 1] + rows.offset;
      const std::byte* r2 = rows.rows[j + 2] + rows.offset;
      const std::byte* r3 = rows.rows[j + 3] + rows.offset;
      const float* const w = weights + j;
      const FloatLanes w0 = w[0] - FloatLanes{}, w1 = w[1] - FloatLanes{}, w2 = w[2] - FloatLanes{}, w3 = w[3] - FloatLanes{};
      for (std::size_t c = 0; c < rows.n; c += 8, r0 += 8 * size, r1 += 8 * size, r2 += 8 * size, r3 += 8 * size) {
        if (q == 0 && c % 32 == 0) {
          ask_for(r0, rows.ahead);
          ask_for(r1, rows.ahead);
          ask_for(r2, rows.ahead);
          ask_for(r3, rows.ahead);
        }
        FloatLanes s = load_lanes(acc + c);
        s = fma_lanes(w0, Lanes::load(r0), s);
        s = fma_lanes(w1, Lanes::load(r1), s);
        s = fma_lanes(w2, Lanes::load(r2), s);
        s = fma_lanes(w3, Lanes::load(r3), s);
        store_lanes(s, acc + c);
      }
    }
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
