#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/anchor/anchor_table.hpp>
#include <kvmeld/anchor/blend_weights.hpp>
#include <kvmeld/config.hpp>

/// A `ReuseRule::temperature` in the unit of the distances that a pool really has.

KVMELD_NAMESPACE_BEGIN

/// L2 distances between the vectors of the first `most` anchors, each pair once: how far apart
/// segments lie that are not each other.
///
/// Pairs whose distance is not a number (vectors of different length) are left out. O(most² ·
/// channels).
KVMELD_LAZY [[nodiscard]] std::vector<double> anchor_distances(const AnchorTable& table,
                                                               std::size_t most = 64) {
  std::vector<double> out;
  const std::size_t count = (std::min)(table.size(), most);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const double distance = l2_distance(table.anchor(i)->vector, table.anchor(j)->vector);
      if (std::isfinite(distance)) out.push_back(distance);
    }
  }
  return out;
}

/// The temperature at which the entropy rule tells like from unlike: one anchor at `like` times the
/// median of `unlike`, among `anchors` in all whose others lie at the median, has H(w) = γ log |A|
/// exactly. What stands out more is reused, what stands out less is `uncertain`.
///
/// At temperature 1, distances that differ by tenths give nearly equal weights, and γ = .3 asks for
/// new anchors for ever; distances of hundreds give all weight to one. Between them stands the
/// spread of the distances themselves: measure it on a warm pool (`anchor_distances`), or on any
/// segments that differ as those of the load do. 1, the default of the rule, where nothing was
/// measured or all distances are 0; 0 (the nearest alone) at γ = 0; and as for γ .99 above it,
/// where the rule hardly asks.
/// @param like in [0, 1): how near, in medians, an anchor must be for its offset to be worth taking
/// alone.
KVMELD_LAZY [[nodiscard]] double spread_temperature(std::span<const double> unlike,
                                                    double gamma = 0.3, std::size_t anchors = 5,
                                                    double like = 0.5) {
  std::vector<double> sorted;
  for (const double d : unlike) {
    if (std::isfinite(d) && d > 0) sorted.push_back(d);
  }
  if (sorted.empty() || !(like >= 0) || !(like < 1) || !(gamma >= 0)) return 1.0;
  const auto middle = sorted.begin() + std::ssize(sorted) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  if (gamma == 0) return 0.0;
  const auto n = static_cast<double>((std::max)(anchors, std::size_t{2}));
  const double wanted = (std::min)(gamma, 0.99) * math::log(n);
  // H falls as the others fall behind: `behind` is how far, in temperatures.
  double least = 0, most = 700;
  for (int step = 0; step < 60; ++step) {
    const double behind = (least + most) / 2;
    const double all = fma(n - 1, math::exp(-behind), 1.0), others = all - 1;
    const double h = fma(others / all, behind, math::log(all));
    (h > wanted ? least : most) = behind;
  }
  return (1 - like) * *middle / most;
}

KVMELD_NAMESPACE_END
