// Anchors shared by agents: pages that are copied when they change, pools that fork, bytes that go
// with their last holder.

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <kvmeld/anchors/pool.hpp>

#include "support/anchor_segments.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::anchors::Anchor;
using kvmeld::anchors::AnchorSpace;
using kvmeld::anchors::AnchorTable;

const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 2, .heads = 1, .channels = 2});
const kvmeld::Digest128 context{1, 7};
using Pool = kvmeld::anchors::AnchorPool<kvmeld::anchors::XxHash, kvmeld::anchors::LRU>;

/// Payloads that are alive, of those that came through `counted`.
std::atomic<int> live{0};

/// The fragment with bytes that are counted until their last holder lets them go, and overwritten
/// then.
kvmeld::Fragment counted(const kvmeld::Fragment& fragment) {
  auto body = std::make_shared<kvmeld::Fragment::Body>(*fragment.body());
  kvmeld::Payload& payload = body->payloads[0];
  const std::size_t size = payload.byte_count;
  auto* const bytes = new std::byte[size];
  std::copy_n(payload.bytes.get(), size, bytes);
  live.fetch_add(1);
  payload.bytes = std::shared_ptr<const std::byte[]>(bytes, [bytes, size](const std::byte*) {
    std::fill_n(bytes, size, std::byte{0xEE});
    delete[] bytes;
    live.fetch_sub(1);
  });
  return kvmeld::Fragment(std::move(body));
}
Anchor anchor(std::uint16_t n) {
  test::TestCache cache(shape, 2);
  cache.fill(n);
  const std::vector<kvmeld::TokenId> ids{10 * n, 10 * n + 1};
  auto out = *kvmeld::anchors::make_anchor(*kvmeld::seal(cache.ref(), {.tokens = ids}),
                                           {static_cast<float>(n)});
  out.offsets.push_back(
      {context, counted(*kvmeld::anchors::measure_offset(out.base, out.base)), {}});
  out.base = counted(out.base);
  return out;
}
/// A sum over all bytes: what a reader does that a freed or changing payload would spoil.
std::uint64_t sum(const kvmeld::Fragment& fragment) {
  std::uint64_t out = 0;
  const kvmeld::Payload& payload = fragment.payloads()[0];
  for (std::size_t i = 0; i < payload.byte_count; ++i)
    out = out * 31 + static_cast<std::uint64_t>(payload.bytes.get()[i]);
  return out;
}

}  // namespace

TEST_CASE(
    "agents change their own copies of one table, and pages that nobody changed stay shared") {
  {
    AnchorTable shared;
    std::vector<std::uint64_t> signatures;
    for (std::uint64_t n = 0; n < 300; ++n) signatures.push_back(kvmeld::extend::mix_bits(n));
    const auto one = std::make_shared<const Anchor>(anchor(1));
    shared.append(signatures, {one, std::make_shared<kvmeld::anchors::detail::UseCell>()});
    std::atomic<int> broken{0};
    std::vector<std::thread> agents;
    for (std::uint16_t g = 0; g < 4; ++g) {
      agents.emplace_back([&, g] {
        AnchorTable own = shared;  // its own from here on
        const auto mine =
            std::make_shared<const Anchor>(anchor(static_cast<std::uint16_t>(10 + g)));
        for (std::uint64_t i = 0; i < 20; ++i) {
          const std::size_t at = (g * 64U + i) % own.size();
          own.replace(at, mine);
          own.push_back(1000U * g + i,
                        {mine, std::make_shared<kvmeld::anchors::detail::UseCell>()});
          if (i % 3 == 0) own.erase(own.size() - 2);
          std::vector<kvmeld::anchors::HammingHit> hits;
          own.scan(1000U * g + i, 0, hits);
          if (hits.empty() || own.anchor(hits.back().index) != mine || own.anchor(at) != mine)
            broken.fetch_add(1);
        }
        // Rows of pages that it left alone are the same objects: nothing but pointers was copied.
        const std::size_t far = (g * 64U + 128) % 256;
        if (&own.row(far) != &shared.row(far)) broken.fetch_add(1);
        if (own.size() != 300 + 20 - 7) broken.fetch_add(1);
      });
    }
    for (std::thread& agent : agents) agent.join();
    REQUIRE(broken == 0);
    REQUIRE(shared.size() == 300);
    for (std::size_t i = 0; i < 300; ++i) {
      if (shared.anchor(i) != one || shared.signature(i) != signatures[i])
        FAIL("the shared table changed at " << i);
    }
  }
  REQUIRE(live == 0);
}

