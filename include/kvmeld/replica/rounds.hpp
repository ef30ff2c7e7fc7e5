#pragma once

/// Synchronous rounds: who is waited for, and the cut on which all agree.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

/// Exactly what a round renders: fragments by id with the metadata that policies read, and the
/// merger's digest.
///
/// A member renders a cut from its own payloads, however far its set has moved on meanwhile.
struct RoundCut {
  std::uint64_t session = 0;  ///< which members, in which run
  std::uint64_t round = 0;
  MemberId publisher = 0;
  Digest128 merger{};
  FragmentSet set{};  ///< what is rendered, and what that replaced: ids and marks alone

  bool operator==(const RoundCut&) const = default;
};

/// Says that a member waits at the barrier of a round.
struct RoundReady {
  std::uint64_t session = 0;
  std::uint64_t round = 0;
  Digest128 merger{};
  /// What the member has seen: the publisher waits until it has seen that too.
  CausalContext context{};

  bool operator==(const RoundReady&) const = default;
};

/// Everything that a set can render now, for publishing. O(n log n).
[[nodiscard]] inline Result<RoundCut> make_cut(const FragmentSet& set, const Digest128& merger,
                                               std::uint64_t session, std::uint64_t round,
                                               MemberId publisher) {
  const auto here = renderable(set);
  if (!here) return here.error();
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentSet::Entry& entry : here->entries()) {
    entries.push_back({entry.id, {}, entry.metadata});
    // for display, and not for everybody
    for (Mark& mark : entries.back().metadata.marks) mark.time_ms = 0;
  }
  auto part = FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
  if (!part) return part.error();
  return RoundCut{session, round, publisher, merger, *std::move(part)};
}

/// Ids that a cut renders and whose bytes a set does not hold. O(n log n).
[[nodiscard]] inline std::vector<FragmentId> missing_of(const RoundCut& cut,
                                                        const FragmentSet& here) {
  std::vector<FragmentId> out;
  for (const InForce& rendered : in_force(cut.set)) {
    const FragmentId& id = rendered.entry->id;
    if (!FragmentSet::Entry{id, here.payload(id), {}}.complete()) out.push_back(id);
  }
  return out;
}

/// The cut with this set's payloads: what every member of the round renders. O(n log n).
///
/// Errors: `payload_missing` with the number of fragments that are not here; `hash_mismatch`.
[[nodiscard]] inline Result<FragmentSet> restrict_to(const RoundCut& cut, const FragmentSet& here) {
  std::vector<FragmentSet::Entry> entries;
  const std::vector<InForce> rendered = in_force(cut.set);  // ascending, as the entries are
  auto next = rendered.begin();
  std::size_t missing = 0;
  for (const FragmentSet::Entry& entry : cut.set.entries()) {
    const bool read = next != rendered.end() && next->entry == &entry;
    entries.push_back({entry.id, read ? here.payload(entry.id) : Fragment(), entry.metadata});
    if (!read) continue;
    missing += entries.back().complete() ? 0U : 1U;
    ++next;
  }
  if (missing == 0) return FragmentSet::from_parts(here.hash(), std::move(entries), {}, {});
  return extend::error(ErrorCode::payload_missing, missing, " of ", rendered.size(),
                       " fragments of round ", cut.round, " are not here yet");
}

namespace detail {

inline void write_round(extend::ByteWriter& w, std::uint64_t session, std::uint64_t round,
                        const Digest128& merger) {
  w.value(session);
  w.value(round);
  w.value(merger.low);
  w.value(merger.high);
}
template <class Message>
void read_round(extend::ByteReader& r, Message& message) {
  message.session = r.value<std::uint64_t>();
  message.round = r.value<std::uint64_t>();
  message.merger.low = r.value<std::uint64_t>();
  message.merger.high = r.value<std::uint64_t>();
}

}  // namespace detail

/// As it travels: the set as `encode_set` writes it, behind its digest.
[[nodiscard]] inline std::vector<std::byte> encode(const RoundCut& cut) {
  extend::ByteWriter w;
  detail::write_round(w, cut.session, cut.round, cut.merger);
  w.value(cut.publisher);
  for (const std::uint64_t word : cut.set.digest().words) w.value(word);
  w.bytes(encode_set(cut.set));
  return w.take();
}

