#pragma once

/// Memory of a session: spans being said, rendered caches, and what carries them into an engine.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/gather.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/policies/order.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

namespace detail {

/// Rows of tokens that are not sealed yet, copied out of the engine's cache in canonical order, so
/// that the engine may go on.
class RowBuffer {
 public:
  explicit RowBuffer(std::shared_ptr<const Geometry> geometry) : geometry_(std::move(geometry)) {
    present_.resize(geometry_->layers.size());
    for (const LayerShape& layer : geometry_->layers) {
      for (const PlaneShape& shape : layer.planes) planes_.push_back({shape, {}, {}});
    }
  }

  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return geometry_;
  }

  /// Copies the rows of tokens `first` … `rows.tokens() − 1` behind those that are there. On an
  /// error nothing changed.
  Status append(const KvCacheRef& rows, std::int64_t first) {
    KVMELD_TRY(check(rows));
    Status status;
    std::size_t index = 0;
    for (std::size_t l = 0; l < geometry_->layers.size() && status; ++l) {
      for (std::size_t p = 0; p < geometry_->layers[l].planes.size() && status; ++p, ++index) {
        status = append_plane(planes_[index], rows.plane(l, p), first, rows.tokens());
        if (!status)
          status = extend::error(status.code(), "layer ", l, " plane ", p, ": ", status.message());
      }
    }
    if (!status) {
      shrink(tokens_);
      return status;
    }
    for (std::size_t l = 0; l < geometry_->layers.size(); ++l) {
      for (std::int64_t t = first; t < rows.tokens(); ++t) {
        present_[l].push_back(
            geometry_->layers[l].planes.empty() || rows.plane(l, 0).slots.slot(t) >= 0 ? 1 : 0);
      }
    }
    tokens_ += rows.tokens() - first;
    return {};
  }

  /// Forgets the first `count` tokens. O(tokens that stay).
  void drop_front(std::int64_t count) {
    const auto n = static_cast<std::ptrdiff_t>(count);
    for (PlaneRows& plane : planes_) {
      plane.bytes.erase(plane.bytes.begin(), plane.bytes.begin() + n * token_bytes(plane.shape));
      plane.scales.erase(plane.scales.begin(),
                         plane.scales.begin() + n * token_scales(plane.shape));
    }
    for (std::vector<std::uint8_t>& layer : present_) layer.erase(layer.begin(), layer.begin() + n);
    tokens_ -= count;
  }

  /// A view and the slot lists of layers that do not hold every token; stays true until the buffer
  /// changes.
  struct View {
    std::vector<std::vector<std::int32_t>> slots;
    KvCacheRef ref;
  };
  /// The first `count` tokens.
  [[nodiscard]] View view(std::int64_t count) const {
    View out;
    std::vector<PlaneRef> planes;
    std::size_t index = 0;
    for (std::size_t l = 0; l < geometry_->layers.size(); ++l) {
      std::vector<std::int32_t>& slots = out.slots.emplace_back();
      bool all = true;
      for (std::int64_t t = 0; t < count; ++t) {
        const bool here = present_[l][static_cast<std::size_t>(t)] != 0;
        all = all && here;
        slots.push_back(here ? static_cast<std::int32_t>(t) : -1);
      }
      for (std::size_t p = 0; p < geometry_->layers[l].planes.size(); ++p, ++index) {
        const PlaneRows& plane = planes_[index];
        planes.push_back(
            extend::canonical_plane(plane.shape, plane.bytes.data(), plane.scales.data(), count));
        if (!all) planes.back().slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
      }
    }
    out.ref = KvCacheRef(geometry_, std::move(planes), count);
    return out;
  }

 private:
  struct PlaneRows {
    PlaneShape shape;
    std::vector<std::byte> bytes;  // (token, head, channel)
    std::vector<float> scales;     // (token, head, group)
  };

  [[nodiscard]] static std::ptrdiff_t token_bytes(const PlaneShape& shape) {
    return extend::row_bytes(shape) * shape.heads;
  }
  [[nodiscard]] static std::ptrdiff_t token_scales(const PlaneShape& shape) {
    return extend::row_scales(shape) * shape.heads;
  }

