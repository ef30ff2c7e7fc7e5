#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/assembler.hpp>
#include <kvmeld/codec/chunk.hpp>
#include <kvmeld/codec/manifest.hpp>
#include <kvmeld/session/payload_store.hpp>

KVMELD_NAMESPACE_BEGIN

/// How fragments lie in stores and travel in messages.
/// @tparam Hash what names fragments and chunks; @tparam C how chunks are compressed.
template <ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
struct FragmentFormat {
  using hash_type = Hash;
  std::size_t chunk_bytes = default_chunk_bytes;
  /// Of one payload that a stranger announces.
  std::uint64_t max_payload_bytes = std::uint64_t{1} << 34;
  /// Of one payload, as `ManifestLimits` has it: a fragment beyond is neither stored nor taken.
  std::uint64_t max_repeated_bytes = std::uint64_t{1} << 26;
  C compressor{};
  /// Hashes what a store has already before it is believed, O(bytes): payloads that it maps in one
  /// piece, and chunks that need not be put again. Off: whoever may write there is trusted, and so
  /// is the disk. What is mapped may change after it was verified, where somebody writes into the
  /// file: `FileStoreOptions::private_copies` rules that out.
  bool verify_stored = true;

  [[nodiscard]] ManifestLimits limits() const noexcept {
    return {max_payload_bytes, max_repeated_bytes};
  }
};

/// What storing a fragment took.
struct StoredBytes {
  std::uint64_t bytes = 0;        ///< handed to the store
  std::uint64_t dedup_bytes = 0;  ///< of blobs that were there already
  std::uint64_t dedup_hits = 0;   ///< such blobs
};

namespace detail {

/// The key of a payload that a store keeps in one piece: the hash's tag with bit 6 set, then the
/// payload's digest.
template <ContentHash Hash>
[[nodiscard]] BlobKey payload_key(const Payload& payload) {
  BlobKey key;
  key.bytes[0] = static_cast<std::uint8_t>(Hash::tag | 0x40U);
  std::copy(payload.digest.begin(), payload.digest.end(), key.bytes.begin() + 1);
  return key;
}

/// Whether an error proves that a blob is not what its key names. One that this build cannot read
/// (another version, another compressor) may be somebody else's good one, and stays.
[[nodiscard]] constexpr bool proves_damage(ErrorCode code) noexcept {
  return code == ErrorCode::id_mismatch || code == ErrorCode::corrupt ||
         code == ErrorCode::truncated;
}

KVMELD_LAZY [[nodiscard]] Status check_limits(const Manifest& manifest,
                                              const ManifestLimits& limits) {
  for (std::size_t p = 0; p < manifest.chunks.size(); ++p) {
    const std::size_t bytes = manifest.fragment.payloads()[p].byte_count;
    if (bytes > limits.max_payload_bytes) {
      return error(ErrorCode::oversized, "payload ", p, " of fragment ",
                   manifest.fragment.id().hex(), " has ", bytes, " bytes; at most ",
                   limits.max_payload_bytes, " are read again (max_payload_bytes)");
    }
    KVMELD_TRY(check_repeats(manifest.chunks[p], manifest.chunk_bytes, limits.max_repeated_bytes));
  }
  return {};
}

/// Good where a stored chunk is what its key names; else why not, as `decode_chunk` says it.
/// O(bytes), no copy where it is raw.
template <ContentHash Hash, Compressor C>
[[nodiscard]] Status check_chunk(const Blob& stored, const BlobKey& key,
                                 const FragmentFormat<Hash, C>& format) {
  const auto open = open_chunk(stored.bytes(), max_chunk_bytes);
  const bool raw = open && open->codec == 0 && open->data.size() == open->raw_bytes;
  if (raw && chunk_key<Hash>(open->data) == key) return {};
  return decode_chunk<Hash>(stored.bytes(), key, max_chunk_bytes, format.compressor).status();
}

/// Whether a chunk need not be put: it is there, and verified as the format says. Errors: the
/// store's.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<bool> has_chunk(S& store, const BlobKey& key,
                                     const FragmentFormat<Hash, C>& format) {
  if (!format.verify_stored) return store.contains(key);
  const auto stored = store.get(key);
  if (stored) return check_chunk(*stored, key, format).ok();
  if (stored.error().code() == ErrorCode::not_found) return false;
  return stored.error();
}

