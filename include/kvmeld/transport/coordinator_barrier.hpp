#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/codec/blob_key.hpp>
#include <kvmeld/session/round_cut.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Whether a state holds what somebody has seen: compared once for each state, however often it is
/// asked, and never again once it does.
struct SeenCheck {
  bool holds = false;
  std::uint64_t of_state = 0;

  [[nodiscard]] bool look(const CausalContext& seen, const CausalContext& state,
                          std::uint64_t state_number) {
    if (holds || std::exchange(of_state, state_number) == state_number) return holds;
    return holds = leq(seen, state);
  }
};

}  // namespace detail

/// A member that waits: at the barrier of a round, or (round 0) for any state but one that it
/// knows.
struct MergeAsk {
  std::uint64_t session = 0;
  std::uint64_t round = 0;
  MemberId member = 0;
  Digest128 merger{};
  CausalContext context{};      ///< what it has seen
  Digest256 known{};            ///< round 0 only: the state's digest, not that of a cut
  std::int64_t timeout_ms = 0;  ///< from the first call that the coordinator sees of it
  mutable detail::SeenCheck seen{};
  /// The coordinator's: when it times out, by a clock that only goes forward.
  mutable std::optional<std::int64_t> until_ms{};
};

/// What all members of a round render.
struct MergeAnswer {
  RoundCut cut{};
  /// Who was at the barrier; empty where the cut was made before a restart.
  std::vector<MemberId> ready{};
  /// Round 0 only: of the whole state, superseded and incomplete fragments included.
  Digest256 state{};
};

namespace detail {

/// Who waits for one round, and by which merger it is rendered.
struct Barrier {
  struct Ready {
    CausalContext context;
    // of this member: one that asks again does not leave when its first call ends
    std::size_t asks = 0;
    SeenCheck seen{};
  };
  std::map<MemberId, Ready> ready;
  Digest128 merger;
  std::int64_t first_ms = 0;
};

/// Barriers and cuts of one run.
struct CoordinatorSession {
  std::map<std::uint64_t, Barrier> barriers;
  std::map<std::uint64_t, MergeAnswer> cuts;
  std::uint64_t used = 0;  // when it was last asked for
  // the oldest round that may still get a cut, as far as this coordinator has looked
  std::uint64_t oldest = 0;
};

/// Where a coordinator keeps what it knows of a session, beside its fragments.
[[nodiscard]] inline BlobKey coordinator_key(std::string_view what, std::uint64_t session,
                                             std::uint64_t number) {
  return named_key(0x3E, what, session, number);
}
/// Of the oldest round of a session. Stores replace no blob, so there are two places: one of them
/// holds while the other is erased and written, and the larger number counts.
[[nodiscard]] inline BlobKey coordinator_oldest_key(std::uint64_t session, std::uint64_t place) {
  return coordinator_key("kvmeld.coordinator.oldest.v1", session, place);
}
/// Of a round's cut, so that it gives no second one after a restart.
[[nodiscard]] inline BlobKey coordinator_cut_key(std::uint64_t session, std::uint64_t round) {
  return coordinator_key("kvmeld.coordinator.cut.v1", session, round);
}

[[nodiscard]] inline std::string list_of(const std::vector<MemberId>& members) {
  std::string out;
  for (const MemberId member : members) out += (out.empty() ? "" : ", ") + detail::decimal(member);
  return out.empty() ? "none" : out;
}

}  // namespace detail

KVMELD_NAMESPACE_END
