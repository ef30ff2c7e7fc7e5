#pragma once

/// Cosines and sines for the shifts that one render needs, computed once and shared by every key.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/cache/rope.hpp>
#include <kvmeld/cache/rope_frequencies.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// One table row, 8 pairs at a time so that the f64 routines become vector code.
KVMELD_ALWAYS_INLINE void fill_rope_row(double shift, const double* frequencies, std::size_t pairs,
                                        float* row) noexcept {
  constexpr std::size_t block = 8;
  std::size_t i = 0;
  for (; i + block <= pairs; i += block) {
    float cosines[block], sines[block];
    for (std::size_t j = 0; j < block; ++j) {
      const math::SinCos at = math::sin_cos(shift * frequencies[i + j]);
      cosines[j] = static_cast<float>(at.cos);
      sines[j] = static_cast<float>(at.sin);
    }
    for (std::size_t j = 0; j < block; ++j) row[i + j] = cosines[j];
    for (std::size_t j = 0; j < block; ++j) row[pairs + i + j] = sines[j];
  }
  for (; i < pairs; ++i) {
    const math::SinCos at = math::sin_cos(shift * frequencies[i]);
    row[i] = static_cast<float>(at.cos);
    row[pairs + i] = static_cast<float>(at.sin);
  }
}

inline void fill_rope_row_baseline(double shift, const double* frequencies, std::size_t pairs,
                                   float* row) noexcept {
  fill_rope_row(shift, frequencies, pairs, row);
}
KVMELD_TARGET_AVX2 inline void fill_rope_row_avx2(double shift, const double* frequencies,
                                                  std::size_t pairs, float* row) noexcept {
  fill_rope_row(shift, frequencies, pairs, row);
}
KVMELD_TARGET_AVX512 inline void fill_rope_row_avx512(double shift, const double* frequencies,
                                                      std::size_t pairs, float* row) noexcept {
  fill_rope_row(shift, frequencies, pairs, row);
}

/// The row filler for an instruction set; bytes are the same for each.
[[nodiscard]] inline auto rope_row_filler(Isa isa) noexcept {
  return isa == Isa::avx512 ? fill_rope_row_avx512
         : isa == Isa::avx2 ? fill_rope_row_avx2
                            : fill_rope_row_baseline;
}

}  // namespace detail

/// Rows of cosines and sines in f32, one row a shift, of unit magnitude whatever the scaling.
///
/// Row s: `pairs()` cosines, then `pairs()` sines; each row starts on a 64-byte boundary,
/// `row_stride()` floats apart, so `data()` can be copied to a device as it lies. YaRN's attention
/// factor is not in it: keys carry that already, and a shift that applies it again scales them (by
/// 1.1386 for factor 4).
///
/// Accuracy: the angle is shift * frequency in f64, its cosine and sine are rounded once to f32, so
/// an entry is within 2^-25 + |angle| * 2^-50 of the exact one, and cos^2 + sin^2 within 2^-23 of
/// 1. Bytes do not depend on compiler or processor.
class RopeTable {
 public:
  /// A table without rows, as of layers whose keys carry no position.
  RopeTable() = default;

  /// Computes one row for each shift, in the order given; the caller keeps them distinct.
  ///
  /// `context_length` picks the frequencies where they depend on it (see `inverse_frequencies`);
  /// `check_shift` says whether the shift is sound there at all. O(shifts * pairs). Errors: those
  /// of `validate`; `invalid_argument` for
  /// |shift| above `max_rope_shift` or a missing length.
  KVMELD_LAZY [[nodiscard]] static Result<RopeTable> build(const RopeSpec& rope,
                                                           std::span<const std::int64_t> shifts,
                                                           std::int64_t context_length = 0) {
    for (std::size_t s = 0; s < shifts.size(); ++s)
      if (shifts[s] > max_rope_shift || shifts[s] < -max_rope_shift)
        return detail::error(ErrorCode::invalid_argument, "rope: shift ", s, " is ", shifts[s],
                             ", beyond ", max_rope_shift, " positions");
    const Result<std::vector<double>> frequencies = inverse_frequencies(rope, context_length);
    if (!frequencies) return frequencies.error();
    RopeTable table;
    table.pairs_ = frequencies->size();
    table.rows_ = shifts.size();
    table.blocks_per_row_ = (2 * table.pairs_ + Block::size - 1) / Block::size;
    table.blocks_.resize(table.rows_ * table.blocks_per_row_);
    if (table.pairs_ == 0) return table;  // no rope: rows hold nothing and have no address
    const auto fill = detail::rope_row_filler(best_isa());
    for (std::size_t s = 0; s < table.rows_; ++s)
      fill(static_cast<double>(shifts[s]), frequencies->data(), table.pairs_, table.mutable_row(s));
    return table;
  }

  /// The row of the shift that was given at this place. (cosines: pairs, sines: pairs)
  [[nodiscard]] const float* row(std::size_t shift_index) const noexcept {
    return blocks_.empty() ? nullptr : blocks_[shift_index * blocks_per_row_].values;
  }

  /// Shifts, channel pairs, floats from one row to the next, and everything that a device needs
  /// copied.
  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::size_t pairs() const noexcept { return pairs_; }
  [[nodiscard]] std::size_t row_stride() const noexcept { return blocks_per_row_ * Block::size; }
  [[nodiscard]] const float* data() const noexcept { return row(0); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return blocks_.size() * sizeof(Block); }

 private:
  struct alignas(64) Block {
    static constexpr std::size_t size = 16;
    float values[size] = {};
  };
  // std::vector aligns its elements and not its rows, hence whole blocks.
  [[nodiscard]] float* mutable_row(std::size_t s) noexcept {
    return blocks_.data()[s * blocks_per_row_].values;
  }

  std::size_t rows_ = 0;
  std::size_t pairs_ = 0;
  std::size_t blocks_per_row_ = 0;
  std::vector<Block> blocks_;
};

KVMELD_NAMESPACE_END
