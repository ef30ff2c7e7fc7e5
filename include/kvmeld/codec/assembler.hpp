#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/manifest.hpp>

KVMELD_NAMESPACE_BEGIN

/// Puts a fragment together from its manifest and chunks that come in any order, from anyone, and
/// more than once.
///
/// A chunk is verified by its key before it counts, the whole payload by its digest before it is
/// given out. A wrong chunk changes nothing. Memory follows what arrived, not what the manifest
/// announces: each chunk that came is held once, however often the payload names it (`held_bytes`),
/// beside the manifest and some 64 bytes for each chunk that it names. Only `finish` takes the
/// payload's bytes, and gives back each chunk's behind its last copy.
/// @tparam Hash the content hash that named the fragment.
template <ContentHash Hash = Xxh3_128>
class Assembler {
 public:
  /// @param manifest as `decode_manifest` gave it.
  /// @param only     the one payload that is wanted; none: all.
  explicit Assembler(Manifest manifest, std::optional<std::size_t> only = {})
      : manifest_(std::move(manifest)) {
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
  template <Compressor C = NoCompression>
  [[nodiscard]] Result<bool> add(const BlobKey& key, std::span<const std::byte> stored,
                                 const C& compressor = {}) {
    const auto found = first_of(key);
    if (found == chunks_.end()) return false;
    Chunk& chunk = chunks_[static_cast<std::size_t>(found - chunks_.cbegin())];
    if (chunk.raw != nullptr) return false;
    const auto opened = detail::open_chunk(stored, max_chunk_bytes);
    if (!opened) return opened.error();
    if (opened->raw_bytes != chunk.bytes) {
      return detail::error(ErrorCode::corrupt, "a chunk declares ", opened->raw_bytes,
                           " raw bytes where its fragment has ", chunk.bytes);
    }
    std::unique_ptr<std::byte[]> raw(new std::byte[chunk.bytes]);
    const std::span<std::byte> place(raw.get(), chunk.bytes);
    KVMELD_TRY((detail::unpack_chunk<Hash>(*opened, key, place, compressor)));
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
      return detail::error(ErrorCode::payload_missing, left_, " chunks of fragment ",
                           named.id().hex(), " are not there yet");
    }
    if (std::exchange(given_, true)) {
      return detail::error(ErrorCode::invalid_argument, "fragment ", named.id().hex(),
                           " was given out already, and its chunks with it");
    }
    auto body = std::make_shared<Fragment::Body>(*named.body());
    for (std::size_t p = 0; p < wanted_.size(); ++p) {
      if (!wanted_[p]) continue;
      Payload& payload = body->payloads[p];
      payload.bytes = joined(p, payload.byte_count);
      if (detail::payload_digest<Hash>(payload) != payload.digest) {
        return detail::error(ErrorCode::id_mismatch, "payload ", p, " of fragment ",
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
  [[nodiscard]] auto first_of(const BlobKey& key) const noexcept {
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
  std::vector<bool> wanted_;   // (payloads)
  std::vector<Chunk> chunks_;  // each once, by key
  std::size_t left_ = 0;
  std::uint64_t held_bytes_ = 0;
  bool given_ = false;
};

KVMELD_NAMESPACE_END
