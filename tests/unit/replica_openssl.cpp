// Across a trust boundary: SHA-256 names, and frames that only holders of a key make.
#include <cstdio>
#include <cstdlib>

#include "support/catch.hpp"

#ifndef KVMELD_TEST_OPENSSL
TEST_CASE("replicas across a trust boundary") {
  std::puts("skipped: no OpenSSL (Debian: libssl-dev)");
  std::exit(77);
}
#else

#include <kvmeld/replica/openssl.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/random_cache.hpp"

using kvmeld::ErrorCode;
using kvmeld::replica::HmacSha256;
using kvmeld::replica::Sha256;
using kvmeld::stores::MemoryStore;
using Replica = kvmeld::replica::Replica;

namespace {

std::vector<std::byte> key(unsigned char fill) {
  return std::vector<std::byte>(32, std::byte{fill});
}

Replica::Options options(kvmeld::replica::MemberId self, unsigned char secret) {
  Replica::Options out{.epoch = 1, .merger = kvmeld::Digest128{1, 1}};
  out.self = self;
  out.epoch = 1;
  out.frame.auth = std::make_shared<HmacSha256>(key(secret));
  out.format.hash = kvmeld::replica::sha256_set;
  return out;
}

}  // namespace

TEST_CASE("replicas with SHA-256 ids and a common key meet; who has another key or hash does not") {
  test::TestCache cache(test::geometry({.layers = 1, .heads = 1, .channels = 32}), 2);
  cache.fill(1);
  const auto fragment = kvmeld::seal<Sha256>(cache.ref());
  const auto weaker = kvmeld::seal(cache.ref());
  REQUIRE((fragment.ok() && weaker.ok()));
  MemoryStore stores[3];
  Replica a(stores[0], options(0, 7)), b(stores[1], options(1, 7)),
      stranger(stores[2], options(2, 8));
  CHECK(a.insert(*weaker).status().code() == ErrorCode::hash_mismatch);
  REQUIRE(a.insert(*fragment).ok());
  for (std::int64_t now = 100; now < 2000; now += 100) {
    REQUIRE(a.tick(now).ok());
    REQUIRE(b.tick(now).ok());
    for (const auto& out : a.take_outbox()) {
      REQUIRE(b.receive(0, out.bytes).ok());
      CHECK(stranger.receive(0, out.bytes).status().code() == ErrorCode::unauthenticated);
    }
    for (const auto& out : b.take_outbox()) REQUIRE(a.receive(1, out.bytes).ok());
  }
  REQUIRE(b.set().size() == 1);
  CHECK(b.set().digest() == a.set().digest());
  CHECK(b.set().find(fragment->id())->complete());
  CHECK(stranger.set().empty());
  kvmeld::FragmentSet strong(kvmeld::replica::sha256_set), plain;
  REQUIRE(strong.insert(*fragment).ok());
  CHECK(plain.join(strong).code() == ErrorCode::hash_mismatch);
  CHECK(kvmeld::replica::decode_set(kvmeld::replica::encode_set(strong)).status().code() ==
        ErrorCode::hash_mismatch);
  const auto back =
      kvmeld::replica::decode_set(kvmeld::replica::encode_set(strong), kvmeld::replica::sha256_set);
  REQUIRE(back.ok());
  CHECK(back->digest() == strong.digest());
}
#endif
