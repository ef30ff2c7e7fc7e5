// The pool against a plain model under a million random operations; namespaces, capacity, exact
// answers, held anchors.

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include <kvmeld/anchors/detail/directory.hpp>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/reuse.hpp>

#include "support/anchor_segments.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::anchors::Anchor;
using kvmeld::anchors::AnchorPool;
using kvmeld::anchors::AnchorSpace;
using kvmeld::anchors::CommitResult;
using kvmeld::anchors::ReuseReason;

const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 2, .heads = 1, .channels = 2});

/// Anchor n: 1 to 3 tokens of ids of its own; its offsets come from `delta`.
Anchor bare(std::uint8_t n) {
  const std::int64_t tokens = 1 + n % 3;
  test::TestCache cache(shape, tokens);
  cache.fill(n);
  std::vector<kvmeld::TokenId> ids;
  for (std::int64_t t = 0; t < tokens; ++t)
    ids.push_back(1000 * n + static_cast<kvmeld::TokenId>(t));
  const auto sealed = kvmeld::seal(cache.ref(), {.tokens = ids});
  auto anchor = *kvmeld::anchors::make_anchor(*sealed, {static_cast<float>(n), 0});
  anchor.id = test::anchor_id(n);
  return anchor;
}
kvmeld::Digest128 context(std::uint64_t c) { return {c, 7}; }
kvmeld::anchors::ContextOffset delta(const Anchor& anchor, std::uint64_t c) {
  return {context(c), *kvmeld::anchors::measure_offset(anchor.base, anchor.base), {}};
}

/// What the pool should be, in plain containers.
struct Model {
  struct Entry {
    std::size_t bytes = 0;
    std::set<std::uint64_t> contexts;
    std::uint64_t inserted = 0, last = 0, uses = 0;
  };
  std::map<std::uint8_t, Entry> entries;
  std::uint64_t clock = 0;
  std::size_t most = 0, most_bytes = 0;

  [[nodiscard]] std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& [n, e] : entries) sum += e.bytes;
    return sum;
  }
  template <class Eviction>
  void make_room(std::size_t extra, std::size_t extra_bytes, int kept, const Eviction&) {
    while (entries.size() + extra > most || bytes() + extra_bytes > most_bytes) {
      std::vector<std::pair<std::uint64_t, std::uint8_t>> ages;
      for (const auto& [n, e] : entries) {
        if (n != kept) ages.push_back({e.inserted, n});
      }
      std::sort(ages.begin(), ages.end());
      std::size_t window = ages.size();
      if constexpr (std::is_same_v<Eviction, kvmeld::anchors::WindowLFU>)
        window = std::min<std::size_t>(window, 5);
      int victim = -1;
      std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> lowest;
      for (std::size_t i = 0; i < window; ++i) {
        const Entry& e = entries[ages[i].second];
        const auto key = std::is_same_v<Eviction, kvmeld::anchors::LRU>
                             ? std::tuple(e.last, e.inserted, e.inserted)
                             : std::tuple(e.uses, e.last, e.inserted);
        if (victim < 0 || key < lowest) victim = ages[i].second, lowest = key;
      }
      entries.erase(static_cast<std::uint8_t>(victim));
    }
  }
};

