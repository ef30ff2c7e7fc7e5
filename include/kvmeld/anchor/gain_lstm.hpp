#pragma once

/// A small LSTM over the tokens of a run, in f64 in one order of sums: its bytes are the same
/// everywhere.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Where the numbers of an LSTM with one output lie: input.weight (4 · hidden, inputs),
/// state.weight (4 · hidden, hidden), bias (4 · hidden), out.weight (hidden), out.bias (1). Gates
/// in the order input, forget, cell, output.
struct LstmShape {
  std::size_t inputs = 0, hidden = 0;

  [[nodiscard]] constexpr std::size_t state_weight() const noexcept { return 4 * hidden * inputs; }
  [[nodiscard]] constexpr std::size_t bias() const noexcept {
    return state_weight() + 4 * hidden * hidden;
  }
  [[nodiscard]] constexpr std::size_t out_weight() const noexcept { return bias() + 4 * hidden; }
  [[nodiscard]] constexpr std::size_t out_bias() const noexcept { return out_weight() + hidden; }
  [[nodiscard]] constexpr std::size_t size() const noexcept { return out_bias() + 1; }
};

/// What a step leaves behind for the way back: gates (4 · hidden), cell, tanh of the cell, state
/// (hidden each).
struct LstmTrace {
  std::vector<double> steps;
};

[[nodiscard]] inline double logistic(double x) noexcept { return 1.0 / (1.0 + math::exp(-x)); }

/// One output for every token: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
/// 2000.
/// @param x (token, input) @param out (token)
KVMELD_LAZY void run_lstm(const LstmShape& shape, std::span<const double> parameters,
                          std::span<const double> x, std::span<double> out,
                          LstmTrace* trace = nullptr) {
  const std::size_t h = shape.hidden, step = 7 * h;
  std::vector<double> storage;
  std::vector<double>& steps = trace != nullptr ? trace->steps : storage;
  steps.assign((trace != nullptr ? out.size() : 2) * step, 0.0);
  const std::vector<double> zeros(h);
  const double* state = zeros.data();
  const double* cell = zeros.data();
  for (std::size_t t = 0; t < out.size(); ++t) {
    double* const gates = steps.data() + (trace != nullptr ? t : t % 2) * step;
    for (std::size_t r = 0; r < 4 * h; ++r) {
      double sum = parameters[shape.bias() + r];
      for (std::size_t k = 0; k < shape.inputs; ++k)
        sum = fma(parameters[r * shape.inputs + k], x[t * shape.inputs + k], sum);
      for (std::size_t k = 0; k < h; ++k)
        sum = fma(parameters[shape.state_weight() + r * h + k], state[k], sum);
      gates[r] = r / h == 2 ? math::tanh(sum) : logistic(sum);
    }
    double* const new_cell = gates + 4 * h;
    double sum = parameters[shape.out_bias()];
    for (std::size_t k = 0; k < h; ++k) {
      new_cell[k] = fma(gates[h + k], cell[k], gates[k] * gates[2 * h + k]);
      new_cell[h + k] = math::tanh(new_cell[k]);
      new_cell[2 * h + k] = gates[3 * h + k] * new_cell[h + k];
      sum = fma(parameters[shape.out_weight() + k], new_cell[2 * h + k], sum);
    }
    cell = new_cell;
    state = new_cell + 2 * h;
    out[t] = sum;
  }
}

/// Adds the gradient of what `run_lstm` left in the trace, from the outputs' cotangents (token).
/// For trainers: sums as the compiler makes them.
KVMELD_LAZY void lstm_vjp(const LstmShape& shape, std::span<const double> parameters,
                          std::span<const double> x, const LstmTrace& trace,
                          std::span<const double> cotangent, std::span<double> gradient) {
  const std::size_t h = shape.hidden, step = 7 * h;
  std::vector<double> d_state(h), d_cell(h), d_sum(4 * h);
  const std::vector<double> zeros(step);
  for (std::size_t t = cotangent.size(); t-- > 0;) {
    const double* const gates = trace.steps.data() + t * step;
    const double* const before = t > 0 ? gates - step : zeros.data();
    gradient[shape.out_bias()] += cotangent[t];
    for (std::size_t k = 0; k < h; ++k) {
      gradient[shape.out_weight() + k] += cotangent[t] * gates[6 * h + k];
      const double d = d_state[k] + cotangent[t] * parameters[shape.out_weight() + k];
      const double in = gates[k], forget = gates[h + k], candidate = gates[2 * h + k],
                   out = gates[3 * h + k], squashed = gates[5 * h + k];
      d_cell[k] += d * out * (1 - squashed * squashed);
      d_sum[k] = d_cell[k] * candidate * in * (1 - in);
      d_sum[h + k] = d_cell[k] * before[4 * h + k] * forget * (1 - forget);
      d_sum[2 * h + k] = d_cell[k] * in * (1 - candidate * candidate);
      d_sum[3 * h + k] = d * squashed * out * (1 - out);
      d_cell[k] *= forget;
      d_state[k] = 0;
    }
    for (std::size_t r = 0; r < 4 * h; ++r) {
      gradient[shape.bias() + r] += d_sum[r];
      for (std::size_t k = 0; k < shape.inputs; ++k)
        gradient[r * shape.inputs + k] += d_sum[r] * x[t * shape.inputs + k];
      for (std::size_t k = 0; k < h; ++k) {
        gradient[shape.state_weight() + r * h + k] += d_sum[r] * before[6 * h + k];
        d_state[k] += d_sum[r] * parameters[shape.state_weight() + r * h + k];
      }
    }
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
