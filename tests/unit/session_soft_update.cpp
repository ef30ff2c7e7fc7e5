// new = β · fused + (1 − β) · local against plain doubles; β = 0 and 1 are identities of bytes.

#include <kvmeld/calibrate.hpp>

#include <cmath>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

std::vector<std::int64_t> positions(std::int64_t n) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(30 + 2 * i);
  return out;
}

}  // namespace

TEST_CASE("a blend is what doubles say, in any layout, and both ends are identities") {
  const auto at = positions(7);
  for (const ElementType type :
       {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::q8_0}) {
    const auto g = test::geometry({.type = type, .channels = 96});
    for (const test::Layout layout : test::all_layouts) {
      test::TestCache fused(g, 7, layout), local(g, 7), out(g, 7, layout);
      fused.fill(1);
      local.fill(2);
      for (const float beta : {0.0F, 0.25F, 0.3F, 1.0F}) {
        const Status status =
            soft_update(exec::seq, fused.ref(), at, local.ref(), at, beta, out.out());
        INFO(to_string(type) << " beta " << beta << ' ' << status.message());
        REQUIRE(status.ok());
        if (beta == 0.0F || beta == 1.0F) {
          for (std::size_t p = 0; p < out.planes(); ++p) {
            const test::TestCache& from = beta == 0.0F ? local : fused;
            for (std::int64_t t = 0; t < 7; ++t) {
              for (std::int64_t h = 0; h < 2; ++h) {
                for (std::int64_t c = 0; c < 96; c += block_elements(type)) {
                  REQUIRE(std::memcmp(out.bytes(p, t, h, c), from.bytes(p, t, h, c),
                                      static_cast<std::size_t>(block_bytes(type))) == 0);
                }
              }
            }
          }
          continue;
        }
        const test::Dense x = fused.dense(), y = local.dense(), z = out.dense();
        // f32: a difference and an fma, each within 2^-24 of values below 8; storing adds half a
        // unit of the type at |x| < 8.
        const double step = type == ElementType::f32    ? 0x1p-20
                            : type == ElementType::f16  ? 0x1p-9
                            : type == ElementType::bf16 ? 0x1p-6
                                                        : 0.04;
        for (std::size_t p = 0; p < x.size(); ++p) {
          for (std::size_t i = 0; i < x[p].size(); ++i) {
            REQUIRE(std::abs(z[p][i] - (double{beta} * x[p][i] + (1 - double{beta}) * y[p][i])) <=
                    step);
          }
        }
      }
    }
  }
}

TEST_CASE("blending in place, over threads, and of a cache with itself") {
  const auto g = test::geometry({.type = ElementType::f16});
  const auto at = positions(5);
  test::TestCache fused(g, 5), local(g, 5), out(g, 5);
  fused.fill(1);
  local.fill(2);
  REQUIRE(soft_update(exec::lanes, fused.ref(), at, local.ref(), at, 0.7F, out.out()).ok());
  REQUIRE(soft_update(exec::threads(2), fused.ref(), at, local.ref(), at, 0.7F, local.out()).ok());
  CHECK(local.buffers() == out.buffers());
  test::TestCache twin(g, 5);
  twin.fill(1);
  REQUIRE(soft_update(exec::seq, fused.ref(), at, twin.ref(), at, 0.3F, out.out()).ok());
  CHECK(out.dense() == fused.dense());
}

