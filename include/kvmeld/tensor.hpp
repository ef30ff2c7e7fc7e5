#pragma once

/// Element types, narrow floats, strided views of tensors, and the choice of an instruction set.

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <kvmeld/config.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN

// 16- and 8-bit floats, converted by bit operations alone, so that host and device agree to the
// bit.

/// IEEE binary16 as bits, not a number: `f16{0x3c00}` is 1.0, `from_float<f16>` and `to_float`
/// convert, and `f16(1.5f)`, where it compiles, is the bits 1. Equality compares bits, so +0 and -0
/// differ and a NaN equals itself.
struct f16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(f16, f16) = default;
};

/// The upper half of a binary32 as bits.
struct bf16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bf16, bf16) = default;
};

/// OCP E4M3 (the "fn" variant): 0x7f and 0xff are NaN, there is no infinity, and the largest value
/// is 448.
struct f8_e4m3 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(f8_e4m3, f8_e4m3) = default;
};

/// OCP E5M2: infinities and NaNs as in IEEE, the largest finite value is 57344.
struct f8_e5m2 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(f8_e5m2, f8_e5m2) = default;
};

namespace detail {

// Below, every choice is a mask and not a branch, so that loops over these functions become vector
// code; no product reaches an addition, and products are exact, so that neither contraction nor
// flush-to-zero can change a bit.

}  // namespace detail

namespace extend {

/// The bits of a float.
[[nodiscard]] KVMELD_HD constexpr std::uint32_t float_bits(float value) noexcept {
  return __builtin_bit_cast(std::uint32_t, value);
}

}  // namespace extend

namespace detail {

[[nodiscard]] KVMELD_HD constexpr float bits_float(std::uint32_t bits) noexcept {
  return __builtin_bit_cast(float, bits);
}
[[nodiscard]] KVMELD_HD constexpr std::uint32_t mask_if(bool condition) noexcept {
  return 0u - static_cast<std::uint32_t>(condition);
}
[[nodiscard]] KVMELD_HD constexpr std::uint32_t select(std::uint32_t mask, std::uint32_t yes,
                                                       std::uint32_t no) noexcept {
  return (mask & yes) | (~mask & no);
}
[[nodiscard]] KVMELD_HD constexpr float small_int_to_float(std::uint32_t value) noexcept {
  // signed: the conversion that vector units have
  return static_cast<float>(static_cast<std::int32_t>(value));
}

/// Rounds |x|, given as binary32 bits, to the nearest even code of a narrow float without sign.
///
/// On overflow the code has the largest exponent or exceeds it; the caller clamps it. Below the
/// smallest normal the value is cut to an integer with 13 guard bits and a sticky bit, because a
/// float addition that rounds by itself could be contracted with a product of the caller.
template <int Mantissa, int Bias>
[[nodiscard]] KVMELD_HD constexpr std::uint32_t round_to_code(std::uint32_t magnitude) noexcept {
  constexpr int shift = 23 - Mantissa;
  constexpr std::uint32_t rebias = static_cast<std::uint32_t>(127 - Bias) << 23;
  constexpr std::uint32_t smallest_normal = static_cast<std::uint32_t>(128 - Bias) << 23;
  const std::uint32_t normal =
      (magnitude - rebias + ((1u << (shift - 1)) - 1u) + ((magnitude >> shift) & 1u)) >> shift;

  constexpr float to_units =
      bits_float(static_cast<std::uint32_t>(127 + Bias + Mantissa - 1 + 13) << 23);
  const std::uint32_t is_subnormal = mask_if(magnitude < smallest_normal);
  const float scaled = bits_float(magnitude & is_subnormal) * to_units;
  const std::int32_t cut = static_cast<std::int32_t>(scaled);
  const std::uint32_t sticky = static_cast<std::uint32_t>(static_cast<float>(cut) != scaled);
  const std::uint32_t units = static_cast<std::uint32_t>(cut);
  const std::uint32_t subnormal = (units + 0xfffu + (((units >> 13) & 1u) | sticky)) >> 13;
  return select(is_subnormal, subnormal, normal);
}

/// Bits of the binary32 with the value of a narrow float whose `code` has no sign and is neither
/// infinite nor NaN.
template <int Mantissa, int Bias>
[[nodiscard]] KVMELD_HD constexpr std::uint32_t finite_code_to_bits(std::uint32_t code) noexcept {
  constexpr float unit = bits_float(static_cast<std::uint32_t>(127 + 1 - Bias - Mantissa) << 23);
  const std::uint32_t is_subnormal = mask_if(code < (1u << Mantissa));
  const std::uint32_t subnormal = float_bits(small_int_to_float(code & is_subnormal) * unit);
  return select(is_subnormal, subnormal,
                (code << (23 - Mantissa)) + (static_cast<std::uint32_t>(127 - Bias) << 23));
}

}  // namespace detail

