#pragma once
// A llama.cpp model and one context, owned; and the few calls that the examples make on them.

#include <llama.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace example {

using Tokens = std::vector<llama_token>;

inline void append(Tokens& to, std::span<const llama_token> more) {
  to.insert(to.end(), more.begin(), more.end());
}

/// Milliseconds since construction.
class Stopwatch {
 public:
  [[nodiscard]] double milliseconds() const {
    return std::chrono::duration<double, std::milli>(clock::now() - start_).count();
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point start_ = clock::now();
};

/// Tokens of several sequences for one `llama_decode`.
class Batch {
 public:
  /// Returns the row index under which `Engine::logits` finds this token's output.
  std::int32_t add(llama_token token, llama_pos position, llama_seq_id sequence, bool output) {
    tokens_.push_back(token);
    positions_.push_back(position);
    sequences_.push_back(sequence);
    outputs_.push_back(output ? 1 : 0);
    return static_cast<std::int32_t>(tokens_.size()) - 1;
  }
  [[nodiscard]] bool empty() const { return tokens_.empty(); }
  [[nodiscard]] std::size_t size() const { return tokens_.size(); }

 private:
  friend class Engine;
  Tokens tokens_;
  std::vector<llama_pos> positions_;
  std::vector<llama_seq_id> sequences_;
  std::vector<std::int8_t> outputs_;
};

class Engine {
 public:
  struct Options {
    std::string model;
    int threads = 2;
    std::uint32_t cells = 4096;  ///< Cache cells shared by all sequences.
    std::uint32_t sequences = 64;
    std::uint32_t batch = 2048;  ///< Tokens a decode may carry.
    /// Sees tensors as the engine computes them; null: none.
    ggml_backend_sched_eval_callback observe = nullptr;
    void* observer = nullptr;  ///< Handed to `observe`.
  };

  /// Null where the file is not a model that llama.cpp reads, or memory is short.
  static std::unique_ptr<Engine> open(const Options& options) {
    auto engine = std::unique_ptr<Engine>(new Engine(options));
    return engine->context_ ? std::move(engine) : nullptr;
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] llama_context* context() const { return context_.get(); }
  [[nodiscard]] const llama_model* model() const { return model_.get(); }
  [[nodiscard]] const llama_vocab* vocabulary() const {
    return llama_model_get_vocab(model_.get());
  }
  [[nodiscard]] const llama_context_params& parameters() const { return parameters_; }
  [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context_.get()); }
  [[nodiscard]] std::size_t vocabulary_size() const {
    return static_cast<std::size_t>(llama_vocab_n_tokens(vocabulary()));
  }

  /// `special`: control-token spellings in `text` become control tokens; `begin`: the model's BOS,
  /// if it wants one, goes first.
  [[nodiscard]] Tokens tokens(std::string_view text, bool special = false,
                              bool begin = false) const {
    Tokens out(text.size() + 8);
    const auto length = static_cast<std::int32_t>(text.size());
    std::int32_t count = llama_tokenize(vocabulary(), text.data(), length, out.data(),
                                        static_cast<std::int32_t>(out.size()), begin, special);
    if (count < 0) {
      out.resize(static_cast<std::size_t>(-count));
      count = llama_tokenize(vocabulary(), text.data(), length, out.data(), -count, begin, special);
    }
    out.resize(static_cast<std::size_t>(count < 0 ? 0 : count));
    return out;
  }

  [[nodiscard]] std::string text(llama_token token) const {
    char buffer[256];
    const std::int32_t count =
        llama_token_to_piece(vocabulary(), token, buffer, sizeof buffer, 0, false);
    return count > 0 ? std::string(buffer, static_cast<std::size_t>(count)) : std::string();
  }

  [[nodiscard]] bool ends(llama_token token) const {
    return llama_vocab_is_eog(vocabulary(), token);
  }

  /// True where the engine accepted the batch; its outputs are then read through `logits`.
  [[nodiscard]] bool decode(Batch& batch) {
    const std::size_t count = batch.size();
    std::vector<std::int32_t> counts(count, 1);
    std::vector<llama_seq_id*> ids(count);
    for (std::size_t i = 0; i < count; ++i) ids[i] = &batch.sequences_[i];
    llama_batch raw{};
    raw.n_tokens = static_cast<std::int32_t>(count);
    raw.token = batch.tokens_.data();
    raw.pos = batch.positions_.data();
    raw.n_seq_id = counts.data();
    raw.seq_id = ids.data();
    raw.logits = batch.outputs_.data();
    if (llama_decode(context_.get(), raw) != 0) return false;
    llama_synchronize(context_.get());
    decoded_ += count;
    return true;
  }

  /// Decodes `tokens` at positions `first`, `first + 1`, … of `sequence`; only the last one has an
  /// output, if any.
  [[nodiscard]] bool prefill(std::span<const llama_token> tokens, llama_pos first,
                             llama_seq_id sequence, bool output_last = false) {
    for (std::size_t begin = 0; begin < tokens.size(); begin += batch_) {
      const std::size_t end = begin + batch_ < tokens.size() ? begin + batch_ : tokens.size();
      Batch batch;
      for (std::size_t i = begin; i < end; ++i)
        last_row_ = batch.add(tokens[i], first + static_cast<llama_pos>(i), sequence,
                              output_last && i + 1 == tokens.size());
      if (!decode(batch)) return false;
    }
    return true;
  }

  [[nodiscard]] std::span<const float> logits(std::int32_t row) const {
    return {llama_get_logits_ith(context_.get(), row), vocabulary_size()};
  }
  [[nodiscard]] std::span<const float> last_logits() const { return logits(last_row_); }

  void forget(llama_seq_id sequence) { llama_memory_seq_rm(memory(), sequence, -1, -1); }
  void forget_all() { llama_memory_clear(memory(), false); }
  /// `to` becomes what `from` is; the cells are shared, so this costs no copy.
  void branch(llama_seq_id from, llama_seq_id to) {
    llama_memory_seq_cp(memory(), from, to, -1, -1);
  }

  /// All tokens decoded so far, to tell what a method prefilled.
  [[nodiscard]] std::size_t decoded() const { return decoded_; }

 private:
  struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  struct FreeContext {
    void operator()(llama_context* context) const { llama_free(context); }
  };

  explicit Engine(const Options& options) : batch_(options.batch) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model_params model_parameters = llama_model_default_params();
    model_parameters.n_gpu_layers = 0;
    model_.reset(llama_model_load_from_file(options.model.c_str(), model_parameters));
    if (!model_) return;
    llama_context_params& parameters = parameters_;
    parameters.n_ctx = options.cells;
    parameters.n_batch = options.batch;
    parameters.n_ubatch = 512;
    parameters.n_seq_max = options.sequences;
    parameters.n_threads = options.threads;
    parameters.n_threads_batch = options.threads;
    parameters.cb_eval = options.observe;
    parameters.cb_eval_user_data = options.observer;
    // V stays (token, channel) in the exported state
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    parameters.kv_unified = true;  // branches share cells; exported states hold one stream
    parameters.swa_full = true;
    context_.reset(llama_init_from_model(model_.get(), parameters));
  }

  llama_context_params parameters_ = llama_context_default_params();
  std::unique_ptr<llama_model, FreeModel> model_;
  std::unique_ptr<llama_context, FreeContext> context_;
  std::size_t batch_ = 0;
  std::size_t decoded_ = 0;
  std::int32_t last_row_ = 0;
};

}  // namespace example
