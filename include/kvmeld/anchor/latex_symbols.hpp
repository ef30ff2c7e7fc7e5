#pragma once

#include <cstdint>
#include <string_view>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
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

}  // namespace detail
KVMELD_NAMESPACE_END
