// What holds for every row: stored values come back, rounding keeps order and signs, blocks do not
// see their neighbours.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <kvmeld/extend/rows.hpp>

#include "support/law.hpp"
#include "support/tensor_forms.hpp"

using namespace kvmeld;

namespace {

std::vector<std::byte> store(ElementType type, const std::vector<float>& row) {
  std::vector<std::byte> out(static_cast<std::size_t>(byte_size(type, std::ssize(row))));
  tensor_forms::forms()[2].store(type, row.data(), std::ssize(row), out.data());
  return out;
}
std::vector<float> load(ElementType type, const std::vector<std::byte>& stored, std::size_t n) {
  std::vector<float> out(n);
  tensor_forms::forms()[2].load(type, stored.data(), static_cast<std::ptrdiff_t>(n), out.data());
  return out;
}
std::vector<float> any_row() {
  auto row = *rc::gen::container<std::vector<float>>(rc::gen::map(
      rc::gen::resize(100, rc::gen::arbitrary<std::uint32_t>()), [](std::uint32_t bits) {
        const float x = detail::bits_float(bits);
        return std::isfinite(x) ? x : 1.0f;
      }));
  return row;
}
ElementType any_type() {
  return *rc::gen::element(ElementType::f64, ElementType::f32, ElementType::f16, ElementType::bf16,
                           ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::i8);
}

}  // namespace

TEST_CASE("laws of rows") {
  test::law("what was stored once is stored again as the same bytes", [] {
    const ElementType type = any_type();
    const std::vector<float> row = any_row();
    const std::vector<std::byte> once = store(type, row);
    RC_ASSERT(store(type, load(type, once, row.size())) == once);
  });
  test::law("rounding keeps order", [] {
    const ElementType type = any_type();
    std::vector<float> row = any_row();
    std::sort(row.begin(), row.end());
    const std::vector<float> back = load(type, store(type, row), row.size());
    RC_ASSERT(std::is_sorted(back.begin(), back.end()));
  });
  test::law("rounding is odd", [] {
    const ElementType type =
        *rc::gen::element(ElementType::f16, ElementType::bf16, ElementType::f8_e4m3,
                          ElementType::f8_e5m2, ElementType::q8_0);
    std::vector<float> row = any_row();
    const std::vector<float> back = load(type, store(type, row), row.size());
    for (float& x : row) x = -x;
    const std::vector<float> negated = load(type, store(type, row), row.size());
    for (std::size_t i = 0; i < row.size(); ++i)
      RC_ASSERT(negated[i] == -back[i] || std::isnan(back[i]));
  });
  test::law("a row is its parts, cut at blocks", [] {
    const ElementType type =
        *rc::gen::element(ElementType::bf16, ElementType::f8_e4m3, ElementType::q8_0);
    const std::vector<float> row = any_row();
    const std::vector<std::byte> whole = store(type, row);
    std::vector<std::byte> parts;
    for (std::size_t i = 0; i < row.size(); i += 32) {
      const std::vector<float> part(
          row.begin() + static_cast<std::ptrdiff_t>(i),
          row.begin() + static_cast<std::ptrdiff_t>(std::min(i + 32, row.size())));
      const std::vector<std::byte> stored = store(type, part);
      parts.insert(parts.end(), stored.begin(), stored.end());
    }
    RC_ASSERT(parts == whole);
  });
  test::law("q8_0 is off by half a step and the scale's rounding", [] {
    auto row = *rc::gen::container<std::vector<float>>(
        32, rc::gen::map(rc::gen::resize(100, rc::gen::arbitrary<std::int32_t>()),
                         [](std::int32_t i) { return static_cast<float>(i) * 0x1p-28f; }));
    float largest = 0.0f;
    for (const float x : row) largest = std::max(largest, std::abs(x));
    const std::vector<float> back = load(ElementType::q8_0, store(ElementType::q8_0, row), 32);
    // Half a step is largest / 254; the f16 scale is off by 2^-11 of itself, or 2^-25 below its
    // normal numbers.
    const double bound =
        static_cast<double>(largest) * (0.5 / 127.0 + 0x1p-11 + 0x1p-20) + 127.0 * 0x1p-25;
    for (std::size_t i = 0; i < 32; ++i)
      RC_ASSERT(std::abs(static_cast<double>(back[i]) - static_cast<double>(row[i])) <= bound);
  });
}
