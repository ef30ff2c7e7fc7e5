#pragma once

/// Prompt templates whose placeholders are filled by reused segments.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

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
struct PromptPlaceholder {
  std::string name{};
  std::int32_t turns_back = 0;  ///< 0: the newest value of that name; n: the one n turns before it

  bool operator==(const PromptPlaceholder&) const = default;
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

  [[nodiscard]] std::span<const PromptPlaceholder> slots() const noexcept { return slots_; }
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
  [[nodiscard]] Digest128 placeholder_context(std::size_t slot, const Context& before = {},
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
  Status split(std::string_view text) {
    if (text.empty())
      return extend::error(ErrorCode::invalid_argument, "a prompt template of 0 bytes");
    texts_.emplace_back();
    for (std::size_t at = 0; at < text.size(); ++at) {
      const char c = text[at];
      if (c != '{' && c != '}') {
        texts_.back() += c;
      } else if (at + 1 < text.size() && text[at + 1] == c) {
        texts_.back() += c;
        ++at;
      } else if (c == '}') {
        return extend::error(ErrorCode::template_syntax, "byte ", at,
                             ": '}' closes nothing; write '}}' for a brace");
      } else {
        const std::size_t end = text.find_first_of("{}", at + 1);
        if (end == std::string_view::npos || text[end] == '{') {
          return extend::error(ErrorCode::template_syntax, "byte ", at,
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
  [[nodiscard]] static Result<PromptPlaceholder> slot_of(std::string_view inside, std::size_t at) {
    const std::size_t mark = inside.find('@');
    PromptPlaceholder slot{std::string(inside.substr(0, mark)), 0};
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
    return extend::error(ErrorCode::template_syntax, "byte ", at, ": '{", inside,
                         "}' is no slot; a slot is {name} or {name@-1}");
  }

  std::vector<PromptPlaceholder> slots_;
  std::vector<std::string> texts_{};
  std::vector<std::vector<TokenId>> text_tokens_{};
  Digest128 digest_{};
};

/// Tokens [begin, end) of a prompt template that stand for another agent's output. Empty where
/// nothing was reserved.
struct TemplatePlaceholder {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// What a slot is filled with: `tokens` tokens, the first of which stood at `first_position` when
/// they were encoded.
struct PlaceholderFill {
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
[[nodiscard]] inline Result<std::vector<PlacedRun>> place(
    std::int64_t template_tokens, std::span<const TemplatePlaceholder> slots,
    std::span<const PlaceholderFill> fills, std::int64_t first_position = 0) {
  if (slots.size() != fills.size())
    return extend::error(ErrorCode::invalid_argument, fills.size(), " fills for ", slots.size(),
                         " slots");
  if (template_tokens < 0 || first_position < 0 || first_position > max_position) {
    return extend::error(ErrorCode::invalid_argument, "a template of ", template_tokens,
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
      return extend::error(ErrorCode::invalid_argument, "slot ", s, " is tokens ", slots[s].begin,
                           " to ", slots[s].end, " of a template of ", template_tokens,
                           ", behind token ", text);
    }
    if (fills[s].tokens < 0 || fills[s].tokens > max_position || fills[s].first_position < 0) {
      return extend::error(ErrorCode::invalid_argument, "slot ", s, " is filled with ",
                           fills[s].tokens, " tokens from position ", fills[s].first_position);
    }
    add(-1, text, slots[s].begin - text);
    add(static_cast<std::int32_t>(s), fills[s].first_position, fills[s].tokens);
    text = slots[s].end;
  }
  add(-1, text, template_tokens - text);
  return out;
}

/// What one turn of a conversation put into a slot: another agent's output, a document, a question.
struct PlaceholderValue {
  std::string text{};
  /// As an engine read or wrote them; empty: tokenised when filled in.
  std::vector<TokenId> tokens{};
};

/// All values that a name has had, oldest first. `{name}` takes the last.
struct PlaceholderHistory {
  std::string name{};
  std::vector<PlaceholderValue> turns{};
};

/// Where a filled prompt stands, and whose it is.
struct FillOptions {
  std::int64_t first_position = 0;   ///< of the template: how many tokens stand before it
  std::int64_t trained_context = 0;  ///< positions that the model was trained on; 0: not asked
  Context before{};                  ///< what stands before it, for `PromptRun::context`
  std::string_view agent{};          ///< whose prompt it is, likewise
};

/// Tokens of a finished prompt that come from one place.
struct PromptRun {
  enum class Source : std::uint8_t {
    text,    ///< the template's text `index`
    slot,    ///< the value in slot `index`
    joined,  ///< none: tokens that reach across a boundary. They must be prefilled
  };

  Source source = Source::text;
  std::int32_t index = -1;  ///< −1 for `joined`
  /// Token of the text's or value's own that it starts with: more than 0 behind joined tokens.
  std::int64_t first = 0;
  std::int64_t position = 0;  ///< in the prompt
  std::int64_t tokens = 0;
  /// The slot whose anchors hold its offsets: itself, as `ContextOffset::segment`, or the slot that
  /// a text directly follows, as `ContextOffset::following`. −1: none. Text 0 needs none, it is the
  /// same in every prompt; text behind an empty slot is to be prefilled, since no anchor was there
  /// to measure it by.
  std::int32_t slot = -1;
  /// The key of those offsets, `PromptTemplate::slot_context`; zero where `slot` is −1.
  Digest128 context{};

  bool operator==(const PromptRun&) const = default;
};

/// A boundary at which pieces tokenised apart are not what the whole text gives.
struct BoundaryMismatch {
  std::int32_t slot = -1;        ///< the first slot that touches it
  std::int64_t position = 0;     ///< in the prompt
  std::vector<TokenId> apart{};  ///< what the pieces have there
  std::vector<TokenId> whole{};  ///< what the prompt has there instead

  bool operator==(const BoundaryMismatch&) const = default;
};

/// A template with its slots filled in.
struct FilledPrompt {
  std::string text{};
  std::vector<TokenId> tokens{};  ///< of the text as a whole: what a full prefill reads
  std::vector<PromptRun> runs{};  ///< cover `tokens`, ascending; none is empty
  /// Ascending; empty: the pieces' tokens are the whole's.
  std::vector<BoundaryMismatch> mismatches{};
  /// (slots, tokens) what each slot was filled with, by itself.
  std::vector<std::vector<TokenId>> values{};
};

namespace detail {

/// Which tokens of a piece (text 0, slot 0, text 1, …) the whole's tokens have kept, and where.
struct KeptPiece {
  std::size_t piece = 0;
  std::size_t first = 0, last = 0;  // [first, last) of the piece's own
  std::size_t at = 0;               // in the whole
};

[[nodiscard]] inline std::size_t common_front(std::span<const TokenId> a,
                                              std::span<const TokenId> b) noexcept {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                                  a.begin());
}

/// Adds one piece behind a text whose tokens were `before` and are `now`: pieces keep what the
/// front of both agrees on, and the new one keeps the tokens that the whole ends with. Tokens that
/// agree from an end on stand for the same bytes, so nothing is matched by chance.
inline void keep(std::vector<KeptPiece>& kept, std::span<const TokenId> before,
                 std::span<const TokenId> now, std::size_t piece, std::span<const TokenId> own) {
  const std::size_t front = common_front(before, now);
  while (!kept.empty() && kept.back().at >= front) kept.pop_back();
  if (!kept.empty())
    kept.back().last = (std::min)(kept.back().last, kept.back().first + (front - kept.back().at));
  std::size_t back = 0;
  while (back < own.size() && back < now.size() - front &&
         own[own.size() - 1 - back] == now[now.size() - 1 - back])
    ++back;
  if (back > 0) kept.push_back({piece, own.size() - back, own.size(), now.size() - back});
}

/// Runs of a prompt from what its pieces kept. Positions are `place`'s: whatever is no text of the
/// template fills a slot of its tokens.
inline Status lay_out(std::span<const std::span<const TokenId>> pieces,
                      std::span<const KeptPiece> kept, std::int64_t first_position,
                      FilledPrompt& out) {
  std::vector<TemplatePlaceholder> slots;
  std::vector<PlaceholderFill> fills;
  std::vector<std::int32_t> filled_by;  // (slots) slot of the template; −1: joined tokens
  std::vector<std::int64_t> text_begin;
  std::int64_t template_tokens = 0;
  for (std::size_t p = 0; p < pieces.size(); p += 2) {
    text_begin.push_back(template_tokens);
    template_tokens += std::ssize(pieces[p]);
  }
  std::int64_t text = 0;  // tokens of the template behind which slots stand now
  std::size_t whole = 0;  // tokens of the prompt so far
  std::size_t open = 0;   // slots behind the last text that was kept begin here
  const auto fill = [&](std::int32_t slot, std::int64_t tokens, std::int64_t first) {
    slots.push_back({text, text});
    fills.push_back({tokens, first});
    filled_by.push_back(slot);
  };
  const auto go_on_at = [&](std::int64_t token) {  // what the template has up to there was dropped
    if (token != text && slots.size() == open) fill(-1, 0, 0);
    if (slots.size() > open) slots.back().end = token;
  };
  const KeptPiece* next = kept.data();
  const KeptPiece* const end = next + kept.size();
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const bool is_text = p % 2 == 0;
    const bool has = next != end && next->piece == p;
    if (has && next->at > whole) fill(-1, static_cast<std::int64_t>(next->at - whole), 0);
    const auto tokens = has ? static_cast<std::int64_t>(next->last - next->first) : 0;
    const auto first = has ? static_cast<std::int64_t>(next->first) : 0;
    if (!is_text) fill(static_cast<std::int32_t>(p / 2), tokens, first);
    if (is_text && has) {
      go_on_at(text_begin[p / 2] + first);
      text = text_begin[p / 2] + first + tokens;
      open = slots.size();
    }
    if (has) {
      whole = next->at + static_cast<std::size_t>(tokens);
      ++next;
    }
  }
  if (out.tokens.size() > whole) fill(-1, static_cast<std::int64_t>(out.tokens.size() - whole), 0);
  go_on_at(template_tokens);
  const auto placed = place(template_tokens, slots, fills, first_position);
  if (!placed) return placed.error();
  for (const PlacedRun& run : *placed) {
    PromptRun to{
        PromptRun::Source::joined, -1, run.source_position, run.position, run.tokens, -1, {}};
    if (run.slot < 0) {
      const auto behind =
          std::upper_bound(text_begin.begin(), text_begin.end(), run.source_position);
      to.source = PromptRun::Source::text;
      to.index = static_cast<std::int32_t>(behind - text_begin.begin()) - 1;
      to.first -= text_begin[static_cast<std::size_t>(to.index)];
      if (to.index > 0 && !pieces[static_cast<std::size_t>(to.index) * 2 - 1].empty())
        to.slot = to.index - 1;
    } else if (const std::int32_t slot = filled_by[static_cast<std::size_t>(run.slot)]; slot >= 0) {
      to.source = PromptRun::Source::slot;
      to.index = to.slot = slot;
    }
    out.runs.push_back(to);
  }
  return {};
}

/// Where the whole has other tokens than the pieces put side by side.
inline void find_mismatches(std::span<const std::span<const TokenId>> pieces,
                            std::span<const KeptPiece> kept, std::int64_t first_position,
                            FilledPrompt& out) {
  std::size_t piece = 0, token = 0, whole = 0;  // behind what was last kept
  const auto gap = [&](std::size_t next_piece, std::size_t next_token, std::size_t next_whole) {
    BoundaryMismatch found;
    found.position = first_position + static_cast<std::int64_t>(whole);
    found.whole.assign(out.tokens.begin() + static_cast<std::ptrdiff_t>(whole),
                       out.tokens.begin() + static_cast<std::ptrdiff_t>(next_whole));
    found.slot = pieces.size() > 1
                     ? static_cast<std::int32_t>((std::min)(piece / 2, pieces.size() / 2 - 1))
                     : -1;
    for (std::size_t p = piece; p <= next_piece && p < pieces.size(); ++p) {
      const std::size_t from = p == piece ? token : 0;
      const std::size_t to = p == next_piece ? next_token : pieces[p].size();
      found.apart.insert(found.apart.end(), pieces[p].begin() + static_cast<std::ptrdiff_t>(from),
                         pieces[p].begin() + static_cast<std::ptrdiff_t>(to));
    }
    if (!found.apart.empty() || !found.whole.empty()) out.mismatches.push_back(std::move(found));
  };
  for (const KeptPiece& k : kept) {
    gap(k.piece, k.first, k.at);
    piece = k.piece;
    token = k.last;
    whole = k.at + (k.last - k.first);
  }
  gap(pieces.size(), 0, out.tokens.size());
}

/// Refuses values for slots that a template does not have, and names given twice.
inline Status check_values(std::span<const PromptPlaceholder> slots,
                           std::span<const PlaceholderHistory> values) {
  for (std::size_t v = 0; v < values.size(); ++v) {
    const auto named = [&](const auto& other) { return other.name == values[v].name; };
    if (std::none_of(slots.begin(), slots.end(), named)) {
      return extend::error(ErrorCode::slot_unknown, "value ", v, " is for '", values[v].name,
                           "', which none of ", slots.size(), " slots is called");
    }
    if (std::any_of(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(v), named)) {
      return extend::error(ErrorCode::invalid_argument, "value ", v, ": '", values[v].name,
                           "' is given twice");
    }
  }
  return {};
}

/// The value that stands in a slot. Errors: `slot_missing`, `history_missing`, `invalid_argument`
/// (tokens without text).
inline Result<const PlaceholderValue*> value_of(const PromptPlaceholder& slot, std::size_t s,
                                                std::span<const PlaceholderHistory> values) {
  const auto history = std::find_if(values.begin(), values.end(), [&](const PlaceholderHistory& h) {
    return h.name == slot.name;
  });
  if (history == values.end())
    return extend::error(ErrorCode::slot_missing, "slot ", s, " {", slot.name, "} has no value");
  if (std::cmp_greater_equal(slot.turns_back, history->turns.size())) {
    return extend::error(
        slot.turns_back == 0 ? ErrorCode::slot_missing : ErrorCode::history_missing, "slot ", s,
        " {", slot.name, "} goes ", slot.turns_back, " turns back from the newest of ",
        history->turns.size());
  }
  const PlaceholderValue& value =
      history->turns[history->turns.size() - 1 - static_cast<std::size_t>(slot.turns_back)];
  if (value.text.empty() && !value.tokens.empty()) {
    return extend::error(ErrorCode::invalid_argument, "slot ", s, " {", slot.name, "} has ",
                         value.tokens.size(), " tokens and no text");
  }
  return &value;
}

/// The parts of a prompt in order: text 0, slot 0, text 1, …
struct PromptParts {
  std::vector<std::string_view> texts;
  std::vector<std::span<const TokenId>> tokens;
  bool whole = false;  ///< side by side they are the prompt's tokens
};

/// What of each part the prompt's own tokens keep. Calls the tokenizer for each part where they are
/// not the parts' side by side.
template <class T>
[[nodiscard]] Result<std::vector<KeptPiece>> kept_parts(const PromptParts& parts, T&& tokenizer,
                                                        std::int64_t first_position,
                                                        FilledPrompt& out) {
  std::vector<KeptPiece> kept;
  if (parts.whole) {
    std::size_t at = 0;
    for (std::size_t p = 0; p < parts.tokens.size(); ++p) {
      if (!parts.tokens[p].empty()) kept.push_back({p, 0, parts.tokens[p].size(), at});
      at += parts.tokens[p].size();
    }
    return kept;
  }
  std::vector<TokenId> before;
  std::size_t bytes = 0;
  for (std::size_t p = 0; p < parts.tokens.size(); ++p) {
    bytes += parts.texts[p].size();
    if (parts.texts[p].empty()) continue;
    Result<std::vector<TokenId>> now = bytes == out.text.size()
                                           ? Result<std::vector<TokenId>>(out.tokens)
                                           : tokenizer(std::string_view(out.text).substr(0, bytes));
    if (!now) return now.error();
    keep(kept, before, *now, p, parts.tokens[p]);
    before = *std::move(now);
  }
  find_mismatches(parts.tokens, kept, first_position, out);
  return kept;
}

}  // namespace detail

/// Fills a template's slots and says where every token of the prompt comes from, at exact
/// positions.
///
/// The prompt's tokens are those of the finished text as a whole. Where they are the pieces' own,
/// put side by side, each run's K/V can be taken from what its piece left somewhere else, turned by
/// its shift and corrected by its context's offsets. Where they are not (a tokenizer that joins "."
/// and "\n", a space kept by neither side, a value whose ids are not what its text gives), the
/// boundary is reported, the pieces lose the tokens concerned, and the whole's tokens there are
/// `joined`: to be prefilled. O(text) and one call of the tokenizer for the whole; one for each
/// further piece where a boundary moved. Errors: `slot_unknown`, `slot_missing`, `history_missing`,
/// `context_exceeded`; `invalid_argument` for a name given twice, tokens without text, or a
/// position out of range; those of the tokenizer.
template <Tokenizer T>
[[nodiscard]] Result<FilledPrompt> fill_placeholders(const PromptTemplate& prompt,
                                                     std::span<const PlaceholderHistory> values,
                                                     T&& tokenizer,
                                                     const FillOptions& options = {}) {
  const std::span<const PromptPlaceholder> slots = prompt.slots();
  KVMELD_TRY(detail::check_values(slots, values));
  FilledPrompt out;
  detail::PromptParts parts;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    const auto value = detail::value_of(slots[s], s, values);
    if (!value) return value.error();
    parts.texts.push_back(prompt.texts()[s]);
    parts.texts.push_back((*value)->text);
    Result<std::vector<TokenId>> ids = (*value)->tokens;
    if ((*value)->tokens.empty() && !(*value)->text.empty())
      ids = tokenizer(std::string_view((*value)->text));
    if (!ids) return ids.error();
    out.values.push_back(*std::move(ids));
  }
  parts.texts.push_back(prompt.texts().back());
  std::vector<TokenId> apart;
  for (std::size_t p = 0; p < parts.texts.size(); ++p) {
    out.text += parts.texts[p];
    parts.tokens.push_back(p % 2 == 0 ? prompt.text_tokens()[p / 2] : out.values[p / 2]);
    apart.insert(apart.end(), parts.tokens.back().begin(), parts.tokens.back().end());
  }
  Result<std::vector<TokenId>> whole =
      out.text.empty() ? std::vector<TokenId>{} : tokenizer(std::string_view(out.text));
  if (!whole) return whole.error();
  out.tokens = *std::move(whole);
  parts.whole = out.tokens == apart;
  if (options.trained_context > 0 &&
      options.first_position > options.trained_context - std::ssize(out.tokens)) {
    return extend::error(ErrorCode::context_exceeded, "a prompt of ", out.tokens.size(),
                         " tokens at position ", options.first_position, " ends behind the ",
                         options.trained_context,
                         " that the model was trained on; shorten a value");
  }
  const auto kept = detail::kept_parts(parts, tokenizer, options.first_position, out);
  if (!kept) return kept.error();
  KVMELD_TRY(detail::lay_out(parts.tokens, *kept, options.first_position, out));
  for (PromptRun& run : out.runs) {
    if (run.slot >= 0)
      run.context = prompt.placeholder_context(static_cast<std::size_t>(run.slot), options.before,
                                               options.agent);
  }
  return out;
}

}  // namespace anchors

KVMELD_NAMESPACE_END
