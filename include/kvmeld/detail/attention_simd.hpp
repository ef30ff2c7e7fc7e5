#pragma once

/// Kernels of attention for each instruction set.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

// Inner loops of attention on hosts: q · k by the 32-lane rule, softmax of a block, weighted sums
// of value rows. The same bytes in every instruction set (docs/numerics.md).

namespace detail {

/// Tokens whose weights are made together. Sums within a block are f32, sums of blocks f64, so it
/// is part of the result.
inline constexpr std::size_t attended_block = 64;
/// Value rows that are added in one go, and keys that are multiplied: what is loaded of sums or of
/// queries serves so many.
inline constexpr std::size_t added_rows = 4;
/// Queries that share what is loaded of a row.
inline constexpr std::size_t paired_queries = 4;
/// Tokens whose rows are in hand at once, at most.
inline constexpr std::size_t attended_rows = 16;

/// Numbers that start on a cache line: vectors that lie across two cost twice.
template <class T>
class AlignedRows {
 public:
  AlignedRows() = default;
  /// @param n zeros.
  explicit AlignedRows(std::size_t n, T value = T{})
      : blocks_((n + Block::size - 1) / Block::size), size_(n) {
    for (std::size_t i = 0; value != T{} && i < n; ++i) data()[i] = value;
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] T* data() noexcept { return blocks_.empty() ? nullptr : blocks_[0].values; }
  [[nodiscard]] const T* data() const noexcept {
    return blocks_.empty() ? nullptr : blocks_[0].values;
  }
  [[nodiscard]] T& operator[](std::size_t i) noexcept { return data()[i]; }
  [[nodiscard]] const T& operator[](std::size_t i) const noexcept { return data()[i]; }

 private:
  struct alignas(64) Block {
    static constexpr std::size_t size = 64 / sizeof(T);
    T values[size] = {};
  };
  std::vector<Block> blocks_;
  std::size_t size_ = 0;
};

/// e^x for a weight that f32 will hold: within 2^-33 of it, 0 below −104, where f32 has nothing
/// left; x up to some 700, NaN stays.
///
/// A third of `math::exp`'s operations. e^r = 1 + r p(r), p a Chebyshev fit of degree 6 computed
/// with 60 digits: exactly 1 at 0. `math::exp` is within an ulp of f64, and so carries low parts
/// and more terms. `short_exp` of gates keeps e^x − 1 apart for tanh.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double weight_exp(double x) noexcept {
  const double bounded = select(x < -104.0, -104.0, x);
  const double magic = fma(bounded, 0x1.71547652b82fep+0, integer_magic);
  const double r = fma(-(magic - integer_magic), 0x1.62e42fefa39efp-1, bounded);
  double p = 0x1.a15179d80ae96p-13;
  p = fma(p, r, 0x1.6d7543e4127b8p-10);
  p = fma(p, r, 0x1.1110c632a3088p-7);
  p = fma(p, r, 0x1.5554accfdb593p-5);
  p = fma(p, r, 0x1.55555567532adp-3);
  p = fma(p, r, 0x1.000000287f871p-1);
  p = fma(p, r, 1.0);
  const double mantissa = fma(p, r, 1.0);
  // times 2^k: the exponent counts up
  const double value = bits_double(double_bits(mantissa) + (double_bits(magic) << 52));
  return select(x == x, select(x < -104.0, 0.0, value), x);
}

/// Parts of a few rows: `n` elements from `offset` bytes on in each, n a multiple of 32. What lies
/// `ahead` bytes from there is read soon.
struct RowParts {
  const std::byte* const* rows = nullptr;
  std::size_t count = 0;  ///< at most `attended_rows`
  std::ptrdiff_t offset = 0;
  std::size_t n = 0;
  std::ptrdiff_t ahead = 0;
};

/// Asks for what will be read later; where nothing is, the address may be anything.
KVMELD_ALWAYS_INLINE void prefetch(const std::byte* at, std::ptrdiff_t ahead) noexcept {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(at) +
                                                   static_cast<std::uintptr_t>(ahead)));
}

/// One instruction set's loops. Query rows and accumulators have as many floats as the parts of
/// rows, and follow each other without gaps. Keys and values are f32, or in the `raw` forms of
/// their own type.
struct AttentionSteps {
  using Dots = void (*)(const float* queries, std::size_t count, const RowParts& keys, float* out,
                        std::size_t stride) noexcept;
  using Add = void (*)(const float* weights, std::size_t stride, std::size_t count,
                       const RowParts& rows, float* acc);

