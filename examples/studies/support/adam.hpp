#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace example {

/// Kingma, Ba: Adam, 2015.
class Adam {
 public:
  explicit Adam(std::size_t n) : first_(n), second_(n) {}
  void step(std::vector<double>& parameters, const std::vector<double>& gradient, double rate) {
    ++steps_;
    const double a = 1 - std::pow(0.9, steps_), b = 1 - std::pow(0.999, steps_);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      first_[i] += 0.1 * (gradient[i] - first_[i]);
      second_[i] += 0.001 * (gradient[i] * gradient[i] - second_[i]);
      parameters[i] -= rate * (first_[i] / a) / (std::sqrt(second_[i] / b) + 1e-8);
    }
  }

 private:
  std::vector<double> first_, second_;
  double steps_ = 0;
};

}  // namespace example
