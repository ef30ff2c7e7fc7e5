#pragma once

/// The exchange of anchors between peers, by gossip and pulls, without a server.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchors/detail/directory.hpp>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/reconcile.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// Types of the frames that exchanges send each other.
enum class AnchorMessage : std::uint8_t {
  gossip = 64,     ///< digest of my directory, and records that are new to me
  records = 65,    ///< records that you lack
  reconcile = 66,  ///< a step in finding which ones those are
  fetch = 67,      ///< send me these blobs of that record
  piece = 68,      ///< one of them
  lacking = 69,    ///< I do not have that one
};

/// Who a peer is, whom it exchanges with, and how patient it is.
struct AnchorExchangeOptions {
  replica::MemberId self = 0;
  std::vector<replica::MemberId>
      members{};                     ///< who lives, this one included; `set_members` changes it
  replica::FrameOptions frame{};     ///< `scope`: of `anchor_namespace`
  replica::FragmentFormat format{};  ///< a stored chunk must fit into a message
  bool shared_store = false;         ///< others write to the same store: nothing is erased there
  std::size_t max_message_bytes = std::size_t{1} << 24U;
  std::size_t max_records = std::size_t{1} << 20U;
  std::size_t max_tombstones = 4096;      ///< kept longest, the youngest
  std::int64_t tombstone_ms = 3'600'000;  ///< from the next tick on; outlasts partitions
  /// Of others' K/V that this peer keeps as an owner by rank.
  std::uint64_t adopt_bytes = std::uint64_t{1} << 30U;
  std::int64_t round_ms = 500;  ///< one message to one neighbour
  std::int64_t retry_ms = 100;  ///< of an unanswered request, doubled each time
  std::int64_t max_retry_ms = 10'000;
  /// Wrong pieces after which a peer is not asked for `max_retry_ms`.
  std::uint32_t max_strikes = 3;
  std::uint64_t seed = 1;  ///< of jitter
};

/// What an exchange did so far.
struct AnchorExchangeCounters {
  std::array<std::uint64_t, 256> sent{};        ///< messages by type
  std::array<std::uint64_t, 256> sent_bytes{};  ///< of whole frames, by type
  /// Damaged or hostile messages, wrong blobs among them; not where the store, or a bound of this
  /// peer, was the reason.
  std::uint64_t refused = 0;
  std::uint64_t strikes = 0;   ///< wrong blobs
  std::uint64_t sessions = 0;  ///< reconciliations that this peer began
  std::uint64_t pulled = 0;    ///< anchors whose K/V came, from peers or the store
  std::uint64_t pulls_failed = 0;
  std::uint64_t adopted = 0;  ///< of those, kept as their owner by rank

  [[nodiscard]] std::uint64_t messages() const noexcept {
    std::uint64_t sum = 0;
    for (const std::uint64_t s : sent) sum += s;
    return sum;
  }
};

/// What became of a pull.
struct PulledAnchor {
  FragmentId key{};       ///< of `record_key`
  AnchorRecord record{};  ///< as it was when the pull ended
  /// With the one Δ of the record; or `not_found`: nobody has it, `unavailable`: nobody answered.
  Result<Anchor> anchor;
};

namespace detail {

/// Tombstones in the order in which a peer heard of them, one for each key, however often that was
/// removed. O(log n) each.
///
/// What comes between two ticks gets the time of the later one: a peer knows no other, and by the
/// earlier one a tombstone would be older than it is and go before its time.
class AnchorTombstones {
 public:
  struct Tombstone {
    std::int64_t since = 0;
    FragmentId key{};
  };

  /// The youngest from now on, without a time until the next `date`.
  void add(const FragmentId& key) {
    drop(key);
    by_age_.emplace(++added_, Tombstone{0, key});
    by_key_.emplace(key, added_);
  }
  /// All that were added since the last call are of this time.
  void date(std::int64_t now) {
    for (auto at = by_age_.upper_bound(dated_); at != by_age_.end(); ++at) at->second.since = now;
    dated_ = added_;
  }
  /// For a key that lives again, or whose tombstone is forgotten.
  void drop(const FragmentId& key) {
    const auto at = by_key_.find(key);
    if (at == by_key_.end()) return;
    by_age_.erase(at->second);
    by_key_.erase(at);
  }
  [[nodiscard]] std::size_t size() const noexcept { return by_key_.size(); }
  /// Of at least one, all of which have a time.
  [[nodiscard]] const Tombstone& oldest() const { return by_age_.begin()->second; }

 private:
  std::uint64_t added_ = 0;
  std::uint64_t dated_ = 0;  // of those added, how many have a time
  std::map<std::uint64_t, Tombstone> by_age_;
  std::map<FragmentId, std::uint64_t> by_key_;
};

}  // namespace detail

/// One peer's knowledge of all peers' anchors, without a server: records spread by gossip, K/V
/// moves when somebody asks for it.
///
/// Like `Replica` it does no I/O but through its store and has no clock: the caller gives messages
/// and milliseconds in and sends what `take_outbox` gives out. Not thread-safe.
///
/// *Records.* Each round a peer sends one message, to the member 2^k places after it in the sorted
/// ring, k = round mod ⌈log2 n⌉: the digest of its directory and what it learned in the last 2⌈log2
/// n⌉ rounds. So news reaches all n in about ⌈log2 n⌉ rounds, which is what a peer sends for it,
/// whatever n is (the pattern of the dissemination barrier: Hensgen, Finkel and Manber, 1988).
/// Where digests differ though nothing is new, a `Reconciliation` finds what was lost.
///
/// *K/V.* A key's owner is the member with the highest rendezvous weight. A pull asks it first,
/// then the member that wrote the record, then the next by rank, 2 + ⌈log2 n⌉ at most; every blob
/// is verified by its key. An owner that is asked for what it lacks gets it from the writer and
/// takes the record over, so that the second question of all finds it there and not at the writer.
///
/// *Restarts.* What this peer published or adopted in an earlier life is held again as others'
/// records tell of it, or removed. Of what else it had pulled, whole or in part, nothing is noted:
/// those blobs stay in the store and harm nobody, since their names are their bytes' hashes and
/// every one is verified when it is read. A later pull takes them up, asks for the rest, and they
/// go when the anchor goes; to be rid of the others start with an empty store.
class AnchorExchange {
 public:
  using Options = AnchorExchangeOptions;

