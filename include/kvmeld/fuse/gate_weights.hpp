#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/fuse/mlp.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a gate is decided for.
enum class GateKind : std::uint8_t {
  token,    ///< one gate a head's row
  channel,  ///< one gate a channel
};

/// Sizes of a gate's networks, each of which is first (hidden, 2 · channels), tanh, second
/// (outputs, hidden).
struct GateShape {
  GateKind kind = GateKind::token;
  std::int32_t key_channels = 0;  ///< head size of keys
  /// Head size of values; equal to keys' where both share a network.
  std::int32_t value_channels = 0;
  std::int32_t hidden = 64;   ///< units, 1 … `max_gate_hidden`
  std::int32_t layers = 1;    ///< networks by layer; 1: all layers share
  bool planes_apart = false;  ///< keys and values have networks of their own

  bool operator==(const GateShape&) const = default;
  [[nodiscard]] constexpr std::int32_t planes() const noexcept { return planes_apart ? 2 : 1; }
  [[nodiscard]] constexpr std::int32_t channels(std::int32_t plane) const noexcept {
    return plane == 0 ? key_channels : value_channels;
  }
  /// Logits of one network.
  [[nodiscard]] constexpr std::int32_t outputs(std::int32_t plane) const noexcept {
    return kind == GateKind::token ? 1 : channels(plane);
  }
  /// Numbers of one network: first.weight, first.bias, second.weight, second.bias, each row-major.
  [[nodiscard]] constexpr std::int64_t network_size(std::int32_t plane) const noexcept {
    const std::int64_t h = hidden;
    return h * 2 * channels(plane) + h + (h + 1) * outputs(plane);
  }
  /// Numbers of all networks: (layer, plane, network).
  [[nodiscard]] constexpr std::int64_t size() const noexcept {
    return layers * (network_size(0) + (planes_apart ? network_size(1) : 0));
  }
};

inline constexpr std::int32_t max_gate_hidden = 256;
/// Magnitudes above would overflow where they are summed.
inline constexpr float max_gate_weight = 0x1p64F;

namespace detail {

/// Where a network's matrices lie in what hosts and devices read: inputs by rows, columns padded to
/// whole blocks by zeros.
struct GateLayout {
  std::int32_t hidden = 0;  // padded
  std::int64_t own = 0;     // (channel, hidden)
  std::int64_t mean = 0;    // (channel, hidden)
  std::int64_t bias = 0;    // (hidden)
  std::int64_t second = 0;  // (hidden) for tokens; (unit, channel) for channels
  std::int64_t last = 0;    // second.bias
  std::int64_t size = 0;

  [[nodiscard]] KVMELD_HD static constexpr GateLayout of(GateKind kind, std::int32_t channels,
                                                         std::int32_t units) noexcept {
    GateLayout out;
    out.hidden = whole_blocks(units);
    out.mean = static_cast<std::int64_t>(channels) * out.hidden;
    out.bias = 2 * out.mean;
    out.second = out.bias + out.hidden;
    const std::int64_t columns = kind == GateKind::token ? 32 : whole_blocks(channels);
    out.last = out.second + (kind == GateKind::token ? out.hidden : units * columns);
    out.size = out.last + columns;
    return out;
  }
};

}  // namespace detail

/// The weights of a gate's networks, checked, laid out for every executor, and named by a digest;
/// immutable.
///
/// A network sees a contribution's own row beside the mean of all rows, x = [own, mean], and yields
/// second.weight · tanh(first.weight · x + first.bias) + second.bias.
class GateWeights {
 public:
  /// @param parameters  as `GateShape::size` counts them.
  /// Errors: `invalid_argument` (sizes), `non_finite`, `oversized` (a weight above
  /// `max_gate_weight`).
  KVMELD_LAZY [[nodiscard]] static Result<std::shared_ptr<const GateWeights>> make(
      const GateShape& shape, std::span<const float> parameters);

  [[nodiscard]] const GateShape& shape() const noexcept { return shape_; }
  /// (layer, plane, network)
  [[nodiscard]] std::span<const float> parameters() const noexcept { return parameters_; }
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }
  /// What executors read; 64 bytes aligned.
  [[nodiscard]] std::span<const float> laid_out() const noexcept {
    return {laid_out_.data() + align_, laid_out_.size() - 16};
  }

  /// Refuses a model whose layers or head sizes are others.
  KVMELD_LAZY [[nodiscard]] Status fits(const Geometry& geometry) const;

  GateWeights(const GateWeights&) = delete;
  GateWeights& operator=(const GateWeights&) = delete;

 private:
  GateWeights() = default;

  GateShape shape_;
  std::vector<float> parameters_;
  std::vector<float> laid_out_;
  std::size_t align_ = 0;
  Digest128 digest_;
};

