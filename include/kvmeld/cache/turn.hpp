#pragma once

#include <cstdint>

#include <kvmeld/cache/rope.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Which channels of a row turn, how they pair, and by what.
struct Turn {
  const float* table = nullptr;  ///< cosines, then sines (rotary_channels)
  std::int32_t channels = 0;
  std::int32_t first_channel = 0;
  std::int32_t rotary_channels = 0;
  RopePairing pairing = RopePairing::half_split;
};

}  // namespace detail
KVMELD_NAMESPACE_END
