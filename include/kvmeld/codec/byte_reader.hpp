#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Reads what `ByteWriter` wrote, from bytes that nobody vouches for: no length is believed before
/// it is checked.
///
/// The first failure stays: later reads give zeros and touch nothing, so that a parser checks
/// `status()` once at its end, and before it allocates by a count (`count` does).
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) noexcept
      : rest_(bytes), whole_(bytes.size()) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == ErrorCode::ok; }
  [[nodiscard]] std::size_t remaining() const noexcept { return rest_.size(); }
  [[nodiscard]] std::size_t offset() const noexcept { return whole_ - rest_.size(); }

  template <class T>
  requires std::is_arithmetic_v<T>
  [[nodiscard]] T value() noexcept {
    T out{};
    if (const auto from = bytes(sizeof(T)); from.size() == sizeof(T))
      std::memcpy(&out, from.data(), sizeof(T));
    return out;
  }
  [[nodiscard]] std::uint64_t varint() noexcept {
    std::uint64_t out = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = value<std::uint8_t>();
      if (shift == 63 && byte > 1) break;
      out |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
      if (byte < 0x80U) {
        if (byte == 0 && shift > 0) break;  // one form for each number
        return ok() ? out : 0;
      }
    }
    fail(ErrorCode::corrupt);
    return 0;
  }
  /// A number of elements that follow, each of at least `element_bytes`: refused where the bytes
  /// cannot hold so many.
  [[nodiscard]] std::size_t count(std::size_t element_bytes) noexcept {
    const std::uint64_t n = varint();
    if (ok() && n > rest_.size() / (element_bytes == 0 ? 1 : element_bytes))
      fail(ErrorCode::truncated);
    return ok() ? static_cast<std::size_t>(n) : 0;
  }
  /// The next `n` bytes, empty where there are fewer.
  [[nodiscard]] std::span<const std::byte> bytes(std::size_t n) noexcept {
    if (ok() && n > rest_.size()) fail(ErrorCode::truncated);
    if (!ok()) return {};
    const auto out = rest_.first(n);
    rest_ = rest_.subspan(n);
    return out;
  }
  [[nodiscard]] std::string text() {
    const auto from = bytes(count(1));
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  [[nodiscard]] std::vector<T> values() {
    const std::size_t n = count(sizeof(T));
    const auto from = bytes(n * sizeof(T));
    std::vector<T> out(from.size() / sizeof(T));
    if (!from.empty()) std::memcpy(out.data(), from.data(), from.size());
    return out;
  }

  /// Records that what was read contradicts itself.
  void fail(ErrorCode code) noexcept {
    if (!ok()) return;
    code_ = code;
    failed_at_ = offset();
    rest_ = {};
  }
  /// What went wrong first, with the byte where it did. `what` names the thing that was being read.
  [[nodiscard]] Status status(std::string_view what) const {
    if (ok()) return {};
    return detail::error(code_, what, ": ", to_string(code_), " at byte ", failed_at_, " of ",
                         whole_);
  }
  /// As `status`, and `oversized` where bytes are left.
  [[nodiscard]] Status finish(std::string_view what) const {
    if (ok() && !rest_.empty())
      return detail::error(ErrorCode::oversized, what, ": ", rest_.size(),
                           " bytes after its end at byte ", offset());
    return status(what);
  }

 private:
  std::span<const std::byte> rest_;
  std::size_t whole_ = 0;
  std::size_t failed_at_ = 0;
  ErrorCode code_ = ErrorCode::ok;
};

KVMELD_NAMESPACE_END
