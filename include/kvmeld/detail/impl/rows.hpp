#pragma once

/// Bodies of extend/rows.hpp: conversions of whole rows, and the writing of large outputs.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN

namespace detail {

// How 32 stored elements become 32 f32 values and back, for every element type.

template <ElementType type>
KVMELD_ALWAYS_INLINE void load_block(const std::byte* __restrict in,
                                     float* __restrict out) noexcept {
  if constexpr (type == ElementType::f32) {
    std::memcpy(out, in, sizeof(float) * row_block);
  } else {
    using Codec = ElementCodec<type>;
    const unaligned_t<typename Codec::Storage>* __restrict stored =
        reinterpret_cast<const unaligned_t<typename Codec::Storage>*>(in);
    for (std::ptrdiff_t i = 0; i < row_block; ++i) out[i] = Codec::load(stored[i]);
  }
}

template <ElementType type>
KVMELD_ALWAYS_INLINE void store_block(const float* __restrict in,
                                      std::byte* __restrict out) noexcept {
  if constexpr (type == ElementType::f32) {
    std::memcpy(out, in, sizeof(float) * row_block);
  } else {
    using Codec = ElementCodec<type>;
    unaligned_t<typename Codec::Storage>* __restrict stored =
        reinterpret_cast<unaligned_t<typename Codec::Storage>*>(out);
    for (std::ptrdiff_t i = 0; i < row_block; ++i) stored[i] = Codec::store(in[i]);
  }
}

template <>
KVMELD_ALWAYS_INLINE void load_block<ElementType::q8_0>(const std::byte* __restrict in,
                                                        float* __restrict out) noexcept {
  f16 stored_scale;
  std::memcpy(&stored_scale, in, sizeof(stored_scale));
  const float scale = to_float(stored_scale);
  const unaligned_t<std::int8_t>* __restrict values =
      reinterpret_cast<const unaligned_t<std::int8_t>*>(in + 2);
  for (std::ptrdiff_t i = 0; i < row_block; ++i) out[i] = scale * static_cast<float>(values[i]);
}

template <>
KVMELD_ALWAYS_INLINE void store_block<ElementType::q8_0>(const float* __restrict in,
                                                         std::byte* __restrict out) noexcept {
  store_q8_0(in, out);
}

// All of a row: whole blocks, then the rest through a padded block, so that the same expressions
// compute every byte.

template <class Block, ElementType type>
struct LoadBlocks {
  KVMELD_ALWAYS_INLINE static void run(const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
    constexpr std::ptrdiff_t bytes = byte_size(type, row_block);
    std::ptrdiff_t i = 0;
    for (; i + row_block <= n; i += row_block, in += bytes) Block::load(in, out + i);
    if (i < n) {
      std::byte padded[static_cast<std::size_t>(bytes)] = {};
      float values[row_block];
      std::memcpy(padded, in, static_cast<std::size_t>(byte_size(type, n - i)));
      Block::load(padded, values);
      std::memcpy(out + i, values, sizeof(float) * static_cast<std::size_t>(n - i));
    }
  }
};
template <class Block, ElementType type>
struct StoreBlocks {
  KVMELD_ALWAYS_INLINE static void run(const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
    constexpr std::ptrdiff_t bytes = byte_size(type, row_block);
    std::ptrdiff_t i = 0;
    for (; i + row_block <= n; i += row_block, out += bytes) Block::store(in + i, out);
    if (i < n) {
      float values[row_block] = {};
      std::byte padded[static_cast<std::size_t>(bytes)];
      std::memcpy(values, in + i, sizeof(float) * static_cast<std::size_t>(n - i));
      Block::store(values, padded);
      std::memcpy(out, padded, static_cast<std::size_t>(byte_size(type, n - i)));
    }
  }
};

/// Blocks by loops.
template <ElementType type>
struct PortableBlock {
  KVMELD_ALWAYS_INLINE static void load(const std::byte* __restrict in,
                                        float* __restrict out) noexcept {
    load_block<type>(in, out);
  }
  KVMELD_ALWAYS_INLINE static void store(const float* __restrict in,
                                         std::byte* __restrict out) noexcept {
    store_block<type>(in, out);
  }
};

template <ElementType type>
KVMELD_ALWAYS_INLINE void load_elements(const std::byte* in, std::ptrdiff_t n,
                                        float* out) noexcept {
  LoadBlocks<PortableBlock<type>, type>::run(in, n, out);
}
template <ElementType type>
KVMELD_ALWAYS_INLINE void store_elements(const float* in, std::ptrdiff_t n,
                                         std::byte* out) noexcept {
  StoreBlocks<PortableBlock<type>, type>::run(in, n, out);
}

#if KVMELD_X86_DISPATCH

/// Loops, unless specialised below.
template <ElementType type>
struct Avx2Block : PortableBlock<type> {};

template <>
struct Avx2Block<ElementType::f16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load_one(const std::byte* in,
                                                               float* out) noexcept {
    store_lanes(Lanes8<ElementType::f16>::load(in), out);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store_one(const float* in,
                                                                std::byte* out) noexcept {
    Lanes8<ElementType::f16>::store(load_lanes(in), out);
  }
  // Four calls, not a loop, which g++ would not unroll.
  KVMELD_TARGET_AVX2 static void load(const std::byte* __restrict in,
                                      float* __restrict out) noexcept {
    load_one(in, out);
    load_one(in + 16, out + 8);
    load_one(in + 32, out + 16);
    load_one(in + 48, out + 24);
  }
  KVMELD_TARGET_AVX2 static void store(const float* __restrict in,
                                       std::byte* __restrict out) noexcept {
    store_one(in, out);
    store_one(in + 8, out + 16);
    store_one(in + 16, out + 32);
    store_one(in + 24, out + 48);
  }
};

template <>
struct Avx2Block<ElementType::bf16> : PortableBlock<ElementType::bf16> {
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static vector_t<int, 32> round(const float* in) noexcept {
    const vector_t<float, 32> values = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in);
    const auto bits = reinterpret_cast<vector_t<unsigned, 32>>(values);
    const auto is_nan = reinterpret_cast<vector_t<unsigned, 32>>(values != values);
    const vector_t<unsigned, 32> half = (((bits >> 16) & 1u) + 0x7fffu) & ~is_nan;
    return reinterpret_cast<vector_t<int, 32>>(((bits + half) >> 16) | (is_nan & 0x40u));
  }
  KVMELD_TARGET_AVX2 static void store(const float* __restrict in,
                                       std::byte* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 16) {
      *reinterpret_cast<unaligned_vector_t<std::uint16_t, 32>*>(out + 2 * i) =
          pack_words(round(in + i), round(in + i + 8));
    }
  }
};

