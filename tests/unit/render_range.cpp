// Results that the output's elements cannot hold are refused before anything is written, in every
// form of a render; results that they can hold come out, however large what they are made of.
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>
#include <kvmeld/policies/robust.hpp>

#include "support/anchor_segments.hpp"
#include "support/lane_work.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using kvmeld::TokenMatch;

constexpr double largest_float = static_cast<double>(std::numeric_limits<float>::max());
// What an element type still takes: the largest number, and what rounds to it.
double largest(ElementType type) {
  switch (type) {
    case ElementType::f16:
      return 65504;
    case ElementType::bf16:
      return std::ldexp(255.0, 120);
    case ElementType::f8_e5m2:
      return 57344;
    default:
      return largest_float;
  }
}
const ElementType unbounded_types[] = {ElementType::f16, ElementType::bf16, ElementType::f8_e5m2,
                                       ElementType::f32};

// A span of `tokens` tokens whose elements `value(plane, token, channel)` says, made at positions
// from `first` on; agents tell equal content apart.
template <class Value>
kvmeld::Fragment span_of(const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t tokens,
                         std::uint64_t agent, const Value& value, std::int64_t first = 0) {
  test::TestCache cache(g, tokens);
  for (std::size_t p = 0; p < cache.planes(); ++p) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < cache.shape(p).heads; ++h) {
        for (std::int64_t c = 0; c < cache.shape(p).channels; ++c)
          cache.set(p, t, h, c, static_cast<float>(value(p, t, c)));
      }
    }
  }
  const auto ids = test::token_ids(tokens);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), first);
  const kvmeld::Context context{.prefix = {}, .lead_in = {agent + 1, 0}};
  const auto made =
      kvmeld::seal(cache.ref(), {.tokens = ids, .positions = positions, .context = context});
  INFO(made.status().message());
  REQUIRE(made.ok());
  return *made;
}
kvmeld::FragmentSet set_of(const std::vector<kvmeld::Fragment>& fragments) {
  kvmeld::FragmentSet set;
  std::uint64_t agent = 0;
  for (const kvmeld::Fragment& f : fragments) REQUIRE(set.insert(f, kvmeld::Dot{++agent, 0}).ok());
  return set;
}
kvmeld::Target at(const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t position = 0) {
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = position;
  return target;
}
template <class M>
std::string refusal(const kvmeld::FragmentSet& set, const M& merger, const kvmeld::Target& target) {
  test::TestCache out(std::make_shared<const kvmeld::Geometry>(target.geometry), 64);
  const auto report = kvmeld::render(kvmeld::exec::seq, set, merger, out.out(), target);
  REQUIRE_FALSE(report.ok());
  CHECK(report.error().code() == ErrorCode::non_finite);
  CHECK(out.is_untouched());
  return report.error().message();
}
bool names(const std::string& message, const std::string& what) {
  return message.find(what) != std::string::npos;
}

const auto matched = [](const auto& fuser) {
  return kvmeld::merger(ById{}, Aligner{TokenMatch{}}, Fuser{fuser});
};

// A user's fold without a bound: twice the mean.
struct Twice {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = true;

  [[nodiscard]] KVMELD_HD float init() const { return 0.0F; }
  [[nodiscard]] KVMELD_HD float absorb(float acc, float value, float weight) const {
    return kvmeld::fma(weight, value, acc);
  }
  [[nodiscard]] KVMELD_HD float join(float a, float b) const { return a + b; }
  [[nodiscard]] KVMELD_HD float finish(float acc, float total, int) const {
    return 2.0F * (acc / total);
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.Twice"); }
};

}  // namespace

TEST_CASE(
    "a key that its rotation takes beyond the element type is refused by layer, plane and output") {
  for (const ElementType type : unbounded_types) {
    INFO(kvmeld::to_string(type));
    const auto g = test::geometry({.type = type, .layers = 2, .heads = 2, .channels = 64});
    // Layer 1's keys (plane 2) of token 3 reach the limit in both channels of each pair: rotated,
    // one of the two is larger.
    const auto span = span_of(g, 5, 1, [&](std::size_t p, std::int64_t t, std::int64_t) {
      return p == 2 && t == 3 ? largest(type) : 1.0;
    });
    const kvmeld::FragmentSet set = set_of({span});
    (void)test::render_everywhere(set, kvmeld::merger(), at(g));  // unmoved rows are copied
    const std::string message = refusal(set, kvmeld::merger(), at(g, 7));
    CHECK(names(message, "layer 1 plane 0, output 3 at position 10"));
    CHECK(names(message, span.id().hex()));
  }
}

