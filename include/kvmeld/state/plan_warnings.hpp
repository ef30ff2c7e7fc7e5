#pragma once

/// Plans that do less than was asked for.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <kvmeld/fuse/fold.hpp>
#include <kvmeld/state/plan_core.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Whether a caller chose this fuser for what it does: any but what `merger()` takes where none is
/// named.
template <class F>
[[nodiscard]] bool chosen(const F& fuser) noexcept {
  if constexpr (std::is_same_v<F, WeightedMean>) {
    return fuser.weighting != Weighting::uniform;
  } else {
    return true;
  }
}

/// Whether a table of weights names none of those that contribute.
template <class F>
[[nodiscard]] bool names_nobody([[maybe_unused]] const F& fuser,
                                [[maybe_unused]] std::span<const Source> sources) {
  if constexpr (requires { fuser.names_any(sources); }) {
    return !sources.empty() && !fuser.names_any(sources);
  } else {
    return false;
  }
}

/// (outputs) 1 where the aligner gives some layer two contributions or more.
KVMELD_LAZY [[nodiscard]] std::vector<std::uint8_t> with_several(const Geometry& geometry,
                                                                 const Alignment& alignment,
                                                                 std::size_t outputs) {
  std::vector<std::uint8_t> several(outputs, 0);
  std::vector<std::uint8_t> done(alignment.groups.size(), 0);
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    std::size_t g = 0;
    while (g < alignment.groups.size() && !alignment.groups[g].layers.contains(l)) ++g;
    if (g == alignment.groups.size() || done[g]++ != 0) continue;
    for (std::size_t o = 0; o < outputs; ++o) {
      if (alignment.groups[g].row(o).size() > 1) several[o] = 1;
    }
  }
  return several;
}

/// Counts the outputs that are fused, and warns. Errors: `invalid_argument` for a warning that the
/// target refuses.
KVMELD_LAZY Status warn(PlanCore& core, std::span<const std::uint8_t> several,
                        RenderWarnings refuse, bool fuser_chosen, bool nobody_named) {
  for (const std::uint8_t s : several) core.fused += s;
  for (const Hole& hole : core.holes) core.fused -= several[static_cast<std::size_t>(hole.output)];
  const std::int64_t rendered = core.outputs() - static_cast<std::int64_t>(core.holes.size());
  if (fuser_chosen && rendered > 0 && core.fused == 0)
    core.warnings = core.warnings | RenderWarnings::nothing_fused;
  if (nobody_named) core.warnings = core.warnings | RenderWarnings::weights_unmatched;
  if ((core.warnings & refuse & RenderWarnings::nothing_fused) != RenderWarnings::none) {
    return error(ErrorCode::invalid_argument, "none of ", rendered,
                 " rendered tokens has two contributions, so that the fuser does "
                 "nothing; align tokens that agents share (TokenMatch), or leave the fuser out");
  }
  if ((core.warnings & refuse & RenderWarnings::weights_unmatched) != RenderWarnings::none) {
    return error(ErrorCode::invalid_argument, "the fuser's table of weights names none of the ",
                 core.sources.size(),
                 " fragments or their agents; name those of this set, or leave the table empty");
  }
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
