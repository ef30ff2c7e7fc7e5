#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <kvmeld/align/select_keys.hpp>

KVMELD_NAMESPACE_BEGIN

/// Keeps the `budget` tokens of each fragment whose keys stand best for all of them: k-medoids of
/// keys without position.
///
/// Squared Euclidean distances over all heads of one layer, keys turned back to position 0, f64.
/// Starts with the fragment's medoid and then the token farthest from those chosen (Gonzalez 1985);
/// each of at most `iterations` rounds gives every token to its nearest medoid and takes the new
/// medoid of each group (Voronoi iteration, Park & Jun 2009; for squared distances the medoid is
/// the member nearest to the mean). Ties go to the earlier token. Tokens that the layer does not
/// hold are not kept. O(iterations · tokens · budget · channels). Errors: `invalid_argument`
/// (budget or iterations negative, a layer that is not there), those of `inverse_frequencies`.
struct SelectMedoids {
  static constexpr bool reproducible = true;
  std::int64_t budget = 64;     ///< tokens kept of each fragment, at most
  std::int32_t layer = -1;      ///< whose keys are read; −1: ⌊layers / 2⌋
  std::int32_t iterations = 8;  ///< rounds at most; it ends earlier where nothing moves

  [[nodiscard]] Result<TokenSet> select(const Source& source) const {
    const auto all = detail::keeps_all("SelectMedoids", budget, source.fragment->token_count());
    if (!all) return all.error();
    if (iterations < 0)
      return detail::error(ErrorCode::invalid_argument, "SelectMedoids: ", iterations,
                           " iterations is negative");
    if (*all) return TokenSet{};
    auto keys = detail::layer_keys(source, layer, true);
    if (!keys) return keys.error();
    TokenSet set{.all = false};
    const std::size_t n = keys->tokens.size();
    const std::size_t k = (std::min)(static_cast<std::size_t>(budget), n);
    if (k == n) {
      set.present = keys->tokens;
      return set;
    }
    if (k == 0) return set;
    for (const std::size_t m : medoids(*keys, k)) set.present.push_back(keys->tokens[m]);
    return set;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SelectMedoids");
    hasher.value(budget);
    hasher.value(layer);
    hasher.value(iterations);
  }

 private:
  /// The member nearest to the members' mean: of squared distances, the medoid.
  [[nodiscard]] static std::size_t medoid(const detail::LayerKeys& keys,
                                          const std::vector<std::size_t>& members) {
    std::vector<double> mean(keys.width(), 0.0);
    for (const std::size_t i : members) {
      for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += keys.row(i)[c];
    }
    for (double& m : mean) m /= static_cast<double>(members.size());
    const auto distance = detail::distance_measure();
    std::size_t best = members[0];
    double least = INFINITY;
    for (const std::size_t i : members) {
      const double d = distance(keys.row(i), mean.data(), mean.size());
      if (d < least) {
        least = d;
        best = i;
      }
    }
    return best;
  }

  /// Ascending indices of k of the keys' rows, 0 < k < rows.
  [[nodiscard]] std::vector<std::size_t> medoids(const detail::LayerKeys& keys,
                                                 std::size_t k) const {
    const std::size_t n = keys.tokens.size();
    const auto distance = detail::distance_measure();
    std::vector<std::size_t> everyone_in(n);
    for (std::size_t i = 0; i < n; ++i) everyone_in[i] = i;
    std::vector<std::size_t> chosen{medoid(keys, everyone_in)};
    std::vector<double> nearest(n, INFINITY);
    std::vector<std::uint8_t> is_chosen(n, 0);
    is_chosen[chosen[0]] = 1;
    while (chosen.size() < k) {
      std::size_t farthest = n;
      for (std::size_t i = 0; i < n; ++i) {
        nearest[i] =
            (std::min)(nearest[i], distance(keys.row(i), keys.row(chosen.back()), keys.width()));
        if (is_chosen[i] == 0 && (farthest == n || nearest[i] > nearest[farthest])) farthest = i;
      }
      chosen.push_back(farthest);
      is_chosen[farthest] = 1;
    }
    std::sort(chosen.begin(), chosen.end());
    for (std::int32_t round = 0; round < iterations; ++round) {
      std::vector<std::size_t> next;
      for (const std::vector<std::size_t>& group : groups(keys, chosen))
        next.push_back(medoid(keys, group));
      std::sort(next.begin(), next.end());
      if (next == chosen) break;
      chosen = std::move(next);
    }
    return chosen;
  }

  /// Every token with its nearest medoid; a medoid with itself, so that no group is empty and no
  /// token leads two.
  [[nodiscard]] static std::vector<std::vector<std::size_t>> groups(
      const detail::LayerKeys& keys, const std::vector<std::size_t>& chosen) {
    const auto distance = detail::distance_measure();
    std::vector<std::vector<std::size_t>> out(chosen.size());
    for (std::size_t i = 0; i < keys.tokens.size(); ++i) {
      const auto own = std::lower_bound(chosen.begin(), chosen.end(), i);
      std::size_t at = static_cast<std::size_t>(own - chosen.begin());
      if (own == chosen.end() || *own != i) {
        double least = INFINITY;
        for (std::size_t m = 0; m < chosen.size(); ++m) {
          const double d = distance(keys.row(i), keys.row(chosen[m]), keys.width());
          if (d < least) {
            least = d;
            at = m;
          }
        }
      }
      out[at].push_back(i);
    }
    return out;
  }
};

KVMELD_NAMESPACE_END
