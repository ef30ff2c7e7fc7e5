#pragma once

/// Linear maps between the caches of two models, packed for products by rows.

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
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

/// y = W·x + b, or y = A·(B·x) + b where W = A·B has low rank.
///
/// Held in f64, as fits make it; what is applied to caches is rounded once to f32.
struct LinearMap {
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  std::int32_t rank = 0;         ///< 0: dense
  std::vector<double> weight{};  ///< W (outputs, inputs), or A (outputs, rank), row by row
  std::vector<double> inner{};   ///< B (rank, inputs); empty where dense
  std::vector<double> bias{};    ///< (outputs); empty: none

  bool operator==(const LinearMap&) const = default;
};

/// Applies a map to one vector in f64, every output summed from the bias on in ascending order of
/// inputs, with fma.
///
/// The reference of what runs on caches, and the form for fits and their scores. O(outputs ·
/// inputs).
/// @param x (inputs) @param y (outputs), does not overlap `x`
inline void apply(const LinearMap& map, const double* x, double* y) {
  const auto product = [](const std::vector<double>& w, std::int32_t rows, std::int32_t columns,
                          const double* in, double* out) {
    for (std::int32_t r = 0; r < rows; ++r) {
      const double* const row = w.data() + static_cast<std::int64_t>(r) * columns;
      double sum = out[r];
      for (std::int32_t c = 0; c < columns; ++c) sum = fma(row[c], in[c], sum);
      out[r] = sum;
    }
  };
  for (std::int32_t r = 0; r < map.outputs; ++r)
    y[r] = map.bias.empty() ? 0.0 : map.bias[static_cast<std::size_t>(r)];
  if (map.rank == 0) return product(map.weight, map.outputs, map.inputs, x, y);
  std::vector<double> middle(static_cast<std::size_t>(map.rank), 0.0);
  product(map.inner, map.rank, map.inputs, x, middle.data());
  product(map.weight, map.outputs, map.rank, middle.data(), y);
}

/// Refuses sizes that contradict each other, sizes beyond 2^16, and numbers that are not finite in
/// f32.
[[nodiscard]] inline Status validate(const LinearMap& map) {
  constexpr std::int32_t most = 1 << 16;
  if (map.outputs <= 0 || map.inputs <= 0 || map.rank < 0 || map.outputs > most ||
      map.inputs > most || map.rank > most) {
    return extend::error(ErrorCode::invalid_argument, "a matrix of ", map.outputs, " x ",
                         map.inputs, ", rank ", map.rank, "; sizes lie in 1 to ", most);
  }
  const auto size = [](std::int32_t a, std::int32_t b) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
  };
  const std::size_t outer = size(map.outputs, map.rank == 0 ? map.inputs : map.rank);
  const std::size_t inner = size(map.rank, map.inputs);
  if (map.weight.size() != outer || map.inner.size() != inner) {
    return extend::error(ErrorCode::invalid_argument, "a matrix of ", map.outputs, " x ",
                         map.inputs, ", rank ", map.rank, " holds ", map.weight.size(), " and ",
                         map.inner.size(), " numbers, not ", outer, " and ", inner);
  }
  if (!map.bias.empty() && map.bias.size() != static_cast<std::size_t>(map.outputs)) {
    return extend::error(ErrorCode::invalid_argument, "a bias of ", map.bias.size(),
                         " numbers for ", map.outputs, " outputs");
  }
  for (const std::vector<double>* numbers : {&map.weight, &map.inner, &map.bias}) {
    for (const double x : *numbers) {
      if (!(x >= -3.4028234663852886e38 && x <= 3.4028234663852886e38)) {
        return extend::error(ErrorCode::non_finite, "a matrix of ", map.outputs, " x ", map.inputs,
                             " holds ", x, ", which is not finite in f32");
      }
    }
  }
  return {};
}

/// One KV head of one layer of the source model.
struct HeadRef {
  std::int32_t layer = 0;
  std::int32_t head = 0;

  bool operator==(const HeadRef&) const = default;
};

