#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/cache/metadata.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// A sum of entry hashes mod 2^256: one value that names a set, updated by adding and subtracting
/// the entries that change.
struct Digest256 {
  std::array<std::uint64_t, 4> words{};  ///< least significant first

  auto operator<=>(const Digest256&) const = default;

  /// this += other mod 2^256.
  KVMELD_LAZY void add(const Digest256& other) noexcept {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t with_carry = words[i] + carry;
      carry = with_carry < carry ? 1U : 0U;
      words[i] = with_carry + other.words[i];
      carry += words[i] < with_carry ? 1U : 0U;
    }
  }
  /// this −= other mod 2^256.
  KVMELD_LAZY void subtract(const Digest256& other) noexcept {
    std::uint64_t borrow = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t with_borrow = words[i] - borrow;
      const std::uint64_t next = words[i] < borrow ? 1U : 0U;
      words[i] = with_borrow - other.words[i];
      borrow = next + (with_borrow < other.words[i] ? 1U : 0U);
    }
  }
  /// 64 hexadecimal digits, most significant first.
  KVMELD_LAZY [[nodiscard]] std::string hex() const {
    return Digest128{words[2], words[3]}.hex() + Digest128{words[0], words[1]}.hex();
  }
};

/// The hash that names a set's fragments, and the one that its digest sums. A set has one, and
/// joins no set of another.
struct SetHash {
  std::uint8_t tag = Xxh3_128::tag;  ///< byte 0 of its fragments' ids
  /// Null: XXH3-128 with seeds 0 and 1, for XXH3 ids.
  Digest256 (*digest)(std::span<const std::byte>) = nullptr;
};

namespace detail {

KVMELD_LAZY [[nodiscard]] Digest256 xxh3_digest256(std::span<const std::byte> bytes) {
  Digest256 out;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const XXH128_hash_t half = XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed);
    out.words[2 * seed] = half.low64;
    out.words[2 * seed + 1] = half.high64;
  }
  return out;
}

/// By a hash that gives 32 bytes.
template <class Hash>
[[nodiscard]] Digest256 digest256_by(std::span<const std::byte> bytes) {
  Hash hash;
  hash.update(bytes);
  const std::array<std::uint8_t, 32> whole = hash.digest32();
  Digest256 out;
  std::memcpy(out.words.data(), whole.data(), whole.size());
  return out;
}

/// H(id ‖ marks ‖ unattributed), every field of a mark but its time.
KVMELD_LAZY [[nodiscard]] Digest256 entry_digest(const SetHash& hash, const FragmentId& id,
                                                 const Metadata& metadata) {
  constexpr std::size_t mark_bytes = 3 * 8 + 1 + 4 + 32;
  std::array<std::byte, 32 + 1 + 4 * mark_bytes> few;
  std::vector<std::byte> many;
  const std::size_t size = 33 + metadata.marks.size() * mark_bytes;
  if (size > few.size()) many.resize(size);
  std::byte* const begin = size > few.size() ? many.data() : few.data();
  std::byte* at = begin;
  const auto put = [&](const void* from, std::size_t count) {
    std::memcpy(at, from, count);
    at += count;
  };
  put(id.bytes.data(), 32);
  for (const Mark& mark : metadata.marks) {
    put(&mark.dot.agent, 8);
    put(&mark.dot.epoch, 8);
    put(&mark.dot.sequence, 8);
    const std::uint8_t given = mark.confidence ? 1 : 0;
    const float confidence = mark.confidence.value_or(0.0F);
    put(&given, 1);
    put(&confidence, 4);
    put(mark.superseded_by.bytes.data(), 32);
  }
  const std::uint8_t unattributed = metadata.unattributed ? 1 : 0;
  put(&unattributed, 1);
  const std::span<const std::byte> bytes = span_of(begin, size);
  return hash.digest != nullptr ? hash.digest(bytes) : xxh3_digest256(bytes);
}

}  // namespace detail

/// How sets of fragments are hashed that `Hash` names: by the same hash where it gives 32 bytes
/// (`digest32`), as SHA-256 does.
template <ContentHash Hash>
[[nodiscard]] constexpr SetHash set_hash_of() noexcept {
  if constexpr (requires(const Hash& hash) {
                  { hash.digest32() } -> std::same_as<std::array<std::uint8_t, 32>>;
                }) {
    return {Hash::tag, &detail::digest256_by<Hash>};
  } else {
    return {Hash::tag, nullptr};
  }
}

KVMELD_NAMESPACE_END