/// Both 8-bit floats are converted through binary16, which contains their values once E4M3 is
/// scaled by 2^-8.
///
/// Storing rounds to odd there (towards zero, a lost remainder sets the last bit), so that the
/// second rounding, to nearest even, gives what one rounding would.
template <ElementType type>
struct Avx2Float8Block {
  static constexpr bool is_e4m3 = type == ElementType::f8_e4m3;
  using Halfwords = vector_t<std::uint16_t, 32>;
  using Codes = vector_t<std::uint8_t, 16>;

  KVMELD_TARGET_AVX2 static void load(const std::byte* __restrict in,
                                      float* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 16) {
      const Codes codes = *reinterpret_cast<const unaligned_vector_t<std::uint8_t, 16>*>(in + i);
      const Halfwords wide = __builtin_convertvector(codes, Halfwords);
      Halfwords halves = wide << 8;
      if constexpr (is_e4m3) {
        const Halfwords magnitude = wide & 0x7f;
        const auto is_nan = magnitude == 0x7f;
        halves = (halves & 0x8000) | (is_nan ? ((wide & 0) + 0x7e00) : (magnitude << 7));
      }
      const auto signed_halves = reinterpret_cast<vector_t<short, 32>>(halves);
      vector_t<float, 32> first = __builtin_ia32_vcvtph2ps256(
          __builtin_shufflevector(signed_halves, signed_halves, 0, 1, 2, 3, 4, 5, 6, 7));
      vector_t<float, 32> second = __builtin_ia32_vcvtph2ps256(
          __builtin_shufflevector(signed_halves, signed_halves, 8, 9, 10, 11, 12, 13, 14, 15));
      if constexpr (is_e4m3) {
        first = first * 256.0f;
        second = second * 256.0f;
      }
      *reinterpret_cast<unaligned_vector_t<float, 32>*>(out + i) = first;
      *reinterpret_cast<unaligned_vector_t<float, 32>*>(out + i + 8) = second;
    }
  }

  KVMELD_TARGET_AVX2 static void store(const float* __restrict in,
                                       std::byte* __restrict out) noexcept {
    for (int i = 0; i < 32; i += 16) {
      vector_t<float, 32> first = *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in + i);
      vector_t<float, 32> second =
          *reinterpret_cast<const unaligned_vector_t<float, 32>*>(in + i + 8);
      if constexpr (is_e4m3) {
        first = first * 0x1p-8f;
        second = second * 0x1p-8f;
      }
      constexpr int toward_zero = 3;
      const vector_t<short, 16> low = __builtin_ia32_vcvtps2ph256(first, toward_zero);
      const vector_t<short, 16> high = __builtin_ia32_vcvtps2ph256(second, toward_zero);
      const vector_t<int, 32> low_inexact = (__builtin_ia32_vcvtph2ps256(low) != first) & 1;
      const vector_t<int, 32> high_inexact = (__builtin_ia32_vcvtph2ps256(high) != second) & 1;
      const auto halves = reinterpret_cast<Halfwords>(
          __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
      const Halfwords odd = (halves & 0x7fff) | pack_words(low_inexact, high_inexact);
      constexpr int shift = is_e4m3 ? 7 : 8;
      const Halfwords largest = (odd & 0) + static_cast<std::uint16_t>(is_e4m3 ? 0x7e : 0x7c);
      Halfwords code =
          (odd + static_cast<std::uint16_t>((1 << (shift - 1)) - 1) + ((odd >> shift) & 1)) >>
          shift;
      code = code > largest ? largest : code;
      const auto is_nan = odd > 0x7c00;  // an infinity is never inexact
      const Halfwords nan = is_e4m3 ? (odd & 0) + 0x7f : (odd >> 8) | 0x02;
      code = (is_nan ? nan : code) | ((halves >> 8) & 0x80);
      *reinterpret_cast<unaligned_vector_t<std::uint8_t, 16>*>(out + i) =
          __builtin_convertvector(code, Codes);
    }
  }
};
template <>
struct Avx2Block<ElementType::f8_e4m3> : Avx2Float8Block<ElementType::f8_e4m3> {};
template <>
struct Avx2Block<ElementType::f8_e5m2> : Avx2Float8Block<ElementType::f8_e5m2> {};

