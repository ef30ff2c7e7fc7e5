#pragma once

/// A parser of LaTeX formulas within bounds.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace formula {

namespace detail {

/// What a token of a formula does.
enum class LatexKind : std::uint8_t {
  number,
  symbol,    ///< a letter, or a command that is none of the others
  function,  ///< applied to what follows
  big,       ///< a sum and its like: scripts are bounds
  integral,
  quantifier,
  infix,     ///< of `power`
  relation,  ///< likewise, in chains
  open,
  close,
  bar,         ///< opens and closes: | and ‖
  group_open,  ///< TeX's own braces
  group_close,
  superscript,
  subscript,
  prime,
  factorial,
  comma,
  full_stop,
  fraction,
  binomial,
  root,
  accent,   ///< over its one argument
  style,    ///< of its one argument, whose raw text makes a symbol
  skipped,  ///< blanks and sizes
  refused,
  end,
};

/// How tightly infix operators bind, loosest first; scripts and postfix signs bind tighter than
/// any.
enum LatexPower : std::uint8_t {
  implication_power = 2,
  or_power = 4,
  and_power = 6,
  relation_power = 8,
  set_power = 10,
  sum_power = 12,
  product_power = 14
};

struct LatexWord {
  std::string_view text;  ///< a command without its backslash
  LatexKind kind;
  std::string_view name;  ///< in the tree
  std::uint8_t power = 0;
};

/// Commands that mean more than a symbol of their own name.
inline constexpr LatexWord latex_commands[] = {
    {"sum", LatexKind::big, "sum"},
    {"prod", LatexKind::big, "prod"},
    {"lim", LatexKind::big, "lim"},
    {"max", LatexKind::big, "max"},
    {"min", LatexKind::big, "min"},
    {"sup", LatexKind::big, "sup"},
    {"inf", LatexKind::big, "inf"},
    {"bigcup", LatexKind::big, "bigcup"},
    {"bigcap", LatexKind::big, "bigcap"},
    {"int", LatexKind::integral, "int"},
    {"iint", LatexKind::integral, "iint"},
    {"iiint", LatexKind::integral, "iiint"},
    {"oint", LatexKind::integral, "oint"},
    {"forall", LatexKind::quantifier, "forall"},
    {"exists", LatexKind::quantifier, "exists"},
    {"cdot", LatexKind::infix, "*", product_power},
    {"times", LatexKind::infix, "*", product_power},
    {"ast", LatexKind::infix, "*", product_power},
    {"div", LatexKind::infix, "/", product_power},
    {"pm", LatexKind::infix, "pm", sum_power},
    {"mp", LatexKind::infix, "mp", sum_power},
    {"setminus", LatexKind::infix, "setminus", set_power},
    {"cup", LatexKind::infix, "cup", set_power},
    {"cap", LatexKind::infix, "cap", set_power},
    {"circ", LatexKind::infix, "circ", product_power},
    {"otimes", LatexKind::infix, "otimes", product_power},
    {"oplus", LatexKind::infix, "oplus", sum_power},
    {"land", LatexKind::infix, "and", and_power},
    {"wedge", LatexKind::infix, "and", and_power},
    {"lor", LatexKind::infix, "or", or_power},
    {"vee", LatexKind::infix, "or", or_power},
    {"bmod", LatexKind::infix, "mod", product_power},
    {"le", LatexKind::relation, "<=", relation_power},
    {"leq", LatexKind::relation, "<=", relation_power},
    {"leqslant", LatexKind::relation, "<=", relation_power},
    {"ge", LatexKind::relation, ">=", relation_power},
    {"geq", LatexKind::relation, ">=", relation_power},
    {"geqslant", LatexKind::relation, ">=", relation_power},
    {"lt", LatexKind::relation, "<", relation_power},
    {"gt", LatexKind::relation, ">", relation_power},
    {"ne", LatexKind::relation, "!=", relation_power},
    {"neq", LatexKind::relation, "!=", relation_power},
    {"ll", LatexKind::relation, "<<", relation_power},
    {"gg", LatexKind::relation, ">>", relation_power},
    {"approx", LatexKind::relation, "approx", relation_power},
    {"equiv", LatexKind::relation, "equiv", relation_power},
    {"sim", LatexKind::relation, "sim", relation_power},
    {"cong", LatexKind::relation, "cong", relation_power},
    {"propto", LatexKind::relation, "propto", relation_power},
    {"coloneqq", LatexKind::relation, ":=", relation_power},
    {"in", LatexKind::relation, "in", relation_power},
    {"notin", LatexKind::relation, "notin", relation_power},
    {"ni", LatexKind::relation, "ni", relation_power},
    {"subset", LatexKind::relation, "subset", relation_power},
    {"supset", LatexKind::relation, "supset", relation_power},
    {"subseteq", LatexKind::relation, "subseteq", relation_power},
    {"supseteq", LatexKind::relation, "supseteq", relation_power},
    {"mid", LatexKind::relation, "mid", relation_power},
    {"perp", LatexKind::relation, "perp", relation_power},
    {"to", LatexKind::relation, "to", relation_power},
    {"rightarrow", LatexKind::relation, "to", relation_power},
    {"mapsto", LatexKind::relation, "mapsto", relation_power},
    {"colon", LatexKind::relation, "colon", relation_power},
    {"implies", LatexKind::relation, "implies", implication_power},
    {"Rightarrow", LatexKind::relation, "implies", implication_power},
    {"impliedby", LatexKind::relation, "impliedby", implication_power},
    {"Leftarrow", LatexKind::relation, "impliedby", implication_power},
    {"iff", LatexKind::relation, "iff", implication_power},
    {"Leftrightarrow", LatexKind::relation, "iff", implication_power},
    {"{", LatexKind::open, "set"},
    {"}", LatexKind::close, "set"},
    {"langle", LatexKind::open, "angle"},
    {"rangle", LatexKind::close, "angle"},
    {"lfloor", LatexKind::open, "floor"},
    {"rfloor", LatexKind::close, "floor"},
    {"lceil", LatexKind::open, "ceil"},
    {"rceil", LatexKind::close, "ceil"},
    {"lvert", LatexKind::open, "abs"},
    {"rvert", LatexKind::close, "abs"},
    {"lVert", LatexKind::open, "norm"},
    {"rVert", LatexKind::close, "norm"},
    {"|", LatexKind::bar, "norm"},
    {"Vert", LatexKind::bar, "norm"},
    {"vert", LatexKind::bar, "abs"},
    {"lbrace", LatexKind::open, "set"},
    {"rbrace", LatexKind::close, "set"},
    {"prime", LatexKind::prime, "prime"},
    {"frac", LatexKind::fraction, "frac"},
    {"dfrac", LatexKind::fraction, "frac"},
    {"tfrac", LatexKind::fraction, "frac"},
    {"cfrac", LatexKind::fraction, "frac"},
    {"binom", LatexKind::binomial, "binom"},
    {"dbinom", LatexKind::binomial, "binom"},
    {"sqrt", LatexKind::root, "root"},
    {"hat", LatexKind::accent, "hat"},
    {"widehat", LatexKind::accent, "hat"},
    {"bar", LatexKind::accent, "bar"},
    {"overline", LatexKind::accent, "bar"},
    {"tilde", LatexKind::accent, "tilde"},
    {"widetilde", LatexKind::accent, "tilde"},
    {"vec", LatexKind::accent, "vec"},
    {"dot", LatexKind::accent, "dot"},
    {"ddot", LatexKind::accent, "ddot"},
    {"underline", LatexKind::accent, "underline"},
    {"mathrm", LatexKind::style, ""},
    {"mathit", LatexKind::style, ""},
    {"operatorname", LatexKind::style, "fn"},
    {"mathbf", LatexKind::style, "bold"},
    {"boldsymbol", LatexKind::style, "bold"},
    {"bm", LatexKind::style, "bold"},
    {"mathbb", LatexKind::style, "double"},
    {"mathcal", LatexKind::style, "script"},
    {"mathscr", LatexKind::style, "script"},
    {"mathfrak", LatexKind::style, "fraktur"},
    {"mathsf", LatexKind::style, "sans"},
    {"text", LatexKind::style, "text"},
    {"textrm", LatexKind::style, "text"},
    {"textbf", LatexKind::style, "text"},
    {"mbox", LatexKind::style, "text"},
    {"left", LatexKind::skipped, ""},
    {"right", LatexKind::skipped, ""},
    {"big", LatexKind::skipped, ""},
    {"Big", LatexKind::skipped, ""},
    {"bigl", LatexKind::skipped, ""},
    {"bigr", LatexKind::skipped, ""},
    {"Bigl", LatexKind::skipped, ""},
    {"Bigr", LatexKind::skipped, ""},
    {"bigg", LatexKind::skipped, ""},
    {"limits", LatexKind::skipped, ""},
    {"nolimits", LatexKind::skipped, ""},
    {"displaystyle", LatexKind::skipped, ""},
    {"textstyle", LatexKind::skipped, ""},
    {"quad", LatexKind::skipped, ""},
    {"qquad", LatexKind::skipped, ""},
    {",", LatexKind::skipped, ""},
    {";", LatexKind::skipped, ""},
    {":", LatexKind::skipped, ""},
    {"!", LatexKind::skipped, ""},
    {" ", LatexKind::skipped, ""},
    {">", LatexKind::skipped, ""},
    {"(", LatexKind::skipped, ""},
    {")", LatexKind::skipped, ""},
    {"[", LatexKind::skipped, ""},
    {"]", LatexKind::skipped, ""},
    {"begin", LatexKind::refused, ""},
    {"end", LatexKind::refused, ""},
    {"\\", LatexKind::refused, ""},
    {"over", LatexKind::refused, ""},
    {"substack", LatexKind::refused, ""},
    {"dots", LatexKind::symbol, "dots"},
    {"cdots", LatexKind::symbol, "dots"},
    {"ldots", LatexKind::symbol, "dots"},
    {"varepsilon", LatexKind::symbol, "epsilon"},
    {"varphi", LatexKind::symbol, "phi"},
    {"vartheta", LatexKind::symbol, "theta"},
    {"varrho", LatexKind::symbol, "rho"},
    {"varsigma", LatexKind::symbol, "sigma"},
    {"varpi", LatexKind::symbol, "pi"},
    {"lnot", LatexKind::symbol, "neg"},
    {"varnothing", LatexKind::symbol, "emptyset"},
};
inline constexpr std::string_view latex_functions[] = {
    "sin",  "cos",  "tan",  "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh",
    "cosh", "tanh", "coth", "log", "ln",  "lg",  "exp",    "det",    "dim",    "ker",
    "deg",  "gcd",  "arg",  "hom", "Pr",  "tr",  "argmax", "argmin"};

/// Characters beyond ASCII that stand for a command.
struct LatexCharacter {
  char32_t code;
  std::string_view command;
};
inline constexpr LatexCharacter latex_characters[] = {
    {0x2211, "sum"},      {0x220F, "prod"},     {0x222B, "int"},    {0x222C, "iint"},
    {0x222D, "iiint"},    {0x222E, "oint"},     {0x221A, "sqrt"},   {0x2200, "forall"},
    {0x2203, "exists"},   {0x00B7, "cdot"},     {0x22C5, "cdot"},   {0x2219, "cdot"},
    {0x00D7, "times"},    {0x2217, "ast"},      {0x00F7, "div"},    {0x00B1, "pm"},
    {0x2213, "mp"},       {0x2264, "le"},       {0x2265, "ge"},     {0x2A7D, "le"},
    {0x2A7E, "ge"},       {0x2260, "ne"},       {0x2248, "approx"}, {0x2261, "equiv"},
    {0x223C, "sim"},      {0x2245, "cong"},     {0x221D, "propto"}, {0x2208, "in"},
    {0x2209, "notin"},    {0x220B, "ni"},       {0x2282, "subset"}, {0x2283, "supset"},
    {0x2286, "subseteq"}, {0x2287, "supseteq"}, {0x222A, "cup"},    {0x2229, "cap"},
    {0x2227, "land"},     {0x2228, "lor"},      {0x2192, "to"},     {0x21D2, "implies"},
    {0x21D4, "iff"},      {0x21A6, "mapsto"},   {0x2223, "mid"},    {0x22A5, "perp"},
    {0x27E8, "langle"},   {0x27E9, "rangle"},   {0x230A, "lfloor"}, {0x230B, "rfloor"},
    {0x2308, "lceil"},    {0x2309, "rceil"},    {0x2016, "|"},      {0x2032, "prime"},
    {0x221E, "infty"},    {0x2202, "partial"},  {0x2207, "nabla"},  {0x2205, "emptyset"},
    {0x2026, "dots"},     {0x22EF, "dots"},     {0x2218, "circ"},   {0x2297, "otimes"},
    {0x2295, "oplus"},    {0x226A, "ll"},       {0x226B, "gg"},     {0x03D5, "phi"},
    {0x03F5, "epsilon"},  {0x03D1, "theta"},    {0x00B5, "mu"},     {0x2113, "ell"},
    {0x2254, "coloneqq"}, {0x00AC, "neg"},
};
/// U+0391 to U+03A9, and U+03B1 to U+03C9 in lower case; each has its place in both (U+03C2 is the
/// final sigma).
inline constexpr std::string_view latex_greek[] = {
    "Alpha", "Beta",   "Gamma",   "Delta", "Epsilon", "Zeta",    "Eta",  "Theta", "Iota",
    "Kappa", "Lambda", "Mu",      "Nu",    "Xi",      "Omicron", "Pi",   "Rho",   "Sigma",
    "Sigma", "Tau",    "Upsilon", "Phi",   "Chi",     "Psi",     "Omega"};
/// Letters that are applied where a parenthesis follows; any other letter there is a factor.
inline constexpr std::string_view latex_applied = "fghFGH";
/// Symbols that no renaming touches, beside text and double-struck letters.
inline constexpr std::string_view latex_constants[] = {
    "pi", "infty", "emptyset", "dots", "partial", "nabla", "star", "plus", "top", "degree"};

[[nodiscard]] constexpr const LatexWord* find_latex_command(std::string_view text) noexcept {
  for (const LatexWord& word : latex_commands) {
    if (word.text == text) return &word;
  }
  return nullptr;
}

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
    status_ = extend::error(code, "formula: ", why, " at byte ", start_);
  }
  void put(LatexKind kind, std::string name, std::uint8_t power = 0) {
    tokens_.push_back({kind, std::move(name), power, start_});
  }

  void next() {
    start_ = at_;
    const extend::CodePoint c = extend::first_code_point(text_.substr(at_));
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
      const extend::CodePoint c = extend::first_code_point(text_.substr(at_));
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
        std::string(style) + ':' + extend::decimal(content.size()) + ':' + content);
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
    put(LatexKind::symbol, "U:" + extend::decimal(static_cast<std::uint32_t>(c)));
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
      const extend::CodePoint c = extend::first_code_point(text_.substr(at_));
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

