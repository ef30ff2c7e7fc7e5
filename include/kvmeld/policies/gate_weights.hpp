#pragma once

/// The weights of learned gates, the network that computes them, and their files.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/safetensors.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

// Rows times a matrix for small networks: each output is summed from its bias on in ascending
// order of inputs, by fma, and lanes lie across outputs (docs/numerics.md), so that neither blocks
// nor vectors show in the bytes.
//
// Not the kernels of policies/projection_map.hpp, though of the same rule: a map meets tiles of 56
// tokens, whose sums take two vectors for each of 14, from panels. A gate meets two rows or a few,
// which in that shape would have half of the sums that keep the multipliers busy: theirs take four
// vectors a row, from a matrix as it lies, and beside them run the sums of a row that all share.

namespace detail {

/// Sizes of networks round up to whole blocks, with zeros.
[[nodiscard]] KVMELD_HD constexpr std::int32_t whole_blocks(std::int32_t n) noexcept {
  return (n + 31) / 32 * 32;
}

/// out = start + x · matrix for a few rows, and beside them, where `shared` is there, shared_out =
/// shared · shared_matrix: a row that all of them have in common has its product summed while
/// theirs are, which keeps the processor's multipliers busy.
struct RowProducts {
  const float* x = nullptr;  ///< (row, input)
  std::ptrdiff_t x_stride = 0;
  int inputs = 0;
  const float* matrix = nullptr;         ///< (input, column)
  const float* start = nullptr;          ///< (column)
  float* out = nullptr;                  ///< (row, column)
  std::ptrdiff_t columns = 0;            ///< of matrices and out; a multiple of 32
  const float* shared = nullptr;         ///< (input); null: none
  const float* shared_matrix = nullptr;  ///< (input, column)
  float* shared_out = nullptr;           ///< (column)
};

/// 32 columns of one row, by loops.
KVMELD_ALWAYS_INLINE void product_columns(const float* x, const float* matrix,
                                          std::ptrdiff_t columns, int inputs, const float* start,
                                          float* __restrict out) noexcept {
  alignas(64) float sums[32];
  for (int c = 0; c < 32; ++c) sums[c] = start == nullptr ? 0.0F : start[c];
  for (int k = 0; k < inputs; ++k) {
    const float value = x[k];
    KVMELD_KEEP_LOOP
    for (int c = 0; c < 32; ++c) sums[c] = fma(value, matrix[k * columns + c], sums[c]);
  }
  for (int c = 0; c < 32; ++c) out[c] = sums[c];
}

/// The rows one by one.
inline KVMELD_NOINLINE void row_products_baseline(const RowProducts& p, int rows,
                                                  std::ptrdiff_t column) noexcept {
  if (p.shared != nullptr)
    product_columns(p.shared, p.shared_matrix + column, p.columns, p.inputs, nullptr,
                    p.shared_out + column);
  for (int r = 0; r < rows; ++r) {
    product_columns(p.x + r * p.x_stride, p.matrix + column, p.columns, p.inputs, p.start + column,
                    p.out + r * p.columns + column);
  }
}

#if KVMELD_X86_DISPATCH

/// Four vectors of columns.
template <int bytes>
struct FourColumns {
  using Floats = extend::Vec<float, bytes>;
  static constexpr std::size_t lanes = Floats::lanes;

  Floats a, b, c, d;

  KVMELD_ALWAYS_INLINE static FourColumns load(const float* in) noexcept {
    return {Floats::load(in), Floats::load(in + lanes), Floats::load(in + 2 * lanes),
            Floats::load(in + 3 * lanes)};
  }
  KVMELD_ALWAYS_INLINE void add(float x, const FourColumns& w) noexcept {
    const Floats value = Floats::spread(x);
    a = multiply_add(value, w.a, a);
    b = multiply_add(value, w.b, b);
    c = multiply_add(value, w.c, c);
    d = multiply_add(value, w.d, d);
  }
  KVMELD_ALWAYS_INLINE void store(float* out) const noexcept {
    a.store(out);
    b.store(out + lanes);
    c.store(out + 2 * lanes);
    d.store(out + 3 * lanes);
  }
};

/// Products of `rows` rows by four vectors of columns, and of the shared one where there is one.
template <int bytes, int rows, bool shared>
struct MultiplyRows {
  using Columns = FourColumns<bytes>;

