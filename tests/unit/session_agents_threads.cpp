// Whole sessions over memory: agents in threads end with one cache, every byte is accounted for, a
// death costs one timeout.

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/refresh.hpp>
#include <kvmeld/replica/session.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

const auto g = test::geometry({.type = ElementType::f16, .layers = 2, .heads = 2, .channels = 32});
const auto merging = merger(ByDot{});

/// Counts what really crosses, and stops for good at a given send: a process that was killed there.
struct CountingTransport final : replica::Transport {
  explicit CountingTransport(stores::MemoryTransport hub) : inner(std::move(hub)) {}

  stores::MemoryTransport inner;
  std::shared_ptr<std::atomic<std::int64_t>> sends_left =
      std::make_shared<std::atomic<std::int64_t>>(INT64_MAX);
  replica::Traffic sent{}, received{};

  [[nodiscard]] replica::MemberId self() const noexcept override { return inner.self(); }
  [[nodiscard]] std::size_t max_message_bytes() const noexcept override {
    return inner.max_message_bytes();
  }
  Status send(replica::MemberId to, std::span<const std::byte> bytes) override {
    if (sends_left->fetch_sub(1) <= 0) return Status(ErrorCode::unavailable, "killed");
    KVMELD_TRY(inner.send(to, bytes));
    sent.add(bytes.size());
    return {};
  }
  Result<std::optional<replica::Envelope>> receive(std::int64_t timeout_ms) override {
    auto got = inner.receive(timeout_ms);
    if (got && *got) received.add((*got)->bytes.size());
    return got;
  }
};

/// Renders only while it is open.
struct Gate {
  static constexpr bool on_device = false;
  std::shared_ptr<std::atomic<bool>> open = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<std::atomic<int>> runs = std::make_shared<std::atomic<int>>(0);

  template <RowWork W>
  Status bulk(std::int64_t rows, const W& work) const {
    while (!open->load()) std::this_thread::yield();
    const Status status = exec::seq.bulk(rows, work);
    ++*runs;
    return status;
  }
};

using Session = replica::AgentSession<>;

struct Agent {
  stores::MemoryStore store;
  CountingTransport transport;
  Session session;
  std::uint64_t said = 0;

  Agent(replica::MemberId self, stores::MemoryHub& hub, const Session::Options& options)
      : transport(*hub.join(self)),
        session(merging, store, transport, g, options, replica::HostMemory({.spare_tokens = 256})) {
  }

  // From any thread: Catch's macros are the main thread's.
  [[nodiscard]] bool say(std::int64_t tokens) {
    test::TestCache words(g, tokens);
    words.fill(1000 * transport.self() + said);
    const auto ids = test::token_ids(tokens, static_cast<TokenId>(10 * said));
    ++said;
    return session.append(words.ref(), ids).ok();
  }
};

Session::Options options_for(replica::MemberId self, std::size_t members) {
  Session::Options options{.replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  options.replica.self = self;
  options.replica.epoch = 1;
  options.replica.seed = self;
  options.replica.news_interval_ms = 10;
  options.replica.retry_ms = 5;
  // a peer that was slow for once, on a machine that is busy, is asked again soon
  options.replica.max_retry_ms = 200;
  for (replica::MemberId m = 1; m <= members; ++m) options.replica.members.push_back(m);
  options.rounds = {.session = 9,
                    .members = options.replica.members,
                    .soft_ms = 4'000,
                    .cut_ms = 5'000,
                    .timeout_ms = 9'000,
                    .retry_ms = 20};
  options.content_digest = true;
  return options;
}

std::int64_t now_ms() { return static_cast<std::int64_t>(replica::steady_ms()); }

void check_accounts(Agent& agent) {
  const replica::Accounting accounts = agent.session.accounting();
  CHECK(accounts.total_sent() == agent.transport.sent);
  CHECK(accounts.total_received() == agent.transport.received);
  replica::Traffic by_layer;
  for (const replica::TrafficLayer layer :
       {replica::TrafficLayer::state, replica::TrafficLayer::payload, replica::TrafficLayer::rounds,
        replica::TrafficLayer::application})
    by_layer += accounts.sent_of(layer);
  CHECK(by_layer == accounts.total_sent());
}

}  // namespace

