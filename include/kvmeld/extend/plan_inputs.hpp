#pragma once

/// What a plan is made of: sources that were checked, placed, converted and bounded.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/extend/plan.hpp>
#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

// Fragments of other models in a plan: asked for, checked, and made fragments of the target's
// model.

namespace detail {

/// What an aligner takes beside fragments in the target's geometry, of any type.
struct TransformCall {
  const void* policy = nullptr;
  Status (*accepts)(const void*, const Geometry&, const Geometry&) = nullptr;
  Result<Payload> (*transform)(const void*, const Fragment&, std::size_t,
                               const Geometry&) = nullptr;
};

template <class P>
[[nodiscard]] TransformCall transform_call([[maybe_unused]] const P& policy) {
  if constexpr (TransformForm<P>) {
    return {&policy,
            [](const void* p, const Geometry& from, const Geometry& to) {
              return static_cast<const P*>(p)->accepts(from, to);
            },
            [](const void* p, const Fragment& fragment, std::size_t payload, const Geometry& to) {
              return static_cast<const P*>(p)->transform(fragment, payload, to);
            }};
  } else {
    return {};
  }
}

/// Refuses what a transform (perhaps the user's) made wrong.
inline Status check_mapped(const Payload& payload, const Geometry& geometry, std::int64_t tokens) {
  std::size_t plane = 0;
  const auto wrong = [&](const char* what) {
    return error(ErrorCode::invalid_argument, "a transform's payload of ", tokens,
                 " tokens has wrong ", what);
  };
  if (payload.bytes == nullptr || static_cast<std::int64_t>(payload.positions.size()) != tokens)
    return wrong("positions or no bytes");
  const bool unrotated = std::all_of(payload.positions.begin(), payload.positions.end(),
                                     [](std::int64_t at) { return at == 0; });
  for (std::size_t t = 0; t < payload.positions.size() && !unrotated; ++t) {
    if (payload.positions[t] < 0 || payload.positions[t] > max_position ||
        (t > 0 && payload.positions[t] <= payload.positions[t - 1])) {
      return wrong("positions: all are 0, or each is above the one before");
    }
  }
  if (payload.layer_set.size() != geometry.layers.size()) return wrong("layers");
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    if (payload.layer_set[l] >= payload.token_sets.size()) return wrong("token sets");
    const TokenSet& set = payload.token_sets[payload.layer_set[l]];
    for (std::size_t i = 0; !set.all && i < set.present.size(); ++i) {
      if (set.present[i] < 0 || set.present[i] >= tokens ||
          (i > 0 && set.present[i] <= set.present[i - 1]))
        return wrong("token sets");
    }
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (plane >= payload.plane_offsets.size()) return wrong("planes");
      const auto bytes =
          static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads * row_bytes(shape));
      if (payload.plane_offsets[plane] > payload.byte_count ||
          bytes > payload.byte_count - payload.plane_offsets[plane])
        return wrong("planes");
      ++plane;
    }
  }
  return {};
}

/// The fragment as it is in the target's model: one payload, the same id, token ids where the
/// tokenizers are one.
inline Result<Fragment> mapped_fragment(const TransformCall& call, const Fragment& fragment,
                                        std::size_t payload,
                                        const std::shared_ptr<const Geometry>& to) {
  auto mapped = call.transform(call.policy, fragment, payload, *to);
  if (!mapped) return mapped.error();
  KVMELD_TRY(check_mapped(*mapped, *to, fragment.token_count()));
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = to;
  body->role = fragment.role();
  body->token_count = fragment.token_count();
  if (!to->tokenizer.empty() && fragment.geometry().tokenizer == to->tokenizer) {
    body->tokens.assign(fragment.tokens().begin(), fragment.tokens().end());
    for (TokenId& id : body->tokens) {  // a placeholder of either model tells nothing
      if (fragment.geometry().is_placeholder(id) && !to->is_placeholder(id)) id = -1;
    }
  }
  body->payloads.push_back(*std::move(mapped));
  body->id = fragment.id();
  return Fragment(std::move(body));
}

}  // namespace detail

// What `plan` refuses: sets that do not fit together or the target, and answers of policies that
// cannot be rendered.