/// Exact; a signalling NaN becomes quiet, as in the F16C instructions.
[[nodiscard]] KVMELD_HD constexpr float to_float(f16 value) noexcept {
  const std::uint32_t code = value.bits & 0x7fffu;
  const std::uint32_t finite = detail::finite_code_to_bits<10, 15>(code);
  const std::uint32_t top =
      0x7f800000u | ((code & 0x3ffu) << 13) | (static_cast<std::uint32_t>(code > 0x7c00u) << 22);
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  return detail::bits_float(sign | detail::select(detail::mask_if(code >= 0x7c00u), top, finite));
}

/// Exact.
[[nodiscard]] KVMELD_HD constexpr float to_float(bf16 value) noexcept {
  return detail::bits_float(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Exact; both NaN codes become a quiet NaN of their sign.
[[nodiscard]] KVMELD_HD constexpr float to_float(f8_e4m3 value) noexcept {
  const std::uint32_t code = value.bits & 0x7fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t finite = detail::finite_code_to_bits<3, 7>(code);
  return detail::bits_float(sign |
                            detail::select(detail::mask_if(code == 0x7fu), 0x7fc00000u, finite));
}

/// Exact; a signalling NaN becomes quiet.
[[nodiscard]] KVMELD_HD constexpr float to_float(f8_e5m2 value) noexcept {
  return to_float(f16{static_cast<std::uint16_t>(value.bits << 8)});
}

/// Converts an f32 to `T`, rounding to nearest even. A NaN stays a NaN.
template <class T>
[[nodiscard]] KVMELD_HD constexpr T from_float(float value) noexcept;

/// Overflow gives infinity, subnormals are kept, NaN payloads keep their upper bits: the F16C
/// instruction's result.
template <>
[[nodiscard]] KVMELD_HD constexpr f16 from_float<f16>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t code = detail::round_to_code<10, 15>(magnitude);
  const std::uint32_t clamped = detail::select(detail::mask_if(code > 0x7c00u), 0x7c00u, code);
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const std::uint32_t chosen =
      detail::select(detail::mask_if(magnitude > 0x7f800000u), nan, clamped);
  return f16{static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | chosen)};
}

/// Overflow gives infinity, subnormals are kept.
template <>
[[nodiscard]] KVMELD_HD constexpr bf16 from_float<bf16>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t is_nan = detail::mask_if((bits & 0x7fffffffu) > 0x7f800000u);
  const std::uint32_t half = (0x7fffu + ((bits >> 16) & 1u)) & ~is_nan;
  return bf16{static_cast<std::uint16_t>(((bits + half) >> 16) | (is_nan & 0x40u))};
}

/// Saturates: what would round beyond 448, infinity included, becomes ±448, as inference kernels
/// store caches.
template <>
[[nodiscard]] KVMELD_HD constexpr f8_e4m3 from_float<f8_e4m3>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t code = detail::round_to_code<3, 7>(magnitude);
  const std::uint32_t clamped = detail::select(detail::mask_if(code > 0x7eu), 0x7eu, code);
  const std::uint32_t chosen =
      detail::select(detail::mask_if(magnitude > 0x7f800000u), 0x7fu, clamped);
  return f8_e4m3{static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | chosen)};
}

/// Overflow gives infinity, as in IEEE: this format has one, so a lost value stays visible.
template <>
[[nodiscard]] KVMELD_HD constexpr f8_e5m2 from_float<f8_e5m2>(float value) noexcept {
  const std::uint32_t bits = detail::float_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t code = detail::round_to_code<2, 15>(magnitude);
  const std::uint32_t clamped = detail::select(detail::mask_if(code > 0x7cu), 0x7cu, code);
  const std::uint32_t nan = 0x7eu | ((magnitude >> 21) & 0x3u);
  const std::uint32_t chosen =
      detail::select(detail::mask_if(magnitude > 0x7f800000u), nan, clamped);
  return f8_e5m2{static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | chosen)};
}

// Element types of cache planes, and how many bytes their elements take.

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
/// The `ElementType` of a C++ type.
template <class T>
inline constexpr ElementType element_type_of_v = element_type_of<T>::value;

// The concept of an array view that callers pass in, and the strided view that the library itself
// uses.

/// A non-owning strided view of an N-dimensional array.
///
/// Any `mdspan`-shaped type models it, so callers keep their own tensor type.
///
/// Semantic requirements (checked by tests/compile, not by the compiler):
///  - strides count elements; zero broadcasts, negative runs backwards;
///  - copying the view copies no elements;
///  - every index in the extents is addressable from `data_handle()` in the view's memory space.
template <class View>
concept TensorView = std::is_trivially_copyable_v<View> &&
    requires(const View& view, std::size_t axis) {
  typename View::element_type;
  { view.extent(axis) } -> std::convertible_to<std::ptrdiff_t>;
  { view.stride(axis) } -> std::convertible_to<std::ptrdiff_t>;
  { view.data_handle() } -> std::convertible_to<const typename View::element_type*>;
  requires(View::rank() >= 1);
};

