#pragma once

/// Bodies of geometry.hpp: validation, comparison.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

KVMELD_API LayerShape attention_layer(ElementType type, std::int32_t heads, std::int32_t channels,
                                      RopeSpec rope) {
  LayerShape layer;
  layer.planes = {
      PlaneShape{.plane = Plane::key,
                 .type = type,
                 .heads = heads,
                 .channels = channels,
                 .rotary = rope.kind == RopeKind::rotary || rope.kind == RopeKind::multi_axis},
      PlaneShape{.plane = Plane::value, .type = type, .heads = heads, .channels = channels}};
  layer.rope = std::move(rope);
  return layer;
}

namespace detail {

KVMELD_API Status check_plane(const PlaneShape& shape, std::size_t layer, std::size_t plane) {
  if (shape.plane > Plane::scale || shape.type > ElementType::q8_0 ||
      shape.scales > ScaleScheme::per_channel_group) {
    return error(ErrorCode::unknown_field, "layer ", layer, " plane ", plane,
                 ": enumerator unknown to this build");
  }
  if (shape.heads < 0 || shape.channels < 0 || shape.channels % block_elements(shape.type) != 0) {
    return error(ErrorCode::invalid_argument, "layer ", layer, " plane ", plane, ": ", shape.heads,
                 " heads of ", shape.channels, " channels do not fit blocks of ",
                 block_elements(shape.type));
  }
  if (shape.hadamard < 0 || (shape.hadamard != 0 && shape.channels % shape.hadamard != 0)) {
    return error(ErrorCode::invalid_argument, "layer ", layer, " plane ", plane,
                 ": Hadamard block ", shape.hadamard, " does not divide ", shape.channels,
                 " channels");
  }
  if (shape.scales == ScaleScheme::per_channel_group &&
      (shape.scale_group <= 0 || shape.channels % shape.scale_group != 0)) {
    return error(ErrorCode::invalid_argument, "layer ", layer, " plane ", plane, ": scale group ",
                 shape.scale_group, " does not divide ", shape.channels, " channels");
  }
  return {};
}

/// Refuses a layer whose rope is undeclared, invalid, or contradicted by the layer's planes.
///
/// The check does not depend on whether a plane is marked rotary, nor on the key form: keys that
/// the engine rotated but this library does not would silently give a wrong cache.
[[nodiscard]] inline Status check_layer_rope(const LayerShape& layer, std::size_t l) {
  const bool rotates = layer.rope.kind != RopeKind::none;
  const auto check = [&](std::int32_t channels) -> Status {
    const Status status = validate(layer.rope, channels);
    return status.ok() ? status : error(status.code(), "layer ", l, ": ", status.message());
  };
  // Without a rotary plane, the spec is checked against a head that is just large enough.
  const std::int64_t end =
      static_cast<std::int64_t>(layer.rope.first_channel) + layer.rope.rotary_channels;
  KVMELD_TRY(check(end > 0 && end <= INT32_MAX ? static_cast<std::int32_t>(end) : 1));
  // Where keys are stored as a part with position and a part without, only the former is rotated.
  bool apart = false, marked = layer.planes.empty();
  for (const PlaneShape& shape : layer.planes) apart = apart || shape.plane == Plane::rope_part;
  for (std::size_t p = 0; p < layer.planes.size(); ++p) {
    const PlaneShape& shape = layer.planes[p];
    if (shape.rotary && !rotates) {
      return error(ErrorCode::invalid_argument, "layer ", l, " plane ", p,
                   " is marked rotary and the layer's rope is ",
                   "RopeSpec::none(): clear PlaneShape::rotary, or declare the rope");
    }
    if (shape.rotary && (shape.plane == Plane::value || shape.plane == Plane::scale)) {
      return error(ErrorCode::invalid_argument, "layer ", l, " plane ", p,
                   " is marked rotary and holds ",
                   shape.plane == Plane::value ? "values" : "scales",
                   ", which no rope rotates: clear PlaneShape::rotary");
    }
    if (rotates && !shape.rotary && shape.plane == (apart ? Plane::rope_part : Plane::key)) {
      return error(ErrorCode::invalid_argument, "layer ", l, " declares a rope and plane ", p,
                   ", its ", apart ? "keys' rope part" : "keys",
                   ", is not marked rotary: set PlaneShape::rotary, or declare RopeSpec::none()");
    }
    if (shape.rotary) KVMELD_TRY(check(shape.channels));
    marked = marked || shape.rotary;
  }
  if (rotates && !marked) {
    return error(ErrorCode::invalid_argument, "layer ", l,
                 " declares a rope and no plane of it is rotary: ",
                 "set PlaneShape::rotary on the keys, or declare RopeSpec::none()");
  }
  return {};
}

KVMELD_API Status differ(const char* field, std::size_t layer, const std::vector<float>& a,
                         const std::vector<float>& b) {
  if (a.size() != b.size()) return differ(field, layer, a.size(), b.size());
  std::size_t i = 0;
  while (a[i] == b[i]) ++i;
  return differ(field, layer, a[i], b[i]);
}

KVMELD_API Status check_same(const RopeSpec& a, const RopeSpec& b, std::size_t layer) {
  if (a == b) return {};
  if (a.kind != b.kind) return differ("rope kind", layer, a.kind, b.kind);
  if (a.pairing != b.pairing) return differ("rope pairing", layer, a.pairing, b.pairing);
  if (a.first_channel != b.first_channel)
    return differ("rope first channel", layer, a.first_channel, b.first_channel);
  if (a.rotary_channels != b.rotary_channels)
    return differ("rope rotary channels", layer, a.rotary_channels, b.rotary_channels);
  if (a.base != b.base) return differ("rope base", layer, a.base, b.base);
  if (a.scaling != b.scaling) return differ("rope scaling", layer, a.scaling, b.scaling);
  if (a.factor != b.factor) return differ("rope factor", layer, a.factor, b.factor);
  if (a.original_context != b.original_context)
    return differ("rope original context", layer, a.original_context, b.original_context);
  if (a.low_freq_factor != b.low_freq_factor)
    return differ("rope low_freq_factor", layer, a.low_freq_factor, b.low_freq_factor);
  if (a.high_freq_factor != b.high_freq_factor)
    return differ("rope high_freq_factor", layer, a.high_freq_factor, b.high_freq_factor);
  if (a.beta_fast != b.beta_fast) return differ("rope beta_fast", layer, a.beta_fast, b.beta_fast);
  if (a.beta_slow != b.beta_slow) return differ("rope beta_slow", layer, a.beta_slow, b.beta_slow);
  if (a.yarn_truncate != b.yarn_truncate)
    return differ("rope yarn_truncate", layer, int{a.yarn_truncate}, int{b.yarn_truncate});
  if (a.attention_factor != b.attention_factor)
    return differ("rope attention factor", layer, a.attention_factor, b.attention_factor);
  if (a.short_factors != b.short_factors)
    return differ("rope short_factors", layer, a.short_factors, b.short_factors);
  if (a.long_factors != b.long_factors)
    return differ("rope long_factors", layer, a.long_factors, b.long_factors);
  return differ("rope factors", layer, a.factors, b.factors);
}

}  // namespace detail

