#pragma once

/// What the agents of a simulation do, and what goes wrong meanwhile.

#include <kvmeld/testing/simulation.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// One thing that some agent does.
template <class Node>
void Simulation<Node>::operate() {
  Member* const member = any_up();
  if (member == nullptr) return;
  ++report_.events;
  Node& replica = *member->replica;
  const Digest256 before = replica.set().digest();
  const std::size_t what = random_.below(20);
  Operation operation;
  operation.dot = {member->id, Operation::unknown_sequence, member->epoch};
  if (what < 11 || replica.set().empty()) {
    const Fragment& f = corpus_[random_.below(corpus_.size())];
    operation.id = f.id();
    if (random_.chance(0.6))
      operation.confidence = 0.25F * static_cast<float>(1 + random_.below(4));
    record(operation, replica.insert(f, operation.confidence, now_), before, *member);
    return flush(*member);
  }
  auto at = replica.set().entries().begin();
  for (std::size_t i = random_.below(replica.set().size()); i > 0; --i) ++at;
  operation.id = at->id;
  if (what < 13) {
    operation.kind = Operation::Kind::supersede;
    operation.successor = corpus_[random_.below(corpus_.size())].id();
    if (operation.successor != operation.id)
      record(operation, replica.supersede(operation.id, operation.successor), before, *member);
  } else if (what < 16) {
    operation.kind = Operation::Kind::remove;
    for (const Mark& mark : at->metadata.marks) operation.observed.push_back(mark.dot);
    record(operation, replica.remove(operation.id), before, *member);
  } else if (what < 19) {
    if (const Status evicted = replica.evict(operation.id); !evicted.ok())
      fail("an eviction failed: " + evicted.message());
    ++report_.evicted;
    say("member ", member->id, " evicts ", operation.id.hex().substr(0, 8));
  } else if (const Status wanted = replica.fetch(operation.id); !wanted.ok()) {
    fail("a fetch failed: " + wanted.message());
  }
  flush(*member);
}

template <class Node>
void Simulation<Node>::record(Operation operation, const Result<Provenance>& done,
                              const Digest256& before, const Member& member) {
  if (done.ok()) {
    if (done->agent != member.id || done->epoch != member.epoch)
      fail("agent " + detail::decimal(member.id) + " was given the dot of another life");
    operation.acknowledged = true;
    operation.dot = *done;
    ++(operation.kind == Operation::Kind::insert   ? report_.inserted
       : operation.kind == Operation::Kind::remove ? report_.removed
                                                   : report_.superseded);
    say(History::text(operation));
    if (!history_.add(operation))
      fail("the dot of agent " + History::text(*done) + " was given out twice");
    return;
  }
  say("member ", member.id, " fails: ", done.error().message());
  if (member.replica->set().digest() != before)
    fail("an operation failed (" + done.error().message() + ") and the set changed");
  const ErrorCode code = done.error().code();
  if (code == ErrorCode::unavailable) {
    ++report_.unconfirmed;
    (void)history_.add(operation);
  } else if (code == ErrorCode::dot_reused && insider_) {
    // A member said that it has seen operations of this life that were not done yet: the next tick
    // starts another.
  } else if (code != ErrorCode::store_full) {
    fail("an operation failed: " + done.error().message());
  }
}

