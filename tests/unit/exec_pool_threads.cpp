// Pools and executors under several threads; also built under the thread sanitizer.
#include <atomic>
#include <cstring>
#include <thread>

#include "support/rendering.hpp"

namespace {

// A host's own pool, as plain as can be: a thread a task.
struct HostPool {
  std::atomic<int> jobs{0};
  void run(std::size_t tasks, void (*task)(void*, std::size_t), void* context) {
    ++jobs;
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < tasks; ++i) threads.emplace_back(task, context, i);
    for (std::thread& t : threads) t.join();
  }
  [[nodiscard]] static std::size_t size() { return 2; }
};

kvmeld::Target at(const std::shared_ptr<const kvmeld::Geometry>& g) {
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = 9;
  return target;
}

const auto mean = kvmeld::merger(kvmeld::Aligner{kvmeld::TokenMatch{}});

}  // namespace

TEST_CASE("a pool runs each task of a job once, jobs of several callers one after the other") {
  for (const std::size_t size : {1U, 2U, 5U}) {
    kvmeld::exec::ThreadPool pool(size);
    CHECK(pool.size() == size);
    struct Job {
      std::vector<std::atomic<int>> hits;
      std::atomic<int> running{0};
    };
    std::vector<std::thread> callers;
    std::atomic<bool> right{true};
    for (std::size_t caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&pool, &right, caller] {
        for (const std::size_t tasks :
             {std::size_t{0}, std::size_t{1}, std::size_t{37}, 5 + caller}) {
          Job job{std::vector<std::atomic<int>>(tasks)};
          pool.run(
              tasks, [](void* self, std::size_t i) { ++static_cast<Job*>(self)->hits[i]; }, &job);
          for (const auto& hits : job.hits) right = right && hits == 1;
        }
      });
    }
    for (std::thread& t : callers) t.join();
    CHECK(right);
  }
}

TEST_CASE("a host's own pool does the work, and writes the same bytes") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const auto set = test::set_of({test::sealed(g, 70, 1), test::sealed(g, 90, 2)});
  const auto plan = kvmeld::plan(set, mean, at(g));
  REQUIRE(plan.ok());
  HostPool pool;
  const auto a = test::run_in(kvmeld::exec::threads(pool), *plan, test::Layout::canonical);
  CHECK(pool.jobs == 1);
  CHECK(a->buffers() == test::run_in(kvmeld::exec::seq, *plan, test::Layout::canonical)->buffers());
  CHECK(a->buffers() == test::run_in(kvmeld::exec::cpu, *plan, test::Layout::canonical)->buffers());
}

TEST_CASE("one plan runs in several threads at once, while its set changes") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  auto set = test::set_of({test::sealed(g, 70, 1), test::sealed(g, 90, 2)});
  const auto plan = kvmeld::plan(set, mean, at(g));
  REQUIRE(plan.ok());
  const auto want = test::run_in(kvmeld::exec::seq, *plan, test::Layout::canonical);
  const kvmeld::exec::Threads exec = kvmeld::exec::threads(2);
  std::vector<std::thread> runners;
  std::atomic<int> same{0};
  for (int i = 0; i < 3; ++i) {
    runners.emplace_back([&] {
      test::TestCache out(g, plan->tokens());
      std::vector<std::byte> workspace(plan->workspace_bytes());
      if (kvmeld::run(exec, *plan, workspace, out.out()).ok() && out.buffers() == want->buffers())
        ++same;
    });
  }
  set = {};  // the plan holds what it reads
  for (std::thread& t : runners) t.join();
  CHECK(same == 3);
}

TEST_CASE(
    "a caller that flushes subnormal numbers, and workers that it starts, render them all the "
    "same") {
  if (kvmeld::detail::float_control_mask == 0)
    return test::skip("no float control on this processor");
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32, .rotary = 0});
  test::TestCache tiny(g, 3);
  for (std::size_t p = 0; p < 2; ++p) {
    for (std::int64_t t = 0; t < 3; ++t) {
      for (std::int64_t c = 0; c < 32; ++c)
        tiny.set(p, t, 0, c, static_cast<float>(c + 1) * 0x1p-149F);
    }
  }
  kvmeld::FragmentSet set;
  for (const int first : {0, 100})
    REQUIRE(set.insert(*kvmeld::seal(tiny.ref(), {.tokens = test::token_ids(3, first)})).ok());
  const auto sum =
      kvmeld::merger(kvmeld::Aligner{kvmeld::TokenMatch{}}, kvmeld::Fuser{kvmeld::Sum{}});
  const auto plan = kvmeld::plan(set, sum, at(g));
  REQUIRE(plan.ok());
  const std::uint64_t before = kvmeld::detail::read_float_control();
  // x86: not the rounding mode
  kvmeld::detail::write_float_control(
      before | (kvmeld::detail::float_control_mask & ~std::uint64_t{0x6000}));
  const std::uint64_t flushing = kvmeld::detail::read_float_control();
  const kvmeld::exec::Threads started_flushing = kvmeld::exec::threads(3);
  std::vector<std::unique_ptr<test::TestCache>> outs;
  for (int i = 0; i < 3; ++i) outs.push_back(std::make_unique<test::TestCache>(g, 3));
  std::vector<std::byte> workspace(plan->workspace_bytes());
  bool ok = kvmeld::run(kvmeld::exec::seq, *plan, workspace, outs[0]->out()).ok();
  ok = ok && kvmeld::run(kvmeld::exec::lanes, *plan, workspace, outs[1]->out()).ok();
  ok = ok && kvmeld::run(started_flushing, *plan, workspace, outs[2]->out()).ok();
  const bool kept = kvmeld::detail::read_float_control() == flushing;
  kvmeld::detail::write_float_control(before);
  CHECK(ok);
  CHECK(kept);  // the caller's own setting is as it was
  for (const auto& out : outs) {
    for (std::int64_t c = 0; c < 32; ++c) {
      // subnormal bits add like integers
      const auto want = static_cast<std::uint32_t>(2 * (c + 1));
      CHECK(std::memcmp(out->bytes(1, 2, 0, c), &want, 4) == 0);
    }
  }
}