TEST_CASE(
    "an anchor evicted while readers hold it stays whole, and its bytes go with the last of them") {
  {
    constexpr std::uint16_t names = 40;
    const AnchorSpace space = AnchorSpace::of(*shape);
    Pool pool(space, {6, 1 << 20});
    std::vector<std::uint64_t> bases, deltas;
    for (std::uint16_t n = 0; n < names; ++n) {
      const Anchor a = anchor(n);
      bases.push_back(sum(a.base));
      deltas.push_back(sum(a.offsets[0].segment));
    }
    REQUIRE(live == 0);
    std::atomic<bool> stop{false};
    std::atomic<int> broken{0}, held_after_eviction{0};
    std::vector<std::thread> readers;
    for (int r = 0; r < 2; ++r) {
      readers.emplace_back([&] {
        while (!stop.load()) {
          const auto before = pool.snapshot();
          std::vector<std::shared_ptr<const Anchor>> held;
          for (std::size_t i = 0; i < before->table.size(); ++i)
            held.push_back(before->table.anchor(i));
          const std::uint64_t version = before->version;
          for (int spin = 0; spin < 50 && pool.snapshot()->version < version + 8; ++spin)
            std::this_thread::yield();
          std::set<kvmeld::FragmentId> now;
          const auto later = pool.snapshot();
          if (later->version < version) broken.fetch_add(1);
          for (std::size_t i = 0; i < later->table.size(); ++i)
            now.insert(later->table.anchor(i)->id);
          for (const auto& a : held) {
            const auto n = static_cast<std::size_t>(a->base.tokens()[0] / 10);
            if (sum(a->base) != bases[n] || sum(a->offsets[0].segment) != deltas[n])
              broken.fetch_add(1);
            if (!now.contains(a->id)) held_after_eviction.fetch_add(1);
          }
        }
      });
    }
    for (std::uint16_t i = 0; i < 400; ++i) {
      if (!pool.commit(anchor(static_cast<std::uint16_t>(i % names))).ok()) broken.fetch_add(1);
      if (i % 8 == 0) std::this_thread::yield();
    }
    for (std::uint16_t i = 0; held_after_eviction.load() == 0 && broken.load() == 0;
         i = static_cast<std::uint16_t>((i + 1) % names)) {
      if (!pool.commit(anchor(i)).ok()) broken.fetch_add(1);  // until a reader has seen one go
    }
    stop = true;
    for (std::thread& reader : readers) reader.join();
    REQUIRE(broken == 0);
    REQUIRE(held_after_eviction > 0);
    REQUIRE(pool.size() == 6);
    REQUIRE(live == 12);  // a base and a Δ of each that is there: old versions are gone
    const auto last = pool.snapshot();
    for (std::uint16_t n = 0; n < names; ++n) {
      std::set<kvmeld::FragmentId> ids;
      for (std::size_t i = 0; i < last->table.size(); ++i) ids.insert(last->table.anchor(i)->id);
      for (const auto& id : ids) pool.erase(id);
    }
    REQUIRE(pool.size() == 0);
    REQUIRE(live == 12);  // this reader's
  }
  REQUIRE(live == 0);
}

