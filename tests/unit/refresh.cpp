// Refresh: what a fragment is read again behind, what is sealed, and where it stands in a set.
#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/refresh.hpp>

#include "support/catch.hpp"
#include "support/page_snippets.hpp"
#include "support/random_cache.hpp"

// example-begin: an engine of one's own
// What an engine of one's own does: render the others, decode the tokens behind them, seal.
template <class Engine>
kvmeld::Result<kvmeld::Fragment> read_behind(Engine& engine, const kvmeld::FragmentSet& said,
                                             const kvmeld::FragmentId& mine) {
  using namespace kvmeld;
  const auto behind = refresh::set_behind(said, mine);
  if (!behind) return behind.error();
  const Fragment& own = said.find(mine)->fragment;
  const auto made = plan(*behind, merger(ByDot{}), {.geometry = own.geometry()});
  if (!made) return made.error();
  const auto state = engine.decode(*made, own.tokens());  // the cache after it, and its positions
  return refresh::seal(own, state.cache, state.positions, refresh::context_digest(*made),
                       said.hash());
}
// example-end

namespace {

using kvmeld::Digest128;
using kvmeld::Dot;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentId;
using kvmeld::FragmentSet;
using kvmeld::Presence;

const auto g = test::geometry({.type = kvmeld::ElementType::f16, .layers = 2, .heads = 2});

Fragment span_of_tokens(std::int64_t count, std::uint64_t seed, const FragmentId& prefix = {},
                        Digest128 lead_in = {}) {
  const auto tokens = test::token_ids(count, static_cast<kvmeld::TokenId>(100 * seed));
  return test::sealed(g, count, seed,
                      {.tokens = tokens, .context = {.prefix = prefix, .lead_in = lead_in}})
      .fragment;
}
/// What an engine that reads `own` behind `context_rows` rows would give.
Fragment read_again(const Fragment& own, std::uint64_t seed, const Digest128& context,
                    std::int64_t context_rows = 3) {
  test::TestCache rows(g, context_rows + own.token_count());
  rows.fill(seed);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(rows.tokens()));
  for (std::size_t i = 0; i < positions.size(); ++i)
    positions[i] = 5 + static_cast<std::int64_t>(i);
  const auto made = kvmeld::refresh::seal(own, rows.ref(), positions, context);
  REQUIRE(made.ok());
  return *made;
}
std::vector<FragmentId> ids_in_force(const FragmentSet& set, Presence presence) {
  std::vector<FragmentId> out;
  for (const kvmeld::InForce& read : in_force(set, presence)) out.push_back(read.entry->id);
  return out;
}
/// The spans' ids in the order in which a plan by provenance has them.
std::vector<FragmentId> planned(const FragmentSet& set) {
  const auto plan = kvmeld::plan(set, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *g});
  INFO((plan ? "" : plan.error().message()));
  REQUIRE(plan.ok());
  std::vector<FragmentId> out;
  for (const auto& source : plan->core().sources) {
    if (source.fragment.role() == kvmeld::Role::span) out.push_back(source.fragment.id());
  }
  return out;
}

}  // namespace

TEST_CASE("a context is named by the fragments that stood there, in their order") {
  const FragmentId a = span_of_tokens(2, 1).id(), b = span_of_tokens(2, 2).id();
  const std::vector<FragmentId> none, one{a}, both{a, b}, other{b, a};
  std::vector<Digest128> all;
  for (const auto* ids : {&none, &one, &both, &other})
    all.push_back(kvmeld::refresh::context_digest(*ids));
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(all[i] != Digest128{});
    for (std::size_t k = 0; k < i; ++k) CHECK(all[i] != all[k]);
  }
  FragmentSet set;
  REQUIRE(set.insert(span_of_tokens(2, 2), {1, 0}).ok());
  REQUIRE(set.insert(span_of_tokens(2, 1), {2, 0}).ok());
  const auto plan = kvmeld::plan(set, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *g});
  REQUIRE(plan.ok());
  CHECK(kvmeld::refresh::context_digest(*plan) == kvmeld::refresh::context_digest(other));
}

