// A directory of anchors is a join-semilattice; owners move as little as they can.
#include <array>
#include <map>
#include <set>
#include <utility>

#include <kvmeld/anchors/detail/directory.hpp>
#include <kvmeld/replica/reconcile.hpp>
#include <kvmeld/replica/wire.hpp>

#include "support/fields.hpp"
#include "support/law.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::anchors::AnchorDirectory;
using kvmeld::anchors::AnchorRecord;
using kvmeld::anchors::ReuseReason;

AnchorRecord record(std::uint8_t id, std::uint64_t version, std::uint64_t owner, bool removed,
                    std::uint64_t bits = 0) {
  AnchorRecord out;
  out.id.bytes[0] = 1, out.id.bytes[31] = id;
  out.context = {id % 2U, 7};
  out.version = version;
  out.owner = owner;
  out.removed = removed;
  if (removed) return out;
  out.tokens = 1 + id;
  out.signature = bits;
  out.text = kvmeld::anchors::text_digest(std::vector<kvmeld::TokenId>{id});
  out.bytes = 100 * owner;
  out.payload.bytes[0] = 0x81, out.payload.bytes[5] = static_cast<std::uint8_t>(owner);
  return out;
}
/// Few keys, versions and owners, so that equal versions of different records occur.
AnchorRecord any_record() {
  return record(*rc::gen::inRange<std::uint8_t>(1, 8), *rc::gen::inRange<std::uint64_t>(1, 4),
                *rc::gen::inRange<std::uint64_t>(1, 4), *rc::gen::arbitrary<bool>(),
                *rc::gen::arbitrary<std::uint64_t>());
}
AnchorDirectory directory(const std::vector<AnchorRecord>& records) {
  AnchorDirectory out;
  for (const AnchorRecord& r : records) RC_ASSERT(out.join(r).ok());
  return out;
}
std::vector<AnchorRecord> any_records() {
  std::vector<AnchorRecord> out(*rc::gen::inRange<std::size_t>(0, 12));
  for (AnchorRecord& r : out) r = any_record();
  return out;
}
AnchorDirectory joined(AnchorDirectory a, const AnchorDirectory& b) {
  RC_ASSERT(a.join(b).ok());
  return a;
}
/// Digest and counts anew from what is there.
void check_sums(const AnchorDirectory& d) {
  kvmeld::Digest256 sum;
  std::size_t live = 0;
  for (const auto& [key, entry] : d.entries()) {
    RC_ASSERT(key == record_key(entry.record));
    if (entry.record.removed) continue;
    ++live;
    sum.add(record_digest(entry.record));
  }
  RC_ASSERT(live == d.size());
  RC_ASSERT(d.entries().size() - live == d.tombstones());
  RC_ASSERT(sum == d.digest());
}

}  // namespace