KVMELD_API Status validate(const Geometry& geometry) {
  for (std::size_t i = 0; i < geometry.placeholders.size(); ++i) {
    const TokenId id = geometry.placeholders[i];
    if (id >= 0 && (i == 0 || geometry.placeholders[i - 1] < id)) continue;
    return extend::error(ErrorCode::invalid_argument, "placeholder ", i, " of ",
                         geometry.placeholders.size(), " is id ", id,
                         ": give ids of 0 or more, ascending, each once");
  }
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const LayerShape& layer = geometry.layers[l];
    if (layer.key_form > KeyForm::pre_rope)
      return extend::error(ErrorCode::unknown_field, "layer ", l, ": key form unknown");
    if (layer.window < 0)
      return extend::error(ErrorCode::invalid_argument, "layer ", l, ": window ", layer.window,
                           " < 0");
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      KVMELD_TRY(detail::check_plane(layer.planes[p], l, p));
      if (p > 0 && layer.planes[p - 1].plane >= layer.planes[p].plane) {
        return extend::error(ErrorCode::invalid_argument, "layer ", l, ": plane ", p,
                             " is out of canonical order");
      }
    }
    KVMELD_TRY(detail::check_layer_rope(layer, l));
  }
  return {};
}

KVMELD_API Status check_same(const Geometry& a, const Geometry& b) {
  using detail::differ;
  if (a.model != b.model) return differ("model", a.model, b.model);
  if (a.tokenizer != b.tokenizer) return differ("tokenizer", a.tokenizer, b.tokenizer);
  if (a.tenant != b.tenant) return differ("tenant", a.tenant, b.tenant);
  if (a.bos != b.bos) return differ("bos token", a.bos, b.bos);
  if (a.placeholders != b.placeholders) {
    if (a.placeholders.size() != b.placeholders.size()) {
      return differ("count of placeholder ids", a.placeholders.size(), b.placeholders.size());
    }
    std::size_t i = 0;
    while (a.placeholders[i] == b.placeholders[i]) ++i;
    return differ("placeholder id", a.placeholders[i], b.placeholders[i]);
  }
  if (a.trained_context != b.trained_context)
    return differ("trained context", a.trained_context, b.trained_context);
  if (a.layers.size() != b.layers.size())
    return differ("layer count", a.layers.size(), b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    const LayerShape& x = a.layers[l];
    const LayerShape& y = b.layers[l];
    if (x.planes.size() != y.planes.size())
      return differ("plane count", l, x.planes.size(), y.planes.size());
    if (x.window != y.window) return differ("window", l, x.window, y.window);
    if (x.key_form != y.key_form) return differ("key form", l, x.key_form, y.key_form);
    KVMELD_TRY(detail::check_same(x.rope, y.rope, l));
    for (std::size_t p = 0; p < x.planes.size(); ++p) {
      const PlaneShape& s = x.planes[p];
      const PlaneShape& t = y.planes[p];
      if (s.plane != t.plane) return differ("plane kind", l, s.plane, t.plane);
      if (s.type != t.type) return differ("element type", l, s.type, t.type);
      if (s.heads != t.heads) return differ("head count", l, s.heads, t.heads);
      if (s.channels != t.channels) return differ("head size", l, s.channels, t.channels);
      if (s.rotary != t.rotary) return differ("rotary flag", l, int{s.rotary}, int{t.rotary});
      if (s.scales != t.scales) return differ("scale scheme", l, s.scales, t.scales);
      if (s.scale_group != t.scale_group)
        return differ("scale group", l, s.scale_group, t.scale_group);
      if (s.hadamard != t.hadamard) return differ("Hadamard basis", l, s.hadamard, t.hadamard);
    }
  }
  return {};
}

