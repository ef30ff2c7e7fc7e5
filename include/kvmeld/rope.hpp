#pragma once

/// Rotary position embedding: its declaration, its frequencies and tables, and the rotation of
/// rows.

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

// How an engine rotates its keys by position, which declarations are valid, and which keys may be
// shifted.

/// Which two channels are rotated together.
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

/// How the frequencies differ from `base^(-2i / rotary)`.
enum class RopeScaling : std::uint8_t {
  none,    ///< unscaled
  linear,  ///< position interpolation: all frequencies divided by `factor` (Chen et al. 2023,
           ///< arXiv:2306.15595)
  llama3,  ///< Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend
           ///< between
  yarn,    ///< NTK-by-parts with the index ramp of the engines' code (Peng et al. 2023,
           ///< arXiv:2309.00071)
  /// A divisor for each pair, from a second list beyond `original_context` (Ding et al. 2024,
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
/// Pair i of a key at position p is rotated by the angle p * f_i; `inverse_frequencies` yields f.
/// Layers may differ, so a cache carries one spec for each. A plain value: two caches can be merged
/// only where their specs are equal, field by field.
///
/// Write one by its named constructors, and assign the fields that they leave at their defaults:
/// `RopeSpec::rotary(64, 1e6, RopePairing::half_split)`, or `RopeSpec::none()` for keys without
/// position. A spec that nobody filled in is `undeclared`, not `none`: it is refused by `validate`,
/// because keys that stay unrotated where they should be rotated give a wrong cache that looks
/// right.
struct RopeSpec {
  RopeKind kind = RopeKind::undeclared;  ///< `none` rotates nothing and wants 0 rotary channels.
  RopePairing pairing = RopePairing::half_split;  ///< Which channels are rotated together.
  std::int32_t first_channel = 0;  ///< First rotated channel of a head; those before pass through.
  /// Even number of rotated channels; those behind pass through.
  std::int32_t rotary_channels = 0;
  double base = 10000.0;  ///< Theta, > 1: pair i of r/2 rotates by base^(-2i/r) a position.
  RopeScaling scaling = RopeScaling::none;  ///< Selects which of the fields below are read.
  double factor = 1.0;  ///< Context extension, read by all but `none` and `longrope`.
  /// Tokens of the pre-training context; linear and explicit do not read it.
  std::int32_t original_context = 0;
  /// Llama3: pairs with at most so many rotations in the original context are divided by `factor`.
  double low_freq_factor = 1.0;
  /// Llama3: pairs with at least so many rotations in the original context are kept.
  double high_freq_factor = 4.0;
  /// Yarn: pairs with at least so many rotations in the original context are kept.
  double beta_fast = 32.0;
  double beta_slow = 1.0;  ///< yarn: pairs with at most so many rotations are divided by `factor`.
  bool yarn_truncate = true;  ///< yarn: round the ramp's ends to whole pairs (false: gpt-oss).
  /// Factor by which the engine has scaled its keys already; recorded, never applied again.
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
  [[nodiscard]] KVMELD_API static RopeSpec rotary(std::int32_t channels, double base,
                                                  RopePairing pairing);
  /// `plain` with position interpolation: all frequencies divided by `factor`.
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
  [[nodiscard]] KVMELD_API static RopeSpec longrope(RopeSpec plain,
                                                    std::vector<float> short_factors,
                                                    std::vector<float> long_factors,
                                                    std::int32_t original_context);
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
  [[nodiscard]] KVMELD_API static RopeSpec scaled(RopeSpec plain, RopeScaling scaling,
                                                  double factor, std::int32_t original_context);
};

namespace detail {

/// True for numbers above zero and below infinity; false for NaN.
[[nodiscard]] constexpr bool finite_positive(double x) noexcept {
  return x > 0.0 && x <= 1.7976931348623157e308;
}

}  // namespace detail

/// Whether frequencies depend on the context's length, so that a stored key does not tell by which
/// frequencies it was rotated.
[[nodiscard]] inline bool length_dependent(const RopeSpec& rope) noexcept {
  return rope.kind == RopeKind::rotary &&
         (rope.scaling == RopeScaling::longrope || rope.scaling == RopeScaling::dynamic_ntk);
}

/// Refuses a spec that is undeclared or that no engine can have, before anything is computed from
/// it.
///
/// `channels` is the head size of the keys. Fields that the scaling does not read are not checked.
/// Errors: `rope_unsupported` (several axes), `unknown_field` (an enumerator from a newer build),
/// `invalid_argument`.
[[nodiscard]] KVMELD_API Status validate(const RopeSpec& rope, std::int32_t channels);

/// Whether keys that were made in a context of `source_length` tokens can be rotated to positions
/// in one of `target_length`.
///
/// A shift by n rotates pair i by n * f_i, which is right only while f stays the same. Engines that
/// fix the frequencies when the context is created (llama.cpp picks LongRoPE's list from its
/// context size) pass that size as both lengths. A dynamic-NTK cache that grew past
/// `original_context` token by token holds keys of several sets of frequencies, so equal lengths
/// suffice only for keys of one prefill. Errors: `rope_length_dependent` (dynamic NTK: the lengths
/// differ and either is beyond `original_context`; LongRoPE: they lie on different sides of it),
/// `rope_unsupported` (several axes), `invalid_argument` (a negative length, an undeclared spec).
[[nodiscard]] KVMELD_API Status check_shift(const RopeSpec& rope, std::int64_t source_length,
                                            std::int64_t target_length);

// The angle by which each channel pair is rotated from one position to the next.

/// Largest shift of a key, in positions; together with `max_rope_frequency` it keeps f64 angles
/// below 1e9, up to which `math::sin_cos` is accurate.
inline constexpr std::int64_t max_rope_shift = std::int64_t{1} << 24;

/// Largest frequency that is accepted, in radians a position: a plain rope has at most 1, and
/// stored divisors are hardly ever below 1.
inline constexpr double max_rope_frequency = 32.0;

/// Radians a position for every channel pair, in f64. (rotary_channels / 2)
///
/// `context_length` picks the frequencies of `dynamic_ntk` and `longrope` (the total length in
/// tokens, or the context size where the engine decides by that) and must be above 0 for them; the
/// others ignore it. `kind == none` yields an empty vector. Engines compute these in f32, often as
/// a running product, and may be off by some 1e-6 relative; angles then differ by that times the
/// position. Errors: those of `validate`; `invalid_argument` without a length where one is needed.
/// O(pairs), one `pow` each.
[[nodiscard]] KVMELD_API Result<std::vector<double>> inverse_frequencies(
    const RopeSpec& rope, std::int64_t context_length);

// Cosines and sines for the shifts that one render needs, computed once and shared by every key.

/// Rows of cosines and sines in f32, one row a shift, of unit magnitude whatever the scaling.
///
/// Row s: `pairs()` cosines, then `pairs()` sines; each row starts on a 64-byte boundary,
/// `row_stride()` floats apart, so `data()` can be copied to a device as it lies. YaRN's attention
/// factor is left out: stored keys contain it already, and a shift that applied it again would
/// scale them (by 1.1386 for factor 4).
///
/// Accuracy: the angle is shift * frequency in f64, its cosine and sine are rounded once to f32, so
/// an entry is within 2^-25 + |angle| * 2^-50 of the exact one, and cos^2 + sin^2 within 2^-23 of
/// 1. Bytes do not depend on compiler or processor.
class RopeTable {
 public:
  /// A table without rows, for layers whose keys carry no position.
  RopeTable() = default;

