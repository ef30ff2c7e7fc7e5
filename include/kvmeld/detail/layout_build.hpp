#pragma once

/// Building blocks of the layouts.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// The memory of an engine's cache: one span of bytes for each tensor, exactly as large as the
/// tensor.
/// @tparam Byte `std::byte` for a view that may be written, `const std::byte` otherwise. It may be
/// device memory, which the caller declares by `in(MemorySpace::device)` on the view.
template <class Byte>
using Buffers = std::vector<std::span<Byte>>;

/// A key tensor and a value tensor for each layer.
template <class Byte>
struct KeyValueBuffers {
  Buffers<Byte> keys = {};    ///< one a layer
  Buffers<Byte> values = {};  ///< one a layer
};

/// Scales of integer or 8-bit planes: one span for each plane, layer-major; empty where a plane has
/// none, or no vector at all.
///
/// Of a layout with S slots: `per_tensor` (1), `per_token_head` (S, heads), `per_channel_group` (S,
/// heads, channels / group).
using ScaleTables = std::vector<std::span<const float>>;

namespace detail {

/// The offset and strides of a plane's rows in its buffer, in elements.
struct PlaneStrides {
  std::int64_t offset = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t channel = 1;
  std::int64_t channel_split = 0;
  std::int64_t split = 0;
  std::int64_t block_size = 0;
  std::int64_t block = 0;
};

/// Product of extents, or -1 where one is negative or the product of the others exceeds any memory.
///
/// An extent of 0 is left out of the second check, since the products of the other extents are
/// strides.
[[nodiscard]] inline std::int64_t extent_product(
    std::initializer_list<std::int64_t> extents) noexcept {
  std::int64_t bound = 1;
  bool empty = false;
  for (const std::int64_t extent : extents) {
    empty = empty || extent == 0;
    if (extent < 0 || __builtin_mul_overflow(bound, extent == 0 ? 1 : extent, &bound) ||
        bound > max_extent)
      return -1;
  }
  return empty ? 0 : bound;
}

template <class Byte>
inline constexpr ErrorCode too_small =
    std::is_const_v<Byte> ? ErrorCode::truncated : ErrorCode::output_too_small;

/// Checks that a buffer holds exactly the declared elements: this detects a wrong head count, head
/// size, dtype or block size.
template <class Byte>
[[nodiscard]] Status expect_elements(std::span<Byte> buffer, ElementType type,
                                     std::int64_t elements) {
  if (elements < 0 || elements % block_elements(type) != 0) {
    return error(
        ErrorCode::invalid_argument,
        "the declared extents are negative, beyond 2^48 elements, or cut a block of elements");
  }
  const std::int64_t bytes = elements / block_elements(type) * block_bytes(type);
  if (std::ssize(buffer) < bytes) {
    return error(too_small<Byte>, "the declared shape takes ", bytes, " bytes, the buffer has ",
                 buffer.size());
  }
  if (std::ssize(buffer) > bytes) {
    return error(ErrorCode::oversized, "the declared shape takes ", bytes,
                 " bytes, the buffer has ", buffer.size(),
                 "; declare the axis that is missing, or pass the tensor's bytes only");
  }
  return {};
}

/// Collects a cache's planes in geometry order, checking each.
template <class Byte>
class LayoutBuilder {
 public:
  LayoutBuilder(std::shared_ptr<const Geometry> geometry, const PerLayer<TokenPlacement>& tokens,
                const ScaleTables& scales)
      : geometry_(std::move(geometry)), placements_(tokens), scales_(scales) {
    fail(check());
  }

  [[nodiscard]] bool ok() const noexcept { return status_.ok(); }
  [[nodiscard]] std::size_t layers() const noexcept { return geometry_->layers.size(); }
  [[nodiscard]] const LayerShape& layer(std::size_t l) const noexcept {
    return geometry_->layers[l];
  }

  /// Keeps the first failure; later calls do nothing.
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  /// Adds the layer and the plane to the message of a failed check.
  void expect(Status status, std::size_t layer, const char* what) {
    if (!status) fail(error(status.code(), "layer ", layer, " ", what, ": ", status.message()));
  }
  void expect_count(std::size_t count, std::size_t wanted, const char* what) {
    if (count != wanted)
      fail(error(ErrorCode::invalid_argument, count, " ", what, " for ", wanted));
  }
  /// Checks that writable tensors do not overlap; read-only views may share a tensor.
  void expect_apart(std::initializer_list<const Buffers<Byte>*> groups) {
    if constexpr (!std::is_const_v<Byte>) {
      std::vector<Segment> all;
      for (const Buffers<Byte>* group : groups) {
        for (const std::span<Byte> b : *group) {
          const auto first = reinterpret_cast<std::uintptr_t>(b.data());
          if (!b.empty()) all.push_back({first, first + b.size()});
        }
      }
      std::sort(all.begin(), all.end());
      for (std::size_t i = 1; i < all.size(); ++i) {
        if (all[i].first < all[i - 1].last) {
          return fail(error(ErrorCode::aliasing, "two tensors that may be written share ",
                            all[i - 1].last - all[i].first, " bytes"));
        }
      }
    }
  }

  /// Sets the memory space of the planes that are added from now on.
  void lies_in(MemorySpace space) noexcept { space_ = space; }

