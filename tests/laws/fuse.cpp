// What every fuser keeps, and where the robust ones hold and fail.
#include <algorithm>
#include <cmath>

#include "support/law.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ElementType;
using kvmeld::Fuser;
using kvmeld::RopePairing;
using kvmeld::TokenMatch;
using test::Layout;
using test::Sealed;

using Buffers = std::vector<std::vector<std::byte>>;

template <class F, class E = kvmeld::exec::Sequential>
Buffers rendered(const std::vector<kvmeld::Fragment>& fragments, const F& fuser,
                 const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t first_position = 0,
                 const E& exec = {}) {
  kvmeld::FragmentSet set;
  for (std::size_t i = 0; i < fragments.size(); ++i) RC_ASSERT(set.insert(fragments[i]).ok());
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = first_position;
  const auto plan = kvmeld::plan(set, kvmeld::merger(Aligner{TokenMatch{}}, Fuser{fuser}), target);
  if (!plan.ok()) RC_FAIL(plan.status().message());
  test::TestCache out(plan->shared_geometry(), plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  RC_ASSERT(kvmeld::run(exec, *plan, workspace, out.out()).ok());
  return out.buffers();
}

// All fusers that seven contributions suffice for.
template <class Visit>
void each_fuser(const Visit& visit) {
  visit(kvmeld::WeightedMean{});
  visit(kvmeld::Max{});
  visit(kvmeld::Median{});
  visit(kvmeld::TrimmedMean{.f = 2});
  visit(kvmeld::Medoid{});
  visit(kvmeld::Krum{.f = 2});
  visit(kvmeld::MultiKrum{.f = 1, .m = 4});
  visit(kvmeld::Bulyan{.f = 1});
  visit(kvmeld::GeometricMedian{});
  visit(kvmeld::Cluster{.threshold = 0.1F});
  visit(kvmeld::Cluster{.k = 3, .result = kvmeld::ClusterResult::centre});
}

// One value: a layer of one head of one channel, so that the honest hull is an interval.
const auto line = test::geometry({.layers = 1, .heads = 1, .channels = 1, .rotary = 0});
kvmeld::Fragment value(float x, kvmeld::TokenId id) {
  test::TestCache cache(line, 1);
  cache.set(0, 0, 0, 0, x);
  cache.set(1, 0, 0, 0, x);
  const std::vector<kvmeld::TokenId> ids{id};
  return *kvmeld::seal(cache.ref(), {.tokens = ids});
}
template <class F>
float of_values(const F& fuser, const std::vector<float>& values) {
  std::vector<kvmeld::Fragment> fragments;
  for (const float x : values)
    fragments.push_back(value(x, static_cast<kvmeld::TokenId>(fragments.size())));
  float out;
  std::memcpy(&out, rendered(fragments, fuser, line)[0].data(), sizeof(out));
  return out;
}
// `honest` numbers in [−4, 4), then the Byzantine peers', of which some lie together.
std::vector<float> draw(int honest, int byzantines, bool far) {
  test::Random random(*rc::gen::arbitrary<std::uint64_t>());
  std::vector<float> out;
  for (int i = 0; i < honest; ++i) out.push_back(random.value());
  for (int i = 0; i < byzantines; ++i) {
    const float lie = random.value() * (random.below(2) == 0 ? 1.5F : 1e4F);
    out.push_back(i > 0 && random.below(2) == 0 ? out.back()
                  : far                         ? (lie < 0 ? lie - 1e3F : lie + 1e3F)
                                                : lie);
  }
  return out;
}
template <class F>
void holds(const F& fuser, int honest, int byzantines, bool far, float tolerance = 0) {
  const auto values = draw(honest, byzantines, far);
  const auto [low, high] = std::minmax_element(values.begin(), values.begin() + honest);
  const float out = of_values(fuser, values);
  RC_ASSERT(out >= *low - tolerance);
  RC_ASSERT(out <= *high + tolerance);
}

}  // namespace

