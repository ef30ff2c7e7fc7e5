#pragma once

/// What ranks of an all-merge send each other: their holdings, and fragments (CMake component
/// kvmeld::mpi).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/manifest.hpp>
#include <kvmeld/session/set_codec.hpp>
#include <kvmeld/transport/mpi_comm.hpp>

KVMELD_NAMESPACE_BEGIN

/// What an all-merge moved for this rank.
struct AllMergeReport {
  std::uint64_t state_bytes = 0;  ///< ids and metadata of all ranks, which each gets
  std::uint64_t sent_bytes = 0;   ///< manifests and payloads, once for each rank that lacked them
  std::uint64_t received_bytes = 0;  ///< manifests and payloads that this rank lacked, each once
  std::uint64_t payload_bytes = 0;   ///< of those received, raw payloads
  std::uint64_t fragments_sent = 0;
  std::uint64_t fragments_received = 0;
  std::uint64_t dedup_hits = 0;     ///< fragments of other ranks whose payload was here already
  std::uint64_t still_missing = 0;  ///< fragments whose payload no rank has
};

namespace detail {

/// What the ranks tell each other first; all of it but the sizes must be equal.
struct MergeHello {
  std::uint64_t set_bytes = 0;
  Digest128 merger;
  Digest128 name_space;
  std::uint64_t message_bytes = 0;
  std::uint64_t hash = 0;
};

/// Behind a head that announces nothing, or more than these, nothing comes: no rank waits for bytes
/// that cannot be.
inline constexpr std::uint64_t max_manifest_bytes = std::uint64_t{1} << 32;
inline constexpr std::uint64_t max_piece_bytes = std::uint64_t{1} << 44;

struct PieceHead {
  std::uint64_t manifest_bytes = 0;  // 0: the owner could not give the fragment
  std::uint64_t payload_bytes[2] = {};

  [[nodiscard]] Status status(const FragmentId& id) const {
    if (manifest_bytes == 0)
      return error(ErrorCode::payload_missing, "the rank that has fragment ", id.hex(),
                   " could not send it");
    if (manifest_bytes > max_manifest_bytes)
      return error(ErrorCode::oversized, "a manifest of ", manifest_bytes, " bytes for fragment ",
                   id.hex(), "; at most ", max_manifest_bytes);
    for (const std::uint64_t bytes : payload_bytes) {
      if (bytes > max_piece_bytes)
        return error(ErrorCode::oversized, "a payload of ", bytes, " bytes for fragment ", id.hex(),
                     "; at most ", max_piece_bytes);
    }
    return {};
  }
  [[nodiscard]] std::uint64_t total() const noexcept {
    return manifest_bytes + payload_bytes[0] + payload_bytes[1];
  }
};

template <class T>
[[nodiscard]] std::span<std::byte> raw_of(T& value) noexcept {
  return std::as_writable_bytes(std::span(&value, 1));
}

/// One payload on its way from the rank that has it to those that lack it: by broadcast where that
/// is everybody else.
class PieceRoute {
 public:
  PieceRoute(MpiComm& comm, int owner, const std::vector<int>& lacking)
      : comm_(comm), owner_(owner), lacking_(lacking) {
    for (const int rank : lacking_) receives_ = receives_ || rank == comm_.rank();
    everybody_ = lacking_.size() + 1 == static_cast<std::size_t>(comm_.size());
  }
  [[nodiscard]] bool sends() const noexcept { return owner_ == comm_.rank(); }
  [[nodiscard]] bool receives() const noexcept { return receives_; }
  void move(std::span<std::byte> bytes) {
    if (everybody_) {
      comm_.broadcast(bytes, owner_);
    } else if (sends()) {
      for (const int rank : lacking_) comm_.send(bytes, rank);
    } else {
      comm_.receive(bytes, owner_);
    }
  }
  /// Takes bytes that nobody wants any more, in the steps in which they are sent.
  void drain(std::uint64_t bytes) {
    while (bytes > 0 && comm_.status()) {
      const auto nowhere = comm_.spare().first(
          static_cast<std::size_t>((std::min<std::uint64_t>)(bytes, comm_.piece_bytes())));
      move(nowhere);
      bytes -= nowhere.size();
    }
  }

