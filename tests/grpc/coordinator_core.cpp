// A coordinator without a network: what it admits, what updates may take together, and that a round
// has one cut whatever happens.

#include <optional>

#include <kvmeld/coordinator/coordinator.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"
#include "support/unserved.hpp"

namespace {

using kvmeld::Dot;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::Status;
using Core = kvmeld::coordinator::Coordinator;

/// A store that counts how often a blob is looked for.
class CountingStore final : public kvmeld::replica::ArbiterStore {
 public:
  std::size_t looks = 0;

  kvmeld::Result<bool> put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) override {
    return store_.put(key, bytes);
  }
  kvmeld::Result<bool> put_if_absent(const kvmeld::BlobKey& key,
                                     std::span<const std::byte> bytes) override {
    return store_.put_if_absent(key, bytes);
  }
  kvmeld::Result<kvmeld::Blob> get(const kvmeld::BlobKey& key) override {
    ++looks;
    return store_.get(key);
  }
  kvmeld::Result<bool> contains(const kvmeld::BlobKey& key) override {
    return store_.contains(key);
  }
  kvmeld::Status erase(const kvmeld::BlobKey& key) override { return store_.erase(key); }
  kvmeld::Status add_record(std::span<const std::byte> bytes) override {
    return store_.add_record(bytes);
  }
  kvmeld::Result<kvmeld::replica::RecordBatch> records(std::uint64_t cursor) override {
    return store_.records(cursor);
  }
  kvmeld::Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    return store_.replace_records(cursor, bytes);
  }

 private:
  kvmeld::stores::MemoryStore store_;
};

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 20) {
  return test::sealed(test::geometry({.layers = 2, .heads = 2, .channels = 32}), tokens, seed,
                      {.tokens = test::token_ids(tokens)})
      .fragment;
}
kvmeld::coordinator::CoordinatorOptions core_options() {
  kvmeld::coordinator::CoordinatorOptions options{
      .replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  options.replica.self = 1000;
  options.replica.epoch = 1;
  options.quorum = 1;
  options.soft_ms = 0;
  return options;
}
kvmeld::Status apply(Core& core, const FragmentSet& set) {
  auto update = core.begin_update();
  KVMELD_TRY(update.add_set(kvmeld::replica::encode_set(set)));
  KVMELD_TRY(update.end(update.items()));
  return core.apply(update).status();
}
kvmeld::Result<kvmeld::coordinator::MergeAnswer> round(Core& core, std::uint64_t number) {
  kvmeld::coordinator::MergeAsk ask;
  ask.session = 5;
  ask.round = number;
  ask.member = 1;
  ask.timeout_ms = 10;
  KVMELD_TRY(core.arrive(ask, 0));
  const auto answer = core.poll(ask, 10);
  core.leave(ask);
  return answer ? *answer
                : kvmeld::Result<kvmeld::coordinator::MergeAnswer>(
                      kvmeld::Status(ErrorCode::timed_out, "no answer"));
}

}  // namespace

TEST_CASE(
    "an entry or a context that would fit into no message is refused, and everybody goes on") {
  kvmeld::stores::MemoryStore store;
  auto options = core_options();
  options.max_marks = 100;
  options.max_ranges = 50;
  Core core(store, options);
  REQUIRE(core.open().ok());
  FragmentSet marks, more, gaps;
  for (std::uint64_t i = 0; i < 100; ++i) REQUIRE(marks.insert(fragment(1), Dot{1, i, 1}).ok());
  REQUIRE(apply(core, marks).ok());
  CHECK(apply(core, marks).ok());  // nothing new in it
  REQUIRE(more.insert(fragment(1), Dot{2, 0, 1}).ok());
  CHECK(apply(core, more).code() == ErrorCode::quota_exceeded);
  for (std::uint64_t i = 0; i < 50; ++i)
    REQUIRE(gaps.insert(fragment(2 + i % 10), Dot{3, 2 * i, 1}).ok());
  CHECK(apply(core, gaps).code() == ErrorCode::quota_exceeded);
  CHECK(core.set().digest() == marks.digest());
  CHECK(core.deltas({}).ok());

  // Messages bound it too.
  kvmeld::stores::MemoryStore other;
  options = core_options();
  options.replica.max_message_bytes = 1 << 13;
  options.replica.format.chunk_bytes = 1000;
  Core small(other, options);
  REQUIRE(small.open().ok());
  CHECK(apply(small, marks).code() == ErrorCode::quota_exceeded);
  CHECK(small.deltas({}).ok());
}

