#pragma once

/// Moves between the tiers, and the intake.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <kvmeld/anchors/detail/table.hpp>
#include <kvmeld/anchors/detail/tier_space.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/replica/stores.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

namespace detail {

/// The writers' side of the tiers: what moves for whom, and the moves. All is under the mutex;
/// `run` gives it back while bytes are copied.
template <DeviceMemory Device>
class TierMoves : public TierSpace<typename Device::handle> {
  using Space = TierSpace<typename Device::handle>;
  using Space::choose, Space::drop, Space::files_, Space::fits, Space::fits_without_all,
      Space::freed_by, Space::give, Space::index, Space::let_go, Space::only_copies,
      Space::short_of, Space::take, Space::unchoose, Space::used_;

 public:
  using Space::budget, Space::cells, Space::clock, Space::directory, Space::forget, Space::settle,
      Space::tally, Space::used;
  using typename Space::Cell, typename Space::CellPtr, typename Space::Drop, typename Space::Room;

  enum class Kind : std::uint8_t { none, read, download, upload, write };
  struct Move {
    Kind kind = Kind::none;
    CellPtr cell;
    std::size_t reserved = 0;   // bytes of the destination
    std::size_t borrowed = 0;   // of those, bytes in the room of `drops`, which do not count yet
    std::vector<Drop> drops{};  // leave the destination once the copy is there
  };
  [[nodiscard]] static constexpr Tier destination(Kind kind) noexcept {
    return kind == Kind::upload ? Tier::device : kind == Kind::write ? Tier::file : Tier::host;
  }

  TierMoves(replica::BlobStore& store, Device device,
            const std::array<std::size_t, tier_count>& budgets, const SetHash& names)
      : Space(store, budgets), hash(names), device_(std::move(device)) {}

  const SetHash hash;  // names the bytes in the store

  std::atomic<bool> asked{false};  // somebody wants something
  std::size_t under_way = 0;       // moves between `prepare` and the end of `run`

  /// Readies a move, its room reserved. Where that takes a move of another payload first, it is
  /// that one; none where there is nothing to move, where no number of moves makes the room, or
  /// others are moving what is in the way. Errors: the store's.
  /// @param forced  payloads may fall out of the last tier for it
  [[nodiscard]] Result<Move> prepare(Kind kind, const CellPtr& cell, bool forced = true) {
    std::vector<Drop> chosen;
    Move first;
    const auto verdict = plan(kind, cell, forced, nullptr, chosen, first);
    if (!verdict || *verdict != Verdict::possible) unchoose(chosen, 0);
    if (!verdict) return verdict.error();
    if (*verdict != Verdict::possible) return Move{};
    return reserve(std::move(first), chosen);
  }

  /// What a commit has to move before a payload of its own can be added; none where it can be,
  /// which `ready` says, or where there is no room.
  [[nodiscard]] Result<Move> make_room(Cell& newcomer, Room& room, bool& ready) {
    std::vector<Drop> chosen;
    Move first;
    const auto verdict = clear(Tier::host, newcomer.bytes(), newcomer, true, &room, chosen, first);
    ready = verdict && *verdict == Verdict::possible && first.kind == Kind::none;
    if (!verdict || *verdict != Verdict::possible) unchoose(chosen, 0);
    if (!verdict) return verdict.error();
    if (*verdict != Verdict::possible) return Move{};
    if (!ready) return reserve(std::move(first), chosen);
    for (Drop& d : chosen) leave_with(room, std::move(d));
    return Move{};
  }
  /// A payload that comes to host memory with a commit, for which `make_room` has made room.
  void add(const CellPtr& cell, const Fragment& whole, Room& room) {
    const std::size_t borrowed = short_of(Tier::host, cell->bytes());
    room.borrowed[index(Tier::host)] += borrowed;
    take(Tier::host, cell->bytes() - borrowed);
    cell->change([&](auto& place) { place.host = whole; });
    cells.emplace(whole.id(), cell);
    directory.add(cell);
  }

