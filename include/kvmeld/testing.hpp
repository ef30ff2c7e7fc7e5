#pragma once

/// A deterministic simulation of replicas that merge caches while network, disks, processes and a
/// peer fail: for tests of user-written policies.
///
/// Not part of <kvmeld/kvmeld.hpp>. One thread, one seed, no real time, network or disk. See
/// docs/convergence.md.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/policies/token_match.hpp>
#include <kvmeld/refresh.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/testing/world.hpp>

KVMELD_NAMESPACE_BEGIN

namespace testing {

/// The options of a simulation; the defaults are those of the library's own test.
struct Options {
  std::size_t fewest_replicas = 2;
  std::size_t most_replicas = 6;
  std::optional<bool> shared_store{};  ///< all members write to one store; none: the seed decides
  std::int64_t active_ms = 6'000;      ///< simulated time in which agents work and faults happen
  std::int64_t healing_ms = 120'000;   ///< simulated time after which all members must agree
  double operations_per_second = 8;    ///< of all agents together
  Faults faults{};
  /// Each seed leaves out some kinds of faults, so that the others combine in more ways (swarm
  /// testing).
  bool swarm = true;
  std::vector<Fragment> corpus{};             ///< what agents insert; empty: small ones are made
  void (*trace)(const char* line) = nullptr;  ///< is told every event
};

/// One run of several members over a simulated network, clock and disk, which a seed determines
/// completely.
///
/// Agents insert, supersede, refresh, remove, evict and fetch while messages, processes and disks
/// fail and one peer is Byzantine. Then the faults end, and within a bounded time every member must
/// hold the same complete set with the same rendered bytes, from which no acknowledged operation is
/// missing. The expected content is derived from a plain log (`History`).
///
/// @tparam Node a `Replica`, or a type that behaves like one: tests of the simulation itself break
/// it on purpose.
template <class Node = replica::Replica>
class Simulation {
 public:
  explicit Simulation(std::uint64_t seed, Options options = {});
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Runs once. Every replica renders with each of the mergers given, and with two of the
  /// library's.
  template <class... Mergers>
  [[nodiscard]] Report run(const Mergers&... mergers);

 private:
  struct Member {
    replica::MemberId id = 0;
    std::unique_ptr<SimulatedStore> store;
    std::unique_ptr<Node> replica;  // null: the process is not running
    std::uint64_t epoch = 0;
    bool gone = false;       // has left permanently
    bool upgraded = false;   // renders with the newer merger
    std::int64_t clock = 0;  // ahead of the simulated time
    std::int64_t next_tick = 0;
    std::int64_t starts_at = 0;
    std::int64_t slow_until = 0;
    std::int64_t full_until = 0;
    std::int64_t unavailable_until = 0;
    std::uint64_t max_records = 0;
    CausalContext rotten;  // what rotten records of its disk held
    std::vector<SimulatedDisk> snapshots;

    [[nodiscard]] bool up() const noexcept { return replica != nullptr; }
  };

  // from the first event to the report
  void set_up();
  void note_keys(const Fragment& fragment);
  void step(std::int64_t ms);
  void deliver(const Delivery& delivery);
  void tick(Member& member);
  void flush(Member& member);

  // processes, disks, texts of the trace
  void start(Member& member);
  void crash(Member& member, const char* why);
  void lose(const SimulatedDisk& disk);
  void set_members();
  template <class... Parts>
  void say(const Parts&... parts);
  void fail(std::string sentence);
  [[nodiscard]] static std::string describe(std::span<const std::byte> bytes);
  [[nodiscard]] static CausalContext context_of(const SimulatedDisk& disk);
  [[nodiscard]] std::vector<Member*> up();
  [[nodiscard]] Member* any_up();
  [[nodiscard]] const Fragment* fragment(const FragmentId& id) const;
  [[nodiscard]] std::vector<replica::MemberId> all_members() const;

  // operations of agents, and faults
  void operate();
  void refresh(Member& member);
  void record(Operation operation, const Result<Dot>& done, const Digest256& before,
              const Member& member);
  void disturb(std::int64_t ms);
  void disturb(Member& member, std::int64_t ms);
  void join();
  void leave();
  void upgrade();

