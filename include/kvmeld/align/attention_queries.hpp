#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/align/non_finite.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Where queries and keys meet. A key's position is that of its source, wherever a render puts its
/// token afterwards: so each agent's part can be computed by itself, and merged.
enum class QueryFrame : std::uint8_t {
  pre_rope,  ///< un-rotated queries meet un-rotated keys: content alone decides, position does not
  /// Queries carry their position, as an engine computed them, and meet keys where their sources
  /// have them.
  post_rope,
  /// Un-rotated queries are turned to their stated positions, and then as `post_rope`.
  at_positions,
};

/// Coordinator queries: `count` for each layer and KV head, over memory that the caller owns.
struct AttentionQueries {
  std::span<const float> values{};  ///< (query, layer, KV head, key channel)
  std::int64_t count = 0;
  QueryFrame frame = QueryFrame::pre_rope;
  std::span<const std::int64_t> positions{};  ///< (query) of `at_positions`
  float scale = 0.0F;        ///< logit = q·k · scale / temperature; 0: 1 / √channels
  float temperature = 1.0F;  ///< > 0
};

/// One cache that queries attend over.
struct AttendSource {
  KvCacheRef cache{};
  /// (token) of the cache's keys, in any order, each in [0, `max_position`]; used only where keys
  /// have to be turned.
  std::span<const std::int64_t> positions{};
  TokenSet selected{};  ///< which of them take part; those that a layer does not hold do not, in
                        ///< that layer
};

namespace detail {

/// Refuses parameters that mean nothing.
KVMELD_LAZY Status check_queries(const AttentionQueries& queries) {
  if (queries.frame > QueryFrame::at_positions) {
    return error(ErrorCode::unknown_field, "attention: query frame ",
                 static_cast<int>(queries.frame), " is none that this build knows");
  }
  if (queries.count <= 0)
    return error(ErrorCode::invalid_argument, "attention: ", queries.count,
                 " queries; give one at least");
  const std::size_t placed =
      queries.frame == QueryFrame::at_positions ? static_cast<std::size_t>(queries.count) : 0;
  if (queries.positions.size() != placed) {
    return error(ErrorCode::invalid_argument, "attention: ", queries.positions.size(),
                 " positions for ", queries.count,
                 " queries; the frame at_positions takes one each, other frames none");
  }
  if (!(queries.scale >= 0.0F && queries.scale < 1e30F) ||
      !(queries.temperature > 1e-30F && queries.temperature < 1e30F)) {
    return error(ErrorCode::invalid_argument, "attention: scale ", queries.scale,
                 " and temperature ", queries.temperature,
                 "; the scale is at least 0 (0: 1 / sqrt(channels)), the temperature above 0");
  }
  return {};
}
/// Refuses queries that are not `width` finite numbers each.
KVMELD_LAZY Status check_query_numbers(const AttentionQueries& queries, std::size_t width) {
  if (queries.values.size() / static_cast<std::size_t>(queries.count) != width ||
      queries.values.size() % static_cast<std::size_t>(queries.count) != 0) {
    return error(ErrorCode::invalid_argument, "attention: ", queries.values.size(), " numbers for ",
                 queries.count, " queries; this model takes ", width,
                 " for each (layer, KV head, channel)");
  }
  if (!has_non_finite(best_isa(), queries.values.data(), queries.values.size())) return {};
  for (std::size_t i = 0; i < queries.values.size(); ++i) {
    if (!std::isfinite(queries.values[i])) {
      return error(ErrorCode::non_finite, "attention: query ", i / width,
                   " holds NaN or infinity at number ", i % width, " of ", width);
    }
  }
  return {};
}
/// Refuses caches of another model than the first, selections that do not ascend, and positions out
/// of range.
KVMELD_LAZY Status check_attended_source(std::span<const AttendSource> sources, std::size_t s) {
  const AttendSource& source = sources[s];
  if (!source.cache.valid())
    return error(ErrorCode::invalid_argument, "attention: cache ", s, " of ", sources.size(),
                 " has no geometry");
  KVMELD_TRY(check_on_host(source.cache, "attention"));
  const KvCacheRef& first = sources[0].cache;
  if (source.cache.shared_geometry() != first.shared_geometry())
    KVMELD_TRY(check_same(source.cache.geometry(), first.geometry()));
  std::int64_t last = -1;
  for (const std::int32_t t : source.selected.all
                                  ? std::span<const std::int32_t>()
                                  : std::span<const std::int32_t>(source.selected.present)) {
    if (t <= last || t >= source.cache.tokens()) {
      return error(ErrorCode::invalid_argument, "attention: cache ", s, " of ",
                   source.cache.tokens(), " tokens: token ", t, " is named behind token ", last);
    }
    last = t;
  }
  for (std::size_t t = 0; t < source.positions.size(); ++t) {
    if (source.positions[t] >= 0 && source.positions[t] <= max_position) continue;
    return error(ErrorCode::invalid_argument, "attention: cache ", s, ": position ",
                 source.positions[t], " of token ", t, " is not in [0, ", max_position, "]");
  }
  return {};
}
/// Refuses layers that queries cannot meet, or whose rows are not numbers as they lie.
KVMELD_LAZY Status check_attended_layer(const LayerShape& layer, std::size_t l) {
  if (layer.planes.empty()) return {};
  for (const PlaneShape& shape : layer.planes) {
    if (shape.plane == Plane::latent || shape.plane == Plane::rope_part) {
      return error(ErrorCode::unsupported, "attention: layer ", l, " is latent (MLA), ",
                   shape.channels,
                   " channels for all heads; queries meet it only through the model's "
                   "up-projection: expand keys and values first");
    }
    if (shape.hadamard != 0 || shape.scales != ScaleScheme::none) {
      return error(ErrorCode::unsupported, "attention: layer ", l, " keeps plane ", shape.plane,
                   " in a Hadamard basis of ", shape.hadamard,
                   " or with scales apart; seal it as f16 or q8_0 in the model's own basis");
    }
  }
  if (layer.planes.size() != 2 || layer.planes[0].plane != Plane::key ||
      layer.planes[1].plane != Plane::value || layer.planes[0].heads != layer.planes[1].heads) {
    return error(ErrorCode::unsupported, "attention: layer ", l, " has ", layer.planes.size(),
                 " planes; it takes keys and values of equal head count");
  }
  if (layer.planes[0].channels <= 0 || layer.planes[1].channels <= 0) {
    return error(ErrorCode::invalid_argument, "attention: layer ", l, " has heads of ",
                 layer.planes[0].channels, " key and ", layer.planes[1].channels,
                 " value channels");
  }
  return {};
}

}  // namespace detail
KVMELD_NAMESPACE_END
