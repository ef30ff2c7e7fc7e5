// Hostile bodies of replica messages, behind frames that are right: what is taken is a set, what is
// not changes nothing. With -DKVMELD_LIBFUZZER and clang's -fsanitize=fuzzer this is a fuzzer;
// otherwise a test that mutates a fixed corpus.

#include <cstdint>
#include <cstdlib>
#include <vector>

#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/random_cache.hpp"

namespace {

using namespace kvmeld;
using Member = replica::Replica;

const std::vector<Fragment>& fragments() {
  static const std::vector<Fragment> all = [] {
    std::vector<Fragment> out;
    for (std::uint64_t i = 0; i < 4; ++i)
      out.push_back(
          test::sealed(test::geometry({.layers = 1, .heads = 1, .channels = 32}), 2, i).fragment);
    return out;
  }();
  return all;
}

Member::Options options(replica::MemberId self) {
  Member::Options out{.epoch = 1, .merger = Digest128{1, 1}};
  out.self = self;
  out.epoch = 1;
  out.members = {0, 1};
  out.format.chunk_bytes = 64;
  return out;
}

/// Byte 0 is the message's type, the rest its body.
void try_one(std::span<const std::byte> bytes) {
  stores::MemoryStore store;
  Member replica(store, options(0));
  if (!replica.open() || !replica.insert(fragments()[0])) std::abort();
  FragmentSet wanting;
  if (!wanting.insert(fragments()[1], {1, 0, 1})) std::abort();
  if (!replica.receive(1, *encode_replica_frame(replica::ReplicaMessage::delta, Digest128{1, 1},
                                                replica::encode_set(wanting))))
    std::abort();
  const Digest256 before = replica.set().digest();
  const auto type = static_cast<std::uint8_t>(std::to_integer<unsigned>(bytes[0]) % 8U);
  const auto status =
      replica.receive(1, *kvmeld::replica::encode_frame(type, bytes.subspan(1))).status();
  const bool may_change = type == static_cast<std::uint8_t>(replica::ReplicaMessage::delta);
  if (!may_change && replica.set().digest() != before) std::abort();
  const bool in_part =
      status.code() == ErrorCode::quota_exceeded || status.code() == ErrorCode::dot_reused;
  if (!status && !in_part && replica.set().digest() != before) std::abort();
  if (!status && status.message().empty()) std::abort();
  // Whatever it is now, it is a set: it survives its own bytes, and the replica goes on.
  const auto again = replica::decode_set(replica::encode_set(replica.set()));
  if (!again || again->digest() != replica.set().digest() ||
      again->context() != replica.set().context())
    std::abort();
  for (std::int64_t now = 100; now < 500; now += 100) {
    if (!replica.tick(now)) std::abort();
  }
  (void)replica.take_outbox();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::vector<std::byte> exact(reinterpret_cast<const std::byte*>(data),
                                     reinterpret_cast<const std::byte*>(data) + size);
  try_one(exact);
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("mutated messages of a replica change nothing that they may not") {
  // Every message of two replicas that meet is the corpus.
  std::vector<std::vector<std::byte>> corpus;
  stores::MemoryStore stores[2];
  Member a(stores[0], options(0)), b(stores[1], options(1));
  REQUIRE(a.insert(fragments()[0], 0.5F).ok());
  REQUIRE(a.insert(fragments()[2]).ok());
  REQUIRE(a.supersede(fragments()[2].id(), fragments()[0].id()).ok());
  REQUIRE(a.remove(fragments()[2].id()).ok());
  REQUIRE(b.insert(fragments()[1]).ok());
  const auto pass = [&](Member& from, Member& to, replica::MemberId sender) {
    for (const replica::Outgoing& out : from.take_outbox()) {
      const auto frame = replica::decode_frame(out.bytes);
      std::vector<std::byte> one{static_cast<std::byte>(frame->type)};
      one.insert(one.end(), frame->body.begin(), frame->body.end());
      corpus.push_back(one);
      REQUIRE(to.receive(sender, out.bytes).ok());
    }
  };
  for (std::int64_t now = 100; now < 3000; now += 100) {
    REQUIRE(a.tick(now).ok());
    REQUIRE(b.tick(now).ok());
    pass(a, b, 0);
    pass(b, a, 1);
  }
  REQUIRE(a.set() == b.set());
  REQUIRE(corpus.size() > 20);
  test::Random random(9);
  for (int round = 0; round < 6000; ++round) {
    std::vector<std::byte> bytes = corpus[random.below(corpus.size())];
    for (std::uint64_t edits = 1 + random.below(3); edits > 0; --edits) {
      const std::size_t at = random.below(bytes.size());
      switch (random.below(4)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
          break;
        case 1:
          bytes[at] = static_cast<std::byte>(random.below(4) == 0 ? 0xFF : random.below(256));
          break;
        case 2:
          bytes.resize(at + 1);
          break;
        default:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       static_cast<std::byte>(random.below(256)));
          break;
      }
    }
    try_one(bytes);
  }
}
#endif