/// Reads a cut from bytes that nobody vouches for. O(n log n).
///
/// Errors: `truncated`, those of `decode_set`; `id_mismatch` where the set is not the one that the
/// digest names; `corrupt` where it holds more than fragments.
[[nodiscard]] inline Result<RoundCut> decode_cut(std::span<const std::byte> bytes,
                                                 const SetHash& hash = {}) {
  extend::ByteReader r(bytes);
  RoundCut cut;
  detail::read_round(r, cut);
  cut.publisher = r.value<std::uint64_t>();
  Digest256 digest;
  for (std::uint64_t& word : digest.words) word = r.value<std::uint64_t>();
  const auto rest = r.bytes(r.remaining());
  KVMELD_TRY(r.status("cut of a round"));
  auto set = decode_set(rest, hash);
  if (!set) return set.error();
  if (!set->removals().empty() || !set->compacted().empty())
    return extend::error(ErrorCode::corrupt, "cut of round ", cut.round, ": removals in a cut");
  if (set->digest() != digest) {
    return extend::error(ErrorCode::id_mismatch, "the ", set->size(), " fragments of round ",
                         cut.round, " make set ", set->digest().hex(), ", the cut says ",
                         digest.hex());
  }
  cut.set = *std::move(set);
  return cut;
}

[[nodiscard]] inline std::vector<std::byte> encode(const RoundReady& ready) {
  extend::ByteWriter w;
  detail::write_round(w, ready.session, ready.round, ready.merger);
  write_context(w, ready.context);
  return w.take();
}

/// Errors: `truncated`, `oversized`, `corrupt`.
[[nodiscard]] inline Result<RoundReady> decode_ready(std::span<const std::byte> bytes) {
  extend::ByteReader r(bytes);
  RoundReady ready;
  detail::read_round(r, ready);
  ready.context = read_context(r);
  KVMELD_TRY(r.finish("ready of a round"));
  return ready;
}

/// What the members of synchronous rounds agree on beforehand. Times are milliseconds after
/// `begin`.
struct RoundOptions {
  /// Chosen afresh for each run, equal on all members: rounds of another run are another's.
  std::uint64_t session = 0;
  std::vector<MemberId> members{};  ///< the same on all; round r is published by members[r mod n]
  /// Members, the publisher included, that must be ready at the soft deadline; 0: a majority.
  std::size_t quorum = 0;
  std::int64_t soft_ms = 1'000;  ///< until then the publisher waits for all members
  std::int64_t cut_ms = 2'000;   ///< a member that has seen no cut by then keeps its cache
  /// A member that could not fetch and render the cut by then keeps its cache.
  std::int64_t timeout_ms = 5'000;
  std::int64_t retry_ms = 100;  ///< how often a member repeats that it is ready
  /// Rounds that a message may be ahead of this member's; what says more is refused.
  std::uint64_t max_ahead = 1U << 20U;
  SetHash set_hash{};  ///< of the members' sets
};

/// Where a member stands in its round.
enum class RoundState : std::uint8_t {
  idle,     ///< no round was begun
  waiting,  ///< at the barrier
  cut,      ///< the cut is known: fetch what is missing, render, then `finish`
  swapped,  ///< ended with the cut's cache
  kept,     ///< ended with the old cache; `Round::status` says why
};

/// What members tell each other: that one is at the barrier, or the cut.
enum class RoundMessage : std::uint8_t { ready, cut };

/// The barrier of synchronous rounds, for one member: no clock, no I/O, one message in, messages
/// out. The caller's clock may be set back or ahead while a round goes on: deadlines count what has
/// passed.
///
/// One member publishes a round's cut, and which one is fixed, so that a round has one cut or none.
/// Whoever holds the cut gives it to members that still say they are ready: a publisher that dies
/// after any of its sends splits nobody into different caches. Before it sends, a publisher writes
/// the cut down where it finds it after a restart (`AgentSession` does, in its store).
class Round {
 public:
  struct Outgoing {
    MemberId to = everyone;
    RoundMessage kind = RoundMessage::ready;
    std::vector<std::byte> body{};
  };

  Round(MemberId self, RoundOptions options)
      : self_(self), options_(std::move(options)), clock_(options_.timeout_ms) {}

