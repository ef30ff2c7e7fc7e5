#pragma once

/// Bodies of fragment_set.hpp: operations, joins, and the tree of leaves that hold the entries.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/entry_leaves.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/metadata.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

KVMELD_API bool SetEntry::complete() const noexcept {
  if (!fragment.valid()) return false;
  for (const Payload& payload : fragment.payloads()) {
    if (payload.bytes == nullptr) return false;
  }
  return true;
}

namespace detail {

KVMELD_API Probe probe_of(const FragmentId& id, std::uint64_t tag) noexcept {
  Probe out{0, 0, tag};
  for (std::size_t i = 0; i < 8; ++i) {
    out.high = out.high << 8U | id.bytes[i];
    out.low = out.low << 8U | id.bytes[8 + i];
  }
  return out;
}

KVMELD_API void EntryLeaves::put(SetEntry entry, std::uint64_t tag) {
  const Probe probe = probe_of(entry.id, (tag & ~std::uint64_t{1}) | (entry.complete() ? 1U : 0U));
  auto shared = std::make_shared<const SetEntry>(std::move(entry));
  if (leaves_.empty()) {
    leaves_.emplace_back();  // not empty for long
    firsts_.push_back(probe);
  }
  const std::size_t l = size_ == 0 ? 0 : leaf_of(shared->id);
  Leaf& leaf = leaves_[l].own();
  const std::size_t i = leaf.lower_bound(shared->id);
  if (i < leaf.entries.size() && leaf.entries[i]->id == shared->id) {
    leaf.probes[i] = probe;
    leaf.entries[i] = std::move(shared);
    return;
  }
  const auto at = static_cast<std::ptrdiff_t>(i);
  leaf.probes.insert(leaf.probes.begin() + at, probe);
  leaf.entries.insert(leaf.entries.begin() + at, std::move(shared));
  ++size_;
  firsts_[l] = leaf.probes.front();
  if (leaf.entries.size() > leaf_size)
    split(l, i + 1 == leaf.entries.size() && l + 1 == leaves_.size());
}

KVMELD_API void EntryLeaves::erase(const FragmentId& id) {
  const std::size_t l = leaf_of(id);
  Leaf& leaf = leaves_[l].own();
  const auto at = static_cast<std::ptrdiff_t>(leaf.lower_bound(id));
  leaf.probes.erase(leaf.probes.begin() + at);
  leaf.entries.erase(leaf.entries.begin() + at);
  --size_;
  if (!leaf.entries.empty()) {
    firsts_[l] = leaf.probes.front();
    return;
  }
  leaves_.erase(leaves_.begin() + static_cast<std::ptrdiff_t>(l));
  firsts_.erase(firsts_.begin() + static_cast<std::ptrdiff_t>(l));
}

KVMELD_API void EntryLeaves::split(std::size_t l, bool ascending) {
  CowPtr<Leaf> right;
  Leaf& left = leaves_[l].own();
  Leaf& to = right.own();
  const auto cut =
      static_cast<std::ptrdiff_t>(ascending ? left.entries.size() - 1 : left.entries.size() / 2);
  const auto move_tail = [&](auto& from, auto& into) {
    into.reserve(leaf_size + 1);
    into.assign(std::make_move_iterator(from.begin() + cut), std::make_move_iterator(from.end()));
    from.resize(static_cast<std::size_t>(cut));
  };
  move_tail(left.probes, to.probes);
  move_tail(left.entries, to.entries);
  firsts_.insert(firsts_.begin() + static_cast<std::ptrdiff_t>(l) + 1, to.probes.front());
  leaves_.insert(leaves_.begin() + static_cast<std::ptrdiff_t>(l) + 1, std::move(right));
}

}  // namespace detail

KVMELD_API void Digest256::add(const Digest256& other) noexcept {
  std::uint64_t carry = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t with_carry = words[i] + carry;
    carry = with_carry < carry ? 1U : 0U;
    words[i] = with_carry + other.words[i];
    carry += words[i] < with_carry ? 1U : 0U;
  }
}

