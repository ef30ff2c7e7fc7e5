// Fragments that cross between processes through files and shared memory, alone and as the state of
// replicas.
#include <kvmeld/fragment.hpp>
#include <kvmeld/metrics/collect.hpp>
#include <kvmeld/metrics/metrics.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/file.hpp>
#include <kvmeld/stores/memory.hpp>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "support/catch.hpp"
#include "support/random_cache.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::stores::FileStore;
using Replica = kvmeld::replica::Replica;

const kvmeld::replica::FragmentFormat format{};

/// Of 32 KiB and more, so that it is worth mapping.
Fragment fragment(std::uint64_t seed, std::int64_t tokens = 20) {
  return test::sealed(test::geometry({.layers = 2, .heads = 2, .channels = 64}), tokens, seed,
                      {.tokens = test::token_ids(tokens)})
      .fragment;
}

kvmeld::Result<FileStore> open_store(const test::TempFolder& folder) {
  return FileStore::open(folder / "store", {.durability = kvmeld::stores::Durability::none});
}

template <class Work>
pid_t child(const Work& work) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(work() ? 0 : 1);
  return pid;
}
bool went_well(pid_t pid) {
  int status = -1;
  return ::waitpid(pid, &status, 0) == pid && status == 0;
}

bool mapped(const std::byte* bytes) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    fields >> std::hex >> begin >> dash >> end;
    const auto at = reinterpret_cast<std::uintptr_t>(bytes);
    if (at >= begin && at < end) return line.find("/payloads/") != std::string::npos;
  }
  return false;
}

std::vector<std::filesystem::path> places() {
  std::vector<std::filesystem::path> all{std::filesystem::temp_directory_path()};
  if (::access("/dev/shm", W_OK) == 0) all.emplace_back("/dev/shm");
  return all;
}

Replica::Options options(kvmeld::replica::MemberId self, std::uint32_t epoch = 1) {
  Replica::Options out{.epoch = 1, .merger = kvmeld::Digest128{1, 1}};
  out.self = self;
  out.epoch = epoch;
  out.members = {0, 1, 2, 3};
  out.shared_store = true;
  return out;
}

}  // namespace

TEST_CASE("a fragment crosses between processes, byte for byte and without a copy") {
  for (const auto& place : places()) {
    const test::TempFolder folder(place);
    const Fragment sent = fragment(1);
    REQUIRE(went_well(child([&] {
      auto store = open_store(folder);
      return store && kvmeld::replica::store_fragment(*store, sent, format).ok();
    })));
    auto store = open_store(folder);
    REQUIRE(store.ok());
    const auto got = kvmeld::replica::load_fragment(*store, sent.id(), format);
    REQUIRE(got.ok());
    CHECK(kvmeld::verify_fragment(*got).ok());
    const kvmeld::Payload& there = sent.payloads()[0];
    const kvmeld::Payload& here = got->payloads()[0];
    REQUIRE(here.byte_count == there.byte_count);
    CHECK(std::equal(here.bytes.get(), here.bytes.get() + here.byte_count, there.bytes.get()));
    CHECK(mapped(here.bytes.get()));
    CHECK_FALSE(mapped(there.bytes.get()));
  }
}

TEST_CASE(
    "a payload that the disk has changed is found out, removed, and put again by whoever has it") {
  const test::TempFolder folder;
  const Fragment sent = fragment(2);
  auto store = open_store(folder);
  REQUIRE(store.ok());
  REQUIRE(kvmeld::replica::store_fragment(*store, sent, format).ok());
  std::filesystem::path file;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder / "store/payloads")) {
    if (entry.is_regular_file()) file = entry.path();
  }
  const auto size = std::filesystem::file_size(file);
  const auto damage = [&](std::uintmax_t at, std::uintmax_t new_size) {
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(at))
        .put('\x55');
    std::filesystem::resize_file(file, new_size);
  };
  for (const auto& [at, new_size] : {std::pair{size / 2, size},
                                     {size - 1, size},
                                     {std::uintmax_t{0}, size - 1},
                                     {std::uintmax_t{0}, std::uintmax_t{0}}}) {
    damage(at, new_size);
    CHECK_FALSE(kvmeld::replica::load_fragment(*store, sent.id(), format).ok());
    CHECK_FALSE(std::filesystem::exists(file));
    REQUIRE(kvmeld::replica::store_fragment(*store, sent, format).ok());
    const auto again = kvmeld::replica::load_fragment(*store, sent.id(), format);
    REQUIRE(again.ok());
    CHECK(kvmeld::verify_fragment(*again).ok());
  }
}

