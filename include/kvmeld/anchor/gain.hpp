#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/gain_lstm.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/status.hpp>

/// How much of an offset is left where another length of text stands before it than where it was
/// measured.

KVMELD_NAMESPACE_BEGIN

/// A run of tokens whose offset was measured behind one prefix and is wanted behind another.
struct GainQuery {
  /// Tokens that stood before the run when its offset was measured.
  std::int64_t measured_behind = 0;
  std::int64_t placed_behind = 0;  ///< tokens that stand before it now
  std::int64_t tokens = 0;         ///< of the run
};

/// What a predictor reads of each token: p tokens measured behind, q placed behind, token t of the
/// run. In this order: ln((q + 1)/(p + 1)); its absolute value; ln(p + 1)/8; ln(t + 1)/8; the share
/// p/(p + t + 1) that the prefix had of what the token saw; how much larger the share q/(q + t + 1)
/// is now.
inline constexpr std::size_t gain_feature_count = 6;

/// (token, feature). Errors: `invalid_argument` for counts below 0 or above `max_position`;
/// `oversized` for runs above 2²⁴ tokens.
KVMELD_LAZY [[nodiscard]] Result<std::vector<double>> gain_features(const GainQuery& query) {
  for (const std::int64_t n : {query.measured_behind, query.placed_behind, query.tokens}) {
    if (n < 0 || n > max_position)
      return detail::error(ErrorCode::invalid_argument, "gain: a length of ", n,
                           " tokens is not in [0, ", max_position, "]");
  }
  if (query.tokens > (std::int64_t{1} << 24))
    return detail::error(ErrorCode::oversized, "gain: a run of ", query.tokens,
                         " tokens; at most 2^24 are possible");
  std::vector<double> out;
  out.reserve(static_cast<std::size_t>(query.tokens) * gain_feature_count);
  const auto p = static_cast<double>(query.measured_behind),
             q = static_cast<double>(query.placed_behind);
  const double ratio = math::log((q + 1) / (p + 1)), length = math::log(p + 1) / 8;
  for (std::int64_t i = 0; i < query.tokens; ++i) {
    const auto t = static_cast<double>(i + 1);
    const double share = p / (p + t);
    out.insert(out.end(),
               {ratio, std::abs(ratio), length, math::log(t) / 8, share, q / (q + t) - share});
  }
  return out;
}

enum class GainKind : std::uint8_t {
  identity,  ///< 1 everywhere
  ridge,     ///< linear in the features
  lstm,      ///< a small LSTM over the tokens
};

/// Why a layer's gains are what they are.
enum class GainReason : std::uint8_t {
  predicted,   ///< the predictor erred less than identity on what it was not fitted to
  identity,    ///< the predictor is the identity
  no_score,    ///< nothing says how it errs on what it was not fitted to: 1
  not_better,  ///< identity erred as little there or less: 1
};
[[nodiscard]] constexpr std::string_view to_string(GainReason reason) noexcept {
  constexpr std::array<std::string_view, 4> names = {"predicted", "identity", "no_score",
                                                     "not_better"};
  return static_cast<std::size_t>(reason) < names.size() ? names[static_cast<std::size_t>(reason)]
                                                         : "unknown";
}

/// Σ‖Δ' − g·Δ‖² ÷ Σ‖Δ'‖² of one layer on held-out runs; NaN: not measured.
struct GainScore {
  double identity = __builtin_nan("");
  double predictor = __builtin_nan("");
};

/// Predicts gains by layer and token, each layer by parameters of its own; immutable, computed in
/// f64 in one order of sums.
///
/// A layer is trusted only where its held-out score beats identity's; all others get 1. So a bad
/// file does no harm, and says why.
class GainPredictor {
 public:
  static constexpr std::int32_t max_hidden = 32;

  /// Numbers a layer needs.
  [[nodiscard]] static constexpr std::size_t size(GainKind kind, std::int32_t hidden) noexcept {
    if (kind == GainKind::identity) return 0;
    return kind == GainKind::ridge
               ? gain_feature_count + 1
               : detail::LstmShape{gain_feature_count, static_cast<std::size_t>(hidden)}.size();
  }

