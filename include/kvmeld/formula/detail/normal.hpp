#pragma once

/// The normal form of a formula: bound names renamed, operands ordered.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/formula/detail/parse.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace formula {

namespace detail {

/// Calls for each child, with what the node binds where it does: innermost last.
template <class Visit>
void visit_children(const LatexNode& node, std::vector<const std::string*>& bound,
                    const Visit& visit) {
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    const bool inside = node.kind == LatexNode::Kind::binder && i >= node.scope;
    for (std::size_t w = 0; inside && w < node.words.size(); ++w) bound.push_back(&node.words[w]);
    visit(node.children[i]);
    if (inside) bound.resize(bound.size() - node.words.size());
  }
}

/// Free variables of a part of a formula by name, and which nodes of that part are which.
struct LatexFree {
  static constexpr std::uint32_t none = static_cast<std::uint32_t>(-1);
  std::vector<std::string> names{};  // ascending
  // (nodes of the tree) into names for symbols of the part; none where one is bound, or no variable
  std::vector<std::uint32_t> of{};
};

/// Whether a symbol is no variable, whatever the formula.
[[nodiscard]] inline bool is_latex_constant(const std::string& name) {
  for (const std::string_view told : {"text:", "double:", "big:", "fn:", "U:"}) {
    if (name.starts_with(told)) return true;
  }
  return std::find(std::begin(latex_constants), std::end(latex_constants), name) !=
         std::end(latex_constants);
}

inline void collect_free(const LatexTree& tree, std::uint32_t at,
                         std::vector<const std::string*>& bound, LatexFree& out,
                         std::vector<std::uint32_t>& symbols) {
  const LatexNode& node = tree[at];
  const auto is_name = [&](const std::string* b) { return *b == node.name; };
  if (node.kind == LatexNode::Kind::symbol) {
    out.of[at] = LatexFree::none;
    if (!is_latex_constant(node.name) && std::none_of(bound.begin(), bound.end(), is_name))
      symbols.push_back(at);
  }
  visit_children(node, bound,
                 [&](std::uint32_t child) { collect_free(tree, child, bound, out, symbols); });
}

/// The free variables of one part of a formula. `out` may hold those of another part: what it says
/// of other nodes stays, so that many small parts of a large formula take no longer than they are
/// together.
inline void find_free(const LatexTree& tree, std::uint32_t root, LatexFree& out) {
  std::vector<const std::string*> bound;
  std::vector<std::uint32_t> symbols;
  out.of.resize(tree.size(), LatexFree::none);
  collect_free(tree, root, bound, out, symbols);
  out.names.clear();
  for (const std::uint32_t s : symbols) out.names.push_back(tree[s].name);
  std::sort(out.names.begin(), out.names.end());
  out.names.erase(std::unique(out.names.begin(), out.names.end()), out.names.end());
  for (const std::uint32_t s : symbols) {
    out.of[s] = static_cast<std::uint32_t>(
        std::lower_bound(out.names.begin(), out.names.end(), tree[s].name) - out.names.begin());
  }
}

/// A normal form as text.
struct LatexText {
  using type = std::string;
  [[nodiscard]] static std::string leaf(std::string_view name) { return std::string(name); }
  [[nodiscard]] static std::string call(std::string_view name, std::span<const std::string> parts) {
    std::string out = "(";
    out += name;
    for (const std::string& p : parts) (out += ' ') += p;
    out += ')';
    return out;
  }
  /// Of parts in any order.
  [[nodiscard]] static std::string call_unordered(std::string_view name,
                                                  std::vector<std::string>& parts) {
    std::sort(parts.begin(), parts.end());
    return call(name, parts);
  }
};
/// The same as a hash, which is much sooner compared: equal where the text is.
struct LatexHash {
  using type = Digest128;
  [[nodiscard]] static Digest128 leaf(std::string_view name) {
    const XXH128_hash_t hash = XXH3_128bits(name.data(), name.size());
    return {hash.low64, hash.high64};
  }
  [[nodiscard]] static Digest128 call(std::string_view name, std::span<const Digest128> parts) {
    const XXH128_hash_t hash = XXH3_128bits_withSeed(parts.data(), parts.size_bytes(),
                                                     XXH3_64bits(name.data(), name.size()));
    return {hash.low64, hash.high64};
  }
  [[nodiscard]] static Digest128 call_unordered(std::string_view name,
                                                std::span<const Digest128> parts) {
    Digest128 sums[2] = {{0, parts.size()}, {}};
    for (const Digest128& p : parts) {
      sums[1].low += p.low;
      sums[1].high += p.high;
    }
    return call(name, sums);
  }
};

/// What sums and products are made of.
enum class LatexOp : std::uint8_t { none, plus, minus, times, inverse };

