#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Tokens [begin, end) of a prompt template that stand for another agent's output. Empty where
/// nothing was reserved.
struct TemplateSlot {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// What a slot is filled with: `tokens` tokens, the first of which stood at `first_position` when
/// they were encoded.
struct SlotFill {
  std::int64_t tokens = 0;
  std::int64_t first_position = 0;
};

/// A run of tokens in the finished prompt.
struct PlacedRun {
  std::int32_t slot = -1;  ///< index of the slot that it fills; −1: the template's own text
  /// Of its first token where it was encoded: in the template, or in the fill.
  std::int64_t source_position = 0;
  std::int64_t position = 0;  ///< in the prompt
  std::int64_t tokens = 0;

  [[nodiscard]] std::int64_t shift() const noexcept { return position - source_position; }
  bool operator==(const PlacedRun&) const = default;
};

/// Where the texts and slots of a template stand once the slots are filled: exact positions, in the
/// order of the prompt, empty runs left out.
///
/// Slots may be repeated, adjacent, leading, trailing, or filled with nothing. O(slots). Errors:
/// `invalid_argument` for slots out of order or beyond the template, or as many fills as there are
/// not slots.
[[nodiscard]] inline Result<std::vector<PlacedRun>> place(std::int64_t template_tokens,
                                                          std::span<const TemplateSlot> slots,
                                                          std::span<const SlotFill> fills,
                                                          std::int64_t first_position = 0) {
  if (slots.size() != fills.size())
    return detail::error(ErrorCode::invalid_argument, fills.size(), " fills for ", slots.size(),
                         " slots");
  if (template_tokens < 0 || first_position < 0 || first_position > max_position) {
    return detail::error(ErrorCode::invalid_argument, "a template of ", template_tokens,
                         " tokens at position ", first_position);
  }
  std::vector<PlacedRun> out;
  std::int64_t at = first_position, text = 0;
  const auto add = [&](std::int32_t slot, std::int64_t source, std::int64_t tokens) {
    if (tokens > 0) out.push_back({slot, source, at, tokens});
    at += tokens;
  };
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (slots[s].begin < text || slots[s].end < slots[s].begin || slots[s].end > template_tokens) {
      return detail::error(ErrorCode::invalid_argument, "slot ", s, " is tokens ", slots[s].begin,
                           " to ", slots[s].end, " of a template of ", template_tokens,
                           ", behind token ", text);
    }
    if (fills[s].tokens < 0 || fills[s].tokens > max_position || fills[s].first_position < 0) {
      return detail::error(ErrorCode::invalid_argument, "slot ", s, " is filled with ",
                           fills[s].tokens, " tokens from position ", fills[s].first_position);
    }
    add(-1, text, slots[s].begin - text);
    add(static_cast<std::int32_t>(s), fills[s].first_position, fills[s].tokens);
    text = slots[s].end;
  }
  add(-1, text, template_tokens - text);
  return out;
}

KVMELD_NAMESPACE_END
