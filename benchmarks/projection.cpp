// Applying a map between models against Eigen's product of the same matrices, built for this very
// processor.
//
// Eigen multiplies f32 matrices that lie ready; we read bf16 rows, turn keys back, multiply, and
// round to bf16.

#include "eigen_products.hpp"
#include "paired.hpp"

#include <memory>
#include <vector>

#include <kvmeld/fit/fit.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/policies/projection.hpp>

namespace {

using namespace kvmeld;

struct Shape {
  const char* name;
  std::int32_t source_layers, source_heads, source_channels;
  std::int32_t target_layers, target_heads, target_channels;
  std::int32_t nearest;
  std::int32_t tokens;
};

Geometry geometry(const char* model, std::int32_t layers, std::int32_t heads,
                  std::int32_t channels) {
  Geometry g;
  g.model = model;
  const RopeSpec rope = RopeSpec::rotary(channels, 1e6, RopePairing::half_split);
  for (std::int32_t l = 0; l < layers; ++l)
    g.layers.push_back(attention_layer(ElementType::bf16, heads, channels, rope));
  return g;
}

std::shared_ptr<const ProjectionMap> map_of(const Shape& s) {
  ProjectionParts parts{
      .source = geometry("source", s.source_layers, s.source_heads, s.source_channels),
      .target = geometry("target", s.target_layers, s.target_heads, s.target_channels)};
  parts.record.attention_cosine = 1;
  std::uint32_t state = 1;
  for (std::int32_t l = 0; l < s.target_layers; ++l) {
    LayerMap& layer = parts.layers.emplace_back();
    for (const Plane plane : {Plane::key, Plane::value}) {
      const auto inputs =
          heads_of(parts.source, plane, k_nearest(l, s.target_layers, s.source_layers, s.nearest));
      LinearMap m{.outputs = s.target_heads * s.target_channels,
                  .inputs = static_cast<std::int32_t>(inputs.size()) * s.source_channels};
      m.weight.resize(static_cast<std::size_t>(m.outputs) * static_cast<std::size_t>(m.inputs));
      for (double& w : m.weight)
        w = static_cast<double>(state = state * 1664525U + 1013904223U) * 0x1p-36;
      (plane == Plane::key ? layer.key : layer.value)
          .push_back({0, static_cast<std::uint32_t>(parts.matrices.size()), inputs});
      parts.matrices.push_back(std::move(m));
    }
  }
  return *ProjectionMap::make(std::move(parts));
}

/// A fragment of small numbers; `transform` reads geometry, positions and bytes.
Fragment fragment_of(const Geometry& g, std::int32_t tokens) {
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = std::make_shared<const Geometry>(g);
  body->token_count = tokens;
  Payload payload;
  for (std::int32_t t = 0; t < tokens; ++t) payload.positions.push_back(100 + t);
  payload.token_sets.resize(1);
  payload.layer_set.assign(g.layers.size(), 0);
  const std::shared_ptr<std::byte[]> bytes = detail::lay_out(g, payload);
  std::uint32_t state = 7;
  std::byte* const raw = bytes.get();
  for (std::size_t i = 0; i + 1 < payload.byte_count; i += 2) {
    state = state * 1664525U + 1013904223U;
    raw[i] = static_cast<std::byte>(state >> 24U);
    raw[i + 1] = static_cast<std::byte>(0x3E | (state >> 8U & 0x80U));
  }
  payload.bytes = bytes;
  body->payloads.push_back(std::move(payload));
  return Fragment(std::move(body));
}

void apply_map(benchmark::State& state, Shape shape) {
  const auto map = map_of(shape);
  const Fragment fragment = fragment_of(map->source(), shape.tokens);
  const Projection policy{.map = map};
  struct Product {
    std::vector<float> x, w, y;  // (tokens, inputs), (inputs, outputs), (tokens, outputs)
    std::ptrdiff_t inputs, outputs;
  };
  std::vector<Product> products;
  std::int64_t flops = 0;
  for (const LinearMap& m : map->matrices()) {
    const auto inputs = static_cast<std::size_t>(m.inputs),
               outputs = static_cast<std::size_t>(m.outputs),
               tokens = static_cast<std::size_t>(shape.tokens);
    Product p{std::vector<float>(tokens * inputs, 0.125F), std::vector<float>(inputs * outputs),
              std::vector<float>(tokens * outputs), m.inputs, m.outputs};
    for (std::size_t i = 0; i < p.w.size(); ++i) p.w[i] = static_cast<float>(m.weight[i]);
    products.push_back(std::move(p));
    flops += std::int64_t{2} * m.outputs * m.inputs * shape.tokens;
  }
  const auto eigen = [&] {
    for (Product& p : products)
      bench::eigen_product(p.x.data(), p.w.data(), p.y.data(), shape.tokens, p.inputs, p.outputs);
  };
  bench::paired(
      state, flops, [&] { benchmark::DoNotOptimize(policy.transform(fragment, 0, map->target())); },
      flops, eigen);
}

const int registered = [] {
  for (const Shape& shape : {Shape{"0.5B-to-1.5B", 24, 2, 64, 28, 2, 128, 3, 512},
                             Shape{"0.5B-to-1.5B", 24, 2, 64, 28, 2, 128, 6, 512},
                             Shape{"8x128-to-8x128", 4, 8, 128, 4, 8, 128, 1, 512},
                             Shape{"4x80-to-4x96", 8, 4, 80, 8, 4, 96, 2, 512},
                             Shape{"0.5B-to-1.5B", 24, 2, 64, 28, 2, 128, 6, 56}}) {
    bench::add(
        bench::name({"align/project/", shape.name, "/nearest:", std::to_string(shape.nearest),
                     "/tokens:", std::to_string(shape.tokens)}),
        apply_map, shape);
  }
  return 0;
}();

}  // namespace
