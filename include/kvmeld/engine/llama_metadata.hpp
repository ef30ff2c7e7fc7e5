#pragma once

/// The scalar GGUF metadata of a loaded model, by the keys that the engine itself reads, and which
/// architectures are known.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <llama.h>

#include <kvmeld/config.hpp>
#include <kvmeld/decimal.hpp>

KVMELD_NAMESPACE_BEGIN
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
  return kvmeld::detail::parse_decimal<double>(number) ? number : value;
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
    return kvmeld::detail::parse_decimal<Number>(without_locale(text(key))).value_or(otherwise);
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
KVMELD_NAMESPACE_END
