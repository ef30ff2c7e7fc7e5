#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include <kvmeld/status.hpp>
#include <kvmeld/transport/file_io.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

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
    return Result(std::move(lock));  // spelled out for nvcc, which would copy
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
      temp.name_ = "temp/" + detail::decimal(fresh_number());
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
      if (::fstat(temp.file_.get(), &status) == 0 && status.st_nlink > 0) return Result(std::move(temp));
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

}  // namespace detail

KVMELD_NAMESPACE_END
