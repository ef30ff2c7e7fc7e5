// Replicas end with one whole set, whatever the network, the disks, the clocks and a lying peer
// did.
//
//   KVMELD_SIM_SEED=17 build/tests/tests/sim_convergence     runs one seed and writes every event
//   to standard error
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/testing.hpp>

#include "support/catch.hpp"

namespace {

using kvmeld::testing::CheckOptions;
using kvmeld::testing::Fault;
using kvmeld::testing::Faults;
using kvmeld::testing::Report;
using kvmeld::testing::Simulation;

bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

TEST_CASE("every seed ends in one state with nothing lost, and every kind of fault did happen") {
  const auto merger =
      kvmeld::merger(kvmeld::ByDot{},
                     kvmeld::Aligner{kvmeld::TokenMatch{.mode = kvmeld::MatchMode::common_prefix}},
                     kvmeld::Fuser{kvmeld::Max{}});
  CheckOptions options;
  options.seeds = is_set("KVMELD_TEST_LONG") ? 5'000 : 300;
  if (const char* const seeds = std::getenv("KVMELD_SIM_SEEDS"); seeds != nullptr)
    options.seeds = kvmeld::extend::parse_decimal<std::uint64_t>(seeds).value_or(options.seeds);
  const Report report = kvmeld::testing::check_convergence(merger, options);
  std::printf("%s", report.table().c_str());
  INFO(report.failure);
  INFO(report.replay());
  REQUIRE(report.ok());
  if (is_set("KVMELD_SIM_SEED")) return;
  for (std::size_t kind = 0; kind < kvmeld::testing::fault_kinds; ++kind) {
    INFO(to_string(static_cast<Fault>(kind)));
    CHECK(report.faults.of[kind] > 0);
  }
  CHECK(report.cut_off > 0);
  CHECK(report.refused > 0);
  CHECK(report.unvouched > 0);
  CHECK(report.reused > 0);
  CHECK(report.strikes > 0);
  CHECK(report.corrupt_records > 0);
  CHECK(report.compacted > 0);
  CHECK(report.refreshed > 0);
  CHECK(report.other_mergers > 0);
  // lost disks are the exception, or survival would say little
  CHECK(report.lost_operations * 20 < report.inserted);
}

TEST_CASE("a seed determines a run, and a fault that is switched off does not happen") {
  const Report once = Simulation<>(7).run();
  const Report again = Simulation<>(7).run();
  CHECK(once.ok());
  CHECK(once.fingerprint == again.fingerprint);
  CHECK(once.table() == again.table());
  CHECK(once.fingerprint != Simulation<>(8).run().fingerprint);
  for (const bool shared : {false, true}) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      const Report calm =
          Simulation<>(seed, {.shared_store = shared, .faults = Faults::none()}).run();
      INFO(calm.failure);
      CHECK(calm.ok());
      for (std::size_t kind = 0; kind < kvmeld::testing::fault_kinds; ++kind)
        CHECK(calm.faults.of[kind] == 0);
      CHECK(calm.unconfirmed == 0);
      CHECK(calm.refused + calm.strikes + calm.lost_operations + calm.lost_payloads == 0);
    }
  }
}
