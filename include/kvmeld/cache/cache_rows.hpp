#pragma once

/// Single rows of a cache as numbers, for looking, for tests and for small edits: whatever the
/// layout and element type.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/normalise.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN

/// Names one row of a cache: the channels of one head of one token.
struct CacheRow {
  std::size_t layer = 0;
  std::size_t plane = 0;   ///< index into the layer's planes: 0 keys, 1 values in most models
  std::int64_t token = 0;  ///< index into the view's tokens
  std::int32_t head = 0;
};

namespace detail {

/// Where a row lies, or why there is none.
template <class Byte>
[[nodiscard]] Result<std::int64_t> slot_of_row(const BasicKvCacheRef<Byte>& cache,
                                               const CacheRow& row, const char* who) {
  KVMELD_TRY(check_view_count(cache, who));
  const std::vector<LayerShape>& layers = cache.geometry().layers;
  if (row.layer >= layers.size()) {
    return error(ErrorCode::invalid_argument, who, ": layer ", row.layer, " of ", layers.size());
  }
  if (row.plane >= layers[row.layer].planes.size()) {
    return error(ErrorCode::invalid_argument, who, ": plane ", row.plane, " of ",
                 layers[row.layer].planes.size(), " in layer ", row.layer);
  }
  const BasicPlaneRef<Byte>& plane = cache.plane(row.layer, row.plane);
  KVMELD_TRY(check_plane(plane.shape, row.layer, row.plane));
  KVMELD_TRY(check_view_plane(cache, row.layer, row.plane, who));
  KVMELD_TRY(check_host_reaches(plane.space, who));
  if (row.token < 0 || row.token >= cache.tokens() || row.head < 0 ||
      row.head >= plane.shape.heads) {
    return error(ErrorCode::invalid_argument, who, ": token ", row.token, " of ", cache.tokens(),
                 ", head ", row.head, " of ", plane.shape.heads);
  }
  const std::int64_t slot = plane.slots.slot(row.token);
  if (slot < 0) {
    return error(ErrorCode::not_found, who, ": layer ", row.layer, " holds no row of token ",
                 row.token);
  }
  return slot;
}

}  // namespace detail

/// One row as f32, its scales applied. (channel)
///
/// O(channels + layers). Errors: `invalid_argument` (an index that the cache does not have, or
/// scales that are declared and not given), `not_found` (a hole: the layer does not hold the
/// token), `memory_space`, `geometry_mismatch` or `token_count_mismatch` (a view that its planes
/// belie).
KVMELD_LAZY [[nodiscard]] Result<std::vector<float>> read_row(const KvCacheRef& cache,
                                                              const CacheRow& row) {
  const auto slot = detail::slot_of_row(cache, row, "read_row");
  if (!slot) return slot.error();
  const PlaneRef& plane = cache.plane(row.layer, row.plane);
  const PlaneShape& shape = plane.shape;
  KVMELD_TRY(detail::check_scales(plane, "read_row"));
  std::vector<std::byte> bytes(static_cast<std::size_t>(detail::row_bytes(shape)));
  detail::gather_row(plane, *slot, row.head, bytes.data());
  std::vector<float> values(static_cast<std::size_t>(shape.channels));
  if (shape.channels > 0)
    detail::load_row(shape.type, Isa::baseline, bytes.data(), shape.channels, values.data());
  const std::int64_t groups = detail::row_scales(shape);
  for (std::int32_t c = 0; c < shape.channels && groups > 0; ++c) {
    values[static_cast<std::size_t>(c)] *=
        plane.scales.at(*slot, row.head, c / (shape.channels / groups));
  }
  return values;
}

/// Writes one row, each number rounded once to the plane's elements; −0 becomes +0, as `seal` has
/// it. (channel)
///
/// O(channels + layers). Errors, with the row as it was: those of `read_row`;
/// `token_count_mismatch` where `values` are not one a channel; `unsupported` for planes with
/// scales apart, which a view cannot write; `non_finite` for a number that is not finite, or beyond
/// the element type.
KVMELD_LAZY [[nodiscard]] Status write_row(const MutableKvCacheRef& cache, const CacheRow& row,
                                           std::span<const float> values) {
  using detail::error;
  const auto slot = detail::slot_of_row(cache, row, "write_row");
  if (!slot) return slot.error();
  const MutablePlaneRef& plane = cache.plane(row.layer, row.plane);
  const PlaneShape& shape = plane.shape;
  if (values.size() != static_cast<std::size_t>(shape.channels)) {
    return error(ErrorCode::token_count_mismatch, "write_row: ", values.size(), " numbers for ",
                 shape.channels, " channels");
  }
  if (shape.scales != ScaleScheme::none) {
    return error(ErrorCode::unsupported, "write_row: plane ", row.plane, " of layer ", row.layer,
                 " has its scales apart, which a view cannot write");
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(detail::row_bytes(shape)));
  const auto finite = [](float x) { return std::isfinite(x); };
  bool bad = !std::all_of(values.begin(), values.end(), finite);
  if (!bad && shape.channels > 0)
    detail::store_row(shape.type, Isa::baseline, values.data(), shape.channels, bytes.data());
  if (bad || !detail::is_finite(detail::normalise(shape.type, bytes.data(), bytes.size()))) {
    return error(ErrorCode::non_finite, "write_row: a number for token ", row.token, " of layer ",
                 row.layer, " plane ", row.plane, " is not finite in ", to_string(shape.type));
  }
  detail::scatter_row(plane, *slot, row.head, bytes.data());
  return {};
}

KVMELD_NAMESPACE_END
