#pragma once

/// Anchors in tiers of memory: device, host, file.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchors/detail/tier_moves.hpp>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// Budgets of the tiers, exact after every call but for what the store would not erase, and when
/// payloads rise.
///
/// What leaves for something that comes leaves when that is there: until then both are, beyond the
/// budget by one payload, or by an anchor in its commit. The store needs room for that.
struct TierOptions {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = std::size_t{1} << 30;
  std::size_t file_bytes = 0;  ///< 0: what falls out of host memory is lost
  /// Asks for a payload that is not in host memory before `step` fetches it.
  std::uint32_t host_hits = 1;
  std::uint32_t device_hits = 4;  ///< uses in host memory before `step` uploads it
  /// `step` writes what falls next to the file until so much host memory is free or can be had at
  /// once.
  std::size_t ahead_bytes = 0;
  SetHash hash{};  ///< names the bytes in the store
};

/// What became of payloads so far.
struct TierCounts {
  std::uint64_t hits = 0;      ///< taken from where they were asked for
  std::uint64_t fetching = 0;  ///< misses: in a slower tier
  std::uint64_t gone = 0;      ///< misses: in no tier
  std::uint64_t promoted = 0;  ///< copies to a faster tier
  std::uint64_t written = 0;   ///< copies to a slower tier
  std::uint64_t demoted = 0;   ///< copies dropped for room, another left in some tier
  std::uint64_t lost = 0;      ///< payloads that fell out of the last tier
  std::uint64_t damaged = 0;   ///< copies that came back as other bytes, or not at all
  std::uint64_t moved_bytes = 0;
};

/// Whether a payload could be had at once.
enum class TierAnswer : std::uint8_t {
  here,
  being_fetched,  ///< in a slower tier: asked for, and here after some `step`; a miss until then
  gone,  ///< in no tier: it fell out of the last one, came back damaged, or was never committed
};

[[nodiscard]] constexpr std::string_view to_string(TierAnswer answer) noexcept {
  return answer == TierAnswer::here            ? "here"
         : answer == TierAnswer::being_fetched ? "being_fetched"
         : answer == TierAnswer::gone          ? "gone"
                                               : "unknown";
}

/// Offsets of a look-up's anchors, or why they cannot be had now.
struct TierOffsets {
  /// `gone` where one is or was never measured, else `being_fetched` where one is.
  TierAnswer answer = TierAnswer::here;
  /// (anchors) with their bytes; empty unless all are `here`.
  std::vector<ContextOffset> offsets{};
  /// To be erased from the pool and committed anew; not those that only have no Δ for the context:
  /// commit one.
  std::vector<FragmentId> gone_anchors{};
};

/// What one step did.
struct TierStep {
  bool moved = false;  ///< false: there was nothing to do, or others are doing it
  FragmentId payload{};
  Tier to = Tier::host;
  std::size_t bytes = 0;
};

/// Payloads of a pool's anchors in device memory, host memory and files, by how they are used; the
/// pool keeps signatures, vectors and shapes, and answers look-ups without them.
///
/// Every base and every Δ moves by itself. Copies rise by hits or when asked for, and leave a full
/// tier by bytes · age / frequency, those that a faster tier has as well before all others; age
/// counts uses of any payload. What has a copy elsewhere leaves as it is, what has none is copied
/// first; and nothing leaves, is copied or is lost for what cannot come. `take` never waits: what
/// is not in memory is a miss, and asked for; `step` copies, on any thread, on several if they
/// like. What somebody holds stays whole and no longer counts. Tokens and positions stay in memory
/// and do not count. The store is theirs alone: payloads lie in it under the digest of their bytes,
/// verified when they come back, and a later process does not find them. One `AnchorTiers` serves
/// one pool.
/// @tparam Device models `DeviceMemory`.
template <DeviceMemory Device = NoDevice>
class AnchorTiers {
  using Moves = detail::TierMoves<Device>;
  using Cell = typename Moves::Cell;
  using CellPtr = typename Moves::CellPtr;
  using Kind = typename Moves::Kind;

 public:
  /// @param store payloads lie in it in one piece, also where it is no `PayloadStore`. It must
  /// outlive the tiers.
  explicit AnchorTiers(replica::BlobStore& store, const TierOptions& options = {},
                       Device device = {})
      : options_(options),
        moves_(store, std::move(device),
               {options.device_bytes, options.host_bytes, options.file_bytes}, options.hash) {}

  [[nodiscard]] const TierOptions& options() const noexcept { return options_; }
  /// Bytes of payloads that a tier holds, with those on their way to it; while that is under way
  /// less what leaves for it.
  [[nodiscard]] std::size_t bytes(Tier tier) const noexcept { return moves_.used(tier); }
  [[nodiscard]] TierCounts counts() const noexcept {
    const detail::TierTally& t = moves_.tally;
    return {hits_.load(),      fetching_.load(), gone_.load(),
            t.promoted.load(), t.written.load(), t.demoted.load(),
            t.lost.load(),     t.damaged.load(), t.moved_bytes.load()};
  }

