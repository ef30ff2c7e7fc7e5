#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <kvmeld/align/aligner.hpp>
#include <kvmeld/align/projection_apply.hpp>
#include <kvmeld/align/projection_map.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What the arithmetic of a map cannot read or write.
KVMELD_LAZY [[nodiscard]] Status check_elements(const Geometry& geometry, MapKind kind,
                                                const char* side) {
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const bool moved = kind == MapKind::linear || shape.plane == Plane::key;
      const bool bad = kind == MapKind::linear ? shape.scales != ScaleScheme::none
                                               : block_elements(shape.type) > 1 ||
                                                     shape.scales == ScaleScheme::per_channel_group;
      if (moved && (shape.hadamard != 0 || bad)) {
        return error(
            ErrorCode::unsupported, "projection: ", side, " layer ", l, " holds ",
            to_string(shape.type), " in a Hadamard basis of ", shape.hadamard,
            ", or with scales that a map does not move; use floats in the model's own basis");
      }
    }
  }
  return {};
}

}  // namespace detail

/// Maps fragments of another model into the target's K/V, then puts them one after the other.
///
/// Y = W·X on de-rotated keys, and on values, of the source layers that the map names; keys are
/// rotated once, to their output position. Fragments that are the target's already pass untouched.
/// Token ids of another tokenizer are not known after it. What a source layer lacks of a token, the
/// target layers made of it lack too. Held back by the map's score: see `bar`.
///
/// O(tokens · numbers of the map), at plan time, in f32. `Chain{Projection{…}, TokenMatch{}}`
/// aligns otherwise. Errors of `accepts` and `transform`: `geometry_mismatch` (another model or
/// shape), `gate_refused` (a score below the bar, both figures in the message), `unsupported`,
/// `rope_length_dependent`, `payload_missing`, `non_finite`.
struct Projection {
  // the map is fixed by its digest, its application by the order of its sums
  static constexpr bool reproducible = true;

  std::shared_ptr<const ProjectionMap> map{};
  /// Least held-out attention cosine of the map; −1 takes any, measured or not. A permutation is
  /// exact and needs none.
  float bar = 0.9F;

  /// Whether the map leads from one geometry to the other and is good enough. O(layers).
  [[nodiscard]] Status accepts(const Geometry& from, const Geometry& to) const {
    if (map == nullptr)
      return detail::error(ErrorCode::invalid_argument, "projection: there is no map");
    if (from.tenant != to.tenant) {
      return detail::error(ErrorCode::geometry_mismatch, "projection: a cache of tenant '",
                           from.tenant, "' for one of '", to.tenant, "'");
    }
    KVMELD_TRY(detail::check_side(from, map->source(), "source"));
    KVMELD_TRY(detail::check_side(to, map->target(), "target"));
    KVMELD_TRY(detail::check_elements(from, map->kind(), "source"));
    KVMELD_TRY(detail::check_elements(to, map->kind(), "target"));
    if (map->kind() == MapKind::permutation)
      return check_same(detail::without_pairing(from), detail::without_pairing(to));
    const double score = map->record().attention_cosine;
    if (!(score >= static_cast<double>(bar))) {
      return detail::error(ErrorCode::gate_refused, "projection: the map's attention cosine on ",
                           map->record().held_out_tokens, " held-out tokens is ", score,
                           ", below the bar of ", bar, "; fit on more text, or lower the bar");
    }
    return {};
  }

  /// A payload in the target's geometry and element types: keys un-rotated and positions 0, or,
  /// from a permutation, rotated as they were at the positions that they had.
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload,
                                          const Geometry& to) const {
    return transform(fragment, payload, to, best_isa());
  }
  /// The same by a given instruction set: bytes are equal.
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload,
                                          const Geometry& to, Isa isa) const {
    const FloatEnvironmentGuard guard;
    KVMELD_TRY(check_float_environment());
    KVMELD_TRY(accepts(fragment.geometry(), to));
    if (payload >= fragment.payloads().size()) {
      return detail::error(ErrorCode::invalid_argument, "projection: payload ", payload, " of ",
                           fragment.payloads().size());
    }
    const Payload& source = fragment.payloads()[payload];
    if (source.bytes == nullptr)
      return detail::error(ErrorCode::payload_missing,
                           "projection: evicted payloads: ", fragment.id().hex());
    if (map->kind() == MapKind::permutation)
      return detail::permute_payload(fragment.geometry(), source, to);
    return detail::project_payload(*map, fragment.geometry(), source, to, isa);
  }

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    return Concat{}.align(ordered, first_position);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Projection");
    const Digest128 named = map == nullptr ? Digest128{} : map->digest();
    hasher.value(named.low);
    hasher.value(named.high);
    hasher.value(bar);
  }
};

KVMELD_NAMESPACE_END
