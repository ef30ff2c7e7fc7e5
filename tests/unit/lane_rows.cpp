// The form that devices run, on the CPU: its reduction tree, and rendered bytes equal to the host's
// rows.
#include <cstdint>
#include <memory>
#include <vector>

#include "support/lane_work.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::Fuser;
using kvmeld::RopePairing;

}  // namespace

TEST_CASE("lanes join in the tree 16, 8, 4, 2, 1 and all see the total") {
  std::uint64_t out[32] = {};
  const test::Bracket work{out};
  REQUIRE(kvmeld::exec::lanes.bulk(1, work).ok());
  std::uint64_t states[32];
  for (std::uint64_t l = 0; l < 32; ++l) states[l] = test::Bracket::mix(l + 1);
  for (const std::size_t half : {16U, 8U, 4U, 2U, 1U}) {
    std::uint64_t next[32] = {};
    for (std::size_t l = 0; l < half; ++l)
      next[l] = test::Bracket::mix(3 * states[l] + states[l + half]);
    std::copy(next, next + 32, states);
  }
  for (const std::uint64_t total : out) CHECK(total == states[0]);
}

TEST_CASE("a row work without host form runs in lanes everywhere") {
  const std::vector<float> rows{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  for (const bool threaded : {false, true}) {
    std::vector<float> sums(2);
    const test::RowSum work{rows.data(), sums.data(), 5};
    REQUIRE(
        (threaded ? kvmeld::exec::threads(2).bulk(2, work) : kvmeld::exec::seq.bulk(2, work)).ok());
    CHECK(sums == std::vector<float>{15 + 32, 40 + 32});
  }
}

TEST_CASE("crowds of contributions render the same bytes in lanes and in rows") {
  const auto type = GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0);
  const auto pairing = GENERATE(RopePairing::half_split, RopePairing::interleaved);
  const std::int64_t count = GENERATE(2, 63, 64, 65, 130, 400);
  CAPTURE(kvmeld::to_string(type), static_cast<int>(pairing), count);
  // Rotary channels 8 to 88 of 96: pairs reach over the edges of q8_0 blocks.
  const auto g = test::geometry({.type = type,
                                 .layers = 1,
                                 .heads = 2,
                                 .channels = 96,
                                 .value_channels = 64,
                                 .first = 8,
                                 .rotary = 80,
                                 .pairing = pairing});
  std::vector<test::Sealed> spans;
  for (const std::uint64_t seed : {1U, 2U}) {
    const auto positions = test::gapped_positions(40, static_cast<std::int64_t>(seed));
    spans.push_back(test::sealed(g, 40, seed, {.positions = positions}));
  }
  const auto set = test::set_of(spans);
  kvmeld::Target target;
  target.geometry = *g;
  const test::Given given{std::make_shared<const kvmeld::Alignment>(test::crowd(count, 40))};
  const auto layout =
      type == ElementType::bf16 ? test::Layout::split_channels : test::Layout::paged;
  test::render_everywhere(
      set, kvmeld::merger(ById{}, Aligner{given}, Fuser{kvmeld::WeightedMean{}}), target, layout);
  test::render_everywhere(set, kvmeld::merger(ById{}, Aligner{given}, Fuser{kvmeld::Sum{}}), target,
                          layout);
  test::render_everywhere(set, kvmeld::merger(ById{}, Aligner{given}, Fuser{kvmeld::Max{}}), target,
                          layout);
  test::render_everywhere(set, kvmeld::merger(ById{}, Aligner{given}, Fuser{test::SignedPower{}}),
                          target, layout);
}