TEST_CASE("what was read again has its own context, and keeps the plain encoding for a beginning") {
  const Fragment own = span_of_tokens(4, 1);
  const std::vector<FragmentId> before{span_of_tokens(2, 2).id()};
  const Digest128 context = kvmeld::refresh::context_digest(before);
  const Fragment again = read_again(own, 9, context);
  CHECK(again.id() != own.id());
  CHECK(std::equal(again.tokens().begin(), again.tokens().end(), own.tokens().begin(),
                   own.tokens().end()));
  REQUIRE(again.payloads().size() == 2);
  CHECK(again.payloads()[0].lead_in == context);
  CHECK(again.payloads()[0].positions == std::vector<std::int64_t>{8, 9, 10, 11});
  CHECK(again.payloads()[1].digest == own.payloads()[0].digest);  // nothing is stored twice
  CHECK(read_again(own, 9, context).id() == again.id());

  // a second round has the first one's plain encoding
  const Fragment later = read_again(again, 10, context);
  REQUIRE(later.payloads().size() == 2);
  CHECK(later.payloads()[1].digest == own.payloads()[0].digest);

  // behind a lead-in alone there is none
  const Fragment led = span_of_tokens(4, 1, {}, Digest128{1, 2});
  CHECK(read_again(led, 9, context).payloads().size() == 1);

  test::TestCache few(g, 3);
  few.fill(1);
  const auto short_of = kvmeld::refresh::seal(own, few.ref(), {}, context);
  REQUIRE_FALSE(short_of.ok());
  CHECK(short_of.error().code() == ErrorCode::token_count_mismatch);
  const Fragment latent = test::sealed(g, 3, 4).fragment;
  const auto unread = kvmeld::refresh::seal(latent, few.ref(), {}, context);
  REQUIRE_FALSE(unread.ok());
  CHECK(unread.error().code() == ErrorCode::tokens_required);
  test::TestCache rows(g, 4);
  rows.fill(2);
  const auto gone = kvmeld::refresh::seal(test::evicted(own), rows.ref(), {}, context);
  REQUIRE_FALSE(gone.ok());
  CHECK(gone.error().code() == ErrorCode::payload_missing);
}

TEST_CASE("a refreshed fragment stands where the older one stood, however late it came") {
  std::vector<Fragment> f;
  for (std::uint64_t i = 0; i < 3; ++i) f.push_back(span_of_tokens(3, i + 1));
  FragmentSet set;
  for (std::uint64_t i = 0; i < 3; ++i) REQUIRE(set.insert(f[i], {1, i}).ok());
  REQUIRE(planned(set) == std::vector<FragmentId>{f[0].id(), f[1].id(), f[2].id()});
  const auto before = kvmeld::plan(set, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *g});

  const Fragment once = read_again(f[1], 7, Digest128{3, 1});
  REQUIRE(set.insert(once, {1, 3}).ok());
  REQUIRE(set.supersede(f[1].id(), once.id(), {1, 4}).ok());
  CHECK(planned(set) == std::vector<FragmentId>{f[0].id(), once.id(), f[2].id()});
  const Fragment twice = read_again(once, 8, Digest128{3, 2});
  REQUIRE(set.insert(twice, {1, 5}).ok());
  REQUIRE(set.supersede(once.id(), twice.id(), {1, 6}).ok());
  CHECK(planned(set) == std::vector<FragmentId>{f[0].id(), twice.id(), f[2].id()});
  const auto after = kvmeld::plan(set, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *g});
  CHECK(after->render_id() != before->render_id());

  // what is left out of a part changes no order
  const auto part = kvmeld::renderable(set);
  REQUIRE(part.ok());
  CHECK(planned(*part) == planned(set));
  const auto again = kvmeld::plan(*part, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *g});
  CHECK(again->render_id() == after->render_id());

  // the dot under which somebody else said "read this instead" is nobody's place
  FragmentSet foreign;
  REQUIRE(foreign.insert(f[0], {4, 0}).ok());
  REQUIRE(foreign.insert(f[1], {5, 0}).ok());
  REQUIRE(foreign.supersede(f[1].id(), once.id(), {2, 0}).ok());
  CHECK(planned(foreign) == std::vector<FragmentId>{f[0].id(), f[1].id()});
  REQUIRE(foreign.insert(once, {6, 0}).ok());
  CHECK(planned(foreign) == std::vector<FragmentId>{f[0].id(), once.id()});
}

TEST_CASE("a round whose bytes are late or lost leaves the round before") {
  const Fragment f = span_of_tokens(3, 1), other = span_of_tokens(3, 2);
  const Fragment once = read_again(f, 7, Digest128{3, 1});
  const Fragment twice = read_again(once, 8, Digest128{3, 2});
  FragmentSet set;
  REQUIRE(set.insert(f, {1, 0}).ok());
  REQUIRE(set.insert(other, {2, 0}).ok());
  REQUIRE(set.insert(once, {1, 1}).ok());
  REQUIRE(set.supersede(f.id(), once.id(), {1, 2}).ok());
  REQUIRE(set.insert(twice, {1, 3}).ok());
  REQUIRE(set.supersede(once.id(), twice.id(), {1, 4}).ok());
  const auto expect = [&](const std::vector<FragmentId>& spans) {
    const auto part = kvmeld::renderable(set);
    REQUIRE(part.ok());
    CHECK(planned(*part) == spans);
  };
  expect({twice.id(), other.id()});
  REQUIRE(set.evict(twice.id()).ok());
  CHECK_FALSE(kvmeld::plan(set, kvmeld::merger(), {.geometry = *g}).ok());
  expect({once.id(), other.id()});
  // one in the middle is not read although it is missing
  REQUIRE(set.restore(twice).ok());
  REQUIRE(set.evict(once.id()).ok());
  expect({twice.id(), other.id()});
  REQUIRE(set.evict(twice.id()).ok());
  expect({f.id(), other.id()});
  REQUIRE(set.evict(f.id()).ok());
  expect({other.id()});
  std::vector<FragmentId> known = ids_in_force(set, Presence::known);
  std::vector<FragmentId> wanted{twice.id(), other.id()};
  std::sort(wanted.begin(), wanted.end());
  CHECK(known == wanted);
}

