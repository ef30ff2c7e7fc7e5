#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/anchor_parts.hpp>

/// Segments at new places, corrected by what other contexts did to segments like them: base + Σ w·Δ as a plan that `run` executes.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Contributions of one layer: base and offsets where all of them hold the token, a hole where one does not. A base is never taken for
/// a blend in silence.
KVMELD_LAZY AlignmentGroup reuse_group(const PlanCore& core, std::span<const ReusePiece> pieces, std::size_t layer, bool context_free) {
  AlignmentGroup group;
  for (const ReusePiece& piece : pieces) {
    const bool plain = context_free || piece.part->rotated_only;
    for (std::int64_t t = 0; t < piece.tokens; ++t) {
      const auto base_row = static_cast<std::uint32_t>(piece.part->first + t);
      bool complete = payload_row(core.sources[piece.base].payload(), layer, base_row) >= 0;
      for (std::size_t i = 0; !plain && complete && i < piece.order.size(); ++i) {
        const std::int64_t row = piece.row(i, t);
        if (piece.weight(i, t) != 0.0F) {
          complete = row >= 0 && payload_row(core.sources[piece.sources[i]].payload(), layer, static_cast<std::uint32_t>(row)) >= 0;
        }
      }
      if (complete) group.contributions.push_back({piece.base, base_row, 1.0F});
      for (std::size_t i = 0; !plain && complete && i < piece.order.size(); ++i) {
        const float weight = piece.weight(i, t);
        if (weight != 0.0F) group.contributions.push_back({piece.sources[i], static_cast<std::uint32_t>(piece.row(i, t)), weight});
      }
      group.end_row();
    }
  }
  return group;
}

KVMELD_LAZY Digest128 reuse_id(std::span<const ReusePiece> pieces, const Geometry& geometry, const ReuseOptions& options) {
  Hasher h;
  h.text("kvmeld.reuse.v1");
  hash_append(h, geometry);
  h.value(options.context_free_layers);
  h.value(options.compute_last);
  h.value(options.context_length);
  for (const ReusePiece& piece : pieces) {
    h.bytes(std::as_bytes(std::span(piece.part->base.id().bytes)));
    h.value(piece.part->position);
    h.value(piece.part->first);
    h.value(piece.tokens);
    h.value(piece.part->rotated_only);
    h.value(static_cast<std::uint64_t>(piece.order.size()));
    for (const std::uint32_t i : piece.order) {
      const ReuseOffset& offset = piece.part->offsets[i];
      h.bytes(std::as_bytes(std::span(offset.anchor.bytes)));
      h.bytes(std::as_bytes(std::span(offset.delta.id().bytes)));
      h.value(offset.weight);
      h.values(std::span<const float>(offset.token_weights));
      h.values(std::span<const std::int32_t>(offset.rows));
    }
  }
  return h.digest();
}

}  // namespace detail

/// Plans K̂ = rotate(base + Σ w·Δk), V̂ = base + Σ w·Δv for every part, with each segment's own base, at exact positions.
///
/// Sums in the local frame, base first, then offsets in ascending order of anchor: bytes depend neither on the order given, nor on
/// threads or instruction set. Context-free layers take the base alone. Tokens whose offset some layer lacks become holes. Weights of 0
/// leave the sum. O(tokens · anchors). KVCOMM (2025), the reuse step.
/// Errors: `geometry_mismatch`, `payload_missing`, `invalid_argument` (a part without offsets that is not `rotated_only`, an anchor
/// twice), `token_count_mismatch`, `duplicate_position`, `duplicate_bos`, `non_finite`, `rope_length_dependent`, `unsupported`.
KVMELD_LAZY [[nodiscard]] Result<ReusePlan> plan_reuse(std::span<const ReusePart> parts, const Geometry& geometry, const ReuseOptions& options = {}) {
  using detail::error;
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
  KVMELD_TRY(validate(geometry));
  if (options.context_free_layers < 0 || options.context_free_layers > std::ssize(geometry.layers)) {
    return error(ErrorCode::invalid_argument, options.context_free_layers, " context-free layers of ", geometry.layers.size());
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
  bool approximate = false;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const ReusePart& part = parts[p];
    KVMELD_TRY(detail::check_reused(part.base, geometry, "base", p));
    detail::ReusePiece piece;
    piece.part = &part;
    piece.tokens = part.tokens < 0 ? part.base.token_count() - part.first : part.tokens;
    if (part.first < 0 || piece.tokens < 0 || part.first > part.base.token_count() || piece.tokens > part.base.token_count() - part.first) {
      return error(ErrorCode::invalid_argument, "part ", p, ": ", piece.tokens, " tokens from ", part.first, " on of a base of ", part.base.token_count());
    }
    if (part.position < 0 || part.position > max_position) return error(ErrorCode::invalid_argument, "part ", p, ": position ", part.position);
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
      KVMELD_TRY(detail::check_offset(part.offsets[i], piece.tokens, p));
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
      core.positions.push_back(part.position + t);
      core.tokens.push_back(ids.empty() ? -1 : ids[static_cast<std::size_t>(part.first + t)]);
    }
    pieces.push_back(std::move(piece));
  }
  KVMELD_TRY(detail::check_positions(geometry, core.sources, core, nullptr, options.context_length));
  Alignment alignment;
  std::vector<std::vector<const TokenSet*>> keys;  // (groups) what decides a layer's contributions
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const bool context_free = std::cmp_less(l, options.context_free_layers);
    std::vector<const TokenSet*> key{nullptr};
    for (const detail::PlanSource& source : core.sources) key.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    static const TokenSet everything{};
    key[0] = context_free ? &everything : nullptr;
    const auto same = [](const TokenSet* a, const TokenSet* b) { return a == b || (a != nullptr && b != nullptr && *a == *b); };
    std::size_t g = 0;
    while (g < keys.size() && !std::equal(keys[g].begin(), keys[g].end(), key.begin(), key.end(), same)) ++g;
    if (g == keys.size()) {
      keys.push_back(std::move(key));
      alignment.groups.push_back(detail::reuse_group(core, pieces, l, context_free));
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
  return ReusePlan(std::move(core), approximate);
}

KVMELD_NAMESPACE_END