TEST_CASE(
    "replicas in processes of their own meet in a folder, and one that is killed comes back with "
    "what it had acknowledged") {
  for (const auto& place : places()) {
    const test::TempFolder folder(place);
    const auto agent = [&](kvmeld::replica::MemberId self, std::uint32_t epoch, std::uint64_t first,
                           int count, int acknowledged) {
      auto store = open_store(folder);
      if (!store) return false;
      Replica replica(*store, options(self, epoch));
      // one that all of them have
      if (!replica.open().ok() || !replica.insert(fragment(99)).ok()) return false;
      for (int i = 0; i < count; ++i) {
        const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
        if (!replica.insert(fragment(seed)).ok()) return false;
        if (acknowledged >= 0 && ::write(acknowledged, &seed, sizeof seed) != sizeof seed)
          return false;
      }
      return true;
    };
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t killed = child([&] { return agent(1, 1, 1000, 100'000, ends[1]); });
    const pid_t second = child([&] { return agent(2, 1, 2000, 3, -1); });
    const pid_t third = child([&] { return agent(3, 1, 3000, 3, -1); });
    CHECK(went_well(second));
    CHECK(went_well(third));
    std::uint64_t seed = 0;
    std::vector<std::uint64_t> acknowledged;
    for (int i = 0; i < 5 && ::read(ends[0], &seed, sizeof seed) == sizeof seed; ++i)
      acknowledged.push_back(seed);
    ::kill(killed, SIGKILL);
    CHECK_FALSE(went_well(killed));
    ::close(ends[1]);
    while (::read(ends[0], &seed, sizeof seed) == sizeof seed) acknowledged.push_back(seed);
    ::close(ends[0]);
    REQUIRE(acknowledged.size() >= 5);
    CHECK(went_well(child([&] { return agent(1, 2, 5000, 2, -1); })));  // back, in another life

    auto store = open_store(folder);
    REQUIRE(store.ok());
    Replica replica(*store, options(0));
    REQUIRE(replica.open().ok());
    for (int tick = 1; tick < 20 && replica.wanted() > 0; ++tick)
      REQUIRE(replica.tick(tick * 1000).ok());
    CHECK(replica.wanted() == 0);
    acknowledged.insert(acknowledged.end(), {99, 2000, 2001, 2002, 3000, 3001, 3002, 5000, 5001});
    for (const std::uint64_t s : acknowledged) {
      const auto* const entry = replica.set().find(fragment(s).id());
      REQUIRE(entry != nullptr);
      REQUIRE(entry->complete());
      CHECK(kvmeld::verify_fragment(entry->fragment).ok());
      CHECK(mapped(entry->fragment.payloads()[0].bytes.get()));
    }
    // At most one more, which was written down and not yet acknowledged.
    CHECK(replica.set().size() <= acknowledged.size() + 1);
  }
}

TEST_CASE(
    "damage to the records is counted by the store that is opened, by the replica and on the "
    "metrics page") {
  const test::TempFolder folder;
  {
    auto store = open_store(folder);
    REQUIRE(store.ok());
    auto compacting = options(1);
    compacting.max_records = 4;
    Replica replica(*store, compacting);
    REQUIRE(replica.open().ok());
    for (std::uint64_t seed = 0; seed < 6; ++seed) REQUIRE(replica.insert(fragment(seed)).ok());
    REQUIRE(replica.tick(1000).ok());
    REQUIRE(store->records(0)->records.size() == 1);  // all of it in one record
    CHECK(replica.counters().store_damage.places == 0);
  }
  const std::string log = folder / "store/records";
  std::fstream(log, std::ios::in | std::ios::out | std::ios::binary).seekp(200).put('\x55');
  auto store = open_store(folder);
  REQUIRE(store.ok());
  CHECK(store->damage().places == 1);
  CHECK(store->damage().bytes == std::filesystem::file_size(log) - 64);
  Replica replica(*store, options(1, 2));
  REQUIRE(replica.open().ok());
  CHECK(replica.set().size() == 0);
  CHECK(replica.counters().store_damage.places == 1);
  CHECK(replica.counters().store_damage.bytes == store->damage().bytes);
  kvmeld::replica::Accounting accounting;
  accounting.store_damage = replica.counters().store_damage;
  kvmeld::metrics::MetricsPage page;
  REQUIRE(kvmeld::metrics::collect(page, accounting).ok());
  CHECK(kvmeld::metrics::prometheus_text(page).find("kvmeld_store_damaged_places 1\n") !=
        std::string::npos);
  REQUIRE(replica.insert(fragment(9)).ok());
  CHECK(open_store(folder)->damage().bytes == store->damage().bytes);  // nobody forgets it
}

TEST_CASE(
    "a replica that runs writes into the folder that took the place of its store's what it holds") {
  const test::TempFolder folder;
  auto store = open_store(folder);
  REQUIRE(store.ok());
  Replica replica(*store, options(1));
  REQUIRE(replica.open().ok());
  REQUIRE(replica.insert(fragment(1)).ok());
  REQUIRE(replica.tick(1000).ok());
  std::filesystem::copy(folder / "store", folder / "old", std::filesystem::copy_options::recursive);
  REQUIRE(replica.insert(fragment(2)).ok());
  REQUIRE(replica.tick(2000).ok());
  std::filesystem::rename(folder / "store", folder / "lost");
  std::filesystem::rename(folder / "old", folder / "store");
  REQUIRE(replica.tick(3000).ok());
  REQUIRE(replica.insert(fragment(3)).ok());
  auto restored = open_store(folder);
  REQUIRE(restored.ok());
  Replica newcomer(*restored, options(2));
  REQUIRE(newcomer.open().ok());
  for (int tick = 1; tick < 20 && newcomer.wanted() > 0; ++tick)
    REQUIRE(newcomer.tick(tick * 1000).ok());
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    const auto* const entry = newcomer.set().find(fragment(seed).id());
    REQUIRE(entry != nullptr);
    CHECK(entry->complete());
  }
}

TEST_CASE(
    "what is there already is taken for stored only as it should be, and private copies do not "
    "change under their holder") {
  const test::TempFolder folder;
  const Fragment sent = fragment(4);
  auto store = open_store(folder);
  REQUIRE(store.ok());
  REQUIRE(kvmeld::replica::store_fragment(*store, sent, format).ok());
  std::filesystem::path file;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder / "store/payloads")) {
    if (entry.is_regular_file()) file = entry.path();
  }
  const auto flip = [&] {
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(5000).put('\x55');
  };
  flip();
  const auto again = kvmeld::replica::store_fragment(*store, sent, format);
  REQUIRE(again.ok());
  CHECK(again->bytes == sent.payloads()[0].byte_count);  // put anew
  REQUIRE(kvmeld::replica::load_fragment(*store, sent.id(), format).ok());
  // Chunks behind a store that keeps no payloads in one piece.
  kvmeld::stores::MemoryStore memory;
  REQUIRE(kvmeld::replica::store_fragment(memory, sent, format).ok());
  const auto manifest = kvmeld::replica::make_manifest(sent, format.chunk_bytes);
  REQUIRE(manifest.ok());
  REQUIRE(memory.put(manifest->chunks[0][0], std::vector<std::byte>(10)).ok());
  REQUIRE(kvmeld::replica::store_fragment(memory, sent, format).ok());
  CHECK(kvmeld::replica::load_fragment(memory, sent.id(), format).ok());

  auto copying = FileStore::open(
      folder / "store", {.durability = kvmeld::stores::Durability::none, .private_copies = true});
  REQUIRE(copying.ok());
  const auto shared = kvmeld::replica::load_fragment(*store, sent.id(), format);
  const auto copied = kvmeld::replica::load_fragment(*copying, sent.id(), format);
  REQUIRE((shared.ok() && copied.ok()));
  flip();
  CHECK(kvmeld::verify_fragment(*copied).ok());
  CHECK_FALSE(kvmeld::verify_fragment(*shared).ok());  // as the header says
}

