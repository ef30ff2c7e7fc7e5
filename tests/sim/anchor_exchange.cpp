// Peers end with one directory of anchors, whatever the network did, and tell each other news in
// messages that grow with log n.
#include <cmath>
#include <cstdio>

#include "support/anchor_peers.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::FragmentId;
using test::Peers;

kvmeld::testing::Faults bad_network() {
  auto faults = kvmeld::testing::Faults::none();
  faults.drop = 0.1;
  faults.duplicate = 0.1;
  faults.reorder = 0.3;
  faults.delay = 0.02;
  faults.truncate = 0.02;
  faults.bit_flip = 0.02;
  return faults;
}

struct Outcome {
  kvmeld::Digest128 fingerprint{};
  std::size_t records = 0;
};

/// Peers that commit, evict, fall apart, restart and pull for some seconds; then faults end, and
/// everything must be right.
Outcome run(std::size_t n, std::uint64_t seed) {
  Peers net(n, seed);
  net.network.faults = bad_network();
  kvmeld::testing::Random random(seed + 1);
  std::map<FragmentId, kvmeld::anchors::Anchor> made;  // by key: what was ever committed
  std::map<FragmentId, kvmeld::Digest128> context;
  const auto commit = [&](std::size_t i, std::uint64_t number) {
    const std::vector<std::uint64_t> places = number % 5 == 0
                                                  ? std::vector<std::uint64_t>{}
                                                  : std::vector<std::uint64_t>{number % 3 + 1, 9};
    const kvmeld::anchors::Anchor a = test::anchor(number, places);
    REQUIRE(net.peers[i].pool->commit(a).ok());
    const auto note = [&](const kvmeld::Digest128& at) {
      made[kvmeld::anchors::record_key(a.id, at)] = a,
                                             context[kvmeld::anchors::record_key(a.id, at)] = at;
    };
    if (places.empty()) note({});
    for (const auto& offset : a.offsets) note(offset.context);
  };
  const auto in_some_pool = [&](const FragmentId& key) {
    return std::any_of(net.peers.begin(), net.peers.end(), [&](const Peers::Peer& peer) {
      const auto now = peer.pool->snapshot();
      for (std::size_t a = 0; a < now->table.size(); ++a) {
        if (now->table.anchor(a)->id == made.at(key).id) return true;
      }
      return false;
    });
  };
  std::size_t restarts = 0, cuts = 0;
  for (int step = 0; step < 600; ++step) {  // 6 s
    const std::size_t i = random.below(n);
    // Numbers repeat, so that some anchors are committed by several peers at once.
    if (step < 400 && random.chance(0.25)) commit(i, 1 + random.below(3 * n));
    if (random.chance(0.04) && net.peers[i].pool->size() > 0)
      net.peers[i].pool->erase(net.peers[i].pool->snapshot()->table.anchor(0)->id);
    if (random.chance(0.2))
      REQUIRE(kvmeld::anchors::publish_pool(*net.peers[i].exchange, *net.peers[i].pool).ok());
    if (random.chance(0.02)) {
      ++restarts;
      net.start(i, random.chance(0.5), random.chance(0.5));
    }
    if (step == 150 || step == 350) {
      ++cuts;
      for (const kvmeld::replica::MemberId member : net.members)
        net.network.set_side(member, random.chance(0.5));
    }
    if (step == 250 || step == 450) net.network.heal();
    if (random.chance(0.1) && net.peers[i].exchange->directory().size() > 0) {
      auto at = net.peers[i].exchange->directory().entries().begin();
      std::advance(at, static_cast<std::ptrdiff_t>(
                           random.below(net.peers[i].exchange->directory().entries().size())));
      if (!at->second.record.removed) REQUIRE(net.peers[i].exchange->pull(at->first).ok());
    }
    net.step();
  }
  net.network.faults = kvmeld::testing::Faults::none();
  for (int round = 0; round < 6; ++round) {
    for (Peers::Peer& peer : net.peers)
      REQUIRE(kvmeld::anchors::publish_pool(*peer.exchange, *peer.pool).ok());
    for (int step = 0; step < 200; ++step) net.step();
  }
  INFO("seed " << seed);
  CHECK_FALSE(net.broken);
  CHECK(restarts > 0);
  if (n > 4) CHECK(net.network.cut_off() > 0);  // a few peers may end up on one side
  CHECK(net.refused > 0);
  std::uint64_t sessions = 0, adopted = 0;
  for (const Peers::Peer& peer : net.peers)
    sessions += peer.exchange->counters().sessions, adopted += peer.exchange->counters().adopted;
  if (n > 16) CHECK(sessions > 0);
  if (n > 8) CHECK(adopted > 0);
  REQUIRE(net.agree());
  const kvmeld::anchors::AnchorDirectory& directory = net.peers[0].exchange->directory();
  for (const auto& [key, entry] : directory.entries()) CHECK(made.count(key) == 1);
  for (const auto& [key, a] : made) {
    const kvmeld::anchors::AnchorRecord* const record = directory.find(key);
    CHECK((record != nullptr || !in_some_pool(key)));
    if (record == nullptr) continue;
    CHECK(net.peers[record->owner - 1].exchange->holds(key));
    CHECK(record->tokens == a.base.token_count());
    CHECK(record->signature == *kvmeld::anchors::SimHash{}.sign({a.base.tokens(), {}}));
  }
  // What came over is what was committed, byte for byte.
  std::size_t pulled = 0;
  for (Peers::Peer& peer : net.peers) {
    for (const kvmeld::anchors::PulledAnchor& p : peer.pulled) {
      if (!p.anchor) {
        CHECK((p.anchor.error().code() == ErrorCode::not_found ||
               p.anchor.error().code() == ErrorCode::unavailable));
        continue;
      }
      ++pulled;
      CHECK(test::same_anchor(*p.anchor, made.at(p.key), context.at(p.key)));
    }
  }
  CHECK(pulled > 0);
  // On a network that works everything that the directory names can be had by anybody.
  for (const auto& [key, a] : made) {
    if (directory.find(key) == nullptr) continue;
    Peers::Peer& peer = net.peers[random.below(n)];
    peer.pulled.clear();
    REQUIRE(peer.exchange->pull(key).ok());
    for (int step = 0; step < 60 && peer.pulled.empty(); ++step) net.step();
    REQUIRE(peer.pulled.size() == 1);
    INFO(peer.pulled[0].anchor.status().message());
    REQUIRE(peer.pulled[0].anchor.ok());
    CHECK(test::same_anchor(*peer.pulled[0].anchor, a, context.at(key)));
  }
  return {net.fingerprint(), directory.size()};
}

}  // namespace

