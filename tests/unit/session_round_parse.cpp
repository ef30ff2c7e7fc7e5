// Bytes of rounds that nobody vouches for: every prefix and every flipped bit is an error or
// another message, never a crash.

#include <kvmeld/replica/rounds.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

replica::RoundCut some_cut() {
  FragmentSet set;
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  for (std::uint64_t i = 0; i < 5; ++i) {
    REQUIRE(set.insert(test::sealed(g, 1, i).fragment, {i, 200 * i, 3},
                       i % 2 == 0 ? std::optional(0.5F) : std::nullopt)
                .ok());
  }
  const FragmentId first = set.entries().front().id;
  REQUIRE(set.supersede(first, FragmentId{{1, 2, 3}}, {9, 1, 1}).ok());
  REQUIRE(set.insert(test::sealed(g, 1, 9).fragment).ok());
  return *kvmeld::replica::make_cut(set, {4, 5}, 6, 7, 8);
}

replica::RoundReady some_ready() {
  replica::RoundReady ready{6, 7, {4, 5}, {}};
  for (const Dot& dot : {Dot{1, 5, 1}, {1, 6, 1}, {1, 9, 1}, {1, 1, 2}, {4, 1000, 1}})
    (void)ready.context.add(dot);
  return ready;
}

// What is read from changed bytes is a message like any other.
template <class Decode>
void attack(const std::vector<std::byte>& good, const Decode& decode) {
  for (std::size_t n = 0; n < good.size(); ++n) {
    const std::vector<std::byte> prefix(good.begin(),
                                        good.begin() + static_cast<std::ptrdiff_t>(n));
    REQUIRE_FALSE(decode(prefix).ok());
  }
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::vector<std::byte> bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    if (const auto read = decode(bad)) REQUIRE(decode(kvmeld::replica::encode(*read)).ok());
  }
  std::vector<std::byte> longer = good;
  longer.push_back(std::byte{0});
  CHECK(decode(longer).error().code() == ErrorCode::oversized);
  test::Random random(1);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> bad = good;
    for (int k = 0; k < 4; ++k)
      bad[random.below(bad.size())] = static_cast<std::byte>(random.below(256));
    if (const auto read = decode(bad)) REQUIRE(decode(kvmeld::replica::encode(*read)).ok());
  }
}

}  // namespace

TEST_CASE("cuts") {
  const replica::RoundCut cut = some_cut();
  const auto bytes = kvmeld::replica::encode(cut);
  CHECK(*kvmeld::replica::decode_cut(bytes) == cut);
  attack(bytes, [](std::span<const std::byte> b) { return kvmeld::replica::decode_cut(b); });
  std::vector<std::byte> lie = bytes;
  lie[45] ^= std::byte{1};  // in the digest
  CHECK(kvmeld::replica::decode_cut(lie).error().code() == ErrorCode::id_mismatch);
  FragmentSet removed = cut.set;
  REQUIRE(removed
              .remove(removed.entries().begin()->metadata.unattributed
                          ? (++removed.entries().begin())->id
                          : removed.entries().front().id,
                      {7, 7, 7})
              .ok());
  replica::RoundCut log = cut;
  log.set = removed;
  CHECK(kvmeld::replica::decode_cut(kvmeld::replica::encode(log)).error().code() ==
        ErrorCode::corrupt);
}

TEST_CASE("readies") {
  const replica::RoundReady ready = some_ready();
  const auto bytes = kvmeld::replica::encode(ready);
  CHECK(*kvmeld::replica::decode_ready(bytes) == ready);
  attack(bytes, [](std::span<const std::byte> b) { return kvmeld::replica::decode_ready(b); });
}
