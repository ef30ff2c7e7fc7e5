#pragma once

/// The mix form of gates: what one lane works out by itself, and the same bytes by vectors.

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/fuse/gate_weights.hpp>
#include <kvmeld/fuse/head_rows.hpp>
#include <kvmeld/fuse/mlp.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Hidden units of all contributions of a row that gates per channel keep.
inline constexpr std::int32_t max_gate_units = 4096;

/// What channels share: gates, or the hidden units that each channel's gate comes from.
template <GateKind kind>
struct GatePrepared {
  double gates[max_mixed];  // (contribution)
};
template <>
struct GatePrepared<GateKind::channel> {
  float units[max_gate_units];  // (contribution, hidden)
};

/// w · exp(logit − the largest logit); differences beyond 700 count as 700. The product is an fma,
/// so that no compiler joins it with the sum that it goes into.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double open_gate(float weight, float logit,
                                                              float most) noexcept {
  const double behind = static_cast<double>(logit) - static_cast<double>(most);
  const ShortExp e = short_exp(behind > -700.0 ? behind : -700.0);
  return fma(static_cast<double>(weight), fma(e.scale, e.q, e.scale), 0.0);
}

/// Logits to gates that add up to 1.
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

/// The networks of all layers and planes, and how rows are mixed by them.
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

  /// Gates add up to 1, as long as no sum of 2,048 products with weights of at most 2^64 leaves
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
KVMELD_NAMESPACE_END
