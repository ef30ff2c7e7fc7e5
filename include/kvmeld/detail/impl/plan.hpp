#pragma once

/// Bodies of extend/plan.hpp: how a plan is made, whatever the merger's type.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/detail/distances.hpp>
#include <kvmeld/detail/render_lanes.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/policies/mean.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace extend {

KVMELD_API RenderReport report_of(const PlanCore& core) {
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

KVMELD_API std::int64_t payload_row(const Payload& payload, std::size_t layer,
                                    std::uint32_t token) {
  const TokenSet& set = payload.token_sets[payload.layer_set[layer]];
  if (set.all) return token;
  const auto at =
      std::lower_bound(set.present.begin(), set.present.end(), static_cast<std::int32_t>(token));
  return at != set.present.end() && *at == static_cast<std::int32_t>(token)
             ? at - set.present.begin()
             : -1;
}

}  // namespace extend

namespace detail {

/// Heads of a layer: those of its first plane.
[[nodiscard]] inline std::size_t layer_heads(const LayerShape& layer) noexcept {
  return layer.planes.empty() ? 0 : static_cast<std::size_t>(layer.planes[0].heads);
}

/// Numbers distinct turns. Positions repeat over layers, so this is called once a contribution and
/// group, not a row.
class ShiftIndex {
 public:
  explicit ShiftIndex(std::vector<std::int64_t>& shifts) : shifts_(shifts) {}

  [[nodiscard]] std::uint32_t operator()(std::int64_t shift) {
    if (shift == 0) return 0;
    if (shift == last_shift_) return last_;
    const auto at = std::lower_bound(sorted_.begin(), sorted_.end(),
                                     std::pair<std::int64_t, std::uint32_t>{shift, 0});
    if (at != sorted_.end() && at->first == shift) {
      last_ = at->second;
    } else {
      last_ = static_cast<std::uint32_t>(shifts_.size());
      sorted_.insert(at, {shift, last_});
      shifts_.push_back(shift);
    }
    last_shift_ = shift;
    return last_;
  }

 private:
  std::vector<std::int64_t>& shifts_;
  std::vector<std::pair<std::int64_t, std::uint32_t>> sorted_;
  std::int64_t last_shift_ = 0;
  std::uint32_t last_ = 0;
};

/// Compiles the rows of one layer (and of all that hold the same tokens): token indices become
/// payload rows, positions become turns.
///
/// The frame: one contribution is rotated straight to its output position; equally rotated
/// contributions of a rotation-equivariant fuser are fused as they lie and rotated once; anything
/// else is fused un-rotated.
inline void compile_rows(const PlanCore& core, const AlignmentGroup& alignment, std::size_t layer,
                         const RowsCall& fuser, std::span<const std::uint8_t> recompute,
                         ShiftIndex& shift_of, GroupArrays& out) {
  const bool pre_rope = core.geometry->layers[layer].key_form == KeyForm::pre_rope;
  const bool by_head = !alignment.head_weights.empty();
  for (std::size_t o = 0; o < core.positions.size(); ++o) {
    const std::size_t first = out.inputs.size();
    std::uint32_t out_shift = 0;
    if (recompute[o] == 0) {
      bool equal = true, any = false;
      std::int64_t common = 0;
      for (const Contribution& c : alignment.row(o)) {
        const Payload& payload = core.sources[c.source].payload();
        const std::int64_t row = payload_row(payload, layer, c.token);
        if (row < 0) continue;
        if (by_head)
          out.origin.push_back(static_cast<std::uint32_t>(&c - alignment.contributions.data()));
        const std::int64_t shift = pre_rope ? 0 : core.positions[o] - payload.positions[c.token];
        if (!by_head || c.source != core.local_source) {  // the local cache has its heads to itself
          equal = equal && (!any || shift == common);
          common = shift;
          any = true;
        }
        out.inputs.push_back({c.source, static_cast<std::uint32_t>(row),
                              rounded_product(c.weight, core.sources[c.source].weight),
                              shift_of(shift)});
      }
      if (by_head && !any) {  // nothing but the local cache: the heads of the set lack their row
        out.inputs.resize(first);
        out.origin.resize(first);
      }
      const std::size_t count = out.inputs.size() - first;
      for (std::size_t i = first; by_head && i < out.inputs.size(); ++i)
        out.direct.push_back(out.inputs[i].shift);
      if (!pre_rope && (count > 1 || (count == 1 && !fuser.keeps_single))) {
        if (equal && fuser.rotation_equivariant) {
          out_shift = shift_of(common);
          for (std::size_t i = first; i < out.inputs.size(); ++i) out.inputs[i].shift = 0;
        } else {
          out_shift = shift_of(core.positions[o]);
          std::size_t i = first;
          for (const Contribution& c : alignment.row(o)) {
            const Payload& payload = core.sources[c.source].payload();
            if (payload_row(payload, layer, c.token) >= 0)
              out.inputs[i++].shift = shift_of(-payload.positions[c.token]);
          }
        }
      }
    }
    out.out_shift.push_back(out_shift);
    out.row_begin.push_back(static_cast<std::uint32_t>(out.inputs.size()));
  }
  const std::size_t n = core.positions.size();
  out.run.assign(n, 1);
  const auto single = [&](std::size_t o) { return out.row_begin[o + 1] - out.row_begin[o] == 1; };
  for (std::size_t o = n; o-- > 1;) {
    if (!single(o) || !single(o - 1)) continue;
    const RowInput& a = out.inputs[out.row_begin[o - 1]];
    const RowInput& b = out.inputs[out.row_begin[o]];
    if (a.source == b.source && a.row + 1 == b.row && a.shift == b.shift)
      out.run[o - 1] = out.run[o] + 1;
  }
}

/// Which outputs the engine has to compute, and from which output on each layer's rows are read
/// (`layer_needed_from`).
///
/// A window of w needs no row for tokens that no query sees; queries are what comes after the last
/// output, and the holes themselves, so a hole can ask for earlier rows whose absence makes further
/// holes: repeated until nothing changes.
inline std::vector<std::uint8_t> find_holes(PlanCore& core,
                                            std::span<const std::uint8_t> recompute) {
  std::vector<std::uint8_t> is_hole(recompute.begin(), recompute.end());
  const Geometry& geometry = *core.geometry;
  core.layer_needed_from.assign(geometry.layers.size(), 0);
  for (bool changed = true; changed;) {
    changed = false;
    const auto first_hole = static_cast<std::size_t>(
        std::find(is_hole.begin(), is_hole.end(), std::uint8_t{1}) - is_hole.begin());
    const std::int64_t query = first_hole < is_hole.size() ? core.positions[first_hole]
                               : core.positions.empty()    ? 0
                                                           : core.positions.back() + 1;
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      if (geometry.layers[l].planes.empty()) continue;
      const std::int64_t window = geometry.layers[l].window;
      std::size_t from = 0;
      while (window > 0 && from < core.positions.size() && core.positions[from] <= query - window)
        ++from;
      core.layer_needed_from[l] = from;
      const GroupArrays& rows = core.groups[core.layer_group[l]];
      for (std::size_t o = from; o < is_hole.size(); ++o) {
        if (is_hole[o] == 0 && rows.row_begin[o] == rows.row_begin[o + 1])
          is_hole[o] = changed = true;
      }
    }
  }
  return is_hole;
}

