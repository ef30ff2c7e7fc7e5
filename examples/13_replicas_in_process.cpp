// Two replicas of one set in one process: a third of the messages is lost, and both end with the
// same set and render the same cache. No server and no second process is needed.
//
//   bash examples/run.sh 13

#include <cstdio>
#include <memory>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/memory.hpp>

namespace {

using namespace kvmeld;

/// An agent's part of the conversation: two layers, five tokens, its own values.
Fragment said(const std::shared_ptr<const Geometry>& geometry, float value) {
  HostCache cache(geometry, 5);
  auto* values = reinterpret_cast<float*>(cache.bytes().data());
  for (std::size_t i = 0; i < cache.bytes().size() / sizeof(float); ++i)
    values[i] = value + static_cast<float>(i % 7) / 8;
  return *seal(cache.kv_cache_ref());
}

/// Gives `to` what `from` has to say, except for every third message.
void deliver(replica::Replica& from, replica::MemberId name, replica::Replica& to, int& messages) {
  for (const replica::Outgoing& out : from.take_outbox())
    if (++messages % 3 != 0) (void)to.receive(name, out.bytes);
}

Result<Digest128> rendered(const FragmentSet& set, const std::shared_ptr<const Geometry>& form) {
  HostCache out(form, 10);
  const auto report =
      render(exec::cpu, set, merger(), out.mutable_ref(), {}, {.content_digest = true});
  if (!report) return report.error();
  return *report->content_digest;
}

}  // namespace

int main() {
  auto geometry = std::make_shared<Geometry>();
  geometry->layers.assign(2, attention_layer(ElementType::f32, 2, 64,
                                             RopeSpec::rotary(64, 1e4, RopePairing::half_split)));

  stores::MemoryStore first, second;
  const auto life1 = replica::claim_epoch(first, 1), life2 = replica::claim_epoch(second, 2);
  if (!life1 || !life2) return 1;
  replica::Replica alice(first, {.self = 1, .epoch = *life1, .merger = merger().digest()});
  replica::Replica bob(second, {.self = 2, .epoch = *life2, .merger = merger().digest()});
  if (!alice.open().ok() || !bob.open().ok()) return 1;
  if (!alice.insert(said(geometry, 1)) || !bob.insert(said(geometry, -1))) return 1;

  int messages = 0;
  std::int64_t now_ms = 0;
  const auto equal = [&] {
    return alice.set().size() == 2 && alice.set().digest() == bob.set().digest() &&
           alice.wanted() + bob.wanted() == 0;
  };
  for (; !equal() && now_ms < 60'000; now_ms += 50) {  // the caller is the clock
    if (!alice.tick(now_ms).ok() || !bob.tick(now_ms).ok()) return 1;
    deliver(alice, 1, bob, messages);
    deliver(bob, 2, alice, messages);
  }
  const auto a = rendered(alice.set(), geometry), b = rendered(bob.set(), geometry);
  if (!a || !b) return 1;
  std::printf("%d messages, %d lost, %lld ms of the replicas' time\nalice %s\nbob   %s\n", messages,
              messages / 3, static_cast<long long>(now_ms), a->hex().c_str(), b->hex().c_str());
  const bool same = equal() && *a == *b;
  std::puts(same ? "one cache on both" : "the replicas differ");
  return same ? 0 : 1;
}
