#pragma once

/// The bodies of Replica; replica.hpp includes this file at its end.

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

// How much of the set others may fill (docs/convergence.md).

/// Ranges that a context may have: each takes 40 bytes at most, and news should fit into a message.
/// A thousand are taken in any case: gaps and lives of honest members come to some dozens, and
/// whoever sends messages that small may have to send news that are larger.
inline std::size_t Replica::range_limit() const {
  constexpr std::size_t head = 1024, least = 1024;
  const std::size_t message = options_.max_message_bytes;
  const std::size_t fit = message < head ? std::size_t{0} : (message - head) / 40;
  return (std::min)(options_.max_ranges, (std::max)(fit, least));
}

/// Agents of whose operations a delta would bring more than there is room for, ascending: of new
/// ones those beyond `max_authors`, else those first that have most of what is short. O(ranges).
inline std::vector<std::uint64_t> Replica::overdrawn(const FragmentSet& delta) const {
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

// How replicas come to the same set: news, requests, deltas, and records of a store.

inline Result<std::optional<FrameView>> Replica::receive(MemberId from,
                                                         std::span<const std::byte> bytes) {
  const auto frame = decode_frame(bytes, options_.frame, from);
  if (!frame) {
    ++counters_.refused_frames;
    return frame.error();
  }
  counters_.received_bytes[frame->type] += bytes.size();
  if (frame->type >= static_cast<std::uint8_t>(ReplicaMessage::application))
    return std::optional(*frame);
  const Status status = on_message(from, static_cast<ReplicaMessage>(frame->type), frame->body);
  if (!status) {
    ++counters_.refused_frames;
    return status;
  }
  return std::optional<FrameView>();
}

inline Status Replica::on_message(MemberId from, ReplicaMessage type,
                                  std::span<const std::byte> bytes) {
  if (type > ReplicaMessage::lacking) return {};  // of a newer minor version
  if (from == options_.self || from == everyone) {
    return extend::error(ErrorCode::unauthenticated, "a message in the name of member ", from,
                         from == everyone ? ", which nobody is" : ", which is this one");
  }
  const auto body = messages::decode_body(bytes);
  if (!body) return body.error();
  if (Peer* const peer = peer_of(from)) peer->merger = body->merger;
  switch (type) {
    case ReplicaMessage::news:
      return on_news(from, body->rest);
    case ReplicaMessage::want:
      return on_want(from, body->rest);
    case ReplicaMessage::delta:
      return on_delta(from, body->rest);
    case ReplicaMessage::fetch:
      return on_fetch(from, body->rest);
    case ReplicaMessage::manifest:
    case ReplicaMessage::chunk:
      return on_piece(from, type, body->rest);
    case ReplicaMessage::lacking:
      return on_lacking(from, body->rest);
    case ReplicaMessage::application:
      break;
  }
  return {};
}

inline Status Replica::tick(std::int64_t now_ms) {
  elapsed_ = clock_.advance(now_ms);
  Status status;
  // A store of this replica's own holds nothing that is not joined; it is read so that many records
  // become one.
  if (options_.shared_store || records_read_ + records_written_ >= options_.max_records)
    status = read_records();
  if (elapsed_ >= next_news_) {
    next_news_ = elapsed_ + jitter(options_.news_interval_ms);
    if (Status posted = post_news(everyone); !posted && status) status = posted;
  }
  if (Status pursued = pursue_some(); !pursued && status) status = pursued;
  if (!options_.members.empty() && (!set_.removals().empty() || set_.keeps_removed())) {
    CausalContext stable = set_.context();
    for (const MemberId member : options_.members) {
      if (member == options_.self) continue;
      const CausalContext* const seen = seen_by(member);
      stable = meet(stable, seen != nullptr ? *seen : CausalContext());
    }
    set_.compact(stable);
  }
  return status;
}

inline Status Replica::on_delta(MemberId from, std::span<const std::byte> body) {
  const auto delta = decode_set(body, options_.format.hash);
  return delta ? take(*delta, from, false) : delta.error();
}

/// Takes operations from a peer or from the store. Those of a peer are written down first, unless
/// their author wrote them to the shared store; `everyone` as the sender says that they came by
/// another way, and nobody wrote them.
inline Status Replica::take(const FragmentSet& all, MemberId from, bool from_store) {
  note_word(from, all.context());
  const Status own = check_own(from, all.context());
  Peer* const peer = from == everyone || !is_member(from) ? nullptr : peer_of(from);
  Status reused = peer != nullptr && peer->asked_for_all ? find_reused(from, all) : Status();
  const std::uint64_t refused_before = counters_.refused_operations;
  const auto delta = admitted(all, from);
  if (!delta) return delta.error();
  const bool news =
      !leq(delta->context(), set_.context()) || forgets(delta->compacted()) ||
      std::any_of(delta->entries().begin(), delta->entries().end(), [&](const auto& entry) {
        const FragmentSet::Entry* const mine =
            entry.metadata.unattributed ? set_.find(entry.id) : &entry;
        return mine == nullptr || (entry.metadata.unattributed && !mine->metadata.unattributed);
      });
  if (news) {
    if (!from_store && (!options_.shared_store || from == everyone))
      KVMELD_TRY(write_down(encode_set(*delta)));
    KVMELD_TRY(set_.join(*delta));
    if (peer != nullptr) peer->want_patience = options_.retry_ms;
    for (const FragmentSet::Entry& entry : delta->entries()) {
      const FragmentSet::Entry* const mine = set_.find(entry.id);
      if (mine != nullptr) want(*mine, from);
    }
  }
  KVMELD_TRY(own);
  KVMELD_TRY(reused);
  if (const std::uint64_t refused = counters_.refused_operations - refused_before; refused > 0) {
    return extend::error(
        ErrorCode::quota_exceeded, refused, " operations were left out: an author may do ",
        options_.max_operations,
        " in one life, nobody may act for this replica, and nobody may change what another did");
  }
  return {};
}

inline Status Replica::read_records() {
  auto batch = store_->records(cursor_);
  if (!batch) return batch.error();
  counters_.store_damage = store_->damage();
  // A server that came back may have come back with less: what this replica holds is written there
  // again.
  const std::uint64_t generation = store_->generation();
  if (generation_ && *generation_ != generation) KVMELD_TRY(republish());
  generation_ = generation;
  for (const std::vector<std::byte>& record : batch->records) {
    const auto set = decode_record(record, options_.format.hash);
    const Status status = set ? take(*set, everyone, true) : set.status();
    if (status) continue;
    const ErrorCode code = status.code();
    const bool left_out = code == ErrorCode::quota_exceeded || code == ErrorCode::dot_reused;
    if (!left_out) ++counters_.corrupt_records;
    // Damage may go. What this build does not read, or does not take, others may: it stays in the
    // store.
    keep_records_ = keep_records_ || left_out || code == ErrorCode::version_mismatch ||
                    code == ErrorCode::unknown_field || code == ErrorCode::hash_mismatch;
  }
  cursor_ = batch->cursor;
  records_read_ += batch->records.size();
  records_written_ = 0;
  if (records_read_ >= options_.max_records && !keep_records_) {
    // What is replaced has been joined: the one record that takes its place says as much.
    KVMELD_TRY(store_->replace_records(cursor_, encode_record(encode_set(set_))));
    cursor_ = 0;
    records_read_ = 0;
  }
  return {};
}

inline Status Replica::on_news(MemberId from, std::span<const std::byte> body) {
  auto news = messages::decode_news(body, range_limit());
  if (!news) return news.error();
  const Status own = heard(from, news->context);
  const auto at = peers_.find(from);
  if (at == peers_.end()) return own;
  Peer& peer = at->second;
  peer.epoch = news->epoch;
  peer.want_patience = (std::max)(peer.want_patience, options_.retry_ms);
  if (news->digest == set_.digest()) peer.asked_for_all = false;  // nothing in it to look for
  if (!leq(tellable(from, peer.context), set_.context())) {
    if (elapsed_ >= peer.next_want) {
      peer.next_want = elapsed_ + jitter(peer.want_patience);
      peer.want_patience = (std::min)(2 * peer.want_patience, options_.max_retry_ms);
      KVMELD_TRY(ask_for_delta(from));
    }
  } else if (is_member(from) && news->digest != set_.digest() && peer.context == set_.context()) {
    KVMELD_TRY(compare(from, peer, news->digest));
  }
  if (!leq(set_.context(), peer.context) && elapsed_ >= peer.next_news) {
    peer.next_news = elapsed_ + jitter(options_.retry_ms);
    KVMELD_TRY(post_news(from));
  }
  return own;
}

inline Status Replica::heard(MemberId member, const CausalContext& seen) {
  Peer* const peer = peer_of(member);
  if (peer == nullptr)
    return extend::error(ErrorCode::quota_exceeded, "news of member ", member, ", one more than ",
                         max_peers);
  if (options_.members.empty() || !is_member(member)) {
    // Who is not named shares room with all others that are not, and has a part of it at most.
    const std::size_t others = unnamed_ranges_ - peer->context.ranges().size();
    const std::size_t ranges = seen.ranges().size();
    if (ranges > range_limit() / 16 || others + ranges > range_limit()) {
      return extend::error(ErrorCode::quota_exceeded, "news of ", ranges, " ranges by member ",
                           member, ", which nobody named; all such have ", others, " and may have ",
                           range_limit(), ", each a sixteenth");
    }
    unnamed_ranges_ = others + ranges;
  }
  peer->context = seen;
  note_word(member, seen);
  return check_own(member, seen);
}

inline Status Replica::on_want(MemberId from, std::span<const std::byte> body) {
  extend::ByteReader r(body);
  const CausalContext seen = read_context(r, range_limit());
  KVMELD_TRY(r.finish("want"));
  Peer* const peer = peer_of(from);
  // A whole set for three bytes is not given at any rate, nor to whom there is no room to remember.
  if (peer == nullptr || elapsed_ < peer->next_delta) return {};
  peer->next_delta = elapsed_ + options_.retry_ms / 2;
  const FragmentSet delta = set_.delta_since(seen);
  std::size_t most = 1024;
  while (true) {
    std::vector<std::vector<std::byte>> parts;
    std::size_t largest = 0;
    for (const FragmentSet& part : messages::cut(delta, most)) {
      parts.push_back(encode_set(part));
      largest = (std::max)(largest, parts.back().size());
    }
    if (largest + 1024 > options_.max_message_bytes && most > 1) {
      most /= 2;
      continue;
    }
    for (const auto& part : parts) {
      if (outbox_bytes_ > max_outbox_bytes) break;  // the rest when it asks again
      KVMELD_TRY(post(from, ReplicaMessage::delta, part));
    }
    return {};
  }
}

// How payloads follow ids: asked for until they are whole, verified, and never believed before.

inline void Replica::want(const FragmentSet::Entry& entry, MemberId holder) {
  if (entry.complete()) return;
  const auto [at, fresh] = wants_.try_emplace(entry.id);
  Want& want = at->second;
  if (fresh) {
    want.patience = options_.retry_ms;
    const auto& marks = entry.metadata.marks;
    if (!marks.empty()) want.author = marks.front().dot.agent;
    want.member = !options_.members.empty() && is_member(want.author);
    look_at(entry.id, want, elapsed_);
  }
  if (!fresh && want.holder != everyone) return;
  want.holder = holder;
  want.answered = holder != everyone;  // is asked first
}

/// Sets when a fragment is looked for again.
inline void Replica::look_at(const FragmentId& id, Want& want, std::int64_t when) {
  detail::DueQueue& due = want.member ? due_members_ : due_others_;
  due.drop(want.author, want.next, id);
  want.next = when;
  due.put(want.author, want.next, id);
}

inline void Replica::end_want(const FragmentId& id) {
  const auto at = wants_.find(id);
  if (at == wants_.end()) return;
  Want& want = at->second;
  drop_assembler(want);
  (want.member ? due_members_ : due_others_).drop(want.author, want.next, id);
  wants_.erase(at);
}

/// Takes memory for what arrived of a fragment; where there is none, what it had is given back.
inline Status Replica::charge(Want& want, std::uint64_t bytes) {
  const auto peer = peers_.find(want.manifest_from);
  const std::uint64_t of_peer = peer == peers_.end() ? 0 : peer->second.fetch_bytes;
  const auto fits = [bytes](std::uint64_t used, std::uint64_t most) {
    return used <= most && bytes <= most - used;
  };
  if (fits(fetch_bytes_, options_.max_fetch_bytes) &&
      fits(of_peer, options_.max_peer_fetch_bytes)) {
    fetch_bytes_ += bytes;
    want.charged += bytes;
    if (peer != peers_.end()) peer->second.fetch_bytes += bytes;
    return {};
  }
  ++counters_.refused_pieces;
  Status full = extend::error(ErrorCode::quota_exceeded, bytes, " bytes of a fragment by member ",
                              want.manifest_from, ", which has ", of_peer, " of ",
                              options_.max_peer_fetch_bytes, " on their way, all have ",
                              fetch_bytes_, " of ", options_.max_fetch_bytes);
  drop_assembler(want);
  return full;
}

inline void Replica::drop_assembler(Want& want) {
  want.assembler.reset();
  want.in_flight = 0;
  discharge(want, want.charged);
}

inline void Replica::discharge(Want& want, std::uint64_t bytes) {
  fetch_bytes_ -= bytes;
  want.charged -= bytes;
  if (const auto peer = peers_.find(want.manifest_from); peer != peers_.end()) {
    peer->second.fetch_bytes -= (std::min)(peer->second.fetch_bytes, bytes);
  }
}

/// Looks for some of what is due: named members' first, and each author's in turn.
inline Status Replica::pursue_some() {
  std::vector<FragmentId> due = due_members_.due(elapsed_, pursued_at_once * 3 / 4);
  const std::vector<FragmentId> others = due_others_.due(elapsed_, pursued_at_once - due.size());
  due.insert(due.end(), others.begin(), others.end());
  Status status;
  for (const FragmentId& id : due) {
    if (Status pursued = pursue(id, wants_.at(id)); !pursued && status) status = pursued;
  }
  return status;
}

/// The peer to ask next: all that are trusted take their turn.
inline MemberId Replica::next_holder(Want& want) {
  for (std::size_t tries = 0; tries < peers_.size(); ++tries) {
    auto at = peers_.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(want.rotation++ % peers_.size()));
    if (at->second.trusted_from <= elapsed_) return at->first;
  }
  return everyone;
}

