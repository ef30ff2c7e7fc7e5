#pragma once

/// When a segment is reused: blend weights, decisions, and eviction policies.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/math.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// ‖a − b‖₂ in f64, channels ascending; NaN where the lengths differ or an element is not finite.
[[nodiscard]] inline double l2_distance(std::span<const float> a,
                                        std::span<const float> b) noexcept {
  if (a.size() != b.size()) return __builtin_nan("");
  double sum = 0;
  for (std::size_t c = 0; c < a.size(); ++c) {
    const double x = static_cast<double>(a[c]) - static_cast<double>(b[c]);
    sum = fma(x, x, sum);
  }
  return std::isfinite(sum) ? math::sqrt(sum) : __builtin_nan("");
}

/// softmax(−d / temperature), in the order of the distances, f64.
///
/// The nearest has e^0, so the sum never underflows; weights far behind it may be 0. Temperature 0
/// is the limit: the nearest, in equal parts where several are. Distances are finite and at least
/// 0, temperature finite and at least 0. O(n).
[[nodiscard]] inline std::vector<double> softmax_weights(std::span<const double> distances,
                                                         double temperature) {
  std::vector<double> weights(distances.size());
  if (weights.empty()) return weights;
  const double nearest = *std::min_element(distances.begin(), distances.end());
  double total = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double behind = distances[i] - nearest;
    weights[i] = behind == 0 ? 1.0 : temperature == 0 ? 0.0 : math::exp(-(behind / temperature));
    total += weights[i];
  }
  for (double& w : weights) w /= total;
  return weights;
}

/// −Σ w ln w, in nats; 0 ln 0 = 0.
[[nodiscard]] inline double entropy(std::span<const double> weights) noexcept {
  double sum = 0;
  for (const double w : weights) {
    if (w > 0) sum = fma(-w, math::log(w), sum);
  }
  return sum > 0 ? sum : 0.0;
}

/// Indices of the fewest weights that hold at least `mass` of all, heaviest first, of equals the
/// earlier one.
[[nodiscard]] inline std::vector<std::uint32_t> nucleus(std::span<const double> weights,
                                                        double mass) {
  std::vector<std::uint32_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::uint32_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return weights[a] > weights[b]; });
  double held = 0;
  std::size_t kept = 0;
  while (kept < order.size() && (kept == 0 || held < mass) && weights[order[kept]] > 0)
    held += weights[order[kept++]];
  order.resize(kept);
  return order;
}

/// Weights of every token by distances of its own, (anchor, token): each token's are softmax(−d /
/// temperature) over the anchors.
[[nodiscard]] inline std::vector<float> token_weights(std::span<const double> distances,
                                                      std::size_t anchors, double temperature) {
  std::vector<float> out(distances.size());
  const std::size_t tokens = anchors == 0 ? 0 : distances.size() / anchors;
  std::vector<double> column(anchors);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t a = 0; a < anchors; ++a) column[a] = distances[a * tokens + t];
    const std::vector<double> weights = softmax_weights(column, temperature);
    for (std::size_t a = 0; a < anchors; ++a) out[a * tokens + t] = static_cast<float>(weights[a]);
  }
  return out;
}

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

/// How an anchor was used, in ticks of its pool: a tick is a change of the pool or a look-up that
/// reused something.
struct AnchorUse {
  std::uint64_t inserted = 0;   ///< tick of its first commit; no two anchors share one
  std::uint64_t last_used = 0;  ///< tick of its last commit or reuse
  std::uint64_t uses = 0;       ///< reuses
};

/// Picks the anchor that leaves a full pool: an index into the uses of those that may.
///
/// Semantic requirements: the choice depends on the uses alone, not on their order; `uses` is not
/// empty.
template <class E>
concept EvictionPolicy = std::copyable<E> &&
    requires(const E& eviction, std::span<const AnchorUse> uses, Hasher& hasher) {
  { eviction.victim(uses) } -> std::same_as<std::size_t>;
  eviction.digest(hasher);
};

/// Evicts what was used longest ago. O(n).
struct LRU {
  [[nodiscard]] std::size_t victim(std::span<const AnchorUse> uses) const noexcept {
    const auto key = [](const AnchorUse& u) { return std::tuple(u.last_used, u.inserted); };
    return static_cast<std::size_t>(
        std::min_element(uses.begin(), uses.end(),
                         [&](const auto& a, const auto& b) { return key(a) < key(b); }) -
        uses.begin());
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.LRU"); }
};

/// Evicts what was used least often, of equals what was used longest ago. O(n).
struct LFU {
  [[nodiscard]] std::size_t victim(std::span<const AnchorUse> uses) const noexcept {
    const auto key = [](const AnchorUse& u) { return std::tuple(u.uses, u.last_used, u.inserted); };
    return static_cast<std::size_t>(
        std::min_element(uses.begin(), uses.end(),
                         [&](const auto& a, const auto& b) { return key(a) < key(b); }) -
        uses.begin());
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.LFU"); }
};

/// Evicts the least used of the `window` oldest, so that a newcomer has time to be used. O(n).
struct WindowLFU {
  std::size_t window = 100;  ///< 0 counts as 1: first in, first out

  [[nodiscard]] std::size_t victim(std::span<const AnchorUse> uses) const {
    std::uint64_t newest = ~std::uint64_t{0};  // of the window
    const std::size_t count = (std::max)(window, std::size_t{1});
    if (count < uses.size()) {
      std::vector<std::uint64_t> ages;
      for (const AnchorUse& u : uses) ages.push_back(u.inserted);
      const auto last = ages.begin() + static_cast<std::ptrdiff_t>(count - 1);
      std::nth_element(ages.begin(), last, ages.end());
      newest = *last;
    }
    std::size_t best = uses.size();
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (uses[i].inserted > newest) continue;
      const auto key = [](const AnchorUse& u) {
        return std::tuple(u.uses, u.last_used, u.inserted);
      };
      if (best == uses.size() || key(uses[i]) < key(uses[best])) best = i;
    }
    return best;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.WindowLFU");
    hasher.value(static_cast<std::uint64_t>(window));
  }
};

}  // namespace anchors

KVMELD_NAMESPACE_END
