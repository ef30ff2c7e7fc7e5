// The code of docs/anchor_peers.md, compiled and run; the last case checks that the page shows it
// word for word.
#include <cstdint>

#include <kvmeld/anchors/tiers.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/anchor_peers.hpp"
#include "support/page_snippets.hpp"

namespace {

// example-begin: tiers
/// The chosen offsets, where all of them are in host memory; otherwise prefill this time. Never
/// waits.
template <class Tiers>
std::vector<kvmeld::anchors::ContextOffset> offsets_at_hand(
    Tiers& tiers, const kvmeld::anchors::AnchorLookup& found, const kvmeld::Digest128& place) {
  // empty unless all are here; asks for what is in a slower tier
  return tiers.take(found.anchors, place).offsets;
}
/// What moves: a thread of its own, or a call between requests.
template <class Tiers>
void move_all(Tiers& tiers) {
  for (auto step = tiers.step(); step && step->moved;) step = tiers.step();
}
// example-end

// example-begin: exchange
/// One turn of a peer's loop: what came in, what is due, what goes out; anchors that were pulled
/// enter the pool.
template <class Exchange, class Pool, class Transport>
kvmeld::Status take_turn(Exchange& exchange, Pool& pool, Transport& transport,
                         std::int64_t now_ms) {
  auto message = transport.receive(0);
  if (!message) return message.error();
  // a damaged message is counted, and changes no record
  if (*message) (void)exchange.receive((*message)->from, (*message)->bytes);
  KVMELD_TRY(exchange.tick(now_ms));
  for (const kvmeld::anchors::PulledAnchor& pulled : exchange.take_pulled())
    (void)kvmeld::anchors::commit_pulled(pool, pulled);
  // behind the commits: what the pool lacks is let go
  KVMELD_TRY(kvmeld::anchors::publish_pool(exchange, pool).status());
  for (const kvmeld::replica::Outgoing& out : exchange.take_outbox())
    KVMELD_TRY(transport.send(out.to, out.bytes));
  return {};
}
/// Asks for the K/V of what others have like a segment; `take_turn` brings it.
template <class Exchange>
bool ask_others(Exchange& exchange, std::uint64_t signature, std::int64_t tokens,
                const kvmeld::Digest128& place) {
  const kvmeld::anchors::RemoteAnchors like =
      exchange.look_up({.signature = signature, .tokens = tokens, .context = place});
  return like.remote() && exchange.pull(kvmeld::anchors::record_key(like.records[0])).ok();
}
// example-end

}  // namespace

TEST_CASE("offsets are at hand from memory, come back from a store by steps, and are used again") {
  test::Pool pool(kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {});
  const kvmeld::anchors::Anchor first = test::anchor(1, {1}, 40), second = test::anchor(2, {1}, 40);
  kvmeld::stores::MemoryStore tiers_store;
  kvmeld::anchors::AnchorTiers tiers(tiers_store,
                                     {.host_bytes = first.bytes() - 8, .file_bytes = 1 << 20});
  REQUIRE(tiers.commit(pool, first).ok());
  REQUIRE(tiers.commit(pool, second).ok());
  move_all(tiers);
  const auto look_up = [&](const kvmeld::anchors::Anchor& a) {
    return pool.look_up({.gamma = 1}, {.space = &pool.space(),
                                       .signature = {a.base.tokens(), a.vector},
                                       .vector = a.vector,
                                       .context = test::place(1),
                                       .request = {.tokens = 40}});
  };
  for (const kvmeld::anchors::Anchor* a : {&first, &second, &first}) {
    const kvmeld::anchors::AnchorLookup found = look_up(*a);
    REQUIRE(found.decision.reuses());
    std::vector<kvmeld::anchors::ContextOffset> offsets =
        offsets_at_hand(tiers, found, test::place(1));
    if (offsets.empty()) {
      move_all(tiers);
      offsets = offsets_at_hand(tiers, found, test::place(1));
    }
    REQUIRE(offsets.size() == 1);
    REQUIRE(test::same_bytes(offsets[0].segment, a->offsets[0].segment));
  }
}

TEST_CASE("two peers: what one commits the other finds, pulls and commits") {
  kvmeld::stores::MemoryHub hub;
  auto left = *hub.join(1), right = *hub.join(2);
  kvmeld::stores::MemoryStore left_store, right_store;
  const auto options = [](kvmeld::replica::MemberId self) {
    test::Exchange::Options out;
    out.self = self;
    out.members = {1, 2};
    out.frame.scope = kvmeld::anchors::anchor_namespace(
        kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), kvmeld::anchors::SimHash{});
    return out;
  };
  test::Exchange one(left_store, options(1)), two(right_store, options(2));
  test::Pool mine(kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {}),
      theirs(kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {});
  // The writer is the owner by rank: what the other one pulls it holds for its pool alone.
  std::uint64_t number = 1;
  while (one.owner(kvmeld::anchors::record_key(test::anchor(number, {1}, 40).id, test::place(1))) !=
         1)
    ++number;
  const kvmeld::anchors::Anchor anchor = test::anchor(number, {1}, 40);
  const auto key = kvmeld::anchors::record_key(anchor.id, test::place(1));
  REQUIRE(mine.commit(anchor).ok());
  const std::uint64_t signature =
      *kvmeld::anchors::SimHash{}.sign({anchor.base.tokens(), anchor.vector});
  bool asked = false;
  for (std::int64_t now = 0; now < 60'000 && theirs.size() == 0; now += 50) {
    REQUIRE(take_turn(one, mine, left, now).ok());
    REQUIRE(take_turn(two, theirs, right, now).ok());
    asked = asked || ask_others(two, signature, 40, test::place(1));
  }
  REQUIRE(asked);
  REQUIRE(theirs.size() == 1);
  REQUIRE(test::same_bytes(theirs.snapshot()->table.anchor(0)->offsets[0].segment,
                           anchor.offsets[0].segment));
  // And it can serve it from now on.
  for (std::int64_t now = 60'000; now < 61'000; now += 50)
    REQUIRE(take_turn(two, theirs, right, now).ok());
  CHECK(two.holds(key));
  CHECK(kvmeld::anchors::load_anchor(right_store, *two.directory().find(key), two.options().format)
            .ok());
}

TEST_CASE("docs/anchor_peers.md shows this code") {
  test::check_page("docs/anchor_peers.md", {"tests/unit/anchor_peers_docs.cpp"});
}