#endif  // KVMELD_X86_DISPATCH

/// Row conversions of one instruction set, out of line: a row body that is inlined into several
/// instruction sets carries no target of its own, and each conversion is compiled once for each
/// file; the call costs one or two nanoseconds for each row.
///
/// There are none for AVX-512: AVX2 conversions keep up with the caches, and a third copy would
/// cost every user compile time.
template <bool vectors>
struct RowCalls {
  template <ElementType type>
  KVMELD_NOINLINE static void load(const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
    load_elements<type>(in, n, out);
  }
  template <ElementType type>
  KVMELD_NOINLINE static void store(const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
    store_elements<type>(in, n, out);
  }
};

#if KVMELD_X86_DISPATCH

template <>
struct RowCalls<true> {
  template <ElementType type>
  static void load(const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
    extend::Kernel<LoadBlocks<Avx2Block<type>, type>>::avx2(in, n, out);
  }
  template <ElementType type>
  static void store(const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
    extend::Kernel<StoreBlocks<Avx2Block<type>, type>>::avx2(in, n, out);
  }
};

#endif  // KVMELD_X86_DISPATCH

template <bool vectors>
void load_row_of(ElementType type, const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
  using Calls = RowCalls<vectors>;
  switch (type) {
    case ElementType::f32:
      std::memcpy(out, in, sizeof(float) * static_cast<std::size_t>(n));
      return;
    case ElementType::bf16:
      Calls::template load<ElementType::bf16>(in, n, out);
      return;
    case ElementType::f16:
      Calls::template load<ElementType::f16>(in, n, out);
      return;
    case ElementType::f64:
      Calls::template load<ElementType::f64>(in, n, out);
      return;
    case ElementType::f8_e4m3:
      Calls::template load<ElementType::f8_e4m3>(in, n, out);
      return;
    case ElementType::f8_e5m2:
      Calls::template load<ElementType::f8_e5m2>(in, n, out);
      return;
    case ElementType::i8:
      Calls::template load<ElementType::i8>(in, n, out);
      return;
    case ElementType::q8_0:
      Calls::template load<ElementType::q8_0>(in, n, out);
      return;
  }
}