/// A part of a formula. Its children come before it in the tree.
struct LatexNode {
  enum class Kind : std::uint8_t {
    number,
    symbol,
    operation,  ///< `name` of its children
    chain,      ///< children with a relation of `words` between each two
    binder,     ///< `name` binds `words` in its children from `scope` on
  };
  Kind kind = Kind::operation;
  std::string name{};
  std::vector<std::uint32_t> children{};
  std::vector<std::string> words{};
  std::size_t scope = 0;
  std::size_t depth = 1;
};

using LatexTree = std::vector<LatexNode>;

/// Pratt's parser (Top down operator precedence, 1973) over the subset of docs/formulas.md.
///
/// Recursion is bounded by `max_depth`, and so is the tree's height. O(tokens), O(tokens²) for
/// integrals within integrals.
template <class = void>
class LatexParser {
  using Kind = LatexNode::Kind;

 public:
  LatexParser(std::vector<LatexToken> tokens, std::size_t max_depth)
      : tokens_(std::move(tokens)), limit_(tokens_.size() - 1), max_depth_(max_depth) {}

  /// The root's number in `tree()`. Errors: `truncated`, `corrupt`, `oversized`.
  [[nodiscard]] Result<std::uint32_t> parse() {
    // of a sentence
    while (at_ < limit_ && (tokens_[limit_ - 1].kind == LatexKind::full_stop ||
                            tokens_[limit_ - 1].kind == LatexKind::comma))
      --limit_;
    const std::uint32_t root = list();
    if (status_.ok() && at_ < limit_) fail("a token that cannot stand here");
    if (!status_.ok()) return status_;
    return root;
  }
  [[nodiscard]] LatexTree& tree() noexcept { return tree_; }

