#pragma once

/// Renders on the device.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/cuda/detail/upload.cuh>
#include <kvmeld/render.hpp>

KVMELD_NAMESPACE_BEGIN

namespace gpu {

/// A payload whose canonical bytes lie on the device already, so that no run copies them again.
struct ResidentPayload {
  FragmentId fragment{};
  std::size_t payload = 0;           ///< index among the fragment's payloads
  const std::byte* bytes = nullptr;  ///< `Payload::byte_count` bytes of device memory
};

/// What a device run is told beside the plan. There is no content digest: it would have to wait for
/// the device.
struct RenderOptions {
  std::span<const ResidentPayload> resident{};
};

namespace detail {

[[nodiscard]] inline const gpu::ResidentPayload* find_resident(
    const extend::PlanSource& source, const gpu::RenderOptions& options) noexcept {
  for (const gpu::ResidentPayload& r : options.resident) {
    if (!source.own && r.fragment == source.fragment.id() && r.payload == source.payload_index)
      return &r;
  }
  return nullptr;
}

/// Offsets of the arrays that are filled once device addresses are known.
struct RenderOffsets {
  std::size_t tasks = 0;
  std::size_t bases = 0;
};

/// @param keep_own  copies what the plan made itself through the staging buffer, so that the plan
/// need not outlive the call.
[[nodiscard]] inline RenderOffsets lay_out(Upload& upload, const extend::PlanCore& core,
                                           const gpu::RenderOptions& options, bool keep_own) {
  RenderOffsets at;
  at.tasks = upload.reserve(core.planes() * sizeof(extend::PlaneTask));
  at.bases = upload.reserve(core.planes() * core.sources.size() * sizeof(const std::byte*));
  const auto stage = [&](const auto& array) {
    upload.stage(array.data(), array.size() * sizeof(array[0]));
  };
  for (const extend::GroupArrays& group : core.groups) {
    stage(group.row_begin);
    stage(group.inputs);
    stage(group.out_shift);
    stage(group.run);
    if (!group.direct.empty()) stage(group.direct);
  }
  for (const std::vector<float>& weights : core.head_weights) {
    if (!weights.empty()) stage(weights);
  }
  for (const RopeTable& table : core.ropes) upload.stage(table.data(), table.size_bytes());
  for (std::size_t s = 0; s < core.sources.size(); ++s) {
    const Payload& payload = core.sources[s].payload();
    if (const gpu::ResidentPayload* r = find_resident(core.sources[s], options)) {
      upload.resident(payload.bytes.get(), payload.byte_count, r->bytes);
    } else if (keep_own && core.sources[s].own) {
      upload.stage(payload.bytes.get(), payload.byte_count);
    } else {
      upload.attach(payload.bytes.get(), payload.byte_count);
    }
  }
  return at;
}

/// A fuser's row form with its parameters, where it has any, in the upload.
template <class Rows>
void stage_parameters([[maybe_unused]] Upload& upload, [[maybe_unused]] const Rows& rows) {
  if constexpr (requires { rows.parameters(); })
    upload.stage(rows.parameters().data(), rows.parameters().size_bytes());
}
template <class Rows>
[[nodiscard]] Rows with_device_parameters([[maybe_unused]] const Upload& upload, const Rows& rows) {
  if constexpr (requires { rows.parameters(); }) {
    return rows.with_parameters(upload(rows.parameters().data()));
  } else {
    return rows;
  }
}

}  // namespace detail
}  // namespace gpu

namespace extend {

template <>
struct RunOptionsOf<gpu::Stream> {
  using type = gpu::RenderOptions;
};

}  // namespace extend