/// Some consecutive heads of a target plane: which source heads they are made of, and by which
/// matrix.
///
/// The matrix's inputs are the heads' channels, one head behind the other in this order; its
/// outputs the channels of target heads `first_head`, `first_head + 1`, …: as many heads as outputs
/// ÷ head size. Sharing is repeating a matrix's number: per model (all layers name one), per layer
/// (one block with all heads), per head (a block for each).
struct MapBlock {
  std::int32_t first_head = 0;
  std::uint32_t matrix = 0;       ///< index into `ProjectionParts::matrices`
  std::vector<HeadRef> inputs{};  ///< key heads for keys, value heads for values

  bool operator==(const MapBlock&) const = default;
};

/// What makes one target layer: blocks in ascending order of heads that cover every head once.
struct LayerMap {
  std::vector<MapBlock> key{};
  std::vector<MapBlock> value{};

  bool operator==(const LayerMap&) const = default;
};

/// Whether a map computes, or only moves channels.
enum class MapKind : std::uint8_t {
  linear,  ///< matrices, on keys without their rotation
  /// Equal shapes but for the pairing of the rope: stored elements change places, bit by bit.
  permutation,
};

/// Where a map comes from and what it was worth on data that it was not fitted on.
struct MapRecord {
  std::string method{};  ///< e.g. "ridge 0.01"
  Digest128 fit_data{};  ///< of what it was fitted on
  std::int64_t fit_tokens = 0;
  std::int64_t held_out_tokens = 0;
  /// Held out: mean cosine of attention outputs over mapped and own K/V; −1: not measured.
  double attention_cosine = -1;
  /// Held out: share of a task that the target solves from the mapped cache; −1: not measured.
  double downstream = -1;
  double bar = 0;  ///< the attention cosine that whoever measured it asked for

  bool operator==(const MapRecord&) const = default;
};

/// The public, mutable form from which a `ProjectionMap` is made.
struct ProjectionParts {
  /// Element types, scales, windows and the tenant are not compared with caches.
  Geometry source{};
  Geometry target{};
  MapKind kind = MapKind::linear;
  std::vector<LinearMap> matrices{};  ///< empty for a permutation
  std::vector<LayerMap> layers{};     ///< one for each target layer; empty for a permutation
  MapRecord record{};
};

namespace detail {

/// Every field of a record, in the one order in which records are named, written and read.
template <class Record, class Text, class Number>
void visit_record(Record& record, const Text& text, const Number& number) {
  text(record.method);
  number(record.fit_data.low);
  number(record.fit_data.high);
  number(record.fit_tokens);
  number(record.held_out_tokens);
  number(record.attention_cosine);
  number(record.downstream);
  number(record.bar);
}

}  // namespace detail

namespace extend {

/// The plane of a layer, or null.
[[nodiscard]] inline const PlaneShape* find_plane(const LayerShape& layer, Plane plane) noexcept {
  for (const PlaneShape& shape : layer.planes) {
    if (shape.plane == plane) return &shape;
  }
  return nullptr;
}

}  // namespace extend

namespace detail {

[[nodiscard]] inline Status check_blocks(const ProjectionParts& parts, std::size_t layer,
                                         Plane plane, std::span<const MapBlock> blocks) {
  const char* const name = plane == Plane::key ? " keys" : " values";
  const PlaneShape* const out = find_plane(parts.target.layers[layer], plane);
  std::int64_t covered = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const MapBlock& block = blocks[b];
    if (block.matrix >= parts.matrices.size()) {
      return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b,
                   ": matrix ", block.matrix, " of ", parts.matrices.size());
    }
    const LinearMap& matrix = parts.matrices[block.matrix];
    std::int64_t inputs = 0;
    for (const HeadRef& in : block.inputs) {
      const PlaneShape* const shape =
          in.layer >= 0 && in.layer < std::ssize(parts.source.layers)
              ? find_plane(parts.source.layers[static_cast<std::size_t>(in.layer)], plane)
              : nullptr;
      if (shape == nullptr || in.head < 0 || in.head >= shape->heads) {
        return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b,
                     ": the source has no head ", in.head, " in layer ", in.layer);
      }
      inputs += shape->channels;
    }
    const std::int64_t channels = out == nullptr ? 0 : out->channels;
    if (channels == 0 || inputs != matrix.inputs || matrix.outputs % channels != 0 ||
        block.first_head != covered) {
      return error(ErrorCode::invalid_argument, "target layer ", layer, name, ", block ", b,
                   ": a matrix of ", matrix.outputs, " x ", matrix.inputs, " for ", inputs,
                   " source channels and heads of ", channels, " from ", block.first_head,
                   " on, where ", covered, " are covered");
    }
    covered += matrix.outputs / channels;
  }
  const std::int64_t heads = out == nullptr || out->channels == 0 ? 0 : out->heads;
  if (covered != heads)
    return error(ErrorCode::invalid_argument, "target layer ", layer, name, ": blocks make ",
                 covered, " heads of ", heads);
  return {};
}

}  // namespace detail

