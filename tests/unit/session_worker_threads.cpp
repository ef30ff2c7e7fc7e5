// Rendering behind a generating thread: the newest request wins, readers keep what they hold,
// nothing is torn.

#include <atomic>
#include <thread>

#include <kvmeld/replica/session_memory.hpp>

#include "support/catch.hpp"
#include "support/rendering.hpp"

using namespace kvmeld;

namespace {

using Worker = replica::RenderWorker<decltype(merger(ById{}))>;

Digest128 expected_digest(const FragmentSet& set, const Geometry& g) {
  const auto made = plan(set, merger(ById{}), Target{g});
  REQUIRE(made.ok());
  HostCache out(made->shared_geometry(), made->tokens());
  std::vector<std::byte> workspace(made->workspace_bytes());
  REQUIRE(run(exec::seq, *made, workspace, out.mutable_ref()).ok());
  return *content_digest(out.kv_cache_ref());
}

replica::RenderOutcome<replica::HostBuffer> outcome_of(Worker& worker) {
  REQUIRE(worker.wait_idle(20'000));
  auto outcome = worker.take();
  REQUIRE(outcome.has_value());
  return *std::move(outcome);
}

}  // namespace

TEST_CASE("the newest request wins, and what came out is what a render makes") {
  const auto g = test::geometry({.type = ElementType::f16});
  FragmentSet set;
  std::vector<FragmentSet> history;
  for (std::uint64_t i = 0; i < 6; ++i) {
    REQUIRE(set.insert(test::sealed(g, 5, i).fragment, {i, 0}).ok());
    history.push_back(set);
  }
  Worker worker(merger(ById{}), {}, {}, {.content_digest = true});
  std::uint64_t last = 0;
  for (const FragmentSet& s : history) last = worker.request(s, Target{*g});
  CHECK(last == 6);
  replica::RenderOutcome<replica::HostBuffer> outcome = outcome_of(worker);
  CHECK(outcome.request == 6);
  REQUIRE(outcome.status.ok());
  CHECK(outcome.rendered->report.content_digest == expected_digest(set, *g));
  CHECK(outcome.rendered->positions.size() == 30);
  CHECK(outcome.rendered->next_position() == 30);
  CHECK_FALSE(worker.take().has_value());

  Geometry other = *g;
  other.model = "another";
  (void)worker.request(set, Target{other});
  outcome = outcome_of(worker);
  CHECK(outcome.status.code() == ErrorCode::geometry_mismatch);
  CHECK(outcome.rendered == nullptr);
}

TEST_CASE(
    "what an agent says goes on behind its cache, and what it said since the snapshot is carried "
    "over a swap") {
  const auto g = test::geometry();
  const auto a = test::sealed(g, 4, 1).fragment, b = test::sealed(g, 3, 2).fragment;
  FragmentSet set;
  REQUIRE(set.insert(a, {1, 0}).ok());
  Worker worker(merger(ById{}), replica::HostBacking{.spare_tokens = 5});
  replica::SwapBuffer live;
  test::TestCache words(g, 2, test::Layout::paged);
  words.fill(7);
  CHECK_FALSE(live.current());
  CHECK(live.append(words.ref()).code() == ErrorCode::invalid_argument);
  (void)worker.request(set, Target{*g});
  auto outcome = outcome_of(worker);
  REQUIRE(live.carry(*outcome.rendered, b).ok());
  live.swap(outcome.rendered);
  const auto before = live.current();
  CHECK(before.tokens == 7);
  REQUIRE(live.append(words.ref(), test::token_ids(2)).ok());
  CHECK(live.append(words.ref()).code() == ErrorCode::output_too_small);
  const auto after = live.current();
  CHECK(before.tokens == 7);
  CHECK(after.tokens == 9);
  CHECK(after.positions[8] == 8);
  CHECK(after.token_ids[8] == 101);

  // Carrying b behind a is rendering {a, b} in that order; an appended row keeps its bytes.
  FragmentSet both = set;
  REQUIRE(both.insert(b, {2, 0}).ok());
  const auto made = plan(both, merger(ByDot{}), Target{*g});
  const auto reference = test::run_in(exec::seq, *made, test::Layout::canonical);
  CHECK(*content_digest(before.kv_cache_ref()) == *content_digest(reference->ref()));
  CHECK(*content_digest(replica::detail::rows_from(after.kv_cache_ref(), 7)) ==
        *content_digest(words.ref()));
}

TEST_CASE("readers keep the buffer that they hold while the agent swaps, appends and asks on") {
  const auto g = test::geometry({.type = ElementType::f16, .layers = 3});
  std::vector<FragmentSet> sets(4);
  std::vector<Digest128> digests;
  for (std::uint64_t s = 0; s < sets.size(); ++s) {
    for (std::uint64_t i = 0; i <= s; ++i)
      REQUIRE(sets[s].insert(test::sealed(g, 9, 10 * s + i).fragment, {i, 0}).ok());
    digests.push_back(expected_digest(sets[s], *g));
  }
  test::TestCache words(g, 1);
  words.fill(3);
  Worker worker(merger(ById{}), replica::HostBacking{.spare_tokens = 64});
  replica::SwapBuffer live;
  std::atomic<bool> stop{false};
  std::atomic<int> reads{0}, wrong{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      while (!stop.load()) {
        const auto held = live.current();
        if (!held) {
          std::this_thread::yield();
          continue;
        }
        const std::int64_t rendered = held.owner->report.tokens;
        const auto which = static_cast<std::size_t>(rendered / 9 - 1);
        const bool good = *content_digest(held.kv_cache_ref().first(rendered)) == digests[which] &&
                          held.positions.back() == held.tokens - 1;
        wrong += good ? 0 : 1;
        ++reads;
      }
    });
  }
  int swaps = 0;
  for (std::uint64_t i = 0; swaps < 40 && i < 200'000; ++i) {
    (void)worker.request(sets[i % sets.size()], Target{*g});
    if (auto outcome = worker.take(); outcome && outcome->status) {
      live.swap(std::move(outcome->rendered));
      ++swaps;
    }
    if (live.current()) (void)live.append(words.ref());  // refused once the rows are full
    std::this_thread::yield();
  }
  while (reads.load() < 20) std::this_thread::yield();
  stop = true;
  for (std::thread& t : readers) t.join();
  CHECK(swaps == 40);
  CHECK(wrong.load() == 0);
}