TEST_CASE("a folder without write permission is read, one with a link inside is refused") {
  const test::TempFolder folder;
  const Fragment sent = fragment(5);
  {
    auto store = open_store(folder);
    REQUIRE((store.ok() && kvmeld::replica::store_fragment(*store, sent, format).ok()));
    REQUIRE(store->add_record({}).ok());
  }
  const std::string root = folder / "store";
  const auto read = [&] {
    auto store = FileStore::open(root, {.read_only = true});
    if (!store || !store->read_only() ||
        !kvmeld::replica::load_fragment(*store, sent.id(), format).ok())
      return false;
    const kvmeld::BlobKey key{};
    return store->records(0)->records.size() == 1 &&
           store->put(key, {}).error().code() == ErrorCode::unsupported &&
           store->add_record({}).code() == ErrorCode::unsupported &&
           store->erase(key).code() == ErrorCode::unsupported &&
           store->replace_records(0, {}).code() == ErrorCode::unsupported &&
           store->put_payload(key, {}).error().code() == ErrorCode::unsupported;
  };
  CHECK(read());
  if (::geteuid() == 0) {  // who root is may write anywhere
    std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      std::filesystem::permissions(entry.path(), entry.is_directory()
                                                     ? std::filesystem::perms(0555)
                                                     : std::filesystem::perms(0444));
    }
    std::filesystem::permissions(root, std::filesystem::perms(0555));
    CHECK(went_well(child([&] {
      if (::setgid(65534) != 0 || ::setuid(65534) != 0) return false;
      const auto writing = FileStore::open(root, {.durability = kvmeld::stores::Durability::none});
      return !writing && writing.error().code() == ErrorCode::unavailable && read();
    })));
    std::filesystem::permissions(root, std::filesystem::perms::all);
  }
  CHECK(FileStore::open(folder / "none", {.read_only = true}).error().code() ==
        ErrorCode::invalid_argument);
  CHECK_FALSE(std::filesystem::exists(folder / "none"));
  for (const std::string name : {"blobs", "payloads", "temp"}) {
    const std::string linked = folder / ("linked_" + name);
    std::filesystem::create_directories(linked);
    std::filesystem::create_directory(folder / ("elsewhere_" + name));
    std::filesystem::create_directory_symlink(folder / ("elsewhere_" + name), linked + "/" + name);
    const auto refused = FileStore::open(linked, {.durability = kvmeld::stores::Durability::none});
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code() == ErrorCode::invalid_argument);
    CHECK(refused.error().message().find(name) != std::string::npos);
  }
  // One of the inner 256, too.
  const std::string inner = folder / "inner";
  auto store = FileStore::open(inner, {.durability = kvmeld::stores::Durability::none});
  REQUIRE(store.ok());
  kvmeld::BlobKey key{};
  std::filesystem::create_directory_symlink(folder / "elsewhere_blobs", inner + "/blobs/00");
  CHECK_FALSE(store->put(key, std::vector<std::byte>(3)).ok());
  CHECK(std::filesystem::is_empty(folder / "elsewhere_blobs"));
}
