#pragma once

/// What a model's cache is made of: layers, planes, heads, rotation, adapters; and its name.

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

/// A token's number in its model's vocabulary; negative: no token, or one that is known by its K/V
/// alone.
using TokenId = std::int32_t;

/// What one plane of a layer holds.
enum class Plane : std::uint8_t { key, value, latent, rope_part, index_key, scale };

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(Plane value) noexcept {
  switch (value) {
    case Plane::key:
      return "key";
    case Plane::value:
      return "value";
    case Plane::latent:
      return "latent";
    case Plane::rope_part:
      return "rope_part";
    case Plane::index_key:
      return "index_key";
    case Plane::scale:
      return "scale";
  }
  return "unknown";
}

/// Whether stored keys carry their position (`post_rope`) or not.
enum class KeyForm : std::uint8_t { post_rope, pre_rope };

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(KeyForm value) noexcept {
  switch (value) {
    case KeyForm::post_rope:
      return "post_rope";
    case KeyForm::pre_rope:
      return "pre_rope";
  }
  return "unknown";
}

/// How integer elements get their magnitude. Block types such as q8_0 hold their scales inside and
/// use `none`.
enum class ScaleScheme : std::uint8_t { none, per_tensor, per_token_head, per_channel_group };

/// The name of an enumerator as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(ScaleScheme value) noexcept {
  switch (value) {
    case ScaleScheme::none:
      return "none";
    case ScaleScheme::per_tensor:
      return "per_tensor";
    case ScaleScheme::per_token_head:
      return "per_token_head";
    case ScaleScheme::per_channel_group:
      return "per_channel_group";
  }
  return "unknown";
}

/// One plane's declared shape: (token, head, channel).
struct PlaneShape {
  Plane plane = Plane::key;
  ElementType type = ElementType::f16;
  std::int32_t heads = 0;
  std::int32_t channels = 0;  ///< per head
  bool rotary = false;  ///< the layer's `RopeSpec` applies to these rows, whatever the key form
  ScaleScheme scales = ScaleScheme::none;
  std::int32_t scale_group = 0;  ///< channels that share a scale (`per_channel_group`)
  std::int32_t hadamard = 0;     ///< block size of a Hadamard basis; 0: the model's own basis

  bool operator==(const PlaneShape&) const = default;
};

/// One attention layer: its planes in canonical order (ascending `Plane`), its position scheme, its
/// window.
struct LayerShape {
  std::vector<PlaneShape> planes{};
  RopeSpec rope{};  ///< undeclared until said: refused by `validate`
  KeyForm key_form = KeyForm::post_rope;
  std::int32_t window = 0;  ///< tokens that a query attends to, its own included; 0: all

  bool operator==(const LayerShape&) const = default;
};

/// Everything that must be equal before two caches may be merged into one context.
struct Geometry {
  std::string model{};      ///< fingerprint of weights and quantisation, e.g. a file digest; under
                            ///< adapters `adapted_model`
  std::string tokenizer{};  ///< fingerprint of vocabulary and merges
  std::string tenant{};     ///< caches of different tenants are never merged
  TokenId bos = -1;         ///< beginning-of-sequence id; -1: the model has none
  std::int64_t trained_context = 0;  ///< positions the model was trained on; 0: unknown
  /// Ids that stand for content other than text, such as image patches or audio frames; ascending.
  /// Two tokens of such an id may stand for different content, so equal ids prove nothing, and no
  /// engine can compute K/V from the id.
  std::vector<TokenId> placeholders{};
  std::vector<LayerShape> layers{};

  /// Whether the content of a token with this id is not determined by the id; O(log placeholders).
  [[nodiscard]] bool is_placeholder(TokenId id) const noexcept {
    return std::binary_search(placeholders.begin(), placeholders.end(), id);
  }

  bool operator==(const Geometry&) const = default;
};

/// A key plane and a value plane of equal head count, the shape of most models; the keys rotary
/// where `rope` says so.
[[nodiscard]] KVMELD_API LayerShape attention_layer(ElementType type, std::int32_t heads,
                                                    std::int32_t channels, RopeSpec rope);

