#pragma once

#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/fragment_set.hpp>
#include <kvmeld/state/reconcile_item.hpp>

KVMELD_NAMESPACE_BEGIN

/// A set as `Reconciliation` sees it: every id, and 64 bits of what its entry's digest covers.
/// O(n).
///
/// For sets whose contexts say nothing of each other, as sets of fragments without provenance.
/// Replicas compare contexts, which is cheaper.
KVMELD_LAZY [[nodiscard]] std::vector<ReconcileItem> reconcile_items(const FragmentSet& set) {
  std::vector<ReconcileItem> out;
  out.reserve(set.size());
  for (const FragmentSet::Entry& entry : set.entries()) {
    out.push_back({entry.id, detail::entry_digest(set.hash(), entry.id, entry.metadata).words[0]});
  }
  return out;
}

/// The entries of some ids as a set, to be joined where a reconciliation said that they lack; ids
/// that are not here are left out.
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> part_of(const FragmentSet& set,
                                                      std::span<const FragmentId> ids) {
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentId& id : ids) {
    if (const FragmentSet::Entry* const entry = set.find(id)) entries.push_back(*entry);
  }
  return FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
}

KVMELD_NAMESPACE_END
