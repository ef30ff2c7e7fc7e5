// Replicated state: join is a least upper bound, and whoever holds the same operations holds the
// same set and renders the same bytes. Exhaustive for up to five operations, random above.
#include <numeric>

#include <kvmeld/kvmeld.hpp>

#include "support/law.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::Dot;
using kvmeld::FragmentId;
using kvmeld::FragmentSet;

const std::shared_ptr<const kvmeld::Geometry>& model() {
  static const std::shared_ptr<const kvmeld::Geometry> g =
      test::geometry({.type = kvmeld::ElementType::f16, .heads = 1, .channels = 32});
  return g;
}

// Fragments of 1 to 4 tokens at gapped positions; made once.
const kvmeld::Fragment& fragment(std::size_t i) {
  static const std::vector<kvmeld::Fragment> all = [] {
    std::vector<kvmeld::Fragment> out;
    for (std::uint64_t s = 0; s < 12; ++s) {
      const auto n = static_cast<std::int64_t>(1 + s % 4);
      out.push_back(
          test::sealed(model(), n, s,
                       {.tokens = test::token_ids(n),
                        .positions = test::gapped_positions(n, static_cast<std::int64_t>(s))})
              .fragment);
    }
    return out;
  }();
  return all[i];
}

FragmentSet joined(const FragmentSet& a, const FragmentSet& b) {
  auto out = join(a, b);
  if (!out) std::abort();
  return *std::move(out);
}

// Digests of what mergers make of a set: one that reads nothing but ids, one that reads bytes, one
// that reads confidence and matches tokens, one per channel, one that reads provenance and leaves
// holes.
std::vector<kvmeld::Digest128> rendered(const FragmentSet& set) {
  using kvmeld::Aligner, kvmeld::Fuser, kvmeld::TokenMatch;
  static const auto mergers = std::tuple(
      kvmeld::merger(kvmeld::ById{}), kvmeld::merger(),
      kvmeld::merger(Aligner{TokenMatch{}},
                     Fuser{kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}}),
      kvmeld::merger(Aligner{TokenMatch{.mode = kvmeld::MatchMode::common_prefix}},
                     Fuser{kvmeld::Max{}}),
      kvmeld::merger(kvmeld::ByDot{}, kvmeld::SeamShare{.share = 0.3F}));
  std::vector<kvmeld::Digest128> out;
  kvmeld::Target target;
  target.geometry = *model();
  const auto render_one = [&](const auto& merger) {
    static_assert(std::remove_cvref_t<decltype(merger)>::reproducible);
    const auto plan = kvmeld::plan(set, merger, target);
    if (!plan) std::abort();
    kvmeld::HostCache cache(model(), plan->tokens());
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, cache.mutable_ref(),
                                    {.content_digest = true});
    if (!report) std::abort();
    out.push_back(*report->content_digest);
    out.push_back(report->render_id);
  };
  std::apply([&](const auto&... merger) { (render_one(merger), ...); }, mergers);
  return out;
}

// The joins of parts [begin, end) in every binary tree.
std::vector<FragmentSet> every_tree(const std::vector<FragmentSet>& parts, std::size_t begin,
                                    std::size_t end) {
  if (end - begin == 1) return {parts[begin]};
  std::vector<FragmentSet> out;
  for (std::size_t cut = begin + 1; cut < end; ++cut) {
    for (const FragmentSet& left : every_tree(parts, begin, cut)) {
      for (const FragmentSet& right : every_tree(parts, cut, end))
        out.push_back(joined(left, right));
    }
  }
  return out;
}

// What somebody did, written down apart from the library: the reference is "in force = inserted and
// not removed".
struct Operation {
  Dot dot;
  FragmentId id;
  std::optional<float> confidence;
  FragmentId superseded_by;
  std::vector<Dot> removed;
  bool removal = false;
};

