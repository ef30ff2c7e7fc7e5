// An agent's own words in its own view, whatever is swapped in; and what a session does with
// members that say too much.

#include <functional>
#include <thread>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/replica/session.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

const auto g = test::geometry({.type = ElementType::f16, .layers = 1, .heads = 1, .channels = 32});
const auto merging = merger(ByDot{});

/// A content hash that is not the default one.
struct OtherHash : Xxh3_128 {
  static constexpr std::uint8_t tag = 0x71;
  OtherHash() noexcept : Xxh3_128(7) {}
};

replica::AgentSessionOptions options_for(replica::MemberId self,
                                         std::vector<replica::MemberId> members,
                                         const SetHash& hash = {}) {
  replica::AgentSessionOptions options{
      .replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  options.replica.self = self;
  options.replica.epoch = 1;
  options.replica.format.hash = hash;
  options.replica.members = members;
  options.replica.news_interval_ms = 10;
  options.replica.retry_ms = 5;
  options.rounds = {.session = 9,
                    .members = std::move(members),
                    .quorum = 1,
                    .soft_ms = 0,
                    .cut_ms = 5'000,
                    .timeout_ms = 9'000,
                    .retry_ms = 20};
  return options;
}

std::int64_t now_ms() { return static_cast<std::int64_t>(replica::steady_ms()); }

template <class Session>
Status say(Session& session, std::int64_t tokens, std::uint64_t seed) {
  test::TestCache words(g, tokens);
  words.fill(seed);
  KVMELD_TRY(
      session.append(words.ref(), test::token_ids(tokens, static_cast<TokenId>(100 * seed))));
  return session.end_span().status();
}

/// Polls and tries until a cache of so many rendered tokens is swapped in; the last swap, or none
/// after some seconds.
template <class Session>
std::optional<replica::SwapReport> swap_of(Session& session, std::int64_t tokens) {
  for (int i = 0; i < 4000; ++i) {
    (void)session.poll(now_ms());
    auto swap = session.try_swap();
    if (!swap) FAIL(swap.error().message());
    if (*swap && (*swap)->render.tokens == tokens) return *swap;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return {};
}

std::vector<std::byte> frame(replica::SessionMessage type, std::span<const std::byte> body) {
  return *kvmeld::replica::encode_frame(static_cast<std::uint8_t>(type), body);
}

}  // namespace

TEST_CASE("words with ids of any content hash are carried over a swap") {
  stores::MemoryHub hub;
  stores::MemoryStore store;
  auto transport = hub.join(1);
  replica::AgentSession session(merging, store, *transport, g,
                                options_for(1, {1}, set_hash_of<OtherHash>()));
  REQUIRE(say(session, 5, 1).ok());
  REQUIRE(session.poll(now_ms()).ok());
  REQUIRE(say(session, 3, 2).ok());  // said since the snapshot
  std::optional<replica::SwapReport> swap;
  while (!swap) {
    auto tried = session.try_swap();
    INFO((tried ? "" : tried.error().message()));
    REQUIRE(tried.ok());
    swap = *tried;
  }
  CHECK(swap->render.tokens == 5);
  CHECK(swap->install.carried_tokens == 3);
  CHECK(session.current().tokens == 8);
}

TEST_CASE("a cut that lacks an agent's own words does not take them out of its view") {
  stores::MemoryHub hub;
  stores::MemoryStore store;
  auto transport = hub.join(1), peer = hub.join(2);
  replica::AgentSession session(merging, store, *transport, g, options_for(1, {1, 2}));
  REQUIRE(say(session, 5, 1).ok());
  REQUIRE(swap_of(session, 5).has_value());  // swapped in: these are in no span any more
  const Fragment theirs = test::sealed(g, 2, 77).fragment;
  REQUIRE(session.insert(theirs).ok());
  REQUIRE(say(session, 3, 2).ok());
  REQUIRE(session.poll(now_ms()).ok());  // a render of everything is asked for
  // Member 2 publishes round 1, has its own words, and has not heard of ours.
  FragmentSet theirs_alone;
  REQUIRE(theirs_alone.insert(theirs, {2, 0, 1}).ok());
  REQUIRE(session.begin_round(now_ms()).ok());
  REQUIRE(peer->send(1, frame(replica::SessionMessage::round_cut,
                              kvmeld::replica::encode(*kvmeld::replica::make_cut(
                                  theirs_alone, merging.digest(), 9, 1, 2))))
              .ok());
  std::optional<replica::SwapReport> swap;
  for (int i = 0; i < 4000 && !(swap && swap->round == 1); ++i) {
    (void)session.poll(now_ms());
    auto tried = session.try_swap();
    REQUIRE(tried.ok());
    if (*tried) swap = *tried;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE((swap && swap->round == 1));
  CHECK(swap->render.tokens == 2);
  CHECK(swap->install.carried_tokens == 8);
  const auto view = session.current();
  REQUIRE(view.tokens == 10);
  CHECK(view.token_ids[2] == test::token_ids(1, 100)[0]);
  CHECK(view.token_ids[7] == test::token_ids(1, 200)[0]);
  CHECK(session.next_position() == 10);
  // The next render has everything, once.
  swap = swap_of(session, 10);
  REQUIRE(swap.has_value());
  CHECK(swap->install.carried_tokens == 0);
  CHECK(session.current().tokens == 10);
}

namespace {

/// Host memory where something happens while a cache is put in.
struct SlowMemory {
  using Backing = replica::HostBacking;
  replica::HostMemory inner;
  std::shared_ptr<std::function<void()>> during = std::make_shared<std::function<void()>>();

  [[nodiscard]] replica::HostBacking backing() const { return inner.backing(); }
  [[nodiscard]] Result<replica::InstallReport> install(
      std::shared_ptr<replica::Rendered<replica::HostBuffer>> next,
      std::span<const Fragment> carried, std::int64_t first) {
    if (*during) (*during)();
    return inner.install(std::move(next), carried, first);
  }
  [[nodiscard]] Status check_room(std::int64_t tokens) const { return inner.check_room(tokens); }
  Status append(const KvCacheRef& rows, std::span<const TokenId> tokens) {
    return inner.append(rows, tokens);
  }
};

}  // namespace

TEST_CASE(
    "a message that arrives past the deadline does not end a round whose cache is being put in") {
  stores::MemoryHub hub;
  stores::MemoryStore store;
  auto transport = hub.join(1), peer = hub.join(2);
  auto options = options_for(1, {2, 1});  // this agent publishes round 1
  options.background = false;
  SlowMemory memory;
  const auto during = memory.during;
  replica::AgentSession session(merging, store, *transport, g, options, std::move(memory));
  REQUIRE(say(session, 4, 1).ok());
  REQUIRE(session.begin_round(0).ok());
  REQUIRE(session.poll(0).ok());
  REQUIRE(session.round()->state() == replica::RoundState::cut);
  bool was_there = false;
  *during = [&] {
    was_there = true;
    CHECK(peer->send(1, frame(replica::SessionMessage::round_ready,
                              encode(replica::RoundReady{9, 1, merging.digest(), {}})))
              .ok());
    CHECK(session.poll(9'001).ok());
    CHECK(session.round()->state() == replica::RoundState::cut);
  };
  std::optional<replica::SwapReport> swap;
  for (int i = 0; i < 4000 && !swap; ++i) {
    auto tried = session.try_swap();
    REQUIRE(tried.ok());
    swap = *tried;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE(was_there);
  REQUIRE(swap.has_value());
  REQUIRE(session.poll(9'002).ok());
  CHECK(session.round()->state() == replica::RoundState::swapped);
  CHECK(session.accounting().rounds_swapped == 1);
  CHECK(session.accounting().rounds_kept == 0);
}

TEST_CASE(
    "words that nobody takes are said once to be so, and stay in the agent's view while there is "
    "room") {
  const auto run = [&](std::int64_t max_refused, std::int64_t each, std::int64_t carried) {
    stores::MemoryHub hub;
    stores::MemoryStore stores[2];
    auto transport = hub.join(1), other_transport = hub.join(2);
    auto options = options_for(1, {1, 2});
    options.replica.max_operations = 2;
    options.max_refused_tokens = max_refused;
    replica::AgentSession session(merging, stores[0], *transport, g, options,
                                  replica::HostMemory({.spare_tokens = 16}));
    replica::AgentSession other(merging, stores[1], *other_transport, g, options_for(2, {1, 2}));
    for (std::uint64_t i = 0; i < 2; ++i) {
      REQUIRE(say(session, 1, i).ok());
      CHECK(session.poll(now_ms()).ok());
    }
    for (std::uint64_t i = 2; i < 5; ++i) REQUIRE(say(session, each, i).ok());
    const Status refused = session.poll(now_ms());
    CHECK(refused.code() == ErrorCode::quota_exceeded);
    CHECK(session.poll(now_ms()).ok());
    CHECK(session.accounting().fragments_refused == 3);
    CHECK(session.accounting().fragments_sealed == 2);
    // what the others say comes in, again and again
    for (std::int64_t round = 1; round <= 2; ++round) {
      REQUIRE(say(other, 3, 10 + static_cast<std::uint64_t>(round)).ok());
      std::optional<replica::SwapReport> swap;
      for (int i = 0; i < 4000 && !swap; ++i) {
        (void)other.poll(now_ms());
        (void)session.poll(now_ms());
        auto tried = session.try_swap();
        INFO((tried ? "" : tried.error().message()));
        REQUIRE(tried.ok());
        if (*tried && (*tried)->render.tokens == 2 + 3 * round) swap = *tried;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      REQUIRE(swap.has_value());
      CHECK(swap->install.carried_tokens == carried);
      CHECK(session.current().tokens == 2 + 3 * round + carried);
      CHECK(session.next_position() == session.current().tokens);
    }
  };
  run(256, 3, 9);
  run(7, 3, 6);    // the oldest went
  run(256, 9, 0);  // 27 tokens do not fit behind the others': the others' words come first
}

TEST_CASE("frames of the host's own that nobody takes do not pile up") {
  stores::MemoryHub hub;
  stores::MemoryStore store;
  auto transport = hub.join(1), peer = hub.join(2);
  auto options = options_for(1, {1, 2});
  options.max_application_bytes = 10'000;
  replica::AgentSession session(merging, store, *transport, g, options);
  for (std::size_t i = 0; i < 40; ++i) {
    REQUIRE(peer->send(1, frame(replica::SessionMessage::application,
                                std::vector<std::byte>(936, static_cast<std::byte>(i))))
                .ok());
  }
  REQUIRE(session.poll(0).ok());
  const auto taken = session.take_application();
  REQUIRE(taken.size() == 10);
  CHECK(taken.front().second.bytes.front() == std::byte{30});
  CHECK(taken.back().second.bytes.front() == std::byte{39});
  CHECK(session.accounting().application_dropped == 30);
  CHECK(session.take_application().empty());
  REQUIRE(peer->send(1, frame(replica::SessionMessage::application, std::vector<std::byte>(9'000)))
              .ok());
  REQUIRE(session.poll(1).ok());
  CHECK(session.take_application().size() == 1);
}