TEST_CASE("a mean of keys is refused where a rotation before or behind it leaves the elements") {
  const auto keys = [](ElementType type, double size, std::int64_t second_at) {
    const auto g = test::geometry({.type = type, .layers = 1, .heads = 1, .channels = 64});
    const auto same = [&](std::size_t p, std::int64_t, std::int64_t) {
      return p == 0 ? size : 1.0;
    };
    return std::pair(g, set_of({span_of(g, 1, 1, same), span_of(g, 1, 2, same, second_at)}));
  };
  const auto mean = matched(kvmeld::WeightedMean{});
  for (const ElementType type : unbounded_types) {
    INFO(kvmeld::to_string(type));
    const auto [g, set] = keys(type, 0.9 * largest(type), 0);
    (void)test::render_everywhere(set, mean, at(g));  // fused as they lie, and not rotated
    CHECK(names(refusal(set, mean, at(g, 7)), "layer 0 plane 0, output 0 at position 7"));
  }
  // Of two positions they are un-rotated first; at position 0 what comes out is not rotated.
  const auto [g, set] = keys(ElementType::f32, 0.9 * largest_float, 5);
  CHECK(names(refusal(set, mean, at(g)), "layer 0 plane 0, output 0 at position 0"));
}

TEST_CASE("what only looks too large is computed and comes out") {
  for (const ElementType type : unbounded_types) {
    INFO(kvmeld::to_string(type));
    const auto g = test::geometry({.type = type, .layers = 1, .heads = 2, .channels = 64});
    // One channel of each pair is the largest number, its partner 0: rotated by any angle, no
    // channel is larger.
    const auto span = span_of(g, 5, 1, [&](std::size_t, std::int64_t, std::int64_t c) {
      return c < 32 ? largest(type) : 0.0;
    });
    const auto cache = test::render_everywhere(set_of({span}), kvmeld::merger(), at(g, 7));
    for (std::int64_t t = 0; t < 5; ++t) {
      for (std::int64_t c = 0; c < 32; ++c) {
        const double angle = 7 * std::pow(10000.0, -static_cast<double>(c) / 32),
                     size = largest(type);
        const double step = type == ElementType::f8_e5m2 ? 0.13 : 0.01;
        CHECK(std::abs(cache->get(0, t, 0, c) - size * std::cos(angle)) <= step * size);
        CHECK(std::abs(cache->get(0, t, 0, c + 32) - size * std::sin(angle)) <= step * size);
      }
    }
  }
}

