#pragma once

/// The compiled part of a plan, which does not depend on the merger's type, and its checks.

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

/// Renders rows: row r is one output token of one (layer, plane), all heads.
///
/// gather → rotate for the fusion → reduce → rotate to the output position → store, in f32, without
/// intermediate buffers of the output's size.
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
  /// Created by the plan: a copy of the local cache, or projected from another model (then mostly
  /// un-rotated, at position 0).
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
  // (inputs) shift directly to the output; empty without head weights
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
  std::vector<std::int64_t> shifts{0};  // distinct shifts; index 0 is shift 0
  std::vector<detail::GroupArrays> groups;
  std::vector<std::uint32_t> layer_group;  // (layers)
  // (layers) each (head, input of the group), or empty
  std::vector<std::vector<float>> head_weights;
  std::vector<std::size_t> layer_needed_from;  // (layers) first output whose row some query reads
  std::vector<RopeTable> ropes;
  std::vector<std::int32_t> layer_rope;  // (layers) −1: keys are not rotated
  std::int64_t bytes = 0;
  std::int64_t fused = 0;  // outputs, without holes, of two contributions or more
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
[[nodiscard]] KVMELD_API RenderReport report_of(const PlanCore& core);

/// Row of a token among those that a layer holds, or −1.
[[nodiscard]] KVMELD_API std::int64_t payload_row(const Payload& payload, std::size_t layer,
                                                  std::uint32_t token);

}  // namespace extend

namespace extend {

/// The properties and functions of a fuser and its row form that planning needs, with their types
/// erased. Refers to both.
struct RowsCall {
  const void* fuser = nullptr;
  const void* rows = nullptr;
  bool rotation_equivariant = false;  ///< equally rotated rows may be fused as stored
  bool keeps_single = false;          ///< a single contribution is returned unchanged
  bool selects = false;               ///< sorts the values of a channel
  bool mixes = false;                 ///< sees all contributions at once
  bool normalises = false;            ///< divides by the sum of the weights
  bool scales_weights = false;        ///< the plan itself makes the weights add up to 1
  /// The fuser's own bound on contributions; null where it has none.
  Status (*check)(const void* fuser, std::int64_t contributions) = nullptr;
  /// The largest magnitude that inputs up to `peak` can give; null where the form has none.
  double (*bound)(const void* rows, double peak, double weights, int channels) = nullptr;
  /// Renders rows [first, last) of the tasks.
  void (*render)(const void* rows, const PlaneTask* tasks, std::int64_t outputs, RowMode mode,
                 std::int64_t first, std::int64_t last) = nullptr;
};

/// @param rows  `row_form(fuser)`; both outlive the call
template <class F>
[[nodiscard]] RowsCall rows_call(const F& fuser, const detail::RowForm<F>& rows) {
  using Rows = detail::RowForm<F>;
  RowsCall call;
  call.fuser = &fuser;
  call.rows = &rows;
  call.rotation_equivariant = rotation_equivariant<Rows>();
  call.keeps_single = keeps_single<Rows>();
  call.selects = SelectForm<Rows>;
  call.mixes = MixForm<Rows>;
  call.normalises = detail::normalises<Rows>();
  call.scales_weights = std::is_same_v<Rows, detail::MeanRows>;
  if constexpr (requires { fuser.check(std::int64_t{}); }) {
    call.check = [](const void* f, std::int64_t contributions) -> Status {
      return static_cast<const F*>(f)->check(contributions);
    };
  }
  if constexpr (requires { rows.bound(1.0, 1.0, 1); }) {
    call.bound = [](const void* r, double peak, double weights, int channels) -> double {
      return static_cast<const Rows*>(r)->bound(peak, weights, channels);
    };
  }
  call.render = [](const void* r, const PlaneTask* tasks, std::int64_t outputs, RowMode mode,
                   std::int64_t first, std::int64_t last) {
    detail::render_rows(*static_cast<const Rows*>(r), tasks, outputs, mode, first, last);
  };
  return call;
}
/// A row form that ends with the line would be read after it is gone.
template <class F>
RowsCall rows_call(const F& fuser, const detail::RowForm<F>&& rows) = delete;

}  // namespace extend

// The tasks of the row work, one for each plane.

