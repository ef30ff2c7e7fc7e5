#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// How an anchor was used, in ticks of its pool: a tick is a change of the pool or a look-up that
/// reused something.
struct AnchorUse {
  std::uint64_t inserted = 0;   ///< tick of its first commit; no two anchors share one
  std::uint64_t last_used = 0;  ///< tick of its last commit or reuse
  std::uint64_t uses = 0;       ///< reuses
};

/// Picks the anchor that leaves a full pool: an index into the uses of those that may.
///
/// Semantic requirements: the choice depends on the uses alone, not on their order; `uses` is not
/// empty.
template <class E>
concept EvictionPolicy = std::copyable<E> &&
    requires(const E& eviction, std::span<const AnchorUse> uses, Hasher& hasher) {
  { eviction.victim(uses) } -> std::same_as<std::size_t>;
  eviction.digest(hasher);
};

/// Evicts what was used longest ago. O(n).
struct LRU {
  [[nodiscard]] std::size_t victim(std::span<const AnchorUse> uses) const noexcept {
    const auto key = [](const AnchorUse& u) { return std::tuple(u.last_used, u.inserted); };
    return static_cast<std::size_t>(
        std::min_element(uses.begin(), uses.end(),
                         [&](const auto& a, const auto& b) { return key(a) < key(b); }) -
        uses.begin());
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.LRU"); }
};

/// Evicts what was used least often, of equals what was used longest ago. O(n).
struct LFU {
  [[nodiscard]] std::size_t victim(std::span<const AnchorUse> uses) const noexcept {
    const auto key = [](const AnchorUse& u) { return std::tuple(u.uses, u.last_used, u.inserted); };
    return static_cast<std::size_t>(
        std::min_element(uses.begin(), uses.end(),
                         [&](const auto& a, const auto& b) { return key(a) < key(b); }) -
        uses.begin());
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.LFU"); }
};

/// Evicts the least used of the `window` oldest, so that a newcomer has time to be used. O(n).
struct WindowLFU {
  std::size_t window = 100;  ///< 0 counts as 1: first in, first out

  [[nodiscard]] std::size_t victim(std::span<const AnchorUse> uses) const {
    std::uint64_t newest = ~std::uint64_t{0};  // of the window
    const std::size_t count = (std::max)(window, std::size_t{1});
    if (count < uses.size()) {
      std::vector<std::uint64_t> ages;
      for (const AnchorUse& u : uses) ages.push_back(u.inserted);
      const auto last = ages.begin() + static_cast<std::ptrdiff_t>(count - 1);
      std::nth_element(ages.begin(), last, ages.end());
      newest = *last;
    }
    std::size_t best = uses.size();
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (uses[i].inserted > newest) continue;
      const auto key = [](const AnchorUse& u) {
        return std::tuple(u.uses, u.last_used, u.inserted);
      };
      if (best == uses.size() || key(uses[i]) < key(uses[best])) best = i;
    }
    return best;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.WindowLFU");
    hasher.value(static_cast<std::uint64_t>(window));
  }
};

KVMELD_NAMESPACE_END
