#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment_view.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// Owns a cache in host memory, in canonical order (layer, plane, token, head, channel),
/// zero-filled. Planes begin at multiples of 64 bytes, as whole lines can be written past the
/// processor's caches.
///
/// For hosts that have no cache of their own to render into, and for tests. O(bytes) to build. More
/// bytes than can be counted fail as an allocation does.
class HostCache {
 public:
  KVMELD_LAZY HostCache(std::shared_ptr<const Geometry> geometry, std::int64_t tokens) {
    std::vector<std::size_t> offsets;
    std::size_t total = 0;
    constexpr std::size_t line = 64;
    bool counted = true;
    const auto grow = [&](std::int64_t heads, std::int64_t row) {
      offsets.push_back(total);
      std::size_t bytes = 0;
      counted = counted && !__builtin_mul_overflow(tokens, heads, &bytes) &&
                !__builtin_mul_overflow(bytes, row, &bytes) &&
                !__builtin_add_overflow(bytes, line - 1, &bytes) &&
                !__builtin_add_overflow(bytes / line * line, total, &total);
    };
    for (const LayerShape& layer : geometry->layers) {
      for (const PlaneShape& shape : layer.planes) {
        grow(shape.heads, detail::row_bytes(shape));
        grow(shape.heads, detail::row_scales(shape) * std::int64_t{sizeof(float)});
      }
    }
    if (!counted) total = (std::numeric_limits<std::size_t>::max)() / 2;  // more than there can be
    bytes_.resize(total + line);
    void* begin = bytes_.data();
    std::size_t space = bytes_.size();
    std::align(line, total, begin, space);
    used_ = detail::span_of(static_cast<std::byte*>(begin), total);
    std::vector<MutablePlaneRef> planes;
    std::size_t index = 0;
    for (const LayerShape& layer : geometry->layers) {
      for (const PlaneShape& shape : layer.planes) {
        planes.push_back(detail::canonical_plane(
            shape, used_.data() + offsets[index],
            reinterpret_cast<const float*>(used_.data() + offsets[index + 1]), tokens));
        index += 2;
      }
    }
    ref_ = MutableKvCacheRef(std::move(geometry), std::move(planes), tokens);
  }
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;
  HostCache(HostCache&&) noexcept = default;  // the buffer does not move, so the views stay true
  HostCache& operator=(HostCache&&) noexcept = default;

  KVMELD_LAZY [[nodiscard]] KvCacheRef kv_cache_ref() const { return ref_; }
  [[nodiscard]] const MutableKvCacheRef& mutable_ref() noexcept { return ref_; }
  KVMELD_LAZY [[nodiscard]] std::span<std::byte> bytes() noexcept {
    return bytes_.empty() ? std::span<std::byte>() : used_;
  }
  KVMELD_LAZY [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return bytes_.empty() ? std::span<std::byte>() : used_;
  }

 private:
  std::vector<std::byte> bytes_;
  std::span<std::byte> used_;  // of them, from the first whole line on
  MutableKvCacheRef ref_;
};

KVMELD_NAMESPACE_END
