#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/mix_bits.hpp>

KVMELD_NAMESPACE_BEGIN

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
      return detail::error(ErrorCode::invalid_argument, "SimHash of ", gram_tokens, "-grams over ",
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
      return detail::error(ErrorCode::invalid_argument,
                           "EmbeddingHash needs an embedding, of 0 channels here");
    for (std::size_t c = 0; c < input.embedding.size(); ++c) {
      if (!std::isfinite(input.embedding[c]))
        return detail::error(ErrorCode::non_finite, "channel ", c,
                             " of the embedding is not finite");
    }
    std::uint64_t out = 0;
    for (std::uint64_t plane = 0; plane < 64; ++plane) {
      const std::uint64_t start = detail::mix_bits(seed + plane);
      double sum = 0;
      for (std::size_t c = 0; c < input.embedding.size(); ++c) {
        const int coefficient =
            std::popcount(detail::mix_bits(start + 0x9E3779B97F4A7C15U * (c + 1))) - 32;
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

KVMELD_NAMESPACE_END
