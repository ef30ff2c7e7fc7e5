#pragma once

/// The replicated directory of anchors, its records, lists and blobs.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/anchors/decision.hpp>
#include <kvmeld/anchors/signature.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// Who may tell each other of anchors: engines of one model, tokenizer, layout and tenant whose
/// bases stood behind one context and whose pools sign segments alike.
template <SignaturePolicy Signature>
[[nodiscard]] Digest128 anchor_namespace(const AnchorSpace& space, const Signature& signature) {
  Hasher hasher;
  hasher.text("kvmeld.anchor.namespace");
  hasher.text(space.model);
  hasher.text(space.tokenizer);
  hasher.value(space.layout.low);
  hasher.value(space.layout.high);
  hasher.text(space.tenant);
  hasher.bytes(std::as_bytes(std::span(space.base.prefix.bytes)));
  hasher.value(space.base.lead_in.low);
  hasher.value(space.base.lead_in.high);
  signature.digest(hasher);
  return hasher.digest();
}

/// The digest by which exact look-ups compare texts; zero for no tokens.
[[nodiscard]] inline Digest128 text_digest(std::span<const TokenId> tokens) {
  if (tokens.empty()) return {};
  Hasher hasher;
  hasher.text("kvmeld.anchor.text");
  hasher.values(tokens);
  return hasher.digest();
}

/// Of a segment's tokens; zero where ids do not tell what they are (latent, placeholders), which no
/// text equals.
[[nodiscard]] inline Digest128 text_digest(const Fragment& base) {
  return base.told_by_ids() ? text_digest(base.tokens()) : Digest128{};
}

/// What peers tell each other of an anchor in one context: whether it would serve, and where its
/// K/V is. No K/V.
struct AnchorRecord {
  FragmentId id{};  ///< `Anchor::id`
  /// Of its Δ, which names prefix, agent and slot (`place_digest`); zero: the base alone.
  Digest128 context{};
  Digest128 text{};             ///< `text_digest`
  std::uint64_t signature = 0;  ///< of the segment, by the namespace's policy
  std::int64_t tokens = 0;
  std::uint64_t bytes = 0;  ///< of K/V that a pull moves
  BlobKey payload{};        ///< of the blob that lists the K/V's chunks: it vouches for every byte
  std::uint64_t owner = 0;  ///< the member that wrote this version, and then held the bytes
  std::uint64_t version = 0;  ///< from 1; one more than the version that it replaces
  bool approximate = false;   ///< the K/V was blended itself: never an exact answer
  bool removed = false;  ///< a tombstone; it has id, context, owner and version, the rest is zero

  bool operator==(const AnchorRecord&) const = default;
};

inline constexpr std::uint64_t max_record_version = std::uint64_t{1} << 48U;
/// Of K/V that a record may name.
inline constexpr std::uint64_t max_anchor_bytes = std::uint64_t{1} << 48U;

/// What a directory keeps a record under: one for each anchor and context, so that offsets measured
/// by two members stand side by side.
[[nodiscard]] inline FragmentId record_key(const FragmentId& id, const Digest128& context) {
  Hasher hasher;
  hasher.text("kvmeld.anchor.record");
  hasher.bytes(std::as_bytes(std::span(id.bytes)));
  hasher.value(context.low);
  hasher.value(context.high);
  FragmentId key;
  key.bytes[0] = Xxh3_128::tag;
  const auto rest = hasher.hash().finish();
  std::copy(rest.begin(), rest.end(), key.bytes.begin() + 1);
  return key;
}
[[nodiscard]] inline FragmentId record_key(const AnchorRecord& record) {
  return record_key(record.id, record.context);
}

/// Two XXH3-128, with seeds 0 and 1, of all fields: what breaks ties of versions.
[[nodiscard]] inline Digest256 record_digest(const AnchorRecord& record) {
  Digest256 out;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    Hasher hasher{Xxh3_128(seed)};
    hasher.bytes(std::as_bytes(std::span(record.id.bytes)));
    hasher.bytes(std::as_bytes(std::span(record.payload.bytes)));
    for (const std::uint64_t field :
         {record.context.low, record.context.high, record.text.low, record.text.high,
          record.signature, static_cast<std::uint64_t>(record.tokens), record.bytes, record.owner,
          record.version, std::uint64_t{record.approximate}, std::uint64_t{record.removed}}) {
      hasher.value(field);
    }
    out.words[2 * seed] = hasher.digest().low;
    out.words[2 * seed + 1] = hasher.digest().high;
  }
  return out;
}

