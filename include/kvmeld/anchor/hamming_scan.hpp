#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <kvmeld/anchor/hamming_kernels.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/isa.hpp>

KVMELD_NAMESPACE_BEGIN

/// Signatures that lie as two arrays of halves: what a scan, or a kernel on a device, reads.
/// Trivially copyable; owns nothing.
struct SignatureRef {
  const std::uint32_t* low = nullptr;   ///< (count)
  const std::uint32_t* high = nullptr;  ///< (count)
  std::uint32_t count = 0;

  [[nodiscard]] KVMELD_HD std::uint64_t signature(std::uint32_t i) const noexcept {
    return std::uint64_t{high[i]} << 32U | low[i];
  }
};
static_assert(std::is_trivially_copyable_v<SignatureRef>);

/// A signature near to the query.
struct HammingHit {
  std::uint32_t index = 0;
  std::uint32_t distance = 0;

  bool operator==(const HammingHit&) const = default;
};

/// The fastest of this processor, found once per process.
[[nodiscard]] inline ScanIsa best_scan_isa() noexcept {
  static const ScanIsa isa = [] {
#if KVMELD_X86_DISPATCH
    if (best_isa() == Isa::avx512 && __builtin_cpu_supports("avx512vpopcntdq"))
      return ScanIsa::avx512_popcount;
    if (best_isa() != Isa::baseline) return ScanIsa::avx2;
#endif
    return ScanIsa::baseline;
  }();
  return isa;
}

/// Appends the signatures of one run that differ from `query` in at most `max_distance` bits,
/// ascending by index.
///
/// `index` is what the run's first signature is called; `next`, low halves that will be scanned
/// after these (or null), are brought into the cache meanwhile: as many as the run has. Scans
/// nothing but memory that does not change, so any number of threads may.
inline void hamming_scan(const SignatureRef& run, std::uint64_t query, int max_distance,
                         std::vector<HammingHit>& hits, std::uint32_t index = 0,
                         const std::uint32_t* next = nullptr, ScanIsa isa = best_scan_isa()) {
  if (max_distance < 0) return;
  const auto limit = static_cast<std::uint32_t>((std::min)(max_distance, 64));
  std::uint16_t groups[detail::scan_groups];
  for (std::uint32_t begin = 0; begin < run.count; begin += detail::scan_run) {
    const std::uint32_t count = (std::min)(run.count - begin, detail::scan_run);
    const std::uint32_t whole = count / detail::scan_lanes * detail::scan_lanes;
    const auto check = [&](std::uint32_t first, std::uint32_t last) {
      for (std::uint32_t i = first; i < last; ++i) {
        const auto distance = static_cast<std::uint32_t>(std::popcount(run.signature(i) ^ query));
        if (distance <= limit) hits.push_back({index + i, distance});
      }
    };
    const std::size_t found =
        detail::near_groups(isa,
                            {run.low + begin, run.high + begin,
                             next == nullptr ? nullptr : next + begin, whole, query, limit},
                            groups);
    for (std::size_t g = 0; g < found; ++g)
      check(begin + groups[g] * detail::scan_lanes, begin + (groups[g] + 1U) * detail::scan_lanes);
    check(begin + whole, begin + count);
  }
}

/// The nearest `count` of some hits: ascending by distance, of equals by index.
inline void keep_nearest(std::vector<HammingHit>& hits, std::size_t count) {
  const auto nearer = [](const HammingHit& a, const HammingHit& b) {
    return a.distance != b.distance ? a.distance < b.distance : a.index < b.index;
  };
  if (count < hits.size()) {
    std::nth_element(hits.begin(), hits.begin() + static_cast<std::ptrdiff_t>(count), hits.end(),
                     nearer);
    hits.resize(count);
  }
  std::sort(hits.begin(), hits.end(), nearer);
}

KVMELD_NAMESPACE_END
