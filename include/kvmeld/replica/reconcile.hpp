#pragma once

/// Set reconciliation by sketches, and rendezvous hashing.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/detail/reconcile_session.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

/// Finds the entries in which two replicas differ, by messages whose bytes grow with the difference
/// and not with the sets.
///
/// One object on each side, no clock and no I/O: one side calls `start` and sends what it returns;
/// both feed what arrives to `receive` and send what that returns, until it says `done`. Both then
/// hold the same answer, each from its side.
///
/// Cost, both ways together, for sets to 100,000 ids: at most 1.3 × 32 bytes for each id that
/// differs, and 256 bytes more for the session. 32 of them are the id itself, sent once where one
/// side lacks it, and not at all where both hold it with different tags. The estimate behind it is
/// random: none of some 36,000 sessions measured cost more, but an unlucky salt could. Messages:
/// about 16 + 2 log2(1 + differing) at most, for each window of cells that
/// `ReconcileLimits::message_bytes` sets. Work: O(n) hashes and, where few of many differ, about 60
/// products in GF(2^32) for an item; memory: O(n) and the message.
///
/// How. Ids are hashed with the session's salt. Signs summed over all hashes estimate how many
/// differ (Alon, Matias, Szegedy 1996). The hashes are cut into cells of about 24 differences:
/// ranges as those of Meyer, Range-Based Set Reconciliation, 2023, but of hashes, so that it does
/// not matter how ids lie. Of each cell the side with fewer items sends count, 64-bit fingerprint
/// and a sketch: power sums of 32-bit hashes, 4 bytes for each difference (PinSketch; Dodis et al.
/// 2008). The other side adds its own, finds the polynomial whose roots are the differing hashes,
/// tries its own items on it, sends the ids of those that are roots and what is left of the
/// polynomial; the first side tries its items on that and sends their ids. Where too many differ,
/// more sums are sent, and the earlier ones stay. Where most items differ, 24-bit hashes are listed
/// instead. Fingerprints confirm each cell, then the whole; cells whose short hashes met are salted
/// anew. Then the same again over hashes of (id, tag) of the ids that both hold.
///
/// A message is a byte 0x10 + `detail::ReconcileKind`, the number of the message in the session as
/// varint, and what the kind holds. Nothing in it is believed before the fingerprints agree, so a
/// flipped bit ends in an error or in the right answer. A peer that lies about its set gets the
/// answer for that lie. It can make this side do about 1,000 products an item and open 65,536
/// cells, and can make it hold what it sends itself; the limits bound what it may announce. An
/// error ends the session.
///
/// Deterministic for the items and the salt. The salt should be hard to guess where others choose
/// the ids.
class Reconciliation {
 public:
  /// @param mine ascending by id, no id twice; must outlive the session.
  explicit Reconciliation(std::span<const ReconcileItem> mine, const ReconcileLimits& limits = {})
      : session_(mine, limits) {}

  /// The first message. Only one of the two sides calls it.
  ///
  /// Errors: `invalid_argument` for items that do not ascend or a session that has begun;
  /// `quota_exceeded` for too many items.
  [[nodiscard]] Result<std::vector<std::byte>> start(std::uint64_t salt) {
    if (!failure_.ok()) return failure_;
    if (step_ != 0)
      return fail(extend::error(ErrorCode::invalid_argument,
                                "the session has begun and is at step ", step_));
    extend::ByteWriter out;
    head(out);
    if (Status status = session_.start(salt, out); !status) return fail(std::move(status));
    starter_ = true;
    return finished(std::move(out), {});
  }

  /// What follows from a message of the peer.
  ///
  /// Over a transport that loses: the side that started sends its last message again when nothing
  /// comes, the other one does so only when it waits for the very last message. A message that came
  /// before changes nothing, and is answered as before by the side that did not start, and by the
  /// other one when it is done.
  ///
  /// Errors: `corrupt`, `truncated` or `oversized` for bytes that contradict themselves or the
  /// session, `version_mismatch`, `quota_exceeded` for a set above the limits, and those of
  /// `start`. `corrupt` also where short hashes met under each of six salts, which honest sets do
  /// not come to; another session takes another salt.
  [[nodiscard]] Result<ReconcileReply> receive(std::span<const std::byte> message) {
    if (!failure_.ok()) return failure_;
    extend::ByteReader in(message);
    const auto first = in.value<std::uint8_t>();
    const std::uint64_t step = in.varint();
    if (!in.ok()) return fail(in.status("reconciliation message"));
    if (first >> 4U != version) {
      return fail(extend::error(ErrorCode::version_mismatch, "reconciliation message of version ",
                                first >> 4U, ", this build reads ", version));
    }
    const bool theirs = (step % 2 == 1) == starter_;
    if (theirs && step < step_) return repeated(step, message);
    if (step != step_ || done()) {
      return fail(extend::error(ErrorCode::corrupt, "message ", step,
                                " of a reconciliation that is at ", step_));
    }
    ++step_;
    extend::ByteWriter out;
    head(out);
    if (Status status = session_.take(static_cast<detail::ReconcileKind>(first & 15U), in, out);
        !status)
      return fail(std::move(status));
    if (Status status = in.finish("reconciliation message"); !status)
      return fail(std::move(status));
    if (done()) result_ = session_.finish();
    ReconcileReply reply{.message = {}, .done = done()};
    if (session_.said() == detail::ReconcileKind::none) return reply;
    reply.message = finished(std::move(out), message);
    return reply;
  }