  /// @param hidden      units of the LSTM, 1 to 32; 0 for the other kinds
  /// @param parameters  (layer, number): weight (features) and bias of a ridge; input.weight (4 ·
  /// hidden, features), state.weight
  ///                    (4 · hidden, hidden), bias (4 · hidden), out.weight (hidden), out.bias of
  ///                    an LSTM, gates input, forget, cell, output
  /// @param scores      (layers); empty: none measured, no layer is trusted
  /// Errors: `invalid_argument` (sizes), `unknown_field` (kind), `non_finite` (parameters; scores
  /// below 0 or infinite).
  KVMELD_LAZY [[nodiscard]] static Result<std::shared_ptr<const GainPredictor>> make(
      GainKind kind, std::int32_t hidden, std::size_t layers, std::span<const float> parameters,
      std::vector<GainScore> scores = {}, std::string model = {}) {
    if (kind > GainKind::lstm)
      return detail::error(ErrorCode::unknown_field, "gain: kind ", static_cast<int>(kind),
                           " unknown to this build");
    const bool fits = kind == GainKind::lstm ? hidden >= 1 && hidden <= max_hidden : hidden == 0;
    if (!fits || parameters.size() != layers * size(kind, hidden) ||
        (!scores.empty() && scores.size() != layers)) {
      return detail::error(ErrorCode::invalid_argument, "gain: ", parameters.size(),
                           " numbers and ", scores.size(), " scores for ", layers, " layers of ",
                           size(kind, hidden), " numbers, ", hidden, " hidden units (1 to ",
                           max_hidden, " in an LSTM, else 0)");
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!std::isfinite(parameters[i]))
        return detail::error(ErrorCode::non_finite, "gain: number ", i, " is not finite");
    }
    for (const GainScore& s : scores) {
      if (s.identity < 0 || s.predictor < 0 || std::isinf(s.identity) || std::isinf(s.predictor)) {
        return detail::error(ErrorCode::non_finite, "gain: held-out errors of ", s.identity,
                             " and ", s.predictor);
      }
    }
    std::shared_ptr<GainPredictor> out(new GainPredictor);
    out->kind_ = kind;
    out->hidden_ = hidden;
    out->layers_ = layers;
    out->model_ = std::move(model);
    out->parameters_.assign(parameters.begin(), parameters.end());
    out->scores_ = scores.empty() ? std::vector<GainScore>(layers) : std::move(scores);
    return std::shared_ptr<const GainPredictor>(std::move(out));
  }

  [[nodiscard]] GainKind kind() const noexcept { return kind_; }
  [[nodiscard]] std::int32_t hidden() const noexcept { return hidden_; }
  [[nodiscard]] std::size_t layers() const noexcept { return layers_; }
  [[nodiscard]] const std::string& model() const noexcept { return model_; }
  [[nodiscard]] std::span<const float> parameters() const noexcept { return parameters_; }
  [[nodiscard]] std::span<const GainScore> scores() const noexcept { return scores_; }

  /// What a layer's gains will be, and why.
  [[nodiscard]] GainReason reason(std::size_t layer) const noexcept {
    if (kind_ == GainKind::identity) return GainReason::identity;
    const GainScore& s = scores_[layer];
    if (std::isnan(s.identity) || std::isnan(s.predictor)) return GainReason::no_score;
    return s.predictor < s.identity ? GainReason::predicted : GainReason::not_better;
  }
  /// Whether any layer is predicted at all.
  [[nodiscard]] bool predicts() const noexcept {
    for (std::size_t l = 0; l < layers_; ++l) {
      if (reason(l) == GainReason::predicted) return true;
    }
    return false;
  }

  /// (layer, token) as `ReuseOffset::gains` takes it; 1 in layers that are not trusted, empty where
  /// that is all of them. In [0, 2].
  ///
  /// O(layers · tokens · features), by LSTM times 4 · hidden · (features + hidden). Errors: those
  /// of `gain_features`.
  KVMELD_LAZY [[nodiscard]] Result<std::vector<float>> gains(const GainQuery& query) const {
    const auto features = gain_features(query);
    if (!features) return features.error();
    if (!predicts()) return std::vector<float>{};
    const auto n = static_cast<std::size_t>(query.tokens);
    std::vector<float> out(layers_ * n, 1.0F);
    std::vector<double> row(n);
    for (std::size_t l = 0; l < layers_; ++l) {
      if (reason(l) != GainReason::predicted) continue;
      evaluate(l, *features, row);
      for (std::size_t t = 0; t < n; ++t) out[l * n + t] = static_cast<float>(row[t]);
    }
    return out;
  }
  /// Gains of one layer, whatever its score: for those who measure it. (token, feature) to (token).
  KVMELD_LAZY void evaluate(std::size_t layer, std::span<const double> features,
                            std::span<double> out) const {
    const std::size_t size_of_layer = size(kind_, hidden_);
    const std::vector<double> parameters(
        parameters_.begin() + static_cast<std::ptrdiff_t>(layer * size_of_layer),
        parameters_.begin() + static_cast<std::ptrdiff_t>((layer + 1) * size_of_layer));
    if (kind_ == GainKind::lstm) {
      detail::run_lstm({gain_feature_count, static_cast<std::size_t>(hidden_)}, parameters,
                       features, out);
      for (double& x : out) x = 1 + math::tanh(x);
      return;
    }
    for (std::size_t t = 0; t < out.size(); ++t) {
      double sum = 1;
      if (kind_ == GainKind::ridge) {
        sum += parameters[gain_feature_count];
        for (std::size_t k = 0; k < gain_feature_count; ++k)
          sum = fma(parameters[k], features[t * gain_feature_count + k], sum);
      }
      // beyond the lengths that were fitted a line knows no bounds
      out[t] = sum < 0 ? 0.0 : sum > 2 ? 2.0 : sum;
    }
  }

 private:
  GainPredictor() = default;

  GainKind kind_ = GainKind::identity;
  std::int32_t hidden_ = 0;
  std::size_t layers_ = 0;
  std::string model_;
  std::vector<float> parameters_;
  std::vector<GainScore> scores_;
};

KVMELD_NAMESPACE_END
