#pragma once

/// Whose word on whose operations counts (docs/convergence.md).

#include <kvmeld/session/replica.hpp>

KVMELD_NAMESPACE_BEGIN

/// What is known of a member; null where that would be one too many that nobody named. Those that
/// are named have their place, however many strangers spoke before.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
auto Replica<Store, Auth, Hash, C>::peer_of(MemberId member) -> Peer* {
  if (const auto at = peers_.find(member); at != peers_.end()) return &at->second;
  const bool named = !options_.members.empty() && is_member(member);
  return named || peers_.size() < max_peers ? &peers_[member] : nullptr;
}

/// Whether a sender is one of the session: where nobody is named, whoever speaks is.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
bool Replica<Store, Auth, Hash, C>::is_member(MemberId member) const {
  const auto& all = options_.members;
  return all.empty() || std::find(all.begin(), all.end(), member) != all.end();
}

/// Whether an agent itself has spoken of this life of its.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
bool Replica<Store, Auth, Hash, C>::is_heard(const AgentLife& life) const {
  const auto at = peers_.find(life.agent);
  return at != peers_.end() && at->second.vouched.next_sequence(life.agent, life.epoch) > 0;
}

/// Whether somebody is there who will say itself which of its operations are gone: an agent that is
/// named as a member or, where nobody is named, has spoken.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
bool Replica<Store, Auth, Hash, C>::is_guarded(const AgentLife& life) const {
  return options_.members.empty() ? is_heard(life) : is_member(life.agent);
}

/// The first sequence of a life that nobody vouches for: its agent, or two members that say the
/// same, or what this replica has taken before. O(members).
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::uint64_t Replica<Store, Auth, Hash, C>::vouched(const AgentLife& life) const {
  std::uint64_t own = set_.context().next_sequence(life.agent, life.epoch);
  std::uint64_t most = 0;
  std::uint64_t second = 0;
  for (const auto& [member, peer] : peers_) {
    if (member == life.agent) {
      own = (std::max)(own, peer.vouched.next_sequence(life.agent, life.epoch));
    } else if (!options_.members.empty() &&
               is_member(member)) {  // who is not named may be one under many names
      const std::uint64_t said = peer.context.next_sequence(life.agent, life.epoch);
      second = (std::max)(second, (std::min)(said, most));
      most = (std::max)(most, said);
    }
  }
  return (std::max)(own, second);
}

/// The first sequence of a life on which a sender's word is not taken, with the operation itself
/// beside it.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::uint64_t Replica<Store, Auth, Hash, C>::tellable(MemberId from, const AgentLife& life) const {
  const bool may_speak = from == everyone || from == life.agent || is_member(from);
  if (!may_speak) return 0;
  if (opened_ && life == AgentLife{options_.self, options_.epoch}) return next_sequence_;
  if (from == everyone || from == life.agent) return options_.max_operations;
  const bool guarded = !options_.members.empty() && is_member(life.agent) && is_heard(life);
  return guarded && life.agent != options_.self ? vouched(life) : options_.max_operations;
}

/// The first sequence of a life of which a sender may not say that it ends, by a removal of
/// whomever.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::uint64_t Replica<Store, Auth, Hash, C>::removable(MemberId from, const AgentLife& life) const {
  if (opened_ && life == AgentLife{options_.self, options_.epoch}) return next_sequence_;
  if (from == everyone || from == life.agent) return options_.max_operations;
  if (!is_member(from)) return 0;
  return is_guarded(life) && life.agent != options_.self ? vouched(life) : options_.max_operations;
}

/// Whether a sender's word alone says that operations of a life are gone, without a removal beside
/// it.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
bool Replica<Store, Auth, Hash, C>::decides(MemberId from, const AgentLife& life) const {
  if (opened_ && life == AgentLife{options_.self, options_.epoch}) return false;
  if (from == everyone || from == life.agent) return true;
  if (!is_member(from)) return false;
  // Of its own earlier lives an agent may have lost what it knew, and nobody else is there to say
  // it.
  return life.agent == options_.self || !is_guarded(life);
}

