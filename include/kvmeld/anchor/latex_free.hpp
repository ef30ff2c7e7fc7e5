#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <kvmeld/anchor/latex_parser.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Calls for each child, with what the node binds where it does: innermost last.
template <class Visit>
void visit_children(const LatexNode& node, std::vector<const std::string*>& bound, const Visit& visit) {
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    const bool inside = node.kind == LatexNode::Kind::binder && i >= node.scope;
    for (std::size_t w = 0; inside && w < node.words.size(); ++w) bound.push_back(&node.words[w]);
    visit(node.children[i]);
    if (inside) bound.resize(bound.size() - node.words.size());
  }
}

/// Free variables of a formula by name, and which nodes are which.
struct LatexFree {
  static constexpr std::uint32_t none = static_cast<std::uint32_t>(-1);
  std::vector<std::string> names{};   // ascending
  std::vector<std::uint32_t> of{};    // (nodes of the tree) into names; none where it is no variable, or bound everywhere
};

/// Whether a symbol is no variable, whatever the formula.
KVMELD_LAZY [[nodiscard]] bool is_latex_constant(const std::string& name) {
  for (const std::string_view told : {"text:", "double:", "big:", "fn:", "U:"}) {
    if (name.starts_with(told)) return true;
  }
  return std::find(std::begin(latex_constants), std::end(latex_constants), name) != std::end(latex_constants);
}

KVMELD_LAZY void collect_free(const LatexTree& tree, std::uint32_t at, std::vector<const std::string*>& bound, std::vector<std::string>& names) {
  const LatexNode& node = tree[at];
  const auto is_name = [&](const std::string* b) { return *b == node.name; };
  if (node.kind == LatexNode::Kind::symbol && !is_latex_constant(node.name) && std::none_of(bound.begin(), bound.end(), is_name)) names.push_back(node.name);
  visit_children(node, bound, [&](std::uint32_t child) { collect_free(tree, child, bound, names); });
}

/// The free variables of one part of a formula.
KVMELD_LAZY [[nodiscard]] LatexFree find_free(const LatexTree& tree, std::uint32_t root) {
  LatexFree out;
  std::vector<const std::string*> bound;
  collect_free(tree, root, bound, out.names);
  std::sort(out.names.begin(), out.names.end());
  out.names.erase(std::unique(out.names.begin(), out.names.end()), out.names.end());
  out.of.assign(tree.size(), LatexFree::none);
  for (std::size_t n = 0; n < tree.size(); ++n) {
    const auto at = std::lower_bound(out.names.begin(), out.names.end(), tree[n].name);
    if (tree[n].kind == LatexNode::Kind::symbol && at != out.names.end() && *at == tree[n].name) out.of[n] = static_cast<std::uint32_t>(at - out.names.begin());
  }
  return out;
}

}  // namespace detail
KVMELD_NAMESPACE_END
