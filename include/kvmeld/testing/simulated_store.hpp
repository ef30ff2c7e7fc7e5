#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/testing/faults.hpp>
#include <kvmeld/testing/random.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// Bytes at rest, and what they were before they rotted.
struct Stored {
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  Bytes now{};
  Bytes written{};

  [[nodiscard]] bool rotten() const noexcept { return now != written; }
};

/// What a disk or server holds. A copy is a snapshot of it; bytes are shared.
struct SimulatedDisk {
  std::map<BlobKey, Stored> blobs{};
  /// By number; a cursor is the generation and the number that comes next.
  std::map<std::uint64_t, Stored> records{};
  std::uint64_t next_record = 1;
  /// Changes where the content is not what it was: a restored server answers as a new one.
  std::uint64_t generation = 1;

  /// Flips one bit of one blob or record. False where there is none.
  bool rot(Random& random) {
    const std::size_t all = blobs.size() + records.size();
    if (all == 0) return false;
    std::size_t at = random.below(all);
    Stored& item =
        at < blobs.size()
            ? std::next(blobs.begin(), static_cast<std::ptrdiff_t>(at))->second
            : std::next(records.begin(), static_cast<std::ptrdiff_t>(at - blobs.size()))->second;
    if (item.now->empty()) return false;
    std::vector<std::byte> bytes = *item.now;
    bytes[random.below(bytes.size())] ^= static_cast<std::byte>(1U << random.below(8));
    item.now = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
    return true;
  }
};

/// A `BlobStore` over a simulated disk, with a switch for each way in which stores fail.
///
/// What a write has acknowledged stays, until the simulation rots it or restores the disk from a
/// snapshot. A write that returned an error may have happened. A write in whose middle the process
/// ends is not there, there, or torn, as the contract of `BlobStore` allows; from then on every
/// call fails until `restart`. Over a shared disk every member has a store, its connection, of its
/// own.
class SimulatedStore {
 public:
  SimulatedStore(std::shared_ptr<SimulatedDisk> disk, std::uint64_t seed)
      : disk_(std::move(disk)), random_(seed) {}

  bool full = false;
  bool unavailable = false;
  double refused = 0;   ///< probability that a write fails and does not happen
  double in_doubt = 0;  ///< probability that a write happens and fails
  /// The process ends in the middle of the n-th write from now; 0: it does not.
  std::uint64_t dies_in = 0;
  FaultCounts* counts = nullptr;

  [[nodiscard]] bool crashed() const noexcept { return crashed_; }
  void restart() noexcept { crashed_ = false; }
  [[nodiscard]] const std::shared_ptr<SimulatedDisk>& disk() const noexcept { return disk_; }

  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) {
    KVMELD_TRY(reachable());
    const auto at = disk_->blobs.find(key);
    if (at != disk_->blobs.end() && std::ranges::equal(*at->second.now, bytes)) return false;
    const Outcome outcome = decide();
    if (outcome.happens && outcome.whole) {
      disk_->blobs[key] = stored(bytes);
    }
    if (!outcome.status.ok()) return outcome.status;
    return true;
  }
  Result<Blob> get(const BlobKey& key) {
    KVMELD_TRY(reachable());
    const auto at = disk_->blobs.find(key);
    if (at == disk_->blobs.end()) return Status(ErrorCode::not_found, "no blob " + key.hex());
    const Stored::Bytes& bytes = at->second.now;
    return Blob{std::shared_ptr<const std::byte[]>(bytes, bytes->data()), bytes->size()};
  }
  Result<bool> contains(const BlobKey& key) {
    KVMELD_TRY(reachable());
    return disk_->blobs.count(key) != 0;
  }
  Status erase(const BlobKey& key) {
    KVMELD_TRY(reachable());
    const Outcome outcome = decide();
    if (outcome.happens) disk_->blobs.erase(key);
    return outcome.status;
  }
  Status add_record(std::span<const std::byte> bytes) {
    KVMELD_TRY(reachable());
    const Outcome outcome = decide();
    if (outcome.happens) {
      const std::size_t size = outcome.whole ? bytes.size() : random_.below(bytes.size());
      disk_->records[disk_->next_record++] = stored(bytes.first(size));
    }
    return outcome.status;
  }
  Result<RecordBatch> records(std::uint64_t cursor) {
    KVMELD_TRY(reachable());
    RecordBatch batch;
    batch.cursor = cursor_at(disk_->next_record);
    for (auto at = disk_->records.lower_bound(number_of(cursor)); at != disk_->records.end(); ++at)
      batch.records.push_back(*at->second.now);
    return batch;
  }
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) {
    KVMELD_TRY(reachable());
    const Outcome outcome = decide();
    if (outcome.happens && outcome.whole) {
      const auto end = disk_->records.lower_bound(number_of(cursor));
      for (auto at = disk_->records.begin(); at != end;) {
        // A crash in the middle leaves some of the old ones.
        at = outcome.status.ok() || random_.chance(0.5) ? disk_->records.erase(at) : std::next(at);
      }
      disk_->records[disk_->next_record++] = stored(bytes);
    }
    return outcome.status;
  }
  /// Which content this is: a replica that finds another than before writes down again what it
  /// holds.
  [[nodiscard]] std::uint64_t generation() const noexcept { return disk_->generation; }

 private:
  struct Outcome {
    Status status;
    bool happens = true;
    bool whole = true;
  };

  static constexpr unsigned number_bits = 40;
  [[nodiscard]] std::uint64_t cursor_at(std::uint64_t number) const noexcept {
    return disk_->generation << number_bits | number;
  }
  /// 0 for a cursor of another content: what it had seen says nothing of this one.
  [[nodiscard]] std::uint64_t number_of(std::uint64_t cursor) const noexcept {
    return cursor >> number_bits == disk_->generation
               ? cursor & ((std::uint64_t{1} << number_bits) - 1)
               : 0;
  }
  [[nodiscard]] static Stored stored(std::span<const std::byte> bytes) {
    std::vector<std::byte> copy;
    copy.reserve(bytes.size() + 1);  // never null, also where it is empty
    copy.assign(bytes.begin(), bytes.end());
    const auto shared = std::make_shared<const std::vector<std::byte>>(std::move(copy));
    return {shared, shared};
  }
  [[nodiscard]] Status reachable() const {
    if (crashed_) return Status(ErrorCode::unavailable, "the process has ended");
    return unavailable ? Status(ErrorCode::unavailable, "the store does not answer") : Status();
  }
  void count(Fault fault) noexcept {
    if (counts != nullptr) ++(*counts)[fault];
  }
  Outcome decide() {
    if (dies_in > 0 && --dies_in == 0) {
      crashed_ = true;
      count(Fault::torn_write);
      return {Status(ErrorCode::unavailable, "the process ended in a write"), random_.chance(0.7),
              random_.chance(0.4)};
    }
    if (full) return {Status(ErrorCode::store_full, "the disk is full"), false, false};
    if (random_.chance(refused)) {
      count(Fault::write_refused);
      return {Status(ErrorCode::unavailable, "the write was refused"), false, false};
    }
    if (random_.chance(in_doubt)) {
      count(Fault::write_in_doubt);
      return {Status(ErrorCode::unavailable, "the write was not confirmed"), true, true};
    }
    return {};
  }

  std::shared_ptr<SimulatedDisk> disk_;
  Random random_;
  bool crashed_ = false;
};

static_assert(BlobStore<SimulatedStore>);

}  // namespace testing
KVMELD_NAMESPACE_END
