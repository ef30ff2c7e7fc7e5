// Anchors' payloads in host memory and a file store: what is used comes back up, what is not falls.
//
//   bash examples/run.sh tiers

#include <cstdio>
#include <filesystem>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/tiers.hpp>
#include <kvmeld/stores/file.hpp>
#include <vector>

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

int main() {
  const auto folder = std::filesystem::temp_directory_path() / "kvmeld_example_tiers";
  std::filesystem::remove_all(folder);
  auto store = toy::value(stores::FileStore::open({.path = folder.string()}));
  const anchors::Anchor first = measured(1), second = measured(2);
  anchors::AnchorPool<> pool(anchors::AnchorSpace::of(first.base), {});
  // Host memory for less than one of them; the rest goes to files. A device tier stands before both
  // (docs/anchor_peers.md).
  anchors::AnchorTiers<> tiers(store, {.host_bytes = first.bytes() - 8, .file_bytes = 1 << 24});
  toy::check(tiers.commit(pool, first).status());
  toy::check(tiers.commit(pool, second).status());

  // A worker of the host's moves payloads; the path of a request never waits for it.
  const auto move_all = [&] {
    for (auto step = tiers.step(); step && step->moved;) step = tiers.step();
  };
  move_all();
  bool all_found = true;
  for (const anchors::Anchor* text : {&first, &second, &first}) {
    const auto found = pool.look_up({.gamma = 1}, {.space = &pool.space(),
                                                   .signature = {text->base.tokens(), text->vector},
                                                   .vector = text->vector,
                                                   .context = prompt_so_far,
                                                   .request = {.tokens = 24}});
    // Empty unless all are in memory: then prefill this time, and what was asked for is on its way.
    bool at_hand = !tiers.take(found.anchors, prompt_so_far).offsets.empty();
    std::printf("text %d: %s", text == &first ? 1 : 2, at_hand ? "at hand\n" : "in a file, ");
    if (!at_hand) {
      move_all();
      at_hand = !tiers.take(found.anchors, prompt_so_far).offsets.empty();
      std::puts(at_hand ? "at hand after moving" : "lost");
    }
    all_found = all_found && at_hand;
  }
  std::filesystem::remove_all(folder);
  return all_found ? 0 : 1;
}
