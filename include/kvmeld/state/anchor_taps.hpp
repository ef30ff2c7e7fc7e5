#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/anchor_parts.hpp>

/// What each token of a part is summed from: base rows, then offset rows, with their weights.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A row of the part's base for every token; between two of them where a hole may be interpolated,
/// none where not.
KVMELD_LAZY void add_base_taps(ReusePiece& piece, std::int64_t window,
                               std::vector<std::int64_t>& interpolated) {
  const std::span<const std::int32_t> rows = span_of(piece.part->rows);
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
KVMELD_LAZY Status add_offset_taps(ReusePiece& piece, std::int64_t window, std::size_t part,
                                   std::vector<std::int64_t>& interpolated) {
  const std::size_t n = piece.order.size();
  std::vector<GapCursor> gaps;
  for (std::size_t i = 0; i < n; ++i) gaps.emplace_back(span_of(piece.offset(i).rows));
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
      return error(ErrorCode::invalid_argument, "part ", part, ": token ", t, " has ",
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
KVMELD_NAMESPACE_END
