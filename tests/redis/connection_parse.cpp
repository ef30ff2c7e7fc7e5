// The connection itself: any bytes both ways, many commands at once, backoff, and servers that talk
// nonsense; also built under the address and undefined-behaviour sanitizers.
#include <kvmeld/stores/redis.hpp>

#include <dlfcn.h>

#include <random>
#include <thread>

#include "support/catch.hpp"
#include "support/redis_server.hpp"

using kvmeld::ErrorCode;
using kvmeld::stores::RedisArgument;
using kvmeld::stores::RedisConnection;

namespace {

/// Ends every second call of each kind, of this thread, with EINTR.
struct Interrupt {
  bool on = false;
  int sent = 0, received = 0, waited = 0;  // calls, those that were ended among them

  bool now(int& calls) {
    if (!on || calls++ % 2 != 0) return false;
    errno = EINTR;
    return true;
  }
};
thread_local Interrupt interrupt;

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// The library's calls come here, since a program's own functions come before the system's.
extern "C" {

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (interrupt.now(interrupt.sent)) return -1;
  static const auto call = real<ssize_t (*)(int, const msghdr*, int)>("sendmsg");
  return call(fd, message, flags);
}
ssize_t recv(int fd, void* bytes, size_t count, int flags) {
  if (interrupt.now(interrupt.received)) return -1;
  static const auto call = real<ssize_t (*)(int, void*, size_t, int)>("recv");
  return call(fd, bytes, count, flags);
}
int poll(pollfd* all, nfds_t count, int timeout) {
  if (interrupt.now(interrupt.waited)) return -1;
  static const auto call = real<int (*)(pollfd*, nfds_t, int)>("poll");
  return call(all, count, timeout);
}

}  // extern "C"

namespace {

std::string random_text(std::mt19937_64& random, std::size_t size) {
  std::string text(size, '\0');
  for (char& c : text) c = static_cast<char>(random() % 5 == 0 ? 0 : random());
  return text;
}

/// Accepts connections on a loopback port of its own, answers what it is asked with the next bytes
/// of a list, and hangs up.
class Stranger {
 public:
  explicit Stranger(std::vector<std::string> answers, int byte_each_ms = 0)
      : drip_ms(byte_each_ms),
        answers_(std::move(answers)),
        listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener_, 8) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      std::abort();
    }
    options.host = "127.0.0.1";
    options.port = ntohs(address.sin_port);
    options.command_timeout_ms = 100;
    thread_ = std::thread([this] {
      for (int client; (client = accept(listener_, nullptr, nullptr)) >= 0; close(client)) {
        std::vector<char> asked(4096);
        for (const std::string& answer : answers_) {
          (void)recv(client, asked.data(), asked.size(), 0);
          const std::size_t step = drip_ms == 0 ? answer.size() : 1;
          for (std::size_t at = 0; at < answer.size(); at += step) {
            if (::send(client, answer.data() + at, step, MSG_NOSIGNAL) < 0) break;
            if (drip_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(drip_ms));
          }
        }
        (void)::shutdown(client, SHUT_WR);
        while (recv(client, asked.data(), asked.size(), 0) > 0) {
        }
      }
    });
  }
  ~Stranger() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  kvmeld::stores::RedisOptions options;
  const int drip_ms;  // between two bytes of an answer

 private:
  std::vector<std::string> answers_;
  int listener_;
  std::thread thread_;
};

}  // namespace

