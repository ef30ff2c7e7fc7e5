#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/session/anchor_tier_cells.hpp>
#include <kvmeld/session/anchor_tier_files.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A copy that leaves a tier.
template <class Cell>
struct TierDrop {
  std::shared_ptr<Cell> cell;
  Tier tier = Tier::host;
  // bytes of the tier that go with it: none where another payload, which stays or was chosen later,
  // has the same file
  std::size_t freed = 0;
};

/// What a commit lets leave once it is certain, and what it lets come before that; all of it can be
/// taken back.
template <class Cell>
struct TierRoom {
  std::vector<TierDrop<Cell>> drops{};  // of cells that nobody else moves meanwhile
  // to the file, before their copy in host memory leaves
  std::vector<std::shared_ptr<Cell>> written{};
  std::array<std::size_t, tier_count> freed{};  // bytes of `drops`
  // of those, bytes that something stands in already, and that `used` does not count
  std::array<std::size_t, tier_count> borrowed{};

  [[nodiscard]] std::size_t left(Tier tier) const noexcept {
    const auto i = static_cast<std::size_t>(tier);
    return freed[i] > borrowed[i] ? freed[i] - borrowed[i] : 0;
  }
};

/// What the tiers hold, within their budgets, and who would leave for a newcomer. All is under the
/// mutex but what is atomic.
///
/// A copy is chosen to leave and, once that is certain, dropped; until then it counts, stays
/// readable, and is nobody else's to move, so that a newcomer that does not come has displaced
/// nothing. Meanwhile the tier holds more than its budget by what is to leave.
template <BlobStore Store, class Handle>
class TierSpace {
 public:
  using Cell = TierCell<Handle>;
  using CellPtr = std::shared_ptr<Cell>;
  using Drop = TierDrop<Cell>;
  using Room = TierRoom<Cell>;

  TierSpace(Store store, const std::array<std::size_t, tier_count>& budgets)
      : budget(budgets), files_(std::move(store)) {}

  const std::array<std::size_t, tier_count> budget;
  std::mutex mutex;
  std::map<FragmentId, CellPtr> cells;
  TierDirectory<Cell> directory;
  TierTally tally;
  std::atomic<std::uint64_t> clock{0};

  [[nodiscard]] std::size_t used(Tier tier) const noexcept {
    return used_[index(tier)].load(std::memory_order_relaxed);
  }

  /// Whether a payload could come to the device, by way of host memory: nothing that has to go down
  /// for it is too much for that.
  [[nodiscard]] bool may_upload(Cell& cell) {
    std::vector<Drop> chosen;
    // it has to stay where it is uploaded from
    const bool before = std::exchange(cell.moving, true);
    const bool room = choose(Tier::device, cell.bytes(), 0, false, chosen);
    const bool possible =
        room && fits_without_all(Tier::host, only_copies(chosen) +
                                                 (cell.held[index(Tier::host)] ? 0 : cell.bytes()));
    cell.moving = before;
    unchoose(chosen, 0);
    return possible;
  }
  /// Takes a payload out of all tiers; who holds it keeps it.
  void forget(const CellPtr& given) {
    const CellPtr cell = given;  // the reference may be the map's
    cells.erase(cell->shell.id());
    directory.erase(cell->shell.id());
    cell->dead = true;
    for (const Tier tier : {Tier::device, Tier::host, Tier::file}) {
      // a copy that leaves counts until it is settled
      if (cell->held[index(tier)] && !cell->leaving[index(tier)]) drop(*cell, tier);
    }
  }
  /// Ends a commit: what had to leave leaves, as far as room is still short; or everything is as it
  /// was, but for `fresh`, which goes.
  void settle(Room& room, bool certain, std::span<const FragmentId> fresh) {
    unchoose(room.drops, 0);
    if (!certain) {
      for (const FragmentId& id : fresh) {
        if (const auto at = cells.find(id); at != cells.end()) forget(at->second);
      }
    }
    for (const CellPtr& cell : room.written) cell->spilled = false;
    for (const Tier tier : {Tier::device, Tier::host, Tier::file}) {
      const std::size_t borrowed = std::exchange(room.borrowed[index(tier)], 0);
      for (const CellPtr& cell : room.written) {
        if (tier == Tier::file && !fits(tier, borrowed) && !cell->dead && cell->held[index(tier)] &&
            cell->copies() > 1)
          drop(*cell, tier);
      }
      let_go(room.drops, tier, certain, borrowed);
      take(tier, borrowed);
    }
    room = {};
  }