template <bool vectors>
void store_row_of(ElementType type, const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
  using Calls = RowCalls<vectors>;
  switch (type) {
    case ElementType::f32:
      std::memcpy(out, in, sizeof(float) * static_cast<std::size_t>(n));
      return;
    case ElementType::bf16:
      Calls::template store<ElementType::bf16>(in, n, out);
      return;
    case ElementType::f16:
      Calls::template store<ElementType::f16>(in, n, out);
      return;
    case ElementType::f64:
      Calls::template store<ElementType::f64>(in, n, out);
      return;
    case ElementType::f8_e4m3:
      Calls::template store<ElementType::f8_e4m3>(in, n, out);
      return;
    case ElementType::f8_e5m2:
      Calls::template store<ElementType::f8_e5m2>(in, n, out);
      return;
    case ElementType::i8:
      Calls::template store<ElementType::i8>(in, n, out);
      return;
    case ElementType::q8_0:
      Calls::template store<ElementType::q8_0>(in, n, out);
      return;
  }
}

}  // namespace detail

namespace extend {

KVMELD_API void load_row(ElementType type, Isa isa, const std::byte* in, std::ptrdiff_t n,
                         float* out) noexcept {
  isa == Isa::baseline ? detail::load_row_of<false>(type, in, n, out)
                       : detail::load_row_of<true>(type, in, n, out);
}

KVMELD_API void store_row(ElementType type, Isa isa, const float* in, std::ptrdiff_t n,
                          std::byte* out) noexcept {
  isa == Isa::baseline ? detail::store_row_of<false>(type, in, n, out)
                       : detail::store_row_of<true>(type, in, n, out);
}

}  // namespace extend

// The writing of large outputs.

namespace detail {

#if KVMELD_X86_DISPATCH

/// One core's share of the last-level cache in bytes: its size divided by the number of logical
/// processors that share it.
///
/// Intel describes its caches in leaf 4 of cpuid, AMD and Hygon in leaf 0x8000001D, whose fields
/// are the same.
[[nodiscard]] inline std::int64_t last_level_share_bytes() noexcept {
  std::int64_t share = 32 << 20;
  for (const unsigned leaf : {4U, 0x8000001dU}) {
    bool found = false;
    unsigned a = 0, b = 0, c = 0, d = 0;
    for (unsigned i = 0; i < 8 && __get_cpuid_count(leaf, i, &a, &b, &c, &d) != 0; ++i) {
      if ((a & 31U) == 0) break;
      const std::int64_t line = (b & 0xfffU) + 1, partitions = (b >> 12 & 0x3ffU) + 1;
      const std::int64_t ways = std::int64_t{b >> 22} + 1, sets = std::int64_t{c} + 1;
      if ((a >> 5 & 7U) != 3) continue;
      share = ways * partitions * line * sets / ((a >> 14 & 0xfffU) + 1);
      found = true;
    }
    if (found) break;
  }
  return share;
}

/// Whether the processor writes one stream faster than four: all but Intel's, as measured on AMD's;
/// others were not measured.
[[nodiscard]] inline bool likes_one_stream() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return true;
  char vendor[12];
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  return std::string_view(vendor, 12) != "GenuineIntel";
}

