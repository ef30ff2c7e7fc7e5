#pragma once

/// Sketches of sets over GF(2^k), and the estimate of a difference.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/hash.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN

namespace replica {

// Arithmetic in GF(2^32) = GF(2)[x] / (x^32 + x^7 + x^3 + x^2 + 1), for sketches of sets.

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

// Sketches of sets of field elements: power sums that cancel for what two sets share (PinSketch).

namespace detail {

/// Adds the elements' odd power sums from number `first` on to `sums`.
///
/// The first c odd power sums determine a set of at most c elements (Dodis, Ostrovsky, Reyzin,
/// Smith: Fuzzy Extractors, 2008, section 6.3); a sum over two sets is that of their symmetric
/// difference. O(elements × sums) products.
inline void sketch_add(std::span<const std::uint32_t> elements, std::size_t first,
                       std::span<std::uint32_t> sums) {
  with_field_product([&](const auto& product) {
    field_add_odd_powers(product, elements, static_cast<std::uint32_t>(first), sums);
  });
}

/// Monic polynomial whose roots are the sketched elements, lowest coefficient first and without the
/// leading 1.
///
/// None where the set is not of fewer elements than there are sums: the sum to spare makes a
/// polynomial that only looks like one improbable (2^-32). Berlekamp-Massey without inversions
/// (Massey 1969), whose discrepancy is zero at each even power sum of characteristic 2, so that
/// half of the steps are none. O(sums²) products.
template <class Product>
[[nodiscard]] std::optional<std::vector<std::uint32_t>> sketch_solve(
    const Product& product, std::span<const std::uint32_t> sums) {
  const std::size_t capacity = sums.size();
  std::vector<std::uint32_t> s(2 * capacity);  // s[i]: sum of the powers i + 1
  for (std::size_t i = 0; i < s.size(); ++i) {
    s[i] = i % 2 == 0 ? sums[i / 2] : field_multiply(product, s[i / 2], s[i / 2]);
  }
  // connection polynomials, now and before the last change
  std::vector<std::uint32_t> c(capacity + 2), b(capacity + 2), old(capacity + 2);
  c[0] = b[0] = 1;
  std::size_t length = 0, c_size = 1, b_size = 1, shift = 1;
  std::uint32_t b_discrepancy = 1;
  for (std::size_t n = 0; n < s.size(); n += 2, shift += 2) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < c_size && i <= n; ++i) sum ^= product(c[i], s[n - i]);
    const std::uint32_t discrepancy = field_reduce(sum);
    if (discrepancy == 0) continue;
    const bool longer = 2 * length <= n;
    if (longer && n + 1 - length >= capacity) return std::nullopt;
    if (longer) std::copy_n(c.begin(), c_size, old.begin());
    const std::size_t old_size = c_size;
    c_size = (std::max)(c_size, b_size + shift);
    if (c_size > capacity + 1) return std::nullopt;
    for (std::size_t i = old_size; i < c_size; ++i) c[i] = 0;
    for (std::size_t i = 0; i < c_size; ++i) {
      std::uint64_t next = product(b_discrepancy, c[i]);
      if (i >= shift && i - shift < b_size) next ^= product(discrepancy, b[i - shift]);
      c[i] = field_reduce(next);
    }
    if (!longer) continue;
    length = n + 1 - length;
    std::swap(b, old);
    b_size = old_size;
    b_discrepancy = discrepancy;
    shift = 0;
  }
  while (c_size > 1 && c[c_size - 1] == 0) --c_size;
  if (c_size != length + 1) return std::nullopt;
  // c = k Π (1 − e x): its reverse, divided by k, is Π (x − e).
  const std::uint32_t scale = field_inverse(product, c[0]);
  std::vector<std::uint32_t> locator(length);
  for (std::size_t i = 0; i < length; ++i)
    locator[i] = field_multiply(product, scale, c[length - i]);
  return locator;
}
[[nodiscard]] inline std::optional<std::vector<std::uint32_t>> sketch_solve(
    std::span<const std::uint32_t> sums) {
  return with_field_product([&](const auto& product) { return sketch_solve(product, sums); });
}

