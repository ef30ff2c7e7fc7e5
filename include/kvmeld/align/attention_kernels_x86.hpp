#pragma once

/// The loops of `AttentionSteps` in AVX2 and AVX-512.

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
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void dots_avx2(const float* queries, std::size_t count, const std::byte* const* keys, std::size_t keys_count,
                                                  std::ptrdiff_t offset, std::size_t n, float* out, std::size_t stride) noexcept {
  using Lanes = Lanes8<type>;
  constexpr std::ptrdiff_t step = 8 * block_bytes(type);
  for (std::size_t k = 0; k < keys_count; ++k) {
    const float* query = queries;
    std::size_t q = 0;
    for (; q + 2 <= count; q += 2, query += 2 * n) {  // two queries share each load of the key
      const std::byte* key = keys[k] + offset;
      FloatLanes a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
      for (std::size_t at = 0; at < n; at += 32, key += 4 * step) {
        const float* const a = query + at;
        const float* const b = a + n;
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
    const std::byte* key = keys[k] + offset;
    FloatLanes a0{}, a1{}, a2{}, a3{};
    for (std::size_t at = 0; at < n; at += 32, key += 4 * step) {
      a0 = fma_lanes(load_lanes(query + at), Lanes::load(key), a0);
      a1 = fma_lanes(load_lanes(query + at + 8), Lanes::load(key + step), a1);
      a2 = fma_lanes(load_lanes(query + at + 16), Lanes::load(key + 2 * step), a2);
      a3 = fma_lanes(load_lanes(query + at + 24), Lanes::load(key + 3 * step), a3);
    }
    out[q * stride + k] = join_eight((a0 + a2) + (a1 + a3));
  }
}
template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void add_avx2(const float* weights, std::size_t stride, std::size_t count, const std::byte* const* rows,
                                                 std::ptrdiff_t offset, std::size_t n, float* acc) noexcept {
  using Lanes = Lanes8<type>;
  constexpr std::ptrdiff_t size = block_bytes(type);
  for (std::size_t q = 0; q < count; ++q, acc += n) {
    const std::byte* r0 = rows[0] + offset;
    const std::byte* r1 = rows[1] + offset;
    const std::byte* r2 = rows[2] + offset;
    const std::byte* r3 = rows[3] + offset;
    const float* const w = weights + q * stride;
    const FloatLanes w0 = FloatLanes{} + w[0], w1 = FloatLanes{} + w[1], w2 = FloatLanes{} + w[2], w3 = FloatLanes{} + w[3];
    for (std::size_t c = 0; c < n; c += 8, r0 += 8 * size, r1 += 8 * size, r2 += 8 * size, r3 += 8 * size) {
      FloatLanes s = load_lanes(acc + c);
      s = fma_lanes(w0, Lanes::load(r0), s);
      s = fma_lanes(w1, Lanes::load(r1), s);
      s = fma_lanes(w2, Lanes::load(r2), s);
      s = fma_lanes(w3, Lanes::load(r3), s);
      store_lanes(s, acc + c);
    }
  }
}

/// How far ahead of each of four rows the next four lie, where rows follow each other in memory: what is asked for early.
[[nodiscard]] KVMELD_ALWAYS_INLINE std::uintptr_t four_rows(const std::byte* row, const std::byte* next) noexcept {
  return 4 * (reinterpret_cast<std::uintptr_t>(next) - reinterpret_cast<std::uintptr_t>(row));
}
KVMELD_ALWAYS_INLINE void ask_for(const std::byte* row, std::uintptr_t ahead) noexcept {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(row) + ahead));
}
/// The tree over 32 lanes of four sums at once, which then lie at 0, 4, 8 and 12.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats join_four(WideFloats a, WideFloats b, WideFloats c, WideFloats d) noexcept {
  const WideFloats ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                        __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const WideFloats cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                        __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  WideFloats s = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                 __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return s + __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void dots_avx512(const float* queries, std::size_t count, const std::byte* const* keys, std::size_t keys_count,
                                                      std::ptrdiff_t offset, std::size_t n, float* out, std::size_t stride) noexcept {
  constexpr std::ptrdiff_t half = 16 * block_bytes(type);
  std::size_t q = 0;
  for (; q + 4 <= count; q += 4, queries += 4 * n) {  // four queries share the loads of a key, and the shuffles of the tree
    for (std::size_t k = 0; k < keys_count; ++k) {
      const std::byte* key = keys[k] + offset;
      WideFloats a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
      for (std::size_t at = 0; at < n; at += 32, key += 2 * half) {
        const float* const a = queries + at;
        const WideFloats k0 = load_sixteen<type>(key), k1 = load_sixteen<type>(key + half);
        a0 = fma_wide(load_wide(a), k0, a0);
        a1 = fma_wide(load_wide(a + 16), k1, a1);
        b0 = fma_wide(load_wide(a + n), k0, b0);
        b1 = fma_wide(load_wide(a + n + 16), k1, b1);
        c0 = fma_wide(load_wide(a + 2 * n), k0, c0);
        c1 = fma_wide(load_wide(a + 2 * n + 16), k1, c1);
        d0 = fma_wide(load_wide(a + 3 * n), k0, d0);
        d1 = fma_wide(load_wide(a + 3 * n + 16), k1, d1);
      }
      const WideFloats s = join_four(a0 + a1, b0 + b1, c0 + c1, d0 + d1);
      out[q * stride + k] = s[0];
      out[(q + 1) * stride + k] = s[4];
      out[(q + 2) * stride + k] = s[8];
      out[(q + 3) * stride + k] = s[12];
    }
  }
  for (; q < count; ++q, queries += n) {  // four keys share the loads of a query
    for (std::size_t k = 0; k < keys_count; k += 4) {
      const std::size_t left = keys_count - k < 4 ? keys_count - k : 4;
      const std::byte* a = keys[k] + offset;
      const std::byte* b = keys[left > 1 ? k + 1 : k] + offset;
      const std::byte* c = keys[left > 2 ? k + 2 : k] + offset;
      const std::byte* d = keys[left > 3 ? k + 3 : k] + offset;
      const std::uintptr_t ahead = four_rows(a, b);
      WideFloats a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
      for (std::size_t at = 0; at < n; at += 32, a += 2 * half, b += 2 * half, c += 2 * half, d += 2 * half) {
        const WideFloats q0 = load_wide(queries + at), q1 = load_wide(queries + at + 16);
        ask_for(a, ahead);
        ask_for(b, ahead);
        ask_for(c, ahead);
        ask_for(d, ahead);
        a0 = fma_wide(q0, load_sixteen<type>(a), a0);
        a1 = fma_wide(q1, load_sixteen<type>(a + half), a1);
        b0 = fma_wide(q0, load_sixteen<type>(b), b0);
        b1 = fma_wide(q1, load_sixteen<type>(b + half), b1);
        c0 = fma_wide(q0, load_sixteen<type>(c), c0);
        c1 = fma_wide(q1, load_sixteen<type>(c + half), c1);
        d0 = fma_wide(q0, load_sixteen<type>(d), d0);
        d1 = fma_wide(q1, load_sixteen<type>(d + half), d1);
      }
      const WideFloats s = join_four(a0 + a1, b0 + b1, c0 + c1, d0 + d1);
      const float sums[] = {s[0], s[4], s[8], s[12]};
      for (std::size_t i = 0; i < left; ++i) out[q * stride + k + i] = sums[i];
    }
  }
}
template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void add_avx512(const float* weights, std::size_t stride, std::size_t count, const std::byte* const* rows,
                                                     std::ptrdiff_t offset, std::size_t n, float* acc) noexcept {
  constexpr std::ptrdiff_t step = 16 * block_bytes(type);
  for (std::size_t q = 0; q < count; ++q, acc += n) {
    const std::byte* r0 = rows[0] + offset;
    const std::byte* r1 = rows[1] + offset;
    const std::byte* r2 = rows[2] + offset;
    const std::byte* r3 = rows[3] + offset;
    const std::uintptr_t ahead = four_rows(r0, r1);
    const float* const w = weights + q * stride;
    const WideFloats w0 = WideFloats{} + w[0], w1 = WideFloats{} + w[1], w2 = WideFloats{} + w[2], w3 = WideFloats{} + w[3];
    for (std::size_t c = 0; c < n; c += 16, r0 += step, r1 += step, r2 += step, r3 += step) {
      WideFloats s = load_wide(acc + c);
      if (q == 0) {
        ask_for(r0, ahead);
        ask_for(r1, ahead);
        ask_for(r2, ahead);
        ask_for(r3, ahead);
      }
      s = fma_wide(w0, load_sixteen<type>(r0), s);
      s = fma_wide(w1, load_sixteen<type>(r1), s);
      s = fma_wide(w2, load_sixteen<type>(r2), s);
      s = fma_wide(w3, load_sixteen<type>(r3), s);
      store_wide(s, acc + c);
    }
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