/// Notes which rows of `head_weights` are each layer's: those of the first group that covers it,
/// before other groups come in front.
inline void number_head_rows(const Geometry& geometry, Alignment& alignment) {
  std::vector<std::uint32_t> next(alignment.groups.size());
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < next.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == next.size()) continue;  // refused when rows are compiled
    if (alignment.groups[g].head_rows.empty())
      alignment.groups[g].head_rows.assign(geometry.layers.size(), 0);
    alignment.groups[g].head_rows[l] = next[g];
    next[g] += static_cast<std::uint32_t>(layer_heads(geometry.layers[l]));
  }
}

/// The weights of one layer's heads, contribution by contribution become input by input.
inline std::vector<float> compile_head_weights(const Geometry& geometry,
                                               const AlignmentGroup& alignment, std::size_t layer,
                                               const GroupArrays& rows) {
  std::vector<float> out;
  if (alignment.head_weights.empty()) return out;
  const std::size_t at = alignment.head_rows[layer];
  const std::size_t contributions = alignment.contributions.size();
  for (std::size_t h = 0; h < layer_heads(geometry.layers[layer]); ++h) {
    const float* const weights = alignment.head_weights.data() + (at + h) * contributions;
    for (std::size_t i = 0; i < rows.inputs.size(); ++i)
      out.push_back(rounded_product(rows.inputs[i].weight, weights[rows.origin[i]]));
  }
  return out;
}

// An alignment becomes what a run executes.

/// A table of turns for each layer whose keys are rotated; layers of one RoPE share one. Errors:
/// `unsupported` for keys in a Hadamard basis; those of `RopeTable::build`.
inline Status build_ropes(PlanCore& core, std::int64_t context_length) {
  const Geometry& geometry = *core.geometry;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const LayerShape& layer = geometry.layers[l];
    std::int32_t table = -1;
    const bool rotated = core.shifts.size() > 1 && layer.rope.kind != RopeKind::none &&
                         layer.key_form == KeyForm::post_rope &&
                         std::any_of(layer.planes.begin(), layer.planes.end(),
                                     [](const PlaneShape& p) { return p.rotary; });
    if (rotated) {
      for (const PlaneShape& shape : layer.planes) {
        if (shape.rotary && shape.hadamard != 0) {
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ",
                       shape.hadamard,
                       " cannot be turned; use unquantised keys, or positions that do not move");
        }
      }
      for (std::size_t m = 0; m < l && table < 0; ++m) {
        if (core.layer_rope[m] >= 0 && geometry.layers[m].rope == layer.rope)
          table = core.layer_rope[m];
      }
      if (table < 0) {
        auto built = RopeTable::build(layer.rope, span_of(core.shifts), context_length);
        if (!built) return built.error();
        table = static_cast<std::int32_t>(core.ropes.size());
        core.ropes.push_back(*std::move(built));
      }
    }
    core.layer_rope.push_back(table);
  }
  return {};
}

/// Compiles the rows of every layer; outputs of `recompute` get none. Layers that read alike share
/// a group.
inline Status compile_groups(PlanCore& core, const Alignment& alignment, const RowsCall& fuser,
                             std::span<const std::uint8_t> recompute) {
  const Geometry& geometry = *core.geometry;
  core.shifts = {0};
  core.groups.clear();
  core.layer_group.clear();
  core.head_weights.clear();
  core.bytes = 0;
  ShiftIndex shift_of(core.shifts);
  struct Key {
    std::size_t alignment_group;
    bool pre_rope;
    std::vector<const TokenSet*> sets;

    [[nodiscard]] bool alike(const Key& other) const {
      return alignment_group == other.alignment_group && pre_rope == other.pre_rope &&
             std::equal(sets.begin(), sets.end(), other.sets.begin(),
                        [](const TokenSet* a, const TokenSet* b) { return *a == *b; });
    }
  };
  std::vector<Key> keys;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < alignment.groups.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == alignment.groups.size())
      return error(ErrorCode::invalid_argument, "no group of the alignment covers layer ", l);
    Key key{g, geometry.layers[l].key_form == KeyForm::pre_rope, {}};
    for (const PlanSource& source : core.sources) {
      key.sets.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    }
    std::size_t k = 0;
    while (k < keys.size() && !keys[k].alike(key)) ++k;
    if (k == keys.size()) {
      keys.push_back(std::move(key));
      compile_rows(core, alignment.groups[g], l, fuser, recompute, shift_of,
                   core.groups.emplace_back());
    }
    core.layer_group.push_back(static_cast<std::uint32_t>(k));
    const GroupArrays& rows = core.groups[k];
    core.head_weights.push_back(compile_head_weights(geometry, alignment.groups[g], l, rows));
    std::int64_t token_bytes = 0;
    for (const PlaneShape& shape : geometry.layers[l].planes)
      token_bytes += row_bytes(shape) * shape.heads;
    for (std::size_t o = 0; o < core.positions.size(); ++o)
      core.bytes += rows.row_begin[o] == rows.row_begin[o + 1] ? 0 : token_bytes;
  }
  return {};
}

/// Compiles every layer group, finds the holes, builds the rope tables. An output that one layer
/// lacks is the engine's in all of them: a hole has no rows, whatever contributions other layers
/// hold for it.
inline Status compile(PlanCore& core, const Alignment& alignment, const RowsCall& fuser,
                      std::span<const std::uint8_t> recompute, std::int64_t context_length) {
  std::vector<std::uint8_t> is_hole(recompute.begin(), recompute.end());
  for (bool found = true; found;) {
    KVMELD_TRY(detail::compile_groups(core, alignment, fuser, span_of(is_hole)));
    std::vector<std::uint8_t> holes = detail::find_holes(core, span_of(is_hole));
    found = holes != is_hole;
    is_hole = std::move(holes);
  }
  for (std::size_t o = 0; o < is_hole.size(); ++o) {
    if (is_hole[o] != 0)
      core.holes.push_back({static_cast<std::int64_t>(o), core.positions[o], core.tokens[o]});
  }
  return detail::build_ropes(core, context_length);
}

// Whether the compiled rows of a plan are rows that its fuser can take.

/// Refuses more contributions than a fuser's row form can take at once.
inline Status check_count(const RowsCall& fuser, std::span<const PlaneShape> planes, int count) {
  if (fuser.selects && count > max_selected) {
    return error(ErrorCode::oversized, count, " contributions; this fuser sorts at most ",
                 max_selected,
                 ": fuse fewer fragments, or take a mean, a medoid or the geometric median");
  }
  for (const PlaneShape& shape : planes) {
    if (!fuser.mixes) break;
    const int most =
        (std::min)(max_mixed, max_mixed_values / (std::max)(1, (shape.channels + 31) / 32 * 32));
    if (count > most)
      return error(ErrorCode::oversized, count, " contributions; this fuser mixes at most ", most,
                   " rows of ", shape.channels, " channels");
  }
  return fuser.check == nullptr ? Status() : fuser.check(fuser.fuser, std::int64_t{count});
}

