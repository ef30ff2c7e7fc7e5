#pragma once

/// Plans that reuse a segment's cache by interpolated offsets.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/anchors/detail/reuse_plan.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/policies/token_match.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

// Segments at new places, corrected by what other contexts did to segments like them: base + Σ w·Δ
// as a plan that `run` executes.

namespace detail {

inline Digest128 reuse_id(std::span<const ReusePiece> pieces, const Geometry& geometry,
                          const ReuseOptions& options) {
  Hasher h;
  h.text("kvmeld.reuse.v2");
  hash_append(h, geometry);
  h.value(options.context_free_layers);
  h.value(options.compute_last);
  h.value(options.context_length);
  h.value(options.interpolation_window);
  h.value(options.interpolate_kv);
  for (const ReusePiece& piece : pieces) {
    h.bytes(std::as_bytes(std::span(piece.part->base.id().bytes)));
    h.value(piece.part->position);
    h.value(piece.part->first);
    h.value(piece.tokens);
    h.value(piece.part->rotated_only);
    h.values(extend::span_of(piece.part->rows));
    h.value(static_cast<std::uint64_t>(piece.order.size()));
    for (const std::uint32_t i : piece.order) {
      const ReuseOffset& offset = piece.part->offsets[i];
      h.bytes(std::as_bytes(std::span(offset.anchor.bytes)));
      h.bytes(std::as_bytes(std::span(offset.delta.id().bytes)));
      h.value(offset.weight);
      h.values(extend::span_of(offset.token_weights));
      h.values(extend::span_of(offset.rows));
      h.values(extend::span_of(offset.gains));
    }
  }
  return h.digest();
}

}  // namespace detail

/// Plans K̂ = rotate(base + Σ w·Δk), V̂ = base + Σ w·Δv for every part, with each segment's own
/// base, at exact positions.
///
/// Sums in the local frame, base first, then offsets in ascending order of anchor: bytes depend
/// neither on the order given, nor on threads or instruction set. Context-free layers take the base
/// alone. Weights of 0 leave the sum. Offsets enter by the rows that their position maps give.
/// Where a map has a hole, the anchors that do have the token share its weight among themselves;
/// where none has, offsets are interpolated over gaps of at most `interpolation_window` tokens,
/// linearly by position between the matched neighbours and by weight between the two heaviest
/// anchors; what is left, and tokens whose row some layer lacks, become holes, whose rows no layer
/// writes. O(tokens · anchors), with gains that times layers. KVCOMM (2025), the reuse step.
/// Errors: `geometry_mismatch`, `payload_missing`, `invalid_argument` (a part without offsets that
/// is not `rotated_only`, an anchor twice, a map that does not ascend, a window below 0, weights
/// below 0 beside holes), `token_count_mismatch`, `duplicate_position`, `duplicate_bos`,
/// `non_finite`, `rope_length_dependent`, `unsupported`.
[[nodiscard]] inline Result<ReusePlan> plan_reuse(std::span<const ReusePart> parts,
                                                  const Geometry& geometry,
                                                  const ReuseOptions& options = {}) {
  const exec::FloatEnvironmentGuard guard;
  KVMELD_TRY(exec::check_float_environment());
  KVMELD_TRY(validate(geometry));
  KVMELD_TRY(detail::check_reuse_options(options, geometry));
  detail::ReuseBuild build;
  extend::PlanCore& core = build.core;
  core.geometry = std::make_shared<const Geometry>(geometry);
  for (std::size_t p = 0; p < parts.size(); ++p)
    KVMELD_TRY(detail::add_part(build, parts[p], p, options));
  KVMELD_TRY(
      extend::check_positions(geometry, core.sources, core, nullptr, options.context_length));
  const Alignment alignment =
      detail::reuse_alignment(core, build.pieces, options.context_free_layers);
  std::vector<std::uint8_t> recompute(core.positions.size(), 0);
  if (options.compute_last && !recompute.empty()) recompute.back() = 1;
  const std::int64_t length = options.context_length > 0 || core.positions.empty()
                                  ? options.context_length
                                  : core.positions.back() + 1;
  const detail::BlendSum sum{};
  KVMELD_TRY(extend::finish_rows(core, alignment, extend::rows_call(sum, sum), recompute, length));
  KVMELD_TRY(extend::warn(core, extend::with_several(geometry, alignment, core.positions.size()),
                          RenderWarnings::none, false, false));
  core.render_id = detail::reuse_id(build.pieces, geometry, options);
  const bool approximate = !build.pieces.empty();
  return ReusePlan(std::move(core), approximate, std::move(build.interpolated),
                   std::move(build.interpolated_kv));
}

