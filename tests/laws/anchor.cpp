// Blends of offsets: linear, blind to order and to where anchors were recorded, exact where nothing
// is approximated.

#include <algorithm>
#include <cmath>

#include <kvmeld/anchors/decision.hpp>

#include "support/anchor_segments.hpp"
#include "support/law.hpp"

namespace {

using kvmeld::anchors::ReuseOffset;
using kvmeld::anchors::ReusePart;
using test::difference;
using test::rendered;
using test::Segment;

std::shared_ptr<const kvmeld::Geometry> draw_geometry() {
  test::Model model{.layers = 3, .heads = 2, .channels = 16};
  model.pairing =
      *rc::gen::element(kvmeld::RopePairing::half_split, kvmeld::RopePairing::interleaved);
  model.first = *rc::gen::element(0, 4);
  return test::geometry(model);
}
std::uint64_t draw_seed() { return *rc::gen::arbitrary<std::uint64_t>(); }
std::int64_t draw_position() { return *rc::gen::element<std::int64_t>(0, 1, 7, 250, 1000); }

/// The segment as it would be in its context at a place: what a full prefill leaves.
std::vector<std::vector<std::byte>> real_at(const Segment& s, std::int64_t position) {
  test::TestCache cache(s.geometry, s.tokens);
  s.write(cache, position);
  return cache.buffers();
}

struct Anchors {
  Segment query;
  std::vector<Segment> alone;
  std::vector<Segment> real;
  std::vector<ReuseOffset> offsets;

  Anchors(std::size_t count, std::int64_t tokens, double scale = 0.25)
      : query(draw_geometry(), tokens, draw_seed()) {
    std::vector<float> weights;
    for (std::size_t i = 0; i < count; ++i)
      weights.push_back(static_cast<float>(*rc::gen::inRange(1, 100)));
    float total = 0;
    for (const float w : weights) total += w;
    for (std::size_t i = 0; i < count; ++i) {
      alone.emplace_back(query.geometry, tokens, draw_seed());
      real.push_back(alone[i].in_context(draw_seed(), scale));
      const auto delta = kvmeld::anchors::measure_offset(real[i].at(draw_position()),
                                                         alone[i].at(draw_position()));
      RC_ASSERT(delta.ok());
      offsets.push_back({.anchor = test::anchor_id(static_cast<std::uint8_t>(i)),
                         .delta = *delta,
                         .weight = weights[i] / total});
    }
  }
};

}  // namespace

