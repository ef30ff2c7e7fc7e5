#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The buckets of every histogram: 32 equal steps to each octave from 2⁻³⁰ to 2⁴⁰, so that a
/// value's bucket is read off its bits. Bucket i holds (edge(i − 1), edge(i)], as Prometheus' `le`
/// has it; 0 holds [0, 2⁻³⁰], the last what is above 2⁴⁰.
struct LogBuckets {
  static constexpr int lowest_exponent = -30, highest_exponent = 40;
  static constexpr int per_octave_bits = 5;
  static constexpr std::size_t count =
      (static_cast<std::size_t>(highest_exponent - lowest_exponent) << per_octave_bits) + 2;
  static constexpr int shift = 52 - per_octave_bits;
  static constexpr std::uint64_t first = static_cast<std::uint64_t>(lowest_exponent + 1023)
                                         << per_octave_bits;

  [[nodiscard]] static double edge(std::size_t bucket) noexcept {
    return std::bit_cast<double>((first + bucket) << shift);
  }
  /// Of a finite value that is not negative.
  [[nodiscard]] static std::size_t of(double value) noexcept {
    if (value <= edge(0)) return 0;
    // − 1: an edge belongs to what is below it
    const std::uint64_t step = (std::bit_cast<std::uint64_t>(value) - 1) >> shift;
    return static_cast<std::size_t>(
        (std::min)(step - first + 1, static_cast<std::uint64_t>(count - 1)));
  }
  /// Whether a value has a bucket at all.
  [[nodiscard]] static bool takes(double value) noexcept {
    return value >= 0 && value <= (std::numeric_limits<double>::max)();
  }
};

}  // namespace detail

/// What a histogram holds at one moment: a plain value that merges with others of other threads,
/// processes and times.
///
/// Quantiles are within 1.6 % of the exact ones between 2⁻³⁰ (10⁻⁹) and 2⁴⁰ (10¹²), within 10⁻⁹
/// below, and exact for the least and the greatest value. Buckets on a logarithmic scale after
/// HdrHistogram (Tene) and DDSketch (Masson, Rim and Lee, VLDB 2019), linear within an octave. Some
/// 18 KB once something was recorded.
class HistogramCounts {
 public:
  /// Zero and positive numbers. Negative ones, NaN and infinities count as `refused` and move
  /// nothing else.
  KVMELD_LAZY void record(double value) {
    if (!detail::LogBuckets::takes(value)) {
      ++refused_;
      return;
    }
    if (counts_.empty()) counts_.resize(detail::LogBuckets::count);
    ++counts_[detail::LogBuckets::of(value)];
    ++count_;
    sum_ += value;
    min_ = (std::min)(min_, value);
    max_ = (std::max)(max_, value);
  }
  /// Everything that the other holds on top: the same counts as if one histogram had seen all
  /// values, in any order. The sum is that of the sums, and so rounded in another order.
  KVMELD_LAZY HistogramCounts& operator+=(const HistogramCounts& other) {
    if (!other.counts_.empty()) {
      if (counts_.empty()) counts_.resize(detail::LogBuckets::count);
      for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    }
    count_ += other.count_;
    refused_ += other.refused_;
    sum_ += other.sum_;
    min_ = (std::min)(min_, other.min_);
    max_ = (std::max)(max_, other.max_);
    return *this;
  }

  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] std::uint64_t refused() const noexcept { return refused_; }
  [[nodiscard]] double sum() const noexcept { return sum_; }
  /// The least value, exact; NaN where there is none.
  [[nodiscard]] double least() const noexcept {
    return count_ == 0 ? std::numeric_limits<double>::quiet_NaN() : min_;
  }
  /// The greatest value, exact; NaN where there is none.
  [[nodiscard]] double greatest() const noexcept {
    return count_ == 0 ? std::numeric_limits<double>::quiet_NaN() : max_;
  }

  /// The least value that at least the share q of all values does not exceed (rank ⌈q·count⌉, at
  /// least 1). NaN for an empty histogram and for q outside [0, 1]. O(buckets).
  KVMELD_LAZY [[nodiscard]] double quantile(double q) const noexcept {
    if (count_ == 0 || !(q >= 0 && q <= 1)) return std::numeric_limits<double>::quiet_NaN();
    const auto rank =
        static_cast<std::uint64_t>((std::max)(1.0, std::ceil(q * static_cast<double>(count_))));
    if (rank >= count_) return max_;
    std::size_t bucket = 0;
    for (std::uint64_t below = counts_[0]; below < rank && bucket + 1 < counts_.size();
         below += counts_[bucket])
      ++bucket;
    if (bucket == 0) return min_;
    if (bucket + 1 == counts_.size()) return max_;
    // The harmonic mean of a bucket's edges errs equally at both: by half a step of the octave at
    // most, 1/65.
    const double low = detail::LogBuckets::edge(bucket - 1),
                 high = detail::LogBuckets::edge(bucket);
    return (std::clamp)(2 * low * high / (low + high), min_, max_);
  }
  /// How many values do not exceed 2^exponent; exact for −30 to 40. O(buckets).
  KVMELD_LAZY [[nodiscard]] std::uint64_t up_to_power_of_two(int exponent) const noexcept {
    if (counts_.empty() || exponent < detail::LogBuckets::lowest_exponent) return 0;
    if (exponent > detail::LogBuckets::highest_exponent) return count_;
    const auto last = static_cast<std::size_t>(exponent - detail::LogBuckets::lowest_exponent)
                      << detail::LogBuckets::per_octave_bits;
    std::uint64_t below = 0;
    for (std::size_t i = 0; i <= last; ++i) below += counts_[i];
    return below;
  }

 private:
  friend class Histogram;

  std::vector<std::uint64_t> counts_{};  // (bucket) none until the first value
  std::uint64_t count_ = 0;
  std::uint64_t refused_ = 0;
  double sum_ = 0;
  double min_ = std::numeric_limits<double>::infinity();
  double max_ = -std::numeric_limits<double>::infinity();
};

