#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/session/replica.hpp>
#include <kvmeld/transport/coordinator_barrier.hpp>
#include <kvmeld/transport/coordinator_options.hpp>
#include <kvmeld/transport/coordinator_update.hpp>

KVMELD_NAMESPACE_BEGIN

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
/// order, have the same version. No network is in here (`transport/grpc_server.hpp` is one); the
/// caller gives the time. All calls are thread-safe; none waits for a client.
///
/// @tparam Store a thread-safe `ArbiterStore`; it must outlive the coordinator. What `apply`
/// acknowledged is in it.
template <BlobStore Store, Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128,
          Compressor C = NoCompression>
class Coordinator {
  static_assert(ArbiterStore<Store>, "a round has one cut: the store needs put_if_absent");

 public:
  using Options = CoordinatorOptions<Auth, Hash, C>;
  using Update = CoordinatorUpdate<Hash, C>;

  struct Applied {
    StateVersion version;
    std::vector<FragmentId> lacking;  ///< fragments of the update whose payload is not here
  };

  Coordinator(Store& store, Options options)
      : store_(&store), options_(std::move(options)), replica_(store, options_.replica) {}

  /// Takes up what the store has. Errors: the store's; `invalid_argument` for options that
  /// contradict each other.
  Status open() {
    const std::lock_guard lock(mutex_);
    const auto& replica = options_.replica;
    if (replica.format.chunk_bytes + message_overhead > replica.max_message_bytes) {
      return detail::error(ErrorCode::invalid_argument, "chunks of ", replica.format.chunk_bytes,
                           " bytes do not fit into messages of ", replica.max_message_bytes);
    }
    if (options_.quorum > options_.members.size() && !options_.members.empty()) {
      return detail::error(ErrorCode::invalid_argument, "a quorum of ", options_.quorum, " of ",
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
  [[nodiscard]] Update begin_update(MemberId member = everyone) const {
    return Update(options_.replica.set_hash, options_.replica.format, options_.max_update_bytes,
                  member, {updates_, budget_of(member)});
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
      return detail::error(ErrorCode::truncated, "an update broke off after ", update.items(),
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
    KVMELD_TRY(replica_.join(update.set(), everyone));
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
      return detail::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the state");
    if (!FragmentSet::Entry{id, here, {}}.complete())
      return detail::error(ErrorCode::payload_missing, "the payload of fragment ", id.hex(),
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
      for (const FragmentSet& part : detail::cut(delta, most)) {
        parts.push_back(encode_set(part));
        largest = (std::max)(largest, parts.back().size());
      }
      if (largest + message_overhead <= options_.replica.max_message_bytes) return parts;
      if (most == 1) {
        return detail::error(ErrorCode::oversized, "one entry of ", largest,
                             " bytes where messages have at most ",
                             options_.replica.max_message_bytes);
      }
    }
  }

  /// A member says what it has seen: what all of `replica.members` have seen removed is forgotten,
  /// payloads included.
  void saw(MemberId member, const CausalContext& context) {
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

  [[nodiscard]] ReplicaCounters counters() const {
    const std::lock_guard lock(mutex_);
    return replica_.counters();
  }
  /// What was refused so far.
  [[nodiscard]] CoordinatorCounters refusals() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  [[nodiscard]] Store& store() const noexcept { return *store_; }

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
  [[nodiscard]] std::shared_ptr<detail::UpdateBudget> budget_of(MemberId member) const;
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
  [[nodiscard]] std::vector<MemberId> absent(const detail::Barrier& barrier) const;

  Store* store_;
  Options options_;
  mutable std::mutex mutex_;
  Replica<Store, Auth, Hash, C> replica_;
  std::map<std::uint64_t, detail::CoordinatorSession> sessions_;
  Elapsed clock_{options_.max_wait_ms};
  std::int64_t clock_ms_ = 0;  // the replica's
  std::uint64_t uses_ = 0;
  std::uint64_t states_ = 1;  // changes with the state
  Accounts accounts_;         // by agent; may count what was removed since
  CoordinatorCounters counts_;
  std::shared_ptr<detail::UpdateBudget> updates_ =
      std::make_shared<detail::UpdateBudget>(options_.max_updates_bytes);
  mutable std::mutex budgets_mutex_;
  mutable std::map<MemberId, std::shared_ptr<detail::UpdateBudget>> budgets_;
};

KVMELD_NAMESPACE_END

#include <kvmeld/transport/coordinator_rounds.hpp>
