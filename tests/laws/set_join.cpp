// Replicated state: join is a least upper bound, and whoever holds the same operations holds the same set and renders the
// same bytes. Exhaustive for up to five operations, random above.
#include <numeric>

#include <kvmeld/kvmeld.hpp>

#include "support/law.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::FragmentSet;
using kvmeld::Metadata;
using kvmeld::Provenance;

// One operation: an agent produced a fragment, perhaps with a confidence.
struct Operation {
  kvmeld::Fragment fragment;
  Metadata metadata;
};

const std::shared_ptr<const kvmeld::Geometry>& model() {
  static const std::shared_ptr<const kvmeld::Geometry> g = test::geometry({.type = kvmeld::ElementType::f16, .heads = 1, .channels = 32});
  return g;
}

// Fragments of 1 to 4 tokens at gapped positions; made once.
const kvmeld::Fragment& fragment(std::size_t i) {
  static const std::vector<kvmeld::Fragment> all = [] {
    std::vector<kvmeld::Fragment> out;
    for (std::uint64_t s = 0; s < 12; ++s) {
      const auto n = static_cast<std::int64_t>(1 + s % 4);
      out.push_back(test::sealed(model(), n, s, {.tokens = test::token_ids(n), .positions = test::gapped_positions(n, static_cast<std::int64_t>(s))}).fragment);
    }
    return out;
  }();
  return all[i];
}

FragmentSet only(const Operation& op) {
  FragmentSet set;
  if (!set.insert(op.fragment, op.metadata)) std::abort();
  return set;
}
FragmentSet joined(const FragmentSet& a, const FragmentSet& b) {
  auto out = join(a, b);
  if (!out) std::abort();
  return *std::move(out);
}

// Digests of what mergers make of a set: one that reads nothing but ids, one that reads bytes, one that reads confidence
// and matches tokens, one per channel, one that reads provenance and leaves holes.
std::vector<kvmeld::Digest128> rendered(const FragmentSet& set) {
  using kvmeld::Aligner, kvmeld::Fuser, kvmeld::TokenMatch;
  static const auto mergers = std::tuple(
      kvmeld::merger(kvmeld::ById{}), kvmeld::merger(),
      kvmeld::merger(Aligner{TokenMatch{}}, Fuser{kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}}),
      kvmeld::merger(Aligner{TokenMatch{.mode = kvmeld::MatchMode::common_prefix}}, Fuser{kvmeld::Max{}}),
      kvmeld::merger(kvmeld::ByProvenance{}, kvmeld::SeamShare{.share = 0.3F}));
  std::vector<kvmeld::Digest128> out;
  kvmeld::Target target;
  target.geometry = *model();
  const auto render_one = [&](const auto& merger) {
    static_assert(std::remove_cvref_t<decltype(merger)>::reproducible);
    const auto plan = kvmeld::plan(set, merger, target);
    if (!plan) std::abort();
    kvmeld::HostCache cache(model(), plan->tokens());
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, cache.mutable_ref(), {.content_digest = true});
    if (!report) std::abort();
    out.push_back(*report->content_digest);
    out.push_back(report->render_id);
  };
  std::apply([&](const auto&... merger) { (render_one(merger), ...); }, mergers);
  return out;
}

// The joins of operations [begin, end) in every binary tree.
std::vector<FragmentSet> every_tree(const std::vector<Operation>& ops, std::size_t begin, std::size_t end) {
  if (end - begin == 1) return {only(ops[begin])};
  std::vector<FragmentSet> out;
  for (std::size_t cut = begin + 1; cut < end; ++cut) {
    for (const FragmentSet& left : every_tree(ops, begin, cut)) {
      for (const FragmentSet& right : every_tree(ops, cut, end)) out.push_back(joined(left, right));
    }
  }
  return out;
}

Operation draw_operation() {
  Operation op;
  op.fragment = fragment(*rc::gen::inRange<std::size_t>(0, 12));
  const auto agent = *rc::gen::inRange<std::uint64_t>(0, 4);
  if (*rc::gen::inRange(0, 4) != 0) op.metadata.provenance.push_back({agent, *rc::gen::inRange<std::uint64_t>(0, 4)});
  if (*rc::gen::inRange(0, 2) != 0) op.metadata.confidence.emplace_back(agent, *rc::gen::element(0.25F, 0.5F, 1.0F, 2.0F));
  return op;
}
std::vector<Operation> draw_operations(std::size_t most) {
  std::vector<Operation> ops(*rc::gen::inRange<std::size_t>(0, most + 1));
  for (Operation& op : ops) op = draw_operation();
  return ops;
}
FragmentSet inserted(const std::vector<Operation>& ops) {
  FragmentSet set;
  for (const Operation& op : ops) RC_ASSERT(set.insert(op.fragment, op.metadata).ok());
  return set;
}
void shuffle(std::vector<Operation>& ops, std::uint64_t seed) {
  test::Random random(seed);
  for (std::size_t i = ops.size(); i > 1; --i) std::swap(ops[i - 1], ops[random.below(i)]);
}

Metadata draw_metadata() {
  Metadata m;
  for (int i = *rc::gen::inRange(0, 5); i > 0; --i) m.provenance.push_back({*rc::gen::inRange<std::uint64_t>(0, 3), *rc::gen::inRange<std::uint64_t>(0, 3)});
  for (int i = *rc::gen::inRange(0, 4); i > 0; --i) m.confidence.emplace_back(*rc::gen::inRange<std::uint64_t>(0, 3), *rc::gen::element(-0.0F, 0.0F, 0.5F, 1.0F));
  return kvmeld::normalised(m);
}

}  // namespace

