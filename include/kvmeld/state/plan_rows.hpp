#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plan_core.hpp>

/// Whether the compiled rows of a plan are rows that its fuser can take.

KVMELD_NAMESPACE_BEGIN
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

/// Refuses rows that a fuser's row form cannot take: too many contributions to sort, too few for
/// its own check, or weights that give a fuser which divides by their sum nothing to divide by.
template <class F>
Status check_rows(const PlanCore& core, const F& fuser) {
  std::vector<std::uint8_t> done(core.groups.size(), 0);
  for (std::size_t l = 0; l < core.geometry->layers.size(); ++l) {
    const GroupArrays& group = core.groups[core.layer_group[l]];
    const bool by_head = !core.head_weights[l].empty();
    if (!by_head && done[core.layer_group[l]]++ != 0) continue;
    for (std::size_t o = 0; o + 1 < group.row_begin.size(); ++o) {
      const std::uint32_t begin = group.row_begin[o], count = group.row_begin[o + 1] - begin;
      if (count == 0 || (!by_head && count < (keeps_single<RowForm<F>>() ? 2U : 1U))) continue;
      for (std::size_t h = 0; h < (by_head ? layer_heads(core.geometry->layers[l]) : 1); ++h) {
        const HeadInputs row{
            group.inputs.data() + begin,
            by_head ? core.head_weights[l].data() + h * group.inputs.size() + begin : nullptr,
            static_cast<int>(count)};
        const bool alone = by_head && row.used_count() == 1 && row.weight(row.first_used()) > 0;
        const bool single = alone && (keeps_single<RowForm<F>>() ||
                                      row.inputs[row.first_used()].source == core.local_source);
        const Status checked =
            single ? Status() : check_row(fuser, core.geometry->layers[l].planes, row);
        if (checked) continue;
        return error(checked.code(), "output ", o, " at position ", core.positions[o],
                     by_head ? ", head " : "", by_head ? detail::decimal(h) : "", ": ",
                     checked.message());
      }
    }
  }
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