namespace gpu {
namespace detail {

/// What can be told of device views: memory that the host cannot see is compared where the slots
/// are known.
[[nodiscard]] inline Status check_device_output(const extend::PlanCore& core,
                                                const DeviceView<std::byte>& out,
                                                std::span<const std::byte> workspace,
                                                const gpu::RenderOptions& options) {
  const auto meets = [](const extend::Segment& a, const std::byte* begin, std::size_t bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(begin);
    return a.first < first + bytes && first < a.last;
  };
  std::vector<std::size_t> layer_of;
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    layer_of.insert(layer_of.end(), core.geometry->layers[l].planes.size(), l);
  }
  for (std::size_t p = 0; p < out.planes.size(); ++p) {
    if (out.readable[p] == 0) continue;
    KVMELD_TRY(check_writable(out.planes[p]));
    KVMELD_TRY(extend::check_slots_present(core, layer_of[p], out.planes[p].slots));
    const extend::Segment extent = extend::extent_in_memory(out.planes[p]);
    if (meets(extent, workspace.data(), workspace.size()))
      return extend::error(ErrorCode::aliasing, "plane ", p,
                           " of the output overlaps the workspace");
    for (const extend::PlanSource& source : core.sources) {
      const gpu::ResidentPayload* r = find_resident(source, options);
      if (r != nullptr && meets(extent, r->bytes, source.payload().byte_count)) {
        return extend::error(ErrorCode::aliasing, "plane ", p,
                             " of the output overlaps the payload of fragment ",
                             source.fragment.id().hex());
      }
    }
  }
  return {};
}

template <class M>
static Result<RenderReport> run_on_device(const gpu::Stream& stream, const Plan<M>& plan,
                                          std::span<std::byte> workspace,
                                          const MutableKvCacheRef& out,
                                          const gpu::RenderOptions& options, bool keep_own) {
  const extend::PlanCore& core = plan.core();
  if (!out.valid())
    return extend::error(ErrorCode::invalid_argument, "the output view has no geometry");
  KVMELD_TRY(check_same(*core.geometry, out.geometry()));
  if (out.tokens() < core.outputs()) {
    return extend::error(ErrorCode::output_too_small, "the plan renders ", core.outputs(),
                         " tokens, the output holds ", out.tokens());
  }
  const RenderReport report = extend::report_of(core);
  if (core.outputs() == 0 || core.planes() == 0) return report;
  KVMELD_TRY(check_not_capturing(stream));
  KVMELD_TRY(gpu::check_device());
  auto view = device_view(out, core.outputs());
  if (!view) return view.error();
  KVMELD_TRY(check_device_output(core, *view, workspace, options));
  Upload upload;
  const RenderOffsets at = lay_out(upload, core, options, keep_own);
  const exec::FloatEnvironmentGuard guard;  // a fuser may compute its row form
  const auto rows = extend::row_form(plan.merger().fuse.policy());
  stage_parameters(upload, rows);
  view->stage_tables(upload);
  KVMELD_TRY(upload.place(workspace));
  view->follow_tables(upload);
  const MutableKvCacheRef device_out(out.shared_geometry(), std::move(view->planes),
                                     core.outputs());
  extend::fill_tasks(core, device_out, upload.staged<extend::PlaneTask>(at.tasks),
                     upload.staged<const std::byte*>(at.bases), upload);
  KVMELD_TRY(upload.send(stream));
  using Rows = extend::RowForm<typename decltype(plan.merger().fuse)::policy_type>;
  const extend::RenderWork<Rows> work{with_device_parameters(upload, rows),
                                      upload.device<const extend::PlaneTask>(at.tasks),
                                      static_cast<std::int64_t>(core.planes()), core.outputs()};
  KVMELD_TRY(stream.bulk(static_cast<std::int64_t>(core.planes()) * core.outputs(), work));
  return report;
}

}  // namespace detail

/// Bytes of device memory that `run` needs beside the output: tables, row lists, and every payload
/// that is not resident.
///
/// Any alignment. O(planes + fragments), no CUDA call.
template <class M>
[[nodiscard]] std::size_t workspace_bytes(const Plan<M>& plan, const MutableKvCacheRef& out,
                                          const RenderOptions& options = {}) {
  detail::Upload upload;
  (void)detail::lay_out(upload, plan.core(), options, false);
  detail::stage_parameters(upload, extend::row_form(plan.merger().fuse.policy()));
  for (const MutablePlaneRef& plane : out.planes())
    upload.stage(plane.slots.table, detail::table_bytes(plane.slots, plan.tokens()));
  return upload.workspace_bytes();
}

}  // namespace gpu

