// Summaries within a budget: closed-form cases, and laws over random fragments.

#include <cmath>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/policies/select.hpp>

#include "support/law.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

// Two layers of one head; keys of layer 1 are given, row by row; the rest is random.
Fragment with_keys(const std::shared_ptr<const Geometry>& g,
                   const std::vector<std::vector<float>>& keys,
                   const std::vector<std::int64_t>& positions = {}) {
  const auto n = static_cast<std::int64_t>(keys.size());
  test::TestCache cache(g, n);
  cache.fill(1);
  for (std::int64_t t = 0; t < n; ++t) {
    const auto& row = keys[static_cast<std::size_t>(t)];
    for (std::size_t c = 0; c < row.size(); ++c)
      cache.set(2, t, 0, static_cast<std::int64_t>(c), row[c]);
  }
  const auto made = seal(cache.ref(), {.positions = positions});
  REQUIRE(made.ok());
  return *made;
}

template <class P>
std::vector<std::int32_t> selected(const P& policy, const Fragment& fragment) {
  const Metadata none;
  const Source source{&fragment, &fragment.payloads()[0], &none, {}};
  const auto set = policy.select(source);
  INFO(set.status().message());
  REQUIRE(set.ok());
  if (!set->all) return set->present;
  std::vector<std::int32_t> all;
  for (std::int32_t t = 0; t < fragment.token_count(); ++t) all.push_back(t);
  return all;
}

template <class P>
ErrorCode refusal(const P& policy, const Fragment& fragment) {
  const Metadata none;
  const auto set = policy.select(Source{&fragment, &fragment.payloads()[0], &none, {}});
  REQUIRE_FALSE(set.ok());
  return set.error().code();
}

using Tokens = std::vector<std::int32_t>;
const auto flat = test::geometry({.layers = 2, .heads = 1, .channels = 2, .rotary = 0});

}  // namespace

TEST_CASE("key frames: the tokens that the last one looks at") {
  // The only query is the last key, (1, 0): scores 4, 0, 2, 1 over √2, so mass falls with the first
  // channel.
  const Fragment f = with_keys(flat, {{4, 0}, {0, 9}, {2, 1}, {1, 0}});
  CHECK(selected(SelectKeyFrames{.budget = 1, .queries = 1}, f) == Tokens{0});
  CHECK(selected(SelectKeyFrames{.budget = 2, .queries = 1}, f) == Tokens{0, 2});
  CHECK(selected(SelectKeyFrames{.budget = 3, .queries = 1}, f) == Tokens{0, 2, 3});
  CHECK(selected(SelectKeyFrames{.budget = 0}, f).empty());
  // The query before it, (2, 1), sees the first three: shares .318, .644, .038, beside the last
  // one's .703, .042, .171, .084.
  CHECK(selected(SelectKeyFrames{.budget = 2, .queries = 2}, f) == Tokens{0, 1});
  // Nothing tells tokens apart: the earlier ones.
  CHECK(selected(SelectKeyFrames{.budget = 2, .queries = 0}, f) == Tokens{0, 1});
  CHECK(selected(SelectKeyFrames{.budget = 2, .queries = 1},
                 with_keys(flat, {{1, 1}, {1, 1}, {1, 1}, {1, 1}})) == Tokens{0, 1});
}

TEST_CASE("key frames: mass from the engine goes before mass from keys") {
  const Fragment f = with_keys(flat, {{4, 0}, {0, 9}, {2, 1}, {1, 0}});
  SelectKeyFrames policy{.budget = 2, .queries = 1};
  policy.scores = {{f.id(), {0.1F, 0.3F, 0.3F, 0.3F}}};
  CHECK(selected(policy, f) == Tokens{1, 2});
  policy.scores[0].mass.pop_back();
  CHECK(refusal(policy, f) == ErrorCode::token_count_mismatch);
  policy.scores[0].mass.push_back(INFINITY);
  CHECK(refusal(policy, f) == ErrorCode::non_finite);
  CHECK(refusal(SelectKeyFrames{.budget = -1}, f) == ErrorCode::invalid_argument);
  CHECK(refusal(SelectKeyFrames{.budget = 1, .queries = -1}, f) == ErrorCode::invalid_argument);
  CHECK(refusal(SelectKeyFrames{.budget = 1, .layer = 2}, f) == ErrorCode::invalid_argument);
}