 private:
  // The first failure stays, and every loop ends at once: nothing is left to read.
  void fail(std::string_view why, ErrorCode code = ErrorCode::corrupt) {
    if (!status_.ok()) return;
    const bool ended = at_ >= tokens_.size() - 1;
    if (ended && code == ErrorCode::corrupt) code = ErrorCode::truncated;
    status_ = extend::error(code, "formula: ", why, " at byte ",
                            tokens_[(std::min)(at_, tokens_.size() - 1)].at);
    at_ = limit_ = tokens_.size() - 1;
  }
  void too_deep() {
    fail("parts within parts, deeper than max_depth " + extend::decimal(max_depth_) +
             " allows; raise it or simplify",
         ErrorCode::oversized);
  }
  /// One level down, for whatever can hold itself: `expression`, `argument`, `script` and
  /// `function`, one of which is in every cycle of productions. False once too deep, or failed
  /// before; there the caller ends before it reads on. Else it takes the level back.
  [[nodiscard]] bool deeper() {
    if (depth_ >= max_depth_) too_deep();
    ++depth_;
    return status_.ok();
  }
  [[nodiscard]] const LatexToken& peek(std::size_t ahead = 0) const noexcept {
    return tokens_[at_ + ahead < limit_ ? at_ + ahead : tokens_.size() - 1];
  }
  [[nodiscard]] bool next_is(LatexKind kind) const noexcept { return peek().kind == kind; }
  [[nodiscard]] bool next_is(LatexKind kind, std::string_view name) const noexcept {
    return peek().kind == kind && peek().name == name;
  }
  bool take(LatexKind kind) {
    if (!next_is(kind)) return false;
    ++at_;
    return true;
  }
  void expect(LatexKind kind, std::string_view why) {
    if (!take(kind)) fail(why);
  }

