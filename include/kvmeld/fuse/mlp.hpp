#pragma once

/// Rows times a matrix for small networks: each output is summed from its bias on in ascending
/// order of inputs, by fma, and lanes lie across outputs (docs/numerics.md), so that neither blocks
/// nor vectors show in the bytes.
///
/// Not the kernels of align/packed_matrix.hpp, though of the same rule: a map meets tiles of 56
/// tokens, whose sums take two vectors for each of 14, from panels. A gate meets two rows or a few,
/// which in that shape would have half of the sums that keep the multipliers busy: theirs take four
/// vectors a row, from a matrix as it lies, and beside them run the sums of a row that all share.

#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/math.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Sizes of networks round up to whole blocks, with zeros.
[[nodiscard]] KVMELD_HD constexpr std::int32_t whole_blocks(std::int32_t n) noexcept {
  return (n + 31) / 32 * 32;
}

/// out = start + x · matrix for a few rows, and beside them, where `shared` is there, shared_out =
/// shared · shared_matrix: a row that all of them have in common has its product summed while
/// theirs are, which keeps the processor's multipliers busy.
struct RowProducts {
  const float* x = nullptr;  ///< (row, input)
  std::ptrdiff_t x_stride = 0;
  int inputs = 0;
  const float* matrix = nullptr;         ///< (input, column)
  const float* start = nullptr;          ///< (column)
  float* out = nullptr;                  ///< (row, column)
  std::ptrdiff_t columns = 0;            ///< of matrices and out; a multiple of 32
  const float* shared = nullptr;         ///< (input); null: none
  const float* shared_matrix = nullptr;  ///< (input, column)
  float* shared_out = nullptr;           ///< (column)
};

/// 32 columns of one row, by loops.
KVMELD_ALWAYS_INLINE void product_columns(const float* x, const float* matrix,
                                          std::ptrdiff_t columns, int inputs, const float* start,
                                          float* __restrict out) noexcept {
  alignas(64) float sums[32];
  for (int c = 0; c < 32; ++c) sums[c] = start == nullptr ? 0.0F : start[c];
  for (int k = 0; k < inputs; ++k) {
    const float value = x[k];
    KVMELD_KEEP_LOOP
    for (int c = 0; c < 32; ++c) sums[c] = fma(value, matrix[k * columns + c], sums[c]);
  }
  for (int c = 0; c < 32; ++c) out[c] = sums[c];
}

/// The rows one by one.
KVMELD_LAZY KVMELD_NOINLINE void row_products_baseline(const RowProducts& p, int rows,
                                                       std::ptrdiff_t column) noexcept {
  if (p.shared != nullptr)
    product_columns(p.shared, p.shared_matrix + column, p.columns, p.inputs, nullptr,
                    p.shared_out + column);
  for (int r = 0; r < rows; ++r) {
    product_columns(p.x + r * p.x_stride, p.matrix + column, p.columns, p.inputs, p.start + column,
                    p.out + r * p.columns + column);
  }
}

#if KVMELD_X86_DISPATCH

