#pragma once
// As much of the CUDA runtime as kvmeld calls, on the CPU: so that what goes to a device, when, and for how long, is
// tested where there is none. It proves nothing about nvcc or hardware.
//
// "Device" memory is host memory with an entry in a list. A stream keeps its work until somebody waits for it, which is
// the latest that a device may do it: buffers that are freed or changed too early show. A warp is 32 coroutines that
// must all meet in the same shuffles.

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidResourceHandle };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
enum { cudaStreamNonBlocking = 1 };

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
};
struct cudaPointerAttributes {
  cudaMemoryType type;
};
struct EmulatedStream {
  int device = 0;
  std::vector<std::function<void()>> work;
  bool capturing = false;
};
using cudaStream_t = EmulatedStream*;
using cudaGraph_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline dim3 blockIdx, blockDim, gridDim;
inline struct { unsigned x; } threadIdx;

namespace emulated {

inline std::map<const std::byte*, std::size_t> device_memory;
inline thread_local int current_device = 0;  // of two

inline bool is_device(const void* p) {
  const auto* at = static_cast<const std::byte*>(p);
  auto next = device_memory.upper_bound(at);
  return next != device_memory.begin() && at < std::prev(next)->first + std::prev(next)->second;
}
inline void* allocate(std::size_t bytes) {
  auto* p = static_cast<std::byte*>(std::malloc(bytes));
  std::memset(p, 0xA5, bytes);
  device_memory[p] = bytes;
  return p;
}
inline void release(void* p) {
  device_memory.erase(static_cast<std::byte*>(p));
  std::free(p);
}
[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

/// 32 lanes that run until they shuffle.
class Warp {
 public:
  void run(const std::function<void()>& lane_body, unsigned first_thread) {
    body_ = &lane_body;
    for (Lane& lane : lanes_) prepare(lane);
    current = this;
    for (unsigned finished = 0; finished < 32;) {
      finished = 0;
      for (lane_ = 0; lane_ < 32; ++lane_) {
        threadIdx.x = first_thread + lane_;
        if (!lanes_[lane_].done) swapcontext(&scheduler_, &lanes_[lane_].context);
        finished += lanes_[lane_].done ? 1U : 0U;
      }
      if (finished != 0 && finished != 32) fail("lanes of a warp left each other at a shuffle");
    }
  }
  unsigned shuffle(unsigned value, unsigned from) {
    Lane& self = lanes_[lane_];
    const unsigned round = self.shuffles++ % 2;
    self.sent[round] = value;
    swapcontext(&self.context, &scheduler_);
    return lanes_[from < 32 ? from : lane_].sent[round];
  }
  [[nodiscard]] unsigned lane() const { return lane_; }
  static inline Warp* current = nullptr;

 private:
  struct Lane {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    unsigned shuffles = 0;
    unsigned sent[2] = {};
  };
  void prepare(Lane& lane) {
    getcontext(&lane.context);
    lane.stack.resize(std::size_t{256} << 10);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = &scheduler_;
    lane.done = false;
    lane.shuffles = 0;
    makecontext(&lane.context, &Warp::enter, 0);
  }
  static void enter() {
    (*current->body_)();
    current->lanes_[current->lane_].done = true;
  }
  ucontext_t scheduler_{};
  Lane lanes_[32];
  unsigned lane_ = 0;
  const std::function<void()>* body_ = nullptr;
};

inline void launch(dim3 grid, dim3 block, const std::function<void()>& thread) {
  static Warp warp;
  gridDim = grid;
  blockDim = block;
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
    for (unsigned first = 0; first < block.x; first += 32) warp.run(thread, first);
  }
}
inline cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr || stream->device != current_device) return cudaErrorInvalidResourceHandle;
  stream->work.push_back(std::move(work));
  return cudaSuccess;
}
inline void require_sides(const void* to, const void* from, cudaMemcpyKind kind) {
  if (is_device(to) == is_device(from) || is_device(to) != (kind == cudaMemcpyHostToDevice))
    fail("a copy in the wrong direction");
}

}  // namespace emulated

inline unsigned __shfl_down_sync(unsigned, unsigned value, unsigned delta) {
  return emulated::Warp::current->shuffle(value, emulated::Warp::current->lane() + delta);
}
inline unsigned __shfl_sync(unsigned, unsigned value, int from) {
  return emulated::Warp::current->shuffle(value, static_cast<unsigned>(from));
}

inline const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaSuccess ? "cudaSuccess" : "cudaErrorEmulated";
}
inline const char* cudaGetErrorString(cudaError_t code) { return code == cudaSuccess ? "no error" : "emulated error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = emulated::current_device, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return emulated::current_device = device, cudaSuccess; }
inline cudaError_t cudaMalloc(void** p, std::size_t bytes) { return *p = emulated::allocate(bytes), cudaSuccess; }
inline cudaError_t cudaFree(void* p) { return p == nullptr ? cudaSuccess : (emulated::release(p), cudaSuccess); }
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  emulated::require_sides(to, from, kind);
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  out->type = emulated::is_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new EmulatedStream{emulated::current_device}, cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  for (const auto& work : std::exchange(stream->work, {})) work();
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return (void)cudaStreamSynchronize(stream), delete stream, cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return stream->capturing = true, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t*) {
  return stream->capturing = false, cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  emulated::require_sides(to, from, kind);
  return emulated::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void* to, const T& symbol, std::size_t bytes, std::size_t, cudaMemcpyKind,
                                      cudaStream_t stream) {
  return emulated::enqueue(stream, [=, &symbol] { std::memcpy(to, &symbol, bytes); });
}
inline cudaError_t cudaMallocAsync(void** p, std::size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  return emulated::enqueue(stream, [=] { emulated::release(p); });
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
  return emulated::enqueue(stream, [=] { function(argument); });
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x == 0 || config->blockDim.x > 1024 || config->blockDim.x % 32 != 0)
    return cudaErrorInvalidValue;
  std::tuple<std::remove_cv_t<Parameters>...> copies(std::forward<Arguments>(arguments)...);
  return emulated::enqueue(config->stream, [=, grid = config->gridDim, block = config->blockDim] {
    emulated::launch(grid, block, [&] { std::apply(kernel, copies); });
  });
}
