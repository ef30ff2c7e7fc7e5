#pragma once

/// Many rows turned by one angle, vectorised: what a concatenation spends its time on.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache/rope_rotate.hpp>
#include <kvmeld/cache/stream_copy.hpp>
#include <kvmeld/cache/turn.hpp>
#include <kvmeld/cache/turn_wide.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/row_lanes.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

#if KVMELD_X86_DISPATCH

/// The factors of one turn, ordered as the vectors of a type take them.
struct TurnTables {
  alignas(32) float first[1024];
  alignas(32) float second[1024];

  /// Half split: the cosines and sines of each 16 pairs in `Lanes16` order.
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void halves(const float* cos, const float* sin,
                                                      std::int32_t half) noexcept {
    for (std::int32_t i = 0; i + 16 <= half; i += 16) {
      order<type>(cos + i, first + i);
      order<type>(sin + i, second + i);
    }
  }
  /// Interleaved pairs (a, b) become fma((a, a), (cos, sin), (b, b) * (-sin, cos)).
  KVMELD_LAZY void pairs(const float* cos, const float* sin, std::int32_t half) noexcept {
    for (std::int32_t i = 0; i < half; ++i) {
      first[2 * i] = cos[i];
      first[2 * i + 1] = sin[i];
      second[2 * i] = -sin[i];
      second[2 * i + 1] = cos[i];
    }
  }

 private:
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void order(const float* in, float* out) noexcept {
    const FloatLanes a = load_lanes(in);
    const FloatLanes b = load_lanes(in + 8);
    if constexpr (Lanes16<type>::even_odd) {
      store_lanes(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14), out);
      store_lanes(__builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15), out + 8);
    } else {
      store_lanes(a, out);
      store_lanes(b, out + 8);
    }
  }
};

/// The pairs of one row from `i` on that vectors do not fill.
template <ElementType type>
KVMELD_NOINLINE void turn_rest(Turn turn, std::int32_t i, const std::byte* in,
                               std::byte* out) noexcept {
  const std::int32_t half = turn.rotary_channels / 2;
  const bool halves = turn.pairing == RopePairing::half_split;
  for (; i < half; ++i) {
    const std::int32_t first = turn.first_channel + (halves ? i : 2 * i);
    const std::int32_t second = first + (halves ? half : 1);
    float a = load_one<type>(in, first);
    float b = load_one<type>(in, second);
    rotate_pair(a, b, turn.table[i], turn.table[half + i]);
    store_one<type>(out, first, a);
    store_one<type>(out, second, b);
  }
}

/// Writes one vector past the caches; `out` is a multiple of its size.
template <int bytes>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void stream_piece(const std::byte* in,
                                                          std::byte* out) noexcept {
  typedef vector_t<long long, bytes> Stored;
  const Stored piece = *reinterpret_cast<const unaligned_vector_t<long long, bytes>*>(in);
#if defined(__clang__)
  __builtin_nontemporal_store(piece, reinterpret_cast<Stored*>(out));
#else
  if constexpr (bytes == 16) {
    __builtin_ia32_movntdq(reinterpret_cast<Stored*>(out), piece);
  } else {
    __builtin_ia32_movntdq256(reinterpret_cast<Stored*>(out), piece);
  }
#endif
}

/// Writes vectors as `Lanes` stores them, past the caches where they stream. What is stored stays
/// in registers.
template <class Lanes, int piece, bool streams, int bytes = piece, class... Vectors>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void put_lanes(std::byte* out,
                                                       Vectors... vectors) noexcept {
  if constexpr (streams) {
    alignas(32) std::byte stored[std::size_t{bytes}];
    Lanes::store(vectors..., stored);
    for (int at = 0; at < bytes; at += piece) stream_piece<piece>(stored + at, out + at);
  } else {
    Lanes::store(vectors..., out);
  }
}

