// The device tests on an emulated device (include/cuda_runtime.h), and what no real one can be
// brought to do.
#include <cuda_runtime.h>

#include "cuda/rows.cu"

#include <kvmeld/exec.hpp>

#if defined(__x86_64__)
TEST_CASE("a device that flushes subnormals is found out, and by its number") {
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  const std::uint64_t saved = kvmeld::detail::read_float_control();
  kvmeld::detail::write_float_control(saved | 0x8040);
  const kvmeld::Status status = kvmeld::gpu::check_device();
  kvmeld::detail::write_float_control(saved);
  INFO(status.message());
  CHECK(status.code() == ErrorCode::float_environment);
  CHECK(status.message().find("device 1") != std::string::npos);
  CHECK(status.message().find("flushed") != std::string::npos);
  CHECK(status.message().find("division") == std::string::npos);
  CHECK(kvmeld::gpu::check_device().code() == ErrorCode::float_environment);  // remembered
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(kvmeld::gpu::check_device().ok());
}
#endif
