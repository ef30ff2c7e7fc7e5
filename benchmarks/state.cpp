// The replicated set: joins against std::set_union over the same ids, insertion, deltas, copies.

#include <algorithm>
#include <string>
#include <vector>

#include <kvmeld/fragment_set.hpp>
#include <kvmeld/replica/wire.hpp>

#include "paired.hpp"

namespace {

using kvmeld::FragmentId;
using kvmeld::FragmentSet;

FragmentId id_of(std::uint64_t n) {
  FragmentId id;
  id.bytes[0] = kvmeld::Xxh3_128::tag;
  for (std::size_t i = 0; i < 2; ++i) {
    n = (n ^ (n >> 31)) * 0x9E3779B97F4A7C15ULL + 0x1234567ULL;
    n ^= n >> 29;
    std::memcpy(id.bytes.data() + 1 + 8 * i, &n, 8);
  }
  return id;
}

// A set of ids [first, last), whose fragments are here.
FragmentSet numbered(std::uint64_t first, std::uint64_t last, std::uint64_t agent) {
  FragmentSet set;
  for (std::uint64_t n = first; n < last; ++n) {
    auto body = std::make_shared<kvmeld::Fragment::Body>();
    body->id = id_of(n);
    if (!set.insert(kvmeld::Fragment(std::move(body)), {agent, n})) std::abort();
  }
  return set;
}

void join_sets(benchmark::State& state, std::uint64_t ids, std::uint64_t differing, bool in_place) {
  const FragmentSet both = numbered(0, ids - differing / 2, 0);
  FragmentSet a = both, b = both;
  if (!a.join(numbered(ids, ids + differing / 2, 1)) ||
      !b.join(numbered(2 * ids, 2 * ids + differing / 2, 2)))
    return state.SkipWithError("join");
  // A replica owns its set: nobody shares its leaves. Prepared anew for each join, outside of the
  // time.
  const auto owned = [&] {
    FragmentSet set;
    for (const auto& e : a.entries()) {
      if (!set.insert(e.fragment, e.metadata.marks[0].dot)) std::abort();
    }
    return set;
  };
  std::vector<FragmentId> ids_a, ids_b, ids_out;
  for (const auto& e : a.entries()) ids_a.push_back(e.id);
  for (const auto& e : b.entries()) ids_b.push_back(e.id);
  FragmentSet mine = in_place ? owned() : a;
  const std::size_t want = a.size() + differing / 2;
  bench::paired_with_setup(
      state, static_cast<std::int64_t>(ids),
      [&] {
        if (in_place)
          mine = owned();
        else
          mine = FragmentSet();
      },
      [&] {
        if (in_place) {
          if (!mine.join(b)) std::abort();
        } else {
          mine = *join(a, b);
        }
        if (mine.size() != want) std::abort();
      },
      [&] {
        ids_out.clear();
        ids_out.reserve(want);
        std::set_union(ids_a.begin(), ids_a.end(), ids_b.begin(), ids_b.end(),
                       std::back_inserter(ids_out));
        benchmark::DoNotOptimize(ids_out.data());
      });
}

void insert_ids(benchmark::State& state, std::uint64_t ids) {
  std::vector<kvmeld::Fragment> fragments;
  for (std::uint64_t n = 0; n < ids; ++n) {
    auto body = std::make_shared<kvmeld::Fragment::Body>();
    body->id = id_of(n);
    fragments.emplace_back(std::move(body));
  }
  for (auto _ : state) {
    FragmentSet set;
    for (std::uint64_t n = 0; n < ids; ++n) {
      if (!set.insert(fragments[n], {1, n})) std::abort();
    }
    benchmark::DoNotOptimize(set.digest());
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(ids));
}

// What one replica lacks of another, in bytes and back: 6,000 ids each, of which 4,000 differ.
void delta_sync(benchmark::State& state) {
  const FragmentSet both = numbered(0, 4000, 0);
  FragmentSet a = both, b = both;
  if (!a.join(numbered(10'000, 12'000, 1)) || !b.join(numbered(20'000, 22'000, 2)))
    return state.SkipWithError("join");
  std::size_t bytes = 0;
  for (auto _ : state) {
    state.PauseTiming();
    FragmentSet x = a, y = b;
    state.ResumeTiming();
    kvmeld::extend::ByteWriter from_x, from_y;
    kvmeld::replica::write_context(from_x, x.context());
    kvmeld::replica::write_context(from_y, y.context());
    kvmeld::extend::ByteReader at_y(from_x.written()), at_x(from_y.written());
    const auto to_x =
        kvmeld::replica::encode_set(y.delta_since(kvmeld::replica::read_context(at_y)));
    const auto to_y =
        kvmeld::replica::encode_set(x.delta_since(kvmeld::replica::read_context(at_x)));
    bytes = from_x.size() + from_y.size() + to_x.size() + to_y.size();
    if (!x.join(*kvmeld::replica::decode_set(to_x)) ||
        !y.join(*kvmeld::replica::decode_set(to_y)) || x.digest() != y.digest())
      std::abort();
  }
  state.counters["bytes"] = static_cast<double>(bytes);
  state.counters["bytes_per_difference"] = static_cast<double>(bytes) / 4000.0;
}

const bool registered = [] {
  for (const bool in_place : {true, false}) {
    for (const auto& [ids, differing] : {std::pair<std::uint64_t, std::uint64_t>{1000, 10},
                                         {10'000, 100},
                                         {100'000, 1000},
                                         {100'000, 100'000}}) {
      const std::string name = std::string(in_place ? "state/join/in_place/" : "state/join/copy/") +
                               std::to_string(ids) + "/" + std::to_string(differing);
      bench::add(name, [ids = ids, differing = differing, in_place](benchmark::State& s) {
        join_sets(s, ids, differing, in_place);
      });
    }
  }
  for (const std::uint64_t ids : {1000U, 100'000U}) {
    benchmark::RegisterBenchmark(("state/insert/" + std::to_string(ids)).c_str(),
                                 [=](benchmark::State& s) { insert_ids(s, ids); })
        ->Unit(benchmark::kMicrosecond);
  }
  benchmark::RegisterBenchmark("state/delta/6000/4000", delta_sync)->Unit(benchmark::kMicrosecond);
  return true;
}();

}  // namespace
