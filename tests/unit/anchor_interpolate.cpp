// Segments that are nearly an anchor's text: position maps, whose weight counts where a map has a
// hole, what is interpolated and what is left to the engine. The reference is plain loops in
// double, written from the definition.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include <kvmeld/anchors/reuse.hpp>

#include "support/anchor_segments.hpp"
#include "support/edits.hpp"
#include "support/law.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::MatchMode;
using kvmeld::TokenId;
using kvmeld::anchors::ReuseOffset;
using kvmeld::anchors::ReuseOptions;
using kvmeld::anchors::ReusePart;
using test::difference;
using test::rendered;
using test::Segment;
using Rows = std::vector<std::int32_t>;

const kvmeld::TokenMatch by_edits{.mode = MatchMode::edit_distance};
const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 3, .heads = 2, .channels = 8});

constexpr std::size_t width = 16;  // of a token's row: heads and channels

/// The offset that has these numbers.
kvmeld::Fragment as_offset(const Segment& delta) {
  Segment zero = delta;
  for (auto& plane : zero.values) std::fill(plane.begin(), plane.end(), 0.0);
  const auto made =
      kvmeld::anchors::measure_offset(delta.at(0), zero.at(0), {.context_free_layers = 0});
  REQUIRE(made.ok());
  return *made;
}

struct Drawn {
  Segment query;
  std::vector<Segment> deltas;
  std::vector<ReuseOffset> offsets;
};

/// A map of `tokens` tokens into `held` rows that ascends, with holes.
Rows draw_map(std::int64_t tokens, std::int64_t held) {
  Rows rows;
  std::int32_t next = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const int kind = *rc::gen::inRange(0, 10);
    if (kind == 0) next += *rc::gen::inRange(1, 5);
    if (kind >= 7 || next >= held) {
      rows.push_back(-1);
      if (kind == 7) ++next;  // a substituted token
    } else {
      rows.push_back(next++);
    }
  }
  return rows;
}

Drawn draw(std::size_t anchors) {
  const std::int64_t tokens = *rc::gen::inRange(1, 14);
  Drawn out{Segment(shape, tokens, *rc::gen::arbitrary<std::uint64_t>()), {}, {}};
  for (std::size_t i = 0; i < anchors; ++i) {
    const std::int64_t held = *rc::gen::inRange<std::int64_t>(1, 18);
    out.deltas.emplace_back(shape, held, *rc::gen::arbitrary<std::uint64_t>());
    Rows rows = held >= tokens && *rc::gen::inRange(0, 4) == 0 ? Rows{} : draw_map(tokens, held);
    out.offsets.push_back({.anchor = test::anchor_id(static_cast<std::uint8_t>(i)),
                           .delta = as_offset(out.deltas[i]),
                           .weight = static_cast<float>(*rc::gen::inRange(0, 9)) / 8,
                           .rows = std::move(rows)});
  }
  return out;
}

/// What the definition says: the token's sum in every layer but 0, and whether it is the engine's.
struct Expected {
  Segment sum;
  std::vector<bool> hole, interpolated;
};

