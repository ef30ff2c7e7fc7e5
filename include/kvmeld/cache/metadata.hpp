#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Greatest sequence number that a dot may have: far beyond any use, and far from overflow.
inline constexpr std::uint64_t max_sequence = std::uint64_t{1} << 48;

/// The dot of one operation: who did it, in which life of its process, and as which of its
/// operations there.
///
/// An agent takes a fresh epoch whenever it starts, also from a restored snapshot, so that no dot
/// is used twice. Ordered by agent, epoch, sequence.
struct Provenance {
  std::uint64_t agent = 0;
  std::uint64_t sequence = 0;
  std::uint64_t epoch = 0;

  bool operator==(const Provenance&) const = default;
  [[nodiscard]] constexpr std::strong_ordering operator<=>(const Provenance& other) const noexcept {
    if (const auto by = agent <=> other.agent; by != 0) return by;
    if (const auto by = epoch <=> other.epoch; by != 0) return by;
    return sequence <=> other.sequence;
  }
};

/// What one operation says of a fragment.
struct Mark {
  Provenance dot{};
  std::optional<float> confidence{};  ///< the agent's, finite
  FragmentId superseded_by{};         ///< empty: the operation supersedes nothing
  std::int64_t time_ms = 0;  ///< for display only: no digest covers it and no policy may read it

  [[nodiscard]] bool operator==(const Mark& other) const noexcept {
    return dot == other.dot && confidence == other.confidence &&
           superseded_by == other.superseded_by;
  }
};

/// What is known of a fragment outside its id, so that duplicates of one content still merge.
struct Metadata {
  std::vector<Mark> marks{};  ///< of the operations that are in force, ascending by dot
  bool unattributed = false;  ///< inserted without provenance too: cannot be removed

  bool operator==(const Metadata&) const = default;

  /// The highest confidence that any agent gave; 1 where none did.
  KVMELD_LAZY [[nodiscard]] float best_confidence() const noexcept {
    std::optional<float> best;
    for (const Mark& mark : marks) {
      if (mark.confidence && (!best || *mark.confidence > *best)) best = mark.confidence;
    }
    return best.value_or(1.0F);
  }
  /// The highest confidence that one agent gave, if it gave any.
  KVMELD_LAZY [[nodiscard]] std::optional<float> confidence_of(std::uint64_t agent) const noexcept {
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
[[nodiscard]] constexpr bool reads(MetadataFields all, MetadataFields field) noexcept {
  return (static_cast<std::uint8_t>(all) & static_cast<std::uint8_t>(field)) != 0;
}

/// Least upper bound of what two replicas were told of one operation. They differ only where
/// somebody used a dot twice.
[[nodiscard]] inline Mark join(const Mark& a, const Mark& b) {
  Mark out = a;
  if (b.confidence && (!a.confidence || *b.confidence > *a.confidence))
    out.confidence = b.confidence;
  out.superseded_by = (std::max)(a.superseded_by, b.superseded_by);
  out.time_ms = (std::max)(a.time_ms, b.time_ms);
  return out;
}

KVMELD_NAMESPACE_END