KVMELD_API void Digest256::subtract(const Digest256& other) noexcept {
  std::uint64_t borrow = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint64_t with_borrow = words[i] - borrow;
    const std::uint64_t next = words[i] < borrow ? 1U : 0U;
    words[i] = with_borrow - other.words[i];
    borrow = next + (with_borrow < other.words[i] ? 1U : 0U);
  }
}

namespace detail {

[[nodiscard]] inline Digest256 xxh3_digest256(std::span<const std::byte> bytes) {
  Digest256 out;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const XXH128_hash_t half = XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed);
    out.words[2 * seed] = half.low64;
    out.words[2 * seed + 1] = half.high64;
  }
  return out;
}

}  // namespace detail

namespace extend {

KVMELD_API Digest256 entry_digest(const SetHash& hash, const FragmentId& id,
                                  const Metadata& metadata) {
  constexpr std::size_t mark_bytes = 3 * 8 + 1 + 4 + 32;
  std::array<std::byte, 32 + 1 + 4 * mark_bytes> few;
  std::vector<std::byte> many;
  const std::size_t size = 33 + metadata.marks.size() * mark_bytes;
  if (size > few.size()) many.resize(size);
  std::byte* const begin = size > few.size() ? many.data() : few.data();
  std::byte* at = begin;
  const auto put = [&](const void* from, std::size_t count) {
    std::memcpy(at, from, count);
    at += count;
  };
  put(id.bytes.data(), 32);
  for (const Mark& mark : metadata.marks) {
    put(&mark.dot.agent, 8);
    put(&mark.dot.epoch, 8);
    put(&mark.dot.sequence, 8);
    const std::uint8_t given = mark.confidence ? 1 : 0;
    const float confidence = mark.confidence.value_or(0.0F);
    put(&given, 1);
    put(&confidence, 4);
    put(mark.superseded_by.bytes.data(), 32);
  }
  const std::uint8_t unattributed = metadata.unattributed ? 1 : 0;
  put(&unattributed, 1);
  const std::span<const std::byte> bytes = span_of(begin, size);
  return hash.digest != nullptr ? hash.digest(bytes) : detail::xxh3_digest256(bytes);
}

}  // namespace extend

KVMELD_API Status FragmentSet::insert(const Fragment& fragment, const Dot& dot,
                                      std::optional<float> confidence, std::int64_t time_ms) {
  KVMELD_TRY(check(fragment));
  if (confidence) {
    if (!std::isfinite(*confidence))
      return extend::error(ErrorCode::non_finite, "confidence of agent ", dot.agent,
                           " is not finite");
    confidence = *confidence + 0.0F;  // −0 equals +0 and has other bytes
  }
  return mark(fragment.id(), fragment, {dot, confidence, {}, time_ms});
}

KVMELD_API Status FragmentSet::insert(const Fragment& fragment) {
  KVMELD_TRY(check(fragment));
  Entry entry = entry_of(fragment.id());
  entry.fragment = merged(entry.fragment, fragment);
  entry.metadata.unattributed = true;
  put(std::move(entry));
  return {};
}

KVMELD_API Status FragmentSet::check_geometry(const Fragment& fragment) const {
  int looked_at = 0;
  for (const Entry& entry : entries_) {
    if (++looked_at > 64) break;
    if (!entry.fragment.valid()) continue;
    const Geometry& here = entry.fragment.geometry();
    const Geometry& other = fragment.geometry();
    if (&here == &other) return {};
    Status same;
    if (here.tenant != other.tenant) {
      same = detail::differ("tenant", here.tenant, other.tenant);
    } else if (here.model == other.model) {
      same = check_same(here, other);
    }
    if (same) continue;
    return extend::error(same.code(), "fragment ", fragment.id().hex(),
                         " does not go with fragment ", entry.id.hex(),
                         " of this set: ", same.message());
  }
  return {};
}

