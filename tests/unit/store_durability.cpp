// What is left of a file store when the machine stops, at every system call of a history: this
// program stands between the library and the system, and keeps a model of a disk that loses
// whatever was not synced. It also ends calls with EINTR, and fails syncs.
#include <kvmeld/stores/file.hpp>

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

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

/// Of an open file, or of a name in an open folder; 0 where there is none.
::ino_t inode_of(int fd, const char* name = nullptr) {
  using Stat = struct ::stat;
  static const auto of_file = real<int (*)(int, Stat*)>("fstat");
  static const auto of_name = real<int (*)(int, const char*, Stat*, int)>("fstatat");
  Stat status{};
  const int result = name == nullptr ? of_file(fd, &status) : of_name(fd, name, &status, 0);
  return result == 0 ? status.st_ino : 0;
}

/// Files and folders, as the processes see them and as the disk has them. A folder's names and a
/// file's bytes are on the disk since they were synced, each on its own.
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
    if (fd == AT_FDCWD) return 0;
    const auto at = numbers.find(inode_of(fd));
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
    for (std::size_t cut = path.find('/'); at != 0 && cut != std::string::npos;
         cut = path.find('/')) {
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
  int fail_sync = 0;  ///< the n-th sync from now fails, and syncs nothing
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
      between.disk.nodes[at].names[name] = between.disk.made(inode_of(fd), false);
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
    if (const auto [at, name] = between.disk.place(folder, path); at != 0) {
      between.disk.nodes[at].names[name] = between.disk.made(inode_of(folder, path), true);
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

int fstat(int fd, struct stat* status) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, struct stat*)>("fstat");
  return call(fd, status);
}
int fstatat(int folder, const char* path, struct stat* status, int flags) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, const char*, struct stat*, int)>("fstatat");
  return call(folder, path, status, flags);
}
int dup3(int from, int to, int flags) noexcept {
  if (between.eintr()) return -1;
  static const auto call = real<int (*)(int, int, int)>("dup3");
  return call(from, to, flags);
}
DIR* fdopendir(int fd) {
  if (between.eintr()) return nullptr;
  static const auto call = real<DIR* (*)(int)>("fdopendir");
  return call(fd);
}
dirent* readdir(DIR* list) {
  if (between.eintr()) return nullptr;
  static const auto call = real<dirent* (*)(DIR*)>("readdir");
  return call(list);
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
using kvmeld::stores::Durability;
using kvmeld::stores::FileStore;

/// In memory, if there is such a place: the model is the disk, and thousands of files are quick.
std::filesystem::path files_folder() {
  const bool memory = ::access("/dev/shm", R_OK | W_OK | X_OK) == 0;
  return memory ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path();
}

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
  out.write(reinterpret_cast<const char*>(node.synced_bytes.data()),
            static_cast<std::streamsize>(node.synced_bytes.size()));
}

/// What was acknowledged so far.
struct Acknowledged {
  std::map<std::uint64_t, BlobKey> blobs, payloads;  // bytes are those of the number
  std::set<std::uint64_t> records;
  bool opened = false;  // there is a store from then on
};

constexpr std::uint64_t seed = 5;
Bytes bytes_of(std::uint64_t number) {
  return test::blob_bytes(number, 100 + static_cast<std::size_t>(number));
}

