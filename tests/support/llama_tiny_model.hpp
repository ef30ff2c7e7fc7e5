#pragma once
// Small random models as GGUF files (version 3 of the format), so that tests of the engine need no
// download.

#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace test {

struct TinyModel {
  std::string architecture = "llama";
  std::uint32_t layers = 3;
  std::uint32_t heads = 4;
  std::uint32_t kv_heads = 2;
  std::uint32_t channels = 32;  // of a head
  std::uint32_t hidden = 96;
  std::uint32_t vocabulary = 300;
  float rope_base = 10000.0F;
  std::string rope_scaling;  // "yarn", "linear"; empty: none
  float rope_factor = 4.0F;
  std::uint32_t original_context = 64;
  std::uint32_t window = 0;
  std::vector<float> rope_factors;  // becomes a rope_freqs tensor
  std::vector<std::int32_t> rope_sections;
  std::uint32_t seed = 1;
};

/// Writes the model into a temporary file, which goes away with the object.
class TinyModelFile {
 public:
  explicit TinyModelFile(const TinyModel& model) : random_(model.seed) {
    static int count = 0;
    const std::string name =
        "kvmeld-tiny-" + std::to_string(getpid()) + "-" + std::to_string(count++) + ".gguf";
    path_ = (std::filesystem::temp_directory_path() / name).string();
    const std::uint32_t embedding = model.heads * model.channels;
    metadata(model, embedding);
    tensors(model, embedding);
    save();
  }
  TinyModelFile(const TinyModelFile&) = delete;
  TinyModelFile& operator=(const TinyModelFile&) = delete;
  ~TinyModelFile() { std::remove(path_.c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::vector<float> data;
  };

  template <class Word>
  static void put(std::string& out, Word word) {
    out.append(reinterpret_cast<const char*>(&word), sizeof word);
  }
  static void put_text(std::string& out, const std::string& text) {
    put(out, static_cast<std::uint64_t>(text.size()));
    out += text;
  }
  // Type numbers of GGUF values: u32 4, i32 5, f32 6, text 8, array 9.
  void key(const std::string& name, std::uint32_t type) {
    put_text(keys_, name);
    put(keys_, type);
    ++key_count_;
  }
  void add(const std::string& name, std::uint32_t value) { key(name, 4), put(keys_, value); }
  void add(const std::string& name, float value) { key(name, 6), put(keys_, value); }
  void add(const std::string& name, const std::string& value) {
    key(name, 8), put_text(keys_, value);
  }
  void add(const std::string& name, const std::vector<std::int32_t>& values) {
    key(name, 9);
    put(keys_, std::uint32_t{5});
    put(keys_, static_cast<std::uint64_t>(values.size()));
    for (const std::int32_t v : values) put(keys_, v);
  }

  void metadata(const TinyModel& model, std::uint32_t embedding) {
    const std::string a = model.architecture + ".";
    add("general.architecture", model.architecture);
    add("general.name", std::string("tiny"));
    add("tokenizer.ggml.model", std::string("no_vocab"));
    add(a + "vocab_size", model.vocabulary);
    add(a + "context_length", std::uint32_t{4096});
    add(a + "embedding_length", embedding);
    add(a + "block_count", model.layers);
    add(a + "feed_forward_length", model.hidden);
    add(a + "attention.head_count", model.heads);
    add(a + "attention.head_count_kv", model.kv_heads);
    add(a + "attention.key_length", model.channels);
    add(a + "attention.value_length", model.channels);
    add(a + "attention.layer_norm_rms_epsilon", 1e-5F);
    add(a + "rope.dimension_count", model.channels);
    add(a + "rope.freq_base", model.rope_base);
    if (model.window > 0) add(a + "attention.sliding_window", model.window);
    if (!model.rope_sections.empty()) add(a + "rope.dimension_sections", model.rope_sections);
    if (!model.rope_scaling.empty()) {
      add(a + "rope.scaling.type", model.rope_scaling);
      add(a + "rope.scaling.factor", model.rope_factor);
      add(a + "rope.scaling.original_context_length", model.original_context);
    }
  }

  /// About normal, by the sum of four uniform numbers.
  float gaussian() {
    float sum = 0.0F;
    for (int i = 0; i < 4; ++i) {
      random_ = random_ * 1664525U + 1013904223U;
      sum += static_cast<float>(random_ >> 8) / 16777216.0F - 0.5F;
    }
    return sum * 1.732F;
  }
  void matrix(const std::string& name, std::uint64_t in, std::uint64_t out) {
    Tensor tensor{name, {in, out}, std::vector<float>(in * out)};
    for (float& x : tensor.data) x = gaussian() / std::sqrt(static_cast<float>(in));
    tensors_.push_back(std::move(tensor));
  }
  void vector(const std::string& name, std::uint64_t size, float mean, float spread) {
    Tensor tensor{name, {size}, std::vector<float>(size)};
    for (float& x : tensor.data) x = mean + spread * gaussian();
    tensors_.push_back(std::move(tensor));
  }

  void tensors(const TinyModel& model, std::uint32_t embedding) {
    const std::uint64_t kv = static_cast<std::uint64_t>(model.kv_heads) * model.channels;
    const bool gemma = model.architecture == "gemma3";
    matrix("token_embd.weight", embedding, model.vocabulary);
    for (float& x : tensors_.back().data) x *= std::sqrt(static_cast<float>(embedding));
    vector("output_norm.weight", embedding, 1.0F, 0.1F);
    if (!model.rope_factors.empty())
      tensors_.push_back({"rope_freqs.weight", {model.rope_factors.size()}, model.rope_factors});
    for (std::uint32_t l = 0; l < model.layers; ++l) {
      const std::string b = "blk." + std::to_string(l) + ".";
      vector(b + "attn_norm.weight", embedding, 1.0F, 0.1F);
      matrix(b + "attn_q.weight", embedding, embedding);
      matrix(b + "attn_k.weight", embedding, kv);
      matrix(b + "attn_v.weight", embedding, kv);
      if (model.architecture.starts_with("qwen2")) {
        vector(b + "attn_q.bias", embedding, 0.0F, 0.1F);
        vector(b + "attn_k.bias", kv, 0.0F, 0.1F);
        vector(b + "attn_v.bias", kv, 0.0F, 0.1F);
      }
      if (gemma) {
        vector(b + "attn_q_norm.weight", model.channels, 1.0F, 0.1F);
        vector(b + "attn_k_norm.weight", model.channels, 1.0F, 0.1F);
        vector(b + "post_attention_norm.weight", embedding, 1.0F, 0.1F);
        vector(b + "post_ffw_norm.weight", embedding, 1.0F, 0.1F);
      }
      matrix(b + "attn_output.weight", embedding, embedding);
      vector(b + "ffn_norm.weight", embedding, 1.0F, 0.1F);
      matrix(b + "ffn_gate.weight", embedding, model.hidden);
      matrix(b + "ffn_up.weight", embedding, model.hidden);
      matrix(b + "ffn_down.weight", model.hidden, embedding);
    }
  }

  void save() const {
    constexpr std::size_t alignment = 32;
    std::string out = "GGUF";
    put(out, std::uint32_t{3});
    put(out, static_cast<std::uint64_t>(tensors_.size()));
    put(out, key_count_);
    out += keys_;
    std::uint64_t at = 0;
    const auto padded = [](std::uint64_t size) {
      return (size + alignment - 1) / alignment * alignment;
    };
    for (const Tensor& tensor : tensors_) {
      put_text(out, tensor.name);
      put(out, static_cast<std::uint32_t>(tensor.shape.size()));
      for (const std::uint64_t size : tensor.shape) put(out, size);
      put(out, std::uint32_t{0});  // f32
      put(out, at);
      at += padded(tensor.data.size() * sizeof(float));
    }
    out.resize(padded(out.size()));
    for (const Tensor& tensor : tensors_) {
      out.append(reinterpret_cast<const char*>(tensor.data.data()),
                 tensor.data.size() * sizeof(float));
      out.resize(padded(out.size()));
    }
    std::ofstream(path_, std::ios::binary)
        .write(out.data(), static_cast<std::streamsize>(out.size()));
  }

  std::string path_;
  std::string keys_;
  std::uint64_t key_count_ = 0;
  std::vector<Tensor> tensors_;
  std::uint32_t random_;
};

}  // namespace test