/// Leaves the present holder for the next one, which `pursue` then asks: were it to step on too,
/// every second peer would be passed over.
inline void Replica::rotation(Want& want) {
  want.holder = next_holder(want);
  want.answered = want.holder != everyone;
}

inline void Replica::strike(MemberId member) {
  ++counters_.strikes;
  Peer* const peer = peer_of(member);
  if (peer == nullptr || ++peer->strikes < options_.max_strikes) return;
  peer->strikes = 0;
  peer->trusted_from = elapsed_ + options_.max_retry_ms;
}

/// One attempt: what the store has, then a request to a peer.
inline Status Replica::pursue(const FragmentId& id, Want& want) {
  const FragmentSet::Entry* const entry = set_.find(id);
  if (entry == nullptr || entry->complete()) {  // removed, or here by another way
    end_want(id);
    return {};
  }
  look_at(id, want, elapsed_ + jitter(want.patience));
  want.patience = (std::min)(want.patience * 2, options_.max_retry_ms);
  if (want.assembler && ++want.barren > peers_.size() + 1) {
    // Everybody was asked and nobody sent these chunks: the manifest's list of them, which the id
    // does not cover, may be a lie, or all are slow. So nobody is blamed, and another is asked for
    // a manifest.
    drop_assembler(want);
    want.barren = 0;
    want.patience = options_.retry_ms;
  }
  if (!want.assembler) {
    auto loaded = load_fragment(*store_, id, options_.format);
    if (loaded) {
      ++counters_.fragments_loaded;
      return restore(*loaded);
    }
    if (loaded.error().code() == ErrorCode::unavailable) return loaded.error();
  }
  // one that was silent
  if (want.holder == everyone || !std::exchange(want.answered, false))
    want.holder = next_holder(want);
  return ask(id, want);
}

