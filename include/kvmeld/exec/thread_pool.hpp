#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace exec {

/// A fixed set of workers that run the tasks 0 … n − 1 of one job at a time; the caller works too.
///
/// Models `TaskPool`. Jobs from several threads queue behind one another; a task must not call
/// `run` of its own pool. Where the system has no further thread to give, the pool works with those
/// it got.
class ThreadPool {
 public:
  /// @param threads how many threads work on a job, the caller included; at least 1.
  KVMELD_LAZY explicit ThreadPool(std::size_t threads) {
#if defined(__cpp_exceptions)
    try {
      start(threads);
    } catch (const std::system_error&) {
    }
#else
    start(threads);
#endif
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  KVMELD_LAZY [[nodiscard]] std::size_t size() const noexcept { return workers_.size() + 1; }

  /// Calls `task(context, i)` once for each i < tasks, from any of the threads, and returns when
  /// all are done.
  KVMELD_LAZY void run(std::size_t tasks, void (*task)(void*, std::size_t), void* context) {
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

 private:
  KVMELD_LAZY void start(std::size_t threads) {
    workers_.reserve(threads);
    for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  KVMELD_LAZY void drain(void (*task)(void*, std::size_t), void* context, std::size_t tasks) {
    for (std::size_t i = next_.fetch_add(1); i < tasks; i = next_.fetch_add(1)) task(context, i);
  }
  KVMELD_LAZY void work() {
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

KVMELD_NAMESPACE_END