template <class Eviction>
void compare_with_model(std::size_t operations, Eviction eviction) {
  constexpr std::uint8_t names = 60;
  constexpr std::uint64_t contexts = 4;
  static const std::vector<Anchor> anchors = [] {
    std::vector<Anchor> out;
    for (std::uint8_t n = 0; n < names; ++n) out.push_back(bare(n));
    return out;
  }();
  static const auto deltas = [] {
    std::vector<std::vector<kvmeld::anchors::ContextOffset>> out;
    for (const Anchor& a : anchors) {
      out.emplace_back();
      for (std::uint64_t c = 0; c < contexts; ++c) out.back().push_back(delta(a, c));
    }
    return out;
  }();
  const AnchorSpace space = AnchorSpace::of(*shape);
  Model model;
  model.most = 20;
  model.most_bytes = 2600;
  AnchorPool<kvmeld::anchors::XxHash, Eviction> pool(space, {model.most, model.most_bytes}, {},
                                                     eviction);
  test::Random random(11);
  std::size_t reused = 0, evicted_some = 0;
  for (std::size_t op = 0; op < operations; ++op) {
    const auto n = static_cast<std::uint8_t>(random.below(names));
    const std::uint64_t c = random.below(contexts);
    const Anchor& anchor = anchors[n];
    const std::size_t base_bytes =
        static_cast<std::size_t>(anchor.base.token_count()) * 2 * 2 * 2 * 4 + 8;
    const std::size_t delta_bytes = static_cast<std::size_t>(anchor.base.token_count()) * 2 * 2 * 4;
    const auto at = model.entries.find(n);
    const bool there = at != model.entries.end();
    bool good = true;
    switch (random.below(8)) {
      case 0:
      case 1: {  // an anchor with one offset
        Anchor more = anchor;
        more.offsets.push_back(deltas[n][c]);
        const auto done = pool.commit(more);
        const bool news = !there || at->second.contexts.count(c) == 0;
        good = done.ok() && *done == (!there ? CommitResult::inserted
                                      : news ? CommitResult::merged
                                             : CommitResult::unchanged);
        if (there && news) model.make_room(0, delta_bytes, n, eviction);
        if (!there) model.make_room(1, base_bytes + delta_bytes, -1, eviction);
        Model::Entry& e = model.entries[n];
        if (!there) e.inserted = model.clock + 1, e.bytes = base_bytes;
        if (news) e.bytes += delta_bytes;
        e.contexts.insert(c);
        e.last = ++model.clock;
        break;
      }
      case 2: {  // an offset alone
        const auto done = pool.commit(anchor.id, deltas[n][c]);
        good = there ? done.ok() : done.status().code() == ErrorCode::not_found;
        if (there) {
          if (at->second.contexts.count(c) == 0) {
            model.make_room(0, delta_bytes, n, eviction);
            at->second.bytes += delta_bytes;
            at->second.contexts.insert(c);
          }
          at->second.last = ++model.clock;
        }
        break;
      }
      case 3:
        if (random.below(8) == 0) {
          good = pool.erase(anchor.id) == there;
          model.entries.erase(n);
        }
        break;
      default: {
        const kvmeld::anchors::AnchorQuery query{&space,
                                                 {.tokens = anchor.base.tokens()},
                                                 anchor.vector,
                                                 context(c),
                                                 {.tokens = anchor.base.token_count()}};
        const auto found = pool.look_up({}, query);
        const bool expected = there && at->second.contexts.count(c) != 0;
        good = found.decision.reuses() == expected;
        if (expected) {
          good = good && found.anchors.size() == 1 && found.anchors[0]->id == anchor.id &&
                 found.anchors[0]->find(context(c)) != nullptr;
          ++at->second.uses;
          at->second.last = ++model.clock;
          ++reused;
        } else {
          const ReuseReason why = model.entries.empty() ? ReuseReason::empty_pool
                                  : there               ? ReuseReason::no_offset
                                                        : ReuseReason::below_threshold;
          good = good && found.decision.reason == why;
        }
      }
    }
    good = good && pool.size() == model.entries.size() && pool.bytes() == model.bytes() &&
           pool.size() <= model.most && pool.bytes() <= model.most_bytes;
    if (op % 512 == 0) {  // index and store in full
      const auto now = pool.snapshot();
      std::set<std::uint8_t> seen;
      std::size_t sum = 0;
      for (std::size_t i = 0; i < now->table.size(); ++i) {
        const Anchor& a = *now->table.anchor(i);
        const std::uint8_t name = a.id.bytes[31];
        seen.insert(name);
        sum += a.bytes();
        const auto e = model.entries.find(name);
        good =
            good && e != model.entries.end() && a.offsets.size() == e->second.contexts.size() &&
            now->table.signature(i) == *kvmeld::anchors::XxHash{}.sign({.tokens = a.base.tokens()});
        const auto use = now->table.row(i).use->read();
        good = good && use.uses == e->second.uses && use.last_used == e->second.last &&
               use.inserted == e->second.inserted;
      }
      good = good && seen.size() == model.entries.size() && sum == model.bytes();
    }
    if (!good) INFO("operation " << op);
    if (!good) REQUIRE(good);
  }
  evicted_some = pool.evictions();
  REQUIRE(evicted_some > operations / 100);
  REQUIRE(reused > operations / 100);
}

}  // namespace

TEST_CASE("index and store equal a plain model under 10^6 random operations") {
  compare_with_model(340000, kvmeld::anchors::LRU{});
  compare_with_model(330000, kvmeld::anchors::LFU{});
  compare_with_model(330000, kvmeld::anchors::WindowLFU{5});
}

