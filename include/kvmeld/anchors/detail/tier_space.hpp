#pragma once

/// Room, cells and files of the tiers.

#include <algorithm>
#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/anchors/detail/table.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// Where payloads lie, fastest first.
enum class Tier : std::uint8_t { device, host, file };
inline constexpr std::size_t tier_count = 3;

[[nodiscard]] constexpr std::string_view to_string(Tier tier) noexcept {
  constexpr std::array<std::string_view, tier_count> names = {"device", "host", "file"};
  const auto i = static_cast<std::size_t>(tier);
  return i < names.size() ? names[i] : "unknown";
}

/// Memory of an accelerator, as its owner gives it: the library copies through these two calls and
/// knows no runtime of its own.
///
/// Semantic requirements:
///  - a `handle` shares what it names: copies are cheap, and the memory goes with the last of them
///    (a shared_ptr with a deleter does);
///  - `upload` returns when the bytes are there and may be read on any stream; `host` may go then.
///    Errors: `store_full`, `engine_failure`;
///  - `download` fills all of `out`, which is as long as what was uploaded, and returns when it is
///    filled;
///  - both are called by whichever threads are in `AnchorTiers::step`, `commit` or `fetch`.
template <class D>
concept DeviceMemory = requires(D& device, std::span<const std::byte> host,
                                const typename D::handle& handle, std::span<std::byte> out) {
  requires std::copyable<typename D::handle>;
  { device.upload(host) } -> std::same_as<Result<typename D::handle>>;
  { device.download(handle, out) } -> std::same_as<Status>;
};

/// No accelerator: the device tier takes nothing.
struct NoDevice {
  using handle = std::shared_ptr<const void>;
  Result<handle> upload(std::span<const std::byte>) const {
    return extend::error(ErrorCode::unsupported, "these tiers have no device");
  }
  Status download(const handle&, std::span<std::byte>) const {
    return extend::error(ErrorCode::unsupported, "these tiers have no device");
  }
};

namespace detail {

/// Copies of one payload, as a reader sees them: one version.
template <class Handle>
struct TierPlace {
  Fragment host;  // with its bytes; not valid() where they are not in host memory
  std::optional<Handle> device;
  bool file = false;
};

/// What a payload's readers ask for, beyond what they got: bits.
enum TierWant : std::uint8_t { want_nothing = 0, want_host = 1, want_device = 2 };

template <class Handle>
struct TierCell {
  using Place = TierPlace<Handle>;
  TierCell(Fragment without_bytes, BlobKey name)
      : shell(std::move(without_bytes)), key(name), place(std::make_shared<const Place>()) {}

  const Fragment shell;  // all but the bytes
  const BlobKey key;     // of the bytes, from their digest
  std::atomic<std::uint64_t> last_used{0};
  std::atomic<std::uint64_t> uses{0};
  std::atomic<std::uint32_t> hits{0};  // since it came to where it is
  std::atomic<std::uint8_t> want{want_nothing};
  Published<Place> place;
  // The writers', under their mutex.
  std::array<bool, tier_count> held{};
  std::array<bool, tier_count> leaving{};  // of those: chosen to go for something that comes
  bool moving = false;   // somebody copies it without the mutex, or waits for whether it has to go
  bool spilled = false;  // by the commit under way, from host memory to the file
  bool dead = false;     // forgotten, perhaps while it moved
  bool pinned = false;   // of the commit under way: may go to the file, but not be lost