inline Status Replica::ask(const FragmentId& id, Want& want) {
  if (want.holder == everyone || want.holder == options_.self) return {};
  messages::Fetch fetch{id, {}};
  if (want.assembler) {
    const std::size_t room =
        (std::max<std::size_t>)(1, options_.max_message_bytes /
                                       (want.assembler->manifest().chunk_bytes + 1));
    fetch.chunks = want.assembler->missing((std::min)(room * 8, messages::Fetch::max_chunks));
  }
  want.in_flight = (std::max<std::size_t>)(1, fetch.chunks.size());
  return post(want.holder, ReplicaMessage::fetch, messages::encode(fetch));
}

inline Status Replica::on_fetch(MemberId from, std::span<const std::byte> body) {
  const auto fetch = messages::decode_fetch(body);
  if (!fetch) return fetch.error();
  // Asks of a few bytes do not fill this replica's memory; the asker tries again.
  if (outbox_bytes_ > max_outbox_bytes) return {};
  const auto answer = [&](ReplicaMessage type, const BlobKey& key,
                          std::span<const std::byte> bytes) {
    return post(from, type, messages::encode(messages::Piece{fetch->id, key, bytes}));
  };
  const Fragment here = set_.payload(fetch->id);
  const bool whole =
      here.valid() && std::all_of(here.payloads().begin(), here.payloads().end(),
                                  [](const Payload& p) { return p.bytes != nullptr; });
  std::optional<Manifest> manifest;
  const auto made = [&]() -> const Manifest* {
    if (!manifest && whole) {
      if (auto fresh = make_manifest(here, options_.format.chunk_bytes, options_.format.hash))
        manifest = *std::move(fresh);
    }
    return manifest ? &*manifest : nullptr;
  };
  // What rotted in the store is not sent, or the asker would take this replica for a Byzantine
  // peer; what is in memory takes its place.
  const auto rotten = [](const Status& loaded) { return proves_damage(loaded.code()); };
  if (fetch->chunks.empty()) {
    const BlobKey key = manifest_key(fetch->id);
    const auto stored = load_manifest(*store_, fetch->id, options_.format);
    if (stored) return answer(ReplicaMessage::manifest, key, encode_manifest(*stored));
    const Manifest* const fresh = made();
    if (fresh == nullptr) return answer(ReplicaMessage::lacking, key, {});
    const std::vector<std::byte> bytes = encode_manifest(*fresh);
    if (rotten(stored.error())) (void)store_->put(key, bytes);
    return answer(ReplicaMessage::manifest, key, bytes);
  }
  bool lacks = false;
  std::vector<BlobKey> keys = fetch->chunks;
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (const BlobKey& key : keys) {
    if (outbox_bytes_ > max_outbox_bytes) return {};
    const auto stored = load_chunk(*store_, key, options_.format);
    if (stored) {
      KVMELD_TRY(answer(ReplicaMessage::chunk, key, stored->bytes()));
      continue;
    }
    bool found = false;
    if (const Manifest* const fresh = made()) {
      for (std::size_t p = 0; p < fresh->chunks.size() && !found; ++p) {
        const auto at = std::find(fresh->chunks[p].begin(), fresh->chunks[p].end(), key);
        if (at == fresh->chunks[p].end()) continue;
        const auto index = static_cast<std::size_t>(at - fresh->chunks[p].begin());
        const Payload& payload = here.payloads()[p];
        found = true;
        const auto bytes =
            encode_chunk(raw_chunk(payload, index, options_.format.chunk_bytes),
                         options_.format.compressor.get(),
                         chunk_form(here.geometry(), payload, index, options_.format.chunk_bytes));
        if (rotten(stored.error())) (void)store_->put(key, bytes);
        KVMELD_TRY(answer(ReplicaMessage::chunk, key, bytes));
      }
    }
    lacks = lacks || !found;
  }
  return lacks ? answer(ReplicaMessage::lacking, manifest_key(fetch->id), {}) : Status();
}

