#pragma once

/// Bodies of rope.hpp: frequencies, tables, and the rotation of stored rows.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Rotates one f32 row in place.
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void rotate_row_avx2(const Rotation& rotation,
                                                               float* row) noexcept {
  rotate_row(rotation.pairing, rotation.first_channel, rotation.rotary_channels, rotation.table,
             row);
}
KVMELD_NOINLINE inline void rotate_row_baseline(const Rotation& rotation, float* row) noexcept {
  rotate_row(rotation.pairing, rotation.first_channel, rotation.rotary_channels, rotation.table,
             row);
}

}  // namespace detail

namespace extend {

KVMELD_API void rotate_channels(const Rotation& rotation, Isa isa, float* row) noexcept {
  isa == Isa::baseline ? detail::rotate_row_baseline(rotation, row)
                       : detail::rotate_row_avx2(rotation, row);
}

}  // namespace extend

KVMELD_API RopeSpec RopeSpec::rotary(std::int32_t channels, double base, RopePairing pairing) {
  RopeSpec rope;
  rope.kind = RopeKind::rotary;
  rope.pairing = pairing;
  rope.rotary_channels = channels;
  rope.base = base;
  return rope;
}

KVMELD_API RopeSpec RopeSpec::longrope(RopeSpec plain, std::vector<float> short_factors,
                                       std::vector<float> long_factors,
                                       std::int32_t original_context) {
  RopeSpec rope = scaled(std::move(plain), RopeScaling::longrope, 1.0, original_context);
  rope.short_factors = std::move(short_factors);
  rope.long_factors = std::move(long_factors);
  return rope;
}

KVMELD_API RopeSpec RopeSpec::scaled(RopeSpec plain, RopeScaling scaling, double factor,
                                     std::int32_t original_context) {
  plain.scaling = scaling;
  plain.factor = factor;
  plain.original_context = original_context;
  return plain;
}

namespace detail {

/// Refuses a spec whose kind was never said.
[[nodiscard]] inline Status check_declared(const RopeSpec& rope) {
  if (rope.kind != RopeKind::undeclared) return {};
  return error(ErrorCode::invalid_argument,
               "rope: nobody said how keys are rotated (kind undeclared, ", rope.rotary_channels,
               " rotary channels); write RopeSpec::rotary(channels, base, pairing), or ",
               "RopeSpec::none() for keys without position");
}

[[nodiscard]] inline Status check_factors(const std::vector<float>& factors, std::int32_t pairs,
                                          const char* name) {
  if (factors.size() != static_cast<std::size_t>(pairs))
    return error(ErrorCode::invalid_argument, "rope: ", name, " holds ", factors.size(),
                 " values for ", pairs, " channel pairs; give one for each pair");
  for (std::size_t i = 0; i < factors.size(); ++i)
    if (!finite_positive(static_cast<double>(factors[i])))
      return error(ErrorCode::invalid_argument, "rope: ", name, "[", i, "] is ", factors[i],
                   "; divisors are finite and above 0");
  return {};
}

[[nodiscard]] inline Status check_scaling(const RopeSpec& rope) {
  const std::int32_t pairs = rope.rotary_channels / 2;
  const RopeScaling s = rope.scaling;
  if (!finite_positive(rope.attention_factor))
    return error(ErrorCode::invalid_argument, "rope: attention_factor is ", rope.attention_factor,
                 "; it is finite and above 0");
  if (s == RopeScaling::none) return {};
  if (s != RopeScaling::longrope && !finite_positive(rope.factor))
    return error(ErrorCode::invalid_argument, "rope: factor is ", rope.factor,
                 "; it is finite and above 0");
  if ((s == RopeScaling::llama3 || s == RopeScaling::yarn || s == RopeScaling::dynamic_ntk) &&
      rope.factor < 1.0)
    return error(ErrorCode::invalid_argument, "rope: factor is ", rope.factor,
                 "; this scaling extends, so it is at least 1");
  if (s != RopeScaling::linear && s != RopeScaling::explicit_factors && rope.original_context <= 0)
    return error(ErrorCode::invalid_argument, "rope: original_context is ", rope.original_context,
                 "; this scaling needs the pre-training context in tokens");
  switch (s) {
    case RopeScaling::llama3:
      if (!finite_positive(rope.low_freq_factor) || !finite_positive(rope.high_freq_factor) ||
          rope.low_freq_factor >= rope.high_freq_factor)
        return error(ErrorCode::invalid_argument,
                     "rope: llama3 needs 0 < low_freq_factor < high_freq_factor, got ",
                     rope.low_freq_factor, " and ", rope.high_freq_factor);
      return {};
    case RopeScaling::yarn:
      if (!finite_positive(rope.beta_slow) || !finite_positive(rope.beta_fast) ||
          rope.beta_slow >= rope.beta_fast)
        return error(ErrorCode::invalid_argument,
                     "rope: yarn needs 0 < beta_slow < beta_fast, got ", rope.beta_slow, " and ",
                     rope.beta_fast);
      return {};
    case RopeScaling::longrope:
      KVMELD_TRY(check_factors(rope.short_factors, pairs, "short_factors"));
      return check_factors(rope.long_factors, pairs, "long_factors");
    case RopeScaling::dynamic_ntk:
      if (rope.rotary_channels <= 2)
        return error(ErrorCode::invalid_argument,
                     "rope: dynamic_ntk needs more than 2 rotary channels, got ",
                     rope.rotary_channels);
      return {};
    case RopeScaling::explicit_factors:
      return check_factors(rope.factors, pairs, "factors");
    case RopeScaling::none:
    case RopeScaling::linear:
      return {};
  }
  return error(ErrorCode::unknown_field, "rope: scaling ", static_cast<int>(s),
               " is none that this build knows");
}

}  // namespace detail

