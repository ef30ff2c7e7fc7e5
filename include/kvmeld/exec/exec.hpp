#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/exec/streaming.hpp>
#include <kvmeld/exec/thread_pool.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN

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
    const FloatEnvironmentGuard guard;
    detail::host_rows(work, isa, 0, rows);
    return {};
  }
};

/// Runs rows in the 32-lane form that devices run, in the calling thread: the form that tests
/// compare.
struct Lanes {
  static constexpr bool on_device = false;

  template <RowWork W>
  Status bulk(std::int64_t rows, const W& work) const {
    const FloatEnvironmentGuard guard;
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
  KVMELD_LAZY explicit Threads(std::size_t threads, Isa isa = best_isa())
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
    // Four chunks a thread even out their speeds; a chunk below 64 rows costs more to hand out than
    // to run.
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
      const FloatEnvironmentGuard guard;
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
  KVMELD_LAZY static const Threads& all_cores() {
    static const Threads instance(std::max<std::size_t>(std::thread::hardware_concurrency(), 1));
    return instance;
  }
};

/// Several threads: `exec::threads(4)`, or `exec::threads(pool)` over the host's own pool.
KVMELD_LAZY [[nodiscard]] Threads threads(std::size_t count) { return Threads(count); }
template <TaskPool P>
[[nodiscard]] Threads threads(P& pool) {
  return Threads(pool);
}

inline const Sequential seq{};
inline const Lanes lanes{};
inline const Cpu cpu{};

}  // namespace exec

KVMELD_NAMESPACE_END
