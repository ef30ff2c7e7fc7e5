#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Who produced a fragment, and as which of that agent's operations. Ordered by agent, then sequence.
struct Provenance {
  std::uint64_t agent = 0;
  std::uint64_t sequence = 0;

  auto operator<=>(const Provenance&) const = default;
};

/// What is known of a fragment outside its id, so that duplicates of one content still merge: a join-semilattice.
struct Metadata {
  std::vector<Provenance> provenance;                            ///< ascending, without repetition
  std::vector<std::pair<std::uint64_t, float>> confidence;       ///< (agent, highest confidence it gave), by agent

  bool operator==(const Metadata&) const = default;

  /// The highest confidence that any agent gave; 1 where none did.
  [[nodiscard]] float best_confidence() const noexcept {
    float best = confidence.empty() ? 1.0F : confidence.front().second;
    for (const auto& [agent, value] : confidence) best = (std::max)(best, value);
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

/// The one form of equal metadata: ascending, without repetition, and no −0, which equals +0 and has other bytes.
[[nodiscard]] inline Metadata normalised(Metadata m) {
  std::sort(m.provenance.begin(), m.provenance.end());
  m.provenance.erase(std::unique(m.provenance.begin(), m.provenance.end()), m.provenance.end());
  for (auto& [agent, value] : m.confidence) value += 0.0F;
  std::sort(m.confidence.begin(), m.confidence.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first < b.first : a.second > b.second; });
  m.confidence.erase(std::unique(m.confidence.begin(), m.confidence.end(), [](const auto& a, const auto& b) { return a.first == b.first; }),
                     m.confidence.end());
  return m;
}

/// Least upper bound of two in normalised form: union of the dots, per-agent maximum of the confidences.
[[nodiscard]] inline Metadata join(const Metadata& a, const Metadata& b) {
  Metadata out;
  std::set_union(a.provenance.begin(), a.provenance.end(), b.provenance.begin(), b.provenance.end(),
                 std::back_inserter(out.provenance));
  auto i = a.confidence.begin();
  auto j = b.confidence.begin();
  while (i != a.confidence.end() || j != b.confidence.end()) {
    if (j == b.confidence.end() || (i != a.confidence.end() && i->first < j->first)) {
      out.confidence.push_back(*i++);
    } else if (i == a.confidence.end() || j->first < i->first) {
      out.confidence.push_back(*j++);
    } else {
      out.confidence.emplace_back(i->first, (std::max)(i->second, j->second));
      ++i;
      ++j;
    }
  }
  return out;
}

KVMELD_NAMESPACE_END
