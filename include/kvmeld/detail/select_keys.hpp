#pragma once

/// Key rows as the selection policies read them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// The keys of one layer of a fragment in f64, for selection policies.
struct LayerKeys {
  std::vector<std::int32_t> tokens;  ///< which of the fragment's tokens the layer holds, ascending
  std::vector<double> values;        ///< (token, head, channel)
  std::size_t heads = 0;
  std::size_t channels = 0;

  [[nodiscard]] std::size_t width() const noexcept { return heads * channels; }
  [[nodiscard]] const double* row(std::size_t token, std::size_t head = 0) const noexcept {
    return values.data() + token * width() + head * channels;
  }
};

/// Rotates one row back by its position, in f64.
inline void unrotate(const RopeSpec& rope, std::span<const double> frequencies,
                     std::int64_t position, double* row, std::int32_t channels) noexcept {
  for (std::int32_t c = 0; c < channels; ++c) {
    const RopePair pair = rope_pair(rope.pairing, rope.first_channel, rope.rotary_channels, c);
    if (pair.partner <= c) continue;  // unpaired, or handled with its partner
    const math::SinCos at = math::sin_cos(static_cast<double>(position) *
                                          frequencies[static_cast<std::size_t>(pair.index)]);
    const double a = row[c], b = row[pair.partner];
    row[c] = fma(a, at.cos, b * at.sin);
    row[pair.partner] = fma(b, at.cos, -(a * at.sin));
  }
}

/// Reads the first plane (key or latent) of a layer, −1: ⌊layers / 2⌋; `rotated_back` rotates each
/// key back to position 0.
///
/// Errors: `invalid_argument` for a layer that does not exist, and those of `inverse_frequencies`.
[[nodiscard]] inline Result<LayerKeys> layer_keys(const Source& source, std::int32_t layer,
                                                  bool rotated_back) {
  const Geometry& geometry = source.fragment->geometry();
  const auto layers = static_cast<std::int32_t>(geometry.layers.size());
  const std::int32_t at = layer < 0 ? layers / 2 : layer;
  LayerKeys keys;
  if (at >= layers) {
    if (layer < 0) return keys;
    return error(ErrorCode::invalid_argument, "selection by layer ", at, " of a model with ",
                 layers, " layers");
  }
  const auto l = static_cast<std::size_t>(at);
  if (geometry.layers[l].planes.empty()) return keys;
  std::size_t plane = 0;
  for (std::size_t i = 0; i < l; ++i) plane += geometry.layers[i].planes.size();
  const Payload& payload = *source.payload;
  const TokenSet& set = payload.token_sets[payload.layer_set[l]];
  for (std::int64_t t = 0; set.all && t < source.fragment->token_count(); ++t)
    keys.tokens.push_back(static_cast<std::int32_t>(t));
  if (!set.all) keys.tokens = set.present;

  const PlaneShape& shape = geometry.layers[l].planes[0];
  keys.heads = static_cast<std::size_t>(shape.heads);
  keys.channels = static_cast<std::size_t>(shape.channels);
  keys.values.resize(keys.tokens.size() * keys.width());
  const RopeSpec& rope = geometry.layers[l].rope;
  const bool rotates = rotated_back && shape.rotary && rope.kind != RopeKind::none &&
                       geometry.layers[l].key_form == KeyForm::post_rope;
  std::vector<double> frequencies;
  if (rotates) {
    auto made = inverse_frequencies(rope, 0);
    if (!made) return made.error();
    frequencies = *std::move(made);
  }
  std::vector<float> row(keys.channels + 32);  // block types load whole blocks
  const std::byte* from = payload.bytes.get() + payload.plane_offsets[plane];
  double* to = keys.values.data();
  for (const std::int32_t token : keys.tokens) {
    for (std::int32_t h = 0; h < shape.heads;
         ++h, from += byte_size(shape.type, shape.channels), to += shape.channels) {
      load_row(shape.type, Isa::baseline, from, shape.channels, row.data());
      for (std::size_t c = 0; c < keys.channels; ++c) to[c] = static_cast<double>(row[c]);
      if (rotates)
        unrotate(rope, span_of(frequencies), payload.positions[static_cast<std::size_t>(token)], to,
                 shape.channels);
    }
  }
  return keys;
}

// Sums over channels in eight strands, joined by a tree: the same bytes in every instruction set.
KVMELD_ALWAYS_INLINE double join_strands(const double (&s)[8]) noexcept {
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
KVMELD_ALWAYS_INLINE double dot_body(const double* a, const double* b, std::size_t n) noexcept {
  double s[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) s[j] = fma(a[i + j], b[i + j], s[j]);
  }
  for (std::size_t j = 0; i + j < n; ++j) s[j] = fma(a[i + j], b[i + j], s[j]);
  return join_strands(s);
}
KVMELD_ALWAYS_INLINE double distance_body(const double* a, const double* b,
                                          std::size_t n) noexcept {
  double s[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) {
      const double d = a[i + j] - b[i + j];
      s[j] = fma(d, d, s[j]);
    }
  }
  for (std::size_t j = 0; i + j < n; ++j) {
    const double d = a[i + j] - b[i + j];
    s[j] = fma(d, d, s[j]);
  }
  return join_strands(s);
}
inline double dot_baseline(const double* a, const double* b, std::size_t n) noexcept {
  return dot_body(a, b, n);
}
inline double distance_baseline(const double* a, const double* b, std::size_t n) noexcept {
  return distance_body(a, b, n);
}
KVMELD_TARGET_AVX2 inline double dot_avx2(const double* a, const double* b,
                                          std::size_t n) noexcept {
  return dot_body(a, b, n);
}
KVMELD_TARGET_AVX2 inline double distance_avx2(const double* a, const double* b,
                                               std::size_t n) noexcept {
  return distance_body(a, b, n);
}

/// a · b, and |a − b|², by the processor's best instruction set.
using RowMeasure = double (*)(const double*, const double*, std::size_t) noexcept;
[[nodiscard]] inline RowMeasure dot_measure() noexcept {
  return best_isa() == Isa::baseline ? dot_baseline : dot_avx2;
}
[[nodiscard]] inline RowMeasure distance_measure() noexcept {
  return best_isa() == Isa::baseline ? distance_baseline : distance_avx2;
}

/// Checks a budget, and returns whether every token fits into it.
[[nodiscard]] inline Result<bool> keeps_all(const char* policy, std::int64_t budget,
                                            std::int64_t tokens) {
  if (budget < 0)
    return error(ErrorCode::invalid_argument, policy, ": a budget of ", budget,
                 " tokens is negative");
  return budget >= tokens;
}

}  // namespace detail

KVMELD_NAMESPACE_END
