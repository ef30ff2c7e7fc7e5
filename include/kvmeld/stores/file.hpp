#pragma once

/// Stores in a folder and in shared memory.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include <dirent.h>

#include <kvmeld/config.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/stores/detail/file_log.hpp>

KVMELD_NAMESPACE_BEGIN

namespace stores {

/// How a `FileStore` writes, and what it gives out.
struct FileStoreOptions {
  Durability durability = Durability::file_and_folder;
  /// Of the record log; blobs lack its write bits. 0660 lets a group in.
  unsigned file_mode = 0600;
  unsigned folder_mode = 0700;  ///< of folders that it creates
  /// How long records wait for another process before they are `unavailable`.
  std::int64_t lock_timeout_ms = 10'000;
  bool folder_must_be_own = false;  ///< refuses a folder of another user, or one that is a link
  /// Writes nothing, for folders without write permission; writing calls are `unsupported`.
  bool read_only = false;
  /// `get` and `map_payload` give copies that nobody else can change, O(bytes) and as much memory
  /// in each process, instead of the file's own pages: what was verified once stays so, also where
  /// others who may write to the folder are not trusted.
  bool private_copies = false;
};

/// Blobs, payloads and records in a folder that processes of one machine share, without a server.
///
/// An `ArbiterStore` and a `PayloadStore`. `get` and `map_payload` map the file: all processes read
/// the same memory, whatever its size. Each process may die at any instruction: a blob has its name
/// only when it is whole, a torn record is detected and cut off, and what a call has acknowledged
/// stays (under the machine's own death: as `Durability` says). What the disk spoils of the record
/// log is skipped and counted: `damage()`. A copy is another handle; all calls are thread-safe; a
/// forked child may go on with the parent's handle. Files are never written in place by this class.
/// Whoever does it by other means changes mapped bytes after they were verified, and whoever
/// truncates one makes its readers fail with SIGBUS: `FileStoreOptions::private_copies` rules both
/// out. Folders inside are never links. Where another folder takes the name of this one, or an
/// earlier state of it is restored, record calls follow it and `generation()` changes.
class FileStore final : public replica::ArbiterStore, public replica::PayloadStore {
 public:
  /// Opens a folder, creating it where its parent exists, and removes what dead processes have left
  /// half-written. With `read_only`, one that is a store already, creating and removing nothing.
  ///
  /// Damage that was found in the record log is no error: `damage()` tells, and what could be read
  /// is there. Errors: `invalid_argument` for a path that cannot be such a folder, or one in which
  /// a folder of the store's is a link; `unavailable` for one that may not be used or whose lock is
  /// held, `store_full`; `corrupt` for a record log whose head is damaged or cut off,
  /// `version_mismatch` for one that this build does not read.
  [[nodiscard]] static Result<FileStore> open(const std::string& folder,
                                              const FileStoreOptions& options = {}) {
    if (folder.empty() || folder.find('\0') != std::string::npos) {
      return extend::error(ErrorCode::invalid_argument, "a path of ", folder.size(),
                           " bytes is empty or holds a zero byte");
    }
    if (!options.read_only) {
      if (const int number = detail::make_folder(AT_FDCWD, folder, options.folder_mode);
          number != 0) {
        return unusable(number, folder);
      }
    }
    auto opened = open_checked(folder, options);
    if (!opened) return opened.error();
    auto shared = std::make_shared<Shared>(*std::move(opened), absolute(folder), options);
    KVMELD_TRY(shared->log.open());
    return FileStore(std::move(shared));
  }

