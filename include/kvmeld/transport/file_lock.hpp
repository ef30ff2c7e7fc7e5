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
        return error(ErrorCode::unavailable, "another process has held the store's lock for ",
                     timeout_ms, " ms");
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
      const bool named = status_of_file(temp.file_.get(), status) == 0 && status.st_nlink > 0;
      if (named) return Result(std::move(temp));
    }
    return error(ErrorCode::unavailable, "no free name for a temporary file after 100 attempts");
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
      return error(ErrorCode::unsupported, "cannot tell who names ", name,
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

}  // namespace detail

KVMELD_NAMESPACE_END
