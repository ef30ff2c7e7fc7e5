#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_symbols.hpp>
#include <kvmeld/codec/utf8.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

struct LatexToken {
  LatexKind kind = LatexKind::end;
  std::string name{};
  std::uint8_t power = 0;
  std::size_t at = 0;  ///< its byte in the text
};

/// Cuts a formula into tokens: TeX's words and the characters that stand for them become the same.
///
/// Bounds-checked; takes any bytes. O(bytes).
template <class = void>
class LatexTokens {
 public:
  explicit LatexTokens(std::string_view text) : text_(text) {}

  /// Errors: `corrupt` for bytes that are not UTF-8, `unsupported` for TeX beyond the subset,
  /// `truncated`.
  [[nodiscard]] Result<std::vector<LatexToken>> read() {
    while (status_.ok() && at_ < text_.size()) next();
    if (!status_.ok()) return status_;
    tokens_.push_back({LatexKind::end, {}, 0, text_.size()});
    return std::move(tokens_);
  }

 private:
  static bool letter(char c) noexcept { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
  static bool digit(char c) noexcept { return c >= '0' && c <= '9'; }

  void fail(ErrorCode code, std::string_view why) {
    status_ = error(code, "formula: ", why, " at byte ", start_);
  }
  void put(LatexKind kind, std::string name, std::uint8_t power = 0) {
    tokens_.push_back({kind, std::move(name), power, start_});
  }

  void next() {
    start_ = at_;
    const CodePoint c = first_code_point(text_.substr(at_));
    if (c.bytes == 0) return fail(ErrorCode::corrupt, "bytes that are not UTF-8");
    at_ += c.bytes;
    if (c.value >= 0x80) return character(c.value);
    const char ascii = static_cast<char>(c.value);
    if (letter(ascii)) return put(LatexKind::symbol, std::string(1, ascii));
    if (digit(ascii) || (ascii == '.' && at_ < text_.size() && digit(text_[at_]))) return number();
    switch (ascii) {
      case ' ':
      case '\t':
      case '\n':
      case '\r':
      case '~':
      case '$':
        return;
      case '%':
        at_ = (std::min)(text_.find('\n', at_), text_.size());
        return;
      case '\\':
        return command();
      case '+':
        return put(LatexKind::infix, "+", sum_power);
      case '-':
        return put(LatexKind::infix, "-", sum_power);
      case '*':
        return put(LatexKind::infix, "*", product_power);
      case '/':
        return put(LatexKind::infix, "/", product_power);
      case '=':
        return put(LatexKind::relation, "=", relation_power);
      case '<':
        return relation_or_equal("<", "<=");
      case '>':
        return relation_or_equal(">", ">=");
      case ':':
        return relation_or_equal("colon", ":=");
      case '^':
        return put(LatexKind::superscript, "^");
      case '_':
        return put(LatexKind::subscript, "_");
      case '(':
        return put(LatexKind::open, "(");
      case ')':
        return put(LatexKind::close, "(");
      case '[':
        return put(LatexKind::open, "[");
      case ']':
        return put(LatexKind::close, "[");
      case '{':
        return put(LatexKind::group_open, "{");
      case '}':
        return put(LatexKind::group_close, "}");
      case '|':
        return put(LatexKind::bar, "abs");
      case '!':
        return put(LatexKind::factorial, "!");
      case '\'':
        return put(LatexKind::prime, "prime");
      case ',':
        return put(LatexKind::comma, ",");
      case '.':
      case ';':
        return put(LatexKind::full_stop, ".");
      default:
        return fail(ErrorCode::unsupported, "a character that formulas do not have");
    }
  }
  void relation_or_equal(const char* alone, const char* with_equal) {
    const bool equal = at_ < text_.size() && text_[at_] == '=';
    at_ += equal ? 1 : 0;
    put(LatexKind::relation, equal ? with_equal : alone, relation_power);
  }
  /// Digits with at most one point, in the shortest form of the same number.
  void number() {
    at_ = start_;
    std::string whole, part;
    while (at_ < text_.size() && digit(text_[at_])) whole += text_[at_++];
    if (at_ + 1 < text_.size() && text_[at_] == '.' && digit(text_[at_ + 1])) {
      for (++at_; at_ < text_.size() && digit(text_[at_]);) part += text_[at_++];
    }
    // A script takes one digit, as in TeX: the rest is a factor.
    if (!tokens_.empty() && takes_one_token() && whole.size() > 1 && part.empty()) {
      at_ = start_ + 1;
      whole.resize(1);
    }
    whole.erase(0, (std::min)(whole.find_first_not_of('0'), whole.size()));
    part.erase(part.find_last_not_of('0') + 1);
    if (whole.empty()) whole = "0";
    put(LatexKind::number, part.empty() ? whole : whole + '.' + part);
  }
  /// Whether the token before wants one token as its argument, or is the first argument of a
  /// fraction that did.
  [[nodiscard]] bool takes_one_token() const {
    const auto wants = [](LatexKind k) {
      return k == LatexKind::superscript || k == LatexKind::subscript || k == LatexKind::root ||
             k == LatexKind::accent;
    };
    const auto two = [](LatexKind k) {
      return k == LatexKind::fraction || k == LatexKind::binomial;
    };
    const LatexKind last = tokens_.back().kind;
    if (wants(last) || two(last)) return true;
    const bool one = last == LatexKind::number || last == LatexKind::symbol;
    return one && tokens_.size() > 1 && two(tokens_[tokens_.size() - 2].kind);
  }
  void word(std::string_view name) {
    if (std::find(std::begin(latex_functions), std::end(latex_functions), name) !=
        std::end(latex_functions))
      return put(LatexKind::function, std::string(name));
    const LatexWord* const found = find_latex_command(name);
    if (found == nullptr) return put(LatexKind::symbol, std::string(name));
    switch (found->kind) {
      case LatexKind::skipped:
        return;
      case LatexKind::refused:
        return fail(ErrorCode::unsupported,
                    "environments, line breaks, \\over and \\substack are not read;");
      case LatexKind::style:
        return styled(found->name);
      default:
        return put(found->kind, std::string(found->name), found->power);
    }
  }
  void command() {
    if (at_ == text_.size()) return fail(ErrorCode::truncated, "a backslash without a command");
    const std::size_t from = at_;
    while (at_ < text_.size() && letter(text_[at_])) ++at_;
    if (at_ == from) {
      const char c = text_[at_++];
      const std::string_view sign(&text_[from], 1);
      if (c == '%' || c == '$' || c == '#' || c == '&' || c == '_')
        return put(LatexKind::symbol, std::string(sign));
      if (find_latex_command(sign) == nullptr)
        return fail(ErrorCode::unsupported, "an unknown command");
      return word(sign);
    }
    const std::string_view name = text_.substr(from, at_ - from);
    // A delimiter that is left out: \left. and \right.
    if ((name == "left" || name == "right") && at_ < text_.size() && text_[at_] == '.') ++at_;
    word(name);
  }
  /// The argument of \mathbf and its like, as one symbol.
  void styled(std::string_view style) {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    if (at_ < text_.size() && text_[at_] == '*') ++at_;  // \operatorname*
    std::string content;
    if (at_ < text_.size() && text_[at_] == '{') {
      std::size_t depth = 1;
      for (++at_; at_ < text_.size() && depth > 0; ++at_) {
        if (text_[at_] == '{') ++depth;
        if (text_[at_] == '}' && --depth == 0) continue;
        content += text_[at_];
      }
      if (depth > 0) return fail(ErrorCode::truncated, "a brace that is not closed");
    } else {
      const CodePoint c = first_code_point(text_.substr(at_));
      if (c.bytes == 0) return fail(ErrorCode::truncated, "a style without its letter");
      content = text_.substr(at_, c.bytes);
      at_ += c.bytes;
    }
    if (style != "text")
      std::erase_if(content, [](char c) { return c == ' ' || c == '\\' || c == '{' || c == '}'; });
    if (content.empty()) return;
    if (style == "fn") return put(LatexKind::function, std::move(content));
    if (style.empty() && std::all_of(content.begin(), content.end(), letter))
      return put(LatexKind::symbol, std::move(content));
    // Whatever it holds, its name is told apart from the tree's own signs by its length.
    put(LatexKind::symbol,
        std::string(style) + ':' + detail::decimal(content.size()) + ':' + content);
  }
  void character(char32_t c) {
    // blanks, invisible signs
    if (c == 0x00A0 || (c >= 0x2000 && c <= 0x200B) || c == 0x202F || c == 0x2061 || c == 0x2062)
      return;
    if (c == 0x2212 || c == 0x2013) return put(LatexKind::infix, "-", sum_power);
    if (c == 0x2044 || c == 0x2215) return put(LatexKind::infix, "/", product_power);
    if (c >= 0x0391 && c <= 0x03A9)
      return put(LatexKind::symbol, std::string(latex_greek[c - 0x0391]));
    if (c >= 0x03B1 && c <= 0x03C9) {
      std::string name(latex_greek[c - 0x03B1]);
      name[0] = static_cast<char>(name[0] - 'A' + 'a');
      return put(LatexKind::symbol, std::move(name));
    }
    if (c == 0x210E) return put(LatexKind::symbol, "h");
    if (c >= 0x1D434 && c < 0x1D434 + 52) {  // italic letters
      const char32_t i = c - 0x1D434;
      return put(LatexKind::symbol,
                 std::string(1, static_cast<char>(i < 26 ? U'A' + i : U'a' + i - 26)));
    }
    constexpr LatexCharacter doubles[] = {
        {0x2102, "C"}, {0x2115, "N"}, {0x211A, "Q"}, {0x211D, "R"}, {0x2124, "Z"}};
    for (const auto& [code, name] : doubles) {
      if (code == c) return put(LatexKind::symbol, "double:1:" + std::string(name));
    }
    if (const char super = script_character(c, true); super != 0)
      return scripts(LatexKind::superscript, super);
    if (const char sub = script_character(c, false); sub != 0)
      return scripts(LatexKind::subscript, sub);
    for (const auto& [code, name] : latex_characters) {
      if (code == c) return word(name);
    }
    put(LatexKind::symbol, "U:" + detail::decimal(static_cast<std::uint32_t>(c)));
  }
  [[nodiscard]] static char script_character(char32_t c, bool super) noexcept {
    if (super) {
      if (c == 0x00B2 || c == 0x00B3) return static_cast<char>('2' + (c - 0x00B2));
      if (c == 0x00B9) return '1';
      if (c == 0x2070 || (c >= 0x2074 && c <= 0x2079)) return static_cast<char>('0' + (c - 0x2070));
      return c == 0x207A ? '+' : c == 0x207B ? '-' : c == 0x207F ? 'n' : c == 0x2071 ? 'i' : '\0';
    }
    if (c >= 0x2080 && c <= 0x2089) return static_cast<char>('0' + (c - 0x2080));
    return c == 0x208A   ? '+'
           : c == 0x208B ? '-'
           : c == 0x1D62 ? 'i'
           : c == 0x2C7C ? 'j'
           : c == 0x2099 ? 'n'
                         : '\0';
  }
  /// A run of raised or lowered characters is one script in braces.
  void scripts(LatexKind kind, char first) {
    std::string run(1, first);
    for (;;) {
      const CodePoint c = first_code_point(text_.substr(at_));
      const char more =
          c.bytes == 0 ? '\0' : script_character(c.value, kind == LatexKind::superscript);
      if (more == 0) break;
      run += more;
      at_ += c.bytes;
    }
    put(kind, kind == LatexKind::superscript ? "^" : "_");
    put(LatexKind::group_open, "{");
    for (std::size_t i = 0; i < run.size();) {
      if (digit(run[i])) {
        std::string digits;
        while (i < run.size() && digit(run[i])) digits += run[i++];
        digits.erase(0, (std::min)(digits.find_first_not_of('0'), digits.size() - 1));
        put(LatexKind::number, digits);
      } else {
        const char c = run[i++];
        if (c == '+' || c == '-')
          put(LatexKind::infix, std::string(1, c), sum_power);
        else
          put(LatexKind::symbol, std::string(1, c));
      }
    }
    put(LatexKind::group_close, "}");
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t start_ = 0;
  std::vector<LatexToken> tokens_;
  Status status_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