  [[nodiscard]] std::size_t bytes() const noexcept { return shell.payloads()[0].byte_count; }
  [[nodiscard]] bool stays(Tier tier) const noexcept {
    return held[static_cast<std::size_t>(tier)] && !leaving[static_cast<std::size_t>(tier)];
  }
  /// That stay.
  [[nodiscard]] int copies() const noexcept {
    return static_cast<int>(stays(Tier::device)) + static_cast<int>(stays(Tier::host)) +
           static_cast<int>(stays(Tier::file));
  }
  /// bytes · age / frequency.
  [[nodiscard]] double burden(std::uint64_t now) const noexcept {
    const std::uint64_t last = last_used.load(std::memory_order_relaxed);
    const auto age = static_cast<double>(now > last ? now - last : 0);
    return static_cast<double>(bytes()) * age /
           static_cast<double>(uses.load(std::memory_order_relaxed) + 1);
  }
  /// The greatest leaves a tier first: copies of what a faster tier has, then the greatest burden.
  [[nodiscard]] std::pair<bool, double> order(Tier tier, std::uint64_t now) const noexcept {
    return {
        (tier != Tier::device && stays(Tier::device)) || (tier == Tier::file && stays(Tier::host)),
        burden(now)};
  }
  /// Counts a use at a tick; hits since it came to where it is.
  std::uint32_t use(std::uint64_t tick) noexcept {
    uses.fetch_add(1, std::memory_order_relaxed);
    last_used.store(tick, std::memory_order_relaxed);
    return hits.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  template <class Change>
  void change(const Change& change_place) {
    Place next = *place.get();
    change_place(next);
    held = {next.device.has_value(), next.host.valid(), next.file};
    hits.store(0, std::memory_order_relaxed);
    place.set(std::make_shared<const Place>(std::move(next)));
  }
};

/// Cells by the id of their payload. A reader takes a version and never waits; one writer at a time
/// replaces one bucket of it.
template <class Cell>
class TierDirectory {
 public:
  TierDirectory() : root_(std::make_shared<const Root>()) {}

  [[nodiscard]] std::shared_ptr<Cell> find(const FragmentId& id) const noexcept {
    const auto root = root_.get();
    const auto& bucket = (*root)[place(id)];
    if (bucket == nullptr) return nullptr;
    for (const auto& [name, cell] : *bucket) {
      if (name == id) return cell;
    }
    return nullptr;
  }
  void add(std::shared_ptr<Cell> cell) {
    const FragmentId id = cell->shell.id();
    change(id, [&](Bucket& bucket) { bucket.emplace_back(id, std::move(cell)); });
  }
  void erase(const FragmentId& id) {
    change(id, [&](Bucket& bucket) {
      std::erase_if(bucket, [&](const auto& entry) { return entry.first == id; });
    });
  }

 private:
  using Bucket = std::vector<std::pair<FragmentId, std::shared_ptr<Cell>>>;
  using Root = std::array<std::shared_ptr<const Bucket>, 256>;
  // of a hash, any byte is as good
  [[nodiscard]] static std::size_t place(const FragmentId& id) noexcept { return id.bytes[8]; }
  template <class Change>
  void change(const FragmentId& id, const Change& change_bucket) {
    Root root = *root_.get();
    auto& at = root[place(id)];
    auto bucket = at == nullptr ? std::make_shared<Bucket>() : std::make_shared<Bucket>(*at);
    change_bucket(*bucket);
    at = std::move(bucket);
    root_.set(std::make_shared<const Root>(std::move(root)));
  }

  Published<Root> root_;
};

/// What happened to payloads, counted by writers.
struct TierTally {
  std::atomic<std::uint64_t> promoted{0}, demoted{0}, written{0}, lost{0}, damaged{0},
      moved_bytes{0};
};

/// Where a payload's bytes lie in a store: under their digest, as a sealed fragment's do.
[[nodiscard]] inline BlobKey tier_key(const Payload& payload, const SetHash& hash) {
  Payload named = payload;
  named.digest = extend::payload_digest(hash, payload);
  return replica::payload_key(named, hash);
}

/// The fragment with other bytes, or with none.
[[nodiscard]] inline Fragment with_bytes(const Fragment& fragment,
                                         std::shared_ptr<const std::byte[]> bytes) {
  auto body = std::make_shared<Fragment::Body>(*fragment.body());
  body->payloads[0].bytes = std::move(bytes);
  return Fragment(std::move(body));
}

/// The file tier: which payloads of a store are in use, and how many bytes they have. Payloads of
/// equal bytes share a file.
///
/// `put` and `get` may be called by several threads, all else by one at a time.
class TierFiles {
 public:
  explicit TierFiles(replica::BlobStore& store) : store_(&store), whole_(store.payloads()) {}

