#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/transport/file_io.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What stands before a record's bytes in a log: 32 bytes, little-endian as everything in it.
///
/// `bytes_checksum` covers the bytes, `checksum` the fields before it and where they stand: a
/// record's own bytes at another place are none, and a head that is right tells where its record
/// ends, whatever became of the bytes.
struct RecordHead {
  static constexpr std::uint64_t record_magic = 0xC4'72'65'63'6F'72'64'F5ULL;

  std::uint64_t magic = record_magic;
  std::uint64_t length = 0;
  std::uint64_t bytes_checksum = 0;
  std::uint64_t checksum = 0;

  RecordHead() = default;
  RecordHead(std::uint64_t offset, std::span<const std::byte> bytes)
      : length(bytes.size()),
        bytes_checksum(XXH3_64bits(bytes.data(), bytes.size())),
        checksum(sum(offset)) {}

  [[nodiscard]] bool stands_at(std::uint64_t offset) const {
    return magic == record_magic && checksum == sum(offset);
  }
  [[nodiscard]] bool is_of(std::span<const std::byte> bytes) const {
    return XXH3_64bits(bytes.data(), bytes.size()) == bytes_checksum;
  }
  friend bool operator==(const RecordHead&, const RecordHead&) = default;

 private:
  [[nodiscard]] std::uint64_t sum(std::uint64_t offset) const {
    const std::array<std::uint64_t, 4> all{offset, magic, length, bytes_checksum};
    return XXH3_64bits(all.data(), sizeof all);
  }
};
inline constexpr std::uint64_t record_head_bytes = sizeof(RecordHead);

/// 0, or the errno.
[[nodiscard]] inline int write_record(int fd, std::uint64_t offset,
                                      std::span<const std::byte> bytes) {
  const RecordHead head(offset, bytes);
  if (const int number = write_at(fd, std::as_bytes(std::span(&head, 1)), offset); number != 0)
    return number;
  return write_at(fd, bytes, offset + record_head_bytes);
}

/// A stretch of a file of known size, read ahead.
class FileWindow {
 public:
  FileWindow(int fd, std::uint64_t size) : fd_(fd), size_(size) {}

  /// Bytes from `offset` on, at least `count`, which the file must have; none on an error, which is
  /// in errno.
  [[nodiscard]] std::span<const std::byte> at(std::uint64_t offset, std::uint64_t count) {
    constexpr std::uint64_t ahead = 262'144;
    if (offset < begin_ || offset + count > begin_ + bytes_.size()) {
      bytes_.resize(static_cast<std::size_t>((std::min)((std::max)(count, ahead), size_ - offset)));
      begin_ = offset;
      if (const int number = read_at(fd_, bytes_, offset); number != 0) {
        bytes_.clear();
        errno = number;
        return {};
      }
    }
    return std::span<const std::byte>(bytes_).subspan(static_cast<std::size_t>(offset - begin_));
  }

 private:
  int fd_;
  std::uint64_t size_;
  std::uint64_t begin_ = 0;
  std::vector<std::byte> bytes_;
};

/// Gives every whole record between two offsets to `take(offset, head, bytes) -> Status`, and what
/// lies between two of them, which is torn or damaged, to `gap(begin, end)`; returns the end of the
/// last whole record, or `from`.
///
/// Linear in the bytes, whatever they are: a head that is right and bytes that are not are passed
/// as one, so that no byte is hashed twice. No more is read into memory at once than the longest
/// record that the file has room for. Errors: those of files and of `take`.
template <class Take, class Gap>
[[nodiscard]] Result<std::uint64_t> walk_records(int fd, std::uint64_t from, std::uint64_t size,
                                                 const Take& take, const Gap& gap) {
  constexpr std::uint64_t record_magic = RecordHead::record_magic;
  const auto magic = std::as_bytes(std::span(&record_magic, 1));
  FileWindow window(fd, size);
  std::uint64_t end = from;
  std::uint64_t at = from;
  while (at < size && size - at >= record_head_bytes) {
    auto seen = window.at(at, record_head_bytes);
    if (seen.empty()) return file_error(errno, "read", "the record log");
    RecordHead head;
    std::memcpy(&head, seen.data(), sizeof head);
    if (head.stands_at(at) && head.length <= size - at - record_head_bytes) {
      seen = window.at(at, record_head_bytes + head.length);
      if (seen.empty()) return file_error(errno, "read", "the record log");
      const auto bytes = seen.subspan(record_head_bytes, static_cast<std::size_t>(head.length));
      const std::uint64_t next = at + record_head_bytes + head.length;
      if (head.is_of(bytes)) {
        KVMELD_TRY(take(at, head, bytes));
        if (at > end) gap(end, at);
        end = next;
      }
      at = next;
      continue;
    }
    const auto found = std::search(seen.begin() + 1, seen.end(), magic.begin(), magic.end());
    const auto passed = static_cast<std::uint64_t>(found - seen.begin());
    at += found == seen.end() ? passed - (magic.size() - 1) : passed;
  }
  return end;
}

}  // namespace detail

KVMELD_NAMESPACE_END