  [[nodiscard]] Status check(const KvCacheRef& rows) const {
    KVMELD_TRY(extend::check_on_host(rows, "append"));
    for (std::size_t l = 0; l < geometry_->layers.size(); ++l) {
      for (std::size_t p = 0; p < geometry_->layers[l].planes.size(); ++p) {
        const PlaneRef& plane = rows.plane(l, p);
        KVMELD_TRY(extend::check_scales(plane, "append"));
        for (std::int64_t t = 0; p > 0 && t < rows.tokens(); ++t) {
          if ((plane.slots.slot(t) >= 0) != (rows.plane(l, 0).slots.slot(t) >= 0)) {
            return extend::error(ErrorCode::token_count_mismatch, "layer ", l, ": plane ", p,
                                 " and plane 0 disagree about token ", t);
          }
        }
      }
    }
    return {};
  }

  [[nodiscard]] static Status append_plane(PlaneRows& plane, const PlaneRef& rows,
                                           std::int64_t first, std::int64_t last) {
    const std::size_t before = plane.bytes.size(), scales_before = plane.scales.size();
    const std::int64_t count = last - first;
    plane.bytes.resize(before + static_cast<std::size_t>(count * token_bytes(plane.shape)));
    plane.scales.resize(scales_before +
                        static_cast<std::size_t>(count * token_scales(plane.shape)));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t slot = rows.slots.slot(first + i);
      if (slot < 0) continue;
      extend::gather_heads(
          rows, slot,
          plane.bytes.data() + before + static_cast<std::size_t>(i * token_bytes(plane.shape)));
      if (plane.shape.scales != ScaleScheme::none) {
        extend::gather_scales(rows, slot,
                              plane.scales.data() + scales_before +
                                  static_cast<std::size_t>(i * token_scales(plane.shape)));
      }
    }
    const auto scales = std::as_writable_bytes(std::span(plane.scales).subspan(scales_before));
    const double scale = extend::normalise(ElementType::f32, scales.data(), scales.size());
    if (!extend::is_finite(extend::normalise(plane.shape.type, plane.bytes.data() + before,
                                             plane.bytes.size() - before)) ||
        !extend::is_finite(scale)) {
      return extend::error(ErrorCode::non_finite, "one of ", count,
                           " new rows holds a NaN or an infinity");
    }
    return {};
  }
  void shrink(std::int64_t tokens) {
    for (PlaneRows& plane : planes_) {
      plane.bytes.resize((std::min)(plane.bytes.size(),
                                    static_cast<std::size_t>(tokens * token_bytes(plane.shape))));
      plane.scales.resize((std::min)(plane.scales.size(),
                                     static_cast<std::size_t>(tokens * token_scales(plane.shape))));
    }
  }

  std::shared_ptr<const Geometry> geometry_;
  std::vector<PlaneRows> planes_;                   // layer-major
  std::vector<std::vector<std::uint8_t>> present_;  // (layer, token)
  std::int64_t tokens_ = 0;
};

}  // namespace detail

/// When spans end, and whether they come in two encodings.
struct SpanOptions {
  /// Tokens of content that make a span full; 0: spans end by hand or at a rotation's end only.
  std::int64_t seal_every = 0;
  /// Each span is also encoded without lead-in, and is full only when both encodings are.
  bool variants = false;
};

/// Where a span begins, and what stands before it in the engine's context.
struct SpanStart {
  Context context{};  ///< the prefix, and the digest of the lead-in (`lead_in_digest`)
  std::int64_t first_position = 0;  ///< of the first token that will be appended, lead-in included
  /// Tokens of lead-in that will be appended before the content, and are dropped.
  std::int64_t drop_first = 0;
  /// Of the first token of the encoding without lead-in: where the prefix ends.
  std::int64_t variant_position = 0;
};

/// The lead-in of what an agent goes on to say behind its own sealed span: its earlier context
/// serves as one.
[[nodiscard]] inline Digest128 continued_lead_in(const Digest128& lead_in,
                                                 const FragmentId& before) {
  Hasher hasher;
  hasher.text("kvmeld.lead_in.continued");
  hasher.value(lead_in.low);
  hasher.value(lead_in.high);
  hasher.bytes(std::as_bytes(std::span(before.bytes)));
  return hasher.digest();
}

