#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/codec/utf8.hpp>
#include <kvmeld/decimal.hpp>
#include <kvmeld/metrics/histogram.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A number as the text format has it: the shortest digits that read back as the same f64, `NaN`,
/// `+Inf`, `-Inf`.
KVMELD_LAZY [[nodiscard]] std::string metric_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return decimal(value);
}

}  // namespace detail

/// What a family of series is to Prometheus.
enum class MetricType : std::uint8_t { counter, gauge, histogram, summary };

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
using MetricLabels = std::vector<MetricLabel>;

namespace detail {

KVMELD_LAZY [[nodiscard]] MetricLabels with_label(MetricLabels labels, std::string_view name,
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
  KVMELD_LAZY Status counter(std::string_view name, std::string_view help, double value,
                             MetricLabels labels = {}) {
    if (!std::isfinite(value))
      return detail::error(ErrorCode::non_finite, "counter ", name, " is not finite");
    if (value < 0)
      return detail::error(ErrorCode::invalid_argument, "counter ", name, " is ", value,
                           ", below 0");
    return add(name, help, MetricType::counter, labels, {{{}, labels, value}});
  }
  /// What goes up and down; NaN and infinities are values.
  KVMELD_LAZY Status gauge(std::string_view name, std::string_view help, double value,
                           MetricLabels labels = {}) {
    return add(name, help, MetricType::gauge, labels, {{{}, labels, value}});
  }
  /// Quantiles of everything since the histogram began, within 1.6 %. They cannot be added up over
  /// processes; `histogram` can.
  KVMELD_LAZY Status summary(std::string_view name, std::string_view help,
                             const HistogramCounts& counts, MetricLabels labels = {},
                             std::span<const double> quantiles = default_quantiles) {
    std::vector<MetricSample> samples;
    for (std::size_t i = 0; i < quantiles.size(); ++i) {
      if (!(quantiles[i] >= 0 && quantiles[i] <= 1) ||
          (i > 0 && !(quantiles[i - 1] < quantiles[i]))) {
        return detail::error(ErrorCode::invalid_argument, "quantile ", quantiles[i], " of ", name,
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
  KVMELD_LAZY Status histogram(std::string_view name, std::string_view help,
                               const HistogramCounts& counts, MetricLabels labels = {},
                               OctaveBounds bounds = {}) {
    if (bounds.lowest_exponent < detail::LogBuckets::lowest_exponent ||
        bounds.highest_exponent > detail::LogBuckets::highest_exponent ||
        bounds.lowest_exponent > bounds.highest_exponent) {
      return detail::error(ErrorCode::invalid_argument, "buckets of ", name, " from 2^",
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
    return detail::span_of(families_);
  }

  static constexpr double default_quantiles[] = {0.5, 0.9, 0.99, 0.999};

 private:
  KVMELD_LAZY [[nodiscard]] static bool is_name(std::string_view name, bool of_label) {
    const auto letter = [&](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
             (c == ':' && !of_label);
    };
    if (name.empty() || !letter(name[0])) return false;
    return std::all_of(name.begin(), name.end(),
                       [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
  }
  KVMELD_LAZY [[nodiscard]] static Status check(std::string_view name, std::string_view help,
                                                MetricType type, const MetricLabels& labels) {
    if (!is_name(name, false))
      return detail::error(ErrorCode::invalid_argument, "'", name,
                           "' is no name of a metric: letters, digits, _ and :");
    if (!detail::is_utf8(help))
      return detail::error(ErrorCode::invalid_argument, "the help of ", name, " is not UTF-8");
    for (std::size_t i = 0; i < labels.size(); ++i) {
      const MetricLabel& label = labels[i];
      const bool reserved = label.name.starts_with("__") ||
                            (type == MetricType::histogram && label.name == "le") ||
                            (type == MetricType::summary && label.name == "quantile");
      if (!is_name(label.name, true) || reserved)
        return detail::error(ErrorCode::invalid_argument, "'", label.name,
                             "' is no name of a label of ", name);
      if (!detail::is_utf8(label.value))
        return detail::error(ErrorCode::invalid_argument, "label ", label.name, " of ", name,
                             " is not UTF-8");
      for (std::size_t j = 0; j < i; ++j) {
        if (labels[j].name == label.name)
          return detail::error(ErrorCode::invalid_argument, "label ", label.name, " of ", name,
                               " is given twice");
      }
    }
    return {};
  }
  /// The names that lines of a family carry.
  KVMELD_LAZY [[nodiscard]] static std::vector<std::string> line_names(std::string_view name,
                                                                       MetricType type) {
    std::vector<std::string> out{std::string(name)};
    const auto suffixed = [&](std::string_view suffix) {
      out.push_back(out[0] + std::string(suffix));
    };
    if (type == MetricType::histogram) suffixed("_bucket");
    if (type == MetricType::histogram || type == MetricType::summary)
      suffixed("_sum"), suffixed("_count");
    return out;
  }
  KVMELD_LAZY Status add_distribution(std::string_view name, std::string_view help, MetricType type,
                                      const MetricLabels& labels, std::vector<MetricSample> samples,
                                      const HistogramCounts& counts) {
    samples.push_back({"_sum", labels, counts.sum()});
    samples.push_back({"_count", labels, static_cast<double>(counts.count())});
    return add(name, help, type, labels, std::move(samples));
  }
  KVMELD_LAZY Status add(std::string_view name, std::string_view help, MetricType type,
                         const MetricLabels& labels, std::vector<MetricSample> samples) {
    KVMELD_TRY(check(name, help, type, labels));
    const auto family = std::find_if(families_.begin(), families_.end(),
                                     [&](const MetricFamily& f) { return f.name == name; });
    if (family == families_.end()) {
      const auto mine = line_names(name, type);
      for (const MetricFamily& f : families_) {
        for (const std::string& theirs : line_names(f.name, f.type)) {
          if (std::find(mine.begin(), mine.end(), theirs) != mine.end()) {
            return detail::error(ErrorCode::invalid_argument, "metric ", name,
                                 " would write lines of ", f.name, ": ", theirs);
          }
        }
      }
      families_.push_back({std::string(name), std::string(help), type, std::move(samples)});
      return {};
    }
    if (family->type != type)
      return detail::error(ErrorCode::invalid_argument, "metric ", name, " is a ",
                           to_string(family->type), ", not a ", to_string(type));
    for (const MetricSample& sample : family->samples) {
      for (const MetricSample& mine : samples) {
        if (sample.suffix == mine.suffix && same(sample.labels, mine.labels)) {
          return detail::error(ErrorCode::invalid_argument, "metric ", name, mine.suffix,
                               " has a series of these labels already");
        }
      }
    }
    family->samples.insert(family->samples.end(), std::make_move_iterator(samples.begin()),
                           std::make_move_iterator(samples.end()));
    return {};
  }
  /// Whatever their order.
  KVMELD_LAZY [[nodiscard]] static bool same(const MetricLabels& a, const MetricLabels& b) {
    return a.size() == b.size() && std::all_of(a.begin(), a.end(), [&](const MetricLabel& l) {
             return std::find(b.begin(), b.end(), l) != b.end();
           });
  }

  std::vector<MetricFamily> families_;
};

KVMELD_NAMESPACE_END
