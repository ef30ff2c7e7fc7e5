// The Redis store against the laws of BlobStore, on a real server; also built under the thread
// sanitizer.
#include <kvmeld/stores/redis.hpp>

#include "support/redis_server.hpp"
#include "support/store_laws.hpp"

namespace {

kvmeld::Result<kvmeld::stores::RedisStore> open(const test::RedisServer& server,
                                                const std::string& name = "laws") {
  return kvmeld::stores::RedisStore::open({.server = server.client(), .scope = name});
}

}  // namespace

TEST_CASE(
    "a redis store keeps the laws, through one handle and through two, by socket and by port") {
  const test::RedisServer server({}, true);
  REQUIRE(server.running());
  auto store = open(server);
  REQUIRE(store.ok());
  test::store_laws(*store, *store, 1);
  auto other =
      kvmeld::stores::RedisStore::open({.server = server.client_by_port(), .scope = "laws"});
  REQUIRE(other.ok());
  CHECK(store->generation() == other->generation());
  test::store_laws(*store, *other, 2);
  CHECK(server.tell({"DBSIZE"}) == "3");  // records, their base, the content's name: blobs are gone
}

TEST_CASE("a redis store keeps the laws of a full one") {
  const test::RedisServer server({"--maxmemory", "16200000"});
  REQUIRE(server.running());
  auto store = open(server);
  REQUIRE(store.ok());
  // Far above what the server's own buffers grow by meanwhile, which it counts too.
  test::full_laws(*store, 3, 1'000'000, 20'000'000);
}
