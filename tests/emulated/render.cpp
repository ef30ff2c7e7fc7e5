// The device tests on an emulated device (include/cuda_runtime.h).
#include <cuda_runtime.h>

#include "cuda/render.cu"
