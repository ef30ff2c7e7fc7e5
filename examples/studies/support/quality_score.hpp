#pragma once
// F1 and exact match of a free answer, by the normalisation of the SQuAD evaluation script.

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

namespace quality {

/// Lower case, without punctuation, the articles, or more than one space.
inline std::vector<std::string> normalised(const std::string& text) {
  std::string kept;
  for (const char c : text) {
    const bool upper = c >= 'A' && c <= 'Z';
    const bool punctuation = (c >= '!' && c <= '/') || (c >= ':' && c <= '@') ||
                             (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
    if (!punctuation) kept += upper ? static_cast<char>(c - 'A' + 'a') : c;
  }
  std::istringstream words(kept);
  std::vector<std::string> out;
  for (std::string word; words >> word;)
    if (word != "a" && word != "an" && word != "the") out.push_back(word);
  return out;
}

struct Score {
  double f1 = 0, em = 0;
};

inline Score score(const std::string& text, const std::string& answer) {
  const std::vector<std::string> given = normalised(text), wanted = normalised(answer);
  if (given == wanted) return {1, 1};
  if (given.empty() || wanted.empty()) return {};
  std::vector<std::string> left = wanted;
  std::size_t common = 0;
  for (const std::string& word : given)
    if (const auto at = std::find(left.begin(), left.end(), word); at != left.end()) {
      left.erase(at);
      ++common;
    }
  // 2 · precision · recall ÷ their sum
  return {2.0 * static_cast<double>(common) / static_cast<double>(given.size() + wanted.size()), 0};
}

/// The best score over all answers that count as right.
inline Score best_score(const std::string& text, const std::vector<std::string>& answers) {
  Score best;
  for (const std::string& answer : answers) {
    const Score one = score(text, answer);
    best = {std::max(best.f1, one.f1), std::max(best.em, one.em)};
  }
  return best;
}

}  // namespace quality