/// Whether a record's fields go together. Errors: `invalid_argument` with the field that does not.
[[nodiscard]] inline Status check_record(const AnchorRecord& record) {
  using extend::error;
  if (record.id.empty())
    return extend::error(ErrorCode::invalid_argument, "a record of an anchor without an id");
  if (record.version == 0 || record.version > max_record_version) {
    return extend::error(ErrorCode::invalid_argument, "record version ", record.version,
                         " is not in [1, ", max_record_version, "]");
  }
  if (record.removed) {
    AnchorRecord bare;
    bare.id = record.id, bare.context = record.context, bare.owner = record.owner,
    bare.version = record.version, bare.removed = true;
    if (!(record == bare))
      return extend::error(ErrorCode::invalid_argument, "a tombstone of ", record.bytes,
                           " bytes and ", record.tokens, " tokens; both must be 0");
    return {};
  }
  if (record.tokens < 1 || record.tokens > max_position)
    return extend::error(ErrorCode::invalid_argument, "a record of ", record.tokens, " tokens");
  if (record.bytes > max_anchor_bytes)
    return extend::error(ErrorCode::invalid_argument, "a record of ", record.bytes,
                         " bytes, above ", max_anchor_bytes);
  if (!record.payload.is_chunk())
    return extend::error(ErrorCode::invalid_argument, "a record whose payload key is of kind ",
                         record.payload.bytes[0], ", not a chunk's");
  return {};
}

/// What a look-up among the others' anchors asks.
struct DirectoryQuery {
  std::uint64_t signature = 0;
  double similarity = 0.85;  ///< τ
  std::int64_t tokens = 0;
  Digest128 context{};
  Consumer consumer = Consumer::takes_approximate;
  std::size_t most = 16;  ///< records to be given, nearest signatures first
};

/// Anchors that other members hold and this one does not: metadata only. Pull them, commit them,
/// and let the pool decide by exact distance.
struct RemoteAnchors {
  ReuseReason reason = ReuseReason::empty_pool;  ///< of the miss; `reuse` where there are records
  std::vector<AnchorRecord> records{};           ///< by (distance of signatures, id)

  [[nodiscard]] bool remote() const noexcept { return !records.empty(); }
};

/// All records that members know of: for each key the newest version, equal versions by digest. A
/// join-semilattice.
///
/// `join` takes maxima of a total order key by key, so it is commutative, associative and
/// idempotent, and loss, order and repetition of messages do not matter (last writer wins: Shapiro,
/// Preguiça, Baquero, Zawirski, Conflict-free replicated data types, 2011). A removal is a version
/// like any other. What a directory says is a hint: a pull verifies bytes, and finds out where
/// nobody has them.
class AnchorDirectory {
 public:
  struct Entry {
    AnchorRecord record;
    Digest256 digest;
  };

  /// @param max_records tombstones included; more are refused.
  explicit AnchorDirectory(std::size_t max_records = std::size_t{1} << 20U)
      : max_records_(max_records) {}

  /// Records that are not removed.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size() - removed_; }
  [[nodiscard]] std::size_t tombstones() const noexcept { return removed_; }
  /// Sum of the digests of the records that are not removed: two directories that say the same have
  /// the same.
  [[nodiscard]] const Digest256& digest() const noexcept { return digest_; }
  /// Ascending by key, tombstones included.
  [[nodiscard]] const std::map<FragmentId, Entry>& entries() const noexcept { return entries_; }
  /// The newest version under a key, tombstone or not; null: never heard of.
  [[nodiscard]] const AnchorRecord* newest(const FragmentId& key) const noexcept {
    const auto at = entries_.find(key);
    return at == entries_.end() ? nullptr : &at->second.record;
  }
  /// Null where it is removed, or was never heard of.
  [[nodiscard]] const AnchorRecord* find(const FragmentId& key) const noexcept {
    const AnchorRecord* const record = newest(key);
    return record == nullptr || record->removed ? nullptr : record;
  }