namespace detail {

/// The prefix and the spans of a set, checked against each other and the target. Fragments of other
/// models that the aligner maps are spans; their prefixes belong to the other model's context and
/// are left out.
struct SetParts {
  const FragmentSet::Entry* prefix = nullptr;    ///< to be rendered
  const FragmentSet::Entry* in_place = nullptr;  ///< known, and held by the engine already
  std::vector<const FragmentSet::Entry*> spans;
  std::vector<const FragmentSet::Entry*> mapped;  ///< those of `spans` that come from another model

  [[nodiscard]] bool maps(const Fragment& fragment) const {
    return std::any_of(mapped.begin(), mapped.end(),
                       [&](const FragmentSet::Entry* e) { return &e->fragment == &fragment; });
  }
};

inline Result<SetParts> split(const FragmentSet& set, const Target& target,
                              const TransformCall& transform) {
  SetParts parts;
  std::string unknown;
  for (const FragmentSet::Entry* entry : in_force(set)) {
    if (!entry->fragment.valid()) {
      unknown.append(" ").append(entry->id.hex());
      continue;
    }
    const Status same = check_same(entry->fragment.geometry(), target.geometry);
    if (!same) {
      if (transform.accepts == nullptr) return same;
      const Status accepted =
          transform.accepts(transform.policy, entry->fragment.geometry(), target.geometry);
      // no map of it is meant
      if (!accepted)
        return entry->fragment.geometry().model == target.geometry.model ? same : accepted;
      if (entry->fragment.role() == Role::span) {
        parts.spans.push_back(entry);
        parts.mapped.push_back(entry);
      }
      continue;
    }
    if (entry->fragment.role() == Role::prefix) {
      if (parts.prefix != nullptr) {
        return error(ErrorCode::prefix_conflict,
                     "two prefixes in one set: ", parts.prefix->fragment.id().hex(), " and ",
                     entry->fragment.id().hex());
      }
      parts.prefix = entry;
    } else {
      parts.spans.push_back(entry);
    }
  }
  if (!unknown.empty())
    return error(ErrorCode::payload_missing, "fragments known by id alone:", unknown,
                 "; fetch them and plan again");
  const FragmentId* named = nullptr;
  for (const FragmentSet::Entry* span : parts.spans) {
    const FragmentId& prefix = span->fragment.prefix();
    if (prefix.empty() || parts.maps(span->fragment)) continue;
    if (named != nullptr && *named != prefix) {
      return error(ErrorCode::prefix_conflict,
                   "spans were sealed behind two prefixes: ", named->hex(), " and ", prefix.hex());
    }
    named = &prefix;
  }
  if (named != nullptr && parts.prefix != nullptr && *named != parts.prefix->fragment.id()) {
    return error(ErrorCode::prefix_conflict, "spans were sealed behind prefix ", named->hex(),
                 ", the set holds ", parts.prefix->fragment.id().hex());
  }
  if (named != nullptr && parts.prefix == nullptr && !target.prefix_in_place) {
    return error(ErrorCode::prefix_missing, "spans name prefix ", named->hex(),
                 ", which is not in the set; insert it, or set prefix_in_place");
  }
  if (target.prefix_in_place) parts.in_place = std::exchange(parts.prefix, nullptr);
  return parts;
}

}  // namespace detail

namespace extend {

inline Status check_positions(const Geometry& geometry, const std::vector<PlanSource>& sources,
                              const PlanCore& core, const FragmentSet::Entry* in_place,
                              std::int64_t context_length) {
  // Every source was made at a length of its own, unless the engine fixed the frequencies for its
  // whole context.
  const std::int64_t target_length = core.positions.empty() ? 0 : core.positions.back() + 1;
  const auto check_source = [&](const RopeSpec& rope, const PlanSource& source) {
    if (context_length > 0) return check_shift(rope, context_length, context_length);
    const std::vector<std::int64_t>& positions = source.payload().positions;
    return positions.empty() ? Status() : check_shift(rope, positions.back() + 1, target_length);
  };
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (shape.rotary) {
        for (const PlanSource& source : sources) {
          const std::vector<std::int64_t>& positions = source.payload().positions;
          // no frequencies in keys without position
          const bool unrotated = source.own && !positions.empty() && positions.back() == 0;
          if (!unrotated) KVMELD_TRY(check_source(geometry.layers[l].rope, source));
        }
      }
      if (shape.channels > max_channels) {
        return error(ErrorCode::unsupported, "layer ", l, ": head size ", shape.channels,
                     " is above ", max_channels);
      }
      if (shape.scales != ScaleScheme::none) {
        return error(
            ErrorCode::unsupported, "layer ", l,
            ": rendering planes with scales apart is not possible; seal them as f16 or q8_0");
      }
    }
  }
  std::int64_t bos_seen = 0;
  if (geometry.bos >= 0) {
    bos_seen = std::count(core.tokens.begin(), core.tokens.end(), geometry.bos);
    if (in_place != nullptr) {
      for (const TokenId id : in_place->fragment.tokens()) bos_seen += id == geometry.bos ? 1 : 0;
    }
  }
  for (std::size_t o = 0; geometry.bos >= 0 && in_place == nullptr && o < core.tokens.size(); ++o) {
    // something stands before it
    if (core.tokens[o] == geometry.bos && core.positions[o] > 0)
      bos_seen = (std::max)(bos_seen, std::int64_t{2});
  }
  if (bos_seen > 1) {
    return error(ErrorCode::duplicate_bos, bos_seen, " beginning-of-sequence tokens (id ",
                 geometry.bos, ") would enter one context; seal it once, in the prefix");
  }
  return {};
}

}  // namespace extend

