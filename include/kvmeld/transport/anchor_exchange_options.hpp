#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/codec/frame.hpp>
#include <kvmeld/session/fragment_io.hpp>
#include <kvmeld/session/transport.hpp>
#include <kvmeld/state/anchor_record.hpp>

KVMELD_NAMESPACE_BEGIN

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
template <Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
struct AnchorExchangeOptions {
  MemberId self = 0;
  std::vector<MemberId> members{};   ///< who lives, this one included; `set_members` changes it
  FrameOptions<Auth> frame{};        ///< `name_space`: of `anchor_namespace`
  FragmentFormat<Hash, C> format{};  ///< a stored chunk must fit into a message
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

KVMELD_NAMESPACE_END
