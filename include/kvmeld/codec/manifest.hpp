#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/seal.hpp>
#include <kvmeld/codec/chunk.hpp>
#include <kvmeld/codec/geometry_codec.hpp>
#include <kvmeld/codec/payload_codec.hpp>
#include <kvmeld/codec/payload_layout.hpp>

KVMELD_NAMESPACE_BEGIN

/// All of a fragment but its payload bytes, and the keys of the chunks that hold those.
struct Manifest {
  Fragment fragment{};  ///< payload bytes null, everything else as it was sealed
  std::vector<std::vector<BlobKey>> chunks{};  ///< (payloads) (chunks)
  std::size_t chunk_bytes = default_chunk_bytes;
};

/// What a reader of manifests takes from strangers.
struct ManifestLimits {
  std::uint64_t max_payload_bytes = std::uint64_t{1} << 36;  ///< of one payload, raw
  /// Of one payload, by `repeated_bytes`: what a few chunks may be blown up to.
  std::uint64_t max_repeated_bytes = std::uint64_t{1} << 26;
};

namespace detail {

inline constexpr std::uint8_t manifest_version = 2;           // 1 had no placeholders
inline constexpr std::uint32_t manifest_magic = 0x4D4D564BU;  // "KVMM"

[[nodiscard]] inline std::uint64_t accident_sum(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

/// Errors: `oversized` for a payload that is mostly a few chunks again and again.
KVMELD_LAZY [[nodiscard]] Status check_repeats(std::span<const BlobKey> chunks,
                                               std::size_t chunk_bytes, std::uint64_t most) {
  if (chunks.size() <= most / chunk_bytes) return {};
  const std::uint64_t repeated = repeated_bytes(chunks, chunk_bytes);
  if (repeated <= most) return {};
  return error(ErrorCode::oversized, "a payload of ", chunks.size(), " chunks has ", repeated,
               " bytes from chunks that are named again; at most ", most,
               " are taken (max_repeated_bytes)");
}

/// Errors: `corrupt` where a payload's last, shorter chunk has the key of a longer one.
KVMELD_LAZY [[nodiscard]] Status check_sizes(const Fragment::Body& body, const Manifest& manifest) {
  const auto size = [&](std::size_t p, std::size_t c) {
    return chunk_size(body.payloads[p].byte_count, c, manifest.chunk_bytes);
  };
  for (std::size_t last = 0; last < manifest.chunks.size(); ++last) {
    const std::size_t tail = manifest.chunks[last].size() - 1;  // no use where there is none
    if (manifest.chunks[last].empty() || size(last, tail) == manifest.chunk_bytes) continue;
    for (std::size_t p = 0; p < manifest.chunks.size(); ++p) {
      for (std::size_t c = 0; c < manifest.chunks[p].size(); ++c) {
        if (manifest.chunks[p][c] != manifest.chunks[last][tail]) continue;
        if (size(p, c) == size(last, tail)) continue;
        return error(ErrorCode::corrupt, "manifest: one key for chunks of ", size(p, c), " and ",
                     size(last, tail), " bytes");
      }
    }
  }
  return {};
}

KVMELD_LAZY [[nodiscard]] Status read_manifest(ByteReader& r, Fragment::Body& body, Manifest& out,
                                               const ManifestLimits& limits) {
  if (const auto id = r.bytes(32); !id.empty()) std::memcpy(body.id.bytes.data(), id.data(), 32);
  body.role = read_enum(r, Role::span);
  if (const auto prefix = r.bytes(32); !prefix.empty())
    std::memcpy(body.prefix.bytes.data(), prefix.data(), 32);
  const std::size_t tokens = r.count(1);  // positions take a byte each
  body.token_count = static_cast<std::int64_t>(tokens);
  body.tokens = r.values<TokenId>();
  auto geometry = std::make_shared<Geometry>(read_geometry(r));
  const std::uint64_t chunk_bytes = r.varint();
  const auto payloads = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("manifest"));
  KVMELD_TRY(validate(*geometry));
  if (body.role == Role::prefix && !body.prefix.empty())
    return error(ErrorCode::corrupt, "manifest: a prefix that names a prefix");
  if (!body.tokens.empty() && body.tokens.size() != tokens) {
    return error(ErrorCode::token_count_mismatch, "manifest: ", body.tokens.size(),
                 " token ids for ", tokens, " tokens");
  }
  if (chunk_bytes == 0 || chunk_bytes > max_chunk_bytes) {
    return error(ErrorCode::oversized, "manifest: chunks of ", chunk_bytes,
                 " bytes are not in [1, ", max_chunk_bytes, "]");
  }
  if (payloads == 0 || payloads > 2)
    return error(ErrorCode::corrupt, "manifest: ", payloads, " payloads; a fragment has 1 or 2");
  out.chunk_bytes = static_cast<std::size_t>(chunk_bytes);
  for (std::size_t p = 0; p < payloads; ++p) {
    Payload payload;
    const std::uint64_t declared = read_payload(r, tokens, geometry->layers.size(), payload);
    KVMELD_TRY(r.status("manifest"));
    KVMELD_TRY(lay_out(*geometry, payload, limits.max_payload_bytes));
    if (declared != payload.byte_count) {
      return error(ErrorCode::corrupt, "manifest: payload ", p, " declares ", declared,
                   " bytes, its geometry and tokens take ", payload.byte_count);
    }
    const std::size_t count = chunk_count(payload.byte_count, out.chunk_bytes);
    if (count > r.remaining() / sizeof(BlobKey)) r.fail(ErrorCode::truncated);
    std::vector<BlobKey> keys(r.ok() ? count : 0);
    for (BlobKey& key : keys)
      std::memcpy(key.bytes.data(), r.bytes(sizeof(BlobKey)).data(), sizeof(BlobKey));
    KVMELD_TRY(r.status("manifest"));
    KVMELD_TRY(check_repeats(keys, out.chunk_bytes, limits.max_repeated_bytes));
    out.chunks.push_back(std::move(keys));
    body.payloads.push_back(std::move(payload));
  }
  KVMELD_TRY(check_sizes(body, out));
  body.geometry = std::move(geometry);
  return r.finish("manifest");
}

}  // namespace detail

