#pragma once

/// Writing large outputs past the caches: a line that is overwritten whole need not be read first.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/config.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Bytes of output from which on streaming pays: a quarter of the last-level cache that a core can have, and 4 MiB at least.
///
/// A copy reads as much as it writes, and what it wrote is read next: from a quarter on, streaming and reading back from memory
/// takes less time than writing through the caches and finding part of it there. Found once a process; without streaming stores never.
[[nodiscard]] inline std::int64_t stream_threshold_bytes() noexcept {
  static const std::int64_t threshold = [] {
#if KVMELD_X86_DISPATCH
    constexpr std::int64_t least = 4 << 20;
    std::int64_t cache = 32 << 20;
    unsigned a = 0, b = 0, c = 0, d = 0;
    for (unsigned i = 0; i < 8 && __get_cpuid_count(4, i, &a, &b, &c, &d) != 0 && (a & 31U) != 0; ++i) {
      const std::int64_t bytes = (std::int64_t{b >> 22} + 1) * ((b >> 12 & 0x3ffU) + 1) * ((b & 0xfffU) + 1) * (std::int64_t{c} + 1);
      if ((a >> 5 & 7U) == 3) cache = bytes / ((a >> 14 & 0xfffU) + 1);  // that many logical processors share it
    }
    return cache / 4 > least ? cache / 4 : least;
#else
    return std::int64_t{1} << 62;  // no stores past the caches: a stage would only cost
#endif
  }();
  return threshold;
}

/// Bytes of each of the four stretches that are streamed in turn: one core then waits for four pages at once.
inline constexpr std::int64_t stream_stretch = 4096;

#if KVMELD_X86_DISPATCH

/// Copies bytes without keeping their destination in the caches; `stream_fence` orders the stores. No overlap.
KVMELD_LAZY inline void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) noexcept {
  typedef long long Chunk __attribute__((vector_size(16), may_alias));
  typedef long long UnalignedChunk __attribute__((vector_size(16), aligned(1), may_alias));
  constexpr std::size_t line = 64;
  std::size_t head = (line - reinterpret_cast<std::uintptr_t>(out) % line) % line;
  if (head > bytes) head = bytes;
  std::memcpy(out, in, head);
  const auto copy_line = [out, in](std::size_t at) {
    // Spelled out: `auto` would drop the attributes, and g++ then reads aligned.
    Chunk* const to = reinterpret_cast<Chunk*>(out + at);
    const UnalignedChunk* const from = reinterpret_cast<const UnalignedChunk*>(in + at);
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
  };
  constexpr std::size_t stretch = stream_stretch;
  std::size_t at = head;
  for (; at + 4 * stretch <= bytes; at += 4 * stretch) {
    const std::size_t ahead = at + 8 * stretch <= bytes ? 4 * stretch : 0;
    for (std::size_t l = at; l < at + stretch; l += line) {
      for (std::size_t from = l; from < l + 4 * stretch; from += stretch) {
        __builtin_prefetch(in + from + ahead);
        copy_line(from);
      }
    }
  }
  for (; at + line <= bytes; at += line) copy_line(at);
  std::memcpy(out + at, in + at, bytes - at);
}
/// Makes streamed stores visible to whoever sees what this thread does next.
inline void stream_fence() noexcept { __builtin_ia32_sfence(); }

#else

inline void stream_copy(std::byte* out, const std::byte* in, std::size_t bytes) noexcept { std::memcpy(out, in, bytes); }
inline void stream_fence() noexcept {}

#endif  // KVMELD_X86_DISPATCH

}  // namespace detail
KVMELD_NAMESPACE_END
