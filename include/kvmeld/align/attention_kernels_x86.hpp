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
#define KVMELD_WEIGH(NAME, TARGET, BYTES, FMA, WIDEN, NARROW)                                     \
  TARGET KVMELD_NOINLINE inline double NAME(const float* dots, double factor, double top,         \
                                            float* weights) noexcept {                            \
    using Doubles = vector_t<double, BYTES>;                                                      \
    using Words = vector_t<unsigned long long, BYTES>;                                            \
    using Floats = vector_t<float, BYTES / 2>;                                                    \
    const Doubles by = Doubles{} + factor, from = Doubles{} - top,                                \
                  magic = Doubles{} + integer_magic;                                              \
    const Doubles least = Doubles{} - 104.0, one = Doubles{} + 1.0;                               \
    alignas(64) double sums[8];                                                                   \
    for (std::size_t l = 0; l < 8; l += BYTES / 8) {                                              \
      Doubles sum{};                                                                              \
      for (std::size_t i = l; i < attended_block; i += 8) {                                       \
        const Floats dot =                                                                        \
            *reinterpret_cast<const unaligned_vector_t<float, BYTES / 2>*>(dots + i);             \
        const Doubles x = FMA(WIDEN(dot), by, from);                                              \
        const Doubles bounded = x < least ? least : x;                                            \
        const Doubles k = FMA(bounded, Doubles{} + 0x1.71547652b82fep+0, magic);                  \
        const Doubles r = FMA(magic - k, Doubles{} + 0x1.62e42fefa39efp-1, bounded);              \
        Doubles p = FMA(Doubles{} + 0x1.a15179d80ae96p-13, r, Doubles{} + 0x1.6d7543e4127b8p-10); \
        p = FMA(p, r, Doubles{} + 0x1.1110c632a3088p-7);                                          \
        p = FMA(p, r, Doubles{} + 0x1.5554accfdb593p-5);                                          \
        p = FMA(p, r, Doubles{} + 0x1.55555567532adp-3);                                          \
        p = FMA(p, r, Doubles{} + 0x1.000000287f871p-1);                                          \
        p = FMA(p, r, one);                                                                       \
        p = FMA(p, r, one);                                                                       \
        p = reinterpret_cast<Doubles>(reinterpret_cast<Words>(p) +                                \
                                      (reinterpret_cast<Words>(k) << 52));                        \
        p = x < least ? Doubles{} : p;                                                            \
        p = x == x ? p : x;                                                                       \
        const Floats w = NARROW(p);                                                               \
        *reinterpret_cast<unaligned_vector_t<float, BYTES / 2>*>(weights + i) = w;                \
        sum = sum + WIDEN(w);                                                                     \
      }                                                                                           \
      *reinterpret_cast<Doubles*>(sums + l) = sum;                                                \
    }                                                                                             \
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) +                                          \
           ((sums[1] + sums[5]) + (sums[3] + sums[7]));                                           \
  }
#define KVMELD_FMA_256(a, b, c) __builtin_ia32_vfmaddpd256(a, b, c)
#define KVMELD_FMA_512(a, b, c) __builtin_ia32_vfmaddpd512_mask(a, b, c, 0xff, 4)
#define KVMELD_WIDEN_256(x) __builtin_convertvector(x, Doubles)
#define KVMELD_NARROW_256(x) __builtin_convertvector(x, Floats)
KVMELD_WEIGH(weigh_avx2, KVMELD_TARGET_AVX2, 32, KVMELD_FMA_256, KVMELD_WIDEN_256,
             KVMELD_NARROW_256)
KVMELD_WEIGH(weigh_avx512, KVMELD_TARGET_AVX512, 64, KVMELD_FMA_512, widen_lanes, narrow_lanes)
#undef KVMELD_WIDEN_256
#undef KVMELD_NARROW_256
#undef KVMELD_FMA_256
#undef KVMELD_FMA_512
#undef KVMELD_WEIGH

KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline float largest_avx2(const float* dots) noexcept {
  return largest_body(dots);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void finish_avx2(const double* total, double sum,
                                                           std::size_t n, float* out) noexcept {
  finish_body(total, sum, n, out);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void carry_avx2(float* block, double scale, std::size_t n,
                                                          double* total) noexcept {
  carry_body(block, scale, n, total);
}

KVMELD_TARGET_AVX512 KVMELD_NOINLINE inline void carry_avx512(float* block, double scale,
                                                              std::size_t n,
                                                              double* total) noexcept {
  using Doubles = vector_t<double, 64>;
  constexpr int current_rounding = 4;
  const Doubles by = Doubles{} + scale;
  for (std::size_t c = 0; c < n; c += 8) {
    auto* const sum = reinterpret_cast<unaligned_vector_t<double, 64>*>(total + c);
    *sum = __builtin_ia32_vfmaddpd512_mask(*sum, by, widen_lanes(load_lanes(block + c)), 0xff,
                                           current_rounding);
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
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void widen_parts_avx2(const RowParts& rows,
                                                         float* out) noexcept {
  for (std::size_t r = 0; r < rows.count; ++r, out += rows.n) {
    const std::byte* const in = rows.rows[r] + rows.offset;
    for (std::size_t c = 0; c < rows.n; c += 8) {
      const std::byte* const at = in + static_cast<std::ptrdiff_t>(c) * block_bytes(type);
      if (c % 32 == 0) ask_for(at, rows.ahead);
      store_lanes(Lanes8<type>::load(at), out + c);
    }
  }
}
/// Eight elements that stay in a register: g++ would load f32 again for each use, and loads are
/// what these loops run out of.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes
take_eight(const std::byte* in) noexcept {
  FloatLanes x = Lanes8<type>::load(in);
  if constexpr (type == ElementType::f32) asm("" : "+x"(x));
  return x;
}

/// Eight of the 32 lanes of four queries by two keys, added to what `sums` holds or instead of it.
/// sums: (query, key)
template <ElementType type, bool adds>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void multiply_eight_lanes(const float* queries,
                                                                  const std::byte* x,
                                                                  const std::byte* y, std::size_t n,
                                                                  FloatLanes* sums) noexcept {
  constexpr std::ptrdiff_t block = 32 * block_bytes(type);
  FloatLanes xa{}, xb{}, xc{}, xd{}, ya{}, yb{}, yc{}, yd{};
  for (std::size_t at = 0; at < n; at += 32, x += block, y += block, queries += 32) {
    const FloatLanes k = take_eight<type>(x), l = take_eight<type>(y);
    FloatLanes q = load_lanes(queries);
    asm("" : "+x"(q));
    xa = fma_lanes(q, k, xa);
    ya = fma_lanes(q, l, ya);
    q = load_lanes(queries + n);
    asm("" : "+x"(q));
    xb = fma_lanes(q, k, xb);
    yb = fma_lanes(q, l, yb);
    q = load_lanes(queries + 2 * n);
    asm("" : "+x"(q));
    xc = fma_lanes(q, k, xc);
    yc = fma_lanes(q, l, yc);
    q = load_lanes(queries + 3 * n);
    asm("" : "+x"(q));
    xd = fma_lanes(q, k, xd);
    yd = fma_lanes(q, l, yd);
  }
  sums[0] = adds ? sums[0] + xa : xa;
  sums[1] = adds ? sums[1] + ya : ya;
  sums[2] = adds ? sums[2] + xb : xb;
  sums[3] = adds ? sums[3] + yb : yb;
  sums[4] = adds ? sums[4] + xc : xc;
  sums[5] = adds ? sums[5] + yc : yc;
  sums[6] = adds ? sums[6] + xd : xd;
  sums[7] = adds ? sums[7] + yd : yd;
}

/// The tree over eight lanes for eight sums at once: a level adds halves of what is left of two
/// sums, which then share a vector. Level 4: the lower half of the result is a's, the upper b's.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes join_fours(FloatLanes a,
                                                                            FloatLanes b) noexcept {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
/// Level 2, in each half: two lanes of x, then two of y.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes join_twos(FloatLanes x,
                                                                           FloatLanes y) noexcept {
  return __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13) +
         __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
}
/// Level 1, in each half: a lane of each of four.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes join_ones(FloatLanes x,
                                                                           FloatLanes y) noexcept {
  return __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
}

/// Dots of four queries with two keys: lanes 0 to 3 are those of x.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes multiply_four_by_two_avx2(
    const float* queries, const std::byte* x, const std::byte* y, std::size_t n) noexcept {
  constexpr std::ptrdiff_t step = 8 * block_bytes(type);
  alignas(32) FloatLanes even[8], odd[8];
  multiply_eight_lanes<type, false>(queries, x, y, n, even);
  multiply_eight_lanes<type, true>(queries + 16, x + 2 * step, y + 2 * step, n, even);
  multiply_eight_lanes<type, false>(queries + 8, x + step, y + step, n, odd);
  multiply_eight_lanes<type, true>(queries + 24, x + 3 * step, y + 3 * step, n, odd);
  const FloatLanes a = join_fours(even[0] + odd[0], even[1] + odd[1]),
                   b = join_fours(even[2] + odd[2], even[3] + odd[3]);
  const FloatLanes c = join_fours(even[4] + odd[4], even[5] + odd[5]),
                   d = join_fours(even[6] + odd[6], even[7] + odd[7]);
  return join_ones(join_twos(a, b), join_twos(c, d));
}