TEST_CASE("an update at capacity evicts nobody") {
  AnchorPool<> pool(AnchorSpace::of(*shape), {2, 1 << 20});
  REQUIRE(*pool.commit(bare(1)) == CommitResult::inserted);
  REQUIRE(*pool.commit(bare(2)) == CommitResult::inserted);
  REQUIRE(*pool.commit(bare(2)) == CommitResult::unchanged);
  REQUIRE(*pool.commit(bare(2).id, delta(bare(2), 1)) == CommitResult::merged);
  REQUIRE(pool.size() == 2);
  REQUIRE(pool.evictions() == 0);
  REQUIRE(*pool.commit(bare(3)) == CommitResult::inserted);
  REQUIRE(pool.size() == 2);
  REQUIRE(pool.evictions() == 1);
  REQUIRE_FALSE(pool.erase(bare(1).id));
  REQUIRE(pool.erase(bare(2).id));
}

TEST_CASE("pools that hold nothing, or less than the anchor") {
  AnchorPool<> none(AnchorSpace::of(*shape), {0, 1 << 20});
  REQUIRE(none.commit(bare(1)).status().code() == ErrorCode::store_full);
  AnchorPool<> tight(AnchorSpace::of(*shape), {5, bare(3).bytes()});
  REQUIRE(tight.commit(bare(2)).status().code() == ErrorCode::store_full);  // 3 tokens
  REQUIRE(tight.commit(bare(3)).ok());
  REQUIRE(tight.commit(bare(3).id, delta(bare(3), 1)).status().code() == ErrorCode::store_full);
  REQUIRE(tight.size() == 1);
  REQUIRE(tight.snapshot()->table.anchor(0)->offsets.empty());
  Anchor nothing;
  REQUIRE(tight.commit(nothing).status().code() == ErrorCode::invalid_argument);
  Anchor wrong = bare(3);
  wrong.offsets = {delta(bare(1), 1)};
  REQUIRE(tight.commit(wrong).status().code() == ErrorCode::invalid_argument);
}

TEST_CASE("another namespace is a miss with its reason, and nothing approximate is exact") {
  const AnchorSpace space = AnchorSpace::of(*shape);
  AnchorPool<> pool(space, {10, 1 << 20});
  const Anchor plain = bare(4);
  const kvmeld::anchors::SignatureInput input{.tokens = plain.base.tokens()};
  const auto ask = [&](const AnchorSpace* asked, kvmeld::Digest128 where = context(1)) {
    return pool
        .look_up({}, {asked, input, plain.vector, where, {.tokens = plain.base.token_count()}})
        .decision.reason;
  };
  REQUIRE(ask(&space) == ReuseReason::empty_pool);
  REQUIRE(pool.commit(plain).ok());
  REQUIRE(ask(&space) == ReuseReason::no_offset);
  REQUIRE(pool.commit(plain.id, delta(plain, 1)).ok());
  REQUIRE(ask(&space) == ReuseReason::reuse);
  REQUIRE(ask(&space, context(2)) == ReuseReason::no_offset);
  for (const ReuseReason expected :
       {ReuseReason::model_differs, ReuseReason::tokenizer_differs, ReuseReason::layout_differs,
        ReuseReason::tenant_differs, ReuseReason::base_differs}) {
    kvmeld::Geometry g = *shape;
    if (expected == ReuseReason::model_differs) g.model = "another";
    if (expected == ReuseReason::tokenizer_differs) g.tokenizer = "another";
    if (expected == ReuseReason::layout_differs) g.layers[0].rope.base = 5e5;
    if (expected == ReuseReason::tenant_differs) g.tenant = "another";
    kvmeld::Context before;
    if (expected == ReuseReason::base_differs) before.lead_in = {1, 2};
    const AnchorSpace other = AnchorSpace::of(g, before);
    REQUIRE(ask(&other) == expected);
    REQUIRE(pool.reasons()[expected] == 1);
    AnchorPool<> theirs(other, {10, 1 << 20});
    REQUIRE(theirs.commit(plain).status().code() == ErrorCode::geometry_mismatch);
  }
  REQUIRE(pool.reasons().total() == 9);
  REQUIRE(pool.find_exact(input, context(1)) != nullptr);
  REQUIRE(pool.find_exact(input, context(2)) == nullptr);
  Anchor blended = bare(5);
  blended.approximate = true;
  blended.offsets = {delta(blended, 1)};
  REQUIRE(pool.commit(blended).ok());
  REQUIRE(pool.find_exact({.tokens = blended.base.tokens()}, context(1)) == nullptr);
  AnchorPool<kvmeld::anchors::EmbeddingHash> unsigned_pool(space, {10, 1 << 20});
  REQUIRE(unsigned_pool.commit(plain).ok());
  REQUIRE(unsigned_pool.look_up({}, {&space, input, plain.vector, context(1), {.tokens = 1}})
              .decision.reason == ReuseReason::unsigned_segment);
}

