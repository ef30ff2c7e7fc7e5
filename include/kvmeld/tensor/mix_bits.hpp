#pragma once

#include <cstdint>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A bijection of words that leaves no pattern (the finaliser of SplitMix64: Steele, Lea, Flood
/// 2014).
[[nodiscard]] KVMELD_HD constexpr std::uint64_t mix_bits(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

}  // namespace detail
KVMELD_NAMESPACE_END
