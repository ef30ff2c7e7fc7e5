#pragma once

/// Learned gains of offsets, their network, files and samples.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/safetensors.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

// A small LSTM over the tokens of a run, in f64 in one order of sums: its bytes are the same
// everywhere.

namespace detail {

/// Where the numbers of an LSTM with one output lie: input.weight (4 · hidden, inputs),
/// state.weight (4 · hidden, hidden), bias (4 · hidden), out.weight (hidden), out.bias (1). Gates
/// in the order input, forget, cell, output.
struct LstmShape {
  std::size_t inputs = 0, hidden = 0;

  [[nodiscard]] constexpr std::size_t state_weight() const noexcept { return 4 * hidden * inputs; }
  [[nodiscard]] constexpr std::size_t bias() const noexcept {
    return state_weight() + 4 * hidden * hidden;
  }
  [[nodiscard]] constexpr std::size_t out_weight() const noexcept { return bias() + 4 * hidden; }
  [[nodiscard]] constexpr std::size_t out_bias() const noexcept { return out_weight() + hidden; }
  [[nodiscard]] constexpr std::size_t size() const noexcept { return out_bias() + 1; }
};

/// What a step leaves behind for the way back: gates (4 · hidden), cell, tanh of the cell, state
/// (hidden each).
struct LstmTrace {
  std::vector<double> steps;
};

[[nodiscard]] inline double logistic(double x) noexcept { return 1.0 / (1.0 + math::exp(-x)); }

/// One output for every token: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
/// 2000.
/// @param x (token, input) @param out (token)
inline void run_lstm(const LstmShape& shape, std::span<const double> parameters,
                     std::span<const double> x, std::span<double> out, LstmTrace* trace = nullptr) {
  const std::size_t h = shape.hidden, step = 7 * h;
  std::vector<double> storage;
  std::vector<double>& steps = trace != nullptr ? trace->steps : storage;
  steps.assign((trace != nullptr ? out.size() : 2) * step, 0.0);
  const std::vector<double> zeros(h);
  const double* state = zeros.data();
  const double* cell = zeros.data();
  for (std::size_t t = 0; t < out.size(); ++t) {
    double* const gates = steps.data() + (trace != nullptr ? t : t % 2) * step;
    for (std::size_t r = 0; r < 4 * h; ++r) {
      double sum = parameters[shape.bias() + r];
      for (std::size_t k = 0; k < shape.inputs; ++k)
        sum = fma(parameters[r * shape.inputs + k], x[t * shape.inputs + k], sum);
      for (std::size_t k = 0; k < h; ++k)
        sum = fma(parameters[shape.state_weight() + r * h + k], state[k], sum);
      gates[r] = r / h == 2 ? math::tanh(sum) : logistic(sum);
    }
    double* const new_cell = gates + 4 * h;
    double sum = parameters[shape.out_bias()];
    for (std::size_t k = 0; k < h; ++k) {
      new_cell[k] = fma(gates[h + k], cell[k], gates[k] * gates[2 * h + k]);
      new_cell[h + k] = math::tanh(new_cell[k]);
      new_cell[2 * h + k] = gates[3 * h + k] * new_cell[h + k];
      sum = fma(parameters[shape.out_weight() + k], new_cell[2 * h + k], sum);
    }
    cell = new_cell;
    state = new_cell + 2 * h;
    out[t] = sum;
  }
}

/// Adds the gradient of what `run_lstm` left in the trace, from the outputs' cotangents (token).
/// For trainers: sums as the compiler makes them.
inline void lstm_vjp(const LstmShape& shape, std::span<const double> parameters,
                     std::span<const double> x, const LstmTrace& trace,
                     std::span<const double> cotangent, std::span<double> gradient) {
  const std::size_t h = shape.hidden, step = 7 * h;
  std::vector<double> d_state(h), d_cell(h), d_sum(4 * h);
  const std::vector<double> zeros(step);
  for (std::size_t t = cotangent.size(); t-- > 0;) {
    const double* const gates = trace.steps.data() + t * step;
    const double* const before = t > 0 ? gates - step : zeros.data();
    gradient[shape.out_bias()] += cotangent[t];
    for (std::size_t k = 0; k < h; ++k) {
      gradient[shape.out_weight() + k] += cotangent[t] * gates[6 * h + k];
      const double d = d_state[k] + cotangent[t] * parameters[shape.out_weight() + k];
      const double in = gates[k], forget = gates[h + k], candidate = gates[2 * h + k],
                   out = gates[3 * h + k], squashed = gates[5 * h + k];
      d_cell[k] += d * out * (1 - squashed * squashed);
      d_sum[k] = d_cell[k] * candidate * in * (1 - in);
      d_sum[h + k] = d_cell[k] * before[4 * h + k] * forget * (1 - forget);
      d_sum[2 * h + k] = d_cell[k] * in * (1 - candidate * candidate);
      d_sum[3 * h + k] = d * squashed * out * (1 - out);
      d_cell[k] *= forget;
      d_state[k] = 0;
    }
    for (std::size_t r = 0; r < 4 * h; ++r) {
      gradient[shape.bias() + r] += d_sum[r];
      for (std::size_t k = 0; k < shape.inputs; ++k)
        gradient[r * shape.inputs + k] += d_sum[r] * x[t * shape.inputs + k];
      for (std::size_t k = 0; k < h; ++k) {
        gradient[shape.state_weight() + r * h + k] += d_sum[r] * before[6 * h + k];
        d_state[k] += d_sum[r] * parameters[shape.state_weight() + r * h + k];
      }
    }
  }
}

}  // namespace detail

