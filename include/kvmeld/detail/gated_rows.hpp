#pragma once

/// Rows mixed by a gate.

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/config.hpp>
#include <kvmeld/policies/gate_weights.hpp>
#include <kvmeld/policy.hpp>

KVMELD_NAMESPACE_BEGIN

// The mix form of gates: the code of one lane, and vector code with the same bytes.

namespace detail {

/// Largest number of hidden units, of all contributions of a row together, with one gate for each
/// channel.
inline constexpr std::int32_t max_gate_units = 4096;

/// The values that all channels share: gates, or the hidden units from which each channel's gate is
/// computed.
template <GateKind kind>
struct GatePrepared {
  double gates[max_mixed];  // (contribution)
};
template <>
struct GatePrepared<GateKind::channel> {
  float units[max_gate_units];  // (contribution, hidden)
};

/// w · exp(logit − the largest logit); differences beyond 700 count as 700. The product is an fma,
/// so that no compiler contracts it with the sum that follows.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double open_gate(float weight, float logit,
                                                              float most) noexcept {
  const double behind = static_cast<double>(logit) - static_cast<double>(most);
  const ShortExp e = short_exp(behind > -700.0 ? behind : -700.0);
  return fma(static_cast<double>(weight), fma(e.scale, e.q, e.scale), 0.0);
}

/// Turns logits into gates that add up to 1.
template <class Rows>
KVMELD_HD void soften(const Rows& rows, const float* logits, double* gates) {
  float most = logits[0];
  for (int i = 1; i < rows.count(); ++i) most = logits[i] > most ? logits[i] : most;
  double total = 0;
  for (int i = 0; i < rows.count(); ++i) {
    gates[i] = open_gate(rows.weight(i), logits[i], most);
    total += gates[i];
  }
  for (int i = 0; i < rows.count(); ++i) gates[i] /= total;
}

/// The networks of all layers and planes, and the mixing of rows by them.
template <GateKind kind>
struct GateRows {
  static constexpr bool rotation_equivariant = false;
  static constexpr bool keeps_single = true;
  using Prepared = GatePrepared<kind>;

  const float* floats = nullptr;  // (layer, plane, GateLayout)
  std::int64_t size = 0;
  std::int32_t key_channels = 0;
  std::int32_t value_channels = 0;
  std::int32_t hidden = 0;  // units, not padded
  std::int32_t layers = 1;
  std::int32_t planes = 1;

  GateRows() = default;
  GateRows(const GateShape& shape, std::span<const float> laid_out)
      : floats(laid_out.data()),
        size(static_cast<std::int64_t>(laid_out.size())),
        key_channels(shape.key_channels),
        value_channels(shape.value_channels),
        hidden(shape.hidden),
        layers(shape.layers),
        planes(shape.planes()) {}

  [[nodiscard]] std::span<const float> parameters() const {
    return {floats, static_cast<std::size_t>(size)};
  }
  [[nodiscard]] GateRows with_parameters(const float* copy) const {
    GateRows out = *this;
    out.floats = copy;
    return out;
  }

  /// Gates add up to 1, as long as no sum of 2,048 products with weights of at most 2^64 overflows
  /// f32.
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept {
    return peak <= 0x1p50 ? peak : __builtin_huge_val();
  }

  /// The network of one layer and plane.
  [[nodiscard]] KVMELD_HD const float* network(int layer, Plane plane) const {
    const std::int64_t keys = GateLayout::of(kind, key_channels, hidden).size;
    const std::int64_t values = planes == 1 ? 0 : GateLayout::of(kind, value_channels, hidden).size;
    return floats + (layers == 1 ? 0 : layer * (keys + values)) +
           (planes == 2 && plane == Plane::value ? keys : 0);
  }

  /// The mean of all rows in one channel.
  template <class Rows>
  [[nodiscard]] KVMELD_HD static float mean(const Rows& rows, int channel) {
    float sum = 0;
    for (int i = 0; i < rows.count(); ++i) sum += rows.value(i, channel);
    return sum / static_cast<float>(rows.count());
  }

