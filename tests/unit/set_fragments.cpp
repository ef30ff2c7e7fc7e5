// The replicated set: what an insert does, what a digest covers, what a join refuses.
#include "support/catch.hpp"
#include "support/random_cache.hpp"

#include <limits>
#include <set>

#include <kvmeld/fragment_set.hpp>

namespace {

using kvmeld::Dot;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::Metadata;

struct OtherHash : kvmeld::Xxh3_128 {
  static constexpr std::uint8_t tag = 9;
};

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 2) {
  return test::sealed(test::geometry({.layers = 1, .heads = 1, .channels = 32}), tokens, seed)
      .fragment;
}

}  // namespace

TEST_CASE("the same fragment from several agents is one entry with all of their dots") {
  const Fragment f = fragment(1, 308);
  FragmentSet set;
  for (std::uint64_t agent = 4; agent-- > 0;)
    REQUIRE(set.insert(f, {agent, 10 - agent}, 0.25F * static_cast<float>(agent)).ok());
  REQUIRE(set.insert(f, {3, 7}, 0.75F).ok());      // delivered twice
  REQUIRE(set.insert(f, {1, 3, 1}, 0.125F).ok());  // said again in a later life, less sure
  REQUIRE(set.size() == 1);
  const Metadata& m = set.entries().front().metadata;
  std::vector<Dot> dots;
  for (const kvmeld::Mark& mark : m.marks) dots.push_back(mark.dot);
  CHECK(dots == std::vector<Dot>{{0, 10}, {1, 9}, {1, 3, 1}, {2, 8}, {3, 7}});
  CHECK(m.best_confidence() == 0.75F);
  CHECK(m.confidence_of(1) == 0.25F);
  CHECK_FALSE(m.confidence_of(9));
  CHECK(Metadata{}.best_confidence() == 1.0F);
  CHECK(set.find(f.id()) == &set.entries().front());
  CHECK(set.find(fragment(2).id()) == nullptr);
}

TEST_CASE("the digest covers ids, dots, confidence and successors, and nothing else") {
  const Fragment a = fragment(1), b = fragment(2);
  std::vector<kvmeld::Digest256> all{FragmentSet{}.digest()};
  const auto add = [&](auto&& fill) {
    FragmentSet set;
    fill(set);
    all.push_back(set.digest());
  };
  const auto ok = [](const kvmeld::Status& status) { REQUIRE(status.ok()); };
  add([&](FragmentSet& s) { ok(s.insert(a)); });
  add([&](FragmentSet& s) { ok(s.insert(b)); });
  add([&](FragmentSet& s) {
    ok(s.insert(a));
    ok(s.insert(b));
  });
  add([&](FragmentSet& s) { ok(s.insert(a, {1, 2})); });
  add([&](FragmentSet& s) {
    ok(s.insert(a, {1, 2}));
    ok(s.insert(a));
  });
  add([&](FragmentSet& s) { ok(s.insert(a, {1, 3})); });
  add([&](FragmentSet& s) { ok(s.insert(a, {2, 2})); });
  add([&](FragmentSet& s) { ok(s.insert(a, {1, 2, 5})); });
  add([&](FragmentSet& s) { ok(s.insert(a, {1, 2}, 0.5F)); });
  add([&](FragmentSet& s) { ok(s.insert(a, {1, 2}, 0.75F)); });
  add([&](FragmentSet& s) { ok(s.insert(a, {1, 2}, 0.0F)); });
  add([&](FragmentSet& s) {
    ok(s.insert(a, {1, 2}));
    ok(s.supersede(a.id(), b.id(), {1, 4}));
  });
  add([&](FragmentSet& s) {
    ok(s.insert(a, {1, 2}));
    ok(s.insert(a, {1, 4}));
  });
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      CAPTURE(i, j);
      CHECK(all[i] != all[j]);
    }
  }
  CHECK(all[0].hex() == std::string(64, '0'));
  CHECK(all[1].hex().size() == 64);
  FragmentSet once, twice, evicted, late, minus_zero, removed;
  ok(once.insert(a, {1, 2}, 0.0F));
  ok(twice.insert(a, {1, 2}, 0.0F));
  ok(twice.insert(a, {1, 2}, 0.0F));
  ok(evicted.insert(test::evicted(a), {1, 2}, 0.0F));
  ok(late.insert(a, {1, 2}, 0.0F, 1'700'000'000'000));
  ok(minus_zero.insert(a, {1, 2}, -0.0F));
  for (const FragmentSet* same : {&twice, &evicted, &late, &minus_zero})
    CHECK(same->digest() == once.digest());
  ok(removed.insert(a, {1, 2}));
  ok(removed.remove(a.id(), {1, 3}));
  CHECK(removed.digest() == all[0]);
}

