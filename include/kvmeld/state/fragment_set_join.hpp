#pragma once

/// How sets meet: the bodies of `FragmentSet`'s joins, deltas and compaction.

#include <kvmeld/state/fragment_set.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Marks in force after two replicas met: those that both have, and those of either that the other
/// has not seen. Linear.
KVMELD_LAZY [[nodiscard]] std::vector<Mark> join_marks(const std::vector<Mark>& a,
                                                       const CausalContext& seen_by_a,
                                                       const std::vector<Mark>& b,
                                                       const CausalContext& seen_by_b) {
  std::vector<Mark> out;
  auto i = a.begin();
  auto j = b.begin();
  while (i != a.end() || j != b.end()) {
    if (j == b.end() || (i != a.end() && i->dot < j->dot)) {
      if (!seen_by_b.contains(i->dot)) out.push_back(*i);
      ++i;
    } else if (i == a.end() || j->dot < i->dot) {
      if (!seen_by_a.contains(j->dot)) out.push_back(*j);
      ++j;
    } else {
      out.push_back(kvmeld::join(*i++, *j++));
    }
  }
  return out;
}

KVMELD_LAZY [[nodiscard]] inline bool has_mark(const SetEntry& entry,
                                               const Provenance& dot) noexcept {
  const auto& marks = entry.metadata.marks;
  const auto at =
      std::lower_bound(marks.begin(), marks.end(), dot,
                       [](const Mark& mark, const Provenance& key) { return mark.dot < key; });
  return at != marks.end() && at->dot == dot;
}

}  // namespace detail

/// Gives an entry other marks; without any it leaves, and its payload waits until the removal is
/// stable.
template <class>
void FragmentSet::set_marks(const Entry& entry, std::vector<Mark> marks) {
  if (!marks.empty() || entry.metadata.unattributed) {
    if (marks == entry.metadata.marks) return;
    put({entry.id, entry.fragment, {std::move(marks), entry.metadata.unattributed}});
    return;
  }
  if (entry.fragment.valid()) retire(entry.fragment);
  digest_.subtract(detail::entry_digest(hash_, entry.id, entry.metadata));
  entries_.erase(FragmentId(entry.id));
}

template <class>
void FragmentSet::join_entry(const Entry& theirs, const CausalContext& their_context) {
  Entry mine = entry_of(theirs.id);
  std::vector<Mark> marks =
      detail::join_marks(mine.metadata.marks, context_, theirs.metadata.marks, their_context);
  const bool unattributed = mine.metadata.unattributed || theirs.metadata.unattributed;
  mine.fragment = merged(mine.fragment, theirs.fragment);
  if (marks.empty() && !unattributed) {
    if (const Entry* const entry = find(theirs.id)) set_marks(*entry, {});
    return;
  }
  mine.metadata = {std::move(marks), unattributed};
  put(std::move(mine));
}

