#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/row_copy.hpp>

KVMELD_NAMESPACE_BEGIN

/// Says what a cache holds: XXH3-128 of its rows in canonical order (layer, plane, token, head, channel), then their scales.
///
/// Equal caches give equal digests whatever their layouts; rows that a view does not hold are skipped. O(bytes).
[[nodiscard]] inline Digest128 content_digest(const KvCacheRef& cache) {
  Xxh3_128 hash;
  std::vector<std::byte> rows;
  std::vector<float> scales;
  for (const PlaneRef& plane : cache.planes()) {
    const auto heads_bytes = static_cast<std::size_t>(detail::row_bytes(plane.shape) * plane.shape.heads);
    rows.resize(heads_bytes);
    scales.resize(static_cast<std::size_t>(detail::row_scales(plane.shape) * plane.shape.heads));
    for (std::int64_t t = 0; t < cache.tokens(); ++t) {
      const std::int64_t slot = plane.slots.slot(t);
      if (slot < 0) continue;
      if (detail::contiguous_heads(plane)) {
        hash.update({plane.data + plane.byte_offset(plane.row_offset(slot, 0)), heads_bytes});
      } else {
        detail::gather_heads(plane, slot, rows.data());
        hash.update(rows);
      }
    }
    if (plane.shape.scales == ScaleScheme::none) continue;
    for (std::int64_t t = 0; t < cache.tokens(); ++t) {
      const std::int64_t slot = plane.slots.slot(t);
      if (slot < 0) continue;
      detail::gather_scales(plane, slot, scales.data());
      hash.update(std::as_bytes(std::span(scales)));
    }
  }
  return hash.digest();
}

KVMELD_NAMESPACE_END