  template <class Rows>
  [[nodiscard]] KVMELD_HD Prepared prepare(const Rows& rows) const {
    const GateLayout at = GateLayout::of(kind, rows.channels(), hidden);
    const float* const net = network(rows.layer(), rows.plane());
    Prepared out;
    float shared[max_gate_hidden];
    for (int j = 0; j < at.hidden; ++j) shared[j] = 0;
    for (int c = 0; c < rows.channels(); ++c) {
      const float value = mean(rows, c);
      const float* const w = net + at.mean + static_cast<std::ptrdiff_t>(c) * at.hidden;
      for (int j = 0; j < at.hidden; ++j) shared[j] = fma(value, w[j], shared[j]);
    }
    float logits[max_mixed] = {};
    float units[max_gate_hidden];
    for (int i = 0; i < rows.count(); ++i) {
      for (int j = 0; j < at.hidden; ++j) units[j] = net[at.bias + j];
      for (int c = 0; c < rows.channels(); ++c) {
        const float value = rows.value(i, c);
        const float* const w = net + at.own + static_cast<std::ptrdiff_t>(c) * at.hidden;
        for (int j = 0; j < at.hidden; ++j) units[j] = fma(value, w[j], units[j]);
      }
      for (int j = 0; j < at.hidden; ++j) units[j] = hidden_unit(units[j] + shared[j]);
      if constexpr (kind == GateKind::token) {
        logits[i] = net[at.last] + dot_lanes(units, net + at.second, at.hidden);
      } else {
        for (int j = 0; j < at.hidden; ++j) out.units[i * at.hidden + j] = units[j];
      }
    }
    if constexpr (kind == GateKind::token) soften(rows, logits, out.gates);
    return out;
  }

  template <class Rows>
  [[nodiscard]] KVMELD_HD float channel(const Rows& rows, const Prepared& prepared, int c) const {
    double sum = 0;
    if constexpr (kind == GateKind::token) {
      for (int i = 0; i < rows.count(); ++i)
        sum = fma(prepared.gates[i], static_cast<double>(rows.value(i, c)), sum);
      return static_cast<float>(sum);
    } else {
      const GateLayout at = GateLayout::of(kind, rows.channels(), hidden);
      const float* const net = network(rows.layer(), rows.plane());
      const std::ptrdiff_t columns = whole_blocks(rows.channels());
      float logits[max_mixed] = {};
      float most = 0;
      for (int i = 0; i < rows.count(); ++i) {
        logits[i] = net[at.last + c];
        for (int j = 0; j < hidden; ++j)
          logits[i] =
              fma(prepared.units[i * at.hidden + j], net[at.second + j * columns + c], logits[i]);
        most = i == 0 || logits[i] > most ? logits[i] : most;
      }
      double total = 0;
      for (int i = 0; i < rows.count(); ++i) {
        const double g = open_gate(rows.weight(i), logits[i], most);
        total += g;
        sum = fma(g, static_cast<double>(rows.value(i, c)), sum);
      }
      return static_cast<float>(sum / total);
    }
  }

  /// Whole rows on a host.
  void mix(Isa isa, const HeadRows& rows, float* out) const;
};

}  // namespace detail

// Gates over whole rows on hosts: the lane form's expressions, a few contributions at a time.