TEST_CASE(
    "32 peers end with one directory through loss, repetition, reordering, damage, partitions and "
    "restarts") {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const Outcome outcome = run(32, seed);
    CHECK(outcome.records > 20);
    std::printf("seed %llu: %zu records everywhere\n", static_cast<unsigned long long>(seed),
                outcome.records);
  }
}

TEST_CASE("a seed determines a run") {
  const Outcome once = run(9, 7), again = run(9, 7);
  CHECK(once.fingerprint == again.fingerprint);
  CHECK(once.records == again.records);
  CHECK(once.fingerprint != run(9, 8).fingerprint);
}

TEST_CASE("what a peer sends until all know all grows with log n") {
  struct Row {
    std::size_t n = 0;
    std::uint64_t calm = 0, lossy = 0;
  };
  std::vector<Row> rows;
  std::printf(
      "peers  messages a peer, most (every peer publishes one anchor; until all directories "
      "agree)\n");
  for (const std::size_t n : {8U, 16U, 32U, 64U}) {
    Row row{n};
    for (const bool lossy : {false, true}) {
      std::uint64_t sum = 0, worst = 0;
      for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        Peers net(n, seed);
        if (lossy) net.network.faults = bad_network();
        for (std::size_t i = 0; i < n; ++i) {
          REQUIRE(net.peers[i].pool->commit(test::anchor(i + 1)).ok());
          REQUIRE(kvmeld::anchors::publish_pool(*net.peers[i].exchange, *net.peers[i].pool).ok());
        }
        int steps = 0;
        const auto done = [&] {
          return net.agree() && net.peers[0].exchange->directory().size() == n;
        };
        for (; steps < 6000 && !done(); ++steps) net.step();
        REQUIRE(done());
        worst = (std::max)(worst, net.most_messages());
        for (std::size_t i = 0; i < n; ++i) sum += net.messages(i);
      }
      (lossy ? row.lossy : row.calm) = worst;
      std::printf("%5zu  %s: most %llu, mean %.1f; everybody to everybody: %zu\n", n,
                  lossy ? "bad network" : "calm       ", static_cast<unsigned long long>(worst),
                  static_cast<double>(sum) / static_cast<double>(3 * n), n - 1);
    }
    rows.push_back(row);
  }
  for (const Row& row : rows) {
    const double log = std::log2(static_cast<double>(row.n));
    CHECK(static_cast<double>(row.calm) <= log + 1);
    CHECK(static_cast<double>(row.lossy) <= 3 * log + 3);
    // Everybody to everybody would be n - 1, on a network that loses nothing.
    CHECK(row.calm < row.n - 1);
    if (row.n >= 16) CHECK(row.lossy < row.n - 1);
  }
  // 8 times the peers: log n doubles.
  CHECK(rows.back().calm <= 2 * rows.front().calm + 4);
  CHECK(rows.back().lossy <= 4 * rows.front().lossy);
}

