#pragma once

/// The parts of a plan that reuses a segment: gaps, layers and taps.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/anchors/detail/blend_rows.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

// What position maps must be, and what stands in for a token that has no counterpart.

namespace detail {

/// Refuses rows that no monotone map has: outside [−1, held), or not above the row before.
[[nodiscard]] inline Status check_rows_ascend(std::span<const std::int32_t> rows, std::int64_t held,
                                              std::size_t part, const char* what) {
  std::int32_t last = -1;
  for (std::size_t t = 0; t < rows.size(); ++t) {
    if (rows[t] == -1) continue;
    if (rows[t] < 0 || rows[t] >= held)
      return extend::error(ErrorCode::invalid_argument, "part ", part, ": row ", rows[t], " of ",
                           what, " of ", held, " tokens");
    if (rows[t] <= last) {
      return extend::error(ErrorCode::invalid_argument, "part ", part, ": token ", t, " has row ",
                           rows[t], " of ", what, ", behind row ", last, "; position maps ascend");
    }
    last = rows[t];
  }
  return {};
}

/// The matched tokens around a hole; moves forward over a map, O(tokens) for all of them.
class GapCursor {
 public:
  explicit GapCursor(std::span<const std::int32_t> rows) noexcept : rows_(rows) {}

  /// Goes to a token, none of which is before the last one.
  void move(std::int64_t token) noexcept {
    for (; at_ < token; ++at_) {
      if (rows_[static_cast<std::size_t>(at_)] >= 0) before_ = at_;
    }
    if (after_ < token) after_ = token;
    while (after_ < std::ssize(rows_) && rows_[static_cast<std::size_t>(after_)] < 0) ++after_;
  }
  /// Whether the hole at the current token lies between two matched ones with at most `window`
  /// tokens in between, on either side.
  [[nodiscard]] bool within(std::int64_t window) const noexcept {
    if (before_ < 0 || after_ >= std::ssize(rows_) || after_ - before_ - 1 > window) return false;
    return row_after() - row_before() - 1 <= window;
  }
  [[nodiscard]] std::int32_t row_before() const noexcept {
    return rows_[static_cast<std::size_t>(before_)];
  }
  [[nodiscard]] std::int32_t row_after() const noexcept {
    return rows_[static_cast<std::size_t>(after_)];
  }
  /// How far the current token is on the way between them, in (0, 1).
  [[nodiscard]] double share() const noexcept {
    return static_cast<double>(at_ - before_) / static_cast<double>(after_ - before_);
  }

 private:
  std::span<const std::int32_t> rows_;
  std::int64_t at_ = 0, before_ = -1, after_ = 0;
};

}  // namespace detail

// What a reuse plan is made of, and what is refused of it.

/// An anchor's offset in a blend.
struct ReuseOffset {
  FragmentId anchor{};  ///< whose it is: the order of the sum, whatever the order given
  /// From `measure_offset`; at least as many tokens as the part, unless `rows` says otherwise.
  Fragment delta{};
  float weight = 1.0F;
  /// (tokens of the part) in place of `weight`; empty: one weight for all.
  std::vector<float> token_weights{};
  /// (tokens of the part) token of the offset that is the same, ascending; −1: a hole. Empty: one
  /// to one.
  std::vector<std::int32_t> rows{};
  /// (layer, token of the part) multiply the weights, from a `GainPredictor`; empty: all 1.
  std::vector<float> gains{};
};

/// A run of tokens in the prompt: a segment, or template text that follows one.
struct ReusePart {
  Fragment base{};            ///< the segment's own, sealed or `unrotated`
  std::int64_t position = 0;  ///< in the prompt, of the part's first token
  std::int64_t first = 0;     ///< token of the base that it starts with
  std::int64_t tokens = -1;   ///< −1: all from `first` on
  /// (tokens of the part) token of the base that is the same, ascending; −1: a hole. For a base
  /// that is nearly the segment's: `first` and `tokens` stay as they are. Empty: one to one.
  std::vector<std::int32_t> rows{};
  /// (tokens of the part) where `rows` is given: what the engine computes at holes; empty: not
  /// known.
  std::vector<TokenId> token_ids{};
  std::vector<ReuseOffset> offsets{};
  bool rotated_only = false;  ///< the base as it is, rotated to its place: asked for, never assumed
};