TEST_CASE("two pictures behind the same placeholder ids are two anchors to every exact look-up") {
  const auto pictures = test::geometry({.layers = 2, .heads = 1, .channels = 2});
  pictures->placeholders = {900};
  const std::vector<kvmeld::TokenId> ids{1, 900, 2};
  const auto anchor = [&](std::uint64_t seed) {
    const auto sealed = test::sealed(pictures, 3, seed, {.tokens = ids});
    return *kvmeld::anchors::make_anchor(sealed.fragment, {static_cast<float>(seed), 0});
  };
  Anchor cat = anchor(1);
  const Anchor dog = anchor(2);
  REQUIRE(cat.id != dog.id);
  REQUIRE(std::ranges::equal(cat.base.tokens(), dog.base.tokens()));

  const auto unsaid = kvmeld::anchors::measure_offset(dog.base, cat.base);
  REQUIRE(unsaid.status().code() == ErrorCode::tokens_required);
  REQUIRE(unsaid.status().message().find("OffsetOptions::of") != std::string::npos);
  REQUIRE(
      kvmeld::anchors::measure_offset(cat.base, cat.base, {.of = dog.base.id()}).status().code() ==
      ErrorCode::tokens_required);
  const auto said = kvmeld::anchors::measure_offset(cat.base, cat.base, {.of = cat.base.id()});
  REQUIRE(said.ok());

  cat.offsets = {{context(1), *said, {}}};
  AnchorPool<> pool(AnchorSpace::of(*pictures), {10, 1 << 20});
  REQUIRE(pool.commit(cat).ok());
  const auto found = [&](const kvmeld::anchors::SignatureInput& input) {
    return pool.find_exact(input, context(1)) != nullptr;
  };
  REQUIRE_FALSE(found({.tokens = dog.base.tokens()}));
  REQUIRE_FALSE(found({.tokens = dog.base.tokens(), .embedding = dog.vector}));
  REQUIRE(found({.tokens = cat.base.tokens(), .embedding = cat.vector}));
  REQUIRE(pool.find_exact(cat.id, context(1)) != nullptr);
  REQUIRE(pool.find_exact(cat.id, context(2)) == nullptr);
  REQUIRE(pool.find_exact(dog.id, context(1)) == nullptr);
  REQUIRE(kvmeld::anchors::text_digest(cat.base) == kvmeld::Digest128{});
  REQUIRE(kvmeld::anchors::text_digest(bare(1).base) ==
          kvmeld::anchors::text_digest(bare(1).base.tokens()));

  const auto shared = std::make_shared<const Anchor>(cat);
  const float weight = 1;
  const auto aligned = kvmeld::anchors::aligned_offsets(
      std::span(&shared, 1), std::span(&weight, 1), context(1), ids,
      {.match = {.mode = kvmeld::MatchMode::edit_distance}, .similarity = 0.1F});
  REQUIRE(aligned.ok());
  REQUIRE(aligned->at(0).rows == std::vector<std::int32_t>{0, -1, 2});
}

TEST_CASE("offsets from bases behind one context never meet bases behind another") {
  test::TestCache cache(shape, 2);
  cache.fill(9);
  const std::vector<kvmeld::TokenId> ids{1, 2};
  kvmeld::Context behind;
  behind.lead_in = {3, 4};
  const auto alone = kvmeld::seal(cache.ref(), {.tokens = ids, .positions = {}, .context = behind});
  REQUIRE(alone.ok());
  Anchor anchor = *kvmeld::anchors::make_anchor(*alone, {1, 0});
  anchor.offsets = {delta(anchor, 1)};
  const AnchorSpace plain = AnchorSpace::of(*shape), led = AnchorSpace::of(anchor.base);
  REQUIRE(led == AnchorSpace::of(*shape, behind));
  AnchorPool<> pool(plain, {10, 1 << 20}), other(led, {10, 1 << 20});
  REQUIRE(pool.commit(anchor).status().code() == ErrorCode::geometry_mismatch);
  REQUIRE(pool.size() == 0);
  REQUIRE(other.commit(anchor).ok());
  const auto ask = [&](const AnchorSpace& space) {
    return other.look_up({}, {&space, {.tokens = ids}, anchor.vector, context(1), {.tokens = 2}})
        .decision.reason;
  };
  REQUIRE(ask(led) == ReuseReason::reuse);
  REQUIRE(ask(plain) == ReuseReason::base_differs);
}

