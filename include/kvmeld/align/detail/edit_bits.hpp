#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/align/detail/edit_wavefront.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Levenshtein distance and script from the whole table, 64 cells a word (Myers 1999; Hyyrö 2003),
/// for pairs with little in common.
///
/// Kept of each cell, for the way back: whether it equals its neighbour on the diagonal, and
/// whether it is one more than the cell above. Columns beyond `kept_bytes` of that are worked out
/// again, a block at a time, from states at the blocks' beginnings. O(n · m / 64), twice that where
/// blocks are many; O(n · √m / 64) words beyond `kept_bytes`.
template <class = void>
class EditBits {
 public:
  /// Distance of a to b; `runs` become the matches, last first.
  [[nodiscard]] std::int32_t align(TokenSpan a, TokenSpan b, std::vector<MatchRun>& runs,
                                   std::size_t kept_bytes = std::size_t{1} << 26U) {
    runs.clear();
    rows_ = a.size();
    const std::size_t columns = b.size();
    if (rows_ == 0 || columns == 0 || !look_up(a, b))
      return static_cast<std::int32_t>((std::max)(rows_, columns));
    words_ = (rows_ + 63) / 64;
    std::size_t root = 1;
    while (root * root < columns) ++root;
    const std::size_t block = (std::min)(columns, (std::max)(kept_bytes / (16 * words_), root));
    const std::size_t blocks = (columns + block - 1) / block;
    begin_.assign(blocks * 2 * words_, 0);
    std::fill_n(begin_.begin(), words_, ~std::uint64_t{0});
    kept_.resize(block * 2 * words_);
    for (std::size_t at = 0; at + 1 < blocks; ++at) {
      std::copy_n(state(at), 2 * words_, state(at + 1));
      for (std::size_t j = at * block; j < (at + 1) * block; ++j) step(j, state(at + 1), nullptr);
    }
    std::size_t i = rows_, j = columns;
    std::int32_t distance = 0;
    for (std::size_t at = blocks; at-- > 0;) {
      const std::size_t first = at * block, last = (std::min)(columns, first + block);
      for (std::size_t c = first; c < last; ++c)
        step(c, state(at), kept_.data() + (c - first) * 2 * words_);
      distance += trace(a, b, first, i, j, runs);
    }
    return distance + static_cast<std::int32_t>(i + j);
  }

 private:
  struct Symbol {
    std::uint32_t begin = 0;  ///< of its rows in `places_`
    std::uint32_t end = 0;
    std::int64_t dense = -1;  ///< word in `dense_` at which its rows lie as bits; −1: they are few
  };

  [[nodiscard]] std::uint64_t* state(std::size_t block) noexcept {
    return begin_.data() + block * 2 * words_;
  }

