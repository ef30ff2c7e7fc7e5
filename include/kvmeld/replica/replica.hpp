#pragma once

/// A replica: one member's copy of the set, kept in step by messages.

#include <algorithm>
#include <array>
#include <compare>
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

#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

/// Who a replica is, what it trusts, and how patient it is.
struct ReplicaOptions {
  MemberId self = 0;  ///< the agent
  Epoch epoch;        ///< of this life of it: `claim_epoch` at every start
  /// Everybody, this one included: removals are compacted once all know them, and nobody else may
  /// act for another. Empty: whoever speaks is a member, and nothing is compacted.
  std::vector<MemberId> members{};
  FrameOptions frame{};
  FragmentFormat format{};
  MergerDigest merger;  ///< `Merger::digest()`, or `does_not_render`
  /// Other replicas write to the same store: its records are read at every tick.
  bool shared_store = false;
  std::size_t max_message_bytes = std::size_t{1} << 24;
  /// Of one author in one of its lives; must be the same for all replicas.
  std::uint64_t max_operations = 1U << 17U;
  std::int64_t news_interval_ms = 500;
  std::int64_t retry_ms = 100;  ///< of an unanswered request, doubled each time
  std::int64_t max_retry_ms = 10'000;
  /// Wrong pieces after which a peer is not asked for `max_retry_ms`.
  std::uint32_t max_strikes = 3;
  /// Memory of manifests and chunks that came of fragments that are not whole yet. One that finds
  /// no room gives its own back and is asked for again later; a larger one never comes: raise this.
  std::uint64_t max_fetch_bytes = std::uint64_t{1} << 33;
  /// Of those, by one peer's manifests.
  std::uint64_t max_peer_fetch_bytes = std::uint64_t{1} << 32;
  /// What peers may fill of this replica. Where room is short, those go first that took most of it,
  /// so that one who floods is left out and others are not; what is left out is counted
  /// (`refused_operations`) and comes when there is room.
  std::size_t max_entries = std::size_t{1} << 20;  ///< fragments in the set
  /// Gaps and lives in a context; the set's must also fit into a message.
  std::size_t max_ranges = std::size_t{1} << 18;
  /// Agents whose operations are taken, beside the members that are named.
  std::size_t max_authors = 1024;
  std::size_t max_records = 4096;  ///< in the store before they are replaced by one
  std::uint64_t seed = 1;          ///< of jitter
};

/// One life of an agent: the operations that bear its epoch.
struct AgentLife {
  std::uint64_t agent = 0;
  std::uint64_t epoch = 0;

  auto operator<=>(const AgentLife&) const = default;
};

/// What a replica did not take, or took for a lie.
struct ReplicaRefusals {
  std::uint64_t refused_frames = 0;  ///< damaged, unauthenticated or hostile
  /// Above an author's quota, with dots that are this replica's, or other than what is known of
  /// their dot.
  std::uint64_t refused_operations = 0;
  /// Left out until their author, or enough members, say the same.
  std::uint64_t unvouched_operations = 0;
  /// Times that a dot was seen on two operations, or before this replica gave it out.
  std::uint64_t reused_dots = 0;
  std::uint64_t refused_pieces = 0;   ///< manifests and chunks for which there was no room
  std::uint64_t strikes = 0;          ///< wrong manifests and chunks
  std::uint64_t corrupt_records = 0;  ///< in the store
};

/// What a replica did so far. Bytes are of whole frames.
struct ReplicaCounters : ReplicaRefusals {
  std::array<std::uint64_t, 256> sent_bytes{};      ///< by message type
  std::array<std::uint64_t, 256> received_bytes{};  ///< by message type
  std::uint64_t fragments_fetched = 0;              ///< from peers
  std::uint64_t fragments_loaded = 0;               ///< from the store
  StoredBytes stored;
  /// What the store found spoilt of its records, when they were last read.
  StoreDamage store_damage;
};

/// Types of the frames that replicas exchange; those from `application` on are the caller's. Each
/// begins with the digest of its sender's merger, so that whoever hears one word knows whether both
/// make the same cache of the same set.
enum class ReplicaMessage : std::uint8_t {
  news = 1,   ///< which life I am in, and what I have seen: context, digest of the set
  want = 2,   ///< send me what this context lacks
  delta = 3,  ///< a part of the set, to be joined
  fetch = 4,  ///< send me the manifest, or these chunks, of this fragment
  manifest = 5,
  chunk = 6,
  lacking = 7,  ///< I cannot serve that fragment
  application = 32,
};

