// The in-process store against the laws of BlobStore; also built under the thread sanitizer.
#include <kvmeld/stores/memory.hpp>

#include "support/store_laws.hpp"

using kvmeld::ErrorCode;

TEST_CASE("a memory store keeps the laws, through one handle and through two") {
  kvmeld::stores::MemoryStore store;
  test::store_laws(store, store, 1);
  kvmeld::stores::MemoryStore other = store;
  test::store_laws(store, other, 2);
  CHECK(store.blob_count() == 0);
}

TEST_CASE("a memory store refuses what is beyond its capacity, and counts") {
  kvmeld::stores::MemoryStore store(100'000);
  test::full_laws(store, 3, 9'000, 1'000'000);
  kvmeld::stores::MemoryStore exact(10);
  CHECK(exact.put(test::blob_key(4, 0), test::blob_bytes(0, 10)).ok());
  CHECK(exact.used_bytes() == 10);
  CHECK(exact.put(test::blob_key(4, 1), {}).ok());
  CHECK(exact.add_record(test::blob_bytes(0, 1)).code() == ErrorCode::store_full);
  CHECK(exact.erase(test::blob_key(4, 0)).ok());
  CHECK(exact.used_bytes() == 0);
}

TEST_CASE("a memory store names a cursor that it never gave, and reads from the start for it") {
  kvmeld::stores::MemoryStore store;
  REQUIRE(store.add_record(test::blob_bytes(1, 8)).ok());
  const auto batch = store.records(~std::uint64_t{0});
  REQUIRE(batch.ok());
  CHECK(batch->records.size() == 1);
  const kvmeld::Status refused = store.replace_records(99, test::blob_bytes(2, 8));
  CHECK(refused.code() == ErrorCode::invalid_argument);
  CHECK(refused.message().find("99") != std::string::npos);
  CHECK(store.records(0)->records == batch->records);
}
