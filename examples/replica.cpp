// Two replicas of one set over a network that loses messages; one dies and finds its words again.
//
//   bash examples/run.sh replica

#include <cstdio>
#include <filesystem>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/file.hpp>
#include <kvmeld/stores/memory.hpp>
#include <memory>

#include "support/toy.hpp"

using namespace kvmeld;

struct Member {
  stores::FileStore store;  // what was said survives this process
  stores::MemoryTransport transport;
  std::unique_ptr<replica::Replica> replica;
  int told = 0;

  Member(stores::MemoryHub& hub, const std::filesystem::path& folder, replica::MemberId self)
      : store(toy::value(stores::FileStore::open({.path = folder.string()}))),
        transport(toy::value(hub.join(self))) {
    replica::Replica::Options options{.self = self,
                                      .epoch = toy::value(replica::claim_epoch(store, self)),
                                      .merger = kvmeld::merger(ByDot{}).digest()};
    options.members = {1, 2};
    replica = std::make_unique<replica::Replica>(store, std::move(options));
    toy::check(replica->open());
  }
  void say(TokenId first, std::int64_t tokens) {
    const HostCache rows = toy::cache(toy::geometry(), tokens, static_cast<std::uint32_t>(first));
    const auto ids = toy::ids(first, tokens);
    toy::check(replica->insert(toy::value(seal(rows.kv_cache_ref(), {.tokens = ids}))).status());
  }
  void step(std::int64_t now_ms) {  // hear, tick, tell; of what is told every third message is lost
    if (const auto heard = toy::value(transport.receive(0)))
      (void)replica->receive(heard->from, heard->bytes);
    toy::check(replica->tick(now_ms));
    for (const replica::Outgoing& out : replica->take_outbox())
      if (++told % 3 != 0) toy::check(transport.send(out.to, out.bytes));
  }
};

int main() {
  const auto folder = std::filesystem::temp_directory_path() / "kvmeld_example_replica";
  std::filesystem::remove_all(folder);
  for (const char* name : {"alice", "bob"}) std::filesystem::create_directories(folder / name);
  stores::MemoryHub hub;
  auto alice = std::make_unique<Member>(hub, folder / "alice", 1);
  Member bob(hub, folder / "bob", 2);
  alice->say(100, 12);
  bob.say(200, 7);
  alice.reset();  // before anybody heard of it
  alice = std::make_unique<Member>(hub, folder / "alice", 1);
  std::printf("alice is back with %zu of her fragments\n", alice->replica->set().size());
  std::int64_t now_ms = 0;
  const auto equal = [&] {
    return alice->replica->set().size() == 2 &&
           alice->replica->wanted() + bob.replica->wanted() == 0 &&
           alice->replica->set().digest() == bob.replica->set().digest();
  };
  for (; now_ms < 600'000 && !equal(); now_ms += 10) {
    alice->step(now_ms);
    bob.step(now_ms);
  }
  HostCache cache(toy::geometry(), 19);
  const auto report = toy::value(render(exec::cpu, bob.replica->set(), kvmeld::merger(ByDot{}),
                                        cache.mutable_ref(), {}, {.content_digest = true}));
  std::printf(
      "after %lld ms of simulated time one set at both; a cache of %lld tokens, content %s\n",
      static_cast<long long>(now_ms), static_cast<long long>(report.tokens),
      report.content_digest->hex().c_str());
  std::filesystem::remove_all(folder);
  return equal() ? 0 : 1;
}