namespace extend {

/// Maps know keys and values; anything else in a layer is refused.
[[nodiscard]] inline Status check_planes(const Geometry& geometry, const char* side) {
  KVMELD_TRY(validate(geometry));
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (shape.plane != Plane::key && shape.plane != Plane::value) {
        return error(ErrorCode::unsupported, side, " layer ", l, " has a plane of kind ",
                     shape.plane, "; maps know keys and values");
      }
      if (shape.plane == Plane::value && shape.rotary)
        return error(ErrorCode::unsupported, side, " layer ", l, " rotates its values");
    }
  }
  return {};
}

}  // namespace extend

namespace detail {

/// A geometry with the pairing of every rope, and what names the model and its use, set alike.
[[nodiscard]] inline Geometry without_pairing(Geometry geometry) {
  geometry.model.clear();
  geometry.tokenizer.clear();
  geometry.tenant.clear();
  geometry.bos = -1;
  geometry.trained_context = 0;
  for (LayerShape& layer : geometry.layers) layer.rope.pairing = RopePairing::half_split;
  return geometry;
}

}  // namespace detail

namespace extend {

/// Whether a cache has the shape that a map was made for; element types and windows may differ.
[[nodiscard]] inline Status check_side(const Geometry& cache, const Geometry& map,
                                       const char* side) {
  const auto wrong = [&](std::size_t layer, const auto&... what) {
    return error(ErrorCode::geometry_mismatch, "projection: ", side, " layer ", layer, ": ",
                 what...);
  };
  if (cache.model != map.model) {
    return error(ErrorCode::geometry_mismatch, "projection: the map's ", side, " is model '",
                 map.model, "', the cache's is '", cache.model, "'");
  }
  if (cache.layers.size() != map.layers.size()) {
    return error(ErrorCode::geometry_mismatch, "projection: the map's ", side, " has ",
                 map.layers.size(), " layers, the cache ", cache.layers.size());
  }
  for (std::size_t l = 0; l < map.layers.size(); ++l) {
    const LayerShape& a = cache.layers[l];
    const LayerShape& b = map.layers[l];
    if (a.planes.size() != b.planes.size())
      return wrong(l, a.planes.size(), " planes where the map knows ", b.planes.size());
    KVMELD_TRY(detail::check_same(a.rope, b.rope, l));
    for (std::size_t p = 0; p < b.planes.size(); ++p) {
      const PlaneShape& x = a.planes[p];
      const PlaneShape& y = b.planes[p];
      if (x.plane != y.plane || x.heads != y.heads || x.channels != y.channels ||
          x.rotary != y.rotary) {
        return wrong(l, x.heads, " heads of ", x.channels, " channels in plane ", p,
                     ", the map knows ", y.heads, " of ", y.channels);
      }
    }
  }
  return {};
}

}  // namespace extend

// Matrices in the order in which vectors read them, and their product with a tile of tokens.
//
// Every output is one chain of fma over ascending inputs, from the bias on. Lanes lie across
// outputs and rows of registers across tokens, so that neither vector width nor the cut into
// blocks changes a byte.

