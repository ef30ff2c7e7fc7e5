#pragma once

/// An MPI communicator with time limits, and the pieces that payloads travel in.

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif

#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif

#include <mpi.h>

#include <kvmeld/config.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace mpi {

// A communicator of kvmeld's own, with errors as values and messages of any size (CMake component
// kvmeld::mpi).

namespace detail {

/// Memory that is not there is no exception here: the other ranks would wait for the one that it
/// takes away. Never null for 0 bytes.
[[nodiscard]] inline std::unique_ptr<std::byte[]> uninitialised(std::uint64_t bytes) noexcept {
  if (bytes > std::uint64_t{PTRDIFF_MAX}) return nullptr;
  return std::unique_ptr<std::byte[]>(
      new (std::nothrow) std::byte[(std::max)(static_cast<std::size_t>(bytes), std::size_t{1})]);
}

/// Bytes of every rank, in the order of ranks.
class Gathered {
 public:
  [[nodiscard]] std::span<const std::byte> operator[](std::size_t rank) const noexcept {
    return parts_[rank];
  }

 private:
  friend class MpiComm;
  std::unique_ptr<std::byte[]> bytes_;
  std::vector<std::span<std::byte>> parts_;
};

/// A duplicate of the caller's communicator, so that no message of the caller's meets one of ours.
///
/// MPI's own failures are sticky: after the first, nothing more is sent, and `status` says what
/// failed.
class MpiComm {
 public:
  MpiComm(MPI_Comm of, std::size_t piece_bytes)
      : piece_bytes_((std::clamp)(piece_bytes, std::size_t{1}, std::size_t{INT_MAX})) {
    check(MPI_Comm_dup(of, &comm_), "MPI_Comm_dup");
    if (!status_) return;
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }
  MpiComm(const MpiComm&) = delete;
  MpiComm& operator=(const MpiComm&) = delete;
  ~MpiComm() {
    if (comm_ != MPI_COMM_NULL) (void)MPI_Comm_free(&comm_);
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] std::size_t piece_bytes() const noexcept { return piece_bytes_; }
  [[nodiscard]] const Status& status() const noexcept { return status_; }

