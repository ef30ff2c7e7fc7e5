#pragma once

/// Rows on a CUDA device: one warp a row, in the caller's stream.

#include <kvmeld/cuda/check_device.cuh>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <kvmeld/exec/row_work.hpp>

KVMELD_NAMESPACE_BEGIN

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

namespace gpu {

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