  KVMELD_ALWAYS_INLINE static void run(const RowProducts& p, std::ptrdiff_t column) noexcept {
    extend::Vecs<Columns, rows> sums;
    Columns common{};
    const Columns start = Columns::load(p.start + column);
    sums.each([&](Columns& sum, std::size_t) KVMELD_INLINE_LAMBDA { sum = start; });
    const float* m = p.matrix + column;
    const float* s = shared ? p.shared_matrix + column : m;
    const std::ptrdiff_t stride = p.x_stride, columns = p.columns;
    for (int k = 0; k < p.inputs; ++k, m += columns, s += columns) {
      const Columns w = Columns::load(m);
      const float* const x = p.x + k;
      sums.each([&](Columns& sum, std::size_t row) KVMELD_INLINE_LAMBDA {
        sum.add(x[static_cast<std::ptrdiff_t>(row) * stride], w);
      });
      if constexpr (shared) common.add(p.shared[k], Columns::load(s));
    }
    float* const out = p.out + column;
    sums.each([&](Columns& sum, std::size_t row) KVMELD_INLINE_LAMBDA {
      sum.store(out + static_cast<std::ptrdiff_t>(row) * columns);
    });
    if constexpr (shared) common.store(p.shared_out + column);
  }
};

template <bool shared>
void row_products_avx512(const RowProducts& p, int rows, std::ptrdiff_t column) noexcept {
  using extend::Kernel;
  if (rows == 1) return Kernel<MultiplyRows<64, 1, shared>>::avx512(p, column);
  if (rows == 2) return Kernel<MultiplyRows<64, 2, shared>>::avx512(p, column);
  if (rows == 3) return Kernel<MultiplyRows<64, 3, shared>>::avx512(p, column);
  if (rows == 4) return Kernel<MultiplyRows<64, 4, shared>>::avx512(p, column);
  if (rows == 5) return Kernel<MultiplyRows<64, 5, shared>>::avx512(p, column);
}
/// AVX2 has registers for two rows.
template <bool shared>
void row_products_avx2(const RowProducts& p, int rows, std::ptrdiff_t column) noexcept {
  rows == 1 ? extend::Kernel<MultiplyRows<32, 1, shared>>::avx2(p, column)
            : extend::Kernel<MultiplyRows<32, 2, shared>>::avx2(p, column);
}

#endif  // KVMELD_X86_DISPATCH

/// Rows that one kernel takes at most.
[[nodiscard]] constexpr int product_rows(Isa isa) noexcept {
  return isa == Isa::avx512 ? 5 : isa == Isa::avx2 ? 2 : 8;
}

/// A share of `left` rows such that all shares are of like size, and none above `product_rows`.
[[nodiscard]] constexpr int next_rows(Isa isa, int left) noexcept {
  const int shares = (left + product_rows(isa) - 1) / product_rows(isa);
  return (left + shares - 1) / shares;
}

/// Multiplies any number of rows.
inline void multiply_rows([[maybe_unused]] Isa isa, RowProducts p, int rows) noexcept {
  while (rows > 0) {
    const int part = next_rows(isa, rows);
    for (std::ptrdiff_t column = 0; column < p.columns;) {
#if KVMELD_X86_DISPATCH
      if (isa == Isa::avx512 && p.columns - column >= 64) {
        p.shared != nullptr ? row_products_avx512<true>(p, part, column)
                            : row_products_avx512<false>(p, part, column);
        column += 64;
        continue;
      }
      if (isa != Isa::baseline) {
        for (int r = 0; r < part; r += 2) {  // a last half block of AVX-512, too
          RowProducts two = p;
          two.x += r * p.x_stride;
          two.out += r * p.columns;
          if (r > 0) two.shared = nullptr;
          const int n = part - r < 2 ? 1 : 2;
          two.shared != nullptr ? row_products_avx2<true>(two, n, column)
                                : row_products_avx2<false>(two, n, column);
        }
        column += 32;
        continue;
      }
#endif
      row_products_baseline(p, part, column);
      column += 32;
    }
    p.x += part * p.x_stride;
    p.out += part * p.columns;
    p.shared = nullptr;
    rows -= part;
  }
}

/// e^x as scale · (1 + q), for x in [−700, 700].
struct ShortExp {
  double scale;
  double q;
};

/// The expressions of `math::exp` with as many terms as a result in f32 needs: within 6e-9 of e^x,
/// in half the time.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE ShortExp short_exp(double x) noexcept {
  const double magic = fma(x, 0x1.71547652b82fep+0, integer_magic);
  const double k = magic - integer_magic;
  const double r = fma(-k, 0x1.62e42fefa39efp-1, x);  // |r| <= 0.3466
  double p = 1.0 / 5040;
  p = fma(p, r, 1.0 / 720);
  p = fma(p, r, 1.0 / 120);
  p = fma(p, r, 1.0 / 24);
  p = fma(p, r, 1.0 / 6);
  p = fma(p, r, 0.5);
  p = fma(p, r, 1.0);
  return {power_of_two(static_cast<std::int64_t>(double_bits(magic) - double_bits(integer_magic))),
          p * r};
}

