#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/rope_table.hpp>
#include <kvmeld/cache/seal.hpp>
#include <kvmeld/state/fragment_set.hpp>
#include <kvmeld/state/render_work.hpp>
#include <kvmeld/state/target.hpp>

/// The part of a plan that does not depend on the merger's type.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One fragment encoding that a plan reads; keeps the bytes alive.
struct PlanSource {
  Fragment fragment;
  std::size_t payload_index = 0;
  float weight = 1.0F;
  /// Made by the plan: a copy of the local cache, or mapped from another model (and then mostly
  /// un-rotated, all at position 0).
  bool own = false;

  KVMELD_LAZY [[nodiscard]] const Payload& payload() const noexcept {
    return fragment.payloads()[payload_index];
  }
};

/// Owner of the arrays behind a `RowGroup`.
struct GroupArrays {
  std::vector<std::uint32_t> row_begin{0};
  std::vector<RowInput> inputs;
  std::vector<std::uint32_t> out_shift;
  std::vector<std::uint32_t> run;
  // (inputs) turn straight to the output; empty without head weights
  std::vector<std::uint32_t> direct;
  std::vector<std::uint32_t> origin;  // (inputs) index of the contribution, likewise
};

/// The part of a plan that does not depend on the merger's type.
struct PlanCore {
  std::shared_ptr<const Geometry> geometry;
  std::vector<PlanSource> sources;
  // the copy of the local cache, if there is one
  std::size_t local_source = static_cast<std::size_t>(-1);
  std::int64_t first_position = 0;      // of the target
  std::vector<std::int64_t> positions;  // (outputs)
  std::vector<TokenId> tokens;          // (outputs)
  std::vector<Hole> holes;
  std::vector<std::int64_t> shifts{0};  // distinct turns; index 0 turns nothing
  std::vector<GroupArrays> groups;
  std::vector<std::uint32_t> layer_group;  // (layers)
  // (layers) each (head, input of the group), or empty
  std::vector<std::vector<float>> head_weights;
  std::vector<std::size_t> layer_needed_from;  // (layers) first output whose row some query reads
  std::vector<RopeTable> ropes;
  std::vector<std::int32_t> layer_rope;  // (layers) −1: keys are not turned
  std::int64_t bytes = 0;
  std::int64_t fused = 0;  // outputs, holes left out, of two contributions or more
  RenderWarnings warnings = RenderWarnings::none;
  Digest128 render_id;

  KVMELD_LAZY [[nodiscard]] std::int64_t outputs() const noexcept {
    return static_cast<std::int64_t>(positions.size());
  }
  /// Whether a run writes this output's row in this layer.
  [[nodiscard]] bool rendered(std::size_t layer, std::int64_t output) const noexcept {
    const GroupArrays& rows = groups[layer_group[layer]];
    return rows.row_begin[static_cast<std::size_t>(output)] !=
           rows.row_begin[static_cast<std::size_t>(output) + 1];
  }
  KVMELD_LAZY [[nodiscard]] std::size_t planes() const noexcept {
    std::size_t count = 0;
    for (const LayerShape& layer : geometry->layers) count += layer.planes.size();
    return count;
  }
};

/// What a run of a plan reports.
KVMELD_LAZY [[nodiscard]] RenderReport report_of(const PlanCore& core) {
  return {
      .tokens = core.outputs(),
      .holes = static_cast<std::int64_t>(core.holes.size()),
      .bytes = core.bytes,
      .render_id = core.render_id,
      .content_digest = std::nullopt,
      .fused = core.fused,
      .warnings = core.warnings,
      .next_position = core.positions.empty() ? core.first_position : core.positions.back() + 1};
}

/// Row of a token among those that a layer holds, or −1.
KVMELD_LAZY [[nodiscard]] std::int64_t payload_row(const Payload& payload, std::size_t layer,
                                                   std::uint32_t token) {
  const TokenSet& set = payload.token_sets[payload.layer_set[layer]];
  if (set.all) return token;
  const auto at =
      std::lower_bound(set.present.begin(), set.present.end(), static_cast<std::int32_t>(token));
  return at != set.present.end() && *at == static_cast<std::int32_t>(token)
             ? at - set.present.begin()
             : -1;
}

/// Heads of a layer: those of its first plane.
KVMELD_LAZY [[nodiscard]] std::size_t layer_heads(const LayerShape& layer) noexcept {
  return layer.planes.empty() ? 0 : static_cast<std::size_t>(layer.planes[0].heads);
}

}  // namespace detail
KVMELD_NAMESPACE_END