  /// Joins one record; true: it was news. O(log n). Errors, nothing changed: those of
  /// `check_record`; `quota_exceeded`.
  [[nodiscard]] Result<bool> join(const AnchorRecord& record) {
    KVMELD_TRY(check_record(record));
    const FragmentId key = record_key(record);
    Entry entry{record, record_digest(record)};
    const auto at = entries_.find(key);
    if (at != entries_.end() && !precedes(at->second, entry)) return false;
    if (at == entries_.end()) {
      if (entries_.size() >= max_records_) return full(1);
      if (record.removed)
        ++removed_;
      else
        digest_.add(entry.digest);
      entries_.emplace(key, std::move(entry));
      return true;
    }
    count_out(at->second);
    if (record.removed)
      ++removed_;
    else
      digest_.add(entry.digest);
    at->second = std::move(entry);
    return true;
  }
  /// Joins all that another one knows. O(n log n). Errors, nothing changed: `quota_exceeded`.
  Status join(const AnchorDirectory& other) {
    std::size_t fresh = 0;
    for (const auto& [key, entry] : other.entries_) fresh += entries_.count(key) == 0 ? 1U : 0U;
    if (fresh > max_records_ - (std::min)(max_records_, entries_.size())) return full(fresh);
    for (const auto& [key, entry] : other.entries_) KVMELD_TRY(join(entry.record).status());
    return {};
  }
  /// The record with the version that makes it the newest under its key. Errors: `quota_exceeded`
  /// behind the last version.
  [[nodiscard]] Result<AnchorRecord> next_version(AnchorRecord record) const {
    const AnchorRecord* const before = newest(record_key(record));
    record.version = before == nullptr ? 1 : before->version + 1;
    if (record.version > max_record_version)
      return extend::error(ErrorCode::quota_exceeded, "anchor ", record.id.hex(), " has had ",
                           max_record_version, " versions");
    return record;
  }
  /// Drops a tombstone, here only: not a join, and not needed for one. Peers that still have it
  /// bring it back with what it removed.
  void forget(const FragmentId& key) {
    const auto at = entries_.find(key);
    if (at == entries_.end() || !at->second.record.removed) return;
    --removed_;
    entries_.erase(at);
  }

  /// Records like a segment that hold a Δ for its context and are long enough; the answer always
  /// has a reason. O(n).
  [[nodiscard]] RemoteAnchors look_up(const DirectoryQuery& query) const {
    RemoteAnchors out;
    const int most = max_distance(query.similarity);
    if (query.tokens <= 0)
      out.reason = ReuseReason::empty_segment;
    else if (!(query.similarity >= 0 && query.similarity <= 1))
      out.reason = ReuseReason::invalid_rule;
    else if (query.consumer == Consumer::never_approximate)
      out.reason = ReuseReason::exact_required;
    if (out.reason != ReuseReason::empty_pool || size() == 0) return out;
    out.reason = ReuseReason::below_threshold;
    std::vector<std::pair<int, const AnchorRecord*>> found;
    for (const auto& [key, entry] : entries_) {
      const AnchorRecord& record = entry.record;
      const int distance = std::popcount(record.signature ^ query.signature);
      if (record.removed || distance > most) continue;
      const ReuseReason reason = record.tokens < query.tokens      ? ReuseReason::too_short
                                 : record.context != query.context ? ReuseReason::no_offset
                                                                   : ReuseReason::reuse;
      // The reason of the record that came furthest.
      if (out.reason == ReuseReason::below_threshold || reason == ReuseReason::reuse ||
          (out.reason == ReuseReason::too_short && reason == ReuseReason::no_offset)) {
        out.reason = reason;
      }
      if (reason == ReuseReason::reuse) found.emplace_back(distance, &record);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second->id < b.second->id;
    });
    for (std::size_t i = 0; i < (std::min)(found.size(), query.most); ++i)
      out.records.push_back(*found[i].second);
    return out;
  }
  /// The record of exactly this text (a segment with placeholders equals none: `find` its key) that
  /// holds a Δ for the context and was never approximate, or null. O(n).
  [[nodiscard]] const AnchorRecord* find_exact(std::span<const TokenId> tokens,
                                               const Digest128& context) const {
    const Digest128 text = text_digest(tokens);
    for (const auto& [key, entry] : entries_) {
      const AnchorRecord& record = entry.record;
      if (!record.removed && !record.approximate && record.context == context &&
          record.text == text && !tokens.empty())
        return &record;
    }
    return nullptr;
  }
  /// The records that are not removed as `Reconciliation` sees them. O(n).
  [[nodiscard]] std::vector<replica::ReconcileItem> reconcile_items() const {
    std::vector<replica::ReconcileItem> out;
    out.reserve(size());
    for (const auto& [key, entry] : entries_) {
      if (!entry.record.removed) out.push_back({key, entry.digest.words[0]});
    }
    return out;
  }

  /// Equal where all records are, tombstones included.
  bool operator==(const AnchorDirectory& other) const {
    return entries_.size() == other.entries_.size() &&
           std::equal(entries_.begin(), entries_.end(), other.entries_.begin(),
                      [](const auto& a, const auto& b) {
                        return a.first == b.first && a.second.record == b.second.record;
                      });
  }

 private:
  [[nodiscard]] static bool precedes(const Entry& a, const Entry& b) noexcept {
    return a.record.version != b.record.version ? a.record.version < b.record.version
                                                : a.digest < b.digest;
  }
  void count_out(const Entry& entry) noexcept {
    if (entry.record.removed)
      --removed_;
    else
      digest_.subtract(entry.digest);
  }
  [[nodiscard]] Status full(std::size_t more) const {
    return extend::error(ErrorCode::quota_exceeded, more, " records more than the ",
                         entries_.size(), " of a directory that takes ", max_records_);
  }

  std::size_t max_records_;
  std::map<FragmentId, Entry> entries_;
  std::size_t removed_ = 0;
  Digest256 digest_;
};

