#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/select_keys.hpp>

KVMELD_NAMESPACE_BEGIN

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
      return detail::error(ErrorCode::invalid_argument, "SelectKeyFrames: ", queries,
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
        return detail::error(ErrorCode::token_count_mismatch,
                             "SelectKeyFrames: ", given->mass.size(), " scores for ",
                             source.fragment->token_count(), " tokens of fragment ",
                             source.fragment->id().hex());
      }
      std::vector<double> mass;
      for (const float m : given->mass) {
        if (!std::isfinite(m))
          return detail::error(ErrorCode::non_finite, "SelectKeyFrames: score ", mass.size(),
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

KVMELD_NAMESPACE_END
