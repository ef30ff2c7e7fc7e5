// Synchronous rounds on a simulated network: a member dies at every single send, and nobody is
// split or hangs.

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/replica/rounds.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

const auto by_provenance = merger(ByDot{});

struct Member;

// Delivers messages after some milliseconds; the `kill_at`-th delivery that is attempted kills its
// sender instead.
struct Network {
  struct Message {
    std::int64_t due;
    replica::MemberId from, to;
    std::optional<replica::Round::Outgoing> round{};
    std::optional<FragmentSet> news{};
    std::vector<FragmentId> want{};
    Fragment give{};
  };
  std::vector<Message> waiting;
  std::vector<replica::MemberId> members;
  std::map<replica::MemberId, bool> dead;
  std::uint64_t sends = 0;
  std::uint64_t kill_at = ~std::uint64_t{0};
  std::optional<test::Random> lossy{};

  void send(std::int64_t now, Message message) {
    for (const replica::MemberId to : members) {
      if (to == message.from || (message.to != replica::everyone && message.to != to) ||
          dead[message.from])
        continue;
      if (sends++ == kill_at) {
        dead[message.from] = true;
        return;
      }
      Message copy = message;
      copy.to = to;
      copy.due = now + 3 + static_cast<std::int64_t>((message.from * 7 + to * 5) % 9);
      if (lossy) {
        if (lossy->below(4) == 0) continue;
        copy.due += static_cast<std::int64_t>(lossy->below(60));
        if (lossy->below(5) == 0) waiting.push_back(copy);
      }
      waiting.push_back(std::move(copy));
    }
  }
};

struct Member {
  replica::MemberId self;
  replica::Round round;
  FragmentSet set;
  std::shared_ptr<const Geometry> geometry;
  Digest128 cache{};                        // content digest of the live cache
  std::optional<replica::RoundCut> disk{};  // what it wrote down before it published
  std::int64_t next_want = 0;

  void step(Network& net, std::int64_t now) {
    round.tick(now);
    if (round.wants_cut(now, set.context(),
                        std::ranges::all_of(set.entries(), [](const FragmentSet::Entry& e) {
                          return e.complete();
                        }))) {
      auto cut = kvmeld::replica::make_cut(set, by_provenance.digest(), round.options().session,
                                           round.number(), self);
      REQUIRE(cut.ok());
      disk = *cut;
      REQUIRE(round.publish(*cut).ok());
    }
    std::vector<FragmentId> missing;
    if (round.state() == replica::RoundState::cut) {
      REQUIRE(set.join(round.cut()->set).ok());
      missing = missing_of(*round.cut(), set);
      if (missing.empty()) {
        const auto part = restrict_to(*round.cut(), set);
        REQUIRE(part.ok());
        const auto made = plan(*part, by_provenance, Target{*geometry});
        REQUIRE(made.ok());
        HostCache out(made->shared_geometry(), made->tokens());
        std::vector<std::byte> workspace(made->workspace_bytes());
        cache = *run(exec::seq, *made, workspace, out.mutable_ref(), {.content_digest = true})
                     ->content_digest;
        round.finish({});
      }
    }
    for (replica::Round::Outgoing& out : round.take_messages())
      net.send(now, {0, self, out.to, out});
    if (now < next_want) return;
    next_want = now + 20;
    for (const FragmentSet::Entry& entry : set.entries()) {
      if (!entry.complete()) missing.push_back(entry.id);
    }
    if (!missing.empty())
      net.send(now, {.due = 0, .from = self, .to = replica::everyone, .want = missing});
  }

  void receive(Network& net, std::int64_t now, const Network::Message& message) {
    if (message.round) {
      INFO(now);
      CHECK(round.receive(message.from, message.round->kind, message.round->body, now).ok());
    }
    if (message.news) {
      REQUIRE(set.join(*message.news).ok());
    }
    for (const FragmentId& id : message.want) {
      if (const Fragment have = set.payload(id);
          have.valid() && have.payloads()[0].bytes != nullptr) {
        net.send(now, {.due = 0, .from = self, .to = message.from, .give = have});
      }
    }
    if (message.give.valid()) (void)set.restore(message.give);
  }
};