TEST_CASE("keys and values are any bytes, of any length") {
  const test::RedisServer server({}, true);
  REQUIRE(server.running());
  std::mt19937_64 random(1);
  for (const kvmeld::stores::RedisOptions& options : {server.client(), server.client_by_port()}) {
    RedisConnection connection(options);
    for (const std::size_t size : {0U, 1U, 4095U, 4096U, 4097U, 300'000U, 8U << 20U}) {
      const std::string key = random_text(random, 1 + random() % 40);
      const std::string value = random_text(random, size);
      const auto set = connection.command({"SET", key, value});
      REQUIRE(set.ok());
      CHECK(set->text() == "OK");
      const auto got = connection.command({"GET", key});
      REQUIRE(got.ok());
      CHECK((got->text() == value));
      CHECK(connection.command({"STRLEN", key})->number() == size);
      CHECK(connection.command({"EXISTS", key.substr(1)})->number() == 0);
    }
    CHECK(connection.command({"GET", "none"})->is_nil());
    const auto wrong = connection.command({"GET"});
    REQUIRE_FALSE(wrong.ok());
    CHECK(wrong.error().message().find("wrong number of arguments") != std::string::npos);
    CHECK(connection.connected());
  }
}

TEST_CASE("a call that a signal ends is made again, whichever it is") {
  const test::RedisServer server;
  REQUIRE(server.running());
  std::mt19937_64 random(3);
  const std::string value = random_text(random, 3U << 20U);
  RedisConnection connection(server.client());
  interrupt = {.on = true};
  const auto set = connection.command({"SET", "key", value});
  const auto got = connection.command({"GET", "key"});
  const Interrupt seen = std::exchange(interrupt, {});
  INFO(set.status().message());
  REQUIRE(set.ok());
  REQUIRE(got.ok());
  CHECK((got->text() == value));
  CHECK(connection.traffic().connects == 1);
  CHECK(seen.sent > 2);
  CHECK(seen.received > 2);
  CHECK(seen.waited > 2);
}

TEST_CASE(
    "many commands travel at once, large ones both ways, and bytes are counted as the server "
    "counts them") {
  const test::RedisServer server;
  REQUIRE(server.running());
  RedisConnection connection(server.client());
  REQUIRE(connection.command({"CONFIG", "RESETSTAT"}).ok());
  const kvmeld::stores::RedisTraffic start = connection.traffic();
  std::mt19937_64 random(2);
  std::vector<std::string> values;
  for (int i = 0; i < 24; ++i)
    values.push_back(
        random_text(random, i % 2 == 0 ? 1U << 20U : static_cast<std::size_t>(i) * 300));
  // Answers of 12 MiB come while 12 MiB are being sent: neither side may wait for the other.
  for (std::size_t i = 0; i < values.size(); ++i) {
    connection.queue({"SET", std::to_string(i), values[i]});
    connection.queue({"GET", std::to_string(i)});
    if (i == 7) connection.queue({"NONSENSE"});
  }
  const auto replies = connection.exchange();
  REQUIRE(replies.ok());
  REQUIRE(replies->size() == 49);
  CHECK_FALSE(connection.status_of((*replies)[16]).ok());  // one command's error is its own
  for (std::size_t i = 0, at = 1; i < values.size(); ++i, at += 2) {
    if (at == 17) ++at;
    CHECK(((*replies)[at].text() == values[i]));
  }
  const kvmeld::stores::RedisTraffic before = connection.traffic();
  const auto info = connection.command({"INFO", "stats"});
  REQUIRE(info.ok());
  const auto stat = [&](const char* name) {
    return std::stoull(kvmeld::stores::detail::redis_info(info->text(), name));
  };
  CHECK(stat("total_net_input_bytes") == connection.traffic().bytes_sent - start.bytes_sent);
  // the answer to RESETSTAT
  CHECK(stat("total_net_output_bytes") == before.bytes_received - start.bytes_received + 5);
  CHECK(before.connects == 1);
  CHECK(before.round_trips == start.round_trips + 1);
}

TEST_CASE(
    "attempts to connect wait longer and longer, by a factor that the seed fixes, and no longer "
    "than the limit") {
  kvmeld::stores::RedisOptions nowhere;
  nowhere.unix_socket = "/nonexistent/kvmeld/socket";
  nowhere.backoff_ms = 8;
  nowhere.backoff_limit_ms = 40;
  nowhere.backoff_seed = 5;
  const auto waits = [&] {
    RedisConnection connection(nowhere);
    std::vector<std::int64_t> out;
    for (int i = 0; i < 6; ++i) {
      const kvmeld::Status status = connection.connect();
      CHECK(status.code() == ErrorCode::unavailable);
      CHECK(status.message().find(
                "/nonexistent/kvmeld/socket: connect: No such file or directory (errno 2)") !=
            std::string::npos);
      out.push_back(connection.retry_in_ms());
      const kvmeld::Status soon = connection.command({"PING"}).error();  // not before its time
      if (connection.retry_in_ms() > 0)
        CHECK(soon.message().find("next attempt in ") != std::string::npos);
      while (connection.retry_in_ms() > 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return out;
  };
  const auto first = waits();
  for (std::size_t i = 0; i < first.size(); ++i) {
    const std::int64_t longest = (std::min)(std::int64_t{8} << i, std::int64_t{40});
    CHECK(first[i] <= longest);
    CHECK(first[i] >= longest / 2 - 3);  // read a moment later
  }
  CHECK(first.back() > first.front());
}

TEST_CASE(
    "whatever length a server announces, and however slowly it goes on, a call ends within its "
    "time and keeps what came") {
  const std::int64_t begin = kvmeld::stores::detail::monotonic_ms();
  for (const char* announced :
       {"*1000000000", "*4294967295", "*2147483647", "*65537", "*9223372036854775807",
        "*99999999999999999999", "*-2", "*1\r\n*1000000000", "*2\r\n$3\r\n*9\n\r\n*1000000000",
        "$536870913", "$-2", "$9223372036854775807"}) {
    INFO(announced);
    const Stranger stranger({"+PONG\r\n", announced + std::string("\r\n") + std::string(100, ':')});
    RedisConnection connection(stranger.options);
    CHECK(connection.command({"GET", "a"}).error().code() == ErrorCode::unavailable);
  }
  CHECK(kvmeld::stores::detail::monotonic_ms() - begin < 5000);
  // A later hiredis reads aggregates of the third protocol, and allocates them by their announced
  // length, too.
  for (const char* third : {"%1000000000\r\n", "~1000000000\r\n", ">1000000000\r\n",
                            "|1000000000\r\n", "*1\r\n%5\r\n", "=9\r\n"}) {
    INFO(third);
    CHECK_FALSE(kvmeld::stores::detail::RedisBounds().take(third));
  }
  // What looks like a header within a string is none.
  const Stranger quoting({"+PONG\r\n", "*2\r\n$13\r\n*1000000000\r\n\r\n+*1000000000\r\n"});
  RedisConnection quoted(quoting.options);
  const auto both = quoted.command({"GET", "a"});
  REQUIRE(both.ok());
  CHECK((*both)[0].text() == "*1000000000\r\n");
  CHECK((*both)[1].text() == "*1000000000");
  // A byte at a time would keep a call for as long as the server likes.
  std::string endless = "*60000\r\n";
  for (int i = 0; i < 200; ++i) endless += ":1\r\n";
  const Stranger dripping({"+PONG\r\n", endless}, 10);
  RedisConnection slow(dripping.options);
  const std::int64_t asked = kvmeld::stores::detail::monotonic_ms();
  const auto reply = slow.command({"GET", "a"});
  REQUIRE_FALSE(reply.ok());
  CHECK(reply.error().code() == ErrorCode::timed_out);
  CHECK(kvmeld::stores::detail::monotonic_ms() - asked < 1500);
  // 512 MiB that do not come take no memory.
  const Stranger large({"+PONG\r\n", "$536870912\r\nabc"});
  RedisConnection waiting(large.options);
  CHECK_FALSE(waiting.command({"GET", "a"}).ok());
}

TEST_CASE("a server that talks nonsense is an error, and harms nobody") {
  std::vector<std::string> answers{"",
                                   "+",
                                   "+PONG",
                                   "$5\r\nab",
                                   "$5\r\nabcdefg",
                                   "$-2\r\n",
                                   ":x\r\n",
                                   "*3\r\n+a\r\n",
                                   "*-5\r\n",
                                   "@@@@\r\n",
                                   "$x\r\n",
                                   "$99999999999\r\n",
                                   "\r\n\r\n",
                                   "-ERR\r\n"};
  std::string deep;
  for (int i = 0; i < 20; ++i) deep += "*1\r\n";
  answers.push_back(deep + "+a\r\n");
  std::mt19937_64 random(3);
  for (int i = 0; i < 40; ++i) answers.push_back(random_text(random, 1 + random() % 200));
  for (const std::string& answer : answers) {
    INFO("answer: " << answer);
    const Stranger stranger({answer});
    RedisConnection connection(stranger.options);
    const kvmeld::Status status = connection.connect();
    CHECK(status.code() == ErrorCode::unavailable);
    CHECK_FALSE(connection.connected());
  }
  // Good at first, then each beginning of a good answer and no more.
  const std::string list = "*2\r\n$3\r\na\r\n\r\n:12\r\n";
  for (std::size_t length = 0; length <= list.size(); ++length) {
    const Stranger stranger({"+PONG\r\n", list.substr(0, length)});
    RedisConnection connection(stranger.options);
    REQUIRE(connection.connect().ok());
    const auto reply = connection.command({"LRANGE", "a", "0", "1"});
    CHECK(reply.ok() == (length == list.size()));
    if (!reply) CHECK(reply.error().code() == ErrorCode::unavailable);
    if (reply) CHECK((*reply)[0].text() == "a\r\n");
    if (reply) CHECK((*reply)[1].number() == 12);
    if (reply) CHECK((*reply)[2].is_nil());
  }
  // A long string that ends too soon, twice; then one that is whole, and what follows it.
  for (const std::string& size : {std::string("400000"), std::string("536870912"),
                                  std::string("536870913"), std::string("99999999999")}) {
    const Stranger stranger({"+PONG\r\n", "$" + size + "\r\n" + std::string(1000, 'x')});
    RedisConnection connection(stranger.options);
    for (int i = 0; i < 2; ++i) {
      CHECK(connection.command({"GET", "a"}).error().code() == ErrorCode::unavailable);
      CHECK_FALSE(connection.connected());
    }
  }
  const std::string whole(400'000, 'y');
  const Stranger slow({"+PONG\r\n", "$400000\r\n" + whole + "\r\n", ":7\r\n"});
  RedisConnection connection(slow.options);
  const auto long_one = connection.command({"GET", "a"});
  REQUIRE(long_one.ok());
  CHECK((long_one->text() == whole));
  const auto next = connection.command({"GET", "b"});  // in step behind it
  REQUIRE(next.ok());
  CHECK(next->number() == 7);
  // Good answers of other kinds than a store expects.
  const std::vector<std::string> kinds{":1\r\n:1\r\n:1\r\n", "*0\r\n*-1\r\n*1\r\n*0\r\n",
                                       "$-1\r\n$-1\r\n+x\r\n"};
  for (const std::string& answer : kinds) {
    const Stranger stranger({"+PONG\r\n", answer, ":1\r\n*-1\r\n$1\r\na\r\n*1\r\n:1\r\n+x\r\n"});
    auto store = kvmeld::stores::RedisStore::open({.server = stranger.options});
    if (store) CHECK_FALSE(store->records(7).ok());
  }
}