TEST_CASE("the mean of equal rows is the row, however many and however large") {
  const auto check = [](ElementType type, double value, int n, const auto& fuser, double units) {
    const auto g =
        test::geometry({.type = type, .layers = 1, .heads = 1, .channels = 32, .rotary = 0});
    std::vector<kvmeld::Fragment> spans;
    for (int a = 0; a < n; ++a) {
      spans.push_back(span_of(g, 1, static_cast<std::uint64_t>(a),
                              [&](std::size_t, std::int64_t, std::int64_t c) {
                                return c % 2 == 0 ? value : -value / (1.0 + static_cast<double>(c));
                              }));
    }
    INFO(kvmeld::to_string(type) << " " << value << ", " << n << " rows");
    const auto cache = test::render_everywhere(set_of(spans), matched(fuser), at(g));
    const kvmeld::FragmentView row(spans[0]);
    for (std::int64_t c = 0; c < 32; ++c) {
      const double got = cache->get(1, 0, 0, c);
      const double want =
          static_cast<double>(kvmeld::detail::load_element(type, row.ref().planes()[1].data, c));
      CHECK(std::abs(got - want) <= units * std::abs(want) * 0x1p-23);
    }
  };
  const auto every_fuser = [&](ElementType type, double value, int n, double units) {
    check(type, value, n, kvmeld::WeightedMean{}, units);
    check(type, value, n, kvmeld::Median{}, units);
    check(type, value, n, kvmeld::TrimmedMean{.f = (n - 1) / 4}, units);
    check(type, value, n, kvmeld::GeometricMedian{}, units);
    check(type, value, n, kvmeld::NormPreservingMean{}, units);
    if (n >= 7) check(type, value, n, kvmeld::Bulyan{.f = 1}, units);
    if (n >= 5) check(type, value, n, kvmeld::MultiKrum{.f = 1, .m = n - 1}, units);
  };
  for (int n = 2; n <= 64; n += n < 10 ? 1 : 9) {
    // Sums in f32 have bits to spare for narrow elements. In f32 partial sum i of n equal numbers
    // is i/n of the last and rounds by 2^-24 of itself: (n + 1) / 2 such errors in all, and one of
    // the division.
    const double in_f32 = (n + 3) / 4.0;
    every_fuser(ElementType::f16, 65504, n, 0);
    every_fuser(ElementType::bf16, 3e38, n, 0);
    every_fuser(ElementType::bf16, largest(ElementType::bf16), n, 0);
    every_fuser(ElementType::f8_e5m2, 57344, n, 0);
    every_fuser(ElementType::f32, 3e38, n, in_f32);
    every_fuser(ElementType::f32, 0.1, n, in_f32);
  }
  check(ElementType::f32, 3e38, 2, kvmeld::WeightedMean{}, 0);
}

TEST_CASE(
    "weights of any scale give one mean, also by head and over more contributions than a chunk") {
  const auto g = test::geometry(
      {.type = ElementType::bf16, .layers = 1, .heads = 2, .channels = 32, .rotary = 0});
  std::vector<kvmeld::Fragment> spans;
  for (std::uint64_t a = 0; a < 2; ++a) {
    spans.push_back(span_of(g, 40, a, [&](std::size_t, std::int64_t t, std::int64_t) {
      return (t % 2 == 0 ? 3e38 : 1e38);
    }));
  }
  const kvmeld::FragmentSet set = set_of(spans);
  for (const float scale : {1.0F, 0x1p-40F, 3.0e20F}) {
    for (const bool by_head : {false, true}) {
      INFO(scale << " by head " << by_head);
      kvmeld::Alignment alignment;
      kvmeld::AlignmentGroup group;
      for (int o = 0; o < 3; ++o) {  // three outputs of the same 80 rows: folded together where
                                     // weights differ by head
        alignment.positions.push_back(o);
        alignment.tokens.push_back(-1);
        for (std::uint32_t i = 0; i < 80; ++i)
          group.contributions.push_back({i / 40, i % 40, scale});
        group.end_row();
      }
      if (by_head) group.head_weights.assign(2 * group.contributions.size(), 0.75F);
      alignment.groups.push_back(group);
      const auto given = Aligner{test::Given{std::make_shared<const kvmeld::Alignment>(alignment)}};
      const auto cache = test::render_everywhere(
          set, kvmeld::merger(ById{}, given, Fuser{kvmeld::WeightedMean{}}), at(g));
      for (std::int64_t o = 0; o < 3; ++o) {
        CHECK(std::abs(cache->get(1, o, 1, 5) - 2e38) <=
              0x1p-8 * 2e38);  // half of them 3e38, half 1e38
      }
    }
  }
}

namespace {

// A user's fold whose weights need not add up to anything.
struct Difference : kvmeld::Sum {
  static constexpr bool normalises = false;
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.Difference"); }
};

}  // namespace