// What a set must hold given what it has seen, by the log of all that was done: marks in force are
// those seen whose removals are not, and every removal seen stands in the log of removals, word for
// word, or is compacted away.
bool matches_reference(const FragmentSet& set, const std::vector<Operation>& done) {
  const auto gone = [&](const Dot& dot) {
    return std::any_of(done.begin(), done.end(), [&](const Operation& other) {
      return set.context().contains(other.dot) &&
             std::find(other.removed.begin(), other.removed.end(), dot) != other.removed.end();
    });
  };
  std::vector<std::pair<FragmentId, kvmeld::Mark>> want;
  std::vector<kvmeld::Removal> removals;
  for (const Operation& op : done) {
    if (!set.context().contains(op.dot)) continue;
    if (op.removal && !set.compacted().contains(op.dot)) {
      removals.push_back({op.dot, op.id, op.removed});
    } else if (op.removal) {
      for (const Dot& dot : op.removed) {
        if (!set.compacted().contains(dot)) return false;
      }
    } else if (!gone(op.dot)) {
      want.push_back({op.id, {op.dot, op.confidence, op.superseded_by}});
    }
  }
  std::sort(want.begin(), want.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second.dot < b.second.dot;
  });
  std::vector<std::pair<FragmentId, kvmeld::Mark>> have;
  for (const FragmentSet::Entry& entry : set.entries()) {
    if (!entry.complete()) return false;  // every part that is sent brings its bytes
    for (const kvmeld::Mark& mark : entry.metadata.marks) have.emplace_back(entry.id, mark);
  }
  std::sort(removals.begin(), removals.end(),
            [](const auto& a, const auto& b) { return a.dot < b.dot; });
  return have == want &&
         std::equal(removals.begin(), removals.end(), set.removals().begin(), set.removals().end());
}

// Replicas that do things and gossip, with a log of all that was done. After each step whoever
// changed is checked.
struct History {
  explicit History(std::uint64_t seed, std::size_t replicas)
      : random(seed), sets(replicas), next(replicas, 0) {}

  void act() {
    const std::size_t r = random.below(sets.size());
    FragmentSet& set = sets[r];
    Operation op;
    op.dot = {r % 3, next[r]++, r};  // some share an agent and differ in epoch
    const auto kind = random.below(8);
    const auto some = [&] {
      auto at = set.entries().begin();
      for (std::uint64_t i = random.below(set.size()); i > 0; --i) ++at;
      return at->id;
    };
    if (kind < 5 || set.empty()) {
      const kvmeld::Fragment& f = fragment(random.below(12));
      op.id = f.id();
      if (random.below(2) == 0) op.confidence = 0.25F * static_cast<float>(1 + random.below(4));
      if (!set.insert(f, op.dot, op.confidence)) std::abort();
    } else if (kind == 5) {
      op.id = some();
      op.superseded_by = fragment(random.below(12)).id();
      if (op.superseded_by == op.id) return;
      if (!set.supersede(op.id, op.superseded_by, op.dot)) std::abort();
    } else {
      op.id = some();
      op.removal = true;
      for (const kvmeld::Mark& mark : set.find(op.id)->metadata.marks)
        op.removed.push_back(mark.dot);
      if (!set.remove(op.id, op.dot)) std::abort();
    }
    done.push_back(op);
    REQUIRE(matches_reference(set, done));
  }
  // What is lacking is as good as everything: afterwards one has seen what either had.
  void gossip() {
    FragmentSet& to = sets[random.below(sets.size())];
    const FragmentSet& from = sets[random.below(sets.size())];
    kvmeld::CausalContext both = to.context();
    both.join(from.context());
    const bool delta = random.below(2) == 0;
    if (!to.join(delta ? from.delta_since(to.context()) : from)) std::abort();
    REQUIRE(to.context() == both);
    REQUIRE(matches_reference(to, done));
    deltas += delta && &to != &from;
  }
  // Forgets what everybody has seen and nothing else; payloads stay as long as a removal of theirs
  // does. At times somebody is not counted as a member, and learns later, from ranges, of what was
  // forgotten.
  void compact() {
    FragmentSet& set = sets[random.below(sets.size())];
    const std::size_t absent = random.below(2 * sets.size());
    kvmeld::CausalContext stable = set.context();
    for (std::size_t i = 0; i < sets.size(); ++i) {
      if (i != absent) stable = meet(stable, sets[i].context());
    }
    const FragmentSet before = set;
    set.compact(stable);
    REQUIRE(set == before);
    REQUIRE(set.context() == before.context());
    kvmeld::CausalContext gone = before.compacted();
    for (const kvmeld::Removal& removal : before.removals()) {
      if (!stable.contains(removal.dot)) continue;
      gone.add(removal.dot);
      for (const Dot& dot : removal.removed) gone.add(dot);
    }
    REQUIRE(set.compacted() == gone);
    REQUIRE(matches_reference(set, done));
    bool right = true;
    for (std::size_t i = 0; i < 12; ++i) {
      const FragmentId id = fragment(i).id();
      const bool named = std::any_of(set.removals().begin(), set.removals().end(),
                                     [&](const auto& r) { return r.id == id; });
      const bool had = before.payload(id).valid();
      right = right && set.payload(id).valid() == (had && (set.find(id) != nullptr || named));
      kept += had && named && set.find(id) == nullptr;
    }
    REQUIRE(right);
  }

