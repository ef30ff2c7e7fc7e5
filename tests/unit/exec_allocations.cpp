// A run allocates nothing, in a translation unit that knows no exceptions (CMakeLists.txt compiles
// it so).
#include <atomic>
#include <cstdlib>
#include <new>

#include "support/rendering.hpp"

#if defined(__cpp_exceptions)
#error "this file is to be compiled with -fno-exceptions"
#endif

namespace {
std::atomic<long> allocations{0};

void* counted(std::size_t size, std::size_t alignment = alignof(std::max_align_t)) {
  ++allocations;
  void* const memory =
      std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();
  return memory;
}
// Never inlined, so that no compiler sees `free` meet `new`.
__attribute__((noinline)) void release(void* memory) { std::free(memory); }
}  // namespace

void* operator new(std::size_t size) { return counted(size); }
void* operator new[](std::size_t size) { return counted(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

TEST_CASE("run allocates nothing in any executor, for any layout") {
  const auto g = test::geometry({.type = kvmeld::ElementType::q8_0, .heads = 3, .channels = 64});
  const auto set =
      test::set_of({test::sealed(g, 70, 1), test::sealed(g, 90, 2, {}, test::Layout::paged),
                    test::sealed(g, 1, 3)});
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = 3;
  const kvmeld::exec::Threads three = kvmeld::exec::threads(3);
  const auto check = [&](const auto& merger, test::Layout layout) {
    const auto plan = kvmeld::plan(set, merger, target);
    REQUIRE(plan.ok());
    test::TestCache out(g, plan->tokens(), layout);
    const kvmeld::MutableKvCacheRef view = out.out();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto count = [&](const auto& exec) {
      const long before = allocations;
      const auto report = kvmeld::run(exec, *plan, workspace, view);
      const long after = allocations;
      REQUIRE(report.ok());
      return after - before;
    };
    CHECK(count(kvmeld::exec::seq) == 0);
    CHECK(count(kvmeld::exec::lanes) == 0);
    CHECK(count(three) == 0);
  };
  for (const test::Layout layout :
       {test::Layout::canonical, test::Layout::paged, test::Layout::slot_list}) {
    check(kvmeld::merger(), layout);
    check(kvmeld::merger(kvmeld::Aligner{kvmeld::TokenMatch{}}), layout);
  }
  const long before = allocations;
  const std::vector<int> something(3);
  CHECK(allocations == before + 1);  // the counter counts
}
