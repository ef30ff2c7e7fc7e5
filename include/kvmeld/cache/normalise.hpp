#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Turns −0 into +0 in place; true if a NaN or an infinity was met. Subnormals stay.
/// @tparam Bits the unsigned integer of the element's width; `Exponent` its all-ones exponent mask.
template <class Bits, Bits Sign, Bits Exponent>
[[nodiscard]] bool normalise_bits(std::byte* bytes, std::size_t count) noexcept {
  bool bad = false;
  for (std::size_t i = 0; i < count; ++i) {
    Bits x;
    std::memcpy(&x, bytes + i * sizeof(Bits), sizeof(Bits));
    bad |= (x & Exponent) == Exponent;
    x = x == Sign ? Bits{0} : x;
    std::memcpy(bytes + i * sizeof(Bits), &x, sizeof(Bits));
  }
  return bad;
}

/// Normalises `bytes` of contiguous elements before they are hashed; true if one is not finite.
KVMELD_LAZY [[nodiscard]] bool normalise(ElementType type, std::byte* bytes, std::size_t byte_count) noexcept {
  switch (type) {
    case ElementType::f64:
      return normalise_bits<std::uint64_t, 0x8000000000000000ULL, 0x7FF0000000000000ULL>(bytes, byte_count / 8);
    case ElementType::f32: return normalise_bits<std::uint32_t, 0x80000000U, 0x7F800000U>(bytes, byte_count / 4);
    case ElementType::f16: return normalise_bits<std::uint16_t, 0x8000U, 0x7C00U>(bytes, byte_count / 2);
    case ElementType::bf16: return normalise_bits<std::uint16_t, 0x8000U, 0x7F80U>(bytes, byte_count / 2);
    case ElementType::f8_e5m2: return normalise_bits<std::uint8_t, 0x80U, 0x7CU>(bytes, byte_count);
    case ElementType::f8_e4m3: return normalise_bits<std::uint8_t, 0x80U, 0x7FU>(bytes, byte_count);
    case ElementType::i8: return false;
    case ElementType::q8_0: {
      bool bad = false;
      for (std::size_t at = 0; at + 34 <= byte_count; at += 34) {
        bad |= normalise_bits<std::uint16_t, 0x8000U, 0x7C00U>(bytes + at, 1);
      }
      return bad;
    }
  }
  return true;
}

}  // namespace detail
KVMELD_NAMESPACE_END
