// Weights by head, and fusers that mix all contributions of a head at once: every executor gives
// the same bytes, and each head is what it would be in a render of its own.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include <kvmeld/policies/attention.hpp>
#include <kvmeld/policies/mean.hpp>

#include "support/lane_work.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::Fuser;
using kvmeld::RopePairing;

// A user's fuser of the mix form: a mean weighted by each contribution's largest channel, plus the
// layer.
struct ByPeak {
  static constexpr bool reproducible = true;
  struct Mix {
    static constexpr bool rotation_equivariant = false;
    struct Peaks {
      float weights[64];
      float total;
    };
    template <class Rows>
    KVMELD_HD Peaks prepare(const Rows& rows) const {
      Peaks peaks{{}, 0};
      for (int i = 0; i < rows.count(); ++i) {
        float peak = 0;
        for (int c = 0; c < rows.channels(); ++c)
          peak = peak < rows.value(i, c) ? rows.value(i, c) : peak;
        peaks.weights[i] = kvmeld::fma(peak, rows.weight(i), 0.0F);
        peaks.total += peaks.weights[i];
      }
      return peaks;
    }
    template <class Rows>
    KVMELD_HD float channel(const Rows& rows, const Peaks& peaks, int c) const {
      float sum = static_cast<float>(rows.layer() + rows.head());
      for (int i = 0; i < rows.count(); ++i)
        sum = kvmeld::fma(peaks.weights[i] / peaks.total, rows.value(i, c), sum);
      return sum;
    }
  };
  [[nodiscard]] Mix mixing() const { return {}; }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.ByPeak"); }
};

// Two spans at gapped positions; two outputs of `count` and one contribution; weights by head in
// which each head keeps some.
struct Case {
  std::shared_ptr<const kvmeld::Geometry> geometry;
  std::vector<test::Sealed> spans;
  kvmeld::FragmentSet set;
  kvmeld::Alignment alignment;
  kvmeld::Target target;

  Case(ElementType type, RopePairing pairing, std::int64_t count)
      : geometry(test::geometry({.type = type,
                                 .layers = 2,
                                 .heads = 3,
                                 .channels = 96,
                                 .value_channels = 64,
                                 .first = 8,
                                 .rotary = 80,
                                 .pairing = pairing})) {
    for (const std::uint64_t seed : {1U, 2U}) {
      const auto positions = test::gapped_positions(40, static_cast<std::int64_t>(seed));
      spans.push_back(test::sealed(geometry, 40, seed, {.positions = positions}));
    }
    spans = test::by_id(spans);
    set = test::set_of(spans);
    alignment = test::crowd(count, 40);
    auto& group = alignment.groups[0];
    const std::size_t n = group.contributions.size();
    for (std::size_t row = 0; row < 6; ++row) {  // (layer, head)
      for (std::size_t i = 0; i < n; ++i) {
        const bool last = i + 1 == n;  // the second output's only contribution
        // Head 2 of each layer keeps one contribution; the others drop every third.
        const bool kept =
            last || (row % 3 == 2 ? i == row % (n - 1) : (i + row) % 3 != 0 || count < 3);
        group.head_weights.push_back(kept ? 0.5F + 0.25F * static_cast<float>((i + row) % 4)
                                          : 0.0F);
      }
    }
    target.geometry = *geometry;
  }

  // What one (layer, head) sees, for all heads.
  [[nodiscard]] kvmeld::Alignment of_head(std::size_t row) const {
    kvmeld::Alignment out = alignment;
    auto& group = out.groups[0];
    const auto& all = alignment.groups[0];
    group = {};
    for (std::size_t o = 0; o < 2; ++o) {
      for (std::uint32_t i = all.row_begin[o]; i < all.row_begin[o + 1]; ++i) {
        const float w = all.head_weights[row * all.contributions.size() + i];
        if (w == 0.0F) continue;
        kvmeld::Contribution c = all.contributions[i];
        c.weight *= w;
        group.contributions.push_back(c);
      }
      group.end_row();
    }
    return out;
  }
};

