#pragma once

/// Whether the output's elements can hold what a run makes of a plan: said when the plan is made,
/// so that no run writes an infinity.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <kvmeld/state/plan_core.hpp>
#include <kvmeld/state/plan_tasks.hpp>
#include <kvmeld/state/render_rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Scales the weights of each row, or of each head of it, by the power of two that brings their sum
/// into (1/2, 1]: a weighted mean stays as it is to the bit (but for sums that are subnormal), and
/// no partial sum exceeds the largest contribution.
KVMELD_LAZY void scale_weights(PlanCore& core) {
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
  std::vector<std::uint8_t> copied, turned, fused;  // (sources)
  bool any_fused = false;
  bool turned_in = false;   ///< some row before it is fused
  bool turned_out = false;  ///< some row after
  double weights = 0;       ///< largest sum of magnitudes of one fused row
};

[[nodiscard]] inline double sum_of_magnitudes(const HeadInputs& row) noexcept {
  double sum = 0;
  for (int i = 0; i < row.count; ++i) sum += std::fabs(static_cast<double>(row.weight(i)));
  return sum;
}

/// @param keeps_single  the fuser hands a single contribution on as it is
KVMELD_LAZY [[nodiscard]] LayerUse layer_use(const PlanCore& core, std::size_t layer,
                                             bool keeps_single) {
  const GroupArrays& group = core.groups[core.layer_group[layer]];
  const std::vector<float>& heads = core.head_weights[layer];
  LayerUse use;
  for (auto* of : {&use.copied, &use.turned, &use.fused}) of->assign(core.sources.size(), 0);
  for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
    const std::uint32_t begin = group.row_begin[o], end = group.row_begin[o + 1];
    const bool single = heads.empty() && end - begin == 1 && keeps_single;
    for (std::uint32_t i = begin; i < end; ++i) {
      const RowInput& input = group.inputs[i];
      const std::uint32_t direct = heads.empty() ? input.shift : group.direct[i];
      if (single || !heads.empty()) (direct != 0 ? use.turned : use.copied)[input.source] = 1;
      if (single) continue;
      use.fused[input.source] = 1;
      use.any_fused = true;
      use.turned_in = use.turned_in || input.shift != 0;
      use.turned_out = use.turned_out || group.out_shift[o] != 0;
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
  const double limit = largest_stored(shape.type), turn = rotary ? 1.4142135623730951 : 1.0;
  double peak = 0;
  for (std::size_t s = 0; s < peaks.size(); ++s) {
    if (use.copied[s] != 0 && !is_finite(peaks[s])) return false;
    if (use.turned[s] != 0 && !(rotary ? peaks[s] * turn * rounding <= limit : is_finite(peaks[s])))
      return false;
    if (use.fused[s] != 0) peak = (std::max)(peak, peaks[s]);
  }
  if (!use.any_fused) return true;
  if constexpr (requires { rows.bound(peak, use.weights, 1); }) {
    const double in = peak * (use.turned_in ? turn : 1.0) * rounding;
    if (!(in <= most)) return false;
    const double fused = rows.bound(in, use.weights, static_cast<int>(shape.channels));
    return fused <= most && fused * (use.turned_out ? turn : 1.0) <= limit;
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

/// Refuses a plan whose run would write what is no number of the output's elements, with
/// `non_finite`.
///
/// Most planes pass by the peaks of their payloads, O(planes · sources). The others, and those of
/// fusers that give no `bound`, are computed here once, O(bytes) of each.
template <class Rows>
Status check_range(const PlanCore& core, const Rows& rows) {
  const std::vector<LayerShape>& layers = core.geometry->layers;
  std::vector<LayerUse> of_group(core.groups.size());
  std::vector<std::uint8_t> known(core.groups.size(), 0);
  std::size_t index = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::size_t g = core.layer_group[l];
    if (known[g] == 0 || !core.head_weights[l].empty())
      of_group[g] = layer_use(core, l, keeps_single<Rows>());
    known[g] = 1;
    for (std::size_t p = 0; p < layers[l].planes.size(); ++p, ++index) {
      std::vector<double> peaks;
      for (const PlanSource& source : core.sources)
        peaks.push_back(payload_peaks(*core.geometry, source.payload())[index]);
      const PlaneShape& shape = layers[l].planes[p];
      if (surely_fits(rows, of_group[g], peaks, shape, shape.rotary && core.layer_rope[l] >= 0))
        continue;
      KVMELD_TRY(check_plane(core, rows, l, p, index));
    }
  }
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
