#pragma once

/// Keys of a cache view as numbers, turned by the library's own rotation and fitted to what an
/// engine has.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/rope_rotate.hpp>
#include <kvmeld/cache/rope_table.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace llama {
namespace detail {

/// Undoes the orthonormal Hadamard transform of each block of `side` channels; it is its own
/// inverse.
inline void hadamard_blocks(float* row, std::int32_t channels, std::int32_t side) {
  const float norm = 1.0F / __builtin_sqrtf(static_cast<float>(side));
  for (std::int32_t block = 0; block < channels; block += side) {
    float* const x = row + block;
    for (std::int32_t half = 1; half < side; half *= 2) {
      for (std::int32_t i = 0; i < side; i += 2 * half) {
        for (std::int32_t j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
      }
    }
    for (std::int32_t i = 0; i < side; ++i) x[i] *= norm;
  }
}

/// The keys of one layer in the model's own basis, f32, for the tokens that both views' layers
/// hold. (token, head, channel)
[[nodiscard]] inline std::vector<float> layer_keys(const KvCacheRef& view, const KvCacheRef& other,
                                                   std::size_t layer) {
  const PlaneRef& plane = view.plane(layer, 0);
  const PlaneRef& mirror = other.plane(layer, 0);
  const auto channels = static_cast<std::size_t>(plane.shape.channels);
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(byte_size(plane.shape.type, plane.shape.channels)));
  std::vector<float> keys;
  for (std::int64_t t = 0; t < view.tokens(); ++t) {
    const std::int64_t slot = plane.slots.slot(t);
    if (slot < 0 || mirror.slots.slot(t) < 0) continue;
    for (std::int64_t head = 0; head < plane.shape.heads; ++head) {
      ::kvmeld::detail::gather_row(plane, slot, head, bytes.data());
      keys.resize(keys.size() + channels);
      float* const row = keys.data() + keys.size() - channels;
      ::kvmeld::detail::load_row<Isa::baseline>(plane.shape.type, bytes.data(),
                                                plane.shape.channels, row);
      if (plane.shape.hadamard > 0)
        hadamard_blocks(row, plane.shape.channels, plane.shape.hadamard);
    }
  }
  return keys;
}

struct ShiftFit {
  double error = 0.0;        ///< at the best common scale
  double plain_error = 0.0;  ///< at scale 1
  double scale = 1.0;
  double norm_change = 0.0;
};

/// What storage alone may cost: two roundings of the element type, with room for angles that the
/// engine computes in f32.
[[nodiscard]] inline double storage_tolerance(ElementType type) noexcept {
  switch (type) {
    case ElementType::f32:
      return 0.001;
    case ElementType::f16:
      return 0.002;
    case ElementType::bf16:
      return 0.01;
    default:
      return 0.02;
  }
}

/// Turns keys by the library's own table and row function and fits them to the engine's with one
/// common scale.
[[nodiscard]] inline Result<ShiftFit> fit_shift(const LayerShape& layer, std::vector<float> keys,
                                                std::span<const float> engine, std::int64_t shift,
                                                std::int64_t context_length) {
  const PlaneShape& shape = layer.planes[0];
  const std::int64_t shifts[1] = {shift};
  const Result<RopeTable> table = RopeTable::build(layer.rope, shifts, context_length);
  if (!table) return table.error();
  ShiftFit fit;
  double ours_engine = 0.0, ours_ours = 0.0, engine_engine = 0.0, off = 0.0;
  const auto channels = static_cast<std::size_t>(shape.channels);
  for (std::size_t at = 0; at + channels <= keys.size(); at += channels) {
    double before = 0.0, after = 0.0;
    for (std::size_t c = 0; c < channels; ++c)
      before += static_cast<double>(keys[at + c]) * static_cast<double>(keys[at + c]);
    if (layer.rope.kind == RopeKind::rotary)
      rotate_row(layer.rope.pairing, layer.rope.first_channel, layer.rope.rotary_channels,
                 table->row(0), keys.data() + at);
    for (std::size_t c = 0; c < channels; ++c) {
      const double x = static_cast<double>(keys[at + c]), y = static_cast<double>(engine[at + c]);
      after += x * x;
      off += (x - y) * (x - y);
      ours_engine += x * y;
      engine_engine += y * y;
    }
    ours_ours += after;
    if (before > 0.0) {
      const double change = __builtin_fabs(__builtin_sqrt(after / before) - 1.0);
      if (change > fit.norm_change) fit.norm_change = change;
    }
  }
  if (ours_ours <= 0.0 || engine_engine <= 0.0) return fit;
  fit.scale = ours_engine / ours_ours;
  fit.plain_error = __builtin_sqrt(off / engine_engine);
  const double rest = engine_engine - fit.scale * ours_engine;
  fit.error = rest > 0.0 ? __builtin_sqrt(rest / engine_engine) : 0.0;
  return fit;
}

}  // namespace detail
}  // namespace llama
KVMELD_NAMESPACE_END