template <class F>
void check_fuser(const Case& c, const F& fuser, bool each_head) {
  const auto given = [](kvmeld::Alignment a) {
    return Aligner{test::Given{std::make_shared<const kvmeld::Alignment>(std::move(a))}};
  };
  const auto whole = test::render_everywhere(
      c.set, kvmeld::merger(ById{}, given(c.alignment), Fuser{fuser}), c.target);
  test::render_everywhere(c.set, kvmeld::merger(ById{}, given(c.alignment), Fuser{fuser}), c.target,
                          test::Layout::paged);
  if (!each_head) return;
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t head = 0; head < 3; ++head) {
      const auto alone = test::render_everywhere(
          c.set, kvmeld::merger(ById{}, given(c.of_head(layer * 3 + head)), Fuser{fuser}),
          c.target);
      for (std::size_t p = 0; p < 2; ++p) {
        const auto& got = whole->out().plane(layer, p);
        const auto& want = alone->out().plane(layer, p);
        const auto bytes = static_cast<std::size_t>(kvmeld::extend::row_bytes(got.shape));
        for (std::int64_t o = 0; o < 2; ++o) {
          const auto at = got.byte_offset(got.row_offset(o, static_cast<std::int64_t>(head)));
          INFO("layer " << layer << " head " << head << " plane " << p << " output " << o);
          REQUIRE(std::equal(got.data + at, got.data + at + bytes, want.data + at));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("each head is fused by its own weights, in rows and in lanes") {
  const auto type = GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0);
  const auto pairing = GENERATE(RopePairing::half_split, RopePairing::interleaved);
  const std::int64_t count = GENERATE(2, 7, 60);
  CAPTURE(kvmeld::to_string(type), count);
  const Case c(type, pairing, count);
  check_fuser(c, kvmeld::WeightedMean{}, true);
  check_fuser(c, kvmeld::Max{}, true);
  // a single one is rotated once, where one of several is rotated twice
  check_fuser(c, kvmeld::Sum{}, false);
  check_fuser(c, kvmeld::Median{}, true);
  check_fuser(c, ByPeak{}, false);
}

TEST_CASE("crowds are folded by head weights in the same chunks everywhere") {
  const std::int64_t count = GENERATE(65, 400);
  const Case c(ElementType::f16, RopePairing::half_split, count);
  check_fuser(c, kvmeld::WeightedMean{}, false);
  check_fuser(c, kvmeld::Sum{}, false);
}

TEST_CASE("a fuser of the mix form sees all contributions of a head") {
  const Case c(ElementType::f32, RopePairing::half_split, 5);
  kvmeld::Alignment plain = c.alignment;
  plain.groups[0].head_weights.clear();
  const auto merger =
      kvmeld::merger(ById{}, Aligner{test::Given{std::make_shared<const kvmeld::Alignment>(plain)}},
                     Fuser{ByPeak{}});
  const auto out = test::render_everywhere(c.set, merger, c.target);
  // Values are not rotary: plain loops in double over the payloads.
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::int64_t head = 0; head < 3; ++head) {
      double weights[5], total = 0;
      const float* rows[5];
      for (std::uint32_t i = 0; i < 5; ++i) {
        const auto& contribution = plain.groups[0].contributions[i];
        const auto& payload = c.spans[contribution.source].fragment.payloads()[0];
        rows[i] = reinterpret_cast<const float*>(payload.bytes.get() +
                                                 payload.plane_offsets[layer * 2 + 1]) +
                  (contribution.token * 3 + static_cast<std::uint32_t>(head)) * 64;
        weights[i] = std::max(0.0, static_cast<double>(*std::max_element(rows[i], rows[i] + 64))) *
                     static_cast<double>(contribution.weight);
        total += weights[i];
      }
      const auto plane = out->out().plane(layer, 1);
      for (int channel = 0; channel < 64; ++channel) {
        double want = static_cast<double>(layer) + static_cast<double>(head);
        for (std::size_t i = 0; i < 5; ++i)
          want += weights[i] / total * static_cast<double>(rows[i][channel]);
        const float got = reinterpret_cast<const float*>(
            plane.data + plane.byte_offset(plane.row_offset(0, head)))[channel];
        REQUIRE(std::abs(static_cast<double>(got) - want) <= 1e-5 * (1 + std::abs(want)));
      }
    }
  }
}