  std::uint32_t add(LatexNode node) {
    if (!status_.ok()) return none;  // a child may be missing
    for (const std::uint32_t c : node.children)
      node.depth = (std::max)(node.depth, tree_[c].depth + 1);
    if (node.depth > 4 * max_depth_) too_deep();
    tree_.push_back(std::move(node));
    return static_cast<std::uint32_t>(tree_.size() - 1);
  }
  std::uint32_t leaf(Kind kind, std::string name) { return add({kind, std::move(name)}); }
  std::uint32_t operation(std::string name, std::vector<std::uint32_t> children) {
    return add({Kind::operation, std::move(name), std::move(children)});
  }
  /// a op b, as one more operand where a is such an operation itself and grew here.
  std::uint32_t joined(std::string_view name, std::uint32_t a, std::uint32_t b,
                       std::uint32_t& grown) {
    if (!status_.ok()) return none;
    if (a != grown || tree_[a].name != name) return grown = operation(std::string(name), {a, b});
    tree_[a].children.push_back(b);
    tree_[a].depth = (std::max)(tree_[a].depth, tree_[b].depth + 1);
    if (tree_[a].depth > 4 * max_depth_) too_deep();
    return a;
  }

  /// Expressions between commas: one is itself.
  std::uint32_t list() {
    std::vector<std::uint32_t> items{expression(0)};
    while (take(LatexKind::comma) || take(LatexKind::full_stop) || next_is(LatexKind::quantifier))
      items.push_back(expression(0));
    return items.size() == 1 ? items[0] : operation("list", std::move(items));
  }