/// What a sender can tell of what it has seen.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
CausalContext Replica<Store, Auth, Hash, C>::tellable(MemberId from,
                                                      const CausalContext& all) const {
  CausalContext out;
  AgentLife life;
  std::uint64_t end = 0;
  bool known = false;
  for (DotRange range : all.ranges()) {
    if (const AgentLife of{range.agent, range.epoch}; !known || of != life) {
      life = of;
      end = (std::min)(tellable(from, of), options_.max_operations);
      known = true;
    }
    if (range.first >= end) continue;
    range.last = (std::min)(range.last, end - 1);
    out.append(range);
  }
  return out;
}

/// Notes how far an agent's own operations go by its own word: of its latest lives, and only how
/// far, so that neither gaps nor many restarts end the noting.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::note_word(MemberId from, const CausalContext& context) {
  constexpr std::size_t most = 4096;  // lives of one agent
  Peer* const peer = from == everyone ? nullptr : peer_of(from);
  if (peer == nullptr) return;
  const auto& all = context.ranges();
  CausalContext own;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].agent != from) continue;
    const bool last =
        i + 1 == all.size() || all[i + 1].agent != from || all[i + 1].epoch != all[i].epoch;
    if (last) own.append({from, all[i].epoch, 0, all[i].last});
  }
  if (leq(own, peer->vouched)) return;
  own.join(peer->vouched);
  const auto& lives = own.ranges();
  CausalContext latest;
  for (std::size_t i = lives.size() - (std::min)(lives.size(), most); i < lives.size(); ++i)
    latest.append(lives[i]);
  peer->vouched = std::move(latest);
}

/// Looks for operations of this life, in what a sender has seen, that this replica has not done. A
/// stranger's word proves nothing.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::check_own(MemberId from, const CausalContext& context) {
  if (!opened_ || (from != everyone && !is_member(from))) return {};
  if (context.next_sequence(options_.self, options_.epoch) <= next_sequence_) return {};
  note_reused({options_.self, options_.epoch});
  return own_life_reused();
}

/// Whether a mark of this set is among what somebody says is gone.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
bool Replica<Store, Auth, Hash, C>::forgets(const CausalContext& gone) const {
  if (gone.empty()) return false;
  return std::any_of(
      set_.entries().begin(), set_.entries().end(), [&](const FragmentSet::Entry& entry) {
        const auto& marks = entry.metadata.marks;
        return std::any_of(marks.begin(), marks.end(),
                           [&](const Mark& mark) { return gone.contains(mark.dot); });
      });
}

/// Of what a sender says is gone: what is its to say, and what another member says as well.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
CausalContext Replica<Store, Auth, Hash, C>::admitted_gone(const CausalContext& gone,
                                                           MemberId from) {
  constexpr std::size_t most = std::size_t{1} << 16U;
  CausalContext out;
  CausalContext doubtful;
  for (DotRange range : gone.ranges()) {
    const AgentLife life{range.agent, range.epoch};
    const std::uint64_t end = options_.max_operations;
    if (range.first >= end) continue;
    range.last = (std::min)(range.last, end - 1);
    const bool own = opened_ && life == AgentLife{options_.self, options_.epoch};
    if (own && from == everyone) {
      if (range.first < next_sequence_)
        out.append(
            {range.agent, range.epoch, range.first, (std::min)(range.last, next_sequence_ - 1)});
    } else if (decides(from, life)) {
      out.append(range);
    } else if (!own) {  // this replica saw for itself what of this life is gone
      doubtful.append(range);
    }
  }
  if (doubtful.empty()) return out;
  const CausalContext before = out;
  if (!options_.members.empty() && is_member(from)) {
    for (const auto& [member, peer] : peers_) {
      if (member != from && is_member(member)) out.join(meet(doubtful, peer.claimed));
    }
    if (Peer* const peer = peer_of(from); peer != nullptr && doubtful.ranges().size() <= most)
      peer->claimed = doubtful;
  }
  for (const DotRange& range : doubtful.ranges()) {
    CausalContext one;
    one.append(range);
    counters_.unvouched_operations += leq(one, out) || leq(one, set_.compacted()) ? 0U : 1U;
  }
  return out;
}

