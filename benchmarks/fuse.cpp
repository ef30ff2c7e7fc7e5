// Fusers against the speed of memory: order statistics, and rules that weigh whole tokens. The
// rules read the keys when a plan is made, so that their time is the plan's and the run's; the
// triad a[i] = b[i] + s * c[i] is the baseline. `fuse/threads`: the same run in one thread is the
// baseline.

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::ElementType;

struct Triad {
  std::vector<float> a, b, c;

  explicit Triad(std::int64_t bytes)
      : a(static_cast<std::size_t>(bytes / 4)), b(a.size(), 1.0F), c(a.size(), 2.0F) {}
  void operator()() {
    float* const x = a.data();
    const float* const y = b.data();
    const float* const z = c.data();
    for (std::size_t i = 0; i < a.size(); ++i) x[i] = y[i] + 3.0F * z[i];
  }
};

/// Contributions of which a run reads both planes for a row of its output.
template <class F>
int rows_read(const F& fuser, int agents) {
  if constexpr (std::is_same_v<F, kvmeld::Krum> || std::is_same_v<F, kvmeld::Medoid>) {
    return 1;
  } else if constexpr (std::is_same_v<F, kvmeld::Bulyan>) {
    return agents - 2 * fuser.f;
  } else {
    return agents;
  }
}

/// Bytes that a plan and a run read and write: a rule that scores reads all keys when the plan is
/// made, and the run reads what was chosen. Keys are as large as values here.
template <class F>
std::int64_t bytes_moved(const F& fuser, int agents, std::int64_t bytes) {
  const std::int64_t keys = kvmeld::ScoreForm<F> ? agents * bytes / 2 : 0;
  return keys + (rows_read(fuser, agents) + 1) * bytes;
}

template <class F>
void fuse(benchmark::State& state, const F& fuser, ElementType type, int agents,
          std::int64_t mebibytes, bool rotary) {
  const auto geometry = rotary ? bench::small_model(type) : bench::plain_layer(type);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  const auto set = bench::agents(geometry, agents, tokens);
  const auto merger =
      kvmeld::merger(kvmeld::ById{}, kvmeld::Aligner{kvmeld::TokenMatch{}}, kvmeld::Fuser{fuser});
  auto render = bench::rendering(set, geometry, merger);
  kvmeld::Target target{*geometry};
  target.first_position = 100;
  Triad triad(render.plan.bytes());
  const auto work = [&] {
    if constexpr (kvmeld::ScoreForm<F>) {
      auto plan = kvmeld::plan(set, merger, target);
      if (!plan) std::abort();
      render.plan = *std::move(plan);
    }
    render.run(kvmeld::exec::seq);
  };
  const std::int64_t bytes = render.plan.bytes();
  bench::paired(state, bytes_moved(fuser, agents, bytes), work, 3 * bytes, [&] { triad(); });
}

// Two threads against one: the run, whose rows are apart; a plan is made in one thread.
template <class F>
void threads(benchmark::State& state, const F& fuser, ElementType type, int agents,
             std::int64_t mebibytes) {
  const auto geometry = bench::small_model(type);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  const auto set = bench::agents(geometry, agents, tokens);
  auto render = bench::rendering(
      set, geometry,
      kvmeld::merger(kvmeld::ById{}, kvmeld::Aligner{kvmeld::TokenMatch{}}, kvmeld::Fuser{fuser}));
  const auto two = kvmeld::exec::threads(2);
  const std::int64_t bytes = (agents + 1) * render.plan.bytes();
  bench::paired(
      state, bytes, [&] { render.run(two); }, bytes, [&] { render.run(kvmeld::exec::seq); });
}

const bool registered = [] {
  using bench::add;
  using bench::mib;
  using bench::name;
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32}) {
    const std::string_view dtype = kvmeld::to_string(type);
    for (const std::int64_t size : {1, 16}) {
      add(name({"fuse/median/", dtype, mib(size), "/agents:5"}), fuse<kvmeld::Median>,
          kvmeld::Median{}, type, 5, size, false);
    }
    add(name({"fuse/trimmed_mean/", dtype, mib(16), "/agents:5"}), fuse<kvmeld::TrimmedMean>,
        kvmeld::TrimmedMean{}, type, 5, std::int64_t{16}, false);
    for (const std::int64_t size : {1, 16}) {
      add(name({"fuse/krum/", dtype, mib(size), "/agents:5"}), fuse<kvmeld::Krum>, kvmeld::Krum{},
          type, 5, size, false);
      add(name({"fuse/medoid/", dtype, mib(size), "/agents:5"}), fuse<kvmeld::Medoid>,
          kvmeld::Medoid{}, type, 5, size, false);
    }
  }
  const auto bf16 = ElementType::bf16;
  add("fuse/median/bf16/MiB:16/agents:15", fuse<kvmeld::Median>, kvmeld::Median{}, bf16, 15,
      std::int64_t{16}, false);
  for (const std::int64_t size : {1, 16}) {
    add(name({"fuse/geometric_median/bf16", mib(size), "/agents:5"}), fuse<kvmeld::GeometricMedian>,
        kvmeld::GeometricMedian{}, bf16, 5, size, false);
    add(name({"fuse/median_rotary/bf16", mib(size), "/agents:5"}), fuse<kvmeld::Median>,
        kvmeld::Median{}, bf16, 5, size, true);
    add(name({"fuse/krum_rotary/bf16", mib(size), "/agents:5"}), fuse<kvmeld::Krum>, kvmeld::Krum{},
        bf16, 5, size, true);
  }
  add("fuse/threads/median_rotary/bf16/MiB:4/agents:5/threads:2", threads<kvmeld::Median>,
      kvmeld::Median{}, bf16, 5, std::int64_t{4});
  add("fuse/threads/mean/bf16/MiB:4/agents:5/threads:2", threads<kvmeld::WeightedMean>,
      kvmeld::WeightedMean{}, bf16, 5, std::int64_t{4});
  add("fuse/bulyan/bf16/MiB:16/agents:7", fuse<kvmeld::Bulyan>, kvmeld::Bulyan{}, bf16, 7,
      std::int64_t{16}, false);
  return true;
}();

}  // namespace