namespace detail {

[[nodiscard]] KVMELD_API Status check_plane(const PlaneShape& shape, std::size_t layer,
                                            std::size_t plane);

[[nodiscard]] inline Status differ(const char* field, const std::string& a, const std::string& b) {
  return error(ErrorCode::geometry_mismatch, field, " differs: '", a, "' against '", b, "'");
}
template <class Number>
[[nodiscard]] Status differ(const char* field, Number a, Number b) {
  return error(ErrorCode::geometry_mismatch, field, " differs: ", a, " against ", b);
}
template <class Number>
[[nodiscard]] Status differ(const char* field, std::size_t layer, Number a, Number b) {
  return error(ErrorCode::geometry_mismatch, field, " differs at layer ", layer, ": ", a,
               " against ", b);
}

/// The error for two lists of factors: their counts, or the first factor that differs.
[[nodiscard]] KVMELD_API Status differ(const char* field, std::size_t layer,
                                       const std::vector<float>& a, const std::vector<float>& b);

[[nodiscard]] KVMELD_API Status check_same(const RopeSpec& a, const RopeSpec& b, std::size_t layer);

}  // namespace detail

/// Checks that a geometry is one this build can hold and that each layer says how its keys are
/// rotated; O(layers).
///
/// Every entry point of the library calls it: views, `seal`, plans, gathers, projections, anchors,
/// files and messages. Errors: `unknown_field`, `rope_unsupported` (M-RoPE), `invalid_argument`
/// (extents that do not fit; a rope that is undeclared, unsound, or contradicted by the planes'
/// `rotary`), each naming the layer.
[[nodiscard]] KVMELD_API Status validate(const Geometry& geometry);

/// Refuses two geometries that differ, naming the first field that does: `a` is the existing one,
/// `b` the requested one.
[[nodiscard]] KVMELD_API Status check_same(const Geometry& a, const Geometry& b);

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
  h.values(extend::span_of(rope.short_factors));
  h.values(extend::span_of(rope.long_factors));
  h.values(extend::span_of(rope.factors));
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
  h.values(extend::span_of(geometry.placeholders));
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

// The adapters that were active while an engine encoded, as part of the model's name, so that
// adapted K/V is never merged with plain K/V.

/// How an adapter changes what a model computes.
enum class AdapterKind : std::uint8_t {
  lora,            ///< low-rank updates of weights (Hu et al. 2021, arXiv:2106.09685)
  control_vector,  ///< vectors added to the residual stream (Zou et al. 2023, arXiv:2310.01405)
};

/// One loaded adapter.
struct Adapter {
  std::string name = {};  ///< unique to the adapter: best a digest of its file
  float scale = 1.0F;     ///< finite, of either sign; 0: as if it were not loaded
  AdapterKind kind = AdapterKind::lora;
  std::int32_t first_layer =
      0;  ///< layers that it acts on, both ends included, as the engine counts
  std::int32_t last_layer = 0;  ///< 0 and 0: all that it has

  bool operator==(const Adapter&) const = default;
};

/// The adapters under which K/V is computed, or the statement that there are none. A
/// default-constructed value states neither and is refused.
///
/// K/V made under a LoRA or a control vector does not fit a cache of the plain model, and its bytes
/// do not show it. That is why no default means "none".
class Adapters {
 public:
  /// Not stated.
  Adapters() = default;
  /// The plain model.
  [[nodiscard]] static Adapters none() { return of({}); }
  /// These adapters, in any order.
  [[nodiscard]] KVMELD_API static Adapters of(std::vector<Adapter> loaded);

  [[nodiscard]] bool declared() const noexcept { return declared_; }
  [[nodiscard]] const std::vector<Adapter>& loaded() const noexcept { return loaded_; }

 private:
  bool declared_ = false;
  std::vector<Adapter> loaded_;
};

/// Names a model under adapters: the value of `Geometry::model` for all K/V that it computes.
///
/// Without adapters, or where all scales are 0, the name is `model` itself. Otherwise it is
/// `model`, "+adapters:" and 32 hexadecimal digits: XXH3-128 of `Hasher`'s bytes of text
/// "kvmeld.adapters.v1", u64 count, and for each adapter, ascending by (kind, name, first layer,
/// last layer): u8 kind, text name, f32 scale, i32 first and i32 last layer. So neither the order
/// in which they are listed nor the locale matters. O(adapters log adapters). Errors:
/// `invalid_argument` (adapters not stated; no name; a scale that is not finite; a range of layers
/// that descends; one adapter twice), `unknown_field`.
[[nodiscard]] KVMELD_API Result<std::string> adapted_model(std::string_view model,
                                                           const Adapters& adapters);

#if defined(KVMELD_COMPILED)
KVMELD_INSTANCE void hash_append<Xxh3_128>(Hasher&, const RopeSpec&);
KVMELD_INSTANCE void hash_append<Xxh3_128>(Hasher&, const Geometry&);
#endif

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/geometry.hpp>
#endif
