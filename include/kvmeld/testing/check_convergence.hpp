#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <kvmeld/testing/simulation.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// Which runs `check_convergence` makes.
struct CheckOptions {
  std::uint64_t seeds = 300;
  std::uint64_t first_seed = 0;
  Options simulation{};
};

/// Simulates one seed after the other, and stops at the first that fails. `Report::ok` says whether
/// all agreed.
///
/// With the environment variable KVMELD_SIM_SEED only that seed runs, and every event is written to
/// standard error.
/// @tparam Node as for `Simulation`.
template <class Node = Replica<SimulatedStore>, class... Mergers>
[[nodiscard]] Report check_convergence(const CheckOptions& options, const Mergers&... mergers) {
  CheckOptions o = options;
  if (const char* const only = std::getenv("KVMELD_SIM_SEED"); only != nullptr && *only != '\0') {
    o.first_seed = detail::parse_decimal<std::uint64_t>(only).value_or(0);
    o.seeds = 1;
    if (o.simulation.trace == nullptr)
      o.simulation.trace = [](const char* line) { std::fprintf(stderr, "%s\n", line); };
  }
  Report all;
  for (std::uint64_t i = 0; i < o.seeds && all.ok(); ++i)
    all.add(Simulation<Node>(o.first_seed + i, o.simulation).run(mergers...));
  return all;
}
/// As above, with the merger under test first.
template <class Node = Replica<SimulatedStore>, class M>
requires requires(const M& merger) { merger.digest(); }
[[nodiscard]] Report check_convergence(const M& merger, const CheckOptions& options = {}) {
  return check_convergence<Node>(options, merger);
}

}  // namespace testing
KVMELD_NAMESPACE_END