TEST_CASE("directories join as a semilattice, and as a plain list of all records would") {
  test::law("join is commutative, associative, idempotent and monotone", [] {
    const AnchorDirectory a = directory(any_records()), b = directory(any_records()),
                          c = directory(any_records());
    const AnchorDirectory ab = joined(a, b);
    RC_ASSERT(ab == joined(b, a));
    RC_ASSERT(joined(ab, c) == joined(a, joined(b, c)));
    RC_ASSERT(joined(a, a) == a);
    RC_ASSERT(joined(ab, a) == ab);
    RC_ASSERT(joined(ab, b) == ab);
    RC_ASSERT(ab.digest() == joined(b, a).digest());
    check_sums(ab);
  });
  test::law("each key ends with the greatest of its records, in whatever order they came", [] {
    std::vector<AnchorRecord> all = any_records();
    std::map<kvmeld::FragmentId, AnchorRecord> plain;
    for (const AnchorRecord& r : all) {
      AnchorRecord& best = plain.try_emplace(record_key(r), r).first->second;
      if (r.version > best.version ||
          (r.version == best.version && record_digest(r) > record_digest(best)))
        best = r;
    }
    const AnchorDirectory forth = directory(all);
    std::reverse(all.begin(), all.end());
    RC_ASSERT(forth == directory(all));
    RC_ASSERT(forth.entries().size() == plain.size());
    for (const auto& [key, r] : plain) {
      RC_ASSERT(*forth.newest(key) == r);
      RC_ASSERT((forth.find(key) == nullptr) == r.removed);
    }
    check_sums(forth);
  });
  test::law("what a peer writes next is the newest, also over a tombstone", [] {
    AnchorDirectory d = directory(any_records());
    const auto next = d.next_version(any_record());
    RC_ASSERT(next.ok());
    RC_ASSERT(*d.join(*next));
    RC_ASSERT(!*d.join(*next));
    RC_ASSERT(*d.newest(record_key(*next)) == *next);
    check_sums(d);
  });
  test::law("a forgotten tombstone leaves the digest alone, and comes back with a join", [] {
    const AnchorDirectory before = directory(any_records());
    AnchorDirectory after = before;
    for (const auto& [key, entry] : before.entries()) after.forget(key);
    RC_ASSERT(after.digest() == before.digest());
    RC_ASSERT(after.tombstones() == 0U);
    RC_ASSERT(after.size() == before.size());
    RC_ASSERT(joined(after, before) == before);
    check_sums(after);
  });
  test::law("records are what their bytes are", [] {
    const std::vector<AnchorRecord> all = any_records();
    const kvmeld::Digest128 space{3, 4};
    const auto bytes = kvmeld::anchors::encode_records(space, all);
    RC_ASSERT(bytes.size() <= 28 + all.size() * kvmeld::anchors::detail::max_record_bytes);
    const auto again = kvmeld::anchors::decode_records(bytes, space);
    RC_ASSERT(again.ok());
    RC_ASSERT(*again == all);
    RC_ASSERT(kvmeld::anchors::decode_records(bytes, {3, 5}).error().code() ==
              ErrorCode::geometry_mismatch);
  });
}

TEST_CASE("a look-up has its reason, and equals one over a plain list") {
  test::law("hits are all that a plain loop finds, nearest first", [] {
    std::vector<AnchorRecord> all;
    for (std::uint8_t id = 1; id < 30; ++id) {
      const std::uint64_t bits = *rc::gen::arbitrary<std::uint64_t>() &
                                 *rc::gen::arbitrary<std::uint64_t>() &
                                 *rc::gen::arbitrary<std::uint64_t>();
      all.push_back(record(id, 1, 1, id % 7 == 0, bits));
    }
    const AnchorDirectory d = directory(all);
    kvmeld::anchors::DirectoryQuery query;
    query.tokens = *rc::gen::inRange<std::int64_t>(1, 32);
    query.context = {1, 7};
    query.most = 8;
    const int most = *rc::gen::inRange<int>(0, 20);
    query.similarity = 1.0 - most / 64.0;
    std::vector<std::pair<int, kvmeld::FragmentId>> expected;
    ReuseReason reason = ReuseReason::below_threshold;
    bool near = false, longer = false;
    for (const AnchorRecord& r : all) {
      const int distance = std::popcount(r.signature);
      if (r.removed || distance > most) continue;
      near = true;
      if (r.tokens < query.tokens) continue;
      longer = true;
      if (r.context == query.context) expected.emplace_back(distance, r.id);
    }
    if (near) reason = ReuseReason::too_short;
    if (longer) reason = ReuseReason::no_offset;
    if (!expected.empty()) reason = ReuseReason::reuse;
    std::sort(expected.begin(), expected.end());
    if (expected.size() > query.most) expected.resize(query.most);
    const kvmeld::anchors::RemoteAnchors found = d.look_up(query);
    RC_ASSERT(found.reason == reason);
    RC_ASSERT(found.remote() == !expected.empty());
    RC_ASSERT(found.records.size() == expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i)
      RC_ASSERT(found.records[i].id == expected[i].second);
  });
  AnchorDirectory d;
  kvmeld::anchors::DirectoryQuery query;
  query.tokens = 2;
  query.context = {1, 7};
  CHECK(d.look_up(query).reason == ReuseReason::empty_pool);
  REQUIRE(d.join(record(3, 1, 1, false, 0)).ok());
  CHECK(d.look_up(query).remote());
  query.consumer = kvmeld::anchors::Consumer::never_approximate;
  CHECK(d.look_up(query).reason == ReuseReason::exact_required);
  query.consumer = kvmeld::anchors::Consumer::takes_approximate;
  query.tokens = 0;
  CHECK(d.look_up(query).reason == ReuseReason::empty_segment);
  query.tokens = 2;
  query.similarity = 2;
  CHECK(d.look_up(query).reason == ReuseReason::invalid_rule);
}

