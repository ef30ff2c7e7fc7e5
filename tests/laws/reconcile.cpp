// Anti-entropy finds exactly what differs, and sends little beside the ids that do.
#include <map>

#include <kvmeld/replica/reconcile.hpp>

#include "support/law.hpp"
#include "support/reconcile_sets.hpp"

namespace {

using namespace kvmeld;
using test::Differ;

// What docs/convergence.md promises.
double allowed_bytes(std::size_t differing) {
  return 1.3 * 32.0 * static_cast<double>(differing) + 256.0;
}
double allowed_messages(std::size_t differing) {
  return 16.0 + 2.0 * std::log2(1.0 + static_cast<double>(differing));
}

constexpr Differ all_ways[] = {Differ::either_side, Differ::one_side, Differ::tags, Differ::mixed};

void check(const test::SetPair& pair, std::uint64_t salt) {
  const test::SessionTrace trace = test::reconcile(pair, salt);
  CAPTURE(pair.a.size(), pair.b.size(), pair.differing(), salt, trace.status.message(),
          trace.bytes(), trace.messages.size());
  REQUIRE(trace.status.ok());
  REQUIRE(trace.right);
  CHECK(static_cast<double>(trace.bytes()) <= allowed_bytes(pair.differing()));
  CHECK(static_cast<double>(trace.messages.size()) <= allowed_messages(pair.differing()));
}

// Multiplication by shifting and folding one bit at a time.
std::uint32_t slow_multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t out = 0;
  for (; b != 0; b >>= 1U) {
    if ((b & 1U) != 0) out ^= a;
    a = (a << 1U) ^ ((a >> 31U) != 0 ? 0x8DU : 0U);
  }
  return out;
}

template <class Product>
void check_field(const Product& product) {
  using namespace kvmeld::detail;
  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    const auto a = static_cast<std::uint32_t>(random()),
               b = static_cast<std::uint32_t>(random() >> (random() % 60));
    if (field_multiply(product, a, b) != slow_multiply(a, b)) FAIL(a << " times " << b);
    if (a != 0 && i < 50 && field_multiply(product, a, field_inverse(product, a)) != 1)
      FAIL(a << " has no inverse");
  }
  for (const std::uint32_t ones : {0xFFFFFFFFU, 0x80000000U, 1U, 0U})
    CHECK(field_multiply(product, ones, 0xFFFFFFFFU) == slow_multiply(ones, 0xFFFFFFFFU));
  std::uint32_t frobenius = 2;  // x^(2^32) = x, and not earlier: the polynomial is irreducible
  for (int i = 0; i < 32; ++i) {
    if (i == 16) CHECK(frobenius != 2);
    frobenius = field_multiply(product, frobenius, frobenius);
  }
  CHECK(frobenius == 2);
}

}  // namespace

TEST_CASE("both products of the field are the product") {
  check_field(replica::detail::PortableProduct{});
#if KVMELD_X86_DISPATCH
  if (replica::detail::has_carryless_product()) check_field(replica::detail::CarrylessProduct{});
#endif
}