/// Collects the K/V of new tokens as an engine computes them, and seals them into fragments.
///
/// Rows are copied, so the engine may overwrite its own. Positions are counted here and only
/// compared with what the engine says. Errors leave the buffer as it was. Not for several threads
/// at once.
class SpanBuffer {
 public:
  /// @param hash names the fragments.
  explicit SpanBuffer(const std::shared_ptr<const Geometry>& geometry, SpanOptions options = {},
                      const SpanStart& start = {}, const SetHash& hash = {})
      : options_(options), hash_(hash), rows_(geometry), variant_rows_(geometry) {
    begin(start);
  }

  /// Begins a span; what was appended and not sealed is forgotten. `first_position` ≥ 0.
  void begin(const SpanStart& start) {
    rows_.drop_front(rows_.tokens());
    variant_rows_.drop_front(variant_rows_.tokens());
    tokens_.clear();
    positions_.clear();
    start_ = start;
    to_drop_ = start.drop_first;
    next_ = start.first_position;
    variant_next_ = start.variant_position;
  }

  /// Copies the rows of new tokens, the next ones in the engine's context. `tokens` and `positions`
  /// are one a row, or empty: latent tokens, and the positions that follow. O(bytes).
  ///
  /// Errors: `position_gap` and `duplicate_position` where positions do not go on from
  /// `next_position()`; `token_count_mismatch`; `geometry_mismatch`; `non_finite`;
  /// `invalid_argument`.
  Status append(const KvCacheRef& rows, std::span<const TokenId> tokens = {},
                std::span<const std::int64_t> positions = {}) {
    KVMELD_TRY(check(rows, positions, next_));
    if (!tokens.empty() && static_cast<std::int64_t>(tokens.size()) != rows.tokens()) {
      return extend::error(ErrorCode::token_count_mismatch, tokens.size(), " token ids for ",
                           rows.tokens(), " rows of K/V");
    }
    const std::int64_t dropped = (std::min)(to_drop_, rows.tokens());
    const std::int64_t kept = rows.tokens() - dropped;
    if (kept > 0 && pending() > 0 && tokens.empty() != tokens_.empty()) {
      return extend::error(ErrorCode::token_count_mismatch, "a span of ", pending(), " tokens is ",
                           tokens_.empty() ? "latent" : "not latent", ", and the next ", kept,
                           " are otherwise; seal between them");
    }
    KVMELD_TRY(rows_.append(rows, dropped));
    for (std::int64_t t = dropped; t < rows.tokens(); ++t) {
      positions_.push_back(next_ + t);
      if (!tokens.empty()) tokens_.push_back(tokens[static_cast<std::size_t>(t)]);
    }
    to_drop_ -= dropped;
    next_ += rows.tokens();
    return {};
  }
  /// Copies rows of the same tokens, encoded right behind the prefix. Errors: as `append`;
  /// `invalid_argument` where the options ask for no variants.
  Status append_variant(const KvCacheRef& rows, std::span<const std::int64_t> positions = {}) {
    if (!options_.variants)
      return extend::error(ErrorCode::invalid_argument, rows.tokens(),
                           " rows of a variant that SpanOptions does not ask for");
    KVMELD_TRY(check(rows, positions, variant_next_));
    if (options_.seal_every > 0 && variant_rows_.tokens() + rows.tokens() > options_.seal_every) {
      return extend::error(
          ErrorCode::invalid_argument, variant_rows_.tokens() + rows.tokens(),
          " rows of a variant for one span of ", options_.seal_every,
          "; the next span's variant begins behind the prefix again, once this one is sealed");
    }
    KVMELD_TRY(variant_rows_.append(rows, 0));
    variant_next_ += rows.tokens();
    return {};
  }

  /// The position of the next token in the engine's context: what to decode at.
  [[nodiscard]] std::int64_t next_position() const noexcept { return next_; }
  /// Tokens of content that are not sealed yet.
  [[nodiscard]] std::int64_t pending() const noexcept { return rows_.tokens(); }
  /// Whether `seal_every` tokens are there.
  [[nodiscard]] bool full() const noexcept {
    return options_.seal_every > 0 && pending() >= options_.seal_every &&
           (!options_.variants || variant_rows_.tokens() >= options_.seal_every);
  }
  [[nodiscard]] const Context& context() const noexcept { return start_.context; }

