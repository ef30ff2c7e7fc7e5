#pragma once

/// The parameters of kernels, uploaded in one copy.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/cuda/stream.cuh>

KVMELD_NAMESPACE_BEGIN

namespace gpu {

namespace detail {

/// Lays arrays out in a workspace, copies them there in a stream, and tells where each one went.
///
/// Small arrays are staged: gathered in one pageable buffer, copied in one transfer, and free to
/// change once `send` has returned. Large ones are attached: copied from where they lie, so they
/// stay until the stream has passed. The staging buffer is freed by the stream itself, because CUDA
/// leaves open whether a copy from pageable memory has been read when the call returns.
class Upload {
 public:
  static constexpr std::size_t alignment = 256;

  Upload() = default;
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;
  ~Upload() {
    // In a broken context the callback never comes, and the buffer is lost rather than read after
    // it is gone.
    if (sent_)
      (void)cudaLaunchHostFunc(
          stream_, [](void* buffer) { delete[] static_cast<std::byte*>(buffer); },
          staging_.release());
  }

  /// Room for an array that is written to `staged` after `place`.
  [[nodiscard]] std::size_t reserve(std::size_t bytes) { return take(staged_bytes_, bytes); }
  void stage(const void* host, std::size_t bytes) { add(host, bytes, false); }
  void attach(const void* host, std::size_t bytes) { add(host, bytes, true); }
  /// Declares that a device has the array already.
  void resident(const void* host, std::size_t bytes, const std::byte* device) {
    pieces_.push_back({static_cast<const std::byte*>(host), bytes, 0, false, device});
  }

  /// Bytes of workspace, wherever it starts.
  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    return staged_bytes_ + attached_bytes_ + alignment;
  }

  /// Fixes where everything goes and fills the staging buffer; nothing is copied to the device yet.
  [[nodiscard]] Status place(std::span<std::byte> workspace) {
    if (workspace.size() < workspace_bytes()) {
      return extend::error(ErrorCode::workspace_too_small, "device workspace of ", workspace.size(),
                           " bytes, ", workspace_bytes(), " are needed");
    }
    const std::size_t past = reinterpret_cast<std::uintptr_t>(workspace.data()) % alignment;
    base_ = workspace.data() + (past == 0 ? 0 : alignment - past);
    staging_.reset(new std::byte[staged_bytes_ + 1]());
    for (Piece& piece : pieces_) {
      if (piece.device != nullptr) continue;
      piece.device = base_ + piece.offset + (piece.attached ? staged_bytes_ : 0);
      if (!piece.attached) std::memcpy(staging_.get() + piece.offset, piece.host, piece.bytes);
    }
    std::sort(pieces_.begin(), pieces_.end(),
              [](const Piece& a, const Piece& b) { return a.host < b.host; });
    return {};
  }
  template <class T>
  [[nodiscard]] T* staged(std::size_t offset) noexcept {
    return reinterpret_cast<T*>(staging_.get() + offset);
  }
  template <class T>
  [[nodiscard]] T* device(std::size_t offset) noexcept {
    return reinterpret_cast<T*>(base_ + offset);
  }
  /// Where a host pointer's target lies on the device; null for an empty array.
  template <class T>
  [[nodiscard]] const T* operator()(const T* host) const noexcept {
    const auto* p = reinterpret_cast<const std::byte*>(host);
    if (p >= staging_.get() && p < staging_.get() + staged_bytes_)
      return reinterpret_cast<const T*>(base_ + (p - staging_.get()));
    auto at =
        std::upper_bound(pieces_.begin(), pieces_.end(), p,
                         [](const std::byte* q, const Piece& piece) { return q < piece.host; });
    if (at == pieces_.begin()) return nullptr;
    --at;
    return p < at->host + at->bytes ? reinterpret_cast<const T*>(at->device + (p - at->host))
                                    : nullptr;
  }

  /// Enqueues the copies.
  [[nodiscard]] Status send(const gpu::Stream& stream) {
    stream_ = stream.get();
    if (staged_bytes_ > 0) {
      KVMELD_TRY(copy(base_, staging_.get(), staged_bytes_));
      sent_ = true;
    }
    for (const Piece& piece : pieces_) {
      if (piece.attached)
        KVMELD_TRY(copy(base_ + staged_bytes_ + piece.offset, piece.host, piece.bytes));
    }
    return {};
  }

 private:
  struct Piece {
    const std::byte* host;
    std::size_t bytes;
    std::size_t offset;
    bool attached;
    const std::byte* device;
  };
  static std::size_t take(std::size_t& used, std::size_t bytes) {
    const std::size_t at = used;
    used += (bytes + alignment - 1) / alignment * alignment;
    return at;
  }
  void add(const void* host, std::size_t bytes, bool attached) {
    if (bytes == 0) return;
    std::size_t& used = attached ? attached_bytes_ : staged_bytes_;
    for (Piece& piece : pieces_) {
      if (piece.host != host) continue;
      if (piece.bytes < bytes) piece = {piece.host, bytes, take(used, bytes), attached, nullptr};
      return;
    }
    pieces_.push_back(
        {static_cast<const std::byte*>(host), bytes, take(used, bytes), attached, nullptr});
  }
  [[nodiscard]] Status copy(std::byte* to, const void* from, std::size_t bytes) {
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_),
                       "copying a plan to the device");
  }

  std::vector<Piece> pieces_;
  std::unique_ptr<std::byte[]> staging_;
  std::size_t staged_bytes_ = 0;
  std::size_t attached_bytes_ = 0;
  std::byte* base_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool sent_ = false;
};

