#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
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
  CausalContext context;
  Digest256 set;
  Digest128 merger;

  bool operator==(const StateVersion&) const = default;
};

/// A replica that many clients share: takes updates, gives out state and payloads, and publishes the cuts of rounds.
///
/// It has no say in what the state is: two coordinators that were given the same updates, in any order, have the same version. No network
/// is in here (`transport/grpc_server.hpp` is one); the caller gives the time. All calls are thread-safe; none waits for a client.
///
/// @tparam Store a thread-safe `BlobStore`; it must outlive the coordinator. What `apply` acknowledged is in it.
template <BlobStore Store, Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
class Coordinator {
 public:
  using Options = CoordinatorOptions<Auth, Hash, C>;
  using Update = CoordinatorUpdate<Hash, C>;

  struct Applied {
    StateVersion version;
    std::vector<FragmentId> lacking;  ///< fragments of the update whose payload is not here
  };

  Coordinator(Store& store, Options options) : store_(&store), options_(std::move(options)), replica_(store, options_.replica) {}

  /// Takes up what the store has. Errors: the store's; `invalid_argument` for options that contradict each other.
  Status open() {
    const std::lock_guard lock(mutex_);
    const auto& replica = options_.replica;
    if (replica.format.chunk_bytes + message_overhead > replica.max_message_bytes) {
      return detail::error(ErrorCode::invalid_argument, "chunks of ", replica.format.chunk_bytes, " bytes do not fit into messages of ", replica.max_message_bytes);
    }
    if (options_.quorum > options_.members.size() && !options_.members.empty()) {
      return detail::error(ErrorCode::invalid_argument, "a quorum of ", options_.quorum, " of ", options_.members.size(), " members");
    }
    KVMELD_TRY(replica_.open());
    return settle();
  }

  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] Update begin_update() const { return Update(options_.replica.set_hash, options_.replica.format, options_.max_update_bytes, &updates_); }

  /// Takes an update over: payloads first, then the operations. Durable, as far as the store is, when it returns without error.
  ///
  /// Errors: `truncated` for an update that did not end, `quota_exceeded` (also for an entry of more than `max_marks` marks, and a context
  /// of more than `max_ranges` ranges, which would fit into no message), `invalid_argument` for a payload that no operation names, those
  /// of `Assembler::finish` and of the store. The state is unchanged then.
  [[nodiscard]] Result<Applied> apply(Update& update) {
    if (!update.ended()) return detail::error(ErrorCode::truncated, "an update broke off after ", update.items(), " items");
    std::vector<Fragment> whole;
    for (auto& [id, part] : update.parts()) {
      if (!part.complete()) KVMELD_TRY(load_chunks(*store_, part, options_.replica.format));
      if (!part.complete()) continue;
      auto fragment = part.finish();
      if (!fragment) return fragment.error();
      whole.push_back(*std::move(fragment));
    }
    {
      const std::lock_guard lock(mutex_);
      KVMELD_TRY(admit(update));
    }
    // Without the lock: stores are thread-safe, and a payload that nothing names yet harms nobody.
    for (const Fragment& fragment : whole) {
      if (const auto stored = store_fragment(*store_, fragment, options_.replica.format); !stored) return stored.error();
    }
    const std::lock_guard lock(mutex_);
    KVMELD_TRY(admit(update));
    KVMELD_TRY(replica_.join(update.set(), everyone));
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
    if (!here.valid() && replica_.set().find(id) == nullptr) return detail::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the state");
    if (!FragmentSet::Entry{id, here, {}}.complete()) return detail::error(ErrorCode::payload_missing, "the payload of fragment ", id.hex(), " is not here");
    return here;
  }
  /// What a member that has seen `context` lacks, in sets that fit into a message.
  [[nodiscard]] Result<std::vector<std::vector<std::byte>>> deltas(const CausalContext& context) const {
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
        return detail::error(ErrorCode::oversized, "one entry of ", largest, " bytes where messages have at most ", options_.replica.max_message_bytes);
      }
    }
  }

  /// A member says what it has seen: what all of `replica.members` have seen removed is forgotten, payloads included.
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
  /// Errors: `timed_out` with who is missing, `merger_mismatch`, `not_found` for a round that is long over, the store's.
  [[nodiscard]] std::optional<Result<MergeAnswer>> poll(const MergeAsk& ask, std::int64_t now_ms);

  [[nodiscard]] ReplicaCounters counters() const {
    const std::lock_guard lock(mutex_);
    return replica_.counters();
  }
  [[nodiscard]] Store& store() const noexcept { return *store_; }

  static constexpr std::size_t message_overhead = 1024;  ///< that an envelope may add to what it carries

 private:
  [[nodiscard]] StateVersion version_now() const { return {replica_.set().context(), replica_.set().digest(), options_.replica.merger.digest()}; }
  [[nodiscard]] std::size_t quorum() const noexcept {
    if (options_.quorum > 0) return options_.quorum;
    return options_.members.size() / 2 + 1;
  }
  Status admit(Update& update) const;
  /// What has passed by now, whatever the caller's clock was set to meanwhile; notes when somebody who asks has waited long enough.
  std::int64_t waited(const MergeAsk& ask, std::int64_t now_ms) {
    const std::int64_t now = clock_.advance(now_ms);
    if (!ask.until_ms) ask.until_ms = now + (std::clamp)(ask.timeout_ms, std::int64_t{0}, options_.max_wait_ms);
    return now;
  }
  /// Lets the replica find in the store what it wants. Its clock is the coordinator's to wind: nothing is waited for.
  Status settle() {
    ++states_;
    for (int times = 0; times < (replica_.wanted() > 0 ? 2 : 1); ++times) {
      clock_ms_ += options_.replica.max_retry_ms;
      for (std::size_t left = replica_.wanted() / 64 + 1; left > 0; --left) KVMELD_TRY(replica_.tick(clock_ms_));
    }
    (void)replica_.take_outbox();
    return {};
  }
  detail::CoordinatorSession& session(std::uint64_t number);
  Status forget_rounds(detail::CoordinatorSession& session, std::uint64_t number, std::uint64_t below);
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
  mutable detail::UpdateBudget updates_{options_.max_updates_bytes};
};

KVMELD_NAMESPACE_END

#include <kvmeld/transport/coordinator_rounds.hpp>
