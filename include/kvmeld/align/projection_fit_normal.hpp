#pragma once

/// Linear maps fitted to paired rows that are seen once: sums of products, and what is solved from
/// them. Component kvmeld::eigen.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <Eigen/Cholesky>
#include <Eigen/SVD>

#include <kvmeld/align/linear_map.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

using FitMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic>;  // column by column
using FitRows = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using FitVector = Eigen::VectorXd;

}  // namespace detail

/// Sums of xᵀx, xᵀy and y² over paired rows (x, y), from which a map y ≈ W·x + b is solved in
/// closed form.
///
/// Rows are added in batches of any size and not kept: memory is (inputs + outputs) · inputs
/// doubles however many rows come. All sums are f64, of rows less the first row that was added, so
/// that a bias far from zero costs no digits. The order of batches changes sums in their last bits
/// only. Not thread-safe.
class NormalEquations {
 public:
  NormalEquations() = default;
  /// @param bias whether maps get a constant, which is not penalised; without it they go through
  /// zero.
  NormalEquations(std::int32_t inputs, std::int32_t outputs, bool bias = true)
      : bias_(bias),
        xx_(detail::FitMatrix::Zero(inputs, inputs)),
        xy_(detail::FitMatrix::Zero(inputs, outputs)),
        x_(detail::FitVector::Zero(inputs)),
        y_(detail::FitVector::Zero(outputs)),
        yy_(detail::FitVector::Zero(outputs)),
        x_origin_(detail::FitVector::Zero(inputs)),
        y_origin_(detail::FitVector::Zero(outputs)) {}

  [[nodiscard]] std::int32_t inputs() const noexcept {
    return static_cast<std::int32_t>(xx_.rows());
  }
  [[nodiscard]] std::int32_t outputs() const noexcept {
    return static_cast<std::int32_t>(xy_.cols());
  }
  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] bool bias() const noexcept { return bias_; }

  /// Adds paired rows. O(rows · inputs · (inputs + outputs)).
  ///
  /// Errors: `invalid_argument` (spans that are no equal number of whole rows), `non_finite`;
  /// nothing is added then.
  /// @param x (row, input) @param y (row, output)
  template <class Lazy = void>
  [[nodiscard]] Status add(std::span<const double> x, std::span<const double> y);

  /// The map with the least Σ‖y − W·x − b‖² + strength · Σ_c s_c ‖W_c‖², s_c the sum of squares of
  /// input c (about its mean, with a bias): ridge regression on inputs of equal variance, so that
  /// `strength` has no unit. Solved by Cholesky, f64.
  ///
  /// Inputs that never vary get weight 0. Errors: `invalid_argument` (a strength below 0 or not
  /// finite; fewer rows than inputs at a strength of 0; inputs that depend on each other there).
  template <class Lazy = void>
  [[nodiscard]] Result<LinearMap> ridge(double strength) const;

  /// As `ridge`, of the given rank: y ≈ A·(B·x) + b, least in the same sum among all maps of that
  /// rank.
  ///
  /// The truncated SVD of W in the metric of the inputs (reduced-rank regression, Izenman 1975).
  /// Errors: those of `ridge`; `invalid_argument` for a rank outside 1 to min(inputs, outputs).
  template <class Lazy = void>
  [[nodiscard]] Result<LinearMap> low_rank(double strength, std::int32_t rank) const;

  /// The map with orthonormal columns that comes nearest: y ≈ Q·x + b, QᵀQ = 1, so that norms and
  /// angles of rows stay what they are.
  ///
  /// Schönemann 1966: Q = U·Vᵀ of the SVD of Σ y xᵀ. Errors: `invalid_argument` where there are
  /// fewer outputs than inputs (no map keeps norms then) or fewer rows than inputs.
  template <class Lazy = void>
  [[nodiscard]] Result<LinearMap> procrustes() const;

  /// Σ‖y − W·x − b‖² of a map over the rows added, ÷ Σ‖y − mean‖² (÷ Σ‖y‖² without a bias).
  /// O(inputs · (inputs + outputs) · outputs).
  ///
  /// Equations of rows that a map was not fitted on say how well it generalises. Errors:
  /// `invalid_argument` (shapes; no rows).
  template <class Lazy = void>
  [[nodiscard]] Result<double> relative_error(const LinearMap& map) const;

 private:
  struct Centred {
    detail::FitMatrix xx, xy;
    detail::FitVector x_mean, y_mean;  // true means, where there is a bias
  };
  template <class Lazy = void>
  [[nodiscard]] Centred centred() const;
  template <class Lazy = void>
  [[nodiscard]] LinearMap made(const detail::FitMatrix& w, const Centred& sums) const;
  struct Solved {
    Centred sums;
    detail::FitMatrix penalised;  // lower triangle: the Cholesky factor
    detail::FitMatrix w;          // (input, output)
  };
  template <class Lazy = void>
  [[nodiscard]] Result<Solved> solve(double strength) const;

  bool bias_ = true;
  std::int64_t rows_ = 0;
  detail::FitMatrix xx_;  // (input, input), lower triangle
  detail::FitMatrix xy_;  // (input, output)
  detail::FitVector x_, y_, yy_, x_origin_, y_origin_;
};