/// Refuses a row of one head, or of all heads, that a fuser's row form cannot take.
inline Status check_row(const RowsCall& fuser, std::span<const PlaneShape> planes,
                        const HeadInputs& row) {
  const int count = row.used_count();
  KVMELD_TRY(check_count(fuser, planes, count));
  if (fuser.normalises || fuser.mixes) {
    double total = 0;
    for (int i = 0; i < row.count; ++i) {
      const float weight = row.weight(i);
      if (!(weight >= 0) || !std::isfinite(weight)) {
        return error(ErrorCode::non_finite, "a weight of ", weight,
                     "; weights are finite and at least 0");
      }
      total += static_cast<double>(weight);
    }
    // A mean's sum has a reciprocal that is a normal number; what mixes divides in f64.
    const bool divides = !fuser.normalises ? total > 0 : total > 0x1p-100 && total < 0x1p100;
    if (divides) return {};
    return error(ErrorCode::non_finite, "the ", row.count, " weights add up to ", total,
                 "; a mean divides by their sum, which lies in (2^-100, 2^100)");
  }
  return count > 0 ? Status()
                   : error(ErrorCode::non_finite, "the ", row.count, " weights are all 0");
}

/// Refuses rows that a fuser's row form cannot take: too many contributions to sort, too few for
/// its own check, or weights that give a fuser which divides by their sum nothing to divide by.
inline Status check_rows(const PlanCore& core, const RowsCall& fuser) {
  std::vector<std::uint8_t> done(core.groups.size(), 0);
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    const GroupArrays& group = core.groups[core.layer_group[l]];
    const bool by_head = !core.head_weights[l].empty();
    if (!by_head && done[core.layer_group[l]]++ != 0) continue;
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      const std::uint32_t begin = group.row_begin[o], count = group.row_begin[o + 1] - begin;
      if (count == 0 || (!by_head && count < (fuser.keeps_single ? 2U : 1U))) continue;
      for (std::size_t h = 0; h < (by_head ? detail::layer_heads(core.geometry->layers[l]) : 1);
           ++h) {
        const detail::HeadInputs row{
            group.inputs.data() + begin,
            by_head ? core.head_weights[l].data() + h * group.inputs.size() + begin : nullptr,
            static_cast<int>(count)};
        const bool alone = by_head && row.used_count() == 1 && row.weight(row.first_used()) > 0;
        const bool single = alone && (fuser.keeps_single ||
                                      row.inputs[row.first_used()].source == core.local_source);
        const Status checked =
            single ? Status() : detail::check_row(fuser, core.geometry->layers[l].planes, row);
        if (checked) continue;
        return error(checked.code(), "output ", o, " at position ", core.positions[o],
                     by_head ? ", head " : "", by_head ? extend::decimal(h) : "", ": ",
                     checked.message());
      }
    }
  }
  return {};
}

}  // namespace detail

namespace extend {

KVMELD_API std::vector<std::uint8_t> with_several(const Geometry& geometry,
                                                  const Alignment& alignment, std::size_t outputs) {
  std::vector<std::uint8_t> several(outputs, 0);
  std::vector<std::uint8_t> done(alignment.groups.size(), 0);
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < alignment.groups.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == alignment.groups.size() || done[g]++ != 0) continue;
    for (std::size_t o = 0; o < outputs; ++o) {
      if (alignment.groups[g].row(o).size() > 1) several[o] = 1;
    }
  }
  return several;
}

KVMELD_API Status warn(PlanCore& core, std::span<const std::uint8_t> several, RenderWarnings refuse,
                       bool fuser_chosen, bool nobody_named) {
  for (const std::uint8_t s : several) core.fused += s;
  for (const Hole& hole : core.holes) core.fused -= several[static_cast<std::size_t>(hole.output)];
  const std::int64_t rendered = core.outputs() - static_cast<std::int64_t>(core.holes.size());
  if (fuser_chosen && rendered > 0 && core.fused == 0)
    core.warnings = core.warnings | RenderWarnings::nothing_fused;
  if (nobody_named) core.warnings = core.warnings | RenderWarnings::weights_unmatched;
  if ((core.warnings & refuse & RenderWarnings::nothing_fused) != RenderWarnings::none) {
    return error(ErrorCode::invalid_argument, "none of ", rendered,
                 " rendered tokens has two contributions, so that the fuser does "
                 "nothing; align tokens that agents share (TokenMatch), or leave the fuser out");
  }
  if ((core.warnings & refuse & RenderWarnings::weights_unmatched) != RenderWarnings::none) {
    return error(ErrorCode::invalid_argument, "the fuser's table of weights names none of the ",
                 core.sources.size(),
                 " fragments or their agents; name those of this set, or leave the table empty");
  }
  return {};
}

}  // namespace extend

