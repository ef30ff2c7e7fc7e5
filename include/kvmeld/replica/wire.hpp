#pragma once

/// What goes over the wire: frames, manifests, chunks, sets, and payloads as bytes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

/// A member of a session: one agent, whatever process or connection it uses just now.
using MemberId = std::uint64_t;

/// Everybody else in the session, as the receiver of a message; as a sender: nobody in particular.
inline constexpr MemberId everyone = ~MemberId{0};

/// What a reader refuses when it is greater than its own.
inline constexpr std::uint8_t wire_major = 2;
/// What a reader ignores: new message types, never new fields of old ones.
inline constexpr std::uint8_t wire_minor = 0;

/// Says that a frame comes from somebody who knows a secret. Const calls are thread-safe: one is
/// shared by whoever speaks with that secret.
///
/// Semantic requirements: `sign` fills `tag_bytes()` bytes that depend on every byte of both spans
/// and on their border, and returns false where it cannot; `verify` compares in a time that does
/// not depend on where the tags differ, and is told who is said to have sent the frame (`everyone`:
/// nobody says). One whose members have keys of their own answers false where that member did not
/// sign: then a frame proves its sender. No tag says when a frame was sent: what is above must bear
/// a replay, as joins do.
class Authenticator {
 public:
  virtual ~Authenticator() = default;

  /// Above 0, and always the same.
  [[nodiscard]] virtual std::size_t tag_bytes() const noexcept = 0;
  [[nodiscard]] virtual bool sign(std::span<const std::byte> header,
                                  std::span<const std::byte> body,
                                  std::span<std::byte> tag) const = 0;
  [[nodiscard]] virtual bool verify(MemberId from, std::span<const std::byte> header,
                                    std::span<const std::byte> body,
                                    std::span<const std::byte> tag) const = 0;

 protected:
  Authenticator() = default;
  Authenticator(const Authenticator&) = default;
  Authenticator& operator=(const Authenticator&) = default;
};

/// The digest by which a frame says whose caches it is about: those of another tenant, model or
/// tokenizer never meet.
[[nodiscard]] inline Digest128 frame_namespace(std::string_view tenant, std::string_view model,
                                               std::string_view tokenizer) {
  Hasher hasher;
  hasher.text("kvmeld.namespace.v1");
  hasher.text(tenant);
  hasher.text(model);
  hasher.text(tokenizer);
  return hasher.digest();
}

/// What both ends of a connection agree on beforehand.
struct FrameOptions {
  Digest128 scope{};  ///< of `frame_namespace`
  std::size_t max_body_bytes = std::size_t{1} << 26;
  /// Null: trusts the transport, and takes no frame that carries a tag, since it could not check
  /// it.
  std::shared_ptr<const Authenticator> auth{};

  [[nodiscard]] std::size_t tag_bytes() const noexcept {
    return auth == nullptr ? 0 : auth->tag_bytes();
  }
};

/// A frame that was checked. `body` points into the bytes that were read.
struct FrameView {
  std::uint8_t type = 0;   ///< meaning is the caller's
  std::uint8_t minor = 0;  ///< of the sender
  std::span<const std::byte> body{};
};

