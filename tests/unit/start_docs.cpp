// The start of docs/start.md with an engine of one's own, compiled and run; the last case checks
// that the page shows all three starts word for word.
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/page_snippets.hpp"

// example-begin: own-engine
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/layouts.hpp>

// One tensor a layer, as vLLM has it: (key or value, block, token in block, head, channel), f16.
struct PagedEngine {
  static constexpr std::int64_t blocks = 64, block_size = 16;
  std::shared_ptr<const kvmeld::Geometry> geometry;
  std::vector<std::vector<std::byte>> layers;

  explicit PagedEngine(std::shared_ptr<const kvmeld::Geometry> of)
      : geometry(std::move(of)), layers(geometry->layers.size()) {
    for (auto& layer : layers) layer.resize(2 * blocks * block_size * 2 * 64 * 2);
  }
  // A sequence is a table of blocks and a length; a view of it copies nothing.
  kvmeld::Result<kvmeld::MutableKvCacheRef> view(std::span<const std::int32_t> table,
                                                 std::int64_t tokens) {
    kvmeld::Buffers<std::byte> memory(layers.begin(), layers.end());
    return kvmeld::paged_view(geometry, memory,
                              {.tokens = kvmeld::TokenPlacement::block_table(table, tokens),
                               .blocks = blocks,
                               .block_size = block_size});
  }
};

// What a model's cache is made of, and how its keys rotate: 24 layers, 2 KV heads of 64 channels.
std::shared_ptr<const kvmeld::Geometry> my_geometry() {
  using namespace kvmeld;
  const RopeSpec rope = RopeSpec::rotary(64, 1e6, RopePairing::half_split);
  auto geometry = std::make_shared<Geometry>();
  geometry->model = "my-model-f16";
  geometry->layers.assign(24, attention_layer(ElementType::f16, 2, 64, rope));
  return geometry;
}

// What one agent says: its tokens stood behind a lead-in, which is context and is dropped.
kvmeld::Result<kvmeld::Fragment> say(const kvmeld::KvCacheRef& cache,
                                     std::span<const kvmeld::TokenId> tokens,
                                     std::int64_t lead_in) {
  const auto dropped = tokens.first(static_cast<std::size_t>(lead_in));
  return kvmeld::seal(cache, {.tokens = tokens,
                              .drop_first = lead_in,
                              .context = {.lead_in = kvmeld::lead_in_digest(dropped)}});
}

// All that agents have said, in one order, at the positions that follow, into one more sequence.
kvmeld::Result<kvmeld::RenderReport> meld(const kvmeld::FragmentSet& said,
                                          const kvmeld::MutableKvCacheRef& into) {
  using namespace kvmeld;
  return render(exec::cpu, said, merger(ByDot{}, Aligner{Concat{}}), into);
}
// example-end

TEST_CASE("two agents' pages become one sequence of a third") {
  using namespace kvmeld;
  const auto geometry = my_geometry();
  PagedEngine engine(geometry);
  for (std::size_t l = 0; l < engine.layers.size(); ++l) {
    for (std::size_t i = 0; i + 1 < engine.layers[l].size(); i += 2) {
      // Halves from 1 to 2: sign 0, exponent 15, a mantissa that tells rows apart.
      const auto half = static_cast<std::uint16_t>(0x3c00U | ((i / 2 + l * 7) * 40503U & 0x3ffU));
      std::memcpy(&engine.layers[l][i], &half, 2);
    }
  }
  const std::int32_t alice_blocks[] = {9, 3, 40}, bob_blocks[] = {7, 8},
                     all_blocks[] = {50, 20, 21, 11};
  std::vector<TokenId> alice_tokens(40), bob_tokens(25);
  for (std::size_t i = 0; i < 40; ++i) alice_tokens[i] = static_cast<TokenId>(100 + i);
  for (std::size_t i = 0; i < 25; ++i) bob_tokens[i] = static_cast<TokenId>(500 + i);
  FragmentSet said;
  const auto alice = say(*engine.view(alice_blocks, 40), alice_tokens, 8);
  const auto bob = say(*engine.view(bob_blocks, 25), bob_tokens, 5);
  REQUIRE(alice.ok());
  REQUIRE(bob.ok());
  REQUIRE(said.insert(*alice, Dot{0, 0}).ok());
  REQUIRE(said.insert(*bob, Dot{1, 0}).ok());
  const auto merged = engine.view(all_blocks, 52);
  REQUIRE(merged.ok());
  const auto report = meld(said, *merged);
  INFO(report.status().message());
  REQUIRE(report.ok());
  CHECK(report->tokens == 52);
  // A value is not rotated: token 0 of the result is the ninth of Alice's, who dropped eight.
  const auto row = [&](std::int32_t block, std::int64_t token) {
    const std::int64_t slot =
        PagedEngine::blocks * PagedEngine::block_size + block * PagedEngine::block_size + token;
    return engine.layers[5].data() + slot * 2 * 64 * 2;
  };
  CHECK(std::memcmp(row(50, 0), row(9, 8), 2 * 64 * 2) == 0);
  // Token 32 is the sixth of Bob's, who dropped five.
  CHECK(std::memcmp(row(21, 0), row(7, 5), 2 * 64 * 2) == 0);
}

TEST_CASE("docs/start.md shows the three starts") {
  test::check_page("docs/start.md", {"tests/unit/start_docs.cpp", "tests/engine/llama_start.cpp",
                                     "tests/redis/start.cpp"});
}