namespace {

/// Steps until a peer has one more answer to a pull, which is given.
kvmeld::anchors::PulledAnchor pulled(Peers& net, std::size_t by, const FragmentId& key) {
  const std::size_t before = net.peers[by].pulled.size();
  REQUIRE(net.peers[by].exchange->pull(key).ok());
  for (int step = 0; step < 2000 && net.peers[by].pulled.size() == before; ++step) net.step();
  REQUIRE(net.peers[by].pulled.size() == before + 1);
  return net.peers[by].pulled.back();
}
void settle(Peers& net, int steps = 300) {
  for (int step = 0; step < steps; ++step) net.step();
  REQUIRE(net.agree());
}
std::uint64_t pieces(const Peers& net, std::size_t i) {
  return net.peers[i].exchange->counters().sent[static_cast<std::size_t>(
      kvmeld::anchors::AnchorMessage::piece)];
}

/// An anchor that peer 0 publishes and that belongs to another; `rank` are peers as the key is
/// drawn to them, peer 0 left out.
struct Published {
  kvmeld::anchors::Anchor anchor;
  FragmentId key;
  std::vector<std::size_t> rank;
};
Published published(Peers& net) {
  for (std::uint64_t number = 1;; ++number) {
    Published out{test::anchor(number, {2}), {}, {}};
    out.key = kvmeld::anchors::record_key(out.anchor.id, test::place(2));
    const auto rank = kvmeld::replica::rendezvous_rank(out.key, net.members);
    if (std::find(rank.begin(), rank.begin() + 4, net.members[0]) != rank.begin() + 4) continue;
    for (const kvmeld::replica::MemberId member : rank) out.rank.push_back(member - 1);
    std::erase(out.rank, std::size_t{0});
    REQUIRE(net.peers[0].pool->commit(out.anchor).ok());
    REQUIRE(*kvmeld::anchors::publish_pool(*net.peers[0].exchange, *net.peers[0].pool) == 1);
    REQUIRE(*kvmeld::anchors::publish_pool(*net.peers[0].exchange, *net.peers[0].pool) == 0);
    settle(net);
    return out;
  }
}

}  // namespace

TEST_CASE(
    "the owner by rank is asked first, takes over what it is asked for, and serves the next one") {
  Peers net(8, 1);
  const Published p = published(net);
  const std::size_t owner = p.rank[0], a = p.rank[5], b = p.rank[6];
  kvmeld::anchors::DirectoryQuery query;
  query.signature = *kvmeld::anchors::SimHash{}.sign({p.anchor.base.tokens(), {}});
  query.tokens = 3;
  query.context = test::place(2);
  const kvmeld::anchors::RemoteAnchors hit = net.peers[a].exchange->look_up(query);
  REQUIRE(hit.remote());
  REQUIRE(hit.records.size() == 1);
  CHECK(hit.records[0].owner == net.members[0]);
  CHECK(hit.records[0].bytes == p.anchor.bytes() - p.anchor.vector.size() * sizeof(float));
  CHECK(net.peers[a].store.blob_count() == 0);  // metadata only
  const auto first = pulled(net, a, p.key);
  REQUIRE(first.anchor.ok());
  CHECK(test::same_anchor(*first.anchor, p.anchor, test::place(2)));
  CHECK(*kvmeld::anchors::commit_pulled(*net.peers[a].pool, first) ==
        kvmeld::anchors::CommitResult::inserted);
  CHECK(net.peers[a].pool->snapshot()->table.anchor(0)->find(test::place(2)) != nullptr);
  settle(net);
  CHECK(net.peers[owner].exchange->holds(p.key));
  for (const Peers::Peer& peer : net.peers) {
    REQUIRE(peer.exchange->directory().find(p.key) != nullptr);
    CHECK(peer.exchange->directory().find(p.key)->owner == net.members[owner]);
  }
  const std::uint64_t of_writer = pieces(net, 0), of_owner = pieces(net, owner);
  CHECK(of_writer > 0);
  REQUIRE(pulled(net, b, p.key).anchor.ok());
  CHECK(pieces(net, 0) == of_writer);
  CHECK(pieces(net, owner) > of_owner);
  // The writer's eviction ends nothing now, the owner's does.
  REQUIRE(net.peers[0].pool->erase(p.anchor.id));
  REQUIRE(kvmeld::anchors::publish_pool(*net.peers[0].exchange, *net.peers[0].pool).ok());
  CHECK(net.peers[0].store.blob_count() == 0);
  settle(net);
  REQUIRE(net.peers[a].exchange->directory().find(p.key) != nullptr);
  REQUIRE(net.peers[owner].exchange->withdraw(p.key).ok());
  CHECK(net.peers[owner].store.blob_count() == 0);
  settle(net);
  for (const Peers::Peer& peer : net.peers) {
    CHECK(peer.exchange->directory().find(p.key) == nullptr);
    CHECK(peer.exchange->directory().tombstones() == 1);
  }
  CHECK(net.peers[b].exchange->pull(p.key).code() == ErrorCode::not_found);
  // Whose pool still has it tells of it again, over the tombstone.
  CHECK(*kvmeld::anchors::publish_pool(*net.peers[a].exchange, *net.peers[a].pool) == 1);
  settle(net);
  CHECK(net.peers[b].exchange->directory().find(p.key)->owner == net.members[a]);
}

