#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvmeld/cache/check_view.hpp>
#include <kvmeld/cache/content_digest.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/exec/exec.hpp>
#include <kvmeld/state/plan.hpp>
#include <kvmeld/state/plan_tasks.hpp>
#include <kvmeld/state/render_work.hpp>

KVMELD_NAMESPACE_BEGIN

/// What `run` does beside rendering.
struct RunOptions {
  bool content_digest = false;  ///< hash what came out, O(bytes) more
};

namespace detail {

/// What a run on an executor is told beside the plan; executors of devices have their own.
template <class E>
struct RunOptionsOf {
  using type = RunOptions;
};

/// Whether a layer of the output has a place for every row that is rendered and read later.
KVMELD_LAZY [[nodiscard]] Status check_slots_present(const PlanCore& core, std::size_t layer,
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

/// Refuses outputs that cannot take the rows: other shapes, too few slots, slots that share memory
/// with each other, with a payload or with the workspace. `scratch`, in the workspace, takes a
/// number for each output.
KVMELD_LAZY Status check_output(const PlanCore& core, const MutableKvCacheRef& out,
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

/// Renders a plan into the caller's cache, in the caller's workspace: output row i is output token
/// i, holes are left as they are.
///
/// Bytes are the same for every executor. Output is untouched or completely written. O(bytes), no
/// allocation but for the content digest, which covers the rows that were rendered and not what
/// lies in holes. Errors: `geometry_mismatch`, `output_too_small`, `workspace_too_small`,
/// `aliasing`, `memory_space`, `token_count_mismatch` (a view that its planes belie),
/// `float_environment`.
template <ExecutionPolicy E, class M>
requires(!E::on_device) [[nodiscard]] Result<RenderReport> run(const E& exec, const Plan<M>& plan,
                                                               std::span<std::byte> workspace,
                                                               const MutableKvCacheRef& out,
                                                               const RunOptions& options = {}) {
  const detail::PlanCore& core = plan.core();
  KVMELD_TRY(check_float_environment());
  void* memory = workspace.data();
  std::size_t space = workspace.size();
  const std::size_t planes = core.planes();
  const std::size_t needed = plan.workspace_bytes() - 64;
  if (needed > 0 && std::align(alignof(detail::PlaneTask), needed, memory, space) == nullptr) {
    return detail::error(ErrorCode::workspace_too_small, "workspace of ", workspace.size(),
                         " bytes, the plan needs ", plan.workspace_bytes());
  }
  KVMELD_TRY(detail::check_output(core, out, workspace, static_cast<std::int64_t*>(memory)));
  auto* tasks = static_cast<detail::PlaneTask*>(memory);
  auto** bases = reinterpret_cast<const std::byte**>(tasks + planes);
  detail::fill_tasks(core, out, tasks, bases, [](const auto* host) { return host; });
  using Rows = detail::RowForm<typename decltype(plan.merger().fuse)::policy_type>;
  const detail::RenderWork<Rows> work{detail::row_form(plan.merger().fuse.policy()), tasks,
                                      static_cast<std::int64_t>(planes), core.outputs(),
                                      detail::streams_output(core.bytes)};
  if (core.outputs() > 0)
    KVMELD_TRY(exec.bulk(static_cast<std::int64_t>(planes) * core.outputs(), work));
  RenderReport report = detail::report_of(core);
  if (options.content_digest) {
    report.content_digest = detail::content_digest_of(
        KvCacheRef(out).first(core.outputs()),
        [&](std::size_t layer, std::int64_t o) { return core.rendered(layer, o); });
  }
  return report;
}

/// Plans and runs in one call, in a workspace of its own.
///
/// `target` tells positions and masks; its geometry is the output's. Errors: those of `plan` and
/// `run`.
template <ExecutionPolicy E, class M>
[[nodiscard]] Result<RenderReport> render(const E& exec, const FragmentSet& set, const M& merger,
                                          const MutableKvCacheRef& out, Target target = {},
                                          const RunOptions& options = {}) {
  if (!out.valid())
    return detail::error(ErrorCode::invalid_argument, "the output view has no geometry");
  if (target.geometry.layers.empty()) target.geometry = out.geometry();
  auto made = plan(set, merger, target);
  if (!made) return made.error();
  std::vector<std::byte> workspace(made->workspace_bytes());
  return run(exec, *made, workspace, out, options);
}

KVMELD_NAMESPACE_END