/// Bytes of a plane's slot table.
[[nodiscard]] inline std::size_t table_bytes(const TokenSlots& slots,
                                             std::int64_t tokens) noexcept {
  if (slots.kind == SlotKind::identity || tokens <= 0) return 0;
  const bool blocks = extend::is_block_table(slots.kind);
  if (blocks && slots.block_size <= 0) return 0;
  const std::int64_t entries = blocks ? (tokens - 1) / slots.block_size + 1 : tokens;
  const bool narrow =
      slots.kind == SlotKind::block_table_i32 || slots.kind == SlotKind::slot_list_i32;
  return static_cast<std::size_t>(entries) * (narrow ? 4 : 8);
}

/// The planes of a cache whose elements a device reads or writes, and whether the host can read
/// their slot tables.
template <class Byte>
struct DeviceView {
  std::vector<BasicPlaneRef<Byte>> planes;
  std::vector<std::uint8_t> readable;  // (planes)

  [[nodiscard]] bool all_readable() const noexcept {
    return std::find(readable.begin(), readable.end(), 0) == readable.end();
  }

  void stage_tables(Upload& upload) const {
    for (std::size_t p = 0; p < planes.size(); ++p) {
      if (readable[p] != 0)
        upload.stage(planes[p].slots.table, table_bytes(planes[p].slots, planes[p].tokens));
    }
  }
  /// Points host tables to where they went.
  void follow_tables(const Upload& upload) {
    for (std::size_t p = 0; p < planes.size(); ++p) {
      TokenSlots& slots = planes[p].slots;
      if (readable[p] != 0 && slots.kind != SlotKind::identity)
        slots.table = upload(static_cast<const std::byte*>(slots.table));
    }
  }
};

/// Looks at a view's declared memory and at its pointers: elements must be the device's, tables may
/// lie on either side. Tables on the host are checked. Errors: those of `check_view_planes`,
/// `memory_space`, `engine_failure`.
template <class Byte>
[[nodiscard]] Result<DeviceView<Byte>> device_view(const BasicKvCacheRef<Byte>& cache,
                                                   std::int64_t tokens) {
  KVMELD_TRY(extend::check_view_planes(cache, "gpu::Stream"));
  DeviceView<Byte> view;
  const void* last_table = nullptr;
  bool last_readable = true;
  for (BasicPlaneRef<Byte> plane : cache.planes()) {
    plane.tokens = tokens;
    cudaPointerAttributes memory{};
    if (tokens > 0 && plane.shape.heads > 0 && plane.shape.channels > 0) {
      if (!device_reaches(plane.space)) {
        return extend::error(
            ErrorCode::memory_space, "plane ", view.planes.size(), " is declared to lie in ",
            to_string(plane.space),
            " memory, which the device cannot reach; a gpu::Stream needs a view over ",
            "device memory that says so: view.in(MemorySpace::device)");
      }
      KVMELD_TRY(
          cuda_status(cudaPointerGetAttributes(&memory, plane.data), "asking where a plane lies"));
      if (memory.type == cudaMemoryTypeUnregistered) {
        return extend::error(ErrorCode::memory_space, "plane ", view.planes.size(),
                             " is declared to lie in ", to_string(plane.space),
                             " memory and lies in host memory that the device cannot reach; ",
                             "a gpu::Stream needs a view over device memory");
      }
    }
    bool readable = true;
    if (plane.slots.kind != SlotKind::identity && plane.slots.table != nullptr) {
      if (plane.slots.table != last_table) {
        KVMELD_TRY(cuda_status(cudaPointerGetAttributes(&memory, plane.slots.table),
                               "asking where a slot table lies"));
        last_table = plane.slots.table;
        last_readable =
            memory.type == cudaMemoryTypeUnregistered || memory.type == cudaMemoryTypeHost;
      }
      readable = last_readable;
    }
    if (readable) KVMELD_TRY(extend::check_slots(plane.slots, tokens));
    view.planes.push_back(plane);
    view.readable.push_back(readable ? 1 : 0);
  }
  return view;
}

/// Refuses a stream that records a graph: replays would read staging memory that is gone.
[[nodiscard]] inline Status check_not_capturing(const gpu::Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  KVMELD_TRY(cuda_status(cudaStreamIsCapturing(stream.get(), &status),
                         "asking whether the stream is captured"));
  if (status == cudaStreamCaptureStatusNone) return {};
  return extend::error(
      ErrorCode::unsupported,
      "the stream is being captured into a graph; a plan's arrays are copied once and "
      "cannot be replayed");
}

}  // namespace detail

}  // namespace gpu

KVMELD_NAMESPACE_END