/// Empty where everything is there after the machine stopped here; else what is not.
std::string lost(const Disk& disk, const Acknowledged& all) {
  const test::TempFolder folder(files_folder());
  restore(disk, 1, folder / "disk");
  const std::string path = folder / "disk/store";
  if (all.opened && !FileStore::open(path, {.read_only = true})) return "the store";
  if (!all.opened && !std::filesystem::exists(path)) return {};
  auto store = FileStore::open(path, {.durability = Durability::none});
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

/// What a look depends on: all that is on the disk, and all that was acknowledged.
std::string outcome(const Disk& disk, int number) {
  const Disk::Node& node = disk.nodes.at(number);
  std::string all = std::to_string(node.synced_bytes.size()) + ':';
  all.append(reinterpret_cast<const char*>(node.synced_bytes.data()), node.synced_bytes.size());
  for (const auto& [name, inner] : node.synced_names) {
    all += name + '/' + outcome(disk, inner) + ';';
  }
  return all;
}
std::string outcome(const Disk& disk, const Acknowledged& all) {
  std::string text = outcome(disk, 1);
  for (const auto* const keys : {&all.blobs, &all.payloads}) {
    for (const auto& [number, key] : *keys) text += ' ' + std::to_string(number) + key.hex();
    text += '|';
  }
  for (const std::uint64_t number : all.records) text += ' ' + std::to_string(number);
  return text + (all.opened ? " opened" : "");
}

/// Records that are added, and replaced by one that says more.
bool add_records(FileStore& store, Acknowledged& all, std::uint64_t n) {
  if (!store.add_record(test::number_record(seed, {n})).ok()) return false;
  all.records.insert(n);
  const auto batch = store.records(0);
  if (!batch) return false;
  auto numbers = test::numbers_in(seed, *batch);
  numbers.insert(n + 1);
  const Bytes record = test::number_record(seed, numbers);
  if (!store.replace_records(batch->cursor, record).ok()) return false;
  all.records.insert(n + 1);
  if (!store.add_record(test::number_record(seed, {n + 2})).ok()) return false;
  all.records.insert(n + 2);
  return true;
}
bool add_blobs(FileStore& store, Acknowledged& all, std::uint64_t n) {
  const BlobKey blob = test::blob_key(seed, n), payload = test::blob_key(seed, n + 1);
  if (!store.put(blob, bytes_of(n))) return false;
  all.blobs[n] = blob;
  if (!store.put_payload(payload, bytes_of(n + 1))) return false;
  all.payloads[n + 1] = payload;
  return true;
}

/// The blobs are always the same ones, the records not; each syncs folders for the other, so that
/// either may come first.
struct Order {
  std::uint64_t first_record = 1;
  bool records_first = false;
};

/// A history of every kind of write, by two handles, so that each learns anew what is durable; ends
/// at the first error.
bool history(const std::string& path, FileStore& one, FileStore& another, Acknowledged& all,
             const Order& order) {
  constexpr std::uint64_t first = 1;
  std::uint64_t step = 0;
  for (FileStore* const s : {&one, &another}) {
    const std::uint64_t record = order.first_record + step;
    if (order.records_first && !add_records(*s, all, record)) return false;
    if (!add_blobs(*s, all, first + step)) return false;
    if (!order.records_first && !add_records(*s, all, record)) return false;
    step += 10;
  }
  // Other bytes in the place of a blob's, and the same ones once more.
  const BlobKey key = test::blob_key(seed, first);
  all.blobs.erase(first);
  if (!one.put(key, bytes_of(first + 5))) return false;
  all.blobs[first + 5] = key;
  if (!another.put(key, bytes_of(first + 5)).ok()) return false;
  // One that promises nothing was there before.
  auto careless = FileStore::open(path, {.durability = Durability::none});
  const BlobKey there = test::blob_key(seed, first + 6);
  if (!careless || !careless->put(there, bytes_of(first + 6)).ok()) return false;
  if (!one.put(there, bytes_of(first + 6)).ok()) return false;
  all.blobs[first + 6] = there;
  return true;
}
bool history(const std::string& path, Acknowledged& all, const Order& order = {}) {
  auto opened = FileStore::open(path);
  if (!opened) return false;
  all.opened = true;
  between.changed();  // before the next one syncs anything
  auto another = FileStore::open(path);
  return another && history(path, *opened, *another, all, order);
}

/// A history at each point of which the machine stops once.
struct Watched {
  bool done = false;
  std::size_t points = 0;
  std::size_t looks = 0;  // points that had something else on the disk, or acknowledged
  std::string failure;    // the first, and where
};
template <class History>
Watched watch(const Acknowledged& all, const History& history) {
  Watched seen;
  std::string before;
  between.after = [&] {
    ++seen.points;
    if (!seen.failure.empty()) return;
    std::string now = outcome(between.disk, all);
    if (now == before) return;
    before = std::move(now);
    ++seen.looks;
    between.on = false;  // looking is no part of the history
    const std::string what = lost(between.disk, all);
    between.on = true;
    if (!what.empty()) seen.failure = what + " is gone at point " + std::to_string(seen.points);
  };
  seen.done = history();
  between.after();  // and what the last call acknowledged
  between.after = {};
  return seen;
}

/// Whether each file in the making that has bytes is locked, so that others leave it there.
bool locked_in_the_making(const std::filesystem::path& store) {
  bool all = true;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(store / "temp", none)) {
    const kvmeld::stores::detail::FileHandle file(
        ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    const bool begun = file.valid() && std::filesystem::file_size(entry, none) > 0;
    all = all && !(begun && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0);
  }
  return all;
}

}  // namespace