TEST_CASE(
    "where the owner is missing the next by rank is asked; where nobody answers, or nobody has it, "
    "the pull says so") {
  Peers net(8, 2);
  const Published p = published(net);
  const std::size_t owner = p.rank[0], second = p.rank[1], a = p.rank[6];
  net.network.set_side(net.members[owner], true);   // does not hear, does not answer
  REQUIRE(pulled(net, second, p.key).anchor.ok());  // from the writer
  net.network.set_side(net.members[0], true);
  const auto got = pulled(net, a, p.key);
  REQUIRE(got.anchor.ok());
  CHECK(test::same_anchor(*got.anchor, p.anchor, test::place(2)));
  CHECK(pieces(net, second) > 0);
  const std::size_t b = p.rank[5];
  for (const kvmeld::replica::MemberId member : net.members)
    net.network.set_side(member, member != net.members[b]);
  CHECK(pulled(net, b, p.key).anchor.error().code() == ErrorCode::unavailable);
  // Those that had it are gone, and everybody knows who lives.
  net.network.heal();
  std::vector<kvmeld::replica::MemberId> left;
  for (const kvmeld::replica::MemberId member : net.members) {
    if (member != net.members[0] && member != net.members[second] && member != net.members[a])
      left.push_back(member);
  }
  for (const std::size_t gone : {std::size_t{0}, second, a})
    net.network.set_side(net.members[gone], true);
  for (Peers::Peer& peer : net.peers) peer.exchange->set_members(left);
  CHECK(pulled(net, b, p.key).anchor.error().code() == ErrorCode::not_found);
  for (int step = 0; step < 300; ++step) net.step();
  // removed for all
  for (const kvmeld::replica::MemberId member : left)
    CHECK(net.peers[member - 1].exchange->directory().find(p.key) == nullptr);
}

TEST_CASE("a damaged blob is refused, its sender is struck, and the next one is asked") {
  Peers net(8, 3);
  const Published p = published(net);
  const std::size_t a = p.rank[2];
  kvmeld::stores::MemoryStore& store = net.peers[a].store;
  REQUIRE(net.peers[a].exchange->pull(p.key).ok());
  // By hand from here: the first that is asked sends every blob with one bit wrong.
  const auto deliver = [&](std::size_t from, std::size_t to, const kvmeld::replica::Outgoing& out,
                           bool damage) {
    std::vector<std::byte> bytes = out.bytes;
    const auto& frame = net.peers[to].exchange->options().frame;
    if (damage) {
      const auto view = kvmeld::replica::decode_frame(bytes, frame);
      std::vector<std::byte> body(view->body.begin(), view->body.end());
      body.back() ^= std::byte{4};
      bytes = *kvmeld::replica::encode_frame(view->type, body, frame);
    }
    return net.peers[to].exchange->receive(net.members[from], bytes);
  };
  const auto asked = [&] {
    const auto out = net.peers[a].exchange->take_outbox();
    REQUIRE(out.size() == 1);
    CHECK(out[0].type == static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::fetch));
    return out[0];
  };
  kvmeld::replica::Outgoing fetch = asked();
  CHECK(fetch.to == net.members[p.rank[0]]);
  REQUIRE(net.peers[p.rank[0]].exchange->pull(p.key).ok());  // the owner gets it, and then lies
  for (int step = 0; step < 100; ++step) {
    for (std::size_t i : {p.rank[0], std::size_t{0}}) {
      for (const auto& out : net.peers[i].exchange->take_outbox()) {
        if (out.to == net.members[i == 0 ? p.rank[0] : 0])
          REQUIRE(deliver(i, i == 0 ? p.rank[0] : 0, out, false).ok());
      }
    }
  }
  REQUIRE(net.peers[p.rank[0]].exchange->holds(p.key));
  REQUIRE(deliver(a, p.rank[0], fetch, false).ok());
  int lies = 0;
  for (const auto& out : net.peers[p.rank[0]].exchange->take_outbox()) {
    if (out.to != net.members[a] ||
        out.type != static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::piece))
      continue;
    CHECK(deliver(p.rank[0], a, out, true).code() == ErrorCode::id_mismatch);
    ++lies;
  }
  CHECK(lies == 1);
  CHECK(store.blob_count() == 0);
  CHECK(net.peers[a].exchange->counters().strikes == 1);
  for (int rounds = 0; rounds < 20 && net.peers[a].exchange->pulling() > 0; ++rounds) {
    fetch = asked();
    CHECK(fetch.to == net.members[0]);  // the writer
    REQUIRE(deliver(a, 0, fetch, false).ok());
    for (const auto& out : net.peers[0].exchange->take_outbox()) {
      if (out.to == net.members[a]) REQUIRE(deliver(0, a, out, false).ok());
    }
  }
  const auto done = net.peers[a].exchange->take_pulled();
  REQUIRE(done.size() == 1);
  REQUIRE(done[0].anchor.ok());
  CHECK(test::same_anchor(*done[0].anchor, p.anchor, test::place(2)));
}