KVMELD_API Status FragmentSet::supersede(const FragmentId& id, const FragmentId& successor,
                                         const Dot& dot) {
  if (id == successor || successor.empty())
    return extend::error(ErrorCode::invalid_argument, "fragment ", id.hex(),
                         " cannot supersede itself, nor none");
  KVMELD_TRY(check(successor));
  if (find(id) == nullptr)
    return extend::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
  return mark(id, {}, {dot, {}, successor, 0});
}

KVMELD_API Status FragmentSet::remove(const FragmentId& id, const Dot& dot) {
  const Entry* const entry = find(id);
  if (entry == nullptr)
    return extend::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
  if (entry->metadata.unattributed)
    return extend::error(ErrorCode::unsupported, "fragment ", id.hex(),
                         " was inserted without provenance");
  KVMELD_TRY(check(dot));
  Removal removal{dot, id, {}};
  for (const Mark& mark : entry->metadata.marks) removal.removed.push_back(mark.dot);
  context_.add(dot);
  set_marks(*entry, {});
  log(std::move(removal));
  return {};
}

KVMELD_API Status FragmentSet::check(const Fragment& fragment) const {
  if (!fragment.valid())
    return extend::error(ErrorCode::invalid_argument, "an empty Fragment has no id to insert");
  KVMELD_TRY(check(fragment.id()));
  return check_geometry(fragment);
}

KVMELD_API Status FragmentSet::check(const Dot& dot) const {
  if (dot.sequence > max_sequence)
    return extend::error(ErrorCode::invalid_argument, "sequence ", dot.sequence, " of agent ",
                         dot.agent, " is above 2^48");
  if (!context_.contains(dot)) return {};
  return extend::error(ErrorCode::dot_reused, "agent ", dot.agent, " used sequence ", dot.sequence,
                       " of epoch ", dot.epoch, " already");
}

KVMELD_API void FragmentSet::put(Entry entry) {
  if (const Entry* const before = find(entry.id))
    digest_.subtract(extend::entry_digest(hash_, before->id, before->metadata));
  const Digest256 now = extend::entry_digest(hash_, entry.id, entry.metadata);
  digest_.add(now);
  entries_.put(std::move(entry), now.words[0]);
}

KVMELD_API Status FragmentSet::mark(const FragmentId& id, const Fragment& fragment,
                                    const Mark& mark) {
  Entry entry = entry_of(id);
  auto& marks = entry.metadata.marks;
  const auto at = std::lower_bound(marks.begin(), marks.end(), mark.dot,
                                   [](const Mark& m, const Dot& dot) { return m.dot < dot; });
  if (at == marks.end() || at->dot != mark.dot) {
    KVMELD_TRY(check(mark.dot));
    marks.insert(at, mark);
  } else if (*at != mark) {
    return check(mark.dot);
  }
  entry.fragment = merged(entry.fragment, fragment);
  context_.add(mark.dot);
  put(std::move(entry));
  return {};
}

KVMELD_API void FragmentSet::retire(const Fragment& fragment) {
  const auto at =
      std::lower_bound(retired_.begin(), retired_.end(), fragment.id(),
                       [](const Fragment& r, const FragmentId& id) { return r.id() < id; });
  if (at != retired_.end() && at->id() == fragment.id()) {
    *at = with_all_bytes(*at, fragment);
  } else {
    retired_.insert(at, fragment);
  }
}

namespace detail {

/// Which entries stand for which: every entry leads, by way of its smallest successor, to one that
/// is read in its place.
class Successions {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  Successions(const FragmentSet& set, Presence presence) {
    for (const SetEntry& entry : set.entries()) entries_.push_back(&entry);
    counts_.assign(entries_.size(), 1);
    do lead(set);
    while (presence == Presence::complete && drop_ends());
  }

  [[nodiscard]] const std::vector<const SetEntry*>& entries() const noexcept { return entries_; }
  /// The entry that is read in the place of each, itself mostly; none: it does not count.
  [[nodiscard]] const std::vector<std::size_t>& readers() const noexcept { return readers_; }