struct ReuseOptions {
  /// Leading layers whose K/V depend on the token alone: Δ = 0 there.
  std::int32_t context_free_layers = 1;
  bool compute_last = true;  ///< the last token is a hole, since an engine needs its logits
  /// Of the target, where frequencies depend on it; 0: last position + 1.
  std::int64_t context_length = 0;
  /// Longest gap of holes over which offsets are interpolated, on either side of the map.
  std::int32_t interpolation_window = 0;
  /// The same for holes of a base: K/V between two tokens', a guess at what nobody computed.
  bool interpolate_kv = false;
};

/// The policies that a reuse plan carries, for executors that ask for its fuser: a `Sum`.
using ReuseMerger = Merger<SelectAll, ById, Concat, detail::BlendSum, SeamNone>;

/// A plan whose K/V is an approximation: `run` executes it as any other, and its `render_id` is no
/// exact render's.
class ReusePlan : public Plan<ReuseMerger> {
 public:
  ReusePlan(extend::PlanCore core, bool approximate, std::vector<std::int64_t> offsets = {},
            std::vector<std::int64_t> kv = {})
      : Plan<ReuseMerger>({}, std::move(core)),
        approximate_(approximate),
        offsets_(std::move(offsets)),
        kv_(std::move(kv)) {}
  /// Whether anything but the place of a token was changed or left uncorrected: always, unless
  /// there is nothing to blend or turn.
  [[nodiscard]] bool approximate() const noexcept { return approximate_; }
  /// Output tokens whose offset lies between those of two neighbours, ascending. What no window
  /// reaches is in `holes()`.
  [[nodiscard]] std::span<const std::int64_t> interpolated() const noexcept {
    return extend::span_of(offsets_);
  }
  /// Output tokens whose K/V themselves lie between two neighbours': only where `interpolate_kv`
  /// asked for it.
  [[nodiscard]] std::span<const std::int64_t> interpolated_kv() const noexcept {
    return extend::span_of(kv_);
  }

 private:
  bool approximate_ = true;
  std::vector<std::int64_t> offsets_, kv_;
};

namespace detail {

/// One row that a token is summed from, and which offset of its piece it belongs to.
struct ReuseTap {
  Contribution input;
  std::uint32_t offset = 0;  // into ReusePiece::order; meaningless for a base
};

/// One part, checked: its offsets in canonical order, the plan's sources that they are, and what
/// each token is summed from, whatever the layer.
struct ReusePiece {
  const ReusePart* part = nullptr;
  std::int64_t tokens = 0;
  std::uint32_t base = 0;
  std::vector<std::uint32_t> order;    // into part->offsets, ascending by anchor
  std::vector<std::uint32_t> sources;  // (order)
  std::int64_t first_output = 0;
  std::vector<ReuseTap> base_taps, offset_taps;
  std::vector<std::uint32_t> base_begin{0}, offset_begin{0};  // (tokens + 1)
  std::vector<std::uint8_t> unmapped;                         // (tokens) no offset belongs to it

