// Orders, selections, seams, token matching and mergers, by themselves.
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ByDot;
using kvmeld::ById;
using kvmeld::ByKeyNorm;
using kvmeld::Fuser;
using kvmeld::Source;
using kvmeld::TokenMatch;
using test::Sealed;
using test::TestCache;

// Fragments as policies see them; the fragments and metadata outlive it.
std::vector<Source> sources(const std::vector<Sealed>& fragments,
                            const std::vector<kvmeld::Metadata>& metadata = {}) {
  static const kvmeld::Metadata none;
  std::vector<Source> out;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const kvmeld::Fragment& f = fragments[i].fragment;
    const auto& marks = (metadata.empty() ? none : metadata[i]).marks;
    out.push_back({&f,
                   &f.payloads()[0],
                   metadata.empty() ? &none : &metadata[i],
                   {},
                   marks.empty() ? kvmeld::Dot{} : marks.front().dot});
  }
  return out;
}

// A fragment of one token whose keys, in every layer, are (x, 0, 0, …).
Sealed of_norm(const std::shared_ptr<const kvmeld::Geometry>& g, float x, float value = 1.0F) {
  TestCache cache(g, 1);
  for (std::size_t p = 0; p < cache.planes(); ++p) {
    for (int h = 0; h < cache.shape(p).heads; ++h) {
      for (int c = 0; c < cache.shape(p).channels; ++c)
        cache.set(p, 0, h, c, p % 2 == 1 ? value : c == 0 ? x : 0.0F);
    }
  }
  return {*kvmeld::seal(cache.ref()), cache.dense(), {0}, {}};
}

using Order = std::vector<std::uint32_t>;

template <class P>
std::vector<kvmeld::FragmentId> ordered(const P& policy, const std::vector<Source>& all) {
  const auto order = policy.order(all);
  REQUIRE(order.ok());
  std::vector<kvmeld::FragmentId> out;
  for (const std::uint32_t i : *order) out.push_back(all[i].fragment->id());
  return out;
}

template <class P>
kvmeld::Digest128 digest_of(const P& policy) {
  kvmeld::Hasher hasher;
  policy.digest(hasher);
  return hasher.digest();
}

}  // namespace

TEST_CASE("by key norm: norms 1, 5, 2 come as 1, 2, 5 from every input order") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  std::vector<Sealed> fragments{of_norm(g, 1), of_norm(g, 5), of_norm(g, 2)};
  const std::vector<kvmeld::FragmentId> want{fragments[0].fragment.id(), fragments[2].fragment.id(),
                                             fragments[1].fragment.id()};
  std::sort(fragments.begin(), fragments.end(),
            [](auto& a, auto& b) { return a.fragment.id() < b.fragment.id(); });
  do {
    CHECK(ordered(ByKeyNorm{}, sources(fragments)) == want);
  } while (std::next_permutation(fragments.begin(), fragments.end(), [](auto& a, auto& b) {
    return a.fragment.id() < b.fragment.id();
  }));
}

TEST_CASE("by key norm: equal norms are ordered by id") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  std::vector<Sealed> fragments{of_norm(g, 3), of_norm(g, -3), of_norm(g, 3, 7.0F)};
  const auto by_norm = ordered(ByKeyNorm{}, sources(fragments));
  CHECK(by_norm == ordered(ById{}, sources(fragments)));
  CHECK(std::is_sorted(by_norm.begin(), by_norm.end()));
}