/// A message to be sent.
struct Outgoing {
  MemberId to = everyone;
  std::uint8_t type = 0;
  std::vector<std::byte> bytes{};
};

namespace detail {

/// What every message between replicas begins with, and the rest of it.
struct ReplicaBody {
  MergerDigest merger = does_not_render;
  std::span<const std::byte> rest;
};

[[nodiscard]] inline std::vector<std::byte> encode_body(const MergerDigest& merger,
                                                        std::span<const std::byte> rest) {
  extend::ByteWriter w;
  w.reserve(2 * sizeof(std::uint64_t) + rest.size());
  w.value(merger.digest().low);
  w.value(merger.digest().high);
  w.bytes(rest);
  return w.take();
}
}  // namespace detail

namespace messages {

/// The sender's merger, and what it says. Errors: those of `ByteReader::finish`.
[[nodiscard]] inline Result<detail::ReplicaBody> decode_body(std::span<const std::byte> body) {
  extend::ByteReader r(body);
  Digest128 merger;
  merger.low = r.value<std::uint64_t>();
  merger.high = r.value<std::uint64_t>();
  const auto rest = r.bytes(r.remaining());
  KVMELD_TRY(r.finish("message between replicas"));
  return detail::ReplicaBody{merger, rest};
}

/// What a replica has seen, and the digest of its set.
struct News {
  CausalContext context;
  Digest256 digest;
  std::uint64_t epoch = 0;  ///< the sender's
};

/// The body of a message.
[[nodiscard]] inline std::vector<std::byte> encode(const News& news) {
  extend::ByteWriter w;
  w.value(news.epoch);
  for (const std::uint64_t word : news.digest.words) w.value(word);
  write_context(w, news.context);
  return w.take();
}

/// Errors: `truncated`, `oversized` (ranges, bytes that are left over), `corrupt`.
[[nodiscard]] inline Result<News> decode_news(std::span<const std::byte> body,
                                              std::size_t max_ranges = default_max_ranges) {
  extend::ByteReader r(body);
  News news;
  news.epoch = r.value<std::uint64_t>();
  for (std::uint64_t& word : news.digest.words) word = r.value<std::uint64_t>();
  news.context = read_context(r, max_ranges);
  KVMELD_TRY(r.finish("news"));
  return news;
}

/// Asks for a fragment: for its manifest, or for some of its chunks.
struct Fetch {
  FragmentId id;
  std::vector<BlobKey> chunks;  ///< empty: the manifest

  static constexpr std::size_t max_chunks = 16;
};

/// The body of a message.
[[nodiscard]] inline std::vector<std::byte> encode(const Fetch& fetch) {
  extend::ByteWriter w;
  w.bytes(std::as_bytes(std::span(fetch.id.bytes)));
  w.varint(fetch.chunks.size());
  for (const BlobKey& key : fetch.chunks) w.bytes(std::as_bytes(std::span(key.bytes)));
  return w.take();
}

}  // namespace messages

namespace detail {

template <class Key>
[[nodiscard]] Key read_key(extend::ByteReader& r) {
  Key key;
  const auto from = r.bytes(32);
  if (!from.empty()) std::memcpy(key.bytes.data(), from.data(), 32);
  return key;
}
}  // namespace detail

