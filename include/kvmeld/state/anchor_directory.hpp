#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/decision.hpp>
#include <kvmeld/state/anchor_record.hpp>
#include <kvmeld/state/reconcile_item.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a look-up among the others' anchors asks.
struct DirectoryQuery {
  std::uint64_t signature = 0;
  double similarity = 0.85;  ///< τ
  std::int64_t tokens = 0;
  Digest128 context{};
  Consumer consumer = Consumer::takes_approximate;
  std::size_t most = 16;  ///< records to be given, nearest signatures first
};

/// Anchors that other members hold and this one does not: metadata only. Pull them, commit them,
/// and let the pool decide by exact distance.
struct RemoteAnchors {
  ReuseReason reason = ReuseReason::empty_pool;  ///< of the miss; `reuse` where there are records
  std::vector<AnchorRecord> records{};           ///< by (distance of signatures, id)

  [[nodiscard]] bool remote() const noexcept { return !records.empty(); }
};

/// All records that members know of: for each key the newest version, equal versions by digest. A
/// join-semilattice.
///
/// `join` takes maxima of a total order key by key, so it is commutative, associative and
/// idempotent, and loss, order and repetition of messages do not matter (last writer wins: Shapiro,
/// Preguiça, Baquero, Zawirski, Conflict-free replicated data types, 2011). A removal is a version
/// like any other. What a directory says is a hint: a pull verifies bytes, and finds out where
/// nobody has them.
class AnchorDirectory {
 public:
  struct Entry {
    AnchorRecord record;
    Digest256 digest;
  };

  /// @param max_records tombstones included; more are refused.
  explicit AnchorDirectory(std::size_t max_records = std::size_t{1} << 20U)
      : max_records_(max_records) {}

  /// Records that are not removed.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size() - removed_; }
  [[nodiscard]] std::size_t tombstones() const noexcept { return removed_; }
  /// Sum of the digests of the records that are not removed: two directories that say the same have
  /// the same.
  [[nodiscard]] const Digest256& digest() const noexcept { return digest_; }
  /// Ascending by key, tombstones included.
  [[nodiscard]] const std::map<FragmentId, Entry>& entries() const noexcept { return entries_; }
  /// The newest version under a key, tombstone or not; null: never heard of.
  [[nodiscard]] const AnchorRecord* newest(const FragmentId& key) const noexcept {
    const auto at = entries_.find(key);
    return at == entries_.end() ? nullptr : &at->second.record;
  }
  /// Null where it is removed, or was never heard of.
  [[nodiscard]] const AnchorRecord* find(const FragmentId& key) const noexcept {
    const AnchorRecord* const record = newest(key);
    return record == nullptr || record->removed ? nullptr : record;
  }

  /// Joins one record; true: it was news. O(log n). Errors, nothing changed: those of
  /// `check_record`; `quota_exceeded`.
  KVMELD_LAZY [[nodiscard]] Result<bool> join(const AnchorRecord& record) {
    KVMELD_TRY(check_record(record));
    const FragmentId key = record_key(record);
    Entry entry{record, record_digest(record)};
    const auto at = entries_.find(key);
    if (at != entries_.end() && !precedes(at->second, entry)) return false;
    if (at == entries_.end()) {
      if (entries_.size() >= max_records_) return full(1);
      if (record.removed)
        ++removed_;
      else
        digest_.add(entry.digest);
      entries_.emplace(key, std::move(entry));
      return true;
    }
    count_out(at->second);
    if (record.removed)
      ++removed_;
    else
      digest_.add(entry.digest);
    at->second = std::move(entry);
    return true;
  }
  /// Joins all that another one knows. O(n log n). Errors, nothing changed: `quota_exceeded`.
  KVMELD_LAZY Status join(const AnchorDirectory& other) {
    std::size_t fresh = 0;
    for (const auto& [key, entry] : other.entries_) fresh += entries_.count(key) == 0 ? 1U : 0U;
    if (fresh > max_records_ - (std::min)(max_records_, entries_.size())) return full(fresh);
    for (const auto& [key, entry] : other.entries_) KVMELD_TRY(join(entry.record).status());
    return {};
  }
  /// The record with the version that makes it the newest under its key. Errors: `quota_exceeded`
  /// behind the last version.
  KVMELD_LAZY [[nodiscard]] Result<AnchorRecord> next_version(AnchorRecord record) const {
    const AnchorRecord* const before = newest(record_key(record));
    record.version = before == nullptr ? 1 : before->version + 1;
    if (record.version > max_record_version)
      return detail::error(ErrorCode::quota_exceeded, "anchor ", record.id.hex(), " has had ",
                           max_record_version, " versions");
    return record;
  }
  /// Drops a tombstone, here only: not a join, and not needed for one. Peers that still have it
  /// bring it back with what it removed.
  void forget(const FragmentId& key) {
    const auto at = entries_.find(key);
    if (at == entries_.end() || !at->second.record.removed) return;
    --removed_;
    entries_.erase(at);
  }

