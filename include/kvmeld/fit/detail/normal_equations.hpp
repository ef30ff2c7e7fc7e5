#pragma once

/// Sums of products of rows, and the maps that are solved from them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <Eigen/Cholesky>
#include <Eigen/SVD>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/policies/projection_map.hpp>
#include <kvmeld/policies/token_match.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace fit {

// Linear maps fitted to paired rows that are seen once: sums of products, and what is solved from
// them. Component kvmeld::eigen.

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
    return extend::error(ErrorCode::invalid_argument, "fit: ", x.size(), " and ", y.size(),
                         " numbers are no equal count of rows of ", n, " and ", m);
  }
  // A sum of squares is finite just where all numbers are and none is beyond 1e154.
  const Eigen::Map<const detail::FitVector> all_x(x.data(), static_cast<Eigen::Index>(x.size())),
      all_y(y.data(), static_cast<Eigen::Index>(y.size()));
  if (!std::isfinite(all_x.squaredNorm()) || !std::isfinite(all_y.squaredNorm())) {
    return extend::error(ErrorCode::non_finite, "fit: a batch of ", x.size() / n,
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
    return extend::error(ErrorCode::invalid_argument, "fit: a ridge of strength ", strength);
  if (rows_ == 0 || (strength == 0.0 && rows_ < inputs() + (bias_ ? 1 : 0))) {
    return extend::error(ErrorCode::invalid_argument, "fit: ", rows_, " rows for ", inputs(),
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
    return extend::error(ErrorCode::invalid_argument, "fit: inputs depend on each other (", rows_,
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
    return extend::error(ErrorCode::invalid_argument, "fit: rank ", rank, " of a map of ",
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
    return extend::error(ErrorCode::invalid_argument, "fit: no map from ", inputs(), " to ",
                         outputs(), " channels keeps norms; fit a ridge");
  }
  if (rows_ < inputs())
    return extend::error(ErrorCode::invalid_argument, "fit: ", rows_, " rows for ", inputs(),
                         " inputs");
  const Centred sums = centred();
  const Eigen::BDCSVD<detail::FitMatrix> svd(sums.xy, Eigen::ComputeThinU | Eigen::ComputeThinV);
  return made(svd.matrixU() * svd.matrixV().transpose(), sums);
}

template <class Lazy>
Result<double> NormalEquations::relative_error(const LinearMap& map) const {
  KVMELD_TRY(validate(map));
  if (map.inputs != inputs() || map.outputs != outputs() || rows_ == 0) {
    return extend::error(ErrorCode::invalid_argument, "fit: a map of ", map.outputs, " x ",
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

// Rows of fragments as a fit sees them: f64, keys without their rotation.

namespace detail {

/// Whether a fragment is of the model that a fit or map is made for, in elements that it reads.
[[nodiscard]] inline Status check_fit_geometry(const Geometry& is, const Geometry& wanted,
                                               const char* side) {
  KVMELD_TRY(extend::check_side(is, wanted, side));
  for (std::size_t l = 0; l < is.layers.size(); ++l) {
    for (const PlaneShape& shape : is.layers[l].planes) {
      if (shape.scales != ScaleScheme::none || shape.hadamard != 0) {
        return extend::error(ErrorCode::unsupported, "fit: ", side, " layer ", l,
                             " has scales or a Hadamard basis of ", shape.hadamard,
                             "; fit on floats in the model's own basis");
      }
    }
  }
  return {};
}

/// Rotates one head's row from position 0 to `position`, in f64.
inline void rotate_fit_row(const RopeSpec& rope, std::span<const double> frequencies,
                           double position, double* row) {
  const auto pairs = static_cast<std::int32_t>(frequencies.size());
  for (std::int32_t i = 0; i < pairs; ++i) {
    const bool split = rope.pairing == RopePairing::half_split;
    const std::int32_t first = rope.first_channel + (split ? i : 2 * i);
    const std::int32_t second = split ? first + pairs : first + 1;
    const math::SinCos at = math::sin_cos(position * frequencies[static_cast<std::size_t>(i)]);
    const double a = row[first], b = row[second];
    row[first] = fma(a, at.cos, -fma(b, at.sin, 0.0));
    row[second] = fma(a, at.sin, fma(b, at.cos, 0.0));
  }
}

/// The frequencies by which a plane's stored rows were rotated; none where they carry no position.
/// Errors: `rope_length_dependent`, and those of `inverse_frequencies` (`rope_unsupported` for
/// several axes).
[[nodiscard]] inline Result<std::vector<double>> plane_frequencies(const LayerShape& layer,
                                                                   const PlaneShape& shape,
                                                                   std::int64_t length) {
  if (!shape.rotary || layer.key_form == KeyForm::pre_rope || layer.rope.kind == RopeKind::none)
    return std::vector<double>{};
  if (length_dependent(layer.rope) && length > layer.rope.original_context) {
    return extend::error(
        ErrorCode::rope_length_dependent, "fit: keys up to position ", length - 1,
        " behind an original context of ", layer.rope.original_context,
        " do not say by which frequencies they were turned; seal them before rotation");
  }
  return inverse_frequencies(layer.rope, length);
}

/// A plane's rows of chosen tokens. (token, head · channel)
struct FitPlane {
  std::vector<double> values;
  std::size_t width = 0;
  std::vector<bool> there;  ///< whether the layer holds the token

  [[nodiscard]] std::span<const double> row(std::size_t i) const {
    return std::span(values).subspan(i * width, width);
  }
};

/// Reads the rows of `tokens` of one plane, de-rotated; a token that the layer does not hold is
/// marked.
[[nodiscard]] inline Result<FitPlane> read_fit_plane(const Geometry& geometry,
                                                     const Payload& payload, std::size_t layer,
                                                     Plane kind,
                                                     std::span<const std::int32_t> tokens) {
  const LayerShape& shape = geometry.layers[layer];
  const auto plane = static_cast<std::size_t>(extend::plane_indices(geometry, kind)[layer]);
  const PlaneShape& of = *extend::find_plane(shape, kind);
  const auto frequencies =
      plane_frequencies(shape, of, payload.positions.empty() ? 1 : payload.positions.back() + 1);
  if (!frequencies) return frequencies.error();

  FitPlane out;
  out.width = static_cast<std::size_t>(of.heads) * static_cast<std::size_t>(of.channels);
  out.values.resize(tokens.size() * out.width);
  out.there.assign(tokens.size(), true);
  const TokenSet& set = payload.token_sets[payload.layer_set[layer]];
  std::vector<float> row(out.width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::int64_t at = tokens[i];
    if (!set.all) {
      const auto found = std::lower_bound(set.present.begin(), set.present.end(), tokens[i]);
      out.there[i] = found != set.present.end() && *found == tokens[i];
      if (!out.there[i]) continue;
      at = found - set.present.begin();
    }
    const std::byte* const stored =
        payload.bytes.get() + payload.plane_offsets[plane] + at * extend::row_bytes(of) * of.heads;
    extend::load_row(of.type, best_isa(), stored, static_cast<std::ptrdiff_t>(out.width),
                     row.data());
    double* const to = out.values.data() + i * out.width;
    std::copy(row.begin(), row.end(), to);
    if (frequencies->empty()) continue;
    const double position =
        -static_cast<double>(payload.positions[static_cast<std::size_t>(tokens[i])]);
    for (std::int32_t h = 0; h < of.heads; ++h)
      rotate_fit_row(shape.rope, *frequencies, position, to + std::ptrdiff_t{h} * of.channels);
  }
  return out;
}

/// Whether a fragment's bytes are there and every index lies among its tokens.
[[nodiscard]] inline Status check_fit_fragments(const Fragment& source, const Fragment& target,
                                                std::span<const TokenPair> pairs) {
  for (const Fragment* fragment : {&source, &target}) {
    if (!fragment->valid())
      return extend::error(ErrorCode::invalid_argument, "fit: an empty fragment handle");
    if (fragment->payloads()[0].bytes == nullptr && fragment->token_count() > 0) {
      return extend::error(ErrorCode::payload_missing, "fit: a fragment of ",
                           fragment->token_count(), " tokens is evicted");
    }
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i].source < 0 || pairs[i].source >= source.token_count() || pairs[i].target < 0 ||
        pairs[i].target >= target.token_count()) {
      return extend::error(ErrorCode::invalid_argument, "fit: pair ", i, " names tokens ",
                           pairs[i].source, " and ", pairs[i].target, " of ", source.token_count(),
                           " and ", target.token_count());
    }
  }
  return {};
}

/// Token i with token i, for fragments of one text and tokenizer.
[[nodiscard]] inline Result<std::vector<TokenPair>> equal_pairs(const Fragment& source,
                                                                const Fragment& target) {
  if (source.token_count() != target.token_count()) {
    return extend::error(ErrorCode::token_count_mismatch, "fit: fragments of ",
                         source.token_count(), " and ", target.token_count(),
                         " tokens; pair them by their character spans (pair_by_spans)");
  }
  std::vector<TokenPair> pairs(static_cast<std::size_t>(source.token_count()));
  for (std::size_t i = 0; i < pairs.size(); ++i)
    pairs[i] = {static_cast<std::int32_t>(i), static_cast<std::int32_t>(i)};
  return pairs;
}

/// The inputs of some blocks, gathered from planes that are read once a layer.
class FitInputs {
 public:
  FitInputs(const Fragment& fragment, std::vector<std::int32_t> tokens)
      : fragment_(&fragment), tokens_(std::move(tokens)) {
    planes_[0].resize(fragment.geometry().layers.size());
    planes_[1].resize(planes_[0].size());
  }
  /// Rows of the heads one behind the other, of tokens that every layer named holds. (token,
  /// channel of all heads)
  template <class Lazy = void>
  [[nodiscard]] Status gather(Plane plane, std::span<const HeadRef> heads, std::vector<double>& out,
                              std::vector<bool>& there) {
    there.assign(tokens_.size(), true);
    std::size_t width = 0;
    for (const HeadRef& head : heads) {
      FitPlane& from = planes_[plane == Plane::key ? 0 : 1][static_cast<std::size_t>(head.layer)];
      if (from.width == 0) {
        auto read = read_fit_plane(fragment_->geometry(), fragment_->payloads()[0],
                                   static_cast<std::size_t>(head.layer), plane, tokens_);
        if (!read) return read.error();
        from = *std::move(read);
      }
      for (std::size_t i = 0; i < tokens_.size(); ++i) there[i] = there[i] && from.there[i];
      width += channels(plane, head);
    }
    out.resize(tokens_.size() * width);
    std::size_t at = 0;
    for (const HeadRef& head : heads) {
      const FitPlane& from =
          planes_[plane == Plane::key ? 0 : 1][static_cast<std::size_t>(head.layer)];
      const std::size_t size = channels(plane, head);
      for (std::size_t i = 0; i < tokens_.size(); ++i) {
        const double* const row =
            from.values.data() + i * from.width + static_cast<std::size_t>(head.head) * size;
        std::copy(row, row + size, out.data() + i * width + at);
      }
      at += size;
    }
    return {};
  }

 private:
  [[nodiscard]] std::size_t channels(Plane plane, const HeadRef& head) const {
    return static_cast<std::size_t>(
        extend::find_plane(fragment_->geometry().layers[static_cast<std::size_t>(head.layer)],
                           plane)
            ->channels);
  }
  const Fragment* fragment_;
  std::vector<std::int32_t> tokens_;
  std::vector<FitPlane> planes_[2];
};

}  // namespace detail

}  // namespace fit

KVMELD_NAMESPACE_END
