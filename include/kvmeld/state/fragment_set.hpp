#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/state/causal_context.hpp>
#include <kvmeld/state/entry_leaves.hpp>
#include <kvmeld/state/set_digest.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// One removal: its own dot, and the operations that it takes out of force.
struct Removal {
  Provenance dot{};
  FragmentId id{};
  std::vector<Provenance> removed{};  ///< ascending

  bool operator==(const Removal&) const = default;
};

/// A set of fragments by id, with metadata that merges: the state that replicas converge on.
///
/// A join-semilattice (an observed-remove map of dots, Almeida, Shoker and Baquero, "Delta state
/// replicated data types", 2018): `join` is commutative, associative and idempotent, and never
/// computes on K/V. Whoever holds the same set renders the same cache. A part of a set is a set, so
/// what is sent between replicas are sets too. A copy shares payloads and entries, O(n / 48).
class FragmentSet {
 public:
  using Entry = SetEntry;

  FragmentSet() = default;
  /// A set of fragments that another hash than XXH3-128 names.
  KVMELD_LAZY explicit FragmentSet(const SetHash& hash) : hash_(hash) {}

  /// The operation "this agent produced these tokens' K/V". A fragment that is there already gains
  /// the mark, and bytes that were evicted. Without provenance the fragment can never be removed.
  /// O(log n).
  ///
  /// Errors: `hash_mismatch` where the fragment's id comes from another content hash; `non_finite`
  /// for a NaN or infinite confidence; `dot_reused` for a dot that this set has seen on another
  /// operation; `geometry_mismatch` as `check_geometry` tells; `invalid_argument`. The set is
  /// unchanged then.
  KVMELD_LAZY Status insert(const Fragment& fragment, const Provenance& dot,
                            std::optional<float> confidence = std::nullopt,
                            std::int64_t time_ms = 0) {
    KVMELD_TRY(check(fragment));
    if (confidence) {
      if (!std::isfinite(*confidence))
        return detail::error(ErrorCode::non_finite, "confidence of agent ", dot.agent,
                             " is not finite");
      confidence = *confidence + 0.0F;  // −0 equals +0 and has other bytes
    }
    return mark(fragment.id(), fragment, {dot, confidence, {}, time_ms});
  }
  KVMELD_LAZY Status insert(const Fragment& fragment) {
    KVMELD_TRY(check(fragment));
    Entry entry = entry_of(fragment.id());
    entry.fragment = merged(entry.fragment, fragment);
    entry.metadata.unattributed = true;
    put(std::move(entry));
    return {};
  }