  /// @param store holds published and pulled K/V. It must outlive the exchange.
  AnchorExchange(replica::BlobStore& store, Options options)
      : store_(&store),
        options_(std::move(options)),
        directory_(options_.max_records),
        random_(static_cast<std::uint32_t>(extend::mix_bits(options_.seed))) {
    set_members(options_.members);
  }

  /// Puts an anchor's K/V with the Δ of one context (zero: its base alone) into the store and tells
  /// of it. O(bytes).
  ///
  /// @param signature by the policy of the namespace. Errors, nothing told: those of
  /// `store_anchor`; `quota_exceeded`.
  Result<AnchorRecord> publish(const Anchor& anchor, const Digest128& context,
                               std::uint64_t signature) {
    auto stored = store_anchor(*store_, anchor, context, options_.format);
    if (!stored) return stored.error();
    AnchorRecord record{anchor.id,
                        context,
                        text_digest(anchor.base),
                        signature,
                        anchor.base.token_count(),
                        stored->bytes,
                        stored->payload,
                        options_.self,
                        0,
                        anchor.approximate,
                        false};
    // before an older version under this key lets go of those that both need
    count_uses(stored->blobs);
    const Status written = write(record);
    if (written) hold(record_key(record), *stored, false);
    drop_uses(stored->blobs);
    if (!written) return written;
    return record;
  }
  /// Lets go of an anchor's K/V: its blobs leave the store, and where this peer owns the record,
  /// the record ends for all.
  ///
  /// Errors, nothing changed: `quota_exceeded` behind the last version. A key that is not here is
  /// let go already.
  Status withdraw(const FragmentId& key) {
    const AnchorRecord* const record = directory_.find(key);
    if (record != nullptr && record->owner == options_.self) return bury(*record);
    release(key);
    return {};
  }

  /// Others' anchors that are like a segment; metadata only. O(records).
  [[nodiscard]] RemoteAnchors look_up(const DirectoryQuery& query) const {
    return directory_.look_up(query);
  }
  /// Asks for the K/V of a record; `take_pulled` tells how it ended. Errors: `not_found` for a key
  /// without a record; the store's.
  Status pull(const FragmentId& key);
  /// Pulls that have ended since the last call.
  [[nodiscard]] std::vector<PulledAnchor> take_pulled() { return std::exchange(pulled_, {}); }
  [[nodiscard]] std::size_t pulling() const noexcept { return pulls_.size(); }
  /// Keys whose K/V came and was not taken yet, so that no pool can have it.
  [[nodiscard]] std::set<FragmentId> untaken() const {
    std::set<FragmentId> out;
    for (const PulledAnchor& pulled : pulled_) {
      if (pulled.anchor.ok()) out.insert(pulled.key);
    }
    return out;
  }

  /// Takes a message.
  ///
  /// Errors: those of `decode_frame` and of what it holds, which `refused` counts; the store's;
  /// `quota_exceeded` of the directory. With any of them no record and no blob of the message is
  /// taken. But a wrong blob costs its sender a strike, and the pull asks the next peer; behind an
  /// error of the store it asks again after a time; a wrong step ends a reconciliation.
  Status receive(replica::MemberId from, std::span<const std::byte> bytes);
  /// Lets time pass: tells news, asks again. A clock that jumps does no harm. Errors: the store's;
  /// nothing is lost, call again.
  Status tick(std::int64_t now_ms);
  /// Messages to be sent, oldest first. Losing them is no harm.
  [[nodiscard]] std::vector<replica::Outgoing> take_outbox() {
    outbox_bytes_ = 0;
    return std::exchange(outbox_, {});
  }

  /// Tells who lives from now on. Peers may differ in it for a while: ownership is where to ask
  /// first, nothing else.
  void set_members(std::vector<replica::MemberId> members) {
    if (std::find(members.begin(), members.end(), options_.self) == members.end())
      members.push_back(options_.self);
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
    options_.members = std::move(members);
    neighbours_ = static_cast<std::uint64_t>(std::bit_width(options_.members.size() - 1));
    std::erase_if(peers_, [&](const auto& peer) { return !lives(peer.first); });
  }
  /// The member that a key is drawn to most.
  [[nodiscard]] replica::MemberId owner(const FragmentId& key) const {
    return replica::rendezvous_rank(key, options_.members, 1)[0];
  }