template <class>
Status FragmentSet::join(const FragmentSet& other) {
  if (other.hash_.tag != hash_.tag) {
    return detail::error(ErrorCode::hash_mismatch, "sets of hash tags ", hash_.tag, " and ",
                         other.hash_.tag);
  }
  if (&other == this) return {};
  const auto forgotten = [&](const Entry& mine) {
    const auto& marks = mine.metadata.marks;
    return std::any_of(marks.begin(), marks.end(),
                       [&](const Mark& mark) { return other.context_.contains(mark.dot); });
  };
  // Marks of mine that the other has seen removed. Those of its log name their entries; for
  // compacted ones every entry is looked at.
  std::vector<FragmentId> touched;
  if (other.explained() && other.size() * 16 < size()) {
    for (const Entry& theirs : other.entries()) join_entry(theirs, other.context_);
  } else {
    std::vector<const Entry*> changed;
    const bool may_remove = !other.explained();
    detail::EntryLeaves::Walk i(entries_);
    detail::EntryLeaves::Walk j(other.entries_);
    while (!i.done() && !j.done()) {
      const detail::Probe mine = i.probe();
      const detail::Probe theirs = j.probe();
      bool equal = mine.same_prefix(theirs);
      bool first = mine.before(theirs);
      if (equal && mine.tag != theirs.tag) {  // of one id most likely, and it may be two
        equal = i.entry().id == j.entry().id;
        first = i.entry().id < j.entry().id;
      }
      if (equal) {
        if (mine.tag != theirs.tag || (!mine.complete() && j.entry().fragment.valid()))
          changed.push_back(&j.entry());
        i.next();
        j.next();
      } else if (first) {
        if (may_remove && forgotten(i.entry())) touched.push_back(i.entry().id);
        i.next();
      } else {
        changed.push_back(&j.entry());
        j.next();
      }
    }
    for (; !j.done(); j.next()) changed.push_back(&j.entry());
    for (; may_remove && !i.done(); i.next()) {
      if (forgotten(i.entry())) touched.push_back(i.entry().id);
    }
    for (const Entry* theirs : changed) join_entry(*theirs, other.context_);
  }
  std::vector<Provenance> elsewhere;
  for (const Removal& removal : other.removals_) {
    const Entry* const mine = find(removal.id);
    if (mine != nullptr && other.find(removal.id) == nullptr && forgotten(*mine))
      touched.push_back(removal.id);
    if (context_.contains(removal.dot)) continue;
    // What a new removal takes back is in force on its id, or not seen yet. If neither, it was
    // taken back before, or somebody named another's.
    for (const Provenance& dot : removal.removed) {
      if (context_.contains(dot) && (mine == nullptr || !detail::has_mark(*mine, dot)))
        elsewhere.push_back(dot);
    }
  }
  if (!elsewhere.empty()) drop_everywhere(std::move(elsewhere));
  for (const FragmentId& id : touched) {
    const Entry* const entry = find(id);
    if (entry == nullptr) continue;  // several removals may name one id
    set_marks(*entry, detail::join_marks(entry->metadata.marks, context_, {}, other.context_));
  }
  context_.join(other.context_);
  compacted_.join(other.compacted_);
  for (const Removal& removal : other.removals_) log(removal);
  // What a removal took goes where the removal goes, also where the other's word on it was clipped:
  // else these operations would be in no record, and nobody could be told that they ended.
  CausalContext taken;
  for (const Removal& r : removals_) {
    if (!compacted_.contains(r.dot)) continue;
    for (const Provenance& dot : r.removed) taken.add(dot);
  }
  compacted_.join(taken);
  std::erase_if(removals_, [&](const Removal& r) { return compacted_.contains(r.dot); });
  return {};
}

/// Takes dots out of force on whatever id they stand. O(n log dots).
template <class>
void FragmentSet::drop_everywhere(std::vector<Provenance> dots) {
  std::sort(dots.begin(), dots.end());
  const auto dropped = [&](const Mark& mark) {
    return std::binary_search(dots.begin(), dots.end(), mark.dot);
  };
  std::vector<FragmentId> ids;
  for (const Entry& entry : entries()) {
    if (std::any_of(entry.metadata.marks.begin(), entry.metadata.marks.end(), dropped))
      ids.push_back(entry.id);
  }
  for (const FragmentId& id : ids) {
    const Entry& entry = *find(id);
    std::vector<Mark> marks = entry.metadata.marks;
    std::erase_if(marks, dropped);
    set_marks(entry, std::move(marks));
  }
}

template <class>
FragmentSet FragmentSet::delta_since(const CausalContext& seen) const {
  FragmentSet out(hash_);
  std::vector<Provenance> dots;
  for (const Entry& entry : entries()) {
    Metadata part{{}, entry.metadata.unattributed};
    for (const Mark& mark : entry.metadata.marks) {
      if (seen.contains(mark.dot)) continue;
      part.marks.push_back(mark);
      dots.push_back(mark.dot);
    }
    if (!part.marks.empty() || part.unattributed)
      out.put({entry.id, entry.fragment, std::move(part)});
  }
  for (const Removal& removal : removals_) {
    if (seen.contains(removal.dot)) continue;
    out.removals_.push_back(removal);
    dots.push_back(removal.dot);
    dots.insert(dots.end(), removal.removed.begin(), removal.removed.end());
  }
  std::sort(dots.begin(), dots.end());
  for (const Provenance& dot : dots)
    out.context_.append({dot.agent, dot.epoch, dot.sequence, dot.sequence});
  if (!leq(compacted_, seen)) {
    out.compacted_ = compacted_;
    out.context_.join(compacted_);
  }
  return out;
}

template <class>
void FragmentSet::compact(const CausalContext& stable) {
  CausalContext gone;
  for (const Removal& removal : removals_) {
    if (!stable.contains(removal.dot)) continue;
    gone.add(removal.dot);
    for (const Provenance& dot : removal.removed) gone.add(dot);
  }
  std::erase_if(removals_, [&](const Removal& r) { return gone.contains(r.dot); });
  // A payload goes with the last removal that names its fragment: whoever lacks one may hold it in
  // force.
  std::vector<FragmentId> named;
  for (const Removal& removal : removals_) named.push_back(removal.id);
  std::sort(named.begin(), named.end());
  std::erase_if(retired_, [&](const Fragment& fragment) {
    return !std::binary_search(named.begin(), named.end(), fragment.id());
  });
  compacted_.join(gone);
}

