#pragma once

/// Execution policies: on which device and threads row work runs, and in which floating-point
/// environment.

#include <algorithm>
#include <atomic>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Work over independent rows in the form that every backend runs: 32 lanes a row.
///
/// Lane l owns channels l, l + 32, …; the executor calls `partial` in every lane, joins the 32
/// states by the fixed tree 16, 8, 4, 2, 1, and calls `finish` in every lane with the total. A work
/// may add a host form, `void host_rows(Isa, begin, end) const`, which chooses among functions
/// compiled for several instruction sets.
///
/// Semantic requirements: rows touch disjoint outputs; the host form writes the bytes that the lane
/// form writes.
template <class W>
concept RowWork = std::is_trivially_copyable_v<W> &&
    requires(const W& work, std::int64_t row, int lane, typename W::State state) {
  { work.partial(row, lane) } -> std::same_as<typename W::State>;
  { W::join(state, state) } -> std::same_as<typename W::State>;
  work.finish(row, lane, state);
};

/// Work that does nothing, with which the concept of executors is checked.
struct NoWork {
  struct State {};

  [[nodiscard]] KVMELD_HD State partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static State join(State, State) noexcept { return {}; }
  KVMELD_HD void finish(std::int64_t, int, State) const noexcept {}
};

/// Where and how rows run. `bulk(rows, work)` is the only launch: it returns when the work is
/// enqueued (devices) or done (hosts).
///
/// Semantic requirements: every row of any `RowWork` runs once; hosts hold a
/// `FloatEnvironmentGuard` in each worker.
template <class E>
concept ExecutionPolicy = requires(const E& exec, std::int64_t rows, const NoWork& work) {
  { E::on_device } -> std::convertible_to<bool>;
  { exec.bulk(rows, work) } -> std::same_as<Status>;
};

/// Lanes of a row, on every backend: the width of a warp.
inline constexpr int lanes_per_row = 32;

namespace detail {

struct NoState {};

/// Reduces 32 lane states by the fixed tree, as a warp's shuffles do; the total ends in element 0.
template <class W>
KVMELD_ALWAYS_INLINE typename W::State join_lanes(typename W::State (&states)[lanes_per_row]) {
  for (int half = lanes_per_row / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane)
      states[lane] = W::join(states[lane], states[lane + half]);
  }
  return states[0];
}

/// Runs rows [begin, end) in the lane form on the host.
template <RowWork W>
void lane_rows(const W& work, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    typename W::State states[lanes_per_row];
    for (int lane = 0; lane < lanes_per_row; ++lane) states[lane] = work.partial(row, lane);
    const typename W::State total = join_lanes<W>(states);
    for (int lane = 0; lane < lanes_per_row; ++lane) work.finish(row, lane, total);
  }
}

template <class W>
concept HasHostRows = requires(const W& work) {
  work.host_rows(Isa{}, std::int64_t{}, std::int64_t{});
};

/// Runs rows [begin, end) on the host: the work's own host form, or the lane form.
template <RowWork W>
void host_rows(const W& work, Isa isa, std::int64_t begin, std::int64_t end) {
  if constexpr (HasHostRows<W>) {
    work.host_rows(isa, begin, end);
  } else {
    (void)isa;
    lane_rows(work, begin, end);
  }
}

}  // namespace detail