TEST_CASE("a fragment is read again behind all others, or behind those that are named") {
  const Fragment prefix =
      test::sealed(g, 2, 50, {.role = kvmeld::Role::prefix, .tokens = test::token_ids(2)}).fragment;
  std::vector<Fragment> f;
  for (std::uint64_t i = 0; i < 3; ++i) f.push_back(span_of_tokens(3, i + 1, prefix.id()));
  FragmentSet set;
  REQUIRE(set.insert(prefix).ok());
  for (std::uint64_t i = 0; i < 3; ++i) REQUIRE(set.insert(f[i], {i, 0}).ok());
  const Fragment once = read_again(f[0], 7, Digest128{3, 1});
  REQUIRE(set.insert(once, {0, 1}).ok());
  REQUIRE(set.supersede(f[0].id(), once.id(), {0, 2}).ok());

  const auto behind = kvmeld::refresh::set_behind(set, f[1].id());
  REQUIRE(behind.ok());
  CHECK(planned(*behind) == std::vector<FragmentId>{once.id(), f[2].id()});
  CHECK(behind->find(prefix.id()) != nullptr);
  const std::vector<FragmentId> named{f[2].id()};
  const auto few = kvmeld::refresh::set_behind(set, f[1].id(), named);
  REQUIRE(few.ok());
  CHECK(planned(*few) == named);
  CHECK(few->find(prefix.id()) != nullptr);
  // neither it nor what it replaced
  const auto second = kvmeld::refresh::set_behind(set, once.id());
  REQUIRE(second.ok());
  CHECK(planned(*second) == std::vector<FragmentId>{f[1].id(), f[2].id()});
  for (const FragmentId& id : {f[0].id(), span_of_tokens(3, 9).id()}) {
    const auto unknown = kvmeld::refresh::set_behind(set, id);
    REQUIRE_FALSE(unknown.ok());
    CHECK(unknown.error().code() == ErrorCode::not_found);
  }
}

namespace {

/// Renders a plan and "decodes" tokens behind it, by drawing their rows.
struct DrawingEngine {
  struct State {
    kvmeld::KvCacheRef cache;
    std::vector<std::int64_t> positions;
  };
  std::unique_ptr<test::TestCache> held{};

  template <class Plan>
  State decode(const Plan& plan, std::span<const kvmeld::TokenId> tokens) {
    const auto count = plan.tokens() + std::ssize(tokens);
    held = std::make_unique<test::TestCache>(g, count);
    held->fill(static_cast<std::uint64_t>(count));
    State out{held->ref(), {plan.positions().begin(), plan.positions().end()}};
    while (std::ssize(out.positions) < count)
      out.positions.push_back(out.positions.empty() ? 0 : out.positions.back() + 1);
    return out;
  }
};

}  // namespace

TEST_CASE("an engine of one's own reads again, and the page shows how") {
  FragmentSet set;
  for (std::uint64_t i = 0; i < 3; ++i) REQUIRE(set.insert(span_of_tokens(3, i + 1), {i, 0}).ok());
  DrawingEngine engine;
  const Fragment own = span_of_tokens(3, 2);
  const auto again = read_behind(engine, set, own.id());
  REQUIRE(again.ok());
  CHECK(again->payloads()[0].positions == std::vector<std::int64_t>{6, 7, 8});
  const std::vector<FragmentId> others{span_of_tokens(3, 1).id(), span_of_tokens(3, 3).id()};
  CHECK(again->payloads()[0].lead_in == kvmeld::refresh::context_digest(others));
  REQUIRE(set.insert(*again, {1, 1}).ok());
  REQUIRE(set.supersede(own.id(), again->id(), {1, 2}).ok());
  CHECK(planned(set) == std::vector<FragmentId>{others[0], again->id(), others[1]});
  test::check_page("docs/refresh.md", {"tests/unit/refresh.cpp", "tests/engine/llama_refresh.cpp"});
}