TEST_CASE("tombstones are bounded by number and age, and errors leave an exchange as it was") {
  kvmeld::stores::MemoryStore store;
  test::Exchange::Options options;
  options.self = 1;
  options.members = {1, 2};
  options.max_tombstones = 4;
  options.tombstone_ms = 10'000;
  options.format.chunk_bytes = 64;
  test::Exchange exchange(store, options);
  std::vector<FragmentId> keys;
  for (std::uint64_t n = 1; n <= 10; ++n) {
    const auto record = exchange.publish(test::anchor(n), test::place(1), n);
    REQUIRE(record.ok());
    CHECK(record->version == 1);
    keys.push_back(kvmeld::anchors::record_key(*record));
  }
  for (const FragmentId& key : keys) REQUIRE(exchange.withdraw(key).ok());
  CHECK(store.used_bytes() == 0);
  REQUIRE(exchange.tick(1).ok());
  CHECK(exchange.directory().size() == 0);
  CHECK(exchange.directory().tombstones() == 4);
  for (std::int64_t now = 1000; now <= 12'000; now += 1000) REQUIRE(exchange.tick(now).ok());
  CHECK(exchange.directory().tombstones() == 0);
  CHECK(exchange.directory().digest() == kvmeld::Digest256{});

  const kvmeld::anchors::Anchor whole = test::anchor(11, {1, 2});
  // no such Δ
  CHECK(exchange.publish(whole, test::place(3), 1).error().code() == ErrorCode::not_found);
  kvmeld::stores::MemoryStore small(100);
  test::Exchange other(small, options);
  CHECK(other.publish(whole, test::place(1), 1).error().code() == ErrorCode::store_full);
  CHECK(other.directory().size() == 0);
  CHECK(other.held().empty());
  options.max_records = 1;
  test::Exchange full(store, options);
  REQUIRE(full.publish(whole, test::place(1), 1).ok());
  const std::size_t blobs = store.blob_count();
  CHECK(full.publish(whole, test::place(2), 1).error().code() == ErrorCode::quota_exceeded);
  CHECK(full.directory().size() == 1);
  CHECK(store.blob_count() == blobs);  // the base, which both would need, stays
  const kvmeld::anchors::AnchorRecord record =
      *full.directory().find(kvmeld::anchors::record_key(whole.id, test::place(1)));
  const auto again = kvmeld::anchors::load_anchor(store, record, options.format);
  REQUIRE(again.ok());
  CHECK(test::same_anchor(*again, whole, test::place(1)));
}

TEST_CASE(
    "a tombstone lives as long as was said, whenever between two ticks it came, and not much "
    "longer") {
  // At rest, busy, and in ticks that are as far apart as a clock may jump: withdrawn by itself, and
  // heard of.
  for (const std::int64_t step : {1, 250, 1000, 3000}) {
    for (const std::int64_t after : {0, 1, 500, 999}) {
      CAPTURE(step, after);
      kvmeld::stores::MemoryStore store, far;
      test::Exchange::Options options;
      options.self = 1;
      options.members = {1, 2};
      options.tombstone_ms = 5000;
      options.max_retry_ms = 3000;
      options.format.chunk_bytes = 64;
      test::Exchange exchange(store, options);
      options.self = 2;
      test::Exchange other(far, options);
      const FragmentId key =
          kvmeld::anchors::record_key(*exchange.publish(test::anchor(1), test::place(1), 1));
      REQUIRE(exchange.tick(0).ok());
      REQUIRE(other.tick(0).ok());
      // Withdrawn `after` thousandths of a step behind a tick.
      std::int64_t tick = 10 * step;
      for (std::int64_t now = step; now <= tick; now += step) {
        REQUIRE(exchange.tick(now).ok());
        REQUIRE(other.tick(now).ok());
      }
      const std::int64_t withdrawn = tick + after * step / 1000;
      REQUIRE(exchange.withdraw(key).ok());
      const kvmeld::anchors::AnchorRecord tombstone = *exchange.directory().newest(key);
      const auto body =
          kvmeld::anchors::encode_records(options.frame.scope, std::span(&tombstone, 1));
      const auto message = kvmeld::replica::encode_frame(
          static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::records), body, options.frame);
      REQUIRE(other.receive(1, *message).ok());
      for (const auto* peer : {&exchange, &other}) REQUIRE(peer->directory().tombstones() == 1);
      for (tick += step; tick - withdrawn < 5000; tick += step) {
        REQUIRE(exchange.tick(tick).ok());
        REQUIRE(other.tick(tick).ok());
        CAPTURE(tick - withdrawn);
        CHECK(exchange.directory().tombstones() == 1);
        CHECK(other.directory().tombstones() == 1);
      }
      for (; tick - withdrawn <= 5000 + 2 * step; tick += step) {
        REQUIRE(exchange.tick(tick).ok());
        REQUIRE(other.tick(tick).ok());
      }
      CHECK(exchange.directory().tombstones() == 0);
      CHECK(other.directory().tombstones() == 0);
    }
  }
}