  /// Seals the next `seal_every` tokens; what comes after them stays. Errors: `invalid_argument`
  /// where there are fewer.
  [[nodiscard]] Result<Fragment> seal_full() {
    if (!full())
      return extend::error(ErrorCode::invalid_argument, pending(), " tokens are no full span of ",
                           options_.seal_every);
    return seal_first(options_.seal_every);
  }
  /// Seals everything that is pending: at a rotation's end, or by hand. Zero tokens make a valid,
  /// empty fragment.
  ///
  /// Errors: `token_count_mismatch` where the variant does not encode as many tokens.
  [[nodiscard]] Result<Fragment> seal() { return seal_first(pending()); }

 private:
  [[nodiscard]] Status check(const KvCacheRef& rows, std::span<const std::int64_t> positions,
                             std::int64_t next) const {
    if (!rows.valid())
      return extend::error(ErrorCode::invalid_argument, "the view has no geometry");
    KVMELD_TRY(check_same(*rows_.shared_geometry(), rows.geometry()));
    if (!positions.empty() && static_cast<std::int64_t>(positions.size()) != rows.tokens()) {
      return extend::error(ErrorCode::token_count_mismatch, positions.size(), " positions for ",
                           rows.tokens(), " rows of K/V");
    }
    if (next < 0 || next + rows.tokens() > max_position) {
      return extend::error(ErrorCode::invalid_argument, rows.tokens(), " tokens from position ",
                           next, " on are not in [0, ", max_position, "]");
    }
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const std::int64_t expected = next + static_cast<std::int64_t>(i);
      if (positions[i] == expected) continue;
      return extend::error(
          positions[i] > expected ? ErrorCode::position_gap : ErrorCode::duplicate_position,
          "token ", i, " comes at position ", positions[i], ", the next one is ", expected);
    }
    return {};
  }
  [[nodiscard]] Result<Fragment> seal_first(std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    if (options_.variants && variant_rows_.tokens() < count) {
      return extend::error(ErrorCode::token_count_mismatch, "the variant encodes ",
                           variant_rows_.tokens(), " of ", count, " tokens");
    }
    SealOptions options;
    options.context = start_.context;
    options.positions = std::span<const std::int64_t>(positions_).first(n);
    if (!tokens_.empty()) options.tokens = std::span<const TokenId>(tokens_).first(n);
    const auto view = rows_.view(count);
    auto fragment = kvmeld::seal(view.ref, options, hash_);
    if (fragment && options_.variants && start_.context.lead_in != Digest128{}) {
      std::vector<std::int64_t> positions;
      for (std::int64_t t = 0; t < count; ++t) positions.push_back(start_.variant_position + t);
      options.positions = positions;
      options.context.lead_in = {};
      const auto variant = variant_rows_.view(count);
      fragment = with_variant(*fragment, variant.ref, options, hash_);
    }
    if (!fragment) return fragment;
    if (options_.variants) {
      variant_rows_.drop_front(count);
      variant_next_ = start_.variant_position + variant_rows_.tokens();
    }
    rows_.drop_front(count);
    positions_.erase(positions_.begin(), positions_.begin() + static_cast<std::ptrdiff_t>(count));
    if (!tokens_.empty())
      tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(count));
    if (count > 0)
      start_.context.lead_in = continued_lead_in(start_.context.lead_in, fragment->id());
    return fragment;
  }

  SpanOptions options_;
  SetHash hash_;
  SpanStart start_;
  detail::RowBuffer rows_;
  detail::RowBuffer variant_rows_;
  std::vector<TokenId> tokens_;
  std::vector<std::int64_t> positions_;
  std::int64_t to_drop_ = 0;
  std::int64_t next_ = 0;
  std::int64_t variant_next_ = 0;
};

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

