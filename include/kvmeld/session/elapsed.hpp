#pragma once

/// A clock that only goes forward, over one that may be set.

#include <algorithm>
#include <cstdint>
#include <optional>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Milliseconds that have passed by a caller's clock which may be set back or ahead. What waits
/// compares with this, never with the caller's own numbers: a clock that went back would hold every
/// deadline until it has caught up, and one that went ahead would end them all at once.
class Elapsed {
 public:
  /// @param longest_ms that one step may add, above 0: the longest that the caller is silent.
  explicit Elapsed(std::int64_t longest_ms) noexcept : longest_ms_(longest_ms) {}

  /// Takes the caller's clock in; returns what has passed since the first call. Time that the clock
  /// goes back counts as none, a jump ahead as `longest_ms` at most.
  std::int64_t advance(std::int64_t now_ms) noexcept {
    if (last_ && now_ms > *last_) {
      // The difference of two numbers of unlike sign may not fit; then it is above any bound.
      const std::uint64_t step =
          static_cast<std::uint64_t>(now_ms) - static_cast<std::uint64_t>(*last_);
      const auto longest = static_cast<std::uint64_t>((std::max)(longest_ms_, std::int64_t{1}));
      passed_ms_ += static_cast<std::int64_t>((std::min)(step, longest));
    }
    last_ = now_ms;
    return passed_ms_;
  }
  [[nodiscard]] std::int64_t ms() const noexcept { return passed_ms_; }

 private:
  std::int64_t longest_ms_;
  std::int64_t passed_ms_ = 0;
  std::optional<std::int64_t> last_{};
};

KVMELD_NAMESPACE_END