  [[nodiscard]] bool known(const BlobKey& key) const { return uses_.contains(key); }
  /// Whether somebody is writing it just now.
  [[nodiscard]] bool busy(const BlobKey& key) const {
    const auto at = uses_.find(key);
    return at != uses_.end() && !at->second.written;
  }
  void hold(const BlobKey& key, std::size_t bytes) {
    Use& use = uses_[key];
    use.bytes = bytes;
    if (use.references++ == 0 && use.written) --unused_;
  }
  /// A payload of these bytes is chosen to leave, or is not any more.
  void leave(const BlobKey& key, bool leaves) {
    std::size_t& leaving = uses_[key].leaving;
    leaving += leaves ? 1 : std::size_t{0} - 1;
  }
  /// Whether the bytes go with those that are chosen to leave.
  [[nodiscard]] bool all_leave(const BlobKey& key) const {
    const auto at = uses_.find(key);
    return at != uses_.end() && at->second.leaving == at->second.references;
  }
  /// That `put` returned: even after an error something may be there.
  void settled(const BlobKey& key) { uses_[key].written = true; }
  void release(const BlobKey& key, std::atomic<std::size_t>& used) {
    if (--uses_[key].references != 0) return;
    ++unused_;
    (void)erase_unused(used);  // else at the next call
  }
  /// Erases what no payload has any more; its bytes count until that is done. Errors: the store's.
  Status erase_unused(std::atomic<std::size_t>& used) {
    Status status;
    for (auto at = uses_.begin(); unused_ != 0 && at != uses_.end();) {
      if (at->second.references == 0) {
        if (Status erased = erase(at->first); erased.ok()) {
          used.fetch_sub(at->second.bytes, std::memory_order_relaxed);
          at = uses_.erase(at);
          --unused_;
          continue;
        } else {
          status = std::move(erased);
        }
      }
      ++at;
    }
    return status;
  }

  /// Takes damaged bytes away, so that right ones can come in their place.
  void erase_damaged(const BlobKey& key) { (void)erase(key); }

  [[nodiscard]] Status put(const BlobKey& key, std::span<const std::byte> bytes) {
    return whole_ != nullptr ? whole_->put_payload(key, bytes).status()
                             : store_->put(key, bytes).status();
  }
  [[nodiscard]] Result<Blob> get(const BlobKey& key) {
    return whole_ != nullptr ? whole_->map_payload(key) : store_->get(key);
  }

 private:
  struct Use {
    std::size_t references = 0;
    std::size_t leaving = 0;
    std::size_t bytes = 0;
    bool written = false;
  };
  [[nodiscard]] Status erase(const BlobKey& key) {
    return whole_ != nullptr ? whole_->erase_payload(key) : store_->erase(key);
  }

  replica::BlobStore* store_;
  replica::PayloadStore* whole_;  // the same store, where it keeps payloads in one piece
  std::map<BlobKey, Use> uses_;
  std::size_t unused_ = 0;
};

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
template <class Handle>
class TierSpace {
 public:
  using Cell = TierCell<Handle>;
  using CellPtr = std::shared_ptr<Cell>;
  using Drop = TierDrop<Cell>;
  using Room = TierRoom<Cell>;

  TierSpace(replica::BlobStore& store, const std::array<std::size_t, tier_count>& budgets)
      : budget(budgets), files_(store) {}

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

  TierFiles files_;
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

}  // namespace anchors

KVMELD_NAMESPACE_END
