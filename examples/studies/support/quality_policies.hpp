#pragma once
// Seam policies of the study's own: which tokens of a merge the engine computes again.

#include <kvmeld/kvmeld.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace quality {

/// Computes the first tokens of every span but the first again, as EPIC does (arXiv 2410.15332).
struct SeamFirst {
  static constexpr bool reproducible = true;
  std::int64_t count = 16;

  [[nodiscard]] kvmeld::Status mark(std::span<const kvmeld::Source>,
                                    const kvmeld::Alignment& alignment,
                                    std::span<std::uint8_t> recompute) const {
    for (const kvmeld::AlignmentGroup& group : alignment.groups)
      for (std::size_t o = 0; o < recompute.size(); ++o)
        for (const kvmeld::Contribution& c : group.row(o))
          if (c.source > 0 && static_cast<std::int64_t>(c.token) < count) recompute[o] = 1;
    return {};
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.text("quality.SeamFirst");
    hasher.value(count);
  }
};

/// Computes the tokens marked again. (span in the merged order, token of it)
struct SeamChosen {
  static constexpr bool reproducible = true;
  std::vector<std::vector<std::uint8_t>> chosen{};

  [[nodiscard]] kvmeld::Status mark(std::span<const kvmeld::Source>,
                                    const kvmeld::Alignment& alignment,
                                    std::span<std::uint8_t> recompute) const {
    for (const kvmeld::AlignmentGroup& group : alignment.groups)
      for (std::size_t o = 0; o < recompute.size(); ++o)
        for (const kvmeld::Contribution& c : group.row(o))
          if (c.source < chosen.size() && c.token < chosen[c.source].size() &&
              chosen[c.source][c.token] != 0)
            recompute[o] = 1;
    return {};
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.text("quality.SeamChosen");
    for (const std::vector<std::uint8_t>& marks : chosen) hasher.values(std::span(marks));
  }
};

}  // namespace quality
