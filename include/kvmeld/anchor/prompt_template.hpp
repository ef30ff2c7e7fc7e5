#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/anchor.hpp>

KVMELD_NAMESPACE_BEGIN

/// Maps text to the ids that an engine would read, as a callback of the caller's.
///
/// Semantic requirements: the same text gives the same ids; nothing is added (no
/// beginning-of-sequence token) and no control token is recognised, since a value that spells one
/// would become one. Control tokens belong before or behind the template.
template <class T>
concept Tokenizer = requires(T& tokenizer, std::string_view text) {
  { tokenizer(text) } -> std::same_as<Result<std::vector<TokenId>>>;
};

/// A place in a prompt template that a named value fills.
struct PromptSlot {
  std::string name{};
  std::int32_t turns_back = 0;  ///< 0: the newest value of that name; n: the one n turns before it

  bool operator==(const PromptSlot&) const = default;
};

/// Text with named slots, "the task is {question}, the planner said {planner}": n slots between n +
/// 1 texts, any of which may be empty.
///
/// A name is letters, digits and '_'. `{name@-2}` is the value two turns before the newest. `{{`
/// and `}}` are braces. Slots may be repeated, adjacent, leading or trailing. The texts' own tokens
/// are made once, here, each text by itself.
class PromptTemplate {
 public:
  /// Errors: `invalid_argument` for an empty template; `template_syntax`, with the byte, for a
  /// brace that does not pair or a slot that is no name; those of the tokenizer. O(text).
  template <Tokenizer T>
  [[nodiscard]] static Result<PromptTemplate> parse(std::string_view text, T&& tokenizer) {
    PromptTemplate out;
    KVMELD_TRY(out.split(text));
    for (const std::string& piece : out.texts_) {
      Result<std::vector<TokenId>> ids =
          piece.empty() ? std::vector<TokenId>{} : tokenizer(std::string_view(piece));
      if (!ids) return ids.error();
      out.text_tokens_.push_back(*std::move(ids));
    }
    return out;
  }

  [[nodiscard]] std::span<const PromptSlot> slots() const noexcept { return slots_; }
  /// (slots + 1) what stands before each slot, and behind the last.
  [[nodiscard]] std::span<const std::string> texts() const noexcept { return texts_; }
  /// (slots + 1, tokens) each text tokenised by itself.
  [[nodiscard]] std::span<const std::vector<TokenId>> text_tokens() const noexcept {
    return text_tokens_;
  }
  /// Of texts and slots as they are written.
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }

  /// The key of offsets measured in a slot, and in the text behind it: which template, which of its
  /// slots, what stood before the template, whose prompt it is. What fills the other slots is no
  /// part of it, or no context would be met twice.
  [[nodiscard]] Digest128 slot_context(std::size_t slot, const Context& before = {},
                                       std::string_view agent = {}) const {
    Hasher hasher;
    hasher.text("kvmeld.anchor.template");
    hasher.value(digest_.low);
    hasher.value(digest_.high);
    hasher.value(before.lead_in.low);
    hasher.value(before.lead_in.high);
    return place_digest({.prefix = before.prefix, .lead_in = hasher.digest()}, agent,
                        static_cast<std::uint32_t>(slot));
  }

 private:
  KVMELD_LAZY Status split(std::string_view text) {
    if (text.empty())
      return detail::error(ErrorCode::invalid_argument, "a prompt template of 0 bytes");
    texts_.emplace_back();
    for (std::size_t at = 0; at < text.size(); ++at) {
      const char c = text[at];
      if (c != '{' && c != '}') {
        texts_.back() += c;
      } else if (at + 1 < text.size() && text[at + 1] == c) {
        texts_.back() += c;
        ++at;
      } else if (c == '}') {
        return detail::error(ErrorCode::template_syntax, "byte ", at,
                             ": '}' closes nothing; write '}}' for a brace");
      } else {
        const std::size_t end = text.find_first_of("{}", at + 1);
        if (end == std::string_view::npos || text[end] == '{') {
          return detail::error(ErrorCode::template_syntax, "byte ", at,
                               ": '{' is never closed; write '{{' for a brace");
        }
        auto slot = slot_of(text.substr(at + 1, end - at - 1), at);
        if (!slot) return slot.error();
        slots_.push_back(*std::move(slot));
        texts_.emplace_back();
        at = end;
      }
    }
    Hasher hasher;
    hasher.text("kvmeld.prompt_template");
    hasher.value(static_cast<std::uint64_t>(slots_.size()));
    for (std::size_t s = 0; s < texts_.size(); ++s) {
      hasher.text(texts_[s]);
      if (s == slots_.size()) break;
      hasher.text(slots_[s].name);
      hasher.value(slots_[s].turns_back);
    }
    digest_ = hasher.digest();
    return {};
  }
  [[nodiscard]] static Result<PromptSlot> slot_of(std::string_view inside, std::size_t at) {
    const std::size_t mark = inside.find('@');
    PromptSlot slot{std::string(inside.substr(0, mark)), 0};
    bool good = !slot.name.empty();
    for (const char c : slot.name)
      good = good && ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '_');
    if (mark != std::string_view::npos) {
      const std::string_view back = inside.substr(mark + 1);
      good = good && back.size() >= 2 && back.size() <= 7 && back[0] == '-';
      for (std::size_t i = 1; good && i < back.size(); ++i) {
        good = back[i] >= '0' && back[i] <= '9';
        slot.turns_back = slot.turns_back * 10 + (back[i] - '0');
      }
      good = good && slot.turns_back > 0;
    }
    if (good) return slot;
    return detail::error(ErrorCode::template_syntax, "byte ", at, ": '{", inside,
                         "}' is no slot; a slot is {name} or {name@-1}");
  }

  std::vector<PromptSlot> slots_;
  std::vector<std::string> texts_{};
  std::vector<std::vector<TokenId>> text_tokens_{};
  Digest128 digest_{};
};

KVMELD_NAMESPACE_END