/// Ids and marks of a set, no bytes.
FragmentSet without_payloads(const FragmentSet& set) {
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentSet::Entry& entry : set.entries())
    entries.push_back({entry.id, {}, entry.metadata});
  return *FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
}

struct World {
  Network net;
  std::vector<Member> all;
  std::int64_t now = 0;

  explicit World(std::size_t n, replica::RoundOptions options = {}) {
    const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
    options.session = 77;
    options.soft_ms = 200;
    options.cut_ms = 400;
    options.timeout_ms = 800;
    options.retry_ms = 50;
    for (replica::MemberId m = 0; m < n; ++m) options.members.push_back(m + 10);
    net.members = options.members;
    for (const replica::MemberId m : options.members) {
      all.push_back({m, replica::Round(m, options), {}, g});
      say(all.back(), 1);
    }
  }
  void say(Member& member, std::uint64_t sequence) {
    const auto fragment = test::sealed(member.geometry, 3, 100 * member.self + sequence).fragment;
    REQUIRE(member.set.insert(fragment, {member.self, sequence, 1}, 0.5F).ok());
  }
  void begin(Member& member) {
    REQUIRE(member.round.begin(now, by_provenance.digest(), member.set.context()).ok());
  }
  void begin_alive() {
    for (Member& m : all) {
      if (net.dead[m.self]) continue;
      net.send(
          now,
          {.due = 0, .from = m.self, .to = replica::everyone, .news = without_payloads(m.set)});
      if (!net.dead[m.self]) begin(m);
    }
  }
  void run_until(std::int64_t end) {
    for (; now < end; now += 2) {
      std::vector<Network::Message> due;
      std::erase_if(net.waiting, [&](const Network::Message& m) {
        if (m.due > now) return false;
        due.push_back(m);
        return true;
      });
      for (const Network::Message& message : due) {
        for (Member& m : all) {
          if (m.self == message.to && !net.dead[m.self]) m.receive(net, now, message);
        }
      }
      for (Member& m : all) {
        if (!net.dead[m.self]) m.step(net, now);
      }
    }
  }
  /// Every living member ended; those that swapped have one digest. Returns how many swapped.
  std::size_t check_ended(std::uint64_t number) {
    std::size_t swapped = 0;
    std::optional<Digest128> one;
    for (Member& m : all) {
      if (net.dead[m.self]) continue;
      INFO("member " << m.self << ": " << m.round.status().message());
      CHECK(m.round.number() == number);
      if (m.round.state() == replica::RoundState::swapped) {
        ++swapped;
        CHECK(m.cache == one.value_or(m.cache));
        one = m.cache;
      } else {
        CHECK(m.round.state() == replica::RoundState::kept);
        CHECK(m.round.status().code() == ErrorCode::timed_out);
        CHECK(m.cache == Digest128{});
      }
    }
    return swapped;
  }
};

}  // namespace

TEST_CASE(
    "a member dies at any one send: those that swap have one cache, the others keep theirs, within "
    "the timeout") {
  World calm(3);
  calm.begin_alive();
  calm.run_until(802);
  REQUIRE(calm.check_ended(1) == 3);
  REQUIRE(calm.all[0].round.cut()->set.size() == 3);
  const std::uint64_t sends = calm.net.sends;
  REQUIRE(sends > 20);
  std::map<std::size_t, int> outcomes;
  bool only_some_saw_the_send = false;
  for (std::uint64_t k = 0; k < sends; ++k) {
    INFO("killed at send " << k);
    World world(3);
    world.net.kill_at = k;
    world.begin_alive();
    world.run_until(802);
    const std::size_t swapped = world.check_ended(1);
    ++outcomes[swapped];
    const bool publisher_died = world.net.dead[world.all[0].round.publisher(1)];
    if (!publisher_died) CHECK(swapped == 2);  // a death elsewhere costs the soft deadline
    only_some_saw_the_send = only_some_saw_the_send || (publisher_died && swapped == 2);

    // The next round has another publisher, and what is left of the members is a quorum.
    for (Member& m : world.all) m.cache = {};
    world.net.kill_at = ~std::uint64_t{0};
    world.begin_alive();
    world.run_until(1604);
    const bool next_dead = world.net.dead[world.all[0].round.publisher(2)];
    CHECK(world.check_ended(2) == (next_dead ? 0 : 2));
  }
  CHECK(outcomes.count(0) == 1);  // the publisher died before anybody saw its cut
  CHECK(outcomes.count(1) == 0);
  CHECK(only_some_saw_the_send);
}