  /// Comes to the barrier of the next round: behind the last one here, or the newest one that
  /// anybody spoke of.
  ///
  /// Errors: `invalid_argument` while a round is in progress, behind the last number, where the
  /// options do not fit, and for a member that renders nothing.
  Status begin(std::int64_t now_ms, const MergerDigest& merger, CausalContext seen) {
    const auto& members = options_.members;
    if (state_ == RoundState::waiting || state_ == RoundState::cut) {
      return extend::error(ErrorCode::invalid_argument, "round ", round_, " has not ended");
    }
    if (std::find(members.begin(), members.end(), self_) == members.end()) {
      return extend::error(ErrorCode::invalid_argument, "member ", self_, " is not among the ",
                           members.size(), " of the session's rounds");
    }
    if (quorum() > members.size() || options_.soft_ms > options_.cut_ms ||
        options_.cut_ms > options_.timeout_ms || options_.retry_ms <= 0) {
      return extend::error(ErrorCode::invalid_argument, "rounds of ", members.size(),
                           " members, quorum ", quorum(), ", deadlines ", options_.soft_ms, ", ",
                           options_.cut_ms, " and ", options_.timeout_ms, " ms, repeated after ",
                           options_.retry_ms, " ms");
    }
    if (!merger.renders())
      return extend::error(ErrorCode::invalid_argument, "member ", self_,
                           " renders nothing: rounds are for members that do");
    if (round_ == ~std::uint64_t{0})
      return extend::error(ErrorCode::invalid_argument, "no round comes after ", round_);
    round_ = (std::max)(round_ + 1, newest_);
    newest_ = round_;
    state_ = RoundState::waiting;
    status_ = {};
    begun_ms_ = clock_.advance(now_ms);
    next_ready_ms_ = begun_ms_;
    merger_ = merger.digest();
    seen_ = std::move(seen);
    ready_.clear();
    if (later_ && later_->round <= round_) {
      cut_ = std::exchange(later_, std::nullopt);
      if (cut_->round == round_) adopt();
    }
    tick(now_ms);
    return {};
  }

  /// A message of another member. Messages of other sessions, or from outside the members, change
  /// nothing. Ends no round by its deadline: that is for `tick`.
  ///
  /// A cut of a later round is taken from its publisher only: whoever gives a cut on was asked for
  /// it, in that round. Errors: those of the decoders; `corrupt` for a second, different cut of one
  /// round, one by a member that does not publish it, and a round more than
  /// `RoundOptions::max_ahead` ahead: one such number would be the end of all rounds.
  Status receive(MemberId from, RoundMessage kind, std::span<const std::byte> body,
                 std::int64_t now_ms) {
    if (std::find(options_.members.begin(), options_.members.end(), from) ==
            options_.members.end() ||
        from == self_)
      return {};
    if (kind == RoundMessage::ready) {
      auto ready = decode_ready(body);
      if (!ready) return ready.error();
      if (ready->session != options_.session) return {};
      KVMELD_TRY(check_near(from, ready->round));
      on_ready(from, *std::move(ready), clock_.advance(now_ms));
    } else {
      auto cut = decode_cut(body, options_.set_hash);
      if (!cut) return cut.error();
      if (cut->session != options_.session) return {};
      KVMELD_TRY(check_near(from, cut->round));
      KVMELD_TRY(on_cut(from, *std::move(cut)));
    }
    return {};
  }

  /// Lets time pass: repeats that this member is ready, and ends the round at its deadlines.
  void tick(std::int64_t now_ms) {
    const std::int64_t now = clock_.advance(now_ms);
    const std::int64_t age = now - begun_ms_;
    if (state_ == RoundState::waiting && age >= options_.cut_ms) {
      // Members that merge otherwise are not waited for; where that leaves too few, it is the
      // reason.
      const bool mismatch = !mismatched_.empty() && ready_.size() + 1 < quorum();
      std::string why = "no cut after " + extend::decimal(age) +
                        " ms; ready: " + extend::decimal(ready_.size() + 1) + " of " +
                        extend::decimal(options_.members.size()) + " members, quorum " +
                        extend::decimal(quorum());
      if (mismatch) {
        why += "; " + extend::decimal(mismatched_.size()) + " merge otherwise, member " +
               extend::decimal(mismatched_.front()) + " among them";
      }
      keep(mismatch ? ErrorCode::merger_mismatch : ErrorCode::timed_out, why);
    }
    if (state_ == RoundState::cut && age >= options_.timeout_ms)
      keep(ErrorCode::timed_out, "the cut was not rendered after " + extend::decimal(age) + " ms");
    if (state_ != RoundState::waiting || now < next_ready_ms_) return;
    next_ready_ms_ = now + options_.retry_ms;
    out_.push_back({everyone, RoundMessage::ready,
                    encode(RoundReady{options_.session, round_, merger_, seen_})});
  }

