#pragma once

#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Whether any of `n` floats is NaN or infinite.
KVMELD_ALWAYS_INLINE bool non_finite_body(const float* x, std::size_t n) noexcept {
  std::uint32_t found[16] = {};
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (std::size_t j = 0; j < 16; ++j)
      found[j] |=
          (__builtin_bit_cast(std::uint32_t, x[i + j]) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  }
  for (; i < n; ++i)
    found[0] |= (__builtin_bit_cast(std::uint32_t, x[i]) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  for (std::size_t j = 1; j < 16; ++j) found[0] |= found[j];
  return found[0] != 0;
}
KVMELD_NOINLINE inline bool non_finite_baseline(const float* x, std::size_t n) noexcept {
  return non_finite_body(x, n);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline bool non_finite_avx2(const float* x,
                                                               std::size_t n) noexcept {
  return non_finite_body(x, n);
}
[[nodiscard]] inline bool has_non_finite(Isa isa, const float* x, std::size_t n) noexcept {
  return isa == Isa::baseline ? non_finite_baseline(x, n) : non_finite_avx2(x, n);
}

}  // namespace detail
KVMELD_NAMESPACE_END
