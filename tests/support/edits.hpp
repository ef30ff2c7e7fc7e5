#pragma once
// Edit scripts by plain loops over the whole table, and what any script or alignment must satisfy.

#include <algorithm>
#include <utility>
#include <vector>

#include <kvmeld/policies/token_match.hpp>
#include <kvmeld/policy.hpp>

#include "random_cache.hpp"

namespace test {

using Ids = std::vector<kvmeld::TokenId>;
using Pairs = std::vector<std::pair<int, int>>;

/// All strings over {0, 1} of up to `longest` digits.
inline std::vector<Ids> binary_strings(int longest) {
  std::vector<Ids> out;
  for (int length = 0; length <= longest; ++length) {
    for (int bits = 0; bits < 1 << length; ++bits) {
      Ids ids;
      for (int i = 0; i < length; ++i) ids.push_back((bits >> i) & 1);
      out.push_back(ids);
    }
  }
  return out;
}

/// table[i][j]: edits between the first i tokens of a and the first j of b.
inline std::vector<std::vector<std::int64_t>> distance_table(const Ids& a, const Ids& b) {
  std::vector<std::vector<std::int64_t>> table(a.size() + 1,
                                               std::vector<std::int64_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        table[i][j] = static_cast<std::int64_t>(i + j);
      } else {
        const std::int64_t through = table[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
        table[i][j] = std::min(through, std::min(table[i - 1][j], table[i][j - 1]) + 1);
      }
    }
  }
  return table;
}

/// Pairs kept, by the order of ties that the library documents: match, substitute, delete, insert,
/// from the end.
inline Pairs reference_script(Ids a, Ids b) {
  const bool swapped = a.size() != b.size() ? a.size() > b.size() : b < a;
  if (swapped) std::swap(a, b);
  const auto table = distance_table(a, b);
  Pairs out;
  std::size_t i = a.size(), j = b.size();
  while (i > 0 || j > 0) {
    if (i > 0 && j > 0 && a[i - 1] == b[j - 1] && table[i - 1][j - 1] == table[i][j]) {
      --i;
      --j;
      out.emplace_back(static_cast<int>(swapped ? j : i), static_cast<int>(swapped ? i : j));
    } else if (i > 0 && j > 0 && a[i - 1] != b[j - 1] && table[i - 1][j - 1] + 1 == table[i][j]) {
      --i;
      --j;
    } else if (i > 0 && table[i - 1][j] + 1 == table[i][j]) {
      --i;
    } else {
      --j;
    }
  }
  std::reverse(out.begin(), out.end());
  return out;
}

inline Pairs pairs(const kvmeld::EditScript& script) {
  Pairs out;
  for (const kvmeld::MatchRun& run : script.runs) {
    for (int i = 0; i < run.length; ++i) out.emplace_back(run.a_begin + i, run.b_begin + i);
  }
  return out;
}

/// Runs ascend, do not touch on a diagonal, and hold equal tokens; the distance is what their gaps
/// need.
inline bool holds(const kvmeld::EditScript& script, const Ids& a, const Ids& b) {
  std::int64_t i = 0, j = 0, edits = 0;
  for (const kvmeld::MatchRun& run : script.runs) {
    if (run.length < 1 || run.a_begin < i || run.b_begin < j) return false;
    if (i > 0 && run.a_begin == i && run.b_begin == j) return false;
    edits += std::max(run.a_begin - i, run.b_begin - j);
    for (int k = 0; k < run.length; ++k) {
      if (run.a_begin + k >= std::ssize(a) || run.b_begin + k >= std::ssize(b)) return false;
      if (a[static_cast<std::size_t>(run.a_begin + k)] !=
          b[static_cast<std::size_t>(run.b_begin + k)])
        return false;
    }
    i = run.a_begin + run.length;
    j = run.b_begin + run.length;
  }
  edits += std::max(std::ssize(a) - i, std::ssize(b) - j);
  return edits == script.distance && script.a_tokens == std::ssize(a) &&
         script.b_tokens == std::ssize(b);
}

/// A copy with `edits` substitutions, deletions and insertions at random places.
inline Ids edited(Ids ids, int edits, std::uint64_t vocabulary, Random& random) {
  for (int e = 0; e < edits; ++e) {
    const auto at = static_cast<std::ptrdiff_t>(random.below(ids.size() + 1));
    const auto token = static_cast<kvmeld::TokenId>(random.below(vocabulary));
    switch (at == std::ssize(ids) ? 2 : random.below(3)) {
      case 0:
        ids[static_cast<std::size_t>(at)] = token;
        break;
      case 1:
        ids.erase(ids.begin() + at);
        break;
      default:
        ids.insert(ids.begin() + at, token);
    }
  }
  return ids;
}

/// Every selected token of every source is in one output token, in ascending order of sources.
inline bool keeps_every_token(const kvmeld::Alignment& alignment,
                              const std::vector<kvmeld::Source>& sources) {
  std::vector<std::vector<int>> seen;
  for (const kvmeld::Source& s : sources)
    seen.emplace_back(static_cast<std::size_t>(s.fragment->token_count()), 0);
  for (std::size_t o = 0; o < alignment.positions.size(); ++o) {
    const auto row = alignment.groups[0].row(o);
    if (row.empty()) return false;
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c > 0 && row[c].source <= row[c - 1].source) return false;
      ++seen[row[c].source][row[c].token];
    }
  }
  for (std::size_t s = 0; s < sources.size(); ++s) {
    std::vector<int> want(seen[s].size(), 0);
    for (std::int64_t i = 0; i < sources[s].selected_count(); ++i)
      want[static_cast<std::size_t>(sources[s].selected_token(i))] = 1;
    if (seen[s] != want) return false;
  }
  return true;
}

}  // namespace test
