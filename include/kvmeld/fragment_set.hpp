#pragma once

/// The set of fragments that replicas converge on, its join and its digest.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

/// A sum of entry hashes mod 2^256: one value that identifies a set, updated by adding and
/// subtracting the entries that change.
struct Digest256 {
  std::array<std::uint64_t, 4> words{};  ///< least significant first

  auto operator<=>(const Digest256&) const = default;

  /// this += other mod 2^256.
  KVMELD_API void add(const Digest256& other) noexcept;
  /// this −= other mod 2^256.
  KVMELD_API void subtract(const Digest256& other) noexcept;
  /// 64 hexadecimal digits, most significant first.
  [[nodiscard]] std::string hex() const {
    return Digest128{words[2], words[3]}.hex() + Digest128{words[0], words[1]}.hex();
  }
};

namespace extend {

/// The operations of a content hash on fragments, as function pointers; `set_hash_of` makes them
/// from a `ContentHash`.
struct ContentFunctions {
  std::array<std::uint8_t, 31> (*bytes)(std::span<const std::byte>);
  std::array<std::uint8_t, 31> (*payload)(const Payload&);
  FragmentId (*fragment)(const Fragment::Body&);
  Result<Fragment> (*seal)(const KvCacheRef&, const SealOptions&);
  Result<Fragment> (*with_variant)(const Fragment&, const KvCacheRef&, const SealOptions&);
};

}  // namespace extend

/// The content hash of a set's fragments, payloads and chunks, and the entry hash that its digest
/// sums, chosen at run time. A set has one and joins only sets of the same one; stores and replicas
/// use the one of their sets.
struct SetHash {
  std::uint8_t tag = Xxh3_128::tag;  ///< byte 0 of its fragments' ids
  /// Null: XXH3-128 with seeds 0 and 1, for XXH3 ids.
  Digest256 (*digest)(std::span<const std::byte>) = nullptr;
  const extend::ContentFunctions* content = nullptr;  ///< null: those of XXH3-128
};

namespace detail {

/// The digest by a hash of 32 bytes.
template <class Hash>
[[nodiscard]] Digest256 digest256_by(std::span<const std::byte> bytes) {
  Hash hash;
  hash.update(bytes);
  const std::array<std::uint8_t, 32> whole = hash.digest32();
  Digest256 out;
  std::memcpy(out.words.data(), whole.data(), whole.size());
  return out;
}

}  // namespace detail

namespace extend {

/// H(id ‖ marks ‖ unattributed), every field of a mark but its time.
[[nodiscard]] KVMELD_API Digest256 entry_digest(const SetHash& hash, const FragmentId& id,
                                                const Metadata& metadata);

}  // namespace extend

namespace detail {

template <class Hash>
[[nodiscard]] std::array<std::uint8_t, 31> hash_bytes(std::span<const std::byte> bytes) {
  Hash hash;
  hash.update(bytes);
  return hash.finish();
}

template <class Hash>
inline constexpr extend::ContentFunctions content_functions{
    &hash_bytes<Hash>, &extend::payload_digest<Hash>, &extend::fragment_id<Hash>,
    &kvmeld::seal<Hash>, &kvmeld::with_variant<Hash>};

}  // namespace detail

/// The `SetHash` of fragments whose ids `Hash` computes. The set's digest uses the same hash where
/// it has 32 bytes (`digest32`), as SHA-256 does.
template <ContentHash Hash>
[[nodiscard]] constexpr SetHash set_hash_of() noexcept {
  if constexpr (std::same_as<Hash, Xxh3_128>) {
    return {};
  } else if constexpr (requires(const Hash& hash) {
                         { hash.digest32() } -> std::same_as<std::array<std::uint8_t, 32>>;
                       }) {
    return {Hash::tag, &detail::digest256_by<Hash>, &detail::content_functions<Hash>};
  } else {
    return {Hash::tag, nullptr, &detail::content_functions<Hash>};
  }
}

namespace extend {

/// The hash of raw bytes, without its tag. O(bytes).
[[nodiscard]] inline std::array<std::uint8_t, 31> content_bytes(const SetHash& hash,
                                                                std::span<const std::byte> bytes) {
  return hash.content != nullptr ? hash.content->bytes(bytes) : detail::hash_bytes<Xxh3_128>(bytes);
}
/// A payload's digest, by a hash chosen at run time. O(bytes).
[[nodiscard]] inline std::array<std::uint8_t, 31> payload_digest(const SetHash& hash,
                                                                 const Payload& payload) {
  return hash.content != nullptr ? hash.content->payload(payload)
                                 : payload_digest<Xxh3_128>(payload);
}
/// A body's id, by a hash chosen at run time. O(tokens).
[[nodiscard]] inline FragmentId fragment_id(const SetHash& hash, const Fragment::Body& body) {
  return hash.content != nullptr ? hash.content->fragment(body) : fragment_id<Xxh3_128>(body);
}

}  // namespace extend