namespace detail {

/// The mean of all rows, whole blocks.
KVMELD_ALWAYS_INLINE void mean_row(const HeadRows& rows, std::ptrdiff_t columns,
                                   float* __restrict mean) noexcept {
  for (std::ptrdiff_t b = 0; b < columns; b += 32) {
    alignas(64) float sum[32];
    for (int c = 0; c < 32; ++c) sum[c] = 0;
    for (int i = 0; i < rows.contributions; ++i) {
      const float* __restrict const row = rows.values + i * rows.stride + b;
      for (int c = 0; c < 32; ++c) sum[c] += row[c];
    }
    const auto count = static_cast<float>(rows.contributions);
    if ((rows.contributions & (rows.contributions - 1)) ==
        0) {  // equal to a product with the exact reciprocal
      for (int c = 0; c < 32; ++c) mean[b + c] = sum[c] * (1.0F / count);
    } else {
      for (int c = 0; c < 32; ++c) mean[b + c] = sum[c] / count;
    }
  }
}

/// Computes the hidden units of the next few contributions, from `begin` on; returns how many. The
/// first call also computes the mean's part.
template <Isa isa>
KVMELD_ALWAYS_INLINE int next_units(const float* net, const GateLayout& at, const HeadRows& rows,
                                    const float* mean, int begin, float* shared,
                                    float* __restrict units) {
  const int n = next_rows(isa, rows.contributions - begin);
  multiply_rows(
      isa,
      {rows.values + begin * rows.stride, rows.stride, rows.width, net + at.own, net + at.bias,
       units, at.hidden, begin == 0 ? mean : nullptr, net + at.mean, shared},
      n);
  for (std::ptrdiff_t r = 0; r < n; ++r) {
    for (std::ptrdiff_t b = 0; b < at.hidden; b += 32) {
      float* __restrict const to = units + r * at.hidden + b;
      const float* __restrict const add = shared + b;
      KVMELD_KEEP_LOOP
      for (int j = 0; j < 32; ++j) to[j] = hidden_unit(to[j] + add[j]);
    }
  }
  return n;
}

/// Σ g·x of one block of 32 channels, gates by contribution.
KVMELD_ALWAYS_INLINE void sum_gated(const HeadRows& rows, const double* gates, std::ptrdiff_t b,
                                    float* __restrict out) noexcept {
  alignas(64) double sum[32];
  for (int c = 0; c < 32; ++c) sum[c] = 0;
  for (int i = 0; i < rows.contributions; ++i) {
    const double g = gates[i];
    const float* __restrict const row = rows.values + i * rows.stride + b;
    KVMELD_KEEP_LOOP
    for (int c = 0; c < 32; ++c) sum[c] = fma(g, static_cast<double>(row[c]), sum[c]);
  }
  for (int c = 0; c < 32; ++c) out[b + c] = static_cast<float>(sum[c]);
}

/// One block of 32 channels by gates of their own. logits: (contribution, columns)
KVMELD_ALWAYS_INLINE void sum_opened(const HeadRows& rows, const float* logits,
                                     std::ptrdiff_t columns, std::ptrdiff_t b,
                                     float* __restrict out) noexcept {
  alignas(64) float most[32];
  alignas(64) double total[32];
  alignas(64) double sum[32];
  for (int c = 0; c < 32; ++c) {
    most[c] = logits[b + c];
    total[c] = 0;
    sum[c] = 0;
  }
  for (int i = 1; i < rows.contributions; ++i) {
    const float* __restrict const logit = logits + i * columns + b;
    for (int c = 0; c < 32; ++c) most[c] = logit[c] > most[c] ? logit[c] : most[c];
  }
  for (int i = 0; i < rows.contributions; ++i) {
    const float weight = rows.weights[i];
    const float* __restrict const logit = logits + i * columns + b;
    const float* __restrict const row = rows.values + i * rows.stride + b;
    KVMELD_KEEP_LOOP
    for (int c = 0; c < 32; ++c) {
      const double g = open_gate(weight, logit[c], most[c]);
      total[c] += g;
      sum[c] = fma(g, static_cast<double>(row[c]), sum[c]);
    }
  }
  for (int c = 0; c < 32; ++c) out[b + c] = static_cast<float>(sum[c] / total[c]);
}

/// `sum_opened` of two contributions: the larger logit's exponential is 1, so there is but one to
/// compute. 1 is what `open_gate` gives for a difference of 0, and what it gives for −700 stands
/// where the larger logit is not finite.
KVMELD_ALWAYS_INLINE void sum_opened_pair(const HeadRows& rows, const float* __restrict logits,
                                          std::ptrdiff_t columns, std::ptrdiff_t b,
                                          float* __restrict out) noexcept {
  const double weight_0 = static_cast<double>(rows.weights[0]),
               weight_1 = static_cast<double>(rows.weights[1]);
  const ShortExp least = short_exp(-700.0);
  const double closed = fma(least.scale, least.q, least.scale);
  const float* __restrict const x = rows.values + b;
  const float* __restrict const y = x + rows.stride;
  KVMELD_KEEP_LOOP
  for (int c = 0; c < 32; ++c) {
    const float l = logits[b + c], m = logits[columns + b + c];
    const bool second = m > l;
    const float most = second ? m : l, other = second ? l : m;
    const double behind = static_cast<double>(other) - static_cast<double>(most);
    const ShortExp e = short_exp(behind > -700.0 ? behind : -700.0);
    const double less = fma(e.scale, e.q, e.scale);
    const double more = static_cast<double>(most - most) == 0.0 ? 1.0 : closed;
    const double g = fma(weight_0, second ? less : more, 0.0),
                 h = fma(weight_1, second ? more : less, 0.0);
    out[b + c] = static_cast<float>(
        fma(h, static_cast<double>(y[c]), fma(g, static_cast<double>(x[c]), 0.0)) / (g + h));
  }
}

template <Isa isa, GateKind kind>
KVMELD_ALWAYS_INLINE void mix_gated(const GateRows<kind>& gate, const HeadRows& rows, float* out) {
  const GateLayout at = GateLayout::of(kind, rows.width, gate.hidden);
  const float* const net = gate.network(rows.layer_index, rows.plane_kind);
  const int count = rows.contributions;
  const std::ptrdiff_t columns = whole_blocks(rows.width);
  alignas(64) float mean[1024];
  alignas(64) float shared[max_gate_hidden];
  mean_row(rows, columns, mean);
  if constexpr (kind == GateKind::token) {
    alignas(64) float units[8 * max_gate_hidden];
    float logits[max_mixed] = {};
    for (int i = 0; i < count;) {
      const int n = next_units<isa>(net, at, rows, mean, i, shared, units);
      for (int r = 0; r < n; ++r)
        logits[i + r] = net[at.last] + dot_lanes(units + r * at.hidden, net + at.second, at.hidden);
      i += n;
    }
    double gates[max_mixed];
    soften(rows, logits, gates);
    for (std::ptrdiff_t b = 0; b < columns; b += 32) sum_gated(rows, gates, b, out);
  } else {
    alignas(64) float units[max_gate_units];
    for (int i = 0; i < count;)
      i += next_units<isa>(net, at, rows, mean, i, shared, units + i * at.hidden);
    alignas(64) float logits[max_mixed_values];
    multiply_rows(isa,
                  {units, at.hidden, gate.hidden, net + at.second, net + at.last, logits, columns,
                   nullptr, nullptr, nullptr},
                  count);
    for (std::ptrdiff_t b = 0; b < columns; b += 32)
      count == 2 ? sum_opened_pair(rows, logits, columns, b, out)
                 : sum_opened(rows, logits, columns, b, out);
  }
}

template <GateKind kind>
KVMELD_NOINLINE void mix_gated_baseline(const GateRows<kind>& gate, const HeadRows& rows,
                                        float* out) {
  mix_gated<Isa::baseline>(gate, rows, out);
}
template <GateKind kind>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void mix_gated_avx2(const GateRows<kind>& gate,
                                                       const HeadRows& rows, float* out) {
  mix_gated<Isa::avx2>(gate, rows, out);
}
template <GateKind kind>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void mix_gated_avx512(const GateRows<kind>& gate,
                                                           const HeadRows& rows, float* out) {
  mix_gated<Isa::avx512>(gate, rows, out);
}

template <GateKind kind>
void GateRows<kind>::mix(Isa isa, const HeadRows& rows, float* out) const {
  if (isa == Isa::avx512) return mix_gated_avx512(*this, rows, out);
  isa == Isa::avx2 ? mix_gated_avx2(*this, rows, out) : mix_gated_baseline(*this, rows, out);
}

}  // namespace detail

KVMELD_NAMESPACE_END