  /// Finds, for each token of b, the rows of a that hold it; false where no token of b is in a.
  [[nodiscard]] bool look_up(TokenSpan a, TokenSpan b) {
    std::vector<std::pair<TokenId, std::uint32_t>> sorted(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) sorted[i] = {a[i], static_cast<std::uint32_t>(i)};
    std::sort(sorted.begin(), sorted.end());
    const std::size_t words = (a.size() + 63) / 64;
    places_.resize(a.size());
    symbols_.assign(1, Symbol{});  // symbol 0 is in no row
    dense_.clear();
    std::vector<TokenId> names;
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      places_[i] = sorted[i].second;
      if (i == 0 || sorted[i].first != sorted[i - 1].first) {
        names.push_back(sorted[i].first);
        symbols_.push_back({static_cast<std::uint32_t>(i), 0, -1});
      }
      symbols_.back().end = static_cast<std::uint32_t>(i + 1);
    }
    for (Symbol& symbol : symbols_) {
      if (symbol.end - symbol.begin <= words) continue;
      symbol.dense = static_cast<std::int64_t>(dense_.size());
      dense_.resize(dense_.size() + words, 0);
      set_rows(symbol, dense_.data() + symbol.dense);
    }
    rare_.assign(words, 0);
    bool any = false;
    of_column_.assign(b.size(), 0);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const auto at = std::lower_bound(names.begin(), names.end(), b[j]);
      if (at == names.end() || *at != b[j]) continue;
      of_column_[j] = static_cast<std::uint32_t>(at - names.begin()) + 1;
      any = true;
    }
    return any;
  }
  void set_rows(const Symbol& symbol, std::uint64_t* bits) const noexcept {
    for (std::uint32_t p = symbol.begin; p < symbol.end; ++p)
      bits[places_[p] / 64] |= std::uint64_t{1} << (places_[p] % 64);
  }

  /// Moves a state (words that grow downwards, then words that shrink) over one column; keeps what
  /// the way back reads in `out`.
  void step(std::size_t column, std::uint64_t* __restrict plus,
            std::uint64_t* __restrict out) noexcept {
    std::uint64_t* const minus = plus + words_;
    const Symbol& symbol = symbols_[of_column_[column]];
    const std::uint64_t* equal = rare_.data();
    if (symbol.dense >= 0) {
      equal = dense_.data() + symbol.dense;
    } else {
      set_rows(symbol, rare_.data());
    }
    std::uint64_t plus_in = 1, minus_in = 0;  // row 0 grows by one a column
    for (std::size_t w = 0; w < words_; ++w) {
      const std::uint64_t vp = plus[w], vn = minus[w];
      const std::uint64_t x = equal[w] | minus_in;
      // as much as the neighbour on the diagonal
      const std::uint64_t level = (((x & vp) + vp) ^ vp) | x | vn;
      std::uint64_t hp = vn | ~(level | vp), hn = level & vp;
      const std::uint64_t plus_out = hp >> 63U, minus_out = hn >> 63U;
      hp = (hp << 1U) | plus_in;
      hn = (hn << 1U) | minus_in;
      plus_in = plus_out;
      minus_in = minus_out;
      plus[w] = hn | ~(level | hp);
      minus[w] = hp & level;
      if (out != nullptr) {
        out[w] = level;
        out[words_ + w] = plus[w];
      }
    }
    if (symbol.dense < 0) {
      for (std::uint32_t p = symbol.begin; p < symbol.end; ++p) rare_[places_[p] / 64] = 0;
    }
  }

  /// Walks back to the block's first column, or to row 0; returns the edits on the way.
  [[nodiscard]] std::int32_t trace(TokenSpan a, TokenSpan b, std::size_t first, std::size_t& i,
                                   std::size_t& j, std::vector<MatchRun>& runs) const {
    std::int32_t edits = 0;
    while (i > 0 && j > first) {
      const auto most = static_cast<std::int32_t>((std::min)(i, j - first));
      const std::int32_t length = equal_backward(a.data() + i, b.data() + j, most);
      if (length > 0) {
        i -= static_cast<std::size_t>(length);
        j -= static_cast<std::size_t>(length);
        const MatchRun run{static_cast<std::int32_t>(i), static_cast<std::int32_t>(j), length};
        if (!runs.empty() && runs.back().a_begin == run.a_begin + length &&
            runs.back().b_begin == run.b_begin + length) {
          // a run across blocks
          runs.back() = {run.a_begin, run.b_begin, runs.back().length + length};
        } else {
          runs.push_back(run);
        }
        continue;
      }
      const std::uint64_t* const column =
          kept_.data() + (j - 1 - first) * 2 * words_ + (i - 1) / 64;
      const std::uint64_t bit = std::uint64_t{1} << ((i - 1) % 64);
      ++edits;
      if ((column[0] & bit) == 0) {  // substitute, else delete, else insert
        --i;
        --j;
      } else if ((column[words_] & bit) != 0) {
        --i;
      } else {
        --j;
      }
    }
    return edits;
  }

  std::size_t rows_ = 0, words_ = 0;
  std::vector<Symbol> symbols_;
  std::vector<std::uint32_t> places_;     // rows of a, by symbol
  std::vector<std::uint32_t> of_column_;  // symbol of each token of b
  std::vector<std::uint64_t> dense_;      // (frequent symbol, word)
  std::vector<std::uint64_t> rare_;       // rows of the symbol at hand
  std::vector<std::uint64_t> begin_;      // (block, {plus, minus}, word)
  std::vector<std::uint64_t> kept_;       // (column of the block, {level, plus}, word)
};

}  // namespace detail
KVMELD_NAMESPACE_END