  /// The smallest dot under which an entry was inserted; zeros: without provenance. None where
  /// nothing but its supersession was heard of.
  [[nodiscard]] static std::optional<Dot> inserted(const SetEntry& entry) {
    if (entry.metadata.unattributed) return Dot{};
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.superseded_by.empty()) return mark.dot;
    }
    return std::nullopt;
  }

 private:
  void lead(const FragmentSet& set) {
    std::vector<std::size_t> next(entries_.size(), none);
    for (std::size_t i = 0; i < next.size(); ++i) {
      if (counts_[i] != 0) next[i] = successor(set, *entries_[i]);
    }
    open_circles(next);
    readers_.assign(next.size(), none);
    std::vector<std::size_t> chain;
    for (std::size_t i = 0; i < next.size(); ++i) {
      if (counts_[i] == 0) continue;
      std::size_t at = i;
      for (chain.clear(); readers_[at] == none && next[at] != none; at = next[at])
        chain.push_back(at);
      const std::size_t reader = readers_[at] == none ? at : readers_[at];
      readers_[at] = reader;
      for (const std::size_t met : chain) readers_[met] = reader;
    }
  }
  /// Ends that are not whole do not count. False where there is none.
  [[nodiscard]] bool drop_ends() {
    bool dropped = false;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      if (readers_[i] != i || entries_[i]->complete()) continue;
      counts_[i] = 0;
      dropped = true;
    }
    return dropped;
  }
  [[nodiscard]] std::size_t successor(const FragmentSet& set, const SetEntry& entry) const {
    std::size_t best = none;
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.superseded_by.empty() || set.find(mark.superseded_by) == nullptr) continue;
      const auto at =
          std::lower_bound(entries_.begin(), entries_.end(), mark.superseded_by,
                           [](const SetEntry* e, const FragmentId& id) { return e->id < id; });
      const auto found = static_cast<std::size_t>(at - entries_.begin());
      if (counts_[found] != 0) best = (std::min)(best, found);
    }
    return best;
  }
  /// The smallest id of a circle is superseded by nothing.
  static void open_circles(std::vector<std::size_t>& next) {
    std::vector<std::size_t> walk(next.size(), none);  // the walk that reached an entry first
    for (std::size_t begin = 0; begin < next.size(); ++begin) {
      std::size_t at = begin;
      while (at != none && walk[at] == none) {
        walk[at] = begin;
        at = next[at];
      }
      if (at == none || walk[at] != begin) continue;
      std::size_t smallest = at;
      for (std::size_t i = next[at]; i != at; i = next[i]) smallest = (std::min)(smallest, i);
      next[smallest] = none;
    }
  }

  std::vector<const SetEntry*> entries_;  // ascending by id
  std::vector<std::uint8_t> counts_;
  std::vector<std::size_t> readers_;
};

}  // namespace detail

KVMELD_API std::vector<InForce> in_force(const FragmentSet& set, Presence presence) {
  const detail::Successions successions(set, presence);
  const auto& entries = successions.entries();
  const std::vector<std::size_t>& readers = successions.readers();
  std::vector<std::optional<Dot>> places(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (readers[i] == detail::Successions::none) continue;
    const std::optional<Dot> dot = detail::Successions::inserted(*entries[i]);
    std::optional<Dot>& place = places[readers[i]];
    if (dot && (!place || *dot < *place)) place = dot;
  }
  std::vector<InForce> out;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (readers[i] != i) continue;
    const std::vector<Mark>& marks = entries[i]->metadata.marks;
    out.push_back({entries[i], places[i].value_or(marks.empty() ? Dot{} : marks.front().dot)});
  }
  return out;
}

