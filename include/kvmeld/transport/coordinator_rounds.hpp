#pragma once

/// What a coordinator admits into the state, and how it comes to the cut of a round.

#include <kvmeld/transport/coordinator.hpp>

KVMELD_NAMESPACE_BEGIN

/// Refuses a whole update where a replica would leave out a part of it, so that what is answered is
/// what happened.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Coordinator<Store, Auth, Hash, C>::admit_quotas(const Update& update) {
  const FragmentSet& set = update.set();
  const FragmentSet& state = replica_.set();
  if (const std::size_t n = set.size() + set.removals().size(); n > options_.max_update_entries) {
    return detail::error(ErrorCode::quota_exceeded, "an update of ", n,
                         " fragments and removals; at most ", options_.max_update_entries,
                         " are taken at once: send it in parts");
  }
  if (set.size() > options_.replica.max_entries ||
      state.size() > options_.replica.max_entries - set.size()) {
    return detail::error(ErrorCode::quota_exceeded, "an update of ", set.size(),
                         " fragments to a state of ", state.size(), ", which may have ",
                         options_.replica.max_entries);
  }
  for (const DotRange& range : set.context().ranges()) {
    if (range.last >= options_.replica.max_operations) {
      return detail::error(ErrorCode::quota_exceeded, "operation ", range.last, " of agent ",
                           range.agent, " in epoch ", range.epoch, "; an author may do ",
                           options_.replica.max_operations, " in one life");
    }
    if (range.agent == options_.replica.self && range.epoch == options_.replica.epoch) {
      return detail::error(ErrorCode::invalid_argument, "an operation of agent ", range.agent,
                           ", which is this coordinator");
    }
  }
  // What every client shall get must fit into messages: entries and contexts are not divided.
  constexpr std::size_t mark_bytes = 96;  // the most that a mark takes, encoded, its line included
  const std::size_t most = (std::min)(
      options_.max_marks, (options_.replica.max_message_bytes - message_overhead) / mark_bytes);
  for (const FragmentSet::Entry& entry : set.entries()) {
    const auto& marks = entry.metadata.marks;
    const FragmentSet::Entry* const here = state.find(entry.id);
    const auto fresh =
        static_cast<std::size_t>(std::count_if(marks.begin(), marks.end(), [&](const Mark& mark) {
          return !state.context().contains(mark.dot);
        }));
    const std::size_t all = (here != nullptr ? here->metadata.marks.size() : 0) + fresh;
    if (fresh > 0 && all > most)
      return detail::error(ErrorCode::quota_exceeded, "fragment ", entry.id.hex(), " would have ",
                           all, " marks; at most ", most, " are taken");
  }
  for (const Removal& removal : set.removals()) {
    if (removal.removed.size() > most) {
      return detail::error(ErrorCode::quota_exceeded, "a removal of fragment ", removal.id.hex(),
                           " names ", removal.removed.size(), " operations; at most ", most,
                           " are taken");
    }
  }
  if (!leq(set.context(), state.context())) {
    CausalContext joined = state.context();
    joined.join(set.context());
    if (const std::size_t ranges = joined.ranges().size();
        ranges > (std::min)(options_.max_ranges, most)) {
      return detail::error(ErrorCode::quota_exceeded, "the state's context would have ", ranges,
                           " ranges; at most ", (std::min)(options_.max_ranges, most),
                           " are taken");
    }
  }
  for (const auto& [id, part] : update.parts()) {
    if (set.find(id) != nullptr || state.find(id) != nullptr) continue;
    return detail::error(ErrorCode::invalid_argument, "payload of fragment ", id.hex(),
                         ", which no operation inserts");
  }
  for (const auto& [agent, fresh] : fresh_of(update)) {
    Account& account = accounts_[agent];
    const auto over = [&, f = fresh] {
      return account.entries + f.entries > options_.max_author_entries ||
             f.bytes > options_.max_author_bytes ||
             account.bytes > options_.max_author_bytes - f.bytes;
    };
    if (over()) account = count_account(agent);  // some may be gone since
    if (!over()) continue;
    return detail::error(ErrorCode::quota_exceeded, "agent ", agent, " would have ",
                         account.entries + fresh.entries, " fragments of ",
                         account.bytes + fresh.bytes, " bytes in the state; an author may have ",
                         options_.max_author_entries, " of ", options_.max_author_bytes);
  }
  return {};
}

