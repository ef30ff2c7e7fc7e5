#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/offset.hpp>
#include <kvmeld/anchor/reuse_reason.hpp>
#include <kvmeld/cache/geometry_hash.hpp>

KVMELD_NAMESPACE_BEGIN

/// Whose caches may meet in one pool. What differs here never matches, however alike the texts are.
///
/// Offsets lead from bases that stood behind one stated context to other places; added to a base
/// that stood behind something else they lead nowhere, so that context is part of the space.
struct AnchorSpace {
  std::string model{};
  std::string tokenizer{};
  Digest128 layout{};  ///< of layers, shapes, element types and ropes
  std::string tenant{};
  Context base{};  ///< what stood before every base when it was encoded

  bool operator==(const AnchorSpace&) const = default;

  [[nodiscard]] static AnchorSpace of(const Geometry& geometry, const Context& base = {}) {
    Geometry shape = geometry;
    shape.model.clear();
    shape.tokenizer.clear();
    shape.tenant.clear();
    Hasher hasher;
    hasher.text("kvmeld.anchor.layout");
    hash_append(hasher, shape);
    return {geometry.model, geometry.tokenizer, hasher.digest(), geometry.tenant, base};
  }
  /// The space that a base, which is valid(), belongs to. O(layers).
  [[nodiscard]] static AnchorSpace of(const Fragment& base) {
    return of(base.geometry(), {.prefix = base.prefix(), .lead_in = base.payloads()[0].lead_in});
  }
};

/// The first field in which a request's space differs from a pool's; `reuse` where none does.
[[nodiscard]] inline ReuseReason compare(const AnchorSpace& pool,
                                         const AnchorSpace& asked) noexcept {
  if (pool.model != asked.model) return ReuseReason::model_differs;
  if (pool.tokenizer != asked.tokenizer) return ReuseReason::tokenizer_differs;
  if (pool.layout != asked.layout) return ReuseReason::layout_differs;
  if (pool.tenant != asked.tenant) return ReuseReason::tenant_differs;
  if (pool.base != asked.base) return ReuseReason::base_differs;
  return ReuseReason::reuse;
}

/// The digest by which a place in an agent's prompt is named: what stood before a segment there,
/// and which slot of a template it fills.
[[nodiscard]] inline Digest128 place_digest(const Context& context, std::string_view agent = {},
                                            std::uint32_t slot = 0) {
  Hasher hasher;
  hasher.text("kvmeld.anchor.place");
  hasher.bytes(std::as_bytes(std::span(context.prefix.bytes)));
  hasher.value(context.lead_in.low);
  hasher.value(context.lead_in.high);
  hasher.text(agent);
  hasher.value(slot);
  return hasher.digest();
}

/// What one context did to an anchor's segment, and to the template text that follows it there.
struct ContextOffset {
  Digest128 context{};
  Fragment segment{};  ///< from `measure_offset`
  /// Likewise, against the template text's own base; not valid() where none follows.
  Fragment following{};
};

/// A segment seen before: an immutable base, and a Δ for each context in which it was measured.
///
/// Immutable once in a pool; a new Δ makes a new version that shares everything else.
struct Anchor {
  FragmentId id{};  ///< of the base as it was sealed, or any 32 bytes that name this content
  Fragment base{};  ///< keys un-rotated; alone, under a stated context
  /// For exact distances: mean token embedding, or mean value row of layer 1.
  std::vector<float> vector{};
  std::vector<float> embedding{};        ///< what `EmbeddingHash` signs; empty: `vector`
  std::vector<ContextOffset> offsets{};  ///< ascending by context
  bool approximate = false;              ///< its K/V was blended itself: never an exact answer

  /// The Δ of a context, or null: the answer is then a reason, never the base.
  [[nodiscard]] const ContextOffset* find(const Digest128& context) const noexcept {
    const auto at =
        std::lower_bound(offsets.begin(), offsets.end(), context,
                         [](const ContextOffset& o, const Digest128& c) { return o.context < c; });
    return at != offsets.end() && at->context == context ? &*at : nullptr;
  }
  /// Of K/V in base and offsets, and of vectors.
  [[nodiscard]] std::size_t bytes() const noexcept {
    const auto of = [](const Fragment& f) {
      return f.valid() ? f.payloads()[0].byte_count : std::size_t{0};
    };
    std::size_t sum = of(base) + (vector.size() + embedding.size()) * sizeof(float);
    for (const ContextOffset& o : offsets) sum += of(o.segment) + of(o.following);
    return sum;
  }
};

