#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/order.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// A small network from a fragment's features to the natural logarithm of its weight: second.weight
/// · tanh(first.weight · features + first.bias) + second.bias. Immutable; computed in f64 in one
/// order of sums.
class WeightPredictor {
 public:
  static constexpr std::int32_t max_inputs = 1024;
  static constexpr std::int32_t max_hidden = 1024;

  [[nodiscard]] static constexpr std::int64_t size(std::int32_t inputs,
                                                   std::int32_t hidden) noexcept {
    return static_cast<std::int64_t>(hidden) * (inputs + 2) + 1;
  }
  /// @param parameters  first.weight (hidden, inputs), first.bias (hidden), second.weight (hidden),
  /// second.bias Errors: `invalid_argument` (sizes), `non_finite`.
  KVMELD_LAZY [[nodiscard]] static Result<std::shared_ptr<const WeightPredictor>> make(
      std::int32_t inputs, std::int32_t hidden, std::span<const float> parameters) {
    if (inputs < 1 || inputs > max_inputs || hidden < 1 || hidden > max_hidden ||
        static_cast<std::int64_t>(parameters.size()) != size(inputs, hidden)) {
      return detail::error(ErrorCode::invalid_argument, "weight predictor: ", parameters.size(),
                           " parameters for ", inputs, " inputs and ", hidden, " hidden units");
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i] - parameters[i] != 0)
        return detail::error(ErrorCode::non_finite, "weight predictor: parameter ", i,
                             " is not finite");
    }
    std::shared_ptr<WeightPredictor> out(new WeightPredictor);
    out->inputs_ = inputs;
    out->hidden_ = hidden;
    out->parameters_.assign(parameters.begin(), parameters.end());
    Hasher hasher;
    hasher.text("kvmeld.WeightPredictor.v1");
    hasher.value(inputs);
    hasher.value(hidden);
    hasher.values(std::span<const float>(out->parameters_));
    out->digest_ = hasher.digest();
    return std::shared_ptr<const WeightPredictor>(std::move(out));
  }

  [[nodiscard]] std::int32_t inputs() const noexcept { return inputs_; }
  [[nodiscard]] std::int32_t hidden() const noexcept { return hidden_; }
  [[nodiscard]] std::span<const float> parameters() const noexcept { return parameters_; }
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }

  /// @param features  `inputs()` of them, finite
  [[nodiscard]] double log_weight(std::span<const double> features) const noexcept {
    const float* w = parameters_.data();
    const float* const bias = w + static_cast<std::ptrdiff_t>(hidden_) * inputs_;
    double out = static_cast<double>(bias[2 * hidden_]);
    for (std::int32_t j = 0; j < hidden_; ++j) {
      double sum = static_cast<double>(bias[j]);
      for (const double x : features) sum = fma(static_cast<double>(*w++), x, sum);
      out = fma(static_cast<double>(bias[hidden_ + j]), math::tanh(sum), out);
    }
    return out;
  }

 private:
  WeightPredictor() = default;

  std::int32_t inputs_ = 0;
  std::int32_t hidden_ = 0;
  std::vector<float> parameters_;
  Digest128 digest_;
};

/// What the caller knows of a fragment beyond what is in it: an engine's log-probability, a judge's
/// mark, a history.
struct FragmentFeatures {
  FragmentId fragment{};
  std::vector<float> values{};
};

/// What a fragment tells a predictor by itself, in this order: the highest confidence that an agent
/// gave it; ln(1 + its selected tokens); the mean norm of its stored keys at one layer; ln(1 + the
/// position of its first selected token).
inline constexpr std::int32_t fragment_feature_count = 4;

