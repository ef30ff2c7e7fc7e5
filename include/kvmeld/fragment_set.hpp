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

/// A sum of entry hashes mod 2^256: one value that names a set, updated by adding and subtracting
/// the entries that change.
struct Digest256 {
  std::array<std::uint64_t, 4> words{};  ///< least significant first

  auto operator<=>(const Digest256&) const = default;

  /// this += other mod 2^256.
  void add(const Digest256& other) noexcept {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t with_carry = words[i] + carry;
      carry = with_carry < carry ? 1U : 0U;
      words[i] = with_carry + other.words[i];
      carry += words[i] < with_carry ? 1U : 0U;
    }
  }
  /// this −= other mod 2^256.
  void subtract(const Digest256& other) noexcept {
    std::uint64_t borrow = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint64_t with_borrow = words[i] - borrow;
      const std::uint64_t next = words[i] < borrow ? 1U : 0U;
      words[i] = with_borrow - other.words[i];
      borrow = next + (with_borrow < other.words[i] ? 1U : 0U);
    }
  }
  /// 64 hexadecimal digits, most significant first.
  [[nodiscard]] std::string hex() const {
    return Digest128{words[2], words[3]}.hex() + Digest128{words[0], words[1]}.hex();
  }
};

namespace extend {

/// What a content hash does for fragments, as functions: `set_hash_of` makes them of a
/// `ContentHash`.
struct ContentFunctions {
  std::array<std::uint8_t, 31> (*bytes)(std::span<const std::byte>);
  std::array<std::uint8_t, 31> (*payload)(const Payload&);
  FragmentId (*fragment)(const Fragment::Body&);
  Result<Fragment> (*seal)(const KvCacheRef&, const SealOptions&);
  Result<Fragment> (*with_variant)(const Fragment&, const KvCacheRef&, const SealOptions&);
};

}  // namespace extend

/// The hash that names a set's fragments, their payloads and chunks, and the one that its digest
/// sums, chosen at run time. A set has one, and joins no set of another; whoever stores or sends
/// fragments has that of its sets.
struct SetHash {
  std::uint8_t tag = Xxh3_128::tag;  ///< byte 0 of its fragments' ids
  /// Null: XXH3-128 with seeds 0 and 1, for XXH3 ids.
  Digest256 (*digest)(std::span<const std::byte>) = nullptr;
  const extend::ContentFunctions* content = nullptr;  ///< null: those of XXH3-128
};

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

/// By a hash that gives 32 bytes.
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
[[nodiscard]] inline Digest256 entry_digest(const SetHash& hash, const FragmentId& id,
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

/// How sets of fragments are hashed that `Hash` names: by the same hash where it gives 32 bytes
/// (`digest32`), as SHA-256 does.
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
/// A payload's digest by a hash that is chosen at run time. O(bytes).
[[nodiscard]] inline std::array<std::uint8_t, 31> payload_digest(const SetHash& hash,
                                                                 const Payload& payload) {
  return hash.content != nullptr ? hash.content->payload(payload)
                                 : payload_digest<Xxh3_128>(payload);
}
/// A body's name by a hash that is chosen at run time. O(tokens).
[[nodiscard]] inline FragmentId fragment_id(const SetHash& hash, const Fragment::Body& body) {
  return hash.content != nullptr ? hash.content->fragment(body) : fragment_id<Xxh3_128>(body);
}

}  // namespace extend

/// `seal` by a hash that is chosen at run time.
[[nodiscard]] inline Result<Fragment> seal(const KvCacheRef& view, const SealOptions& options,
                                           const SetHash& hash) {
  return hash.content != nullptr ? hash.content->seal(view, options)
                                 : seal<Xxh3_128>(view, options);
}
/// `with_variant` by a hash that is chosen at run time.
[[nodiscard]] inline Result<Fragment> with_variant(const Fragment& fragment, const KvCacheRef& view,
                                                   const SealOptions& options,
                                                   const SetHash& hash) {
  return hash.content != nullptr ? hash.content->with_variant(fragment, view, options)
                                 : with_variant<Xxh3_128>(fragment, view, options);
}

/// One removal: its own dot, and the operations that it takes out of force.
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
/// computes on K/V. Whoever holds the same set renders the same cache. A part of a set is a set, so
/// what is sent between replicas are sets too. A copy shares payloads and entries, O(n / 48).
class FragmentSet {
 public:
  using Entry = SetEntry;

  FragmentSet() = default;
  /// A set of fragments that another hash than XXH3-128 names.
  explicit FragmentSet(const SetHash& hash) : hash_(hash) {}