  [[nodiscard]] const AnchorDirectory& directory() const noexcept { return directory_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const AnchorExchangeCounters& counters() const noexcept { return counters_; }
  /// ⌈log2 n⌉: to how many others this peer tells news.
  [[nodiscard]] std::uint64_t neighbours() const noexcept { return neighbours_; }
  /// Whether K/V under this key was published, pulled or adopted by this peer and not let go.
  [[nodiscard]] bool holds(const FragmentId& key) const { return held_.count(key) != 0; }
  /// Keys that this peer holds for itself, without those that it adopted.
  [[nodiscard]] std::vector<FragmentId> held() const {
    std::vector<FragmentId> out;
    for (const auto& [key, held] : held_) {
      if (!held.adopted) out.push_back(key);
    }
    return out;
  }

 private:
  static constexpr std::size_t max_sessions = 16;
  static constexpr std::uint32_t max_cycles = 4;  // through all candidates of a pull
  static constexpr std::size_t max_outbox_bytes = std::size_t{64} << 20U;  // of answers

  struct Held {
    StoredAnchor stored;
    bool adopted = false;
  };
  struct Peer {
    std::uint32_t strikes = 0;
    std::int64_t trusted_from = 0;  // not asked before
  };
  struct Pull {
    bool asked = false;  // by the caller, and not by a member of which this peer is the owner
    BlobKey payload{};   // of the record as the pull began
    std::vector<replica::MemberId> candidates{};
    std::vector<std::uint8_t> lacks{};  // (candidates) it said so
    std::size_t at = 0;
    std::uint32_t cycles = 0;
    std::vector<BlobKey> missing{};  // ascending
    std::set<BlobKey> uses{};  // blobs that it put, or that something else here had put; counted
    std::size_t in_flight = 0;
    std::int64_t next = 0;
    std::int64_t patience = 0;
  };
  struct Session {
    std::uint64_t salt = 0;
    std::vector<replica::ReconcileItem> items{};
    std::unique_ptr<replica::Reconciliation> session{};  // reads the items
    std::vector<std::byte> last{};                       // message sent
    std::int64_t next = 0, patience = 0, until = 0;
    bool done = false;
  };

  [[nodiscard]] bool lives(replica::MemberId member) const {
    return std::binary_search(options_.members.begin(), options_.members.end(), member);
  }
  [[nodiscard]] std::int64_t jitter(std::int64_t ms) {
    return ms + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(ms / 4 + 1));
  }
  Status post(replica::MemberId to, AnchorMessage type, std::span<const std::byte> body) {
    auto frame = replica::encode_frame(static_cast<std::uint8_t>(type), body, options_.frame);
    if (!frame) return frame.error();
    ++counters_.sent[static_cast<std::uint8_t>(type)];
    counters_.sent_bytes[static_cast<std::uint8_t>(type)] += frame->size();
    outbox_bytes_ += frame->size();
    outbox_.push_back({to, static_cast<std::uint8_t>(type), *std::move(frame)});
    return {};
  }
  /// Joins a record of this peer's own, as the newest, and tells it.
  Status write(AnchorRecord& record) {
    auto next = directory_.next_version(record);
    if (!next) return next.error();
    KVMELD_TRY(directory_.join(*next).status());
    record = *next;
    heard(record_key(record), record);
    return {};
  }
  Status bury(const AnchorRecord& record) {
    AnchorRecord tombstone;
    tombstone.id = record.id;
    tombstone.context = record.context;
    tombstone.owner = options_.self;
    tombstone.removed = true;
    return write(tombstone);
  }
  void count_uses(std::span<const BlobKey> blobs) {
    for (const BlobKey& blob : blobs) ++uses_[blob];
  }
  /// Takes blobs out of the store that nothing else here needs. What the store refuses stays there
  /// and harms nobody.
  template <class Blobs>
  void drop_uses(const Blobs& blobs) {
    for (const BlobKey& blob : blobs) {
      if (--uses_[blob] > 0) continue;
      uses_.erase(blob);
      if (!options_.shared_store) (void)store_->erase(blob);
    }
  }
  void hold(const FragmentId& key, StoredAnchor stored, bool adopted) {
    count_uses(stored.blobs);
    release(key);
    if (adopted) adopted_bytes_ += stored.bytes;
    held_.emplace(key, Held{std::move(stored), adopted});
  }
  void release(const FragmentId& key) {
    const auto at = held_.find(key);
    if (at == held_.end()) return;
    if (at->second.adopted) adopted_bytes_ -= at->second.stored.bytes;
    drop_uses(at->second.stored.blobs);
    held_.erase(at);
  }

  /// Counted by a pull until it ends, so that nothing that ends before takes it away.
  void use(Pull& pull, const BlobKey& blob) {
    if (pull.uses.insert(blob).second) ++uses_[blob];
  }
  [[nodiscard]] bool may_adopt(std::uint64_t bytes) const noexcept {
    return adopted_bytes_ <= options_.adopt_bytes && bytes <= options_.adopt_bytes - adopted_bytes_;
  }

  void heard(const FragmentId& key, const AnchorRecord& record);
  Status reclaim(const FragmentId& key, const AnchorRecord& record);
  Status take(replica::MemberId from, std::span<const std::byte> records);
  Status tell(replica::MemberId to, AnchorMessage last, std::vector<AnchorRecord> records);
  Status on_gossip(replica::MemberId from, std::span<const std::byte> body);
  Status on_reconcile(replica::MemberId from, std::span<const std::byte> body);
  Status begin_session(replica::MemberId with);
  Status send_step(replica::MemberId to, bool from_starter, Session& session);
  Status gossip();
  Status run_sessions();
  void drop_tombstones();

  [[nodiscard]] Result<std::vector<BlobKey>> missing_blobs(const AnchorRecord& record,
                                                           Pull* pull = nullptr);
  void aim(const FragmentId& key, const AnchorRecord& record, Pull& pull);
  Status begin_pull(const FragmentId& key, const AnchorRecord& record, bool asked);
  Status pursue(const FragmentId& key, Pull& pull);
  Status ask(const FragmentId& key, Pull& pull);
  Status step_on(const FragmentId& key, Pull& pull);
  [[nodiscard]] bool next_candidate(Pull& pull);
  Status complete(const FragmentId& key, const AnchorRecord& record, const AnchorList& list,
                  Anchor anchor, bool asked);
  Status fail(const FragmentId& key, Status why);
  Status on_fetch(replica::MemberId from, std::span<const std::byte> body);
  Status on_piece(replica::MemberId from, std::span<const std::byte> body);
  Status on_lacking(replica::MemberId from, std::span<const std::byte> body);
  void strike(replica::MemberId member);

