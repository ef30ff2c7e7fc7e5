#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/anchor.hpp>
#include <kvmeld/anchor/interpolate.hpp>
#include <kvmeld/state/anchor_parts.hpp>

KVMELD_NAMESPACE_BEGIN

/// How a segment is laid beside the anchors that a look-up chose.
struct AnchorAlignment {
  TokenMatch match{.mode = MatchMode::edit_distance};
  /// Τ: an anchor whose map says less is left out; `MatchMode::index` makes no map.
  double similarity = 0.85;
};

namespace detail {

/// Ids of a segment, placeholders as ids that only they have, downwards from `first`: which picture
/// it is nobody said.
KVMELD_LAZY [[nodiscard]] std::vector<TokenId> told_ids(std::span<const TokenId> tokens,
                                                        const Geometry& geometry, TokenId first) {
  std::vector<TokenId> out(tokens.begin(), tokens.end());
  for (TokenId& id : out) {
    if (id < 0 || geometry.is_placeholder(id)) id = first--;
  }
  return out;
}

}  // namespace detail

/// The offsets of chosen anchors, each with the position map of the segment's tokens: what a
/// `ReusePart` takes.
///
/// Anchors below the similarity are left out (by index nothing is compared, so none), and the
/// weights of the others grow by one factor, so that they add up to what all did; an empty answer
/// says that none is near enough, and is no error. Where a segment is an anchor's beginning, rows
/// stay empty: by index. O(anchors · edit script). Errors: `not_found` for an anchor without a Δ of
/// the context; `tokens_required` for a latent one; `invalid_argument` (as many weights as anchors;
/// a similarity outside [0, 1]); those of `map_positions`.
/// @param weights (anchors) as `AnchorLookup::decision` has them
KVMELD_LAZY [[nodiscard]] Result<std::vector<ReuseOffset>> aligned_offsets(
    std::span<const std::shared_ptr<const Anchor>> anchors, std::span<const float> weights,
    const Digest128& context, std::span<const TokenId> segment, const AnchorAlignment& how = {}) {
  if (anchors.size() != weights.size() || !(how.similarity >= 0 && how.similarity <= 1)) {
    return detail::error(ErrorCode::invalid_argument, weights.size(), " weights for ",
                         anchors.size(), " anchors, and a similarity of ", how.similarity);
  }
  std::vector<ReuseOffset> out;
  double all = 0, kept = 0;
  for (std::size_t i = 0; i < anchors.size(); ++i) {
    const Anchor& anchor = *anchors[i];
    const ContextOffset* const offset = anchor.find(context);
    if (offset == nullptr)
      return detail::error(ErrorCode::not_found, "anchor ", anchor.id.hex(),
                           " holds no offset for the context; prefill there and commit it");
    if (how.match.mode != MatchMode::index && anchor.base.latent()) {
      return detail::error(ErrorCode::tokens_required, "anchor ", anchor.id.hex(), " has ",
                           anchor.base.token_count(), " tokens without ids; match by index");
    }
    all += static_cast<double>(weights[i]);
    ReuseOffset made{.anchor = anchor.id, .delta = offset->segment, .weight = weights[i]};
    if (how.match.mode != MatchMode::index) {
      auto map = map_positions(
          detail::told_ids(segment, anchor.base.geometry(), -2),
          detail::told_ids(anchor.base.tokens(), anchor.base.geometry(), INT32_MIN / 2), how.match);
      if (!map) return map.error();
      if (map->similarity < how.similarity) continue;
      if (!map->one_to_one()) made.rows = std::move(map->rows);
    }
    kept += static_cast<double>(weights[i]);
    out.push_back(std::move(made));
  }
  if (out.size() < anchors.size() && kept > 0) {
    for (ReuseOffset& offset : out)
      offset.weight = static_cast<float>(static_cast<double>(offset.weight) * (all / kept));
  }
  return out;
}

KVMELD_NAMESPACE_END