/// `seal` with a hash chosen at run time.
[[nodiscard]] inline Result<Fragment> seal(const KvCacheRef& view, const SealOptions& options,
                                           const SetHash& hash) {
  return hash.content != nullptr ? hash.content->seal(view, options)
                                 : seal<Xxh3_128>(view, options);
}
/// `with_variant` with a hash chosen at run time.
[[nodiscard]] inline Result<Fragment> with_variant(const Fragment& fragment, const KvCacheRef& view,
                                                   const SealOptions& options,
                                                   const SetHash& hash) {
  return hash.content != nullptr ? hash.content->with_variant(fragment, view, options)
                                 : with_variant<Xxh3_128>(fragment, view, options);
}

/// One removal: its own dot, and the dots of the operations that it removes.
struct Removal {
  Dot dot{};
  FragmentId id{};
  std::vector<Dot> removed{};  ///< ascending

  bool operator==(const Removal&) const = default;
};

/// A set of fragments by id, with metadata that merges: the state that replicas converge on.
///
/// A join-semilattice (an observed-remove map of dots, Almeida, Shoker and Baquero, "Delta state
/// replicated data types", 2018): `join` is commutative, associative and idempotent, and never
/// computes on K/V. Replicas that hold the same set render the same cache. A part of a set is a
/// set, so replicas send each other sets. A copy shares payloads and entries, O(n / 48).
class FragmentSet {
 public:
  using Entry = SetEntry;

  FragmentSet() = default;
  /// A set whose fragments are hashed by another hash than XXH3-128.
  explicit FragmentSet(const SetHash& hash) : hash_(hash) {}

  /// The operation "this agent produced these tokens' K/V". A fragment that is in the set already
  /// gains the mark, and its bytes if they were evicted. A fragment inserted without a dot can
  /// never be removed. O(log n).
  ///
  /// Errors: `hash_mismatch` where the fragment's id comes from another content hash; `non_finite`
  /// for a NaN or infinite confidence; `dot_reused` for a dot that this set has seen on another
  /// operation; those of `check_geometry`; `invalid_argument`. On an error the set is unchanged.
  KVMELD_API Status insert(const Fragment& fragment, const Dot& dot,
                           std::optional<float> confidence = std::nullopt,
                           std::int64_t time_ms = 0);
  KVMELD_API Status insert(const Fragment& fragment);

  /// Checks that a fragment can be rendered beside those of the set: it has the same tenant and,
  /// where the model is the same, the same geometry. Fragments of other models are accepted, since
  /// a projection may map them.
  ///
  /// At most 64 fragments are compared, so that an insertion stays O(log n); `plan` refuses
  /// mismatches that were missed. `join` accepts what others inserted, since replicas would not
  /// converge otherwise. Errors: `geometry_mismatch` with what differs.
  [[nodiscard]] KVMELD_API Status check_geometry(const Fragment& fragment) const;

  /// The operation "render `successor` in the place of `id`", in force once the successor is in the
  /// set, and until it is removed.
  ///
  /// Errors: `not_found` for an id that is not in the set, `invalid_argument`, `dot_reused`.
  KVMELD_API Status supersede(const FragmentId& id, const FragmentId& successor, const Dot& dot);

  /// Removes the operations on `id` that this set has seen. An insertion that it has not seen yet
  /// survives.
  ///
  /// The payload is kept for replicas that still need it, until `compact` learns that all of them
  /// have seen the removal. O(log n). Errors: `not_found`; `unsupported` for a fragment inserted
  /// without a dot; `dot_reused`.
  KVMELD_API Status remove(const FragmentId& id, const Dot& dot);

  /// Adds everything that another set knows: the union of ids, and for each id the union of marks,
  /// except for those whose removal either set has seen.
  ///
  /// O(n + m) comparisons of ids; O(m log n) where the other is a small part. Payloads are shared.
  /// Errors: `hash_mismatch` where the sets' ids come from different content hashes; this set is
  /// then unchanged.
  KVMELD_API Status join(const FragmentSet& other);