namespace detail {

// Fragments of other models: asked for, checked, and made fragments of the target's model.

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

// What `plan` refuses: sets that do not fit together or the target, and answers of policies that
// cannot be rendered.

/// The prefix and the spans of a set, checked against each other and the target. Fragments of other
/// models that the aligner maps are spans; their prefixes belong to the other model's context and
/// are left out.
struct SetParts {
  const FragmentSet::Entry* prefix = nullptr;    ///< to be rendered
  const FragmentSet::Entry* in_place = nullptr;  ///< known, and held by the engine already
  std::vector<const FragmentSet::Entry*> spans;
  std::vector<Dot> places;                        ///< of `spans`
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
  for (const auto& [entry, place] : in_force(set)) {
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
        parts.places.push_back(place);
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
      parts.places.push_back(place);
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

KVMELD_API Status check_positions(const Geometry& geometry, const std::vector<PlanSource>& sources,
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

/// Refuses positions of an alignment that do not ascend, or not from where outputs may begin.
inline Status check_outputs(const Alignment& alignment, std::int64_t first_position) {
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
  return {};
}

/// Counts the rows of weights by head that each group must have. Errors: `unsupported` where planes
/// of one layer differ in heads.
inline Status count_heads(const Alignment& alignment, const Geometry& geometry,
                          std::vector<std::size_t>& heads) {
  heads.assign(alignment.groups.size(), 0);
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const LayerShape& layer = geometry.layers[l];
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
  return {};
}

/// Refuses weights by head that are not of the group's size or not finite.
inline Status check_head_weights(const AlignmentGroup& group, std::size_t heads) {
  if (!group.head_weights.empty() &&
      group.head_weights.size() != heads * group.contributions.size()) {
    return error(ErrorCode::invalid_argument, "alignment: ", group.head_weights.size(),
                 " weights by head for ", heads, " heads and ", group.contributions.size(),
                 " contributions");
  }
  for (const float w : group.head_weights) {
    if (!std::isfinite(w))
      return error(ErrorCode::non_finite, "alignment: a weight by head is not finite");
  }
  return {};
}

/// Refuses rows of `outputs` outputs that are cut wrongly or name what is not there.
inline Status check_contributions(const AlignmentGroup& group, std::size_t outputs,
                                  std::span<const Source> ordered) {
  if (group.row_begin.size() != outputs + 1 || group.row_begin.front() != 0 ||
      group.row_begin.back() != group.contributions.size() ||
      !std::is_sorted(group.row_begin.begin(), group.row_begin.end())) {
    return error(ErrorCode::invalid_argument, "alignment: ", group.row_begin.size(),
                 " row offsets for ", outputs, " outputs and ", group.contributions.size(),
                 " contributions");
  }
  for (std::size_t o = 0; o < outputs; ++o) {
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
  return {};
}

/// Refuses alignments that a policy (perhaps the user's) built wrong.
inline Status check_alignment(const Alignment& alignment, const Geometry& geometry,
                              std::span<const Source> ordered, std::int64_t first_position) {
  KVMELD_TRY(check_outputs(alignment, first_position));
  std::vector<std::size_t> heads;
  KVMELD_TRY(count_heads(alignment, geometry, heads));
  for (std::size_t g = 0; g < heads.size(); ++g) {
    KVMELD_TRY(check_head_weights(alignment.groups[g], heads[g]));
    KVMELD_TRY(check_contributions(alignment.groups[g], alignment.positions.size(), ordered));
  }
  return {};
}

// What a plan renders beside the spans: the prefix, and the local cache for layers and heads that
// the target keeps.

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
      for (const Contribution& c : row) to.contributions.push_back(c);
      if (!row.empty())
        to.contributions.push_back(
            {static_cast<std::uint32_t>(core.local_source), static_cast<std::uint32_t>(o), 1.0F});
      to.end_row();
    }
    all.push_back(std::move(to));
  }
  for (AlignmentGroup& rest : alignment.groups) all.push_back(std::move(rest));
  alignment.groups = std::move(all);
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
  // Loops, where a range inserted would be compiled into every file that plans.
  for (const std::int64_t position : alignment.positions) positions.push_back(position);
  for (const TokenId token : alignment.tokens) tokens.push_back(token);
  alignment.positions = std::move(positions);
  alignment.tokens = std::move(tokens);
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
    for (const Contribution& c : group.contributions) contributions.push_back(c);
    if (!group.head_weights.empty()) {
      std::vector<float> weights;
      for (std::size_t at = 0; at < group.head_weights.size(); at += before) {
        for (std::size_t i = 0; i < count; ++i) weights.push_back(1.0F);
        for (std::size_t i = 0; i < before; ++i) weights.push_back(group.head_weights[at + i]);
      }
      group.head_weights = std::move(weights);
    }
    group.contributions = std::move(contributions);
    group.row_begin = std::move(row_begin);
  }
}

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
[[nodiscard]] inline bool surely_fits(const RowsCall& fuser, const LayerUse& use,
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
  if (fuser.bound == nullptr) return false;
  const double in = peak * (use.rotated_in ? rotation : 1.0) * rounding;
  if (!(in <= most)) return false;
  const double fused = fuser.bound(fuser.rows, in, use.weights, static_cast<int>(shape.channels));
  return fused <= most && fused * (use.rotated_out ? rotation : 1.0) <= limit;
}

/// Computes the rows of one plane, some at a time, and refuses what is not finite.
inline Status check_plane(const PlanCore& core, const RowsCall& fuser, std::size_t l, std::size_t p,
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
    fuser.render(fuser.rows, &task, core.outputs(), {best_isa(), false}, first, last);
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

/// Refuses a plan whose run would write what is no number of the output's elements, with
/// `non_finite`.
///
/// Most planes pass by the peaks of their payloads, O(planes · sources). The others, and those of
/// fusers that give no `bound`, are computed here once, O(bytes) of each.
inline Status check_range(const PlanCore& core, const RowsCall& fuser) {
  const std::vector<LayerShape>& layers = core.geometry->layers;
  std::vector<detail::LayerUse> of_group(core.groups.size());
  std::vector<std::uint8_t> known(core.groups.size(), 0);
  std::size_t index = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::size_t g = core.layer_group[l];
    if (known[g] == 0 || !core.head_weights[l].empty())
      of_group[g] = detail::layer_use(core, l, fuser.keeps_single);
    known[g] = 1;
    for (std::size_t p = 0; p < layers[l].planes.size(); ++p, ++index) {
      std::vector<double> peaks;
      for (const PlanSource& source : core.sources)
        peaks.push_back(detail::payload_peaks(*core.geometry, source.payload())[index]);
      const PlaneShape& shape = layers[l].planes[p];
      if (detail::surely_fits(fuser, of_group[g], peaks, shape,
                              shape.rotary && core.layer_rope[l] >= 0))
        continue;
      KVMELD_TRY(detail::check_plane(core, fuser, l, p, index));
    }
  }
  return {};
}

// Distances between the contributions of one output token: of their keys without position, over
// heads and layers.

/// One output whose contributions are compared in pairs.
struct ScoredRow {
  std::size_t output = 0;
  std::size_t begin = 0;  ///< its part of the batch's inputs
  std::size_t count = 0;
  std::size_t pairs = 0;  ///< its part of the batch's distances
  bool rotated = false;   ///< positions differ: keys are compared un-rotated
};

/// Rows that are compared in one pass over the layers, so that payloads are read in order.
struct ScoreBatch {
  std::vector<ScoredRow> rows;
  std::vector<Contribution> inputs;  ///< of each row ascending by fragment id, then token
  std::vector<std::uint32_t> place;  ///< where each of `inputs` stands in the alignment's row
  std::vector<double> distances;     ///< (count, count) a row
  std::vector<double> norms;         ///< (count) a row

