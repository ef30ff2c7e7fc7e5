// The file store against the laws of BlobStore and PayloadStore, on disk and in shared memory; also
// under the thread sanitizer.
#include <kvmeld/stores/file.hpp>

#include <unistd.h>

#include "support/store_laws.hpp"
#include "support/temp_folder.hpp"

using kvmeld::ErrorCode;
using kvmeld::stores::Durability;
using kvmeld::stores::FileStore;

TEST_CASE(
    "a file store keeps the laws, through copies of a handle and through handles of their own") {
  for (const Durability durability :
       {Durability::file_and_folder, Durability::file, Durability::none}) {
    const test::TempFolder folder;
    const kvmeld::stores::FileStoreOptions options{.durability = durability};
    auto store = FileStore::open(folder / "store", options);
    REQUIRE(store.ok());
    FileStore copy = *store;
    auto other = FileStore::open(folder / "store", options);
    REQUIRE(other.ok());
    test::store_laws(*store, *store, 1, durability == Durability::none);
    test::store_laws(*store, copy, 2, durability == Durability::none);
    test::store_laws(*store, *other, 3);
    test::payload_laws(*store, *other, 4);
    CHECK(store->damage().places == 0);
    CHECK(other->damage().places == 0);
    auto later = FileStore::open(folder / "store");
    REQUIRE(later.ok());
    CHECK(later->records(0)->records == store->records(0)->records);
  }
}

TEST_CASE("a shared memory store keeps the laws under a name") {
  if (::access("/dev/shm", W_OK) != 0) return test::skip("no /dev/shm that can be written");
  const std::string name = "test-" + std::to_string(::getpid()) + "_a.b";
  auto store = kvmeld::stores::shared_memory_store(name);
  REQUIRE(store.ok());
  auto other = kvmeld::stores::shared_memory_store(name);
  REQUIRE(other.ok());
  test::store_laws(*store, *other, 1);
  test::payload_laws(*store, *other, 2);
  REQUIRE(store->put(test::blob_key(1, 1), test::blob_bytes(1, 100'000)).ok());
  const auto held = other->get(test::blob_key(1, 1));
  REQUIRE(held.ok());

  REQUIRE(kvmeld::stores::remove_shared_memory_store(name).ok());
  CHECK(test::equal(*held, test::blob_bytes(1, 100'000)));  // mapped: stays
  CHECK(::access(("/dev/shm/kvmeld." + name).c_str(), F_OK) != 0);
  // A store that has vanished says so, rather than that nothing is there.
  CHECK(store->get(test::blob_key(1, 1)).error().code() == ErrorCode::unavailable);
  CHECK(store->contains(test::blob_key(1, 1)).error().code() == ErrorCode::unavailable);
  CHECK(store->put(test::blob_key(1, 2), {}).error().code() == ErrorCode::unavailable);
  CHECK(store->add_record({}).code() == ErrorCode::unavailable);
  CHECK(store->records(0).error().code() == ErrorCode::unavailable);
  CHECK(kvmeld::stores::remove_shared_memory_store(name).ok());
}

TEST_CASE("names of shared memory stores are names, not paths") {
  for (const std::string& name :
       {std::string(), std::string("a/b"), std::string("../x"), std::string("a b"),
        std::string("a\0b", 3), std::string("caf\xC3\xA9"), std::string(201, 'a')}) {
    const auto store = kvmeld::stores::shared_memory_store(name);
    REQUIRE_FALSE(store.ok());
    CHECK(store.error().code() == ErrorCode::invalid_argument);
    CHECK(kvmeld::stores::remove_shared_memory_store(name).code() == ErrorCode::invalid_argument);
  }
}
