// Maps applied to fragments: against plain loops in double, bytes equal for every instruction set,
// layers that hold fewer tokens, channels permuted bit by bit, gradients against differences.
#include <kvmeld/policies/projection.hpp>

#include "support/catch.hpp"
#include "support/projection_maps.hpp"

using namespace kvmeld;
using test::Sharing;

namespace {

struct Case {
  const char* name;
  test::Model from;
  test::Model to;
  Sharing sharing = Sharing::layer;
  std::int32_t k = 2;
  std::int32_t rank = 0;
  bool bias = false;
  std::int64_t tokens = 19;  // 14 + 4 + 1 rows of registers
  std::vector<std::int64_t> hidden{};
};

std::shared_ptr<Geometry> source_geometry(const test::Model& model) {
  auto g = test::geometry(model);
  g->model = "source model";
  return g;
}

std::vector<Case> cases() {
  using enum ElementType;
  const auto halves = RopePairing::half_split, pairs = RopePairing::interleaved;
  return {
      {"small to large",
       {.type = f16, .layers = 3, .heads = 2, .channels = 64},
       {.type = f16, .layers = 2, .heads = 2, .channels = 128, .base = 1e6}},
      {"more tokens than are gathered at once",
       {.layers = 2, .heads = 1, .channels = 16},
       {.layers = 3, .heads = 1, .channels = 8},
       Sharing::layer,
       2,
       0,
       true,
       8 * 56 + 15},
      {"one matrix for all",
       {.layers = 4, .heads = 2, .channels = 32, .pairing = pairs},
       {.type = bf16, .layers = 2, .heads = 3, .channels = 80},
       Sharing::model,
       3},
      {"a matrix a head",
       {.layers = 2, .heads = 2, .channels = 80},
       {.layers = 2, .heads = 4, .channels = 96},
       Sharing::head,
       1,
       0,
       true},
      {"low rank",
       {.layers = 3, .heads = 4, .channels = 64, .value_channels = 48},
       {.layers = 2, .heads = 2, .channels = 96, .value_channels = 80},
       Sharing::layer,
       3,
       5,
       true},
      {"head size 1",
       {.layers = 2, .heads = 3, .channels = 1, .rotary = 0},
       {.layers = 3, .heads = 1, .channels = 1, .rotary = 0},
       Sharing::layer,
       1,
       0,
       false,
       9},
      {"blocks of eight bits",
       {.type = q8_0, .layers = 2, .heads = 2, .channels = 64},
       {.type = q8_0, .layers = 2, .heads = 1, .channels = 64},
       Sharing::layer,
       2,
       0,
       false,
       61},
      {"f64 and fp8",
       {.type = f64,
        .layers = 1,
        .heads = 1,
        .channels = 24,
        .first = 4,
        .rotary = 12,
        .pairing = halves},
       {.type = f8_e5m2, .layers = 2, .heads = 1, .channels = 40}},
      {"no tokens",
       {.layers = 2, .heads = 1, .channels = 16},
       {.layers = 2, .heads = 1, .channels = 32},
       Sharing::layer,
       1,
       0,
       false,
       0},
      {"sliding layers",
       {.layers = 3, .heads = 1, .channels = 32},
       {.layers = 4, .heads = 1, .channels = 32},
       Sharing::layer,
       2,
       0,
       false,
       64,
       {0, 9, 20}},
  };
}

/// f32 sums of n products in any order: n + 1 roundings of the sum of magnitudes, two of inputs
/// rotated by a table, and the type's own.
double tolerance(ElementType type, double value, double size, std::int32_t terms, double largest) {
  const double f32 = (terms + 16) * 0x1p-24 * size;
  switch (type) {
    case ElementType::f16:
      return 1.01 * f32 + std::abs(value) * 0x1p-11 + 0x1p-25;
    case ElementType::bf16:
      return 1.01 * f32 + std::abs(value) * 0x1p-8;
    case ElementType::f8_e5m2:
      return 1.3 * f32 + std::abs(value) * 0x1p-3 + 0x1p-17;
    case ElementType::q8_0:
      return 2 * f32 + (largest + f32) * (0.5 / 127 + 0x1p-11) + 127 * 0x1p-25;
    default:
      return f32;
  }
}

}  // namespace

