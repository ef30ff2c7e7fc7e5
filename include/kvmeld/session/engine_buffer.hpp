#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/host_cache.hpp>
#include <kvmeld/state/target.hpp>

KVMELD_NAMESPACE_BEGIN

/// Makes the memory that a worker renders into: kvmeld's own, or the bytes that an engine will
/// import.
///
/// Semantic requirements: `make` returns a buffer whose view holds at least one row for each
/// position; it may use the memory of `recycled` (null at first) and is called by one thread at a
/// time, never the generating one while a worker lives.
template <class B>
concept CacheBacking = requires(B& backing, typename B::Buffer& buffer,
                                std::unique_ptr<typename B::Buffer> recycled,
                                const std::shared_ptr<const Geometry>& geometry,
                                std::span<const std::int64_t> positions,
                                std::span<const TokenId> tokens) {
  {
    backing.make(geometry, positions, tokens, std::move(recycled))
    } -> std::same_as<Result<std::unique_ptr<typename B::Buffer>>>;
  { buffer.mutable_ref() } -> std::convertible_to<MutableKvCacheRef>;
};

/// Rows in kvmeld's own memory, some of them still free for what is said after a swap.
class HostBuffer {
 public:
  HostBuffer(std::shared_ptr<const Geometry> geometry, std::int64_t capacity_tokens)
      : cache_(std::move(geometry), capacity_tokens) {}

  [[nodiscard]] const MutableKvCacheRef& mutable_ref() noexcept { return cache_.mutable_ref(); }
  [[nodiscard]] KvCacheRef kv_cache_ref() const { return cache_.kv_cache_ref(); }
  [[nodiscard]] std::int64_t capacity_tokens() noexcept { return cache_.mutable_ref().tokens(); }

 private:
  HostCache cache_;
};

/// Makes host buffers. Models `CacheBacking`.
struct HostBacking {
  using Buffer = HostBuffer;
  std::int64_t spare_tokens = 1024;  ///< rows beyond what is rendered, for `SwapBuffer::append`

  [[nodiscard]] Result<std::unique_ptr<HostBuffer>> make(
      const std::shared_ptr<const Geometry>& geometry, std::span<const std::int64_t> positions,
      std::span<const TokenId>, std::unique_ptr<HostBuffer> recycled) const {
    const std::int64_t needed = std::ssize(positions) + spare_tokens;
    if (recycled != nullptr && recycled->capacity_tokens() >= needed &&
        recycled->mutable_ref().geometry() == *geometry) {
      return Result(std::move(recycled));  // spelled out for nvcc, which would copy
    }
    // An eighth more: sets grow, and a buffer that fits only once is made anew each time.
    return std::make_unique<HostBuffer>(geometry, needed + needed / 8);
  }
};

/// Buffers that nobody reads any more, for the next render: clearing new memory costs more than
/// rendering into it.
template <class Buffer>
class BufferPool {
 public:
  [[nodiscard]] std::unique_ptr<Buffer> take() noexcept {
    const std::lock_guard lock(mutex_);
    for (std::unique_ptr<Buffer>& slot : free_) {
      if (slot != nullptr) return std::move(slot);
    }
    return nullptr;
  }
  /// Allocates nothing: readers and the generating thread call it. What finds no place is freed.
  void give(std::unique_ptr<Buffer> buffer) noexcept {
    const std::lock_guard lock(mutex_);
    for (std::unique_ptr<Buffer>& slot : free_) {
      if (slot == nullptr) {
        slot = std::move(buffer);
        return;
      }
    }
  }

 private:
  std::mutex mutex_;
  std::array<std::unique_ptr<Buffer>, 4> free_;
};

/// What a worker made of a set: the buffer, and everything that the agent needs to go on behind it.
///
/// Gives its buffer back to the pool when the last holder lets go.
template <class Buffer>
struct Rendered {
  std::unique_ptr<Buffer> buffer{};
  std::vector<std::int64_t> positions{};  ///< of each row, ascending
  std::vector<TokenId> tokens{};          ///< of each row; −1: not known
  std::vector<Hole> holes{};              ///< rows that the engine computes before it goes on
  RenderReport report{};
  double render_ms = 0;       ///< plan, memory and run, on the worker
  std::uint64_t request = 0;  ///< number that `RenderWorker::request` returned
  std::shared_ptr<BufferPool<Buffer>> home{};

  Rendered() = default;
  Rendered(const Rendered&) = delete;
  Rendered& operator=(const Rendered&) = delete;
  ~Rendered() {
    if (home != nullptr && buffer != nullptr) home->give(std::move(buffer));
  }

  /// Where the agent goes on: behind the last row, or at `first` where there is none.
  [[nodiscard]] std::int64_t next_position(std::int64_t first = 0) const noexcept {
    return positions.empty() ? first : positions.back() + 1;
  }
};

KVMELD_NAMESPACE_END
