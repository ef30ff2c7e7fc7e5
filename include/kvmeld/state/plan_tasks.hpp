#pragma once

/// What a plan tells the row work of each plane.

#include <cstddef>
#include <cstdint>
#include <memory>

#include <kvmeld/cache/check_view.hpp>
#include <kvmeld/state/plan_core.hpp>
#include <kvmeld/state/plane_task.hpp>

KVMELD_NAMESPACE_BEGIN
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

/// Lays out the tasks of a run in a workspace.
template <class Place>
void fill_tasks(const PlanCore& core, const MutableKvCacheRef& out, PlaneTask* tasks,
                const std::byte** bases, const Place& place) {
  std::size_t index = 0;
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < core.geometry->layers[l].planes.size(); ++p, ++index) {
      std::construct_at(tasks + index, plane_task(core, l, p, index, out.plane(l, p),
                                                  bases + index * core.sources.size(), place));
    }
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