  // what must hold at the end
  void heal();
  void account_losses();
  [[nodiscard]] bool agreed() const;
  void check_sets();
  void check_rest();
  void check_mergers();
  template <class M>
  void check_rendered(const M& merger);
  void sum_counters(const Node& replica);

  [[nodiscard]] bool once(double per_second, std::int64_t ms) {
    return random_.chance(per_second * static_cast<double>(ms) / 1000);
  }
  void count(Fault fault) { ++report_.faults[fault]; }

  Options options_;
  Random random_;
  Report report_;
  SimulatedNetwork network_;
  std::vector<Fragment> corpus_;
  std::vector<std::vector<BlobKey>> keys_;  // (fragments) manifest and chunks
  std::deque<Member> members_;              // those that have left included
  std::optional<ByzantinePeer> byzantine_;
  History history_;
  CausalContext lost_;           // what lost disks and rotten records held
  std::set<BlobKey> lost_keys_;  // blobs that were lost or rotted
  std::shared_ptr<SimulatedDisk> shared_disk_;
  std::set<std::uint64_t> epochs_;
  std::uint64_t generations_ = 1;
  replica::MemberId next_member_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::size_t max_message_bytes_ = 0;
  std::uint64_t max_operations_ = std::uint64_t{1} << 17U;
  Digest128 merger_{};
  bool insider_ = false;  // the Byzantine peer is a member
  bool healed_ = false;
  std::vector<std::size_t> to_upgrade_;  // members, in order
  std::int64_t next_upgrade_ = 0;
  std::int64_t partition_until_ = 0;
  std::int64_t next_snapshot_ = 0;
  std::int64_t now_ = 0;
};

/// Which runs `check_convergence` makes.
struct CheckOptions {
  std::uint64_t seeds = 300;
  std::uint64_t first_seed = 0;
  Options simulation{};
};

/// Simulates one seed after the other, and stops at the first that fails. `Report::ok` says whether
/// all agreed.
///
/// With the environment variable KVMELD_SIM_SEED only that seed runs, and every event is written to
/// standard error.
/// @tparam Node as for `Simulation`.
template <class Node = replica::Replica, class... Mergers>
[[nodiscard]] Report check_convergence(const CheckOptions& options, const Mergers&... mergers) {
  CheckOptions o = options;
  if (const char* const only = std::getenv("KVMELD_SIM_SEED"); only != nullptr && *only != '\0') {
    o.first_seed = extend::parse_decimal<std::uint64_t>(only).value_or(0);
    o.seeds = 1;
    if (o.simulation.trace == nullptr)
      o.simulation.trace = [](const char* line) { std::fprintf(stderr, "%s\n", line); };
  }
  Report all;
  for (std::uint64_t i = 0; i < o.seeds && all.ok(); ++i)
    all.add(Simulation<Node>(o.first_seed + i, o.simulation).run(mergers...));
  return all;
}
/// As above, with the merger under test first.
template <class Node = replica::Replica, class M>
requires requires(const M& merger) { merger.digest(); }
[[nodiscard]] Report check_convergence(const M& merger, const CheckOptions& options = {}) {
  return check_convergence<Node>(options, merger);
}

}  // namespace testing

// A simulation from its first event to its report.

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
  // Messages in flight arrive first, so that what is lost is known.
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
                         &f.bit_rot,      &f.byzantine,     &f.insider,       &f.join,
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
  for (const Fragment& f : corpus_) note_keys(f);
  if (options_.shared_store.value_or(random_.chance(0.3)))
    shared_disk_ = std::make_shared<SimulatedDisk>();
  if (options_.faults.byzantine > 0) {
    insider_ = random_.chance(options_.faults.insider);
    byzantine_.emplace(random_.next(), corpus_, chunk_bytes_, max_operations_, insider_,
                       report_.faults);
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

/// The blobs that hold a fragment of the corpus.
template <class Node>
void Simulation<Node>::note_keys(const Fragment& fragment) {
  const auto manifest = replica::make_manifest(fragment, chunk_bytes_);
  if (!manifest) return fail("the corpus: " + manifest.error().message());
  std::vector<BlobKey>& keys = keys_.emplace_back(1, manifest_key(fragment.id()));
  for (const auto& chunks : manifest->chunks) keys.insert(keys.end(), chunks.begin(), chunks.end());
}

/// Advances the time: messages arrive, and members that are due tick or start.
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
  if (delivery.to == ByzantinePeer::id) {
    for (const ByzantinePeer::Lie& lie : byzantine_->hear(delivery))
      network_.send(now_, ByzantinePeer::id, lie.to, lie.frame);
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
    fail(kvmeld::extend::error(ErrorCode::corrupt, "member ", member.id, " refused a message (",
                               taken.error().message(), ") and its set changed")
             .message());
  }
  if (!leq(seen, after.context()))
    fail("member " + extend::decimal(member.id) + " forgot an operation that it had seen");
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
  for (const replica::AgentLife& life : member.replica->reused_lives()) {
    const bool own = life == replica::AgentLife{member.id, member.epoch};
    if (!own || !insider_) {
      return fail("member " + kvmeld::extend::decimal(member.id) + " says that a dot of agent " +
                  kvmeld::extend::decimal(life.agent) + " was used twice");
    }
    return crash(member, "since a member says that its dots are in use elsewhere");
  }
}