TEST_CASE("a sketch gives back every set smaller than it, and no other") {
  test::law("roots of the solved sketch are the set", [] {
    const auto capacity = *rc::gen::inRange<std::size_t>(1, 60);
    const auto size = *rc::gen::inRange<std::size_t>(0, 70);
    std::mt19937_64 random(*rc::gen::arbitrary<std::uint64_t>());
    std::vector<std::uint32_t> set;
    while (set.size() < size) {
      const auto e = static_cast<std::uint32_t>(random());
      if (e != 0 && std::find(set.begin(), set.end(), e) == set.end()) set.push_back(e);
    }
    std::vector<std::uint32_t> sums(capacity);
    const std::size_t first = capacity / 3;  // sums in two parts, as they come
    replica::detail::sketch_add(set, 0, std::span(sums).first(first));
    replica::detail::sketch_add(set, first, std::span(sums).subspan(first));
    const auto portable = replica::detail::sketch_solve(replica::detail::PortableProduct{},
                                                        std::span<const std::uint32_t>(sums));
    auto locator = replica::detail::sketch_solve(std::span<const std::uint32_t>(sums));
    RC_ASSERT(portable == locator);
    RC_ASSERT(locator.has_value() == (size < capacity));
    if (!locator) return;
    RC_ASSERT(locator->size() == size);
    RC_ASSERT(replica::detail::sketch_roots(*locator, set).size() == size);
    const std::vector<std::uint32_t> none{1, 2, 3};
    for (const std::uint32_t i : replica::detail::sketch_roots(*locator, none))
      RC_ASSERT(std::find(set.begin(), set.end(), none[i]) != set.end());
    for (std::size_t i = size / 2; i < size; ++i) replica::detail::sketch_divide(*locator, set[i]);
    RC_ASSERT(replica::detail::sketch_roots(*locator, set).size() == size / 2);
  });
}

TEST_CASE("both sides learn exactly what differs") {
  test::law("as the sets themselves say", [] {
    const auto ids = *rc::gen::inRange<std::size_t>(0, 400);
    const auto differing = *rc::gen::inRange<std::size_t>(0, ids + 1);
    const auto how =
        *rc::gen::elementOf(std::vector<Differ>(std::begin(all_ways), std::end(all_ways)));
    const auto prefix = *rc::gen::element<std::size_t>(0, 8, 13);
    check(test::set_pair(ids, differing, how, *rc::gen::arbitrary<bool>(),
                         *rc::gen::arbitrary<std::uint64_t>(), prefix),
          *rc::gen::arbitrary<std::uint64_t>());
  });
}

TEST_CASE("empty, equal, disjoint and single") {
  for (const std::size_t ids : {0U, 1U, 2U, 50U, 3000U}) {
    check(test::set_pair(ids, 0, Differ::mixed, false, ids), 1);
    for (const Differ how : all_ways) check(test::set_pair(ids, ids, how, false, ids), 2);
    test::SetPair one_empty = test::set_pair(ids, ids, Differ::one_side, false, ids);
    check(one_empty, 3);
    std::swap(one_empty.a, one_empty.b);
    std::swap(one_empty.from_a.mine_only, one_empty.from_a.theirs_only);
    check(one_empty, 3);
  }
}

TEST_CASE("bytes and messages stay within the promise") {
  for (const std::size_t ids : {10U, 100U, 1000U, 10000U, 100000U}) {
    for (const std::size_t differing :
         {std::size_t{1}, std::size_t{10}, std::size_t{1000}, ids / 4, ids / 2, ids}) {
      if (differing > ids) continue;
      std::uint64_t salt = 0;
      for (const Differ how : all_ways) {
        if (ids == 100000 && how == Differ::one_side && differing != ids) continue;
        ++salt;
        check(test::set_pair(ids, differing, how, salt % 2 == 0, ids + differing), salt);
      }
    }
  }
}

TEST_CASE("bytes stay within the promise for many salts") {
  for (std::uint64_t salt = 0; salt < 60; ++salt) {
    for (const std::size_t differing : {2U, 7U, 20U, 45U, 80U, 200U, 450U, 700U}) {
      check(test::set_pair(1500, differing, all_ways[salt % 4], false, salt * 1000 + differing),
            salt);
    }
  }
}

TEST_CASE("a session is a function of items and salt") {
  const auto pair = test::set_pair(500, 60, Differ::mixed, false, 5);
  CHECK(test::reconcile(pair, 9).messages == test::reconcile(pair, 9).messages);
  CHECK(test::reconcile(pair, 9).messages != test::reconcile(pair, 10).messages);
}