inline Status Replica::on_piece(MemberId from, ReplicaMessage type,
                                std::span<const std::byte> body) {
  const auto piece = messages::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = wants_.find(piece->id);
  const auto peer = peers_.find(from);
  if (at == wants_.end() || peer == peers_.end() || peer->second.trusted_from > elapsed_) return {};
  Want& want = at->second;
  if (type == ReplicaMessage::manifest) {
    if (want.assembler) return {};
    want.manifest_from = from;
    KVMELD_TRY(charge(want, detail::manifest_memory(piece->bytes.size())));
    auto manifest = decode_manifest(piece->bytes, options_.format.limits(), options_.format.hash);
    if (!manifest || manifest->fragment.id() != piece->id) {
      drop_assembler(want);
      strike(from);
      rotation(want);
      return !manifest ? manifest.error()
                       : extend::error(ErrorCode::id_mismatch, "member ", from,
                                       " sent another fragment's manifest for ", piece->id.hex());
    }
    want.assembler =
        std::make_unique<Assembler>(*std::move(manifest), std::nullopt, options_.format.hash);
    const std::uint64_t room = options_.max_fetch_bytes - fetch_bytes_;
    const std::uint64_t of_peer = options_.max_peer_fetch_bytes - peer->second.fetch_bytes;
    const Status loaded =
        load_chunks(*store_, *want.assembler, options_.format, (std::min)(room, of_peer));
    KVMELD_TRY(charge(want, want.assembler->held_bytes()));
    KVMELD_TRY(loaded);
  } else {
    if (!want.assembler) return {};
    const std::size_t bytes = want.assembler->bytes_of(piece->key);
    if (bytes == 0) return {};
    KVMELD_TRY(charge(want, bytes));
    const auto added =
        want.assembler->add(piece->key, piece->bytes, options_.format.compressor.get());
    if (!added) {
      discharge(want, bytes);
      strike(from);
      rotation(want);
      return added.error();
    }
    want.in_flight -= want.in_flight > 0 ? 1U : 0U;
  }
  want.answered = true;
  want.barren = 0;
  want.patience = options_.retry_ms;
  look_at(piece->id, want, elapsed_ + jitter(want.patience));
  if (type == ReplicaMessage::chunk && want.in_flight > 0 && !want.assembler->complete()) return {};
  if (want.assembler->complete()) return finish(piece->id, want);
  want.holder = from;
  return ask(piece->id, want);
}