  /// The operation "this agent produced these tokens' K/V". A fragment that is there already gains
  /// the mark, and bytes that were evicted. Without provenance the fragment can never be removed.
  /// O(log n).
  ///
  /// Errors: `hash_mismatch` where the fragment's id comes from another content hash; `non_finite`
  /// for a NaN or infinite confidence; `dot_reused` for a dot that this set has seen on another
  /// operation; `geometry_mismatch` as `check_geometry` tells; `invalid_argument`. The set is
  /// unchanged then.
  Status insert(const Fragment& fragment, const Dot& dot,
                std::optional<float> confidence = std::nullopt, std::int64_t time_ms = 0) {
    KVMELD_TRY(check(fragment));
    if (confidence) {
      if (!std::isfinite(*confidence))
        return extend::error(ErrorCode::non_finite, "confidence of agent ", dot.agent,
                             " is not finite");
      confidence = *confidence + 0.0F;  // −0 equals +0 and has other bytes
    }
    return mark(fragment.id(), fragment, {dot, confidence, {}, time_ms});
  }
  Status insert(const Fragment& fragment) {
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
  [[nodiscard]] Status check_geometry(const Fragment& fragment) const {
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

  /// The operation "render `successor` in the place of `id`", in force once the successor is in the
  /// set, and until it is removed.
  ///
  /// Errors: `not_found` for an id that is not in the set, `invalid_argument`, `dot_reused`.
  Status supersede(const FragmentId& id, const FragmentId& successor, const Dot& dot) {
    if (id == successor || successor.empty())
      return extend::error(ErrorCode::invalid_argument, "fragment ", id.hex(),
                           " cannot supersede itself, nor none");
    KVMELD_TRY(check(successor));
    if (find(id) == nullptr)
      return extend::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
    return mark(id, {}, {dot, {}, successor, 0});
  }

  /// The operation "what this set knows to be in force on `id` ends". An insertion that this set
  /// has not seen yet survives.
  ///
  /// The payload is kept for replicas that still need it until `compact` is told that everybody
  /// knows of the removal. O(log n). Errors: `not_found`; `unsupported` for a fragment inserted
  /// without provenance; `dot_reused`.
  Status remove(const FragmentId& id, const Dot& dot) {
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

  /// Adds everything that another set knows: union of ids, and of each id's marks but for those
  /// that either has seen removed.
  ///
  /// O(n + m) comparisons of ids; O(m log n) where the other is a small part. Payloads are shared.
  /// Errors: `hash_mismatch` where the sets' ids come from different content hashes; this set is
  /// unchanged then.
  Status join(const FragmentSet& other);

  /// What a replica lacks of this set, given what it has seen; to be joined there. O(n).
  ///
  /// Removals that were compacted away while it was absent travel as the ranges of what is gone, so
  /// that it never has to guess.
  [[nodiscard]] FragmentSet delta_since(const CausalContext& seen) const;

  /// Forgets removals that everybody has seen, and drops payloads that no other removal names.
  ///
  /// `stable` is the meet of all members' contexts. O(removals · log removals).
  void compact(const CausalContext& stable);

  /// Drops a payload's bytes and keeps the id; `render` says `payload_missing` until `restore`. The
  /// digest does not change.
  Status evict(const FragmentId& id);
  /// Gives bytes to an entry that lacks them. They must be verified (`verify_fragment`). Errors:
  /// `not_found`.
  Status restore(const Fragment& fragment);
  /// A fragment's bytes, also of one that was removed and is not stable yet. Not valid() where
  /// neither is here.
  [[nodiscard]] Fragment payload(const FragmentId& id) const;

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
  /// Equal for equal sets, ids and metadata both, whatever is evicted. O(1).
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

  /// Puts a set together from what its readers gave (ids and marks; payloads are restored later),
  /// and checks that it can be one.
  ///
  /// Errors: `corrupt` for a dot of two operations, marks or removals out of order, or a mark that
  /// is removed; `hash_mismatch`, `non_finite`, `invalid_argument`.
  [[nodiscard]] static Result<FragmentSet> from_parts(const SetHash& hash,
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
  [[nodiscard]] Status check(const Fragment& fragment) const {
    if (!fragment.valid())
      return extend::error(ErrorCode::invalid_argument, "an empty Fragment has no id to insert");
    KVMELD_TRY(check(fragment.id()));
    return check_geometry(fragment);
  }
  [[nodiscard]] Status check(const FragmentId& id) const {
    if (id.tag() == hash_.tag) return {};
    return extend::error(ErrorCode::hash_mismatch, "set of hash tag ", hash_.tag, ", fragment of ",
                         id.tag());
  }
  [[nodiscard]] Status check(const Dot& dot) const {
    if (dot.sequence > max_sequence)
      return extend::error(ErrorCode::invalid_argument, "sequence ", dot.sequence, " of agent ",
                           dot.agent, " is above 2^48");
    if (!context_.contains(dot)) return {};
    return extend::error(ErrorCode::dot_reused, "agent ", dot.agent, " used sequence ",
                         dot.sequence, " of epoch ", dot.epoch, " already");
  }
  [[nodiscard]] static Fragment merged(const Fragment& a, const Fragment& b) {
    return !a.valid() ? b : !b.valid() ? a : with_all_bytes(a, b);
  }
  [[nodiscard]] Entry entry_of(const FragmentId& id) const {
    const Entry* const found = find(id);
    return found != nullptr ? *found : Entry{id, payload(id), {}};
  }
  void put(Entry entry) {
    if (const Entry* const before = find(entry.id))
      digest_.subtract(extend::entry_digest(hash_, before->id, before->metadata));
    const Digest256 now = extend::entry_digest(hash_, entry.id, entry.metadata);
    digest_.add(now);
    entries_.put(std::move(entry), now.words[0]);
  }
  Status mark(const FragmentId& id, const Fragment& fragment, const Mark& mark) {
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
  void set_marks(const Entry& entry, std::vector<Mark> marks);
  void retire(const Fragment& fragment) {
    const auto at =
        std::lower_bound(retired_.begin(), retired_.end(), fragment.id(),
                         [](const Fragment& r, const FragmentId& id) { return r.id() < id; });
    if (at != retired_.end() && at->id() == fragment.id()) {
      *at = with_all_bytes(*at, fragment);
    } else {
      retired_.insert(at, fragment);
    }
  }
  void drop_everywhere(std::vector<Dot> dots);
  void log(Removal removal) {
    const auto at = std::lower_bound(removals_.begin(), removals_.end(), removal.dot,
                                     [](const Removal& r, const Dot& dot) { return r.dot < dot; });
    if (at == removals_.end() || at->dot != removal.dot) removals_.insert(at, std::move(removal));
  }
  void join_entry(const Entry& theirs, const CausalContext& their_context);
  [[nodiscard]] bool explained() const noexcept { return compacted_.empty(); }

  SetHash hash_;
  detail::EntryLeaves entries_;
  Digest256 digest_;
  CausalContext context_;
  CausalContext compacted_;
  std::vector<Removal> removals_;  // ascending by dot
  // Payloads of what was removed, ascending by id: until no removal that is logged names them.
  std::vector<Fragment> retired_;
};

/// The entries that a render reads: those that no other one of the set supersedes, in ascending
/// order of id.
///
/// Each superseded entry points to its smallest successor that is in the set. Following the
/// pointers ends at an entry without one, or in a circle that concurrent operations closed, whose
/// smallest id then stays: no fragment vanishes without one in its place. A pure function of ids
/// and marks, so it is the same on every replica. O(n + superseded · log n).
[[nodiscard]] inline std::vector<const FragmentSet::Entry*> in_force(const FragmentSet& set) {
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

// How sets meet: the bodies of `FragmentSet`'s joins, deltas and compaction.

namespace detail {

/// Marks in force after two replicas met: those that both have, and those of either that the other
/// has not seen. Linear.
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

/// Gives an entry other marks; without any it leaves, and its payload waits until the removal is
/// stable.
inline void FragmentSet::set_marks(const Entry& entry, std::vector<Mark> marks) {
  if (!marks.empty() || entry.metadata.unattributed) {
    if (marks == entry.metadata.marks) return;
    put({entry.id, entry.fragment, {std::move(marks), entry.metadata.unattributed}});
    return;
  }
  if (entry.fragment.valid()) retire(entry.fragment);
  digest_.subtract(extend::entry_digest(hash_, entry.id, entry.metadata));
  entries_.erase(FragmentId(entry.id));
}

inline void FragmentSet::join_entry(const Entry& theirs, const CausalContext& their_context) {
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

inline Status FragmentSet::join(const FragmentSet& other) {
  if (other.hash_.tag != hash_.tag) {
    return extend::error(ErrorCode::hash_mismatch, "sets of hash tags ", hash_.tag, " and ",
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
  std::vector<Dot> elsewhere;
  for (const Removal& removal : other.removals_) {
    const Entry* const mine = find(removal.id);
    if (mine != nullptr && other.find(removal.id) == nullptr && forgotten(*mine))
      touched.push_back(removal.id);
    if (context_.contains(removal.dot)) continue;
    // What a new removal takes back is in force on its id, or not seen yet. If neither, it was
    // taken back before, or somebody named another's.
    for (const Dot& dot : removal.removed) {
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
    for (const Dot& dot : r.removed) taken.add(dot);
  }
  compacted_.join(taken);
  std::erase_if(removals_, [&](const Removal& r) { return compacted_.contains(r.dot); });
  return {};
}

/// Takes dots out of force on whatever id they stand. O(n log dots).
inline void FragmentSet::drop_everywhere(std::vector<Dot> dots) {
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

inline FragmentSet FragmentSet::delta_since(const CausalContext& seen) const {
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

inline void FragmentSet::compact(const CausalContext& stable) {
  CausalContext gone;
  for (const Removal& removal : removals_) {
    if (!stable.contains(removal.dot)) continue;
    gone.add(removal.dot);
    for (const Dot& dot : removal.removed) gone.add(dot);
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

inline Status FragmentSet::evict(const FragmentId& id) {
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

inline Status FragmentSet::restore(const Fragment& fragment) {
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

inline Fragment FragmentSet::payload(const FragmentId& id) const {
  if (const Entry* const entry = find(id)) return entry->fragment;
  const auto at =
      std::lower_bound(retired_.begin(), retired_.end(), id,
                       [](const Fragment& r, const FragmentId& key) { return r.id() < key; });
  return at != retired_.end() && at->id() == id ? *at : Fragment();
}

inline Result<FragmentSet> FragmentSet::from_parts(const SetHash& hash, std::vector<Entry> entries,
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
