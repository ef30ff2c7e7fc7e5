// An engine of your own with paged blocks: two agents' block tables in, a third one out.
//
//   bash examples/run.sh paged

// example-begin: own-engine
#include <cstdio>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/layouts.hpp>

using namespace kvmeld;

struct Engine {
  static constexpr std::int64_t blocks = 64, block_size = 16, row = 2 * 64;  // heads * channels
  std::shared_ptr<Geometry> geometry = std::make_shared<Geometry>();
  std::vector<std::vector<std::uint16_t>> keys, values;  // (block, token in block, head, channel)
  Engine() {  // 4 layers, 2 KV heads of 64 channels, and how the engine rotates its keys
    const auto rope = RopeSpec::rotary(64, 1e6, RopePairing::half_split);
    geometry->model = "my-model-f16";
    geometry->layers.assign(4, attention_layer(ElementType::f16, 2, 64, rope));
    std::vector<std::uint16_t> halves(blocks * block_size * row);  // what prefill would compute
    for (std::uint16_t i = 0; auto& half : halves) half = i = (i * 25173U + 13849U) & 0x3fffU;
    keys.assign(4, halves), values = keys;
  }
  // A sequence is a table of blocks and a length; a view of it copies nothing.
  Result<MutableKvCacheRef> view(std::span<const std::int32_t> table, std::int64_t tokens) {
    KeyValueBuffers<std::byte> tensors;
    for (auto& layer : keys) tensors.keys.push_back(std::as_writable_bytes(std::span(layer)));
    for (auto& layer : values) tensors.values.push_back(std::as_writable_bytes(std::span(layer)));
    return paged_view(geometry, tensors,
                      {.tokens = TokenPlacement::block_table(table, tokens),
                       .layout = PagedLayout::block_token_head,
                       .blocks = blocks,
                       .block_size = block_size});
  }
};

int main() {
  const auto fail = [](const Status& why) { return std::puts(why.message().c_str()), 1; };
  Engine engine;
  const std::vector<TokenId> lead_in(8, 7);  // both agents read this first; it is not their own
  const std::vector<std::int32_t> tables[] = {{9, 3, 40}, {7, 8}};
  std::vector<Fragment> read;
  for (const std::size_t agent : {0U, 1U}) {
    std::vector<TokenId> tokens = lead_in;
    tokens.resize(agent == 0 ? 40 : 25, agent == 0 ? 100 : 500);  // and its own
    const auto cache = engine.view(tables[agent], std::ssize(tokens));
    if (!cache) return fail(cache.error());
    const Context behind{.lead_in = lead_in_digest(lead_in)};
    const auto own = seal(*cache, {.tokens = tokens, .drop_first = 8, .context = behind});
    if (!own) return fail(own.error());
    read.push_back(*own);
  }
  const std::vector<std::int32_t> merged[] = {{50, 20, 21, 11}, {1, 30, 2, 60}};
  Digest128 content[2];
  for (const std::size_t first : {0U, 1U}) {  // whoever is heard first
    FragmentSet set;
    if (!set.insert(read[first]) || !set.insert(read[1 - first])) return 1;
    const auto into = engine.view(merged[first], 32 + 17);  // all tokens but the lead-ins
    if (!into) return fail(into.error());
    if (auto done = render(exec::cpu, set, merger(), *into); !done) return fail(done.error());
    content[first] = *content_digest(*into);
    std::puts(content[first].hex().c_str());
  }
  return content[0] == content[1] ? 0 : 1;
}
// example-end