/// A hidden unit: tanh of what its inputs add up to, within 1e-8 and rounded to f32. A sum that
/// overflowed both ways counts as a large one.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE float hidden_unit(float sum) noexcept {
  const double twice = 2.0 * static_cast<double>(sum);
  const double below = twice < 40.0 ? twice : 40.0;
  const ShortExp e = short_exp(below > -40.0 ? below : -40.0);
  // e^2x − 1, which keeps its relative precision near 0
  const double minus_one = fma(e.scale, e.q, e.scale - 1.0);
  return static_cast<float>(minus_one / (minus_one + 2.0));
}

/// What is added to a logit: a · b, n a multiple of 32, by the 32 lanes and tree of every reduction
/// within a row.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE float dot_lanes(const float* a, const float* b,
                                                             std::int32_t n) noexcept {
  float lanes[32];
  for (int l = 0; l < 32; ++l) lanes[l] = 0;
  for (std::int32_t at = 0; at < n; at += 32) {
    for (int l = 0; l < 32; ++l) lanes[l] = fma(a[at + l], b[at + l], lanes[l]);
  }
  for (int l = 0; l < 16; ++l) lanes[l] += lanes[l + 16];
  for (int l = 0; l < 8; ++l) lanes[l] += lanes[l + 8];
  for (int l = 0; l < 4; ++l) lanes[l] += lanes[l + 4];
  for (int l = 0; l < 2; ++l) lanes[l] += lanes[l + 2];
  return lanes[0] + lanes[1];
}

}  // namespace detail

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

/// Most hidden units of a gate.
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
  [[nodiscard]] static Result<std::shared_ptr<const GateWeights>> make(
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
  [[nodiscard]] Status fits(const Geometry& geometry) const;

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
      if (shape.layers > 1) prefix.append("layers.").append(extend::decimal(l)).append(".");
      if (shape.planes_apart) prefix.append(p == 0 ? "key." : "value.");
      KVMELD_TRY(f(prefix, p));
    }
  }
  return {};
}

inline void lay_out_gate(const GateShape& shape, std::int32_t plane, const float* from, float* to) {
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

inline Result<std::shared_ptr<const GateWeights>> GateWeights::make(
    const GateShape& shape, std::span<const float> parameters) {
  using extend::error;
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

inline Status GateWeights::fits(const Geometry& geometry) const {
  if (shape_.layers > 1 && static_cast<std::size_t>(shape_.layers) != geometry.layers.size()) {
    return extend::error(ErrorCode::geometry_mismatch, "gate: weights for ", shape_.layers,
                         " layers, the model has ", geometry.layers.size());
  }
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& plane : geometry.layers[l].planes) {
      if (plane.plane != Plane::key && plane.plane != Plane::value) {
        return extend::error(ErrorCode::unsupported, "gate: layer ", l,
                             " has a plane that is neither keys nor values");
      }
      const std::int32_t channels = shape_.channels(plane.plane == Plane::value ? 1 : 0);
      if (plane.channels != channels) {
        return extend::error(ErrorCode::geometry_mismatch, "gate: weights for ",
                             plane.plane == Plane::value ? "values" : "keys", " of ", channels,
                             " channels, layer ", l, " has ", plane.channels);
      }
    }
  }
  return {};
}

// Gate weights as safetensors files.

