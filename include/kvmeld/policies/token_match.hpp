#pragma once

/// TokenMatch: fragments aligned by the tokens that they share, by edit script or by neighbours.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/detail/edit_distance.hpp>
#include <kvmeld/detail/select_keys.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/policy.hpp>
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
  [[nodiscard]] std::int64_t matched() const noexcept {
    std::int64_t sum = 0;
    for (const MatchRun& run : runs) sum += run.length;
    return sum;
  }
  /// 1 for equal sequences (two empty ones too), 0 where every token of the longer one is an edit.
  [[nodiscard]] double similarity() const noexcept {
    const std::int64_t longer = (std::max)(a_tokens, b_tokens);
    return longer == 0 ? 1.0 : 1.0 - static_cast<double>(distance) / static_cast<double>(longer);
  }
  /// For every token of a the index of its partner in b, ascending; −1: a hole. O(tokens).
  [[nodiscard]] std::vector<std::int64_t> position_map() const {
    std::vector<std::int64_t> map(static_cast<std::size_t>(a_tokens), -1);
    for (const MatchRun& run : runs) {
      for (std::int32_t i = 0; i < run.length; ++i)
        map[static_cast<std::size_t>(run.a_begin + i)] = run.b_begin + i;
    }
    return map;
  }
  /// The script from b to a.
  [[nodiscard]] EditScript inverse() const {
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
/// The pair is put in order first (shorter, then lexicographically smaller) and the result rotated
/// back, and of equally short scripts, read from the end, the one counts that matches before it
/// substitutes, substitutes before it deletes, and deletes before it inserts. Up to √(cells) / 8
/// edits by diagonals (Ukkonen 1985), O(n + d²) where sequences are alike; beyond, by 64 cells a
/// word (Myers 1999), O(n · m / 64) and 64 MiB; of pairs so large that only a raised `exact_tokens`
/// lets them in, √m · n / 2 bytes for the shorter n and longer m where that is more (500 MB for a
/// million tokens against a million). Pairs with more cells than `exact_tokens` squared: grams that
/// both hold once, their longest ascending chain, and shortest scripts in between; near-linear
/// where sequences are alike. Errors: `invalid_argument` for options out of range, `oversized` for
/// 2³⁰ tokens or more.
[[nodiscard]] inline Result<EditScript> edit_script(std::span<const TokenId> a,
                                                    std::span<const TokenId> b,
                                                    const EditOptions& options = {}) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (options.exact_tokens < 0 || options.exact_tokens > most) {
    return extend::error(ErrorCode::invalid_argument, "edit_script: exact_tokens ",
                         options.exact_tokens, " is not in [0, ", most, "]");
  }
  if (options.seed_tokens < 1 || options.seed_tokens > 1024) {
    return extend::error(ErrorCode::invalid_argument, "edit_script: seeds of ", options.seed_tokens,
                         " tokens; 1 to 1024 are possible");
  }
  const auto n = static_cast<std::int64_t>(a.size()), m = static_cast<std::int64_t>(b.size());
  if (n >= most || m >= most)
    return extend::error(ErrorCode::oversized, "edit_script: ", (std::max)(n, m), " tokens; below ",
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

/// A vector for each token of a fragment, of the caller's own making: hidden states, sentence
/// embeddings, anything with a direction.
struct TokenEmbeddings {
  FragmentId fragment{};
  std::int32_t channels = 0;
  std::vector<float> values{};  ///< (token, channel), finite
};

namespace detail {

/// Rows scaled to length 1, f64, and which token each belongs to. A row of zeros stays one: it has
/// cosine 0 with everything.
struct Directions {
  std::vector<std::int32_t> tokens;
  std::vector<double> values;  ///< (token, channel)
  std::size_t width = 0;

  [[nodiscard]] const double* row(std::size_t i) const noexcept {
    return values.data() + i * width;
  }
};

inline void scale_to_one(double* row, std::size_t width, RowMeasure dot) noexcept {
  const double norm = __builtin_sqrt(dot(row, row, width));
  for (std::size_t c = 0; norm > 0 && c < width; ++c) row[c] /= norm;
}

/// For each row of a the row of b that is its nearest by cosine and whose nearest it is, at least
/// `threshold`; −1: none.
///
/// Nearest: the largest cosine, of equal ones the smaller index. O(|a| · |b| · width).
[[nodiscard]] inline std::vector<std::int32_t> mutual_nearest(std::span<const double* const> a,
                                                              std::span<const double* const> b,
                                                              std::size_t width, double threshold) {
  struct Best {
    double cosine = -INFINITY;
    std::int32_t at = -1;
  };
  std::vector<Best> of_a(a.size()), of_b(b.size());
  const RowMeasure dot = dot_measure();
  constexpr std::size_t tile = 16;  // rows of a that stay near while b streams past
  for (std::size_t first = 0; first < a.size(); first += tile) {
    const std::size_t last = (std::min)(a.size(), first + tile);
    for (std::size_t j = 0; j < b.size(); ++j) {
      for (std::size_t i = first; i < last; ++i) {
        const double cosine = dot(a[i], b[j], width);
        if (cosine > of_a[i].cosine) of_a[i] = {cosine, static_cast<std::int32_t>(j)};
        if (cosine > of_b[j].cosine) of_b[j] = {cosine, static_cast<std::int32_t>(i)};
      }
    }
  }
  std::vector<std::int32_t> partner(a.size(), -1);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::int32_t j = of_a[i].at;
    if (j >= 0 && of_b[static_cast<std::size_t>(j)].at == static_cast<std::int32_t>(i) &&
        of_a[i].cosine >= threshold)
      partner[i] = j;
  }
  return partner;
}

[[nodiscard]] inline Status check_cosine(const char* who, float threshold) {
  if (threshold >= -1.0F && threshold <= 1.0F) return {};
  return error(ErrorCode::invalid_argument, who, ": a threshold of ", threshold,
               " is no cosine; it lies in [-1, 1]");
}

/// The caller's rows as directions. Errors: `token_count_mismatch`, `non_finite`,
/// `invalid_argument` for fewer than one channel.
[[nodiscard]] inline Result<Directions> directions(const char* who, std::span<const float> values,
                                                   std::int32_t channels, std::int64_t tokens) {
  if (channels < 1)
    return error(ErrorCode::invalid_argument, who, ": embeddings of ", channels, " channels");
  if (std::ssize(values) % channels != 0 || std::ssize(values) / channels != tokens) {
    return error(ErrorCode::token_count_mismatch, who, ": ", values.size(), " numbers for ", tokens,
                 " tokens of ", channels, " channels");
  }
  Directions out;
  out.width = static_cast<std::size_t>(channels);
  out.values.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return error(ErrorCode::non_finite, who, ": embedding of token ", i / out.width,
                   " is not finite in channel ", i % out.width);
    }
    out.values[i] = static_cast<double>(values[i]);
  }
  const RowMeasure dot = dot_measure();
  for (std::int64_t t = 0; t < tokens; ++t) {
    out.tokens.push_back(static_cast<std::int32_t>(t));
    scale_to_one(out.values.data() + static_cast<std::size_t>(t) * out.width, out.width, dot);
  }
  return out;
}