  void clear() {
    rows.clear();
    inputs.clear();
    place.clear();
    distances.clear();
    norms.clear();
  }
};

/// Measures squared distances between the contributions of rows: all layers of one group,
/// ascending.
class RowDistances {
 public:
  /// @param layers  those of the group; context_length: picks frequencies where they depend on it.
  static Result<RowDistances> of(const PlanCore& core, std::vector<std::size_t> layers,
                                 const AlignmentGroup& group, std::int64_t context_length) {
    RowDistances out;
    out.layers_ = std::move(layers);
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      if (!unequal(core, group.row(o))) continue;
      for (const Contribution& c : group.row(o))
        out.shifts_.push_back(-core.sources[c.source].payload().positions[c.token]);
    }
    std::sort(out.shifts_.begin(), out.shifts_.end());
    out.shifts_.erase(std::unique(out.shifts_.begin(), out.shifts_.end()), out.shifts_.end());
    for (const std::size_t l : out.layers_) {
      const LayerShape& layer = core.geometry->layers[l];
      const bool rotates = !out.shifts_.empty() && layer.rope.kind != RopeKind::none &&
                           layer.key_form == KeyForm::post_rope;
      std::int32_t table = -1;
      for (std::size_t p = 0; p < layer.planes.size(); ++p) {
        if (!rotates || !layer.planes[p].rotary || !compared(layer.planes[p].plane)) continue;
        if (layer.planes[p].hadamard != 0) {
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ",
                       layer.planes[p].hadamard,
                       " at different positions cannot be compared; use unquantised keys, or "
                       "positions that do not differ");
        }
        table = 0;
      }
      if (table == 0) {
        std::size_t known = 0;
        while (known < out.specs_.size() && !(*out.specs_[known] == layer.rope)) ++known;
        if (known == out.specs_.size()) {
          auto built = RopeTable::build(layer.rope, span_of(out.shifts_), context_length);
          if (!built) return built.error();
          out.specs_.push_back(&layer.rope);
          out.tables_.push_back(*std::move(built));
        }
        table = static_cast<std::int32_t>(known);
      }
      out.layer_table_.push_back(table);
    }
    return out;
  }

  /// Whether a row's contributions stand at different positions.
  [[nodiscard]] static bool unequal(const PlanCore& core, std::span<const Contribution> row) {
    for (const Contribution& c : row) {
      if (core.sources[c.source].payload().positions[c.token] !=
          core.sources[row[0].source].payload().positions[row[0].token])
        return true;
    }
    return false;
  }

  /// Fills distances, and norms where they are read, layer by layer.
  void measure(const PlanCore& core, ScoreBatch& batch, bool norms) {
    batch.norms.assign(batch.inputs.size(), norms ? 0.0 : NAN);
    std::size_t plane = 0, layer = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      for (; layer < layers_[i]; ++layer) plane += core.geometry->layers[layer].planes.size();
      const LayerShape& shape = core.geometry->layers[layer];
      for (std::size_t p = 0; p < shape.planes.size(); ++p) {
        if (!compared(shape.planes[p].plane)) continue;
        for (const ScoredRow& row : batch.rows)
          add(core, batch, row, norms, layer, plane + p, shape.planes[p], layer_table_[i]);
      }
    }
    // what overflows is far from everything
    for (double& d : batch.distances) d = std::isfinite(d) ? d : 1e300;
    for (double& d : batch.norms) d = !norms || std::isfinite(d) ? d : 1e300;
  }

 private:
  [[nodiscard]] static bool compared(Plane plane) noexcept {
    return plane == Plane::key || plane == Plane::latent || plane == Plane::rope_part;
  }

  /// Adds one plane of one layer to the distances of a row.
  void add(const PlanCore& core, ScoreBatch& batch, const ScoredRow& row, bool norms,
           std::size_t layer, std::size_t plane, const PlaneShape& shape, std::int32_t table) {
    const std::size_t n = row.count;
    const auto padded = (static_cast<std::size_t>(shape.channels) + 31) / 32 * 32;
    const std::size_t width = padded * static_cast<std::size_t>(shape.heads);
    if (width == 0) return;
    const DistanceSteps steps = distance_steps(isa_, shape.type);
    const bool rotates = row.rotated && shape.rotary && table >= 0;
    if (rows_.size() < n * width) rows_.resize(n * width);
    from_.clear();
    for (std::size_t i = 0; i < n; ++i) {
      const Contribution& c = batch.inputs[row.begin + i];
      const Payload& payload = core.sources[c.source].payload();
      const std::int64_t at = payload_row(payload, layer, c.token);
      if (at < 0) return;  // a layer that lacks one contribution compares none
      const std::byte* from =
          payload.bytes.get() + payload.plane_offsets[plane] + at * shape.heads * row_bytes(shape);
      const std::int64_t shift = -payload.positions[c.token];
      const bool rotated = rotates && shift != 0;
      if (padded == static_cast<std::size_t>(shape.channels) && steps.raw_widen != nullptr &&
          !rotated) {
        from_.push_back({from, steps.raw_widen, static_cast<std::size_t>(block_bytes(shape.type))});
        continue;
      }
      float* to = rows_.data() + i * width;
      from_.push_back({reinterpret_cast<const std::byte*>(to), steps.widen, sizeof(float)});
      const RopeSpec& rope = core.geometry->layers[layer].rope;
      const float* angles =
          rotated ? tables_[static_cast<std::size_t>(table)].row(index_of(shift)) : nullptr;
      read_row({angles, shape.channels, rope.first_channel, rope.rotary_channels, rope.pairing},
               shape, from, padded, to);
    }
    compare(n, width, norms, steps);
    double* lanes = lanes_.data();
    double* const distances = batch.distances.data() + row.pairs;
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < i; ++j, lanes += 32)
        distances[j * n + i] = distances[i * n + j] += steps.join(lanes);
      if (!norms) continue;
      batch.norms[row.begin + i] += steps.join(lanes);
      lanes += 32;
    }
  }

  [[nodiscard]] std::size_t index_of(std::int64_t shift) const {
    return static_cast<std::size_t>(std::lower_bound(shifts_.begin(), shifts_.end(), shift) -
                                    shifts_.begin());
  }

  /// Reads the heads of a row as f32, each padded with zeros, rotated where there are angles.
  void read_row(const Rotation& rotation, const PlaneShape& shape, const std::byte* from,
                std::size_t padded, float* to) const {
    const bool rotated = rotation.table != nullptr;
    if (padded == static_cast<std::size_t>(shape.channels)) {
      const auto width = static_cast<std::ptrdiff_t>(padded) * shape.heads;
      rotated ? load_rotated(shape.type, isa_, rotation, from, shape.heads, to)
              : load_row(shape.type, isa_, from, width, to);
      return;
    }
    for (std::int32_t h = 0; h < shape.heads; ++h) {
      float* const head = to + static_cast<std::size_t>(h) * padded;
      load_row(shape.type, isa_, from + h * row_bytes(shape), shape.channels, head);
      std::fill(head + shape.channels, head + padded, 0.0F);
      if (rotated) rotate_channels(rotation, isa_, head);
    }
  }

  /// Sums the squares of every pair's differences into `lanes_`, 32 lanes a pair.
  ///
  /// Every pair in turn over a few channels, which stay in the first cache as doubles, and then the
  /// next ones. The pair of a row and itself is its norm: its distance from zeros.
  void compare(std::size_t n, std::size_t width, bool norms, const DistanceSteps& steps) {
    const std::size_t pairs = norms ? n * (n + 1) / 2 : n * (n - 1) / 2;
    if (n != most_of_) {
      most_of_ = n;
      most_ = (std::max)(compared_bytes / sizeof(double) / (n + 1) / 32 * 32, std::size_t{128});
    }
    const std::size_t block = (std::min)(most_, width);
    if (lanes_.size() < pairs * 32 + 32) lanes_.resize(pairs * 32 + 32);
    if (wide_.size() < (n + 1) * block + 8) wide_.resize((n + 1) * block + 8);
    // no vector lies across lines
    double* const wide = wide_.data() + (64 - reinterpret_cast<std::uintptr_t>(wide_.data()) % 64) %
                                            64 / sizeof(double);
    if (norms) std::fill_n(wide + n * block, block, 0.0);
    for (std::size_t at = 0; at < width; at += block) {
      const std::size_t part = (std::min)(block, width - at);
      for (std::size_t i = 0; i < n; ++i)
        from_[i].widen(from_[i].data + at * from_[i].size, part, wide + i * block);
      std::size_t i = norms ? 0 : 1, j = 0;
      const auto next = [&](const double*& a, const double*& b) {
        a = wide + i * block;
        b = wide + (i == j ? n : j) * block;
        if (++j == (norms ? i + 1 : i)) ++i, j = 0;
      };
      for (std::size_t pair = 0; pair < pairs; pair += 2) {
        const double *a = nullptr, *b = nullptr, *c = wide, *d = wide;
        next(a, b);
        if (pair + 1 < pairs) next(c, d);
        steps.add(a, b, c, d, part, at == 0, lanes_.data() + pair * 32);
      }
    }
  }

  /// Where the channels of a row come from: as they are stored, or as f32 without their rotation.
  struct ComparedRow {
    const std::byte* data;
    DistanceSteps::Widen widen;
    std::size_t size;  ///< bytes a channel
  };
  /// Of rows as doubles: what the first cache holds beside the sums.
  static constexpr std::size_t compared_bytes = 32768;

  Isa isa_ = best_isa();
  std::vector<std::size_t> layers_;
  std::vector<std::int64_t> shifts_;  // distinct, ascending
  std::vector<const RopeSpec*> specs_;
  std::vector<RopeTable> tables_;
  std::vector<std::int32_t> layer_table_;  // −1: keys are not rotated
  std::size_t most_of_ = 0;                // contributions
  std::size_t most_ = 0;                   // channels of a block of so many
  std::vector<float> rows_;  // (contributions, width) of those that do not come as they are stored
  std::vector<ComparedRow> from_;  // (contributions)
  std::vector<double> wide_;       // (contributions + 1, block) the last row: zeros
  std::vector<double> lanes_;      // (pairs, 32)
};

