// Histograms: quantiles within 2 % of those of the sorted samples, and merging as if one histogram
// had seen all.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <kvmeld/metrics/metrics.hpp>

#include "support/law.hpp"

namespace {

using kvmeld::metrics::HistogramCounts;

HistogramCounts counts_of(const std::vector<double>& values) {
  HistogramCounts out;
  for (const double v : values) out.record(v);
  return out;
}

/// The value of rank ⌈q n⌉ among the sorted ones.
double exact_quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double rank = std::max(1.0, std::ceil(q * static_cast<double>(values.size())));
  return values[static_cast<std::size_t>(rank) - 1];
}

const double shares[] = {0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1};

/// Positive values over the whole range that is promised: uniform in the exponent.
std::vector<double> any_samples() {
  const auto raw = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<std::uint32_t>>(rc::gen::arbitrary<std::uint32_t>()));
  std::vector<double> out;
  for (const std::uint32_t r : raw)
    out.push_back(std::exp2(-29.9 + 69.8 * static_cast<double>(r) / 4294967296.0));
  return out;
}

void same_but_for_the_sum(const HistogramCounts& a, const HistogramCounts& b) {
  RC_ASSERT(a.count() == b.count());
  RC_ASSERT(a.refused() == b.refused());
  for (int e = -31; e <= 41; ++e) RC_ASSERT(a.up_to_power_of_two(e) == b.up_to_power_of_two(e));
  if (a.count() == 0) return;
  for (const double q : shares) RC_ASSERT(a.quantile(q) == b.quantile(q));
  RC_ASSERT(std::abs(a.sum() - b.sum()) <= 1e-12 * std::abs(b.sum()));
}

}  // namespace

TEST_CASE("quantiles are within 2 % of the exact ones, and the ends are exact") {
  test::law("any samples", [] {
    const auto values = any_samples();
    const auto counts = counts_of(values);
    for (const double q : shares) {
      const double exact = exact_quantile(values, q);
      RC_ASSERT(std::abs(counts.quantile(q) - exact) <= 0.0155 * exact);
    }
    RC_ASSERT(counts.quantile(0) >= counts.least());
    RC_ASSERT(counts.least() == exact_quantile(values, 0));
    RC_ASSERT(counts.quantile(1) == exact_quantile(values, 1));
  });
}

TEST_CASE("quantiles are within 2 % over the distributions that latencies have") {
  std::mt19937_64 random(7);
  const auto worst = [&](auto&& draw) {
    std::vector<double> values;
    for (int i = 0; i < 50'000; ++i) values.push_back(draw());
    const auto counts = counts_of(values);
    std::sort(values.begin(), values.end());
    double most = 0;
    for (int i = 1; i < 1000; ++i) {
      const double q = i / 1000.0;
      const double exact =
          values[static_cast<std::size_t>(std::ceil(q * static_cast<double>(values.size()))) - 1];
      most = std::max(most, std::abs(counts.quantile(q) - exact) / exact);
    }
    return most;
  };
  std::uniform_real_distribution<double> uniform(1e-3, 1);
  std::exponential_distribution<double> exponential(40);
  std::lognormal_distribution<double> lognormal(-5, 2);
  std::normal_distribution<double> normal(100, 1);
  double errors[6] = {
      worst([&] { return uniform(random); }), worst([&] { return exponential(random) + 1e-8; }),
      worst([&] { return lognormal(random); }), worst([&] { return std::abs(normal(random)); }),
      // Pareto: a long tail
      worst([&] { return 0.01 / std::pow(1 - uniform(random) * 0.999, 1 / 1.2); }),
      // two modes
      worst([&] { return uniform(random) < 0.9 ? 0.002 : 1.5 + uniform(random) * 0.01; })};
  for (const double error : errors) CHECK(error <= 0.0155);
  CHECK(*std::max_element(errors, errors + 6) > 0.005);  // the bound is not idle
}

TEST_CASE("a merge of histograms is the histogram of all samples, whatever the cut and the order") {
  test::law("any cut", [] {
    const auto values = any_samples();
    const std::size_t cut = *rc::gen::inRange<std::size_t>(0, values.size() + 1);
    auto a = counts_of({values.begin(), values.begin() + static_cast<std::ptrdiff_t>(cut)});
    const auto b = counts_of({values.begin() + static_cast<std::ptrdiff_t>(cut), values.end()});
    auto other = b;
    other += a;
    a += b;
    same_but_for_the_sum(a, counts_of(values));
    same_but_for_the_sum(other, a);
  });
}

TEST_CASE("what a live histogram reads is what plain counts record") {
  test::law("any samples", [] {
    const auto values = any_samples();
    kvmeld::metrics::Histogram live;
    for (const double v : values) live.record(v);
    same_but_for_the_sum(live.read(), counts_of(values));
  });
}

TEST_CASE("bounds of buckets belong to what is below them") {
  test::law("powers of two", [] {
    const int e = *rc::gen::inRange(-29, 40);
    const double edge = std::ldexp(1.0, e);
    HistogramCounts counts;
    counts.record(edge);
    counts.record(std::nextafter(edge, 0.0));
    counts.record(std::nextafter(edge, 2 * edge));
    RC_ASSERT(counts.up_to_power_of_two(e) == 2U);
    RC_ASSERT(counts.up_to_power_of_two(e - 1) == 0U);
    RC_ASSERT(counts.up_to_power_of_two(e + 1) == 3U);
  });
}

TEST_CASE(
    "what has no bucket is counted as refused, and what is beyond the range keeps its extremes") {
  kvmeld::metrics::Histogram live;
  for (const double bad : {-1.0, -1e-300, std::nan(""), HUGE_VAL, -HUGE_VAL}) live.record(bad);
  auto counts = live.read();
  CHECK(counts.refused() == 5);
  CHECK(counts.count() == 0);
  CHECK(std::isnan(counts.quantile(0.5)));
  CHECK(std::isnan(counts.least()));
  CHECK(counts.sum() == 0);
  for (const double extreme : {0.0, -0.0, 5e-324, 1e-12, 1e300, 1.7e308}) live.record(extreme);
  counts = live.read();
  CHECK(counts.count() == 6);
  CHECK(counts.quantile(0) == 0);
  CHECK(std::abs(counts.quantile(0.6)) <= 1e-9);
  CHECK(counts.quantile(0.9) == 1.7e308);
  CHECK(counts.quantile(1) == 1.7e308);
  CHECK(counts.up_to_power_of_two(-30) == 4);
  CHECK(counts.up_to_power_of_two(40) == 4);
  CHECK(std::isnan(counts.quantile(1.01)));
  CHECK(std::isnan(counts.quantile(std::nan(""))));
}
