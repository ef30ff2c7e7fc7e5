#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_normal.hpp>
#include <kvmeld/anchor/latex_renaming.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// How formulas are read and compared.
struct FormulaOptions {
  /// X² + y and a² + b are one formula; else only bound variables go by no name.
  bool rename_free = false;
  std::size_t max_bytes = 4096;  ///< of one formula
  std::size_t max_depth = 48;    ///< of parts within parts
  std::size_t max_free = 24;     ///< variables that `rename_free` tells apart
  /// Parts put together for that, over and over where variables are alike.
  std::size_t max_renaming_steps = 700'000;
};

/// A formula in the form in which equal ones are equal.
struct Formula {
  std::string normal{};  ///< for people and for tests; formulas are equal where it is
  Digest128 hash{};      ///< of `normal`
  /// Of each claim of several: a = b and b = c of a = b = c, and of a = b, b = c.
  std::vector<Digest128> steps{};
};

namespace detail {

KVMELD_LAZY [[nodiscard]] Digest128 formula_hash(std::string_view normal) {
  Hasher hasher;
  hasher.text("kvmeld.formula.2");
  hasher.text(normal);
  return hasher.digest();
}

/// What a formula claims one by one: the members of a list, and of each chain of two relations or
/// more every one, as a part of its own.
KVMELD_LAZY [[nodiscard]] std::vector<std::uint32_t> formula_steps(LatexTree& tree,
                                                                   std::uint32_t root) {
  using Kind = LatexNode::Kind;
  std::vector<std::uint32_t> out;
  const bool list = tree[root].kind == Kind::operation && tree[root].name == "list";
  const std::vector<std::uint32_t> members =
      list ? tree[root].children : std::vector<std::uint32_t>{root};
  for (const std::uint32_t member : members) {
    if (list) out.push_back(member);
    const LatexNode chain = tree[member];
    for (std::size_t i = 0;
         chain.kind == Kind::chain && chain.words.size() > 1 && i < chain.words.size(); ++i) {
      tree.push_back(
          {Kind::chain, {}, {chain.children[i], chain.children[i + 1]}, {chain.words[i]}});
      out.push_back(static_cast<std::uint32_t>(tree.size() - 1));
    }
  }
  return out;
}

}  // namespace detail

/// Reads a formula in the subset of LaTeX and Unicode that docs/formulas.md describes, and brings
/// it into normal form.
///
/// A hint for retrieval, no proof: products commute though matrices do not, and no law but those of
/// docs/formulas.md is known. Takes any bytes. O(n log n) for n bytes, a bounded depth and few
/// bound variables (a symbol is looked up among those around it); with `rename_free` as often as
/// there are variables, twice that where all can be exchanged, and otherwise, where they are alike,
/// within `max_renaming_steps`. Errors: `corrupt` (no UTF-8, or not a formula), `truncated`,
/// `unsupported` (environments, line breaks), `oversized` (a bound of the options).
KVMELD_LAZY [[nodiscard]] Result<Formula> parse_formula(std::string_view text,
                                                        const FormulaOptions& options = {}) {
  if (text.size() > options.max_bytes)
    return detail::error(ErrorCode::oversized, "a formula of ", text.size(), " bytes; at most ",
                         options.max_bytes);
  auto tokens = detail::LatexTokens<>(text).read();
  if (!tokens) return tokens.error();
  detail::LatexParser<> parser(*std::move(tokens), options.max_depth);
  const auto root = parser.parse();
  if (!root) return root.error();
  const std::vector<std::uint32_t> claims = detail::formula_steps(parser.tree(), *root);
  const detail::LatexTree& tree = parser.tree();
  const std::vector<detail::LatexOp> ops = detail::latex_ops(tree);
  detail::LatexFree free;
  std::size_t steps = 0;
  const auto normal = [&](std::uint32_t part) -> Result<std::string> {
    if (!options.rename_free) return detail::LatexNormal<>(tree, ops).text(part);
    detail::find_free(tree, part, free);
    detail::LatexRenaming<> renaming(tree, ops, part, free, steps, options.max_renaming_steps);
    const auto numbers = renaming.run(options.max_free);
    if (!numbers) return numbers.error();
    steps = renaming.steps();
    detail::LatexNormal<> form(tree, ops, free);
    for (std::size_t v = 0; v < numbers->size(); ++v)
      form.call(v, "$" + detail::decimal((*numbers)[v]));
    return form.text(part);
  };
  auto whole = normal(*root);
  if (!whole) return whole.error();
  Formula out;
  out.normal = *std::move(whole);
  out.hash = detail::formula_hash(out.normal);
  for (const std::uint32_t part : claims) {
    const auto claim = normal(part);
    if (!claim) return claim.error();
    out.steps.push_back(detail::formula_hash(*claim));
  }
  return out;
}

KVMELD_NAMESPACE_END
