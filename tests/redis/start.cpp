// The start of docs/start.md with replicas over Redis, compiled and run with a server of its own.
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "support/catch.hpp"
#include "support/random_cache.hpp"
#include "support/redis_server.hpp"

// example-begin: redis
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/redis.hpp>

// One agent's copy of what all have said. The server holds fragments and operations; it may go away
// and come back, and agents that start later find everything.
struct Member {
  kvmeld::stores::RedisStore store;
  kvmeld::stores::RedisTransport transport;
  kvmeld::replica::Replica replica;

  // Whoever renders with another merger would make another cache of the same set, so replicas tell
  // each other its digest. An epoch is one life of this agent; the store gives out a new one.
  static kvmeld::Result<std::unique_ptr<Member>> join(const std::string& socket,
                                                      kvmeld::replica::MemberId self,
                                                      const kvmeld::Digest128& merger) {
    using namespace kvmeld;
    auto store = stores::RedisStore::open({.server = {.unix_socket = socket}, .scope = "chat"});
    if (!store) return store.error();
    auto transport = stores::RedisTransport::open(
        {.server = {.unix_socket = socket}, .scope = "chat", .self = self});
    if (!transport) return transport.error();
    const auto epoch = replica::claim_epoch(*store, self);
    if (!epoch) return epoch.error();
    replica::Replica::Options options{.self = self, .epoch = *epoch, .merger = merger};
    options.shared_store = true;
    options.max_message_bytes = transport->max_message_bytes();
    std::unique_ptr<Member> member(
        new Member{*std::move(store), *std::move(transport), std::move(options)});
    KVMELD_TRY(member->replica.open());
    return member;
  }
  // A turn of the agent's loop: hear, tick, tell. Lost messages are asked for again.
  void step(std::int64_t now_ms, std::int64_t wait_ms) {
    if (auto heard = transport.receive(wait_ms); heard && *heard)
      (void)replica.receive((*heard)->from, (*heard)->bytes);
    (void)replica.tick(now_ms);
    for (const kvmeld::replica::Outgoing& out : replica.take_outbox())
      (void)transport.send(out.to, out.bytes);
  }

 private:
  Member(kvmeld::stores::RedisStore s, kvmeld::stores::RedisTransport t,
         kvmeld::replica::Replica::Options options)
      : store(std::move(s)), transport(std::move(t)), replica(store, std::move(options)) {}
};
// example-end

TEST_CASE("two agents of docs/start.md end in the same set, and render the same cache") {
  test::RedisServer server;
  const auto geometry = test::geometry({.layers = 2, .heads = 2, .channels = 32});
  const auto said = [&](std::uint64_t seed) {
    return test::sealed(geometry, 5, seed, {.tokens = test::token_ids(5)}).fragment;
  };
  const auto merger = kvmeld::merger();
  auto alice = Member::join(server.client().unix_socket, 1, merger.digest());
  INFO(alice.status().message());
  REQUIRE(alice.ok());
  auto bob = Member::join(server.client().unix_socket, 2, merger.digest());
  REQUIRE(bob.ok());
  REQUIRE((*alice)->replica.insert(said(1)).ok());
  REQUIRE((*bob)->replica.insert(said(2)).ok());
  const auto begin = std::chrono::steady_clock::now();
  const auto equal = [&] {
    return (*alice)->replica.set().size() == 2 &&
           (*alice)->replica.set().digest() == (*bob)->replica.set().digest() &&
           (*alice)->replica.wanted() + (*bob)->replica.wanted() == 0;
  };
  std::int64_t now_ms = 0;
  while (!equal() && now_ms < 20000) {
    now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                 std::chrono::steady_clock::now() - begin)
                 .count();
    (*alice)->step(now_ms, 5);
    (*bob)->step(now_ms, 5);
  }
  REQUIRE(equal());
  kvmeld::HostCache first(geometry, 10), second(geometry, 10);
  const auto a = kvmeld::render(kvmeld::exec::cpu, (*alice)->replica.set(), merger,
                                first.mutable_ref(), {}, {.content_digest = true});
  const auto b = kvmeld::render(kvmeld::exec::cpu, (*bob)->replica.set(), merger,
                                second.mutable_ref(), {}, {.content_digest = true});
  REQUIRE(a.ok());
  REQUIRE(b.ok());
  CHECK(a->tokens == 10);
  CHECK(*a->content_digest == *b->content_digest);
}
