#pragma once
// Anchors with numbers of a test's own, and peers that exchange them in simulated time.

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include <kvmeld/anchors/exchange.hpp>
#include <kvmeld/stores/memory.hpp>
#include <kvmeld/testing/world.hpp>

#include "random_cache.hpp"

namespace test {

using Pool = kvmeld::anchors::AnchorPool<kvmeld::anchors::SimHash, kvmeld::anchors::LRU>;
using Exchange = kvmeld::anchors::AnchorExchange;

inline const std::shared_ptr<const kvmeld::Geometry>& anchor_geometry() {
  static const std::shared_ptr<const kvmeld::Geometry> shape =
      geometry({.layers = 2, .heads = 1, .channels = 8});
  return shape;
}
inline kvmeld::Digest128 place(std::uint64_t n) { return {n, 7}; }
inline std::vector<kvmeld::TokenId> words(std::uint64_t n, std::int64_t tokens) {
  std::vector<kvmeld::TokenId> out;
  for (std::int64_t t = 0; t < tokens; ++t)
    out.push_back(static_cast<kvmeld::TokenId>(1000 * n + static_cast<std::uint64_t>(t)));
  return out;
}

/// Anchor n, of tokens of its own, with a Δ for each of some places; its K/V is numbers that depend
/// on n and the place.
inline kvmeld::anchors::Anchor anchor(
    std::uint64_t n, const std::vector<std::uint64_t>& places = {1}, std::int64_t tokens = 3,
    const std::shared_ptr<const kvmeld::Geometry>& shape = anchor_geometry()) {
  const auto ids = words(n, tokens);
  const auto sealed_at = [&](std::uint64_t seed, std::int64_t position) {
    TestCache cache(shape, tokens);
    cache.fill(seed);
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < tokens; ++t) positions.push_back(position + t);
    return *kvmeld::seal(cache.ref(), {.tokens = ids, .positions = positions});
  };
  const kvmeld::Fragment alone = sealed_at(n, 0);
  auto out = *kvmeld::anchors::make_anchor(alone, {static_cast<float>(n), 1});
  for (const std::uint64_t at : places) {
    const auto segment = *kvmeld::anchors::measure_offset(sealed_at(n * 31 + at, 100), alone);
    // Some contexts have text behind the slot, which has a Δ of its own.
    const auto following =
        at % 2 == 0 ? *kvmeld::anchors::measure_offset(sealed_at(n * 37 + at, 200), alone)
                    : kvmeld::Fragment{};
    if (!*kvmeld::anchors::add_offset(out, {place(at), segment, following})) std::abort();
  }
  return out;
}

inline bool same_bytes(const kvmeld::Fragment& a, const kvmeld::Fragment& b) {
  if (a.valid() != b.valid()) return false;
  if (!a.valid()) return true;
  const kvmeld::Payload &x = a.payloads()[0], &y = b.payloads()[0];
  return a.id() == b.id() && a.geometry() == b.geometry() &&
         std::ranges::equal(a.tokens(), b.tokens()) && a.token_count() == b.token_count() &&
         x.positions == y.positions && x.token_sets == y.token_sets && x.layer_set == y.layer_set &&
         x.plane_offsets == y.plane_offsets && x.byte_count == y.byte_count && x.bytes != nullptr &&
         std::memcmp(x.bytes.get(), y.bytes.get(), x.byte_count) == 0;
}
/// Whether an anchor that arrived is the one that was published, with the Δ of one place.
inline bool same_anchor(const kvmeld::anchors::Anchor& got,
                        const kvmeld::anchors::Anchor& published,
                        const kvmeld::Digest128& context) {
  if (got.id != published.id || got.vector != published.vector ||
      got.embedding != published.embedding || got.approximate != published.approximate)
    return false;
  if (!same_bytes(got.base, published.base)) return false;
  if (context == kvmeld::Digest128{}) return got.offsets.empty();
  const kvmeld::anchors::ContextOffset* const one = got.find(context);
  const kvmeld::anchors::ContextOffset* const other = published.find(context);
  return got.offsets.size() == 1 && one != nullptr && other != nullptr &&
         same_bytes(one->segment, other->segment) && same_bytes(one->following, other->following);
}