/// What goes wrong in the next milliseconds.
template <class Node>
void Simulation<Node>::disturb(std::int64_t ms) {
  const Faults& f = options_.faults;
  if (now_ >= next_snapshot_) {
    next_snapshot_ = now_ + 700;
    for (Member& member : members_) {
      if (!member.gone) member.snapshots.push_back(*member.store->disk());
    }
  }
  if (partition_until_ != 0 && now_ >= partition_until_) {
    partition_until_ = 0;
    network_.heal();
    say("the network heals");
  }
  if (partition_until_ == 0 && once(f.partition, ms)) {
    partition_until_ = now_ + random_.between(300, 3'000);
    for (const Member& member : members_) network_.set_side(member.id, random_.chance(0.5));
    count(Fault::partition);
    say("the network falls apart");
  }
  if (liar_ && once(f.liar, ms)) {
    if (const Member* const victim = any_up()) {
      const Member* const other = any_up();
      const Liar::Lie lie = liar_->act({victim->id, victim->epoch}, {other->id, other->epoch});
      if (lie.at_once)
        deliver({Liar::id, lie.to, lie.frame});
      else
        network_.send(now_, Liar::id, lie.to, lie.frame);
    }
  }
  if (once(f.join, ms) && up().size() < options_.most_replicas + 2) join();
  if (once(f.leave, ms)) leave();
  if (!to_upgrade_.empty() && now_ >= next_upgrade_) upgrade();
  for (Member& member : members_) {
    if (!member.gone && report_.ok()) disturb(member, ms);
  }
}

template <class Node>
void Simulation<Node>::disturb(Member& member, std::int64_t ms) {
  const Faults& f = options_.faults;
  member.store->refused = f.write_refused;
  member.store->in_doubt = f.write_in_doubt;
  if (once(f.slow_peer, ms)) {
    member.slow_until = now_ + random_.between(500, 2'000);
    count(Fault::slow_peer);
  }
  if (once(f.clock_jump, ms)) {
    member.clock +=
        random_.chance(0.5) ? random_.between(1, 10'000'000) : -random_.between(1, 10'000'000);
    count(Fault::clock_jump);
  }
  if (once(f.disk_full, ms)) {
    member.full_until = now_ + random_.between(200, 1'500);
    count(Fault::disk_full);
  }
  if (once(f.store_unavailable, ms)) {
    member.unavailable_until = now_ + random_.between(200, 1'500);
    count(Fault::store_unavailable);
  }
  if (once(f.bit_rot, ms)) {
    SimulatedDisk& disk = *member.store->disk();
    if (disk.rot(random_)) count(Fault::bit_rot);
    for (const auto& [key, blob] : disk.blobs) {
      if (blob.rotten()) lost_keys_.insert(key);
    }
    for (const auto& [number, rotten] : disk.records) {
      if (!rotten.rotten()) continue;
      if (const auto set = decode_record(*rotten.written)) {
        member.rotten.join(set->context());
        lost_.join(set->context());
      }
    }
  }
  if (!member.up()) return;
  if (once(f.torn_write, ms)) member.store->dies_in = 1 + random_.below(6);
  if (once(f.crash, ms)) {
    count(Fault::crash);
    crash(member, "between two calls");
  }
}

/// A member that nobody has heard of starts with an empty disk, or with its first look at the
/// shared one.
template <class Node>
void Simulation<Node>::join() {
  Member& member = members_.emplace_back();
  member.id = next_member_++;
  member.store = std::make_unique<SimulatedStore>(
      shared_disk_ != nullptr ? shared_disk_ : std::make_shared<SimulatedDisk>(), random_.next());
  member.store->counts = &report_.faults;
  member.max_records = 4 + random_.below(40);
  count(Fault::join);
  set_members();
  start(member);
}

/// A member leaves with its disk.
template <class Node>
void Simulation<Node>::leave() {
  const std::vector<Member*> all = up();
  if (all.size() < 3) return;
  Member& member = *all[random_.below(all.size())];
  say("member ", member.id, " leaves");
  sum_counters(*member.replica);
  member.replica.reset();
  member.gone = true;
  if (shared_disk_ == nullptr) lose(*member.store->disk());
  count(Fault::leave);
  set_members();
}

/// The next member restarts with the newer merger.
template <class Node>
void Simulation<Node>::upgrade() {
  next_upgrade_ = now_ + random_.between(200, 800);
  Member& member = members_[to_upgrade_.back()];
  to_upgrade_.pop_back();
  if (member.gone) return;
  member.upgraded = true;
  count(Fault::merger_upgrade);
  if (member.up()) crash(member, "for an upgrade");
}

}  // namespace testing
KVMELD_NAMESPACE_END