  /// out[q · stride + k] = queries[q] · keys[k], k < keys.count
  Dots dots = nullptr;
  /// weights[i] = e^(dots[i] · factor − top) for one block; returns their sum in eight strands.
  double (*weigh)(const float* dots, double factor, double top, float* weights) = nullptr;
  /// The largest of one block; −infinity where none is.
  float (*largest)(const float* dots) = nullptr;
  /// acc[q] += weights[q · stride + j] · rows[j], j < rows.count in order, a multiple of
  /// `added_rows`
  Add add = nullptr;
  /// total[i] = total[i] · scale + block[i]; block[i] = 0
  void (*carry)(float* block, double scale, std::size_t n, double* total) = nullptr;
  /// out[i] = total[i] / sum, n of them
  void (*finish)(const double* total, double sum, std::size_t n, float* out) = nullptr;
  Dots raw_dots = nullptr;  ///< null: this type has none
  Add raw_add = nullptr;
  /// Raw parts as f32, one behind the other: where many queries read them, each is converted once.
  void (*widen)(const RowParts& rows, float* out) = nullptr;
};

KVMELD_ALWAYS_INLINE double weigh_body(const float* __restrict dots, double factor, double top,
                                       float* __restrict weights) noexcept {
  double sums[8] = {};
  for (std::size_t i = 0; i < attended_block; i += 8) {
    double mass[8];
    KVMELD_KEEP_LOOP
    for (std::size_t j = 0; j < 8; ++j)
      mass[j] = weight_exp(fma(static_cast<double>(dots[i + j]), factor, -top));
    for (std::size_t j = 0; j < 8; ++j) {
      weights[i + j] = static_cast<float>(mass[j]);
      sums[j] += static_cast<double>(weights[i + j]);
    }
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}
KVMELD_ALWAYS_INLINE float largest_body(const float* dots) noexcept {
  float top[16];
  for (std::size_t j = 0; j < 16; ++j) top[j] = -__builtin_huge_valf();
  for (std::size_t i = 0; i < attended_block; i += 16) {
    for (std::size_t j = 0; j < 16; ++j) top[j] = dots[i + j] > top[j] ? dots[i + j] : top[j];
  }
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) top[j] = top[j + half] > top[j] ? top[j + half] : top[j];
  }
  return top[0];
}
KVMELD_ALWAYS_INLINE void carry_body(float* __restrict block, double scale, std::size_t n,
                                     double* __restrict total) noexcept {
  for (std::size_t at = 0; at < n; at += 32) {
    for (std::size_t c = at; c < at + 32; ++c)
      total[c] = fma(total[c], scale, static_cast<double>(block[c]));
    for (std::size_t c = at; c < at + 32; ++c) block[c] = 0.0F;
  }
}
KVMELD_ALWAYS_INLINE void finish_body(const double* __restrict total, double sum, std::size_t n,
                                      float* __restrict out) noexcept {
  std::size_t c = 0;
  for (; c + 8 <= n; c += 8) {
    for (std::size_t i = 0; i < 8; ++i) out[c + i] = static_cast<float>(total[c + i] / sum);
  }
  for (; c < n; ++c) out[c] = static_cast<float>(total[c] / sum);
}

KVMELD_NOINLINE inline double weigh_baseline(const float* dots, double factor, double top,
                                             float* weights) noexcept {
  return weigh_body(dots, factor, top, weights);
}
KVMELD_NOINLINE inline void carry_baseline(float* block, double scale, std::size_t n,
                                           double* total) noexcept {
  carry_body(block, scale, n, total);
}
KVMELD_NOINLINE inline void finish_baseline(const double* total, double sum, std::size_t n,
                                            float* out) noexcept {
  finish_body(total, sum, n, out);
}
KVMELD_NOINLINE inline float largest_baseline(const float* dots) noexcept {
  return largest_body(dots);
}
KVMELD_NOINLINE inline void dots_baseline(const float* queries, std::size_t count,
                                          const RowParts& keys, float* out,
                                          std::size_t stride) noexcept {
  for (std::size_t q = 0; q < count; ++q, queries += keys.n) {
    for (std::size_t k = 0; k < keys.count; ++k) {
      const float* const key = reinterpret_cast<const float*>(keys.rows[k] + keys.offset);
      float lanes[32] = {};
      for (std::size_t at = 0; at < keys.n; at += 32) {
        for (std::size_t l = 0; l < 32; ++l) lanes[l] = fma(queries[at + l], key[at + l], lanes[l]);
      }
      for (std::size_t half = 16; half > 0; half /= 2) {
        for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
      }
      out[q * stride + k] = lanes[0];
    }
  }
}
KVMELD_NOINLINE inline void add_baseline(const float* weights, std::size_t stride,
                                         std::size_t count, const RowParts& rows,
                                         float* acc) noexcept {
  for (std::size_t q = 0; q < count; ++q, acc += rows.n) {
    for (std::size_t j = 0; j < rows.count; ++j) {
      const float* const row = reinterpret_cast<const float*>(rows.rows[j] + rows.offset);
      const float w = weights[q * stride + j];
      for (std::size_t c = 0; c < rows.n; ++c) acc[c] = fma(w, row[c], acc[c]);
    }
  }
}

}  // namespace detail

