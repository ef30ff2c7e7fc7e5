#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_parser.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Writes a tree so that formulas that mean the same read the same: bound variables by the number of binders between (de Bruijn, 1972),
/// operands of what commutes in order of their text, nested sums and products as one.
template <class = void>
class LatexNormal {
  using Kind = LatexNode::Kind;

  /// A part's text, and whether it stands negated: signs travel up to the sum that takes them.
  struct Part {
    std::string text;
    bool negative = false;
    bool either = false;  // the text is its own negative, as that of a − a, or of a − b while both go by one class: no sign is kept

    void negate() noexcept { negative = !negative && !either; }
    [[nodiscard]] std::string signed_text() const { return negative ? "(- " + text + ')' : text; }
  };

 public:
  explicit LatexNormal(const LatexTree& tree) : tree_(tree) {}

  [[nodiscard]] std::string text(std::uint32_t node) { return part(node).signed_text(); }

  /// The text with free variables called by numbers, the same for every consistent choice of their names; with distinct names for distinct
  /// variables. Each variable is told apart by what stands around it, round after round (colour refinement); of variables that stay
  /// alike one is taken, which is any where they can be exchanged. False: more than `most` variables.
  [[nodiscard]] bool rename_free(std::uint32_t root, std::size_t most) {
    collect_free(root);
    if (free_.size() > most) return false;
    std::vector<std::size_t> rank(free_.size(), 0);  // by name's place in `free_`
    for (bool settled = free_.empty(); !settled;) {
      rank = refined(root, std::move(rank));
      settled = true;
      std::vector<std::size_t> members(free_.size() + 1, 0);
      for (const std::size_t r : rank) ++members[r];
      for (std::size_t r = 0; r < members.size() && settled; ++r) {
        if (members[r] < 2) continue;
        // One of the class goes before the rest; ranks leave room, as a class of n spans n numbers.
        const auto one = std::find(rank.begin(), rank.end(), r);
        for (std::size_t& other : rank) other += other == r ? 1 : 0;
        *one = r;
        settled = false;
      }
    }
    std::size_t i = 0;
    for (auto& [name, called] : free_) called = "$" + std::to_string(rank[i++]);
    return true;
  }

 private:
  static constexpr std::string_view binder_mark = "#";