  /// Whether this member is to publish now: all members are ready, its replica has `seen` what they
  /// have and is `complete` (no payload is missing), or the soft deadline has passed and a quorum
  /// is ready.
  [[nodiscard]] bool wants_cut(std::int64_t now_ms, const CausalContext& seen, bool complete) {
    const std::int64_t now = clock_.advance(now_ms);
    if (state_ != RoundState::waiting || publisher(round_) != self_) return false;
    if (now - begun_ms_ >= options_.soft_ms) return ready_.size() + 1 >= quorum();
    if (!complete || ready_.size() + 1 < options_.members.size()) return false;
    return std::all_of(ready_.begin(), ready_.end(),
                       [&](const auto& ready) { return leq(ready.second, seen); });
  }
  /// Publishes the cut that was written down. Errors: `invalid_argument` where it is not this
  /// round's, or not this member's to publish.
  Status publish(const RoundCut& cut) {
    if (state_ != RoundState::waiting || cut.round != round_ || cut.session != options_.session ||
        cut.publisher != self_ || publisher(round_) != self_) {
      return extend::error(ErrorCode::invalid_argument, "member ", self_,
                           " cannot publish a cut of round ", cut.round, " by ", cut.publisher,
                           " now");
    }
    cut_ = cut;
    adopt();
    out_.push_back({everyone, RoundMessage::cut, encode(cut)});
    return {};
  }
  /// The cut was rendered and swapped in, or could not be: ends the round. Does nothing where it
  /// has ended.
  void finish(const Status& status) {
    if (state_ != RoundState::cut) return;
    if (status) {
      state_ = RoundState::swapped;
    } else {
      keep(status.code(), status.message());
    }
  }

  /// Messages to send, in order; each once.
  [[nodiscard]] std::vector<Outgoing> take_messages() { return std::exchange(out_, {}); }

  [[nodiscard]] RoundState state() const noexcept { return state_; }
  /// Why a round ended with the old cache: `timed_out`, `merger_mismatch`, or what `finish` was
  /// told.
  [[nodiscard]] const Status& status() const noexcept { return status_; }
  [[nodiscard]] std::uint64_t number() const noexcept { return round_; }
  /// What to render; null unless the state is `cut` or `swapped`.
  [[nodiscard]] const RoundCut* cut() const noexcept {
    return state_ == RoundState::cut || state_ == RoundState::swapped ? &*cut_ : nullptr;
  }
  /// Who publishes a round.
  [[nodiscard]] MemberId publisher(std::uint64_t round) const noexcept {
    return options_.members[round % options_.members.size()];
  }
  [[nodiscard]] const RoundOptions& options() const noexcept { return options_; }
  /// How long ago this member came to the barrier, at the last call that told the time.
  [[nodiscard]] std::int64_t age_ms() const noexcept { return clock_.ms() - begun_ms_; }
  /// Members that render with another merger, as far as they have said; they are not waited for.
  [[nodiscard]] std::span<const MemberId> mismatched() const noexcept { return mismatched_; }
  /// Second, different cuts that were refused.
  [[nodiscard]] std::uint64_t conflicts() const noexcept { return conflicts_; }

 private:
  [[nodiscard]] std::size_t quorum() const noexcept {
    return options_.quorum == 0 ? options_.members.size() / 2 + 1 : options_.quorum;
  }

  /// When a member was answered last.
  struct Answered {
    MemberId member;
    std::optional<std::int64_t> cut_ms{};
    std::optional<std::int64_t> ready_ms{};
  };

