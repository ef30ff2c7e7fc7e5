#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/state/plan_core.hpp>

/// What the engine has to compute.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Which outputs the engine has to compute, and from which output on each layer's rows are read
/// (`layer_needed_from`).
///
/// A window of w needs no row for tokens that no query sees; queries are what comes after the last
/// output, and the holes themselves, so a hole can ask for earlier rows whose absence makes further
/// holes: repeated until nothing changes.
KVMELD_LAZY std::vector<std::uint8_t> find_holes(PlanCore& core,
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
KVMELD_NAMESPACE_END