/// Peers, their pools and disks, on a simulated network.
class Peers {
 public:
  struct Peer {
    kvmeld::stores::MemoryStore store;
    std::unique_ptr<Pool> pool;
    std::unique_ptr<Exchange> exchange;
    std::vector<kvmeld::anchors::PulledAnchor> pulled;
    std::uint64_t messages = 0;  // of earlier lives
  };

  Peers(std::size_t n, std::uint64_t seed) : network(seed, faults), random_(seed) {
    for (std::size_t i = 0; i < n; ++i) members.push_back(i + 1);
    peers.resize(n);
    for (std::size_t i = 0; i < n; ++i) start(i, true, true);
  }

  void start(std::size_t i, bool new_pool, bool new_store) {
    Peer& peer = peers[i];
    if (new_pool)
      peer.pool = std::make_unique<Pool>(kvmeld::anchors::AnchorSpace::of(*anchor_geometry()),
                                         kvmeld::anchors::AnchorCapacity{});
    if (new_store) peer.store = kvmeld::stores::MemoryStore();
    if (peer.exchange) peer.messages += peer.exchange->counters().messages();
    Exchange::Options options;
    options.self = members[i];
    options.members = members;
    options.frame.scope = kvmeld::anchors::anchor_namespace(
        kvmeld::anchors::AnchorSpace::of(*anchor_geometry()), kvmeld::anchors::SimHash{});
    options.format.chunk_bytes = 64;
    options.round_ms = 100;
    options.retry_ms = 60;
    options.max_retry_ms = 1000;
    options.seed = random_.next();
    peer.exchange = std::make_unique<Exchange>(peer.store, options);
  }
  /// What everybody did, in the order in which it was done: equal for equal seeds.
  [[nodiscard]] kvmeld::Digest128 fingerprint() const { return trace_.digest(); }

  void step(std::int64_t ms = 10) {
    now += ms;
    while (const auto delivery = network.receive(now)) {
      Peer& to = peers[delivery->to - 1];
      trace_.value(delivery->from);
      trace_.value(delivery->to);
      trace_.bytes(delivery->bytes);
      const kvmeld::anchors::AnchorDirectory before = to.exchange->directory();
      const kvmeld::Status status = to.exchange->receive(delivery->from, delivery->bytes);
      if (!status) ++refused;
      if (!status && !(to.exchange->directory() == before)) broken = true;
      send(to);
    }
    for (Peer& peer : peers) {
      if (!peer.exchange->tick(now)) broken = true;
      send(peer);
      for (kvmeld::anchors::PulledAnchor& pulled : peer.exchange->take_pulled())
        peer.pulled.push_back(std::move(pulled));
    }
  }
  [[nodiscard]] bool agree() const {
    return std::all_of(peers.begin(), peers.end(), [&](const Peer& peer) {
      return peer.exchange->directory().digest() == peers[0].exchange->directory().digest();
    });
  }
  [[nodiscard]] std::uint64_t messages(std::size_t i) const {
    return peers[i].messages + peers[i].exchange->counters().messages();
  }
  [[nodiscard]] std::uint64_t most_messages() const {
    std::uint64_t most = 0;
    for (std::size_t i = 0; i < peers.size(); ++i) most = (std::max)(most, messages(i));
    return most;
  }

  kvmeld::testing::FaultCounts faults;
  kvmeld::testing::SimulatedNetwork network;
  std::vector<kvmeld::replica::MemberId> members;
  std::deque<Peer> peers;
  std::int64_t now = 0;
  std::uint64_t refused = 0;
  bool broken = false;  // an error changed a directory, or a tick failed

 private:
  void send(Peer& peer) {
    for (const kvmeld::replica::Outgoing& out : peer.exchange->take_outbox())
      network.send(now, peer.exchange->options().self, out.to, out.bytes);
  }

  kvmeld::testing::Random random_;
  kvmeld::Hasher trace_;
};

}  // namespace test
