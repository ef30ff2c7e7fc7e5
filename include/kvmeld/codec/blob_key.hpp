#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN

/// Names a blob in a store: a manifest by its fragment's id, a chunk by the hash of its raw bytes.
///
/// Byte 0 of a manifest's key is the content hash's tag, of a chunk's that tag with the high bit
/// set: the two never meet.
struct BlobKey {
  std::array<std::uint8_t, 32> bytes{};

  auto operator<=>(const BlobKey&) const = default;
  [[nodiscard]] bool is_chunk() const noexcept { return (bytes[0] & 0x80U) != 0; }
  [[nodiscard]] std::string hex() const { return FragmentId{bytes}.hex(); }
};

/// Where a fragment's manifest is kept.
[[nodiscard]] inline BlobKey manifest_key(const FragmentId& id) noexcept { return {id.bytes}; }

namespace detail {

/// Where something is kept that is no part of a fragment, by what it is and two numbers. `tag` is
/// that of no content hash: 0x3D epochs, 0x3E what coordinators keep, 0x3F cuts of sessions.
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

}  // namespace detail

/// Immutable bytes, owned or mapped: whoever holds a copy keeps them.
struct Blob {
  std::shared_ptr<const std::byte[]> data{};
  std::size_t size = 0;

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data.get(), size}; }
};

KVMELD_NAMESPACE_END
