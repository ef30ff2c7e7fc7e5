#pragma once
// The prompt's fixed parts, each tokenised once and apart: the shared prefix, the notes, the
// question's turn.

#include "engine.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace example {

/// What surrounds the notes: `prefix` notes `middle`, and then the model's turn begins.
struct Frame {
  std::string prefix;
  std::string middle;
};

/// The model's own chat template around system text, notes and a request; plain lines where it has
/// none.
inline Frame make_frame(const Engine& engine, const std::string& system,
                        const std::string& request) {
  const char* chat_template = llama_model_chat_template(engine.model(), nullptr);
  const std::string mark = "\x01";
  const std::string system_text = system + mark;
  std::string whole;
  if (chat_template != nullptr) {
    const llama_chat_message messages[] = {{"system", system_text.c_str()},
                                           {"user", request.c_str()}};
    whole.resize(4096);
    const std::int32_t length = llama_chat_apply_template(
        chat_template, messages, 2, true, whole.data(), static_cast<std::int32_t>(whole.size()));
    whole.resize(length > 0 && length < 4096 ? static_cast<std::size_t>(length) : 0);
  }
  if (whole.find(mark) == std::string::npos) whole = system_text + "\n\n" + request + "\n";
  const std::size_t at = whole.find(mark);
  return {whole.substr(0, at), whole.substr(at + 1)};
}

}  // namespace example