/// Refuses what is not the member's to say: operations of other agents that the state has not seen,
/// and others than it has seen.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Coordinator<Store, Auth, Hash, C>::admit_speaker(const Update& update) {
  const MemberId member = update.member();
  const auto& relays = options_.relays;
  if (member == everyone || std::find(relays.begin(), relays.end(), member) != relays.end())
    return {};
  const FragmentSet& state = replica_.set();
  const auto refused = [member](const Provenance& dot, const char* why) {
    return detail::error(ErrorCode::unauthenticated, "member ", member, " says of operation ",
                         dot.sequence, " of agent ", dot.agent, " in epoch ", dot.epoch, why,
                         "; only that agent may (or one of CoordinatorOptions::relays)");
  };
  for (const DotRange& range : update.set().context().ranges()) {
    CausalContext one;
    one.append(range);
    if (range.agent == member || leq(one, state.context())) continue;
    return refused({range.agent, range.last, range.epoch},
                   ", which is not known here, what it was");
  }
  for (const FragmentSet::Entry& entry : update.set().entries()) {
    const FragmentSet::Entry* const here = state.find(entry.id);
    if (here == nullptr) continue;  // what was seen and is gone stays so
    const auto& marks = here->metadata.marks;
    for (const Mark& mark : entry.metadata.marks) {
      if (mark.dot.agent == member) continue;
      const auto at =
          std::lower_bound(marks.begin(), marks.end(), mark.dot,
                           [](const Mark& m, const Provenance& d) { return m.dot < d; });
      if (at == marks.end() || at->dot != mark.dot || *at == mark) continue;
      return refused(mark.dot, " another thing than it did itself");
    }
  }
  CausalContext gone;
  for (const DotRange& range : update.set().compacted().ranges()) {
    if (range.agent != member) gone.append(range);
  }
  if (gone.empty()) return {};
  for (const FragmentSet::Entry& entry : state.entries()) {
    for (const Mark& mark : entry.metadata.marks) {
      if (gone.contains(mark.dot)) return refused(mark.dot, ", which is in force, that it is gone");
    }
  }
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Coordinator<Store, Auth, Hash, C>::admit(const Update& update) {
  Status status = admit_speaker(update);
  counts_.unauthenticated += status ? 0U : 1U;
  if (!status) return status;
  status = admit_quotas(update);
  counts_.over_quota += status.code() == ErrorCode::quota_exceeded ? 1U : 0U;
  return status;
}

