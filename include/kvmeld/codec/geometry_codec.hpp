#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Memory that a decoded geometry may take: layers are written once and referred to, so few bytes
/// can ask for many.
inline constexpr std::size_t max_geometry_bytes = std::size_t{64} << 20;

KVMELD_LAZY void write_rope(ByteWriter& w, const RopeSpec& rope) {
  w.value(rope.kind);
  w.value(rope.pairing);
  w.value(rope.first_channel);
  w.value(rope.rotary_channels);
  w.value(rope.base);
  w.value(rope.scaling);
  w.value(rope.factor);
  w.value(rope.original_context);
  w.value(rope.low_freq_factor);
  w.value(rope.high_freq_factor);
  w.value(rope.beta_fast);
  w.value(rope.beta_slow);
  w.value(static_cast<std::uint8_t>(rope.yarn_truncate));
  w.value(rope.attention_factor);
  w.values(std::span<const float>(rope.short_factors));
  w.values(std::span<const float>(rope.long_factors));
  w.values(std::span<const float>(rope.factors));
}

/// An enumerator up to `last`; any other stays unread.
template <class E>
[[nodiscard]] E read_enum(ByteReader& r, E last) noexcept {
  const auto raw = r.value<std::uint8_t>();
  if (raw > static_cast<std::uint8_t>(last)) {
    r.fail(ErrorCode::unknown_field);
    return E{};
  }
  return static_cast<E>(raw);
}
[[nodiscard]] inline bool read_bool(ByteReader& r) noexcept {
  const auto raw = r.value<std::uint8_t>();
  if (raw > 1) r.fail(ErrorCode::corrupt);
  return raw == 1;
}

KVMELD_LAZY [[nodiscard]] RopeSpec read_rope(ByteReader& r) {
  RopeSpec rope;
  rope.kind = read_enum(r, RopeKind::multi_axis);
  rope.pairing = read_enum(r, RopePairing::half_split);
  rope.first_channel = r.value<std::int32_t>();
  rope.rotary_channels = r.value<std::int32_t>();
  rope.base = r.value<double>();
  rope.scaling = read_enum(r, RopeScaling::explicit_factors);
  rope.factor = r.value<double>();
  rope.original_context = r.value<std::int32_t>();
  rope.low_freq_factor = r.value<double>();
  rope.high_freq_factor = r.value<double>();
  rope.beta_fast = r.value<double>();
  rope.beta_slow = r.value<double>();
  rope.yarn_truncate = read_bool(r);
  rope.attention_factor = r.value<double>();
  rope.short_factors = r.values<float>();
  rope.long_factors = r.values<float>();
  rope.factors = r.values<float>();
  // a NaN equals nothing, itself included: such a cache could meet no other
  if (!(rope == rope)) r.fail(ErrorCode::corrupt);
  return rope;
}

KVMELD_LAZY void write_layer(ByteWriter& w, const LayerShape& layer) {
  w.value(layer.key_form);
  w.value(layer.window);
  write_rope(w, layer.rope);
  w.varint(layer.planes.size());
  for (const PlaneShape& p : layer.planes) {
    w.value(p.plane);
    w.value(p.type);
    w.value(p.heads);
    w.value(p.channels);
    w.value(static_cast<std::uint8_t>(p.rotary));
    w.value(p.scales);
    w.value(p.scale_group);
    w.value(p.hadamard);
  }
}

KVMELD_LAZY [[nodiscard]] LayerShape read_layer(ByteReader& r) {
  LayerShape layer;
  layer.key_form = read_enum(r, KeyForm::pre_rope);
  layer.window = r.value<std::int32_t>();
  layer.rope = read_rope(r);
  for (std::size_t n = r.count(20); r.ok() && n > 0; --n) {
    PlaneShape p;
    p.plane = read_enum(r, Plane::scale);
    p.type = read_enum(r, ElementType::q8_0);
    p.heads = r.value<std::int32_t>();
    p.channels = r.value<std::int32_t>();
    p.rotary = read_bool(r);
    p.scales = read_enum(r, ScaleScheme::per_channel_group);
    p.scale_group = r.value<std::int32_t>();
    p.hadamard = r.value<std::int32_t>();
    layer.planes.push_back(p);
  }
  return layer;
}

[[nodiscard]] inline std::size_t layer_memory(const LayerShape& layer) noexcept {
  const std::size_t factors =
      layer.rope.short_factors.size() + layer.rope.long_factors.size() + layer.rope.factors.size();
  return sizeof(LayerShape) + factors * sizeof(float) + layer.planes.size() * sizeof(PlaneShape);
}

/// Every field of a geometry in the order of its declaration; equal layers are written once.
/// docs/wire.md has the bytes.
KVMELD_LAZY void write_geometry(ByteWriter& w, const Geometry& geometry) {
  w.text(geometry.model);
  w.text(geometry.tokenizer);
  w.text(geometry.tenant);
  w.value(geometry.bos);
  w.value(geometry.trained_context);
  w.values(std::span<const TokenId>(geometry.placeholders));
  std::vector<std::vector<std::byte>> distinct;
  std::vector<std::size_t> index;
  for (const LayerShape& layer : geometry.layers) {
    ByteWriter one;  // bytes, not values, are compared: 0 and -0 are equal and have other ids
    write_layer(one, layer);
    const auto same = std::find_if(distinct.begin(), distinct.end(), [&](const auto& known) {
      return std::ranges::equal(known, one.written());
    });
    index.push_back(static_cast<std::size_t>(same - distinct.begin()));
    if (same == distinct.end()) distinct.push_back(one.take());
  }
  w.varint(distinct.size());
  for (const auto& layer : distinct) w.bytes(layer);
  w.varint(index.size());
  for (const std::size_t i : index) w.varint(i);
}

/// Reads what `write_geometry` wrote; a failure stays in the reader. The caller runs `validate` on
/// the result.
KVMELD_LAZY [[nodiscard]] Geometry read_geometry(ByteReader& r) {
  Geometry geometry;
  geometry.model = r.text();
  geometry.tokenizer = r.text();
  geometry.tenant = r.text();
  geometry.bos = r.value<TokenId>();
  geometry.trained_context = r.value<std::int64_t>();
  geometry.placeholders = r.values<TokenId>();
  std::vector<LayerShape> distinct;
  for (std::size_t n = r.count(81); r.ok() && n > 0; --n) distinct.push_back(read_layer(r));
  std::size_t memory = 0;
  for (std::size_t n = r.count(1); r.ok() && n > 0; --n) {
    const std::uint64_t i = r.varint();
    if (i >= distinct.size()) r.fail(ErrorCode::corrupt);
    if (!r.ok()) break;
    memory += layer_memory(distinct[static_cast<std::size_t>(i)]);
    if (memory > max_geometry_bytes) {
      r.fail(ErrorCode::oversized);
      break;
    }
    geometry.layers.push_back(distinct[static_cast<std::size_t>(i)]);
  }
  return geometry;
}

}  // namespace detail

KVMELD_NAMESPACE_END