TEST_CASE("bad input has its reason in every look-up, and every reason is counted") {
  const AnchorSpace space = AnchorSpace::of(*shape);
  AnchorPool<> pool(space, {10, 1 << 20});
  const kvmeld::anchors::ReuseRule any{.similarity = 0};
  const std::vector<float> here{0, 0};
  const std::vector<kvmeld::TokenId> ids{1, 2, 3};
  const auto ask = [&](kvmeld::anchors::ReuseRequest request, std::span<const float> vector,
                       kvmeld::anchors::ReuseRule rule) {
    const auto found = pool.look_up(rule, {&space, {.tokens = ids}, vector, context(1), request});
    if (!found.decision.reuses()) REQUIRE(found.anchors.empty());
    return found.decision.reason;
  };
  REQUIRE(ask({.tokens = 2}, here, any) == ReuseReason::empty_pool);
  // of 3 tokens each, at distances 2 and 5
  for (const std::uint8_t n : {std::uint8_t{2}, std::uint8_t{5}}) {
    Anchor anchor = bare(n);
    anchor.offsets = {delta(anchor, 1)};
    REQUIRE(pool.commit(anchor).ok());
  }
  REQUIRE(ask({.tokens = 0}, here, any) == ReuseReason::empty_segment);
  REQUIRE(ask({.tokens = -7}, here, any) == ReuseReason::empty_segment);
  REQUIRE(ask({.tokens = 4}, here, any) == ReuseReason::too_short);
  REQUIRE(ask({.tokens = 3, .last_position = 4096, .trained_context = 4096}, here, any) ==
          ReuseReason::beyond_trained_context);
  REQUIRE(ask({.tokens = 3, .consumer = kvmeld::anchors::Consumer::never_approximate}, here, any) ==
          ReuseReason::exact_required);
  REQUIRE(ask({.tokens = 3}, here, {.similarity = 0, .gamma = -1}) == ReuseReason::invalid_rule);
  REQUIRE(ask({.tokens = 3}, here, {.similarity = 1}) == ReuseReason::below_threshold);
  // of another length
  REQUIRE(ask({.tokens = 3}, std::vector<float>{0}, any) == ReuseReason::distance_not_finite);
  REQUIRE(ask({.tokens = 3}, std::vector<float>{std::nanf(""), 0}, any) ==
          ReuseReason::distance_not_finite);
  REQUIRE(ask({.tokens = 3}, std::vector<float>{INFINITY, 0}, any) ==
          ReuseReason::distance_not_finite);
  REQUIRE(ask({.tokens = 3}, here, {.similarity = 0, .min_anchors = 3}) ==
          ReuseReason::too_few_anchors);
  // equal distances
  REQUIRE(ask({.tokens = 3}, std::vector<float>{3.5F, 0}, any) == ReuseReason::uncertain);
  REQUIRE(ask({.tokens = 3, .cost = {1, 1}}, here, any) == ReuseReason::not_cheaper);
  REQUIRE(ask({.tokens = 3}, here, any) == ReuseReason::reuse);
  const auto cold = pool.look_up({.similarity = 0, .temperature = 1e-3},
                                 {&space, {.tokens = ids}, here, context(1), {.tokens = 3}});
  REQUIRE(cold.anchors.size() == 1);  // the other's weight underflows
  REQUIRE(cold.decision.weights == std::vector<float>{1});
  REQUIRE(cold.anchors[0]->id == bare(2).id);
  REQUIRE(pool.look_up(any, {nullptr, {.tokens = ids}, here, context(1), {.tokens = 3}})
              .decision.reason == ReuseReason::model_differs);
  REQUIRE(pool.reasons()[ReuseReason::empty_segment] == 2);
  REQUIRE(pool.reasons()[ReuseReason::distance_not_finite] == 3);
  REQUIRE(pool.reasons()[ReuseReason::reuse] == 2);
  for (const ReuseReason once :
       {ReuseReason::empty_pool, ReuseReason::too_short, ReuseReason::beyond_trained_context,
        ReuseReason::exact_required, ReuseReason::invalid_rule, ReuseReason::below_threshold,
        ReuseReason::too_few_anchors, ReuseReason::uncertain, ReuseReason::not_cheaper,
        ReuseReason::model_differs}) {
    REQUIRE(pool.reasons()[once] == 1);
  }
  REQUIRE(pool.reasons().total() == 17);
}

