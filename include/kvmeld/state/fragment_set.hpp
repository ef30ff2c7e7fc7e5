#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/metadata.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/state/set_digest.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A set of fragments by id, with metadata that merges: the state that replicas converge on.
///
/// A join-semilattice: `join` is commutative, associative and idempotent, and never computes on K/V. Whoever holds the same
/// set renders the same cache. A copy shares the payloads.
class FragmentSet {
 public:
  struct Entry {
    Fragment fragment;
    Metadata metadata;
  };

  /// Adds one operation: "this agent produced these tokens' K/V". A fragment that is there already gains the metadata, and
  /// payloads that were evicted. O(n).
  ///
  /// Errors: `hash_mismatch` where the set's ids come from another content hash; `non_finite` for a NaN or infinite confidence;
  /// `invalid_argument` for a fragment without body. The set is unchanged then.
  Status insert(const Fragment& fragment, Provenance provenance, std::optional<float> confidence = std::nullopt) {
    Metadata metadata;
    metadata.provenance.push_back(provenance);
    if (confidence) metadata.confidence.emplace_back(provenance.agent, *confidence);
    return insert(fragment, metadata);
  }
  Status insert(const Fragment& fragment, const Metadata& given = {}) {
    if (!fragment.valid()) return detail::error(ErrorCode::invalid_argument, "an empty Fragment has no id to insert");
    if (!entries_.empty() && entries_.front().fragment.id().tag() != fragment.id().tag()) {
      return detail::error(ErrorCode::hash_mismatch, "set of hash tag ", entries_.front().fragment.id().tag(), ", fragment of ",
                           fragment.id().tag());
    }
    for (const auto& [agent, confidence] : given.confidence) {
      if (!std::isfinite(confidence)) return detail::error(ErrorCode::non_finite, "confidence of agent ", agent, " is not finite");
    }
    const Metadata metadata = normalised(given);
    const auto at = std::lower_bound(entries_.begin(), entries_.end(), fragment.id(),
                                     [](const Entry& e, const FragmentId& id) { return e.fragment.id() < id; });
    if (at != entries_.end() && at->fragment.id() == fragment.id()) {
      digest_.subtract(detail::entry_digest(fragment.id(), at->metadata));
      at->metadata = kvmeld::join(at->metadata, metadata);
      at->fragment = with_all_bytes(at->fragment, fragment);
      digest_.add(detail::entry_digest(fragment.id(), at->metadata));
    } else {
      digest_.add(detail::entry_digest(fragment.id(), metadata));
      entries_.insert(at, Entry{fragment, metadata});
    }
    return {};
  }

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  /// Entries in ascending order of id.
  [[nodiscard]] std::span<const Entry> entries() const noexcept { return entries_; }
  /// Null where the set does not know the id. O(log n).
  [[nodiscard]] const Entry* find(const FragmentId& id) const noexcept {
    const auto at = std::lower_bound(entries_.begin(), entries_.end(), id,
                                     [](const Entry& e, const FragmentId& key) { return e.fragment.id() < key; });
    return at != entries_.end() && at->fragment.id() == id ? &*at : nullptr;
  }
  /// Equal for equal sets, ids and metadata both. O(1).
  [[nodiscard]] const Digest256& digest() const noexcept { return digest_; }

  /// Least upper bound of two sets: union of ids, join of metadata. O(a + b).
  ///
  /// Errors: `hash_mismatch` where the sets' ids come from different content hashes.
  friend Result<FragmentSet> join(const FragmentSet& a, const FragmentSet& b) {
    if (!a.empty() && !b.empty() && a.entries_[0].fragment.id().tag() != b.entries_[0].fragment.id().tag()) {
      return detail::error(ErrorCode::hash_mismatch, "sets of hash tags ", a.entries_[0].fragment.id().tag(), " and ",
                           b.entries_[0].fragment.id().tag());
    }
    FragmentSet out;
    out.entries_.reserve(a.size() + b.size());
    out.digest_ = a.digest_;
    auto i = a.entries_.begin();
    auto j = b.entries_.begin();
    while (i != a.entries_.end() || j != b.entries_.end()) {
      if (j == b.entries_.end() || (i != a.entries_.end() && i->fragment.id() < j->fragment.id())) {
        out.entries_.push_back(*i++);
      } else if (i == a.entries_.end() || j->fragment.id() < i->fragment.id()) {
        out.digest_.add(detail::entry_digest(j->fragment.id(), j->metadata));
        out.entries_.push_back(*j++);
      } else {
        Entry both{with_all_bytes(i->fragment, j->fragment), i->metadata};
        if (i->metadata != j->metadata) {
          both.metadata = kvmeld::join(i->metadata, j->metadata);
          out.digest_.subtract(detail::entry_digest(i->fragment.id(), i->metadata));
          out.digest_.add(detail::entry_digest(i->fragment.id(), both.metadata));
        }
        out.entries_.push_back(std::move(both));
        ++i;
        ++j;
      }
    }
    return out;
  }

  /// Whether a is below b: every id of a is in b with at least its metadata. O(a + b).
  friend bool leq(const FragmentSet& a, const FragmentSet& b) {
    const auto j = join(a, b);
    return j && j->digest_ == b.digest_;
  }

  /// Equal ids with equal metadata.
  friend bool operator==(const FragmentSet& a, const FragmentSet& b) {
    return std::equal(a.entries_.begin(), a.entries_.end(), b.entries_.begin(), b.entries_.end(), [](const Entry& x, const Entry& y) {
      return x.fragment.id() == y.fragment.id() && x.metadata == y.metadata;
    });
  }

 private:
  std::vector<Entry> entries_;  // ascending by id
  Digest256 digest_;
};

KVMELD_NAMESPACE_END
