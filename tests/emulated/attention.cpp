// The device test on an emulated device.
#include <cuda_runtime.h>

#include "cuda/attention.cu"
