#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/codec/blob_key.hpp>
#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/codec/compress.hpp>

KVMELD_NAMESPACE_BEGIN

inline constexpr std::size_t default_chunk_bytes = std::size_t{1} << 20;
/// No manifest may cut larger.
inline constexpr std::size_t max_chunk_bytes = std::size_t{1} << 26;

/// Chunks into which a payload is cut: all of `chunk_bytes` but the last.
[[nodiscard]] constexpr std::size_t chunk_count(std::size_t byte_count,
                                                std::size_t chunk_bytes) noexcept {
  return byte_count / chunk_bytes + (byte_count % chunk_bytes != 0 ? 1 : 0);
}

/// Raw bytes that chunk `index` has.
[[nodiscard]] constexpr std::size_t chunk_size(std::size_t byte_count, std::size_t index,
                                               std::size_t chunk_bytes) noexcept {
  const std::size_t rest = byte_count - index * chunk_bytes;
  return rest < chunk_bytes ? rest : chunk_bytes;
}

/// Raw bytes of chunk `index` of a payload whose bytes are there.
[[nodiscard]] inline std::span<const std::byte> raw_chunk(
    const Payload& payload, std::size_t index,
    std::size_t chunk_bytes = default_chunk_bytes) noexcept {
  return {payload.bytes.get() + index * chunk_bytes,
          chunk_size(payload.byte_count, index, chunk_bytes)};
}

/// Bytes that a payload has only because chunks are named again: a list of 32 bytes a chunk makes
/// as many of one that came once. No less than the true number, by less than a chunk. O(n log n).
KVMELD_LAZY [[nodiscard]] std::uint64_t repeated_bytes(std::span<const BlobKey> chunks,
                                                       std::size_t chunk_bytes) {
  std::vector<BlobKey> keys(chunks.begin(), chunks.end());
  std::sort(keys.begin(), keys.end());
  const auto distinct = std::unique(keys.begin(), keys.end()) - keys.begin();
  return std::uint64_t{chunks.size() - static_cast<std::size_t>(distinct)} * chunk_bytes;
}

/// The form of the plane in which chunk `index` begins. O(planes).
KVMELD_LAZY [[nodiscard]] ChunkForm chunk_form(const Geometry& geometry, const Payload& payload,
                                               std::size_t index,
                                               std::size_t chunk_bytes = default_chunk_bytes) {
  ChunkForm form;
  std::size_t plane = 0;
  for (const LayerShape& layer : geometry.layers) {
    for (const PlaneShape& shape : layer.planes) {
      if (payload.plane_offsets[plane++] > index * chunk_bytes) return form;
      form = {.type = shape.type,
              .row_elements = static_cast<std::uint32_t>(shape.heads) *
                              static_cast<std::uint32_t>(shape.channels)};
    }
  }
  return form;
}

/// The key of a chunk: the hash's tag with the high bit set, then the hash of its raw bytes.
/// O(bytes).
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] BlobKey chunk_key(std::span<const std::byte> raw) {
  Hash hash;
  hash.update(raw);
  const std::array<std::uint8_t, 31> rest = hash.finish();
  BlobKey key;
  key.bytes[0] = static_cast<std::uint8_t>(Hash::tag | 0x80U);
  std::copy(rest.begin(), rest.end(), key.bytes.begin() + 1);
  return key;
}

/// The stored form of a chunk: codec (1 byte), raw size (varint), data. Compressed only where that
/// is shorter. O(bytes).
template <Compressor C = NoCompression>
[[nodiscard]] std::vector<std::byte> encode_chunk(std::span<const std::byte> raw,
                                                  const C& compressor = {},
                                                  const ChunkForm& form = {}) {
  ByteWriter head;
  head.value(std::uint8_t{C::codec});
  head.varint(raw.size());
  const std::size_t head_bytes = head.size();
  std::vector<std::byte> out = head.take();
  if constexpr (C::codec != 0) {
    if (compressor.compress(raw, form, out) && out.size() < head_bytes + raw.size()) return out;
    out.resize(head_bytes);
    out[0] = std::byte{0};
  }
  out.reserve(head_bytes + raw.size());
  out.insert(out.end(), raw.begin(), raw.end());
  return out;
}

