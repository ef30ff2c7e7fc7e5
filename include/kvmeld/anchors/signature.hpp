#pragma once

/// Signatures by which near segments are found.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// What a segment is known by when anchors like it are looked for.
struct SignatureInput {
  std::span<const TokenId> tokens{};  ///< the whole segment's
  /// Any vector of the caller's that is near for like segments; empty: none.
  std::span<const float> embedding{};
};

/// Maps a segment to 64 bits, so that segments alike differ in few of them.
///
/// Semantic requirements: equal inputs give equal bits on every machine; `digest` feeds the name
/// and every parameter. A policy whose bits mean nothing unless they are equal says `static
/// constexpr bool exact = true`.
template <class S>
concept SignaturePolicy = std::copyable<S> &&
    requires(const S& signature, const SignatureInput& input, Hasher& hasher) {
  { signature.sign(input) } -> std::same_as<Result<std::uint64_t>>;
  signature.digest(hasher);
};

namespace detail {

template <class S>
[[nodiscard]] constexpr bool exact_signature() noexcept {
  if constexpr (requires { S::exact; }) {
    return S::exact;
  } else {
    return false;
  }
}

/// Counts how often each of 64 bits was set: bytes side by side in words, carried over before they
/// could overflow.
class BitCounts {
 public:
  void add(std::uint64_t bits) noexcept {
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint64_t byte = (bits >> (8 * i)) & 0xFFU;
      // One byte for each bit: copies of the byte, each masked to a bit of its own, then brought
      // down to 0 or 1.
      const std::uint64_t spread = (byte * 0x0101010101010101U) & 0x8040201008040201U;
      bytes_[i] += ((spread + 0x7F7F7F7F7F7F7F7FU) >> 7U) & 0x0101010101010101U;
    }
    if (++pending_ == 255) flush();
  }
  /// Bits that were set in more than half of what was added: a tie gives 0.
  [[nodiscard]] std::uint64_t majority() noexcept {
    flush();
    std::uint64_t out = 0;
    for (std::size_t b = 0; b < 64; ++b) out |= std::uint64_t{2 * counts_[b] > total_} << b;
    return out;
  }

 private:
  void flush() noexcept {
    for (std::size_t b = 0; b < 64; ++b) counts_[b] += (bytes_[b / 8] >> (8 * (b % 8))) & 0xFFU;
    bytes_ = {};
    total_ += pending_;
    pending_ = 0;
  }

  std::array<std::uint64_t, 8> bytes_{};
  std::array<std::uint64_t, 64> counts_{};
  std::uint64_t total_ = 0;
  std::uint64_t pending_ = 0;
};

}  // namespace detail

/// Bits by majority of hashed token n-grams: texts that share most n-grams differ in few bits.
///
/// Every n-gram of the first `first_tokens` tokens counts once for each time it stands there; none
/// is left out, so that one token inserted at the front of thousands moves all of them and changes
/// few. A gram's hash is XXH3-64, seeded, of its ids as little-endian i32; a text shorter than a
/// gram is one gram; bit b is 1 where more than half of the hashes have it, so a tie gives 0.
/// O(tokens). Charikar, Similarity estimation techniques from rounding algorithms, 2002; Manku,
/// Jain, Das Sarma, 2007.
struct SimHash {
  std::uint64_t seed = 0x6B766D656C64U;
  std::int32_t gram_tokens = 3;      ///< in [1, 16]
  std::int32_t first_tokens = 4096;  ///< of the segment that are looked at

  /// Errors: `invalid_argument` for parameters outside their range. No tokens: 0.
  [[nodiscard]] Result<std::uint64_t> sign(const SignatureInput& input) const {
    if (gram_tokens < 1 || gram_tokens > 16 || first_tokens < 1) {
      return extend::error(ErrorCode::invalid_argument, "SimHash of ", gram_tokens, "-grams over ",
                           first_tokens, " tokens");
    }
    const std::size_t n = (std::min)(input.tokens.size(), static_cast<std::size_t>(first_tokens));
    const std::size_t gram = (std::min)(n, static_cast<std::size_t>(gram_tokens));
    detail::BitCounts counts;
    for (std::size_t i = 0; n > 0 && i + gram <= n; ++i) {
      counts.add(XXH3_64bits_withSeed(input.tokens.data() + i, gram * sizeof(TokenId), seed));
    }
    return counts.majority();
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SimHash");
    hasher.value(seed);
    hasher.value(gram_tokens);
    hasher.value(first_tokens);
  }
};

/// Bits by the side of 64 random hyperplanes on which the caller's embedding lies: vectors at angle
/// a differ in 64·a/π bits on average.
///
/// A plane's coefficients are popcount − 32 of hashed 64 bits, which is near to normal and exact
/// everywhere; sums in f64, channels ascending; on the plane itself gives 0. The length of the
/// vector does not matter. O(64 · channels). Charikar 2002 (as `SimHash`).
struct EmbeddingHash {
  std::uint64_t seed = 0x6B766D656C64U;