TEST_CASE(
    "approximate anchors say so in their record, give way to exact ones, and answer no exact "
    "look-up") {
  Peers net(3, 4);
  kvmeld::anchors::Anchor blended = test::anchor(1);
  blended.approximate = true;
  REQUIRE(net.peers[0].pool->commit(blended).ok());
  REQUIRE(kvmeld::anchors::publish_pool(*net.peers[0].exchange, *net.peers[0].pool).ok());
  settle(net);
  const FragmentId key = kvmeld::anchors::record_key(blended.id, test::place(1));
  const auto& there = net.peers[2].exchange->directory();
  REQUIRE(there.find(key) != nullptr);
  CHECK(there.find(key)->approximate);
  CHECK(there.find_exact(blended.base.tokens(), test::place(1)) == nullptr);
  const auto got = pulled(net, 2, key);
  REQUIRE(got.anchor.ok());
  CHECK(got.anchor->approximate);
  REQUIRE(kvmeld::anchors::commit_pulled(*net.peers[2].pool, got).ok());
  CHECK(net.peers[2].pool->find_exact({blended.base.tokens(), {}}, test::place(1)) == nullptr);
  REQUIRE(net.peers[1].pool->commit(test::anchor(1)).ok());
  CHECK(*kvmeld::anchors::publish_pool(*net.peers[1].exchange, *net.peers[1].pool) == 1);
  settle(net);
  REQUIRE(there.find_exact(blended.base.tokens(), test::place(1)) != nullptr);
  CHECK(there.find_exact(blended.base.tokens(), test::place(1))->owner == net.members[1]);
}

namespace {

/// A store that can be out of reach for those who read, or full for those who write.
struct Moody final : kvmeld::replica::BlobStore {
  kvmeld::stores::MemoryStore inner{};
  bool away = false;
  bool full = false;

  static kvmeld::Status gone() { return kvmeld::Status(ErrorCode::unavailable, "out of reach"); }
  kvmeld::Result<bool> put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) override {
    if (full) return kvmeld::Status(ErrorCode::store_full, "full");
    return inner.put(key, bytes);
  }
  kvmeld::Result<kvmeld::Blob> get(const kvmeld::BlobKey& key) override {
    if (away) return gone();
    return inner.get(key);
  }
  kvmeld::Result<bool> contains(const kvmeld::BlobKey& key) override {
    if (away) return gone();
    return inner.contains(key);
  }
  kvmeld::Status erase(const kvmeld::BlobKey& key) override { return inner.erase(key); }
  kvmeld::Status add_record(std::span<const std::byte> bytes) override {
    return inner.add_record(bytes);
  }
  kvmeld::Result<kvmeld::replica::RecordBatch> records(std::uint64_t cursor) override {
    return inner.records(cursor);
  }
  kvmeld::Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    return inner.replace_records(cursor, bytes);
  }
};

/// Member 1, whose store has moods, and member 2, by hand.
struct Two {
  Moody store;
  kvmeld::stores::MemoryStore theirs;
  kvmeld::anchors::AnchorExchange one;
  test::Exchange two;
  std::int64_t now = 0;

  template <class Exchange>
  static typename Exchange::Options options(kvmeld::replica::MemberId self) {
    typename Exchange::Options out;
    out.self = self;
    out.members = {1, 2};
    out.format.chunk_bytes = 64;
    out.round_ms = 100;
    out.retry_ms = 60;
    return out;
  }
  Two()
      : one(store, options<kvmeld::anchors::AnchorExchange>(1)),
        two(theirs, options<test::Exchange>(2)) {}

  void to_two() {
    for (const auto& out : one.take_outbox()) (void)two.receive(1, out.bytes);
  }
  void to_one() {
    for (const auto& out : two.take_outbox()) (void)one.receive(2, out.bytes);
  }
  void run(std::int64_t ms) {
    for (const std::int64_t end = now + ms; now < end; now += 10) {
      (void)one.tick(now);
      (void)two.tick(now);
      to_two();
      to_one();
    }
  }
  kvmeld::Status tell_one(std::vector<kvmeld::anchors::AnchorRecord> records) {
    const auto body = kvmeld::anchors::encode_records(one.options().frame.scope, records);
    return one.receive(2, *kvmeld::replica::encode_frame(
                              static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::records),
                              body, one.options().frame));
  }
  /// The list of what member 2 published, sent on request and not yet delivered.
  std::vector<kvmeld::replica::Outgoing> list_on_the_way(const FragmentId& key) {
    run(300);
    REQUIRE(one.directory().find(key) != nullptr);
    REQUIRE(one.pull(key).ok());
    to_two();
    auto out = two.take_outbox();
    REQUIRE(out.size() == 1);
    REQUIRE(out[0].type == static_cast<std::uint8_t>(kvmeld::anchors::AnchorMessage::piece));
    return out;
  }
};

}  // namespace

