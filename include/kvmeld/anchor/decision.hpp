#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/blend_weights.hpp>
#include <kvmeld/anchor/reuse_reason.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// When offsets of anchors are taken for a segment's own (docs/anchors.md says how to choose).
struct ReuseRule {
  double similarity = 0.85;  ///< τ: of signatures, for the short list
  double gamma = 0.3;        ///< γ: a new anchor where H(w) > γ log |A|; at 1 and above never
  /// Of softmax(−d / temperature), in the unit of the distances; 0: the nearest alone.
  double temperature = 1.0;
  std::int32_t min_anchors = 1;
  /// Keep the fewest anchors that hold so much of the weight, in (0, 1].
  double nucleus_mass = 1.0;
  /// Most anchors whose exact distance is looked at, nearest signatures first.
  std::int32_t short_list = 64;
};

/// What blending and prefilling cost, measured on this machine; both 0: cost is not asked.
struct ReuseCost {
  double blend_seconds = 0;
  double prefill_seconds = 0;
};

/// Whether whoever reads the K/V may be given an approximation.
enum class Consumer : std::uint8_t { takes_approximate, never_approximate };

/// What an engine wants to place.
struct ReuseRequest {
  std::int64_t tokens = 0;           ///< of the segment
  std::int64_t last_position = 0;    ///< where its last token would stand
  std::int64_t trained_context = 0;  ///< positions that the model was trained on; 0: unknown
  Consumer consumer = Consumer::takes_approximate;
  ReuseCost cost{};
};

/// An anchor as the decision sees it.
struct ReuseCandidate {
  FragmentId id{};
  double distance = 0;      ///< exact, L2
  std::int64_t tokens = 0;  ///< of the anchor
  bool has_offset = false;  ///< for this context
  bool complete = true;     ///< the offset has every token that the segment needs, in every layer
};

/// What to do with a segment, and why.
struct ReuseDecision {
  ReuseReason reason = ReuseReason::empty_pool;
  /// Indices of candidates, ascending by anchor id: empty unless reused.
  std::vector<std::uint32_t> chosen{};
  std::vector<float> weights{};  ///< (chosen) they add up to 1
  double entropy_nats = 0;       ///< of the weights before the nucleus
  std::uint32_t considered = 0;  ///< |A|

  [[nodiscard]] bool reuses() const noexcept { return reason == ReuseReason::reuse; }
};

namespace detail {

[[nodiscard]] inline bool sound(const ReuseRule& rule) noexcept {
  return rule.similarity >= 0 && rule.similarity <= 1 && rule.gamma >= 0 && rule.temperature >= 0 &&
         std::isfinite(rule.temperature) && rule.min_anchors >= 1 && rule.nucleus_mass > 0 &&
         rule.nucleus_mass <= 1 && rule.short_list >= 1;
}

/// What is decided before any anchor is looked at; `reuse` where nothing is yet.
[[nodiscard]] inline ReuseReason refuse_early(const ReuseRule& rule,
                                              const ReuseRequest& request) noexcept {
  if (request.tokens <= 0) return ReuseReason::empty_segment;
  if (!sound(rule)) return ReuseReason::invalid_rule;
  if (request.consumer == Consumer::never_approximate) return ReuseReason::exact_required;
  if (request.trained_context > 0 && request.last_position >= request.trained_context)
    return ReuseReason::beyond_trained_context;
  return ReuseReason::reuse;
}

}  // namespace detail

/// Decides over short-listed anchors: length, offsets, distances, entropy, cost, in this order; the
/// first that fails is the reason.
///
/// A = candidates at least as long as the segment that hold an offset for its context, at a finite
/// distance; w = softmax(−d/temperature) over A; a new anchor is asked for where A is smaller than
/// `min_anchors` or H(w) > γ log |A| (one anchor has entropy 0 and passes). The answer depends on
/// the candidates and not on their order; equal distances have equal weights. O(n log n). KVCOMM:
/// Online Cross-context KV-cache Communication (2025), the anchor rule.
[[nodiscard]] inline ReuseDecision decide(const ReuseRule& rule, const ReuseRequest& request,
                                          std::span<const ReuseCandidate> candidates) {
  ReuseDecision out;
  out.reason = detail::refuse_early(rule, request);
  if (!out.reuses()) return out;
  const auto answer = [&](ReuseReason reason) {
    out.reason = reason;
    return out;
  };
  std::vector<std::uint32_t> a(candidates.size());
  std::iota(a.begin(), a.end(), std::uint32_t{0});
  if (a.empty()) return answer(ReuseReason::below_threshold);
  const auto keep = [&](const auto& test) {
    std::erase_if(a, [&](std::uint32_t i) { return !test(candidates[i]); });
    return !a.empty();
  };
  if (!keep([&](const ReuseCandidate& c) { return c.tokens >= request.tokens; }))
    return answer(ReuseReason::too_short);
  if (!keep([](const ReuseCandidate& c) { return c.has_offset; }))
    return answer(ReuseReason::no_offset);
  if (!keep([](const ReuseCandidate& c) { return c.complete; }))
    return answer(ReuseReason::partly_evicted);
  if (!keep([](const ReuseCandidate& c) { return std::isfinite(c.distance) && c.distance >= 0; }))
    return answer(ReuseReason::distance_not_finite);
  out.considered = static_cast<std::uint32_t>(a.size());
  if (std::cmp_less(a.size(), rule.min_anchors)) return answer(ReuseReason::too_few_anchors);
  std::sort(a.begin(), a.end(),
            [&](std::uint32_t x, std::uint32_t y) { return candidates[x].id < candidates[y].id; });
  std::vector<double> distances;
  for (const std::uint32_t i : a) distances.push_back(candidates[i].distance);
  const std::vector<double> weights = softmax_weights(distances, rule.temperature);
  out.entropy_nats = entropy(weights);
  if (rule.gamma < 1 && out.entropy_nats > rule.gamma * math::log(static_cast<double>(a.size())))
    return answer(ReuseReason::uncertain);
  const ReuseCost& cost = request.cost;
  if ((cost.blend_seconds != 0 || cost.prefill_seconds != 0) &&
      !(cost.blend_seconds < cost.prefill_seconds))
    return answer(ReuseReason::not_cheaper);
  std::vector<std::uint32_t> kept = nucleus(weights, rule.nucleus_mass);
  std::sort(kept.begin(), kept.end());
  double total = 0;
  for (const std::uint32_t k : kept) total += weights[k];
  for (const std::uint32_t k : kept) {
    out.chosen.push_back(a[k]);
    out.weights.push_back(static_cast<float>(weights[k] / total));
  }
  return out;
}

KVMELD_NAMESPACE_END
