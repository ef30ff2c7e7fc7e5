#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <kvmeld/anchor/anchor_table.hpp>
#include <kvmeld/session/anchor_tier_moves.hpp>

/// What comes into the tiers, and what is forgotten with an anchor.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Waits for one move: this one, or another thread's that is in its way.
template <class Moves>
Status run_or_wait(Moves& moves, std::unique_lock<std::mutex>& lock, typename Moves::Move move,
                   typename Moves::Room* room = nullptr) {
  if (move.kind != Moves::Kind::none) return moves.run(lock, std::move(move), room);
  lock.unlock();
  std::this_thread::yield();
  lock.lock();
  return {};
}

/// Payloads that a commit takes, and those of it that were there: no room is made by losing one of
/// them until it ends. What has to leave for them leaves with `keep`; without, they go again and
/// all else is where it was.
template <class Moves>
class TierIntake {
 public:
  explicit TierIntake(Moves& moves) noexcept : moves_(moves) {}
  TierIntake(const TierIntake&) = delete;
  TierIntake& operator=(const TierIntake&) = delete;
  ~TierIntake() { end(false); }

  void keep() { end(true); }

  /// Refuses payloads that cannot be taken together, before room is made for any; pins those that
  /// are there.
  ///
  /// New ones go to host memory with those that are nowhere else, or all may go on to the file.
  /// What is in the file stays there meanwhile.
  [[nodiscard]] Status check(std::span<const Fragment* const> payloads) {
    const std::lock_guard lock(moves_.mutex);
    const std::size_t host = moves_.budget[static_cast<std::size_t>(Tier::host)],
                      file = moves_.budget[static_cast<std::size_t>(Tier::file)];
    std::set<FragmentId> seen;
    std::size_t in_host = 0, in_file = 0;
    for (const Fragment* payload : payloads) {
      if (!payload->valid()) continue;
      const std::span<const Payload> all = payload->payloads();
      if (all.size() != 1)
        return error(ErrorCode::unsupported, "fragment ", payload->id().hex(), " has ", all.size(),
                     " payloads, an anchor's has 1");
      if (!seen.insert(payload->id()).second) continue;
      const auto at = moves_.cells.find(payload->id());
      const bool known = at != moves_.cells.end();
      if (!known && all[0].bytes == nullptr)
        return error(ErrorCode::payload_missing, "payload ", payload->id().hex(),
                     " has no bytes and is in no tier");
      const auto* const held = known ? &at->second->held : nullptr;
      if (known) pin(at->second);
      if (held == nullptr || !((*held)[static_cast<std::size_t>(Tier::file)] ||
                               (*held)[static_cast<std::size_t>(Tier::device)]))
        in_host += all[0].byte_count;
      if (held == nullptr || !(*held)[static_cast<std::size_t>(Tier::device)])
        in_file += all[0].byte_count;
      if (all[0].byte_count > host || (in_host > host && in_file > file)) {
        return error(ErrorCode::store_full, "an anchor with a payload of ", all[0].byte_count,
                     " bytes, ", (std::max)(in_host, in_file), " so far, for tiers of ", host,
                     " bytes in host memory and ", file, " in files");
      }
    }
    return {};
  }
  /// Takes one payload into host memory, unless the tiers have it; the fragment without its bytes.
  template <ContentHash Hash>
  [[nodiscard]] Result<Fragment> take(const Fragment& payload) {
    if (!payload.valid()) return payload;
    const Fragment shell = with_bytes(payload, nullptr);
    std::unique_lock lock(moves_.mutex);
    if (moves_.cells.contains(payload.id())) return shell;
    lock.unlock();
    if (payload.payloads()[0].bytes == nullptr) {
      return error(ErrorCode::payload_missing, "payload ", payload.id().hex(),
                   " has no bytes, and came back damaged from its tier just now");
    }
    const auto cell =
        std::make_shared<typename Moves::Cell>(shell, tier_key<Hash>(payload.payloads()[0]));
    (void)cell->use(moves_.clock.fetch_add(1, std::memory_order_relaxed) + 1);
    lock.lock();
    for (;;) {
      bool ready = false;
      auto first = moves_.make_room(*cell, room_, ready);
      if (!first) return first.error();
      if (ready) break;
      if (first->kind == Moves::Kind::none && moves_.under_way == 0) {
        return error(ErrorCode::store_full, "no room for ", cell->bytes(),
                     " bytes in host memory: of ",
                     moves_.budget[static_cast<std::size_t>(Tier::host)], ", ",
                     moves_.used(Tier::host), " cannot leave; commit again");
      }
      KVMELD_TRY(run_or_wait(moves_, lock, *std::move(first), &room_));
    }
    pin(cell);
    fresh_.push_back(payload.id());
    moves_.add(cell, payload, room_);
    return shell;
  }

 private:
  void end(bool certain) {
    const std::lock_guard lock(moves_.mutex);
    moves_.settle(room_, certain, fresh_);
    for (const auto& cell : pinned_) cell->pinned = false;
    fresh_.clear();
    pinned_.clear();
  }
  void pin(const typename Moves::CellPtr& cell) {
    pinned_.push_back(cell);
    cell->pinned = true;
  }

  Moves& moves_;
  std::vector<FragmentId> fresh_;
  std::vector<typename Moves::CellPtr> pinned_;
  typename Moves::Room room_;
};

template <ContentHash Hash, class Moves>
[[nodiscard]] Result<ContextOffset> hold_checked(TierIntake<Moves>& intake,
                                                 const ContextOffset& offset) {
  const auto segment = intake.template take<Hash>(offset.segment);
  if (!segment) return segment.error();
  const auto following = intake.template take<Hash>(offset.following);
  if (!following) return following.error();
  return ContextOffset{offset.context, *segment, *following};
}
/// Takes a Δ into host memory; its shell. Errors: see `AnchorTiers::commit`.
template <ContentHash Hash, class Moves>
[[nodiscard]] Result<ContextOffset> hold(TierIntake<Moves>& intake, const ContextOffset& offset) {
  const Fragment* const both[] = {&offset.segment, &offset.following};
  KVMELD_TRY(intake.check(both));
  return hold_checked<Hash>(intake, offset);
}
/// Takes all of an anchor into host memory; its shell.
template <ContentHash Hash, class Moves>
[[nodiscard]] Result<Anchor> hold(TierIntake<Moves>& intake, const Anchor& anchor) {
  std::vector<const Fragment*> all{&anchor.base};
  for (const ContextOffset& offset : anchor.offsets)
    all.insert(all.end(), {&offset.segment, &offset.following});
  KVMELD_TRY(intake.check(all));
  Anchor out = anchor;
  const auto base = intake.template take<Hash>(anchor.base);
  if (!base) return base.error();
  out.base = *base;
  for (ContextOffset& offset : out.offsets) {
    const auto shell = hold_checked<Hash>(intake, offset);
    if (!shell) return shell.error();
    offset = *shell;
  }
  return out;
}

/// Forgets what no anchor of a table has.
template <class Moves>
void sweep(Moves& moves, const AnchorTable& table) {
  std::set<FragmentId> known;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const Anchor& anchor = *table.anchor(i);
    known.insert(anchor.base.id());
    for (const ContextOffset& offset : anchor.offsets) {
      known.insert(offset.segment.id());
      if (offset.following.valid()) known.insert(offset.following.id());
    }
  }
  const std::lock_guard lock(moves.mutex);
  for (auto at = moves.cells.begin(); at != moves.cells.end();) {
    const auto cell = (at++)->second;
    if (!known.contains(cell->shell.id())) moves.forget(cell);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