// How much of an offset is left where another length of text stands before it than where it was
// measured.

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
[[nodiscard]] inline Result<std::vector<double>> gain_features(const GainQuery& query) {
  for (const std::int64_t n : {query.measured_behind, query.placed_behind, query.tokens}) {
    if (n < 0 || n > max_position)
      return extend::error(ErrorCode::invalid_argument, "gain: a length of ", n,
                           " tokens is not in [0, ", max_position, "]");
  }
  if (query.tokens > (std::int64_t{1} << 24))
    return extend::error(ErrorCode::oversized, "gain: a run of ", query.tokens,
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

/// How a gain is worked out.
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
  [[nodiscard]] static Result<std::shared_ptr<const GainPredictor>> make(
      GainKind kind, std::int32_t hidden, std::size_t layers, std::span<const float> parameters,
      std::vector<GainScore> scores = {}, std::string model = {}) {
    if (kind > GainKind::lstm)
      return extend::error(ErrorCode::unknown_field, "gain: kind ", static_cast<int>(kind),
                           " unknown to this build");
    const bool fits = kind == GainKind::lstm ? hidden >= 1 && hidden <= max_hidden : hidden == 0;
    if (!fits || parameters.size() != layers * size(kind, hidden) ||
        (!scores.empty() && scores.size() != layers)) {
      return extend::error(ErrorCode::invalid_argument, "gain: ", parameters.size(),
                           " numbers and ", scores.size(), " scores for ", layers, " layers of ",
                           size(kind, hidden), " numbers, ", hidden, " hidden units (1 to ",
                           max_hidden, " in an LSTM, else 0)");
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!std::isfinite(parameters[i]))
        return extend::error(ErrorCode::non_finite, "gain: number ", i, " is not finite");
    }
    for (const GainScore& s : scores) {
      if (s.identity < 0 || s.predictor < 0 || std::isinf(s.identity) || std::isinf(s.predictor)) {
        return extend::error(ErrorCode::non_finite, "gain: held-out errors of ", s.identity,
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
  [[nodiscard]] Result<std::vector<float>> gains(const GainQuery& query) const {
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
  void evaluate(std::size_t layer, std::span<const double> features, std::span<double> out) const {
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

// Gain predictors as safetensors files.

namespace detail {

struct GainTensor {
  const char* name;
  std::vector<std::uint64_t> shape;  // of one layer
};
[[nodiscard]] inline std::vector<GainTensor> gain_tensors(GainKind kind, std::uint64_t hidden) {
  const std::uint64_t features = gain_feature_count;
  if (kind == GainKind::identity) return {};
  if (kind == GainKind::ridge) return {{"weight", {features}}, {"bias", {}}};
  return {{"input.weight", {4 * hidden, features}},
          {"state.weight", {4 * hidden, hidden}},
          {"bias", {4 * hidden}},
          {"out.weight", {hidden}},
          {"out.bias", {}}};
}

}  // namespace detail

/// Reads metadata kind (identity, ridge, lstm) and model, and tensors by layer: weight (layers,
/// features) and bias (layers) of a ridge; input.weight, state.weight, bias, out.weight, out.bias
/// of an LSTM, each with layers in front; held_out (layers, 2) with the errors of identity and
/// predictor, without which no layer is trusted.
///
/// Errors: those of `parse_safetensors` and `GainPredictor::make`; `not_found`, `unknown_field`
/// (kind, tensors), `geometry_mismatch` (shapes; a predictor of another model, or of another number
/// of layers).
[[nodiscard]] inline Result<std::shared_ptr<const GainPredictor>> gain_from_safetensors(
    std::span<const std::byte> file, const Geometry& geometry) {
  using extend::error;
  const auto parsed = parse_safetensors(file);
  if (!parsed) return parsed.error();
  const std::string* const kind_name = parsed->find_metadata("kind");
  const std::string* const model = parsed->find_metadata("model");
  if (kind_name == nullptr || model == nullptr)
    return extend::error(ErrorCode::not_found, "gain: no metadata 'kind' and 'model'");
  if (*model != geometry.model)
    return extend::error(ErrorCode::geometry_mismatch, "gain: fitted to '", *model, "', not to '",
                         geometry.model, "'; fit it anew");
  const GainKind kind = *kind_name == "identity" ? GainKind::identity
                        : *kind_name == "ridge"  ? GainKind::ridge
                                                 : GainKind::lstm;
  if (kind == GainKind::lstm && *kind_name != "lstm")
    return extend::error(ErrorCode::unknown_field, "gain: kind '", *kind_name,
                         "' unknown to this build");
  const std::size_t layers = geometry.layers.size();
  std::uint64_t hidden = 0;
  if (kind == GainKind::lstm) {
    const StoredTensor* const out = parsed->find("out.weight");
    if (out == nullptr || out->shape.size() != 2)
      return extend::error(ErrorCode::geometry_mismatch, "gain: 'out.weight' is (layers, hidden)");
    hidden = out->shape[1];
    if (hidden < 1 || hidden > GainPredictor::max_hidden) {
      return extend::error(ErrorCode::invalid_argument, "gain: ", hidden, " hidden units; 1 to ",
                           GainPredictor::max_hidden, " are possible");
    }
  }
  const std::vector<detail::GainTensor> wanted = detail::gain_tensors(kind, hidden);
  const StoredTensor* const held_out = parsed->find("held_out");
  if (parsed->tensors.size() != wanted.size() + (held_out != nullptr ? 1 : 0)) {
    return extend::error(ErrorCode::unknown_field, "gain: ", parsed->tensors.size(),
                         " tensors where a predictor of kind ", *kind_name, " has ", wanted.size(),
                         " and held_out");
  }
  const std::size_t size = GainPredictor::size(kind, static_cast<std::int32_t>(hidden));
  std::vector<float> parameters(layers * size);
  std::size_t at = 0;
  for (const detail::GainTensor& want : wanted) {
    const StoredTensor* const tensor = parsed->find(want.name);
    if (tensor == nullptr)
      return extend::error(ErrorCode::not_found, "gain: no tensor '", want.name, "'");
    std::vector<std::uint64_t> shape{layers};
    shape.insert(shape.end(), want.shape.begin(), want.shape.end());
    if (tensor->shape != shape) {
      return extend::error(ErrorCode::geometry_mismatch, "gain: '", want.name, "' has ",
                           tensor->elements(), " elements in another shape than ", layers,
                           " layers, ", gain_feature_count, " features and ", hidden,
                           " hidden units need");
    }
    const auto numbers = to_floats<float>(*tensor);
    if (!numbers) return numbers.error();
    const std::size_t each = layers == 0 ? 0 : numbers->size() / layers;
    for (std::size_t l = 0; l < layers; ++l) {
      for (std::size_t i = 0; i < each; ++i)
        parameters[l * size + at + i] = (*numbers)[l * each + i];
    }
    at += each;
  }
  std::vector<GainScore> scores;
  if (held_out != nullptr) {
    if (held_out->shape != std::vector<std::uint64_t>{layers, 2}) {
      return extend::error(ErrorCode::geometry_mismatch, "gain: 'held_out' of ",
                           held_out->elements(), " numbers is not (", layers, ", 2)");
    }
    const auto numbers = to_floats<double>(*held_out);
    if (!numbers) return numbers.error();
    for (std::size_t l = 0; l < layers; ++l)
      scores.push_back({(*numbers)[2 * l], (*numbers)[2 * l + 1]});
  }
  return GainPredictor::make(kind, static_cast<std::int32_t>(hidden), layers, parameters,
                             std::move(scores), *model);
}

/// The same tensors, f32, and scores in f64: reading them again gives an equal predictor, and
/// writing that equal bytes.
[[nodiscard]] inline Result<std::vector<std::byte>> to_safetensors(const GainPredictor& predictor) {
  const std::size_t layers = predictor.layers(),
                    size = GainPredictor::size(predictor.kind(), predictor.hidden());
  SafetensorsWriter writer;
  writer.metadata("kind", predictor.kind() == GainKind::identity ? "identity"
                          : predictor.kind() == GainKind::ridge  ? "ridge"
                                                                 : "lstm");
  writer.metadata("model", predictor.model());
  std::size_t at = 0;
  for (const detail::GainTensor& tensor :
       detail::gain_tensors(predictor.kind(), static_cast<std::uint64_t>(predictor.hidden()))) {
    std::size_t each = 1;
    std::vector<std::uint64_t> shape{layers};
    for (const std::uint64_t n : tensor.shape) {
      each *= static_cast<std::size_t>(n);
      shape.push_back(n);
    }
    std::vector<float> numbers;
    for (std::size_t l = 0; l < layers; ++l) {
      const auto from = predictor.parameters().subspan(l * size + at, each);
      numbers.insert(numbers.end(), from.begin(), from.end());
    }
    writer.floats(tensor.name, std::move(shape), std::span<const float>(numbers));
    at += each;
  }
  std::vector<double> scores;
  for (const GainScore& s : predictor.scores())
    scores.insert(scores.end(), {s.identity, s.predictor});
  writer.floats("held_out", {layers, 2}, std::span<const double>(scores));
  return writer.finish();
}

// Offsets of one run behind two prefixes, as the sums that fits and scores of gains need.

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
  void add(const GainSample& other) {
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
[[nodiscard]] inline Result<GainSample> gain_sample(const Fragment& measured,
                                                    const Fragment& wanted,
                                                    const GainQuery& query) {
  using extend::error;
  if (!measured.valid() || !wanted.valid() || !is_unrotated(measured) || !is_unrotated(wanted)) {
    return extend::error(ErrorCode::invalid_argument,
                         "gain: two offsets from measure_offset are needed");
  }
  KVMELD_TRY(check_same(measured.geometry(), wanted.geometry()));
  if (measured.token_count() != wanted.token_count() || measured.token_count() != query.tokens) {
    return extend::error(ErrorCode::token_count_mismatch, "gain: offsets of ",
                         measured.token_count(), " and ", wanted.token_count(),
                         " tokens for a run of ", query.tokens);
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
[[nodiscard]] inline Result<std::vector<GainScore>> held_out_scores(
    const GainPredictor& predictor, std::span<const GainSample> samples) {
  std::vector<GainScore> out(predictor.layers());
  std::vector<double> totals(out.size());
  for (GainScore& s : out) s = {0, 0};
  for (const GainSample& sample : samples) {
    if (sample.layers != out.size())
      return extend::error(ErrorCode::geometry_mismatch, "gain: a sample of ", sample.layers,
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

}  // namespace anchors

KVMELD_NAMESPACE_END
