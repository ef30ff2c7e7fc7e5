// Peers in threads of their own pull a real anchor's K/V over a real transport, past an owner that
// lies and one that is missing.
#include <atomic>
#include <optional>
#include <thread>

#include <kvmeld/stores/memory.hpp>

#include "support/anchor_peers.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::replica::MemberId;
using kvmeld::stores::MemoryTransport;

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

test::Exchange::Options options(MemberId self, const std::vector<MemberId>& members) {
  test::Exchange::Options out;
  out.self = self;
  out.members = members;
  out.frame.scope = kvmeld::anchors::anchor_namespace(
      kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), kvmeld::anchors::SimHash{});
  out.format.chunk_bytes = 256;
  out.round_ms = 10;
  out.retry_ms = 20;
  out.seed = self;
  return out;
}

/// A member's loop, until `stop`: what a host runs.
template <class Each>
void live(test::Exchange& exchange, MemoryTransport& transport, const std::atomic<bool>& stop,
          std::atomic<int>& errors, const Each& each) {
  while (!stop) {
    if (!exchange.tick(now_ms())) ++errors;
    each();
    for (const kvmeld::replica::Outgoing& out : exchange.take_outbox()) {
      if (!transport.send(out.to, out.bytes)) ++errors;
    }
    const auto got = transport.receive(2);
    if (got && got->has_value()) (void)exchange.receive((*got)->from, (*got)->bytes);
  }
}

/// Answers every request for a blob with bytes that are not the blob's.
void lie(MemoryTransport& transport, const kvmeld::replica::FrameOptions& frame,
         const std::atomic<bool>& stop, std::atomic<int>& lies) {
  while (!stop) {
    const auto got = transport.receive(2);
    if (!got || !got->has_value()) continue;
    const auto view = kvmeld::replica::decode_frame((*got)->bytes, frame);
    if (!view || view->type != static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::fetch))
      continue;
    const auto fetch = kvmeld::replica::messages::decode_fetch(view->body);
    for (const kvmeld::BlobKey& key : fetch->chunks) {
      const auto wrong =
          kvmeld::replica::encode_chunk(std::as_bytes(std::span("not what was asked for")));
      const auto body = kvmeld::replica::messages::encode(
          kvmeld::replica::messages::Piece{fetch->id, key, wrong});
      (void)transport.send(
          (*got)->from,
          *kvmeld::replica::encode_frame(
              static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::piece), body, frame));
      ++lies;
    }
  }
}

}  // namespace

TEST_CASE(
    "an anchor is pulled between threads: wrong bytes are refused, a missing owner is passed over, "
    "the bytes are the writer's") {
  // Members 1 to 5: 1 publishes, 2 pulls, 3 lies, 4 is listed and was never there, 5 stands by. The
  // lier owns the first key, the missing one the second.
  const std::vector<MemberId> members{1, 2, 3, 4, 5};
  std::vector<kvmeld::anchors::Anchor> anchors;
  std::vector<kvmeld::FragmentId> keys;
  for (const MemberId owner : {MemberId{3}, MemberId{4}}) {
    for (std::uint64_t number = 1;; ++number) {
      const kvmeld::anchors::Anchor candidate = test::anchor(number, {2}, 40);
      const auto key = kvmeld::anchors::record_key(candidate.id, test::place(2));
      if (kvmeld::replica::rendezvous_rank(key, members)[0] != owner) continue;
      anchors.push_back(candidate);
      keys.push_back(key);
      break;
    }
  }
  kvmeld::stores::MemoryHub hub;
  MemoryTransport one = *hub.join(1), two = *hub.join(2), three = *hub.join(3), five = *hub.join(5);
  std::atomic<bool> stop{false};
  std::atomic<int> errors{0}, lies{0};
  std::vector<kvmeld::anchors::PulledAnchor> pulled;  // of member 2's thread, read behind its end
  test::Pool pool(kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {});
  std::uint64_t refused = 0, strikes = 0;

  std::thread writer([&] {
    kvmeld::stores::MemoryStore store;
    test::Exchange exchange(store, options(1, members));
    test::Pool mine(kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {});
    for (const kvmeld::anchors::Anchor& a : anchors) {
      if (!mine.commit(a)) ++errors;
    }
    live(exchange, one, stop, errors, [&] {
      if (!kvmeld::anchors::publish_pool(exchange, mine)) ++errors;
    });
  });
  std::thread bystander([&] {
    kvmeld::stores::MemoryStore store;
    test::Exchange exchange(store, options(5, members));
    live(exchange, five, stop, errors, [] {});
  });
  std::thread byzantine([&] { lie(three, options(3, members).frame, stop, lies); });
  std::thread puller([&] {
    kvmeld::stores::MemoryStore store;
    test::Exchange exchange(store, options(2, members));
    std::set<kvmeld::FragmentId> asked;
    const std::int64_t until = now_ms() + 60'000;
    live(exchange, two, stop, errors, [&] {
      for (const kvmeld::FragmentId& key : keys) {
        if (exchange.directory().find(key) == nullptr || !asked.insert(key).second) continue;
        if (!exchange.pull(key)) ++errors;
      }
      for (kvmeld::anchors::PulledAnchor& p : exchange.take_pulled()) {
        if (!kvmeld::anchors::commit_pulled(pool, p)) ++errors;
        pulled.push_back(std::move(p));
      }
      if (pulled.size() == keys.size() || now_ms() > until) stop = true;
    });
    refused = exchange.counters().refused;
    strikes = exchange.counters().strikes;
  });
  for (std::thread* const t : {&writer, &bystander, &byzantine, &puller}) t->join();

  CHECK(errors == 0);
  REQUIRE(pulled.size() == 2);
  for (const kvmeld::anchors::PulledAnchor& p : pulled) {
    REQUIRE(p.anchor.ok());
    const std::size_t which = p.key == keys[0] ? 0 : 1;
    CHECK(p.anchor->base.payloads()[0].byte_count > 256);  // in several chunks
    CHECK(test::same_anchor(*p.anchor, anchors[which], test::place(2)));
  }
  CHECK(lies > 0);
  CHECK(strikes > 0);
  CHECK(refused >= strikes);
  CHECK(pool.size() == 2);
}
