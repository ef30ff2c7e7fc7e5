// Messages within one process against the laws of Transport; also built under the thread sanitizer.
#include <kvmeld/stores/memory.hpp>

#include "support/transport_laws.hpp"

using kvmeld::ErrorCode;

TEST_CASE("members of a hub keep the laws of a transport") {
  std::optional<kvmeld::stores::MemoryTransport> a, b, c;
  {
    kvmeld::stores::MemoryHub hub(1U << 20U);  // members outlive it
    a.emplace(*hub.join(1));
    b.emplace(*hub.join(2));
    c.emplace(*hub.join(~std::uint64_t{0} - 1));
  }
  test::transport_laws(*a, *b, *c);
}

TEST_CASE("a hub takes each member once, and again when it has left") {
  kvmeld::stores::MemoryHub hub;
  auto a = hub.join(7);
  REQUIRE(a.ok());
  CHECK(hub.join(7).error().code() == ErrorCode::invalid_argument);
  CHECK(hub.join(kvmeld::replica::everyone).error().code() == ErrorCode::invalid_argument);
  auto b = hub.join(8);
  REQUIRE(b.ok());
  {
    const kvmeld::stores::MemoryTransport gone = *std::move(a);
    CHECK(gone.self() == 7);
    REQUIRE(b->send(7, test::message(1, 10)).ok());
  }
  a = hub.join(7);
  REQUIRE(a.ok());
  CHECK(test::drain(*a, 0) == 0);  // what was sent to its former life
  CHECK(test::carries(*b, *a, 7, test::message(2, 10)));
}

TEST_CASE("a member that never looks loses what is beyond its inbox, and costs no more") {
  kvmeld::stores::MemoryHub hub(1000, 2500);
  auto a = hub.join(1);
  auto b = hub.join(2);
  for (int i = 0; i < 5; ++i)
    REQUIRE(a->send(kvmeld::replica::everyone, test::message(1, 1000)).ok());
  CHECK(hub.lost() == 3);
  CHECK(test::drain(*b, 0) == 2);
  CHECK(test::carries(*a, *b, 2, test::message(2, 1000)));
}
