#pragma once
// A test cache's twin in device memory.

#include <cuda_runtime.h>

#include <vector>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace test {

inline void require_cuda(cudaError_t code) {
  INFO(cudaGetErrorString(code));
  REQUIRE(code == cudaSuccess);
}

/// Device memory that goes with its scope.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    require_cuda(cudaMalloc(&data_, bytes + 1));
  }
  DeviceBytes(DeviceBytes&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::span<std::byte> span() const { return {data(), bytes_}; }
  void upload(const void* from) const {
    require_cuda(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice));
  }
  void download(void* to) const {
    require_cuda(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

/// A stream of its own, that does not wait for the default one.
class TestStream {
 public:
  TestStream() { require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() { cudaStreamDestroy(stream_); }

  [[nodiscard]] kvmeld::gpu::Stream get() const { return kvmeld::gpu::Stream{stream_}; }
  void wait() const { require_cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Where slot tables lie.
enum class Tables { host, device };

class DeviceCache {
 public:
  DeviceCache(TestCache& host, Tables tables) {
    std::vector<kvmeld::MutablePlaneRef> planes;
    for (std::size_t p = 0; p < host.planes(); ++p) {
      buffers_.emplace_back(host.buffers()[p].size());
      buffers_.back().upload(host.buffers()[p].data());
      kvmeld::MutablePlaneRef plane = host.out().planes()[p];
      plane.data = buffers_.back().data();
      plane.space = kvmeld::MemorySpace::device;
      const std::size_t bytes = kvmeld::gpu::detail::table_bytes(plane.slots, plane.tokens);
      if (bytes > 0 && tables == Tables::device) {
        tables_.emplace_back(bytes);
        tables_.back().upload(plane.slots.table);
        plane.slots.table = tables_.back().data();
      } else if (bytes > 0) {
        const auto* first = static_cast<const std::byte*>(plane.slots.table);
        host_tables_.emplace_back(first, first + bytes);
        plane.slots.table = host_tables_.back().data();
      }
      planes.push_back(plane);
    }
    ref_ =
        kvmeld::MutableKvCacheRef(host.out().shared_geometry(), std::move(planes), host.tokens());
  }

  [[nodiscard]] const kvmeld::MutableKvCacheRef& out() const { return ref_; }
  /// Host tables may change as soon as a call has returned.
  void spoil_tables() {
    for (std::vector<std::byte>& table : host_tables_)
      std::fill(table.begin(), table.end(), std::byte{0x11});
  }
  [[nodiscard]] std::vector<std::vector<std::byte>> download() const {
    std::vector<std::vector<std::byte>> out;
    for (const DeviceBytes& buffer : buffers_) {
      out.emplace_back(buffer.span().size());
      buffer.download(out.back().data());
    }
    return out;
  }

 private:
  std::vector<DeviceBytes> buffers_;
  std::vector<DeviceBytes> tables_;
  std::vector<std::vector<std::byte>> host_tables_;
  kvmeld::MutableKvCacheRef ref_;
};

}  // namespace test