/// Sixteen floats in the order of `Lanes16`: as they lie, or the even ones and the odd ones.
template <bool even_odd>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void load_sixteen_floats(const float* in, FloatLanes& first,
                                                                 FloatLanes& second) noexcept {
  const FloatLanes a = load_lanes(in), b = load_lanes(in + 8);
  first = even_odd ? __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) : a;
  second = even_odd ? __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15) : b;
}
template <bool even_odd>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void store_sixteen_floats(FloatLanes first,
                                                                  FloatLanes second,
                                                                  float* out) noexcept {
  store_lanes(even_odd ? __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11) : first,
              out);
  store_lanes(
      even_odd ? __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15) : second,
      out + 8);
}

/// The dot of one query and one key. @tparam orders  the query is brought into the order of
/// `Lanes16` on the way; else it is in it.
template <ElementType type, bool orders>
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE float multiply_one_avx2(
    const float* query, const std::byte* key, std::size_t n, std::ptrdiff_t ahead) noexcept {
  using Lanes = Lanes16<type>;
  constexpr std::ptrdiff_t half = 16 * block_bytes(type);
  FloatLanes a0{}, a1{}, a2{}, a3{}, x, x1, q, q1;
  for (std::size_t at = 0; at < n; at += 32, key += 2 * half) {
    ask_for(key, ahead);
    Lanes::load(key, x, x1);
    load_sixteen_floats<orders>(query + at, q, q1);
    a0 = fma_lanes(q, x, a0);
    a1 = fma_lanes(q1, x1, a1);
    Lanes::load(key + half, x, x1);
    load_sixteen_floats<orders>(query + at + 16, q, q1);
    a2 = fma_lanes(q, x, a2);
    a3 = fma_lanes(q1, x1, a3);
  }
  // Lanes of even channels are two apart: each half of the tree is one of eight lanes, and level 1
  // joins the two.
  if constexpr (Lanes::even_odd) return join_eight(a0 + a2) + join_eight(a1 + a3);
  return join_eight((a0 + a2) + (a1 + a3));
}

template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void dots_avx2(const float* queries, std::size_t count,
                                                  const RowParts& keys, float* out,
                                                  std::size_t stride) noexcept {
  constexpr std::size_t line = 64 / block_bytes(type);
  const std::size_t n = keys.n;
  std::size_t q = 0;
  for (; q + paired_queries <= count; q += paired_queries) {
    for (std::size_t k = 0; k < keys.count; k += 2) {
      const bool both = k + 1 < keys.count;
      const std::byte* const x = keys.rows[k] + keys.offset;
      const std::byte* const y = both ? keys.rows[k + 1] + keys.offset : x;
      for (std::size_t c = 0; q == 0 && keys.ahead != 0 && c < n; c += line) {
        ask_for(x + c * block_bytes(type), keys.ahead);
        ask_for(y + c * block_bytes(type), keys.ahead);
      }
      const FloatLanes s = multiply_four_by_two_avx2<type>(queries + q * n, x, y, n);
      float* const to = out + q * stride + k;
      for (std::size_t i = 0; i < 4; ++i) to[i * stride] = s[i];
      for (std::size_t i = 0; both && i < 4; ++i) to[i * stride + 1] = s[i + 4];
    }
  }
  for (; q < count; ++q) {
    const float* query = queries + q * n;
    const std::ptrdiff_t ahead = q == 0 ? keys.ahead : 0;
    if constexpr (Lanes16<type>::even_odd) {
      constexpr std::size_t most = 1024;
      alignas(32) float ordered[most];
      for (std::size_t c = 0; n <= most && c < n; c += 16) {
        FloatLanes even, odd;
        load_sixteen_floats<true>(query + c, even, odd);
        store_sixteen_floats<false>(even, odd, ordered + c);
      }
      for (std::size_t k = 0; k < keys.count; ++k) {
        const std::byte* const key = keys.rows[k] + keys.offset;
        out[q * stride + k] = n <= most ? multiply_one_avx2<type, false>(ordered, key, n, ahead)
                                        : multiply_one_avx2<type, true>(query, key, n, ahead);
      }
    } else {
      for (std::size_t k = 0; k < keys.count; ++k) {
        out[q * stride + k] =
            multiply_one_avx2<type, false>(query, keys.rows[k] + keys.offset, n, ahead);
      }
    }
  }
}

