#pragma once

/// Compression of payloads by Zstandard, and the split of floats that helps it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include <zstd.h>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

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

// Compressed chunks by Zstandard (CMake component kvmeld::zstd).

namespace detail {

/// How a chunk's bytes are arranged before zstd sees them; part of the wire.
enum class Arrangement : std::uint8_t { plain = 0, f16 = 1, bf16 = 2, f32 = 3 };

struct FreeZstd {
  void operator()(ZSTD_CCtx* context) const noexcept { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const noexcept { ZSTD_freeDCtx(context); }
};

/// One zstd frame behind its size; false where zstd fails.
inline bool zstd_append(ZSTD_CCtx* context, std::span<const std::uint8_t> bytes, int level,
                        std::vector<std::byte>& out) {
  const std::size_t bound = ZSTD_compressBound(bytes.size());
  const std::size_t at = out.size();
  out.resize(at + sizeof(std::uint32_t) + bound);
  const std::size_t size = ZSTD_compressCCtx(context, out.data() + at + sizeof(std::uint32_t),
                                             bound, bytes.data(), bytes.size(), level);
  if (ZSTD_isError(size) != 0) return false;
  const auto written = static_cast<std::uint32_t>(size);
  std::memcpy(out.data() + at, &written, sizeof(written));
  out.resize(at + sizeof(written) + size);
  return true;
}

/// Reads such a frame into exactly `out`.
inline void zstd_read(extend::ByteReader& r, ZSTD_DCtx* context, std::span<std::uint8_t> out) {
  const auto frame = r.bytes(r.value<std::uint32_t>());
  if (!r.ok()) return;
  const std::size_t size =
      ZSTD_decompressDCtx(context, out.data(), out.size(), frame.data(), frame.size());
  if (ZSTD_isError(size) != 0 || size != out.size()) r.fail(ErrorCode::corrupt);
}

}  // namespace detail

/// Zstandard (RFC 8878) over f16, bf16 and f32 whose exponents were taken
/// relative to their channel's, over other elements as they are.
///
/// Lossless. Mantissas of a cache are noise, so the ratio is what sign and exponent leave: about
/// 1.2 for f16, 1.5 for bf16, 1.2 for f32 (docs/wire.md has the figures). Worth it where the
/// network is slower than some hundred MB/s.
class Zstd final : public Compressor {
 public:
  /// @param level zstd's; higher ones find nothing more in floats.
  explicit Zstd(int level = 1) noexcept : level_(level) {}

  [[nodiscard]] std::uint8_t codec() const noexcept override { return 1; }
  [[nodiscard]] bool compress(std::span<const std::byte> raw, const ChunkForm& form,
                              std::vector<std::byte>& out) const override {
    const std::size_t before = out.size();
    const std::unique_ptr<ZSTD_CCtx, detail::FreeZstd> context(ZSTD_createCCtx());
    bool done = context != nullptr && !raw.empty();
    if (done) {
      switch (form.row_elements == 0 ? ElementType::i8 : form.type) {
        case ElementType::f16:
          done = split<detail::F16Fields>(context.get(), detail::Arrangement::f16, raw, form, out);
          break;
        case ElementType::bf16:
          done =
              split<detail::Bf16Fields>(context.get(), detail::Arrangement::bf16, raw, form, out);
          break;
        case ElementType::f32:
          done = split<detail::F32Fields>(context.get(), detail::Arrangement::f32, raw, form, out);
          break;
        default:
          out.push_back(static_cast<std::byte>(detail::Arrangement::plain));
          done = detail::zstd_append(
              context.get(), {reinterpret_cast<const std::uint8_t*>(raw.data()), raw.size()},
              level_, out);
      }
    }
    if (!done) out.resize(before);
    return done;
  }

  [[nodiscard]] Status decompress(std::span<const std::byte> data,
                                  std::span<std::byte> raw) const override {
    extend::ByteReader r(data);
    const std::unique_ptr<ZSTD_DCtx, detail::FreeZstd> context(ZSTD_createDCtx());
    if (context == nullptr)
      return extend::error(ErrorCode::unsupported, "zstd gives no context for ", raw.size(),
                           " bytes");
    const auto arrangement = r.value<std::uint8_t>();
    switch (static_cast<detail::Arrangement>(arrangement)) {
      case detail::Arrangement::plain:
        detail::zstd_read(r, context.get(),
                          {reinterpret_cast<std::uint8_t*>(raw.data()), raw.size()});
        break;
      case detail::Arrangement::f16:
        join<detail::F16Fields>(r, context.get(), raw);
        break;
      case detail::Arrangement::bf16:
        join<detail::Bf16Fields>(r, context.get(), raw);
        break;
      case detail::Arrangement::f32:
        join<detail::F32Fields>(r, context.get(), raw);
        break;
      default:
        return extend::error(ErrorCode::unknown_field, "compressed chunk: arrangement ",
                             arrangement, " is unknown to this build");
    }
    return r.finish("compressed chunk");
  }

 private:
  template <class F>
  [[nodiscard]] bool split(ZSTD_CCtx* context, detail::Arrangement arrangement,
                           std::span<const std::byte> raw, const ChunkForm& form,
                           std::vector<std::byte>& out) const {
    const std::size_t elements = raw.size() / F::bytes;
    if (elements == 0) return false;
    const std::size_t columns = (std::min<std::size_t>)(form.row_elements, elements);
    detail::SplitPlanes planes;
    detail::split<F>(raw.first(elements * F::bytes), columns, planes);
    extend::ByteWriter head;
    head.value(arrangement);
    head.varint(columns);
    head.bytes(raw.subspan(elements * F::bytes));  // a last element's torn bytes
    out.insert(out.end(), head.written().begin(), head.written().end());
    bool done = detail::zstd_append(context, planes.bases, level_, out);
    for (unsigned p = 0; p < F::bytes && done; ++p) {
      done = detail::zstd_append(
          context, std::span<const std::uint8_t>(planes.planes).subspan(p * elements, elements),
          level_, out);
    }
    return done;
  }

  template <class F>
  static void join(extend::ByteReader& r, ZSTD_DCtx* context, std::span<std::byte> raw) {
    const std::size_t elements = raw.size() / F::bytes;
    const std::uint64_t columns = r.varint();
    if (columns == 0 || columns > elements) r.fail(ErrorCode::corrupt);
    const auto torn = r.bytes(raw.size() % F::bytes);
    if (!r.ok()) return;
    detail::SplitPlanes planes;
    planes.resize(elements, static_cast<std::size_t>(columns), F::bytes);
    detail::zstd_read(r, context, planes.bases);
    for (unsigned p = 0; p < F::bytes; ++p)
      detail::zstd_read(r, context, std::span(planes.planes).subspan(p * elements, elements));
    if (!r.ok()) return;
    detail::join<F>(planes, static_cast<std::size_t>(columns), raw.first(elements * F::bytes));
    std::copy(torn.begin(), torn.end(),
              raw.begin() + static_cast<std::ptrdiff_t>(elements * F::bytes));
  }

  int level_;
};

}  // namespace replica

KVMELD_NAMESPACE_END
