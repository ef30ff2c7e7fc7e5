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

/// What comes into the tiers, what is forgotten with an anchor, and whose turn it is to move.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Waits for one move: this one, or another thread's that is in its way.
template <class Moves>
Status run_or_wait(Moves& moves, std::unique_lock<std::mutex>& lock, const typename Moves::Move& move) {
  if (move.kind != Moves::Kind::none) return moves.run(lock, move);
  lock.unlock();
  std::this_thread::yield();
  lock.lock();
  return {};
}

/// Takes one payload into host memory, unless the tiers have it; the fragment without its bytes.
template <ContentHash Hash, class Moves>
[[nodiscard]] Result<Fragment> hold(Moves& moves, const Fragment& payload, std::vector<FragmentId>& fresh) {
  if (!payload.valid()) return payload;
  const Fragment shell = with_bytes(payload, nullptr);
  std::unique_lock lock(moves.mutex);
  if (moves.cells.contains(payload.id())) return shell;
  lock.unlock();
  const auto cell = std::make_shared<typename Moves::Cell>(shell, tier_key<Hash>(payload.payloads()[0]));
  (void)cell->use(moves.clock.fetch_add(1, std::memory_order_relaxed) + 1);
  lock.lock();
  for (;;) {
    const auto first = moves.make_room(Tier::host, cell->bytes(), cell, true);
    if (!first) return first.error();
    if (first->kind == Moves::Kind::none && moves.fits(Tier::host, cell->bytes())) break;
    KVMELD_TRY(run_or_wait(moves, lock, *first));
  }
  moves.add(cell, payload);
  fresh.push_back(payload.id());
  return shell;
}

/// Refuses payloads that cannot be taken, before any is.
template <class Moves>
[[nodiscard]] Status check_held(Moves& moves, std::span<const Fragment* const> payloads) {
  const std::lock_guard lock(moves.mutex);
  const std::size_t host = moves.budget[static_cast<std::size_t>(Tier::host)], file = moves.budget[static_cast<std::size_t>(Tier::file)];
  std::size_t total = 0;
  for (const Fragment* payload : payloads) {
    if (!payload->valid()) continue;
    const std::span<const Payload> all = payload->payloads();
    if (all.size() != 1) return error(ErrorCode::unsupported, "fragment ", payload->id().hex(), " has ", all.size(), " payloads, an anchor's has 1");
    if (moves.cells.contains(payload->id())) continue;
    if (all[0].bytes == nullptr) return error(ErrorCode::payload_missing, "payload ", payload->id().hex(), " has no bytes and is in no tier");
    total += all[0].byte_count;
    if (all[0].byte_count > host || total > (std::max)(host, file)) {
      return error(ErrorCode::store_full, "an anchor with a payload of ", all[0].byte_count, " bytes, ", total, " so far, for tiers of ", host,
                   " bytes in host memory and ", file, " in files");
    }
  }
  return {};
}

/// Takes a Δ into host memory; its shell. Errors: see `AnchorTiers::commit`.
template <ContentHash Hash, class Moves>
[[nodiscard]] Result<ContextOffset> hold(Moves& moves, const ContextOffset& offset, std::vector<FragmentId>& fresh) {
  const Fragment* const both[] = {&offset.segment, &offset.following};
  KVMELD_TRY(check_held(moves, both));
  const auto segment = hold<Hash>(moves, offset.segment, fresh);
  if (!segment) return segment.error();
  const auto following = hold<Hash>(moves, offset.following, fresh);
  if (!following) return following.error();
  return ContextOffset{offset.context, *segment, *following};
}
/// Takes all of an anchor into host memory; its shell.
template <ContentHash Hash, class Moves>
[[nodiscard]] Result<Anchor> hold(Moves& moves, const Anchor& anchor, std::vector<FragmentId>& fresh) {
  std::vector<const Fragment*> all{&anchor.base};
  for (const ContextOffset& offset : anchor.offsets) all.insert(all.end(), {&offset.segment, &offset.following});
  KVMELD_TRY(check_held(moves, all));
  Anchor out = anchor;
  const auto base = hold<Hash>(moves, anchor.base, fresh);
  if (!base) return base.error();
  out.base = *base;
  for (ContextOffset& offset : out.offsets) {
    const auto shell = hold<Hash>(moves, offset, fresh);
    if (!shell) return shell.error();
    offset = *shell;
  }
  return out;
}

template <class Moves>
void forget(Moves& moves, std::span<const FragmentId> ids) {
  const std::lock_guard lock(moves.mutex);
  for (const FragmentId& id : ids) {
    if (const auto at = moves.cells.find(id); at != moves.cells.end()) moves.forget(at->second);
  }
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

/// The payload that is asked for most; of equals the one used last.
template <class Moves>
[[nodiscard]] typename Moves::CellPtr most_wanted(const Moves& moves) {
  typename Moves::CellPtr out;
  std::pair<std::uint32_t, std::uint64_t> most;
  for (const auto& [id, cell] : moves.cells) {
    const TierWant want = cell->want.load(std::memory_order_relaxed);
    if (want == TierWant::nothing || cell->moving) continue;
    if (cell->held[static_cast<std::size_t>(want == TierWant::host ? Tier::host : Tier::device)]) {
      cell->want.store(TierWant::nothing);
      continue;
    }
    const std::pair urgency(cell->hits.load(std::memory_order_relaxed), cell->last_used.load(std::memory_order_relaxed));
    if (out != nullptr && !(urgency > most)) continue;
    out = cell;
    most = urgency;
  }
  return out;
}
/// The next move of a payload on its way to where it is wanted: to a device by way of host memory.
template <class Moves>
[[nodiscard]] typename Moves::Kind next_move(const Moves&, const typename Moves::Cell& cell) noexcept {
  if (cell.want.load() == TierWant::device && cell.held[static_cast<std::size_t>(Tier::host)]) return Moves::Kind::upload;
  return cell.held[static_cast<std::size_t>(Tier::device)] ? Moves::Kind::download : Moves::Kind::read;
}
/// The first of those next to leave host memory that would have to be written for it, unless so much room is there without.
template <class Moves>
[[nodiscard]] typename Moves::CellPtr next_to_fall(const Moves& moves, std::size_t ahead_bytes) {
  const std::size_t host = moves.budget[static_cast<std::size_t>(Tier::host)];
  const std::size_t wanted = (std::min)(ahead_bytes, host);
  std::size_t room = host - moves.used(Tier::host);
  if (room >= wanted) return nullptr;
  struct Next {
    std::pair<bool, double> order;
    const typename Moves::CellPtr* cell;
  };
  std::vector<Next> heap;
  const std::uint64_t now = moves.clock.load(std::memory_order_relaxed);
  for (const auto& [id, cell] : moves.cells) {
    if (cell->held[static_cast<std::size_t>(Tier::host)] && !cell->moving) heap.push_back({cell->order(Tier::host, now), &cell});
  }
  const auto later = [](const Next& a, const Next& b) { return a.order < b.order; };
  std::make_heap(heap.begin(), heap.end(), later);
  for (; room < wanted && !heap.empty(); heap.pop_back()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const auto& cell = *heap.back().cell;
    if (cell->copies() == 1) return cell->bytes() <= moves.budget[static_cast<std::size_t>(Tier::file)] ? cell : nullptr;
    room += cell->bytes();
  }
  return nullptr;
}

}  // namespace detail
KVMELD_NAMESPACE_END
