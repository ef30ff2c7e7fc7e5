#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/align/aligner.hpp>
#include <kvmeld/align/detail/token_grid.hpp>
#include <kvmeld/align/edit_script.hpp>
#include <kvmeld/align/neighbours.hpp>
#include <kvmeld/align/same_token.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// What makes two tokens of different fragments the same token.
enum class MatchMode : std::uint8_t {
  index,          ///< the i-th token of every span; ids are not compared
  common_prefix,  ///< equal tokens at equal index, up to the first place where any span differs
  edit_distance,  ///< equal tokens that a shortest edit script keeps
  /// Each other's nearest by cosine of keys, or of the caller's embeddings; ids are not compared.
  neighbours,
};

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(MatchMode value) noexcept {
  switch (value) {
    case MatchMode::index:
      return "index";
    case MatchMode::common_prefix:
      return "common_prefix";
    case MatchMode::edit_distance:
      return "edit_distance";
    case MatchMode::neighbours:
      return "neighbours";
  }
  return "unknown";
}

/// Lets matched tokens share an output token; unmatched tokens keep their own.
///
/// Tokens are equal where their ids are, and, since equal placeholders (`Geometry::placeholders`)
/// may be two pictures, where their K/V are bit by bit the same. Equal output for every input order
/// of the fragments, since it sees them in canonical order. `edit_distance` and `neighbours` grow
/// one grid of output tokens: each fragment in turn is matched with the tokens that founded the
/// grid's columns, joins those that it matches, and adds its other tokens in front of the next one
/// it matches, at the end where none follows. Keys are compared at one layer over all heads, turned
/// back to position 0; tokens that the layer does not hold match nothing. Keys of unlike tokens
/// share a direction too (cosines of .8 and more), so measure before you lower the threshold
/// (docs/policies.md). Embeddings, where given, are read instead; replicas give the same ones or
/// none: they are part of the merger's digest. O(tokens); by edit distance `edit_script` of grid
/// and fragment for each fragment; by neighbours O(grid · tokens · channels) for each fragment, in
/// f64, and 8 bytes a key channel while the plan is made. Errors: `tokens_required` for latent
/// fragments in `common_prefix` and `edit_distance` mode, those of `edit_script`;
/// `invalid_argument` (threshold no cosine, layer not there, a fragment without embeddings),
/// `token_count_mismatch` and `non_finite` (embeddings), `geometry_mismatch` where vectors of two
/// fragments differ in width.
struct TokenMatch {
  static constexpr bool reproducible = true;
  MatchMode mode = MatchMode::index;
  EditOptions edit{};       ///< of `edit_distance`
  float threshold = 0.95F;  ///< of `neighbours`: smallest cosine of a match
  std::int32_t layer = -1;  ///< of `neighbours`: whose keys are compared; −1: ⌊layers / 2⌋
  /// Of `neighbours`: ascending by fragment; empty: keys are compared.
  std::vector<TokenEmbeddings> embeddings{};

  KVMELD_LAZY [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                                    std::int64_t first_position) const {
    switch (mode) {
      case MatchMode::index:
      case MatchMode::common_prefix:
        return by_index(ordered, first_position);
      case MatchMode::edit_distance:
        return by_edits(ordered, first_position);
      case MatchMode::neighbours:
        return by_neighbours(ordered, first_position);
    }
    return detail::error(ErrorCode::unknown_field, "TokenMatch: mode ", static_cast<int>(mode),
                         " unknown to this build");
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.TokenMatch");
    hasher.value(mode);
    if (mode == MatchMode::edit_distance) {
      hasher.value(edit.exact_tokens);
      hasher.value(edit.seed_tokens);
    }
    if (mode != MatchMode::neighbours) return;
    hasher.value(threshold);
    hasher.value(layer);
    hasher.value(static_cast<std::uint64_t>(embeddings.size()));
    for (const TokenEmbeddings& e : embeddings) {
      hasher.bytes(std::as_bytes(std::span(e.fragment.bytes)));
      hasher.value(e.channels);
      hasher.values(detail::span_of(e.values));
    }
  }

 private:
  using Grid = detail::TokenGrid<>;