  /// Computes one row for each shift, in the order given; the caller keeps them distinct.
  ///
  /// `context_length` picks the frequencies where they depend on it (see `inverse_frequencies`);
  /// `check_shift` says whether the shift is sound there at all. O(shifts * pairs). Errors: those
  /// of `validate`; `invalid_argument` for
  /// |shift| above `max_rope_shift` or a missing length.
  [[nodiscard]] KVMELD_API static Result<RopeTable> build(const RopeSpec& rope,
                                                          std::span<const std::int64_t> shifts,
                                                          std::int64_t context_length = 0);

  /// The row of the shift at this index of the list given to `build`. (cosines: pairs, sines:
  /// pairs)
  [[nodiscard]] const float* row(std::size_t shift_index) const noexcept {
    return blocks_.empty() ? nullptr : blocks_[shift_index * blocks_per_row_].values;
  }

  /// The number of shifts, of channel pairs, of floats from one row to the next, and all rows, for
  /// a copy to a device.
  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::size_t pairs() const noexcept { return pairs_; }
  [[nodiscard]] std::size_t row_stride() const noexcept { return blocks_per_row_ * Block::size; }
  [[nodiscard]] const float* data() const noexcept { return row(0); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return blocks_.size() * sizeof(Block); }

 private:
  struct alignas(64) Block {
    static constexpr std::size_t size = 16;
    float values[size] = {};
  };
  // A vector of floats is not aligned to 64 bytes; a vector of such blocks is.
  [[nodiscard]] float* mutable_row(std::size_t s) noexcept {
    return blocks_.data()[s * blocks_per_row_].values;
  }

