#pragma once

/// What replicas ask of a store and of a transport, and fragments as blobs of a store.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

/// Records that a store holds beyond a cursor, and the cursor behind them.
struct RecordBatch {
  std::vector<std::vector<std::byte>> records{};
  std::uint64_t cursor = 0;  ///< for the next call; 0 starts from the beginning
};

/// What a store has found spoilt of what it had acknowledged, since it was made: it is gone from
/// here, and may be with others.
struct StoreDamage {
  std::uint64_t places = 0;  ///< stretches of bytes, each of one record or of several
  std::uint64_t bytes = 0;
};

class PayloadStore;

/// Keeps blobs under keys, and a set of records: what replicas write down and, where they share it,
/// meet in. Derive from it for a store of your own; whoever uses one holds a reference, and the
/// store outlives its users.
///
/// Semantic requirements (tests/support/store_laws.hpp checks them):
///  - `put` is atomic and, once it returned without error, durable as far as the store promises: a
///    reader sees the whole blob or none. True: the blob is new, also where other bytes stood in
///    its place, which it replaces; false: exactly these bytes were there already, which was looked
///    at, not concluded from the name;
///  - `get` answers `not_found` for what is not there, and never a part of a blob; bytes are not
///    verified against their key, the caller does that and calls `erase` on what is wrong;
///  - records form a set: adding one twice is adding it once or twice, reading may repeat one;
///    order means nothing;
///  - `records(c)` gives at least every record that was added after the call that returned cursor
///    `c`;
///  - `replace_records(cursor, r)` puts r in the place of those that `records` gave up to `cursor`:
///    a crash in the middle leaves r and some of them, never less;
///  - `generation()` changes when the store may have lost what it had acknowledged: another server,
///    a folder restored from a copy. `damage()` is what it found spoilt. A store that knows neither
///    leaves both as they are;
///  - errors: `unavailable` (retry later, nothing acknowledged is lost), `store_full`, `not_found`;
///    the store is unchanged by them.
class BlobStore {
 public:
  virtual ~BlobStore() = default;

  virtual Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) = 0;
  virtual Result<Blob> get(const BlobKey& key) = 0;
  virtual Result<bool> contains(const BlobKey& key) = 0;
  virtual Status erase(const BlobKey& key) = 0;
  virtual Status add_record(std::span<const std::byte> bytes) = 0;
  virtual Result<RecordBatch> records(std::uint64_t cursor) = 0;
  virtual Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) = 0;

  [[nodiscard]] virtual std::uint64_t generation() const { return 0; }
  [[nodiscard]] virtual StoreDamage damage() const { return {}; }
  /// The same store as one that keeps payloads in one piece; null where it does not.
  [[nodiscard]] virtual PayloadStore* payloads() noexcept { return nullptr; }

 protected:
  BlobStore() = default;
  BlobStore(const BlobStore&) = default;
  BlobStore& operator=(const BlobStore&) = default;
};

/// A store that settles who was first: whoever cuts a round on it has the only cut.
///
///  - `put_if_absent(key, bytes)`: true where nothing had the name, and these bytes have it now, as
///    durably as by `put`; false where something has it, whatever that is: it stays. Of any number
///    of callers at once one is told true.
class ArbiterStore : public BlobStore {
 public:
  virtual Result<bool> put_if_absent(const BlobKey& key, std::span<const std::byte> bytes) = 0;
};

/// What a store adds that also keeps a payload's raw bytes in one piece, so that a reader takes
/// them over without assembling chunks (`BlobStore::payloads`).
///
/// Chunks are stored compressed or behind a codec byte and each on its own: putting them together
/// is a copy. What `map_payload` gives can be a `Payload`'s `bytes` as it is, at a cost that does
/// not grow with its size.
///
/// Semantic requirements (tests/support/store_laws.hpp checks them): those of `put`, `get` and
/// `erase` of `BlobStore`; payloads and blobs do not share their keys; bytes are at least 16-byte
/// aligned, never null, and not verified: the caller hashes them.
class PayloadStore {
 public:
  virtual Result<bool> put_payload(const BlobKey& key, std::span<const std::byte> bytes) = 0;
  virtual Result<Blob> map_payload(const BlobKey& key) = 0;
  virtual Status erase_payload(const BlobKey& key) = 0;

 protected:
  PayloadStore() = default;
  PayloadStore(const PayloadStore&) = default;
  PayloadStore& operator=(const PayloadStore&) = default;
  ~PayloadStore() = default;
};

/// A message that has arrived, and who says it sent it.
struct Envelope {
  MemberId from = 0;
  std::vector<std::byte> bytes{};
};