namespace detail {

/// Calls `f(prefix of the names, plane)` for each network, in the order of `GateShape::size`.
template <class F>
Status each_gate_network(const GateShape& shape, const F& f) {
  for (std::int32_t l = 0; l < shape.layers; ++l) {
    for (std::int32_t p = 0; p < shape.planes(); ++p) {
      std::string prefix;
      if (shape.layers > 1) prefix.append("layers.").append(detail::decimal(l)).append(".");
      if (shape.planes_apart) prefix.append(p == 0 ? "key." : "value.");
      KVMELD_TRY(f(prefix, p));
    }
  }
  return {};
}

KVMELD_LAZY void lay_out_gate(const GateShape& shape, std::int32_t plane, const float* from,
                              float* to) {
  const std::int32_t channels = shape.channels(plane), outputs = shape.outputs(plane);
  const GateLayout at = GateLayout::of(shape.kind, channels, shape.hidden);
  const float* const first_bias = from + static_cast<std::ptrdiff_t>(shape.hidden) * 2 * channels;
  const float* const second = first_bias + shape.hidden;
  const float* const second_bias = second + static_cast<std::ptrdiff_t>(outputs) * shape.hidden;
  for (std::int32_t j = 0; j < shape.hidden; ++j) {
    for (std::int32_t c = 0; c < channels; ++c) {
      to[at.own + static_cast<std::ptrdiff_t>(c) * at.hidden + j] =
          from[static_cast<std::ptrdiff_t>(j) * 2 * channels + c];
      to[at.mean + static_cast<std::ptrdiff_t>(c) * at.hidden + j] =
          from[static_cast<std::ptrdiff_t>(j) * 2 * channels + channels + c];
    }
    to[at.bias + j] = first_bias[j];
    for (std::int32_t o = 0; o < outputs; ++o) {
      const float w = second[static_cast<std::ptrdiff_t>(o) * shape.hidden + j];
      to[at.second + (shape.kind == GateKind::token
                          ? j
                          : static_cast<std::ptrdiff_t>(j) * whole_blocks(channels) + o)] = w;
    }
  }
  for (std::int32_t o = 0; o < outputs; ++o) to[at.last + o] = second_bias[o];
}

}  // namespace detail

template <class>
Result<std::shared_ptr<const GateWeights>> GateWeights::make(const GateShape& shape,
                                                             std::span<const float> parameters) {
  using detail::error;
  constexpr std::int32_t most_channels = 1024, most_layers = 4096;
  if (shape.hidden < 1 || shape.hidden > max_gate_hidden || shape.layers < 1 ||
      shape.layers > most_layers || shape.kind > GateKind::channel) {
    return error(ErrorCode::invalid_argument, "gate: ", shape.hidden, " hidden units and ",
                 shape.layers, " layers; 1 to ", max_gate_hidden, " and 1 to ", most_layers,
                 " are possible");
  }
  for (std::int32_t p = 0; p < 2; ++p) {
    if (shape.channels(p) < 1 || shape.channels(p) > most_channels ||
        (!shape.planes_apart && shape.channels(p) != shape.key_channels)) {
      return error(ErrorCode::invalid_argument, "gate: head sizes ", shape.key_channels, " and ",
                   shape.value_channels, "; 1 to ", most_channels,
                   " are possible, and equal ones where keys and values share their weights");
    }
  }
  if (static_cast<std::int64_t>(parameters.size()) != shape.size()) {
    return error(ErrorCode::invalid_argument, "gate: ", parameters.size(),
                 " parameters where the sizes make ", shape.size());
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const float w = parameters[i];
    if (w - w != 0) return error(ErrorCode::non_finite, "gate: parameter ", i, " is not finite");
    if (!(w >= -max_gate_weight && w <= max_gate_weight))
      return error(ErrorCode::oversized, "gate: parameter ", i, " is ", w, ", above 2^64");
  }
  std::shared_ptr<GateWeights> out(new GateWeights);
  out->shape_ = shape;
  out->parameters_.assign(parameters.begin(), parameters.end());
  const detail::GateLayout layouts[] = {
      detail::GateLayout::of(shape.kind, shape.key_channels, shape.hidden),
      detail::GateLayout::of(shape.kind, shape.value_channels, shape.hidden)};
  std::int64_t floats = 0;
  for (std::int32_t p = 0; p < shape.planes(); ++p) floats += shape.layers * layouts[p].size;
  out->laid_out_.assign(static_cast<std::size_t>(floats) + 16, 0.0F);
  while (reinterpret_cast<std::uintptr_t>(out->laid_out_.data() + out->align_) % 64 != 0 &&
         out->align_ < 15)
    ++out->align_;
  const float* from = out->parameters_.data();
  float* to = out->laid_out_.data() + out->align_;
  (void)detail::each_gate_network(shape, [&](const std::string&, std::int32_t plane) {
    detail::lay_out_gate(shape, plane, from, to);
    from += shape.network_size(plane);
    to += layouts[plane].size;
    return Status();
  });
  Hasher hasher;
  hasher.text("kvmeld.GateWeights.v1");
  for (const std::int32_t n :
       {shape.key_channels, shape.value_channels, shape.hidden, shape.layers})
    hasher.value(n);
  hasher.value(shape.kind);
  hasher.value(static_cast<std::uint8_t>(shape.planes_apart));
  hasher.values(std::span<const float>(out->parameters_));
  out->digest_ = hasher.digest();
  return std::shared_ptr<const GateWeights>(std::move(out));
}

template <class>
Status GateWeights::fits(const Geometry& geometry) const {
  if (shape_.layers > 1 && static_cast<std::size_t>(shape_.layers) != geometry.layers.size()) {
    return detail::error(ErrorCode::geometry_mismatch, "gate: weights for ", shape_.layers,
                         " layers, the model has ", geometry.layers.size());
  }
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& plane : geometry.layers[l].planes) {
      if (plane.plane != Plane::key && plane.plane != Plane::value) {
        return detail::error(ErrorCode::unsupported, "gate: layer ", l,
                             " has a plane that is neither keys nor values");
      }
      const std::int32_t channels = shape_.channels(plane.plane == Plane::value ? 1 : 0);
      if (plane.channels != channels) {
        return detail::error(ErrorCode::geometry_mismatch, "gate: weights for ",
                             plane.plane == Plane::value ? "values" : "keys", " of ", channels,
                             " channels, layer ", l, " has ", plane.channels);
      }
    }
  }
  return {};
}

KVMELD_NAMESPACE_END
