// The code of docs/convergence.md, word for word: a fusion policy of one's own under the
// simulation.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/testing.hpp>

#include "support/catch.hpp"

// example-begin: own-policy
/// Keeps, channel by channel, the value of the largest magnitude; equal magnitudes keep the first
/// fragment's.
struct Strongest {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = false;
  static constexpr bool keeps_single = true;

  KVMELD_HD static float magnitude(float x) { return x < 0 ? -x : x; }
  KVMELD_HD float init() const { return 0; }
  KVMELD_HD float absorb(float best, float value, float /*weight*/) const {
    return magnitude(value) > magnitude(best) ? value : best;
  }
  KVMELD_HD float join(float earlier, float later) const { return absorb(earlier, later, 1); }
  KVMELD_HD float finish(float best, float /*total_weight*/, int /*count*/) const { return best; }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("mine.Strongest"); }
};

TEST_CASE("members that fuse by Strongest end with the same bytes") {
  const auto mine = kvmeld::merger(kvmeld::ById{}, kvmeld::Aligner{kvmeld::TokenMatch{}},
                                   kvmeld::Fuser{Strongest{}});
  const auto report = kvmeld::testing::check_convergence(mine, {.seeds = 50});
  if (!report.ok()) std::printf("%s\n%s\n", report.failure.c_str(), report.replay().c_str());
  CHECK(report.ok());
}
// example-end

TEST_CASE("fragments and faults of one's own") {
  // example-begin: own-faults
  kvmeld::testing::CheckOptions options;
  options.seeds = 20;
  options.simulation.most_replicas = 3;
  options.simulation.shared_store = true;  // as over Redis
  options.simulation.faults = kvmeld::testing::Faults::none();
  options.simulation.faults.drop = 0.3;  // a bad network, and nothing else
  options.simulation.faults.partition = 1;
  // example-end
  const auto corpus = kvmeld::testing::make_corpus(kvmeld::testing::small_geometry(), 6, 42);
  REQUIRE(corpus.ok());
  options.simulation.corpus = *corpus;
  const auto report =
      kvmeld::testing::check_convergence(options, kvmeld::merger(), kvmeld::merger(kvmeld::ById{}));
  INFO(report.failure);
  CHECK(report.ok());
  if (std::getenv("KVMELD_SIM_SEED") == nullptr)
    CHECK(report.faults[kvmeld::testing::Fault::drop] > 0);
  CHECK(report.faults[kvmeld::testing::Fault::crash] == 0);
}

TEST_CASE("docs/convergence.md shows this code") {
  const auto lines_of = [](const char* path) {
    std::ifstream file(path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
      line.erase(0, (std::min)(line.find_first_not_of(' '), line.size()));
      lines.push_back(line);
    }
    return lines;
  };
  const std::vector<std::string> page = lines_of("docs/convergence.md"),
                                 source = lines_of("tests/sim/own_policy.cpp");
  INFO("tests run in the project's root");
  REQUIRE_FALSE(page.empty());
  REQUIRE_FALSE(source.empty());
  std::ptrdiff_t tested = 0;
  for (auto line = source.begin(); line != source.end(); ++line) {
    if (line->rfind("// example-begin: ", 0) != 0) continue;
    ++tested;
    const auto end = std::find(line, source.end(), "// example-end");
    INFO(*line);
    CHECK(std::search(page.begin(), page.end(), line + 1, end) != page.end());
  }
  CHECK(std::count(page.begin(), page.end(), "```cpp") == tested);
}