/// Milliseconds on the steady clock since it began.
[[nodiscard]] inline double steady_ms() noexcept {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// How a render on the worker ended: a cache, or why there is none.
template <class Buffer>
struct RenderOutcome {
  std::uint64_t request = 0;
  std::shared_ptr<Rendered<Buffer>> rendered{};  ///< null where `status` is an error
  Status status{};
};

namespace detail {

/// What a session asks of its worker, whatever that renders by and on.
template <class Buffer>
class CacheWorker {
 public:
  virtual ~CacheWorker() = default;

  virtual std::uint64_t request(FragmentSet set, Target target) = 0;
  [[nodiscard]] virtual std::optional<RenderOutcome<Buffer>> take() = 0;

 protected:
  CacheWorker() = default;
  CacheWorker(const CacheWorker&) = default;
  CacheWorker& operator=(const CacheWorker&) = default;
};

}  // namespace detail

/// Renders snapshots of a set on a thread of its own, so that generation never waits for a render.
///
/// The newest request wins: one that was not begun is dropped, a finished one that was not taken is
/// replaced. `request`, `take` and `idle` hold a lock for as long as it takes to move a pointer;
/// they belong to one thread, the generating one.
/// @tparam M a `Merger`; @tparam Backing where the bytes go; @tparam E the executor that the worker
/// renders on. On a device (`gpu::Stream`, with `cuda/render.cuh` included) buffers are views of
/// its memory, the worker waits for the stream before it hands one out, and the thread's device is
/// the one that was current where the worker was made.
template <class M, CacheBacking Backing = HostBacking, ExecutionPolicy E = exec::Sequential>
class RenderWorker final : public detail::CacheWorker<typename Backing::Buffer> {
 public:
  using Buffer = typename Backing::Buffer;

  using Options = typename extend::RunOptionsOf<E>::type;

  explicit RenderWorker(M merger, Backing backing = {}, E exec = E{}, Options options = {})
      : merger_(std::move(merger)),
        backing_(std::move(backing)),
        exec_(std::move(exec)),
        options_(options) {
#if defined(__cpp_exceptions)
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {  // `request` then renders in the caller's thread
    }
#else
    thread_ = std::thread([this] { work(); });
#endif
  }
  RenderWorker(const RenderWorker&) = delete;
  RenderWorker& operator=(const RenderWorker&) = delete;
  /// Waits for the render in hand.
  ~RenderWorker() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  /// Asks for a cache of this snapshot; returns the request's number, from 1. Does not wait.
  /// `target.local`, where it is given, views memory that lives and does not change until the
  /// outcome is taken.
  std::uint64_t request(FragmentSet set, Target target) override {
    std::optional<Request> next(Request{std::move(set), std::move(target), ++last_request_});
    if (!thread_.joinable()) {
      finish(run(*next));
      return last_request_;
    }
    {
      const std::lock_guard lock(mutex_);
      std::swap(next, waiting_);
    }
    changed_.notify_all();
    return last_request_;  // a request that was dropped is destroyed here, without the lock
  }

  /// The newest outcome that was not taken yet, if there is one. Does not wait.
  [[nodiscard]] std::optional<RenderOutcome<Buffer>> take() override {
    if (!ready_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    ready_.store(false, std::memory_order_relaxed);
    return std::exchange(done_, std::nullopt);
  }

  /// Whether every request has its outcome, taken or not.
  [[nodiscard]] bool idle() const {
    const std::lock_guard lock(mutex_);
    return !waiting_ && !busy_;
  }
  /// Waits until `idle`, at most so long; for hosts that are at a barrier anyway.
  bool wait_idle(std::int64_t timeout_ms) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [this] { return !waiting_ && !busy_; });
  }

  [[nodiscard]] const M& merger() const noexcept { return merger_; }

 private:
  struct Request {
    FragmentSet set;
    Target target;
    std::uint64_t number;
  };

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || waiting_; });
      if (stop_) return;
      std::optional<Request> request = std::exchange(waiting_, std::nullopt);
      busy_ = true;
      lock.unlock();
      RenderOutcome<Buffer> outcome = run(*request);
      request.reset();
      finish(std::move(outcome));
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }
  void finish(RenderOutcome<Buffer> outcome) {
    std::optional<RenderOutcome<Buffer>> old(std::move(outcome));
    const std::lock_guard lock(mutex_);
    std::swap(old, done_);
    ready_.store(true, std::memory_order_release);
  }
  [[nodiscard]] RenderOutcome<Buffer> run(const Request& request) {
    RenderOutcome<Buffer> outcome{request.number, nullptr, {}};
    auto rendered = std::make_shared<Rendered<Buffer>>();
    outcome.status = render_into(request, *rendered);
    if (outcome.status) outcome.rendered = std::move(rendered);
    return outcome;
  }
  [[nodiscard]] Status render_into(const Request& request, Rendered<Buffer>& out) {
    const double begin = steady_ms();
    auto made = plan(request.set, merger_, request.target);
    if (!made) return made.error();
    auto buffer =
        backing_.make(made->shared_geometry(), made->positions(), made->token_ids(), pool_->take());
    if (!buffer) return buffer.error();
    out.buffer = *std::move(buffer);
    out.home = pool_;
    auto report = run_plan(*made, out.buffer->mutable_ref());
    if (!report) return report.error();
    out.report = *report;
    out.positions.assign(made->positions().begin(), made->positions().end());
    out.tokens.assign(made->token_ids().begin(), made->token_ids().end());
    out.holes.assign(made->holes().begin(), made->holes().end());
    out.request = request.number;
    // what is appended later moves nothing that is being read
    if constexpr (requires { out.buffer->capacity_tokens(); }) {
      out.positions.reserve(static_cast<std::size_t>(out.buffer->capacity_tokens()));
      out.tokens.reserve(static_cast<std::size_t>(out.buffer->capacity_tokens()));
    }
    out.render_ms = steady_ms() - begin;
    return {};
  }

  [[nodiscard]] Result<RenderReport> run_plan(const Plan<M>& made, const MutableKvCacheRef& out) {
    if constexpr (E::on_device) {
      return run_and_wait(exec_, made, out, options_);  // of the device's header
    } else {
      workspace_.resize((std::max)(workspace_.size(), made.workspace_bytes()));
      return kvmeld::run(exec_, made, workspace_, out, options_);
    }
  }

  M merger_;
  Backing backing_;
  E exec_;
  Options options_;
  std::shared_ptr<BufferPool<Buffer>> pool_ = std::make_shared<BufferPool<Buffer>>();
  std::vector<std::byte> workspace_;  // of the worker
  std::uint64_t last_request_ = 0;    // of the generating thread
  std::atomic<bool> ready_{false};

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Request> waiting_;
  std::optional<RenderOutcome<Buffer>> done_;
  bool busy_ = false;
  bool stop_ = false;
  std::thread thread_;
};

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

}  // namespace detail

