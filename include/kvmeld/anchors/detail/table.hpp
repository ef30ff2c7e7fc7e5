#pragma once

/// The table of an anchor pool, its index by signature, and the scan of Hamming distances.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/anchors/decision.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

// The inner loop of a Hamming scan: which groups of 16 signatures have a low half near enough. One
// form for each instruction set.

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

// A form says of the group that starts at signature i whether a low half alone is within the limit,
// and whether a signature is.

struct ScanBaseline {
  [[nodiscard]] KVMELD_ALWAYS_INLINE static ScanBaseline of(const ScanRun&) noexcept { return {}; }
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

/// Numbers of the groups that hold a signature within the limit; returns how many. The low halves
/// first, where that leaves out enough: high halves of a group are then read only where a low half
/// alone is within it.
template <class Form>
struct NearGroups {
  KVMELD_ALWAYS_INLINE static std::size_t run(const ScanRun& run, std::uint16_t* groups) noexcept {
    const Form form = Form::of(run);
    std::size_t found = 0;
    if (!run.two_steps()) {
      for (std::uint32_t i = 0; i < run.count; i += scan_lanes) {
        if (run.next != nullptr) __builtin_prefetch(run.next + i);
        groups[found] = static_cast<std::uint16_t>(i / scan_lanes);
        found += form.within(run, i) ? 1U : 0U;
      }
      return found;
    }
    for (std::uint32_t i = 0; i < run.count; i += scan_lanes) {
      if (run.next != nullptr) __builtin_prefetch(run.next + i);
      groups[found] = static_cast<std::uint16_t>(i / scan_lanes);
      found += form.low_within(run, i) ? 1U : 0U;
    }
    std::size_t kept = 0;
    for (std::size_t g = 0; g < found; ++g) {
      groups[kept] = groups[g];
      kept += form.within(run, groups[g] * scan_lanes) ? 1U : 0U;
    }
    return kept;
  }
};

KVMELD_NOINLINE inline std::size_t near_groups_baseline(const ScanRun& run,
                                                        std::uint16_t* groups) noexcept {
  return NearGroups<ScanBaseline>::run(run, groups);
}

#if KVMELD_X86_DISPATCH

// Compiler vectors and two instructions by name rather than <immintrin.h>, which costs every file
// 0.3 s under g++ 12.
using Halves16 = std::uint32_t __attribute__((vector_size(64), aligned(4), may_alias));
using Halves8 = std::uint32_t __attribute__((vector_size(32), aligned(4), may_alias));
using Words8 = std::int32_t __attribute__((vector_size(32)));
using Shorts16 = std::int16_t __attribute__((vector_size(32)));
using Bytes32 = char __attribute__((vector_size(32)));

struct ScanAvx512 {
  Halves16 low, high, limit;

  [[nodiscard]] KVMELD_TARGET_AVX512 static ScanAvx512 of(const ScanRun& run) noexcept {
    return {static_cast<std::uint32_t>(run.query) - Halves16{},
            static_cast<std::uint32_t>(run.query >> 32U) - Halves16{}, run.limit - Halves16{}};
  }

  [[nodiscard]] KVMELD_TARGET_AVX512 static Halves16 distance(const std::uint32_t* at,
                                                              const Halves16& query) noexcept {
    const Halves16 differing = *reinterpret_cast<const Halves16*>(at) ^ query;
    Halves16 counts;
    __asm__("vpopcntd %1, %0" : "=v"(counts) : "v"(differing));
    return counts;
  }
  [[nodiscard]] KVMELD_TARGET_AVX512 bool any_within(const Halves16& distance) const noexcept {
    std::uint16_t mask;
    __asm__("vpcmpleud %2, %1, %0" : "=Yk"(mask) : "v"(distance), "v"(limit));
    return mask != 0;
  }
  [[nodiscard]] KVMELD_TARGET_AVX512 bool low_within(const ScanRun& run,
                                                     std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low));
  }
  [[nodiscard]] KVMELD_TARGET_AVX512 bool within(const ScanRun& run,
                                                 std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low) + distance(run.high + i, high));
  }
};

struct ScanAvx2 {
  Halves8 low, high;
  Words8 above;