namespace detail {

/// The whole entries for which `wanted` holds, and by id and marks what leads to them.
template <class Wanted>
[[nodiscard]] Result<FragmentSet> renderable_of(const FragmentSet& set, const Wanted& wanted) {
  const Successions successions(set, Presence::complete);
  const std::vector<std::size_t>& readers = successions.readers();
  std::vector<FragmentSet::Entry> entries;
  for (std::size_t i = 0; i < readers.size(); ++i) {
    if (readers[i] == Successions::none || !wanted(*successions.entries()[readers[i]])) continue;
    const SetEntry& entry = *successions.entries()[i];
    entries.push_back({entry.id, readers[i] == i ? entry.fragment : Fragment(), entry.metadata});
  }
  return FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
}

}  // namespace detail

KVMELD_API Result<FragmentSet> renderable(const FragmentSet& set) {
  return detail::renderable_of(set, [](const SetEntry&) { return true; });
}

KVMELD_API Result<FragmentSet> refresh::set_behind(const FragmentSet& set, const FragmentId& own,
                                                   std::span<const FragmentId> only) {
  bool found = false;
  auto behind = detail::renderable_of(set, [&](const SetEntry& entry) {
    found = found || entry.id == own;
    return entry.id != own && (only.empty() || entry.fragment.role() == Role::prefix ||
                               std::find(only.begin(), only.end(), entry.id) != only.end());
  });
  if (found) return behind;
  return extend::error(ErrorCode::not_found, "fragment ", own.hex(),
                       " is not read by a render of this set, or its bytes are not here");
}