template <class Lazy>
Status NormalEquations::add(std::span<const double> x, std::span<const double> y) {
  const auto n = static_cast<std::size_t>(xx_.rows());
  const auto m = static_cast<std::size_t>(xy_.cols());
  if (n == 0 || m == 0 || x.size() % n != 0 || y.size() % m != 0 || x.size() / n != y.size() / m) {
    return detail::error(ErrorCode::invalid_argument, "fit: ", x.size(), " and ", y.size(),
                         " numbers are no equal count of rows of ", n, " and ", m);
  }
  // A sum of squares is finite just where all numbers are and none is beyond 1e154.
  const Eigen::Map<const detail::FitVector> all_x(x.data(), static_cast<Eigen::Index>(x.size())),
      all_y(y.data(), static_cast<Eigen::Index>(y.size()));
  if (!std::isfinite(all_x.squaredNorm()) || !std::isfinite(all_y.squaredNorm())) {
    return detail::error(ErrorCode::non_finite, "fit: a batch of ", x.size() / n,
                         " rows holds a number that is not finite");
  }
  const auto rows = static_cast<Eigen::Index>(x.size() / n);
  if (rows == 0) return {};
  const Eigen::Map<const detail::FitRows> in(x.data(), rows, xx_.rows()),
      out(y.data(), rows, xy_.cols());
  if (bias_ && rows_ == 0) {
    x_origin_ = in.row(0);
    y_origin_ = out.row(0);
  }
  // Pieces, so that shifted copies stay small.
  constexpr Eigen::Index piece = 1024;
  for (Eigen::Index at = 0; at < rows; at += piece) {
    const Eigen::Index count = (std::min)(piece, rows - at);
    // (input, row)
    const detail::FitMatrix a =
        (in.middleRows(at, count).rowwise() - x_origin_.transpose()).transpose();
    // (row, output)
    const detail::FitMatrix b = out.middleRows(at, count).rowwise() - y_origin_.transpose();
    xx_.selfadjointView<Eigen::Lower>().rankUpdate(a);
    xy_.noalias() += a * b;
    x_ += a.rowwise().sum();
    y_ += b.colwise().sum();
    yy_ += b.colwise().squaredNorm();
  }
  rows_ += rows;
  return {};
}

template <class Lazy>
NormalEquations::Centred NormalEquations::centred() const {
  Centred sums{xx_.selfadjointView<Eigen::Lower>(), xy_, x_origin_, y_origin_};
  if (bias_ && rows_ > 0) {
    const double count = static_cast<double>(rows_);
    sums.xx.noalias() -= x_ * (x_ / count).transpose();
    sums.xy.noalias() -= x_ * (y_ / count).transpose();
    sums.x_mean += x_ / count;
    sums.y_mean += y_ / count;
  }
  return sums;
}

template <class Lazy>
LinearMap NormalEquations::made(const detail::FitMatrix& w, const Centred& sums) const {
  LinearMap map;
  map.outputs = outputs();
  map.inputs = inputs();
  // (input, output) column by column is (output, input) row by row
  map.weight.assign(w.data(), w.data() + w.size());
  if (bias_) {
    const detail::FitVector b = sums.y_mean - w.transpose() * sums.x_mean;
    map.bias.assign(b.data(), b.data() + b.size());
  }
  return map;
}

template <class Lazy>
Result<NormalEquations::Solved> NormalEquations::solve(double strength) const {
  if (!(strength >= 0.0 && strength <= 1e300))
    return detail::error(ErrorCode::invalid_argument, "fit: a ridge of strength ", strength);
  if (rows_ == 0 || (strength == 0.0 && rows_ < inputs() + (bias_ ? 1 : 0))) {
    return detail::error(ErrorCode::invalid_argument, "fit: ", rows_, " rows for ", inputs(),
                         " inputs; add more, or use a ridge above 0");
  }
  Solved solved{centred(), {}, {}};
  // Rounding leaves some 1e-16 of an input's raw square where it never varies; such an input gets a
  // diagonal of its own.
  const detail::FitVector raw = xx_.diagonal();
  detail::FitVector scale = solved.sums.xx.diagonal();
  const double largest = scale.maxCoeff();
  for (Eigen::Index c = 0; c < scale.size(); ++c) {
    if (scale[c] > 1e-13 * raw[c] && scale[c] > 1e-26 * largest) continue;
    solved.sums.xx.row(c).setZero();
    solved.sums.xx.col(c).setZero();
    solved.sums.xy.row(c).setZero();
    solved.sums.xx(c, c) = scale[c] = 1.0;
  }
  // Scaled to a diagonal of ones, Cholesky loses the fewest digits.
  const detail::FitVector unit = scale.cwiseSqrt().cwiseInverse();
  solved.penalised = unit.asDiagonal() * solved.sums.xx * unit.asDiagonal();
  solved.penalised.diagonal().array() += strength;
  const Eigen::LLT<Eigen::Ref<detail::FitMatrix>> factor(solved.penalised);
  const double smallest = solved.penalised.diagonal().minCoeff();
  if (factor.info() != Eigen::Success || !(smallest > 1e-7)) {
    return detail::error(ErrorCode::invalid_argument, "fit: inputs depend on each other (", rows_,
                         " rows, ", inputs(), " inputs, strength ", strength,
                         "); use a larger ridge");
  }
  solved.w = factor.solve(unit.asDiagonal() * solved.sums.xy);
  solved.w = unit.asDiagonal() * solved.w;
  // In the metric of the given inputs, for `low_rank`: L of xx + strength · diag = L·Lᵀ.
  solved.penalised = scale.cwiseSqrt().asDiagonal() * solved.penalised;
  return solved;
}

