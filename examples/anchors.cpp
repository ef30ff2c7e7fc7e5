// A text's K/V in a new prompt without prefill: its own K/V, rotated there and corrected by what
// that place did to the text before (KVCOMM).
//
//   bash examples/run.sh anchors

#include <cstdio>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/reuse.hpp>
#include <vector>

#include "support/toy.hpp"

using namespace kvmeld;

// What the engine computed for the text at a position: by itself at 0, or inside a prompt.
Fragment prefilled(std::uint32_t seed, std::int64_t position) {
  constexpr std::int64_t tokens = 24;
  std::vector<std::int64_t> positions;
  for (std::int64_t t = 0; t < tokens; ++t) positions.push_back(position + t);
  const auto ids = toy::ids(500, tokens);
  const HostCache rows = toy::cache(toy::geometry(), tokens, seed);
  return toy::value(seal(rows.kv_cache_ref(), {.tokens = ids, .positions = positions}));
}

int main() {
  const Fragment alone = prefilled(1, 0), in_prompt = prefilled(2, 100);
  const Digest128 place{42, 0};  // names what stands before the text: a digest of the prompt so far
  const auto space = anchors::AnchorSpace::of(alone);
  anchors::AnchorPool<> pool(space, {});

  // Of a model the first layer does not depend on what stands before, and the engine computes a
  // prompt's last token for its logits: both are the defaults, and not so for numbers. Once:
  // measure what the place does to the text, and keep it.
  const std::vector<float> vector = toy::value(anchors::mean_value_row(alone));
  anchors::Anchor anchor = toy::value(anchors::make_anchor(alone, vector));
  anchor.offsets.push_back({.context = place,
                            .segment = toy::value(anchors::measure_offset(
                                in_prompt, anchor.base, {.context_free_layers = 0})),
                            .following = {}});
  toy::check(pool.commit(anchor).status());

  // Later: is a text like it known at that place? The decision says why, either way.
  const anchors::AnchorLookup found = pool.look_up(
      {.gamma = 1}, {.space = &space,
                     .signature = {alone.tokens(), vector},
                     .vector = vector,
                     .context = place,
                     .request = {.tokens = alone.token_count(), .last_position = 123}});
  std::printf("%s: %zu anchors\n", std::string(to_string(found.decision.reason)).c_str(),
              found.anchors.size());
  if (!found.decision.reuses()) return 1;  // prefill, and remember

  const anchors::ReusePart part{.base = alone,
                                .position = 100,
                                .offsets = toy::value(anchors::aligned_offsets(
                                    found.anchors, found.decision.weights, place, alone.tokens()))};
  const auto plan = toy::value(anchors::plan_reuse(
      {&part, 1}, alone.geometry(), {.context_free_layers = 0, .compute_last = false}));
  HostCache out(toy::geometry(), plan.tokens());
  std::vector<std::byte> workspace(plan.workspace_bytes());
  toy::check(run(exec::cpu, plan, workspace, out.mutable_ref()).status());

  // The text, the place and the offset are the measured ones here, so the rows are the prefill's.
  double worst = 0;
  const auto* got = reinterpret_cast<const float*>(out.bytes().data());
  const auto* want = reinterpret_cast<const float*>(in_prompt.payloads()[0].bytes.get());
  for (std::size_t i = 0; i < out.bytes().size() / sizeof(float); ++i)
    worst = (std::max)(worst, std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
  std::printf("%lld tokens written, no further than %.1e from their prefill\n",
              static_cast<long long>(plan.tokens()), worst);
  return worst < 1e-5 ? 0 : 1;
}
