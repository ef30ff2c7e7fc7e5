#pragma once

#include <cstddef>
#include <cstdint>

#include <kvmeld/anchor/anchor_pool.hpp>

KVMELD_NAMESPACE_BEGIN

/// Numbers that go together for a load; always under a budget of bytes (docs/anchors.md has the
/// memory that they cost).
struct AnchorPreset {
  AnchorCapacity capacity{};
  ReuseRule rule{};
  WindowLFU eviction{};
  /// Longest gap of tokens without counterpart over which offsets are interpolated.
  std::int32_t interpolation_window = 3;
};

namespace presets {

/// Few agents, short documents: up to 1000 anchors, τ .75, the least used of the 100 oldest goes.
[[nodiscard]] inline AnchorPreset light(std::size_t budget_bytes) {
  return {{1000, budget_bytes}, {.similarity = 0.75}, {100}, 3};
}
/// Many agents or documents: up to 5000 anchors, τ .85, the least used of the 500 oldest goes.
[[nodiscard]] inline AnchorPreset heavy(std::size_t budget_bytes) {
  return {{5000, budget_bytes}, {.similarity = 0.85}, {500}, 5};
}

}  // namespace presets

/// Bytes of K/V that one token of a geometry holds, in layer `first_layer` and above.
[[nodiscard]] inline std::int64_t kv_bytes_per_token(const Geometry& geometry,
                                                     std::size_t first_layer = 0) noexcept {
  std::int64_t bytes = 0;
  for (std::size_t l = first_layer; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes)
      bytes += detail::row_bytes(shape) * shape.heads;
  }
  return bytes;
}

/// Bytes of K/V that anchors of `tokens` tokens hold, each with a Δ for each of `contexts`
/// contexts: bases whole, offsets without the context-free layers. Text that follows segments comes
/// on top.
[[nodiscard]] inline std::int64_t anchor_memory(const Geometry& geometry, std::int64_t anchors,
                                                std::int64_t tokens, std::int64_t contexts,
                                                std::size_t context_free_layers = 1) noexcept {
  return anchors * tokens *
         (kv_bytes_per_token(geometry) +
          contexts * kv_bytes_per_token(geometry, context_free_layers));
}

KVMELD_NAMESPACE_END