template <class Lazy>
Result<LinearMap> NormalEquations::ridge(double strength) const {
  const auto solved = solve(strength);
  if (!solved) return solved.error();
  return made(solved->w, solved->sums);
}

template <class Lazy>
Result<LinearMap> NormalEquations::low_rank(double strength, std::int32_t rank) const {
  if (rank < 1 || rank > (std::min)(inputs(), outputs())) {
    return detail::error(ErrorCode::invalid_argument, "fit: rank ", rank, " of a map of ",
                         outputs(), " x ", inputs());
  }
  const auto solved = solve(strength);
  if (!solved) return solved.error();
  const auto factor = solved->penalised.triangularView<Eigen::Lower>();
  const detail::FitMatrix whitened = factor.transpose() * solved->w;  // (input, output)
  const Eigen::BDCSVD<detail::FitMatrix> svd(whitened, Eigen::ComputeThinU | Eigen::ComputeThinV);
  // (input, rank): Bᵀ
  const detail::FitMatrix inner =
      factor.transpose().solve(detail::FitMatrix(svd.matrixU().leftCols(rank)));
  // (output, rank): A
  const detail::FitRows outer =
      svd.matrixV().leftCols(rank) * svd.singularValues().head(rank).asDiagonal();
  LinearMap map = made(inner * outer.transpose(), solved->sums);
  map.rank = rank;
  map.weight.assign(outer.data(), outer.data() + outer.size());
  map.inner.assign(inner.data(), inner.data() + inner.size());
  return map;
}

template <class Lazy>
Result<LinearMap> NormalEquations::procrustes() const {
  if (outputs() < inputs()) {
    return detail::error(ErrorCode::invalid_argument, "fit: no map from ", inputs(), " to ",
                         outputs(), " channels keeps norms; fit a ridge");
  }
  if (rows_ < inputs())
    return detail::error(ErrorCode::invalid_argument, "fit: ", rows_, " rows for ", inputs(),
                         " inputs");
  const Centred sums = centred();
  const Eigen::BDCSVD<detail::FitMatrix> svd(sums.xy, Eigen::ComputeThinU | Eigen::ComputeThinV);
  return made(svd.matrixU() * svd.matrixV().transpose(), sums);
}

template <class Lazy>
Result<double> NormalEquations::relative_error(const LinearMap& map) const {
  KVMELD_TRY(validate(map));
  if (map.inputs != inputs() || map.outputs != outputs() || rows_ == 0) {
    return detail::error(ErrorCode::invalid_argument, "fit: a map of ", map.outputs, " x ",
                         map.inputs, " against ", rows_, " rows of ", outputs(), " x ", inputs());
  }
  using RowsView = Eigen::Map<const detail::FitRows>;
  detail::FitRows w =
      RowsView(map.weight.data(), map.outputs, map.rank == 0 ? map.inputs : map.rank);
  if (map.rank != 0) w = (w * RowsView(map.inner.data(), map.rank, map.inputs)).eval();
  const double count = static_cast<double>(rows_);
  // Rows are less their origins here: y − W·x − b = y' − W·x' − (b − y₀ + W·x₀).
  detail::FitVector b = w * x_origin_ - y_origin_;
  if (!map.bias.empty()) b += Eigen::Map<const detail::FitVector>(map.bias.data(), map.outputs);
  const detail::FitMatrix xx = xx_.selfadjointView<Eigen::Lower>();
  double squares =
      yy_.sum() - 2.0 * (w.transpose().cwiseProduct(xy_)).sum() + (w * xx).cwiseProduct(w).sum();
  squares += count * b.squaredNorm() + 2.0 * b.dot(w * x_ - y_);
  const double total = bias_ ? yy_.sum() - y_.squaredNorm() / count : yy_.sum();
  return total > 0.0 ? (std::max)(squares, 0.0) / total : (squares > 0.0 ? 1.0 : 0.0);
}

KVMELD_NAMESPACE_END
