#pragma once

/// The log and the files of a file store.

#if !__has_include(<sys/file.h>)
#error "the file store needs POSIX files and flock(); use the memory or the Redis store here"
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace stores {

/// What survives when a call has returned and the machine, not only the process, stops.
enum class Durability : std::uint8_t {
  none,             ///< nothing, but all of it when only processes die; for folders in memory
  file,             ///< a file's bytes are synced, its name follows when the file system pleases
  file_and_folder,  ///< bytes and name
};

namespace detail {

/// Owns a file descriptor.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int fd) noexcept : fd_(fd) {}
  FileHandle(FileHandle&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileHandle() {
    // Not made again after EINTR: the number may be another file's by then. What could not be
    // written, `sync_file` has told.
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// Repeats a system call that a signal has interrupted. All calls on files pass through here: on
/// network and user-space file systems each of them may end with EINTR, not only those that a
/// manual names. But for `close` (`FileHandle`), `mmap` and `getcwd`, which no signal ends that a
/// process lives to see, and pauses, whose early end is an earlier look.
template <class Call>
auto uninterrupted(const Call& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

[[nodiscard]] inline FileHandle open_file(int folder, const std::string& name, int flags,
                                          unsigned mode = 0) {
  return FileHandle(
      uninterrupted([&] { return ::openat(folder, name.c_str(), flags | O_CLOEXEC, mode); }));
}

/// `store_full` where bytes do not fit (disk, quota, RLIMIT_FSIZE with SIGXFSZ ignored), else
/// `unavailable`.
[[nodiscard]] inline Status file_error(int number, std::string_view what, std::string_view name) {
  const bool full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  return extend::error(full ? ErrorCode::store_full : ErrorCode::unavailable, "cannot ", what, " ",
                       name, ": ", std::generic_category().message(number), " (errno ", number,
                       ")");
}

/// 0, or the errno.
[[nodiscard]] inline int write_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset) {
  constexpr std::size_t most = std::size_t{1} << 30U;  // Linux writes less than 2 GiB a call
  while (!bytes.empty()) {
    const ::ssize_t n = uninterrupted([&] {
      return ::pwrite(fd, bytes.data(), (std::min)(bytes.size(), most),
                      static_cast<::off_t>(offset));
    });
    if (n <= 0) return n < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

/// 0, or the errno; ENODATA where the file ends first.
[[nodiscard]] inline int read_at(int fd, std::span<std::byte> bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ::ssize_t n = uninterrupted(
        [&] { return ::pread(fd, bytes.data(), bytes.size(), static_cast<::off_t>(offset)); });
    if (n <= 0) return n < 0 ? errno : ENODATA;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

[[nodiscard]] inline int sync_file(int fd) {
  return uninterrupted([&] { return ::fsync(fd); }) == 0 ? 0 : errno;
}
/// Makes the names in a folder durable.
[[nodiscard]] inline int sync_folder(int folder, const std::string& name) {
  const FileHandle opened = open_file(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  return opened.valid() ? sync_file(opened.get()) : errno;
}

/// 0, or the errno.
[[nodiscard]] inline int status_at(int folder, const std::string& name, struct ::stat& status) {
  return uninterrupted([&] { return ::fstatat(folder, name.c_str(), &status, 0); }) == 0 ? 0
                                                                                         : errno;
}
[[nodiscard]] inline int status_of_file(int fd, struct ::stat& status) {
  return uninterrupted([&] { return ::fstat(fd, &status); }) == 0 ? 0 : errno;
}
[[nodiscard]] inline int cut_file(int fd, std::uint64_t size) {
  return uninterrupted([&] { return ::ftruncate(fd, static_cast<::off_t>(size)); }) == 0 ? 0
                                                                                         : errno;
}
[[nodiscard]] inline int set_mode(int fd, unsigned mode) {
  return uninterrupted([&] { return ::fchmod(fd, mode); }) == 0 ? 0 : errno;
}
/// What is not there is removed already.
[[nodiscard]] inline int remove_name(int folder, const std::string& name, int flags = 0) {
  const int result = uninterrupted([&] { return ::unlinkat(folder, name.c_str(), flags); });
  return result == 0 || errno == ENOENT ? 0 : errno;
}

/// Creates a folder with exactly this mode; one that is there keeps its own. 0, or the errno.
[[nodiscard]] inline int make_folder(int folder, const std::string& name, unsigned mode) {
  if (uninterrupted([&] { return ::mkdirat(folder, name.c_str(), mode); }) != 0)
    return errno == EEXIST ? 0 : errno;
  return uninterrupted([&] { return ::fchmodat(folder, name.c_str(), mode, 0); }) == 0 ? 0 : errno;
}

/// A folder to look names up in; ELOOP or ENOTDIR in errno where the name is a link.
[[nodiscard]] inline FileHandle open_folder(int folder, const std::string& name) {
#ifdef O_PATH
  constexpr int look_up = O_PATH;
#else
  constexpr int look_up = O_RDONLY;
#endif
  return open_file(folder, name, look_up | O_DIRECTORY | O_NOFOLLOW);
}

/// Nanoseconds of a clock that only goes forward.
[[nodiscard]] inline std::int64_t monotonic_ns() {
  ::timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// A number that no other call, thread or process gives: for names, not for secrets.
[[nodiscard]] inline std::uint64_t fresh_number() {
  static std::atomic<std::uint64_t> calls{0};
  ::timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  Hasher hasher;
  hasher.value(static_cast<std::int64_t>(::getpid()));
  hasher.value(std::int64_t{now.tv_sec});
  hasher.value(std::int64_t{now.tv_nsec});
  hasher.value(++calls);
  hasher.value(reinterpret_cast<std::uintptr_t>(&now));
  return hasher.digest().low;
}

/// A file's bytes, read-only. Mapped at a cost that does not grow with their number; small ones are
/// copied, since mappings are few and a page is small, and all are where `copied`. Size and type
/// are the caller's to check.
[[nodiscard]] inline Result<Blob> map_file(int fd, std::size_t size, bool copied,
                                           std::string_view name) {
  constexpr std::size_t mapped_from = 16385;
  Blob blob;
  blob.size = size;
  if (size >= mapped_from && !copied) {
    void* const at = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) {
      const auto unmap = [size](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), size); };
      blob.data = std::shared_ptr<const std::byte[]>(static_cast<const std::byte*>(at), unmap);
      return blob;
    }
    if (errno != ENOMEM && errno != ENODEV) return file_error(errno, "map", name);
  }
  const std::shared_ptr<std::byte[]> bytes(new std::byte[(std::max)(size, std::size_t{1})]);
  if (const int number = read_at(fd, {bytes.get(), size}, 0); number != 0) {
    return file_error(number, "read", name);
  }
  blob.data = bytes;
  return blob;
}

/// Whether a file of this name holds exactly these bytes. One that is no file, or whose bytes the
/// disk does not give, does not. Where it does and `sync`, it is durable afterwards: whoever wrote
/// it may have promised less.
///
/// Errors: ENOENT for `not_found`; those of files. O(bytes), a window at a time.
[[nodiscard]] inline Result<bool> holds_bytes(int folder, const std::string& name,
                                              std::span<const std::byte> bytes, bool sync) {
  const FileHandle file = open_file(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!file.valid()) {
    if (errno == ENOENT) return extend::error(ErrorCode::not_found, "no file ", name);
    if (errno == ELOOP) return false;
    return file_error(errno, "open", name);
  }
  struct ::stat status {};
  if (const int number = status_of_file(file.get(), status); number != 0) {
    return file_error(number, "look at", name);
  }
  if (!S_ISREG(status.st_mode) || static_cast<std::uint64_t>(status.st_size) != bytes.size()) {
    return false;
  }
  std::vector<std::byte> window((std::min)(bytes.size(), std::size_t{262'144}));
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t count = (std::min)(window.size(), bytes.size() - at);
    const std::span<std::byte> here(window.data(), count);
    if (read_at(file.get(), here, at) != 0) return false;
    if (std::memcmp(here.data(), bytes.data() + at, count) != 0) return false;
    at += count;
  }
  if (const int number = sync ? sync_file(file.get()) : 0; number != 0) {
    return file_error(number, "sync", name);
  }
  return true;
}

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

/// Excludes other processes, other handles and other threads while it lives.
///
/// Opens the lock file anew each time: a lock belongs to an opened file, and a forked child shares
/// its parent's.
class FileLock {
 public:
  /// @param how LOCK_SH or LOCK_EX. Errors: `unavailable` when another holds it for the whole time.
  [[nodiscard]] static Result<FileLock> take(int folder, const std::string& name, int how,
                                             std::int64_t timeout_ms) {
    FileLock lock;
    // Network file systems want a file that is open for writing for LOCK_EX; who only reads may not
    // be allowed to.
    lock.file_ = open_file(folder, name, (how == LOCK_EX ? O_RDWR : O_RDONLY) | O_NOFOLLOW);
    if (!lock.file_.valid()) return file_error(errno, "open", name);
    const std::int64_t start = monotonic_ns();
    std::int64_t pause_ns = 20'000;
    while (uninterrupted([&] { return ::flock(lock.file_.get(), how | LOCK_NB); }) != 0) {
      if (errno != EWOULDBLOCK) return file_error(errno, "lock", name);
      if ((monotonic_ns() - start) / 1'000'000 >= timeout_ms) {
        return extend::error(ErrorCode::unavailable,
                             "another process has held the store's lock for ", timeout_ms, " ms");
      }
      const ::timespec pause{0, static_cast<long>(pause_ns)};
      ::nanosleep(&pause, nullptr);
      pause_ns = (std::min)(pause_ns * 2, std::int64_t{2'000'000});
    }
    return Result(std::move(lock));  // spelled out for nvcc, which would copy
  }

 private:
  FileHandle file_;  // closing it unlocks
};

/// A file in the making, which gets its name when it is complete and goes when it is not.
///
/// Its writer holds a lock on it: who cleans up can tell what a dead process has left from what a
/// living one is writing, also across containers, where process ids mean nothing.
class TempFile {
 public:
  [[nodiscard]] static Result<TempFile> create(int folder) {
    for (int attempt = 0; attempt < 100; ++attempt) {
      TempFile temp;
      temp.folder_ = folder;
      temp.name_ = "temp/" + extend::decimal(fresh_number());
      temp.file_ = open_file(folder, temp.name_, O_CREAT | O_EXCL | O_RDWR, 0600);
      if (!temp.file_.valid()) {
        const int number = errno;
        const std::string name = std::exchange(temp.name_, {});
        if (number == EEXIST) continue;
        return file_error(number, "create", name);
      }
      uninterrupted([&] { return ::flock(temp.file_.get(), LOCK_EX); });
      struct ::stat status {};
      // Whoever cleans up may have looked at it before it was locked.
      const bool named = status_of_file(temp.file_.get(), status) == 0 && status.st_nlink > 0;
      if (named) return Result(std::move(temp));
    }
    return extend::error(ErrorCode::unavailable,
                         "no free name for a temporary file after 100 attempts");
  }

  TempFile(TempFile&& other) noexcept
      : folder_(other.folder_),
        name_(std::exchange(other.name_, {})),
        file_(std::move(other.file_)) {}
  TempFile& operator=(TempFile&&) = delete;
  ~TempFile() {
    if (!name_.empty()) (void)remove_name(folder_, name_);
  }

  [[nodiscard]] int get() const noexcept { return file_.get(); }
  /// Gives it a name that must be free, in a folder of the same file system: true; false where it
  /// is not. Errors: as `file_error`; `unsupported` where that cannot be told and it may not
  /// replace.
  [[nodiscard]] Result<bool> publish(int folder, const std::string& name, bool may_replace) {
    const auto link = [&] { return ::linkat(folder_, name_.c_str(), folder, name.c_str(), 0); };
    if (uninterrupted(link) == 0) return true;
    if (errno == EEXIST) return false;
    // Without hard links the rename may replace a blob that came to its name meanwhile.
    if (errno != EPERM && errno != EOPNOTSUPP && errno != EMLINK) {
      return file_error(errno, "name", name);
    }
    if (!may_replace) {
      return extend::error(ErrorCode::unsupported, "cannot tell who names ", name,
                           " first: no hard link there (errno ", errno, ")");
    }
    KVMELD_TRY(replace(folder, name));
    return true;
  }
  /// Gives it a name, whatever has that name now. Errors: as `file_error`.
  [[nodiscard]] Status replace(int folder, const std::string& name) {
    const auto rename = [&] { return ::renameat(folder_, name_.c_str(), folder, name.c_str()); };
    if (uninterrupted(rename) != 0) return file_error(errno, "rename to", name);
    name_.clear();
    return {};
  }

 private:
  TempFile() = default;
  int folder_ = -1;
  std::string name_;
  FileHandle file_;
};

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

  [[nodiscard]] Result<replica::RecordBatch> read(std::uint64_t cursor) {
    replica::RecordBatch batch;
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
  [[nodiscard]] replica::StoreDamage damage() const {
    replica::StoreDamage all = lost_;
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
                                     const replica::StoreDamage& lost) {
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
      return extend::error(ErrorCode::corrupt, "the record log was cut to ", size_,
                           " bytes of a head of ", head_bytes,
                           ": restore it, or move it away to begin with none");
    }
    if (number != 0) return file_error(number, "read", log_name);
    constexpr unsigned version_bits = 56;
    if ((head[0] ^ log_magic) << 8U == 0 && head[0] != log_magic) {
      return extend::error(ErrorCode::version_mismatch, "the record log is of version ",
                           static_cast<char>(head[0] >> version_bits), ", and this build reads ",
                           static_cast<char>(log_magic >> version_bits));
    }
    if (head != head_of(head[1], head[2])) {
      return extend::error(ErrorCode::corrupt, "the record log begins with ", head[0], ", life ",
                           head[1], ", generation ", head[2], ": it is damaged, or no log");
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
    const replica::StoreDamage lost{mark[2], mark[1]};
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
      return extend::error(ErrorCode::store_full, bytes.size(),
                           " bytes more make the record log of ", valid_end_, " longer than 2^40");
    }
    replica::StoreDamage lost = lost_;
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
    const Words mark = mark_of(generation, at, from == 0 ? replica::StoreDamage{} : damage());
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
  replica::StoreDamage lost_;                       // no longer in the file
  std::map<std::uint64_t, std::uint64_t> damaged_;  // in the file: bytes, by where they begin
  std::uint64_t missing_ = 0;                       // between the last whole record and the mark
};

}  // namespace detail

}  // namespace stores

KVMELD_NAMESPACE_END
