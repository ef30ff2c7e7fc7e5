#pragma once

#include <array>
#include <cstdint>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/cache/metadata.hpp>

KVMELD_NAMESPACE_BEGIN

/// A sum of entry hashes mod 2^256: one value that names a set, updated by adding and subtracting the entries that change.
struct Digest256 {
  std::array<std::uint64_t, 4> words{};  ///< least significant first

  auto operator<=>(const Digest256&) const = default;

  /// this += other mod 2^256.
  void add(const Digest256& other) noexcept {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t with_carry = words[i] + carry;
      carry = with_carry < carry ? 1U : 0U;
      words[i] = with_carry + other.words[i];
      carry += words[i] < with_carry ? 1U : 0U;
    }
  }
  /// this −= other mod 2^256.
  void subtract(const Digest256& other) noexcept {
    std::uint64_t borrow = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t with_borrow = words[i] - borrow;
      const std::uint64_t next = words[i] < borrow ? 1U : 0U;
      words[i] = with_borrow - other.words[i];
      borrow = next + (with_borrow < other.words[i] ? 1U : 0U);
    }
  }
  /// 64 hexadecimal digits, most significant first.
  [[nodiscard]] std::string hex() const {
    return Digest128{words[2], words[3]}.hex() + Digest128{words[0], words[1]}.hex();
  }
};

namespace detail {

/// H(id ‖ provenance ‖ confidence) with two seeds of XXH3-128.
KVMELD_LAZY [[nodiscard]] Digest256 entry_digest(const FragmentId& id, const Metadata& metadata) {
  Digest256 out;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    BasicHasher<Xxh3_128> h{Xxh3_128(seed)};
    h.bytes(std::as_bytes(std::span(id.bytes)));
    h.value(static_cast<std::uint64_t>(metadata.provenance.size()));
    for (const Provenance& dot : metadata.provenance) {
      h.value(dot.agent);
      h.value(dot.sequence);
    }
    h.value(static_cast<std::uint64_t>(metadata.confidence.size()));
    for (const auto& [agent, confidence] : metadata.confidence) {
      h.value(agent);
      h.value(confidence);
    }
    const Digest128 half = h.digest();
    out.words[2 * seed] = half.low;
    out.words[2 * seed + 1] = half.high;
  }
  return out;
}

}  // namespace detail

KVMELD_NAMESPACE_END
