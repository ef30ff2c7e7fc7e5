#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/anchor_taps.hpp>

/// Segments at new places, corrected by what other contexts did to segments like them: base + Σ w·Δ as a plan that `run` executes.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Contributions of one layer: base and offsets where all of them hold the token, a hole where one does not. A base is never taken for
/// a blend in silence: a token without offset is a hole in every layer, those that need none too.
KVMELD_LAZY AlignmentGroup reuse_group(const PlanCore& core, std::span<const ReusePiece> pieces, std::size_t layer, std::int32_t context_free_layers) {
  AlignmentGroup group;
  const bool context_free = std::cmp_less(layer, context_free_layers), none_needed = std::cmp_equal(core.geometry->layers.size(), context_free_layers);
  const auto held = [&](const Contribution& c) { return payload_row(core.sources[c.source].payload(), layer, c.token) >= 0; };
  for (const ReusePiece& piece : pieces) {
    const bool bare = piece.part->rotated_only || none_needed;
    for (std::int64_t t = 0; t < piece.tokens; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const std::size_t begin = group.contributions.size();
      bool complete = piece.base_begin[at] != piece.base_begin[at + 1] && (bare || piece.unmapped[at] == 0);
      for (std::uint32_t i = piece.base_begin[at]; complete && i < piece.base_begin[at + 1]; ++i) {
        complete = held(piece.base_taps[i].input);
        group.contributions.push_back(piece.base_taps[i].input);
      }
      for (std::uint32_t i = bare || context_free ? piece.offset_begin[at + 1] : piece.offset_begin[at]; complete && i < piece.offset_begin[at + 1]; ++i) {
        Contribution input = piece.offset_taps[i].input;
        input.weight = rounded_product(input.weight, piece.gain(piece.offset_taps[i].offset, layer, t));
        if (input.weight == 0.0F) continue;
        complete = held(input);
        group.contributions.push_back(input);
      }
      if (!complete) group.contributions.resize(begin);
      group.end_row();
    }
  }
  return group;
}

/// Whether two layers' offsets enter by the same gains.
KVMELD_LAZY bool same_gains(std::span<const ReusePiece> pieces, std::size_t a, std::size_t b) {
  for (const ReusePiece& piece : pieces) {
    const auto n = static_cast<std::size_t>(piece.tokens);
    for (const std::uint32_t i : piece.order) {
      const float* const gains = piece.part->offsets[i].gains.data();
      if (gains != nullptr && !std::equal(gains + a * n, gains + (a + 1) * n, gains + b * n)) return false;
    }
  }
  return true;
}

KVMELD_LAZY Digest128 reuse_id(std::span<const ReusePiece> pieces, const Geometry& geometry, const ReuseOptions& options) {
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
    h.values(span_of(piece.part->rows));
    h.value(static_cast<std::uint64_t>(piece.order.size()));
    for (const std::uint32_t i : piece.order) {
      const ReuseOffset& offset = piece.part->offsets[i];
      h.bytes(std::as_bytes(std::span(offset.anchor.bytes)));
      h.bytes(std::as_bytes(std::span(offset.delta.id().bytes)));
      h.value(offset.weight);
      h.values(span_of(offset.token_weights));
      h.values(span_of(offset.rows));
      h.values(span_of(offset.gains));
    }
  }
  return h.digest();
}

}  // namespace detail

