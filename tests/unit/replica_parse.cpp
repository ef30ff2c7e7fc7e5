// Replicas that exchange messages end with one set and all payloads; what is wrong is refused and
// changes nothing.
#include <deque>
#include <functional>
#include <map>

#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"
#include "support/unserved.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::replica::MemberId;
using kvmeld::stores::MemoryStore;
using Replica = kvmeld::replica::Replica;

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 3) {
  return test::sealed(test::geometry({.layers = 2, .heads = 2, .channels = 32}), tokens, seed,
                      {.tokens = test::token_ids(tokens)})
      .fragment;
}

constexpr kvmeld::Digest128 merger_digest{1, 1};

// A message as replicas send it.
std::vector<std::byte> message(kvmeld::replica::ReplicaMessage type,
                               std::span<const std::byte> body) {
  return *kvmeld::replica::encode_replica_frame(type, merger_digest, body);
}

// Members on a network that delivers everything at once, unless a test says otherwise.
struct Net {
  explicit Net(std::size_t n, std::size_t chunk_bytes = 100, bool shared = false)
      : stores(shared ? 1 : n) {
    for (MemberId m = 0; m < n; ++m) {
      Replica::Options options{.epoch = 1, .merger = merger_digest};
      options.self = m;
      options.epoch = 1;
      for (MemberId other = 0; other < n; ++other) options.members.push_back(other);
      options.format.chunk_bytes = chunk_bytes;
      options.shared_store = shared;
      replicas.emplace_back(stores[shared ? 0 : m], options);
      REQUIRE(replicas.back().open().ok());
    }
  }
  void run(int ticks = 40) {
    for (int i = 0; i < ticks; ++i) {
      now += 100;
      for (MemberId m = 0; m < replicas.size(); ++m) {
        REQUIRE(replicas[m].tick(now).ok());
        deliver();
      }
    }
  }
  void deliver() {
    bool more = true;
    while (more) {
      more = false;
      for (MemberId m = 0; m < replicas.size(); ++m) {
        for (const kvmeld::replica::Outgoing& out : replicas[m].take_outbox()) {
          more = true;
          for (MemberId to = 0; to < replicas.size(); ++to) {
            if (to == m || (out.to != to && out.to != kvmeld::replica::everyone)) continue;
            if (lose && lose(m, to, out)) continue;
            REQUIRE(replicas[to].receive(m, out.bytes).ok());
          }
        }
      }
    }
  }
  bool converged() const {
    return std::all_of(replicas.begin(), replicas.end(), [&](const Replica& r) {
      return r.set() == replicas[0].set() && r.set().digest() == replicas[0].set().digest() &&
             r.wanted() == 0 &&
             std::all_of(r.set().entries().begin(), r.set().entries().end(), [](const auto& e) {
               return e.complete() && kvmeld::verify_fragment(e.fragment).ok();
             });
    });
  }

  std::deque<MemoryStore> stores;
  std::deque<Replica> replicas;
  std::function<bool(MemberId, MemberId, const kvmeld::replica::Outgoing&)> lose;
  std::int64_t now = 0;
};

}  // namespace

TEST_CASE("what one agent inserts, removes or supersedes, all have, payloads included") {
  Net net(4);
  std::vector<Fragment> f;
  for (std::uint64_t i = 0; i < 8; ++i) {
    // one of no tokens, one of a single one
    f.push_back(fragment(i, static_cast<std::int64_t>(i)));
    REQUIRE(net.replicas[i % 4].insert(f.back(), 0.5F).ok());
  }
  net.run();
  REQUIRE(net.replicas[0].set().size() == 8);
  REQUIRE(net.converged());
  REQUIRE(net.replicas[2].remove(f[1].id()).ok());
  REQUIRE(net.replicas[3].supersede(f[2].id(), f[3].id()).ok());
  net.run();
  REQUIRE(net.converged());
  CHECK(net.replicas[0].set().size() == 7);
  CHECK(net.replicas[0].set().removals().empty());  // everybody knows: compacted
  CHECK(in_force(net.replicas[0].set()).size() == 6);
  CHECK(net.replicas[1].remove(f[1].id()).status().code() == ErrorCode::not_found);
  CHECK(net.replicas[1].counters().fragments_fetched == 6);
}

TEST_CASE(
    "a payload comes chunk by chunk, stays wanted while chunks lack, and is taken from whoever has "
    "it") {
  Net net(3);
  const Fragment f = fragment(5, 40);
  REQUIRE(kvmeld::replica::make_manifest(f, 100)->chunks[0].size() > 16);
  int lost = 0;
  net.lose = [&](MemberId from, MemberId, const kvmeld::replica::Outgoing& out) {
    return from == 0 &&
           out.type == static_cast<std::uint8_t>(kvmeld::replica::ReplicaMessage::chunk) &&
           ++lost % 3 != 0;
  };
  REQUIRE(net.replicas[0].insert(f).ok());
  net.run(3);
  CHECK(net.replicas[1].set().size() == 1);  // the id is there at once
  net.run(400);
  CHECK(net.converged());
  // The author leaves; a late member gets everything from the others.
  net.lose = [](MemberId from, MemberId to, const kvmeld::replica::Outgoing&) {
    return from == 0 || to == 0;
  };
  MemoryStore empty;
  Replica::Options options = net.replicas[1].options();
  options.self = 7;
  net.replicas[2].~Replica();
  new (&net.replicas[2]) Replica(empty, options);
  net.run(200);
  CHECK(net.replicas[2].set() == net.replicas[1].set());
  CHECK(net.replicas[2].set().find(f.id())->complete());
}