  std::size_t deltas = 0, kept = 0;
  test::Random random;
  std::vector<FragmentSet> sets;
  std::vector<std::uint64_t> next;
  std::vector<Operation> done;
};

FragmentSet drawn_set(std::uint64_t agent) {
  History history(*rc::gen::arbitrary<std::uint64_t>(), 1);
  FragmentSet set;
  for (int i = *rc::gen::inRange(0, 8); i > 0; --i) {
    const kvmeld::Fragment& f = fragment(*rc::gen::inRange<std::size_t>(0, 12));
    RC_ASSERT(set.insert(f, {agent, static_cast<std::uint64_t>(i), 0}, 0.5F).ok());
    if (*rc::gen::inRange(0, 3) == 0)
      RC_ASSERT(set.remove(f.id(), {agent, static_cast<std::uint64_t>(100 + i), 0}).ok());
  }
  return set;
}

}  // namespace

TEST_CASE(
    "every order and every join tree of up to five operations gives one set digest and one content "
    "digest") {
  // Two agents know one fragment, one supersedes it, one removes what it has seen of another.
  FragmentSet a, b;
  std::vector<FragmentSet> ops;
  const auto push = [&](FragmentSet& of, auto&& change) {
    const kvmeld::CausalContext before = of.context();
    REQUIRE(change().ok());
    ops.push_back(of.delta_since(before));
  };
  push(a, [&] { return a.insert(fragment(3), {1, 0}, 0.5F); });
  push(b, [&] { return b.insert(fragment(6), {2, 0}); });
  push(a, [&] { return a.insert(fragment(9), {1, 1}, 2.0F); });
  push(b, [&] { return b.supersede(fragment(6).id(), fragment(9).id(), {2, 1}); });
  REQUIRE(b.insert(fragment(3), {2, 2}, 0.75F).ok());
  REQUIRE(b.join(ops[0]).ok());
  push(a, [&] { return a.remove(fragment(3).id(), {1, 2}); });
  for (std::size_t n = 1; n <= ops.size(); ++n) {
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), 0U);
    FragmentSet want;
    for (std::size_t i = 0; i < n; ++i) REQUIRE(want.join(ops[i]).ok());
    const auto want_rendered = rendered(want);
    std::size_t trees = 0;
    bool same = true;
    do {
      std::vector<FragmentSet> permuted;
      for (const std::size_t i : order) permuted.push_back(ops[i]);
      for (const FragmentSet& set : every_tree(permuted, 0, n)) {
        ++trees;
        same = same && set.digest() == want.digest() && set == want &&
               set.context() == want.context() && rendered(set) == want_rendered;
      }
    } while (std::next_permutation(order.begin(), order.end()));
    CAPTURE(n);
    CHECK(same);
    CHECK(trees == std::vector<std::size_t>{1, 2, 12, 120, 1680}[n - 1]);
  }
}