  /// Whether a fragment can be rendered beside those that are here: of the same tenant, and of one
  /// geometry where the model is the same. Another model's are taken, since a projection may map
  /// them.
  ///
  /// It looks at 64 fragments at most, so that an insertion stays O(log n); `plan` refuses what it
  /// did not see, and `join` takes what others inserted, or replicas would not converge. Errors:
  /// `geometry_mismatch` with what differs.
  KVMELD_LAZY [[nodiscard]] Status check_geometry(const Fragment& fragment) const {
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
      return detail::error(same.code(), "fragment ", fragment.id().hex(),
                           " does not go with fragment ", entry.id.hex(),
                           " of this set: ", same.message());
    }
    return {};
  }

  /// The operation "render `successor` in the place of `id`", in force once the successor is in the
  /// set, and until it is removed.
  ///
  /// Errors: `not_found` for an id that is not in the set, `invalid_argument`, `dot_reused`.
  KVMELD_LAZY Status supersede(const FragmentId& id, const FragmentId& successor,
                               const Provenance& dot) {
    if (id == successor || successor.empty())
      return detail::error(ErrorCode::invalid_argument, "fragment ", id.hex(),
                           " cannot supersede itself, nor none");
    KVMELD_TRY(check(successor));
    if (find(id) == nullptr)
      return detail::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
    return mark(id, {}, {dot, {}, successor, 0});
  }

  /// The operation "what this set knows to be in force on `id` ends". An insertion that this set
  /// has not seen yet survives.
  ///
  /// The payload is kept for replicas that still need it until `compact` is told that everybody
  /// knows of the removal. O(log n). Errors: `not_found`; `unsupported` for a fragment inserted
  /// without provenance; `dot_reused`.
  KVMELD_LAZY Status remove(const FragmentId& id, const Provenance& dot) {
    const Entry* const entry = find(id);
    if (entry == nullptr)
      return detail::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
    if (entry->metadata.unattributed)
      return detail::error(ErrorCode::unsupported, "fragment ", id.hex(),
                           " was inserted without provenance");
    KVMELD_TRY(check(dot));
    Removal removal{dot, id, {}};
    for (const Mark& mark : entry->metadata.marks) removal.removed.push_back(mark.dot);
    context_.add(dot);
    set_marks(*entry, {});
    log(std::move(removal));
    return {};
  }

  /// Adds everything that another set knows: union of ids, and of each id's marks but for those
  /// that either has seen removed.
  ///
  /// O(n + m) comparisons of ids; O(m log n) where the other is a small part. Payloads are shared.
  /// Errors: `hash_mismatch` where the sets' ids come from different content hashes; this set is
  /// unchanged then.
  KVMELD_LAZY Status join(const FragmentSet& other);

  /// What a replica lacks of this set, given what it has seen; to be joined there. O(n).
  ///
  /// Removals that were compacted away while it was absent travel as the ranges of what is gone, so
  /// that it never has to guess.
  KVMELD_LAZY [[nodiscard]] FragmentSet delta_since(const CausalContext& seen) const;

  /// Forgets removals that everybody has seen, and drops payloads that no other removal names.
  ///
  /// `stable` is the meet of all members' contexts. O(removals · log removals).
  KVMELD_LAZY void compact(const CausalContext& stable);

  /// Drops a payload's bytes and keeps the id; `render` says `payload_missing` until `restore`. The
  /// digest does not change.
  KVMELD_LAZY Status evict(const FragmentId& id);
  /// Gives bytes to an entry that lacks them. They must be verified (`verify_fragment`). Errors:
  /// `not_found`.
  KVMELD_LAZY Status restore(const Fragment& fragment);
  /// A fragment's bytes, also of one that was removed and is not stable yet. Not valid() where
  /// neither is here.
  KVMELD_LAZY [[nodiscard]] Fragment payload(const FragmentId& id) const;

  KVMELD_LAZY [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  KVMELD_LAZY [[nodiscard]] bool empty() const noexcept { return entries_.size() == 0; }

  class Entries {
   public:
    explicit Entries(const detail::EntryLeaves& leaves) noexcept : leaves_(&leaves) {}
    [[nodiscard]] auto begin() const noexcept { return leaves_->begin(); }
    [[nodiscard]] auto end() const noexcept { return leaves_->end(); }
    KVMELD_LAZY [[nodiscard]] std::size_t size() const noexcept { return leaves_->size(); }
    KVMELD_LAZY [[nodiscard]] bool empty() const noexcept { return leaves_->size() == 0; }
    KVMELD_LAZY [[nodiscard]] const Entry& front() const noexcept { return *begin(); }

   private:
    const detail::EntryLeaves* leaves_;
  };
  /// Entries in ascending order of id, superseded ones included.
  KVMELD_LAZY [[nodiscard]] Entries entries() const noexcept { return Entries(entries_); }
  /// Null where the set does not know the id. O(log n). Invalid after the next change.
  KVMELD_LAZY [[nodiscard]] const Entry* find(const FragmentId& id) const noexcept {
    return entries_.find(id);
  }
  /// Equal for equal sets, ids and metadata both, whatever is evicted. O(1).
  [[nodiscard]] const Digest256& digest() const noexcept { return digest_; }
  /// Every operation that this set has seen.
  [[nodiscard]] const CausalContext& context() const noexcept { return context_; }
  /// Removals that are not stable yet, ascending by dot.
  KVMELD_LAZY [[nodiscard]] std::span<const Removal> removals() const noexcept {
    return detail::span_of(removals_);
  }
  /// Whether payloads of removed fragments wait for `compact`.
  KVMELD_LAZY [[nodiscard]] bool keeps_removed() const noexcept { return !retired_.empty(); }
  /// Removals and removed operations that were compacted away.
  [[nodiscard]] const CausalContext& compacted() const noexcept { return compacted_; }
  [[nodiscard]] const SetHash& hash() const noexcept { return hash_; }

  /// Puts a set together from what its readers gave (ids and marks; payloads are restored later),
  /// and checks that it can be one.
  ///
  /// Errors: `corrupt` for a dot of two operations, marks or removals out of order, or a mark that
  /// is removed; `hash_mismatch`, `non_finite`, `invalid_argument`.
  KVMELD_LAZY [[nodiscard]] static Result<FragmentSet> from_parts(const SetHash& hash,
                                                                  std::vector<Entry> entries,
                                                                  std::vector<Removal> removals,
                                                                  const CausalContext& compacted);

  /// Whether a is below b: b has seen every operation of a. O(n + m).
  KVMELD_LAZY [[nodiscard]] friend bool leq(const FragmentSet& a, const FragmentSet& b) {
    if (!leq(a.context_, b.context_)) return false;
    FragmentSet both = b;
    return both.join(a) && both.digest_ == b.digest_;
  }
  /// Least upper bound of two sets, as `FragmentSet::join`.
  KVMELD_LAZY [[nodiscard]] friend Result<FragmentSet> join(const FragmentSet& a,
                                                            const FragmentSet& b) {
    FragmentSet out = a;
    KVMELD_TRY(out.join(b));
    return out;
  }
  /// Equal ids with equal metadata.
  KVMELD_LAZY [[nodiscard]] friend bool operator==(const FragmentSet& a, const FragmentSet& b) {
    return a.size() == b.size() &&
           std::equal(a.entries_.begin(), a.entries_.end(), b.entries_.begin(),
                      [](const Entry& x, const Entry& y) {
                        return x.id == y.id && x.metadata == y.metadata;
                      });
  }

 private:
  KVMELD_LAZY [[nodiscard]] Status check(const Fragment& fragment) const {
    if (!fragment.valid())
      return detail::error(ErrorCode::invalid_argument, "an empty Fragment has no id to insert");
    KVMELD_TRY(check(fragment.id()));
    return check_geometry(fragment);
  }
  KVMELD_LAZY [[nodiscard]] Status check(const FragmentId& id) const {
    if (id.tag() == hash_.tag) return {};
    return detail::error(ErrorCode::hash_mismatch, "set of hash tag ", hash_.tag, ", fragment of ",
                         id.tag());
  }
  KVMELD_LAZY [[nodiscard]] Status check(const Provenance& dot) const {
    if (dot.sequence > max_sequence)
      return detail::error(ErrorCode::invalid_argument, "sequence ", dot.sequence, " of agent ",
                           dot.agent, " is above 2^48");
    if (!context_.contains(dot)) return {};
    return detail::error(ErrorCode::dot_reused, "agent ", dot.agent, " used sequence ",
                         dot.sequence, " of epoch ", dot.epoch, " already");
  }
  KVMELD_LAZY [[nodiscard]] static Fragment merged(const Fragment& a, const Fragment& b) {
    return !a.valid() ? b : !b.valid() ? a : with_all_bytes(a, b);
  }
  KVMELD_LAZY [[nodiscard]] Entry entry_of(const FragmentId& id) const {
    const Entry* const found = find(id);
    return found != nullptr ? *found : Entry{id, payload(id), {}};
  }
  KVMELD_LAZY void put(Entry entry) {
    if (const Entry* const before = find(entry.id))
      digest_.subtract(detail::entry_digest(hash_, before->id, before->metadata));
    const Digest256 now = detail::entry_digest(hash_, entry.id, entry.metadata);
    digest_.add(now);
    entries_.put(std::move(entry), now.words[0]);
  }
  KVMELD_LAZY Status mark(const FragmentId& id, const Fragment& fragment, const Mark& mark) {
    Entry entry = entry_of(id);
    auto& marks = entry.metadata.marks;
    const auto at =
        std::lower_bound(marks.begin(), marks.end(), mark.dot,
                         [](const Mark& m, const Provenance& dot) { return m.dot < dot; });
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
  KVMELD_LAZY void set_marks(const Entry& entry, std::vector<Mark> marks);
  KVMELD_LAZY void retire(const Fragment& fragment) {
    const auto at =
        std::lower_bound(retired_.begin(), retired_.end(), fragment.id(),
                         [](const Fragment& r, const FragmentId& id) { return r.id() < id; });
    if (at != retired_.end() && at->id() == fragment.id()) {
      *at = with_all_bytes(*at, fragment);
    } else {
      retired_.insert(at, fragment);
    }
  }
  KVMELD_LAZY void drop_everywhere(std::vector<Provenance> dots);
  KVMELD_LAZY void log(Removal removal) {
    const auto at =
        std::lower_bound(removals_.begin(), removals_.end(), removal.dot,
                         [](const Removal& r, const Provenance& dot) { return r.dot < dot; });
    if (at == removals_.end() || at->dot != removal.dot) removals_.insert(at, std::move(removal));
  }
  KVMELD_LAZY void join_entry(const Entry& theirs, const CausalContext& their_context);
  KVMELD_LAZY [[nodiscard]] bool explained() const noexcept { return compacted_.empty(); }

  SetHash hash_;
  detail::EntryLeaves entries_;
  Digest256 digest_;
  CausalContext context_;
  CausalContext compacted_;
  std::vector<Removal> removals_;  // ascending by dot
  // Payloads of what was removed, ascending by id: until no removal that is logged names them.
  std::vector<Fragment> retired_;
};

KVMELD_NAMESPACE_END

#include <kvmeld/state/fragment_set_join.hpp>
#include <kvmeld/tensor/span_of.hpp>