Expected by_definition(const Drawn& d, int window) {
  const auto n = static_cast<int>(d.query.tokens);
  const auto anchors = d.offsets.size();
  Expected out{d.query, std::vector<bool>(static_cast<std::size_t>(n)),
               std::vector<bool>(static_cast<std::size_t>(n))};
  const auto row = [&](std::size_t a, int t) {
    return d.offsets[a].rows.empty() ? t : d.offsets[a].rows[static_cast<std::size_t>(t)];
  };
  const auto add = [&](int t, std::size_t a, int r, double w) {
    for (std::size_t p = 0; p < out.sum.values.size(); ++p) {
      if (out.sum.layer_of(p) == 0) continue;
      for (std::size_t c = 0; c < width; ++c) {
        out.sum.values[p][static_cast<std::size_t>(t) * width + c] +=
            w * d.deltas[a].values[p][static_cast<std::size_t>(r) * width + c];
      }
    }
  };
  for (int t = 0; t < n; ++t) {
    double all = 0, have = 0;
    for (std::size_t a = 0; a < anchors; ++a) {
      all += static_cast<double>(d.offsets[a].weight);
      if (row(a, t) >= 0) have += static_cast<double>(d.offsets[a].weight);
    }
    if (all == 0) continue;
    if (have > 0) {
      for (std::size_t a = 0; a < anchors; ++a) {
        if (row(a, t) >= 0)
          add(t, a, row(a, t), static_cast<double>(d.offsets[a].weight) / have * all);
      }
      continue;
    }
    struct Near {
      double weight;
      std::size_t anchor;
      int before, after;
    };
    std::vector<Near> near;
    for (std::size_t a = 0; a < anchors; ++a) {
      int before = t, after = t;
      while (before >= 0 && row(a, before) < 0) --before;
      while (after < n && row(a, after) < 0) ++after;
      if (d.offsets[a].weight == 0 || before < 0 || after == n) continue;
      if (after - before - 1 <= window && row(a, after) - row(a, before) - 1 <= window)
        near.push_back({static_cast<double>(d.offsets[a].weight), a, before, after});
    }
    std::stable_sort(near.begin(), near.end(),
                     [](const Near& x, const Near& y) { return x.weight > y.weight; });
    if (near.size() > 2) near.resize(2);
    double total = 0;
    for (const Near& x : near) total += x.weight;
    for (const Near& x : near) {
      const double s = static_cast<double>(t - x.before) / (x.after - x.before);
      add(t, x.anchor, row(x.anchor, x.before), x.weight / total * all * (1 - s));
      add(t, x.anchor, row(x.anchor, x.after), x.weight / total * all * s);
    }
    (near.empty() ? out.hole : out.interpolated)[static_cast<std::size_t>(t)] = true;
  }
  return out;
}

/// Renders into a cache that is untouched where nothing is written.
struct Outcome {
  bool ok = false;
  std::vector<std::int64_t> holes, interpolated, interpolated_kv;
  test::Dense numbers;  // of f32; `untouched` in rows that nobody wrote
};
const float untouched = [] {
  const std::array<std::byte, 4> bytes{test::TestCache::untouched, test::TestCache::untouched,
                                       test::TestCache::untouched, test::TestCache::untouched};
  return std::bit_cast<float>(bytes);
}();
Outcome outcome(const ReusePart& part, const ReuseOptions& options) {
  Outcome out;
  const auto plan = kvmeld::anchors::plan_reuse({&part, 1}, *shape, options);
  if (!plan) return out;
  for (const kvmeld::Hole& hole : plan->holes()) out.holes.push_back(hole.output);
  out.interpolated.assign(plan->interpolated().begin(), plan->interpolated().end());
  out.interpolated_kv.assign(plan->interpolated_kv().begin(), plan->interpolated_kv().end());
  test::TestCache cache(shape, plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  out.ok = kvmeld::run(kvmeld::exec::seq, *plan, workspace, cache.out()).ok();
  out.numbers = cache.dense();
  return out;
}
/// Largest difference from a segment at a place; infinite where a hole was written, in any layer.
double error_of(const Outcome& o, const Segment& expected, std::int64_t position,
                const std::vector<std::int64_t>& holes) {
  test::TestCache cache(expected.geometry, expected.tokens);
  expected.write(cache, position);
  const test::Dense dense = cache.dense();
  double most = 0;
  for (std::size_t p = 0; p < dense.size(); ++p) {
    for (std::size_t i = 0; i < dense[p].size(); ++i) {
      const bool hole =
          std::binary_search(holes.begin(), holes.end(), static_cast<std::int64_t>(i / width));
      const double x = o.numbers[p][i];
      most = std::max(most, !hole                                 ? std::abs(x - dense[p][i])
                            : x == static_cast<double>(untouched) ? 0.0
                                                                  : HUGE_VAL);
    }
  }
  return most;
}
std::vector<std::int64_t> indices(const std::vector<bool>& flags) {
  std::vector<std::int64_t> out;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i]) out.push_back(static_cast<std::int64_t>(i));
  }
  return out;
}
ErrorCode refused(const ReusePart& part, ReuseOptions options = {}) {
  return kvmeld::anchors::plan_reuse({&part, 1}, *shape, options).status().code();
}

