// Two agents on live engines: what each decodes is said, both import one merged cache, and go on at
// the right position.

#include <chrono>
#include <thread>

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/replica/session.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/catch.hpp"
#include "support/llama_context.hpp"
#include "support/llama_tiny_model.hpp"

using namespace kvmeld;

namespace {

const auto merging = merger(ByDot{});
using Session = replica::AgentSession<llama::EngineMemory>;

std::vector<TokenId> some_tokens(int count, int salt) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 131 + salt * 17) % 300);
  return tokens;
}

struct Agent {
  test::EngineContext context;
  std::shared_ptr<const Geometry> geometry;
  stores::MemoryStore store;
  stores::MemoryTransport transport;
  std::unique_ptr<Session> session;

  Agent(const test::EngineModel& model, stores::MemoryHub& hub, replica::MemberId self,
        const std::vector<TokenId>& prefix, llama::MemoryOptions memory = {},
        std::uint32_t cells = 512, bool prefix_in_place = false)
      : context(model, parameters(cells)), transport(*hub.join(self)) {
    const auto g = llama::geometry(model.get(), parameters(cells), {.adapters = Adapters::none()});
    REQUIRE(g.ok());
    geometry = std::make_shared<const Geometry>(*g);
    REQUIRE(llama::detail::decode(context.get(), 0, prefix, 0).ok());
    const auto state = llama::read(context.get(), 0, geometry);
    REQUIRE(state.ok());
    const auto sealed = seal(state->view(), {.role = Role::prefix, .tokens = prefix});
    REQUIRE(sealed.ok());
    Session::Options options{.replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
    options.replica.self = self;
    options.replica.epoch = 1;
    options.replica.members = {1, 2};
    options.replica.news_interval_ms = 10;
    options.replica.retry_ms = 5;
    options.start = {.context = {.prefix = sealed->id()}, .first_position = std::ssize(prefix)};
    options.rounds = {.session = 3,
                      .members = {1, 2},
                      .soft_ms = 100,
                      .cut_ms = 200,
                      .timeout_ms = 400,
                      .retry_ms = 20};
    options.background = false;
    if (prefix_in_place) {
      memory.kept_positions = std::ssize(prefix);
      options.target.prefix_in_place = true;
      options.target.first_position = std::ssize(prefix);
    }
    options.content_digest = true;
    session = std::make_unique<Session>(merging, store, transport, geometry, options,
                                        llama::EngineMemory(context.get(), state->form(), memory));
    REQUIRE(session->insert(*sealed).ok());
  }
  static llama_context_params parameters(std::uint32_t cells) {
    llama_context_params p = test::engine_parameters();
    p.n_ctx = cells;
    return p;
  }
  void decode_and_say(const std::vector<TokenId>& tokens) {
    const std::int64_t at = session->next_position();
    REQUIRE(llama::detail::decode(context.get(), 0, tokens, static_cast<llama_pos>(at)).ok());
    const auto rows = llama::read_since(context.get(), 0, 2, at, geometry);
    REQUIRE(rows.ok());
    REQUIRE(rows->positions().size() == tokens.size());
    const Status said = session->append(rows->view(), tokens, rows->positions());
    INFO(said.message());
    REQUIRE(said.ok());
  }
  [[nodiscard]] std::vector<std::byte> exported() const {
    const auto state = llama::read(context.get(), 0, geometry);
    REQUIRE(state.ok());
    return {state->bytes().begin(), state->bytes().end()};
  }
  [[nodiscard]] Digest128 digest() const {
    return *content_digest(llama::read(context.get(), 0, geometry)->view());
  }
};

// One thread, a clock of the test's own that stands still while a worker renders.
void run_round(std::vector<Agent*> agents, std::int64_t& now,
               std::vector<replica::SwapReport>& swaps, std::vector<Status>& refusals) {
  for (Agent* a : agents) REQUIRE(a->session->begin_round(now).ok());
  const auto going_on = [&] {
    return std::ranges::any_of(agents, [](Agent* a) { return a->session->in_round(); });
  };
  for (int steps = 0; going_on() && steps < 100'000; ++steps) {
    bool renders = false;
    for (Agent* a : agents) {
      (void)a->session->poll(now);
      auto swap = a->session->try_swap();
      if (!swap) refusals.push_back(swap.error());
      if (swap && *swap) swaps.push_back(**swap);
      const replica::Round& round = *a->session->round();
      renders = renders || (round.state() == replica::RoundState::cut &&
                            missing_of(*round.cut(), a->session->set()).empty());
    }
    now += renders ? 0 : 2;
    if (renders) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  REQUIRE_FALSE(going_on());
}

}  // namespace

TEST_CASE("two engines swap to one merged cache and decode on behind it") {
  const test::TinyModel tiny;
  const test::TinyModelFile file(tiny);
  const test::EngineModel model(file.path());
  const auto prefix = some_tokens(9, 1);
  for (const llama::Verify verify : {llama::Verify::positions, llama::Verify::bytes}) {
    stores::MemoryHub hub;
    Agent a(model, hub, 1, prefix, {.verify = verify}),
        b(model, hub, 2, prefix, {.verify = verify});
    std::int64_t now = 0;
    std::vector<replica::SwapReport> swaps;
    std::vector<Status> refusals;
    for (int round = 0; round < 3; ++round) {
      a.decode_and_say(some_tokens(11 + round, 2 + round));
      b.decode_and_say(some_tokens(7, 20 + round));
      (void)a.session->end_span();
      (void)b.session->end_span();
      swaps.clear();
      run_round({&a, &b}, now, swaps, refusals);
      REQUIRE(refusals.empty());
      REQUIRE(swaps.size() == 2);
      CHECK(swaps[0].render.content_digest == swaps[1].render.content_digest);
      CHECK(swaps[0].install.carried_tokens == 0);
      CHECK(swaps[0].install.import_bytes > swaps[0].render.bytes);
      CHECK(a.exported() == b.exported());
      CHECK(a.digest() == *swaps[0].render.content_digest);
      const std::int64_t tokens = 9 + 11 * (round + 1) + round * (round + 1) / 2 + 7 * (round + 1);
      CHECK(a.session->next_position() == tokens);
      CHECK(llama_memory_seq_pos_max(a.context.memory(), 0) == tokens - 1);
      for (const llama_seq_id spare : {1, 2})
        CHECK(llama_memory_seq_pos_max(a.context.memory(), spare) == -1);
    }
    // Words that were not sealed before the barrier are carried, and are the sequence's last.
    a.decode_and_say(some_tokens(5, 40));
    swaps.clear();
    run_round({&a, &b}, now, swaps, refusals);
    REQUIRE(swaps.size() == 2);
    const replica::SwapReport& of_a = swaps[0].install.carried_tokens > 0 ? swaps[0] : swaps[1];
    CHECK(of_a.install.carried_tokens == 5);
    CHECK(a.session->next_position() == of_a.render.tokens + 5);
    CHECK(llama_memory_seq_pos_max(a.context.memory(), 0) == of_a.render.tokens + 4);
    CHECK(b.session->next_position() == of_a.render.tokens);
    const auto all_of_a = llama::read(a.context.get(), 0, a.geometry);
    CHECK(*content_digest(all_of_a->view().first(of_a.render.tokens)) == b.digest());
  }
}

TEST_CASE("a prefix that the engine holds stays where it is") {
  const test::TinyModel tiny;
  const test::TinyModelFile file(tiny);
  const test::EngineModel model(file.path());
  const auto prefix = some_tokens(9, 1);
  std::vector<Digest128> whole;
  for (const bool in_place : {false, true}) {
    stores::MemoryHub hub;
    Agent a(model, hub, 1, prefix, {}, 512, in_place), b(model, hub, 2, prefix, {}, 512, in_place);
    a.decode_and_say(some_tokens(11, 2));
    b.decode_and_say(some_tokens(7, 3));
    std::int64_t now = 0;
    std::vector<replica::SwapReport> swaps;
    std::vector<Status> refusals;
    for (int round = 0; round < 2; ++round) {
      (void)a.session->end_span();
      (void)b.session->end_span();
      swaps.clear();
      run_round({&a, &b}, now, swaps, refusals);
      REQUIRE(swaps.size() == 2);
      REQUIRE(refusals.empty());
      CHECK(a.session->next_position() == llama_memory_seq_pos_max(a.context.memory(), 0) + 1);
      CHECK(a.session->next_position() == 27 + 4 * round);
      // later words are computed behind cells that lie elsewhere: equal but for roundings
      if (round == 0) whole.push_back(a.digest());
      a.decode_and_say(some_tokens(4, 50));
    }
  }
  CHECK(whole[0] == whole[1]);
}

TEST_CASE("what cannot be imported leaves the sequence as it was") {
  const test::TinyModel tiny;
  const test::TinyModelFile file(tiny);
  const test::EngineModel model(file.path());
  const auto prefix = some_tokens(9, 1);
  stores::MemoryHub hub;
  // One engine has no room for old and new cells together; the other takes at most 64 bytes.
  Agent small(model, hub, 1, prefix, {}, 256),
      strict(model, hub, 2, prefix, {.max_import_bytes = 64});
  small.decode_and_say(some_tokens(110, 2));
  strict.decode_and_say(some_tokens(60, 3));
  (void)small.session->end_span();
  (void)strict.session->end_span();
  const auto before_small = small.exported(), before_strict = strict.exported();
  const std::int64_t next = small.session->next_position();
  std::int64_t now = 0;
  std::vector<replica::SwapReport> swaps;
  std::vector<Status> refusals;
  run_round({&small, &strict}, now, swaps, refusals);
  CHECK(swaps.empty());
  REQUIRE(refusals.size() == 2);
  CHECK(std::ranges::any_of(refusals,
                            [](const Status& s) { return s.code() == ErrorCode::engine_failure; }));
  CHECK(std::ranges::any_of(refusals,
                            [](const Status& s) { return s.code() == ErrorCode::oversized; }));
  CHECK(small.session->round()->state() == replica::RoundState::kept);
  CHECK(strict.session->round()->status().code() == ErrorCode::oversized);
  CHECK(small.exported() == before_small);
  CHECK(strict.exported() == before_strict);
  CHECK(small.session->next_position() == next);
  small.decode_and_say(some_tokens(3, 5));  // and it goes on
}
