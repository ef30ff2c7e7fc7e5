#include "projection_fit_native.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include <Eigen/Cholesky>

#include <kvmeld/fit/detail/normal_equations.hpp>

namespace bench {

__attribute__((visibility("default"))) double kvmeld_ridge(const FitRows& rows,
                                                           std::int32_t batch) {
  kvmeld::fit::NormalEquations equations(rows.inputs, rows.outputs);
  for (std::int32_t at = 0; at < rows.rows; at += batch) {
    const auto n = static_cast<std::size_t>((std::min)(batch, rows.rows - at));
    const auto status = equations.add(
        {rows.x + std::ptrdiff_t{at} * rows.inputs, n * static_cast<std::size_t>(rows.inputs)},
        {rows.y + std::ptrdiff_t{at} * rows.outputs, n * static_cast<std::size_t>(rows.outputs)});
    if (!status) std::abort();
  }
  const auto map = equations.ridge(1e-3);
  if (!map) std::abort();
  return map->weight[0];
}

__attribute__((visibility("default"))) double eigen_ridge(const FitRows& rows) {
  using Rows =
      Eigen::Map<const Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
  const Rows x(rows.x, rows.rows, rows.inputs), y(rows.y, rows.rows, rows.outputs);
  Eigen::MatrixXd xx = Eigen::MatrixXd::Zero(rows.inputs, rows.inputs);
  xx.selfadjointView<Eigen::Lower>().rankUpdate(x.transpose());
  xx.diagonal().array() += 1.0;
  const Eigen::MatrixXd xy = x.transpose() * y;
  const Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>> factor(xx);
  return factor.solve(xy)(0, 0);
}

}  // namespace bench