TEST_CASE("loss, repetition and delay: one cache or the old one") {
  int full = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    INFO("seed " << seed);
    World world(4);
    world.net.lossy = test::Random(seed);
    world.begin_alive();
    world.run_until(802);
    full += world.check_ended(1) == 4 ? 1 : 0;
  }
  CHECK(full > 30);
}

TEST_CASE("the cut is exact: what comes to be known meanwhile waits for the next round") {
  World world(3);
  world.begin_alive();
  while (world.all[1].round.cut() == nullptr && world.now < 200) world.run_until(world.now + 2);
  for (Member& m : world.all) world.say(m, 2);
  world.run_until(802);
  REQUIRE(world.check_ended(1) == 3);
  CHECK(world.all[0].round.cut()->set.size() == 3);
  CHECK(world.all[0].set.size() == 4);
}

TEST_CASE("a straggler waits out its round, and is at the next barrier with the others") {
  World world(3);
  for (int rounds = 0; rounds < 2; ++rounds) {
    for (std::size_t i = 0; i < 2; ++i) world.begin(world.all[i]);
    world.net.dead[12] = true;
    world.run_until(world.now + 802);
  }
  world.net.dead[12] = false;  // it has not been here since
  for (std::size_t i = 0; i < 2; ++i) world.begin(world.all[i]);
  world.run_until(world.now + 100);
  CHECK(world.all[2].round.state() == replica::RoundState::idle);
  world.begin(world.all[2]);
  CHECK(world.all[2].round.number() == 3);
}

TEST_CASE("other mergers, other cuts, other sessions") {
  replica::RoundOptions options{
      .session = 5, .members = {1, 2, 3}, .soft_ms = 10, .cut_ms = 20, .timeout_ms = 30};
  const Digest128 ours{1, 1}, theirs{2, 2};
  FragmentSet set;
  const auto g = test::geometry({.layers = 1});
  REQUIRE(set.insert(test::sealed(g, 2, 1).fragment, {1, 0, 1}).ok());
  const auto ready = [&](std::uint64_t session, std::uint64_t round, const Digest128& m) {
    return encode(replica::RoundReady{session, round, m, {}});
  };
  const auto cut = [&](std::uint64_t round, replica::MemberId publisher, const Digest128& m) {
    return *kvmeld::replica::make_cut(set, m, 5, round, publisher);
  };

  replica::Round member(1, options);
  REQUIRE(member.begin(0, ours, {}).ok());
  CHECK(member.begin(0, ours, {}).code() == ErrorCode::invalid_argument);
  // Refused before anything is rendered, by the ready and by the cut alike.
  replica::Round early = member;
  REQUIRE(early.receive(2, replica::RoundMessage::ready, ready(5, 1, theirs), 1).ok());
  CHECK(early.state() == replica::RoundState::kept);
  CHECK(early.status().code() == ErrorCode::merger_mismatch);
  CHECK(early.cut() == nullptr);
  replica::Round late = member;
  REQUIRE(late.receive(3, replica::RoundMessage::cut, kvmeld::replica::encode(cut(1, 2, theirs)), 1)
              .ok());
  CHECK(late.status().code() == ErrorCode::merger_mismatch);
  // The publisher does not count who merges otherwise.
  replica::Round publisher(2, options);
  REQUIRE(publisher.begin(0, ours, {}).ok());
  REQUIRE(publisher.receive(1, replica::RoundMessage::ready, ready(5, 1, theirs), 1).ok());
  // of another session
  REQUIRE(publisher.receive(3, replica::RoundMessage::ready, ready(6, 1, ours), 1).ok());
  REQUIRE(
      publisher.receive(44, replica::RoundMessage::ready, ready(5, 1, ours), 1).ok());  // no member
  CHECK_FALSE(publisher.wants_cut(11, {}, true));
  CHECK(publisher.mismatched().size() == 1);
  REQUIRE(publisher.receive(3, replica::RoundMessage::ready, ready(5, 1, ours), 12).ok());
  CHECK(publisher.wants_cut(12, {}, true));
  CHECK(publisher.publish(cut(2, 3, ours)).code() == ErrorCode::invalid_argument);

  REQUIRE(member.receive(2, replica::RoundMessage::cut, encode(cut(1, 2, ours)), 1).ok());
  REQUIRE(member.state() == replica::RoundState::cut);
  REQUIRE(set.insert(test::sealed(g, 2, 2).fragment, {1, 1, 1}).ok());
  const Status second = member.receive(3, replica::RoundMessage::cut, encode(cut(1, 2, ours)), 2);
  CHECK(second.code() == ErrorCode::corrupt);
  CHECK(second.message().find("round 1") != std::string::npos);
  CHECK(member.conflicts() == 1);
  CHECK(member.cut()->set.size() == 1);
  CHECK(member.receive(3, replica::RoundMessage::cut, encode(cut(1, 3, ours)), 2).code() ==
        ErrorCode::corrupt);
  CHECK(member.receive(3, replica::RoundMessage::cut, std::vector<std::byte>(9), 2).code() ==
        ErrorCode::truncated);
  member.finish(Status(ErrorCode::engine_failure, "no room"));
  CHECK(member.status().code() == ErrorCode::engine_failure);

  CHECK(replica::Round(9, options).begin(0, ours, {}).code() == ErrorCode::invalid_argument);
  options.quorum = 4;
  CHECK(replica::Round(1, options).begin(0, ours, {}).code() == ErrorCode::invalid_argument);
}