/// Turns one row: `rotate_pair`, lane by lane.
template <ElementType type, bool streams>
KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE void turn_row_lanes(const Turn& turn,
                                                            const TurnTables& tables,
                                                            const std::byte* in,
                                                            std::byte* out) noexcept {
  using Lanes = Lanes16<type>;
  constexpr std::int64_t size = block_bytes(type);
  constexpr int piece = type == ElementType::f16 ? 16 : 32;  // bytes of one vector as it is stored
  const std::int32_t half = turn.rotary_channels / 2;
  const float* const cos = turn.table;
  const float* const sin = turn.table + half;
  const std::int64_t first = turn.first_channel * size;
  const std::int64_t tail = (turn.first_channel + turn.rotary_channels) * size;
  const std::int64_t end = turn.channels * size;
  if (first != 0) std::memcpy(out, in, static_cast<std::size_t>(first));
  if (tail != end) std::memcpy(out + tail, in + tail, static_cast<std::size_t>(end - tail));
  std::int32_t i = 0;  // pairs done
  FloatLanes a, b, a2, b2;
  if (turn.pairing == RopePairing::half_split) {
    const std::byte* const a_in = in + first;
    const std::byte* const b_in = a_in + half * size;
    std::byte* const a_out = out + first;
    std::byte* const b_out = a_out + half * size;
    for (; i + 16 <= half; i += 16) {
      const FloatLanes c = load_lanes(tables.first + i), c2 = load_lanes(tables.first + i + 8);
      const FloatLanes s = load_lanes(tables.second + i), s2 = load_lanes(tables.second + i + 8);
      Lanes::load(a_in + i * size, a, a2);
      Lanes::load(b_in + i * size, b, b2);
      put_lanes<Lanes, piece, streams, 16 * size>(a_out + i * size, fma_lanes(a, c, -(b * s)),
                                                  fma_lanes(a2, c2, -(b2 * s2)));
      put_lanes<Lanes, piece, streams, 16 * size>(b_out + i * size, fma_lanes(a, s, b * c),
                                                  fma_lanes(a2, s2, b2 * c2));
    }
    if (!streams && i + 8 <= half) {
      const FloatLanes c = load_lanes(cos + i), s = load_lanes(sin + i);
      a = Lanes8<type>::load(a_in + i * size);
      b = Lanes8<type>::load(b_in + i * size);
      Lanes8<type>::store(fma_lanes(a, c, -(b * s)), a_out + i * size);
      Lanes8<type>::store(fma_lanes(a, s, b * c), b_out + i * size);
      i += 8;
    }
  } else if constexpr (Lanes::even_odd) {
    for (; i + 8 <= half; i += 8) {
      const FloatLanes c = load_lanes(cos + i), s = load_lanes(sin + i);
      Lanes::load(in + first + 2 * i * size, a, b);
      put_lanes<Lanes, piece, streams>(out + first + 2 * i * size, fma_lanes(a, c, -(b * s)),
                                       fma_lanes(a, s, b * c));
    }
  } else {
    for (; i + 4 <= half; i += 4) {
      const FloatLanes v = Lanes8<type>::load(in + first + 2 * i * size);
      a = __builtin_shufflevector(v, v, 0, 0, 2, 2, 4, 4, 6, 6);
      b = __builtin_shufflevector(v, v, 1, 1, 3, 3, 5, 5, 7, 7);
      put_lanes<Lanes8<type>, piece, streams>(
          out + first + 2 * i * size,
          fma_lanes(a, load_lanes(tables.first + 2 * i), b * load_lanes(tables.second + 2 * i)));
    }
  }
  if (!streams && i < half) turn_rest<type>(turn, i, in, out);
}

