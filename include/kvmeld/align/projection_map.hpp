#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/align/linear_map.hpp>
#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/geometry_hash.hpp>
#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN

/// One KV head of one layer of the source model.
struct HeadRef {
  std::int32_t layer = 0;
  std::int32_t head = 0;

  bool operator==(const HeadRef&) const = default;
};

/// Some consecutive heads of a target plane: which source heads they are made of, and by which matrix.
///
/// The matrix's inputs are the heads' channels, one head behind the other in this order; its outputs the channels of
/// target heads `first_head`, `first_head + 1`, …: as many heads as outputs ÷ head size. Sharing is repeating a matrix's
/// number: per model (all layers name one), per layer (one block with all heads), per head (a block for each).
struct MapBlock {
  std::int32_t first_head = 0;
  std::uint32_t matrix = 0;        ///< index into `ProjectionParts::matrices`
  std::vector<HeadRef> inputs{};   ///< key heads for keys, value heads for values

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
  linear,       ///< matrices, on keys without their rotation
  permutation,  ///< equal shapes but for the pairing of the rope: stored elements change places, bit by bit
};

/// Where a map comes from and what it was worth on data that it was not fitted on.
struct MapRecord {
  std::string method{};             ///< e.g. "ridge 0.01"
  Digest128 fit_data{};             ///< of what it was fitted on
  std::int64_t fit_tokens = 0;
  std::int64_t held_out_tokens = 0;
  double attention_cosine = -1;     ///< held out: mean cosine of attention outputs over mapped and own K/V; −1: not measured
  double downstream = -1;           ///< held out: share of a task that the target solves from the mapped cache; −1: not measured
  double bar = 0;                   ///< the attention cosine that whoever measured it asked for

  bool operator==(const MapRecord&) const = default;
};

/// The public, mutable form from which a `ProjectionMap` is made.
struct ProjectionParts {
  Geometry source{};                  ///< element types, scales, windows and the tenant are not compared with caches
  Geometry target{};
  MapKind kind = MapKind::linear;
  std::vector<LinearMap> matrices{};  ///< empty for a permutation
  std::vector<LayerMap> layers{};     ///< one for each target layer; empty for a permutation
  MapRecord record{};
};

/// How one model's K/V become another's: immutable, checked, named by its content.
///
/// Source keys are taken without their rotation (turned back from their source positions) and target keys come without.
class ProjectionMap {
 public:
  /// Checks parts and names them. O(numbers). Errors: `invalid_argument`, `unsupported` (latent planes), `non_finite`, those of
  /// `validate(Geometry)`; for a permutation `geometry_mismatch` where more than pairings and fingerprints differ.
  [[nodiscard]] static Result<std::shared_ptr<const ProjectionMap>> make(ProjectionParts parts);
  /// The same map with another record, e.g. after its score was measured. Copies the numbers.
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> with_record(MapRecord record) const {
    ProjectionParts parts = parts_;
    parts.record = std::move(record);
    return make(std::move(parts));
  }

  [[nodiscard]] const Geometry& source() const noexcept { return parts_.source; }
  [[nodiscard]] const Geometry& target() const noexcept { return parts_.target; }
  [[nodiscard]] MapKind kind() const noexcept { return parts_.kind; }
  [[nodiscard]] std::span<const LinearMap> matrices() const noexcept { return parts_.matrices; }
  [[nodiscard]] std::span<const LayerMap> layers() const noexcept { return parts_.layers; }
  [[nodiscard]] const MapRecord& record() const noexcept { return parts_.record; }
  [[nodiscard]] const ProjectionParts& parts() const noexcept { return parts_; }
  /// Names geometries, numbers and record: part of a merger's digest.
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }

 private:
  ProjectionMap(ProjectionParts parts, Digest128 digest) : parts_(std::move(parts)), digest_(digest) {}

  ProjectionParts parts_;
  Digest128 digest_;
};

namespace detail {

/// The plane of a layer, or null.
[[nodiscard]] inline const PlaneShape* find_plane(const LayerShape& layer, Plane plane) noexcept {
  for (const PlaneShape& shape : layer.planes) {
    if (shape.plane == plane) return &shape;
  }
  return nullptr;
}

KVMELD_LAZY [[nodiscard]] Status check_blocks(const ProjectionParts& parts, std::size_t layer, Plane plane, std::span<const MapBlock> blocks) {
  const char* const name = plane == Plane::key ? " keys" : " values";
  const PlaneShape* const out = find_plane(parts.target.layers[layer], plane);
  std::int64_t covered = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const MapBlock& block = blocks[b];
    if (block.matrix >= parts.matrices.size()) {
      return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b, ": matrix ", block.matrix, " of ", parts.matrices.size());
    }
    const LinearMap& matrix = parts.matrices[block.matrix];
    std::int64_t inputs = 0;
    for (const HeadRef& in : block.inputs) {
      const PlaneShape* const shape = in.layer >= 0 && in.layer < std::ssize(parts.source.layers)
                                          ? find_plane(parts.source.layers[static_cast<std::size_t>(in.layer)], plane) : nullptr;
      if (shape == nullptr || in.head < 0 || in.head >= shape->heads) {
        return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b, ": the source has no head ", in.head, " in layer ", in.layer);
      }
      inputs += shape->channels;
    }
    const std::int64_t channels = out == nullptr ? 0 : out->channels;
    if (channels == 0 || inputs != matrix.inputs || matrix.outputs % channels != 0 || block.first_head != covered) {
      return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b, ": a matrix of ", matrix.outputs, " x ", matrix.inputs,
                   " for ", inputs, " source channels and heads of ", channels, " from ", block.first_head, " on, where ", covered, " are covered");
    }
    covered += matrix.outputs / channels;
  }
  const std::int64_t heads = out == nullptr || out->channels == 0 ? 0 : out->heads;
  if (covered != heads) return error(ErrorCode::invalid_argument, "target layer ", layer, name, ": blocks make ", covered, " heads of ", heads);
  return {};
}