  [[nodiscard]] KVMELD_TARGET_AVX2 static ScanAvx2 of(const ScanRun& run) noexcept {
    return {static_cast<std::uint32_t>(run.query) - Halves8{},
            static_cast<std::uint32_t>(run.query >> 32U) - Halves8{},
            static_cast<std::int32_t>(run.limit + 1) - Words8{}};
  }

  /// Bits that differ in each of 8 halves: two look-ups of four bits a byte, then bytes added up.
  [[nodiscard]] KVMELD_TARGET_AVX2 static Words8 distance(const std::uint32_t* at,
                                                          const Halves8& query) noexcept {
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
  [[nodiscard]] KVMELD_TARGET_AVX2 bool any_within(const Words8& a,
                                                   const Words8& b) const noexcept {
    return __builtin_ia32_pmovmskb256(reinterpret_cast<Bytes32>((a < above) | (b < above))) != 0;
  }
  [[nodiscard]] KVMELD_TARGET_AVX2 bool low_within(const ScanRun& run,
                                                   std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low), distance(run.low + i + 8, low));
  }
  [[nodiscard]] KVMELD_TARGET_AVX2 bool within(const ScanRun& run, std::uint32_t i) const noexcept {
    return any_within(distance(run.low + i, low) + distance(run.high + i, high),
                      distance(run.low + i + 8, low) + distance(run.high + i + 8, high));
  }
};

#endif  // KVMELD_X86_DISPATCH

/// The same in the form asked for.
inline std::size_t near_groups([[maybe_unused]] ScanIsa isa, const ScanRun& run,
                               std::uint16_t* groups) noexcept {
#if KVMELD_X86_DISPATCH
  using extend::Kernel;
  if (isa == ScanIsa::avx512_popcount) return Kernel<NearGroups<ScanAvx512>>::avx512(run, groups);
  if (isa == ScanIsa::avx2) return Kernel<NearGroups<ScanAvx2>>::avx2(run, groups);
#endif
  return near_groups_baseline(run, groups);
}

}  // namespace detail

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

/// Signatures filed five times, by each fifth of their bits: near ones are looked for only where
/// some fifth nearly agrees.
///
/// With r = 5q + s, two signatures within r bits of each other are within q bits in one of the
/// first s + 1 fifths, or within q − 1 in one of the others: so a search walks the buckets of all
/// fifths at such distances, and misses nothing. Of 1,000,000 random signatures a search within 9
/// bits looks at 9,000, one within 16 at 130,000 (docs/anchors.md has the times). 60 bytes a
/// signature; does not change once built, so any thread may search. Norouzi, Punjani, Fleet, Fast
/// search in Hamming space with multi-index hashing, 2012.
class MultiIndex {
 public:
  MultiIndex() = default;
  /// Files signatures under numbers 0, 1, …. O(n).
  [[nodiscard]] static MultiIndex build(std::span<const std::uint64_t> signatures) {
    MultiIndex out;
    out.size_ = static_cast<std::uint32_t>(signatures.size());
    std::vector<Entry> entries(signatures.size());
    for (std::uint32_t part = 0; part < parts; ++part) {
      Part& to = out.parts_[part];
      to.begin.assign(buckets(part) + 1, 0);
      for (const std::uint64_t s : signatures) ++to.begin[bucket_of(s, part) + 1];
      for (std::size_t b = 1; b < to.begin.size(); ++b) to.begin[b] += to.begin[b - 1];
      // Whole entries are dealt out first: a stream of writes for each bucket, not three.
      std::vector<std::uint32_t> next(to.begin.begin(), to.begin.end() - 1);
      for (std::uint32_t i = 0; i < out.size_; ++i)
        entries[next[bucket_of(signatures[i], part)]++] = {signatures[i], i};
      // Kernels take whole groups, and may look at what lies behind the last bucket.
      for (auto* array : {&to.low, &to.high, &to.number})
        array->reserve(entries.size() + detail::scan_lanes);
      for (const Entry& e : entries) {
        to.low.push_back(static_cast<std::uint32_t>(e.signature));
        to.high.push_back(static_cast<std::uint32_t>(e.signature >> 32U));
        to.number.push_back(e.number);
      }
      for (auto* array : {&to.low, &to.high, &to.number})
        array->resize(entries.size() + detail::scan_lanes);
    }
    return out;
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }

