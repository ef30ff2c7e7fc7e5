// One digest over everything whose bytes must not depend on how it was built or run: a fixed set
// concatenated, matched and fused (per token, per channel, and by robust rules), in every element
// type and layout, in every executor, with the rope's and the conversions' own bytes.
// tests/identity.cmake builds this program many times and compares what it prints; within one
// build, executors are compared here.
#include <cstdio>

#include <kvmeld/kvmeld.hpp>

#include "support/identity_render.hpp"
#if __has_include("support/identity_rope.hpp")
#include "support/identity_rope.hpp"
#endif
#if __has_include("support/identity_tensor.hpp")
#include "support/identity_tensor.hpp"
#endif

namespace {

using kvmeld::ElementType;
using test::Layout;
using test::render;
using test::require;
using test::Sink;

// All aligners behind one type: a plan is compiled once a fuser and not once a pair.
struct AnyAligner {
  static constexpr bool reproducible = true;
  bool matches = false;

  [[nodiscard]] kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source> ordered,
                                                        std::int64_t first_position) const {
    auto out = matches ? kvmeld::TokenMatch{}.align(ordered, first_position)
                       : kvmeld::Concat{}.align(ordered, first_position);
    if (matches && out) {  // weights that no short binary fraction is
      float weight = 0.1F;
      for (kvmeld::Contribution& c : out->groups[0].contributions)
        c.weight = weight = weight < 3.0F ? weight * 1.37F : 0.1F;
    }
    return out;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.value(static_cast<std::uint8_t>(matches)); }
};

// Six fragments of 0 to 20 tokens, in order of their key norms.
void render_all(Sink& sink, const test::Model& model, std::span<const Layout> layouts) {
  auto g = test::geometry(model);
  g->layers[1].rope.scaling = kvmeld::RopeScaling::yarn;
  g->layers[1].rope.factor = 4.0;
  g->layers[1].rope.original_context = 4096;
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 6; ++s) {
    const std::int64_t lengths[] = {0, 1, 3, 6, 12, 20};
    const std::int64_t n = lengths[s];
    const auto positions = test::gapped_positions(n, static_cast<std::int64_t>(11 * s));
    const auto span = test::sealed(g, n, s, {.positions = positions});
    require(span.fragment.valid() &&
                set.insert(span.fragment, {s, s}, 0.25F + static_cast<float>(s)).ok(),
            "seal failed");
  }
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = 131;
  using kvmeld::Aligner, kvmeld::Fuser, kvmeld::merger;
  const Fuser mean{kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}};
  for (const Layout layout : layouts) {
    render(sink, set, merger(Aligner{AnyAligner{false}}, mean), target, layout);
    render(sink, set, merger(Aligner{AnyAligner{true}}, mean), target, layout);
    render(sink, set, merger(Aligner{AnyAligner{true}}, Fuser{kvmeld::Max{}}), target, layout);
    render(sink, set, merger(Aligner{AnyAligner{true}}, Fuser{kvmeld::Median{}}), target, layout);
  }
}

// Rules that choose or weigh whole tokens by distances: seven fragments at positions of their own,
// so that keys are rotated before they are compared.
void render_rules(Sink& sink, const test::Model& model, Layout layout) {
  const auto g = test::geometry(model);
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 7; ++s) {
    const auto positions = test::gapped_positions(3, static_cast<std::int64_t>(5 * s));
    const auto span = test::sealed(g, 3, 40 + s, {.positions = positions});
    require(span.fragment.valid() && set.insert(span.fragment, {s, s}).ok(), "seal failed");
  }
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = 131;
  using kvmeld::Aligner, kvmeld::Fuser, kvmeld::merger;
  render(sink, set, merger(Aligner{AnyAligner{true}}, Fuser{kvmeld::Krum{.f = 2}}), target, layout);
  render(sink, set, merger(Aligner{AnyAligner{true}}, Fuser{kvmeld::GeometricMedian{}}), target,
         layout);
  render(sink, set, merger(Aligner{AnyAligner{true}}, Fuser{kvmeld::Bulyan{.f = 1}}), target,
         layout);
}

// 1000 contributions to one output: chunks, and the tree that joins them.
void render_many(Sink& sink) {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 1000; ++s) {
    const auto span = test::sealed(g, 1, s);
    require(set.insert(span.fragment, {s, 0}, 0.1F * static_cast<float>(1 + s % 17)).ok(),
            "insert failed");
  }
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = 5;
  const kvmeld::Aligner match{AnyAligner{true}};
  render(
      sink, set,
      kvmeld::merger(
          match, kvmeld::Fuser{kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}}),
      target, Layout::canonical);
}

}  // namespace

int main() {
  Sink sink;
  constexpr Layout two[] = {Layout::canonical, Layout::transposed_values};
  for (const ElementType type : {ElementType::f64, ElementType::f32, ElementType::f16,
                                 ElementType::f8_e4m3, ElementType::f8_e5m2}) {
    render_all(sink, {.type = type, .heads = 1}, two);
  }
  render_all(sink, {.type = ElementType::q8_0, .heads = 2}, test::all_layouts);
  render_all(sink,
             {.type = ElementType::bf16,
              .heads = 3,
              .channels = 80,
              .value_channels = 40,
              .first = 6,
              .rotary = 50,
              .pairing = kvmeld::RopePairing::interleaved,
              .base = 500000.0},
             test::all_layouts);
  render_many(sink);
  render_rules(sink,
               {.type = ElementType::bf16,
                .heads = 2,
                .channels = 80,
                .value_channels = 40,
                .first = 6,
                .rotary = 50},
               Layout::paged);
  render_rules(sink,
               {.type = ElementType::q8_0,
                .heads = 1,
                .channels = 288,
                .pairing = kvmeld::RopePairing::interleaved},
               Layout::canonical);
#if __has_include("support/identity_rope.hpp")
  rope_identity(sink);
#endif
#if __has_include("support/identity_tensor.hpp")
  tensor_identity(sink);
#endif
  std::printf("%s\n", sink.hash.digest().hex().c_str());
}