#endif  // KVMELD_X86_DISPATCH

struct StreamState {
  std::atomic<exec::StreamWay> way;
  std::atomic<std::int64_t> threshold_bytes;
};

}  // namespace detail

namespace exec {

KVMELD_API exec::Streaming default_streaming() noexcept {
#if KVMELD_X86_DISPATCH
  constexpr std::int64_t least = 4 << 20;
  const std::int64_t quarter = detail::last_level_share_bytes() / 4;
  return {detail::likes_one_stream() ? exec::StreamWay::one_page : exec::StreamWay::four_pages,
          quarter > least ? quarter : least};
#else
  return {exec::StreamWay::off, std::int64_t{1} << 62};
#endif
}

}  // namespace exec

namespace detail {

/// The setting of this process.
[[nodiscard]] inline StreamState& stream_state() noexcept {
  static const exec::Streaming start = exec::default_streaming();
  static StreamState state{start.way, start.threshold_bytes};
  return state;
}

}  // namespace detail

namespace exec {

KVMELD_API exec::Streaming streaming() noexcept {
  const detail::StreamState& state = detail::stream_state();
  return {state.way.load(std::memory_order_relaxed),
          state.threshold_bytes.load(std::memory_order_relaxed)};
}

KVMELD_API Status set_streaming(const exec::Streaming& chosen) {
  if (chosen.threshold_bytes < 0) {
    return extend::error(ErrorCode::invalid_argument, "streaming from ", chosen.threshold_bytes,
                         " bytes on; the threshold is not negative");
  }
  if (chosen.way > exec::StreamWay::four_pages) {
    return extend::error(ErrorCode::unknown_field, "stream way ", static_cast<int>(chosen.way),
                         " is none that this build knows");
  }
  detail::StreamState& state = detail::stream_state();
  state.way.store(chosen.way, std::memory_order_relaxed);
  state.threshold_bytes.store(chosen.threshold_bytes, std::memory_order_relaxed);
  return {};
}

}  // namespace exec

namespace detail {

KVMELD_API bool streams_output(std::int64_t bytes) noexcept {
  const exec::Streaming chosen = exec::streaming();
  return KVMELD_X86_DISPATCH && chosen.way != exec::StreamWay::off &&
         bytes >= chosen.threshold_bytes;
}

KVMELD_API bool streams_four_pages() noexcept {
  return stream_state().way.load(std::memory_order_relaxed) == exec::StreamWay::four_pages;
}

#if KVMELD_X86_DISPATCH

/// Streams one line in vectors of 16 bytes.
KVMELD_ALWAYS_INLINE void stream_line(std::byte* out, const std::byte* in) noexcept {
  typedef long long Chunk __attribute__((vector_size(16), may_alias));
  typedef long long UnalignedChunk __attribute__((vector_size(16), aligned(1), may_alias));
  // The type is spelled out: `auto` would drop the attributes, and g++ would then use aligned
  // loads.
  Chunk* const to = reinterpret_cast<Chunk*>(out);
  const UnalignedChunk* const from = reinterpret_cast<const UnalignedChunk*>(in);
  const Chunk a = from[0], b = from[1], c = from[2], d = from[3];
#if defined(__clang__)
  __builtin_nontemporal_store(a, to);
  __builtin_nontemporal_store(b, to + 1);
  __builtin_nontemporal_store(c, to + 2);
  __builtin_nontemporal_store(d, to + 3);
#else
  __builtin_ia32_movntdq(to, a);
  __builtin_ia32_movntdq(to + 1, b);
  __builtin_ia32_movntdq(to + 2, c);
  __builtin_ia32_movntdq(to + 3, d);
#endif
}

/// Streams whole lines of four stretches alternately; returns the number of bytes written.
inline std::size_t stream_four_pages(std::byte* out, const std::byte* in,
                                     std::size_t bytes) noexcept {
  constexpr std::size_t stretch = stream_stretch, line = 64;
  std::size_t at = 0;
  for (; at + 4 * stretch <= bytes; at += 4 * stretch) {
    const std::size_t ahead = at + 8 * stretch <= bytes ? 4 * stretch : 0;
    for (std::size_t l = at; l < at + stretch; l += line) {
      for (std::size_t from = l; from < l + 4 * stretch; from += stretch) {
        __builtin_prefetch(in + from + ahead);
        stream_line(out + from, in + from);
      }
    }
  }
  for (; at + line <= bytes; at += line) stream_line(out + at, in + at);
  return at;
}

/// Streams whole lines one after the other in vectors of 32 bytes; returns the number of bytes
/// written.
inline KVMELD_TARGET_AVX2 KVMELD_NOINLINE std::size_t stream_one_page(std::byte* out,
                                                                      const std::byte* in,
                                                                      std::size_t bytes) noexcept {
  typedef vector_t<long long, 32> Chunk;
  std::size_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    __builtin_prefetch(in + at + stream_ahead);
    const auto* const from = reinterpret_cast<const unaligned_vector_t<long long, 32>*>(in + at);
    Chunk* const to = reinterpret_cast<Chunk*>(out + at);
    const Chunk a = from[0], b = from[1];
#if defined(__clang__)
    __builtin_nontemporal_store(a, to);
    __builtin_nontemporal_store(b, to + 1);
#else
    __builtin_ia32_movntdq256(to, a);
    __builtin_ia32_movntdq256(to + 1, b);
#endif
  }
  return at;
}

