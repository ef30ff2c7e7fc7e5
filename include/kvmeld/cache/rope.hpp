#pragma once

/// How an engine rotates its keys by position, which declarations are sound, and which keys may be
/// shifted.

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// Which two channels turn together.
///
/// The same model is `interleaved` in a Llama-family GGUF and `half_split` in HF and vLLM (the rows
/// of its key projection are permuted): take the pairing from the engine that wrote the bytes, not
/// from the model's name.
enum class RopePairing : std::uint8_t {
  interleaved,  ///< channels 2i and 2i + 1 of the rotary part
  half_split,   ///< channels i and i + rotary / 2 of the rotary part
};

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(RopePairing value) noexcept {
  switch (value) {
    case RopePairing::interleaved:
      return "interleaved";
    case RopePairing::half_split:
      return "half_split";
  }
  return "unknown";
}

/// Whether, and by how many position axes, keys are rotated.
enum class RopeKind : std::uint8_t {
  none,              ///< keys carry no position (NoPE layer); a shift copies bytes
  rotary,            ///< one position for each token
  multi_axis,        ///< several positions for each token (M-RoPE); known and refused with
                     ///< `rope_unsupported`
  undeclared = 255,  ///< nobody said: a `RopeSpec{}`; refused everywhere, never written to a wire
};

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(RopeKind value) noexcept {
  switch (value) {
    case RopeKind::none:
      return "none";
    case RopeKind::rotary:
      return "rotary";
    case RopeKind::multi_axis:
      return "multi_axis";
    case RopeKind::undeclared:
      return "undeclared";
  }
  return "unknown";
}

/// How frequencies depart from `base^(-2i / rotary)`.
enum class RopeScaling : std::uint8_t {
  none,    ///< as they are
  linear,  ///< position interpolation: all divided by `factor` (Chen et al. 2023, arXiv:2306.15595)
  llama3,  ///< Llama 3.1: long wavelengths divided by `factor`, short kept, a linear blend between
  yarn,  ///< NTK-by-parts with the index ramp that engines run (Peng et al. 2023, arXiv:2309.00071)
  /// A divisor for each pair, other ones beyond `original_context` (Ding et al. 2024,
  /// arXiv:2402.13753).
  longrope,
  /// The base grows with the length beyond `original_context` (dynamic NTK, arXiv:2309.00071).
  dynamic_ntk,
  /// A divisor for each pair, whatever the length, as llama.cpp's `rope_freqs` tensor.
  explicit_factors,
};

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(RopeScaling value) noexcept {
  switch (value) {
    case RopeScaling::none:
      return "none";
    case RopeScaling::linear:
      return "linear";
    case RopeScaling::llama3:
      return "llama3";
    case RopeScaling::yarn:
      return "yarn";
    case RopeScaling::longrope:
      return "longrope";
    case RopeScaling::dynamic_ntk:
      return "dynamic_ntk";
    case RopeScaling::explicit_factors:
      return "explicit_factors";
  }
  return "unknown";
}