/// Keys of a layer as directions, over all heads, un-rotated to position 0. Errors: those of
/// `layer_keys`.
[[nodiscard]] inline Result<Directions> directions(const Source& source, std::int32_t layer) {
  auto keys = layer_keys(source, layer, true);
  if (!keys) return keys.error();
  Directions out{std::move(keys->tokens), std::move(keys->values), keys->width()};
  const RowMeasure dot = dot_measure();
  for (std::size_t t = 0; t < out.tokens.size(); ++t)
    scale_to_one(out.values.data() + t * out.width, out.width, dot);
  return out;
}

}  // namespace detail

/// Pairs rows that are each other's nearest by cosine: for each row of a its partner in b, −1 where
/// it has none.
///
/// One-to-one, and symmetric: the partners of (b, a) are the inverse. Ties go to the smaller index;
/// a row of zeros has cosine 0 with every other. f64 in a fixed order of sums: the same pairs on
/// every machine. O(|a| · |b| · channels). Errors: `invalid_argument` (threshold outside [−1, 1] or
/// NaN, fewer than one channel), `token_count_mismatch` where the rows do not divide, `non_finite`.
/// @param a, b (token, channel)
[[nodiscard]] inline Result<std::vector<std::int32_t>> mutual_neighbours(std::span<const float> a,
                                                                         std::span<const float> b,
                                                                         std::int32_t channels,
                                                                         float threshold) {
  KVMELD_TRY(detail::check_cosine("mutual_neighbours", threshold));
  std::vector<const double*> rows[2];
  detail::Directions made[2];
  for (int side = 0; side < 2; ++side) {
    const std::span<const float> values = side == 0 ? a : b;
    auto side_made = detail::directions("mutual_neighbours", values, channels,
                                        channels < 1 ? 0 : std::ssize(values) / channels);
    if (!side_made) return side_made.error();
    made[side] = *std::move(side_made);
    for (std::size_t t = 0; t < made[side].tokens.size(); ++t)
      rows[side].push_back(made[side].row(t));
  }
  return detail::mutual_nearest(extend::span_of(rows[0]), extend::span_of(rows[1]), made[0].width,
                                static_cast<double>(threshold));
}

