#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <vector>

#include <kvmeld/codec/frame.hpp>
#include <kvmeld/session/fragment_io.hpp>
#include <kvmeld/session/identity.hpp>
#include <kvmeld/session/transport.hpp>
#include <kvmeld/state/set_digest.hpp>

KVMELD_NAMESPACE_BEGIN

/// Who a replica is, what it trusts, and how patient it is.
template <Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
struct ReplicaOptions {
  MemberId self = 0;  ///< the agent
  Epoch epoch;        ///< of this life of it: `claim_epoch` at every start
  /// Everybody, this one included: removals are compacted once all know them, and nobody else may
  /// act for another. Empty: whoever speaks is a member, and nothing is compacted.
  std::vector<MemberId> members{};
  FrameOptions<Auth> frame{};
  FragmentFormat<Hash, C> format{};
  SetHash set_hash = set_hash_of<Hash>();
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

KVMELD_NAMESPACE_END
