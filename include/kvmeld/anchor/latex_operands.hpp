#pragma once

// What stands between operators: letters, numbers, fractions, scripts, parentheses. Included by
// latex_parser.hpp.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <kvmeld/anchor/latex_parser.hpp>

KVMELD_NAMESPACE_BEGIN
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
  if (primes > 0) base = operation("prime:" + detail::decimal(primes), {base});
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
KVMELD_NAMESPACE_END
