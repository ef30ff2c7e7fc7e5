#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/transport/file_io.hpp>
#include <kvmeld/transport/file_lock.hpp>
#include <kvmeld/transport/file_records.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// A log of records in one file, appended to by any number of processes, each of which may die at any instruction.
///
/// File: magic, generation, checksum of both (u64 each); then records (file_records.hpp). A record that was torn is at the end, since
/// appending is exclusive: the next writer cuts it off. One that the disk has damaged later is skipped, and what stands behind it
/// stays.
/// Replacing writes another file of the next generation and renames it. A cursor is generation (24 bits) and offset (40 bits).
/// Calls of one object must not overlap.
class RecordLog {
 public:
  RecordLog(int folder, Durability durability, unsigned mode, std::int64_t lock_timeout_ms)
      : folder_(folder), durability_(durability), mode_(mode), lock_timeout_ms_(lock_timeout_ms) {}

  /// Creates what is missing. Errors: those of files; `corrupt`, `version_mismatch` for a log that this build cannot read.
  [[nodiscard]] Status open() {
    const FileHandle created = open_file(folder_, lock_name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (!created.valid() && errno != EEXIST) return file_error(errno, "create", lock_name);
    if (created.valid() && ::fchmod(created.get(), mode_) != 0) return file_error(errno, "set the mode of", lock_name);
    auto lock = FileLock::take(folder_, lock_name, LOCK_EX, lock_timeout_ms_);
    if (!lock) return lock.error();
    struct ::stat status {};
    // Shorter than its head: the machine stopped before an unsynced log was written, and no record can be in it.
    if (::fstatat(folder_, log_name, &status, 0) != 0 || status.st_size < std::int64_t{head_bytes}) {
      KVMELD_TRY(start({}, 0));
    }
    return refresh();
  }

  [[nodiscard]] Status add(std::span<const std::byte> bytes) {
    auto lock = FileLock::take(folder_, lock_name, LOCK_EX, lock_timeout_ms_);
    if (!lock) return lock.error();
    KVMELD_TRY(refresh());
    return append(bytes);
  }

  [[nodiscard]] Result<RecordBatch> read(std::uint64_t cursor) {
    RecordBatch batch;
    if (nothing_new(cursor)) {
      batch.cursor = cursor;
      return batch;
    }
    auto lock = FileLock::take(folder_, lock_name, LOCK_SH, lock_timeout_ms_);
    if (!lock) return lock.error();
    KVMELD_TRY(reopen());
    auto size = file_size();
    if (!size) return size.error();
    const auto from = offset_of(cursor);
    auto end = walk(from, *size, [&batch](std::span<const std::byte> record) -> Status {
      batch.records.emplace_back(record.begin(), record.end());
      return {};
    });
    if (!end) return end.error();
    if (from <= valid_end_) valid_end_ = (std::max)(valid_end_, *end);
    batch.cursor = cursor_at(*end);
    return batch;
  }

  [[nodiscard]] Status replace(std::uint64_t cursor, std::span<const std::byte> bytes) {
    auto lock = FileLock::take(folder_, lock_name, LOCK_EX, lock_timeout_ms_);
    if (!lock) return lock.error();
    KVMELD_TRY(refresh());
    const std::uint64_t from = offset_of(cursor);
    // Of another generation: what it had seen has been replaced already, in part by records that it has not seen.
    if (from == head_bytes) return append(bytes);
    return start(bytes, from);
  }

  /// Bytes that were skipped because they were torn or damaged, each time they were met.
  [[nodiscard]] std::uint64_t skipped_bytes() const noexcept { return skipped_bytes_; }

 private:
  static constexpr const char* log_name = "records";
  static constexpr const char* lock_name = "lock";
  static constexpr std::uint64_t log_magic = 0x31'676F'6C'64'6C'76'6BULL;   // "kvldlog1": the last byte is the version
  static constexpr std::uint64_t head_bytes = 24;
  static constexpr std::uint64_t offset_bits = 40;
  static constexpr std::uint64_t offset_mask = (std::uint64_t{1} << offset_bits) - 1;
  using Head = std::array<std::uint64_t, 3>;

  [[nodiscard]] static std::uint64_t head_checksum(const Head& head) { return XXH3_64bits(head.data(), 16); }
  [[nodiscard]] std::uint64_t cursor_at(std::uint64_t offset) const { return generation_ << offset_bits | offset; }
  /// Where a cursor points; behind the head where it is none of this log's.
  [[nodiscard]] std::uint64_t offset_of(std::uint64_t cursor) const {
    const std::uint64_t offset = cursor & offset_mask;
    return cursor >> offset_bits == generation_ && offset >= head_bytes && offset <= size_ ? offset : head_bytes;
  }

  /// One system call where it is so, which is what polling mostly finds.
  [[nodiscard]] bool nothing_new(std::uint64_t cursor) const {
    struct ::stat status {};
    return file_.valid() && ::fstatat(folder_, log_name, &status, 0) == 0 && status.st_ino == inode_ &&
           cursor == cursor_at(static_cast<std::uint64_t>(status.st_size));
  }

  [[nodiscard]] Result<std::uint64_t> file_size() {
    struct ::stat status {};
    if (::fstat(file_.get(), &status) != 0) return file_error(errno, "look at", log_name);
    return size_ = static_cast<std::uint64_t>(status.st_size);
  }

  /// Under the lock: takes the file that has the name now.
  [[nodiscard]] Status reopen() {
    struct ::stat status {};
    if (::fstatat(folder_, log_name, &status, 0) != 0) return file_error(errno, "look at", log_name);
    if (file_.valid() && status.st_ino == inode_) {
      if (valid_end_ <= static_cast<std::uint64_t>(status.st_size)) return file_size().status();
    }
    FileHandle file = open_file(folder_, log_name, O_RDWR | O_NOFOLLOW);
    if (!file.valid()) return file_error(errno, "open", log_name);
    Head head{};
    if (const int number = read_at(file.get(), std::as_writable_bytes(std::span(head)), 0); number != 0) {
      return file_error(number, "read", log_name);
    }
    if (head[0] != log_magic) {
      const bool newer = (head[0] ^ log_magic) << 8U == 0;
      return error(newer ? ErrorCode::version_mismatch : ErrorCode::corrupt, "the record log begins with ", head[0],
                   newer ? ", written by a newer version" : ": it is damaged, or no log");
    }
    if (head[2] != head_checksum(head)) return error(ErrorCode::corrupt, "the record log's head of generation ", head[1], " is damaged");
    file_ = std::move(file);
    inode_ = status.st_ino;
    generation_ = head[1];
    valid_end_ = head_bytes;
    name_synced_ = false;
    return file_size().status();
  }

  /// Under the exclusive lock: knows the end of the last whole record.
  [[nodiscard]] Status refresh() {
    KVMELD_TRY(reopen());
    auto end = walk(valid_end_, size_, [](std::span<const std::byte>) { return Status(); });
    if (!end) return end.error();
    valid_end_ = *end;
    return {};
  }

  /// Under the exclusive lock and refreshed.
  [[nodiscard]] Status append(std::span<const std::byte> bytes) {
    if (bytes.size() > offset_mask - record_head_bytes - valid_end_) {
      return error(ErrorCode::store_full, bytes.size(), " bytes more make the record log of ", valid_end_, " longer than 2^40");
    }
    if (size_ > valid_end_) {  // a dead writer's
      if (::ftruncate(file_.get(), static_cast<::off_t>(valid_end_)) != 0) return file_error(errno, "cut the torn end of", log_name);
      skipped_bytes_ += size_ - valid_end_;
      size_ = valid_end_;
    }
    int number = write_record(file_.get(), valid_end_, bytes);
    if (number == 0 && durability_ != Durability::none) number = sync_file(file_.get());
    if (number == 0 && durability_ == Durability::file_and_folder && !name_synced_) number = sync_folder(folder_, ".");
    if (number != 0) {
      (void)!::ftruncate(file_.get(), static_cast<::off_t>(valid_end_));  // if not, the next writer does it
      return file_error(number, "append to", log_name);
    }
    name_synced_ = true;
    valid_end_ += record_head_bytes + bytes.size();
    size_ = valid_end_;
    return {};
  }

  /// Under the exclusive lock: a new file, with `first` in the place of what stands before `from`; `from` 0: with nothing.
  [[nodiscard]] Status start(std::span<const std::byte> first, std::uint64_t from) {
    auto temp = TempFile::create(folder_);
    if (!temp) return temp.error();
    constexpr std::uint64_t generations = std::uint64_t{1} << (64 - offset_bits);
    Head head{log_magic, (from == 0 ? fresh_number() : generation_) % (generations - 1) + 1, 0};
    head[2] = head_checksum(head);
    int number = write_at(temp->get(), std::as_bytes(std::span(head)), 0);
    if (from != 0 && number == 0) {
      number = write_record(temp->get(), head_bytes, first);
      std::uint64_t at = head_bytes + record_head_bytes + first.size();
      auto end = walk(from, valid_end_, [&](std::span<const std::byte> record) -> Status {
        if (number == 0) number = write_record(temp->get(), at, record);
        at += record_head_bytes + record.size();
        return {};
      });
      if (!end) return end.error();
    }
    if (number == 0 && ::fchmod(temp->get(), mode_) != 0) number = errno;
    if (number == 0 && durability_ != Durability::none) number = sync_file(temp->get());
    if (number != 0) return file_error(number, "write a new", log_name);
    KVMELD_TRY(temp->replace(log_name));
    if (durability_ == Durability::file_and_folder) number = sync_folder(folder_, ".");
    return number == 0 ? Status() : file_error(number, "sync the folder of", log_name);
  }

  template <class Take>
  [[nodiscard]] Result<std::uint64_t> walk(std::uint64_t from, std::uint64_t size, const Take& take) {
    return walk_records(file_.get(), from, size, skipped_bytes_, take);
  }

  int folder_;
  Durability durability_;
  unsigned mode_;
  std::int64_t lock_timeout_ms_;
  FileHandle file_;
  ::ino_t inode_ = 0;
  std::uint64_t generation_ = 0;
  std::uint64_t size_ = 0;
  std::uint64_t valid_end_ = 0;
  bool name_synced_ = false;  // a rename that nobody synced would take with it what is appended later
  std::uint64_t skipped_bytes_ = 0;
};

}  // namespace detail

KVMELD_NAMESPACE_END
