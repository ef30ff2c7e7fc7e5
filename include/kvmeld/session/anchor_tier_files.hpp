#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>

#include <kvmeld/session/payload_store.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The file tier: which payloads of a store are in use, and how many bytes they have. Payloads of
/// equal bytes share a file.
///
/// `put` and `get` may be called by several threads, all else by one at a time.
template <BlobStore Store>
class TierFiles {
 public:
  explicit TierFiles(Store store) : store_(std::move(store)) {}

  [[nodiscard]] bool known(const BlobKey& key) const { return uses_.contains(key); }
  /// Whether somebody is writing it just now.
  [[nodiscard]] bool busy(const BlobKey& key) const {
    const auto at = uses_.find(key);
    return at != uses_.end() && !at->second.written;
  }
  void hold(const BlobKey& key, std::size_t bytes) {
    Use& use = uses_[key];
    use.bytes = bytes;
    if (use.references++ == 0 && use.written) --unused_;
  }
  /// A payload of these bytes is chosen to leave, or is not any more.
  void leave(const BlobKey& key, bool leaves) {
    std::size_t& leaving = uses_[key].leaving;
    leaving += leaves ? 1 : std::size_t{0} - 1;
  }
  /// Whether the bytes go with those that are chosen to leave.
  [[nodiscard]] bool all_leave(const BlobKey& key) const {
    const auto at = uses_.find(key);
    return at != uses_.end() && at->second.leaving == at->second.references;
  }
  /// That `put` returned: even after an error something may be there.
  void settled(const BlobKey& key) { uses_[key].written = true; }
  void release(const BlobKey& key, std::atomic<std::size_t>& used) {
    if (--uses_[key].references != 0) return;
    ++unused_;
    (void)erase_unused(used);  // else at the next call
  }
  /// Erases what no payload has any more; its bytes count until that is done. Errors: the store's.
  Status erase_unused(std::atomic<std::size_t>& used) {
    Status status;
    for (auto at = uses_.begin(); unused_ != 0 && at != uses_.end();) {
      if (at->second.references == 0) {
        if (Status erased = erase(at->first); erased.ok()) {
          used.fetch_sub(at->second.bytes, std::memory_order_relaxed);
          at = uses_.erase(at);
          --unused_;
          continue;
        } else {
          status = std::move(erased);
        }
      }
      ++at;
    }
    return status;
  }

  /// Takes damaged bytes away, so that right ones can come in their place.
  void erase_damaged(const BlobKey& key) { (void)erase(key); }

  [[nodiscard]] Status put(const BlobKey& key, std::span<const std::byte> bytes) {
    if constexpr (PayloadStore<Store>) {
      return store_.put_payload(key, bytes).status();
    } else {
      return store_.put(key, bytes).status();
    }
  }
  [[nodiscard]] Result<Blob> get(const BlobKey& key) {
    if constexpr (PayloadStore<Store>) {
      return store_.map_payload(key);
    } else {
      return store_.get(key);
    }
  }

 private:
  struct Use {
    std::size_t references = 0;
    std::size_t leaving = 0;
    std::size_t bytes = 0;
    bool written = false;
  };
  [[nodiscard]] Status erase(const BlobKey& key) {
    if constexpr (PayloadStore<Store>) {
      return store_.erase_payload(key);
    } else {
      return store_.erase(key);
    }
  }

  Store store_;
  std::map<BlobKey, Use> uses_;
  std::size_t unused_ = 0;
};

}  // namespace detail
KVMELD_NAMESPACE_END
