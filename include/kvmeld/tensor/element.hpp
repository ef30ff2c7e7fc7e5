#pragma once

/// Element types of cache planes, and how many bytes their elements take.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/narrow_float.hpp>

KVMELD_NAMESPACE_BEGIN

/// How the elements of a plane are stored. Arithmetic is always in f32 (f64 where a rule says so).
enum class ElementType : std::uint8_t {
  f64,      ///< IEEE binary64; a row narrows it to f32
  f32,      ///< IEEE binary32
  f16,      ///< IEEE binary16
  bf16,     ///< the upper half of a binary32
  f8_e4m3,  ///< OCP 8-bit float "E4M3": no infinity, largest 448
  f8_e5m2,  ///< OCP 8-bit float "E5M2": the upper half of a binary16
  i8,       ///< signed integers; their scales lie elsewhere
  q8_0,     ///< blocks of 32: one f16 scale, then 32 signed bytes
};

[[nodiscard]] constexpr std::string_view to_string(ElementType type) noexcept {
  switch (type) {
    case ElementType::f64:
      return "f64";
    case ElementType::f32:
      return "f32";
    case ElementType::f16:
      return "f16";
    case ElementType::bf16:
      return "bf16";
    case ElementType::f8_e4m3:
      return "f8_e4m3";
    case ElementType::f8_e5m2:
      return "f8_e5m2";
    case ElementType::i8:
      return "i8";
    case ElementType::q8_0:
      return "q8_0";
  }
  return "unknown";
}

/// Elements that can only be stored together: 32 for q8_0, otherwise 1.
[[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t block_elements(ElementType type) noexcept {
  return type == ElementType::q8_0 ? 32 : 1;
}

/// Bytes of one such block; 0 for an enumerator that this build does not know.
[[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t block_bytes(ElementType type) noexcept {
  switch (type) {
    case ElementType::f64:
      return 8;
    case ElementType::f32:
      return 4;
    case ElementType::f16:
    case ElementType::bf16:
      return 2;
    case ElementType::f8_e4m3:
    case ElementType::f8_e5m2:
    case ElementType::i8:
      return 1;
    case ElementType::q8_0:
      return 34;
  }
  return 0;
}

/// Bytes that hold `elements` consecutive elements; a partial block counts whole.
[[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t byte_size(ElementType type,
                                                           std::ptrdiff_t elements) noexcept {
  const std::ptrdiff_t block = block_elements(type);
  return (elements + block - 1) / block * block_bytes(type);
}

/// One q8_0 block in memory: element i is `scale * values[i]`, a product that is exact in f32.
struct q8_0_block {
  f16 scale{};
  std::int8_t values[32] = {};
};
static_assert(sizeof(q8_0_block) == 34);

/// The `ElementType` under which values of a C++ type are stored.
template <class T>
struct element_type_of;
template <>
struct element_type_of<double> : std::integral_constant<ElementType, ElementType::f64> {};
template <>
struct element_type_of<float> : std::integral_constant<ElementType, ElementType::f32> {};
template <>
struct element_type_of<f16> : std::integral_constant<ElementType, ElementType::f16> {};
template <>
struct element_type_of<bf16> : std::integral_constant<ElementType, ElementType::bf16> {};
template <>
struct element_type_of<f8_e4m3> : std::integral_constant<ElementType, ElementType::f8_e4m3> {};
template <>
struct element_type_of<f8_e5m2> : std::integral_constant<ElementType, ElementType::f8_e5m2> {};
template <>
struct element_type_of<std::int8_t> : std::integral_constant<ElementType, ElementType::i8> {};
template <>
struct element_type_of<q8_0_block> : std::integral_constant<ElementType, ElementType::q8_0> {};
template <class T>
inline constexpr ElementType element_type_of_v = element_type_of<T>::value;

KVMELD_NAMESPACE_END
