#pragma once

/// Shortest edit scripts of token sequences: seeds, bit-parallel blocks and wavefronts.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/policy.hpp>

KVMELD_NAMESPACE_BEGIN

/// Consecutive tokens that two sequences share: a[a_begin + i] = b[b_begin + i] for i < length.
struct MatchRun {
  std::int32_t a_begin = 0;
  std::int32_t b_begin = 0;
  std::int32_t length = 0;

  bool operator==(const MatchRun&) const = default;
};

namespace detail {

using TokenSpan = std::span<const TokenId>;

/// Equal tokens at the beginning of two arrays, at most `most`.
[[nodiscard]] inline std::int32_t equal_forward(const TokenId* a, const TokenId* b,
                                                std::int32_t most) noexcept {
  std::int32_t n = 0;
  for (; n + 4 <= most; n += 4) {
    std::uint64_t x[2], y[2];
    std::memcpy(x, a + n, sizeof x);
    std::memcpy(y, b + n, sizeof y);
    if (((x[0] ^ y[0]) | (x[1] ^ y[1])) != 0) break;
  }
  while (n < most && a[n] == b[n]) ++n;
  return n;
}

/// Equal tokens before the ends of two arrays, at most `most`.
[[nodiscard]] inline std::int32_t equal_backward(const TokenId* a_end, const TokenId* b_end,
                                                 std::int32_t most) noexcept {
  std::int32_t n = 0;
  for (; n + 4 <= most; n += 4) {
    std::uint64_t x[2], y[2];
    std::memcpy(x, a_end - n - 4, sizeof x);
    std::memcpy(y, b_end - n - 4, sizeof y);
    if (((x[0] ^ y[0]) | (x[1] ^ y[1])) != 0) break;
  }
  while (n < most && a_end[-n - 1] == b_end[-n - 1]) ++n;
  return n;
}

/// Levenshtein distance by diagonals that reach as far as s edits allow, s = 0, 1, 2, … (Ukkonen
/// 1985).
///
/// The band grows with the distance d: O(n + d²) expected, O(n · d) at worst, 4 · d² bytes. The
/// reaches hold all of the table that the way back asks about, D(i, j) ≤ s ⇔ reach(s, j − i) ≥ i,
/// so that the script is the whole table's, tie for tie.
template <class = void>
class EditWavefront {
 public:
  /// Distance of a to b, or −1 where it exceeds `limit`; with it, `runs` become the matches, last
  /// first.
  [[nodiscard]] std::int32_t align(TokenSpan a, TokenSpan b, std::int32_t limit,
                                   std::vector<MatchRun>& runs) {
    const std::int32_t s = distance(a, b, limit);
    runs.clear();
    if (s >= 0) trace(a, b, s, runs);
    return s;
  }

 private:
  static constexpr std::int32_t none = INT32_MIN / 2;

  // Row s holds diagonals −s … s, and two on either side that nothing reaches.
  [[nodiscard]] static std::size_t row_begin(std::int32_t s) noexcept {
    return static_cast<std::size_t>(s) * (static_cast<std::size_t>(s) + 4);
  }
  [[nodiscard]] std::int32_t* diagonal_0(std::int32_t s) noexcept {
    return reach_.data() + row_begin(s) + 2 + s;
  }

  [[nodiscard]] std::int32_t distance(TokenSpan a, TokenSpan b, std::int32_t limit) {
    const auto n = static_cast<std::int32_t>(a.size()), m = static_cast<std::int32_t>(b.size());
    const std::int32_t goal = m - n;
    if (goal > limit || -goal > limit) return -1;
    reach_.assign(row_begin(1), none);
    diagonal_0(0)[0] = equal_forward(a.data(), b.data(), (std::min)(n, m));
    if (goal == 0 && diagonal_0(0)[0] == n) return 0;
    for (std::int32_t s = 1; s <= limit; ++s) {
      reach_.resize(row_begin(s + 1), none);
      const std::int32_t* const was = diagonal_0(s - 1);
      std::int32_t* const __restrict now = diagonal_0(s);
      const std::int32_t first = (std::max)(-s, -n), last = (std::min)(s, m);
      for (std::int32_t k = first; k <= last; ++k) {
        // substituted or deleted, inserted
        const std::int32_t farthest = (std::max)((std::max)(was[k], was[k + 1]) + 1, was[k - 1]);
        now[k] = (std::min)((std::min)(farthest, n), m - k);
      }
      for (std::int32_t k = first; k <= last; ++k) {
        const std::int32_t i = now[k];
        if (i < 0) continue;
        const std::int32_t most = (std::min)(n - i, m - k - i);
        if (most > 0 && a[static_cast<std::size_t>(i)] == b[static_cast<std::size_t>(i + k)]) {
          now[k] = i + equal_forward(a.data() + i, b.data() + i + k, most);
        }
      }
      if (first <= goal && goal <= last && now[goal] == n) return s;
    }
    return -1;
  }