TEST_CASE(
    "by key norm measures stored keys of one layer: the middle one unless told otherwise, in every "
    "element type") {
  using kvmeld::ElementType;
  for (const ElementType type :
       {ElementType::f64, ElementType::f32, ElementType::f16, ElementType::bf16,
        ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::q8_0}) {
    CAPTURE(kvmeld::to_string(type));
    const auto g = test::geometry({.type = type, .layers = 4, .heads = 3, .channels = 96});
    std::vector<Sealed> fragments;
    for (std::uint64_t s = 0; s < 6; ++s)
      fragments.push_back(test::sealed(g, static_cast<std::int64_t>(1 + s % 3), s));
    for (const int layer : {-1, 0, 3}) {
      std::vector<std::pair<double, kvmeld::FragmentId>> plain;
      for (const Sealed& f : fragments) {
        const auto& keys = f.values[static_cast<std::size_t>(layer < 0 ? 2 : layer) * 2];
        double sum = 0.0;
        for (std::size_t row = 0; row < keys.size() / 96; ++row) {
          double square = 0.0;
          for (std::size_t c = 0; c < 96; ++c) square += keys[row * 96 + c] * keys[row * 96 + c];
          sum += std::sqrt(square);
        }
        plain.emplace_back(sum / static_cast<double>(keys.size() / 96), f.fragment.id());
      }
      std::sort(plain.begin(), plain.end());  // random norms are nowhere near 1e-12 of each other
      const auto order = ordered(ByKeyNorm{.layer = layer}, sources(fragments));
      for (std::size_t i = 0; i < plain.size(); ++i) CHECK(order[i] == plain[i].second);
    }
  }
}

TEST_CASE("by provenance: the smallest dot counts, forwards or backwards, ties by id") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const std::vector<Sealed> fragments{of_norm(g, 1), of_norm(g, 2), of_norm(g, 3)};
  const std::vector<kvmeld::Metadata> metadata{
      {{{2, 0}, {3, 0}}, {}}, {{{1, 5}, {9, 0}}, {}}, {{{1, 4}}, {}}};
  const auto all = sources(fragments, metadata);
  CHECK(*ByDot{}.order(all) == Order{2, 1, 0});
  CHECK(*ByDot{.reversed = true}.order(all) == Order{0, 1, 2});
  const std::vector<kvmeld::Metadata> same(3, kvmeld::Metadata{{{1, 1}}, {}});
  CHECK(ordered(ByDot{}, sources(fragments, same)) == ordered(ById{}, sources(fragments)));
  CHECK(ordered(ByDot{.reversed = true}, sources(fragments, same)) ==
        ordered(ById{}, sources(fragments)));
}

TEST_CASE("a window selects the last tokens, or all where there are no more") {
  const auto g = test::geometry({.layers = 1, .channels = 32});
  const std::vector<Sealed> fragments{test::sealed(g, 5, 1)};
  const auto all = sources(fragments);
  const auto chosen = [&](std::int64_t tokens) {
    return *kvmeld::SelectLast{.tokens = tokens}.select(all[0]);
  };
  CHECK(chosen(2) == kvmeld::TokenSet{false, {3, 4}});
  CHECK(chosen(0) == kvmeld::TokenSet{false, {}});
  CHECK(chosen(5) == kvmeld::TokenSet{});
  CHECK(chosen(std::numeric_limits<std::int64_t>::max()) == kvmeld::TokenSet{});
}

