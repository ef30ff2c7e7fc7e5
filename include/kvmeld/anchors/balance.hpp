#pragma once

/// Who computes which anchor among several agents.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

namespace detail {

/// Uses by anchor and agent, and their sums by shard. f64, in ascending order of anchors and
/// agents, so that sums are the same everywhere.
struct BalanceState {
  std::size_t agents = 0;
  double total = 0;
  std::vector<double> uses;   // (anchor, agent)
  std::vector<double> load;   // (anchor)
  std::vector<double> sums;   // (shard, agent)
  std::vector<double> loads;  // (shard)

  BalanceState(std::size_t anchor_count, std::size_t agent_count, std::size_t shards)
      : agents(agent_count),
        uses(anchor_count * agent_count, 0.0),
        load(anchor_count, 0.0),
        sums(shards * agent_count, 0.0),
        loads(shards, 0.0) {}

  void use(std::size_t anchor, std::size_t agent, double count) {
    uses[anchor * agents + agent] = count;
    load[anchor] += count;
    total += count;
  }
  [[nodiscard]] std::span<const double> row(std::size_t anchor) const noexcept {
    return {uses.data() + anchor * agents, agents};
  }
  [[nodiscard]] std::span<const double> sum(std::size_t shard) const noexcept {
    return {sums.data() + shard * agents, agents};
  }
  /// Heaviest first; of equals the smaller number.
  [[nodiscard]] std::vector<std::size_t> by_load() const {
    std::vector<std::size_t> order(load.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return load[x] > load[y]; });
    return order;
  }

  void add(std::size_t anchor, std::size_t shard, double sign) {
    for (std::size_t g = 0; g < agents; ++g)
      sums[shard * agents + g] = fma(sign, uses[anchor * agents + g], sums[shard * agents + g]);
    loads[shard] = fma(sign, load[anchor], loads[shard]);
  }
  void move(std::size_t anchor, std::size_t from, std::size_t to) {
    add(anchor, from, -1.0);
    add(anchor, to, 1.0);
  }
  /// Sums anew; an anchor whose shard is none of these is left out.
  void count(std::span<const std::uint32_t> shards) {
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(loads.begin(), loads.end(), 0.0);
    for (std::size_t a = 0; a < shards.size(); ++a) {
      if (shards[a] < loads.size()) add(a, shards[a], 1.0);
    }
  }
  /// Puts anchors that have no shard where their like are, as far as there is room.
  void place(std::vector<std::uint32_t>& shards, double slack) {
    for (const std::size_t a : by_load()) {
      if (shards[a] < loads.size()) continue;
      shards[a] = nearest(a, sums, loads, slack);
      add(a, shards[a], 1.0);
    }
  }
  /// The shard with room whose centre's profile is nearest, of equals the emptier one; where none
  /// has room, the emptiest.
  /// @param centres, weights  (shard, agent), (shard): profiles times their weight
  [[nodiscard]] std::uint32_t nearest(std::size_t anchor, std::span<const double> centres,
                                      std::span<const double> weights, double slack) const {
    const double most = (1.0 + slack) * total / static_cast<double>(loads.size());
    std::tuple<bool, double, double> best;
    std::uint32_t out = 0;
    for (std::uint32_t s = 0; s < loads.size(); ++s) {
      const bool full = loads[s] + load[anchor] > most;
      const double distance =
          full ? 0.0 : profile_distance(anchor, centres.subspan(s * agents, agents), weights[s]);
      const std::tuple key(full, distance, loads[s]);
      if (s != 0 && !(key < best)) continue;
      best = key;
      out = s;
    }
    return out;
  }
  /// Squared distance of an anchor's profile, its uses as shares, from a centre's.
  [[nodiscard]] double profile_distance(std::size_t anchor, std::span<const double> centre,
                                        double weight) const noexcept {
    double out = 0;
    for (std::size_t g = 0; g < agents; ++g) {
      const double own = load[anchor] > 0 ? uses[anchor * agents + g] / load[anchor] : 0.0;
      const double d = own - (weight > 0 ? centre[g] / weight : 0.0);
      out = fma(d, d, out);
    }
    return out;
  }