// Bytes of anchors and of what is said of them (docs/anchor_peers.md).

namespace detail {

inline constexpr std::uint8_t anchor_records_version = 1;
// 1 had no prefix of a part, 2 no placeholders
inline constexpr std::uint8_t anchor_list_version = 3;
inline constexpr std::uint32_t anchor_list_magic = 0x414D564BU;  // "KVMA"
inline constexpr std::size_t min_record_bytes = 32 + 16 + 8 + 1 + 1;
inline constexpr std::size_t max_record_bytes = 32 + 16 + 8 + 7 + 1 + 16 + 8 + 7 + 10 + 32;
inline constexpr std::size_t no_records_bytes = 1 + 16 + 1;
enum AnchorFlags : std::uint8_t { anchor_removed = 1, anchor_approximate = 2, anchor_known = 3 };

inline void write_digest(extend::ByteWriter& w, const Digest128& digest) {
  w.value(digest.low);
  w.value(digest.high);
}
[[nodiscard]] inline Digest128 read_digest(extend::ByteReader& r) {
  Digest128 out;
  out.low = r.value<std::uint64_t>();
  out.high = r.value<std::uint64_t>();
  return out;
}
template <class Key>
[[nodiscard]] Key read_name(extend::ByteReader& r) {
  Key key;
  if (const auto from = r.bytes(key.bytes.size()); !from.empty())
    std::memcpy(key.bytes.data(), from.data(), from.size());
  return key;
}

inline void write_record(extend::ByteWriter& w, const AnchorRecord& record) {
  w.bytes(std::as_bytes(std::span(record.id.bytes)));
  write_digest(w, record.context);
  w.value(record.owner);
  w.varint(record.version);
  w.value(static_cast<std::uint8_t>((record.removed ? anchor_removed : 0) |
                                    (record.approximate ? anchor_approximate : 0)));
  if (record.removed) return;
  write_digest(w, record.text);
  w.value(record.signature);
  w.varint(static_cast<std::uint64_t>(record.tokens));
  w.varint(record.bytes);
  w.bytes(std::as_bytes(std::span(record.payload.bytes)));
}
[[nodiscard]] inline AnchorRecord read_record(extend::ByteReader& r) {
  AnchorRecord record;
  record.id = read_name<FragmentId>(r);
  record.context = read_digest(r);
  record.owner = r.value<std::uint64_t>();
  record.version = r.varint();
  const auto flags = r.value<std::uint8_t>();
  if ((flags & ~unsigned{anchor_known}) != 0) r.fail(ErrorCode::unknown_field);
  record.removed = (flags & anchor_removed) != 0;
  record.approximate = (flags & anchor_approximate) != 0;
  if (record.removed || !r.ok()) return record;
  record.text = read_digest(r);
  record.signature = r.value<std::uint64_t>();
  const std::uint64_t tokens = r.varint();
  if (tokens > static_cast<std::uint64_t>(max_position)) r.fail(ErrorCode::corrupt);
  record.tokens = static_cast<std::int64_t>(r.ok() ? tokens : 0);
  record.bytes = r.varint();
  record.payload = read_name<BlobKey>(r);
  return record;
}

}  // namespace detail

/// The bytes of some records of one namespace: at most 137 for each, and 18 to 27 before them.
[[nodiscard]] inline std::vector<std::byte> encode_records(const Digest128& scope,
                                                           std::span<const AnchorRecord> records) {
  extend::ByteWriter w;
  w.value(detail::anchor_records_version);
  detail::write_digest(w, scope);
  w.varint(records.size());
  for (const AnchorRecord& record : records) detail::write_record(w, record);
  return w.take();
}

/// Records from bytes that nobody vouches for; each is sound by `check_record`. O(bytes), memory
/// within a small multiple of them.
///
/// Errors: `version_mismatch`, `geometry_mismatch` for another namespace, `truncated`, `oversized`,
/// `corrupt`, `unknown_field`, `invalid_argument`.
[[nodiscard]] inline Result<std::vector<AnchorRecord>> decode_records(
    std::span<const std::byte> bytes, const Digest128& scope) {
  extend::ByteReader r(bytes);
  const auto version = r.value<std::uint8_t>();
  const Digest128 theirs = detail::read_digest(r);
  KVMELD_TRY(r.status("anchor records"));
  if (version != detail::anchor_records_version) {
    return extend::error(ErrorCode::version_mismatch, "anchor records of version ", version,
                         "; this build reads version ", detail::anchor_records_version);
  }
  if (theirs != scope) {
    return extend::error(ErrorCode::geometry_mismatch, "anchor records of namespace ", theirs.hex(),
                         ", this member is in ", scope.hex(),
                         ": model, tokenizer, layout, tenant or signature policy differ");
  }
  const std::size_t count = r.count(detail::min_record_bytes);
  std::vector<AnchorRecord> out;
  out.reserve(count);
  for (std::size_t i = 0; i < count && r.ok(); ++i) {
    out.push_back(detail::read_record(r));
    if (r.ok()) KVMELD_TRY(check_record(out.back()));
  }
  KVMELD_TRY(r.finish("anchor records"));
  return out;
}