 protected:
  [[nodiscard]] static constexpr std::size_t index(Tier tier) noexcept {
    return static_cast<std::size_t>(tier);
  }
  void take(Tier tier, std::size_t bytes) noexcept {
    used_[index(tier)].fetch_add(bytes, std::memory_order_relaxed);
  }
  void give(Tier tier, std::size_t bytes) noexcept {
    used_[index(tier)].fetch_sub(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] bool fits(Tier tier, std::size_t more, std::size_t freed = 0) const noexcept {
    return used(tier) + more <= budget[index(tier)] + freed;
  }
  /// What has to stand in room of copies that are to leave.
  [[nodiscard]] std::size_t short_of(Tier tier, std::size_t more) const noexcept {
    const std::size_t all = used(tier) + more;
    return all > budget[index(tier)] ? all - budget[index(tier)] : 0;
  }

  /// Chooses who leaves a tier so that `more` bytes fit, beside `freed` that are chosen already.
  /// False, with nobody chosen: not if all left that may.
  /// @param committing  so may what the commit under way wrote to the file to make room in host
  /// memory
  [[nodiscard]] bool choose(Tier tier, std::size_t more, std::size_t freed, bool committing,
                            std::vector<Drop>& chosen) {
    if (fits(tier, more, freed)) return true;
    const std::size_t before = chosen.size();
    std::vector<Leaver> heap = leavers(tier, committing);
    const auto later = [](const Leaver& a, const Leaver& b) { return a.order < b.order; };
    std::make_heap(heap.begin(), heap.end(), later);
    for (; !fits(tier, more, freed); heap.pop_back()) {
      if (heap.empty()) {
        unchoose(chosen, before);
        return false;
      }
      std::pop_heap(heap.begin(), heap.end(), later);
      const CellPtr& cell = *heap.back().cell;
      cell->leaving[index(tier)] = true;
      if (tier == Tier::file) files_.leave(cell->key, true);
      chosen.push_back({cell, tier, freed_by(*cell, tier)});
      freed += chosen.back().freed;
    }
    return true;
  }
  /// Takes back the choices behind the first `kept`.
  void unchoose(std::vector<Drop>& chosen, std::size_t kept) {
    for (std::size_t i = kept; i < chosen.size(); ++i) {
      Cell& cell = *chosen[i].cell;
      if (chosen[i].tier == Tier::file) files_.leave(cell.key, false);
      cell.leaving[index(chosen[i].tier)] = false;
    }
  }
  [[nodiscard]] std::size_t freed_by(const Cell& cell, Tier tier) const {
    return tier != Tier::file || files_.all_leave(cell.key) ? cell.bytes() : 0;
  }
  /// Bytes of those chosen that are in no other tier.
  [[nodiscard]] static std::size_t only_copies(std::span<const Drop> chosen) {
    std::size_t sum = 0;
    for (const Drop& d : chosen) sum += d.cell->copies() == 0 ? d.cell->bytes() : 0;
    return sum;
  }
  /// Whether bytes would fit into a tier if all left it that may.
  [[nodiscard]] bool fits_without_all(Tier tier, std::size_t more) const {
    std::size_t freed = 0;
    if (fits(tier, more)) return true;
    for (const Leaver& l : leavers(tier, false)) freed += (*l.cell)->bytes();
    return fits(tier, more, freed);
  }
  /// Drops copies of one tier that are chosen no more, where they are certain to leave and room is
  /// short of `borrowed` bytes, which the caller counts then; those of payloads that were forgotten
  /// meanwhile in any case.
  void let_go(std::span<const Drop> drops, Tier tier, bool certain, std::size_t borrowed) {
    for (const bool dead : {true, false}) {
      for (const auto& [cell, from, freed] : drops) {
        if (from != tier || cell->dead != dead || !cell->held[index(tier)]) continue;
        if (!dead && (!certain || fits(tier, borrowed))) continue;
        if (!dead && cell->copies() == 1) {
          tally.lost.fetch_add(1, std::memory_order_relaxed);
          forget(cell);
        } else {
          if (!dead) tally.demoted.fetch_add(1, std::memory_order_relaxed);
          drop(*cell, tier);
        }
      }
    }
    for (const auto& [cell, from, freed] : drops) {
      if (from == tier) cell->moving = false;
    }
  }
  void drop(Cell& cell, Tier tier) {
    if (tier == Tier::file) {
      files_.release(cell.key, used_[index(tier)]);
    } else {
      give(tier, cell.bytes());
    }
    cell.change([&](auto& place) {
      if (tier == Tier::device) place.device.reset();
      if (tier == Tier::host) place.host = {};
      if (tier == Tier::file) place.file = false;
    });
  }

  TierFiles<Store> files_;
  std::array<std::atomic<std::size_t>, tier_count> used_{};

 private:
  struct Leaver {
    std::tuple<int, std::pair<bool, double>> order;
    const CellPtr* cell;
  };
  /// Who may leave a tier, the greatest first: of a commit's own the last; none that moves, or has
  /// to stay for the commit.
  [[nodiscard]] std::vector<Leaver> leavers(Tier tier, bool committing) const {
    std::vector<Leaver> out;
    const std::uint64_t now = clock.load(std::memory_order_relaxed);
    for (const auto& [id, cell] : cells) {
      if (!cell->stays(tier) ||
          (cell->moving && !(committing && cell->spilled && tier == Tier::file)))
        continue;
      const bool spare = cell->copies() > 1;
      if (cell->pinned &&
          (tier != Tier::host || (!spare && cell->bytes() > budget[index(Tier::file)])))
        continue;
      out.push_back({{!cell->pinned ? 2 : spare ? 1 : 0, cell->order(tier, now)}, &cell});
    }
    return out;
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END
