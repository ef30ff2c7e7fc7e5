#pragma once

/// Values of one channel in ascending order, and the network that sorts them alike on every
/// backend.

#include <cstddef>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// The values that all contributions of one output token have in one channel, smallest first.
struct OrderedValues {
  const float* first = nullptr;
  std::ptrdiff_t stride = 1;  ///< floats from one value to the next
  int count = 0;

  [[nodiscard]] KVMELD_HD constexpr int size() const noexcept { return count; }
  /// The i-th smallest, 0 ≤ i < size().
  [[nodiscard]] KVMELD_HD constexpr float operator[](int i) const noexcept {
    return first[i * stride];
  }
};

/// Ranks first, …, last − 1 of the values in order.
struct Ranks {
  int first = 0;
  int last = 0;
};

/// The mean of some ranks, at most 64, summed in ascending order; where the sum leaves f32, that of
/// the values over 128.
[[nodiscard]] KVMELD_HD inline float mean_of(OrderedValues values, Ranks ranks) noexcept {
  const auto count = static_cast<float>(ranks.last - ranks.first);
  float sum = values[ranks.first];
  for (int i = ranks.first + 1; i < ranks.last; ++i) sum += values[i];
  if (sum - sum == 0.0F) return sum / count;
  sum = 0;
  for (int i = ranks.first; i < ranks.last; ++i) sum = fma(values[i], 0x1p-7F, sum);
  return sum / (count * 0x1p-7F);
}

namespace detail {

/// Contributions of a row that are sorted: they live on the stack.
inline constexpr int max_selected = 64;
inline constexpr std::ptrdiff_t selected_channels = 256;  ///< of a row that a host sorts at once

/// Puts the smaller of two values first. Equal ones stay, so that zeros of both signs end alike on
/// every backend.
KVMELD_HD KVMELD_ALWAYS_INLINE void exchange(float& a, float& b) noexcept {
  const float x = a, y = b;
  const bool swap = y < x;
  a = swap ? y : x;
  b = swap ? x : y;
}

/// The comparators of Batcher's merge exchange for any count (Knuth, The Art of Computer
/// Programming 3, 5.2.2 M), one after the other: which values meet does not depend on the values,
/// so that whole vectors of channels are sorted at once.
struct SortingNetwork {
  int count;
  int top = 1, p = 0, q = 0, r = 0, d = 0;
  int i = -1;

  KVMELD_HD KVMELD_ALWAYS_INLINE constexpr explicit SortingNetwork(int n) noexcept : count(n) {
    while (top * 2 < n) top *= 2;
    p = n < 2 ? 0 : top;
    q = top;
    d = p;
  }
  /// Moves to the next comparator, of places `i` and `i + d`; false after the last.
  KVMELD_HD KVMELD_ALWAYS_INLINE constexpr bool next() noexcept {
    for (++i; p > 0; i = 0) {
      for (; i < count - d; ++i) {
        if ((i & p) == r) return true;
      }
      if (q != p) {
        d = q - p;
        q /= 2;
        r = p;
      } else {
        p /= 2;
        q = top;
        r = 0;
        d = p;
      }
    }
    return false;
  }
};

/// Sorts one channel's values.
KVMELD_HD inline void sort_values(float* values, int count) noexcept {
  for (SortingNetwork network(count); network.next();)
    exchange(values[network.i], values[network.i + network.d]);
}

}  // namespace detail
KVMELD_NAMESPACE_END
