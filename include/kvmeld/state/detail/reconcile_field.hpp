#pragma once

/// Arithmetic in GF(2^32) = GF(2)[x] / (x^32 + x^7 + x^3 + x^2 + 1), for sketches of sets.

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/config.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// The polynomial of degree at most 62 modulo the field's. Its terms below x^32 are few and low, so
/// two folds do.
[[nodiscard]] inline std::uint32_t field_reduce(std::uint64_t product) noexcept {
  const std::uint64_t high = product >> 32U;
  const std::uint64_t once = high ^ (high << 2U) ^ (high << 3U) ^ (high << 7U);  // below x^39
  const std::uint64_t rest = once >> 32U;
  return static_cast<std::uint32_t>(product ^ once ^ rest ^ (rest << 2U) ^ (rest << 3U) ^
                                    (rest << 7U));
}

/// Product of polynomials over GF(2) by integer multiplications: of four bits one is used, so that
/// at most 8 ones meet in a place and no carry reaches the next one that counts.
struct PortableProduct {
  [[nodiscard]] std::uint64_t operator()(std::uint32_t a, std::uint32_t b) const noexcept {
    constexpr std::uint64_t every_fourth = 0x1111111111111111U;
    std::uint64_t x[4], y[4];
    for (unsigned i = 0; i < 4; ++i) {
      x[i] = a & (every_fourth << i);
      y[i] = b & (every_fourth << i);
    }
    std::uint64_t out = 0;
    for (unsigned i = 0; i < 4; ++i) {
      const std::uint64_t sum = (x[0] * y[i]) ^ (x[1] * y[(i + 3) % 4]) ^ (x[2] * y[(i + 2) % 4]) ^
                                (x[3] * y[(i + 1) % 4]);
      out |= sum & (every_fourth << i);
    }
    return out;
  }
};

#if KVMELD_X86_DISPATCH
/// The same by PCLMULQDQ. As assembly, it inlines into loops that are compiled for the baseline,
/// behind one run-time choice.
struct CarrylessProduct {
  [[nodiscard]] std::uint64_t operator()(std::uint32_t a, std::uint32_t b) const noexcept {
    using Pair = long long __attribute__((vector_size(16)));
    Pair x{static_cast<long long>(a), 0};
    const Pair y{static_cast<long long>(b), 0};
    __asm__("pclmulqdq $0, %1, %0" : "+x"(x) : "x"(y));
    return static_cast<std::uint64_t>(x[0]);
  }
};

[[nodiscard]] inline bool has_carryless_product() noexcept {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & 2U) != 0;
  }();
  return has;
}
#endif

/// Calls `work` with the fastest product that this processor has. All give the same numbers.
template <class Work>
decltype(auto) with_field_product(const Work& work) {
#if KVMELD_X86_DISPATCH
  if (has_carryless_product()) return work(CarrylessProduct{});
#endif
  return work(PortableProduct{});
}

template <class Product>
[[nodiscard]] std::uint32_t field_multiply(const Product& product, std::uint32_t a,
                                           std::uint32_t b) noexcept {
  return field_reduce(product(a, b));
}

template <class Product>
[[nodiscard]] std::uint32_t field_power(const Product& product, std::uint32_t a,
                                        std::uint32_t exponent) noexcept {
  std::uint32_t out = 1;
  for (; exponent != 0; exponent >>= 1U) {
    if ((exponent & 1U) != 0) out = field_multiply(product, out, a);
    a = field_multiply(product, a, a);
  }
  return out;
}

/// a^-1 = a^(2^32 - 2).
template <class Product>
[[nodiscard]] std::uint32_t field_inverse(const Product& product, std::uint32_t a) noexcept {
  return field_power(product, a, 0xFFFFFFFEU);
}

/// Adds to `sums[i]` the power 2(first + i) + 1 of each element.
template <class Product>
void field_add_odd_powers(const Product& product, std::span<const std::uint32_t> elements,
                          std::uint32_t first, std::span<std::uint32_t> sums) noexcept {
  constexpr std::size_t lanes = 8;  // a product waits for the one before it: others fill the time
  for (std::size_t at = 0; at < elements.size(); at += lanes) {
    std::uint32_t power[lanes]{}, square[lanes]{};
    const std::size_t n = elements.size() - at < lanes ? elements.size() - at : lanes;
    for (std::size_t l = 0; l < n; ++l) {
      square[l] = field_multiply(product, elements[at + l], elements[at + l]);
      power[l] = elements[at + l];
      if (first != 0)
        power[l] = field_multiply(product, power[l], field_power(product, square[l], first));
    }
    for (std::uint32_t& sum : sums) {
      std::uint32_t all = 0;
      for (std::size_t l = 0; l < lanes; ++l) {
        all ^= power[l];
        power[l] = field_multiply(product, power[l], square[l]);
      }
      sum ^= all;
    }
  }
}

/// Values of the monic polynomial x^n + Σ coefficients[i] x^i at each point, n =
/// coefficients.size().
template <class Product>
void field_evaluate(const Product& product, std::span<const std::uint32_t> coefficients,
                    std::span<const std::uint32_t> points,
                    std::span<std::uint32_t> values) noexcept {
  constexpr std::size_t lanes = 8;
  for (std::size_t at = 0; at < points.size(); at += lanes) {
    const std::size_t n = points.size() - at < lanes ? points.size() - at : lanes;
    std::uint32_t point[lanes]{}, value[lanes];
    for (std::size_t l = 0; l < lanes; ++l) {
      if (l < n) point[l] = points[at + l];
      value[l] = 1;
    }
    for (std::size_t i = coefficients.size(); i-- > 0;) {
      for (std::size_t l = 0; l < lanes; ++l)
        value[l] = field_multiply(product, value[l], point[l]) ^ coefficients[i];
    }
    for (std::size_t l = 0; l < n; ++l) values[at + l] = value[l];
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
