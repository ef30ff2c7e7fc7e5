#pragma once

// What reads to its right by rules of its own: functions, sums, integrals, quantifiers. Included by
// latex_parser.hpp.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_parser.hpp>

KVMELD_NAMESPACE_BEGIN
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
KVMELD_NAMESPACE_END