TEST_CASE(
    "rounds of three agents in threads: equal content digests, and every byte is accounted for") {
  for (const std::size_t count : {std::size_t{2}, std::size_t{3}}) {
    stores::MemoryHub hub;
    std::vector<std::unique_ptr<Agent>> agents;
    for (replica::MemberId m = 1; m <= count; ++m) {
      auto options = options_for(m, count);
      options.background = false;
      agents.push_back(std::make_unique<Agent>(m, hub, options));
    }
    std::vector<std::vector<replica::RoundReport>> reports(count);
    std::vector<std::thread> threads;
    for (std::size_t a = 0; a < count; ++a) {
      threads.emplace_back([&, a] {
        for (int round = 0; round < 4; ++round) {
          if (!agents[a]->say(static_cast<std::int64_t>(3 + a))) return;
          // else the swap ends the span, and carries it
          if (round % 2 == 0) (void)agents[a]->session.end_span();
          auto report = agents[a]->session.synchronize(now_ms);
          if (report) reports[a].push_back(*std::move(report));
        }
        // answers whoever is behind
        for (int i = 0; i < 30; ++i) (void)agents[a]->session.poll(now_ms(), 1);
      });
    }
    for (std::thread& t : threads) t.join();
    for (std::size_t round = 0; round < 4; ++round) {
      for (std::size_t a = 0; a < count; ++a) {
        REQUIRE(reports[a].size() == 4);
        const replica::RoundReport& report = reports[a][round];
        INFO("agent " << a << " round " << round << ": " << report.status.message());
        REQUIRE(report.swapped);
        CHECK(report.round == round + 1);
        REQUIRE(report.swap.has_value());
        CHECK(report.swap->render.content_digest == reports[0][round].swap->render.content_digest);
        // What was not sealed before the barrier is still in the agent's own view.
        CHECK(report.swap->install.carried_tokens ==
              (round % 2 == 0 ? 0 : static_cast<std::int64_t>(3 + a)));
      }
    }
    // Sealed before the last barrier: rounds 1 to 3 of all.
    std::int64_t tokens = 0;
    for (std::size_t a = 0; a < count; ++a) tokens += 3 * static_cast<std::int64_t>(3 + a);
    CHECK(reports[0][3].swap->render.tokens == tokens);
    for (auto& agent : agents) {
      check_accounts(*agent);
      const replica::Accounting accounts = agent->session.accounting();
      CHECK(accounts.rounds_swapped == 4);
      CHECK(accounts.swaps == 4);
      CHECK(accounts.received_of(replica::TrafficLayer::payload).bytes > 0);
      CHECK(accounts.sealed_bytes.size() == 2);
      CHECK(agent->session.next_position() == agent->session.current().tokens);
    }
  }
}

