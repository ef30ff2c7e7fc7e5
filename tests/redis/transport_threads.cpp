// Messages over a real server's channels against the laws of Transport; also built under the thread
// sanitizer.
#include <kvmeld/stores/redis.hpp>

#include "support/redis_server.hpp"
#include "support/transport_laws.hpp"

using kvmeld::ErrorCode;
using kvmeld::stores::RedisTransport;

namespace {

RedisTransport join(const test::RedisServer& server, kvmeld::replica::MemberId member,
                    const std::string& name = "room") {
  auto transport = RedisTransport::open(
      {.server = server.client(), .scope = name, .self = member, .max_message_bytes = 1U << 20U});
  INFO(transport.error().message());
  REQUIRE(transport.ok());
  return *std::move(transport);
}

}  // namespace

TEST_CASE("members of a redis namespace keep the laws of a transport") {
  const test::RedisServer server;
  REQUIRE(server.running());
  RedisTransport a = join(server, 1), b = join(server, 2), c = join(server, ~std::uint64_t{0} - 1);
  test::transport_laws(a, b, c, 40);
}

TEST_CASE("other namespaces, and what is no message, stay outside") {
  const test::RedisServer server;
  REQUIRE(server.running());
  RedisTransport a = join(server, 1), stranger = join(server, 2, "other");
  REQUIRE(stranger.send(kvmeld::replica::everyone, test::message(1, 8)).ok());
  for (const std::string& noise :
       {std::string(), std::string("kvm1"), std::string("kvm1\0\0\0\0\0\0\0", 11),
        std::string("kvm2\0\0\0\0\0\0\0\0x", 13), "kvm1" + std::string((1U << 20U) + 9, 'x')}) {
    CHECK(server.tell({"PUBLISH", "{room}:news", noise}) == "1");
    CHECK(server.tell({"PUBLISH", "{room}:to:1", noise}) == "1");
  }
  for (int i = 0; i < 100 && a.counters().discarded < 10; ++i) CHECK(test::drain(a, 50) == 0);
  CHECK(a.counters().discarded == 10);
  CHECK(stranger.counters().unheard == 0);  // its own subscription hears it
  REQUIRE(stranger.send(3, test::message(1, 8)).ok());
  CHECK(stranger.counters().unheard == 1);
  CHECK(server.tell({"PUBLISH", "{room}:to:1", std::string("kvm1\2\0\0\0\0\0\0\0a\0b", 15)}) ==
        "1");
  const auto got = a.receive(1000);
  REQUIRE((got.ok() && got->has_value()));
  CHECK((*got)->from == 2);
  CHECK((*got)->bytes == test::Message{std::byte{'a'}, std::byte{0}, std::byte{'b'}});
}

TEST_CASE("a subscription comes back after the server's restart, and says that there was a gap") {
  test::RedisServer server;
  REQUIRE(server.running());
  RedisTransport a = join(server, 1), b = join(server, 2);
  CHECK(test::carries(a, b, 2, test::message(1, 100)));
  server.kill();
  CHECK(a.send(2, test::message(2, 100)).code() == ErrorCode::unavailable);
  const std::int64_t begin = kvmeld::stores::detail::monotonic_ms();
  const auto lost = b.receive(200);
  REQUIRE_FALSE(lost.ok());
  CHECK(lost.error().code() == ErrorCode::unavailable);
  CHECK(lost.error().message().find(server.socket()) != std::string::npos);
  CHECK(kvmeld::stores::detail::monotonic_ms() - begin >= 199);  // a loop around it does not spin
  CHECK(kvmeld::stores::detail::monotonic_ms() - begin < 2000);

  // Waiting through the restart.
  std::atomic<int> heard{0}, errors{0};
  std::thread listener([&] {
    for (int i = 0; i < 100 && heard == 0; ++i) {
      const auto got = b.receive(200);
      if (!got)
        ++errors;
      else if (got->has_value() && (*got)->bytes == test::message(3, 100))
        ++heard;
    }
  });
  REQUIRE(server.restart());
  for (int i = 0; i < 200 && heard == 0; ++i) {
    (void)a.send(kvmeld::replica::everyone, test::message(3, 100));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  listener.join();
  CHECK(heard == 1);
  CHECK(b.counters().reconnects == 1);
  test::drain(b, 50);
  CHECK(test::carries(a, b, 2, test::message(4, 100)));
  CHECK(test::carries(b, a, 1, test::message(5, 1U << 20U)));
}

TEST_CASE("a server that stands still is noticed by who sends and by who listens") {
  const test::RedisServer server;
  REQUIRE(server.running());
  kvmeld::stores::RedisOptions client = server.client();
  client.command_timeout_ms = 400;
  auto a = RedisTransport::open({.server = client, .self = 1, .silence_ms = 100});
  REQUIRE(a.ok());
  for (int i = 0; i < 5; ++i) CHECK(a->receive(100).ok());  // silence, but the server answers
  // Who has not looked for long gives it its time, too.
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  server.pause();
  for (int i = 0; i < 5; ++i) CHECK(a->receive(0).ok());
  server.go_on();
  CHECK(a->receive(100).ok());
  CHECK(a->counters().reconnects == 0);
  server.pause();
  const kvmeld::Status sent = a->send(2, test::message(1, 10));
  CHECK(sent.code() == ErrorCode::unavailable);
  CHECK(sent.message().find("400 ms") != std::string::npos);
  bool noticed = false;
  for (int i = 0; i < 20 && !noticed; ++i) noticed = !a->receive(100).ok();
  CHECK(noticed);
  server.go_on();
  bool back = false;
  for (int i = 0; i < 50 && !back; ++i)
    back = a->receive(50).ok() && a->send(2, test::message(1, 10)).ok();
  CHECK(back);
}

TEST_CASE("a transport says what is wrong with its options") {
  const test::RedisServer server;
  REQUIRE(server.running());
  const auto refused = [](const kvmeld::stores::RedisTransportOptions& options) {
    return RedisTransport::open(options).error();
  };
  CHECK(refused({.server = server.client(), .self = kvmeld::replica::everyone}).code() ==
        ErrorCode::invalid_argument);
  CHECK(refused({.server = server.client(), .scope = "a{b"}).code() == ErrorCode::invalid_argument);
  CHECK(refused({.server = server.client(), .max_message_bytes = std::size_t{1} << 40U})
            .message()
            .find("1099511627776") != std::string::npos);
  kvmeld::stores::RedisOptions nowhere = server.client();
  nowhere.unix_socket = server.socket() + "-none";
  CHECK(refused({.server = nowhere}).code() == ErrorCode::unavailable);
}
