#pragma once

#include <dirent.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/session/payload_store.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/transport/file_io.hpp>
#include <kvmeld/transport/file_lock.hpp>
#include <kvmeld/transport/file_log.hpp>

KVMELD_NAMESPACE_BEGIN

/// How a `FileStore` writes.
struct FileStoreOptions {
  Durability durability = Durability::file_and_folder;
  unsigned file_mode = 0600;               ///< of the record log; blobs lack its write bits. 0660 lets a group in
  unsigned folder_mode = 0700;             ///< of folders that it creates
  std::int64_t lock_timeout_ms = 10'000;   ///< how long records wait for another process before they are `unavailable`
  bool folder_must_be_own = false;         ///< refuses a folder of another user, or one that is a link
};

/// Blobs, payloads and records in a folder that processes of one machine share, without a server.
///
/// Models `BlobStore` and `PayloadStore`. `get` and `map_payload` map the file: all processes read the same memory, whatever
/// its size. Each process may die at any instruction: a blob has its name only when it is whole, a torn record is detected and cut
/// off, and what a call has acknowledged stays (under the machine's own death: as `Durability` says).
/// A copy is another handle; all calls are thread-safe; a forked child may go on with the parent's handle.
/// Files are never written in place. Whoever truncates one by other means makes its readers fail with SIGBUS.
class FileStore {
 public:
  /// Opens a folder, creating it where its parent exists, and removes what dead processes have left half-written.
  ///
  /// Errors: `invalid_argument` for a path that cannot be such a folder, `unavailable` for one that may not be used or whose lock
  /// is held, `store_full`, `corrupt` or `version_mismatch` for a record log that this build cannot read.
  [[nodiscard]] static Result<FileStore> open(const std::string& folder, const FileStoreOptions& options = {}) {
    if (folder.empty() || folder.find('\0') != std::string::npos) {
      return detail::error(ErrorCode::invalid_argument, "a path of ", folder.size(), " bytes is empty or holds a zero byte");
    }
    int number = detail::make_folder(AT_FDCWD, folder, options.folder_mode);
    detail::FileHandle opened;
    if (number == 0) {
      opened = detail::open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | (options.folder_must_be_own ? O_NOFOLLOW : 0));
      if (!opened.valid()) number = errno;
    }
    if (number == ENOENT || number == ENOTDIR || number == ENAMETOOLONG || number == ELOOP) {
      return detail::error(ErrorCode::invalid_argument, detail::file_error(number, "use the folder", folder).message());
    }
    if (number != 0) return detail::file_error(number, "use the folder", folder);
    struct ::stat status {};
    if (options.folder_must_be_own && (::fstat(opened.get(), &status) != 0 || status.st_uid != ::geteuid())) {
      return detail::error(ErrorCode::invalid_argument, "the folder ", folder, " belongs to user ", status.st_uid, ", this process to ",
                           ::geteuid());
    }
    for (const char* inner : {"temp", "blobs", "payloads"}) {
      if (number = detail::make_folder(opened.get(), inner, options.folder_mode); number != 0) {
        return detail::file_error(number, "create", inner);
      }
    }
    clean_up(opened.get());
    auto shared = std::make_shared<Shared>(std::move(opened), options);
    KVMELD_TRY(shared->log.open());
    return FileStore(std::move(shared));
  }

  /// O(bytes); without waiting for others. Errors: `store_full`, `unavailable`.
  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) { return put_file("blobs/", 0, key, bytes); }
  /// O(1) in the size: see the class. Errors: `not_found`, `unavailable`.
  Result<Blob> get(const BlobKey& key) { return map_file("blobs/", key); }
  Result<bool> contains(const BlobKey& key) {
    const std::string name = path("blobs/", key);
    if (::faccessat(shared_->folder.get(), name.c_str(), F_OK, 0) == 0) return true;
    if (errno == ENOENT && !vanished()) return false;
    return detail::file_error(errno, "look for", name);
  }
  /// What is not there is erased already; holders of a mapped blob keep it.
  Status erase(const BlobKey& key) { return erase_file("blobs/", key); }

  Result<bool> put_payload(const BlobKey& key, std::span<const std::byte> bytes) { return put_file("payloads/", 256, key, bytes); }
  Result<Blob> map_payload(const BlobKey& key) { return map_file("payloads/", key); }
  Status erase_payload(const BlobKey& key) { return erase_file("payloads/", key); }

  /// Errors: `store_full`, `unavailable`.
  Status add_record(std::span<const std::byte> bytes) {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.add(bytes);
  }
  /// O(bytes beyond the cursor); one system call where there are none. Errors: `unavailable`.
  Result<RecordBatch> records(std::uint64_t cursor) {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.read(cursor);
  }
  /// O(bytes that stay). Errors: `store_full`, `unavailable`.
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.replace(cursor, bytes);
  }

  /// Bytes of the record log that this handle skipped or cut off because they were torn or damaged.
  [[nodiscard]] std::uint64_t skipped_bytes() const {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.skipped_bytes();
  }

  /// Removes a store's files and its folder; processes that have mapped blobs keep them. Other files stay, and so the folder.
  static Status remove(const std::string& folder) {
    const detail::FileHandle opened = detail::open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!opened.valid()) return errno == ENOENT ? Status() : detail::file_error(errno, "open", folder);
    const int at = opened.get();
    for (const std::string kind : {"blobs", "payloads"}) {
      each_name(at, kind, [&](const std::string& inner) {
        each_name(at, kind + "/" + inner, [&](const std::string& name) { ::unlinkat(at, (kind + "/" + inner + "/" + name).c_str(), 0); });
        ::unlinkat(at, (kind + "/" + inner).c_str(), AT_REMOVEDIR);
      });
    }
    each_name(at, "temp", [&](const std::string& name) { ::unlinkat(at, ("temp/" + name).c_str(), 0); });
    for (const char* name : {"temp", "blobs", "payloads"}) ::unlinkat(at, name, AT_REMOVEDIR);
    for (const char* name : {"records", "lock"}) ::unlinkat(at, name, 0);
    if (::rmdir(folder.c_str()) != 0 && errno != ENOENT) return detail::file_error(errno, "remove the folder", folder);
    return {};
  }

 private:
  struct Shared {
    Shared(detail::FileHandle opened, const FileStoreOptions& given)
        : folder(std::move(opened)), options(given), log(folder.get(), given.durability, given.file_mode, given.lock_timeout_ms) {}

    detail::FileHandle folder;
    FileStoreOptions options;
    std::mutex log_mutex;
    detail::RecordLog log;
    std::array<std::atomic<bool>, 512> known{};  // inner folders whose names this handle knows to be durable
  };

  explicit FileStore(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  /// In one of 256 folders, by the second byte: the first names the hash, and is the same for most.
  [[nodiscard]] static std::string path(const char* kind, const BlobKey& key) {
    const std::string hex = key.hex();
    return std::string(kind) + hex.substr(2, 2) + "/" + hex;
  }

  /// Whether the folder itself was removed, in which case an absent file says nothing. Keeps errno.
  [[nodiscard]] bool vanished() const {
    const int number = errno;
    struct ::stat status {};
    const bool gone = ::fstat(shared_->folder.get(), &status) != 0 || status.st_nlink == 0;
    errno = number;
    return gone;
  }

  [[nodiscard]] Result<bool> put_file(const char* kind, std::size_t first_known, const BlobKey& key, std::span<const std::byte> bytes) {
    const int folder = shared_->folder.get();
    const Durability durability = shared_->options.durability;
    const std::string name = path(kind, key);
    const std::string inner = name.substr(0, name.rfind('/'));
    int number = 0;
    if (std::atomic<bool>& known = shared_->known[first_known + key.bytes[1]]; !known) {
      number = detail::make_folder(folder, inner, shared_->options.folder_mode);
      if (number == 0 && durability == Durability::file_and_folder) number = detail::sync_folder(folder, kind);
      if (number != 0) return detail::file_error(number, "create", inner);
      known = true;
    }
    bool created = false;
    if (::faccessat(folder, name.c_str(), F_OK, 0) != 0) {
      auto temp = detail::TempFile::create(folder);
      if (!temp) return temp.error();
      number = detail::write_at(temp->get(), bytes, 0);
      if (number == 0 && ::fchmod(temp->get(), shared_->options.file_mode & 0444U) != 0) number = errno;
      if (number == 0 && durability != Durability::none) number = detail::sync_file(temp->get());
      if (number != 0) return detail::file_error(number, "write", name);
      auto named = temp->publish(name);
      if (!named) return named.error();
      created = *named;
    }
    // Also where it was there: whoever put it may not have come to this line.
    if (durability == Durability::file_and_folder) number = detail::sync_folder(folder, inner);
    if (number != 0) return detail::file_error(number, "sync the folder", inner);
    return created;
  }

  [[nodiscard]] Result<Blob> map_file(const char* kind, const BlobKey& key) const {
    const std::string name = path(kind, key);
    const detail::FileHandle file = detail::open_file(shared_->folder.get(), name, O_RDONLY | O_NOFOLLOW);
    if (!file.valid()) {
      if (errno == ENOENT && !vanished()) return detail::error(ErrorCode::not_found, "no file ", name);
      return detail::file_error(errno, "open", name);
    }
    struct ::stat status {};
    if (::fstat(file.get(), &status) != 0) return detail::file_error(errno, "look at", name);
    if (!S_ISREG(status.st_mode)) return detail::file_error(EINVAL, "read, being no file,", name);
    return detail::map_file(file.get(), static_cast<std::size_t>(status.st_size), name);
  }

  [[nodiscard]] Status erase_file(const char* kind, const BlobKey& key) {
    const std::string name = path(kind, key);
    if (::unlinkat(shared_->folder.get(), name.c_str(), 0) == 0 || (errno == ENOENT && !vanished())) return {};
    return detail::file_error(errno, "erase", name);
  }

  template <class Take>
  static void each_name(int folder, const std::string& name, const Take& take) {
    const int fd = ::openat(folder, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ::DIR* const list = fd < 0 ? nullptr : ::fdopendir(fd);
    if (list == nullptr) return;
    while (const ::dirent* const entry = ::readdir(list)) {
      const std::string found = entry->d_name;
      if (found != "." && found != "..") take(found);
    }
    ::closedir(list);
  }

  /// A temporary file that can be locked has lost its writer.
  static void clean_up(int folder) {
    each_name(folder, "temp", [folder](const std::string& found) {
      const std::string name = "temp/" + found;
      const detail::FileHandle file = detail::open_file(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      if (file.valid() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlinkat(folder, name.c_str(), 0);
    });
  }

  std::shared_ptr<Shared> shared_;
};

KVMELD_NAMESPACE_END
