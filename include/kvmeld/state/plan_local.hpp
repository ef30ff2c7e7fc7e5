#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/seal.hpp>
#include <kvmeld/state/plan_core.hpp>
#include <kvmeld/tensor/span_of.hpp>

/// What a plan renders beside the spans: the prefix, and the local cache for layers and heads that
/// the target keeps.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Which rows of a layer come from the local cache.
enum class LayerPart : std::uint8_t { rendered, by_head, kept };

/// Says of every layer what the target's masks leave of it. Errors: `invalid_argument` for masks of
/// a wrong size.
KVMELD_LAZY Result<std::vector<LayerPart>> layer_parts(const Target& target) {
  const std::vector<LayerShape>& layers = target.geometry.layers;
  std::size_t heads = 0;
  for (const LayerShape& layer : layers) heads += layer_heads(layer);
  if (!target.layers.all() && target.layers.layers.size() != layers.size()) {
    return error(ErrorCode::invalid_argument, "the target's layer mask has ",
                 target.layers.layers.size(), " entries for ", layers.size(), " layers");
  }
  if (!target.heads.all() && target.heads.heads.size() != heads) {
    return error(ErrorCode::invalid_argument, "the target's head mask has ",
                 target.heads.heads.size(), " entries for ", heads, " heads");
  }
  std::vector<LayerPart> parts;
  std::size_t at = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::size_t count = layer_heads(layers[l]);
    std::size_t chosen = count;
    if (!target.heads.all()) {
      chosen = 0;
      for (std::size_t h = 0; h < count; ++h) chosen += target.heads.heads[at + h] != 0 ? 1U : 0U;
    }
    at += count;
    const bool none = !target.layers.contains(l) || (chosen == 0 && count > 0);
    parts.push_back(none              ? LayerPart::kept
                    : chosen == count ? LayerPart::rendered
                                      : LayerPart::by_head);
    for (const PlaneShape& shape : layers[l].planes) {
      if (parts.back() != LayerPart::by_head || static_cast<std::size_t>(shape.heads) == count)
        continue;
      return error(ErrorCode::unsupported, "a head mask, and planes of ", count, " and ",
                   shape.heads, " heads in layer ", l);
    }
  }
  return parts;
}

/// Appends the local cache as a source for the layers and heads that the target leaves out.
KVMELD_LAZY Status add_local(PlanCore& core, Alignment& alignment, const Target& target,
                             std::span<const LayerPart> parts) {
  const std::size_t layers = target.geometry.layers.size();
  if (std::all_of(parts.begin(), parts.end(),
                  [](LayerPart part) { return part == LayerPart::rendered; }))
    return {};
  if (!target.local || !target.local->valid()) {
    return error(ErrorCode::invalid_argument,
                 "the target leaves layers or heads out and gives no local cache for them");
  }
  if (target.local->tokens() < core.outputs()) {
    return error(ErrorCode::token_count_mismatch, "the local cache holds ", target.local->tokens(),
                 " tokens, the render ", core.outputs());
  }
  KVMELD_TRY(check_same(target.local->geometry(), target.geometry));
  KVMELD_TRY(check_on_host(*target.local, "the local cache"));
  // Layers that are rendered anyway are left out of the copy, whatever they hold; what lies behind
  // the outputs may be stale.
  const KvCacheRef whole = target.local->first(core.outputs());
  const std::vector<std::int32_t> absent(static_cast<std::size_t>(core.outputs()), -1);
  std::vector<PlaneRef> planes;
  for (std::size_t l = 0; l < layers; ++l) {
    for (std::size_t p = 0; p < target.geometry.layers[l].planes.size(); ++p) {
      planes.push_back(whole.plane(l, p));
      if (parts[l] == LayerPart::rendered)
        planes.back().slots = {.kind = SlotKind::slot_list_i32, .table = absent.data()};
    }
  }
  auto sealed = seal(KvCacheRef(whole.shared_geometry(), std::move(planes), core.outputs()),
                     {.positions = span_of(core.positions)});
  if (!sealed) return sealed.error();
  AlignmentGroup kept;
  for (std::size_t l = 0; l < layers; ++l)
    kept.layers.layers.push_back(parts[l] == LayerPart::kept ? 1 : 0);
  for (std::int64_t o = 0; o < core.outputs(); ++o) {
    kept.contributions.push_back(
        {static_cast<std::uint32_t>(core.sources.size()), static_cast<std::uint32_t>(o), 1.0F});
    kept.end_row();
  }
  core.local_source = core.sources.size();
  core.sources.push_back({*std::move(sealed), 0, 1.0F, true});
  // the first group that covers a layer counts
  alignment.groups.insert(alignment.groups.begin(), std::move(kept));
  return {};
}

