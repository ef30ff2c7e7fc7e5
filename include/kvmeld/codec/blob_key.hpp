#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN

/// Names a blob in a store: a manifest by its fragment's id, a chunk by the hash of its raw bytes.
///
/// Byte 0 of a manifest's key is the content hash's tag, of a chunk's that tag with the high bit set: the two never meet.
struct BlobKey {
  std::array<std::uint8_t, 32> bytes{};

  auto operator<=>(const BlobKey&) const = default;
  [[nodiscard]] bool is_chunk() const noexcept { return (bytes[0] & 0x80U) != 0; }
  [[nodiscard]] std::string hex() const { return FragmentId{bytes}.hex(); }
};

/// Where a fragment's manifest is kept.
[[nodiscard]] inline BlobKey manifest_key(const FragmentId& id) noexcept { return {id.bytes}; }

/// Immutable bytes, owned or mapped: whoever holds a copy keeps them.
struct Blob {
  std::shared_ptr<const std::byte[]> data{};
  std::size_t size = 0;

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data.get(), size}; }
};

KVMELD_NAMESPACE_END
