#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Σ_j m_j √D_ji for every i. Compiled for FMA too, since each `fma` is a call without it.
KVMELD_ALWAYS_INLINE void distance_sums_body(const double* distances, const double* mass,
                                             std::size_t n, double* sums) noexcept {
  for (std::size_t j = 0; j < n; ++j) {
    if (mass[j] == 0) continue;
    for (std::size_t i = 0; i < n; ++i)
      sums[i] = fma(mass[j], math::sqrt(distances[j * n + i]), sums[i]);
  }
}
KVMELD_NOINLINE inline void distance_sums_baseline(const double* distances, const double* mass,
                                                   std::size_t n, double* sums) noexcept {
  distance_sums_body(distances, mass, n, sums);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void distance_sums_avx2(const double* distances,
                                                                  const double* mass, std::size_t n,
                                                                  double* sums) noexcept {
  distance_sums_body(distances, mass, n, sums);
}

/// The member with the smallest weighted sum of distances (not squared) to the members, ties to the
/// smaller index.
KVMELD_LAZY [[nodiscard]] std::size_t medoid_of(const Scoring& scoring,
                                                std::span<const std::size_t> members,
                                                std::span<const double> mass) {
  const std::size_t n = scoring.count();
  std::vector<double> both(2 * n, 0.0);  // masses of the members, then sums
  for (const std::size_t i : members) both[i] = mass[i];
  (best_isa() == Isa::baseline ? distance_sums_baseline : distance_sums_avx2)(
      scoring.distances.data(), both.data(), n, both.data() + n);
  std::size_t best = members[0];
  for (const std::size_t i : members) {
    if (both[n + i] < both[n + best]) best = i;
  }
  return best;
}

/// Numbers that Weiszfeld's iteration works on at once. What lies beyond the contributions has mass
/// 0, weight 0 and distances 0, which add nothing to any sum.
inline constexpr std::size_t weiszfeld_block = 8;

/// Weiszfeld's iteration on weights. distances: (n, padded); mass, weights, to: (padded)
KVMELD_ALWAYS_INLINE void weiszfeld_body(const double* __restrict distances,
                                         const double* __restrict mass, std::size_t n,
                                         std::size_t padded, int steps, double smoothing,
                                         double* __restrict to,
                                         double* __restrict weights) noexcept {
  const auto normalise = [&] {
    double total = 0;
    for (std::size_t j = 0; j < n; ++j) total += weights[j];
    for (std::size_t b = 0; b < padded; b += weiszfeld_block) {
      for (std::size_t j = b; j < b + weiszfeld_block; ++j) weights[j] /= total;
    }
  };
  normalise();
  for (int step = 0; step < steps; ++step) {
    for (std::size_t b = 0; b < padded; b += weiszfeld_block) {
      double sum[weiszfeld_block] = {};
      for (std::size_t i = 0; i < n; ++i) {
        KVMELD_KEEP_LOOP
        for (std::size_t j = 0; j < weiszfeld_block; ++j)
          sum[j] = fma(weights[i], distances[i * padded + b + j], sum[j]);
      }
      for (std::size_t j = 0; j < weiszfeld_block; ++j) to[b + j] = sum[j];
    }
    double within = 0;
    for (std::size_t j = 0; j < n; ++j) within = fma(weights[j], to[j], within);
    for (std::size_t b = 0; b < padded; b += weiszfeld_block) {
      KVMELD_KEEP_LOOP
      for (std::size_t j = b; j < b + weiszfeld_block; ++j) {
        const double square = to[j] - within / 2;
        weights[j] = mass[j] / math::sqrt((square > 0 ? square : 0.0) + smoothing);
      }
    }
    normalise();
  }
}
KVMELD_NOINLINE inline void weiszfeld_baseline(const double* distances, const double* mass,
                                               std::size_t n, std::size_t padded, int steps,
                                               double smoothing, double* to,
                                               double* weights) noexcept {
  weiszfeld_body(distances, mass, n, padded, steps, smoothing, to, weights);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void weiszfeld_avx2(const double* distances,
                                                              const double* mass, std::size_t n,
                                                              std::size_t padded, int steps,
                                                              double smoothing, double* to,
                                                              double* weights) noexcept {
  weiszfeld_body(distances, mass, n, padded, steps, smoothing, to, weights);
}

}  // namespace detail

/// Keeps, for each token, the contribution that is nearest to all: K and V of all layers are one
/// agent's.
///
/// The smallest sum of distances, weighted by the aligner's weights; equal sums keep the smaller
/// fragment id. Holds while the liars weigh less than half. No number of liars need be named. O(n²
/// · channels) a token. (Kaufman & Rousseeuw, Clustering by means of medoids, 1987.)
struct Medoid {
  static constexpr bool reproducible = true;

  KVMELD_LAZY [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    std::vector<std::size_t> all(scoring.count());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    const std::size_t best = detail::medoid_of(scoring, detail::span_of(all), weights);
    std::fill(weights.begin(), weights.end(), 0.0);
    weights[best] = 1.0;
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.Medoid"); }
};

/// The point with the smallest sum of distances to all contributions, weighted by the aligner's
/// weights: a mean whose weights, one for each token, K and V of all layers share.
///
/// 32 steps of Weiszfeld's iteration on the weights alone: w_j ∝ m_j / √(d_j² + ε²), d_j² = Σ w_i
/// D_ji − ½ Σ w_i w_k D_ik, so that no row is read twice; ε² is 10^-12 of the smallest distance
/// between different contributions. It starts beside the medoid, since from the mean of near and
/// far points it would take hundreds of steps. Holds while the liars weigh less than half. O(n² ·
/// channels) for distances, O(32 n²) a token. (Weiszfeld 1937; smoothed as by Pillutla et al.,
/// Robust Aggregation for Federated Learning, 2022.)
struct GeometricMedian {
  static constexpr bool reproducible = true;
  static constexpr int steps = 32;

  KVMELD_LAZY [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    const std::size_t n = scoring.count();
    double smallest = INFINITY;
    for (const double d : scoring.distances) {
      if (d > 0 && d < smallest) smallest = d;
    }
    if (smallest == INFINITY) return {};  // all alike: any weights do
    const std::vector<double> mass(weights.begin(), weights.end());
    std::vector<std::size_t> all(n);
    for (std::size_t i = 0; i < n; ++i) all[i] = i;
    const std::size_t medoid =
        detail::medoid_of(scoring, detail::span_of(all), detail::span_of(mass));
    double nearest = INFINITY;
    for (std::size_t j = 0; j < n; ++j)
      nearest = scoring.distance(medoid, j) > 0 ? (std::min)(nearest, scoring.distance(medoid, j))
                                                : nearest;
    for (std::size_t j = 0; j < n; ++j)
      weights[j] =
          mass[j] / math::sqrt((std::max)(scoring.distance(medoid, j), (std::min)(nearest, 1e300)));
    const std::size_t padded =
        (n + detail::weiszfeld_block - 1) / detail::weiszfeld_block * detail::weiszfeld_block;
    // distances, then masses, weights, and the iteration's own
    std::vector<double> both((n + 3) * padded, 0.0);
    double* const masses = both.data() + n * padded;
    for (std::size_t i = 0; i < n; ++i)
      std::copy_n(scoring.distances.data() + i * n, n, both.data() + i * padded);
    std::copy_n(mass.data(), n, masses);
    std::copy_n(weights.data(), n, masses + padded);
    (best_isa() == Isa::baseline ? detail::weiszfeld_baseline : detail::weiszfeld_avx2)(
        both.data(), masses, n, padded, steps, smallest / 1e12, masses + 2 * padded,
        masses + padded);
    std::copy_n(masses + padded, n, weights.data());
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.GeometricMedian");
    hasher.value(steps);
  }
};

KVMELD_NAMESPACE_END
