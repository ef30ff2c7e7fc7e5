#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/align/linear_map.hpp>
#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN

/// One KV head of one layer of the source model.
struct HeadRef {
  std::int32_t layer = 0;
  std::int32_t head = 0;

  bool operator==(const HeadRef&) const = default;
};

/// Some consecutive heads of a target plane: which source heads they are made of, and by which
/// matrix.
///
/// The matrix's inputs are the heads' channels, one head behind the other in this order; its
/// outputs the channels of target heads `first_head`, `first_head + 1`, …: as many heads as outputs
/// ÷ head size. Sharing is repeating a matrix's number: per model (all layers name one), per layer
/// (one block with all heads), per head (a block for each).
struct MapBlock {
  std::int32_t first_head = 0;
  std::uint32_t matrix = 0;       ///< index into `ProjectionParts::matrices`
  std::vector<HeadRef> inputs{};  ///< key heads for keys, value heads for values

  bool operator==(const MapBlock&) const = default;
};

/// What makes one target layer: blocks in ascending order of heads that cover every head once.
struct LayerMap {
  std::vector<MapBlock> key{};
  std::vector<MapBlock> value{};

  bool operator==(const LayerMap&) const = default;
};

/// Whether a map computes, or only moves channels.
enum class MapKind : std::uint8_t {
  linear,  ///< matrices, on keys without their rotation
  /// Equal shapes but for the pairing of the rope: stored elements change places, bit by bit.
  permutation,
};

/// Where a map comes from and what it was worth on data that it was not fitted on.
struct MapRecord {
  std::string method{};  ///< e.g. "ridge 0.01"
  Digest128 fit_data{};  ///< of what it was fitted on
  std::int64_t fit_tokens = 0;
  std::int64_t held_out_tokens = 0;
  /// Held out: mean cosine of attention outputs over mapped and own K/V; −1: not measured.
  double attention_cosine = -1;
  /// Held out: share of a task that the target solves from the mapped cache; −1: not measured.
  double downstream = -1;
  double bar = 0;  ///< the attention cosine that whoever measured it asked for

  bool operator==(const MapRecord&) const = default;
};

/// The public, mutable form from which a `ProjectionMap` is made.
struct ProjectionParts {
  /// Element types, scales, windows and the tenant are not compared with caches.
  Geometry source{};
  Geometry target{};
  MapKind kind = MapKind::linear;
  std::vector<LinearMap> matrices{};  ///< empty for a permutation
  std::vector<LayerMap> layers{};     ///< one for each target layer; empty for a permutation
  MapRecord record{};
};

namespace detail {

/// Every field of a record, in the one order in which records are named, written and read.
template <class Record, class Text, class Number>
void visit_record(Record& record, const Text& text, const Number& number) {
  text(record.method);
  number(record.fit_data.low);
  number(record.fit_data.high);
  number(record.fit_tokens);
  number(record.held_out_tokens);
  number(record.attention_cosine);
  number(record.downstream);
  number(record.bar);
}

/// The plane of a layer, or null.
[[nodiscard]] inline const PlaneShape* find_plane(const LayerShape& layer, Plane plane) noexcept {
  for (const PlaneShape& shape : layer.planes) {
    if (shape.plane == plane) return &shape;
  }
  return nullptr;
}

KVMELD_LAZY [[nodiscard]] Status check_blocks(const ProjectionParts& parts, std::size_t layer,
                                              Plane plane, std::span<const MapBlock> blocks) {
  const char* const name = plane == Plane::key ? " keys" : " values";
  const PlaneShape* const out = find_plane(parts.target.layers[layer], plane);
  std::int64_t covered = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const MapBlock& block = blocks[b];
    if (block.matrix >= parts.matrices.size()) {
      return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b,
                   ": matrix ", block.matrix, " of ", parts.matrices.size());
    }
    const LinearMap& matrix = parts.matrices[block.matrix];
    std::int64_t inputs = 0;
    for (const HeadRef& in : block.inputs) {
      const PlaneShape* const shape =
          in.layer >= 0 && in.layer < std::ssize(parts.source.layers)
              ? find_plane(parts.source.layers[static_cast<std::size_t>(in.layer)], plane)
              : nullptr;
      if (shape == nullptr || in.head < 0 || in.head >= shape->heads) {
        return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b,
                     ": the source has no head ", in.head, " in layer ", in.layer);
      }
      inputs += shape->channels;
    }
    const std::int64_t channels = out == nullptr ? 0 : out->channels;
    if (channels == 0 || inputs != matrix.inputs || matrix.outputs % channels != 0 ||
        block.first_head != covered) {
      return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b,
                   ": a matrix of ", matrix.outputs, " x ", matrix.inputs, " for ", inputs,
                   " source channels and heads of ", channels, " from ", block.first_head,
                   " on, where ", covered, " are covered");
    }
    covered += matrix.outputs / channels;
  }
  const std::int64_t heads = out == nullptr || out->channels == 0 ? 0 : out->heads;
  if (covered != heads)
    return error(ErrorCode::invalid_argument, "target layer ", layer, name, ": blocks make ",
                 covered, " heads of ", heads);
  return {};
}