TEST_CASE("weights by head that do not fit are refused with their number") {
  Case c(ElementType::f32, RopePairing::half_split, 4);
  const auto plan = [&] {
    return kvmeld::plan(
               c.set,
               kvmeld::merger(ById{}, Aligner{test::Given{
                                          std::make_shared<const kvmeld::Alignment>(c.alignment)}}),
               c.target)
        .status();
  };
  REQUIRE(plan().ok());
  auto& weights = c.alignment.groups[0].head_weights;
  const float kept = weights.back();
  weights.back() = std::nanf("");
  CHECK(plan().code() == kvmeld::ErrorCode::non_finite);
  weights.back() = kept;
  std::fill_n(weights.begin(), 4, 0.0F);
  CHECK(plan().code() == kvmeld::ErrorCode::non_finite);  // head 0 of output 0 has nothing left
  weights[0] = -1;
  CHECK(plan().code() == kvmeld::ErrorCode::non_finite);
  weights[0] = 1;
  weights[1] = 1;
  CHECK(plan().ok());
  weights.pop_back();
  CHECK(plan().code() == kvmeld::ErrorCode::invalid_argument);
}

TEST_CASE("heads that the target leaves out keep the local cache, byte by byte") {
  const auto type = GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0);
  const auto g = test::geometry({.type = type, .layers = 3, .heads = 3, .channels = 64});
  // Equal positions are fused as they lie, unequal ones without: the local cache, at positions of
  // its own, must not change that.
  const auto first = test::gapped_positions(9, 4),
             second = test::gapped_positions(6, GENERATE(4, 30));
  const auto set = test::set_of(
      {test::sealed(g, 9, 1, {.positions = first}), test::sealed(g, 6, 2, {.positions = second})});
  test::TestCache local(g, 15, test::Layout::paged);
  local.fill(7);
  const bool match = GENERATE(false, true);
  CAPTURE(kvmeld::to_string(type), match);
  const auto check = [&](const auto& merger) {
    kvmeld::Target target{*g};
    const auto plain = test::render_everywhere(set, merger, target);
    target.local = local.ref();
    target.layers.layers = {1, 1, 0};
    target.heads.heads = {1, 1, 1, 0, 1, 0, 1, 1, 1};
    const auto masked = test::render_everywhere(set, merger, target);
    const auto plan = kvmeld::plan(set, merger, target);
    CHECK(plan->render_id() != kvmeld::plan(set, merger, kvmeld::Target{*g})->render_id());
    for (std::size_t layer = 0; layer < 3; ++layer) {
      for (std::int64_t head = 0; head < 3; ++head) {
        const bool rendered =
            layer < 2 && target.heads.heads[layer * 3 + static_cast<std::size_t>(head)] != 0;
        for (std::size_t p = 0; p < 2; ++p) {
          const auto got = masked->out().plane(layer, p);
          const kvmeld::PlaneRef want = rendered ? kvmeld::PlaneRef(plain->out().plane(layer, p))
                                                 : local.ref().plane(layer, p);
          const auto bytes = static_cast<std::size_t>(kvmeld::extend::row_bytes(got.shape));
          for (std::int64_t o = 0; o < plan->tokens(); ++o) {
            const auto at = got.byte_offset(got.row_offset(o, head));
            const auto from = want.byte_offset(want.row_offset(want.slots.slot(o), head));
            INFO("layer " << layer << " head " << head << " plane " << p << " output " << o);
            REQUIRE(std::equal(got.data + at, got.data + at + bytes, want.data + from));
          }
        }
      }
    }
    target.heads.heads.pop_back();
    CHECK(kvmeld::plan(set, merger, target).status().code() == kvmeld::ErrorCode::invalid_argument);
    target.heads.heads.push_back(1);
    target.local.reset();
    CHECK(kvmeld::plan(set, merger, target).status().code() == kvmeld::ErrorCode::invalid_argument);
  };
  if (match) {
    check(kvmeld::merger(ById{}, Aligner{kvmeld::TokenMatch{}}));
    check(kvmeld::merger(ById{}, Aligner{kvmeld::TokenMatch{}}, Fuser{kvmeld::Medoid{}}));
    check(kvmeld::merger(ById{}, Aligner{kvmeld::TokenMatch{}}, Fuser{kvmeld::Max{}}));
  } else {
    check(kvmeld::merger(ById{}));
  }
}

