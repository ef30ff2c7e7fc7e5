#pragma once
// What the Transport concept asks for and no compiler checks, on three members of one session that
// have just met.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <kvmeld/replica/stores.hpp>

#include "catch.hpp"

namespace test {

using Message = std::vector<std::byte>;

inline Message message(std::uint64_t number, std::size_t size) {
  Message bytes(size);
  std::mt19937_64 random(number * 7919 + size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Sends until it arrives: a transport may lose. False where it has not come within ten seconds, or
/// something else came.
template <class From, class To>
bool carries(From& from, To& to, kvmeld::replica::MemberId address, const Message& bytes) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    if (!from.send(address, bytes)) return false;
    auto got = to.receive(500);
    if (!got) return false;
    if (!got->has_value()) continue;
    return (*got)->from == from.self() && (*got)->bytes == bytes;
  }
  return false;
}

/// Takes what is on its way, so that repetitions of one message do not stand in for the next.
template <class To>
std::size_t drain(To& to, std::int64_t quiet_ms) {
  std::size_t count = 0;
  for (auto got = to.receive(quiet_ms); got && got->has_value(); got = to.receive(quiet_ms))
    ++count;
  return count;
}

/// @param quiet_ms after which nothing more of what was sent arrives.
template <class T>
void transport_laws(T& a, T& b, T& c, std::int64_t quiet_ms = 20) {
  using Clock = std::chrono::steady_clock;
  const auto quiet = [&] {
    for (T* t : {&a, &b, &c}) drain(*t, quiet_ms);
  };
  REQUIRE(a.self() != b.self());
  REQUIRE(b.self() != c.self());
  REQUIRE(a.self() != c.self());
  REQUIRE(a.max_message_bytes() >= 4096);
  quiet();

  // Nothing came: none, and no sooner and not much later than it was to wait.
  for (const std::int64_t wait : {0, 30}) {
    const auto begin = Clock::now();
    const auto none = a.receive(wait);
    const auto took =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    REQUIRE(none.ok());
    CHECK_FALSE(none->has_value());
    CHECK(took >= wait - 1);
    CHECK(took < wait + 2000);
  }

  // Whole, also empty ones and the largest.
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{a.max_message_bytes()}}) {
    INFO("a message of " << size << " bytes");
    CHECK(carries(a, b, b.self(), message(1, size)));
    quiet();
    CHECK(carries(b, a, a.self(), message(2, size)));
    quiet();
  }
  const kvmeld::Status too_long = a.send(b.self(), Message(a.max_message_bytes() + 1));
  CHECK(too_long.code() == kvmeld::ErrorCode::oversized);
  CHECK(drain(b, quiet_ms) == 0);
  CHECK(carries(a, b, b.self(), message(3, 100)));  // an error leaves the transport as it was
  quiet();

  // To one: the others and the sender get nothing.
  CHECK(carries(a, b, b.self(), message(4, 64)));
  CHECK(drain(c, quiet_ms) == 0);
  CHECK(drain(a, quiet_ms) == 0);
  quiet();
  // To everyone: all but the sender.
  const Message news = message(5, 64);
  CHECK(carries(a, b, kvmeld::replica::everyone, news));
  auto other = c.receive(5000);
  REQUIRE(other.ok());
  REQUIRE(other->has_value());
  CHECK((*other)->bytes == news);
  CHECK((*other)->from == a.self());
  CHECK(drain(a, quiet_ms) == 0);
  quiet();
  CHECK(a.send(a.self(), news).ok());
  CHECK(drain(a, quiet_ms) == 0);
  // To nobody: not an error of the sender, or one that says so.
  const kvmeld::Status nobody = a.send(0x5EED'0FF1'CE00, news);
  CHECK((nobody.ok() || nobody.code() == kvmeld::ErrorCode::unavailable ||
         nobody.code() == kvmeld::ErrorCode::not_found));
  quiet();

  // Waiting ends when something comes.
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (int i = 0; i < 5; ++i) (void)b.send(a.self(), news);
  });
  const auto begin = Clock::now();
  const auto woken = a.receive(20'000);
  late.join();
  CHECK(std::chrono::duration<double>(Clock::now() - begin).count() < 10);
  REQUIRE(woken.ok());
  CHECK(woken->has_value());
  quiet();

  // Many at once, both ways: nothing arrives that was not sent, and of what was sent most.
  constexpr std::uint64_t count = 300;
  std::atomic<int> wrong{0};
  std::set<std::uint64_t> received;
  const auto sender = [&](T& from, std::uint64_t base) {
    for (std::uint64_t n = base; n < base + count; ++n) {
      Message bytes = message(n, 200 + n % 97);
      std::memcpy(bytes.data(), &n, sizeof n);
      if (!from.send(c.self(), bytes)) ++wrong;
    }
  };
  std::atomic<bool> sent{false};
  std::thread receiver([&] {
    for (;;) {
      const bool last = sent;
      const auto got = c.receive(quiet_ms * 5);
      if (!got) ++wrong;
      if (!got || !got->has_value()) {
        if (last) return;
        continue;
      }
      std::uint64_t n = 0;
      std::memcpy(&n, (*got)->bytes.data(), sizeof n);
      Message bytes = message(n, 200 + n % 97);
      std::memcpy(bytes.data(), &n, sizeof n);
      if ((*got)->bytes != bytes || n >= 2000 + count ||
          (*got)->from != (n < 2000 ? a.self() : b.self()))
        ++wrong;
      received.insert(n);
    }
  });
  std::thread first([&] { sender(a, 1000); });
  std::thread second([&] { sender(b, 2000); });
  first.join();
  second.join();
  sent = true;
  receiver.join();
  CHECK(wrong == 0);
  CHECK(received.size() > count);
}

}  // namespace test
