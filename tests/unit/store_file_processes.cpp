// The file store among processes that really die, disks that are really full, and users who may
// not.
#include <kvmeld/stores/file.hpp>

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "support/store_laws.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::stores::Durability;
using kvmeld::stores::FileStore;
using test::Bytes;

const kvmeld::stores::FileStoreOptions fast{.durability = Durability::none};

/// A child that runs `work` and leaves with what it returns; Catch's checks belong to the parent.
pid_t child(const std::function<int()>& work) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(work());
  return pid;
}
/// The exit code, or 1000 + the signal that ended it.
int end_of(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

std::size_t entries(const std::string& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

/// The line of /proc/self/maps that an address lies in.
std::string mapping_of(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    fields >> std::hex >> begin >> dash >> end;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at >= begin && at < end) return line;
  }
  return {};
}

/// Where both the disk and, where there is one, shared memory are tested.
std::vector<std::filesystem::path> places() {
  std::vector<std::filesystem::path> all{std::filesystem::temp_directory_path()};
  if (::access("/dev/shm", W_OK) == 0) all.emplace_back("/dev/shm");
  return all;
}

/// Quick to make, so that most kills meet a writer in the midst of writing.
Bytes bytes_of(std::uint64_t n) {
  static const Bytes base = test::blob_bytes(1, 700'000);
  const auto from = base.begin() + static_cast<std::ptrdiff_t>(n % 97);
  Bytes bytes(from, from + static_cast<std::ptrdiff_t>(1000 + n * 7919 % 600'000));
  std::memcpy(bytes.data(), &n, sizeof n);
  return bytes;
}
/// As test::number_record, and long enough to be torn: zeros follow.
Bytes long_record(std::uint64_t n) {
  Bytes record = test::number_record(9, {n});
  record.resize(40'000);
  return record;
}

}  // namespace

TEST_CASE("writers killed at any moment leave whole blobs and all that was acknowledged") {
  std::mt19937_64 random(20260);
  std::size_t left_behind = 0, kills = 0;
  for (const auto& place : places()) {
    const test::TempFolder folder(place);
    const std::string path = folder / "store";
    auto reader = FileStore::open(path, fast);
    REQUIRE(reader.ok());
    std::set<std::uint64_t> records;
    std::uint64_t cursor = 0;
    std::set<std::uint64_t> seen;
    for (std::uint64_t round = 0; round < 25; ++round) {
      int pipe_ends[2];
      REQUIRE(::pipe(pipe_ends) == 0);
      // Two writers at once: one may die with the lock that the other waits for.
      std::vector<pid_t> writers;
      for (std::uint64_t w = 0; w < 2; ++w) {
        writers.push_back(child([&, w] {
          auto store = FileStore::open(path, fast);
          if (!store) return 1;
          for (std::uint64_t i = 0; i < 1000; ++i) {
            const std::uint64_t mine = (round * 2 + w) * 1000 + i + 1;
            if (!store->put(test::blob_key(1, mine), bytes_of(mine)).ok()) return 2;
            if (!store->add_record(long_record(mine)).ok()) return 3;
            // acknowledged: both
            if (::write(pipe_ends[1], &mine, sizeof mine) != sizeof mine) return 4;
            if (i % 5 == 4) {
              const auto batch = store->records(0);
              if (!batch) return 5;
              if (!store
                       ->replace_records(batch->cursor,
                                         test::number_record(9, test::numbers_in(9, *batch)))
                       .ok())
                return 6;
            }
          }
          return 0;
        }));
      }
      ::close(pipe_ends[1]);
      std::set<std::uint64_t> acknowledged;
      std::uint64_t n = 0;
      // On a busy machine too they get somewhere before they die, mostly.
      if (round % 5 != 0 && ::read(pipe_ends[0], &n, sizeof n) == sizeof n) acknowledged.insert(n);
      ::usleep(static_cast<useconds_t>(random() % 12'000));
      for (int look = 0; look < 20; ++look) {  // while they write
        const std::uint64_t some = (round * 2 + random() % 2) * 1000 + random() % 8 + 1;
        const auto got = reader->get(test::blob_key(1, some));
        if (got) CHECK(test::equal(*got, bytes_of(some)));
        if (!got) CHECK(got.error().code() == ErrorCode::not_found);
      }
      for (const pid_t pid : writers) {
        ::kill(pid, SIGKILL);
        CHECK(end_of(pid) == 1000 + SIGKILL);
        ++kills;
      }
      while (::read(pipe_ends[0], &n, sizeof n) == sizeof n) acknowledged.insert(n);
      ::close(pipe_ends[0]);
      left_behind += entries(path + "/temp");

      auto fresh = FileStore::open(path, fast);
      REQUIRE(fresh.ok());
      CHECK(entries(path + "/temp") == 0);
      records.insert(acknowledged.begin(), acknowledged.end());
      for (FileStore* s : {&*reader, &*fresh}) {
        for (const std::uint64_t number : acknowledged) {
          const auto got = s->get(test::blob_key(1, number));
          REQUIRE(got.ok());
          CHECK(test::equal(*got, bytes_of(number)));
        }
        const auto batch = s->records(0);
        REQUIRE(batch.ok());
        const auto there = test::numbers_in(9, *batch);
        CHECK(std::ranges::includes(there, records));
      }
      const auto more = reader->records(cursor);  // one who follows by cursor misses none either
      REQUIRE(more.ok());
      cursor = more->cursor;
      seen.merge(test::numbers_in(9, *more));
      CHECK(std::ranges::includes(seen, records));
    }
    CHECK(records.size() >= 20);
  }
  INFO(kills << " writers killed, " << left_behind << " files left half-written");
  CHECK(left_behind > 0);  // or the kills came too late to test anything
}

TEST_CASE("processes map the same payload, without a copy and read-only") {
  for (const auto& place : places()) {
    const test::TempFolder folder(place);
    const std::string path = folder / "store";
    const kvmeld::BlobKey key = test::blob_key(2, 1);
    const Bytes bytes = test::blob_bytes(5, 8U << 20U);
    CHECK(end_of(child([&] {
            auto store = FileStore::open(path, fast);
            return store && store->put_payload(key, bytes).ok() ? 0 : 1;
          })) == 0);
    auto store = FileStore::open(path, fast);
    REQUIRE(store.ok());
    const auto here = store->map_payload(key);
    REQUIRE(here.ok());
    CHECK(test::equal(*here, bytes));
    const std::string line = mapping_of(here->data.get());
    INFO(line);
    CHECK(line.find(" r--s ") != std::string::npos);
    CHECK(line.find("/payloads/" + key.hex().substr(2, 2) + "/" + key.hex()) != std::string::npos);
    CHECK(mapping_of(here->data.get() + here->size - 1) == line);
    // Another process has the same pages: the same inode of the same device, as the line says.
    const auto identity = [](const std::string& of) {
      std::istringstream fields(of);
      std::string range, mode, offset, device, inode;
      fields >> range >> mode >> offset >> device >> inode;
      return mode + " " + offset + " " + device + " " + inode;
    };
    CHECK(end_of(child([&] {
            auto other = FileStore::open(path, fast);
            if (!other) return 1;
            const auto there = other->map_payload(key);
            if (!there || !test::equal(*there, bytes)) return 2;
            return identity(mapping_of(there->data.get())) == identity(line) ? 0 : 3;
          })) == 0);
    // Nobody writes into what others read.
    CHECK(end_of(child([&] {
            ::signal(SIGSEGV, SIG_DFL);
            *const_cast<volatile std::byte*>(here->data.get()) = std::byte{1};
            return 0;
          })) == 1000 + SIGSEGV);
    // The mapping is the holder's, whatever becomes of the file and the store.
    REQUIRE(store->erase_payload(key).ok());
    REQUIRE(FileStore::remove(path).ok());
    CHECK(test::equal(*here, bytes));
  }
}

TEST_CASE("a forked child goes on with its parent's handle, and excludes it") {
  const test::TempFolder folder;
  auto store = FileStore::open(folder / "store", fast);
  REQUIRE(store.ok());
  std::vector<pid_t> children;
  for (std::uint64_t c = 0; c < 3; ++c) {
    children.push_back(child([&, c] {
      for (std::uint64_t i = 0; i < 200; ++i) {
        if (!store->add_record(test::number_record(1, {c * 200 + i})).ok()) return 1;
      }
      return 0;
    }));
  }
  for (int i = 0; i < 50; ++i) {
    const auto batch = store->records(0);
    REQUIRE(batch.ok());
    REQUIRE(
        store->replace_records(batch->cursor, test::number_record(1, test::numbers_in(1, *batch)))
            .ok());
  }
  for (const pid_t pid : children) CHECK(end_of(pid) == 0);
  CHECK(test::numbers_in(1, *store->records(0)).size() == 600);
  CHECK(store->damage().places == 0);
}

TEST_CASE(
    "of processes that put the same blobs, one is told that each is new; opening a store takes no "
    "living writer's file") {
  const test::TempFolder folder;
  constexpr std::uint64_t blobs = 60;
  std::vector<pid_t> children;
  for (int c = 0; c < 4; ++c) {
    children.push_back(child([&] {
      int created = 0;
      for (std::uint64_t n = 0; n < blobs; ++n) {
        auto store = FileStore::open(folder / "store", fast);  // cleans up while the others write
        if (!store) return 255;
        const auto put = store->put(test::blob_key(1, n), bytes_of(n));
        if (!put) return 254;
        created += *put ? 1 : 0;
      }
      return created;
    }));
  }
  int created = 0;
  for (const pid_t pid : children) created += end_of(pid);
  CHECK(created == blobs);
  auto store = FileStore::open(folder / "store", fast);
  REQUIRE(store.ok());
  for (std::uint64_t n = 0; n < blobs; ++n)
    CHECK(test::equal(*store->get(test::blob_key(1, n)), bytes_of(n)));
  CHECK(entries(folder / "store/temp") == 0);
}

TEST_CASE("a process that stops with the lock makes records unavailable, and blobs not") {
  const test::TempFolder folder;
  kvmeld::stores::FileStoreOptions options = fast;
  options.lock_timeout_ms = 50;
  auto store = FileStore::open(folder / "store", options);
  REQUIRE(store.ok());
  const int fd = ::open((folder / "store/lock").c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(::flock(fd, LOCK_EX) == 0);
  const kvmeld::Status held = store->add_record(Bytes(3));
  CHECK(held.code() == ErrorCode::unavailable);
  CHECK(held.message().find("50 ms") != std::string::npos);
  CHECK(store->records(0).error().code() == ErrorCode::unavailable);
  CHECK(store->put(test::blob_key(1, 1), Bytes(3)).ok());
  ::close(fd);
  CHECK(store->add_record(Bytes(3)).ok());
}

TEST_CASE("a full disk refuses, and loses nothing") {
  // Files that may not grow, for everybody; a small disk of one's own, where the kernel lets us
  // mount one.
  const test::TempFolder folder;
  CHECK(end_of(child([&] {
          ::signal(SIGXFSZ, SIG_IGN);
          const ::rlimit limit{100'000, 100'000};
          if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
          auto store = FileStore::open(folder / "limited", fast);
          if (!store) return 2;
          if (!store->put(test::blob_key(1, 1), Bytes(100'000)).ok()) return 3;
          if (store->put(test::blob_key(1, 2), Bytes(100'001)).error().code() !=
              ErrorCode::store_full)
            return 4;
          if (store->get(test::blob_key(1, 2)).error().code() != ErrorCode::not_found) return 5;
          if (entries(folder / "limited/temp") != 0) return 6;
          const Bytes record = test::number_record(1, {7});
          if (!store->add_record(record).ok()) return 7;
          const auto size = std::filesystem::file_size(folder / "limited/records");
          if (store->add_record(Bytes(100'000)).code() != ErrorCode::store_full) return 8;
          if (std::filesystem::file_size(folder / "limited/records") != size) return 9;
          const auto batch = store->records(0);
          if (!batch || batch->records != std::vector<Bytes>{record}) return 10;
          if (store->replace_records(batch->cursor, Bytes(100'000)).code() != ErrorCode::store_full)
            return 11;
          if (store->records(0)->records != batch->records || entries(folder / "limited/temp") != 0)
            return 12;
          return store->add_record(record).ok() && store->records(0)->records.size() == 2 ? 0 : 13;
        })) == 0);

  const std::string disk = folder / "disk";
  std::filesystem::create_directory(disk);
  constexpr int cannot_mount = 77;
  const int code = end_of(child([&] {
    const bool own = ::unshare(CLONE_NEWNS) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0;
    if (!own || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return cannot_mount;
    if (::mount("kvmeld", disk.c_str(), "tmpfs", 0, "size=2m") != 0) return cannot_mount;
    auto store = FileStore::open(disk + "/store");
    if (!store) return 1;
    const Bytes record = test::number_record(1, {1});
    if (!store->add_record(record).ok()) return 2;
    std::uint64_t n = 0;
    for (;; ++n) {
      const auto put = store->put(test::blob_key(1, n), test::blob_bytes(n, 100'000));
      if (!put && put.error().code() != ErrorCode::store_full) return 3;
      if (!put) break;
      if (n > 100) return 4;
    }
    if (store->add_record(Bytes(200'000)).code() != ErrorCode::store_full) return 5;
    if (store->replace_records(store->records(0)->cursor, Bytes(200'000)).code() !=
        ErrorCode::store_full)
      return 6;
    if (store->records(0)->records != std::vector<Bytes>{record}) return 7;
    if (entries(disk + "/store/temp") != 0) return 8;
    for (std::uint64_t i = 0; i < n; ++i) {
      const auto got = store->get(test::blob_key(1, i));
      if (!got || !test::equal(*got, test::blob_bytes(i, 100'000))) return 9;
    }
    if (!store->erase(test::blob_key(1, 0)).ok()) return 10;
    return store->put(test::blob_key(1, n), test::blob_bytes(n, 100'000)).ok() ? 0 : 11;
  }));
  if (code == cannot_mount) return test::skip("no right to mount a small disk");
  CHECK(code == 0);
}

TEST_CASE(
    "what cannot be a store is refused with the reason, and what may not be used with the errno") {
  const test::TempFolder folder;
  const auto refusal = [](const std::string& path,
                          const kvmeld::stores::FileStoreOptions& options = fast) {
    const auto store = FileStore::open(path, options);
    REQUIRE_FALSE(store.ok());
    return store.error();
  };
  CHECK(refusal("").code() == ErrorCode::invalid_argument);
  CHECK(refusal(std::string("a\0b", 3)).code() == ErrorCode::invalid_argument);
  const kvmeld::Status missing = refusal(folder / "no/such/store");
  CHECK(missing.code() == ErrorCode::invalid_argument);
  CHECK(missing.message().find("errno 2") != std::string::npos);
  std::ofstream(folder / "file") << "text";
  CHECK(refusal(folder / "file").code() == ErrorCode::invalid_argument);
  CHECK(refusal(folder / "file/store").code() == ErrorCode::invalid_argument);
  CHECK(refusal(folder / std::string(300, 'a')).code() == ErrorCode::invalid_argument);
  std::filesystem::create_directory(folder / "there");
  std::filesystem::create_directory_symlink(folder / "there", folder / "link");
  CHECK(FileStore::open(folder / "link", fast).ok());
  kvmeld::stores::FileStoreOptions own = fast;
  own.folder_must_be_own = true;
  CHECK(refusal(folder / "link", own).code() == ErrorCode::invalid_argument);
  CHECK(FileStore::open(folder / "there", own).ok());

  // Modes as given, whatever the umask; blobs cannot be written.
  const auto mode = [&](const std::string& name) {
    return static_cast<unsigned>(std::filesystem::status(folder / name).permissions());
  };
  const mode_t before = ::umask(077);
  kvmeld::stores::FileStoreOptions shared = fast;
  shared.file_mode = 0660;
  shared.folder_mode = 0770;
  auto store = FileStore::open(folder / "shared", shared);
  ::umask(0);
  auto closed = FileStore::open(folder / "closed", fast);
  ::umask(before);
  REQUIRE((store.ok() && closed.ok()));
  const kvmeld::BlobKey key = test::blob_key(1, 1);
  REQUIRE((store->put(key, Bytes(5)).ok() && closed->put(key, Bytes(5)).ok()));
  const std::string blob = "/blobs/" + key.hex().substr(2, 2) + "/" + key.hex();
  CHECK(mode("shared") == 0770);
  CHECK(mode("shared/records") == 0660);
  CHECK(mode("shared/lock") == 0660);
  CHECK(mode("shared" + blob) == 0440);
  CHECK(mode("closed") == 0700);
  CHECK(mode("closed/records") == 0600);
  CHECK(mode("closed" + blob) == 0400);

  // Another user: not into a store of one's own.
  if (::geteuid() != 0) return test::skip("no right to become another user");
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
  const int code = end_of(child([&] {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) return 1;
    const auto theirs = FileStore::open(folder / "closed", fast);
    if (theirs || theirs.error().code() != ErrorCode::unavailable ||
        theirs.error().message().find("errno 13") == std::string::npos)
      return 2;
    std::filesystem::path name(folder / "mine");
    if (!FileStore::open(name.string(), own).ok()) return 3;
    return 0;
  }));
  CHECK(code == 0);
  CHECK(refusal(folder / "mine", own).code() == ErrorCode::invalid_argument);  // not even root's
}
