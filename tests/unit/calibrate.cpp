// Calibration with a made-up engine whose right answer is known.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/calibrate.hpp>

#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::Candidate;
using kvmeld::CandidateRender;
using kvmeld::CaseScore;
using kvmeld::Concat;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using kvmeld::MatchMode;
using kvmeld::Result;
using kvmeld::TokenMatch;
using kvmeld::ValidationCase;
using kvmeld::WeightedMean;

const std::shared_ptr<kvmeld::Geometry> g =
    test::geometry({.layers = 2, .heads = 2, .channels = 32});

// Fragments of these lengths, with ids or latent, of text that no two of them share.
ValidationCase case_of(const std::vector<std::int64_t>& lengths, bool ids, std::uint64_t seed) {
  std::vector<test::Sealed> fragments;
  kvmeld::TokenId next = 100;
  for (const std::int64_t length : lengths) {
    std::vector<kvmeld::TokenId> tokens;
    for (std::int64_t t = 0; t < length; ++t) tokens.push_back(next++);
    fragments.push_back(test::sealed(g, length, ++seed,
                                     {.tokens = ids ? std::span<const kvmeld::TokenId>(tokens)
                                                    : std::span<const kvmeld::TokenId>()}));
  }
  return {test::set_of(fragments), {.geometry = *g}};
}

Candidate concat(std::string name = "concat") { return {std::move(name), kvmeld::merger(ById{})}; }
Candidate mean(std::string name = "mean") {
  return {std::move(name), kvmeld::merger(ById{}, Aligner{TokenMatch{.mode = MatchMode::index}},
                                          Fuser{WeightedMean{}})};
}
Candidate prefix(std::string name = "prefix") {
  return {std::move(name),
          kvmeld::merger(ById{}, Aligner{TokenMatch{.mode = MatchMode::common_prefix}})};
}

// What an aligner says whose map did not pass its gate.
struct Refusing {
  static constexpr bool reproducible = true;
  [[nodiscard]] Result<kvmeld::Alignment> align(std::span<const kvmeld::Source>,
                                                std::int64_t) const {
    return {ErrorCode::gate_refused, "the map scored 0.42, the bar is 0.90"};
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.Refusing"); }
};

// An engine that answers from value rows: it knows a token if the row that some agent wrote for it
// is in its cache, byte by byte.
struct RowEngine {
  const std::vector<ValidationCase>& cases;
  std::vector<std::string> seen{};  // candidate and case of every call

  Result<CaseScore> operator()(CandidateRender& render, std::size_t index) {
    seen.push_back(render.candidate().name() + std::to_string(index));
    kvmeld::HostCache cache(render.plan().shared_geometry(), render.plan().tokens());
    const auto report = render.into(cache.mutable_ref());
    if (!report) return report.error();
    const kvmeld::PlaneRef values = cache.kv_cache_ref().plane(1, 1);
    const std::size_t row = 2 * 32 * sizeof(float);
    double known = 0, all = 0;
    for (const auto& entry : cases[index].set.entries()) {
      const kvmeld::FragmentView view(entry.fragment);
      for (std::int64_t t = 0; t < entry.fragment.token_count(); ++t) {
        ++all;
        for (std::int64_t o = 0; o < report->tokens; ++o) {
          if (std::memcmp(view.ref().plane(1, 1).data + static_cast<std::size_t>(t) * row,
                          values.data + static_cast<std::size_t>(o) * row, row) == 0) {
            ++known;
            break;
          }
        }
      }
    }
    return CaseScore{.score = all > 0 ? known / all : 0, .divergence = all - known};
  }
};

// An engine that reads its figures from a table: (case, candidate).
struct Scripted {
  std::vector<std::vector<CaseScore>> table;
  std::vector<std::string> names;

  Result<CaseScore> operator()(CandidateRender& render, std::size_t index) const {
    for (std::size_t c = 0; c < names.size(); ++c) {
      if (names[c] == render.candidate().name()) return table[index][c];
    }
    return kvmeld::Status(ErrorCode::not_found, "no such candidate");
  }
};

std::optional<std::size_t> best_of(const std::vector<CaseScore>& figures) {
  const std::vector<ValidationCase> cases{case_of({2}, true, 1)};
  std::vector<Candidate> candidates;
  Scripted engine{{figures}, {}};
  for (std::size_t c = 0; c < figures.size(); ++c) {
    engine.names.push_back(std::to_string(c));
    candidates.push_back(concat(engine.names.back()));
  }
  const auto made = kvmeld::calibrate(cases, candidates, engine);
  REQUIRE(made.ok());
  return made->best;
}

}  // namespace