  /// The part of this set that a replica lacks, given the dots it has seen; to be joined there.
  /// O(n).
  ///
  /// Removals that were compacted while the replica was absent are included as ranges of removed
  /// dots, so that it can apply them as well.
  [[nodiscard]] KVMELD_API FragmentSet delta_since(const CausalContext& seen) const;

  /// Forgets removals that every member has seen, and drops payloads that no other removal names.
  ///
  /// `stable` is the meet of all members' contexts. O(removals · log removals).
  KVMELD_API void compact(const CausalContext& stable);

  /// Drops a payload's bytes and keeps the id; `render` says `payload_missing` until `restore`. The
  /// digest does not change.
  KVMELD_API Status evict(const FragmentId& id);
  /// Adds the payload bytes to an entry that lacks them. The caller has verified them
  /// (`verify_fragment`). Errors: `not_found`.
  KVMELD_API Status restore(const Fragment& fragment);
  /// A fragment with its bytes, also where it was removed and the removal is not stable yet. Not
  /// valid() where the set has neither.
  [[nodiscard]] KVMELD_API Fragment payload(const FragmentId& id) const;

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] bool empty() const noexcept { return entries_.size() == 0; }

  class Entries {
   public:
    explicit Entries(const detail::EntryLeaves& leaves) noexcept : leaves_(&leaves) {}
    [[nodiscard]] auto begin() const noexcept { return leaves_->begin(); }
    [[nodiscard]] auto end() const noexcept { return leaves_->end(); }
    [[nodiscard]] std::size_t size() const noexcept { return leaves_->size(); }
    [[nodiscard]] bool empty() const noexcept { return leaves_->size() == 0; }
    [[nodiscard]] const Entry& front() const noexcept { return *begin(); }

   private:
    const detail::EntryLeaves* leaves_;
  };
  /// Entries in ascending order of id, superseded ones included.
  [[nodiscard]] Entries entries() const noexcept { return Entries(entries_); }
  /// Null where the set does not know the id. O(log n). Invalid after the next change.
  [[nodiscard]] const Entry* find(const FragmentId& id) const noexcept { return entries_.find(id); }
  /// The digest of ids and metadata: equal for equal sets, independent of evictions. O(1).
  [[nodiscard]] const Digest256& digest() const noexcept { return digest_; }
  /// Every operation that this set has seen.
  [[nodiscard]] const CausalContext& context() const noexcept { return context_; }
  /// Removals that are not stable yet, ascending by dot.
  [[nodiscard]] std::span<const Removal> removals() const noexcept {
    return extend::span_of(removals_);
  }
  /// Whether payloads of removed fragments wait for `compact`.
  [[nodiscard]] bool keeps_removed() const noexcept { return !retired_.empty(); }
  /// Removals and removed operations that were compacted away.
  [[nodiscard]] const CausalContext& compacted() const noexcept { return compacted_; }
  [[nodiscard]] const SetHash& hash() const noexcept { return hash_; }

  /// Builds a set from decoded parts (ids and marks; payloads are restored later), and checks that
  /// they are consistent.
  ///
  /// Errors: `corrupt` for a dot of two operations, marks or removals out of order, or a mark whose
  /// operation is removed; `hash_mismatch`, `non_finite`, `invalid_argument`.
  [[nodiscard]] KVMELD_API static Result<FragmentSet> from_parts(const SetHash& hash,
                                                                 std::vector<Entry> entries,
                                                                 std::vector<Removal> removals,
                                                                 const CausalContext& compacted);

  /// Whether a is below b: b has seen every operation of a. O(n + m).
  [[nodiscard]] friend bool leq(const FragmentSet& a, const FragmentSet& b) {
    if (!leq(a.context_, b.context_)) return false;
    FragmentSet both = b;
    return both.join(a) && both.digest_ == b.digest_;
  }
  /// Least upper bound of two sets, as `FragmentSet::join`.
  [[nodiscard]] friend Result<FragmentSet> join(const FragmentSet& a, const FragmentSet& b) {
    FragmentSet out = a;
    KVMELD_TRY(out.join(b));
    return out;
  }
  /// Equal ids with equal metadata.
  [[nodiscard]] friend bool operator==(const FragmentSet& a, const FragmentSet& b) {
    return a.size() == b.size() &&
           std::equal(a.entries_.begin(), a.entries_.end(), b.entries_.begin(),
                      [](const Entry& x, const Entry& y) {
                        return x.id == y.id && x.metadata == y.metadata;
                      });
  }

 private:
  [[nodiscard]] KVMELD_API Status check(const Fragment& fragment) const;
  [[nodiscard]] Status check(const FragmentId& id) const {
    if (id.tag() == hash_.tag) return {};
    return extend::error(ErrorCode::hash_mismatch, "set of hash tag ", hash_.tag, ", fragment of ",
                         id.tag());
  }
  [[nodiscard]] KVMELD_API Status check(const Dot& dot) const;
  [[nodiscard]] static Fragment merged(const Fragment& a, const Fragment& b) {
    return !a.valid() ? b : !b.valid() ? a : with_all_bytes(a, b);
  }
  [[nodiscard]] Entry entry_of(const FragmentId& id) const {
    const Entry* const found = find(id);
    return found != nullptr ? *found : Entry{id, payload(id), {}};
  }
  KVMELD_API void put(Entry entry);
  KVMELD_API Status mark(const FragmentId& id, const Fragment& fragment, const Mark& mark);
  KVMELD_API void set_marks(const Entry& entry, std::vector<Mark> marks);
  KVMELD_API void retire(const Fragment& fragment);
  KVMELD_API void drop_everywhere(std::vector<Dot> dots);
  void log(Removal removal) {
    const auto at = std::lower_bound(removals_.begin(), removals_.end(), removal.dot,
                                     [](const Removal& r, const Dot& dot) { return r.dot < dot; });
    if (at == removals_.end() || at->dot != removal.dot) removals_.insert(at, std::move(removal));
  }
  KVMELD_API void join_entry(const Entry& theirs, const CausalContext& their_context);
  // Whether this set has seen an operation on the other's entry that is not on its own.
  [[nodiscard]] KVMELD_API bool forgets(const Entry& mine) const;
  // Joins the entries of both sets. Returns the ids of this set's entries whose marks the other has
  // seen removed: logged removals name their entries, compacted ones require a look at every entry.
  KVMELD_API std::vector<FragmentId> join_entries(const FragmentSet& other);
  KVMELD_API void join_removals(const FragmentSet& other, std::vector<FragmentId>& touched);
  KVMELD_API void forget_compacted();
  [[nodiscard]] bool explained() const noexcept { return compacted_.empty(); }

  SetHash hash_;
  detail::EntryLeaves entries_;
  Digest256 digest_;
  CausalContext context_;
  CausalContext compacted_;
  std::vector<Removal> removals_;  // ascending by dot
  // Payloads of removed fragments, ascending by id, kept while a logged removal names them.
  std::vector<Fragment> retired_;
};

