#pragma once

// Row conversions and f64 routines as each instruction set runs them: what a row body's wrapper
// looks like from inside.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/extend/rows.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/tensor.hpp>

namespace tensor_forms {

/// The functions of one instruction set.
struct Form {
  kvmeld::Isa isa;
  void (*load)(kvmeld::ElementType, const std::byte*, std::ptrdiff_t, float*);
  void (*store)(kvmeld::ElementType, const float*, std::ptrdiff_t, std::byte*);
  // out: (n, 5): sin, cos, exp, log |x|, tanh
  void (*functions)(const double* x, std::ptrdiff_t n, double* out);
};

KVMELD_ALWAYS_INLINE void functions_body(const double* x, std::ptrdiff_t n, double* out) {
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    const kvmeld::math::SinCos rotation = kvmeld::math::sin_cos(x[i]);
    out[5 * i] = rotation.sin;
    out[5 * i + 1] = rotation.cos;
    out[5 * i + 2] = kvmeld::math::exp(x[i]);
    out[5 * i + 3] = kvmeld::math::log(x[i] < 0 ? -x[i] : x[i]);
    out[5 * i + 4] = kvmeld::math::tanh(x[i]);
  }
}

#define KVMELD_TEST_FORM(ISA, TARGET)                                                            \
  TARGET inline void load_##ISA(kvmeld::ElementType type, const std::byte* in, std::ptrdiff_t n, \
                                float* out) {                                                    \
    kvmeld::extend::load_row(type, kvmeld::Isa::ISA, in, n, out);                                \
  }                                                                                              \
  TARGET inline void store_##ISA(kvmeld::ElementType type, const float* in, std::ptrdiff_t n,    \
                                 std::byte* out) {                                               \
    kvmeld::extend::store_row(type, kvmeld::Isa::ISA, in, n, out);                               \
  }                                                                                              \
  TARGET inline void functions_##ISA(const double* x, std::ptrdiff_t n, double* out) {           \
    functions_body(x, n, out);                                                                   \
  }                                                                                              \
  inline constexpr Form ISA##_form { kvmeld::Isa::ISA, load_##ISA, store_##ISA, functions_##ISA }

KVMELD_TEST_FORM(baseline, );
KVMELD_TEST_FORM(avx2, KVMELD_TARGET_AVX2);
KVMELD_TEST_FORM(avx512, KVMELD_TARGET_AVX512);

/// Always three: where this processor lacks an instruction set, the next lower one takes its place.
inline std::vector<Form> forms() {
  const kvmeld::Isa best = kvmeld::best_isa();
  std::vector<Form> out(3, baseline_form);
  if (best != kvmeld::Isa::baseline) out[1] = out[2] = avx2_form;
  if (best == kvmeld::Isa::avx512) out[2] = avx512_form;
  return out;
}

/// Floats of every kind from a counter: random bits, the edges of the narrow types, and plain
/// values near 1.
inline std::vector<float> floats(std::size_t n, std::uint32_t seed) {
  std::vector<float> out(n);
  std::uint32_t state = seed * 2654435761u + 99991u;
  const std::uint32_t edges[] = {
      0x00000000u, 0x80000000u, 0x00000001u, 0x7f800000u, 0xff800000u, 0x7f800001u, 0x7fc12345u,
      0xffffffffu, 0x477fe000u, 0x477ff000u, 0x477fefffu, 0x33000000u, 0x33000001u, 0x387fc000u,
      0x43e00000u, 0x43e80000u, 0x43e80001u, 0x3a800000u, 0x3a800001u, 0x47600000u, 0x47700000u,
      0x7f7fffffu, 0x3f808000u, 0x3f818000u, 0x00008000u, 0x42fe0000u, 0x42ff0000u, 0xc3008000u};
  for (std::size_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    std::uint32_t bits = state ^ (state >> 15);
    if (state >> 30 == 0) bits = edges[(state >> 8) % (sizeof(edges) / sizeof(edges[0]))];
    if (state >> 30 >= 2) bits = (bits & 0x807fffffu) | (110u + (state >> 20) % 26u) << 23;
    out[i] = kvmeld::detail::bits_float(bits);
  }
  return out;
}

}  // namespace tensor_forms
