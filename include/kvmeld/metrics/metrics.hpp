#pragma once

/// Counters, histograms, and the page that Prometheus reads.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/safetensors.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace metrics {

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
  void record(double value) {
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
  HistogramCounts& operator+=(const HistogramCounts& other) {
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
  [[nodiscard]] double quantile(double q) const noexcept {
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
  [[nodiscard]] std::uint64_t up_to_power_of_two(int exponent) const noexcept {
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

namespace detail {

/// A number as the text format has it: the shortest digits that read back as the same f64, `NaN`,
/// `+Inf`, `-Inf`.
[[nodiscard]] inline std::string metric_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return extend::decimal(value);
}

}  // namespace detail

/// What a family of series is to Prometheus.
enum class MetricType : std::uint8_t { counter, gauge, histogram, summary };

/// The name that Prometheus' text format has for a type.
[[nodiscard]] constexpr std::string_view to_string(MetricType type) noexcept {
  constexpr std::string_view names[] = {"counter", "gauge", "histogram", "summary"};
  const auto i = static_cast<std::size_t>(type);
  return i < 4 ? names[i] : "untyped";
}

/// What tells the series of one family apart.
struct MetricLabel {
  std::string name{};
  std::string value{};  ///< any UTF-8

  bool operator==(const MetricLabel&) const = default;
};
/// The labels of one series, in the order in which they are written.
using MetricLabels = std::vector<MetricLabel>;

namespace detail {

[[nodiscard]] inline MetricLabels with_label(MetricLabels labels, std::string_view name,
                                             std::string value) {
  labels.push_back({std::string(name), std::move(value)});
  return labels;
}

}  // namespace detail

/// One line of a page: a number under the family's name with a suffix (`_bucket`, `_sum`, `_count`,
/// or none) and its labels.
struct MetricSample {
  std::string suffix{};
  MetricLabels labels{};
  double value = 0;
};

/// All series of one name.
struct MetricFamily {
  std::string name{};
  std::string help{};
  MetricType type = MetricType::gauge;
  std::vector<MetricSample> samples{};
};

/// Bounds of a histogram's buckets: powers of two, both ends included. The default is 1 µs to 64 s.
struct OctaveBounds {
  int lowest_exponent = -20;
  int highest_exponent = 6;
};

/// What is known at one moment, series by series: a plain value that collectors fill and
/// `prometheus_text` writes out.
///
/// There is no registry behind it. Whoever serves metrics makes a page, has it filled from the
/// counters at hand, and drops it.
///
/// Each call adds one series. Errors, the page unchanged: `invalid_argument` for a name or label
/// that Prometheus does not take, labels repeated or reserved (`le`, `quantile`, `__…`), a series
/// that is there already, a family of another type or whose lines would carry another's name, text
/// that is no UTF-8; `non_finite` for a counter that is not a finite number.
class MetricsPage {
 public:
  /// What only grows: `NAME_total`, by custom.
  Status counter(std::string_view name, std::string_view help, double value,
                 MetricLabels labels = {}) {
    if (!std::isfinite(value))
      return extend::error(ErrorCode::non_finite, "counter ", name, " is not finite");
    if (value < 0)
      return extend::error(ErrorCode::invalid_argument, "counter ", name, " is ", value,
                           ", below 0");
    return add(name, help, MetricType::counter, labels, {{{}, labels, value}});
  }
  /// What goes up and down; NaN and infinities are values.
  Status gauge(std::string_view name, std::string_view help, double value,
               MetricLabels labels = {}) {
    return add(name, help, MetricType::gauge, labels, {{{}, labels, value}});
  }
  /// Quantiles of everything since the histogram began, within 1.6 %. They cannot be added up over
  /// processes; `histogram` can.
  Status summary(std::string_view name, std::string_view help, const HistogramCounts& counts,
                 MetricLabels labels = {}, std::span<const double> quantiles = default_quantiles) {
    std::vector<MetricSample> samples;
    for (std::size_t i = 0; i < quantiles.size(); ++i) {
      if (!(quantiles[i] >= 0 && quantiles[i] <= 1) ||
          (i > 0 && !(quantiles[i - 1] < quantiles[i]))) {
        return extend::error(ErrorCode::invalid_argument, "quantile ", quantiles[i], " of ", name,
                             ": give ascending ones from 0 to 1");
      }
      samples.push_back(
          {{},
           detail::with_label(labels, "quantile", detail::metric_number(quantiles[i])),
           counts.quantile(quantiles[i])});
    }
    return add_distribution(name, help, MetricType::summary, labels, std::move(samples), counts);
  }
  /// How many values do not exceed each bound, exact; what rates and quantiles over times and
  /// processes are made of.
  Status histogram(std::string_view name, std::string_view help, const HistogramCounts& counts,
                   MetricLabels labels = {}, OctaveBounds bounds = {}) {
    if (bounds.lowest_exponent < detail::LogBuckets::lowest_exponent ||
        bounds.highest_exponent > detail::LogBuckets::highest_exponent ||
        bounds.lowest_exponent > bounds.highest_exponent) {
      return extend::error(ErrorCode::invalid_argument, "buckets of ", name, " from 2^",
                           bounds.lowest_exponent, " to 2^", bounds.highest_exponent,
                           ": -30 to 40 are kept");
    }
    std::vector<MetricSample> samples;
    for (int e = bounds.lowest_exponent; e <= bounds.highest_exponent; ++e) {
      const auto count = static_cast<double>(counts.up_to_power_of_two(e));
      samples.push_back(
          {"_bucket", detail::with_label(labels, "le", detail::metric_number(std::ldexp(1.0, e))),
           count});
    }
    samples.push_back(
        {"_bucket", detail::with_label(labels, "le", "+Inf"), static_cast<double>(counts.count())});
    return add_distribution(name, help, MetricType::histogram, labels, std::move(samples), counts);
  }

  /// In the order in which their first series came.
  [[nodiscard]] std::span<const MetricFamily> families() const noexcept {
    return extend::span_of(families_);
  }

  static constexpr double default_quantiles[] = {0.5, 0.9, 0.99, 0.999};

 private:
  [[nodiscard]] static bool is_name(std::string_view name, bool of_label) {
    const auto letter = [&](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
             (c == ':' && !of_label);
    };
    if (name.empty() || !letter(name[0])) return false;
    return std::all_of(name.begin(), name.end(),
                       [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
  }
  [[nodiscard]] static Status check(std::string_view name, std::string_view help, MetricType type,
                                    const MetricLabels& labels) {
    if (!is_name(name, false))
      return extend::error(ErrorCode::invalid_argument, "'", name,
                           "' is no name of a metric: letters, digits, _ and :");
    if (!extend::is_utf8(help))
      return extend::error(ErrorCode::invalid_argument, "the help of ", name, " is not UTF-8");
    for (std::size_t i = 0; i < labels.size(); ++i) {
      const MetricLabel& label = labels[i];
      const bool reserved = label.name.starts_with("__") ||
                            (type == MetricType::histogram && label.name == "le") ||
                            (type == MetricType::summary && label.name == "quantile");
      if (!is_name(label.name, true) || reserved)
        return extend::error(ErrorCode::invalid_argument, "'", label.name,
                             "' is no name of a label of ", name);
      if (!extend::is_utf8(label.value))
        return extend::error(ErrorCode::invalid_argument, "label ", label.name, " of ", name,
                             " is not UTF-8");
      for (std::size_t j = 0; j < i; ++j) {
        if (labels[j].name == label.name)
          return extend::error(ErrorCode::invalid_argument, "label ", label.name, " of ", name,
                               " is given twice");
      }
    }
    return {};
  }
  /// The names that lines of a family carry.
  [[nodiscard]] static std::vector<std::string> line_names(std::string_view name, MetricType type) {
    std::vector<std::string> out{std::string(name)};
    const auto suffixed = [&](std::string_view suffix) {
      out.push_back(out[0] + std::string(suffix));
    };
    if (type == MetricType::histogram) suffixed("_bucket");
    if (type == MetricType::histogram || type == MetricType::summary)
      suffixed("_sum"), suffixed("_count");
    return out;
  }
  Status add_distribution(std::string_view name, std::string_view help, MetricType type,
                          const MetricLabels& labels, std::vector<MetricSample> samples,
                          const HistogramCounts& counts) {
    samples.push_back({"_sum", labels, counts.sum()});
    samples.push_back({"_count", labels, static_cast<double>(counts.count())});
    return add(name, help, type, labels, std::move(samples));
  }
  Status add(std::string_view name, std::string_view help, MetricType type,
             const MetricLabels& labels, std::vector<MetricSample> samples) {
    KVMELD_TRY(check(name, help, type, labels));
    const auto family = std::find_if(families_.begin(), families_.end(),
                                     [&](const MetricFamily& f) { return f.name == name; });
    if (family == families_.end()) {
      const auto mine = line_names(name, type);
      for (const MetricFamily& f : families_) {
        for (const std::string& theirs : line_names(f.name, f.type)) {
          if (std::find(mine.begin(), mine.end(), theirs) != mine.end()) {
            return extend::error(ErrorCode::invalid_argument, "metric ", name,
                                 " would write lines of ", f.name, ": ", theirs);
          }
        }
      }
      families_.push_back({std::string(name), std::string(help), type, std::move(samples)});
      return {};
    }
    if (family->type != type)
      return extend::error(ErrorCode::invalid_argument, "metric ", name, " is a ",
                           to_string(family->type), ", not a ", to_string(type));
    for (const MetricSample& sample : family->samples) {
      for (const MetricSample& mine : samples) {
        if (sample.suffix == mine.suffix && same(sample.labels, mine.labels)) {
          return extend::error(ErrorCode::invalid_argument, "metric ", name, mine.suffix,
                               " has a series of these labels already");
        }
      }
    }
    family->samples.insert(family->samples.end(), std::make_move_iterator(samples.begin()),
                           std::make_move_iterator(samples.end()));
    return {};
  }
  /// Whatever their order.
  [[nodiscard]] static bool same(const MetricLabels& a, const MetricLabels& b) {
    return a.size() == b.size() && std::all_of(a.begin(), a.end(), [&](const MetricLabel& l) {
             return std::find(b.begin(), b.end(), l) != b.end();
           });
  }

  std::vector<MetricFamily> families_;
};

namespace detail {

inline void append_escaped(std::string& out, std::string_view text, bool quoted) {
  for (const char c : text) {
    if (c == '\\')
      out += "\\\\";
    else if (c == '\n')
      out += "\\n";
    else if (c == '"' && quoted)
      out += "\\\"";
    else
      out += c;
  }
}

}  // namespace detail

/// What a server of metrics says of its text: `Content-Type`.
inline constexpr std::string_view prometheus_content_type =
    "text/plain; version=0.0.4; charset=utf-8";

/// A page in Prometheus' text exposition format, version 0.0.4: families one after the other, each
/// behind its HELP and TYPE.
[[nodiscard]] inline std::string prometheus_text(const MetricsPage& page) {
  std::string out;
  for (const MetricFamily& family : page.families()) {
    out += "# HELP " + family.name + ' ';
    detail::append_escaped(out, family.help, false);
    out += "\n# TYPE " + family.name + ' ';
    out += to_string(family.type);
    out += '\n';
    for (const MetricSample& sample : family.samples) {
      out += family.name + sample.suffix;
      char before = '{';
      for (const MetricLabel& label : sample.labels) {
        out += before + label.name + "=\"";
        detail::append_escaped(out, label.value, true);
        out += '"';
        before = ',';
      }
      if (before == ',') out += '}';
      out += ' ' + detail::metric_number(sample.value) + '\n';
    }
  }
  return out;
}

/// Puts a page where a collector of text files looks for it (node_exporter's wants `*.prom`):
/// readers find the old text or the new one, never a part. Written beside it as `PATH.new` first,
/// so a path has one writer.
///
/// Errors: `unavailable`; the old file stays.
[[nodiscard]] inline Status write_prometheus_file(const std::string& path,
                                                  const MetricsPage& page) {
  const std::string text = prometheus_text(page);
  const std::string beside = path + ".new";
  Status written =
      write_file_bytes(beside, std::as_bytes(std::span<const char>(text.data(), text.size())));
  if (written.ok() && std::rename(beside.c_str(), path.c_str()) != 0) {
    written =
        extend::error(ErrorCode::unavailable, "cannot put ", beside, " in the place of ", path);
  }
  if (!written.ok()) (void)std::remove(beside.c_str());
  return written;
}

/// What only the host can measure, since it runs the engine and owns the clock: a member for each,
/// recorded by any thread.
///
/// Some 130 KB; one for a process, or one for each agent with its own labels.
struct ServingMetrics {
  Histogram prefill_seconds{};  ///< of a segment that was computed
  Histogram reuse_seconds{};  ///< of a segment that was blended instead: look-up, plan, run, import
  /// From a word said to its arrival in another agent's set, or of a round.
  Histogram sync_seconds{};
  Histogram load_bytes_per_second{};  ///< of payloads from a store, a file or a peer
  Histogram similarity{};             ///< of the signatures of anchors that were chosen, 0 to 1
  /// Relative error of aligned K/V against full prefill, where it was measured.
  Histogram alignment_error{};
  Histogram quality{};         ///< the host's own score of an answer, 0 and up
  ErrorCounters alignments{};  ///< of `plan`, `plan_reuse`, fits: by cause
  Counter renders, render_failures, rendered_tokens, rendered_holes, rendered_bytes;

  /// Counts what a `run` or `render` came to.
  void count(const Result<RenderReport>& report) noexcept {
    if (!report) return render_failures.add();
    renders.add();
    rendered_tokens.add(static_cast<std::uint64_t>(report->tokens));
    rendered_holes.add(static_cast<std::uint64_t>(report->holes));
    rendered_bytes.add(static_cast<std::uint64_t>(report->bytes));
  }
};

/// Whether distributions are written as quantiles, within 1.6 % for one process, or as buckets,
/// which add up over processes and times.
enum class DistributionForm : std::uint8_t { quantiles, buckets };

/// Puts all of it on a page. Causes of errors that never occurred have no series. Errors: those of
/// `MetricsPage`.
[[nodiscard]] inline Status collect(MetricsPage& page, const ServingMetrics& from,
                                    const MetricLabels& labels = {},
                                    DistributionForm form = DistributionForm::quantiles) {
  MetricsPage out = page;
  const auto put = [&](const char* name, const char* help, const Histogram& histogram,
                       OctaveBounds bounds = {}) {
    const HistogramCounts counts = histogram.read();
    KVMELD_TRY(out.counter(
        "kvmeld_refused_samples_total", "Samples that were negative or not finite",
        static_cast<double>(counts.refused()), detail::with_label(labels, "metric", name)));
    return form == DistributionForm::quantiles ? out.summary(name, help, counts, labels)
                                               : out.histogram(name, help, counts, labels, bounds);
  };
  const OctaveBounds ratio{-16, 0};
  KVMELD_TRY(put("kvmeld_prefill_seconds", "Time to prefill a segment", from.prefill_seconds));
  KVMELD_TRY(
      put("kvmeld_reuse_seconds", "Time to make a segment from anchors", from.reuse_seconds));
  KVMELD_TRY(
      put("kvmeld_sync_seconds", "Time until others have what an agent said", from.sync_seconds));
  KVMELD_TRY(put("kvmeld_load_bytes_per_second", "Rate at which payloads were loaded",
                 from.load_bytes_per_second, {16, 40}));
  KVMELD_TRY(put("kvmeld_similarity_ratio", "Similarity of the anchors that were chosen",
                 from.similarity, ratio));
  KVMELD_TRY(put("kvmeld_alignment_error_ratio",
                 "Relative error of aligned K/V against full prefill", from.alignment_error,
                 {-16, 4}));
  KVMELD_TRY(
      put("kvmeld_quality", "Scores of answers, as the host gives them", from.quality, {-16, 10}));
  for (std::size_t c = 1; c < ErrorCounters::codes; ++c) {
    const auto code = static_cast<ErrorCode>(c);
    if (from.alignments[code] == 0) continue;
    const std::string_view name = to_string(code);
    KVMELD_TRY(out.counter(
        "kvmeld_alignment_failures_total", "Alignments that were refused, by cause",
        static_cast<double>(from.alignments[code]),
        detail::with_label(labels, "code",
                           name == "unknown" ? extend::decimal(c) : std::string(name))));
  }
  const auto count = [&](const char* name, const char* help, const Counter& counter) {
    return out.counter(name, help, static_cast<double>(counter.value()), labels);
  };
  KVMELD_TRY(count("kvmeld_renders_total", "Caches rendered", from.renders));
  KVMELD_TRY(count("kvmeld_render_failures_total", "Renders that failed", from.render_failures));
  KVMELD_TRY(
      count("kvmeld_rendered_tokens_total", "Output tokens, holes included", from.rendered_tokens));
  KVMELD_TRY(count("kvmeld_rendered_holes_total", "Output tokens left to the engine",
                   from.rendered_holes));
  KVMELD_TRY(count("kvmeld_rendered_bytes_total", "Bytes of K/V written", from.rendered_bytes));
  page = std::move(out);
  return {};
}

}  // namespace metrics

KVMELD_NAMESPACE_END
