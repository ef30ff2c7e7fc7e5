#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>

KVMELD_NAMESPACE_BEGIN

/// Some KV heads of some layers; all of them unless told otherwise.
struct HeadMask {
  /// (layer, head of its first plane) nonzero where the head is chosen; empty: all are.
  std::vector<std::uint8_t> heads{};

  KVMELD_LAZY [[nodiscard]] bool all() const noexcept { return heads.empty(); }
};

/// What a plan finds odd: nothing wrong is rendered, but less happens than the caller asked for. A
/// set of bits.
enum class RenderWarnings : std::uint8_t {
  none = 0,
  /// A fuser was chosen (any but the default, a `WeightedMean` of uniform weights), tokens are
  /// rendered, and not one of them had two contributions: the aligner brings nothing together, as
  /// `Concat` never does, or the set holds one fragment alone.
  nothing_fused = 1,
  /// A table of weights (`AgentWeights`, `FragmentWeights`) names nobody whose tokens are rendered:
  /// all weigh `otherwise`.
  weights_unmatched = 2,
};

[[nodiscard]] constexpr RenderWarnings operator|(RenderWarnings a, RenderWarnings b) noexcept {
  return static_cast<RenderWarnings>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
[[nodiscard]] constexpr RenderWarnings operator&(RenderWarnings a, RenderWarnings b) noexcept {
  return static_cast<RenderWarnings>(static_cast<std::uint8_t>(a) & static_cast<std::uint8_t>(b));
}

/// What a set is rendered into.
struct Target {
  Geometry geometry{};              ///< of the engine's cache; fragments of another are refused
  std::int64_t first_position = 0;  ///< of the first output token
  /// Rows of layers and heads that the masks leave out; row i stays with output token i.
  std::optional<KvCacheRef> local{};
  LayerMask layers{};  ///< rendered from the set; the others are copied from `local`
  HeadMask heads{};    ///< within those layers, the heads that are rendered from the set
  /// The engine holds the prefix already: spans alone are rendered, from `first_position` on.
  bool prefix_in_place = false;
  /// Tokens the engine's context is made for, where frequencies depend on it; 0: unknown.
  std::int64_t context_length = 0;
  RenderWarnings refuse =
      RenderWarnings::none;  ///< warnings that `plan` returns as `invalid_argument`
};

/// What a render did, or a plan will do.
struct RenderReport {
  std::int64_t tokens = 0;                    ///< output tokens, holes included
  std::int64_t holes = 0;                     ///< output tokens left to the engine
  std::int64_t bytes = 0;                     ///< of K/V written
  Digest128 render_id{};                      ///< what was asked
  std::optional<Digest128> content_digest{};  ///< what came out, where it was asked for
  std::int64_t fused = 0;  ///< output tokens, holes left out, that had two contributions or more
  RenderWarnings warnings = RenderWarnings::none;
  std::int64_t next_position = 0;  ///< of what the engine computes next: one behind the last output
                                   ///< token, or the first position where there is none
};

KVMELD_NAMESPACE_END