inline Status Replica::finish(const FragmentId& id, Want& want) {
  const auto fragment = want.assembler->finish();
  if (!fragment) {
    strike(want.manifest_from);
    drop_assembler(want);
    rotation(want);
    look_at(id, want, elapsed_);
    return fragment.error();
  }
  const Status stored = store_fragment(*store_, *fragment, options_.format).status();
  ++counters_.fragments_fetched;
  end_want(FragmentId(id));
  if (set_.find(fragment->id()) != nullptr) KVMELD_TRY(set_.restore(*fragment));
  return stored;  // the set has the bytes in any case
}

inline Status Replica::on_lacking(MemberId from, std::span<const std::byte> body) {
  const auto piece = messages::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = wants_.find(piece->id);
  if (at == wants_.end() || at->second.holder != from) return {};
  rotation(at->second);
  at->second.in_flight = 0;
  const std::int64_t soon = elapsed_ + options_.retry_ms;
  look_at(piece->id, at->second, (std::min)(at->second.next, soon));
  return {};
}

// Whose word on whose operations counts (docs/convergence.md).

/// What is known of a member; null where that would be one too many that nobody named. Those that
/// are named have their place, however many strangers spoke before.
inline auto Replica::peer_of(MemberId member) -> Peer* {
  if (const auto at = peers_.find(member); at != peers_.end()) return &at->second;
  const bool named = !options_.members.empty() && is_member(member);
  return named || peers_.size() < max_peers ? &peers_[member] : nullptr;
}