TEST_CASE("laws of every fuser") {
  test::law(
      "permuting fragments leaves bytes alone, in rows of every instruction set and in lanes", [] {
        const auto type = *rc::gen::element(ElementType::f32, ElementType::bf16, ElementType::f16,
                                            ElementType::q8_0);
        const int channels = 32 * *rc::gen::inRange(1, 4);
        // Whole heads turn in vectors, others pair by pair; rows of many heads are fused in several
        // goes.
        const int rotary = *rc::gen::element(channels, 2 * *rc::gen::inRange(0, channels / 2 + 1));
        const auto g = test::geometry(
            {.type = type,
             .layers = *rc::gen::inRange(1, 3),
             .heads = *rc::gen::element(1, 2, 3, 5, 11),
             .channels = channels,
             .rotary = rotary,
             .pairing = *rc::gen::element(RopePairing::half_split, RopePairing::interleaved)});
        const auto seed = *rc::gen::arbitrary<std::uint64_t>();
        const bool same_positions = *rc::gen::arbitrary<bool>();
        std::vector<kvmeld::Fragment> fragments;
        for (std::uint64_t s = 0; s < 7; ++s) {
          const auto positions =
              test::gapped_positions(3, same_positions ? 2 : static_cast<std::int64_t>(s));
          fragments.push_back(test::sealed(g, 3, seed + s, {.positions = positions}).fragment);
          RC_ASSERT(fragments.back().valid());
        }
        auto shuffled = fragments;
        test::Random random(seed);
        for (std::size_t k = 7; k > 1; --k) std::swap(shuffled[k - 1], shuffled[random.below(k)]);
        each_fuser([&](const auto& fuser) {
          const Buffers bytes = rendered(fragments, fuser, g, 5);
          RC_ASSERT(bytes == rendered(shuffled, fuser, g, 5, kvmeld::exec::lanes));
          for (const kvmeld::Isa isa : {kvmeld::Isa::baseline, kvmeld::Isa::avx2}) {
            if (isa <= kvmeld::best_isa())
              RC_ASSERT(bytes ==
                        rendered(shuffled, fuser, g, 5, kvmeld::exec::Sequential{.isa = isa}));
          }
        });
      });
  test::law("one fragment is a copy", [] {
    const auto type = *rc::gen::element(ElementType::f32, ElementType::bf16, ElementType::f8_e5m2,
                                        ElementType::q8_0);
    const auto g = test::geometry({.type = type, .heads = *rc::gen::inRange(1, 4)});
    const auto n = *rc::gen::inRange<std::int64_t>(1, 5);
    test::TestCache cache(g, n);
    cache.fill(*rc::gen::arbitrary<std::uint64_t>());
    const auto fragment = kvmeld::seal(cache.ref());
    RC_ASSERT(fragment.ok());
    each_fuser(
        [&](const auto& fuser) { RC_ASSERT(rendered({*fragment}, fuser, g) == cache.buffers()); });
  });
  test::law("equal fragments fuse to themselves", [] {
    const auto g = test::geometry({.type = *rc::gen::element(ElementType::f16, ElementType::bf16),
                                   .heads = *rc::gen::inRange(1, 4)});
    test::TestCache cache(g, 2);
    cache.fill(*rc::gen::arbitrary<std::uint64_t>());
    std::vector<kvmeld::Fragment> fragments;
    for (kvmeld::TokenId id = 0; id < 7; ++id) {  // other token ids, so that they are seven
      const std::vector<kvmeld::TokenId> ids{id, id};
      fragments.push_back(*kvmeld::seal(cache.ref(), {.tokens = ids}));
    }
    each_fuser([&](const auto& fuser) {
      using F = std::remove_cvref_t<decltype(fuser)>;
      const Buffers out = rendered(fragments, fuser, g);
      if constexpr (kvmeld::extend::rotation_equivariant<kvmeld::extend::RowForm<F>>()) {
        RC_ASSERT(out == cache.buffers());
      } else {
        // Keys turn back and forth: two turns in f32 of a pair no longer than 4√2 miss by at most
        // e = 2 · 3 · 2^-24 · 4√2, and what is stored, the nearest to that, by at most 2e.
        for (std::size_t p = 0; p < out.size(); ++p) {
          if (!cache.shape(p).rotary) RC_ASSERT(out[p] == cache.buffers()[p]);
        }
        test::TestCache fused(g, 2);
        for (std::size_t p = 0; p < out.size(); ++p)
          std::copy(out[p].begin(), out[p].end(), fused.buffers()[p].begin());
        const test::Dense got = fused.dense();
        const test::Dense want = cache.dense();
        for (std::size_t p = 0; p < got.size(); ++p) {
          for (std::size_t i = 0; i < got[p].size(); ++i)
            RC_ASSERT(std::abs(got[p][i] - want[p][i]) <= 12 * 0x1p-24 * 4 * std::sqrt(2.0));
        }
      }
    });
  });
}

