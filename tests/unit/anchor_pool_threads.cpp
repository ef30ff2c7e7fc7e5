// Readers of a pool see one version each, commits of several threads all survive, and what is held
// stays whole.

#include <atomic>
#include <thread>
#include <vector>

#include <kvmeld/anchors/pool.hpp>

#include "support/anchor_segments.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::anchors::Anchor;
using kvmeld::anchors::AnchorPool;
using kvmeld::anchors::AnchorSpace;

const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 2, .heads = 1, .channels = 2});

Anchor bare(std::uint8_t n) {
  test::TestCache cache(shape, 2);
  cache.fill(n);
  const auto ids = test::token_ids(2, 10 * n);
  auto anchor = *kvmeld::anchors::make_anchor(*kvmeld::seal(cache.ref(), {.tokens = ids}),
                                              {static_cast<float>(n)});
  anchor.id = test::anchor_id(n);
  return anchor;
}
kvmeld::Digest128 context(std::uint64_t c) { return {c, 7}; }

/// Whether a version is whole: index, store and sums belong together.
template <class Snapshot>
bool whole(const Snapshot& now) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < now.table.size(); ++i) {
    const Anchor& a = *now.table.anchor(i);
    bytes += a.bytes();
    if (now.table.signature(i) != *kvmeld::anchors::SimHash{}.sign({.tokens = a.base.tokens()}))
      return false;
    for (std::size_t o = 1; o < a.offsets.size(); ++o) {
      if (!(a.offsets[o - 1].context < a.offsets[o].context)) return false;
    }
  }
  return bytes == now.table.bytes();
}

}  // namespace

TEST_CASE("readers see one version while writers commit and evict") {
  constexpr std::uint8_t names = 24;
  const AnchorSpace space = AnchorSpace::of(*shape);
  AnchorPool<kvmeld::anchors::SimHash, kvmeld::anchors::LRU> pool(space, {16, 1 << 20});
  std::vector<Anchor> anchors;
  std::vector<kvmeld::Fragment> deltas;
  for (std::uint8_t n = 0; n < names; ++n) {
    anchors.push_back(bare(n));
    deltas.push_back(*kvmeld::anchors::measure_offset(anchors[n].base, anchors[n].base));
  }
  std::atomic<bool> stop{false};
  std::atomic<int> broken{0}, reused{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      std::uint64_t last = 0;
      std::vector<std::shared_ptr<const Anchor>> held;
      for (std::size_t i = static_cast<std::size_t>(r); !stop.load(); ++i) {
        const auto now = pool.snapshot();
        if (now->version < last || !whole(*now) || now->table.size() > 16) broken.fetch_add(1);
        last = now->version;
        const Anchor& a = anchors[i % names];
        auto found = pool.look_up(
            {}, {&space, {.tokens = a.base.tokens()}, a.vector, context(i % 2), {.tokens = 2}});
        if (found.decision.reuses()) {
          reused.fetch_add(1);
          for (auto& anchor : found.anchors) held.push_back(std::move(anchor));
        }
        for (const auto& anchor : held) {  // perhaps evicted long ago
          if (anchor->base.payloads()[0].byte_count != 64 ||
              anchor->find(context(0)) == anchor->find(context(1)))
            broken.fetch_add(1);
        }
        if (held.size() > 8) held.clear();
      }
    });
  }
  for (std::uint64_t w = 0; w < 2; ++w) {
    threads.emplace_back([&, w] {
      for (std::size_t i = 0; i < 600; ++i) {
        Anchor more = anchors[(i * (w + 5)) % names];
        more.offsets = {{context(w), deltas[(i * (w + 5)) % names], {}}};
        if (!pool.commit(more)) broken.fetch_add(1);
        if (i % 97 == 0) pool.erase(anchors[i % names].id);
        if (i % 16 == 0) std::this_thread::yield();
      }
    });
  }
  threads[3].join();
  threads[4].join();
  stop = true;
  for (int r = 0; r < 3; ++r) threads[static_cast<std::size_t>(r)].join();
  REQUIRE(broken == 0);
  REQUIRE(pool.size() <= 16);
  REQUIRE(reused + 1 > 0);
}

TEST_CASE("concurrent commits to one anchor all survive") {
  AnchorPool<> pool(AnchorSpace::of(*shape), {4, 1 << 20});
  const Anchor anchor = bare(1);
  const auto delta = *kvmeld::anchors::measure_offset(anchor.base, anchor.base);
  REQUIRE(pool.commit(anchor).ok());
  constexpr std::uint64_t each = 50;
  std::vector<std::thread> threads;
  std::atomic<int> merged{0};
  for (std::uint64_t w = 0; w < 4; ++w) {
    threads.emplace_back([&, w] {
      for (std::uint64_t c = 0; c < each; ++c) {
        const auto done = pool.commit(anchor.id, {context(w * each + c), delta, {}});
        if (done.ok() && *done == kvmeld::anchors::CommitResult::merged) merged.fetch_add(1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  REQUIRE(merged == 4 * each);
  REQUIRE(pool.snapshot()->table.anchor(0)->offsets.size() == 4 * each);
  REQUIRE(pool.snapshot()->version == 4 * each + 1);
}
