#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <kvmeld/session/swap_buffer.hpp>

KVMELD_NAMESPACE_BEGIN

/// What replacing an agent's cache took.
struct InstallReport {
  std::int64_t next_position = 0;  ///< of the next token
  std::int64_t carried_tokens = 0;
  std::int64_t recomputed_tokens = 0;  ///< holes that the engine computed
  std::int64_t import_bytes = 0;       ///< 0: the cache was swapped by pointer
  double import_ms = 0;
  double recompute_ms = 0;
};

/// The cache that an agent generates from, wherever it lies: in kvmeld's memory, or in an engine's.
///
/// Semantic requirements:
///  - `backing()` makes the worker's memory and is called once;
///  - `install` replaces the cache by a rendered one, with the agent's own words since the snapshot
///    behind it, at a safe point of the generating thread; on an error the cache is as it was, and
///    the rendered one can be given again. It never waits for a render, and takes time for what it
///    moves only;
///  - `check_room` says whether so many further tokens fit, `append` puts them there; an engine
///    that has them already does nothing.
template <class S>
concept SwapMemory = requires(S& memory,
                              std::shared_ptr<Rendered<typename S::Backing::Buffer>> next,
                              std::span<const Fragment> carried, std::int64_t first_position,
                              const KvCacheRef& rows, std::span<const TokenId> tokens) {
  requires CacheBacking<typename S::Backing>;
  { memory.backing() } -> std::same_as<typename S::Backing>;
  {
    memory.install(std::move(next), carried, first_position)
    } -> std::same_as<Result<InstallReport>>;
  { memory.check_room(rows.tokens()) } -> std::same_as<Status>;
  { memory.append(rows, tokens) } -> std::same_as<Status>;
};

/// Memory of kvmeld's own, swapped by pointer. Models `SwapMemory`.
class HostMemory {
 public:
  using Backing = HostBacking;

  explicit HostMemory(HostBacking backing = {})
      : backing_(backing), buffer_(std::make_unique<SwapBuffer>()) {}

  [[nodiscard]] HostBacking backing() const noexcept { return backing_; }
  /// Errors: `output_too_small` where the words since the snapshot do not fit; those of `plan`.
  [[nodiscard]] Result<InstallReport> install(std::shared_ptr<Rendered<HostBuffer>> next,
                                              std::span<const Fragment> carried,
                                              std::int64_t first_position) {
    const auto rendered = std::ssize(next->positions);
    for (const Fragment& fragment : carried) {
      if (Status status = buffer_->carry(*next, fragment, first_position); !status) {
        next->positions.resize(static_cast<std::size_t>(rendered));
        next->tokens.resize(static_cast<std::size_t>(rendered));
        return status;
      }
    }
    InstallReport report;
    report.next_position = next->next_position(first_position);
    report.carried_tokens = std::ssize(next->positions) - rendered;
    buffer_->swap(std::move(next));
    return report;
  }
  [[nodiscard]] Status check_room(std::int64_t tokens) const { return buffer_->check_room(tokens); }
  Status append(const KvCacheRef& rows, std::span<const TokenId> tokens) {
    return buffer_->live() ? buffer_->append(rows, tokens) : Status();
  }

  /// What is live now; any thread.
  [[nodiscard]] CacheSnapshot<HostBuffer> current() const { return buffer_->current(); }

 private:
  HostBacking backing_;
  std::unique_ptr<SwapBuffer> buffer_;  // its address stays when the memory moves
};

KVMELD_NAMESPACE_END
