// Hostile messages of a reconciliation and hostile cuts of rounds. With -DKVMELD_LIBFUZZER and
// clang's -fsanitize=fuzzer this is a fuzzer; otherwise a test that mutates the messages of one
// session.

#include <cstdint>
#include <cstdlib>
#include <vector>

#include <kvmeld/replica/reconcile.hpp>
#include <kvmeld/replica/rounds.hpp>

#include "support/random_cache.hpp"

namespace {

using namespace kvmeld;

std::vector<replica::ReconcileItem> items(std::uint64_t seed) {
  test::Random random(seed);
  std::vector<replica::ReconcileItem> out;
  for (std::uint64_t i = 0; i < 60; ++i) {
    replica::ReconcileItem item;
    item.id.bytes[0] = Xxh3_128::tag;
    item.id.bytes[1] = static_cast<std::uint8_t>(4 * i);
    item.id.bytes[2] = static_cast<std::uint8_t>(random.below(2));
    item.tag = random.below(4);
    out.push_back(item);
  }
  return out;
}

/// The first byte says how far an honest session goes before the bytes come in.
void try_one(std::span<const std::byte> bytes) {
  static const std::vector<replica::ReconcileItem> mine = items(1), theirs = items(2);
  const auto honest = std::to_integer<unsigned>(bytes[0]) % 4U;
  replica::ReconcileLimits limits;
  limits.items = 4096;
  replica::Reconciliation a(mine, limits), b(theirs, limits);
  auto message = a.start(7);
  if (!message) std::abort();
  std::vector<std::byte> next = *message;
  for (unsigned i = 0; i < honest; ++i) {
    const auto reply = (i % 2 == 0 ? b : a).receive(next);
    if (!reply || !reply->message) return;
    next = *reply->message;
  }
  replica::Reconciliation& victim = honest % 2 == 0 ? b : a;
  const auto reply = victim.receive(bytes.subspan(1));
  if (!reply && reply.error().message().empty()) std::abort();
  if (victim.done() && !reply) std::abort();
  const auto ready = kvmeld::replica::decode_ready(bytes.subspan(1));
  if (!ready && ready.error().message().empty()) std::abort();
  const auto cut = kvmeld::replica::decode_cut(bytes.subspan(1), SetHash{});
  if (!cut && cut.error().message().empty()) std::abort();
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

TEST_CASE("mutated messages of a reconciliation end in an error or an answer") {
  std::vector<std::vector<std::byte>> corpus;
  const std::vector<replica::ReconcileItem> mine = items(1), theirs = items(2);
  replica::Reconciliation a(mine), b(theirs);
  auto message = a.start(7);
  REQUIRE(message.ok());
  std::optional<std::vector<std::byte>> next = *message;
  for (unsigned i = 0; next; ++i) {
    std::vector<std::byte> one{static_cast<std::byte>(i % 4)};
    one.insert(one.end(), next->begin(), next->end());
    corpus.push_back(one);
    const auto reply = (i % 2 == 0 ? b : a).receive(*next);
    REQUIRE(reply.ok());
    next = reply->message;
  }
  test::Random random(5);
  for (int round = 0; round < 4000; ++round) {
    std::vector<std::byte> bytes = corpus[random.below(corpus.size())];
    for (std::uint64_t edits = 1 + random.below(3); edits > 0; --edits) {
      const std::size_t at = random.below(bytes.size());
      if (random.below(3) == 0)
        bytes.resize(at + 1);
      else
        bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
    }
    try_one(bytes);
  }
}
#endif