TEST_CASE(
    "a segment whose window dropped tokens of every offset is a miss; values of 0 are as good as "
    "others") {
  const AnchorSpace space = AnchorSpace::of(*shape);
  AnchorPool<> pool(space, {10, 1 << 20});
  const test::Segment s(shape, 4, 1);
  // layer 1 lacks tokens 0 and 1
  const auto lacking = kvmeld::anchors::measure_offset(s.in_context(2).at(9, {0, 2}), s.at(0));
  Anchor anchor = *kvmeld::anchors::make_anchor(s.at(0), {0, 0});
  anchor.offsets = {{context(1), *lacking, {}}};
  REQUIRE(pool.commit(anchor).ok());
  const auto ask = [&](kvmeld::anchors::ReuseRule rule = {}) {
    return pool.look_up(
        rule, {&space, {.tokens = anchor.base.tokens()}, anchor.vector, context(1), {.tokens = 4}});
  };
  REQUIRE(ask().decision.reason == ReuseReason::partly_evicted);

  // V = 0 everywhere: vectors of mean values are 0, all distances too, so all weights are equal;
  // and V is what the offsets say.
  std::vector<kvmeld::anchors::ReuseOffset> offsets;
  test::Segment silent = s;
  silent.values[1].assign(silent.values[1].size(), 0.0);
  silent.values[3].assign(silent.values[3].size(), 0.0);
  const auto zero = kvmeld::anchors::mean_value_row(silent.at(0));
  REQUIRE(zero.ok());
  REQUIRE(*zero == std::vector<float>(zero->size(), 0.0F));
  std::vector<kvmeld::anchors::ReuseCandidate> candidates;
  for (std::uint8_t n = 0; n < 2; ++n) {
    const auto d = kvmeld::anchors::measure_offset(silent.in_context(n + 5U).at(3), silent.at(0));
    REQUIRE(d.ok());
    offsets.push_back({.anchor = test::anchor_id(n), .delta = *d});
    candidates.push_back(
        {test::anchor_id(n), kvmeld::anchors::l2_distance(*zero, *zero), 4, true, true});
  }
  REQUIRE(kvmeld::anchors::decide({}, {.tokens = 4}, candidates).reason == ReuseReason::uncertain);
  const auto equal = kvmeld::anchors::decide({.gamma = 1}, {.tokens = 4}, candidates);
  REQUIRE(equal.weights == std::vector<float>{0.5F, 0.5F});
  for (std::size_t i = 0; i < 2; ++i) offsets[i].weight = equal.weights[i];
  const kvmeld::anchors::ReusePart part{.base = silent.at(0), .position = 7, .offsets = offsets};
  test::Segment expected = silent;
  for (std::size_t i = 0; i < expected.values[3].size(); ++i) {
    for (const std::uint64_t seed : {5U, 6U}) {
      expected.values[2][i] += 0.5 * (silent.in_context(seed).values[2][i] - silent.values[2][i]);
      expected.values[3][i] += 0.5 * silent.in_context(seed).values[3][i];
    }
  }
  test::TestCache real(shape, 4);
  expected.write(real, 7);
  REQUIRE(test::difference(test::rendered({&part, 1}, shape), real.buffers()) < 1e-5);
}

