// Formulas: reading them and bringing them into normal form, with the free variables renamed and
// without, for the kinds of formula that cost most. There is no peer; `steps` says how many claims
// came of them.

#include <string>
#include <utility>
#include <vector>

#include <kvmeld/formula/formula.hpp>

#include "paired.hpp"

namespace {

constexpr std::size_t most_bytes = 4096;

/// A piece again and again, up to the default bound on a formula's length.
std::string repeated(const std::string& piece, const std::string& between) {
  std::string out = piece;
  while (out.size() + between.size() + piece.size() <= most_bytes) out += between + piece;
  return out;
}
std::string letter(std::size_t n) { return std::string(1, static_cast<char>('a' + n)); }

/// ab + bc + … + xa: every variable has two neighbours and no two can be exchanged.
std::string ring(std::size_t variables) {
  std::string out;
  for (std::size_t v = 0; v < variables; ++v) {
    out += (v == 0 ? "" : "+") + letter(v) + letter((v + 1) % variables);
  }
  return out;
}
/// ab + cd + …: pairs that can be exchanged with each other.
std::string pairs(std::size_t count) {
  std::string out;
  for (std::size_t p = 0; p < count; ++p)
    out += (p == 0 ? "" : "+") + letter(2 * p) + letter(2 * p + 1);
  return out;
}
/// a + b + c + …: any two can be exchanged.
std::string sum(std::size_t variables) {
  std::string out;
  for (std::size_t v = 0; v < variables; ++v) out += (v == 0 ? "" : "+") + letter(v);
  return out;
}

void read(benchmark::State& state, const std::string& text, bool rename) {
  kvmeld::formula::FormulaOptions options;
  options.rename_free = rename;
  std::size_t steps = 0;
  bool taken = false;
  for (auto _ : state) {
    const auto formula = kvmeld::formula::parse_formula(text, options);
    benchmark::DoNotOptimize(formula);
    taken = formula.ok();
    steps = taken ? formula->steps.size() : 0;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(text.size()));
  state.counters["steps"] = static_cast<double>(steps);
  state.counters["refused"] = taken ? 0 : 1;  // by max_renaming_steps
}

const bool registered = [] {
  const std::vector<std::pair<const char*, std::string>> texts{
      {"one", repeated("a_1^2 + \\frac{b}{2} x", " + ")},
      {"list", repeated("a", ",")},
      {"chain", repeated("a", "<")},
      {"sum_of_24", sum(24)},
      {"sums_of_24", repeated(sum(24), "+")},
      {"ring_of_24", ring(24)},
      {"12_pairs", pairs(12)},
      {"rings_of_24", repeated(ring(24), "+")}};
  for (const auto& [name, text] : texts) {
    for (const bool rename : {false, true}) {
      const std::string full = std::string("formula/") + name + (rename ? "/rename_free" : "");
      benchmark::RegisterBenchmark(full.c_str(), read, text, rename)->Unit(benchmark::kMicrosecond);
    }
  }
  return true;
}();

}  // namespace