namespace {

// Rows of layer `layer`, head `head` of two renders, or caches, of equal shape.
void same_head(const kvmeld::KvCacheRef& got, const kvmeld::KvCacheRef& want, std::size_t layer,
               std::int64_t head, std::int64_t outputs) {
  for (std::size_t p = 0; p < 2; ++p) {
    const auto a = got.plane(layer, p), b = want.plane(layer, p);
    const auto bytes = static_cast<std::size_t>(kvmeld::extend::row_bytes(a.shape));
    for (std::int64_t o = 0; o < outputs; ++o) {
      const auto at = a.byte_offset(a.row_offset(a.slots.slot(o), head)),
                 from = b.byte_offset(b.row_offset(b.slots.slot(o), head));
      INFO("layer " << layer << " head " << head << " plane " << p << " output " << o);
      REQUIRE(std::equal(a.data + at, a.data + at + bytes, b.data + from));
    }
  }
}

}  // namespace

TEST_CASE("pooled attention under a mask of layers or heads is what it is without") {
  const auto g = test::geometry({.layers = 3, .heads = 2, .channels = 32});
  const auto set = test::set_of({test::sealed(g, 9, 1), test::sealed(g, 6, 2)});
  std::vector<float> queries(2 * 3 * 2 * 32);
  test::Random random(3);
  for (float& q : queries) q = random.value();
  const auto merger = kvmeld::merger(
      ById{}, Aligner{kvmeld::Attention{
                  .queries = std::make_shared<const std::vector<float>>(queries), .count = 2}});
  kvmeld::Target target{*g};
  const auto plain = test::render_everywhere(set, merger, target);
  test::TestCache local(g, 2, test::Layout::canonical);
  local.fill(7);
  target.local = local.ref();
  const bool by_layer = GENERATE(true, false);
  const std::vector<std::uint8_t> heads{0, 1, 1, 1, 0, 1};
  if (by_layer) {
    target.layers.layers = {0, 1, 1};
  } else {
    target.heads.heads = heads;
  }
  const auto masked = test::render_everywhere(set, merger, target);
  for (std::size_t layer = 0; layer < 3; ++layer) {
    for (std::int64_t head = 0; head < 2; ++head) {
      const bool rendered =
          by_layer ? layer > 0 : heads[layer * 2 + static_cast<std::size_t>(head)] != 0;
      same_head(masked->ref(), rendered ? plain->ref() : local.ref(), layer, head, 2);
    }
  }
}

TEST_CASE(
    "a head of the local cache stays as it is under fusers that change single contributions") {
  const auto g = test::geometry({.layers = 1, .heads = 2, .channels = 32});
  const auto set = test::set_of({test::sealed(g, 9, 1)});
  test::TestCache local(g, 9, test::Layout::canonical);
  local.fill(7);
  kvmeld::Target target{*g};
  target.first_position = 5;
  target.local = local.ref();
  target.heads.heads = {1, 0};
  same_head(
      test::render_everywhere(set, kvmeld::merger(ById{}, Fuser{kvmeld::Sum{}}), target)->ref(),
      local.ref(), 0, 1, 9);
  same_head(test::render_everywhere(set, kvmeld::merger(ById{}, Fuser{ByPeak{}}), target)->ref(),
            local.ref(), 0, 1, 9);
}

