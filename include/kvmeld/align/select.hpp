#pragma once

#include <algorithm>

#include <kvmeld/align/alignment.hpp>

KVMELD_NAMESPACE_BEGIN

/// Keeps every token of every fragment.
struct SelectAll {
  static constexpr bool reproducible = true;

  [[nodiscard]] Result<TokenSet> select(const Source&) const { return TokenSet{}; }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.SelectAll"); }
};

/// Keeps the last `tokens` tokens of every fragment: a window over each agent's own text.
struct SelectLast {
  static constexpr bool reproducible = true;
  std::int64_t tokens = 256;  ///< at most this many a fragment

  KVMELD_LAZY [[nodiscard]] Result<TokenSet> select(const Source& source) const {
    if (tokens < 0)
      return detail::error(ErrorCode::invalid_argument, "SelectLast: ", tokens,
                           " tokens is negative");
    TokenSet set;
    const std::int64_t count = source.fragment->token_count();
    if (count <= tokens) return set;
    set.all = false;
    for (std::int64_t t = count - tokens; t < count; ++t)
      set.present.push_back(static_cast<std::int32_t>(t));
    return set;
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SelectLast");
    hasher.value(tokens);
  }
};

KVMELD_NAMESPACE_END