  /// The same number of bytes from every rank, in the order of ranks.
  [[nodiscard]] std::vector<std::byte> all_gather(std::span<const std::byte> mine) {
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size_));
    const int count = static_cast<int>(mine.size());
    if (status_)
      check(MPI_Allgather(mine.data(), count, MPI_BYTE, all.data(), count, MPI_BYTE, comm_),
            "MPI_Allgather");
    return all;
  }
  /// Each rank's bytes, of the sizes given, which are equal on all ranks; in as many steps as the
  /// pieces take. Collective.
  ///
  /// Errors, on all ranks and before anything is moved: `store_full` where one of them has no
  /// memory for it.
  [[nodiscard]] Status all_gather(std::span<const std::byte> mine,
                                  std::span<const std::uint64_t> sizes, Gathered& out) {
    const auto ranks = static_cast<std::size_t>(size_);
    const std::size_t piece =
        (std::max)(std::size_t{1}, (std::min)(piece_bytes_, std::size_t{INT_MAX} / ranks));
    std::uint64_t longest = 0;
    std::uint64_t all = 0;
    std::uint64_t step_bytes = 0;
    for (const std::uint64_t size : sizes) {
      longest = (std::max)(longest, size);
      all += (std::min)(size, ~std::uint64_t{0} - all);
      step_bytes += (std::min<std::uint64_t>)(size, piece);
    }
    out.bytes_ = uninitialised(all);
    const auto step = uninitialised(step_bytes);
    Status memory;
    if (out.bytes_ == nullptr || step == nullptr)
      memory = extend::error(ErrorCode::store_full, "no memory for the ", all, " bytes of ", ranks,
                             " ranks");
    KVMELD_TRY(agree(memory));
    std::uint64_t begin = 0;
    for (const std::uint64_t size : sizes) {
      out.parts_.emplace_back(out.bytes_.get() + begin, static_cast<std::size_t>(size));
      begin += size;
    }
    std::vector<int> counts(ranks);
    std::vector<int> places(ranks);
    for (std::uint64_t at = 0; at < longest && status_; at += piece) {
      std::size_t total = 0;
      for (std::size_t r = 0; r < ranks; ++r) {
        counts[r] =
            at < sizes[r] ? static_cast<int>((std::min<std::uint64_t>)(piece, sizes[r] - at)) : 0;
        places[r] = static_cast<int>(total);
        total += static_cast<std::size_t>(counts[r]);
      }
      const int own = counts[static_cast<std::size_t>(rank_)];
      check(MPI_Allgatherv(own > 0 ? mine.data() + at : nullptr, own, MPI_BYTE, step.get(),
                           counts.data(), places.data(), MPI_BYTE, comm_),
            "MPI_Allgatherv");
      for (std::size_t r = 0; r < ranks && status_; ++r) {
        if (counts[r] > 0)
          std::memcpy(out.parts_[r].data() + at, step.get() + places[r],
                      static_cast<std::size_t>(counts[r]));
      }
    }
    return status_;
  }
  /// Sets memory of a piece aside, into which anything can be received that nobody wants. Errors:
  /// `store_full`, on this rank only.
  [[nodiscard]] Status set_aside() {
    spare_ = uninitialised(piece_bytes_);
    return spare_ != nullptr ? Status()
                             : extend::error(ErrorCode::store_full, "no memory for messages of ",
                                             piece_bytes_, " bytes");
  }
  /// At least `piece_bytes`, once they were set aside.
  [[nodiscard]] std::span<std::byte> spare() noexcept {
    return {spare_.get(), spare_ != nullptr ? piece_bytes_ : 0};
  }

  void send(std::span<const std::byte> bytes, int to) {
    for (std::size_t at = 0; at < bytes.size() && status_; at += piece_bytes_) {
      check(
          MPI_Send(bytes.data() + at, static_cast<int>((std::min)(piece_bytes_, bytes.size() - at)),
                   MPI_BYTE, to, 0, comm_),
          "MPI_Send");
    }
  }
  void receive(std::span<std::byte> bytes, int from) {
    for (std::size_t at = 0; at < bytes.size() && status_; at += piece_bytes_) {
      check(
          MPI_Recv(bytes.data() + at, static_cast<int>((std::min)(piece_bytes_, bytes.size() - at)),
                   MPI_BYTE, from, 0, comm_, MPI_STATUS_IGNORE),
          "MPI_Recv");
    }
  }
  /// From one rank to all.
  void broadcast(std::span<std::byte> bytes, int from) {
    for (std::size_t at = 0; at < bytes.size() && status_; at += piece_bytes_) {
      check(MPI_Bcast(bytes.data() + at,
                      static_cast<int>((std::min)(piece_bytes_, bytes.size() - at)), MPI_BYTE, from,
                      comm_),
            "MPI_Bcast");
    }
  }

  /// Makes one rank's error every rank's: all return the error of the lowest rank that has one,
  /// which is named. Collective.
  [[nodiscard]] Status agree(const Status& mine) {
    if (!status_) return status_;
    int failed = mine ? size_ : rank_;
    check(MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MIN, comm_), "MPI_Allreduce");
    if (!status_ || failed == size_) return status_;
    std::array<std::byte, 1024> text{};
    const std::string said = mine ? std::string() : mine.message().substr(0, text.size() - 3);
    text[0] = static_cast<std::byte>(mine.code());
    text[1] = static_cast<std::byte>(said.size() % 256);
    text[2] = static_cast<std::byte>(said.size() / 256);
    std::transform(said.begin(), said.end(), text.begin() + 3,
                   [](char c) { return static_cast<std::byte>(c); });
    // whatever pieces the ranks agree on
    check(MPI_Bcast(text.data(), static_cast<int>(text.size()), MPI_BYTE, failed, comm_),
          "MPI_Bcast");
    if (!status_) return status_;
    const std::size_t size =
        std::to_integer<std::size_t>(text[1]) + std::to_integer<std::size_t>(text[2]) * 256;
    return extend::error(static_cast<ErrorCode>(text[0]), "rank ", failed, ": ",
                         std::string_view(reinterpret_cast<const char*>(text.data()) + 3,
                                          (std::min)(size, text.size() - 3)));
  }

 private:
  void check(int code, const char* call) {
    if (code == MPI_SUCCESS || !status_) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int size = 0;
    (void)MPI_Error_string(code, text, &size);
    status_ = extend::error(ErrorCode::unavailable, call, " on rank ", rank_, ": ",
                            std::string_view(text, static_cast<std::size_t>(size)));
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::size_t piece_bytes_;
  int rank_ = 0;
  int size_ = 1;
  std::unique_ptr<std::byte[]> spare_;
  Status status_;
};

}  // namespace detail

