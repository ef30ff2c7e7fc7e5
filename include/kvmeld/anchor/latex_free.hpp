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
KVMELD_LAZY [[nodiscard]] bool is_latex_constant(const std::string& name) {
  for (const std::string_view told : {"text:", "double:", "big:", "fn:", "U:"}) {
    if (name.starts_with(told)) return true;
  }
  return std::find(std::begin(latex_constants), std::end(latex_constants), name) !=
         std::end(latex_constants);
}

KVMELD_LAZY void collect_free(const LatexTree& tree, std::uint32_t at,
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
KVMELD_LAZY void find_free(const LatexTree& tree, std::uint32_t root, LatexFree& out) {
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

}  // namespace detail
KVMELD_NAMESPACE_END