namespace detail {

/// Refuses a selection that is not ascending tokens of its fragment.
inline Status check_selection(const TokenSet& selected, const Fragment& fragment) {
  std::int64_t last = -1;
  for (std::size_t i = 0; !selected.all && i < selected.present.size(); ++i) {
    const std::int64_t token = selected.present[i];
    if (token <= last || token >= fragment.token_count()) {
      return error(ErrorCode::invalid_argument, "the select policy named token ", token,
                   " behind token ", last, " of a fragment of ", fragment.token_count());
    }
    last = token;
  }
  return {};
}

/// Refuses an order that is not each of `count` spans once.
inline Status check_order(std::span<const std::uint32_t> order, std::size_t count) {
  if (order.size() != count)
    return error(ErrorCode::invalid_argument, "the order policy kept ", order.size(), " of ", count,
                 " spans");
  std::vector<std::uint8_t> seen(count, 0);
  for (const std::uint32_t i : order) {
    if (i >= count || seen[i]++ != 0)
      return error(ErrorCode::invalid_argument, "the order policy named span ", i, " of ", count,
                   " wrongly or twice");
  }
  return {};
}

/// Refuses alignments that a policy (perhaps the user's) built wrong.
inline Status check_alignment(const Alignment& alignment, const Geometry& geometry,
                              std::span<const Source> ordered, std::int64_t first_position) {
  const std::size_t n = alignment.positions.size();
  if (alignment.tokens.size() != n)
    return error(ErrorCode::token_count_mismatch, "alignment: ", alignment.tokens.size(),
                 " ids for ", n, " outputs");
  if (n > 0 && alignment.positions[0] < first_position) {
    return error(ErrorCode::duplicate_position, "alignment: output 0 at position ",
                 alignment.positions[0], ", the first free one is ", first_position);
  }
  for (std::size_t o = 1; o < n; ++o) {
    if (alignment.positions[o] <= alignment.positions[o - 1]) {
      return error(ErrorCode::duplicate_position, "alignment: output ", o, " at position ",
                   alignment.positions[o], " follows position ", alignment.positions[o - 1]);
    }
  }
  if (n > 0 && alignment.positions[n - 1] > 2 * max_position) {
    return error(ErrorCode::invalid_argument, "alignment: position ", alignment.positions[n - 1],
                 " is beyond ", 2 * max_position);
  }
  // rows of weights that each group must have
  std::vector<std::size_t> heads(alignment.groups.size());
  for (const LayerShape& layer : geometry.layers) {
    const auto l = static_cast<std::size_t>(&layer - geometry.layers.data());
    std::size_t g = 0;
    while (g < heads.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == heads.size()) continue;  // refused later
    heads[g] += layer_heads(layer);
    if (alignment.groups[g].head_weights.empty()) continue;
    for (const PlaneShape& shape : layer.planes) {
      if (static_cast<std::size_t>(shape.heads) == layer_heads(layer)) continue;
      return error(ErrorCode::unsupported, "alignment: weights by head, and planes of ",
                   layer.planes[0].heads, " and ", shape.heads, " heads in layer ", l);
    }
  }
  for (const AlignmentGroup& group : alignment.groups) {
    const auto g = static_cast<std::size_t>(&group - alignment.groups.data());
    if (!group.head_weights.empty() &&
        group.head_weights.size() != heads[g] * group.contributions.size()) {
      return error(ErrorCode::invalid_argument, "alignment: ", group.head_weights.size(),
                   " weights by head for ", heads[g], " heads and ", group.contributions.size(),
                   " contributions");
    }
    for (const float w : group.head_weights) {
      if (!std::isfinite(w))
        return error(ErrorCode::non_finite, "alignment: a weight by head is not finite");
    }
    if (group.row_begin.size() != n + 1 || group.row_begin.front() != 0 ||
        group.row_begin.back() != group.contributions.size() ||
        !std::is_sorted(group.row_begin.begin(), group.row_begin.end())) {
      return error(ErrorCode::invalid_argument, "alignment: ", group.row_begin.size(),
                   " row offsets for ", n, " outputs and ", group.contributions.size(),
                   " contributions");
    }
    for (std::size_t o = 0; o < n; ++o) {
      if (group.row(o).size() > (std::size_t{chunk_inputs} << (max_levels - 1))) {
        return error(ErrorCode::oversized, "alignment: output ", o, " has ", group.row(o).size(),
                     " contributions");
      }
    }
    for (const Contribution& c : group.contributions) {
      if (c.source >= ordered.size() ||
          c.token >= static_cast<std::uint64_t>(ordered[c.source].fragment->token_count())) {
        return error(ErrorCode::invalid_argument, "alignment: contribution of token ", c.token,
                     " of source ", c.source, " does not exist");
      }
      if (!std::isfinite(c.weight))
        return error(ErrorCode::non_finite, "alignment: a weight of source ", c.source,
                     " is not finite");
    }
  }
  return {};
}

template <class F>
[[nodiscard]] Result<float> source_weight(const F& fuser, const Source& source) {
  if constexpr (WeightForm<F>) {
    const Result<float> w = fuser.weight(source);
    if (w.ok() && !std::isfinite(*w))
      return error(ErrorCode::non_finite, "the fuser's weight of fragment ",
                   source.fragment->id().hex(), " is not finite");
    return w;
  } else {
    return 1.0F;
  }
}

}  // namespace detail

