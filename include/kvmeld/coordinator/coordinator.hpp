#pragma once

/// A coordinator: keeps the set, answers members, and runs rounds.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/replica/rounds.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace coordinator {

/// What a coordinator takes from its members, and what it waits for.
struct CoordinatorOptions {
  /// Identity, namespace, secret, chunk size, hash, merger and quota of operations. Where that
  /// `does_not_render`, each round's merger is the one that the first member at its barrier names.
  /// Its `members`, where given, let removals be forgotten once all have seen them.
  replica::ReplicaOptions replica;
  /// Who may be at a barrier, and is waited for; empty: whoever asks, `quorum` of them.
  std::vector<replica::MemberId> members{};
  std::size_t quorum = 0;  ///< members that are enough once `soft_ms` has passed; 0: a majority
  /// After the first member came: until then all members are waited for.
  std::int64_t soft_ms = 1'000;
  std::int64_t max_wait_ms = 600'000;  ///< no member waits longer, whatever it asks for
  /// A call that takes longer is cancelled: a client may be slow or gone.
  std::int64_t max_call_ms = 900'000;
  std::size_t max_calls = 1024;       ///< at once; one more is `quota_exceeded`
  std::size_t max_member_calls = 64;  ///< of those, of one member
  /// Members that may bring what others did: gateways. Everybody else's updates hold operations of
  /// that member alone, beside such as the state has seen; others are `unauthenticated`.
  std::vector<replica::MemberId> relays{};
  std::uint64_t max_update_bytes = 1U << 30U;  ///< of one update, raw payloads included
  /// Raw payloads in the state that one agent is an author of.
  std::uint64_t max_author_bytes = ~std::uint64_t{0};
  /// Memory of all updates on their way in; one that needs more is `quota_exceeded`.
  std::uint64_t max_updates_bytes = std::uint64_t{1} << 32U;
  /// Of those, of all updates of one member.
  std::uint64_t max_member_bytes = std::uint64_t{1} << 31U;
  /// Fragments and removals of one update. Every other call waits while one is joined, some 2
  /// microseconds for each of them: larger updates come in parts.
  std::size_t max_update_entries = 1U << 12U;
  /// Fragments in the state that one agent is an author of.
  std::size_t max_author_entries = 1U << 17U;
  /// Operations on one fragment: an entry must fit into a message, which bounds it too.
  std::size_t max_marks = 1U << 16U;
  /// Gaps and lives of agents in a context, that of the state included.
  std::size_t max_ranges = 1U << 16U;
  /// Up to the newest that are remembered; a straggler below gets `not_found`.
  std::size_t max_rounds = 64;
  std::int64_t token_lifetime_s = 3'600;  ///< no token may be valid for longer
  std::int64_t clock_difference_s = 300;  ///< between a member and the coordinator
};