/// What a manifest takes in memory at most: a position of one byte takes 8, and its chunks some 64
/// each.
[[nodiscard]] constexpr std::uint64_t manifest_memory(std::uint64_t bytes) noexcept {
  return 8 * bytes;
}

inline void count(StoredBytes& counted, bool fresh, std::size_t bytes) {
  (fresh ? counted.bytes : counted.dedup_bytes) += bytes;
  counted.dedup_hits += fresh ? 0U : 1U;
}

}  // namespace detail

/// Puts a whole fragment into a store: payloads in one piece where the store can, else in chunks;
/// the manifest last, so that whoever finds it finds the rest. O(bytes).
///
/// What the store has already is looked at (`FragmentFormat::verify_stored`), and put anew where it
/// is not what it should be. Errors: the store's, those of `make_manifest` (`payload_missing`), and
/// `oversized` for what the format's bounds would not let anybody read again. What was put stays
/// and harms nobody: a retry finds it there.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<StoredBytes> store_fragment(S& store, const Fragment& fragment,
                                                 const FragmentFormat<Hash, C>& format) {
  auto manifest = make_manifest<Hash>(fragment, format.chunk_bytes);
  if (!manifest) return manifest.error();
  KVMELD_TRY(detail::check_limits(*manifest, format.limits()));
  StoredBytes counted;
  for (std::size_t p = 0; p < fragment.payloads().size(); ++p) {
    const Payload& payload = fragment.payloads()[p];
    if constexpr (PayloadStore<S>) {
      const auto fresh = store.put_payload(detail::payload_key<Hash>(payload),
                                           {payload.bytes.get(), payload.byte_count});
      if (!fresh) return fresh.error();
      detail::count(counted, *fresh, payload.byte_count);
    } else {
      for (std::size_t c = 0; c < manifest->chunks[p].size(); ++c) {
        const auto there = detail::has_chunk(store, manifest->chunks[p][c], format);
        if (!there) return there.error();
        const auto raw = raw_chunk(payload, c, format.chunk_bytes);
        if (*there) {
          detail::count(counted, false, raw.size());
          continue;
        }
        const auto stored =
            encode_chunk(raw, format.compressor,
                         chunk_form(fragment.geometry(), payload, c, format.chunk_bytes));
        const auto fresh = store.put(manifest->chunks[p][c], stored);
        if (!fresh) return fresh.error();
        detail::count(counted, *fresh, stored.size());
      }
    }
  }
  const auto bytes = encode_manifest(*manifest);
  const auto fresh = store.put(manifest_key(fragment.id()), bytes);
  if (!fresh) return fresh.error();
  detail::count(counted, *fresh, bytes.size());
  return counted;
}

/// A manifest from a store, verified; one that is wrong is erased, so that a right one can take its
/// place.
///
/// Errors: `not_found`, the store's, those of `decode_manifest`, `id_mismatch` for another
/// fragment's.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Manifest> load_manifest(S& store, const FragmentId& id,
                                             const FragmentFormat<Hash, C>& format) {
  const auto blob = store.get(manifest_key(id));
  if (!blob) return blob.error();
  auto manifest = decode_manifest<Hash>(blob->bytes(), format.limits());
  Status status = manifest.status();
  if (status.ok() && manifest->fragment.id() != id) {
    status = detail::error(ErrorCode::id_mismatch, "manifest of fragment ",
                           manifest->fragment.id().hex(), " under the key of ", id.hex());
  }
  if (status.ok()) return manifest;
  if (detail::proves_damage(status.code())) (void)store.erase(manifest_key(id));
  return status;
}