namespace detail {

/// Digest of a token's rows in every layer, scales included; none where the bytes are evicted.
/// O(bytes of a token).
[[nodiscard]] inline std::optional<Digest128> content_of(const Source& source, std::int64_t token) {
  const Payload& payload = *source.payload;
  if (payload.bytes == nullptr) return std::nullopt;
  Hasher hasher;
  std::size_t plane = 0;
  const std::vector<LayerShape>& layers = source.fragment->geometry().layers;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const TokenSet& set = payload.token_sets[payload.layer_set[l]];
    std::int64_t row = token;
    bool held = true;
    if (!set.all) {
      const auto at = std::lower_bound(set.present.begin(), set.present.end(),
                                       static_cast<std::int32_t>(token));
      held = at != set.present.end() && *at == token;
      row = at - set.present.begin();
    }
    hasher.value(static_cast<std::uint8_t>(held));
    for (const PlaneShape& shape : layers[l].planes) {
      const auto elements = static_cast<std::size_t>(row_bytes(shape) * shape.heads);
      const auto scales = static_cast<std::size_t>(row_scales(shape)) * sizeof(float) *
                          static_cast<std::size_t>(shape.heads);
      const std::byte* const base = payload.bytes.get();
      const auto index = static_cast<std::size_t>(row);
      if (held) {
        hasher.bytes({base + payload.plane_offsets[plane] + index * elements, elements});
        hasher.bytes({base + payload.scale_offsets[plane] + index * scales, scales});
      }
      ++plane;
    }
  }
  return hasher.digest();
}

/// Whether two tokens are one: by their ids, or, where ids tell nothing, by their rows.
[[nodiscard]] inline bool same_token(const Source& a, std::int64_t i, const Source& b,
                                     std::int64_t j) {
  if (a.fragment == b.fragment && i == j) return true;
  const TokenId id = a.token_id(i);
  if (id != b.token_id(j)) return false;
  if (id >= 0) return true;
  const auto content = content_of(a, i);
  return content.has_value() && content == content_of(b, j);
}

/// Gives tokens of several fragments numbers that are equal where `same_token` says so: ids, and
/// below −1 a number for each content.
class TokenNamer {
 public:
  /// (tokens of the fragment)
  [[nodiscard]] std::vector<TokenId> names(const Source& source) {
    std::vector<TokenId> out(static_cast<std::size_t>(source.fragment->token_count()));
    for (std::size_t t = 0; t < out.size(); ++t) {
      const auto token = static_cast<std::int64_t>(t);
      out[t] = source.token_id(token);
      if (out[t] >= 0) continue;
      out[t] = next_;
      const auto content = content_of(source, token);
      if (content.has_value())
        out[t] = known_.emplace(std::pair(content->high, content->low), next_).first->second;
      if (out[t] == next_) --next_;
    }
    return out;
  }