// The loops of `AttentionSteps` in AVX2, and those of a softmax in AVX-512.

#if KVMELD_X86_DISPATCH

namespace detail {

/// The expressions of `weight_exp`, which compilers spread over registers they do not have.
template <int bytes>
struct Weigh {
  using Doubles = extend::Vec<double, bytes>;
  using Floats = extend::Vec<float, bytes / 2>;

  KVMELD_ALWAYS_INLINE static double run(const float* dots, double factor, double top,
                                         float* weights) noexcept {
    const Doubles by = Doubles::spread(factor), from = Doubles{} - Doubles::spread(top),
                  magic = Doubles::spread(integer_magic);
    const Doubles least = Doubles::spread(-104.0), one = Doubles::spread(1.0);
    alignas(64) double sums[8];
    for (std::size_t l = 0; l < 8; l += Doubles::lanes) {
      Doubles sum{};
      for (std::size_t i = l; i < attended_block; i += 8) {
        const Doubles x = multiply_add(widen(Floats::load(dots + i)), by, from);
        const Doubles bounded = if_less(x, least, least, x);
        const Doubles k = multiply_add(bounded, Doubles::spread(0x1.71547652b82fep+0), magic);
        const Doubles r = multiply_add(magic - k, Doubles::spread(0x1.62e42fefa39efp-1), bounded);
        Doubles p = Doubles::spread(0x1.a15179d80ae96p-13);
        p = multiply_add(p, r, Doubles::spread(0x1.6d7543e4127b8p-10));
        p = multiply_add(p, r, Doubles::spread(0x1.1110c632a3088p-7));
        p = multiply_add(p, r, Doubles::spread(0x1.5554accfdb593p-5));
        p = multiply_add(p, r, Doubles::spread(0x1.55555567532adp-3));
        p = multiply_add(p, r, Doubles::spread(0x1.000000287f871p-1));
        p = multiply_add(p, r, one);
        p = multiply_add(p, r, one);
        p = if_less(x, least, Doubles{}, add_exponent(p, k));
        const Floats w = narrow(if_equal(x, x, p, x));
        w.store(weights + i);
        sum = sum + widen(w);
      }
      sum.store(sums + l);
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
           ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }
};

struct Largest {
  KVMELD_ALWAYS_INLINE static float run(const float* dots) noexcept { return largest_body(dots); }
};
struct Finish {
  KVMELD_ALWAYS_INLINE static void run(const double* total, double sum, std::size_t n,
                                       float* out) noexcept {
    finish_body(total, sum, n, out);
  }
};
template <int bytes>
struct Carry {
  using Doubles = extend::Vec<double, bytes>;
  using Floats = extend::Vec<float, bytes / 2>;