  void trace(TokenSpan a, TokenSpan b, std::int32_t s, std::vector<MatchRun>& runs) {
    auto i = static_cast<std::int32_t>(a.size()), j = static_cast<std::int32_t>(b.size());
    for (;; --s) {
      const std::int32_t length = equal_backward(a.data() + i, b.data() + j, (std::min)(i, j));
      i -= length;
      j -= length;
      if (length > 0) runs.push_back({i, j, length});
      if (s == 0) return;
      const std::int32_t* const was = diagonal_0(s - 1);
      const std::int32_t k = j - i;
      if (i > 0 && j > 0 && was[k] >= i - 1) {  // substitute, else delete, else insert
        --i;
        --j;
      } else if (i > 0 && was[k + 1] >= i - 1) {
        --i;
      } else {
        --j;
      }
    }
  }

  std::vector<std::int32_t> reach_;
};

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

/// A place in both sequences.
struct Seed {
  std::int32_t a = 0;
  std::int32_t b = 0;
};

/// Grams of `length` tokens that occur once in either sequence, ascending in a: found by hash, then
/// compared.
///
/// A gram is looked at where its first two tokens hash to a multiple of 2^thinning: the content
/// decides, so that both sequences look at the same grams. O(n) and a sort of those looked at.
[[nodiscard]] inline std::vector<Seed> unique_seeds(TokenSpan a, TokenSpan b, std::int32_t length,
                                                    unsigned thinning) {
  struct Gram {
    std::uint64_t hash;
    std::int32_t at;
  };
  constexpr std::uint64_t odd = 0x9E3779B97F4A7C15U;
  const auto grams = [&](TokenSpan tokens) {
    std::vector<Gram> out;
    const auto last = static_cast<std::int64_t>(tokens.size()) - length;
    for (std::int64_t i = 0; i <= last; ++i) {
      const TokenId* const t = tokens.data() + i;
      if (thinning > 0) {
        const auto pair = static_cast<std::uint64_t>(static_cast<std::uint32_t>(t[0])) << 32U |
                          static_cast<std::uint32_t>(t[1]);
        if (((pair ^ pair >> 29U) * odd) >> (64U - thinning) != 0) continue;
      }
      std::uint64_t hash = 0;
      for (std::int32_t x = 0; x < length; ++x) {
        hash = (hash ^ static_cast<std::uint32_t>(t[x])) * odd;
        hash ^= hash >> 32U;
      }
      out.push_back({hash, static_cast<std::int32_t>(i)});
    }
    std::sort(out.begin(), out.end(), [](const Gram& x, const Gram& y) {
      return x.hash != y.hash ? x.hash < y.hash : x.at < y.at;
    });
    return out;
  };
  const std::vector<Gram> of_a = grams(a), of_b = grams(b);
  std::vector<Seed> out;
  std::size_t i = 0, j = 0;
  while (i < of_a.size() && j < of_b.size()) {
    const std::uint64_t hash = (std::min)(of_a[i].hash, of_b[j].hash);
    std::size_t i_end = i, j_end = j;
    while (i_end < of_a.size() && of_a[i_end].hash == hash) ++i_end;
    while (j_end < of_b.size() && of_b[j_end].hash == hash) ++j_end;
    if (i_end == i + 1 && j_end == j + 1 &&
        equal_forward(a.data() + of_a[i].at, b.data() + of_b[j].at, length) == length) {
      out.push_back({of_a[i].at, of_b[j].at});
    }
    i = i_end;
    j = j_end;
  }
  std::sort(out.begin(), out.end(), [](const Seed& x, const Seed& y) { return x.a < y.a; });
  return out;
}

/// The longest chain of seeds that ascends in both sequences. O(seeds · log seeds).
[[nodiscard]] inline std::vector<Seed> longest_chain(const std::vector<Seed>& seeds) {
  // ends[l]: the seed with the smallest b that ends a chain of l + 1
  std::vector<std::size_t> ends;
  std::vector<std::size_t> before(seeds.size());
  for (std::size_t s = 0; s < seeds.size(); ++s) {
    const auto at =
        std::lower_bound(ends.begin(), ends.end(), seeds[s].b,
                         [&](std::size_t e, std::int32_t value) { return seeds[e].b < value; });
    before[s] = at == ends.begin() ? s : *(at - 1);
    if (at == ends.end()) {
      ends.push_back(s);
    } else {
      *at = s;
    }
  }
  std::vector<Seed> out(ends.size());
  std::size_t s = ends.empty() ? 0 : ends.back();
  for (std::size_t l = ends.size(); l-- > 0; s = before[s]) out[l] = seeds[s];
  return out;
}

/// Aligns long pairs piece by piece: unique common k-grams, their longest ascending chain, the
/// whole table in what lies between.
///
/// Gaps too large for a table are seeded again, by every gram and then by shorter ones; what holds
/// no seed is cut into pieces of proportional length.
template <class = void>
class EditPieces {
 public:
  EditPieces(TokenSpan a, TokenSpan b, std::int64_t table_cells, std::int32_t seed_tokens,
             std::vector<MatchRun>& runs)
      : a_(a), b_(b), table_cells_(table_cells), seed_tokens_(seed_tokens), runs_(runs) {}