TEST_CASE("each robust rule holds at its bound") {
  test::law("median, medoid, geometric median: f of 2f + 1", [] {
    const int f = *rc::gen::inRange(1, 5);
    holds(kvmeld::Median{}, f + 1, f, false);
    holds(kvmeld::Medoid{}, f + 1, f, false);
    holds(kvmeld::GeometricMedian{}, f + 1, f, true, 0.05F);
    holds(kvmeld::TrimmedMean{.f = f}, f + 1, f, false, 1e-6F);
  });
  test::law("Krum: 1 of 5 whatever it says, f of 2f + 3 that say something far off", [] {
    holds(kvmeld::Krum{.f = 1}, 4, 1, false);
    const int f = *rc::gen::inRange(1, 5);
    holds(kvmeld::Krum{.f = f}, f + 3, f, true);
    holds(kvmeld::MultiKrum{.f = f, .m = f + 3}, f + 3, f, true, 1e-6F);
  });
  test::law("Bulyan: f of 4f + 3 that say something far off", [] {
    const int f = *rc::gen::inRange(1, 4);
    holds(kvmeld::Bulyan{.f = f}, 3 * f + 3, f, true, 1e-6F);
  });
  test::law("cluster: a minority", [] {
    const int n = *rc::gen::inRange(2, 6);
    auto values = draw(n, n - 1, true);
    for (int i = 0; i < n; ++i)
      values[static_cast<std::size_t>(i)] = 1.0F + std::abs(values[static_cast<std::size_t>(i)]);
    for (int i = n; i < 2 * n - 1; ++i)
      values[static_cast<std::size_t>(i)] = -std::abs(values[static_cast<std::size_t>(i)]);
    RC_ASSERT(of_values(kvmeld::Cluster{}, values) >= 1.0F);
  });
}

TEST_CASE("each robust rule fails one beyond its bound") {
  test::law("median, medoid, geometric median, trimmed mean: f + 1 of 2f + 1", [] {
    const int f = *rc::gen::inRange(1, 5);
    std::vector<float> values(static_cast<std::size_t>(f), 1.0F);
    values.resize(static_cast<std::size_t>(2 * f + 1), 1000.0F);
    RC_ASSERT(of_values(kvmeld::Median{}, values) == 1000.0F);
    RC_ASSERT(of_values(kvmeld::Medoid{}, values) == 1000.0F);
    RC_ASSERT(of_values(kvmeld::GeometricMedian{}, values) > 900.0F);
    RC_ASSERT(of_values(kvmeld::TrimmedMean{.f = f}, values) == 1000.0F);
    RC_ASSERT(of_values(kvmeld::Cluster{.threshold = 1.0F, .k = 2}, values) == 1000.0F);
  });
  // Two of five: 25 twice, beside 0, 10 and 20. Scores 500, 200, 50 and, for the Byzantine peers,
  // 25.
  CHECK(of_values(kvmeld::Krum{.f = 1}, {0, 10, 20, 25, 25}) == 25.0F);
  CHECK(of_values(kvmeld::MultiKrum{.f = 1, .m = 4}, {0, 1, 2, 1000, 1000}) > 200.0F);
  // Two of seven: the rounds keep both, and two of the three values nearest to the median 20 are a
  // Byzantine peer's and beyond all others.
  CHECK(of_values(kvmeld::Bulyan{.f = 1}, {8, 8, 8, 20, 20, 30, 30}) > 20.0F);
}
