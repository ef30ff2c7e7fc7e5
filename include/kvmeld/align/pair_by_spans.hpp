#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Where a token's text lies in the whole text, end exclusive: one entry of a tokenizer's offset
/// table, in bytes or characters.
struct CharSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  bool operator==(const CharSpan&) const = default;
};

/// A token of a source and the one of a target that is paired with it, by their indices.
struct TokenPair {
  std::int32_t source = 0;
  std::int32_t target = 0;

  bool operator==(const TokenPair&) const = default;
};

namespace detail {

[[nodiscard]] inline Status check_spans(std::span<const CharSpan> spans, const char* side) {
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].begin < 0 || spans[i].end < spans[i].begin ||
        (i > 0 && spans[i].end < spans[i - 1].end)) {
      return error(
          ErrorCode::invalid_argument, side, " token ", i, " spans [", spans[i].begin, ", ",
          spans[i].end,
          "); spans end at or behind their begin, and never before the token before them ends");
    }
  }
  return {};
}

}  // namespace detail

/// Pairs the tokens of two tokenizers over one text.
///
/// Every target token is paired with the source token that ends where it ends or, failing that,
/// with the last one that ends before: the row of a source token has seen the text up to its end,
/// so that row knows nothing which the target's own has not seen. Of several source tokens with one
/// end (tokens without text) the last counts. Target tokens that end before the first source token
/// does stay unpaired; a source token may serve several target tokens. Pairs ascend by target
/// token. O(source + target). Errors: `invalid_argument` for spans out of order.
[[nodiscard]] inline Result<std::vector<TokenPair>> pair_by_spans(
    std::span<const CharSpan> source, std::span<const CharSpan> target) {
  KVMELD_TRY(detail::check_spans(source, "source"));
  KVMELD_TRY(detail::check_spans(target, "target"));
  std::vector<TokenPair> pairs;
  pairs.reserve(target.size());
  std::size_t s = 0;  // source tokens that end at or before the target token's end
  for (std::size_t t = 0; t < target.size(); ++t) {
    while (s < source.size() && source[s].end <= target[t].end) ++s;
    if (s > 0) pairs.push_back({static_cast<std::int32_t>(s) - 1, static_cast<std::int32_t>(t)});
  }
  return pairs;
}

KVMELD_NAMESPACE_END
