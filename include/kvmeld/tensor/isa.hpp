#pragma once

/// The instruction sets that row functions are compiled for, and the choice among them at run time.

#include <cstdint>
#include <string_view>

#include <kvmeld/config.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN

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