/// Rotary position embedding of one layer's keys (Su et al. 2021, RoFormer, arXiv:2104.09864).
///
/// Pair i of a key at position p is turned by the angle p * f_i; `inverse_frequencies` yields f.
/// Layers may differ, so a cache carries one spec for each. A plain value: two caches can be merged
/// only where their specs are equal, field by field.
///
/// Write one by its named constructors, and assign the fields that they leave at their defaults:
/// `RopeSpec::rotary(64, 1e6, RopePairing::half_split)`, or `RopeSpec::none()` for keys without
/// position. A spec that nobody filled in is `undeclared`, not `none`: it is refused by `validate`,
/// because keys that are left where they should be rotated give a wrong cache that looks right.
struct RopeSpec {
  RopeKind kind = RopeKind::undeclared;  ///< `none` rotates nothing and wants 0 rotary channels.
  RopePairing pairing = RopePairing::half_split;  ///< Which channels turn together.
  std::int32_t first_channel = 0;  ///< First rotated channel of a head; those before pass through.
  /// Even number of rotated channels; those behind pass through.
  std::int32_t rotary_channels = 0;
  double base = 10000.0;  ///< Theta, > 1: pair i of r/2 turns by base^(-2i/r) a position.
  RopeScaling scaling = RopeScaling::none;  ///< Which of the fields below count.
  double factor = 1.0;  ///< Context extension, read by all but `none` and `longrope`.
  /// Tokens of the pre-training context; linear and explicit do not read it.
  std::int32_t original_context = 0;
  /// Llama3: turns over the original context up to which all is divided.
  double low_freq_factor = 1.0;
  /// Llama3: turns over the original context from which nothing is.
  double high_freq_factor = 4.0;
  /// Yarn: turns over the original context from which nothing is divided.
  double beta_fast = 32.0;
  double beta_slow = 1.0;     ///< yarn: turns over the original context up to which all is divided.
  bool yarn_truncate = true;  ///< yarn: round the ramp's ends to whole pairs (false: gpt-oss).
  /// Magnitude that the engine's keys carry; recorded, never applied again.
  double attention_factor = 1.0;
  std::vector<float> short_factors = {};  ///< longrope up to `original_context`. (rotary / 2)
  std::vector<float> long_factors = {};   ///< longrope beyond `original_context`. (rotary / 2)
  std::vector<float> factors = {};        ///< explicit_factors. (rotary / 2)

  /// Keys carry no position (NoPE layers, encoders): a shift copies bytes.
  [[nodiscard]] static RopeSpec none() {
    RopeSpec rope;
    rope.kind = RopeKind::none;
    return rope;
  }
  /// One position for each token, frequencies base^(-2i / channels).
  /// @param channels rotated channels of a head, from `first_channel` on, which is 0 unless it is
  /// assigned.
  [[nodiscard]] static RopeSpec rotary(std::int32_t channels, double base, RopePairing pairing) {
    RopeSpec rope;
    rope.kind = RopeKind::rotary;
    rope.pairing = pairing;
    rope.rotary_channels = channels;
    rope.base = base;
    return rope;
  }
  /// `plain`, slowed by position interpolation.
  [[nodiscard]] static RopeSpec linear(RopeSpec plain, double factor) {
    return scaled(std::move(plain), RopeScaling::linear, factor, 0);
  }
  /// `plain` with Llama 3.1's scaling; its published `low_freq_factor` 1 and `high_freq_factor` 4.
  /// @param original_context tokens of the pre-training context.
  [[nodiscard]] static RopeSpec llama3(RopeSpec plain, double factor,
                                       std::int32_t original_context) {
    return scaled(std::move(plain), RopeScaling::llama3, factor, original_context);
  }
  /// `plain` with YaRN's scaling and the paper's magnitude: 0.1 ln(factor) + 1.
  /// @param original_context tokens of the pre-training context.
  [[nodiscard]] static RopeSpec yarn(RopeSpec plain, double factor, std::int32_t original_context) {
    RopeSpec rope = scaled(std::move(plain), RopeScaling::yarn, factor, original_context);
    if (factor > 1.0) rope.attention_factor = fma(0.1, math::log(factor), 1.0);
    return rope;
  }
  /// `plain` with LongRoPE's divisors (rotary / 2); assign `attention_factor` if keys carry one.
  /// @param original_context tokens up to which `short_factors` hold, and beyond which
  /// `long_factors` do.
  [[nodiscard]] static RopeSpec longrope(RopeSpec plain, std::vector<float> short_factors,
                                         std::vector<float> long_factors,
                                         std::int32_t original_context) {
    RopeSpec rope = scaled(std::move(plain), RopeScaling::longrope, 1.0, original_context);
    rope.short_factors = std::move(short_factors);
    rope.long_factors = std::move(long_factors);
    return rope;
  }
  /// `plain` whose base grows with the length beyond `original_context` tokens.
  [[nodiscard]] static RopeSpec dynamic_ntk(RopeSpec plain, double factor,
                                            std::int32_t original_context) {
    return scaled(std::move(plain), RopeScaling::dynamic_ntk, factor, original_context);
  }
  /// `plain` with a divisor for each pair (rotary / 2), as llama.cpp's `rope_freqs` tensor holds.
  [[nodiscard]] static RopeSpec with_factors(RopeSpec plain, std::vector<float> factors) {
    RopeSpec rope = scaled(std::move(plain), RopeScaling::explicit_factors, 1.0, 0);
    rope.factors = std::move(factors);
    return rope;
  }