TEST_CASE("a restarted replica has what was acknowledged, and uses no dot again") {
  MemoryStore store;
  Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.self = 3;
  options.epoch = 10;
  options.max_records = 4;
  kvmeld::Digest256 digest;
  {
    Replica before(store, options);
    REQUIRE(before.open().ok());
    for (std::uint64_t i = 0; i < 9; ++i) REQUIRE(before.insert(fragment(i)).ok());
    REQUIRE(before.remove(fragment(2).id()).ok());
    digest = before.set().digest();
  }
  options.epoch = 11;
  // the second reads the one record into which the first put them
  for (int times = 0; times < 2; ++times) {
    Replica after(store, options);
    REQUIRE(after.open().ok());
    CHECK(after.set().digest() == digest);
    REQUIRE(after.tick(1000).ok());
    CHECK(after.wanted() == 0);
    CHECK(after.set().entries().front().complete());
  }
  Replica after(store, options);
  REQUIRE(after.open().ok());
  const auto dot = after.insert(fragment(100));
  REQUIRE(dot.ok());
  CHECK((dot->epoch == 11 && dot->sequence == 0));
}

TEST_CASE("a store's records stay few while a replica runs") {
  MemoryStore store;
  Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.self = 5;
  options.max_records = 8;
  Replica replica(store, options);
  REQUIRE(replica.open().ok());
  for (std::uint64_t i = 0; i < 100; ++i) {
    REQUIRE(replica.insert(fragment(i % 3)).ok());
    REQUIRE(replica.tick(static_cast<std::int64_t>(i)).ok());
    REQUIRE(store.records(0)->records.size() <= 8);
  }
  options.epoch = 2;  // of another life
  Replica again(store, options);
  REQUIRE(again.open().ok());
  CHECK(again.set().digest() == replica.set().digest());
}

TEST_CASE("over a shared store replicas meet without fetching from each other") {
  Net net(3, 100, true);
  for (std::uint64_t i = 0; i < 6; ++i) REQUIRE(net.replicas[i % 3].insert(fragment(i)).ok());
  net.run();
  CHECK(net.converged());
  for (const Replica& r : net.replicas) {
    CHECK(
        r.counters().sent_bytes[static_cast<std::size_t>(kvmeld::replica::ReplicaMessage::fetch)] ==
        0);
    CHECK(r.counters().fragments_loaded == 4);
  }
}

TEST_CASE("liars and floods cost themselves") {
  Net net(3);
  // A member with another quota floods; one forges operations of another.
  kvmeld::FragmentSet flood, forged, mixed;
  const Fragment good = fragment(1), bad = fragment(2);
  REQUIRE(flood.insert(bad, {9, net.replicas[0].options().max_operations, 1}).ok());
  REQUIRE(forged.insert(bad, {0, 5, 1}).ok());
  REQUIRE(mixed.insert(good, {9, 0, 1}).ok());
  REQUIRE(mixed.join(flood).ok());
  const auto frame = [](const kvmeld::FragmentSet& set) {
    return message(kvmeld::replica::ReplicaMessage::delta, kvmeld::replica::encode_set(set));
  };
  CHECK(net.replicas[0].receive(9, frame(flood)).status().code() == ErrorCode::quota_exceeded);
  CHECK(net.replicas[0].receive(9, frame(forged)).status().code() == ErrorCode::quota_exceeded);
  CHECK(net.replicas[0].set().empty());
  CHECK(net.replicas[0].receive(9, frame(mixed)).status().code() == ErrorCode::quota_exceeded);
  CHECK(net.replicas[0].set().size() == 1);  // what is within the quota is taken
  CHECK(net.replicas[0].counters().refused_operations == 3);

  // One that answers with wrong bytes is asked no more; the honest one serves.
  REQUIRE(net.replicas[1].insert(bad).ok());
  net.lose = [&](MemberId, MemberId to, const kvmeld::replica::Outgoing&) { return to == 2; };
  net.run(3);
  auto& victim = net.replicas[2];
  const auto byzantine = [&](kvmeld::replica::ReplicaMessage type,
                             std::span<const std::byte> body) {
    return victim.receive(8, message(type, body));
  };
  kvmeld::FragmentSet claim;
  REQUIRE(claim.insert(bad, {8, 0, 1}).ok());
  REQUIRE(
      byzantine(kvmeld::replica::ReplicaMessage::delta, kvmeld::replica::encode_set(claim)).ok());
  CHECK(victim.wanted() == 1);
  const auto other = kvmeld::replica::encode_manifest(*kvmeld::replica::make_manifest(good, 100));
  for (int i = 0; i < 3; ++i) {
    CHECK(byzantine(kvmeld::replica::ReplicaMessage::manifest,
                    kvmeld::replica::messages::encode(
                        kvmeld::replica::messages::Piece{bad.id(), manifest_key(bad.id()), other}))
              .status()
              .code() == ErrorCode::id_mismatch);
  }
  CHECK(victim.counters().strikes == 3);
  // not listened to any more
  CHECK(byzantine(kvmeld::replica::ReplicaMessage::manifest,
                  kvmeld::replica::messages::encode(
                      kvmeld::replica::messages::Piece{bad.id(), manifest_key(bad.id()), other}))
            .ok());
  net.lose = nullptr;
  net.run(60);
  CHECK(victim.set().find(bad.id())->complete());
}

TEST_CASE("payloads that nobody serves keep no other waiting, of one author or of many") {
  for (const bool named : {true, false}) {
    Net net(2);
    if (!named) {
      for (Replica& replica : net.replicas) replica.set_members({});
    }
    net.run(2);
    const auto flood = named ? test::unserved(4000, 99) : test::unserved(4000, 1000, 0, 80);
    REQUIRE(net.replicas[0]
                .receive(99, message(kvmeld::replica::ReplicaMessage::delta,
                                     kvmeld::replica::encode_set(flood)))
                .ok());
    CHECK(net.replicas[0].wanted() == 4000);
    net.run(3);
    const Fragment honest = fragment(5);
    REQUIRE(net.replicas[1].insert(honest).ok());
    net.run(3);
    CHECK(net.replicas[0].set().find(honest.id())->complete());
    CHECK(net.replicas[0].wants_of(named ? 99 : 1000));
    CHECK_FALSE(net.replicas[0].wants_of(1));
  }
}

