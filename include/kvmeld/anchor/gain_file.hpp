#pragma once

/// Gain predictors as safetensors files.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/anchor/gain.hpp>
#include <kvmeld/codec/safetensors.hpp>
#include <kvmeld/codec/safetensors_writer.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

struct GainTensor {
  const char* name;
  std::vector<std::uint64_t> shape;  // of one layer
};
KVMELD_LAZY [[nodiscard]] std::vector<GainTensor> gain_tensors(GainKind kind,
                                                               std::uint64_t hidden) {
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
KVMELD_LAZY [[nodiscard]] Result<std::shared_ptr<const GainPredictor>> gain_from_safetensors(
    std::span<const std::byte> file, const Geometry& geometry) {
  using detail::error;
  const auto parsed = parse_safetensors(file);
  if (!parsed) return parsed.error();
  const std::string* const kind_name = parsed->find_metadata("kind");
  const std::string* const model = parsed->find_metadata("model");
  if (kind_name == nullptr || model == nullptr)
    return error(ErrorCode::not_found, "gain: no metadata 'kind' and 'model'");
  if (*model != geometry.model)
    return error(ErrorCode::geometry_mismatch, "gain: fitted to '", *model, "', not to '",
                 geometry.model, "'; fit it anew");
  const GainKind kind = *kind_name == "identity" ? GainKind::identity
                        : *kind_name == "ridge"  ? GainKind::ridge
                                                 : GainKind::lstm;
  if (kind == GainKind::lstm && *kind_name != "lstm")
    return error(ErrorCode::unknown_field, "gain: kind '", *kind_name, "' unknown to this build");
  const std::size_t layers = geometry.layers.size();
  std::uint64_t hidden = 0;
  if (kind == GainKind::lstm) {
    const StoredTensor* const out = parsed->find("out.weight");
    if (out == nullptr || out->shape.size() != 2)
      return error(ErrorCode::geometry_mismatch, "gain: 'out.weight' is (layers, hidden)");
    hidden = out->shape[1];
    if (hidden < 1 || hidden > GainPredictor::max_hidden) {
      return error(ErrorCode::invalid_argument, "gain: ", hidden, " hidden units; 1 to ",
                   GainPredictor::max_hidden, " are possible");
    }
  }
  const std::vector<detail::GainTensor> wanted = detail::gain_tensors(kind, hidden);
  const StoredTensor* const held_out = parsed->find("held_out");
  if (parsed->tensors.size() != wanted.size() + (held_out != nullptr ? 1 : 0)) {
    return error(ErrorCode::unknown_field, "gain: ", parsed->tensors.size(),
                 " tensors where a predictor of kind ", *kind_name, " has ", wanted.size(),
                 " and held_out");
  }
  const std::size_t size = GainPredictor::size(kind, static_cast<std::int32_t>(hidden));
  std::vector<float> parameters(layers * size);
  std::size_t at = 0;
  for (const detail::GainTensor& want : wanted) {
    const StoredTensor* const tensor = parsed->find(want.name);
    if (tensor == nullptr) return error(ErrorCode::not_found, "gain: no tensor '", want.name, "'");
    std::vector<std::uint64_t> shape{layers};
    shape.insert(shape.end(), want.shape.begin(), want.shape.end());
    if (tensor->shape != shape) {
      return error(ErrorCode::geometry_mismatch, "gain: '", want.name, "' has ", tensor->elements(),
                   " elements in another shape than ", layers, " layers, ", gain_feature_count,
                   " features and ", hidden, " hidden units need");
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
      return error(ErrorCode::geometry_mismatch, "gain: 'held_out' of ", held_out->elements(),
                   " numbers is not (", layers, ", 2)");
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
KVMELD_LAZY [[nodiscard]] Result<std::vector<std::byte>> to_safetensors(
    const GainPredictor& predictor) {
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

KVMELD_NAMESPACE_END
