#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment_view.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// Owns a cache in host memory, in canonical order (layer, plane, token, head, channel), zero-filled.
///
/// For hosts that have no cache of their own to render into, and for tests. O(bytes) to build.
class HostCache {
 public:
  KVMELD_LAZY HostCache(std::shared_ptr<const Geometry> geometry, std::int64_t tokens) {
    std::vector<std::size_t> offsets;
    std::size_t total = 0;
    const auto align = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    for (const LayerShape& layer : geometry->layers) {
      for (const PlaneShape& shape : layer.planes) {
        const auto rows = static_cast<std::size_t>(tokens * shape.heads);
        offsets.push_back(total);
        total += align(rows * static_cast<std::size_t>(detail::row_bytes(shape)));
        offsets.push_back(total);
        total += align(rows * static_cast<std::size_t>(detail::row_scales(shape)) * sizeof(float));
      }
    }
    bytes_.resize(total);
    std::vector<MutablePlaneRef> planes;
    std::size_t index = 0;
    for (const LayerShape& layer : geometry->layers) {
      for (const PlaneShape& shape : layer.planes) {
        planes.push_back(detail::canonical_plane(shape, bytes_.data() + offsets[index],
                                                 reinterpret_cast<const float*>(bytes_.data() + offsets[index + 1]), tokens));
        index += 2;
      }
    }
    ref_ = MutableKvCacheRef(std::move(geometry), std::move(planes), tokens);
  }
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;
  HostCache(HostCache&&) noexcept = default;             // the buffer does not move, so the views stay true
  HostCache& operator=(HostCache&&) noexcept = default;

  KVMELD_LAZY [[nodiscard]] KvCacheRef kv_cache_ref() const { return ref_; }
  [[nodiscard]] const MutableKvCacheRef& mutable_ref() noexcept { return ref_; }
  KVMELD_LAZY [[nodiscard]] std::span<std::byte> bytes() noexcept { return detail::span_of(bytes_); }
  KVMELD_LAZY [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return detail::span_of(bytes_); }

 private:
  std::vector<std::byte> bytes_;
  MutableKvCacheRef ref_;
};

KVMELD_NAMESPACE_END