TEST_CASE("weights that a fuser divides by are checked by head too, and only its own") {
  const auto g = test::geometry(
      {.type = ElementType::f32, .layers = 1, .heads = 1, .channels = 32, .rotary = 0});
  std::vector<kvmeld::Fragment> spans;
  for (const std::uint64_t a : {1U, 2U}) {
    spans.push_back(span_of(
        g, 1, a, [&](std::size_t, std::int64_t, std::int64_t) { return static_cast<double>(a); }));
  }
  const kvmeld::FragmentSet set = set_of(spans);
  const auto weighted = [&](float second, bool by_head, const auto& fuser) {
    kvmeld::Alignment alignment;
    kvmeld::AlignmentGroup group;
    alignment.positions = {0};
    alignment.tokens = {-1};
    group.contributions = {{0, 0, 1.0F}, {1, 0, by_head ? 1.0F : second}};
    group.end_row();
    if (by_head) group.head_weights = {1.0F, second};
    alignment.groups.push_back(group);
    return kvmeld::merger(
        ById{}, Aligner{test::Given{std::make_shared<const kvmeld::Alignment>(alignment)}},
        Fuser{fuser});
  };
  const kvmeld::GateShape shape{.key_channels = 32, .value_channels = 32, .hidden = 32};
  const kvmeld::Gated gated{*kvmeld::GateWeights::make(
      shape, std::vector<float>(static_cast<std::size_t>(shape.size()), 0.25F))};
  // 1 and -1 add up to nothing; 1 and -0.5 do not, but bound no mean.
  for (const float second : {-1.0F, -0.5F}) {
    const auto told = [&](const auto& fuser) {
      CHECK(names(refusal(set, weighted(second, true, fuser), at(g)), "head 0: a weight of -"));
    };
    told(kvmeld::NormPreservingMean{});
    told(gated);
    told(kvmeld::WeightedMean{});
    for (const bool by_head : {true, false}) {
      const auto merger = weighted(second, by_head, Difference{});
      const auto cache = test::render_everywhere(set, merger, at(g));
      const double got = cache->get(1, 0, 0, 3), minus = static_cast<double>(second);
      CHECK((got == 1.0 + 2.0 * minus || got == 2.0 + minus));  // whichever comes first by its id
    }
  }
  for (const float second : {0.0F, 0.5F}) {
    (void)test::render_everywhere(set, weighted(second, true, kvmeld::NormPreservingMean{}), at(g));
    (void)test::render_everywhere(set, weighted(second, true, gated), at(g));
  }
}

TEST_CASE("order statistics of numbers that add up beyond f32 are exact where they can be") {
  const auto g = test::geometry(
      {.type = ElementType::f32, .layers = 1, .heads = 1, .channels = 40, .rotary = 0});
  // Channel c of agent a: huge ones of both signs, a few small.
  const double rows[7] = {3e38, -3e38, 2e38, 3.2e38, -1e38, 3.3e38, 1};
  std::vector<kvmeld::Fragment> spans;
  for (std::uint64_t a = 0; a < 7; ++a) {
    spans.push_back(span_of(g, 1, a, [&](std::size_t, std::int64_t, std::int64_t c) {
      return rows[(a + static_cast<std::uint64_t>(c)) % 7];
    }));
  }
  const auto near = [](double got, double want) {
    return std::abs(got - want) <= 0x1p-22 * std::abs(want);
  };
  const kvmeld::FragmentSet set = set_of(spans);
  const auto trimmed =
      test::render_everywhere(set, matched(kvmeld::TrimmedMean{.f = 2}), at(g));  // 1, 2e38, 3e38
  const auto chosen = test::render_everywhere(set, matched(kvmeld::Bulyan{.f = 1}), at(g));
  for (std::int64_t c = 0; c < 40; ++c) {
    CHECK(near(trimmed->get(0, 0, 0, c), (1 + 2e38 + 3e38) / 3));
    CHECK(std::isfinite(chosen->get(0, 0, 0, c)));
  }
  const std::vector<kvmeld::Fragment> even(
      spans.begin(), spans.begin() + 6);  // the median lies between the two in the middle
  const auto median = test::render_everywhere(set_of(even), matched(kvmeld::Median{}), at(g));
  for (std::int64_t c = 0; c < 40; ++c) {
    std::vector<double> column;
    for (std::uint64_t a = 0; a < 6; ++a)
      column.push_back(rows[(a + static_cast<std::uint64_t>(c)) % 7]);
    std::sort(column.begin(), column.end());
    CHECK(near(median->get(0, 0, 0, c), column[2] / 2 + column[3] / 2));
  }
}

