#pragma once
// Renders in every executor and demands equal bytes; what comes out goes into one digest, which
// many builds must share.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <kvmeld/kvmeld.hpp>

#include "random_cache.hpp"

namespace test {

struct Sink {
  kvmeld::Xxh3_128 hash;
  void bytes(const void* data, std::size_t size) {
    hash.update({static_cast<const std::byte*>(data), size});
  }
};

inline void require(bool condition, const char* what, int a = 0, int b = 0) {
  if (condition) return;
  std::printf("identity: %s (%d, %d)\n", what, a, b);
  std::exit(1);
}

template <class E, class M>
void same_in(const E& exec, const kvmeld::Plan<M>& plan, Layout layout, const TestCache& want,
             const char* name) {
  TestCache out(plan.shared_geometry(), plan.tokens(), layout);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  require(kvmeld::run(exec, plan, workspace, out.out()).ok(), "run failed in",
          static_cast<int>(layout));
  require(out.buffers() == want.buffers(), name, static_cast<int>(layout),
          static_cast<int>(out.shape(0).type));
}

template <class M>
void render(Sink& sink, const kvmeld::FragmentSet& set, const M& merger,
            const kvmeld::Target& target, Layout layout) {
  static const kvmeld::exec::Threads one = kvmeld::exec::threads(1), two = kvmeld::exec::threads(2),
                                     seven = kvmeld::exec::threads(7);
  const auto plan = kvmeld::plan(set, merger, target);
  require(plan.ok(), "plan failed");
  TestCache first(plan->shared_geometry(), plan->tokens(), layout);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto report = kvmeld::run(kvmeld::exec::Sequential{.isa = kvmeld::Isa::baseline}, *plan,
                                  workspace, first.out(), {.content_digest = true});
  require(report.ok(), "run failed");
  for (const kvmeld::Isa isa : {kvmeld::Isa::avx2, kvmeld::Isa::avx512}) {
    if (isa <= kvmeld::best_isa())
      same_in(kvmeld::exec::Sequential{.isa = isa}, *plan, layout, first,
              kvmeld::to_string(isa).data());
  }
  same_in(test::Streaming{}, *plan, layout, first, "streaming");
  same_in(kvmeld::exec::lanes, *plan, layout, first, "lanes");
  same_in(one, *plan, layout, first, "one thread");
  same_in(two, *plan, layout, first, "two threads");
  same_in(seven, *plan, layout, first, "seven threads");
  for (const auto& buffer : first.buffers()) sink.bytes(buffer.data(), buffer.size());
  sink.bytes(&*report->content_digest, sizeof(kvmeld::Digest128));
  sink.bytes(&report->render_id, sizeof(kvmeld::Digest128));
}

}  // namespace test
