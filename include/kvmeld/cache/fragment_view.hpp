#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/row_copy.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// A canonical plane: rows one after the other in the order (token, head), scales likewise.
template <class Byte>
[[nodiscard]] BasicPlaneRef<Byte> canonical_plane(const PlaneShape& shape, Byte* data,
                                                  const float* scales, std::int64_t tokens) {
  BasicPlaneRef<Byte> plane;
  plane.data = data;
  plane.shape = shape;
  plane.tokens = tokens;
  plane.head_stride = shape.channels;
  plane.token_stride = static_cast<std::int64_t>(shape.channels) * shape.heads;
  if (shape.scales != ScaleScheme::none) {
    const std::int64_t groups = row_scales(shape);
    plane.scales = {.data = scales,
                    .slot_stride = groups * shape.heads,
                    .head_stride = groups,
                    .group_stride = 1};
  }
  return plane;
}

}  // namespace detail

/// A read view of one payload of a fragment, with the slot lists that mark tokens which a layer
/// does not hold.
///
/// Owns the lists and shares the payload's bytes; `ref()` stays true while this lives. Where there
/// is nothing to view, because the fragment is empty, has no such payload, or its bytes are
/// evicted, `ref().valid()` is false, and whatever is given that view refuses it.
class FragmentView {
 public:
  KVMELD_LAZY explicit FragmentView(const Fragment& fragment, std::size_t payload = 0)
      : fragment_(fragment) {
    if (!fragment.valid() || payload >= fragment.payloads().size() ||
        fragment.payloads()[payload].bytes == nullptr)
      return;
    const Payload& source = fragment.payloads()[payload];
    for (const TokenSet& set : source.token_sets) {
      std::vector<std::int32_t> slots;
      if (!set.all) {
        slots.assign(static_cast<std::size_t>(fragment.token_count()), -1);
        for (std::size_t i = 0; i < set.present.size(); ++i) {
          slots[static_cast<std::size_t>(set.present[i])] = static_cast<std::int32_t>(i);
        }
      }
      slots_.push_back(std::move(slots));
    }
    std::vector<PlaneRef> planes;
    const Geometry& geometry = fragment.geometry();
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      const std::vector<std::int32_t>& slots = slots_[source.layer_set[l]];
      for (const PlaneShape& shape : geometry.layers[l].planes) {
        const std::size_t index = planes.size();
        PlaneRef plane = detail::canonical_plane(
            shape, static_cast<const std::byte*>(source.bytes.get() + source.plane_offsets[index]),
            reinterpret_cast<const float*>(source.bytes.get() + source.scale_offsets[index]),
            fragment.token_count());
        if (!source.token_sets[source.layer_set[l]].all)
          plane.slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
        planes.push_back(plane);
      }
    }
    ref_ = KvCacheRef(fragment.shared_geometry(), std::move(planes), fragment.token_count());
  }
  FragmentView(const FragmentView&) = delete;
  FragmentView& operator=(const FragmentView&) = delete;

  [[nodiscard]] const KvCacheRef& ref() const noexcept { return ref_; }
  [[nodiscard]] const KvCacheRef& kv_cache_ref() const noexcept { return ref_; }

 private:
  Fragment fragment_;
  std::vector<std::vector<std::int32_t>> slots_;
  KvCacheRef ref_;
};

KVMELD_NAMESPACE_END
