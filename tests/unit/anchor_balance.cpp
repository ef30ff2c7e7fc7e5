// Anchors over shards: parts that agents share, loads that are even, moves that pay, and what that
// does to a queue's tail.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <queue>
#include <vector>

#include <kvmeld/anchors/balance.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::FragmentId;
using kvmeld::anchors::AnchorAccess;
using kvmeld::anchors::AnchorPartition;

FragmentId anchor_id(std::uint64_t n) {
  FragmentId id;
  id.bytes[0] = 1;
  const std::uint64_t name = kvmeld::extend::mix_bits(n + 1);  // as hashes are: in no order
  for (std::size_t i = 0; i < 8; ++i) id.bytes[i + 1] = static_cast<std::uint8_t>(name >> (8 * i));
  return id;
}
double uniform(test::Random& random) {
  return (static_cast<double>(random.next() >> 11) + 0.5) * 0x1p-53;
}

/// Which anchors agents ask for: all agents of a team prefer the same ones, by Zipf's law; a part
/// of the asks is for anybody's.
struct Load {
  std::size_t agents = 32, teams = 8, anchors = 512;
  double exponent = 1.1, own = 0.8;
  std::uint64_t drift = 0;  // other favourites
  std::vector<double> cumulative;

  explicit Load(std::uint64_t shift = 0) : drift(shift) {
    double sum = 0;
    for (std::size_t r = 0; r < anchors / teams; ++r)
      cumulative.push_back(sum += std::pow(static_cast<double>(r + 1), -exponent));
  }
  [[nodiscard]] std::size_t anchor(std::size_t agent, test::Random& random) const {
    const std::size_t team = uniform(random) < own ? agent % teams : random.below(teams);
    const double at = uniform(random) * cumulative.back();
    const auto rank = static_cast<std::size_t>(
        std::lower_bound(cumulative.begin(), cumulative.end(), at) - cumulative.begin());
    return (rank * teams + team + drift * 131) % anchors;
  }
  [[nodiscard]] std::size_t agent(test::Random& random) const {  // some ask more than others
    return std::min(random.below(agents), random.below(agents));
  }
};

AnchorPartition by_hash(std::size_t anchors, std::uint32_t shards) {
  AnchorPartition out;
  for (std::size_t n = 0; n < anchors; ++n) out.anchors.push_back(anchor_id(n));
  std::sort(out.anchors.begin(), out.anchors.end());
  for (const FragmentId& id : out.anchors) out.shards.push_back(id.bytes[3] % shards);
  return out;
}
std::vector<AnchorAccess> watched(const Load& load, std::size_t requests, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<AnchorAccess> out(load.agents);
  for (std::size_t i = 0; i < requests; ++i) {
    const std::size_t agent = load.agent(random);
    out[agent].count(anchor_id(load.anchor(agent, random)));
  }
  return out;
}

struct Tail {
  double p50 = 0, p99 = 0;
};
/// Events in order of time: requests arrive by Poisson's law and queue at their anchor's shard,
/// first come first served, each for an exponential time of mean 1; `busy` is the load of all
/// shards together. Moves start one every 40 service times, and keep both shards busy for
/// `move_time`.
Tail simulate(const Load& load, const AnchorPartition& partition, std::uint32_t shards, double busy,
              std::size_t requests, std::uint64_t seed,
              const std::vector<std::pair<std::uint32_t, std::uint32_t>>& moves = {},
              double move_time = 0) {
  test::Random random(seed);
  struct Event {
    double time;
    std::uint64_t number;
    std::uint32_t shard;
    enum { arrival, done, move } kind;
    bool operator<(const Event& o) const {
      return time != o.time ? time > o.time : number > o.number;
    }
  };
  struct Job {
    double arrived, takes;
  };
  std::priority_queue<Event> events;
  std::vector<std::queue<Job>> queues(shards);
  std::vector<double> waited;
  std::uint64_t number = 0;
  const auto start = [&](std::uint32_t s, double now) {
    events.push({now + queues[s].front().takes, number++, s, Event::done});
  };
  const auto enter = [&](std::uint32_t s, double now, double takes, bool counts = true) {
    queues[s].push({counts ? now : -1.0, takes});
    if (queues[s].size() == 1) start(s, now);
  };
  for (std::size_t m = 0; m < moves.size(); ++m) {
    events.push({40.0 * static_cast<double>(m), number++, moves[m].first, Event::move});
    events.push({40.0 * static_cast<double>(m), number++, moves[m].second, Event::move});
  }
  events.push({0, number++, 0, Event::arrival});
  while (!events.empty()) {
    const Event event = events.top();
    events.pop();
    if (event.kind == Event::move) {
      enter(event.shard, event.time, move_time, false);
      continue;
    }
    if (event.kind == Event::arrival) {
      const std::size_t agent = load.agent(random);
      const std::uint32_t shard = partition.find(anchor_id(load.anchor(agent, random)));
      enter(shard, event.time, -std::log(uniform(random)));
      if (--requests > 0)
        events.push({event.time - std::log(uniform(random)) / (busy * shards), number++, 0,
                     Event::arrival});
      continue;
    }
    auto& queue = queues[event.shard];
    if (queue.front().arrived >= 0) waited.push_back(event.time - queue.front().arrived);
    queue.pop();
    if (!queue.empty()) start(event.shard, event.time);
  }
  std::sort(waited.begin(), waited.end());
  return {waited[waited.size() / 2], waited[waited.size() * 99 / 100]};
}
double heaviest_share(const Load& load, const AnchorPartition& partition, std::uint32_t shards) {
  std::vector<double> loads(shards, 0.0);
  double sum = 0;
  for (const AnchorAccess& agent : watched(load, 50000, 77)) {
    for (const auto& [id, uses] : agent.uses()) loads[partition.find(id)] += uses, sum += uses;
  }
  return *std::max_element(loads.begin(), loads.end()) / sum * shards;
}

}  // namespace

