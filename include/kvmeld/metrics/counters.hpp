#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A number that only grows while its owner lives. Any thread may add and read; nobody waits.
class Counter {
 public:
  void add(std::uint64_t n = 1) noexcept { value_.fetch_add(n, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t value() const noexcept {
    return value_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// A number that goes up and down. Any thread may set, add and read; nobody waits.
class Gauge {
 public:
  void set(double value) noexcept { value_.store(value, std::memory_order_relaxed); }
  void add(double difference) noexcept { value_.fetch_add(difference, std::memory_order_relaxed); }
  [[nodiscard]] double value() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

/// How often calls failed, by cause. Any thread may count and read.
class ErrorCounters {
 public:
  static constexpr std::size_t codes = 256;  ///< all that a code's byte can say

  /// A success counts under `ErrorCode::ok`.
  void count(const Status& status) noexcept {
    counts_[static_cast<std::size_t>(status.code())].fetch_add(1, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t operator[](ErrorCode code) const noexcept {
    return counts_[static_cast<std::size_t>(code)].load(std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<std::uint64_t>, codes> counts_{};
};

KVMELD_NAMESPACE_END
