#pragma once

/// The arithmetic of merging attention states: the expression, its lane form, its rows on hosts.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <kvmeld/align/non_finite.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// The log-sum-exp of a state is a natural logarithm.
struct LseNatural {
  static constexpr double natural = 1.0;  ///< natural logarithms in one of these
};
/// The log-sum-exp of a state is a logarithm to base 2, as kernels that use `exp2` give it.
struct LseBase2 {
  static constexpr double natural = 0x1.62e42fefa39efp-1;  // ln 2
};

template <class B>
concept LseBase = std::same_as<B, LseNatural> || std::same_as<B, LseBase2>;

/// How two states of one (row, head) make one. A weight of 0 leaves its part out, whatever that
/// part's outputs hold.
struct LseMerge {
  float weight_a = 0;
  float weight_b = 0;
  float lse = 0;
};

/// Softmax of two log-sum-exps, and their own: max() is taken apart from −infinity, where the
/// difference would be NaN.
template <LseBase Base>
[[nodiscard]] KVMELD_HD inline LseMerge merge_lse(float a, float b) noexcept {
  const float top = a > b ? a : b;
  if (!(top > -__builtin_huge_valf())) return {0.0F, 0.0F, top};  // empty and empty is empty
  const double ea = math::exp((static_cast<double>(a) - static_cast<double>(top)) * Base::natural);
  const double eb = math::exp((static_cast<double>(b) - static_cast<double>(top)) * Base::natural);
  const double total = ea + eb;
  return {static_cast<float>(ea / total), static_cast<float>(eb / total),
          static_cast<float>(static_cast<double>(top) + math::log(total) / Base::natural)};
}

/// One channel of the merged output. Products are rounded before they meet, so that the order of a
/// and b leaves no trace.
[[nodiscard]] KVMELD_HD inline float merge_outputs(const LseMerge& merge, float a,
                                                   float b) noexcept {
  if (merge.weight_b == 0.0F) return merge.weight_a == 0.0F ? 0.0F : a;
  if (merge.weight_a == 0.0F) return b;
  return fma(merge.weight_a, a, 0.0F) + fma(merge.weight_b, b, 0.0F);
}

namespace detail {

/// A state without its sizes.
struct StateRows {
  const float* outputs = nullptr;  // (row · head, channel)
  const float* lse = nullptr;      // (row · head)
};

/// Merges two states, one (row, head) a row. Models `RowWork`: what `lse` holds is read before any
/// lane writes, so that the output may be an input.
template <LseBase Base>
struct MergeStatesWork {
  using State = LseMerge;

  StateRows a, b;
  float* outputs = nullptr;
  float* lse = nullptr;
  std::int64_t channels = 0;

  [[nodiscard]] KVMELD_HD LseMerge partial(std::int64_t row, int lane) const noexcept {
    return lane == 0 ? merge_lse<Base>(a.lse[row], b.lse[row])
                     : LseMerge{0.0F, 0.0F, -__builtin_huge_valf()};
  }
  [[nodiscard]] KVMELD_HD static LseMerge join(LseMerge x, LseMerge y) noexcept {
    return x.weight_a + x.weight_b > 0.0F ? x : y;
  }
  KVMELD_HD void finish(std::int64_t row, int lane, LseMerge merge) const noexcept {
    for (std::int64_t c = row * channels + lane; c < (row + 1) * channels; c += lanes_per_row)
      outputs[c] = merge_outputs(merge, a.outputs[c], b.outputs[c]);
    if (lane == 0) lse[row] = merge.lse;
  }
};

/// Whether `size` is a · b · c, none of which is negative or above 2^48.
[[nodiscard]] inline bool equals_product(std::size_t size, std::int64_t a, std::int64_t b,
                                         std::int64_t c) noexcept {
  std::size_t product = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(a), static_cast<std::size_t>(b), &product))
    return false;
  return !__builtin_mul_overflow(product, static_cast<std::size_t>(c), &product) && product == size;
}

[[nodiscard]] inline bool any_overlap(std::span<const float> a, std::span<const float> b) noexcept {
  const auto x = reinterpret_cast<std::uintptr_t>(a.data()),
             y = reinterpret_cast<std::uintptr_t>(b.data());
  return !a.empty() && !b.empty() && x < y + b.size_bytes() && y < x + a.size_bytes();
}
[[nodiscard]] inline bool partly_overlap(std::span<const float> a,
                                         std::span<const float> b) noexcept {
  return a.data() != b.data() && any_overlap(a, b);
}

