#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/mix_bits.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Tells about how many elements two sets do not share, from a few bytes.
///
/// Each of up to 64 counters adds a random sign for every element; the square of the difference of
/// two sets' counters is the size of their symmetric difference in expectation (Alon, Matias,
/// Szegedy 1996), with a standard deviation of √(2 / counters) times it in the mean.
class DifferenceEstimate {
 public:
  /// One bit of each word below `counters` is one element's sign.
  void add(std::uint64_t hash) noexcept {
    std::uint64_t carry = mix_bits(hash ^ 0x6A09E667F3BCC909U);
    ++elements_;
    for (std::uint64_t& plane : planes_) {  // 64 counters at once, bit i of each in planes_[i]
      const std::uint64_t next = plane & carry;
      plane ^= carry;
      carry = next;
      if (carry == 0) break;
    }
  }
  /// Σ of the signs of counter `i`.
  [[nodiscard]] std::int64_t counter(unsigned i) const noexcept {
    std::uint64_t ones = 0;
    for (std::size_t plane = 0; plane < planes_.size(); ++plane)
      ones |= ((planes_[plane] >> i) & 1U) << plane;
    return static_cast<std::int64_t>(elements_) - 2 * static_cast<std::int64_t>(ones);
  }
  void write(ByteWriter& out, unsigned counters) const {
    for (unsigned i = 0; i < counters; ++i) {
      // even: signs are as many as elements
      const auto half = (counter(i) - static_cast<std::int64_t>(elements_ & 1U)) / 2;
      out.varint((static_cast<std::uint64_t>(half) << 1U) ^ static_cast<std::uint64_t>(half >> 63));
    }
  }
  /// Size of the symmetric difference to the set of `elements` elements that wrote `counters`
  /// counters, 0 where none is seen.
  [[nodiscard]] double read(ByteReader& in, std::uint64_t elements, unsigned counters) const {
    double sum = 0;
    if (elements >> 62U != 0) in.fail(ErrorCode::corrupt);
    for (unsigned i = 0; i < counters; ++i) {
      const std::uint64_t zigzag = in.varint();
      const std::uint64_t magnitude = (zigzag >> 1U) + (zigzag & 1U);
      if (magnitude > elements / 2 + 1) in.fail(ErrorCode::corrupt);
      if (!in.ok()) return 0;
      const auto half =
          static_cast<std::int64_t>(zigzag >> 1U) ^ -static_cast<std::int64_t>(zigzag & 1U);
      const auto apart =
          static_cast<double>(2 * half + static_cast<std::int64_t>(elements & 1U) - counter(i));
      sum += apart * apart;
    }
    return sum / counters;
  }

 private:
  std::array<std::uint64_t, 40> planes_{};
  std::uint64_t elements_ = 0;
};

}  // namespace detail

KVMELD_NAMESPACE_END
