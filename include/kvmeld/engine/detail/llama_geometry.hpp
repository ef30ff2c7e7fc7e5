#pragma once

/// The geometry of a llama.cpp model, from its metadata.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gguf.h>
#include <llama.h>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/engine/detail/llama_state.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

// The scalar GGUF metadata of a loaded model, by the keys that the engine itself reads, and which
// architectures are known.

namespace llama {
namespace detail {

/// Calls one of the engine's text getters (which return the whole length, or a negative number)
/// until the buffer is large enough.
template <class Getter>
[[nodiscard]] std::string metadata_text(const Getter& get) {
  std::string text(128, '\0');
  std::int32_t length = get(text.data(), text.size());
  if (length >= 0 && static_cast<std::size_t>(length) >= text.size()) {
    text.resize(static_cast<std::size_t>(length) + 1);
    length = get(text.data(), text.size());
  }
  text.resize(length < 0 ? 0 : static_cast<std::size_t>(length));
  return text;
}

/// A value as the engine prints it in the C locale. It prints reals with the decimal separator of
/// the locale under which the model was loaded, whatever the locale is now: the one run of other
/// bytes within a number is the separator.
[[nodiscard]] inline std::string without_locale(std::string value) {
  constexpr std::string_view own = "0123456789+-.eE";
  const std::size_t first = value.find_first_not_of(own);
  if (first == 0 || first == std::string::npos) return value;
  const std::size_t last = value.find_first_of(own, first);
  if (last == std::string::npos) return value;
  std::string number = value;
  number.replace(first, last - first, ".");
  return kvmeld::extend::parse_decimal<double>(number) ? number : value;
}

/// Reads `ARCHITECTURE.key`. Arrays are not among what the engine hands out.
class Metadata {
 public:
  explicit Metadata(const llama_model* model)
      : model_(model), architecture_(text_of("general.architecture")) {}

  [[nodiscard]] const std::string& architecture() const noexcept { return architecture_; }
  [[nodiscard]] std::string text(std::string_view key) const {
    return text_of(architecture_ + "." + std::string(key));
  }
  [[nodiscard]] bool has(std::string_view key) const { return !text(key).empty(); }
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t otherwise) const {
    return parse(key, otherwise);
  }
  [[nodiscard]] double real(std::string_view key, double otherwise) const {
    return parse(key, otherwise);
  }

 private:
  template <class Number>
  [[nodiscard]] Number parse(std::string_view key, Number otherwise) const {
    return kvmeld::extend::parse_decimal<Number>(without_locale(text(key))).value_or(otherwise);
  }
  [[nodiscard]] std::string text_of(const std::string& key) const {
    return metadata_text([&](char* out, std::size_t size) {
      return llama_model_meta_val_str(model_, key.c_str(), out, size);
    });
  }

  const llama_model* model_;
  std::string architecture_;
};

/// An architecture whose layers follow from its metadata: every layer has K and V of one shape and
/// the same rope, but for windows.
struct Architecture {
  std::string_view name;
  /// Layer l slides where l % period < period - 1; 0: no layer slides.
  std::int32_t window_period = 0;
  /// Rope base of sliding layers where the metadata gives none; 0: that of the others.
  double window_base = 0.0;
};

inline constexpr Architecture known_architectures[] = {
    {"llama"},      {"qwen2"},     {"qwen2moe"},  {"qwen3"},
    {"qwen3moe"},   {"gemma"},     {"phi2"},      {"phi3"},
    {"starcoder2"}, {"internlm2"}, {"granite"},   {"mistral3"},
    {"command-r"},  {"stablelm"},  {"gemma2", 2}, {"gemma3", 6, 10000.0},
    {"gpt-oss", 2},
};

[[nodiscard]] inline const Architecture* known_architecture(std::string_view name) noexcept {
  for (const Architecture& known : known_architectures)
    if (known.name == name) return &known;
  return nullptr;
}

}  // namespace detail
}  // namespace llama

// The rope of a llama.cpp model as its context will apply it.

