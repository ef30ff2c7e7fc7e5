#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/align/source_layers.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Which target heads are made by one matrix.
enum class FitSharing : std::uint8_t {
  /// A matrix makes all heads of a layer from all heads of its source layers: most channels to draw
  /// on.
  per_layer,
  /// A matrix for each target head, from the source head at the same place of its source layers:
  /// fewest numbers; where.
  per_head,
  ///< the source has n times as many heads, from every n-th, and where it has fewer, from one for n
  ///< target heads
  /// One matrix for keys and one for values serve all layers: for a few hundred paired tokens.
  per_model,
};

struct ProjectionFitOptions {
  /// Source layers for each target layer, the nearest by relative depth (`k_nearest`); 0: the one
  /// that `last_aligned` names.
  std::int32_t nearest = 6;
  /// Source layer 0 besides, whose rows say little but which token it is: for values of deep
  /// layers.
  bool with_first = false;
  FitSharing sharing = FitSharing::per_layer;
  bool bias = true;
  /// Source layers of every target layer, in the order in which their channels are inputs. Empty:
  /// by the two above.
  std::vector<std::vector<std::int32_t>> source_layers{};
};

namespace detail {

/// Source layers of every target layer, where options name none. Neither model is without layers.
KVMELD_LAZY [[nodiscard]] std::vector<std::vector<std::int32_t>> fit_source_layers(
    const ProjectionFitOptions& options, std::int32_t source_layers, std::int32_t target_layers) {
  std::vector<std::vector<std::int32_t>> out;
  for (std::int32_t l = 0; l < target_layers; ++l) {
    out.push_back(options.nearest == 0
                      ? last_aligned(l, target_layers, source_layers)
                      : k_nearest(l, target_layers, source_layers, options.nearest));
    if (options.with_first && out.back().front() != 0) out.back().insert(out.back().begin(), 0);
  }
  return out;
}

}  // namespace detail
KVMELD_NAMESPACE_END