  replica::BlobStore* store_;
  Options options_;
  AnchorDirectory directory_;
  std::minstd_rand random_;
  std::uint64_t neighbours_ = 0;
  std::map<replica::MemberId, Peer> peers_;
  std::map<FragmentId, Held> held_;
  std::map<BlobKey, std::uint32_t> uses_;  // by what is held, and by pulls
  std::uint64_t adopted_bytes_ = 0;
  std::map<FragmentId, std::uint64_t> rumours_;  // the round in which each was new
  detail::AnchorTombstones tombstones_;
  std::map<std::pair<replica::MemberId, bool>, Session> sessions_;  // true: this peer began it
  std::map<FragmentId, Pull> pulls_;
  std::vector<PulledAnchor> pulled_;
  std::vector<replica::Outgoing> outbox_;
  std::size_t outbox_bytes_ = 0;
  AnchorExchangeCounters counters_;
  replica::Elapsed clock_{options_.max_retry_ms};
  std::int64_t elapsed_ = 0;  // by `clock_`, at the last tick
  std::int64_t next_round_ = 0;
  std::int64_t next_session_ = 0;
  std::uint64_t round_ = 0;
  std::uint64_t agreed_ = 0;  // the round in which a neighbour last had the same digest
};

/// Brings what an exchange tells in step with a pool: anchors that no member has told of yet are
/// published, a record for each of their contexts (one without a context for an anchor without
/// offsets); what has left the pool is withdrawn, but for pulled anchors that `take_pulled` has not
/// given yet. The records told anew.
///
/// Call it after commits, those of pulled anchors too: one that was taken and is not in the pool is
/// withdrawn. One pool for one exchange, whose namespace is `anchor_namespace` of the pool's space
/// and signature policy. O(bytes) for what is new, O(anchors) else. Errors: those of `publish`;
/// what was published before stays, and a retry goes on from there.
template <class Signature, class Eviction>
[[nodiscard]] Result<std::size_t> publish_pool(AnchorExchange& exchange,
                                               const AnchorPool<Signature, Eviction>& pool) {
  const auto now = pool.snapshot();
  std::set<FragmentId> here;
  std::size_t told = 0;
  for (std::size_t i = 0; i < now->table.size(); ++i) {
    const Anchor& anchor = *now->table.anchor(i);
    const auto publish = [&](const Digest128& context) -> Status {
      const FragmentId key = record_key(anchor.id, context);
      here.insert(key);
      const AnchorRecord* const record = exchange.directory().find(key);
      const bool mine = record != nullptr && record->owner == exchange.options().self;
      const bool better = record != nullptr && record->approximate && !anchor.approximate;
      if (record != nullptr && !better && (!mine || exchange.holds(key))) return {};
      KVMELD_TRY(exchange.publish(anchor, context, now->table.signature(i)).status());
      ++told;
      return {};
    };
    if (anchor.offsets.empty()) KVMELD_TRY(publish({}));
    for (const ContextOffset& offset : anchor.offsets) KVMELD_TRY(publish(offset.context));
  }
  const std::set<FragmentId> untaken = exchange.untaken();
  for (const FragmentId& key : exchange.held()) {
    if (here.count(key) == 0 && untaken.count(key) == 0) KVMELD_TRY(exchange.withdraw(key));
  }
  return told;
}

/// Puts a pulled anchor into a pool, which adds its Δ where it has the anchor already. Errors: the
/// pull's; those of `AnchorPool::commit`.
template <class Signature, class Eviction>
[[nodiscard]] Result<CommitResult> commit_pulled(AnchorPool<Signature, Eviction>& pool,
                                                 const PulledAnchor& pulled) {
  if (!pulled.anchor) return pulled.anchor.error();
  return pool.commit(*pulled.anchor);
}

// How exchanges come to the same directory: rumours, digests, and reconciliation where those
// differ.

namespace detail {

/// Whether an error says that a message is wrong, and not that this peer's store or bounds could
/// not take it.
[[nodiscard]] constexpr bool blames_message(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::not_found:
    case ErrorCode::unavailable:
    case ErrorCode::timed_out:
    case ErrorCode::store_full:
    case ErrorCode::quota_exceeded:
      return false;
    default:
      return true;
  }
}

}  // namespace detail

inline Status AnchorExchange::receive(replica::MemberId from, std::span<const std::byte> bytes) {
  const auto frame = replica::decode_frame(bytes, options_.frame, from);
  Status status = frame.status();
  if (status.ok() && from != options_.self) {
    switch (static_cast<AnchorMessage>(frame->type)) {
      case AnchorMessage::gossip:
        status = on_gossip(from, frame->body);
        break;
      case AnchorMessage::records:
        status = take(from, frame->body);
        break;
      case AnchorMessage::reconcile:
        status = on_reconcile(from, frame->body);
        break;
      case AnchorMessage::fetch:
        status = on_fetch(from, frame->body);
        break;
      case AnchorMessage::piece:
        status = on_piece(from, frame->body);
        break;
      case AnchorMessage::lacking:
        status = on_lacking(from, frame->body);
        break;
      default:
        break;  // of a newer minor version
    }
  }
  if (!status && detail::blames_message(status.code())) ++counters_.refused;
  return status;
}