/// Reads a gate's weights from tensors first.weight (hidden, 2 · channels), first.bias (hidden),
/// second.weight (outputs, hidden) and second.bias (outputs) of any float type, as linear layers of
/// PyTorch have them.
///
/// Networks by layer: each name behind `layers.N.`; keys and values apart: then behind `key.` or
/// `value.`. One output is a gate per token, as many as channels a gate per channel. Errors: those
/// of `parse_safetensors` and `GateWeights::make`; `not_found` (a tensor), `unknown_field` (a
/// tensor too many, or metadata `activation` that is not `tanh`), `geometry_mismatch` (shapes that
/// differ).
[[nodiscard]] inline Result<std::shared_ptr<const GateWeights>> gate_from_safetensors(
    std::span<const std::byte> file) {
  using extend::error;
  const auto parsed = parse_safetensors(file);
  if (!parsed) return parsed.error();
  const std::string* const activation = parsed->find_metadata("activation");
  if (activation != nullptr && *activation != "tanh")
    return error(ErrorCode::unknown_field, "gate: activation '", *activation,
                 "'; this build has tanh");
  GateShape shape;
  while (parsed->find("layers." + extend::decimal(shape.layers) +
                      (parsed->find("layers.0.first.weight") != nullptr ? ".first.weight"
                                                                        : ".key.first.weight")) !=
         nullptr) {
    ++shape.layers;
  }
  const std::string layer = shape.layers > 1 ? "layers.0." : "";
  shape.planes_apart = parsed->find(layer + "key.first.weight") != nullptr;
  if (parsed->tensors.size() != static_cast<std::size_t>(4 * shape.layers * shape.planes())) {
    return error(ErrorCode::unknown_field, "gate: ", parsed->tensors.size(), " tensors where ",
                 shape.layers, " layers and ", shape.planes(), " planes make ",
                 4 * shape.layers * shape.planes());
  }
  // Sizes come from the first layer; every tensor must then have them.
  std::uint64_t hidden = 0, outputs[2] = {}, channels[2] = {};
  for (std::int32_t p = 0; p < shape.planes(); ++p) {
    const std::string prefix = layer + (!shape.planes_apart ? "" : p == 0 ? "key." : "value.");
    const StoredTensor* const first = parsed->find(prefix + "first.weight");
    const StoredTensor* const second = parsed->find(prefix + "second.weight");
    if (first == nullptr || second == nullptr)
      return error(ErrorCode::not_found, "gate: no tensor '", prefix,
                   first == nullptr ? "first" : "second", ".weight'");
    if (first->shape.size() != 2 || second->shape.size() != 2 ||
        first->shape[0] > max_gate_hidden || first->shape[1] > 2048 || first->shape[1] % 2 != 0 ||
        (second->shape[0] != 1 && second->shape[0] != first->shape[1] / 2)) {
      return error(ErrorCode::geometry_mismatch, "gate: '", prefix,
                   "first.weight' is (hidden, 2 · channels), hidden at most ", max_gate_hidden,
                   ", and second.weight (1 or channels, hidden)");
    }
    hidden = first->shape[0];
    channels[p] = first->shape[1] / 2;
    outputs[p] = second->shape[0];
  }
  if (!shape.planes_apart) {
    channels[1] = channels[0];
    outputs[1] = outputs[0];
  }
  shape.hidden = static_cast<std::int32_t>(hidden);
  shape.key_channels = static_cast<std::int32_t>(channels[0]);
  shape.value_channels = static_cast<std::int32_t>(channels[1]);
  shape.kind = outputs[0] == 1 && outputs[1] == 1 ? GateKind::token : GateKind::channel;
  std::vector<float> parameters;
  KVMELD_TRY(detail::each_gate_network(
      shape, [&](const std::string& prefix, std::int32_t plane) -> Status {
        const auto h = static_cast<std::uint64_t>(shape.hidden),
                   c = static_cast<std::uint64_t>(shape.channels(plane)),
                   o = static_cast<std::uint64_t>(shape.outputs(plane));
        const std::pair<const char*, std::vector<std::uint64_t>> wanted[] = {
            {"first.weight", {h, 2 * c}},
            {"first.bias", {h}},
            {"second.weight", {o, h}},
            {"second.bias", {o}}};
        for (const auto& [name, dims] : wanted) {
          const StoredTensor* const tensor = parsed->find(prefix + name);
          if (tensor == nullptr)
            return error(ErrorCode::not_found, "gate: no tensor '", prefix, name, "'");
          if (tensor->shape != dims) {
            return error(ErrorCode::geometry_mismatch, "gate: '", prefix, name, "' has ",
                         tensor->elements(), " elements in another shape than that of ", h,
                         " hidden units and ", c, " channels");
          }
          const auto numbers = to_floats<float>(*tensor);
          if (!numbers) return numbers.error();
          parameters.insert(parameters.end(), numbers->begin(), numbers->end());
        }
        return {};
      }));
  return GateWeights::make(shape, parameters);
}

/// The same tensors, f32: reading them again gives equal weights, and writing those equal bytes.
[[nodiscard]] inline Result<std::vector<std::byte>> to_safetensors(const GateWeights& weights) {
  const GateShape& shape = weights.shape();
  SafetensorsWriter writer;
  writer.metadata("activation", "tanh");
  std::span<const float> rest = weights.parameters();
  (void)detail::each_gate_network(shape, [&](const std::string& prefix, std::int32_t plane) {
    const auto h = static_cast<std::size_t>(shape.hidden),
               c = static_cast<std::size_t>(shape.channels(plane)),
               o = static_cast<std::size_t>(shape.outputs(plane));
    const auto put = [&](const char* name, std::vector<std::uint64_t> dims, std::size_t count) {
      writer.floats(prefix + name, std::move(dims), rest.first(count));
      rest = rest.subspan(count);
    };
    put("first.weight", {h, 2 * c}, h * 2 * c);
    put("first.bias", {h}, h);
    put("second.weight", {o, h}, o * h);
    put("second.bias", {o}, o);
    return Status();
  });
  return writer.finish();
}

KVMELD_NAMESPACE_END