/// An anchor of a segment that was sealed by itself: its base un-rotated, no offsets yet.
///
/// Errors: those of `unrotated`; `invalid_argument` for a segment of 0 tokens.
KVMELD_LAZY [[nodiscard]] Result<Anchor> make_anchor(const Fragment& base,
                                                     std::vector<float> vector,
                                                     std::int64_t context_length = 0) {
  if (!base.valid() || base.token_count() == 0)
    return detail::error(ErrorCode::invalid_argument,
                         "an anchor needs a segment of at least 1 token");
  auto local = unrotated(base, context_length);
  if (!local) return local.error();
  return Anchor{base.id(), *std::move(local), std::move(vector), {}, {}, false};
}

/// Puts a Δ where the anchor has none for its context; false where it has one already, which stays.
/// Errors: `invalid_argument` for a segment offset that is not of the base's tokens.
KVMELD_LAZY [[nodiscard]] Result<bool> add_offset(Anchor& anchor, ContextOffset offset) {
  if (!offset.segment.valid() || offset.segment.token_count() != anchor.base.token_count()) {
    return detail::error(ErrorCode::invalid_argument, "an offset of ",
                         offset.segment.valid() ? offset.segment.token_count() : 0,
                         " tokens for an anchor of ", anchor.base.token_count());
  }
  KVMELD_TRY(check_same(anchor.base.geometry(), offset.segment.geometry()));
  const auto at =
      std::lower_bound(anchor.offsets.begin(), anchor.offsets.end(), offset.context,
                       [](const ContextOffset& o, const Digest128& c) { return o.context < c; });
  if (at != anchor.offsets.end() && at->context == offset.context) return false;
  anchor.offsets.insert(at, std::move(offset));
  return true;
}

/// The mean value row of one layer, all heads side by side: a vector for distances that needs no
/// embedding. f64 sums, tokens ascending.
///
/// Errors: `invalid_argument` for a layer without values; `payload_missing`.
KVMELD_LAZY [[nodiscard]] Result<std::vector<float>> mean_value_row(const Fragment& fragment,
                                                                    std::size_t layer = 1) {
  if (!fragment.valid() || layer >= fragment.geometry().layers.size())
    return detail::error(ErrorCode::invalid_argument, "no layer ", layer, " to take values from");
  const Payload& payload = fragment.payloads()[0];
  if (payload.bytes == nullptr)
    return detail::error(ErrorCode::payload_missing, "evicted payload: ", fragment.id().hex());
  std::size_t plane = 0;
  for (std::size_t l = 0; l < layer; ++l) plane += fragment.geometry().layers[l].planes.size();
  for (const PlaneShape& shape : fragment.geometry().layers[layer].planes) {
    if (shape.plane != Plane::value || shape.scales != ScaleScheme::none) {
      ++plane;
      continue;
    }
    const std::int64_t channels = static_cast<std::int64_t>(shape.heads) * shape.channels;
    std::vector<double> sums(static_cast<std::size_t>(channels));
    std::vector<float> row(sums.size());
    const std::int64_t rows = payload.layer_tokens(layer);
    for (std::int64_t t = 0; t < rows; ++t) {
      detail::load_row(
          shape.type, best_isa(),
          payload.bytes.get() + payload.plane_offsets[plane] + t * byte_size(shape.type, channels),
          channels, row.data());
      for (std::size_t c = 0; c < row.size(); ++c) sums[c] += static_cast<double>(row[c]);
    }
    for (std::size_t c = 0; c < row.size(); ++c)
      row[c] = rows == 0 ? 0.0F : static_cast<float>(sums[c] / static_cast<double>(rows));
    return row;
  }
  return detail::error(ErrorCode::invalid_argument, "layer ", layer,
                       " has no value plane; give an embedding");
}

KVMELD_NAMESPACE_END
