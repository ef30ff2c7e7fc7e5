#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/anchor/hamming_scan.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

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
  KVMELD_LAZY [[nodiscard]] static MultiIndex build(std::span<const std::uint64_t> signatures) {
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
  KVMELD_LAZY [[nodiscard]] bool find(std::uint64_t query, int max_distance,
                                      std::vector<HammingHit>& hits,
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

  KVMELD_LAZY void search(std::uint64_t query, int max_distance, const Radii& radii,
                          std::uint32_t part, std::uint32_t bucket, std::vector<HammingHit>& hits,
                          ScanIsa isa) const {
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

KVMELD_NAMESPACE_END