TEST_CASE("a fork is an agent's own pool: commits of either are not the other's") {
  {
    const AnchorSpace space = AnchorSpace::of(*shape);
    Pool shared(space, {100, 1 << 20});
    for (std::uint16_t n = 0; n < 50; ++n) REQUIRE(shared.commit(anchor(n)).ok());
    std::atomic<int> broken{0};
    const auto knows = [&](const Pool& pool, std::uint16_t n) {
      const std::vector<kvmeld::TokenId> ids{10 * n, 10 * n + 1};
      const std::vector<float> vector{static_cast<float>(n)};
      return pool.look_up({}, {&space, {.tokens = ids}, vector, context, {.tokens = 2}})
          .decision.reuses();
    };
    std::vector<std::thread> agents;
    for (std::uint16_t g = 0; g < 3; ++g) {
      agents.emplace_back([&, g] {
        Pool own(shared);
        const auto first = own.size();
        if (first < 50 || own.reasons().total() != 0) broken.fetch_add(1);
        for (std::uint16_t i = 0; i < 10; ++i) {
          const auto n = static_cast<std::uint16_t>(100 + 20 * g + i);
          if (own.commit(anchor(n)).status().code() != kvmeld::ErrorCode::ok || !knows(own, n) ||
              knows(shared, n))
            broken.fetch_add(1);
          const Anchor old = anchor(i);
          if (!own.erase(old.id) || knows(own, i) || !knows(shared, i)) broken.fetch_add(1);
        }
        if (own.size() != first || !own.commit(anchor(20)).ok() || own.size() != first)
          broken.fetch_add(1);
      });
    }
    for (std::uint16_t n = 60; n < 70; ++n) {
      if (!shared.commit(anchor(n)).ok()) broken.fetch_add(1);
    }
    for (std::thread& agent : agents) agent.join();
    REQUIRE(broken == 0);
    REQUIRE(shared.size() == 60);
    REQUIRE(live == 120);
    REQUIRE(knows(shared, 65));
  }
  REQUIRE(live == 0);
}

TEST_CASE("look-ups of a pool do not make what its fork commits look old") {
  const AnchorSpace space = AnchorSpace::of(*shape);
  Pool shared(space, {3, 1 << 20});
  const auto look_up = [&](const Pool& pool, std::uint16_t n) {
    const std::vector<kvmeld::TokenId> ids{10 * n, 10 * n + 1};
    const std::vector<float> vector{static_cast<float>(n)};
    return pool.look_up({}, {&space, {.tokens = ids}, vector, context, {.tokens = 2}})
        .decision.reuses();
  };
  REQUIRE(shared.commit(anchor(1)).ok());
  REQUIRE(shared.commit(anchor(2)).ok());
  Pool own(shared);
  std::vector<std::thread> agents;
  std::atomic<int> broken{0};
  for (int g = 0; g < 2; ++g) {
    agents.emplace_back([&, g] {
      for (int i = 0; i < 500; ++i) {
        if (!look_up(shared, 1) || !look_up(shared, 2) || !look_up(g == 0 ? own : shared, 2))
          broken.fetch_add(1);
      }
    });
  }
  for (std::thread& agent : agents) agent.join();
  REQUIRE(broken == 0);
  REQUIRE(look_up(shared, 2));
  // 3 comes after all of that: 1 is the one used longest ago, then 2.
  REQUIRE(own.commit(anchor(3)).ok());
  REQUIRE(own.commit(anchor(4)).ok());
  REQUIRE(own.snapshot()->table.size() == 3);
  REQUIRE(!look_up(own, 1));
  REQUIRE(look_up(own, 3));
  REQUIRE(look_up(own, 4));
  REQUIRE(own.commit(anchor(5)).ok());
  REQUIRE(!look_up(own, 2));
  // A fork of the fork counts on the same clock, and the clock outlives the pool that made it.
  auto first = std::make_unique<Pool>(space, kvmeld::anchors::AnchorCapacity{2, 1 << 20});
  REQUIRE(first->commit(anchor(1)).ok());
  const Pool second(*first);
  Pool third(second);
  for (int i = 0; i < 100; ++i) REQUIRE(look_up(*first, 1));
  first.reset();
  REQUIRE(third.commit(anchor(2)).ok());
  REQUIRE(third.commit(anchor(3)).ok());
  REQUIRE(!look_up(third, 1));
  REQUIRE(look_up(third, 2));
}
