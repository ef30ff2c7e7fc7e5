#pragma once

/// Gathers rows on the device.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/cuda/detail/upload.cuh>
#include <kvmeld/gather.hpp>

KVMELD_NAMESPACE_BEGIN

namespace gpu {

namespace detail {

/// In place is refused exactly where the host can read the tables, and otherwise wherever two
/// planes start at one address.
[[nodiscard]] inline Status check_device_gather(const KvCacheRef& in,
                                                const DeviceView<const std::byte>& from,
                                                const DeviceView<std::byte>& to,
                                                const MutableKvCacheRef& out,
                                                std::span<const std::byte> workspace) {
  if (from.all_readable() && to.all_readable()) {
    const MutableKvCacheRef written(out.shared_geometry(), to.planes,
                                    to.planes.empty() ? 0 : to.planes[0].tokens);
    if (overlaps(in, written))
      return extend::error(
          ErrorCode::aliasing,
          "gather: the output shares memory with the input; gather into another cache");
  } else {
    for (const PlaneRef& a : from.planes) {
      for (const MutablePlaneRef& b : to.planes) {
        if (a.data == b.data) {
          return extend::error(
              ErrorCode::aliasing,
              "gather: input and output start at one address, and their slot tables lie "
              "where the host cannot "
              "tell them apart; gather into another cache, or give tables in host memory");
        }
      }
    }
  }
  for (std::size_t p = 0; p < to.planes.size(); ++p) {
    if (to.readable[p] == 0) continue;
    KVMELD_TRY(check_writable(to.planes[p]));
    const extend::Segment extent = extend::extent_in_memory(to.planes[p]);
    const auto first = reinterpret_cast<std::uintptr_t>(workspace.data());
    if (extent.first < first + workspace.size() && first < extent.last) {
      return extend::error(ErrorCode::aliasing, "gather: plane ", p,
                           " of the output overlaps the workspace");
    }
  }
  return {};
}

template <class Int>
static Result<GatherReport> gather_on_device(const gpu::Stream& stream, const KvCacheRef& in,
                                             std::span<const Int> map, const MutableKvCacheRef& out,
                                             std::span<std::byte> workspace) {
  KVMELD_TRY(extend::check_gather(in, map, out));
  const auto outputs = static_cast<std::int64_t>(map.size());
  const std::size_t planes = in.planes().size();
  if (outputs == 0 || planes == 0) return GatherReport{outputs, {}};
  KVMELD_TRY(check_not_capturing(stream));
  KVMELD_TRY(gpu::check_device());
  auto from = device_view(in, in.tokens());
  if (!from) return from.error();
  auto to = device_view(out, outputs);
  if (!to) return to.error();
  KVMELD_TRY(check_device_gather(in, *from, *to, out, workspace));
  std::vector<const void*> readable;
  for (std::size_t p = 0; p < planes; ++p) {
    if (from->readable[p] != 0) readable.push_back(in.planes()[p].slots.table);
  }
  GatherReport report{outputs, extend::gather_holes(in, map, [&](const PlaneRef& plane) {
                        return std::find(readable.begin(), readable.end(), plane.slots.table) !=
                               readable.end();
                      })};
  Upload upload;
  const std::size_t tasks_at = upload.reserve(planes * sizeof(extend::GatherTask));
  upload.stage(map.data(), map.size_bytes());
  from->stage_tables(upload);
  to->stage_tables(upload);
  KVMELD_TRY(upload.place(workspace));
  from->follow_tables(upload);
  to->follow_tables(upload);
  for (std::size_t p = 0; p < planes; ++p)
    std::construct_at(upload.staged<extend::GatherTask>(tasks_at) + p,
                      extend::gather_task(from->planes[p], to->planes[p]));
  const extend::GatherWork<Int> work{upload.device<const extend::GatherTask>(tasks_at),
                                     upload(map.data()), outputs};
  KVMELD_TRY(upload.send(stream));
  KVMELD_TRY(stream.bulk(static_cast<std::int64_t>(planes) * outputs, work));
  return report;
}

}  // namespace detail

/// Bytes of device memory that `gather` needs beside the two caches. Any alignment; no CUDA call.
[[nodiscard]] inline std::size_t gather_workspace_bytes(const KvCacheRef& in,
                                                        std::size_t map_entries,
                                                        const MutableKvCacheRef& out) {
  detail::Upload upload;
  (void)upload.reserve(in.planes().size() * sizeof(extend::GatherTask));
  (void)upload.reserve(map_entries * sizeof(std::int64_t));
  for (const PlaneRef& plane : in.planes())
    upload.stage(plane.slots.table, detail::table_bytes(plane.slots, in.tokens()));
  for (const MutablePlaneRef& plane : out.planes())
    upload.stage(plane.slots.table, detail::table_bytes(plane.slots, out.tokens()));
  return upload.workspace_bytes();
}

}  // namespace gpu

/// Fills output token i with input token `map[i]`, in every layer, byte for byte, on the device; −1
/// leaves the row as it is.
///
/// The map is host memory: it is checked before anything is launched, and free to change when the
/// call returns. Slot tables may lie on the host or on the device (see `run`); of tables on the
/// device the host sees no holes, so only the map's are reported. The workspace stays until the
/// stream has passed. Errors: those of the host's `gather`, and of the device's `run`. In place is
/// refused; two sequences of one pool are told apart only by tables in host memory.
[[nodiscard]] [[maybe_unused]] static Result<GatherReport> gather(const gpu::Stream& stream,
                                                                  const KvCacheRef& in,
                                                                  std::span<const std::int32_t> map,
                                                                  const MutableKvCacheRef& out,
                                                                  std::span<std::byte> workspace) {
  return gpu::detail::gather_on_device(stream, in, map, out, workspace);
}

[[nodiscard]] [[maybe_unused]] static Result<GatherReport> gather(const gpu::Stream& stream,
                                                                  const KvCacheRef& in,
                                                                  std::span<const std::int64_t> map,
                                                                  const MutableKvCacheRef& out,
                                                                  std::span<std::byte> workspace) {
  return gpu::detail::gather_on_device(stream, in, map, out, workspace);
}

KVMELD_NAMESPACE_END
