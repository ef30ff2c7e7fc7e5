#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <kvmeld/state/fragment_set.hpp>

KVMELD_NAMESPACE_BEGIN

/// The entries that a render reads: those that no other one of the set supersedes, in ascending
/// order of id.
///
/// Each superseded entry points to its smallest successor that is in the set. Following the
/// pointers ends at an entry without one, or in a circle that concurrent operations closed, whose
/// smallest id then stays: no fragment vanishes without one in its place. A pure function of ids
/// and marks, so it is the same on every replica. O(n + superseded · log n).
KVMELD_LAZY [[nodiscard]] std::vector<const FragmentSet::Entry*> in_force(const FragmentSet& set) {
  using Entry = FragmentSet::Entry;
  std::vector<const Entry*> superseded;
  std::vector<const Entry*> successors;
  std::vector<const Entry*> out;
  for (const Entry& entry : set.entries()) {
    const Entry* best = nullptr;
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.superseded_by.empty()) continue;
      const Entry* const found = set.find(mark.superseded_by);
      if (found != nullptr && (best == nullptr || found->id < best->id)) best = found;
    }
    if (best == nullptr) {
      out.push_back(&entry);
    } else {
      superseded.push_back(&entry);
      successors.push_back(best);
    }
  }
  if (superseded.empty()) return out;
  constexpr std::size_t none = ~std::size_t{0};
  const auto next = [&](std::size_t i) {
    const auto at = std::lower_bound(superseded.begin(), superseded.end(), successors[i],
                                     [](const Entry* a, const Entry* b) { return a->id < b->id; });
    return at != superseded.end() && *at == successors[i]
               ? static_cast<std::size_t>(at - superseded.begin())
               : none;
  };
  std::vector<std::size_t> walk(superseded.size(), none);  // by which walk an entry was met first
  for (std::size_t begin = 0; begin < superseded.size(); ++begin) {
    std::size_t at = begin;
    while (at != none && walk[at] == none) {
      walk[at] = begin;
      at = next(at);
    }
    if (at == none || walk[at] != begin) continue;
    std::size_t smallest = at;
    for (std::size_t i = next(at); i != at; i = next(i)) smallest = (std::min)(smallest, i);
    out.push_back(superseded[smallest]);
  }
  std::sort(out.begin(), out.end(), [](const Entry* a, const Entry* b) { return a->id < b->id; });
  return out;
}

KVMELD_NAMESPACE_END
