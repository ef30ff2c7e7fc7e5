#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_free.hpp>
#include <kvmeld/anchor/latex_writers.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// What sums and products are made of.
enum class LatexOp : std::uint8_t { none, plus, minus, times, inverse };

/// (nodes) Found once for a tree: names are read over and over else, and each of many claims of a
/// formula would have all of it looked at.
KVMELD_LAZY [[nodiscard]] std::vector<LatexOp> latex_ops(const LatexTree& tree) {
  std::vector<LatexOp> out(tree.size(), LatexOp::none);
  for (std::size_t n = 0; n < tree.size(); ++n) {
    const std::string& name = tree[n].name;
    if (tree[n].kind != LatexNode::Kind::operation) continue;
    out[n] = name == "+"     ? LatexOp::plus
             : name == "neg" ? LatexOp::minus
             : name == "*"   ? LatexOp::times
             : name == "inv" ? LatexOp::inverse
                             : LatexOp::none;
  }
  return out;
}

/// Writes a tree so that formulas that mean the same read the same: bound variables by the number
/// of binders between (de Bruijn, 1972), operands of what commutes in order of their text, nested
/// sums and products as one.
///
/// @tparam Writer  `LatexText`, or what gives equal values where that does, in some order.
template <class Writer = LatexText>
class LatexNormal {
  using Kind = LatexNode::Kind;
  using Op = LatexOp;

 public:
  using Text = typename Writer::type;

  /// @param ops  `latex_ops` of the tree
  LatexNormal(const LatexTree& tree, std::span<const LatexOp> ops) noexcept
      : tree_(tree), ops_(ops) {}
  /// Variables that are free in the part that is read go by what `call` says.
  LatexNormal(const LatexTree& tree, std::span<const LatexOp> ops, const LatexFree& free)
      : tree_(tree), ops_(ops), free_(&free), called_(free.names.size()) {}

  void call(std::size_t variable, std::string_view name) { called_[variable] = Writer::leaf(name); }
  [[nodiscard]] Text text(std::uint32_t node) { return part(node).signed_text(); }
  /// Parts put together so far: of one node the same number each time, whatever its variables are
  /// called.
  [[nodiscard]] std::size_t steps() const noexcept { return steps_; }

 private:
  static constexpr std::string_view binder_mark = "#";

  /// A part's text, and whether it stands negated: signs travel up to the sum that takes them.
  struct Part {
    Text text{};
    bool negative = false;
    // the text is its own negative, as that of a − a, or of a − b while both go by one class: no
    // sign is kept
    bool either = false;

    void negate() noexcept { negative = !negative && !either; }
    [[nodiscard]] Text signed_text() const {
      return negative ? Writer::call("-", {&text, 1}) : text;
    }
  };

  [[nodiscard]] Text symbol(std::uint32_t at) const {
    const std::string& name = tree_[at].name;
    for (std::size_t i = bound_.size(); i-- > 0;) {
      if (*bound_[i] == name)
        return Writer::leaf(std::string(binder_mark) + detail::decimal(bound_.size() - 1 - i));
    }
    return free_ == nullptr || free_->of[at] == LatexFree::none ? Writer::leaf(name)
                                                                : called_[free_->of[at]];
  }
  [[nodiscard]] Text put(std::string_view name, std::span<const Text> parts) {
    steps_ += parts.size() + 1;
    return Writer::call(name, parts);
  }
  [[nodiscard]] Text put_unordered(std::string_view name, std::vector<Text>& parts) {
    steps_ += parts.size() + 1;
    return Writer::call_unordered(name, parts);
  }
  [[nodiscard]] static bool commutes(const std::string& name) {
    return name == "cup" || name == "cap" || name == "and" || name == "or" || name == "oplus";
  }
  /// A relation read from right to left.
  [[nodiscard]] static std::string reversed(const std::string& relation) {
    constexpr std::string_view pairs[][2] = {{"<", ">"},
                                             {"<=", ">="},
                                             {"<<", ">>"},
                                             {"in", "ni"},
                                             {"subset", "supset"},
                                             {"subseteq", "supseteq"},
                                             {"implies", "impliedby"}};
    for (const auto& [a, b] : pairs) {
      if (relation == a) return std::string(b);
      if (relation == b) return std::string(a);
    }
    for (const std::string_view same :
         {"=", "!=", "approx", "equiv", "sim", "cong", "perp", "iff"}) {
      if (relation == same) return relation;
    }
    return relation + "'";
  }
  /// Members with relations between them, in whichever direction reads first.
  [[nodiscard]] Text chained(std::vector<Text> members, std::vector<std::string> relations) {
    const auto joined = [&] {
      std::vector<Text> parts{members[0]};
      for (std::size_t i = 0; i < relations.size(); ++i)
        parts.insert(parts.end(), {Writer::leaf(relations[i]), members[i + 1]});
      return put("rel", parts);
    };
    const Text forth = joined();
    std::reverse(members.begin(), members.end());
    std::reverse(relations.begin(), relations.end());
    for (std::string& r : relations) r = reversed(r);
    return (std::min)(forth, joined());
  }

