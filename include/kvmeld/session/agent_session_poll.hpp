#pragma once

/// What an agent's session does on the network: store, tell, hear, rounds, and what the worker is
/// asked for.

#include <kvmeld/session/agent_session.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Where a publisher writes a cut down before it tells anybody.
[[nodiscard]] inline BlobKey cut_key(std::uint64_t session, std::uint64_t round) {
  return named_key(0x3F, "kvmeld.round.cut", session, round);
}
/// Whether trying again later may succeed.
[[nodiscard]] inline bool passing(ErrorCode code) noexcept {
  return code == ErrorCode::unavailable || code == ErrorCode::timed_out ||
         code == ErrorCode::store_full;
}

}  // namespace detail

#define KVMELD_SESSION_MEMBER(...)                                                   \
  template <class M, BlobStore S, Transport T, SwapMemory Memory, ExecutionPolicy E, \
            Authenticator Auth, ContentHash Hash, Compressor C>                      \
  __VA_ARGS__ AgentSession<M, S, T, Memory, E, Auth, Hash, C>

KVMELD_SESSION_MEMBER(Status)::poll(std::int64_t now_ms, std::int64_t wait_ms) {
  Status first;
  const auto note = [&](Status status) {
    if (first && !status) first = std::move(status);
  };
  now_ms = clock_.advance(now_ms);  // from here on time only goes forward
  note(insert_said());
  note(flush());  // before waiting: others may wait for it
  note(hear(wait_ms, now_ms));
  note(replica_.tick(now_ms));
  if (round_) note(step_round(now_ms));
  if (options_.background && !in_round()) render_behind();
  note(flush());
  const std::lock_guard lock(mutex_);
  counted_.stored = replica_.counters().stored;
  counted_.fragments_fetched = replica_.counters().fragments_fetched;
  counted_.fragments_loaded = replica_.counters().fragments_loaded;
  counted_.store_damage = replica_.counters().store_damage;
  counted_.refused = replica_.counters();
  return first;
}

/// Stores what was sealed, in order. What the store cannot take now waits, with all behind it; what
/// nobody would take is refused for good.
KVMELD_SESSION_MEMBER(Status)::insert_said() {
  std::vector<Fragment> fragments;
  {
    const std::lock_guard lock(mutex_);
    fragments.swap(to_insert_);
  }
  Status first;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const auto dot = replica_.insert(fragments[i], options_.confidence);
    const std::lock_guard lock(mutex_);
    if (!dot) {
      if (first) first = dot.error();
      if (!detail::passing(dot.error().code())) {
        refuse(fragments[i].id());
        continue;
      }
      to_insert_.insert(to_insert_.begin(), fragments.begin() + static_cast<std::ptrdiff_t>(i),
                        fragments.end());
      break;
    }
    for (Said& said : said_) said.stored = said.stored || said.id == fragments[i].id();
    ++counted_.fragments_sealed;
    add_layer_bytes(counted_.sealed_bytes, fragments[i]);
  }
  return first;
}

