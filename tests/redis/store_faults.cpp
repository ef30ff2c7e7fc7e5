// What becomes of a Redis store when its server dies, fills up, forgets, refuses or stands still.
// All servers are real.
#include <kvmeld/stores/redis.hpp>

#include <atomic>
#include <thread>

#include "support/redis_server.hpp"
#include "support/store_laws.hpp"

using kvmeld::ErrorCode;
using kvmeld::stores::RedisStore;
using kvmeld::stores::RedisTransport;
using test::Bytes;

namespace {

RedisStore open(const test::RedisServer& server) {
  REQUIRE(server.running());
  auto store = RedisStore::open({.server = server.client(), .scope = "faults"});
  INFO(store.error().message());
  REQUIRE(store.ok());
  return *std::move(store);
}

const std::vector<std::string> append_only{"--appendonly", "yes", "--appendfsync", "always"};

/// Tries for five seconds, as a caller would who is told `unavailable`.
template <class Try>
bool in_the_end(const Try& attempt) {
  for (int i = 0; i < 500; ++i) {
    if (attempt()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace

TEST_CASE("a server killed in the midst of writes comes back with all that it acknowledged") {
  test::RedisServer server(append_only);
  RedisStore store = open(server);
  std::set<std::uint64_t> acknowledged, records;
  std::uint64_t number = 0;
  for (int life = 0; life < 4; ++life) {
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(40 + 25 * life));
      server.kill();
    });
    kvmeld::Status failed;
    for (; failed; ++number) {
      const auto put = store.put(test::blob_key(1, number),
                                 test::blob_bytes(number, 1000 + number % 7 * 20'000));
      failed = put.status();
      if (put) acknowledged.insert(number);
      const bool whole = records.size() % 10 == 9;
      if (failed && !whole) {
        failed = store.add_record(test::number_record(1, {number}));
        if (failed) records.insert(number);
      } else if (failed) {  // torn at any place, a replacement loses nothing
        const auto batch = store.records(0);
        failed = batch.status();
        if (batch)
          failed = store.replace_records(batch->cursor,
                                         test::number_record(1, test::numbers_in(1, *batch)));
        if (failed) failed = store.add_record(test::number_record(1, {number}));
        if (failed) records.insert(number);
      }
    }
    killer.join();
    CHECK(failed.code() == ErrorCode::unavailable);
    CHECK(failed.message().find(server.socket()) != std::string::npos);
    REQUIRE(server.restart());
    REQUIRE(in_the_end([&] { return store.contains(test::blob_key(1, 0)).ok(); }));
    for (const std::uint64_t n : acknowledged) {
      const auto got = store.get(test::blob_key(1, n));
      REQUIRE(got.ok());
      CHECK(test::equal(*got, test::blob_bytes(n, 1000 + n % 7 * 20'000)));
    }
    const auto all = store.records(0);
    REQUIRE(all.ok());
    CHECK(std::ranges::includes(test::numbers_in(1, *all), records));
  }
  CHECK(acknowledged.size() > 4);
  CHECK(store.counters().reconnects == 4);
}

TEST_CASE("a full server refuses, keeps what it has, and goes on when there is room") {
  const test::RedisServer server({"--maxmemory", "6000000"});
  RedisStore store = open(server);
  REQUIRE(store.add_record(test::number_record(1, {1})).ok());
  std::vector<Bytes> bytes;
  std::vector<kvmeld::stores::RedisBlob> blobs;
  for (std::uint64_t n = 0; n < 20; ++n) bytes.push_back(test::blob_bytes(n, 500'000));
  for (std::uint64_t n = 0; n < 20; ++n) blobs.push_back({test::blob_key(2, n), bytes[n]});
  const auto some = store.put_all(blobs);
  REQUIRE_FALSE(some.ok());
  CHECK(some.error().code() == ErrorCode::store_full);
  CHECK(some.error().message().find("maxmemory") != std::string::npos);
  const auto cursor = store.records(0);
  REQUIRE(cursor.ok());
  CHECK(store.add_record(bytes[0]).code() == ErrorCode::store_full);
  CHECK(store.replace_records(cursor->cursor, bytes[0]).code() == ErrorCode::store_full);
  CHECK(store.records(0)->records == cursor->records);
  std::vector<kvmeld::BlobKey> keys;
  for (const auto& blob : blobs) keys.push_back(blob.key);
  auto held = store.get_all(keys);
  REQUIRE(held.ok());
  std::size_t there = 0;
  for (std::size_t n = 0; n < 20; ++n) {
    if ((*held)[n].data == nullptr) continue;
    ++there;
    CHECK(test::equal((*held)[n], bytes[n]));  // whole or not at all
  }
  CHECK(there > 3);
  CHECK(there < 15);
  // Another that comes while it is full can read.
  RedisStore late = open(server);
  CHECK(late.get(keys[0]).ok());

  CHECK(server.tell({"CONFIG", "SET", "maxmemory", "100mb"}) == "OK");
  const auto rest = store.put_all(blobs);
  REQUIRE(rest.ok());
  CHECK(static_cast<std::size_t>(std::count(rest->begin(), rest->end(), false)) == there);
  CHECK(store.add_record(bytes[0]).ok());
  held = store.get_all(keys);
  REQUIRE(held.ok());
  for (std::size_t n = 0; n < 20; ++n) CHECK(test::equal((*held)[n], bytes[n]));
}

TEST_CASE("a server that cannot write to its disk is full, and one that evicts is refused") {
  const test::RedisServer server;
  RedisStore store = open(server);
  REQUIRE(store.add_record(test::number_record(1, {1})).ok());
  std::filesystem::remove_all(server.data_folder());
  server.tell({"CONFIG", "SET", "save", "3600 1"});
  server.tell({"BGSAVE"});
  REQUIRE(in_the_end([&] {
    return server.tell({"INFO", "persistence"}).find("rdb_last_bgsave_status:err") !=
           std::string::npos;
  }));
  const auto put = store.put(test::blob_key(1, 1), test::blob_bytes(1, 5000));
  REQUIRE_FALSE(put.ok());
  CHECK(put.error().code() == ErrorCode::store_full);
  CHECK(store.records(0)->records.size() == 1);
  std::filesystem::create_directory(server.data_folder());

  const test::RedisServer evicting({"--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru"});
  REQUIRE(evicting.running());
  const auto refused = RedisStore::open({.server = evicting.client()});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code() == ErrorCode::unsupported);
  CHECK(refused.error().message().find("allkeys-lru") != std::string::npos);
  CHECK(RedisStore::open({.server = evicting.client(), .allow_eviction = true}).ok());
}

TEST_CASE("who may not in learns why") {
  test::RedisServer server;
  server.set_password("sesame \0 open");
  REQUIRE(server.restart());
  kvmeld::stores::RedisOptions client = server.client();
  CHECK(RedisStore::open({.server = client}).ok());
  const auto code = [&] { return RedisStore::open({.server = client}).error().code(); };
  client.password = "wrong";
  CHECK(code() == ErrorCode::unauthenticated);
  client.password.clear();
  CHECK(code() == ErrorCode::unauthenticated);
  CHECK(server.tell({"ACL", "SETUSER", "reader", "on", ">pass", "~*", "+@read", "+@connection",
                     "+info", "+set"}) == "OK");
  client.user = "reader";
  client.password = "pass";
  auto reader = RedisStore::open({.server = client, .scope = "faults"});
  REQUIRE(reader.ok());
  CHECK(reader->contains(test::blob_key(1, 1)).ok());
  CHECK(reader->erase(test::blob_key(1, 1)).code() == ErrorCode::unauthenticated);
  CHECK(reader->add_record(test::blob_bytes(1, 10)).code() == ErrorCode::unauthenticated);
  // What docs/redis.md says that an agent's user needs is enough.
  CHECK(server.tell({"ACL",         "SETUSER",       "agent",       "on",       ">pass",
                     "~{faults}:*", "resetchannels", "&{faults}:*", "-@all",    "+auth",
                     "+select",     "+ping",         "+info",       "+type",    "+strlen",
                     "+get",        "+set",          "+del",        "+rpush",   "+lrange",
                     "+llen",       "+ltrim",        "+watch",      "+unwatch", "+multi",
                     "+exec",       "+publish",      "+subscribe"}) == "OK");
  client.user = "agent";
  client.database = 1;
  auto agent = RedisStore::open({.server = client, .scope = "faults"});
  REQUIRE(agent.ok());
  test::store_laws(*agent, *agent, 4, false);
  CHECK(RedisTransport::open({.server = client, .scope = "faults", .self = 1})
            ->send(2, test::blob_bytes(1, 10))
            .ok());
  CHECK(RedisTransport::open({.server = client, .scope = "others", .self = 1}).error().code() ==
        ErrorCode::unauthenticated);
  client.database = 0;
  client.user = "nobody";
  CHECK(code() == ErrorCode::unauthenticated);
  const test::RedisServer free;  // it asks for none
  kvmeld::stores::RedisOptions needless = free.client();
  needless.password = "x";
  CHECK(RedisStore::open({.server = needless}).error().code() == ErrorCode::unauthenticated);
}

TEST_CASE("a server that is gone costs no more than was said, and is found again") {
  test::RedisServer server(append_only, true);
  RedisStore store = open(server);
  REQUIRE(store.put(test::blob_key(1, 1), test::blob_bytes(1, 100)).ok());
  server.kill();
  const std::int64_t begin = kvmeld::stores::detail::monotonic_ms();
  for (int i = 0; i < 20; ++i) {
    const auto gone = store.get(test::blob_key(1, 1));
    REQUIRE_FALSE(gone.ok());
    CHECK(gone.error().code() == ErrorCode::unavailable);
    CHECK(gone.error().message().find("errno") != std::string::npos);
  }
  CHECK(kvmeld::stores::detail::monotonic_ms() - begin < 2000);  // most of them did not even try
  CHECK(RedisStore::open({.server = server.client()}).error().code() == ErrorCode::unavailable);
  CHECK(RedisStore::open({.server = server.client_by_port()})
            .error()
            .message()
            .find("Connection refused") != std::string::npos);
  REQUIRE(server.restart());
  CHECK(in_the_end([&] { return store.get(test::blob_key(1, 1)).ok(); }));

  // Standing still: the call ends after the command's time, and the next ones as soon.
  kvmeld::stores::RedisOptions impatient = server.client();
  impatient.command_timeout_ms = 150;
  auto brief = RedisStore::open({.server = impatient, .scope = "faults"});
  REQUIRE(brief.ok());
  server.pause();
  const std::int64_t paused = kvmeld::stores::detail::monotonic_ms();
  const auto still = brief->get(test::blob_key(1, 1));
  REQUIRE_FALSE(still.ok());
  CHECK(still.error().code() == ErrorCode::unavailable);
  CHECK(still.error().message().find("150 ms") != std::string::npos);
  CHECK(kvmeld::stores::detail::monotonic_ms() - paused >= 149);
  CHECK(kvmeld::stores::detail::monotonic_ms() - paused < 2300);
  server.go_on();
  CHECK(in_the_end([&] { return brief->get(test::blob_key(1, 1)).ok(); }));
}

TEST_CASE(
    "a failover is noticed: the replica that takes over is another generation with the same "
    "content") {
  test::RedisServer master({"--repl-diskless-sync-delay", "0"}, true), replica;
  RedisStore store = open(master);
  REQUIRE(store.put(test::blob_key(1, 1), test::blob_bytes(1, 100'000)).ok());
  REQUIRE(store.add_record(test::number_record(1, {1})).ok());
  CHECK(replica.tell({"REPLICAOF", "127.0.0.1", std::to_string(master.port())}) == "OK");
  REQUIRE(in_the_end([&] {
    return replica.tell({"INFO", "replication"}).find("master_link_status:up") != std::string::npos;
  }));
  RedisStore other = open(replica);
  REQUIRE(in_the_end([&] { return *other.contains(test::blob_key(1, 1)); }));
  CHECK(test::numbers_in(1, *other.records(0)).size() == 1);
  CHECK(other.generation() != store.generation());
  const auto put = other.put(test::blob_key(1, 2), test::blob_bytes(2, 100));
  REQUIRE_FALSE(put.ok());
  CHECK(put.error().code() == ErrorCode::unavailable);
  CHECK(put.error().message().find("READONLY") != std::string::npos);
  CHECK(other.counters().reconnects > 0);  // an address may lead to another server by now
  master.kill();
  CHECK(replica.tell({"REPLICAOF", "NO", "ONE"}) == "OK");
  CHECK(in_the_end([&] { return other.put(test::blob_key(1, 2), test::blob_bytes(2, 100)).ok(); }));
  CHECK(test::equal(*other.get(test::blob_key(1, 1)), test::blob_bytes(1, 100'000)));
}

TEST_CASE("a lost connection alone is not noticed, and no change of generation") {
  const test::RedisServer server;
  RedisStore store = open(server);
  REQUIRE(store.add_record(test::number_record(1, {1})).ok());
  const auto before = store.records(0);
  REQUIRE(before.ok());
  const std::uint64_t generation = store.generation();
  for (int i = 0; i < 3; ++i) {
    server.tell({"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"});
    CHECK(store.put(test::blob_key(1, static_cast<std::uint64_t>(i)), test::blob_bytes(1, 300'000))
              .ok());
  }
  CHECK(store.generation() == generation);
  CHECK(store.counters().reconnects == 3);
  CHECK(store.records(before->cursor)->records.empty());
}

TEST_CASE("a server that forgot is noticed, and its records are read from the beginning") {
  test::RedisServer server(append_only);
  RedisStore store = open(server), other = open(server);
  for (std::uint64_t n = 0; n < 10; ++n)
    REQUIRE(store.add_record(test::number_record(1, {n})).ok());
  const auto seen = other.records(0);
  REQUIRE(seen.ok());
  const std::uint64_t first = store.generation();
  CHECK(first == other.generation());

  REQUIRE(server.restart());  // nothing is gone, but nobody can know
  REQUIRE(in_the_end([&] { return other.records(0).ok(); }));
  CHECK(other.generation() != first);
  CHECK(other.records(seen->cursor)->records == seen->records);
  // of a cursor that says nothing now: replaces nothing
  CHECK(other.replace_records(seen->cursor, test::number_record(1, {0})).ok());
  CHECK(test::numbers_in(1, *other.records(0)).size() == 10);

  REQUIRE(server.restart_empty());
  REQUIRE(in_the_end([&] { return store.contains(test::blob_key(1, 1)).ok(); }));
  const std::uint64_t second = store.generation();
  CHECK(second != first);
  // Refilled beyond the old cursor by one, and still the other sees all of it.
  for (std::uint64_t n = 100; n < 120; ++n)
    REQUIRE(store.add_record(test::number_record(1, {n})).ok());
  const auto fresh = other.records(seen->cursor);
  REQUIRE(fresh.ok());
  CHECK(test::numbers_in(1, *fresh).size() == 20);
  CHECK(other.generation() == second);

  // Flushed while the connection stands.
  CHECK(server.tell({"FLUSHALL"}) == "OK");
  REQUIRE(store.add_record(test::number_record(1, {7})).ok());
  const std::uint64_t third = store.generation();
  CHECK(third != second);
  const auto flushed = other.records(fresh->cursor);
  REQUIRE(flushed.ok());
  CHECK((test::numbers_in(1, *flushed) == std::set<std::uint64_t>{7}));
  CHECK(other.generation() == third);
  // A cursor that nobody gave.
  const std::uint64_t beyond = flushed->cursor + 5;
  CHECK(other.records(beyond)->records.size() == 1);
  CHECK(other.replace_records(beyond, test::number_record(1, {})).code() ==
        ErrorCode::invalid_argument);
}

TEST_CASE("a store says what is wrong with its options, and what is no redis server") {
  const test::RedisServer server;
  REQUIRE(server.running());
  const auto refused = [&](auto change) {
    kvmeld::stores::RedisStoreOptions options{.server = server.client()};
    change(options);
    return RedisStore::open(options).error();
  };
  CHECK(refused([](auto& o) { o.scope = ""; }).code() == ErrorCode::invalid_argument);
  CHECK(refused([](auto& o) { o.scope = "a}"; }).message().find("a}") != std::string::npos);
  CHECK(refused([](auto& o) { o.server.unix_socket.assign(108, 'x'); }).message().find("108") !=
        std::string::npos);
  CHECK(refused([](auto& o) { o.server.unix_socket.clear(), o.server.port = 65536; })
            .message()
            .find("65536") != std::string::npos);
  CHECK(refused([](auto& o) { o.server.database = -1; }).code() == ErrorCode::invalid_argument);
  CHECK(refused([](auto& o) { o.server.database = 99; }).code() == ErrorCode::invalid_argument);
  CHECK(refused([](auto& o) { o.server.user = "u"; }).code() == ErrorCode::invalid_argument);
  CHECK(refused([](auto& o) { o.server.command_timeout_ms = 0; }).code() ==
        ErrorCode::invalid_argument);
  CHECK(refused([](auto& o) { o.server.backoff_limit_ms = 1; }).code() ==
        ErrorCode::invalid_argument);
  CHECK(refused([](auto& o) {
          o.server.unix_socket.clear(), o.server.host = "no.such.host.invalid";
        }).code() == ErrorCode::unavailable);

  // Somebody else's service on that port.
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  REQUIRE(listen(listener, 1) == 0);
  std::thread stranger([&] {
    const int client = accept(listener, nullptr, nullptr);
    (void)::send(client, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL);
    close(client);
  });
  const kvmeld::Status http = refused(
      [&](auto& o) { o.server.unix_socket.clear(), o.server.port = ntohs(address.sin_port); });
  stranger.join();
  close(listener);
  CHECK(http.code() == ErrorCode::unavailable);
  CHECK(http.message().find("not what a redis server says") != std::string::npos);

  // Somebody else's keys in the namespace.
  RedisStore store = open(server);
  server.tell({"SET", "{faults}:records", "text"});
  CHECK(store.records(0).error().code() == ErrorCode::corrupt);
  CHECK(store.add_record(test::blob_bytes(1, 10)).code() == ErrorCode::corrupt);
}

TEST_CASE("numbers in the namespace that no store wrote are corrupt, at once") {
  const test::RedisServer server;
  RedisStore store = open(server);
  REQUIRE(store.add_record(test::number_record(1, {1})).ok());
  const auto seen = store.records(0);
  REQUIRE(seen.ok());
  for (const char* base :
       {"18446744073709551615", "18446744073709551614", "17592186044415", "17592186044416", "-1",
        "", "x", "1x", "01", " 1", "1e3", "99999999999999999999"}) {
    INFO("records:base is '" << base << "'");
    CHECK(server.tell({"SET", "{faults}:records:base", base}) == "OK");
    const std::int64_t begin = kvmeld::stores::detail::monotonic_ms();
    CHECK(store.records(0).error().code() == ErrorCode::corrupt);
    CHECK(store.records(seen->cursor).error().code() == ErrorCode::corrupt);
    CHECK(store.replace_records(seen->cursor, test::number_record(1, {1})).code() ==
          ErrorCode::corrupt);
    CHECK(kvmeld::stores::detail::monotonic_ms() - begin < 2000);
  }
  // the last that there is
  CHECK(server.tell({"SET", "{faults}:records:base", "17592186044414"}) == "OK");
  CHECK(store.records(0)->records == seen->records);
}

TEST_CASE(
    "what is there already was looked at: other bytes are replaced, and another type is corrupt") {
  const test::RedisServer server;
  RedisStore store = open(server);
  for (const std::size_t size : {std::size_t{10}, std::size_t{5000}, std::size_t{400'000}}) {
    INFO(size << " bytes");
    const kvmeld::BlobKey key = test::blob_key(3, size);
    const std::string name = "{faults}:blob:" + key.hex();
    const Bytes bytes = test::blob_bytes(size, size);
    Bytes one_bit = bytes;
    one_bit[size / 2] ^= std::byte{1};
    for (const Bytes& wrong : {one_bit, Bytes(size - 1), Bytes()}) {
      CHECK(server.tell({"SET", name, std::span<const std::byte>(wrong)}) == "OK");
      const auto put = store.put(key, bytes);
      REQUIRE(put.ok());
      CHECK(*put);
      CHECK(test::equal(*store.get(key), bytes));
    }
    const auto known = store.counters();
    const auto again = store.put(key, bytes);
    REQUIRE(again.ok());
    CHECK_FALSE(*again);
    CHECK(store.counters().dedup_hits == known.dedup_hits + 1);
    CHECK(server.tell({"DEL", name}) == "1");
    CHECK(server.tell({"RPUSH", name, "a"}) == "1");
    CHECK(store.put(key, bytes).error().code() == ErrorCode::corrupt);
    CHECK(store.contains(key).error().code() == ErrorCode::corrupt);
    CHECK(store.get(key).error().code() == ErrorCode::corrupt);
    CHECK(server.tell({"LLEN", name}) == "1");
  }
}