  /// Appends what `hamming_scan` would, ascending by index; false, with nothing appended, where a
  /// scan is the faster way: for wide distances, few signatures, or such as crowd in few buckets.
  [[nodiscard]] bool find(std::uint64_t query, int max_distance, std::vector<HammingHit>& hits,
                          ScanIsa isa = best_scan_isa()) const {
    if (max_distance < 0) return true;
    if (max_distance > largest_distance) return false;
    const Radii radii(max_distance);
    // even: what looks would be added to it if signatures were spread evenly
    std::size_t cost = 0, even = 0;
    for (std::uint32_t part = 0; part < parts; ++part) {
      cost += bucket_cost * radii.buckets(part);
      even += radii.buckets(part) * size_ / buckets(part);
    }
    if (cost + even > size_ / look_cost) return false;
    for (std::uint32_t part = 0; part < parts; ++part) {
      for_each_bucket(query, part, radii[part], [&](std::uint32_t bucket) {
        cost += parts_[part].begin[bucket + 1] - parts_[part].begin[bucket];
      });
    }
    if (cost > size_ / look_cost) return false;
    const auto first_hit = static_cast<std::ptrdiff_t>(hits.size());
    for (std::uint32_t part = 0; part < parts; ++part) {
      for_each_bucket(query, part, radii[part], [&](std::uint32_t bucket) {
        search(query, max_distance, radii, part, bucket, hits, isa);
      });
    }
    std::sort(hits.begin() + first_hit, hits.end(),
              [](const HammingHit& a, const HammingHit& b) { return a.index < b.index; });
    return true;
  }

 private:
  static constexpr std::uint32_t parts = 5;
  static constexpr std::uint32_t part_bits = 13;  // the last part has the 12 that are left
  // within 3 bits of a part; beyond it, a scan is always better
  static constexpr int largest_distance = 19;
  // Measured: a look costs as much as four signatures of a scan, going to a bucket as 24 looks.
  static constexpr std::size_t look_cost = 4;
  static constexpr std::size_t bucket_cost = 24;

  struct Entry {
    std::uint64_t signature = 0;
    std::uint32_t number = 0;
  };
  struct Part {
    std::vector<std::uint32_t> begin;   // (buckets + 1)
    std::vector<std::uint32_t> low;     // (signatures, bucket by bucket)
    std::vector<std::uint32_t> high;    // likewise
    std::vector<std::uint32_t> number;  // likewise
  };

  // How far from the query each part is searched; −1: not at all.
  struct Radii {
    std::array<int, parts> of{};
    explicit Radii(int distance) noexcept {
      constexpr int count = static_cast<int>(parts);
      for (int p = 0; p < count; ++p)
        of[static_cast<std::size_t>(p)] =
            p <= distance % count ? distance / count : distance / count - 1;
    }
    [[nodiscard]] int operator[](std::uint32_t part) const noexcept { return of[part]; }
    // That many lie within the radius, or a few less.
    [[nodiscard]] std::size_t buckets(std::uint32_t part) const noexcept {
      constexpr std::array<std::size_t, 5> within = {0, 1, 1 + 13, 1 + 13 + 78, 1 + 13 + 78 + 286};
      return within[static_cast<std::size_t>(of[part] + 1)];
    }
  };

  [[nodiscard]] static constexpr std::uint32_t bits(std::uint32_t part) noexcept {
    return part + 1 < parts ? part_bits : 64 - (parts - 1) * part_bits;
  }
  [[nodiscard]] static constexpr std::size_t buckets(std::uint32_t part) noexcept {
    return std::size_t{1} << bits(part);
  }
  [[nodiscard]] static constexpr std::uint32_t bucket_of(std::uint64_t signature,
                                                         std::uint32_t part) noexcept {
    return static_cast<std::uint32_t>(signature >> (part * part_bits)) &
           static_cast<std::uint32_t>(buckets(part) - 1);
  }

  // Calls `visit` with every bucket within `radius` bits of the query's own.
  template <class Visit>
  static void for_each_bucket(std::uint64_t query, std::uint32_t part, int radius,
                              const Visit& visit) {
    if (radius < 0) return;
    const std::uint32_t own = bucket_of(query, part);
    visit(own);
    for (int flips = 1; flips <= radius; ++flips) {
      for (std::uint32_t mask = (1U << flips) - 1U; mask < buckets(part);) {
        visit(own ^ mask);
        // the next number with as many bits
        const std::uint32_t lowest = mask & (0U - mask), carried = mask + lowest;
        mask = carried | (((mask ^ carried) >> 2U) / lowest);
      }
    }
  }

