#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Why a segment is, or is not, made from anchors. Every decision has one.
enum class ReuseReason : std::uint8_t {
  reuse,              ///< blend the chosen anchors' offsets
  empty_segment,      ///< no tokens: nothing to reuse and nothing to prefill
  invalid_rule,       ///< a parameter of the rule outside its range
  model_differs,      ///< the pool is another model's
  tokenizer_differs,  ///< the pool is another tokenizer's
  layout_differs,     ///< the pool holds caches of another shape, dtype or rope
  tenant_differs,     ///< the pool is another tenant's
  /// The pool's bases were encoded behind something else: its offsets lead away from other bases.
  base_differs,
  unsigned_segment,  ///< the signature policy refused its input
  exact_required,    ///< the consumer takes no approximate K/V
  /// The segment would end behind the positions that the model was trained on.
  beyond_trained_context,
  empty_pool,           ///< no anchors yet
  below_threshold,      ///< none is similar enough
  too_short,            ///< every similar anchor is shorter than the segment
  no_offset,            ///< none of those that are long enough holds an offset for this context
  partly_evicted,       ///< their offsets lack tokens that a sliding-window layer dropped
  distance_not_finite,  ///< the distances to all that are left are NaN or infinite
  too_few_anchors,      ///< fewer than `min_anchors`
  uncertain,            ///< H(w) > γ log |A|: no anchor stands out, make a new one
  not_cheaper,          ///< blending would take as long as prefilling
};
inline constexpr std::size_t reuse_reasons = static_cast<std::size_t>(ReuseReason::not_cheaper) + 1;

/// The name of a reason as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(ReuseReason reason) noexcept {
  constexpr std::array<std::string_view, reuse_reasons> names = {"reuse",
                                                                 "empty_segment",
                                                                 "invalid_rule",
                                                                 "model_differs",
                                                                 "tokenizer_differs",
                                                                 "layout_differs",
                                                                 "tenant_differs",
                                                                 "base_differs",
                                                                 "unsigned_segment",
                                                                 "exact_required",
                                                                 "beyond_trained_context",
                                                                 "empty_pool",
                                                                 "below_threshold",
                                                                 "too_short",
                                                                 "no_offset",
                                                                 "partly_evicted",
                                                                 "distance_not_finite",
                                                                 "too_few_anchors",
                                                                 "uncertain",
                                                                 "not_cheaper"};
  const auto i = static_cast<std::size_t>(reason);
  return i < names.size() ? names[i] : "unknown";
}

/// How often each reason was given. Any thread may count and read.
class ReasonCounters {
 public:
  void count(ReuseReason reason) noexcept {
    counts_[static_cast<std::size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t operator[](ReuseReason reason) const noexcept {
    return counts_[static_cast<std::size_t>(reason)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t total() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& c : counts_) sum += c.load(std::memory_order_relaxed);
    return sum;
  }

 private:
  std::array<std::atomic<std::uint64_t>, reuse_reasons> counts_{};
};

KVMELD_NAMESPACE_END