TEST_CASE("an exact look-up takes equal text and context, and nothing approximate") {
  const std::vector<kvmeld::TokenId> text{3}, other{4};
  AnchorDirectory d;
  AnchorRecord r = record(3, 1, 1, false);
  r.approximate = true;
  REQUIRE(d.join(r).ok());
  CHECK(d.find_exact(text, r.context) == nullptr);
  r.approximate = false;
  r.version = 2;
  REQUIRE(d.join(r).ok());
  REQUIRE(d.find_exact(text, r.context) != nullptr);
  CHECK(*d.find_exact(text, r.context) == r);
  CHECK(d.find_exact(other, r.context) == nullptr);
  CHECK(d.find_exact(text, {0, 7}) == nullptr);
  AnchorRecord latent = record(5, 1, 1, false);
  latent.text = {};
  REQUIRE(d.join(latent).ok());
  CHECK(d.find_exact({}, latent.context) == nullptr);  // segments without text equal no text
  REQUIRE(d.join(record(3, 3, 1, true)).ok());
  CHECK(d.find_exact(text, r.context) == nullptr);
}

TEST_CASE("a directory refuses what is unsound or too much, and stays as it was") {
  AnchorDirectory d(2);
  REQUIRE(d.join(record(1, 1, 1, false)).ok());
  REQUIRE(d.join(record(2, 1, 1, true)).ok());
  const AnchorDirectory before = d;
  const auto refused = [&](const AnchorRecord& r, ErrorCode code) {
    const auto result = d.join(r);
    REQUIRE_FALSE(result.ok());
    CHECK(result.error().code() == code);
    CHECK(d == before);
    CHECK(d.digest() == before.digest());
  };
  refused(record(3, 1, 1, false), ErrorCode::quota_exceeded);
  refused(record(1, 0, 1, false), ErrorCode::invalid_argument);
  refused(record(1, kvmeld::anchors::max_record_version + 1, 1, false),
          ErrorCode::invalid_argument);
  AnchorRecord bad = record(1, 2, 1, false);
  bad.tokens = 0;
  refused(bad, ErrorCode::invalid_argument);
  bad = record(1, 2, 1, false), bad.payload.bytes[0] = 1;
  refused(bad, ErrorCode::invalid_argument);
  // sums of such would wrap
  for (const std::uint64_t bytes : {kvmeld::anchors::max_anchor_bytes + 1, ~std::uint64_t{0}}) {
    bad = record(1, 2, 1, false), bad.bytes = bytes;
    refused(bad, ErrorCode::invalid_argument);
  }
  bad = record(1, 2, 1, true), bad.bytes = 1;
  refused(bad, ErrorCode::invalid_argument);
  bad = record(1, 2, 1, false), bad.id = {};
  refused(bad, ErrorCode::invalid_argument);
  AnchorDirectory more;
  REQUIRE(more.join(record(1, 9, 1, false)).ok());
  REQUIRE(more.join(record(3, 1, 1, false)).ok());
  CHECK(d.join(more).code() == ErrorCode::quota_exceeded);
  CHECK(d == before);
  REQUIRE(d.join(record(1, kvmeld::anchors::max_record_version, 1, false)).ok());
  CHECK(d.next_version(record(1, 1, 1, false)).error().code() == ErrorCode::quota_exceeded);
}