  KVMELD_ALWAYS_INLINE static void run(float* block, double scale, std::size_t n,
                                       double* total) noexcept {
    const Doubles by = Doubles::spread(scale);
    for (std::size_t c = 0; c < n; c += Doubles::lanes) {
      multiply_add(Doubles::load(total + c), by, widen(Floats::load(block + c))).store(total + c);
      Floats{}.store(block + c);
    }
  }
};

/// The levels 4, 2, 1 of the tree over eight lanes.
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE float join_eight(FloatLanes s) noexcept {
  s = s + __builtin_shufflevector(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
  s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5);
  s = s + __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6);
  return s[0];
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
    prefetch(key, ahead);
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
        prefetch(x + c * block_bytes(type), keys.ahead);
        prefetch(y + c * block_bytes(type), keys.ahead);
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
/// Elements of a row, a vector full; `take` has them stay in a register.
template <ElementType type, int bytes>
struct TakeVector {
  KVMELD_TARGET_AVX2 static extend::Vec<float, bytes> load(const std::byte* in) noexcept {
    extend::Vec<float, bytes> x;
    x.raw = Lanes8<type>::load(in);
    return x;
  }
  KVMELD_TARGET_AVX2 static extend::Vec<float, bytes> take(const std::byte* in) noexcept {
    extend::Vec<float, bytes> x;
    x.raw = take_eight<type>(in);
    return x;
  }
};
template <ElementType type>
struct TakeVector<type, 64> {
  KVMELD_TARGET_AVX512 static extend::Vec<float, 64> load(const std::byte* in) noexcept {
    extend::Vec<float, 64> x;
    x.raw = load_sixteen<type>(in);
    return x;
  }
  KVMELD_TARGET_AVX512 static extend::Vec<float, 64> take(const std::byte* in) noexcept {
    extend::Vec<float, 64> x;
    x.raw = take_sixteen<type>(in);
    return x;
  }
};

/// Adds all rows to the sums of four queries, `vectors` of which stay in registers for each.
template <int bytes, ElementType type, int vectors>
struct AddForFour {
  using Floats = extend::Vec<float, bytes>;
  struct Sums {  // a vector of each query
    Floats a, b, c, d;
  };
  static constexpr std::size_t lanes = Floats::lanes, channels = vectors * lanes;
  static constexpr std::ptrdiff_t step = static_cast<std::ptrdiff_t>(lanes) * block_bytes(type);

  /// Whole groups of `channels`, from channel c on; returns the first that is left.
  KVMELD_ALWAYS_INLINE static std::size_t run(const float* weights, std::size_t stride,
                                              const RowParts& rows, std::size_t c,
                                              float* sums) noexcept {
    const std::size_t n = rows.n;
    for (; c + channels <= n; c += channels) {
      float* const acc = sums + c;
      const std::ptrdiff_t offset =
          rows.offset + static_cast<std::ptrdiff_t>(c) * block_bytes(type);
      extend::Vecs<Sums, vectors> held;
      held.each([&](Sums& s, std::size_t i) KVMELD_INLINE_LAMBDA {
        const float* const from = acc + i * lanes;
        s = {Floats::load(from), Floats::load(from + n), Floats::load(from + 2 * n),
             Floats::load(from + 3 * n)};
      });
      for (std::size_t j = 0; j < rows.count; ++j) {
        const std::byte* const row = rows.rows[j] + offset;
        const float* const w = weights + j;
        const Floats wa = Floats::spread(w[0]), wb = Floats::spread(w[stride]),
                     wc = Floats::spread(w[2 * stride]), wd = Floats::spread(w[3 * stride]);
        held.each([&](Sums& s, std::size_t i) KVMELD_INLINE_LAMBDA {
          const Floats x =
              TakeVector<type, bytes>::take(row + static_cast<std::ptrdiff_t>(i) * step);
          s.a = multiply_add(wa, x, s.a);
          s.b = multiply_add(wb, x, s.b);
          s.c = multiply_add(wc, x, s.c);
          s.d = multiply_add(wd, x, s.d);
        });
      }
      held.each([&](Sums& s, std::size_t i) KVMELD_INLINE_LAMBDA {
        float* const to = acc + i * lanes;
        s.a.store(to);
        s.b.store(to + n);
        s.c.store(to + 2 * n);
        s.d.store(to + 3 * n);
      });
    }
    return c;
  }
};

/// Two vectors of one row in the order that costs least: of bf16 in AVX2 the even elements and the
/// odd ones.
template <ElementType type, int bytes>
struct RowPair {
  extend::Vec<float, bytes> a, b;

  KVMELD_TARGET_AVX2 static RowPair load(const std::byte* in) noexcept {
    RowPair pair;
    Lanes16<type>::load(in, pair.a.raw, pair.b.raw);
    return pair;
  }
  KVMELD_TARGET_AVX2 static RowPair load_floats(const float* in) noexcept {
    RowPair pair;
    load_sixteen_floats<Lanes16<type>::even_odd>(in, pair.a.raw, pair.b.raw);
    return pair;
  }
  KVMELD_TARGET_AVX2 void store_floats(float* out) const noexcept {
    store_sixteen_floats<Lanes16<type>::even_odd>(a.raw, b.raw, out);
  }
};
template <ElementType type>
struct RowPair<type, 64> {
  extend::Vec<float, 64> a, b;

