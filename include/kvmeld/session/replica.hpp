#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/replica_messages.hpp>
#include <kvmeld/session/replica_options.hpp>

KVMELD_NAMESPACE_BEGIN

/// One member's copy of the set, kept in step with the others' by messages that may be lost, repeated, reordered and damaged.
///
/// It does no I/O but through its store, and has no clock: the caller gives messages and milliseconds in and sends what `take_outbox`
/// gives out, so that a simulation runs what a deployment runs. Operations are broadcast as deltas; news of what has been seen follow at
/// intervals, and whoever lacks something asks for it. Payloads come after ids, chunk by chunk, verified against the id. Not thread-safe.
///
/// @tparam Store a `BlobStore`: what was written there survives this object. It must outlive the replica.
template <BlobStore Store, Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
class Replica {
 public:
  using Options = ReplicaOptions<Auth, Hash, C>;

  Replica(Store& store, Options options) : store_(&store), options_(std::move(options)), set_(options_.set_hash), random_(options_.seed) {}

  /// Reads the store's records. A record that is damaged costs itself; what it held comes back from peers.
  ///
  /// Errors: the store's, call again; `dot_reused` where this agent was in this epoch before: take `fresh_epoch()`.
  Status open() {
    opened_ = false;
    const Status read = read_records();
    opened_ = true;
    KVMELD_TRY(read);
    for (const FragmentSet::Entry& entry : set_.entries()) want(entry);
    const std::uint64_t used = set_.context().next_sequence(options_.self, options_.epoch);
    if (used <= next_sequence_) return {};
    next_sequence_ = used;
    return detail::error(ErrorCode::dot_reused, "agent ", options_.self, " did ", used, " operations in epoch ", options_.epoch,
                         " before; an agent takes a fresh epoch whenever it starts");
  }

  /// Adds a fragment that this agent produced. Durable, as far as the store is, when it returns without error; told to the others
  /// with the next outbox.
  ///
  /// Errors: the store's, `payload_missing`, `hash_mismatch`, `non_finite`, `quota_exceeded`; the set is unchanged then.
  Result<Provenance> insert(const Fragment& fragment, std::optional<float> confidence = std::nullopt, std::int64_t time_ms = 0) {
    KVMELD_TRY(FragmentSet(options_.set_hash).insert(fragment, {options_.self, 0, options_.epoch}, confidence));
    KVMELD_TRY(check_quota());
    const auto stored = store_fragment(*store_, fragment, options_.format);
    if (!stored) return stored.error();
    FragmentSet operation(options_.set_hash);
    const Provenance dot = next_dot();  // not before: a store that is away uses up no dots
    KVMELD_TRY(operation.insert(fragment, dot, confidence, time_ms));
    counters_.stored.bytes += stored->bytes;
    counters_.stored.dedup_bytes += stored->dedup_bytes;
    counters_.stored.dedup_hits += stored->dedup_hits;
    KVMELD_TRY(commit(operation));
    return dot;
  }
  /// As `FragmentSet::supersede`, told to the others.
  Result<Provenance> supersede(const FragmentId& id, const FragmentId& successor) {
    return change([&](FragmentSet& set, const Provenance& dot) { return set.supersede(id, successor, dot); });
  }
  /// As `FragmentSet::remove`, told to the others.
  Result<Provenance> remove(const FragmentId& id) {
    return change([&](FragmentSet& set, const Provenance& dot) { return set.remove(id, dot); });
  }
  /// As `FragmentSet::evict`: this replica alone forgets the bytes.
  Status evict(const FragmentId& id) { return set_.evict(id); }
  /// Wants a fragment's bytes, which were evicted here. Errors: `not_found` for an id that is not in the set.
  Status fetch(const FragmentId& id) {
    const FragmentSet::Entry* const entry = set_.find(id);
    if (entry == nullptr) return detail::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
    want(*entry);
    return {};
  }

  /// Takes a message. Frames of the caller's own types are given back, checked, with a body that points into `bytes`.
  ///
  /// Errors: those of `decode_frame` and of what the message holds; the state is as it was.
  Result<std::optional<FrameView>> receive(MemberId from, std::span<const std::byte> bytes);

  /// Lets time pass: sends news, asks again, reads a shared store, compacts. A clock that jumps back or ahead does no harm.
  ///
  /// Errors: the store's; nothing is lost, call again.
  Status tick(std::int64_t now_ms);

  /// Messages to be sent, oldest first. Losing them is no harm.
  [[nodiscard]] std::vector<Outgoing> take_outbox() {
    outbox_bytes_ = 0;
    return std::exchange(outbox_, {});
  }
  /// Puts a message of the caller's own into the outbox, framed. Errors: `oversized`.
  Status post(MemberId to, std::uint8_t type, std::span<const std::byte> body) {
    auto frame = encode_frame(type, body, options_.frame);
    if (!frame) return frame.error();
    counters_.sent_bytes[type] += frame->size();
    outbox_bytes_ += frame->size();
    outbox_.push_back({to, type, *std::move(frame)});
    return {};
  }

  /// Tells who the members are from now on, for one that joins or leaves while this replica runs. What was compacted before still reaches
  /// whoever joins; one that has left is waited for no longer, and asked for nothing.
  void set_members(std::vector<MemberId> members) {
    for (const MemberId before : options_.members) {
      if (std::find(members.begin(), members.end(), before) == members.end()) peers_.erase(before);
    }
    options_.members = std::move(members);
  }

  /// Writes everything to the store anew: for one that was emptied behind this replica's back. O(bytes).
  Status republish() {
    for (const FragmentSet::Entry& entry : set_.entries()) {
      if (!entry.complete()) continue;
      if (const auto stored = store_fragment(*store_, entry.fragment, options_.format); !stored) return stored.error();
    }
    return store_->add_record(encode_record(encode_set(set_)));
  }