/// A sealed segment of given tokens.
kvmeld::Fragment sealed(const Segment& s, const std::vector<TokenId>& ids) {
  test::TestCache cache(s.geometry, s.tokens);
  s.write(cache, 0);
  const auto made = kvmeld::seal(cache.ref(), {.tokens = ids});
  REQUIRE(made.ok());
  return *made;
}

}  // namespace

TEST_CASE("laws of position maps in blends") {
  test::law("every token's sum, hole and interpolation are the definition's", [] {
    const Drawn d = draw(*rc::gen::inRange<std::size_t>(1, 5));
    const int window = *rc::gen::inRange(0, 6);
    const Expected e = by_definition(d, window);
    const ReusePart part{.base = d.query.at(0), .position = 7, .offsets = d.offsets};
    const Outcome o = outcome(part, {.compute_last = false, .interpolation_window = window});
    RC_ASSERT(o.ok);
    RC_ASSERT(o.holes == indices(e.hole));
    RC_ASSERT(o.interpolated == indices(e.interpolated));
    RC_ASSERT(o.interpolated_kv.empty());
    RC_ASSERT(error_of(o, e.sum, 7, o.holes) <= 1e-4);
  });

  test::law("the order of anchors leaves every byte alone, on rows and on lanes", [] {
    const Drawn d = draw(4);
    const ReuseOptions options{.compute_last = false, .interpolation_window = 3};
    const ReusePart part{.base = d.query.at(0), .position = 7, .offsets = d.offsets};
    ReusePart other = part;
    for (std::size_t i = 4; i > 1; --i)
      std::swap(other.offsets[i - 1], other.offsets[*rc::gen::inRange<std::size_t>(0, i)]);
    const auto bytes = rendered({&part, 1}, shape, options);
    RC_ASSERT(!bytes.empty());
    RC_ASSERT(bytes == rendered({&other, 1}, shape, options));
    RC_ASSERT(bytes == rendered({&part, 1}, shape, options, kvmeld::exec::lanes));
    RC_ASSERT(kvmeld::anchors::plan_reuse({&part, 1}, *shape, options)->render_id() ==
              kvmeld::anchors::plan_reuse({&other, 1}, *shape, options)->render_id());
  });

  test::law("linear in the offsets, interpolated or not", [] {
    Drawn a = draw(2), sum = a, b = a;
    b.query = a.query;
    for (std::size_t i = 0; i < 2; ++i) {
      b.deltas[i] = Segment(shape, a.deltas[i].tokens, *rc::gen::arbitrary<std::uint64_t>());
      for (std::size_t p = 0; p < a.query.values.size(); ++p) {
        for (std::size_t x = 0; x < a.deltas[i].values[p].size(); ++x)
          sum.deltas[i].values[p][x] = a.deltas[i].values[p][x] + 2 * b.deltas[i].values[p][x];
      }
      b.offsets[i].delta = as_offset(b.deltas[i]);
      sum.offsets[i].delta = as_offset(sum.deltas[i]);
    }
    const ReuseOptions options{.compute_last = false, .interpolation_window = 3};
    const auto numbers = [&](const Drawn& d) {
      const ReusePart part{.base = d.query.at(0), .position = 0, .offsets = d.offsets};
      const Outcome o = outcome(part, options);
      RC_ASSERT(o.ok);
      return o.numbers[4];  // keys of layer 2
    };
    const ReusePart bare{.base = a.query.at(0), .position = 0, .rotated_only = true};
    const auto base = outcome(bare, {.compute_last = false}).numbers[4];
    const auto x = numbers(a), y = numbers(b), z = numbers(sum);
    const Outcome o =
        outcome({.base = a.query.at(0), .position = 0, .offsets = a.offsets}, options);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::binary_search(o.holes.begin(), o.holes.end(), static_cast<std::int64_t>(i / width)))
        continue;
      RC_ASSERT(std::abs((z[i] - base[i]) - ((x[i] - base[i]) + 2 * (y[i] - base[i]))) < 1e-4);
    }
  });

  test::law("equal texts give the bytes of rows by index", [] {
    const Segment query(shape, 9, *rc::gen::arbitrary<std::uint64_t>());
    const auto ids = *rc::gen::container<std::vector<TokenId>>(9, rc::gen::inRange<TokenId>(0, 4));
    std::vector<TokenId> longer = ids;
    for (int i = *rc::gen::inRange(0, 4); i > 0; --i) longer.push_back(9 + i);
    const auto map = kvmeld::anchors::map_positions(ids, longer, by_edits);
    RC_ASSERT(map.ok());
    RC_ASSERT(map->one_to_one());
    const Segment delta(shape, static_cast<std::int64_t>(longer.size()),
                        *rc::gen::arbitrary<std::uint64_t>());
    ReusePart part{
        .base = query.at(0),
        .position = 40,
        .offsets = {{.anchor = test::anchor_id(1), .delta = as_offset(delta), .weight = 0.3F}}};
    const auto by_index = rendered({&part, 1}, shape);
    part.offsets[0].rows = map->rows;
    RC_ASSERT(!by_index.empty());
    RC_ASSERT(by_index ==
              rendered({&part, 1}, shape, {.compute_last = false, .interpolation_window = 5}));
  });
}

