#pragma once

#if !__has_include(<sys/file.h>)
#error "kvmeld/transport/file_*.hpp needs POSIX files and flock(); use memory_store.hpp or redis_store.hpp here"
#endif

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

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
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_ = -1;
};

/// Repeats a system call that a signal has interrupted.
template <class Call>
auto uninterrupted(const Call& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

[[nodiscard]] inline FileHandle open_file(int folder, const std::string& name, int flags, unsigned mode = 0) {
  return FileHandle(uninterrupted([&] { return ::openat(folder, name.c_str(), flags | O_CLOEXEC, mode); }));
}

/// `store_full` where bytes do not fit (disk, quota, RLIMIT_FSIZE with SIGXFSZ ignored), else `unavailable`.
[[nodiscard]] inline Status file_error(int number, std::string_view what, std::string_view name) {
  const bool full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  return error(full ? ErrorCode::store_full : ErrorCode::unavailable, "cannot ", what, " ", name, ": ",
               std::generic_category().message(number), " (errno ", number, ")");
}

/// 0, or the errno.
[[nodiscard]] inline int write_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset) {
  constexpr std::size_t most = std::size_t{1} << 30U;  // Linux writes less than 2 GiB a call
  while (!bytes.empty()) {
    const ::ssize_t n = uninterrupted(
        [&] { return ::pwrite(fd, bytes.data(), (std::min)(bytes.size(), most), static_cast<::off_t>(offset)); });
    if (n <= 0) return n < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

/// 0, or the errno; ENODATA where the file ends first.
[[nodiscard]] inline int read_at(int fd, std::span<std::byte> bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ::ssize_t n = uninterrupted([&] { return ::pread(fd, bytes.data(), bytes.size(), static_cast<::off_t>(offset)); });
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
  const FileHandle opened = open_file(folder, name, O_RDONLY | O_DIRECTORY);
  return opened.valid() ? sync_file(opened.get()) : errno;
}

/// Creates a folder with exactly this mode; one that is there keeps its own. 0, or the errno.
[[nodiscard]] inline int make_folder(int folder, const std::string& name, unsigned mode) {
  if (::mkdirat(folder, name.c_str(), mode) == 0) return ::fchmodat(folder, name.c_str(), mode, 0) == 0 ? 0 : errno;
  return errno == EEXIST ? 0 : errno;
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

/// Excludes other processes, other handles and other threads while it lives.
///
/// Opens the lock file anew each time: a lock belongs to an opened file, and a forked child shares its parent's.
class FileLock {
 public:
  /// @param how LOCK_SH or LOCK_EX. Errors: `unavailable` when another holds it for the whole time.
  [[nodiscard]] static Result<FileLock> take(int folder, const std::string& name, int how, std::int64_t timeout_ms) {
    FileLock lock;
    lock.file_ = open_file(folder, name, O_RDWR);  // network file systems want it for LOCK_EX
    if (!lock.file_.valid()) return file_error(errno, "open", name);
    const std::int64_t start = monotonic_ns();
    std::int64_t pause_ns = 20'000;
    while (uninterrupted([&] { return ::flock(lock.file_.get(), how | LOCK_NB); }) != 0) {
      if (errno != EWOULDBLOCK) return file_error(errno, "lock", name);
      if (monotonic_ns() - start > timeout_ms * 1'000'000) {
        return error(ErrorCode::unavailable, "another process has held the store's lock for ", timeout_ms, " ms");
      }
      const ::timespec pause{0, static_cast<long>(pause_ns)};
      ::nanosleep(&pause, nullptr);
      pause_ns = (std::min)(pause_ns * 2, std::int64_t{2'000'000});
    }
    return lock;
  }

 private:
  FileHandle file_;  // closing it unlocks
};

/// A file in the making, which gets its name when it is complete and goes when it is not.
///
/// Its writer holds a lock on it: who cleans up can tell what a dead process has left from what a living one is writing,
/// also across containers, where process ids mean nothing.
class TempFile {
 public:
  [[nodiscard]] static Result<TempFile> create(int folder) {
    for (int attempt = 0; attempt < 100; ++attempt) {
      TempFile temp;
      temp.folder_ = folder;
      temp.name_ = "temp/" + std::to_string(fresh_number());
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
      if (::fstat(temp.file_.get(), &status) == 0 && status.st_nlink > 0) return temp;
    }
    return error(ErrorCode::unavailable, "no free name for a temporary file after 100 attempts");
  }

  TempFile(TempFile&& other) noexcept
      : folder_(other.folder_), name_(std::exchange(other.name_, {})), file_(std::move(other.file_)) {}
  TempFile& operator=(TempFile&&) = delete;
  ~TempFile() {
    if (!name_.empty()) ::unlinkat(folder_, name_.c_str(), 0);
  }

  [[nodiscard]] int get() const noexcept { return file_.get(); }
  /// Gives it a name that must be free: true; false where it is not. Errors: as `file_error`.
  [[nodiscard]] Result<bool> publish(const std::string& name) {
    if (::linkat(folder_, name_.c_str(), folder_, name.c_str(), 0) == 0) return true;
    if (errno == EEXIST) return false;
    // Without hard links the rename may replace a blob of the same name, that is, of the same bytes.
    if (errno != EPERM && errno != EOPNOTSUPP && errno != EMLINK) return file_error(errno, "name", name);
    KVMELD_TRY(replace(name));
    return true;
  }
  /// Gives it a name, whatever has that name now. Errors: as `file_error`.
  [[nodiscard]] Status replace(const std::string& name) {
    if (::renameat(folder_, name_.c_str(), folder_, name.c_str()) != 0) return file_error(errno, "rename to", name);
    name_.clear();
    return {};
  }

 private:
  TempFile() = default;
  int folder_ = -1;
  std::string name_;
  FileHandle file_;
};

/// A file's bytes, read-only: mapped, and so at a cost that does not grow with their number; small ones copied, since mappings
/// are few and a page is small. Size and type are the caller's to check.
[[nodiscard]] inline Result<Blob> map_file(int fd, std::size_t size, std::string_view name) {
  constexpr std::size_t copied = 16384;
  Blob blob;
  blob.size = size;
  if (size > copied) {
    void* const at = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) {
      blob.data = std::shared_ptr<const std::byte[]>(static_cast<const std::byte*>(at), [size](const std::byte* p) {
        ::munmap(const_cast<std::byte*>(p), size);
      });
      return blob;
    }
    if (errno != ENOMEM && errno != ENODEV) return file_error(errno, "map", name);
  }
  const std::shared_ptr<std::byte[]> bytes(new std::byte[(std::max)(size, std::size_t{1})]);
  if (const int number = read_at(fd, {bytes.get(), size}, 0); number != 0) return file_error(number, "read", name);
  blob.data = bytes;
  return blob;
}

}  // namespace detail

KVMELD_NAMESPACE_END