namespace detail {

/// A stored chunk before its data is believed.
struct StoredChunk {
  std::uint8_t codec = 0;
  std::size_t raw_bytes = 0;
  std::span<const std::byte> data;
};

KVMELD_LAZY [[nodiscard]] Result<StoredChunk> open_chunk(std::span<const std::byte> stored,
                                                         std::size_t max_raw) {
  ByteReader r(stored);
  StoredChunk out;
  out.codec = r.value<std::uint8_t>();
  const std::uint64_t raw = r.varint();
  KVMELD_TRY(r.status("chunk"));
  if (raw > max_raw)
    return error(ErrorCode::oversized, "a chunk of ", raw, " raw bytes where at most ", max_raw,
                 " are expected");
  out.raw_bytes = static_cast<std::size_t>(raw);
  out.data = r.bytes(r.remaining());
  return out;
}

template <ContentHash Hash, Compressor C>
[[nodiscard]] Status unpack_chunk(const StoredChunk& chunk, const BlobKey& key,
                                  std::span<std::byte> raw, const C& compressor) {
  if (key.bytes[0] != (Hash::tag | 0x80U)) {
    return error(ErrorCode::hash_mismatch, "chunk key of kind ", key.bytes[0], ", expected ",
                 Hash::tag | 0x80U);
  }
  if (chunk.codec == 0) {
    if (chunk.data.size() != raw.size()) {
      return error(chunk.data.size() < raw.size() ? ErrorCode::truncated : ErrorCode::oversized,
                   "a raw chunk holds ", chunk.data.size(), " bytes and declares ", raw.size());
    }
    if (!raw.empty()) std::memcpy(raw.data(), chunk.data.data(), raw.size());
  } else if (chunk.codec == C::codec) {
    KVMELD_TRY(compressor.decompress(chunk.data, raw));
  } else {
    return error(ErrorCode::unsupported, "a chunk is stored by codec ", chunk.codec,
                 ", this reader has codecs 0 and ", std::uint8_t{C::codec},
                 " (codec 1 is Zstd of <kvmeld/codec/zstd.hpp>)");
  }
  if (const BlobKey found = chunk_key<Hash>(raw); found != key) {
    return error(ErrorCode::id_mismatch, "a chunk of ", raw.size(), " bytes has key ", found.hex(),
                 ", not ", key.hex());
  }
  return {};
}

}  // namespace detail

/// The raw bytes of a stored chunk, verified against the key under which it was kept. O(bytes).
///
/// Errors: `truncated`, `oversized` (also above `max_raw`, before anything is allocated),
/// `corrupt`, `unsupported` for a codec that `C` is not, `hash_mismatch` for a key of another hash,
/// `id_mismatch`.
template <ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
[[nodiscard]] Result<std::vector<std::byte>> decode_chunk(std::span<const std::byte> stored,
                                                          const BlobKey& key,
                                                          std::size_t max_raw = max_chunk_bytes,
                                                          const C& compressor = {}) {
  const auto chunk = detail::open_chunk(stored, max_raw);
  if (!chunk) return chunk.error();
  if (chunk->codec == 0 && chunk->data.size() < chunk->raw_bytes) {
    return detail::error(ErrorCode::truncated, "a raw chunk holds ", chunk->data.size(),
                         " bytes and declares ", chunk->raw_bytes);
  }
  std::vector<std::byte> raw(chunk->raw_bytes);
  KVMELD_TRY((detail::unpack_chunk<Hash>(*chunk, key, std::span(raw), compressor)));
  return raw;
}

KVMELD_NAMESPACE_END
