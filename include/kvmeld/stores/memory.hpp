#pragma once

/// A store and a transport in memory, for one process and for tests.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace stores {

/// Keeps everything in this process: the embedded default, and what replicas of one process meet
/// in.
///
/// Durable as long as one handle lives. A copy is another handle on the same
/// content; all calls are thread-safe and none waits for more than the copy of a map's node. `get`
/// shares the bytes, whatever their size.
class MemoryStore : public replica::ArbiterStore {
 public:
  /// @param capacity_bytes blobs and records together; one more byte is `store_full`.
  explicit MemoryStore(std::size_t capacity_bytes = ~std::size_t{0})
      : content_(std::make_shared<Content>()) {
    content_->capacity_bytes = capacity_bytes;
  }

  /// O(bytes + log n). Errors: `store_full`.
  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) override {
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
  Result<bool> put_if_absent(const BlobKey& key, std::span<const std::byte> bytes) override {
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
  Result<Blob> get(const BlobKey& key) override {
    const std::lock_guard lock(content_->mutex);
    const auto at = content_->blobs.find(key);
    if (at == content_->blobs.end())
      return extend::error(ErrorCode::not_found, "no blob ", key.hex());
    return at->second;
  }

  Result<bool> contains(const BlobKey& key) override {
    const std::lock_guard lock(content_->mutex);
    return content_->blobs.contains(key);
  }

  /// What is not there is erased already. Holders of the blob keep its bytes.
  Status erase(const BlobKey& key) override {
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
  Status add_record(std::span<const std::byte> bytes) override { return replace_records(0, bytes); }

  /// O(bytes given).
  Result<replica::RecordBatch> records(std::uint64_t cursor) override {
    const std::lock_guard lock(content_->mutex);
    const Content& c = *content_;
    replica::RecordBatch batch;
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
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    std::vector<std::byte> copy(bytes.begin(), bytes.end());
    Content& c = *content_;
    const std::lock_guard lock(c.mutex);
    if (cursor > c.next_record) {
      return extend::error(ErrorCode::invalid_argument, "cursor ", cursor,
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
      return extend::error(ErrorCode::store_full, more, " bytes more would make ", kept,
                           " exceed the store's capacity of ", capacity_bytes);
    }
  };

  std::shared_ptr<Content> content_;
};

namespace detail {

/// What the members of one hub share.
struct MemoryPost {
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;  // one copy for all receivers
  struct Inbox {
    std::deque<std::pair<replica::MemberId, Bytes>> waiting;
    std::size_t waiting_bytes = 0;
    std::condition_variable arrived;
  };

  std::mutex mutex;
  std::map<replica::MemberId, std::shared_ptr<Inbox>> members;
  std::size_t max_message_bytes = 0;
  std::size_t inbox_bytes = 0;
  std::uint64_t lost = 0;

  /// Under the mutex.
  void deliver(Inbox& inbox, replica::MemberId from, const Bytes& bytes) {
    if (bytes->size() > inbox_bytes - inbox.waiting_bytes) {
      ++lost;
      return;
    }
    inbox.waiting.emplace_back(from, bytes);
    inbox.waiting_bytes += bytes->size();
    inbox.arrived.notify_one();
  }
};

}  // namespace detail

/// One member's end of a `MemoryHub`: messages arrive in order and once, unless the receiver's
/// inbox is full.
///
/// All calls are thread-safe; `send` never waits for a receiver. Leaves the hub
/// when destroyed; the hub's members outlive the hub.
class MemoryTransport final : public replica::Transport {
 public:
  MemoryTransport(MemoryTransport&& other) noexcept
      : post_(std::move(other.post_)), inbox_(std::move(other.inbox_)), self_(other.self_) {}
  MemoryTransport& operator=(MemoryTransport&& other) noexcept {
    std::swap(post_, other.post_);
    std::swap(inbox_, other.inbox_);
    std::swap(self_, other.self_);
    return *this;
  }
  MemoryTransport(const MemoryTransport&) = delete;
  MemoryTransport& operator=(const MemoryTransport&) = delete;
  ~MemoryTransport() override {
    if (post_ == nullptr) return;
    const std::lock_guard lock(post_->mutex);
    post_->members.erase(self_);
  }

  [[nodiscard]] replica::MemberId self() const noexcept override { return self_; }
  [[nodiscard]] std::size_t max_message_bytes() const noexcept override {
    return post_->max_message_bytes;
  }

  /// Hands a message to a member, or to all others; one copy. A member that is not there misses it,
  /// and that is no error.
  ///
  /// Errors: `oversized`.
  Status send(replica::MemberId to, std::span<const std::byte> bytes) override {
    if (bytes.size() > post_->max_message_bytes) {
      return extend::error(ErrorCode::oversized, "a message of ", bytes.size(),
                           " bytes; this hub takes ", post_->max_message_bytes);
    }
    if (to == self_) return {};
    const auto copy = std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
    const std::lock_guard lock(post_->mutex);
    if (to != replica::everyone) {
      if (const auto at = post_->members.find(to); at != post_->members.end())
        post_->deliver(*at->second, self_, copy);
      return {};
    }
    for (const auto& [member, inbox] : post_->members) {
      if (member != self_) post_->deliver(*inbox, self_, copy);
    }
    return {};
  }

  /// The message that has waited longest; none when none came within the time.
  Result<std::optional<replica::Envelope>> receive(std::int64_t timeout_ms) override {
    std::pair<replica::MemberId, detail::MemoryPost::Bytes> first;
    {
      std::unique_lock lock(post_->mutex);
      const auto some = [this] { return !inbox_->waiting.empty(); };
      if (timeout_ms > 0) {
        // A year at most, far from where the clock's arithmetic overflows.
        const std::chrono::milliseconds wait((std::min)(timeout_ms, std::int64_t{31'536'000'000}));
        inbox_->arrived.wait_for(lock, wait, some);
      }
      if (!some()) return std::optional<replica::Envelope>();
      first = std::move(inbox_->waiting.front());
      inbox_->waiting.pop_front();
      inbox_->waiting_bytes -= first.second->size();
    }
    return std::optional<replica::Envelope>(replica::Envelope{first.first, *first.second});
  }

 private:
  friend class MemoryHub;
  MemoryTransport(std::shared_ptr<detail::MemoryPost> post,
                  std::shared_ptr<detail::MemoryPost::Inbox> inbox, replica::MemberId self)
      : post_(std::move(post)), inbox_(std::move(inbox)), self_(self) {}

  std::shared_ptr<detail::MemoryPost> post_;  // null once moved from
  std::shared_ptr<detail::MemoryPost::Inbox> inbox_;
  replica::MemberId self_ = 0;
};

/// Where members of one process exchange messages. A copy is the same hub.
class MemoryHub {
 public:
  /// @param max_message_bytes longer messages are refused;
  /// @param inbox_bytes what may wait for one member; what comes on top is lost, so that a member
  /// that never looks costs no more.
  explicit MemoryHub(std::size_t max_message_bytes = std::size_t{64} << 20U,
                     std::size_t inbox_bytes = std::size_t{256} << 20U)
      : post_(std::make_shared<detail::MemoryPost>()) {
    post_->max_message_bytes = max_message_bytes;
    post_->inbox_bytes = inbox_bytes;
  }

  /// Takes a member in; it gets what is sent from now on. Errors: `invalid_argument` where the id
  /// is taken or is `everyone`.
  [[nodiscard]] Result<MemoryTransport> join(replica::MemberId member) {
    auto inbox = std::make_shared<detail::MemoryPost::Inbox>();
    const std::lock_guard lock(post_->mutex);
    if (member == replica::everyone || !post_->members.emplace(member, inbox).second) {
      return extend::error(
          ErrorCode::invalid_argument, "member ", member,
          member == replica::everyone ? " stands for everyone" : " is here already");
    }
    return MemoryTransport(post_, std::move(inbox), member);
  }

  /// Messages that found an inbox full.
  [[nodiscard]] std::uint64_t lost() const {
    const std::lock_guard lock(post_->mutex);
    return post_->lost;
  }

 private:
  std::shared_ptr<detail::MemoryPost> post_;
};

}  // namespace stores

KVMELD_NAMESPACE_END