// What ranks of an all-merge send each other: their holdings, and fragments (CMake component
// kvmeld::mpi).

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
  Digest128 scope;
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
      return extend::error(ErrorCode::payload_missing, "the rank that has fragment ", id.hex(),
                           " could not send it");
    if (manifest_bytes > max_manifest_bytes)
      return extend::error(ErrorCode::oversized, "a manifest of ", manifest_bytes,
                           " bytes for fragment ", id.hex(), "; at most ", max_manifest_bytes);
    for (const std::uint64_t bytes : payload_bytes) {
      if (bytes > max_piece_bytes)
        return extend::error(ErrorCode::oversized, "a payload of ", bytes, " bytes for fragment ",
                             id.hex(), "; at most ", max_piece_bytes);
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
[[nodiscard]] inline Status give_fragment(PieceRoute& route, const Fragment& fragment,
                                          std::size_t ranks, const SetHash& hash,
                                          AllMergeReport& report) {
  // Chunks as large as they may be: their keys are not needed here, since payloads are hashed
  // whole.
  const auto manifest = replica::make_manifest(fragment, replica::max_chunk_bytes, hash);
  std::vector<std::byte> bytes;
  if (manifest) bytes = replica::encode_manifest(*manifest);
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
[[nodiscard]] inline Result<Fragment> take_fragment(PieceRoute& route, const FragmentId& id,
                                                    std::uint64_t max_payload_bytes,
                                                    const SetHash& hash, AllMergeReport& report) {
  PieceHead head;
  route.move(raw_of(head));
  KVMELD_TRY(head.status(id));
  report.received_bytes += head.total();
  report.payload_bytes += head.total() - head.manifest_bytes;
  const auto bytes = uninitialised(head.manifest_bytes);
  std::optional<replica::Manifest> manifest;
  Status status;
  if (bytes != nullptr) {
    const std::span<std::byte> all(bytes.get(), static_cast<std::size_t>(head.manifest_bytes));
    route.move(all);
    auto decoded = replica::decode_manifest(all, {max_payload_bytes, max_payload_bytes}, hash);
    status = decoded.status();
    if (status) manifest = *std::move(decoded);
  } else {
    route.drain(head.manifest_bytes);
    status = extend::error(ErrorCode::store_full, "no memory for a manifest of ",
                           head.manifest_bytes, " bytes");
  }
  if (status && manifest->fragment.id() != id)
    status = extend::error(ErrorCode::id_mismatch, "fragment ", manifest->fragment.id().hex(),
                           " came in the place of ", id.hex());
  std::shared_ptr<Fragment::Body> body;
  if (status) body = std::make_shared<Fragment::Body>(*manifest->fragment.body());
  for (std::size_t p = 0; p < 2; ++p) {
    const std::uint64_t coming = head.payload_bytes[p];
    const std::uint64_t named =
        body != nullptr && p < body->payloads.size() ? body->payloads[p].byte_count : 0;
    if (status && coming != named)
      status = extend::error(ErrorCode::corrupt, "payload ", p, " of fragment ", id.hex(), " has ",
                             named, " bytes, ", coming, " come");
    std::byte* const memory =
        status ? new (std::nothrow)
                     std::byte[(std::max)(static_cast<std::size_t>(coming), std::size_t{1})]
               : nullptr;
    if (status && memory == nullptr)
      status =
          extend::error(ErrorCode::store_full, "no memory for a payload of ", coming, " bytes");
    if (memory == nullptr) {
      route.drain(coming);
      continue;
    }
    const std::shared_ptr<std::byte[]> owner(memory);
    route.move({memory, static_cast<std::size_t>(coming)});
    if (p >= body->payloads.size()) continue;
    Payload& payload = body->payloads[p];
    payload.bytes = owner;
    if (extend::payload_digest(hash, payload) != payload.digest) {
      status = extend::error(ErrorCode::id_mismatch, "a payload of ", coming, " bytes of fragment ",
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
  std::vector<std::byte> out = replica::encode_set(set);
  for (const FragmentSet::Entry& entry : set.entries())
    out.push_back(static_cast<std::byte>(entry.complete()));
  extend::ByteWriter w;
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
    return extend::error(ErrorCode::truncated, "a rank's state of ", bytes.size(), " bytes");
  extend::ByteReader tail(bytes.last(8));
  const auto count = tail.value<std::uint64_t>();
  if (count > bytes.size() - 8)
    return extend::error(ErrorCode::corrupt, "a rank's state names ", count, " entries in ",
                         bytes.size(), " bytes");
  const auto flags = bytes.subspan(bytes.size() - 8 - static_cast<std::size_t>(count),
                                   static_cast<std::size_t>(count));
  auto set = replica::decode_set(bytes.first(bytes.size() - 8 - flags.size()), hash);
  if (!set) return set.error();
  if (set->size() != count)
    return extend::error(ErrorCode::corrupt, "a rank's state holds ", set->size(),
                         " entries and names ", count);
  Holdings out{*std::move(set), {}};
  std::size_t i = 0;
  for (const FragmentSet::Entry& entry : out.set.entries()) {
    if (flags[i++] != std::byte{0}) out.complete.push_back(entry.id);
  }
  return out;
}

}  // namespace detail

}  // namespace mpi

KVMELD_NAMESPACE_END
