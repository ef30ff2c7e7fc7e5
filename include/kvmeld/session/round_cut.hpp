#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/session/transport.hpp>
#include <kvmeld/state/fragment_set.hpp>
#include <kvmeld/state/superseded.hpp>

KVMELD_NAMESPACE_BEGIN

/// Exactly what a round renders: fragments by id with the metadata that policies read, the set's digest, and the merger's.
///
/// A member renders a cut from its own payloads, however far its set has moved on meanwhile.
struct RoundCut {
  struct Item {
    FragmentId id;
    Metadata metadata;

    bool operator==(const Item&) const = default;
  };

  std::uint64_t session = 0;   ///< which members, in which run
  std::uint64_t round = 0;
  MemberId publisher = 0;
  Digest128 merger;
  Digest256 set;               ///< of the set that the items make
  std::vector<Item> items;     ///< ascending by id

  bool operator==(const RoundCut&) const = default;
};

/// Says that a member waits at the barrier of a round.
struct RoundReady {
  std::uint64_t session = 0;
  std::uint64_t round = 0;
  Digest128 merger;
  CausalContext context;       ///< what the member has seen: the publisher waits until it has seen that too

  bool operator==(const RoundReady&) const = default;
};

/// The fragments of a set that a render reads and whose bytes are here, as a set of their own. O(n).
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> renderable(const FragmentSet& set) {
  std::vector<FragmentSet::Entry> entries;
  for (const FragmentSet::Entry* entry : in_force(set)) {
    if (entry->complete()) entries.push_back(*entry);
  }
  return FragmentSet::from_parts(set.hash(), std::move(entries), {}, {});
}

/// Publishes everything that a set can render now. O(n).
KVMELD_LAZY [[nodiscard]] Result<RoundCut> make_cut(const FragmentSet& set, const Digest128& merger, std::uint64_t session, std::uint64_t round,
                                                    MemberId publisher) {
  const auto part = renderable(set);
  if (!part) return part.error();
  RoundCut cut{session, round, publisher, merger, part->digest(), {}};
  for (const FragmentSet::Entry& entry : part->entries()) cut.items.push_back({entry.id, entry.metadata});
  return cut;
}

/// What a cut says of the state: its operations, without payloads, to be joined by a member that had not heard of them.
///
/// Errors: those of `FragmentSet::from_parts`.
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> delta_of(const RoundCut& cut, const SetHash& hash) {
  std::vector<FragmentSet::Entry> entries;
  for (const RoundCut::Item& item : cut.items) entries.push_back({item.id, {}, item.metadata});
  return FragmentSet::from_parts(hash, std::move(entries), {}, {});
}

/// Ids of a cut whose bytes a set does not hold. O(n log n).
KVMELD_LAZY [[nodiscard]] std::vector<FragmentId> missing_of(const RoundCut& cut, const FragmentSet& here) {
  std::vector<FragmentId> out;
  for (const RoundCut::Item& item : cut.items) {
    if (!FragmentSet::Entry{item.id, here.payload(item.id), {}}.complete()) out.push_back(item.id);
  }
  return out;
}

/// The set that a cut names, with this set's payloads: what every member of the round renders. O(n log n).
///
/// Errors: `payload_missing` with the number of ids that are not here, `id_mismatch` where the items do not make the digest that the
/// cut states, those of `FragmentSet::from_parts`.
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> restrict_to(const RoundCut& cut, const FragmentSet& here) {
  std::vector<FragmentSet::Entry> entries;
  std::size_t missing = 0;
  for (const RoundCut::Item& item : cut.items) {
    FragmentSet::Entry entry{item.id, here.payload(item.id), item.metadata};
    if (!entry.complete()) ++missing;
    entries.push_back(std::move(entry));
  }
  if (missing > 0) {
    return detail::error(ErrorCode::payload_missing, missing, " of ", cut.items.size(), " fragments of round ", cut.round, " are not here yet");
  }
  auto set = FragmentSet::from_parts(here.hash(), std::move(entries), {}, {});
  if (set && set->digest() != cut.set) {
    return detail::error(ErrorCode::id_mismatch, "the ", cut.items.size(), " fragments of round ", cut.round, " make set ", set->digest().hex(), ", the cut says ",
                         cut.set.hex());
  }
  return set;
}

namespace detail {

inline void write_digest(ByteWriter& w, const Digest128& d) {
  w.value(d.low);
  w.value(d.high);
}
[[nodiscard]] inline Digest128 read_digest(ByteReader& r) {
  Digest128 d;
  d.low = r.value<std::uint64_t>();
  d.high = r.value<std::uint64_t>();
  return d;
}
[[nodiscard]] inline FragmentId read_id(ByteReader& r) {
  FragmentId id;
  if (const auto from = r.bytes(id.bytes.size()); !from.empty()) std::memcpy(id.bytes.data(), from.data(), from.size());
  return id;
}

}  // namespace detail