// Sums of `rows` rows by four vectors of columns, as named members: compilers keep an array of them
// in memory.
#define KVMELD_ROW_PRODUCTS(NAME, TARGET, FLOATS, LOAD, STORE, FMA)                               \
  template <int rows>                                                                             \
  struct NAME##Sums {                                                                             \
    NAME##Sums<rows - 1> before;                                                                  \
    FLOATS a, b, c, d;                                                                            \
    static constexpr std::ptrdiff_t lanes = sizeof(FLOATS) / sizeof(float);                       \
                                                                                                  \
    TARGET KVMELD_ALWAYS_INLINE void set(FLOATS w, FLOATS x, FLOATS y, FLOATS z) noexcept {       \
      before.set(w, x, y, z);                                                                     \
      a = w;                                                                                      \
      b = x;                                                                                      \
      c = y;                                                                                      \
      d = z;                                                                                      \
    }                                                                                             \
    TARGET KVMELD_ALWAYS_INLINE void add(const float* x, std::ptrdiff_t stride, FLOATS w,         \
                                         FLOATS y, FLOATS z, FLOATS v) noexcept {                 \
      before.add(x, stride, w, y, z, v);                                                          \
      const FLOATS value = x[(rows - 1) * stride] - FLOATS{};                                     \
      a = FMA(value, w, a);                                                                       \
      b = FMA(value, y, b);                                                                       \
      c = FMA(value, z, c);                                                                       \
      d = FMA(value, v, d);                                                                       \
    }                                                                                             \
    TARGET KVMELD_ALWAYS_INLINE void store(float* out, std::ptrdiff_t columns) const noexcept {   \
      before.store(out, columns);                                                                 \
      float* const to = out + (rows - 1) * columns;                                               \
      STORE(a, to);                                                                               \
      STORE(b, to + lanes);                                                                       \
      STORE(c, to + 2 * lanes);                                                                   \
      STORE(d, to + 3 * lanes);                                                                   \
    }                                                                                             \
  };                                                                                              \
  template <>                                                                                     \
  struct NAME##Sums<0> {                                                                          \
    TARGET KVMELD_ALWAYS_INLINE void set(FLOATS, FLOATS, FLOATS, FLOATS) noexcept {}              \
    TARGET KVMELD_ALWAYS_INLINE void add(const float*, std::ptrdiff_t, FLOATS, FLOATS, FLOATS,    \
                                         FLOATS) noexcept {}                                      \
    TARGET KVMELD_ALWAYS_INLINE void store(float*, std::ptrdiff_t) const noexcept {}              \
  };                                                                                              \
  template <int rows, bool shared>                                                                \
  TARGET KVMELD_NOINLINE void NAME(const RowProducts& p, std::ptrdiff_t column) noexcept {        \
    constexpr std::ptrdiff_t lanes = sizeof(FLOATS) / sizeof(float);                              \
    NAME##Sums<rows> sums;                                                                        \
    NAME##Sums<shared ? 1 : 0> common;                                                            \
    const float* const start = p.start + column;                                                  \
    sums.set(LOAD(start), LOAD(start + lanes), LOAD(start + 2 * lanes), LOAD(start + 3 * lanes)); \
    common.set(FLOATS{}, FLOATS{}, FLOATS{}, FLOATS{});                                           \
    const float* m = p.matrix + column;                                                           \
    const float* s = shared ? p.shared_matrix + column : m;                                       \
    const std::ptrdiff_t stride = p.x_stride, columns = p.columns;                                \
    for (int k = 0; k < p.inputs; ++k, m += columns, s += columns) {                              \
      sums.add(p.x + k, stride, LOAD(m), LOAD(m + lanes), LOAD(m + 2 * lanes),                    \
               LOAD(m + 3 * lanes));                                                              \
      if constexpr (shared)                                                                       \
        common.add(p.shared + k, 0, LOAD(s), LOAD(s + lanes), LOAD(s + 2 * lanes),                \
                   LOAD(s + 3 * lanes));                                                          \
    }                                                                                             \
    sums.store(p.out + column, columns);                                                          \
    if constexpr (shared) common.store(p.shared_out + column, columns);                           \
  }                                                                                               \
  template <bool shared>                                                                          \
  void NAME(const RowProducts& p, int rows, std::ptrdiff_t column) noexcept {                     \
    if (rows == 1) return NAME<1, shared>(p, column);                                             \
    if (rows == 2) return NAME<2, shared>(p, column);                                             \
    if constexpr (sizeof(FLOATS) == 64) { /* AVX2 has registers for two */                        \
      if (rows == 3) return NAME<3, shared>(p, column);                                           \
      if (rows == 4) return NAME<4, shared>(p, column);                                           \
      if (rows == 5) return NAME<5, shared>(p, column);                                           \
    }                                                                                             \
  }
KVMELD_ROW_PRODUCTS(row_products_avx2, KVMELD_TARGET_AVX2, FloatLanes, load_lanes, store_lanes,
                    fma_lanes)
KVMELD_ROW_PRODUCTS(row_products_avx512, KVMELD_TARGET_AVX512, WideFloats, load_wide, store_wide,
                    fma_wide)
#undef KVMELD_ROW_PRODUCTS

#endif  // KVMELD_X86_DISPATCH

/// Rows that one kernel takes at most.
[[nodiscard]] constexpr int product_rows(Isa isa) noexcept {
  return isa == Isa::avx512 ? 5 : isa == Isa::avx2 ? 2 : 8;
}

