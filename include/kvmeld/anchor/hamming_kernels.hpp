#pragma once

/// The inner loop of a Hamming scan: which groups of 16 signatures have a low half near enough. One
/// form for each instruction set.

#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Which instructions a scan uses. Results are the same for each.
enum class ScanIsa : std::uint8_t { baseline, avx2, avx512_popcount };

namespace detail {

inline constexpr std::uint32_t scan_lanes = 16;  ///< signatures that are told apart together
inline constexpr std::uint32_t scan_run = 8192;  ///< signatures between two looks at high halves
inline constexpr std::size_t scan_groups = scan_run / scan_lanes;

/// What a scan of one run reads.
struct ScanRun {
  const std::uint32_t* low = nullptr;
  const std::uint32_t* high = nullptr;
  const std::uint32_t* next = nullptr;  ///< what to bring into the cache meanwhile; null: nothing
  std::uint32_t count = 0;              ///< a multiple of the lanes, at most `scan_run`
  std::uint64_t query = 0;
  std::uint32_t limit = 0;

  /// Whether low halves alone leave out most groups: of random ones, one group of 16 in seven has a
  /// half within 9, and most have one within 12.
  [[nodiscard]] bool two_steps() const noexcept { return limit <= 9; }
};

/// Numbers of the groups that hold a signature within the limit; returns how many. The low halves
/// first, where that leaves out enough: high halves of a group are then read only where a low half
/// alone is within it. `low_within(run, i)` and `within(run, i)` of a form say so of the group that
/// starts at signature i. A macro, because a template would not carry the instruction set of its
/// callers.
#define KVMELD_SCAN_GROUPS(form, run, groups)                        \
  std::size_t found = 0;                                             \
  if (!(run).two_steps()) {                                          \
    for (std::uint32_t i = 0; i < (run).count; i += scan_lanes) {    \
      if ((run).next != nullptr) __builtin_prefetch((run).next + i); \
      (groups)[found] = static_cast<std::uint16_t>(i / scan_lanes);  \
      found += (form).within(run, i) ? 1U : 0U;                      \
    }                                                                \
    return found;                                                    \
  }                                                                  \
  for (std::uint32_t i = 0; i < (run).count; i += scan_lanes) {      \
    if ((run).next != nullptr) __builtin_prefetch((run).next + i);   \
    (groups)[found] = static_cast<std::uint16_t>(i / scan_lanes);    \
    found += (form).low_within(run, i) ? 1U : 0U;                    \
  }                                                                  \
  std::size_t kept = 0;                                              \
  for (std::size_t g = 0; g < found; ++g) {                          \
    (groups)[kept] = (groups)[g];                                    \
    kept += (form).within(run, (groups)[g] * scan_lanes) ? 1U : 0U;  \
  }                                                                  \
  return kept

struct ScanBaseline {
  [[nodiscard]] KVMELD_ALWAYS_INLINE bool low_within(const ScanRun&, std::uint32_t) const noexcept {
    return true;
  }
  [[nodiscard]] KVMELD_ALWAYS_INLINE bool within(const ScanRun& run,
                                                 std::uint32_t i) const noexcept {
    bool any = false;
    for (std::uint32_t lane = i; lane < i + scan_lanes; ++lane) {
      const std::uint64_t signature = std::uint64_t{run.high[lane]} << 32U | run.low[lane];
      any = any || static_cast<std::uint32_t>(std::popcount(signature ^ run.query)) <= run.limit;
    }
    return any;
  }
};

KVMELD_NOINLINE inline std::size_t near_groups_baseline(const ScanRun& run,
                                                        std::uint16_t* groups) noexcept {
  KVMELD_SCAN_GROUPS(ScanBaseline{}, run, groups);
}

#if KVMELD_X86_DISPATCH

// Compiler vectors and two instructions by name rather than <immintrin.h>, which costs every file
// 0.3 s under g++ 12.
using Halves16 = std::uint32_t __attribute__((vector_size(64), aligned(4), may_alias));
using Halves8 = std::uint32_t __attribute__((vector_size(32), aligned(4), may_alias));
using Words8 = std::int32_t __attribute__((vector_size(32)));
using Shorts16 = std::int16_t __attribute__((vector_size(32)));
using Bytes32 = char __attribute__((vector_size(32)));

#define KVMELD_TARGET_POPCOUNT \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vpopcntdq,avx2,fma,f16c")))

struct ScanAvx512 {
  Halves16 low, high, limit;

