#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/fragment_io.hpp>
#include <kvmeld/transport/anchor_codec.hpp>

KVMELD_NAMESPACE_BEGIN

/// An anchor in a store: the blob that lists its chunks, and all blobs, that one first.
struct StoredAnchor {
  BlobKey payload{};
  std::vector<BlobKey> blobs{};
  std::uint64_t bytes = 0;  ///< of K/V
};

namespace detail {

/// Which blobs hold an anchor with the Δ of one context, none of which is written.
template <ContentHash Hash, Compressor C>
[[nodiscard]] Result<AnchorList> list_anchor(const Anchor& anchor, const Digest128& context,
                                             const FragmentFormat<Hash, C>& format) {
  AnchorList out;
  out.anchor =
      Anchor{anchor.id, anchor.base, anchor.vector, anchor.embedding, {}, anchor.approximate};
  out.context = context;
  out.chunk_bytes = format.chunk_bytes;
  if (!anchor.base.valid() || anchor.id.empty() || anchor.base.token_count() == 0) {
    return error(ErrorCode::invalid_argument,
                 "an anchor needs an id and a base of at least 1 token");
  }
  if (format.chunk_bytes == 0 || format.chunk_bytes > max_chunk_bytes) {
    return error(ErrorCode::invalid_argument, "chunks of ", format.chunk_bytes,
                 " bytes are not in [1, ", max_chunk_bytes, "]");
  }
  if (context != Digest128{}) {
    const ContextOffset* const offset = anchor.find(context);
    if (offset == nullptr)
      return error(ErrorCode::not_found, "anchor ", anchor.id.hex(),
                   " holds no offset for context ", context.hex());
    const auto added = add_offset(out.anchor, *offset);
    if (!added) return added.error();
  }
  for (const Fragment& part : out.parts()) {
    const Payload& payload = part.payloads()[0];
    if (payload.bytes == nullptr)
      return error(ErrorCode::payload_missing, "evicted payload: ", part.id().hex());
    if (!is_unrotated(part))
      return error(ErrorCode::invalid_argument, "K/V of ", part.id().hex(),
                   " is not in the local frame; make_anchor and measure_offset bring it there");
    std::vector<BlobKey>& keys = out.chunks.emplace_back();
    for (std::size_t c = 0, n = chunk_count(payload.byte_count, out.chunk_bytes); c < n; ++c)
      keys.push_back(chunk_key<Hash>(raw_chunk(payload, c, out.chunk_bytes)));
  }
  return out;
}

/// Whether an error says that a blob is not there as its key names it, and not that nobody could
/// tell.
[[nodiscard]] constexpr bool is_lost(ErrorCode code) noexcept {
  return code == ErrorCode::not_found || proves_damage(code);
}

/// The raw bytes of a blob, verified by its key; one that is wrong is erased.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<std::vector<std::byte>> read_blob(S& store, const BlobKey& key,
                                                       const FragmentFormat<Hash, C>& format) {
  const auto stored = store.get(key);
  if (!stored) return stored.error();
  auto raw = decode_chunk<Hash>(stored->bytes(), key, max_chunk_bytes, format.compressor);
  if (!raw && proves_damage(raw.error().code())) (void)store.erase(key);
  return raw;
}

[[nodiscard]] inline StoredAnchor stored_anchor(const BlobKey& payload, const AnchorList& list) {
  StoredAnchor out{payload, {payload}, list.bytes()};
  for (const std::vector<BlobKey>& chunks : list.chunks)
    out.blobs.insert(out.blobs.end(), chunks.begin(), chunks.end());
  return out;
}

/// Reads a list, and checks that it is the one that a record speaks of.
template <ContentHash Hash, Compressor C>
[[nodiscard]] Result<AnchorList> list_of(const AnchorRecord& record, std::span<const std::byte> raw,
                                         const FragmentFormat<Hash, C>& format) {
  auto list = decode_anchor_list(raw, format.limits());
  if (!list) return list.error();
  const Anchor& anchor = list->anchor;
  if (anchor.id != record.id || list->context != record.context ||
      anchor.base.token_count() != record.tokens || anchor.approximate != record.approximate ||
      list->bytes() != record.bytes || text_digest(anchor.base) != record.text) {
    return error(ErrorCode::id_mismatch, "the anchor of ", anchor.base.token_count(),
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
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<StoredAnchor> store_anchor(S& store, const Anchor& anchor,
                                                const Digest128& context,
                                                const FragmentFormat<Hash, C>& format) {
  const auto list = detail::list_anchor(anchor, context, format);
  if (!list) return list.error();
  const std::vector<std::byte> raw = encode_anchor_list(*list);
  if (raw.size() > max_chunk_bytes)
    return detail::error(ErrorCode::oversized, "the list of an anchor's chunks takes ", raw.size(),
                         " bytes, above ", max_chunk_bytes);
  StoredAnchor out = detail::stored_anchor(chunk_key<Hash>(raw), *list);
  const std::vector<Fragment> parts = list->parts();
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const Payload& payload = parts[p].payloads()[0];
    for (std::size_t c = 0; c < list->chunks[p].size(); ++c) {
      const BlobKey& key = list->chunks[p][c];
      const auto there = store.contains(key);
      if (!there) return there.error();
      if (*there) continue;
      const auto stored =
          encode_chunk(raw_chunk(payload, c, list->chunk_bytes), format.compressor,
                       chunk_form(parts[p].geometry(), payload, c, list->chunk_bytes));
      KVMELD_TRY(store.put(key, stored).status());
    }
  }
  // last: whoever finds it finds the rest
  KVMELD_TRY(store.put(out.payload, encode_chunk(raw, format.compressor)).status());
  return out;
}

namespace detail {

/// The list that a record names, from a store. Errors: as `load_anchor`.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<AnchorList> load_list(S& store, const AnchorRecord& record,
                                           const FragmentFormat<Hash, C>& format) {
  const auto raw = read_blob(store, record.payload, format);
  if (!raw) return raw.error();
  return list_of(record, *raw, format);
}

/// The bytes of one part of a list, chunk by chunk. Room grows with the bytes that came: what a
/// list announces is not believed. A chunk that is wrong or not there is no reason to stop: all
/// that are wrong are found, and erased, at once. Errors: the first such chunk's; the store's,
/// behind which nothing more is looked at.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Fragment> load_part(S& store, const Fragment& part,
                                         std::span<const BlobKey> chunks, std::size_t chunk_bytes,
                                         const FragmentFormat<Hash, C>& format) {
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
    const std::size_t size = chunk_size(payload.byte_count, c, chunk_bytes);
    if (chunk->size() != size)
      return error(ErrorCode::corrupt, "a chunk of ", chunk->size(), " bytes where its anchor has ",
                   size);
    const std::size_t at = c * chunk_bytes;
    if (at + size > room) {
      room = (std::min)(payload.byte_count, (std::max)(max_chunk_bytes, 2 * (at + size)));
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

template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Anchor> fill_list(S& store, AnchorList list,
                                       const FragmentFormat<Hash, C>& format) {
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
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Anchor> load_anchor(S& store, const AnchorRecord& record,
                                         const FragmentFormat<Hash, C>& format) {
  auto list = detail::load_list(store, record, format);
  if (!list) return list.error();
  return detail::fill_list(store, *std::move(list), format);
}

KVMELD_NAMESPACE_END