TEST_CASE("seams are cut at the end of a sentence, or a chosen number of tokens past it") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  // Two spans of ten tokens; sentences of the second end behind its tokens 3 and 6 (ids 13 and 16).
  const std::vector<Sealed> fragments{test::sealed(g, 10, 1, {.tokens = test::token_ids(10, 10)}),
                                      test::sealed(g, 10, 2, {.tokens = test::token_ids(10, 10)})};
  const auto all = sources(fragments);
  const auto alignment = kvmeld::Concat{}.align(all, 0);
  REQUIRE(alignment.ok());
  const auto holes = [&](const auto& seam) {
    std::vector<std::uint8_t> recompute(20, 0);
    REQUIRE(seam.mark(all, *alignment, recompute).ok());
    // the first span has no seam
    CHECK(std::count(recompute.begin(), recompute.begin() + 10, 1) == 0);
    const auto count = std::count(recompute.begin() + 10, recompute.end(), 1);
    // and the others' lie in front
    CHECK(std::count(recompute.begin() + 10, recompute.begin() + 10 + count, 1) == count);
    return count;
  };
  using kvmeld::SeamShare;
  CHECK(holes(kvmeld::SeamNone{}) == 0);
  CHECK(holes(SeamShare{.share = 0.0F}) == 0);
  CHECK(holes(SeamShare{.share = 0.1F}) == 1);  // not 2, though 0.1F is a little more than a tenth
  CHECK(holes(SeamShare{.share = 0.25F}) == 3);
  CHECK(holes(SeamShare{.share = 1.0F}) == 10);
  const std::vector<kvmeld::TokenId> ends{13, 16};
  CHECK(holes(SeamShare{.share = 0.1F, .boundary_tokens = ends}) == 4);
  CHECK(holes(SeamShare{.share = 0.4F, .boundary_tokens = ends}) == 4);
  CHECK(holes(SeamShare{.share = 0.5F, .boundary_tokens = ends}) == 7);
  // no end follows: all of it
  CHECK(holes(SeamShare{.share = 0.8F, .boundary_tokens = ends}) == 10);
  CHECK(holes(SeamShare{.share = 0.5F, .boundary_tokens = ends, .past_boundary = 2}) == 9);
  CHECK(holes(SeamShare{.share = 0.5F, .boundary_tokens = ends, .past_boundary = 99}) == 10);
  CHECK(holes(SeamShare{.share = 0.0F, .boundary_tokens = ends, .past_boundary = 2}) == 0);
  std::vector<std::uint8_t> recompute(20, 0);
  REQUIRE(kvmeld::SeamAll{}.mark(all, *alignment, recompute).ok());
  CHECK(std::count(recompute.begin(), recompute.end(), 1) == 20);
}

TEST_CASE(
    "token matching is symmetric: no token is lost, each input is used once, positions follow each "
    "other") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const auto with_ids = [&](std::vector<kvmeld::TokenId> ids, std::uint64_t seed) {
    return test::sealed(g, std::ssize(ids), seed, {.tokens = ids});
  };
  const std::vector<Sealed> fragments{with_ids({1, 2, 3, 4}, 1), with_ids({1, 2, 9}, 2),
                                      with_ids({1, 2, 3}, 3)};
  const auto all = sources(fragments);
  using kvmeld::MatchMode;
  for (const MatchMode mode : {MatchMode::index, MatchMode::common_prefix}) {
    const auto a = TokenMatch{.mode = mode}.align(all, 20);
    REQUIRE(a.ok());
    CHECK(a->positions.size() == (mode == MatchMode::index ? 4U : 2U + 2U + 1U + 1U));
    std::vector<int> used(10, 0);
    for (const kvmeld::Contribution& c : a->groups[0].contributions)
      ++used[c.source == 0 ? c.token : 4 + 3 * (c.source - 1) + c.token];
    CHECK(used == std::vector<int>(10, 1));
    for (std::size_t o = 0; o < a->positions.size(); ++o)
      CHECK(a->positions[o] == 20 + static_cast<std::int64_t>(o));
    CHECK(a->groups[0].row(0).size() == 3);
    CHECK(a->tokens[1] == 2);
  }
  CHECK(TokenMatch{}.align({}, 0)->positions.empty());
}

