// Hostile messages of a reconciliation: an error or a right result, in bounded steps.

#include <kvmeld/replica/reconcile.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"
#include "support/reconcile_sets.hpp"

namespace {

using namespace kvmeld;
using Bytes = std::vector<std::byte>;
using test::Differ;

struct Case {
  test::SetPair pair;
  std::uint64_t salt;
};

// Small sessions of every form: sketches and lists, ids and tags, one side empty, nothing
// differing.
std::vector<Case> cases() {
  return {{test::set_pair(60, 4, Differ::mixed, false, 1), 11},
          {test::set_pair(40, 6, Differ::either_side, false, 2), 12},
          {test::set_pair(12, 9, Differ::mixed, false, 3), 13},
          {test::set_pair(50, 5, Differ::tags, false, 4), 14},
          {test::set_pair(6, 6, Differ::one_side, false, 5), 15},
          {test::set_pair(5, 0, Differ::tags, false, 6), 16}};
}

void must_be_right(const replica::Reconciliation& side, const replica::ReconcileDifference& truth) {
  if (side.done() && !test::same(side.result(), truth)) FAIL("a wrong result is called done");
  if (!side.done() && !test::same(side.result(), {})) FAIL("a result before the end");
}

/// A session whose message `at` arrives as `instead`; goes on as long as anybody answers.
bool disturbed(const Case& c, const std::vector<Bytes>& genuine, std::size_t at,
               const Bytes& instead) {
  // else a window follows a window for the millions that an edit may announce
  constexpr replica::ReconcileLimits limits{.items = 10000};
  replica::Reconciliation a(c.pair.a, limits), b(c.pair.b, limits);
  (void)a.start(c.salt);
  for (std::size_t i = 0; i < at; ++i) (void)(i % 2 == 0 ? b : a).receive(genuine[i]);
  Bytes message = instead;
  for (std::size_t i = at; i < at + 200; ++i) {
    auto& receiver = i % 2 == 0 ? b : a;
    const auto reply = receiver.receive(message);
    must_be_right(a, c.pair.from_a);
    must_be_right(b, c.pair.from_b());
    if (!reply) {
      if (reply.error().message().empty()) FAIL("an error without a sentence");
      const auto after = receiver.receive(genuine[at]);
      if (after) FAIL("a session goes on after an error");
      return true;
    }
    if (!reply->message) return false;
    message = *reply->message;
  }
  FAIL("the session does not end");
  return false;
}

ErrorCode code_of(const Result<replica::ReconcileReply>& reply) {
  return reply ? ErrorCode::ok : reply.error().code();
}

Bytes hello(std::uint64_t items, std::uint8_t first = 0x11) {
  extend::ByteWriter out;
  out.value(first);
  out.varint(0);
  out.value(std::uint64_t{5});
  out.varint(items);
  out.value(std::uint64_t{6});
  for (int i = 0; i < 48; ++i) out.varint(0);
  return out.take();
}

}  // namespace

TEST_CASE("every prefix of every message is an error") {
  for (const Case& c : cases()) {
    const auto trace = test::reconcile(c.pair, c.salt);
    REQUIRE(trace.right);
    for (std::size_t m = 0; m < trace.messages.size(); ++m) {
      for (std::size_t n = 0; n < trace.messages[m].size(); ++n) {
        replica::Reconciliation a(c.pair.a), b(c.pair.b);
        (void)a.start(c.salt);
        for (std::size_t i = 0; i < m; ++i) (void)(i % 2 == 0 ? b : a).receive(trace.messages[i]);
        if ((m % 2 == 0 ? b : a).receive(std::span(trace.messages[m]).first(n)))
          FAIL("message " << m << " is taken with " << n << " bytes");
      }
      Bytes longer = trace.messages[m];
      longer.push_back(std::byte{0});
      CHECK(disturbed(c, trace.messages, m, longer));
    }
  }
}

TEST_CASE("every flipped bit is an error, unheard, or harmless") {
  std::size_t bits = 0;
  for (const Case& c : cases()) {
    const auto trace = test::reconcile(c.pair, c.salt);
    for (std::size_t m = 0; m < trace.messages.size(); ++m) {
      for (std::size_t bit = 0; bit < 8 * trace.messages[m].size(); ++bit, ++bits) {
        Bytes flipped = trace.messages[m];
        flipped[bit / 8] ^= std::byte{1} << (bit % 8);
        (void)disturbed(c, trace.messages, m, flipped);
      }
    }
  }
  CHECK(bits > 8 * 1500);
}