  KVMELD_TARGET_AVX512 static RowPair load(const std::byte* in) noexcept {
    RowPair pair;
    pair.a.raw = load_sixteen<type>(in);
    pair.b.raw = load_sixteen<type>(in + 16 * block_bytes(type));
    return pair;
  }
  KVMELD_TARGET_AVX512 static RowPair load_floats(const float* in) noexcept {
    return {{load_wide(in)}, {load_wide(in + 16)}};
  }
  KVMELD_TARGET_AVX512 void store_floats(float* out) const noexcept {
    store_wide(a.raw, out);
    store_wide(b.raw, out + 16);
  }
};

/// Adds all rows to the sums of one query, `pairs` of which stay in registers.
template <int bytes, ElementType type, int pairs>
struct AddForOne {
  using Floats = extend::Vec<float, bytes>;
  using Pair = RowPair<type, bytes>;
  static constexpr std::size_t lanes = 2 * Floats::lanes, channels = pairs * lanes;

  /// As that of `AddForFour`.
  KVMELD_ALWAYS_INLINE static std::size_t run(const float* weights, const RowParts& rows,
                                              std::size_t c, float* sums) noexcept {
    for (; c + channels <= rows.n; c += channels) {
      const std::ptrdiff_t offset =
          rows.offset + static_cast<std::ptrdiff_t>(c) * block_bytes(type);
      float* const acc = sums + c;
      extend::Vecs<Pair, pairs> held;
      held.each([&](Pair& s, std::size_t i)
                    KVMELD_INLINE_LAMBDA { s = Pair::load_floats(acc + i * lanes); });
      for (std::size_t j = 0; j < rows.count; ++j) {
        const std::byte* const row = rows.rows[j] + offset;
        const Floats w = Floats::spread(weights[j]);
        held.each([&](Pair& s, std::size_t i) KVMELD_INLINE_LAMBDA {
          const Pair x =
              Pair::load(row + static_cast<std::ptrdiff_t>(i * lanes) * block_bytes(type));
          s.a = multiply_add(w, x.a, s.a);
          s.b = multiply_add(w, x.b, s.b);
        });
      }
      held.each([&](Pair& s, std::size_t i)
                    KVMELD_INLINE_LAMBDA { s.store_floats(acc + i * lanes); });
    }
    return c;
  }
};

/// The next head of a row is asked for too where vectors are wide enough to wait for it.
template <int bytes, ElementType type>
struct WidenParts {
  using Floats = extend::Vec<float, bytes>;

  KVMELD_ALWAYS_INLINE static void run(const RowParts& rows, float* out) noexcept {
    for (std::size_t r = 0; r < rows.count; ++r) {
      const std::byte* in = rows.rows[r] + rows.offset;
      for (std::size_t c = 0; c < rows.n; c += 32, in += 32 * block_bytes(type), out += 32) {
        prefetch(in, rows.ahead);
        if constexpr (bytes == 64)
          prefetch(in, static_cast<std::ptrdiff_t>(rows.n) * block_bytes(type));
        for (std::size_t l = 0; l < 32; l += Floats::lanes) {
          TakeVector<type, bytes>::load(in + static_cast<std::ptrdiff_t>(l) * block_bytes(type))
              .store(out + l);
        }
      }
    }
  }
};

/// Asks for what lies ahead of four rows, line by line.
KVMELD_ALWAYS_INLINE void ask_for_rows(const std::byte* a, const std::byte* b, const std::byte* c,
                                       const std::byte* d, std::size_t bytes,
                                       std::ptrdiff_t ahead) noexcept {
  if (ahead == 0) return;
  const auto end = ahead + static_cast<std::ptrdiff_t>(bytes);
  for (; ahead < end; ahead += 64) {
    prefetch(a, ahead);
    prefetch(b, ahead);
    prefetch(c, ahead);
    prefetch(d, ahead);
  }
}

/// Adds all rows to the sums of all queries.
template <int bytes, ElementType type>
struct AddRows {
  KVMELD_ALWAYS_INLINE static void run(const float* weights, std::size_t stride, std::size_t count,
                                       const RowParts& rows, float* acc) noexcept {
    for (std::size_t j = 0; j < rows.count; j += added_rows) {
      ask_for_rows(rows.rows[j] + rows.offset, rows.rows[j + 1] + rows.offset,
                   rows.rows[j + 2] + rows.offset, rows.rows[j + 3] + rows.offset,
                   rows.n * block_bytes(type), rows.ahead);
    }
    std::size_t q = 0;
    for (; q + paired_queries <= count; q += paired_queries) {
      const float* const four = weights + q * stride;
      float* const sums = acc + q * rows.n;
      const std::size_t c = AddForFour<bytes, type, bytes / 16>::run(four, stride, rows, 0, sums);
      if constexpr (bytes == 64) {  // half of them, where 32 channels are left
        if (c < rows.n) AddForFour<bytes, type, 2>::run(four, stride, rows, c, sums);
      }
    }
    for (; q < count; ++q) {
      const float* const one = weights + q * stride;
      float* const sums = acc + q * rows.n;
      const std::size_t c = AddForOne<bytes, type, 2>::run(one, rows, 0, sums);
      if constexpr (bytes == 64) {
        if (c < rows.n) AddForOne<bytes, type, 1>::run(one, rows, c, sums);
      }
    }
  }
};

}  // namespace detail

#endif  // KVMELD_X86_DISPATCH

// The loops of `AttentionSteps` over rows, in AVX-512: blocks of four queries and two keys, or
// four rows, stay in registers.

#if KVMELD_X86_DISPATCH

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

}  // namespace detail

