#pragma once

#if !__has_include(<sys/file.h>)
#error "the file store needs POSIX files and flock(); use the memory or the Redis store here"
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
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

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
  return error(full ? ErrorCode::store_full : ErrorCode::unavailable, "cannot ", what, " ", name,
               ": ", std::generic_category().message(number), " (errno ", number, ")");
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
    if (errno == ENOENT) return error(ErrorCode::not_found, "no file ", name);
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

}  // namespace detail

KVMELD_NAMESPACE_END