namespace detail {

/// Bytes that all updates on their way in may take together.
class UpdateBudget {
 public:
  explicit UpdateBudget(std::uint64_t bytes) : left_(bytes) {}
  [[nodiscard]] bool take(std::uint64_t bytes) noexcept {
    std::uint64_t left = left_.load(std::memory_order_relaxed);
    while (bytes <= left) {
      if (left_.compare_exchange_weak(left, left - bytes, std::memory_order_relaxed)) return true;
    }
    return false;
  }
  void give(std::uint64_t bytes) noexcept { left_.fetch_add(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t left() const noexcept {
    return left_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> left_;
};

}  // namespace detail

/// One update on its way in: sets, manifests and chunks, checked as they come, and taken over
/// together or not at all.
class CoordinatorUpdate {
 public:
  /// What updates may take together; this one gives back what it took.
  struct Budgets {
    std::shared_ptr<detail::UpdateBudget> all;     ///< of all members
    std::shared_ptr<detail::UpdateBudget> member;  ///< of this one
  };

  /// @param member  whose update it is; `everyone`: the caller's, who vouches for what others did.
  CoordinatorUpdate(const replica::FragmentFormat& format, std::uint64_t max_bytes,
                    replica::MemberId member = replica::everyone, Budgets budgets = {})
      : format_(format),
        sets_(format.hash),
        left_bytes_(max_bytes),
        member_(member),
        budgets_(std::move(budgets)) {}
  CoordinatorUpdate(const CoordinatorUpdate&) = delete;
  CoordinatorUpdate& operator=(const CoordinatorUpdate&) = delete;
  ~CoordinatorUpdate() { give(taken_); }

  /// Errors: those of `decode_set` and `FragmentSet::join`, `quota_exceeded`.
  Status add_set(std::span<const std::byte> bytes) {
    KVMELD_TRY(spend(bytes.size(), set_expansion, "a set"));
    auto set = replica::decode_set(bytes, sets_.hash());
    if (!set) return set.error();
    KVMELD_TRY(sets_.join(*set));
    ++items_;
    return {};
  }
  /// Errors: those of `decode_manifest`, `id_mismatch` for another fragment's, `quota_exceeded`.
  Status add_manifest(const FragmentId& id, std::span<const std::byte> bytes) {
    KVMELD_TRY(spend(bytes.size(), manifest_expansion, "a manifest"));
    auto manifest = replica::decode_manifest(bytes, format_.limits(), format_.hash);
    if (!manifest) return manifest.error();
    if (manifest->fragment.id() != id) {
      return extend::error(ErrorCode::id_mismatch, "manifest of fragment ",
                           manifest->fragment.id().hex(), " sent as that of ", id.hex());
    }
    for (const auto& keys : manifest->chunks) {
      for (const BlobKey& key : keys) {
        auto& owners = owners_[key];
        if (owners.empty() || owners.back() != id) owners.push_back(id);
      }
    }
    parts_.insert_or_assign(id,
                            replica::Assembler(*std::move(manifest), std::nullopt, format_.hash));
    ++items_;
    return {};
  }
  /// Errors: those of `decode_chunk`; `not_found` for a chunk that no manifest of this update
  /// names, `quota_exceeded` where what came takes too much: raw bytes, before they are unpacked.
  Status add_chunk(const BlobKey& key, std::span<const std::byte> stored) {
    const auto at = owners_.find(key);
    if (at == owners_.end())
      return extend::error(ErrorCode::not_found, "chunk ", key.hex(),
                           " of no manifest that came before it");
    for (const FragmentId& id : at->second) {
      KVMELD_TRY(spend(parts_.at(id).bytes_of(key), 1, "a chunk"));
      if (const auto added = parts_.at(id).add(key, stored, format_.compressor.get()); !added)
        return added.error();
    }
    ++items_;
    return {};
  }
  /// Errors: `truncated` where the sender counted other items than came.
  Status end(std::uint64_t items) {
    if (items != items_)
      return extend::error(ErrorCode::truncated, "an update of ", items, " items, of which ",
                           items_, " came");
    ended_ = true;
    return {};
  }

  /// The fragments that are whole, by what came and what a store has.
  ///
  /// Errors: those of `Assembler::finish`, `quota_exceeded`, the store's.
  [[nodiscard]] Result<std::vector<Fragment>> finish(replica::BlobStore& store) {
    std::vector<Fragment> out;
    for (auto& [id, part] : parts_) {
      const std::uint64_t came = part.held_bytes();
      if (!part.complete()) {
        KVMELD_TRY(load_chunks(store, part, format_, came + left_bytes_));
        KVMELD_TRY(spend(part.held_bytes() - came, 1, "what the store has of a payload"));
      }
      if (!part.complete()) continue;
      std::uint64_t bytes = 0;
      for (const Payload& payload : part.manifest().fragment.payloads())
        bytes += payload.byte_count;
      const std::uint64_t held = part.held_bytes();
      KVMELD_TRY(spend(bytes - (std::min)(bytes, held), 1, "a payload of repeated chunks"));
      auto fragment = part.finish();
      if (!fragment) return fragment.error();
      out.push_back(*std::move(fragment));
    }
    return out;
  }

  [[nodiscard]] replica::MemberId member() const noexcept { return member_; }
  [[nodiscard]] bool ended() const noexcept { return ended_; }
  [[nodiscard]] std::uint64_t items() const noexcept { return items_; }
  [[nodiscard]] const FragmentSet& set() const noexcept { return sets_; }
  [[nodiscard]] const std::map<FragmentId, replica::Assembler>& parts() const noexcept {
    return parts_;
  }

 private:
  // What decoded bytes take in memory at most: a mark of 3 bytes takes some 72, a position of one
  // 8.
  static constexpr std::uint64_t set_expansion = 24;
  static constexpr std::uint64_t manifest_expansion = 8;

  Status spend(std::uint64_t bytes, std::uint64_t expansion, const char* what) {
    if (bytes > left_bytes_)
      return extend::error(ErrorCode::quota_exceeded, what, " of ", bytes, " bytes, where ",
                           left_bytes_, " are left to this update");
    const std::uint64_t memory =
        bytes > ~std::uint64_t{0} / expansion ? ~std::uint64_t{0} : bytes * expansion;
    if (budgets_.member != nullptr && !budgets_.member->take(memory)) {
      return extend::error(ErrorCode::quota_exceeded, what, " of ", bytes, " bytes takes ", memory,
                           ", where ", budgets_.member->left(),
                           " are left to all updates of member ", member_, "; come back later");
    }
    if (budgets_.all != nullptr && !budgets_.all->take(memory)) {
      if (budgets_.member != nullptr) budgets_.member->give(memory);
      return extend::error(ErrorCode::quota_exceeded, what, " of ", bytes, " bytes takes ", memory,
                           ", where ", budgets_.all->left(),
                           " are left to all updates together; come back later");
    }
    taken_ += memory;
    left_bytes_ -= bytes;
    return {};
  }

  void give(std::uint64_t bytes) noexcept {
    if (budgets_.member != nullptr) budgets_.member->give(bytes);
    if (budgets_.all != nullptr) budgets_.all->give(bytes);
  }

  replica::FragmentFormat format_;
  FragmentSet sets_;
  std::map<FragmentId, replica::Assembler> parts_;
  std::map<BlobKey, std::vector<FragmentId>> owners_;
  std::uint64_t left_bytes_;
  replica::MemberId member_;
  Budgets budgets_;
  std::uint64_t taken_ = 0;
  std::uint64_t items_ = 0;
  bool ended_ = false;
};

namespace detail {

/// Whether a state holds what somebody has seen: compared once for each state, however often it is
/// asked, and never again once it does.
struct SeenCheck {
  bool holds = false;
  std::uint64_t of_state = 0;

  [[nodiscard]] bool look(const CausalContext& seen, const CausalContext& state,
                          std::uint64_t state_number) {
    if (holds || std::exchange(of_state, state_number) == state_number) return holds;
    return holds = leq(seen, state);
  }
};

}  // namespace detail

/// A member that waits: at the barrier of a round, or (round 0) for any state but one that it
/// knows.
struct MergeAsk {
  std::uint64_t session = 0;
  std::uint64_t round = 0;
  replica::MemberId member = 0;
  Digest128 merger{};
  CausalContext context{};      ///< what it has seen
  Digest256 known{};            ///< round 0 only: the state's digest, not that of a cut
  std::int64_t timeout_ms = 0;  ///< from the first call that the coordinator sees of it
  mutable detail::SeenCheck seen{};
  /// The coordinator's: when it times out, by a clock that only goes forward.
  mutable std::optional<std::int64_t> until_ms{};
};

/// What all members of a round render.
struct MergeAnswer {
  replica::RoundCut cut{};
  /// Who was at the barrier; empty where the cut was made before a restart.
  std::vector<replica::MemberId> ready{};
  /// Round 0 only: of the whole state, superseded and incomplete fragments included.
  Digest256 state{};
};

namespace detail {

/// Who waits for one round, and by which merger it is rendered.
struct Barrier {
  struct Ready {
    CausalContext context;
    // of this member: one that asks again does not leave when its first call ends
    std::size_t asks = 0;
    SeenCheck seen{};
  };
  std::map<replica::MemberId, Ready> ready;
  Digest128 merger;
  std::int64_t first_ms = 0;
};

/// Barriers and cuts of one run.
struct CoordinatorSession {
  std::map<std::uint64_t, Barrier> barriers;
  std::map<std::uint64_t, MergeAnswer> cuts;
  std::uint64_t used = 0;  // when it was last asked for
  // the oldest round that may still get a cut, as far as this coordinator has looked
  std::uint64_t oldest = 0;
};

/// Where a coordinator keeps what it knows of a session, beside its fragments.
[[nodiscard]] inline BlobKey coordinator_key(std::string_view what, std::uint64_t session,
                                             std::uint64_t number) {
  return extend::named_key(0x3E, what, session, number);
}
/// Of the oldest round of a session. Stores replace no blob, so there are two places: one of them
/// holds while the other is erased and written, and the larger number counts.
[[nodiscard]] inline BlobKey coordinator_oldest_key(std::uint64_t session, std::uint64_t place) {
  return coordinator_key("kvmeld.coordinator.oldest.v1", session, place);
}
/// Of a round's cut, so that it gives no second one after a restart.
[[nodiscard]] inline BlobKey coordinator_cut_key(std::uint64_t session, std::uint64_t round) {
  return coordinator_key("kvmeld.coordinator.cut.v1", session, round);
}

[[nodiscard]] inline std::string list_of(const std::vector<replica::MemberId>& members) {
  std::string out;
  for (const replica::MemberId member : members)
    out += (out.empty() ? "" : ", ") + extend::decimal(member);
  return out.empty() ? "none" : out;
}

}  // namespace detail

/// Names a state: equal versions are equal sets, rendered by equal mergers.
struct StateVersion {
  CausalContext context{};
  Digest256 set{};
  Digest128 merger{};

  bool operator==(const StateVersion&) const = default;
};

/// Updates that a coordinator refused.
struct CoordinatorCounters {
  std::uint64_t over_quota = 0;       ///< more than a bound or quota allows
  std::uint64_t unauthenticated = 0;  ///< with operations of another agent than who sent them
};

/// A replica that many clients share: takes updates, gives out state and payloads, and publishes
/// the cuts of rounds.
///
/// It has no say in what the state is: two coordinators that were given the same updates, in any
/// order, have the same version. No network is in here (`coordinator/grpc_server.hpp` is one); the
/// caller gives the time. All calls are thread-safe; none waits for a client.
///
class Coordinator {
 public:
  using Options = CoordinatorOptions;
  using Update = CoordinatorUpdate;

  struct Applied {
    StateVersion version;
    std::vector<FragmentId> lacking;  ///< fragments of the update whose payload is not here
  };

  /// @param store thread-safe; it must outlive the coordinator. What `apply` acknowledged is in it.
  Coordinator(replica::ArbiterStore& store, Options options)
      : store_(&store), options_(std::move(options)), replica_(store, options_.replica) {}

  /// Takes up what the store has. Errors: the store's; `invalid_argument` for options that
  /// contradict each other.
  Status open() {
    const std::lock_guard lock(mutex_);
    const auto& replica = options_.replica;
    if (replica.format.chunk_bytes + message_overhead > replica.max_message_bytes) {
      return extend::error(ErrorCode::invalid_argument, "chunks of ", replica.format.chunk_bytes,
                           " bytes do not fit into messages of ", replica.max_message_bytes);
    }
    if (options_.quorum > options_.members.size() && !options_.members.empty()) {
      return extend::error(ErrorCode::invalid_argument, "a quorum of ", options_.quorum, " of ",
                           options_.members.size(), " members");
    }
    KVMELD_TRY(replica_.open());
    clock_ms_ += options_.replica.max_retry_ms;
    for (std::size_t n = replica_.wanted() / replica_.pursued_at_once + 1; n > 0; --n) {
      KVMELD_TRY(replica_.tick(clock_ms_));  // each once
    }
    for (const FragmentSet::Entry& entry : replica_.set().entries()) add_to(accounts_, entry);
    return settle();
  }

  [[nodiscard]] const Options& options() const noexcept { return options_; }
  /// @param member  whose update it is, as it was authenticated: it may hold that agent's
  /// operations, and others' only where the
  ///                state has seen them; `everyone`: the caller vouches for all of them.
  [[nodiscard]] Update begin_update(replica::MemberId member = replica::everyone) const {
    return Update(options_.replica.format, options_.max_update_bytes, member,
                  {updates_, budget_of(member)});
  }

  /// Takes an update over: payloads first, then the operations. Durable, as far as the store is,
  /// when it returns without error.
  ///
  /// Errors: `truncated` for an update that did not end, `quota_exceeded` (also for an entry of
  /// more than `max_marks` marks, and a context of more than `max_ranges` ranges, which would fit
  /// into no message), `invalid_argument` for a payload that no operation names, `unauthenticated`
  /// for operations of another agent than the update's member, those of `Assembler::finish` and of
  /// the store. The state is unchanged then.
  [[nodiscard]] Result<Applied> apply(Update& update) {
    if (!update.ended())
      return extend::error(ErrorCode::truncated, "an update broke off after ", update.items(),
                           " items");
    auto whole = update.finish(*store_);
    if (!whole) return whole.error();
    {
      const std::lock_guard lock(mutex_);
      KVMELD_TRY(admit(update));
    }
    // Without the lock: stores are thread-safe, and a payload that nothing names yet harms nobody.
    // What the state lacks is looked for once, now that it was named; nothing else is.
    for (const Fragment& fragment : *whole) {
      if (const auto stored = store_fragment(*store_, fragment, options_.replica.format); !stored)
        return stored.error();
    }
    whole->clear();
    const auto found = stored_of(update.set());
    if (!found) return found.error();
    const std::lock_guard lock(mutex_);
    KVMELD_TRY(admit(update));
    const Accounts fresh = fresh_of(update);
    KVMELD_TRY(replica_.join(update.set(), replica::everyone));
    for (const auto& [agent, more] : fresh) {
      accounts_[agent].entries += more.entries;
      accounts_[agent].bytes += more.bytes;
    }
    // one may be removed meanwhile
    for (const Fragment& fragment : *found) (void)replica_.restore(fragment);
    KVMELD_TRY(settle());
    Applied out{version_now(), {}};
    for (const FragmentSet::Entry& entry : update.set().entries()) {
      const FragmentSet::Entry* const here = replica_.set().find(entry.id);
      if (here != nullptr && !here->complete()) out.lacking.push_back(entry.id);
    }
    return out;
  }

  [[nodiscard]] StateVersion version() const {
    const std::lock_guard lock(mutex_);
    return version_now();
  }
  /// The set, payloads shared. O(n / 48).
  [[nodiscard]] FragmentSet set() const {
    const std::lock_guard lock(mutex_);
    return replica_.set();
  }
  /// A fragment of the state, whole. Errors: `not_found`, `payload_missing`.
  [[nodiscard]] Result<Fragment> fragment(const FragmentId& id) const {
    const std::lock_guard lock(mutex_);
    const Fragment here = replica_.set().payload(id);
    if (!here.valid() && replica_.set().find(id) == nullptr)
      return extend::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the state");
    if (!FragmentSet::Entry{id, here, {}}.complete())
      return extend::error(ErrorCode::payload_missing, "the payload of fragment ", id.hex(),
                           " is not here");
    return here;
  }
  /// What a member that has seen `context` lacks, in sets that fit into a message.
  [[nodiscard]] Result<std::vector<std::vector<std::byte>>> deltas(
      const CausalContext& context) const {
    const FragmentSet delta = set().delta_since(context);
    for (std::size_t most = 1024;; most /= 2) {
      std::vector<std::vector<std::byte>> parts;
      std::size_t largest = 0;
      for (const FragmentSet& part : replica::messages::cut(delta, most)) {
        parts.push_back(replica::encode_set(part));
        largest = (std::max)(largest, parts.back().size());
      }
      if (largest + message_overhead <= options_.replica.max_message_bytes) return parts;
      if (most == 1) {
        return extend::error(ErrorCode::oversized, "one entry of ", largest,
                             " bytes where messages have at most ",
                             options_.replica.max_message_bytes);
      }
    }
  }

  /// A member says what it has seen: what all of `replica.members` have seen removed is forgotten,
  /// payloads included.
  void saw(replica::MemberId member, const CausalContext& context) {
    if (options_.replica.members.empty()) return;
    const std::lock_guard lock(mutex_);
    if (!replica_.heard(member, context)) return;
    (void)settle();
  }

  /// A member comes to a barrier. `leave` must follow, whatever comes of it.
  ///
  /// Errors: `invalid_argument` for a stranger, `merger_mismatch`; nobody has come then.
  Status arrive(const MergeAsk& ask, std::int64_t now_ms);
  void leave(const MergeAsk& ask);
  /// The answer to a member that waits, if there is one by now.
  ///
  /// Errors: `timed_out` with who is missing, `merger_mismatch`, `not_found` for a round that is
  /// long over, the store's.
  [[nodiscard]] std::optional<Result<MergeAnswer>> poll(const MergeAsk& ask, std::int64_t now_ms);

  [[nodiscard]] replica::ReplicaCounters counters() const {
    const std::lock_guard lock(mutex_);
    return replica_.counters();
  }
  /// What was refused so far.
  [[nodiscard]] CoordinatorCounters refusals() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  [[nodiscard]] replica::ArbiterStore& store() const noexcept { return *store_; }

  /// That an envelope may add to what it carries.
  static constexpr std::size_t message_overhead = 1024;

 private:
  [[nodiscard]] StateVersion version_now() const {
    return {replica_.set().context(), replica_.set().digest(), options_.replica.merger.digest()};
  }
  [[nodiscard]] std::size_t quorum() const noexcept {
    if (options_.quorum > 0) return options_.quorum;
    return options_.members.size() / 2 + 1;
  }
  /// What has passed by now, whatever the caller's clock was set to meanwhile; notes when somebody
  /// who asks has waited long enough.
  std::int64_t waited(const MergeAsk& ask, std::int64_t now_ms) {
    const std::int64_t now = clock_.advance(now_ms);
    if (!ask.until_ms)
      ask.until_ms = now + (std::clamp)(ask.timeout_ms, std::int64_t{0}, options_.max_wait_ms);
    return now;
  }
  Status admit(const Update& update);
  Status admit_speaker(const Update& update);
  Status admit_quotas(const Update& update);
  /// What one agent is an author of: fragments of the state, and their raw bytes.
  struct Account {
    std::uint64_t entries = 0;
    std::uint64_t bytes = 0;
  };
  using Accounts = std::map<std::uint64_t, Account>;
  [[nodiscard]] Accounts fresh_of(const Update& update) const;
  static void add_to(Accounts& accounts, const FragmentSet::Entry& entry) {
    std::uint64_t bytes = 0;
    if (entry.fragment.valid()) {
      for (const Payload& payload : entry.fragment.payloads()) bytes += payload.byte_count;
    }
    std::uint64_t before = 0;
    bool first = true;
    for (const Mark& mark : entry.metadata.marks) {  // ascending by agent
      if (!first && mark.dot.agent == before) continue;
      first = false;
      before = mark.dot.agent;
      Account& account = accounts[before];
      ++account.entries;
      account.bytes += bytes;
    }
  }
  [[nodiscard]] Account count_account(std::uint64_t agent) const;
  [[nodiscard]] std::shared_ptr<detail::UpdateBudget> budget_of(replica::MemberId member) const;
  /// What the store has of a set's fragments whose payload the state lacks. O(entries) look-ups.
  [[nodiscard]] Result<std::vector<Fragment>> stored_of(const FragmentSet& set) const {
    const FragmentSet state = this->set();
    std::vector<Fragment> out;
    for (const FragmentSet::Entry& entry : set.entries()) {
      const FragmentSet::Entry* const here = state.find(entry.id);
      if (here != nullptr && here->complete()) continue;
      auto loaded = load_fragment(*store_, entry.id, options_.replica.format);
      if (loaded) {
        out.push_back(*std::move(loaded));
      } else if (loaded.error().code() == ErrorCode::unavailable) {
        return loaded.error();
      }
    }
    return out;
  }
  /// Lets the replica look for some of what it wants, a bounded number however much that is. Its
  /// clock is the coordinator's to wind: nothing is waited for. On a shared store it goes on while
  /// that brings something: others put it there.
  Status settle() {
    ++states_;
    clock_ms_ += options_.replica.max_retry_ms;
    std::size_t before = 0;
    do {
      before = replica_.wanted();
      KVMELD_TRY(replica_.tick(clock_ms_));
    } while (options_.replica.shared_store && replica_.wanted() < before);
    (void)replica_.take_outbox();
    return {};
  }
  detail::CoordinatorSession& session(std::uint64_t number);
  Status forget_rounds(detail::CoordinatorSession& session, std::uint64_t number,
                       std::uint64_t below);
  Status may_begin(detail::CoordinatorSession& session, const MergeAsk& ask);
  Result<const MergeAnswer*> cut_of(detail::CoordinatorSession& session, const MergeAsk& ask);
  [[nodiscard]] std::vector<replica::MemberId> absent(const detail::Barrier& barrier) const;

  replica::ArbiterStore* store_;
  Options options_;
  mutable std::mutex mutex_;
  replica::Replica replica_;
  std::map<std::uint64_t, detail::CoordinatorSession> sessions_;
  replica::Elapsed clock_{options_.max_wait_ms};
  std::int64_t clock_ms_ = 0;  // the replica's
  std::uint64_t uses_ = 0;
  std::uint64_t states_ = 1;  // changes with the state
  Accounts accounts_;         // by agent; may count what was removed since
  CoordinatorCounters counts_;
  std::shared_ptr<detail::UpdateBudget> updates_ =
      std::make_shared<detail::UpdateBudget>(options_.max_updates_bytes);
  mutable std::mutex budgets_mutex_;
  mutable std::map<replica::MemberId, std::shared_ptr<detail::UpdateBudget>> budgets_;
};

// What a coordinator admits into the state, and how it comes to the cut of a round.

/// Refuses a whole update where a replica would leave out a part of it, so that what is answered is
/// what happened.
inline Status Coordinator::admit_quotas(const Update& update) {
  const FragmentSet& set = update.set();
  const FragmentSet& state = replica_.set();
  if (const std::size_t n = set.size() + set.removals().size(); n > options_.max_update_entries) {
    return extend::error(ErrorCode::quota_exceeded, "an update of ", n,
                         " fragments and removals; at most ", options_.max_update_entries,
                         " are taken at once: send it in parts");
  }
  if (set.size() > options_.replica.max_entries ||
      state.size() > options_.replica.max_entries - set.size()) {
    return extend::error(ErrorCode::quota_exceeded, "an update of ", set.size(),
                         " fragments to a state of ", state.size(), ", which may have ",
                         options_.replica.max_entries);
  }
  for (const DotRange& range : set.context().ranges()) {
    if (range.last >= options_.replica.max_operations) {
      return extend::error(ErrorCode::quota_exceeded, "operation ", range.last, " of agent ",
                           range.agent, " in epoch ", range.epoch, "; an author may do ",
                           options_.replica.max_operations, " in one life");
    }
    if (range.agent == options_.replica.self && range.epoch == options_.replica.epoch) {
      return extend::error(ErrorCode::invalid_argument, "an operation of agent ", range.agent,
                           ", which is this coordinator");
    }
  }
  // What every client shall get must fit into messages: entries and contexts are not divided.
  constexpr std::size_t mark_bytes = 96;  // the most that a mark takes, encoded, its line included
  const std::size_t most = (std::min)(
      options_.max_marks, (options_.replica.max_message_bytes - message_overhead) / mark_bytes);
  for (const FragmentSet::Entry& entry : set.entries()) {
    const auto& marks = entry.metadata.marks;
    const FragmentSet::Entry* const here = state.find(entry.id);
    const auto fresh =
        static_cast<std::size_t>(std::count_if(marks.begin(), marks.end(), [&](const Mark& mark) {
          return !state.context().contains(mark.dot);
        }));
    const std::size_t all = (here != nullptr ? here->metadata.marks.size() : 0) + fresh;
    if (fresh > 0 && all > most)
      return extend::error(ErrorCode::quota_exceeded, "fragment ", entry.id.hex(), " would have ",
                           all, " marks; at most ", most, " are taken");
  }
  for (const Removal& removal : set.removals()) {
    if (removal.removed.size() > most) {
      return extend::error(ErrorCode::quota_exceeded, "a removal of fragment ", removal.id.hex(),
                           " names ", removal.removed.size(), " operations; at most ", most,
                           " are taken");
    }
  }
  if (!leq(set.context(), state.context())) {
    CausalContext joined = state.context();
    joined.join(set.context());
    if (const std::size_t ranges = joined.ranges().size();
        ranges > (std::min)(options_.max_ranges, most)) {
      return extend::error(ErrorCode::quota_exceeded, "the state's context would have ", ranges,
                           " ranges; at most ", (std::min)(options_.max_ranges, most),
                           " are taken");
    }
  }
  for (const auto& [id, part] : update.parts()) {
    if (set.find(id) != nullptr || state.find(id) != nullptr) continue;
    return extend::error(ErrorCode::invalid_argument, "payload of fragment ", id.hex(),
                         ", which no operation inserts");
  }
  for (const auto& [agent, fresh] : fresh_of(update)) {
    Account& account = accounts_[agent];
    const auto over = [&, f = fresh] {
      return account.entries + f.entries > options_.max_author_entries ||
             f.bytes > options_.max_author_bytes ||
             account.bytes > options_.max_author_bytes - f.bytes;
    };
    if (over()) account = count_account(agent);  // some may be gone since
    if (!over()) continue;
    return extend::error(ErrorCode::quota_exceeded, "agent ", agent, " would have ",
                         account.entries + fresh.entries, " fragments of ",
                         account.bytes + fresh.bytes, " bytes in the state; an author may have ",
                         options_.max_author_entries, " of ", options_.max_author_bytes);
  }
  return {};
}

/// Refuses what is not the member's to say: operations of other agents that the state has not seen,
/// and others than it has seen.
inline Status Coordinator::admit_speaker(const Update& update) {
  const replica::MemberId member = update.member();
  const auto& relays = options_.relays;
  if (member == replica::everyone ||
      std::find(relays.begin(), relays.end(), member) != relays.end())
    return {};
  const FragmentSet& state = replica_.set();
  const auto refused = [member](const Dot& dot, const char* why) {
    return extend::error(ErrorCode::unauthenticated, "member ", member, " says of operation ",
                         dot.sequence, " of agent ", dot.agent, " in epoch ", dot.epoch, why,
                         "; only that agent may (or one of CoordinatorOptions::relays)");
  };
  for (const DotRange& range : update.set().context().ranges()) {
    CausalContext one;
    one.append(range);
    if (range.agent == member || leq(one, state.context())) continue;
    return refused({range.agent, range.last, range.epoch},
                   ", which is not known here, what it was");
  }
  for (const FragmentSet::Entry& entry : update.set().entries()) {
    const FragmentSet::Entry* const here = state.find(entry.id);
    if (here == nullptr) continue;  // what was seen and is gone stays so
    const auto& marks = here->metadata.marks;
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.dot.agent == member) continue;
      const auto at = std::lower_bound(marks.begin(), marks.end(), mark.dot,
                                       [](const Mark& m, const Dot& d) { return m.dot < d; });
      if (at == marks.end() || at->dot != mark.dot || *at == mark) continue;
      return refused(mark.dot, " another thing than it did itself");
    }
  }
  CausalContext gone;
  for (const DotRange& range : update.set().compacted().ranges()) {
    if (range.agent != member) gone.append(range);
  }
  if (gone.empty()) return {};
  for (const FragmentSet::Entry& entry : state.entries()) {
    for (const Mark& mark : entry.metadata.marks) {
      if (gone.contains(mark.dot)) return refused(mark.dot, ", which is in force, that it is gone");
    }
  }
  return {};
}

inline Status Coordinator::admit(const Update& update) {
  Status status = admit_speaker(update);
  counts_.unauthenticated += status ? 0U : 1U;
  if (!status) return status;
  status = admit_quotas(update);
  counts_.over_quota += status.code() == ErrorCode::quota_exceeded ? 1U : 0U;
  return status;
}

/// What an update's authors gain by it.
inline auto Coordinator::fresh_of(const Update& update) const -> Accounts {
  Accounts out;
  for (const FragmentSet::Entry& entry : update.set().entries()) {
    if (replica_.set().find(entry.id) != nullptr) continue;
    const auto part = update.parts().find(entry.id);
    if (part == update.parts().end()) {
      add_to(out, entry);
    } else {
      add_to(out, {entry.id, part->second.manifest().fragment, entry.metadata});
    }
  }
  return out;
}

inline auto Coordinator::count_account(std::uint64_t agent) const -> Account {
  Accounts out;
  for (const FragmentSet::Entry& entry : replica_.set().entries()) {
    const auto& marks = entry.metadata.marks;
    if (std::any_of(marks.begin(), marks.end(),
                    [&](const Mark& m) { return m.dot.agent == agent; })) {
      add_to(out, entry);
    }
  }
  return out[agent];
}

inline std::shared_ptr<detail::UpdateBudget> Coordinator::budget_of(
    replica::MemberId member) const {
  constexpr std::size_t most = 1024;  // that have nothing on its way are forgotten beyond
  const std::lock_guard lock(budgets_mutex_);
  if (budgets_.size() >= most) {
    std::erase_if(budgets_, [](const auto& one) { return one.second.use_count() == 1; });
  }
  auto& budget = budgets_[member];
  if (budget == nullptr) budget = std::make_shared<detail::UpdateBudget>(options_.max_member_bytes);
  return budget;
}

inline detail::CoordinatorSession& Coordinator::session(std::uint64_t number) {
  constexpr std::size_t most = 256;
  detail::CoordinatorSession& out = sessions_[number];
  out.used = ++uses_;
  if (sessions_.size() > most) {
    // The one that was used longest ago and has nobody waiting; its cuts are in the store.
    auto oldest = sessions_.end();
    for (auto at = sessions_.begin(); at != sessions_.end(); ++at) {
      if (at->first != number && at->second.barriers.empty() &&
          (oldest == sessions_.end() || at->second.used < oldest->second.used))
        oldest = at;
    }
    if (oldest != sessions_.end()) sessions_.erase(oldest);
  }
  return out;
}

/// Reads the oldest round of a session, and raises it: what is below never gets a cut again, by
/// whichever coordinator on this store.
inline Status Coordinator::forget_rounds(detail::CoordinatorSession& session, std::uint64_t number,
                                         std::uint64_t below) {
  std::uint64_t least = ~std::uint64_t{0};
  std::uint64_t place = 0;
  for (std::uint64_t p = 0; p < 2; ++p) {
    const auto stored = store_->get(detail::coordinator_oldest_key(number, p));
    if (!stored && stored.error().code() != ErrorCode::not_found) return stored.error();
    std::uint64_t there = 0;
    if (stored) {
      extend::ByteReader r(stored->bytes());
      there = r.value<std::uint64_t>();
      if (!r.ok()) there = 0;
    }
    session.oldest = (std::max)(session.oldest, there);
    if (there < least) place = p;
    least = (std::min)(least, there);
  }
  if (session.oldest >= below) return {};
  extend::ByteWriter w;
  w.value(below);
  const BlobKey key = detail::coordinator_oldest_key(number, place);
  KVMELD_TRY(store_->erase(key));
  const auto fresh = store_->put_if_absent(key, w.written());
  if (!fresh) return fresh.error();
  // Another coordinator came between the two: its number stands, and what it leaves out is not
  // erased yet.
  if (!*fresh)
    return extend::error(ErrorCode::unavailable, "another coordinator forgets rounds of session ",
                         number, " at once");
  for (std::uint64_t round = (std::max<std::uint64_t>)(session.oldest, 1),
                     left = options_.max_rounds;
       round < below && left > 0; ++round, --left) {
    (void)store_->erase(detail::coordinator_cut_key(number, round));
  }
  session.oldest = below;
  session.cuts.erase(session.cuts.begin(), session.cuts.lower_bound(below));
  return {};
}

/// Whether a round that has no cut may get one. Errors: `not_found` for one that is over and
/// forgotten; the store's.
inline Status Coordinator::may_begin(detail::CoordinatorSession& session, const MergeAsk& ask) {
  KVMELD_TRY(forget_rounds(session, ask.session, 0));
  if (ask.round >= session.oldest) return {};
  return extend::error(ErrorCode::not_found, "round ", ask.round,
                       " is over and forgotten; the oldest that is remembered is ", session.oldest);
}

/// A round's cut, here or in the store; null where there is none yet.
inline Result<const MergeAnswer*> Coordinator::cut_of(detail::CoordinatorSession& session,
                                                      const MergeAsk& ask) {
  if (const auto at = session.cuts.find(ask.round); at != session.cuts.end()) return &at->second;
  // looked for in the store when the first member came
  if (session.barriers.count(ask.round) != 0) return nullptr;
  const auto stored = store_->get(detail::coordinator_cut_key(ask.session, ask.round));
  if (!stored) {
    if (stored.error().code() != ErrorCode::not_found) return stored.error();
    KVMELD_TRY(may_begin(session, ask));
    return nullptr;
  }
  auto cut = replica::decode_cut(stored->bytes(), options_.replica.format.hash);
  if (!cut) return cut.error();
  const auto here =
      session.cuts.insert_or_assign(ask.round, MergeAnswer{*std::move(cut), {}, {}}).first;
  // the store has it
  if (session.cuts.size() > options_.max_rounds)
    session.cuts.erase(here == session.cuts.begin() ? std::next(here) : session.cuts.begin());
  return &here->second;
}

inline std::vector<replica::MemberId> Coordinator::absent(const detail::Barrier& barrier) const {
  std::vector<replica::MemberId> out;
  for (const replica::MemberId member : options_.members) {
    if (barrier.ready.count(member) == 0) out.push_back(member);
  }
  return out;
}

inline Status Coordinator::arrive(const MergeAsk& ask, std::int64_t now_ms) {
  const std::lock_guard lock(mutex_);
  const std::int64_t now = waited(ask, now_ms);
  if (ask.round == 0) return {};
  const auto& members = options_.members;
  if (!members.empty() && std::find(members.begin(), members.end(), ask.member) == members.end()) {
    return extend::error(ErrorCode::invalid_argument, "member ", ask.member, " is not among the ",
                         members.size(), " of this coordinator's rounds");
  }
  detail::CoordinatorSession& here = session(ask.session);
  const auto cut = cut_of(here, ask);
  if (!cut) return cut.error();
  const Digest128 own = options_.replica.merger.digest();
  const auto at = here.barriers.find(ask.round);
  const Digest128 expected = *cut != nullptr             ? (*cut)->cut.merger
                             : own != Digest128{}        ? own
                             : at != here.barriers.end() ? at->second.merger
                                                         : ask.merger;
  if (ask.merger != expected) {
    return extend::error(ErrorCode::merger_mismatch, "member ", ask.member, " merges by ",
                         ask.merger.hex(), ", round ", ask.round, " by ", expected.hex());
  }
  detail::Barrier& barrier = here.barriers[ask.round];
  if (barrier.ready.empty()) {
    barrier.merger = expected;
    barrier.first_ms = now;
  }
  detail::Barrier::Ready& ready = barrier.ready[ask.member];
  ++ready.asks;
  if (!leq(ask.context, ready.context)) {
    ready.context.join(ask.context);
    ready.seen = {};
  }
  return {};
}

inline void Coordinator::leave(const MergeAsk& ask) {
  if (ask.round == 0) return;
  const std::lock_guard lock(mutex_);
  const auto at = sessions_.find(ask.session);
  if (at == sessions_.end()) return;
  const auto barrier = at->second.barriers.find(ask.round);
  if (barrier == at->second.barriers.end()) return;
  const auto ready = barrier->second.ready.find(ask.member);
  if (ready != barrier->second.ready.end() && --ready->second.asks == 0)
    barrier->second.ready.erase(ready);
  if (barrier->second.ready.empty()) at->second.barriers.erase(barrier);
}

inline std::optional<Result<MergeAnswer>> Coordinator::poll(const MergeAsk& ask,
                                                            std::int64_t now_ms) {
  using Answer = Result<MergeAnswer>;
  const std::lock_guard lock(mutex_);
  const FragmentSet& set = replica_.set();
  const std::int64_t now = waited(ask, now_ms);
  const bool late = now >= *ask.until_ms;
  const auto publish = [&](std::uint64_t session, std::uint64_t round, const Digest128& merger) {
    return replica::make_cut(set, merger, session, round, options_.replica.self);
  };
  if (ask.round == 0) {
    if (set.digest() != ask.known && ask.seen.look(ask.context, set.context(), states_)) {
      auto cut = publish(ask.session, 0, options_.replica.merger.digest());
      return cut ? Answer(MergeAnswer{*std::move(cut), {}, set.digest()}) : Answer(cut.error());
    }
    if (!late) return std::nullopt;
    return Answer(extend::error(ErrorCode::timed_out, "no other state than ", set.digest().hex(),
                                ", of ", set.size(), " fragments, came in time"));
  }
  detail::CoordinatorSession& here = session(ask.session);
  const auto cut = cut_of(here, ask);
  if (!cut) return Answer(cut.error());
  if (*cut != nullptr) return Answer(**cut);
  const auto at = here.barriers.find(ask.round);
  if (at == here.barriers.end())
    return Answer(extend::error(ErrorCode::invalid_argument, "member ", ask.member,
                                " asks for round ", ask.round, " and never arrived"));
  detail::Barrier& barrier = at->second;
  const bool all =
      options_.members.empty() ? barrier.ready.size() >= quorum() : absent(barrier).empty();
  // Who waits here shall have brought what it made. What others have not brought, nobody waits for.
  const bool seen = std::all_of(barrier.ready.begin(), barrier.ready.end(), [&](auto& ready) {
    return !replica_.wants_of(ready.first) &&
           ready.second.seen.look(ready.second.context, set.context(), states_);
  });
  if ((all && seen) ||
      (now - barrier.first_ms >= options_.soft_ms && barrier.ready.size() >= quorum())) {
    if (const Status may = may_begin(here, ask); !may) return Answer(may);
    auto made = publish(ask.session, ask.round, barrier.merger);
    if (!made) return Answer(made.error());
    // Written down before anybody sees it. Where another coordinator on this store was first, its
    // cut is the round's.
    const auto fresh = store_->put_if_absent(detail::coordinator_cut_key(ask.session, ask.round),
                                             replica::encode(*made));
    if (!fresh) return Answer(fresh.error());
    if (!*fresh) {
      const auto theirs = store_->get(detail::coordinator_cut_key(ask.session, ask.round));
      made = theirs ? replica::decode_cut(theirs->bytes(), options_.replica.format.hash)
                    : Result<replica::RoundCut>(theirs.error());
      if (!made) return Answer(made.error());
    }
    MergeAnswer answer{*std::move(made), {}, {}};
    for (const auto& [member, ready] : barrier.ready) answer.ready.push_back(member);
    here.cuts.insert_or_assign(ask.round, answer);
    // Written down before any cut goes, and where it cannot be, none goes.
    if (ask.round >= options_.max_rounds)
      (void)forget_rounds(here, ask.session, ask.round - options_.max_rounds + 1);
    return Answer(std::move(answer));
  }
  if (!late) return std::nullopt;
  return Answer(extend::error(
      ErrorCode::timed_out, "round ", ask.round, ": ", barrier.ready.size(),
      " members are ready, quorum ", quorum(), "; not there: ",
      options_.members.empty() ? std::string("unknown") : detail::list_of(absent(barrier)),
      seen ? "" : "; not all that they have seen is here"));
}

}  // namespace coordinator

KVMELD_NAMESPACE_END