TEST_CASE(
    "10,000 random histories of insertions, supersessions, removals, deltas and compactions end as "
    "the reference says") {
  std::size_t removals = 0, compactions = 0, deltas = 0, kept = 0;
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    CAPTURE(seed);
    History history(seed, 1 + seed % 5);
    for (std::uint64_t step = 8 + history.random.below(24); step > 0; --step) {
      const auto what = history.random.below(10);
      what < 5 ? history.act() : what < 9 ? history.gossip() : history.compact();
    }
    removals += static_cast<std::size_t>(std::count_if(
        history.done.begin(), history.done.end(), [](const Operation& op) { return op.removal; }));
    compactions += history.sets[0].compacted().empty() ? 0U : 1U;
    deltas += history.deltas;
    kept += history.kept;
    FragmentSet forward = history.sets.front(), backward = history.sets.back();
    for (const FragmentSet& set : history.sets) REQUIRE(forward.join(set).ok());
    for (std::size_t i = history.sets.size(); i-- > 0;)
      backward = joined(history.sets[i], backward);
    REQUIRE(matches_reference(forward, history.done));
    REQUIRE(forward == backward);
    REQUIRE(forward.digest() == backward.digest());
    REQUIRE(forward.context() == backward.context());
    if (seed % 10 == 0) REQUIRE(rendered(forward) == rendered(backward));
  }
  CHECK(removals > 5'000);
  CHECK(compactions > 100);
  CHECK(deltas > 10'000);
  CHECK(kept > 100);
}

TEST_CASE("laws of join") {
  test::law("commutative, associative, idempotent, with the empty set as unit", [] {
    const FragmentSet a = drawn_set(1), b = drawn_set(2), c = drawn_set(3);
    RC_ASSERT(joined(a, b) == joined(b, a));
    RC_ASSERT(joined(a, b).digest() == joined(b, a).digest());
    RC_ASSERT(joined(joined(a, b), c) == joined(a, joined(b, c)));
    RC_ASSERT(joined(joined(a, b), c).digest() == joined(a, joined(b, c)).digest());
    RC_ASSERT(joined(a, a) == a);
    RC_ASSERT(joined(a, FragmentSet{}) == a);
    RC_ASSERT(joined(FragmentSet{}, a).digest() == a.digest());
  });
  test::law("the least upper bound of its order, in which every operation rises", [] {
    const FragmentSet a = drawn_set(1), b = drawn_set(2),
                      c = joined(drawn_set(3), *rc::gen::inRange(0, 2) == 0 ? a : b);
    RC_ASSERT(leq(a, a));
    RC_ASSERT((leq(a, joined(a, b)) && leq(b, joined(a, b))));
    RC_ASSERT((!(leq(a, c) && leq(b, c)) || leq(joined(a, b), c)));
    RC_ASSERT((!leq(a, b) || leq(joined(a, c), joined(b, c))));  // monotone
    FragmentSet more = a;
    RC_ASSERT(more.insert(fragment(0), {9, 0}).ok());
    RC_ASSERT((leq(a, more) && !leq(more, a)));
    FragmentSet less = more;
    RC_ASSERT(less.remove(fragment(0).id(), {9, 1}).ok());
    RC_ASSERT((leq(more, less) && !leq(less, more)));
  });
  test::law("what is lacking, joined, is as good as everything, in whatever pieces it comes", [] {
    const FragmentSet old = drawn_set(1);
    FragmentSet now = joined(old, drawn_set(2));
    if (const auto* first = now.empty() ? nullptr : &now.entries().front())
      RC_ASSERT(now.remove(FragmentId(first->id), {7, 0}).ok());
    const FragmentSet delta = now.delta_since(old.context());
    RC_ASSERT(leq(delta, now));
    const FragmentSet caught_up = joined(old, delta);
    RC_ASSERT(caught_up == now);
    RC_ASSERT(caught_up.context() == now.context());
    RC_ASSERT(joined(FragmentSet{}, now.delta_since({})) == now);
  });
  test::law("equal sets have equal digests, and different ones different", [] {
    const FragmentSet a = drawn_set(1), b = drawn_set(1);
    RC_ASSERT((a == b) == (a.digest() == b.digest()));
  });
}