  void search(std::uint64_t query, int max_distance, const Radii& radii, std::uint32_t part,
              std::uint32_t bucket, std::vector<HammingHit>& hits, ScanIsa isa) const {
    const Part& in = parts_[part];
    std::uint16_t groups[detail::scan_groups];
    for (std::uint32_t begin = in.begin[bucket]; begin < in.begin[bucket + 1];
         begin += detail::scan_run) {
      const std::uint32_t left = (std::min)(in.begin[bucket + 1] - begin, detail::scan_run);
      const std::uint32_t whole =
          (left + detail::scan_lanes - 1) / detail::scan_lanes * detail::scan_lanes;
      const detail::ScanRun run{in.low.data() + begin,
                                in.high.data() + begin,
                                nullptr,
                                whole,
                                query,
                                static_cast<std::uint32_t>(max_distance)};
      const std::size_t found = detail::near_groups(isa, run, groups);
      for (std::size_t g = 0; g < found; ++g) {
        const std::uint32_t first = begin + groups[g] * detail::scan_lanes;
        for (std::uint32_t i = first; i < (std::min)(first + detail::scan_lanes, begin + left);
             ++i) {
          const std::uint64_t signature = std::uint64_t{in.high[i]} << 32U | in.low[i];
          const int distance = std::popcount(signature ^ query);
          if (distance <= max_distance && is_first(signature ^ query, radii, part))
            hits.push_back({in.number[i], static_cast<std::uint32_t>(distance)});
        }
      }
    }
  }
  // Whether no part before this one finds the signature, so that each is found once.
  [[nodiscard]] static bool is_first(std::uint64_t differing, const Radii& radii,
                                     std::uint32_t part) noexcept {
    for (std::uint32_t p = 0; p < part; ++p) {
      if (std::popcount(bucket_of(differing, p)) <= radii[p]) return false;
    }
    return true;
  }

  std::uint32_t size_ = 0;
  std::array<Part, parts> parts_;
};

namespace detail {

/// Uses of one anchor, shared by all versions of a table, counted by readers.
struct UseCell {
  std::uint64_t inserted = 0;
  std::atomic<std::uint64_t> last_used{0};
  std::atomic<std::uint64_t> uses{0};

  [[nodiscard]] AnchorUse read() const noexcept {
    return {inserted, last_used.load(std::memory_order_relaxed),
            uses.load(std::memory_order_relaxed)};
  }
  void touch(std::uint64_t tick) noexcept {
    std::uint64_t seen = last_used.load(std::memory_order_relaxed);
    while (seen < tick && !last_used.compare_exchange_weak(seen, tick, std::memory_order_relaxed)) {
    }
  }
};

}  // namespace detail

