#pragma once

/// Content hashes, digests, and the keys under which stores keep blobs.

#if !__has_include(<xxhash.h>)
#error "kvmeld needs xxhash.h: install libxxhash-dev (Debian) or xxhash (Fedora: -devel, vcpkg)"
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL
#else
#include <xxhash.h>
#endif

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Streams bytes into a digest that names content.
///
/// Semantic requirements: `tag` differs between hashes; `finish()` is 31 bytes, zero-padded; equal
/// bytes give equal digests however they are cut into updates.
template <class H>
concept ContentHash = std::default_initializable<H> &&
    requires(H& hash, const H& done, std::span<const std::byte> bytes) {
  { H::tag } -> std::convertible_to<std::uint8_t>;
  hash.update(bytes);
  { done.finish() } -> std::same_as<std::array<std::uint8_t, 31>>;
};

/// A digest of 16 bytes, XXH3-128: names things among processes that trust each other.
struct Digest128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  auto operator<=>(const Digest128&) const = default;
  /// 32 hexadecimal digits, high word first.
  [[nodiscard]] std::string hex() const {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (int i = 15; i >= 0; --i) text += digits[(high >> (4 * i)) & 15U];
    for (int i = 15; i >= 0; --i) text += digits[(low >> (4 * i)) & 15U];
    return text;
  }
};

/// XXH3-128 (xxHash), the default content hash: about memory speed, not collision-resistant against
/// an adversary.
class Xxh3_128 {
 public:
  static constexpr std::uint8_t tag = 1;

  KVMELD_API Xxh3_128() noexcept;
  KVMELD_API explicit Xxh3_128(std::uint64_t seed) noexcept;

  KVMELD_API void update(std::span<const std::byte> bytes) noexcept;
  [[nodiscard]] KVMELD_API Digest128 digest() const noexcept;
  [[nodiscard]] std::array<std::uint8_t, 31> finish() const noexcept {
    const Digest128 d = digest();
    std::array<std::uint8_t, 31> out{};
    std::memcpy(out.data(), &d.low, 8);
    std::memcpy(out.data() + 8, &d.high, 8);
    return out;
  }

 private:
  XXH3_state_t state_{};
};

/// Feeds values into a digest in one documented form: integers and floats as little-endian bytes,
/// texts behind their length as u64, so that no two sequences of fields share their bytes.
template <class Hash>
class BasicHasher {
 public:
  BasicHasher() = default;
  explicit BasicHasher(const Hash& hash) : hash_(hash) {}

  template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void value(T v) {
    std::array<std::byte, sizeof(T)> raw;
    std::memcpy(raw.data(), &v, sizeof(T));
    hash_.update(raw);
  }
  void text(std::string_view s) {
    value(static_cast<std::uint64_t>(s.size()));
    hash_.update(extend::span_of(reinterpret_cast<const std::byte*>(s.data()), s.size()));
  }
  template <class T>
  requires(std::is_arithmetic_v<T>) void values(std::span<const T> v) {
    value(static_cast<std::uint64_t>(v.size()));
    hash_.update(std::as_bytes(v));
  }
  void bytes(std::span<const std::byte> raw) {
    value(static_cast<std::uint64_t>(raw.size()));
    hash_.update(raw);
  }
  [[nodiscard]] const Hash& hash() const noexcept { return hash_; }
  [[nodiscard]] Digest128 digest() const noexcept requires requires(const Hash& h) { h.digest(); }
  { return hash_.digest(); }

 private:
  Hash hash_;
};

/// The hasher into which policies write their name and parameters (`void digest(Hasher&) const`).
using Hasher = BasicHasher<Xxh3_128>;

/// The id of a fragment: the content hash's tag in byte 0, then the hash's 31 bytes. All zeros are
/// the id of no fragment.
struct FragmentId {
  std::array<std::uint8_t, 32> bytes{};

  auto operator<=>(const FragmentId&) const = default;
  [[nodiscard]] std::uint8_t tag() const noexcept { return bytes[0]; }
  [[nodiscard]] bool empty() const noexcept { return *this == FragmentId{}; }
  /// 64 hexadecimal digits.
  [[nodiscard]] std::string hex() const {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (const std::uint8_t b : bytes) {
      text += digits[b >> 4U];
      text += digits[b & 15U];
    }
    return text;
  }
};

/// Names a blob in a store: a manifest by its fragment's id, a chunk by the hash of its raw bytes.
///
/// Byte 0 of a manifest's key is the content hash's tag, that of a chunk's key the same tag with
/// the high bit set, so the two kinds of keys never collide.
struct BlobKey {
  std::array<std::uint8_t, 32> bytes{};

  auto operator<=>(const BlobKey&) const = default;
  [[nodiscard]] bool is_chunk() const noexcept { return (bytes[0] & 0x80U) != 0; }
  [[nodiscard]] std::string hex() const { return FragmentId{bytes}.hex(); }
};

/// The key of a fragment's manifest.
[[nodiscard]] inline BlobKey manifest_key(const FragmentId& id) noexcept { return {id.bytes}; }

namespace extend {

/// The key of a blob that belongs to no fragment, made of a kind and two numbers. `tag` is not the
/// tag of a content hash: 0x3D for epochs, 0x3E for a coordinator's state, 0x3F for the cuts of
/// sessions.
[[nodiscard]] inline BlobKey named_key(std::uint8_t tag, std::string_view what, std::uint64_t first,
                                       std::uint64_t second) {
  Hasher hasher;
  hasher.text(what);
  hasher.value(first);
  hasher.value(second);
  const auto rest = hasher.hash().finish();
  BlobKey key;
  key.bytes[0] = tag;
  std::copy(rest.begin(), rest.end(), key.bytes.begin() + 1);
  return key;
}

}  // namespace extend

/// Immutable bytes, owned or mapped; every copy keeps them alive.
struct Blob {
  std::shared_ptr<const std::byte[]> data{};
  std::size_t size = 0;

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data.get(), size}; }
};

namespace extend {

/// Mixes the bits of a word bijectively (the finaliser of SplitMix64: Steele, Lea, Flood 2014).
[[nodiscard]] KVMELD_HD constexpr std::uint64_t mix_bits(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

}  // namespace extend

#if KVMELD_BODIES

KVMELD_API Xxh3_128::Xxh3_128() noexcept { (void)XXH3_128bits_reset(&state_); }

KVMELD_API Xxh3_128::Xxh3_128(std::uint64_t seed) noexcept {
  (void)XXH3_128bits_reset_withSeed(&state_, seed);
}

KVMELD_API void Xxh3_128::update(std::span<const std::byte> bytes) noexcept {
  if (!bytes.empty()) (void)XXH3_128bits_update(&state_, bytes.data(), bytes.size());
}

KVMELD_API Digest128 Xxh3_128::digest() const noexcept {
  const XXH128_hash_t h = XXH3_128bits_digest(&state_);
  return {h.low64, h.high64};
}

#endif

KVMELD_NAMESPACE_END