#endif  // KVMELD_X86_DISPATCH

}  // namespace detail

namespace extend {

KVMELD_API void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) noexcept {
  std::size_t done = 0;
#if KVMELD_X86_DISPATCH
  std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64;
  if (head > bytes) head = bytes;
  std::memcpy(out, in, head);
  const bool four = detail::streams_four_pages() || best_isa() == Isa::baseline;
  done = head + (four ? detail::stream_four_pages(out + head, in + head, bytes - head)
                      : detail::stream_one_page(out + head, in + head, bytes - head));
#endif
  std::memcpy(out + done, in + done, bytes - done);
}

}  // namespace extend

namespace exec {

KVMELD_API Result<exec::Streaming> measure_streaming(std::span<std::byte> scratch) {
  constexpr std::size_t least = std::size_t{2} << 20;
  if (scratch.size() < least) {
    return extend::error(
        ErrorCode::invalid_argument, "measuring in ", scratch.size(), " bytes; give ", least,
        " or more, and several times the last-level cache for a figure that means something");
  }
  const std::size_t bytes = scratch.size() / 2;
  std::byte* const out = scratch.data();
  const std::byte* const in = scratch.data() + bytes;
  std::memset(scratch.data(), 1, scratch.size());
  const auto best_of_three = [&](const auto& copy) {
    std::chrono::nanoseconds best = std::chrono::nanoseconds(std::int64_t{1} << 62);
    for (int i = 0; i < 3; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      copy();
      best = (std::min)(best, std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin));
    }
    return best;
  };
  exec::Streaming chosen = exec::default_streaming();
#if KVMELD_X86_DISPATCH
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64;
  std::byte* const to = out + head;
  const auto plain = best_of_three([&] { std::memcpy(to, in, bytes - head); });
  const auto four = best_of_three([&] {
    detail::stream_four_pages(to, in, bytes - head);
    detail::stream_fence();
  });
  auto one = std::chrono::nanoseconds(std::int64_t{1} << 62);
  if (best_isa() != Isa::baseline) {
    one = best_of_three([&] {
      detail::stream_one_page(to, in, bytes - head);
      detail::stream_fence();
    });
  }
  chosen.way = (std::min)(one, four) >= plain ? exec::StreamWay::off
               : one < four                   ? exec::StreamWay::one_page
                                              : exec::StreamWay::four_pages;
#else
  (void)best_of_three;
  (void)in;
  (void)out;
#endif
  return chosen;
}

}  // namespace exec

KVMELD_NAMESPACE_END