  /// Loads squared against equal ones, plus how much profiles differ within shards: Σ w |p − c|² =
  /// Σ w |p|² − Σ |S|² / L.
  [[nodiscard]] double cost(double affinity) const {
    if (!(total > 0)) return 0;
    double sum = 0, single = 0;
    for (std::size_t s = 0; s < loads.size(); ++s) sum += term(this->sum(s), loads[s], affinity);
    for (std::size_t a = 0; a < load.size(); ++a) single += square(row(a), load[a]);
    return fma(affinity, single / total, sum) - 1.0;
  }
  /// By how much the cost grows when an anchor goes from one shard to another.
  [[nodiscard]] double change(std::size_t anchor, std::size_t from, std::size_t to,
                              double affinity) {
    const double now = term(sum(from), loads[from], affinity) + term(sum(to), loads[to], affinity);
    move(anchor, from, to);
    const double then = term(sum(from), loads[from], affinity) + term(sum(to), loads[to], affinity);
    move(anchor, to, from);
    return then - now;
  }

 private:
  [[nodiscard]] static double square(std::span<const double> values, double weight) noexcept {
    double out = 0;
    for (const double x : values) out = fma(x, x, out);
    return weight > 0 ? out / weight : 0.0;
  }
  [[nodiscard]] double term(std::span<const double> values, double weight,
                            double affinity) const noexcept {
    const double crowding = weight / total * (weight / total) * static_cast<double>(loads.size());
    return fma(-affinity, square(values, weight) / total, crowding);
  }
};

/// Centres by k-means++: the first by load, each further one by load times the squared distance
/// from those before. Steps of SplitMix64.
[[nodiscard]] inline std::vector<double> seed_centres(const BalanceState& state, std::size_t shards,
                                                      std::uint64_t seed) {
  std::vector<double> centres;
  std::vector<double> distance(state.load.size(), 1.0);
  for (std::size_t c = 0; c < shards; ++c) {
    double sum = 0;
    for (std::size_t a = 0; a < distance.size(); ++a) sum = fma(state.load[a], distance[a], sum);
    const double at =
        static_cast<double>(extend::mix_bits(seed + (c + 1) * 0x9E3779B97F4A7C15U) >> 11U) *
        0x1p-53 * sum;
    std::size_t chosen = 0;
    double before = 0;
    for (std::size_t a = 0; a < distance.size(); ++a) {
      if (state.load[a] > 0 && distance[a] > 0) chosen = a;
      before = fma(state.load[a], distance[a], before);
      if (before > at) break;
    }
    for (std::size_t g = 0; g < state.agents; ++g)
      centres.push_back(state.load[chosen] > 0
                            ? state.uses[chosen * state.agents + g] / state.load[chosen]
                            : 0.0);
    const std::span<const double> centre(centres.data() + c * state.agents, state.agents);
    for (std::size_t a = 0; a < distance.size(); ++a) {
      const double d = state.profile_distance(a, centre, 1.0);
      distance[a] = c == 0 ? d : (std::min)(distance[a], d);
    }
  }
  return centres;
}

/// k-means whose parts have bounded loads: the cheapest round.
[[nodiscard]] inline std::vector<std::uint32_t> cluster(BalanceState& state, std::uint32_t shards,
                                                        double slack, double affinity,
                                                        std::uint32_t rounds, std::uint64_t seed) {
  std::vector<std::uint32_t> best(state.load.size(), 0);
  if (state.load.empty()) return best;
  std::vector<double> centres = seed_centres(state, shards, seed);
  std::vector<double> weights(shards, 1.0);
  std::vector<std::uint32_t> now, last;
  double least = 0;
  for (std::uint32_t round = 0; round < (std::max)(rounds, 1U); ++round) {
    now.assign(state.load.size(), shards);
    state.count(now);
    for (const std::size_t a : state.by_load()) {
      now[a] = state.nearest(a, centres, weights, slack);
      state.add(a, now[a], 1.0);
    }
    state.count(now);
    if (const double cost = state.cost(affinity); round == 0 || cost < least) {
      least = cost;
      best = now;
    }
    if (now == last) break;
    last = now;
    for (std::size_t s = 0; s < shards; ++s) {
      if (!(state.loads[s] > 0)) continue;  // an empty one keeps its seed
      std::copy_n(state.sums.begin() + static_cast<std::ptrdiff_t>(s * state.agents), state.agents,
                  centres.begin() + static_cast<std::ptrdiff_t>(s * state.agents));
      weights[s] = state.loads[s];
    }
  }
  return best;
}

}  // namespace detail