  [[nodiscard]] KVMELD_TARGET_POPCOUNT KVMELD_ALWAYS_INLINE static Halves16 distance(
      const std::uint32_t* at, const Halves16& query) noexcept {
    const Halves16 differing = *reinterpret_cast<const Halves16*>(at) ^ query;
    Halves16 counts;
    __asm__("vpopcntd %1, %0" : "=v"(counts) : "v"(differing));
    return counts;
  }
  [[nodiscard]] KVMELD_TARGET_POPCOUNT KVMELD_ALWAYS_INLINE bool any_within(
      const Halves16& distance) const noexcept {
    std::uint16_t mask;
    __asm__("vpcmpleud %2, %1, %0" : "=Yk"(mask) : "v"(distance), "v"(limit));
    return mask != 0;
  }
  [[nodiscard]] KVMELD_TARGET_POPCOUNT KVMELD_ALWAYS_INLINE bool low_within(
      const ScanRun& run, std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low));
  }
  [[nodiscard]] KVMELD_TARGET_POPCOUNT KVMELD_ALWAYS_INLINE bool within(
      const ScanRun& run, std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low) + distance(run.high + i, high));
  }
};

KVMELD_TARGET_POPCOUNT KVMELD_NOINLINE inline std::size_t near_groups_avx512(
    const ScanRun& run, std::uint16_t* groups) noexcept {
  const ScanAvx512 form{static_cast<std::uint32_t>(run.query) - Halves16{},
                        static_cast<std::uint32_t>(run.query >> 32U) - Halves16{},
                        run.limit - Halves16{}};
  KVMELD_SCAN_GROUPS(form, run, groups);
}
#undef KVMELD_TARGET_POPCOUNT

struct ScanAvx2 {
  Halves8 low, high;
  Words8 above;

  /// Bits that differ in each of 8 halves: two look-ups of four bits a byte, then bytes added up.
  [[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static Words8 distance(
      const std::uint32_t* at, const Halves8& query) noexcept {
    const Bytes32 table = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
                           0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
    const Halves8 nibbles = 0x0F0F0F0FU - Halves8{};
    const Halves8 bits = *reinterpret_cast<const Halves8*>(at) ^ query;
    const Bytes32 counts =
        __builtin_ia32_pshufb256(table, reinterpret_cast<Bytes32>(bits & nibbles)) +
        __builtin_ia32_pshufb256(table, reinterpret_cast<Bytes32>((bits >> 4U) & nibbles));
    const Shorts16 pairs = reinterpret_cast<Shorts16>(
        __builtin_ia32_pmaddubsw256(counts, reinterpret_cast<Bytes32>(0x01010101U - Halves8{})));
    return reinterpret_cast<Words8>(
        __builtin_ia32_pmaddwd256(pairs, reinterpret_cast<Shorts16>(0x00010001U - Halves8{})));
  }
  [[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE bool any_within(
      const Words8& a, const Words8& b) const noexcept {
    return __builtin_ia32_pmovmskb256(reinterpret_cast<Bytes32>((a < above) | (b < above))) != 0;
  }
  [[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE bool low_within(
      const ScanRun& run, std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low), distance(run.low + i + 8, low));
  }
  [[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE bool within(
      const ScanRun& run, std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low) + distance(run.high + i, high),
                      distance(run.low + i + 8, low) + distance(run.high + i + 8, high));
  }
};

KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline std::size_t near_groups_avx2(
    const ScanRun& run, std::uint16_t* groups) noexcept {
  const ScanAvx2 form{static_cast<std::uint32_t>(run.query) - Halves8{},
                      static_cast<std::uint32_t>(run.query >> 32U) - Halves8{},
                      static_cast<std::int32_t>(run.limit + 1) - Words8{}};
  KVMELD_SCAN_GROUPS(form, run, groups);
}

#endif  // KVMELD_X86_DISPATCH
#undef KVMELD_SCAN_GROUPS

/// The same in the form asked for.
inline std::size_t near_groups([[maybe_unused]] ScanIsa isa, const ScanRun& run,
                               std::uint16_t* groups) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == ScanIsa::avx512_popcount) return near_groups_avx512(run, groups);
  if (isa == ScanIsa::avx2) return near_groups_avx2(run, groups);
#endif
  return near_groups_baseline(run, groups);
}

}  // namespace detail
KVMELD_NAMESPACE_END
