#pragma once

/// Conversions between stored elements, f32 and f64 that g++ makes of two halves and puts together
/// unless they are called by name.

#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

#if KVMELD_X86_DISPATCH

KVMELD_NAMESPACE_BEGIN
namespace detail {

using WideDoubles = vector_t<double, 64>;

[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideDoubles
widen_lanes(FloatLanes x) noexcept {
#if defined(__clang__)
  return __builtin_convertvector(x, WideDoubles);
#else
  constexpr char all = -1;
  constexpr int current_rounding = 4;
  return __builtin_ia32_cvtps2pd512_mask(x, WideDoubles{}, all, current_rounding);
#endif
}
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE FloatLanes
narrow_lanes(WideDoubles x) noexcept {
#if defined(__clang__)
  return __builtin_convertvector(x, FloatLanes);
#else
  constexpr char all = -1;
  constexpr int current_rounding = 4;
  return __builtin_ia32_cvtpd2ps512_mask(x, FloatLanes{}, all, current_rounding);
#endif
}

/// Eight elements in order, as `Lanes8` has them.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes
load_eight(const std::byte* in) noexcept {
#if !defined(__clang__)
  if constexpr (type == ElementType::bf16) {
    const vector_t<short, 16> stored = *reinterpret_cast<const unaligned_vector_t<short, 16>*>(in);
    return reinterpret_cast<FloatLanes>(__builtin_ia32_pmovzxwd256(stored) << 16);
  }
#endif
  return Lanes8<type>::load(in);
}
/// Sixteen elements in order.
template <ElementType type>
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats
load_sixteen(const std::byte* in) noexcept {
  if constexpr (type == ElementType::f16) {
    constexpr int current_rounding = 4;
    const vector_t<short, 32> stored = *reinterpret_cast<const unaligned_vector_t<short, 32>*>(in);
    return __builtin_ia32_vcvtph2ps512_mask(
        stored, WideFloats{}, Avx512Lanes32<ElementType::f16>::all_loaded, current_rounding);
  } else if constexpr (type == ElementType::bf16) {
#if defined(__clang__)
    const vector_t<std::uint16_t, 32> stored =
        *reinterpret_cast<const unaligned_vector_t<std::uint16_t, 32>*>(in);
    return reinterpret_cast<WideFloats>(__builtin_convertvector(stored, WideWords) << 16);
#else
    const vector_t<short, 32> stored = *reinterpret_cast<const unaligned_vector_t<short, 32>*>(in);
    const vector_t<int, 64> words = __builtin_ia32_pmovzxwd512_mask(
        stored, vector_t<int, 64>{},
        static_cast<unsigned short>(Avx512Lanes32<ElementType::f16>::all_loaded));
    return reinterpret_cast<WideFloats>(words << 16);
#endif
  } else {
    return load_wide(in);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END

#endif  // KVMELD_X86_DISPATCH