  /// Puts an anchor's payloads into host memory and the anchor without them into a pool; forgets
  /// those of anchors that the pool evicted.
  ///
  /// Waits for other commits, and for the store where host memory is full of what was written
  /// nowhere; `TierOptions::ahead_bytes` and `step` avoid that. O(bytes): they are hashed. Errors,
  /// the pool unchanged, no payload taken and none displaced: those of `AnchorPool::commit`;
  /// `store_full` for an anchor that neither host memory nor the file may hold; `payload_missing`
  /// for one without bytes; the store's.
  template <class Pool>
  [[nodiscard]] Result<CommitResult> commit(Pool& pool, const Anchor& anchor) {
    const std::lock_guard lock(commits_);
    detail::TierIntake<Moves> intake(moves_);
    const auto shell = detail::hold(intake, anchor);
    return finish(pool, shell ? pool.commit(*shell) : Result<CommitResult>(shell.error()), intake);
  }
  /// The same for another Δ of an anchor in the pool.
  template <class Pool>
  [[nodiscard]] Result<CommitResult> commit(Pool& pool, const FragmentId& id,
                                            const ContextOffset& offset) {
    const std::lock_guard lock(commits_);
    detail::TierIntake<Moves> intake(moves_);
    const auto shell = detail::hold(intake, offset);
    return finish(pool, shell ? pool.commit(id, *shell) : Result<CommitResult>(shell.error()),
                  intake);
  }

  /// A payload with its bytes in `out`, which else stays as it is. Never waits.
  [[nodiscard]] TierAnswer take(const Fragment& payload, Fragment& out) const {
    const CellPtr cell = find(payload);
    if (cell == nullptr) return count(TierAnswer::gone);
    const auto place = cell->place.get();
    const std::uint32_t hits = use(*cell);
    if (!place->host.valid()) {
      if (hits >= options_.host_hits) want(*cell, detail::want_host);
      return count(TierAnswer::being_fetched);
    }
    if (hits >= options_.device_hits && !place->device.has_value())
      want(*cell, detail::want_device);
    out = place->host;
    return count(TierAnswer::here);
  }
  /// The Δ of a context of all anchors of a look-up. Never waits; all that are not here are asked
  /// for.
  [[nodiscard]] TierOffsets take(std::span<const std::shared_ptr<const Anchor>> anchors,
                                 const Digest128& context) const {
    TierOffsets out;
    for (const auto& anchor : anchors) {
      ContextOffset whole;
      TierAnswer answer = TierAnswer::gone;
      if (const ContextOffset* const offset = anchor->find(context)) {
        whole.context = context;
        answer = take(offset->segment, whole.segment);
        if (offset->following.valid())
          answer = (std::max)(answer, take(offset->following, whole.following));
        if (answer == TierAnswer::gone) out.gone_anchors.push_back(anchor->id);
      }
      out.answer = (std::max)(out.answer, answer);
      out.offsets.push_back(std::move(whole));
    }
    if (out.answer != TierAnswer::here) out.offsets.clear();
    return out;
  }
  /// A payload's memory on the device in `out`, which else stays as it is. Never waits; what is not
  /// there is asked for.
  [[nodiscard]] TierAnswer take_device(const Fragment& payload,
                                       typename Device::handle& out) const {
    const CellPtr cell = find(payload);
    if (cell == nullptr || cell->bytes() > options_.device_bytes) return count(TierAnswer::gone);
    const auto place = cell->place.get();
    (void)use(*cell);
    if (!place->device.has_value()) {
      want(*cell, detail::want_device);
      return count(TierAnswer::being_fetched);
    }
    out = *place->device;
    return count(TierAnswer::here);
  }
  /// Asks for a context's Δ of matched anchors before somebody takes them. Never waits.
  void prefetch(std::span<const std::shared_ptr<const Anchor>> anchors, const Digest128& context,
                Tier to = Tier::host) const {
    for (const auto& anchor : anchors) {
      const ContextOffset* const offset = anchor->find(context);
      for (const Fragment* part : {offset == nullptr ? nullptr : &offset->segment,
                                   offset == nullptr ? nullptr : &offset->following}) {
        const CellPtr cell = part == nullptr ? nullptr : find(*part);
        if (cell != nullptr)
          want(*cell, to == Tier::device ? detail::want_device : detail::want_host);
      }
    }
  }

