#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/align/packed_matrix.hpp>
#include <kvmeld/align/projection_parts.hpp>
#include <kvmeld/cache/geometry_hash.hpp>
#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// A `LinearMap` as it is applied to caches. `inner` is empty where dense.
struct PackedMap {
  PackedMatrix outer;
  PackedMatrix inner;
};

}  // namespace detail

/// How one model's K/V become another's: immutable, checked, named by its content.
///
/// Source keys are taken without their rotation (turned back from their source positions) and
/// target keys come without.
class ProjectionMap {
 public:
  /// Checks parts and names them. O(numbers). Errors: `invalid_argument`, `unsupported` (latent
  /// planes), `non_finite`, those of `validate(Geometry)`; for a permutation `geometry_mismatch`
  /// where more than pairings and fingerprints differ.
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
  [[nodiscard]] std::span<const detail::PackedMap> packed() const noexcept { return packed_; }

 private:
  ProjectionMap(ProjectionParts parts, Digest128 digest)
      : parts_(std::move(parts)), digest_(digest) {
    for (const LinearMap& m : parts_.matrices) {
      detail::PackedMap& packed = packed_.emplace_back();
      packed.outer = {m.outputs, m.rank == 0 ? m.inputs : m.rank, m.weight.data(),
                      m.bias.empty() ? nullptr : m.bias.data()};
      if (m.rank != 0) packed.inner = {m.rank, m.inputs, m.inner.data(), nullptr};
    }
  }

  ProjectionParts parts_;
  Digest128 digest_;
  std::vector<detail::PackedMap> packed_;  // f32, in the order of the kernels
};

namespace detail {

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
  visit_record(
      parts.record, [&](const std::string& text) { h.text(text); },
      [&](const auto& number) { h.value(number); });
  return h.digest();
}

}  // namespace detail

inline Result<std::shared_ptr<const ProjectionMap>> ProjectionMap::make(ProjectionParts parts) {
  KVMELD_TRY(detail::check_planes(parts.source, "source"));
  KVMELD_TRY(detail::check_planes(parts.target, "target"));
  if (parts.kind > MapKind::permutation)
    return detail::error(ErrorCode::unknown_field, "map kind unknown to this build");
  if (parts.kind == MapKind::permutation) {
    if (!parts.matrices.empty() || !parts.layers.empty()) {
      return detail::error(ErrorCode::invalid_argument, "a permutation with ",
                           parts.matrices.size(), " matrices: it has none");
    }
    KVMELD_TRY(
        check_same(detail::without_pairing(parts.source), detail::without_pairing(parts.target)));
  } else if (parts.layers.size() != parts.target.layers.size()) {
    return detail::error(ErrorCode::invalid_argument, parts.layers.size(), " layer maps for ",
                         parts.target.layers.size(), " target layers");
  }
  for (const double x :
       {parts.record.attention_cosine, parts.record.downstream, parts.record.bar}) {
    if (!(x >= -1e9 && x <= 1e9))
      return detail::error(ErrorCode::non_finite, "the record of a map holds a score of ", x);
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
