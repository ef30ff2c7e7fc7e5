#pragma once

/// The metadata of a set's fragments, as operations with dots, and the causal contexts that are
/// sets of dots.

#include <algorithm>
#include <compare>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Largest sequence number of a dot: far beyond any use, and far from overflow.
inline constexpr std::uint64_t max_sequence = std::uint64_t{1} << 48;

/// The unique name of one operation: its agent, the epoch of the agent's process, and its sequence
/// number in that epoch.
///
/// An agent takes a fresh epoch whenever it starts, also from a restored snapshot, so that no dot
/// is used twice. Ordered by agent, epoch, sequence.
struct Dot {
  std::uint64_t agent = 0;
  std::uint64_t sequence = 0;
  std::uint64_t epoch = 0;

  bool operator==(const Dot&) const = default;
  [[nodiscard]] constexpr std::strong_ordering operator<=>(const Dot& other) const noexcept {
    if (const auto by = agent <=> other.agent; by != 0) return by;
    if (const auto by = epoch <=> other.epoch; by != 0) return by;
    return sequence <=> other.sequence;
  }
};

/// What one operation asserts about a fragment.
struct Mark {
  Dot dot{};
  std::optional<float> confidence{};  ///< of the agent, finite
  FragmentId superseded_by{};         ///< empty: the operation supersedes nothing
  std::int64_t time_ms = 0;  ///< for display only: no digest covers it and no policy may read it

  [[nodiscard]] bool operator==(const Mark& other) const noexcept {
    return dot == other.dot && confidence == other.confidence &&
           superseded_by == other.superseded_by;
  }
};

/// What is known about a fragment beside its id. It is not part of the id, so that equal content
/// from several agents merges into one entry.
struct Metadata {
  std::vector<Mark> marks{};  ///< of the operations in force, ascending by dot
  bool unattributed = false;  ///< also inserted without a dot: cannot be removed

  bool operator==(const Metadata&) const = default;

  /// The highest confidence that any agent gave; 1 where none did.
  [[nodiscard]] float best_confidence() const noexcept {
    std::optional<float> best;
    for (const Mark& mark : marks) {
      if (mark.confidence && (!best || *mark.confidence > *best)) best = mark.confidence;
    }
    return best.value_or(1.0F);
  }
  /// The highest confidence that one agent gave, if it gave any.
  [[nodiscard]] std::optional<float> confidence_of(std::uint64_t agent) const noexcept {
    std::optional<float> best;
    for (const Mark& mark : marks) {
      if (mark.dot.agent == agent && mark.confidence && (!best || *mark.confidence > *best))
        best = mark.confidence;
    }
    return best;
  }
};

/// Metadata fields that a policy reads, so that `render_id` covers them.
enum class MetadataFields : std::uint8_t { none = 0, provenance = 1, confidence = 2, all = 3 };

[[nodiscard]] constexpr MetadataFields operator|(MetadataFields a, MetadataFields b) noexcept {
  return static_cast<MetadataFields>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
/// Whether a field is among those that are read.
[[nodiscard]] constexpr bool reads(MetadataFields all, MetadataFields field) noexcept {
  return (static_cast<std::uint8_t>(all) & static_cast<std::uint8_t>(field)) != 0;
}

/// Least upper bound of two replicas' marks of one operation. They differ only where a dot was used
/// twice.
[[nodiscard]] inline Mark join(const Mark& a, const Mark& b) {
  Mark out = a;
  if (b.confidence && (!a.confidence || *b.confidence > *a.confidence))
    out.confidence = b.confidence;
  out.superseded_by = (std::max)(a.superseded_by, b.superseded_by);
  out.time_ms = (std::max)(a.time_ms, b.time_ms);
  return out;
}

/// Consecutive operations of one agent in one epoch.
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
/// epoch); operations that arrive out of order make ranges of their own until the gap closes.
/// Joins, meets and comparisons are linear in the ranges.
class CausalContext {
 public:
  [[nodiscard]] bool empty() const noexcept { return ranges_.empty(); }
  /// Ascending, disjoint, and never adjacent.
  [[nodiscard]] std::span<const DotRange> ranges() const noexcept {
    return extend::span_of(ranges_);
  }
  [[nodiscard]] std::uint64_t dots() const noexcept {
    std::uint64_t count = 0;
    for (const DotRange& r : ranges_) count += r.last - r.first + 1;
    return count;
  }
  bool operator==(const CausalContext&) const = default;

  /// O(log ranges).
  [[nodiscard]] bool contains(const Dot& dot) const noexcept {
    const auto after = upper(dot);
    return after != ranges_.begin() && covers(*(after - 1), dot);
  }

  /// Returns false where the dot was present. O(log ranges) where it extends a range, O(ranges)
  /// otherwise.
  bool add(const Dot& dot) {
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
  void join(const CausalContext& other) {
    if (other.ranges_.empty()) return;
    std::vector<DotRange> all;
    all.reserve(ranges_.size() + other.ranges_.size());
    std::merge(ranges_.begin(), ranges_.end(), other.ranges_.begin(), other.ranges_.end(),
               std::back_inserter(all),
               [](const DotRange& a, const DotRange& b) { return a.before(b); });
    ranges_.clear();
    for (const DotRange& r : all) append(r);
  }
  /// Adds a range that begins after all others: for readers of sorted input.
  void append(const DotRange& r) {
    if (!ranges_.empty() && ranges_.back().same_line(r) && r.first <= ranges_.back().last + 1) {
      ranges_.back().last = (std::max)(ranges_.back().last, r.last);
    } else {
      ranges_.push_back(r);
    }
  }

  /// The dots that both have: over the contexts of all members, the causally stable ones.
  [[nodiscard]] friend CausalContext meet(const CausalContext& a, const CausalContext& b) {
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
  [[nodiscard]] friend bool leq(const CausalContext& a, const CausalContext& b) noexcept {
    for (const DotRange& r : a.ranges_) {
      const auto after = b.upper({r.agent, r.first, r.epoch});
      if (after == b.ranges_.begin() || !(after - 1)->same_line(r) || (after - 1)->last < r.last)
        return false;
    }
    return true;
  }

  /// The first sequence number above all that the agent used in an epoch.
  [[nodiscard]] std::uint64_t next_sequence(std::uint64_t agent,
                                            std::uint64_t epoch) const noexcept {
    const auto after = upper({agent, max_sequence, epoch});
    return after != ranges_.begin() && (after - 1)->agent == agent && (after - 1)->epoch == epoch
               ? (after - 1)->last + 1
               : 0;
  }

 private:
  [[nodiscard]] static bool covers(const DotRange& r, const Dot& dot) noexcept {
    return r.agent == dot.agent && r.epoch == dot.epoch && dot.sequence <= r.last;
  }
  /// The first range that begins behind a dot.
  [[nodiscard]] std::vector<DotRange>::const_iterator upper(const Dot& dot) const noexcept {
    const DotRange at{dot.agent, dot.epoch, dot.sequence, dot.sequence};
    return std::upper_bound(ranges_.begin(), ranges_.end(), at,
                            [](const DotRange& a, const DotRange& b) { return a.before(b); });
  }

  std::vector<DotRange> ranges_;
};

KVMELD_NAMESPACE_END
