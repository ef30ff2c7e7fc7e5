#pragma once

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// The contributions of one head's row, as a fuser of the mix form reads them on a host: f32,
/// ascending as the aligner gave them.
///
/// Device lanes read through another type with the same functions, which loads and turns a channel
/// when it is asked for.
struct HeadRows {
  /// (contribution, channel); zeros from the last channel to the next multiple of 32.
  const float* values = nullptr;
  std::ptrdiff_t stride = 0;       ///< floats between contributions
  const float* weights = nullptr;  ///< (contribution) above 0
  std::int32_t contributions = 0;
  std::int32_t width = 0;  ///< channels
  std::int32_t layer_index = 0;
  std::int32_t head_index = 0;
  Plane plane_kind = Plane::key;

  [[nodiscard]] KVMELD_HD int count() const noexcept { return contributions; }
  [[nodiscard]] KVMELD_HD int channels() const noexcept { return width; }
  [[nodiscard]] KVMELD_HD int layer() const noexcept { return layer_index; }
  [[nodiscard]] KVMELD_HD int head() const noexcept { return head_index; }
  [[nodiscard]] KVMELD_HD Plane plane() const noexcept { return plane_kind; }
  [[nodiscard]] KVMELD_HD float weight(int contribution) const noexcept {
    return weights[contribution];
  }
  [[nodiscard]] KVMELD_HD float value(int contribution, int channel) const noexcept {
    return values[contribution * stride + channel];
  }
};

inline constexpr int max_mixed = 64;  ///< contributions of a row
/// Contributions times channels (a multiple of 32) of a row.
inline constexpr int max_mixed_values = 16384;

KVMELD_NAMESPACE_END
