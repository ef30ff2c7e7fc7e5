#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/manifest.hpp>

KVMELD_NAMESPACE_BEGIN

/// Puts a fragment together from its manifest and chunks that come in any order, from anyone, and more than once.
///
/// A chunk is verified by its key before it counts, the whole payload by its digest before it is given out. A wrong chunk changes
/// nothing. Memory: the payload, allocated with its first chunk, and one byte a chunk.
/// @tparam Hash the content hash that named the fragment.
template <ContentHash Hash = Xxh3_128>
class Assembler {
 public:
  /// @param manifest as `decode_manifest` gave it.
  /// @param only     the one payload that is wanted; none: all.
  explicit Assembler(Manifest manifest, std::optional<std::size_t> only = {}) : manifest_(std::move(manifest)) {
    const auto payloads = manifest_.fragment.payloads();
    for (std::size_t p = 0; p < payloads.size(); ++p) {
      const bool wanted = !only.has_value() || *only == p;
      there_.emplace_back(wanted ? manifest_.chunks[p].size() : 0, std::uint8_t{0});
      wanted_.push_back(wanted);
      left_ += there_.back().size();
    }
    storage_.resize(payloads.size());
  }

  [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }
  /// Whether every wanted chunk is there.
  [[nodiscard]] bool complete() const noexcept { return left_ == 0; }
  /// Chunks that are still wanted; one that occurs twice counts twice.
  [[nodiscard]] std::size_t left() const noexcept { return left_; }
  /// Keys of the first `limit` chunks that are still wanted. O(chunks).
  [[nodiscard]] std::vector<BlobKey> missing(std::size_t limit = ~std::size_t{0}) const {
    std::vector<BlobKey> out;
    for (std::size_t p = 0; p < there_.size(); ++p) {
      for (std::size_t c = 0; c < there_[p].size() && out.size() < limit; ++c) {
        if (there_[p][c] == 0) out.push_back(manifest_.chunks[p][c]);
      }
    }
    return out;
  }

  /// Takes a stored chunk. True: it was wanted; false: it was there already, or belongs to another fragment. O(chunks + bytes).
  ///
  /// Errors: those of `decode_chunk`; the assembler is then as it was, and the chunk still wanted.
  template <Compressor C = NoCompression>
  [[nodiscard]] Result<bool> add(const BlobKey& key, std::span<const std::byte> stored, const C& compressor = {}) {
    std::span<const std::byte> verified;
    for (std::size_t p = 0; p < there_.size(); ++p) {
      for (std::size_t c = 0; c < there_[p].size(); ++c) {
        if (there_[p][c] != 0 || manifest_.chunks[p][c] != key) continue;
        const std::size_t bytes = chunk_size(manifest_.fragment.payloads()[p].byte_count, c, manifest_.chunk_bytes);
        std::span<std::byte> place(storage(p) + c * manifest_.chunk_bytes, bytes);
        if (verified.empty()) {
          const auto chunk = detail::open_chunk(stored, max_chunk_bytes);
          if (!chunk) return chunk.error();
          if (chunk->raw_bytes != bytes) {
            return detail::error(ErrorCode::corrupt, "a chunk declares ", chunk->raw_bytes, " raw bytes where its fragment has ", bytes);
          }
          KVMELD_TRY((detail::unpack_chunk<Hash>(*chunk, key, place, compressor)));
          verified = place;
        } else if (verified.size() == bytes) {
          std::memcpy(place.data(), verified.data(), bytes);
        } else {
          continue;  // one key for two sizes: the manifest lies, and this place is never filled
        }
        there_[p][c] = 1;
        --left_;
      }
    }
    return !verified.empty();
  }

  /// The fragment, its wanted payloads verified against the digests that its id names. O(bytes).
  ///
  /// Errors: `payload_missing` with the number of chunks that lack; `id_mismatch` where the manifest's positions, token sets or chunk list
  /// are not the fragment's: drop the manifest and ask somebody else.
  [[nodiscard]] Result<Fragment> finish() {
    const Fragment& named = manifest_.fragment;
    if (!complete()) {
      return detail::error(ErrorCode::payload_missing, left_, " chunks of fragment ", named.id().hex(), " are not there yet");
    }
    auto body = std::make_shared<Fragment::Body>(*named.body());
    for (std::size_t p = 0; p < wanted_.size(); ++p) {
      if (!wanted_[p]) continue;
      Payload& payload = body->payloads[p];
      (void)storage(p);
      payload.bytes = storage_[p];
      if (detail::payload_digest<Hash>(payload) != payload.digest) {
        return detail::error(ErrorCode::id_mismatch, "payload ", p, " of fragment ", named.id().hex(), ": its ", payload.byte_count,
                             " bytes, positions and token sets do not hash to its digest");
      }
    }
    return Fragment(std::move(body));
  }

 private:
  [[nodiscard]] std::byte* storage(std::size_t p) {
    if (storage_[p] == nullptr) {
      const std::size_t bytes = manifest_.fragment.payloads()[p].byte_count;
      storage_[p] = std::shared_ptr<std::byte[]>(new std::byte[bytes == 0 ? 1 : bytes]);  // never null: null means evicted
    }
    return storage_[p].get();
  }

  Manifest manifest_;
  std::vector<std::vector<std::uint8_t>> there_;  // (payloads) (chunks), empty for payloads that are not wanted
  std::vector<bool> wanted_;                      // (payloads)
  std::vector<std::shared_ptr<std::byte[]>> storage_;
  std::size_t left_ = 0;
};

KVMELD_NAMESPACE_END