namespace messages {

/// Errors: `truncated`, `oversized` (chunks, bytes that are left over).
[[nodiscard]] inline Result<Fetch> decode_fetch(std::span<const std::byte> body) {
  extend::ByteReader r(body);
  Fetch fetch{detail::read_key<FragmentId>(r), {}};
  const std::size_t n = r.count(32);
  if (n > Fetch::max_chunks)
    return extend::error(ErrorCode::oversized, "fetch of ", n, " chunks where at most ",
                         Fetch::max_chunks, " go into one");
  for (std::size_t i = 0; i < n; ++i) fetch.chunks.push_back(detail::read_key<BlobKey>(r));
  KVMELD_TRY(r.finish("fetch"));
  return fetch;
}

/// A manifest, or a chunk in its stored form, behind the fragment and the key that it answers for.
struct Piece {
  FragmentId id;
  BlobKey key;
  std::span<const std::byte> bytes;
};

/// The body of a message.
[[nodiscard]] inline std::vector<std::byte> encode(const Piece& piece) {
  extend::ByteWriter w;
  w.reserve(64 + piece.bytes.size());
  w.bytes(std::as_bytes(std::span(piece.id.bytes)));
  w.bytes(std::as_bytes(std::span(piece.key.bytes)));
  w.bytes(piece.bytes);
  return w.take();
}

/// Refers to `body`. Errors: `truncated`.
[[nodiscard]] inline Result<Piece> decode_piece(std::span<const std::byte> body) {
  extend::ByteReader r(body);
  Piece piece{detail::read_key<FragmentId>(r), detail::read_key<BlobKey>(r), {}};
  piece.bytes = r.bytes(r.remaining());
  KVMELD_TRY(r.finish("piece"));
  return piece;
}

/// Cuts a delta into sets of at most so many entries and removals, each of which can be joined
/// alone.
[[nodiscard]] inline std::vector<FragmentSet> cut(const FragmentSet& delta, std::size_t most) {
  if (delta.size() + delta.removals().size() <= most) return {delta};
  std::vector<FragmentSet> out;
  std::vector<FragmentSet::Entry> entries;
  std::vector<Removal> removals;
  const auto flush = [&](const CausalContext& compacted) {
    if (auto part = FragmentSet::from_parts(delta.hash(), std::exchange(entries, {}),
                                            std::exchange(removals, {}), compacted))
      out.push_back(*std::move(part));
  };
  for (const FragmentSet::Entry& entry : delta.entries()) {
    entries.push_back(entry);
    if (entries.size() == most) flush({});
  }
  for (const Removal& removal : delta.removals()) {
    removals.push_back(removal);
    if (entries.size() + removals.size() >= most) flush({});
  }
  flush(delta.compacted());
  return out;
}

}  // namespace messages

/// A frame as replicas exchange them, for whoever speaks to one without being one.
///
/// Errors: those of `encode_frame`.
[[nodiscard]] inline Result<std::vector<std::byte>> encode_replica_frame(
    ReplicaMessage type, const MergerDigest& merger, std::span<const std::byte> rest,
    const FrameOptions& options = {}) {
  return encode_frame(static_cast<std::uint8_t>(type), detail::encode_body(merger, rest), options);
}

namespace detail {

/// What is to be looked for, and when: each author's by time, and authors in turn, so that however
/// many fragments of one author nobody serves, another's is looked for as if they were not there.
class DueQueue {
 public:
  /// O(log n), as `drop`.
  void put(std::uint64_t author, std::int64_t at, const FragmentId& id) {
    lanes_[author].emplace(at, id);
  }
  void drop(std::uint64_t author, std::int64_t at, const FragmentId& id) {
    const auto lane = lanes_.find(author);
    if (lane == lanes_.end()) return;
    lane->second.erase({at, id});
    if (lane->second.empty()) lanes_.erase(lane);
  }
  [[nodiscard]] bool has(std::uint64_t author) const { return lanes_.count(author) != 0; }

  /// Up to `most` that are due; they stay until they are dropped. O(authors + most).
  [[nodiscard]] std::vector<FragmentId> due(std::int64_t now, std::size_t most) {
    using Next = std::set<std::pair<std::int64_t, FragmentId>>::const_iterator;
    std::vector<std::pair<const std::pair<const std::uint64_t, Lane>*, Next>> ready;
    auto at = lanes_.upper_bound(last_);
    for (std::size_t seen = 0; seen < lanes_.size() && ready.size() < most; ++seen, ++at) {
      if (at == lanes_.end()) at = lanes_.begin();
      if (at->second.begin()->first <= now) ready.emplace_back(&*at, at->second.begin());
    }
    std::vector<FragmentId> out;
    for (std::size_t rotation = 0; out.size() < most && !ready.empty();) {
      auto& [lane, next] = ready[rotation];
      out.push_back(next->second);
      last_ = lane->first;
      if (++next == lane->second.end() || next->first > now) {
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(rotation));
      } else {
        ++rotation;
      }
      if (rotation >= ready.size()) rotation = 0;
    }
    return out;
  }

 private:
  using Lane = std::set<std::pair<std::int64_t, FragmentId>>;

  std::map<std::uint64_t, Lane> lanes_;  // by author, none empty
  std::uint64_t last_ = 0;               // whose turn was the last
};

}  // namespace detail