TEST_CASE("order statistics of turned keys that add up beyond f32 are the key") {
  const auto g =
      test::geometry({.type = ElementType::f32, .layers = 1, .heads = 2, .channels = 64});
  // Its partner is 0, so that no angle makes a channel larger; two of them are beyond f32.
  const auto key = [](std::size_t, std::int64_t, std::int64_t c) { return c < 32 ? 2.2e38 : 0.0; };
  std::vector<kvmeld::Fragment> spans;
  for (std::uint64_t a = 0; a < 4; ++a) spans.push_back(span_of(g, 2, a, key, 3));
  const kvmeld::FragmentSet set = set_of(spans);
  const auto check = [&](const auto& fuser) {
    const auto cache = test::render_everywhere(set, matched(fuser), at(g, 3));
    for (std::int64_t t = 0; t < 2; ++t) {
      for (std::int64_t c = 0; c < 64; ++c)
        CHECK(std::abs(cache->get(0, t, 1, c) - key(0, t, c)) <= 1e-6 * 2.2e38);
    }
  };
  check(kvmeld::Median{});
  check(kvmeld::TrimmedMean{.f = 1});
}

TEST_CASE("Bulyan takes the nearest values where distances and sums are beyond f32") {
  const float values[5] = {-3.3e38F, -3e38F, 3e38F, 3.1e38F, 3.2e38F};
  const kvmeld::Bulyan rule{.f = 1};
  // Median 3e38; -3e38 lies 6e38 away, beyond f32, 3.2e38 a little: the three largest are chosen.
  const double want = (3e38 + 3.1e38 + 3.2e38) / 3;
  CHECK(std::abs(static_cast<double>(rule.select(kvmeld::OrderedValues{values, 1, 5})) - want) <=
        0x1p-22 * want);
}

TEST_CASE("a sum beyond the element type is refused, and one within it is not") {
  for (const ElementType type : unbounded_types) {
    INFO(kvmeld::to_string(type));
    const auto g =
        test::geometry({.type = type, .layers = 2, .heads = 1, .channels = 32, .rotary = 0});
    const auto spans = [&](double sign) {
      return set_of({span_of(g, 3, 1,
                             [&](std::size_t p, std::int64_t t, std::int64_t) {
                               return p == 3 && t == 1 ? 0.75 * largest(type) : 0.0;
                             }),
                     span_of(g, 3, 2, [&](std::size_t p, std::int64_t t, std::int64_t) {
                       return p == 3 && t == 1 ? sign * 0.75 * largest(type) : 0.0;
                     })});
    };
    const std::string message = refusal(spans(1), matched(kvmeld::Sum{}), at(g, 4));
    CHECK(names(message, "layer 1 plane 1, output 1 at position 5"));
    CHECK(names(message, "2 contributions"));
    const auto cancelled = test::render_everywhere(spans(-1), matched(kvmeld::Sum{}), at(g));
    CHECK(cancelled->get(3, 1, 0, 7) == 0.0);
  }
}

TEST_CASE("a fuser of the user's is computed where it gives no bound") {
  for (const ElementType type : unbounded_types) {
    const auto g =
        test::geometry({.type = type, .layers = 1, .heads = 1, .channels = 32, .rotary = 0});
    const auto spans = [&](double value) {
      return set_of(
          {span_of(g, 2, 1,
                   [&](std::size_t p, std::int64_t, std::int64_t) { return p == 1 ? value : 0.0; }),
           span_of(g, 2, 2, [&](std::size_t p, std::int64_t, std::int64_t) {
             return p == 1 ? value : 0.0;
           })});
    };
    CHECK(names(refusal(spans(0.75 * largest(type)), matched(Twice{}), at(g)),
                "layer 0 plane 1, output 0"));
    const auto cache =
        test::render_everywhere(spans(0.25 * largest(type)), matched(Twice{}), at(g));
    CHECK(std::abs(cache->get(1, 0, 0, 3) - 0.5 * largest(type)) <= 0.13 * largest(type));
  }
}