/// Which entries of a set count: all of them, or those whose bytes are here.
enum class Presence : std::uint8_t { known, complete };

/// An entry that a render reads, and the place that it takes in an order by provenance.
struct InForce {
  const SetEntry* entry = nullptr;
  /// The smallest dot under which it, or what it replaced, was inserted; zeros: one of them without
  /// provenance. So what was read again keeps its place. Its smallest dot where no insertion was
  /// heard of.
  Dot place{};
};

/// The entries that a render reads: those that no other one of the set supersedes, in ascending
/// order of id.
///
/// Each superseded entry points to its smallest successor that is in the set. Following the
/// pointers ends at an entry without one, or in a cycle that concurrent operations closed, of which
/// the smallest id stays: no fragment vanishes without a successor. Under `Presence::complete`, an
/// end of such a chain whose bytes are not here does not count, and what it superseded stands
/// again: a refreshed variant that is late, or lost, leaves the older one. A pure function of ids,
/// marks and, for `complete`, of what is here; so replicas that have all bytes agree. O(n +
/// superseded · log n), times the ends in a chain that are missing.
[[nodiscard]] KVMELD_API std::vector<InForce> in_force(const FragmentSet& set,
                                                       Presence presence = Presence::known);

/// What `in_force(set, Presence::complete)` names, as a set of its own: with what it replaces, by
/// id and marks alone, so that places stay. O(n log n).
[[nodiscard]] KVMELD_API Result<FragmentSet> renderable(const FragmentSet& set);

namespace refresh {

/// What `renderable` names without `own`: what a fragment is read again behind.
///
/// @param only ids to take of the others (the most telling, say); empty: all. A prefix is taken
/// always. O(n log n). Errors: `not_found` where `own` is not among what `renderable` names.
[[nodiscard]] KVMELD_API Result<FragmentSet> set_behind(const FragmentSet& set,
                                                        const FragmentId& own,
                                                        std::span<const FragmentId> only = {});

}  // namespace refresh

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/fragment_set.hpp>
#endif
