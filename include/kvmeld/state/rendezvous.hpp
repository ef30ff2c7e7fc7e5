#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/mix_bits.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// How strongly a key is drawn to a member: XXH3-64 of the key, seeded by the member.
[[nodiscard]] inline std::uint64_t rendezvous_weight(const FragmentId& key,
                                                     std::uint64_t member) noexcept {
  return XXH3_64bits_withSeed(key.bytes.data(), key.bytes.size(), mix_bits(member));
}

}  // namespace detail

/// The members that a key is drawn to most, the strongest first: its owner, and who stands in where
/// the owner is missing.
///
/// Everybody who knows the same members names the same ones, without a word. A member that leaves
/// gives up its own keys and no other moves; one that joins takes 1/n of the keys, from all alike.
/// Equal weights: the smaller member first. O(n log most). Highest random weight: Thaler and
/// Ravishankar, Using name-based mappings to increase hit rates, 1998.
KVMELD_LAZY [[nodiscard]] std::vector<std::uint64_t> rendezvous_rank(
    const FragmentId& key, std::span<const std::uint64_t> members,
    std::size_t most = ~std::size_t{0}) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> weighed;  // (weight from the top, member)
  for (const std::uint64_t member : members)
    weighed.emplace_back(~detail::rendezvous_weight(key, member), member);
  most = (std::min)(most, weighed.size());
  std::partial_sort(weighed.begin(), weighed.begin() + static_cast<std::ptrdiff_t>(most),
                    weighed.end());
  std::vector<std::uint64_t> out;
  for (std::size_t i = 0; i < most; ++i) out.push_back(weighed[i].second);
  return out;
}

KVMELD_NAMESPACE_END