/// Renders a plan into a cache in device memory: everything is enqueued in the stream, and the call
/// returns.
///
/// `out` is a view whose elements the current device can reach. Its slot tables may lie in host
/// memory (checked, and copied with the plan) or in device memory (used as they lie, unchecked: the
/// host cannot read them without waiting). Payloads are copied into the workspace unless they are
/// resident; from pageable memory, which is what `seal` makes, CUDA may wait for the stream inside
/// that copy. The plan, resident payloads and the workspace stay until the stream has passed;
/// everything else may go when the call returns. The first call on a device also waits for
/// `gpu::check_device`.
///
/// Errors, with nothing launched: those of the host's `run`; `memory_space` (a plane in host
/// memory, or declared so: a view over device memory says `in(MemorySpace::device)`), `unsupported`
/// (a stream that is captured), `float_environment`, `engine_failure` with CUDA's text. A fault on
/// the device shows in the stream later, as CUDA's always do, and leaves the output undefined.
template <class M>
[[nodiscard]] static Result<RenderReport> run(const gpu::Stream& stream, const Plan<M>& plan,
                                              std::span<std::byte> workspace,
                                              const MutableKvCacheRef& out,
                                              const gpu::RenderOptions& options = {}) {
  return gpu::detail::run_on_device(stream, plan, workspace, out, options, false);
}

namespace gpu {

namespace detail {

/// Runs a plan in a workspace of the stream's memory pool. What the plan made itself may go when
/// this returns.
template <class M>
static Result<RenderReport> run_in_pool(const gpu::Stream& stream, const Plan<M>& plan,
                                        const MutableKvCacheRef& out,
                                        const gpu::RenderOptions& options) {
  const std::size_t bytes = gpu::workspace_bytes(plan, out, options);
  void* workspace = nullptr;
  KVMELD_TRY(
      cuda_status(cudaMallocAsync(&workspace, bytes, stream.get()), "allocating a workspace"));
  auto report = run_on_device(stream, plan, std::span(static_cast<std::byte*>(workspace), bytes),
                              out, options, true);
  const Status freed = cuda_status(cudaFreeAsync(workspace, stream.get()), "freeing a workspace");
  if (report.ok() && !freed) return freed;
  return report;
}

}  // namespace detail

}  // namespace gpu

/// Plans on the host and runs on the device, in a workspace of the stream's own memory pool.
///
/// Allocates with `cudaMallocAsync` and frees with `cudaFreeAsync`, both in the stream: callers who
/// must not allocate call `plan` and `run`. The set's fragments stay until the stream has passed.
/// `target.local` is read on the host. Errors: those of `plan` and `run`; `memory_space` for a
/// local cache in device memory.
template <class M>
[[nodiscard]] static Result<RenderReport> render(const gpu::Stream& stream, const FragmentSet& set,
                                                 const M& merger, const MutableKvCacheRef& out,
                                                 Target target = {},
                                                 const gpu::RenderOptions& options = {}) {
  if (!out.valid())
    return extend::error(ErrorCode::invalid_argument, "the output view has no geometry");
  if (target.geometry.layers.empty()) target.geometry = out.geometry();
  if (target.local) {
    for (const PlaneRef& plane : target.local->planes()) {
      if (!host_reaches(plane.space)) continue;  // `plan` refuses it by what it says
      cudaPointerAttributes memory{};
      KVMELD_TRY(gpu::detail::cuda_status(cudaPointerGetAttributes(&memory, plane.data),
                                          "asking where the local cache lies"));
      if (memory.type == cudaMemoryTypeDevice) {
        return extend::error(
            ErrorCode::memory_space,
            "the local cache is declared to lie in host memory and lies in a device's; ",
            "copy its layers to the host first");
      }
    }
  }
  const auto made = plan(set, merger, target);
  if (!made) return made.error();
  return gpu::detail::run_in_pool(stream, *made, out, options);
}

namespace gpu {

/// Runs a plan in a workspace of the stream's own memory pool and waits until the stream has
/// passed: what a `RenderWorker` does on its thread, for which it makes the stream's device the
/// current one.
///
/// Errors: those of `run`, and what the device reports before the stream has passed
/// (`engine_failure`).
template <class M>
[[nodiscard]] static Result<RenderReport> run_and_wait(const gpu::Stream& stream,
                                                       const Plan<M>& plan,
                                                       const MutableKvCacheRef& out,
                                                       const gpu::RenderOptions& options = {}) {
  KVMELD_TRY(
      gpu::detail::cuda_status(cudaSetDevice(stream.device()), "choosing the stream's device"));
  auto report = gpu::detail::run_in_pool(stream, plan, out, options);
  if (!report) return report;
  KVMELD_TRY(gpu::detail::cuda_status(cudaStreamSynchronize(stream.get()), "waiting for a render"));
  return report;
}

}  // namespace gpu

KVMELD_NAMESPACE_END