namespace detail {

/// The marks in force after a join: those that both have, and those of either that the other has
/// not seen. O(marks).
[[nodiscard]] inline std::vector<Mark> join_marks(const std::vector<Mark>& a,
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

[[nodiscard]] inline bool has_mark(const SetEntry& entry, const Dot& dot) noexcept {
  const auto& marks = entry.metadata.marks;
  const auto at = std::lower_bound(marks.begin(), marks.end(), dot,
                                   [](const Mark& mark, const Dot& key) { return mark.dot < key; });
  return at != marks.end() && at->dot == dot;
}

}  // namespace detail

KVMELD_API void FragmentSet::set_marks(const Entry& entry, std::vector<Mark> marks) {
  if (!marks.empty() || entry.metadata.unattributed) {
    if (marks == entry.metadata.marks) return;
    put({entry.id, entry.fragment, {std::move(marks), entry.metadata.unattributed}});
    return;
  }
  if (entry.fragment.valid()) retire(entry.fragment);
  digest_.subtract(extend::entry_digest(hash_, entry.id, entry.metadata));
  entries_.erase(FragmentId(entry.id));
}

KVMELD_API void FragmentSet::join_entry(const Entry& theirs, const CausalContext& their_context) {
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

KVMELD_API bool FragmentSet::forgets(const Entry& mine) const {
  const auto& marks = mine.metadata.marks;
  return std::any_of(marks.begin(), marks.end(),
                     [&](const Mark& mark) { return context_.contains(mark.dot); });
}

KVMELD_API std::vector<FragmentId> FragmentSet::join_entries(const FragmentSet& other) {
  std::vector<FragmentId> touched;
  const bool may_remove = !other.explained();
  if (!may_remove && other.size() * 16 < size()) {
    for (const Entry& theirs : other.entries()) join_entry(theirs, other.context_);
    return touched;
  }
  std::vector<const Entry*> changed;
  detail::EntryLeaves::Walk i(entries_);
  detail::EntryLeaves::Walk j(other.entries_);
  while (!i.done() && !j.done()) {
    const detail::Probe mine = i.probe();
    const detail::Probe theirs = j.probe();
    bool equal = mine.same_prefix(theirs);
    bool first = mine.before(theirs);
    if (equal && mine.tag != theirs.tag) {  // most likely one id, but the prefix may be shared
      equal = i.entry().id == j.entry().id;
      first = i.entry().id < j.entry().id;
    }
    if (equal) {
      if (mine.tag != theirs.tag || (!mine.complete() && j.entry().fragment.valid()))
        changed.push_back(&j.entry());
      i.next();
      j.next();
    } else if (first) {
      if (may_remove && other.forgets(i.entry())) touched.push_back(i.entry().id);
      i.next();
    } else {
      changed.push_back(&j.entry());
      j.next();
    }
  }
  for (; !j.done(); j.next()) changed.push_back(&j.entry());
  for (; may_remove && !i.done(); i.next()) {
    if (other.forgets(i.entry())) touched.push_back(i.entry().id);
  }
  for (const Entry* theirs : changed) join_entry(*theirs, other.context_);
  return touched;
}

KVMELD_API void FragmentSet::join_removals(const FragmentSet& other,
                                           std::vector<FragmentId>& touched) {
  std::vector<Dot> elsewhere;
  for (const Removal& removal : other.removals_) {
    const Entry* const mine = find(removal.id);
    if (mine != nullptr && other.find(removal.id) == nullptr && other.forgets(*mine))
      touched.push_back(removal.id);
    if (context_.contains(removal.dot)) continue;
    // An operation that a new removal names is normally in force on its id, or not seen yet.
    // Otherwise it was removed before, or the removal names an operation on another id.
    for (const Dot& dot : removal.removed) {
      if (context_.contains(dot) && (mine == nullptr || !detail::has_mark(*mine, dot)))
        elsewhere.push_back(dot);
    }
  }
  if (!elsewhere.empty()) drop_everywhere(std::move(elsewhere));
}

KVMELD_API void FragmentSet::forget_compacted() {
  // Where a removal is compacted, the operations that it removed are compacted too, also those
  // missing in the other's record: otherwise they would be in no record, and no replica could learn
  // that they were removed.
  CausalContext taken;
  for (const Removal& r : removals_) {
    if (!compacted_.contains(r.dot)) continue;
    for (const Dot& dot : r.removed) taken.add(dot);
  }
  compacted_.join(taken);
  std::erase_if(removals_, [&](const Removal& r) { return compacted_.contains(r.dot); });
}

KVMELD_API Status FragmentSet::join(const FragmentSet& other) {
  if (other.hash_.tag != hash_.tag) {
    return extend::error(ErrorCode::hash_mismatch, "sets of hash tags ", hash_.tag, " and ",
                         other.hash_.tag);
  }
  if (&other == this) return {};
  std::vector<FragmentId> touched = join_entries(other);
  join_removals(other, touched);
  for (const FragmentId& id : touched) {
    const Entry* const entry = find(id);
    if (entry == nullptr) continue;  // several removals may name one id
    set_marks(*entry, detail::join_marks(entry->metadata.marks, context_, {}, other.context_));
  }
  context_.join(other.context_);
  compacted_.join(other.compacted_);
  for (const Removal& removal : other.removals_) log(removal);
  forget_compacted();
  return {};
}

KVMELD_API void FragmentSet::drop_everywhere(std::vector<Dot> dots) {
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

KVMELD_API FragmentSet FragmentSet::delta_since(const CausalContext& seen) const {
  FragmentSet out(hash_);
  std::vector<Dot> dots;
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
  for (const Dot& dot : dots)
    out.context_.append({dot.agent, dot.epoch, dot.sequence, dot.sequence});
  if (!leq(compacted_, seen)) {
    out.compacted_ = compacted_;
    out.context_.join(compacted_);
  }
  return out;
}

KVMELD_API void FragmentSet::compact(const CausalContext& stable) {
  CausalContext gone;
  for (const Removal& removal : removals_) {
    if (!stable.contains(removal.dot)) continue;
    gone.add(removal.dot);
    for (const Dot& dot : removal.removed) gone.add(dot);
  }
  std::erase_if(removals_, [&](const Removal& r) { return gone.contains(r.dot); });
  // A payload is dropped with the last removal that names its fragment: a replica that lacks one of
  // them may still hold the fragment in force.
  std::vector<FragmentId> named;
  for (const Removal& removal : removals_) named.push_back(removal.id);
  std::sort(named.begin(), named.end());
  std::erase_if(retired_, [&](const Fragment& fragment) {
    return !std::binary_search(named.begin(), named.end(), fragment.id());
  });
  compacted_.join(gone);
}

KVMELD_API Status FragmentSet::evict(const FragmentId& id) {
  const Entry* const found = find(id);
  if (found == nullptr)
    return extend::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
  if (!found->fragment.valid()) return {};
  auto body = std::make_shared<Fragment::Body>(*found->fragment.body());
  for (Payload& payload : body->payloads) payload.bytes.reset();
  Entry entry = *found;
  entry.fragment = Fragment(std::move(body));
  put(std::move(entry));
  return {};
}

KVMELD_API Status FragmentSet::restore(const Fragment& fragment) {
  KVMELD_TRY(check(fragment));
  const Entry* const found = find(fragment.id());
  if (found == nullptr)
    return extend::error(ErrorCode::not_found, "fragment ", fragment.id().hex(),
                         " is not in the set");
  Entry entry = *found;
  entry.fragment = merged(entry.fragment, fragment);
  put(std::move(entry));
  return {};
}

KVMELD_API Fragment FragmentSet::payload(const FragmentId& id) const {
  if (const Entry* const entry = find(id)) return entry->fragment;
  const auto at =
      std::lower_bound(retired_.begin(), retired_.end(), id,
                       [](const Fragment& r, const FragmentId& key) { return r.id() < key; });
  return at != retired_.end() && at->id() == id ? *at : Fragment();
}

KVMELD_API Result<FragmentSet> FragmentSet::from_parts(const SetHash& hash,
                                                       std::vector<Entry> entries,
                                                       std::vector<Removal> removals,
                                                       const CausalContext& compacted) {
  FragmentSet out(hash);
  std::vector<Dot> live;
  std::vector<Dot> removed;
  for (Entry& entry : entries) {
    KVMELD_TRY(out.check(entry.id));
    if (entry.fragment.valid() && entry.fragment.id() != entry.id)
      return extend::error(ErrorCode::corrupt, "entry ", entry.id.hex(), " holds another fragment");
    if (out.find(entry.id) != nullptr)
      return extend::error(ErrorCode::corrupt, "fragment ", entry.id.hex(), " twice");
    if (entry.metadata.marks.empty() && !entry.metadata.unattributed)
      return extend::error(ErrorCode::corrupt, "fragment ", entry.id.hex(), " without a mark");
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.confidence && !std::isfinite(*mark.confidence))
        return extend::error(ErrorCode::non_finite, "confidence of agent ", mark.dot.agent,
                             " is not finite");
      if (!mark.superseded_by.empty()) KVMELD_TRY(out.check(mark.superseded_by));
      if (mark.superseded_by == entry.id)
        return extend::error(ErrorCode::corrupt, "fragment ", entry.id.hex(), " supersedes itself");
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
      return extend::error(ErrorCode::invalid_argument, "sequence ", live[i].sequence,
                           " is above 2^48");
    if (i > 0 && live[i] == live[i - 1]) {
      return extend::error(ErrorCode::dot_reused, "agent ", live[i].agent, " used sequence ",
                           live[i].sequence, " of epoch ", live[i].epoch, " twice");
    }
    if (std::binary_search(removed.begin(), removed.end(), live[i]) ||
        compacted.contains(live[i])) {
      return extend::error(ErrorCode::corrupt, "sequence ", live[i].sequence, " of agent ",
                           live[i].agent, " is in force and removed");
    }
    out.context_.append({live[i].agent, live[i].epoch, live[i].sequence, live[i].sequence});
  }
  CausalContext dead;
  for (const Dot& dot : removed) {
    if (dot.sequence > max_sequence)
      return extend::error(ErrorCode::invalid_argument, "sequence ", dot.sequence,
                           " is above 2^48");
    dead.append({dot.agent, dot.epoch, dot.sequence, dot.sequence});
  }
  out.context_.join(dead);
  out.context_.join(compacted);
  out.compacted_ = compacted;
  return out;
}

KVMELD_NAMESPACE_END