/// Plans one fragment alone behind what a cache holds: an agent's words since the snapshot, for its
/// own view only.
[[nodiscard]] inline auto plan_behind(const Fragment& fragment, std::int64_t position) {
  const auto keep = kvmeld::merger(ById{});
  Target target{fragment.geometry()};
  target.first_position = position;
  target.prefix_in_place = true;
  FragmentSet one(SetHash{.tag = fragment.id().tag()});
  using P = Plan<std::remove_const_t<decltype(keep)>>;
  if (Status status = one.insert(fragment); !status) return Result<P>(status);
  return plan(one, keep, target);
}

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
      return extend::error(ErrorCode::invalid_argument, rows.tokens(),
                           " tokens, and no cache is live");
    return append_to(*live_, rows, tokens);
  }
  /// Whether a cache is live. Of the generating thread.
  [[nodiscard]] bool live() const noexcept { return live_ != nullptr; }
  /// Whether so many tokens more fit behind the live cache; true where none is live.
  [[nodiscard]] Status check_room(std::int64_t tokens) const {
    return live_ == nullptr ? Status() : room(*live_, tokens);
  }
  /// Appends a sealed span, rotated to the positions that follow, to a cache that is not live yet
  /// or to the live one.
  ///
  /// `first_position` is where a cache without rows begins. Errors: as `append`, and those of
  /// `plan`.
  Status carry(Rendered<Buffer>& cache, const Fragment& fragment, std::int64_t first_position = 0) {
    const auto made = plan_behind(fragment, cache.next_position(first_position));
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
    return extend::error(ErrorCode::output_too_small, tokens,
                         " tokens more in a buffer with room for ", left,
                         "; raise HostBacking::spare_tokens");
  }
  Status append_to(Rendered<Buffer>& cache, const KvCacheRef& rows,
                   std::span<const TokenId> tokens) {
    if (!rows.valid())
      return extend::error(ErrorCode::invalid_argument, "the view has no geometry");
    if (!tokens.empty() && static_cast<std::int64_t>(tokens.size()) != rows.tokens()) {
      return extend::error(ErrorCode::token_count_mismatch, tokens.size(), " token ids for ",
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

}  // namespace replica

KVMELD_NAMESPACE_END
