#pragma once
// Maps between test models with random numbers, and what they should do, in plain loops and double.

#include <cmath>
#include <memory>
#include <vector>

#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/projection_map.hpp>

#include "reference.hpp"

namespace test {

enum class Sharing { model, layer, head };

/// A matrix of numbers in (−1, 1) ÷ inputs that f32 cannot hold.
inline kvmeld::LinearMap random_matrix(std::int32_t outputs, std::int32_t inputs, std::int32_t rank,
                                       bool bias, Random& random) {
  kvmeld::LinearMap m{.outputs = outputs, .inputs = inputs, .rank = rank};
  const auto fill = [&](std::vector<double>& numbers, std::int32_t rows, std::int32_t columns) {
    numbers.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
    for (double& x : numbers) x = static_cast<double>(random.value()) / 4.1 / columns;
  };
  fill(m.weight, outputs, rank == 0 ? inputs : rank);
  if (rank != 0) fill(m.inner, rank, inputs);
  if (bias) fill(m.bias, outputs, 1);
  return m;
}

/// Random matrices from the k nearest layers: one for all layers, one a layer, or one a head from
/// one head of each layer.
inline kvmeld::ProjectionParts random_parts(const kvmeld::Geometry& from,
                                            const kvmeld::Geometry& to, Sharing sharing,
                                            std::int32_t k, std::int32_t rank, bool bias,
                                            std::uint64_t seed) {
  using namespace kvmeld;
  Random random(seed);
  ProjectionParts parts{.source = from, .target = to};
  parts.source.model = "source model";
  parts.record = {.method = "random", .held_out_tokens = 100, .attention_cosine = 0.95};
  for (std::size_t l = 0; l < to.layers.size(); ++l) {
    LayerMap& layer = parts.layers.emplace_back();
    const auto layers =
        kvmeld::k_nearest(static_cast<std::int32_t>(l), static_cast<std::int32_t>(to.layers.size()),
                          static_cast<std::int32_t>(from.layers.size()), k);
    for (const PlaneShape& shape : to.layers[l].planes) {
      std::vector<MapBlock>& blocks = shape.plane == Plane::key ? layer.key : layer.value;
      for (std::int32_t h = 0; h < (sharing == Sharing::head ? shape.heads : 1); ++h) {
        std::vector<HeadRef> inputs = kvmeld::heads_of(from, shape.plane, layers);
        if (sharing == Sharing::head) {
          std::erase_if(inputs, [&](const HeadRef& in) {
            return in.head != h % extend::find_plane(
                                      from.layers[static_cast<std::size_t>(in.layer)], shape.plane)
                                      ->heads;
          });
        }
        std::int32_t width = 0;
        for (const HeadRef& in : inputs)
          width += extend::find_plane(from.layers[static_cast<std::size_t>(in.layer)], shape.plane)
                       ->channels;
        const std::int32_t outputs =
            sharing == Sharing::head ? shape.channels : shape.heads * shape.channels;
        const std::size_t first = shape.plane == Plane::key ? 0 : 1;
        if (sharing != Sharing::model || l == 0) {
          blocks.push_back({h, static_cast<std::uint32_t>(parts.matrices.size()), inputs});
          parts.matrices.push_back(random_matrix(outputs, width, rank, bias, random));
        } else {
          blocks.push_back({h, static_cast<std::uint32_t>(first), inputs});
        }
      }
    }
  }
  return parts;
}

/// What the target's plane should hold: values, and the sums of magnitudes that errors scale with.
/// (token, head, channel)
struct Mapped {
  std::vector<double> values;
  std::vector<double> sizes;
};

inline Mapped mapped(const kvmeld::ProjectionMap& map, const kvmeld::Geometry& from,
                     const Sealed& source, std::size_t layer, kvmeld::Plane plane) {
  using namespace kvmeld;
  const PlaneShape& shape = *extend::find_plane(map.target().layers[layer], plane);
  const std::size_t tokens = source.positions.size();
  const auto row = static_cast<std::size_t>(shape.heads) * static_cast<std::size_t>(shape.channels);
  Mapped out{std::vector<double>(tokens * row), std::vector<double>(tokens * row)};
  std::vector<std::size_t> first_plane(1, 0);
  for (const LayerShape& l : from.layers)
    first_plane.push_back(first_plane.back() + l.planes.size());
  const auto product = [](const std::vector<double>& w, const std::vector<double>& x,
                          std::size_t rows, bool magnitudes) {
    std::vector<double> y(rows, 0.0);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < x.size(); ++i)
        y[r] += magnitudes ? std::abs(w[r * x.size() + i] * x[i]) : w[r * x.size() + i] * x[i];
    }
    return y;
  };
  for (std::size_t t = 0; t < tokens; ++t) {
    for (const MapBlock& block :
         plane == Plane::key ? map.layers()[layer].key : map.layers()[layer].value) {
      std::vector<double> x;
      for (const HeadRef& in : block.inputs) {
        const LayerShape& l = from.layers[static_cast<std::size_t>(in.layer)];
        std::size_t p = first_plane[static_cast<std::size_t>(in.layer)];
        while (l.planes[p - first_plane[static_cast<std::size_t>(in.layer)]].plane != plane) ++p;
        const PlaneShape& s = l.planes[p - first_plane[static_cast<std::size_t>(in.layer)]];
        const auto channels = static_cast<std::size_t>(s.channels);
        const auto at = static_cast<std::ptrdiff_t>(
            (t * static_cast<std::size_t>(s.heads) + static_cast<std::size_t>(in.head)) * channels);
        std::vector<double> head(source.values[p].begin() + at,
                                 source.values[p].begin() + at + s.channels);
        if (s.rotary && l.key_form == KeyForm::post_rope && l.rope.kind == RopeKind::rotary)
          reference::rotation(l.rope, -static_cast<double>(source.positions[t]), head);
        x.insert(x.end(), head.begin(), head.end());
      }
      const LinearMap& m = map.matrices()[block.matrix];
      const auto outputs = static_cast<std::size_t>(m.outputs);
      std::vector<double> y, size;
      if (m.rank == 0) {
        y = product(m.weight, x, outputs, false);
        size = product(m.weight, x, outputs, true);
      } else {
        const auto rank = static_cast<std::size_t>(m.rank);
        y = product(m.weight, product(m.inner, x, rank, false), outputs, false);
        size = product(m.weight, product(m.inner, x, rank, true), outputs, true);
      }
      for (std::size_t o = 0; o < outputs; ++o) {
        const std::size_t to =
            t * row + static_cast<std::size_t>(block.first_head * shape.channels) + o;
        const double b = m.bias.empty() ? 0.0 : m.bias[o];
        out.values[to] = y[o] + b;
        out.sizes[to] = size[o] + std::abs(b);
      }
    }
  }
  return out;
}

}  // namespace test