/// Maps know keys and values; anything else in a layer is refused.
KVMELD_LAZY [[nodiscard]] Status check_planes(const Geometry& geometry, const char* side) {
  KVMELD_TRY(validate(geometry));
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (shape.plane != Plane::key && shape.plane != Plane::value) {
        return error(ErrorCode::unsupported, side, " layer ", l, " has a plane of kind ", static_cast<int>(shape.plane), "; maps know keys and values");
      }
      if (shape.plane == Plane::value && shape.rotary) return error(ErrorCode::unsupported, side, " layer ", l, " rotates its values");
    }
  }
  return {};
}

/// A geometry with the pairing of every rope, and the fingerprints, set alike.
[[nodiscard]] inline Geometry without_pairing(Geometry geometry) {
  geometry.model.clear();
  geometry.tokenizer.clear();
  geometry.tenant.clear();
  for (LayerShape& layer : geometry.layers) layer.rope.pairing = RopePairing::half_split;
  return geometry;
}

KVMELD_LAZY [[nodiscard]] Digest128 projection_digest(const ProjectionParts& parts) {
  Hasher h;
  h.text("kvmeld.projection.v1");
  hash_append(h, parts.source);
  hash_append(h, parts.target);
  h.value(parts.kind);
  h.value(static_cast<std::uint64_t>(parts.matrices.size()));
  for (const LinearMap& m : parts.matrices) {
    h.value(m.outputs);
    h.value(m.inputs);
    h.value(m.rank);
    h.values(std::span<const double>(m.weight));
    h.values(std::span<const double>(m.inner));
    h.values(std::span<const double>(m.bias));
  }
  h.value(static_cast<std::uint64_t>(parts.layers.size()));
  for (const LayerMap& layer : parts.layers) {
    for (const std::vector<MapBlock>* blocks : {&layer.key, &layer.value}) {
      h.value(static_cast<std::uint64_t>(blocks->size()));
      for (const MapBlock& block : *blocks) {
        h.value(block.first_head);
        h.value(block.matrix);
        h.value(static_cast<std::uint64_t>(block.inputs.size()));
        for (const HeadRef& in : block.inputs) {
          h.value(in.layer);
          h.value(in.head);
        }
      }
    }
  }
  const MapRecord& r = parts.record;
  h.text(r.method);
  h.value(r.fit_data.low);
  h.value(r.fit_data.high);
  h.value(r.fit_tokens);
  h.value(r.held_out_tokens);
  h.value(r.attention_cosine);
  h.value(r.downstream);
  h.value(r.bar);
  return h.digest();
}

}  // namespace detail

inline Result<std::shared_ptr<const ProjectionMap>> ProjectionMap::make(ProjectionParts parts) {
  KVMELD_TRY(detail::check_planes(parts.source, "source"));
  KVMELD_TRY(detail::check_planes(parts.target, "target"));
  if (parts.kind > MapKind::permutation) return detail::error(ErrorCode::unknown_field, "map kind unknown to this build");
  if (parts.kind == MapKind::permutation) {
    if (!parts.matrices.empty() || !parts.layers.empty()) {
      return detail::error(ErrorCode::invalid_argument, "a permutation with ", parts.matrices.size(), " matrices: it has none");
    }
    KVMELD_TRY(check_same(detail::without_pairing(parts.source), detail::without_pairing(parts.target)));
  } else if (parts.layers.size() != parts.target.layers.size()) {
    return detail::error(ErrorCode::invalid_argument, parts.layers.size(), " layer maps for ", parts.target.layers.size(), " target layers");
  }
  for (const double x : {parts.record.attention_cosine, parts.record.downstream, parts.record.bar}) {
    if (!(x >= -1e9 && x <= 1e9)) return detail::error(ErrorCode::non_finite, "the record of a map holds a score of ", x);
  }
  for (const LinearMap& matrix : parts.matrices) KVMELD_TRY(validate(matrix));
  for (std::size_t l = 0; l < parts.layers.size(); ++l) {
    KVMELD_TRY(detail::check_blocks(parts, l, Plane::key, parts.layers[l].key));
    KVMELD_TRY(detail::check_blocks(parts, l, Plane::value, parts.layers[l].value));
  }
  const Digest128 digest = detail::projection_digest(parts);
  return std::shared_ptr<const ProjectionMap>(new ProjectionMap(std::move(parts), digest));
}

KVMELD_NAMESPACE_END