/// The first (row, head) whose sum is NaN or +infinity, or that is not empty and whose outputs are
/// not finite; −1: none is.
[[nodiscard]] inline std::int64_t first_bad_row(const float* outputs, const float* lse,
                                                std::int64_t rows, std::int64_t channels) noexcept {
  const Isa isa = best_isa();
  for (std::int64_t r = 0; r < rows; ++r) {
    if (!(lse[r] < __builtin_huge_valf())) return r;
    if (lse[r] > -__builtin_huge_valf() &&
        has_non_finite(isa, outputs + r * channels, static_cast<std::size_t>(channels)))
      return r;
  }
  return -1;
}

/// Weights of all states in one (row, head), and the log-sum-exp of all: of two, the bits of
/// `merge_lse`.
template <LseBase Base>
[[nodiscard]] float state_weights(std::span<const StateRows> states, std::size_t row,
                                  std::span<float> weights) noexcept {
  float top = -__builtin_huge_valf();
  for (const StateRows& s : states) top = s.lse[row] > top ? s.lse[row] : top;
  double total = 0;
  const auto mass = [&](const StateRows& s) {
    return math::exp((static_cast<double>(s.lse[row]) - static_cast<double>(top)) * Base::natural);
  };
  if (!(top > -__builtin_huge_valf())) {
    for (float& w : weights) w = 0.0F;
    return top;
  }
  for (const StateRows& s : states) total += mass(s);
  for (std::size_t i = 0; i < states.size(); ++i)
    weights[i] = static_cast<float>(mass(states[i]) / total);
  return static_cast<float>(static_cast<double>(top) + math::log(total) / Base::natural);
}

/// out[row] = Σ weight · outputs[row], states in order, in blocks that are read before they are
/// written.
KVMELD_ALWAYS_INLINE void merge_row_body(std::span<const StateRows> states,
                                         std::span<const float> weights, std::size_t row,
                                         std::size_t channels, float* out) noexcept {
  constexpr std::size_t block = 32;
  std::size_t used = 0;
  for (const float w : weights) used += w != 0.0F ? 1 : 0;
  for (std::size_t at = 0; at < channels; at += block) {
    const std::size_t n = channels - at < block ? channels - at : block;
    float acc[block] = {};
    bool started = false;
    for (std::size_t i = 0; i < states.size(); ++i) {
      const float w = weights[i];
      const float* const in = states[i].outputs + row * channels + at;
      if (w == 0.0F) continue;
      if (used == 1) {  // the identity, to the bit
        for (std::size_t c = 0; c < n; ++c) acc[c] = in[c];
        break;
      }
      if (n == block) {
        float product[block];
        for (std::size_t c = 0; c < block; ++c) product[c] = fma(w, in[c], 0.0F);
        for (std::size_t c = 0; c < block; ++c) acc[c] = started ? acc[c] + product[c] : product[c];
      } else {
        for (std::size_t c = 0; c < n; ++c) {
          const float product = fma(w, in[c], 0.0F);
          acc[c] = started ? acc[c] + product : product;
        }
      }
      started = true;
    }
    for (std::size_t c = 0; c < n; ++c) out[row * channels + at + c] = acc[c];
  }
}
KVMELD_NOINLINE inline void merge_row_baseline(std::span<const StateRows> states,
                                               std::span<const float> weights, std::size_t row,
                                               std::size_t channels, float* out) noexcept {
  merge_row_body(states, weights, row, channels, out);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void merge_row_avx2(std::span<const StateRows> states,
                                                              std::span<const float> weights,
                                                              std::size_t row, std::size_t channels,
                                                              float* out) noexcept {
  merge_row_body(states, weights, row, channels, out);
}
inline void merge_row(Isa isa, std::span<const StateRows> states, std::span<const float> weights,
                      std::size_t row, std::size_t channels, float* out) noexcept {
  isa == Isa::baseline ? merge_row_baseline(states, weights, row, channels, out)
                       : merge_row_avx2(states, weights, row, channels, out);
}

}  // namespace detail
KVMELD_NAMESPACE_END
