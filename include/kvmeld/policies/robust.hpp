#pragma once

/// Robust fusers: Krum, Bulyan, medoid, cluster, median and trimmed mean.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Krum's score of each of the `present` contributions: the sum of squared distances to its
/// `neighbours` nearest others.
inline void krum_scores(const Scoring& scoring, std::span<const std::size_t> present,
                        std::size_t neighbours, std::span<double> scores) {
  std::vector<double> distances;
  for (std::size_t i = 0; i < present.size(); ++i) {
    distances.clear();
    for (const std::size_t j : present) {
      if (j != present[i]) distances.push_back(scoring.distance(present[i], j));
    }
    std::sort(distances.begin(), distances.end());
    scores[i] = 0;
    for (std::size_t k = 0; k < (std::min)(neighbours, distances.size()); ++k)
      scores[i] += distances[k];
  }
}

/// Keeps the `kept` contributions of the smallest scores, ties to the smaller index.
inline void keep_smallest(std::span<const double> scores, std::size_t kept,
                          std::span<double> weights) {
  std::vector<std::size_t> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return scores[a] != scores[b] ? scores[a] < scores[b] : a < b;
  });
  std::fill(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i < kept; ++i) weights[order[i]] = 1.0;
}

inline void select_krum(const Scoring& scoring, std::int64_t f, std::size_t kept,
                        std::span<double> weights) {
  const std::size_t n = scoring.count();
  std::vector<std::size_t> everyone(n);
  for (std::size_t i = 0; i < n; ++i) everyone[i] = i;
  std::vector<double> scores(n);
  krum_scores(scoring, span_of(everyone), n - static_cast<std::size_t>(f) - 2, span_of(scores));
  keep_smallest(span_of(scores), kept, weights);
}

[[nodiscard]] inline Status check_krum(const char* rule, std::int64_t f, std::int64_t n,
                                       std::int64_t factor) {
  if (f >= 0 && n >= factor * f + 3) return {};
  return error(ErrorCode::invalid_argument, rule, "{f = ", f, "} needs at least ", factor,
               "f + 3 = ", factor * f + 3, " contributions, there are ", n);
}

}  // namespace detail

/// Keeps, for each token, the contribution whose n − f − 2 nearest others are nearest: K and V of
/// all layers are one agent's.
///
/// Holds while at most f contributions lie, n ≥ 2f + 3; every token with two contributions or more
/// must have so many. Distances are squared; the aligner's weights play no part. O(n² · channels)
/// for distances, O(n² log n) a token. (Blanchard et al., Machine Learning with Adversaries, 2017.)
/// Errors: `invalid_argument` for f below 0, or n < 2f + 3.
struct Krum {
  static constexpr bool reproducible = true;
  std::int32_t f = 1;  ///< contributions that may lie

  [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    KVMELD_TRY(detail::check_krum("Krum", f, static_cast<std::int64_t>(scoring.count()), 2));
    detail::select_krum(scoring, f, 1, weights);
    return {};
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Krum");
    hasher.value(f);
  }
};

/// The mean of the `m` contributions with the smallest Krum scores: less noise than one, as robust
/// while m ≤ n − f.
///
/// Errors: `invalid_argument` for f below 0, n < 2f + 3, or m outside [1, n − f]. Cost and source
/// as `Krum`.
struct MultiKrum {
  static constexpr bool reproducible = true;
  std::int32_t f = 1;  ///< contributions that may lie
  std::int32_t m = 2;  ///< contributions kept

  [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    const auto n = static_cast<std::int64_t>(scoring.count());
    KVMELD_TRY(detail::check_krum("MultiKrum", f, n, 2));
    if (m < 1 || m > n - f) {
      return extend::error(ErrorCode::invalid_argument, "MultiKrum{m = ", m,
                           "} keeps 1 to n - f contributions, of ", n, " at most ", n - f);
    }
    detail::select_krum(scoring, f, static_cast<std::size_t>(m), weights);
    return {};
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.MultiKrum");
    hasher.value(f);
    hasher.value(m);
  }
};

