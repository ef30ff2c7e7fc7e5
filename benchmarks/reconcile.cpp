// Anti-entropy: both sides' work together, and the bytes both ways, against what is promised. The
// same sets with pycrdt: benchmarks/peers/pycrdt_sets.py.

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/replica/reconcile.hpp>

#include "paired.hpp"

namespace {

using Items = std::vector<kvmeld::replica::ReconcileItem>;

enum class Differ { either_side, tags };

struct Pair {
  Items a, b;
  std::size_t differing = 0;
};

Pair pair(std::size_t ids, std::size_t differing_each, Differ how) {
  std::mt19937_64 random(ids + differing_each);
  const auto item = [&] {
    kvmeld::replica::ReconcileItem out{{}, random()};
    out.id.bytes[0] = 1;
    for (std::size_t i = 1; i < 17; ++i) out.id.bytes[i] = static_cast<std::uint8_t>(random());
    return out;
  };
  Pair out;
  for (std::size_t i = 0; i < ids; ++i) {
    out.a.push_back(item());
    out.b.push_back(i >= differing_each || how == Differ::tags ? out.a.back() : item());
    if (i < differing_each && how == Differ::tags) out.b.back().tag ^= 1;
  }
  for (Items* items : {&out.a, &out.b})
    std::sort(items->begin(), items->end(),
              [](const auto& x, const auto& y) { return x.id < y.id; });
  out.differing = how == Differ::tags ? differing_each : 2 * differing_each;
  return out;
}

void reconcile(benchmark::State& state, std::size_t ids, std::size_t differing_each, Differ how) {
  const Pair sets = pair(ids, differing_each, how);
  double best = std::numeric_limits<double>::infinity(), bytes = 0, messages = 0;
  std::uint64_t salt = 0;
  for (auto _ : state) {
    ++salt;
    std::size_t sent = 0, count = 0, found = 0;
    const double time = bench::seconds([&] {
      kvmeld::replica::Reconciliation a(sets.a), b(sets.b);
      auto first = a.start(salt);
      if (!first) std::abort();
      std::vector<std::byte> message = *std::move(first);
      for (bool to_b = true;; to_b = !to_b) {
        sent += message.size();
        ++count;
        auto reply = (to_b ? b : a).receive(message);
        if (!reply) std::abort();
        if (!reply->message) break;
        message = *std::move(reply->message);
      }
      found =
          a.result().mine_only.size() + b.result().mine_only.size() + b.result().different.size();
    });
    if (found != sets.differing) return state.SkipWithError("what differs was not found");
    state.SetIterationTime(time);
    best = std::min(best, time);
    bytes = std::max(bytes, static_cast<double>(sent));
    messages = std::max(messages, static_cast<double>(count));
  }
  // Bytes and messages are the largest over the salts, the time is the best.
  const double differing = static_cast<double>(sets.differing);
  state.counters["bytes"] = bytes;
  state.counters["bytes_per_difference"] = bytes / differing;
  state.counters["rounds"] = messages;
  state.counters["best_ms"] = best * 1e3;
  state.counters["ratio"] = (1.3 * 32.0 * differing + 256.0) / bytes;  // promised ÷ needed
}

const bool registered = [] {
  using bench::add;
  using bench::name;
  const auto size = [](std::size_t ids, std::size_t each) {
    return name({"/ids:", std::to_string(ids), "/differ_each:", std::to_string(each)});
  };
  for (const std::size_t ids : {10U, 100U, 1000U, 10000U, 100000U}) {
    std::vector<std::size_t> differing{1, 10, 1000, ids / 4, ids / 2, ids};
    std::sort(differing.begin(), differing.end());
    differing.erase(std::unique(differing.begin(), differing.end()), differing.end());
    for (const std::size_t each : differing) {
      if (each > ids) continue;
      add(name({"state/reconcile/promised_bytes", size(ids, each)}), reconcile, ids, each,
          Differ::either_side);
    }
    add(name({"state/reconcile/promised_bytes/tags", size(ids, ids / 10)}), reconcile, ids,
        ids / 10, Differ::tags);
  }
  for (const std::size_t each : {2000U, 4000U}) {  // as benchmarks/peers/pycrdt_sets.py
    add(name({"state/reconcile/promised_bytes", size(6000, each)}), reconcile, std::size_t{6000},
        each, Differ::either_side);
  }
  return true;
}();

}  // namespace