namespace detail {

inline constexpr std::uint32_t frame_magic = 0x464D564BU;  // "KVMF"
inline constexpr std::uint8_t frame_authenticated = 1;
inline constexpr std::size_t frame_header_bytes = 40;
inline constexpr std::size_t frame_sum_offset = 32;

/// XXH3-64 of the header before the sum, and of the body.
[[nodiscard]] inline std::uint64_t frame_sum(std::span<const std::byte> header,
                                             std::span<const std::byte> body) noexcept {
  XXH3_state_t state;
  (void)XXH3_64bits_reset(&state);
  (void)XXH3_64bits_update(&state, header.data(), frame_sum_offset);
  if (!body.empty()) (void)XXH3_64bits_update(&state, body.data(), body.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace detail

/// A message: 40 bytes of header, the body, and the authenticator's tag. O(body).
///
/// Errors: `oversized` for a body above the options' bound, `unsupported` where the authenticator
/// cannot sign.
[[nodiscard]] inline Result<std::vector<std::byte>> encode_frame(std::uint8_t type,
                                                                 std::span<const std::byte> body,
                                                                 const FrameOptions& options = {}) {
  if (body.size() > options.max_body_bytes) {
    return extend::error(ErrorCode::oversized, "a frame's body of ", body.size(),
                         " bytes where at most ", options.max_body_bytes, " are agreed");
  }
  const std::size_t tag_bytes = options.tag_bytes();
  extend::ByteWriter w;
  w.reserve(detail::frame_header_bytes + body.size() + tag_bytes);
  w.value(detail::frame_magic);
  w.value(wire_major);
  w.value(wire_minor);
  w.value(type);
  w.value(tag_bytes > 0 ? detail::frame_authenticated : std::uint8_t{0});
  w.value(options.scope.low);
  w.value(options.scope.high);
  w.value(static_cast<std::uint64_t>(body.size()));
  w.value(detail::frame_sum(w.written(), body));
  w.bytes(body);
  std::vector<std::byte> out = w.take();
  if (tag_bytes > 0) {
    out.resize(out.size() + tag_bytes);
    const auto all = std::span(out);
    if (!options.auth->sign(all.first(detail::frame_header_bytes),
                            all.subspan(detail::frame_header_bytes, body.size()),
                            all.last(tag_bytes))) {
      return extend::error(ErrorCode::unsupported, "the authenticator could not sign a frame of ",
                           out.size(), " bytes");
    }
  }
  return out;
}

/// Checks one whole frame from bytes that nobody vouches for; allocates nothing.
///
/// @param from who is said to have sent it: an authenticator with a key for each member checks
/// that. Errors: `truncated`, `oversized`, `corrupt` (no frame, or an accident), `version_mismatch`
/// for a newer major version, `unknown_field` for a flag, `unauthenticated` for another namespace
/// or a bad, missing or uncheckable tag. O(body).
[[nodiscard]] inline Result<FrameView> decode_frame(std::span<const std::byte> bytes,
                                                    const FrameOptions& options = {},
                                                    MemberId from = everyone) {
  using extend::error;
  extend::ByteReader r(bytes);
  const auto magic = r.value<std::uint32_t>();
  const auto major = r.value<std::uint8_t>();
  FrameView view;
  view.minor = r.value<std::uint8_t>();
  view.type = r.value<std::uint8_t>();
  const auto flags = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("frame"));
  if (magic != detail::frame_magic)
    return extend::error(ErrorCode::corrupt, "frame: starts with ", magic, ", not with KVMF");
  if (major != wire_major) {
    return extend::error(ErrorCode::version_mismatch, "frame of wire version ", major, ".",
                         view.minor, "; this build reads version ", wire_major,
                         ": update the older of the two members");
  }
  if ((flags & ~detail::frame_authenticated) != 0)
    return extend::error(ErrorCode::unknown_field, "frame: flags ", flags,
                         " are unknown to this build");
  Digest128 scope;
  scope.low = r.value<std::uint64_t>();
  scope.high = r.value<std::uint64_t>();
  const auto body_bytes = r.value<std::uint64_t>();
  const auto sum = r.value<std::uint64_t>();
  KVMELD_TRY(r.status("frame"));
  const std::size_t own_bytes = options.tag_bytes();
  const std::size_t tag_bytes =
      flags == detail::frame_authenticated ? (own_bytes > 0 ? own_bytes : std::size_t{32}) : 0;
  if (body_bytes > options.max_body_bytes) {
    return extend::error(ErrorCode::oversized, "frame: a body of ", body_bytes,
                         " bytes where at most ", options.max_body_bytes, " are agreed");
  }
  if (const std::size_t left = r.remaining(); left < tag_bytes || left - tag_bytes != body_bytes) {
    return extend::error(left < tag_bytes || left - tag_bytes < body_bytes ? ErrorCode::truncated
                                                                           : ErrorCode::oversized,
                         "frame: ", left, " bytes follow the header, a body of ", body_bytes,
                         " and a tag of ", tag_bytes, " are declared");
  }
  view.body = r.bytes(static_cast<std::size_t>(body_bytes));
  if (sum != detail::frame_sum(bytes, view.body))
    return extend::error(ErrorCode::corrupt, "frame: checksum of its ", bytes.size(),
                         " bytes differs");
  if (scope != options.scope) {
    return extend::error(ErrorCode::unauthenticated, "frame of namespace ", scope.hex(),
                         ", this member is in ", options.scope.hex(),
                         ": tenant, model or tokenizer differ");
  }
  if ((tag_bytes > 0) != (own_bytes > 0)) {
    return extend::error(ErrorCode::unauthenticated,
                         tag_bytes > 0
                             ? "frame: carries a tag, and this member has no key to check it"
                             : "frame: carries no tag, and this member takes only frames that do");
  }
  if (own_bytes > 0 && !options.auth->verify(from, bytes.first(detail::frame_header_bytes),
                                             view.body, bytes.last(tag_bytes))) {
    return extend::error(ErrorCode::unauthenticated, "frame: the tag of its ", bytes.size(),
                         " bytes is not of this member's key");
  }
  return view;
}

/// What a compressor may know of a chunk's bytes: rows of numbers, one row a token, whose columns
/// resemble themselves.
struct ChunkForm {
  ElementType type = ElementType::i8;
  std::uint32_t row_elements = 0;  ///< numbers of one token in one plane, all heads; 0: not known
};

/// Makes the bytes of a chunk fewer without changing them; a chunk that it cannot shorten is stored
/// as it is. Const calls are thread-safe.
///
/// Semantic requirements (tests/unit/wire_chunk.cpp checks them):
///  - `codec` names the stored form for ever: 0 is raw, 1 is `Zstd`; your own start at 128;
///  - `compress` appends to `out` and returns true, or returns false and leaves `out` as it was.
///    What `decompress` must know of the form stands in what it appends;
///  - `decompress` fills `raw` exactly or returns `corrupt`; it takes no memory beyond a constant
///    times `raw`, whatever `data` says.
class Compressor {
 public:
  virtual ~Compressor() = default;

  [[nodiscard]] virtual std::uint8_t codec() const noexcept = 0;
  [[nodiscard]] virtual bool compress(std::span<const std::byte> data, const ChunkForm& form,
                                      std::vector<std::byte>& out) const = 0;
  [[nodiscard]] virtual Status decompress(std::span<const std::byte> data,
                                          std::span<std::byte> raw) const = 0;

 protected:
  Compressor() = default;
  Compressor(const Compressor&) = default;
  Compressor& operator=(const Compressor&) = default;
};

/// Bytes of a chunk unless a format says otherwise: 1 MiB.
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
[[nodiscard]] inline std::uint64_t repeated_bytes(std::span<const BlobKey> chunks,
                                                  std::size_t chunk_bytes) {
  std::vector<BlobKey> keys(chunks.begin(), chunks.end());
  std::sort(keys.begin(), keys.end());
  const auto distinct = std::unique(keys.begin(), keys.end()) - keys.begin();
  return std::uint64_t{chunks.size() - static_cast<std::size_t>(distinct)} * chunk_bytes;
}

/// The form of the plane in which chunk `index` begins. O(planes).
[[nodiscard]] inline ChunkForm chunk_form(const Geometry& geometry, const Payload& payload,
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
[[nodiscard]] inline BlobKey chunk_key(std::span<const std::byte> raw, const SetHash& hash = {}) {
  const std::array<std::uint8_t, 31> rest = extend::content_bytes(hash, raw);
  BlobKey key;
  key.bytes[0] = static_cast<std::uint8_t>(hash.tag | 0x80U);
  std::copy(rest.begin(), rest.end(), key.bytes.begin() + 1);
  return key;
}

/// The stored form of a chunk: codec (1 byte), raw size (varint), data. Compressed only where that
/// is shorter. O(bytes).
///
/// @param compressor null: the chunk is stored raw.
[[nodiscard]] inline std::vector<std::byte> encode_chunk(std::span<const std::byte> raw,
                                                         const Compressor* compressor = nullptr,
                                                         const ChunkForm& form = {}) {
  extend::ByteWriter head;
  head.value(compressor == nullptr ? std::uint8_t{0} : compressor->codec());
  head.varint(raw.size());
  const std::size_t head_bytes = head.size();
  std::vector<std::byte> out = head.take();
  if (compressor != nullptr) {
    if (compressor->compress(raw, form, out) && out.size() < head_bytes + raw.size()) return out;
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

[[nodiscard]] inline Result<StoredChunk> open_chunk(std::span<const std::byte> stored,
                                                    std::size_t max_raw) {
  extend::ByteReader r(stored);
  StoredChunk out;
  out.codec = r.value<std::uint8_t>();
  const std::uint64_t raw = r.varint();
  KVMELD_TRY(r.status("chunk"));
  if (raw > max_raw)
    return extend::error(ErrorCode::oversized, "a chunk of ", raw, " raw bytes where at most ",
                         max_raw, " are expected");
  out.raw_bytes = static_cast<std::size_t>(raw);
  out.data = r.bytes(r.remaining());
  return out;
}

[[nodiscard]] inline Status unpack_chunk(const StoredChunk& chunk, const BlobKey& key,
                                         std::span<std::byte> raw, const Compressor* compressor,
                                         const SetHash& hash) {
  if (key.bytes[0] != (hash.tag | 0x80U)) {
    return extend::error(ErrorCode::hash_mismatch, "chunk key of kind ", key.bytes[0],
                         ", expected ", hash.tag | 0x80U);
  }
  if (chunk.codec == 0) {
    if (chunk.data.size() != raw.size()) {
      return extend::error(
          chunk.data.size() < raw.size() ? ErrorCode::truncated : ErrorCode::oversized,
          "a raw chunk holds ", chunk.data.size(), " bytes and declares ", raw.size());
    }
    if (!raw.empty()) std::memcpy(raw.data(), chunk.data.data(), raw.size());
  } else if (compressor != nullptr && chunk.codec == compressor->codec()) {
    KVMELD_TRY(compressor->decompress(chunk.data, raw));
  } else if (compressor == nullptr) {
    return extend::error(ErrorCode::unsupported, "a chunk is stored by codec ", chunk.codec,
                         ", and this reader has no compressor (codec 1 is Zstd of "
                         "<kvmeld/replica/zstd.hpp>)");
  } else {
    return extend::error(ErrorCode::unsupported, "a chunk is stored by codec ", chunk.codec,
                         ", this reader has codecs 0 and ", compressor->codec(),
                         " (codec 1 is Zstd of <kvmeld/replica/zstd.hpp>)");
  }
  if (const BlobKey found = chunk_key(raw, hash); found != key) {
    return extend::error(ErrorCode::id_mismatch, "a chunk of ", raw.size(), " bytes has key ",
                         found.hex(), ", not ", key.hex());
  }
  return {};
}

}  // namespace detail

/// The raw bytes of a stored chunk, verified against the key under which it was kept. O(bytes).
///
/// Errors: `truncated`, `oversized` (also above `max_raw`, before anything is allocated),
/// `corrupt`, `unsupported` for a codec that `compressor` is not, `hash_mismatch` for a key of
/// another hash, `id_mismatch`.
[[nodiscard]] inline Result<std::vector<std::byte>> decode_chunk(
    std::span<const std::byte> stored, const BlobKey& key, std::size_t max_raw = max_chunk_bytes,
    const Compressor* compressor = nullptr, const SetHash& hash = {}) {
  const auto chunk = detail::open_chunk(stored, max_raw);
  if (!chunk) return chunk.error();
  if (chunk->codec == 0 && chunk->data.size() < chunk->raw_bytes) {
    return extend::error(ErrorCode::truncated, "a raw chunk holds ", chunk->data.size(),
                         " bytes and declares ", chunk->raw_bytes);
  }
  std::vector<std::byte> raw(chunk->raw_bytes);
  KVMELD_TRY(detail::unpack_chunk(*chunk, key, std::span(raw), compressor, hash));
  return raw;
}

namespace detail {

/// Strictly ascending numbers from 0 on: the first, then each one's distance to its predecessor,
/// less one.
template <class T>
void write_ascending(extend::ByteWriter& w, std::span<const T> numbers) {
  T next = 0;
  for (const T n : numbers) {
    w.varint(static_cast<std::uint64_t>(n - next));
    next = static_cast<T>(n + 1);
  }
}
template <class T>
void read_ascending(extend::ByteReader& r, std::size_t count, std::uint64_t max,
                    std::vector<T>& out) {
  std::uint64_t next = 0;
  for (; r.ok() && count > 0; --count) {
    const std::uint64_t gap = r.varint();
    if (gap > max || next + gap > max) r.fail(ErrorCode::corrupt);
    if (!r.ok()) return;
    out.push_back(static_cast<T>(next + gap));
    next += gap + 1;
  }
}

}  // namespace detail

/// Writes a payload's part of a manifest: its layout, digest and the keys of its chunks.
inline void write_payload(extend::ByteWriter& w, const Payload& payload,
                          std::span<const BlobKey> chunks) {
  w.value(payload.lead_in.low);
  w.value(payload.lead_in.high);
  w.bytes(std::as_bytes(std::span(payload.digest)));
  detail::write_ascending(w, std::span<const std::int64_t>(payload.positions));
  w.varint(payload.token_sets.size());
  for (const TokenSet& set : payload.token_sets) {
    w.value(static_cast<std::uint8_t>(set.all));
    if (set.all) continue;
    w.varint(set.present.size());
    detail::write_ascending(w, std::span<const std::int32_t>(set.present));
  }
  for (const std::uint16_t set : payload.layer_set) w.varint(set);
  w.varint(payload.byte_count);
  for (const BlobKey& key : chunks) w.bytes(std::as_bytes(std::span(key.bytes)));
}

/// Reads up to the declared byte count, which the caller compares with the one that the geometry
/// implies.
[[nodiscard]] inline std::uint64_t read_payload(extend::ByteReader& r, std::size_t tokens,
                                                std::size_t layers, Payload& payload) {
  payload.lead_in.low = r.value<std::uint64_t>();
  payload.lead_in.high = r.value<std::uint64_t>();
  if (const auto digest = r.bytes(payload.digest.size()); !digest.empty())
    std::memcpy(payload.digest.data(), digest.data(), digest.size());
  if (tokens > r.remaining()) r.fail(ErrorCode::truncated);
  detail::read_ascending(r, tokens, static_cast<std::uint64_t>(max_position), payload.positions);
  for (std::size_t sets = r.count(1); r.ok() && sets > 0; --sets) {
    TokenSet set;
    set.all = extend::read_bool(r);
    if (!set.all) {
      const std::uint64_t last = tokens == 0 ? 0 : tokens - 1;
      const std::size_t present = r.count(1);
      if (present > tokens) r.fail(ErrorCode::corrupt);
      detail::read_ascending(
          r, present, (std::min)(last, std::uint64_t{(std::numeric_limits<std::int32_t>::max)()}),
          set.present);
    }
    payload.token_sets.push_back(std::move(set));
  }
  for (std::size_t l = 0; r.ok() && l < layers; ++l) {
    const std::uint64_t set = r.varint();
    if (set >= payload.token_sets.size() || set > 0xFFFFU) r.fail(ErrorCode::corrupt);
    payload.layer_set.push_back(static_cast<std::uint16_t>(set));
  }
  return r.varint();
}

/// Works out where each plane of a payload lies, from its token sets and a validated geometry:
/// nobody is asked to say it.
///
/// Fills `plane_offsets`, `scale_offsets` and `byte_count` as `seal` does. Errors: `oversized`
/// above `max_bytes`.
[[nodiscard]] inline Status lay_out(const Geometry& geometry, Payload& payload,
                                    std::uint64_t max_bytes) {
  std::uint64_t total = 0;
  const auto grow = [&total, max_bytes](std::uint64_t rows, std::uint64_t row, bool pad) {
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(rows, row, &bytes)) return false;
    if (pad && __builtin_add_overflow(bytes, std::uint64_t{3}, &bytes)) return false;
    if (pad) bytes = bytes / 4 * 4;
    return !__builtin_add_overflow(total, bytes, &total) && total <= max_bytes;
  };
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const auto tokens = static_cast<std::uint64_t>(payload.layer_tokens(l));
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::uint64_t rows = 0;
      bool fits = !__builtin_mul_overflow(tokens, static_cast<std::uint64_t>(shape.heads), &rows);
      payload.plane_offsets.push_back(total);
      fits = fits && grow(rows, static_cast<std::uint64_t>(extend::row_bytes(shape)), true);
      payload.scale_offsets.push_back(total);
      fits =
          fits &&
          grow(rows, static_cast<std::uint64_t>(extend::row_scales(shape)) * sizeof(float), false);
      if (!fits) {
        return extend::error(ErrorCode::oversized, "layer ", l, ": ", tokens, " tokens of ",
                             shape.heads, " heads of ", shape.channels,
                             " channels take a payload beyond ", max_bytes, " bytes");
      }
    }
  }
  payload.byte_count = static_cast<std::size_t>(total);
  return {};
}

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

}  // namespace detail