TEST_CASE("what is on its way has room by what came, for all and for each peer") {
  const std::size_t memory = kvmeld::replica::detail::manifest_memory(
      kvmeld::replica::encode_manifest(*kvmeld::replica::make_manifest(fragment(1, 12), 100))
          .size());
  MemoryStore store;
  Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.format.chunk_bytes = 100;
  options.max_peer_fetch_bytes = memory + 14'000;
  options.max_fetch_bytes = 2 * memory + 20'000;
  Replica victim(store, options);
  REQUIRE(victim.open().ok());
  const auto say = [&](MemberId from, kvmeld::replica::ReplicaMessage type,
                       std::span<const std::byte> body) {
    return victim.receive(from, message(type, body)).status();
  };
  // Everything of a fragment but its last chunk, or all of it.
  const auto send = [&](MemberId from, std::uint64_t seed, std::size_t short_of) {
    const Fragment f = fragment(seed, 12);  // 12 KiB
    kvmeld::FragmentSet claim;
    REQUIRE(claim.insert(f, {from, seed, 1}).ok());
    REQUIRE(
        say(from, kvmeld::replica::ReplicaMessage::delta, kvmeld::replica::encode_set(claim)).ok());
    const auto manifest = kvmeld::replica::make_manifest(f, 100);
    const auto piece = [&](const kvmeld::BlobKey& key, std::span<const std::byte> bytes) {
      return kvmeld::replica::messages::encode(
          kvmeld::replica::messages::Piece{f.id(), key, bytes});
    };
    const auto& keys = manifest->chunks[0];
    kvmeld::Status status =
        say(from, kvmeld::replica::ReplicaMessage::manifest,
            piece(manifest_key(f.id()), kvmeld::replica::encode_manifest(*manifest)));
    for (std::size_t c = 0; c + short_of < keys.size() && status.ok(); ++c) {
      const auto chunk =
          kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(f.payloads()[0], c, 100));
      status = say(from, kvmeld::replica::ReplicaMessage::chunk, piece(keys[c], chunk));
    }
    return status;
  };
  CHECK(send(8, 1, 1).ok());
  CHECK(victim.fetch_bytes() == memory + (kvmeld::replica::chunk_count(12 * 1024, 100) - 1) * 100);
  const std::uint64_t held = victim.fetch_bytes();
  CHECK(send(8, 2, 1).code() == ErrorCode::quota_exceeded);  // what the peer may have is used up
  CHECK(victim.fetch_bytes() == held);  // and what came of the second is given back
  CHECK(send(7, 3, 0).code() == ErrorCode::quota_exceeded);  // there is none for all either
  CHECK(victim.counters().refused_pieces == 2);
  CHECK(victim.counters().strikes == 0);
  CHECK(victim.fetch_bytes() == held);
}

TEST_CASE("gaps, lives, authors and fragments have bounds, and who floods is left out first") {
  using kvmeld::CausalContext;
  MemoryStore store;
  Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.max_ranges = 160;
  options.max_authors = 4;
  options.max_entries = 60;
  Replica replica(store, options);
  REQUIRE(replica.open().ok());
  const auto tell = [&](MemberId from, const kvmeld::FragmentSet& set) {
    return replica
        .receive(from,
                 message(kvmeld::replica::ReplicaMessage::delta, kvmeld::replica::encode_set(set)))
        .status();
  };
  const auto gaps = [](std::uint64_t agent, std::uint64_t count) {
    CausalContext out;
    for (std::uint64_t i = 0; i < count; ++i) out.append({agent, 1, 2 * i, 2 * i});
    return out;
  };
  const auto gone = [](const CausalContext& context) {
    return *kvmeld::FragmentSet::from_parts({}, {}, {}, context);
  };
  // A context that fits into a message would not fit into this replica's news behind it.
  CHECK(tell(5, gone(gaps(5, 161))).code() != ErrorCode::ok);
  CHECK(replica.set().context().empty());
  CHECK(tell(5, gone(gaps(5, 100))).ok());
  CHECK(tell(6, gone(gaps(6, 50))).ok());
  CHECK(tell(5, gone(gaps(5, 140))).code() != ErrorCode::ok);
  CHECK(replica.set().context().ranges().size() == 150);
  CHECK(tell(7, test::unserved(10, 7)).ok());
  CHECK(replica.set().size() == 10);

  // More fragments than there is room for come with another's few: those are taken.
  kvmeld::FragmentSet mixed = test::unserved(100, 7, 10);
  REQUIRE(mixed.join(test::unserved(5, 8)).ok());
  CHECK(tell(9, mixed).code() == ErrorCode::quota_exceeded);
  CHECK(replica.set().size() == 15);
  CHECK(replica.counters().refused_operations >= 100);
  CHECK(tell(9, test::unserved(1, 1000)).code() == ErrorCode::quota_exceeded);  // a fifth author
  CHECK(replica.set().size() == 15);

  // News of more ranges than a context may have are not read, and who is not named keeps a part of
  // the room at most.
  const auto news = [&](MemberId from, const CausalContext& context) {
    return replica
        .receive(from, message(kvmeld::replica::ReplicaMessage::news,
                               kvmeld::replica::messages::encode(
                                   kvmeld::replica::messages::News{context, {}})))
        .status();
  };
  CHECK(news(20, gaps(20, 161)).code() == ErrorCode::oversized);
  CHECK(news(20, gaps(20, 11)).code() == ErrorCode::quota_exceeded);
  std::size_t heard = 0;
  for (MemberId member = 20; member < 60; ++member)
    heard += news(member, gaps(member, 10)).ok() ? 1U : 0U;
  CHECK(heard == 16);
}

TEST_CASE("a bit that rots in a record costs that record, and never makes another set of it") {
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(fragment(1), {3, 7, 1}, 0.5F).ok());
  REQUIRE(set.insert(fragment(2), {3, 8, 1}).ok());
  const auto record = kvmeld::replica::encode_record(kvmeld::replica::encode_set(set));
  REQUIRE(kvmeld::replica::decode_record(record).ok());
  bool refused = true;
  for (std::size_t bit = 0; bit < record.size() * 8; ++bit) {
    auto rotten = record;
    rotten[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    refused = refused && !kvmeld::replica::decode_record(rotten).ok();
  }
  for (std::size_t n = 0; n < record.size(); ++n)
    refused = refused && !kvmeld::replica::decode_record(std::span(record).first(n)).ok();
  CHECK(refused);
  MemoryStore store;
  auto rotten = record;
  rotten[rotten.size() / 2] ^= std::byte{1};
  REQUIRE(store.add_record(rotten).ok());
  Replica replica(store, {.epoch = 1, .merger = merger_digest});
  REQUIRE(replica.open().ok());
  CHECK(replica.set().empty());
  CHECK(replica.counters().corrupt_records == 1);
}