  /// Carries out what `prepare` readied, for a commit with its `room`. Errors: those of the store
  /// and the device, nothing moved and nothing dropped; `id_mismatch` or `not_found` for a damaged
  /// copy, which is dropped.
  Status run(std::unique_lock<std::mutex>& lock, Move move, Room* room = nullptr) {
    Cell& cell = *move.cell;
    const Tier to = destination(move.kind);
    const auto from = cell.place.get();
    lock.unlock();
    Fragment host;
    std::optional<typename Device::handle> handle;
    Status status = copy(move.kind, cell, *from, host, handle);
    lock.lock();
    cell.moving = false;
    --under_way;
    if (move.kind == Kind::write) files_.settled(cell.key);
    if (status.ok() && !cell.dead) {
      cell.change([&](auto& place) {
        if (host.valid()) place.host = std::move(host);
        if (handle.has_value()) place.device = std::move(handle);
        if (move.kind == Kind::write) place.file = true;
      });
      if (room != nullptr) {
        for (Drop& d : move.drops) leave_with(*room, std::move(d));
        room->borrowed[index(to)] += move.borrowed;
        if (move.kind == Kind::write) {
          room->written.push_back(move.cell);
          cell.spilled = true;
          if (cell.held[index(Tier::host)]) leave_with(*room, {move.cell, Tier::host});
        }
      } else {
        unchoose(move.drops, 0);
        let_go(move.drops, to, true, move.borrowed);
        take(to, move.borrowed);
      }
      if (to == Tier::host) cell.last_used.store(clock.load());  // so that whoever asked finds it
      const bool down = move.kind == Kind::write || move.kind == Kind::download;
      (down ? tally.written : tally.promoted).fetch_add(1, std::memory_order_relaxed);
      tally.moved_bytes.fetch_add(cell.bytes(), std::memory_order_relaxed);
      return {};
    }
    unchoose(move.drops, 0);
    let_go(move.drops, to, false, 0);
    if (move.kind == Kind::write) {
      files_.release(cell.key, used_[index(Tier::file)]);  // all of its bytes
      take(to, move.borrowed);
    } else {
      give(to, move.reserved - move.borrowed);
    }
    if (cell.dead) return {};
    const bool read = move.kind == Kind::read || move.kind == Kind::download;
    if (read && (replica::proves_damage(status.code()) || status.code() == ErrorCode::not_found)) {
      tally.damaged.fetch_add(1, std::memory_order_relaxed);
      if (move.kind == Kind::read) files_.erase_damaged(cell.key);
      drop(cell, move.kind == Kind::read ? Tier::file : Tier::device);
      if (cell.copies() == 0) forget(move.cell);
    }
    return status;
  }

 private:
  // the last: than all that would have to go for it
  enum class Verdict : std::uint8_t { possible, blocked, worth_less };

  /// Chosen for good, unless the commit is taken back.
  void leave_with(Room& room, Drop d) {
    d.cell->moving = true;
    if (!d.cell->leaving[index(d.tier)]) {  // else by `choose`
      d.cell->leaving[index(d.tier)] = true;
      if (d.tier == Tier::file) files_.leave(d.cell->key, true);
      d.freed = freed_by(*d.cell, d.tier);
    }
    // a payload of the same bytes may have come meanwhile
    d.freed = (std::min)(d.freed, freed_by(*d.cell, d.tier));
    room.freed[index(d.tier)] += d.freed;
    room.drops.push_back(std::move(d));
  }