namespace detail {

/// The task of one plane. `place` maps a host array to the address at which the executor reads it.
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

// Warnings of plans that do less than the caller probably intended.

namespace detail {

/// Whether a fuser was chosen by the caller: any but the default of `merger()`.
template <class F>
[[nodiscard]] bool chosen(const F& fuser) noexcept {
  if constexpr (std::is_same_v<F, WeightedMean>) {
    return fuser.weighting != Weighting::uniform;
  } else {
    return true;
  }
}

}  // namespace detail

namespace extend {

/// (outputs) 1 where the aligner gives some layer two contributions or more.
[[nodiscard]] KVMELD_API std::vector<std::uint8_t> with_several(const Geometry& geometry,
                                                                const Alignment& alignment,
                                                                std::size_t outputs);

/// Counts the outputs that are fused, and warns. Errors: `invalid_argument` for a warning that the
/// target refuses.
KVMELD_API Status warn(PlanCore& core, std::span<const std::uint8_t> several, RenderWarnings refuse,
                       bool fuser_chosen, bool nobody_named);

}  // namespace extend

// Fragments of other models in a plan: requested from the aligner, checked, and converted to the
// target's model.

namespace detail {

/// An aligner's conversion of fragments of other models, with its type erased.
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

}  // namespace detail

namespace extend {

/// Refuses positions of outputs, prefix and spans that cannot be in one context.
KVMELD_API Status check_positions(const Geometry& geometry, const std::vector<PlanSource>& sources,
                                  const PlanCore& core, const FragmentSet::Entry* in_place,
                                  std::int64_t context_length);

}  // namespace extend

namespace detail {

/// A fuser's `score` with its type erased, and the function that calls it.
struct ScoreCall {
  const void* fuser = nullptr;
  Status (*call)(const void*, const Scoring&, std::span<double>) = nullptr;
  bool norms = false;  ///< whether it reads them
  /// `score_rows`, linked only where a fuser scores.
  Status (*rows)(const PlanCore&, AlignmentGroup&, std::vector<std::size_t>, const ScoreCall&,
                 std::span<const std::uint8_t>, std::int64_t) = nullptr;
};

/// Weights of every output that has several contributions, by their distances.
/// @param layers  of the group, ascending
KVMELD_API Status score_rows(const PlanCore& core, AlignmentGroup& group,
                             std::vector<std::size_t> layers, const ScoreCall& score,
                             std::span<const std::uint8_t> recompute, std::int64_t context_length);

template <class F>
[[nodiscard]] ScoreCall score_call([[maybe_unused]] const F& fuser) {
  if constexpr (ScoreForm<F>) {
    constexpr bool norms = requires { requires F::reads_norms; };
    return {&fuser,
            [](const void* f, const Scoring& scoring, std::span<double> weights) {
              return static_cast<const F*>(f)->score(scoring, weights);
            },
            norms, &score_rows};
  } else {
    return {};
  }
}

}  // namespace detail

// Planning, independent of the merger's type.

namespace extend {

/// The last step of every plan: compiles an alignment into rows, and refuses rows that the fuser or
/// the output's element type cannot take.
/// @param recompute (outputs) 1 where the engine computes the token
KVMELD_API Status finish_rows(PlanCore& core, const Alignment& alignment, const RowsCall& fuser,
                              std::span<const std::uint8_t> recompute, std::int64_t context_length);

}  // namespace extend

namespace detail {

/// The functions of a merger that planning needs, with its type erased: thunks that refer to the
/// merger.
struct MergerCall {
  const void* merger = nullptr;
  Digest128 (*digest)(const void*) = nullptr;
  Result<TokenSet> (*select)(const void*, const Source&) = nullptr;
  Result<std::vector<std::uint32_t>> (*order)(const void*, std::span<const Source>) = nullptr;
  Result<Alignment> (*align)(const void*, std::span<const Source>, std::int64_t) = nullptr;
  Status (*mark)(const void*, std::span<const Source>, const Alignment&,
                 std::span<std::uint8_t>) = nullptr;
  /// `finish_rows` by the fuser's row form, which is made for the call: a fuser that does not fit
  /// is never asked for it.
  Status (*finish)(const void*, PlanCore&, const Alignment&, std::span<const std::uint8_t>,
                   std::int64_t) = nullptr;
  Status (*fits)(const void*, const Geometry&) = nullptr;             ///< null: fits any
  Result<float> (*weight)(const void*, const Source&) = nullptr;      ///< null: 1
  bool (*names_any)(const void*, std::span<const Source>) = nullptr;  ///< null: it has no table
  MetadataFields metadata = MetadataFields::none;                     ///< what the policies read
  bool weighs = false;  ///< weights enter before rows are compiled
  bool chosen = false;  ///< the fuser is not the default
  TransformCall transform;
  ScoreCall score;
};

/// @param merger  outlives the call
template <class M>
[[nodiscard]] MergerCall merger_call(const M& merger) {
  using Fuse = typename decltype(merger.fuse)::policy_type;
  using Rows = RowForm<Fuse>;
  MergerCall call;
  call.merger = &merger;
  call.digest = [](const void* m) { return static_cast<const M*>(m)->digest(); };
  call.select = [](const void* m, const Source& source) -> Result<TokenSet> {
    return static_cast<const M*>(m)->select.select(source);
  };
  call.order = [](const void* m,
                  std::span<const Source> sources) -> Result<std::vector<std::uint32_t>> {
    return static_cast<const M*>(m)->order.order(sources);
  };
  call.align = [](const void* m, std::span<const Source> ordered,
                  std::int64_t first) -> Result<Alignment> {
    return static_cast<const M*>(m)->align.policy().align(ordered, first);
  };
  call.mark = [](const void* m, std::span<const Source> ordered, const Alignment& alignment,
                 std::span<std::uint8_t> recompute) -> Status {
    return static_cast<const M*>(m)->seam.mark(ordered, alignment, recompute);
  };
  call.finish = [](const void* m, PlanCore& core, const Alignment& alignment,
                   std::span<const std::uint8_t> recompute, std::int64_t length) -> Status {
    const Fuse& policy = static_cast<const M*>(m)->fuse.policy();
    const Rows rows = row_form(policy);
    return finish_rows(core, alignment, rows_call(policy, rows), recompute, length);
  };
  const Fuse& fuser = merger.fuse.policy();
  if constexpr (requires(const Geometry& geometry) { fuser.fits(geometry); }) {
    call.fits = [](const void* m, const Geometry& geometry) -> Status {
      return static_cast<const M*>(m)->fuse.policy().fits(geometry);
    };
  }
  if constexpr (WeightForm<Fuse>) {
    call.weight = [](const void* m, const Source& source) -> Result<float> {
      return static_cast<const M*>(m)->fuse.policy().weight(source);
    };
  }
  if constexpr (requires(std::span<const Source> sources) { fuser.names_any(sources); }) {
    call.names_any = [](const void* m, std::span<const Source> sources) -> bool {
      return static_cast<const M*>(m)->fuse.policy().names_any(sources);
    };
  }
  call.metadata = M::metadata;
  call.weighs = ScoreForm<Fuse> || MixForm<Rows> || std::is_same_v<Rows, MeanRows>;
  call.chosen = detail::chosen(fuser);
  call.transform = transform_call(merger.align.policy());
  call.score = score_call(fuser);
  return call;
}

/// `plan` for a merger whose type is erased.
[[nodiscard]] KVMELD_API Result<PlanCore> plan_core(const FragmentSet& set,
                                                    const MergerCall& merger, const Target& target);

}  // namespace detail

// The checks of an output.

namespace extend {

/// Checks that a layer of the output has a slot for every row that is rendered and read later.
[[nodiscard]] KVMELD_API Status check_slots_present(const PlanCore& core, std::size_t layer,
                                                    const TokenSlots& slots);

}  // namespace extend

namespace detail {

/// Whether a plan, given as a pointer to its core, renders a token in a layer.
[[nodiscard]] inline bool rendered(const void* core, std::size_t layer, std::int64_t token) {
  return static_cast<const PlanCore*>(core)->rendered(layer, token);
}

/// Refuses outputs that cannot take the rows: other shapes, too few slots, or slots that share
/// memory with each other, with a payload or with the workspace. `scratch`, in the workspace, holds
/// one number for each output.
KVMELD_API Status check_output(const PlanCore& core, const MutableKvCacheRef& out,
                               std::span<const std::byte> workspace, std::int64_t* scratch);

}  // namespace detail

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/plan.hpp>
#endif
