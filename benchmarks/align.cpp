// Edit scripts against a plain banded table, long ones against ten short ones, and neighbours
// against plain loops. What rapidfuzz takes for the same pair,
// benchmarks/peers/rapidfuzz_editops.py prints.

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include <kvmeld/policies/token_match.hpp>

#include "paired.hpp"

namespace {

using Ids = std::vector<kvmeld::TokenId>;

// SplitMix64, as in the peer's script: both align the same pair.
struct Random {
  std::uint64_t state;

  std::uint64_t below(std::uint64_t n) {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return (z ^ (z >> 31U)) % n;
  }
  kvmeld::TokenId token() { return static_cast<kvmeld::TokenId>(below(32000)); }
};

// `count` tokens, and a copy with so many substitutions, deletions and insertions; 100 in 100
// edits: another text.
std::pair<Ids, Ids> texts(std::int64_t count, std::int64_t edits) {
  Random random{1};
  Ids a(static_cast<std::size_t>(count));
  for (auto& token : a) token = random.token();
  Ids b = a;
  if (edits == count) {
    for (auto& token : b) token = random.token();
    return {a, b};
  }
  for (std::int64_t e = 0; e < edits; ++e) {
    const auto kind = random.below(3);
    const auto at = random.below(b.size());
    if (kind == 0) {
      b[at] = random.token();
    } else if (kind == 1) {
      b.erase(b.begin() + static_cast<std::ptrdiff_t>(at));
    } else {
      b.insert(b.begin() + static_cast<std::ptrdiff_t>(at), random.token());
    }
  }
  return {a, b};
}

// Two rows of a table around the diagonal, a byte a cell for the way back; the band doubles until
// the distance fits into it.
std::int64_t banded_table(const Ids& a, const Ids& b) {
  const auto n = std::ssize(a), m = std::ssize(b);
  for (std::int64_t band = 16;; band *= 2) {
    const std::int64_t width = 2 * band + 1;
    constexpr std::int32_t far = 1 << 29;
    std::vector<std::int32_t> was(static_cast<std::size_t>(width) + 2, far), now(was.size(), far);
    std::vector<std::uint8_t> moves(static_cast<std::size_t>((n + 1) * width), 0);
    for (std::int64_t i = 0; i <= n; ++i) {
      std::fill(now.begin(), now.end(), far);
      for (std::int64_t j = std::max<std::int64_t>(0, i - band); j <= std::min(m, i + band); ++j) {
        // on the diagonal above: the same place; above: one to the right
        const auto k = static_cast<std::size_t>(j - i + band + 1);
        std::int32_t best = i == 0 && j == 0 ? 0 : far;
        std::uint8_t move = 0;
        if (i > 0 && j > 0)
          best = was[k] +
                 (a[static_cast<std::size_t>(i - 1)] == b[static_cast<std::size_t>(j - 1)] ? 0 : 1);
        if (i > 0 && was[k + 1] + 1 < best) {
          best = was[k + 1] + 1;
          move = 1;
        }
        if (j > 0 && now[k - 1] + 1 < best) {
          best = now[k - 1] + 1;
          move = 2;
        }
        now[k] = best;
        moves[static_cast<std::size_t>(i * width) + k - 1] = move;
      }
      std::swap(was, now);
    }
    const std::int64_t end = m - n + band;
    if (end < 0 || end >= width || was[static_cast<std::size_t>(end + 1)] > band) continue;
    std::vector<std::pair<std::int64_t, std::int64_t>> kept;
    for (std::int64_t i = n, j = m; i > 0 || j > 0;) {
      const std::uint8_t move = i == 0 ? std::uint8_t{2}
                                : j == 0
                                    ? std::uint8_t{1}
                                    : moves[static_cast<std::size_t>(i * width + j - i + band)];
      if (move == 0 && a[static_cast<std::size_t>(i - 1)] == b[static_cast<std::size_t>(j - 1)])
        kept.emplace_back(i - 1, j - 1);
      i -= move != 2 ? 1 : 0;
      j -= move != 1 ? 1 : 0;
    }
    benchmark::DoNotOptimize(kept.data());
    return was[static_cast<std::size_t>(end + 1)];
  }
}

std::int64_t script(const Ids& a, const Ids& b) {
  const auto made = kvmeld::edit_script(a, b);
  if (!made) std::abort();
  benchmark::DoNotOptimize(made->runs.data());
  return made->distance;
}

void edit(benchmark::State& state, std::int64_t tokens, std::int64_t edits) {
  const auto pair = texts(tokens, edits);
  const Ids &a = pair.first, &b = pair.second;
  if (script(a, b) != banded_table(a, b)) std::abort();
  bench::paired_with_setup(
      state, tokens, [] {}, [&] { script(a, b); }, [&] { banded_table(a, b); });
}

// Linear cost would be ratio 1: as much for 100,000 tokens as for ten times 10,000. The longer pair
// is aligned by seeds.
void edit_long(benchmark::State& state, std::int64_t tokens, std::int64_t edits) {
  const auto pair = texts(tokens, edits), tenth = texts(tokens / 10, edits / 10);
  script(pair.first, pair.second);
  bench::paired_with_setup(
      state, tokens, [] {}, [&] { script(pair.first, pair.second); },
      [&] {
        for (int i = 0; i < 10; ++i) script(tenth.first, tenth.second);
      });
  state.counters["times_a_tenth"] =
      state.counters["best_us"].value * 10 / state.counters["baseline_us"].value;
}

void neighbours(benchmark::State& state, std::int64_t tokens, std::int32_t channels) {
  Random random{2};
  std::vector<float> a(static_cast<std::size_t>(tokens * channels)), b(a.size());
  for (auto* rows : {&a, &b}) {
    for (float& x : *rows) x = static_cast<float>(random.below(2000)) - 1000.0F;
  }
  const auto plain = [&] {
    const auto n = static_cast<std::size_t>(tokens), width = static_cast<std::size_t>(channels);
    std::vector<double> best_of_a(n, -2), best_of_b(n, -2);
    std::vector<std::size_t> at_a(n), at_b(n);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < n; ++j) {
        double ab = 0, aa = 0, bb = 0;
        for (std::size_t c = 0; c < width; ++c) {
          const double x = static_cast<double>(a[i * width + c]),
                       y = static_cast<double>(b[j * width + c]);
          ab += x * y;
          aa += x * x;
          bb += y * y;
        }
        const double cosine = ab / __builtin_sqrt(aa * bb);
        if (cosine > best_of_a[i]) {
          best_of_a[i] = cosine;
          at_a[i] = j;
        }
        if (cosine > best_of_b[j]) {
          best_of_b[j] = cosine;
          at_b[j] = i;
        }
      }
    }
    benchmark::DoNotOptimize(at_a.data());
    benchmark::DoNotOptimize(at_b.data());
  };
  bench::paired_with_setup(
      state, tokens * tokens, [] {},
      [&] {
        const auto partners = kvmeld::mutual_neighbours(a, b, channels, 0.5F);
        if (!partners) std::abort();
        benchmark::DoNotOptimize(partners->data());
      },
      plain);
}

// A fixed number of rounds: by the time of ours, the slow baselines would run for minutes.
template <class... Arguments>
void add(const char* name, int rounds, Arguments... arguments) {
  benchmark::RegisterBenchmark(name, arguments...)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(rounds);
}

const bool registered = [] {
  add("align/edit/tokens:1000/edits:10", 200, edit, std::int64_t{1000}, std::int64_t{10});
  add("align/edit/tokens:10000/edits:100", 30, edit, std::int64_t{10000}, std::int64_t{100});
  add("align/edit/tokens:10000/edits:1000", 5, edit, std::int64_t{10000}, std::int64_t{1000});
  add("align/edit/tokens:4000/edits:4000", 5, edit, std::int64_t{4000}, std::int64_t{4000});
  add("align/edit/tokens:100000/edits:1000", 100, edit_long, std::int64_t{100000},
      std::int64_t{1000});
  add("align/edit/tokens:1000000/edits:10000", 20, edit_long, std::int64_t{1000000},
      std::int64_t{10000});
  add("align/neighbours/tokens:500/channels:256", 10, neighbours, std::int64_t{500}, 256);
  return true;
}();

}  // namespace
