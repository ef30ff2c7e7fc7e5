#pragma once

/// Who an agent is to its peers, in values that nobody can forget to give: its epoch and its
/// merger.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/session/transport.hpp>

KVMELD_NAMESPACE_BEGIN

/// The merger that a member renders with, as its peers compare it. It has no default: members that
/// render by different mergers hold the same set and make other caches of it, so whoever is silent
/// about its merger would pass for equal. What renders nothing says so by `does_not_render`.
class MergerDigest {
 public:
  /// @param digest `Merger::digest()`; all zeros are `does_not_render`.
  constexpr MergerDigest(const Digest128& digest) noexcept : digest_(digest) {}

  [[nodiscard]] constexpr bool renders() const noexcept { return digest_ != Digest128{}; }
  [[nodiscard]] constexpr const Digest128& digest() const noexcept { return digest_; }
  bool operator==(const MergerDigest&) const = default;

 private:
  Digest128 digest_;
};

/// What a relay or a store says in the place of a merger. Its peers hear that it renders nothing.
inline constexpr MergerDigest does_not_render{Digest128{}};

/// One life of an agent's process. It has no default: an agent that starts in an epoch which it had
/// before gives out dots twice. `claim_epoch` and `fresh_epoch` make one.
class Epoch {
 public:
  constexpr Epoch(std::uint64_t number) noexcept : number_(number) {}
  constexpr operator std::uint64_t() const noexcept { return number_; }

 private:
  std::uint64_t number_;
};

/// An epoch that no earlier life of this agent had: seconds of the caller's clock, then 32 random
/// bits, so that neither a clock that jumps back nor a restored disk gives one twice.
[[nodiscard]] inline Epoch fresh_epoch(std::uint64_t unix_seconds) {
  std::random_device random;
  return (unix_seconds << 32U) | static_cast<std::uint32_t>(random());
}
/// As above, by the system's clock.
[[nodiscard]] inline Epoch fresh_epoch() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since).count();
  return fresh_epoch(static_cast<std::uint64_t>(seconds));
}

namespace detail {

/// Where a store keeps that an agent had an epoch.
[[nodiscard]] inline BlobKey epoch_key(MemberId agent, std::uint64_t epoch) {
  return named_key(0x3D, "kvmeld.epoch.v1", agent, epoch);
}

}  // namespace detail

/// An epoch that this store has given to nobody: `fresh_epoch()`, written down before it is
/// returned. Two processes that claim from one store get two, also if their random sources are
/// copies of one another, as those of a machine that was resumed twice are. One small blob stays
/// for each start.
///
/// Errors: the store's.
template <BlobStore Store>
[[nodiscard]] Result<Epoch> claim_epoch(Store& store, MemberId agent) {
  while (true) {
    const Epoch epoch = fresh_epoch();
    const std::uint64_t number = epoch;
    const auto claimed = store.put(detail::epoch_key(agent, number),
                                   std::as_bytes(std::span<const std::uint64_t, 1>(&number, 1)));
    if (!claimed) return claimed.error();
    if (*claimed) return epoch;
  }
}

KVMELD_NAMESPACE_END