TEST_CASE(
    "an honest peer whose disk rotted serves from memory, mends the disk, and is not taken for a "
    "liar") {
  Net net(2);
  const Fragment f = fragment(5, 4);
  REQUIRE(net.replicas[0].insert(f).ok());
  const auto rot = [&](const kvmeld::BlobKey& key) {
    const auto blob = net.stores[0].get(key);
    REQUIRE(blob.ok());
    std::vector<std::byte> bytes(blob->bytes().begin(), blob->bytes().end());
    bytes.back() ^= std::byte{1};
    REQUIRE(net.stores[0].erase(key).ok());
    REQUIRE(net.stores[0].put(key, bytes).ok());
  };
  const auto manifest = kvmeld::replica::make_manifest(f, 100);
  rot(manifest_key(f.id()));
  rot(manifest->chunks[0][1]);
  net.run();
  CHECK(net.converged());
  CHECK(net.replicas[1].counters().strikes == 0);
  CHECK(load_fragment(net.stores[0], f.id(), net.replicas[0].options().format).ok());
}

TEST_CASE("a manifest whose chunks nobody has is given up, since the id does not cover its list") {
  Net net(3);
  const Fragment f = fragment(6, 4);
  net.lose = [&](MemberId, MemberId to, const kvmeld::replica::Outgoing&) { return to == 2; };
  REQUIRE(net.replicas[1].insert(f).ok());
  net.run(3);
  auto& victim = net.replicas[2];
  kvmeld::FragmentSet claim;
  REQUIRE(claim.insert(f, {8, 0, 1}).ok());
  REQUIRE(victim
              .receive(8, message(kvmeld::replica::ReplicaMessage::delta,
                                  kvmeld::replica::encode_set(claim)))
              .ok());
  auto manifest = kvmeld::replica::make_manifest(f, 100);
  manifest->chunks[0][2].bytes[5] ^= 1U;
  const auto body = kvmeld::replica::encode_manifest(*manifest);
  REQUIRE(
      victim
          .receive(8, message(kvmeld::replica::ReplicaMessage::manifest,
                              kvmeld::replica::messages::encode(kvmeld::replica::messages::Piece{
                                  f.id(), manifest_key(f.id()), body})))
          .ok());
  net.lose = nullptr;
  net.run(200);
  CHECK(victim.set().find(f.id())->complete());
  CHECK(victim.counters().strikes == 0);  // who is slow looks no different
}

TEST_CASE("every peer is asked for what the others lack") {
  for (std::size_t members = 3; members <= 6; ++members) {
    for (MemberId holder = 0; holder + 1 < members; ++holder) {
      Net net(members);
      const Fragment f = fragment(7);
      const auto manifest = kvmeld::replica::make_manifest(f, 100);
      const MemberId asker = members - 1;
      net.lose = [&](MemberId, MemberId to, const kvmeld::replica::Outgoing&) {
        return to == asker;
      };
      REQUIRE(net.replicas[holder].insert(f).ok());
      net.run();
      for (MemberId m = 0; m < asker; ++m) {
        if (m == holder) continue;
        REQUIRE(net.replicas[m].evict(f.id()).ok());
        REQUIRE(net.stores[m].erase(manifest_key(f.id())).ok());
        for (const auto& key : manifest->chunks[0]) REQUIRE(net.stores[m].erase(key).ok());
      }
      net.lose = nullptr;
      net.run(200);
      CAPTURE(members, holder);
      CHECK(net.replicas[asker].set().find(f.id())->complete());
    }
  }
}

TEST_CASE(
    "members that join and leave do not stop compaction, and nothing removed comes back by them") {
  Net net(3);
  const Fragment f = fragment(8);
  REQUIRE(net.replicas[0].insert(f).ok());
  net.run();
  // Member 2 leaves without having heard of the removal.
  net.lose = [](MemberId from, MemberId to, const kvmeld::replica::Outgoing&) {
    return from == 2 || to == 2;
  };
  REQUIRE(net.replicas[1].remove(f.id()).ok());
  net.run();
  CHECK(net.replicas[0].set().removals().size() == 1);
  for (MemberId m = 0; m < 2; ++m) net.replicas[m].set_members({0, 1});
  net.run();
  CHECK(net.replicas[0].set().removals().empty());
  CHECK(net.replicas[0].seen_by(2) == nullptr);
  // It comes back with what it had.
  net.lose = nullptr;
  for (MemberId m = 0; m < 3; ++m) net.replicas[m].set_members({0, 1, 2});
  net.run();
  CHECK(net.replicas[2].set().empty());
  CHECK(net.converged());
}

TEST_CASE(
    "a member that was never heard of keeps removals, and payloads for it, until it is heard") {
  Net net(3);
  net.lose = [](MemberId from, MemberId to, const kvmeld::replica::Outgoing&) {
    return from == 2 || to == 2;
  };
  const Fragment f = fragment(8);
  REQUIRE(net.replicas[0].insert(f).ok());
  net.run();
  REQUIRE(net.replicas[1].remove(f.id()).ok());
  net.run();
  for (MemberId m = 0; m < 2; ++m) {
    CHECK(net.replicas[m].set().empty());
    CHECK(net.replicas[m].set().removals().size() == 1);
    CHECK(net.replicas[m].set().compacted().empty());
    CHECK(net.replicas[m].set().payload(f.id()).valid());
  }
  net.lose = nullptr;
  net.run();
  for (const Replica& replica : net.replicas) {
    CHECK(replica.set().removals().empty());
    CHECK(replica.set().compacted() == replica.set().context());
    CHECK_FALSE(replica.set().payload(f.id()).valid());
  }
}

