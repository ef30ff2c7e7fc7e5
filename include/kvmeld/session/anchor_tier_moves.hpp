#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include <kvmeld/session/anchor_tier_cells.hpp>
#include <kvmeld/session/anchor_tier_files.hpp>
#include <kvmeld/session/fragment_io.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The writers' side of the tiers: what moves for whom, and the moves. All is under the mutex; `run` gives it back while bytes are copied.
template <BlobStore Store, DeviceMemory Device, ContentHash Hash>
class TierMoves {
 public:
  using Cell = TierCell<typename Device::handle>;
  using CellPtr = std::shared_ptr<Cell>;
  enum class Kind : std::uint8_t { none, read, download, upload, write };
  struct Move {
    Kind kind = Kind::none;
    CellPtr cell;
    std::size_t reserved = 0;  // bytes of the destination
  };
  [[nodiscard]] static constexpr Tier destination(Kind kind) noexcept {
    return kind == Kind::upload ? Tier::device : kind == Kind::write ? Tier::file : Tier::host;
  }

  TierMoves(Store store, Device device, const std::array<std::size_t, tier_count>& budgets)
      : budget(budgets), files_(std::move(store)), device_(std::move(device)) {}

  const std::array<std::size_t, tier_count> budget;
  std::mutex mutex;
  std::map<FragmentId, CellPtr> cells;
  TierDirectory<Cell> directory;
  TierTally tally;
  std::atomic<std::uint64_t> clock{0};
  std::atomic<bool> asked{false};  // somebody wants something
  std::size_t under_way = 0;       // moves between `prepare` and the end of `run`

  [[nodiscard]] std::size_t used(Tier tier) const noexcept { return used_[index(tier)].load(std::memory_order_relaxed); }
  [[nodiscard]] bool fits(Tier tier, std::size_t more) const noexcept {
    return used(tier) <= budget[index(tier)] && more <= budget[index(tier)] - used(tier);
  }

  /// Readies a move: room is made and reserved. Where that takes a move of another payload first, it is that one; none where there is
  /// nothing to move, or others are moving what is in the way. Errors: the store's.
  /// @param forced  payloads may fall out of the last tier for it
  [[nodiscard]] Result<Move> prepare(Kind kind, const CellPtr& cell, bool forced = true) {
    if (cell->moving || cell->dead || (kind == Kind::write && files_.busy(cell->key))) return Move{};
    const std::size_t more = kind == Kind::write && files_.known(cell->key) ? 0 : cell->bytes();
    cell->moving = true;  // so that no room is made by moving it
    auto first = make_room(destination(kind), more, cell, forced);
    cell->moving = false;
    if (!first || first->kind != Kind::none || cell->dead || !fits(destination(kind), more)) return first;
    if (kind == Kind::write) files_.hold(cell->key, cell->bytes());
    cell->moving = true;
    take(destination(kind), more);
    ++under_way;
    return Move{kind, cell, more};
  }

  /// Drops copies until `more` bytes fit; the move that has to come first, if one has. Without one and without room: others are moving.
  [[nodiscard]] Result<Move> make_room(Tier tier, std::size_t more, const CellPtr& newcomer, bool forced) {
    while (!fits(tier, more)) {
      // What cannot be erased is room that does not come, whatever else goes.
      if (tier == Tier::file) KVMELD_TRY(files_.erase_unused(used_[index(tier)]));
      if (fits(tier, more)) break;
      const CellPtr victim = worst(tier);
      if (victim == nullptr && tier == Tier::file && forced && !newcomer->pinned && under_way == 0) {
        tally.lost.fetch_add(1, std::memory_order_relaxed);  // the commit under way fills the file
        forget(newcomer);
      }
      if (victim == nullptr) return Move{};
      if (victim->copies() > 1) {
        drop(*victim, tier);
        tally.demoted.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      if (tier == Tier::file && !forced) return Move{};
      const std::uint64_t now = clock.load(std::memory_order_relaxed);
      const bool refused = tier == Tier::file && !newcomer->pinned && newcomer->burden(now) > victim->burden(now);
      if (tier == Tier::file || (tier == Tier::host && victim->bytes() > budget[index(Tier::file)])) {
        tally.lost.fetch_add(1, std::memory_order_relaxed);
        forget(refused ? newcomer : victim);
        if (refused) return Move{};
        continue;
      }
      auto first = prepare(tier == Tier::host ? Kind::write : Kind::download, victim);
      if (!first || first->kind != Kind::none || !victim->dead) return first;
    }
    return Move{};
  }

  /// Carries out what `prepare` readied. Errors: those of the store and the device, nothing moved; `id_mismatch` or `not_found` for a
  /// damaged copy, which is dropped.
  Status run(std::unique_lock<std::mutex>& lock, const Move& move) {
    Cell& cell = *move.cell;
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
      if (destination(move.kind) == Tier::host) cell.last_used.store(clock.load());  // so that whoever asked finds it
      const bool down = move.kind == Kind::write || move.kind == Kind::download;
      (down ? tally.written : tally.promoted).fetch_add(1, std::memory_order_relaxed);
      tally.moved_bytes.fetch_add(cell.bytes(), std::memory_order_relaxed);
      return {};
    }
    if (move.kind == Kind::write) {
      files_.release(cell.key, used_[index(Tier::file)]);
    } else {
      give(destination(move.kind), move.reserved);
    }
    if (cell.dead) return {};
    const bool read = move.kind == Kind::read || move.kind == Kind::download;
    if (read && (is_damage(status.code()) || status.code() == ErrorCode::not_found)) {
      tally.damaged.fetch_add(1, std::memory_order_relaxed);
      if (move.kind == Kind::read) files_.erase_damaged(cell.key);
      drop(cell, move.kind == Kind::read ? Tier::file : Tier::device);
      if (cell.copies() == 0) forget(move.cell);
    }
    return status;
  }