/// Collects values from several threads at once, without a lock: a bucket, a sum, and the extremes
/// where they move.
class Histogram {
 public:
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                std::atomic<double>::is_always_lock_free);

  Histogram() : counts_(detail::LogBuckets::count) {}
  Histogram(const Histogram&) = delete;
  Histogram& operator=(const Histogram&) = delete;

  /// As `HistogramCounts::record`. Never waits, never allocates.
  void record(double value) noexcept {
    if (!detail::LogBuckets::takes(value)) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    for (double seen = min_.load(std::memory_order_relaxed);
         value < seen && !min_.compare_exchange_weak(seen, value, std::memory_order_relaxed);) {
    }
    for (double seen = max_.load(std::memory_order_relaxed);
         value > seen && !max_.compare_exchange_weak(seen, value, std::memory_order_relaxed);) {
    }
    sum_.fetch_add(value, std::memory_order_relaxed);
    counts_[detail::LogBuckets::of(value)].fetch_add(1, std::memory_order_release);
  }
  /// What was recorded so far. Values that arrive meanwhile may be in the sum and not yet in the
  /// counts; counts, their total and the extremes belong together.
  [[nodiscard]] HistogramCounts read() const {
    HistogramCounts out;
    out.counts_.resize(counts_.size());
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      // whoever counted has moved the extremes before
      out.counts_[i] = counts_[i].load(std::memory_order_acquire);
      out.count_ += out.counts_[i];
    }
    out.refused_ = refused_.load(std::memory_order_relaxed);
    if (out.count_ == 0) return out;
    out.sum_ = sum_.load(std::memory_order_relaxed);
    out.min_ = min_.load(std::memory_order_relaxed);
    out.max_ = max_.load(std::memory_order_relaxed);
    return out;
  }

 private:
  std::vector<std::atomic<std::uint64_t>> counts_;  // (bucket)
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<double> sum_{0};
  std::atomic<double> min_{std::numeric_limits<double>::infinity()};
  std::atomic<double> max_{-std::numeric_limits<double>::infinity()};
};

KVMELD_NAMESPACE_END