/// Turns `rows` rows by one angle. Strides count bytes; the ranges do not overlap. Rows that stream
/// are those of `streams_whole`.
template <ElementType type, bool streams>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void turn_rows_avx2(const Turn& given, const std::byte* in,
                                                       std::int64_t in_stride, std::byte* out,
                                                       std::int64_t out_stride,
                                                       std::int64_t rows) noexcept {
  const Turn turn = given;  // whose address nobody has: rows that are written do not change it
  const std::int32_t half = turn.rotary_channels / 2;
  TurnTables tables;
  if (turn.pairing == RopePairing::half_split) {
    tables.halves<type>(turn.table, turn.table + half, half);
  } else if (!Lanes16<type>::even_odd) {
    tables.pairs(turn.table, turn.table + half, half);
  }
  const std::int64_t bytes = turn.channels * block_bytes(type);
  std::int64_t row = 0;
  if constexpr (streams) {
    const std::int64_t stretch = bytes < stream_stretch ? stream_stretch / bytes : 1;
    for (; streams_four_pages() && row + 4 * stretch <= rows; row += 4 * stretch) {
      const std::int64_t ahead = row + 8 * stretch <= rows ? 4 * stretch * bytes : 0;
      for (std::int64_t k = row; k < row + stretch; ++k) {
        for (std::int64_t at = k * bytes, i = 0; i < 4; ++i, at += stretch * bytes) {
          for (std::int64_t line = 0; line < bytes; line += 64)
            __builtin_prefetch(in + at + ahead + line);
          turn_row_lanes<type, true>(turn, tables, in + at, out + at);
        }
      }
    }
    for (; row < rows; ++row) {
      const std::int64_t at = row * bytes;
      for (std::int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(in + at + stream_ahead + line);
      turn_row_lanes<type, true>(turn, tables, in + at, out + at);
    }
    return;
  }
  for (; row < rows; ++row) {
    const std::byte* const from = in + row * in_stride;
    std::byte* const to = out + row * out_stride;
    for (std::int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(from + stream_ahead + line);
      __builtin_prefetch(to + stream_ahead + line, 1);  // a line is fetched before it is written
    }
    turn_row_lanes<type, streams>(turn, tables, from, to);
  }
}

/// Whether rows that follow each other can stream straight from registers: they are whole lines,
/// and vectors fill them.
[[nodiscard]] inline bool streams_whole(ElementType type, const Turn& turn,
                                        const std::byte* out) noexcept {
  return (type == ElementType::f16 || type == ElementType::bf16 || type == ElementType::f32) &&
         turn.first_channel == 0 && turn.rotary_channels == turn.channels &&
         turn.channels % 32 == 0 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
}

/// Turns rows that follow each other on both sides past the caches.
KVMELD_LAZY inline void stream_turned_rows(ElementType type, Isa isa, const Turn& turn,
                                           const std::byte* in, std::byte* out,
                                           std::int64_t rows) noexcept {
  const std::int64_t bytes = byte_size(type, turn.channels);
  if (isa == Isa::avx512 && type == ElementType::bf16 && turns_wide(turn))
    return turn_rows_wide(turn, in, out, rows, true);
  if (type == ElementType::f16)
    return turn_rows_avx2<ElementType::f16, true>(turn, in, bytes, out, bytes, rows);
  if (type == ElementType::bf16)
    return turn_rows_avx2<ElementType::bf16, true>(turn, in, bytes, out, bytes, rows);
  turn_rows_avx2<ElementType::f32, true>(turn, in, bytes, out, bytes, rows);
}

#endif  // KVMELD_X86_DISPATCH

/// Turns one f32 row in place.
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void turn_row_avx2(const Turn& turn,
                                                             float* row) noexcept {
  rotate_row(turn.pairing, turn.first_channel, turn.rotary_channels, turn.table, row);
}
KVMELD_NOINLINE inline void turn_row_baseline(const Turn& turn, float* row) noexcept {
  rotate_row(turn.pairing, turn.first_channel, turn.rotary_channels, turn.table, row);
}
inline void turn_row(const Turn& turn, Isa isa, float* row) noexcept {
  isa == Isa::baseline ? turn_row_baseline(turn, row) : turn_row_avx2(turn, row);
}

/// Turns contiguous rows of `type`, reading each once: the vector code where there is one,
/// `rotate_row` elsewhere.
KVMELD_LAZY inline void turn_rows(ElementType type, Isa isa, const Turn& turn, const std::byte* in,
                                  std::int64_t in_stride, std::byte* out, std::int64_t out_stride,
                                  std::int64_t rows) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512 && type == ElementType::bf16 && turns_wide(turn) &&
      in_stride == out_stride && in_stride == 2 * turn.channels) {
    return turn_rows_wide(turn, in, out, rows, false);
  }
  if (isa != Isa::baseline) {
    if (type == ElementType::f16)
      return turn_rows_avx2<ElementType::f16, false>(turn, in, in_stride, out, out_stride, rows);
    if (type == ElementType::bf16)
      return turn_rows_avx2<ElementType::bf16, false>(turn, in, in_stride, out, out_stride, rows);
    if (type == ElementType::f32)
      return turn_rows_avx2<ElementType::f32, false>(turn, in, in_stride, out, out_stride, rows);
  }
#endif
  alignas(64) float values[1024];
  for (std::int64_t row = 0; row < rows; ++row, in += in_stride, out += out_stride) {
    load_row(type, isa, in, turn.channels, values);
    turn_row(turn, isa, values);
    store_row(type, isa, values, turn.channels, out);
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
