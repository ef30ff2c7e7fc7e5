#pragma once

#include <cstddef>
#include <span>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// The contributions to one output token as a fuser's `score` sees them, ascending by fragment id
/// (then by token), so that ties go to the smaller id by going to the smaller index.
///
/// Distances are squared and Euclidean, of keys (of a latent cache: of latents and their rope
/// parts) without position, over all heads and all layers that hold every contribution; 0 where no
/// layer does. f64, the same bits everywhere.
struct Scoring {
  std::span<const double> distances{};  ///< (count, count) symmetric, zeros on the diagonal
  /// (count) squared; NaN unless the fuser says `static constexpr bool reads_norms = true`.
  std::span<const double> norms{};

  /// Contributions, at least 2.
  KVMELD_LAZY [[nodiscard]] std::size_t count() const noexcept { return norms.size(); }
  KVMELD_LAZY [[nodiscard]] double distance(std::size_t i, std::size_t j) const noexcept {
    return distances[i * count() + j];
  }
  /// Cosine of the keys of two contributions; 0 where one of them is zero, or norms are not read.
  KVMELD_LAZY [[nodiscard]] double cosine(std::size_t i, std::size_t j) const noexcept {
    const double size = math::sqrt(norms[i]) * math::sqrt(norms[j]);
    return size > 0 ? (norms[i] + norms[j] - distance(i, j)) / 2 / size : 0.0;
  }
};

KVMELD_NAMESPACE_END