TEST_CASE(
    "fragments of unrelated text: concatenation keeps them, a mean of the i-th tokens does not") {
  const std::vector<ValidationCase> cases{case_of({4, 6}, true, 10), case_of({3, 3, 5}, true, 20)};
  const std::vector<Candidate> candidates{mean(), concat(), prefix()};
  for (const std::size_t threads : {1U, 3U}) {
    RowEngine engine{cases};
    const auto made = kvmeld::calibrate(cases, candidates, engine, {.threads = threads});
    REQUIRE(made.ok());
    REQUIRE(made->rows.size() == 3);
    CHECK(engine.seen ==
          std::vector<std::string>{"mean0", "concat0", "prefix0", "mean1", "concat1", "prefix1"});
    // only the longest fragment's last two tokens stand alone
    CHECK(made->rows[0].score == (2.0 / 10 + 2.0 / 11) / 2);
    CHECK(made->rows[0].divergence == (8.0 + 9.0) / 2);
    CHECK(made->rows[1].score == 1.0);
    CHECK(made->rows[1].divergence == 0.0);
    CHECK(made->rows[2].score == 1.0);  // nothing in common: all tokens stand alone
    for (std::size_t c = 0; c < 3; ++c) {
      CHECK(made->rows[c].name == candidates[c].name());
      CHECK(made->rows[c].merger == candidates[c].digest());
      CHECK(made->rows[c].cases == 2);
      CHECK(made->rows[c].cost_ms > 0);
      CHECK(made->rows[c].status.ok());
    }
    REQUIRE(made->best.has_value());
    CHECK(*made->best != 0);
  }
}

TEST_CASE(
    "a candidate that refuses a case is out with the reason, and leaves the others' figures "
    "alone") {
  // Case 1 is latent, which a match by ids refuses.
  const std::vector<ValidationCase> cases{case_of({4, 6}, true, 10), case_of({3, 2}, false, 20),
                                          case_of({2, 2}, true, 30)};
  const std::vector<Candidate> candidates{
      {"gate", kvmeld::merger(ById{}, Aligner{Refusing{}})}, prefix(), concat()};
  RowEngine engine{cases};
  const auto made = kvmeld::calibrate(cases, candidates, engine);
  REQUIRE(made.ok());
  CHECK(made->rows[0].status.code() == ErrorCode::gate_refused);
  CHECK(made->rows[0].status.message() == "case 0: the map scored 0.42, the bar is 0.90");
  CHECK(made->rows[0].cases == 0);
  CHECK(made->rows[0].score == 0.0);
  CHECK(made->rows[1].status.code() == ErrorCode::tokens_required);
  CHECK(made->rows[1].status.message().rfind("case 1: ", 0) == 0);
  CHECK(made->rows[1].cases == 1);
  CHECK(made->rows[1].score == 1.0);
  CHECK(made->rows[2].status.ok());
  CHECK(made->rows[2].cases == 3);
  CHECK(made->best == std::optional<std::size_t>(2));
  CHECK(engine.seen == std::vector<std::string>{"prefix0", "concat0", "concat1", "concat2"});

  const auto none = kvmeld::calibrate(cases, std::span(candidates).first(1), engine);
  REQUIRE(none.ok());
  CHECK_FALSE(none->best.has_value());
}

