#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/detail/edit_seeds.hpp>
#include <kvmeld/align/detail/edit_wavefront.hpp>
#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// How much of a pair is compared with how much.
struct EditOptions {
  /// Pairs of up to its square of cells (tokens · tokens) get the shortest script, larger ones a
  /// good one.
  std::int64_t exact_tokens = 32768;
  std::int32_t seed_tokens = 16;  ///< length of the grams between which larger pairs are divided

  bool operator==(const EditOptions&) const = default;
};

/// How two token sequences differ: the runs of tokens that they share, in order.
///
/// What no run holds was inserted, deleted or substituted; a substituted token has no partner. Runs
/// ascend in both sequences and no two touch on one diagonal.
struct EditScript {
  std::vector<MatchRun> runs{};
  std::int64_t a_tokens = 0;
  std::int64_t b_tokens = 0;
  std::int64_t distance = 0;  ///< insertions, deletions and substitutions of this script
  bool exact = true;          ///< no script has fewer; where false, `distance` is an upper bound

  bool operator==(const EditScript&) const = default;

  /// Tokens with a partner.
  KVMELD_LAZY [[nodiscard]] std::int64_t matched() const noexcept {
    std::int64_t sum = 0;
    for (const MatchRun& run : runs) sum += run.length;
    return sum;
  }
  /// 1 for equal sequences (two empty ones too), 0 where every token of the longer one is an edit.
  KVMELD_LAZY [[nodiscard]] double similarity() const noexcept {
    const std::int64_t longer = (std::max)(a_tokens, b_tokens);
    return longer == 0 ? 1.0 : 1.0 - static_cast<double>(distance) / static_cast<double>(longer);
  }
  /// For every token of a the index of its partner in b, ascending; −1: a hole. O(tokens).
  KVMELD_LAZY [[nodiscard]] std::vector<std::int64_t> position_map() const {
    std::vector<std::int64_t> map(static_cast<std::size_t>(a_tokens), -1);
    for (const MatchRun& run : runs) {
      for (std::int32_t i = 0; i < run.length; ++i)
        map[static_cast<std::size_t>(run.a_begin + i)] = run.b_begin + i;
    }
    return map;
  }
  /// The script from b to a.
  KVMELD_LAZY [[nodiscard]] EditScript inverse() const {
    EditScript out{runs, b_tokens, a_tokens, distance, exact};
    for (MatchRun& run : out.runs) run = {run.b_begin, run.a_begin, run.length};
    return out;
  }
};

namespace detail {

/// Edits that a script's gaps need: as many as the longer side of each holds.
[[nodiscard]] inline std::int64_t edits_between(const EditScript& script) noexcept {
  std::int64_t edits = 0, i = 0, j = 0;
  for (const MatchRun& run : script.runs) {
    edits += (std::max)(run.a_begin - i, run.b_begin - j);
    i = run.a_begin + run.length;
    j = run.b_begin + run.length;
  }
  return edits + (std::max)(script.a_tokens - i, script.b_tokens - j);
}

}  // namespace detail

/// A shortest edit script (Levenshtein 1966) between token ids; the script from b to a is its
/// inverse.
///
/// The pair is put in order first (shorter, then lexicographically smaller) and the result turned
/// back, and of equally short scripts, read from the end, the one counts that matches before it
/// substitutes, substitutes before it deletes, and deletes before it inserts. Up to √(cells) / 8
/// edits by diagonals (Ukkonen 1985), O(n + d²) where sequences are alike; beyond, by 64 cells a
/// word (Myers 1999), O(n · m / 64) and 64 MiB; of pairs so large that only a raised `exact_tokens`
/// lets them in, √m · n / 2 bytes for the shorter n and longer m where that is more (500 MB for a
/// million tokens against a million). Pairs with more cells than `exact_tokens` squared: grams that
/// both hold once, their longest ascending chain, and shortest scripts in between; near-linear
/// where sequences are alike. Errors: `invalid_argument` for options out of range, `oversized` for
/// 2³⁰ tokens or more.
KVMELD_LAZY [[nodiscard]] Result<EditScript> edit_script(std::span<const TokenId> a,
                                                         std::span<const TokenId> b,
                                                         const EditOptions& options = {}) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (options.exact_tokens < 0 || options.exact_tokens > most) {
    return detail::error(ErrorCode::invalid_argument, "edit_script: exact_tokens ",
                         options.exact_tokens, " is not in [0, ", most, "]");
  }
  if (options.seed_tokens < 1 || options.seed_tokens > 1024) {
    return detail::error(ErrorCode::invalid_argument, "edit_script: seeds of ", options.seed_tokens,
                         " tokens; 1 to 1024 are possible");
  }
  const auto n = static_cast<std::int64_t>(a.size()), m = static_cast<std::int64_t>(b.size());
  if (n >= most || m >= most)
    return detail::error(ErrorCode::oversized, "edit_script: ", (std::max)(n, m), " tokens; below ",
                         most, " are possible");
  const bool swapped =
      n != m ? n > m : std::lexicographical_compare(b.begin(), b.end(), a.begin(), a.end());
  if (swapped) std::swap(a, b);
  const std::int64_t cells = options.exact_tokens * options.exact_tokens;
  EditScript out{{}, std::ssize(a), std::ssize(b), 0, n * m <= cells};
  detail::EditPieces<> pieces(a, b, cells, options.seed_tokens, out.runs);
  const detail::Seed end{static_cast<std::int32_t>(a.size()), static_cast<std::int32_t>(b.size())};
  if (out.exact) {
    pieces.table({}, end);
  } else {
    pieces.pieces({}, end);
  }
  out.distance = detail::edits_between(out);
  if (out.distance > (std::max)(n, m)) {  // seeds that met by chance cost more than they matched
    out.runs.clear();
    pieces.cut({}, end);
    out.distance = detail::edits_between(out);
  }
  return swapped ? out.inverse() : out;
}

KVMELD_NAMESPACE_END
