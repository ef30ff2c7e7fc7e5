#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Hashes the rows for which `present(layer, token)` holds.
template <class Present>
[[nodiscard]] Digest128 content_digest_of(const KvCacheRef& cache, const Present& present) {
  Xxh3_128 hash;
  std::vector<std::byte> rows;
  std::vector<float> scales;
  const auto each_row = [&](std::size_t layer, const PlaneRef& plane, const auto& use) {
    for (std::int64_t t = 0; t < cache.tokens(); ++t) {
      const std::int64_t slot = plane.slots.slot(t);
      if (slot >= 0 && present(layer, t)) use(slot);
    }
  };
  for (std::size_t layer = 0; layer < cache.geometry().layers.size(); ++layer) {
    for (std::size_t index = 0; index < cache.geometry().layers[layer].planes.size(); ++index) {
      const PlaneRef& plane = cache.plane(layer, index);
      const auto heads_bytes = static_cast<std::size_t>(row_bytes(plane.shape) * plane.shape.heads);
      rows.resize(heads_bytes);
      each_row(layer, plane, [&](std::int64_t slot) {
        if (contiguous_heads(plane)) {
          hash.update(detail::span_of(plane.data + plane.byte_offset(plane.row_offset(slot, 0)),
                                      heads_bytes));
        } else {
          gather_heads(plane, slot, rows.data());
          hash.update(detail::span_of(rows));
        }
      });
      if (plane.shape.scales == ScaleScheme::none) continue;
      scales.resize(static_cast<std::size_t>(row_scales(plane.shape) * plane.shape.heads));
      each_row(layer, plane, [&](std::int64_t slot) {
        gather_scales(plane, slot, scales.data());
        hash.update(std::as_bytes(detail::span_of(scales)));
      });
    }
  }
  return hash.digest();
}

}  // namespace detail

/// Says what a cache holds: XXH3-128 of its rows in canonical order (layer, plane, token, head,
/// channel), then their scales.
///
/// Equal caches give equal digests whatever their layouts; rows that a view does not hold are
/// skipped. O(bytes). Errors: `invalid_argument`, `geometry_mismatch` or `token_count_mismatch` (a
/// view that its planes belie; scales that are declared and not given), `memory_space`, those of
/// `validate`.
KVMELD_LAZY [[nodiscard]] Result<Digest128> content_digest(const KvCacheRef& cache) {
  KVMELD_TRY(detail::check_on_host(cache, "content_digest"));
  KVMELD_TRY(validate(cache.geometry()));
  for (const PlaneRef& plane : cache.planes())
    KVMELD_TRY(detail::check_scales(plane, "content_digest"));
  return detail::content_digest_of(cache, [](std::size_t, std::int64_t) { return true; });
}

KVMELD_NAMESPACE_END