TEST_CASE("namespaces and spaces differ by every field, and records by every one of theirs") {
  using kvmeld::anchors::AnchorSpace, kvmeld::Context, kvmeld::Digest128, kvmeld::FragmentId;
  using test::every_field, test::field, test::parts;
  const auto id = [](std::size_t at) {
    FragmentId out;
    out.bytes[at] = 1;
    return out;
  };
  // Digests as two fields, and their neighbours' halves.
  const auto halves = [](const Digest128& from) {
    return std::pair{
        field(from, "low", &Digest128::low, {9, from.low ^ 1U}),
        field(from, "high", &Digest128::high, {9, from.high ^ (std::uint64_t{1} << 63U)})};
  };
  const kvmeld::anchors::AnchorSpace space{"model", "tokenizer", {1, 2}, "tenant", {id(0), {3, 4}}};
  const auto layout = halves(space.layout), lead_in = halves(space.base.lead_in);
  const auto spaces = every_field<kvmeld::anchors::AnchorSpace>(
      field(space, "model", &kvmeld::anchors::AnchorSpace::model, {"", "Model", "modeltokenizer"}),
      field(space, "tokenizer", &kvmeld::anchors::AnchorSpace::tokenizer, {"", "t"}),
      parts(space, "layout", &kvmeld::anchors::AnchorSpace::layout, layout.first, layout.second),
      field(space, "tenant", &kvmeld::anchors::AnchorSpace::tenant, {"", "tenants"}),
      parts(space, "base", &kvmeld::anchors::AnchorSpace::base,
            field(space.base, "prefix", &Context::prefix, {FragmentId{}, id(1), id(31)}),
            parts(space.base, "lead_in", &Context::lead_in, lead_in.first, lead_in.second)));
  const ReuseReason reasons[] = {ReuseReason::model_differs, ReuseReason::tokenizer_differs,
                                 ReuseReason::layout_differs, ReuseReason::tenant_differs,
                                 ReuseReason::base_differs};
  REQUIRE(std::size(reasons) == spaces.size());
  const std::vector<std::byte> none =
      kvmeld::anchors::encode_records(anchor_namespace(space, kvmeld::anchors::SimHash{}), {});
  std::set<Digest128> unlike{anchor_namespace(space, kvmeld::anchors::SimHash{}),
                             anchor_namespace(space, kvmeld::anchors::SimHash{.gram_tokens = 4}),
                             anchor_namespace(space, kvmeld::anchors::XxHash{})};
  REQUIRE(unlike.size() == 3);
  std::size_t all = 3;
  for (std::size_t f = 0; f < spaces.size(); ++f) {
    CAPTURE(spaces[f].name);
    CHECK(compare(spaces[f].values[0], space) == ReuseReason::reuse);
    for (std::size_t i = 1; i < spaces[f].values.size(); ++i) {
      CAPTURE(i);
      CHECK(compare(space, spaces[f].values[i]) == reasons[f]);
      CHECK(compare(spaces[f].values[i], space) == reasons[f]);
      const Digest128 name = anchor_namespace(spaces[f].values[i], kvmeld::anchors::SimHash{});
      CHECK(kvmeld::anchors::decode_records(none, name).error().code() ==
            ErrorCode::geometry_mismatch);
      unlike.insert(name);
      CHECK(unlike.size() == ++all);
    }
  }
  const AnchorRecord whole = record(3, 4, 5, false, 6);
  const auto context = halves(whole.context), text = halves(whole.text);
  const auto records = every_field<AnchorRecord>(
      field(whole, "id", &AnchorRecord::id, {id(1), id(31)}),
      parts(whole, "context", &AnchorRecord::context, context.first, context.second),
      parts(whole, "text", &AnchorRecord::text, text.first, text.second),
      field(whole, "signature", &AnchorRecord::signature, {7, 1ULL << 63U}),
      field(whole, "tokens", &AnchorRecord::tokens, {5, 1LL << 40U}),
      field(whole, "bytes", &AnchorRecord::bytes, {0, 1ULL << 40U}),
      field(whole, "payload", &AnchorRecord::payload, {{}}),
      field(whole, "owner", &AnchorRecord::owner, {6, 1ULL << 63U}),
      field(whole, "version", &AnchorRecord::version, {5, 1ULL << 40U}),
      field(whole, "approximate", &AnchorRecord::approximate, {true}),
      field(whole, "removed", &AnchorRecord::removed, {true}));
  std::set<std::array<std::uint64_t, 4>> digests{record_digest(whole).words};
  all = 1;
  for (const auto& changed : records) {
    CAPTURE(changed.name);
    for (std::size_t i = 1; i < changed.values.size(); ++i)
      digests.insert(record_digest(changed.values[i]).words);
    CHECK(digests.size() == (all += changed.values.size() - 1));
  }
}

