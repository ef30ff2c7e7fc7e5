#pragma once

/// Plans and their rendering: how a set becomes a cache.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/extend/plan.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Everything that a render needs except memory: the merger, the payloads, the compiled alignment,
/// and the properties of the result.
///
/// Made by `plan`, read by `run`, any number of times. Owns handles of the payloads, so the set may
/// change meanwhile.
template <class M>
class Plan {
 public:
  Plan(M merger, extend::PlanCore core) : merger_(std::move(merger)), core_(std::move(core)) {}

  [[nodiscard]] const M& merger() const noexcept { return merger_; }
  /// Output tokens, holes included: rows that `out` must have.
  [[nodiscard]] std::int64_t tokens() const noexcept { return core_.outputs(); }
  /// Position of each output token.
  [[nodiscard]] std::span<const std::int64_t> positions() const noexcept {
    return extend::span_of(core_.positions);
  }
  /// Id of each output token; −1 where it is not known.
  [[nodiscard]] std::span<const TokenId> token_ids() const noexcept {
    return extend::span_of(core_.tokens);
  }
  /// Output tokens that the engine computes after the render, ascending.
  [[nodiscard]] std::span<const Hole> holes() const noexcept {
    return extend::span_of(core_.holes);
  }
  /// Output tokens without holes that had two contributions or more.
  [[nodiscard]] std::int64_t fused() const noexcept { return core_.fused; }
  [[nodiscard]] RenderWarnings warnings() const noexcept { return core_.warnings; }
  /// Bytes of K/V that a run writes.
  [[nodiscard]] std::int64_t bytes() const noexcept { return core_.bytes; }
  /// Bytes of workspace that `run` needs on a host, aligned to 64.
  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    const std::size_t tasks = core_.planes() * (sizeof(extend::PlaneTask) +
                                                core_.sources.size() * sizeof(const std::byte*));
    // the check of slots uses the same memory before the tasks do
    return (std::max)(tasks, core_.positions.size() * sizeof(std::int64_t)) + 64;
  }
  /// H(merger ‖ target ‖ ordered ids ‖ metadata read): cheap to compute, and equal for equal
  /// requests.
  [[nodiscard]] const Digest128& render_id() const noexcept { return core_.render_id; }
  [[nodiscard]] const Geometry& geometry() const noexcept { return *core_.geometry; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return core_.geometry;
  }
  [[nodiscard]] const extend::PlanCore& core() const noexcept { return core_; }

 private:
  M merger_;
  extend::PlanCore core_;
};

/// Plans the render of a set by a merger: selects, orders, aligns, marks seams, weighs, compiles
/// rows, and checks that the output's elements can hold the results.
///
/// It reads K/V where the policies do (for a fuser with a `score`, the keys of every token that
/// several fragments hold), once for the largest magnitudes of a payload that was not sealed in
/// this process, and for planes whose results may exceed their element type, which it computes
/// (docs/numerics.md, "Range"). It copies the rows of layers that the target keeps from its local
/// cache, and maps fragments of other models where the aligner supports it.
///
/// O(tokens · fragments), O(n² · channels) for each scored token of n contributions, and O(bytes)
/// of what is read. Errors: `geometry_mismatch`, `prefix_conflict`, `prefix_missing`,
/// `payload_missing` (with the ids), `duplicate_bos`, `rope_length_dependent`, `rope_unsupported`,
/// `unsupported`, `non_finite` (weights; a result that exceeds the output's element type, with
/// layer, plane and output), `oversized` (contributions), `invalid_argument` (a warning that
/// `Target::refuse` names, among others), and those of the policies.
template <class M>
[[nodiscard]] Result<Plan<M>> plan(const FragmentSet& set, const M& merger, const Target& target) {
  // of the translation unit in which the policies are compiled
  KVMELD_TRY(exec::check_float_environment());
  auto core = detail::plan_core(set, detail::merger_call(merger), target);
  if (!core) return core.error();
  return Plan<M>(merger, *std::move(core));
}

/// What `run` does beside rendering.
struct RunOptions {
  bool content_digest = false;  ///< also hash the result, O(bytes)
};

namespace extend {

/// The options type of a run on an executor; device executors have their own.
template <class E>
struct RunOptionsOf {
  using type = RunOptions;
};

}  // namespace extend

/// Renders a plan into the caller's cache, in the caller's workspace: output row i is output token
/// i, holes are left as they are.
///
/// Bytes are the same for every executor. Output is either untouched or completely written.
/// O(bytes); allocates only for the content digest, which covers the rendered rows and not the
/// holes. Errors: `geometry_mismatch`, `output_too_small`, `workspace_too_small`, `aliasing`,
/// `memory_space`, `token_count_mismatch` (a view whose planes do not match it),
/// `float_environment`.
template <ExecutionPolicy E, class M>
requires(!E::on_device) [[nodiscard]] Result<RenderReport> run(const E& exec, const Plan<M>& plan,
                                                               std::span<std::byte> workspace,
                                                               const MutableKvCacheRef& out,
                                                               const RunOptions& options = {}) {
  const extend::PlanCore& core = plan.core();
  const exec::FloatEnvironmentGuard guard;  // a fuser may compute its row form
  KVMELD_TRY(exec::check_float_environment());
  void* memory = workspace.data();
  std::size_t space = workspace.size();
  const std::size_t planes = core.planes();
  const std::size_t needed = plan.workspace_bytes() - 64;
  if (needed > 0 && std::align(alignof(extend::PlaneTask), needed, memory, space) == nullptr) {
    return extend::error(ErrorCode::workspace_too_small, "workspace of ", workspace.size(),
                         " bytes, the plan needs ", plan.workspace_bytes());
  }
  KVMELD_TRY(detail::check_output(core, out, workspace, static_cast<std::int64_t*>(memory)));
  auto* tasks = static_cast<extend::PlaneTask*>(memory);
  auto** bases = reinterpret_cast<const std::byte**>(tasks + planes);
  detail::fill_tasks(core, out, tasks, bases, [](const auto* host) { return host; });
  using Rows = detail::RowForm<typename decltype(plan.merger().fuse)::policy_type>;
  const detail::RenderWork<Rows> work{extend::row_form(plan.merger().fuse.policy()), tasks,
                                      static_cast<std::int64_t>(planes), core.outputs(),
                                      detail::streams_output(core.bytes)};
  if (core.outputs() > 0)
    KVMELD_TRY(exec.bulk(static_cast<std::int64_t>(planes) * core.outputs(), work));
  RenderReport report = detail::report_of(core);
  if (options.content_digest) {
    report.content_digest =
        detail::content_digest_of(KvCacheRef(out).first(core.outputs()), &detail::rendered, &core);
  }
  return report;
}

/// Plans and runs in one call, with a workspace that it allocates.
///
/// `target` gives positions and masks; its geometry is replaced by the output's. Errors: those of
/// `plan` and `run`.
template <ExecutionPolicy E, class M>
[[nodiscard]] Result<RenderReport> render(const E& exec, const FragmentSet& set, const M& merger,
                                          const MutableKvCacheRef& out, Target target = {},
                                          const RunOptions& options = {}) {
  if (!out.valid())
    return extend::error(ErrorCode::invalid_argument, "the output view has no geometry");
  if (target.geometry.layers.empty()) target.geometry = out.geometry();
  auto made = plan(set, merger, target);
  if (!made) return made.error();
  std::vector<std::byte> workspace(made->workspace_bytes());
  return run(exec, *made, workspace, out, options);
}

KVMELD_NAMESPACE_END
