// Payloads between processes and stores on one machine: taking one over against taking over a small
// one, and files against plain reads and writes of the same bytes.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <kvmeld/stores/file.hpp>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::BlobKey;
using kvmeld::stores::Durability;
using kvmeld::stores::FileStore;

BlobKey key(std::uint8_t number) {
  BlobKey key;
  key.bytes.fill(number);
  return key;
}

std::vector<std::byte> content(std::int64_t bytes) {
  std::vector<std::byte> all(static_cast<std::size_t>(bytes));
  bench::fill(all, 7);
  return all;
}

/// A folder and its store, gone with it: in shared memory without syncing, or on disk with every
/// promise.
class Place {
 public:
  explicit Place(Durability durability)
      : path_((durability == Durability::none ? "/dev/shm"
                                              : std::filesystem::temp_directory_path().string()) +
              "/kvmeld-benchmark-" + std::to_string(::getpid())),
        store_(FileStore::open(path_, {.durability = durability})) {}
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
    ::unlink(plain().c_str());
    (void)FileStore::remove(path_).ok();
  }
  [[nodiscard]] bool ok() const { return store_.ok(); }
  [[nodiscard]] FileStore& store() { return *store_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string plain() const { return path_ + "/plain"; }

 private:
  std::string path_;
  kvmeld::Result<FileStore> store_;
};

/// A process of its own writes; false where it could not.
template <class Work>
bool elsewhere(const Work& work) {
  const ::pid_t pid = ::fork();
  if (pid == 0) ::_exit(work() ? 0 : 1);
  int status = 1;
  return pid > 0 && ::waitpid(pid, &status, 0) == pid && status == 0;
}

double percentile(std::vector<double>& all, double share) {
  const auto at =
      all.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(all.size() - 1));
  std::nth_element(all.begin(), at, all.end());
  return *at * 1e6;
}

// What a receiver waits from the key to bytes it can read; it looks at the first. The baseline is
// the same for 64 KiB, so that a ratio of 1 means that size does not matter; `copy_us` is what one
// copy of the bytes takes.
void handover(benchmark::State& state, std::int64_t bytes) {
  Place place(Durability::none);
  if (!place.ok()) return state.SkipWithError("no shared memory");
  constexpr std::int64_t small = 65536;
  const auto publish = [&] {
    auto store = FileStore::open(place.path(), {.durability = Durability::none});
    return store && store->put_payload(key(1), content(bytes)).ok() &&
           store->put_payload(key(2), content(small)).ok();
  };
  if (!elsewhere(publish)) return state.SkipWithError("cannot publish");
  std::byte sum{};
  const auto take = [&](std::uint8_t number) {
    const auto payload = place.store().map_payload(key(number));
    sum ^= payload->bytes().front();
    benchmark::DoNotOptimize(sum);
  };
  std::vector<double> ours, base;
  bench::seconds([&] { take(1); });
  for (auto _ : state) {
    base.push_back(bench::seconds([&] { take(2); }));
    ours.push_back(bench::seconds([&] { take(1); }));
    state.SetIterationTime(ours.back());
  }
  const auto payload = place.store().map_payload(key(1));
  bench::Copy copy(bytes);
  (void)bench::seconds([&] { std::memcpy(copy.to.data(), payload->data.get(), payload->size); });
  state.counters["copy_us"] =
      bench::seconds([&] { std::memcpy(copy.to.data(), payload->data.get(), payload->size); }) *
      1e6;
  state.counters["p05_us"] = percentile(ours, 0.05);
  state.counters["p50_us"] = percentile(ours, 0.5);
  state.counters["p95_us"] = percentile(ours, 0.95);
  state.counters["ratio"] = percentile(base, 0.5) / percentile(ours, 0.5);
}

