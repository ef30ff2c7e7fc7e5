#pragma once

/// Gradients of means. Trainers are not byte-reproducible: sums are as the compiler makes them.

#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>

#include <kvmeld/fuse/norm_preserving_mean.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// One fused row as it was computed, and the cotangent of its result. Contiguous, the caller's
/// memory.
template <std::floating_point T>
struct MixPullback {
  std::span<const T> values{};     ///< (contribution, channel) in the frame in which they are fused
  std::span<const T> weights{};    ///< (contribution) above 0
  std::span<const T> cotangent{};  ///< (channel)
};

/// What comes back: vector-Jacobian products, added to what the memory holds.
template <std::floating_point T>
struct MixGradients {
  std::span<T> values{};   ///< (contribution, channel)
  std::span<T> weights{};  ///< (contribution)
};

namespace detail {

template <class T>
[[nodiscard]] Status check_mix(const MixPullback<T>& p, const MixGradients<T>& out) {
  if (p.weights.empty() || p.cotangent.empty() ||
      p.values.size() != p.weights.size() * p.cotangent.size()) {
    return error(ErrorCode::invalid_argument, "vjp of a fuser: ", p.values.size(), " values for ",
                 p.weights.size(), " contributions of ", p.cotangent.size(), " channels");
  }
  if (out.values.size() != p.values.size() || out.weights.size() != p.weights.size()) {
    return error(ErrorCode::invalid_argument, "vjp of a fuser: gradients of ", out.values.size(),
                 " values and ", out.weights.size(), " weights, where there are ", p.values.size(),
                 " and ", p.weights.size());
  }
  return {};
}

}  // namespace detail

/// Gradients through `WeightedMean`, y = Σ w·x / Σ w: dxᵢ += wᵢ/W·g and dwᵢ += (xᵢ − y)·g / W.
///
/// Of rows that are fused as they lie; where run turns the result, turn the cotangent back first.
/// O(values); allocates nothing. Errors: `invalid_argument` (sizes).
template <std::floating_point T>
[[nodiscard]] Status weighted_mean_vjp(const MixPullback<T>& p, const MixGradients<T>& out) {
  KVMELD_TRY(detail::check_mix(p, out));
  const std::size_t n = p.weights.size(), channels = p.cotangent.size();
  T total = 0;
  for (const T w : p.weights) total += w;
  for (std::size_t c = 0; c < channels; ++c) {
    T mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += p.weights[i] * p.values[i * channels + c];
    mean /= total;
    const T g = p.cotangent[c] / total;
    for (std::size_t i = 0; i < n; ++i) {
      out.values[i * channels + c] += p.weights[i] * g;
      out.weights[i] += (p.values[i * channels + c] - mean) * g;
    }
  }
  return {};
}

/// Gradients through `NormPreservingMean`, y = u·N/W with s = Σ w·x, u = s/‖s‖, N = Σ w·‖x‖ and W =
/// Σ w.
///
/// A row of zeros takes no share of its norm's gradient, and where the mean counts as zero nothing
/// comes back. O(values); allocates nothing. Errors: `invalid_argument` (sizes).
template <std::floating_point T>
[[nodiscard]] Status norm_preserving_mean_vjp(const MixPullback<T>& p, const MixGradients<T>& out) {
  KVMELD_TRY(detail::check_mix(p, out));
  const std::size_t n = p.weights.size(), channels = p.cotangent.size();
  const auto sum = [&](std::size_t c) {
    T s = 0;
    for (std::size_t i = 0; i < n; ++i) s += p.weights[i] * p.values[i * channels + c];
    return s;
  };
  const auto norm = [&](std::size_t i) {
    T square = 0;
    for (std::size_t c = 0; c < channels; ++c)
      square += p.values[i * channels + c] * p.values[i * channels + c];
    return std::sqrt(square);
  };
  T total = 0, norms = 0, square = 0, along = 0;
  for (std::size_t i = 0; i < n; ++i) {
    total += p.weights[i];
    norms += p.weights[i] * norm(i);
  }
  for (std::size_t c = 0; c < channels; ++c) {
    const T s = sum(c);
    square += s * s;
    along += s * p.cotangent[c];
  }
  const T length = std::sqrt(square);
  if (!(length > static_cast<T>(detail::shortest_mean) * norms)) return {};
  along /= length;  // u·g
  const T d_norms = along / total;
  const T d_total = -along * norms / (total * total);
  const T scale = norms / total / length;
  for (std::size_t i = 0; i < n; ++i) {
    const T own = norm(i);
    out.weights[i] += d_total + d_norms * own;
    for (std::size_t c = 0; own > 0 && c < channels; ++c) {
      out.values[i * channels + c] += p.weights[i] * d_norms * p.values[i * channels + c] / own;
    }
  }
  for (std::size_t c = 0; c < channels; ++c) {
    const T d_sum = scale * (p.cotangent[c] - along / length * sum(c));
    for (std::size_t i = 0; i < n; ++i) {
      out.values[i * channels + c] += p.weights[i] * d_sum;
      out.weights[i] += p.values[i * channels + c] * d_sum;
    }
  }
  return {};
}

KVMELD_NAMESPACE_END