TEST_CASE(
    "maps of all pairs of short texts ascend, match equal tokens only, and are each other's "
    "inverse") {
  for (const auto& a : test::binary_strings(5)) {
    for (const auto& b : test::binary_strings(5)) {
      const auto map = kvmeld::anchors::map_positions(a, b, by_edits),
                 back = kvmeld::anchors::map_positions(b, a, by_edits);
      REQUIRE(map->rows.size() == a.size());
      test::Pairs pairs, swapped;
      for (std::size_t t = 0; t < a.size(); ++t) {
        if (map->rows[t] < 0) continue;
        REQUIRE(a[t] == b[static_cast<std::size_t>(map->rows[t])]);
        if (!pairs.empty()) REQUIRE(map->rows[t] > pairs.back().second);
        pairs.emplace_back(static_cast<int>(t), map->rows[t]);
      }
      for (std::size_t t = 0; t < b.size(); ++t) {
        if (back->rows[t] >= 0) swapped.emplace_back(back->rows[t], static_cast<int>(t));
      }
      REQUIRE(pairs == swapped);
      REQUIRE(pairs == test::reference_script(a, b));
      const auto edits = static_cast<double>(test::distance_table(a, b)[a.size()][b.size()]);
      if (!a.empty() || !b.empty())
        REQUIRE(map->similarity ==
                Approx(1 - edits / static_cast<double>(std::max(a.size(), b.size()))));
    }
  }
}

TEST_CASE("other match modes: by index, by equal beginnings, and none that needs K/V") {
  const std::vector<TokenId> a{1, 2, 3}, b{1, 2, 9, 9};
  REQUIRE(kvmeld::anchors::map_positions(a, b, {})->rows == Rows{0, 1, 2});
  REQUIRE(kvmeld::anchors::map_positions(b, a, {})->rows == Rows{0, 1, 2, -1});
  REQUIRE(kvmeld::anchors::map_positions(a, b, {.mode = MatchMode::common_prefix})->rows ==
          Rows{0, 1, -1});
  REQUIRE(kvmeld::anchors::map_positions(a, b, {.mode = MatchMode::common_prefix})->similarity ==
          0.5);
  REQUIRE(kvmeld::anchors::map_positions(a, b, {.mode = MatchMode::neighbours}).status().code() ==
          ErrorCode::unsupported);
  REQUIRE(kvmeld::anchors::map_positions(
              a, b, {.mode = MatchMode::edit_distance, .edit = {.seed_tokens = 0}})
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::map_positions({}, {}, by_edits)->rows.empty());
}

