#pragma once

/// Selection policies: which tokens of a fragment take part in a merge.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/select_keys.hpp>
#include <kvmeld/policy.hpp>

KVMELD_NAMESPACE_BEGIN

/// Keeps every token of every fragment.
struct SelectAll {
  static constexpr bool reproducible = true;

  [[nodiscard]] Result<TokenSet> select(const Source&) const { return TokenSet{}; }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.SelectAll"); }
};

/// Keeps the last `tokens` tokens of every fragment: a window over each agent's own text.
struct SelectLast {
  static constexpr bool reproducible = true;
  std::int64_t tokens = 256;  ///< at most this many a fragment

  [[nodiscard]] Result<TokenSet> select(const Source& source) const {
    if (tokens < 0)
      return extend::error(ErrorCode::invalid_argument, "SelectLast: ", tokens,
                           " tokens is negative");
    TokenSet set;
    const std::int64_t count = source.fragment->token_count();
    if (count <= tokens) return set;
    set.all = false;
    for (std::int64_t t = count - tokens; t < count; ++t)
      set.present.push_back(static_cast<std::int32_t>(t));
    return set;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SelectLast");
    hasher.value(tokens);
  }
};

/// Attention mass of a fragment's tokens, as the engine that made it saw it.
struct TokenScores {
  FragmentId fragment{};
  std::vector<float> mass{};  ///< one a token, finite
};

/// Keeps the `budget` tokens of each fragment that most attention falls on: a summary of key
/// frames.
///
/// Mass comes from the caller where `scores` names the fragment. Else the keys of the span's last
/// `queries` tokens stand in for queries (as in SnapKV's observation window, Li et al. 2024): per
/// head, softmax over the tokens up to it of k·k' / √channels, summed over heads and queries, in
/// f64. Ties go to the earlier token. A layer's missing tokens have no mass. Every replica gives
/// the same scores or none: they are part of the merger's digest. O(queries · tokens · channels).
/// Errors: `invalid_argument` (budget or queries negative, a layer that is not there),
/// `token_count_mismatch`, `non_finite`.
struct SelectKeyFrames {
  static constexpr bool reproducible = true;
  std::int64_t budget = 256;  ///< tokens kept of each fragment, at most
  std::int32_t layer = -1;    ///< whose keys are read; −1: ⌊layers / 2⌋
  std::int32_t queries = 8;   ///< last tokens that stand in for queries
  /// Ascending by fragment; empty: every mass is computed from keys.
  std::vector<TokenScores> scores{};

  [[nodiscard]] Result<TokenSet> select(const Source& source) const {
    const std::int64_t count = source.fragment->token_count();
    const auto all = detail::keeps_all("SelectKeyFrames", budget, count);
    if (!all) return all.error();
    if (queries < 0)
      return extend::error(ErrorCode::invalid_argument, "SelectKeyFrames: ", queries,
                           " queries is negative");
    if (*all) return TokenSet{};
    auto mass = mass_of(source);
    if (!mass) return mass.error();
    TokenSet set{.all = false};
    for (std::int64_t t = 0; t < count; ++t) set.present.push_back(static_cast<std::int32_t>(t));
    std::sort(set.present.begin(), set.present.end(), [&](std::int32_t a, std::int32_t b) {
      const double x = (*mass)[static_cast<std::size_t>(a)],
                   y = (*mass)[static_cast<std::size_t>(b)];
      return x != y ? x > y : a < b;
    });
    set.present.resize(static_cast<std::size_t>(budget));
    std::sort(set.present.begin(), set.present.end());
    return set;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SelectKeyFrames");
    hasher.value(budget);
    hasher.value(layer);
    hasher.value(queries);
    hasher.value(static_cast<std::uint64_t>(scores.size()));
    for (const TokenScores& s : scores) {
      hasher.bytes(std::as_bytes(std::span(s.fragment.bytes)));
      hasher.values(std::span<const float>(s.mass));
    }
  }

 private:
  [[nodiscard]] Result<std::vector<double>> mass_of(const Source& source) const {
    const auto given = std::lower_bound(
        scores.begin(), scores.end(), source.fragment->id(),
        [](const TokenScores& s, const FragmentId& id) { return s.fragment < id; });
    if (given != scores.end() && given->fragment == source.fragment->id()) {
      if (static_cast<std::int64_t>(given->mass.size()) != source.fragment->token_count()) {
        return extend::error(ErrorCode::token_count_mismatch,
                             "SelectKeyFrames: ", given->mass.size(), " scores for ",
                             source.fragment->token_count(), " tokens of fragment ",
                             source.fragment->id().hex());
      }
      std::vector<double> mass;
      for (const float m : given->mass) {
        if (!std::isfinite(m))
          return extend::error(ErrorCode::non_finite, "SelectKeyFrames: score ", mass.size(),
                               " is not finite");
        mass.push_back(static_cast<double>(m));
      }
      return mass;
    }
    const auto keys = detail::layer_keys(source, layer, false);
    if (!keys) return keys.error();
    return mass_from(*keys, static_cast<std::size_t>(source.fragment->token_count()));
  }
  [[nodiscard]] std::vector<double> mass_from(const detail::LayerKeys& keys,
                                              std::size_t tokens) const {
    std::vector<double> mass(tokens, 0.0);
    const std::size_t n = keys.tokens.size();
    const std::size_t asked = (std::min)(static_cast<std::size_t>(queries), n);
    const double scale =
        keys.channels == 0 ? 0.0 : 1.0 / math::sqrt(static_cast<double>(keys.channels));
    const auto dot = detail::dot_measure();
    std::vector<double> weights(n);
    for (std::size_t q = n - asked; q < n; ++q) {
      for (std::size_t h = 0; h < keys.heads; ++h) {
        double top = -INFINITY, total = 0;
        for (std::size_t i = 0; i <= q; ++i) {
          weights[i] = dot(keys.row(q, h), keys.row(i, h), keys.channels) * scale;
          top = (std::max)(top, weights[i]);
        }
        for (std::size_t i = 0; i <= q; ++i) {
          weights[i] = math::exp(weights[i] - top);
          total += weights[i];
        }
        for (std::size_t i = 0; i <= q; ++i)
          mass[static_cast<std::size_t>(keys.tokens[i])] += weights[i] / total;
      }
    }
    return mass;
  }
};

/// Keeps the `budget` tokens of each fragment whose keys stand best for all of them: k-medoids of
/// keys without position.
///
/// Squared Euclidean distances over all heads of one layer, keys un-rotated to position 0, f64.
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
      return extend::error(ErrorCode::invalid_argument, "SelectMedoids: ", iterations,
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
