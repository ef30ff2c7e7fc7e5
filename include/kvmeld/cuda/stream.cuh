#pragma once

/// Executes on a CUDA stream; device memory as a cache view, checked.

#if !defined(__CUDACC__)
#error "kvmeld: headers *.cuh need nvcc -std=c++20; host code includes <kvmeld/kvmeld.hpp>"
#endif

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include <cuda_runtime.h>

#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace gpu {

// Whether a device computes as IEEE says, under the options that this translation unit was
// compiled with.

namespace detail {

/// An error that carries CUDA's own text.
[[nodiscard]] inline Status cuda_status(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  return extend::error(ErrorCode::engine_failure, "CUDA: ", what, ": ", cudaGetErrorName(code),
                       ", ", cudaGetErrorString(code));
}

inline constexpr unsigned probe_flush = 1;
inline constexpr unsigned probe_division = 2;
inline constexpr unsigned probe_root = 4;
inline constexpr unsigned probe_fma = 8;

/// Questions to a device and the answers that a conforming one gives, worked out by the host.
struct DeviceProbe {
  float a[32];
  float b[32];
  std::uint32_t quotient[32];
  std::uint32_t root[32];
  float least;
  float factor;
};

[[nodiscard]] inline DeviceProbe device_probe() noexcept {
  DeviceProbe probe{};
  for (int i = 0; i < 32; ++i) {
    // Volatile, so that the host's compiler answers by the processor's instructions.
    volatile float a = 1.0F + static_cast<float>(i) * 0.37F;
    volatile float b = 49.0F - static_cast<float>(i) * 1.3F;
    probe.a[i] = a;
    probe.b[i] = b;
    probe.quotient[i] = extend::float_bits(a / b);
    probe.root[i] = extend::float_bits(math::sqrt(float{a}));
  }
  probe.least = 0x1p-149F;
  probe.factor = 1.0F + 0x1p-12F;
  return probe;
}

// Kernels, and every function between a caller and a kernel, are static or inlined: nvcc's options
// differ between files, and two libraries for different architectures may meet in one process, so a
// file must launch its own kernels and judge its own options. Static, since nvcc makes a named
// namespace of an unnamed one.

[[maybe_unused]] static __device__ unsigned probe_faults;

// A template only because nvcc gives the host stub of any other kernel external linkage.
template <class Probe>
static __global__ void probe_arithmetic(const Probe probe) {
  const unsigned lane = threadIdx.x;
  const float scaled = probe.least * 0.75F;
  const float fused = fma(probe.factor, probe.factor, -(1.0F + 0x1p-11F));
  unsigned faults = 0;
  if (extend::float_bits(scaled) != 1U) faults |= probe_flush;
  if (extend::float_bits(probe.a[lane] / probe.b[lane]) != probe.quotient[lane])
    faults |= probe_division;
  if (extend::float_bits(math::sqrt(probe.a[lane])) != probe.root[lane]) faults |= probe_root;
  if (fused != 0x1p-24F) faults |= probe_fma;
  for (unsigned half = 16; half > 0; half /= 2)
    faults |= __shfl_down_sync(0xffffffffU, faults, half);
  if (lane == 0) probe_faults = faults;
}

[[maybe_unused]] static Result<unsigned> ask_device() {
  cudaStream_t stream = nullptr;
  KVMELD_TRY(cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                         "a stream for the device check"));
  unsigned faults = 0;
  const DeviceProbe probe = device_probe();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = stream;
  cudaError_t code = cudaLaunchKernelEx(&config, probe_arithmetic<DeviceProbe>, probe);
  if (code == cudaSuccess)
    code = cudaMemcpyFromSymbolAsync(&faults, probe_faults, sizeof(faults), 0,
                                     cudaMemcpyDeviceToHost, stream);
  const cudaError_t waited = cudaStreamSynchronize(stream);
  const cudaError_t destroyed = cudaStreamDestroy(stream);
  for (const cudaError_t next : {waited, destroyed}) {
    if (code == cudaSuccess) code = next;
  }
  KVMELD_TRY(cuda_status(code, "the device check"));
  return faults;
}

}  // namespace detail

