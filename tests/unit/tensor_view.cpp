// The strided view, and the guard against flush-to-zero and rounding modes.

#include <cfenv>
#include <cstdint>

#include <kvmeld/exec.hpp>
#include <kvmeld/tensor.hpp>

#include "support/catch.hpp"

using namespace kvmeld;

static_assert(TensorView<StridedView<float, 1>>);
static_assert(TensorView<StridedView<const std::uint16_t, 4>>);
static_assert(!TensorView<int>);
static_assert(std::is_trivially_copyable_v<StridedView<float, 3>>);

TEST_CASE("a dense view is row-major, and strides may be negative or zero") {
  int data[24];
  for (int i = 0; i < 24; ++i) data[i] = i;
  const StridedView<int, 3> dense(data, {2, 3, 4});  // (layer, token, channel)
  REQUIRE(dense.rank() == 3);
  REQUIRE(dense.size() == 24);
  REQUIRE(dense.stride(0) == 12);
  REQUIRE(dense(1, 2, 3) == 23);
  const StridedView<const int, 2> backwards(data + 11, {3, 4}, {-4, -1});
  REQUIRE(backwards(0, 0) == 11);
  REQUIRE(backwards(2, 3) == 0);
  const StridedView<int, 2> broadcast(data, {5, 4}, {0, 1});
  REQUIRE(broadcast(4, 2) == 2);
  const StridedView<const int, 3> read_only = dense;
  REQUIRE(read_only(1, 0, 0) == 12);
  dense(0, 0, 0) = 99;
  REQUIRE(data[0] == 99);
  REQUIRE(StridedView<int, 3>(data, {2, 0, 4}).empty());
  REQUIRE(StridedView<int, 2>().empty());
}

namespace {
float product(float a, float b) {
  volatile float x = a, y = b, out;
  out = x * y;
  return out;
}
}  // namespace

TEST_CASE("this test is compiled as the library asks for") {
  const Status status = exec::check_float_environment();
  INFO(status.message());
  REQUIRE(status.ok());
}

#if defined(__x86_64__)
TEST_CASE(
    "the guard undoes flush-to-zero, denormals-are-zero and rounding modes, and puts them back") {
  const std::uint64_t before = detail::read_float_control();
  for (const std::uint64_t mode : {0x8000u, 0x0040u, 0x8040u}) {
    detail::write_float_control(before | mode);
    CHECK(__builtin_bit_cast(std::uint32_t, product(0x1p-140f, 0.5f)) == 0);
    {
      const exec::FloatEnvironmentGuard guard;
      CHECK(__builtin_bit_cast(std::uint32_t, product(0x1p-140f, 0.5f)) == 0x100u);
      REQUIRE(exec::check_float_environment().ok());
    }
    CHECK(__builtin_bit_cast(std::uint32_t, product(0x1p-140f, 0.5f)) == 0);
    REQUIRE(exec::check_float_environment().ok());  // what a guard can undo is no error
    detail::write_float_control(before);
  }
  std::fesetround(FE_UPWARD);
  REQUIRE(product(1.0f + 0x1p-23f, 1.0f + 0x1p-23f) == 1.0f + 3 * 0x1p-23f);
  {
    const exec::FloatEnvironmentGuard guard;
    REQUIRE(product(1.0f + 0x1p-23f, 1.0f + 0x1p-23f) == 1.0f + 2 * 0x1p-23f);
  }
  REQUIRE(product(1.0f + 0x1p-23f, 1.0f + 0x1p-23f) == 1.0f + 3 * 0x1p-23f);
  std::fesetround(FE_TONEAREST);
}
#endif
