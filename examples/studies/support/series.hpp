#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace example {

/// Mean and spread of a figure.
struct Series {
  std::vector<double> values;
  void add(double value) { values.push_back(value); }
  [[nodiscard]] double mean() const {
    double sum = 0;
    for (const double v : values) sum += v;
    return values.empty() ? 0 : sum / static_cast<double>(values.size());
  }
  [[nodiscard]] double deviation() const {
    const double m = mean();
    double sum = 0;
    for (const double v : values) sum += (v - m) * (v - m);
    return values.size() < 2 ? 0 : std::sqrt(sum / static_cast<double>(values.size() - 1));
  }
  [[nodiscard]] double median() const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? 0 : sorted[sorted.size() / 2];
  }
};

}  // namespace example
