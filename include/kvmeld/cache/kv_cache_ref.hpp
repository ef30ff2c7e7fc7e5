#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/plane_ref.hpp>

KVMELD_NAMESPACE_BEGIN

/// A non-owning view of a whole cache: a geometry and one plane view per (layer, plane), all over the same tokens.
///
/// Copies share the geometry and copy the plane descriptors, never elements. Planes of one layer have the same holes.
/// @tparam Byte `std::byte` for caches that may be written, `const std::byte` otherwise.
template <class Byte>
class BasicKvCacheRef {
 public:
  using plane_type = BasicPlaneRef<Byte>;

  BasicKvCacheRef() = default;
  /// @param planes layer-major, in the order of `geometry->layers[l].planes`.
  BasicKvCacheRef(std::shared_ptr<const Geometry> geometry, std::vector<plane_type> planes, std::int64_t tokens)
      : geometry_(std::move(geometry)), planes_(std::move(planes)), tokens_(tokens) {
    std::size_t first = 0;
    for (const LayerShape& layer : geometry_->layers) {
      first_plane_.push_back(first);
      first += layer.planes.size();
    }
  }
  template <class Other>
    requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
  BasicKvCacheRef(const BasicKvCacheRef<Other>& o)  // NOLINT: implicit on purpose
      : BasicKvCacheRef(o.shared_geometry(), std::vector<plane_type>(o.planes().begin(), o.planes().end()), o.tokens()) {}

  [[nodiscard]] const Geometry& geometry() const noexcept { return *geometry_; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::span<const plane_type> planes() const noexcept { return planes_; }
  [[nodiscard]] const plane_type& plane(std::size_t layer, std::size_t index) const noexcept {
    return planes_[first_plane_[layer] + index];
  }
  /// The same memory, its first `count` tokens.
  [[nodiscard]] BasicKvCacheRef first(std::int64_t count) const {
    BasicKvCacheRef out = *this;
    out.tokens_ = count;
    for (plane_type& plane : out.planes_) plane.tokens = count;
    return out;
  }
  [[nodiscard]] bool valid() const noexcept { return geometry_ != nullptr; }

 private:
  std::shared_ptr<const Geometry> geometry_;
  std::vector<plane_type> planes_;
  std::vector<std::size_t> first_plane_;
  std::int64_t tokens_ = 0;
};

using KvCacheRef = BasicKvCacheRef<const std::byte>;
using MutableKvCacheRef = BasicKvCacheRef<std::byte>;

/// A cache that can be read in place: it hands out plane views over its own memory.
///
/// Semantic requirements: `kv_cache_ref()` costs no copy of elements and stays valid while the cache lives unchanged.
template <class C>
concept KvCacheView = std::convertible_to<const C&, KvCacheRef> || requires(const C& cache) {
  { cache.kv_cache_ref() } -> std::convertible_to<KvCacheRef>;
};

KVMELD_NAMESPACE_END
