#pragma once
// Scores that say which cached tokens are worth computing again: attention of a question's queries,
// or how far a row is from what full text has there.

#include "engine.hpp"

#include <ggml-backend.h>
#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/policies/attention.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace quality {

using example::Tokens;

/// Copies the rotated queries of every layer while it is on: llama.cpp names them Qcur-<layer>.
class QueryTap {
 public:
  struct Layer {
    std::size_t channels = 0, heads = 0, tokens = 0;
    std::vector<float> values;  ///< (token, head, channel)
  };

  /// The callback of a context, with a tap as its data.
  static bool observe(ggml_tensor* tensor, bool asks, void* data) {
    auto& tap = *static_cast<QueryTap*>(data);
    const bool wanted =
        tap.on_ && tensor->op == GGML_OP_ROPE && std::string_view(tensor->name).starts_with("Qcur");
    if (asks) return wanted;
    if (wanted) {
      Layer layer{static_cast<std::size_t>(tensor->ne[0]),
                  static_cast<std::size_t>(tensor->ne[1]),
                  static_cast<std::size_t>(tensor->ne[2]),
                  {}};
      layer.values.resize(layer.channels * layer.heads * layer.tokens);
      ggml_backend_tensor_get(tensor, layer.values.data(), 0, layer.values.size() * sizeof(float));
      tap.layers_.push_back(std::move(layer));
    }
    return true;
  }

  void start() {
    layers_.clear();
    on_ = true;
  }
  /// The layers seen since `start`, in the engine's order.
  [[nodiscard]] const std::vector<Layer>& stop() {
    on_ = false;
    return layers_;
  }

 private:
  bool on_ = false;
  std::vector<Layer> layers_;
};

/// Attention mass that falls on every cached token, summed over layers, heads and queries, each
/// query's mass being 1; queries and keys stand at their positions in the merged sequence.
inline kvmeld::Result<std::vector<double>> attention_mass(const std::vector<QueryTap::Layer>& taps,
                                                          const kvmeld::llama::SequenceState& state,
                                                          const Tokens& tokens) {
  using kvmeld::ErrorCode;
  const kvmeld::Geometry& geometry = state.view().geometry();
  if (taps.size() != geometry.layers.size())
    return kvmeld::Status(ErrorCode::engine_failure, "the engine showed queries of " +
                                                         std::to_string(taps.size()) + " layers");
  const auto kv_heads = static_cast<std::size_t>(geometry.layers[0].planes[0].heads);
  const std::size_t group = taps[0].heads / kv_heads;
  const std::size_t channels = taps[0].channels, count = taps[0].tokens * group;
  // (query, layer, KV head, key channel); a query is one of the heads that share a KV head
  auto queries = std::make_shared<std::vector<float>>();
  for (std::size_t token = 0; token < taps[0].tokens; ++token)
    for (std::size_t g = 0; g < group; ++g)
      for (const QueryTap::Layer& layer : taps)
        for (std::size_t h = 0; h < kv_heads; ++h) {
          const float* from =
              layer.values.data() + (token * layer.heads + h * group + g) * channels;
          queries->insert(queries->end(), from, from + channels);
        }
  auto sealed = kvmeld::seal(state.view(), {.tokens = tokens, .positions = state.positions()});
  if (!sealed) return sealed.error();
  const kvmeld::Metadata metadata;
  const kvmeld::Source source{&*sealed, &sealed->payloads()[0], &metadata, {}};
  const kvmeld::Attention attention{.queries = queries,
                                    .count = static_cast<std::int64_t>(count),
                                    .frame = kvmeld::QueryFrame::post_rope};
  const auto aligned = attention.align({&source, 1}, 0);
  if (!aligned) return aligned.error();
  std::vector<double> mass(tokens.size());
  const std::vector<float>& weights = aligned->groups[0].head_weights;  // (…, query, token)
  for (std::size_t i = 0; i < weights.size(); ++i)
    mass[i % mass.size()] += static_cast<double>(weights[i]);
  return mass;
}

/// How far each token's rows are from those of another state of the same tokens: squared distance
/// ÷ that plane's mean squared norm, summed over layers, keys and values.
inline kvmeld::Result<std::vector<double>> deviation(const kvmeld::KvCacheRef& cache,
                                                     const kvmeld::KvCacheRef& full) {
  std::vector<double> out(static_cast<std::size_t>(cache.tokens()));
  const auto& layers = cache.geometry().layers;
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (std::size_t p = 0; p < layers[l].planes.size(); ++p) {
      std::vector<double> apart(out.size());
      double norm = 0;
      for (std::size_t t = 0; t < out.size(); ++t)
        for (std::int32_t h = 0; h < layers[l].planes[p].heads; ++h) {
          const kvmeld::CacheRow row{l, p, static_cast<std::int64_t>(t), h};
          const auto a = kvmeld::read_row(cache, row), b = kvmeld::read_row(full, row);
          if (!a) return a.error();
          if (!b) return b.error();
          for (std::size_t c = 0; c < a->size(); ++c) {
            const double d = static_cast<double>((*a)[c]) - static_cast<double>((*b)[c]);
            apart[t] += d * d;
            norm += static_cast<double>((*b)[c]) * static_cast<double>((*b)[c]);
          }
        }
      for (std::size_t t = 0; t < out.size() && norm > 0; ++t)
        out[t] += apart[t] / norm * static_cast<double>(out.size());
    }
  return out;
}

/// Marks the `count` tokens of highest score among those of every agent but the first, whose cache
/// is what full text has there. (agent, token)
inline std::vector<std::vector<std::uint8_t>> highest(std::span<const double> scores,
                                                      std::size_t prefix,
                                                      const std::vector<Tokens>& notes,
                                                      std::size_t count) {
  struct Place {
    std::size_t agent, token, at;
  };
  std::vector<Place> places;
  std::vector<std::vector<std::uint8_t>> out;
  std::size_t at = prefix;
  for (std::size_t agent = 0; agent < notes.size(); ++agent) {
    out.emplace_back(notes[agent].size(), std::uint8_t{0});
    for (std::size_t t = 0; t < notes[agent].size(); ++t, ++at)
      if (agent > 0) places.push_back({agent, t, at});
  }
  std::stable_sort(places.begin(), places.end(),
                   [&](const Place& a, const Place& b) { return scores[a.at] > scores[b.at]; });
  places.resize(std::min(count, places.size()));
  for (const Place& place : places) out[place.agent][place.token] = 1;
  return out;
}

}  // namespace quality