TEST_CASE(
    "a pulled anchor that the pool cannot have yet is not withdrawn, whichever is done first") {
  for (const bool publish_first : {true, false}) {
    Two net;
    test::Pool pool(kvmeld::anchors::AnchorSpace::of(*test::anchor_geometry()), {});
    std::uint64_t number = 1;
    while (net.one.owner(kvmeld::anchors::record_key(test::anchor(number).id, test::place(1))) != 2)
      ++number;
    const kvmeld::anchors::Anchor a = test::anchor(number);
    const FragmentId key = kvmeld::anchors::record_key(a.id, test::place(1));
    REQUIRE(net.two.publish(a, test::place(1), 1).ok());
    net.run(300);
    REQUIRE(net.one.pull(key).ok());
    net.run(300);
    if (publish_first) REQUIRE(*kvmeld::anchors::publish_pool(net.one, pool) == 0);
    const auto done = net.one.take_pulled();
    REQUIRE(done.size() == 1);
    REQUIRE(kvmeld::anchors::commit_pulled(pool, done[0]).ok());
    REQUIRE(*kvmeld::anchors::publish_pool(net.one, pool) == 0);
    CHECK(net.one.holds(key));
    CHECK(kvmeld::anchors::load_anchor(net.store, *net.one.directory().find(key),
                                       net.one.options().format)
              .ok());
    REQUIRE(pool.erase(a.id));
    REQUIRE(*kvmeld::anchors::publish_pool(net.one, pool) == 0);
    CHECK_FALSE(net.one.holds(key));
    CHECK(net.store.inner.blob_count() == 0);
  }
}

TEST_CASE(
    "a pull whose record changes ends with a result, through a store that was out of reach as "
    "well") {
  Two net;
  kvmeld::anchors::Anchor blended = test::anchor(1, {1}, 9);
  blended.approximate = true;
  const kvmeld::anchors::Anchor exact = test::anchor(1, {1}, 9);
  const FragmentId key = kvmeld::anchors::record_key(exact.id, test::place(1));
  REQUIRE(net.two.publish(blended, test::place(1), 1).ok());
  const auto list = net.list_on_the_way(key);
  REQUIRE(net.two.publish(exact, test::place(1), 1).ok());
  REQUIRE(net.tell_one({*net.two.directory().find(key)}).ok());
  net.store.away = true;
  CHECK(net.one.receive(2, list[0].bytes).code() == ErrorCode::unavailable);
  CHECK(net.one.pulling() == 1);
  net.run(100);
  CHECK(net.one.pulling() == 1);
  CHECK(net.one.counters().refused == 0);  // nobody else's fault
  net.store.away = false;
  net.run(2000);
  const auto done = net.one.take_pulled();
  REQUIRE(done.size() == 1);
  REQUIRE(done[0].anchor.ok());
  CHECK(test::same_anchor(*done[0].anchor, exact, test::place(1)));
  // the other version's list is not left
  CHECK(net.store.inner.blob_count() == net.theirs.blob_count());
}

TEST_CASE("a pull whose record comes to name another anchor's list ends with that as its reason") {
  Two net;
  const auto mine = net.one.publish(test::anchor(2), test::place(1), 1);
  REQUIRE(mine.ok());
  const std::size_t blobs = net.store.inner.blob_count();
  const kvmeld::anchors::Anchor a = test::anchor(1);
  const FragmentId key = kvmeld::anchors::record_key(a.id, test::place(1));
  REQUIRE(net.two.publish(a, test::place(1), 1).ok());
  const auto list = net.list_on_the_way(key);
  kvmeld::anchors::AnchorRecord lie = *net.two.directory().find(key);
  ++lie.version;
  lie.payload = mine->payload;
  REQUIRE(net.tell_one({lie}).ok());
  REQUIRE(net.one.receive(2, list[0].bytes).ok());
  const auto done = net.one.take_pulled();
  REQUIRE(done.size() == 1);
  CHECK(done[0].anchor.error().code() == ErrorCode::id_mismatch);
  CHECK(net.one.pulling() == 0);
  CHECK(net.store.inner.blob_count() == blobs);
}

TEST_CASE(
    "what a pull brought leaves the store if the rest does not come, but for what others here "
    "need") {
  Two net;
  const auto mine = net.one.publish(test::anchor(1, {1}, 9), test::place(1), 1);
  REQUIRE(mine.ok());
  const std::size_t own = net.store.inner.blob_count();
  const kvmeld::anchors::Anchor a = test::anchor(1, {3, 5, 7}, 9);  // of the same base
  std::vector<FragmentId> keys;
  for (const std::uint64_t at : {3U, 5U, 7U}) {
    const auto record = net.two.publish(a, test::place(at), 1);
    REQUIRE(record.ok());
    keys.push_back(kvmeld::anchors::record_key(*record));
    if (at == 7) continue;
    const auto list =
        kvmeld::anchors::detail::load_list(net.theirs, *record, net.two.options().format);
    REQUIRE(list.ok());
    REQUIRE(list->chunks[1].size() > 2);
    REQUIRE(net.theirs.erase(list->chunks[1].back()).ok());
  }
  net.run(300);
  REQUIRE(net.one.pull(keys[0]).ok());
  net.run(3000);
  auto done = net.one.take_pulled();
  REQUIRE(done.size() == 1);
  CHECK(done[0].anchor.error().code() == ErrorCode::not_found);
  CHECK(net.store.inner.blob_count() == own);
  CHECK(kvmeld::anchors::load_anchor(net.store, *mine, net.one.options().format).ok());
  // Two at once, which share the base: one ends well, and has all that it needs.
  REQUIRE(net.one.withdraw(kvmeld::anchors::record_key(*mine)).ok());
  CHECK(net.store.inner.blob_count() == 0);
  REQUIRE(net.one.pull(keys[1]).ok());
  REQUIRE(net.one.pull(keys[2]).ok());
  net.run(3000);
  done = net.one.take_pulled();
  REQUIRE(done.size() == 2);
  CHECK(std::count_if(done.begin(), done.end(), [](const auto& d) { return d.anchor.ok(); }) == 1);
  REQUIRE(net.one.holds(keys[2]));
  CHECK(kvmeld::anchors::load_anchor(net.store, *net.one.directory().find(keys[2]),
                                     net.one.options().format)
            .ok());
  REQUIRE(net.one.withdraw(keys[2]).ok());
  CHECK(net.store.inner.blob_count() == 0);
}