TEST_CASE("offsets linear in position stay linear over inserted and substituted tokens") {
  // Offset of row r: 1 + r / 4 everywhere; values only, so that numbers can be compared exactly.
  const auto g = test::geometry({.layers = 2, .heads = 1, .channels = 4, .rotary = 0});
  const auto linear = [&](std::int64_t tokens) {
    test::TestCache cache(g, tokens), zero(g, tokens);
    for (std::size_t p = 0; p < cache.planes(); ++p) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t c = 0; c < 4; ++c) {
          cache.set(p, t, 0, c, 1 + static_cast<float>(t) / 4);
          zero.set(p, t, 0, c, 0);
        }
      }
    }
    return *kvmeld::anchors::measure_offset(*kvmeld::seal(cache.ref()), *kvmeld::seal(zero.ref()));
  };
  const auto check = [&](const std::vector<TokenId>& segment, const std::vector<TokenId>& anchor,
                         const std::vector<double>& rows, double tolerance) {
    test::TestCache base(g, std::ssize(segment));
    for (std::size_t p = 0; p < base.planes(); ++p) {
      for (std::int64_t t = 0; t < std::ssize(segment); ++t) {
        for (std::int64_t c = 0; c < 4; ++c) base.set(p, t, 0, c, 8);
      }
    }
    const ReusePart part{
        .base = *kvmeld::seal(base.ref(), {.tokens = segment}),
        .offsets = {{.anchor = test::anchor_id(1),
                     .delta = linear(std::ssize(anchor)),
                     .rows = kvmeld::anchors::map_positions(segment, anchor, by_edits)->rows}}};
    const auto plan = kvmeld::anchors::plan_reuse(
        {&part, 1}, *g, {.compute_last = false, .interpolation_window = 3});
    REQUIRE(plan.ok());
    REQUIRE(plan->holes().empty());
    test::TestCache out(g, std::ssize(segment));
    std::vector<std::byte> workspace(plan->workspace_bytes());
    REQUIRE(kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out()).ok());
    for (std::size_t t = 0; t < rows.size(); ++t) {
      REQUIRE(std::abs(out.get(3, static_cast<std::int64_t>(t), 0, 2) - (9 + rows[t] / 4)) <=
              tolerance);
      REQUIRE(out.get(1, static_cast<std::int64_t>(t), 0, 2) == 8);
    }
  };
  check({1, 2, 9, 3, 4}, {1, 2, 3, 4}, {0, 1, 1.5, 2, 3}, 0);                     // one inserted
  check({1, 2, 9, 9, 9, 3, 4}, {1, 2, 3, 4}, {0, 1, 1.25, 1.5, 1.75, 2, 3}, 0);   // three
  check({1, 2, 9, 9, 3, 4}, {1, 2, 3, 4}, {0, 1, 4.0 / 3, 5.0 / 3, 2, 3}, 1e-6);  // two
  check({1, 2, 5, 6}, {1, 2, 3, 4, 5, 6}, {0, 1, 4, 5}, 0);  // two deleted: nothing is missing
  // three substituted
  check({1, 2, 9, 9, 9, 6, 7}, {1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6}, 0);
  check({1, 2, 9, 6, 7}, {1, 2, 3, 4, 5, 6, 7}, {0, 1, 3, 5, 6}, 0);  // one for three
}

