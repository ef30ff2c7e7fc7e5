#pragma once

/// Weight predictors as safetensors files.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/safetensors.hpp>
#include <kvmeld/codec/safetensors_writer.hpp>
#include <kvmeld/fuse/learned_weights.hpp>

KVMELD_NAMESPACE_BEGIN

/// Reads tensors first.weight (hidden, inputs), first.bias (hidden), second.weight (1, hidden) and
/// second.bias (1) of any float type.
///
/// Errors: those of `parse_safetensors` and `WeightPredictor::make`; `not_found`, `unknown_field`,
/// `geometry_mismatch` (shapes).
KVMELD_LAZY [[nodiscard]] Result<std::shared_ptr<const WeightPredictor>> predictor_from_safetensors(
    std::span<const std::byte> file) {
  const auto parsed = parse_safetensors(file);
  if (!parsed) return parsed.error();
  if (parsed->tensors.size() != 4)
    return detail::error(ErrorCode::unknown_field, "weight predictor: ", parsed->tensors.size(),
                         " tensors where there are 4");
  const StoredTensor* const first = parsed->find("first.weight");
  if (first == nullptr)
    return detail::error(ErrorCode::not_found, "weight predictor: no tensor 'first.weight'");
  if (first->shape.size() != 2 || first->shape[0] > WeightPredictor::max_hidden ||
      first->shape[1] > WeightPredictor::max_inputs) {
    return detail::error(ErrorCode::geometry_mismatch,
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
      return detail::error(ErrorCode::not_found, "weight predictor: no tensor '", name, "'");
    if (tensor->shape != dims) {
      return detail::error(ErrorCode::geometry_mismatch, "weight predictor: '", name, "' has ",
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
KVMELD_LAZY [[nodiscard]] Result<std::vector<std::byte>> to_safetensors(
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

KVMELD_NAMESPACE_END
