#pragma once

/// The compiled part of a plan, which does not depend on the merger, and what it is checked for.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
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

/// Renders rows: row r is one output token of one (layer, plane), all heads.
///
/// gather → turn to the frame → reduce → turn to the output position → store, in f32, nothing
/// stored between.
/// @tparam F models `FoldForm`, `SelectForm` or `MixForm`.
template <class F>
struct RenderWork {
  using State = detail::NoState;

  F fuser;
  const PlaneTask* tasks = nullptr;
  std::int64_t task_count = 0;
  std::int64_t outputs = 0;
  bool streams = false;  ///< hosts write past their caches

  // Lane form: elementwise, so there is nothing to reduce between lanes.
  [[nodiscard]] KVMELD_HD detail::NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static detail::NoState join(detail::NoState, detail::NoState) noexcept {
    return {};
  }
  KVMELD_HD void finish(std::int64_t row, int lane, detail::NoState) const {
    detail::RenderLanes<F>{fuser}.token(tasks[row / outputs], row % outputs, lane);
  }

  // Host form: the same expressions over whole rows.
  void host_rows(Isa isa, std::int64_t begin, std::int64_t end) const {
    detail::render_rows(fuser, tasks, outputs, {isa, streams}, begin, end);
  }
};

}  // namespace extend

// The part of a plan that does not depend on the merger's type.

namespace extend {

/// One fragment encoding that a plan reads; keeps the bytes alive.
struct PlanSource {
  Fragment fragment;
  std::size_t payload_index = 0;
  float weight = 1.0F;
  /// Made by the plan: a copy of the local cache, or mapped from another model (and then mostly
  /// un-rotated, all at position 0).
  bool own = false;