/// Leaves out of a delta what this replica does not take from its sender: operations beyond an
/// author's quota, in this replica's name, or other than what it knows of their dot; and, until
/// somebody vouches for it, what is not the sender's to say.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Result<FragmentSet> Replica<Store, Auth, Hash, C>::admitted(const FragmentSet& delta,
                                                            MemberId from) {
  struct Bounds {
    std::uint64_t told;
    std::uint64_t removed;
  };
  std::map<AgentLife, Bounds> known;
  const auto bounds = [&](const Provenance& dot) -> const Bounds& {
    const AgentLife life{dot.agent, dot.epoch};
    const auto [at, fresh] = known.try_emplace(life, Bounds{0, 0});
    if (fresh) at->second = {tellable(from, life), removable(from, life)};
    return at->second;
  };
  const std::vector<std::uint64_t> barred =
      from == everyone ? std::vector<std::uint64_t>() : overdrawn(delta);
  const auto is_barred = [&](std::uint64_t agent) {
    return std::binary_search(barred.begin(), barred.end(), agent);
  };
  CausalContext gone;
  const CausalContext vouched_gone = admitted_gone(delta.compacted(), from);
  for (const DotRange& range : vouched_gone.ranges()) {
    if (is_barred(range.agent))
      ++counters_.refused_operations;
    else
      gone.append(range);
  }
  const auto is_own = [&](const Provenance& dot) {
    return dot.agent == options_.self && dot.epoch == options_.epoch;
  };
  /// True: the operation stays out.
  const auto left_out = [&](const Provenance& dot) {
    if (is_barred(dot.agent)) {
      ++counters_.refused_operations;
      return true;
    }
    if (dot.sequence < (std::min)(bounds(dot).told, options_.max_operations)) return false;
    const bool refused = dot.sequence >= options_.max_operations || is_own(dot);
    if (refused) {
      ++counters_.refused_operations;
    } else if (!set_.context().contains(dot)) {
      ++counters_.unvouched_operations;
    }
    return true;
  };
  const auto contradicts = [&](const FragmentId& id, const Mark& mark) {
    if (from == everyone || mark.dot.agent == from || !set_.context().contains(mark.dot))
      return false;
    const FragmentSet::Entry* const mine = set_.find(id);
    if (mine == nullptr) return false;
    const auto& marks = mine->metadata.marks;
    const auto at =
        std::find_if(marks.begin(), marks.end(), [&](const Mark& m) { return m.dot == mark.dot; });
    if (at == marks.end() || *at == mark) return false;
    ++counters_.refused_operations;
    note_reused({mark.dot.agent, mark.dot.epoch});
    return true;
  };
  const auto ends = [&](const Provenance& dot) {
    if (is_barred(dot.agent) && !set_.context().contains(dot)) return false;
    return set_.context().contains(dot) ||
           dot.sequence < (std::min)(bounds(dot).removed, options_.max_operations);
  };
  const auto counted = counters_;
  const auto stays = [&](const FragmentSet::Entry& entry) {
    const auto& marks = entry.metadata.marks;
    return std::none_of(marks.begin(), marks.end(), [&](const Mark& mark) {
      return left_out(mark.dot) || contradicts(entry.id, mark);
    });
  };
  // A removal that this agent made in an earlier life, and has lost: whom it named had done that
  // then, and is in another life now.
  const auto ended_before = [&](const Removal& removal, const Provenance& dot) {
    const auto at = peers_.find(dot.agent);
    return removal.dot.agent == options_.self && at != peers_.end() && at->second.epoch &&
           *at->second.epoch != dot.epoch;
  };
  const auto may_end = [&](const Removal& removal) {
    return std::all_of(removal.removed.begin(), removal.removed.end(), [&](const Provenance& dot) {
      return ends(dot) || ended_before(removal, dot);
    });
  };
  const auto holds = [&](const Removal& removal) {
    return !left_out(removal.dot) && may_end(removal);
  };
  if (gone == delta.compacted() &&
      std::all_of(delta.entries().begin(), delta.entries().end(), stays) &&
      std::all_of(delta.removals().begin(), delta.removals().end(), holds)) {
    return delta;
  }
  counters_ = counted;  // what was found is found again
  std::vector<FragmentSet::Entry> entries;
  for (FragmentSet::Entry entry : delta.entries()) {
    std::erase_if(entry.metadata.marks, [&](const Mark& mark) {
      return left_out(mark.dot) || contradicts(entry.id, mark);
    });
    if (!entry.metadata.marks.empty() || entry.metadata.unattributed)
      entries.push_back(std::move(entry));
  }
  std::vector<Removal> removals;
  for (const Removal& removal : delta.removals()) {
    if (left_out(removal.dot)) continue;
    // A removal is taken whole or not at all: without one of its dots it would be another one.
    if (may_end(removal)) {
      removals.push_back(removal);
    } else {
      ++counters_.unvouched_operations;
    }
  }
  return FragmentSet::from_parts(delta.hash(), std::move(entries), std::move(removals), gone);
}