TEST_CASE("what a reader holds outlives its eviction, and an agent's copy of a table is its own") {
  const AnchorSpace space = AnchorSpace::of(*shape);
  AnchorPool<> pool(space, {1, 1 << 20});
  Anchor first = bare(1);
  first.offsets = {delta(first, 1)};
  REQUIRE(pool.commit(first).ok());
  const auto held = pool.look_up({}, {&space,
                                      {.tokens = first.base.tokens()},
                                      first.vector,
                                      context(1),
                                      {.tokens = first.base.token_count()}});
  REQUIRE(held.decision.reuses());
  REQUIRE(held.decision.chosen == std::vector<std::uint32_t>{0});
  const auto before = pool.snapshot();
  REQUIRE(pool.commit(bare(2)).ok());
  REQUIRE(pool.size() == 1);
  REQUIRE(before->table.anchor(0)->id == first.id);
  const kvmeld::anchors::ReusePart part{
      .base = first.base,
      .position = 3,
      .offsets = {{held.anchors[0]->id, held.anchors[0]->find(context(1))->segment}}};
  REQUIRE(!test::rendered({&part, 1}, shape).empty());
  std::weak_ptr<const Anchor> gone = before->table.anchor(0);

  kvmeld::anchors::AnchorTable mine = before->table;
  mine.erase(0);
  REQUIRE(mine.size() == 0);
  REQUIRE(before->table.size() == 1);
  REQUIRE(before->table.anchor(0)->id == first.id);
  REQUIRE_FALSE(gone.expired());
}

TEST_CASE("nothing that was evicted lingers") {
  AnchorPool<> pool(AnchorSpace::of(*shape), {1, 1 << 20});
  REQUIRE(pool.commit(bare(1)).ok());
  const std::weak_ptr<const Anchor> watched = pool.snapshot()->table.anchor(0);
  REQUIRE_FALSE(watched.expired());
  REQUIRE(pool.commit(bare(2)).ok());
  REQUIRE(watched.expired());
}

TEST_CASE("tables of several pages scan as one") {
  kvmeld::anchors::AnchorTable table;
  const auto anchor = std::make_shared<const Anchor>(bare(1));
  test::Random random(5);
  std::vector<std::uint64_t> signatures;
  for (int i = 0; i < 5000; ++i) {
    signatures.push_back(i % 50 == 0 ? 0xFFU << (i % 7) : random.next());
    table.push_back(signatures.back(),
                    {anchor, std::make_shared<kvmeld::anchors::detail::UseCell>()});
  }
  for (int i = 0; i < 1500; ++i) {
    const std::size_t at = random.below(table.size());
    table.erase(at);
    signatures[at] = signatures.back();
    signatures.pop_back();
  }
  REQUIRE(table.size() == 3500);
  kvmeld::anchors::AnchorTable at_once;
  at_once.append(signatures, table.row(0));
  at_once.append(std::span(signatures).first(70), table.row(0));
  REQUIRE(at_once.size() == 3570);
  REQUIRE(at_once.bytes() == 3570 * anchor->bytes());
  bool same = true;
  for (std::size_t i = 0; i < 3570; ++i)
    same = same && at_once.signature(i) == signatures[i % 3500] && at_once.anchor(i) == anchor;
  REQUIRE(same);
  REQUIRE(table.bytes() == 3500 * anchor->bytes());
  for (const int distance : {0, 9, 16}) {
    std::vector<kvmeld::anchors::HammingHit> hits, expected;
    table.scan(0xFF, distance, hits);
    for (std::uint32_t i = 0; i < 3500; ++i) {
      const int d = std::popcount(signatures[i] ^ 0xFFU);
      if (d <= distance) expected.push_back({i, static_cast<std::uint32_t>(d)});
    }
    REQUIRE(hits == expected);
    REQUIRE(!hits.empty());
  }
}