bool write_plain(const Place& place, std::span<const std::byte> bytes, Durability durability) {
  const int fd = ::open(place.plain().c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  bool ok = kvmeld::stores::detail::write_at(fd, bytes, 0) == 0;
  if (durability != Durability::none) {
    ok = ok && ::fsync(fd) == 0 && kvmeld::stores::detail::sync_folder(AT_FDCWD, place.path()) == 0;
  }
  ::close(fd);
  return ok;
}

// Against a plain file that is written and, on disk, synced as its promise needs it: bytes, then
// name. Both are removed.
void put(benchmark::State& state, Durability durability, std::int64_t bytes) {
  Place place(durability);
  if (!place.ok()) return state.SkipWithError("no store");
  const auto all = content(bytes);
  bool ok = true;
  bench::paired(
      state, bytes,
      [&] {
        ok = ok && place.store().put(key(1), all).ok();
        ok = ok && place.store().erase(key(1)).ok();
      },
      bytes,
      [&] {
        ok = ok && write_plain(place, all, durability);
        ::unlink(place.plain().c_str());
      });
  if (!ok) state.SkipWithError("a write failed");
}

// Both hash what they got, as a receiver verifies it: from the mapping, and from a buffer that a
// plain read has filled.
void get(benchmark::State& state, Durability durability, std::int64_t bytes) {
  Place place(durability);
  const auto all = content(bytes);
  if (!place.ok() || !place.store().put(key(1), all).ok() || !write_plain(place, all, durability)) {
    return state.SkipWithError("no store");
  }
  std::vector<std::byte> buffer(all.size());
  std::uint64_t hash = 0;
  const auto digest = [&hash](std::span<const std::byte> read) {
    kvmeld::Xxh3_128 h;
    h.update(read);
    hash ^= h.digest().low;
    benchmark::DoNotOptimize(hash);
  };
  bench::paired(
      state, bytes, [&] { digest(place.store().get(key(1))->bytes()); }, bytes,
      [&] {
        const kvmeld::stores::detail::FileHandle file =
            kvmeld::stores::detail::open_file(AT_FDCWD, place.plain(), O_RDONLY);
        (void)kvmeld::stores::detail::read_at(file.get(), buffer, 0);
        digest(buffer);
      });
}

// A record of 200 bytes against an append of as many, synced on disk.
void add_record(benchmark::State& state, Durability durability) {
  Place place(durability);
  if (!place.ok()) return state.SkipWithError("no store");
  const auto record = content(200);
  const int fd = ::open(place.plain().c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
  bool ok = true;
  bench::paired(
      state, 200, [&] { ok = ok && place.store().add_record(record).ok(); }, 200,
      [&] {
        ok = ok && ::write(fd, record.data(), record.size()) == 200;
        if (durability != Durability::none) ok = ok && ::fsync(fd) == 0;
      });
  ::close(fd);
  if (!ok) state.SkipWithError("a write failed");
}

// Asking for records when there are none, as replicas mostly do, against one look at the file.
void poll(benchmark::State& state) {
  Place place(Durability::none);
  if (!place.ok() || !place.store().add_record(content(200)).ok())
    return state.SkipWithError("no store");
  const std::uint64_t cursor = place.store().records(0)->cursor;
  const std::string path = place.path() + "/records";
  bench::paired(
      state, 1, [&] { benchmark::DoNotOptimize(place.store().records(cursor)->records.size()); }, 1,
      [&] {
        struct ::stat status {};
        benchmark::DoNotOptimize(::stat(path.c_str(), &status));
      });
}

const bool registered = [] {
  using bench::add;
  using bench::mib;
  using bench::name;
  add("state/handover/shared_memory/KiB:64", handover, std::int64_t{65536});
  for (const std::int64_t size : {1, 8, 64})
    add(name({"state/handover/shared_memory", mib(size)}), handover, size << 20);
  for (const auto& [where, durability] :
       {std::pair{"shared_memory", Durability::none}, {"disk", Durability::file_and_folder}}) {
    for (const std::int64_t size : {1, 8, 64}) {
      add(name({"state/store/put/", where, mib(size)}), put, durability, size << 20);
      add(name({"state/store/get/", where, mib(size)}), get, durability, size << 20);
    }
    add(name({"state/store/add_record/", where}), add_record, durability);
  }
  add("state/store/poll/shared_memory", poll);
  return true;
}();

}  // namespace