  std::uint32_t expression(int least_power) {
    if (!deeper()) return none;
    std::uint32_t left = prefix(), grown = none;
    while (status_.ok()) {
      const LatexToken token = peek();
      if (token.kind == LatexKind::infix && token.power >= least_power) {
        ++at_;
        const std::uint32_t right = expression(token.power + 1);
        left = infix(token.name, left, right, grown);
      } else if (token.kind == LatexKind::relation && token.power >= least_power) {
        left = chain(left, token.power);
      } else if (begins_operand() && product_power >= least_power) {
        const std::uint32_t right = expression(product_power + 1);
        // a_{ij} is no product: a_{ji} is another
        left = joined(in_subscript_ ? "list" : "*", left, right, grown);
      } else {
        break;
      }
    }
    --depth_;
    return left;
  }
  std::uint32_t infix(const std::string& name, std::uint32_t left, std::uint32_t right,
                      std::uint32_t& grown) {
    if (name == "-") return joined("+", left, operation("neg", {right}), grown);
    if (name == "/") return joined("*", left, operation("inv", {right}), grown);
    if (name == "pm" || name == "mp") return joined("+", left, operation(name, {right}), grown);
    return joined(name, left, right, grown);
  }
  std::uint32_t chain(std::uint32_t first, std::uint8_t power) {
    LatexNode node{Kind::chain, {}, {first}};
    while (next_is(LatexKind::relation) && peek().power == power) {
      node.words.push_back(peek().name);
      ++at_;
      node.children.push_back(expression(power + 1));
    }
    return add(std::move(node));
  }

  [[nodiscard]] bool begins_operand() const noexcept {
    switch (peek().kind) {
      case LatexKind::number:
      case LatexKind::symbol:
      case LatexKind::function:
      case LatexKind::big:
      case LatexKind::integral:
      case LatexKind::open:
      case LatexKind::group_open:
      case LatexKind::fraction:
      case LatexKind::binomial:
      case LatexKind::root:
      case LatexKind::accent:
        return true;
      case LatexKind::bar:
        return open_bar_ != peek().name;
      default:
        return false;
    }
  }

  std::uint32_t prefix() {
    if (next_is(LatexKind::infix)) {
      const std::string name = peek().name;
      if (name == "+" || name == "-" || name == "pm" || name == "mp") {
        ++at_;
        const std::uint32_t operand = expression(sum_power + 1);
        return name == "+" ? operand : operation(name == "-" ? "neg" : name, {operand});
      }
    }
    if (next_is(LatexKind::quantifier)) return quantified();
    if (next_is(LatexKind::big)) return big();
    if (next_is(LatexKind::integral)) return integral();
    if (next_is(LatexKind::function)) return function();
    if (next_is(LatexKind::symbol, "neg")) {
      ++at_;
      return operation("not", {expression(relation_power)});
    }
    // Capital sigma and pi with bounds, or before an operand, are signs of sums and products.
    if (next_is(LatexKind::symbol, "Sigma") || next_is(LatexKind::symbol, "Pi")) {
      ++at_;
      const bool sign =
          (next_is(LatexKind::subscript) || next_is(LatexKind::superscript) || begins_operand()) &&
          !inverse_or_transpose();
      --at_;
      if (sign) return big();
    }
    return scripted();
  }
  /// Whether a superscript alone follows that no bound is: −1, T, ⊤, *, '.
  [[nodiscard]] bool inverse_or_transpose() const noexcept {
    if (!next_is(LatexKind::superscript)) return next_is(LatexKind::prime);
    const std::size_t first = peek(1).kind == LatexKind::group_open ? 2 : 1;
    const LatexToken& token = peek(first);
    const bool minus = token.kind == LatexKind::infix && token.name == "-" &&
                       peek(first + 1).kind == LatexKind::number;
    const std::size_t after = first + (minus ? 2 : 1) + (first - 1);
    if (first == 2 && peek(minus ? 4 : 3).kind != LatexKind::group_close) return false;
    return (minus || token.name == "T" || token.name == "top" || token.name == "*" ||
            token.kind == LatexKind::prime) &&
           peek(after).kind != LatexKind::subscript;
  }

  std::uint32_t scripted();
  std::uint32_t script(bool lower);
  std::uint32_t operand();
  std::uint32_t argument();
  std::uint32_t braced();
  std::uint32_t delimited();
  std::uint32_t between_bars();
  [[nodiscard]] static std::size_t dimensions(std::string_view integral) noexcept {
    return integral == "iint" ? 2 : integral == "iiint" ? 3 : 1;
  }

  std::uint32_t function();
  std::uint32_t applied(const std::string& name, std::uint32_t below, std::uint32_t above);
  std::uint32_t big();
  std::uint32_t integral();
  std::uint32_t quantified();
  void bounds(std::uint32_t& below, std::uint32_t& above);
  void bind(LatexNode& node, std::vector<std::uint32_t>& within, std::uint32_t item);
  [[nodiscard]] std::size_t find_differential(std::size_t wanted) const;
  void differentials(LatexNode& node, std::size_t count);

  static constexpr std::uint32_t none = static_cast<std::uint32_t>(-1);

  std::vector<LatexToken> tokens_;
  std::size_t at_ = 0;
  std::size_t limit_;
  std::size_t max_depth_;
  std::size_t depth_ = 0;
  LatexTree tree_;
  Status status_;
  bool in_subscript_ = false;
  std::string open_bar_{};  // the bar that closes next, where one is open
  // where the innermost integral without one keeps its variable
  std::string* differential_ = nullptr;
};

}  // namespace detail