namespace detail {

inline constexpr std::int32_t panel_outputs = 32;  ///< outputs that lie side by side
/// Inputs of a panel that stay in the first cache: 16 KiB.
inline constexpr std::int32_t block_inputs = 128;
inline constexpr std::int32_t tile_tokens = 56;  ///< tokens of one product

/// A dense matrix in f32, rounded once: (block of inputs, panel, input, output of the panel).
class PackedMatrix {
 public:
  PackedMatrix() = default;
  PackedMatrix(std::int32_t outputs, std::int32_t inputs, const double* weight, const double* bias)
      : outputs_(outputs),
        inputs_(inputs),
        bias_(padded_outputs(), 0.0F),
        weight_(padded_outputs() * static_cast<std::size_t>(inputs)) {
    for (std::int32_t o = 0; bias != nullptr && o < outputs; ++o)
      bias_[static_cast<std::size_t>(o)] = static_cast<float>(bias[o]);
    float* out = weight_.data();
    for (std::int32_t first = 0; first < inputs; first += block_inputs) {
      const std::int32_t last = (std::min)(first + block_inputs, inputs);
      for (std::int32_t panel = 0; panel < outputs; panel += panel_outputs) {
        for (std::int32_t i = first; i < last; ++i) {
          for (std::int32_t o = panel; o < panel + panel_outputs; ++o) {
            *out++ = o < outputs
                         ? static_cast<float>(weight[static_cast<std::int64_t>(o) * inputs + i])
                         : 0.0F;
          }
        }
      }
    }
  }

  [[nodiscard]] std::int32_t outputs() const noexcept { return outputs_; }
  [[nodiscard]] std::int32_t inputs() const noexcept { return inputs_; }
  /// Floats from one token's outputs to the next's.
  [[nodiscard]] std::size_t padded_outputs() const noexcept {
    return static_cast<std::size_t>((outputs_ + panel_outputs - 1) / panel_outputs * panel_outputs);
  }
  [[nodiscard]] const float* bias() const noexcept { return bias_.data(); }
  /// The panels of the inputs from `first` on, a multiple of `block_inputs`.
  [[nodiscard]] const float* panels(std::int32_t first) const noexcept {
    return weight_.data() + padded_outputs() * static_cast<std::size_t>(first);
  }

 private:
  std::int32_t outputs_ = 0;
  std::int32_t inputs_ = 0;
  std::vector<float> bias_;  // (padded outputs)
  std::vector<float> weight_;
};

/// The inputs of up to `tile_tokens` tokens: (block of inputs, token, input of the block), so that
/// strides are constants.
class InputTile {
 public:
  void resize(std::int32_t inputs) {
    const auto blocks = static_cast<std::size_t>((inputs + block_inputs - 1) / block_inputs);
    const std::size_t floats = blocks * block_floats;
    if (values_.size() < floats) values_.resize(floats);
  }
  /// Copies a token's inputs `first` to `first + n` − 1.
  void put(std::int32_t token, std::int32_t first, const float* from, std::int32_t n) noexcept {
    while (n > 0) {
      const std::int32_t at = first % block_inputs;
      const std::int32_t here = (std::min)(n, block_inputs - at);
      std::copy(from, from + here,
                values_.data() + block_floats * static_cast<std::size_t>(first / block_inputs) +
                    static_cast<std::size_t>(token * block_inputs + at));
      first += here;
      from += here;
      n -= here;
    }
  }
  [[nodiscard]] const float* block(std::int32_t first) const noexcept {
    return values_.data() + block_floats * static_cast<std::size_t>(first / block_inputs);
  }

 private:
  static constexpr auto block_floats = static_cast<std::size_t>(tile_tokens * block_inputs);
  std::vector<float> values_;
};

/// Continues the sums of some tokens and one panel by `n` inputs. `x`: (token, block_inputs), `y`:
/// (token, y_stride).
using ProductKernel = void (*)(const float* w, const float* x, std::int32_t n, float* y,
                               std::size_t y_stride);

inline void product_baseline(const float* w, const float* x, std::int32_t n, float* y,
                             std::size_t) noexcept {
  float sums[panel_outputs];
  for (std::int32_t o = 0; o < panel_outputs; ++o) sums[o] = y[o];
  for (std::int32_t i = 0; i < n; ++i, w += panel_outputs) {
    KVMELD_KEEP_LOOP
    for (std::int32_t o = 0; o < panel_outputs; ++o) sums[o] = fma(x[i], w[o], sums[o]);
  }
  for (std::int32_t o = 0; o < panel_outputs; ++o) y[o] = sums[o];
}

#if KVMELD_X86_DISPATCH

/// Two vectors of sums for each of some tokens.
template <int bytes, int tokens>
struct Product {
  using Floats = extend::Vec<float, bytes>;
  static constexpr std::size_t width = Floats::lanes;
  struct Sums {
    Floats a, b;
  };

