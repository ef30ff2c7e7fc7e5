#pragma once

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/row_copy.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Works out where each plane of a payload lies, from its token sets and a validated geometry:
/// nobody is asked to say it.
///
/// Fills `plane_offsets`, `scale_offsets` and `byte_count` as `seal` does. Errors: `oversized`
/// above `max_bytes`.
KVMELD_LAZY [[nodiscard]] Status lay_out(const Geometry& geometry, Payload& payload,
                                         std::uint64_t max_bytes) {
  std::uint64_t total = 0;
  const auto grow = [&total, max_bytes](std::uint64_t rows, std::uint64_t row, bool pad) {
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(rows, row, &bytes)) return false;
    if (pad && __builtin_add_overflow(bytes, std::uint64_t{3}, &bytes)) return false;
    if (pad) bytes = bytes / 4 * 4;
    return !__builtin_add_overflow(total, bytes, &total) && total <= max_bytes;
  };
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const auto tokens = static_cast<std::uint64_t>(payload.layer_tokens(l));
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::uint64_t rows = 0;
      bool fits = !__builtin_mul_overflow(tokens, static_cast<std::uint64_t>(shape.heads), &rows);
      payload.plane_offsets.push_back(total);
      fits = fits && grow(rows, static_cast<std::uint64_t>(row_bytes(shape)), true);
      payload.scale_offsets.push_back(total);
      fits =
          fits && grow(rows, static_cast<std::uint64_t>(row_scales(shape)) * sizeof(float), false);
      if (!fits) {
        return error(ErrorCode::oversized, "layer ", l, ": ", tokens, " tokens of ", shape.heads,
                     " heads of ", shape.channels, " channels take a payload beyond ", max_bytes,
                     " bytes");
      }
    }
  }
  payload.byte_count = static_cast<std::size_t>(total);
  return {};
}

}  // namespace detail

KVMELD_NAMESPACE_END
