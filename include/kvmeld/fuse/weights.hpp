#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>

KVMELD_NAMESPACE_BEGIN

/// How much one agent's fragments weigh.
struct AgentWeight {
  std::uint64_t agent = 0;
  float weight = 1.0F;
};

/// How much one fragment weighs: the attention mass that fell on it, or what a predictor says of
/// it.
struct FragmentWeight {
  FragmentId fragment{};
  float weight = 1.0F;
};

/// A weighted mean by who made the fragment: Σ w·x / Σ w over the contributions that are there.
///
/// A fragment that several agents sealed counts as the one of the largest weight; agents that the
/// table does not name, and fragments without provenance, weigh `otherwise`. A weight of 0 leaves
/// an agent out. O(marks · log agents) a fragment. Errors: `invalid_argument` (weights not
/// ascending by agent), `non_finite` (negative, NaN, or all of a row's zero).
struct AgentWeights {
  static constexpr bool reproducible = true;
  static constexpr MetadataFields metadata = MetadataFields::provenance;
  std::vector<AgentWeight> weights{};  ///< ascending by agent
  float otherwise = 1.0F;

  KVMELD_LAZY [[nodiscard]] Result<float> weight(const Source& source) const {
    for (std::size_t i = 1; i < weights.size(); ++i) {
      if (weights[i].agent <= weights[i - 1].agent) {
        return detail::error(ErrorCode::invalid_argument, "AgentWeights: agent ", weights[i].agent,
                             " follows agent ", weights[i - 1].agent, "; the table ascends");
      }
    }
    const auto of = [&](std::uint64_t agent) {
      const auto at =
          std::lower_bound(weights.begin(), weights.end(), agent,
                           [](const AgentWeight& w, std::uint64_t a) { return w.agent < a; });
      return at != weights.end() && at->agent == agent ? at->weight : otherwise;
    };
    if (source.metadata->marks.empty()) return otherwise;
    float best = of(source.metadata->marks[0].dot.agent);
    for (const Mark& mark : source.metadata->marks) {
      const float w = of(mark.dot.agent);
      if (best == best && !(w <= best)) best = w;  // a NaN is found, wherever it stands, and stays
    }
    return best;
  }
  /// Whether some source is an agent's that the table names; true of an empty table, which asks for
  /// nobody.
  KVMELD_LAZY [[nodiscard]] bool names_any(std::span<const Source> sources) const {
    const auto named = [&](const Mark& mark) {
      return std::any_of(weights.begin(), weights.end(),
                         [&](const AgentWeight& w) { return w.agent == mark.dot.agent; });
    };
    return weights.empty() || std::any_of(sources.begin(), sources.end(), [&](const Source& s) {
             return std::any_of(s.metadata->marks.begin(), s.metadata->marks.end(), named);
           });
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.AgentWeights");
    hasher.value(otherwise);
    hasher.value(static_cast<std::uint64_t>(weights.size()));
    for (const AgentWeight& w : weights) {
      hasher.value(w.agent);
      hasher.value(w.weight);
    }
  }
};

/// A weighted mean by fragment, by weights that the caller measured: Σ w·x / Σ w over the
/// contributions that are there.
///
/// Every replica gives the same weights: they are part of the merger's digest. Fragments that the
/// table does not name weigh `otherwise`. O(weights) a fragment: the table is checked. Errors:
/// `invalid_argument` (weights not ascending by id), `non_finite` (negative, NaN, or all of a row's
/// zero).
struct FragmentWeights {
  static constexpr bool reproducible = true;
  std::vector<FragmentWeight> weights{};  ///< ascending by fragment
  float otherwise = 1.0F;

  KVMELD_LAZY [[nodiscard]] Result<float> weight(const Source& source) const {
    for (std::size_t i = 1; i < weights.size(); ++i) {
      if (!(weights[i - 1].fragment < weights[i].fragment)) {
        return detail::error(ErrorCode::invalid_argument, "FragmentWeights: entry ", i, " (",
                             weights[i].fragment.hex(), ") does not follow ",
                             weights[i - 1].fragment.hex(), "; the table ascends");
      }
    }
    const auto at = std::lower_bound(
        weights.begin(), weights.end(), source.fragment->id(),
        [](const FragmentWeight& w, const FragmentId& id) { return w.fragment < id; });
    return at != weights.end() && at->fragment == source.fragment->id() ? at->weight : otherwise;
  }
  /// Whether the table names some source; true of an empty table, which asks for none.
  KVMELD_LAZY [[nodiscard]] bool names_any(std::span<const Source> sources) const {
    return weights.empty() || std::any_of(sources.begin(), sources.end(), [&](const Source& s) {
             return std::any_of(weights.begin(), weights.end(), [&](const FragmentWeight& w) {
               return w.fragment == s.fragment->id();
             });
           });
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.FragmentWeights");
    hasher.value(otherwise);
    hasher.value(static_cast<std::uint64_t>(weights.size()));
    for (const FragmentWeight& w : weights) {
      hasher.bytes(std::as_bytes(std::span(w.fragment.bytes)));
      hasher.value(w.weight);
    }
  }
};

KVMELD_NAMESPACE_END
