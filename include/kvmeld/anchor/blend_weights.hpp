#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// ‖a − b‖₂ in f64, channels ascending; NaN where the lengths differ or an element is not finite.
[[nodiscard]] inline double l2_distance(std::span<const float> a,
                                        std::span<const float> b) noexcept {
  if (a.size() != b.size()) return __builtin_nan("");
  double sum = 0;
  for (std::size_t c = 0; c < a.size(); ++c) {
    const double x = static_cast<double>(a[c]) - static_cast<double>(b[c]);
    sum = fma(x, x, sum);
  }
  return std::isfinite(sum) ? math::sqrt(sum) : __builtin_nan("");
}

/// softmax(−d / temperature), in the order of the distances, f64.
///
/// The nearest has e^0, so the sum never underflows; weights far behind it may be 0. Temperature 0
/// is the limit: the nearest, in equal parts where several are. Distances are finite and at least
/// 0, temperature finite and at least 0. O(n).
[[nodiscard]] inline std::vector<double> softmax_weights(std::span<const double> distances,
                                                         double temperature) {
  std::vector<double> weights(distances.size());
  if (weights.empty()) return weights;
  const double nearest = *std::min_element(distances.begin(), distances.end());
  double total = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double behind = distances[i] - nearest;
    weights[i] = behind == 0 ? 1.0 : temperature == 0 ? 0.0 : math::exp(-(behind / temperature));
    total += weights[i];
  }
  for (double& w : weights) w /= total;
  return weights;
}

/// −Σ w ln w, in nats; 0 ln 0 = 0.
[[nodiscard]] inline double entropy(std::span<const double> weights) noexcept {
  double sum = 0;
  for (const double w : weights) {
    if (w > 0) sum = fma(-w, math::log(w), sum);
  }
  return sum > 0 ? sum : 0.0;
}

/// Indices of the fewest weights that hold at least `mass` of all, heaviest first, of equals the
/// earlier one.
[[nodiscard]] inline std::vector<std::uint32_t> nucleus(std::span<const double> weights,
                                                        double mass) {
  std::vector<std::uint32_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::uint32_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return weights[a] > weights[b]; });
  double held = 0;
  std::size_t kept = 0;
  while (kept < order.size() && (kept == 0 || held < mass) && weights[order[kept]] > 0)
    held += weights[order[kept++]];
  order.resize(kept);
  return order;
}

/// Weights of every token by distances of its own, (anchor, token): each token's are softmax(−d /
/// temperature) over the anchors.
[[nodiscard]] inline std::vector<float> token_weights(std::span<const double> distances,
                                                      std::size_t anchors, double temperature) {
  std::vector<float> out(distances.size());
  const std::size_t tokens = anchors == 0 ? 0 : distances.size() / anchors;
  std::vector<double> column(anchors);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t a = 0; a < anchors; ++a) column[a] = distances[a * tokens + t];
    const std::vector<double> weights = softmax_weights(column, temperature);
    for (std::size_t a = 0; a < anchors; ++a) out[a * tokens + t] = static_cast<float>(weights[a]);
  }
  return out;
}

KVMELD_NAMESPACE_END
