#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/state/fragment_set.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

inline constexpr std::uint8_t set_version = 1;

/// Bytes of an id that say something: an XXH3-128 id ends in 15 zeros.
[[nodiscard]] constexpr std::size_t id_bytes(std::uint8_t tag) noexcept {
  return tag == Xxh3_128::tag ? 17 : 32;
}

inline void write_id(ByteWriter& w, std::uint8_t tag, const FragmentId& id) {
  w.bytes(std::as_bytes(std::span(id.bytes)).first(id_bytes(tag)));
}

[[nodiscard]] inline FragmentId read_id(ByteReader& r, std::uint8_t tag) {
  FragmentId id;
  const auto from = r.bytes(id_bytes(tag));
  if (!from.empty()) std::memcpy(id.bytes.data(), from.data(), from.size());
  return id;
}

/// The lives of agents that occur in a message, so that a dot takes an index and a sequence.
class Lines {
 public:
  void add(std::uint64_t agent, std::uint64_t epoch) { all_.emplace_back(agent, epoch); }
  void seal() {
    std::sort(all_.begin(), all_.end());
    all_.erase(std::unique(all_.begin(), all_.end()), all_.end());
  }
  void write(ByteWriter& w) const {
    w.varint(all_.size());
    for (const auto& [agent, epoch] : all_) {
      w.value(agent);
      w.value(epoch);
    }
  }
  void read(ByteReader& r) {
    for (std::size_t n = r.count(16); n > 0 && r.ok(); --n) {
      const auto agent = r.value<std::uint64_t>();
      all_.emplace_back(agent, r.value<std::uint64_t>());
    }
    if (!std::is_sorted(all_.begin(), all_.end())) r.fail(ErrorCode::corrupt);
  }
  void write_line(ByteWriter& w, std::uint64_t agent, std::uint64_t epoch) const {
    const auto at = std::lower_bound(all_.begin(), all_.end(), std::pair(agent, epoch));
    w.varint(static_cast<std::uint64_t>(at - all_.begin()));
  }
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> read_line(ByteReader& r) const {
    const std::uint64_t i = r.varint();
    if (r.ok() && i >= all_.size()) r.fail(ErrorCode::corrupt);
    return r.ok() ? all_[static_cast<std::size_t>(i)] : std::pair<std::uint64_t, std::uint64_t>{};
  }
  void write_dot(ByteWriter& w, const Provenance& dot) const {
    write_line(w, dot.agent, dot.epoch);
    w.varint(dot.sequence);
  }
  [[nodiscard]] Provenance read_dot(ByteReader& r) const {
    const auto [agent, epoch] = read_line(r);
    return {agent, r.varint(), epoch};
  }

 private:
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all_;
};

inline void add_lines(Lines& lines, const CausalContext& context) {
  for (const DotRange& range : context.ranges()) lines.add(range.agent, range.epoch);
}
inline void write_ranges(ByteWriter& w, const Lines& lines, const CausalContext& context) {
  w.varint(context.ranges().size());
  for (const DotRange& range : context.ranges()) {
    lines.write_line(w, range.agent, range.epoch);
    w.varint(range.first);
    w.varint(range.last - range.first);
  }
}
/// In memory they take eleven times their bytes, so that there are `max_ranges` at most, or none.
KVMELD_LAZY [[nodiscard]] CausalContext read_ranges(ByteReader& r, const Lines& lines,
                                                    std::size_t max_ranges) {
  CausalContext out;
  DotRange before;
  const std::size_t n = r.count(3);
  if (n > max_ranges) r.fail(ErrorCode::oversized);
  for (std::size_t i = 0; i < n && r.ok(); ++i) {
    const auto [agent, epoch] = lines.read_line(r);
    const std::uint64_t first = r.varint();
    const std::uint64_t more = r.varint();
    if (first > max_sequence || more > max_sequence - first) r.fail(ErrorCode::corrupt);
    const DotRange range{agent, epoch, first, first + more};
    if (i > 0 && (!before.before(range) || (before.same_line(range) && first <= before.last + 1)))
      r.fail(ErrorCode::corrupt);
    if (r.ok()) out.append(range);
    before = range;
  }
  return out;
}

enum MarkFlags : std::uint8_t {
  mark_confidence = 1,
  mark_superseded = 2,
  mark_time = 4,
  mark_known = 7
};

}  // namespace detail

/// Ranges of a context that a reader takes where nobody says otherwise: 32 MiB of memory.
inline constexpr std::size_t default_max_ranges = std::size_t{1} << 20;

/// Writes what has been seen: 16 bytes for each life of an agent, and some 3 for each range.
inline void write_context(ByteWriter& w, const CausalContext& context) {
  detail::Lines lines;
  detail::add_lines(lines, context);
  lines.seal();
  lines.write(w);
  detail::write_ranges(w, lines, context);
}
/// Fails with `oversized` for more than `max_ranges`.
[[nodiscard]] inline CausalContext read_context(ByteReader& r,
                                                std::size_t max_ranges = default_max_ranges) {
  detail::Lines lines;
  lines.read(r);
  return detail::read_ranges(r, lines, max_ranges);
}