  KVMELD_LAZY [[nodiscard]] static TokenId id(const Source& source, std::int64_t i) {
    return source.token_id(source.selected_token(i));
  }
  KVMELD_LAZY [[nodiscard]] static Status require_ids(const Source& source) {
    if (!source.fragment->latent()) return {};
    return detail::error(ErrorCode::tokens_required, "TokenMatch: fragment ",
                         source.fragment->id().hex(), " has ", source.fragment->token_count(),
                         " tokens without ids; match by index or by neighbours, or concatenate");
  }
  KVMELD_LAZY static void finish(Alignment& out, std::int64_t position, TokenId token) {
    out.positions.push_back(position);
    out.tokens.push_back(token);
    out.groups[0].end_row();
  }
  KVMELD_LAZY [[nodiscard]] static std::vector<detail::GridToken> selected_tokens(
      const Source& source) {
    std::vector<detail::GridToken> out(static_cast<std::size_t>(source.selected_count()));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::int64_t token = source.selected_token(static_cast<std::int64_t>(i));
      out[i] = {source.token_id(token), static_cast<std::uint32_t>(token), nullptr};
    }
    return out;
  }

  KVMELD_LAZY [[nodiscard]] Result<Alignment> by_index(std::span<const Source> ordered,
                                                       std::int64_t first_position) const {
    std::int64_t shared = 0;
    for (const Source& source : ordered) shared = (std::max)(shared, source.selected_count());
    for (const Source& source : ordered) {
      if (mode == MatchMode::index) break;
      KVMELD_TRY(require_ids(source));
      shared = (std::min)(shared, source.selected_count());
      for (std::int64_t i = 0; i < shared; ++i) {
        if (!detail::same_token(source, source.selected_token(i), ordered[0],
                                ordered[0].selected_token(i)))
          shared = i;
      }
    }
    Alignment out;
    out.groups.resize(1);
    for (std::int64_t i = 0; i < shared; ++i) {
      TokenId common = -1;
      for (std::size_t s = 0; s < ordered.size(); ++s) {
        if (i >= ordered[s].selected_count()) continue;
        out.groups[0].contributions.push_back(
            {static_cast<std::uint32_t>(s),
             static_cast<std::uint32_t>(ordered[s].selected_token(i)), 1.0F});
        const TokenId here = id(ordered[s], i);
        common = out.groups[0].contributions.size() == out.groups[0].row_begin.back() + 1U ||
                         here == common
                     ? here
                     : -1;
      }
      finish(out, first_position++, common);
    }
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      for (std::int64_t i = shared; i < ordered[s].selected_count(); ++i) {
        out.groups[0].contributions.push_back(
            {static_cast<std::uint32_t>(s),
             static_cast<std::uint32_t>(ordered[s].selected_token(i)), 1.0F});
        finish(out, first_position++, id(ordered[s], i));
      }
    }
    return out;
  }

  KVMELD_LAZY [[nodiscard]] Result<Alignment> by_edits(std::span<const Source> ordered,
                                                       std::int64_t first_position) const {
    Grid grid;
    std::vector<TokenId> of_grid, of_fragment;
    detail::TokenNamer namer;
    std::vector<std::vector<TokenId>> names;  // (sources, tokens)
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      KVMELD_TRY(require_ids(ordered[s]));
      const std::vector<detail::GridToken> tokens = selected_tokens(ordered[s]);
      of_grid.clear();
      of_fragment.clear();
      for (const auto& column : grid.columns())
        of_grid.push_back(names[column.source][column.founder.token]);
      names.push_back(namer.names(ordered[s]));
      for (const detail::GridToken& token : tokens)
        of_fragment.push_back(names.back()[token.token]);
      auto script = edit_script(detail::span_of(of_grid), detail::span_of(of_fragment), edit);
      if (!script) return script.error();
      std::vector<std::int32_t> column_of(tokens.size(), -1);
      for (const MatchRun& run : script->runs) {
        for (std::int32_t i = 0; i < run.length; ++i)
          column_of[static_cast<std::size_t>(run.b_begin + i)] = run.a_begin + i;
      }
      grid.add(static_cast<std::uint32_t>(s), detail::span_of(tokens), detail::span_of(column_of));
    }
    return grid.alignment(first_position);
  }

  KVMELD_LAZY [[nodiscard]] Result<detail::Directions> directions_of(const Source& source) const {
    if (embeddings.empty()) return detail::directions(source, layer);
    const auto at = std::lower_bound(
        embeddings.begin(), embeddings.end(), source.fragment->id(),
        [](const TokenEmbeddings& e, const FragmentId& id) { return e.fragment < id; });
    if (at == embeddings.end() || at->fragment != source.fragment->id()) {
      return detail::error(ErrorCode::invalid_argument, "TokenMatch: embeddings of ",
                           embeddings.size(), " fragments, ascending by id, and none of fragment ",
                           source.fragment->id().hex());
    }
    return detail::directions("TokenMatch", detail::span_of(at->values), at->channels,
                              source.fragment->token_count());
  }

  KVMELD_LAZY [[nodiscard]] Result<Alignment> by_neighbours(std::span<const Source> ordered,
                                                            std::int64_t first_position) const {
    KVMELD_TRY(detail::check_cosine("TokenMatch", threshold));
    Grid grid;
    std::vector<detail::Directions> kept;  // columns point into it
    kept.reserve(ordered.size());
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      auto made = directions_of(ordered[s]);
      if (!made) return made.error();
      kept.push_back(*std::move(made));
      const detail::Directions& own = kept.back();
      if (own.width != kept.front().width) {
        return detail::error(ErrorCode::geometry_mismatch, "TokenMatch: vectors of ", own.width,
                             " channels beside vectors of ", kept.front().width);
      }
      std::vector<detail::GridToken> tokens = selected_tokens(ordered[s]);
      std::vector<const double*> of_grid, of_fragment;
      std::vector<std::int32_t> column, token;
      for (std::size_t c = 0; c < grid.columns().size(); ++c) {
        if (grid.columns()[c].founder.row == nullptr) continue;
        of_grid.push_back(grid.columns()[c].founder.row);
        column.push_back(static_cast<std::int32_t>(c));
      }
      std::size_t at = 0;  // both lists of tokens ascend
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        while (at < own.tokens.size() &&
               static_cast<std::uint32_t>(own.tokens[at]) < tokens[t].token)
          ++at;
        if (at == own.tokens.size() ||
            static_cast<std::uint32_t>(own.tokens[at]) != tokens[t].token)
          continue;
        tokens[t].row = own.row(at);
        of_fragment.push_back(tokens[t].row);
        token.push_back(static_cast<std::int32_t>(t));
      }
      const std::vector<std::int32_t> partner =
          detail::mutual_nearest(detail::span_of(of_grid), detail::span_of(of_fragment), own.width,
                                 static_cast<double>(threshold));
      std::vector<std::int32_t> column_of(tokens.size(), -1);
      for (std::size_t g = 0; g < partner.size(); ++g) {
        if (partner[g] >= 0)
          column_of[static_cast<std::size_t>(token[static_cast<std::size_t>(partner[g])])] =
              column[g];
      }
      grid.add(static_cast<std::uint32_t>(s), detail::span_of(tokens), detail::span_of(column_of));
    }
    return grid.alignment(first_position);
  }
};

KVMELD_NAMESPACE_END
