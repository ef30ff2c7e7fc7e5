#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <kvmeld/session/engine_buffer.hpp>
#include <kvmeld/state/render.hpp>

KVMELD_NAMESPACE_BEGIN

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
class RenderWorker {
 public:
  using Buffer = typename Backing::Buffer;

  using Options = typename detail::RunOptionsOf<E>::type;

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
  ~RenderWorker() {
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
  std::uint64_t request(FragmentSet set, Target target) {
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
  [[nodiscard]] std::optional<RenderOutcome<Buffer>> take() {
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

KVMELD_NAMESPACE_END