 private:
  MpiComm& comm_;
  int owner_;
  const std::vector<int>& lacking_;
  bool receives_ = false;
  bool everybody_ = false;
};

/// Sends a fragment that is whole here; says so to the others where it cannot.
template <ContentHash Hash>
[[nodiscard]] Status give_fragment(PieceRoute& route, const Fragment& fragment, std::size_t ranks,
                                   AllMergeReport& report) {
  // Chunks as large as they may be: their keys are not needed here, since payloads are hashed
  // whole.
  const auto manifest = make_manifest<Hash>(fragment, max_chunk_bytes);
  std::vector<std::byte> bytes;
  if (manifest) bytes = encode_manifest(*manifest);
  PieceHead head{bytes.size(), {}};
  for (std::size_t p = 0; p < fragment.payloads().size(); ++p)
    head.payload_bytes[p] = fragment.payloads()[p].byte_count;
  route.move(raw_of(head));
  if (!manifest) return manifest.error();
  KVMELD_TRY(head.status(fragment.id()));
  route.move(bytes);
  for (const Payload& payload : fragment.payloads()) {
    // MPI takes no pointers to const where it broadcasts; it does not write at the root.
    route.move({const_cast<std::byte*>(payload.bytes.get()), payload.byte_count});
  }
  report.sent_bytes += head.total() * ranks;
  report.fragments_sent += ranks;
  return {};
}

/// Receives a fragment. What cannot be believed or kept is received all the same, so that the ranks
/// stay in step.
template <ContentHash Hash>
[[nodiscard]] Result<Fragment> take_fragment(PieceRoute& route, const FragmentId& id,
                                             std::uint64_t max_payload_bytes,
                                             AllMergeReport& report) {
  PieceHead head;
  route.move(raw_of(head));
  KVMELD_TRY(head.status(id));
  report.received_bytes += head.total();
  report.payload_bytes += head.total() - head.manifest_bytes;
  const auto bytes = uninitialised(head.manifest_bytes);
  std::optional<Manifest> manifest;
  Status status;
  if (bytes != nullptr) {
    const std::span<std::byte> all(bytes.get(), static_cast<std::size_t>(head.manifest_bytes));
    route.move(all);
    auto decoded = decode_manifest<Hash>(all, {max_payload_bytes, max_payload_bytes});
    status = decoded.status();
    if (status) manifest = *std::move(decoded);
  } else {
    route.drain(head.manifest_bytes);
    status =
        error(ErrorCode::store_full, "no memory for a manifest of ", head.manifest_bytes, " bytes");
  }
  if (status && manifest->fragment.id() != id)
    status = error(ErrorCode::id_mismatch, "fragment ", manifest->fragment.id().hex(),
                   " came in the place of ", id.hex());
  std::shared_ptr<Fragment::Body> body;
  if (status) body = std::make_shared<Fragment::Body>(*manifest->fragment.body());
  for (std::size_t p = 0; p < 2; ++p) {
    const std::uint64_t coming = head.payload_bytes[p];
    const std::uint64_t named =
        body != nullptr && p < body->payloads.size() ? body->payloads[p].byte_count : 0;
    if (status && coming != named)
      status = error(ErrorCode::corrupt, "payload ", p, " of fragment ", id.hex(), " has ", named,
                     " bytes, ", coming, " come");
    std::byte* const memory =
        status ? new (std::nothrow)
                     std::byte[(std::max)(static_cast<std::size_t>(coming), std::size_t{1})]
               : nullptr;
    if (status && memory == nullptr)
      status = error(ErrorCode::store_full, "no memory for a payload of ", coming, " bytes");
    if (memory == nullptr) {
      route.drain(coming);
      continue;
    }
    const std::shared_ptr<std::byte[]> owner(memory);
    route.move({memory, static_cast<std::size_t>(coming)});
    if (p >= body->payloads.size()) continue;
    Payload& payload = body->payloads[p];
    payload.bytes = owner;
    if (payload_digest<Hash>(payload) != payload.digest) {
      status = error(ErrorCode::id_mismatch, "a payload of ", coming, " bytes of fragment ",
                     id.hex(), " does not hash to its digest");
    }
  }
  if (!status) return status;
  ++report.fragments_received;
  return Fragment(std::move(body));
}

/// Which ranks hold the bytes of which entry of the joined set.
struct Holders {
  int owner = -1;  // the lowest rank that does
  std::vector<int> lacking;
};

/// A rank's ids, and behind them a byte for each entry that says whether its payload is there.
[[nodiscard]] inline std::vector<std::byte> encode_holdings(const FragmentSet& set) {
  std::vector<std::byte> out = encode_set(set);
  for (const FragmentSet::Entry& entry : set.entries())
    out.push_back(static_cast<std::byte>(entry.complete()));
  ByteWriter w;
  w.value(static_cast<std::uint64_t>(set.size()));
  out.insert(out.end(), w.written().begin(), w.written().end());
  return out;
}
struct Holdings {
  FragmentSet set;
  std::vector<FragmentId> complete;  // ascending
};
[[nodiscard]] inline Result<Holdings> decode_holdings(std::span<const std::byte> bytes,
                                                      const SetHash& hash) {
  if (bytes.size() < 8)
    return error(ErrorCode::truncated, "a rank's state of ", bytes.size(), " bytes");
  ByteReader tail(bytes.last(8));
  const auto count = tail.value<std::uint64_t>();
  if (count > bytes.size() - 8)
    return error(ErrorCode::corrupt, "a rank's state names ", count, " entries in ", bytes.size(),
                 " bytes");
  const auto flags = bytes.subspan(bytes.size() - 8 - static_cast<std::size_t>(count),
                                   static_cast<std::size_t>(count));
  auto set = decode_set(bytes.first(bytes.size() - 8 - flags.size()), hash);
  if (!set) return set.error();
  if (set->size() != count)
    return error(ErrorCode::corrupt, "a rank's state holds ", set->size(), " entries and names ",
                 count);
  Holdings out{*std::move(set), {}};
  std::size_t i = 0;
  for (const FragmentSet::Entry& entry : out.set.entries()) {
    if (flags[i++] != std::byte{0}) out.complete.push_back(entry.id);
  }
  return out;
}

}  // namespace detail

KVMELD_NAMESPACE_END
