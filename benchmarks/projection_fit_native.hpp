#pragma once

// Ridge fits compiled for this very processor, since Eigen's speed is a matter of flags: ours and
// plain Eigen's, in a library of their own whose templates are hidden, so that the rest of the
// program, which is compiled as a user gets it by default, shares none of them.

#include <cstdint>

namespace bench {

/// Rows that a fit learns from. x: (rows, inputs); y: (rows, outputs)
struct FitRows {
  const double* x;
  const double* y;
  std::int32_t rows, inputs, outputs;
};

/// `kvmeld::NormalEquations`, `batch` rows at a time; returns one of the weights.
double kvmeld_ridge(const FitRows& rows, std::int32_t batch);
/// The same sums by plain Eigen: XᵀX, XᵀY, Cholesky, solve.
double eigen_ridge(const FitRows& rows);

}  // namespace bench
