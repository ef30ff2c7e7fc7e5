// Two agents in one session: each tells what its engine computes, and swaps to a cache of all of
// it.
//
//   bash examples/run.sh session
//
// The network is memory here; stores::RedisStore and RedisTransport, or yours, take its place.

#include <chrono>
#include <cstdio>
#include <kvmeld/replica/session.hpp>
#include <kvmeld/stores/memory.hpp>
#include <memory>
#include <thread>
#include <vector>

#include "support/toy.hpp"

using namespace kvmeld;

struct Agent {
  stores::MemoryStore store;
  stores::MemoryTransport transport;
  replica::AgentSession<> session;  // generates from kvmeld's own memory, replica::HostMemory
  Digest128 content{};

  Agent(stores::MemoryHub& hub, replica::MemberId self, const Digest128& merger)
      : transport(toy::value(hub.join(self))),
        session(kvmeld::merger(ByDot{}), store, transport, toy::geometry(), options(self, merger)) {
  }

  static replica::AgentSession<>::Options options(replica::MemberId self, const Digest128& merger) {
    replica::AgentSession<>::Options made{.replica = {.epoch = 1, .merger = merger}};
    made.replica.self = self;
    made.replica.members = {1, 2};
    made.content_digest = true;
    return made;
  }
  // The engine decoded tokens at session.next_position(): their K/V, and their ids.
  void say(TokenId first, std::int64_t tokens) {
    const HostCache rows = toy::cache(toy::geometry(), tokens, static_cast<std::uint32_t>(first));
    toy::check(session.append(rows.kv_cache_ref(), toy::ids(first, tokens)));
    toy::check(session.end_span().status());  // sealed, told by the next poll
  }
  // Between two tokens: hear and tell, then take the newest cache if one is ready.
  void between_tokens(std::int64_t now_ms) {
    toy::check(session.poll(now_ms));
    const auto swapped = toy::value(session.try_swap());
    if (!swapped) return;
    content = swapped->render.content_digest.value();
    std::printf("agent %d: %lld tokens, content %s, go on at position %lld\n",
                static_cast<int>(transport.self()), static_cast<long long>(swapped->render.tokens),
                content.hex().c_str(), static_cast<long long>(session.next_position()));
  }
};

int main() {
  const Digest128 merger = kvmeld::merger(ByDot{}).digest();
  stores::MemoryHub hub;
  Agent alice(hub, 1, merger), bob(hub, 2, merger);
  alice.say(100, 12);
  bob.say(200, 7);
  const auto equal = [&] { return alice.content == bob.content && alice.content != Digest128{}; };
  for (std::int64_t now_ms = 0; now_ms < 10'000 && !equal(); ++now_ms) {
    alice.between_tokens(now_ms);
    bob.between_tokens(now_ms);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::puts(equal() ? "one cache at both" : "the caches differ");
  return equal() ? 0 : 1;
}