namespace exec {

/// A fixed set of workers that run the tasks 0 … n − 1 of one job at a time; the caller works too.
///
/// Models `TaskPool`. Jobs from several threads queue behind one another; a task must not call
/// `run` of its own pool. Where the system refuses a further thread, the pool works with those it
/// has.
class ThreadPool {
 public:
  /// @param threads how many threads work on a job, the caller included; at least 1.
  KVMELD_API explicit ThreadPool(std::size_t threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  KVMELD_API ~ThreadPool();

  [[nodiscard]] std::size_t size() const noexcept { return workers_.size() + 1; }

  /// Calls `task(context, i)` once for each i < tasks, from any of the threads, and returns when
  /// all are done.
  KVMELD_API void run(std::size_t tasks, void (*task)(void*, std::size_t), void* context);

 private:
  KVMELD_API void start(std::size_t threads);
  void drain(void (*task)(void*, std::size_t), void* context, std::size_t tasks) {
    for (std::size_t i = next_.fetch_add(1); i < tasks; i = next_.fetch_add(1)) task(context, i);
  }
  KVMELD_API void work();

  std::mutex jobs_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  void (*task_)(void*, std::size_t) = nullptr;
  void* context_ = nullptr;
  std::size_t tasks_ = 0;
  std::atomic<std::size_t> next_{0};
  std::size_t busy_ = 0;
  std::size_t generation_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace exec

// Processor states and compiler options that change floating-point results, and how they are undone
// or detected.

namespace detail {

#if defined(__x86_64__)
// MXCSR: flush-to-zero (bit 15), rounding mode (14, 13), denormals-are-zero (6).
inline constexpr std::uint64_t float_control_mask = 0xe040;
[[nodiscard]] inline std::uint64_t read_float_control() noexcept {
  return __builtin_ia32_stmxcsr();
}
inline void write_float_control(std::uint64_t value) noexcept {
  __builtin_ia32_ldmxcsr(static_cast<std::uint32_t>(value));
}
#elif defined(__aarch64__)
// FPCR: default NaN (bit 25), flush-to-zero (24), rounding mode (23, 22), flush-to-zero of f16
// (19).
inline constexpr std::uint64_t float_control_mask = 0x3c80000;
[[nodiscard]] inline std::uint64_t read_float_control() noexcept {
  std::uint64_t value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
inline void write_float_control(std::uint64_t value) noexcept {
  asm volatile("msr fpcr, %0" : : "r"(value));
}
#else
inline constexpr std::uint64_t float_control_mask = 0;
[[nodiscard]] inline std::uint64_t read_float_control() noexcept { return 0; }
inline void write_float_control(std::uint64_t) noexcept {}
#endif

}  // namespace detail

namespace exec {

/// During its lifetime this thread keeps subnormals and rounds to nearest even; the destructor
/// restores the state before.
///
/// Every worker holds one: a process linked with -ffast-math starts with flush-to-zero, and threads
/// inherit it. Status flags raised inside are dropped. Costs some 10 ns.
class FloatEnvironmentGuard {
 public:
  FloatEnvironmentGuard() noexcept : saved_(detail::read_float_control()) {
    if ((saved_ & detail::float_control_mask) != 0)
      detail::write_float_control(saved_ & ~detail::float_control_mask);
    asm volatile("" : : : "memory");  // arithmetic on memory stays inside
  }
  ~FloatEnvironmentGuard() {
    asm volatile("" : : : "memory");
    if ((saved_ & detail::float_control_mask) != 0) detail::write_float_control(saved_);
  }
  FloatEnvironmentGuard(const FloatEnvironmentGuard&) = delete;
  FloatEnvironmentGuard& operator=(const FloatEnvironmentGuard&) = delete;

 private:
  std::uint64_t saved_;
};

/// Detects compiler options and processor states that change results and that
/// `FloatEnvironmentGuard` cannot undo.
///
/// It detects reassociation, reciprocal division, ignored signed zeros, NaNs assumed absent, excess
/// precision, a fused multiply-add that rounds twice, and flush-to-zero that cannot be cleared.
/// `-ffast-math` is an error in config.hpp, but its component options define no macro. Always
/// inlined, so that it tests the options of the caller's translation unit. Some 20 ns.
///
/// Errors: `float_environment`, naming the check that failed.
[[nodiscard]] KVMELD_ALWAYS_INLINE Status check_float_environment() {
  const exec::FloatEnvironmentGuard guard;
  const auto fault = [](const char* what) {
    return Status(ErrorCode::float_environment,
                  std::string("floating-point results would differ: ") + what +
                      "; compile without -ffast-math and its parts (-funsafe-math-optimizations "
                      "and the like)");
  };
  // Volatile sources keep the compiler from computing the answer; the arithmetic on them is
  // ordinary code that it may change.
  volatile float one_source = 1.0f, tiny_source = 0x1p-30f, least_source = 0x1p-149f,
                 five_source = 5.0f;
  volatile double nan_source = __builtin_nan(""), big_source = 0x1p60, unit_source = 1.0;
  volatile float minus_zero_source = -0.0f;
  const float one = one_source, tiny = tiny_source, least = least_source, five = five_source;
  const float minus_zero = minus_zero_source;
  const double not_a_number = nan_source, big = big_source, unit = unit_source;

  volatile float sink = (one + tiny) - one;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 0)
    return fault("sums are reassociated or kept in excess precision");
  volatile double wide_sink = (big + unit) - big;
  if (__builtin_bit_cast(std::uint64_t, double{wide_sink}) != 0)
    return fault("sums of doubles are reassociated");
  sink = minus_zero + 0.0f;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 0)
    return fault("the sign of zero is ignored");
  sink = five / 49.0f;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 0x3dd0fac7u)
    return fault("division goes through a reciprocal");
  if (not_a_number == not_a_number) return fault("NaNs are assumed absent");
  sink = least * 0.75f;
  if (__builtin_bit_cast(std::uint32_t, float{sink}) != 1)
    return fault("subnormal numbers are flushed to zero");
  volatile float factor_source = 1.0f + 0x1p-12f;
  const float factor = factor_source;
  sink = fma(factor, factor, -(1.0f + 0x1p-11f));
  if (float{sink} != 0x1p-24f) return fault("fused multiply-add rounds twice");
  return {};
}

}  // namespace exec

/// Runs a job of numbered tasks on several threads: the library's `exec::ThreadPool`, or the host's
/// own pool.
///
/// Semantic requirements: `run` calls `task(context, i)` exactly once for each i < tasks and
/// returns after the last.
template <class P>
concept TaskPool = requires(P& pool, std::size_t tasks, void (*task)(void*, std::size_t),
                            void* context) {
  pool.run(tasks, task, context);
  { pool.size() } -> std::convertible_to<std::size_t>;
};

namespace exec {

/// Runs every row in the calling thread.
struct Sequential {
  static constexpr bool on_device = false;
  Isa isa = best_isa();  ///< instruction set of the wrappers; bytes do not depend on it

