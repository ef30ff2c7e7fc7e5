#pragma once

/// The angle by which each channel pair turns from one position to the next.

#include <cstdint>
#include <vector>

#include <kvmeld/cache/rope.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// Farthest that keys are turned, in positions; with `max_rope_frequency` it keeps f64 angles below
/// 1e9, where they are sharp.
inline constexpr std::int64_t max_rope_shift = std::int64_t{1} << 24;

/// Fastest pair that is believed, in radians a position: a plain rope has 1, and stored divisors
/// hardly go below 1.
inline constexpr double max_rope_frequency = 32.0;

namespace detail {

inline constexpr double two_pi = 6.283185307179586476925;

/// Turns that a pair makes over the pre-training context: what llama3 and yarn decide by.
[[nodiscard]] inline double turns_over_context(const RopeSpec& rope, double frequency) noexcept {
  return static_cast<double>(rope.original_context) * frequency / two_pi;
}

/// Llama 3.1 (the `llama3` rope type of its published configuration): pairs that turn fewer than
/// `low_freq_factor` times over the original context are slowed by `factor`, those that turn more
/// than `high_freq_factor` times are kept, and between them the frequency is blended linearly in
/// the number of turns.
KVMELD_LAZY [[nodiscard]] double llama3_frequency(const RopeSpec& rope, double f) noexcept {
  const double turns = turns_over_context(rope, f);
  if (turns > rope.high_freq_factor) return f;
  if (turns < rope.low_freq_factor) return f / rope.factor;
  const double keep =
      (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return fma(f, keep, (f / rope.factor) * (1.0 - keep));
}

/// The index (real, in pairs) of the pair that turns `turns` times over the original context:
/// base^(-2x/r) * context = 2 pi turns, solved for x (YaRN, arXiv:2309.00071, appendix A.2).
KVMELD_LAZY [[nodiscard]] double yarn_index(const RopeSpec& rope, double turns) noexcept {
  const double r = static_cast<double>(rope.rotary_channels);
  return r * math::log(static_cast<double>(rope.original_context) / (turns * two_pi)) /
         (2.0 * math::log(rope.base));
}

/// Where YaRN's blend begins and ends, in pairs. The paper's ramp is linear in the number of turns;
/// the code published with it, and every engine since, makes it linear in the pair's index between
/// ends rounded outwards, and cached keys follow the engines.
struct YarnRamp {
  double low = 0.0;
  double high = 0.0;

  explicit YarnRamp(const RopeSpec& rope) noexcept {
    if (rope.scaling != RopeScaling::yarn) return;
    low = yarn_index(rope, rope.beta_fast);
    high = yarn_index(rope, rope.beta_slow);
    if (rope.yarn_truncate) {
      low = __builtin_floor(low);
      high = __builtin_ceil(high);
    }
    const double last =
        // channels, not pairs: as the published code has it
        static_cast<double>(rope.rotary_channels - 1);
    if (low < 0.0) low = 0.0;
    if (high > last) high = last;
    if (high - low < 0.001) high = low + 0.001;
  }

  /// Share of the slowed frequency in pair `i`: 0 before the ramp, 1 behind it.
  [[nodiscard]] double slowed(double i) const noexcept {
    const double x = (i - low) / (high - low);
    return x < 0.0 ? 0.0 : (x > 1.0 ? 1.0 : x);
  }
};

/// Dynamic NTK: the base for which the slowest pair turns over the longer context as often as it
/// did over the original one.
KVMELD_LAZY [[nodiscard]] double dynamic_base(const RopeSpec& rope,
                                              std::int64_t context_length) noexcept {
  if (context_length <= rope.original_context) return rope.base;
  const double r = static_cast<double>(rope.rotary_channels);
  const double stretch = rope.factor * static_cast<double>(context_length) /
                         static_cast<double>(rope.original_context);
  return rope.base * math::pow(stretch - (rope.factor - 1.0), r / (r - 2.0));
}

}  // namespace detail

/// Radians a position for every channel pair, in f64. (rotary_channels / 2)
///
/// `context_length` picks the frequencies of `dynamic_ntk` and `longrope` (the total length in
/// tokens, or the context size where the engine decides by that) and must be above 0 for them; the
/// others ignore it. `kind == none` yields an empty vector. Engines compute these in f32, often as
/// a running product, and may be off by some 1e-6 relative; angles then differ by that times the
/// position. Errors: those of `validate`; `invalid_argument` without a length where one is needed.
/// One power a pair.
KVMELD_LAZY [[nodiscard]] Result<std::vector<double>> inverse_frequencies(
    const RopeSpec& rope, std::int64_t context_length) {
  // The head size is not known here and does not matter: any that holds the rotary part will do.
  const std::int64_t end = static_cast<std::int64_t>(rope.first_channel) + rope.rotary_channels;
  const bool fits = end > 0 && end <= 0x7fffffff;
  if (Status status = validate(rope, fits ? static_cast<std::int32_t>(end) : 1); !status)
    return status;
  if (length_dependent(rope) && context_length <= 0)
    return detail::error(ErrorCode::invalid_argument,
                         "rope: frequencies depend on the context length, which is given as ",
                         context_length, "; pass the length that the keys were made for");
  std::vector<double> result;
  if (rope.kind == RopeKind::none) return result;
  const std::int32_t pairs = rope.rotary_channels / 2;
  const bool dynamic = rope.scaling == RopeScaling::dynamic_ntk;
  const double base = dynamic ? detail::dynamic_base(rope, context_length) : rope.base;
  const std::vector<float>& stretch =
      context_length > rope.original_context ? rope.long_factors : rope.short_factors;
  const detail::YarnRamp ramp(rope);
  result.reserve(static_cast<std::size_t>(pairs));
  for (std::int32_t i = 0; i < pairs; ++i) {
    const auto index = static_cast<std::size_t>(i);
    double f =
        math::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(rope.rotary_channels));
    switch (rope.scaling) {
      case RopeScaling::none:
      case RopeScaling::dynamic_ntk:
        break;
      case RopeScaling::linear:
        f /= rope.factor;
        break;
      case RopeScaling::llama3:
        f = detail::llama3_frequency(rope, f);
        break;
      case RopeScaling::yarn: {
        const double slowed = ramp.slowed(static_cast<double>(i));
        f = fma(f / rope.factor, slowed, f * (1.0 - slowed));
        break;
      }
      case RopeScaling::longrope:
        f /= static_cast<double>(stretch[index]);
        break;
      case RopeScaling::explicit_factors:
        f = f / rope.factor / static_cast<double>(rope.factors[index]);
        break;
    }
    if (!(f >= 0.0 && f <= max_rope_frequency))
      return detail::error(ErrorCode::invalid_argument, "rope: pair ", i, " turns by ", f,
                           " radians a position, more than ", max_rope_frequency,
                           "; check factor and divisors");
    result.push_back(f);
  }
  return result;
}

KVMELD_NAMESPACE_END