  [[nodiscard]] Status check_near(MemberId from, std::uint64_t round) const {
    if (round <= round_ || round - round_ <= options_.max_ahead) return {};
    return extend::error(ErrorCode::corrupt, "member ", from, " speaks of round ", round,
                         ", and this one is at ", round_, "; at most ", options_.max_ahead,
                         " ahead");
  }
  /// Whether an answer is due: whoever asks more often than members repeat themselves is not
  /// answered each time, as answers are large.
  [[nodiscard]] bool due(MemberId member, std::optional<std::int64_t> Answered::*last,
                         std::int64_t now) {
    auto at = std::find_if(answered_.begin(), answered_.end(),
                           [&](const Answered& a) { return a.member == member; });
    if (at == answered_.end()) at = answered_.insert(at, Answered{member});
    std::optional<std::int64_t>& before = (*at).*last;
    // half: they do not arrive evenly
    if (before && now - *before < (options_.retry_ms + 1) / 2) return false;
    before = now;
    return true;
  }
  void on_ready(MemberId from, RoundReady ready, std::int64_t now) {
    newest_ = (std::max)(newest_, ready.round);
    for (const std::optional<RoundCut>* const held : {&cut_, &later_}) {
      if (!*held || (*held)->round != ready.round) continue;  // else it missed the cut
      if (due(from, &Answered::cut_ms, now))
        out_.push_back({from, RoundMessage::cut, encode(**held)});
      return;
    }
    if (state_ != RoundState::waiting || ready.round < round_) {
      // A straggler learns which round comes next from whoever is ahead.
      if (state_ == RoundState::waiting && due(from, &Answered::ready_ms, now)) {
        out_.push_back({from, RoundMessage::ready,
                        encode(RoundReady{options_.session, round_, merger_, seen_})});
      }
      return;
    }
    if (ready.round != round_) return;
    if (ready.merger != merger_) {
      if (std::find(mismatched_.begin(), mismatched_.end(), from) == mismatched_.end())
        mismatched_.push_back(from);
      if (publisher(round_) == from) keep(ErrorCode::merger_mismatch, mergers(ready.merger));
      return;
    }
    std::erase(mismatched_, from);
    const auto at =
        std::find_if(ready_.begin(), ready_.end(), [&](const auto& r) { return r.first == from; });
    if (at == ready_.end()) {
      ready_.emplace_back(from, std::move(ready.context));
    } else {
      at->second.join(ready.context);
    }
  }
  Status on_cut(MemberId from, RoundCut cut) {
    if (cut.publisher != publisher(cut.round)) {
      return extend::error(ErrorCode::corrupt, "a cut of round ", cut.round, " by member ",
                           cut.publisher, "; ", publisher(cut.round), " publishes it");
    }
    for (const std::optional<RoundCut>* const held : {&cut_, &later_}) {
      if (!*held || (*held)->round != cut.round) continue;
      if (**held == cut) return {};
      ++conflicts_;
      return extend::error(ErrorCode::corrupt, "round ", cut.round, " has a second cut, of set ",
                           cut.set.digest().hex(), "; the first one, of ",
                           (*held)->set.digest().hex(), ", stands");
    }
    if (cut.round == round_) {
      cut_ = std::move(cut);  // this member's own, too: published before it was restarted
      if (state_ == RoundState::waiting) adopt();
    } else if (cut.round > round_ && from == cut.publisher) {
      newest_ = (std::max)(newest_, cut.round);
      // for a round that begins later here, and for others that ask
      if (!later_ || later_->round < cut.round) later_ = std::move(cut);
    }
    return {};
  }
  /// Renders what `cut_` is now.
  void adopt() {
    if (cut_->merger != merger_) return keep(ErrorCode::merger_mismatch, mergers(cut_->merger));
    state_ = RoundState::cut;
  }
  void keep(ErrorCode code, const std::string& why) {
    state_ = RoundState::kept;
    status_ = extend::error(code, "round ", round_, " ends with the old cache: ", why);
  }
  [[nodiscard]] std::string mergers(const Digest128& other) const {
    return "member " + extend::decimal(publisher(round_)) + " merges by " + other.hex() +
           ", this one by " + merger_.hex();
  }

  MemberId self_;
  RoundOptions options_;
  RoundState state_ = RoundState::idle;
  Status status_;
  std::uint64_t round_ = 0;
  std::uint64_t newest_ = 0;
  Elapsed clock_;
  std::int64_t begun_ms_ = 0;  // by `clock_`, as all that follows
  std::int64_t next_ready_ms_ = 0;
  Digest128 merger_;
  CausalContext seen_;
  std::vector<std::pair<MemberId, CausalContext>> ready_;  // other members, this round
  // of this member's round, or else the last one before it that is known
  std::optional<RoundCut> cut_;
  std::optional<RoundCut> later_;  // of a round that has not begun here
  std::vector<Answered> answered_;
  std::vector<MemberId> mismatched_;
  std::uint64_t conflicts_ = 0;
  std::vector<Outgoing> out_;
};

}  // namespace replica

KVMELD_NAMESPACE_END
