// Replicas that meet in a Redis server: through its death, its return with everything, and its
// return with nothing.
#include <deque>
#include <thread>

#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/memory.hpp>
#include <kvmeld/stores/redis.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"
#include "support/redis_server.hpp"

namespace {

using kvmeld::Fragment;
using kvmeld::replica::MemberId;
using kvmeld::stores::RedisStore;
using kvmeld::stores::RedisTransport;

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 5) {
  return test::sealed(test::geometry({.layers = 2, .heads = 2, .channels = 32}), tokens, seed,
                      {.tokens = test::token_ids(tokens)})
      .fragment;
}

/// One agent with its connections. Its store is the server, or its own memory.
template <class Store>
struct Member {
  Store store;
  RedisTransport transport;
  kvmeld::replica::Replica replica;

  Member(const Member&) = delete;  // the replica points to the store
  Member& operator=(const Member&) = delete;
  Member(Store given, RedisTransport carrier, MemberId self, bool shared)
      : store(std::move(given)),
        transport(std::move(carrier)),
        replica(store, options(transport, self, shared)) {}

  static kvmeld::replica::Replica::Options options(const RedisTransport& transport, MemberId self,
                                                   bool shared) {
    kvmeld::replica::Replica::Options options{.epoch = 1, .merger = kvmeld::Digest128{1, 1}};
    options.self = self;
    options.epoch = 1;
    options.members = {1, 2, 3};
    options.format.chunk_bytes = 700;
    options.shared_store = shared;
    options.max_message_bytes = transport.max_message_bytes();
    options.news_interval_ms = 50;
    options.retry_ms = 20;
    options.max_records = 6;
    return options;
  }
  /// A round of its loop; what the server refuses meanwhile is tried again in the next.
  void run(std::int64_t now_ms) {
    (void)replica.tick(now_ms);
    for (const kvmeld::replica::Outgoing& out : replica.take_outbox())
      (void)transport.send(out.to, out.bytes);
    for (auto got = transport.receive(0); got && got->has_value(); got = transport.receive(0))
      REQUIRE(replica.receive((*got)->from, (*got)->bytes).ok());
  }
  [[nodiscard]] bool has(std::size_t fragments) const {
    const auto entries = replica.set().entries();
    return entries.size() == fragments && replica.wanted() == 0 &&
           std::all_of(entries.begin(), entries.end(), [](const auto& entry) {
             return entry.complete() && kvmeld::verify_fragment(entry.fragment).ok();
           });
  }
};

RedisTransport transport(const test::RedisServer& server, MemberId self) {
  auto made = RedisTransport::open({.server = server.client(), .self = self});
  REQUIRE(made.ok());
  return *std::move(made);
}
void join(std::deque<Member<RedisStore>>& members, const test::RedisServer& server, MemberId self) {
  auto store = RedisStore::open({.server = server.client()});
  REQUIRE(store.ok());
  members.emplace_back(*std::move(store), transport(server, self), self, true);
  REQUIRE(members.back().replica.open().ok());
}

/// Until all have so many fragments and one digest, ten seconds at most.
template <class Members>
bool converge(Members& members, std::size_t fragments) {
  for (int i = 0; i < 1000; ++i) {
    for (auto& member : members) member.run(kvmeld::stores::detail::monotonic_ms());
    const bool all = std::all_of(members.begin(), members.end(), [&](const auto& member) {
      return member.has(fragments) &&
             member.replica.set().digest() == members.front().replica.set().digest();
    });
    if (all) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}
template <class Members>
void insert(Members& members, std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t n = first; n < last; ++n)
    REQUIRE(members[n % members.size()].replica.insert(fragment(n)).ok());
}

}  // namespace

TEST_CASE(
    "replicas that share a server keep every fragment, also when it comes back with nothing") {
  test::RedisServer server;  // keeps nothing over a restart
  REQUIRE(server.running());
  std::deque<Member<RedisStore>> members;
  for (MemberId self = 1; self <= 3; ++self) join(members, server, self);
  insert(members, 0, 12);
  REQUIRE(converge(members, 12));

  server.kill();
  CHECK(members[0].replica.insert(fragment(100)).error().code() == kvmeld::ErrorCode::unavailable);
  CHECK(members[0].replica.set().size() == 12);
  for (auto& member : members) member.run(kvmeld::stores::detail::monotonic_ms());
  REQUIRE(server.restart_empty());
  for (auto& member : members) {  // back when its backoff is over
    for (int i = 0; i < 200 && !member.store.contains({}).ok(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  insert(members, 12, 15);
  REQUIRE(converge(members, 15));
  // All of it is in the server again: for one that comes now and hears of nobody.
  std::deque<Member<RedisStore>> late;
  join(late, server, 4);
  REQUIRE(converge(late, 15));
  CHECK(late[0].replica.set().digest() == members[0].replica.set().digest());
  CHECK(late[0].replica.counters().fragments_fetched == 0);
}

TEST_CASE(
    "replicas with stores of their own meet by messages alone, and again after the server was "
    "away") {
  test::RedisServer server;
  REQUIRE(server.running());
  std::deque<Member<kvmeld::stores::MemoryStore>> members;
  for (MemberId self = 1; self <= 3; ++self)
    members.emplace_back(kvmeld::stores::MemoryStore(), transport(server, self), self, false);
  for (auto& member : members) REQUIRE(member.replica.open().ok());
  insert(members, 0, 6);
  REQUIRE(converge(members, 6));
  server.kill();
  insert(members, 6, 12);  // needs no server; the news of it is lost
  for (auto& member : members) member.run(kvmeld::stores::detail::monotonic_ms());
  REQUIRE(server.restart());
  REQUIRE(converge(members, 12));
}