/// Keeps words that nobody takes in this agent's view only, the newest of them. The lock is held.
KVMELD_SESSION_MEMBER(void)::refuse(const FragmentId& id) {
  ++counted_.fragments_refused;
  std::int64_t tokens = 0;
  for (std::size_t i = said_.size(); i-- > 0;) {
    said_[i].refused = said_[i].refused || (said_[i].id == id && !said_[i].stored);
    if (!said_[i].refused || !said_[i].fragment.valid()) continue;
    tokens += said_[i].fragment.token_count();
    if (tokens > options_.max_refused_tokens)
      said_.erase(said_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

KVMELD_SESSION_MEMBER(void)::keep_application(MemberId from, std::uint8_t type,
                                              std::span<const std::byte> body) {
  constexpr std::size_t each = 64;  // an empty frame takes room, too
  application_.emplace_back(from,
                            Outgoing{options_.replica.self, type, {body.begin(), body.end()}});
  application_bytes_ += body.size() + each;
  while (application_bytes_ > options_.max_application_bytes) {
    application_bytes_ -= application_.front().second.bytes.size() + each;
    application_.pop_front();
    const std::lock_guard lock(mutex_);
    ++counted_.application_dropped;
  }
}

KVMELD_SESSION_MEMBER(Status)::hear(std::int64_t wait_ms, std::int64_t now_ms) {
  constexpr int most = 256;  // a poll ends, however much the others say
  for (int i = 0; i < most; ++i) {
    auto envelope = transport_->receive(i == 0 ? wait_ms : 0);
    if (!envelope) return envelope.error();
    if (!*envelope) return {};
    const auto& [from, bytes] = **envelope;
    // What does not hold is counted by the replica and otherwise ignored: a bad peer costs itself.
    const auto frame = replica_.receive(from, bytes);
    const std::uint8_t type =
        bytes.size() > 6 && frame ? static_cast<std::uint8_t>(bytes[6]) : std::uint8_t{0};
    {
      const std::lock_guard lock(mutex_);
      counted_.received[type].add(bytes.size());
    }
    if (!frame || !*frame) continue;
    if (type >= static_cast<std::uint8_t>(SessionMessage::application)) {
      keep_application(from, type, (*frame)->body);
    } else if (round_ && (type == static_cast<std::uint8_t>(SessionMessage::round_ready) ||
                          type == static_cast<std::uint8_t>(SessionMessage::round_cut))) {
      const auto kind = type == static_cast<std::uint8_t>(SessionMessage::round_cut)
                            ? RoundMessage::cut
                            : RoundMessage::ready;
      const bool was_in_round = in_round();
      (void)round_->receive(from, kind, (*frame)->body, now_ms);
      if (was_in_round && !in_round()) end_round();
    }
  }
  return {};
}

KVMELD_SESSION_MEMBER(Status)::begin_round(std::int64_t now_ms) {
  if (!round_)
    return detail::error(ErrorCode::unsupported, "agent ", options_.replica.self,
                         " has no members to synchronize with: set RoundOptions::members");
  now_ms = clock_.advance(now_ms);
  Status stored = insert_said();  // what was said before the barrier belongs to the round
  KVMELD_TRY(round_->begin(now_ms, options_.replica.merger, set().context()));
  next_cut_want_ms_ = now_ms;
  cut_wanted_ = false;
  round_open_ = true;
  if (round_->publisher(round_->number()) == options_.replica.self) {
    for (const FragmentSet::Entry* entry : in_force(set())) {
      // evicted here, and others may hold it
      if (!entry->complete()) (void)replica_.fetch(entry->id);
    }
  }
  if (!in_round()) end_round();
  return stored;
}

KVMELD_SESSION_MEMBER(Status)::step_round(std::int64_t now_ms) {
  if (in_round()) {
    const std::lock_guard lock(mutex_);
    if (round_request_ != 0 && ended_ && ended_->first == round_request_)
      round_->finish(ended_->second);
    // an import that has begun is not called back
    if (round_request_ == 0 || installing_ != round_request_) round_->tick(now_ms);
    // nor does one begin once the round has ended, and the lock is let go
    if (!in_round()) round_request_ = 0;
  }
  Status status;
  if (in_round()) status = publish(now_ms);
  if (in_round() && status) status = pursue_cut(now_ms);
  if (!in_round()) end_round();
  for (Round::Outgoing& out : round_->take_messages()) {
    const auto type =
        out.kind == RoundMessage::cut ? SessionMessage::round_cut : SessionMessage::round_ready;
    if (Status posted = replica_.post(out.to, static_cast<std::uint8_t>(type), out.body);
        !posted && status)
      status = posted;
  }
  return status;
}

KVMELD_SESSION_MEMBER(void)::end_round() {
  if (!std::exchange(round_open_, false)) return;
  const bool swapped = round_->state() == RoundState::swapped;
  // The round's request may have taken the place of another; what it did not render is asked for
  // again.
  asked_for_.reset();
  if (swapped && round_->cut()->set.digest() == set().digest())
    asked_for_.emplace(set().digest(), arrivals());
  const std::lock_guard lock(mutex_);
  round_request_ = 0;
  (swapped ? counted_.rounds_swapped : counted_.rounds_kept) += 1;
  counted_.wait_ms += static_cast<double>(round_->age_ms());
}

/// Writes this member's cut down and tells it, when it is due. A cut that an earlier life wrote
/// down is the round's cut.
KVMELD_SESSION_MEMBER(Status)::publish(std::int64_t now_ms) {
  if (!round_->wants_cut(now_ms, set().context(), replica_.wanted() == 0)) return {};
  const std::uint64_t number = round_->number();
  auto cut = make_cut(set(), options_.replica.merger.digest(), options_.rounds.session, number,
                      options_.replica.self);
  if (!cut) return cut.error();
  if (cut->set.empty()) return {};  // nothing to merge: members keep what they have
  const std::vector<std::byte> bytes = encode(*cut);
  if (bytes.size() + 1024 > transport_->max_message_bytes()) {
    return detail::error(ErrorCode::oversized, "a cut of ", cut->set.size(), " fragments takes ",
                         bytes.size(), " bytes, a message at most ",
                         transport_->max_message_bytes());
  }
  const BlobKey key = detail::cut_key(options_.rounds.session, number);
  const auto fresh = store_->put_if_absent(key, bytes);
  if (!fresh) return fresh.error();
  if (!*fresh) {
    const auto written = store_->get(key);
    if (!written) return written.error();
    cut = decode_cut(written->bytes(), options_.replica.set_hash);
    if (!cut) return cut.error();
  }
  if (const std::size_t n = options_.rounds.members.size(); number > n)
    (void)store_->erase(detail::cut_key(options_.rounds.session, number - n));
  return round_->publish(*cut);
}

/// Asks for what the cut names and is not here; then has exactly the cut rendered.
KVMELD_SESSION_MEMBER(Status)::pursue_cut(std::int64_t now_ms) {
  if (round_->state() != RoundState::cut || round_request_ != 0) return {};
  const RoundCut& cut = *round_->cut();
  const auto missing = missing_of(cut, set());
  if (missing.empty()) {
    auto part = restrict_to(cut, set());
    if (part) {
      (void)request(*std::move(part), 0, true);
    } else {
      round_->finish(part.error());
    }
    return {};
  }
  if (now_ms < next_cut_want_ms_) return {};
  const bool first = !std::exchange(cut_wanted_, true);
  next_cut_want_ms_ = now_ms + options_.rounds.retry_ms;
  bool unknown = false;
  for (const FragmentId& id : missing) unknown = !replica_.fetch(id).ok() || unknown;
  if (!unknown) return {};
  return replica_.ask_for_delta(first ? cut.publisher : everyone);
}

/// Whether something in `part`, or something else that this agent said, stands where this fragment
/// of the set stood, after however many steps. The lock is held.
KVMELD_SESSION_MEMBER(bool)::replaced(const FragmentId& id, const FragmentSet& part) const {
  std::vector<FragmentId> met{id};
  for (std::size_t i = 0; i < met.size(); ++i) {
    if (i > 0 && (part.find(met[i]) != nullptr ||
                  std::ranges::any_of(said_, [&](const Said& said) { return said.id == met[i]; })))
      return true;
    const FragmentSet::Entry* const entry = set().find(met[i]);
    if (entry == nullptr) continue;
    for (const Mark& mark : entry->metadata.marks) {
      if (!mark.superseded_by.empty() &&
          std::find(met.begin(), met.end(), mark.superseded_by) == met.end())
        met.push_back(mark.superseded_by);
    }
  }
  return false;
}

/// Asks the worker for a cache of everything that is here, where that has changed.
KVMELD_SESSION_MEMBER(void)::render_behind() {
  const std::pair now(set().digest(), arrivals());
  // nothing was ever said: the agent keeps what it has
  if (asked_for_ == now || (!asked_for_ && set().empty())) return;
  asked_for_ = now;
  std::size_t missing = 0;
  for (const FragmentSet::Entry& entry : set().entries()) missing += entry.complete() ? 0U : 1U;
  if (missing == 0) {
    (void)request(set(), 0, false);
  } else if (auto part = renderable(set())) {
    (void)request(*std::move(part), missing, false);
  }
}

KVMELD_SESSION_MEMBER(std::uint64_t)::request(FragmentSet part, std::size_t missing,
                                              bool for_round) {
  const std::lock_guard lock(mutex_);  // the outcome waits until it is known what it has
  // removed by somebody
  std::erase_if(said_,
                [&](const Said& said) { return said.stored && set().find(said.id) == nullptr; });
  Asked asked{0, for_round ? round_->number() : 0, missing};
  for (Said& said : said_) {
    if (part.find(said.id) != nullptr || (said.stored && replaced(said.id, part))) {
      asked.has.push_back(said.id);
    } else if (const FragmentSet::Entry* const entry = set().find(said.id);
               !said.fragment.valid() && entry != nullptr && entry->complete()) {
      said.fragment = entry->fragment;  // to be carried, though it was swapped in before
    }
  }
  std::sort(asked.has.begin(), asked.has.end());
  const std::uint64_t number = worker_.request(std::move(part), options_.target);
  asked.request = number;
  asked_.push_back(std::move(asked));
  if (for_round) round_request_ = number;  // under the same lock: the outcome may be there already
  return number;
}

KVMELD_SESSION_MEMBER(Status)::flush() {
  Status first;
  for (const Outgoing& out : replica_.take_outbox()) {
    Status status = transport_->send(out.to, out.bytes);
    const std::lock_guard lock(mutex_);
    if (status) {
      counted_.sent[out.type].add(out.bytes.size());
    } else {
      ++counted_.send_failures;
      if (first) first = std::move(status);
    }
  }
  return first;
}

#undef KVMELD_SESSION_MEMBER

KVMELD_NAMESPACE_END
