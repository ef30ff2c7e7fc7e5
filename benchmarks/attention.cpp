// Context vectors against reading the same bytes once: a sum over them, in the same loop. And
// pooled tokens: plan and run.
//
// Many queries are bound by arithmetic and not by memory, so `roofline_ratio` compares with the
// longer of two times: that of reading, and that of the multiplications and additions of q·k and
// w·v at the rate that this processor reaches in registers.

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include <kvmeld/policies/attention.hpp>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::ElementType;

std::vector<float> queries_for(const kvmeld::Geometry& geometry, std::int64_t count) {
  std::vector<float> out;
  for (std::int64_t q = 0; q < count; ++q) {
    for (const auto& layer : geometry.layers) {
      for (std::int64_t i = 0; i < layer.planes[0].heads * layer.planes[0].channels; ++i)
        out.push_back(0.01F * static_cast<float>((i * 7 + q * 3) % 11 - 5));
    }
  }
  return out;
}

// The cheapest thing that still reads every byte.
struct Sum {
  const kvmeld::HostCache& cache;
  std::uint64_t total = 0;

  void operator()() {
    const auto bytes = cache.bytes();
    const auto* const words = reinterpret_cast<const std::uint64_t*>(bytes.data());
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < bytes.size() / 8; ++i) sum += words[i];
    total = sum;
    benchmark::DoNotOptimize(total);
  }
};

// Twelve sums at once, so that none waits for itself; the vectors are those that kvmeld's kernels
// may choose.
#define CHAINS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define START(i) auto s##i = Vector{} + static_cast<float>(i);
#define STEP(i) s##i = FMA(s##i, by, by);
#define JOIN(i) s0 = s0 + s##i;
constexpr int steps = 20000;
#if KVMELD_X86_DISPATCH
#define FMA kvmeld::extend::fma_wide
KVMELD_TARGET_AVX512 KVMELD_NOINLINE float chains_avx512() {
  using Vector = kvmeld::extend::WideFloats;
  Vector by = Vector{} + 0.5F;
  benchmark::DoNotOptimize(by);
  CHAINS(START)
  for (int i = 0; i < steps; ++i) {
    CHAINS(STEP)
  }
  CHAINS(JOIN)
  return s0[0];
}
#undef FMA
#define FMA kvmeld::extend::fma_lanes
KVMELD_TARGET_AVX2 KVMELD_NOINLINE float chains_avx2() {
  using Vector = kvmeld::extend::FloatLanes;
  Vector by = Vector{} + 0.5F;
  benchmark::DoNotOptimize(by);
  CHAINS(START)
  for (int i = 0; i < steps; ++i) {
    CHAINS(STEP)
  }
  CHAINS(JOIN)
  return s0[0];
}
#undef FMA
#endif
#undef CHAINS
#undef START
#undef STEP
#undef JOIN

/// Floating-point operations a second, at best; 0 where this build has no vectors of its own.
double peak_flops() {
  double best = 0;
#if KVMELD_X86_DISPATCH
  const bool wide = kvmeld::best_isa() == kvmeld::Isa::avx512;
  if (kvmeld::best_isa() == kvmeld::Isa::baseline) return 0;
  for (int i = 0; i < 20; ++i) {
    const double time =
        bench::seconds([&] { benchmark::DoNotOptimize(wide ? chains_avx512() : chains_avx2()); });
    best = std::max(best, steps * 12.0 * (wide ? 16 : 8) * 2 / time);
  }
#endif
  return best;
}

/// Adds what `paired` left to the counters: ours against the longer of reading and arithmetic.
void roofline(benchmark::State& state, std::int64_t bytes, double flops) {
  const double peak = peak_flops();
  const double ours = static_cast<double>(bytes) * 1e-9 / state.counters["best_GBps"];
  const double reading = static_cast<double>(bytes) * 1e-9 / state.counters["baseline_GBps"];
  state.counters["peak_GFLOPS"] = peak * 1e-9;
  state.counters["roofline_ratio"] = std::max(reading, peak > 0 ? flops / peak : 0.0) / ours;
}