inline Status AnchorExchange::tick(std::int64_t now_ms) {
  elapsed_ = clock_.advance(now_ms);
  Status status;
  const auto also = [&status](Status other) {
    if (!other && status) status = std::move(other);
  };
  if (elapsed_ >= next_round_) {
    next_round_ = elapsed_ + jitter(options_.round_ms);
    also(gossip());
  }
  also(run_sessions());
  std::vector<FragmentId> due;
  for (const auto& [key, pull] : pulls_) {
    if (pull.next <= elapsed_) due.push_back(key);
  }
  for (const FragmentId& key : due) {
    const auto at = pulls_.find(key);
    if (at == pulls_.end()) continue;
    // whoever was asked was silent
    also(at->second.in_flight > 0 ? step_on(key, at->second) : pursue(key, at->second));
  }
  drop_tombstones();
  return status;
}

/// What follows from a record that is news here.
inline void AnchorExchange::heard(const FragmentId& key, const AnchorRecord& record) {
  rumours_[key] = round_;
  if (record.removed)
    tombstones_.add(key);
  else
    tombstones_.drop(key);
  const auto held = held_.find(key);
  if (held == held_.end()) return;
  const bool gone = record.removed || record.payload != held->second.stored.payload;
  if (gone || (held->second.adopted && record.owner != options_.self)) release(key);
}

/// A record that says that this peer has something, and this peer does not know of it: an earlier
/// life of it wrote that. What the store kept is held again, and what it did not keep is removed,
/// so that nobody asks for it in vain.
inline Status AnchorExchange::reclaim(const FragmentId& key, const AnchorRecord& record) {
  const auto missing = missing_blobs(record);
  if (!missing && missing.error().code() == ErrorCode::unavailable) return missing.error();
  if (missing && missing->empty() && may_adopt(record.bytes)) {
    const auto list = detail::load_list(*store_, record, options_.format);
    if (!list) return list.error();
    hold(key, detail::stored_anchor(record.payload, *list), true);
    return {};
  }
  return bury(AnchorRecord(record));
}

/// Joins records of a peer, all or none, and sends back what is newer here.
inline Status AnchorExchange::take(replica::MemberId from, std::span<const std::byte> records) {
  const auto decoded = decode_records(records, options_.frame.scope);
  if (!decoded) return decoded.error();
  AnchorDirectory batch(decoded->size());
  for (const AnchorRecord& record : *decoded) KVMELD_TRY(batch.join(record).status());
  std::vector<const AnchorDirectory::Entry*> other;
  for (const auto& [key, entry] : batch.entries()) {
    const AnchorRecord* const mine = directory_.newest(key);
    if (mine == nullptr || !(*mine == entry.record)) other.push_back(&entry);
  }
  KVMELD_TRY(directory_.join(batch));
  std::vector<AnchorRecord> newer;
  for (const AnchorDirectory::Entry* const entry : other) {
    const FragmentId key = record_key(entry->record);
    const AnchorRecord& now = *directory_.newest(key);
    if (!(now == entry->record)) {
      newer.push_back(now);
      continue;
    }
    heard(key, now);
    // what the store refuses now is found out when it is asked for
    if (now.owner == options_.self && !now.removed && !holds(key)) (void)reclaim(key, now);
  }
  return newer.empty() || outbox_bytes_ > max_outbox_bytes
             ? Status()
             : tell(from, AnchorMessage::records, std::move(newer));
}

/// Sends records in messages that are not too long. The last one is of the type given: `gossip` has
/// the digest before its records.
inline Status AnchorExchange::tell(replica::MemberId to, AnchorMessage last,
                                   std::vector<AnchorRecord> records) {
  const std::size_t room =
      options_.max_message_bytes > 512 ? options_.max_message_bytes - 256 : 256;
  const std::size_t most = (std::max)(room / detail::max_record_bytes, std::size_t{1});
  std::span<const AnchorRecord> left(records);
  for (; left.size() > most; left = left.subspan(most)) {
    KVMELD_TRY(
        post(to, AnchorMessage::records, encode_records(options_.frame.scope, left.first(most))));
  }
  extend::ByteWriter w;
  if (last == AnchorMessage::gossip) {
    for (const std::uint64_t word : directory_.digest().words) w.value(word);
  }
  w.bytes(encode_records(options_.frame.scope, left));
  return post(to, last, w.written());
}

/// One round: one message to one neighbour.
inline Status AnchorExchange::gossip() {
  const std::size_t n = options_.members.size();
  if (n < 2) return {};
  const auto self = static_cast<std::size_t>(
      std::lower_bound(options_.members.begin(), options_.members.end(), options_.self) -
      options_.members.begin());
  const replica::MemberId to =
      options_.members[(self + (std::size_t{1} << (round_ % neighbours_))) % n];
  std::erase_if(rumours_,
                [&](const auto& rumour) { return rumour.second + 2 * neighbours_ <= round_; });
  std::vector<AnchorRecord> fresh;
  for (const auto& [key, round] : rumours_) {
    if (const AnchorRecord* const record = directory_.newest(key)) fresh.push_back(*record);
  }
  ++round_;
  return tell(to, AnchorMessage::gossip, std::move(fresh));
}

inline Status AnchorExchange::on_gossip(replica::MemberId from, std::span<const std::byte> body) {
  extend::ByteReader r(body);
  Digest256 theirs;
  for (std::uint64_t& word : theirs.words) word = r.value<std::uint64_t>();
  KVMELD_TRY(r.status("gossip"));
  const auto records = body.subspan(r.offset());
  KVMELD_TRY(take(from, records));
  if (theirs == directory_.digest()) {
    agreed_ = round_;
    return {};
  }
  // While news is under way digests differ and nothing is wrong; but not for ever.
  const bool quiet = rumours_.empty() && records.size() == detail::no_records_bytes;
  if ((quiet || round_ - agreed_ > 4 * neighbours_) && elapsed_ >= next_session_)
    return begin_session(from);
  return {};
}