/// Carries messages between members, and may lose, repeat, reorder and delay them: what is above
/// converges regardless.
///
/// Semantic requirements (tests/support/transport_laws.hpp checks them):
///  - `send` to a member or to `everyone`; without error the message was handed on, not necessarily
///    delivered; it never blocks for longer than the transport's own stated bound. Messages up to
///    `max_message_bytes()` are taken whole;
///  - a message arrives whole or not at all; the sender does not get its own;
///  - `receive(timeout_ms)` waits at most so long, and gives none when nothing came; 0 only looks;
///  - errors: `unavailable` (lost connection; later calls try to connect again, with backoff),
///    `oversized`.
class Transport {
 public:
  virtual ~Transport() = default;

  [[nodiscard]] virtual MemberId self() const noexcept = 0;
  [[nodiscard]] virtual std::size_t max_message_bytes() const noexcept = 0;
  virtual Status send(MemberId to, std::span<const std::byte> bytes) = 0;
  virtual Result<std::optional<Envelope>> receive(std::int64_t timeout_ms) = 0;

 protected:
  Transport() = default;
  Transport(const Transport&) = default;
  Transport& operator=(const Transport&) = default;
};

/// How fragments lie in stores and travel in messages.
struct FragmentFormat {
  std::size_t chunk_bytes = default_chunk_bytes;
  /// Of one payload that a stranger announces.
  std::uint64_t max_payload_bytes = std::uint64_t{1} << 34;
  /// Of one payload, as `ManifestLimits` has it: a fragment beyond is neither stored nor taken.
  std::uint64_t max_repeated_bytes = std::uint64_t{1} << 26;
  /// How chunks are compressed. Null: they are not, and no compressed one is read.
  std::shared_ptr<const Compressor> compressor{};
  /// Hashes what a store has already before it is believed, O(bytes): payloads that it maps in one
  /// piece, and chunks that need not be put again. Off: whoever may write there is trusted, and so
  /// is the disk. What is mapped may change after it was verified, where somebody writes into the
  /// file: `FileStoreOptions::private_copies` rules that out.
  bool verify_stored = true;
  SetHash hash{};  ///< what names fragments and chunks, and sums sets

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

/// The key of a payload that a store keeps in one piece: the hash's tag with bit 6 set, then the
/// payload's digest.
[[nodiscard]] inline BlobKey payload_key(const Payload& payload, const SetHash& hash) {
  BlobKey key;
  key.bytes[0] = static_cast<std::uint8_t>(hash.tag | 0x40U);
  std::copy(payload.digest.begin(), payload.digest.end(), key.bytes.begin() + 1);
  return key;
}

/// Whether an error proves that a blob is not what its key names. One that this build cannot read
/// (another version, another compressor) may be somebody else's good one, and stays.
[[nodiscard]] constexpr bool proves_damage(ErrorCode code) noexcept {
  return code == ErrorCode::id_mismatch || code == ErrorCode::corrupt ||
         code == ErrorCode::truncated;
}

namespace detail {

[[nodiscard]] inline Status check_limits(const Manifest& manifest, const ManifestLimits& limits) {
  for (std::size_t p = 0; p < manifest.chunks.size(); ++p) {
    const std::size_t bytes = manifest.fragment.payloads()[p].byte_count;
    if (bytes > limits.max_payload_bytes) {
      return extend::error(ErrorCode::oversized, "payload ", p, " of fragment ",
                           manifest.fragment.id().hex(), " has ", bytes, " bytes; at most ",
                           limits.max_payload_bytes, " are read again (max_payload_bytes)");
    }
    KVMELD_TRY(check_repeats(manifest.chunks[p], manifest.chunk_bytes, limits.max_repeated_bytes));
  }
  return {};
}

/// Good where a stored chunk is what its key names; else why not, as `decode_chunk` says it.
/// O(bytes), no copy where it is raw.
[[nodiscard]] inline Status check_chunk(const Blob& stored, const BlobKey& key,
                                        const FragmentFormat& format) {
  const auto open = open_chunk(stored.bytes(), max_chunk_bytes);
  const bool raw = open && open->codec == 0 && open->data.size() == open->raw_bytes;
  if (raw && chunk_key(open->data, format.hash) == key) return {};
  return decode_chunk(stored.bytes(), key, max_chunk_bytes, format.compressor.get(), format.hash)
      .status();
}

/// Whether a chunk need not be put: it is there, and verified as the format says. Errors: the
/// store's.
[[nodiscard]] inline Result<bool> has_chunk(BlobStore& store, const BlobKey& key,
                                            const FragmentFormat& format) {
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
[[nodiscard]] inline Result<StoredBytes> store_fragment(BlobStore& store, const Fragment& fragment,
                                                        const FragmentFormat& format) {
  auto manifest = make_manifest(fragment, format.chunk_bytes, format.hash);
  if (!manifest) return manifest.error();
  KVMELD_TRY(detail::check_limits(*manifest, format.limits()));
  StoredBytes counted;
  PayloadStore* const whole = store.payloads();
  for (std::size_t p = 0; p < fragment.payloads().size(); ++p) {
    const Payload& payload = fragment.payloads()[p];
    if (whole != nullptr) {
      const auto fresh = whole->put_payload(payload_key(payload, format.hash),
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
            encode_chunk(raw, format.compressor.get(),
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
[[nodiscard]] inline Result<Manifest> load_manifest(BlobStore& store, const FragmentId& id,
                                                    const FragmentFormat& format) {
  const auto blob = store.get(manifest_key(id));
  if (!blob) return blob.error();
  auto manifest = decode_manifest(blob->bytes(), format.limits(), format.hash);
  Status status = manifest.status();
  if (status.ok() && manifest->fragment.id() != id) {
    status = extend::error(ErrorCode::id_mismatch, "manifest of fragment ",
                           manifest->fragment.id().hex(), " under the key of ", id.hex());
  }
  if (status.ok()) return manifest;
  if (proves_damage(status.code())) (void)store.erase(manifest_key(id));
  return status;
}

namespace detail {

/// Maps every payload of a fragment; none where one is not there, or is not what the manifest says.
[[nodiscard]] inline Result<Fragment> map_fragment(PayloadStore& store, const Manifest& manifest,
                                                   const FragmentFormat& format) {
  auto body = std::make_shared<Fragment::Body>(*manifest.fragment.body());
  for (Payload& payload : body->payloads) {
    const BlobKey key = payload_key(payload, format.hash);
    const auto blob = store.map_payload(key);
    if (!blob) return blob.error();
    payload.bytes = blob->data;
    if (blob->size != payload.byte_count ||
        (format.verify_stored && extend::payload_digest(format.hash, payload) != payload.digest)) {
      (void)store.erase_payload(key);
      return extend::error(ErrorCode::id_mismatch, "a mapped payload of ", blob->size,
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
[[nodiscard]] inline Result<Blob> load_chunk(BlobStore& store, const BlobKey& key,
                                             const FragmentFormat& format) {
  auto stored = store.get(key);
  if (!stored) return stored.error();
  const Status status = detail::check_chunk(*stored, key, format);
  if (status.ok()) return stored;
  if (proves_damage(status.code())) (void)store.erase(key);
  return status;
}

/// Adds the chunks that a store has to an assembler; a chunk that is wrong is erased and stays
/// wanted.
///
/// @param room  bytes that the assembler may hold in the end: a list that names what lies in a
/// store
///              anyway costs who sent it little. Beyond, chunks stay wanted.
/// Errors: the store's, but for `not_found`.
inline Status load_chunks(BlobStore& store, Assembler& assembler, const FragmentFormat& format,
                          std::uint64_t room = ~std::uint64_t{0}) {
  for (const BlobKey& key : assembler.missing()) {
    const std::uint64_t held = assembler.held_bytes();
    if (held > room || assembler.bytes_of(key) > room - held) return {};
    const auto stored = store.get(key);
    if (!stored) {
      if (stored.error().code() == ErrorCode::not_found) continue;
      return stored.error();
    }
    const auto added = assembler.add(key, stored->bytes(), format.compressor.get());
    if (!added && proves_damage(added.error().code())) (void)store.erase(key);
  }
  return {};
}

/// A whole, verified fragment from a store. O(bytes); where the store maps payloads and is trusted,
/// O(manifest).
///
/// Errors: `not_found` where the manifest or a part is not there (what is wrong counts as not
/// there), the store's.
[[nodiscard]] inline Result<Fragment> load_fragment(BlobStore& store, const FragmentId& id,
                                                    const FragmentFormat& format) {
  auto manifest = load_manifest(store, id, format);
  if (!manifest) return manifest.error();
  if (PayloadStore* const whole = store.payloads()) {
    if (auto mapped = detail::map_fragment(*whole, *manifest, format)) return mapped;
  }
  Assembler assembler(*std::move(manifest), {}, format.hash);
  KVMELD_TRY(load_chunks(store, assembler, format));
  if (!assembler.complete())
    return extend::error(ErrorCode::not_found, assembler.left(), " chunks of fragment ", id.hex(),
                         " are not in the store");
  auto fragment = assembler.finish();
  if (!fragment) (void)store.erase(manifest_key(id));  // its list of chunks lied
  return fragment;
}

// A clock that only goes forward, over one that may be set.

/// Milliseconds that have passed by a caller's clock which may be set back or ahead. What waits
/// compares with this, never with the caller's own numbers: a clock that went back would hold every
/// deadline until it has caught up, and one that went ahead would end them all at once.
class Elapsed {
 public:
  /// @param longest_ms that one step may add, above 0: the longest that the caller is silent.
  explicit Elapsed(std::int64_t longest_ms) noexcept : longest_ms_(longest_ms) {}

  /// Takes the caller's clock in; returns what has passed since the first call. Time that the clock
  /// goes back counts as none, a jump ahead as `longest_ms` at most.
  std::int64_t advance(std::int64_t now_ms) noexcept {
    if (last_ && now_ms > *last_) {
      // The difference of two numbers of unlike sign may not fit; then it is above any bound.
      const std::uint64_t step =
          static_cast<std::uint64_t>(now_ms) - static_cast<std::uint64_t>(*last_);
      const auto longest = static_cast<std::uint64_t>((std::max)(longest_ms_, std::int64_t{1}));
      passed_ms_ += static_cast<std::int64_t>((std::min)(step, longest));
    }
    last_ = now_ms;
    return passed_ms_;
  }
  [[nodiscard]] std::int64_t ms() const noexcept { return passed_ms_; }

 private:
  std::int64_t longest_ms_;
  std::int64_t passed_ms_ = 0;
  std::optional<std::int64_t> last_{};
};

// Who an agent is to its peers, in values that nobody can forget to give: its epoch and its
// merger.

/// The merger that a member renders with, as its peers compare it. It has no default: members that
/// render by different mergers hold the same set and make other caches of it, so whoever is silent
/// about its merger would pass for equal. What renders nothing says so by `does_not_render`.
class MergerDigest {
 public:
  /// @param digest `Merger::digest()`; all zeros are `does_not_render`.
  constexpr MergerDigest(const Digest128& digest) noexcept : digest_(digest) {}

  [[nodiscard]] constexpr bool renders() const noexcept { return digest_ != Digest128{}; }
  [[nodiscard]] constexpr const Digest128& digest() const noexcept { return digest_; }
  bool operator==(const MergerDigest&) const = default;

 private:
  Digest128 digest_;
};

/// What a relay or a store says in the place of a merger. Its peers hear that it renders nothing.
inline constexpr MergerDigest does_not_render{Digest128{}};

/// One life of an agent's process. It has no default: an agent that starts in an epoch which it had
/// before gives out dots twice. `claim_epoch` and `fresh_epoch` make one.
class Epoch {
 public:
  constexpr Epoch(std::uint64_t number) noexcept : number_(number) {}
  constexpr operator std::uint64_t() const noexcept { return number_; }

 private:
  std::uint64_t number_;
};

/// An epoch that no earlier life of this agent had: seconds of the caller's clock, then 32 random
/// bits, so that neither a clock that jumps back nor a restored disk gives one twice.
[[nodiscard]] inline Epoch fresh_epoch(std::uint64_t unix_seconds) {
  std::random_device random;
  return (unix_seconds << 32U) | static_cast<std::uint32_t>(random());
}
/// As above, by the system's clock.
[[nodiscard]] inline Epoch fresh_epoch() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since).count();
  return fresh_epoch(static_cast<std::uint64_t>(seconds));
}

namespace detail {

/// Where a store keeps that an agent had an epoch.
[[nodiscard]] inline BlobKey epoch_key(MemberId agent, std::uint64_t epoch) {
  return extend::named_key(0x3D, "kvmeld.epoch.v1", agent, epoch);
}

}  // namespace detail

/// An epoch that this store has given to nobody: `fresh_epoch()`, written down before it is
/// returned. Two processes that claim from one store get two, also if their random sources are
/// copies of one another, as those of a machine that was resumed twice are. One small blob stays
/// for each start.
///
/// Errors: the store's.
[[nodiscard]] inline Result<Epoch> claim_epoch(BlobStore& store, MemberId agent) {
  while (true) {
    const Epoch epoch = fresh_epoch();
    const std::uint64_t number = epoch;
    const auto claimed = store.put(detail::epoch_key(agent, number),
                                   std::as_bytes(std::span<const std::uint64_t, 1>(&number, 1)));
    if (!claimed) return claimed.error();
    if (*claimed) return epoch;
  }
}

}  // namespace replica

KVMELD_NAMESPACE_END
