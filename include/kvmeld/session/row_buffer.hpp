#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment_view.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/normalise.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Rows of tokens that are not sealed yet, copied out of the engine's cache in canonical order, so
/// that the engine may go on.
class RowBuffer {
 public:
  explicit RowBuffer(std::shared_ptr<const Geometry> geometry) : geometry_(std::move(geometry)) {
    present_.resize(geometry_->layers.size());
    for (const LayerShape& layer : geometry_->layers) {
      for (const PlaneShape& shape : layer.planes) planes_.push_back({shape, {}, {}});
    }
  }

  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return geometry_;
  }

  /// Copies the rows of tokens `first` … `rows.tokens() − 1` behind those that are there. On an
  /// error nothing changed.
  KVMELD_LAZY Status append(const KvCacheRef& rows, std::int64_t first) {
    KVMELD_TRY(check(rows));
    Status status;
    std::size_t index = 0;
    for (std::size_t l = 0; l < geometry_->layers.size() && status; ++l) {
      for (std::size_t p = 0; p < geometry_->layers[l].planes.size() && status; ++p, ++index) {
        status = append_plane(planes_[index], rows.plane(l, p), first, rows.tokens());
        if (!status)
          status = error(status.code(), "layer ", l, " plane ", p, ": ", status.message());
      }
    }
    if (!status) {
      shrink(tokens_);
      return status;
    }
    for (std::size_t l = 0; l < geometry_->layers.size(); ++l) {
      for (std::int64_t t = first; t < rows.tokens(); ++t) {
        present_[l].push_back(
            geometry_->layers[l].planes.empty() || rows.plane(l, 0).slots.slot(t) >= 0 ? 1 : 0);
      }
    }
    tokens_ += rows.tokens() - first;
    return {};
  }

  /// Forgets the first `count` tokens. O(tokens that stay).
  void drop_front(std::int64_t count) {
    const auto n = static_cast<std::ptrdiff_t>(count);
    for (PlaneRows& plane : planes_) {
      plane.bytes.erase(plane.bytes.begin(), plane.bytes.begin() + n * token_bytes(plane.shape));
      plane.scales.erase(plane.scales.begin(),
                         plane.scales.begin() + n * token_scales(plane.shape));
    }
    for (std::vector<std::uint8_t>& layer : present_) layer.erase(layer.begin(), layer.begin() + n);
    tokens_ -= count;
  }

  /// A view and the slot lists of layers that do not hold every token; stays true until the buffer
  /// changes.
  struct View {
    std::vector<std::vector<std::int32_t>> slots;
    KvCacheRef ref;
  };
  /// The first `count` tokens.
  KVMELD_LAZY [[nodiscard]] View view(std::int64_t count) const {
    View out;
    std::vector<PlaneRef> planes;
    std::size_t index = 0;
    for (std::size_t l = 0; l < geometry_->layers.size(); ++l) {
      std::vector<std::int32_t>& slots = out.slots.emplace_back();
      bool all = true;
      for (std::int64_t t = 0; t < count; ++t) {
        const bool here = present_[l][static_cast<std::size_t>(t)] != 0;
        all = all && here;
        slots.push_back(here ? static_cast<std::int32_t>(t) : -1);
      }
      for (std::size_t p = 0; p < geometry_->layers[l].planes.size(); ++p, ++index) {
        const PlaneRows& plane = planes_[index];
        planes.push_back(
            canonical_plane(plane.shape, plane.bytes.data(), plane.scales.data(), count));
        if (!all) planes.back().slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
      }
    }
    out.ref = KvCacheRef(geometry_, std::move(planes), count);
    return out;
  }

 private:
  struct PlaneRows {
    PlaneShape shape;
    std::vector<std::byte> bytes;  // (token, head, channel)
    std::vector<float> scales;     // (token, head, group)
  };

  [[nodiscard]] static std::ptrdiff_t token_bytes(const PlaneShape& shape) {
    return row_bytes(shape) * shape.heads;
  }
  [[nodiscard]] static std::ptrdiff_t token_scales(const PlaneShape& shape) {
    return row_scales(shape) * shape.heads;
  }

  KVMELD_LAZY [[nodiscard]] Status check(const KvCacheRef& rows) const {
    KVMELD_TRY(check_on_host(rows, "append"));
    for (std::size_t l = 0; l < geometry_->layers.size(); ++l) {
      for (std::size_t p = 0; p < geometry_->layers[l].planes.size(); ++p) {
        const PlaneRef& plane = rows.plane(l, p);
        KVMELD_TRY(check_scales(plane, "append"));
        for (std::int64_t t = 0; p > 0 && t < rows.tokens(); ++t) {
          if ((plane.slots.slot(t) >= 0) != (rows.plane(l, 0).slots.slot(t) >= 0)) {
            return error(ErrorCode::token_count_mismatch, "layer ", l, ": plane ", p,
                         " and plane 0 disagree about token ", t);
          }
        }
      }
    }
    return {};
  }

  KVMELD_LAZY [[nodiscard]] static Status append_plane(PlaneRows& plane, const PlaneRef& rows,
                                                       std::int64_t first, std::int64_t last) {
    const std::size_t before = plane.bytes.size(), scales_before = plane.scales.size();
    const std::int64_t count = last - first;
    plane.bytes.resize(before + static_cast<std::size_t>(count * token_bytes(plane.shape)));
    plane.scales.resize(scales_before +
                        static_cast<std::size_t>(count * token_scales(plane.shape)));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t slot = rows.slots.slot(first + i);
      if (slot < 0) continue;
      gather_heads(
          rows, slot,
          plane.bytes.data() + before + static_cast<std::size_t>(i * token_bytes(plane.shape)));
      if (plane.shape.scales != ScaleScheme::none) {
        gather_scales(rows, slot,
                      plane.scales.data() + scales_before +
                          static_cast<std::size_t>(i * token_scales(plane.shape)));
      }
    }
    const auto scales = std::as_writable_bytes(std::span(plane.scales).subspan(scales_before));
    const double scale = normalise(ElementType::f32, scales.data(), scales.size());
    if (!is_finite(normalise(plane.shape.type, plane.bytes.data() + before,
                             plane.bytes.size() - before)) ||
        !is_finite(scale)) {
      return error(ErrorCode::non_finite, "one of ", count, " new rows holds a NaN or an infinity");
    }
    return {};
  }
  void shrink(std::int64_t tokens) {
    for (PlaneRows& plane : planes_) {
      plane.bytes.resize((std::min)(plane.bytes.size(),
                                    static_cast<std::size_t>(tokens * token_bytes(plane.shape))));
      plane.scales.resize((std::min)(plane.scales.size(),
                                     static_cast<std::size_t>(tokens * token_scales(plane.shape))));
    }
  }

  std::shared_ptr<const Geometry> geometry_;
  std::vector<PlaneRows> planes_;                   // layer-major
  std::vector<std::vector<std::uint8_t>> present_;  // (layer, token)
  std::int64_t tokens_ = 0;
};

}  // namespace detail
KVMELD_NAMESPACE_END
