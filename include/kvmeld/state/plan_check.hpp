#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/state/merger.hpp>
#include <kvmeld/state/plan_core.hpp>
#include <kvmeld/state/plan_transform.hpp>
#include <kvmeld/state/superseded.hpp>

/// What `plan` refuses: sets that do not fit together or the target, and answers of policies that
/// cannot be rendered.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The prefix and the spans of a set, checked against each other and the target. Fragments of other
/// models that the aligner maps are spans; their prefixes belong to the other model's context and
/// are left out.
struct SetParts {
  const FragmentSet::Entry* prefix = nullptr;    ///< to be rendered
  const FragmentSet::Entry* in_place = nullptr;  ///< known, and held by the engine already
  std::vector<const FragmentSet::Entry*> spans;
  std::vector<const FragmentSet::Entry*> mapped;  ///< those of `spans` that come from another model

  KVMELD_LAZY [[nodiscard]] bool maps(const Fragment& fragment) const {
    return std::any_of(mapped.begin(), mapped.end(),
                       [&](const FragmentSet::Entry* e) { return &e->fragment == &fragment; });
  }
};

KVMELD_LAZY Result<SetParts> split(const FragmentSet& set, const Target& target,
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

KVMELD_LAZY Status check_positions(const Geometry& geometry, const std::vector<PlanSource>& sources,
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
          const bool unturned = source.own && !positions.empty() && positions.back() == 0;
          if (!unturned) KVMELD_TRY(check_source(geometry.layers[l].rope, source));
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

/// Refuses a selection that is not ascending tokens of its fragment.
KVMELD_LAZY Status check_selection(const TokenSet& selected, const Fragment& fragment) {
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
KVMELD_LAZY Status check_order(std::span<const std::uint32_t> order, std::size_t count) {
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
KVMELD_LAZY Status check_alignment(const Alignment& alignment, const Geometry& geometry,
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
KVMELD_NAMESPACE_END
