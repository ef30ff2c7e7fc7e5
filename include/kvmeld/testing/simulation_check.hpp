#pragma once

/// What must hold at the end of a simulation.

#include <cstring>

#include <kvmeld/testing/simulation.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// Ends all faults and starts whoever does not run.
template <class Node>
void Simulation<Node>::heal() {
  say("faults end");
  options_.faults = Faults::none();
  healed_ = true;
  network_.faults = options_.faults;
  network_.heal();
  for (Member& member : members_) {
    member.slow_until = member.full_until = member.unavailable_until = 0;
    member.store->refused = member.store->in_doubt = 0;
    member.store->dies_in = 0;
    network_.set_slowness(member.id, 0);
    if (member.gone) continue;
    if (!member.up()) start(member);
    if (!member.up())
      return fail("member " + detail::decimal(member.id) +
                  " could not start from a disk that works");
  }
  set_members();
}

/// Works out what is nowhere any more, and demands that a lost or rotten disk explains it.
template <class Node>
void Simulation<Node>::account_losses() {
  CausalContext known;
  for (const Member* member : up()) known.join(member->replica->set().context());
  for (const Operation& o : std::vector<Operation>(history_.operations())) {
    if (!o.acknowledged || known.contains(o.dot)) continue;
    if (!lost_.contains(o.dot))
      return fail(History::text(o) +
                  " was acknowledged, and nobody holds it though no disk was lost");
    history_.forget(o.dot);
    ++report_.lost_operations;
  }
  std::set<BlobKey> sound;
  std::set<FragmentId> whole, all;
  for (const Member* member : up()) {
    for (const auto& [key, blob] : member->store->disk()->blobs) {
      if (!blob.rotten()) sound.insert(key);
    }
    for (const FragmentSet::Entry& entry : member->replica->set().entries()) {
      all.insert(entry.id);
      if (entry.complete()) whole.insert(entry.id);
    }
  }
  for (const FragmentId& id : all) {
    const Fragment* const f = fragment(id);
    if (f == nullptr) return fail("fragment " + id.hex() + " is in a set and was never inserted");
    if (whole.count(id) != 0) continue;
    bool lost = false;
    for (const BlobKey& key : keys_[static_cast<std::size_t>(f - corpus_.data())]) {
      if (sound.count(key) != 0) continue;
      if (lost_keys_.count(key) == 0)
        return fail("a blob of fragment " + id.hex().substr(0, 8) +
                    " is nowhere, though no disk lost it");
      lost = true;
    }
    if (!lost) continue;
    // Nobody has these bytes. An agent that still needs them produces them again.
    ++report_.lost_payloads;
    Member* const member = any_up();
    const Digest256 before = member->replica->set().digest();
    Operation again;
    again.id = id;
    again.dot = {member->id, Operation::unknown_sequence, member->epoch};
    record(again, member->replica->insert(*f), before, *member);
    flush(*member);
  }
  for (Member* member : up()) {
    std::vector<FragmentId> evicted;
    for (const FragmentSet::Entry& entry : member->replica->set().entries()) {
      if (!entry.complete()) evicted.push_back(entry.id);
    }
    for (const FragmentId& id : evicted) (void)member->replica->fetch(id);
  }
}

/// Whether all hold the same, whole, and have forgotten what everybody knows to be removed.
template <class Node>
bool Simulation<Node>::agreed() const {
  const FragmentSet* first = nullptr;
  for (const Member& member : members_) {
    if (!member.up()) continue;
    const FragmentSet& set = member.replica->set();
    if (first == nullptr) first = &set;
    if (set.digest() != first->digest() || set.context() != first->context() ||
        member.replica->wanted() != 0 || !set.removals().empty())
      return false;
    const auto entries = set.entries();
    if (!std::all_of(entries.begin(), entries.end(),
                     [](const FragmentSet::Entry& e) { return e.complete(); }))
      return false;
  }
  return true;
}