TEST_CASE("every order and every join tree of up to five operations gives one set digest and one content digest") {
  // The fourth and the fifth say something more of fragments that are there already.
  const std::vector<Operation> ops{{fragment(3), {{{1, 0}}, {{1, 0.5F}}}},
                                   {fragment(6), {{{2, 0}}, {}}},
                                   {fragment(9), {{{3, 0}}, {{3, 2.0F}}}},
                                   {fragment(6), {{{1, 1}}, {{1, 0.25F}}}},
                                   {fragment(3), {{{0, 7}}, {{1, 0.75F}}}}};
  for (std::size_t n = 1; n <= ops.size(); ++n) {
    std::vector<Operation> some(ops.begin(), ops.begin() + static_cast<std::ptrdiff_t>(n));
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), 0U);
    const FragmentSet want = inserted(some);
    const auto want_rendered = rendered(want);
    std::size_t trees = 0;
    bool same = true;
    do {
      std::vector<Operation> permuted;
      for (const std::size_t i : order) permuted.push_back(some[i]);
      const FragmentSet one_by_one = inserted(permuted);
      same = same && one_by_one.digest() == want.digest() && one_by_one == want;
      for (const FragmentSet& set : every_tree(permuted, 0, n)) {
        ++trees;
        same = same && set.digest() == want.digest() && set == want && rendered(set) == want_rendered;
      }
    } while (std::next_permutation(order.begin(), order.end()));
    CAPTURE(n);
    CHECK(same);
    CHECK(trees == std::vector<std::size_t>{1, 2, 12, 120, 1680}[n - 1]);
  }
}

TEST_CASE("laws of join") {
  test::law("any delivery of the same operations, repeated and reordered over replicas, ends in the same set and bytes", [] {
    std::vector<Operation> ops = draw_operations(40);
    const FragmentSet want = inserted(ops);
    const std::size_t replicas = *rc::gen::inRange<std::size_t>(1, 6);
    std::vector<FragmentSet> sets(replicas);
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    for (std::size_t round = 0; round < 2; ++round) {  // every operation arrives somewhere, many twice
      shuffle(ops, random.next());
      for (const Operation& op : ops) {
        if (round == 1 && random.below(2) == 0) continue;
        RC_ASSERT(sets[random.below(replicas)].insert(op.fragment, op.metadata).ok());
        if (random.below(4) == 0) sets[random.below(replicas)] = joined(sets[random.below(replicas)], sets[random.below(replicas)]);
      }
      for (const Operation& op : ops) RC_ASSERT(sets[0].insert(op.fragment, op.metadata).ok());  // replacing a set may have lost some
    }
    FragmentSet all = sets[0];
    for (const FragmentSet& set : sets) all = random.below(2) == 0 ? joined(all, set) : joined(set, all);
    RC_ASSERT(all == want);
    RC_ASSERT(all.digest() == want.digest());
    RC_ASSERT(rendered(all) == rendered(want));
  });
  test::law("commutative, associative, idempotent, with the empty set as unit", [] {
    const FragmentSet a = inserted(draw_operations(8)), b = inserted(draw_operations(8)), c = inserted(draw_operations(8));
    RC_ASSERT(joined(a, b) == joined(b, a));
    RC_ASSERT(joined(a, b).digest() == joined(b, a).digest());
    RC_ASSERT(joined(joined(a, b), c) == joined(a, joined(b, c)));
    RC_ASSERT(joined(joined(a, b), c).digest() == joined(a, joined(b, c)).digest());
    RC_ASSERT(joined(a, a) == a);
    RC_ASSERT(joined(a, a).digest() == a.digest());
    RC_ASSERT(joined(a, FragmentSet{}) == a);
    RC_ASSERT(joined(FragmentSet{}, a).digest() == a.digest());
  });
  test::law("the least upper bound of its order, in which inserting only rises", [] {
    const FragmentSet a = inserted(draw_operations(6)), b = inserted(draw_operations(6)), c = inserted(draw_operations(6));
    RC_ASSERT(leq(a, a));
    RC_ASSERT((leq(a, joined(a, b)) && leq(b, joined(a, b))));
    RC_ASSERT(leq(a, b) == (joined(a, b) == b));
    RC_ASSERT((!(leq(a, b) && leq(b, a)) || a == b));
    RC_ASSERT((!(leq(a, c) && leq(b, c)) || leq(joined(a, b), c)));
    RC_ASSERT((!leq(a, b) || leq(joined(a, c), joined(b, c))));  // monotone
    FragmentSet more = a;
    const Operation op = draw_operation();
    RC_ASSERT(more.insert(op.fragment, op.metadata).ok());
    RC_ASSERT(leq(a, more));
    RC_ASSERT((leq(more, a) == (more == a)));
  });
  test::law("equal sets have equal digests, and different ones different", [] {
    const FragmentSet a = inserted(draw_operations(3)), b = inserted(draw_operations(3));
    RC_ASSERT((a == b) == (a.digest() == b.digest()));
  });
  test::law("metadata is a join-semilattice of its own", [] {
    const Metadata a = draw_metadata(), b = draw_metadata(), c = draw_metadata();
    const auto two = [](const Metadata& x, const Metadata& y) { return kvmeld::join(x, y); };
    RC_ASSERT(two(a, b) == two(b, a));
    RC_ASSERT(two(two(a, b), c) == two(a, two(b, c)));
    RC_ASSERT(two(a, a) == a);
    RC_ASSERT(two(a, Metadata{}) == a);
    RC_ASSERT(two(a, two(a, b)) == two(a, b));
    RC_ASSERT(kvmeld::normalised(two(a, b)) == two(a, b));
    RC_ASSERT((a.confidence.empty() || b.confidence.empty() ||
               two(a, b).best_confidence() == std::max(a.best_confidence(), b.best_confidence())));
  });
}
