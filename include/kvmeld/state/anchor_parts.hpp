#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/interpolate_gap.hpp>
#include <kvmeld/anchor/unrotate.hpp>
#include <kvmeld/state/anchor_rows.hpp>
#include <kvmeld/state/plan.hpp>

/// What a reuse plan is made of, and what is refused of it.

KVMELD_NAMESPACE_BEGIN

/// An anchor's offset in a blend.
struct ReuseOffset {
  FragmentId anchor{};  ///< whose it is: the order of the sum, whatever the order given
  /// From `measure_offset`; at least as many tokens as the part, unless `rows` says otherwise.
  Fragment delta{};
  float weight = 1.0F;
  /// (tokens of the part) in place of `weight`; empty: one weight for all.
  std::vector<float> token_weights{};
  /// (tokens of the part) token of the offset that is the same, ascending; −1: a hole. Empty: one
  /// to one.
  std::vector<std::int32_t> rows{};
  /// (layer, token of the part) multiply the weights, from a `GainPredictor`; empty: all 1.
  std::vector<float> gains{};
};

/// A run of tokens in the prompt: a segment, or template text that follows one.
struct ReusePart {
  Fragment base{};            ///< the segment's own, sealed or `unrotated`
  std::int64_t position = 0;  ///< in the prompt, of the part's first token
  std::int64_t first = 0;     ///< token of the base that it starts with
  std::int64_t tokens = -1;   ///< −1: all from `first` on
  /// (tokens of the part) token of the base that is the same, ascending; −1: a hole. For a base
  /// that is nearly the segment's: `first` and `tokens` stay as they are. Empty: one to one.
  std::vector<std::int32_t> rows{};
  /// (tokens of the part) where `rows` is given: what the engine computes at holes; empty: not
  /// known.
  std::vector<TokenId> token_ids{};
  std::vector<ReuseOffset> offsets{};
  bool rotated_only = false;  ///< the base as it is, turned to its place: asked for, never assumed
};

struct ReuseOptions {
  /// Leading layers whose K/V depend on the token alone: Δ = 0 there.
  std::int32_t context_free_layers = 1;
  bool compute_last = true;  ///< the last token is a hole, since an engine needs its logits
  /// Of the target, where frequencies depend on it; 0: last position + 1.
  std::int64_t context_length = 0;
  /// Longest gap of holes over which offsets are interpolated, on either side of the map.
  std::int32_t interpolation_window = 0;
  /// The same for holes of a base: K/V between two tokens', a guess at what nobody computed.
  bool interpolate_kv = false;
};

/// The policies that a reuse plan carries, for executors that ask for its fuser: a `Sum`.
using ReuseMerger = Merger<SelectAll, ById, Concat, detail::BlendSum, SeamNone>;

/// A plan whose K/V is an approximation: `run` executes it as any other, and its `render_id` is no
/// exact render's.
class ReusePlan : public Plan<ReuseMerger> {
 public:
  ReusePlan(detail::PlanCore core, bool approximate, std::vector<std::int64_t> offsets = {},
            std::vector<std::int64_t> kv = {})
      : Plan<ReuseMerger>({}, std::move(core)),
        approximate_(approximate),
        offsets_(std::move(offsets)),
        kv_(std::move(kv)) {}
  /// Whether anything but the place of a token was changed or left uncorrected: always, unless
  /// there is nothing to blend or turn.
  [[nodiscard]] bool approximate() const noexcept { return approximate_; }
  /// Output tokens whose offset lies between those of two neighbours, ascending. What no window
  /// reaches is in `holes()`.
  [[nodiscard]] std::span<const std::int64_t> interpolated() const noexcept {
    return detail::span_of(offsets_);
  }
  /// Output tokens whose K/V themselves lie between two neighbours': only where `interpolate_kv`
  /// asked for it.
  [[nodiscard]] std::span<const std::int64_t> interpolated_kv() const noexcept {
    return detail::span_of(kv_);
  }

 private:
  bool approximate_ = true;
  std::vector<std::int64_t> offsets_, kv_;
};

