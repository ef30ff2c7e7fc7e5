#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <kvmeld/cache/rope.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/element.hpp>

KVMELD_NAMESPACE_BEGIN

using TokenId = std::int32_t;

/// What one plane of a layer holds.
enum class Plane : std::uint8_t { key, value, latent, rope_part, index_key, scale };

/// Whether stored keys carry their position (`post_rope`) or not.
enum class KeyForm : std::uint8_t { post_rope, pre_rope };

/// How integer elements get their magnitude. Block types such as q8_0 hold their scales inside and use `none`.
enum class ScaleScheme : std::uint8_t { none, per_tensor, per_token_head, per_channel_group };

/// One plane's declared shape: (token, head, channel).
struct PlaneShape {
  Plane plane = Plane::key;
  ElementType type = ElementType::f16;
  std::int32_t heads = 0;
  std::int32_t channels = 0;                ///< per head
  bool rotary = false;                      ///< rows are rotated by the layer's `RopeSpec` when they move
  ScaleScheme scales = ScaleScheme::none;
  std::int32_t scale_group = 0;             ///< channels that share a scale (`per_channel_group`)
  std::int32_t hadamard = 0;                ///< block size of a Hadamard basis; 0: the model's own basis

  bool operator==(const PlaneShape&) const = default;
};

/// One attention layer: its planes in canonical order (ascending `Plane`), its position scheme, its window.
struct LayerShape {
  std::vector<PlaneShape> planes{};
  RopeSpec rope{};
  KeyForm key_form = KeyForm::post_rope;
  std::int32_t window = 0;                  ///< tokens that a query sees back; 0: all of them

  bool operator==(const LayerShape&) const = default;
};

/// Everything that must agree before two caches may meet in one context.
struct Geometry {
  std::string model{};                      ///< fingerprint of weights and quantisation, e.g. a file digest
  std::string tokenizer{};                  ///< fingerprint of vocabulary and merges
  std::string tenant{};                     ///< caches of different tenants never meet
  TokenId bos = -1;                         ///< beginning-of-sequence id; -1: the model has none
  std::int64_t trained_context = 0;         ///< positions the model was trained on; 0: unknown
  std::vector<LayerShape> layers{};

  bool operator==(const Geometry&) const = default;
};

/// A key plane and a value plane of equal head count, the shape of most models.
[[nodiscard]] inline LayerShape attention_layer(ElementType type, std::int32_t heads, std::int32_t channels, RopeSpec rope) {
  LayerShape layer;
  layer.planes = {PlaneShape{.plane = Plane::key, .type = type, .heads = heads, .channels = channels,
                             .rotary = rope.kind == RopeKind::rotary},
                  PlaneShape{.plane = Plane::value, .type = type, .heads = heads, .channels = channels}};
  layer.rope = std::move(rope);
  return layer;
}

namespace detail {

[[nodiscard]] inline Status check_plane(const PlaneShape& shape, std::size_t layer, std::size_t plane) {
  if (shape.plane > Plane::scale || shape.type > ElementType::q8_0 || shape.scales > ScaleScheme::per_channel_group) {
    return error(ErrorCode::unknown_field, "layer ", layer, " plane ", plane, ": enumerator unknown to this build");
  }
  if (shape.heads < 0 || shape.channels < 0 || shape.channels % block_elements(shape.type) != 0) {
    return error(ErrorCode::invalid_argument, "layer ", layer, " plane ", plane, ": ", shape.heads, " heads of ",
                 shape.channels, " channels do not fit blocks of ", block_elements(shape.type));
  }
  if (shape.hadamard < 0 || (shape.hadamard != 0 && shape.channels % shape.hadamard != 0)) {
    return error(ErrorCode::invalid_argument, "layer ", layer, " plane ", plane, ": Hadamard block ", shape.hadamard,
                 " does not divide ", shape.channels, " channels");
  }
  if (shape.scales == ScaleScheme::per_channel_group &&
      (shape.scale_group <= 0 || shape.channels % shape.scale_group != 0)) {
    return error(ErrorCode::invalid_argument, "layer ", layer, " plane ", plane, ": scale group ", shape.scale_group,
                 " does not divide ", shape.channels, " channels");
  }
  return {};
}

[[nodiscard]] inline Status differ(const char* field, const std::string& a, const std::string& b) {
  return error(ErrorCode::geometry_mismatch, field, " differs: '", a, "' against '", b, "'");
}
template <class Number>
[[nodiscard]] Status differ(const char* field, std::size_t layer, Number a, Number b) {
  return error(ErrorCode::geometry_mismatch, field, " differs at layer ", layer, ": ", static_cast<std::int64_t>(a),
               " against ", static_cast<std::int64_t>(b));
}

}  // namespace detail

