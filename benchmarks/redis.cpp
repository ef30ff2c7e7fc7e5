// Fragments through a Redis server of the benchmark's own, against what redis-benchmark gets from
// the same server over the same socket with one connection and no pipelining: its rate in bytes is
// the baseline.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/stores/redis.hpp>

#include "../tests/support/redis_server.hpp"
#include "paired.hpp"

namespace {

constexpr std::int64_t fragment_bytes = std::int64_t{8} << 20U;
constexpr int fragments = 16;  // of each, in turn

/// Bytes a second of SET or GET, as redis-benchmark measures it; GET reads what its SET has left.
double baseline(const test::RedisServer& server, const std::string& test, std::int64_t chunk_bytes,
                bool loopback) {
  const std::string where =
      loopback ? " -h 127.0.0.1 -p " + std::to_string(server.port()) : " -s " + server.socket();
  const std::int64_t requests = fragments * fragment_bytes / chunk_bytes;
  const std::string command = "redis-benchmark" + where + " -c 1 -P 1 --csv -t set,get -d " +
                              std::to_string(chunk_bytes) + " -n " + std::to_string(requests) +
                              " 2>/dev/null";
  double rate = 0;
  std::FILE* answer = popen(command.c_str(), "r");
  if (answer == nullptr) return 0;
  for (char line[512]; std::fgets(line, sizeof line, answer) != nullptr;) {
    const std::string text(line);  // "SET","1234.56",…
    if (text.rfind("\"" + test + "\"", 0) == 0) rate = std::strtod(text.c_str() + 7, nullptr);
  }
  pclose(answer);
  return rate * static_cast<double>(chunk_bytes);
}

enum class Way { publish, publish_singly, fetch, fetch_singly, known };

void redis(benchmark::State& state, Way way, std::int64_t chunk_bytes, bool loopback) {
  const test::RedisServer server({}, loopback);
  auto opened = kvmeld::stores::RedisStore::open(
      {.server = loopback ? server.client_by_port() : server.client()});
  if (!opened) return state.SkipWithError(opened.error().message().c_str());
  kvmeld::stores::RedisStore& store = *opened;
  std::vector<std::byte> fragment(static_cast<std::size_t>(fragment_bytes));
  for (std::size_t i = 0; i < fragment.size(); ++i)
    fragment[i] = static_cast<std::byte>(i * 2654435761U >> 13U);
  std::vector<kvmeld::BlobKey> keys(static_cast<std::size_t>(fragment_bytes / chunk_bytes));
  std::vector<kvmeld::stores::RedisBlob> blobs;
  const auto size = static_cast<std::size_t>(chunk_bytes);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i].bytes[0] = static_cast<std::uint8_t>(i);
    keys[i].bytes[1] = static_cast<std::uint8_t>(i >> 8U);
    blobs.push_back({keys[i], std::span(fragment).subspan(i * size, size)});
  }
  bool good = true;
  const auto work = [&] {
    switch (way) {
      case Way::publish:
      case Way::known:
        good = good && store.put_all(blobs).ok();
        break;
      case Way::publish_singly:
        for (const auto& blob : blobs) good = good && store.put(blob.key, blob.bytes).ok();
        break;
      case Way::fetch: {
        const auto all = store.get_all(keys);
        good = good && all.ok() && all->back().size == size;
        break;
      }
      case Way::fetch_singly:
        for (const auto& key : keys) good = good && store.get(key).ok();
        break;
    }
  };
  const bool writes = way == Way::publish || way == Way::publish_singly;
  const std::string test = writes || way == Way::known ? "SET" : "GET";
  if (!writes) good = good && store.put_all(blobs).ok();
  double best_base = 0;
  double best = std::numeric_limits<double>::infinity();
  for (auto _ : state) {
    best_base = std::max(best_base, baseline(server, test, chunk_bytes, loopback));
    double all = 0;
    for (int i = 0; i < fragments; ++i) {
      if (writes) {
        for (const auto& key : keys) good = good && store.erase(key).ok();
      }
      all += bench::seconds(work);
    }
    // as many bytes as a run of the baseline: a busy machine slows both alike
    best = std::min(best, all / fragments);
    state.SetIterationTime(all / fragments);
  }
  if (!good || best_base == 0) return state.SkipWithError("the server or redis-benchmark refused");
  state.SetBytesProcessed(state.iterations() * fragment_bytes);
  const double rate = static_cast<double>(fragment_bytes) / best;
  state.counters["ratio"] = rate / best_base;
  state.counters["best_GBps"] = rate * 1e-9;
  state.counters["baseline_GBps"] = best_base * 1e-9;
}

const bool registered = [] {
  if (!test::has_program("redis-server") || !test::has_program("redis-benchmark")) {
    std::fprintf(
        stderr,
        "skipped: state/redis (no redis-server or redis-benchmark; Debian: redis-server)\n");
    return false;
  }
  const auto add = [](const char* name, Way way, std::int64_t chunk_bytes, bool loopback) {
    const std::string full = bench::name({"state/redis/", name, loopback ? "/loopback" : "/socket",
                                          "/chunk_KiB:", std::to_string(chunk_bytes >> 10U)});
    benchmark::RegisterBenchmark(full.c_str(), redis, way, chunk_bytes, loopback)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(8);
  };
  for (const std::int64_t chunk :
       {std::int64_t{64} << 10U, std::int64_t{1} << 20U, std::int64_t{8} << 20U}) {
    add("publish", Way::publish, chunk, false);
    add("fetch", Way::fetch, chunk, false);
  }
  for (const bool loopback : {false, true}) {
    add("publish_singly", Way::publish_singly, std::int64_t{1} << 20U, loopback);
    add("fetch_singly", Way::fetch_singly, std::int64_t{1} << 20U, loopback);
  }
  add("publish", Way::publish, std::int64_t{1} << 20U, true);
  add("fetch", Way::fetch, std::int64_t{1} << 20U, true);
  add("publish_known", Way::known, std::int64_t{1} << 20U, false);
  return true;
}();

}  // namespace