/// The bytes of a set without its payloads: ids, marks, removals, and what was compacted away.
/// About 20 bytes an entry for XXH3 ids, the same bytes for the same set and log. O(n).
KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode_set(const FragmentSet& set) {
  const std::uint8_t tag = set.hash().tag;
  detail::Lines lines;
  for (const FragmentSet::Entry& entry : set.entries()) {
    for (const Mark& mark : entry.metadata.marks) lines.add(mark.dot.agent, mark.dot.epoch);
  }
  for (const Removal& removal : set.removals()) {
    lines.add(removal.dot.agent, removal.dot.epoch);
    for (const Provenance& dot : removal.removed) lines.add(dot.agent, dot.epoch);
  }
  detail::add_lines(lines, set.compacted());
  lines.seal();
  ByteWriter w;
  w.value(detail::set_version);
  w.value(tag);
  lines.write(w);
  w.varint(set.size());
  for (const FragmentSet::Entry& entry : set.entries()) {
    detail::write_id(w, tag, entry.id);
    w.varint(entry.metadata.marks.size() * 2 + (entry.metadata.unattributed ? 1U : 0U));
    for (const Mark& mark : entry.metadata.marks) {
      lines.write_dot(w, mark.dot);
      w.value(static_cast<std::uint8_t>((mark.confidence ? detail::mark_confidence : 0) |
                                        (mark.superseded_by.empty() ? 0 : detail::mark_superseded) |
                                        (mark.time_ms != 0 ? detail::mark_time : 0)));
      if (mark.confidence) w.value(*mark.confidence);
      if (!mark.superseded_by.empty()) detail::write_id(w, tag, mark.superseded_by);
      if (mark.time_ms != 0) w.value(mark.time_ms);
    }
  }
  w.varint(set.removals().size());
  for (const Removal& removal : set.removals()) {
    lines.write_dot(w, removal.dot);
    detail::write_id(w, tag, removal.id);
    w.varint(removal.removed.size());
    for (const Provenance& dot : removal.removed) lines.write_dot(w, dot);
  }
  detail::write_ranges(w, lines, set.compacted());
  return w.take();
}

/// A set from bytes that nobody vouches for. Fragments are known by id alone;
/// `FragmentSet::restore` adds them.
///
/// Errors: `version_mismatch`, `hash_mismatch` for ids of another hash than `hash`'s, `truncated`,
/// `oversized`, `corrupt`, `unknown_field`, and those of `FragmentSet::from_parts`. O(n log n),
/// memory within a small multiple of the bytes.
KVMELD_LAZY [[nodiscard]] Result<FragmentSet> decode_set(std::span<const std::byte> bytes,
                                                         const SetHash& hash = {}) {
  ByteReader r(bytes);
  const auto version = r.value<std::uint8_t>();
  const auto tag = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("set"));
  if (version != detail::set_version)
    return detail::error(ErrorCode::version_mismatch, "set of version ", version,
                         ", this build reads version ", detail::set_version);
  if (tag != hash.tag)
    return detail::error(ErrorCode::hash_mismatch, "set of hash tag ", tag, ", this replica's is ",
                         hash.tag);
  detail::Lines lines;
  lines.read(r);
  std::vector<FragmentSet::Entry> entries;
  const std::size_t count = r.count(detail::id_bytes(tag) + 1);
  entries.reserve(count);
  for (std::size_t i = 0; i < count && r.ok(); ++i) {
    FragmentSet::Entry entry{detail::read_id(r, tag), {}, {}};
    const std::uint64_t shape = r.varint();
    entry.metadata.unattributed = (shape & 1U) != 0;
    if (shape / 2 > r.remaining() / 3) r.fail(ErrorCode::truncated);
    for (std::uint64_t m = 0; m < shape / 2 && r.ok(); ++m) {
      Mark mark{lines.read_dot(r)};
      const auto flags = r.value<std::uint8_t>();
      if ((flags & ~unsigned{detail::mark_known}) != 0) r.fail(ErrorCode::unknown_field);
      if ((flags & detail::mark_confidence) != 0) mark.confidence = r.value<float>() + 0.0F;
      if ((flags & detail::mark_superseded) != 0) mark.superseded_by = detail::read_id(r, tag);
      if ((flags & detail::mark_time) != 0) mark.time_ms = r.value<std::int64_t>();
      entry.metadata.marks.push_back(mark);
    }
    entries.push_back(std::move(entry));
  }
  std::vector<Removal> removals;
  for (std::size_t n = r.count(detail::id_bytes(tag) + 3); n > 0 && r.ok(); --n) {
    Removal removal{lines.read_dot(r), detail::read_id(r, tag), {}};
    for (std::size_t d = r.count(2); d > 0 && r.ok(); --d)
      removal.removed.push_back(lines.read_dot(r));
    removals.push_back(std::move(removal));
  }
  const CausalContext compacted = detail::read_ranges(r, lines, default_max_ranges);
  KVMELD_TRY(r.finish("set"));
  return FragmentSet::from_parts(hash, std::move(entries), std::move(removals), compacted);
}

/// A set's bytes as a store keeps them: ending in a checksum, since a bit that rots would otherwise
/// make another set of them.
[[nodiscard]] inline std::vector<std::byte> encode_record(std::span<const std::byte> set) {
  const std::uint64_t sum = XXH3_64bits(set.data(), set.size());
  ByteWriter w;
  w.reserve(set.size() + sizeof sum);
  w.bytes(set);
  w.value(sum);
  return w.take();
}
/// The set in a store's record. Errors: `truncated`, `corrupt`, those of `decode_set`.
[[nodiscard]] inline Result<FragmentSet> decode_record(std::span<const std::byte> record,
                                                       const SetHash& hash = {}) {
  if (record.size() < sizeof(std::uint64_t))
    return detail::error(ErrorCode::truncated, "a record of ", record.size(), " bytes");
  const auto set = record.first(record.size() - sizeof(std::uint64_t));
  ByteReader r(record.last(sizeof(std::uint64_t)));
  if (r.value<std::uint64_t>() != XXH3_64bits(set.data(), set.size())) {
    return detail::error(ErrorCode::corrupt, "record: checksum of its ", record.size(),
                         " bytes differs");
  }
  return decode_set(set, hash);
}

KVMELD_NAMESPACE_END