// What a plan renders beside the spans: the prefix, and the local cache for layers and heads that
// the target keeps.

namespace detail {

/// Which rows of a layer come from the local cache.
enum class LayerPart : std::uint8_t { rendered, by_head, kept };

/// Says of every layer what the target's masks leave of it. Errors: `invalid_argument` for masks of
/// a wrong size.
inline Result<std::vector<LayerPart>> layer_parts(const Target& target) {
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
inline Status add_local(PlanCore& core, Alignment& alignment, const Target& target,
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
inline void add_local_heads(const PlanCore& core, Alignment& alignment, const Target& target,
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
inline void prepend_prefix(Alignment& alignment, const Fragment& prefix,
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

// Whether the output's elements can hold what a run makes of a plan: said when the plan is made,
// so that no run writes an infinity.

namespace detail {

/// Scales the weights of each row, or of each head of it, by the power of two that brings their sum
/// into (1/2, 1]: a weighted mean stays as it is to the bit (but for sums that are subnormal), and
/// no partial sum exceeds the largest contribution.
inline void scale_weights(PlanCore& core) {
  const auto scale = [](std::size_t count, const auto& weight) {
    double total = 0;
    std::size_t used = 0;
    for (std::size_t i = 0; i < count; ++i) {
      total += static_cast<double>(weight(i));
      used += weight(i) != 0.0F ? 1U : 0U;
    }
    if (used < 2) return;
    int exponent = 0;
    if (std::frexp(total, &exponent) == 0.5) --exponent;
    const float factor = std::ldexp(1.0F, -exponent);
    for (std::size_t i = 0; i < count; ++i) {
      const float scaled =
          weight(i) * factor;  // a weight that is there stays: 0 would mean that it is not
      weight(i) =
          scaled == 0.0F && weight(i) != 0.0F ? std::numeric_limits<float>::denorm_min() : scaled;
    }
  };
  const auto each_row = [](const GroupArrays& group, const auto& use) {
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      use(group.row_begin[o], group.row_begin[o + 1] - group.row_begin[o]);
    }
  };
  for (GroupArrays& group : core.groups) {
    each_row(group, [&](std::size_t begin, std::size_t count) {
      scale(count, [&](std::size_t i) -> float& { return group.inputs[begin + i].weight; });
    });
  }
  for (std::size_t l = 0; l < core.head_weights.size(); ++l) {
    const GroupArrays& group = core.groups[core.layer_group[l]];
    for (std::size_t at = 0; at < core.head_weights[l].size(); at += group.inputs.size()) {
      each_row(group, [&](std::size_t begin, std::size_t count) {
        scale(count, [&](std::size_t i) -> float& { return core.head_weights[l][at + begin + i]; });
      });
    }
  }
}

/// What is done with each source in one layer, whatever the plane.
struct LayerUse {
  std::vector<std::uint8_t> copied, rotated, fused;  // (sources)
  bool any_fused = false;
  bool rotated_in = false;   ///< some row before it is fused
  bool rotated_out = false;  ///< some row after
  double weights = 0;        ///< largest sum of magnitudes of one fused row
};

[[nodiscard]] inline double sum_of_magnitudes(const HeadInputs& row) noexcept {
  double sum = 0;
  for (int i = 0; i < row.count; ++i) sum += std::fabs(static_cast<double>(row.weight(i)));
  return sum;
}

/// @param keeps_single  the fuser hands a single contribution on as it is
[[nodiscard]] inline LayerUse layer_use(const PlanCore& core, std::size_t layer,
                                        bool keeps_single) {
  const GroupArrays& group = core.groups[core.layer_group[layer]];
  const std::vector<float>& heads = core.head_weights[layer];
  LayerUse use;
  for (auto* of : {&use.copied, &use.rotated, &use.fused}) of->assign(core.sources.size(), 0);
  for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
    const std::uint32_t begin = group.row_begin[o], end = group.row_begin[o + 1];
    const bool single = heads.empty() && end - begin == 1 && keeps_single;
    for (std::uint32_t i = begin; i < end; ++i) {
      const RowInput& input = group.inputs[i];
      const std::uint32_t direct = heads.empty() ? input.shift : group.direct[i];
      if (single || !heads.empty()) (direct != 0 ? use.rotated : use.copied)[input.source] = 1;
      if (single) continue;
      use.fused[input.source] = 1;
      use.any_fused = true;
      use.rotated_in = use.rotated_in || input.shift != 0;
      use.rotated_out = use.rotated_out || group.out_shift[o] != 0;
    }
    if (single) continue;
    const auto count = static_cast<int>(end - begin);
    for (std::size_t at = 0; at < heads.size(); at += group.inputs.size()) {
      use.weights = (std::max)(use.weights, sum_of_magnitudes({group.inputs.data() + begin,
                                                               heads.data() + at + begin, count}));
    }
    if (heads.empty())
      use.weights =
          (std::max)(use.weights, sum_of_magnitudes({group.inputs.data() + begin, nullptr, count}));
  }
  return use;
}

/// Whether the sources' peaks alone say that a plane's results are numbers of its type. A rotated
/// channel is at most √2 of the larger of its pair; 2 % more than that covers the rounding of any
/// sum.
/// @param peaks (sources)
template <class Rows>
[[nodiscard]] bool surely_fits(const Rows& rows, const LayerUse& use,
                               const std::vector<double>& peaks, const PlaneShape& shape,
                               bool rotary) {
  constexpr double most = static_cast<double>((std::numeric_limits<float>::max)()), rounding = 1.02;
  const double limit = largest_stored(shape.type), rotation = rotary ? 1.4142135623730951 : 1.0;
  double peak = 0;
  for (std::size_t s = 0; s < peaks.size(); ++s) {
    if (use.copied[s] != 0 && !is_finite(peaks[s])) return false;
    if (use.rotated[s] != 0 &&
        !(rotary ? peaks[s] * rotation * rounding <= limit : is_finite(peaks[s])))
      return false;
    if (use.fused[s] != 0) peak = (std::max)(peak, peaks[s]);
  }
  if (!use.any_fused) return true;
  if constexpr (requires { rows.bound(peak, use.weights, 1); }) {
    const double in = peak * (use.rotated_in ? rotation : 1.0) * rounding;
    if (!(in <= most)) return false;
    const double fused = rows.bound(in, use.weights, static_cast<int>(shape.channels));
    return fused <= most && fused * (use.rotated_out ? rotation : 1.0) <= limit;
  } else {
    return false;
  }
}

/// Computes the rows of one plane, some at a time, and refuses what is not finite.
template <class Rows>
Status check_plane(const PlanCore& core, const Rows& rows, std::size_t l, std::size_t p,
                   std::size_t index) {
  const PlaneShape& shape = core.geometry->layers[l].planes[p];
  const std::int64_t token_bytes = row_bytes(shape) * shape.heads;
  if (token_bytes == 0) return {};
  const std::int64_t most = (std::max)((std::int64_t{1} << 16) / token_bytes, std::int64_t{1});
  std::vector<std::byte> scratch(static_cast<std::size_t>(most * token_bytes));
  std::vector<std::int32_t> slots(static_cast<std::size_t>(core.outputs()), -1);
  MutablePlaneRef out;
  out.data = scratch.data();
  out.shape = shape;
  out.tokens = core.outputs();
  out.token_stride = std::int64_t{shape.heads} * shape.channels;
  out.head_stride = shape.channels;
  out.slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
  std::vector<const std::byte*> bases(core.sources.size() + 1);
  const PlaneTask task =
      plane_task(core, l, p, index, out, bases.data(), [](const auto* host) { return host; });
  for (std::int64_t first = 0; first < core.outputs(); first += most) {
    const std::int64_t last = (std::min)(first + most, core.outputs());
    for (std::int64_t o = first; o < last; ++o)
      slots[static_cast<std::size_t>(o)] = static_cast<std::int32_t>(o - first);
    std::fill(scratch.begin(), scratch.end(), std::byte{0});
    render_rows(rows, &task, core.outputs(), {best_isa(), false}, first, last);
    const std::size_t bad = first_non_finite(shape.type, scratch.data(), scratch.size(),
                                             static_cast<std::size_t>(row_bytes(shape)));
    if (bad == scratch.size() / static_cast<std::size_t>(row_bytes(shape))) continue;
    const std::int64_t o = first + static_cast<std::int64_t>(bad) / shape.heads;
    const HeadInputs inputs = task.head_inputs(o, static_cast<std::int64_t>(bad) % shape.heads);
    double peak = 0;
    for (int i = 0; i < inputs.count; ++i) {
      if (inputs.used(i))
        peak = (std::max)(peak, peak_of(shape.type, task.input(inputs.inputs[i], 0),
                                        static_cast<std::size_t>(token_bytes)));
    }
    return error(ErrorCode::non_finite, "layer ", l, " plane ", p, ", output ", o, " at position ",
                 core.positions[static_cast<std::size_t>(o)], ", head ",
                 static_cast<std::int64_t>(bad) % shape.heads, ": the result is beyond ",
                 to_string(shape.type), " (largest ", largest_stored(shape.type), "); its ",
                 inputs.used_count(), " contributions reach ", peak, ", the first is of fragment ",
                 core.sources[inputs.inputs[inputs.first_used()].source].fragment.id().hex());
  }
  return {};
}

}  // namespace detail

namespace extend {

/// Refuses a plan whose run would write what is no number of the output's elements, with
/// `non_finite`.
///
/// Most planes pass by the peaks of their payloads, O(planes · sources). The others, and those of
/// fusers that give no `bound`, are computed here once, O(bytes) of each.
template <class Rows>
Status check_range(const PlanCore& core, const Rows& rows) {
  const std::vector<LayerShape>& layers = core.geometry->layers;
  std::vector<detail::LayerUse> of_group(core.groups.size());
  std::vector<std::uint8_t> known(core.groups.size(), 0);
  std::size_t index = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::size_t g = core.layer_group[l];
    if (known[g] == 0 || !core.head_weights[l].empty())
      of_group[g] = detail::layer_use(core, l, keeps_single<Rows>());
    known[g] = 1;
    for (std::size_t p = 0; p < layers[l].planes.size(); ++p, ++index) {
      std::vector<double> peaks;
      for (const PlanSource& source : core.sources)
        peaks.push_back(detail::payload_peaks(*core.geometry, source.payload())[index]);
      const PlaneShape& shape = layers[l].planes[p];
      if (detail::surely_fits(rows, of_group[g], peaks, shape,
                              shape.rotary && core.layer_rope[l] >= 0))
        continue;
      KVMELD_TRY(detail::check_plane(core, rows, l, p, index));
    }
  }
  return {};
}

}  // namespace extend

KVMELD_NAMESPACE_END