inline Status AnchorExchange::begin_session(replica::MemberId with) {
  // One of this peer's own at a time, and none with whom one is under way already.
  const auto running = std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& s) {
    return (s.first.second || s.first.first == with) && !s.second.done;
  });
  if (running) return {};
  Session session;
  session.salt = extend::mix_bits(options_.seed ^
                                  extend::mix_bits(options_.self + (counters_.sessions << 32U)));
  session.items = directory_.reconcile_items();
  session.session = std::make_unique<replica::Reconciliation>(session.items);
  session.patience = options_.retry_ms;
  auto first = session.session->start(session.salt);
  if (!first) return first.error();
  session.last = *std::move(first);
  ++counters_.sessions;
  agreed_ = round_;
  next_session_ = elapsed_ + options_.round_ms * static_cast<std::int64_t>(
                                                     neighbours_ + random_() % (neighbours_ + 1));
  Session& placed = sessions_[{with, true}] = std::move(session);
  return send_step(with, true, placed);
}

inline Status AnchorExchange::send_step(replica::MemberId to, bool from_starter, Session& session) {
  session.next = elapsed_ + jitter(session.patience);
  session.until = elapsed_ + 20 * options_.retry_ms;
  extend::ByteWriter w;
  w.value(session.salt);
  w.value(static_cast<std::uint8_t>(from_starter));
  w.bytes(session.last);
  return post(to, AnchorMessage::reconcile, w.written());
}

inline Status AnchorExchange::on_reconcile(replica::MemberId from,
                                           std::span<const std::byte> body) {
  extend::ByteReader r(body);
  const auto salt = r.value<std::uint64_t>();
  const bool from_starter = extend::read_bool(r);
  KVMELD_TRY(r.status("reconciliation"));
  auto at = sessions_.find({from, !from_starter});
  if (at == sessions_.end() || at->second.salt != salt) {
    // one that has ended, or too many: it begins another
    if (!from_starter || sessions_.size() >= max_sessions) return {};
    Session fresh;
    fresh.salt = salt;
    fresh.items = directory_.reconcile_items();
    fresh.session = std::make_unique<replica::Reconciliation>(fresh.items);
    fresh.patience = options_.retry_ms;
    at = sessions_.insert_or_assign({from, false}, std::move(fresh)).first;
  }
  Session& session = at->second;
  session.until = elapsed_ + 20 * options_.retry_ms;
  auto reply = session.session->receive(body.subspan(r.offset()));
  if (!reply) {
    sessions_.erase(at);
    return reply.error();
  }
  if (reply->message) {
    session.patience = options_.retry_ms;
    session.last = *std::move(reply->message);
    KVMELD_TRY(send_step(from, !from_starter, session));
  }
  if (!reply->done || std::exchange(session.done, true)) return {};
  std::vector<AnchorRecord> lacking;
  const replica::ReconcileDifference& difference = session.session->result();
  for (const std::vector<FragmentId>* const keys : {&difference.mine_only, &difference.different}) {
    for (const FragmentId& key : *keys) {
      if (const AnchorRecord* const record = directory_.newest(key)) lacking.push_back(*record);
    }
  }
  return lacking.empty() ? Status() : tell(from, AnchorMessage::records, std::move(lacking));
}

/// Sends again what was not answered; forgets sessions that nobody goes on with.
inline Status AnchorExchange::run_sessions() {
  std::erase_if(sessions_, [&](const auto& s) { return s.second.until <= elapsed_; });
  for (auto& [who, session] : sessions_) {
    if (session.done || !who.second || session.next > elapsed_) continue;
    const std::int64_t until = session.until;  // sending again keeps nothing alive
    session.patience = (std::min)(session.patience * 2, options_.max_retry_ms);
    KVMELD_TRY(send_step(who.first, true, session));
    session.until = until;
  }
  return {};
}

inline void AnchorExchange::drop_tombstones() {
  tombstones_.date(elapsed_);
  while (tombstones_.size() > 0 &&
         (tombstones_.size() > options_.max_tombstones ||
          elapsed_ - tombstones_.oldest().since >= options_.tombstone_ms)) {
    const FragmentId key = tombstones_.oldest().key;
    tombstones_.drop(key);
    directory_.forget(key);
  }
}

// How K/V follows records: asked for by whoever needs it, blob by blob, verified before it counts.

inline Status AnchorExchange::pull(const FragmentId& key) {
  const AnchorRecord* const record = directory_.find(key);
  if (record == nullptr)
    return extend::error(ErrorCode::not_found, "no record under ", key.hex(),
                         "; it was removed, or never heard of");
  if (const auto running = pulls_.find(key); running != pulls_.end()) {
    running->second.asked = true;
    return {};
  }
  return begin_pull(key, *record, true);
}