/// Operations of q·k and w·v over all heads and tokens.
double attention_flops(const kvmeld::Geometry& geometry, std::int64_t tokens, std::int64_t count) {
  double channels = 0;
  for (const auto& layer : geometry.layers) {
    for (const auto& plane : layer.planes)
      channels += static_cast<double>(plane.heads) * plane.channels;
  }
  return 2.0 * channels * static_cast<double>(tokens * count);
}

void attend(benchmark::State& state, ElementType type, std::int64_t count, std::int64_t mebibytes,
            bool rotary) {
  const auto geometry = rotary ? bench::small_model(type) : bench::plain_layer(type);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  kvmeld::HostCache cache(geometry, tokens);
  bench::fill(cache.bytes(), 1);
  const auto values = queries_for(*geometry, count);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  std::int64_t heads = 0;
  for (const auto& layer : geometry->layers) heads += layer.planes[0].heads;
  const std::int64_t channels = geometry->layers[0].planes[1].channels;
  std::vector<float> outputs(static_cast<std::size_t>(count * heads * channels)),
      lse(static_cast<std::size_t>(count * heads));
  const kvmeld::AttentionQueries queries{values, count, kvmeld::QueryFrame::pre_rope,
                                         {},     0.0F,  1.0F};
  const auto work = [&] {
    if (!kvmeld::attend(queries, cache.kv_cache_ref(), {outputs, lse, count, heads, channels},
                        positions))
      std::abort();
  };
  Sum sum{cache};
  const std::int64_t bytes = tokens * bench::token_bytes(*geometry);
  bench::paired(state, bytes, work, bytes, [&] { sum(); });
  roofline(state, bytes, attention_flops(*geometry, tokens, count));
}

void pool(benchmark::State& state, ElementType type, std::int64_t count, std::int64_t mebibytes) {
  const auto geometry = bench::plain_layer(type);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  const auto set = bench::agents(geometry, 3, tokens / 3);
  const auto queries = std::make_shared<const std::vector<float>>(queries_for(*geometry, count));
  const auto merger = kvmeld::merger(
      kvmeld::ById{}, kvmeld::Aligner{kvmeld::Attention{.queries = queries, .count = count}});
  auto render = bench::rendering(set, geometry, merger);
  kvmeld::Target target{*geometry};
  kvmeld::HostCache same(geometry, tokens / 3 * 3);
  bench::fill(same.bytes(), 1);
  Sum sum{same};
  const std::int64_t bytes = tokens / 3 * 3 * bench::token_bytes(*geometry);
  const auto work = [&] {
    auto plan = kvmeld::plan(set, merger, target);
    if (!plan) std::abort();
    render.plan = *std::move(plan);
    render.run(kvmeld::exec::seq);
  };
  bench::paired(state, bytes, work, bytes, [&] { sum(); });
  // q·k once; then every output weighs the keys and the values of all tokens.
  roofline(state, bytes, 1.5 * attention_flops(*geometry, tokens / 3 * 3, count));
}

const bool registered = [] {
  using bench::add;
  using bench::mib;
  using bench::name;
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32}) {
    for (const std::int64_t size : {1, 16, 64}) {
      for (const std::int64_t count : {1, 4, 16}) {
        add(name({"align/attend/", kvmeld::to_string(type), mib(size),
                  "/queries:", std::to_string(count)}),
            attend, type, count, size, false);
      }
    }
    add(name({"align/attend_rotary/", kvmeld::to_string(type), mib(16), "/queries:1"}), attend,
        type, std::int64_t{1}, std::int64_t{16}, true);
    add(name({"align/pool/", kvmeld::to_string(type), mib(16), "/queries:4"}), pool, type,
        std::int64_t{4}, std::int64_t{16});
  }
  return true;
}();

}  // namespace