TEST_CASE("a windowed layer that lacks a token makes a hole under a head mask as without") {
  auto g = test::geometry({.layers = 2, .heads = 2, .channels = 32});
  g->layers[1].window = 4;
  const auto set = test::set_of({test::sealed(g, 9, 1, {}, test::Layout::canonical, {0, 5})});
  test::TestCache local(g, 9, test::Layout::canonical);
  local.fill(7);
  kvmeld::Target target{*g};
  const auto plain = kvmeld::plan(set, kvmeld::merger(ById{}), target);
  REQUIRE(plain.ok());
  target.local = local.ref();
  target.heads.heads = {1, 0, 1, 0};
  const auto masked = kvmeld::plan(set, kvmeld::merger(ById{}), target);
  INFO(masked.status().message());
  REQUIRE(masked.ok());
  CHECK(std::equal(masked->holes().begin(), masked->holes().end(), plain->holes().begin(),
                   plain->holes().end()));
}

TEST_CASE("head masks over planes of unlike heads, and heads without channels") {
  auto unlike = test::geometry({.layers = 1, .heads = 2, .channels = 32});
  unlike->layers[0].planes[1].heads = 64;
  const auto set = test::set_of({test::sealed(unlike, 3, 1)});
  test::TestCache local(unlike, 3, test::Layout::canonical);
  kvmeld::Target target{*unlike};
  target.local = local.ref();
  target.heads.heads = {0, 1};
  CHECK(kvmeld::plan(set, kvmeld::merger(ById{}), target).status().code() ==
        kvmeld::ErrorCode::unsupported);

  const auto empty = test::geometry({.layers = 1, .heads = 2, .channels = 32, .value_channels = 0});
  const auto none = test::set_of({test::sealed(empty, 3, 1), test::sealed(empty, 3, 2)});
  const Aligner match{kvmeld::TokenMatch{}};
  const kvmeld::Target plain{*empty};
  test::render_everywhere(none, kvmeld::merger(ById{}, match, Fuser{kvmeld::NormPreservingMean{}}),
                          plain);
  test::render_everywhere(none, kvmeld::merger(ById{}, match, Fuser{kvmeld::Median{}}), plain);
  test::render_everywhere(none, kvmeld::merger(ById{}, match, Fuser{kvmeld::Medoid{}}), plain);
  test::render_everywhere(none, kvmeld::merger(ById{}, match), plain);

  // outputs of two contributions each, whose values are rotated, fused and stored though there are
  // none
  kvmeld::Alignment two;
  kvmeld::AlignmentGroup& rows = two.groups.emplace_back();
  for (std::uint32_t o = 0; o < 3; ++o) {
    two.positions.push_back(7 + o);
    two.tokens.push_back(-1);
    rows.contributions.push_back({0, o});
    rows.contributions.push_back({1, o});
    rows.end_row();
  }
  const Aligner given{test::Given{std::make_shared<const kvmeld::Alignment>(two)}};
  rows.head_weights.assign(2 * rows.contributions.size(), 0.5F);
  const Aligner by_head{test::Given{std::make_shared<const kvmeld::Alignment>(two)}};
  for (const kvmeld::ElementType type :
       {kvmeld::ElementType::f32, kvmeld::ElementType::f16, kvmeld::ElementType::f8_e5m2}) {
    const auto g = test::geometry(
        {.type = type, .layers = 1, .heads = 2, .channels = 32, .value_channels = 0});
    const auto spans = test::set_of({test::sealed(g, 3, 1), test::sealed(g, 3, 2)});
    const kvmeld::Target here{*g};
    test::render_everywhere(spans, kvmeld::merger(ById{}, given), here);
    test::render_everywhere(spans, kvmeld::merger(ById{}, by_head), here);
    test::render_everywhere(spans, kvmeld::merger(ById{}, given, Fuser{kvmeld::Median{}}), here);
    test::render_everywhere(spans, kvmeld::merger(ById{}, by_head, Fuser{kvmeld::Median{}}), here);
    test::render_everywhere(
        spans, kvmeld::merger(ById{}, given, Fuser{kvmeld::NormPreservingMean{}}), here);
  }
}
