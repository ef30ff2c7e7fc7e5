#pragma once
// A model and one context of it, owned, as tests want them: quiet, one thread, f32 K and V unless
// told otherwise.

#include <llama.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace test {

class EngineModel {
 public:
  explicit EngineModel(const std::string& path) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model_params parameters = llama_model_default_params();
    parameters.n_gpu_layers = 0;
    model_.reset(llama_model_load_from_file(path.c_str(), parameters));
  }
  [[nodiscard]] llama_model* get() const { return model_.get(); }

 private:
  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, Free> model_;
};

[[nodiscard]] inline llama_context_params engine_parameters() {
  llama_context_params parameters = llama_context_default_params();
  parameters.n_ctx = 512;
  parameters.n_batch = 256;
  parameters.n_ubatch = 256;
  parameters.n_seq_max = 4;
  parameters.n_threads = 1;
  parameters.n_threads_batch = 1;
  parameters.kv_unified = true;
  parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  parameters.type_k = GGML_TYPE_F32;
  parameters.type_v = GGML_TYPE_F32;
  return parameters;
}

class EngineContext {
 public:
  EngineContext(const EngineModel& model, const llama_context_params& parameters)
      : context_(llama_init_from_model(model.get(), parameters)) {}
  [[nodiscard]] llama_context* get() const { return context_.get(); }
  [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context_.get()); }

 private:
  struct Free {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  std::unique_ptr<llama_context, Free> context_;
};

}  // namespace test
