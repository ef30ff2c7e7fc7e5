// The replicated set: what an insert does, what a digest covers, what a join refuses.
#include "support/catch.hpp"
#include "support/random_cache.hpp"

#include <kvmeld/state/fragment_set.hpp>

namespace {

using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::Metadata;
using kvmeld::Provenance;

struct OtherHash : kvmeld::Xxh3_128 {
  static constexpr std::uint8_t tag = 9;
};

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 2) {
  return test::sealed(test::geometry({.layers = 1, .heads = 1, .channels = 32}), tokens, seed).fragment;
}

}  // namespace

TEST_CASE("the same fragment from several agents is one entry with all of their dots") {
  const Fragment f = fragment(1, 308);
  FragmentSet set;
  for (std::uint64_t agent = 4; agent-- > 0;) REQUIRE(set.insert(f, {agent, 10 - agent}, 0.25F * static_cast<float>(agent)).ok());
  REQUIRE(set.insert(f, {3, 7}, 0.5F).ok());  // delivered twice, the second time less confident
  REQUIRE(set.size() == 1);
  const Metadata& m = set.entries()[0].metadata;
  CHECK(m.provenance == std::vector<Provenance>{{0, 10}, {1, 9}, {2, 8}, {3, 7}});
  CHECK(m.confidence == std::vector<std::pair<std::uint64_t, float>>{{0, 0.0F}, {1, 0.25F}, {2, 0.5F}, {3, 0.75F}});
  CHECK(m.best_confidence() == 0.75F);
  CHECK(Metadata{}.best_confidence() == 1.0F);
  CHECK(set.find(f.id()) == &set.entries()[0]);
  CHECK(set.find(fragment(2).id()) == nullptr);
}

TEST_CASE("the digest covers ids, dots and confidence, and nothing else") {
  const Fragment a = fragment(1), b = fragment(2);
  const auto digest = [](auto... inserts) {
    FragmentSet set;
    const auto insert = [&](const auto& i) { REQUIRE(set.insert(i.first, i.second).ok()); };
    (insert(inserts), ...);
    return set.digest();
  };
  using Insert = std::pair<Fragment, Metadata>;
  const Metadata none, dot{{{1, 2}}, {}}, other_dot{{{1, 3}}, {}}, other_agent{{{2, 2}}, {}}, sure{{{1, 2}}, {{1, 0.5F}}}, surer{{{1, 2}}, {{1, 0.75F}}},
      other_sure{{{1, 2}}, {{2, 0.5F}}};
  const std::vector<kvmeld::Digest256> all{FragmentSet{}.digest(),        digest(Insert{a, none}),       digest(Insert{b, none}),
                                           digest(Insert{a, dot}),        digest(Insert{a, other_dot}),  digest(Insert{a, other_agent}),
                                           digest(Insert{a, sure}),       digest(Insert{a, surer}),      digest(Insert{a, other_sure}),
                                           digest(Insert{a, none}, Insert{b, none}), digest(Insert{a, dot}, Insert{b, none}),
                                           digest(Insert{a, none}, Insert{b, dot})};
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      CAPTURE(i, j);
      CHECK(all[i] != all[j]);
    }
  }
  CHECK(digest(Insert{test::evicted(a), dot}) == digest(Insert{a, dot}));  // eviction does not change it
  CHECK(digest(Insert{a, dot}, Insert{a, dot}) == digest(Insert{a, dot}));
  CHECK(all[0].hex() == std::string(64, '0'));
  CHECK(all[1].hex().size() == 64);
}

TEST_CASE("metadata in any form is one and the same") {
  const Fragment f = fragment(1);
  FragmentSet tidy, untidy, zero, minus_zero;
  REQUIRE(tidy.insert(f, Metadata{{{1, 1}, {1, 2}, {2, 0}}, {{1, 0.5F}, {3, 0.75F}}}).ok());
  REQUIRE(untidy.insert(f, Metadata{{{2, 0}, {1, 2}, {1, 1}, {1, 2}}, {{3, 0.75F}, {1, 0.25F}, {1, 0.5F}}}).ok());
  CHECK(tidy == untidy);
  CHECK(tidy.digest() == untidy.digest());
  REQUIRE(zero.insert(f, {1, 0}, 0.0F).ok());
  REQUIRE(minus_zero.insert(f, {1, 0}, -0.0F).ok());
  CHECK(zero.digest() == minus_zero.digest());
  const auto one = join(zero, minus_zero), two = join(minus_zero, zero);
  CHECK(one->digest() == two->digest());
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
    const auto payloads = set.entries()[0].fragment.payloads();
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
  FragmentSet set, others;
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
  CHECK(join(FragmentSet{}, others)->digest() == others.digest());
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
    const auto word = [&] { return random.below(3) == 0 ? 0 : random.below(3) == 0 ? full : random.next(); };
    const Digest256 a{{word(), word(), word(), word()}}, b{{word(), word(), word(), word()}};
    Digest256 ab = a, ba = b;
    ab.add(b);
    ba.add(a);
    REQUIRE(ab == ba);
    ab.subtract(b);
    REQUIRE(ab == a);
  }
}