TEST_CASE(
    "what a pull brought before a restart does no harm: the next pull asks for the rest, and all "
    "goes with the anchor") {
  for (const bool rotten : {false, true}) {
    Two net;
    std::uint64_t number = 1;
    while (net.one.owner(kvmeld::anchors::record_key(test::anchor(number).id, test::place(1))) != 2)
      ++number;
    const kvmeld::anchors::Anchor a = test::anchor(number, {1}, 9);
    const FragmentId key = kvmeld::anchors::record_key(a.id, test::place(1));
    REQUIRE(net.two.publish(a, test::place(1), 1).ok());
    const std::size_t all = net.theirs.blob_count();
    REQUIRE(all > 6);
    REQUIRE(net.one.receive(2, net.list_on_the_way(key)[0].bytes).ok());
    net.to_two();
    auto pieces = net.two.take_outbox();
    REQUIRE(pieces.size() > 3);
    pieces.resize(3);  // the rest comes too late
    for (const auto& piece : pieces) REQUIRE(net.one.receive(2, piece.bytes).ok());
    REQUIRE(net.store.inner.blob_count() == 4);

    net.one = kvmeld::anchors::AnchorExchange(net.store,
                                              Two::options<kvmeld::anchors::AnchorExchange>(1));
    for (int i = 0; i < 20 && net.one.directory().find(key) == nullptr; ++i) net.run(500);
    REQUIRE(net.one.directory().find(key) != nullptr);
    CHECK_FALSE(net.one.holds(key));
    CHECK(net.store.inner.blob_count() == 4);
    if (rotten) {  // while nobody looked
      const auto piece = kvmeld::replica::messages::decode_piece(
          kvmeld::replica::decode_frame(pieces[0].bytes, net.one.options().frame)->body);
      REQUIRE(piece.ok());
      REQUIRE(net.store.inner.erase(piece->key).ok());
      REQUIRE(*net.store.inner.put(
          piece->key, kvmeld::replica::encode_chunk(std::as_bytes(std::span("other bytes")))));
    }
    const std::uint64_t before =
        net.two.counters().sent[static_cast<std::size_t>(kvmeld::anchors::AnchorMessage::piece)];
    REQUIRE(net.one.pull(key).ok());
    net.run(3000);
    auto done = net.one.take_pulled();
    REQUIRE(done.size() == 1);
    INFO(done[0].anchor.status().message());
    REQUIRE(done[0].anchor.ok());
    CHECK(test::same_anchor(*done[0].anchor, a, test::place(1)));
    CHECK(net.two.counters().sent[static_cast<std::size_t>(kvmeld::anchors::AnchorMessage::piece)] -
              before ==
          all - 4 + (rotten ? 1 : 0));
    REQUIRE(net.one.withdraw(key).ok());
    CHECK(net.store.inner.blob_count() == 0);
  }
}

TEST_CASE("a full store is no refused message; damage is") {
  Two net;
  const kvmeld::anchors::Anchor a = test::anchor(1);
  const FragmentId key = kvmeld::anchors::record_key(a.id, test::place(1));
  REQUIRE(net.two.publish(a, test::place(1), 1).ok());
  const auto list = net.list_on_the_way(key);
  net.store.full = true;
  CHECK(net.one.receive(2, list[0].bytes).code() == ErrorCode::store_full);
  CHECK(net.one.counters().refused == 0);
  std::vector<std::byte> damaged = list[0].bytes;
  damaged.back() ^= std::byte{1};
  CHECK_FALSE(net.one.receive(2, damaged).ok());
  CHECK(net.one.counters().refused == 1);
  net.store.full = false;
  net.run(2000);
  const auto done = net.one.take_pulled();
  REQUIRE(done.size() == 1);
  CHECK(done[0].anchor.ok());
}

TEST_CASE("a key that is removed again and again has one tombstone") {
  kvmeld::anchors::detail::AnchorTombstones tombstones;
  const FragmentId a = kvmeld::anchors::record_key({}, test::place(1)),
                   b = kvmeld::anchors::record_key({}, test::place(2));
  for (std::int64_t now = 0; now < 100; ++now) {
    tombstones.add(a);
    if (now == 50) tombstones.add(b);
    tombstones.date(now);
  }
  CHECK(tombstones.size() == 2);
  CHECK(tombstones.oldest().key == b);
  tombstones.drop(b);
  CHECK(tombstones.oldest().since == 99);
  tombstones.drop(a);
  tombstones.drop(a);
  CHECK(tombstones.size() == 0);
}
