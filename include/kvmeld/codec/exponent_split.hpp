#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Rows that share their columns' bases: few enough to follow a channel, enough that the bases cost
/// little.
inline constexpr std::size_t split_tile_rows = 64;

/// A float's fields as the split sees them. f16, bf16 and f32 are known.
template <class Word, unsigned Exponent>
struct FloatFields {
  using word = Word;
  static constexpr unsigned bytes = sizeof(Word);
  static constexpr unsigned exponent_bits = Exponent;
  static constexpr unsigned mantissa_bits = 8 * sizeof(Word) - 1 - Exponent;
  static constexpr std::uint32_t exponent_mask = (1U << Exponent) - 1;
  static constexpr std::uint32_t mantissa_mask = (1U << mantissa_bits) - 1;
};
using F16Fields = FloatFields<std::uint16_t, 5>;
using Bf16Fields = FloatFields<std::uint16_t, 8>;
using F32Fields = FloatFields<std::uint32_t, 8>;

/// Byte planes of a matrix of floats, its exponents brought near zero by column: what is left of
/// them is skewed and compresses, the mantissas are noise and stay by themselves.
///
/// For each tile of 64 rows and each column: base = its largest exponent, sign = its commoner sign.
/// Of an element, plane 0 holds base − exponent and whether the sign is the other one, the last
/// planes hold the mantissa. Lossless for every bit pattern. Follows the exponent grouping of
/// byte-plane float compressors (zfp's block-floating-point common exponent, Lindstrom 2014,
/// doi:10.1109/TVCG.2014.2346458), by channel since channels of K differ in magnitude.
struct SplitPlanes {
  std::vector<std::uint8_t> bases;   ///< (tiles, 2, columns): exponents, then signs
  std::vector<std::uint8_t> planes;  ///< (bytes of an element, elements)

  void resize(std::size_t elements, std::size_t columns, unsigned bytes) {
    const std::size_t rows = (elements + columns - 1) / columns;
    bases.resize((rows + split_tile_rows - 1) / split_tile_rows * 2 * columns);
    planes.resize(elements * bytes);
  }
};

template <class F>
[[nodiscard]] std::uint32_t load_word(const std::byte* at) noexcept {
  typename F::word word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

/// The two streams of one row; `n` elements from `at`, whose planes are `stride` apart.
template <class F>
void split_row(const std::byte* at, std::size_t n, const std::uint8_t* base,
               const std::uint8_t* sign, std::uint8_t* out, std::size_t stride) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = load_word<F>(at + i * F::bytes);
    const std::uint32_t d = (base[i] - (word >> F::mantissa_bits)) & F::exponent_mask;
    const std::uint32_t other = (word >> (8 * F::bytes - 1)) ^ sign[i];
    const std::uint32_t m = word & F::mantissa_mask;
    if constexpr (F::exponent_bits == 5) {
      out[i] = static_cast<std::uint8_t>(d << 3U | (m >> 8U) << 1U | other);
      out[stride + i] = static_cast<std::uint8_t>(m);
    } else {
      const std::uint32_t rest = (d >> 7U) << F::mantissa_bits | m;
      out[i] = static_cast<std::uint8_t>(d << 1U | other);
      for (unsigned p = 1; p < F::bytes; ++p)
        out[p * stride + i] = static_cast<std::uint8_t>(rest >> (8 * (F::bytes - 1 - p)));
    }
  }
}

template <class F>
void join_row(std::byte* at, std::size_t n, const std::uint8_t* base, const std::uint8_t* sign,
              const std::uint8_t* in, std::size_t stride) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t d = 0, m = 0;
    if constexpr (F::exponent_bits == 5) {
      d = in[i] >> 3U;
      m = static_cast<std::uint32_t>(in[i] >> 1U & 3U) << 8U | in[stride + i];
    } else {
      std::uint32_t rest = 0;
      for (unsigned p = 1; p < F::bytes; ++p)
        rest |= static_cast<std::uint32_t>(in[p * stride + i]) << (8 * (F::bytes - 1 - p));
      d = (rest >> F::mantissa_bits) << 7U | in[i] >> 1U;
      m = rest & F::mantissa_mask;
    }
    const std::uint32_t e = (base[i] - d) & F::exponent_mask;
    const std::uint32_t s = (in[i] ^ sign[i]) & 1U;
    const auto word =
        static_cast<typename F::word>(s << (8 * F::bytes - 1) | e << F::mantissa_bits | m);
    std::memcpy(at + i * F::bytes, &word, sizeof(word));
  }
}

/// Splits `raw`, whose size is a multiple of the element; the last row may be short. O(bytes).
template <class F>
void split(std::span<const std::byte> raw, std::size_t columns, SplitPlanes& out) {
  const std::size_t elements = raw.size() / F::bytes;
  out.resize(elements, columns, F::bytes);
  std::vector<std::uint8_t> negative(columns);
  std::uint8_t* base = out.bases.data();
  for (std::size_t first = 0; first < elements;
       first += split_tile_rows * columns, base += 2 * columns) {
    const std::size_t last = (std::min)(elements, first + split_tile_rows * columns);
    std::uint8_t* const sign = base + columns;
    std::fill_n(base, columns, std::uint8_t{0});
    std::fill(negative.begin(), negative.end(), std::uint8_t{0});
    for (std::size_t row = first; row < last; row += columns) {
      const std::size_t n = (std::min)(columns, last - row);
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t word = load_word<F>(raw.data() + (row + i) * F::bytes);
        base[i] = (std::max)(
            base[i], static_cast<std::uint8_t>(word >> F::mantissa_bits & F::exponent_mask));
        negative[i] = static_cast<std::uint8_t>(negative[i] + (word >> (8 * F::bytes - 1)));
      }
    }
    for (std::size_t i = 0; i < columns; ++i) sign[i] = negative[i] > split_tile_rows / 2 ? 1 : 0;
    for (std::size_t row = first; row < last; row += columns) {
      split_row<F>(raw.data() + row * F::bytes, (std::min)(columns, last - row), base, sign,
                   out.planes.data() + row, elements);
    }
  }
}

/// Undoes `split`; `in` was resized for `raw`, and may hold anything.
template <class F>
void join(const SplitPlanes& in, std::size_t columns, std::span<std::byte> raw) noexcept {
  const std::size_t elements = raw.size() / F::bytes;
  for (std::size_t row = 0; row < elements; row += columns) {
    const std::uint8_t* const base =
        in.bases.data() + row / columns / split_tile_rows * 2 * columns;
    join_row<F>(raw.data() + row * F::bytes, (std::min)(columns, elements - row), base,
                base + columns, in.planes.data() + row, elements);
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
