#pragma once

#include <cstddef>
#include <cstdint>
#include <set>

#include <kvmeld/anchor/anchor_pool.hpp>
#include <kvmeld/transport/anchor_exchange.hpp>

KVMELD_NAMESPACE_BEGIN

/// Brings what an exchange tells in step with a pool: anchors that no member has told of yet are
/// published, a record for each of their contexts (one without a context for an anchor without
/// offsets); what has left the pool is withdrawn, but for pulled anchors that `take_pulled` has not
/// given yet. The records told anew.
///
/// Call it after commits, those of pulled anchors too: one that was taken and is not in the pool is
/// withdrawn. One pool for one exchange, whose namespace is `anchor_namespace` of the pool's space
/// and signature policy. O(bytes) for what is new, O(anchors) else. Errors: those of `publish`;
/// what was published before stays, and a retry goes on from there.
template <class Signature, class Eviction, BlobStore Store, Authenticator Auth, ContentHash Hash,
          Compressor C>
[[nodiscard]] Result<std::size_t> publish_pool(AnchorExchange<Store, Auth, Hash, C>& exchange,
                                               const AnchorPool<Signature, Eviction>& pool) {
  const auto now = pool.snapshot();
  std::set<FragmentId> here;
  std::size_t told = 0;
  for (std::size_t i = 0; i < now->table.size(); ++i) {
    const Anchor& anchor = *now->table.anchor(i);
    const auto publish = [&](const Digest128& context) -> Status {
      const FragmentId key = record_key(anchor.id, context);
      here.insert(key);
      const AnchorRecord* const record = exchange.directory().find(key);
      const bool mine = record != nullptr && record->owner == exchange.options().self;
      const bool better = record != nullptr && record->approximate && !anchor.approximate;
      if (record != nullptr && !better && (!mine || exchange.holds(key))) return {};
      KVMELD_TRY(exchange.publish(anchor, context, now->table.signature(i)).status());
      ++told;
      return {};
    };
    if (anchor.offsets.empty()) KVMELD_TRY(publish({}));
    for (const ContextOffset& offset : anchor.offsets) KVMELD_TRY(publish(offset.context));
  }
  const std::set<FragmentId> untaken = exchange.untaken();
  for (const FragmentId& key : exchange.held()) {
    if (here.count(key) == 0 && untaken.count(key) == 0) KVMELD_TRY(exchange.withdraw(key));
  }
  return told;
}

/// Puts a pulled anchor into a pool, which adds its Δ where it has the anchor already. Errors: the
/// pull's; those of `AnchorPool::commit`.
template <class Signature, class Eviction>
[[nodiscard]] Result<CommitResult> commit_pulled(AnchorPool<Signature, Eviction>& pool,
                                                 const PulledAnchor& pulled) {
  if (!pulled.anchor) return pulled.anchor.error();
  return pool.commit(*pulled.anchor);
}

KVMELD_NAMESPACE_END
