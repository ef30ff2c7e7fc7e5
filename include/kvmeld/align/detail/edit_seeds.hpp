#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/align/detail/edit_bits.hpp>
#include <kvmeld/align/detail/edit_wavefront.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

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
KVMELD_LAZY [[nodiscard]] std::vector<Seed> unique_seeds(TokenSpan a, TokenSpan b,
                                                         std::int32_t length, unsigned thinning) {
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
KVMELD_LAZY [[nodiscard]] std::vector<Seed> longest_chain(const std::vector<Seed>& seeds) {
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

}  // namespace detail
KVMELD_NAMESPACE_END