/// Sets that differ though both have seen the same: one of them knows a fragment without
/// provenance, lacks what its author never let go of, or one dot names two operations. So the
/// other's whole set is asked for; each time it is in vain the next is longer in coming.
///
/// Errors: `dot_reused`, once, where that did not help.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::compare(MemberId from, Peer& peer, const Digest256& theirs) {
  constexpr std::uint32_t most = 8;
  if (peer.unequal_mine != set_.digest() || peer.unequal_theirs != theirs) {
    peer.unequal_mine = set_.digest();
    peer.unequal_theirs = theirs;
    peer.unequal_asks = 0;
  }
  if (peer.unequal_asks > most || elapsed_ < peer.next_want) return {};
  if (peer.unequal_asks++ < most) {
    peer.asked_for_all = true;
    peer.next_want = elapsed_ + jitter(peer.want_patience);
    peer.want_patience = (std::min)(2 * peer.want_patience, options_.max_retry_ms);
    return post_want(from, {});
  }
  ++counters_.reused_dots;
  return detail::error(ErrorCode::dot_reused, "member ", from,
                       " has seen the same operations as this one and holds set ", theirs.hex(),
                       ", this one ", set_.digest().hex(), ": some dot names two operations");
}

/// Looks in the whole set of a member, whose operations are this replica's, for dots that name
/// another operation here.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::find_reused(MemberId from, const FragmentSet& delta) {
  struct Named {
    Provenance dot;
    FragmentId id;
    bool removal;
  };
  std::vector<Named> mine;
  for (const FragmentSet::Entry& entry : set_.entries()) {
    for (const Mark& mark : entry.metadata.marks) mine.push_back({mark.dot, entry.id, false});
  }
  for (const Removal& removal : set_.removals()) mine.push_back({removal.dot, removal.id, true});
  std::sort(mine.begin(), mine.end(), [](const Named& a, const Named& b) { return a.dot < b.dot; });
  std::optional<AgentLife> found;
  const auto look = [&](const Named& theirs) {
    const auto at =
        std::lower_bound(mine.begin(), mine.end(), theirs.dot,
                         [](const Named& n, const Provenance& dot) { return n.dot < dot; });
    if (at == mine.end() || at->dot != theirs.dot ||
        (at->id == theirs.id && at->removal == theirs.removal))
      return;
    found = AgentLife{theirs.dot.agent, theirs.dot.epoch};
    note_reused(*found);
  };
  for (const FragmentSet::Entry& entry : delta.entries()) {
    for (const Mark& mark : entry.metadata.marks) look({mark.dot, entry.id, false});
  }
  for (const Removal& removal : delta.removals()) look({removal.dot, removal.id, true});
  if (!found) return {};
  Peer& peer = peers_[from];
  peer.asked_for_all = false;
  peer.unequal_asks = ~std::uint32_t{0};  // that is why they differ: nothing more to ask
  peer.want_patience = options_.max_retry_ms;
  KVMELD_TRY(own_life_reused());
  return detail::error(ErrorCode::dot_reused, "agent ", found->agent, " in epoch ", found->epoch,
                       " used one dot for two operations: member ", from,
                       " holds one of them, this member the other");
}

KVMELD_NAMESPACE_END
