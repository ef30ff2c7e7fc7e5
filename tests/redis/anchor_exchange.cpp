// Peers that meet in a Redis server tell each other of anchors and pull their K/V, by messages or
// from a store that they share.
#include <thread>

#include <kvmeld/stores/redis.hpp>

#include "support/anchor_peers.hpp"
#include "support/catch.hpp"
#include "support/redis_server.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::replica::MemberId;
using kvmeld::stores::RedisStore;
using kvmeld::stores::RedisTransport;

template <class Store>
struct Peer {
  Store store;
  RedisTransport transport;
  test::Pool pool{kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {}};
  kvmeld::anchors::AnchorExchange exchange;
  std::vector<kvmeld::anchors::PulledAnchor> pulled;

  Peer(const Peer&) = delete;  // the exchange points to the store
  Peer& operator=(const Peer&) = delete;
  Peer(Store given, RedisTransport carrier, MemberId self, bool shared)
      : store(std::move(given)),
        transport(std::move(carrier)),
        exchange(store, options(self, shared)) {}

  static kvmeld::anchors::AnchorExchange::Options options(MemberId self, bool shared) {
    kvmeld::anchors::AnchorExchange::Options out;
    out.self = self;
    out.members = {1, 2, 3};
    out.frame.scope = kvmeld::anchors::anchor_namespace(
        kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), kvmeld::anchors::SimHash{});
    out.format.chunk_bytes = 256;
    out.shared_store = shared;
    out.round_ms = 20;
    out.retry_ms = 20;
    out.seed = self;
    return out;
  }
  void run() {
    CHECK(kvmeld::anchors::publish_pool(exchange, pool).ok());
    CHECK(exchange.tick(kvmeld::stores::detail::monotonic_ms()).ok());
    for (const kvmeld::replica::Outgoing& out : exchange.take_outbox())
      CHECK(transport.send(out.to, out.bytes).ok());
    for (auto got = transport.receive(0); got && got->has_value(); got = transport.receive(0))
      CHECK(exchange.receive((*got)->from, (*got)->bytes).ok());
    for (kvmeld::anchors::PulledAnchor& p : exchange.take_pulled()) pulled.push_back(std::move(p));
  }
};

RedisTransport transport(const test::RedisServer& server, MemberId self) {
  auto made = RedisTransport::open({.server = server.client(), .self = self});
  REQUIRE(made.ok());
  return *std::move(made);
}
template <class Store, class Done>
bool until(std::deque<Peer<Store>>& peers, const Done& done) {
  for (int i = 0; i < 2000 && !done(); ++i) {
    for (Peer<Store>& peer : peers) peer.run();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return done();
}
template <class Store>
std::uint64_t fetches(const Peer<Store>& peer) {
  return peer.exchange.counters()
      .sent[static_cast<std::size_t>(kvmeld::anchors::AnchorMessage::fetch)];
}

}  // namespace

TEST_CASE("an anchor goes from a peer's pool through a server's channels into another's pool") {
  const test::RedisServer server;
  REQUIRE(server.running());
  std::deque<Peer<kvmeld::stores::MemoryStore>> peers;
  for (MemberId self = 1; self <= 3; ++self)
    peers.emplace_back(kvmeld::stores::MemoryStore(), transport(server, self), self, false);
  const kvmeld::anchors::Anchor anchor = test::anchor(1, {1, 2}, 40);
  REQUIRE(peers[0].pool.commit(anchor).ok());
  const auto key = kvmeld::anchors::record_key(anchor.id, test::place(2));
  REQUIRE(until(peers, [&] { return peers[2].exchange.directory().size() == 2; }));
  REQUIRE(peers[2].exchange.pull(key).ok());
  REQUIRE(until(peers, [&] { return !peers[2].pulled.empty(); }));
  REQUIRE(peers[2].pulled[0].anchor.ok());
  CHECK(fetches(peers[2]) > 0);
  CHECK(test::same_anchor(*peers[2].pulled[0].anchor, anchor, test::place(2)));
  CHECK(*kvmeld::anchors::commit_pulled(peers[2].pool, peers[2].pulled[0]) ==
        kvmeld::anchors::CommitResult::inserted);
}

TEST_CASE(
    "where peers share a store nothing but records crosses; a blob that rotted there is refused") {
  const test::RedisServer server;
  REQUIRE(server.running());
  std::deque<Peer<RedisStore>> peers;
  for (MemberId self = 1; self <= 3; ++self) {
    auto store = RedisStore::open({.server = server.client()});
    REQUIRE(store.ok());
    peers.emplace_back(*std::move(store), transport(server, self), self, true);
  }
  const kvmeld::anchors::Anchor anchor = test::anchor(2, {1}, 40);
  REQUIRE(peers[0].pool.commit(anchor).ok());
  const auto key = kvmeld::anchors::record_key(anchor.id, test::place(1));
  REQUIRE(until(peers, [&] {
    return peers[1].exchange.directory().size() == 1 && peers[2].exchange.directory().size() == 1;
  }));
  REQUIRE(peers[2].exchange.pull(key).ok());
  REQUIRE(until(peers, [&] { return !peers[2].pulled.empty(); }));
  REQUIRE(peers[2].pulled[0].anchor.ok());
  CHECK(fetches(peers[2]) == 0);
  CHECK(test::same_anchor(*peers[2].pulled[0].anchor, anchor, test::place(1)));

  const kvmeld::BlobKey payload = peers[0].exchange.directory().find(key)->payload;
  const kvmeld::Blob blob = *peers[0].store.get(payload);
  std::vector<std::byte> bytes(blob.bytes().begin(), blob.bytes().end());
  bytes[bytes.size() / 2] ^= std::byte{1};
  REQUIRE(peers[0].store.erase(payload).ok());
  REQUIRE(*peers[0].store.put(payload, bytes));
  // Who is asked for it and lacks it removes the record, and whose pool still has it tells of it
  // anew: this pull or the next one gets it.
  for (int tries = 0; tries < 5; ++tries) {
    peers[1].pulled.clear();
    REQUIRE(until(peers, [&] { return peers[1].exchange.directory().find(key) != nullptr; }));
    REQUIRE(peers[1].exchange.pull(key).ok());
    REQUIRE(until(peers, [&] { return !peers[1].pulled.empty(); }));
    if (peers[1].pulled[0].anchor.ok()) break;
    CHECK(peers[1].pulled[0].anchor.error().code() == ErrorCode::not_found);
  }
  REQUIRE(peers[1].pulled[0].anchor.ok());
  CHECK(test::same_anchor(*peers[1].pulled[0].anchor, anchor, test::place(1)));
  CHECK(peers[1].pulled[0].record.version > 1);
  const kvmeld::Blob now = *peers[2].store.get(payload);
  CHECK(std::ranges::equal(now.bytes(), blob.bytes()));
}