  /// Makes one move: for what is asked for most and can be moved, else of what falls next out of
  /// host memory, to the store. O(payloads + bytes moved); where there is no room for what is asked
  /// for most, O(payloads) for each size that was tried.
  ///
  /// Errors: the store's and the device's, nothing moved; who wants the payload asks again.
  /// `id_mismatch` or `not_found` for a copy that is damaged or was taken away: it is dropped, and
  /// where it was the only one the payload is gone.
  Result<TierStep> step() {
    std::unique_lock lock(moves_.mutex);
    std::vector<CellPtr> wanted;
    if (moves_.asked.exchange(false)) wanted = detail::most_wanted(moves_);
    if (!wanted.empty()) moves_.asked.store(true);  // there may be more
    std::array<std::size_t, 5> no_room;             // for so many bytes, by kind
    no_room.fill(~std::size_t{0});
    for (const CellPtr& cell : wanted) {
      const Kind kind = detail::next_move(moves_, *cell);
      // host memory on its way to the device
      const bool passes = kind != Kind::upload && (cell->want.load() & detail::want_host) == 0;
      std::size_t& least = no_room[static_cast<std::size_t>(passes ? Kind::none : kind)];
      if (cell->dead || cell->bytes() >= least) continue;
      if (passes && !moves_.may_upload(*cell)) {
        least = cell->bytes();
        continue;
      }
      auto move = moves_.prepare(kind, cell);
      if (move && move->kind == Kind::none) {
        if (!cell->dead) least = cell->bytes();
        continue;
      }
      auto done = carry_out(lock, std::move(move));
      if (!done) cell->want.store(detail::want_nothing);
      return done;
    }
    const CellPtr falling = detail::next_to_fall(moves_, options_.ahead_bytes);
    if (falling == nullptr) return TierStep{};
    return carry_out(lock, moves_.prepare(Kind::write, falling, false));
  }

  /// A payload with its bytes, for who would rather wait. Errors: `payload_missing` for one in no
  /// tier, those of `step`.
  [[nodiscard]] Result<Fragment> fetch(const Fragment& payload) {
    std::unique_lock lock(moves_.mutex);
    for (;;) {
      const CellPtr cell = find(payload);
      if (cell == nullptr) {
        return extend::error(ErrorCode::payload_missing, "payload ",
                             payload.valid() ? payload.id().hex() : "of an empty Fragment",
                             " is in no tier; measure it again");
      }
      const auto place = cell->place.get();
      if (place->host.valid()) {
        (void)use(*cell);
        return place->host;
      }
      auto move = moves_.prepare(place->device.has_value() ? Kind::download : Kind::read, cell);
      if (!move) return move.error();
      KVMELD_TRY(detail::run_or_wait(moves_, lock, *std::move(move)));
    }
  }

  /// Forgets payloads of anchors that a table does not have. O(payloads). `commit` does it where
  /// the pool evicted.
  void retain(const AnchorTable& table) {
    const std::lock_guard lock(commits_);
    detail::sweep(moves_, table);
  }

 private:
  [[nodiscard]] CellPtr find(const Fragment& payload) const noexcept {
    return payload.valid() ? moves_.directory.find(payload.id()) : nullptr;
  }
  TierAnswer count(TierAnswer answer) const noexcept {
    (answer == TierAnswer::here   ? hits_
     : answer == TierAnswer::gone ? gone_
                                  : fetching_)
        .fetch_add(1, std::memory_order_relaxed);
    return answer;
  }
  std::uint32_t use(Cell& cell) const noexcept {
    return cell.use(moves_.clock.fetch_add(1, std::memory_order_relaxed) + 1);
  }
  void want(Cell& cell, std::uint8_t what) const noexcept {
    if (what == detail::want_device && cell.bytes() > options_.device_bytes) return;
    cell.want.fetch_or(what);
    moves_.asked.store(true);
  }
  Result<TierStep> carry_out(std::unique_lock<std::mutex>& lock,
                             Result<typename Moves::Move> move) {
    if (!move) return move.error();
    if (move->kind == Kind::none) return TierStep{};
    const TierStep done{true, move->cell->shell.id(), Moves::destination(move->kind),
                        move->cell->bytes()};
    KVMELD_TRY(moves_.run(lock, *std::move(move)));
    return done;
  }
  template <class Pool>
  [[nodiscard]] Result<CommitResult> finish(Pool& pool, Result<CommitResult> done,
                                            detail::TierIntake<Moves>& intake) {
    if (!done) return done;
    if (pool.evictions() != evictions_ || *done != CommitResult::inserted) {
      evictions_ = pool.evictions();
      // first: what the pool let go of may be room enough
      detail::sweep(moves_, pool.snapshot()->table);
    }
    intake.keep();
    return done;
  }

  TierOptions options_;
  mutable Moves moves_;
  std::mutex commits_;
  std::uint64_t evictions_ = 0;  // of the pool, when payloads were last compared with it
  mutable std::atomic<std::uint64_t> hits_{0}, fetching_{0}, gone_{0};
};

}  // namespace anchors

KVMELD_NAMESPACE_END
