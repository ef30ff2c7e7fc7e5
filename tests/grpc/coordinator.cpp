// Members publish to a coordinator and render what it publishes; it may be killed, doubled, or
// waited for in vain.

#include "grpc/coordinator_server.hpp"
#include "support/catch.hpp"

#include <kvmeld/fragment.hpp>

namespace {

using kvmeld::Dot;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::coordinator::CoordinatorClient;
using test::client_options;
using test::fragment;
using test::server_options;

bool equal_bytes(const Fragment& a, const Fragment& b) {
  if (a.id() != b.id() || a.payloads().size() != b.payloads().size()) return false;
  for (std::size_t p = 0; p < a.payloads().size(); ++p) {
    const auto& x = a.payloads()[p];
    const auto& y = b.payloads()[p];
    if (x.bytes == nullptr || y.bytes == nullptr || x.byte_count != y.byte_count ||
        std::memcmp(x.bytes.get(), y.bytes.get(), x.byte_count) != 0)
      return false;
  }
  return true;
}

FragmentSet set_of(std::uint64_t agent, std::initializer_list<std::uint64_t> seeds,
                   std::uint64_t first = 0) {
  FragmentSet set;
  // no checks: threads call it
  for (const std::uint64_t seed : seeds)
    (void)set.insert(fragment(seed), Dot{agent, first++, 1}, 0.5F);
  return set;
}

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

TEST_CASE("a coordinator in a process of its own", "[.serve]") {
  const std::string folder = std::getenv("KVMELD_TEST_FOLDER");
  auto store = kvmeld::stores::FileStore::open(folder + "/store");
  REQUIRE(store.ok());
  test::Server server(server_options(), *std::move(store));
  REQUIRE(server.started.ok());
  REQUIRE(test::write_text(folder + "/" + std::getenv("KVMELD_TEST_NAME"), server.address()));
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

TEST_CASE("what one member publishes another one gets, byte for byte, and each payload once") {
  auto options = server_options();
  options.replica.members = {1, 2, 1000};
  test::Server server(options);
  REQUIRE(server.started.ok());
  CoordinatorClient a(server.address(), client_options(1));
  CoordinatorClient b(server.address(), client_options(2));
  const FragmentSet ones = set_of(1, {1, 2});
  const auto published = a.publish(ones);
  REQUIRE(published.ok());
  CHECK(published->set == ones.digest());
  CHECK(a.traffic().fragments_sent == 2);

  FragmentSet mine = set_of(2, {2, 3});  // fragment 2 is here already
  const auto synced = b.sync(mine);
  REQUIRE(synced.ok());
  CHECK(*synced == *published);
  CHECK(mine.size() == 3);
  CHECK(b.traffic().fragments_fetched == 1);
  for (const auto& entry : mine.entries()) CHECK(verify_fragment(entry.fragment).ok());
  CHECK(equal_bytes(mine.payload(fragment(1).id()), fragment(1)));
  REQUIRE(b.publish(mine).ok());
  CHECK(b.traffic().fragments_sent == 1);  // the coordinator had the other two
  CHECK(b.traffic().dedup_hits == 2);

  kvmeld::stores::MemoryStore store;
  kvmeld::replica::Replica replica(
      store,
      {.self = 5, .epoch = 1, .frame = {test::test_namespace()}, .merger = test::test_merger});
  REQUIRE(a.sync(replica, store).ok());
  REQUIRE(replica.tick(1).ok());
  CHECK(replica.set().digest() == mine.digest());
  CHECK(replica.wanted() == 0);
  CHECK(equal_bytes(replica.set().payload(fragment(3).id()), fragment(3)));
  // A removal travels too, and so does what was there before it.
  REQUIRE(mine.remove(fragment(3).id(), Dot{2, 9, 1}).ok());
  const auto version = b.publish(mine);
  REQUIRE(version.ok());
  CHECK(version->set == mine.digest());
  CHECK_FALSE(server.server.core().set().removals().empty());
  FragmentSet others = ones;
  REQUIRE(a.sync(others).ok());
  CHECK(others.digest() == mine.digest());
  REQUIRE(a.sync(others).ok());  // with these, both members have said that they know of the removal
  REQUIRE(b.sync(mine).ok());
  CHECK(server.server.core().set().removals().empty());
  CHECK(server.server.core().fragment(fragment(3).id()).status().code() == ErrorCode::not_found);
}

TEST_CASE(
    "two coordinators that were given the same updates in different orders are in the same state") {
  auto options = server_options();
  options.relays = {1, 2};  // each brings what all did
  test::Server first(options);
  options.replica.self = 2000;
  test::Server second(options);
  std::vector<FragmentSet> updates{set_of(1, {1}), set_of(2, {2, 3}), set_of(3, {1, 4})};
  updates.push_back(updates[1]);
  REQUIRE(updates[3].remove(fragment(2).id(), Dot{3, 7, 1}).ok());
  updates.push_back(updates[0]);
  REQUIRE(updates[4].join(updates[2]).ok());
  REQUIRE(updates[4].supersede(fragment(1).id(), fragment(4).id(), Dot{1, 5, 1}).ok());
  CoordinatorClient to_first(first.address(), client_options(1));
  CoordinatorClient to_second(second.address(), client_options(2));
  for (const FragmentSet& update : updates) REQUIRE(to_first.publish(update).ok());
  for (std::size_t i = updates.size(); i-- > 0;) {
    REQUIRE(to_second.publish(updates[i]).ok());
    REQUIRE(to_second.publish(updates[(i + 2) % updates.size()]).ok());  // and some again
  }
  CHECK(*to_first.version() == *to_second.version());
  // Their cuts are equal too: what is rendered from them has the same content.
  const auto one = to_first.wait_for_change({}, {}, 1000);
  const auto two = to_second.wait_for_change({}, {}, 1000);
  REQUIRE(one.ok());
  REQUIRE(two.ok());
  CHECK(one->set == two->set);
  CHECK(one->version == two->version);
  CHECK(one->set.size() == 3);  // 3 and 4, and 1, which 4 replaced; 2 is removed
  CHECK(in_force(one->set).size() == 2);
}

TEST_CASE(
    "a coordinator that is killed has all that it acknowledged when it is back, the cut of a round "
    "included") {
  const test::TempFolder folder;
  const auto serve = [&](const char* name) {
    return std::make_unique<test::OtherProcess>(
        std::vector<std::string>{"/proc/self/exe", "a coordinator in a process of its own"},
        std::vector<std::pair<std::string, std::string>>{
            {"KVMELD_TEST_FOLDER", folder.path().string()}, {"KVMELD_TEST_NAME", name}});
  };
  auto process = serve("first");
  const std::string address = test::wait_for_text(folder / "first");
  REQUIRE(!address.empty());
  CoordinatorClient client(address, client_options(1));
  FragmentSet acknowledged;
  for (std::uint64_t i = 0; i < 5; ++i) {
    REQUIRE(acknowledged.insert(fragment(i), Dot{1, i, 1}).ok());
    REQUIRE(client.publish(acknowledged).ok());
  }
  const auto cut = client.wait_for_merge(77, 1, test::test_merger, acknowledged.context(), 5000);
  REQUIRE(cut.ok());
  CHECK(cut->set.digest() == acknowledged.digest());
  CHECK(cut->ready == std::vector<kvmeld::replica::MemberId>{1});
  process->end();

  FragmentSet late = set_of(2, {8});
  {
    auto options = client_options(2);
    options.timeout_ms = 300;
    CoordinatorClient in_vain(address, options);
    const auto begun = now_ms();
    const auto refused = in_vain.publish(late);
    CHECK((refused.status().code() == ErrorCode::unavailable ||
           refused.status().code() == ErrorCode::timed_out));
    CHECK(now_ms() - begun < 3000);
  }
  process = serve("second");
  const std::string again = test::wait_for_text(folder / "second");
  CoordinatorClient other(again, client_options(2));
  FragmentSet all;
  REQUIRE(other.sync(all).ok());
  CHECK(all.digest() == acknowledged.digest());
  for (const auto& entry : all.entries()) {
    CHECK(entry.complete());
    CHECK(verify_fragment(entry.fragment).ok());
  }
  REQUIRE(other.publish(late).ok());  // the state goes on, the round's cut stays
  const auto same = other.wait_for_merge(77, 1, test::test_merger, late.context(), 5000);
  REQUIRE(same.ok());
  CHECK(same->set.digest() == acknowledged.digest());
  const auto next = other.wait_for_merge(77, 2, test::test_merger, late.context(), 5000);
  REQUIRE(next.ok());
  CHECK(next->set.size() == 6);
}

TEST_CASE(
    "a round waits for all its members, then for a quorum, and for nobody beyond the deadline") {
  auto options = server_options();
  options.members = {1, 2, 3};
  options.soft_ms = 300;
  test::Server server(options);
  REQUIRE(server.started.ok());
  const auto wait = [&](kvmeld::replica::MemberId self, std::uint64_t round,
                        std::int64_t timeout_ms, kvmeld::Digest128 merger = test::test_merger) {
    CoordinatorClient client(server.address(), client_options(self));
    const FragmentSet mine = set_of(self, {self * 10 + round}, round);
    if (const auto published = client.publish(mine); !published)
      return kvmeld::Result<kvmeld::coordinator::MergedCut>(published.error());
    return client.wait_for_merge(5, round, merger, mine.context(), timeout_ms);
  };
  SECTION("all three") {
    kvmeld::Result<kvmeld::coordinator::MergedCut> cuts[3] = {kvmeld::Status(), kvmeld::Status(),
                                                              kvmeld::Status()};
    std::vector<std::thread> members;
    const auto begun = now_ms();
    for (std::size_t m = 0; m < 3; ++m)
      members.emplace_back([&, m] { cuts[m] = wait(m + 1, 1, 10'000); });
    for (std::thread& member : members) member.join();
    for (const auto& cut : cuts) {
      REQUIRE(cut.ok());
      CHECK(cut->set.size() == 3);
      CHECK(cut->version == cuts[0]->version);
      CHECK(cut->version.merger == test::test_merger);
      CHECK(cut->ready == std::vector<kvmeld::replica::MemberId>{1, 2, 3});
    }
    CHECK(now_ms() - begun < 5000);
  }
  SECTION("two of three, after the soft deadline; the straggler gets the same cut") {
    kvmeld::Result<kvmeld::coordinator::MergedCut> other = kvmeld::Status();
    std::thread second([&] { other = wait(2, 1, 10'000); });
    const auto cut = wait(1, 1, 10'000);
    second.join();
    REQUIRE(cut.ok());
    REQUIRE(other.ok());
    CHECK(cut->ready == std::vector<kvmeld::replica::MemberId>{1, 2});
    const auto late = wait(3, 1, 1000);
    REQUIRE(late.ok());
    CHECK(late->version == cut->version);
    CHECK(late->set == other->set);
  }
  SECTION("one alone, until its deadline") {
    const auto begun = now_ms();
    const auto cut = wait(1, 1, 700);
    CHECK(cut.status().code() == ErrorCode::timed_out);
    CHECK(cut.status().message().find("not there: 2, 3") != std::string::npos);
    CHECK(now_ms() - begun >= 690);
    CHECK(now_ms() - begun < 3000);
  }
  SECTION("no stranger, and no other merger") {
    CHECK(wait(9, 1, 1000).status().code() == ErrorCode::invalid_argument);
    kvmeld::Status alone;
    std::thread first([&] { alone = wait(1, 1, 4000).status(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    const auto refused = wait(2, 1, 1000, {1, 1});
    CHECK(refused.status().code() == ErrorCode::merger_mismatch);
    CHECK(refused.status().message().find(test::test_merger.hex()) != std::string::npos);
    first.join();
    CHECK(alone.code() == ErrorCode::timed_out);
  }
  SECTION("a member that hangs up is not there any more") {
    kvmeld::Status alone;
    std::thread first([&] { alone = wait(1, 1, 1500).status(); });
    auto two = client_options(2);
    const auto stub = kvmeld::rpc::v1::Coordinator::NewStub(
        grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.AddMetadata("kvmeld-namespace-bin",
                        kvmeld::coordinator::detail::namespace_bytes(two.frame.scope));
    context.AddMetadata("kvmeld-token-bin", *kvmeld::coordinator::detail::make_token(
                                                two.frame, 2, std::time(nullptr) + 60));
    kvmeld::rpc::v1::MergeRequest request;
    request.set_session(5);
    request.set_round(1);
    request.set_merger(kvmeld::coordinator::detail::namespace_bytes(test::test_merger));
    request.set_context(kvmeld::coordinator::detail::to_field(kvmeld::CausalContext()));
    request.set_timeout_ms(60'000);
    kvmeld::rpc::v1::MergeReply reply;
    std::thread canceller([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      context.TryCancel();
    });
    CHECK(stub->WaitForMerge(&context, request, &reply).error_code() ==
          grpc::StatusCode::CANCELLED);
    canceller.join();
    first.join();
    CHECK(alone.code() == ErrorCode::timed_out);
    CHECK(alone.message().find("1 members are ready") != std::string::npos);
  }
}

TEST_CASE("whoever waits for a change is told of the first one") {
  test::Server server(server_options());
  CoordinatorClient waiting(server.address(), client_options(1));
  const auto known = waiting.version();
  REQUIRE(known.ok());
  CHECK(waiting.wait_for_change(known->set, {}, 100).status().code() == ErrorCode::timed_out);
  bool published = false;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CoordinatorClient client(server.address(), client_options(2));
    published = client.publish(set_of(2, {5})).ok();
  });
  const auto changed = waiting.wait_for_change(known->set, {}, 10'000);
  other.join();
  CHECK(published);
  REQUIRE(changed.ok());
  CHECK(changed->set.size() == 1);
  CHECK(changed->round == 0);

  // What has no payload is in the state and in no cut; who passes back what it got waits all the
  // same.
  CoordinatorClient other_client(server.address(), client_options(2));
  FragmentSet more = set_of(2, {5, 6});
  REQUIRE(more.supersede(fragment(5).id(), fragment(6).id(), Dot{2, 7, 1}).ok());
  REQUIRE(more.insert(fragment(7), Dot{2, 8, 1}).ok());
  REQUIRE(more.evict(fragment(7).id()).ok());
  CHECK(other_client.publish(more).status().code() == ErrorCode::payload_missing);
  const auto partial = waiting.wait_for_change(changed->state, {}, 10'000);
  REQUIRE(partial.ok());
  CHECK(partial->set.size() == 2);  // 6, and 5, which it replaced
  CHECK(in_force(partial->set).size() == 1);
  CHECK(partial->state == more.digest());
  CHECK(partial->version.set != partial->state);
  CHECK(waiting.wait_for_change(partial->state, {}, 100).status().code() == ErrorCode::timed_out);
}

TEST_CASE("a payload that the coordinator lacked at first reaches a replica with a later sync") {
  test::Server server(server_options());
  CoordinatorClient client(server.address(), client_options(1));
  FragmentSet bare = set_of(1, {1});
  REQUIRE(bare.evict(fragment(1).id()).ok());
  CHECK(client.publish(bare).status().code() == ErrorCode::payload_missing);
  kvmeld::stores::MemoryStore store;
  kvmeld::replica::Replica replica(
      store,
      {.self = 5, .epoch = 1, .frame = {test::test_namespace()}, .merger = test::test_merger});
  CoordinatorClient fifth(server.address(), client_options(5));
  REQUIRE(fifth.sync(replica, store).ok());
  CHECK(replica.wanted() == 1);
  REQUIRE(client.publish(set_of(1, {1})).ok());
  REQUIRE(fifth.sync(replica, store).ok());
  REQUIRE(replica.tick(1).ok());
  REQUIRE(replica.tick(100'000).ok());
  CHECK(replica.wanted() == 0);
  CHECK(equal_bytes(replica.set().payload(fragment(1).id()), fragment(1)));
}

TEST_CASE("an entry without provenance is published, though no context tells of it") {
  test::Server server(server_options());
  CoordinatorClient client(server.address(), client_options(1));
  FragmentSet set = set_of(1, {1});
  REQUIRE(client.publish(set).ok());
  REQUIRE(set.insert(fragment(1)).ok());  // the payload is there, and the context is equal
  REQUIRE(set.digest() != server.server.core().version().set);
  REQUIRE(client.publish(set).ok());
  CHECK(server.server.core().version().set == set.digest());
}

namespace {
struct SlowStore : kvmeld::stores::MemoryStore {
  kvmeld::Result<bool> put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return kvmeld::stores::MemoryStore::put(key, bytes);
  }
};
}  // namespace

TEST_CASE("a call has one deadline, however many requests it takes") {
  test::Server<SlowStore> server(server_options());
  REQUIRE(server.started.ok());
  FragmentSet many;
  for (std::uint64_t i = 0; i < 40; ++i) REQUIRE(many.insert(fragment(i, 2), Dot{1, i, 1}).ok());
  auto options = client_options(1);
  options.timeout_ms = 600;
  // each fragment goes in an update of its own, and takes 60 ms or more
  options.max_update_bytes = 1;
  CoordinatorClient client(server.address(), options);
  const auto begun = now_ms();
  CHECK(client.publish(many).status().code() == ErrorCode::timed_out);
  CHECK(now_ms() - begun < 1500);
  CHECK(client.traffic().fragments_sent < 12);
}
