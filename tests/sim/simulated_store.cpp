// The simulated disk keeps the contract that it simulates, also where the process ends in the
// middle of a write.
#include <kvmeld/testing/world.hpp>

#include "support/store_laws.hpp"

using kvmeld::testing::SimulatedDisk;
using kvmeld::testing::SimulatedStore;

TEST_CASE("laws of stores") {
  const auto disk = std::make_shared<SimulatedDisk>();
  SimulatedStore store(disk, 1), other(disk, 2);
  test::store_laws(store, other, 3, false);
}

TEST_CASE(
    "what was acknowledged stays, what failed is there or not, and a replacement cut short loses "
    "nothing") {
  int torn = 0, whole = 0, absent = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const auto disk = std::make_shared<SimulatedDisk>();
    SimulatedStore store(disk, seed);
    store.dies_in = 1 + seed % 12;
    std::set<std::uint64_t> acknowledged;
    for (std::uint64_t n = 0; n < 12; ++n) {
      const auto bytes = test::number_record(1, {n});
      if (store.add_record(bytes).ok()) {
        acknowledged.insert(n);
        continue;
      }
      CHECK(store.crashed());
      CHECK(n + 1 == 1 + seed % 12);
      CHECK_FALSE(store.records(0).ok());
      store.restart();
      const auto there = store.records(0)->records;
      if (there.size() == n)
        ++absent;
      else
        ++(there.back() == bytes ? whole : torn);
      const std::set<std::uint64_t> now = test::numbers_in(1, *store.records(0));
      CHECK(std::ranges::includes(now, acknowledged));
      break;
    }
    const auto before = test::numbers_in(1, *store.records(0));
    store.dies_in = 1;
    CHECK_FALSE(
        store.replace_records(store.records(0)->cursor, test::number_record(1, before)).ok());
    store.restart();
    CHECK(test::numbers_in(1, *store.records(0)) == before);
  }
  CHECK((torn > 20 && whole > 20 && absent > 20));
}

TEST_CASE("a disk that rots changes one bit, and remembers what was written") {
  const auto disk = std::make_shared<SimulatedDisk>();
  SimulatedStore store(disk, 1);
  kvmeld::testing::Random random(5);
  CHECK_FALSE(disk->rot(random));
  const auto bytes = test::blob_bytes(1, 50);
  REQUIRE(store.put(test::blob_key(1, 1), bytes).ok());
  REQUIRE(disk->rot(random));
  CHECK_FALSE(test::equal(*store.get(test::blob_key(1, 1)), bytes));
  CHECK(disk->blobs.begin()->second.rotten());
  CHECK(*disk->blobs.begin()->second.written == bytes);
  // A restored copy answers as another content: cursors of the one before start from the beginning.
  REQUIRE(store.add_record(bytes).ok());
  const SimulatedDisk copy = *disk;
  REQUIRE(store.add_record(test::blob_bytes(2, 9)).ok());
  const std::uint64_t cursor = store.records(0)->cursor;
  *disk = copy;
  ++disk->generation;
  CHECK(store.records(cursor)->records.size() == 1);
}
