#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Tombstones in the order in which a peer heard of them, one for each key, however often that was removed. O(log n) each.
class AnchorGraves {
 public:
  struct Grave {
    std::int64_t since = 0;
    FragmentId key{};
  };

  /// The youngest from now on.
  void dig(const FragmentId& key, std::int64_t now) {
    fill(key);
    by_age_.emplace(++dug_, Grave{now, key});
    by_key_.emplace(key, dug_);
  }
  /// For a key that lives again, or whose tombstone is forgotten.
  void fill(const FragmentId& key) {
    const auto at = by_key_.find(key);
    if (at == by_key_.end()) return;
    by_age_.erase(at->second);
    by_key_.erase(at);
  }
  [[nodiscard]] std::size_t size() const noexcept { return by_key_.size(); }
  /// Of at least one.
  [[nodiscard]] const Grave& oldest() const { return by_age_.begin()->second; }

 private:
  std::uint64_t dug_ = 0;
  std::map<std::uint64_t, Grave> by_age_;
  std::map<FragmentId, std::uint64_t> by_key_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