/// What the store lacks of an anchor: the blob that lists its chunks, or else some of those. A list
/// that is not the record's is an error.
inline Result<std::vector<BlobKey>> AnchorExchange::missing_blobs(const AnchorRecord& record,
                                                                  Pull* pull) {
  const auto list = detail::load_list(*store_, record, options_.format);
  if (!list) {
    const ErrorCode code = list.error().code();
    const auto there = store_->contains(record.payload);
    if (!there) return there.error();
    // also where it was wrong and is erased
    if (!*there && code != ErrorCode::unavailable) return std::vector<BlobKey>{record.payload};
    return list.error();
  }
  std::vector<BlobKey> out;
  const auto share = [&](const BlobKey& blob) {
    if (pull != nullptr && uses_.count(blob) != 0) use(*pull, blob);
  };
  share(record.payload);
  for (const std::vector<BlobKey>& chunks : list->chunks) {
    for (const BlobKey& key : chunks) {
      const auto there = store_->contains(key);
      if (!there) return there.error();
      if (*there)
        share(key);
      else
        out.push_back(key);
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

inline Status AnchorExchange::begin_pull(const FragmentId& key, const AnchorRecord& record,
                                         bool asked) {
  Pull& pull = pulls_[key];
  pull.asked = asked;
  aim(key, record, pull);
  auto missing = missing_blobs(record, &pull);
  Status begun = missing.status();
  if (missing) {
    pull.missing = *std::move(missing);
    begun = pursue(key, pull);
  }
  const auto at = pulls_.find(key);
  if (!begun && at != pulls_.end()) {
    drop_uses(at->second.uses);
    pulls_.erase(at);
  }
  return begun;
}

/// From the first candidate on, for the version of a record.
inline void AnchorExchange::aim(const FragmentId& key, const AnchorRecord& record, Pull& pull) {
  drop_uses(std::exchange(pull.uses, {}));
  pull.missing.clear();
  pull.at = pull.in_flight = 0;
  pull.cycles = 0;
  pull.next = 0;
  pull.payload = record.payload;
  pull.patience = options_.retry_ms;
  pull.candidates =
      replica::rendezvous_rank(key, options_.members, static_cast<std::size_t>(neighbours_) + 2);
  if (lives(record.owner)) {
    std::erase(pull.candidates, record.owner);
    pull.candidates.insert(
        pull.candidates.begin() + (pull.candidates.empty() || owner(key) == record.owner ? 0 : 1),
        record.owner);
  }
  std::erase(pull.candidates, options_.self);
  pull.lacks.assign(pull.candidates.size(), 0);
}

/// Goes on with what is missing, and ends where nothing is. Errors: `unavailable`, behind which the
/// pull stays and the next tick goes on.
inline Status AnchorExchange::pursue(const FragmentId& key, Pull& pull) {
  const AnchorRecord* const record = directory_.find(key);
  if (record == nullptr)
    return fail(key, extend::error(ErrorCode::not_found, "the record under ", key.hex(),
                                   " was removed while its K/V was on the way"));
  if (record->payload != pull.payload) aim(key, *record, pull);  // another version
  const auto look = [&]() -> Status {
    auto missing = missing_blobs(*record, &pull);
    if (!missing) return missing.error();
    pull.missing = *std::move(missing);
    return {};
  };
  const auto stop = [&](const Status& why) {
    return why.code() == ErrorCode::unavailable ? why : fail(key, why);
  };
  if (pull.missing.empty()) {
    if (const Status looked = look(); !looked) return stop(looked);
  }
  if (pull.missing.empty()) {
    auto list = detail::load_list(*store_, *record, options_.format);
    auto anchor =
        list ? detail::fill_list(*store_, *list, options_.format) : Result<Anchor>(list.error());
    if (anchor) return complete(key, AnchorRecord(*record), *list, *std::move(anchor), pull.asked);
    if (anchor.error().code() == ErrorCode::unavailable) return anchor.error();
    // What rotted in the store is erased, what another record let go of is not there: both are
    // asked for.
    if (!detail::is_lost(anchor.error().code()) || ++pull.cycles > max_cycles)
      return fail(key, anchor.error());
    if (const Status looked = look(); !looked) return stop(looked);
    if (pull.missing.empty()) return fail(key, anchor.error());
  }
  if (pull.candidates.empty())
    return fail(key, extend::error(ErrorCode::not_found, "no other member lives who could have ",
                                   key.hex()));
  if (pull.lacks[pull.at] != 0) return step_on(key, pull);
  return ask(key, pull);
}

inline Status AnchorExchange::ask(const FragmentId& key, Pull& pull) {
  replica::messages::Fetch fetch{key, {}};
  const std::size_t room =
      (std::max<std::size_t>)(1, options_.max_message_bytes / (options_.format.chunk_bytes + 1));
  const std::size_t most =
      (std::min)({pull.missing.size(), room * 8, replica::messages::Fetch::max_chunks});
  fetch.chunks.assign(pull.missing.begin(),
                      pull.missing.begin() + static_cast<std::ptrdiff_t>(most));
  pull.in_flight = most;
  pull.next = elapsed_ + jitter(pull.patience);
  return post(pull.candidates[pull.at], AnchorMessage::fetch, replica::messages::encode(fetch));
}

/// The next candidate that is trusted and did not say that it lacks the anchor.
inline bool AnchorExchange::next_candidate(Pull& pull) {
  for (std::size_t tries = 0; tries < pull.candidates.size(); ++tries) {
    pull.at = (pull.at + 1) % pull.candidates.size();
    if (pull.at == 0) {
      ++pull.cycles;
      pull.patience = (std::min)(pull.patience * 2, options_.max_retry_ms);
    }
    const auto peer = peers_.find(pull.candidates[pull.at]);
    if (pull.lacks[pull.at] == 0 && (peer == peers_.end() || peer->second.trusted_from <= elapsed_))
      return true;
  }
  return false;
}

inline Status AnchorExchange::step_on(const FragmentId& key, Pull& pull) {
  const AnchorRecord* const record = directory_.find(key);
  // what they lack is not what is told of now
  if (record == nullptr || record->payload != pull.payload) return pursue(key, pull);
  const auto lacking =
      static_cast<std::size_t>(std::count(pull.lacks.begin(), pull.lacks.end(), std::uint8_t{1}));
  if (lacking == pull.candidates.size()) {
    Status why = extend::error(ErrorCode::not_found, "none of ", lacking,
                               " members asked has the K/V of ", key.hex());
    // who wrote it is gone, and took it along; behind the last version it stays
    if (!lives(record->owner)) (void)bury(AnchorRecord(*record));
    return fail(key, std::move(why));
  }
  const bool other = next_candidate(pull);
  if (pull.cycles >= max_cycles)
    return fail(key, extend::error(ErrorCode::unavailable, pull.candidates.size() - lacking,
                                   " members did not give the K/V of ", key.hex(), " when asked ",
                                   max_cycles, " times; try later"));
  if (other) return ask(key, pull);
  pull.in_flight = 1;  // nobody to be asked just now
  pull.next = elapsed_ + jitter(pull.patience);
  return {};
}

inline Status AnchorExchange::complete(const FragmentId& key, const AnchorRecord& record,
                                       const AnchorList& list, Anchor anchor, bool asked) {
  AnchorRecord now = record;
  const auto pull = pulls_.find(key);
  const std::set<BlobKey> uses = std::move(pull->second.uses);
  pulls_.erase(pull);
  ++counters_.pulled;
  const auto before = held_.find(key);
  bool adopted = before != held_.end() && before->second.adopted;
  if (!adopted && record.owner != options_.self && owner(key) == options_.self &&
      may_adopt(record.bytes)) {
    now.owner = options_.self;
    adopted = write(now).ok();
    if (adopted)
      ++counters_.adopted;
    else
      now = record;
  }
  hold(key, detail::stored_anchor(record.payload, list), adopted);
  drop_uses(uses);
  if (asked) pulled_.push_back({key, now, std::move(anchor)});
  return {};
}

inline Status AnchorExchange::fail(const FragmentId& key, Status why) {
  const auto at = pulls_.find(key);
  ++counters_.pulls_failed;
  const AnchorRecord* const record = directory_.newest(key);
  if (at->second.asked)
    pulled_.push_back({key, record == nullptr ? AnchorRecord{} : *record, std::move(why)});
  drop_uses(at->second.uses);  // parts of an anchor, which nobody here will ask for
  pulls_.erase(at);
  return {};
}

inline Status AnchorExchange::on_fetch(replica::MemberId from, std::span<const std::byte> body) {
  auto fetch = replica::messages::decode_fetch(body);
  if (!fetch) return fetch.error();
  std::sort(fetch->chunks.begin(), fetch->chunks.end());
  fetch->chunks.erase(std::unique(fetch->chunks.begin(), fetch->chunks.end()), fetch->chunks.end());
  std::optional<BlobKey> lacking;
  for (const BlobKey& key : fetch->chunks) {
    // asks of a few bytes do not fill this peer's memory; the asker tries again
    if (outbox_bytes_ > max_outbox_bytes) return {};
    const auto stored = load_chunk(*store_, key, options_.format);  // what rotted is not sent
    if (stored)
      KVMELD_TRY(post(
          from, AnchorMessage::piece,
          replica::messages::encode(replica::messages::Piece{fetch->id, key, stored->bytes()})));
    else if (stored.error().code() == ErrorCode::unavailable)
      return stored.error();
    else
      lacking = key;
  }
  if (!lacking) return {};
  KVMELD_TRY(post(from, AnchorMessage::lacking,
                  replica::messages::encode(replica::messages::Piece{fetch->id, *lacking, {}})));
  const AnchorRecord* const record = directory_.find(fetch->id);
  if (record == nullptr || pulls_.count(fetch->id) != 0) return {};
  // it says so itself: after a restart, or a disk that rotted
  if (record->owner == options_.self) {
    const auto missing = missing_blobs(*record);
    if (!missing && missing.error().code() == ErrorCode::unavailable) return missing.error();
    return missing && missing->empty() ? Status() : bury(AnchorRecord(*record));
  }
  const bool adopts = owner(fetch->id) == options_.self && may_adopt(record->bytes);
  return adopts ? begin_pull(fetch->id, AnchorRecord(*record), false) : Status();
}

inline void AnchorExchange::strike(replica::MemberId member) {
  ++counters_.strikes;
  if (!lives(member)) return;
  Peer& peer = peers_[member];
  if (++peer.strikes < options_.max_strikes) return;
  peer.strikes = 0;
  peer.trusted_from = elapsed_ + options_.max_retry_ms;
}

inline Status AnchorExchange::on_piece(replica::MemberId from, std::span<const std::byte> body) {
  const auto piece = replica::messages::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = pulls_.find(piece->id);
  if (at == pulls_.end()) return {};
  Pull& pull = at->second;
  const auto wanted = std::lower_bound(pull.missing.begin(), pull.missing.end(), piece->key);
  if (wanted == pull.missing.end() || *wanted != piece->key) return {};
  const FragmentId key = piece->id;
  const Status whole = replica::decode_chunk(piece->bytes, piece->key, replica::max_chunk_bytes,
                                             options_.format.compressor.get(), options_.format.hash)
                           .status();
  if (!whole) {
    strike(from);
    if (pull.candidates[pull.at] == from) KVMELD_TRY(step_on(key, pull));
    return whole;
  }
  const auto fresh = store_->put(piece->key, piece->bytes);
  if (!fresh) return fresh.error();
  if (*fresh || uses_.count(piece->key) != 0) use(pull, piece->key);
  pull.missing.erase(wanted);
  pull.in_flight -= pull.in_flight > 0 ? 1U : 0U;
  pull.next = elapsed_ + jitter(pull.patience);
  if (pull.in_flight > 0 && !pull.missing.empty()) return {};
  pull.in_flight = 0;
  return pursue(key, pull);
}

inline Status AnchorExchange::on_lacking(replica::MemberId from, std::span<const std::byte> body) {
  const auto piece = replica::messages::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = pulls_.find(piece->id);
  if (at == pulls_.end()) return {};
  Pull& pull = at->second;
  const auto who = std::find(pull.candidates.begin(), pull.candidates.end(), from);
  if (who == pull.candidates.end()) return {};
  const auto index = static_cast<std::size_t>(who - pull.candidates.begin());
  pull.lacks[index] = 1;
  return index == pull.at ? step_on(FragmentId(piece->id), pull) : Status();
}

}  // namespace anchors

KVMELD_NAMESPACE_END