/// An anchor with the Δ of at most one context, its K/V named and not there: what a record's
/// `payload` blob holds.
struct AnchorList {
  Anchor anchor{};      ///< payload bytes null
  Digest128 context{};  ///< of the one Δ; zero: none
  std::size_t chunk_bytes = replica::default_chunk_bytes;
  /// (base, Δ of the segment, Δ of what follows) (chunks).
  std::vector<std::vector<BlobKey>> chunks{};

  /// Fragments that the anchor has, in the order of `chunks`.
  [[nodiscard]] std::vector<Fragment> parts() const {
    std::vector<Fragment> out{anchor.base};
    if (anchor.offsets.empty()) return out;
    out.push_back(anchor.offsets[0].segment);
    if (anchor.offsets[0].following.valid()) out.push_back(anchor.offsets[0].following);
    return out;
  }
  /// Of K/V.
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const Fragment& part : parts()) sum += part.payloads()[0].byte_count;
    return sum;
  }
};

namespace detail {

// Local K/V has no positions: all are 0. A payload's bytes name ascending ones, so 0, 1, 2, … stand
// for them.
inline void write_part(extend::ByteWriter& w, const Fragment& part,
                       std::span<const BlobKey> chunks) {
  w.bytes(std::as_bytes(std::span(part.id().bytes)));
  w.bytes(std::as_bytes(std::span(part.prefix().bytes)));
  w.varint(static_cast<std::uint64_t>(part.token_count()));
  w.values(part.tokens());
  Payload payload = part.payloads()[0];
  std::iota(payload.positions.begin(), payload.positions.end(), std::int64_t{0});
  replica::write_payload(w, payload, chunks);
}

[[nodiscard]] inline Result<Fragment> read_part(extend::ByteReader& r,
                                                const std::shared_ptr<const Geometry>& geometry,
                                                AnchorList& out,
                                                const replica::ManifestLimits& limits) {
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = geometry;
  body->id = read_name<FragmentId>(r);
  body->prefix = read_name<FragmentId>(r);
  const std::size_t tokens = r.count(1);  // positions take a byte each
  body->token_count = static_cast<std::int64_t>(tokens);
  body->tokens = r.values<TokenId>();
  KVMELD_TRY(r.status("anchor"));
  if (!body->tokens.empty() && body->tokens.size() != tokens) {
    return extend::error(ErrorCode::token_count_mismatch, "anchor: ", body->tokens.size(),
                         " token ids for ", tokens, " tokens");
  }
  Payload payload;
  const std::uint64_t declared = replica::read_payload(r, tokens, geometry->layers.size(), payload);
  KVMELD_TRY(r.status("anchor"));
  if (body->id.empty()) return extend::error(ErrorCode::corrupt, "anchor: a part without an id");
  if (!payload.positions.empty() && payload.positions.back() != body->token_count - 1) {
    return extend::error(ErrorCode::corrupt, "anchor: K/V at position ", payload.positions.back(),
                         "; what is in the local frame has none");
  }
  std::fill(payload.positions.begin(), payload.positions.end(), 0);
  KVMELD_TRY(replica::lay_out(*geometry, payload, limits.max_payload_bytes));
  if (declared != payload.byte_count) {
    return extend::error(ErrorCode::corrupt, "anchor: a part declares ", declared,
                         " bytes, its geometry and tokens take ", payload.byte_count);
  }
  const std::size_t count = replica::chunk_count(payload.byte_count, out.chunk_bytes);
  if (count > r.remaining() / sizeof(BlobKey)) r.fail(ErrorCode::truncated);
  std::vector<BlobKey> keys(r.ok() ? count : 0);
  for (BlobKey& key : keys) key = read_name<BlobKey>(r);
  KVMELD_TRY(r.status("anchor"));
  KVMELD_TRY(replica::check_repeats(keys, out.chunk_bytes, limits.max_repeated_bytes));
  out.chunks.push_back(std::move(keys));
  body->payloads.push_back(std::move(payload));
  return Fragment(std::move(body));
}

[[nodiscard]] inline Status read_anchor(extend::ByteReader& r, AnchorList& out,
                                        const replica::ManifestLimits& limits) {
  out.anchor.id = read_name<FragmentId>(r);
  out.context = read_digest(r);
  const auto geometry = std::make_shared<const Geometry>(extend::read_geometry(r));
  out.anchor.vector = r.values<float>();
  out.anchor.embedding = r.values<float>();
  const std::uint64_t chunk_bytes = r.varint();
  const auto parts = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("anchor"));
  KVMELD_TRY(validate(*geometry));
  if (chunk_bytes == 0 || chunk_bytes > replica::max_chunk_bytes) {
    return extend::error(ErrorCode::oversized, "anchor: chunks of ", chunk_bytes,
                         " bytes are not in [1, ", replica::max_chunk_bytes, "]");
  }
  const bool has_offset = out.context != Digest128{};
  if (parts < 1 || parts > 3 || (parts > 1) != has_offset || out.anchor.id.empty()) {
    return extend::error(ErrorCode::corrupt, "anchor: ", parts, " parts ",
                         has_offset ? "with" : "without", " a context");
  }
  out.chunk_bytes = static_cast<std::size_t>(chunk_bytes);
  ContextOffset offset{out.context, {}, {}};
  for (Fragment* part : {&out.anchor.base, &offset.segment, &offset.following}) {
    if (out.chunks.size() == parts) break;
    auto read = read_part(r, geometry, out, limits);
    if (!read) return read.error();
    *part = *std::move(read);
  }
  KVMELD_TRY(r.finish("anchor"));
  if (out.anchor.base.token_count() == 0)
    return extend::error(ErrorCode::corrupt, "anchor: a base of 0 tokens");
  return has_offset ? add_offset(out.anchor, std::move(offset)).status() : Status();
}

}  // namespace detail