/// Sends a member's outgoing messages, unless its process ended in the call before.
template <class Node>
void Simulation<Node>::flush(Member& member) {
  if (member.store->crashed()) return crash(member, "in a write");
  for (const replica::Outgoing& out : member.replica->take_outbox()) {
    if (out.to != replica::everyone) {
      network_.send(now_, member.id, out.to, out.bytes);
      continue;
    }
    for (const Member& other : members_) {
      if (!other.gone && other.id != member.id) network_.send(now_, member.id, other.id, out.bytes);
    }
    if (byzantine_) network_.send(now_, member.id, ByzantinePeer::id, out.bytes);
  }
}

}  // namespace testing

// What must hold at the end of a simulation.

namespace testing {

/// Ends all faults and starts the members that are not running.
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
      return fail("member " + extend::decimal(member.id) +
                  " could not start from a disk that works");
  }
  set_members();
}

/// Finds the operations and payloads that no member holds any more, and fails unless a lost or
/// corrupted disk explains them.
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
    // No member has these bytes. An agent that still needs them computes them again.
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

/// Whether all members hold the same complete set, and have compacted the removals that all of them
/// have seen.
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
    const std::string who = "member " + extend::decimal(member->id);
    const std::string and_first = who + " and member " + extend::decimal(all.front()->id);
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
      return fail(who + " still waits for " + extend::decimal(member->replica->wanted()) +
                  " payloads");
    if (!set.removals().empty())
      return fail(who + " keeps " + extend::decimal(set.removals().size()) +
                  " removals that everybody knows");
  }
  std::vector<std::pair<FragmentId, Mark>> marks;
  for (const FragmentSet::Entry& entry : first.entries()) {
    for (const Mark& mark : entry.metadata.marks) marks.emplace_back(entry.id, mark);
  }
  report_.compacted += first.compacted().dots();
  if (std::string wrong = history_.check(marks); !wrong.empty()) fail(std::move(wrong));
}