  /// Appends the runs of a shortest script of one piece.
  void table(Seed begin, Seed end) {
    const TokenSpan a = part(a_, begin.a, end.a), b = part(b_, begin.b, end.b);
    const auto cells = static_cast<std::int64_t>(a.size()) * static_cast<std::int64_t>(b.size());
    // √(n · m) / 8 edits by diagonals cost about half of the table in bits
    std::int32_t widest = 1;
    while (widest < 2048 && std::int64_t{widest} * widest < cells / 64) ++widest;
    if (wavefront_.align(a, b, widest, backwards_) < 0) (void)bits_.align(a, b, backwards_);
    for (std::size_t r = backwards_.size(); r-- > 0;) {
      append(
          {begin.a + backwards_[r].a_begin, begin.b + backwards_[r].b_begin, backwards_[r].length});
    }
  }

  /// Appends the runs of a script of a piece of any size.
  void pieces(Seed begin, Seed end, int level = 0) {
    const std::int32_t head = equal_forward(a_.data() + begin.a, b_.data() + begin.b,
                                            (std::min)(end.a - begin.a, end.b - begin.b));
    append({begin.a, begin.b, head});
    begin = {begin.a + head, begin.b + head};
    const std::int32_t tail = equal_backward(a_.data() + end.a, b_.data() + end.b,
                                             (std::min)(end.a - begin.a, end.b - begin.b));
    end = {end.a - tail, end.b - tail};
    middle(begin, end, level);
    append({end.a, end.b, tail});
  }

  /// Appends the runs of pieces of at most 4096 tokens, cut where no seed says otherwise: no worse
  /// than to substitute everything.
  void cut(Seed begin, Seed end) {
    constexpr std::int64_t piece = 4096;
    const std::int64_t n = end.a - begin.a, m = end.b - begin.b;
    const std::int64_t count = ((std::max)(n, m) + piece - 1) / piece;
    Seed from = begin;
    for (std::int64_t p = 1; p <= count; ++p) {
      const Seed to{begin.a + static_cast<std::int32_t>(n * p / count),
                    begin.b + static_cast<std::int32_t>(m * p / count)};
      table(from, to);
      from = to;
    }
  }

 private:
  [[nodiscard]] static TokenSpan part(TokenSpan tokens, std::int32_t begin, std::int32_t end) {
    return tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
  }
  void append(MatchRun run) {
    if (run.length == 0) return;
    if (!runs_.empty() && runs_.back().a_begin + runs_.back().length == run.a_begin &&
        runs_.back().b_begin + runs_.back().length == run.b_begin) {
      runs_.back().length += run.length;
    } else {
      runs_.push_back(run);
    }
  }
  void middle(Seed begin, Seed end, int level) {
    const std::int64_t n = end.a - begin.a, m = end.b - begin.b;
    if (n == 0 || m == 0) return;
    if (n * m <= table_cells_) return table(begin, end);
    constexpr int levels = 3;
    if (level == levels) return cut(begin, end);
    const std::int32_t length =
        level < 2 ? seed_tokens_ : (std::max)((std::min)(2, seed_tokens_), seed_tokens_ / 4);
    const unsigned thinning = level == 0 && length > 1 ? 8 : 0;
    const Seed origin = begin;
    for (const Seed& found : longest_chain(
             unique_seeds(part(a_, begin.a, end.a), part(b_, begin.b, end.b), length, thinning))) {
      const Seed seed{origin.a + found.a, origin.b + found.b};
      if (seed.a < begin.a || seed.b < begin.b) continue;  // overlaps the one before it
      pieces(begin, seed, level + 1);
      const std::int32_t more = equal_forward(a_.data() + seed.a, b_.data() + seed.b,
                                              (std::min)(end.a - seed.a, end.b - seed.b));
      append({seed.a, seed.b, more});
      begin = {seed.a + more, seed.b + more};
    }
    pieces(begin, end, level + 1);
  }

