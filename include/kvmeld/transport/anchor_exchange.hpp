#pragma once

#include <algorithm>
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

#include <kvmeld/session/elapsed.hpp>
#include <kvmeld/session/replica_messages.hpp>
#include <kvmeld/state/anchor_directory.hpp>
#include <kvmeld/state/reconcile.hpp>
#include <kvmeld/state/rendezvous.hpp>
#include <kvmeld/transport/anchor_blobs.hpp>
#include <kvmeld/transport/anchor_exchange_options.hpp>
#include <kvmeld/transport/anchor_graves.hpp>

KVMELD_NAMESPACE_BEGIN

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
/// records tell of it, or buried. Of what else it had pulled, whole or in part, nothing is noted:
/// those blobs stay in the store and harm nobody, since their names are their bytes' hashes and
/// every one is verified when it is read. A later pull takes them up, asks for the rest, and they
/// go when the anchor goes; to be rid of the others start with an empty store.
///
/// @tparam Store a `BlobStore`, which holds published and pulled K/V. It must outlive the exchange.
template <BlobStore Store, Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128,
          Compressor C = NoCompression>
class AnchorExchange {
 public:
  using Options = AnchorExchangeOptions<Auth, Hash, C>;

  AnchorExchange(Store& store, Options options)
      : store_(&store),
        options_(std::move(options)),
        directory_(options_.max_records),
        random_(static_cast<std::uint32_t>(detail::mix_bits(options_.seed))) {
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
  Status receive(MemberId from, std::span<const std::byte> bytes);
  /// Lets time pass: tells news, asks again. A clock that jumps does no harm. Errors: the store's;
  /// nothing is lost, call again.
  Status tick(std::int64_t now_ms);
  /// Messages to be sent, oldest first. Losing them is no harm.
  [[nodiscard]] std::vector<Outgoing> take_outbox() {
    outbox_bytes_ = 0;
    return std::exchange(outbox_, {});
  }

  /// Tells who lives from now on. Peers may differ in it for a while: ownership is where to ask
  /// first, nothing else.
  void set_members(std::vector<MemberId> members) {
    if (std::find(members.begin(), members.end(), options_.self) == members.end())
      members.push_back(options_.self);
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
    options_.members = std::move(members);
    neighbours_ = static_cast<std::uint64_t>(std::bit_width(options_.members.size() - 1));
    std::erase_if(peers_, [&](const auto& peer) { return !lives(peer.first); });
  }
  /// The member that a key is drawn to most.
  [[nodiscard]] MemberId owner(const FragmentId& key) const {
    return rendezvous_rank(key, options_.members, 1)[0];
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
    std::vector<MemberId> candidates{};
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
    std::vector<ReconcileItem> items{};
    std::unique_ptr<Reconciliation> session{};  // reads the items
    std::vector<std::byte> last{};              // message sent
    std::int64_t next = 0, patience = 0, until = 0;
    bool done = false;
  };

  [[nodiscard]] bool lives(MemberId member) const {
    return std::binary_search(options_.members.begin(), options_.members.end(), member);
  }
  [[nodiscard]] std::int64_t jitter(std::int64_t ms) {
    return ms + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(ms / 4 + 1));
  }
  Status post(MemberId to, AnchorMessage type, std::span<const std::byte> body) {
    auto frame = encode_frame(static_cast<std::uint8_t>(type), body, options_.frame);
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
  Status take(MemberId from, std::span<const std::byte> records);
  Status tell(MemberId to, AnchorMessage last, std::vector<AnchorRecord> records);
  Status on_gossip(MemberId from, std::span<const std::byte> body);
  Status on_reconcile(MemberId from, std::span<const std::byte> body);
  Status begin_session(MemberId with);
  Status send_step(MemberId to, bool from_starter, Session& session);
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
  Status on_fetch(MemberId from, std::span<const std::byte> body);
  Status on_piece(MemberId from, std::span<const std::byte> body);
  Status on_lacking(MemberId from, std::span<const std::byte> body);
  void strike(MemberId member);

  Store* store_;
  Options options_;
  AnchorDirectory directory_;
  std::minstd_rand random_;
  std::uint64_t neighbours_ = 0;
  std::map<MemberId, Peer> peers_;
  std::map<FragmentId, Held> held_;
  std::map<BlobKey, std::uint32_t> uses_;  // by what is held, and by pulls
  std::uint64_t adopted_bytes_ = 0;
  std::map<FragmentId, std::uint64_t> rumours_;  // the round in which each was new
  detail::AnchorGraves graves_;
  std::map<std::pair<MemberId, bool>, Session> sessions_;  // true: this peer began it
  std::map<FragmentId, Pull> pulls_;
  std::vector<PulledAnchor> pulled_;
  std::vector<Outgoing> outbox_;
  std::size_t outbox_bytes_ = 0;
  AnchorExchangeCounters counters_;
  Elapsed clock_{options_.max_retry_ms};
  std::int64_t elapsed_ = 0;  // by `clock_`, at the last tick
  std::int64_t next_round_ = 0;
  std::int64_t next_session_ = 0;
  std::uint64_t round_ = 0;
  std::uint64_t agreed_ = 0;  // the round in which a neighbour last had the same digest
};

KVMELD_NAMESPACE_END

#include <kvmeld/transport/anchor_exchange_gossip.hpp>
#include <kvmeld/transport/anchor_exchange_pull.hpp>
