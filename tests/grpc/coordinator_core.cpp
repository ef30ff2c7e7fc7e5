// A coordinator without a network: what it admits, what updates may take together, and that a round has one cut whatever happens.

#include <optional>

#include <kvmeld/transport/coordinator.hpp>
#include <kvmeld/transport/memory_store.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::Provenance;
using Core = kvmeld::Coordinator<kvmeld::MemoryStore>;

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 20) {
  return test::sealed(test::geometry({.layers = 2, .heads = 2, .channels = 32}), tokens, seed, {.tokens = test::token_ids(tokens)}).fragment;
}
kvmeld::CoordinatorOptions<> core_options() {
  kvmeld::CoordinatorOptions<> options{.replica = {.epoch = 1, .merger = kvmeld::does_not_render}};
  options.replica.self = 1000;
  options.replica.epoch = 1;
  options.quorum = 1;
  options.soft_ms = 0;
  return options;
}
kvmeld::Status apply(Core& core, const FragmentSet& set) {
  auto update = core.begin_update();
  KVMELD_TRY(update.add_set(encode_set(set)));
  KVMELD_TRY(update.end(update.items()));
  return core.apply(update).status();
}
kvmeld::Result<kvmeld::MergeAnswer> round(Core& core, std::uint64_t number) {
  kvmeld::MergeAsk ask;
  ask.session = 5;
  ask.round = number;
  ask.member = 1;
  ask.timeout_ms = 10;
  KVMELD_TRY(core.arrive(ask, 0));
  const auto answer = core.poll(ask, 10);
  core.leave(ask);
  return answer ? *answer : kvmeld::Result<kvmeld::MergeAnswer>(kvmeld::Status(ErrorCode::timed_out, "no answer"));
}

}  // namespace

TEST_CASE("an entry or a context that would fit into no message is refused, and everybody goes on") {
  kvmeld::MemoryStore store;
  auto options = core_options();
  options.max_marks = 100;
  options.max_ranges = 50;
  Core core(store, options);
  REQUIRE(core.open().ok());
  FragmentSet marks, more, gaps;
  for (std::uint64_t i = 0; i < 100; ++i) REQUIRE(marks.insert(fragment(1), Provenance{1, i, 1}).ok());
  REQUIRE(apply(core, marks).ok());
  CHECK(apply(core, marks).ok());  // nothing new in it
  REQUIRE(more.insert(fragment(1), Provenance{2, 0, 1}).ok());
  CHECK(apply(core, more).code() == ErrorCode::quota_exceeded);
  for (std::uint64_t i = 0; i < 50; ++i) REQUIRE(gaps.insert(fragment(2 + i % 10), Provenance{3, 2 * i, 1}).ok());
  CHECK(apply(core, gaps).code() == ErrorCode::quota_exceeded);
  CHECK(core.set().digest() == marks.digest());
  CHECK(core.deltas({}).ok());

  // Messages bound it too.
  kvmeld::MemoryStore other;
  options = core_options();
  options.replica.max_message_bytes = 1 << 13;
  options.replica.format.chunk_bytes = 1000;
  Core small(other, options);
  REQUIRE(small.open().ok());
  CHECK(apply(small, marks).code() == ErrorCode::quota_exceeded);
  CHECK(small.deltas({}).ok());
}

TEST_CASE("updates on their way in have one budget together, and give back what they took") {
  kvmeld::MemoryStore store;
  auto options = core_options();
  options.max_updates_bytes = 50'000;
  Core core(store, options);
  REQUIRE(core.open().ok());
  const Fragment f = fragment(1, 30);  // 30 KiB
  const auto manifest = kvmeld::encode_manifest(f);
  REQUIRE(manifest.ok());
  {
    auto stalled = core.begin_update();
    REQUIRE(stalled.add_manifest(f.id(), *manifest).ok());
    auto second = core.begin_update();
    const auto refused = second.add_manifest(f.id(), *manifest);
    CHECK(refused.code() == ErrorCode::quota_exceeded);
    CHECK(refused.message().find("all updates together") != std::string::npos);
  }
  auto third = core.begin_update();
  CHECK(third.add_manifest(f.id(), *manifest).ok());
}

TEST_CASE("a round that is over and forgotten gets no second cut, from this coordinator, a later one, or another on its store") {
  kvmeld::MemoryStore store;
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
      REQUIRE(set.insert(fragment(number), Provenance{1, number, 1}).ok());
      REQUIRE(apply(core, set).ok());
      REQUIRE(round(core, number).ok());
    }
    for (std::uint64_t number = 1; number <= 12; ++number) CHECK(round(core, number).status().code() == ErrorCode::not_found);
    CHECK(round(core, 13).ok());
  }
  Core again(store, options);
  REQUIRE(again.open().ok());
  for (Core* const core : {&again, &other}) {
    for (std::uint64_t number = 2; number <= 12; ++number) CHECK(round(*core, number).status().code() == ErrorCode::not_found);
    for (std::uint64_t number = 13; number <= 20; ++number) CHECK(round(*core, number).ok());
  }
  for (std::uint64_t number = 1; number <= 12; ++number) CHECK_FALSE(*store.contains(kvmeld::detail::coordinator_cut_key(5, number)));
  CHECK(round(again, 21).ok());
  CHECK(round(other, 22).ok());
  Core last(store, options);  // the others may still have the cut of 14 in memory
  REQUIRE(last.open().ok());
  CHECK(round(last, 14).status().code() == ErrorCode::not_found);
  CHECK(round(last, 15).ok());
}

TEST_CASE("a barrier ends at its deadline, wherever the clock is set to") {
  for (const std::int64_t jump : {std::int64_t{-3'600'000}, std::int64_t{0}}) {
    kvmeld::MemoryStore store;
    auto options = core_options();
    options.members = {1, 2};
    options.soft_ms = 1'000;
    Core core(store, options);
    REQUIRE(core.open().ok());
    for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{1}}) {  // 0: for any other state
      kvmeld::MergeAsk ask;
      ask.session = 5;
      ask.round = number;
      ask.member = 1;
      ask.timeout_ms = 100;
      std::int64_t now = 10'000'000;
      REQUIRE(core.arrive(ask, now).ok());
      now += jump;
      std::int64_t waited = 0;
      std::optional<kvmeld::Result<kvmeld::MergeAnswer>> answer;
      for (; waited < 10'000 && !answer; waited += 10) answer = core.poll(ask, now += 10);
      core.leave(ask);
      REQUIRE(answer);
      CHECK(answer->status().code() == ErrorCode::timed_out);
      CHECK(waited <= 110);
    }
  }
}