namespace llama {
namespace detail {

/// Reads one small f32 tensor of a GGUF file; an empty result where the file has none of that name.
[[nodiscard]] inline Result<std::vector<float>> gguf_floats(const std::string& path,
                                                            const char* name, std::size_t most) {
  gguf_init_params no_data{};
  no_data.no_alloc = true;
  const std::unique_ptr<gguf_context, void (*)(gguf_context*)> file(
      gguf_init_from_file(path.c_str(), no_data), gguf_free);
  if (!file)
    return extend::error(ErrorCode::invalid_argument, "llama: '", path,
                         "' is no GGUF file that can be read");
  const std::int64_t tensor = gguf_find_tensor(file.get(), name);
  if (tensor < 0) return std::vector<float>();
  const std::size_t bytes = gguf_get_tensor_size(file.get(), tensor);
  if (gguf_get_tensor_type(file.get(), tensor) != GGML_TYPE_F32 || bytes % sizeof(float) != 0 ||
      bytes > most * sizeof(float))
    return extend::error(ErrorCode::corrupt, "llama: tensor '", name, "' has ", bytes,
                         " bytes; at most ", most, " f32 values are expected");
  std::vector<float> values(bytes / sizeof(float));
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(path.c_str(), "rb"),
                                                           std::fclose);
  const std::size_t at =
      gguf_get_data_offset(file.get()) + gguf_get_tensor_offset(file.get(), tensor);
  if (!in || std::fseek(in.get(), static_cast<long>(at), SEEK_SET) != 0 ||
      std::fread(values.data(), sizeof(float), values.size(), in.get()) != values.size())
    return extend::error(ErrorCode::truncated, "llama: '", path, "' ends before the ", bytes,
                         " bytes of tensor '", name, "' at ", at);
  return values;
}

/// Divisors of the frequencies, from the file's `rope_freqs` tensor (how Llama 3.1's scaling is
/// stored); empty: none.
///
/// The engine does not hand tensors out, so without the file the models that usually carry one are
/// refused.
[[nodiscard]] inline Result<std::vector<float>> rope_factors(const llama_model* model,
                                                             const Metadata& metadata, double base,
                                                             std::int32_t pairs,
                                                             const std::string& path) {
  if (path.empty()) {
    if (metadata.architecture() == "llama" && base >= 500000.0 &&
        llama_model_n_ctx_train(model) > 8192)
      return extend::error(
          ErrorCode::unsupported, "llama: a model of this kind (rope base ", base, ", context ",
          llama_model_n_ctx_train(model),
          ") usually scales by a rope_freqs tensor, which only its file tells; give "
          "GeometryOptions::gguf_path");
    return std::vector<float>();
  }
  Result<std::vector<float>> factors =
      gguf_floats(path, "rope_freqs.weight", static_cast<std::size_t>(pairs));
  if (factors && !factors->empty() && factors->size() != static_cast<std::size_t>(pairs))
    return extend::error(ErrorCode::corrupt, "llama: rope_freqs holds ", factors->size(),
                         " values for ", pairs, " channel pairs");
  return factors;
}

/// The rope of full-attention layers, with the parameters' overrides, by the engine's own rules
/// (llama.cpp, src/llama-context.cpp).
[[nodiscard]] inline Result<RopeSpec> rope_of(const llama_model* model, const Metadata& metadata,
                                              const llama_context_params& parameters,
                                              std::int32_t key_channels,
                                              const std::string& gguf_path) {
  const llama_rope_type type = llama_model_rope_type(model);
  if (type == LLAMA_ROPE_TYPE_NONE) return RopeSpec::none();
  if (type != LLAMA_ROPE_TYPE_NORM && type != LLAMA_ROPE_TYPE_NEOX)
    return extend::error(
        ErrorCode::rope_unsupported, "llama: rope type ", static_cast<int>(type),
        " has several position axes (M-RoPE), whose keys cannot be shifted by one number");
  const std::int64_t rotary = metadata.integer("rope.dimension_count", key_channels);
  if (rotary <= 0 || rotary > key_channels)
    return extend::error(ErrorCode::corrupt, "llama: rope.dimension_count is ", rotary,
                         " for heads of ", key_channels);
  const double base = parameters.rope_freq_base != 0.0F
                          ? static_cast<double>(parameters.rope_freq_base)
                          : metadata.real("rope.freq_base", 10000.0);
  RopeSpec rope = RopeSpec::rotary(
      static_cast<std::int32_t>(rotary), base,
      type == LLAMA_ROPE_TYPE_NORM ? RopePairing::interleaved : RopePairing::half_split);

  const double stated =
      metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 0.0));
  double factor = stated == 0.0 ? 1.0 : stated;
  if (parameters.rope_freq_scale != 0.0F)
    factor = 1.0 / static_cast<double>(parameters.rope_freq_scale);
  const std::string name = metadata.text("rope.scaling.type");
  bool yarn = name == "yarn";
  bool longrope = name == "longrope";
  if (parameters.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_NONE ||
      (parameters.rope_scaling_type < 0 && name == "none"))
    factor = 1.0;
  if (parameters.rope_scaling_type >= 0) {
    yarn = parameters.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_YARN;
    longrope = longrope || parameters.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_LONGROPE;
  }
  if (longrope)
    return extend::error(ErrorCode::unsupported,
                         "llama: longrope's factor tensors are not read yet");
  const double mix = parameters.yarn_ext_factor >= 0.0F
                         ? static_cast<double>(parameters.yarn_ext_factor)
                         : (yarn ? 1.0 : 0.0);
  if (mix != 0.0 && mix != 1.0)
    return extend::error(ErrorCode::unsupported, "llama: yarn_ext_factor ", mix,
                         "; 0 and 1 are known");

  Result<std::vector<float>> factors =
      rope_factors(model, metadata, rope.base, rope.rotary_channels / 2, gguf_path);
  if (!factors) return factors.error();
  if (!factors->empty()) {
    if (mix != 0.0)
      return extend::error(ErrorCode::unsupported, "llama: yarn over a rope_freqs tensor of ",
                           factors->size(), " values");
    rope = RopeSpec::with_factors(std::move(rope), *std::move(factors));
    rope.factor = factor;
  } else if (mix != 0.0) {
    const std::int64_t original = parameters.yarn_orig_ctx != 0
                                      ? static_cast<std::int64_t>(parameters.yarn_orig_ctx)
                                      : metadata.integer("rope.scaling.original_context_length",
                                                         llama_model_n_ctx_train(model));
    rope = RopeSpec::yarn(std::move(rope), factor,
                          static_cast<std::int32_t>(original > 0x7fffffff ? 0 : original));
    // The metadata's own betas are read by the engine for one architecture only; for the others 32
    // and 1 are what it runs with.
    const bool reads_betas = metadata.architecture() == "mistral3";
    const double fast = reads_betas ? metadata.real("rope.scaling.yarn_beta_fast", 32.0) : 32.0;
    const double slow = reads_betas ? metadata.real("rope.scaling.yarn_beta_slow", 1.0) : 1.0;
    rope.beta_fast =
        parameters.yarn_beta_fast >= 0.0F ? static_cast<double>(parameters.yarn_beta_fast) : fast;
    rope.beta_slow =
        parameters.yarn_beta_slow >= 0.0F ? static_cast<double>(parameters.yarn_beta_slow) : slow;
    rope.attention_factor *= metadata.real("rope.scaling.attn_factor", 1.0);
  } else if (factor != 1.0) {
    rope = RopeSpec::linear(std::move(rope), factor);
  }
  return rope;
}

}  // namespace detail
}  // namespace llama

