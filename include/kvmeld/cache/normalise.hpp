#pragma once

/// One pass over stored elements that turns −0 into +0 and finds the largest magnitude.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/row_codecs.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

template <class Bits>
[[nodiscard]] const unaligned_t<Bits>* elements_of(const std::byte* bytes) noexcept {
  return reinterpret_cast<const unaligned_t<Bits>*>(bytes);
}
template <class Bits>
[[nodiscard]] unaligned_t<Bits>* elements_of(std::byte* bytes) noexcept {
  return reinterpret_cast<unaligned_t<Bits>*>(bytes);
}

/// The largest magnitude among `count` floats, as bits without sign: magnitudes order like
/// integers, what is not finite last. Bytes that may be written have their −0 turned into +0;
/// subnormals stay.
/// @tparam Bits the unsigned integer of the element's width.
template <class Bits, class Byte>
KVMELD_ALWAYS_INLINE Bits largest_body(Byte* bytes, std::size_t count) noexcept {
  constexpr Bits sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr Bits rest = static_cast<Bits>(~sign);
  auto* const x = elements_of<Bits>(bytes);
  Bits most[row_block] = {};
  std::size_t i = 0;
  for (; i + row_block <= count; i += row_block) {
    KVMELD_KEEP_LOOP
    for (std::size_t c = 0; c < row_block; ++c) {
      const Bits v = x[i + c], magnitude = static_cast<Bits>(v & rest);
      most[c] = magnitude > most[c] ? magnitude : most[c];
      if constexpr (!std::is_const_v<Byte>) x[i + c] = v == sign ? Bits{0} : v;
    }
  }
  for (; i < count; ++i) {
    const Bits v = x[i], magnitude = static_cast<Bits>(v & rest);
    most[0] = magnitude > most[0] ? magnitude : most[0];
    if constexpr (!std::is_const_v<Byte>) x[i] = v == sign ? Bits{0} : v;
  }
  for (const Bits m : most) most[0] = m > most[0] ? m : most[0];
  return most[0];
}
template <class Bits, class Byte>
KVMELD_NOINLINE Bits largest_baseline(Byte* bytes, std::size_t count) noexcept {
  return largest_body<Bits>(bytes, count);
}
template <class Bits, class Byte>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE Bits largest_avx2(Byte* bytes, std::size_t count) noexcept {
  return largest_body<Bits>(bytes, count);
}
template <class Bits, class Byte>
[[nodiscard]] Bits largest_bits(Byte* bytes, std::size_t byte_count) noexcept {
  const std::size_t count = byte_count / sizeof(Bits);
  return best_isa() == Isa::baseline ? largest_baseline<Bits>(bytes, count)
                                     : largest_avx2<Bits>(bytes, count);
}

/// The same for blocks of a f16 scale and 32 bytes, whose magnitudes are at most 128.
template <class Byte>
[[nodiscard]] std::uint16_t largest_scale(Byte* bytes, std::size_t byte_count) noexcept {
  std::uint16_t most = 0;
  for (std::size_t at = 0; at + sizeof(q8_0_block) <= byte_count; at += sizeof(q8_0_block)) {
    const std::uint16_t scale = largest_body<std::uint16_t>(bytes + at, 1);
    most = scale > most ? scale : most;
  }
  return most;
}

/// The largest magnitude of contiguous elements, infinity where one is not finite. Blocks with a
/// scale give a bound of it.
template <class Byte>
[[nodiscard]] double largest_magnitude(ElementType type, Byte* bytes,
                                       std::size_t byte_count) noexcept {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto value = [&](auto number) {
    return number <= (std::numeric_limits<decltype(number)>::max)() ? static_cast<double>(number)
                                                                    : infinity;
  };
  switch (type) {
    case ElementType::f64:
      return value(__builtin_bit_cast(double, largest_bits<std::uint64_t>(bytes, byte_count)));
    case ElementType::f32:
      return value(bits_float(largest_bits<std::uint32_t>(bytes, byte_count)));
    case ElementType::f16:
      return value(to_float(f16{largest_bits<std::uint16_t>(bytes, byte_count)}));
    case ElementType::bf16:
      return value(to_float(bf16{largest_bits<std::uint16_t>(bytes, byte_count)}));
    case ElementType::f8_e5m2:
      return value(to_float(f8_e5m2{largest_bits<std::uint8_t>(bytes, byte_count)}));
    case ElementType::f8_e4m3:
      return value(to_float(f8_e4m3{largest_bits<std::uint8_t>(bytes, byte_count)}));
    case ElementType::i8:
      return 128;
    case ElementType::q8_0:
      return 128 * value(to_float(f16{largest_scale(bytes, byte_count)}));
  }
  return infinity;
}

/// Normalises contiguous elements before they are hashed: −0 becomes +0. Returns their largest
/// magnitude, infinity where one is not finite. O(bytes).
KVMELD_LAZY [[nodiscard]] double normalise(ElementType type, std::byte* bytes,
                                           std::size_t byte_count) noexcept {
  return largest_magnitude(type, bytes, byte_count);
}

/// The largest magnitude of contiguous elements, infinity where one is not finite. O(bytes).
KVMELD_LAZY [[nodiscard]] double peak_of(ElementType type, const std::byte* bytes,
                                         std::size_t byte_count) noexcept {
  return largest_magnitude(type, bytes, byte_count);
}

/// Whether a peak is that of finite numbers.
[[nodiscard]] inline bool is_finite(double peak) noexcept {
  return peak <= (std::numeric_limits<double>::max)();
}

/// The largest magnitude that f32 arithmetic may hand to an element type without becoming an
/// infinity or a NaN there. e4m3 and integers saturate by their definition, f64 takes all of f32.
[[nodiscard]] constexpr double largest_stored(ElementType type) noexcept {
  switch (type) {
    case ElementType::f16:
      return 65504;
    case ElementType::bf16:
      return static_cast<double>(to_float(bf16{0x7f7f}));
    case ElementType::f8_e5m2:
      return 57344;
    case ElementType::q8_0:
      return 127.0 * 65504;
    default:
      return static_cast<double>((std::numeric_limits<float>::max)());
  }
}

/// The first of rows of `row_size` bytes that holds what is not finite; the number of rows where
/// none does.
KVMELD_LAZY [[nodiscard]] std::size_t first_non_finite(ElementType type, const std::byte* bytes,
                                                       std::size_t byte_count,
                                                       std::size_t row_size) noexcept {
  std::size_t row = 0;
  while ((row + 1) * row_size <= byte_count &&
         is_finite(peak_of(type, bytes + row * row_size, row_size)))
    ++row;
  return row;
}

}  // namespace detail
KVMELD_NAMESPACE_END
