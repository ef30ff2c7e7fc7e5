#pragma once

/// Matrices in the order in which vectors read them, and their product with a tile of tokens.
///
/// Every output is one chain of fma over ascending inputs, from the bias on. Lanes lie across
/// outputs and rows of registers across tokens, so that neither vector width nor the cut into
/// blocks changes a byte.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/align/linear_map.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::int32_t panel_outputs = 32;  ///< outputs that lie side by side
/// Inputs of a panel that stay in the first cache: 16 KiB.
inline constexpr std::int32_t block_inputs = 128;
inline constexpr std::int32_t tile_tokens = 56;  ///< tokens of one product

/// A dense matrix in f32, rounded once: (block of inputs, panel, input, output of the panel).
class PackedMatrix {
 public:
  PackedMatrix() = default;
  PackedMatrix(std::int32_t outputs, std::int32_t inputs, const double* weight, const double* bias)
      : outputs_(outputs),
        inputs_(inputs),
        bias_(padded_outputs(), 0.0F),
        weight_(padded_outputs() * static_cast<std::size_t>(inputs)) {
    for (std::int32_t o = 0; bias != nullptr && o < outputs; ++o)
      bias_[static_cast<std::size_t>(o)] = static_cast<float>(bias[o]);
    float* out = weight_.data();
    for (std::int32_t first = 0; first < inputs; first += block_inputs) {
      const std::int32_t last = (std::min)(first + block_inputs, inputs);
      for (std::int32_t panel = 0; panel < outputs; panel += panel_outputs) {
        for (std::int32_t i = first; i < last; ++i) {
          for (std::int32_t o = panel; o < panel + panel_outputs; ++o) {
            *out++ = o < outputs
                         ? static_cast<float>(weight[static_cast<std::int64_t>(o) * inputs + i])
                         : 0.0F;
          }
        }
      }
    }
  }

  [[nodiscard]] std::int32_t outputs() const noexcept { return outputs_; }
  [[nodiscard]] std::int32_t inputs() const noexcept { return inputs_; }
  /// Floats from one token's outputs to the next's.
  [[nodiscard]] std::size_t padded_outputs() const noexcept {
    return static_cast<std::size_t>((outputs_ + panel_outputs - 1) / panel_outputs * panel_outputs);
  }
  [[nodiscard]] const float* bias() const noexcept { return bias_.data(); }
  /// The panels of the inputs from `first` on, a multiple of `block_inputs`.
  [[nodiscard]] const float* panels(std::int32_t first) const noexcept {
    return weight_.data() + padded_outputs() * static_cast<std::size_t>(first);
  }

 private:
  std::int32_t outputs_ = 0;
  std::int32_t inputs_ = 0;
  std::vector<float> bias_;  // (padded outputs)
  std::vector<float> weight_;
};

/// The inputs of up to `tile_tokens` tokens: (block of inputs, token, input of the block), so that
/// strides are constants.
class InputTile {
 public:
  void resize(std::int32_t inputs) {
    const auto blocks = static_cast<std::size_t>((inputs + block_inputs - 1) / block_inputs);
    const std::size_t floats = blocks * block_floats;
    if (values_.size() < floats) values_.resize(floats);
  }
  /// Copies a token's inputs `first` to `first + n` − 1.
  void put(std::int32_t token, std::int32_t first, const float* from, std::int32_t n) noexcept {
    while (n > 0) {
      const std::int32_t at = first % block_inputs;
      const std::int32_t here = (std::min)(n, block_inputs - at);
      std::copy(from, from + here,
                values_.data() + block_floats * static_cast<std::size_t>(first / block_inputs) +
                    static_cast<std::size_t>(token * block_inputs + at));
      first += here;
      from += here;
      n -= here;
    }
  }
  [[nodiscard]] const float* block(std::int32_t first) const noexcept {
    return values_.data() + block_floats * static_cast<std::size_t>(first / block_inputs);
  }

 private:
  static constexpr auto block_floats = static_cast<std::size_t>(tile_tokens * block_inputs);
  std::vector<float> values_;
};

/// Continues the sums of some tokens and one panel by `n` inputs. `x`: (token, block_inputs), `y`:
/// (token, y_stride).
using ProductKernel = void (*)(const float* w, const float* x, std::int32_t n, float* y,
                               std::size_t y_stride) noexcept;

inline void product_baseline(const float* w, const float* x, std::int32_t n, float* y,
                             std::size_t) noexcept {
  float sums[panel_outputs];
  for (std::int32_t o = 0; o < panel_outputs; ++o) sums[o] = y[o];
  for (std::int32_t i = 0; i < n; ++i, w += panel_outputs) {
    KVMELD_KEEP_LOOP
    for (std::int32_t o = 0; o < panel_outputs; ++o) sums[o] = fma(x[i], w[o], sums[o]);
  }
  for (std::int32_t o = 0; o < panel_outputs; ++o) y[o] = sums[o];
}

#if KVMELD_X86_DISPATCH