  /// O(bytes), also where they are there already; without waiting for others. Errors: `store_full`,
  /// `unavailable`, `unsupported`.
  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) override {
    return put_file("blobs/", 0, key, bytes);
  }
  /// As `ArbiterStore` has it. Errors: as `put`; `unsupported` on a file system without hard links,
  /// which settle who was first.
  Result<bool> put_if_absent(const BlobKey& key, std::span<const std::byte> bytes) override {
    return put_file("blobs/", 0, key, bytes, false);
  }
  /// O(1) in the size: see the class. Errors: `not_found`, `unavailable`.
  Result<Blob> get(const BlobKey& key) override { return map_file("blobs/", key); }
  Result<bool> contains(const BlobKey& key) override {
    const std::string name = key.hex();
    const detail::FileHandle inner = inner_folder("blobs/", key);
    const auto look = [&] { return ::faccessat(inner.get(), name.c_str(), F_OK, 0); };
    if (inner.valid() && detail::uninterrupted(look) == 0) return true;
    if (errno == ENOENT && !vanished()) return false;
    return detail::file_error(errno, "look for", name);
  }
  /// What is not there is erased already; holders of a mapped blob keep it.
  Status erase(const BlobKey& key) override { return erase_file("blobs/", key); }

  [[nodiscard]] replica::PayloadStore* payloads() noexcept override { return this; }
  Result<bool> put_payload(const BlobKey& key, std::span<const std::byte> bytes) override {
    return put_file("payloads/", 256, key, bytes);
  }
  Result<Blob> map_payload(const BlobKey& key) override { return map_file("payloads/", key); }
  Status erase_payload(const BlobKey& key) override { return erase_file("payloads/", key); }

