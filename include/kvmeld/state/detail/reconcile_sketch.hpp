#pragma once

/// Sketches of sets of field elements: power sums that cancel for what two sets share (PinSketch).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/state/detail/reconcile_field.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Adds the elements' odd power sums from number `first` on to `sums`.
///
/// The first c odd power sums determine a set of at most c elements (Dodis, Ostrovsky, Reyzin,
/// Smith: Fuzzy Extractors, 2008, section 6.3); a sum over two sets is that of their symmetric
/// difference. O(elements × sums) products.
KVMELD_LAZY void sketch_add(std::span<const std::uint32_t> elements, std::size_t first,
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
KVMELD_LAZY [[nodiscard]] std::optional<std::vector<std::uint32_t>> sketch_solve(
    std::span<const std::uint32_t> sums) {
  return with_field_product([&](const auto& product) { return sketch_solve(product, sums); });
}

/// Indices of the elements that are roots of a monic polynomial. O(elements × degree) products.
KVMELD_LAZY [[nodiscard]] std::vector<std::uint32_t> sketch_roots(
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
KVMELD_LAZY void sketch_divide(std::vector<std::uint32_t>& locator, std::uint32_t root) {
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

}  // namespace detail

KVMELD_NAMESPACE_END