TEST_CASE("updates on their way in have one budget together and one each, by what came of them") {
  kvmeld::stores::MemoryStore store;
  auto options = core_options();
  options.replica.format.chunk_bytes = 10'000;
  options.max_updates_bytes = 100'000;
  options.max_member_bytes = 60'000;
  Core core(store, options);
  REQUIRE(core.open().ok());
  const Fragment f = fragment(1, 30);  // 30 KiB
  const auto manifest = kvmeld::replica::make_manifest(f, 10'000);
  REQUIRE(manifest.ok());
  const auto bytes = kvmeld::replica::encode_manifest(*manifest);
  const auto begin = [&](Core::Update& update) { return update.add_manifest(f.id(), bytes); };
  const auto chunk = [&](Core::Update& update, std::size_t c) {
    return update.add_chunk(
        manifest->chunks[0][c],
        kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(f.payloads()[0], c, 10'000)));
  };
  {
    auto first = core.begin_update(1);
    auto second = core.begin_update(1);
    auto other = core.begin_update(2);
    // nothing of it came
    for (Core::Update* const update : {&first, &second, &other}) REQUIRE(begin(*update).ok());
    for (std::size_t c = 0; c < 4; ++c) REQUIRE(chunk(first, c).ok());
    Status last;
    for (std::size_t c = 0; c < 4 && last.ok(); ++c) last = chunk(second, c);
    CHECK(last.code() == ErrorCode::quota_exceeded);
    CHECK(last.message().find("all updates of member 1") != std::string::npos);
    // another member's is not touched
    for (std::size_t c = 0; c < 4; ++c) CHECK(chunk(other, c).ok());
    auto third = core.begin_update(3);
    REQUIRE(begin(third).ok());
    last = {};
    for (std::size_t c = 0; c < 4 && last.ok(); ++c) last = chunk(third, c);
    CHECK(last.message().find("all updates together") != std::string::npos);
  }
  auto again = core.begin_update(1);
  REQUIRE(begin(again).ok());
  for (std::size_t c = 0; c < 4; ++c) CHECK(chunk(again, c).ok());
}

TEST_CASE(
    "however many ids nobody serves, an update is looked for alone, and no round waits for them") {
  CountingStore store;
  auto options = core_options();
  options.replica.members = {2, 3};
  options.members = {2};
  options.soft_ms = 1'000'000;
  kvmeld::coordinator::Coordinator core(store, options);
  REQUIRE(core.open().ok());
  const auto send = [&](const FragmentSet& set) {
    auto update = core.begin_update();
    KVMELD_TRY(update.add_set(kvmeld::replica::encode_set(set)));
    KVMELD_TRY(update.end(update.items()));
    return core.apply(update).status();
  };
  constexpr std::size_t bogus = 20'000;
  for (std::size_t i = 0; i < bogus; i += 4000) REQUIRE(send(test::unserved(4000, 50, i)).ok());
  CHECK(store.looks <= bogus + 1000);  // once each
  const auto looks = [&](const auto& call) {
    const std::size_t before = store.looks;
    call();
    return store.looks - before;
  };
  const Fragment honest = fragment(1);
  REQUIRE(kvmeld::replica::store_fragment(store, honest, options.replica.format).ok());
  FragmentSet one;
  REQUIRE(one.insert(honest, Dot{2, 1, 1}).ok());
  CHECK(looks([&] { REQUIRE(send(one).ok()); }) < 100);
  CHECK(core.fragment(honest.id()).ok());
  CHECK(looks([&] { core.saw(3, core.version().context); }) < 100);
  CHECK(looks([&] { core.saw(2, core.version().context); }) < 100);

  kvmeld::coordinator::MergeAsk ask;
  ask.session = ask.round = 1;
  ask.member = 2;
  ask.context = one.context();
  ask.timeout_ms = 10;
  REQUIRE(core.arrive(ask, 0).ok());
  const auto cut = core.poll(ask, 1);
  REQUIRE(cut.has_value());
  REQUIRE(cut->ok());
  CHECK((*cut)->cut.set.size() == 1);
  core.leave(ask);
}

TEST_CASE(
    "an author has so many fragments in the state, an update so many, and what is over is "
    "counted") {
  kvmeld::stores::MemoryStore store;
  auto options = core_options();
  options.max_author_entries = 100;
  options.max_update_entries = 80;
  options.replica.max_entries = 150;
  Core core(store, options);
  REQUIRE(core.open().ok());
  CHECK(apply(core, test::unserved(81, 5)).code() == ErrorCode::quota_exceeded);
  CHECK(apply(core, test::unserved(80, 5)).ok());
  CHECK(apply(core, test::unserved(21, 5, 1000)).code() == ErrorCode::quota_exceeded);
  CHECK(apply(core, test::unserved(20, 5, 1000)).ok());
  CHECK(apply(core, test::unserved(50, 6)).ok());                                // another's room
  CHECK(apply(core, test::unserved(1, 7)).code() == ErrorCode::quota_exceeded);  // the state's
  CHECK(core.refusals().over_quota == 3);
}

TEST_CASE("an update is so short that others hardly wait for it, fragments and removals together") {
  kvmeld::stores::MemoryStore store;
  Core core(store, core_options());
  REQUIRE(core.open().ok());
  CHECK(apply(core, test::unserved(4097, 5)).code() == ErrorCode::quota_exceeded);
  CHECK(apply(core, test::unserved(4096, 5)).ok());
  const auto removals = [](std::uint64_t n) {
    std::vector<kvmeld::Removal> out;
    for (std::uint64_t i = 0; i < n; ++i) {
      out.push_back({{6, 2 * i + 1, 1}, fragment(1).id(), {{6, 2 * i, 1}}});
    }
    return *FragmentSet::from_parts({}, {}, std::move(out), {});
  };
  FragmentSet both = removals(4096);
  CHECK(apply(core, both).ok());
  REQUIRE(both.join(test::unserved(1, 7)).ok());
  CHECK(apply(core, both).code() == ErrorCode::quota_exceeded);
  CHECK(core.refusals().over_quota == 2);
}

TEST_CASE("a member brings its own operations, and others' only as they are known") {
  kvmeld::stores::MemoryStore store;
  auto options = core_options();
  options.relays = {9};
  Core core(store, options);
  REQUIRE(core.open().ok());
  const auto send = [&](kvmeld::replica::MemberId member, const FragmentSet& set) {
    auto update = core.begin_update(member);
    KVMELD_TRY(update.add_set(kvmeld::replica::encode_set(set)));
    KVMELD_TRY(update.end(update.items()));
    return core.apply(update).status();
  };
  FragmentSet first;
  REQUIRE(first.insert(fragment(1), Dot{1, 0, 1}).ok());
  REQUIRE(send(1, first).ok());
  // In another's name: an insertion, a life that is over before it began, a removal of what is not
  // there yet, and what is in force.
  FragmentSet forged;
  REQUIRE(forged.insert(fragment(2), Dot{1, 1, 1}).ok());
  CHECK(send(2, forged).code() == ErrorCode::unauthenticated);
  kvmeld::CausalContext all, known;
  all.append({1, 1, 0, 1000});
  known.append({1, 1, 0, 0});
  CHECK(send(2, *FragmentSet::from_parts({}, {}, {}, all)).code() == ErrorCode::unauthenticated);
  CHECK(send(2, *FragmentSet::from_parts({}, {}, {}, known)).code() == ErrorCode::unauthenticated);
  const kvmeld::Removal ahead{{2, 0, 1}, fragment(1).id(), {{1, 0, 1}, {1, 1, 1}}};
  CHECK(send(2, *FragmentSet::from_parts({}, {}, {ahead}, {})).code() ==
        ErrorCode::unauthenticated);
  FragmentSet other;  // a known dot, with another mark
  REQUIRE(other.insert(fragment(1), Dot{1, 0, 1}, 0.5F).ok());
  CHECK(send(2, other).code() == ErrorCode::unauthenticated);
  CHECK(core.refusals().unauthenticated == 5);
  CHECK(core.set().digest() == first.digest());
  // What is known may come with it, and be removed: a member renders what others did.
  FragmentSet mine = first;
  REQUIRE(mine.insert(fragment(3), Dot{2, 0, 1}).ok());
  CHECK(send(2, mine).ok());
  REQUIRE(mine.remove(fragment(1).id(), Dot{2, 1, 1}).ok());
  CHECK(send(2, mine).ok());
  CHECK(core.set().size() == 1);
  CHECK(send(9, forged).ok());  // a gateway
  CHECK(core.set().find(fragment(2).id()) != nullptr);
}

TEST_CASE(
    "a round that is over and forgotten gets no second cut, from this coordinator, a later one, or "
    "another on its store") {
  kvmeld::stores::MemoryStore store;
  auto options = core_options();
  options.max_rounds = 8;
  Core other(store, options);
  REQUIRE(other.open().ok());
  REQUIRE(round(other, 1).ok());
  {
    Core core(store, options);
    REQUIRE(core.open().ok());
    for (std::uint64_t number = 2; number <= 20; ++number) {
      FragmentSet set;
      REQUIRE(set.insert(fragment(number), Dot{1, number, 1}).ok());
      REQUIRE(apply(core, set).ok());
      REQUIRE(round(core, number).ok());
    }
    for (std::uint64_t number = 1; number <= 12; ++number)
      CHECK(round(core, number).status().code() == ErrorCode::not_found);
    CHECK(round(core, 13).ok());
  }
  Core again(store, options);
  REQUIRE(again.open().ok());
  for (Core* const core : {&again, &other}) {
    for (std::uint64_t number = 2; number <= 12; ++number)
      CHECK(round(*core, number).status().code() == ErrorCode::not_found);
    for (std::uint64_t number = 13; number <= 20; ++number) CHECK(round(*core, number).ok());
  }
  for (std::uint64_t number = 1; number <= 12; ++number)
    CHECK_FALSE(*store.contains(kvmeld::coordinator::detail::coordinator_cut_key(5, number)));
  CHECK(round(again, 21).ok());
  CHECK(round(other, 22).ok());
  Core last(store, options);  // the others may still have the cut of 14 in memory
  REQUIRE(last.open().ok());
  CHECK(round(last, 14).status().code() == ErrorCode::not_found);
  CHECK(round(last, 15).ok());
}

TEST_CASE(
    "of two coordinators on one store that cut a round at once, one has the cut, and both give "
    "it") {
  kvmeld::stores::MemoryStore store;
  const auto options = core_options();
  Core first(store, options);
  Core second(store, options);
  REQUIRE(first.open().ok());
  REQUIRE(second.open().ok());
  const auto insert = [&](Core& core, std::uint64_t agent) {
    FragmentSet set;
    REQUIRE(kvmeld::replica::store_fragment(store, fragment(agent), options.replica.format).ok());
    REQUIRE(set.insert(fragment(agent), Dot{agent, 0, 1}).ok());
    REQUIRE(apply(core, set).ok());
  };
  insert(first, 1);
  insert(second, 2);
  kvmeld::coordinator::MergeAsk ask;
  ask.session = 5;
  ask.round = 1;
  ask.member = 1;
  ask.timeout_ms = 10;
  const kvmeld::coordinator::MergeAsk same = ask;
  REQUIRE(first.arrive(ask, 0).ok());
  REQUIRE(second.arrive(same, 0).ok());  // neither has seen a cut
  const auto one = first.poll(ask, 1);
  const auto two = second.poll(same, 1);
  REQUIRE((one && one->ok() && two && two->ok()));
  CHECK((*one)->cut.set.size() == 1);
  CHECK((*one)->cut.set.digest() == (*two)->cut.set.digest());
  first.leave(ask);
  second.leave(same);
  Core later(store, options);
  REQUIRE(later.open().ok());
  const auto again = round(later, 1);
  REQUIRE(again.ok());
  CHECK(again->cut.set.digest() == (*one)->cut.set.digest());
}

TEST_CASE("a barrier ends at its deadline, wherever the clock is set to") {
  for (const std::int64_t jump : {std::int64_t{-3'600'000}, std::int64_t{0}}) {
    kvmeld::stores::MemoryStore store;
    auto options = core_options();
    options.members = {1, 2};
    options.soft_ms = 1'000;
    Core core(store, options);
    REQUIRE(core.open().ok());
    // 0: for any other state
    for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{1}}) {
      kvmeld::coordinator::MergeAsk ask;
      ask.session = 5;
      ask.round = number;
      ask.member = 1;
      ask.timeout_ms = 100;
      std::int64_t now = 10'000'000;
      REQUIRE(core.arrive(ask, now).ok());
      now += jump;
      std::int64_t waited = 0;
      std::optional<kvmeld::Result<kvmeld::coordinator::MergeAnswer>> answer;
      for (; waited < 10'000 && !answer; waited += 10) answer = core.poll(ask, now += 10);
      core.leave(ask);
      REQUIRE(answer);
      CHECK(answer->status().code() == ErrorCode::timed_out);
      CHECK(waited <= 110);
    }
  }
}
