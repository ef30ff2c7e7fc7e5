#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A store that also keeps a payload's raw bytes in one piece, so that a reader takes them over
/// without assembling chunks.
///
/// Chunks are stored compressed or behind a codec byte and each on its own: putting them together
/// is a copy. What `map_payload` gives can be a `Payload`'s `bytes` as it is, at a cost that does
/// not grow with its size.
///
/// Semantic requirements (tests/support/store_laws.hpp checks them): those of `put`, `get` and
/// `erase` of `BlobStore`; payloads and blobs do not share their keys; bytes are at least 16-byte
/// aligned, never null, and not verified: the caller hashes them.
template <class S>
concept PayloadStore = BlobStore<S> &&
    requires(S& store, const BlobKey& key, std::span<const std::byte> bytes) {
  { store.put_payload(key, bytes) } -> std::same_as<Result<bool>>;
  { store.map_payload(key) } -> std::same_as<Result<Blob>>;
  { store.erase_payload(key) } -> std::same_as<Status>;
};

KVMELD_NAMESPACE_END