/// Adds all rows to the sums of four queries, 16 channels of which stay in registers.
template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void add_four_avx2(const float* weights, std::size_t stride,
                                                           const RowParts& rows,
                                                           float* acc) noexcept {
  constexpr std::ptrdiff_t step = 8 * block_bytes(type);
  const std::size_t n = rows.n;
  std::ptrdiff_t offset = rows.offset;
  for (std::size_t c = 0; c < n; c += 16, acc += 16, offset += 2 * step) {
    FloatLanes a = load_lanes(acc), b = load_lanes(acc + n), d = load_lanes(acc + 2 * n),
               e = load_lanes(acc + 3 * n);
    FloatLanes a1 = load_lanes(acc + 8), b1 = load_lanes(acc + n + 8);
    FloatLanes d1 = load_lanes(acc + 2 * n + 8), e1 = load_lanes(acc + 3 * n + 8);
    for (std::size_t j = 0; j < rows.count; ++j) {
      const std::byte* const row = rows.rows[j] + offset;
      const FloatLanes x = take_eight<type>(row), y = take_eight<type>(row + step);
      FloatLanes w = weights[j] - FloatLanes{};
      a = fma_lanes(w, x, a);
      a1 = fma_lanes(w, y, a1);
      w = weights[stride + j] - FloatLanes{};
      b = fma_lanes(w, x, b);
      b1 = fma_lanes(w, y, b1);
      w = weights[2 * stride + j] - FloatLanes{};
      d = fma_lanes(w, x, d);
      d1 = fma_lanes(w, y, d1);
      w = weights[3 * stride + j] - FloatLanes{};
      e = fma_lanes(w, x, e);
      e1 = fma_lanes(w, y, e1);
    }
    store_lanes(a, acc);
    store_lanes(a1, acc + 8);
    store_lanes(b, acc + n);
    store_lanes(b1, acc + n + 8);
    store_lanes(d, acc + 2 * n);
    store_lanes(d1, acc + 2 * n + 8);
    store_lanes(e, acc + 3 * n);
    store_lanes(e1, acc + 3 * n + 8);
  }
}
/// The same for one query, 32 channels of which stay in registers, in the order of `Lanes16`.
template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void add_one_avx2(const float* weights,
                                                          const RowParts& rows,
                                                          float* acc) noexcept {
  using Lanes = Lanes16<type>;
  constexpr std::ptrdiff_t half = 16 * block_bytes(type);
  std::ptrdiff_t offset = rows.offset;
  for (std::size_t c = 0; c < rows.n; c += 32, acc += 32, offset += 2 * half) {
    FloatLanes s, t, u, v, x, x1;
    load_sixteen_floats<Lanes::even_odd>(acc, s, t);
    load_sixteen_floats<Lanes::even_odd>(acc + 16, u, v);
    for (std::size_t j = 0; j < rows.count; ++j) {
      const std::byte* const row = rows.rows[j] + offset;
      const FloatLanes w = weights[j] - FloatLanes{};
      Lanes::load(row, x, x1);
      s = fma_lanes(w, x, s);
      t = fma_lanes(w, x1, t);
      Lanes::load(row + half, x, x1);
      u = fma_lanes(w, x, u);
      v = fma_lanes(w, x1, v);
    }
    store_sixteen_floats<Lanes::even_odd>(s, t, acc);
    store_sixteen_floats<Lanes::even_odd>(u, v, acc + 16);
  }
}

template <ElementType type>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void add_avx2(const float* weights, std::size_t stride,
                                                 std::size_t count, const RowParts& rows,
                                                 float* acc) noexcept {
  constexpr std::size_t line = 64 / block_bytes(type);
  for (std::size_t j = 0; rows.ahead != 0 && j < rows.count; ++j) {
    for (std::size_t c = 0; c < rows.n; c += line)
      ask_for(rows.rows[j] + rows.offset + c * block_bytes(type), rows.ahead);
  }
  std::size_t q = 0;
  for (; q + paired_queries <= count; q += paired_queries) {
    add_four_avx2<type>(weights + q * stride, stride, rows, acc + q * rows.n);
  }
  for (; q < count; ++q) add_one_avx2<type>(weights + q * stride, rows, acc + q * rows.n);
}

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
