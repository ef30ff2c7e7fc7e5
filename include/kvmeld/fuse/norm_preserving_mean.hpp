#pragma once

#include <cstddef>
#include <cstdint>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A mean shorter than this share of the mean norm has no direction but that of rounding errors.
inline constexpr double shortest_mean = 0x1p-20;

/// Sums by lane to a norm.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double norm_of_lanes(double* lanes) noexcept {
  for (int half = 16; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return math::sqrt(lanes[0]);
}

/// What makes a weighted sum of norm `length` as long as `norms / total`.
[[nodiscard]] KVMELD_HD inline double lengthening(double length, double norms,
                                                  double total) noexcept {
  return length > shortest_mean * norms ? norms / length / total : 0.0;
}

/// Mixes the rows of a head into a sum in f64, then gives it its length.
struct NormPreservingRows {
  static constexpr bool rotation_equivariant = true;
  static constexpr bool keeps_single = true;

  template <class Rows>
  [[nodiscard]] KVMELD_HD static double sum(const Rows& rows, int c) {
    double out = 0;
    for (int i = 0; i < rows.count(); ++i)
      out = fma(static_cast<double>(rows.weight(i)), static_cast<double>(rows.value(i, c)), out);
    return out;
  }
  template <class Rows>
  [[nodiscard]] KVMELD_HD double prepare(const Rows& rows) const {
    double lanes[32];
    double norms = 0;
    double total = 0;
    for (int i = 0; i <= rows.count(); ++i) {
      for (int l = 0; l < 32; ++l) lanes[l] = 0;
      for (int c = 0; c < rows.channels(); ++c) {
        const double x = i < rows.count() ? static_cast<double>(rows.value(i, c)) : sum(rows, c);
        lanes[c % 32] = fma(x, x, lanes[c % 32]);
      }
      const double norm = norm_of_lanes(lanes);
      if (i == rows.count()) return lengthening(norm, norms, total);
      norms = fma(static_cast<double>(rows.weight(i)), norm, norms);
      total += static_cast<double>(rows.weight(i));
    }
    return 0;
  }
  template <class Rows>
  [[nodiscard]] KVMELD_HD float channel(const Rows& rows, double factor, int c) const {
    return static_cast<float>(factor * sum(rows, c));
  }

  /// A row may lie in one channel, and then as long as all channels of another.
  [[nodiscard]] static double bound(double peak, double, int channels) noexcept {
    return peak * math::sqrt(static_cast<double>(channels));
  }

  /// Whole rows on a host; out: whole blocks of 32 channels.
  KVMELD_LAZY void mix(Isa isa, const HeadRows& rows, float* out) const;
};

/// The 32 lanes' sums of squares of a row of whole blocks.
KVMELD_ALWAYS_INLINE void add_square_lanes(const double* __restrict row,
                                           double* __restrict lanes) noexcept {
  KVMELD_KEEP_LOOP
  for (int l = 0; l < 32; ++l) lanes[l] = fma(row[l], row[l], lanes[l]);
}

KVMELD_ALWAYS_INLINE void mix_norm_preserving(const HeadRows& rows,
                                              float* __restrict out) noexcept {
  alignas(64) double sums[1024];
  alignas(64) double wide[32];
  alignas(64) double lanes[32];
  double norms = 0, total = 0;
  for (int i = 0; i < rows.contributions; ++i) {
    const auto weight = static_cast<double>(rows.weights[i]);
    for (int l = 0; l < 32; ++l) lanes[l] = 0;
    for (std::ptrdiff_t b = 0; b < rows.width; b += 32) {
      const float* __restrict const row = rows.values + i * rows.stride + b;
      double* __restrict const to = sums + b;
      for (int c = 0; c < 32; ++c) wide[c] = static_cast<double>(row[c]);
      add_square_lanes(wide, lanes);
      if (i == 0) {
        for (int c = 0; c < 32; ++c) to[c] = 0;
      }
      KVMELD_KEEP_LOOP
      for (int c = 0; c < 32; ++c) to[c] = fma(weight, wide[c], to[c]);
    }
    norms = fma(weight, norm_of_lanes(lanes), norms);
    total += weight;
  }
  for (int l = 0; l < 32; ++l) lanes[l] = 0;
  for (std::ptrdiff_t b = 0; b < rows.width; b += 32) add_square_lanes(sums + b, lanes);
  const double factor = lengthening(norm_of_lanes(lanes), norms, total);
  for (std::ptrdiff_t b = 0; b < rows.width; b += 32) {
    const double* __restrict const from = sums + b;
    for (int c = 0; c < 32; ++c) out[b + c] = static_cast<float>(factor * from[c]);
  }
}

KVMELD_LAZY KVMELD_NOINLINE void mix_norm_preserving_baseline(const HeadRows& rows,
                                                              float* out) noexcept {
  mix_norm_preserving(rows, out);
}
KVMELD_LAZY KVMELD_TARGET_AVX2 KVMELD_NOINLINE void mix_norm_preserving_avx2(const HeadRows& rows,
                                                                             float* out) noexcept {
  mix_norm_preserving(rows, out);
}
KVMELD_LAZY KVMELD_TARGET_AVX512 KVMELD_NOINLINE void mix_norm_preserving_avx512(
    const HeadRows& rows, float* out) noexcept {
  mix_norm_preserving(rows, out);
}

template <class>
void NormPreservingRows::mix(Isa isa, const HeadRows& rows, float* out) const {
  if (isa == Isa::avx512) return mix_norm_preserving_avx512(rows, out);
  isa == Isa::avx2 ? mix_norm_preserving_avx2(rows, out) : mix_norm_preserving_baseline(rows, out);
}

}  // namespace detail

/// The weighted mean of a head's rows, as long as the rows are on average: x̄ · (Σ w·‖x‖ / Σ w) /
/// ‖x̄‖ with x̄ = Σ w·x / Σ w.
///
/// A plain mean of rows that point apart is shorter than they are, and a shorter key draws less
/// attention. A zero mean stays a zero row, and so does one shorter than 2^-20 of the mean norm,
/// whose direction is that of rounding errors. Equal rows fuse to themselves, to the bit in f32.
/// One pass, in f64; norms by 32 lanes. At most 64 contributions.
struct NormPreservingMean {
  static constexpr bool reproducible = true;

  [[nodiscard]] constexpr detail::NormPreservingRows mixing() const noexcept { return {}; }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.NormPreservingMean.v1"); }
};

KVMELD_NAMESPACE_END