  [[nodiscard]] const ReuseOffset& offset(std::size_t i) const noexcept {
    return part->offsets[order[i]];
  }
  [[nodiscard]] float weight(std::size_t i, std::int64_t token) const noexcept {
    const ReuseOffset& o = offset(i);
    return o.token_weights.empty() ? o.weight : o.token_weights[static_cast<std::size_t>(token)];
  }
  [[nodiscard]] float gain(std::size_t i, std::size_t layer, std::int64_t token) const noexcept {
    const ReuseOffset& o = offset(i);
    return o.gains.empty() ? 1.0F
                           : o.gains[layer * static_cast<std::size_t>(tokens) +
                                     static_cast<std::size_t>(token)];
  }
};

inline Status check_reused(const Fragment& fragment, const Geometry& geometry, const char* what,
                           std::size_t part) {
  if (!fragment.valid())
    return extend::error(ErrorCode::invalid_argument, "part ", part, ": the ", what,
                         " is an empty Fragment");
  KVMELD_TRY(check_same(fragment.geometry(), geometry));
  if (fragment.payloads()[0].bytes == nullptr) {
    return extend::error(ErrorCode::payload_missing, "part ", part, ": the ", what, " ",
                         fragment.id().hex(), " is evicted; fetch it and plan again");
  }
  return {};
}

inline Status check_numbers(std::span<const float> numbers, std::size_t wanted, const char* what,
                            std::size_t part) {
  if (numbers.empty()) return {};
  if (numbers.size() != wanted)
    return extend::error(ErrorCode::token_count_mismatch, "part ", part, ": ", numbers.size(), " ",
                         what, " where there are ", wanted);
  for (const float x : numbers) {
    if (!std::isfinite(x))
      return extend::error(ErrorCode::non_finite, "part ", part, ": one of the ", what,
                           " is not finite");
  }
  return {};
}

inline Status check_offset(const ReuseOffset& offset, std::int64_t tokens, std::size_t layers,
                           std::size_t part) {
  const std::int64_t held = offset.delta.token_count();
  if (!is_unrotated(offset.delta))
    return extend::error(ErrorCode::invalid_argument, "part ", part,
                         ": an offset carries positions; offsets come from measure_offset");
  if (!offset.rows.empty() && std::ssize(offset.rows) != tokens) {
    return extend::error(ErrorCode::token_count_mismatch, "part ", part, ": ", offset.rows.size(),
                         " rows of an offset for ", tokens, " tokens");
  }
  if (offset.rows.empty() && held < tokens) {
    return extend::error(
        ErrorCode::token_count_mismatch, "part ", part, ": an offset of ", held,
        " tokens for a segment of ", tokens,
        "; anchors are at least as long, unless map_positions says which tokens belong together");
  }
  KVMELD_TRY(check_rows_ascend(offset.rows, held, part, "an offset"));
  const auto n = static_cast<std::size_t>(tokens);
  KVMELD_TRY(check_numbers(offset.token_weights, n, "weights of tokens", part));
  KVMELD_TRY(check_numbers(offset.gains, layers * n, "gains", part));
  if (!std::isfinite(offset.weight))
    return extend::error(ErrorCode::non_finite, "part ", part,
                         ": the weight of an offset is not finite");
  return {};
}

}  // namespace detail

// What each layer of a reuse plan sums; layers that hold and weigh the same share one group.

namespace detail {

/// Contributions of one layer: base and offsets where all of them hold the token, a hole where one
/// does not. A base is never taken for a blend in silence: a token without offset is a hole in
/// every layer, those that need none too.
inline AlignmentGroup reuse_group(const extend::PlanCore& core, std::span<const ReusePiece> pieces,
                                  std::size_t layer, std::int32_t context_free_layers) {
  AlignmentGroup group;
  const bool context_free = std::cmp_less(layer, context_free_layers),
             none_needed = std::cmp_equal(core.geometry->layers.size(), context_free_layers);
  const auto held = [&](const Contribution& c) {
    return extend::payload_row(core.sources[c.source].payload(), layer, c.token) >= 0;
  };
  for (const ReusePiece& piece : pieces) {
    const bool bare = piece.part->rotated_only || none_needed;
    for (std::int64_t t = 0; t < piece.tokens; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const std::size_t begin = group.contributions.size();
      bool complete =
          piece.base_begin[at] != piece.base_begin[at + 1] && (bare || piece.unmapped[at] == 0);
      for (std::uint32_t i = piece.base_begin[at]; complete && i < piece.base_begin[at + 1]; ++i) {
        complete = held(piece.base_taps[i].input);
        group.contributions.push_back(piece.base_taps[i].input);
      }
      for (std::uint32_t i = bare || context_free ? piece.offset_begin[at + 1]
                                                  : piece.offset_begin[at];
           complete && i < piece.offset_begin[at + 1]; ++i) {
        Contribution input = piece.offset_taps[i].input;
        input.weight = extend::rounded_product(input.weight,
                                               piece.gain(piece.offset_taps[i].offset, layer, t));
        if (input.weight == 0.0F) continue;
        complete = held(input);
        group.contributions.push_back(input);
      }
      if (!complete) group.contributions.resize(begin);
      group.end_row();
    }
  }
  return group;
}

/// Whether two layers' offsets enter by the same gains.
inline bool same_gains(std::span<const ReusePiece> pieces, std::size_t a, std::size_t b) {
  for (const ReusePiece& piece : pieces) {
    const auto n = static_cast<std::size_t>(piece.tokens);
    for (const std::uint32_t i : piece.order) {
      const float* const gains = piece.part->offsets[i].gains.data();
      if (gains != nullptr && !std::equal(gains + a * n, gains + (a + 1) * n, gains + b * n))
        return false;
    }
  }
  return true;
}

/// Groups of layers for all pieces. Layers share one where the sources hold the same tokens in
/// both, and the base alone or the same gains enter.
inline Alignment reuse_alignment(const extend::PlanCore& core, std::span<const ReusePiece> pieces,
                                 std::int32_t context_free_layers) {
  struct Key {
    bool context_free = false;
    std::size_t layer = 0;                // the first of the group
    std::vector<const TokenSet*> sets{};  // (sources)
  };
  Alignment alignment;
  std::vector<Key> keys;  // (groups)
  const std::size_t layers = core.geometry->layers.size();
  for (std::size_t l = 0; l < layers; ++l) {
    Key key{std::cmp_less(l, context_free_layers), l, {}};
    for (const extend::PlanSource& source : core.sources)
      key.sets.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    const auto alike = [&](const Key& other) {
      return other.context_free == key.context_free &&
             std::equal(other.sets.begin(), other.sets.end(), key.sets.begin(), key.sets.end(),
                        [](const TokenSet* a, const TokenSet* b) { return *a == *b; }) &&
             (key.context_free || same_gains(pieces, other.layer, l));
    };
    const auto g =
        static_cast<std::size_t>(std::find_if(keys.begin(), keys.end(), alike) - keys.begin());
    if (g == keys.size()) {
      keys.push_back(std::move(key));
      alignment.groups.push_back(reuse_group(core, pieces, l, context_free_layers));
      alignment.groups.back().layers.layers.assign(layers, 0);
    }
    alignment.groups[g].layers.layers[l] = 1;
  }
  return alignment;
}

}  // namespace detail

