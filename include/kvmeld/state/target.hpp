#pragma once

#include <cstdint>
#include <optional>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a set is rendered into.
struct Target {
  Geometry geometry{};               ///< of the engine's cache; fragments of another are refused
  std::int64_t first_position = 0;   ///< of the first output token
  std::optional<KvCacheRef> local{}; ///< rows of layers that `layers` leaves out; row i stays with output token i
  LayerMask layers{};                ///< rendered from the set; the others are copied from `local`
  bool prefix_in_place = false;      ///< the engine holds the prefix already: spans alone are rendered, from `first_position` on
  std::int64_t context_length = 0;   ///< tokens the engine's context is made for, where frequencies depend on it; 0: unknown
};

/// What a render did, or a plan will do.
struct RenderReport {
  std::int64_t tokens = 0;                   ///< output tokens, holes included
  std::int64_t holes = 0;                    ///< output tokens left to the engine
  std::int64_t bytes = 0;                    ///< of K/V written
  Digest128 render_id;                       ///< what was asked
  std::optional<Digest128> content_digest;   ///< what came out, where it was asked for
};

KVMELD_NAMESPACE_END