TEST_CASE("messages keep to about the size that was set") {
  for (const Differ how : all_ways) {
    for (const std::size_t differing : {300U, 9000U}) {
      const auto pair = test::set_pair(9000, differing, how, false, differing);
      const test::SessionTrace trace = test::reconcile(pair, 4, {.message_bytes = 8192});
      CAPTURE(static_cast<int>(how), differing, trace.longest(), trace.messages.size());
      CHECK(trace.right);
      CHECK(trace.longest() <= 2 * 8192);
      CHECK(static_cast<double>(trace.bytes()) <=
            allowed_bytes(differing) + 8.0 * static_cast<double>(trace.messages.size()));
    }
  }
}

TEST_CASE("lost and repeated messages are sent again and change nothing") {
  for (const Differ how : all_ways) {
    const auto pair = test::set_pair(300, 40, how, false, 3);
    const test::SessionTrace plain = test::reconcile(pair, 4);
    replica::Reconciliation a(pair.a), b(pair.b);
    std::vector<std::vector<std::byte>> sent{*a.start(4)};
    for (bool to_b = true;; to_b = !to_b) {
      auto& receiver = to_b ? b : a;
      const auto reply = receiver.receive(sent.back());
      REQUIRE(reply);
      const auto repeated = receiver.receive(sent.back());
      REQUIRE(repeated);
      CHECK(repeated->done == reply->done);
      if (to_b || reply->done) {
        CHECK(repeated->message == reply->message);
      } else {
        CHECK_FALSE(repeated->message);
      }
      if (sent.size() > 2) {
        const auto old = receiver.receive(sent[sent.size() - 3]);
        REQUIRE(old);
        CHECK_FALSE(old->message);
      }
      if (!reply->message) break;
      sent.push_back(*reply->message);
    }
    CHECK(sent == plain.messages);
    CHECK(test::same(a.result(), pair.from_a));
    CHECK(test::same(b.result(), pair.from_b()));
  }
}

TEST_CASE("ids whose short hashes meet are salted anew") {
  // Ids whose 32 hash bits in a sketch are equal, for this salt, and which share the one cell that
  // so small a difference has.
  constexpr std::uint64_t salt = 77;
  std::mt19937_64 random(1);
  std::map<std::uint32_t, FragmentId> seen;
  std::vector<std::pair<FragmentId, FragmentId>> meeting;
  while (meeting.size() < 3) {
    const FragmentId id = test::random_id(random);
    const auto [at, fresh] =
        seen.emplace(static_cast<std::uint32_t>(replica::detail::id_hash(id, salt)), id);
    if (!fresh && at->second != id) meeting.emplace_back(at->second, id);
  }
  // Where the two ids are: 0 nowhere, 1 in a, 2 in b, 3 in both.
  for (int first = 0; first < 4; ++first) {
    for (int second = 0; second < 4; ++second) {
      for (int both_pairs = 0; both_pairs < 2; ++both_pairs) {
        test::SetPair pair = test::set_pair(200, 3, Differ::mixed, false, 2);
        for (std::size_t m = 0; m < (both_pairs != 0 ? 2U : 1U); ++m) {
          for (const auto& [id, where] :
               {std::pair(meeting[m].first, first), std::pair(meeting[m].second, second)}) {
            if ((where & 1) != 0) pair.a.push_back({id, 5});
            if ((where & 2) != 0) pair.b.push_back({id, 5});
            if (where == 1) pair.from_a.mine_only.push_back(id);
            if (where == 2) pair.from_a.theirs_only.push_back(id);
          }
        }
        for (auto* items : {&pair.a, &pair.b})
          std::sort(items->begin(), items->end(), test::lower_id);
        for (auto* ids : {&pair.from_a.mine_only, &pair.from_a.theirs_only})
          std::sort(ids->begin(), ids->end());
        for (bool swapped : {false, true}) {
          if (swapped) {
            std::swap(pair.a, pair.b);
            std::swap(pair.from_a.mine_only, pair.from_a.theirs_only);
          }
          CAPTURE(first, second, both_pairs, swapped);
          const test::SessionTrace trace = test::reconcile(pair, salt);
          INFO(trace.status.message());
          CHECK(trace.right);
        }
      }
    }
  }
}