TEST_CASE("what an engine says wrong puts out the candidate that it says it of") {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  for (const CaseScore bad :
       {CaseScore{nan, 0, 1}, CaseScore{inf, 0, 1}, CaseScore{-inf, 0, 1}, CaseScore{9, nan, 1},
        CaseScore{9, -inf, 1}, CaseScore{9, 0, nan}, CaseScore{9, 0, inf}}) {
    CHECK(best_of({bad, {1, 5, 1}}) == std::optional<std::size_t>(1));
    CHECK_FALSE(best_of({bad}).has_value());
  }
  // a token that the merge holds impossible
  CHECK(best_of({{2, inf, 1}, {1, 0, 1}}) == std::optional<std::size_t>(0));
  CHECK(best_of({{2, inf, 1}, {2, 7, 1}}) == std::optional<std::size_t>(1));

  const std::vector<ValidationCase> cases{case_of({2}, true, 1)};
  const auto failing = [](CandidateRender& render, std::size_t) -> Result<CaseScore> {
    if (render.candidate().name() == "a") return {ErrorCode::engine_failure, "decoding returned 1"};
    kvmeld::HostCache cache(render.plan().shared_geometry(),
                            render.candidate().name() == "b" ? 1 : 2);
    // b: too small, and the engine goes on with what it had
    (void)render.into(cache.mutable_ref());
    return CaseScore{.score = 1};
  };
  const std::vector<Candidate> candidates{concat("a"), concat("b"), concat("c")};
  const auto made = kvmeld::calibrate(cases, candidates, failing);
  REQUIRE(made.ok());
  CHECK(made->rows[0].status.code() == ErrorCode::engine_failure);
  CHECK(made->rows[0].status.message() == "case 0: decoding returned 1");
  CHECK(made->rows[1].status.code() == ErrorCode::output_too_small);
  CHECK(made->best == std::optional<std::size_t>(2));
}

TEST_CASE("the best row: score, then divergence, then cost, then order") {
  CHECK(best_of({{1, 0, 1}, {2, 9, 9}}) == std::optional<std::size_t>(1));
  CHECK(best_of({{2, 3, 1}, {2, 2, 9}, {1, 0, 0}}) == std::optional<std::size_t>(1));
  CHECK(best_of({{2, 2, 3}, {2, 2, 2}, {2, 2, 2}}) == std::optional<std::size_t>(1));
  CHECK(best_of({{-1, 2, 3}, {-2, 2, 3}}) == std::optional<std::size_t>(0));
  // Means decide, not a single case.
  const std::vector<ValidationCase> cases{case_of({2}, true, 1), case_of({3}, true, 2)};
  const std::vector<Candidate> candidates{concat("a"), concat("b")};
  const auto made = kvmeld::calibrate(
      cases, candidates, Scripted{{{{3, 1, 4}, {2, 1, 6}}, {{1, 2, 4}, {3, 3, 2}}}, {"a", "b"}});
  REQUIRE(made.ok());
  CHECK(made->rows[0].score == 2.0);
  CHECK(made->rows[1].score == 2.5);
  CHECK(made->rows[1].divergence == 2.0);
  CHECK(made->rows[1].cost_ms == 4.0);
  CHECK(made->best == std::optional<std::size_t>(1));
}

TEST_CASE("calibrations that can decide nothing are refused") {
  const std::vector<ValidationCase> cases{case_of({2}, true, 1)};
  const std::vector<Candidate> one{concat()}, twice{concat(), mean(), mean()};
  RowEngine engine{cases};
  const auto refused = [&](std::span<const ValidationCase> set,
                           std::span<const Candidate> candidates) {
    const auto made = kvmeld::calibrate(set, candidates, engine);
    return made.ok() ? std::string() : made.error().message();
  };
  CHECK(refused({}, one) ==
        "calibrate: a validation set of 0 cases decides nothing between 1 candidates");
  CHECK(refused(cases, {}) == "calibrate: 0 candidates for 1 cases");
  CHECK(refused(cases, twice) == "calibrate: candidates 1 and 2 are both called mean");
  CHECK(engine.seen.empty());

  // agents that hold nothing yet
  const std::vector<ValidationCase> empty{{kvmeld::FragmentSet{}, {.geometry = *g}}};
  RowEngine on_empty{empty};
  const auto made = kvmeld::calibrate(empty, one, on_empty);
  REQUIRE(made.ok());
  CHECK(made->rows[0].cases == 1);
  CHECK(made->best == std::optional<std::size_t>(0));
}