  /// A payload that comes to host memory, for which `make_room` has made room.
  void add(const CellPtr& cell, const Fragment& whole) {
    take(Tier::host, cell->bytes());
    cell->change([&](auto& place) { place.host = whole; });
    cells.emplace(whole.id(), cell);
    directory.add(cell);
  }
  /// Takes a payload out of all tiers; who holds it keeps it.
  void forget(const CellPtr& given) {
    const CellPtr cell = given;  // the reference may be the map's
    cells.erase(cell->shell.id());
    directory.erase(cell->shell.id());
    cell->dead = true;
    for (const Tier tier : {Tier::device, Tier::host, Tier::file}) {
      if (cell->held[index(tier)]) drop(*cell, tier);
    }
  }

 private:
  [[nodiscard]] static constexpr std::size_t index(Tier tier) noexcept { return static_cast<std::size_t>(tier); }
  void take(Tier tier, std::size_t bytes) noexcept { used_[index(tier)].fetch_add(bytes, std::memory_order_relaxed); }
  void give(Tier tier, std::size_t bytes) noexcept { used_[index(tier)].fetch_sub(bytes, std::memory_order_relaxed); }

  /// What leaves a tier first, of a commit's own the last; null where all are moving, or have to stay for the commit.
  [[nodiscard]] CellPtr worst(Tier tier) const {
    const CellPtr* out = nullptr;
    std::tuple<int, std::pair<bool, double>> most;
    const std::uint64_t now = clock.load(std::memory_order_relaxed);
    for (const auto& [id, cell] : cells) {
      if (cell->moving || !cell->held[index(tier)]) continue;
      const bool spare = cell->copies() > 1;
      if (cell->pinned && (tier != Tier::host || (!spare && cell->bytes() > budget[index(Tier::file)]))) continue;
      const std::tuple order(!cell->pinned ? 2 : spare ? 1 : 0, cell->order(tier, now));
      if (out != nullptr && !(order > most)) continue;
      out = &cell;
      most = order;
    }
    return out == nullptr ? nullptr : *out;
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

  [[nodiscard]] Status copy(Kind kind, const Cell& cell, const typename Cell::Place& from, Fragment& host, std::optional<typename Device::handle>& handle) {
    const std::span<const std::byte> bytes = from.host.valid() ? std::span(from.host.payloads()[0].bytes.get(), cell.bytes()) : std::span<const std::byte>{};
    if (kind == Kind::write) return files_.put(cell.key, bytes);
    if (kind == Kind::upload) {
      auto up = device_.upload(bytes);
      if (up) handle = *std::move(up);
      return up.status();
    }
    // Into memory of our own: pages of a mapped file would be read when a blend wants them.
    const std::shared_ptr<std::byte[]> storage(new std::byte[(std::max)(cell.bytes(), std::size_t{1})]);
    if (kind == Kind::download) {
      KVMELD_TRY(device_.download(*from.device, {storage.get(), cell.bytes()}));
    } else {
      const auto blob = files_.get(cell.key);
      if (!blob) return blob.error();
      if (blob->size != cell.bytes()) {
        return error(ErrorCode::id_mismatch, "payload ", cell.shell.id().hex(), ": ", blob->size, " bytes came back of ", cell.bytes());
      }
      std::copy_n(blob->data.get(), blob->size, storage.get());
    }
    Fragment whole = with_bytes(cell.shell, storage);
    if (tier_key<Hash>(whole.payloads()[0]) != cell.key) {
      return error(ErrorCode::id_mismatch, "payload ", cell.shell.id().hex(), ": the ", cell.bytes(), " bytes that came back do not hash to its digest");
    }
    host = std::move(whole);
    return {};
  }

  TierFiles<Store> files_;
  Device device_;
  std::array<std::atomic<std::size_t>, tier_count> used_{};
};

}  // namespace detail
KVMELD_NAMESPACE_END
