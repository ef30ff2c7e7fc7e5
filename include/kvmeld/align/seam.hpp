#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// Recomputes nothing.
struct SeamNone {
  static constexpr bool reproducible = true;

  [[nodiscard]] Status mark(std::span<const Source>, const Alignment&,
                            std::span<std::uint8_t>) const {
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.SeamNone"); }
};

/// Recomputes every output token: the cache that full text gives, at its price.
struct SeamAll {
  static constexpr bool reproducible = true;

  KVMELD_LAZY [[nodiscard]] Status mark(std::span<const Source>, const Alignment&,
                                        std::span<std::uint8_t> recompute) const {
    std::fill(recompute.begin(), recompute.end(), std::uint8_t{1});
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.SeamAll"); }
};

/// Recomputes the first sentences of every span but the first, up to the end of the sentence in
/// which `share` is reached.
///
/// Where a seam is cut matters: at a sentence end it helps, inside a sentence it can harm
/// (docs/quality.md). Without `boundary_tokens` the cut falls wherever `share` does. O(tokens · log
/// boundary tokens). Errors: `invalid_argument` for a share outside [0, 1], `tokens_required` where
/// boundaries are asked of a latent fragment.
struct SeamShare {
  static constexpr bool reproducible = true;
  float share = 0.25F;                     ///< part of each later span's tokens
  std::vector<TokenId> boundary_tokens{};  ///< ids that end a sentence or line, ascending
  /// Tokens recomputed beyond the cut: > 0 cuts inside the next sentence.
  std::int64_t past_boundary = 0;

  KVMELD_LAZY [[nodiscard]] Status mark(std::span<const Source> ordered, const Alignment& alignment,
                                        std::span<std::uint8_t> recompute) const {
    if (!(share >= 0.0F && share <= 1.0F))
      return detail::error(ErrorCode::invalid_argument, "SeamShare: share ", share,
                           " is outside [0, 1]");
    if (!std::is_sorted(boundary_tokens.begin(), boundary_tokens.end())) {
      return detail::error(ErrorCode::invalid_argument, "SeamShare: the ", boundary_tokens.size(),
                           " boundary tokens must ascend");
    }
    // tokens of each fragment below this index are recomputed
    std::vector<std::int64_t> cut(ordered.size(), 0);
    for (std::size_t s = 1; s < ordered.size(); ++s) {
      auto end = cut_of(ordered[s]);
      if (!end) return end.error();
      cut[s] = *end;
    }
    for (const AlignmentGroup& group : alignment.groups) {
      for (std::size_t o = 0; o < recompute.size(); ++o) {
        for (const Contribution& c : group.row(o)) {
          if (static_cast<std::int64_t>(c.token) < cut[c.source]) recompute[o] = 1;
        }
      }
    }
    return {};
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SeamShare");
    hasher.value(share);
    hasher.values(detail::span_of(boundary_tokens));
    hasher.value(past_boundary);
  }

 private:
  /// Tokens of the fragment below the index returned are recomputed; the share counts selected
  /// tokens.
  KVMELD_LAZY [[nodiscard]] Result<std::int64_t> cut_of(const Source& source) const {
    const std::int64_t count = source.selected_count();
    // In f32, so that 0.1 of 10 tokens is 1: in f64 the share is a little more than what its
    // decimal says.
    auto cut = static_cast<std::int64_t>(std::ceil(share * static_cast<float>(count)));
    if (cut == 0) return std::int64_t{0};
    if (!boundary_tokens.empty()) {
      if (source.fragment->latent()) {
        return detail::error(ErrorCode::tokens_required, "SeamShare: a fragment of ", count,
                             " tokens has no ids to find boundaries in");
      }
      while (cut < count && !std::binary_search(boundary_tokens.begin(), boundary_tokens.end(),
                                                source.token_id(source.selected_token(cut - 1))))
        ++cut;
    }
    cut = past_boundary < 0 ? (std::max)(cut + (std::max)(past_boundary, -count), std::int64_t{0})
                            : (std::min)(cut + (std::min)(past_boundary, count), count);
    return cut == 0 ? std::int64_t{0} : source.selected_token(cut - 1) + 1;
  }
};

KVMELD_NAMESPACE_END