  /// Comes to every node once: what a kind of node wants of its children is settled before they are
  /// read, as twice a level is 2^depth.
  [[nodiscard]] Part part(std::uint32_t at) {
    const LatexNode& node = tree_[at];
    if (node.kind == Kind::number) return {Writer::leaf(node.name)};
    if (node.kind == Kind::symbol) return {symbol(at)};
    const Op op = ops_[at];
    if (op == Op::plus || op == Op::minus) return sum(at);
    if (op == Op::times || op == Op::inverse) return product(at);
    std::vector<Text> parts;
    if (node.kind == Kind::operation && commutes(node.name)) {
      flatten(at, node.name, parts);
      return {put_unordered(node.name, parts)};
    }
    // |a − b| is |b − a|
    if (node.kind == Kind::operation && (node.name == "abs" || node.name == "norm")) {
      const Text inside = part(node.children[0]).text;
      return {put(node.name, {&inside, 1})};
    }
    const auto list = [&](std::uint32_t n) {
      return tree_[n].kind == Kind::operation && tree_[n].name == "list";
    };
    const bool elements =
        node.kind == Kind::operation && node.name == "set" && list(node.children[0]);
    visit_children(elements ? tree_[node.children[0]] : node, bound_,
                   [&](std::uint32_t child) { parts.push_back(part(child).signed_text()); });
    if (elements) return {put_unordered(node.name, parts)};
    if (node.kind == Kind::chain) return {chained(std::move(parts), node.words)};
    if (node.kind == Kind::binder)
      return {put(node.name + "#" + detail::decimal(node.words.size()), parts)};
    return {put(node.name, parts)};
  }
  void flatten(std::uint32_t at, const std::string& name, std::vector<Text>& parts) {
    const LatexNode& node = tree_[at];
    if (node.kind != Kind::operation || node.name != name)
      return parts.push_back(part(at).signed_text());
    for (const std::uint32_t c : node.children) flatten(c, name, parts);
  }
  [[nodiscard]] Part sum(std::uint32_t at) {
    std::vector<Part> terms;
    add_terms(at, false, terms);
    if (terms.size() == 1) return std::move(terms[0]);
    // once, though what follows may write two: which of them hangs on what variables are called
    steps_ += terms.size() + 1;
    const auto signed_sum = [&] {
      std::vector<Text> texts;
      texts.reserve(terms.size());
      for (const Part& t : terms) texts.push_back(t.signed_text());
      return Writer::call_unordered("+", texts);
    };
    // Of a − b and b − a one is the other's negative: the one with more minus signs, or of equally
    // many the one that reads later.
    std::size_t minus = 0, plus = 0;
    for (const Part& t : terms) {
      if (!t.either) ++(t.negative ? minus : plus);
    }
    if (minus < plus) return {signed_sum()};
    const Text forth = minus == plus ? signed_sum() : Text{};
    for (Part& t : terms) t.negate();
    Text back = signed_sum();
    if (minus == plus && back == forth) return {forth, false, true};
    return minus > plus || back < forth ? Part{std::move(back), true} : Part{forth};
  }
  void add_terms(std::uint32_t at, bool negative, std::vector<Part>& terms) {
    const LatexNode& node = tree_[at];
    if (ops_[at] == Op::plus) {
      for (const std::uint32_t c : node.children) add_terms(c, negative, terms);
    } else if (ops_[at] == Op::minus) {
      add_terms(node.children[0], !negative, terms);
    } else {
      Part term = part(at);
      if (negative) term.negate();
      terms.push_back(std::move(term));
    }
  }
  [[nodiscard]] Part product(std::uint32_t at) {
    std::vector<Text> factors;
    Part out;
    add_factors(at, false, out, factors);
    out.text = factors.size() == 1 ? factors[0] : put_unordered("*", factors);
    out.negative = out.negative && !out.either;
    return out;
  }
  void add_factors(std::uint32_t at, bool inverse, Part& sign, std::vector<Text>& factors) {
    const LatexNode& node = tree_[at];
    if (ops_[at] == Op::times) {
      for (const std::uint32_t c : node.children) add_factors(c, inverse, sign, factors);
    } else if (ops_[at] == Op::inverse) {
      add_factors(node.children[0], !inverse, sign, factors);
    } else if (ops_[at] == Op::minus) {
      sign.negative = !sign.negative;
      add_factors(node.children[0], inverse, sign, factors);
    } else {
      Part factor = part(at);
      sign.negative = sign.negative != factor.negative;
      sign.either = sign.either || factor.either;
      factors.push_back(inverse ? Writer::call("/", {&factor.text, 1}) : std::move(factor.text));
    }
  }

  const LatexTree& tree_;
  std::span<const LatexOp> ops_;  // (nodes)
  const LatexFree* free_ = nullptr;
  std::vector<Text> called_{};               // (free variables)
  std::vector<const std::string*> bound_{};  // innermost last
  std::size_t steps_ = 0;
};

}  // namespace detail
KVMELD_NAMESPACE_END
