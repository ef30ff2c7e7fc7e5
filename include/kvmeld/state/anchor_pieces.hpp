#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/anchor_taps.hpp>

/// Parts become pieces: checked, their offsets in canonical order, their fragments sources of the
/// plan.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// What a reuse plan comes to, part by part.
struct ReuseBuild {
  PlanCore core;
  std::vector<ReusePiece> pieces;                           // parts that have tokens
  std::vector<std::int64_t> interpolated, interpolated_kv;  // outputs
};

KVMELD_LAZY Status check_reuse_options(const ReuseOptions& options, const Geometry& geometry) {
  if (options.context_free_layers < 0 ||
      options.context_free_layers > std::ssize(geometry.layers)) {
    return error(ErrorCode::invalid_argument, options.context_free_layers,
                 " context-free layers of ", geometry.layers.size());
  }
  if (options.interpolation_window < 0) {
    return error(ErrorCode::invalid_argument, "an interpolation window of ",
                 options.interpolation_window, " tokens; 0 leaves every hole to the engine");
  }
  return {};
}

/// Tokens of a part, from its map or from what it says of itself. Errors: see `plan_reuse`.
KVMELD_LAZY Result<std::int64_t> count_tokens(const ReusePart& part, std::size_t p) {
  const std::int64_t tokens = !part.rows.empty() ? std::ssize(part.rows)
                              : part.tokens < 0  ? part.base.token_count() - part.first
                                                 : part.tokens;
  if (!part.rows.empty()) {
    if (part.first != 0 || (part.tokens >= 0 && part.tokens != tokens)) {
      return error(ErrorCode::invalid_argument, "part ", p, ": ", part.tokens, " tokens from ",
                   part.first, " on beside a map of ", tokens, " rows; a map says both");
    }
    KVMELD_TRY(check_rows_ascend(part.rows, part.base.token_count(), p, "a base"));
  } else if (part.first < 0 || tokens < 0 || part.first > part.base.token_count() ||
             tokens > part.base.token_count() - part.first) {
    return error(ErrorCode::invalid_argument, "part ", p, ": ", tokens, " tokens from ", part.first,
                 " on of a base of ", part.base.token_count());
  }
  if (part.position < 0 || part.position > max_position)
    return error(ErrorCode::invalid_argument, "part ", p, ": position ", part.position);
  if (!part.token_ids.empty() && (part.rows.empty() || std::ssize(part.token_ids) != tokens)) {
    return error(ErrorCode::token_count_mismatch, "part ", p, ": ", part.token_ids.size(),
                 " token ids beside a map of ", part.rows.size(), " rows");
  }
  return tokens;
}

/// A part's offsets in ascending order of anchor, checked.
KVMELD_LAZY Result<std::vector<std::uint32_t>> order_offsets(const ReusePart& part,
                                                             std::int64_t tokens,
                                                             const Geometry& geometry,
                                                             std::size_t p) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < part.offsets.size(); ++i) {
    KVMELD_TRY(check_reused(part.offsets[i].delta, geometry, "offset", p));
    KVMELD_TRY(check_offset(part.offsets[i], tokens, geometry.layers.size(), p));
    order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return part.offsets[a].anchor < part.offsets[b].anchor;
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const FragmentId& id = part.offsets[order[i]].anchor;
    if (part.offsets[order[i - 1]].anchor == id)
      return error(ErrorCode::invalid_argument, "part ", p, ": anchor ", id.hex(), " twice");
  }
  return order;
}

/// The number of a fragment among a plan's sources, which it joins where it is none yet.
KVMELD_LAZY std::uint32_t source_number(PlanCore& core, const Fragment& fragment) {
  std::size_t s = 0;
  while (s < core.sources.size() && core.sources[s].fragment.body() != fragment.body()) ++s;
  if (s == core.sources.size()) core.sources.push_back({fragment, 0, 1.0F, is_unrotated(fragment)});
  return static_cast<std::uint32_t>(s);
}

/// Positions and ids of a piece's tokens, as the next outputs.
KVMELD_LAZY void add_outputs(PlanCore& core, const ReusePart& part, std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const std::int64_t row = part.rows.empty() ? part.first + t : part.rows[at];
    core.positions.push_back(part.position + t);
    core.tokens.push_back(!part.token_ids.empty() ? part.token_ids[at]
                          : row < 0               ? -1
                                                  : part.base.token_id(row));
  }
}

/// Adds part number `p`, behind those before it. Errors: see `plan_reuse`.
KVMELD_LAZY Status add_part(ReuseBuild& build, const ReusePart& part, std::size_t p,
                            const ReuseOptions& options) {
  PlanCore& core = build.core;
  KVMELD_TRY(check_reused(part.base, *core.geometry, "base", p));
  const auto tokens = count_tokens(part, p);
  if (!tokens) return tokens.error();
  if (*tokens == 0) return {};
  if (!core.positions.empty() && part.position <= core.positions.back()) {
    return error(ErrorCode::duplicate_position, "part ", p, " starts at position ", part.position,
                 ", behind position ", core.positions.back());
  }
  if (part.offsets.empty() != part.rotated_only) {
    return error(ErrorCode::invalid_argument, "part ", p, " has ", part.offsets.size(),
                 " offsets; say rotated_only where, and only where, the base alone is meant");
  }
  auto order = order_offsets(part, *tokens, *core.geometry, p);
  if (!order) return order.error();
  ReusePiece piece;
  piece.part = &part;
  piece.tokens = *tokens;
  piece.order = *std::move(order);
  piece.base = source_number(core, part.base);
  for (const std::uint32_t i : piece.order)
    piece.sources.push_back(source_number(core, part.offsets[i].delta));
  piece.first_output = core.outputs();
  add_outputs(core, part, piece.tokens);
  add_base_taps(piece, options.interpolate_kv ? options.interpolation_window : 0,
                build.interpolated_kv);
  KVMELD_TRY(add_offset_taps(piece, options.interpolation_window, p, build.interpolated));
  build.pieces.push_back(std::move(piece));
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
