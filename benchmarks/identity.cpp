// Naming content: sealing and digests against XXH3 in one call, and what a plan costs beside its
// run.

#include <string>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::ElementType;

// Sealing copies, normalises and names; no code could do with less than one copy and one hash.
void seal(benchmark::State& state, ElementType type, std::int64_t mebibytes) {
  const auto geometry = bench::small_model(type);
  kvmeld::HostCache cache(geometry, mebibytes * bench::mebibyte / bench::token_bytes(*geometry));
  bench::fill(cache.bytes(), 1);
  const auto bytes = static_cast<std::int64_t>(cache.bytes().size());
  bench::Copy copy(bytes);
  const auto work = [&] { benchmark::DoNotOptimize(kvmeld::seal(cache.kv_cache_ref())); };
  bench::paired(state, bytes, work, bytes, [&] {
    copy();
    benchmark::DoNotOptimize(XXH3_128bits(copy.to.data(), copy.to.size()));
  });
}

void content_digest(benchmark::State& state, std::int64_t mebibytes) {
  const auto geometry = bench::small_model(ElementType::f16);
  kvmeld::HostCache cache(geometry, mebibytes * bench::mebibyte / bench::token_bytes(*geometry));
  bench::fill(cache.bytes(), 1);
  const auto bytes = static_cast<std::int64_t>(cache.bytes().size());
  bench::paired(
      state, bytes,
      [&] { benchmark::DoNotOptimize(*kvmeld::content_digest(cache.kv_cache_ref())); }, bytes,
      [&] { benchmark::DoNotOptimize(XXH3_128bits(cache.bytes().data(), cache.bytes().size())); });
}

// The baseline is the run that follows: a ratio of 10 says that planning takes a tenth of it.
void plan(benchmark::State& state, int agents, std::int64_t tokens) {
  const auto geometry = bench::small_model(ElementType::f16);
  const kvmeld::FragmentSet set = bench::agents(geometry, agents, tokens / agents);
  const auto merger = kvmeld::merger();
  auto render = bench::rendering(set, geometry, merger);
  kvmeld::Target target{*geometry};
  target.first_position = 100;
  const std::int64_t bytes = render.plan.bytes();
  bench::paired(
      state, bytes, [&] { benchmark::DoNotOptimize(kvmeld::plan(set, merger, target)); }, bytes,
      [&] { render.run(kvmeld::exec::seq); });
}

const bool registered = [] {
  using bench::add;
  using bench::mib;
  using bench::name;
  for (const std::int64_t size : {1, 12, 48}) {
    for (const ElementType type : {ElementType::f16, ElementType::f32, ElementType::q8_0}) {
      add(name({"seal/", kvmeld::to_string(type), mib(size)}), seal, type, size);
    }
    add(name({"content_digest/f16", mib(size)}), content_digest, size);
  }
  for (const int agents : {2, 8}) {
    for (const std::int64_t tokens : {256, 4096}) {
      add(name({"plan/concat/agents:", std::to_string(agents), "/tokens:", std::to_string(tokens)}),
          plan, agents, tokens);
    }
  }
  return true;
}();

}  // namespace