// Texts that are nearly another's: which of its tokens belong together.

/// A segment laid beside an anchor's text.
struct PositionMap {
  /// (tokens of the segment) the anchor's token that is the same one, ascending; −1: a hole.
  std::vector<std::int32_t> rows{};
  /// 1 − edits / tokens of the longer text; 1 − unmatched / those where no edits are looked for.
  double similarity = 1;

  /// Whether the segment is the anchor's text or a beginning of it, so that rows belong together by
  /// index.
  [[nodiscard]] bool one_to_one() const noexcept {
    for (std::size_t t = 0; t < rows.size(); ++t) {
      if (rows[t] != static_cast<std::int32_t>(t)) return false;
    }
    return true;
  }
};

/// Lays a segment beside an anchor's text by a match policy: `edit_distance` for texts that are
/// nearly equal, `index` and `common_prefix` for equal beginnings.
///
/// O(tokens), and `edit_script` by edit distance: maps of (a, b) and (b, a) are inverse. Errors:
/// those of `edit_script`; `unsupported` for `neighbours`, which compares K/V that a segment not
/// yet placed does not have; `oversized` for 2³¹ tokens or more.
[[nodiscard]] inline Result<PositionMap> map_positions(std::span<const TokenId> segment,
                                                       std::span<const TokenId> anchor,
                                                       const TokenMatch& policy) {
  const std::size_t longer = (std::max)(segment.size(), anchor.size());
  if (longer > 0x7fffffff)
    return extend::error(ErrorCode::oversized, "position map: ", longer,
                         " tokens; below 2^31 are possible");
  PositionMap out;
  out.rows.assign(segment.size(), -1);
  if (policy.mode == MatchMode::edit_distance) {
    const auto script = edit_script(segment, anchor, policy.edit);
    if (!script) return script.error();
    for (const MatchRun& run : script->runs) {
      for (std::int32_t i = 0; i < run.length; ++i)
        out.rows[static_cast<std::size_t>(run.a_begin + i)] = run.b_begin + i;
    }
    out.similarity = script->similarity();
    return out;
  }
  if (policy.mode != MatchMode::index && policy.mode != MatchMode::common_prefix) {
    return extend::error(ErrorCode::unsupported, "position map: match mode ", policy.mode,
                         " needs K/V; match by edit_distance or by index");
  }
  std::size_t shared = (std::min)(segment.size(), anchor.size());
  if (policy.mode == MatchMode::common_prefix) {
    shared = static_cast<std::size_t>(
        std::mismatch(segment.begin(), segment.begin() + static_cast<std::ptrdiff_t>(shared),
                      anchor.begin())
            .first -
        segment.begin());
  }
  for (std::size_t t = 0; t < shared; ++t) out.rows[t] = static_cast<std::int32_t>(t);
  if (longer > 0) out.similarity = static_cast<double>(shared) / static_cast<double>(longer);
  return out;
}

/// How a segment is laid beside the anchors that a look-up chose.
struct AnchorAlignment {
  TokenMatch match{.mode = MatchMode::edit_distance};
  /// Τ: an anchor whose map says less is left out; `MatchMode::index` makes no map.
  double similarity = 0.85;
};

namespace detail {

/// Ids of a segment, placeholders as ids that only they have, downwards from `first`: which picture
/// it is nobody said.
[[nodiscard]] inline std::vector<TokenId> told_ids(std::span<const TokenId> tokens,
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
[[nodiscard]] inline Result<std::vector<ReuseOffset>> aligned_offsets(
    std::span<const std::shared_ptr<const Anchor>> anchors, std::span<const float> weights,
    const Digest128& context, std::span<const TokenId> segment, const AnchorAlignment& how = {}) {
  if (anchors.size() != weights.size() || !(how.similarity >= 0 && how.similarity <= 1)) {
    return extend::error(ErrorCode::invalid_argument, weights.size(), " weights for ",
                         anchors.size(), " anchors, and a similarity of ", how.similarity);
  }
  std::vector<ReuseOffset> out;
  double all = 0, kept = 0;
  for (std::size_t i = 0; i < anchors.size(); ++i) {
    const Anchor& anchor = *anchors[i];
    const ContextOffset* const offset = anchor.find(context);
    if (offset == nullptr)
      return extend::error(ErrorCode::not_found, "anchor ", anchor.id.hex(),
                           " holds no offset for the context; prefill there and commit it");
    if (how.match.mode != MatchMode::index && anchor.base.latent()) {
      return extend::error(ErrorCode::tokens_required, "anchor ", anchor.id.hex(), " has ",
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

}  // namespace anchors

KVMELD_NAMESPACE_END
