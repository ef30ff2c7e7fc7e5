#pragma once
// Renders through every executor at once, and an aligner that is told its answer.

#include <memory>
#include <utility>
#include <vector>

#include <kvmeld/kvmeld.hpp>

#include "catch.hpp"
#include "random_cache.hpp"

namespace test {

/// An `AlignPolicy` that returns what it was given: odd alignments, right and wrong.
struct Given {
  static constexpr bool reproducible = true;
  std::shared_ptr<const kvmeld::Alignment> alignment;

  [[nodiscard]] kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source>,
                                                        std::int64_t) const {
    return *alignment;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.Given"); }
};

/// The instruction sets of this processor.
inline std::vector<kvmeld::Isa> instruction_sets() {
  std::vector<kvmeld::Isa> out;
  for (const kvmeld::Isa isa : {kvmeld::Isa::baseline, kvmeld::Isa::avx2, kvmeld::Isa::avx512}) {
    if (isa <= kvmeld::best_isa()) out.push_back(isa);
  }
  return out;
}

/// Runs a plan in one executor into a fresh cache.
template <class E, class M>
std::unique_ptr<TestCache> run_in(const E& exec, const kvmeld::Plan<M>& plan, Layout layout) {
  auto out = std::make_unique<TestCache>(plan.shared_geometry(), plan.tokens(), layout);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const auto report = kvmeld::run(exec, plan, workspace, out->out());
  INFO(report.status().message());
  REQUIRE(report.ok());
  return out;
}

/// Plans, runs in every executor, demands the same bytes of all, and returns one of the caches.
template <class M>
std::unique_ptr<TestCache> render_everywhere(const kvmeld::FragmentSet& set, const M& merger,
                                             const kvmeld::Target& target,
                                             Layout layout = Layout::canonical) {
  const auto plan = kvmeld::plan(set, merger, target);
  INFO(plan.status().message());
  REQUIRE(plan.ok());
  auto first = run_in(kvmeld::exec::Sequential{.isa = kvmeld::Isa::baseline}, *plan, layout);
  for (const kvmeld::Isa isa : instruction_sets()) {
    INFO(kvmeld::to_string(isa));
    REQUIRE(run_in(kvmeld::exec::Sequential{.isa = isa}, *plan, layout)->buffers() ==
            first->buffers());
    REQUIRE(run_in(Streaming{isa}, *plan, layout)->buffers() == first->buffers());
  }
  INFO("lanes");
  REQUIRE(run_in(kvmeld::exec::lanes, *plan, layout)->buffers() == first->buffers());
  static const kvmeld::exec::Threads three = kvmeld::exec::threads(3);
  INFO("three threads");
  REQUIRE(run_in(three, *plan, layout)->buffers() == first->buffers());
  return first;
}

/// A set of fragments, each of an agent of its own, in the order given.
inline kvmeld::FragmentSet set_of(const std::vector<Sealed>& fragments) {
  kvmeld::FragmentSet set;
  std::uint64_t agent = 0;
  for (const Sealed& f : fragments) REQUIRE(set.insert(f.fragment, kvmeld::Dot{++agent, 0}).ok());
  return set;
}

/// In ascending order of id.
inline std::vector<Sealed> by_id(std::vector<Sealed> spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Sealed& a, const Sealed& b) { return a.fragment.id() < b.fragment.id(); });
  return spans;
}

}  // namespace test
