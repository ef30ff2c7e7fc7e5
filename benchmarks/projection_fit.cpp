// Ridge fits against the same sums in plain Eigen: XᵀX, XᵀY, Cholesky, solve;
// benchmarks/peers/sklearn_ridge.py times scikit-learn on the same shape.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "paired.hpp"
#include "projection_fit_native.hpp"

namespace {

std::vector<double> random_rows(std::int32_t rows, std::int32_t columns, std::uint64_t state) {
  std::vector<double> out(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
  for (double& x : out) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    x = static_cast<double>(static_cast<std::int64_t>(state) >> 11) * 0x1p-50;
  }
  return out;
}

void fit(benchmark::State& state, std::int32_t rows, std::int32_t inputs, std::int32_t outputs,
         std::int32_t batch) {
  const std::vector<double> x = random_rows(rows, inputs, 1), y = random_rows(rows, outputs, 2);
  const bench::FitRows both{x.data(), y.data(), rows, inputs, outputs};
  const auto bytes = static_cast<std::int64_t>((x.size() + y.size()) * sizeof(double));
  bench::paired(
      state, bytes, [&] { benchmark::DoNotOptimize(bench::kvmeld_ridge(both, batch)); }, bytes,
      [&] { benchmark::DoNotOptimize(bench::eigen_ridge(both)); });
}

const bool registered = [] {
  for (const std::int32_t batch : {4096, 128})
    bench::add(bench::name({"align/fit/f64/rows:4096/inputs:1024/outputs:128/batch:",
                            std::to_string(batch)}),
               fit, 4096, 1024, 128, batch);
  return true;
}();

}  // namespace