TEST_CASE("the tail of a skewed load falls against a static partition") {
  constexpr std::uint32_t shards = 8;
  const Load load;
  const AnchorPartition fixed = by_hash(load.anchors, shards);
  const auto balanced =
      kvmeld::anchors::balance(watched(load, 20000, 1), fixed, {.shards = shards});
  REQUIRE(balanced.ok());
  std::vector<std::pair<double, std::pair<Tail, Tail>>> runs;
  for (std::uint64_t seed = 10; seed < 15; ++seed) {  // requests that the balance has not seen
    const Tail before = simulate(load, fixed, shards, 0.6, 100000, seed),
               after = simulate(load, balanced->partition, shards, 0.6, 100000, seed);
    runs.push_back({after.p99 / before.p99, {before, after}});
  }
  std::sort(runs.begin(), runs.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto& [before, after] = runs[2].second;
  std::printf(
      "balance: 8 shards 60 %% busy, 32 agents, 512 anchors by Zipf 1.1: the heaviest shard has "
      "%.2f -> %.2f of its share, %zu anchors moved\n",
      heaviest_share(load, fixed, shards), heaviest_share(load, balanced->partition, shards),
      balanced->moved.size());
  std::printf(
      "balance: latency in service times, median of 5 runs: p50 %.1f -> %.1f, p99 %.0f -> %.0f; "
      "p99 against the static partition %.2f (%.2f to %.2f)\n",
      before.p50, after.p50, before.p99, after.p99, runs[2].first, runs.front().first,
      runs.back().first);
  REQUIRE(runs.back().first < 0.5);
}

TEST_CASE("hysteresis: noise moves nothing, a new load moves what pays") {
  constexpr std::uint32_t shards = 8;
  const Load load;
  const auto first = kvmeld::anchors::balance(watched(load, 20000, 1), {}, {.shards = shards});
  REQUIRE(first.ok());
  REQUIRE(first->moved.empty());
  std::size_t eager = 0;
  for (std::uint64_t seed = 2; seed < 6; ++seed) {  // the same load, watched again
    const auto again =
        kvmeld::anchors::balance(watched(load, 20000, seed), first->partition, {.shards = shards});
    REQUIRE(again->moved.empty());
    REQUIRE(again->partition.find(anchor_id(3)) == first->partition.find(anchor_id(3)));
    eager += kvmeld::anchors::balance(watched(load, 20000, seed), first->partition,
                                      {.shards = shards, .move_cost = 0, .hysteresis = 0})
                 ->moved.size();
  }
  const Load drifted(1);
  const auto after =
      kvmeld::anchors::balance(watched(drifted, 20000, 9), first->partition, {.shards = shards});
  REQUIRE(!after->moved.empty());
  REQUIRE(after->cost_after < after->cost_before);
  const auto greedy = kvmeld::anchors::balance(watched(drifted, 20000, 9), first->partition,
                                               {.shards = shards, .move_cost = 0, .hysteresis = 0});
  std::vector<std::pair<std::uint32_t, std::uint32_t>> moves;
  for (const std::size_t a : after->moved)
    moves.emplace_back(first->partition.find(after->partition.anchors[a]),
                       after->partition.shards[a]);
  const Tail stay = simulate(drifted, first->partition, shards, 0.6, 100000, 20),
             moved = simulate(drifted, after->partition, shards, 0.6, 100000, 20, moves, 5);
  std::printf(
      "balance: after a drift %zu of %zu anchors move (without hysteresis %zu); p99 %.0f -> %.0f, "
      "moves of 5 service times each counted; without hysteresis noise alone moves %zu anchors a "
      "round\n",
      after->moved.size(), after->partition.anchors.size(), greedy->moved.size(), stay.p99,
      moved.p99, eager / 4);
  REQUIRE(after->moved.size() < greedy->moved.size());
  REQUIRE(eager > 0);
  REQUIRE(moved.p99 < stay.p99);
}

TEST_CASE("what a partition is") {
  // Two teams that share nothing, two shards: one each, whatever the order of counting.
  std::vector<AnchorAccess> agents(4);
  for (std::uint64_t a = 0; a < 20; ++a) {
    for (std::size_t g = 0; g < 2; ++g)
      agents[2 * (a % 2) + g].count(anchor_id(a), 1.0 + static_cast<double>((a * 7 + g) % 5));
  }
  const auto parts = kvmeld::anchors::balance(agents, {}, {.shards = 2, .slack = 0.5});
  REQUIRE(parts.ok());
  REQUIRE(parts->partition.anchors.size() == 20);
  for (std::uint64_t a = 2; a < 20; ++a)
    REQUIRE(parts->partition.find(anchor_id(a)) == parts->partition.find(anchor_id(a % 2)));
  REQUIRE(parts->partition.find(anchor_id(0)) != parts->partition.find(anchor_id(1)));
  REQUIRE(parts->partition.find(anchor_id(99), 7) == 7);

  // The cost is what it says, by plain sums.
  std::vector<double> loads(2, 0.0);
  std::vector<std::vector<double>> sums(2, std::vector<double>(4, 0.0));
  double total = 0, spread = 0;
  for (std::size_t g = 0; g < 4; ++g) {
    for (const auto& [id, uses] : agents[g].uses()) {
      const auto s = parts->partition.find(id);
      loads[s] += uses, sums[s][g] += uses, total += uses;
    }
  }
  for (std::uint64_t a = 0; a < 20; ++a) {
    double weight = 0;
    for (const AnchorAccess& agent : agents)
      weight += agent.uses().count(anchor_id(a)) != 0 ? agent.uses().at(anchor_id(a)) : 0.0;
    const auto s = parts->partition.find(anchor_id(a));
    for (std::size_t g = 0; g < 4; ++g) {
      const double own = agents[g].uses().count(anchor_id(a)) != 0
                             ? agents[g].uses().at(anchor_id(a)) / weight
                             : 0.0;
      spread += weight * (own - sums[s][g] / loads[s]) * (own - sums[s][g] / loads[s]) / total;
    }
  }
  const double crowding = (loads[0] * loads[0] + loads[1] * loads[1]) * 2 / (total * total) - 1;
  REQUIRE(std::abs(parts->cost_after - (crowding + 0.5 * spread)) < 1e-12);

  // A newcomer goes to its like and moves nobody; what nobody used stays.
  std::vector<AnchorAccess> more = agents;
  more[0].count(anchor_id(40), 2);
  const auto grown = kvmeld::anchors::balance(more, parts->partition, {.shards = 2, .slack = 0.5});
  REQUIRE(grown->moved.empty());
  REQUIRE(grown->partition.find(anchor_id(40), 9) == parts->partition.find(anchor_id(0)));
  for (AnchorAccess& agent : more) agent.decay(0.001);
  const auto idle = kvmeld::anchors::balance(more, grown->partition, {.shards = 2});
  REQUIRE(more[0].uses().empty());
  REQUIRE(idle->partition.shards == grown->partition.shards);
  REQUIRE(idle->cost_after == 0);

  // Golden: the same bytes on every machine and by every compiler.
  const auto golden = kvmeld::anchors::balance(watched(Load(), 20000, 1), {}, {.shards = 8});
  kvmeld::Hasher hasher;
  hasher.values(std::span<const std::uint32_t>(golden->partition.shards));
  hasher.value(golden->cost_after);
  std::printf("balance: partition %016llx\n", static_cast<unsigned long long>(hasher.digest().low));
  REQUIRE(hasher.digest().low == 0x3919898259ad7f3);

  // Errors.
  using kvmeld::ErrorCode;
  REQUIRE(kvmeld::anchors::balance(agents, {}, {.shards = 0}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::balance(agents, {}, {.shards = 2, .slack = NAN}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::balance(agents, {}, {.shards = 2, .hysteresis = -1}).status().code() ==
          ErrorCode::invalid_argument);
  agents[1].count(anchor_id(5), NAN);
  REQUIRE(kvmeld::anchors::balance(agents, {}, {.shards = 2}).status().code() ==
          ErrorCode::non_finite);
  REQUIRE(kvmeld::anchors::balance({}, {}, {.shards = 3})->partition.anchors.empty());
  std::vector<AnchorAccess> one(1);
  one[0].count(anchor_id(1));
  REQUIRE(kvmeld::anchors::balance(one, {}, {.shards = 3})->partition.shards.size() == 1);
}