// Which shard keeps which anchor: anchors that the same agents use stand together, and no shard
// has much more than its share of the load.

/// How often one agent used each anchor. A value of that agent's own: counting takes no lock.
class AnchorAccess {
 public:
  void count(const FragmentId& anchor, double uses = 1) { uses_[anchor] += uses; }
  /// Makes what was before worth `factor` of what comes, in [0, 1]; anchors below 1/64 of a use are
  /// forgotten.
  void decay(double factor) {
    for (auto at = uses_.begin(); at != uses_.end();)
      at = (at->second *= factor) >= 1.0 / 64 ? std::next(at) : uses_.erase(at);
  }
  [[nodiscard]] const std::map<FragmentId, double>& uses() const noexcept { return uses_; }

 private:
  std::map<FragmentId, double> uses_;
};

/// Shards of anchors, by number.
struct AnchorPartition {
  std::vector<FragmentId> anchors{};    ///< ascending
  std::vector<std::uint32_t> shards{};  ///< (anchors)

  /// The shard of an anchor; `fallback` for one that was never counted. O(log n).
  [[nodiscard]] std::uint32_t find(const FragmentId& anchor,
                                   std::uint32_t fallback = 0) const noexcept {
    const auto at = std::lower_bound(anchors.begin(), anchors.end(), anchor);
    return at != anchors.end() && *at == anchor
               ? shards[static_cast<std::size_t>(at - anchors.begin())]
               : fallback;
  }
};

/// How anchors are spread over shards, and how unequal shards may be.
struct BalanceOptions {
  std::uint32_t shards = 1;
  /// A shard may have so much more than its equal share of the load, as far as single anchors
  /// allow.
  double slack = 0.05;
  /// Worth of agents that find their anchors together, against an equal load.
  double affinity = 0.5;
  /// What moving an anchor costs, times its share of the load: it moves where the cost falls by
  /// more.
  double move_cost = 0.1;
  double hysteresis = 0.01;     ///< nothing moves unless all moves together lower the cost by more
  std::uint32_t rounds = 20;    ///< of k-means, at most
  std::uint64_t seed = 0x5EED;  ///< of k-means++
};

/// A partition and what it takes to come to it.
struct AnchorBalance {
  AnchorPartition partition{};
  std::vector<std::size_t> moved{};  ///< numbers of anchors that change their shard, ascending
  /// Crowding + affinity · spread; 0: equal loads, and in each shard anchors of equal use.
  double cost_before = 0;
  double cost_after = 0;
};

namespace detail {

[[nodiscard]] inline Status check(const BalanceOptions& o, std::span<const AnchorAccess> agents) {
  const auto share = [](double x) { return std::isfinite(x) && x >= 0; };
  if (o.shards == 0 || !share(o.slack) || !share(o.affinity) || !share(o.hysteresis) ||
      !share(o.move_cost)) {
    return extend::error(ErrorCode::invalid_argument, "balance over ", o.shards,
                         " shards with slack ", o.slack, ", affinity ", o.affinity, ", move_cost ",
                         o.move_cost, ", hysteresis ", o.hysteresis,
                         "; each must be finite and not negative, and shards at least 1");
  }
  for (std::size_t g = 0; g < agents.size(); ++g) {
    for (const auto& [id, uses] : agents[g].uses()) {
      if (!share(uses))
        return extend::error(ErrorCode::non_finite, "agent ", g, " used anchor ", id.hex(), " ",
                             uses, " times");
    }
  }
  return {};
}

/// The same parts under the numbers of the old ones that they have most load in common with, the
/// largest such first.
[[nodiscard]] inline std::vector<std::uint32_t> renamed(std::span<const std::uint32_t> parts,
                                                        std::span<const std::uint32_t> old,
                                                        const BalanceState& state) {
  const std::size_t n = state.loads.size();
  std::vector<double> common(n * n, 0.0);
  for (std::size_t a = 0; a < parts.size(); ++a) common[parts[a] * n + old[a]] += state.load[a];
  std::vector<std::size_t> pairs(n * n);
  std::iota(pairs.begin(), pairs.end(), std::size_t{0});
  std::stable_sort(pairs.begin(), pairs.end(),
                   [&](std::size_t x, std::size_t y) { return common[x] > common[y]; });
  std::vector<std::uint32_t> names(n, 0);
  std::vector<bool> named(n, false), taken(n, false);
  for (const std::size_t p : pairs) {
    if (named[p / n] || taken[p % n]) continue;
    names[p / n] = static_cast<std::uint32_t>(p % n);
    named[p / n] = taken[p % n] = true;
  }
  std::vector<std::uint32_t> out;
  for (const std::uint32_t part : parts) out.push_back(names[part]);
  return out;
}

}  // namespace detail