// Weights that fusers give, worked out once an output token when a plan is made; weights of 0
// leave the alignment.

/// Contributions of one output that are compared in pairs.
inline constexpr std::size_t max_scored = 2048;

/// Refuses weights of one output that are negative, not finite, or all 0.
/// @param whose  what gave them, for the message
inline Status check_weights(const PlanCore& core, const AlignmentGroup& group, std::size_t o,
                            const char* whose) {
  double total = 0;
  for (const Contribution& c : group.row(o)) {
    if (!(c.weight >= 0.0F) || !std::isfinite(c.weight)) {
      return error(ErrorCode::non_finite, "the ", group.row(o).size(), " weights of output ", o,
                   " at position ", core.positions[o], " hold ", c.weight, " for fragment ",
                   core.sources[c.source].fragment.id().hex(), whose,
                   "; weights are finite and at least 0");
    }
    total += static_cast<double>(c.weight);
  }
  if (total > 0) return {};
  return error(ErrorCode::non_finite, "the ", group.row(o).size(), " weights of output ", o,
               " at position ", core.positions[o], " add up to ", total, whose,
               "; one at least must be above 0");
}

/// Measures the distances of a batch, has its rows scored, and writes the weights back.
inline Status score_batch(const PlanCore& core, AlignmentGroup& group, const ScoreCall& score,
                          RowDistances& distances, ScoreBatch& batch) {
  if (batch.rows.empty()) return {};
  distances.measure(core, batch, score.norms);
  std::vector<double> weights;
  for (const ScoredRow& row : batch.rows) {
    const std::span<const Contribution> inputs =
        span_of(batch.inputs.data() + row.begin, row.count);
    weights.clear();
    for (const Contribution& c : inputs) weights.push_back(static_cast<double>(c.weight));
    const Scoring scoring{span_of(batch.distances.data() + row.pairs, row.count * row.count),
                          span_of(batch.norms.data() + row.begin, row.count)};
    const Status scored = score.call(score.fuser, scoring, span_of(weights));
    if (!scored) {
      return error(scored.code(), "output ", row.output, " at position ",
                   core.positions[row.output], ": ", scored.message());
    }
    for (std::size_t i = 0; i < row.count; ++i) {
      group.contributions[group.row_begin[row.output] + batch.place[row.begin + i]].weight =
          static_cast<float>(weights[i]);
    }
  }
  batch.clear();
  return {};
}

/// Appends an output's contributions to a batch, ascending by fragment id, then token.
inline void add_scored_row(const PlanCore& core, std::size_t output,
                           std::span<const Contribution> inputs, ScoreBatch& batch) {
  const ScoredRow row{output, batch.inputs.size(), inputs.size(), batch.distances.size(),
                      RowDistances::unequal(core, inputs)};
  batch.rows.push_back(row);
  for (std::uint32_t i = 0; i < inputs.size(); ++i) batch.place.push_back(i);
  std::sort(batch.place.begin() + static_cast<std::ptrdiff_t>(row.begin), batch.place.end(),
            [&](std::uint32_t a, std::uint32_t b) {
              const FragmentId& x = core.sources[inputs[a].source].fragment.id();
              const FragmentId& y = core.sources[inputs[b].source].fragment.id();
              return x != y                               ? x < y
                     : inputs[a].token != inputs[b].token ? inputs[a].token < inputs[b].token
                                                          : a < b;
            });
  for (std::size_t i = 0; i < row.count; ++i)
    batch.inputs.push_back(inputs[batch.place[row.begin + i]]);
  batch.distances.resize(row.pairs + row.count * row.count);
}

/// Whether several contributions of an output meet.
[[nodiscard]] inline bool meets(const AlignmentGroup& group, std::size_t o,
                                std::span<const std::uint8_t> recompute) noexcept {
  return group.row(o).size() > 1 && recompute[o] == 0;
}

KVMELD_API Status score_rows(const PlanCore& core, AlignmentGroup& group,
                             std::vector<std::size_t> layers, const ScoreCall& score,
                             std::span<const std::uint8_t> recompute, std::int64_t context_length) {
  ScoreBatch batch;
  std::unique_ptr<RowDistances> distances;
  for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
    if (!meets(group, o, recompute)) continue;
    const std::span<const Contribution> inputs = group.row(o);
    if (inputs.size() > max_scored) {
      return error(ErrorCode::oversized, "output ", o, " has ", inputs.size(),
                   " contributions, of which at most ", max_scored, " can be scored");
    }
    if (distances == nullptr) {
      auto made = RowDistances::of(core, std::move(layers), group, context_length);
      if (!made) return made.error();
      distances = std::make_unique<RowDistances>(*std::move(made));
    }
    add_scored_row(core, o, inputs, batch);
    if (batch.rows.size() == 64 || batch.distances.size() >= 65536)
      KVMELD_TRY(score_batch(core, group, score, *distances, batch));
  }
  return distances == nullptr ? Status() : score_batch(core, group, score, *distances, batch);
}

/// Rows close ranks over what weighs nothing. Weights by head leave it out by themselves.
/// @param scored  weights come from a score, and are checked first
inline Status drop_weightless(const PlanCore& core, AlignmentGroup& group,
                              std::span<const std::uint8_t> recompute, bool scored) {
  std::uint32_t kept = 0, begin = 0;
  for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
    const std::uint32_t end = group.row_begin[o + 1];
    const bool meet = end - begin > 1 && recompute[o] == 0;
    if (scored && meet) {
      group.row_begin[o] = begin;  // as it was, for the check
      KVMELD_TRY(check_weights(core, group, o, " after scoring"));
    }
    const bool drops = meet && group.head_weights.empty();
    group.row_begin[o] = kept;
    for (std::uint32_t i = begin; i < end; ++i) {
      if (!drops || group.contributions[i].weight != 0.0F)
        group.contributions[kept++] = group.contributions[i];
    }
    begin = end;
  }
  group.row_begin.back() = kept;
  group.contributions.resize(kept);
  return {};
}

