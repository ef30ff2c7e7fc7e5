// The code of docs/anchors.md, compiled and run; the last case checks that the page shows it word
// for word.
#include <algorithm>
#include <string>
#include <utility>

#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/reuse.hpp>

#include "support/anchor_segments.hpp"
#include "support/page_snippets.hpp"

namespace {

// example-begin: remember
/// A segment was prefilled by itself and in a prompt: its base, and what this place does to it,
/// become an anchor.
kvmeld::Status remember(kvmeld::anchors::AnchorPool<>& pool, const kvmeld::Fragment& alone,
                        const kvmeld::Fragment& in_prompt, const kvmeld::Digest128& place) {
  auto vector = kvmeld::anchors::mean_value_row(alone);
  if (!vector) return vector.error();
  auto anchor = kvmeld::anchors::make_anchor(alone, *std::move(vector));
  if (!anchor) return anchor.error();
  auto delta = kvmeld::anchors::measure_offset(in_prompt, anchor->base);
  if (!delta) return delta.error();
  anchor->offsets.push_back({.context = place, .segment = *std::move(delta), .following = {}});
  return pool.commit(*anchor).status();
}
// example-end

// example-begin: reuse
/// A segment at a place of a prompt without prefill; `run` writes it. Or the reason why not: then
/// prefill, and remember.
kvmeld::Result<kvmeld::anchors::ReusePlan> reuse(const kvmeld::anchors::AnchorPool<>& pool,
                                                 const kvmeld::Fragment& alone,
                                                 const kvmeld::Digest128& place,
                                                 std::int64_t position) {
  const auto vector = kvmeld::anchors::mean_value_row(alone);
  if (!vector) return vector.error();
  const kvmeld::anchors::AnchorSpace space = kvmeld::anchors::AnchorSpace::of(alone);
  const kvmeld::anchors::AnchorLookup found =
      pool.look_up({}, {.space = &space,
                        .signature = {alone.tokens(), *vector},
                        .vector = *vector,
                        .context = place,
                        .request = {.tokens = alone.token_count(),
                                    .last_position = position + alone.token_count() - 1}});
  if (!found.decision.reuses())
    return {kvmeld::ErrorCode::not_found, std::string(to_string(found.decision.reason))};
  auto offsets = kvmeld::anchors::aligned_offsets(found.anchors, found.decision.weights, place,
                                                  alone.tokens());
  if (!offsets) return offsets.error();
  const kvmeld::anchors::ReusePart part{
      .base = alone, .position = position, .offsets = *std::move(offsets)};
  return kvmeld::anchors::plan_reuse({&part, 1}, alone.geometry());
}
// example-end

// example-begin: temperature
/// A rule in the unit of the distances that a pool has; take it once, when the pool is warm.
kvmeld::anchors::ReuseRule rule_for(const kvmeld::anchors::AnchorPool<>& pool) {
  kvmeld::anchors::ReuseRule rule;
  rule.temperature = kvmeld::anchors::spread_temperature(
      kvmeld::anchors::anchor_distances(pool.snapshot()->table), rule.gamma);
  return rule;
}
// example-end

}  // namespace

TEST_CASE("a remembered segment is reused at another position, and is the K/V measured there") {
  const auto shape = test::geometry({.layers = 3, .heads = 2, .channels = 8});
  const test::Segment segment(shape, 6, 1);
  kvmeld::anchors::AnchorPool<> pool(kvmeld::anchors::AnchorSpace::of(*shape),
                                     {.anchors = 10, .bytes = 1 << 20});
  const kvmeld::Digest128 place{1, 2};
  REQUIRE(reuse(pool, segment.at(0), place, 40).status().message().find("empty_pool") !=
          std::string::npos);
  REQUIRE(remember(pool, segment.at(0), segment.in_context(7).at(20), place).ok());
  const auto plan = reuse(pool, segment.at(0), place, 40);
  REQUIRE(plan.ok());
  REQUIRE(plan->holes().size() == 1);  // the prompt's last token
  test::TestCache out(shape, plan->tokens()), real(shape, plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  segment.in_context(7).write(real, 40);
  segment.in_context(7).write(out, 40);
  for (std::size_t p = 0; p < out.planes(); ++p) {
    // head 0 of all but the hole must be written
    for (std::int64_t t = 0; t + 1 < plan->tokens(); ++t) out.set(p, t, 0, 0, 99);
  }
  REQUIRE(kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out()).ok());
  REQUIRE(test::difference(out.buffers(), real.buffers()) < 1e-5);
  REQUIRE(reuse(pool, segment.at(0), kvmeld::Digest128{3, 4}, 40)
              .status()
              .message()
              .find("no_offset") != std::string::npos);
}

TEST_CASE("a rule's temperature follows the distances of the pool") {
  const auto shape = test::geometry({.layers = 3, .heads = 2, .channels = 8});
  kvmeld::anchors::AnchorPool<> pool(kvmeld::anchors::AnchorSpace::of(*shape),
                                     {.anchors = 10, .bytes = 1 << 20});
  REQUIRE(rule_for(pool).temperature == 1);
  for (std::uint64_t n = 1; n < 6; ++n)
    REQUIRE(remember(pool, test::Segment(shape, 6, n).at(0),
                     test::Segment(shape, 6, n).in_context(7).at(20), {1, 2})
                .ok());
  auto distances = kvmeld::anchors::anchor_distances(pool.snapshot()->table);
  std::sort(distances.begin(), distances.end());
  REQUIRE(distances.size() == 10);
  REQUIRE(rule_for(pool).temperature == Approx(distances[5] / 7.2).epsilon(0.05));
}

TEST_CASE("docs/anchors.md shows this code") {
  test::check_page("docs/anchors.md",
                   {"tests/unit/anchor_docs.cpp", "tests/unit/prompt_template.cpp"});
}