TEST_CASE("a merger takes its parts in any order, and names every one of them") {
  const auto a = kvmeld::merger(ByKeyNorm{.layer = 1}, Aligner{TokenMatch{}}, Fuser{kvmeld::Max{}},
                                kvmeld::SeamAll{}, kvmeld::SelectLast{.tokens = 3});
  const auto b = kvmeld::merger(kvmeld::SelectLast{.tokens = 3}, kvmeld::SeamAll{},
                                Fuser{kvmeld::Max{}}, Aligner{TokenMatch{}}, ByKeyNorm{.layer = 1});
  static_assert(std::is_same_v<decltype(a), decltype(b)>);
  CHECK(a.digest() == b.digest());
  CHECK(a.select.tokens == 3);
  CHECK(a.order.layer == 1);
  const auto defaults = kvmeld::merger();
  static_assert(std::is_same_v<decltype(defaults),
                               const kvmeld::Merger<kvmeld::SelectAll, ByKeyNorm, kvmeld::Concat,
                                                    kvmeld::WeightedMean, kvmeld::SeamNone>>);
  static_assert(defaults.reproducible);
  static_assert(kvmeld::reads(decltype(defaults)::metadata, kvmeld::MetadataFields::confidence));
  static_assert(!kvmeld::reads(decltype(defaults)::metadata, kvmeld::MetadataFields::provenance));
  static_assert(kvmeld::reads(decltype(kvmeld::merger(ByDot{}))::metadata,
                              kvmeld::MetadataFields::provenance));

  const std::vector<kvmeld::Digest128> digests{
      defaults.digest(),
      kvmeld::merger(kvmeld::SelectLast{}).digest(),
      kvmeld::merger(kvmeld::SelectLast{.tokens = 1}).digest(),
      kvmeld::merger(ById{}).digest(),
      kvmeld::merger(ByKeyNorm{.layer = 0}).digest(),
      kvmeld::merger(ByDot{}).digest(),
      kvmeld::merger(ByDot{.reversed = true}).digest(),
      kvmeld::merger(Aligner{TokenMatch{}}).digest(),
      kvmeld::merger(Aligner{TokenMatch{.mode = kvmeld::MatchMode::common_prefix}}).digest(),
      kvmeld::merger(Fuser{kvmeld::Max{}}).digest(),
      kvmeld::merger(Fuser{kvmeld::Sum{}}).digest(),
      kvmeld::merger(Fuser{kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}})
          .digest(),
      kvmeld::merger(kvmeld::SeamAll{}).digest(),
      kvmeld::merger(kvmeld::SeamShare{}).digest(),
      kvmeld::merger(kvmeld::SeamShare{.share = 0.5F}).digest(),
      kvmeld::merger(kvmeld::SeamShare{.boundary_tokens = {3}}).digest(),
      kvmeld::merger(kvmeld::SeamShare{.past_boundary = 1}).digest(),
      a.digest()};
  for (std::size_t i = 0; i < digests.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      CAPTURE(i, j);
      CHECK(digests[i] != digests[j]);
    }
  }
}

TEST_CASE("render ids say what was asked: equal for equal questions, different for any other") {
  const auto g = test::geometry({.channels = 32});
  const std::vector<Sealed> fragments{test::sealed(g, 2, 1), test::sealed(g, 3, 2)};
  const auto id = [&](const kvmeld::FragmentSet& set, const auto& merger,
                      const kvmeld::Target& target) {
    const auto plan = kvmeld::plan(set, merger, target);
    REQUIRE(plan.ok());
    return plan->render_id();
  };
  kvmeld::Target target;
  target.geometry = *g;
  const kvmeld::FragmentSet set = test::set_of(fragments);
  const auto base = id(set, kvmeld::merger(ById{}), target);
  // nobody reads the dots
  CHECK(id(test::set_of({fragments[1], fragments[0]}), kvmeld::merger(ById{}), target) == base);
  CHECK(id(set, kvmeld::merger(ByDot{}), target) != base);
  CHECK(id(test::set_of({fragments[0]}), kvmeld::merger(ById{}), target) != base);
  kvmeld::Target moved = target;
  moved.first_position = 1;
  CHECK(id(set, kvmeld::merger(ById{}), moved) != base);
  kvmeld::FragmentSet confident = set;
  // said again, with a confidence
  REQUIRE(confident.insert(fragments[0].fragment, {1, 7}, 0.5F).ok());
  // a mean declares that it may read it
  CHECK(id(confident, kvmeld::merger(ById{}), target) != base);
  CHECK(id(confident, kvmeld::merger(ById{}, Fuser{kvmeld::Max{}}), target) ==
        id(set, kvmeld::merger(ById{}, Fuser{kvmeld::Max{}}), target));
  // An empty fragment is part of the set, and of no answer.
  kvmeld::FragmentSet with_empty = set;
  REQUIRE(with_empty.insert(test::sealed(g, 0, 1).fragment).ok());
  CHECK(id(with_empty, kvmeld::merger(ById{}), target) == base);
}