// What stands between operators: letters, numbers, fractions, scripts, parentheses. Included by
// latex_parser.hpp.

namespace detail {

/// An operand with its scripts, primes and factorials.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::scripted() {
  const LatexToken first = peek();
  std::uint32_t base = operand();
  bool super = false, sub = false;
  std::uint32_t power = none;
  std::size_t primes = 0;
  while (status_.ok()) {
    if (next_is(LatexKind::superscript)) {
      ++at_;
      if (std::exchange(super, true)) fail("two superscripts");
      if (primes == 0 && next_is(LatexKind::prime)) {
        while (take(LatexKind::prime)) ++primes;
      } else {
        power = script(false);
      }
    } else if (next_is(LatexKind::subscript)) {
      ++at_;
      if (std::exchange(sub, true)) fail("two subscripts");
      base = operation("sub", {base, script(true)});
    } else if (take(LatexKind::prime)) {
      ++primes;
    } else {
      break;
    }
  }
  if (primes > 0) base = operation("prime:" + extend::decimal(primes), {base});
  if (power != none) base = operation("^", {base, power});
  if (first.kind == LatexKind::symbol && latex_applied.find(first.name) != std::string_view::npos &&
      first.name.size() == 1 && next_is(LatexKind::open, "(")) {
    base = operation("apply", {base, delimited()});
  }
  while (status_.ok() && take(LatexKind::factorial)) base = operation("!", {base});
  return base;
}

/// What stands in a script: braces, or one token; a sign is taken with what follows it.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::script(bool lower) {
  if (!deeper()) return none;
  const bool before = std::exchange(in_subscript_, lower);
  std::uint32_t out = none;
  if (next_is(LatexKind::infix, "*") || next_is(LatexKind::infix, "+") ||
      next_is(LatexKind::infix, "circ")) {
    const std::string name = peek().name;
    ++at_;
    out = leaf(Kind::symbol, name == "*" ? "star" : name == "+" ? "plus" : "degree");
  } else if (next_is(LatexKind::infix, "-")) {
    ++at_;
    out = operation("neg", {operand()});
  } else if (next_is(LatexKind::group_open) && peek(1).kind == LatexKind::infix &&
             peek(2).kind == LatexKind::group_close) {
    ++at_;
    out = script(lower);
    expect(LatexKind::group_close, "a brace that is not closed");
  } else {
    out = operand();
  }
  --depth_;
  in_subscript_ = before;
  return out;
}

/// Without scripts.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::operand() {
  const LatexToken token = peek();
  switch (token.kind) {
    case LatexKind::number:
      ++at_;
      return leaf(Kind::number, token.name);
    case LatexKind::symbol:
      ++at_;
      if (differential_ != nullptr && differential_->empty() && token.name == "d" &&
          next_is(LatexKind::symbol)) {
        *differential_ = peek().name;
        ++at_;
        return leaf(Kind::number, "1");
      }
      return leaf(Kind::symbol, token.name);
    case LatexKind::function:
      return function();
    case LatexKind::fraction:
    case LatexKind::binomial: {
      ++at_;
      const std::uint32_t above = argument(), below = argument();
      return token.kind == LatexKind::binomial ? operation("binom", {above, below})
                                               : operation("*", {above, operation("inv", {below})});
    }
    case LatexKind::root: {
      ++at_;
      std::uint32_t degree = none;
      if (next_is(LatexKind::open, "[")) {
        ++at_;
        degree = expression(0);
        if (!next_is(LatexKind::close, "[")) fail("a bracket that is not closed");
        ++at_;
      } else {
        degree = leaf(Kind::number, "2");
      }
      return operation("root", {degree, argument()});
    }
    case LatexKind::accent:
      ++at_;
      return operation("accent:" + token.name, {argument()});
    case LatexKind::group_open:
      return braced();
    case LatexKind::open:
      return delimited();
    case LatexKind::bar:
      return between_bars();
    default:
      fail("an operand is missing");
      return none;
  }
}

template <class Lazy>
std::uint32_t LatexParser<Lazy>::argument() {
  if (!deeper()) return none;
  const bool before = std::exchange(in_subscript_, false);
  const std::uint32_t out = operand();
  in_subscript_ = before;
  --depth_;
  return out;
}

template <class Lazy>
std::uint32_t LatexParser<Lazy>::braced() {
  ++at_;
  if (take(LatexKind::group_close)) return operation("list", {});
  const std::string bar = std::exchange(open_bar_, {});
  const std::uint32_t out = list();
  open_bar_ = bar;
  expect(LatexKind::group_close, "a brace that is not closed");
  return out;
}

/// (a), [a] and what is like them; several between commas stay together with the signs around them.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::delimited() {
  const std::string opened = peek().name;
  ++at_;
  const bool script = std::exchange(in_subscript_, false);
  const std::string bar = std::exchange(open_bar_, {});
  const std::uint32_t inside = next_is(LatexKind::close) ? operation("list", {}) : list();
  open_bar_ = bar;
  in_subscript_ = script;
  const std::string closed = peek().name;
  const auto round = [](const std::string& name) { return name == "(" || name == "["; };
  if (!next_is(LatexKind::close) || (opened != closed && !(round(opened) && round(closed)))) {
    fail("a parenthesis that is not closed by its like");
    return none;
  }
  ++at_;
  if (!round(opened)) return operation(opened, {inside});
  const bool several =
      inside != none && tree_[inside].kind == Kind::operation && tree_[inside].name == "list";
  if (opened == closed && !several) return inside;
  return operation("tuple" + opened + closed, {inside});
}

