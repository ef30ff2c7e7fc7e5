#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <kvmeld/align/projection_map.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// The channel of a source head that a target channel is, for keys whose pairing changes.
[[nodiscard]] inline std::int32_t permuted_channel(const RopeSpec& from, const RopeSpec& to,
                                                   std::int32_t channel) noexcept {
  const std::int32_t c = channel - to.first_channel;
  if (from.kind == RopeKind::none || from.pairing == to.pairing || c < 0 || c >= to.rotary_channels)
    return channel;
  const std::int32_t half = to.rotary_channels / 2;
  if (to.pairing == RopePairing::half_split)
    return from.first_channel + (c < half ? 2 * c : 2 * (c - half) + 1);
  return from.first_channel + (c % 2 == 0 ? c / 2 : half + c / 2);
}

/// A permutation as matrices of zeros and ones, a block for each head.
KVMELD_LAZY [[nodiscard]] ProjectionParts as_matrices(const ProjectionParts& permutation) {
  ProjectionParts out{
      .source = permutation.source, .target = permutation.target, .record = permutation.record};
  for (std::size_t l = 0; l < out.target.layers.size(); ++l) {
    LayerMap& layer = out.layers.emplace_back();
    for (const PlaneShape& shape : out.target.layers[l].planes) {
      if (shape.channels == 0) continue;
      LinearMap matrix{.outputs = shape.channels, .inputs = shape.channels};
      matrix.weight.resize(static_cast<std::size_t>(shape.channels) *
                           static_cast<std::size_t>(shape.channels));
      for (std::int32_t c = 0; c < shape.channels; ++c) {
        const bool moves = shape.plane == Plane::key && shape.rotary;
        const std::int32_t in =
            moves ? permuted_channel(out.source.layers[l].rope, out.target.layers[l].rope, c) : c;
        matrix.weight[static_cast<std::size_t>(c) * static_cast<std::size_t>(shape.channels) +
                      static_cast<std::size_t>(in)] = 1;
      }
      const auto same = std::find(out.matrices.begin(), out.matrices.end(), matrix);
      const auto index = static_cast<std::uint32_t>(same - out.matrices.begin());
      if (same == out.matrices.end()) out.matrices.push_back(std::move(matrix));
      for (std::int32_t h = 0; h < shape.heads; ++h) {
        (shape.plane == Plane::key ? layer.key : layer.value)
            .push_back({h, index, {{static_cast<std::int32_t>(l), h}}});
      }
    }
  }
  return out;
}

/// A·B of a low rank as one matrix, row by row.
KVMELD_LAZY [[nodiscard]] std::vector<double> dense(const LinearMap& map) {
  std::vector<double> out(
      static_cast<std::size_t>(map.outputs) * static_cast<std::size_t>(map.inputs), 0.0);
  const auto columns = static_cast<std::size_t>(map.inputs);
  for (std::size_t o = 0; o < static_cast<std::size_t>(map.outputs); ++o) {
    for (std::size_t r = 0; r < static_cast<std::size_t>(map.rank); ++r) {
      const double a = map.weight[o * static_cast<std::size_t>(map.rank) + r];
      for (std::size_t i = 0; i < columns; ++i)
        out[o * columns + i] = fma(a, map.inner[r * columns + i], out[o * columns + i]);
    }
  }
  return out;
}

