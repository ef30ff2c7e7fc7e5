#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Tombstones in the order in which a peer heard of them, one for each key, however often that was
/// removed. O(log n) each.
///
/// What comes between two ticks gets the time of the later one: a peer knows no other, and by the
/// earlier one a tombstone would be older than it is and go before its time.
class AnchorGraves {
 public:
  struct Grave {
    std::int64_t since = 0;
    FragmentId key{};
  };

  /// The youngest from now on, without a time until the next `date`.
  void dig(const FragmentId& key) {
    fill(key);
    by_age_.emplace(++dug_, Grave{0, key});
    by_key_.emplace(key, dug_);
  }
  /// All that were dug since the last call are of this time.
  void date(std::int64_t now) {
    for (auto at = by_age_.upper_bound(dated_); at != by_age_.end(); ++at) at->second.since = now;
    dated_ = dug_;
  }
  /// For a key that lives again, or whose tombstone is forgotten.
  void fill(const FragmentId& key) {
    const auto at = by_key_.find(key);
    if (at == by_key_.end()) return;
    by_age_.erase(at->second);
    by_key_.erase(at);
  }
  [[nodiscard]] std::size_t size() const noexcept { return by_key_.size(); }
  /// Of at least one, all of which have a time.
  [[nodiscard]] const Grave& oldest() const { return by_age_.begin()->second; }

 private:
  std::uint64_t dug_ = 0;
  std::uint64_t dated_ = 0;  // of those dug, how many have a time
  std::map<std::uint64_t, Grave> by_age_;
  std::map<FragmentId, std::uint64_t> by_key_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