  KVMELD_ALWAYS_INLINE static void run(const float* w, const float* x, std::int32_t n, float* y,
                                       std::size_t y_stride) noexcept {
    for (std::size_t part = 0; part < panel_outputs; part += 2 * width, y += 2 * width) {
      const float* w_i = w + part;
      extend::Vecs<Sums, tokens> sums;
      sums.each([&](Sums& sum, std::size_t t) KVMELD_INLINE_LAMBDA {
        sum = {Floats::load(y + t * y_stride), Floats::load(y + t * y_stride + width)};
      });
      for (std::ptrdiff_t i = 0; i < n; ++i, w_i += panel_outputs) {
        const Floats w_a = Floats::load(w_i), w_b = Floats::load(w_i + width);
        sums.each([&](Sums& sum, std::size_t t) KVMELD_INLINE_LAMBDA {
          const Floats x_t = Floats::spread(x[static_cast<std::ptrdiff_t>(t) * block_inputs + i]);
          sum.a = multiply_add(x_t, w_a, sum.a);
          sum.b = multiply_add(x_t, w_b, sum.b);
        });
      }
      sums.each([&](Sums& sum, std::size_t t) KVMELD_INLINE_LAMBDA {
        sum.a.store(y + t * y_stride);
        sum.b.store(y + t * y_stride + width);
      });
    }
  }
};

#endif  // KVMELD_X86_DISPATCH

/// Kernels of one instruction set, widest first; the last takes one token.
struct ProductKernels {
  ProductKernel kernel[3];
  std::int32_t tokens[3];
};
[[nodiscard]] inline ProductKernels product_kernels(Isa isa) noexcept {
#if KVMELD_X86_DISPATCH
  using extend::Kernel;
  if (isa == Isa::avx512)
    return {{Kernel<Product<64, 14>>::avx512, Kernel<Product<64, 4>>::avx512,
             Kernel<Product<64, 1>>::avx512},
            {14, 4, 1}};
  if (isa == Isa::avx2)
    return {
        {Kernel<Product<32, 6>>::avx2, Kernel<Product<32, 1>>::avx2, Kernel<Product<32, 1>>::avx2},
        {6, 1, 1}};
#else
  (void)isa;
#endif
  return {{product_baseline, product_baseline, product_baseline}, {1, 1, 1}};
}

/// y = W·x + b for a tile of tokens. `y`: (token, padded outputs), does not overlap the tile.
inline void multiply(const PackedMatrix& matrix, const InputTile& x, std::int32_t tokens, Isa isa,
                     float* y) {
  const std::size_t stride = matrix.padded_outputs();
  for (std::int32_t t = 0; t < tokens; ++t)
    std::copy(matrix.bias(), matrix.bias() + stride, y + static_cast<std::size_t>(t) * stride);
  const ProductKernels kernels = product_kernels(isa);
  for (std::int32_t first = 0; first < matrix.inputs(); first += block_inputs) {
    const std::int32_t n = (std::min)(block_inputs, matrix.inputs() - first);
    const float* w = matrix.panels(first);
    for (std::size_t panel = 0; panel < stride;
         panel += panel_outputs, w += static_cast<std::ptrdiff_t>(n) * panel_outputs) {
      std::int32_t t = 0;
      for (int k = 0; k < 3; ++k) {
        for (; t + kernels.tokens[k] <= tokens; t += kernels.tokens[k]) {
          kernels.kernel[k](w, x.block(first) + t * block_inputs, n,
                            y + static_cast<std::size_t>(t) * stride + panel, stride);
        }
      }
    }
  }
}

/// A `LinearMap` as it is applied to caches. `inner` is empty where dense.
struct PackedMap {
  PackedMatrix outer;
  PackedMatrix inner;
};

}  // namespace detail