TEST_CASE(
    "longer gaps are the engine's: holes in every layer, rows untouched, nothing beyond the last "
    "match") {
  const Segment query(shape, 9, 1), delta(shape, 6, 2);
  ReusePart part{.base = query.at(0),
                 .position = 4,
                 .offsets = {{.anchor = test::anchor_id(1), .delta = as_offset(delta)}}};
  part.offsets[0].rows = {-1, 0, -1, -1, 1, 2, -1, 3, -1};
  const auto holes = [&](int window) {
    const Outcome o = outcome(part, {.compute_last = false, .interpolation_window = window});
    REQUIRE(o.ok);
    for (const auto& plane : o.numbers) {  // of layer 0 too, which would need no offset
      for (std::size_t i = 0; i < plane.size(); ++i) {
        const bool hole = std::binary_search(o.holes.begin(), o.holes.end(),
                                             static_cast<std::int64_t>(i / width));
        REQUIRE((plane[i] == static_cast<double>(untouched)) == hole);
      }
    }
    return std::pair(o.holes, o.interpolated);
  };
  using Tokens = std::vector<std::int64_t>;
  REQUIRE(holes(0) == std::pair(Tokens{0, 2, 3, 6, 8}, Tokens{}));
  REQUIRE(holes(1) == std::pair(Tokens{0, 2, 3, 8}, Tokens{6}));
  REQUIRE(holes(2) == std::pair(Tokens{0, 8}, Tokens{2, 3, 6}));
  REQUIRE(holes(1 << 30) == std::pair(Tokens{0, 8}, Tokens{2, 3, 6}));
  part.offsets[0].rows = {0, -1, 5, -1, -1, -1, -1, -1, -1};
  // one token for four: the anchor's side is longer
  REQUIRE(holes(3) == std::pair(Tokens{1, 3, 4, 5, 6, 7, 8}, Tokens{}));
  REQUIRE(holes(4).second == Tokens{1});
}

TEST_CASE("weights where only some anchors have the token") {
  const auto g = test::geometry({.layers = 2, .heads = 1, .channels = 2, .rotary = 0});
  const auto flat = [&](std::initializer_list<float> numbers) {
    test::TestCache cache(g, static_cast<std::int64_t>(numbers.size())),
        zero(g, static_cast<std::int64_t>(numbers.size()));
    std::int64_t t = 0;
    for (const float x : numbers) {
      for (std::size_t p = 0; p < 4; ++p) {
        for (std::int64_t c = 0; c < 2; ++c) {
          cache.set(p, t, 0, c, x);
          zero.set(p, t, 0, c, 0);
        }
      }
      ++t;
    }
    return std::pair(
        *kvmeld::seal(cache.ref()),
        *kvmeld::anchors::measure_offset(*kvmeld::seal(cache.ref()), *kvmeld::seal(zero.ref())));
  };
  ReusePart part{.base = flat({0, 0, 0}).first};
  part.offsets = {
      {.anchor = test::anchor_id(1), .delta = flat({1, 2, 4}).second, .weight = 0.5F},
      {.anchor = test::anchor_id(2), .delta = flat({16, 32, 64}).second, .weight = 0.25F},
      {.anchor = test::anchor_id(3), .delta = flat({256, 512, 1024}).second, .weight = 0.25F}};
  const auto middle = [&](int window) {
    const auto plan = kvmeld::anchors::plan_reuse(
        {&part, 1}, *g, {.compute_last = false, .interpolation_window = window});
    REQUIRE(plan.ok());
    test::TestCache out(g, 3);
    std::vector<std::byte> workspace(plan->workspace_bytes());
    REQUIRE(kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out()).ok());
    return static_cast<double>(out.get(3, 1, 0, 0));
  };
  REQUIRE(middle(3) == 0.5 * 2 + 0.25 * 32 + 0.25 * 512);
  part.offsets[0].rows = {0, -1, 2};
  // those that have it, in their proportion; nothing interpolated beside them
  REQUIRE(middle(3) == 0.5 * 32 + 0.5 * 512);
  part.offsets[1].rows = {0, -1, 1};
  REQUIRE(middle(0) == 512);
  part.offsets[2].rows = {0, -1, 1};
  // None has it: the two heaviest, of equals the smaller id: 2/3 of (1 + 4) / 2 and 1/3 of (16 +
  // 32) / 2.
  REQUIRE(middle(3) == Approx(2.0 / 3 * 2.5 + 1.0 / 3 * 24).epsilon(1e-6));
  part.offsets[0].token_weights = {0.5F, 0, 0.5F};
  REQUIRE(middle(3) == Approx(0.5 * (0.5 * 24 + 0.5 * 384)).epsilon(1e-6));
  for (ReuseOffset& o : part.offsets) o.token_weights = {1, 0.25F, 1};
  REQUIRE(middle(3) == Approx(0.75 * (0.5 * 2.5 + 0.5 * 24)).epsilon(1e-6));  // three equals
  for (ReuseOffset& o : part.offsets) o.token_weights = {1, 0, 1};
  REQUIRE(middle(3) == 0);  // no weight at all: said, not guessed
}