  /// Errors: `store_full`, `unavailable`, `unsupported`.
  Status add_record(std::span<const std::byte> bytes) override {
    KVMELD_TRY(writable());
    const std::lock_guard lock(shared_->log_mutex);
    KVMELD_TRY(shared_->follow());
    return shared_->log.add(bytes);
  }
  /// O(bytes beyond the cursor); two system calls where there are none. Errors: `unavailable`.
  Result<replica::RecordBatch> records(std::uint64_t cursor) override {
    const std::lock_guard lock(shared_->log_mutex);
    KVMELD_TRY(shared_->follow());
    return shared_->log.read(cursor);
  }
  /// O(bytes that stay). Errors: `store_full`, `unavailable`, `unsupported`.
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    KVMELD_TRY(writable());
    const std::lock_guard lock(shared_->log_mutex);
    KVMELD_TRY(shared_->follow());
    return shared_->log.replace(cursor, bytes);
  }

  [[nodiscard]] bool read_only() const noexcept { return shared_->options.read_only; }
  /// What was acknowledged to be in the record log and is there no longer: bytes that were changed,
  /// or cut off. Also of earlier lives of the log, since replacing carries it on. As `open` and the
  /// calls on records since saw it; blobs are not looked at.
  [[nodiscard]] replica::StoreDamage damage() const override {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.damage();
  }
  /// Bytes of the record log that this handle cut off because a writer had died over them: they
  /// were never acknowledged.
  [[nodiscard]] std::uint64_t torn_bytes() const {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.torn_bytes();
  }
  /// Changes when the store may have lost something that it had acknowledged: its folder was
  /// replaced by another one, or its log by another or an earlier one. As the last call on records
  /// saw it. Whoever sees another value adds its records and blobs again. Never 0; handles need not
  /// have the same.
  [[nodiscard]] std::uint64_t generation() const override {
    const std::lock_guard lock(shared_->log_mutex);
    return shared_->log.generation();
  }

  /// Removes a store's files and its folder; processes that have mapped blobs keep them. Other
  /// files stay, and so the folder.
  static Status remove(const std::string& folder) {
    const detail::FileHandle opened =
        detail::open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!opened.valid())
      return errno == ENOENT ? Status() : detail::file_error(errno, "open", folder);
    const int at = opened.get();
    const auto drop = [at](const std::string& name, int flags = 0) {
      (void)detail::remove_name(at, name, flags);
    };
    for (const std::string kind : {"blobs", "payloads"}) {
      each_name(at, kind, [&](const std::string& inner) {
        const std::string path = kind + "/" + inner;
        each_name(at, path, [&](const std::string& name) { drop(path + "/" + name); });
        drop(path, AT_REMOVEDIR);
      });
    }
    each_name(at, "temp", [&](const std::string& name) { drop("temp/" + name); });
    for (const char* name : folders) drop(name, AT_REMOVEDIR);
    for (const char* name : {"records", "lock"}) drop(name);
    const int number = detail::remove_name(AT_FDCWD, folder, AT_REMOVEDIR);
    return number == 0 ? Status() : detail::file_error(number, "remove the folder", folder);
  }

 private:
  static constexpr std::array<const char*, 3> folders{"temp", "blobs", "payloads"};

  struct Shared {
    Shared(detail::FileHandle opened, std::string at, const FileStoreOptions& given)
        : folder(std::move(opened)),
          path(std::move(at)),
          options(given),
          log(folder.get(),
              {given.durability, given.file_mode, given.lock_timeout_ms, given.read_only}) {}

    /// Takes the folder that has the name now, where it is another one. Under the log's mutex.
    [[nodiscard]] Status follow() {
      struct ::stat here {
      }, there{};
      // moved away: the one that is open is still ours
      if (detail::status_at(AT_FDCWD, path, there) != 0) return {};
      if (const int number = detail::status_of_file(folder.get(), here); number != 0) {
        return detail::file_error(number, "look at", path);
      }
      if (here.st_ino == there.st_ino && here.st_dev == there.st_dev) return {};
      auto opened = open_checked(path, options);
      if (!opened) return opened.error();
      // At once for all threads: the number of the descriptor stays.
      const auto swap = [&] { return ::dup3(opened->get(), folder.get(), O_CLOEXEC); };
      if (detail::uninterrupted(swap) < 0) return detail::file_error(errno, "take over", path);
      for (std::atomic<bool>& one : known) one = false;
      log.forget();
      return log.open();
    }

    detail::FileHandle folder;
    std::string path;  // absolute
    FileStoreOptions options;
    std::mutex log_mutex;
    detail::RecordLog log;
    // inner folders whose names this handle knows to be durable
    std::array<std::atomic<bool>, 512> known{};
  };

  explicit FileStore(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  [[nodiscard]] static Status unusable(int number, const std::string& folder) {
    const Status status = detail::file_error(number, "use the folder", folder);
    const bool no_folder =
        number == ENOENT || number == ENOTDIR || number == ENAMETOOLONG || number == ELOOP;
    return no_folder ? Status(ErrorCode::invalid_argument, status.message()) : status;
  }
  /// The same folder after the process went elsewhere.
  [[nodiscard]] static std::string absolute(const std::string& folder) {
    if (folder.front() == '/') return folder;
    std::string here(4096, '\0');
    if (::getcwd(here.data(), here.size()) == nullptr) return folder;
    here.resize(here.find('\0'));
    return here + "/" + folder;
  }

  /// A folder with what belongs into it, created where it may be.
  [[nodiscard]] static Result<detail::FileHandle> open_checked(const std::string& folder,
                                                               const FileStoreOptions& options) {
    const int no_link = options.folder_must_be_own ? O_NOFOLLOW : 0;
    auto opened = detail::open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | no_link);
    if (!opened.valid()) return unusable(errno, folder);
    struct ::stat status {};
    if (const int number = detail::status_of_file(opened.get(), status); number != 0) {
      return unusable(number, folder);
    }
    if (options.folder_must_be_own && status.st_uid != ::geteuid()) {
      return extend::error(ErrorCode::invalid_argument, "the folder ", folder, " belongs to user ",
                           status.st_uid, ", this process to ", ::geteuid());
    }
    const int at = opened.get();
    for (const char* inner : folders) {
      const int number =
          options.read_only ? 0 : detail::make_folder(at, inner, options.folder_mode);
      if (number != 0) return without_permission(number, inner);
      if (detail::open_folder(at, inner).valid()) continue;
      if (errno != ELOOP && errno != ENOTDIR) return unusable(errno, folder + "/" + inner);
      return extend::error(ErrorCode::invalid_argument, folder, "/", inner,
                           " is a link or a file; a store's own folders are none");
    }
    if (options.read_only) return Result(std::move(opened));
    clean_up(at);
    if (options.durability != Durability::file_and_folder) return Result(std::move(opened));
    int number = detail::sync_folder(at, ".");
    // The parent, too, has a new name in it; one that may not be read was not written by this user
    // either.
    if (number == 0) number = detail::sync_folder(at, "..");
    if (number != 0 && number != EACCES)
      return detail::file_error(number, "sync the folder", folder);
    return Result(std::move(opened));
  }
  [[nodiscard]] static Status without_permission(int number, const char* inner) {
    const Status status = detail::file_error(number, "create", inner);
    if (number != EACCES && number != EROFS) return status;
    return Status(
        status.code(),
        status.message() + "; FileStoreOptions::read_only opens a folder without writing");
  }

  [[nodiscard]] Status writable() const {
    if (!read_only()) return {};
    return extend::error(ErrorCode::unsupported, "the store in ", shared_->path,
                         " was opened with read_only");
  }

  /// One of 256 folders, by the second byte: the first names the hash, and is the same for most.
  [[nodiscard]] static std::string inner_name(const char* kind, const BlobKey& key) {
    return kind + key.hex().substr(2, 2);
  }
  /// Where a key's file is looked for by its name; errno as `open_folder` has it.
  [[nodiscard]] detail::FileHandle inner_folder(const char* kind, const BlobKey& key) const {
    return detail::open_folder(shared_->folder.get(), inner_name(kind, key));
  }

  /// Whether the folder itself was removed, in which case an absent file says nothing. Keeps errno.
  [[nodiscard]] bool vanished() const {
    const int number = errno;
    struct ::stat status {};
    const bool gone =
        detail::status_of_file(shared_->folder.get(), status) != 0 || status.st_nlink == 0;
    errno = number;
    return gone;
  }

  [[nodiscard]] Result<bool> put_file(const char* kind, std::size_t first_known, const BlobKey& key,
                                      std::span<const std::byte> bytes, bool replaces = true) {
    KVMELD_TRY(writable());
    const int folder = shared_->folder.get();
    const Durability durability = shared_->options.durability;
    const std::string inner = inner_name(kind, key);
    int number = 0;
    if (std::atomic<bool>& known = shared_->known[first_known + key.bytes[1]]; !known) {
      number = detail::make_folder(folder, inner, shared_->options.folder_mode);
      if (number == 0 && durability == Durability::file_and_folder)
        number = detail::sync_folder(folder, kind);
      if (number != 0) return detail::file_error(number, "create", inner);
      known = true;
    }
    auto created = put_in(inner, key.hex(), bytes, replaces);
    // Also where it was there: whoever put it may not have come to this line.
    if (created && durability == Durability::file_and_folder)
      number = detail::sync_folder(folder, inner);
    if (number != 0) return detail::file_error(number, "sync the folder", inner);
    return created;
  }
  /// Whether the file had to be written: it was not there, or held other bytes and `replaces`.
  [[nodiscard]] Result<bool> put_in(const std::string& inner, const std::string& name,
                                    std::span<const std::byte> bytes, bool replaces) {
    const int folder = shared_->folder.get();
    const bool sync = shared_->options.durability != Durability::none;
    const detail::FileHandle opened = detail::open_folder(folder, inner);
    if (!opened.valid()) return detail::file_error(errno, "open", inner);
    auto there = detail::holds_bytes(opened.get(), name, bytes, sync);
    if (!there && there.error().code() != ErrorCode::not_found) return there.error();
    if (there && (*there || !replaces)) return false;
    auto temp = detail::TempFile::create(folder);
    if (!temp) return temp.error();
    int number = detail::write_at(temp->get(), bytes, 0);
    if (number == 0) number = detail::set_mode(temp->get(), shared_->options.file_mode & 0444U);
    if (number == 0 && sync) number = detail::sync_file(temp->get());
    if (number != 0) return detail::file_error(number, "write", name);
    if (!there) {
      auto named = temp->publish(opened.get(), name, replaces);
      if (!named) return named.error();
      if (*named || !replaces) return *named;
      there = detail::holds_bytes(opened.get(), name, bytes, sync);  // another was faster
      if (there && *there) return false;
    }
    KVMELD_TRY(temp->replace(opened.get(), name));
    return true;
  }

  [[nodiscard]] Result<Blob> map_file(const char* kind, const BlobKey& key) const {
    const std::string name = key.hex();
    const detail::FileHandle inner = inner_folder(kind, key);
    detail::FileHandle file;
    if (inner.valid())
      file = detail::open_file(inner.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    if (!file.valid()) {
      if (errno == ENOENT && !vanished())
        return extend::error(ErrorCode::not_found, "no file ", name);
      return detail::file_error(errno, "open", name);
    }
    struct ::stat status {};
    if (const int number = detail::status_of_file(file.get(), status); number != 0)
      return detail::file_error(number, "look at", name);
    if (!S_ISREG(status.st_mode)) return detail::file_error(EINVAL, "read, being no file,", name);
    const auto size = static_cast<std::size_t>(status.st_size);
    return detail::map_file(file.get(), size, shared_->options.private_copies, name);
  }

  [[nodiscard]] Status erase_file(const char* kind, const BlobKey& key) {
    KVMELD_TRY(writable());
    const std::string name = key.hex();
    const detail::FileHandle inner = inner_folder(kind, key);
    const int number = inner.valid() ? detail::remove_name(inner.get(), name) : errno;
    if (number == 0 || (number == ENOENT && !vanished())) return {};
    return detail::file_error(number, "erase", name);
  }

  template <class Take>
  static void each_name(int folder, const std::string& name, const Take& take) {
    auto opened = detail::open_file(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    ::DIR* list = nullptr;
    const auto begin = [&] {
      list = ::fdopendir(opened.get());
      return list == nullptr ? -1 : 0;
    };
    if (!opened.valid() || detail::uninterrupted(begin) != 0) return;
    (void)opened.release();  // the list's own from here on
    const ::dirent* entry = nullptr;
    const auto next = [&] {
      errno = 0;
      entry = ::readdir(list);
      return entry == nullptr && errno != 0 ? -1 : 0;
    };
    while (detail::uninterrupted(next) == 0 && entry != nullptr) {
      const std::string found = entry->d_name;
      if (found != "." && found != "..") take(found);
    }
    ::closedir(list);
  }

  /// A temporary file that can be locked has lost its writer.
  static void clean_up(int folder) {
    each_name(folder, "temp", [folder](const std::string& found) {
      const std::string name = "temp/" + found;
      const detail::FileHandle file =
          detail::open_file(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      if (!file.valid()) return;
      const auto lock = [&] { return ::flock(file.get(), LOCK_EX | LOCK_NB); };
      if (detail::uninterrupted(lock) == 0) (void)detail::remove_name(folder, name);
    });
  }

  std::shared_ptr<Shared> shared_;
};

namespace detail {

[[nodiscard]] inline Result<std::string> shared_memory_folder(const std::string& name) {
  constexpr std::size_t longest = 200;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == '-';
    if (!plain)
      return extend::error(ErrorCode::invalid_argument,
                           "a shared memory store's name has letters, digits, . _ -, not byte ",
                           int{c});
  }
  if (name.empty() || name.size() > longest) {
    return extend::error(ErrorCode::invalid_argument, "a shared memory store's name has 1 to ",
                         longest, " bytes, not ", name.size());
  }
  return "/dev/shm/kvmeld." + name;
}

}  // namespace detail

/// Opens the store that processes of this machine share by name, in memory: a `FileStore` under
/// /dev/shm without syncing.
///
/// Holds until the machine stops or `remove_shared_memory_store`; processes may come, go and die.
/// It counts as memory, up to the size of /dev/shm, beyond which it is `store_full`. Errors: those
/// of `FileStore::open`; `invalid_argument` for a name with other bytes than letters, digits, `.`,
/// `_`, `-`, and for a name that another user has taken, unless `folder_mode` lets other users in.
[[nodiscard]] inline Result<FileStore> shared_memory_store(const std::string& name,
                                                           FileStoreOptions options = {}) {
  auto folder = detail::shared_memory_folder(name);
  if (!folder) return folder.error();
  options.durability = Durability::none;
  options.folder_must_be_own = (options.folder_mode & 077U) == 0;
  return FileStore::open(*folder, options);
}

/// Frees the memory of a store, except what processes have mapped.
inline Status remove_shared_memory_store(const std::string& name) {
  auto folder = detail::shared_memory_folder(name);
  if (!folder) return folder.error();
  return FileStore::remove(*folder);
}

}  // namespace stores

KVMELD_NAMESPACE_END
