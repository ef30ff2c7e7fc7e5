#pragma once
// Sets of ids that nobody has the bytes of.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/fragment_set.hpp>

#include "support/random_cache.hpp"

namespace test {

/// So many insertions of one agent, or of several, `of_each` operations each; the first has a
/// sequence.
inline kvmeld::FragmentSet unserved(std::size_t count, std::uint64_t agent,
                                    std::uint64_t sequence = 0,
                                    std::size_t of_each = ~std::size_t{0}) {
  Random random(agent + sequence);
  std::vector<kvmeld::FragmentSet::Entry> entries;
  for (std::size_t i = 0; i < count; ++i) {
    kvmeld::FragmentId id;
    id.bytes[0] = kvmeld::Xxh3_128::tag;
    for (std::size_t b = 1; b < 17; ++b) id.bytes[b] = static_cast<std::uint8_t>(random.next());
    entries.push_back({id, {}, {}});
    const kvmeld::Dot dot{agent + i / of_each, sequence + i % of_each, 1};
    entries.back().metadata.marks.push_back({dot});
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.id < b.id; });
  return *kvmeld::FragmentSet::from_parts({}, std::move(entries), {}, {});
}

}  // namespace test
