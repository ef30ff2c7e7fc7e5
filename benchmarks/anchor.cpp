// Anchors: scans and tables of signatures against a plain loop, several callers at once, and blends
// against reading the same bytes.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/reuse.hpp>
#include <kvmeld/render.hpp>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::ElementType;

/// A table of random signatures; they share one anchor, since scans do not look at anchors.
kvmeld::anchors::AnchorTable table_of(std::size_t count) {
  kvmeld::anchors::AnchorTable table;
  const auto anchor = std::make_shared<const kvmeld::anchors::Anchor>();
  const auto use = std::make_shared<kvmeld::anchors::detail::UseCell>();
  std::vector<std::uint64_t> signatures;
  for (std::size_t i = 0; i < count; ++i) signatures.push_back(kvmeld::extend::mix_bits(i + 1));
  table.append(signatures, {anchor, use});
  return table;
}

/// Signatures as they are scanned one after the other, and as a pool's table finds them: through
/// its index where that is faster.
struct Signatures {
  kvmeld::anchors::AnchorTable table;
  std::vector<std::uint32_t> low, high;

  explicit Signatures(std::size_t count) : table(table_of(count)) {
    for (std::size_t i = 0; i < count; ++i) {
      low.push_back(static_cast<std::uint32_t>(table.signature(i)));
      high.push_back(static_cast<std::uint32_t>(table.signature(i) >> 32U));
    }
  }
  void find(bool as_table, std::uint64_t query, int distance,
            std::vector<kvmeld::anchors::HammingHit>& hits) const {
    hits.clear();
    if (as_table) return table.scan(query, distance, hits);
    kvmeld::anchors::hamming_scan({low.data(), high.data(), static_cast<std::uint32_t>(low.size())},
                                  query, distance, hits);
  }
};

#if defined(__x86_64__)
// As whoever writes this loop builds it: with the instruction that counts bits, and not a call of
// the compiler's library, which it is without -mpopcnt.
[[gnu::target("popcnt")]]
#endif
void scan_plainly(const std::vector<std::uint64_t>& signatures, std::uint64_t query, int distance,
                  std::vector<kvmeld::anchors::HammingHit>& hits) {
  hits.clear();
  for (std::size_t i = 0; i < signatures.size(); ++i) {
    const int d = __builtin_popcountll(signatures[i] ^ query);
    if (d <= distance)
      hits.push_back({static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(d)});
  }
}

void scan(benchmark::State& state, bool as_table, std::size_t count, double threshold) {
  const Signatures signatures(count);
  std::vector<std::uint64_t> plain;
  for (std::size_t i = 0; i < count; ++i) plain.push_back(signatures.table.signature(i));
  const int distance = kvmeld::anchors::max_distance(threshold);
  std::vector<kvmeld::anchors::HammingHit> hits, base_hits;
  const auto plainly = [&](std::uint64_t query) {
    scan_plainly(plain, query, distance, base_hits);
  };
  std::uint64_t query = 0;  // another each time: what an index touches is not in the caches already
  const auto ours = [&] {
    signatures.find(as_table, kvmeld::extend::mix_bits(0x123456789ABCDEFU + ++query), distance,
                    hits);
    benchmark::DoNotOptimize(hits.data());
  };
  const auto base = [&] {
    plainly(kvmeld::extend::mix_bits(0x123456789ABCDEFU + ++query));
    benchmark::DoNotOptimize(base_hits.data());
  };
  const auto bytes = static_cast<std::int64_t>(count * 8);
  bench::paired(state, bytes, ours, bytes, base);
  for (const std::uint64_t q : {query, plain.front() ^ 0x104200001U}) {
    signatures.find(as_table, q, distance, hits);
    plainly(q);
    if (hits != base_hits) std::abort();
  }
  state.counters["best_ms"] = static_cast<double>(bytes) / state.counters["best_GBps"].value * 1e-6;
}

/// Eight callers that take the current version and search it, while nothing else happens; ratio:
/// searches a second against cores / 0.3 ms.
void callers(benchmark::State& state, bool as_table, std::size_t count) {
  const kvmeld::anchors::detail::Published<Signatures> published(
      std::make_shared<const Signatures>(count));
  constexpr int threads = 8, each = 100;
  const double cores = std::max(1.0, static_cast<double>(std::thread::hardware_concurrency()));
  double best = HUGE_VAL;
  std::vector<double> latencies;
  for (auto _ : state) {
    std::vector<std::vector<double>> took(threads);
    const double seconds = bench::seconds([&] {
      std::vector<std::thread> pool;
      for (int t = 0; t < threads; ++t) {
        pool.emplace_back([&, t] {
          std::vector<kvmeld::anchors::HammingHit> hits;
          for (int i = 0; i < each; ++i) {
            took[static_cast<std::size_t>(t)].push_back(bench::seconds([&] {
              published.get()->find(
                  as_table,
                  kvmeld::extend::mix_bits(static_cast<std::uint64_t>(i * threads + t) + 77), 9,
                  hits);
              benchmark::DoNotOptimize(hits.data());
            }));
          }
        });
      }
      for (std::thread& t : pool) t.join();
    });
    if (seconds < best) {
      latencies.clear();
      for (const auto& part : took) latencies.insert(latencies.end(), part.begin(), part.end());
    }
    best = std::min(best, seconds);
    state.SetIterationTime(seconds);
  }
  std::sort(latencies.begin(), latencies.end());
  state.SetItemsProcessed(state.iterations() * threads * each);
  state.counters["ratio"] = threads * each / best / (cores / 0.3e-3);
  state.counters["scans_per_second"] = threads * each / best;
  state.counters["p50_ms"] = latencies[latencies.size() / 2] * 1e3;
  // callers share cores: waiting for one counts
  state.counters["p99_ms"] = latencies[latencies.size() * 99 / 100] * 1e3;
}