/// Whether a sender is one of the session: where nobody is named, whoever speaks is.
inline bool Replica::is_member(MemberId member) const {
  const auto& all = options_.members;
  return all.empty() || std::find(all.begin(), all.end(), member) != all.end();
}

/// Whether an agent itself has spoken of this life of its.
inline bool Replica::is_heard(const AgentLife& life) const {
  const auto at = peers_.find(life.agent);
  return at != peers_.end() && at->second.vouched.next_sequence(life.agent, life.epoch) > 0;
}

/// Whether somebody is there who will say itself which of its operations are gone: an agent that is
/// named as a member or, where nobody is named, has spoken.
inline bool Replica::is_guarded(const AgentLife& life) const {
  return options_.members.empty() ? is_heard(life) : is_member(life.agent);
}

/// The first sequence of a life that nobody vouches for: its agent, or two members that say the
/// same, or what this replica has taken before. O(members).
inline std::uint64_t Replica::vouched(const AgentLife& life) const {
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
inline std::uint64_t Replica::tellable(MemberId from, const AgentLife& life) const {
  const bool may_speak = from == everyone || from == life.agent || is_member(from);
  if (!may_speak) return 0;
  if (opened_ && life == AgentLife{options_.self, options_.epoch}) return next_sequence_;
  if (from == everyone || from == life.agent) return options_.max_operations;
  const bool guarded = !options_.members.empty() && is_member(life.agent) && is_heard(life);
  return guarded && life.agent != options_.self ? vouched(life) : options_.max_operations;
}

/// The first sequence of a life of which a sender may not say that it ends, by a removal of
/// whomever.
inline std::uint64_t Replica::removable(MemberId from, const AgentLife& life) const {
  if (opened_ && life == AgentLife{options_.self, options_.epoch}) return next_sequence_;
  if (from == everyone || from == life.agent) return options_.max_operations;
  if (!is_member(from)) return 0;
  return is_guarded(life) && life.agent != options_.self ? vouched(life) : options_.max_operations;
}

/// Whether a sender's word alone says that operations of a life are gone, without a removal beside
/// it.
inline bool Replica::decides(MemberId from, const AgentLife& life) const {
  if (opened_ && life == AgentLife{options_.self, options_.epoch}) return false;
  if (from == everyone || from == life.agent) return true;
  if (!is_member(from)) return false;
  // Of its own earlier lives an agent may have lost what it knew, and nobody else is there to say
  // it.
  return life.agent == options_.self || !is_guarded(life);
}

/// What a sender can tell of what it has seen.
inline CausalContext Replica::tellable(MemberId from, const CausalContext& all) const {
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
inline void Replica::note_word(MemberId from, const CausalContext& context) {
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
inline Status Replica::check_own(MemberId from, const CausalContext& context) {
  if (!opened_ || (from != everyone && !is_member(from))) return {};
  if (context.next_sequence(options_.self, options_.epoch) <= next_sequence_) return {};
  note_reused({options_.self, options_.epoch});
  return own_life_reused();
}

/// Whether a mark of this set is among what somebody says is gone.
inline bool Replica::forgets(const CausalContext& gone) const {
  if (gone.empty()) return false;
  return std::any_of(
      set_.entries().begin(), set_.entries().end(), [&](const FragmentSet::Entry& entry) {
        const auto& marks = entry.metadata.marks;
        return std::any_of(marks.begin(), marks.end(),
                           [&](const Mark& mark) { return gone.contains(mark.dot); });
      });
}

/// Of what a sender says is gone: what is its to say, and what another member says as well.
inline CausalContext Replica::admitted_gone(const CausalContext& gone, MemberId from) {
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

/// What a replica takes of a delta, by its sender: not operations beyond an author's quota, in this
/// replica's name, or other than what it knows of their dot; nor, until somebody vouches for it,
/// what is not the sender's to say.
struct Replica::Admission {
  /// Sequences of one life below which the sender may tell of operations, and end them.
  struct Bounds {
    std::uint64_t told;
    std::uint64_t removed;
  };

  Replica& replica;
  MemberId from;
  std::vector<std::uint64_t> barred;  // agents beyond their quota, ascending
  std::map<AgentLife, Bounds> known{};

  [[nodiscard]] bool is_barred(std::uint64_t agent) const {
    return std::binary_search(barred.begin(), barred.end(), agent);
  }
  [[nodiscard]] const Bounds& bounds(const Dot& dot) {
    const AgentLife life{dot.agent, dot.epoch};
    const auto [at, fresh] = known.try_emplace(life, Bounds{0, 0});
    if (fresh) at->second = {replica.tellable(from, life), replica.removable(from, life)};
    return at->second;
  }
  /// Whether an operation stays out; counts it.
  [[nodiscard]] bool left_out(const Dot& dot) {
    const ReplicaOptions& options = replica.options_;
    if (is_barred(dot.agent)) {
      ++replica.counters_.refused_operations;
      return true;
    }
    if (dot.sequence < (std::min)(bounds(dot).told, options.max_operations)) return false;
    const bool own = dot.agent == options.self && dot.epoch == options.epoch;
    if (dot.sequence >= options.max_operations || own) {
      ++replica.counters_.refused_operations;
    } else if (!replica.set_.context().contains(dot)) {
      ++replica.counters_.unvouched_operations;
    }
    return true;
  }
  /// Whether a mark is other than the one that is known by its dot; counts it.
  [[nodiscard]] bool contradicts(const FragmentId& id, const Mark& mark) {
    if (from == everyone || mark.dot.agent == from || !replica.set_.context().contains(mark.dot))
      return false;
    const FragmentSet::Entry* const mine = replica.set_.find(id);
    if (mine == nullptr) return false;
    const auto& marks = mine->metadata.marks;
    const auto at =
        std::find_if(marks.begin(), marks.end(), [&](const Mark& m) { return m.dot == mark.dot; });
    if (at == marks.end() || *at == mark) return false;
    ++replica.counters_.refused_operations;
    replica.note_reused({mark.dot.agent, mark.dot.epoch});
    return true;
  }
  [[nodiscard]] bool left_out(const FragmentSet::Entry& entry, const Mark& mark) {
    return left_out(mark.dot) || contradicts(entry.id, mark);
  }
  /// Whether a removal may end an operation. One that this agent made in an earlier life, and has
  /// lost, may: whom it named had done that then, and is in another life now.
  [[nodiscard]] bool ends(const Removal& removal, const Dot& dot) {
    const bool seen = replica.set_.context().contains(dot);
    if (seen || (!is_barred(dot.agent) &&
                 dot.sequence < (std::min)(bounds(dot).removed, replica.options_.max_operations)))
      return true;
    const auto at = replica.peers_.find(dot.agent);
    return removal.dot.agent == replica.options_.self && at != replica.peers_.end() &&
           at->second.epoch && *at->second.epoch != dot.epoch;
  }
  [[nodiscard]] bool may_end(const Removal& removal) {
    return std::all_of(removal.removed.begin(), removal.removed.end(),
                       [&](const Dot& dot) { return ends(removal, dot); });
  }
  /// Whether everything in a delta is taken.
  [[nodiscard]] bool takes_all(const FragmentSet& delta) {
    const auto stays = [&](const FragmentSet::Entry& entry) {
      const auto& marks = entry.metadata.marks;
      return std::none_of(marks.begin(), marks.end(),
                          [&](const Mark& mark) { return left_out(entry, mark); });
    };
    const auto holds = [&](const Removal& removal) {
      return !left_out(removal.dot) && may_end(removal);
    };
    return std::all_of(delta.entries().begin(), delta.entries().end(), stays) &&
           std::all_of(delta.removals().begin(), delta.removals().end(), holds);
  }
  [[nodiscard]] std::vector<FragmentSet::Entry> entries(const FragmentSet& delta) {
    std::vector<FragmentSet::Entry> out;
    for (FragmentSet::Entry entry : delta.entries()) {
      std::erase_if(entry.metadata.marks, [&](const Mark& mark) { return left_out(entry, mark); });
      if (!entry.metadata.marks.empty() || entry.metadata.unattributed)
        out.push_back(std::move(entry));
    }
    return out;
  }
  /// A removal is taken whole or not at all: without one of its dots it would be another one.
  [[nodiscard]] std::vector<Removal> removals(const FragmentSet& delta) {
    std::vector<Removal> out;
    for (const Removal& removal : delta.removals()) {
      if (left_out(removal.dot)) continue;
      if (may_end(removal)) {
        out.push_back(removal);
      } else {
        ++replica.counters_.unvouched_operations;
      }
    }
    return out;
  }
};

/// Leaves out of a delta what this replica does not take from its sender.
inline Result<FragmentSet> Replica::admitted(const FragmentSet& delta, MemberId from) {
  Admission admission{*this, from,
                      from == everyone ? std::vector<std::uint64_t>() : overdrawn(delta)};
  CausalContext gone;
  const CausalContext vouched_gone = admitted_gone(delta.compacted(), from);
  for (const DotRange& range : vouched_gone.ranges()) {
    if (admission.is_barred(range.agent))
      ++counters_.refused_operations;
    else
      gone.append(range);
  }
  const auto counted = counters_;
  if (gone == delta.compacted() && admission.takes_all(delta)) return delta;
  counters_ = counted;  // what was found is found again
  std::vector<FragmentSet::Entry> entries = admission.entries(delta);
  return FragmentSet::from_parts(delta.hash(), std::move(entries), admission.removals(delta), gone);
}

/// Sets that differ though both have seen the same: one of them knows a fragment without
/// provenance, lacks what its author never let go of, or one dot names two operations. So the
/// other's whole set is asked for; each time it is in vain the next is longer in coming.
///
/// Errors: `dot_reused`, once, where that did not help.
inline Status Replica::compare(MemberId from, Peer& peer, const Digest256& theirs) {
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
  return extend::error(ErrorCode::dot_reused, "member ", from,
                       " has seen the same operations as this one and holds set ", theirs.hex(),
                       ", this one ", set_.digest().hex(), ": some dot names two operations");
}

/// Looks in the whole set of a member, whose operations are this replica's, for dots that name
/// another operation here.
inline Status Replica::find_reused(MemberId from, const FragmentSet& delta) {
  struct Named {
    Dot dot;
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
    const auto at = std::lower_bound(mine.begin(), mine.end(), theirs.dot,
                                     [](const Named& n, const Dot& dot) { return n.dot < dot; });
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
  return extend::error(ErrorCode::dot_reused, "agent ", found->agent, " in epoch ", found->epoch,
                       " used one dot for two operations: member ", from,
                       " holds one of them, this member the other");
}

}  // namespace replica

KVMELD_NAMESPACE_END