/// As it travels; about 60 bytes a fragment. Times, which are for display only, stay behind.
KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode(const RoundCut& cut) {
  ByteWriter w;
  w.value(cut.session);
  w.value(cut.round);
  w.value(cut.publisher);
  detail::write_digest(w, cut.merger);
  for (const std::uint64_t word : cut.set.words) w.value(word);
  w.varint(cut.items.size());
  for (const RoundCut::Item& item : cut.items) {
    w.bytes(std::as_bytes(std::span(item.id.bytes)));
    w.varint(2 * item.metadata.marks.size() + (item.metadata.unattributed ? 1 : 0));
    for (const Mark& mark : item.metadata.marks) {
      w.value(mark.dot.agent);
      w.value(mark.dot.epoch);
      w.varint(mark.dot.sequence);
      w.value(static_cast<std::uint8_t>((mark.confidence ? 1 : 0) + (mark.superseded_by.empty() ? 0 : 2)));
      if (mark.confidence) w.value(*mark.confidence);
      if (!mark.superseded_by.empty()) w.bytes(std::as_bytes(std::span(mark.superseded_by.bytes)));
    }
  }
  return w.take();
}

/// Reads a cut from bytes that nobody vouches for. O(bytes).
///
/// Errors: `truncated`, `oversized`, `corrupt` (items or marks out of order, unknown flags).
KVMELD_LAZY [[nodiscard]] Result<RoundCut> decode_cut(std::span<const std::byte> bytes) {
  ByteReader r(bytes);
  RoundCut cut;
  cut.session = r.value<std::uint64_t>();
  cut.round = r.value<std::uint64_t>();
  cut.publisher = r.value<std::uint64_t>();
  cut.merger = detail::read_digest(r);
  for (std::uint64_t& word : cut.set.words) word = r.value<std::uint64_t>();
  for (std::size_t n = r.count(33); r.ok() && n > 0; --n) {
    RoundCut::Item item;
    item.id = detail::read_id(r);
    if (!cut.items.empty() && !(cut.items.back().id < item.id)) r.fail(ErrorCode::corrupt);
    const std::uint64_t head = r.varint();
    if (head / 2 > r.remaining() / 18) r.fail(ErrorCode::truncated);
    item.metadata.unattributed = head % 2 != 0;
    for (std::uint64_t m = head / 2; r.ok() && m > 0; --m) {
      Mark mark;
      mark.dot.agent = r.value<std::uint64_t>();
      mark.dot.epoch = r.value<std::uint64_t>();
      mark.dot.sequence = r.varint();
      const auto flags = r.value<std::uint8_t>();
      if (flags > 3) r.fail(ErrorCode::corrupt);
      if ((flags & 1) != 0) mark.confidence = r.value<float>();
      if ((flags & 2) != 0) mark.superseded_by = detail::read_id(r);
      if (r.ok() && !item.metadata.marks.empty() && !(item.metadata.marks.back().dot < mark.dot)) r.fail(ErrorCode::corrupt);
      item.metadata.marks.push_back(mark);
    }
    cut.items.push_back(std::move(item));
  }
  KVMELD_TRY(r.finish("cut of a round"));
  return cut;
}

KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode(const RoundReady& ready) {
  ByteWriter w;
  w.value(ready.session);
  w.value(ready.round);
  detail::write_digest(w, ready.merger);
  w.varint(ready.context.ranges().size());
  for (const DotRange& range : ready.context.ranges()) {
    w.value(range.agent);
    w.value(range.epoch);
    w.varint(range.first);
    w.varint(range.last - range.first);
  }
  return w.take();
}

/// Errors: `truncated`, `oversized`, `corrupt` (ranges out of order or above the greatest sequence).
KVMELD_LAZY [[nodiscard]] Result<RoundReady> decode_ready(std::span<const std::byte> bytes) {
  ByteReader r(bytes);
  RoundReady ready;
  ready.session = r.value<std::uint64_t>();
  ready.round = r.value<std::uint64_t>();
  ready.merger = detail::read_digest(r);
  DotRange last;
  bool any = false;
  for (std::size_t n = r.count(18); r.ok() && n > 0; --n) {
    DotRange range;
    range.agent = r.value<std::uint64_t>();
    range.epoch = r.value<std::uint64_t>();
    range.first = r.varint();
    const std::uint64_t more = r.varint();
    if (range.first > max_sequence || more > max_sequence - range.first) r.fail(ErrorCode::corrupt);
    range.last = range.first + more;
    if (any && (range.same_line(last) ? range.first <= last.last + 1 : !last.before(range))) r.fail(ErrorCode::corrupt);
    if (!r.ok()) break;
    ready.context.append(range);
    last = range;
    any = true;
  }
  KVMELD_TRY(r.finish("ready of a round"));
  return ready;
}

KVMELD_NAMESPACE_END
