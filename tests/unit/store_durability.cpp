// What is left of a file store when the machine stops, at every system call of a history: this program stands between the library
// and the system, and keeps a model of a disk that loses whatever was not synced. It also ends calls with EINTR, and fails syncs.
#include <kvmeld/transport/file_store.hpp>

#include <dlfcn.h>
#include <stdarg.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "support/store_laws.hpp"
#include "support/temp_folder.hpp"

namespace {

using test::Bytes;

/// Files and folders, as the processes see them and as the disk has them. A folder's names and a file's bytes are on the disk since
/// they were synced, each on its own.
struct Disk {
  struct Node {
    bool folder = false;
    Bytes bytes, synced_bytes;
    std::map<std::string, int> names, synced_names;
  };
  std::map<int, Node> nodes;
  std::map<::ino_t, int> numbers;  // of those that have a name or are open
  std::string root;

  /// The node of an open file; of the parent of `root` and what is outside, none.
  [[nodiscard]] int of(int fd) const {
    struct ::stat status {};
    if (fd == AT_FDCWD || ::fstat(fd, &status) != 0) return 0;
    const auto at = numbers.find(status.st_ino);
    return at == numbers.end() ? 0 : at->second;
  }
  int made(::ino_t inode, bool folder) {
    const int number = static_cast<int>(nodes.size()) + 1;
    nodes[number].folder = folder;
    numbers[inode] = number;
    return number;
  }
  /// The folder that a path's last part is in, and that part.
  [[nodiscard]] std::pair<int, std::string> place(int fd, std::string path) const {
    int at = of(fd);
    if (path.rfind(root, 0) == 0) {  // the store's own folder, by its whole path
      at = 1;
      path = path.substr((std::min)(root.size() + 1, path.size()));
    }
    for (std::size_t cut = path.find('/'); at != 0 && cut != std::string::npos; cut = path.find('/')) {
      const auto next = nodes.at(at).names.find(path.substr(0, cut));
      at = next == nodes.at(at).names.end() ? 0 : next->second;
      path = path.substr(cut + 1);
    }
    return {at, path};
  }
};

/// What stands between. Off: calls go through.
struct Between {
  bool on = false;
  Disk disk;
  std::function<void()> after;  ///< called behind each call that changed something, or synced
  bool interrupt = false;       ///< each call ends with EINTR once before it is done
  bool interrupted = false;
  std::uint64_t interruptions = 0;
  int fail_sync = 0;            ///< the n-th sync from now fails, and syncs nothing
  std::uint64_t syncs = 0;

  bool eintr() {
    if (!on || !interrupt) return false;
    interrupted = !interrupted;
    if (!interrupted) return false;
    ++interruptions;
    errno = EINTR;
    return true;
  }
  void changed() {
    const int number = errno;
    if (after) after();
    errno = number;
  }
};
Between between;

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// The library's calls come here, since a program's own functions come before the system's.
extern "C" {

int openat(int folder, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? static_cast<mode_t>(va_arg(rest, unsigned)) : 0;
  va_end(rest);
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, int, ...)>("openat");
  const int fd = call(folder, path, flags, mode);
  if (between.on && fd >= 0 && (flags & O_CREAT) != 0) {
    const auto [at, name] = between.disk.place(folder, path);
    if (at != 0 && between.disk.nodes[at].names.count(name) == 0) {
      struct ::stat status {};
      (void)::fstat(fd, &status);
      between.disk.nodes[at].names[name] = between.disk.made(status.st_ino, false);
      between.changed();
    }
  }
  return fd;
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  if (between.eintr()) return -1;
  static const auto call = real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  const ssize_t done = call(fd, bytes, count, offset);
  if (const int node = between.on && done > 0 ? between.disk.of(fd) : 0; node != 0) {
    Bytes& all = between.disk.nodes[node].bytes;
    const auto from = static_cast<std::size_t>(offset), size = static_cast<std::size_t>(done);
    all.resize((std::max)(all.size(), from + size));
    std::memcpy(all.data() + from, bytes, size);
    between.changed();
  }
  return done;
}

ssize_t pread(int fd, void* bytes, size_t count, off_t offset) {
  if (between.eintr()) return -1;
  static const auto call = real<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  return call(fd, bytes, count, offset);
}

int fsync(int fd) {
  if (between.eintr()) return -1;
  if (between.on) {
    ++between.syncs;
    if (between.fail_sync > 0 && --between.fail_sync == 0) {
      errno = EIO;
      return -1;
    }
    if (const int at = between.disk.of(fd); at != 0) {
      Disk::Node& node = between.disk.nodes[at];
      node.synced_bytes = node.bytes;
      node.synced_names = node.names;
      between.changed();
    }
  }
  return 0;  // the model is the disk here
}

int ftruncate(int fd, off_t size) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, off_t)>("ftruncate");
  const int result = call(fd, size);
  if (const int node = between.on && result == 0 ? between.disk.of(fd) : 0; node != 0) {
    between.disk.nodes[node].bytes.resize(static_cast<std::size_t>(size));
    between.changed();
  }
  return result;
}