/// One member's copy of the set, kept in step with the others' by messages that may be lost,
/// repeated, reordered and damaged.
///
/// It does no I/O but through its store, and has no clock: the caller gives messages and
/// milliseconds in and sends what `take_outbox` gives out, so that a simulation runs what a
/// deployment runs. Operations are broadcast as deltas; news of what has been seen follow at
/// intervals, and whoever lacks something asks for it. Payloads come after ids, chunk by chunk,
/// verified against the id. Not thread-safe.
///
/// An agent's operations are its own to tell. Members give on what others did; what a member says
/// of another's dots goes no further than their author vouches for, and a stranger's word on them
/// counts for nothing (docs/convergence.md, "Whose word counts").
class Replica {
 public:
  using Options = ReplicaOptions;

  /// @param store what was written there survives this object. It must outlive the replica.
  Replica(BlobStore& store, Options options)
      : store_(&store),
        options_(std::move(options)),
        set_(options_.format.hash),
        random_(options_.seed),
        clock_(options_.max_retry_ms) {}

  /// Reads the store's records. A record that is damaged costs itself; what it held comes back from
  /// peers.
  ///
  /// Errors: the store's, call again; `dot_reused` where this agent was in this epoch before: take
  /// `claim_epoch`.
  Status open() {
    opened_ = false;
    const Status read = read_records();
    opened_ = true;
    KVMELD_TRY(read);
    for (const FragmentSet::Entry& entry : set_.entries()) want(entry);
    const std::uint64_t used = set_.context().next_sequence(options_.self, options_.epoch);
    if (used <= next_sequence_) return {};
    next_sequence_ = used;
    ++counters_.reused_dots;
    return extend::error(ErrorCode::dot_reused, "agent ", options_.self, " did ", used,
                         " operations in epoch ", std::uint64_t{options_.epoch},
                         " before; an agent takes a fresh epoch whenever it starts");
  }

  /// Adds a fragment that this agent produced. Durable, as far as the store is, when it returns
  /// without error; told to the others with the next outbox.
  ///
  /// Errors: the store's, `payload_missing`, `hash_mismatch`, `non_finite`, `quota_exceeded`;
  /// `dot_reused` once it is known that somebody else has this life's dots (`reused_lives`). The
  /// set is unchanged then.
  Result<Dot> insert(const Fragment& fragment, std::optional<float> confidence = std::nullopt,
                     std::int64_t time_ms = 0) {
    KVMELD_TRY(FragmentSet(options_.format.hash)
                   .insert(fragment, {options_.self, 0, options_.epoch}, confidence));
    KVMELD_TRY(check_life());
    const auto stored = store_fragment(*store_, fragment, options_.format);
    if (!stored) return stored.error();
    FragmentSet operation(options_.format.hash);
    const Dot dot = next_dot();  // not before: a store that is away uses up no dots
    KVMELD_TRY(operation.insert(fragment, dot, confidence, time_ms));
    counters_.stored.bytes += stored->bytes;
    counters_.stored.dedup_bytes += stored->dedup_bytes;
    counters_.stored.dedup_hits += stored->dedup_hits;
    KVMELD_TRY(commit(operation));
    return dot;
  }
  /// As `FragmentSet::supersede`, told to the others.
  Result<Dot> supersede(const FragmentId& id, const FragmentId& successor) {
    return change(
        [&](FragmentSet& set, const Dot& dot) { return set.supersede(id, successor, dot); });
  }
  /// As `FragmentSet::remove`, told to the others.
  Result<Dot> remove(const FragmentId& id) {
    return change([&](FragmentSet& set, const Dot& dot) { return set.remove(id, dot); });
  }
  /// As `FragmentSet::evict`: this replica alone forgets the bytes.
  Status evict(const FragmentId& id) { return set_.evict(id); }
  /// Wants a fragment's bytes, which were evicted here. Errors: `not_found` for an id that is not
  /// in the set.
  Status fetch(const FragmentId& id) {
    const FragmentSet::Entry* const entry = set_.find(id);
    if (entry == nullptr)
      return extend::error(ErrorCode::not_found, "fragment ", id.hex(), " is not in the set");
    want(*entry);
    return {};
  }