TEST_CASE("every bit of a namespace is compared") {
  const kvmeld::Digest128 mine{0x0123456789ABCDEF, 0xFEDCBA9876543210};
  const std::vector<std::byte> records = kvmeld::anchors::encode_records(mine, {});
  const auto frame =
      kvmeld::replica::encode_frame(9, records, kvmeld::replica::FrameOptions{.scope = mine});
  REQUIRE(kvmeld::anchors::decode_records(records, mine).ok());
  REQUIRE(kvmeld::replica::decode_frame(*frame, kvmeld::replica::FrameOptions{.scope = mine}).ok());
  for (unsigned bit = 0; bit < 128; ++bit) {
    kvmeld::Digest128 other = mine;
    (bit < 64 ? other.low : other.high) ^= std::uint64_t{1} << bit % 64;
    CAPTURE(bit);
    CHECK(kvmeld::anchors::decode_records(records, other).error().code() ==
          ErrorCode::geometry_mismatch);
    CHECK(kvmeld::replica::decode_frame(*frame, kvmeld::replica::FrameOptions{.scope = other})
              .error()
              .code() == ErrorCode::unauthenticated);
  }
}

TEST_CASE(
    "owners by rendezvous: a member that leaves moves its own keys only, one that joins takes 1/n "
    "from all alike") {
  std::vector<std::uint64_t> members;
  for (std::uint64_t m = 0; m < 32; ++m) members.push_back(m * 1000003 + 5);
  constexpr std::size_t keys = 20'000;
  std::map<std::uint64_t, std::size_t> owned;
  std::size_t moved_on_leave = 0, moved_on_join = 0;
  std::map<std::uint64_t, std::size_t> taken;
  std::vector<std::uint64_t> fewer(members.begin(), members.end() - 1), more = members;
  more.push_back(77);
  for (std::size_t k = 0; k < keys; ++k) {
    const kvmeld::FragmentId key = kvmeld::anchors::record_key(kvmeld::FragmentId{}, {k, 0});
    const auto rank = kvmeld::replica::rendezvous_rank(key, members);
    REQUIRE(rank.size() == 32);
    REQUIRE(std::set<std::uint64_t>(rank.begin(), rank.end()).size() == 32);
    ++owned[rank[0]];
    REQUIRE(kvmeld::replica::rendezvous_rank(key, members, 3) ==
            std::vector<std::uint64_t>(rank.begin(), rank.begin() + 3));
    // Who knows the members in another order names the same ones.
    if (k % 100 == 0) {
      std::vector<std::uint64_t> rotated(members.rbegin(), members.rend());
      CHECK(kvmeld::replica::rendezvous_rank(key, rotated) == rank);
    }
    const auto without = kvmeld::replica::rendezvous_rank(key, fewer);
    std::vector<std::uint64_t> expected = rank;
    std::erase(expected, members.back());
    REQUIRE(without == expected);  // nobody else changes place
    moved_on_leave += without[0] != rank[0] ? 1U : 0U;
    const std::uint64_t after = kvmeld::replica::rendezvous_rank(key, more, 1)[0];
    if (after != rank[0]) {
      REQUIRE(after == 77);
      ++moved_on_join;
      ++taken[rank[0]];
    }
  }
  const double mean = keys / 32.0;
  for (const std::uint64_t m : members)
    CHECK(std::abs(static_cast<double>(owned[m]) - mean) < 5 * std::sqrt(mean));
  CHECK(moved_on_leave == owned[members.back()]);
  CHECK(std::abs(static_cast<double>(moved_on_join) - keys / 33.0) < 5 * std::sqrt(keys / 33.0));
  CHECK(taken.size() == 32);
  CHECK(kvmeld::replica::rendezvous_rank({}, {}).empty());
}