/// The bytes of a list. O(tokens + layers + chunks).
[[nodiscard]] inline std::vector<std::byte> encode_anchor_list(const AnchorList& list) {
  extend::ByteWriter w;
  w.value(detail::anchor_list_magic);
  w.value(detail::anchor_list_version);
  w.value(static_cast<std::uint8_t>(list.anchor.approximate ? detail::anchor_approximate : 0));
  w.bytes(std::as_bytes(std::span(list.anchor.id.bytes)));
  detail::write_digest(w, list.context);
  extend::write_geometry(w, list.anchor.base.geometry());
  w.values(std::span<const float>(list.anchor.vector));
  w.values(std::span<const float>(list.anchor.embedding));
  w.varint(list.chunk_bytes);
  const std::vector<Fragment> parts = list.parts();
  w.value(static_cast<std::uint8_t>(parts.size()));
  for (std::size_t p = 0; p < parts.size(); ++p) detail::write_part(w, parts[p], list.chunks[p]);
  return w.take();
}

/// A list from bytes that nobody vouches for. Where planes lie is worked out, never read.
///
/// O(bytes). Errors: `truncated`, `oversized` (also for parts above the limits), `corrupt`,
/// `unknown_field`, `version_mismatch`, `token_count_mismatch`, those of `validate` and
/// `add_offset`.
[[nodiscard]] inline Result<AnchorList> decode_anchor_list(
    std::span<const std::byte> bytes,
    const replica::ManifestLimits& limits = {.max_payload_bytes = std::uint64_t{1} << 34U}) {
  using extend::error;
  extend::ByteReader r(bytes);
  const auto magic = r.value<std::uint32_t>();
  const auto version = r.value<std::uint8_t>();
  const auto flags = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("anchor"));
  if (magic != detail::anchor_list_magic)
    return extend::error(ErrorCode::corrupt, "anchor: starts with ", magic, ", not with KVMA");
  if (version != detail::anchor_list_version)
    return extend::error(ErrorCode::version_mismatch, "anchor of version ", version,
                         "; this build reads version ", detail::anchor_list_version);
  if ((flags & ~unsigned{detail::anchor_approximate}) != 0)
    return extend::error(ErrorCode::unknown_field, "anchor: flags ", flags,
                         " are unknown to this build");
  AnchorList out;
  out.anchor.approximate = flags != 0;
  KVMELD_TRY(detail::read_anchor(r, out, limits));
  return out;
}

/// An anchor in a store: the blob that lists its chunks, and all blobs, that one first.
struct StoredAnchor {
  BlobKey payload{};
  std::vector<BlobKey> blobs{};
  std::uint64_t bytes = 0;  ///< of K/V
};