int mkdirat(int folder, const char* path, mode_t mode) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, mode_t)>("mkdirat");
  const int result = call(folder, path, mode);
  if (between.on && result == 0) {
    struct ::stat status {};
    (void)::fstatat(folder, path, &status, 0);
    if (path == between.disk.root + "/store") {
      between.disk.nodes[1].names["store"] = between.disk.made(status.st_ino, true);
      between.changed();
    } else if (const auto [at, name] = between.disk.place(folder, path); at != 0) {
      const int made = between.disk.made(status.st_ino, true);
      between.disk.nodes[at].names[name] = made;
      between.changed();
    }
  }
  return result;
}

int linkat(int from, const char* old_path, int to, const char* new_path, int flags) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, int, const char*, int)>("linkat");
  const int result = call(from, old_path, to, new_path, flags);
  if (between.on && result == 0) {
    const auto [at, name] = between.disk.place(from, old_path);
    const auto [there, new_name] = between.disk.place(to, new_path);
    between.disk.nodes[there].names[new_name] = between.disk.nodes[at].names[name];
    between.changed();
  }
  return result;
}

int renameat(int from, const char* old_path, int to, const char* new_path) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, int, const char*)>("renameat");
  const int result = call(from, old_path, to, new_path);
  if (between.on && result == 0) {
    const auto [at, name] = between.disk.place(from, old_path);
    const auto [there, new_name] = between.disk.place(to, new_path);
    between.disk.nodes[there].names[new_name] = between.disk.nodes[at].names[name];
    between.disk.nodes[at].names.erase(name);
    between.changed();
  }
  return result;
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, int)>("unlinkat");
  const int result = call(folder, path, flags);
  if (between.on && result == 0) {
    const auto [at, name] = between.disk.place(folder, path);
    if (at != 0) between.disk.nodes[at].names.erase(name);
    between.changed();
  }
  return result;
}

int flock(int fd, int how) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, int)>("flock");
  return call(fd, how);
}
int fchmod(int fd, mode_t mode) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, mode_t)>("fchmod");
  return call(fd, mode);
}
int fchmodat(int folder, const char* path, mode_t mode, int flags) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, mode_t, int)>("fchmodat");
  return call(folder, path, mode, flags);
}
int faccessat(int folder, const char* path, int mode, int flags) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, int, int)>("faccessat");
  return call(folder, path, mode, flags);
}

}  // extern "C"