/// Checks the idle state: members report exactly those that render with another merger, send
/// nothing but news, and have few records left in their stores.
template <class Node>
void Simulation<Node>::check_rest() {
  const auto busy = [&] {
    std::uint64_t bytes = 0;
    for (const Member* member : up()) {
      const auto& sent = member->replica->counters().sent_bytes;
      for (std::size_t type = 0; type < sent.size(); ++type)
        bytes += type == static_cast<std::size_t>(replica::ReplicaMessage::news) ? 0 : sent[type];
    }
    return bytes;
  };
  // answers that were in flight
  for (const std::int64_t until = now_ + 500; now_ < until;) step(50);
  const std::uint64_t before = busy();
  for (const std::int64_t until = now_ + 1'000; now_ < until;) step(50);
  if (busy() != before)
    fail("members agree and still send each other " + extend::decimal(busy() - before) +
         " bytes a second beside news");
  if (!agreed()) fail("members agreed and disagree again, though nothing happened");
  std::uint64_t most = 0;  // in a shared store every reader has its own bound
  for (const Member* member : up()) most = (std::max)(most, member->max_records);
  for (const Member* member : up()) {
    const std::size_t records = member->store->disk()->records.size();
    if (records > most)
      fail("the store of member " + extend::decimal(member->id) + " keeps " +
           extend::decimal(records) + " records where " + extend::decimal(most) + " are enough");
  }
}

template <class Node>
void Simulation<Node>::check_mergers() {
  for (const Member* member : up()) {
    const std::vector<replica::MemberId> named = member->replica->other_mergers();
    for (const Member* other : up()) {
      const bool differs = member->upgraded != other->upgraded;
      if (other != member &&
          (std::find(named.begin(), named.end(), other->id) != named.end()) != differs) {
        return fail("member " + extend::decimal(member->id) +
                    (differs ? " does not notice" : " wrongly says") + " that member " +
                    extend::decimal(other->id) + " renders with another merger");
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
      return fail("member " + extend::decimal(member->id) +
                  " cannot plan: " + planned.error().message());
    HostCache cache(corpus_.front().shared_geometry(), planned->tokens());
    std::vector<std::byte> workspace(planned->workspace_bytes());
    const auto rendered =
        kvmeld::run(exec::seq, *planned, workspace, cache.mutable_ref(), {.content_digest = true});
    if (!rendered)
      return fail("member " + extend::decimal(member->id) +
                  " cannot render: " + rendered.error().message());
    if (!first) first = *rendered->content_digest;
    if (*rendered->content_digest != *first) {
      return fail("member " + extend::decimal(member->id) +
                  " renders other bytes of the same set than member " +
                  extend::decimal(up().front()->id));
    }
  }
}

template <class Node>
void Simulation<Node>::sum_counters(const Node& replica) {
  const replica::ReplicaCounters& c = replica.counters();
  report_.refused += c.refused_frames;
  report_.unvouched += c.unvouched_operations;
  report_.reused += c.reused_dots;
  report_.strikes += c.strikes;
  report_.corrupt_records += c.corrupt_records;
  report_.fetched += c.fragments_fetched;
}

}  // namespace testing

// Processes and disks of a simulation, and the texts of its trace.

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
      opened.ok() ? std::string("holds ") + extend::decimal(member.replica->set().size())
                  : opened.message());
  if (member.store->crashed()) return crash(member, "as it started");
  if (opened.ok()) return;
  member.replica.reset();
  member.starts_at = now_ + 100;
}

