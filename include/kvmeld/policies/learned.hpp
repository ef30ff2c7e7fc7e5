#pragma once

/// Fusers with learned parameters: Gated, PredictedWeights, and their gradients.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/gated_rows.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/policies/gate_weights.hpp>
#include <kvmeld/policies/order.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/safetensors.hpp>
#include <kvmeld/status.hpp>

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
  [[nodiscard]] static Result<std::shared_ptr<const WeightPredictor>> make(
      std::int32_t inputs, std::int32_t hidden, std::span<const float> parameters) {
    if (inputs < 1 || inputs > max_inputs || hidden < 1 || hidden > max_hidden ||
        static_cast<std::int64_t>(parameters.size()) != size(inputs, hidden)) {
      return extend::error(ErrorCode::invalid_argument, "weight predictor: ", parameters.size(),
                           " parameters for ", inputs, " inputs and ", hidden, " hidden units");
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i] - parameters[i] != 0)
        return extend::error(ErrorCode::non_finite, "weight predictor: parameter ", i,
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
[[nodiscard]] inline Result<std::vector<double>> fragment_features(const Source& source,
                                                                   std::int32_t layer = -1) {
  const auto layers = static_cast<std::int32_t>(source.fragment->geometry().layers.size());
  const std::int32_t at = layer < 0 ? layers / 2 : layer;
  if (at >= layers && layers > 0)
    return extend::error(ErrorCode::invalid_argument, "fragment features: layer ", at,
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
/// into its first layer. Logits are cut at ±40. The study train_gate trains one. O(inputs · hidden)
/// a fragment beside its features. Errors: `invalid_argument` (no predictor, a table out of order,
/// features of another number), `not_found` (a fragment that the caller's table lacks),
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
  [[nodiscard]] Result<float> predict(const Source& source) const {
    if (predictor == nullptr)
      return extend::error(ErrorCode::invalid_argument, "PredictedWeights: no predictor is given");
    for (std::size_t i = 1; i < features.size(); ++i) {
      if (!(features[i - 1].fragment < features[i].fragment)) {
        return extend::error(ErrorCode::invalid_argument, "PredictedWeights: entry ", i, " (",
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
        return extend::error(ErrorCode::not_found, "PredictedWeights: no features of fragment ",
                             source.fragment->id().hex(), "; the predictor reads ",
                             predictor->inputs() - fragment_feature_count);
      }
      for (const float x : at->values) inputs->push_back(static_cast<double>(x));
    }
    if (inputs->size() != static_cast<std::size_t>(predictor->inputs())) {
      return extend::error(ErrorCode::invalid_argument, "PredictedWeights: ", inputs->size(),
                           " features of fragment ", source.fragment->id().hex(),
                           ", the predictor reads ", predictor->inputs());
    }
    for (std::size_t i = 0; i < inputs->size(); ++i) {
      const double x = (*inputs)[i];
      if (x - x != 0)
        return extend::error(ErrorCode::non_finite, "PredictedWeights: feature ", i,
                             " of fragment ", source.fragment->id().hex(), " is not finite");
    }
    const double logit = predictor->log_weight(*inputs);
    return static_cast<float>(math::exp(logit > 40 ? 40.0 : logit < -40 ? -40.0 : logit));
  }
};

// Weight predictors as safetensors files.

/// Reads tensors first.weight (hidden, inputs), first.bias (hidden), second.weight (1, hidden) and
/// second.bias (1) of any float type.
///
/// Errors: those of `parse_safetensors` and `WeightPredictor::make`; `not_found`, `unknown_field`,
/// `geometry_mismatch` (shapes).
[[nodiscard]] inline Result<std::shared_ptr<const WeightPredictor>> predictor_from_safetensors(
    std::span<const std::byte> file) {
  const auto parsed = parse_safetensors(file);
  if (!parsed) return parsed.error();
  if (parsed->tensors.size() != 4)
    return extend::error(ErrorCode::unknown_field, "weight predictor: ", parsed->tensors.size(),
                         " tensors where there are 4");
  const StoredTensor* const first = parsed->find("first.weight");
  if (first == nullptr)
    return extend::error(ErrorCode::not_found, "weight predictor: no tensor 'first.weight'");
  if (first->shape.size() != 2 || first->shape[0] > WeightPredictor::max_hidden ||
      first->shape[1] > WeightPredictor::max_inputs) {
    return extend::error(ErrorCode::geometry_mismatch,
                         "weight predictor: 'first.weight' is (hidden, inputs), at most (",
                         WeightPredictor::max_hidden, ", ", WeightPredictor::max_inputs, ")");
  }
  const std::uint64_t hidden = first->shape[0], inputs = first->shape[1];
  const std::pair<const char*, std::vector<std::uint64_t>> wanted[] = {
      {"first.weight", {hidden, inputs}},
      {"first.bias", {hidden}},
      {"second.weight", {1, hidden}},
      {"second.bias", {1}}};
  std::vector<float> parameters;
  for (const auto& [name, dims] : wanted) {
    const StoredTensor* const tensor = parsed->find(name);
    if (tensor == nullptr)
      return extend::error(ErrorCode::not_found, "weight predictor: no tensor '", name, "'");
    if (tensor->shape != dims) {
      return extend::error(ErrorCode::geometry_mismatch, "weight predictor: '", name, "' has ",
                           tensor->elements(), " elements in another shape than ", hidden,
                           " hidden units and ", inputs, " inputs need");
    }
    const auto numbers = to_floats<float>(*tensor);
    if (!numbers) return numbers.error();
    parameters.insert(parameters.end(), numbers->begin(), numbers->end());
  }
  return WeightPredictor::make(static_cast<std::int32_t>(inputs), static_cast<std::int32_t>(hidden),
                               parameters);
}

/// The same tensors, f32: reading them again gives an equal predictor, and writing that equal
/// bytes.
[[nodiscard]] inline Result<std::vector<std::byte>> to_safetensors(
    const WeightPredictor& predictor) {
  const auto h = static_cast<std::size_t>(predictor.hidden()),
             in = static_cast<std::size_t>(predictor.inputs());
  const std::span<const float> all = predictor.parameters();
  SafetensorsWriter writer;
  writer.metadata("activation", "tanh");
  writer.floats("first.weight", {h, in}, all.first(h * in));
  writer.floats("first.bias", {h}, all.subspan(h * in, h));
  writer.floats("second.weight", {1, h}, all.subspan(h * in + h, h));
  writer.floats("second.bias", {1}, all.last(1));
  return writer.finish();
}

/// Lets a small network decide how much of each contribution enters: Σ gᵢ·xᵢ with g = softmax over
/// contributions of the network's logits plus the natural logarithm of the aligner's weights, gᵢ =
/// wᵢ·exp(lᵢ) / Σ wⱼ·exp(lⱼ).
///
/// One network for every agent, over [its row, the mean of all rows] of a head: permuting agents
/// permutes gates, and equal contributions fuse to themselves, to the bit in f32. Keys are
/// un-rotated. Keys and values, layers and heads each have gates of their own. A single
/// contribution is copied. Each sum over inputs is in f32 from its bias on, own and mean's inputs
/// apart, each ascending; exp and tanh are `kvmeld::math`'s; gates and the last sum are f64.
///
/// O(contributions · (2 · channels + outputs) · hidden) a row. Errors at the plan:
/// `geometry_mismatch` (weights of another model's sizes), `unsupported` (latent caches),
/// `invalid_argument` (no weights, or of the other kind), `oversized` (contributions). Shazeer et
/// al.: Outrageously Large Neural Networks, 2017 (softmax gates); Zaheer et al.: Deep Sets, 2017
/// (one network for all, beside a symmetric summary).
template <GateKind kind>
struct GatedBy {
  static constexpr bool reproducible = true;
  std::shared_ptr<const GateWeights> weights{};

  [[nodiscard]] detail::GateRows<kind> mixing() const {
    return weights == nullptr ? detail::GateRows<kind>{}
                              : detail::GateRows<kind>(weights->shape(), weights->laid_out());
  }
  [[nodiscard]] Status fits(const Geometry& geometry) const {
    if (weights == nullptr)
      return extend::error(ErrorCode::invalid_argument, "gate: no weights are given");
    if (weights->shape().kind != kind) {
      return extend::error(ErrorCode::invalid_argument, "gate: weights of ",
                           kind == GateKind::token ? "a gate per channel; take GatedChannels"
                                                   : "a gate per token; take Gated");
    }
    return weights->fits(geometry);
  }
  [[nodiscard]] Status check(std::int64_t contributions) const {
    if (weights == nullptr)
      return extend::error(ErrorCode::invalid_argument, "gate: no weights are given");
    const std::int64_t units = detail::whole_blocks(weights->shape().hidden);
    if (kind == GateKind::token || contributions * units <= detail::max_gate_units) return {};
    return extend::error(ErrorCode::oversized, contributions,
                         " contributions; a gate per channel with ", units,
                         " hidden units mixes at most ", detail::max_gate_units / units);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Gated.v1");
    hasher.value(kind);
    const Digest128 name = weights == nullptr ? Digest128{} : weights->digest();
    hasher.value(name.low);
    hasher.value(name.high);
  }
};

/// A gate per head's row.
using Gated = GatedBy<GateKind::token>;
/// A gate per channel.
using GatedChannels = GatedBy<GateKind::channel>;

// Gradients of gates. Trainers are not byte-reproducible: sums are as the compiler makes them.

/// A gated row as it was computed. Contiguous, the caller's memory, which a tape reads again in its
/// `vjp`.
template <std::floating_point T>
struct GateInputs {
  std::span<const T> parameters{};  ///< one network of `GateShape`
  std::span<const T> values{};      ///< (contribution, channel) keys un-rotated
  std::span<const T> weights{};     ///< (contribution) above 0
};

namespace gradients {

/// What comes back: vector-Jacobian products, added to what the memory holds.
template <std::floating_point T>
struct GateGradients {
  std::span<T> parameters{};
  std::span<T> values{};   ///< (contribution, channel); empty: not asked for
  std::span<T> weights{};  ///< (contribution); empty: not asked for
};

/// Runs one gate forwards and back, for trainers: `forward`, then `vjp` of the same inputs.
///
/// Memory grows with the first row and is kept. O(contributions · (2 · channels + outputs) ·
/// hidden) each way.
template <std::floating_point T>
class GateTape {
 public:
  GateTape(GateKind kind, std::size_t channels, std::size_t hidden)
      : kind_(kind),
        channels_(channels),
        hidden_(hidden),
        outputs_(kind == GateKind::token ? 1 : channels) {}

  /// Numbers of the network: first.weight, first.bias, second.weight, second.bias.
  [[nodiscard]] std::size_t parameter_count() const noexcept {
    return hidden_ * (2 * channels_ + 1) + outputs_ * (hidden_ + 1);
  }

  /// Writes the fused row; out: (channel). Errors: `invalid_argument` (sizes).
  [[nodiscard]] Status forward(const GateInputs<T>& inputs, std::span<T> out) {
    const std::size_t n = inputs.weights.size();
    if (n == 0 || inputs.parameters.size() != parameter_count() ||
        inputs.values.size() != n * channels_ || out.size() != channels_) {
      return extend::error(ErrorCode::invalid_argument, "gate: ", inputs.parameters.size(),
                           " parameters, ", inputs.values.size(), " values, ", n,
                           " weights and a result of ", out.size(), " for ", channels_,
                           " channels and ", hidden_, " hidden units");
    }
    in_ = inputs;
    mean_.assign(channels_, T(0));
    units_.resize(n * hidden_);
    gates_.resize(n * outputs_);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t c = 0; c < channels_; ++c) mean_[c] += inputs.values[i * channels_ + c];
    }
    for (T& m : mean_) m /= static_cast<T>(n);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < hidden_; ++j) {
        const T* const w = first(j);
        T sum = in_.parameters[first_bias() + j];
        for (std::size_t c = 0; c < channels_; ++c) sum += w[c] * inputs.values[i * channels_ + c];
        for (std::size_t c = 0; c < channels_; ++c) sum += w[channels_ + c] * mean_[c];
        units_[i * hidden_ + j] = std::tanh(sum);
      }
      for (std::size_t o = 0; o < outputs_; ++o) {
        T sum = in_.parameters[second_bias() + o];
        for (std::size_t j = 0; j < hidden_; ++j)
          sum += in_.parameters[second(o) + j] * units_[i * hidden_ + j];
        gates_[i * outputs_ + o] = sum;
      }
    }
    std::fill(out.begin(), out.end(), T(0));
    for (std::size_t o = 0; o < outputs_; ++o) {
      T most = gates_[o], total = 0;
      for (std::size_t i = 1; i < n; ++i) most = (std::max)(most, gates_[i * outputs_ + o]);
      for (std::size_t i = 0; i < n; ++i) {
        T& gate = gates_[i * outputs_ + o];
        gate = in_.weights[i] * std::exp(gate - most);
        total += gate;
      }
      for (std::size_t i = 0; i < n; ++i) gates_[i * outputs_ + o] /= total;
    }
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t c = 0; c < channels_; ++c)
        out[c] += gate(i, c) * inputs.values[i * channels_ + c];
    }
    return {};
  }

  /// Gates of the last row: (contribution, output), adding up to 1 over contributions.
  [[nodiscard]] std::span<const T> gates() const noexcept { return gates_; }

  /// Adds the gradients of the last row; cotangent: (channel). Errors: `invalid_argument` (sizes,
  /// or no row yet).
  [[nodiscard]] Status vjp(std::span<const T> cotangent, const gradients::GateGradients<T>& out) {
    const std::size_t n = in_.weights.size();
    if (n == 0 || cotangent.size() != channels_ || out.parameters.size() != parameter_count() ||
        (!out.values.empty() && out.values.size() != in_.values.size()) ||
        (!out.weights.empty() && out.weights.size() != n)) {
      return extend::error(ErrorCode::invalid_argument, "gate: gradients of ",
                           out.parameters.size(), " parameters, ", out.values.size(),
                           " values and ", out.weights.size(), " weights from ", cotangent.size(),
                           " channels; the last row has ", n, " contributions of ", channels_);
    }
    d_logits_.assign(n * outputs_, T(0));
    d_mean_.assign(channels_, T(0));
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t c = 0; c < channels_; ++c) {
        const std::size_t at = i * channels_ + c;
        if (!out.values.empty()) out.values[at] += gate(i, c) * cotangent[c];
        T& d = d_logits_[i * outputs_ + (outputs_ == 1 ? 0 : c)];
        d += cotangent[c] * in_.values[at];
      }
    }
    for (std::size_t o = 0; o < outputs_; ++o) {  // softmax
      T mixed = 0;
      for (std::size_t i = 0; i < n; ++i)
        mixed += gates_[i * outputs_ + o] * d_logits_[i * outputs_ + o];
      for (std::size_t i = 0; i < n; ++i)
        d_logits_[i * outputs_ + o] =
            gates_[i * outputs_ + o] * (d_logits_[i * outputs_ + o] - mixed);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const T* const x = in_.values.data() + i * channels_;
      for (std::size_t o = 0; o < outputs_; ++o) {
        const T d = d_logits_[i * outputs_ + o];
        if (!out.weights.empty()) out.weights[i] += d / in_.weights[i];
        out.parameters[second_bias() + o] += d;
        for (std::size_t j = 0; j < hidden_; ++j)
          out.parameters[second(o) + j] += d * units_[i * hidden_ + j];
      }
      for (std::size_t j = 0; j < hidden_; ++j) {
        T d = 0;
        for (std::size_t o = 0; o < outputs_; ++o)
          d += d_logits_[i * outputs_ + o] * in_.parameters[second(o) + j];
        d *= T(1) - units_[i * hidden_ + j] * units_[i * hidden_ + j];
        out.parameters[first_bias() + j] += d;
        const T* const w = first(j);
        T* const to = out.parameters.data() + j * 2 * channels_;
        for (std::size_t c = 0; c < channels_; ++c) {
          to[c] += d * x[c];
          to[channels_ + c] += d * mean_[c];
          if (!out.values.empty()) out.values[i * channels_ + c] += d * w[c];
          d_mean_[c] += d * w[channels_ + c];
        }
      }
    }
    for (std::size_t at = 0; at < out.values.size(); ++at)
      out.values[at] += d_mean_[at % channels_] / static_cast<T>(n);
    return {};
  }

 private:
  [[nodiscard]] const T* first(std::size_t unit) const noexcept {
    return in_.parameters.data() + unit * 2 * channels_;
  }
  [[nodiscard]] std::size_t first_bias() const noexcept { return hidden_ * 2 * channels_; }
  [[nodiscard]] std::size_t second(std::size_t output) const noexcept {
    return first_bias() + hidden_ + output * hidden_;
  }
  [[nodiscard]] std::size_t second_bias() const noexcept { return second(outputs_); }
  [[nodiscard]] T gate(std::size_t i, std::size_t c) const noexcept {
    return gates_[i * outputs_ + (outputs_ == 1 ? 0 : c)];
  }

  GateKind kind_;
  std::size_t channels_, hidden_, outputs_;
  GateInputs<T> in_{};
  std::vector<T> mean_;      // (channel)
  std::vector<T> units_;     // (contribution, hidden)
  std::vector<T> gates_;     // (contribution, output)
  std::vector<T> d_logits_;  // (contribution, output)
  std::vector<T> d_mean_;    // (channel)
};

}  // namespace gradients

KVMELD_NAMESPACE_END