TEST_CASE("messages edited at random end in an error or a right result") {
  std::mt19937_64 random(20);
  const auto all = cases();
  std::vector<test::SessionTrace> traces;
  for (const Case& c : all) traces.push_back(test::reconcile(c.pair, c.salt));
  int refused = 0;
  for (int round = 0; round < 6000; ++round) {
    const std::size_t which = random() % all.size();
    const auto& messages = traces[which].messages;
    const std::size_t at = random() % messages.size();
    Bytes edited = messages[at];
    for (std::size_t edits = 1 + random() % 3; edits > 0 && !edited.empty(); --edits) {
      const std::size_t within =
          random() % 2 == 0 ? edited.size() : (std::min)(edited.size(), std::size_t{24});
      const std::size_t where = random() % within;
      const auto here = edited.begin() + static_cast<std::ptrdiff_t>(where);
      switch (random() % 4) {
        case 0:
          edited[where] = static_cast<std::byte>(random());
          break;
        case 1:
          edited.insert(here, random() % 9, std::byte{0xFF});
          break;
        case 2:
          edited.erase(here, edited.begin() + static_cast<std::ptrdiff_t>(
                                                  (std::min)(edited.size(), where + random() % 9)));
          break;
        default: {  // a piece of another message
          const auto& other = messages[random() % messages.size()];
          const std::size_t from = random() % other.size();
          edited.insert(
              here, other.begin() + static_cast<std::ptrdiff_t>(from),
              other.begin() + static_cast<std::ptrdiff_t>((std::min)(other.size(), from + 40)));
        }
      }
    }
    refused += disturbed(all[which], messages, at, edited);
  }
  CHECK(refused > 3000);
}

TEST_CASE("what a peer announces is bounded") {
  const auto pair = test::set_pair(20, 3, Differ::mixed, false, 8);
  const auto receive = [&](const Bytes& message, const replica::ReconcileLimits& limits = {}) {
    replica::Reconciliation b(pair.b, limits);
    return code_of(b.receive(message));
  };
  CHECK(receive(hello(20)) == ErrorCode::ok);
  CHECK(receive(hello(1000000)) == ErrorCode::ok);  // a plan for a large peer, in few bytes
  CHECK(receive(hello(~std::uint64_t{0})) == ErrorCode::quota_exceeded);
  CHECK(receive(hello(30), {.items = 29}) == ErrorCode::quota_exceeded);
  CHECK(receive(hello(20, 0x21)) == ErrorCode::version_mismatch);
  CHECK(receive(hello(20, 0x1F)) == ErrorCode::corrupt);
  CHECK(receive({}) == ErrorCode::truncated);

  // A plan that asks the side with fewer elements for more than it holds.
  for (const auto& [form, cells, capacity] :
       {std::tuple(0, 65536, 256), std::tuple(0, 0, 1), std::tuple(2, 1, 1),
        std::tuple(1, 65537, 1), std::tuple(0, 1, 257)}) {
    replica::Reconciliation a(pair.a);
    (void)a.start(5);
    extend::ByteWriter out;
    out.value(std::uint8_t{0x12});
    out.varint(1);
    out.varint(1000);
    out.value(static_cast<std::uint8_t>(form));
    out.varint(static_cast<std::uint64_t>(cells));
    out.varint(static_cast<std::uint64_t>(capacity));
    CHECK(code_of(a.receive(out.written())) == ErrorCode::corrupt);
  }

  // A peer that always wants more, or another attempt, comes to an end.
  for (const std::uint8_t answer : {std::uint8_t{2}, std::uint8_t{3}}) {
    replica::Reconciliation a(pair.a);
    (void)a.start(5);
    extend::ByteWriter plan;
    plan.value(std::uint8_t{0x12});
    plan.varint(1);
    plan.varint(1000);
    plan.value(std::uint8_t{0});
    plan.varint(1);
    plan.varint(1);
    REQUIRE(a.receive(plan.written()));
    std::uint64_t step = 3, capacity = 1, extensions = 0;
    ErrorCode code = ErrorCode::ok;
    for (; code == ErrorCode::ok && step < 200; step += 2) {
      extend::ByteWriter out;
      out.value(std::uint8_t{0x14});
      out.varint(step);
      out.value(answer);
      if (answer == 2) {
        const std::uint64_t least = 2 + capacity * (extensions++ + 1) / 12;
        out.varint(least);
        capacity += least;
      }
      code = code_of(a.receive(out.written()));
    }
    CHECK(code == ErrorCode::corrupt);
    CHECK(step < 40);
  }
}

