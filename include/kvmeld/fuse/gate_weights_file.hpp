#pragma once

/// Gate weights as safetensors files.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/codec/safetensors.hpp>
#include <kvmeld/codec/safetensors_writer.hpp>
#include <kvmeld/fuse/gate_weights.hpp>

KVMELD_NAMESPACE_BEGIN

/// Reads a gate's weights from tensors first.weight (hidden, 2 · channels), first.bias (hidden),
/// second.weight (outputs, hidden) and second.bias (outputs) of any float type, as linear layers of
/// PyTorch have them.
///
/// Networks by layer: each name behind `layers.N.`; keys and values apart: then behind `key.` or
/// `value.`. One output is a gate per token, as many as channels a gate per channel. Errors: those
/// of `parse_safetensors` and `GateWeights::make`; `not_found` (a tensor), `unknown_field` (a
/// tensor too many, or metadata `activation` that is not `tanh`), `geometry_mismatch` (shapes that
/// differ).
KVMELD_LAZY [[nodiscard]] Result<std::shared_ptr<const GateWeights>> gate_from_safetensors(
    std::span<const std::byte> file) {
  using detail::error;
  const auto parsed = parse_safetensors(file);
  if (!parsed) return parsed.error();
  const std::string* const activation = parsed->find_metadata("activation");
  if (activation != nullptr && *activation != "tanh")
    return error(ErrorCode::unknown_field, "gate: activation '", *activation,
                 "'; this build has tanh");
  GateShape shape;
  while (parsed->find("layers." + detail::decimal(shape.layers) +
                      (parsed->find("layers.0.first.weight") != nullptr ? ".first.weight"
                                                                        : ".key.first.weight")) !=
         nullptr) {
    ++shape.layers;
  }
  const std::string layer = shape.layers > 1 ? "layers.0." : "";
  shape.planes_apart = parsed->find(layer + "key.first.weight") != nullptr;
  if (parsed->tensors.size() != static_cast<std::size_t>(4 * shape.layers * shape.planes())) {
    return error(ErrorCode::unknown_field, "gate: ", parsed->tensors.size(), " tensors where ",
                 shape.layers, " layers and ", shape.planes(), " planes make ",
                 4 * shape.layers * shape.planes());
  }
  // Sizes come from the first layer; every tensor must then have them.
  std::uint64_t hidden = 0, outputs[2] = {}, channels[2] = {};
  for (std::int32_t p = 0; p < shape.planes(); ++p) {
    const std::string prefix = layer + (!shape.planes_apart ? "" : p == 0 ? "key." : "value.");
    const StoredTensor* const first = parsed->find(prefix + "first.weight");
    const StoredTensor* const second = parsed->find(prefix + "second.weight");
    if (first == nullptr || second == nullptr)
      return error(ErrorCode::not_found, "gate: no tensor '", prefix,
                   first == nullptr ? "first" : "second", ".weight'");
    if (first->shape.size() != 2 || second->shape.size() != 2 ||
        first->shape[0] > max_gate_hidden || first->shape[1] > 2048 || first->shape[1] % 2 != 0 ||
        (second->shape[0] != 1 && second->shape[0] != first->shape[1] / 2)) {
      return error(ErrorCode::geometry_mismatch, "gate: '", prefix,
                   "first.weight' is (hidden, 2 · channels), hidden at most ", max_gate_hidden,
                   ", and second.weight (1 or channels, hidden)");
    }
    hidden = first->shape[0];
    channels[p] = first->shape[1] / 2;
    outputs[p] = second->shape[0];
  }
  if (!shape.planes_apart) {
    channels[1] = channels[0];
    outputs[1] = outputs[0];
  }
  shape.hidden = static_cast<std::int32_t>(hidden);
  shape.key_channels = static_cast<std::int32_t>(channels[0]);
  shape.value_channels = static_cast<std::int32_t>(channels[1]);
  shape.kind = outputs[0] == 1 && outputs[1] == 1 ? GateKind::token : GateKind::channel;
  std::vector<float> parameters;
  KVMELD_TRY(detail::each_gate_network(
      shape, [&](const std::string& prefix, std::int32_t plane) -> Status {
        const auto h = static_cast<std::uint64_t>(shape.hidden),
                   c = static_cast<std::uint64_t>(shape.channels(plane)),
                   o = static_cast<std::uint64_t>(shape.outputs(plane));
        const std::pair<const char*, std::vector<std::uint64_t>> wanted[] = {
            {"first.weight", {h, 2 * c}},
            {"first.bias", {h}},
            {"second.weight", {o, h}},
            {"second.bias", {o}}};
        for (const auto& [name, dims] : wanted) {
          const StoredTensor* const tensor = parsed->find(prefix + name);
          if (tensor == nullptr)
            return error(ErrorCode::not_found, "gate: no tensor '", prefix, name, "'");
          if (tensor->shape != dims) {
            return error(ErrorCode::geometry_mismatch, "gate: '", prefix, name, "' has ",
                         tensor->elements(), " elements in another shape than that of ", h,
                         " hidden units and ", c, " channels");
          }
          const auto numbers = to_floats<float>(*tensor);
          if (!numbers) return numbers.error();
          parameters.insert(parameters.end(), numbers->begin(), numbers->end());
        }
        return {};
      }));
  return GateWeights::make(shape, parameters);
}

/// The same tensors, f32: reading them again gives equal weights, and writing those equal bytes.
KVMELD_LAZY [[nodiscard]] Result<std::vector<std::byte>> to_safetensors(
    const GateWeights& weights) {
  const GateShape& shape = weights.shape();
  SafetensorsWriter writer;
  writer.metadata("activation", "tanh");
  std::span<const float> rest = weights.parameters();
  (void)detail::each_gate_network(shape, [&](const std::string& prefix, std::int32_t plane) {
    const auto h = static_cast<std::size_t>(shape.hidden),
               c = static_cast<std::size_t>(shape.channels(plane)),
               o = static_cast<std::size_t>(shape.outputs(plane));
    const auto put = [&](const char* name, std::vector<std::uint64_t> dims, std::size_t count) {
      writer.floats(prefix + name, std::move(dims), rest.first(count));
      rest = rest.subspan(count);
    };
    put("first.weight", {h, 2 * c}, h * 2 * c);
    put("first.bias", {h}, h);
    put("second.weight", {o, h}, o * h);
    put("second.bias", {o}, o);
    return Status();
  });
  return writer.finish();
}

KVMELD_NAMESPACE_END
