#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/fuse/weights.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// How well each agent did so far, old outcomes fading: (prior + Σ decayᵏ·success) / (1 + Σ
/// decayᵏ), k counting the agent's own later outcomes.
///
/// The same outcomes in the same order give the same bits everywhere; outcomes of different agents
/// may come in any order among each other. `weights()` is what a merger takes: every replica must
/// be given the same.
class AgentHistory {
 public:
  /// @param decay  in [0, 1]: 1 forgets nothing; @param prior  in [0, 1]: what one imagined outcome
  /// before all others was.
  explicit AgentHistory(double decay = 0.9, double prior = 0.5) : decay_(decay), prior_(prior) {}

  /// @param success  in [0, 1]. O(log agents), and O(agents) for an agent's first. Errors:
  /// `invalid_argument` (a number out of its range).
  [[nodiscard]] Status record(std::uint64_t agent, double success) {
    for (const double x : {decay_, prior_, success}) {
      if (!(x >= 0 && x <= 1))
        return detail::error(ErrorCode::invalid_argument, "AgentHistory: ", x, " for agent ", agent,
                             " is not in [0, 1]");
    }
    auto at = std::lower_bound(agents_.begin(), agents_.end(), agent,
                               [](const Past& p, std::uint64_t a) { return p.agent < a; });
    if (at == agents_.end() || at->agent != agent) at = agents_.insert(at, {agent, 0, 0});
    at->sum = fma(decay_, at->sum, success);
    at->count = fma(decay_, at->count, 1.0);
    return {};
  }
  /// Of one agent; the prior where nothing is known.
  [[nodiscard]] float weight(std::uint64_t agent) const noexcept {
    const auto at = std::lower_bound(agents_.begin(), agents_.end(), agent,
                                     [](const Past& p, std::uint64_t a) { return p.agent < a; });
    return at == agents_.end() || at->agent != agent ? static_cast<float>(prior_) : of(*at);
  }
  /// A fuser that weighs each agent by its history; unknown agents by the prior.
  [[nodiscard]] AgentWeights weights() const {
    AgentWeights out;
    for (const Past& past : agents_) out.weights.push_back({past.agent, of(past)});
    out.otherwise = static_cast<float>(prior_);
    return out;
  }

 private:
  struct Past {
    std::uint64_t agent;
    double sum;
    double count;
  };
  [[nodiscard]] float of(const Past& past) const noexcept {
    return static_cast<float>((prior_ + past.sum) / (1.0 + past.count));
  }

  double decay_;
  double prior_;
  std::vector<Past> agents_;  // ascending by agent
};

KVMELD_NAMESPACE_END