TEST_CASE("medoids: one of each group, the middle one, the earlier of equals") {
  // Groups around (0, 0) and (10, 0); within each, the middle is nearest to the mean.
  const Fragment f = with_keys(flat, {{-1, 0}, {0, 0}, {1, 0}, {9, 0}, {10, 0}, {11, 0}});
  CHECK(selected(SelectMedoids{.budget = 2}, f) == Tokens{1, 4});
  // means 5: (1, 0) and (9, 0) are both 4 away
  CHECK(selected(SelectMedoids{.budget = 1}, f) == Tokens{2});
  // the medoid, then the farthest
  CHECK(selected(SelectMedoids{.budget = 2, .iterations = 0}, f) == Tokens{2, 5});
  CHECK(selected(SelectMedoids{.budget = 0}, f).empty());
  CHECK(selected(SelectMedoids{.budget = 2}, with_keys(flat, {{1, 1}, {1, 1}, {1, 1}})) ==
        Tokens{0, 1});
  CHECK(refusal(SelectMedoids{.budget = -1}, f) == ErrorCode::invalid_argument);
  CHECK(refusal(SelectMedoids{.budget = 1, .iterations = -1}, f) == ErrorCode::invalid_argument);
  CHECK(refusal(SelectMedoids{.budget = 1, .layer = 7}, f) == ErrorCode::invalid_argument);
}

TEST_CASE("medoids look through positions") {
  // One content at positions 0 and 5, another at 1 and 9: un-rotated, two groups of two.
  const auto g = test::geometry({.layers = 2, .heads = 1, .channels = 4});
  const std::vector<std::vector<double>> content{{3, 1, 0, 2}, {-1, 2, 4, 0}};
  const std::vector<std::int64_t> positions{0, 1, 5, 9};
  std::vector<std::vector<float>> keys;
  for (std::size_t t = 0; t < 4; ++t) {
    const std::vector<double>& k = content[t % 2];
    std::vector<float> row(4);
    for (std::size_t c = 0; c < 2; ++c) {
      const double angle =
          static_cast<double>(positions[t]) * std::pow(10000.0, -static_cast<double>(c) / 2);
      row[c] = static_cast<float>(k[c] * std::cos(angle) - k[c + 2] * std::sin(angle));
      row[c + 2] = static_cast<float>(k[c] * std::sin(angle) + k[c + 2] * std::cos(angle));
    }
    keys.push_back(row);
  }
  const Tokens two = selected(SelectMedoids{.budget = 2}, with_keys(g, keys, positions));
  REQUIRE(two.size() == 2);
  CHECK(two[0] % 2 != two[1] % 2);
}

TEST_CASE("laws of summaries") {
  test::law(
      "budgets are kept, tokens ascend, a budget for all keeps all, and twice is the same", [] {
        const auto n = static_cast<std::int64_t>(*rc::gen::inRange(0, 24));
        const auto budget = static_cast<std::int64_t>(*rc::gen::inRange(0, 26));
        const auto seed = *rc::gen::arbitrary<std::uint64_t>();
        const ElementType type =
            *rc::gen::element(ElementType::f32, ElementType::f16, ElementType::bf16);
        const Fragment f =
            test::sealed(test::geometry({.type = type, .channels = *rc::gen::element(32, 80)}), n,
                         seed)
                .fragment;
        const auto check = [&](const auto& policy) {
          const Tokens once = selected(policy, f);
          RC_ASSERT(once == selected(policy, f));
          RC_ASSERT(static_cast<std::int64_t>(once.size()) == (std::min)(budget, n));
          RC_ASSERT(std::is_sorted(once.begin(), once.end()));
          RC_ASSERT(std::adjacent_find(once.begin(), once.end()) == once.end());
        };
        check(SelectKeyFrames{.budget = budget});
        check(SelectMedoids{.budget = budget});
      });
}

TEST_CASE("a summary renders; for any order of insertion the bytes are one") {
  const auto g = test::geometry({.type = ElementType::f16});
  std::vector<Fragment> fragments;
  for (std::uint64_t i = 0; i < 3; ++i) fragments.push_back(test::sealed(g, 20, i).fragment);
  const auto digest = [&](const auto& merger, bool reversed) {
    FragmentSet set;
    for (std::size_t i = 0; i < 3; ++i)
      REQUIRE(set.insert(fragments[reversed ? 2 - i : i], {i, 0}).ok());
    const auto made = plan(set, merger, Target{*g});
    REQUIRE(made.ok());
    HostCache out(made->shared_geometry(), made->tokens());
    std::vector<std::byte> workspace(made->workspace_bytes());
    const auto report =
        run(exec::seq, *made, workspace, out.mutable_ref(), {.content_digest = true});
    REQUIRE(report.ok());
    return std::pair(report->tokens, *report->content_digest);
  };
  for (const bool reversed : {false, true}) {
    CHECK(digest(merger(SelectKeyFrames{.budget = 7}), reversed) ==
          digest(merger(SelectKeyFrames{.budget = 7}), false));
    CHECK(digest(merger(SelectMedoids{.budget = 7}), reversed).first == 21);
    CHECK(digest(merger(SelectMedoids{.budget = 7}), reversed) ==
          digest(merger(SelectMedoids{.budget = 7}), false));
    CHECK(digest(merger(SelectMedoids{.budget = 20}), reversed).second ==
          digest(merger(), reversed).second);
  }
}