TEST_CASE("a candidate renders what its merger renders") {
  const ValidationCase set = case_of({4, 6, 5}, true, 40);
  const auto merger = kvmeld::merger(ById{}, Aligner{TokenMatch{.mode = MatchMode::index}},
                                     Fuser{kvmeld::Median{}});
  const Candidate candidate("median", merger);
  CHECK(candidate.digest() == merger.digest());
  CHECK(candidate.reproducible());
  const auto plan = candidate.plan(set.set, set.target);
  REQUIRE(plan.ok());
  const auto typed = kvmeld::plan(set.set, merger, set.target);
  REQUIRE(typed.ok());
  CHECK(plan->render_id() == typed->render_id());
  CHECK(std::ranges::equal(plan->positions(), typed->positions()));
  CHECK(std::ranges::equal(plan->token_ids(), typed->token_ids()));
  CHECK(plan->workspace_bytes() == typed->workspace_bytes());
  CHECK(plan->holes().empty());
  kvmeld::HostCache a(plan->shared_geometry(), plan->tokens()),
      b(plan->shared_geometry(), plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto left =
      plan->run(kvmeld::exec::threads(2), workspace, a.mutable_ref(), {.content_digest = true});
  const auto right =
      kvmeld::run(kvmeld::exec::seq, *typed, workspace, b.mutable_ref(), {.content_digest = true});
  REQUIRE(left.ok());
  REQUIRE(right.ok());
  CHECK(*left->content_digest == *right->content_digest);
  CHECK(plan->run(kvmeld::exec::threads(1), {}, a.mutable_ref()).error().code() ==
        ErrorCode::workspace_too_small);
}

TEST_CASE("recipes: what comes after the question counts first, and nothing beyond the loss") {
  using kvmeld::recipes::Row;
  const auto row = [](double kl, double before, double after) {
    Row made;
    made.figures.cases = 1;
    made.figures.divergence = kl;
    made.tokens_before = before;
    made.tokens_after = after;
    return made;
  };
  std::vector<Row> rows{row(.5, 10, 0), row(.1, 20, 0), row(.05, 20, 0), row(.01, 0, 5)};
  CHECK(kvmeld::recipes::cheapest(rows, 1) == std::size_t{0});
  CHECK(kvmeld::recipes::cheapest(rows, .5) == std::size_t{0});  // at most
  CHECK(kvmeld::recipes::cheapest(rows, .2) == std::size_t{2});  // as dear, and nearer
  CHECK(kvmeld::recipes::cheapest(rows, .02) == std::size_t{3});
  CHECK_FALSE(kvmeld::recipes::cheapest(rows, .001));
  rows[3].figures.status = kvmeld::Status(ErrorCode::non_finite, "no");
  CHECK_FALSE(kvmeld::recipes::cheapest(rows, .02));
  rows[0].figures.divergence = std::numeric_limits<double>::quiet_NaN();
  CHECK(kvmeld::recipes::cheapest(rows, 1) == std::size_t{2});
  rows[2].figures.cases = 0;
  CHECK(kvmeld::recipes::cheapest(rows, 1) == std::size_t{1});

  const auto engine = [](CandidateRender&, std::size_t) -> Result<CaseScore> {
    return CaseScore{};
  };
  const ValidationCase one = case_of({2}, true, 1);
  using kvmeld::recipes::Recipe;
  const auto refused = [&](const std::vector<Recipe>& recipes, double loss) {
    const auto choice = kvmeld::recipes::choose(recipes, loss, engine);
    REQUIRE_FALSE(choice.ok());
    CHECK(choice.error().code() == ErrorCode::invalid_argument);
  };
  refused({}, 1);
  refused({{concat(), {}, 0}}, 1);
  refused({{concat(), {one}, 0}, {mean(), {one, one}, 0}}, 1);
  refused({{concat("a"), {one}, 0}, {mean("a"), {one}, 0}}, 1);
  refused({{concat(), {one}, 0}}, std::numeric_limits<double>::quiet_NaN());
}

TEST_CASE("a text's own sentences as questions") {
  using kvmeld::recipes::Completion;
  using kvmeld::recipes::completions;
  const std::vector<kvmeld::TokenId> ends{7, 9};
  //                                          0           4  5     7  8              13 14
  const std::vector<kvmeld::TokenId> tokens{1, 2, 3, 4, 9, 1, 2, 7, 1, 2, 3, 4, 5, 7, 1, 2, 3, 4};
  CHECK(completions(tokens, ends, 9, 4) == std::vector<Completion>{{0, 2, 5}, {8, 11, 14}});
  CHECK(completions(tokens, ends, 9, 3) ==
        std::vector<Completion>{{0, 2, 5}, {5, 6, 8}, {8, 11, 14}});
  CHECK(completions(tokens, ends, 2, 3) == std::vector<Completion>{{0, 2, 5}, {5, 6, 8}});
  CHECK(completions(tokens, ends, 0, 3).empty());
  CHECK(completions({}, ends, 3).empty());
  CHECK(completions(tokens, {}, 3, 1).empty());
}
