// Processes that share nothing but a server: fragments of 8 MiB, records and messages cross between
// them.
#include <kvmeld/stores/redis.hpp>

#include <numeric>

#include "support/redis_server.hpp"
#include "support/store_laws.hpp"
#include "support/transport_laws.hpp"

using kvmeld::stores::RedisStore;
using kvmeld::stores::RedisTransport;
using test::Bytes;

namespace {

constexpr std::size_t chunk_bytes = std::size_t{1} << 20U;

struct Chunks {
  std::vector<Bytes> bytes;
  std::vector<kvmeld::stores::RedisBlob> blobs;
  std::vector<kvmeld::BlobKey> keys;

  explicit Chunks(std::uint64_t seed, std::size_t count = 8) {
    for (std::uint64_t n = 0; n < count; ++n)
      bytes.push_back(test::blob_bytes(seed + n, chunk_bytes));
    for (std::uint64_t n = 0; n < count; ++n) keys.push_back(test::blob_key(seed, n));
    keys[0].bytes = {0, 0, 1};  // a key is any bytes
    keys[0].bytes[31] = static_cast<std::uint8_t>(seed);
    for (std::size_t n = 0; n < count; ++n) blobs.push_back({keys[n], bytes[n]});
  }
  [[nodiscard]] bool are_in(RedisStore& store) const {
    const auto got = store.get_all(keys);
    if (!got) return false;
    for (std::size_t n = 0; n < keys.size(); ++n) {
      if (!test::equal((*got)[n], bytes[n])) return false;
    }
    return true;
  }
};

/// Runs it in a process of its own; its answer is the process's.
template <class Work>
pid_t in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) _exit(work() ? 0 : 1);  // no destructors: the server is the parent's
  return child;
}
bool went_well(pid_t child) {
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("fragments, records and messages cross between processes, byte for byte") {
  const test::RedisServer server({}, true);
  REQUIRE(server.running());
  const pid_t child = in_child([&] {
    auto store = RedisStore::open({.server = server.client_by_port()});
    auto transport = RedisTransport::open({.server = server.client_by_port(), .self = 2});
    if (!store || !transport) return false;
    if (!transport->send(1, test::message(1, 10))) return false;
    auto news = transport->receive(20'000);
    if (!news || !news->has_value() || (*news)->from != 1 ||
        (*news)->bytes != test::message(2, 3'000'000))
      return false;
    const auto records = store->records(0);
    if (!records || test::numbers_in(1, *records) != std::set<std::uint64_t>{1, 2, 3}) return false;
    if (!Chunks(10).are_in(*store)) return false;
    const Chunks answer(20);
    return store->put_all(answer.blobs).ok() &&
           store->add_record(test::number_record(1, {4})).ok() &&
           transport->send(1, test::message(3, 10)).ok();
  });
  auto store = RedisStore::open({.server = server.client()});
  auto transport = RedisTransport::open({.server = server.client(), .self = 1});
  REQUIRE((store.ok() && transport.ok()));
  const Chunks fragment(10);
  REQUIRE(store->put_all(fragment.blobs).ok());
  REQUIRE(store->add_record(test::number_record(1, {1, 2, 3})).ok());
  // The other may have said that it is here before this one listened.
  bool answered = false;
  for (int i = 0; i < 100 && !answered; ++i) {
    REQUIRE(transport->send(2, test::message(2, 3'000'000)).ok());
    const auto got = transport->receive(200);
    REQUIRE(got.ok());
    answered = got->has_value() && (*got)->bytes == test::message(3, 10);
  }
  CHECK(answered);
  REQUIRE(went_well(child));
  CHECK(Chunks(20).are_in(*store));
  CHECK((test::numbers_in(1, *store->records(0)) == std::set<std::uint64_t>{1, 2, 3, 4}));
}

TEST_CASE("what is known is not sent again, whoever brought it") {
  const test::RedisServer server;
  REQUIRE(server.running());
  const Chunks fragment(30);
  REQUIRE(went_well(in_child([&] {
    auto store = RedisStore::open({.server = server.client()});
    return store && store->put_all(fragment.blobs).ok();
  })));
  auto store = RedisStore::open({.server = server.client()});
  REQUIRE(store.ok());
  const kvmeld::stores::RedisStoreCounters start = store->counters();
  const auto known = store->put_all(fragment.blobs);
  REQUIRE(known.ok());
  CHECK(std::count(known->begin(), known->end(), true) == 0);
  kvmeld::stores::RedisStoreCounters now = store->counters();
  CHECK(now.dedup_hits - start.dedup_hits == 8);
  CHECK(now.dedup_bytes - start.dedup_bytes == 8 * chunk_bytes);
  CHECK(now.bytes_sent - start.bytes_sent < 8 * 200);
  CHECK(now.bytes_received - start.bytes_received > 8 * chunk_bytes);  // compared, not believed
  CHECK(now.round_trips - start.round_trips == 1 + 8);  // all lengths, then about a MiB each
  // One new among them, and small ones, which are not asked for.
  const Chunks other(40, 1);
  std::vector<kvmeld::stores::RedisBlob> mixed = fragment.blobs;
  mixed.insert(mixed.begin() + 3, other.blobs[0]);
  mixed.push_back({test::blob_key(50, 0), std::span(fragment.bytes[0]).first(100)});
  mixed.push_back(mixed.back());
  const auto some = store->put_all(mixed);
  REQUIRE(some.ok());
  CHECK((*some == std::vector<bool>{false, false, false, true, false, false, false, false, false,
                                    true, false}));
  const kvmeld::stores::RedisStoreCounters last = store->counters();
  // what is missing, and the small one that was there then
  CHECK(last.round_trips - now.round_trips == 1 + 8 + 1 + 1);
  CHECK(last.bytes_sent - now.bytes_sent < chunk_bytes + 3000);
  CHECK(last.dedup_hits - now.dedup_hits == 9);
  CHECK(other.are_in(*store));
  // A fragment of one blob: 8 MiB at once.
  Bytes whole(8 * chunk_bytes);
  std::iota(reinterpret_cast<std::uint32_t*>(whole.data()),
            reinterpret_cast<std::uint32_t*>(whole.data() + whole.size()), 7U);
  REQUIRE(store->put(test::blob_key(60, 0), whole).ok());
  CHECK(test::equal(*store->get(test::blob_key(60, 0)), whole));
  // Many at once, of all sizes and some that are not there.
  std::vector<kvmeld::BlobKey> all;
  for (std::uint64_t n = 0; n < 200; ++n) all.push_back(test::blob_key(70, n));
  for (std::uint64_t n = 0; n < 200; n += 3)
    REQUIRE(store->put(all[n], test::blob_bytes(n, n % 7 == 0 ? 300'000 + n : n * 50)).ok());
  const auto got = store->get_all(all);
  REQUIRE((got.ok() && got->size() == 200));
  for (std::uint64_t n = 0; n < 200; ++n) {
    CHECK(((*got)[n].data != nullptr) == (n % 3 == 0));
    if (n % 3 == 0)
      CHECK(test::equal((*got)[n], test::blob_bytes(n, n % 7 == 0 ? 300'000 + n : n * 50)));
  }
  CHECK(*store->contains_all(std::vector{test::blob_key(60, 0), test::blob_key(60, 1)}) ==
        std::vector<bool>{true, false});
}

TEST_CASE("writers in several processes lose no record to one that replaces") {
  const test::RedisServer server;
  REQUIRE(server.running());
  constexpr std::uint64_t writers = 3, each = 120;
  std::vector<pid_t> children;
  for (std::uint64_t w = 0; w < writers; ++w) {
    children.push_back(in_child([&] {
      auto store = RedisStore::open({.server = server.client()});
      if (!store) return false;
      for (std::uint64_t n = 0; n < each; ++n) {
        if (!store->add_record(test::number_record(1, {w * each + n})).ok()) return false;
        if (n % 17 != w) continue;
        const auto batch = store->records(0);
        if (!batch || !store
                           ->replace_records(batch->cursor,
                                             test::number_record(1, test::numbers_in(1, *batch)))
                           .ok())
          return false;
      }
      return true;
    }));
  }
  auto store = RedisStore::open({.server = server.client()});
  REQUIRE(store.ok());
  // A reader that follows by cursor sees all of them.
  std::set<std::uint64_t> followed;
  std::uint64_t cursor = 0;
  for (int i = 0; i < 2000 && followed.size() < writers * each; ++i) {
    const auto batch = store->records(cursor);
    REQUIRE(batch.ok());
    followed.merge(test::numbers_in(1, *batch));
    cursor = batch->cursor;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (const pid_t child : children) CHECK(went_well(child));
  CHECK(followed.size() == writers * each);
  const auto all = store->records(0);
  REQUIRE(all.ok());
  CHECK(test::numbers_in(1, *all).size() == writers * each);
  CHECK(all->records.size() < writers * each);
}

TEST_CASE("a cluster takes a namespace in one slot, and says when nobody serves it") {
  const test::RedisServer server({"--cluster-enabled", "yes"}, true);
  REQUIRE(server.running());
  CHECK(server.tell({"CLUSTER", "ADDSLOTSRANGE", "0", "16383"}) == "OK");
  kvmeld::Result<RedisStore> store =
      RedisStore::open({.server = server.client(), .scope = "team a"});
  for (int i = 0; i < 500 && !store; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    store = RedisStore::open({.server = server.client(), .scope = "team a"});
  }
  INFO(store.error().message());
  REQUIRE(store.ok());
  test::store_laws(*store, *store, 9, false);
  // Its slot goes elsewhere.
  const std::string slot = server.tell({"CLUSTER", "KEYSLOT", "{team a}:records"});
  CHECK(slot == server.tell({"CLUSTER", "KEYSLOT", "{team a}:blob:" + test::blob_key(1, 1).hex()}));
  CHECK(server.tell({"CLUSTER", "DELSLOTS", slot}) == "OK");
  const auto gone = store->get(test::blob_key(1, 1));
  REQUIRE_FALSE(gone.ok());
  CHECK((gone.error().code() == kvmeld::ErrorCode::unavailable ||
         gone.error().code() == kvmeld::ErrorCode::unsupported));
  CHECK(gone.error().message().find("CLUSTERDOWN") != std::string::npos);
}