  template <RowWork W>
  Status bulk(std::int64_t rows, const W& work) const {
    const exec::FloatEnvironmentGuard guard;
    detail::host_rows(work, isa, 0, rows);
    return {};
  }
};

/// Runs rows in the 32-lane form of devices, in the calling thread, so that tests can compare both
/// forms.
struct Lanes {
  static constexpr bool on_device = false;

  template <RowWork W>
  Status bulk(std::int64_t rows, const W& work) const {
    const exec::FloatEnvironmentGuard guard;
    detail::lane_rows(work, 0, rows);
    return {};
  }
};

/// Runs rows on several threads. A copy shares the pool.
class Threads {
 public:
  static constexpr bool on_device = false;

  /// Starts `threads` workers (the caller counts as one) that live as long as a copy of this
  /// policy.
  explicit Threads(std::size_t threads, Isa isa = best_isa())
      : owned_(std::make_shared<ThreadPool>(std::max<std::size_t>(threads, 1))), isa_(isa) {
    bind(*owned_);
  }
  /// Borrows the caller's pool, which outlives this policy.
  template <TaskPool P>
  explicit Threads(P& pool, Isa isa = best_isa()) : isa_(isa) {
    bind(pool);
  }

  template <RowWork W>
  Status bulk(std::int64_t rows, const W& work) const {
    // Four chunks for each thread balance the load; a chunk below 64 rows costs more to schedule
    // than to run.
    const auto wanted = static_cast<std::int64_t>(4 * size_);
    const std::int64_t chunk = (std::max<std::int64_t>)((rows + wanted - 1) / wanted, 64);
    Job<W> job{&work, rows, chunk, isa_};
    run_(pool_, static_cast<std::size_t>((rows + chunk - 1) / chunk), &Job<W>::task, &job);
    return {};
  }