TEST_CASE("what cannot be blended leaves the output alone") {
  const auto g = test::geometry();
  const auto at = positions(3);
  test::TestCache fused(g, 3), local(g, 3), out(g, 3);
  fused.fill(1);
  local.fill(2);
  const auto code = [&](const Status& status) {
    INFO(status.message());
    CHECK(out.is_untouched());
    return status.code();
  };
  const auto blend = [&](float beta) {
    return code(soft_update(exec::seq, fused.ref(), at, local.ref(), at, beta, out.out()));
  };
  CHECK(blend(-0.1F) == ErrorCode::invalid_argument);
  CHECK(blend(1.5F) == ErrorCode::invalid_argument);
  CHECK(blend(std::nanf("")) == ErrorCode::invalid_argument);
  auto shifted = at;
  shifted[2] += 1;
  CHECK(code(soft_update(exec::seq, fused.ref(), shifted, local.ref(), at, 0.5F, out.out())) ==
        ErrorCode::position_gap);
  CHECK(code(soft_update(exec::seq, fused.ref(), at, local.ref(), shifted, 0.5F, out.out())) ==
        ErrorCode::duplicate_position);
  CHECK(code(soft_update(exec::seq, fused.ref().first(2), std::span(at).first(2), local.ref(), at,
                         0.5F, out.out())) == ErrorCode::token_count_mismatch);
  CHECK(code(soft_update(exec::seq, fused.ref(), at, local.ref(), at, 0.5F, out.out().first(2))) ==
        ErrorCode::output_too_small);
  CHECK(soft_update(exec::seq, fused.ref(), at, local.ref(), at, 0.5F, fused.out()).code() ==
        ErrorCode::aliasing);
  test::TestCache other(test::geometry({.heads = 3}), 3);
  CHECK(code(soft_update(exec::seq, other.ref(), at, local.ref(), at, 0.5F, out.out())) ==
        ErrorCode::geometry_mismatch);
  auto undeclared = test::geometry();
  undeclared->layers[1].rope = {};
  test::TestCache nobody_said(undeclared, 3);
  const auto mine = nobody_said.ref();
  CHECK(code(soft_update(exec::seq, mine, at, mine, at, 0.5F, out.out())) ==
        ErrorCode::invalid_argument);
}

TEST_CASE("what lies between two numbers of the element type is one, however far apart they are") {
  const auto at = positions(2);
  for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
    const float most = type == ElementType::f16 ? 65504.0F : 3e38F;
    const auto g = test::geometry({.type = type, .layers = 1, .heads = 1, .channels = 32});
    test::TestCache fused(g, 2), local(g, 2), out(g, 2);
    for (std::size_t p = 0; p < 2; ++p) {
      for (std::int64_t t = 0; t < 2; ++t) {
        for (std::int64_t c = 0; c < 32; ++c) {
          fused.set(p, t, 0, c, c % 2 == 0 ? most : -most);
          local.set(p, t, 0, c, c % 2 == 0 ? -most : -most);
        }
      }
    }
    for (const float beta : {0.25F, 0.5F, 0.9F}) {
      REQUIRE(soft_update(exec::seq, fused.ref(), at, local.ref(), at, beta, out.out()).ok());
      for (std::int64_t c = 0; c < 32; ++c) {
        const double x = fused.get(1, 1, 0, c), y = local.get(1, 1, 0, c),
                     want = double{beta} * x + (1 - double{beta}) * y;
        CHECK(std::abs(out.get(1, 1, 0, c) - want) <=
              (type == ElementType::f32 ? 0x1p-22 : 0x1p-8) * static_cast<double>(most));
      }
    }
  }
}

TEST_CASE("a row that is no number is refused where it would be blended, and named") {
  const auto g = test::geometry({.type = ElementType::f32});
  const auto at = positions(3);
  test::TestCache fused(g, 3), local(g, 3), out(g, 3);
  fused.fill(1);
  local.fill(2);
  local.set(3, 1, 1, 7, std::nanf(""));
  const Status refused = soft_update(exec::seq, fused.ref(), at, local.ref(), at, 0.5F, out.out());
  CHECK(refused.code() == ErrorCode::non_finite);
  CHECK(refused.message().find("plane 3 of the local cache") != std::string::npos);
  CHECK(refused.message().find("token 1") != std::string::npos);
  CHECK(out.is_untouched());
  CHECK(soft_update(exec::seq, fused.ref(), at, local.ref(), at, 1.0F, out.out())
            .ok());  // nothing of the local cache is read
  fused.set(0, 2, 0, 0, INFINITY);
  CHECK(soft_update(exec::seq, fused.ref(), at, local.ref(), at, 1.0F, out.out()).code() ==
        ErrorCode::non_finite);
}