TEST_CASE(
    "members with other mergers are told apart, those of other namespaces or versions refused") {
  Net net(2);
  MemoryStore store;
  Replica::Options options = net.replicas[0].options();
  options.self = 5;
  options.merger = kvmeld::Digest128{1, 2};
  Replica other(store, options);
  REQUIRE(other.tick(1).ok());
  for (const auto& out : other.take_outbox()) REQUIRE(net.replicas[0].receive(5, out.bytes).ok());
  CHECK(net.replicas[0].other_mergers() == std::vector<MemberId>{5});
  options.frame.scope = {7, 7};
  Replica foreign(store, options);
  REQUIRE(foreign.tick(1).ok());
  for (const auto& out : foreign.take_outbox())
    CHECK(net.replicas[0].receive(5, out.bytes).status().code() == ErrorCode::unauthenticated);
  auto newer = *kvmeld::replica::encode_frame(1, {});
  newer[4] = std::byte{9};
  CHECK(net.replicas[0].receive(5, newer).status().code() == ErrorCode::version_mismatch);
}

TEST_CASE("sets survive their bytes, and no damage to those makes another set") {
  test::Random random(4);
  kvmeld::FragmentSet set;
  for (std::uint64_t i = 0; i < 12; ++i)
    REQUIRE(set.insert(fragment(i), {i % 3, i, 1'000'000 + i % 2}, 0.25F * static_cast<float>(i),
                       static_cast<std::int64_t>(i))
                .ok());
  REQUIRE(set.supersede(fragment(1).id(), fragment(2).id(), {4, 0}).ok());
  REQUIRE(set.remove(fragment(3).id(), {4, 1}).ok());
  set.compact(set.context());
  REQUIRE(set.remove(fragment(4).id(), {4, 2}).ok());
  REQUIRE(set.insert(fragment(20)).ok());
  const auto bytes = kvmeld::replica::encode_set(set);
  const auto back = kvmeld::replica::decode_set(bytes);
  REQUIRE(back.ok());
  CHECK(*back == set);
  CHECK(back->digest() == set.digest());
  CHECK(back->context() == set.context());
  CHECK(back->removals().size() == 1);
  CHECK(kvmeld::replica::encode_set(*back) == bytes);
  for (std::size_t n = 0; n < bytes.size(); ++n)
    CHECK_FALSE(kvmeld::replica::decode_set(std::span(bytes).first(n)).ok());
  auto longer = bytes;
  longer.push_back(std::byte{0});
  CHECK(kvmeld::replica::decode_set(longer).status().code() == ErrorCode::oversized);
  // frames catch accidents; here nothing may crash
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    auto flipped = bytes;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const auto read = kvmeld::replica::decode_set(flipped);
    if (read) CHECK(kvmeld::replica::encode_set(*read).size() <= bytes.size() + 64);
  }
}

TEST_CASE("a removal that names the dot of another id ends the same in every order") {
  const Fragment x = fragment(1), y = fragment(2);
  kvmeld::FragmentSet with_x;
  REQUIRE(with_x.insert(x, {1, 0}).ok());
  const auto removal = kvmeld::FragmentSet::from_parts({}, {}, {{{2, 0}, y.id(), {{1, 0}}}}, {});
  REQUIRE(removal.ok());
  kvmeld::FragmentSet first = with_x, second = *removal;
  REQUIRE(first.join(*removal).ok());
  REQUIRE(second.join(with_x).ok());
  CHECK(first == second);
  CHECK(first.empty());
  for (const auto& set : {first, second})
    CHECK(kvmeld::replica::decode_set(kvmeld::replica::encode_set(set)).ok());
}

TEST_CASE("an epoch that was used before is noticed, and nothing of it is lost") {
  MemoryStore store;
  Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.self = 1;
  options.epoch = 5;
  {
    Replica before(store, options);
    REQUIRE(before.open().ok());
    REQUIRE(before.insert(fragment(1)).ok());
    REQUIRE(before.insert(fragment(2)).ok());
  }
  Replica again(store, options);
  CHECK(again.open().code() == ErrorCode::dot_reused);
  CHECK(again.set().size() == 2);
  const auto dot = again.insert(fragment(3));
  REQUIRE(dot.ok());
  CHECK(dot->sequence == 2);
}

TEST_CASE(
    "what was applied by the host is in a shared store, and what this build cannot read stays "
    "there") {
  MemoryStore store;
  Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.self = 1;
  options.epoch = 1;
  options.shared_store = true;
  options.max_records = 2;
  kvmeld::FragmentSet update;
  REQUIRE(update.insert(fragment(1), {7, 0, 1}).ok());
  Replica replica(store, options);
  REQUIRE(replica.open().ok());
  REQUIRE(replica.join(update, kvmeld::replica::everyone).ok());
  Replica after(store, options);
  (void)after.open();
  CHECK(after.set().size() == 1);
  // A record of a newer version survives, however many follow it.
  auto newer = kvmeld::replica::encode_set(update);
  newer[0] = std::byte{99};
  REQUIRE(store.add_record(kvmeld::replica::encode_record(newer)).ok());
  for (std::int64_t now = 0; now < 1000; now += 100) REQUIRE(replica.tick(now).ok());
  const auto records = store.records(0);
  REQUIRE(records.ok());
  CHECK(std::count(records->records.begin(), records->records.end(),
                   kvmeld::replica::encode_record(newer)) == 1);
}

TEST_CASE("a fragment that gains provenance, or loses none, is the same set in either order") {
  const Fragment x = fragment(1);
  kvmeld::FragmentSet bare, marked;
  REQUIRE(bare.insert(x).ok());
  REQUIRE(marked.insert(x, {7, 0, 1}).ok());
  MemoryStore stores[2];
  const Replica::Options options{.epoch = 1, .merger = merger_digest};
  Replica a(stores[0], options), b(stores[1], options);
  const auto give = [](Replica& to, const kvmeld::FragmentSet& set) {
    REQUIRE(to.receive(9, message(kvmeld::replica::ReplicaMessage::delta,
                                  kvmeld::replica::encode_set(set)))
                .ok());
  };
  give(a, bare);
  give(a, marked);
  give(b, marked);
  give(b, bare);
  CHECK(a.set().digest() == b.set().digest());
  Net net(2);  // contexts say nothing of it, digests do
  give(net.replicas[0], bare);
  REQUIRE(net.replicas[0].insert(x).ok());
  net.run();
  CHECK(net.converged());
}