/// What an update's authors gain by it.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
auto Coordinator<Store, Auth, Hash, C>::fresh_of(const Update& update) const -> Accounts {
  Accounts out;
  for (const FragmentSet::Entry& entry : update.set().entries()) {
    if (replica_.set().find(entry.id) != nullptr) continue;
    const auto part = update.parts().find(entry.id);
    if (part == update.parts().end()) {
      add_to(out, entry);
    } else {
      add_to(out, {entry.id, part->second.manifest().fragment, entry.metadata});
    }
  }
  return out;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
auto Coordinator<Store, Auth, Hash, C>::count_account(std::uint64_t agent) const -> Account {
  Accounts out;
  for (const FragmentSet::Entry& entry : replica_.set().entries()) {
    const auto& marks = entry.metadata.marks;
    if (std::any_of(marks.begin(), marks.end(),
                    [&](const Mark& m) { return m.dot.agent == agent; })) {
      add_to(out, entry);
    }
  }
  return out[agent];
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::shared_ptr<detail::UpdateBudget> Coordinator<Store, Auth, Hash, C>::budget_of(
    MemberId member) const {
  constexpr std::size_t most = 1024;  // that have nothing on its way are forgotten beyond
  const std::lock_guard lock(budgets_mutex_);
  if (budgets_.size() >= most) {
    std::erase_if(budgets_, [](const auto& one) { return one.second.use_count() == 1; });
  }
  auto& budget = budgets_[member];
  if (budget == nullptr) budget = std::make_shared<detail::UpdateBudget>(options_.max_member_bytes);
  return budget;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
detail::CoordinatorSession& Coordinator<Store, Auth, Hash, C>::session(std::uint64_t number) {
  constexpr std::size_t most = 256;
  detail::CoordinatorSession& out = sessions_[number];
  out.used = ++uses_;
  if (sessions_.size() > most) {
    // The one that was used longest ago and has nobody waiting; its cuts are in the store.
    auto oldest = sessions_.end();
    for (auto at = sessions_.begin(); at != sessions_.end(); ++at) {
      if (at->first != number && at->second.barriers.empty() &&
          (oldest == sessions_.end() || at->second.used < oldest->second.used))
        oldest = at;
    }
    if (oldest != sessions_.end()) sessions_.erase(oldest);
  }
  return out;
}

/// Reads the oldest round of a session, and raises it: what is below never gets a cut again, by
/// whichever coordinator on this store.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Coordinator<Store, Auth, Hash, C>::forget_rounds(detail::CoordinatorSession& session,
                                                        std::uint64_t number, std::uint64_t below) {
  std::uint64_t least = ~std::uint64_t{0};
  std::uint64_t place = 0;
  for (std::uint64_t p = 0; p < 2; ++p) {
    const auto stored = store_->get(detail::coordinator_oldest_key(number, p));
    if (!stored && stored.error().code() != ErrorCode::not_found) return stored.error();
    std::uint64_t there = 0;
    if (stored) {
      ByteReader r(stored->bytes());
      there = r.value<std::uint64_t>();
      if (!r.ok()) there = 0;
    }
    session.oldest = (std::max)(session.oldest, there);
    if (there < least) place = p;
    least = (std::min)(least, there);
  }
  if (session.oldest >= below) return {};
  ByteWriter w;
  w.value(below);
  const BlobKey key = detail::coordinator_oldest_key(number, place);
  KVMELD_TRY(store_->erase(key));
  const auto fresh = store_->put_if_absent(key, w.written());
  if (!fresh) return fresh.error();
  // Another coordinator came between the two: its number stands, and what it leaves out is not
  // erased yet.
  if (!*fresh)
    return detail::error(ErrorCode::unavailable, "another coordinator forgets rounds of session ",
                         number, " at once");
  for (std::uint64_t round = (std::max<std::uint64_t>)(session.oldest, 1),
                     left = options_.max_rounds;
       round < below && left > 0; ++round, --left) {
    (void)store_->erase(detail::coordinator_cut_key(number, round));
  }
  session.oldest = below;
  session.cuts.erase(session.cuts.begin(), session.cuts.lower_bound(below));
  return {};
}

/// Whether a round that has no cut may get one. Errors: `not_found` for one that is over and
/// forgotten; the store's.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Coordinator<Store, Auth, Hash, C>::may_begin(detail::CoordinatorSession& session,
                                                    const MergeAsk& ask) {
  KVMELD_TRY(forget_rounds(session, ask.session, 0));
  if (ask.round >= session.oldest) return {};
  return detail::error(ErrorCode::not_found, "round ", ask.round,
                       " is over and forgotten; the oldest that is remembered is ", session.oldest);
}

/// A round's cut, here or in the store; null where there is none yet.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Result<const MergeAnswer*> Coordinator<Store, Auth, Hash, C>::cut_of(
    detail::CoordinatorSession& session, const MergeAsk& ask) {
  if (const auto at = session.cuts.find(ask.round); at != session.cuts.end()) return &at->second;
  // looked for in the store when the first member came
  if (session.barriers.count(ask.round) != 0) return nullptr;
  const auto stored = store_->get(detail::coordinator_cut_key(ask.session, ask.round));
  if (!stored) {
    if (stored.error().code() != ErrorCode::not_found) return stored.error();
    KVMELD_TRY(may_begin(session, ask));
    return nullptr;
  }
  auto cut = decode_cut(stored->bytes(), options_.replica.set_hash);
  if (!cut) return cut.error();
  const auto here =
      session.cuts.insert_or_assign(ask.round, MergeAnswer{*std::move(cut), {}, {}}).first;
  // the store has it
  if (session.cuts.size() > options_.max_rounds)
    session.cuts.erase(here == session.cuts.begin() ? std::next(here) : session.cuts.begin());
  return &here->second;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::vector<MemberId> Coordinator<Store, Auth, Hash, C>::absent(
    const detail::Barrier& barrier) const {
  std::vector<MemberId> out;
  for (const MemberId member : options_.members) {
    if (barrier.ready.count(member) == 0) out.push_back(member);
  }
  return out;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Coordinator<Store, Auth, Hash, C>::arrive(const MergeAsk& ask, std::int64_t now_ms) {
  const std::lock_guard lock(mutex_);
  const std::int64_t now = waited(ask, now_ms);
  if (ask.round == 0) return {};
  const auto& members = options_.members;
  if (!members.empty() && std::find(members.begin(), members.end(), ask.member) == members.end()) {
    return detail::error(ErrorCode::invalid_argument, "member ", ask.member, " is not among the ",
                         members.size(), " of this coordinator's rounds");
  }
  detail::CoordinatorSession& here = session(ask.session);
  const auto cut = cut_of(here, ask);
  if (!cut) return cut.error();
  const Digest128 own = options_.replica.merger.digest();
  const auto at = here.barriers.find(ask.round);
  const Digest128 expected = *cut != nullptr             ? (*cut)->cut.merger
                             : own != Digest128{}        ? own
                             : at != here.barriers.end() ? at->second.merger
                                                         : ask.merger;
  if (ask.merger != expected) {
    return detail::error(ErrorCode::merger_mismatch, "member ", ask.member, " merges by ",
                         ask.merger.hex(), ", round ", ask.round, " by ", expected.hex());
  }
  detail::Barrier& barrier = here.barriers[ask.round];
  if (barrier.ready.empty()) {
    barrier.merger = expected;
    barrier.first_ms = now;
  }
  detail::Barrier::Ready& ready = barrier.ready[ask.member];
  ++ready.asks;
  if (!leq(ask.context, ready.context)) {
    ready.context.join(ask.context);
    ready.seen = {};
  }
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Coordinator<Store, Auth, Hash, C>::leave(const MergeAsk& ask) {
  if (ask.round == 0) return;
  const std::lock_guard lock(mutex_);
  const auto at = sessions_.find(ask.session);
  if (at == sessions_.end()) return;
  const auto barrier = at->second.barriers.find(ask.round);
  if (barrier == at->second.barriers.end()) return;
  const auto ready = barrier->second.ready.find(ask.member);
  if (ready != barrier->second.ready.end() && --ready->second.asks == 0)
    barrier->second.ready.erase(ready);
  if (barrier->second.ready.empty()) at->second.barriers.erase(barrier);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
std::optional<Result<MergeAnswer>> Coordinator<Store, Auth, Hash, C>::poll(const MergeAsk& ask,
                                                                           std::int64_t now_ms) {
  using Answer = Result<MergeAnswer>;
  const std::lock_guard lock(mutex_);
  const FragmentSet& set = replica_.set();
  const std::int64_t now = waited(ask, now_ms);
  const bool late = now >= *ask.until_ms;
  const auto publish = [&](std::uint64_t session, std::uint64_t round, const Digest128& merger) {
    return make_cut(set, merger, session, round, options_.replica.self);
  };
  if (ask.round == 0) {
    if (set.digest() != ask.known && ask.seen.look(ask.context, set.context(), states_)) {
      auto cut = publish(ask.session, 0, options_.replica.merger.digest());
      return cut ? Answer(MergeAnswer{*std::move(cut), {}, set.digest()}) : Answer(cut.error());
    }
    if (!late) return std::nullopt;
    return Answer(detail::error(ErrorCode::timed_out, "no other state than ", set.digest().hex(),
                                ", of ", set.size(), " fragments, came in time"));
  }
  detail::CoordinatorSession& here = session(ask.session);
  const auto cut = cut_of(here, ask);
  if (!cut) return Answer(cut.error());
  if (*cut != nullptr) return Answer(**cut);
  const auto at = here.barriers.find(ask.round);
  if (at == here.barriers.end())
    return Answer(detail::error(ErrorCode::invalid_argument, "member ", ask.member,
                                " asks for round ", ask.round, " and never arrived"));
  detail::Barrier& barrier = at->second;
  const bool all =
      options_.members.empty() ? barrier.ready.size() >= quorum() : absent(barrier).empty();
  // Who waits here shall have brought what it made. What others have not brought, nobody waits for.
  const bool seen = std::all_of(barrier.ready.begin(), barrier.ready.end(), [&](auto& ready) {
    return !replica_.wants_of(ready.first) &&
           ready.second.seen.look(ready.second.context, set.context(), states_);
  });
  if ((all && seen) ||
      (now - barrier.first_ms >= options_.soft_ms && barrier.ready.size() >= quorum())) {
    if (const Status may = may_begin(here, ask); !may) return Answer(may);
    auto made = publish(ask.session, ask.round, barrier.merger);
    if (!made) return Answer(made.error());
    // Written down before anybody sees it. Where another coordinator on this store was first, its
    // cut is the round's.
    const auto fresh =
        store_->put_if_absent(detail::coordinator_cut_key(ask.session, ask.round), encode(*made));
    if (!fresh) return Answer(fresh.error());
    if (!*fresh) {
      const auto theirs = store_->get(detail::coordinator_cut_key(ask.session, ask.round));
      made = theirs ? decode_cut(theirs->bytes(), options_.replica.set_hash)
                    : Result<RoundCut>(theirs.error());
      if (!made) return Answer(made.error());
    }
    MergeAnswer answer{*std::move(made), {}, {}};
    for (const auto& [member, ready] : barrier.ready) answer.ready.push_back(member);
    here.cuts.insert_or_assign(ask.round, answer);
    // Written down before any cut goes, and where it cannot be, none goes.
    if (ask.round >= options_.max_rounds)
      (void)forget_rounds(here, ask.session, ask.round - options_.max_rounds + 1);
    return Answer(std::move(answer));
  }
  if (!late) return std::nullopt;
  return Answer(detail::error(
      ErrorCode::timed_out, "round ", ask.round, ": ", barrier.ready.size(),
      " members are ready, quorum ", quorum(), "; not there: ",
      options_.members.empty() ? std::string("unknown") : detail::list_of(absent(barrier)),
      seen ? "" : "; not all that they have seen is here"));
}

KVMELD_NAMESPACE_END
