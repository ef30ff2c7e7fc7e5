#pragma once

/// A communicator of kvmeld's own, with errors as values and messages of any size (CMake component
/// kvmeld::mpi).

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

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
      memory =
          error(ErrorCode::store_full, "no memory for the ", all, " bytes of ", ranks, " ranks");
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
    return spare_ != nullptr
               ? Status()
               : error(ErrorCode::store_full, "no memory for messages of ", piece_bytes_, " bytes");
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
    return error(static_cast<ErrorCode>(text[0]), "rank ", failed, ": ",
                 std::string_view(reinterpret_cast<const char*>(text.data()) + 3,
                                  (std::min)(size, text.size() - 3)));
  }

 private:
  void check(int code, const char* call) {
    if (code == MPI_SUCCESS || !status_) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int size = 0;
    (void)MPI_Error_string(code, text, &size);
    status_ = error(ErrorCode::unavailable, call, " on rank ", rank_, ": ",
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

KVMELD_NAMESPACE_END