namespace detail {

/// One row that a token is summed from, and which offset of its piece it belongs to.
struct ReuseTap {
  Contribution input;
  std::uint32_t offset = 0;  // into ReusePiece::order; meaningless for a base
};

/// One part, checked: its offsets in canonical order, the plan's sources that they are, and what
/// each token is summed from, whatever the layer.
struct ReusePiece {
  const ReusePart* part = nullptr;
  std::int64_t tokens = 0;
  std::uint32_t base = 0;
  std::vector<std::uint32_t> order;    // into part->offsets, ascending by anchor
  std::vector<std::uint32_t> sources;  // (order)
  std::int64_t first_output = 0;
  std::vector<ReuseTap> base_taps, offset_taps;
  std::vector<std::uint32_t> base_begin{0}, offset_begin{0};  // (tokens + 1)
  std::vector<std::uint8_t> unmapped;                         // (tokens) no offset belongs to it

  [[nodiscard]] const ReuseOffset& offset(std::size_t i) const noexcept {
    return part->offsets[order[i]];
  }
  [[nodiscard]] float weight(std::size_t i, std::int64_t token) const noexcept {
    const ReuseOffset& o = offset(i);
    return o.token_weights.empty() ? o.weight : o.token_weights[static_cast<std::size_t>(token)];
  }
  [[nodiscard]] float gain(std::size_t i, std::size_t layer, std::int64_t token) const noexcept {
    const ReuseOffset& o = offset(i);
    return o.gains.empty() ? 1.0F
                           : o.gains[layer * static_cast<std::size_t>(tokens) +
                                     static_cast<std::size_t>(token)];
  }
};

KVMELD_LAZY Status check_reused(const Fragment& fragment, const Geometry& geometry,
                                const char* what, std::size_t part) {
  if (!fragment.valid())
    return error(ErrorCode::invalid_argument, "part ", part, ": the ", what,
                 " is an empty Fragment");
  KVMELD_TRY(check_same(fragment.geometry(), geometry));
  if (fragment.payloads()[0].bytes == nullptr) {
    return error(ErrorCode::payload_missing, "part ", part, ": the ", what, " ",
                 fragment.id().hex(), " is evicted; fetch it and plan again");
  }
  return {};
}

KVMELD_LAZY Status check_numbers(std::span<const float> numbers, std::size_t wanted,
                                 const char* what, std::size_t part) {
  if (numbers.empty()) return {};
  if (numbers.size() != wanted)
    return error(ErrorCode::token_count_mismatch, "part ", part, ": ", numbers.size(), " ", what,
                 " where there are ", wanted);
  for (const float x : numbers) {
    if (!std::isfinite(x))
      return error(ErrorCode::non_finite, "part ", part, ": one of the ", what, " is not finite");
  }
  return {};
}

KVMELD_LAZY Status check_offset(const ReuseOffset& offset, std::int64_t tokens, std::size_t layers,
                                std::size_t part) {
  const std::int64_t held = offset.delta.token_count();
  if (!is_unrotated(offset.delta))
    return error(ErrorCode::invalid_argument, "part ", part,
                 ": an offset carries positions; offsets come from measure_offset");
  if (!offset.rows.empty() && std::ssize(offset.rows) != tokens) {
    return error(ErrorCode::token_count_mismatch, "part ", part, ": ", offset.rows.size(),
                 " rows of an offset for ", tokens, " tokens");
  }
  if (offset.rows.empty() && held < tokens) {
    return error(
        ErrorCode::token_count_mismatch, "part ", part, ": an offset of ", held,
        " tokens for a segment of ", tokens,
        "; anchors are at least as long, unless map_positions says which tokens belong together");
  }
  KVMELD_TRY(check_rows_ascend(offset.rows, held, part, "an offset"));
  const auto n = static_cast<std::size_t>(tokens);
  KVMELD_TRY(check_numbers(offset.token_weights, n, "weights of tokens", part));
  KVMELD_TRY(check_numbers(offset.gains, layers * n, "gains", part));
  if (!std::isfinite(offset.weight))
    return error(ErrorCode::non_finite, "part ", part, ": the weight of an offset is not finite");
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