template <class Node>
void Simulation<Node>::check_sets() {
  const std::vector<Member*> all = up();
  const FragmentSet& first = all.front()->replica->set();
  for (const Member* member : all) {
    const FragmentSet& set = member->replica->set();
    const std::string who = "member " + detail::decimal(member->id);
    const std::string and_first = who + " and member " + detail::decimal(all.front()->id);
    if (!(set == first)) return fail(and_first + " hold different sets");
    if (set.digest() != first.digest())
      return fail(and_first + " hold equal sets with different digests");
    if (set.context() != first.context())
      return fail(and_first + " have not seen the same operations");
    for (const FragmentSet::Entry& entry : set.entries()) {
      const std::string what = " fragment " + entry.id.hex().substr(0, 8);
      const Fragment* const f = fragment(entry.id);
      if (f == nullptr) return fail(who + " holds" + what + ", which was never inserted");
      if (!entry.complete()) return fail(who + " lacks the bytes of" + what);
      if (const Status verified = verify_fragment(entry.fragment); !verified.ok())
        return fail(who + " holds" + what + " damaged: " + verified.message());
      for (std::size_t p = 0; p < f->payloads().size(); ++p) {
        if (std::memcmp(entry.fragment.payloads()[p].bytes.get(), f->payloads()[p].bytes.get(),
                        f->payloads()[p].byte_count) != 0) {
          return fail(who + " holds" + what + " with other bytes than were inserted");
        }
      }
    }
    if (member->replica->wanted() != 0)
      return fail(who + " still waits for " + detail::decimal(member->replica->wanted()) +
                  " payloads");
    if (!set.removals().empty())
      return fail(who + " keeps " + detail::decimal(set.removals().size()) +
                  " removals that everybody knows");
  }
  std::vector<std::pair<FragmentId, Mark>> marks;
  for (const FragmentSet::Entry& entry : first.entries()) {
    for (const Mark& mark : entry.metadata.marks) marks.emplace_back(entry.id, mark);
  }
  report_.compacted += first.compacted().dots();
  if (std::string wrong = history_.check(marks); !wrong.empty()) fail(std::move(wrong));
}

/// Members name exactly those others that render with another merger.
/// Where all agree, nothing but news crosses, and a store's records have become few.
template <class Node>
void Simulation<Node>::check_rest() {
  const auto busy = [&] {
    std::uint64_t bytes = 0;
    for (const Member* member : up()) {
      const auto& sent = member->replica->counters().sent_bytes;
      for (std::size_t type = 0; type < sent.size(); ++type)
        bytes += type == static_cast<std::size_t>(ReplicaMessage::news) ? 0 : sent[type];
    }
    return bytes;
  };
  // answers that were under way
  for (const std::int64_t until = now_ + 500; now_ < until;) step(50);
  const std::uint64_t before = busy();
  for (const std::int64_t until = now_ + 1'000; now_ < until;) step(50);
  if (busy() != before)
    fail("members agree and still send each other " + detail::decimal(busy() - before) +
         " bytes a second beside news");
  if (!agreed()) fail("members agreed and disagree again, though nothing happened");
  std::uint64_t most = 0;  // of a shared store every reader keeps within its own bound
  for (const Member* member : up()) most = (std::max)(most, member->max_records);
  for (const Member* member : up()) {
    const std::size_t records = member->store->disk()->records.size();
    if (records > most)
      fail("the store of member " + detail::decimal(member->id) + " keeps " +
           detail::decimal(records) + " records where " + detail::decimal(most) + " are enough");
  }
}

template <class Node>
void Simulation<Node>::check_mergers() {
  for (const Member* member : up()) {
    const std::vector<MemberId> named = member->replica->other_mergers();
    for (const Member* other : up()) {
      const bool differs = member->upgraded != other->upgraded;
      if (other != member &&
          (std::find(named.begin(), named.end(), other->id) != named.end()) != differs) {
        return fail("member " + detail::decimal(member->id) +
                    (differs ? " does not notice" : " wrongly says") + " that member " +
                    detail::decimal(other->id) + " renders with another merger");
      }
    }
  }
}

template <class Node>
template <class M>
void Simulation<Node>::check_rendered(const M& merger) {
  if (!report_.ok()) return;
  std::optional<Digest128> first;
  for (const Member* member : up()) {
    Target target;
    target.geometry = corpus_.front().geometry();
    const auto planned = plan(member->replica->set(), merger, target);
    if (!planned)
      return fail("member " + detail::decimal(member->id) +
                  " cannot plan: " + planned.error().message());
    HostCache cache(corpus_.front().shared_geometry(), planned->tokens());
    std::vector<std::byte> workspace(planned->workspace_bytes());
    const auto rendered =
        kvmeld::run(exec::seq, *planned, workspace, cache.mutable_ref(), {.content_digest = true});
    if (!rendered)
      return fail("member " + detail::decimal(member->id) +
                  " cannot render: " + rendered.error().message());
    if (!first) first = *rendered->content_digest;
    if (*rendered->content_digest != *first) {
      return fail("member " + detail::decimal(member->id) +
                  " renders other bytes of the same set than member " +
                  detail::decimal(up().front()->id));
    }
  }
}

template <class Node>
void Simulation<Node>::sum_counters(const Node& replica) {
  const ReplicaCounters& c = replica.counters();
  report_.refused += c.refused_frames;
  report_.unvouched += c.unvouched_operations;
  report_.reused += c.reused_dots;
  report_.strikes += c.strikes;
  report_.corrupt_records += c.corrupt_records;
  report_.fetched += c.fragments_fetched;
}

}  // namespace testing
KVMELD_NAMESPACE_END
