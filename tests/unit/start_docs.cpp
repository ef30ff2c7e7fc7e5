// The start of docs/start.md with an engine of one's own, compiled and run; the last case checks
// that the page shows all three starts word for word.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/layouts.hpp>

#include "support/catch.hpp"
#include "support/page_snippets.hpp"

// The program itself, whose main the tests call; it is built as an example, too. Its headers are
// included above, so that its names stay in this file.
namespace {
#define main own_engine
#include "../../examples/paged.cpp"
#undef main
}  // namespace

TEST_CASE("two agents' blocks become one sequence of a third") {
  CHECK(own_engine() == 0);
  Engine engine;
  for (std::size_t l = 0; l < engine.keys.size(); ++l) {
    for (std::size_t i = 0; i < engine.values[l].size(); ++i) {
      // Halves from 1 to 2: sign 0, exponent 15, a mantissa that tells rows and layers apart.
      const auto half = static_cast<std::uint16_t>(0x3c00U | ((i + l * 7) * 40503U & 0x3ffU));
      engine.values[l][i] = half, engine.keys[l][i] = half ^ 0x155U;
    }
  }
  const std::vector<std::int32_t> alice{9, 3, 40}, bob{7, 8}, merged{50, 20, 21, 11};
  FragmentSet said;
  std::vector<TokenId> ids(40, 100), fewer(25, 500);
  const auto a = seal(*engine.view(alice, 40), {.tokens = ids, .drop_first = 8});
  const auto b = seal(*engine.view(bob, 25), {.tokens = fewer, .drop_first = 5});
  REQUIRE(a.ok());
  REQUIRE(b.ok());
  REQUIRE(said.insert(*a, Dot{0, 0}).ok());
  REQUIRE(said.insert(*b, Dot{1, 0}).ok());
  const auto into = engine.view(merged, 52);
  REQUIRE(into.ok());
  const auto report = render(exec::cpu, said, merger(ByDot{}), *into);
  INFO(report.status().message());
  REQUIRE(report.ok());
  CHECK(report->tokens == 52);
  // A value is not rotated: token 0 of the result is the ninth of Alice's, who dropped eight.
  const auto row = [&](std::int64_t block, std::int64_t token) {
    return engine.values[3].data() + (block * Engine::block_size + token) * Engine::row;
  };
  CHECK(std::equal(row(50, 0), row(50, 1), row(9, 8)));
  // Token 32 is the sixth of Bob's, who dropped five.
  CHECK(std::equal(row(21, 0), row(21, 1), row(7, 5)));
  CHECK_FALSE(std::equal(row(21, 0), row(21, 1), row(7, 4)));
}

TEST_CASE("docs/start.md shows the three starts") {
  test::check_page("docs/start.md",
                   {"examples/paged.cpp", "tests/engine/llama_start.cpp", "tests/redis/start.cpp"});
}