KVMELD_API Status validate(const RopeSpec& rope, std::int32_t channels) {
  using extend::error;
  if (channels <= 0)
    return error(ErrorCode::invalid_argument, "rope: a head of ", channels, " channels");
  KVMELD_TRY(detail::check_declared(rope));
  if (rope.kind == RopeKind::multi_axis)
    return error(ErrorCode::rope_unsupported,
                 "rope: keys with several position axes (M-RoPE) cannot be shifted by one number; ",
                 "keep such fragments at their positions or seal their keys before rotation");
  if (rope.kind == RopeKind::none) {
    if (rope.rotary_channels != 0 || rope.first_channel != 0)
      return error(ErrorCode::invalid_argument, "rope: kind none with ", rope.rotary_channels,
                   " rotary channels from channel ", rope.first_channel,
                   " on contradicts itself; write RopeSpec::rotary(channels, base, pairing) or "
                   "RopeSpec::none()");
    if (rope.scaling != RopeScaling::none)
      return error(ErrorCode::invalid_argument, "rope: kind none with scaling ",
                   static_cast<int>(rope.scaling),
                   " contradicts itself; scale a RopeSpec::rotary(channels, base, pairing)");
    return {};
  }
  if (rope.kind != RopeKind::rotary)
    return error(ErrorCode::unknown_field, "rope: kind ", static_cast<int>(rope.kind),
                 " is none that this build knows");
  if (rope.pairing != RopePairing::interleaved && rope.pairing != RopePairing::half_split)
    return error(ErrorCode::unknown_field, "rope: pairing ", static_cast<int>(rope.pairing),
                 " is none that this build knows");
  if (rope.rotary_channels <= 0 || rope.rotary_channels % 2 != 0)
    return error(ErrorCode::invalid_argument, "rope: rotary_channels is ", rope.rotary_channels,
                 "; it is even and above 0");
  if (rope.first_channel < 0 || rope.rotary_channels > channels ||
      rope.first_channel > channels - rope.rotary_channels)
    return error(ErrorCode::invalid_argument, "rope: channels ", rope.first_channel, " to ",
                 static_cast<std::int64_t>(rope.first_channel) + rope.rotary_channels,
                 " do not fit a head of ", channels);
  if (!detail::finite_positive(rope.base) || rope.base <= 1.0)
    return error(ErrorCode::invalid_argument, "rope: base is ", rope.base,
                 "; it is finite and above 1");
  return detail::check_scaling(rope);
}