  /// Takes a message. Frames of the caller's own types are given back, checked, with a body that
  /// points into `bytes`.
  ///
  /// @param from who sent it, as the transport or the authenticator says: what it may say of whom
  /// depends on that. Errors: those of `decode_frame` and of what the message holds; the state is
  /// as it was. `quota_exceeded` and `dot_reused` where some operations of a message were left out;
  /// the others are taken.
  Result<std::optional<FrameView>> receive(MemberId from, std::span<const std::byte> bytes);

  /// Takes operations that came by another way than a message: in a call to a service, say. Written
  /// to the store first. Payloads in them are believed: verify them before.
  ///
  /// @param speaker whose word they are, as it was authenticated; `everyone` where the caller
  /// vouches for all of them. Errors: as `receive` has them for operations.
  Status join(const FragmentSet& operations, MemberId speaker) {
    return take(operations, speaker, false);
  }
  /// Notes what a member says that it has seen, where that came by another way than its news.
  ///
  /// Errors: `dot_reused` where it has seen operations of this life that this replica has not done;
  /// `quota_exceeded` for too many members.
  Status heard(MemberId member, const CausalContext& seen);

  /// Lets time pass: sends news, asks again, reads a shared store, compacts. A clock that jumps
  /// back or ahead does no harm.
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

  /// As above, of a type of the replicas' own, behind this replica's merger.
  Status post(MemberId to, ReplicaMessage type, std::span<const std::byte> body) {
    return post(to, static_cast<std::uint8_t>(type), detail::encode_body(options_.merger, body));
  }
  /// Asks a member for what this replica lacks. Errors: `oversized`.
  Status ask_for_delta(MemberId to) { return post_want(to, set_.context()); }

  /// Tells who the members are from now on, for one that joins or leaves while this replica runs.
  /// What was compacted before still reaches whoever joins; one that has left is waited for no
  /// longer, and asked for nothing.
  void set_members(std::vector<MemberId> members) {
    for (const MemberId before : options_.members) {
      if (std::find(members.begin(), members.end(), before) == members.end()) peers_.erase(before);
    }
    options_.members = std::move(members);
    unnamed_ranges_ = 0;
    for (const auto& [member, peer] : peers_) {
      if (!options_.members.empty() && is_member(member)) continue;
      unnamed_ranges_ += peer.context.ranges().size();
    }
  }

  /// Writes everything to the store anew: for one that was emptied behind this replica's back.
  /// O(bytes).
  Status republish() {
    for (const FragmentSet::Entry& entry : set_.entries()) {
      if (!entry.complete()) continue;
      if (const auto stored = store_fragment(*store_, entry.fragment, options_.format); !stored)
        return stored.error();
    }
    return store_->add_record(encode_record(encode_set(set_)));
  }

