#pragma once

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

#include <kvmeld/session/transport.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What the members of one hub share.
struct MemoryPost {
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;  // one copy for all receivers
  struct Inbox {
    std::deque<std::pair<MemberId, Bytes>> waiting;
    std::size_t waiting_bytes = 0;
    std::condition_variable arrived;
  };

  std::mutex mutex;
  std::map<MemberId, std::shared_ptr<Inbox>> members;
  std::size_t max_message_bytes = 0;
  std::size_t inbox_bytes = 0;
  std::uint64_t lost = 0;

  /// Under the mutex.
  void deliver(Inbox& inbox, MemberId from, const Bytes& bytes) {
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
/// Models `Transport`. All calls are thread-safe; `send` never waits for a receiver. Leaves the hub
/// when destroyed; the hub's members outlive the hub.
class MemoryTransport {
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
  ~MemoryTransport() {
    if (post_ == nullptr) return;
    const std::lock_guard lock(post_->mutex);
    post_->members.erase(self_);
  }

  [[nodiscard]] MemberId self() const noexcept { return self_; }
  [[nodiscard]] std::size_t max_message_bytes() const noexcept { return post_->max_message_bytes; }

  /// Hands a message to a member, or to all others; one copy. A member that is not there misses it,
  /// and that is no error.
  ///
  /// Errors: `oversized`.
  Status send(MemberId to, std::span<const std::byte> bytes) {
    if (bytes.size() > post_->max_message_bytes) {
      return detail::error(ErrorCode::oversized, "a message of ", bytes.size(),
                           " bytes; this hub takes ", post_->max_message_bytes);
    }
    if (to == self_) return {};
    const auto copy = std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
    const std::lock_guard lock(post_->mutex);
    if (to != everyone) {
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
  Result<std::optional<Envelope>> receive(std::int64_t timeout_ms) {
    std::pair<MemberId, detail::MemoryPost::Bytes> first;
    {
      std::unique_lock lock(post_->mutex);
      const auto some = [this] { return !inbox_->waiting.empty(); };
      if (timeout_ms > 0) {
        // A year at most, far from where the clock's arithmetic overflows.
        const std::chrono::milliseconds wait((std::min)(timeout_ms, std::int64_t{31'536'000'000}));
        inbox_->arrived.wait_for(lock, wait, some);
      }
      if (!some()) return std::optional<Envelope>();
      first = std::move(inbox_->waiting.front());
      inbox_->waiting.pop_front();
      inbox_->waiting_bytes -= first.second->size();
    }
    return std::optional<Envelope>(Envelope{first.first, *first.second});
  }

 private:
  friend class MemoryHub;
  MemoryTransport(std::shared_ptr<detail::MemoryPost> post,
                  std::shared_ptr<detail::MemoryPost::Inbox> inbox, MemberId self)
      : post_(std::move(post)), inbox_(std::move(inbox)), self_(self) {}

  std::shared_ptr<detail::MemoryPost> post_;  // null once moved from
  std::shared_ptr<detail::MemoryPost::Inbox> inbox_;
  MemberId self_ = 0;
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
  [[nodiscard]] Result<MemoryTransport> join(MemberId member) {
    auto inbox = std::make_shared<detail::MemoryPost::Inbox>();
    const std::lock_guard lock(post_->mutex);
    if (member == everyone || !post_->members.emplace(member, inbox).second) {
      return detail::error(ErrorCode::invalid_argument, "member ", member,
                           member == everyone ? " stands for everyone" : " is here already");
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

KVMELD_NAMESPACE_END