template <class Lazy>
std::uint32_t LatexParser<Lazy>::between_bars() {
  const std::string name = peek().name;
  ++at_;
  const bool script = std::exchange(in_subscript_, false);
  const std::string bar = std::exchange(open_bar_, name);
  const std::uint32_t inside = list();
  open_bar_ = bar;
  in_subscript_ = script;
  if (!next_is(LatexKind::bar, name)) fail("a bar that is not closed (relations are \\mid)");
  ++at_;
  return operation(name, {inside});
}

}  // namespace detail

// What reads to its right by rules of its own: functions, sums, integrals, quantifiers. Included by
// latex_parser.hpp.

namespace detail {

/// \sin x, \sin 2x y up to the next sign, parenthesis or function; \sin(x) y is sin(x) · y.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::function() {
  if (!deeper()) return none;  // before its bounds: \ln_\ln_\ln_ nests too
  const std::string name = peek().name;
  ++at_;
  std::uint32_t below = none, above = none;
  bounds(below, above);
  const std::uint32_t out = applied("fn:" + name, below, above);
  --depth_;
  return out;
}

/// A function whose bounds are read, of what follows.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::applied(const std::string& name, std::uint32_t below,
                                         std::uint32_t above) {
  std::vector<std::uint32_t> children;
  if (next_is(LatexKind::open)) {
    children.push_back(delimited());
  } else if (next_is(LatexKind::function)) {
    children.push_back(function());
  } else if (begins_operand() && !next_is(LatexKind::big) && !next_is(LatexKind::integral)) {
    std::uint32_t factors = scripted(), grown = none;
    while (begins_operand() && !next_is(LatexKind::open) && !next_is(LatexKind::function) &&
           !next_is(LatexKind::big) && !next_is(LatexKind::integral)) {
      factors = joined("*", factors, scripted(), grown);
    }
    children.push_back(factors);
  }
  if (below != none) children.push_back(operation("base", {below}));
  const std::uint32_t out =
      children.empty() ? leaf(Kind::symbol, name) : operation(name, std::move(children));
  return above == none ? out : operation("^", {out, above});
}

/// Scripts that are bounds, in either order.
template <class Lazy>
void LatexParser<Lazy>::bounds(std::uint32_t& below, std::uint32_t& above) {
  while (status_.ok() && (next_is(LatexKind::subscript) || next_is(LatexKind::superscript))) {
    std::uint32_t& bound = next_is(LatexKind::subscript) ? below : above;
    ++at_;
    if (bound != none) fail("two bounds on one side");
    bound = script(false);
  }
}

/// What one condition under a sign binds: i = a and i ∈ S name i apart from what it runs over; a ≤
/// i ≤ b and i < j hold i itself.
template <class Lazy>
void LatexParser<Lazy>::bind(LatexNode& node, std::vector<std::uint32_t>& within,
                             std::uint32_t item) {
  if (!status_.ok()) return;
  const LatexNode at = tree_[item];
  const auto symbol = [&](std::size_t i) { return tree_[at.children[i]].kind == Kind::symbol; };
  const auto name = [&](std::size_t i) { return tree_[at.children[i]].name; };
  bool all_symbols = true;
  for (std::size_t i = 0; i < at.children.size(); ++i) all_symbols = all_symbols && symbol(i);
  if (at.kind == Kind::symbol) {
    node.words.push_back(at.name);
  } else if (at.kind == Kind::operation && at.name == "list") {
    for (const std::uint32_t c : at.children) {
      // no list of lists, and so no recursion to bound
      if (tree_[c].kind == Kind::operation && tree_[c].name == "list")
        within.push_back(c);
      else
        bind(node, within, c);
    }
  } else if (at.kind == Kind::operation && at.name == "*" && all_symbols) {
    for (std::size_t i = 0; i < at.children.size(); ++i) node.words.push_back(name(i));
  } else if (at.kind == Kind::chain && at.words.size() == 1 && symbol(0)) {
    node.words.push_back(name(0));
    const std::string& relation = at.words[0];
    if (relation == "=" || relation == "in" || relation == "to")
      node.children.push_back(operation("over:" + relation, {at.children[1]}));
    else
      within.push_back(item);
  } else {
    if (at.kind == Kind::chain && at.words.size() == 2 && symbol(1)) node.words.push_back(name(1));
    within.push_back(item);
  }
}