/// The layers that an alignment's group is for: those that no group before it covers.
[[nodiscard]] inline std::vector<std::size_t> layers_of(const Alignment& alignment,
                                                        std::size_t group, std::size_t layers) {
  std::vector<std::size_t> out;
  for (std::size_t l = 0; l < layers; ++l) {
    std::size_t g = 0;
    while (g < group && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == group && alignment.groups[g].layers.contains(l)) out.push_back(l);
  }
  return out;
}

/// The sources of a plan give their weights to the contributions; then `score` has its say, and
/// weights of 0 leave their rows.
///
/// Errors: `non_finite` for weights that are negative, not finite, or all 0; `oversized`; those of
/// the score.
inline Status weigh(PlanCore& core, Alignment& alignment, const ScoreCall& score,
                    std::span<const std::uint8_t> recompute, std::int64_t context_length) {
  for (std::size_t g = 0; g < alignment.groups.size(); ++g) {
    AlignmentGroup& group = alignment.groups[g];
    for (Contribution& c : group.contributions)
      c.weight = rounded_product(c.weight, core.sources[c.source].weight);
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      if (meets(group, o, recompute)) KVMELD_TRY(check_weights(core, group, o, ""));
    }
    if (score.call != nullptr) {
      KVMELD_TRY(score.rows(core, group, layers_of(alignment, g, core.geometry->layers.size()),
                            score, recompute, context_length));
    }
    KVMELD_TRY(drop_weightless(core, group, recompute, score.call != nullptr));
  }
  for (PlanSource& source : core.sources) source.weight = 1.0F;
  return {};
}

}  // namespace detail

namespace extend {

KVMELD_API Status finish_rows(PlanCore& core, const Alignment& alignment, const RowsCall& fuser,
                              std::span<const std::uint8_t> recompute,
                              std::int64_t context_length) {
  KVMELD_TRY(detail::compile(core, alignment, fuser, recompute, context_length));
  KVMELD_TRY(detail::check_rows(core, fuser));
  if (fuser.scales_weights) detail::scale_weights(core);
  return detail::check_range(core, fuser);
}

}  // namespace extend

namespace detail {

// Planning, whatever the merger's type.

/// A plan in the making: the steps of `plan`, in order.
struct Planning {
  const MergerCall& merger;
  const Target& target;
  SetParts parts;
  std::vector<Source> sources;   // selected, as the set has them
  std::vector<Source> ordered;   // and as the order policy does
  std::vector<Fragment> mapped;  // of other models, made the target's; `ordered` refers to them
  std::vector<std::uint8_t> is_mapped;  // (ordered)
  std::size_t first_payload = 0;        // of the first span
  std::int64_t first_position = 0;      // of the first span
  Alignment alignment;
  std::vector<std::uint8_t> recompute;  // (outputs)
  PlanCore core;

  /// Selects the tokens of every span. Errors: `payload_missing`, with the ids.
  Status select() {
    std::string missing;
    for (std::size_t i = 0; i < parts.spans.size(); ++i) {
      const FragmentSet::Entry* const entry = parts.spans[i];
      // nothing to order, and nothing that could come first
      if (entry->fragment.token_count() == 0) continue;
      Source source{
          &entry->fragment, &entry->fragment.payloads()[0], &entry->metadata, {}, parts.places[i]};
      if (source.payload->bytes == nullptr) {
        missing.append(" ").append(entry->fragment.id().hex());
        continue;
      }
      auto selected = merger.select(merger.merger, source);
      if (!selected) return selected.error();
      KVMELD_TRY(check_selection(*selected, entry->fragment));
      source.selected = *std::move(selected);
      if (source.selected_count() > 0) sources.push_back(std::move(source));
    }
    if (parts.prefix != nullptr && parts.prefix->fragment.payloads()[0].bytes == nullptr)
      missing.append(" ").append(parts.prefix->fragment.id().hex());
    if (missing.empty()) return {};
    return error(ErrorCode::payload_missing, "evicted payloads:", missing,
                 "; fetch them and plan again");
  }

  /// Orders the spans; the prefix, where it is rendered, stands before them. Whichever span comes
  /// first is read in its encoding without lead-in, if it has one.
  Status order() {
    if (merger.fits != nullptr) KVMELD_TRY(merger.fits(merger.merger, target.geometry));
    const auto order = merger.order(merger.merger, span_of(sources));
    if (!order) return order.error();
    KVMELD_TRY(check_order(*order, sources.size()));
    for (const std::uint32_t i : *order) ordered.push_back(sources[i]);
    first_position = target.first_position;
    if (parts.prefix != nullptr) {
      core.sources.push_back({parts.prefix->fragment, 0, 1.0F, false});
      first_position += parts.prefix->fragment.token_count();
    }
    if (ordered.empty() || ordered[0].fragment->payloads().size() < 2) return {};
    first_payload = 1;
    if (ordered[0].fragment->payloads()[1].bytes != nullptr) return {};
    return error(ErrorCode::payload_missing, "evicted payloads: ", ordered[0].fragment->id().hex(),
                 " (the encoding without lead-in, which the first span is read in); fetch it and "
                 "plan again");
  }

  /// Fragments of other models become the target's.
  Status map() {
    mapped.reserve(ordered.size());
    is_mapped.assign(ordered.size(), 0);
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      if (!parts.maps(*ordered[s].fragment)) continue;
      auto made = mapped_fragment(merger.transform, *ordered[s].fragment,
                                  s == 0 ? first_payload : 0, core.geometry);
      if (!made) return made.error();
      mapped.push_back(*std::move(made));
      ordered[s].fragment = &mapped.back();
      ordered[s].payload = &mapped.back().payloads()[0];
      is_mapped[s] = 1;
    }
    return {};
  }

