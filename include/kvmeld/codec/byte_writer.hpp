#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Appends values as the wire has them: integers and floats little-endian and unpadded, counts as
/// LEB128 varints.
class ByteWriter {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void value(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  /// Seven bits a byte, low ones first: small numbers take one byte.
  void varint(std::uint64_t value) {
    for (; value >= 0x80U; value >>= 7U) bytes_.push_back(static_cast<std::byte>(value | 0x80U));
    bytes_.push_back(static_cast<std::byte>(value));
  }
  void reserve(std::size_t total) { bytes_.reserve(total); }
  void bytes(std::span<const std::byte> more) {
    bytes_.insert(bytes_.end(), more.begin(), more.end());
  }
  /// Count as varint, then the bytes.
  void text(std::string_view text) {
    varint(text.size());
    bytes(std::as_bytes(std::span(text.data(), text.size())));
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void values(std::span<const T> all) {
    varint(all.size());
    bytes(std::as_bytes(all));
  }

  [[nodiscard]] std::span<const std::byte> written() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
  [[nodiscard]] std::vector<std::byte> take() noexcept { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

KVMELD_NAMESPACE_END
