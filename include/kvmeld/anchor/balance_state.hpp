#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/mix_bits.hpp>

KVMELD_NAMESPACE_BEGIN
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
        static_cast<double>(mix_bits(seed + (c + 1) * 0x9E3779B97F4A7C15U) >> 11U) * 0x1p-53 * sum;
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
KVMELD_NAMESPACE_END
