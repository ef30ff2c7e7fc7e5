#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/chunk.hpp>
#include <kvmeld/codec/geometry_codec.hpp>
#include <kvmeld/codec/manifest.hpp>
#include <kvmeld/codec/payload_codec.hpp>
#include <kvmeld/codec/payload_layout.hpp>
#include <kvmeld/state/anchor_record.hpp>

/// Bytes of anchors and of what is said of them (docs/anchor_peers.md).

KVMELD_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::uint8_t anchor_records_version = 1;
// 1 had no prefix of a part, 2 no placeholders
inline constexpr std::uint8_t anchor_list_version = 3;
inline constexpr std::uint32_t anchor_list_magic = 0x414D564BU;  // "KVMA"
inline constexpr std::size_t min_record_bytes = 32 + 16 + 8 + 1 + 1;
inline constexpr std::size_t max_record_bytes = 32 + 16 + 8 + 7 + 1 + 16 + 8 + 7 + 10 + 32;
inline constexpr std::size_t no_records_bytes = 1 + 16 + 1;
enum AnchorFlags : std::uint8_t { anchor_removed = 1, anchor_approximate = 2, anchor_known = 3 };

inline void write_digest(ByteWriter& w, const Digest128& digest) {
  w.value(digest.low);
  w.value(digest.high);
}
[[nodiscard]] inline Digest128 read_digest(ByteReader& r) {
  Digest128 out;
  out.low = r.value<std::uint64_t>();
  out.high = r.value<std::uint64_t>();
  return out;
}
template <class Key>
[[nodiscard]] Key read_name(ByteReader& r) {
  Key key;
  if (const auto from = r.bytes(key.bytes.size()); !from.empty())
    std::memcpy(key.bytes.data(), from.data(), from.size());
  return key;
}

