#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// The formulas in a text: what stands between $ and $, $$ and $$, \( and \), \[ and \]. A
/// delimiter that is never closed begins none. O(n).
KVMELD_LAZY [[nodiscard]] std::vector<std::string_view> formulas_in(std::string_view text) {
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
  KVMELD_LAZY std::size_t remember(const FragmentId& segment, std::string_view text) {
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
  KVMELD_LAZY void forget(const FragmentId& segment) {
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
  KVMELD_LAZY [[nodiscard]] std::vector<FormulaHit> recall(std::string_view text) const {
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
  KVMELD_LAZY [[nodiscard]] std::vector<Claim> claims_of(std::string_view text,
                                                         std::size_t& read) const {
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

KVMELD_NAMESPACE_END
