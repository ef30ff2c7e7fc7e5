#pragma once

/// Processes and disks of a simulation, and the words in which it tells what happens.

#include <cstring>
#include <iterator>

#include <kvmeld/testing/simulation.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

template <class Node>
void Simulation<Node>::start(Member& member) {
  do {
    member.epoch = random_.next();  // clocks jump, so epochs do not ascend
  } while (!epochs_.insert(member.epoch).second);
  Digest128 merger = merger_;
  if (member.upgraded) ++merger.low;
  typename Node::Options o{.self = member.id, .epoch = member.epoch, .merger = merger};
  o.members = all_members();
  o.format.chunk_bytes = chunk_bytes_;
  o.max_operations = max_operations_;
  o.shared_store = shared_disk_ != nullptr;
  o.max_message_bytes = max_message_bytes_;
  o.news_interval_ms = 150;
  o.retry_ms = 40;
  o.max_retry_ms = 800;
  o.max_records = member.max_records;
  o.seed = random_.next();
  member.store->restart();
  member.store->full = member.full_until > now_;
  member.store->unavailable = member.unavailable_until > now_;
  member.replica = std::make_unique<Node>(*member.store, o);
  const Status opened = member.replica->open();
  say("member ", member.id, " starts: ",
      opened.ok() ? std::string("holds ") + detail::decimal(member.replica->set().size())
                  : opened.message());
  if (member.store->crashed()) return crash(member, "as it started");
  if (opened.ok()) return;
  member.replica.reset();
  member.starts_at = now_ + 100;
}

/// Ends a process. What it had joined must be on its disk.
template <class Node>
void Simulation<Node>::crash(Member& member, const char* why) {
  say("member ", member.id, " ends ", why);
  CausalContext durable = context_of(*member.store->disk());
  durable.join(shared_disk_ != nullptr ? lost_ : member.rotten);
  if (!leq(member.replica->set().context(), durable))
    fail("member " + detail::decimal(member.id) +
         " had joined operations that are not in its store");
  sum_counters(*member.replica);
  member.replica.reset();
  member.store->dies_in = 0;
  member.starts_at = now_ + random_.between(50, 1'500);
  if (random_.chance(options_.faults.old_snapshot) && !member.snapshots.empty()) {
    lose(*member.store->disk());
    *member.store->disk() = member.snapshots[random_.below(member.snapshots.size())];
    member.store->disk()->generation = ++generations_;
    count(Fault::old_snapshot);
    say("the disk of member ", member.id, " is restored to a copy of ",
        member.store->disk()->records.size(), " records");
  }
  count(Fault::restart);
}

/// Notes that a disk's content is no more.
template <class Node>
void Simulation<Node>::lose(const SimulatedDisk& disk) {
  lost_.join(context_of(disk));
  for (const auto& [key, blob] : disk.blobs) lost_keys_.insert(key);
}

/// Every operation that a disk's records hold, rot aside.
template <class Node>
CausalContext Simulation<Node>::context_of(const SimulatedDisk& disk) {
  CausalContext out;
  for (const auto& [number, record] : disk.records) {
    if (const auto set = decode_record(*record.written)) out.join(set->context());
  }
  return out;
}

/// Who is told to be a member.
template <class Node>
std::vector<MemberId> Simulation<Node>::all_members() const {
  std::vector<MemberId> all;
  for (const Member& member : members_) {
    if (!member.gone) all.push_back(member.id);
  }
  // and then it leaves, or all would wait for it
  if (insider_ && !healed_) all.push_back(Liar::id);
  return all;
}

template <class Node>
void Simulation<Node>::set_members() {
  const std::vector<MemberId> all = all_members();
  for (Member* member : up()) member->replica->set_members(all);
}

template <class Node>
std::vector<typename Simulation<Node>::Member*> Simulation<Node>::up() {
  std::vector<Member*> out;
  for (Member& member : members_) {
    if (member.up()) out.push_back(&member);
  }
  return out;
}

template <class Node>
typename Simulation<Node>::Member* Simulation<Node>::any_up() {
  const std::vector<Member*> all = up();
  return all.empty() ? nullptr : all[random_.below(all.size())];
}

template <class Node>
const Fragment* Simulation<Node>::fragment(const FragmentId& id) const {
  const auto at =
      std::find_if(corpus_.begin(), corpus_.end(), [&](const Fragment& f) { return f.id() == id; });
  return at == corpus_.end() ? nullptr : &*at;
}

/// A message in words, for the trace.
template <class Node>
std::string Simulation<Node>::describe(std::span<const std::byte> bytes) {
  const auto frame = decode_frame(bytes);
  if (!frame) return detail::decimal(bytes.size()) + " damaged bytes";
  constexpr const char* names[] = {"nothing",     "news",           "a request for a delta",
                                   "a delta",     "a request for ", "the manifest of ",
                                   "a chunk of ", "a refusal of "};
  if (frame->type >= std::size(names)) return "a message of type " + detail::decimal(frame->type);
  std::string out = names[frame->type];
  if (frame->type >= 4 && frame->body.size() >= 32) {
    FragmentId id;
    std::memcpy(id.bytes.data(), frame->body.data(), 32);
    out += id.hex().substr(0, 8);
  }
  return out;
}

template <class Node>
template <class... Parts>
void Simulation<Node>::say(const Parts&... parts) {
  if (options_.trace == nullptr) return;
  const Status line = kvmeld::detail::error(ErrorCode::ok, now_, " ms: ", parts...);
  options_.trace(line.message().c_str());
}

template <class Node>
void Simulation<Node>::fail(std::string sentence) {
  if (!report_.ok()) return;
  report_.failure = std::move(sentence);
  say("FAILED: ", report_.failure);
}

}  // namespace testing
KVMELD_NAMESPACE_END
