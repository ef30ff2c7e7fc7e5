#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Keeps everything in this process: the embedded default, and what replicas of one process meet
/// in.
///
/// Models `BlobStore`; durable as long as one handle lives. A copy is another handle on the same
/// content; all calls are thread-safe and none waits for more than the copy of a map's node. `get`
/// shares the bytes, whatever their size.
class MemoryStore {
 public:
  /// @param capacity_bytes blobs and records together; one more byte is `store_full`.
  explicit MemoryStore(std::size_t capacity_bytes = ~std::size_t{0})
      : content_(std::make_shared<Content>()) {
    content_->capacity_bytes = capacity_bytes;
  }

  /// O(bytes + log n). Errors: `store_full`.
  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) {
    Content& c = *content_;
    std::shared_ptr<std::byte[]> copy;
    for (Blob there;;) {
      {
        const std::lock_guard lock(c.mutex);
        const auto at = c.blobs.find(key);
        const bool as_seen =
            at == c.blobs.end() ? there.data == nullptr : at->second.data == there.data;
        const std::size_t freed = at == c.blobs.end() ? 0 : at->second.size;
        if (as_seen) {
          if (Status room = c.room_for(bytes.size(), freed); !room) return room;
        }
        if (as_seen && copy != nullptr) {
          c.used_bytes += bytes.size() - freed;
          c.blobs.insert_or_assign(key, Blob{copy, bytes.size()});
          return true;
        }
        there = at == c.blobs.end() ? Blob{} : at->second;
      }
      // Compared and copied without the lock; what the others did meanwhile is looked at again.
      if (there.data != nullptr && std::ranges::equal(there.bytes(), bytes)) return false;
      if (copy == nullptr) {
        copy.reset(new std::byte[(std::max)(bytes.size(), std::size_t{1})]);
        std::copy(bytes.begin(), bytes.end(), copy.get());
      }
    }
  }

  /// As `ArbiterStore` has it. O(bytes + log n). Errors: `store_full`.
  Result<bool> put_if_absent(const BlobKey& key, std::span<const std::byte> bytes) {
    const std::shared_ptr<std::byte[]> copy(
        new std::byte[(std::max)(bytes.size(), std::size_t{1})]);
    std::copy(bytes.begin(), bytes.end(), copy.get());
    Content& c = *content_;
    const std::lock_guard lock(c.mutex);
    if (c.blobs.contains(key)) return false;
    KVMELD_TRY(c.room_for(bytes.size(), 0));
    c.used_bytes += bytes.size();
    c.blobs.emplace(key, Blob{copy, bytes.size()});
    return true;
  }

  /// O(log n), no copy. Errors: `not_found`.
  Result<Blob> get(const BlobKey& key) {
    const std::lock_guard lock(content_->mutex);
    const auto at = content_->blobs.find(key);
    if (at == content_->blobs.end())
      return detail::error(ErrorCode::not_found, "no blob ", key.hex());
    return at->second;
  }

  Result<bool> contains(const BlobKey& key) {
    const std::lock_guard lock(content_->mutex);
    return content_->blobs.contains(key);
  }

  /// What is not there is erased already. Holders of the blob keep its bytes.
  Status erase(const BlobKey& key) {
    Blob last;  // freed after the lock
    const std::lock_guard lock(content_->mutex);
    const auto at = content_->blobs.find(key);
    if (at == content_->blobs.end()) return {};
    last = std::move(at->second);
    content_->used_bytes -= last.size;
    content_->blobs.erase(at);
    return {};
  }

  /// Errors: `store_full`.
  Status add_record(std::span<const std::byte> bytes) { return replace_records(0, bytes); }

  /// O(bytes given).
  Result<RecordBatch> records(std::uint64_t cursor) {
    const std::lock_guard lock(content_->mutex);
    const Content& c = *content_;
    RecordBatch batch;
    batch.cursor = c.next_record;
    // No call gave a cursor beyond the end: it is another store's, and the beginning is the only
    // place that misses nothing.
    const std::uint64_t from = cursor > c.next_record ? 0 : cursor;
    for (auto at = c.records.lower_bound(from); at != c.records.end(); ++at)
      batch.records.push_back(at->second);
    return batch;
  }

  /// O(records replaced). Errors: `store_full`; `invalid_argument` for a cursor that this store
  /// never gave.
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) {
    std::vector<std::byte> copy(bytes.begin(), bytes.end());
    Content& c = *content_;
    const std::lock_guard lock(c.mutex);
    if (cursor > c.next_record) {
      return detail::error(ErrorCode::invalid_argument, "cursor ", cursor,
                           " of a store that gave none beyond ", c.next_record);
    }
    const auto end = c.records.lower_bound(cursor);
    std::size_t freed = 0;
    for (auto at = c.records.begin(); at != end; ++at) freed += at->second.size();
    KVMELD_TRY(c.room_for(copy.size(), freed));
    c.used_bytes = c.used_bytes - freed + copy.size();
    c.records.emplace_hint(c.records.end(), c.next_record++, std::move(copy));
    c.records.erase(c.records.begin(), c.records.lower_bound(cursor));
    return {};
  }

  /// Of blobs and records.
  [[nodiscard]] std::size_t used_bytes() const {
    const std::lock_guard lock(content_->mutex);
    return content_->used_bytes;
  }
  [[nodiscard]] std::size_t blob_count() const {
    const std::lock_guard lock(content_->mutex);
    return content_->blobs.size();
  }

 private:
  struct Content {
    mutable std::mutex mutex;
    std::map<BlobKey, Blob> blobs;
    // by number; cursor n has seen all below n
    std::map<std::uint64_t, std::vector<std::byte>> records;
    std::uint64_t next_record = 1;  // 0 is the cursor that has seen nothing
    std::size_t used_bytes = 0;
    std::size_t capacity_bytes = 0;

    [[nodiscard]] Status room_for(std::size_t more, std::size_t freed) const {
      const std::size_t kept = used_bytes - freed;
      if (kept <= capacity_bytes && more <= capacity_bytes - kept) return {};
      return detail::error(ErrorCode::store_full, more, " bytes more would make ", kept,
                           " exceed the store's capacity of ", capacity_bytes);
    }
  };

  std::shared_ptr<Content> content_;
};

KVMELD_NAMESPACE_END
