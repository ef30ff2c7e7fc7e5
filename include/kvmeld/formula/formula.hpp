#pragma once

/// Formulas in LaTeX as equal up to notation, and an index of them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/formula/detail/normal.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace formula {

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

[[nodiscard]] inline Digest128 formula_hash(std::string_view normal) {
  Hasher hasher;
  hasher.text("kvmeld.formula.2");
  hasher.text(normal);
  return hasher.digest();
}

/// What a formula claims one by one: the members of a list, and of each chain of two relations or
/// more every one, as a part of its own.
[[nodiscard]] inline std::vector<std::uint32_t> formula_steps(LatexTree& tree, std::uint32_t root) {
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
[[nodiscard]] inline Result<Formula> parse_formula(std::string_view text,
                                                   const FormulaOptions& options = {}) {
  if (text.size() > options.max_bytes)
    return extend::error(ErrorCode::oversized, "a formula of ", text.size(), " bytes; at most ",
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
      form.call(v, "$" + extend::decimal((*numbers)[v]));
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

/// The formulas in a text: what stands between $ and $, $$ and $$, \( and \), \[ and \]. A
/// delimiter that is never closed begins none. O(n).
[[nodiscard]] inline std::vector<std::string_view> formulas_in(std::string_view text) {
  std::vector<std::string_view> out;
  std::size_t at = 0;
  bool missing[4] = {};
  while (at < text.size()) {
    constexpr std::string_view marks[][2] = {
        {"$$", "$$"}, {"\\[", "\\]"}, {"\\(", "\\)"}, {"$", "$"}};
    std::size_t step = text[at] == '\\' ? 2 : 1;  // over \$ and \\ too
    for (std::size_t m = 0; m < 4; ++m) {
      const auto& [opens, closes] = marks[m];
      if (missing[m] || text.substr(at, opens.size()) != opens) continue;
      const std::size_t from = at + opens.size();
      std::size_t end = text.find(closes, from);
      while (end != std::string_view::npos && closes[0] == '$' && text[end - 1] == '\\')
        end = text.find(closes, end + 1);
      missing[m] = end == std::string_view::npos;
      if (missing[m]) continue;
      if (end > from) out.push_back(text.substr(from, end - from));
      step = end + closes.size() - at;
      break;
    }
    at += step;
  }
  return out;
}

/// A segment that shares formulas with what was asked.
struct FormulaHit {
  FragmentId segment{};
  std::uint32_t formulas = 0;  ///< of the query that the segment holds whole
  /// Claims that one of them makes within a chain or a list: a step of a proof, a lemma in passing.
  std::uint32_t steps = 0;
};

/// Which segments hold which formulas, and the steps of which derivations: lemmas found again under
/// other names of their variables.
///
/// A hint for retrieval alone. It names segments worth a look; whether an anchor is reused is
/// decided by `AnchorPool::look_up`, which knows neither formulas nor this index, and a segment
/// that left the pool may still be named here until `forget`. Bounded: the oldest segments go
/// first. A plain value; threads need a lock of their own.
class FormulaIndex {
 public:
  explicit FormulaIndex(FormulaOptions options = {}, std::size_t max_segments = 10'000,
                        std::size_t max_formulas = 256)
      : options_(options), max_segments_(max_segments), max_formulas_(max_formulas) {}

  /// Notes the formulas of a segment's text, the first `max_formulas` claims at most, and says how
  /// many formulas could be read. What is no formula of the subset, or a letter or number alone, is
  /// left out. A segment noted before is noted anew. O(bytes).
  std::size_t remember(const FragmentId& segment, std::string_view text) {
    forget(segment);
    if (max_segments_ == 0) return 0;
    std::size_t read = 0;
    std::vector<Claim> claims = claims_of(text, read);
    if (claims.empty()) return 0;
    while (segments_.size() >= max_segments_) forget(order_.front());
    for (const Claim& claim : claims) holders_[claim.hash].push_back({segment, claim.whole});
    segments_[segment] = std::move(claims);
    order_.push_back(segment);
    return read;
  }
  /// Drops what is known of a segment, as where its anchor was evicted. O(segments).
  void forget(const FragmentId& segment) {
    const auto found = segments_.find(segment);
    if (found == segments_.end()) return;
    for (const Claim& claim : found->second) {
      const auto at = holders_.find(claim.hash);
      if (at == holders_.end()) continue;
      std::erase_if(at->second, [&](const Holder& h) { return h.segment == segment; });
      if (at->second.empty()) holders_.erase(at);
    }
    segments_.erase(found);
    order_.erase(std::find(order_.begin(), order_.end(), segment));
  }
  /// Segments that hold formulas of this text, those with most of them first, then with most steps,
  /// then by id.
  [[nodiscard]] std::vector<FormulaHit> recall(std::string_view text) const {
    std::size_t read = 0;
    std::map<FragmentId, FormulaHit> found;
    for (const Claim& claim : claims_of(text, read)) {
      const auto at = holders_.find(claim.hash);
      if (at == holders_.end()) continue;
      for (const Holder& h : at->second) {
        FormulaHit& hit = found.try_emplace(h.segment, FormulaHit{h.segment}).first->second;
        ++(claim.whole && h.whole ? hit.formulas : hit.steps);
      }
    }
    std::vector<FormulaHit> out;
    for (const auto& [id, hit] : found) out.push_back(hit);
    std::stable_sort(out.begin(), out.end(), [](const FormulaHit& a, const FormulaHit& b) {
      return a.formulas != b.formulas ? a.formulas > b.formulas : a.steps > b.steps;
    });
    return out;
  }
  [[nodiscard]] std::size_t segments() const noexcept { return segments_.size(); }
  [[nodiscard]] std::size_t formulas() const noexcept { return holders_.size(); }

 private:
  struct Claim {
    Digest128 hash;
    bool whole = false;  ///< a formula by itself; else a step of one
  };
  struct Holder {
    FragmentId segment;
    bool whole = false;
  };

  /// Distinct, in order of the text; a claim that is both is whole.
  [[nodiscard]] std::vector<Claim> claims_of(std::string_view text, std::size_t& read) const {
    std::vector<Claim> out;
    const auto note = [&](const Digest128& hash, bool whole) {
      const auto at =
          std::find_if(out.begin(), out.end(), [&](const Claim& c) { return c.hash == hash; });
      if (at != out.end())
        at->whole = at->whole || whole;
      else if (out.size() < max_formulas_)
        out.push_back({hash, whole});
    };
    for (const std::string_view written : formulas_in(text)) {
      if (out.size() == max_formulas_) break;
      const auto formula = parse_formula(written, options_);
      if (!formula) continue;
      ++read;
      // a letter or a number by itself is in every text
      if (formula->normal.find('(') == std::string::npos) continue;
      note(formula->hash, true);
      for (const Digest128& step : formula->steps) note(step, false);
    }
    return out;
  }

  FormulaOptions options_;
  std::size_t max_segments_;
  std::size_t max_formulas_;
  std::map<Digest128, std::vector<Holder>> holders_;
  std::map<FragmentId, std::vector<Claim>> segments_;
  std::deque<FragmentId> order_;  // oldest first
};

}  // namespace formula

KVMELD_NAMESPACE_END
