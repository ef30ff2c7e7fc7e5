// Two peers without a server share anchors: what one measured, the other finds and pulls.
//
//   bash examples/run.sh exchange

#include <cstdio>
#include <kvmeld/anchors/exchange.hpp>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/toy.hpp"

using namespace kvmeld;

const Digest128 prompt_so_far{42, 0};

// A text that stood at a place: its base, and what the place did to it.
anchors::Anchor measured(std::uint32_t seed) {
  constexpr std::int64_t tokens = 24;
  const auto ids = toy::ids(static_cast<TokenId>(1000 * seed), tokens);
  const auto at = [&](std::uint32_t of) {
    const HostCache rows = toy::cache(toy::geometry(), tokens, of);
    return toy::value(seal(rows.kv_cache_ref(), {.tokens = ids}));
  };
  const Fragment alone = at(seed);
  auto made = toy::value(anchors::make_anchor(alone, toy::value(anchors::mean_value_row(alone))));
  made.offsets.push_back({.context = prompt_so_far,
                          .segment = toy::value(anchors::measure_offset(at(seed + 100), alone)),
                          .following = {}});
  return made;
}

struct Peer {
  stores::MemoryTransport transport;
  stores::MemoryStore store;
  anchors::AnchorPool<> pool;
  anchors::AnchorExchange exchange;

  Peer(stores::MemoryHub& hub, replica::MemberId self, const anchors::AnchorSpace& space)
      : transport(toy::value(hub.join(self))),
        pool(space, {}),
        exchange(store, options(self, space)) {}
  static anchors::AnchorExchange::Options options(replica::MemberId self,
                                                  const anchors::AnchorSpace& space) {
    anchors::AnchorExchange::Options made;
    made.self = self;
    made.members = {1, 2};
    made.frame.scope = anchors::anchor_namespace(space, anchors::SimHash{});
    return made;
  }
  void turn(std::int64_t now_ms) {  // hear, keep what was pulled, say what is new
    if (const auto heard = toy::value(transport.receive(0)))
      (void)exchange.receive(heard->from, heard->bytes);
    toy::check(exchange.tick(now_ms));
    for (const auto& pulled : exchange.take_pulled()) (void)anchors::commit_pulled(pool, pulled);
    toy::check(anchors::publish_pool(exchange, pool).status());
    for (const auto& out : exchange.take_outbox()) toy::check(transport.send(out.to, out.bytes));
  }
};

int main() {
  const anchors::Anchor anchor = measured(1);
  const auto space = anchors::AnchorSpace::of(anchor.base);
  stores::MemoryHub hub;
  Peer one(hub, 1, space), two(hub, 2, space);
  toy::check(one.pool.commit(anchor).status());
  const auto signature = toy::value(anchors::SimHash{}.sign({anchor.base.tokens(), anchor.vector}));
  std::int64_t now_ms = 0;
  for (; now_ms < 60'000 && two.pool.size() == 0; now_ms += 50) {
    one.turn(now_ms);
    two.turn(now_ms);
    const auto like =
        two.exchange.look_up({.signature = signature, .tokens = 24, .context = prompt_so_far});
    if (like.remote()) (void)two.exchange.pull(anchors::record_key(like.records[0]));
  }
  std::printf("after %lld ms of simulated time the second peer has %zu anchor\n",
              static_cast<long long>(now_ms), two.pool.size());
  return two.pool.size() == 1 ? 0 : 1;
}