/// Chooses n − 2f contributions by repeated Krum, then takes of each channel the mean of the n − 4f
/// values nearest to the median.
///
/// Each round keeps the contribution with the smallest Krum score among those left (m left: m − f −
/// 2 neighbours, at least 1). Holds while at most f contributions lie, n ≥ 4f + 3, also against
/// lies in few channels, which Krum's distances hardly see. Keys are compared un-rotated. O(n² ·
/// channels) for distances, O(n³ log n) a token, then as `TrimmedMean`. (El Mhamdi et al., The
/// Hidden Vulnerability of Distributed Learning in Byzantium, 2018.) Errors: `invalid_argument` for
/// f below 0, or n < 4f + 3; `oversized` where more than `max_selected` would be chosen, n > 2f +
/// 64.
struct Bulyan {
  static constexpr bool reproducible = true;
  static constexpr bool keeps_single = true;
  std::int32_t f = 1;  ///< contributions that may lie

  [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    const auto n = static_cast<std::int64_t>(scoring.count());
    KVMELD_TRY(detail::check_krum("Bulyan", f, n, 4));
    if (n - 2 * std::int64_t{f} > detail::max_selected) {  // before the rounds, which cost n³
      return extend::error(ErrorCode::oversized, "Bulyan{f = ", f, "} would choose ",
                           n - 2 * std::int64_t{f}, " of ", n, " contributions and sorts at most ",
                           detail::max_selected,
                           ": fuse fewer fragments, or use Krum or MultiKrum");
    }
    std::vector<std::size_t> left(scoring.count());
    for (std::size_t i = 0; i < left.size(); ++i) left[i] = i;
    std::vector<double> scores(left.size());
    std::fill(weights.begin(), weights.end(), 0.0);
    for (std::int64_t kept = 0; kept < n - 2 * std::int64_t{f}; ++kept) {
      const auto neighbours = (std::max)(n - kept - f - 2, std::int64_t{1});
      detail::krum_scores(scoring, extend::span_of(left), static_cast<std::size_t>(neighbours),
                          extend::span_of(scores));
      const auto best =
          std::min_element(scores.begin(),
                           scores.begin() + static_cast<std::ptrdiff_t>(left.size())) -
          scores.begin();
      weights[left[static_cast<std::size_t>(best)]] = 1.0;
      left.erase(left.begin() + best);
    }
    return {};
  }
  /// Rows of layers that lack a token in some fragments get fewer values than were chosen.
  [[nodiscard]] Status check(std::int64_t contributions) const {
    if (contributions > 2 * std::int64_t{f}) return {};
    return extend::error(ErrorCode::invalid_argument, "Bulyan{f = ", f, "}: a layer holds only ",
                         contributions, " of the chosen contributions, and needs ",
                         2 * std::int64_t{f} + 1);
  }
  [[nodiscard]] KVMELD_HD float select(OrderedValues values) const noexcept {
    const int n = values.size();
    const int nearest = n - 2 * f;
    const float median = mean_of(values, {(n - 1) / 2, n / 2 + 1});
    // Values nearest to the median are neighbours in order; equally near ones are the smaller.
    int begin = 0;
    while (begin + nearest < n && values[begin + nearest] - median < median - values[begin])
      ++begin;
    return mean_of(values, {begin, begin + nearest});
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Bulyan");
    hasher.value(f);
  }
};

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
[[nodiscard]] inline std::size_t medoid_of(const Scoring& scoring,
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
/// fragment id. Holds while the Byzantine peers weigh less than half. No number of Byzantine peers
/// need be named. O(n² · channels) a token. (Kaufman & Rousseeuw, Clustering by means of medoids,
/// 1987.)
struct Medoid {
  static constexpr bool reproducible = true;

  [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    std::vector<std::size_t> all(scoring.count());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    const std::size_t best = detail::medoid_of(scoring, extend::span_of(all), weights);
    std::fill(weights.begin(), weights.end(), 0.0);
    weights[best] = 1.0;
    return {};
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.Medoid"); }
};

/// The point with the smallest sum of distances to all contributions, weighted by the aligner's
/// weights: a mean whose weights, one for each token, K and V of all layers share.
///
/// 32 steps of Weiszfeld's iteration on the weights alone: w_j ∝ m_j / √(d_j² + ε²), d_j² = Σ w_i
/// D_ji − ½ Σ w_i w_k D_ik, so that no row is read twice; ε² is 10^-12 of the smallest distance
/// between different contributions. It starts beside the medoid, since from the mean of near and
/// far points it would take hundreds of steps. Holds while the Byzantine peers weigh less than
/// half. O(n² · channels) for distances, O(32 n²) a token. (Weiszfeld 1937; smoothed as by Pillutla
/// et al., Robust Aggregation for Federated Learning, 2022.)
struct GeometricMedian {
  static constexpr bool reproducible = true;
  static constexpr int steps = 32;

  [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
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
        detail::medoid_of(scoring, extend::span_of(all), extend::span_of(mass));
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
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.GeometricMedian");
    hasher.value(steps);
  }
};

/// What stands for the cluster that most contributions belong to.
enum class ClusterResult : std::uint8_t {
  medoid,  ///< its most central contribution, byte by byte
  centre,  ///< the mean of its contributions, by the aligner's weights
};

/// Groups the contributions of each token, and takes what most of them say: K and V of all layers
/// come from the largest cluster.
///
/// By cosine (k = 0): in ascending order of fragment id, each contribution joins the first cluster
/// whose founder's keys have a cosine of at least `threshold` with its own, or founds one. By
/// number (k > 0): k-medoids over distances, seeded by the first fragment and then by the farthest
/// from those chosen (Gonzalez 1985), at most 8 rounds of Voronoi iteration (Park & Jun 2009). Of
/// equally large clusters the one with the smaller fragment id counts. O(n² · channels) for
/// distances, O(n²) a round. Errors: `invalid_argument` for a threshold outside [−1, 1], k below 0
/// or above the number of contributions.
struct Cluster {
  static constexpr bool reproducible = true;
  static constexpr bool reads_norms = true;
  float threshold = 0.85F;
  std::int32_t k = 0;
  ClusterResult result = ClusterResult::medoid;

  [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    if (k == 0 && !(threshold >= -1.0F && threshold <= 1.0F)) {
      return extend::error(ErrorCode::invalid_argument, "Cluster: a threshold of ", threshold,
                           " is no cosine");
    }
    if (k < 0 || static_cast<std::size_t>(k) > scoring.count()) {
      return extend::error(ErrorCode::invalid_argument, "Cluster{k = ", k, "} of ", scoring.count(),
                           " contributions; k is 0 to that many");
    }
    if (result > ClusterResult::centre)
      return extend::error(ErrorCode::unknown_field, "Cluster: result unknown to this build");
    const std::vector<std::vector<std::size_t>> clusters =
        k > 0 ? by_number(scoring, weights) : by_cosine(scoring);
    const std::vector<std::size_t>* largest = &clusters[0];
    for (const auto& cluster : clusters) {
      if (cluster.size() > largest->size() ||
          (cluster.size() == largest->size() && cluster[0] < (*largest)[0]))
        largest = &cluster;
    }
    std::vector<double> kept(weights.size(), 0.0);
    if (result == ClusterResult::medoid) {
      kept[detail::medoid_of(scoring, extend::span_of(*largest), weights)] = 1.0;
    } else {
      for (const std::size_t i : *largest) kept[i] = weights[i];
    }
    std::copy(kept.begin(), kept.end(), weights.begin());
    return {};
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Cluster");
    hasher.value(threshold);
    hasher.value(k);
    hasher.value(result);
  }

 private:
  [[nodiscard]] std::vector<std::vector<std::size_t>> by_cosine(const Scoring& scoring) const {
    std::vector<std::vector<std::size_t>> clusters;
    for (std::size_t i = 0; i < scoring.count(); ++i) {
      const auto fits = [&](const auto& cluster) {
        return scoring.distance(i, cluster[0]) == 0 ||
               scoring.cosine(i, cluster[0]) >= static_cast<double>(threshold);
      };
      const auto at = std::find_if(clusters.begin(), clusters.end(), fits);
      if (at != clusters.end()) {
        at->push_back(i);
      } else {
        clusters.push_back({i});
      }
    }
    return clusters;
  }
  [[nodiscard]] std::vector<std::vector<std::size_t>> by_number(
      const Scoring& scoring, std::span<const double> mass) const {
    std::vector<std::size_t> medoids{0};
    while (medoids.size() < static_cast<std::size_t>(k)) {
      std::size_t farthest = 0;
      double most = -1;
      for (std::size_t i = 0; i < scoring.count(); ++i) {
        if (std::find(medoids.begin(), medoids.end(), i) != medoids.end()) continue;
        double nearest = INFINITY;
        for (const std::size_t m : medoids) nearest = (std::min)(nearest, scoring.distance(i, m));
        if (nearest > most) {
          most = nearest;
          farthest = i;
        }
      }
      medoids.push_back(farthest);
    }
    std::vector<std::vector<std::size_t>> clusters;
    for (int round = 0; round < 8; ++round) {
      clusters.assign(medoids.size(), {});
      for (std::size_t i = 0; i < scoring.count(); ++i) {
        std::size_t at = static_cast<std::size_t>(std::find(medoids.begin(), medoids.end(), i) -
                                                  medoids.begin());
        if (at == medoids.size()) {  // a medoid is of its own cluster, so that none is empty
          at = 0;
          for (std::size_t m = 1; m < medoids.size(); ++m) {
            if (scoring.distance(i, medoids[m]) < scoring.distance(i, medoids[at])) at = m;
          }
        }
        clusters[at].push_back(i);
      }
      std::vector<std::size_t> next;
      for (const auto& cluster : clusters)
        next.push_back(detail::medoid_of(scoring, extend::span_of(cluster), mass));
      if (next == medoids) break;
      medoids = std::move(next);
    }
    return clusters;
  }
};

/// The middle value of each channel, of an even number the mean of the two middle ones.
///
/// Holds while fewer than half of the contributions lie: at most ⌈n/2⌉ − 1 of n. A channel's result
/// comes from one agent, a row's from several, so the row need not be one that any model wrote.
/// Keys are compared un-rotated. Weights play no part. O(n log² n) a channel, n ≤ 64. (Yin et al.,
/// Byzantine-Robust Distributed Learning, 2018.)
struct Median {
  static constexpr bool reproducible = true;
  static constexpr bool keeps_single = true;

  [[nodiscard]] KVMELD_HD Ranks ranks(int count) const noexcept {
    return {(count - 1) / 2, count / 2 + 1};
  }
  [[nodiscard]] KVMELD_HD float select(OrderedValues values) const noexcept {
    return mean_of(values, ranks(values.size()));
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.Median"); }
};

/// The mean of each channel without its `f` smallest and `f` largest values.
///
/// Holds while at most f contributions lie, n > 2f; every row with two contributions or more must
/// have so many. Keys are compared un-rotated. Weights play no part. O(n log² n) a channel, n ≤ 64.
/// (Yin et al. 2018.) Errors: `invalid_argument` for f below 0, or n ≤ 2f.
struct TrimmedMean {
  static constexpr bool reproducible = true;
  static constexpr bool keeps_single = true;
  std::int32_t f = 1;  ///< values dropped at each end

  [[nodiscard]] Status check(std::int64_t contributions) const {
    if (f >= 0 && contributions > 2 * std::int64_t{f}) return {};
    return extend::error(ErrorCode::invalid_argument, "TrimmedMean{f = ", f, "} needs more than ",
                         2 * std::int64_t{f}, " contributions, there are ", contributions);
  }
  [[nodiscard]] KVMELD_HD Ranks ranks(int count) const noexcept { return {f, count - f}; }
  [[nodiscard]] KVMELD_HD float select(OrderedValues values) const noexcept {
    return mean_of(values, ranks(values.size()));
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.TrimmedMean");
    hasher.value(f);
  }
};

KVMELD_NAMESPACE_END