namespace detail {

/// Which blobs hold an anchor with the Δ of one context, none of which is written.
[[nodiscard]] inline Result<AnchorList> list_anchor(const Anchor& anchor, const Digest128& context,
                                                    const replica::FragmentFormat& format) {
  AnchorList out;
  out.anchor =
      Anchor{anchor.id, anchor.base, anchor.vector, anchor.embedding, {}, anchor.approximate};
  out.context = context;
  out.chunk_bytes = format.chunk_bytes;
  if (!anchor.base.valid() || anchor.id.empty() || anchor.base.token_count() == 0) {
    return extend::error(ErrorCode::invalid_argument,
                         "an anchor needs an id and a base of at least 1 token");
  }
  if (format.chunk_bytes == 0 || format.chunk_bytes > replica::max_chunk_bytes) {
    return extend::error(ErrorCode::invalid_argument, "chunks of ", format.chunk_bytes,
                         " bytes are not in [1, ", replica::max_chunk_bytes, "]");
  }
  if (context != Digest128{}) {
    const ContextOffset* const offset = anchor.find(context);
    if (offset == nullptr)
      return extend::error(ErrorCode::not_found, "anchor ", anchor.id.hex(),
                           " holds no offset for context ", context.hex());
    const auto added = add_offset(out.anchor, *offset);
    if (!added) return added.error();
  }
  for (const Fragment& part : out.parts()) {
    const Payload& payload = part.payloads()[0];
    if (payload.bytes == nullptr)
      return extend::error(ErrorCode::payload_missing, "evicted payload: ", part.id().hex());
    if (!is_unrotated(part))
      return extend::error(
          ErrorCode::invalid_argument, "K/V of ", part.id().hex(),
          " is not in the local frame; make_anchor and measure_offset bring it there");
    std::vector<BlobKey>& keys = out.chunks.emplace_back();
    for (std::size_t c = 0, n = replica::chunk_count(payload.byte_count, out.chunk_bytes); c < n;
         ++c)
      keys.push_back(
          replica::chunk_key(replica::raw_chunk(payload, c, out.chunk_bytes), format.hash));
  }
  return out;
}

/// Whether an error says that a blob is not there as its key names it, and not that nobody could
/// tell.
[[nodiscard]] constexpr bool is_lost(ErrorCode code) noexcept {
  return code == ErrorCode::not_found || replica::proves_damage(code);
}

/// The raw bytes of a blob, verified by its key; one that is wrong is erased.
[[nodiscard]] inline Result<std::vector<std::byte>> read_blob(
    replica::BlobStore& store, const BlobKey& key, const replica::FragmentFormat& format) {
  const auto stored = store.get(key);
  if (!stored) return stored.error();
  auto raw = replica::decode_chunk(stored->bytes(), key, replica::max_chunk_bytes,
                                   format.compressor.get(), format.hash);
  if (!raw && replica::proves_damage(raw.error().code())) (void)store.erase(key);
  return raw;
}

[[nodiscard]] inline StoredAnchor stored_anchor(const BlobKey& payload, const AnchorList& list) {
  StoredAnchor out{payload, {payload}, list.bytes()};
  for (const std::vector<BlobKey>& chunks : list.chunks)
    out.blobs.insert(out.blobs.end(), chunks.begin(), chunks.end());
  return out;
}

/// Reads a list, and checks that it is the one that a record speaks of.
[[nodiscard]] inline Result<AnchorList> list_of(const AnchorRecord& record,
                                                std::span<const std::byte> raw,
                                                const replica::FragmentFormat& format) {
  auto list = decode_anchor_list(raw, format.limits());
  if (!list) return list.error();
  const Anchor& anchor = list->anchor;
  if (anchor.id != record.id || list->context != record.context ||
      anchor.base.token_count() != record.tokens || anchor.approximate != record.approximate ||
      list->bytes() != record.bytes || text_digest(anchor.base) != record.text) {
    return extend::error(ErrorCode::id_mismatch, "the anchor of ", anchor.base.token_count(),
                         " tokens and ", list->bytes(), " bytes under ", record.payload.hex(),
                         " is not the one of ", record.tokens, " tokens and ", record.bytes,
                         " bytes that its record names");
  }
  return list;
}

}  // namespace detail