  [[nodiscard]] const Payload& payload() const noexcept {
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
  std::vector<detail::GroupArrays> groups;
  std::vector<std::uint32_t> layer_group;  // (layers)
  // (layers) each (head, input of the group), or empty
  std::vector<std::vector<float>> head_weights;
  std::vector<std::size_t> layer_needed_from;  // (layers) first output whose row some query reads
  std::vector<RopeTable> ropes;
  std::vector<std::int32_t> layer_rope;  // (layers) −1: keys are not rotated
  std::int64_t bytes = 0;
  std::int64_t fused = 0;  // outputs, holes left out, of two contributions or more
  RenderWarnings warnings = RenderWarnings::none;
  Digest128 render_id;

  [[nodiscard]] std::int64_t outputs() const noexcept {
    return static_cast<std::int64_t>(positions.size());
  }
  /// Whether a run writes this output's row in this layer.
  [[nodiscard]] bool rendered(std::size_t layer, std::int64_t output) const noexcept {
    const detail::GroupArrays& rows = groups[layer_group[layer]];
    return rows.row_begin[static_cast<std::size_t>(output)] !=
           rows.row_begin[static_cast<std::size_t>(output) + 1];
  }
  [[nodiscard]] std::size_t planes() const noexcept {
    std::size_t count = 0;
    for (const LayerShape& layer : geometry->layers) count += layer.planes.size();
    return count;
  }
};

/// What a run of a plan reports.
[[nodiscard]] inline RenderReport report_of(const PlanCore& core) {
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
[[nodiscard]] inline std::int64_t payload_row(const Payload& payload, std::size_t layer,
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

}  // namespace detail

// From contributions to rows: which bytes are read for an output, and how far each is rotated.

namespace detail {

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

/// What the frame of a row depends on.
struct FuserTraits {
  bool equivariant = false;
  bool keeps_single = false;
};

/// Compiles the rows of one layer (and of all that hold the same tokens): token indices become
/// payload rows, positions become turns.
///
/// The frame: one contribution is rotated straight to its output position; equally rotated
/// contributions of a rotation-equivariant fuser are fused as they lie and rotated once; anything
/// else is fused un-rotated.
inline void compile_rows(const PlanCore& core, const AlignmentGroup& alignment, std::size_t layer,
                         FuserTraits fuser, std::span<const std::uint8_t> recompute,
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
        if (equal && fuser.equivariant) {
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

}  // namespace detail

// What the engine has to compute.

namespace detail {

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

}  // namespace detail

// Weights that differ by head, from the alignment's numbering to that of the compiled rows.

namespace detail {

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

}  // namespace detail

// An alignment becomes what a run executes.

namespace detail {

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
inline Status compile_groups(PlanCore& core, const Alignment& alignment, FuserTraits fuser,
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

}  // namespace detail

namespace extend {

/// Compiles every layer group, finds the holes, builds the rope tables. An output that one layer
/// lacks is the engine's in all of them: a hole has no rows, whatever contributions other layers
/// hold for it.
inline Status compile(PlanCore& core, const Alignment& alignment, detail::FuserTraits fuser,
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

}  // namespace extend

// Whether the compiled rows of a plan are rows that its fuser can take.

namespace detail {

/// Refuses a row of one head, or of all heads, that a fuser's row form cannot take.
template <class F>
Status check_row(const F& fuser, std::span<const PlaneShape> planes, const HeadInputs& row) {
  using Rows = RowForm<F>;
  const int count = row.used_count();
  if constexpr (SelectForm<Rows>) {
    if (count > max_selected) {
      return error(ErrorCode::oversized, count, " contributions; this fuser sorts at most ",
                   max_selected,
                   ": fuse fewer fragments, or take a mean, a medoid or the geometric median");
    }
  }
  if constexpr (MixForm<Rows>) {
    for (const PlaneShape& shape : planes) {
      const int most =
          (std::min)(max_mixed, max_mixed_values / (std::max)(1, (shape.channels + 31) / 32 * 32));
      if (count > most)
        return error(ErrorCode::oversized, count, " contributions; this fuser mixes at most ", most,
                     " rows of ", shape.channels, " channels");
    }
  }
  if constexpr (requires { fuser.check(std::int64_t{}); })
    KVMELD_TRY(fuser.check(static_cast<std::int64_t>(count)));
  if constexpr (normalises<Rows>() || MixForm<Rows>) {
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
    const bool divides = !normalises<Rows>() ? total > 0 : total > 0x1p-100 && total < 0x1p100;
    if (divides) return {};
    return error(ErrorCode::non_finite, "the ", row.count, " weights add up to ", total,
                 "; a mean divides by their sum, which lies in (2^-100, 2^100)");
  }
  return count > 0 ? Status()
                   : error(ErrorCode::non_finite, "the ", row.count, " weights are all 0");
}

}  // namespace detail

namespace extend {

/// Refuses rows that a fuser's row form cannot take: too many contributions to sort, too few for
/// its own check, or weights that give a fuser which divides by their sum nothing to divide by.
template <class F>
Status check_rows(const PlanCore& core, const F& fuser) {
  std::vector<std::uint8_t> done(core.groups.size(), 0);
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    const detail::GroupArrays& group = core.groups[core.layer_group[l]];
    const bool by_head = !core.head_weights[l].empty();
    if (!by_head && done[core.layer_group[l]]++ != 0) continue;
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      const std::uint32_t begin = group.row_begin[o], count = group.row_begin[o + 1] - begin;
      if (count == 0 || (!by_head && count < (keeps_single<detail::RowForm<F>>() ? 2U : 1U)))
        continue;
      for (std::size_t h = 0; h < (by_head ? detail::layer_heads(core.geometry->layers[l]) : 1);
           ++h) {
        const detail::HeadInputs row{
            group.inputs.data() + begin,
            by_head ? core.head_weights[l].data() + h * group.inputs.size() + begin : nullptr,
            static_cast<int>(count)};
        const bool alone = by_head && row.used_count() == 1 && row.weight(row.first_used()) > 0;
        const bool single = alone && (keeps_single<detail::RowForm<F>>() ||
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

}  // namespace extend

// What a plan tells the row work of each plane.

namespace detail {

/// The task of one plane. `place` maps a host array to where the executor reads it.
/// @param index  of the plane among all planes of all layers
/// @param bases  (sources) takes the addresses of the plane's rows
template <class Place>
[[nodiscard]] PlaneTask plane_task(const PlanCore& core, std::size_t l, std::size_t p,
                                   std::size_t index, const MutablePlaneRef& out,
                                   const std::byte** bases, const Place& place) {
  const auto at = [&](const auto& array) { return array.empty() ? nullptr : place(array.data()); };
  const LayerShape& layer = core.geometry->layers[l];
  const GroupArrays& group = core.groups[core.layer_group[l]];
  PlaneTask task;
  task.out = out;
  task.group = {at(group.row_begin), at(group.inputs), at(group.out_shift), at(group.run),
                at(group.direct)};
  task.head_weights = at(core.head_weights[l]);
  task.input_count = static_cast<std::int64_t>(group.inputs.size());
  task.local_source = static_cast<std::uint32_t>(core.local_source);
  task.layer = static_cast<std::int32_t>(l);
  for (std::size_t s = 0; s < core.sources.size(); ++s) {
    const Payload& payload = core.sources[s].payload();
    bases[s] =
        place(static_cast<const std::byte*>(payload.bytes.get())) + payload.plane_offsets[index];
  }
  task.sources = place(static_cast<const std::byte* const*>(bases));
  if (layer.planes[p].rotary && core.layer_rope[l] >= 0) {
    const RopeTable& table = core.ropes[static_cast<std::size_t>(core.layer_rope[l])];
    task.rope = place(table.data());
    task.rope_stride = static_cast<std::int64_t>(table.row_stride());
    task.pairing = layer.rope.pairing;
    task.first_channel = layer.rope.first_channel;
    task.rotary_channels = layer.rope.rotary_channels;
  }
  task.packed = contiguous_tokens(task.out);
  return task;
}

}  // namespace detail

namespace extend {

/// Lays out the tasks of a run in a workspace.
template <class Place>
void fill_tasks(const PlanCore& core, const MutableKvCacheRef& out, PlaneTask* tasks,
                const std::byte** bases, const Place& place) {
  std::size_t index = 0;
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < core.geometry->layers[l].planes.size(); ++p, ++index) {
      std::construct_at(tasks + index,
                        detail::plane_task(core, l, p, index, out.plane(l, p),
                                           bases + index * core.sources.size(), place));
    }
  }
}

}  // namespace extend

// Plans that do less than was asked for.

namespace detail {

/// Whether a caller chose this fuser for what it does: any but what `merger()` takes where none is
/// named.
template <class F>
[[nodiscard]] bool chosen(const F& fuser) noexcept {
  if constexpr (std::is_same_v<F, WeightedMean>) {
    return fuser.weighting != Weighting::uniform;
  } else {
    return true;
  }
}

/// Whether a table of weights names none of those that contribute.
template <class F>
[[nodiscard]] bool names_nobody([[maybe_unused]] const F& fuser,
                                [[maybe_unused]] std::span<const Source> sources) {
  if constexpr (requires { fuser.names_any(sources); }) {
    return !sources.empty() && !fuser.names_any(sources);
  } else {
    return false;
  }
}

}  // namespace detail

namespace extend {

/// (outputs) 1 where the aligner gives some layer two contributions or more.
[[nodiscard]] inline std::vector<std::uint8_t> with_several(const Geometry& geometry,
                                                            const Alignment& alignment,
                                                            std::size_t outputs) {
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

/// Counts the outputs that are fused, and warns. Errors: `invalid_argument` for a warning that the
/// target refuses.
inline Status warn(PlanCore& core, std::span<const std::uint8_t> several, RenderWarnings refuse,
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

KVMELD_NAMESPACE_END
