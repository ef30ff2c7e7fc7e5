// An engine of your own with paged blocks: two agents' block tables in, a third one out.
//
//   bash examples/run.sh paged

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/layouts.hpp>

#include "support/toy.hpp"

using namespace kvmeld;

// Per layer one tensor (key or value, block, token in block, head, channel); a sequence is a table
// of blocks and a length.
struct Engine {
  static constexpr std::int64_t blocks = 32, block_size = 4, heads = 2, channels = 32;
  std::shared_ptr<const Geometry> geometry = toy::geometry();
  std::vector<std::vector<std::byte>> layers{2};
  std::uint32_t seed = 1;

  Engine() {
    for (auto& layer : layers)
      layer.resize(2 * blocks * block_size * heads * channels * sizeof(float));
  }
  // Shows a sequence where it lies; nothing is copied.
  MutableKvCacheRef view(std::span<const std::int32_t> table, std::int64_t tokens) {
    const Buffers<std::byte> memory(layers.begin(), layers.end());
    return toy::value(paged_view(geometry, memory,
                                 {.tokens = TokenPlacement::block_table(table, tokens),
                                  .layout = PagedLayout::kv_block_token_head,
                                  .blocks = blocks,
                                  .block_size = block_size}));
  }
  // Stands for prefill: what the model makes of these tokens lies in these blocks then.
  void prefill(std::span<const std::int32_t> table, std::span<const TokenId> tokens) {
    const auto count = static_cast<std::int64_t>(tokens.size());
    const HostCache made = toy::cache(geometry, count, seed++);
    const std::vector<std::int64_t> all = toy::first_indices(count);
    toy::check(gather(exec::seq, made.kv_cache_ref(), std::span(all), view(table, count)).status());
  }
};

int main() {
  Engine engine;
  constexpr std::int64_t lead_in = 3;  // every agent reads these first; they are not its own
  const std::vector<std::int32_t> alice{7, 2, 19}, bob{4, 30}, merged{11, 0, 25};
  std::vector<Fragment> said;
  for (const auto& [table, first] : {std::pair(&alice, 100), std::pair(&bob, 200)}) {
    const std::int64_t own = table == &alice ? 7 : 4;
    std::vector<TokenId> tokens = toy::ids(1, lead_in);
    const Digest128 dropped = lead_in_digest(tokens);
    for (const TokenId id : toy::ids(first, own)) tokens.push_back(id);
    engine.prefill(*table, tokens);
    // Copies the agent's own rows; positions are 0, 1, 2, … where none are given.
    said.push_back(toy::value(
        seal(engine.view(*table, lead_in + own),
             {.tokens = tokens, .drop_first = lead_in, .context = {.lead_in = dropped}})));
  }
  std::vector<Digest128> content;
  for (const bool bob_first : {false, true}) {  // as two replicas heard it
    FragmentSet set;
    for (const std::uint64_t agent : {bob_first ? 1U : 0U, bob_first ? 0U : 1U})
      toy::check(set.insert(said[agent], Dot{agent, 0}));
    const auto report = toy::value(render(exec::cpu, set, merger(ByDot{}), engine.view(merged, 11),
                                          {}, {.content_digest = true}));
    content.push_back(*report.content_digest);
    std::printf("%lld tokens, content %016llx\n", static_cast<long long>(report.tokens),
                static_cast<unsigned long long>(content.back().low));
  }
  return content[0] == content[1] ? 0 : 1;  // one cache, whoever was heard first
}