/// Ends a process. The state that it had joined must be on its disk.
template <class Node>
void Simulation<Node>::crash(Member& member, const char* why) {
  say("member ", member.id, " ends ", why);
  CausalContext durable = context_of(*member.store->disk());
  durable.join(shared_disk_ != nullptr ? lost_ : member.rotten);
  if (!leq(member.replica->set().context(), durable))
    fail("member " + extend::decimal(member.id) +
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

/// Records that a disk's content is lost.
template <class Node>
void Simulation<Node>::lose(const SimulatedDisk& disk) {
  lost_.join(context_of(disk));
  for (const auto& [key, blob] : disk.blobs) lost_keys_.insert(key);
}

/// Every operation in a disk's records as they were written, before any corruption.
template <class Node>
CausalContext Simulation<Node>::context_of(const SimulatedDisk& disk) {
  CausalContext out;
  for (const auto& [number, record] : disk.records) {
    if (const auto set = replica::decode_record(*record.written)) out.join(set->context());
  }
  return out;
}

/// The members that replicas are told of.
template <class Node>
std::vector<replica::MemberId> Simulation<Node>::all_members() const {
  std::vector<replica::MemberId> all;
  for (const Member& member : members_) {
    if (!member.gone) all.push_back(member.id);
  }
  // after healing it counts as gone, since all would wait for it otherwise
  if (insider_ && !healed_) all.push_back(ByzantinePeer::id);
  return all;
}

template <class Node>
void Simulation<Node>::set_members() {
  const std::vector<replica::MemberId> all = all_members();
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
  const auto frame = replica::decode_frame(bytes);
  if (!frame) return extend::decimal(bytes.size()) + " damaged bytes";
  constexpr const char* names[] = {"nothing",     "news",           "a request for a delta",
                                   "a delta",     "a request for ", "the manifest of ",
                                   "a chunk of ", "a refusal of "};
  if (frame->type >= std::size(names)) return "a message of type " + extend::decimal(frame->type);
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
  const Status line = kvmeld::extend::error(ErrorCode::ok, now_, " ms: ", parts...);
  options_.trace(line.message().c_str());
}

template <class Node>
void Simulation<Node>::fail(std::string sentence) {
  if (!report_.ok()) return;
  report_.failure = std::move(sentence);
  say("FAILED: ", report_.failure);
}

}  // namespace testing

// The operations of a simulation's agents, and the faults.

namespace testing {

/// One operation of a random agent.
template <class Node>
void Simulation<Node>::operate() {
  Member* const member = any_up();
  if (member == nullptr) return;
  ++report_.events;
  Node& replica = *member->replica;
  const Digest256 before = replica.set().digest();
  const std::size_t what = random_.below(24);
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
  if (what >= 20) {
    refresh(*member);
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

/// A member reads one of its fragments again behind what it has of the others, and has the result
/// take its place. An engine would give rows; here they are drawn.
template <class Node>
void Simulation<Node>::refresh(Member& member) {
  Node& replica = *member.replica;
  std::vector<Fragment> own;
  for (const InForce& read : in_force(replica.set(), Presence::complete)) {
    const Fragment& fragment = read.entry->fragment;
    if (read.place.agent == member.id && fragment.role() == Role::span && !fragment.latent())
      own.push_back(fragment);
  }
  if (own.empty()) return;
  const Fragment before = own[random_.below(own.size())];
  const auto behind = refresh::set_behind(replica.set(), before.id());
  if (!behind) return fail("a refresh has nothing to stand behind: " + behind.error().message());
  std::vector<FragmentId> ids;
  for (const InForce& read : in_force(*behind)) ids.push_back(read.entry->id);
  HostCache rows(before.shared_geometry(), before.token_count());
  fill(rows, random_);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(before.token_count()));
  for (std::size_t i = 0; i < positions.size(); ++i)
    positions[i] = static_cast<std::int64_t>(ids.size() + i);
  const auto made =
      refresh::seal(before, rows.kv_cache_ref(), positions, refresh::context_digest(ids));
  if (!made) return fail("a refresh: " + made.error().message());
  if (fragment(made->id()) == nullptr) {
    corpus_.push_back(*made);
    note_keys(*made);
  }
  say("member ", member.id, " refreshes ", before.id().hex().substr(0, 8));
  ++report_.refreshed;
  Operation inserted;
  inserted.dot = {member.id, Operation::unknown_sequence, member.epoch};
  inserted.id = made->id();
  const Digest256 unchanged = replica.set().digest();
  const auto dot = replica.insert(*made, std::nullopt, now_);
  record(inserted, dot, unchanged, member);
  if (!dot.ok() || !member.up()) return;
  Operation superseded;
  superseded.dot = inserted.dot;
  superseded.kind = Operation::Kind::supersede;
  superseded.id = before.id();
  superseded.successor = made->id();
  const Digest256 with_it = replica.set().digest();
  record(superseded, replica.supersede(superseded.id, superseded.successor), with_it, member);
}

template <class Node>
void Simulation<Node>::record(Operation operation, const Result<Dot>& done, const Digest256& before,
                              const Member& member) {
  if (done.ok()) {
    if (done->agent != member.id || done->epoch != member.epoch)
      fail("agent " + extend::decimal(member.id) + " was given the dot of another life");
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
    // A member claimed to have seen operations of this epoch that were not done yet: the next tick
    // starts a new epoch.
  } else if (code != ErrorCode::store_full) {
    fail("an operation failed: " + done.error().message());
  }
}

/// The faults of the next milliseconds.
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
  if (byzantine_ && once(f.byzantine, ms)) {
    if (const Member* const victim = any_up()) {
      const Member* const other = any_up();
      const ByzantinePeer::Lie lie =
          byzantine_->act({victim->id, victim->epoch}, {other->id, other->epoch});
      if (lie.at_once)
        deliver({ByzantinePeer::id, lie.to, lie.frame});
      else
        network_.send(now_, ByzantinePeer::id, lie.to, lie.frame);
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
      if (const auto set = replica::decode_record(*rotten.written)) {
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

/// A new member starts with an empty disk, or with the shared one.
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

/// A member leaves, and its disk is lost.
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