/// \sum, \prod, \lim, \max, …: over the product that follows.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::big() {
  const LatexToken token = peek();
  const std::string name = token.name == "Sigma" ? "sum" : token.name == "Pi" ? "prod" : token.name;
  ++at_;
  std::uint32_t below = none, above = none;
  bounds(below, above);
  if (below == none && (name == "max" || name == "min" || name == "sup" || name == "inf"))
    return applied("fn:" + name, below, above);
  LatexNode node{Kind::binder, name};
  std::vector<std::uint32_t> within;
  if (below != none) bind(node, within, below);
  if (above != none) node.children.push_back(operation("upto", {above}));
  node.scope = node.children.size();
  for (const std::uint32_t condition : within)
    node.children.push_back(operation("where", {condition}));
  const bool minus = next_is(LatexKind::infix, "-") && below != none;
  if (begins_operand() || minus) node.children.push_back(expression(product_power));
  if (node.children.empty() && node.words.empty()) return leaf(Kind::symbol, "big:" + name);
  return add(std::move(node));
}

/// The next differential of as many as `pending` integrals of their own want none, or none: dx
/// outside of all parentheses.
template <class Lazy>
std::size_t LatexParser<Lazy>::find_differential(std::size_t pending) const {
  std::size_t depth = 0;
  for (std::size_t i = at_; i + 1 < limit_; ++i) {
    const LatexToken& token = tokens_[i];
    if (token.kind == LatexKind::open || token.kind == LatexKind::group_open) ++depth;
    if (token.kind == LatexKind::close || token.kind == LatexKind::group_close) {
      if (depth == 0) break;
      --depth;
    }
    if (depth > 0) continue;
    if (token.kind == LatexKind::relation || token.kind == LatexKind::comma) break;
    if (token.kind == LatexKind::integral) pending += dimensions(token.name);
    if (token.kind != LatexKind::symbol || token.name != "d" ||
        tokens_[i + 1].kind != LatexKind::symbol)
      continue;
    if (pending == 0) return i;
    --pending;
    ++i;
  }
  return limit_;
}

/// dx, and for double and triple integrals dy and dz.
template <class Lazy>
void LatexParser<Lazy>::differentials(LatexNode& node, std::size_t count) {
  for (; count > 0 && next_is(LatexKind::symbol, "d") && peek(1).kind == LatexKind::symbol;
       --count) {
    node.words.push_back(peek(1).name);
    at_ += 2;
    if (take(LatexKind::subscript)) (void)script(true);  // of d x_1: x is what is bound
  }
}

/// Up to its differential, wherever in the integrand that stands: ∫ f dx, ∫ dx f, ∫ dx/x.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::integral() {
  LatexNode node{Kind::binder, peek().name};
  ++at_;
  std::uint32_t below = none, above = none;
  bounds(below, above);
  if (below != none) node.children.push_back(operation("over:=", {below}));
  if (above != none) node.children.push_back(operation("upto", {above}));
  node.scope = node.children.size();
  const std::size_t end = find_differential(0);
  std::uint32_t body = none;
  std::string variable;
  std::string* const outer = std::exchange(differential_, end < limit_ ? nullptr : &variable);
  if (end < limit_) {
    const std::size_t limit = std::exchange(limit_, end);
    if (at_ < end) body = expression(sum_power);
    if (at_ < end) fail("an integrand that ends before its differential");
    limit_ = limit;
    differentials(node, dimensions(node.name));
    if (body == none && begins_operand()) body = expression(product_power);
  } else if (begins_operand() || next_is(LatexKind::infix, "-")) {
    body = expression(product_power);
    if (!variable.empty()) node.words.push_back(variable);
  }
  differential_ = outer;
  if (body != none) node.children.push_back(body);
  if (node.children.empty() && node.words.empty()) return leaf(Kind::symbol, "big:" + node.name);
  return add(std::move(node));
}

/// ∀x ∈ S: P, with or without the domain, and whatever sign parts them.
template <class Lazy>
std::uint32_t LatexParser<Lazy>::quantified() {
  LatexNode node{Kind::binder, peek().name};
  ++at_;
  if (take(LatexKind::factorial)) node.name += '!';
  do {
    if (!next_is(LatexKind::symbol)) fail("a quantifier without its variable");
    node.words.push_back(peek().name);
    ++at_;
    if (take(LatexKind::subscript)) (void)script(true);
    // A comma goes on with another variable where that has a comma or a set behind it, else it
    // begins what is claimed.
  } while (status_.ok() && next_is(LatexKind::comma) && peek(1).kind == LatexKind::symbol &&
           (peek(2).kind == LatexKind::comma ||
            (peek(2).kind == LatexKind::relation && peek(2).name == "in")) &&
           take(LatexKind::comma));
  if (next_is(LatexKind::relation) && peek().power == relation_power && peek().name != "colon" &&
      peek().name != "mid" && peek().name != "=") {
    const std::string name = "over:" + peek().name;
    ++at_;
    node.children.push_back(operation(name, {expression(relation_power + 1)}));
  }
  node.scope = node.children.size();
  while (next_is(LatexKind::comma) || next_is(LatexKind::full_stop) ||
         next_is(LatexKind::relation, "colon") || next_is(LatexKind::relation, "mid"))
    ++at_;
  const bool sign = next_is(LatexKind::infix, "-") || next_is(LatexKind::infix, "+");
  if (begins_operand() || next_is(LatexKind::quantifier) || sign)
    node.children.push_back(expression(0));
  return add(std::move(node));
}

}  // namespace detail

}  // namespace formula

KVMELD_NAMESPACE_END
