#pragma once

/// Inner loops of attention on hosts: q · k by the 32-lane rule, softmax of a block, weighted sums
/// of value rows. The same bytes in every instruction set (docs/numerics.md).

#include <cstddef>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN
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
KVMELD_ALWAYS_INLINE void ask_for(const std::byte* at, std::ptrdiff_t ahead) noexcept {
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
                       const RowParts& rows, float* acc) noexcept;

  /// out[q · stride + k] = queries[q] · keys[k], k < keys.count
  Dots dots = nullptr;
  /// weights[i] = e^(dots[i] · factor − top) for one block; returns their sum in eight strands.
  double (*weigh)(const float* dots, double factor, double top, float* weights) noexcept = nullptr;
  /// The largest of one block; −infinity where none is.
  float (*largest)(const float* dots) noexcept = nullptr;
  /// acc[q] += weights[q · stride + j] · rows[j], j < rows.count in order, a multiple of
  /// `added_rows`
  Add add = nullptr;
  /// total[i] = total[i] · scale + block[i]; block[i] = 0
  void (*carry)(float* block, double scale, std::size_t n, double* total) noexcept = nullptr;
  /// out[i] = total[i] / sum, n of them
  void (*finish)(const double* total, double sum, std::size_t n, float* out) noexcept = nullptr;
  Dots raw_dots = nullptr;  ///< null: this type has none
  Add raw_add = nullptr;
  /// Raw parts as f32, one behind the other: where many queries read them, each is converted once.
  void (*widen)(const RowParts& rows, float* out) noexcept = nullptr;
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
KVMELD_NAMESPACE_END
