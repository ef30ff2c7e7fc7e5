#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/codec/blob_key.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

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

/// Keeps blobs under keys, and a set of records: what replicas write down and, where they share it,
/// meet in.
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
///  - `generation() -> std::uint64_t`, where there is one, changes when the store may have lost
///    what it had acknowledged: another server, a folder restored from a copy. `damage() ->
///    StoreDamage`, where there is one, is what it found spoilt;
///  - errors: `unavailable` (retry later, nothing acknowledged is lost), `store_full`, `not_found`;
///    the store is unchanged by them.
template <class S>
concept BlobStore = requires(S& store, const BlobKey& key, std::span<const std::byte> bytes,
                             std::uint64_t cursor) {
  { store.put(key, bytes) } -> std::same_as<Result<bool>>;
  { store.get(key) } -> std::same_as<Result<Blob>>;
  { store.contains(key) } -> std::same_as<Result<bool>>;
  { store.erase(key) } -> std::same_as<Status>;
  { store.add_record(bytes) } -> std::same_as<Status>;
  { store.records(cursor) } -> std::same_as<Result<RecordBatch>>;
  { store.replace_records(cursor, bytes) } -> std::same_as<Status>;
};

/// A store that settles who was first: whoever cuts a round on it has the only cut.
///
///  - `put_if_absent(key, bytes)`: true where nothing had the name, and these bytes have it now, as
///    durably as by `put`; false where something has it, whatever that is: it stays. Of any number
///    of callers at once one is told true.
template <class S>
concept ArbiterStore = BlobStore<S> &&
    requires(S& store, const BlobKey& key, std::span<const std::byte> bytes) {
  { store.put_if_absent(key, bytes) } -> std::same_as<Result<bool>>;
};

KVMELD_NAMESPACE_END
