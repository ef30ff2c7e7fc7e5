#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// What goes wrong in a simulation.
enum class Fault : std::uint8_t {
  drop,               ///< a message is lost
  duplicate,          ///< a message arrives twice
  reorder,            ///< a message arrives behind a later one of the same sender
  delay,              ///< a message arrives seconds later
  truncate,           ///< a message loses its end
  bit_flip,           ///< a message arrives with one wrong bit
  partition,          ///< members fall into two groups that do not hear each other, until it heals
  slow_peer,          ///< a member answers late for a while
  crash,              ///< a process ends between two calls
  torn_write,         ///< a process ends in the middle of a write
  restart,            ///< a process starts again, in a new epoch
  old_snapshot,       ///< a disk is restored from a copy that was made earlier
  clock_jump,         ///< a member's clock jumps ahead or back
  disk_full,          ///< a store takes nothing more for a while
  store_unavailable,  ///< a store answers nothing for a while
  write_refused,      ///< one write fails and did not happen
  write_in_doubt,     ///< one write fails and happened
  bit_rot,            ///< a blob or record at rest has one wrong bit
  lying_manifest,     ///< a peer sends a manifest of another fragment, or one with wrong chunks
  lying_chunk,        ///< a peer sends other bytes than the chunk that was asked for
  lying_news,         ///< a peer claims to have seen what it has not
  forged_dot,         ///< a peer acts in the name of the member it writes to
  foreign_dot,        ///< a peer tells one member that another did what it did not
  foreign_removal,    ///< a peer removes in another's name, or ends what another has not done yet
  foreign_gone,       ///< a peer says that all of another's operations are gone
  flood,              ///< a peer sends operations beyond the quota
  join,               ///< a new member enters while the others compact
  leave,              ///< a member leaves for good, its disk with it
  merger_upgrade,     ///< members restart with another merger, one after the other
};
inline constexpr std::size_t fault_kinds = static_cast<std::size_t>(Fault::merger_upgrade) + 1;

[[nodiscard]] constexpr std::string_view to_string(Fault fault) noexcept {
  constexpr std::array<std::string_view, fault_kinds> names{
      "drop",          "duplicate",      "reorder",     "delay",           "truncate",
      "bit flip",      "partition",      "slow peer",   "crash",           "torn write",
      "restart",       "old snapshot",   "clock jump",  "disk full",       "store unavailable",
      "write refused", "write in doubt", "bit rot",     "lying manifest",  "lying chunk",
      "lying news",    "forged dot",     "foreign dot", "foreign removal", "foreign gone",
      "flood",         "join",           "leave",       "merger upgrade"};
  return names[static_cast<std::size_t>(fault)];
}

/// How often each kind happened.
struct FaultCounts {
  std::array<std::uint64_t, fault_kinds> of{};

  [[nodiscard]] std::uint64_t& operator[](Fault fault) noexcept {
    return of[static_cast<std::size_t>(fault)];
  }
  [[nodiscard]] std::uint64_t operator[](Fault fault) const noexcept {
    return of[static_cast<std::size_t>(fault)];
  }
  void add(const FaultCounts& other) noexcept {
    for (std::size_t i = 0; i < fault_kinds; ++i) of[i] += other.of[i];
  }
};

/// How likely each kind is; 0 switches it off.
struct Faults {
  // Of one message.
  double drop = 0.08;
  double duplicate = 0.05;
  double reorder = 0.15;
  double delay = 0.02;
  double truncate = 0.01;
  double bit_flip = 0.01;
  // Of one write to a store.
  double write_refused = 0.02;
  double write_in_doubt = 0.02;
  // Of one second, for the whole session or, where it says so, for each member.
  double partition = 0.4;
  double slow_peer = 0.3;
  double crash = 0.15;              ///< a member
  double torn_write = 0.15;         ///< a member
  double old_snapshot = 0.25;       ///< of a restart
  double clock_jump = 0.2;          ///< a member
  double disk_full = 0.15;          ///< a member
  double store_unavailable = 0.15;  ///< a member
  double bit_rot = 0.3;             ///< a member
  double liar = 6;                  ///< messages a second of one peer that lies in every way above
  double insider = 0.5;             ///< of a run: that peer is a member
  double join = 0.15;
  double leave = 0.1;
  double merger_upgrade = 0.5;  ///< of a run

  /// Nothing goes wrong.
  [[nodiscard]] static Faults none() noexcept {
    return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  }
};

}  // namespace testing
KVMELD_NAMESPACE_END