TEST_CASE("a dot names one operation for ever") {
  const Fragment a = fragment(1), b = fragment(2);
  FragmentSet set;
  REQUIRE(set.insert(a, {1, 0}, 0.5F).ok());
  const auto before = set.digest();
  CHECK(set.insert(b, {1, 0}).code() == ErrorCode::dot_reused);
  CHECK(set.insert(a, {1, 0}, 0.75F).code() == ErrorCode::dot_reused);
  CHECK(set.remove(a.id(), {1, 0}).code() == ErrorCode::dot_reused);
  CHECK(set.supersede(a.id(), b.id(), {1, 0}).code() == ErrorCode::dot_reused);
  CHECK(set.insert(a, {1, kvmeld::max_sequence + 1}).code() == ErrorCode::invalid_argument);
  CHECK(set.insert(a, {1, 1}, std::numeric_limits<float>::infinity()).code() ==
        ErrorCode::non_finite);
  CHECK(set.remove(b.id(), {1, 1}).code() == ErrorCode::not_found);
  CHECK(set.supersede(b.id(), a.id(), {1, 1}).code() == ErrorCode::not_found);
  CHECK(set.supersede(a.id(), a.id(), {1, 1}).code() == ErrorCode::invalid_argument);
  CHECK(set.evict(b.id()).code() == ErrorCode::not_found);
  CHECK(set.digest() == before);
  REQUIRE(set.remove(a.id(), {1, 1}).ok());
  // it was removed: a replay brings nothing back
  CHECK(set.insert(a, {1, 0}, 0.5F).code() == ErrorCode::dot_reused);
  CHECK(set.empty());
  REQUIRE(set.insert(a).ok());
  CHECK(set.remove(a.id(), {1, 2}).code() == ErrorCode::unsupported);
  CHECK(set.insert(b, {2, 3}).ok());
  CHECK(set.context().next_sequence(2, 0) == 4);
  CHECK(set.context().next_sequence(1, 0) == 2);
  CHECK(set.context().next_sequence(1, 7) == 0);
}

TEST_CASE(
    "a removed payload stays until the removal is stable, an evicted one comes back by restore") {
  const Fragment a = fragment(1);
  FragmentSet set, other;
  REQUIRE(set.insert(a, {1, 0}).ok());
  REQUIRE(set.evict(a.id()).ok());
  CHECK_FALSE(set.find(a.id())->complete());
  CHECK_FALSE(set.payload(a.id()).payloads()[0].bytes);
  REQUIRE(set.restore(a).ok());
  CHECK(set.find(a.id())->complete());
  // another agent knows the content, this set has the bytes
  REQUIRE(other.insert(test::evicted(a), {2, 0}).ok());
  REQUIRE(set.remove(a.id(), {1, 1}).ok());
  set.compact({});
  CHECK(set.payload(a.id()).valid());
  REQUIRE(set.join(other).ok());
  CHECK(set.find(a.id())->complete());
  REQUIRE(set.remove(a.id(), {1, 2}).ok());
  set.compact(set.context());
  CHECK_FALSE(set.payload(a.id()).valid());
  CHECK(set.removals().empty());
  // knows the fragment, and nothing of its removals, which are compacted by now
  FragmentSet absent;
  REQUIRE(absent.insert(a, {1, 0}).ok());
  REQUIRE(absent.join(set.delta_since(absent.context())).ok());
  CHECK(absent.empty());
  CHECK(absent.context() == set.context());
  CHECK(set.delta_since(set.context()).empty());
}

TEST_CASE("what is superseded stays in the set and out of the render, and circles keep one") {
  std::vector<Fragment> f;
  for (std::uint64_t i = 0; i < 5; ++i) f.push_back(fragment(i));
  std::sort(f.begin(), f.end(),
            [](const Fragment& a, const Fragment& b) { return a.id() < b.id(); });
  FragmentSet set;
  std::uint64_t dot = 0;
  for (const Fragment& one : f) REQUIRE(set.insert(one, {1, dot++}).ok());
  const auto left = [&] {
    std::vector<std::size_t> out;
    for (const auto& [entry, place] : in_force(set)) {
      out.push_back(static_cast<std::size_t>(
          std::find_if(f.begin(), f.end(), [&](const Fragment& x) { return x.id() == entry->id; }) -
          f.begin()));
    }
    return out;
  };
  const auto supersede = [&](std::size_t old, std::size_t by) {
    REQUIRE(set.supersede(f[old].id(), f[by].id(), {1, dot++}).ok());
  };
  CHECK(left() == std::vector<std::size_t>{0, 1, 2, 3, 4});
  supersede(4, 2);
  CHECK(left() == std::vector<std::size_t>{0, 1, 2, 3});
  supersede(2, 1);
  CHECK(left() == std::vector<std::size_t>{0, 1, 3});
  supersede(1, 4);  // 4 -> 2 -> 1 -> 4
  CHECK(left() == std::vector<std::size_t>{0, 1, 3});
  supersede(3, 4);  // leads into the circle
  CHECK(left() == std::vector<std::size_t>{0, 1});
  // a successor that nobody has
  REQUIRE(set.supersede(f[0].id(), fragment(99).id(), {1, dot++}).ok());
  CHECK(left() == std::vector<std::size_t>{0, 1});
  REQUIRE(set.remove(f[1].id(), {1, dot++}).ok());
  CHECK(left() == std::vector<std::size_t>{0, 2});
  CHECK(set.size() == 4);
}

