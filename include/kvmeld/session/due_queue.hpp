#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What is to be looked for, and when: each author's by time, and authors in turn, so that however
/// many fragments of one author nobody serves, another's is looked for as if they were not there.
class DueQueue {
 public:
  /// O(log n), as `drop`.
  void put(std::uint64_t author, std::int64_t at, const FragmentId& id) {
    lanes_[author].emplace(at, id);
  }
  void drop(std::uint64_t author, std::int64_t at, const FragmentId& id) {
    const auto lane = lanes_.find(author);
    if (lane == lanes_.end()) return;
    lane->second.erase({at, id});
    if (lane->second.empty()) lanes_.erase(lane);
  }
  [[nodiscard]] bool has(std::uint64_t author) const { return lanes_.count(author) != 0; }

  /// Up to `most` that are due; they stay until they are dropped. O(authors + most).
  [[nodiscard]] std::vector<FragmentId> due(std::int64_t now, std::size_t most) {
    using Next = std::set<std::pair<std::int64_t, FragmentId>>::const_iterator;
    std::vector<std::pair<const std::pair<const std::uint64_t, Lane>*, Next>> ready;
    auto at = lanes_.upper_bound(last_);
    for (std::size_t seen = 0; seen < lanes_.size() && ready.size() < most; ++seen, ++at) {
      if (at == lanes_.end()) at = lanes_.begin();
      if (at->second.begin()->first <= now) ready.emplace_back(&*at, at->second.begin());
    }
    std::vector<FragmentId> out;
    for (std::size_t turn = 0; out.size() < most && !ready.empty();) {
      auto& [lane, next] = ready[turn];
      out.push_back(next->second);
      last_ = lane->first;
      if (++next == lane->second.end() || next->first > now) {
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(turn));
      } else {
        ++turn;
      }
      if (turn >= ready.size()) turn = 0;
    }
    return out;
  }

 private:
  using Lane = std::set<std::pair<std::int64_t, FragmentId>>;

  std::map<std::uint64_t, Lane> lanes_;  // by author, none empty
  std::uint64_t last_ = 0;               // whose turn was the last
};

}  // namespace detail

KVMELD_NAMESPACE_END