/// Lets the local cache contribute to the heads that the target leaves out of layers that it
/// renders: each group gets one before it for such layers, with weights by head.
KVMELD_LAZY void add_local_heads(const PlanCore& core, Alignment& alignment, const Target& target,
                                 std::span<const LayerPart> parts) {
  if (std::find(parts.begin(), parts.end(), LayerPart::by_head) == parts.end()) return;
  const std::vector<LayerShape>& layers = target.geometry.layers;
  std::vector<AlignmentGroup> by_head(alignment.groups.size());
  std::vector<std::uint32_t> heads_of(alignment.groups.size());
  std::size_t mask_at = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::size_t heads = layer_heads(layers[l]);
    std::size_t g = 0;
    while (g < alignment.groups.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == alignment.groups.size()) continue;  // refused when rows are compiled
    const AlignmentGroup& from = alignment.groups[g];
    AlignmentGroup& to = by_head[g];
    if (to.layers.layers.empty()) {
      to.layers.layers.assign(layers.size(), 0);
      to.head_rows.assign(layers.size(), 0);
    }
    if (parts[l] == LayerPart::by_head) {
      to.layers.layers[l] = 1;
      to.head_rows[l] = heads_of[g];
      heads_of[g] += static_cast<std::uint32_t>(heads);
      const std::size_t n = from.contributions.size();
      for (std::size_t h = 0; h < heads; ++h) {
        const bool chosen = target.heads.heads[mask_at + h] != 0;
        for (std::size_t o = 0; o + 1 < from.row_begin.size(); ++o) {
          for (std::size_t i = from.row_begin[o]; i < from.row_begin[o + 1]; ++i) {
            to.head_weights.push_back(!chosen ? 0.0F
                                      : from.head_weights.empty()
                                          ? 1.0F
                                          : from.head_weights[(from.head_rows[l] + h) * n + i]);
          }
          if (from.row_begin[o] != from.row_begin[o + 1])
            to.head_weights.push_back(chosen ? 0.0F : 1.0F);
        }
      }
    }
    mask_at += heads;
  }
  std::vector<AlignmentGroup> all;
  for (std::size_t g = 0; g < by_head.size(); ++g) {
    AlignmentGroup& to = by_head[g];
    if (to.head_weights.empty()) continue;
    const AlignmentGroup& from = alignment.groups[g];
    for (std::size_t o = 0; o + 1 < from.row_begin.size(); ++o) {
      const auto row = from.row(o);
      to.contributions.insert(to.contributions.end(), row.begin(), row.end());
      if (!row.empty())
        to.contributions.push_back(
            {static_cast<std::uint32_t>(core.local_source), static_cast<std::uint32_t>(o), 1.0F});
      to.end_row();
    }
    all.push_back(std::move(to));
  }
  alignment.groups.insert(alignment.groups.begin(), std::make_move_iterator(all.begin()),
                          std::make_move_iterator(all.end()));
}

/// Puts the prefix's tokens, one contribution each, in front of the spans' alignment; the prefix
/// becomes source 0.
KVMELD_LAZY void prepend_prefix(Alignment& alignment, const Fragment& prefix,
                                std::int64_t first_position) {
  const auto count = static_cast<std::size_t>(prefix.token_count());
  std::vector<std::int64_t> positions;
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    positions.push_back(first_position + static_cast<std::int64_t>(i));
    tokens.push_back(prefix.token_id(static_cast<std::int64_t>(i)));
  }
  alignment.positions.insert(alignment.positions.begin(), positions.begin(), positions.end());
  alignment.tokens.insert(alignment.tokens.begin(), tokens.begin(), tokens.end());
  for (AlignmentGroup& group : alignment.groups) {
    for (Contribution& c : group.contributions) ++c.source;
    std::vector<Contribution> contributions;
    std::vector<std::uint32_t> row_begin{0};
    for (std::size_t i = 0; i < count; ++i) {
      contributions.push_back({0, static_cast<std::uint32_t>(i), 1.0F});
      row_begin.push_back(static_cast<std::uint32_t>(i + 1));
    }
    for (std::size_t o = 1; o < group.row_begin.size(); ++o)
      row_begin.push_back(group.row_begin[o] + static_cast<std::uint32_t>(count));
    const std::size_t before = group.contributions.size();
    contributions.insert(contributions.end(), group.contributions.begin(),
                         group.contributions.end());
    if (!group.head_weights.empty()) {
      std::vector<float> weights;
      for (std::size_t at = 0; at < group.head_weights.size(); at += before) {
        weights.insert(weights.end(), count, 1.0F);
        const auto row = group.head_weights.begin() + static_cast<std::ptrdiff_t>(at);
        weights.insert(weights.end(), row, row + static_cast<std::ptrdiff_t>(before));
      }
      group.head_weights = std::move(weights);
    }
    group.contributions = std::move(contributions);
    group.row_begin = std::move(row_begin);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