 private:
  template <class W>
  struct Job {
    const W* work;
    std::int64_t rows;
    std::int64_t chunk;
    Isa isa;

    static void task(void* self, std::size_t index) {
      const exec::FloatEnvironmentGuard guard;
      const Job& job = *static_cast<const Job*>(self);
      const std::int64_t begin = static_cast<std::int64_t>(index) * job.chunk;
      detail::host_rows(*job.work, job.isa, begin, (std::min)(begin + job.chunk, job.rows));
    }
  };
  template <class P>
  void bind(P& pool) {
    pool_ = &pool;
    size_ = (std::max)(static_cast<std::size_t>(pool.size()), std::size_t{1});
    run_ = [](void* p, std::size_t tasks, void (*task)(void*, std::size_t), void* context) {
      static_cast<P*>(p)->run(tasks, task, context);
    };
  }

  std::shared_ptr<ThreadPool> owned_;
  void* pool_ = nullptr;
  void (*run_)(void*, std::size_t, void (*)(void*, std::size_t), void*) = nullptr;
  std::size_t size_ = 1;
  Isa isa_;
};

/// Runs rows on all cores, through one pool that the process starts on first use.
struct Cpu {
  static constexpr bool on_device = false;

  template <RowWork W>
  Status bulk(std::int64_t rows, const W& work) const {
    return all_cores().bulk(rows, work);
  }

 private:
  static const Threads& all_cores() {
    static const Threads instance(std::max<std::size_t>(std::thread::hardware_concurrency(), 1));
    return instance;
  }
};

/// Several threads: `exec::threads(4)`, or `exec::threads(pool)` over the host's own pool.
[[nodiscard]] inline Threads threads(std::size_t count) { return Threads(count); }
template <TaskPool P>
[[nodiscard]] Threads threads(P& pool) {
  return Threads(pool);
}

/// The calling thread, by the host form of the work.
inline const Sequential seq{};
/// The calling thread, lane by lane as a device runs it: for tests of user-written policies.
inline const Lanes lanes{};
/// All cores, by a pool that the process shares and that starts at its first use.
inline const Cpu cpu{};

}  // namespace exec

#if KVMELD_BODIES
namespace exec {

KVMELD_API ThreadPool::ThreadPool(std::size_t threads) {
#if defined(__cpp_exceptions)
  try {
    start(threads);
  } catch (const std::system_error&) {
  }
#else
  start(threads);
#endif
}

KVMELD_API ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

KVMELD_API void ThreadPool::run(std::size_t tasks, void (*task)(void*, std::size_t),
                                void* context) {
  const std::lock_guard one_job(jobs_);
  {
    const std::lock_guard lock(mutex_);
    task_ = task;
    context_ = context;
    tasks_ = tasks;
    next_.store(0, std::memory_order_relaxed);
    busy_ = workers_.size();
    ++generation_;
  }
  wake_.notify_all();
  drain(task, context, tasks);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

KVMELD_API void ThreadPool::start(std::size_t threads) {
  workers_.reserve(threads);
  for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

KVMELD_API void ThreadPool::work() {
  std::size_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    const auto task = task_;
    void* const context = context_;
    const std::size_t tasks = tasks_;
    lock.unlock();
    drain(task, context, tasks);
    lock.lock();
    if (--busy_ == 0) done_.notify_all();
  }
}

}  // namespace exec
#endif

KVMELD_NAMESPACE_END
