#pragma once

// Measuring against a baseline in the same loop, so that a busy machine slows both alike.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

namespace bench {

template <class Work>
double seconds(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  benchmark::ClobberMemory();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Runs both in turn; reports ours, and as `ratio` the baseline's best time ÷ our best time, each
/// for as many bytes.
///
/// @param bytes what `ours` reads and writes; @param base_bytes what `base` does.
template <class Ours, class Base>
void paired(benchmark::State& state, std::int64_t bytes, const Ours& ours, std::int64_t base_bytes,
            const Base& base) {
  double best = std::numeric_limits<double>::infinity();
  double best_base = best;
  seconds(base);
  seconds(ours);
  for (auto _ : state) {
    best_base = std::min({best_base, seconds(base), seconds(base)});
    const double first = seconds(ours);
    best = std::min({best, first, seconds(ours)});
    state.SetIterationTime(first);
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["ratio"] =
      best_base / best * static_cast<double>(bytes) / static_cast<double>(base_bytes);
  state.counters["best_GBps"] = static_cast<double>(bytes) / best * 1e-9;
  state.counters["baseline_GBps"] = static_cast<double>(base_bytes) / best_base * 1e-9;
}

/// As `paired`, where each run of ours spends what `prepare` made; counted in items.
template <class Prepare, class Ours, class Base>
void paired_with_setup(benchmark::State& state, std::int64_t items, const Prepare& prepare,
                       const Ours& ours, const Base& base) {
  double best = std::numeric_limits<double>::infinity();
  double best_base = best;
  for (auto _ : state) {
    best_base = std::min({best_base, seconds(base), seconds(base)});
    prepare();
    const double first = seconds(ours);
    best = std::min(best, first);
    state.SetIterationTime(first);
  }
  state.SetItemsProcessed(state.iterations() * items);
  state.counters["ratio"] = best_base / best;
  state.counters["best_us"] = best * 1e6;
  state.counters["baseline_us"] = best_base * 1e6;
}

/// A benchmark's name: parts behind one another.
inline std::string name(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text.append(part);
  return text;
}
inline std::string mib(std::int64_t mebibytes) {
  return name({"/MiB:", std::to_string(mebibytes)});
}

template <class... Arguments>
void add(const std::string& name, Arguments... arguments) {
  benchmark::RegisterBenchmark(name.c_str(), arguments...)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(0.2);
}

}  // namespace bench