namespace {

using kvmeld::BlobKey;
using kvmeld::Durability;
using kvmeld::FileStore;

/// Begins a disk that holds the folder alone.
void begin(const std::string& root) {
  between = {};
  between.disk.root = root;
  struct ::stat status {};
  REQUIRE(::stat(root.c_str(), &status) == 0);
  between.disk.made(status.st_ino, true);
  between.on = true;
}

/// Puts what the disk has into a folder.
void restore(const Disk& disk, int number, const std::filesystem::path& to) {
  const Disk::Node& node = disk.nodes.at(number);
  if (node.folder) {
    std::filesystem::create_directory(to);
    for (const auto& [name, inner] : node.synced_names) restore(disk, inner, to / name);
    return;
  }
  std::ofstream out(to, std::ios::binary);
  out.write(reinterpret_cast<const char*>(node.synced_bytes.data()), static_cast<std::streamsize>(node.synced_bytes.size()));
}

/// What was acknowledged so far.
struct Acknowledged {
  std::map<std::uint64_t, BlobKey> blobs, payloads;  // bytes are those of the number
  std::set<std::uint64_t> records;
};

constexpr std::uint64_t seed = 5;
Bytes bytes_of(std::uint64_t number) { return test::blob_bytes(number, 100 + static_cast<std::size_t>(number)); }

/// Empty where everything is there after the machine stopped here; else what is not.
std::string lost(const Disk& disk, const Acknowledged& all) {
  const test::TempFolder folder;
  restore(disk, 1, folder / "disk");
  if (!std::filesystem::exists(folder / "disk/store") && all.records.empty() && all.blobs.empty()) return {};
  auto store = FileStore::open(folder / "disk/store", {.durability = Durability::none});
  if (!store) return "the store does not open: " + std::string(store.error().message());
  for (const auto& [number, key] : all.blobs) {
    const auto got = store->get(key);
    if (!got || !test::equal(*got, bytes_of(number))) return "blob " + std::to_string(number);
  }
  for (const auto& [number, key] : all.payloads) {
    const auto got = store->map_payload(key);
    if (!got || !test::equal(*got, bytes_of(number))) return "payload " + std::to_string(number);
  }
  const auto batch = store->records(0);
  if (!batch) return "records: " + std::string(batch.error().message());
  if (!std::ranges::includes(test::numbers_in(seed, *batch), all.records)) return "a record";
  if (store->damage().places != 0) return "nothing, but it is taken for damaged";
  return {};
}

/// A history of every kind of write, with handles of its own so that each learns anew what is durable; ends at the first error.
bool history(const std::string& path, Acknowledged& all, std::uint64_t first) {
  auto opened = FileStore::open(path), another = FileStore::open(path);
  if (!opened || !another) return false;
  std::uint64_t n = first;
  for (FileStore* const s : {&*opened, &*another}) {
    const BlobKey blob = test::blob_key(seed, n), payload = test::blob_key(seed, n + 1);
    if (!s->put(blob, bytes_of(n))) return false;
    all.blobs[n] = blob;
    if (!s->put_payload(payload, bytes_of(n + 1))) return false;
    all.payloads[n + 1] = payload;
    if (!s->add_record(test::number_record(seed, {n})).ok()) return false;
    all.records.insert(n);
    const auto batch = s->records(0);
    if (!batch) return false;
    auto numbers = test::numbers_in(seed, *batch);
    numbers.insert(n + 1);  // what replaces says more than what it replaces
    if (!s->replace_records(batch->cursor, test::number_record(seed, numbers)).ok()) return false;
    all.records.insert(n + 1);
    if (!s->add_record(test::number_record(seed, {n + 2})).ok()) return false;
    all.records.insert(n + 2);
    n += 10;
  }
  // Other bytes in the place of a blob's, and the same ones once more.
  const BlobKey key = test::blob_key(seed, first);
  all.blobs.erase(first);
  if (!opened->put(key, bytes_of(first + 5))) return false;
  all.blobs[first + 5] = key;
  if (!another->put(key, bytes_of(first + 5)).ok()) return false;
  // One that promises nothing was there before.
  auto careless = FileStore::open(path, {.durability = Durability::none});
  const BlobKey there = test::blob_key(seed, first + 6);
  if (!careless || !careless->put(there, bytes_of(first + 6)).ok()) return false;
  if (!opened->put(there, bytes_of(first + 6)).ok()) return false;
  all.blobs[first + 6] = there;
  return true;
}

/// A history at each point of which the machine stops once.
struct Watched {
  bool done = false;
  std::size_t points = 0;
  std::string failure;  // the first, and where
};
Watched watch(const std::string& path, Acknowledged& all, std::uint64_t first) {
  Watched seen;
  between.after = [&] {
    ++seen.points;
    between.on = false;  // looking is no part of the history
    const std::string what = seen.failure.empty() ? lost(between.disk, all) : std::string();
    between.on = true;
    if (!what.empty()) seen.failure = what + " is gone at point " + std::to_string(seen.points);
  };
  seen.done = history(path, all, first);
  between.after();  // and what the last call acknowledged
  between.after = {};
  return seen;
}

}  // namespace

TEST_CASE("whatever call the machine stops at, a disk that drops all that was not synced has what was acknowledged") {
  const test::TempFolder folder;
  Acknowledged all;
  begin(folder.path());
  const Watched seen = watch(folder / "store", all, 1);
  between = {};
  CHECK(seen.done);
  CHECK(seen.failure == "");
  CHECK(seen.points > 60);
}

TEST_CASE("what a writer did not come to sync, the next one that acknowledges it does") {
  // Every sync fails once, and with it the call that it belongs to: as if its process had died there. Others go on.
  int failing = 0;
  for (bool more = true; more;) {
    const test::TempFolder folder;
    Acknowledged all, after;
    begin(folder.path());
    between.fail_sync = ++failing;
    more = !history(folder / "store", all, 1);
    between.fail_sync = 0;
    after.records = all.records;
    const Watched seen = watch(folder / "store", after, 1);  // the same blobs and records, from the beginning
    between = {};
    INFO("sync " << failing << " failed");
    CHECK(seen.done);
    CHECK(seen.failure == "");
  }
  CHECK(failing > 20);
}

TEST_CASE("a call that a signal ends is made again, whichever it is") {
  const test::TempFolder folder;
  Acknowledged all;
  begin(folder.path());
  between.interrupt = true;
  const bool done = history(folder / "store", all, 1);
  const std::uint64_t interruptions = between.interruptions;
  auto store = FileStore::open(folder / "store");
  const bool contains = store.ok() && *store->contains(all.blobs.begin()->second);
  const bool erased = store.ok() && store->erase(all.blobs.begin()->second).ok();
  const bool removed = FileStore::remove(folder / "store").ok();
  between = {};
  CHECK(done);
  CHECK(contains);
  CHECK(erased);
  CHECK(removed);
  CHECK(interruptions > 100);
}