  /// Aligns the spans, marks seams, weighs, and puts the prefix in front.
  Status align() {
    auto made = merger.align(merger.merger, span_of(ordered), first_position);
    if (!made) return made.error();
    alignment = *std::move(made);
    KVMELD_TRY(check_alignment(alignment, target.geometry, ordered, first_position));
    for (AlignmentGroup& group : alignment.groups) group.head_rows.clear();
    number_head_rows(target.geometry, alignment);
    recompute.assign(alignment.positions.size(), 0);
    KVMELD_TRY(merger.mark(merger.merger, span_of(ordered), alignment, span_of(recompute)));
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      const Result<float> weight =
          merger.weight != nullptr ? merger.weight(merger.merger, ordered[s]) : 1.0F;
      if (!weight) return weight.error();
      if (!std::isfinite(*weight)) {
        return error(ErrorCode::non_finite, "the fuser's weight of fragment ",
                     ordered[s].fragment->id().hex(), " is not finite");
      }
      core.sources.push_back({*ordered[s].fragment,
                              s == 0 && is_mapped[0] == 0 ? first_payload : std::size_t{0}, *weight,
                              is_mapped[s] != 0});
    }
    if (parts.prefix == nullptr) return {};
    const Fragment& prefix = parts.prefix->fragment;
    prepend_prefix(alignment, prefix, target.first_position);
    std::vector<std::uint8_t> behind(static_cast<std::size_t>(prefix.token_count()), 0);
    for (const std::uint8_t r : recompute) behind.push_back(r);
    recompute = std::move(behind);
    return {};
  }

  /// Adds what stays of the local cache, compiles, checks and names the plan.
  Status finish() {
    const std::vector<std::uint8_t> several =
        with_several(target.geometry, alignment, recompute.size());
    core.positions = std::move(alignment.positions);
    core.tokens = std::move(alignment.tokens);
    KVMELD_TRY(check_positions(target.geometry, core.sources, core, parts.in_place,
                               target.context_length));
    const std::size_t from_set = core.sources.size();
    const auto kept = layer_parts(target);
    if (!kept) return kept.error();
    KVMELD_TRY(add_local(core, alignment, target, *kept));
    const FragmentId local =
        core.sources.size() > from_set ? core.sources.back().fragment.id() : FragmentId{};
    std::int64_t length = target.context_length;
    if (length == 0 && !core.positions.empty()) length = core.positions.back() + 1;
    if (merger.weighs) KVMELD_TRY(weigh(core, alignment, merger.score, span_of(recompute), length));
    add_local_heads(core, alignment, target, *kept);
    KVMELD_TRY(merger.finish(merger.merger, core, alignment, span_of(recompute), length));
    const bool nobody = merger.names_any != nullptr && !ordered.empty() &&
                        !merger.names_any(merger.merger, span_of(ordered));
    KVMELD_TRY(warn(core, span_of(several), target.refuse, merger.chosen, nobody));
    core.render_id = render_id(local);
    return {};
  }

  /// H(merger, target, ordered ids, metadata that the policies read).
  [[nodiscard]] Digest128 render_id(const FragmentId& local) const {
    Hasher h;
    h.text("kvmeld.render.v1");
    const Digest128 policies = merger.digest(merger.merger);
    h.value(policies.low);
    h.value(policies.high);
    hash_append(h, target.geometry);
    h.value(target.first_position);
    h.values(span_of(target.layers.layers));
    h.values(span_of(target.heads.heads));
    h.value(static_cast<std::uint8_t>(target.prefix_in_place));
    h.value(target.context_length);
    h.bytes(std::as_bytes(std::span(local.bytes)));
    const FragmentId prefix = parts.prefix != nullptr ? parts.prefix->fragment.id() : FragmentId{};
    h.bytes(std::as_bytes(std::span(prefix.bytes)));
    h.value(static_cast<std::uint64_t>(ordered.size()));
    for (const Source& source : ordered) {
      h.bytes(std::as_bytes(std::span(source.fragment->id().bytes)));
      if (reads(merger.metadata, MetadataFields::provenance)) {
        h.value(static_cast<std::uint64_t>(source.metadata->marks.size()));
        for (const Mark& mark : source.metadata->marks) {
          h.value(mark.dot.agent);
          h.value(mark.dot.epoch);
          h.value(mark.dot.sequence);
        }
        // where it is not the dot that stands first already
        if (source.metadata->marks.empty() || source.place != source.metadata->marks.front().dot) {
          h.value(source.place.agent);
          h.value(source.place.epoch);
          h.value(source.place.sequence);
        }
      }
      if (reads(merger.metadata, MetadataFields::confidence))
        h.value(source.metadata->best_confidence());
    }
    return h.digest();
  }
};

KVMELD_API Result<PlanCore> plan_core(const FragmentSet& set, const MergerCall& merger,
                                      const Target& target) {
  const exec::FloatEnvironmentGuard guard;  // orders and rope tables are computed here
  KVMELD_TRY(exec::check_float_environment());
  KVMELD_TRY(validate(target.geometry));
  if (target.first_position < 0 || target.first_position > max_position) {
    return error(ErrorCode::invalid_argument, "first_position ", target.first_position,
                 " is not in [0, ", max_position, "]");
  }
  auto parts = split(set, target, merger.transform);
  if (!parts) return parts.error();
  Planning planning{merger, target, *std::move(parts), {}, {}, {}, {}, 0, 0, {}, {}, {}};
  planning.core.geometry = std::make_shared<const Geometry>(target.geometry);
  planning.core.first_position = target.first_position;
  KVMELD_TRY(planning.select());
  KVMELD_TRY(planning.order());
  KVMELD_TRY(planning.map());
  KVMELD_TRY(planning.align());
  KVMELD_TRY(planning.finish());
  return std::move(planning.core);
}

}  // namespace detail

namespace extend {

KVMELD_API Status check_slots_present(const PlanCore& core, std::size_t layer,
                                      const TokenSlots& slots) {
  if (slots.kind == SlotKind::identity) return {};
  for (auto o = static_cast<std::int64_t>(core.layer_needed_from[layer]); o < core.outputs(); ++o) {
    if (core.rendered(layer, o) && slots.slot(o) < 0) {
      return error(ErrorCode::output_too_small, "layer ", layer,
                   " of the output has no slot for token ", o, ", which later queries read");
    }
  }
  return {};
}

}  // namespace extend

namespace detail {

KVMELD_API Status check_output(const PlanCore& core, const MutableKvCacheRef& out,
                               std::span<const std::byte> workspace, std::int64_t* scratch) {
  if (!out.valid()) return error(ErrorCode::invalid_argument, "the output view has no geometry");
  KVMELD_TRY(check_same(*core.geometry, out.geometry()));
  KVMELD_TRY(check_on_host(out, "run"));
  if (out.tokens() < core.outputs()) {
    return error(ErrorCode::output_too_small, "the plan renders ", core.outputs(),
                 " tokens, the output holds ", out.tokens());
  }
  const TokenSlots* apart = nullptr;  // planes mostly share one table, which is sorted once
  for (const MutablePlaneRef& whole : out.planes()) {
    MutablePlaneRef plane = whole;
    plane.tokens = core.outputs();
    KVMELD_TRY(check_steps(plane));
    const Footprint span = footprint(plane);
    const auto first =
        reinterpret_cast<std::uintptr_t>(plane.data) + static_cast<std::uintptr_t>(span.first_byte);
    const auto last =
        reinterpret_cast<std::uintptr_t>(plane.data) + static_cast<std::uintptr_t>(span.last_byte);
    for (const PlanSource& source : core.sources) {
      const Payload& payload = source.payload();
      const auto begin = reinterpret_cast<std::uintptr_t>(payload.bytes.get());
      if (!span.empty() && first < begin + payload.byte_count && begin <= last) {
        return error(ErrorCode::aliasing, "the output overlaps the payload of fragment ",
                     source.fragment.id().hex());
      }
    }
    const auto work = reinterpret_cast<std::uintptr_t>(workspace.data());
    if (!span.empty() && !workspace.empty() && first < work + workspace.size() && work <= last) {
      return error(ErrorCode::aliasing, "the output overlaps the workspace of ", workspace.size(),
                   " bytes");
    }
    const bool same = apart != nullptr && apart->table == plane.slots.table &&
                      apart->kind == plane.slots.kind &&
                      apart->block_size == plane.slots.block_size;
    if (!same) KVMELD_TRY(check_slots_apart(plane.slots, plane.tokens, scratch));
    apart = &whole.slots;
  }
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < core.geometry->layers[l].planes.size(); ++p) {
      KVMELD_TRY(check_slots_present(core, l, out.plane(l, p).slots));
    }
  }
  return {};
}

}  // namespace detail

KVMELD_NAMESPACE_END