TEST_CASE(
    "whatever call the machine stops at, a disk that drops all that was not synced has what was "
    "acknowledged") {
  const test::TempFolder folder(files_folder());
  Acknowledged all;
  begin(folder.path());
  const Watched seen = watch(all, [&] { return history(folder / "store", all); });
  between = {};
  CHECK(seen.done);
  CHECK(seen.failure == "");
  CHECK(seen.points > 60);
  CHECK(seen.looks > 25);
}

TEST_CASE("what a writer did not come to sync, the next one that acknowledges it does") {
  // Every sync fails once, and with it the call that it belongs to: as if its process had died
  // there. Others go on: some that come new, or such that had the store open before.
  for (const bool were_there : {false, true}) {
    int failing = 0;
    for (bool more = true; more;) {
      const test::TempFolder folder(files_folder());
      const std::string path = folder / "store";
      Acknowledged all, after;
      begin(folder.path());
      std::vector<FileStore> old;
      for (int i = 0; were_there && i < 2; ++i) old.push_back(*FileStore::open(path));
      between.fail_sync = ++failing;
      more = !history(path, all);
      between.fail_sync = 0;
      after.records = all.records;
      after.opened = all.opened || were_there;
      const Order order{.first_record = 101, .records_first = were_there};
      const Watched seen = watch(after, [&] {
        return were_there ? history(path, old[0], old[1], after, order)
                          : history(path, after, order);
      });
      between = {};
      INFO("sync " << failing << " failed; others " << (were_there ? "were there" : "come new"));
      CHECK(seen.done);
      CHECK(seen.failure == "");
    }
    CHECK(failing > 20);
  }
}

TEST_CASE("a call that a signal ends is made again, whichever it is") {
  const test::TempFolder folder(files_folder());
  const std::string path = folder / "store";
  const auto uninterrupted = [](const auto& act) {  // what this test does itself
    between.on = false;
    act();
    between.on = true;
  };
  Acknowledged all;
  bool locked = true;
  const auto first_failure = [&]() -> std::string {
    if (!history(path, all)) return "the history";
    between.after = {};
    if (!locked) return "a file in the making was not locked";
    uninterrupted([&] {
      std::ofstream(path + "/temp/1") << "of a writer that died";
      std::ofstream(path + "/records", std::ios::app) << "torn";
    });
    auto store = FileStore::open(path);
    if (!store) return "open: " + std::string(store.error().message());
    if (::access((path + "/temp/1").c_str(), F_OK) == 0) return "what a dead writer left is there";
    if (!store->add_record(test::number_record(seed, {50}))) return "add behind a torn record";
    if (store->torn_bytes() != 4) return "torn bytes";
    const BlobKey key = all.blobs.begin()->second;
    const auto contains = store->contains(key);
    if (!contains || !*contains) return "contains";
    const auto absent = store->contains(test::blob_key(seed, 1000));
    if (!absent || *absent) return "does not contain";
    if (!store->erase(key)) return "erase";
    // Another folder takes the name.
    if (::rename(path.c_str(), (folder / "gone").c_str()) != 0) return "rename";
    if (!FileStore::open(path)) return "open another";
    if (!store->add_record(test::number_record(seed, {51}))) return "follow";
    auto there = FileStore::open(path, {.read_only = true});
    if (!there) return "open to read";
    const auto records = there->records(0);
    if (!records || !test::numbers_in(seed, *records).contains(51)) return "followed";
    if (!FileStore::remove(path)) return "remove";
    return ::access(path.c_str(), F_OK) == 0 ? "it is there still" : "";
  };
  begin(folder.path());
  between.interrupt = true;
  between.after = [&] { uninterrupted([&] { locked = locked && locked_in_the_making(path); }); };
  const std::string failure = first_failure();
  const std::uint64_t interruptions = between.interruptions;
  between = {};
  CHECK(failure == "");
  CHECK(interruptions > 100);
}