/// Indices of the elements that are roots of a monic polynomial. O(elements × degree) products.
[[nodiscard]] inline std::vector<std::uint32_t> sketch_roots(
    std::span<const std::uint32_t> locator, std::span<const std::uint32_t> elements) {
  std::vector<std::uint32_t> values(elements.size()), roots;
  with_field_product(
      [&](const auto& product) { field_evaluate(product, locator, elements, values); });
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0) roots.push_back(static_cast<std::uint32_t>(i));
  }
  return roots;
}

/// Divides a monic polynomial by (x − root), a root of it.
inline void sketch_divide(std::vector<std::uint32_t>& locator, std::uint32_t root) {
  with_field_product([&](const auto& product) {
    std::uint32_t carry = 1;  // the quotient's coefficients, from the top
    for (std::size_t i = locator.size(); i-- > 0;) {
      const std::uint32_t next = field_multiply(product, carry, root) ^ locator[i];
      locator[i] = carry;
      carry = next;
    }
  });
  locator.pop_back();
}

/// Tells about how many elements two sets do not share, from a few bytes.
///
/// Each of up to 64 counters adds a random sign for every element; the square of the difference of
/// two sets' counters is the size of their symmetric difference in expectation (Alon, Matias,
/// Szegedy 1996), with a standard deviation of √(2 / counters) times it in the mean.
class DifferenceEstimate {
 public:
  /// One bit of each word below `counters` is one element's sign.
  void add(std::uint64_t hash) noexcept {
    std::uint64_t carry = extend::mix_bits(hash ^ 0x6A09E667F3BCC909U);
    ++elements_;
    for (std::uint64_t& plane : planes_) {  // 64 counters at once, bit i of each in planes_[i]
      const std::uint64_t next = plane & carry;
      plane ^= carry;
      carry = next;
      if (carry == 0) break;
    }
  }
  /// Σ of the signs of counter `i`.
  [[nodiscard]] std::int64_t counter(unsigned i) const noexcept {
    std::uint64_t ones = 0;
    for (std::size_t plane = 0; plane < planes_.size(); ++plane)
      ones |= ((planes_[plane] >> i) & 1U) << plane;
    return static_cast<std::int64_t>(elements_) - 2 * static_cast<std::int64_t>(ones);
  }
  void write(extend::ByteWriter& out, unsigned counters) const {
    for (unsigned i = 0; i < counters; ++i) {
      // even: signs are as many as elements
      const auto half = (counter(i) - static_cast<std::int64_t>(elements_ & 1U)) / 2;
      out.varint((static_cast<std::uint64_t>(half) << 1U) ^ static_cast<std::uint64_t>(half >> 63));
    }
  }
  /// Size of the symmetric difference to the set of `elements` elements that wrote `counters`
  /// counters, 0 where none is seen.
  [[nodiscard]] double read(extend::ByteReader& in, std::uint64_t elements,
                            unsigned counters) const {
    double sum = 0;
    if (elements >> 62U != 0) in.fail(ErrorCode::corrupt);
    for (unsigned i = 0; i < counters; ++i) {
      const std::uint64_t zigzag = in.varint();
      const std::uint64_t magnitude = (zigzag >> 1U) + (zigzag & 1U);
      if (magnitude > elements / 2 + 1) in.fail(ErrorCode::corrupt);
      if (!in.ok()) return 0;
      const auto half =
          static_cast<std::int64_t>(zigzag >> 1U) ^ -static_cast<std::int64_t>(zigzag & 1U);
      const auto apart =
          static_cast<double>(2 * half + static_cast<std::int64_t>(elements & 1U) - counter(i));
      sum += apart * apart;
    }
    return sum / counters;
  }

 private:
  std::array<std::uint64_t, 40> planes_{};
  std::uint64_t elements_ = 0;
};

}  // namespace detail

}  // namespace replica

KVMELD_NAMESPACE_END