  [[nodiscard]] bool done() const noexcept { return session_.done() && failure_.ok(); }
  /// Complete once `done()`; empty before.
  [[nodiscard]] const ReconcileDifference& result() const noexcept { return result_; }

 private:
  static constexpr unsigned version = 1;

  [[nodiscard]] Status fail(Status status) {
    failure_ = std::move(status);
    return failure_;
  }
  void head(extend::ByteWriter& out) const {
    out.value(std::uint8_t{0});  // `finished` knows the kind
    out.varint(step_);
  }
  [[nodiscard]] std::vector<std::byte> finished(extend::ByteWriter&& out,
                                                std::span<const std::byte> answered) {
    ++step_;
    last_reply_ = out.take();
    last_reply_[0] =
        static_cast<std::byte>((version << 4U) | static_cast<unsigned>(session_.said()));
    last_received_ = XXH3_64bits(answered.data(), answered.size());
    return last_reply_;
  }
  [[nodiscard]] Result<ReconcileReply> repeated(std::uint64_t step,
                                                std::span<const std::byte> message) const {
    ReconcileReply reply{.message = {}, .done = done()};
    // else one message doubled would double all that follow
    const bool answers = !starter_ || done();
    if (answers && step + 2 == step_ &&
        last_received_ == XXH3_64bits(message.data(), message.size()))
      reply.message = last_reply_;
    return reply;
  }

  detail::ReconcileSession session_;
  bool starter_ = false;
  std::uint64_t step_ = 0;  // number of the next message, either side's
  Status failure_;
  ReconcileDifference result_;
  std::vector<std::byte> last_reply_;
  std::uint64_t last_received_ = 0;
};

/// A set as `Reconciliation` sees it: every id, and 64 bits of what its entry's digest covers.
/// O(n).
///
/// For sets whose contexts say nothing of each other, as sets of fragments without provenance.
/// Replicas compare contexts, which is cheaper.
[[nodiscard]] inline std::vector<ReconcileItem> reconcile_items(const FragmentSet& set) {
  std::vector<ReconcileItem> out;
  out.reserve(set.size());
  for (const FragmentSet::Entry& entry : set.entries()) {
    out.push_back({entry.id, extend::entry_digest(set.hash(), entry.id, entry.metadata).words[0]});
  }
  return out;
}

/// The entries of some ids as a set, to be joined where a reconciliation said that they lack; ids
/// that are not here are left out.
[[nodiscard]] inline Result<FragmentSet> part_of(const FragmentSet& set,
                                                 std::span<const FragmentId> ids) {
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentId& id : ids) {
    if (const FragmentSet::Entry* const entry = set.find(id)) entries.push_back(*entry);
  }
  return FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
}

namespace detail {

/// How strongly a key is drawn to a member: XXH3-64 of the key, seeded by the member.
[[nodiscard]] inline std::uint64_t rendezvous_weight(const FragmentId& key,
                                                     std::uint64_t member) noexcept {
  return XXH3_64bits_withSeed(key.bytes.data(), key.bytes.size(), extend::mix_bits(member));
}

}  // namespace detail

/// The members that a key is drawn to most, the strongest first: its owner, and who stands in where
/// the owner is missing.
///
/// Everybody who knows the same members names the same ones, without a word. A member that leaves
/// gives up its own keys and no other moves; one that joins takes 1/n of the keys, from all alike.
/// Equal weights: the smaller member first. O(n log most). Highest random weight: Thaler and
/// Ravishankar, Using name-based mappings to increase hit rates, 1998.
[[nodiscard]] inline std::vector<std::uint64_t> rendezvous_rank(
    const FragmentId& key, std::span<const std::uint64_t> members,
    std::size_t most = ~std::size_t{0}) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> weighed;  // (weight from the top, member)
  for (const std::uint64_t member : members)
    weighed.emplace_back(~detail::rendezvous_weight(key, member), member);
  most = (std::min)(most, weighed.size());
  std::partial_sort(weighed.begin(), weighed.begin() + static_cast<std::ptrdiff_t>(most),
                    weighed.end());
  std::vector<std::uint64_t> out;
  for (std::size_t i = 0; i < most; ++i) out.push_back(weighed[i].second);
  return out;
}

}  // namespace replica

KVMELD_NAMESPACE_END
