#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/transport/file_io.hpp>
#include <kvmeld/transport/file_lock.hpp>
#include <kvmeld/transport/file_records.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// A log of records in one file, appended to by any number of processes, each of which may die at
/// any instruction.
///
/// File, in numbers of 8 bytes: magic with the version, life, generation, checksum of these three;
/// then the mark, which is written in place: end of what was acknowledged, damaged bytes and places
/// that are no longer in the file, checksum of the generation and these three; then records
/// (file_records.hpp). Torn and damaged are told apart by the mark. What is not whole behind it was
/// never acknowledged: a dead writer's, which the next one cuts off. What is not whole before it
/// was acknowledged once: it is skipped, what stands behind it stays, and it is counted. A mark
/// that a machine's end has set back is no harm: whole records behind it are records. Replacing
/// writes another file of the next generation and renames it; the life stays. A cursor is
/// generation (24 bits) and offset (40 bits). Calls of one object must not overlap.
class RecordLog {
 public:
  struct Settings {
    Durability durability = Durability::file_and_folder;
    unsigned mode = 0600;
    std::int64_t lock_timeout_ms = 10'000;
    bool read_only = false;
  };

  RecordLog(int folder, const Settings& settings) : folder_(folder), settings_(settings) {}

  /// Creates what is missing, where it may. Errors: those of files; `corrupt` for a head that is
  /// damaged or cut, `version_mismatch` for a log that this build does not read.
  [[nodiscard]] Status open() {
    if (!settings_.read_only) KVMELD_TRY(make_lock());
    auto lock = take_lock(settings_.read_only ? LOCK_SH : LOCK_EX);
    if (!lock) return lock.error();
    struct ::stat status {};
    const int number = status_at(folder_, log_name, status);
    if (number != 0 && (number != ENOENT || settings_.read_only)) {
      return file_error(number, "look at", log_name);
    }
    if (number == ENOENT) KVMELD_TRY(start({}, 0));
    return refresh();
  }

  /// The folder is another one from now on: nothing that was known of the log holds.
  void forget() {
    file_ = FileHandle();
    ++lives_;
  }

  [[nodiscard]] Status add(std::span<const std::byte> bytes) {
    auto lock = take_lock(LOCK_EX);
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
    auto lock = take_lock(LOCK_SH);
    if (!lock) return lock.error();
    KVMELD_TRY(reopen());
    const auto from = offset_of(cursor);
    auto end = walk(from, size_, [&batch](std::span<const std::byte> record) -> Status {
      batch.records.emplace_back(record.begin(), record.end());
      return {};
    });
    if (!end) return end.error();
    batch.cursor = cursor_at(*end);
    return batch;
  }

  [[nodiscard]] Status replace(std::uint64_t cursor, std::span<const std::byte> bytes) {
    auto lock = take_lock(LOCK_EX);
    if (!lock) return lock.error();
    KVMELD_TRY(refresh());
    const std::uint64_t from = offset_of(cursor);
    // Of another generation: what it had seen has been replaced already, in part by records that it
    // has not seen.
    if (from == head_bytes) return append(bytes);
    return start(bytes, from);
  }

  /// What a writer that died has left behind the last record and this object has cut off: it was
  /// never acknowledged.
  [[nodiscard]] std::uint64_t torn_bytes() const noexcept { return torn_bytes_; }
  /// As the last call saw it. O(damaged places in the file).
  [[nodiscard]] StoreDamage damage() const {
    StoreDamage all = lost_;
    for (const auto& [begin, bytes] : damaged_) {
      ++all.places;
      all.bytes += bytes;
    }
    if (missing_ > 0) ++all.places;
    all.bytes += missing_;
    return all;
  }
  /// Changes where the log is not what it was: another log, or an earlier state of it. As the last
  /// call saw it; never 0.
  [[nodiscard]] std::uint64_t generation() const noexcept {
    const std::array<std::uint64_t, 2> all{life_, lives_};
    return XXH3_64bits(all.data(), sizeof all) | 1U;
  }

