// Ridge fits against the same sums in plain Eigen: XᵀX, XᵀY, Cholesky, solve. This whole file is compiled for this very processor,
// since Eigen's speed is a matter of flags; benchmarks/peers/sklearn_ridge.py times scikit-learn on the same shape.

#include "paired.hpp"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <Eigen/Cholesky>

#include <kvmeld/align/projection_fit_normal.hpp>

namespace {

using Rows = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Rows random_rows(Eigen::Index rows, Eigen::Index columns, std::uint64_t state) {
  Rows out(rows, columns);
  for (double* x = out.data(); x != out.data() + out.size(); ++x) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    *x = static_cast<double>(static_cast<std::int64_t>(state) >> 11) * 0x1p-50;
  }
  return out;
}

void fit(benchmark::State& state, std::int32_t rows, std::int32_t inputs, std::int32_t outputs, std::int32_t batch) {
  const Rows x = random_rows(rows, inputs, 1), y = random_rows(rows, outputs, 2);
  const auto ours = [&] {
    kvmeld::NormalEquations equations(inputs, outputs);
    for (std::int32_t at = 0; at < rows; at += batch) {
      const auto status = equations.add({x.data() + std::ptrdiff_t{at} * inputs, static_cast<std::size_t>(batch) * static_cast<std::size_t>(inputs)},
                                        {y.data() + std::ptrdiff_t{at} * outputs, static_cast<std::size_t>(batch) * static_cast<std::size_t>(outputs)});
      if (!status) std::abort();
    }
    auto map = equations.ridge(1e-3);
    if (!map) std::abort();
    benchmark::DoNotOptimize(map->weight.data());
  };
  const auto plain = [&] {
    Eigen::MatrixXd xx = Eigen::MatrixXd::Zero(inputs, inputs);
    xx.selfadjointView<Eigen::Lower>().rankUpdate(x.transpose());
    xx.diagonal().array() += 1.0;
    const Eigen::MatrixXd xy = x.transpose() * y;
    const Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>> factor(xx);
    Eigen::MatrixXd w = factor.solve(xy);
    benchmark::DoNotOptimize(w.data());
  };
  const std::int64_t bytes = (x.size() + y.size()) * std::int64_t{8};
  bench::paired(state, bytes, ours, bytes, plain);
}

const bool registered = [] {
  for (const std::int32_t batch : {4096, 128})
    bench::add(bench::name({"align/fit/f64/rows:4096/inputs:1024/outputs:128/batch:", std::to_string(batch)}), fit, 4096, 1024, 128, batch);
  return true;
}();

}  // namespace