  /// What a move would take: who has to leave its destination, and in `first` the move that has to
  /// come first, itself where none has.
  [[nodiscard]] Result<Verdict> plan(Kind kind, const CellPtr& cell, bool forced, const Room* room,
                                     std::vector<Drop>& chosen, Move& first) {
    if (cell->moving || cell->dead || (kind == Kind::write && files_.busy(cell->key)))
      return Verdict::blocked;
    const std::size_t more = kind == Kind::write && files_.known(cell->key) ? 0 : cell->bytes();
    cell->moving = true;  // so that no room is made by moving it
    auto verdict = clear(destination(kind), more, *cell, forced, room, chosen, first);
    cell->moving = false;
    if (verdict && *verdict == Verdict::possible && first.kind == Kind::none)
      first = {kind, cell, more, 0, {}};
    return verdict;
  }
  /// Chooses who leaves a tier for `more` bytes. Of only copies the first that has to go down is
  /// planned before, unless it is lost.
  [[nodiscard]] Result<Verdict> clear(Tier tier, std::size_t more, const Cell& newcomer,
                                      bool forced, const Room* room, std::vector<Drop>& chosen,
                                      Move& first) {
    const std::size_t freed = room == nullptr ? 0 : room->left(tier);
    // What cannot be erased is room that does not come, whatever else goes.
    if (tier == Tier::file && !fits(tier, more, freed))
      KVMELD_TRY(files_.erase_unused(used_[index(tier)]));
    const std::size_t before = chosen.size();
    if (!choose(tier, more, freed, room != nullptr, chosen)) {
      // of what the commit under way keeps
      const bool full = tier == Tier::file && forced && !newcomer.pinned && under_way == 0;
      return full ? Verdict::worth_less : Verdict::blocked;
    }
    const std::span<const Drop> leave = std::span<const Drop>(chosen).subspan(before);
    if (tier == Tier::device && !fits_without_all(Tier::host, only_copies(leave)))
      return Verdict::blocked;
    const std::uint64_t now = clock.load(std::memory_order_relaxed);
    for (std::size_t i = before, end = chosen.size(); i < end; ++i) {
      const CellPtr victim = chosen[i].cell;
      if (victim->copies() > 0) continue;
      if (tier == Tier::file && !forced) return Verdict::blocked;
      if (tier == Tier::file && !newcomer.pinned && newcomer.burden(now) > victim->burden(now))
        return Verdict::worth_less;
      // lost
      if (tier == Tier::file || (tier == Tier::host && victim->bytes() > budget[index(Tier::file)]))
        continue;
      const std::size_t kept = chosen.size();
      const auto verdict = plan(tier == Tier::host ? Kind::write : Kind::download, victim, true,
                                room, chosen, first);
      if (!verdict || *verdict != Verdict::worth_less) return verdict;
      unchoose(chosen, kept);  // nothing leaves the file for it: it is lost
      chosen.resize(kept);
    }
    return Verdict::possible;
  }
  /// Takes room for a move: of those chosen only who leaves its destination goes for it.
  [[nodiscard]] Move reserve(Move move, std::vector<Drop>& chosen) {
    const Tier to = destination(move.kind);
    const auto others = std::stable_partition(chosen.begin(), chosen.end(),
                                              [&](const Drop& d) { return d.tier == to; });
    const auto kept = static_cast<std::size_t>(others - chosen.begin());
    unchoose(chosen, kept);
    chosen.resize(kept);
    for (const Drop& d : chosen) d.cell->moving = true;
    move.drops = std::move(chosen);
    move.borrowed = short_of(to, move.reserved);
    if (move.kind == Kind::write) files_.hold(move.cell->key, move.cell->bytes());
    move.cell->moving = true;
    take(to, move.reserved - move.borrowed);
    ++under_way;
    return move;
  }

  [[nodiscard]] Status copy(Kind kind, const Cell& cell, const typename Cell::Place& from,
                            Fragment& host, std::optional<typename Device::handle>& handle) {
    const std::span<const std::byte> bytes =
        from.host.valid() ? std::span(from.host.payloads()[0].bytes.get(), cell.bytes())
                          : std::span<const std::byte>{};
    if (kind == Kind::write) return files_.put(cell.key, bytes);
    if (kind == Kind::upload) {
      auto up = device_.upload(bytes);
      if (up) handle = *std::move(up);
      return up.status();
    }
    // Into memory of our own: pages of a mapped file would be read when a blend wants them.
    const std::shared_ptr<std::byte[]> storage(
        new std::byte[(std::max)(cell.bytes(), std::size_t{1})]);
    if (kind == Kind::download) {
      KVMELD_TRY(device_.download(*from.device, {storage.get(), cell.bytes()}));
    } else {
      const auto blob = files_.get(cell.key);
      if (!blob) return blob.error();
      if (blob->size != cell.bytes()) {
        return extend::error(ErrorCode::id_mismatch, "payload ", cell.shell.id().hex(), ": ",
                             blob->size, " bytes came back of ", cell.bytes());
      }
      std::copy_n(blob->data.get(), blob->size, storage.get());
    }
    Fragment whole = with_bytes(cell.shell, storage);
    if (tier_key(whole.payloads()[0], hash) != cell.key) {
      return extend::error(ErrorCode::id_mismatch, "payload ", cell.shell.id().hex(), ": the ",
                           cell.bytes(), " bytes that came back do not hash to its digest");
    }
    host = std::move(whole);
    return {};
  }