TEST_CASE(
    "asynchronous agents: a network thread beside each generating one, nobody waits, all end with "
    "one cache") {
  constexpr std::size_t count = 3;
  stores::MemoryHub hub;
  std::vector<std::unique_ptr<Agent>> agents;
  for (replica::MemberId m = 1; m <= count; ++m) {
    auto options = options_for(m, count);
    options.spans.seal_every = 4;
    agents.push_back(std::make_unique<Agent>(m, hub, options));
  }
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  std::atomic<std::size_t> finished{0};
  std::vector<Digest128> last(count);
  std::atomic<int> failures{0};
  for (std::size_t a = 0; a < count; ++a) {
    threads.emplace_back([&, a] {
      while (!stop.load()) (void)agents[a]->session.poll(now_ms(), 1);
    });
    threads.emplace_back([&, a] {
      Session& session = agents[a]->session;
      const auto swap = [&] {
        auto swapped = session.try_swap();
        if (!swapped) ++failures;
        if (swapped && *swapped) last[a] = (*swapped)->render.content_digest.value_or(Digest128{});
      };
      for (int i = 0; i < 30; ++i) {
        failures += agents[a]->say(1) ? 0 : 1;
        swap();
        const auto view = session.current();
        // its view is whole, always
        if (view && view.positions.back() + 1 != session.next_position()) ++failures;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      (void)session.end_span();
      ++finished;
      for (int i = 0; i < 4000 && !(finished.load() == count && session.current() &&
                                    session.current().owner->report.tokens == 30 * count);
           ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        swap();
      }
    });
  }
  for (std::size_t a = 0; a < count; ++a) threads[2 * a + 1].join();
  stop = true;
  for (std::size_t a = 0; a < count; ++a) threads[2 * a].join();
  CHECK(failures.load() == 0);
  for (std::size_t a = 0; a < count; ++a) {
    INFO("agent " << a);
    CHECK(agents[a]->session.set().digest() == agents[0]->session.set().digest());
    CHECK(agents[a]->session.current().owner->report.tokens == 30 * count);
    CHECK(agents[a]->session.current().tokens == 30 * count);  // nothing of its own twice
    CHECK(last[a] == last[0]);
    check_accounts(*agents[a]);
  }
}

TEST_CASE(
    "an agent is killed at any one of its sends: the others swap to one cache or keep theirs, and "
    "the next round works") {
  const auto run = [](std::size_t victim, std::int64_t sends, std::int64_t& used) {
    stores::MemoryHub hub;
    std::vector<std::unique_ptr<Agent>> agents;
    for (replica::MemberId m = 1; m <= 3; ++m) {
      auto options = options_for(m, 3);
      options.background = false;
      options.rounds.soft_ms = 60;
      options.rounds.cut_ms = 120;
      options.rounds.timeout_ms = 400;
      agents.push_back(std::make_unique<Agent>(m, hub, options));
    }
    *agents[victim]->transport.sends_left = sends;
    const auto dead = [&](std::size_t a) {
      return a == victim && agents[a]->transport.sends_left->load() < 0;
    };
    std::int64_t now = 0;  // a clock of the test's own: one thread, no waiting
    std::size_t swapped = 0;
    for (int round = 1; round <= 2; ++round) {
      std::map<std::size_t, Digest128> digests;
      for (std::size_t a = 0; a < 3; ++a) {
        if (dead(a)) continue;
        REQUIRE(agents[a]->say(3));
        (void)agents[a]->session.end_span();
        REQUIRE(agents[a]->session.begin_round(now).ok());
      }
      const std::int64_t end = now + 420;
      const auto going_on = [&] {
        for (std::size_t a = 0; a < 3; ++a) {
          if (!dead(a) && agents[a]->session.in_round()) return true;
        }
        return false;
      };
      // The worker is real: the clock stands still while one renders.
      const auto renders = [&] {
        for (std::size_t a = 0; a < 3; ++a) {
          const replica::Round& r = *agents[a]->session.round();
          if (dead(a) || r.state() != replica::RoundState::cut ||
              !missing_of(*r.cut(), agents[a]->session.set()).empty())
            continue;
          std::this_thread::sleep_for(std::chrono::microseconds(20));
          return true;
        }
        return false;
      };
      for (; now < end && going_on(); now += renders() ? 0 : 2) {
        for (std::size_t a = 0; a < 3; ++a) {
          if (dead(a)) continue;
          (void)agents[a]->session.poll(now);
          auto swap = agents[a]->session.try_swap();
          if (!swap) FAIL(swap.error().message());
          if (*swap) digests[a] = (*swap)->render.content_digest.value();
        }
      }
      CHECK_FALSE(going_on());
      for (std::size_t a = 0; a < 3; ++a) {
        if (dead(a)) continue;
        const bool did = agents[a]->session.round()->state() == replica::RoundState::swapped;
        CHECK(did == (digests.count(a) == 1));
        if (did) CHECK(digests[a] == digests.begin()->second);
        swapped += did && round == 2 ? 1 : 0;
      }
    }
    used = sends - agents[victim]->transport.sends_left->load();
    for (std::size_t a = 0; a < 3; ++a) check_accounts(*agents[a]);
    return swapped;
  };
  // agent 2 publishes round 1, agent 3 round 2
  for (const std::size_t victim : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
    std::int64_t calm = 0, used = 0;
    REQUIRE(run(victim, 1'000'000, calm) == 3);
    REQUIRE(calm > 4);
    for (std::int64_t k = 0; k < calm; ++k) {
      INFO("agent " << victim + 1 << " killed at send " << k << " of " << calm);
      const std::size_t swapped = run(victim, k, used);
      if (victim == 0) CHECK(swapped >= 2);  // never a publisher here: the others get on
    }
  }
}

TEST_CASE("what cannot be swapped in leaves the old cache") {
  stores::MemoryHub hub;
  auto options = options_for(1, 1);
  Agent agent(1, hub, options);
  REQUIRE(agent.session.open().ok());
  const auto settle = [&]() -> Result<std::optional<replica::SwapReport>> {
    for (int i = 0; i < 2000; ++i) {
      (void)agent.session.poll(now_ms());
      auto swap = agent.session.try_swap();
      if (!swap || *swap) return swap;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::optional<replica::SwapReport>();
  };
  REQUIRE(agent.say(5));
  REQUIRE(agent.session.end_span()->has_value());
  CHECK_FALSE(agent.session.end_span()->has_value());
  auto swap = settle();
  REQUIRE((swap.ok() && swap->has_value()));
  CHECK((*swap)->render.tokens == 5);
  CHECK(agent.session.next_position() == 5);
  // A second prefix makes the set unrenderable: said once, and the agent goes on with what it has.
  test::TestCache text(g, 2);
  for (const std::uint64_t seed : {1U, 2U}) {
    text.fill(seed);
    REQUIRE(agent.session.insert(*seal(text.ref(), {.role = Role::prefix})).ok());
  }
  Status status;
  for (int i = 0; i < 3 && status; ++i) status = settle().status();
  CHECK(status.code() == ErrorCode::prefix_conflict);
  REQUIRE(agent.say(2));
  CHECK(agent.session.current().tokens >= 7);
  // Its own words are refused where they do not fit, and nothing of them is taken.
  test::TestCache many(g, 2000);
  many.fill(3);
  const std::int64_t before = agent.session.next_position();
  CHECK(agent.session.append(many.ref()).code() == ErrorCode::output_too_small);
  CHECK(agent.session.next_position() == before);
}

TEST_CASE("words of which only a later render knows are carried over the swap to an earlier one") {
  stores::MemoryHub hub;
  stores::MemoryStore store;
  auto transport = hub.join(1);
  const Gate gate;
  replica::AgentSession session(merging, store, *transport, g, options_for(1, 1),
                                replica::HostMemory({.spare_tokens = 64}), gate);
  const auto say = [&](std::int64_t tokens, std::uint64_t seed) {
    test::TestCache words(g, tokens);
    words.fill(seed);
    REQUIRE(session.append(words.ref()).ok());
    REQUIRE(session.end_span().ok());
    REQUIRE(session.poll(now_ms()).ok());
  };
  say(5, 1);
  while (gate.runs->load() < 1) std::this_thread::yield();
  *gate.open = false;
  say(3, 2);  // its render waits at the gate
  std::optional<replica::SwapReport> swap;
  while (!swap) {
    auto tried = session.try_swap();
    REQUIRE(tried.ok());
    swap = *tried;
  }
  CHECK(swap->render.tokens == 5);
  CHECK(swap->install.carried_tokens == 3);
  CHECK(session.current().tokens == 8);
  *gate.open = true;
  for (swap.reset(); !swap; swap = *session.try_swap()) std::this_thread::yield();
  CHECK(swap->render.tokens == 8);
  CHECK(swap->install.carried_tokens == 0);
  CHECK(session.next_position() == 8);
}

TEST_CASE("a round's cache that is rendered after the deadline is never swapped in") {
  stores::MemoryHub hub;
  stores::MemoryStore store;
  auto transport = hub.join(1);
  const Gate gate;
  auto options = options_for(1, 1);
  options.background = false;
  replica::AgentSession session(merging, store, *transport, g, options,
                                replica::HostMemory({.spare_tokens = 64}), gate);
  test::TestCache words(g, 4);
  words.fill(1);
  REQUIRE(session.append(words.ref()).ok());
  REQUIRE(session.end_span().ok());
  *gate.open = false;
  REQUIRE(session.begin_round(0).ok());
  for (const std::int64_t now : {0, 10}) REQUIRE(session.poll(now).ok());
  REQUIRE(session.round()->state() == replica::RoundState::cut);
  REQUIRE(session.poll(9'001).ok());
  CHECK(session.round()->status().code() == ErrorCode::timed_out);
  *gate.open = true;
  while (gate.runs->load() == 0) std::this_thread::yield();
  for (int i = 0; i < 200; ++i) {
    const auto swap = session.try_swap();
    REQUIRE(swap.ok());
    REQUIRE_FALSE(swap->has_value());
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  CHECK_FALSE(session.current());
  CHECK(session.accounting().rounds_kept == 1);
  // a clock far ahead of the test's: it only has to go forward
  CHECK(session.synchronize(now_ms)->swapped);
}

TEST_CASE("every cut is swapped in, though the generating thread is always at a safe point") {
  stores::MemoryHub hub;
  auto options = options_for(1, 1);
  options.background = false;
  Agent agent(1, hub, options);
  REQUIRE(agent.say(1));
  REQUIRE(agent.session.end_span().ok());
  std::atomic<bool> stop{false};
  std::atomic<int> swaps{0};
  std::thread generating([&] {
    while (!stop.load()) {
      auto swap = agent.session.try_swap();
      if (swap && *swap) ++swaps;
    }
  });
  int swapped = 0;
  for (int round = 0; round < 100 && swapped == round; ++round) {
    if (!agent.session.begin_round(now_ms())) break;
    while (agent.session.in_round()) (void)agent.session.poll(now_ms());
    swapped += agent.session.round()->state() == replica::RoundState::swapped ? 1 : 0;
  }
  stop = true;
  generating.join();
  CHECK(swapped == 100);
  CHECK(swaps.load() == 100);
}

TEST_CASE("own words that were replaced are not carried, those said at the barrier are") {
  stores::MemoryHub hub;
  auto options = options_for(1, 1);
  options.background = false;
  Agent agent(1, hub, options);
  REQUIRE(agent.say(5));
  const auto said = agent.session.end_span();
  REQUIRE((said.ok() && said->has_value()));
  REQUIRE(agent.session.poll(now_ms()).ok());
  const Fragment summary = test::sealed(g, 2, 99).fragment;
  REQUIRE(agent.session.insert(summary).ok());
  REQUIRE(agent.session.replica().supersede(**said, summary.id()).ok());
  REQUIRE(agent.say(3));
  const auto report = agent.session.synchronize(now_ms);
  REQUIRE((report.ok() && report->swapped));
  CHECK(report->swap->render.tokens == 2);
  CHECK(report->swap->install.carried_tokens == 3);
  CHECK(agent.session.next_position() == 5);
  // The barrier of an agent without others' words, and then of one that has nothing at all.
  CHECK(agent.session.synchronize(now_ms)->swap->render.tokens == 5);
  Agent mute(2, hub, [] {
    auto o = options_for(2, 0);
    o.rounds.members = {2};
    o.rounds.soft_ms = o.rounds.cut_ms = o.rounds.timeout_ms = 5;
    o.background = false;
    return o;
  }());
  const auto nothing = mute.session.synchronize(now_ms);
  REQUIRE(nothing.ok());
  CHECK_FALSE(nothing->swapped);
  CHECK(nothing->status.code() == ErrorCode::timed_out);
}

namespace {

/// Reads again as an engine would, behind all others: here rows that depend on what stood there.
Result<Fragment> read_again(const FragmentSet& set, const FragmentId& own) {
  const auto behind = refresh::set_behind(set, own);
  if (!behind) return behind.error();
  const auto made = kvmeld::plan(*behind, merging, {.geometry = *g});
  if (!made) return made.error();
  const Digest128 context = refresh::context_digest(*made);
  const Fragment& fragment = set.find(own)->fragment;
  test::TestCache rows(g, fragment.token_count());
  rows.fill(context.low ^ static_cast<std::uint64_t>(fragment.tokens()[0]));
  return refresh::seal(fragment, rows.ref(), {}, context, set.hash());
}

}  // namespace

TEST_CASE("agents refresh beside generating: one cache of the last rounds, every word once") {
  constexpr std::size_t count = 3;
  stores::MemoryHub hub;
  std::vector<std::unique_ptr<Agent>> agents;
  for (replica::MemberId m = 1; m <= count; ++m) {
    auto options = options_for(m, count);
    options.spans.seal_every = 5;
    agents.push_back(std::make_unique<Agent>(m, hub, options));
  }
  std::atomic<std::size_t> finished{0};
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (std::size_t a = 0; a < count; ++a) {
    threads.emplace_back([&, a] {  // network: a round whenever the last is over, three at the end
      Session& session = agents[a]->session;
      int rounds = 0;
      while (!stop.load()) {
        (void)session.poll(now_ms(), 1);
        if (session.refreshing() || rounds == 3) continue;
        if (!session.refresh(read_again).ok()) ++failures;
        if (finished.load() == count && ++rounds == 3) continue;
      }
    });
    threads.emplace_back([&, a] {
      Session& session = agents[a]->session;
      for (int i = 0; i < 20; ++i) {
        failures += agents[a]->say(1) ? 0 : 1;
        if (!session.try_swap()) ++failures;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      (void)session.end_span();
      ++finished;
    });
  }
  for (std::size_t a = 0; a < count; ++a) threads[2 * a + 1].join();
  // until nothing is new to anybody
  const auto settled = [&] {
    for (std::size_t a = 0; a < count; ++a) {
      const replica::Accounting accounts = agents[a]->session.accounting();
      const auto view = agents[a]->session.current();
      if (accounts.refreshes < 3 || !view || view.owner->report.tokens != 20 * count ||
          view.owner->report.content_digest !=
              agents[0]->session.current().owner->report.content_digest)
        return false;
    }
    return true;
  };
  for (int i = 0, quiet = 0; i < 8000 && quiet < 25; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    for (std::size_t a = 0; a < count; ++a) {
      if (!agents[a]->session.try_swap()) ++failures;
    }
    quiet = settled() ? quiet + 1 : 0;
  }
  stop = true;
  for (std::size_t a = 0; a < count; ++a) threads[2 * a].join();
  CHECK(failures.load() == 0);
  CHECK(settled());
  for (std::size_t a = 0; a < count; ++a) {
    INFO("agent " << a);
    Session& session = agents[a]->session;
    CHECK(session.set().digest() == agents[0]->session.set().digest());
    CHECK(session.current().tokens == 20 * count);  // nothing of its own twice
    const replica::Accounting accounts = session.accounting();
    CHECK(accounts.refreshed_fragments > 0);
    CHECK(accounts.refreshed_tokens >= accounts.refreshed_fragments);
    std::size_t variants = 0;
    for (const InForce& read : in_force(session.set()))
      variants += read.entry->fragment.payloads().size() == 2 ? 1U : 0U;
    CHECK(variants > 0);
    check_accounts(*agents[a]);
  }
}

TEST_CASE("a refresh keeps to its bound, tells an error once, and is not begun twice") {
  stores::MemoryHub hub;
  auto options = options_for(1, 1);
  options.spans.seal_every = 4;
  Agent agent(1, hub, options);
  REQUIRE(agent.session.open().ok());
  REQUIRE(agent.say(12));
  (void)agent.session.poll(now_ms());
  REQUIRE(agent.session.set().size() == 3);
  const auto wait = [&] {
    Status told;
    for (int i = 0; i < 4000 && agent.session.refreshing(); ++i) {
      const Status status = agent.session.poll(now_ms());
      if (told) told = status;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return told;
  };
  // 11 tokens: two fragments of 4
  REQUIRE(agent.session.refresh(read_again, {.max_tokens = 11}).ok());
  CHECK(wait().ok());
  CHECK(agent.session.accounting().refreshed_tokens == 8);
  CHECK(agent.session.set().size() == 5);
  CHECK(in_force(agent.session.set()).size() == 3);

  std::atomic<bool> go_on{false};
  const auto slow = [&](const FragmentSet& set, const FragmentId& own) -> Result<Fragment> {
    while (!go_on.load()) std::this_thread::yield();
    if (set.find(own)->metadata.marks.front().dot.sequence % 2 == 0)
      return Status(ErrorCode::engine_failure, "no cells");
    return read_again(set, own);
  };
  REQUIRE(agent.session.refresh(slow).ok());
  const Status second = agent.session.refresh(slow);
  CHECK(second.code() == ErrorCode::unavailable);
  go_on = true;
  while (agent.session.accounting().refreshes < 2) std::this_thread::yield();
  const Status told = wait();
  CHECK((told.code() == ErrorCode::engine_failure || !agent.session.poll(now_ms()).ok()));
  CHECK(agent.session.poll(now_ms()).ok());  // once
  CHECK(in_force(agent.session.set()).size() == 3);

  // behind the same context nothing is new
  const auto same = [](const FragmentSet& set, const FragmentId& own) -> Result<Fragment> {
    return set.find(own)->fragment;
  };
  const std::size_t before = agent.session.set().size();
  REQUIRE(agent.session.refresh(same).ok());
  CHECK(wait().ok());
  CHECK(agent.session.set().size() == before);
  // a session that ends does not leave its thread behind
  go_on = false;
  REQUIRE(agent.session.refresh(slow).ok());
  go_on = true;
}
