#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/cache/geometry.hpp>

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

}  // namespace detail
KVMELD_NAMESPACE_END
