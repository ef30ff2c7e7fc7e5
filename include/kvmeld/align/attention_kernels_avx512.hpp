#pragma once

/// The loops of `AttentionSteps` over rows, in AVX-512: blocks of four queries and two keys, or
/// four rows, stay in registers.

#include <cstddef>
#include <cstdint>

#include <kvmeld/align/attention_kernels.hpp>
#include <kvmeld/align/attention_kernels_x86.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fuse/wide_lanes.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

#if KVMELD_X86_DISPATCH

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The tree over 32 lanes, for many sums at once: a level adds halves of what is left of two sums,
/// which then share a vector. Level 8: the sums of a in the lower half, those of b in the upper.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
join_halves(WideFloats a, WideFloats b) noexcept {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                 31);
}
/// Level 4: quarters of a, b, c, d.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
join_quarters(WideFloats ab, WideFloats cd) noexcept {
  return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                 31);
}
/// Level 2, in each quarter: two lanes of x, then two of y.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
join_pairs(WideFloats x, WideFloats y) noexcept {
  return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
/// Level 1, in each quarter: a lane of each of four.
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
join_neighbours(WideFloats xy, WideFloats zw) noexcept {
  return __builtin_shufflevector(xy, zw, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28,
                                 30) +
         __builtin_shufflevector(xy, zw, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
/// Sixteen elements that stay in a register: g++ would load f32 again for each use, and loads are
/// what these loops run out of.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
take_sixteen(const std::byte* in) noexcept {
  WideFloats x = load_sixteen<type>(in);
  if constexpr (type == ElementType::f32) asm("" : "+v"(x));
  return x;
}
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
take_sixteen(const float* in) noexcept {
  return take_sixteen<ElementType::f32>(reinterpret_cast<const std::byte*>(in));
}
/// Asks for what lies ahead of four rows, line by line.
KVMELD_ALWAYS_INLINE void ask_for_rows(const std::byte* a, const std::byte* b, const std::byte* c,
                                       const std::byte* d, std::size_t bytes,
                                       std::ptrdiff_t ahead) noexcept {
  if (ahead == 0) return;
  const auto end = ahead + static_cast<std::ptrdiff_t>(bytes);
  for (; ahead < end; ahead += 64) {
    ask_for(a, ahead);
    ask_for(b, ahead);
    ask_for(c, ahead);
    ask_for(d, ahead);
  }
}

template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void widen_parts_avx512(const RowParts& rows,
                                                             float* out) noexcept {
  constexpr std::ptrdiff_t half = 16 * block_bytes(type);
  for (std::size_t r = 0; r < rows.count; ++r) {
    const std::byte* in = rows.rows[r] + rows.offset;
    for (std::size_t c = 0; c < rows.n; c += 32, in += 2 * half, out += 32) {
      ask_for(in, rows.ahead);
      ask_for(in, static_cast<std::ptrdiff_t>(rows.n) * block_bytes(type));  // the next head
      store_wide(load_sixteen<type>(in), out);
      store_wide(load_sixteen<type>(in + half), out + 16);
    }
  }
}

/// Four queries by two keys, until quarters of four sums are left of each: x and y have a quarter
/// for each query.
template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void multiply_four_by_two(
    const float* queries, const std::byte* x, const std::byte* y, std::size_t n, WideFloats& x_sums,
    WideFloats& y_sums) noexcept {
  constexpr std::ptrdiff_t half = 16 * block_bytes(type);
  WideFloats xa{}, xb{}, xc{}, xd{}, ya{}, yb{}, yc{}, yd{};          // the lower sixteen lanes
  WideFloats xa1{}, xb1{}, xc1{}, xd1{}, ya1{}, yb1{}, yc1{}, yd1{};  // the upper ones
  for (std::size_t at = 0; at < n; at += 32, x += 2 * half, y += 2 * half, queries += 32) {
    const WideFloats x0 = take_sixteen<type>(x), x1 = take_sixteen<type>(x + half);
    const WideFloats y0 = take_sixteen<type>(y), y1 = take_sixteen<type>(y + half);
    WideFloats q = take_sixteen(queries);
    xa = fma_wide(q, x0, xa);
    ya = fma_wide(q, y0, ya);
    q = take_sixteen(queries + 16);
    xa1 = fma_wide(q, x1, xa1);
    ya1 = fma_wide(q, y1, ya1);
    q = take_sixteen(queries + n);
    xb = fma_wide(q, x0, xb);
    yb = fma_wide(q, y0, yb);
    q = take_sixteen(queries + n + 16);
    xb1 = fma_wide(q, x1, xb1);
    yb1 = fma_wide(q, y1, yb1);
    q = take_sixteen(queries + 2 * n);
    xc = fma_wide(q, x0, xc);
    yc = fma_wide(q, y0, yc);
    q = take_sixteen(queries + 2 * n + 16);
    xc1 = fma_wide(q, x1, xc1);
    yc1 = fma_wide(q, y1, yc1);
    q = take_sixteen(queries + 3 * n);
    xd = fma_wide(q, x0, xd);
    yd = fma_wide(q, y0, yd);
    q = take_sixteen(queries + 3 * n + 16);
    xd1 = fma_wide(q, x1, xd1);
    yd1 = fma_wide(q, y1, yd1);
  }
  x_sums = join_quarters(join_halves(xa + xa1, xb + xb1), join_halves(xc + xc1, xd + xd1));
  y_sums = join_quarters(join_halves(ya + ya1, yb + yb1), join_halves(yc + yc1, yd + yd1));
}
/// Four keys by one query: their dots.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
multiply_one_by_four(const float* query, const std::byte* a, const std::byte* b, const std::byte* c,
                     const std::byte* d, std::size_t n) noexcept {
  constexpr std::ptrdiff_t half = 16 * block_bytes(type);
  WideFloats a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
  for (std::size_t at = 0; at < n;
       at += 32, a += 2 * half, b += 2 * half, c += 2 * half, d += 2 * half) {
    const WideFloats q0 = take_sixteen(query + at), q1 = take_sixteen(query + at + 16);
    a0 = fma_wide(q0, load_sixteen<type>(a), a0);
    a1 = fma_wide(q1, load_sixteen<type>(a + half), a1);
    b0 = fma_wide(q0, load_sixteen<type>(b), b0);
    b1 = fma_wide(q1, load_sixteen<type>(b + half), b1);
    c0 = fma_wide(q0, load_sixteen<type>(c), c0);
    c1 = fma_wide(q1, load_sixteen<type>(c + half), c1);
    d0 = fma_wide(q0, load_sixteen<type>(d), d0);
    d1 = fma_wide(q1, load_sixteen<type>(d + half), d1);
  }
  WideFloats s = join_quarters(join_halves(a0 + a1, b0 + b1), join_halves(c0 + c1, d0 + d1));
  s = join_pairs(s, s);
  return join_neighbours(s, s);
}

template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void dots_avx512(const float* queries, std::size_t count,
                                                      const RowParts& keys, float* out,
                                                      std::size_t stride) noexcept {
  using Quarter = unaligned_vector_t<float, 16>;
  const std::size_t n = keys.n;
  std::size_t q = 0;
  for (; q < count; q += count - q < paired_queries ? 1 : paired_queries) {
    for (std::size_t k = 0; k < keys.count; k += 4) {
      const std::size_t left = keys.count - k < 4 ? keys.count - k : 4;
      const std::byte* const a = keys.rows[k] + keys.offset;
      const std::byte* const b = keys.rows[left > 1 ? k + 1 : k] + keys.offset;
      const std::byte* const c = keys.rows[left > 2 ? k + 2 : k] + keys.offset;
      const std::byte* const d = keys.rows[left > 3 ? k + 3 : k] + keys.offset;
      float* const to = out + q * stride + k;
      if (q == 0) ask_for_rows(a, b, c, d, n * block_bytes(type), keys.ahead);
      if (count - q < paired_queries) {
        const WideFloats s = multiply_one_by_four<type>(queries + q * n, a, b, c, d, n);
        const float sums[] = {s[0], s[4], s[8], s[12]};
        for (std::size_t i = 0; i < left; ++i) to[i] = sums[i];
        continue;
      }
      WideFloats sa, sb, sc, sd;
      multiply_four_by_two<type>(queries + q * n, a, b, n, sa, sb);
      multiply_four_by_two<type>(queries + q * n, c, d, n, sc, sd);
      const WideFloats s = join_neighbours(join_pairs(sa, sb), join_pairs(sc, sd));
      if (left == 4) {
        *reinterpret_cast<Quarter*>(to) = __builtin_shufflevector(s, s, 0, 1, 2, 3);
        *reinterpret_cast<Quarter*>(to + stride) = __builtin_shufflevector(s, s, 4, 5, 6, 7);
        *reinterpret_cast<Quarter*>(to + 2 * stride) = __builtin_shufflevector(s, s, 8, 9, 10, 11);
        *reinterpret_cast<Quarter*>(to + 3 * stride) =
            __builtin_shufflevector(s, s, 12, 13, 14, 15);
        continue;
      }
      alignas(64) float sums[16];
      store_wide(s, sums);
      for (std::size_t i = 0; i < 4 * left; ++i)
        to[i / left * stride + i % left] = sums[i / left * 4 + i % left];
    }
  }
}

// Sums of four queries, or of one, over 64 or 32 channels, which stay in registers for all rows.
// Macros, because compilers keep arrays of sums on the stack.
#define KVMELD_ADD_FOUR(ONE, ROW)     \
  {                                   \
    const WideFloats x = ROW;         \
    ONE##a = fma_wide(wa, x, ONE##a); \
    ONE##b = fma_wide(wb, x, ONE##b); \
    ONE##c = fma_wide(wc, x, ONE##c); \
    ONE##d = fma_wide(wd, x, ONE##d); \
  }
#define KVMELD_LOAD_FOUR(ONE, AT)                                                                \
  WideFloats ONE##a = load_wide(AT), ONE##b = load_wide(AT + n), ONE##c = load_wide(AT + 2 * n), \
             ONE##d = load_wide(AT + 3 * n);
#define KVMELD_STORE_FOUR(ONE, AT) \
  store_wide(ONE##a, AT);          \
  store_wide(ONE##b, AT + n);      \
  store_wide(ONE##c, AT + 2 * n);  \
  store_wide(ONE##d, AT + 3 * n);

template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void add_for_four(const float* weights,
                                                            std::size_t stride,
                                                            const RowParts& rows,
                                                            float* acc) noexcept {
  constexpr std::ptrdiff_t step = 16 * block_bytes(type);
  const std::size_t n = rows.n;
  std::ptrdiff_t offset = rows.offset;
  std::size_t c = 0;
  for (; c + 64 <= n; c += 64, acc += 64, offset += 4 * step) {
    KVMELD_LOAD_FOUR(s, acc)
    KVMELD_LOAD_FOUR(t, acc + 16)
    KVMELD_LOAD_FOUR(u, acc + 32)
    KVMELD_LOAD_FOUR(v, acc + 48)
    for (std::size_t j = 0; j < rows.count; ++j) {
      const std::byte* const row = rows.rows[j] + offset;
      const float* const w = weights + j;
      const WideFloats wa = w[0] - WideFloats{}, wb = w[stride] - WideFloats{},
                       wc = w[2 * stride] - WideFloats{}, wd = w[3 * stride] - WideFloats{};
      KVMELD_ADD_FOUR(s, take_sixteen<type>(row))
      KVMELD_ADD_FOUR(t, take_sixteen<type>(row + step))
      KVMELD_ADD_FOUR(u, take_sixteen<type>(row + 2 * step))
      KVMELD_ADD_FOUR(v, take_sixteen<type>(row + 3 * step))
    }
    KVMELD_STORE_FOUR(s, acc)
    KVMELD_STORE_FOUR(t, acc + 16)
    KVMELD_STORE_FOUR(u, acc + 32)
    KVMELD_STORE_FOUR(v, acc + 48)
  }
  if (c == n) return;
  KVMELD_LOAD_FOUR(s, acc)
  KVMELD_LOAD_FOUR(t, acc + 16)
  for (std::size_t j = 0; j < rows.count; ++j) {
    const std::byte* const row = rows.rows[j] + offset;
    const float* const w = weights + j;
    const WideFloats wa = w[0] - WideFloats{}, wb = w[stride] - WideFloats{},
                     wc = w[2 * stride] - WideFloats{}, wd = w[3 * stride] - WideFloats{};
    KVMELD_ADD_FOUR(s, take_sixteen<type>(row))
    KVMELD_ADD_FOUR(t, take_sixteen<type>(row + step))
  }
  KVMELD_STORE_FOUR(s, acc)
  KVMELD_STORE_FOUR(t, acc + 16)
}
#undef KVMELD_ADD_FOUR
#undef KVMELD_LOAD_FOUR
#undef KVMELD_STORE_FOUR

template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void add_for_one(const float* weights,
                                                           const RowParts& rows,
                                                           float* acc) noexcept {
  constexpr std::ptrdiff_t step = 16 * block_bytes(type);
  std::ptrdiff_t offset = rows.offset;
  std::size_t c = 0;
  for (; c + 64 <= rows.n; c += 64, acc += 64, offset += 4 * step) {
    WideFloats s = load_wide(acc), t = load_wide(acc + 16), u = load_wide(acc + 32),
               v = load_wide(acc + 48);
    for (std::size_t j = 0; j < rows.count; ++j) {
      const std::byte* const row = rows.rows[j] + offset;
      const WideFloats w = weights[j] - WideFloats{};
      s = fma_wide(w, load_sixteen<type>(row), s);
      t = fma_wide(w, load_sixteen<type>(row + step), t);
      u = fma_wide(w, load_sixteen<type>(row + 2 * step), u);
      v = fma_wide(w, load_sixteen<type>(row + 3 * step), v);
    }
    store_wide(s, acc);
    store_wide(t, acc + 16);
    store_wide(u, acc + 32);
    store_wide(v, acc + 48);
  }
  if (c == rows.n) return;
  WideFloats s = load_wide(acc), t = load_wide(acc + 16);
  for (std::size_t j = 0; j < rows.count; ++j) {
    const std::byte* const row = rows.rows[j] + offset;
    const WideFloats w = weights[j] - WideFloats{};
    s = fma_wide(w, load_sixteen<type>(row), s);
    t = fma_wide(w, load_sixteen<type>(row + step), t);
  }
  store_wide(s, acc);
  store_wide(t, acc + 16);
}

template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void add_avx512(const float* weights, std::size_t stride,
                                                     std::size_t count, const RowParts& rows,
                                                     float* acc) noexcept {
  for (std::size_t j = 0; j < rows.count; j += 4) {
    ask_for_rows(rows.rows[j] + rows.offset, rows.rows[j + 1] + rows.offset,
                 rows.rows[j + 2] + rows.offset, rows.rows[j + 3] + rows.offset,
                 rows.n * block_bytes(type), rows.ahead);
  }
  std::size_t q = 0;
  for (; q + paired_queries <= count; q += paired_queries)
    add_for_four<type>(weights + q * stride, stride, rows, acc + q * rows.n);
  for (; q < count; ++q) add_for_one<type>(weights + q * stride, rows, acc + q * rows.n);
}

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