 private:
  TokenId next_ = -2;
  std::map<std::pair<std::uint64_t, std::uint64_t>, TokenId> known_;
};

}  // namespace detail

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
/// it matches, at the end where none follows. Keys are compared at one layer over all heads,
/// rotated back to position 0; tokens that the layer does not hold match nothing. Keys of unlike
/// tokens share a direction too (cosines of .8 and more), so measure before you lower the threshold
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

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
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
    return extend::error(ErrorCode::unknown_field, "TokenMatch: mode ", static_cast<int>(mode),
                         " unknown to this build");
  }
  void digest(Hasher& hasher) const {
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
      hasher.values(extend::span_of(e.values));
    }
  }

 private:
  using Grid = detail::TokenGrid<>;

  [[nodiscard]] static TokenId id(const Source& source, std::int64_t i) {
    return source.token_id(source.selected_token(i));
  }
  [[nodiscard]] static Status require_ids(const Source& source) {
    if (!source.fragment->latent()) return {};
    return extend::error(ErrorCode::tokens_required, "TokenMatch: fragment ",
                         source.fragment->id().hex(), " has ", source.fragment->token_count(),
                         " tokens without ids; match by index or by neighbours, or concatenate");
  }
  static void finish(Alignment& out, std::int64_t position, TokenId token) {
    out.positions.push_back(position);
    out.tokens.push_back(token);
    out.groups[0].end_row();
  }
  [[nodiscard]] static std::vector<detail::GridToken> selected_tokens(const Source& source) {
    std::vector<detail::GridToken> out(static_cast<std::size_t>(source.selected_count()));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::int64_t token = source.selected_token(static_cast<std::int64_t>(i));
      out[i] = {source.token_id(token), static_cast<std::uint32_t>(token), nullptr};
    }
    return out;
  }

  [[nodiscard]] Result<Alignment> by_index(std::span<const Source> ordered,
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

  [[nodiscard]] Result<Alignment> by_edits(std::span<const Source> ordered,
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
      auto script = edit_script(extend::span_of(of_grid), extend::span_of(of_fragment), edit);
      if (!script) return script.error();
      std::vector<std::int32_t> column_of(tokens.size(), -1);
      for (const MatchRun& run : script->runs) {
        for (std::int32_t i = 0; i < run.length; ++i)
          column_of[static_cast<std::size_t>(run.b_begin + i)] = run.a_begin + i;
      }
      grid.add(static_cast<std::uint32_t>(s), extend::span_of(tokens), extend::span_of(column_of));
    }
    return grid.alignment(first_position);
  }

  [[nodiscard]] Result<detail::Directions> directions_of(const Source& source) const {
    if (embeddings.empty()) return detail::directions(source, layer);
    const auto at = std::lower_bound(
        embeddings.begin(), embeddings.end(), source.fragment->id(),
        [](const TokenEmbeddings& e, const FragmentId& id) { return e.fragment < id; });
    if (at == embeddings.end() || at->fragment != source.fragment->id()) {
      return extend::error(ErrorCode::invalid_argument, "TokenMatch: embeddings of ",
                           embeddings.size(), " fragments, ascending by id, and none of fragment ",
                           source.fragment->id().hex());
    }
    return detail::directions("TokenMatch", extend::span_of(at->values), at->channels,
                              source.fragment->token_count());
  }

  [[nodiscard]] Result<Alignment> by_neighbours(std::span<const Source> ordered,
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
        return extend::error(ErrorCode::geometry_mismatch, "TokenMatch: vectors of ", own.width,
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
          detail::mutual_nearest(extend::span_of(of_grid), extend::span_of(of_fragment), own.width,
                                 static_cast<double>(threshold));
      std::vector<std::int32_t> column_of(tokens.size(), -1);
      for (std::size_t g = 0; g < partner.size(); ++g) {
        if (partner[g] >= 0)
          column_of[static_cast<std::size_t>(token[static_cast<std::size_t>(partner[g])])] =
              column[g];
      }
      grid.add(static_cast<std::uint32_t>(s), extend::span_of(tokens), extend::span_of(column_of));
    }
    return grid.alignment(first_position);
  }
};

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
