#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/token_match.hpp>
#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/status.hpp>

/// Texts that are nearly another's: which of its tokens belong together.

KVMELD_NAMESPACE_BEGIN

/// A segment laid beside an anchor's text.
struct PositionMap {
  /// (tokens of the segment) the anchor's token that is the same one, ascending; −1: a hole.
  std::vector<std::int32_t> rows{};
  /// 1 − edits / tokens of the longer text; 1 − unmatched / those where no edits are looked for.
  double similarity = 1;

  /// Whether the segment is the anchor's text or a beginning of it, so that rows belong together by
  /// index.
  [[nodiscard]] bool one_to_one() const noexcept {
    for (std::size_t t = 0; t < rows.size(); ++t) {
      if (rows[t] != static_cast<std::int32_t>(t)) return false;
    }
    return true;
  }
};

/// Lays a segment beside an anchor's text by a match policy: `edit_distance` for texts that are
/// nearly equal, `index` and `common_prefix` for equal beginnings.
///
/// O(tokens), and `edit_script` by edit distance: maps of (a, b) and (b, a) are inverse. Errors:
/// those of `edit_script`; `unsupported` for `neighbours`, which compares K/V that a segment not
/// yet placed does not have; `oversized` for 2³¹ tokens or more.
KVMELD_LAZY [[nodiscard]] Result<PositionMap> map_positions(std::span<const TokenId> segment,
                                                            std::span<const TokenId> anchor,
                                                            const TokenMatch& policy) {
  const std::size_t longer = (std::max)(segment.size(), anchor.size());
  if (longer > 0x7fffffff)
    return detail::error(ErrorCode::oversized, "position map: ", longer,
                         " tokens; below 2^31 are possible");
  PositionMap out;
  out.rows.assign(segment.size(), -1);
  if (policy.mode == MatchMode::edit_distance) {
    const auto script = edit_script(segment, anchor, policy.edit);
    if (!script) return script.error();
    for (const MatchRun& run : script->runs) {
      for (std::int32_t i = 0; i < run.length; ++i)
        out.rows[static_cast<std::size_t>(run.a_begin + i)] = run.b_begin + i;
    }
    out.similarity = script->similarity();
    return out;
  }
  if (policy.mode != MatchMode::index && policy.mode != MatchMode::common_prefix) {
    return detail::error(ErrorCode::unsupported, "position map: match mode ", policy.mode,
                         " needs K/V; match by edit_distance or by index");
  }
  std::size_t shared = (std::min)(segment.size(), anchor.size());
  if (policy.mode == MatchMode::common_prefix) {
    shared = static_cast<std::size_t>(
        std::mismatch(segment.begin(), segment.begin() + static_cast<std::ptrdiff_t>(shared),
                      anchor.begin())
            .first -
        segment.begin());
  }
  for (std::size_t t = 0; t < shared; ++t) out.rows[t] = static_cast<std::int32_t>(t);
  if (longer > 0) out.similarity = static_cast<double>(shared) / static_cast<double>(longer);
  return out;
}

KVMELD_NAMESPACE_END