TEST_CASE("parts that cannot be one set are refused") {
  using Entry = FragmentSet::Entry;
  const Fragment a = fragment(1), b = fragment(2);
  const auto code = [](std::vector<Entry> entries, std::vector<kvmeld::Removal> removals = {},
                       const kvmeld::CausalContext& compacted = {}) {
    return FragmentSet::from_parts({}, std::move(entries), std::move(removals), compacted)
        .status()
        .code();
  };
  const Entry ea{a.id(), {}, {{{{1, 0}}}, false}}, eb{b.id(), {}, {{{{1, 0}}}, false}};
  CHECK(code({ea}) == ErrorCode::ok);
  CHECK(code({ea, eb}) == ErrorCode::dot_reused);
  CHECK(code({ea, ea}) == ErrorCode::corrupt);
  CHECK(code({{a.id(), b, ea.metadata}}) == ErrorCode::corrupt);
  CHECK(code({{a.id(), {}, {}}}) == ErrorCode::corrupt);
  CHECK(code({ea}, {{{1, 1}, b.id(), {{1, 0}}}}) == ErrorCode::corrupt);
  CHECK(code({ea}, {{{1, 0}, b.id(), {}}}) == ErrorCode::dot_reused);
  kvmeld::CausalContext compacted;
  compacted.add({1, 0});
  CHECK(code({ea}, {}, compacted) == ErrorCode::corrupt);
  CHECK(code({{a.id(), {}, {{{{1, 0}, std::numeric_limits<float>::quiet_NaN()}}, false}}}) ==
        ErrorCode::non_finite);
  CHECK(code({{a.id(), {}, {{{{1, 0}, {}, a.id()}}, false}}}) == ErrorCode::corrupt);
}

TEST_CASE("a context is a set of dots in ranges") {
  using kvmeld::CausalContext;
  test::Random random(3);
  for (int round = 0; round < 200; ++round) {
    CausalContext a, b;
    std::set<Dot> in_a, in_b;
    for (int i = 0; i < 30; ++i) {
      const Dot dot{random.below(2), random.below(12), random.below(2)};
      if (random.below(2) == 0) {
        CHECK(a.add(dot) == in_a.insert(dot).second);
      } else {
        CHECK(b.add(dot) == in_b.insert(dot).second);
      }
    }
    const auto same = [](const CausalContext& context, const std::set<Dot>& dots) {
      CausalContext fresh;
      for (const Dot& dot : dots) fresh.add(dot);
      return context == fresh && context.dots() == dots.size();
    };
    std::set<Dot> both, common;
    std::set_union(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
                   std::inserter(both, both.end()));
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
                          std::inserter(common, common.end()));
    CausalContext joined = a;
    joined.join(b);
    REQUIRE(same(a, in_a));
    REQUIRE(same(joined, both));
    REQUIRE(same(meet(a, b), common));
    REQUIRE(leq(a, joined));
    REQUIRE(leq(meet(a, b), b));
    REQUIRE(leq(a, b) == std::includes(in_b.begin(), in_b.end(), in_a.begin(), in_a.end()));
    for (std::uint64_t s = 0; s < 12; ++s)
      REQUIRE(a.contains({1, s, 1}) == (in_a.count({1, s, 1}) == 1));
  }
}

TEST_CASE("a payload that one side still has is kept") {
  const Fragment whole = fragment(1);
  test::TestCache cache(whole.shared_geometry(), 2);
  cache.fill(9);
  const auto both = kvmeld::with_variant(whole, cache.ref(), {});
  REQUIRE(both.ok());
  FragmentSet first, second;
  REQUIRE(first.insert(test::evicted(*both, 0)).ok());
  REQUIRE(second.insert(test::evicted(*both, 1)).ok());
  const auto complete = [](const FragmentSet& set) {
    const auto payloads = set.entries().front().fragment.payloads();
    return payloads[0].bytes != nullptr && payloads[1].bytes != nullptr;
  };
  CHECK(complete(*join(first, second)));
  CHECK(complete(*join(second, first)));
  CHECK(first == second);  // the id is there, whatever of the bytes
  REQUIRE(first.insert(*both).ok());
  CHECK(complete(first));
  REQUIRE(first.insert(test::evicted(*both, 0)).ok());  // an older handle takes nothing away
  CHECK(complete(first));
}

