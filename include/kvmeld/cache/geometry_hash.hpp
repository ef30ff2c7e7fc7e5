#pragma once

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// Appends a rope's fields in the order of their declaration.
template <class Hash>
void hash_append(BasicHasher<Hash>& h, const RopeSpec& rope) {
  h.value(rope.kind);
  h.value(rope.pairing);
  h.value(rope.first_channel);
  h.value(rope.rotary_channels);
  h.value(rope.base);
  h.value(rope.scaling);
  h.value(rope.factor);
  h.value(rope.original_context);
  h.value(rope.low_freq_factor);
  h.value(rope.high_freq_factor);
  h.value(rope.beta_fast);
  h.value(rope.beta_slow);
  h.value(static_cast<std::uint8_t>(rope.yarn_truncate));
  h.value(rope.attention_factor);
  h.values(detail::span_of(rope.short_factors));
  h.values(detail::span_of(rope.long_factors));
  h.values(detail::span_of(rope.factors));
}

/// Appends a geometry's fields in the order of their declaration.
template <class Hash>
void hash_append(BasicHasher<Hash>& h, const Geometry& geometry) {
  h.text("kvmeld.geometry.v2");
  h.text(geometry.model);
  h.text(geometry.tokenizer);
  h.text(geometry.tenant);
  h.value(geometry.bos);
  h.value(geometry.trained_context);
  h.values(detail::span_of(geometry.placeholders));
  h.value(static_cast<std::uint64_t>(geometry.layers.size()));
  for (const LayerShape& layer : geometry.layers) {
    h.value(layer.key_form);
    h.value(layer.window);
    hash_append(h, layer.rope);
    h.value(static_cast<std::uint64_t>(layer.planes.size()));
    for (const PlaneShape& p : layer.planes) {
      h.value(p.plane);
      h.value(p.type);
      h.value(p.heads);
      h.value(p.channels);
      h.value(static_cast<std::uint8_t>(p.rotary));
      h.value(p.scales);
      h.value(p.scale_group);
      h.value(p.hadamard);
    }
  }
}

KVMELD_NAMESPACE_END