/// Maps know keys and values; anything else in a layer is refused.
KVMELD_LAZY [[nodiscard]] Status check_planes(const Geometry& geometry, const char* side) {
  KVMELD_TRY(validate(geometry));
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (shape.plane != Plane::key && shape.plane != Plane::value) {
        return error(ErrorCode::unsupported, side, " layer ", l, " has a plane of kind ",
                     shape.plane, "; maps know keys and values");
      }
      if (shape.plane == Plane::value && shape.rotary)
        return error(ErrorCode::unsupported, side, " layer ", l, " rotates its values");
    }
  }
  return {};
}

/// A geometry with the pairing of every rope, and what names the model and its use, set alike.
[[nodiscard]] inline Geometry without_pairing(Geometry geometry) {
  geometry.model.clear();
  geometry.tokenizer.clear();
  geometry.tenant.clear();
  geometry.bos = -1;
  geometry.trained_context = 0;
  for (LayerShape& layer : geometry.layers) layer.rope.pairing = RopePairing::half_split;
  return geometry;
}

/// Whether a cache has the shape that a map was made for; element types and windows may differ.
KVMELD_LAZY [[nodiscard]] Status check_side(const Geometry& cache, const Geometry& map,
                                            const char* side) {
  const auto wrong = [&](std::size_t layer, const auto&... what) {
    return error(ErrorCode::geometry_mismatch, "projection: ", side, " layer ", layer, ": ",
                 what...);
  };
  if (cache.model != map.model) {
    return error(ErrorCode::geometry_mismatch, "projection: the map's ", side, " is model '",
                 map.model, "', the cache's is '", cache.model, "'");
  }
  if (cache.layers.size() != map.layers.size()) {
    return error(ErrorCode::geometry_mismatch, "projection: the map's ", side, " has ",
                 map.layers.size(), " layers, the cache ", cache.layers.size());
  }
  for (std::size_t l = 0; l < map.layers.size(); ++l) {
    const LayerShape& a = cache.layers[l];
    const LayerShape& b = map.layers[l];
    if (a.planes.size() != b.planes.size())
      return wrong(l, a.planes.size(), " planes where the map knows ", b.planes.size());
    KVMELD_TRY(check_same(a.rope, b.rope, l));
    for (std::size_t p = 0; p < b.planes.size(); ++p) {
      const PlaneShape& x = a.planes[p];
      const PlaneShape& y = b.planes[p];
      if (x.plane != y.plane || x.heads != y.heads || x.channels != y.channels ||
          x.rotary != y.rotary) {
        return wrong(l, x.heads, " heads of ", x.channels, " channels in plane ", p,
                     ", the map knows ", y.heads, " of ", y.channels);
      }
    }
  }
  return {};
}

}  // namespace detail

KVMELD_NAMESPACE_END