/// Checks that a geometry is one this build can hold; O(layers).
[[nodiscard]] inline Status validate(const Geometry& geometry) {
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const LayerShape& layer = geometry.layers[l];
    if (layer.key_form > KeyForm::pre_rope) return detail::error(ErrorCode::unknown_field, "layer ", l, ": key form unknown");
    if (layer.window < 0) return detail::error(ErrorCode::invalid_argument, "layer ", l, ": window ", layer.window, " < 0");
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      KVMELD_TRY(detail::check_plane(layer.planes[p], l, p));
      if (p > 0 && layer.planes[p - 1].plane >= layer.planes[p].plane) {
        return detail::error(ErrorCode::invalid_argument, "layer ", l, ": plane ", p, " is out of canonical order");
      }
      if (layer.planes[p].rotary) KVMELD_TRY(validate(layer.rope, layer.planes[p].channels));
    }
  }
  return {};
}

/// Refuses two geometries that differ, naming the first field that does. `a` is what is there, `b` what is asked.
[[nodiscard]] inline Status check_same(const Geometry& a, const Geometry& b) {
  using detail::differ;
  if (a.model != b.model) return differ("model", a.model, b.model);
  if (a.tokenizer != b.tokenizer) return differ("tokenizer", a.tokenizer, b.tokenizer);
  if (a.tenant != b.tenant) return differ("tenant", a.tenant, b.tenant);
  if (a.bos != b.bos) return differ("bos token", 0, a.bos, b.bos);
  if (a.trained_context != b.trained_context) return differ("trained context", 0, a.trained_context, b.trained_context);
  if (a.layers.size() != b.layers.size()) return differ("layer count", 0, a.layers.size(), b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    const LayerShape& x = a.layers[l];
    const LayerShape& y = b.layers[l];
    if (x.planes.size() != y.planes.size()) return differ("plane count", l, x.planes.size(), y.planes.size());
    if (x.window != y.window) return differ("window", l, x.window, y.window);
    if (x.key_form != y.key_form) return differ("key form", l, static_cast<int>(x.key_form), static_cast<int>(y.key_form));
    if (!(x.rope == y.rope)) return detail::error(ErrorCode::geometry_mismatch, "rope differs at layer ", l);
    for (std::size_t p = 0; p < x.planes.size(); ++p) {
      const PlaneShape& s = x.planes[p];
      const PlaneShape& t = y.planes[p];
      if (s.plane != t.plane) return differ("plane kind", l, static_cast<int>(s.plane), static_cast<int>(t.plane));
      if (s.type != t.type) return differ("element type", l, static_cast<int>(s.type), static_cast<int>(t.type));
      if (s.heads != t.heads) return differ("head count", l, s.heads, t.heads);
      if (s.channels != t.channels) return differ("head size", l, s.channels, t.channels);
      if (s.rotary != t.rotary) return differ("rotary flag", l, s.rotary, t.rotary);
      if (s.scales != t.scales || s.scale_group != t.scale_group) return differ("scales", l, s.scale_group, t.scale_group);
      if (s.hadamard != t.hadamard) return differ("Hadamard basis", l, s.hadamard, t.hadamard);
    }
  }
  return {};
}

KVMELD_NAMESPACE_END
