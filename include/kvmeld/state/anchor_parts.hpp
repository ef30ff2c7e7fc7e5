#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/unrotate.hpp>
#include <kvmeld/state/anchor_rows.hpp>
#include <kvmeld/state/plan.hpp>

/// What a reuse plan is made of, and what is refused of it.

KVMELD_NAMESPACE_BEGIN

/// An anchor's offset in a blend.
struct ReuseOffset {
  FragmentId anchor{};                     ///< whose it is: the order of the sum, whatever the order given
  Fragment delta{};                        ///< from `measure_offset`; at least as many tokens as the part, unless `rows` says otherwise
  float weight = 1.0F;
  std::vector<float> token_weights{};      ///< (tokens of the part) in place of `weight`; empty: one weight for all
  std::vector<std::int32_t> rows{};        ///< (tokens of the part) token of the offset that belongs to each; −1: none. Empty: one to one
};

/// A run of tokens in the prompt: a segment, or template text that follows one.
struct ReusePart {
  Fragment base{};                         ///< the segment's own, sealed or `unrotated`
  std::int64_t position = 0;               ///< in the prompt, of the part's first token
  std::int64_t first = 0;                  ///< token of the base that it starts with
  std::int64_t tokens = -1;                ///< −1: all from `first` on
  std::vector<ReuseOffset> offsets{};
  bool rotated_only = false;               ///< the base as it is, turned to its place: asked for, never assumed
};

struct ReuseOptions {
  std::int32_t context_free_layers = 1;    ///< leading layers whose K/V depend on the token alone: Δ = 0 there
  bool compute_last = true;                ///< the last token is a hole, since an engine needs its logits
  std::int64_t context_length = 0;         ///< of the target, where frequencies depend on it; 0: last position + 1
};

/// The policies that a reuse plan carries, for executors that ask for its fuser: a `Sum`.
using ReuseMerger = Merger<SelectAll, ById, Concat, detail::BlendSum, SeamNone>;

/// A plan whose K/V is an approximation: `run` executes it as any other, and its `render_id` is no exact render's.
class ReusePlan : public Plan<ReuseMerger> {
 public:
  ReusePlan(detail::PlanCore core, bool approximate) : Plan<ReuseMerger>({}, std::move(core)), approximate_(approximate) {}
  /// Whether anything but the place of a token was changed or left uncorrected: always, unless there is nothing to blend or turn.
  [[nodiscard]] bool approximate() const noexcept { return approximate_; }

 private:
  bool approximate_ = true;
};

namespace detail {

/// One part, checked: its offsets in canonical order, and the plan's sources that they are.
struct ReusePiece {
  const ReusePart* part = nullptr;
  std::int64_t tokens = 0;
  std::uint32_t base = 0;
  std::vector<std::uint32_t> order;    // into part->offsets, ascending by anchor
  std::vector<std::uint32_t> sources;  // (order)
  std::int64_t first_output = 0;

  [[nodiscard]] std::int64_t row(std::size_t offset, std::int64_t token) const noexcept {
    const ReuseOffset& o = part->offsets[order[offset]];
    return o.rows.empty() ? token : o.rows[static_cast<std::size_t>(token)];
  }
  [[nodiscard]] float weight(std::size_t offset, std::int64_t token) const noexcept {
    const ReuseOffset& o = part->offsets[order[offset]];
    return o.token_weights.empty() ? o.weight : o.token_weights[static_cast<std::size_t>(token)];
  }
};

KVMELD_LAZY Status check_reused(const Fragment& fragment, const Geometry& geometry, const char* what, std::size_t part) {
  if (!fragment.valid()) return error(ErrorCode::invalid_argument, "part ", part, ": the ", what, " is an empty Fragment");
  KVMELD_TRY(check_same(fragment.geometry(), geometry));
  if (fragment.payloads()[0].bytes == nullptr) {
    return error(ErrorCode::payload_missing, "part ", part, ": the ", what, " ", fragment.id().hex(), " is evicted; fetch it and plan again");
  }
  return {};
}

KVMELD_LAZY Status check_offset(const ReuseOffset& offset, std::int64_t tokens, std::size_t part) {
  const std::int64_t held = offset.delta.token_count();
  if (!is_unrotated(offset.delta)) return error(ErrorCode::invalid_argument, "part ", part, ": an offset carries positions; offsets come from measure_offset");
  if (!offset.rows.empty() && std::ssize(offset.rows) != tokens) {
    return error(ErrorCode::token_count_mismatch, "part ", part, ": ", offset.rows.size(), " rows of an offset for ", tokens, " tokens");
  }
  if (offset.rows.empty() && held < tokens) {
    return error(ErrorCode::token_count_mismatch, "part ", part, ": an offset of ", held, " tokens for a segment of ", tokens, "; anchors are at least as long");
  }
  for (const std::int32_t row : offset.rows) {
    if (row < -1 || row >= held) return error(ErrorCode::invalid_argument, "part ", part, ": row ", row, " of an offset of ", held, " tokens");
  }
  if (!offset.token_weights.empty() && std::ssize(offset.token_weights) != tokens) {
    return error(ErrorCode::token_count_mismatch, "part ", part, ": ", offset.token_weights.size(), " weights for ", tokens, " tokens");
  }
  for (const float w : offset.token_weights) {
    if (!std::isfinite(w)) return error(ErrorCode::non_finite, "part ", part, ": a weight of a token is not finite");
  }
  if (!std::isfinite(offset.weight)) return error(ErrorCode::non_finite, "part ", part, ": the weight of an offset is not finite");
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
