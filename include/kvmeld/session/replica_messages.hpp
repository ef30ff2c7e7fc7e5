#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/blob_key.hpp>
#include <kvmeld/codec/frame.hpp>
#include <kvmeld/session/identity.hpp>
#include <kvmeld/session/set_codec.hpp>
#include <kvmeld/session/transport.hpp>

KVMELD_NAMESPACE_BEGIN

/// Types of the frames that replicas exchange; those from `application` on are the caller's. Each
/// begins with the digest of its sender's merger, so that whoever hears one word knows whether both
/// make the same cache of the same set.
enum class ReplicaMessage : std::uint8_t {
  news = 1,   ///< which life I am in, and what I have seen: context, digest of the set
  want = 2,   ///< send me what this context lacks
  delta = 3,  ///< a part of the set, to be joined
  fetch = 4,  ///< send me the manifest, or these chunks, of this fragment
  manifest = 5,
  chunk = 6,
  lacking = 7,  ///< I cannot serve that fragment
  application = 32,
};

/// A message to be sent.
struct Outgoing {
  MemberId to = everyone;
  std::uint8_t type = 0;
  std::vector<std::byte> bytes{};
};

namespace detail {

/// What every message between replicas begins with, and the rest of it.
struct ReplicaBody {
  MergerDigest merger = does_not_render;
  std::span<const std::byte> rest;
};

[[nodiscard]] inline std::vector<std::byte> encode_body(const MergerDigest& merger,
                                                        std::span<const std::byte> rest) {
  ByteWriter w;
  w.reserve(2 * sizeof(std::uint64_t) + rest.size());
  w.value(merger.digest().low);
  w.value(merger.digest().high);
  w.bytes(rest);
  return w.take();
}
[[nodiscard]] inline Result<ReplicaBody> decode_body(std::span<const std::byte> body) {
  ByteReader r(body);
  Digest128 merger;
  merger.low = r.value<std::uint64_t>();
  merger.high = r.value<std::uint64_t>();
  const auto rest = r.bytes(r.remaining());
  KVMELD_TRY(r.finish("message between replicas"));
  return ReplicaBody{merger, rest};
}

struct News {
  CausalContext context;
  Digest256 digest;
  std::uint64_t epoch = 0;  ///< the sender's
};

[[nodiscard]] inline std::vector<std::byte> encode(const News& news) {
  ByteWriter w;
  w.value(news.epoch);
  for (const std::uint64_t word : news.digest.words) w.value(word);
  write_context(w, news.context);
  return w.take();
}
[[nodiscard]] inline Result<News> decode_news(std::span<const std::byte> body,
                                              std::size_t max_ranges = default_max_ranges) {
  ByteReader r(body);
  News news;
  news.epoch = r.value<std::uint64_t>();
  for (std::uint64_t& word : news.digest.words) word = r.value<std::uint64_t>();
  news.context = read_context(r, max_ranges);
  KVMELD_TRY(r.finish("news"));
  return news;
}

/// Asks for a fragment: for its manifest, or for some of its chunks.
struct Fetch {
  FragmentId id;
  std::vector<BlobKey> chunks;  ///< empty: the manifest

  static constexpr std::size_t max_chunks = 16;
};

[[nodiscard]] inline std::vector<std::byte> encode(const Fetch& fetch) {
  ByteWriter w;
  w.bytes(std::as_bytes(std::span(fetch.id.bytes)));
  w.varint(fetch.chunks.size());
  for (const BlobKey& key : fetch.chunks) w.bytes(std::as_bytes(std::span(key.bytes)));
  return w.take();
}
template <class Key>
[[nodiscard]] Key read_key(ByteReader& r) {
  Key key;
  const auto from = r.bytes(32);
  if (!from.empty()) std::memcpy(key.bytes.data(), from.data(), 32);
  return key;
}
[[nodiscard]] inline Result<Fetch> decode_fetch(std::span<const std::byte> body) {
  ByteReader r(body);
  Fetch fetch{read_key<FragmentId>(r), {}};
  const std::size_t n = r.count(32);
  if (n > Fetch::max_chunks)
    return error(ErrorCode::oversized, "fetch of ", n, " chunks where at most ", Fetch::max_chunks,
                 " go into one");
  for (std::size_t i = 0; i < n; ++i) fetch.chunks.push_back(read_key<BlobKey>(r));
  KVMELD_TRY(r.finish("fetch"));
  return fetch;
}

/// A manifest, or a chunk in its stored form, behind the fragment and the key that it answers for.
struct Piece {
  FragmentId id;
  BlobKey key;
  std::span<const std::byte> bytes;
};

[[nodiscard]] inline std::vector<std::byte> encode(const Piece& piece) {
  ByteWriter w;
  w.reserve(64 + piece.bytes.size());
  w.bytes(std::as_bytes(std::span(piece.id.bytes)));
  w.bytes(std::as_bytes(std::span(piece.key.bytes)));
  w.bytes(piece.bytes);
  return w.take();
}
[[nodiscard]] inline Result<Piece> decode_piece(std::span<const std::byte> body) {
  ByteReader r(body);
  Piece piece{read_key<FragmentId>(r), read_key<BlobKey>(r), {}};
  piece.bytes = r.bytes(r.remaining());
  KVMELD_TRY(r.finish("piece"));
  return piece;
}

/// Cuts a delta into sets of at most so many entries and removals, each of which can be joined
/// alone.
KVMELD_LAZY [[nodiscard]] std::vector<FragmentSet> cut(const FragmentSet& delta, std::size_t most) {
  if (delta.size() + delta.removals().size() <= most) return {delta};
  std::vector<FragmentSet> out;
  std::vector<FragmentSet::Entry> entries;
  std::vector<Removal> removals;
  const auto flush = [&](const CausalContext& compacted) {
    if (auto part = FragmentSet::from_parts(delta.hash(), std::exchange(entries, {}),
                                            std::exchange(removals, {}), compacted))
      out.push_back(*std::move(part));
  };
  for (const FragmentSet::Entry& entry : delta.entries()) {
    entries.push_back(entry);
    if (entries.size() == most) flush({});
  }
  for (const Removal& removal : delta.removals()) {
    removals.push_back(removal);
    if (entries.size() + removals.size() >= most) flush({});
  }
  flush(delta.compacted());
  return out;
}

}  // namespace detail

/// A frame as replicas exchange them, for whoever speaks to one without being one.
///
/// Errors: those of `encode_frame`.
template <Authenticator Auth = NoAuth>
[[nodiscard]] Result<std::vector<std::byte>> encode_replica_frame(
    ReplicaMessage type, const MergerDigest& merger, std::span<const std::byte> rest,
    const FrameOptions<Auth>& options = {}) {
  return encode_frame(static_cast<std::uint8_t>(type), detail::encode_body(merger, rest), options);
}

KVMELD_NAMESPACE_END