// What each token of a part is summed from: base rows, then offset rows, with their weights.

namespace detail {

/// A row of the part's base for every token; between two of them where a hole may be interpolated,
/// none where not.
inline void add_base_taps(ReusePiece& piece, std::int64_t window,
                          std::vector<std::int64_t>& interpolated) {
  const std::span<const std::int32_t> rows = extend::span_of(piece.part->rows);
  GapCursor gap(rows);
  const auto tap = [&](std::int64_t row, double weight) {
    piece.base_taps.push_back(
        {{piece.base, static_cast<std::uint32_t>(row), static_cast<float>(weight)}, 0});
  };
  for (std::int64_t t = 0; t < piece.tokens; ++t) {
    const std::int64_t row =
        rows.empty() ? piece.part->first + t : rows[static_cast<std::size_t>(t)];
    if (row >= 0) {
      tap(row, 1);
    } else if (gap.move(t); window > 0 && gap.within(window)) {
      tap(gap.row_before(), 1 - gap.share());
      tap(gap.row_after(), gap.share());
      interpolated.push_back(piece.first_output + t);
    }
    piece.base_begin.push_back(static_cast<std::uint32_t>(piece.base_taps.size()));
  }
}

/// The offset rows of every token.
///
/// Where all anchors of weight map the token: each one's row by its weight. Where some do: those,
/// and their weights grow by one factor, so that they add up to what all did. Where none does: of
/// the anchors that have it in a gap of at most `window` the two heaviest (of equals the smaller
/// id), each by its two neighbours' rows, weights likewise. Else nothing, and the token is
/// unmapped. Factors in f64, once rounded to f32. Errors: `invalid_argument` where weights below 0
/// would have to be shared out.
inline Status add_offset_taps(ReusePiece& piece, std::int64_t window, std::size_t part,
                              std::vector<std::int64_t>& interpolated) {
  const std::size_t n = piece.order.size();
  std::vector<GapCursor> gaps;
  for (std::size_t i = 0; i < n; ++i) gaps.emplace_back(extend::span_of(piece.offset(i).rows));
  const auto row_of = [&](std::size_t i, std::int64_t t) -> std::int64_t {
    const std::vector<std::int32_t>& rows = piece.offset(i).rows;
    return rows.empty() ? t : rows[static_cast<std::size_t>(t)];
  };
  const auto tap = [&](std::size_t i, std::int64_t row, float weight) {
    piece.offset_taps.push_back({{piece.sources[i], static_cast<std::uint32_t>(row), weight},
                                 static_cast<std::uint32_t>(i)});
  };
  piece.unmapped.assign(static_cast<std::size_t>(piece.tokens), 0);
  for (std::int64_t t = 0; t < piece.tokens; ++t) {
    double all = 0, mapped = 0;
    std::size_t with_row = 0, with_weight = 0;
    bool negative = false;
    for (std::size_t i = 0; i < n; ++i) {
      const float weight = piece.weight(i, t);
      if (weight == 0.0F) continue;
      ++with_weight;
      negative = negative || weight < 0.0F;
      all += static_cast<double>(weight);
      if (row_of(i, t) < 0) continue;
      ++with_row;
      mapped += static_cast<double>(weight);
    }
    if (negative && with_row < with_weight) {
      return extend::error(
          ErrorCode::invalid_argument, "part ", part, ": token ", t, " has ",
          with_weight - with_row, " anchors of ", with_weight,
          " without a row of it, and a weight below 0; what is missing is shared out "
          "among weights of at least 0 only");
    }
    if (with_row > 0 || with_weight == 0) {
      for (std::size_t i = 0; i < n; ++i) {
        const float weight = piece.weight(i, t);
        if (weight == 0.0F || row_of(i, t) < 0) continue;
        tap(i, row_of(i, t),
            with_row == with_weight
                ? weight
                : static_cast<float>(static_cast<double>(weight) * (all / mapped)));
      }
    } else {
      std::size_t best[2] = {n, n};
      for (std::size_t i = 0; i < n && window > 0; ++i) {
        const float weight = piece.weight(i, t);
        if (weight == 0.0F) continue;
        gaps[i].move(t);
        if (!gaps[i].within(window)) continue;
        if (best[0] == n || weight > piece.weight(best[0], t)) {
          best[1] = std::exchange(best[0], i);
        } else if (best[1] == n || weight > piece.weight(best[1], t)) {
          best[1] = i;
        }
      }
      if (best[1] < best[0]) std::swap(best[0], best[1]);  // summed in the order of anchors
      double chosen = 0;
      for (const std::size_t i : best)
        chosen += i < n ? static_cast<double>(piece.weight(i, t)) : 0.0;
      for (const std::size_t i : best) {
        if (i == n) continue;
        const double weight = static_cast<double>(piece.weight(i, t)) * (all / chosen),
                     share = gaps[i].share();
        tap(i, gaps[i].row_before(), static_cast<float>(weight * (1 - share)));
        tap(i, gaps[i].row_after(), static_cast<float>(weight * share));
      }
      if (best[0] < n) {
        interpolated.push_back(piece.first_output + t);
      } else {
        piece.unmapped[static_cast<std::size_t>(t)] = 1;
      }
    }
    piece.offset_begin.push_back(static_cast<std::uint32_t>(piece.offset_taps.size()));
  }
  return {};
}

}  // namespace detail