/// One block of `b` behind the blocks of `a` that make its inputs; matrices of `a` are dense.
KVMELD_LAZY [[nodiscard]] MapBlock compose_block(const ProjectionParts& a, const LinearMap& outer,
                                                 const MapBlock& block, Plane plane,
                                                 ProjectionParts& out) {
  MapBlock made{.first_head = block.first_head,
                .matrix = static_cast<std::uint32_t>(out.matrices.size())};
  // Where each hub head comes from, and which source heads that needs, each once.
  const auto origin = [&](const HeadRef& hub) {
    const LayerMap& layer = a.layers[static_cast<std::size_t>(hub.layer)];
    const std::vector<MapBlock>& blocks = plane == Plane::key ? layer.key : layer.value;
    std::size_t i = blocks.size() - 1;
    while (blocks[i].first_head > hub.head) --i;
    return &blocks[i];
  };
  std::int64_t columns = 0;
  std::vector<std::int64_t> first_column;
  for (const HeadRef& hub : block.inputs) {
    for (const HeadRef& in : origin(hub)->inputs) {
      if (std::find(made.inputs.begin(), made.inputs.end(), in) != made.inputs.end()) continue;
      made.inputs.push_back(in);
      first_column.push_back(columns);
      columns += find_plane(a.source.layers[static_cast<std::size_t>(in.layer)], plane)->channels;
    }
  }
  // The rows of what follows: all of W, or B of a low rank, whose A stays as it is.
  const std::vector<double>& left = outer.rank == 0 ? outer.weight : outer.inner;
  const auto rows = static_cast<std::size_t>(outer.rank == 0 ? outer.outputs : outer.rank);
  std::vector<double> product(rows * static_cast<std::size_t>(columns), 0.0);
  std::vector<double> bias = outer.bias.empty()
                                 ? std::vector<double>(static_cast<std::size_t>(outer.outputs), 0.0)
                                 : outer.bias;
  std::vector<double> shift(rows, 0.0);  // what the biases of `a` become
  std::size_t hub_column = 0;
  for (const HeadRef& hub : block.inputs) {
    const MapBlock& from = *origin(hub);
    const LinearMap& inner = a.matrices[from.matrix];
    const auto channels = static_cast<std::size_t>(
        find_plane(a.target.layers[static_cast<std::size_t>(hub.layer)], plane)->channels);
    const std::size_t first_row = static_cast<std::size_t>(hub.head - from.first_head) * channels;
    for (std::size_t c = 0; c < channels; ++c) {
      const double* const row =
          inner.weight.data() + (first_row + c) * static_cast<std::size_t>(inner.inputs);
      for (std::size_t r = 0; r < rows; ++r) {
        const double w = left[r * static_cast<std::size_t>(outer.inputs) + hub_column + c];
        if (!inner.bias.empty()) shift[r] = fma(w, inner.bias[first_row + c], shift[r]);
        std::size_t i = 0;
        for (const HeadRef& in : from.inputs) {
          const auto at = static_cast<std::size_t>(
              std::find(made.inputs.begin(), made.inputs.end(), in) - made.inputs.begin());
          double* const to = product.data() + r * static_cast<std::size_t>(columns) +
                             static_cast<std::size_t>(first_column[at]);
          const auto n = static_cast<std::size_t>(
              find_plane(a.source.layers[static_cast<std::size_t>(in.layer)], plane)->channels);
          for (std::size_t k = 0; k < n; ++k) to[k] = fma(w, row[i + k], to[k]);
          i += n;
        }
      }
    }
    hub_column += channels;
  }
  if (outer.rank == 0) {
    for (std::size_t r = 0; r < rows; ++r) bias[r] += shift[r];
  } else {
    for (std::size_t o = 0; o < bias.size(); ++o) {
      for (std::size_t r = 0; r < rows; ++r)
        bias[o] = fma(outer.weight[o * rows + r], shift[r], bias[o]);
    }
  }
  const bool biased = std::any_of(bias.begin(), bias.end(), [](double x) { return x != 0; });
  LinearMap matrix{
      .outputs = outer.outputs, .inputs = static_cast<std::int32_t>(columns), .rank = outer.rank};
  matrix.weight = outer.rank == 0 ? std::move(product) : outer.weight;
  if (outer.rank != 0) matrix.inner = std::move(product);
  if (biased) matrix.bias = std::move(bias);
  out.matrices.push_back(std::move(matrix));
  return made;
}

}  // namespace detail

/// One map for two, source → hub → target, as products in f64: with a hub, n models need n maps to
/// it and n from it, not n².
///
/// A low rank of the second map stays; the first map's becomes dense. The record says nothing of
/// the pair's score: measure it, and `with_record`. Two permutations give their product as
/// matrices. O(numbers of b · inputs of a). Errors: `geometry_mismatch` where the first map does
/// not end where the second begins; those of `make`.
KVMELD_LAZY [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> compose(
    const ProjectionMap& a, const ProjectionMap& b) {
  KVMELD_TRY(detail::check_side(a.target(), b.source(), "source"));
  ProjectionParts first =
      a.kind() == MapKind::permutation ? detail::as_matrices(a.parts()) : a.parts();
  ProjectionParts second =
      b.kind() == MapKind::permutation ? detail::as_matrices(b.parts()) : b.parts();
  ProjectionParts out{.source = std::move(first.source), .target = second.target};
  first.source = out.source;
  for (LinearMap& matrix : first.matrices) {
    if (matrix.rank == 0) continue;
    matrix.weight = detail::dense(matrix);
    matrix.inner.clear();
    matrix.rank = 0;
  }
  for (const LayerMap& layer : second.layers) {
    LayerMap& made = out.layers.emplace_back();
    for (const MapBlock& block : layer.key) {
      made.key.push_back(
          detail::compose_block(first, second.matrices[block.matrix], block, Plane::key, out));
    }
    for (const MapBlock& block : layer.value) {
      made.value.push_back(
          detail::compose_block(first, second.matrices[block.matrix], block, Plane::value, out));
    }
  }
  out.record.method = "composed of " + a.digest().hex() + " and " + b.digest().hex();
  return ProjectionMap::make(std::move(out));
}

KVMELD_NAMESPACE_END
