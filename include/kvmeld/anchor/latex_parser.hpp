#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_tokens.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

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
    status_ =
        error(code, "formula: ", why, " at byte ", tokens_[(std::min)(at_, tokens_.size() - 1)].at);
    at_ = limit_ = tokens_.size() - 1;
  }
  void too_deep() {
    fail("parts within parts, deeper than max_depth " + detail::decimal(max_depth_) +
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
KVMELD_NAMESPACE_END

#include <kvmeld/anchor/latex_binders.hpp>
#include <kvmeld/anchor/latex_operands.hpp>