  [[nodiscard]] const FragmentSet& set() const noexcept { return set_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const ReplicaCounters& counters() const noexcept { return counters_; }
  /// Fragments whose bytes are on their way.
  [[nodiscard]] std::size_t wanted() const noexcept { return wants_.size(); }
  /// Members heard of so far that render with another merger: they hold the same set and would make other caches of it.
  [[nodiscard]] std::vector<MemberId> other_mergers() const {
    std::vector<MemberId> out;
    for (const auto& [member, peer] : peers_) {
      if (peer.other_merger) out.push_back(member);
    }
    return out;
  }
  /// What a member said that it has seen; null where it was never heard of.
  [[nodiscard]] const CausalContext* seen_by(MemberId member) const {
    const auto at = peers_.find(member);
    return at == peers_.end() ? nullptr : &at->second.context;
  }

 private:
  static constexpr std::size_t max_peers = 4096;
  static constexpr std::size_t max_outbox_bytes = std::size_t{64} << 20U;  // of answers; this replica's own words always go out

  struct Peer {
    CausalContext context;
    bool other_merger = false;
    std::uint32_t strikes = 0;
    std::int64_t trusted_from = 0;  // not asked before
    std::int64_t next_want = 0;     // no request for a delta before
    std::int64_t next_news = 0;     // no answer by news before
    std::int64_t next_delta = 0;    // no answer by a delta before
  };
  /// A fragment whose bytes are on their way.
  struct Want {
    std::optional<Assembler<Hash>> assembler;
    MemberId holder = everyone;         // asked now
    MemberId manifest_from = everyone;
    std::size_t in_flight = 0;          // chunks asked for and not here
    bool answered = false;              // the holder sent something since it was asked
    std::size_t barren = 0;             // requests for chunks since one came
    std::int64_t next = 0;              // ask again then
    std::int64_t patience = 0;
    std::size_t rotation = 0;
  };

  [[nodiscard]] Provenance next_dot() noexcept { return {options_.self, next_sequence_++, options_.epoch}; }  // never given out twice, even where it fails
  [[nodiscard]] Status check_quota() const {
    if (next_sequence_ < options_.max_operations) return {};
    return detail::error(ErrorCode::quota_exceeded, "agent ", options_.self, " did ", options_.max_operations, " operations in this life; nobody takes more");
  }
  template <class Change>
  Result<Provenance> change(const Change& make) {
    KVMELD_TRY(check_quota());
    const Provenance dot = next_dot();
    FragmentSet after = set_;
    KVMELD_TRY(make(after, dot));
    KVMELD_TRY(commit(after.delta_since(set_.context())));
    return dot;
  }
  Status write_down(std::span<const std::byte> set) {
    ++records_written_;  // also where it fails: it may be there
    return store_->add_record(encode_record(set));
  }
  /// Writes an operation down, joins it, tells everybody.
  Status commit(const FragmentSet& operation) {
    const std::vector<std::byte> bytes = encode_set(operation);
    KVMELD_TRY(write_down(bytes));
    KVMELD_TRY(set_.join(operation));
    return post(everyone, static_cast<std::uint8_t>(ReplicaMessage::delta), bytes);
  }
  Status post(MemberId to, ReplicaMessage type, std::span<const std::byte> body) { return post(to, static_cast<std::uint8_t>(type), body); }
  Status post_news(MemberId to) { return post(to, ReplicaMessage::news, detail::encode(detail::News{set_.context(), set_.digest(), options_.merger})); }

  [[nodiscard]] std::int64_t jitter(std::int64_t ms) { return ms + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(ms / 4 + 1)); }
  Status take(std::span<const std::byte> bytes, MemberId from, bool from_store);
  [[nodiscard]] Result<FragmentSet> admitted(FragmentSet delta);
  Status read_records();
  Status on_news(MemberId from, std::span<const std::byte> body);
  Status on_want(MemberId from, std::span<const std::byte> body);
  Status on_fetch(MemberId from, std::span<const std::byte> body);
  Status on_piece(MemberId from, ReplicaMessage type, std::span<const std::byte> body);
  Status on_lacking(MemberId from, std::span<const std::byte> body);
  void want(const FragmentSet::Entry& entry, MemberId holder = everyone);
  Status pursue(const FragmentId& id, Want& want);
  Status ask(const FragmentId& id, Want& want);
  Status finish(const FragmentId& id, Want& want);
  [[nodiscard]] MemberId next_holder(Want& want);
  void turn(Want& want);
  void strike(MemberId member);

  Store* store_;
  Options options_;
  FragmentSet set_;
  std::minstd_rand random_;
  std::uint64_t next_sequence_ = 0;
  std::map<MemberId, Peer> peers_;
  std::map<FragmentId, Want> wants_;
  std::vector<Outgoing> outbox_;
  std::size_t outbox_bytes_ = 0;
  FragmentId last_pursued_;
  ReplicaCounters counters_;
  std::int64_t last_now_ = 0;
  std::int64_t elapsed_ = 0;  // of this replica's own clock, which only goes forward
  std::int64_t next_news_ = 0;
  std::uint64_t cursor_ = 0;
  std::optional<std::uint64_t> generation_;  // of the store
  std::size_t records_read_ = 0;
  std::size_t records_written_ = 0;  // since records were read
  bool opened_ = true;               // the store's records were read: nobody else has this agent's dots
  bool keep_records_ = false;        // some were not taken, and are not this replica's to drop
};

KVMELD_NAMESPACE_END

#include <kvmeld/session/replica_fetch.hpp>
#include <kvmeld/session/replica_sync.hpp>
