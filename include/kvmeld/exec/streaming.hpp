#pragma once

/// How a render writes outputs that are larger than the caches, and how that is chosen for the
/// processor at hand.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

#if KVMELD_X86_DISPATCH
#include <cpuid.h>
#endif

KVMELD_NAMESPACE_BEGIN

/// The order in which lines go past the caches. The bytes that are written are the same for each.
enum class StreamWay : std::uint8_t {
  off,       ///< through the caches, whatever the size
  one_page,  ///< line after line
  /// Lines of four stretches of 4 KiB in turn, so that one core waits for four pages at once.
  four_pages,
};

[[nodiscard]] constexpr std::string_view to_string(StreamWay way) noexcept {
  switch (way) {
    case StreamWay::off:
      return "off";
    case StreamWay::one_page:
      return "one_page";
    case StreamWay::four_pages:
      return "four_pages";
  }
  return "unknown";
}

/// How large outputs are written.
struct Streaming {
  StreamWay way = StreamWay::off;
  std::int64_t threshold_bytes = 0;  ///< bytes of output from which on they stream

  bool operator==(const Streaming&) const = default;
};

namespace detail {

#if KVMELD_X86_DISPATCH

/// Bytes of the last-level cache that one core can have: its size by the number of logical
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

/// Whether the processor is one that writes one stream faster than four: any but Intel's, as it was
/// measured on AMD's and no other maker's was at hand.
[[nodiscard]] inline bool likes_one_stream() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return true;
  char vendor[12];
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  return std::string_view(vendor, 12) != "GenuineIntel";
}

#endif

struct StreamState {
  std::atomic<StreamWay> way;
  std::atomic<std::int64_t> threshold_bytes;
};

}  // namespace detail

/// What the processor at hand is given unless `set_streaming` says otherwise: `four_pages` on
/// Intel's, `one_page` on others, from a quarter of the last-level cache that a core can have on,
/// and from 4 MiB at least; `off` where there are no streaming stores.
///
/// A copy reads as much as it writes, and what it wrote is read next: from a quarter on, streaming
/// and reading back from memory takes less time than writing through the caches and finding part of
/// it there. docs/performance.md has the rates of both ways.
[[nodiscard]] inline Streaming default_streaming() noexcept {
#if KVMELD_X86_DISPATCH
  constexpr std::int64_t least = 4 << 20;
  const std::int64_t quarter = detail::last_level_share_bytes() / 4;
  return {detail::likes_one_stream() ? StreamWay::one_page : StreamWay::four_pages,
          quarter > least ? quarter : least};
#else
  return {StreamWay::off, std::int64_t{1} << 62};
#endif
}

namespace detail {

/// What is in force in this process.
[[nodiscard]] inline StreamState& stream_state() noexcept {
  static const Streaming start = default_streaming();
  static StreamState state{start.way, start.threshold_bytes};
  return state;
}

}  // namespace detail

/// How large outputs are written in this process now.
[[nodiscard]] inline Streaming streaming() noexcept {
  const detail::StreamState& state = detail::stream_state();
  return {state.way.load(std::memory_order_relaxed),
          state.threshold_bytes.load(std::memory_order_relaxed)};
}

/// Has the renders that start from now on write large outputs so; one that is under way and streams
/// may go on in the new order. Any thread may call it at any time; bytes do not change.
///
/// Where there are no streaming stores all ways are `off`. Errors: `invalid_argument` (a negative
/// threshold), `unknown_field`.
inline Status set_streaming(const Streaming& chosen) {
  if (chosen.threshold_bytes < 0) {
    return detail::error(ErrorCode::invalid_argument, "streaming from ", chosen.threshold_bytes,
                         " bytes on; the threshold is not negative");
  }
  if (chosen.way > StreamWay::four_pages) {
    return detail::error(ErrorCode::unknown_field, "stream way ", static_cast<int>(chosen.way),
                         " is none that this build knows");
  }
  detail::StreamState& state = detail::stream_state();
  state.way.store(chosen.way, std::memory_order_relaxed);
  state.threshold_bytes.store(chosen.threshold_bytes, std::memory_order_relaxed);
  return {};
}

KVMELD_NAMESPACE_END