  /// Errors: `invalid_argument` without an embedding; `non_finite`.
  [[nodiscard]] Result<std::uint64_t> sign(const SignatureInput& input) const {
    if (input.embedding.empty())
      return extend::error(ErrorCode::invalid_argument,
                           "EmbeddingHash needs an embedding, of 0 channels here");
    for (std::size_t c = 0; c < input.embedding.size(); ++c) {
      if (!std::isfinite(input.embedding[c]))
        return extend::error(ErrorCode::non_finite, "channel ", c,
                             " of the embedding is not finite");
    }
    std::uint64_t out = 0;
    for (std::uint64_t plane = 0; plane < 64; ++plane) {
      const std::uint64_t start = extend::mix_bits(seed + plane);
      double sum = 0;
      for (std::size_t c = 0; c < input.embedding.size(); ++c) {
        const int coefficient =
            std::popcount(extend::mix_bits(start + 0x9E3779B97F4A7C15U * (c + 1))) - 32;
        sum = fma(static_cast<double>(input.embedding[c]), static_cast<double>(coefficient), sum);
      }
      out |= std::uint64_t{sum > 0} << plane;
    }
    return out;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.EmbeddingHash");
    hasher.value(seed);
  }
};

/// XXH3-64 of all tokens: finds the same text again, and nothing like it.
struct XxHash {
  static constexpr bool exact = true;
  std::uint64_t seed = 0;

  [[nodiscard]] Result<std::uint64_t> sign(const SignatureInput& input) const {
    return std::uint64_t{
        XXH3_64bits_withSeed(input.tokens.data(), input.tokens.size_bytes(), seed)};
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.XxHash");
    hasher.value(seed);
  }
};

/// 1 − Hamming distance / 64.
[[nodiscard]] inline double similarity(std::uint64_t a, std::uint64_t b) noexcept {
  return 1.0 - static_cast<double>(std::popcount(a ^ b)) / 64.0;
}

/// The largest Hamming distance whose similarity is at least `threshold`; −1 where none is (above
/// 1, NaN).
[[nodiscard]] inline int max_distance(double threshold) noexcept {
  int distance = 64;
  while (distance >= 0 && !(1.0 - static_cast<double>(distance) / 64.0 >= threshold)) --distance;
  return distance;
}

/// Channels of one token over all layers, planes and heads: how many weights `weighted_by_channel`
/// takes.
[[nodiscard]] inline std::size_t channel_count(const Geometry& geometry) noexcept {
  std::size_t count = 0;
  for (const LayerShape& layer : geometry.layers) {
    for (const PlaneShape& plane : layer.planes)
      count += static_cast<std::size_t>(plane.heads) * static_cast<std::size_t>(plane.channels);
  }
  return count;
}

/// An offset each channel of which is multiplied by a weight of its own: a blend by channel is a
/// blend of these, each at weight 1.
///
/// For anchors that are near in some channels and far in others: `token_weights` of distances by
/// (anchor, channel) makes weights that add up to 1 in each channel. Products in f32, rounded once
/// to the cache's elements (a step of f16 is 2^-11 of the offset). Keys are weighted in the local
/// frame. O(bytes). Errors: `invalid_argument` for an empty fragment, one that carries positions,
/// or another number of weights than `channel_count`; `non_finite`; `payload_missing`;
/// `unsupported` (scales apart, Hadamard bases).
/// @param weights (layer, plane, head, channel)
[[nodiscard]] inline Result<Fragment> weighted_by_channel(const Fragment& delta,
                                                          std::span<const float> weights) {
  if (!delta.valid() || !is_unrotated(delta))
    return extend::error(ErrorCode::invalid_argument,
                         "weights by channel are for offsets; they come from measure_offset");
  const Geometry& geometry = delta.geometry();
  if (weights.size() != channel_count(geometry)) {
    return extend::error(ErrorCode::invalid_argument, weights.size(), " weights for ",
                         channel_count(geometry), " channels of a token");
  }
  for (const float weight : weights) {
    if (!std::isfinite(weight))
      return extend::error(ErrorCode::non_finite, "the weight of a channel is not finite");
  }
  const exec::FloatEnvironmentGuard guard;
  KVMELD_TRY(exec::check_float_environment());
  const Payload& from = delta.payloads()[0];
  const auto rows = detail::LocalRows::open(geometry, from, 0);
  if (!rows) return rows.error();
  Payload out = from;
  out.digest = {};
  const auto storage = detail::local_storage(geometry, out);
  const Isa isa = best_isa();
  alignas(64) float row[1024];
  const float* weight = weights.data();
  std::size_t plane = 0;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const std::int64_t held = from.layer_tokens(l);
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::byte* to = storage->data() + out.plane_offsets[plane];
      const std::int64_t size = extend::row_bytes(shape);
      for (std::int64_t i = 0; i < held; ++i) {
        for (std::int32_t head = 0; head < shape.heads; ++head, to += size) {
          extend::load_row(shape.type, isa, rows->stored(plane, shape, i, head), shape.channels,
                           row);
          for (std::int32_t c = 0; c < shape.channels; ++c)
            row[c] *= weight[head * shape.channels + c];
          extend::store_row(shape.type, isa, row, shape.channels, to);
        }
      }
      KVMELD_TRY(detail::normalise_plane(shape, storage->data() + out.plane_offsets[plane],
                                         static_cast<std::size_t>(held), l, "a weighted offset"));
      weight += shape.heads * shape.channels;
      ++plane;
    }
  }
  out.bytes = std::shared_ptr<const std::byte[]>(storage, storage->data());
  Hasher name;
  name.text("kvmeld.anchor.offset.by_channel");
  name.bytes(std::as_bytes(std::span(delta.id().bytes)));
  name.values(weights);
  return detail::derived_fragment(delta, std::move(out),
                                  {delta.tokens().begin(), delta.tokens().end()}, name);
}

}  // namespace anchors

KVMELD_NAMESPACE_END