/// Asks the current device once whether it keeps subnormals and rounds division, roots and fma as
/// IEEE says.
///
/// nvcc's `--use_fast_math` and `-ftz=true` define no macro, so only a kernel sees them. The first
/// call on a device runs one of 32 threads in a stream of its own and waits for it; later ones read
/// the remembered answer. `run`, `render` and `gather` call it; who must not wait there calls it at
/// start-up, from a file compiled with the same options. Errors: `float_environment` with the
/// options to leave out, `engine_failure` with CUDA's text (not remembered).
[[nodiscard]] [[maybe_unused]] static Status check_device() {
  constexpr int remembered = 64;
  constexpr unsigned asked = 0x80;
  static std::atomic<unsigned> answers[remembered] = {};
  int device = 0;
  KVMELD_TRY(detail::cuda_status(cudaGetDevice(&device), "no current device"));
  unsigned answer = device < remembered ? answers[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    const Result<unsigned> faults = detail::ask_device();
    if (!faults) return faults.error();
    answer = *faults | asked;
    if (device < remembered) answers[device].store(answer, std::memory_order_relaxed);
  }
  if (answer == asked) return {};
  std::string what;
  if ((answer & detail::probe_flush) != 0)
    what += " subnormal numbers are flushed to zero (-ftz=true);";
  if ((answer & detail::probe_division) != 0) what += " division is approximate (-prec-div=false);";
  if ((answer & detail::probe_root) != 0)
    what += " square roots are approximate (-prec-sqrt=false);";
  if ((answer & detail::probe_fma) != 0) what += " fused multiply-add rounds twice;";
  return extend::error(ErrorCode::float_environment, "floating-point results of device ", device,
                       " would differ:", what, " compile without --use_fast_math and its parts");
}

// Rows on a CUDA device: one warp a row, in the caller's stream.

namespace detail {

/// The state of lane `lane + delta`, for any trivially copyable state.
template <class S>
[[nodiscard]] __device__ inline S shuffle_words(S state, int delta, bool broadcast) {
  static_assert(
      std::is_trivially_copyable_v<S>,
      "kvmeld: a row work's State travels between lanes as words: it must be trivially copyable");
  if constexpr (std::is_empty_v<S>) {
    return state;
  } else {
    constexpr unsigned whole_warp = 0xffffffffU;
    unsigned words[(sizeof(S) + 3) / 4] = {};
    memcpy(words, &state, sizeof(S));
    for (unsigned& word : words) {
      word = broadcast ? __shfl_sync(whole_warp, word, 0)
                       : __shfl_down_sync(whole_warp, word, static_cast<unsigned>(delta));
    }
    memcpy(&state, words, sizeof(S));
    return state;
  }
}

/// The tree of `join_lanes`: lane l < half joins lane l + half, then everyone reads lane 0.
template <class W>
static __global__ void run_rows(std::int64_t rows, const W work) {
  const int lane = static_cast<int>(threadIdx.x % lanes_per_row);
  const std::int64_t warps_per_block = blockDim.x / lanes_per_row;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * warps_per_block + threadIdx.x / lanes_per_row;
  for (std::int64_t row = first; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * warps_per_block) {
    typename W::State state = work.partial(row, lane);
    if constexpr (!std::is_empty_v<typename W::State>) {
      for (int half = lanes_per_row / 2; half > 0; half /= 2) {
        const typename W::State other = shuffle_words(state, half, false);
        if (lane < half) state = W::join(state, other);
      }
      state = shuffle_words(state, 0, true);
    }
    work.finish(row, lane, state);
  }
}

template <class W>
static Status launch_rows(cudaStream_t stream, std::int64_t rows, const W& work) {
  static_assert(sizeof(W) <= 4000,
                "kvmeld: a row work is passed to the kernel by value: keep it below 4000 bytes, "
                "with pointers to what is larger");
  if (rows <= 0) return {};
  constexpr unsigned warps_per_block = 4;
  constexpr std::int64_t most_blocks = std::int64_t{1} << 20;  // beyond it, warps take several rows
  const std::int64_t blocks = (rows + warps_per_block - 1) / warps_per_block;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks));
  config.blockDim = dim3(warps_per_block * lanes_per_row);
  config.stream = stream;
  // Not <<<>>>: its error would have to be read from the thread's last error, which may be another
  // call's.
  return cuda_status(cudaLaunchKernelEx(&config, run_rows<W>, rows, work),
                     "launch of a row kernel");
}

}  // namespace detail

/// A CUDA stream of the caller's as an execution policy; does not own it.
///
/// Everything is enqueued in this stream, whose device must be the current one. Nothing waits,
/// nothing is allocated, no other stream is touched, except where a function's own documentation
/// says so.
class Stream {
 public:
  static constexpr bool on_device = true;

  /// There is no default: a caller who wants the default stream names it,
  /// `Stream{cudaStreamPerThread}`.
  explicit Stream(cudaStream_t stream) noexcept : stream_(stream) {
    if (cudaGetDevice(&device_) != cudaSuccess) device_ = -1;
  }

  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }
  /// The device that was current where this was made; −1: there was none.
  [[nodiscard]] int device() const noexcept { return device_; }

  /// Enqueues one warp for each row; `work` is copied, what it points to is device memory.
  ///
  /// Errors: `engine_failure` with CUDA's text where the launch is refused. What goes wrong later
  /// is the stream's to tell.
  template <RowWork W>
  KVMELD_ALWAYS_INLINE Status bulk(std::int64_t rows, const W& work) const {
    return detail::launch_rows(stream_, rows, work);
  }

 private:
  cudaStream_t stream_;
  int device_ = -1;
};

}  // namespace gpu

KVMELD_NAMESPACE_END