  TokenSpan a_, b_;
  std::int64_t table_cells_;
  std::int32_t seed_tokens_;
  std::vector<MatchRun>& runs_;
  std::vector<MatchRun> backwards_;
  EditWavefront<> wavefront_;
  EditBits<> bits_;
};

/// A token of a fragment as a matcher sees it.
struct GridToken {
  TokenId id = -1;
  std::uint32_t token = 0;      ///< index in the fragment
  const double* row = nullptr;  ///< its direction; null: none, or not asked for
};

/// Output tokens that grow as fragments join, one after the other, in canonical order.
///
/// A column stands for its founder: later fragments are matched with the founder's id and
/// direction.
template <class = void>
class TokenGrid {
 public:
  struct Column {
    GridToken founder;
    TokenId id;            ///< of all its tokens; −1 where they differ
    std::uint32_t source;  ///< whose token the founder is
    std::uint32_t first;   ///< its contributions, in order of source: a list in `links_`
    std::uint32_t last;
  };

  [[nodiscard]] const std::vector<Column>& columns() const noexcept { return columns_; }

  /// Joins a fragment. Its tokens without partner become columns in front of the column of its next
  /// token that has one, behind what stands there; at the end where none follows.
  ///
  /// @param column_of for each token the column that it joins, −1: none; no column twice
  void add(std::uint32_t source, std::span<const GridToken> tokens,
           std::span<const std::int32_t> column_of) {
    // of new columns in front of each; a counting sort keeps their order
    std::vector<std::uint32_t> count(columns_.size() + 2, 0);
    std::vector<std::uint32_t> front(tokens.size());
    auto next = static_cast<std::uint32_t>(columns_.size());
    for (std::size_t t = tokens.size(); t-- > 0;) {
      if (column_of[t] >= 0) {
        next = static_cast<std::uint32_t>(column_of[t]);
      } else {
        ++count[next + 1];
      }
      front[t] = next;
    }
    for (std::size_t c = 1; c < count.size(); ++c) count[c] += count[c - 1];
    std::vector<std::uint32_t> fresh(count.back());
    std::vector<std::uint32_t> end(count.begin(), count.end() - 1);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const std::uint32_t link = static_cast<std::uint32_t>(links_.size());
      links_.push_back({{source, tokens[t].token, 1.0F}, no_link});
      if (column_of[t] < 0) {
        fresh[end[front[t]]++] = static_cast<std::uint32_t>(t);
        continue;
      }
      Column& column = columns_[static_cast<std::size_t>(column_of[t])];
      if (column.id != tokens[t].id) column.id = -1;
      links_[column.last].next = link;
      column.last = link;
    }
    if (fresh.empty()) return;
    const auto first_link = static_cast<std::uint32_t>(links_.size() - tokens.size());
    std::vector<Column> grown;
    grown.reserve(columns_.size() + fresh.size());
    for (std::size_t c = 0; c <= columns_.size(); ++c) {
      for (std::uint32_t f = count[c]; f < count[c + 1]; ++f) {
        const GridToken& token = tokens[fresh[f]];
        grown.push_back({token, token.id, source, first_link + fresh[f], first_link + fresh[f]});
      }
      if (c < columns_.size()) grown.push_back(columns_[c]);
    }
    columns_ = std::move(grown);
  }

  /// One output token a column, from `first_position` on.
  [[nodiscard]] Alignment alignment(std::int64_t first_position) const {
    Alignment out;
    out.groups.resize(1);
    out.positions.reserve(columns_.size());
    out.tokens.reserve(columns_.size());
    out.groups[0].contributions.reserve(links_.size());
    for (const Column& column : columns_) {
      for (std::uint32_t l = column.first; l != no_link; l = links_[l].next)
        out.groups[0].contributions.push_back(links_[l].contribution);
      out.positions.push_back(first_position++);
      out.tokens.push_back(column.id);
      out.groups[0].end_row();
    }
    return out;
  }

 private:
  static constexpr std::uint32_t no_link = UINT32_MAX;
  struct Link {
    Contribution contribution;
    std::uint32_t next;
  };

  std::vector<Column> columns_;
  std::vector<Link> links_;
};

}  // namespace detail

KVMELD_NAMESPACE_END
