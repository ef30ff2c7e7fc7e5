#pragma once

/// Writing large outputs past the caches: a line that is overwritten whole need not be read first.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <kvmeld/config.hpp>
#include <kvmeld/exec/streaming.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/rows_x86.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Bytes of each of the four stretches that are streamed in turn.
inline constexpr std::int64_t stream_stretch = 4096;
/// How far ahead of a single stream its source is asked for.
inline constexpr std::int64_t stream_ahead = 1024;

/// Whether an output of so many bytes is written past the caches.
[[nodiscard]] inline bool streams_output(std::int64_t bytes) noexcept {
  const Streaming chosen = streaming();
  return KVMELD_X86_DISPATCH && chosen.way != StreamWay::off && bytes >= chosen.threshold_bytes;
}
/// Whether lines of four stretches are streamed in turn.
[[nodiscard]] inline bool streams_four_pages() noexcept {
  return stream_state().way.load(std::memory_order_relaxed) == StreamWay::four_pages;
}

#if KVMELD_X86_DISPATCH

/// Streams one line in vectors of 16 bytes.
KVMELD_ALWAYS_INLINE void stream_line(std::byte* out, const std::byte* in) noexcept {
  typedef long long Chunk __attribute__((vector_size(16), may_alias));
  typedef long long UnalignedChunk __attribute__((vector_size(16), aligned(1), may_alias));
  // Spelled out: `auto` would drop the attributes, and g++ then reads aligned.
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

/// Streams whole lines, four stretches in turn; returns the bytes that are done.
KVMELD_LAZY std::size_t stream_four_pages(std::byte* out, const std::byte* in,
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

/// Streams whole lines one after the other in vectors of 32 bytes; returns the bytes that are done.
KVMELD_LAZY KVMELD_TARGET_AVX2 KVMELD_NOINLINE std::size_t stream_one_page(
    std::byte* out, const std::byte* in, std::size_t bytes) noexcept {
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

/// Copies bytes without keeping their destination in the caches, whatever their number;
/// `stream_fence` orders the stores. No overlap.
KVMELD_LAZY inline void stream_copy(std::byte* out, const std::byte* in,
                                    std::size_t bytes) noexcept {
  std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64;
  if (head > bytes) head = bytes;
  std::memcpy(out, in, head);
  const bool four = streams_four_pages() || best_isa() == Isa::baseline;
  const std::size_t at = head + (four ? stream_four_pages(out + head, in + head, bytes - head)
                                      : stream_one_page(out + head, in + head, bytes - head));
  std::memcpy(out + at, in + at, bytes - at);
}
/// Makes streamed stores visible to whoever sees what this thread does next.
inline void stream_fence() noexcept { __builtin_ia32_sfence(); }

#else

inline void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) noexcept {
  std::memcpy(out, in, bytes);
}
inline void stream_fence() noexcept {}

#endif  // KVMELD_X86_DISPATCH

}  // namespace detail

/// Measures which way to stream is the fastest here, in the caller's memory: copies of half of
/// `scratch` to its other half by `memcpy` and by both ways, the best of three each. Neither
/// chooses nor allocates: give the result to `set_streaming`.
///
/// The way is `off` where `memcpy` was the fastest; the threshold stays that of
/// `default_streaming`. Takes some 30 ms for 64 MiB, which should be several times the threshold:
/// what fits the caches is copied through them the fastest. Errors: `invalid_argument` (less than 2
/// MiB).
KVMELD_LAZY [[nodiscard]] Result<Streaming> measure_streaming(std::span<std::byte> scratch) {
  constexpr std::size_t least = std::size_t{2} << 20;
  if (scratch.size() < least) {
    return detail::error(
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
  Streaming chosen = default_streaming();
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
  chosen.way = (std::min)(one, four) >= plain ? StreamWay::off
               : one < four                   ? StreamWay::one_page
                                              : StreamWay::four_pages;
#else
  (void)best_of_three;
  (void)in;
  (void)out;
#endif
  return chosen;
}

KVMELD_NAMESPACE_END