TEST_CASE(
    "asks of a few bytes do not fill the memory of who is asked, nor does a store that is away use "
    "up dots") {
  Net net(2, 1000);
  const Fragment f = fragment(5, 200);
  REQUIRE(net.replicas[0].insert(f).ok());
  (void)net.replicas[0].take_outbox();
  kvmeld::replica::messages::Fetch fetch{f.id(), {}};
  fetch.chunks.assign(16, kvmeld::replica::make_manifest(f, 1000)->chunks[0][0]);
  const auto frame =
      message(kvmeld::replica::ReplicaMessage::fetch, kvmeld::replica::messages::encode(fetch));
  REQUIRE(net.replicas[0].receive(1, frame).ok());
  CHECK(net.replicas[0].take_outbox().size() == 1);  // once, however often it is named
  // Manifests of a third of a megabyte each, asked for by a name.
  Net many(2, 100);
  const Fragment large = fragment(6, 1000);
  REQUIRE(many.replicas[0].insert(large).ok());
  (void)many.replicas[0].take_outbox();
  const auto ask =
      message(kvmeld::replica::ReplicaMessage::fetch,
              kvmeld::replica::messages::encode(kvmeld::replica::messages::Fetch{large.id(), {}}));
  for (int i = 0; i < 260; ++i) REQUIRE(many.replicas[0].receive(1, ask).ok());
  std::size_t bytes = 0;
  std::size_t longest = 0;
  for (const kvmeld::replica::Outgoing& out : many.replicas[0].take_outbox()) {
    bytes += out.bytes.size();
    longest = (std::max)(longest, out.bytes.size());
  }
  REQUIRE(260 * longest > (std::size_t{70} << 20U));
  CHECK(bytes <= (std::size_t{64} << 20U) + longest);
  REQUIRE(many.replicas[0].receive(1, ask).ok());
  CHECK(many.replicas[0].take_outbox().size() == 1);  // there is room again
  struct Away : MemoryStore {
    kvmeld::Result<bool> put(const kvmeld::BlobKey&, std::span<const std::byte>) {
      return kvmeld::Status(ErrorCode::unavailable, "away");
    }
  };
  Away away;
  kvmeld::replica::Replica::Options options{.epoch = 1, .merger = merger_digest};
  options.max_operations = 8;
  kvmeld::replica::Replica waiting(away, options);
  for (int i = 0; i < 100; ++i) CHECK(waiting.insert(f).status().code() == ErrorCode::unavailable);
}

TEST_CASE(
    "strangers take no named member's place, and whom there is no room to remember gets no sets") {
  Net net(2);
  REQUIRE(net.replicas[0].insert(fragment(1)).ok());
  REQUIRE(net.replicas[1].insert(fragment(2)).ok());
  (void)net.replicas[0].take_outbox();
  (void)net.replicas[1].take_outbox();
  const auto news =
      message(kvmeld::replica::ReplicaMessage::news,
              kvmeld::replica::messages::encode(kvmeld::replica::messages::News{{}, {}}));
  for (MemberId stranger = 1000; stranger < 1000 + 4096; ++stranger)
    (void)net.replicas[0].receive(stranger, news);
  (void)net.replicas[0].take_outbox();
  kvmeld::extend::ByteWriter empty;
  kvmeld::replica::write_context(empty, {});
  const auto want = message(kvmeld::replica::ReplicaMessage::want, empty.written());
  for (int i = 0; i < 3; ++i) REQUIRE(net.replicas[0].receive(9999, want).ok());
  CHECK(net.replicas[0].take_outbox().empty());
  net.run();
  CHECK(net.replicas[0].seen_by(1) != nullptr);
  CHECK(net.converged());
}

TEST_CASE("an agent that started thousands of times is still heard, and nobody speaks for it") {
  for (const std::uint64_t lives : {3000U, 5000U}) {
    INFO(lives << " lives");
    Net net(3);
    Replica& replica = net.replicas[0];
    const auto news = [&](std::uint64_t last) {
      kvmeld::CausalContext seen;
      for (std::uint64_t life = 1; life < lives; ++life) seen.append({1, life, 0, 0});
      seen.append({1, lives, 0, last});
      const kvmeld::replica::messages::News said{seen, {}, lives};
      return replica
          .receive(1, message(kvmeld::replica::ReplicaMessage::news,
                              kvmeld::replica::messages::encode(said)))
          .status();
    };
    const auto relayed = [&](std::uint64_t sequence) {
      kvmeld::FragmentSet set;
      REQUIRE(set.insert(fragment(sequence), {1, sequence, lives}).ok());
      REQUIRE(replica
                  .receive(2, message(kvmeld::replica::ReplicaMessage::delta,
                                      kvmeld::replica::encode_set(set)))
                  .ok());
      return replica.set().find(fragment(sequence).id()) != nullptr;
    };
    REQUIRE(news(0).ok());
    CHECK_FALSE(relayed(7));  // of a life that was heard, and not so far
    REQUIRE(news(7).ok());
    CHECK(relayed(7));
    CHECK_FALSE(relayed(8));
  }
}

TEST_CASE("a blob that only another build can read is not destroyed") {
  MemoryStore store;
  const Fragment f = fragment(3);
  kvmeld::replica::FragmentFormat format;
  REQUIRE(store_fragment(store, f, format).ok());
  const auto key = kvmeld::replica::make_manifest(f)->chunks[0][0];
  auto other = store.get(key)->bytes();
  std::vector<std::byte> packed(other.begin(), other.end());
  packed[0] = std::byte{1};  // a compressor that this reader lacks
  REQUIRE(store.erase(key).ok());
  REQUIRE(store.put(key, packed).ok());
  CHECK(load_fragment(store, f.id(), format).status().code() == ErrorCode::not_found);
  CHECK(*store.contains(key));
  packed[0] = std::byte{0};
  packed.back() ^= std::byte{1};  // damage
  REQUIRE(store.erase(key).ok());
  REQUIRE(store.put(key, packed).ok());
  CHECK(load_fragment(store, f.id(), format).status().code() == ErrorCode::not_found);
  CHECK_FALSE(*store.contains(key));
}

