#pragma once

/// The geometry of a llama.cpp context, from the model's own metadata and the parameters the
/// context is made with.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <llama.h>

#include <kvmeld/cache/adapters.hpp>
#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/engine/llama_form.hpp>
#include <kvmeld/engine/llama_metadata.hpp>
#include <kvmeld/engine/llama_rope.hpp>

KVMELD_NAMESPACE_BEGIN
namespace llama {

/// What the loaded model cannot say by itself.
struct GeometryOptions {
  std::string model =
      {};  ///< fingerprint of the weights, best a digest of the file; empty: `model_fingerprint`
  /// What is loaded on the context: `Adapters::none()`, or `Adapters::of` the LoRAs that
  /// `llama_set_adapters_lora` got, with their scales, and the control vectors of
  /// `llama_set_adapter_cvec` (scale 1, its first and last layer). The engine does not tell them,
  /// so there is no default: left out, `geometry` refuses.
  Adapters adapters = {};
  std::string tenant = {};
  /// Ids that stand for images or sounds, ascending: `Geometry::placeholders`. The engine does not
  /// tell them.
  std::vector<TokenId> placeholders{};
  std::string gguf_path = {};  ///< the model's file, from which a `rope_freqs` tensor is read;
                               ///< empty: models that need it are refused
  /// Take an architecture's metadata at its word although this library does not know how the engine
  /// builds its layers. `probe` then decides: do not merge without it.
  bool any_architecture = false;
};

/// Names a model by its description, size, parameter count and all scalar metadata.
///
/// Two quantisations differ, two fine-tunes with the same metadata and tensors of the same sizes do
/// not: where such may meet, give `GeometryOptions::model` a digest of the file. O(metadata).
[[nodiscard]] inline std::string model_fingerprint(const llama_model* model) {
  Hasher hasher;
  hasher.text("kvmeld.llama.model");
  std::string text(256, '\0');
  const std::int32_t length = llama_model_desc(model, text.data(), text.size());
  hasher.text(std::string_view(
      text.data(), length < 0 ? 0 : (std::min)(text.size() - 1, static_cast<std::size_t>(length))));
  hasher.value(llama_model_size(model));
  hasher.value(llama_model_n_params(model));
  const std::int32_t count = llama_model_meta_count(model);
  for (std::int32_t i = 0; i < count; ++i) {
    hasher.text(detail::metadata_text([&](char* out, std::size_t size) {
      return llama_model_meta_key_by_index(model, i, out, size);
    }));
    hasher.text(detail::without_locale(detail::metadata_text([&](char* out, std::size_t size) {
      return llama_model_meta_val_str_by_index(model, i, out, size);
    })));
  }
  return "llama:" + hasher.digest().hex();
}

/// Names a tokenizer by its kind and every token's text, in order. O(vocabulary).
[[nodiscard]] inline std::string tokenizer_fingerprint(const llama_model* model) {
  const llama_vocab* const vocabulary = llama_model_get_vocab(model);
  Hasher hasher;
  hasher.text("kvmeld.llama.tokenizer");
  hasher.value(static_cast<std::int32_t>(llama_vocab_type(vocabulary)));
  const std::int32_t count = llama_vocab_n_tokens(vocabulary);
  hasher.value(count);
  if (llama_vocab_type(vocabulary) != LLAMA_VOCAB_TYPE_NONE)
    for (std::int32_t t = 0; t < count; ++t) {
      const char* const text = llama_vocab_get_text(vocabulary, t);
      hasher.text(text == nullptr ? std::string_view() : std::string_view(text));
    }
  return "llama:" + hasher.digest().hex();
}

namespace detail {

/// Side of the Hadamard matrix by which the engine turns each head of a quantised plane before
/// storing it; 0: none.
///
/// Keys use the largest power of two (at least 64) that divides the head size, values always 64.
/// The engine's switch LLAMA_ATTN_ROT_DISABLE turns it off; it is read here as the engine reads it.
[[nodiscard]] inline std::int32_t hadamard_side(ElementType type, std::int32_t channels,
                                                Plane plane) {
  if (type != ElementType::q8_0 || channels % 64 != 0) return 0;
  if (const char* off = std::getenv("LLAMA_ATTN_ROT_DISABLE");
      off != nullptr && std::atoi(off) != 0)
    return 0;
  std::int32_t side = 64;
  if (plane == Plane::key)
    while (channels % (2 * side) == 0) side *= 2;
  return side;
}

}  // namespace detail

/// The geometry of contexts that `llama_init_from_model(model, parameters)` makes.
///
/// Shapes and rope come from the GGUF metadata as the engine reads them (llama.cpp,
/// src/llama-model.cpp), element types and rope overrides from the parameters. Nothing is guessed
/// from a name: an architecture whose layers are built in a way that the metadata does not tell is
/// refused. `read` compares every export with it, `probe` compares it with the engine's keys. The
/// model's name holds the adapters (`adapted_model`). Errors: `invalid_argument` (adapters that
/// nobody declared, or that cannot be), `unsupported` (architecture, element type, latent
/// attention, unknown sliding pattern, rope tensor that cannot be read), `rope_unsupported`
/// (M-RoPE), `corrupt` (metadata that is missing or contradicts itself). O(metadata + vocabulary).
[[nodiscard]] inline Result<Geometry> geometry(const llama_model* model,
                                               const llama_context_params& parameters,
                                               const GeometryOptions& options) {
  using detail::error;
  const Result<std::string> name = adapted_model(
      options.model.empty() ? model_fingerprint(model) : options.model, options.adapters);
  if (!name) return name.error();
  const detail::Metadata metadata(model);
  const std::string& arch = metadata.architecture();
  const detail::Architecture* const known = detail::known_architecture(arch);
  if (known == nullptr && !options.any_architecture)
    return error(
        ErrorCode::unsupported, "llama: architecture '", arch,
        "' is not one whose layers are known; set any_architecture and run probe before merging");
  if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model) ||
      metadata.has("attention.kv_lora_rank"))
    return error(ErrorCode::unsupported, "llama: '", arch,
                 "' keeps recurrent or latent state, which is no key and value plane");
  const Result<ElementType> key_type = element_type(static_cast<std::int32_t>(parameters.type_k));
  if (!key_type) return key_type.error();
  const Result<ElementType> value_type = element_type(static_cast<std::int32_t>(parameters.type_v));
  if (!value_type) return value_type.error();

  const std::int32_t heads = llama_model_n_head(model);
  const std::int64_t default_channels = heads > 0 ? llama_model_n_embd(model) / heads : 0;
  const std::int64_t key_channels = metadata.integer("attention.key_length", default_channels);
  const std::int64_t value_channels = metadata.integer("attention.value_length", default_channels);
  const std::int64_t kv_heads =
      metadata.integer("attention.head_count_kv", llama_model_n_head_kv(model));
  const std::int32_t layers = llama_model_n_layer(model);
  constexpr std::int64_t most = 1 << 20;
  if (layers <= 0 || kv_heads <= 0 || kv_heads > most || key_channels <= 0 || key_channels > most ||
      value_channels <= 0 || value_channels > most)
    return error(ErrorCode::corrupt, "llama: metadata says ", layers, " layers, ", kv_heads,
                 " KV heads of ", key_channels, " and ", value_channels, " channels");

  const std::int32_t window = llama_model_n_swa(model);
  const std::int64_t period = metadata.integer("attention.sliding_window_pattern",
                                               known == nullptr ? 0 : known->window_period);
  if (window > 0 && (period <= 0 || known == nullptr))
    return error(ErrorCode::unsupported, "llama: '", arch, "' has a sliding window of ", window,
                 " and no known pattern of layers");

  Result<RopeSpec> full = detail::rope_of(
      model, metadata, parameters, static_cast<std::int32_t>(key_channels), options.gguf_path);
  if (!full) return full.error();
  RopeSpec windowed = *full;
  if (window > 0) {
    windowed.base = metadata.real("rope.freq_base_swa",
                                  known->window_base > 0 ? known->window_base : full->base);
    if (known->window_base > 0) windowed.scaling = RopeScaling::none, windowed.factor = 1.0;
  }

  Geometry result;
  result.model = *name;
  result.tokenizer = tokenizer_fingerprint(model);
  result.tenant = options.tenant;
  result.placeholders = options.placeholders;
  const llama_vocab* const vocabulary = llama_model_get_vocab(model);
  if (llama_vocab_get_add_bos(vocabulary)) result.bos = llama_vocab_bos(vocabulary);
  result.trained_context = llama_model_n_ctx_train(model);
  for (std::int32_t l = 0; l < layers; ++l) {
    const bool slides = window > 0 && l % period < period - 1;
    LayerShape layer =
        attention_layer(*key_type, static_cast<std::int32_t>(kv_heads),
                        static_cast<std::int32_t>(key_channels), slides ? windowed : *full);
    layer.planes[1].type = *value_type;
    layer.planes[1].channels = static_cast<std::int32_t>(value_channels);
    for (PlaneShape& plane : layer.planes)
      plane.hadamard = detail::hadamard_side(plane.type, plane.channels, plane.plane);
    if (slides) layer.window = window;
    result.layers.push_back(std::move(layer));
  }
  if (Status status = validate(result); !status) return status;
  return result;
}

}  // namespace llama
KVMELD_NAMESPACE_END