 private:
  static constexpr const char* log_name = "records";
  static constexpr const char* lock_name = "lock";
  // "kvldlog2": the last byte is the version
  static constexpr std::uint64_t log_magic = 0x32'676F'6C'64'6C'76'6BULL;
  static constexpr std::uint64_t mark_at = 32;
  static constexpr std::uint64_t head_bytes = 64;
  static constexpr std::uint64_t offset_bits = 40;
  static constexpr std::uint64_t offset_mask = (std::uint64_t{1} << offset_bits) - 1;
  static constexpr std::uint64_t generations = std::uint64_t{1} << (64 - offset_bits);
  using Words = std::array<std::uint64_t, 4>;

  [[nodiscard]] static Words head_of(std::uint64_t life, std::uint64_t generation) {
    Words head{log_magic, life, generation, 0};
    head[3] = XXH3_64bits(head.data(), 24);
    return head;
  }
  [[nodiscard]] static Words mark_of(std::uint64_t generation, std::uint64_t end,
                                     const StoreDamage& lost) {
    const Words all{generation, end, lost.bytes, lost.places};
    return {end, lost.bytes, lost.places, XXH3_64bits(all.data(), sizeof all)};
  }
  [[nodiscard]] Result<FileLock> take_lock(int how) const {
    return FileLock::take(folder_, lock_name, how, settings_.lock_timeout_ms);
  }
  [[nodiscard]] Status make_lock() const {
    const FileHandle created = open_file(folder_, lock_name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (!created.valid()) {
      return errno == EEXIST ? Status() : file_error(errno, "create", lock_name);
    }
    const int number = set_mode(created.get(), settings_.mode);
    return number == 0 ? Status() : file_error(number, "set the mode of", lock_name);
  }

  /// Unlike for every life that this object has seen, so that no cursor of an earlier one points
  /// into a later one.
  [[nodiscard]] std::uint64_t cursor_tag() const {
    return (generation_ + lives_ * 0x9E3779B1U) % generations;
  }
  [[nodiscard]] std::uint64_t cursor_at(std::uint64_t offset) const {
    return cursor_tag() << offset_bits | offset;
  }
  /// Where a cursor points; behind the head where it is none of this log's.
  [[nodiscard]] std::uint64_t offset_of(std::uint64_t cursor) const {
    const std::uint64_t offset = cursor & offset_mask;
    const bool mine = cursor >> offset_bits == cursor_tag();
    return mine && offset >= head_bytes && offset <= size_ ? offset : head_bytes;
  }

  /// One system call where it is so, which is what polling mostly finds.
  [[nodiscard]] bool nothing_new(std::uint64_t cursor) const {
    struct ::stat status {};
    return file_.valid() && status_at(folder_, log_name, status) == 0 && is_same(status) &&
           status.st_mtim.tv_sec == looked_at_.tv_sec &&
           status.st_mtim.tv_nsec == looked_at_.tv_nsec &&
           cursor == cursor_at(static_cast<std::uint64_t>(status.st_size));
  }
  [[nodiscard]] bool is_same(const struct ::stat& status) const {
    return status.st_ino == inode_ && status.st_dev == device_;
  }

  /// Under the lock: takes the file that has the name now, and its mark.
  [[nodiscard]] Status reopen() {
    struct ::stat status {};
    if (const int number = status_at(folder_, log_name, status); number != 0) {
      return file_error(number, "look at", log_name);
    }
    size_ = static_cast<std::uint64_t>(status.st_size);
    looked_at_ = status.st_mtim;
    const bool known = file_.valid() && is_same(status);
    const bool set_back = known && !still_holds_last();
    if (set_back) ++lives_;
    if (!known || set_back) KVMELD_TRY(load(status));
    return read_mark();
  }
  /// Whether the last record that was seen is where it was: in a file that was restored in place it
  /// is not.
  [[nodiscard]] bool still_holds_last() const {
    if (size_ < valid_end_) return false;
    if (last_at_ == 0) return true;
    RecordHead there;
    const int number = read_at(file_.get(), std::as_writable_bytes(std::span(&there, 1)), last_at_);
    return number == 0 && there == last_;
  }
  [[nodiscard]] Status load(const struct ::stat& status) {
    const int flags = (settings_.read_only ? O_RDONLY : O_RDWR) | O_NOFOLLOW;
    FileHandle file = open_file(folder_, log_name, flags);
    if (!file.valid()) return file_error(errno, "open", log_name);
    Words head{};
    const int number = read_at(file.get(), std::as_writable_bytes(std::span(head)), 0);
    if (number == ENODATA || (number == 0 && size_ < head_bytes)) {
      return error(ErrorCode::corrupt, "the record log was cut to ", size_, " bytes of a head of ",
                   head_bytes, ": restore it, or move it away to begin with none");
    }
    if (number != 0) return file_error(number, "read", log_name);
    constexpr unsigned version_bits = 56;
    if ((head[0] ^ log_magic) << 8U == 0 && head[0] != log_magic) {
      return error(ErrorCode::version_mismatch, "the record log is of version ",
                   static_cast<char>(head[0] >> version_bits), ", and this build reads ",
                   static_cast<char>(log_magic >> version_bits));
    }
    if (head != head_of(head[1], head[2])) {
      return error(ErrorCode::corrupt, "the record log begins with ", head[0], ", life ", head[1],
                   ", generation ", head[2], ": it is damaged, or no log");
    }
    // A log that was replaced is of a later generation; an earlier one was restored.
    const std::uint64_t ahead = (head[2] - generation_) % generations;
    if (life_ == head[1] && inode_ != 0 && (ahead == 0 || ahead > generations / 2)) ++lives_;
    file_ = std::move(file);
    inode_ = status.st_ino;
    device_ = status.st_dev;
    life_ = head[1];
    generation_ = head[2];
    valid_end_ = head_bytes;
    last_at_ = 0;
    damaged_.clear();
    missing_ = 0;
    name_synced_ = false;
    return {};
  }
  [[nodiscard]] Status read_mark() {
    Words mark{};
    const int number = read_at(file_.get(), std::as_writable_bytes(std::span(mark)), mark_at);
    if (number != 0) return file_error(number, "read", log_name);
    const StoreDamage lost{mark[2], mark[1]};
    if (mark == mark_of(generation_, mark[0], lost) && mark[0] <= offset_mask) {
      acknowledged_ = mark[0];
      lost_ = lost;
      damaged_.erase(mark_at);
    } else {  // the next writer makes it anew
      acknowledged_ = head_bytes;
      damaged_[mark_at] = sizeof mark;
    }
    return {};
  }

  /// Under the exclusive lock, or that of a reader: knows the end of the last whole record.
  [[nodiscard]] Status refresh() {
    KVMELD_TRY(reopen());
    return walk(valid_end_, size_, [](std::span<const std::byte>) { return Status(); }).status();
  }

  /// Under the exclusive lock and refreshed.
  [[nodiscard]] Status append(std::span<const std::byte> bytes) {
    if (bytes.size() > offset_mask - record_head_bytes - valid_end_) {
      return error(ErrorCode::store_full, bytes.size(), " bytes more make the record log of ",
                   valid_end_, " longer than 2^40");
    }
    StoreDamage lost = lost_;
    if (missing_ > 0) lost = {lost.places + 1, lost.bytes + missing_};
    if (size_ > valid_end_) {
      if (const int number = cut_file(file_.get(), valid_end_); number != 0) {
        return file_error(number, "cut the torn end of", log_name);
      }
      if (missing_ == 0) torn_bytes_ += size_ - valid_end_;
      size_ = valid_end_;
    }
    const Durability durability = settings_.durability;
    int number = write_record(file_.get(), valid_end_, bytes);
    if (number == 0 && durability != Durability::none) number = sync_file(file_.get());
    if (number == 0 && durability == Durability::file_and_folder && !name_synced_) {
      number = sync_folder(folder_, ".");
    }
    if (number != 0) {
      (void)cut_file(file_.get(), valid_end_);  // if not, the next writer does it
      return file_error(number, "append to", log_name);
    }
    name_synced_ = true;
    last_at_ = valid_end_;
    last_ = RecordHead(valid_end_, bytes);
    valid_end_ += record_head_bytes + bytes.size();
    size_ = valid_end_;
    lost_ = lost;
    missing_ = 0;
    acknowledged_ = valid_end_;
    const Words mark = mark_of(generation_, acknowledged_, lost_);
    // one that stays behind is no harm
    (void)write_at(file_.get(), std::as_bytes(std::span(mark)), mark_at);
    return {};
  }

  /// Under the exclusive lock: a new file, with `first` in the place of what stands before `from`;
  /// `from` 0: with nothing.
  [[nodiscard]] Status start(std::span<const std::byte> first, std::uint64_t from) {
    auto temp = TempFile::create(folder_);
    if (!temp) return temp.error();
    const std::uint64_t life = from == 0 ? fresh_number() : life_;
    const std::uint64_t before = from == 0 ? fresh_number() : generation_;
    const std::uint64_t generation = before % (generations - 1) + 1;
    std::uint64_t at = head_bytes;
    int number = 0;
    if (from != 0) {
      number = write_record(temp->get(), at, first);
      at += record_head_bytes + first.size();
      auto end = walk(from, valid_end_, [&](std::span<const std::byte> record) -> Status {
        if (number == 0) number = write_record(temp->get(), at, record);
        at += record_head_bytes + record.size();
        return {};
      });
      if (!end) return end.error();
    }
    const Words head = head_of(life, generation);
    const Words mark = mark_of(generation, at, from == 0 ? StoreDamage{} : damage());
    if (number == 0) number = write_at(temp->get(), std::as_bytes(std::span(head)), 0);
    if (number == 0) number = write_at(temp->get(), std::as_bytes(std::span(mark)), mark_at);
    if (number == 0) number = set_mode(temp->get(), settings_.mode);
    if (number == 0 && settings_.durability != Durability::none) number = sync_file(temp->get());
    if (number != 0) return file_error(number, "write a new", log_name);
    KVMELD_TRY(temp->replace(folder_, log_name));
    if (settings_.durability == Durability::file_and_folder) number = sync_folder(folder_, ".");
    return number == 0 ? Status() : file_error(number, "sync the folder of", log_name);
  }

  /// Gives the records between two offsets. From the head, or where the last walk ended, it also
  /// learns what is damaged and where the last whole record ends; from elsewhere, a cursor may
  /// point into the middle of a record.
  template <class Take>
  [[nodiscard]] Result<std::uint64_t> walk(std::uint64_t from, std::uint64_t size,
                                           const Take& take) {
    const bool at_record = from == head_bytes || from == valid_end_;
    const auto keep = [&](std::uint64_t at, const RecordHead& head,
                          std::span<const std::byte> bytes) -> Status {
      if (at_record && at >= last_at_) {
        last_at_ = at;
        last_ = head;
      }
      return take(bytes);
    };
    const auto gap = [&](std::uint64_t begin, std::uint64_t end) {
      if (at_record) damaged_[begin] = end - begin;
    };
    if (from == head_bytes) last_at_ = 0;
    auto end = walk_records(file_.get(), from, size, keep, gap);
    if (!end || !at_record || size != size_) return end;
    // the last record rotted; the next one takes its place, before cursors behind it
    if (*end < valid_end_) ++lives_;
    valid_end_ = *end;
    missing_ = acknowledged_ > valid_end_ ? acknowledged_ - valid_end_ : 0;
    return end;
  }

  int folder_;
  Settings settings_;
  FileHandle file_;
  ::ino_t inode_ = 0;
  ::dev_t device_ = 0;
  ::timespec looked_at_{};
  std::uint64_t life_ = 0;
  std::uint64_t lives_ = 0;  // how often the log was found to be another one, or set back
  std::uint64_t generation_ = 0;
  std::uint64_t size_ = 0;
  std::uint64_t acknowledged_ = 0;
  std::uint64_t valid_end_ = 0;
  std::uint64_t last_at_ = 0;  // where the last whole record stands, and its head; 0: none
  RecordHead last_;
  // a rename that nobody synced would take with it what is appended later
  bool name_synced_ = false;
  std::uint64_t torn_bytes_ = 0;
  StoreDamage lost_;                                // no longer in the file
  std::map<std::uint64_t, std::uint64_t> damaged_;  // in the file: bytes, by where they begin
  std::uint64_t missing_ = 0;                       // between the last whole record and the mark
};

}  // namespace detail

KVMELD_NAMESPACE_END