/// An array of `Rank` axes in memory: element (i0, i1, ...) lies at `data + i0 * stride0 + i1 *
/// stride1 + ...`.
///
/// Models `TensorView`. Strides are signed elements. Nothing is checked on access; copying costs a
/// few words.
template <class T, std::size_t Rank>
class StridedView {
  static_assert(Rank >= 1, "kvmeld::StridedView needs at least one axis");

 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using index_type = std::ptrdiff_t;
  using Shape = std::array<std::ptrdiff_t, Rank>;

  constexpr StridedView() = default;

  /// A dense array in row-major order: the last axis is contiguous.
  constexpr StridedView(T* data, const Shape& extents) noexcept : data_(data) {
    std::ptrdiff_t stride = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      extents_[axis] = extents[axis];
      strides_[axis] = stride;
      stride *= extents[axis];
    }
  }
  constexpr StridedView(T* data, const Shape& extents, const Shape& strides) noexcept
      : data_(data) {
    for (std::size_t axis = 0; axis < Rank; ++axis) {
      extents_[axis] = extents[axis];
      strides_[axis] = strides[axis];
    }
  }

  /// A read-only view of the same elements.
  template <class U>
  requires(std::is_const_v<T>&& std::same_as<const U, T> && !std::is_const_v<U>) KVMELD_HD
      constexpr StridedView(
          const StridedView<U, Rank>& other) noexcept  // NOLINT: implicit on purpose
      : data_(other.data_handle()) {
    for (std::size_t axis = 0; axis < Rank; ++axis) {
      extents_[axis] = other.extent(axis);
      strides_[axis] = other.stride(axis);
    }
  }

  [[nodiscard]] KVMELD_HD static constexpr std::size_t rank() noexcept { return Rank; }
  [[nodiscard]] KVMELD_HD constexpr T* data_handle() const noexcept { return data_; }
  [[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t extent(std::size_t axis) const noexcept {
    return extents_[axis];
  }
  [[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t stride(std::size_t axis) const noexcept {
    return strides_[axis];
  }

  /// Product of the extents; 0 if any axis is empty.
  [[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t size() const noexcept {
    std::ptrdiff_t product = 1;
    for (std::size_t axis = 0; axis < Rank; ++axis) product *= extents_[axis];
    return product;
  }
  [[nodiscard]] KVMELD_HD constexpr bool empty() const noexcept { return size() == 0; }

  template <class... Indices>
  requires(sizeof...(Indices) == Rank && (std::convertible_to<Indices, std::ptrdiff_t> && ...))
      [[nodiscard]] KVMELD_HD constexpr T&
      operator()(Indices... indices) const noexcept {
    const std::ptrdiff_t index[Rank] = {static_cast<std::ptrdiff_t>(indices)...};
    std::ptrdiff_t offset = 0;
    for (std::size_t axis = 0; axis < Rank; ++axis) offset += index[axis] * strides_[axis];
    return data_[offset];
  }

 private:
  T* data_ = nullptr;
  // plain arrays: the members of std::array are no device functions
  std::ptrdiff_t extents_[Rank] = {};
  std::ptrdiff_t strides_[Rank] = {};
};

// The instruction sets for which row functions are compiled, and the choice among them at run time.

/// Which instructions a row body may use. Results are the same bytes for each.
enum class Isa : std::uint8_t {
  baseline,  ///< what the translation unit was compiled for
  avx2,      ///< AVX2, FMA and F16C
  avx512,    ///< AVX-512 F, BW, VL, DQ beside those
};

[[nodiscard]] constexpr std::string_view to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::baseline:
      return "baseline";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "unknown";
}

namespace detail {

[[nodiscard]] inline Isa probe_isa() noexcept {
#if KVMELD_X86_DISPATCH
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  // clang 14 has no name for it
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
  if (!has_f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return Isa::baseline;
#if !defined(KVMELD_NO_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Isa::avx512;
  }
#endif
  return Isa::avx2;
#else
  return Isa::baseline;
#endif
}

}  // namespace detail

/// The widest instruction set of this processor, found once per process. A program that defines
/// `KVMELD_NO_AVX512` in all of its files stays at AVX2: where 512-bit vectors cost clock, or to
/// measure what processors without them get.
[[nodiscard]] inline Isa best_isa() noexcept {
  static const Isa isa = detail::probe_isa();
  return isa;
}

KVMELD_NAMESPACE_END