#endif  // KVMELD_X86_DISPATCH

namespace detail {

/// The loops of one instruction set, raw ones for rows of `type`.
[[nodiscard]] inline AttentionSteps attention_steps(
    [[maybe_unused]] Isa isa, [[maybe_unused]] ElementType type = ElementType::f64) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512) {
    AttentionSteps steps{dots_avx512<ElementType::f32>,
                         extend::Kernel<Weigh<64>>::avx512,
                         extend::Kernel<Largest>::avx2,
                         extend::Kernel<AddRows<64, ElementType::f32>>::avx512,
                         extend::Kernel<Carry<64>>::avx512,
                         extend::Kernel<Finish>::avx2,
                         nullptr,
                         nullptr,
                         nullptr};
    if (type == ElementType::f32) steps.raw_dots = steps.dots, steps.raw_add = steps.add;
    if (type == ElementType::f16)
      steps.raw_dots = dots_avx512<ElementType::f16>,
      steps.raw_add = extend::Kernel<AddRows<64, ElementType::f16>>::avx512,
      steps.widen = extend::Kernel<WidenParts<64, ElementType::f16>>::avx512;
    if (type == ElementType::bf16)
      steps.raw_dots = dots_avx512<ElementType::bf16>,
      steps.raw_add = extend::Kernel<AddRows<64, ElementType::bf16>>::avx512,
      steps.widen = extend::Kernel<WidenParts<64, ElementType::bf16>>::avx512;
    return steps;
  }
  if (isa == Isa::avx2) {
    AttentionSteps steps{dots_avx2<ElementType::f32>,
                         extend::Kernel<Weigh<32>>::avx2,
                         extend::Kernel<Largest>::avx2,
                         extend::Kernel<AddRows<32, ElementType::f32>>::avx2,
                         extend::Kernel<Carry<32>>::avx2,
                         extend::Kernel<Finish>::avx2,
                         nullptr,
                         nullptr,
                         nullptr};
    if (type == ElementType::f32) steps.raw_dots = steps.dots, steps.raw_add = steps.add;
    if (type == ElementType::f16)
      steps.raw_dots = dots_avx2<ElementType::f16>,
      steps.raw_add = extend::Kernel<AddRows<32, ElementType::f16>>::avx2,
      steps.widen = extend::Kernel<WidenParts<32, ElementType::f16>>::avx2;
    if (type == ElementType::bf16)
      steps.raw_dots = dots_avx2<ElementType::bf16>,
      steps.raw_add = extend::Kernel<AddRows<32, ElementType::bf16>>::avx2,
      steps.widen = extend::Kernel<WidenParts<32, ElementType::bf16>>::avx2;
    return steps;
  }
#endif
  return {dots_baseline,   weigh_baseline, largest_baseline, add_baseline, carry_baseline,
          finish_baseline, nullptr,        nullptr,          nullptr};
}

}  // namespace detail

KVMELD_NAMESPACE_END