/// Plans K̂ = rotate(base + Σ w·Δk), V̂ = base + Σ w·Δv for every part, with each segment's own base, at exact positions.
///
/// Sums in the local frame, base first, then offsets in ascending order of anchor: bytes depend neither on the order given, nor on
/// threads or instruction set. Context-free layers take the base alone. Weights of 0 leave the sum.
/// Offsets enter by the rows that their position maps give. Where a map has a hole, the anchors that do have the token share its weight
/// among themselves; where none has, offsets are interpolated over gaps of at most `interpolation_window` tokens, linearly by position
/// between the matched neighbours and by weight between the two heaviest anchors; what is left, and tokens whose row some layer lacks,
/// become holes, whose rows no layer writes. O(tokens · anchors), with gains that times layers. KVCOMM (2025), the reuse step.
/// Errors: `geometry_mismatch`, `payload_missing`, `invalid_argument` (a part without offsets that is not `rotated_only`, an anchor
/// twice, a map that does not ascend, a window below 0, weights below 0 beside holes), `token_count_mismatch`, `duplicate_position`,
/// `duplicate_bos`, `non_finite`, `rope_length_dependent`, `unsupported`.
KVMELD_LAZY [[nodiscard]] Result<ReusePlan> plan_reuse(std::span<const ReusePart> parts, const Geometry& geometry, const ReuseOptions& options = {}) {
  using detail::error;
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
  KVMELD_TRY(validate(geometry));
  if (options.context_free_layers < 0 || options.context_free_layers > std::ssize(geometry.layers)) {
    return error(ErrorCode::invalid_argument, options.context_free_layers, " context-free layers of ", geometry.layers.size());
  }
  if (options.interpolation_window < 0) {
    return error(ErrorCode::invalid_argument, "an interpolation window of ", options.interpolation_window, " tokens; 0 leaves every hole to the engine");
  }
  detail::PlanCore core;
  core.geometry = std::make_shared<const Geometry>(geometry);
  const auto source_of = [&](const Fragment& fragment) {
    std::size_t s = 0;
    while (s < core.sources.size() && core.sources[s].fragment.body() != fragment.body()) ++s;
    if (s == core.sources.size()) core.sources.push_back({fragment, 0, 1.0F, is_unrotated(fragment)});
    return static_cast<std::uint32_t>(s);
  };
  std::vector<detail::ReusePiece> pieces;
  std::vector<std::int64_t> interpolated, interpolated_kv;
  bool approximate = false;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const ReusePart& part = parts[p];
    KVMELD_TRY(detail::check_reused(part.base, geometry, "base", p));
    detail::ReusePiece piece;
    piece.part = &part;
    piece.tokens = !part.rows.empty() ? std::ssize(part.rows) : part.tokens < 0 ? part.base.token_count() - part.first : part.tokens;
    if (!part.rows.empty()) {
      if (part.first != 0 || (part.tokens >= 0 && part.tokens != piece.tokens)) {
        return error(ErrorCode::invalid_argument, "part ", p, ": ", part.tokens, " tokens from ", part.first, " on beside a map of ", piece.tokens, " rows; a map says both");
      }
      KVMELD_TRY(detail::check_rows_ascend(part.rows, part.base.token_count(), p, "a base"));
    } else if (part.first < 0 || piece.tokens < 0 || part.first > part.base.token_count() || piece.tokens > part.base.token_count() - part.first) {
      return error(ErrorCode::invalid_argument, "part ", p, ": ", piece.tokens, " tokens from ", part.first, " on of a base of ", part.base.token_count());
    }
    if (part.position < 0 || part.position > max_position) return error(ErrorCode::invalid_argument, "part ", p, ": position ", part.position);
    if (!part.token_ids.empty() && (part.rows.empty() || std::ssize(part.token_ids) != piece.tokens)) {
      return error(ErrorCode::token_count_mismatch, "part ", p, ": ", part.token_ids.size(), " token ids beside a map of ", part.rows.size(), " rows");
    }
    if (piece.tokens == 0) continue;
    if (!core.positions.empty() && part.position <= core.positions.back()) {
      return error(ErrorCode::duplicate_position, "part ", p, " starts at position ", part.position, ", behind position ", core.positions.back());
    }
    if (part.offsets.empty() != part.rotated_only) {
      return error(ErrorCode::invalid_argument, "part ", p, " has ", part.offsets.size(), " offsets; say rotated_only where, and only where, the base alone is meant");
    }
    approximate = true;
    for (std::uint32_t i = 0; i < part.offsets.size(); ++i) {
      KVMELD_TRY(detail::check_reused(part.offsets[i].delta, geometry, "offset", p));
      KVMELD_TRY(detail::check_offset(part.offsets[i], piece.tokens, geometry.layers.size(), p));
      piece.order.push_back(i);
    }
    std::sort(piece.order.begin(), piece.order.end(), [&](std::uint32_t a, std::uint32_t b) { return part.offsets[a].anchor < part.offsets[b].anchor; });
    for (std::size_t i = 1; i < piece.order.size(); ++i) {
      const FragmentId& id = part.offsets[piece.order[i]].anchor;
      if (part.offsets[piece.order[i - 1]].anchor == id) return error(ErrorCode::invalid_argument, "part ", p, ": anchor ", id.hex(), " twice");
    }
    piece.base = source_of(part.base);
    for (const std::uint32_t i : piece.order) piece.sources.push_back(source_of(part.offsets[i].delta));
    piece.first_output = core.outputs();
    const std::span<const TokenId> ids = part.base.tokens();
    for (std::int64_t t = 0; t < piece.tokens; ++t) {
      const std::int64_t row = part.rows.empty() ? part.first + t : part.rows[static_cast<std::size_t>(t)];
      core.positions.push_back(part.position + t);
      core.tokens.push_back(!part.token_ids.empty() ? part.token_ids[static_cast<std::size_t>(t)] : ids.empty() || row < 0 ? -1 : ids[static_cast<std::size_t>(row)]);
    }
    detail::add_base_taps(piece, options.interpolate_kv ? options.interpolation_window : 0, interpolated_kv);
    KVMELD_TRY(detail::add_offset_taps(piece, options.interpolation_window, p, interpolated));
    pieces.push_back(std::move(piece));
  }
  KVMELD_TRY(detail::check_positions(geometry, core.sources, core, nullptr, options.context_length));
  Alignment alignment;
  std::vector<std::vector<const TokenSet*>> keys;  // (groups) what decides a layer's contributions, and the first layer of each
  std::vector<std::size_t> first_layer;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const bool context_free = std::cmp_less(l, options.context_free_layers);
    std::vector<const TokenSet*> key{nullptr};
    for (const detail::PlanSource& source : core.sources) key.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    static const TokenSet everything{};
    key[0] = context_free ? &everything : nullptr;
    const auto same = [](const TokenSet* a, const TokenSet* b) { return a == b || (a != nullptr && b != nullptr && *a == *b); };
    std::size_t g = 0;
    const auto alike = [&](std::size_t k) {
      return std::equal(keys[k].begin(), keys[k].end(), key.begin(), key.end(), same) && (context_free || detail::same_gains(pieces, first_layer[k], l));
    };
    while (g < keys.size() && !alike(g)) ++g;
    if (g == keys.size()) {
      keys.push_back(std::move(key));
      first_layer.push_back(l);
      alignment.groups.push_back(detail::reuse_group(core, pieces, l, options.context_free_layers));
      alignment.groups.back().layers.layers.assign(geometry.layers.size(), 0);
    }
    alignment.groups[g].layers.layers[l] = 1;
  }
  std::vector<std::uint8_t> recompute(core.positions.size(), 0);
  if (options.compute_last && !recompute.empty()) recompute.back() = 1;
  const std::int64_t length = options.context_length > 0 || core.positions.empty() ? options.context_length : core.positions.back() + 1;
  KVMELD_TRY(detail::compile(core, alignment, {detail::rotation_equivariant<detail::BlendSum>(), detail::keeps_single<detail::BlendSum>()}, recompute, length));
  KVMELD_TRY(detail::check_rows<detail::BlendSum>(core, detail::BlendSum{}));
  core.render_id = detail::reuse_id(pieces, geometry, options);
  return ReusePlan(std::move(core), approximate, std::move(interpolated), std::move(interpolated_kv));
}

KVMELD_NAMESPACE_END
