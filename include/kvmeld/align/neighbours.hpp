#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/select_keys.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

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
KVMELD_LAZY [[nodiscard]] std::vector<std::int32_t> mutual_nearest(std::span<const double* const> a,
                                                                   std::span<const double* const> b,
                                                                   std::size_t width,
                                                                   double threshold) {
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

KVMELD_LAZY [[nodiscard]] Status check_cosine(const char* who, float threshold) {
  if (threshold >= -1.0F && threshold <= 1.0F) return {};
  return error(ErrorCode::invalid_argument, who, ": a threshold of ", threshold,
               " is no cosine; it lies in [-1, 1]");
}

/// The caller's rows as directions. Errors: `token_count_mismatch`, `non_finite`,
/// `invalid_argument` for fewer than one channel.
KVMELD_LAZY [[nodiscard]] Result<Directions> directions(const char* who,
                                                        std::span<const float> values,
                                                        std::int32_t channels,
                                                        std::int64_t tokens) {
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

/// Keys of a layer as directions, over all heads, turned back to position 0. Errors: those of
/// `layer_keys`.
KVMELD_LAZY [[nodiscard]] Result<Directions> directions(const Source& source, std::int32_t layer) {
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
KVMELD_LAZY [[nodiscard]] Result<std::vector<std::int32_t>> mutual_neighbours(
    std::span<const float> a, std::span<const float> b, std::int32_t channels, float threshold) {
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
  return detail::mutual_nearest(detail::span_of(rows[0]), detail::span_of(rows[1]), made[0].width,
                                static_cast<double>(threshold));
}

KVMELD_NAMESPACE_END