TEST_CASE("a session is begun once, by ascending items within the limit") {
  auto pair = test::set_pair(20, 3, Differ::mixed, false, 8);
  replica::Reconciliation twice(pair.a);
  CHECK(twice.start(1));
  CHECK(twice.start(1).error().code() == ErrorCode::invalid_argument);
  CHECK(code_of(twice.receive(hello(20))) == ErrorCode::invalid_argument);  // over, after the error

  replica::Reconciliation both(pair.a);
  CHECK(both.start(1));
  CHECK(code_of(both.receive(hello(20))) == ErrorCode::corrupt);  // the peer started too
  CHECK(replica::Reconciliation(pair.a, {.items = 3}).start(1).error().code() ==
        ErrorCode::quota_exceeded);
  std::swap(pair.a[4], pair.a[5]);
  CHECK(replica::Reconciliation(pair.a).start(1).error().code() == ErrorCode::invalid_argument);
  CHECK(code_of(replica::Reconciliation(pair.a).receive(hello(20))) == ErrorCode::invalid_argument);
}

TEST_CASE("sets without provenance meet by the ids in which they differ") {
  const auto fragment = [](std::uint64_t seed) {
    return test::sealed(test::geometry({.layers = 1, .heads = 1, .channels = 32}), 1, seed)
        .fragment;
  };
  kvmeld::FragmentSet sets[2];
  for (std::uint64_t i = 0; i < 40; ++i) {
    if (i % 5 != 0) REQUIRE(sets[0].insert(fragment(i)).ok());
    if (i % 7 != 0) REQUIRE(sets[1].insert(fragment(i)).ok());
  }
  REQUIRE(sets[1].insert(fragment(1), {4, 0}, 0.5F).ok());  // known on both sides, and more on one
  const auto mine = kvmeld::replica::reconcile_items(sets[0]),
             theirs = kvmeld::replica::reconcile_items(sets[1]);
  kvmeld::replica::Reconciliation a(mine), b(theirs);
  auto message = a.start(7);
  REQUIRE(message.ok());
  std::optional<std::vector<std::byte>> next = *message;
  for (bool to_b = true; next; to_b = !to_b) {
    const auto reply = (to_b ? b : a).receive(*next);
    REQUIRE(reply.ok());
    next = reply->message;
  }
  REQUIRE((a.done() && b.done()));
  CHECK(a.result().different == std::vector<kvmeld::FragmentId>{fragment(1).id()});
  const auto send = [](const kvmeld::FragmentSet& from,
                       const kvmeld::replica::ReconcileDifference& found, kvmeld::FragmentSet& to) {
    auto ids = found.mine_only;
    ids.insert(ids.end(), found.different.begin(), found.different.end());
    const auto part = kvmeld::replica::part_of(from, ids);
    REQUIRE(part.ok());
    REQUIRE(to.join(*part).ok());
  };
  const kvmeld::FragmentSet before = sets[0];
  send(before, a.result(), sets[1]);
  send(sets[1], b.result(), sets[0]);
  CHECK(sets[0] == sets[1]);
  CHECK(sets[0].digest() == sets[1].digest());
  CHECK(sets[0].size() == 38);
}

TEST_CASE("a counter of the largest magnitude is refused, not negated") {
  for (const std::uint64_t zigzag :
       {~std::uint64_t{0}, ~std::uint64_t{0} - 1, std::uint64_t{1} << 63U}) {
    for (const std::uint64_t elements : {std::uint64_t{0}, std::uint64_t{60}, ~std::uint64_t{0}}) {
      extend::ByteWriter out;
      out.varint(zigzag);
      extend::ByteReader in(out.written());
      (void)kvmeld::replica::detail::DifferenceEstimate{}.read(in, elements, 1);
      CHECK(in.status("counter").code() == ErrorCode::corrupt);
    }
  }
}