TEST_CASE(
    "K/V of a base that is nearly the segment's: holes, and interpolated only where it was asked "
    "for") {
  const Segment base(shape, 5, 1), delta(shape, 7, 2);
  ReusePart part{.base = base.at(3),
                 .position = 20,
                 .rows = {0, 1, -1, 2, -1, -1, 4},
                 .token_ids = {1, 2, 3, 4, 5, 6, 7}};
  part.offsets = {{.anchor = test::anchor_id(1), .delta = as_offset(delta), .weight = 0.5F}};
  const Outcome plain = outcome(part, {.compute_last = false, .interpolation_window = 1});
  REQUIRE(plain.ok);
  REQUIRE(plain.holes == std::vector<std::int64_t>{2, 4, 5});
  REQUIRE(plain.interpolated_kv.empty());
  const auto plan = kvmeld::anchors::plan_reuse({&part, 1}, *shape, {.compute_last = false});
  // the segment's token, which the engine computes
  REQUIRE(plan->holes()[0] == kvmeld::Hole{2, 22, 3});
  REQUIRE(plan->approximate());
  const Outcome guessed =
      outcome(part, {.compute_last = false, .interpolation_window = 1, .interpolate_kv = true});
  REQUIRE(guessed.holes == std::vector<std::int64_t>{4, 5});
  REQUIRE(guessed.interpolated_kv == std::vector<std::int64_t>{2});
  // no window, no guess
  REQUIRE(outcome(part, {.compute_last = false, .interpolate_kv = true}).holes == plain.holes);
  Segment expected(shape, 7, 3);
  for (std::size_t p = 0; p < expected.values.size(); ++p) {
    const double where[7] = {0, 1, 1.5, 2, -1, -1, 4};
    for (std::size_t t = 0; t < 7; ++t) {
      for (std::size_t c = 0; c < width; ++c) {
        const auto low = static_cast<std::size_t>(std::max(0.0, std::floor(where[t]))),
                   high = static_cast<std::size_t>(std::max(0.0, std::ceil(where[t])));
        double x = 0.5 * (base.values[p][low * width + c] + base.values[p][high * width + c]);
        if (expected.layer_of(p) > 0) x += 0.5 * delta.values[p][t * width + c];
        expected.values[p][t * width + c] = x;
      }
    }
  }
  REQUIRE(error_of(guessed, expected, 20, guessed.holes) <= 1e-4);
  REQUIRE(
      kvmeld::anchors::plan_reuse({&part, 1}, *shape,
                                  {.interpolation_window = 1, .interpolate_kv = true})
          ->render_id() !=
      kvmeld::anchors::plan_reuse({&part, 1}, *shape, {.interpolation_window = 1})->render_id());
}