/// (nodes) Found once for a tree: names are read over and over else, and each of many claims of a
/// formula would have all of it looked at.
[[nodiscard]] inline std::vector<LatexOp> latex_ops(const LatexTree& tree) {
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
        return Writer::leaf(std::string(binder_mark) + extend::decimal(bound_.size() - 1 - i));
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
      return {put(node.name + "#" + extend::decimal(node.words.size()), parts)};
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

/// Numbers the free variables of a formula, the same way for every consistent choice of their names
/// where those that stay alike are so by a symmetry of the formula.
///
/// Each variable is told apart by what stands around it, round after round (colour refinement).
/// Variables that stay alike are numbered in any order where the formula is the same with each two
/// of them exchanged; else the first by name is taken to go before the rest, which is as good as
/// any where a symmetry brings each there. Without one (a triangle and a square side by side)
/// numbers and steps hang on the names: two writings may then be missed as one formula, never two
/// formulas be taken for one.
template <class = void>
class LatexRenaming {
 public:
  /// @param taken       steps that other parts of the formula have taken
  /// @param most_steps  parts put together, over and over, to tell variables apart: those taken
  /// among them
  LatexRenaming(const LatexTree& tree, std::span<const LatexOp> ops, std::uint32_t root,
                const LatexFree& free, std::size_t taken, std::size_t most_steps)
      : form_(tree, ops, free),
        root_(root),
        taken_(taken),
        most_steps_(most_steps),
        count_(free.names.size()) {}

  /// (free variables) distinct numbers. Errors: `oversized` for more than `most` variables, or
  /// where the steps do not do, which is so for every choice of names or for none where variables
  /// that stay alike have a symmetry that brings one to the other.
  [[nodiscard]] Result<std::vector<std::size_t>> run(std::size_t most) {
    if (count_ > most)
      return extend::error(ErrorCode::oversized, "a formula of ", count_,
                           " free variables, more than ", most, "; raise max_free");
    std::vector<std::size_t> rank(count_, 0);
    for (bool settled = count_ == 0; !settled;) {
      refine(rank);
      if (spent()) {
        return extend::error(ErrorCode::oversized, "a formula whose ", count_,
                             " free variables are too much alike to be told apart in ", most_steps_,
                             " steps; raise max_renaming_steps");
      }
      const std::vector<std::size_t> members = members_of(rank);
      const auto r = static_cast<std::size_t>(
          std::find_if(members.begin(), members.end(), [](std::size_t n) { return n > 1; }) -
          members.begin());
      settled = r == members.size();
      if (settled) break;
      // Ranks leave room, as a class of n spans n numbers.
      std::size_t next = r;
      if (exchangeable(rank, r)) {
        for (std::size_t& other : rank) other = other == r ? next++ : other;
      } else {
        const auto one = std::find(rank.begin(), rank.end(), r);
        for (std::size_t& other : rank) other += other == r ? 1 : 0;
        *one = r;
      }
    }
    return rank;
  }
  /// Steps taken so far, by other parts too.
  [[nodiscard]] std::size_t steps() const noexcept { return taken_ + form_.steps(); }

 private:
  [[nodiscard]] bool spent() const noexcept { return steps() > most_steps_; }
  [[nodiscard]] static std::vector<std::size_t> members_of(const std::vector<std::size_t>& rank) {
    std::vector<std::size_t> members(rank.size(), 0);
    for (const std::size_t r : rank) ++members[r];
    return members;
  }
  /// Classes of variables told apart by the formula around each, where the others go by their
  /// class. A class's rank is how many come before it.
  void refine(std::vector<std::size_t>& rank) {
    for (;;) {
      const std::vector<std::size_t> members = members_of(rank);
      const auto classes = count_ - static_cast<std::size_t>(
                                        std::count(members.begin(), members.end(), std::size_t{0}));
      for (std::size_t v = 0; v < count_; ++v) form_.call(v, "?" + extend::decimal(rank[v]));
      std::vector<std::pair<std::size_t, Digest128>> around(count_);
      for (std::size_t v = 0; v < count_; ++v) {
        around[v].first = rank[v];
        if (members[rank[v]] < 2) continue;
        form_.call(v, "!");
        around[v].second = form_.text(root_);
        form_.call(v, "?" + extend::decimal(rank[v]));
        if (spent()) return;
      }
      auto sorted = around;
      std::sort(sorted.begin(), sorted.end());
      for (std::size_t v = 0; v < count_; ++v)
        rank[v] = static_cast<std::size_t>(
            std::lower_bound(sorted.begin(), sorted.end(), around[v]) - sorted.begin());
      sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
      if (sorted.size() == classes || sorted.size() == count_) return;
    }
  }
  /// Whether each two variables of a class may be exchanged: the first with every other one, which
  /// makes up all orders. All are tried though one fails: which one that is hangs on the names, and
  /// the steps must not.
  [[nodiscard]] bool exchangeable(const std::vector<std::size_t>& rank, std::size_t of) {
    const auto call = [&](std::size_t v, std::size_t name) {
      form_.call(v, "?" + extend::decimal(name));
    };
    for (std::size_t v = 0; v < count_; ++v) call(v, v);
    const Digest128 before = form_.text(root_);
    const auto first =
        static_cast<std::size_t>(std::find(rank.begin(), rank.end(), of) - rank.begin());
    bool all = true;
    for (std::size_t v = first + 1; v < count_ && !spent(); ++v) {
      if (rank[v] != of) continue;
      call(first, v);
      call(v, first);
      all = form_.text(root_) == before && all;
      call(first, first);
      call(v, v);
    }
    return all;
  }

  LatexNormal<LatexHash> form_;
  std::uint32_t root_;
  std::size_t taken_;
  std::size_t most_steps_;
  std::size_t count_;
};

}  // namespace detail

}  // namespace formula

KVMELD_NAMESPACE_END