TEST_CASE(
    "one member's word ends nothing that another did, and holds back nothing that it will do") {
  for (const bool insider : {false, true}) {
    INFO("the liar is a member: " << insider);
    Net net(3);
    const MemberId byzantine = insider ? 2 : 99;
    auto& victim = net.replicas[0];
    auto& author = net.replicas[1];
    REQUIRE(author.insert(fragment(1)).ok());
    net.run();
    REQUIRE(victim.set().size() == 1);
    const auto tell = [&](const kvmeld::FragmentSet& set) {
      const kvmeld::Digest256 before = victim.set().digest();
      const kvmeld::CausalContext seen = victim.set().context();
      REQUIRE(victim
                  .receive(byzantine, message(kvmeld::replica::ReplicaMessage::delta,
                                              kvmeld::replica::encode_set(set)))
                  .ok());
      CHECK(victim.set().digest() == before);
      CHECK(victim.set().context() == seen);
    };
    kvmeld::CausalContext gone;
    gone.append({1, 1, 0, (1U << 17U) - 1});
    tell(*kvmeld::FragmentSet::from_parts({}, {}, {}, gone));
    tell(*kvmeld::FragmentSet::from_parts(
        {}, {}, {{{byzantine, 0, 7}, fragment(9).id(), {{1, 1, 1}, {1, 2, 1}}}}, {}));
    tell(*kvmeld::FragmentSet::from_parts({}, {}, {{{1, 3, 1}, fragment(9).id(), {}}}, {}));
    kvmeld::FragmentSet forged;
    REQUIRE(forged.insert(fragment(8), {1, 1, 1}).ok());
    tell(forged);
    CHECK(victim.counters().unvouched_operations == 4);
    CHECK(victim.reused_lives().empty());
    // What is known of a dot nobody else changes.
    kvmeld::FragmentSet changed;
    REQUIRE(changed.insert(fragment(1), {1, 0, 1}, 0.9F).ok());
    (void)victim.receive(byzantine, message(kvmeld::replica::ReplicaMessage::delta,
                                            kvmeld::replica::encode_set(changed)));
    CHECK_FALSE(victim.set().find(fragment(1).id())->metadata.marks[0].confidence);
    for (std::uint64_t i = 2; i < 12; ++i) REQUIRE(author.insert(fragment(i)).ok());
    REQUIRE(author.remove(fragment(2).id()).ok());
    net.run();
    CHECK(victim.set().size() == 10);
    CHECK(net.converged());
    CHECK(victim.set().removals().empty());
  }
}

TEST_CASE(
    "what is gone of an author that has left comes from whoever remains, and of one that is silent "
    "from two members") {
  Net net(4);
  REQUIRE(net.replicas[0].insert(fragment(1)).ok());
  REQUIRE(net.replicas[0].insert(fragment(2)).ok());
  net.run();
  REQUIRE(net.replicas[1].remove(fragment(1).id()).ok());
  net.run();
  REQUIRE(net.replicas[1].set().compacted().dots() == 2);
  // Member 0 is silent. One that starts with nothing gets what is there from anybody, and what is
  // gone once two say so.
  const auto restart = [&](MemberId member) {
    static std::deque<MemoryStore> fresh;
    Replica::Options options = net.replicas[member].options();
    options.epoch = options.epoch + 1;
    net.replicas[member].~Replica();
    new (&net.replicas[member]) Replica(fresh.emplace_back(), options);
  };
  restart(3);
  net.lose = [](MemberId from, MemberId to, const kvmeld::replica::Outgoing&) {
    return from == 0 || to == 0 || from == 2 || to == 2;
  };
  net.run();
  CHECK(net.replicas[3].set().size() == 1);
  CHECK_FALSE(net.replicas[3].set().context().contains({0, 0, 1}));
  CHECK(net.replicas[3].counters().unvouched_operations > 0);
  net.lose = [](MemberId from, MemberId to, const kvmeld::replica::Outgoing&) {
    return from == 0 || to == 0;
  };
  net.run(80);
  CHECK(net.replicas[3].set().context() == net.replicas[1].set().context());
  // It has left: one that remains is enough.
  for (MemberId m = 1; m < 4; ++m) net.replicas[m].set_members({1, 2, 3});
  restart(3);
  net.replicas[3].set_members({1, 2, 3});
  net.lose = [](MemberId from, MemberId to, const kvmeld::replica::Outgoing&) {
    return from == 0 || to == 0 || from == 2 || to == 2;
  };
  net.run(80);
  CHECK(net.replicas[3].set().context() == net.replicas[1].set().context());
  CHECK(net.replicas[3].set().digest() == net.replicas[1].set().digest());
}

TEST_CASE(
    "the merger is known from the first message of any type, and so is whoever renders nothing") {
  const auto options = [](MemberId self, const kvmeld::replica::MergerDigest& merger) {
    Replica::Options out{.self = self, .epoch = 1, .merger = merger};
    return out;
  };
  using Type = kvmeld::replica::ReplicaMessage;
  for (const Type type : {Type::news, Type::want, Type::delta, Type::fetch, Type::manifest,
                          Type::chunk, Type::lacking}) {
    MemoryStore store;
    Replica here(store, options(1, merger_digest));
    const std::vector<std::byte> nothing;
    (void)here.receive(
        2, *kvmeld::replica::encode_replica_frame(type, kvmeld::Digest128{2, 2}, nothing));
    (void)here.receive(
        3, *kvmeld::replica::encode_replica_frame(type, kvmeld::replica::does_not_render, nothing));
    (void)here.receive(4, *kvmeld::replica::encode_replica_frame(type, merger_digest, nothing));
    CHECK(here.other_mergers() == std::vector<MemberId>{2});
    CHECK(here.not_rendering() == std::vector<MemberId>{3});
  }
  MemoryStore stores[2];
  Replica a(stores[0], options(1, merger_digest)),
      b(stores[1], options(2, kvmeld::Digest128{2, 2}));
  REQUIRE(a.insert(fragment(1)).ok());
  for (const auto& out : a.take_outbox()) REQUIRE(b.receive(1, out.bytes).ok());  // a delta alone
  CHECK(b.other_mergers() == std::vector<MemberId>{1});
  Replica relay(stores[1], options(2, kvmeld::replica::does_not_render));
  REQUIRE(relay.tick(0).ok());
  for (const auto& out : relay.take_outbox()) REQUIRE(a.receive(2, out.bytes).ok());
  CHECK(a.other_mergers().empty());
  CHECK(a.not_rendering() == std::vector<MemberId>{2});
}