TEST_CASE(
    "a payload with a NaN that no seal made is refused, by what was given to it and not by what it "
    "was copied from") {
  const auto g =
      test::geometry({.type = ElementType::f32, .layers = 1, .heads = 1, .channels = 32});
  const kvmeld::Fragment good =
      span_of(g, 3, 1, [](std::size_t, std::int64_t, std::int64_t) { return 1.0; });
  (void)test::render_everywhere(set_of({good}), kvmeld::merger(), at(g));
  auto body = std::make_shared<kvmeld::Fragment::Body>(*good.body());
  kvmeld::Payload& payload = body->payloads[0];
  const auto bytes = std::make_shared<std::vector<std::byte>>(
      payload.bytes.get(), payload.bytes.get() + payload.byte_count);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes->data() + payload.plane_offsets[1] + (2 * 32 + 9) * sizeof(float), &nan,
              sizeof(nan));
  payload.bytes = std::shared_ptr<const std::byte[]>(bytes, bytes->data());
  CHECK(names(refusal(set_of({kvmeld::Fragment(body)}), kvmeld::merger(), at(g)),
              "layer 0 plane 1, output 2 at position 2"));
}

TEST_CASE("the scale of quantised blocks is a number too") {
  const auto g =
      test::geometry({.type = ElementType::q8_0, .layers = 1, .heads = 1, .channels = 64});
  test::TestCache cache(g, 2);
  std::vector<float> row(64, 8.2e6F);  // 127 · 65504 is 8.3e6
  for (std::size_t p = 0; p < 2; ++p) {
    for (std::int64_t t = 0; t < 2; ++t) {
      kvmeld::extend::store_row(ElementType::q8_0, kvmeld::Isa::baseline, row.data(), 64,
                                cache.bytes(p, t, 0, 0));
    }
  }
  const auto span = kvmeld::seal(cache.ref());
  REQUIRE(span.ok());
  CHECK(names(refusal(set_of({*span}), kvmeld::merger(), at(g, 5)), "layer 0 plane 0, output"));
}

TEST_CASE("e4m3 saturates, as its conversion says") {
  const auto g =
      test::geometry({.type = ElementType::f8_e4m3, .layers = 1, .heads = 1, .channels = 64});
  const auto span = span_of(g, 2, 1, [](std::size_t, std::int64_t, std::int64_t) { return 448.0; });
  const auto cache = test::render_everywhere(set_of({span}), kvmeld::merger(), at(g, 3));
  double most = 0;
  for (std::int64_t c = 0; c < 64; ++c) most = std::max(most, std::abs(cache->get(0, 0, 0, c)));
  CHECK(most == 448.0);
}

TEST_CASE("base and offsets that add up beyond the cache's elements are refused") {
  const auto g =
      test::geometry({.type = ElementType::f16, .layers = 2, .heads = 1, .channels = 32});
  const auto constant = [&](double value) {
    test::Segment s(g, 4, 1);
    for (auto& plane : s.values) std::fill(plane.begin(), plane.end(), value);
    return s;
  };
  const auto alone = constant(20000).at(0), zero = constant(0).at(0);
  const auto delta = kvmeld::anchors::measure_offset(constant(25000).at(0), zero);
  REQUIRE(delta.ok());
  kvmeld::anchors::ReusePart part{
      .base = alone, .position = 50, .offsets = {{.anchor = test::anchor_id(1), .delta = *delta}}};
  REQUIRE(kvmeld::anchors::plan_reuse({&part, 1}, *g, {.compute_last = false}).status().ok());
  part.offsets[0].weight = 2.0F;  // 20000 + 2 · 25000
  const auto refused = kvmeld::anchors::plan_reuse({&part, 1}, *g, {.compute_last = false});
  REQUIRE(refused.status().code() == ErrorCode::non_finite);
  CHECK(names(refused.status().message(), "layer 1 plane"));
  // What makes new fragments says which row it could not store.
  const auto far = kvmeld::anchors::measure_offset(constant(40000).at(0), constant(-40000).at(0));
  REQUIRE(far.status().code() == ErrorCode::non_finite);
  CHECK(names(far.status().message(), "layer 1, keys of row 0"));
}
