#pragma once

/// Ridge regression of gains. Component kvmeld::eigen.

#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/align/projection_fit_normal.hpp>
#include <kvmeld/anchor/gain_sample.hpp>

KVMELD_NAMESPACE_BEGIN

/// The ridge with the least Σ‖Δ' − g·Δ‖² + `strength`, each layer by itself; layers without offsets
/// get gain 1. `NormalEquations::ridge` has the unit of the strength. It carries no scores yet, so
/// that nothing trusts it: measure `held_out_scores` on other samples and `make` it again.
///
/// O(samples · tokens · features²) a layer. Errors: `invalid_argument` (no samples),
/// `geometry_mismatch` (unlike layers), those of `NormalEquations`.
template <class Lazy = void>
[[nodiscard]] Result<std::shared_ptr<const GainPredictor>> fit_gain_ridge(
    std::span<const GainSample> samples, double strength, std::string model) {
  if (samples.empty())
    return detail::error(ErrorCode::invalid_argument, "gain: no samples to fit a ridge to");
  const std::size_t layers = samples[0].layers;
  constexpr std::size_t inputs = gain_feature_count + 1;
  std::vector<float> parameters(layers * inputs);
  std::vector<double> x, y;
  for (std::size_t l = 0; l < layers; ++l) {
    x.clear();
    y.clear();
    for (const GainSample& sample : samples) {
      if (sample.layers != layers)
        return detail::error(ErrorCode::geometry_mismatch, "gain: samples of ", layers, " and of ",
                             sample.layers, " layers");
      const auto features = gain_features(sample.query);
      if (!features) return features.error();
      const auto n = static_cast<std::size_t>(sample.query.tokens);
      // ‖Δ' − (1 + w·x)·Δ‖² is ‖Δ‖²·(w·x − (Δ·Δ' ÷ ‖Δ‖² − 1))² and what no w changes
      for (std::size_t t = 0; t < n; ++t) {
        const double size = std::sqrt(sample.measured[l * n + t]);
        if (size == 0) continue;
        for (std::size_t k = 0; k < gain_feature_count; ++k)
          x.push_back(size * (*features)[t * gain_feature_count + k]);
        x.push_back(size);
        y.push_back((sample.both[l * n + t] - sample.measured[l * n + t]) / size);
      }
    }
    if (y.empty()) continue;
    NormalEquations equations(static_cast<std::int32_t>(inputs), 1, false);
    KVMELD_TRY(equations.add(x, y));
    const auto map = equations.ridge(strength);
    if (!map) return map.error();
    for (std::size_t k = 0; k < inputs; ++k)
      parameters[l * inputs + k] = static_cast<float>(map->weight[k]);
  }
  return GainPredictor::make(GainKind::ridge, 0, layers, parameters, {}, std::move(model));
}

KVMELD_NAMESPACE_END