TEST_CASE("laws of blends") {
  test::law("a sole anchor equal to the query gives the real K/V, and so does temperature 0", [] {
    Anchors a(*rc::gen::inRange<std::size_t>(1, 5), 6);
    const std::size_t mine = *rc::gen::inRange<std::size_t>(0, a.alone.size());
    const std::int64_t position = draw_position();
    const auto base = kvmeld::anchors::unrotated(a.alone[mine].at(draw_position()));
    RC_ASSERT(base.ok());
    std::vector<double> distances(a.offsets.size(), 1.0);
    distances[mine] = 0.0;
    const auto cold = kvmeld::anchors::softmax_weights(distances, *rc::gen::element(0.0, 1e-3));
    for (std::size_t i = 0; i < cold.size(); ++i) a.offsets[i].weight = static_cast<float>(cold[i]);
    const auto real = real_at(a.real[mine], position);
    const ReusePart limit{.base = *base, .position = position, .offsets = a.offsets};
    RC_ASSERT(difference(rendered({&limit, 1}, a.query.geometry), real) <= 1e-5);
    a.offsets[mine].weight = 1;
    const ReusePart sole{.base = *base, .position = position, .offsets = {a.offsets[mine]}};
    RC_ASSERT(difference(rendered({&sole, 1}, a.query.geometry), real) <= 1e-5);
  });

  test::law("offsets of 0 give the base turned to its place, whatever the weights", [] {
    const Anchors a(*rc::gen::inRange<std::size_t>(1, 5), 5, 0.0);
    const std::int64_t position = draw_position();
    const ReusePart part{
        .base = a.query.at(draw_position()), .position = position, .offsets = a.offsets};
    RC_ASSERT(difference(rendered({&part, 1}, a.query.geometry), real_at(a.query, position)) <=
              1e-5);
  });

  test::law("equal offsets make weights irrelevant", [] {
    Anchors a(3, 5);
    for (ReuseOffset& o : a.offsets) o.delta = a.offsets[0].delta;
    const std::int64_t position = draw_position();
    const ReusePart part{
        .base = a.query.at(draw_position()), .position = position, .offsets = a.offsets};
    ReusePart other = part;
    other.offsets[0].weight = 0.2F;
    other.offsets[1].weight = 0.7F;
    other.offsets[2].weight = 0.1F;
    RC_ASSERT(difference(rendered({&part, 1}, a.query.geometry),
                         rendered({&other, 1}, a.query.geometry)) <= 1e-5);
  });

  test::law("the order of anchors leaves every byte alone, on rows and on lanes", [] {
    Anchors a(*rc::gen::inRange<std::size_t>(2, 7), 5);
    const std::int64_t position = draw_position();
    const ReusePart part{
        .base = a.query.at(draw_position()), .position = position, .offsets = a.offsets};
    ReusePart other = part;
    for (std::size_t i = other.offsets.size(); i > 1; --i)
      std::swap(other.offsets[i - 1], other.offsets[*rc::gen::inRange<std::size_t>(0, i)]);
    const auto bytes = rendered({&part, 1}, a.query.geometry);
    RC_ASSERT(!bytes.empty());
    RC_ASSERT(bytes == rendered({&other, 1}, a.query.geometry));
    RC_ASSERT(bytes ==
              rendered({&part, 1}, a.query.geometry, {.compute_last = false}, kvmeld::exec::lanes));
    RC_ASSERT(bytes == rendered({&part, 1}, a.query.geometry, {.compute_last = false},
                                kvmeld::exec::Sequential{.isa = kvmeld::Isa::baseline}));
    RC_ASSERT(kvmeld::anchors::plan_reuse({&part, 1}, *a.query.geometry)->render_id() ==
              kvmeld::anchors::plan_reuse({&other, 1}, *a.query.geometry)->render_id());
  });

  test::law(
      "rows in registers have the bytes of lanes, in every type, layout and instruction set", [] {
        test::Model model{.layers = 2,
                          .heads = *rc::gen::inRange(1, 4),
                          .channels = *rc::gen::element(64, 96, 128)};
        model.type = *rc::gen::element(kvmeld::ElementType::f16, kvmeld::ElementType::bf16,
                                       kvmeld::ElementType::f32);
        model.pairing =
            *rc::gen::element(kvmeld::RopePairing::half_split, kvmeld::RopePairing::half_split,
                              kvmeld::RopePairing::interleaved);
        const auto g = test::geometry(model);
        const Segment query(g, 3, draw_seed());
        const auto base = kvmeld::anchors::unrotated(query.at(draw_position()));
        RC_ASSERT(base.ok());
        ReusePart part{.base = *base, .position = 1 + draw_position()};
        const int count = *rc::gen::element(1, 2, 5, 70);
        for (int i = 0; i < count; ++i) {
          const auto delta =
              kvmeld::anchors::measure_offset(query.in_context(draw_seed()).at(0), *base);
          RC_ASSERT(delta.ok());
          part.offsets.push_back({.anchor = test::anchor_id(static_cast<std::uint8_t>(i)),
                                  .delta = *delta,
                                  .weight = static_cast<float>(*rc::gen::inRange(-20, 20)) / 16});
        }
        part.offsets[0].weight = 0.375F;
        const auto expected = rendered({&part, 1}, g, {.compute_last = false}, kvmeld::exec::lanes);
        RC_ASSERT(!expected.empty());
        for (const kvmeld::Isa isa :
             {kvmeld::Isa::baseline, kvmeld::Isa::avx2, kvmeld::Isa::avx512}) {
          if (isa > kvmeld::best_isa()) continue;
          RC_ASSERT(expected == rendered({&part, 1}, g, {.compute_last = false},
                                         kvmeld::exec::Sequential{.isa = isa}));
          RC_ASSERT(expected ==
                    rendered({&part, 1}, g, {.compute_last = false}, test::Streaming{.isa = isa}));
        }
      });

  test::law("an anchor recorded at 0, 7 or 1000 is the same anchor", [] {
    const Segment alone(draw_geometry(), 6, draw_seed()), query(alone.geometry, 6, draw_seed());
    const Segment real = alone.in_context(draw_seed());
    std::vector<std::vector<std::vector<std::byte>>> out;
    for (const std::int64_t recorded : {0, 7, 1000}) {
      const auto base = kvmeld::anchors::unrotated(query.at(recorded));
      const auto delta = kvmeld::anchors::measure_offset(real.at(recorded),
                                                         alone.at(recorded == 7 ? 0 : recorded));
      RC_ASSERT(base.ok() && delta.ok());
      const ReusePart part{.base = *base,
                           .position = 40,
                           .offsets = {{.anchor = test::anchor_id(1), .delta = *delta}}};
      out.push_back(rendered({&part, 1}, query.geometry));
    }
    RC_ASSERT(difference(out[1], out[0]) <= 1e-5);
    RC_ASSERT(difference(out[2], out[0]) <= 1e-5);
  });

  test::law("blends are linear in the offsets", [] {
    Anchors a(2, 5);
    const std::int64_t position = draw_position();
    const float w = static_cast<float>(*rc::gen::inRange(0, 9)) / 8;
    a.offsets[0].weight = w;
    a.offsets[1].weight = 1 - w;
    const ReusePart both{.base = a.query.at(3), .position = position, .offsets = a.offsets};
    Segment sum = a.query;
    for (std::size_t p = 0; p < sum.values.size(); ++p) {
      for (std::size_t i = 0; i < sum.values[p].size(); ++i) {
        for (std::size_t k = 0; k < 2; ++k) {
          sum.values[p][i] += static_cast<double>(a.offsets[k].weight) *
                              (a.real[k].values[p][i] - a.alone[k].values[p][i]);
        }
      }
    }
    RC_ASSERT(difference(rendered({&both, 1}, a.query.geometry), real_at(sum, position)) <= 1e-5);
  });
}

