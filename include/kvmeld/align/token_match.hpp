#pragma once

#include <algorithm>

#include <kvmeld/align/aligner.hpp>

KVMELD_NAMESPACE_BEGIN

/// What makes two tokens of different fragments the same token.
enum class MatchMode : std::uint8_t {
  index,          ///< the i-th token of every span; ids are not compared
  common_prefix,  ///< equal ids at equal index, up to the first place where any span differs
};

/// Lets matched tokens share an output token; unmatched tokens keep their own.
///
/// Equal output for every input order of the fragments, since it sees them in canonical order. O(tokens).
/// Errors: `tokens_required` for latent fragments in `common_prefix` mode.
struct TokenMatch {
  static constexpr bool reproducible = true;
  MatchMode mode = MatchMode::index;

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered, std::int64_t first_position) const {
    if (mode > MatchMode::common_prefix) return detail::error(ErrorCode::unknown_field, "TokenMatch: mode unknown to this build");
    std::int64_t longest = 0;
    std::int64_t shared = ordered.empty() ? 0 : ordered[0].selected_count();
    for (const Source& source : ordered) longest = (std::max)(longest, source.selected_count());
    if (mode == MatchMode::common_prefix) {
      for (const Source& source : ordered) {
        if (source.fragment->latent()) {
          return detail::error(ErrorCode::tokens_required, "TokenMatch: fragment ", source.fragment->id().hex(), " has ",
                               source.fragment->token_count(), " tokens without ids; match by index, or concatenate");
        }
        shared = (std::min)(shared, source.selected_count());
        for (std::int64_t i = 0; i < shared; ++i) {
          if (id(source, i) != id(ordered[0], i)) shared = i;
        }
      }
    } else {
      shared = longest;
    }
    Alignment out;
    out.groups.resize(1);
    for (std::int64_t i = 0; i < shared; ++i) {
      TokenId common = -1;
      for (std::size_t s = 0; s < ordered.size(); ++s) {
        if (i >= ordered[s].selected_count()) continue;
        out.groups[0].contributions.push_back(
            {static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(ordered[s].selected_token(i)), 1.0F});
        const TokenId here = id(ordered[s], i);
        common = out.groups[0].contributions.size() == out.groups[0].row_begin.back() + 1U || here == common ? here : -1;
      }
      finish(out, first_position++, common);
    }
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      for (std::int64_t i = shared; i < ordered[s].selected_count(); ++i) {
        out.groups[0].contributions.push_back(
            {static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(ordered[s].selected_token(i)), 1.0F});
        finish(out, first_position++, id(ordered[s], i));
      }
    }
    return out;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.TokenMatch");
    hasher.value(mode);
  }

 private:
  [[nodiscard]] static TokenId id(const Source& source, std::int64_t i) { return source.token_id(source.selected_token(i)); }
  static void finish(Alignment& out, std::int64_t position, TokenId token) {
    out.positions.push_back(position);
    out.tokens.push_back(token);
    out.groups[0].end_row();
  }
};

KVMELD_NAMESPACE_END