TEST_CASE(
    "numbers far ahead end no rounds, and a cut that is given on does not outrun the round's own") {
  const replica::RoundOptions options{
      .session = 5, .members = {1, 2, 3}, .soft_ms = 10, .cut_ms = 20, .timeout_ms = 30};
  const Digest128 ours{1, 1};
  FragmentSet set;
  REQUIRE(set.insert(test::sealed(test::geometry({.layers = 1}), 2, 1).fragment, {1, 0, 1}).ok());
  const auto ready = [&](std::uint64_t round) {
    return encode(replica::RoundReady{5, round, ours, {}});
  };
  const auto cut = [&](std::uint64_t round) {
    return kvmeld::replica::encode(
        *kvmeld::replica::make_cut(set, ours, 5, round, options.members[round % 3]));
  };
  replica::Round member(1, options);
  for (const std::uint64_t round :
       {~std::uint64_t{0}, ~std::uint64_t{0} - 1, std::uint64_t{1} << 40U, options.max_ahead + 1}) {
    const Status far = member.receive(3, replica::RoundMessage::ready, ready(round), 0);
    CHECK(far.code() == ErrorCode::corrupt);
    CHECK(far.message().find(std::to_string(round)) != std::string::npos);
    CHECK(member.receive(3, replica::RoundMessage::cut, cut(round), 0).code() ==
          ErrorCode::corrupt);
  }
  REQUIRE(member.begin(0, ours, {}).ok());
  CHECK(member.number() == 1);
  // Member 3 gives on a cut of a round that nobody has begun; round 1's own still counts, and its
  // number does not.
  REQUIRE(member.receive(3, replica::RoundMessage::cut, cut(7), 1).ok());
  REQUIRE(member.receive(3, replica::RoundMessage::cut, cut(1), 1).ok());
  REQUIRE(member.state() == replica::RoundState::cut);
  CHECK(member.cut()->round == 1);
  // From who publishes it: kept for later, and this round's cut stays what it is.
  REQUIRE(member.receive(3, replica::RoundMessage::cut, cut(2), 2).ok());
  CHECK(member.cut()->round == 1);
  member.finish({});
  REQUIRE(member.state() == replica::RoundState::swapped);
  CHECK(member.cut()->round == 1);
  REQUIRE(member.begin(3, ours, {}).ok());
  CHECK(member.number() == 2);
  REQUIRE(member.state() == replica::RoundState::cut);
  CHECK(member.cut()->round == 2);
  member.finish({});
  // A member far ahead within the bound: known by number, and the next cut of that round is
  // adopted.
  REQUIRE(member.receive(2, replica::RoundMessage::ready, ready(9), 4).ok());
  REQUIRE(member.begin(5, ours, {}).ok());
  CHECK(member.number() == 9);
  REQUIRE(member.receive(2, replica::RoundMessage::cut, cut(9), 5).ok());
  CHECK(member.cut()->round == 9);
  // No number comes after the last one.
  replica::RoundOptions any = options;
  any.max_ahead = ~std::uint64_t{0};
  replica::Round last(1, any);
  REQUIRE(last.receive(3, replica::RoundMessage::ready, ready(~std::uint64_t{0}), 0).ok());
  REQUIRE(last.begin(0, ours, {}).ok());
  last.tick(1'000);
  CHECK(last.begin(1'000, ours, {}).code() == ErrorCode::invalid_argument);
}

TEST_CASE("whoever asks for a cut at every moment gets it a few times") {
  const replica::RoundOptions options{.session = 5, .members = {1, 2, 3}, .retry_ms = 100};
  const Digest128 ours{1, 1};
  FragmentSet set;
  REQUIRE(set.insert(test::sealed(test::geometry({.layers = 1}), 2, 1).fragment, {1, 0, 1}).ok());
  replica::Round member(1, options);
  REQUIRE(member.begin(0, ours, {}).ok());
  REQUIRE(member
              .receive(2, replica::RoundMessage::cut,
                       kvmeld::replica::encode(*kvmeld::replica::make_cut(set, ours, 5, 1, 2)), 0)
              .ok());
  member.finish({});
  (void)member.take_messages();
  const auto asks = [&](replica::MemberId from, std::int64_t now) {
    REQUIRE(member
                .receive(from, replica::RoundMessage::ready,
                         encode(replica::RoundReady{5, 1, ours, {}}), now)
                .ok());
    return member.take_messages().size();
  };
  std::size_t answers = 0;
  for (std::int64_t now = 0; now < 1000; ++now) answers += asks(3, now);
  CHECK(answers == 20);
  CHECK(asks(2, 999) == 1);  // others get theirs
  CHECK(asks(3, 400) == 0);  // a clock that goes back takes no time
  CHECK(asks(3, 401) == 1);
  // Who is behind learns the number as often, no more.
  REQUIRE(member.begin(1'000, ours, {}).ok());
  (void)member.take_messages();
  const auto old = encode(replica::RoundReady{5, 0, ours, {}});
  for (int i = 0; i < 9; ++i)
    REQUIRE(member.receive(3, replica::RoundMessage::ready, old, 1'001).ok());
  CHECK(member.take_messages().size() == 1);
}

TEST_CASE("a publisher that comes back finds its own cut with the others") {
  const replica::RoundOptions options{.session = 5, .members = {1, 2, 3}};
  const Digest128 m{1, 1};
  FragmentSet set;
  REQUIRE(set.insert(test::sealed(test::geometry({.layers = 1}), 2, 1).fragment, {1, 0, 1}).ok());
  const replica::RoundCut cut = *kvmeld::replica::make_cut(set, m, 5, 1, 2);
  replica::Round reborn(2, options);
  REQUIRE(reborn.begin(0, m, {}).ok());
  REQUIRE(reborn.receive(1, replica::RoundMessage::cut, encode(cut), 1).ok());
  CHECK(reborn.state() == replica::RoundState::cut);
  CHECK_FALSE(reborn.wants_cut(5'000, {}, true));
  CHECK(*reborn.cut() == cut);
}

TEST_CASE("an exact cut needs every payload and the metadata that was published") {
  const auto g = test::geometry({.layers = 1});
  FragmentSet set;
  const Fragment a = test::sealed(g, 2, 1).fragment, b = test::sealed(g, 2, 2).fragment;
  REQUIRE(set.insert(a, {1, 0, 1}, 0.25F, 5).ok());
  REQUIRE(set.insert(b, {1, 1, 1}).ok());
  REQUIRE(set.supersede(a.id(), b.id(), {1, 2, 1}).ok());
  const replica::RoundCut only_b = *kvmeld::replica::make_cut(set, {}, 0, 1, 1);
  CHECK(only_b.set.size() == 2);  // a, by id and marks, tells where b stands
  CHECK(missing_of(only_b, {}) == std::vector<FragmentId>{b.id()});
  REQUIRE(set.remove(b.id(), {1, 3, 1}).ok());
  const replica::RoundCut only_a = *kvmeld::replica::make_cut(set, {}, 0, 1, 1);
  CHECK((only_a.set.size() == 1 && only_a.set.entries().front().id == a.id()));
  // b was removed since, and a lost bytes and gained confidence: both cuts still mean what they
  // meant, or say what is missing.
  REQUIRE(set.insert(a, {2, 0, 1}, 0.75F).ok());
  CHECK(restrict_to(only_b, set)->digest() == only_b.set.digest());
  CHECK(restrict_to(only_a, set)->entries().front().metadata.best_confidence() == 0.25F);
  REQUIRE(set.evict(a.id()).ok());
  CHECK(missing_of(only_a, set) == std::vector<FragmentId>{a.id()});
  CHECK(restrict_to(only_a, set).error().code() == ErrorCode::payload_missing);
  CHECK(kvmeld::replica::make_cut(set, {}, 0, 1, 1)->set.empty());
}

TEST_CASE("deadlines count what passes, wherever the clock is set to") {
  const replica::RoundOptions options{.session = 5,
                                      .members = {1, 2},
                                      .soft_ms = 100,
                                      .cut_ms = 200,
                                      .timeout_ms = 400,
                                      .retry_ms = 50};
  for (const std::int64_t jump :
       {std::int64_t{-3'600'000}, std::int64_t{3'600'000}, -(std::int64_t{1} << 62U)}) {
    replica::Round round(1, options);
    std::int64_t now = 10'000'000;
    REQUIRE(round.begin(now, Digest128{1, 1}, {}).ok());
    (void)round.take_messages();
    now += jump;
    std::int64_t waited = 0;
    std::size_t repeated = 0;
    for (; waited < 10'000 && round.state() == replica::RoundState::waiting; waited += 10) {
      round.tick(now += 10);
      repeated += round.take_messages().size();
    }
    CHECK(round.state() == replica::RoundState::kept);
    CHECK(round.status().code() == ErrorCode::timed_out);
    CHECK(waited <= 220);
    if (jump < 0) CHECK(repeated == 3);
  }
  kvmeld::replica::Elapsed clock(1000);
  CHECK(clock.advance(-5) == 0);
  CHECK(clock.advance(std::numeric_limits<std::int64_t>::max()) == 1000);
  CHECK(clock.advance(std::numeric_limits<std::int64_t>::min()) == 1000);
  CHECK(clock.advance(std::numeric_limits<std::int64_t>::min() + 7) == 1007);
}

TEST_CASE(
    "a round of unequal mergers ends in merger_mismatch for the publisher, too, and no round is "
    "for who renders nothing") {
  const replica::RoundOptions options{
      .session = 5, .members = {1, 2}, .soft_ms = 10, .cut_ms = 20, .timeout_ms = 30};
  for (const replica::MemberId self : {1U, 2U}) {
    replica::Round round(self, options);
    REQUIRE(round.begin(0, Digest128{1, 1}, {}).ok());
    REQUIRE(round
                .receive(3 - self, replica::RoundMessage::ready,
                         encode(replica::RoundReady{5, 1, Digest128{2, 2}, {}}), 1)
                .ok());
    for (std::int64_t now = 0; now < 40; ++now) round.tick(now);
    CHECK(round.state() == replica::RoundState::kept);
    CHECK(round.status().code() == ErrorCode::merger_mismatch);
    CHECK(round.mismatched().size() == 1);
  }
  CHECK(replica::Round(1, options).begin(0, kvmeld::replica::does_not_render, {}).code() ==
        ErrorCode::invalid_argument);
}