/// Anchors by number, with their signatures side by side for scans: a value whose copies share
/// pages.
///
/// A copy is one table of pointers; a change replaces the one or two pages that it touches, so
/// copies that differ by a few anchors share the rest: what a pool publishes, and what an agent
/// keeps and changes for itself. Numbers are dense; erasing moves the last anchor into the gap.
/// Reading is safe from any thread, changing from one.
class AnchorTable {
 public:
  struct Row {
    std::shared_ptr<const Anchor> anchor;
    std::shared_ptr<detail::UseCell> use;
  };

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const Row& row(std::size_t i) const noexcept {
    return (*pages_[i / page_rows])[i % page_rows];
  }
  [[nodiscard]] const std::shared_ptr<const Anchor>& anchor(std::size_t i) const noexcept {
    return row(i).anchor;
  }
  [[nodiscard]] std::uint64_t signature(std::size_t i) const noexcept {
    const Block& block = *blocks_[i / block_signatures];
    return std::uint64_t{block.high[i % block_signatures]} << 32U | block.low[i % block_signatures];
  }
  /// Bytes that `Anchor::bytes` counts, of all anchors.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  void push_back(std::uint64_t signature, Row row) {
    if (size_ % block_signatures == 0) blocks_.push_back(std::make_shared<const Block>());
    if (size_ % page_rows == 0) pages_.push_back(std::make_shared<const Page>());
    bytes_ += row.anchor->bytes();
    ++size_;
    sign(size_ - 1, signature);
    put(size_ - 1, std::move(row));
    file();
  }
  /// Appends many rows at once, each page copied once.
  void append(std::span<const std::uint64_t> signatures, const Row& row) {
    // numbers that it knows are given anew
    if (index_ != nullptr && size_ < index_->size()) index_ = nullptr;
    for (std::size_t at = 0; at < signatures.size();) {
      if (size_ % block_signatures == 0) blocks_.push_back(std::make_shared<const Block>());
      if (size_ % page_rows == 0) pages_.push_back(std::make_shared<const Page>());
      auto block = std::make_shared<Block>(*blocks_.back());
      auto page = std::make_shared<Page>(*pages_.back());
      do {
        block->low[size_ % block_signatures] = static_cast<std::uint32_t>(signatures[at]);
        block->high[size_ % block_signatures] = static_cast<std::uint32_t>(signatures[at] >> 32U);
        (*page)[size_ % page_rows] = row;
        bytes_ += row.anchor->bytes();
        ++size_;
        ++at;
      } while (at < signatures.size() && size_ % page_rows != 0);
      blocks_.back() = std::move(block);
      pages_.back() = std::move(page);
    }
    file();
  }
  /// Another version of anchor i.
  void replace(std::size_t i, std::shared_ptr<const Anchor> anchor) {
    Row next = row(i);
    bytes_ -= next.anchor->bytes();
    bytes_ += anchor->bytes();
    next.anchor = std::move(anchor);
    put(i, std::move(next));
  }
  /// Removes anchor i; the last one takes its number.
  void erase(std::size_t i) {
    const std::size_t last = size_ - 1;
    bytes_ -= row(i).anchor->bytes();
    if (i != last) {
      sign(i, signature(last));
      put(i, row(last));
    }
    put(last, {});
    size_ = last;
    if (size_ % page_rows == 0) pages_.pop_back();
    if (size_ % block_signatures == 0) blocks_.pop_back();
    file();
  }

  /// Appends the numbers of anchors whose signatures differ from `query` in at most `max_distance`
  /// bits, ascending. Many signatures are filed in a `MultiIndex`, which is asked where it is the
  /// faster way; else O(n / 16) vector steps.
  void scan(std::uint64_t query, int max_distance, std::vector<HammingHit>& hits,
            ScanIsa isa = best_scan_isa()) const {
    std::size_t from = 0;
    if (index_ != nullptr) {
      const auto first_hit = static_cast<std::ptrdiff_t>(hits.size());
      if (index_->find(query, max_distance, hits, isa)) {
        from = (std::min)(size_, std::size_t{index_->size()});
        look_at_changed(query, max_distance, hits, first_hit);
      }
    }
    for (std::size_t b = from / block_signatures; b < blocks_.size(); ++b) {
      const std::size_t first = (std::max)(b * block_signatures, from),
                        skip = first % block_signatures;
      const auto count =
          static_cast<std::uint32_t>((std::min)(size_ - first, block_signatures - skip));
      const std::uint32_t* const next =
          b + 1 < blocks_.size() ? blocks_[b + 1]->low.data() : nullptr;
      hamming_scan({blocks_[b]->low.data() + skip, blocks_[b]->high.data() + skip, count}, query,
                   max_distance, hits, static_cast<std::uint32_t>(first), next, isa);
    }
  }

 private:
  static constexpr std::size_t block_signatures = 2048;
  static constexpr std::size_t page_rows = 64;
  struct alignas(64) Block {
    std::array<std::uint32_t, block_signatures> low{};
    std::array<std::uint32_t, block_signatures> high{};
  };
  using Page = std::array<Row, page_rows>;
  // below, a scan takes a few microseconds
  static constexpr std::size_t index_from = std::size_t{1} << 16U;

  /// Files all signatures anew where a 32nd of them, or more, stands beside the index.
  void file() {
    if (size_ < index_from) {
      index_ = nullptr;
      changed_.clear();
      return;
    }
    const std::size_t filed = index_ == nullptr ? 0 : index_->size();
    if ((filed < size_ ? size_ - filed : filed - size_) + changed_.size() <= size_ / 32) return;
    std::vector<std::uint64_t> signatures;
    signatures.reserve(size_);
    for (std::size_t i = 0; i < size_; ++i) signatures.push_back(signature(i));
    index_ = std::make_shared<const MultiIndex>(MultiIndex::build(signatures));
    changed_.clear();
  }
  /// Replaces what the index says of numbers that are gone or signed anew since.
  void look_at_changed(std::uint64_t query, int max_distance, std::vector<HammingHit>& hits,
                       std::ptrdiff_t first_hit) const {
    hits.erase(std::remove_if(hits.begin() + first_hit, hits.end(),
                              [&](const HammingHit& h) {
                                return h.index >= size_ ||
                                       std::binary_search(changed_.begin(), changed_.end(),
                                                          h.index);
                              }),
               hits.end());
    for (const std::uint32_t i : changed_) {
      const int distance = i < size_ ? std::popcount(signature(i) ^ query) : 65;
      if (distance <= max_distance) hits.push_back({i, static_cast<std::uint32_t>(distance)});
    }
    std::sort(hits.begin() + first_hit, hits.end(),
              [](const HammingHit& a, const HammingHit& b) { return a.index < b.index; });
  }

  void sign(std::size_t i, std::uint64_t signature) {
    auto block = std::make_shared<Block>(*blocks_[i / block_signatures]);
    block->low[i % block_signatures] = static_cast<std::uint32_t>(signature);
    block->high[i % block_signatures] = static_cast<std::uint32_t>(signature >> 32U);
    blocks_[i / block_signatures] = std::move(block);
    if (index_ == nullptr || i >= index_->size()) return;
    const auto number = static_cast<std::uint32_t>(i);
    const auto at = std::lower_bound(changed_.begin(), changed_.end(), number);
    if (at == changed_.end() || *at != number) changed_.insert(at, number);
  }
  void put(std::size_t i, Row row) {
    auto page = std::make_shared<Page>(*pages_[i / page_rows]);
    (*page)[i % page_rows] = std::move(row);
    pages_[i / page_rows] = std::move(page);
  }

  std::size_t size_ = 0;
  std::size_t bytes_ = 0;
  std::vector<std::shared_ptr<const Block>> blocks_;
  std::vector<std::shared_ptr<const Page>> pages_;
  std::shared_ptr<const MultiIndex> index_;  // of the signatures as they were; null: few
  // ascending; numbers in the index that were signed anew since
  std::vector<std::uint32_t> changed_;
};