  Device device_;
};

}  // namespace detail

// What comes into the tiers, and what is forgotten with an anchor.

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
        return extend::error(ErrorCode::unsupported, "fragment ", payload->id().hex(), " has ",
                             all.size(), " payloads, an anchor's has 1");
      if (!seen.insert(payload->id()).second) continue;
      const auto at = moves_.cells.find(payload->id());
      const bool known = at != moves_.cells.end();
      if (!known && all[0].bytes == nullptr)
        return extend::error(ErrorCode::payload_missing, "payload ", payload->id().hex(),
                             " has no bytes and is in no tier");
      const auto* const held = known ? &at->second->held : nullptr;
      if (known) pin(at->second);
      if (held == nullptr || !((*held)[static_cast<std::size_t>(Tier::file)] ||
                               (*held)[static_cast<std::size_t>(Tier::device)]))
        in_host += all[0].byte_count;
      if (held == nullptr || !(*held)[static_cast<std::size_t>(Tier::device)])
        in_file += all[0].byte_count;
      if (all[0].byte_count > host || (in_host > host && in_file > file)) {
        return extend::error(ErrorCode::store_full, "an anchor with a payload of ",
                             all[0].byte_count, " bytes, ", (std::max)(in_host, in_file),
                             " so far, for tiers of ", host, " bytes in host memory and ", file,
                             " in files");
      }
    }
    return {};
  }
  /// Takes one payload into host memory, unless the tiers have it; the fragment without its bytes.
  [[nodiscard]] Result<Fragment> take(const Fragment& payload) {
    if (!payload.valid()) return payload;
    const Fragment shell = with_bytes(payload, nullptr);
    std::unique_lock lock(moves_.mutex);
    if (moves_.cells.contains(payload.id())) return shell;
    lock.unlock();
    if (payload.payloads()[0].bytes == nullptr) {
      return extend::error(ErrorCode::payload_missing, "payload ", payload.id().hex(),
                           " has no bytes, and came back damaged from its tier just now");
    }
    const auto cell =
        std::make_shared<typename Moves::Cell>(shell, tier_key(payload.payloads()[0], moves_.hash));
    (void)cell->use(moves_.clock.fetch_add(1, std::memory_order_relaxed) + 1);
    lock.lock();
    for (;;) {
      bool ready = false;
      auto first = moves_.make_room(*cell, room_, ready);
      if (!first) return first.error();
      if (ready) break;
      if (first->kind == Moves::Kind::none && moves_.under_way == 0) {
        return extend::error(ErrorCode::store_full, "no room for ", cell->bytes(),
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

template <class Moves>
[[nodiscard]] Result<ContextOffset> hold_checked(TierIntake<Moves>& intake,
                                                 const ContextOffset& offset) {
  const auto segment = intake.take(offset.segment);
  if (!segment) return segment.error();
  const auto following = intake.take(offset.following);
  if (!following) return following.error();
  return ContextOffset{offset.context, *segment, *following};
}
/// Takes a Δ into host memory; its shell. Errors: see `AnchorTiers::commit`.
template <class Moves>
[[nodiscard]] Result<ContextOffset> hold(TierIntake<Moves>& intake, const ContextOffset& offset) {
  const Fragment* const both[] = {&offset.segment, &offset.following};
  KVMELD_TRY(intake.check(both));
  return hold_checked(intake, offset);
}
/// Takes all of an anchor into host memory; its shell.
template <class Moves>
[[nodiscard]] Result<Anchor> hold(TierIntake<Moves>& intake, const Anchor& anchor) {
  std::vector<const Fragment*> all{&anchor.base};
  for (const ContextOffset& offset : anchor.offsets)
    all.insert(all.end(), {&offset.segment, &offset.following});
  KVMELD_TRY(intake.check(all));
  Anchor out = anchor;
  const auto base = intake.take(anchor.base);
  if (!base) return base.error();
  out.base = *base;
  for (ContextOffset& offset : out.offsets) {
    const auto shell = hold_checked(intake, offset);
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

// Whose turn it is to move: what is asked for most, and what falls next.

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

}  // namespace anchors

KVMELD_NAMESPACE_END
