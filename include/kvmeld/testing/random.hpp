#pragma once

#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/mix_bits.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// SplitMix64 (Steele, Lea and Flood, 2014): one seed gives the same numbers on every machine and
/// under every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  [[nodiscard]] std::uint64_t next() noexcept {
    return detail::mix_bits(state_ += 0x9E3779B97F4A7C15ULL);
  }
  /// In [0, n); 0 where n is 0.
  [[nodiscard]] std::size_t below(std::size_t n) noexcept {
    return n == 0 ? 0 : static_cast<std::size_t>(next() % n);
  }
  /// In [first, last].
  [[nodiscard]] std::int64_t between(std::int64_t first, std::int64_t last) noexcept {
    return first + static_cast<std::int64_t>(below(static_cast<std::size_t>(last - first + 1)));
  }
  /// True with a probability; draws one number whatever the probability is.
  [[nodiscard]] bool chance(double probability) noexcept {
    return static_cast<double>(next() >> 11U) * 0x1p-53 < probability;
  }

 private:
  std::uint64_t state_;
};

}  // namespace testing
KVMELD_NAMESPACE_END