  /// Records like a segment that hold a Δ for its context and are long enough; the answer always
  /// has a reason. O(n).
  KVMELD_LAZY [[nodiscard]] RemoteAnchors look_up(const DirectoryQuery& query) const {
    RemoteAnchors out;
    const int most = max_distance(query.similarity);
    if (query.tokens <= 0)
      out.reason = ReuseReason::empty_segment;
    else if (!(query.similarity >= 0 && query.similarity <= 1))
      out.reason = ReuseReason::invalid_rule;
    else if (query.consumer == Consumer::never_approximate)
      out.reason = ReuseReason::exact_required;
    if (out.reason != ReuseReason::empty_pool || size() == 0) return out;
    out.reason = ReuseReason::below_threshold;
    std::vector<std::pair<int, const AnchorRecord*>> found;
    for (const auto& [key, entry] : entries_) {
      const AnchorRecord& record = entry.record;
      const int distance = std::popcount(record.signature ^ query.signature);
      if (record.removed || distance > most) continue;
      const ReuseReason reason = record.tokens < query.tokens      ? ReuseReason::too_short
                                 : record.context != query.context ? ReuseReason::no_offset
                                                                   : ReuseReason::reuse;
      // The reason of the record that came furthest.
      if (out.reason == ReuseReason::below_threshold || reason == ReuseReason::reuse ||
          (out.reason == ReuseReason::too_short && reason == ReuseReason::no_offset)) {
        out.reason = reason;
      }
      if (reason == ReuseReason::reuse) found.emplace_back(distance, &record);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second->id < b.second->id;
    });
    for (std::size_t i = 0; i < (std::min)(found.size(), query.most); ++i)
      out.records.push_back(*found[i].second);
    return out;
  }
  /// The record of exactly this text (a segment with placeholders equals none: `find` its key) that
  /// holds a Δ for the context and was never approximate, or null. O(n).
  KVMELD_LAZY [[nodiscard]] const AnchorRecord* find_exact(std::span<const TokenId> tokens,
                                                           const Digest128& context) const {
    const Digest128 text = text_digest(tokens);
    for (const auto& [key, entry] : entries_) {
      const AnchorRecord& record = entry.record;
      if (!record.removed && !record.approximate && record.context == context &&
          record.text == text && !tokens.empty())
        return &record;
    }
    return nullptr;
  }
  /// The records that are not removed as `Reconciliation` sees them. O(n).
  KVMELD_LAZY [[nodiscard]] std::vector<ReconcileItem> reconcile_items() const {
    std::vector<ReconcileItem> out;
    out.reserve(size());
    for (const auto& [key, entry] : entries_) {
      if (!entry.record.removed) out.push_back({key, entry.digest.words[0]});
    }
    return out;
  }

  /// Equal where all records are, tombstones included.
  bool operator==(const AnchorDirectory& other) const {
    return entries_.size() == other.entries_.size() &&
           std::equal(entries_.begin(), entries_.end(), other.entries_.begin(),
                      [](const auto& a, const auto& b) {
                        return a.first == b.first && a.second.record == b.second.record;
                      });
  }

 private:
  [[nodiscard]] static bool precedes(const Entry& a, const Entry& b) noexcept {
    return a.record.version != b.record.version ? a.record.version < b.record.version
                                                : a.digest < b.digest;
  }
  void count_out(const Entry& entry) noexcept {
    if (entry.record.removed)
      --removed_;
    else
      digest_.subtract(entry.digest);
  }
  [[nodiscard]] Status full(std::size_t more) const {
    return detail::error(ErrorCode::quota_exceeded, more, " records more than the ",
                         entries_.size(), " of a directory that takes ", max_records_);
  }

  std::size_t max_records_;
  std::map<FragmentId, Entry> entries_;
  std::size_t removed_ = 0;
  Digest256 digest_;
};

KVMELD_NAMESPACE_END