[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats spread_wide(float x) noexcept {
  return WideFloats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes spread_lanes(float x) noexcept {
  return FloatLanes{x, x, x, x, x, x, x, x};
}

#define KVMELD_TOKENS_1(DO) DO(0)
#define KVMELD_TOKENS_4(DO) DO(0) DO(1) DO(2) DO(3)
#define KVMELD_TOKENS_6(DO) KVMELD_TOKENS_4(DO) DO(4) DO(5)
#define KVMELD_TOKENS_14(DO) KVMELD_TOKENS_6(DO) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13)

// Two vectors of sums a token, in named variables: compilers keep arrays of vectors in memory at
// -O2.
#define KVMELD_SUMS_LOAD(t)                  \
  auto a##t = KVMELD_LOAD(y + (t)*y_stride); \
  auto b##t = KVMELD_LOAD(y + (t)*y_stride + width);
#define KVMELD_SUMS_STEP(t)                                  \
  {                                                          \
    const auto x_t = KVMELD_SPREAD(x[(t)*block_inputs + i]); \
    a##t = KVMELD_FMA(x_t, w_a, a##t);                       \
    b##t = KVMELD_FMA(x_t, w_b, b##t);                       \
  }
#define KVMELD_SUMS_STORE(t)            \
  KVMELD_STORE(a##t, y + (t)*y_stride); \
  KVMELD_STORE(b##t, y + (t)*y_stride + width);
#define KVMELD_PRODUCT(NAME, TARGET, TOKENS)                                              \
  TARGET inline void NAME(const float* w, const float* x, std::int32_t n, float* y,       \
                          std::size_t y_stride) noexcept {                                \
    for (std::size_t part = 0; part < panel_outputs; part += 2 * width, y += 2 * width) { \
      const float* w_i = w + part;                                                        \
      TOKENS(KVMELD_SUMS_LOAD)                                                            \
      for (std::ptrdiff_t i = 0; i < n; ++i, w_i += panel_outputs) {                      \
        const auto w_a = KVMELD_LOAD(w_i);                                                \
        const auto w_b = KVMELD_LOAD(w_i + width);                                        \
        TOKENS(KVMELD_SUMS_STEP)                                                          \
      }                                                                                   \
      TOKENS(KVMELD_SUMS_STORE)                                                           \
    }                                                                                     \
  }

namespace product_avx512 {
inline constexpr std::size_t width = 16;
#define KVMELD_LOAD load_wide
#define KVMELD_STORE store_wide
#define KVMELD_SPREAD spread_wide
#define KVMELD_FMA fma_wide
KVMELD_PRODUCT(tokens_14, KVMELD_TARGET_AVX512, KVMELD_TOKENS_14)
KVMELD_PRODUCT(tokens_4, KVMELD_TARGET_AVX512, KVMELD_TOKENS_4)
KVMELD_PRODUCT(tokens_1, KVMELD_TARGET_AVX512, KVMELD_TOKENS_1)
#undef KVMELD_LOAD
#undef KVMELD_STORE
#undef KVMELD_SPREAD
#undef KVMELD_FMA
}  // namespace product_avx512

namespace product_avx2 {
inline constexpr std::size_t width = 8;
#define KVMELD_LOAD load_lanes
#define KVMELD_STORE store_lanes
#define KVMELD_SPREAD spread_lanes
#define KVMELD_FMA fma_lanes
KVMELD_PRODUCT(tokens_6, KVMELD_TARGET_AVX2, KVMELD_TOKENS_6)
KVMELD_PRODUCT(tokens_1, KVMELD_TARGET_AVX2, KVMELD_TOKENS_1)
#undef KVMELD_LOAD
#undef KVMELD_STORE
#undef KVMELD_SPREAD
#undef KVMELD_FMA
}  // namespace product_avx2

#undef KVMELD_PRODUCT
#undef KVMELD_SUMS_LOAD
#undef KVMELD_SUMS_STEP
#undef KVMELD_SUMS_STORE
#undef KVMELD_TOKENS_1
#undef KVMELD_TOKENS_4
#undef KVMELD_TOKENS_6
#undef KVMELD_TOKENS_14

#endif  // KVMELD_X86_DISPATCH

/// Kernels of one instruction set, widest first; the last takes one token.
struct ProductKernels {
  ProductKernel kernel[3];
  std::int32_t tokens[3];
};
[[nodiscard]] inline ProductKernels product_kernels(Isa isa) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512)
    return {{product_avx512::tokens_14, product_avx512::tokens_4, product_avx512::tokens_1},
            {14, 4, 1}};
  if (isa == Isa::avx2)
    return {{product_avx2::tokens_6, product_avx2::tokens_1, product_avx2::tokens_1}, {6, 1, 1}};
#else
  (void)isa;
#endif
  return {{product_baseline, product_baseline, product_baseline}, {1, 1, 1}};
}

/// y = W·x + b for a tile of tokens. `y`: (token, padded outputs), does not overlap the tile.
KVMELD_LAZY void multiply(const PackedMatrix& matrix, const InputTile& x, std::int32_t tokens,
                          Isa isa, float* y) {
  const std::size_t stride = matrix.padded_outputs();
  for (std::int32_t t = 0; t < tokens; ++t)
    std::copy(matrix.bias(), matrix.bias() + stride, y + static_cast<std::size_t>(t) * stride);
  const ProductKernels kernels = product_kernels(isa);
  for (std::int32_t first = 0; first < matrix.inputs(); first += block_inputs) {
    const std::int32_t n = (std::min)(block_inputs, matrix.inputs() - first);
    const float* w = matrix.panels(first);
    for (std::size_t panel = 0; panel < stride;
         panel += panel_outputs, w += static_cast<std::ptrdiff_t>(n) * panel_outputs) {
      std::int32_t t = 0;
      for (int k = 0; k < 3; ++k) {
        for (; t + kernels.tokens[k] <= tokens; t += kernels.tokens[k]) {
          kernels.kernel[k](w, x.block(first) + t * block_inputs, n,
                            y + static_cast<std::size_t>(t) * stride + panel, stride);
        }
      }
    }
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