namespace detail {

/// A value that one writer at a time replaces and any number of readers take, without a lock: each
/// reader gets one whole version, and keeps it for as long as it likes.
///
/// The version stands in one of two places, and its number is published. A reader marks a place
/// before it looks whether that is still the current one; a writer changes the other place once
/// nobody marks it, and empties the one before likewise: so no reader ever copies from a place that
/// is being written, and what was replaced is gone with its last reader. A reader starts again only
/// when a writer has got further. (std::atomic of a shared_ptr takes a lock in every standard
/// library of today.)
template <class T>
class Published {
 public:
  explicit Published(std::shared_ptr<const T> first) { places_[0].value = std::move(first); }

  /// The current version. Any thread.
  [[nodiscard]] std::shared_ptr<const T> get() const noexcept {
    for (;;) {
      const std::uint32_t at = current_.load();
      const Place& place = places_[at];
      place.readers.fetch_add(1);
      const bool still = current_.load() == at;
      std::shared_ptr<const T> out;
      if (still) out = place.value;
      place.readers.fetch_sub(1);
      if (still) return out;
    }
  }
  /// Makes a version the current one. One writer at a time: the caller's mutex says which.
  void set(std::shared_ptr<const T> value) noexcept {
    const std::uint32_t now = current_.load();
    const std::uint32_t next = 1 - now;
    wait_unmarked(places_[next]);
    places_[next].value = std::move(value);
    current_.store(next);
    wait_unmarked(places_[now]);
    places_[now].value.reset();
  }

 private:
  struct alignas(64) Place {
    mutable std::atomic<std::uint32_t> readers{0};
    std::shared_ptr<const T> value;
  };
  // Marks last as long as a copy of a pointer.
  static void wait_unmarked(const Place& place) noexcept {
    while (place.readers.load() != 0) std::this_thread::yield();
  }

  std::array<Place, 2> places_;
  std::atomic<std::uint32_t> current_{0};
};

}  // namespace detail

}  // namespace anchors

KVMELD_NAMESPACE_END