TEST_CASE("chosen anchors become offsets with maps; what is too far is left out") {
  const kvmeld::Digest128 context{1, 2};
  const auto anchor = [&](std::uint64_t seed, const std::vector<TokenId>& ids) {
    const Segment alone(shape, std::ssize(ids), seed);
    auto made = kvmeld::anchors::make_anchor(sealed(alone, ids), {});
    REQUIRE(made.ok());
    REQUIRE(*kvmeld::anchors::add_offset(
        *made,
        {context,
         *kvmeld::anchors::measure_offset(sealed(alone.in_context(seed + 1), ids), made->base),
         {}}));
    return std::make_shared<const kvmeld::anchors::Anchor>(*std::move(made));
  };
  const std::vector<TokenId> text{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const std::vector<TokenId> inserted{1, 2, 3, 4, 50, 5, 6, 7, 8, 9, 10},
      other{20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30};
  const std::vector<std::shared_ptr<const kvmeld::anchors::Anchor>> anchors{
      anchor(1, text), anchor(2, inserted), anchor(3, other)};
  const std::vector<float> weights{0.25F, 0.25F, 0.5F};
  const auto offsets = kvmeld::anchors::aligned_offsets(anchors, weights, context, text);
  REQUIRE(offsets.ok());
  REQUIRE(offsets->size() == 2);
  REQUIRE((*offsets)[0].rows.empty());
  REQUIRE((*offsets)[1].rows == Rows{0, 1, 2, 3, 5, 6, 7, 8, 9, 10});
  REQUIRE((*offsets)[0].weight == 0.5F);
  REQUIRE((*offsets)[1].weight == 0.5F);
  const ReusePart part{.base = anchors[0]->base, .position = 5, .offsets = *offsets};
  REQUIRE(outcome(part, {.compute_last = false}).holes.empty());
  // by index everything is as near
  REQUIRE(
      kvmeld::anchors::aligned_offsets(anchors, weights, context, text, {.match = {}})->size() ==
      3);
  REQUIRE(
      kvmeld::anchors::aligned_offsets({&anchors[2], 1}, {&weights[2], 1}, context, text)->empty());
  REQUIRE(kvmeld::anchors::aligned_offsets(anchors, weights, kvmeld::Digest128{9, 9}, text)
              .status()
              .code() == ErrorCode::not_found);
  REQUIRE(kvmeld::anchors::aligned_offsets(anchors, {weights.data(), 2}, context, text)
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::aligned_offsets(anchors, weights, context, text, {.similarity = NAN})
              .status()
              .code() == ErrorCode::invalid_argument);
}

TEST_CASE("maps and windows that mean nothing are refused") {
  const Segment query(shape, 4, 1), delta(shape, 6, 2);
  const ReusePart good{
      .base = query.at(0),
      .position = 4,
      .offsets = {
          {.anchor = test::anchor_id(1), .delta = as_offset(delta), .rows = {0, -1, 2, 5}}}};
  REQUIRE(refused(good, {.interpolation_window = 3}) == ErrorCode::ok);
  REQUIRE(refused(good, {.interpolation_window = -1}) == ErrorCode::invalid_argument);
  const auto with_rows = [&](Rows rows) {
    ReusePart part = good;
    part.offsets[0].rows = std::move(rows);
    return refused(part);
  };
  REQUIRE(with_rows({0, 2, 1, 3}) == ErrorCode::invalid_argument);
  REQUIRE(with_rows({0, 1, -1, 1}) == ErrorCode::invalid_argument);
  REQUIRE(with_rows({0, 1, 2, 6}) == ErrorCode::invalid_argument);
  REQUIRE(with_rows({-2, 1, 2, 3}) == ErrorCode::invalid_argument);
  REQUIRE(with_rows({0, 1, 2}) == ErrorCode::token_count_mismatch);
  REQUIRE(with_rows({-1, -1, -1, -1}) == ErrorCode::ok);
  ReusePart part = good;
  part.offsets[0].weight = -1;
  REQUIRE(refused(part) == ErrorCode::invalid_argument);  // shared out among whom?
  part.offsets[0].rows = {0, 1, 2, 3};
  REQUIRE(refused(part) == ErrorCode::ok);
  part.offsets[0].token_weights = {1, NAN, 1, 1};
  REQUIRE(refused(part) == ErrorCode::non_finite);
  part = good;
  part.rows = {0, 1, 1, 2};
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.rows = {0, 1, 2, 4};
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.rows = {0, -1, 1, 2};
  REQUIRE(refused(part) == ErrorCode::ok);
  part.first = 1;
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.first = 0;
  part.tokens = 3;
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.tokens = -1;
  part.token_ids = {1, 2};
  REQUIRE(refused(part) == ErrorCode::token_count_mismatch);
  part = good;
  part.offsets[0].gains.assign(11, 1.0F);
  REQUIRE(refused(part) == ErrorCode::token_count_mismatch);
  part.offsets[0].gains.assign(12, 1.0F);
  REQUIRE(refused(part) == ErrorCode::ok);
  part.offsets[0].gains[7] = NAN;
  REQUIRE(refused(part) == ErrorCode::non_finite);
}