TEST_CASE("fragments of another content hash, or none, are refused and change nothing") {
  test::TestCache cache(test::geometry({.layers = 1, .heads = 1, .channels = 32}), 2);
  cache.fill(1);
  const auto other = kvmeld::seal<OtherHash>(cache.ref());
  REQUIRE(other.ok());
  FragmentSet set;
  FragmentSet others(kvmeld::SetHash{OtherHash::tag, nullptr});
  REQUIRE(set.insert(fragment(1)).ok());
  const auto before = set.digest();
  const auto status = set.insert(*other);
  CHECK(status.code() == ErrorCode::hash_mismatch);
  CHECK(status.message().find("hash tag 1") != std::string::npos);
  CHECK(set.insert(Fragment{}).code() == ErrorCode::invalid_argument);
  CHECK(set.digest() == before);
  CHECK(set.size() == 1);
  REQUIRE(others.insert(*other).ok());
  CHECK(join(set, others).error().code() == ErrorCode::hash_mismatch);
  CHECK(join(set, FragmentSet{})->digest() == before);
  CHECK_FALSE(leq(set, others));
}

TEST_CASE("sums mod 2^256 carry and borrow across words") {
  using kvmeld::Digest256;
  constexpr std::uint64_t full = ~std::uint64_t{0};
  const Digest256 one{{1, 0, 0, 0}}, top{{full, full, full, full}};
  Digest256 sum = top;
  sum.add(one);
  CHECK(sum == Digest256{});
  sum.subtract(one);
  CHECK(sum == top);
  Digest256 low{{full, 0, full, 0}};
  low.add(Digest256{{full, full, 0, 0}});
  CHECK(low == Digest256{{full - 1, 0, 0, 1}});
  low.subtract(Digest256{{full, full, 0, 0}});
  CHECK(low == Digest256{{full, 0, full, 0}});
  test::Random random(5);
  for (int i = 0; i < 1000; ++i) {
    const auto word = [&] {
      return random.below(3) == 0 ? 0 : random.below(3) == 0 ? full : random.next();
    };
    const Digest256 a{{word(), word(), word(), word()}}, b{{word(), word(), word(), word()}};
    Digest256 ab = a, ba = b;
    ab.add(b);
    ba.add(a);
    REQUIRE(ab == ba);
    ab.subtract(b);
    REQUIRE(ab == a);
  }
}

TEST_CASE(
    "what can never be rendered beside a set's fragments is refused when it is inserted, and says "
    "what differs") {
  const auto base = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const auto changed = [&](auto&& change) {
    auto g = std::make_shared<kvmeld::Geometry>(*base);
    change(*g);
    return test::sealed(std::shared_ptr<const kvmeld::Geometry>(g), 2, 7).fragment;
  };
  FragmentSet set;
  REQUIRE(set.insert(test::sealed(base, 2, 1).fragment, {1, 0}).ok());
  const auto before = set.digest();
  const Fragment wider = changed([](kvmeld::Geometry& g) { g.layers.push_back(g.layers[0]); });
  const Fragment other_base = changed([](kvmeld::Geometry& g) { g.layers[0].rope.base *= 2; });
  const Fragment other_tenant = changed([](kvmeld::Geometry& g) { g.tenant = "other"; });
  for (const Fragment& f : {wider, other_base, other_tenant}) {
    const kvmeld::Status with_dot = set.insert(f, {1, 1}), without = set.insert(f);
    CHECK(with_dot.code() == ErrorCode::geometry_mismatch);
    CHECK(without.code() == ErrorCode::geometry_mismatch);
    CHECK(with_dot.message().find(f.id().hex()) != std::string::npos);
    CHECK(set.digest() == before);
  }
  CHECK(set.insert(wider, {1, 1}).message().find("layer count") != std::string::npos);
  const Fragment other_house = changed([](kvmeld::Geometry& g) {
    g.model = "larger";
    g.tenant = "other";
  });
  CHECK(set.insert(other_house, {1, 1}).message().find("tenant differs") != std::string::npos);
  // Another model's may be mapped; and what others inserted is joined, or replicas would not
  // converge.
  CHECK(set.insert(changed([](kvmeld::Geometry& g) {
                     g.model = "larger";
                     g.layers.push_back(g.layers[0]);
                   }),
                   {1, 1})
            .ok());
  FragmentSet others;
  REQUIRE(others.insert(wider, {2, 0}).ok());
  CHECK(set.join(others).ok());
  CHECK(set.size() == 3);
}
