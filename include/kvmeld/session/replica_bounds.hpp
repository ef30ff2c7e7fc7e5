#pragma once

/// How much of the set others may fill (docs/convergence.md).

#include <kvmeld/session/replica.hpp>

KVMELD_NAMESPACE_BEGIN

/// Ranges that a context may have: each takes 40 bytes at most, and news should fit into a message.
/// A thousand are taken in any case: gaps and lives of honest members come to some dozens, and
/// whoever sends messages that small may have to send news that are larger.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::size_t Replica<Store, Auth, Hash, C>::range_limit() const {
  constexpr std::size_t head = 1024, least = 1024;
  const std::size_t message = options_.max_message_bytes;
  const std::size_t fit = message < head ? std::size_t{0} : (message - head) / 40;
  return (std::min)(options_.max_ranges, (std::max)(fit, least));
}

/// Agents of whose operations a delta would bring more than there is room for, ascending: of new
/// ones those beyond `max_authors`, else those first that have most of what is short. O(ranges).
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::vector<std::uint64_t> Replica<Store, Auth, Hash, C>::overdrawn(
    const FragmentSet& delta) const {
  struct Share {
    std::uint64_t agent = 0;
    std::size_t ranges = 0;
    std::size_t ranges_before = 0;
    std::size_t entries = 0;  // of the delta, new here
    bool fresh = false;       // was in no range before
  };
  std::vector<Share> shares;
  const auto of = [&](std::uint64_t agent) {
    return std::lower_bound(shares.begin(), shares.end(), agent,
                            [](const Share& s, std::uint64_t a) { return s.agent < a; });
  };
  CausalContext joined = set_.context();
  joined.join(delta.context());
  for (const DotRange& range : joined.ranges()) {
    if (shares.empty() || shares.back().agent != range.agent) {
      shares.push_back({range.agent});
      shares.back().fresh = true;
    }
    ++shares.back().ranges;
  }
  for (const DotRange& range : set_.context().ranges()) {
    const auto share = of(range.agent);
    share->fresh = false;
    ++share->ranges_before;
  }
  for (const FragmentSet::Entry& entry : delta.entries()) {
    const auto& marks = entry.metadata.marks;
    if (!marks.empty() && set_.find(entry.id) == nullptr) ++of(marks.front().dot.agent)->entries;
  }
  std::vector<std::uint64_t> out;
  const auto named = [&](std::uint64_t agent) {
    return agent == options_.self || (!options_.members.empty() && is_member(agent));
  };
  std::size_t authors = 0;
  for (const Share& share : shares) authors += share.fresh || named(share.agent) ? 0U : 1U;
  for (const Share& share : shares) {
    if (!share.fresh || named(share.agent) || authors++ < options_.max_authors) continue;
    out.push_back(share.agent);
  }
  const auto bar_most = [&](std::size_t all, std::size_t most, const auto& has, const auto& adds) {
    std::sort(shares.begin(), shares.end(),
              [&](const Share& a, const Share& b) { return has(a) > has(b); });
    for (const Share& share : shares) {
      if (all <= most) return;
      if (adds(share) == 0) continue;
      out.push_back(share.agent);
      all -= (std::min)(all, adds(share));
    }
  };
  const auto grown = [](const Share& s) {
    return s.ranges - (std::min)(s.ranges, s.ranges_before);
  };
  bar_most(
      joined.ranges().size(), range_limit(), [](const Share& s) { return s.ranges; }, grown);
  const auto added = [](const Share& s) { return s.entries; };
  std::size_t entries = set_.size();
  for (const Share& share : shares) entries += share.entries;
  bar_most(entries, options_.max_entries, added, added);
  std::sort(out.begin(), out.end());
  return out;
}

KVMELD_NAMESPACE_END
