#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Krum's score of each of the `present` contributions: the sum of squared distances to its
/// `neighbours` nearest others.
KVMELD_LAZY void krum_scores(const Scoring& scoring, std::span<const std::size_t> present,
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
KVMELD_LAZY void keep_smallest(std::span<const double> scores, std::size_t kept,
                               std::span<double> weights) {
  std::vector<std::size_t> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return scores[a] != scores[b] ? scores[a] < scores[b] : a < b;
  });
  std::fill(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i < kept; ++i) weights[order[i]] = 1.0;
}

KVMELD_LAZY void select_krum(const Scoring& scoring, std::int64_t f, std::size_t kept,
                             std::span<double> weights) {
  const std::size_t n = scoring.count();
  std::vector<std::size_t> everyone(n);
  for (std::size_t i = 0; i < n; ++i) everyone[i] = i;
  std::vector<double> scores(n);
  krum_scores(scoring, span_of(everyone), n - static_cast<std::size_t>(f) - 2, span_of(scores));
  keep_smallest(span_of(scores), kept, weights);
}

KVMELD_LAZY [[nodiscard]] Status check_krum(const char* rule, std::int64_t f, std::int64_t n,
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

  KVMELD_LAZY [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    KVMELD_TRY(detail::check_krum("Krum", f, static_cast<std::int64_t>(scoring.count()), 2));
    detail::select_krum(scoring, f, 1, weights);
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
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

  KVMELD_LAZY [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    const auto n = static_cast<std::int64_t>(scoring.count());
    KVMELD_TRY(detail::check_krum("MultiKrum", f, n, 2));
    if (m < 1 || m > n - f) {
      return detail::error(ErrorCode::invalid_argument, "MultiKrum{m = ", m,
                           "} keeps 1 to n - f contributions, of ", n, " at most ", n - f);
    }
    detail::select_krum(scoring, f, static_cast<std::size_t>(m), weights);
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
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

  KVMELD_LAZY [[nodiscard]] Status score(const Scoring& scoring, std::span<double> weights) const {
    const auto n = static_cast<std::int64_t>(scoring.count());
    KVMELD_TRY(detail::check_krum("Bulyan", f, n, 4));
    if (n - 2 * std::int64_t{f} > detail::max_selected) {  // before the rounds, which cost n³
      return detail::error(ErrorCode::oversized, "Bulyan{f = ", f, "} would choose ",
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
      detail::krum_scores(scoring, detail::span_of(left), static_cast<std::size_t>(neighbours),
                          detail::span_of(scores));
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
  KVMELD_LAZY [[nodiscard]] Status check(std::int64_t contributions) const {
    if (contributions > 2 * std::int64_t{f}) return {};
    return detail::error(ErrorCode::invalid_argument, "Bulyan{f = ", f, "}: a layer holds only ",
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
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Bulyan");
    hasher.value(f);
  }
};

KVMELD_NAMESPACE_END