/// @param layer  whose keys are measured; −1: ⌊layers / 2⌋. O(bytes of the layer). Errors:
/// `invalid_argument` (layer).
KVMELD_LAZY [[nodiscard]] Result<std::vector<double>> fragment_features(const Source& source,
                                                                        std::int32_t layer = -1) {
  const auto layers = static_cast<std::int32_t>(source.fragment->geometry().layers.size());
  const std::int32_t at = layer < 0 ? layers / 2 : layer;
  if (at >= layers && layers > 0)
    return detail::error(ErrorCode::invalid_argument, "fragment features: layer ", at,
                         " of a model with ", layers, " layers");
  const std::int64_t count = source.selected_count();
  const double first =
      count == 0
          ? 0.0
          : static_cast<double>(
                source.payload->positions[static_cast<std::size_t>(source.selected_token(0))]);
  return std::vector<double>{static_cast<double>(source.metadata->best_confidence()),
                             math::log(1.0 + static_cast<double>(count)),
                             layers == 0 ? 0.0
                                         : detail::mean_key_norm(*source.fragment, *source.payload,
                                                                 static_cast<std::size_t>(at)),
                             math::log(1.0 + first)};
}

/// A weighted mean by weights that a small network predicts from each fragment: Σ w·x / Σ w, w =
/// e^logit.
///
/// The network sees `fragment_features`, then the caller's features of that fragment; scale them
/// into its first layer. Logits are cut at ±40. examples/11_train_gate.cpp trains one. O(inputs ·
/// hidden) a fragment beside its features. Errors: `invalid_argument` (no predictor, a table out of
/// order, features of another number), `not_found` (a fragment that the caller's table lacks),
/// `non_finite` (features).
struct PredictedWeights {
  static constexpr bool reproducible = true;
  static constexpr MetadataFields metadata = MetadataFields::confidence;
  std::shared_ptr<const WeightPredictor> predictor{};
  /// Ascending by fragment; empty where the network needs none.
  std::vector<FragmentFeatures> features{};
  std::int32_t layer = -1;  ///< whose keys are measured; −1: ⌊layers / 2⌋

  [[nodiscard]] Result<float> weight(const Source& source) const { return predict(source); }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.PredictedWeights.v1");
    const Digest128 name = predictor == nullptr ? Digest128{} : predictor->digest();
    hasher.value(name.low);
    hasher.value(name.high);
    hasher.value(layer);
    hasher.value(static_cast<std::uint64_t>(features.size()));
    for (const FragmentFeatures& f : features) {
      hasher.bytes(std::as_bytes(std::span(f.fragment.bytes)));
      hasher.values(std::span<const float>(f.values));
    }
  }

 private:
  KVMELD_LAZY [[nodiscard]] Result<float> predict(const Source& source) const {
    if (predictor == nullptr)
      return detail::error(ErrorCode::invalid_argument, "PredictedWeights: no predictor is given");
    for (std::size_t i = 1; i < features.size(); ++i) {
      if (!(features[i - 1].fragment < features[i].fragment)) {
        return detail::error(ErrorCode::invalid_argument, "PredictedWeights: entry ", i, " (",
                             features[i].fragment.hex(), ") does not follow ",
                             features[i - 1].fragment.hex(), "; the table ascends");
      }
    }
    auto inputs = fragment_features(source, layer);
    if (!inputs) return inputs.error();
    if (predictor->inputs() > fragment_feature_count) {
      const auto at = std::lower_bound(
          features.begin(), features.end(), source.fragment->id(),
          [](const FragmentFeatures& f, const FragmentId& id) { return f.fragment < id; });
      if (at == features.end() || at->fragment != source.fragment->id()) {
        return detail::error(ErrorCode::not_found, "PredictedWeights: no features of fragment ",
                             source.fragment->id().hex(), "; the predictor reads ",
                             predictor->inputs() - fragment_feature_count);
      }
      for (const float x : at->values) inputs->push_back(static_cast<double>(x));
    }
    if (inputs->size() != static_cast<std::size_t>(predictor->inputs())) {
      return detail::error(ErrorCode::invalid_argument, "PredictedWeights: ", inputs->size(),
                           " features of fragment ", source.fragment->id().hex(),
                           ", the predictor reads ", predictor->inputs());
    }
    for (std::size_t i = 0; i < inputs->size(); ++i) {
      const double x = (*inputs)[i];
      if (x - x != 0)
        return detail::error(ErrorCode::non_finite, "PredictedWeights: feature ", i,
                             " of fragment ", source.fragment->id().hex(), " is not finite");
    }
    const double logit = predictor->log_weight(*inputs);
    return static_cast<float>(math::exp(logit > 40 ? 40.0 : logit < -40 ? -40.0 : logit));
  }
};

KVMELD_NAMESPACE_END