/// Partitions anchors by which agents use them, and moves what is worth it.
///
/// k-means over profiles (each anchor's uses by agent, as shares), weighted by load: seeds by
/// k-means++ (Arthur and Vassilvitskii, 2007) from a fixed seed, then rounds in which anchors join
/// the nearest centre that has room, heaviest first; the best round counts. Parts keep the numbers
/// of the shards that they resemble. Then hysteresis: an anchor moves only where that lowers the
/// cost by more than its move costs, and none does unless all together lower it by more than
/// `hysteresis`. Anchors that `current` does not know are placed, which is no move; those that
/// nobody used stay. Cost: crowding, shards · Σ (share of the load)² − 1, plus `affinity` times the
/// mean squared distance of profiles from their shard's. In f64, in a fixed order: the same counts
/// give the same partition everywhere. O(rounds · anchors · shards · agents). Errors:
/// `invalid_argument`, `non_finite`.
/// @param agents   (agents) what each used; the order of agents is part of the input.
/// @param current  empty: a first partition.
[[nodiscard]] inline Result<AnchorBalance> balance(std::span<const AnchorAccess> agents,
                                                   const AnchorPartition& current,
                                                   const BalanceOptions& options) {
  KVMELD_TRY(detail::check(options, agents));
  AnchorBalance out;
  std::vector<FragmentId>& ids = out.partition.anchors;
  ids = current.anchors;
  for (const AnchorAccess& agent : agents) {
    for (const auto& use : agent.uses()) ids.push_back(use.first);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  detail::BalanceState state(ids.size(), agents.size(), options.shards);
  for (std::size_t g = 0; g < agents.size(); ++g) {
    for (const auto& [id, uses] : agents[g].uses())
      state.use(
          static_cast<std::size_t>(std::lower_bound(ids.begin(), ids.end(), id) - ids.begin()), g,
          uses);
  }
  // What is there, newcomers placed.
  std::vector<std::uint32_t> before(ids.size(), options.shards);
  bool known = false;
  for (std::size_t a = 0; a < ids.size(); ++a) {
    const std::uint32_t shard = current.find(ids[a], options.shards);
    before[a] = (std::min)(shard, options.shards);
    known = known || shard < options.shards;
  }
  const std::vector<std::uint32_t> best = detail::cluster(
      state, options.shards, options.slack, options.affinity, options.rounds, options.seed);
  if (!known) before = best;
  state.count(before);
  state.place(before, options.slack);
  out.cost_before = state.cost(options.affinity);
  std::vector<std::uint32_t> after = detail::renamed(best, before, state);
  for (std::size_t a = 0; a < after.size(); ++a) {
    if (!(state.load[a] > 0)) after[a] = before[a];
  }
  state.count(after);
  // The lightest first: where two moves are worth little without each other, the heavier one
  // decides for both.
  std::vector<std::size_t> order = state.by_load();
  std::reverse(order.begin(), order.end());
  for (const std::size_t a : order) {
    if (after[a] == before[a]) continue;
    if (state.change(a, after[a], before[a], options.affinity) >
        options.move_cost * (state.load[a] / state.total))
      continue;
    state.move(a, after[a], before[a]);
    after[a] = before[a];
  }
  out.cost_after = state.cost(options.affinity);
  if (!(out.cost_before - out.cost_after > options.hysteresis)) {
    after = before;
    out.cost_after = out.cost_before;
  }
  for (std::size_t a = 0; a < after.size(); ++a) {
    if (after[a] != before[a]) out.moved.push_back(a);
  }
  out.partition.shards = std::move(after);
  return out;
}

}  // namespace anchors

KVMELD_NAMESPACE_END
