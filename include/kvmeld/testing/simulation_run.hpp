#pragma once

/// A simulation from its first event to its report.

#include <kvmeld/align/token_match.hpp>
#include <kvmeld/testing/simulation.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

template <class Node>
Simulation<Node>::Simulation(std::uint64_t seed, Options options)
    : options_(std::move(options)),
      random_(seed * 0x2545F4914F6CDD1DULL + 1),
      network_(random_.next(), report_.faults) {
  report_.seed = seed;
  report_.runs = 1;
}

template <class Node>
template <class... Mergers>
Report Simulation<Node>::run(const Mergers&... mergers) {
  Hasher hasher;
  hasher.text("kvmeld.testing.mergers");
  (hasher.value(mergers.digest().low), ...);
  merger_ = hasher.digest();
  set_up();
  const auto going = [&] { return report_.ok(); };
  while (now_ < options_.active_ms && going()) {
    if (once(options_.operations_per_second, 10)) operate();
    disturb(10);
    step(10);
  }
  if (going()) heal();
  const std::int64_t healed = now_;
  // What was under way arrives first, so that it is known what is lost.
  while (now_ < healed + 6'000 && going()) step(50);
  if (going()) account_losses();
  while (!agreed() && now_ < healed + options_.healing_ms && going()) step(50);
  report_.healed_after_ms = static_cast<std::uint64_t>(now_ - healed);
  if (going()) check_sets();
  if (going()) check_rest();
  if (going()) check_mergers();
  (check_rendered(mergers), ...);
  check_rendered(merger());
  check_rendered(merger(ById{}, Aligner{TokenMatch{}},
                        Fuser{WeightedMean{.weighting = Weighting::confidence}}));
  for (Member* member : up()) sum_counters(*member->replica);
  report_.messages = network_.sent();
  report_.cut_off = network_.cut_off();
  return report_;
}

template <class Node>
void Simulation<Node>::set_up() {
  if (options_.swarm) {
    Faults& f = options_.faults;
    for (double* each : {&f.drop,         &f.duplicate,     &f.reorder,       &f.delay,
                         &f.truncate,     &f.bit_flip,      &f.write_refused, &f.write_in_doubt,
                         &f.partition,    &f.slow_peer,     &f.crash,         &f.torn_write,
                         &f.old_snapshot, &f.clock_jump,    &f.disk_full,     &f.store_unavailable,
                         &f.bit_rot,      &f.liar,          &f.insider,       &f.join,
                         &f.leave,        &f.merger_upgrade}) {
      if (random_.chance(0.35)) *each = 0;
    }
  }
  network_.faults = options_.faults;
  corpus_ = options_.corpus;
  if (corpus_.empty()) {
    auto made = make_corpus(small_geometry(), 20, random_.next());
    if (!made) return fail("the corpus: " + made.error().message());
    corpus_ = *std::move(made);
  }
  chunk_bytes_ = random_.chance(0.5) ? 256 : 1024;
  max_message_bytes_ = random_.chance(0.5) ? 1536 : std::size_t{1} << 20U;
  for (const Fragment& f : corpus_) {
    const auto manifest = make_manifest(f, chunk_bytes_);
    if (!manifest) return fail("the corpus: " + manifest.error().message());
    std::vector<BlobKey>& keys = keys_.emplace_back(1, manifest_key(f.id()));
    for (const auto& chunks : manifest->chunks)
      keys.insert(keys.end(), chunks.begin(), chunks.end());
  }
  if (options_.shared_store.value_or(random_.chance(0.3)))
    shared_disk_ = std::make_shared<SimulatedDisk>();
  if (options_.faults.liar > 0) {
    insider_ = random_.chance(options_.faults.insider);
    liar_.emplace(random_.next(), corpus_, chunk_bytes_, max_operations_, insider_, report_.faults);
  }
  const std::size_t replicas = options_.fewest_replicas +
                               random_.below(options_.most_replicas - options_.fewest_replicas + 1);
  for (std::size_t i = 0; i < replicas; ++i) join();
  report_.faults[Fault::join] = 0;  // these do not count
  if (random_.chance(options_.faults.merger_upgrade)) {
    for (std::size_t i = 0; i < 1 + random_.below(replicas); ++i) to_upgrade_.push_back(i);
    next_upgrade_ = random_.between(1'000, options_.active_ms / 2 + 1'000);
  }
}

/// Lets time pass: messages arrive, and whoever is due ticks or starts.
template <class Node>
void Simulation<Node>::step(std::int64_t ms) {
  now_ += ms;
  while (auto delivery = network_.receive(now_)) {
    if (!report_.ok()) return;
    deliver(*delivery);
  }
  for (Member& member : members_) {
    if (member.gone || !report_.ok()) continue;
    if (!member.up() && member.starts_at <= now_) start(member);
    if (member.up() && member.next_tick <= now_) tick(member);
  }
}

template <class Node>
void Simulation<Node>::deliver(const Delivery& delivery) {
  if (delivery.to == Liar::id) {
    for (const Liar::Lie& lie : liar_->hear(delivery))
      network_.send(now_, Liar::id, lie.to, lie.frame);
    return;
  }
  Member& member = members_[static_cast<std::size_t>(delivery.to)];
  if (!member.up()) return;
  ++report_.events;
  Hasher hasher;
  hasher.value(report_.fingerprint);
  hasher.value(delivery.from);
  hasher.value(delivery.to);
  hasher.bytes(delivery.bytes);
  report_.fingerprint = hasher.digest().low;
  const Digest256 before = member.replica->set().digest();
  const CausalContext seen = member.replica->set().context();
  const auto taken = member.replica->receive(delivery.from, delivery.bytes);
  const FragmentSet& after = member.replica->set();
  if (options_.trace != nullptr) {
    say("member ", member.id, " gets ", describe(delivery.bytes), " from ", delivery.from,
        taken.ok() ? std::string() : ", refused: " + taken.error().message());
  }
  const ErrorCode code = taken.status().code();
  const bool in_part = code == ErrorCode::quota_exceeded || code == ErrorCode::dot_reused;
  if (!taken.ok() && !in_part && (after.digest() != before || after.context() != seen)) {
    fail(kvmeld::detail::error(ErrorCode::corrupt, "member ", member.id, " refused a message (",
                               taken.error().message(), ") and its set changed")
             .message());
  }
  if (!leq(seen, after.context()))
    fail("member " + detail::decimal(member.id) + " forgot an operation that it had seen");
  flush(member);
}

template <class Node>
void Simulation<Node>::tick(Member& member) {
  ++report_.events;
  const bool slow = member.slow_until > now_;
  member.next_tick = now_ + (slow ? random_.between(300, 900) : random_.between(30, 70));
  network_.set_slowness(member.id, slow ? 300 : 0);
  member.store->full = member.full_until > now_;
  member.store->unavailable = member.unavailable_until > now_;
  const Status status = member.replica->tick(now_ + member.clock);
  if (!status.ok() && options_.trace != nullptr)
    say("member ", member.id, " ticks: ", status.message());
  report_.other_mergers += member.replica->other_mergers().size();
  flush(member);
  if (!member.up()) return;
  for (const AgentLife& life : member.replica->reused_lives()) {
    const bool own = life == AgentLife{member.id, member.epoch};
    if (!own || !insider_) {
      return fail("member " + kvmeld::detail::decimal(member.id) + " says that a dot of agent " +
                  kvmeld::detail::decimal(life.agent) + " was used twice");
    }
    return crash(member, "since a member says that its dots are in use elsewhere");
  }
}

/// Sends what a member has to say, unless its process ended in the call before.
template <class Node>
void Simulation<Node>::flush(Member& member) {
  if (member.store->crashed()) return crash(member, "in a write");
  for (const Outgoing& out : member.replica->take_outbox()) {
    if (out.to != everyone) {
      network_.send(now_, member.id, out.to, out.bytes);
      continue;
    }
    for (const Member& other : members_) {
      if (!other.gone && other.id != member.id) network_.send(now_, member.id, other.id, out.bytes);
    }
    if (liar_) network_.send(now_, member.id, Liar::id, out.bytes);
  }
}

}  // namespace testing
KVMELD_NAMESPACE_END