TEST_CASE("large tables find through their index what a plain loop finds") {
  const auto anchor = std::make_shared<const Anchor>(bare(1));
  const kvmeld::anchors::AnchorTable::Row row{anchor,
                                              std::make_shared<kvmeld::anchors::detail::UseCell>()};
  test::Random random(6);
  const std::uint64_t query = random.next();
  const auto draw = [&] {
    std::uint64_t s = random.next();
    if (random.below(40) == 0) {  // near, by up to 20 bits
      s = query;
      for (std::uint64_t flips = random.below(21); flips > 0; --flips)
        s ^= std::uint64_t{1} << random.below(64);
    }
    return s;
  };
  std::vector<std::uint64_t> signatures;
  for (int i = 0; i < 90000; ++i) signatures.push_back(draw());
  kvmeld::anchors::AnchorTable table;
  table.append(signatures, row);
  const auto same = [&] {
    bool good = table.size() == signatures.size();
    for (const int distance : {-1, 0, 3, 9, 12, 16, 19, 20}) {
      std::vector<kvmeld::anchors::HammingHit> hits{{7, 7}}, expected{{7, 7}};
      table.scan(query, distance, hits);
      for (std::uint32_t i = 0; i < signatures.size(); ++i) {
        const int d = std::popcount(signatures[i] ^ query);
        if (d <= distance) expected.push_back({i, static_cast<std::uint32_t>(d)});
      }
      good = good && hits == expected;
    }
    return good;
  };
  REQUIRE(same());
  std::vector<kvmeld::anchors::HammingHit> found;
  REQUIRE(kvmeld::anchors::MultiIndex::build(signatures).find(query, 9, found));
  REQUIRE(found.size() > 90000 / 40 / 4);
  REQUIRE_FALSE(kvmeld::anchors::MultiIndex::build(signatures).find(query, 20, found));
  // A crowd of equal signatures is left to the scan.
  REQUIRE_FALSE(kvmeld::anchors::MultiIndex::build(std::vector<std::uint64_t>(90000, query))
                    .find(query, 3, found));
  const auto change = [&](int times, int of_eight) {
    for (int i = 0; i < times; ++i) {
      if (static_cast<int>(random.below(8)) < of_eight) {
        signatures.push_back(draw());
        table.push_back(signatures.back(), row);
      } else {
        const std::size_t at = random.below(table.size());
        table.erase(at);
        signatures[at] = signatures.back();
        signatures.pop_back();
      }
    }
  };
  const kvmeld::anchors::AnchorTable before = table;
  for (int round = 0; round < 4; ++round) {  // both sides of the index being made anew
    change(1500, 4);
    REQUIRE(same());
  }
  change(6000, 1);
  REQUIRE(same());
  std::vector<std::uint64_t> more;
  for (int i = 0; i < 500; ++i) more.push_back(draw());
  table.append(more, row);
  signatures.insert(signatures.end(), more.begin(), more.end());
  REQUIRE(same());
  change(4000, 7);
  REQUIRE(same());
  REQUIRE(before.size() == 90000);
  while (table.size() > 60000) change(1000, 0);  // a small table has no index
  REQUIRE(same());
}

TEST_CASE("presets stay under their budget") {
  const auto light = kvmeld::anchors::presets::light(1 << 20);
  REQUIRE(light.capacity.bytes == 1 << 20);
  REQUIRE(kvmeld::anchors::max_distance(light.rule.similarity) == 16);
  REQUIRE(kvmeld::anchors::max_distance(kvmeld::anchors::presets::heavy(1).rule.similarity) == 9);
  REQUIRE(kvmeld::anchors::kv_bytes_per_token(*shape) == 32);
  REQUIRE(kvmeld::anchors::anchor_memory(*shape, 10, 3, 2) == 10 * 3 * (32 + 2 * 16));
  REQUIRE(kvmeld::anchors::anchor_memory(*shape, 10, 3, 2, 0) == 10 * 3 * 3 * 32);
  // docs/anchors.md: 256 tokens with offsets for three contexts, in f16.
  const auto gib = [](const kvmeld::Geometry& g, std::int64_t anchors) {
    return static_cast<double>(kvmeld::anchors::anchor_memory(g, anchors, 256, 3)) / (1 << 30);
  };
  const auto half_billion =
      test::geometry({.type = kvmeld::ElementType::f16, .layers = 24, .heads = 2, .channels = 64});
  const auto eight_billion =
      test::geometry({.type = kvmeld::ElementType::f16, .layers = 32, .heads = 8, .channels = 128});
  REQUIRE(kvmeld::anchors::kv_bytes_per_token(*half_billion) == 12 << 10);
  REQUIRE(kvmeld::anchors::kv_bytes_per_token(*eight_billion) == 128 << 10);
  REQUIRE(gib(*half_billion, 500) == Approx(5.7).margin(0.05));
  REQUIRE(gib(*half_billion, 1000) == Approx(11.4).margin(0.05));
  REQUIRE(gib(*half_billion, 3000) == Approx(34.1).margin(0.05));
  REQUIRE(gib(*half_billion, 5000) == Approx(56.8).margin(0.05));
  REQUIRE(gib(*eight_billion, 500) == Approx(61.0).margin(0.05));
  REQUIRE(gib(*eight_billion, 1000) == Approx(122.1).margin(0.05));
  REQUIRE(gib(*eight_billion, 3000) == Approx(366.2).margin(0.05));
  REQUIRE(gib(*eight_billion, 5000) == Approx(610.4).margin(0.05));
}