  [[nodiscard]] const FragmentSet& set() const noexcept { return set_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const ReplicaCounters& counters() const noexcept { return counters_; }
  /// Gives the bytes of a fragment that came by another way. They must be verified, and are not
  /// stored here. Errors: `not_found` for an id that is not in the set.
  Status restore(const Fragment& fragment) {
    KVMELD_TRY(set_.restore(fragment));
    end_want(fragment.id());
    return {};
  }

  /// Fragments whose bytes are on their way.
  [[nodiscard]] std::size_t wanted() const noexcept { return wants_.size(); }
  /// Whether bytes are on their way of fragments that an agent made. O(log n).
  [[nodiscard]] bool wants_of(std::uint64_t agent) const {
    return due_members_.has(agent) || due_others_.has(agent);
  }
  /// Memory of chunks and manifests whose fragments are not whole yet.
  [[nodiscard]] std::uint64_t fetch_bytes() const noexcept { return fetch_bytes_; }
  /// Fragments that one `tick` looks for in the store and asks peers for, at most.
  static constexpr std::size_t pursued_at_once = 64;
  /// Members heard of so far that render with another merger than this replica: they hold the same
  /// set and make other caches of it. Known from the first message of any type on.
  [[nodiscard]] std::vector<MemberId> other_mergers() const {
    return members_where([&](const MergerDigest& theirs) {
      return theirs.renders() && options_.merger.renders() && theirs != options_.merger;
    });
  }
  /// Members heard of so far that render nothing.
  [[nodiscard]] std::vector<MemberId> not_rendering() const {
    return members_where([](const MergerDigest& theirs) { return !theirs.renders(); });
  }
  /// Lives whose dots somebody used twice: two processes of one agent in one epoch, a restart in an
  /// epoch that an older disk did not know of any more, or a lie. Ascending; stays for as long as
  /// this replica lives. Members that met such dots in different order hold different sets. While
  /// this replica's own life is among them it takes no more operations: start it again in a fresh
  /// epoch.
  [[nodiscard]] std::span<const AgentLife> reused_lives() const noexcept { return reused_; }
  /// What a member said that it has seen; null where it was never heard of.
  [[nodiscard]] const CausalContext* seen_by(MemberId member) const {
    const auto at = peers_.find(member);
    return at == peers_.end() ? nullptr : &at->second.context;
  }

 private:
  static constexpr std::size_t max_peers = 4096;
  // of answers; this replica's own words always go out
  static constexpr std::size_t max_outbox_bytes = std::size_t{64} << 20U;

  struct Peer {
    CausalContext context;
    std::optional<MergerDigest> merger{};
    std::optional<std::uint64_t> epoch{};  // of its life now
    CausalContext vouched;                 // of its own operations, by its own word
    CausalContext claimed;                 // of others' operations: gone, by its word
    Digest256 unequal_mine;                // sets that differ though their contexts do not
    Digest256 unequal_theirs;
    std::uint32_t unequal_asks = 0;
    bool asked_for_all = false;
    std::int64_t want_patience = 0;
    std::uint32_t strikes = 0;
    std::int64_t trusted_from = 0;  // not asked before
    std::int64_t next_want = 0;     // no request for a delta before
    std::int64_t next_news = 0;     // no answer by news before
    std::int64_t next_delta = 0;    // no answer by a delta before
    std::uint64_t fetch_bytes = 0;  // of fragments on their way by its manifests
  };
  /// A fragment whose bytes are on their way.
  struct Want {
    std::unique_ptr<Assembler> assembler;
    std::uint64_t author = 0;    // in whose turn it is looked for
    bool member = false;         // whether that is a named member
    std::uint64_t charged = 0;   // bytes of memory, to the peer of its manifest
    MemberId holder = everyone;  // asked now
    MemberId manifest_from = everyone;
    std::size_t in_flight = 0;  // chunks asked for and not here
    bool answered = false;      // the holder sent something since it was asked
    std::size_t barren = 0;     // requests for chunks since one came
    std::int64_t next = 0;      // ask again then; changed by `look_at` alone
    std::int64_t patience = 0;
    std::size_t rotation = 0;
  };

  // never given out twice, even where it fails
  [[nodiscard]] Dot next_dot() noexcept {
    return {options_.self, next_sequence_++, options_.epoch};
  }
  [[nodiscard]] Status own_life_reused() const {
    if (!std::binary_search(reused_.begin(), reused_.end(),
                            AgentLife{options_.self, options_.epoch}))
      return {};
    return extend::error(ErrorCode::dot_reused, "operations of agent ", options_.self, " in epoch ",
                         std::uint64_t{options_.epoch},
                         " were done by somebody else: two processes have this id, or an earlier "
                         "life had this epoch; start again in a fresh epoch");
  }
  void note_reused(const AgentLife& life) {
    ++counters_.reused_dots;
    const auto at = std::lower_bound(reused_.begin(), reused_.end(), life);
    if ((at == reused_.end() || *at != life) && reused_.size() < max_peers)
      reused_.insert(at, life);
  }
  template <class Test>
  [[nodiscard]] std::vector<MemberId> members_where(const Test& test) const {
    std::vector<MemberId> out;
    for (const auto& [member, peer] : peers_) {
      if (peer.merger && test(*peer.merger)) out.push_back(member);
    }
    return out;
  }
  [[nodiscard]] Status check_life() const {
    KVMELD_TRY(own_life_reused());
    if (next_sequence_ < options_.max_operations) return {};
    return extend::error(ErrorCode::quota_exceeded, "agent ", options_.self, " did ",
                         options_.max_operations, " operations in this life; nobody takes more");
  }
  template <class Change>
  Result<Dot> change(const Change& make) {
    KVMELD_TRY(check_life());
    const Dot dot = next_dot();
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
    return post(everyone, ReplicaMessage::delta, bytes);
  }
  Status post_news(MemberId to) {
    return post(to, ReplicaMessage::news,
                messages::encode(messages::News{set_.context(), set_.digest(), options_.epoch}));
  }

  [[nodiscard]] std::int64_t jitter(std::int64_t ms) {
    return ms + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(ms / 4 + 1));
  }
  Status post_want(MemberId to, const CausalContext& seen) {
    extend::ByteWriter w;
    write_context(w, seen);
    return post(to, ReplicaMessage::want, w.written());
  }
  [[nodiscard]] Status take(const FragmentSet& delta, MemberId from, bool from_store);
  Status on_message(MemberId from, ReplicaMessage type, std::span<const std::byte> bytes);
  Status on_delta(MemberId from, std::span<const std::byte> body);
  // replica_word.hpp: whose word on whose operations counts.
  [[nodiscard]] Peer* peer_of(MemberId member);
  [[nodiscard]] bool is_member(MemberId member) const;
  [[nodiscard]] bool is_heard(const AgentLife& life) const;
  [[nodiscard]] bool is_guarded(const AgentLife& life) const;
  [[nodiscard]] std::uint64_t vouched(const AgentLife& life) const;
  [[nodiscard]] std::uint64_t tellable(MemberId from, const AgentLife& life) const;
  [[nodiscard]] std::uint64_t removable(MemberId from, const AgentLife& life) const;
  [[nodiscard]] bool decides(MemberId from, const AgentLife& life) const;
  [[nodiscard]] CausalContext tellable(MemberId from, const CausalContext& all) const;
  [[nodiscard]] CausalContext admitted_gone(const CausalContext& gone, MemberId from);
  struct Admission;
  [[nodiscard]] Result<FragmentSet> admitted(const FragmentSet& delta, MemberId from);
  [[nodiscard]] std::size_t range_limit() const;
  [[nodiscard]] std::vector<std::uint64_t> overdrawn(const FragmentSet& delta) const;
  void note_word(MemberId from, const CausalContext& context);
  Status check_own(MemberId from, const CausalContext& context);
  Status compare(MemberId from, Peer& peer, const Digest256& theirs);
  Status find_reused(MemberId from, const FragmentSet& delta);
  [[nodiscard]] bool forgets(const CausalContext& gone) const;
  Status read_records();
  Status on_news(MemberId from, std::span<const std::byte> body);
  Status on_want(MemberId from, std::span<const std::byte> body);
  Status on_fetch(MemberId from, std::span<const std::byte> body);
  Status on_piece(MemberId from, ReplicaMessage type, std::span<const std::byte> body);
  Status on_lacking(MemberId from, std::span<const std::byte> body);
  void want(const FragmentSet::Entry& entry, MemberId holder = everyone);
  void look_at(const FragmentId& id, Want& want, std::int64_t when);
  void end_want(const FragmentId& id);
  Status charge(Want& want, std::uint64_t bytes);
  void discharge(Want& want, std::uint64_t bytes);
  void drop_assembler(Want& want);
  Status pursue_some();
  Status pursue(const FragmentId& id, Want& want);
  Status ask(const FragmentId& id, Want& want);
  Status finish(const FragmentId& id, Want& want);
  [[nodiscard]] MemberId next_holder(Want& want);
  void rotation(Want& want);
  void strike(MemberId member);