namespace {

// Processes that talk until nothing but news crosses; bytes beside news in the last rounds.
std::uint64_t talk(const std::vector<Replica*>& all, int rounds, std::int64_t& now,
                   std::size_t& reports) {
  std::uint64_t late = 0;
  for (int i = 0; i < rounds; ++i) {
    now += 100;
    for (Replica* const r : all) (void)r->tick(now);
    for (Replica* const from : all) {
      for (const auto& out : from->take_outbox()) {
        if (i > rounds / 2 &&
            out.type != static_cast<std::uint8_t>(kvmeld::replica::ReplicaMessage::news))
          late += out.bytes.size();
        for (Replica* const to : all) {
          if (to == from || to->options().self == from->options().self) continue;
          if (out.to != kvmeld::replica::everyone && out.to != to->options().self) continue;
          reports +=
              to->receive(from->options().self, out.bytes).status().code() == ErrorCode::dot_reused;
        }
      }
    }
  }
  return late;
}

}  // namespace

TEST_CASE(
    "two processes of one id and epoch end in dot_reused, said once, and the wire comes to rest") {
  const auto options = [](MemberId self) {
    return Replica::Options{
        .self = self, .epoch = 1, .members = {0, 1, 2}, .merger = merger_digest};
  };
  MemoryStore stores[4];
  Replica a(stores[0], options(0)), b(stores[1], options(1)), clone(stores[2], options(1)),
      c(stores[3], options(2));
  REQUIRE(b.insert(fragment(10)).ok());
  REQUIRE(clone.insert(fragment(20)).ok());
  std::int64_t now = 0;
  std::size_t reports = 0;
  (void)talk({&a, &b}, 20, now, reports);
  (void)talk({&c, &clone}, 20, now, reports);
  REQUIRE(
      (a.set().size() == 1 && c.set().size() == 1 && a.wanted() + c.wanted() == 0 && reports == 0));
  CHECK(talk({&a, &c}, 400, now, reports) == 0);
  CHECK(reports > 0);
  CHECK(reports <= 4);
  const kvmeld::replica::AgentLife life{1, 1};
  for (const Replica* const r : {&a, &c}) {
    REQUIRE(r->reused_lives().size() == 1);
    CHECK(r->reused_lives()[0] == life);
    CHECK(r->counters().reused_dots > 0);
    CHECK(r->counters().refused_operations == 0);
  }
  CHECK(a.insert(fragment(30)).ok());  // another's life, not its own
  // The clones themselves hear of it, and stop.
  (void)talk({&a, &b, &c}, 100, now, reports);
  REQUIRE_FALSE(b.reused_lives().empty());
  CHECK(b.insert(fragment(31)).status().code() == ErrorCode::dot_reused);
  CHECK(b.remove(fragment(10).id()).status().code() == ErrorCode::dot_reused);
}

TEST_CASE("a lost store, or an older copy of it, with an epoch that was used ends in dot_reused") {
  // operations of three that the restored store still has
  for (const std::uint64_t known : {0U, 1U, 2U}) {
    const Replica::Options first{.self = 0, .epoch = 1, .members = {0, 1}, .merger = merger_digest};
    Replica::Options second = first;
    second.self = 1;
    MemoryStore stores[3];
    Replica a(stores[0], first);
    std::int64_t now = 0;
    std::size_t reports = 0;
    {
      Replica b(stores[1], second), copy(stores[2], second);
      for (std::uint64_t i = 0; i < 3; ++i) REQUIRE(b.insert(fragment(10 + i)).ok());
      for (std::uint64_t i = 0; i < known; ++i) REQUIRE(copy.insert(fragment(10 + i)).ok());
      (void)talk({&a, &b}, 20, now, reports);
      REQUIRE(a.set().size() == 3);
    }
    Replica b(stores[2], second);
    CHECK(b.open().code() == (known > 0 ? ErrorCode::dot_reused : ErrorCode::ok));
    REQUIRE(b.insert(fragment(99)).ok());  // nobody knows it yet
    CHECK(talk({&a, &b}, 400, now, reports) == 0);
    REQUIRE(b.reused_lives().size() == 1);
    CHECK(b.insert(fragment(98)).status().code() == ErrorCode::dot_reused);
    CHECK(a.counters().refused_operations == 0);
    // In a fresh epoch nothing is lost that anybody holds.
    second.epoch = kvmeld::replica::fresh_epoch();
    Replica again(stores[2], second);
    REQUIRE(again.open().ok());
    REQUIRE(again.insert(fragment(97)).ok());
    (void)talk({&a, &again}, 400, now, reports);
    CHECK(a.set().find(fragment(97).id()) != nullptr);
    CHECK(again.set().context() == a.set().context());
  }
}

TEST_CASE("a store gives no epoch twice") {
  MemoryStore store;
  std::vector<std::uint64_t> given;
  for (int i = 0; i < 50; ++i) {
    const auto epoch = kvmeld::replica::claim_epoch(store, 3);
    REQUIRE(epoch.ok());
    given.push_back(*epoch);
    const std::uint64_t number = *epoch;
    // taken
    CHECK_FALSE(*store.put(kvmeld::replica::detail::epoch_key(3, number),
                           std::as_bytes(std::span(&number, 1))));
  }
  std::sort(given.begin(), given.end());
  CHECK(std::adjacent_find(given.begin(), given.end()) == given.end());
}
