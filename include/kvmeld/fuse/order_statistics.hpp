#pragma once

#include <cstdint>

#include <kvmeld/fuse/fuser.hpp>

KVMELD_NAMESPACE_BEGIN

/// The middle value of each channel, of an even number the mean of the two middle ones.
///
/// Holds while fewer than half of the contributions lie: at most ⌈n/2⌉ − 1 of n. A channel's result
/// comes from one agent, a row's from several, so the row need not be one that any model wrote.
/// Keys are compared un-rotated. Weights play no part. O(n log² n) a channel, n ≤ 64. (Yin et al.,
/// Byzantine-Robust Distributed Learning, 2018.)
struct Median {
  static constexpr bool reproducible = true;
  static constexpr bool keeps_single = true;

  [[nodiscard]] KVMELD_HD Ranks ranks(int count) const noexcept {
    return {(count - 1) / 2, count / 2 + 1};
  }
  [[nodiscard]] KVMELD_HD float select(OrderedValues values) const noexcept {
    return mean_of(values, ranks(values.size()));
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.Median"); }
};

/// The mean of each channel without its `f` smallest and `f` largest values.
///
/// Holds while at most f contributions lie, n > 2f; every row with two contributions or more must
/// have so many. Keys are compared un-rotated. Weights play no part. O(n log² n) a channel, n ≤ 64.
/// (Yin et al. 2018.) Errors: `invalid_argument` for f below 0, or n ≤ 2f.
struct TrimmedMean {
  static constexpr bool reproducible = true;
  static constexpr bool keeps_single = true;
  std::int32_t f = 1;  ///< values dropped at each end

  KVMELD_LAZY [[nodiscard]] Status check(std::int64_t contributions) const {
    if (f >= 0 && contributions > 2 * std::int64_t{f}) return {};
    return detail::error(ErrorCode::invalid_argument, "TrimmedMean{f = ", f, "} needs more than ",
                         2 * std::int64_t{f}, " contributions, there are ", contributions);
  }
  [[nodiscard]] KVMELD_HD Ranks ranks(int count) const noexcept { return {f, count - f}; }
  [[nodiscard]] KVMELD_HD float select(OrderedValues values) const noexcept {
    return mean_of(values, ranks(values.size()));
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.TrimmedMean");
    hasher.value(f);
  }
};

KVMELD_NAMESPACE_END