/// Lists a fragment's chunks, so that it can be stored or sent by key. O(bytes): every chunk is
/// hashed.
///
/// Errors: `payload_missing` for an evicted payload, `hash_mismatch`, `invalid_argument` for a
/// chunk size outside [1, 64 MiB].
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Result<Manifest> make_manifest(const Fragment& fragment,
                                             std::size_t chunk_bytes = default_chunk_bytes) {
  if (!fragment.valid())
    return detail::error(ErrorCode::invalid_argument, "an empty Fragment has no manifest");
  if (fragment.id().tag() != Hash::tag) {
    return detail::error(ErrorCode::hash_mismatch, "fragment named by hash ", fragment.id().tag(),
                         ", chunks by ", Hash::tag);
  }
  if (chunk_bytes == 0 || chunk_bytes > max_chunk_bytes) {
    return detail::error(ErrorCode::invalid_argument, "chunks of ", chunk_bytes,
                         " bytes are not in [1, ", max_chunk_bytes, "]");
  }
  Manifest out;
  out.chunk_bytes = chunk_bytes;
  auto body = std::make_shared<Fragment::Body>(*fragment.body());
  for (std::size_t p = 0; p < body->payloads.size(); ++p) {
    Payload& payload = body->payloads[p];
    if (payload.bytes == nullptr) {
      return detail::error(ErrorCode::payload_missing, "payload ", p, " of fragment ",
                           fragment.id().hex(), " is evicted; its chunks cannot be named");
    }
    std::vector<BlobKey>& keys = out.chunks.emplace_back();
    for (std::size_t c = 0, n = chunk_count(payload.byte_count, chunk_bytes); c < n; ++c) {
      keys.push_back(chunk_key<Hash>(raw_chunk(payload, c, chunk_bytes)));
    }
    payload.bytes = nullptr;
  }
  out.fragment = Fragment(std::move(body));
  return out;
}

