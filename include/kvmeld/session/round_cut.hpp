#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/set_codec.hpp>
#include <kvmeld/session/transport.hpp>
#include <kvmeld/state/fragment_set.hpp>
#include <kvmeld/state/superseded.hpp>

KVMELD_NAMESPACE_BEGIN

/// Exactly what a round renders: fragments by id with the metadata that policies read, and the
/// merger's digest.
///
/// A member renders a cut from its own payloads, however far its set has moved on meanwhile.
struct RoundCut {
  std::uint64_t session = 0;  ///< which members, in which run
  std::uint64_t round = 0;
  MemberId publisher = 0;
  Digest128 merger{};
  FragmentSet set{};  ///< without payloads, removals and superseded fragments

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

/// The fragments of a set that a render reads and whose bytes are here, as a set of their own. O(n
/// log n).
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> renderable(const FragmentSet& set) {
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentSet::Entry* entry : in_force(set)) {
    if (entry->complete()) entries.push_back(*entry);
  }
  return FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
}

/// Everything that a set can render now, for publishing. O(n log n).
KVMELD_LAZY [[nodiscard]] Result<RoundCut> make_cut(const FragmentSet& set, const Digest128& merger,
                                                    std::uint64_t session, std::uint64_t round,
                                                    MemberId publisher) {
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentSet::Entry* entry : in_force(set)) {
    if (!entry->complete()) continue;
    entries.push_back({entry->id, {}, entry->metadata});
    // for display, and not for everybody
    for (Mark& mark : entries.back().metadata.marks) mark.time_ms = 0;
  }
  auto part = FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
  if (!part) return part.error();
  return RoundCut{session, round, publisher, merger, *std::move(part)};
}

/// Ids of a cut whose bytes a set does not hold. O(n log n).
KVMELD_LAZY [[nodiscard]] std::vector<FragmentId> missing_of(const RoundCut& cut,
                                                             const FragmentSet& here) {
  std::vector<FragmentId> out;
  for (const FragmentSet::Entry& entry : cut.set.entries()) {
    if (!FragmentSet::Entry{entry.id, here.payload(entry.id), {}}.complete())
      out.push_back(entry.id);
  }
  return out;
}

/// The cut with this set's payloads: what every member of the round renders. O(n log n).
///
/// Errors: `payload_missing` with the number of fragments that are not here; `hash_mismatch`.
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> restrict_to(const RoundCut& cut,
                                                          const FragmentSet& here) {
  std::vector<FragmentSet::Entry> entries;
  std::size_t missing = 0;
  for (const FragmentSet::Entry& entry : cut.set.entries()) {
    entries.push_back({entry.id, here.payload(entry.id), entry.metadata});
    missing += entries.back().complete() ? 0U : 1U;
  }
  if (missing == 0) return FragmentSet::from_parts(here.hash(), std::move(entries), {}, {});
  return detail::error(ErrorCode::payload_missing, missing, " of ", cut.set.size(),
                       " fragments of round ", cut.round, " are not here yet");
}

namespace detail {

inline void write_round(ByteWriter& w, std::uint64_t session, std::uint64_t round,
                        const Digest128& merger) {
  w.value(session);
  w.value(round);
  w.value(merger.low);
  w.value(merger.high);
}
template <class Message>
void read_round(ByteReader& r, Message& message) {
  message.session = r.value<std::uint64_t>();
  message.round = r.value<std::uint64_t>();
  message.merger.low = r.value<std::uint64_t>();
  message.merger.high = r.value<std::uint64_t>();
}

}  // namespace detail

/// As it travels: the set as `encode_set` writes it, behind its digest.
KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode(const RoundCut& cut) {
  ByteWriter w;
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
KVMELD_LAZY [[nodiscard]] Result<RoundCut> decode_cut(std::span<const std::byte> bytes,
                                                      const SetHash& hash = {}) {
  ByteReader r(bytes);
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
    return detail::error(ErrorCode::corrupt, "cut of round ", cut.round, ": removals in a cut");
  if (set->digest() != digest) {
    return detail::error(ErrorCode::id_mismatch, "the ", set->size(), " fragments of round ",
                         cut.round, " make set ", set->digest().hex(), ", the cut says ",
                         digest.hex());
  }
  cut.set = *std::move(set);
  return cut;
}

KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode(const RoundReady& ready) {
  ByteWriter w;
  detail::write_round(w, ready.session, ready.round, ready.merger);
  write_context(w, ready.context);
  return w.take();
}

/// Errors: `truncated`, `oversized`, `corrupt`.
KVMELD_LAZY [[nodiscard]] Result<RoundReady> decode_ready(std::span<const std::byte> bytes) {
  ByteReader r(bytes);
  RoundReady ready;
  detail::read_round(r, ready);
  ready.context = read_context(r);
  KVMELD_TRY(r.finish("ready of a round"));
  return ready;
}

KVMELD_NAMESPACE_END
