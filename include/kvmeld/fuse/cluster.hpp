#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/fuse/medoid.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

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

  KVMELD_LAZY [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    if (k == 0 && !(threshold >= -1.0F && threshold <= 1.0F)) {
      return detail::error(ErrorCode::invalid_argument, "Cluster: a threshold of ", threshold,
                           " is no cosine");
    }
    if (k < 0 || static_cast<std::size_t>(k) > scoring.count()) {
      return detail::error(ErrorCode::invalid_argument, "Cluster{k = ", k, "} of ", scoring.count(),
                           " contributions; k is 0 to that many");
    }
    if (result > ClusterResult::centre)
      return detail::error(ErrorCode::unknown_field, "Cluster: result unknown to this build");
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
      kept[detail::medoid_of(scoring, detail::span_of(*largest), weights)] = 1.0;
    } else {
      for (const std::size_t i : *largest) kept[i] = weights[i];
    }
    std::copy(kept.begin(), kept.end(), weights.begin());
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Cluster");
    hasher.value(threshold);
    hasher.value(k);
    hasher.value(result);
  }

 private:
  KVMELD_LAZY [[nodiscard]] std::vector<std::vector<std::size_t>> by_cosine(
      const Scoring& scoring) const {
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
  KVMELD_LAZY [[nodiscard]] std::vector<std::vector<std::size_t>> by_number(
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
        next.push_back(detail::medoid_of(scoring, detail::span_of(cluster), mass));
      if (next == medoids) break;
      medoids = std::move(next);
    }
    return clusters;
  }
};

KVMELD_NAMESPACE_END