  /// Adds the next plane. @param slots how many the layout has for this layer.
  void add(std::size_t l, std::size_t index, std::span<Byte> buffer, const PlaneStrides& s,
           std::int64_t slots) {
    add(l, index, buffer, s, slots, placements_[l], ScaleRef{});
  }
  /// Adds a plane with its own placement, and with scales that the layout itself holds.
  void add(std::size_t l, std::size_t index, std::span<Byte> buffer, const PlaneStrides& s,
           std::int64_t slots, const TokenPlacement& placement, const ScaleRef& inner_scales) {
    if (!ok()) return;
    BasicPlaneRef<Byte> plane;
    plane.shape = geometry_->layers[l].planes[index];
    plane.tokens = placement.tokens;
    plane.token_stride = s.token;
    plane.head_stride = s.head;
    plane.channel_stride = s.channel;
    plane.channel_split = s.channel_split;
    plane.split_stride = s.split;
    plane.slots = {.kind = placement.kind,
                   .table = placement.table,
                   .first = placement.first,
                   .block_size = s.block_size,
                   .block_stride = s.block};
    plane.scales = inner_scales;
    plane.space = space_;
    const auto before = static_cast<std::size_t>(plane.byte_offset(s.offset));
    plane.data = buffer.data() == nullptr ? nullptr : buffer.data() + before;
    std::string where = "plane " + extend::decimal(index);
    expect(check_table(placement, s.block_size), l, where.c_str());
    if (plane.scales.data == nullptr) expect(outer_scales(plane, slots), l, where.c_str());
    if (ok())
      expect(check_plane_view(plane, buffer.size(), before, too_small<Byte>, slots), l,
             where.c_str());
    if constexpr (!std::is_const_v<Byte>) {
      if (ok()) expect(check_writable(plane), l, where.c_str());
    }
    planes_.push_back(plane);
  }

  [[nodiscard]] Result<BasicKvCacheRef<Byte>> finish() {
    if (!ok()) return status_;
    const std::int64_t tokens = placements_[0].tokens;
    return BasicKvCacheRef<Byte>(std::move(geometry_), std::move(planes_), tokens);
  }

 private:
  [[nodiscard]] Status check() const {
    if (geometry_ == nullptr)
      return error(ErrorCode::invalid_argument, "a layout needs a geometry");
    KVMELD_TRY(validate(*geometry_));
    std::size_t planes = 0;
    for (const LayerShape& layer : geometry_->layers) planes += layer.planes.size();
    if (!scales_.empty() && scales_.size() != planes) {
      return error(ErrorCode::invalid_argument, scales_.size(), " scale tables for ", planes,
                   " planes");
    }
    if (!placements_.covers(layers())) {
      return error(ErrorCode::invalid_argument, placements_.size(), " placements for ", layers(),
                   " layers");
    }
    for (std::size_t l = 1; l < layers(); ++l) {
      if (placements_[l].tokens != placements_[0].tokens) {
        return error(ErrorCode::token_count_mismatch, "layer ", l, " places ",
                     placements_[l].tokens, " tokens, layer 0 places ", placements_[0].tokens,
                     "; give holes (-1) where a layer holds fewer");
      }
    }
    return {};
  }
  Status outer_scales(BasicPlaneRef<Byte>& plane, std::int64_t slots) {
    const std::span<const float> table =
        scales_.empty() ? std::span<const float>() : scales_[planes_.size()];
    const bool one = plane.shape.scales == ScaleScheme::per_tensor;
    const std::int64_t groups = row_scales(plane.shape);
    const std::int64_t wanted = one ? 1 : extent_product({slots, plane.shape.heads, groups});
    if (std::ssize(table) != wanted) {
      return error(std::ssize(table) < wanted ? ErrorCode::truncated : ErrorCode::oversized,
                   table.size(), " scales where the plane declares ", wanted);
    }
    if (wanted == 0 && plane.shape.scales == ScaleScheme::none) return {};
    plane.scales = {.data = table.data(),
                    .slot_stride = one ? 0 : groups * plane.shape.heads,
                    .head_stride = one ? 0 : groups,
                    .group_stride = one ? 0 : 1};
    return {};
  }

  std::shared_ptr<const Geometry> geometry_;
  const PerLayer<TokenPlacement>& placements_;
  const ScaleTables& scales_;
  std::vector<BasicPlaneRef<Byte>> planes_;
  MemorySpace space_ = MemorySpace::host;
  Status status_;
};

/// Checks that a layer has a key plane and a value plane, and that they agree where they share a
/// tensor.
[[nodiscard]] inline Status expect_key_value(const LayerShape& layer, bool one_tensor,
                                             bool equal_channels = true) {
  const auto& p = layer.planes;
  if (p.size() != 2 || p[0].plane != Plane::key || p[1].plane != Plane::value) {
    return error(ErrorCode::unsupported,
                 "this layout holds a key and a value plane; the geometry declares ", p.size(),
                 " planes, or others");
  }
  if (one_tensor && (p[0].heads != p[1].heads || p[0].type != p[1].type ||
                     (equal_channels && p[0].channels != p[1].channels))) {
    return error(ErrorCode::geometry_mismatch,
                 "key and value share one tensor and differ: ", p[0].heads, " heads of ",
                 p[0].channels, " ", to_string(p[0].type), " against ", p[1].heads, " of ",
                 p[1].channels, " ", to_string(p[1].type));
  }
  return {};
}

}  // namespace detail

KVMELD_NAMESPACE_END