inline void write_record(ByteWriter& w, const AnchorRecord& record) {
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
[[nodiscard]] inline AnchorRecord read_record(ByteReader& r) {
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
KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode_records(
    const Digest128& name_space, std::span<const AnchorRecord> records) {
  ByteWriter w;
  w.value(detail::anchor_records_version);
  detail::write_digest(w, name_space);
  w.varint(records.size());
  for (const AnchorRecord& record : records) detail::write_record(w, record);
  return w.take();
}

/// Records from bytes that nobody vouches for; each is sound by `check_record`. O(bytes), memory
/// within a small multiple of them.
///
/// Errors: `version_mismatch`, `geometry_mismatch` for another namespace, `truncated`, `oversized`,
/// `corrupt`, `unknown_field`, `invalid_argument`.
KVMELD_LAZY [[nodiscard]] Result<std::vector<AnchorRecord>> decode_records(
    std::span<const std::byte> bytes, const Digest128& name_space) {
  ByteReader r(bytes);
  const auto version = r.value<std::uint8_t>();
  const Digest128 theirs = detail::read_digest(r);
  KVMELD_TRY(r.status("anchor records"));
  if (version != detail::anchor_records_version) {
    return detail::error(ErrorCode::version_mismatch, "anchor records of version ", version,
                         "; this build reads version ", detail::anchor_records_version);
  }
  if (theirs != name_space) {
    return detail::error(ErrorCode::geometry_mismatch, "anchor records of namespace ", theirs.hex(),
                         ", this member is in ", name_space.hex(),
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
  std::size_t chunk_bytes = default_chunk_bytes;
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
inline void write_part(ByteWriter& w, const Fragment& part, std::span<const BlobKey> chunks) {
  w.bytes(std::as_bytes(std::span(part.id().bytes)));
  w.bytes(std::as_bytes(std::span(part.prefix().bytes)));
  w.varint(static_cast<std::uint64_t>(part.token_count()));
  w.values(part.tokens());
  Payload payload = part.payloads()[0];
  std::iota(payload.positions.begin(), payload.positions.end(), std::int64_t{0});
  write_payload(w, payload, chunks);
}

KVMELD_LAZY [[nodiscard]] Result<Fragment> read_part(
    ByteReader& r, const std::shared_ptr<const Geometry>& geometry, AnchorList& out,
    const ManifestLimits& limits) {
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = geometry;
  body->id = read_name<FragmentId>(r);
  body->prefix = read_name<FragmentId>(r);
  const std::size_t tokens = r.count(1);  // positions take a byte each
  body->token_count = static_cast<std::int64_t>(tokens);
  body->tokens = r.values<TokenId>();
  KVMELD_TRY(r.status("anchor"));
  if (!body->tokens.empty() && body->tokens.size() != tokens) {
    return error(ErrorCode::token_count_mismatch, "anchor: ", body->tokens.size(),
                 " token ids for ", tokens, " tokens");
  }
  Payload payload;
  const std::uint64_t declared = read_payload(r, tokens, geometry->layers.size(), payload);
  KVMELD_TRY(r.status("anchor"));
  if (body->id.empty()) return error(ErrorCode::corrupt, "anchor: a part without an id");
  if (!payload.positions.empty() && payload.positions.back() != body->token_count - 1) {
    return error(ErrorCode::corrupt, "anchor: K/V at position ", payload.positions.back(),
                 "; what is in the local frame has none");
  }
  std::fill(payload.positions.begin(), payload.positions.end(), 0);
  KVMELD_TRY(lay_out(*geometry, payload, limits.max_payload_bytes));
  if (declared != payload.byte_count) {
    return error(ErrorCode::corrupt, "anchor: a part declares ", declared,
                 " bytes, its geometry and tokens take ", payload.byte_count);
  }
  const std::size_t count = chunk_count(payload.byte_count, out.chunk_bytes);
  if (count > r.remaining() / sizeof(BlobKey)) r.fail(ErrorCode::truncated);
  std::vector<BlobKey> keys(r.ok() ? count : 0);
  for (BlobKey& key : keys) key = read_name<BlobKey>(r);
  KVMELD_TRY(r.status("anchor"));
  KVMELD_TRY(check_repeats(keys, out.chunk_bytes, limits.max_repeated_bytes));
  out.chunks.push_back(std::move(keys));
  body->payloads.push_back(std::move(payload));
  return Fragment(std::move(body));
}

KVMELD_LAZY [[nodiscard]] Status read_anchor(ByteReader& r, AnchorList& out,
                                             const ManifestLimits& limits) {
  out.anchor.id = read_name<FragmentId>(r);
  out.context = read_digest(r);
  const auto geometry = std::make_shared<const Geometry>(read_geometry(r));
  out.anchor.vector = r.values<float>();
  out.anchor.embedding = r.values<float>();
  const std::uint64_t chunk_bytes = r.varint();
  const auto parts = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("anchor"));
  KVMELD_TRY(validate(*geometry));
  if (chunk_bytes == 0 || chunk_bytes > max_chunk_bytes) {
    return error(ErrorCode::oversized, "anchor: chunks of ", chunk_bytes, " bytes are not in [1, ",
                 max_chunk_bytes, "]");
  }
  const bool has_offset = out.context != Digest128{};
  if (parts < 1 || parts > 3 || (parts > 1) != has_offset || out.anchor.id.empty()) {
    return error(ErrorCode::corrupt, "anchor: ", parts, " parts ", has_offset ? "with" : "without",
                 " a context");
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
    return error(ErrorCode::corrupt, "anchor: a base of 0 tokens");
  return has_offset ? add_offset(out.anchor, std::move(offset)).status() : Status();
}

}  // namespace detail

/// The bytes of a list. O(tokens + layers + chunks).
KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode_anchor_list(const AnchorList& list) {
  ByteWriter w;
  w.value(detail::anchor_list_magic);
  w.value(detail::anchor_list_version);
  w.value(static_cast<std::uint8_t>(list.anchor.approximate ? detail::anchor_approximate : 0));
  w.bytes(std::as_bytes(std::span(list.anchor.id.bytes)));
  detail::write_digest(w, list.context);
  detail::write_geometry(w, list.anchor.base.geometry());
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
KVMELD_LAZY [[nodiscard]] Result<AnchorList> decode_anchor_list(
    std::span<const std::byte> bytes,
    const ManifestLimits& limits = {.max_payload_bytes = std::uint64_t{1} << 34U}) {
  using detail::error;
  ByteReader r(bytes);
  const auto magic = r.value<std::uint32_t>();
  const auto version = r.value<std::uint8_t>();
  const auto flags = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("anchor"));
  if (magic != detail::anchor_list_magic)
    return error(ErrorCode::corrupt, "anchor: starts with ", magic, ", not with KVMA");
  if (version != detail::anchor_list_version)
    return error(ErrorCode::version_mismatch, "anchor of version ", version,
                 "; this build reads version ", detail::anchor_list_version);
  if ((flags & ~unsigned{detail::anchor_approximate}) != 0)
    return error(ErrorCode::unknown_field, "anchor: flags ", flags, " are unknown to this build");
  AnchorList out;
  out.anchor.approximate = flags != 0;
  KVMELD_TRY(detail::read_anchor(r, out, limits));
  return out;
}

KVMELD_NAMESPACE_END