  std::size_t rows_ = 0;
  std::size_t pairs_ = 0;
  std::size_t blocks_per_row_ = 0;
  std::vector<Block> blocks_;
};

// Rotating one key by one table row: the expression, its lane form for devices, and its row form
// for vectors on a host.

/// Rotates the pair (a, b) by the angle whose cosine and sine are given; two roundings a result.
///
/// Every backend uses this one expression (row form, lane form and tests), so that bytes agree. cos
/// = 0, sin = 1 gives exactly (-b, a).
KVMELD_HD KVMELD_ALWAYS_INLINE void rotate_pair(float& a, float& b, float cos, float sin) noexcept {
  const float first = fma(a, cos, -(b * sin));
  const float second = fma(a, sin, b * cos);
  a = first;
  b = second;
}

/// The partner of a channel, and the pair of the table that rotates both.
struct RopePair {
  std::int32_t partner = -1;  ///< The other channel of the pair, or -1: the channel passes through.
  /// Pair number: cosine at `index`, sine at `index + rotary_channels / 2` of a table row.
  std::int32_t index = 0;
};

/// The pair of one channel, for code that owns one channel at a time.
[[nodiscard]] KVMELD_HD inline RopePair rope_pair(RopePairing pairing, std::int32_t first_channel,
                                                  std::int32_t rotary_channels,
                                                  std::int32_t channel) noexcept {
  const std::int32_t c = channel - first_channel;
  if (c < 0 || c >= rotary_channels) return {};
  if (pairing == RopePairing::interleaved) return {first_channel + (c ^ 1), c >> 1};
  const std::int32_t half = rotary_channels / 2;
  return c < half ? RopePair{first_channel + c + half, c}
                  : RopePair{first_channel + c - half, c - half};
}

/// The partner of one channel, or -1 where the channel passes through.
[[nodiscard]] KVMELD_HD inline std::int32_t pair_of(RopePairing pairing, std::int32_t first_channel,
                                                    std::int32_t rotary_channels,
                                                    std::int32_t channel) noexcept {
  return rope_pair(pairing, first_channel, rotary_channels, channel).partner;
}

/// One channel of a rotated row, read from the row before: the lane form.
///
/// A channel needs its partner's old value: lanes write to other memory, or all of them read before
/// any writes.
[[nodiscard]] KVMELD_HD inline float rotated_channel(RopePairing pairing,
                                                     std::int32_t first_channel,
                                                     std::int32_t rotary_channels,
                                                     const float* table_row, const float* row,
                                                     std::int32_t channel) noexcept {
  const RopePair pair = rope_pair(pairing, first_channel, rotary_channels, channel);
  if (pair.partner < 0) return row[channel];
  const bool is_first = channel < pair.partner;
  float a = row[is_first ? channel : pair.partner];
  float b = row[is_first ? pair.partner : channel];
  rotate_pair(a, b, table_row[pair.index], table_row[pair.index + rotary_channels / 2]);
  return is_first ? a : b;
}

namespace detail {

/// `Pairs` pairs at once. Local arrays, because the loads of one block then cannot alias its stores
/// and compilers keep the block in registers; a constant trip count, because g++ -O2 vectorises
/// only such loops.
template <std::size_t Pairs>
KVMELD_ALWAYS_INLINE void rotate_block(const float* cos, const float* sin, float* first,
                                       float* second) noexcept {
  float a[Pairs], b[Pairs];
  for (std::size_t i = 0; i < Pairs; ++i) {
    a[i] = first[i];
    b[i] = second[i];
    rotate_pair(a[i], b[i], cos[i], sin[i]);
  }
  for (std::size_t i = 0; i < Pairs; ++i) first[i] = a[i];
  for (std::size_t i = 0; i < Pairs; ++i) second[i] = b[i];
}

template <std::size_t Pairs>
KVMELD_ALWAYS_INLINE void rotate_block_interleaved(const float* cos, const float* sin,
                                                   float* row) noexcept {
  float out[2 * Pairs];
  KVMELD_KEEP_LOOP
  for (std::size_t i = 0; i < Pairs; ++i) {
    out[2 * i] = row[2 * i];
    out[2 * i + 1] = row[2 * i + 1];
    rotate_pair(out[2 * i], out[2 * i + 1], cos[i], sin[i]);
  }
  for (std::size_t i = 0; i < 2 * Pairs; ++i) row[i] = out[i];
}

}  // namespace detail

/// Rotates one key in place: the host's row form. (channel)
///
/// `row` is a whole head in f32, `table_row` a row of `RopeTable`. Inlined, so that it is compiled
/// for the instruction set of the function that calls it. The caller skips a shift of 0, for which
/// bytes are copied. The arguments are those of a validated spec.
KVMELD_ALWAYS_INLINE void rotate_row(RopePairing pairing, std::int32_t first_channel,
                                     std::int32_t rotary_channels, const float* table_row,
                                     float* row) noexcept {
  const std::int32_t half = rotary_channels / 2;
  const float* cos = table_row;
  const float* sin = table_row + half;
  float* const part = row + first_channel;
  std::int32_t i = 0;
  if (pairing == RopePairing::half_split) {
    for (; i + 16 <= half; i += 16)
      detail::rotate_block<16>(cos + i, sin + i, part + i, part + half + i);
    for (; i + 8 <= half; i += 8)
      detail::rotate_block<8>(cos + i, sin + i, part + i, part + half + i);
    for (; i < half; ++i) detail::rotate_block<1>(cos + i, sin + i, part + i, part + half + i);
  } else {
    for (; i + 16 <= half; i += 16)
      detail::rotate_block_interleaved<16>(cos + i, sin + i, part + 2 * i);
    for (; i + 8 <= half; i += 8)
      detail::rotate_block_interleaved<8>(cos + i, sin + i, part + 2 * i);
    for (; i < half; ++i) detail::rotate_block_interleaved<1>(cos + i, sin + i, part + 2 * i);
  }
}

namespace extend {

/// Which channels of a row are rotated, how they pair, and by which angles.
struct Rotation {
  const float* table = nullptr;  ///< cosines, then sines (rotary_channels)
  std::int32_t channels = 0;
  std::int32_t first_channel = 0;
  std::int32_t rotary_channels = 0;
  RopePairing pairing = RopePairing::half_split;
};

}  // namespace extend

// Many rows rotated by one angle, vectorised: what a concatenation spends its time on.

namespace detail {

#if KVMELD_X86_DISPATCH

/// Whether contiguous rows can be stored from registers past the caches: each row fills whole cache
/// lines and whole vectors.
[[nodiscard]] inline bool streams_whole(ElementType type, const Rotation& rotation,
                                        const std::byte* out) noexcept {
  return (type == ElementType::f16 || type == ElementType::bf16 || type == ElementType::f32) &&
         rotation.first_channel == 0 && rotation.rotary_channels == rotation.channels &&
         rotation.channels % 32 == 0 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
}

/// Rotates rows that are contiguous in source and target, and stores them past the caches.
KVMELD_API void stream_rotated_rows(ElementType type, Isa isa, const Rotation& rotation,
                                    const std::byte* in, std::byte* out,
                                    std::int64_t rows) noexcept;

#endif  // KVMELD_X86_DISPATCH

}  // namespace detail

namespace extend {

/// Rotates one f32 row in place.
KVMELD_API void rotate_channels(const Rotation& rotation, Isa isa, float* row) noexcept;

}  // namespace extend

namespace detail {

/// Rotates contiguous rows of `type`, reading each once: by vector code where there is some, by
/// `rotate_row` elsewhere.
KVMELD_API void rotate_stored_rows(ElementType type, Isa isa, const Rotation& rotation,
                                   const std::byte* in, std::int64_t in_stride, std::byte* out,
                                   std::int64_t out_stride, std::int64_t rows) noexcept;

}  // namespace detail

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/rope.hpp>
#endif
