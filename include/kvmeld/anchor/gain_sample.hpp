#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/gain.hpp>
#include <kvmeld/anchor/unrotate.hpp>

/// Offsets of one run behind two prefixes, as the sums that fits and scores of gains need.

KVMELD_NAMESPACE_BEGIN

/// What an offset Δ measured behind one prefix says of the offset Δ' behind another: by layer and
/// token, since that is where gains are.
///
/// Each plane counts as much as any other: its sums are divided by its ‖Δ'‖² over the run, and by
/// the layer's planes.
struct GainSample {
  GainQuery query{};
  std::size_t layers = 0;
  std::vector<double> measured{};  ///< (layer, token) ‖Δ‖²
  std::vector<double> both{};      ///< (layer, token) Δ · Δ'
  std::vector<double> wanted{};    ///< (layer, token) ‖Δ'‖²

  /// Adds another run of the same lengths: gains that depend on lengths alone see only the sum.
  KVMELD_LAZY void add(const GainSample& other) {
    for (std::size_t i = 0; i < wanted.size() && i < other.wanted.size(); ++i) {
      measured[i] += other.measured[i];
      both[i] += other.both[i];
      wanted[i] += other.wanted[i];
    }
  }
  /// Σ‖Δ' − g·Δ‖² of a layer; g (token).
  [[nodiscard]] double squared_error(std::size_t layer,
                                     std::span<const double> gains) const noexcept {
    double sum = 0;
    for (std::size_t t = 0; t < gains.size(); ++t) {
      const std::size_t i = layer * gains.size() + t;
      sum += fma(gains[t], fma(gains[t], measured[i], -2 * both[i]), wanted[i]);
    }
    return sum;
  }
  [[nodiscard]] double total(std::size_t layer) const noexcept {
    double sum = 0;
    const std::size_t n = layers == 0 ? 0 : wanted.size() / layers;
    for (std::size_t t = 0; t < n; ++t) sum += wanted[layer * n + t];
    return sum;
  }
};

/// Reads two offsets of one run, from `measure_offset`. Tokens that a layer of either lacks count
/// nothing. O(bytes).
///
/// Errors: `invalid_argument` (no offsets, lengths of the query), `token_count_mismatch`,
/// `geometry_mismatch`, `payload_missing`, `unsupported`.
KVMELD_LAZY [[nodiscard]] Result<GainSample> gain_sample(const Fragment& measured,
                                                         const Fragment& wanted,
                                                         const GainQuery& query) {
  using detail::error;
  if (!measured.valid() || !wanted.valid() || !is_unrotated(measured) || !is_unrotated(wanted)) {
    return error(ErrorCode::invalid_argument, "gain: two offsets from measure_offset are needed");
  }
  KVMELD_TRY(check_same(measured.geometry(), wanted.geometry()));
  if (measured.token_count() != wanted.token_count() || measured.token_count() != query.tokens) {
    return error(ErrorCode::token_count_mismatch, "gain: offsets of ", measured.token_count(),
                 " and ", wanted.token_count(), " tokens for a run of ", query.tokens);
  }
  KVMELD_TRY(gain_features(query).status());
  const Geometry& geometry = measured.geometry();
  const Payload& a = measured.payloads()[0];
  const Payload& b = wanted.payloads()[0];
  const auto rows_a = detail::LocalRows::open(geometry, a, 0);
  if (!rows_a) return rows_a.error();
  const auto rows_b = detail::LocalRows::open(geometry, b, 0);
  if (!rows_b) return rows_b.error();
  const auto n = static_cast<std::size_t>(query.tokens);
  GainSample out{query, geometry.layers.size(), {}, {}, {}};
  for (std::vector<double>* sums : {&out.measured, &out.both, &out.wanted})
    sums->assign(out.layers * n, 0.0);
  alignas(64) float x[1024];
  alignas(64) float y[1024];
  const Isa isa = best_isa();
  std::size_t plane = 0;
  std::vector<double> sums(3 * n);
  for (std::size_t l = 0; l < out.layers; ++l) {
    const auto held_a = detail::held_tokens(a.token_sets[a.layer_set[l]], query.tokens),
               held_b = detail::held_tokens(b.token_sets[b.layer_set[l]], query.tokens);
    std::vector<std::int32_t> both;
    std::set_intersection(held_a.begin(), held_a.end(), held_b.begin(), held_b.end(),
                          std::back_inserter(both));
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::fill(sums.begin(), sums.end(), 0.0);
      double total = 0;
      for (const std::int32_t token : both) {
        const auto t = static_cast<std::size_t>(token);
        const auto row_a = std::lower_bound(held_a.begin(), held_a.end(), token) - held_a.begin(),
                   row_b = std::lower_bound(held_b.begin(), held_b.end(), token) - held_b.begin();
        for (std::int32_t head = 0; head < shape.heads; ++head) {
          rows_a->read(l, plane, shape, token, row_a, head, isa, x);
          rows_b->read(l, plane, shape, token, row_b, head, isa, y);
          for (std::int32_t c = 0; c < shape.channels; ++c) {
            const auto u = static_cast<double>(x[c]), v = static_cast<double>(y[c]);
            sums[3 * t] = fma(u, u, sums[3 * t]);
            sums[3 * t + 1] = fma(u, v, sums[3 * t + 1]);
            sums[3 * t + 2] = fma(v, v, sums[3 * t + 2]);
          }
        }
        total += sums[3 * t + 2];
      }
      ++plane;
      if (total == 0) continue;
      total *= static_cast<double>(geometry.layers[l].planes.size());
      for (std::size_t t = 0; t < n; ++t) {
        out.measured[l * n + t] += sums[3 * t] / total;
        out.both[l * n + t] += sums[3 * t + 1] / total;
        out.wanted[l * n + t] += sums[3 * t + 2] / total;
      }
    }
  }
  return out;
}

/// Errors of identity and of a predictor on samples that it was not fitted to, by layer: what its
/// file must carry. NaN where no sample has an offset in the layer. Errors: `geometry_mismatch`
/// (samples of other layers).
KVMELD_LAZY [[nodiscard]] Result<std::vector<GainScore>> held_out_scores(
    const GainPredictor& predictor, std::span<const GainSample> samples) {
  std::vector<GainScore> out(predictor.layers());
  std::vector<double> totals(out.size());
  for (GainScore& s : out) s = {0, 0};
  for (const GainSample& sample : samples) {
    if (sample.layers != out.size())
      return detail::error(ErrorCode::geometry_mismatch, "gain: a sample of ", sample.layers,
                           " layers, a predictor of ", out.size());
    const auto features = gain_features(sample.query);
    if (!features) return features.error();
    const std::vector<double> ones(static_cast<std::size_t>(sample.query.tokens), 1.0);
    std::vector<double> gains(ones.size());
    for (std::size_t l = 0; l < out.size(); ++l) {
      predictor.evaluate(l, *features, gains);
      out[l].identity += sample.squared_error(l, ones);
      out[l].predictor += sample.squared_error(l, gains);
      totals[l] += sample.total(l);
    }
  }
  for (std::size_t l = 0; l < out.size(); ++l) {
    if (totals[l] > 0) {
      out[l] = {(std::max)(0.0, out[l].identity / totals[l]),
                (std::max)(0.0, out[l].predictor / totals[l])};
    } else {
      out[l] = {};
    }
  }
  return out;
}

KVMELD_NAMESPACE_END