// The cheapest thing that still reads every byte.
struct Read {
  std::vector<kvmeld::Fragment> fragments;
  std::uint64_t total = 0;

  void operator()() {
    std::uint64_t sum = 0;
    for (const kvmeld::Fragment& fragment : fragments) {
      const kvmeld::Payload& payload = fragment.payloads()[0];
      const auto* const words = reinterpret_cast<const std::uint64_t*>(payload.bytes.get());
      for (std::size_t i = 0; i < payload.byte_count / 8; ++i) sum += words[i];
    }
    total = sum;
    benchmark::DoNotOptimize(total);
  }
};

void blend(benchmark::State& state, ElementType type, int heads, int channels, int anchors,
           std::int64_t mebibytes) {
  const auto rope = kvmeld::RopeSpec::rotary(channels, 10000.0, kvmeld::RopePairing::half_split);
  auto geometry = std::make_shared<kvmeld::Geometry>();
  for (int layer = 0; layer < 24; ++layer)
    geometry->layers.push_back(kvmeld::attention_layer(type, heads, channels, rope));
  const std::int64_t tokens = std::max<std::int64_t>(
      mebibytes * bench::mebibyte / (anchors + 1) / bench::token_bytes(*geometry), 2);
  const auto sealed = [&](std::uint32_t seed) {
    kvmeld::HostCache cache(geometry, tokens);
    bench::fill(cache.bytes(), seed);
    return *kvmeld::seal(cache.kv_cache_ref());
  };
  const auto base = kvmeld::anchors::unrotated(sealed(0));
  if (!base) std::abort();
  kvmeld::anchors::ReusePart part{.base = *base, .position = 100};
  Read read{{*base}};
  for (int a = 0; a < anchors; ++a) {
    const auto delta =
        kvmeld::anchors::measure_offset(sealed(static_cast<std::uint32_t>(a + 1)), sealed(77));
    if (!delta) std::abort();
    kvmeld::FragmentId id;
    id.bytes[31] = static_cast<std::uint8_t>(a);
    part.offsets.push_back(
        {.anchor = id, .delta = *delta, .weight = 1.0F / static_cast<float>(anchors)});
    read.fragments.push_back(*delta);
  }
  const auto plan = kvmeld::anchors::plan_reuse({&part, 1}, *geometry, {.compute_last = false});
  if (!plan) std::abort();
  kvmeld::HostCache out(geometry, tokens);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  std::int64_t bytes = 0;
  for (const kvmeld::Fragment& f : read.fragments)
    bytes += static_cast<std::int64_t>(f.payloads()[0].byte_count);
  const auto ours = [&] {
    if (!kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.mutable_ref())) std::abort();
  };
  bench::paired(state, bytes, ours, bytes, [&] { read(); });
  // With the output counted: a line that is written is fetched first, so beside two lines read, one
  // written costs as much as a third.
  const auto written = static_cast<double>(tokens * bench::token_bytes(*geometry));
  state.counters["ratio_moved"] = state.counters["ratio"].value *
                                  (static_cast<double>(bytes) + written) /
                                  static_cast<double>(bytes);
}

const bool registered = [] {
  using bench::add;
  using bench::mib;
  using bench::name;
  for (const std::size_t count : {std::size_t{5000}, std::size_t{100000}, std::size_t{1000000}}) {
    for (const bool as_table : {false, true}) {
      const std::string_view what = as_table ? "anchor/table" : "anchor/scan";
      add(name({what, "/signatures:", std::to_string(count), "/tau:0.85"}), scan, as_table, count,
          0.85);
      add(name({what, "/signatures:", std::to_string(count), "/tau:0.75"}), scan, as_table, count,
          0.75);
    }
  }
  add("anchor/callers:8/scan/signatures:1000000", callers, false, std::size_t{1000000});
  add("anchor/callers:8/table/signatures:1000000", callers, true, std::size_t{1000000});
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32}) {
    for (const int anchors : {1, 5, 20}) {
      for (const std::int64_t size : {1, 16, 64}) {
        add(name({"anchor/blend/", kvmeld::to_string(type), "/anchors:", std::to_string(anchors),
                  mib(size)}),
            blend, type, 8, 128, anchors, size);
      }
    }
    add(name({"anchor/blend_small_heads/", kvmeld::to_string(type), "/anchors:5", mib(16)}), blend,
        type, 2, 64, 5, std::int64_t{16});
  }
  return true;
}();

}  // namespace
