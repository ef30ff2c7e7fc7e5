// Main of the device tests: without a CUDA device it says so and returns 77, which ctest counts as
// skipped.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "catch_run.hpp"

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  return test::run_cases(argc, argv);
}