/// How one model's K/V become another's: immutable, checked, named by its content.
///
/// Source keys are taken without their rotation (un-rotated from their source positions) and
/// target keys come without.
class ProjectionMap {
 public:
  /// Checks parts and names them. O(numbers). Errors: `invalid_argument`, `unsupported` (latent
  /// planes), `non_finite`, those of `validate(Geometry)`; for a permutation `geometry_mismatch`
  /// where more than pairings and fingerprints differ.
  [[nodiscard]] static Result<std::shared_ptr<const ProjectionMap>> make(ProjectionParts parts);
  /// The same map with another record, e.g. after its score was measured. Copies the numbers.
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> with_record(MapRecord record) const {
    ProjectionParts parts = parts_;
    parts.record = std::move(record);
    return make(std::move(parts));
  }

  [[nodiscard]] const Geometry& source() const noexcept { return parts_.source; }
  [[nodiscard]] const Geometry& target() const noexcept { return parts_.target; }
  [[nodiscard]] MapKind kind() const noexcept { return parts_.kind; }
  [[nodiscard]] std::span<const LinearMap> matrices() const noexcept { return parts_.matrices; }
  [[nodiscard]] std::span<const LayerMap> layers() const noexcept { return parts_.layers; }
  [[nodiscard]] const MapRecord& record() const noexcept { return parts_.record; }
  [[nodiscard]] const ProjectionParts& parts() const noexcept { return parts_; }
  /// Names geometries, numbers and record: part of a merger's digest.
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }
  [[nodiscard]] std::span<const detail::PackedMap> packed() const noexcept { return packed_; }

 private:
  ProjectionMap(ProjectionParts parts, Digest128 digest)
      : parts_(std::move(parts)), digest_(digest) {
    for (const LinearMap& m : parts_.matrices) {
      detail::PackedMap& packed = packed_.emplace_back();
      packed.outer = {m.outputs, m.rank == 0 ? m.inputs : m.rank, m.weight.data(),
                      m.bias.empty() ? nullptr : m.bias.data()};
      if (m.rank != 0) packed.inner = {m.rank, m.inputs, m.inner.data(), nullptr};
    }
  }

  ProjectionParts parts_;
  Digest128 digest_;
  std::vector<detail::PackedMap> packed_;  // f32, in the order of the kernels
};

namespace detail {

[[nodiscard]] inline Digest128 projection_digest(const ProjectionParts& parts) {
  Hasher h;
  h.text("kvmeld.projection.v1");
  hash_append(h, parts.source);
  hash_append(h, parts.target);
  h.value(parts.kind);
  h.value(static_cast<std::uint64_t>(parts.matrices.size()));
  for (const LinearMap& m : parts.matrices) {
    h.value(m.outputs);
    h.value(m.inputs);
    h.value(m.rank);
    h.values(std::span<const double>(m.weight));
    h.values(std::span<const double>(m.inner));
    h.values(std::span<const double>(m.bias));
  }
  h.value(static_cast<std::uint64_t>(parts.layers.size()));
  for (const LayerMap& layer : parts.layers) {
    for (const std::vector<MapBlock>* blocks : {&layer.key, &layer.value}) {
      h.value(static_cast<std::uint64_t>(blocks->size()));
      for (const MapBlock& block : *blocks) {
        h.value(block.first_head);
        h.value(block.matrix);
        h.value(static_cast<std::uint64_t>(block.inputs.size()));
        for (const HeadRef& in : block.inputs) {
          h.value(in.layer);
          h.value(in.head);
        }
      }
    }
  }
  visit_record(
      parts.record, [&](const std::string& text) { h.text(text); },
      [&](const auto& number) { h.value(number); });
  return h.digest();
}

}  // namespace detail