/// A share of `left` rows such that all shares are of like size, and none above `product_rows`.
[[nodiscard]] constexpr int next_rows(Isa isa, int left) noexcept {
  const int shares = (left + product_rows(isa) - 1) / product_rows(isa);
  return (left + shares - 1) / shares;
}

/// Multiplies any number of rows.
KVMELD_LAZY void multiply_rows([[maybe_unused]] Isa isa, RowProducts p, int rows) noexcept {
  while (rows > 0) {
    const int part = next_rows(isa, rows);
    for (std::ptrdiff_t column = 0; column < p.columns;) {
#if KVMELD_X86_DISPATCH
      if (isa == Isa::avx512 && p.columns - column >= 64) {
        p.shared != nullptr ? row_products_avx512<true>(p, part, column)
                            : row_products_avx512<false>(p, part, column);
        column += 64;
        continue;
      }
      if (isa != Isa::baseline) {
        for (int r = 0; r < part; r += 2) {  // a last half block of AVX-512, too
          RowProducts two = p;
          two.x += r * p.x_stride;
          two.out += r * p.columns;
          if (r > 0) two.shared = nullptr;
          const int n = part - r < 2 ? 1 : 2;
          two.shared != nullptr ? row_products_avx2<true>(two, n, column)
                                : row_products_avx2<false>(two, n, column);
        }
        column += 32;
        continue;
      }
#endif
      row_products_baseline(p, part, column);
      column += 32;
    }
    p.x += part * p.x_stride;
    p.out += part * p.columns;
    p.shared = nullptr;
    rows -= part;
  }
}

/// e^x as scale · (1 + q), for x in [−700, 700].
struct ShortExp {
  double scale;
  double q;
};

/// The expressions of `math::exp` with as many terms as a result in f32 needs: within 6e-9 of e^x,
/// in half the time.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE ShortExp short_exp(double x) noexcept {
  const double magic = fma(x, 0x1.71547652b82fep+0, integer_magic);
  const double k = magic - integer_magic;
  const double r = fma(-k, 0x1.62e42fefa39efp-1, x);  // |r| <= 0.3466
  double p = 1.0 / 5040;
  p = fma(p, r, 1.0 / 720);
  p = fma(p, r, 1.0 / 120);
  p = fma(p, r, 1.0 / 24);
  p = fma(p, r, 1.0 / 6);
  p = fma(p, r, 0.5);
  p = fma(p, r, 1.0);
  return {power_of_two(static_cast<std::int64_t>(double_bits(magic) - double_bits(integer_magic))),
          p * r};
}

/// A hidden unit: tanh of what its inputs add up to, within 1e-8 and rounded to f32. A sum that
/// overflowed both ways counts as a large one.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE float hidden_unit(float sum) noexcept {
  const double twice = 2.0 * static_cast<double>(sum);
  const double below = twice < 40.0 ? twice : 40.0;
  const ShortExp e = short_exp(below > -40.0 ? below : -40.0);
  // e^2x − 1, which keeps its relative precision near 0
  const double minus_one = fma(e.scale, e.q, e.scale - 1.0);
  return static_cast<float>(minus_one / (minus_one + 2.0));
}

/// What is added to a logit: a · b, n a multiple of 32, by the 32 lanes and tree of every reduction
/// within a row.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE float dot_lanes(const float* a, const float* b,
                                                             std::int32_t n) noexcept {
  float lanes[32];
  for (int l = 0; l < 32; ++l) lanes[l] = 0;
  for (std::int32_t at = 0; at < n; at += 32) {
    for (int l = 0; l < 32; ++l) lanes[l] = fma(a[at + l], b[at + l], lanes[l]);
  }
  for (int l = 0; l < 16; ++l) lanes[l] += lanes[l + 16];
  for (int l = 0; l < 8; ++l) lanes[l] += lanes[l + 8];
  for (int l = 0; l < 4; ++l) lanes[l] += lanes[l + 4];
  for (int l = 0; l < 2; ++l) lanes[l] += lanes[l + 2];
  return lanes[0] + lanes[1];
}

}  // namespace detail
KVMELD_NAMESPACE_END