namespace detail {

/// Maps every payload of a fragment; none where one is not there, or is not what the manifest says.
template <PayloadStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Fragment> map_fragment(S& store, const Manifest& manifest,
                                            const FragmentFormat<Hash, C>& format) {
  auto body = std::make_shared<Fragment::Body>(*manifest.fragment.body());
  for (Payload& payload : body->payloads) {
    const BlobKey key = payload_key<Hash>(payload);
    const auto blob = store.map_payload(key);
    if (!blob) return blob.error();
    payload.bytes = blob->data;
    if (blob->size != payload.byte_count ||
        (format.verify_stored && payload_digest<Hash>(payload) != payload.digest)) {
      (void)store.erase_payload(key);
      return error(ErrorCode::id_mismatch, "a mapped payload of ", blob->size,
                   " bytes is not the one of ", payload.byte_count, " bytes that ",
                   manifest.fragment.id().hex(), " names");
    }
  }
  return Fragment(std::move(body));
}

}  // namespace detail

/// A chunk in its stored form, verified by its key; one that is wrong is erased.
///
/// Errors: `not_found`, the store's, those of `decode_chunk`. O(bytes), no copy where it is stored
/// raw.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Blob> load_chunk(S& store, const BlobKey& key,
                                      const FragmentFormat<Hash, C>& format) {
  auto stored = store.get(key);
  if (!stored) return stored.error();
  const Status status = detail::check_chunk(*stored, key, format);
  if (status.ok()) return stored;
  if (detail::proves_damage(status.code())) (void)store.erase(key);
  return status;
}

/// Adds the chunks that a store has to an assembler; a chunk that is wrong is erased and stays
/// wanted.
///
/// @param room  bytes that the assembler may hold in the end: a list that names what lies in a
/// store
///              anyway costs who sent it little. Beyond, chunks stay wanted.
/// Errors: the store's, but for `not_found`.
template <BlobStore S, ContentHash Hash, Compressor C>
Status load_chunks(S& store, Assembler<Hash>& assembler, const FragmentFormat<Hash, C>& format,
                   std::uint64_t room = ~std::uint64_t{0}) {
  for (const BlobKey& key : assembler.missing()) {
    const std::uint64_t held = assembler.held_bytes();
    if (held > room || assembler.bytes_of(key) > room - held) return {};
    const auto stored = store.get(key);
    if (!stored) {
      if (stored.error().code() == ErrorCode::not_found) continue;
      return stored.error();
    }
    const auto added = assembler.add(key, stored->bytes(), format.compressor);
    if (!added && detail::proves_damage(added.error().code())) (void)store.erase(key);
  }
  return {};
}

/// A whole, verified fragment from a store. O(bytes); where the store maps payloads and is trusted,
/// O(manifest).
///
/// Errors: `not_found` where the manifest or a part is not there (what is wrong counts as not
/// there), the store's.
template <BlobStore S, ContentHash Hash, Compressor C>
[[nodiscard]] Result<Fragment> load_fragment(S& store, const FragmentId& id,
                                             const FragmentFormat<Hash, C>& format) {
  auto manifest = load_manifest(store, id, format);
  if (!manifest) return manifest.error();
  if constexpr (PayloadStore<S>) {
    if (auto mapped = detail::map_fragment(store, *manifest, format)) return mapped;
  }
  Assembler<Hash> assembler(*std::move(manifest));
  KVMELD_TRY(load_chunks(store, assembler, format));
  if (!assembler.complete())
    return detail::error(ErrorCode::not_found, assembler.left(), " chunks of fragment ", id.hex(),
                         " are not in the store");
  auto fragment = assembler.finish();
  if (!fragment) (void)store.erase(manifest_key(id));  // its list of chunks lied
  return fragment;
}

KVMELD_NAMESPACE_END
