#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/session/anchor_tier_cells.hpp>

/// Whose turn it is to move: what is asked for most, and what falls next.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The payloads that are asked for and do not move, first the one asked for most; of equals the one
/// used last. Leaves word where some move.
template <class Moves>
[[nodiscard]] std::vector<typename Moves::CellPtr> most_wanted(Moves& moves) {
  struct Wanted {
    std::pair<std::uint32_t, std::uint64_t> urgency;
    typename Moves::CellPtr cell;
  };
  std::vector<Wanted> wanted;
  for (const auto& [id, cell] : moves.cells) {
    if (cell->want.load() == want_nothing) continue;
    if (cell->moving) {
      moves.asked.store(true);  // it may want to go on from where it comes to
      continue;
    }
    if (cell->held[static_cast<std::size_t>(Tier::host)]) cell->want.fetch_and(want_device);
    if (cell->held[static_cast<std::size_t>(Tier::device)]) cell->want.fetch_and(want_host);
    if (cell->want.load() != want_nothing)
      wanted.push_back({{cell->hits.load(std::memory_order_relaxed),
                         cell->last_used.load(std::memory_order_relaxed)},
                        cell});
  }
  std::stable_sort(wanted.begin(), wanted.end(),
                   [](const Wanted& a, const Wanted& b) { return a.urgency > b.urgency; });
  std::vector<typename Moves::CellPtr> out;
  for (Wanted& w : wanted) out.push_back(std::move(w.cell));
  return out;
}
/// The next move of a payload on its way to where it is wanted: to a device by way of host memory.
template <class Moves>
[[nodiscard]] typename Moves::Kind next_move(const Moves&,
                                             const typename Moves::Cell& cell) noexcept {
  if ((cell.want.load() & want_device) != 0 && cell.held[static_cast<std::size_t>(Tier::host)])
    return Moves::Kind::upload;
  return cell.held[static_cast<std::size_t>(Tier::device)] ? Moves::Kind::download
                                                           : Moves::Kind::read;
}
/// The first of those next to leave host memory that would have to be written for it, unless so
/// much room is there without.
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
    if (cell->held[static_cast<std::size_t>(Tier::host)] && !cell->moving)
      heap.push_back({cell->order(Tier::host, now), &cell});
  }
  const auto later = [](const Next& a, const Next& b) { return a.order < b.order; };
  std::make_heap(heap.begin(), heap.end(), later);
  for (; room < wanted && !heap.empty(); heap.pop_back()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const auto& cell = *heap.back().cell;
    if (cell->copies() == 1)
      return cell->bytes() <= moves.budget[static_cast<std::size_t>(Tier::file)] ? cell : nullptr;
    room += cell->bytes();
  }
  return nullptr;
}

}  // namespace detail
KVMELD_NAMESPACE_END
