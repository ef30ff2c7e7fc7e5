// Safe points: swapping a cache by pointer while a render of 50 MiB runs behind it, against copying
// the cache; importing one into llama.cpp, against copying its bytes; and publishing fragments into
// a store, against copying theirs.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include <kvmeld/replica/replica.hpp>
#include <kvmeld/replica/session_memory.hpp>
#include <kvmeld/stores/memory.hpp>

#include "caches.hpp"
#include "paired.hpp"

#if defined(KVMELD_BENCH_LLAMA)
#include <kvmeld/engine/llama.hpp>
#endif

namespace {

using kvmeld::ElementType;

/// Of the calling thread: what an event takes, however busy the machine is with others.
double cpu_seconds() {
  timespec now{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

/// Times of many single events: percentiles beside the best; where the thread was preempted, wall
/// and CPU part.
struct Times {
  std::vector<double> us, cpu_us;

  void add(double wall, double cpu) {
    us.push_back(wall);
    cpu_us.push_back(cpu);
  }

  void report(benchmark::State& state, double base_seconds) {
    std::sort(us.begin(), us.end());
    const auto at = [&](double share) {
      return us[static_cast<std::size_t>(share * static_cast<double>(us.size() - 1))];
    };
    state.counters["p50_us"] = at(0.5);
    state.counters["p99_us"] = at(0.99);
    state.counters["max_us"] = us.back();
    std::sort(cpu_us.begin(), cpu_us.end());
    state.counters["cpu_p50_us"] = cpu_us[cpu_us.size() / 2];
    state.counters["cpu_max_us"] = cpu_us.back();
    state.counters["best_us"] = us.front();
    state.counters["ratio"] = base_seconds * 1e6 / us.front();
  }
};

void swap_by_pointer(benchmark::State& state, std::int64_t mebibytes) {
  const auto geometry = bench::small_model(ElementType::f16);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  const kvmeld::FragmentSet set = bench::agents(geometry, 4, tokens / 4);
  kvmeld::Target target{*geometry};
  target.first_position = 100;  // every key is rotated
  const auto merger = kvmeld::merger();
  kvmeld::replica::RenderWorker<std::remove_const_t<decltype(merger)>> worker(merger);
  kvmeld::replica::SwapBuffer live;
  Times times;
  bench::Copy copy(mebibytes * bench::mebibyte);
  copy();
  double base = 1e9;
  (void)worker.request(set, target);
  while (!worker.idle()) std::this_thread::yield();
  for (auto _ : state) {
    (void)worker.request(set, target);  // the next one, behind the swap
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const bool renders = !worker.idle();
    bool swapped = false;  // not where the last render was taken while it was the newest
    const double cpu_before = cpu_seconds() * 1e6;
    const double seconds = bench::seconds([&] {
      auto outcome = worker.take();
      if (!outcome || !outcome->status) return;
      live.swap(std::move(outcome->rendered));
      benchmark::DoNotOptimize(live.current());
      swapped = true;
    });
    const double cpu_us = cpu_seconds() * 1e6 - cpu_before;
    state.SetIterationTime(seconds);
    if (renders && swapped) times.add(seconds * 1e6, cpu_us);
    while (!worker.idle()) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (state.iterations() % 16 == 0) base = (std::min)(base, bench::seconds([&] { copy(); }));
  }
  if (times.us.empty()) return state.SkipWithError("no render ran behind a swap");
  times.report(state, base);
  state.counters["behind_a_render"] = static_cast<double>(times.us.size());
}

/// A thousand fragments of so many tokens, hashed, stored, joined and told.
void publish(benchmark::State& state, std::int64_t tokens) {
  constexpr int count = 1000;
  const auto geometry = bench::small_model(ElementType::f16);
  const kvmeld::FragmentSet set = bench::agents(geometry, count, tokens);
  const std::int64_t bytes = count * tokens * bench::token_bytes(*geometry);
  bench::Copy copy(bytes);
  bench::paired(
      state, bytes,
      [&] {
        kvmeld::stores::MemoryStore store;
        kvmeld::replica::Replica replica(
            store, {.self = 1, .epoch = 1, .merger = kvmeld::replica::does_not_render});
        for (const auto& entry : set.entries()) (void)replica.insert(entry.fragment);
        benchmark::DoNotOptimize(replica.take_outbox());
      },
      bytes, [&] { copy(); });
}

#if defined(KVMELD_BENCH_LLAMA)

/// A model and a context with room for old and new tokens; none without KVMELD_BENCH_MODEL.
struct Engine {
  llama_model* model = nullptr;
  llama_context* context = nullptr;
  std::shared_ptr<const kvmeld::Geometry> geometry;
  kvmeld::llama::StateForm form;

  Engine() {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model_params model_parameters = llama_model_default_params();
    model_parameters.n_gpu_layers = 0;
    model = llama_model_load_from_file(std::getenv("KVMELD_BENCH_MODEL"), model_parameters);
    if (model == nullptr) return;
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = 8192;
    parameters.n_seq_max = 3;
    parameters.kv_unified = true;
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(model, parameters);
    const auto g =
        kvmeld::llama::geometry(model, parameters, {.adapters = kvmeld::Adapters::none()});
    if (context == nullptr || !g) return;
    const auto shared = std::make_shared<const kvmeld::Geometry>(*g);
    const std::vector<kvmeld::TokenId> one{1};
    if (!kvmeld::llama::detail::decode(context, 0, one, 0)) return;
    const auto state = kvmeld::llama::read(context, 0, shared);
    if (!state) return;
    form = state->form();
    geometry = shared;
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {
    if (context != nullptr) llama_free(context);
    if (model != nullptr) llama_model_free(model);
  }
};

void import_into_llama(benchmark::State& state, kvmeld::llama::Verify verify, std::int64_t tokens) {
  const Engine engine;
  if (engine.geometry == nullptr)
    return state.SkipWithError("the model of KVMELD_BENCH_MODEL does not load");
  const kvmeld::FragmentSet set = bench::agents(engine.geometry, 4, tokens / 4);
  const auto merger = kvmeld::merger();
  kvmeld::llama::EngineMemory memory(engine.context, engine.form, {.verify = verify});
  kvmeld::replica::RenderWorker<std::remove_const_t<decltype(merger)>, kvmeld::llama::StateBacking>
      worker(merger, memory.backing());
  Times times;
  bench::Copy copy(tokens * bench::token_bytes(*engine.geometry));
  copy();
  double base = 1e9;
  for (auto _ : state) {
    (void)worker.request(set, kvmeld::Target{*engine.geometry});
    (void)worker.wait_idle(60'000);
    auto outcome = worker.take();
    if (!outcome || !outcome->status) std::abort();
    const double cpu_before = cpu_seconds() * 1e6;
    const auto report = memory.install(std::move(outcome->rendered), {}, 0);
    const double cpu_us = cpu_seconds() * 1e6 - cpu_before;
    if (!report) return state.SkipWithError(report.error().message().c_str());
    state.SetIterationTime(report->import_ms * 1e-3);
    times.add(report->import_ms * 1e3, cpu_us);
    base = (std::min)(base, bench::seconds([&] { copy(); }));
  }
  state.SetBytesProcessed(state.iterations() * tokens * bench::token_bytes(*engine.geometry));
  times.report(state, base);
}

#endif  // KVMELD_BENCH_LLAMA

const bool registered = [] {
  benchmark::RegisterBenchmark(bench::name({"state/swap/pointer", bench::mib(50)}).c_str(),
                               swap_by_pointer, std::int64_t{50})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(200);
  for (const std::int64_t tokens : {1, 4})
    bench::add(bench::name({"state/publish/tokens:", std::to_string(tokens)}), publish, tokens);
#if defined(KVMELD_BENCH_LLAMA)
  if (std::getenv("KVMELD_BENCH_MODEL") != nullptr) {
    for (const std::int64_t tokens : {512, 2048}) {
      for (const auto& [name, verify] : {std::pair("positions", kvmeld::llama::Verify::positions),
                                         std::pair("bytes", kvmeld::llama::Verify::bytes)}) {
        benchmark::RegisterBenchmark(
            bench::name({"state/import/llama/verify:", name, "/tokens:", std::to_string(tokens)})
                .c_str(),
            import_into_llama, verify, tokens)
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond)
            ->Iterations(50);
      }
    }
  }
#endif
  return true;
}();

}  // namespace
