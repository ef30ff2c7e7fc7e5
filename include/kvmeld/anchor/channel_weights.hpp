#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/unrotate.hpp>

KVMELD_NAMESPACE_BEGIN

/// Channels of one token over all layers, planes and heads: how many weights `weighted_by_channel`
/// takes.
[[nodiscard]] inline std::size_t channel_count(const Geometry& geometry) noexcept {
  std::size_t count = 0;
  for (const LayerShape& layer : geometry.layers) {
    for (const PlaneShape& plane : layer.planes)
      count += static_cast<std::size_t>(plane.heads) * static_cast<std::size_t>(plane.channels);
  }
  return count;
}

/// An offset each channel of which is multiplied by a weight of its own: a blend by channel is a
/// blend of these, each at weight 1.
///
/// For anchors that are near in some channels and far in others: `token_weights` of distances by
/// (anchor, channel) makes weights that add up to 1 in each channel. Products in f32, rounded once
/// to the cache's elements (a step of f16 is 2^-11 of the offset). Keys are weighted in the local
/// frame. O(bytes). Errors: `invalid_argument` for an empty fragment, one that carries positions,
/// or another number of weights than `channel_count`; `non_finite`; `payload_missing`;
/// `unsupported` (scales apart, Hadamard bases).
/// @param weights (layer, plane, head, channel)
KVMELD_LAZY [[nodiscard]] Result<Fragment> weighted_by_channel(const Fragment& delta,
                                                               std::span<const float> weights) {
  if (!delta.valid() || !is_unrotated(delta))
    return detail::error(ErrorCode::invalid_argument,
                         "weights by channel are for offsets; they come from measure_offset");
  const Geometry& geometry = delta.geometry();
  if (weights.size() != channel_count(geometry)) {
    return detail::error(ErrorCode::invalid_argument, weights.size(), " weights for ",
                         channel_count(geometry), " channels of a token");
  }
  for (const float weight : weights) {
    if (!std::isfinite(weight))
      return detail::error(ErrorCode::non_finite, "the weight of a channel is not finite");
  }
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
  const Payload& from = delta.payloads()[0];
  const auto rows = detail::LocalRows::open(geometry, from, 0);
  if (!rows) return rows.error();
  Payload out = from;
  out.digest = {};
  const auto storage = detail::local_storage(geometry, out);
  const Isa isa = best_isa();
  alignas(64) float row[1024];
  const float* weight = weights.data();
  std::size_t plane = 0;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const std::int64_t held = from.layer_tokens(l);
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::byte* to = storage->data() + out.plane_offsets[plane];
      const std::int64_t size = detail::row_bytes(shape);
      for (std::int64_t i = 0; i < held; ++i) {
        for (std::int32_t head = 0; head < shape.heads; ++head, to += size) {
          detail::load_row(shape.type, isa, rows->stored(plane, shape, i, head), shape.channels,
                           row);
          for (std::int32_t c = 0; c < shape.channels; ++c)
            row[c] *= weight[head * shape.channels + c];
          detail::store_row(shape.type, isa, row, shape.channels, to);
        }
      }
      KVMELD_TRY(detail::normalise_plane(shape, storage->data() + out.plane_offsets[plane],
                                         static_cast<std::size_t>(held), l, "a weighted offset"));
      weight += shape.heads * shape.channels;
      ++plane;
    }
  }
  out.bytes = std::shared_ptr<const std::byte[]>(storage, storage->data());
  Hasher name;
  name.text("kvmeld.anchor.offset.by_channel");
  name.bytes(std::as_bytes(std::span(delta.id().bytes)));
  name.values(weights);
  return detail::derived_fragment(delta, std::move(out),
                                  {delta.tokens().begin(), delta.tokens().end()}, name);
}

KVMELD_NAMESPACE_END