TEST_CASE("a map gives what loops in double give, with the same bytes from every instruction set") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const auto from = source_geometry(c.from);
    const auto to = test::geometry(c.to);
    const auto map =
        ProjectionMap::make(test::random_parts(*from, *to, c.sharing, c.k, c.rank, c.bias, 5));
    INFO(map.status().message());
    REQUIRE(map.ok());
    const auto positions = test::gapped_positions(c.tokens, 7);
    const auto source = test::sealed(
        from, c.tokens, 3, {.positions = positions},
        c.hidden.empty() ? test::Layout::canonical : test::Layout::slot_list, c.hidden);
    REQUIRE(source.fragment.valid());
    const Projection policy{.map = *map};
    const auto out = policy.transform(source.fragment, 0, *to);
    INFO(out.status().message());
    REQUIRE(out.ok());
    for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa > best_isa()) continue;
      INFO(to_string(isa));
      const auto again = policy.transform(source.fragment, 0, *to, isa);
      REQUIRE(again.ok());
      CHECK(std::memcmp(again->bytes.get(), out->bytes.get(), out->byte_count) == 0);
    }
    CHECK(out->positions == std::vector<std::int64_t>(static_cast<std::size_t>(c.tokens), 0));
    double worst = 0;
    std::size_t plane = 0;
    for (std::size_t l = 0; l < to->layers.size(); ++l) {
      std::int64_t hidden = 0;  // the most of any layer that it is made of
      for (const HeadRef& in : (*map)->layers()[l].key[0].inputs)
        hidden =
            c.hidden.empty() ? 0 : std::max(hidden, c.hidden[static_cast<std::size_t>(in.layer)]);
      REQUIRE(out->layer_tokens(l) == c.tokens - hidden);
      for (const PlaneShape& shape : to->layers[l].planes) {
        const test::Mapped want = test::mapped(**map, *from, source, l, shape.plane);
        const std::int64_t row = std::int64_t{shape.heads} * shape.channels;
        for (std::int64_t i = 0; i < out->layer_tokens(l) * row; ++i) {
          const auto at = static_cast<std::size_t>(i + hidden * row);
          double got = static_cast<double>(
              detail::load_element(shape.type, out->bytes.get() + out->plane_offsets[plane], i));
          double largest = 0;
          for (std::size_t b = at / 32 * 32; b < std::min(at / 32 * 32 + 32, want.values.size());
               ++b)
            largest = std::max(largest, std::abs(want.values[b]));
          const double allowed =
              tolerance(shape.type, want.values[at], want.sizes[at], 600, largest);
          worst = std::max(worst, std::abs(got - want.values[at]) / allowed);
        }
        ++plane;
      }
    }
    CHECK(worst <= 1.0);
  }
}

TEST_CASE("engines that pair channels otherwise exchange caches bit by bit") {
  for (const ElementType type :
       {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::f8_e4m3}) {
    for (const RopePairing pairing : {RopePairing::interleaved, RopePairing::half_split}) {
      INFO(to_string(type));
      const bool pairs = pairing == RopePairing::interleaved;
      const test::Model model{.type = type,
                              .layers = 2,
                              .heads = 3,
                              .channels = 24,
                              .first = 2,
                              .rotary = 20,
                              .pairing = pairing};
      test::Model other = model;
      other.pairing = pairs ? RopePairing::half_split : RopePairing::interleaved;
      const auto from = source_geometry(model);
      const auto to = test::geometry(other);
      const auto map =
          ProjectionMap::make({.source = *from, .target = *to, .kind = MapKind::permutation});
      INFO(map.status().message());
      REQUIRE(map.ok());
      const auto tokens = test::token_ids(11);
      const auto positions = test::gapped_positions(11);
      const auto source = test::sealed(from, 11, 3, {.tokens = tokens, .positions = positions});
      const auto out = Projection{.map = *map}.transform(source.fragment, 0, *to);
      INFO(out.status().message());
      REQUIRE(out.ok());
      CHECK(out->positions == positions);
      // The same cache as the other engine would have written it, channel by channel.
      test::TestCache cache(from, 11), theirs(to, 11);
      cache.fill(3);
      for (std::size_t p = 0; p < cache.planes(); ++p) {
        for (std::int64_t t = 0; t < 11; ++t) {
          for (std::int64_t h = 0; h < 3; ++h) {
            for (std::int64_t c = 0; c < 24; ++c) {
              std::int64_t there = c;
              if (cache.shape(p).plane == Plane::key && c >= 2 && c < 22)
                there =
                    pairs ? 2 + (c % 2) * 10 + (c - 2) / 2 : 2 + 2 * ((c - 2) % 10) + (c - 2) / 10;
              std::memcpy(theirs.bytes(p, t, h, there), cache.bytes(p, t, h, c),
                          static_cast<std::size_t>(block_bytes(type)));
            }
          }
        }
      }
      const auto native = seal(theirs.ref(), {.tokens = tokens, .positions = positions});
      REQUIRE(native.ok());
      REQUIRE(native->payloads()[0].byte_count == out->byte_count);
      CHECK(std::memcmp(native->payloads()[0].bytes.get(), out->bytes.get(), out->byte_count) == 0);
    }
  }
}

