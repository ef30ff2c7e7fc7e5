#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/balance_state.hpp>

/// Which shard keeps which anchor: anchors that the same agents use stand together, and no shard
/// has much more than its share of the load.

KVMELD_NAMESPACE_BEGIN

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
    return error(ErrorCode::invalid_argument, "balance over ", o.shards, " shards with slack ",
                 o.slack, ", affinity ", o.affinity, ", move_cost ", o.move_cost, ", hysteresis ",
                 o.hysteresis, "; each must be finite and not negative, and shards at least 1");
  }
  for (std::size_t g = 0; g < agents.size(); ++g) {
    for (const auto& [id, uses] : agents[g].uses()) {
      if (!share(uses))
        return error(ErrorCode::non_finite, "agent ", g, " used anchor ", id.hex(), " ", uses,
                     " times");
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

KVMELD_NAMESPACE_END
