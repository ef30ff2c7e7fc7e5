#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/anchor/anchor.hpp>
#include <kvmeld/anchor/signature.hpp>
#include <kvmeld/codec/blob_key.hpp>
#include <kvmeld/state/set_digest.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Who may tell each other of anchors: engines of one model, tokenizer, layout and tenant whose
/// bases stood behind one context and whose pools sign segments alike.
template <SignaturePolicy Signature>
[[nodiscard]] Digest128 anchor_namespace(const AnchorSpace& space, const Signature& signature) {
  Hasher hasher;
  hasher.text("kvmeld.anchor.namespace");
  hasher.text(space.model);
  hasher.text(space.tokenizer);
  hasher.value(space.layout.low);
  hasher.value(space.layout.high);
  hasher.text(space.tenant);
  hasher.bytes(std::as_bytes(std::span(space.base.prefix.bytes)));
  hasher.value(space.base.lead_in.low);
  hasher.value(space.base.lead_in.high);
  signature.digest(hasher);
  return hasher.digest();
}

/// The digest by which exact look-ups compare texts; zero for no tokens.
KVMELD_LAZY [[nodiscard]] Digest128 text_digest(std::span<const TokenId> tokens) {
  if (tokens.empty()) return {};
  Hasher hasher;
  hasher.text("kvmeld.anchor.text");
  hasher.values(tokens);
  return hasher.digest();
}

/// Of a segment's tokens; zero where ids do not tell what they are (latent, placeholders), which no
/// text equals.
KVMELD_LAZY [[nodiscard]] Digest128 text_digest(const Fragment& base) {
  return base.told_by_ids() ? text_digest(base.tokens()) : Digest128{};
}

/// What peers tell each other of an anchor in one context: whether it would serve, and where its
/// K/V is. No K/V.
struct AnchorRecord {
  FragmentId id{};  ///< `Anchor::id`
  /// Of its Δ, which names prefix, agent and slot (`place_digest`); zero: the base alone.
  Digest128 context{};
  Digest128 text{};             ///< `text_digest`
  std::uint64_t signature = 0;  ///< of the segment, by the namespace's policy
  std::int64_t tokens = 0;
  std::uint64_t bytes = 0;  ///< of K/V that a pull moves
  BlobKey payload{};        ///< of the blob that lists the K/V's chunks: it vouches for every byte
  std::uint64_t owner = 0;  ///< the member that wrote this version, and then held the bytes
  std::uint64_t version = 0;  ///< from 1; one more than the version that it replaces
  bool approximate = false;   ///< the K/V was blended itself: never an exact answer
  bool removed = false;  ///< a tombstone; it has id, context, owner and version, the rest is zero

  bool operator==(const AnchorRecord&) const = default;
};

inline constexpr std::uint64_t max_record_version = std::uint64_t{1} << 48U;
/// Of K/V that a record may name.
inline constexpr std::uint64_t max_anchor_bytes = std::uint64_t{1} << 48U;

/// What a directory keeps a record under: one for each anchor and context, so that offsets measured
/// by two members stand side by side.
[[nodiscard]] inline FragmentId record_key(const FragmentId& id, const Digest128& context) {
  Hasher hasher;
  hasher.text("kvmeld.anchor.record");
  hasher.bytes(std::as_bytes(std::span(id.bytes)));
  hasher.value(context.low);
  hasher.value(context.high);
  FragmentId key;
  key.bytes[0] = Xxh3_128::tag;
  const auto rest = hasher.hash().finish();
  std::copy(rest.begin(), rest.end(), key.bytes.begin() + 1);
  return key;
}
[[nodiscard]] inline FragmentId record_key(const AnchorRecord& record) {
  return record_key(record.id, record.context);
}

/// Two XXH3-128, with seeds 0 and 1, of all fields: what breaks ties of versions.
KVMELD_LAZY [[nodiscard]] Digest256 record_digest(const AnchorRecord& record) {
  Digest256 out;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    Hasher hasher{Xxh3_128(seed)};
    hasher.bytes(std::as_bytes(std::span(record.id.bytes)));
    hasher.bytes(std::as_bytes(std::span(record.payload.bytes)));
    for (const std::uint64_t field :
         {record.context.low, record.context.high, record.text.low, record.text.high,
          record.signature, static_cast<std::uint64_t>(record.tokens), record.bytes, record.owner,
          record.version, std::uint64_t{record.approximate}, std::uint64_t{record.removed}}) {
      hasher.value(field);
    }
    out.words[2 * seed] = hasher.digest().low;
    out.words[2 * seed + 1] = hasher.digest().high;
  }
  return out;
}

/// Whether a record's fields go together. Errors: `invalid_argument` with the field that does not.
KVMELD_LAZY [[nodiscard]] Status check_record(const AnchorRecord& record) {
  using detail::error;
  if (record.id.empty())
    return error(ErrorCode::invalid_argument, "a record of an anchor without an id");
  if (record.version == 0 || record.version > max_record_version) {
    return error(ErrorCode::invalid_argument, "record version ", record.version, " is not in [1, ",
                 max_record_version, "]");
  }
  if (record.removed) {
    AnchorRecord bare;
    bare.id = record.id, bare.context = record.context, bare.owner = record.owner,
    bare.version = record.version, bare.removed = true;
    if (!(record == bare))
      return error(ErrorCode::invalid_argument, "a tombstone of ", record.bytes, " bytes and ",
                   record.tokens, " tokens; both must be 0");
    return {};
  }
  if (record.tokens < 1 || record.tokens > max_position)
    return error(ErrorCode::invalid_argument, "a record of ", record.tokens, " tokens");
  if (record.bytes > max_anchor_bytes)
    return error(ErrorCode::invalid_argument, "a record of ", record.bytes, " bytes, above ",
                 max_anchor_bytes);
  if (!record.payload.is_chunk())
    return error(ErrorCode::invalid_argument, "a record whose payload key is of kind ",
                 record.payload.bytes[0], ", not a chunk's");
  return {};
}

KVMELD_NAMESPACE_END
