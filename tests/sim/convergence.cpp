// Replicas end with one whole set, whatever the network, the disks, the clocks and a lying peer did; and a broken join is found out.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/testing.hpp>

#include "support/catch.hpp"

namespace {

using kvmeld::testing::CheckOptions;
using kvmeld::testing::Fault;
using kvmeld::testing::Report;

bool is_long() {
  const char* const value = std::getenv("KVMELD_TEST_LONG");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace

TEST_CASE("every seed ends in one state, with nothing lost") {
  const auto merger = kvmeld::merger(kvmeld::ByProvenance{}, kvmeld::Aligner{kvmeld::TokenMatch{.mode = kvmeld::MatchMode::common_prefix}},
                                     kvmeld::Fuser{kvmeld::Max{}});
  CheckOptions options;
  options.seeds = is_long() ? 2'000 : 300;
  const Report report = kvmeld::testing::check_convergence(merger, options);
  std::printf("%s", report.table().c_str());
  INFO(report.failure);
  INFO(report.replay());
  REQUIRE(report.ok());
}
