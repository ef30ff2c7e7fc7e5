#pragma once

/// What the processor and the compiler must not do to floating-point results, and how it is undone
/// or noticed.

#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

#if defined(__x86_64__)
// MXCSR: flush-to-zero (bit 15), rounding mode (14, 13), denormals-are-zero (6).
inline constexpr std::uint64_t float_control_mask = 0xe040;
[[nodiscard]] inline std::uint64_t read_float_control() noexcept {
  return __builtin_ia32_stmxcsr();
}
inline void write_float_control(std::uint64_t value) noexcept {
  __builtin_ia32_ldmxcsr(static_cast<std::uint32_t>(value));
}
#elif defined(__aarch64__)
// FPCR: default NaN (bit 25), flush-to-zero (24), rounding mode (23, 22), flush-to-zero of f16
// (19).
inline constexpr std::uint64_t float_control_mask = 0x3c80000;
[[nodiscard]] inline std::uint64_t read_float_control() noexcept {
  std::uint64_t value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
inline void write_float_control(std::uint64_t value) noexcept {
  asm volatile("msr fpcr, %0" : : "r"(value));
}
#else
inline constexpr std::uint64_t float_control_mask = 0;
[[nodiscard]] inline std::uint64_t read_float_control() noexcept { return 0; }
inline void write_float_control(std::uint64_t) noexcept {}
#endif

}  // namespace detail

/// For its lifetime, this thread keeps subnormals and rounds to nearest even; then everything is as
/// it was.
///
/// Every worker holds one: a process linked with -ffast-math starts with flush-to-zero, and threads
/// inherit it. Status flags raised inside are dropped. Costs some 10 ns.
class FloatEnvironmentGuard {
 public:
  FloatEnvironmentGuard() noexcept : saved_(detail::read_float_control()) {
    if ((saved_ & detail::float_control_mask) != 0)
      detail::write_float_control(saved_ & ~detail::float_control_mask);
    asm volatile("" : : : "memory");  // arithmetic on memory stays inside
  }
  ~FloatEnvironmentGuard() {
    asm volatile("" : : : "memory");
    if ((saved_ & detail::float_control_mask) != 0) detail::write_float_control(saved_);
  }
  FloatEnvironmentGuard(const FloatEnvironmentGuard&) = delete;
  FloatEnvironmentGuard& operator=(const FloatEnvironmentGuard&) = delete;

 private:
  std::uint64_t saved_;
};

/// Notices compiler options and processor states that change results and that
/// `FloatEnvironmentGuard` cannot undo.
///
/// Finds reassociation, reciprocal division, ignored signed zeros, NaNs assumed absent, excess
/// precision, a fused multiply-add that rounds twice, and flush-to-zero that stays. `-ffast-math`
/// is an #error in config.hpp, but its parts define no macro. Always inlined, so that it judges the
/// options of the caller's own translation unit. Some 20 ns.
///
/// Errors: `float_environment`, naming the check that failed.
[[nodiscard]] KVMELD_ALWAYS_INLINE Status check_float_environment() {
  const FloatEnvironmentGuard guard;
  const auto fault = [](const char* what) {
    return Status(ErrorCode::float_environment,
                  std::string("floating-point results would differ: ") + what +
                      "; compile without -ffast-math and its parts (-funsafe-math-optimizations "
                      "and the like)");
  };
  // Volatile sources keep the compiler from computing the answer; what lies between is ordinary
  // code that it may change.
  volatile float one_source = 1.0f, tiny_source = 0x1p-30f, least_source = 0x1p-149f,
                 five_source = 5.0f;
  volatile double nan_source = __builtin_nan(""), big_source = 0x1p60, unit_source = 1.0;
  volatile float minus_zero_source = -0.0f;
  const float one = one_source, tiny = tiny_source, least = least_source, five = five_source;
  const float minus_zero = minus_zero_source;
  const double not_a_number = nan_source, big = big_source, unit = unit_source;

  volatile float sink = (one + tiny) - one;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 0)
    return fault("sums are reassociated or kept in excess precision");
  volatile double wide_sink = (big + unit) - big;
  if (__builtin_bit_cast(std::uint64_t, double{wide_sink}) != 0)
    return fault("sums of doubles are reassociated");
  sink = minus_zero + 0.0f;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 0)
    return fault("the sign of zero is ignored");
  sink = five / 49.0f;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 0x3dd0fac7u)
    return fault("division goes through a reciprocal");
  if (not_a_number == not_a_number) return fault("NaNs are assumed absent");
  sink = least * 0.75f;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 1)
    return fault("subnormal numbers are flushed to zero");
  volatile float factor_source = 1.0f + 0x1p-12f;
  const float factor = factor_source;
  sink = fma(factor, factor, -(1.0f + 0x1p-11f));
  if (float{sink} != 0x1p-24f) return fault("fused multiply-add rounds twice");
  return {};
}

KVMELD_NAMESPACE_END