/// Puts an anchor with the Δ of one context (zero: its base alone) into a store, in chunks under
/// the hash of their bytes; what is there already, as the base of another context's record, is not
/// written again. O(bytes).
///
/// Errors: the store's; `not_found` for a context without Δ; `invalid_argument`, `payload_missing`.
/// What was put stays and harms nobody.
[[nodiscard]] inline Result<StoredAnchor> store_anchor(replica::BlobStore& store,
                                                       const Anchor& anchor,
                                                       const Digest128& context,
                                                       const replica::FragmentFormat& format) {
  const auto list = detail::list_anchor(anchor, context, format);
  if (!list) return list.error();
  const std::vector<std::byte> raw = encode_anchor_list(*list);
  if (raw.size() > replica::max_chunk_bytes)
    return extend::error(ErrorCode::oversized, "the list of an anchor's chunks takes ", raw.size(),
                         " bytes, above ", replica::max_chunk_bytes);
  StoredAnchor out = detail::stored_anchor(replica::chunk_key(raw, format.hash), *list);
  const std::vector<Fragment> parts = list->parts();
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const Payload& payload = parts[p].payloads()[0];
    for (std::size_t c = 0; c < list->chunks[p].size(); ++c) {
      const BlobKey& key = list->chunks[p][c];
      const auto there = store.contains(key);
      if (!there) return there.error();
      if (*there) continue;
      const auto stored = replica::encode_chunk(
          replica::raw_chunk(payload, c, list->chunk_bytes), format.compressor.get(),
          replica::chunk_form(parts[p].geometry(), payload, c, list->chunk_bytes));
      KVMELD_TRY(store.put(key, stored).status());
    }
  }
  // last: whoever finds it finds the rest
  KVMELD_TRY(store.put(out.payload, replica::encode_chunk(raw, format.compressor.get())).status());
  return out;
}

namespace detail {

/// The list that a record names, from a store. Errors: as `load_anchor`.
[[nodiscard]] inline Result<AnchorList> load_list(replica::BlobStore& store,
                                                  const AnchorRecord& record,
                                                  const replica::FragmentFormat& format) {
  const auto raw = read_blob(store, record.payload, format);
  if (!raw) return raw.error();
  return list_of(record, *raw, format);
}

/// The bytes of one part of a list, chunk by chunk. Room grows with the bytes that came: what a
/// list announces is not believed. A chunk that is wrong or not there is no reason to stop: all
/// that are wrong are found, and erased, at once. Errors: the first such chunk's; the store's,
/// behind which nothing more is looked at.
[[nodiscard]] inline Result<Fragment> load_part(replica::BlobStore& store, const Fragment& part,
                                                std::span<const BlobKey> chunks,
                                                std::size_t chunk_bytes,
                                                const replica::FragmentFormat& format) {
  auto body = std::make_shared<Fragment::Body>(*part.body());
  Payload& payload = body->payloads[0];
  std::size_t room = 1;
  std::shared_ptr<std::byte[]> bytes(new std::byte[room]);
  Status damage;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    const auto chunk = read_blob(store, chunks[c], format);
    if (!chunk && !is_lost(chunk.error().code())) return chunk.error();
    if (!chunk && damage.ok()) damage = chunk.error();
    if (!damage.ok()) continue;
    const std::size_t size = replica::chunk_size(payload.byte_count, c, chunk_bytes);
    if (chunk->size() != size)
      return extend::error(ErrorCode::corrupt, "a chunk of ", chunk->size(),
                           " bytes where its anchor has ", size);
    const std::size_t at = c * chunk_bytes;
    if (at + size > room) {
      room = (std::min)(payload.byte_count, (std::max)(replica::max_chunk_bytes, 2 * (at + size)));
      std::shared_ptr<std::byte[]> wider(new std::byte[room]);
      if (at > 0) std::memcpy(wider.get(), bytes.get(), at);
      bytes = std::move(wider);
    }
    std::memcpy(bytes.get() + at, chunk->data(), size);
  }
  if (!damage.ok()) return damage;
  payload.bytes = bytes;
  return Fragment(std::move(body));
}

[[nodiscard]] inline Result<Anchor> fill_list(replica::BlobStore& store, AnchorList list,
                                              const replica::FragmentFormat& format) {
  const std::vector<Fragment> parts = list.parts();
  std::vector<Fragment> whole;
  Status damage;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    auto part = load_part(store, parts[p], list.chunks[p], list.chunk_bytes, format);
    if (!part && !is_lost(part.error().code())) return part.error();
    if (part)
      whole.push_back(*std::move(part));
    else if (damage.ok())
      damage = part.error();
  }
  if (!damage.ok()) return damage;
  Anchor out = std::move(list.anchor);
  out.base = whole[0];
  if (whole.size() > 1) out.offsets[0].segment = whole[1];
  if (whole.size() > 2) out.offsets[0].following = whole[2];
  return out;
}

}  // namespace detail

/// The anchor that a record names, with the one Δ that it speaks of, every byte verified. O(bytes).
///
/// Errors: `not_found` where a blob is not there (a wrong one is erased and its error given), of
/// several the first; the store's; `id_mismatch` for another anchor.
[[nodiscard]] inline Result<Anchor> load_anchor(replica::BlobStore& store,
                                                const AnchorRecord& record,
                                                const replica::FragmentFormat& format) {
  auto list = detail::load_list(store, record, format);
  if (!list) return list.error();
  return detail::fill_list(store, *std::move(list), format);
}

}  // namespace anchors

KVMELD_NAMESPACE_END