  [[nodiscard]] static bool constant(const std::string& name) {
    for (const std::string_view told : {"text:", "double:", "big:", "fn:", "U:"}) {
      if (name.starts_with(told)) return true;
    }
    return std::find(std::begin(latex_constants), std::end(latex_constants), name) != std::end(latex_constants);
  }
  [[nodiscard]] std::string symbol(const std::string& name) const {
    for (std::size_t i = bound_.size(); i-- > 0;) {
      if (bound_[i] == name) return std::string(binder_mark) + std::to_string(bound_.size() - 1 - i);
    }
    const auto renamed = free_.find(name);
    return renamed == free_.end() ? name : renamed->second;
  }
  void collect_free(std::uint32_t at) {
    const LatexNode& node = tree_[at];
    if (node.kind == Kind::symbol && !constant(node.name) && std::find(bound_.begin(), bound_.end(), node.name) == bound_.end()) free_[node.name];
    within(node, [&](std::uint32_t child) { collect_free(child); });
  }
  /// Calls for each child, with what the node binds where it does.
  template <class Visit>
  void within(const LatexNode& node, const Visit& visit) {
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      const bool inside = node.kind == Kind::binder && i >= node.scope;
      if (inside) bound_.insert(bound_.end(), node.words.begin(), node.words.end());
      visit(node.children[i]);
      if (inside) bound_.resize(bound_.size() - node.words.size());
    }
  }
  /// Classes of variables told apart by the text around each, where the others go by their class. A class's rank is how many come before it.
  [[nodiscard]] std::vector<std::size_t> refined(std::uint32_t root, std::vector<std::size_t> rank) {
    for (std::size_t classes = 0;;) {
      std::vector<std::pair<std::size_t, std::string>> around(rank.size());
      std::vector<std::size_t> members(rank.size(), 0);
      for (const std::size_t r : rank) ++members[r];
      std::size_t v = 0;
      for (auto& [name, called] : free_) called = "?" + std::to_string(rank[v++]);
      v = 0;
      for (auto& [name, called] : free_) {
        around[v].first = rank[v];
        if (members[rank[v]] > 1) {
          const std::string before = std::exchange(called, "!");
          around[v].second = text(root);
          called = before;
        }
        ++v;
      }
      auto sorted = around;
      std::sort(sorted.begin(), sorted.end());
      for (v = 0; v < rank.size(); ++v) rank[v] = static_cast<std::size_t>(std::lower_bound(sorted.begin(), sorted.end(), around[v]) - sorted.begin());
      sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
      if (sorted.size() == classes || sorted.size() == rank.size()) return rank;
      classes = sorted.size();
    }
  }

  [[nodiscard]] static std::string call(std::string_view name, const std::vector<std::string>& parts) {
    std::string out = "(" + std::string(name);
    for (const std::string& p : parts) out += ' ' + p;
    return out + ')';
  }
  [[nodiscard]] static bool commutes(const std::string& name) {
    return name == "cup" || name == "cap" || name == "and" || name == "or" || name == "oplus";
  }
  /// A relation read from right to left.
  [[nodiscard]] static std::string reversed(const std::string& relation) {
    constexpr std::string_view pairs[][2] = {{"<", ">"},   {"<=", ">="}, {"<<", ">>"}, {"in", "ni"}, {"subset", "supset"}, {"subseteq", "supseteq"},
                                             {"implies", "impliedby"}};
    for (const auto& [a, b] : pairs) {
      if (relation == a) return std::string(b);
      if (relation == b) return std::string(a);
    }
    for (const std::string_view same : {"=", "!=", "approx", "equiv", "sim", "cong", "perp", "iff"}) {
      if (relation == same) return relation;
    }
    return relation + "'";
  }
  /// Members with relations between them, in whichever direction reads first.
  [[nodiscard]] static std::string chained(std::vector<std::string> members, std::vector<std::string> relations) {
    const auto written = [&] {
      std::string out = "(rel " + members[0];
      for (std::size_t i = 0; i < relations.size(); ++i) out += ' ' + relations[i] + ' ' + members[i + 1];
      return out + ')';
    };
    const std::string forth = written();
    std::reverse(members.begin(), members.end());
    std::reverse(relations.begin(), relations.end());
    for (std::string& r : relations) r = reversed(r);
    return (std::min)(forth, written());
  }

  /// Comes to every node once: what a kind of node wants of its children is settled before they are read, as twice a level is 2^depth.
  [[nodiscard]] Part part(std::uint32_t at) {
    const LatexNode& node = tree_[at];
    if (node.kind == Kind::number) return {node.name};
    if (node.kind == Kind::symbol) return {symbol(node.name)};
    if (node.kind == Kind::operation && (node.name == "+" || node.name == "neg")) return sum(at);
    if (node.kind == Kind::operation && (node.name == "*" || node.name == "inv")) return product(at);
    std::vector<std::string> parts;
    if (node.kind == Kind::operation && commutes(node.name)) {
      flatten(at, node.name, parts);
      std::sort(parts.begin(), parts.end());
      return {call(node.name, parts)};
    }
    if (node.kind == Kind::operation && (node.name == "abs" || node.name == "norm")) return {call(node.name, {part(node.children[0]).text})};  // |a − b| is |b − a|
    const auto list = [&](std::uint32_t n) { return tree_[n].kind == Kind::operation && tree_[n].name == "list"; };
    const bool elements = node.kind == Kind::operation && node.name == "set" && list(node.children[0]);
    within(elements ? tree_[node.children[0]] : node, [&](std::uint32_t child) { parts.push_back(part(child).signed_text()); });
    if (elements) std::sort(parts.begin(), parts.end());
    if (node.kind == Kind::chain) return {chained(std::move(parts), node.words)};
    if (node.kind == Kind::binder) return {call(node.name + "#" + std::to_string(node.words.size()), parts)};
    return {call(node.name, parts)};
  }
  void flatten(std::uint32_t at, const std::string& name, std::vector<std::string>& parts) {
    const LatexNode& node = tree_[at];
    if (node.kind != Kind::operation || node.name != name) return parts.push_back(part(at).signed_text());
    for (const std::uint32_t c : node.children) flatten(c, name, parts);
  }
  [[nodiscard]] Part sum(std::uint32_t at) {
    std::vector<Part> terms;
    add_terms(at, false, terms);
    if (terms.size() == 1) return std::move(terms[0]);
    const auto written = [&] {
      std::vector<std::string> texts;
      for (const Part& t : terms) texts.push_back(t.signed_text());
      std::sort(texts.begin(), texts.end());
      return call("+", texts);
    };
    // Of a − b and b − a one is the other's negative: the one with more minus signs, or of equally many the one that reads later.
    std::size_t minus = 0, plus = 0;
    for (const Part& t : terms) {
      if (!t.either) ++(t.negative ? minus : plus);
    }
    const std::string forth = written();
    if (minus < plus) return {forth};
    for (Part& t : terms) t.negate();
    const std::string back = written();
    if (minus == plus && back == forth) return {forth, false, true};
    return minus > plus || back < forth ? Part{back, true} : Part{forth};
  }
  void add_terms(std::uint32_t at, bool negative, std::vector<Part>& terms) {
    const LatexNode& node = tree_[at];
    const bool operation = node.kind == Kind::operation;
    if (operation && node.name == "+") {
      for (const std::uint32_t c : node.children) add_terms(c, negative, terms);
    } else if (operation && node.name == "neg") {
      add_terms(node.children[0], !negative, terms);
    } else {
      Part term = part(at);
      if (negative) term.negate();
      terms.push_back(std::move(term));
    }
  }
  [[nodiscard]] Part product(std::uint32_t at) {
    std::vector<std::string> factors;
    Part out;
    add_factors(at, false, out, factors);
    std::sort(factors.begin(), factors.end());
    out.text = factors.size() == 1 ? factors[0] : call("*", factors);
    out.negative = out.negative && !out.either;
    return out;
  }
  void add_factors(std::uint32_t at, bool inverse, Part& sign, std::vector<std::string>& factors) {
    const LatexNode& node = tree_[at];
    const bool operation = node.kind == Kind::operation;
    if (operation && node.name == "*") {
      for (const std::uint32_t c : node.children) add_factors(c, inverse, sign, factors);
    } else if (operation && node.name == "inv") {
      add_factors(node.children[0], !inverse, sign, factors);
    } else if (operation && node.name == "neg") {
      sign.negative = !sign.negative;
      add_factors(node.children[0], inverse, sign, factors);
    } else {
      Part factor = part(at);
      sign.negative = sign.negative != factor.negative;
      sign.either = sign.either || factor.either;
      factors.push_back(inverse ? "(/ " + factor.text + ')' : std::move(factor.text));
    }
  }

  const LatexTree& tree_;
  std::vector<std::string> bound_;            // innermost last
  std::map<std::string, std::string> free_;   // what a free variable is called; empty: by its own name
};

}  // namespace detail
KVMELD_NAMESPACE_END