// Parts become pieces: checked, their offsets in canonical order, their fragments sources of the
// plan.

namespace detail {

/// What a reuse plan comes to, part by part.
struct ReuseBuild {
  extend::PlanCore core;
  std::vector<ReusePiece> pieces;                           // parts that have tokens
  std::vector<std::int64_t> interpolated, interpolated_kv;  // outputs
};

inline Status check_reuse_options(const ReuseOptions& options, const Geometry& geometry) {
  if (options.context_free_layers < 0 ||
      options.context_free_layers > std::ssize(geometry.layers)) {
    return extend::error(ErrorCode::invalid_argument, options.context_free_layers,
                         " context-free layers of ", geometry.layers.size());
  }
  if (options.interpolation_window < 0) {
    return extend::error(ErrorCode::invalid_argument, "an interpolation window of ",
                         options.interpolation_window,
                         " tokens; 0 leaves every hole to the engine");
  }
  return {};
}

/// Tokens of a part, from its map or from what it says of itself. Errors: see `plan_reuse`.
inline Result<std::int64_t> count_tokens(const ReusePart& part, std::size_t p) {
  const std::int64_t tokens = !part.rows.empty() ? std::ssize(part.rows)
                              : part.tokens < 0  ? part.base.token_count() - part.first
                                                 : part.tokens;
  if (!part.rows.empty()) {
    if (part.first != 0 || (part.tokens >= 0 && part.tokens != tokens)) {
      return extend::error(ErrorCode::invalid_argument, "part ", p, ": ", part.tokens,
                           " tokens from ", part.first, " on beside a map of ", tokens,
                           " rows; a map says both");
    }
    KVMELD_TRY(check_rows_ascend(part.rows, part.base.token_count(), p, "a base"));
  } else if (part.first < 0 || tokens < 0 || part.first > part.base.token_count() ||
             tokens > part.base.token_count() - part.first) {
    return extend::error(ErrorCode::invalid_argument, "part ", p, ": ", tokens, " tokens from ",
                         part.first, " on of a base of ", part.base.token_count());
  }
  if (part.position < 0 || part.position > max_position)
    return extend::error(ErrorCode::invalid_argument, "part ", p, ": position ", part.position);
  if (!part.token_ids.empty() && (part.rows.empty() || std::ssize(part.token_ids) != tokens)) {
    return extend::error(ErrorCode::token_count_mismatch, "part ", p, ": ", part.token_ids.size(),
                         " token ids beside a map of ", part.rows.size(), " rows");
  }
  return tokens;
}

/// A part's offsets in ascending order of anchor, checked.
inline Result<std::vector<std::uint32_t>> order_offsets(const ReusePart& part, std::int64_t tokens,
                                                        const Geometry& geometry, std::size_t p) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < part.offsets.size(); ++i) {
    KVMELD_TRY(check_reused(part.offsets[i].delta, geometry, "offset", p));
    KVMELD_TRY(check_offset(part.offsets[i], tokens, geometry.layers.size(), p));
    order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return part.offsets[a].anchor < part.offsets[b].anchor;
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const FragmentId& id = part.offsets[order[i]].anchor;
    if (part.offsets[order[i - 1]].anchor == id)
      return extend::error(ErrorCode::invalid_argument, "part ", p, ": anchor ", id.hex(),
                           " twice");
  }
  return order;
}