/// The bytes of a manifest (docs/wire.md), ending in a checksum against accidents. O(tokens +
/// layers + chunks).
KVMELD_LAZY [[nodiscard]] std::vector<std::byte> encode_manifest(const Manifest& manifest) {
  const Fragment::Body& body = *manifest.fragment.body();
  ByteWriter w;
  w.value(detail::manifest_magic);
  w.value(detail::manifest_version);
  w.value(std::uint8_t{0});  // flags
  w.bytes(std::as_bytes(std::span(body.id.bytes)));
  w.value(body.role);
  w.bytes(std::as_bytes(std::span(body.prefix.bytes)));
  w.varint(static_cast<std::uint64_t>(body.token_count));
  w.values(std::span<const TokenId>(body.tokens));
  detail::write_geometry(w, *body.geometry);
  w.varint(manifest.chunk_bytes);
  w.value(static_cast<std::uint8_t>(body.payloads.size()));
  for (std::size_t p = 0; p < body.payloads.size(); ++p)
    detail::write_payload(w, body.payloads[p], manifest.chunks[p]);
  w.value(detail::accident_sum(w.written()));
  return w.take();
}

/// `make_manifest` and its bytes in one step.
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Result<std::vector<std::byte>> encode_manifest(
    const Fragment& fragment, std::size_t chunk_bytes = default_chunk_bytes) {
  const auto manifest = make_manifest<Hash>(fragment, chunk_bytes);
  if (!manifest) return manifest.error();
  return encode_manifest(*manifest);
}

/// Reads a manifest from bytes that nobody vouches for, and checks all that can be checked without
/// the payloads.
///
/// Offsets are worked out, never read; the id is computed anew. The id covers geometry, role,
/// prefix, tokens and payload digests; positions, token sets and chunk keys are vouched for only
/// when the payload's bytes are there (`Assembler::finish`). O(bytes). Errors: `truncated`,
/// `oversized`, `corrupt`, `unknown_field`, `version_mismatch`, `token_count_mismatch`, those of
/// `validate`, `hash_mismatch` for an id of another hash, `id_mismatch`.
/// @param known  a geometry to share where the manifest's is equal: one copy for all fragments of a
/// model.
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Result<Manifest> decode_manifest(std::span<const std::byte> bytes,
                                               const ManifestLimits& limits = {},
                                               const std::shared_ptr<const Geometry>& known = {}) {
  using detail::error;
  ByteReader head(bytes);
  const auto magic = head.value<std::uint32_t>();
  const auto version = head.value<std::uint8_t>();
  const auto flags = head.value<std::uint8_t>();
  KVMELD_TRY(head.status("manifest"));
  if (magic != detail::manifest_magic)
    return error(ErrorCode::corrupt, "manifest: starts with ", magic, ", not with KVMM");
  if (version != detail::manifest_version) {
    return error(ErrorCode::version_mismatch, "manifest of version ", version,
                 "; this build reads version ", detail::manifest_version);
  }
  if (flags != 0)
    return error(ErrorCode::unknown_field, "manifest: flags ", flags, " are unknown to this build");
  if (head.remaining() < 8)
    return error(ErrorCode::truncated, "manifest: ", bytes.size(), " bytes hold no checksum");
  ByteReader sum(bytes.last(8));
  if (sum.value<std::uint64_t>() != detail::accident_sum(bytes.first(bytes.size() - 8))) {
    return error(ErrorCode::corrupt, "manifest: checksum of its ", bytes.size(), " bytes differs");
  }
  ByteReader r(bytes.subspan(head.offset(), head.remaining() - 8));
  Manifest out;
  auto body = std::make_shared<Fragment::Body>();
  KVMELD_TRY(detail::read_manifest(r, *body, out, limits));
  if (body->id.tag() != Hash::tag)
    return error(ErrorCode::hash_mismatch, "manifest named by hash ", body->id.tag(), ", read by ",
                 Hash::tag);
  if (const FragmentId id = detail::fragment_id<Hash>(*body); id != body->id) {
    return error(ErrorCode::id_mismatch, "the manifest claims id ", body->id.hex(),
                 ", its fields have ", id.hex());
  }
  if (known != nullptr && *known == *body->geometry) body->geometry = known;
  out.fragment = Fragment(std::move(body));
  return out;
}

KVMELD_NAMESPACE_END