KVMELD_API Status check_shift(const RopeSpec& rope, std::int64_t source_length,
                              std::int64_t target_length) {
  using extend::error;
  KVMELD_TRY(detail::check_declared(rope));
  if (rope.kind == RopeKind::multi_axis)
    return error(ErrorCode::rope_unsupported,
                 "rope: keys with several position axes (M-RoPE) cannot be shifted by one number");
  if (source_length < 0 || target_length < 0)
    return error(ErrorCode::invalid_argument, "rope: context lengths ", source_length, " and ",
                 target_length, "; neither may be negative");
  if (!length_dependent(rope)) return {};
  const std::int64_t original = rope.original_context;
  const bool source_beyond = source_length > original;
  const bool target_beyond = target_length > original;
  const bool same = rope.scaling == RopeScaling::longrope
                        ? source_beyond == target_beyond
                        : (!source_beyond && !target_beyond) || source_length == target_length;
  if (same) return {};
  return error(ErrorCode::rope_length_dependent, "rope: frequencies change between contexts of ",
               source_length, " and ", target_length, " tokens (original context ", original,
               "), so stored keys cannot be shifted; recompute them, or seal them before rotation");
}

namespace detail {

inline constexpr double two_pi = 6.283185307179586476925;

/// Turns that a pair makes over the pre-training context: what llama3 and yarn decide by.
[[nodiscard]] inline double turns_over_context(const RopeSpec& rope, double frequency) noexcept {
  return static_cast<double>(rope.original_context) * frequency / two_pi;
}

/// Llama 3.1 (the `llama3` rope type of its published configuration): pairs that rotation fewer
/// than `low_freq_factor` times over the original context are slowed by `factor`, those that
/// rotation more than `high_freq_factor` times are kept, and between them the frequency is blended
/// linearly in the number of turns.
[[nodiscard]] inline double llama3_frequency(const RopeSpec& rope, double f) noexcept {
  const double rotates = turns_over_context(rope, f);
  if (rotates > rope.high_freq_factor) return f;
  if (rotates < rope.low_freq_factor) return f / rope.factor;
  const double keep =
      (rotates - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return fma(f, keep, (f / rope.factor) * (1.0 - keep));
}

/// The index (real, in pairs) of the pair that turns `turns` times over the original context:
/// base^(-2x/r) * context = 2 pi turns, solved for x (YaRN, arXiv:2309.00071, appendix A.2).
[[nodiscard]] inline double yarn_index(const RopeSpec& rope, double rotates) noexcept {
  const double r = static_cast<double>(rope.rotary_channels);
  return r * math::log(static_cast<double>(rope.original_context) / (rotates * two_pi)) /
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
[[nodiscard]] inline double dynamic_base(const RopeSpec& rope,
                                         std::int64_t context_length) noexcept {
  if (context_length <= rope.original_context) return rope.base;
  const double r = static_cast<double>(rope.rotary_channels);
  const double stretch = rope.factor * static_cast<double>(context_length) /
                         static_cast<double>(rope.original_context);
  return rope.base * math::pow(stretch - (rope.factor - 1.0), r / (r - 2.0));
}

}  // namespace detail

KVMELD_API Result<std::vector<double>> inverse_frequencies(const RopeSpec& rope,
                                                           std::int64_t context_length) {
  // The head size is not known here and does not matter: any that holds the rotary part will do.
  const std::int64_t end = static_cast<std::int64_t>(rope.first_channel) + rope.rotary_channels;
  const bool fits = end > 0 && end <= 0x7fffffff;
  if (Status status = validate(rope, fits ? static_cast<std::int32_t>(end) : 1); !status)
    return status;
  if (length_dependent(rope) && context_length <= 0)
    return extend::error(ErrorCode::invalid_argument,
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
      return extend::error(ErrorCode::invalid_argument, "rope: pair ", i, " turns by ", f,
                           " radians a position, more than ", max_rope_frequency,
                           "; check factor and divisors");
    result.push_back(f);
  }
  return result;
}

namespace detail {

/// One table row, 8 pairs at a time so that the f64 routines become vector code.
KVMELD_ALWAYS_INLINE void fill_rope_row(double shift, const double* frequencies, std::size_t pairs,
                                        float* row) noexcept {
  constexpr std::size_t block = 8;
  std::size_t i = 0;
  for (; i + block <= pairs; i += block) {
    float cosines[block], sines[block];
    for (std::size_t j = 0; j < block; ++j) {
      const math::SinCos at = math::sin_cos(shift * frequencies[i + j]);
      cosines[j] = static_cast<float>(at.cos);
      sines[j] = static_cast<float>(at.sin);
    }
    for (std::size_t j = 0; j < block; ++j) row[i + j] = cosines[j];
    for (std::size_t j = 0; j < block; ++j) row[pairs + i + j] = sines[j];
  }
  for (; i < pairs; ++i) {
    const math::SinCos at = math::sin_cos(shift * frequencies[i]);
    row[i] = static_cast<float>(at.cos);
    row[pairs + i] = static_cast<float>(at.sin);
  }
}

inline void fill_rope_row_baseline(double shift, const double* frequencies, std::size_t pairs,
                                   float* row) noexcept {
  fill_rope_row(shift, frequencies, pairs, row);
}

KVMELD_TARGET_AVX2 inline void fill_rope_row_avx2(double shift, const double* frequencies,
                                                  std::size_t pairs, float* row) noexcept {
  fill_rope_row(shift, frequencies, pairs, row);
}

KVMELD_TARGET_AVX512 inline void fill_rope_row_avx512(double shift, const double* frequencies,
                                                      std::size_t pairs, float* row) noexcept {
  fill_rope_row(shift, frequencies, pairs, row);
}

/// The row filler for an instruction set; bytes are the same for each.
[[nodiscard]] inline auto rope_row_filler(Isa isa) noexcept {
  return isa == Isa::avx512 ? fill_rope_row_avx512
         : isa == Isa::avx2 ? fill_rope_row_avx2
                            : fill_rope_row_baseline;
}

}  // namespace detail

KVMELD_API Result<RopeTable> RopeTable::build(const RopeSpec& rope,
                                              std::span<const std::int64_t> shifts,
                                              std::int64_t context_length) {
  for (std::size_t s = 0; s < shifts.size(); ++s)
    if (shifts[s] > max_rope_shift || shifts[s] < -max_rope_shift)
      return extend::error(ErrorCode::invalid_argument, "rope: shift ", s, " is ", shifts[s],
                           ", beyond ", max_rope_shift, " positions");
  const Result<std::vector<double>> frequencies = inverse_frequencies(rope, context_length);
  if (!frequencies) return frequencies.error();
  RopeTable table;
  table.pairs_ = frequencies->size();
  table.rows_ = shifts.size();
  table.blocks_per_row_ = (2 * table.pairs_ + Block::size - 1) / Block::size;
  table.blocks_.resize(table.rows_ * table.blocks_per_row_);
  if (table.pairs_ == 0) return table;  // no rope: rows hold nothing and have no address
  const auto fill = detail::rope_row_filler(best_isa());
  for (std::size_t s = 0; s < table.rows_; ++s)
    fill(static_cast<double>(shifts[s]), frequencies->data(), table.pairs_, table.mutable_row(s));
  return table;
}

#if KVMELD_X86_DISPATCH

namespace detail {

/// Whether `turn_rows_wide` takes rows of this shape: all channels turn, and vectors fill them.
[[nodiscard]] inline bool rotates_wide(const Rotation& rotation) noexcept {
  return rotation.first_channel == 0 && rotation.rotary_channels == rotation.channels &&
         rotation.channels % (rotation.pairing == RopePairing::half_split ? 64 : 32) == 0;
}

template <bool streams>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void put_wide(WideFloats even, WideFloats odd,
                                                        std::byte* out) noexcept {
  const WideWords words = Avx512Lanes32<ElementType::bf16>::round(even, odd);
  if constexpr (streams) {
    stream_wide(words, out);
  } else {
    *reinterpret_cast<unaligned_vector_t<unsigned, 64>*>(out) = words;
  }
}

/// One row: the expressions of `rotate_pair`. A 32-bit word holds channels 2i and 2i + 1, for
/// interleaved rows one pair.
template <bool streams>
KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE void rotate_row_wide(bool halves, std::int32_t half,
                                                               const float* cos, const float* sin,
                                                               const std::byte* in,
                                                               std::byte* out) noexcept {
  if (!halves) {
    for (std::int32_t i = 0; i < half; i += 16) {
      const auto words = reinterpret_cast<WideWords>(load_wide(in + 4 * i));
      const auto a = reinterpret_cast<WideFloats>(words << 16),
                 b = reinterpret_cast<WideFloats>(words & 0xffff0000U);
      const WideFloats c = load_wide(cos + i), s = load_wide(sin + i);
      put_wide<streams>(fma_wide(a, c, -(b * s)), fma_wide(a, s, b * c), out + 4 * i);
    }
    return;
  }
  const std::int64_t second = 2 * std::int64_t{half};
  for (std::int32_t i = 0; i < half; i += 32) {
    const auto first_words = reinterpret_cast<WideWords>(load_wide(in + 2 * i));
    const auto second_words = reinterpret_cast<WideWords>(load_wide(in + second + 2 * i));
    const auto a = reinterpret_cast<WideFloats>(first_words << 16),
               a2 = reinterpret_cast<WideFloats>(first_words & 0xffff0000U);
    const auto b = reinterpret_cast<WideFloats>(second_words << 16),
               b2 = reinterpret_cast<WideFloats>(second_words & 0xffff0000U);
    const WideFloats c = load_wide(cos + i), c2 = load_wide(cos + i + 16);
    const WideFloats s = load_wide(sin + i), s2 = load_wide(sin + i + 16);
    put_wide<streams>(fma_wide(a, c, -(b * s)), fma_wide(a2, c2, -(b2 * s2)), out + 2 * i);
    put_wide<streams>(fma_wide(a, s, b * c), fma_wide(a2, s2, b2 * c2), out + second + 2 * i);
  }
}

/// Rotates rows that follow each other on both sides by one angle. Where they stream, `out` is a
/// multiple of 64.
inline KVMELD_TARGET_AVX512 KVMELD_NOINLINE void rotate_rows_wide(const Rotation& rotation,
                                                                  const std::byte* in,
                                                                  std::byte* out, std::int64_t rows,
                                                                  bool streams) noexcept {
  constexpr std::int32_t most = 512;
  alignas(64) float cos[most];
  alignas(64) float sin[most];
  const std::int32_t half = rotation.rotary_channels / 2;
  const bool halves = rotation.pairing == RopePairing::half_split;
  // of each 32 pairs the even ones, then the odd ones, as words hold them
  for (std::int32_t i = 0; i < half; ++i) {
    const std::int32_t at = halves ? i / 32 * 32 + i % 2 * 16 + i % 32 / 2 : i;
    cos[at] = rotation.table[i];
    sin[at] = rotation.table[half + i];
  }
  const std::int64_t bytes = 2 * std::int64_t{rotation.channels};
  std::int64_t row = 0;
  if (!streams) {
    for (; row < rows; ++row) {
      const std::int64_t at = row * bytes;
      for (std::int64_t line = 0; line < bytes; line += 64) {
        __builtin_prefetch(in + at + stream_ahead + line);
        __builtin_prefetch(out + at + stream_ahead + line, 1);
      }
      rotate_row_wide<false>(halves, half, cos, sin, in + at, out + at);
    }
    return;
  }
  const std::int64_t stretch = bytes < stream_stretch ? stream_stretch / bytes : 1;
  for (; streams_four_pages() && row + 4 * stretch <= rows; row += 4 * stretch) {
    const std::int64_t ahead = row + 8 * stretch <= rows ? 4 * stretch * bytes : 0;
    for (std::int64_t k = row; k < row + stretch; ++k) {
      for (std::int64_t at = k * bytes, i = 0; i < 4; ++i, at += stretch * bytes) {
        for (std::int64_t line = 0; line < bytes; line += 64)
          __builtin_prefetch(in + at + ahead + line);
        rotate_row_wide<true>(halves, half, cos, sin, in + at, out + at);
      }
    }
  }
  for (; row < rows; ++row) {
    const std::int64_t at = row * bytes;
    for (std::int64_t line = 0; line < bytes; line += 64)
      __builtin_prefetch(in + at + stream_ahead + line);
    rotate_row_wide<true>(halves, half, cos, sin, in + at, out + at);
  }
}

/// The factors of one rotation, ordered as the vectors of a type take them.
struct RotationTables {
  alignas(32) float first[1024];
  alignas(32) float second[1024];

  /// Half split: the cosines and sines of each 16 pairs in `Lanes16` order.
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void halves(const float* cos, const float* sin,
                                                      std::int32_t half) noexcept {
    for (std::int32_t i = 0; i + 16 <= half; i += 16) {
      order<type>(cos + i, first + i);
      order<type>(sin + i, second + i);
    }
  }
  /// Interleaved pairs (a, b) become fma((a, a), (cos, sin), (b, b) * (-sin, cos)).
  void pairs(const float* cos, const float* sin, std::int32_t half) noexcept {
    for (std::int32_t i = 0; i < half; ++i) {
      first[2 * i] = cos[i];
      first[2 * i + 1] = sin[i];
      second[2 * i] = -sin[i];
      second[2 * i + 1] = cos[i];
    }
  }

 private:
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void order(const float* in, float* out) noexcept {
    const FloatLanes a = load_lanes(in);
    const FloatLanes b = load_lanes(in + 8);
    if constexpr (Lanes16<type>::even_odd) {
      store_lanes(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14), out);
      store_lanes(__builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15), out + 8);
    } else {
      store_lanes(a, out);
      store_lanes(b, out + 8);
    }
  }
};

/// The pairs of one row from `i` on that vectors do not fill.
template <ElementType type>
KVMELD_NOINLINE void rotate_rest(Rotation rotation, std::int32_t i, const std::byte* in,
                                 std::byte* out) noexcept {
  const std::int32_t half = rotation.rotary_channels / 2;
  const bool halves = rotation.pairing == RopePairing::half_split;
  for (; i < half; ++i) {
    const std::int32_t first = rotation.first_channel + (halves ? i : 2 * i);
    const std::int32_t second = first + (halves ? half : 1);
    float a = load_one<type>(in, first);
    float b = load_one<type>(in, second);
    rotate_pair(a, b, rotation.table[i], rotation.table[half + i]);
    store_one<type>(out, first, a);
    store_one<type>(out, second, b);
  }
}

/// Writes one vector past the caches; `out` is a multiple of its size.
template <int bytes>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void stream_piece(const std::byte* in,
                                                          std::byte* out) noexcept {
  typedef vector_t<long long, bytes> Stored;
  const Stored piece = *reinterpret_cast<const unaligned_vector_t<long long, bytes>*>(in);
#if defined(__clang__)
  __builtin_nontemporal_store(piece, reinterpret_cast<Stored*>(out));
#else
  if constexpr (bytes == 16) {
    __builtin_ia32_movntdq(reinterpret_cast<Stored*>(out), piece);
  } else {
    __builtin_ia32_movntdq256(reinterpret_cast<Stored*>(out), piece);
  }
#endif
}

/// Writes vectors as `Lanes` stores them, past the caches where they stream. What is stored stays
/// in registers.
template <class Lanes, int piece, bool streams, int bytes = piece, class... Vectors>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void put_lanes(std::byte* out,
                                                       Vectors... vectors) noexcept {
  if constexpr (streams) {
    alignas(32) std::byte stored[std::size_t{bytes}];
    Lanes::store(vectors..., stored);
    for (int at = 0; at < bytes; at += piece) stream_piece<piece>(stored + at, out + at);
  } else {
    Lanes::store(vectors..., out);
  }
}

/// Rotates one row: `rotate_pair`, lane by lane.
template <ElementType type, bool streams>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void rotate_row_lanes(const Rotation& rotation,
                                                              const RotationTables& tables,
                                                              const std::byte* in,
                                                              std::byte* out) noexcept {
  using Lanes = Lanes16<type>;
  constexpr std::int64_t size = block_bytes(type);
  constexpr int piece = type == ElementType::f16 ? 16 : 32;  // bytes of one vector as it is stored
  const std::int32_t half = rotation.rotary_channels / 2;
  const float* const cos = rotation.table;
  const float* const sin = rotation.table + half;
  const std::int64_t first = rotation.first_channel * size;
  const std::int64_t tail = (rotation.first_channel + rotation.rotary_channels) * size;
  const std::int64_t end = rotation.channels * size;
  if (first != 0) std::memcpy(out, in, static_cast<std::size_t>(first));
  if (tail != end) std::memcpy(out + tail, in + tail, static_cast<std::size_t>(end - tail));
  std::int32_t i = 0;  // pairs done
  FloatLanes a, b, a2, b2;
  if (rotation.pairing == RopePairing::half_split) {
    const std::byte* const a_in = in + first;
    const std::byte* const b_in = a_in + half * size;
    std::byte* const a_out = out + first;
    std::byte* const b_out = a_out + half * size;
    for (; i + 16 <= half; i += 16) {
      const FloatLanes c = load_lanes(tables.first + i), c2 = load_lanes(tables.first + i + 8);
      const FloatLanes s = load_lanes(tables.second + i), s2 = load_lanes(tables.second + i + 8);
      Lanes::load(a_in + i * size, a, a2);
      Lanes::load(b_in + i * size, b, b2);
      put_lanes<Lanes, piece, streams, 16 * size>(a_out + i * size, fma_lanes(a, c, -(b * s)),
                                                  fma_lanes(a2, c2, -(b2 * s2)));
      put_lanes<Lanes, piece, streams, 16 * size>(b_out + i * size, fma_lanes(a, s, b * c),
                                                  fma_lanes(a2, s2, b2 * c2));
    }
    if (!streams && i + 8 <= half) {
      const FloatLanes c = load_lanes(cos + i), s = load_lanes(sin + i);
      a = Lanes8<type>::load(a_in + i * size);
      b = Lanes8<type>::load(b_in + i * size);
      Lanes8<type>::store(fma_lanes(a, c, -(b * s)), a_out + i * size);
      Lanes8<type>::store(fma_lanes(a, s, b * c), b_out + i * size);
      i += 8;
    }
  } else if constexpr (Lanes::even_odd) {
    for (; i + 8 <= half; i += 8) {
      const FloatLanes c = load_lanes(cos + i), s = load_lanes(sin + i);
      Lanes::load(in + first + 2 * i * size, a, b);
      put_lanes<Lanes, piece, streams>(out + first + 2 * i * size, fma_lanes(a, c, -(b * s)),
                                       fma_lanes(a, s, b * c));
    }
  } else {
    for (; i + 4 <= half; i += 4) {
      const FloatLanes v = Lanes8<type>::load(in + first + 2 * i * size);
      a = __builtin_shufflevector(v, v, 0, 0, 2, 2, 4, 4, 6, 6);
      b = __builtin_shufflevector(v, v, 1, 1, 3, 3, 5, 5, 7, 7);
      put_lanes<Lanes8<type>, piece, streams>(
          out + first + 2 * i * size,
          fma_lanes(a, load_lanes(tables.first + 2 * i), b * load_lanes(tables.second + 2 * i)));
    }
  }
  if (!streams && i < half) rotate_rest<type>(rotation, i, in, out);
}

/// Turns `rows` rows by one angle. Strides count bytes; the ranges do not overlap. Rows that stream
/// are those of `streams_whole`.
template <ElementType type, bool streams>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void rotate_rows_avx2(const Rotation& given, const std::byte* in,
                                                         std::int64_t in_stride, std::byte* out,
                                                         std::int64_t out_stride,
                                                         std::int64_t rows) noexcept {
  const Rotation rotation =
      given;  // whose address nobody has: rows that are written do not change it
  const std::int32_t half = rotation.rotary_channels / 2;
  RotationTables tables;
  if (rotation.pairing == RopePairing::half_split) {
    tables.halves<type>(rotation.table, rotation.table + half, half);
  } else if (!Lanes16<type>::even_odd) {
    tables.pairs(rotation.table, rotation.table + half, half);
  }
  const std::int64_t bytes = rotation.channels * block_bytes(type);
  std::int64_t row = 0;
  if constexpr (streams) {
    const std::int64_t stretch = bytes < stream_stretch ? stream_stretch / bytes : 1;
    for (; streams_four_pages() && row + 4 * stretch <= rows; row += 4 * stretch) {
      const std::int64_t ahead = row + 8 * stretch <= rows ? 4 * stretch * bytes : 0;
      for (std::int64_t k = row; k < row + stretch; ++k) {
        for (std::int64_t at = k * bytes, i = 0; i < 4; ++i, at += stretch * bytes) {
          for (std::int64_t line = 0; line < bytes; line += 64)
            __builtin_prefetch(in + at + ahead + line);
          rotate_row_lanes<type, true>(rotation, tables, in + at, out + at);
        }
      }
    }
    for (; row < rows; ++row) {
      const std::int64_t at = row * bytes;
      for (std::int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(in + at + stream_ahead + line);
      rotate_row_lanes<type, true>(rotation, tables, in + at, out + at);
    }
    return;
  }
  for (; row < rows; ++row) {
    const std::byte* const from = in + row * in_stride;
    std::byte* const to = out + row * out_stride;
    for (std::int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(from + stream_ahead + line);
      __builtin_prefetch(to + stream_ahead + line, 1);  // a line is fetched before it is written
    }
    rotate_row_lanes<type, streams>(rotation, tables, from, to);
  }
}

KVMELD_API void stream_rotated_rows(ElementType type, Isa isa, const Rotation& rotation,
                                    const std::byte* in, std::byte* out,
                                    std::int64_t rows) noexcept {
  const std::int64_t bytes = byte_size(type, rotation.channels);
  if (isa == Isa::avx512 && type == ElementType::bf16 && rotates_wide(rotation))
    return rotate_rows_wide(rotation, in, out, rows, true);
  if (type == ElementType::f16)
    return rotate_rows_avx2<ElementType::f16, true>(rotation, in, bytes, out, bytes, rows);
  if (type == ElementType::bf16)
    return rotate_rows_avx2<ElementType::bf16, true>(rotation, in, bytes, out, bytes, rows);
  rotate_rows_avx2<ElementType::f32, true>(rotation, in, bytes, out, bytes, rows);
}

}  // namespace detail

#endif

namespace detail {

KVMELD_API void rotate_stored_rows(ElementType type, Isa isa, const Rotation& rotation,
                                   const std::byte* in, std::int64_t in_stride, std::byte* out,
                                   std::int64_t out_stride, std::int64_t rows) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512 && type == ElementType::bf16 && rotates_wide(rotation) &&
      in_stride == out_stride && in_stride == 2 * rotation.channels) {
    return rotate_rows_wide(rotation, in, out, rows, false);
  }
  if (isa != Isa::baseline) {
    if (type == ElementType::f16)
      return rotate_rows_avx2<ElementType::f16, false>(rotation, in, in_stride, out, out_stride,
                                                       rows);
    if (type == ElementType::bf16)
      return rotate_rows_avx2<ElementType::bf16, false>(rotation, in, in_stride, out, out_stride,
                                                        rows);
    if (type == ElementType::f32)
      return rotate_rows_avx2<ElementType::f32, false>(rotation, in, in_stride, out, out_stride,
                                                       rows);
  }
#endif
  alignas(64) float values[1024];
  for (std::int64_t row = 0; row < rows; ++row, in += in_stride, out += out_stride) {
    load_row(type, isa, in, rotation.channels, values);
    rotate_channels(rotation, isa, values);
    store_row(type, isa, values, rotation.channels, out);
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
