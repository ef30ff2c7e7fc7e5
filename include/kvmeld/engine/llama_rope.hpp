#pragma once

/// The rope of a llama.cpp model as its context will apply it.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gguf.h>
#include <llama.h>

#include <kvmeld/cache/rope.hpp>
#include <kvmeld/engine/llama_form.hpp>
#include <kvmeld/engine/llama_metadata.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN
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
    return error(ErrorCode::invalid_argument, "llama: '", path,
                 "' is no GGUF file that can be read");
  const std::int64_t tensor = gguf_find_tensor(file.get(), name);
  if (tensor < 0) return std::vector<float>();
  const std::size_t bytes = gguf_get_tensor_size(file.get(), tensor);
  if (gguf_get_tensor_type(file.get(), tensor) != GGML_TYPE_F32 || bytes % sizeof(float) != 0 ||
      bytes > most * sizeof(float))
    return error(ErrorCode::corrupt, "llama: tensor '", name, "' has ", bytes, " bytes; at most ",
                 most, " f32 values are expected");
  std::vector<float> values(bytes / sizeof(float));
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(path.c_str(), "rb"),
                                                           std::fclose);
  const std::size_t at =
      gguf_get_data_offset(file.get()) + gguf_get_tensor_offset(file.get(), tensor);
  if (!in || std::fseek(in.get(), static_cast<long>(at), SEEK_SET) != 0 ||
      std::fread(values.data(), sizeof(float), values.size(), in.get()) != values.size())
    return error(ErrorCode::truncated, "llama: '", path, "' ends before the ", bytes,
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
      return error(ErrorCode::unsupported, "llama: a model of this kind (rope base ", base,
                   ", context ", llama_model_n_ctx_train(model),
                   ") usually scales by a rope_freqs tensor, which only its file tells; give "
                   "GeometryOptions::gguf_path");
    return std::vector<float>();
  }
  Result<std::vector<float>> factors =
      gguf_floats(path, "rope_freqs.weight", static_cast<std::size_t>(pairs));
  if (factors && !factors->empty() && factors->size() != static_cast<std::size_t>(pairs))
    return error(ErrorCode::corrupt, "llama: rope_freqs holds ", factors->size(), " values for ",
                 pairs, " channel pairs");
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
    return error(ErrorCode::rope_unsupported, "llama: rope type ", static_cast<int>(type),
                 " has several position axes (M-RoPE), whose keys cannot be shifted by one number");
  const std::int64_t rotary = metadata.integer("rope.dimension_count", key_channels);
  if (rotary <= 0 || rotary > key_channels)
    return error(ErrorCode::corrupt, "llama: rope.dimension_count is ", rotary, " for heads of ",
                 key_channels);
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
    return error(ErrorCode::unsupported, "llama: longrope's factor tensors are not read yet");
  const double mix = parameters.yarn_ext_factor >= 0.0F
                         ? static_cast<double>(parameters.yarn_ext_factor)
                         : (yarn ? 1.0 : 0.0);
  if (mix != 0.0 && mix != 1.0)
    return error(ErrorCode::unsupported, "llama: yarn_ext_factor ", mix, "; 0 and 1 are known");

  Result<std::vector<float>> factors =
      rope_factors(model, metadata, rope.base, rope.rotary_channels / 2, gguf_path);
  if (!factors) return factors.error();
  if (!factors->empty()) {
    if (mix != 0.0)
      return error(ErrorCode::unsupported, "llama: yarn over a rope_freqs tensor of ",
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
KVMELD_NAMESPACE_END