  BlobStore* store_;
  Options options_;
  FragmentSet set_;
  std::minstd_rand random_;
  std::uint64_t next_sequence_ = 0;
  std::map<MemberId, Peer> peers_;
  std::map<FragmentId, Want> wants_;
  std::vector<Outgoing> outbox_;
  std::size_t outbox_bytes_ = 0;
  detail::DueQueue due_members_;
  detail::DueQueue due_others_;
  std::uint64_t fetch_bytes_ = 0;   // of fragments on their way
  std::size_t unnamed_ranges_ = 0;  // of what peers have seen that are no named members
  ReplicaCounters counters_;
  std::vector<AgentLife> reused_;  // ascending
  Elapsed clock_;
  std::int64_t elapsed_ = 0;  // by `clock_`, at the last tick
  std::int64_t next_news_ = 0;
  std::uint64_t cursor_ = 0;
  std::optional<std::uint64_t> generation_;  // of the store
  std::size_t records_read_ = 0;
  std::size_t records_written_ = 0;  // since records were read
  bool opened_ = true;         // the store's records were read: nobody else has this agent's dots
  bool keep_records_ = false;  // some were not taken, and are not this replica's to drop
};

}  // namespace replica

KVMELD_NAMESPACE_END

#include <kvmeld/replica/detail/impl/replica.hpp>
