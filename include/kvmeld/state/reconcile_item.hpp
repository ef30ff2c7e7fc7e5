#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// One entry of a replicated set, as far as finding differences needs it.
struct ReconcileItem {
  FragmentId id{};
  /// 64 bits of a digest of all that replicas must agree on; equal ids with other tags differ.
  std::uint64_t tag = 0;
};

/// What a session takes from its peer, and how it cuts what it sends.
struct ReconcileLimits {
  std::uint64_t items = std::uint64_t{1} << 24U;  ///< largest set that a peer may announce
  /// About the largest message to send; sets that need more take more rounds.
  std::size_t message_bytes = std::size_t{1} << 22U;
};

/// Ids whose entries differ between two replicas, each list ascending.
struct ReconcileDifference {
  std::vector<FragmentId> mine_only{};
  std::vector<FragmentId> theirs_only{};
  std::vector<FragmentId> different{};  ///< on both sides, with different tags
};

/// What follows from one received message.
struct ReconcileReply {
  std::optional<std::vector<std::byte>> message{};  ///< to be sent to the peer
  bool done = false;  ///< `Reconciliation::result` is complete; the message, if any, is the last
};

KVMELD_NAMESPACE_END