KVMELD_API Adapters Adapters::of(std::vector<Adapter> loaded) {
  Adapters out;
  out.declared_ = true;
  out.loaded_ = std::move(loaded);
  return out;
}

namespace detail {

[[nodiscard]] inline Status check_adapter(const Adapter& adapter, std::size_t index) {
  if (adapter.kind > AdapterKind::control_vector) {
    return error(ErrorCode::unknown_field, "adapter ", index, ": kind ",
                 static_cast<int>(adapter.kind), " is none that this build knows");
  }
  if (adapter.name.empty()) {
    return error(ErrorCode::invalid_argument, "adapter ", index,
                 " has no name; give what tells it from every other, ",
                 "best a digest of its file");
  }
  if (!std::isfinite(adapter.scale)) {
    return error(ErrorCode::invalid_argument, "adapter '", adapter.name, "': scale ", adapter.scale,
                 " is not finite");
  }
  if (adapter.first_layer < 0 || adapter.last_layer < adapter.first_layer) {
    return error(ErrorCode::invalid_argument, "adapter '", adapter.name, "': layers ",
                 adapter.first_layer, " to ", adapter.last_layer,
                 "; give an ascending range, or 0 and 0 for all");
  }
  return {};
}

}  // namespace detail

KVMELD_API Result<std::string> adapted_model(std::string_view model, const Adapters& adapters) {
  if (!adapters.declared()) {
    return extend::error(ErrorCode::invalid_argument, "adapters of model '", model,
                         "': nobody said which are loaded; ",
                         "write Adapters::none(), or list them with Adapters::of");
  }
  const auto place = [](const Adapter& a) {
    return std::tie(a.kind, a.name, a.first_layer, a.last_layer);
  };
  std::vector<Adapter> acting;
  for (std::size_t i = 0; i < adapters.loaded().size(); ++i) {
    const Adapter& adapter = adapters.loaded()[i];
    KVMELD_TRY(detail::check_adapter(adapter, i));
    if (adapter.scale < 0.0F || adapter.scale > 0.0F) acting.push_back(adapter);
  }
  std::sort(acting.begin(), acting.end(),
            [&](const Adapter& a, const Adapter& b) { return place(a) < place(b); });
  for (std::size_t i = 1; i < acting.size(); ++i) {
    if (place(acting[i - 1]) != place(acting[i])) continue;
    return extend::error(ErrorCode::invalid_argument, "adapter '", acting[i].name,
                         "' is listed twice, with scales ", acting[i - 1].scale, " and ",
                         acting[i].scale, "; list it once, with the scale that acts");
  }
  std::string name(model);
  if (acting.empty()) return name;
  Hasher hasher;
  hasher.text("kvmeld.adapters.v1");
  hasher.value(static_cast<std::uint64_t>(acting.size()));
  for (const Adapter& adapter : acting) {
    hasher.value(adapter.kind);
    hasher.text(adapter.name);
    hasher.value(adapter.scale);
    hasher.value(adapter.first_layer);
    hasher.value(adapter.last_layer);
  }
  return name + "+adapters:" + hasher.digest().hex();
}

KVMELD_NAMESPACE_END
