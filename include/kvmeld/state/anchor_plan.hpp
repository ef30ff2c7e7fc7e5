#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/anchor_layers.hpp>
#include <kvmeld/state/anchor_pieces.hpp>

/// Segments at new places, corrected by what other contexts did to segments like them: base + Σ w·Δ
/// as a plan that `run` executes.

KVMELD_NAMESPACE_BEGIN
namespace detail {

KVMELD_LAZY Digest128 reuse_id(std::span<const ReusePiece> pieces, const Geometry& geometry,
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
KVMELD_LAZY [[nodiscard]] Result<ReusePlan> plan_reuse(std::span<const ReusePart> parts,
                                                       const Geometry& geometry,
                                                       const ReuseOptions& options = {}) {
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
  KVMELD_TRY(validate(geometry));
  KVMELD_TRY(detail::check_reuse_options(options, geometry));
  detail::ReuseBuild build;
  detail::PlanCore& core = build.core;
  core.geometry = std::make_shared<const Geometry>(geometry);
  for (std::size_t p = 0; p < parts.size(); ++p)
    KVMELD_TRY(detail::add_part(build, parts[p], p, options));
  KVMELD_TRY(
      detail::check_positions(geometry, core.sources, core, nullptr, options.context_length));
  const Alignment alignment =
      detail::reuse_alignment(core, build.pieces, options.context_free_layers);
  std::vector<std::uint8_t> recompute(core.positions.size(), 0);
  if (options.compute_last && !recompute.empty()) recompute.back() = 1;
  const std::int64_t length = options.context_length > 0 || core.positions.empty()
                                  ? options.context_length
                                  : core.positions.back() + 1;
  KVMELD_TRY(detail::compile(
      core, alignment,
      {detail::rotation_equivariant<detail::BlendSum>(), detail::keeps_single<detail::BlendSum>()},
      recompute, length));
  KVMELD_TRY(detail::check_rows<detail::BlendSum>(core, detail::BlendSum{}));
  KVMELD_TRY(detail::check_range(core, detail::BlendSum{}));
  KVMELD_TRY(detail::warn(core, detail::with_several(geometry, alignment, core.positions.size()),
                          RenderWarnings::none, false, false));
  core.render_id = detail::reuse_id(build.pieces, geometry, options);
  const bool approximate = !build.pieces.empty();
  return ReusePlan(std::move(core), approximate, std::move(build.interpolated),
                   std::move(build.interpolated_kv));
}

KVMELD_NAMESPACE_END
