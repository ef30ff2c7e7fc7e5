#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/aligner.hpp>
#include <kvmeld/align/order.hpp>
#include <kvmeld/cache/gather.hpp>
#include <kvmeld/session/render_worker.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Rows `begin` … of a cache whose tokens lie at their own index; none where it holds no more than
/// `begin`.
template <class Byte>
[[nodiscard]] BasicKvCacheRef<Byte> rows_from(const BasicKvCacheRef<Byte>& cache,
                                              std::int64_t begin) {
  begin = (std::max)((std::min)(begin, cache.tokens()), std::int64_t{0});
  std::vector<BasicPlaneRef<Byte>> planes(cache.planes().begin(), cache.planes().end());
  for (BasicPlaneRef<Byte>& plane : planes) {
    plane.slots.first += begin;
    plane.tokens -= begin;
  }
  return BasicKvCacheRef<Byte>(cache.shared_geometry(), std::move(planes), cache.tokens() - begin);
}

/// Plans one fragment alone behind what a cache holds: an agent's words since the snapshot, for its
/// own view only.
[[nodiscard]] inline auto plan_behind(const Fragment& fragment, std::int64_t position) {
  const auto keep = kvmeld::merger(ById{});
  Target target{fragment.geometry()};
  target.first_position = position;
  target.prefix_in_place = true;
  FragmentSet one(SetHash{fragment.id().tag(), nullptr});
  using P = Plan<std::remove_const_t<decltype(keep)>>;
  if (Status status = one.insert(fragment); !status) return Result<P>(status);
  return plan(one, keep, target);
}

}  // namespace detail

/// A cache as a reader holds it: it stays as it is, whatever is swapped or appended meanwhile.
template <class Buffer>
struct CacheSnapshot {
  std::shared_ptr<const Rendered<Buffer>> owner{};  ///< null: nothing was swapped in yet
  std::int64_t tokens = 0;
  std::span<const std::int64_t> positions{};
  std::span<const TokenId> token_ids{};

  [[nodiscard]] explicit operator bool() const noexcept { return owner != nullptr; }
  /// The rows. Allocates plane descriptors.
  [[nodiscard]] KvCacheRef kv_cache_ref() const {
    return KvCacheRef(owner->buffer->mutable_ref()).first(tokens);
  }
};

/// The cache that an agent of kvmeld-owned memory generates from: replaced by pointer, at a moment
/// that the agent chooses.
///
/// `swap` and `append` belong to the generating thread; `current` may be called by any. A buffer
/// that was swapped out lives while somebody holds it, then serves the next render.
class SwapBuffer {
 public:
  using Buffer = HostBuffer;

  /// What is live now. O(1), never waits for a render.
  [[nodiscard]] CacheSnapshot<Buffer> current() const {
    const std::lock_guard lock(mutex_);
    CacheSnapshot<Buffer> out;
    if (live_ == nullptr) return out;
    out.owner = live_;
    out.tokens = std::ssize(live_->positions);
    out.positions = live_->positions;
    out.token_ids = live_->tokens;
    return out;
  }

  /// Makes a rendered cache the live one. O(1).
  void swap(std::shared_ptr<Rendered<Buffer>> next) {
    const std::lock_guard lock(mutex_);
    live_.swap(next);
  }

  /// Appends rows of new tokens at the positions that follow, so that the live cache is all that
  /// the agent has seen.
  ///
  /// Errors: `output_too_small` where the buffer has no free rows left
  /// (`HostBacking::spare_tokens`), those of `gather`; the live cache is as it was then.
  Status append(const KvCacheRef& rows, std::span<const TokenId> tokens = {}) {
    if (live_ == nullptr)
      return detail::error(ErrorCode::invalid_argument, rows.tokens(),
                           " tokens, and no cache is live");
    return append_to(*live_, rows, tokens);
  }
  /// Whether a cache is live. Of the generating thread.
  [[nodiscard]] bool live() const noexcept { return live_ != nullptr; }
  /// Whether so many tokens more fit behind the live cache; true where none is live.
  [[nodiscard]] Status check_room(std::int64_t tokens) const {
    return live_ == nullptr ? Status() : room(*live_, tokens);
  }
  /// Appends a sealed span, turned to the positions that follow, to a cache that is not live yet or
  /// to the live one.
  ///
  /// `first_position` is where a cache without rows begins. Errors: as `append`, and those of
  /// `plan`.
  Status carry(Rendered<Buffer>& cache, const Fragment& fragment, std::int64_t first_position = 0) {
    const auto made = detail::plan_behind(fragment, cache.next_position(first_position));
    if (!made) return made.error();
    KVMELD_TRY(room(cache, made->tokens()));
    std::vector<std::byte> workspace(made->workspace_bytes());
    const auto at = std::ssize(cache.positions);
    const auto report =
        run(exec::seq, *made, workspace, detail::rows_from(cache.buffer->mutable_ref(), at));
    if (!report) return report.error();
    publish(cache, made->positions(), made->token_ids());
    return {};
  }

 private:
  [[nodiscard]] static Status room(Rendered<Buffer>& cache, std::int64_t tokens) {
    const std::int64_t left = cache.buffer->capacity_tokens() - std::ssize(cache.positions);
    if (tokens <= left) return {};
    return detail::error(ErrorCode::output_too_small, tokens,
                         " tokens more in a buffer with room for ", left,
                         "; raise HostBacking::spare_tokens");
  }
  Status append_to(Rendered<Buffer>& cache, const KvCacheRef& rows,
                   std::span<const TokenId> tokens) {
    if (!rows.valid())
      return detail::error(ErrorCode::invalid_argument, "the view has no geometry");
    if (!tokens.empty() && static_cast<std::int64_t>(tokens.size()) != rows.tokens()) {
      return detail::error(ErrorCode::token_count_mismatch, tokens.size(), " token ids for ",
                           rows.tokens(), " rows of K/V");
    }
    KVMELD_TRY(room(cache, rows.tokens()));
    std::vector<std::int64_t> map(static_cast<std::size_t>(rows.tokens()));
    std::iota(map.begin(), map.end(), 0);
    const auto at = std::ssize(cache.positions);
    const auto moved = gather(exec::seq, rows, std::span<const std::int64_t>(map),
                              detail::rows_from(cache.buffer->mutable_ref(), at));
    if (!moved) return moved.error();
    std::iota(map.begin(), map.end(), cache.next_position());
    std::vector<TokenId> ids(tokens.begin(), tokens.end());
    ids.resize(map.size(), TokenId{-1});
    publish(cache, map, ids);
    return {};
  }
  // Readers hold spans over what was there: the vectors have room, so nothing moves under them.
  void publish(Rendered<Buffer>& cache, std::span<const std::int64_t> positions,
               std::span<const TokenId> tokens) {
    const std::lock_guard lock(mutex_);
    cache.positions.insert(cache.positions.end(), positions.begin(), positions.end());
    cache.tokens.insert(cache.tokens.end(), tokens.begin(), tokens.end());
  }

  mutable std::mutex mutex_;
  std::shared_ptr<Rendered<Buffer>> live_;
};

KVMELD_NAMESPACE_END
