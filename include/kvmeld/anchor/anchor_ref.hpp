#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include <kvmeld/anchor/anchor_table.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec/row_work.hpp>

/// One version of a pool as kernels read it.

KVMELD_NAMESPACE_BEGIN

/// Signatures and lengths of anchors by number. Trivially copyable; owns nothing: its arrays lie
/// where the code that reads them can.
struct AnchorPoolRef {
  SignatureRef signatures{};
  const std::int32_t* tokens = nullptr;  ///< (count) of each anchor's base
  std::uint64_t version = 0;

  [[nodiscard]] KVMELD_HD std::uint32_t size() const noexcept { return signatures.count; }
};
static_assert(std::is_trivially_copyable_v<AnchorPoolRef>);

/// The arrays of an `AnchorPoolRef` in host memory, three copies away from a device's: taken once a
/// version.
struct AnchorPoolArrays {
  std::vector<std::uint32_t> low{};    ///< (count)
  std::vector<std::uint32_t> high{};   ///< (count)
  std::vector<std::int32_t> tokens{};  ///< (count)
  std::uint64_t version = 0;

  /// O(n). `version` is `AnchorPool::Snapshot::version`.
  KVMELD_LAZY [[nodiscard]] static AnchorPoolArrays of(const AnchorTable& table,
                                                       std::uint64_t version) {
    AnchorPoolArrays out;
    out.version = version;
    for (std::size_t i = 0; i < table.size(); ++i) {
      const std::uint64_t signature = table.signature(i);
      out.low.push_back(static_cast<std::uint32_t>(signature));
      out.high.push_back(static_cast<std::uint32_t>(signature >> 32U));
      constexpr std::int64_t most = (std::numeric_limits<std::int32_t>::max)();
      const std::int64_t tokens =
          table.anchor(i)->base.valid() ? table.anchor(i)->base.token_count() : 0;
      out.tokens.push_back(static_cast<std::int32_t>(tokens < most ? tokens : most));
    }
    return out;
  }
  [[nodiscard]] AnchorPoolRef ref() const noexcept {
    return {
        {low.data(), high.data(), static_cast<std::uint32_t>(low.size())}, tokens.data(), version};
  }
};

/// What `FindNearestAnchor` answers. Numbers are those of one version: look them up in the snapshot
/// that it came from.
struct NearestAnchor {
  static constexpr std::uint32_t none = 0xffffffff;
  std::uint32_t index = none;
  std::uint32_t distance = 65;  ///< bits; 65 where there is none

  bool operator==(const NearestAnchor&) const = default;
};

namespace detail {

[[nodiscard]] KVMELD_HD inline std::uint32_t differing_bits(std::uint64_t a,
                                                            std::uint64_t b) noexcept {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__popcll(a ^ b));
#else
  return static_cast<std::uint32_t>(std::popcount(a ^ b));
#endif
}

}  // namespace detail

/// Row work, a row for each query: the nearest of the anchors that are at least as long as the
/// segment and differ in at most `max_distance` bits; of equally near ones that of the smaller
/// number. All pointers are of the memory where it runs. O(n / 32) steps a row.
struct FindNearestAnchor {
  using State = NearestAnchor;

  AnchorPoolRef pool{};
  const std::uint64_t* signatures = nullptr;  ///< (queries)
  const std::int32_t* tokens = nullptr;       ///< (queries) of the segments
  std::int32_t max_distance = 9;
  NearestAnchor* nearest = nullptr;  ///< (queries) written

  [[nodiscard]] KVMELD_HD State partial(std::int64_t row, int lane) const noexcept {
    State best;
    for (std::uint32_t i = static_cast<std::uint32_t>(lane); i < pool.size(); i += lanes_per_row) {
      if (pool.tokens[i] < tokens[row]) continue;
      const std::uint32_t distance =
          detail::differing_bits(pool.signatures.signature(i), signatures[row]);
      if (static_cast<std::int64_t>(distance) <= max_distance) best = join(best, {i, distance});
    }
    return best;
  }
  [[nodiscard]] KVMELD_HD static State join(State a, State b) noexcept {
    if (a.distance != b.distance) return a.distance < b.distance ? a : b;
    return a.index < b.index ? a : b;
  }
  KVMELD_HD void finish(std::int64_t row, int lane, State total) const noexcept {
    if (lane == 0) nearest[row] = total;
  }
};
static_assert(RowWork<FindNearestAnchor>);

KVMELD_NAMESPACE_END
