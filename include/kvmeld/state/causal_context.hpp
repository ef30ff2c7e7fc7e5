#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include <kvmeld/cache/metadata.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// Consecutive operations of one agent in one life of its process.
struct DotRange {
  std::uint64_t agent = 0;
  std::uint64_t epoch = 0;
  std::uint64_t first = 0;
  std::uint64_t last = 0;  ///< inclusive

  bool operator==(const DotRange&) const = default;
  [[nodiscard]] bool same_line(const DotRange& other) const noexcept {
    return agent == other.agent && epoch == other.epoch;
  }
  /// Ascending (agent, epoch, first).
  [[nodiscard]] bool before(const DotRange& other) const noexcept {
    if (agent != other.agent) return agent < other.agent;
    return epoch != other.epoch ? epoch < other.epoch : first < other.first;
  }
};

/// Every operation that a replica has seen: a set of dots, as ranges.
///
/// Where each agent's operations arrive in order it is a version vector, one range for each (agent,
/// epoch); what arrives out of order makes ranges of its own until the gap closes. Joins, meets and
/// comparisons are linear in the ranges.
class CausalContext {
 public:
  KVMELD_LAZY [[nodiscard]] bool empty() const noexcept { return ranges_.empty(); }
  /// Ascending, disjoint, and never adjacent.
  KVMELD_LAZY [[nodiscard]] std::span<const DotRange> ranges() const noexcept {
    return detail::span_of(ranges_);
  }
  KVMELD_LAZY [[nodiscard]] std::uint64_t dots() const noexcept {
    std::uint64_t count = 0;
    for (const DotRange& r : ranges_) count += r.last - r.first + 1;
    return count;
  }
  bool operator==(const CausalContext&) const = default;

  /// O(log ranges).
  KVMELD_LAZY [[nodiscard]] bool contains(const Provenance& dot) const noexcept {
    const auto after = upper(dot);
    return after != ranges_.begin() && covers(*(after - 1), dot);
  }

  /// False where the dot was there. O(log ranges) where it extends a range, O(ranges) else.
  KVMELD_LAZY bool add(const Provenance& dot) {
    const auto after = ranges_.begin() + (upper(dot) - ranges_.cbegin());
    const bool has_before = after != ranges_.begin() && (after - 1)->agent == dot.agent &&
                            (after - 1)->epoch == dot.epoch;
    if (has_before && (after - 1)->last >= dot.sequence) return false;
    const bool extends = has_before && (after - 1)->last + 1 == dot.sequence;
    const bool precedes = after != ranges_.end() && after->agent == dot.agent &&
                          after->epoch == dot.epoch && after->first == dot.sequence + 1;
    if (extends && precedes) {
      (after - 1)->last = after->last;
      ranges_.erase(after);
    } else if (extends) {
      (after - 1)->last = dot.sequence;
    } else if (precedes) {
      after->first = dot.sequence;
    } else {
      ranges_.insert(after, {dot.agent, dot.epoch, dot.sequence, dot.sequence});
    }
    return true;
  }

  /// Adds every dot of another.
  KVMELD_LAZY void join(const CausalContext& other) {
    if (other.ranges_.empty()) return;
    std::vector<DotRange> all;
    all.reserve(ranges_.size() + other.ranges_.size());
    std::merge(ranges_.begin(), ranges_.end(), other.ranges_.begin(), other.ranges_.end(),
               std::back_inserter(all),
               [](const DotRange& a, const DotRange& b) { return a.before(b); });
    ranges_.clear();
    for (const DotRange& r : all) append(r);
  }
  /// Adds a range that does not begin before any that is there: for readers of sorted input.
  KVMELD_LAZY void append(const DotRange& r) {
    if (!ranges_.empty() && ranges_.back().same_line(r) && r.first <= ranges_.back().last + 1) {
      ranges_.back().last = (std::max)(ranges_.back().last, r.last);
    } else {
      ranges_.push_back(r);
    }
  }

  /// Dots that both have: over all members' contexts, what is causally stable.
  KVMELD_LAZY [[nodiscard]] friend CausalContext meet(const CausalContext& a,
                                                      const CausalContext& b) {
    CausalContext out;
    auto i = a.ranges_.begin();
    auto j = b.ranges_.begin();
    while (i != a.ranges_.end() && j != b.ranges_.end()) {
      if (i->same_line(*j)) {
        const std::uint64_t first = (std::max)(i->first, j->first);
        const std::uint64_t last = (std::min)(i->last, j->last);
        if (first <= last) out.append({i->agent, i->epoch, first, last});
        if (i->last < j->last)
          ++i;
        else
          ++j;
      } else if (i->before(*j)) {
        ++i;
      } else {
        ++j;
      }
    }
    return out;
  }

  /// Whether b has every dot of a.
  KVMELD_LAZY [[nodiscard]] friend bool leq(const CausalContext& a,
                                            const CausalContext& b) noexcept {
    for (const DotRange& r : a.ranges_) {
      const auto after = b.upper({r.agent, r.first, r.epoch});
      if (after == b.ranges_.begin() || !(after - 1)->same_line(r) || (after - 1)->last < r.last)
        return false;
    }
    return true;
  }

  /// The first sequence number above all that the agent used in an epoch.
  KVMELD_LAZY [[nodiscard]] std::uint64_t next_sequence(std::uint64_t agent,
                                                        std::uint64_t epoch) const noexcept {
    const auto after = upper({agent, max_sequence, epoch});
    return after != ranges_.begin() && (after - 1)->agent == agent && (after - 1)->epoch == epoch
               ? (after - 1)->last + 1
               : 0;
  }

 private:
  [[nodiscard]] static bool covers(const DotRange& r, const Provenance& dot) noexcept {
    return r.agent == dot.agent && r.epoch == dot.epoch && dot.sequence <= r.last;
  }
  /// The first range that begins behind a dot.
  KVMELD_LAZY [[nodiscard]] std::vector<DotRange>::const_iterator upper(
      const Provenance& dot) const noexcept {
    const DotRange at{dot.agent, dot.epoch, dot.sequence, dot.sequence};
    return std::upper_bound(ranges_.begin(), ranges_.end(), at,
                            [](const DotRange& a, const DotRange& b) { return a.before(b); });
  }

  std::vector<DotRange> ranges_;
};

KVMELD_NAMESPACE_END