/// Errors: `oversized` for a payload that is mostly a few chunks again and again.
[[nodiscard]] inline Status check_repeats(std::span<const BlobKey> chunks, std::size_t chunk_bytes,
                                          std::uint64_t most) {
  if (chunks.size() <= most / chunk_bytes) return {};
  const std::uint64_t repeated = repeated_bytes(chunks, chunk_bytes);
  if (repeated <= most) return {};
  return extend::error(ErrorCode::oversized, "a payload of ", chunks.size(), " chunks has ",
                       repeated, " bytes from chunks that are named again; at most ", most,
                       " are taken (max_repeated_bytes)");
}

namespace detail {

/// Errors: `corrupt` where a payload's last, shorter chunk has the key of a longer one.
[[nodiscard]] inline Status check_sizes(const Fragment::Body& body, const Manifest& manifest) {
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
        return extend::error(ErrorCode::corrupt, "manifest: one key for chunks of ", size(p, c),
                             " and ", size(last, tail), " bytes");
      }
    }
  }
  return {};
}

[[nodiscard]] inline Status read_manifest(extend::ByteReader& r, Fragment::Body& body,
                                          Manifest& out, const ManifestLimits& limits) {
  if (const auto id = r.bytes(32); !id.empty()) std::memcpy(body.id.bytes.data(), id.data(), 32);
  body.role = extend::read_enum(r, Role::span);
  if (const auto prefix = r.bytes(32); !prefix.empty())
    std::memcpy(body.prefix.bytes.data(), prefix.data(), 32);
  const std::size_t tokens = r.count(1);  // positions take a byte each
  body.token_count = static_cast<std::int64_t>(tokens);
  body.tokens = r.values<TokenId>();
  auto geometry = std::make_shared<Geometry>(extend::read_geometry(r));
  const std::uint64_t chunk_bytes = r.varint();
  const auto payloads = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("manifest"));
  KVMELD_TRY(validate(*geometry));
  if (body.role == Role::prefix && !body.prefix.empty())
    return extend::error(ErrorCode::corrupt, "manifest: a prefix that names a prefix");
  if (!body.tokens.empty() && body.tokens.size() != tokens) {
    return extend::error(ErrorCode::token_count_mismatch, "manifest: ", body.tokens.size(),
                         " token ids for ", tokens, " tokens");
  }
  if (chunk_bytes == 0 || chunk_bytes > max_chunk_bytes) {
    return extend::error(ErrorCode::oversized, "manifest: chunks of ", chunk_bytes,
                         " bytes are not in [1, ", max_chunk_bytes, "]");
  }
  if (payloads == 0 || payloads > 2)
    return extend::error(ErrorCode::corrupt, "manifest: ", payloads,
                         " payloads; a fragment has 1 or 2");
  out.chunk_bytes = static_cast<std::size_t>(chunk_bytes);
  for (std::size_t p = 0; p < payloads; ++p) {
    Payload payload;
    const std::uint64_t declared = read_payload(r, tokens, geometry->layers.size(), payload);
    KVMELD_TRY(r.status("manifest"));
    KVMELD_TRY(lay_out(*geometry, payload, limits.max_payload_bytes));
    if (declared != payload.byte_count) {
      return extend::error(ErrorCode::corrupt, "manifest: payload ", p, " declares ", declared,
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
[[nodiscard]] inline Result<Manifest> make_manifest(const Fragment& fragment,
                                                    std::size_t chunk_bytes = default_chunk_bytes,
                                                    const SetHash& hash = {}) {
  if (!fragment.valid())
    return extend::error(ErrorCode::invalid_argument, "an empty Fragment has no manifest");
  if (fragment.id().tag() != hash.tag) {
    return extend::error(ErrorCode::hash_mismatch, "fragment named by hash ", fragment.id().tag(),
                         ", chunks by ", hash.tag);
  }
  if (chunk_bytes == 0 || chunk_bytes > max_chunk_bytes) {
    return extend::error(ErrorCode::invalid_argument, "chunks of ", chunk_bytes,
                         " bytes are not in [1, ", max_chunk_bytes, "]");
  }
  Manifest out;
  out.chunk_bytes = chunk_bytes;
  auto body = std::make_shared<Fragment::Body>(*fragment.body());
  for (std::size_t p = 0; p < body->payloads.size(); ++p) {
    Payload& payload = body->payloads[p];
    if (payload.bytes == nullptr) {
      return extend::error(ErrorCode::payload_missing, "payload ", p, " of fragment ",
                           fragment.id().hex(), " is evicted; its chunks cannot be named");
    }
    std::vector<BlobKey>& keys = out.chunks.emplace_back();
    for (std::size_t c = 0, n = chunk_count(payload.byte_count, chunk_bytes); c < n; ++c) {
      keys.push_back(chunk_key(raw_chunk(payload, c, chunk_bytes), hash));
    }
    payload.bytes = nullptr;
  }
  out.fragment = Fragment(std::move(body));
  return out;
}

/// The bytes of a manifest (docs/wire.md), ending in a checksum against accidents. O(tokens +
/// layers + chunks).
[[nodiscard]] inline std::vector<std::byte> encode_manifest(const Manifest& manifest) {
  const Fragment::Body& body = *manifest.fragment.body();
  extend::ByteWriter w;
  w.value(detail::manifest_magic);
  w.value(detail::manifest_version);
  w.value(std::uint8_t{0});  // flags
  w.bytes(std::as_bytes(std::span(body.id.bytes)));
  w.value(body.role);
  w.bytes(std::as_bytes(std::span(body.prefix.bytes)));
  w.varint(static_cast<std::uint64_t>(body.token_count));
  w.values(std::span<const TokenId>(body.tokens));
  extend::write_geometry(w, *body.geometry);
  w.varint(manifest.chunk_bytes);
  w.value(static_cast<std::uint8_t>(body.payloads.size()));
  for (std::size_t p = 0; p < body.payloads.size(); ++p)
    write_payload(w, body.payloads[p], manifest.chunks[p]);
  w.value(detail::accident_sum(w.written()));
  return w.take();
}

/// `make_manifest` and its bytes in one step.
[[nodiscard]] inline Result<std::vector<std::byte>> encode_manifest(
    const Fragment& fragment, std::size_t chunk_bytes = default_chunk_bytes,
    const SetHash& hash = {}) {
  const auto manifest = make_manifest(fragment, chunk_bytes, hash);
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
[[nodiscard]] inline Result<Manifest> decode_manifest(
    std::span<const std::byte> bytes, const ManifestLimits& limits = {}, const SetHash& hash = {},
    const std::shared_ptr<const Geometry>& known = {}) {
  using extend::error;
  extend::ByteReader head(bytes);
  const auto magic = head.value<std::uint32_t>();
  const auto version = head.value<std::uint8_t>();
  const auto flags = head.value<std::uint8_t>();
  KVMELD_TRY(head.status("manifest"));
  if (magic != detail::manifest_magic)
    return extend::error(ErrorCode::corrupt, "manifest: starts with ", magic, ", not with KVMM");
  if (version != detail::manifest_version) {
    return extend::error(ErrorCode::version_mismatch, "manifest of version ", version,
                         "; this build reads version ", detail::manifest_version);
  }
  if (flags != 0)
    return extend::error(ErrorCode::unknown_field, "manifest: flags ", flags,
                         " are unknown to this build");
  if (head.remaining() < 8)
    return extend::error(ErrorCode::truncated, "manifest: ", bytes.size(),
                         " bytes hold no checksum");
  extend::ByteReader sum(bytes.last(8));
  if (sum.value<std::uint64_t>() != detail::accident_sum(bytes.first(bytes.size() - 8))) {
    return extend::error(ErrorCode::corrupt, "manifest: checksum of its ", bytes.size(),
                         " bytes differs");
  }
  extend::ByteReader r(bytes.subspan(head.offset(), head.remaining() - 8));
  Manifest out;
  auto body = std::make_shared<Fragment::Body>();
  KVMELD_TRY(detail::read_manifest(r, *body, out, limits));
  if (body->id.tag() != hash.tag)
    return extend::error(ErrorCode::hash_mismatch, "manifest named by hash ", body->id.tag(),
                         ", read by ", hash.tag);
  if (const FragmentId id = extend::fragment_id(hash, *body); id != body->id) {
    return extend::error(ErrorCode::id_mismatch, "the manifest claims id ", body->id.hex(),
                         ", its fields have ", id.hex());
  }
  if (known != nullptr && *known == *body->geometry) body->geometry = known;
  out.fragment = Fragment(std::move(body));
  return out;
}

/// Puts a fragment together from its manifest and chunks that come in any order, from anyone, and
/// more than once.
///
/// A chunk is verified by its key before it counts, the whole payload by its digest before it is
/// given out. A wrong chunk changes nothing. Memory follows what arrived, not what the manifest
/// announces: each chunk that came is held once, however often the payload names it (`held_bytes`),
/// beside the manifest and some 64 bytes for each chunk that it names. Only `finish` takes the
/// payload's bytes, and gives back each chunk's behind its last copy.
class Assembler {
 public:
  /// @param manifest as `decode_manifest` gave it.
  /// @param only     the one payload that is wanted; none: all.
  /// @param hash     the content hash that named the fragment.
  explicit Assembler(Manifest manifest, std::optional<std::size_t> only = {},
                     const SetHash& hash = {})
      : manifest_(std::move(manifest)), hash_(hash) {
    const auto payloads = manifest_.fragment.payloads();
    for (std::size_t p = 0; p < payloads.size(); ++p) {
      wanted_.push_back(!only.has_value() || *only == p);
      for (std::size_t c = 0; wanted_[p] && c < manifest_.chunks[p].size(); ++c) {
        chunks_.push_back({manifest_.chunks[p][c], size_of(p, c)});
      }
    }
    std::sort(chunks_.begin(), chunks_.end(), Chunk::before);
    chunks_.erase(std::unique(chunks_.begin(), chunks_.end(), Chunk::same), chunks_.end());
    left_ = chunks_.size();
    for (std::size_t p = 0; p < payloads.size(); ++p) {
      for (std::size_t c = 0; wanted_[p] && c < manifest_.chunks[p].size(); ++c) ++chunk(p, c).uses;
    }
  }

  [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }
  /// Whether every wanted chunk is there.
  [[nodiscard]] bool complete() const noexcept { return left_ == 0; }
  /// Chunks that are still wanted; one that occurs twice counts once.
  [[nodiscard]] std::size_t left() const noexcept { return left_; }
  /// Raw bytes of the chunks that came and wait for the others.
  [[nodiscard]] std::uint64_t held_bytes() const noexcept { return held_bytes_; }
  /// What `held_bytes` would grow by with this chunk: 0 for one that is there already or belongs to
  /// another fragment. O(log chunks).
  [[nodiscard]] std::size_t bytes_of(const BlobKey& key) const noexcept {
    const auto at = first_of(key);
    return at == chunks_.end() || at->raw != nullptr ? 0 : at->bytes;
  }
  /// Keys of the first `limit` chunks that are still wanted, ascending. O(chunks).
  [[nodiscard]] std::vector<BlobKey> missing(std::size_t limit = ~std::size_t{0}) const {
    std::vector<BlobKey> out;
    for (auto at = chunks_.begin(); at != chunks_.end() && out.size() < limit; ++at) {
      if (at->raw == nullptr) out.push_back(at->key);
    }
    return out;
  }

  /// Takes a stored chunk. True: it was wanted; false: it was there already, or belongs to another
  /// fragment. O(log chunks + bytes).
  ///
  /// Errors: those of `decode_chunk`; the assembler is then as it was, and the chunk still wanted.
  [[nodiscard]] Result<bool> add(const BlobKey& key, std::span<const std::byte> stored,
                                 const Compressor* compressor = nullptr) {
    const auto found = first_of(key);
    if (found == chunks_.end()) return false;
    Chunk& chunk = chunks_[static_cast<std::size_t>(found - chunks_.cbegin())];
    if (chunk.raw != nullptr) return false;
    const auto opened = detail::open_chunk(stored, max_chunk_bytes);
    if (!opened) return opened.error();
    if (opened->raw_bytes != chunk.bytes) {
      return extend::error(ErrorCode::corrupt, "a chunk declares ", opened->raw_bytes,
                           " raw bytes where its fragment has ", chunk.bytes);
    }
    std::unique_ptr<std::byte[]> raw(new std::byte[chunk.bytes]);
    const std::span<std::byte> place(raw.get(), chunk.bytes);
    KVMELD_TRY(detail::unpack_chunk(*opened, key, place, compressor, hash_));
    chunk.raw = std::move(raw);
    held_bytes_ += chunk.bytes;
    --left_;
    return true;
  }

  /// The fragment, its wanted payloads verified against the digests that its id names, once: what
  /// was held goes into it, or is gone behind `id_mismatch`. O(bytes).
  ///
  /// Errors: `payload_missing` with the number of chunks that lack; `id_mismatch` where the
  /// manifest's positions, token sets or chunk list are not the fragment's: drop the manifest and
  /// ask somebody else; `invalid_argument` for a second time.
  [[nodiscard]] Result<Fragment> finish() {
    const Fragment& named = manifest_.fragment;
    if (!complete()) {
      return extend::error(ErrorCode::payload_missing, left_, " chunks of fragment ",
                           named.id().hex(), " are not there yet");
    }
    if (std::exchange(given_, true)) {
      return extend::error(ErrorCode::invalid_argument, "fragment ", named.id().hex(),
                           " was given out already, and its chunks with it");
    }
    auto body = std::make_shared<Fragment::Body>(*named.body());
    for (std::size_t p = 0; p < wanted_.size(); ++p) {
      if (!wanted_[p]) continue;
      Payload& payload = body->payloads[p];
      payload.bytes = joined(p, payload.byte_count);
      if (extend::payload_digest(hash_, payload) != payload.digest) {
        return extend::error(ErrorCode::id_mismatch, "payload ", p, " of fragment ",
                             named.id().hex(), ": its ", payload.byte_count,
                             " bytes, positions and token sets do not hash to its digest");
      }
    }
    return Fragment(std::move(body));
  }

 private:
  /// Raw bytes that were verified by their key, or not yet here.
  struct Chunk {
    BlobKey key;
    std::size_t bytes = 0;
    std::size_t uses = 0;  // places that have not got their copy
    std::unique_ptr<std::byte[]> raw{};

    // One key of two sizes is a lie: only one of the two is ever filled.
    [[nodiscard]] static bool before(const Chunk& a, const Chunk& b) noexcept {
      return a.key != b.key ? a.key < b.key : a.bytes < b.bytes;
    }
    [[nodiscard]] static bool same(const Chunk& a, const Chunk& b) noexcept {
      return a.key == b.key && a.bytes == b.bytes;
    }
  };

  [[nodiscard]] std::size_t size_of(std::size_t p, std::size_t c) const noexcept {
    return chunk_size(manifest_.fragment.payloads()[p].byte_count, c, manifest_.chunk_bytes);
  }
  [[nodiscard]] std::vector<Chunk>::const_iterator first_of(const BlobKey& key) const noexcept {
    const auto at = std::lower_bound(chunks_.begin(), chunks_.end(), key,
                                     [](const Chunk& c, const BlobKey& k) { return c.key < k; });
    return at == chunks_.end() || at->key != key ? chunks_.end() : at;
  }
  [[nodiscard]] Chunk& chunk(std::size_t p, std::size_t c) noexcept {
    const Chunk wanted{manifest_.chunks[p][c], size_of(p, c)};
    return *std::lower_bound(chunks_.begin(), chunks_.end(), wanted, Chunk::before);
  }
  /// A payload's bytes, never null: null means evicted. One chunk that is all of it is handed over.
  [[nodiscard]] std::shared_ptr<const std::byte[]> joined(std::size_t p, std::size_t byte_count) {
    const std::size_t count = manifest_.chunks[p].size();
    if (count == 1 && chunk(p, 0).uses == 1) {
      held_bytes_ -= byte_count;
      return std::shared_ptr<const std::byte[]>(std::move(chunk(p, 0).raw));
    }
    std::shared_ptr<std::byte[]> out(new std::byte[byte_count == 0 ? 1 : byte_count]);
    for (std::size_t c = 0; c < count; ++c) {
      Chunk& from = chunk(p, c);
      std::memcpy(out.get() + c * manifest_.chunk_bytes, from.raw.get(), from.bytes);
      if (--from.uses > 0) continue;
      from.raw.reset();
      held_bytes_ -= from.bytes;
    }
    return out;
  }

  Manifest manifest_;
  SetHash hash_;
  std::vector<bool> wanted_;   // (payloads)
  std::vector<Chunk> chunks_;  // each once, by key
  std::size_t left_ = 0;
  std::uint64_t held_bytes_ = 0;
  bool given_ = false;
};

namespace detail {

inline constexpr std::uint8_t set_version = 1;

/// Bytes of an id that say something: an XXH3-128 id ends in 15 zeros.
[[nodiscard]] constexpr std::size_t id_bytes(std::uint8_t tag) noexcept {
  return tag == Xxh3_128::tag ? 17 : 32;
}

inline void write_id(extend::ByteWriter& w, std::uint8_t tag, const FragmentId& id) {
  w.bytes(std::as_bytes(std::span(id.bytes)).first(id_bytes(tag)));
}

[[nodiscard]] inline FragmentId read_id(extend::ByteReader& r, std::uint8_t tag) {
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
  void write(extend::ByteWriter& w) const {
    w.varint(all_.size());
    for (const auto& [agent, epoch] : all_) {
      w.value(agent);
      w.value(epoch);
    }
  }
  void read(extend::ByteReader& r) {
    for (std::size_t n = r.count(16); n > 0 && r.ok(); --n) {
      const auto agent = r.value<std::uint64_t>();
      all_.emplace_back(agent, r.value<std::uint64_t>());
    }
    if (!std::is_sorted(all_.begin(), all_.end())) r.fail(ErrorCode::corrupt);
  }
  void write_line(extend::ByteWriter& w, std::uint64_t agent, std::uint64_t epoch) const {
    const auto at = std::lower_bound(all_.begin(), all_.end(), std::pair(agent, epoch));
    w.varint(static_cast<std::uint64_t>(at - all_.begin()));
  }
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> read_line(extend::ByteReader& r) const {
    const std::uint64_t i = r.varint();
    if (r.ok() && i >= all_.size()) r.fail(ErrorCode::corrupt);
    return r.ok() ? all_[static_cast<std::size_t>(i)] : std::pair<std::uint64_t, std::uint64_t>{};
  }
  void write_dot(extend::ByteWriter& w, const Dot& dot) const {
    write_line(w, dot.agent, dot.epoch);
    w.varint(dot.sequence);
  }
  [[nodiscard]] Dot read_dot(extend::ByteReader& r) const {
    const auto [agent, epoch] = read_line(r);
    return {agent, r.varint(), epoch};
  }

 private:
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all_;
};

inline void add_lines(Lines& lines, const CausalContext& context) {
  for (const DotRange& range : context.ranges()) lines.add(range.agent, range.epoch);
}
inline void write_ranges(extend::ByteWriter& w, const Lines& lines, const CausalContext& context) {
  w.varint(context.ranges().size());
  for (const DotRange& range : context.ranges()) {
    lines.write_line(w, range.agent, range.epoch);
    w.varint(range.first);
    w.varint(range.last - range.first);
  }
}
/// In memory they take eleven times their bytes, so that there are `max_ranges` at most, or none.
[[nodiscard]] inline CausalContext read_ranges(extend::ByteReader& r, const Lines& lines,
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
inline void write_context(extend::ByteWriter& w, const CausalContext& context) {
  detail::Lines lines;
  detail::add_lines(lines, context);
  lines.seal();
  lines.write(w);
  detail::write_ranges(w, lines, context);
}
/// Fails with `oversized` for more than `max_ranges`.
[[nodiscard]] inline CausalContext read_context(extend::ByteReader& r,
                                                std::size_t max_ranges = default_max_ranges) {
  detail::Lines lines;
  lines.read(r);
  return detail::read_ranges(r, lines, max_ranges);
}

/// The bytes of a set without its payloads: ids, marks, removals, and what was compacted away.
/// About 20 bytes an entry for XXH3 ids, the same bytes for the same set and log. O(n).
[[nodiscard]] inline std::vector<std::byte> encode_set(const FragmentSet& set) {
  const std::uint8_t tag = set.hash().tag;
  detail::Lines lines;
  for (const FragmentSet::Entry& entry : set.entries()) {
    for (const Mark& mark : entry.metadata.marks) lines.add(mark.dot.agent, mark.dot.epoch);
  }
  for (const Removal& removal : set.removals()) {
    lines.add(removal.dot.agent, removal.dot.epoch);
    for (const Dot& dot : removal.removed) lines.add(dot.agent, dot.epoch);
  }
  detail::add_lines(lines, set.compacted());
  lines.seal();
  extend::ByteWriter w;
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
    for (const Dot& dot : removal.removed) lines.write_dot(w, dot);
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
[[nodiscard]] inline Result<FragmentSet> decode_set(std::span<const std::byte> bytes,
                                                    const SetHash& hash = {}) {
  extend::ByteReader r(bytes);
  const auto version = r.value<std::uint8_t>();
  const auto tag = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("set"));
  if (version != detail::set_version)
    return extend::error(ErrorCode::version_mismatch, "set of version ", version,
                         ", this build reads version ", detail::set_version);
  if (tag != hash.tag)
    return extend::error(ErrorCode::hash_mismatch, "set of hash tag ", tag, ", this replica's is ",
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
  extend::ByteWriter w;
  w.reserve(set.size() + sizeof sum);
  w.bytes(set);
  w.value(sum);
  return w.take();
}
/// The set in a store's record. Errors: `truncated`, `corrupt`, those of `decode_set`.
[[nodiscard]] inline Result<FragmentSet> decode_record(std::span<const std::byte> record,
                                                       const SetHash& hash = {}) {
  if (record.size() < sizeof(std::uint64_t))
    return extend::error(ErrorCode::truncated, "a record of ", record.size(), " bytes");
  const auto set = record.first(record.size() - sizeof(std::uint64_t));
  extend::ByteReader r(record.last(sizeof(std::uint64_t)));
  if (r.value<std::uint64_t>() != XXH3_64bits(set.data(), set.size())) {
    return extend::error(ErrorCode::corrupt, "record: checksum of its ", record.size(),
                         " bytes differs");
  }
  return decode_set(set, hash);
}

/// One entry of a replicated set, as far as finding differences needs it.
struct ReconcileItem {
  FragmentId id{};
  /// 64 bits of a digest of all that replicas must agree on; equal ids with other tags differ.
  std::uint64_t tag = 0;
};

/// What a session takes from its peer, and how it cuts what it sends.
struct ReconcileLimits {
  std::uint64_t items = std::uint64_t{1} << 24U;  ///< largest set that a peer may announce
  /// About the largest message to send; sets that need more take more rounds.
  std::size_t message_bytes = std::size_t{1} << 22U;
};

/// Ids whose entries differ between two replicas, each list ascending.
struct ReconcileDifference {
  std::vector<FragmentId> mine_only{};
  std::vector<FragmentId> theirs_only{};
  std::vector<FragmentId> different{};  ///< on both sides, with different tags
};

/// What follows from one received message.
struct ReconcileReply {
  std::optional<std::vector<std::byte>> message{};  ///< to be sent to the peer
  bool done = false;  ///< `Reconciliation::result` is complete; the message, if any, is the last
};

}  // namespace replica

KVMELD_NAMESPACE_END
