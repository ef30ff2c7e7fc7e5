#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/session/replica_options.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a coordinator takes from its members, and what it waits for.
template <Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
struct CoordinatorOptions {
  /// Identity, namespace, secret, chunk size, hash, merger and quota of operations. Where that
  /// `does_not_render`, each round's merger is the one that the first member at its barrier names.
  /// Its `members`, where given, let removals be forgotten once all have seen them.
  ReplicaOptions<Auth, Hash, C> replica;
  /// Who may be at a barrier, and is waited for; empty: whoever asks, `quorum` of them.
  std::vector<MemberId> members{};
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
  std::vector<MemberId> relays{};
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

KVMELD_NAMESPACE_END