// The geometry of a llama.cpp context, from the model's own metadata and the parameters the
// context is made with.

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

/// Side of the Hadamard matrix by which the engine rotates each head of a quantised plane before
/// storing it; 0: none.
///
/// Keys use the largest power of two (at least 64) that divides the head size, values always 64.
/// The engine's switch LLAMA_ATTN_ROT_DISABLE rotates it off; it is read here as the engine reads
/// it.
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
  using extend::error;
  const Result<std::string> name = adapted_model(
      options.model.empty() ? model_fingerprint(model) : options.model, options.adapters);
  if (!name) return name.error();
  const detail::Metadata metadata(model);
  const std::string& arch = metadata.architecture();
  const detail::Architecture* const known = detail::known_architecture(arch);
  if (known == nullptr && !options.any_architecture)
    return extend::error(
        ErrorCode::unsupported, "llama: architecture '", arch,
        "' is not one whose layers are known; set any_architecture and run probe before merging");
  if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model) ||
      metadata.has("attention.kv_lora_rank"))
    return extend::error(ErrorCode::unsupported, "llama: '", arch,
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
    return extend::error(ErrorCode::corrupt, "llama: metadata says ", layers, " layers, ", kv_heads,
                         " KV heads of ", key_channels, " and ", value_channels, " channels");

  const std::int32_t window = llama_model_n_swa(model);
  const std::int64_t period = metadata.integer("attention.sliding_window_pattern",
                                               known == nullptr ? 0 : known->window_period);
  if (window > 0 && (period <= 0 || known == nullptr))
    return extend::error(ErrorCode::unsupported, "llama: '", arch, "' has a sliding window of ",
                         window, " and no known pattern of layers");

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

// Keys of a cache view as numbers, rotated by the library's own rotation and fitted to what an
// engine has.

namespace llama {
namespace detail {

/// Undoes the orthonormal Hadamard transform of each block of `side` channels; it is its own
/// inverse.
inline void hadamard_blocks(float* row, std::int32_t channels, std::int32_t side) {
  const float norm = 1.0F / __builtin_sqrtf(static_cast<float>(side));
  for (std::int32_t block = 0; block < channels; block += side) {
    float* const x = row + block;
    for (std::int32_t half = 1; half < side; half *= 2) {
      for (std::int32_t i = 0; i < side; i += 2 * half) {
        for (std::int32_t j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
      }
    }
    for (std::int32_t i = 0; i < side; ++i) x[i] *= norm;
  }
}

/// The keys of one layer in the model's own basis, f32, for the tokens that both views' layers
/// hold. (token, head, channel)
[[nodiscard]] inline std::vector<float> layer_keys(const KvCacheRef& view, const KvCacheRef& other,
                                                   std::size_t layer) {
  const PlaneRef& plane = view.plane(layer, 0);
  const PlaneRef& mirror = other.plane(layer, 0);
  const auto channels = static_cast<std::size_t>(plane.shape.channels);
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(byte_size(plane.shape.type, plane.shape.channels)));
  std::vector<float> keys;
  for (std::int64_t t = 0; t < view.tokens(); ++t) {
    const std::int64_t slot = plane.slots.slot(t);
    if (slot < 0 || mirror.slots.slot(t) < 0) continue;
    for (std::int64_t head = 0; head < plane.shape.heads; ++head) {
      ::kvmeld::extend::gather_row(plane, slot, head, bytes.data());
      keys.resize(keys.size() + channels);
      float* const row = keys.data() + keys.size() - channels;
      ::kvmeld::extend::load_row(plane.shape.type, Isa::baseline, bytes.data(),
                                 plane.shape.channels, row);
      if (plane.shape.hadamard > 0)
        hadamard_blocks(row, plane.shape.channels, plane.shape.hadamard);
    }
  }
  return keys;
}

struct ShiftFit {
  double error = 0.0;        ///< at the best common scale
  double plain_error = 0.0;  ///< at scale 1
  double scale = 1.0;
  double norm_change = 0.0;
};

/// What storage alone may cost: two roundings of the element type, with room for angles that the
/// engine computes in f32.
[[nodiscard]] inline double storage_tolerance(ElementType type) noexcept {
  switch (type) {
    case ElementType::f32:
      return 0.001;
    case ElementType::f16:
      return 0.002;
    case ElementType::bf16:
      return 0.01;
    default:
      return 0.02;
  }
}

/// Rotates keys by the library's own table and row function and fits them to the engine's with one
/// common scale.
[[nodiscard]] inline Result<ShiftFit> fit_shift(const LayerShape& layer, std::vector<float> keys,
                                                std::span<const float> engine, std::int64_t shift,
                                                std::int64_t context_length) {
  const PlaneShape& shape = layer.planes[0];
  const std::int64_t shifts[1] = {shift};
  const Result<RopeTable> table = RopeTable::build(layer.rope, shifts, context_length);
  if (!table) return table.error();
  ShiftFit fit;
  double ours_engine = 0.0, ours_ours = 0.0, engine_engine = 0.0, off = 0.0;
  const auto channels = static_cast<std::size_t>(shape.channels);
  for (std::size_t at = 0; at + channels <= keys.size(); at += channels) {
    double before = 0.0, after = 0.0;
    for (std::size_t c = 0; c < channels; ++c)
      before += static_cast<double>(keys[at + c]) * static_cast<double>(keys[at + c]);
    if (layer.rope.kind == RopeKind::rotary)
      rotate_row(layer.rope.pairing, layer.rope.first_channel, layer.rope.rotary_channels,
                 table->row(0), keys.data() + at);
    for (std::size_t c = 0; c < channels; ++c) {
      const double x = static_cast<double>(keys[at + c]), y = static_cast<double>(engine[at + c]);
      after += x * x;
      off += (x - y) * (x - y);
      ours_engine += x * y;
      engine_engine += y * y;
    }
    ours_ours += after;
    if (before > 0.0) {
      const double change = __builtin_fabs(__builtin_sqrt(after / before) - 1.0);
      if (change > fit.norm_change) fit.norm_change = change;
    }
  }
  if (ours_ours <= 0.0 || engine_engine <= 0.0) return fit;
  fit.scale = ours_engine / ours_ours;
  fit.plain_error = __builtin_sqrt(off / engine_engine);
  const double rest = engine_engine - fit.scale * ours_engine;
  fit.error = rest > 0.0 ? __builtin_sqrt(rest / engine_engine) : 0.0;
  return fit;
}

}  // namespace detail
}  // namespace llama

KVMELD_NAMESPACE_END