/// The number of a fragment among a plan's sources, which it joins where it is none yet.
inline std::uint32_t source_number(extend::PlanCore& core, const Fragment& fragment) {
  std::size_t s = 0;
  while (s < core.sources.size() && core.sources[s].fragment.body() != fragment.body()) ++s;
  if (s == core.sources.size()) core.sources.push_back({fragment, 0, 1.0F, is_unrotated(fragment)});
  return static_cast<std::uint32_t>(s);
}

/// Positions and ids of a piece's tokens, as the next outputs.
inline void add_outputs(extend::PlanCore& core, const ReusePart& part, std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const std::int64_t row = part.rows.empty() ? part.first + t : part.rows[at];
    core.positions.push_back(part.position + t);
    core.tokens.push_back(!part.token_ids.empty() ? part.token_ids[at]
                          : row < 0               ? -1
                                                  : part.base.token_id(row));
  }
}

/// Adds part number `p`, behind those before it. Errors: see `plan_reuse`.
inline Status add_part(ReuseBuild& build, const ReusePart& part, std::size_t p,
                       const ReuseOptions& options) {
  extend::PlanCore& core = build.core;
  KVMELD_TRY(check_reused(part.base, *core.geometry, "base", p));
  const auto tokens = count_tokens(part, p);
  if (!tokens) return tokens.error();
  if (*tokens == 0) return {};
  if (!core.positions.empty() && part.position <= core.positions.back()) {
    return extend::error(ErrorCode::duplicate_position, "part ", p, " starts at position ",
                         part.position, ", behind position ", core.positions.back());
  }
  if (part.offsets.empty() != part.rotated_only) {
    return extend::error(
        ErrorCode::invalid_argument, "part ", p, " has ", part.offsets.size(),
        " offsets; say rotated_only where, and only where, the base alone is meant");
  }
  auto order = order_offsets(part, *tokens, *core.geometry, p);
  if (!order) return order.error();
  ReusePiece piece;
  piece.part = &part;
  piece.tokens = *tokens;
  piece.order = *std::move(order);
  piece.base = source_number(core, part.base);
  for (const std::uint32_t i : piece.order)
    piece.sources.push_back(source_number(core, part.offsets[i].delta));
  piece.first_output = core.outputs();
  add_outputs(core, part, piece.tokens);
  add_base_taps(piece, options.interpolate_kv ? options.interpolation_window : 0,
                build.interpolated_kv);
  KVMELD_TRY(add_offset_taps(piece, options.interpolation_window, p, build.interpolated));
  build.pieces.push_back(std::move(piece));
  return {};
}

}  // namespace detail

}  // namespace anchors

KVMELD_NAMESPACE_END