TEST_CASE("gradients of a map are those of differences") {
  test::Random random(9);
  for (const std::int32_t rank : {0, 3}) {
    const LinearMap map = test::random_matrix(5, 7, rank, true, random);
    constexpr std::int64_t tokens = 4;
    std::vector<double> x(7 * tokens), dy(5 * tokens), dx(x.size());
    for (double& v : x) v = static_cast<double>(random.value());
    for (double& v : dy) v = static_cast<double>(random.value());
    LinearMap gradient = map;
    for (std::vector<double>* numbers : {&gradient.weight, &gradient.inner, &gradient.bias})
      std::fill(numbers->begin(), numbers->end(), 0.0);
    REQUIRE(kvmeld::gradients::vjp(map, tokens, x.data(), dy.data(), dx.data(), gradient).ok());
    const auto loss = [&](const LinearMap& m, const std::vector<double>& in) {
      double sum = 0;
      std::vector<double> y(5);
      for (std::size_t t = 0; t < tokens; ++t) {
        apply(m, in.data() + 7 * t, y.data());
        for (std::size_t o = 0; o < 5; ++o) sum += y[o] * dy[5 * t + o];
      }
      return sum;
    };
    // the loss is bilinear: differences have no error but rounding, 1e-16 · 100 / 1e-4
    constexpr double step = 1e-4;
    const auto check = [&](const std::vector<double>& numbers, const std::vector<double>& expected,
                           const auto& moved) {
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const double slope = (moved(i, step) - moved(i, -step)) / (2 * step);
        CHECK(std::abs(slope - expected[i]) <= 1e-7 * (1 + std::abs(expected[i])));
      }
    };
    check(x, dx, [&](std::size_t i, double by) {
      auto other = x;
      other[i] += by;
      return loss(map, other);
    });
    for (std::vector<double> LinearMap::*member :
         {&LinearMap::weight, &LinearMap::inner, &LinearMap::bias}) {
      check(map.*member, gradient.*member, [&](std::size_t i, double by) {
        LinearMap other = map;
        (other.*member)[i] += by;
        return loss(other, x);
      });
    }
    LinearMap wrong = gradient;
    wrong.bias.clear();
    CHECK(kvmeld::gradients::vjp(map, tokens, x.data(), dy.data(), dx.data(), wrong).code() ==
          ErrorCode::invalid_argument);
  }
}

TEST_CASE("what is beyond the target's elements, evicted, or of no payload is refused") {
  const auto from = source_geometry({.layers = 1, .heads = 1, .channels = 48});
  const auto to =
      test::geometry({.type = ElementType::f16, .layers = 1, .heads = 1, .channels = 48});
  auto parts = test::random_parts(*from, *to, Sharing::layer, 1, 0, true, 1);
  parts.matrices[1].weight.assign(parts.matrices[1].weight.size(), 0.0);
  // in a whole block, and behind it
  parts.matrices[1].bias[3] = parts.matrices[1].bias[40] = -1e-9;
  const auto tiny = Projection{.map = *ProjectionMap::make(parts)}.transform(
      test::sealed(from, 3, 1).fragment, 0, *to);
  REQUIRE(tiny.ok());
  for (const std::size_t channel : {std::size_t{3}, std::size_t{40}}) {
    std::uint16_t bits = 1;
    std::memcpy(&bits, tiny->bytes.get() + tiny->plane_offsets[1] + 2 * channel, 2);
    CHECK(bits == 0);  // not −0
  }
  parts.matrices[1].bias[3] = 1e6;
  const auto map = ProjectionMap::make(parts);
  REQUIRE(map.ok());
  const Projection policy{.map = *map};
  const auto source = test::sealed(from, 3, 1);
  CHECK(policy.transform(source.fragment, 0, *to).status().code() == ErrorCode::non_finite);
  CHECK(policy.transform(source.fragment, 1, *to).status().code() == ErrorCode::invalid_argument);
  CHECK(policy.transform(test::evicted(source.fragment), 0, *to).status().code() ==
        ErrorCode::payload_missing);
}