TEST_CASE("laws of decisions") {
  const auto draw = [] {
    std::vector<kvmeld::anchors::ReuseCandidate> out;
    const int count = *rc::gen::inRange(0, 9);
    for (int i = 0; i < count; ++i) {
      out.push_back({test::anchor_id(static_cast<std::uint8_t>(i)),
                     static_cast<double>(*rc::gen::inRange(0, 40)) / 8, *rc::gen::inRange(3, 8),
                     *rc::gen::inRange(0, 6) != 0, true});
    }
    return out;
  };
  test::law("what is reused at some γ is reused at every greater one, with the same weights", [&] {
    const auto candidates = draw();
    const kvmeld::anchors::ReuseRequest request{.tokens = 5};
    kvmeld::anchors::ReuseRule rule{.temperature =
                                        static_cast<double>(*rc::gen::inRange(1, 20)) / 4};
    bool reused = false;
    std::vector<float> weights;
    for (const double gamma : {0.0, 0.1, 0.3, 0.5, 0.9, 1.0, 2.0}) {
      rule.gamma = gamma;
      const auto d = kvmeld::anchors::decide(rule, request, candidates);
      RC_ASSERT(!reused || d.reuses());
      if (reused) RC_ASSERT(d.weights == weights);
      reused = d.reuses();
      weights = d.weights;
      RC_ASSERT(d.reuses() == !d.chosen.empty());
    }
  });
  test::law("the order of candidates changes nothing but their indices", [&] {
    const auto candidates = draw();
    auto other = candidates;
    for (std::size_t i = other.size(); i > 1; --i)
      std::swap(other[i - 1], other[*rc::gen::inRange<std::size_t>(0, i)]);
    const kvmeld::anchors::ReuseRule rule{.gamma = 0.8,
                                          .nucleus_mass = *rc::gen::element(0.5, 0.9, 1.0)};
    const auto a = kvmeld::anchors::decide(rule, {.tokens = 5}, candidates),
               b = kvmeld::anchors::decide(rule, {.tokens = 5}, other);
    RC_ASSERT(a.reason == b.reason);
    RC_ASSERT(a.weights == b.weights);
    for (std::size_t i = 0; i < a.chosen.size(); ++i)
      RC_ASSERT(candidates[a.chosen[i]].id == other[b.chosen[i]].id);
  });
}