inline Result<std::shared_ptr<const ProjectionMap>> ProjectionMap::make(ProjectionParts parts) {
  KVMELD_TRY(extend::check_planes(parts.source, "source"));
  KVMELD_TRY(extend::check_planes(parts.target, "target"));
  if (parts.kind > MapKind::permutation)
    return extend::error(ErrorCode::unknown_field, "map kind unknown to this build");
  if (parts.kind == MapKind::permutation) {
    if (!parts.matrices.empty() || !parts.layers.empty()) {
      return extend::error(ErrorCode::invalid_argument, "a permutation with ",
                           parts.matrices.size(), " matrices: it has none");
    }
    KVMELD_TRY(
        check_same(detail::without_pairing(parts.source), detail::without_pairing(parts.target)));
  } else if (parts.layers.size() != parts.target.layers.size()) {
    return extend::error(ErrorCode::invalid_argument, parts.layers.size(), " layer maps for ",
                         parts.target.layers.size(), " target layers");
  }
  for (const double x :
       {parts.record.attention_cosine, parts.record.downstream, parts.record.bar}) {
    if (!(x >= -1e9 && x <= 1e9))
      return extend::error(ErrorCode::non_finite, "the record of a map holds a score of ", x);
  }
  for (const LinearMap& matrix : parts.matrices) KVMELD_TRY(validate(matrix));
  for (std::size_t l = 0; l < parts.layers.size(); ++l) {
    KVMELD_TRY(detail::check_blocks(parts, l, Plane::key, parts.layers[l].key));
    KVMELD_TRY(detail::check_blocks(parts, l, Plane::value, parts.layers[l].value));
  }
  const Digest128 digest = detail::projection_digest(parts);
  return std::shared_ptr<const ProjectionMap>(new ProjectionMap(std::move(parts), digest));
}

namespace extend {

/// Numbers a plane among all planes of a geometry, layer by layer; −1: the layer has none of the
/// kind.
[[nodiscard]] inline std::vector<std::ptrdiff_t> plane_indices(const Geometry& geometry,
                                                               Plane plane) {
  std::vector<std::ptrdiff_t> out;
  std::ptrdiff_t first = 0;
  for (const LayerShape& layer : geometry.layers) {
    const PlaneShape* const shape = find_plane(layer, plane);
    out.push_back(shape == nullptr ? -1 : first + (shape - layer.planes.data()));
    first += std::ssize(layer.planes);
  }
  return out;
}

}  // namespace extend

/// The source layer as far from the last one as the target layer is: deep layers meet deep layers,
/// and the first source layer serves all target layers before it.
[[nodiscard]] inline std::vector<std::int32_t> last_aligned(std::int32_t target_layer,
                                                            std::int32_t target_layers,
                                                            std::int32_t source_layers) {
  return {(std::max)(0, source_layers - target_layers + target_layer)};
}

/// The k source layers whose relative depth, (l + ½) ÷ layers, is nearest to the target layer's, in
/// ascending order; ties go to the smaller. All of them where k is larger.
[[nodiscard]] inline std::vector<std::int32_t> k_nearest(std::int32_t target_layer,
                                                         std::int32_t target_layers,
                                                         std::int32_t source_layers,
                                                         std::int32_t k) {
  // Distances times 2 · target_layers · source_layers, in integers.
  const auto distance = [&](std::int32_t s) {
    const std::int64_t d = (2 * std::int64_t{s} + 1) * target_layers -
                           (2 * std::int64_t{target_layer} + 1) * source_layers;
    return d < 0 ? -d : d;
  };
  std::int32_t first = 0;  // the nearest k are consecutive
  while (first + k < source_layers && distance(first + k) < distance(first)) ++first;
  std::vector<std::int32_t> out;
  for (std::int32_t s = first; s < (std::min)(first + k, source_layers); ++s) out.push_back(s);
  return out;
}

/// Every head of some source layers: layers in the order given, heads ascending.
[[nodiscard]] inline std::vector<HeadRef> heads_of(const Geometry& source, Plane plane,
                                                   const std::vector<std::int32_t>& layers) {
  std::vector<HeadRef> out;
  for (const std::int32_t l : layers) {
    const PlaneShape* const shape =
        extend::find_plane(source.layers[static_cast<std::size_t>(l)], plane);
    for (std::int32_t h = 0; shape != nullptr && h < shape->heads; ++h) out.push_back({l, h});
  }
  return out;
}

KVMELD_NAMESPACE_END
