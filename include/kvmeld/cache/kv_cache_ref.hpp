#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/plane_ref.hpp>

KVMELD_NAMESPACE_BEGIN

/// A non-owning view of a whole cache: a geometry and one plane view per (layer, plane), all over
/// the same tokens.
///
/// `tokens()` counts what every plane holds, holes included. Layout factories make views that keep
/// this; a view that was put together by hand is checked against its geometry and its planes by
/// whatever reads it. Copies share the geometry and copy the plane descriptors, never elements.
/// Planes of one layer have the same holes.
/// @tparam Byte `std::byte` for caches that may be written, `const std::byte` otherwise.
template <class Byte>
class BasicKvCacheRef {
 public:
  using plane_type = BasicPlaneRef<Byte>;

  BasicKvCacheRef() = default;
  /// @param planes layer-major, in the order of `geometry->layers[l].planes`.
  BasicKvCacheRef(std::shared_ptr<const Geometry> geometry, std::vector<plane_type> planes,
                  std::int64_t tokens)
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
      : BasicKvCacheRef(o.shared_geometry(),
                        std::vector<plane_type>(o.planes().begin(), o.planes().end()), o.tokens()) {
  }

  [[nodiscard]] const Geometry& geometry() const noexcept { return *geometry_; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return geometry_;
  }
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::span<const plane_type> planes() const noexcept { return planes_; }
  [[nodiscard]] const plane_type& plane(std::size_t layer, std::size_t index) const noexcept {
    return planes_[first_plane_[layer] + index];
  }
  /// The same memory, its first `count` tokens: all of them where there are fewer, none where
  /// `count` is below 0.
  [[nodiscard]] BasicKvCacheRef first(std::int64_t count) const {
    BasicKvCacheRef out = *this;
    out.tokens_ = (std::max)((std::min)(count, tokens_), std::int64_t{0});
    for (plane_type& plane : out.planes_) plane.tokens = (std::min)(plane.tokens, out.tokens_);
    return out;
  }
  /// The same view, its elements and scales declared to lie in `space`.
  ///
  /// Factories and hand-made views take memory for the host's, `dlpack_view` takes the tensors'
  /// word. Say `device` of device memory, and entries that would read it on the host refuse it with
  /// `memory_space`.
  [[nodiscard]] BasicKvCacheRef in(MemorySpace space) const {
    BasicKvCacheRef out = *this;
    for (plane_type& plane : out.planes_) plane.space = space;
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

namespace detail {

/// One plane of `check_view_planes`. O(1).
template <class Byte>
[[nodiscard]] Status check_view_plane(const BasicKvCacheRef<Byte>& view, std::size_t l,
                                      std::size_t p, const char* who) {
  const BasicPlaneRef<Byte>& plane = view.plane(l, p);
  const PlaneShape& declared = view.geometry().layers[l].planes[p];
  if (plane.shape != declared) {
    return error(ErrorCode::geometry_mismatch, who, ": layer ", l, " plane ", p, " is viewed as ",
                 plane.shape.heads, " heads of ", plane.shape.channels, " ",
                 to_string(plane.shape.type), ", the geometry declares ", declared.heads, " of ",
                 declared.channels, " ", to_string(declared.type),
                 "; give PlaneRef::shape the geometry's");
  }
  if (plane.tokens < view.tokens() || view.tokens() < 0) {
    return error(ErrorCode::token_count_mismatch, who, ": layer ", l, " plane ", p, " holds ",
                 plane.tokens, " tokens, the view says ", view.tokens());
  }
  return {};
}

/// Refuses a view without geometry, or with another number of planes. O(layers).
template <class Byte>
[[nodiscard]] Status check_view_count(const BasicKvCacheRef<Byte>& view, const char* who) {
  if (!view.valid()) return error(ErrorCode::invalid_argument, who, ": the view has no geometry");
  std::size_t planes = 0;
  for (const LayerShape& layer : view.geometry().layers) planes += layer.planes.size();
  if (view.planes().size() == planes) return {};
  return error(ErrorCode::invalid_argument, who, ": a view of ", view.planes().size(),
               " planes over a geometry of ", planes);
}

/// Refuses a view that its planes belie: as many as the geometry has, of its shapes, over at least
/// the view's tokens.
///
/// What a layout factory made passes; a view that was put together by hand may not. O(planes).
/// Errors: `invalid_argument` (no geometry, another number of planes), `geometry_mismatch`,
/// `token_count_mismatch`.
template <class Byte>
[[nodiscard]] Status check_view_planes(const BasicKvCacheRef<Byte>& view, const char* who) {
  KVMELD_TRY(check_view_count(view, who));
  for (std::size_t l = 0; l < view.geometry().layers.size(); ++l) {
    for (std::size_t p = 0; p < view.geometry().layers[l].planes.size(); ++p) {
      KVMELD_TRY(check_view_plane(view, l, p, who));
    }
  }
  return {};
}

/// Refuses a plane that the host cannot reach, with what to do.
KVMELD_LAZY [[nodiscard]] Status check_host_reaches(MemorySpace space, const char* who) {
  if (host_reaches(space)) return {};
  return error(ErrorCode::memory_space, who, ": a plane lies in ", to_string(space),
               " memory, which the host cannot reach; copy it to host memory and view the copy, or "
               "give the view to a ",
               "gpu::Stream");
}

/// Refuses a plane that declares scales apart and points to none: what every reader of scales asks.
template <class Byte>
[[nodiscard]] Status check_scales(const BasicPlaneRef<Byte>& plane, const char* who) {
  if (plane.shape.scales == ScaleScheme::none || plane.scales.data != nullptr) return {};
  return error(ErrorCode::invalid_argument, who, ": a plane of ", plane.shape.heads, " heads of ",
               plane.shape.channels, " ", to_string(plane.shape.type),
               " declares scales and gives none; set PlaneRef::scales");
}

/// What every entry that reads or writes a view's rows on the host asks before it touches one:
/// `check_view_planes`, and that the elements lie where the host reaches them. Errors: those,
/// `memory_space`.
template <class Byte>
[[nodiscard]] Status check_on_host(const BasicKvCacheRef<Byte>& view, const char* who) {
  KVMELD_TRY(check_view_planes(view, who));
  for (const BasicPlaneRef<Byte>& plane : view.planes())
    KVMELD_TRY(check_host_reaches(plane.space, who));
  return {};
}

}  // namespace detail

/// A cache that can be read in place: it hands out plane views over its own memory.
///
/// Semantic requirements: `kv_cache_ref()` costs no copy of elements and stays valid while the
/// cache lives unchanged.
template <class C>
concept KvCacheView = std::convertible_to<const C&, KvCacheRef> || requires(const C& cache) {
  { cache.kv_cache_ref() } -> std::convertible_to<KvCacheRef>;
};

KVMELD_NAMESPACE_END