template <class>
Status FragmentSet::evict(const FragmentId& id) {
  const Entry* const found = find(id);
  if (found == nullptr)
    return detail::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
  if (!found->fragment.valid()) return {};
  auto body = std::make_shared<Fragment::Body>(*found->fragment.body());
  for (Payload& payload : body->payloads) payload.bytes.reset();
  Entry entry = *found;
  entry.fragment = Fragment(std::move(body));
  put(std::move(entry));
  return {};
}

template <class>
Status FragmentSet::restore(const Fragment& fragment) {
  KVMELD_TRY(check(fragment));
  const Entry* const found = find(fragment.id());
  if (found == nullptr)
    return detail::error(ErrorCode::not_found, "fragment ", fragment.id().hex(),
                         " is not in the set");
  Entry entry = *found;
  entry.fragment = merged(entry.fragment, fragment);
  put(std::move(entry));
  return {};
}

template <class>
Fragment FragmentSet::payload(const FragmentId& id) const {
  if (const Entry* const entry = find(id)) return entry->fragment;
  const auto at =
      std::lower_bound(retired_.begin(), retired_.end(), id,
                       [](const Fragment& r, const FragmentId& key) { return r.id() < key; });
  return at != retired_.end() && at->id() == id ? *at : Fragment();
}

template <class>
Result<FragmentSet> FragmentSet::from_parts(const SetHash& hash, std::vector<Entry> entries,
                                            std::vector<Removal> removals,
                                            const CausalContext& compacted) {
  FragmentSet out(hash);
  std::vector<Provenance> live;
  std::vector<Provenance> removed;
  for (Entry& entry : entries) {
    KVMELD_TRY(out.check(entry.id));
    if (entry.fragment.valid() && entry.fragment.id() != entry.id)
      return detail::error(ErrorCode::corrupt, "entry ", entry.id.hex(), " holds another fragment");
    if (out.find(entry.id) != nullptr)
      return detail::error(ErrorCode::corrupt, "fragment ", entry.id.hex(), " twice");
    if (entry.metadata.marks.empty() && !entry.metadata.unattributed)
      return detail::error(ErrorCode::corrupt, "fragment ", entry.id.hex(), " without a mark");
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.confidence && !std::isfinite(*mark.confidence))
        return detail::error(ErrorCode::non_finite, "confidence of agent ", mark.dot.agent,
                             " is not finite");
      if (!mark.superseded_by.empty()) KVMELD_TRY(out.check(mark.superseded_by));
      if (mark.superseded_by == entry.id)
        return detail::error(ErrorCode::corrupt, "fragment ", entry.id.hex(), " supersedes itself");
      live.push_back(mark.dot);
    }
    std::sort(entry.metadata.marks.begin(), entry.metadata.marks.end(),
              [](const Mark& a, const Mark& b) { return a.dot < b.dot; });
    out.put(std::move(entry));
  }
  for (Removal& removal : removals) {
    live.push_back(removal.dot);
    std::sort(removal.removed.begin(), removal.removed.end());
    removed.insert(removed.end(), removal.removed.begin(), removal.removed.end());
  }
  std::sort(removals.begin(), removals.end(),
            [](const Removal& a, const Removal& b) { return a.dot < b.dot; });
  out.removals_ = std::move(removals);
  std::sort(live.begin(), live.end());
  std::sort(removed.begin(), removed.end());
  for (std::size_t i = 0; i < live.size(); ++i) {
    if (live[i].sequence > max_sequence)
      return detail::error(ErrorCode::invalid_argument, "sequence ", live[i].sequence,
                           " is above 2^48");
    if (i > 0 && live[i] == live[i - 1]) {
      return detail::error(ErrorCode::dot_reused, "agent ", live[i].agent, " used sequence ",
                           live[i].sequence, " of epoch ", live[i].epoch, " twice");
    }
    if (std::binary_search(removed.begin(), removed.end(), live[i]) ||
        compacted.contains(live[i])) {
      return detail::error(ErrorCode::corrupt, "sequence ", live[i].sequence, " of agent ",
                           live[i].agent, " is in force and removed");
    }
    out.context_.append({live[i].agent, live[i].epoch, live[i].sequence, live[i].sequence});
  }
  CausalContext dead;
  for (const Provenance& dot : removed) {
    if (dot.sequence > max_sequence)
      return detail::error(ErrorCode::invalid_argument, "sequence ", dot.sequence,
                           " is above 2^48");
    dead.append({dot.agent, dot.epoch, dot.sequence, dot.sequence});
  }
  out.context_.join(dead);
  out.context_.join(compacted);
  out.compacted_ = compacted;
  return out;
}

KVMELD_NAMESPACE_END