  friend bool operator==(const RopeSpec&, const RopeSpec&) = default;

 private:
  [[nodiscard]] static RopeSpec scaled(RopeSpec plain, RopeScaling scaling, double factor,
                                       std::int32_t original_context) {
    plain.scaling = scaling;
    plain.factor = factor;
    plain.original_context = original_context;
    return plain;
  }
};

namespace detail {

/// Refuses a spec whose kind was never said.
KVMELD_LAZY [[nodiscard]] Status check_declared(const RopeSpec& rope) {
  if (rope.kind != RopeKind::undeclared) return {};
  return error(ErrorCode::invalid_argument,
               "rope: nobody said how keys are rotated (kind undeclared, ", rope.rotary_channels,
               " rotary channels); write RopeSpec::rotary(channels, base, pairing), or ",
               "RopeSpec::none() for keys without position");
}

/// True for numbers above zero and below infinity; false for NaN.
[[nodiscard]] constexpr bool finite_positive(double x) noexcept {
  return x > 0.0 && x <= 1.7976931348623157e308;
}

KVMELD_LAZY [[nodiscard]] Status check_factors(const std::vector<float>& factors,
                                               std::int32_t pairs, const char* name) {
  if (factors.size() != static_cast<std::size_t>(pairs))
    return error(ErrorCode::invalid_argument, "rope: ", name, " holds ", factors.size(),
                 " values for ", pairs, " channel pairs; give one for each pair");
  for (std::size_t i = 0; i < factors.size(); ++i)
    if (!finite_positive(static_cast<double>(factors[i])))
      return error(ErrorCode::invalid_argument, "rope: ", name, "[", i, "] is ", factors[i],
                   "; divisors are finite and above 0");
  return {};
}

KVMELD_LAZY [[nodiscard]] Status check_scaling(const RopeSpec& rope) {
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

/// Whether frequencies depend on how long the context is, so that a stored key does not say by
/// which it was turned.
[[nodiscard]] inline bool length_dependent(const RopeSpec& rope) noexcept {
  return rope.kind == RopeKind::rotary &&
         (rope.scaling == RopeScaling::longrope || rope.scaling == RopeScaling::dynamic_ntk);
}

/// Refuses a declaration that no engine can have meant, or that nobody made, before anything is
/// computed from it.
///
/// `channels` is the head size of the keys. Fields that the scaling does not read are not looked
/// at. Errors: `rope_unsupported` (several axes), `unknown_field` (an enumerator from a newer
/// build), `invalid_argument`.
KVMELD_LAZY [[nodiscard]] Status validate(const RopeSpec& rope, std::int32_t channels) {
  using detail::error;
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

/// Whether keys that were made in a context of `source_length` tokens can be turned to positions in
/// one of `target_length`.
///
/// A shift by n turns pair i by n * f_i, which is exact only while f stays the same. Engines that
/// fix the frequencies when the context is created (llama.cpp picks LongRoPE's list from its
/// context size) pass that size as both lengths. A dynamic-NTK cache that grew past
/// `original_context` token by token holds several sets of frequencies: equal lengths speak only
/// for keys of one prefill. Errors: `rope_length_dependent` (dynamic NTK: the lengths differ and
/// either is beyond `original_context`; LongRoPE: they lie on different sides of it),
/// `rope_unsupported` (several axes), `invalid_argument` (a negative length, a spec that nobody
/// declared).
KVMELD_LAZY [[nodiscard]] Status check_shift(const RopeSpec& rope, std::int64_t source_length,
                                             std::int64_t target_length) {
  using detail::error;
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

KVMELD_NAMESPACE_END
