#pragma once

/// How payloads follow ids: asked for until they are whole, verified, and never believed before.

#include <kvmeld/session/replica.hpp>

KVMELD_NAMESPACE_BEGIN

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::want(const FragmentSet::Entry& entry, MemberId holder) {
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
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::look_at(const FragmentId& id, Want& want, std::int64_t when) {
  detail::DueQueue& due = want.member ? due_members_ : due_others_;
  due.drop(want.author, want.next, id);
  want.next = when;
  due.put(want.author, want.next, id);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::end_want(const FragmentId& id) {
  const auto at = wants_.find(id);
  if (at == wants_.end()) return;
  Want& want = at->second;
  drop_assembler(want);
  (want.member ? due_members_ : due_others_).drop(want.author, want.next, id);
  wants_.erase(at);
}

/// Takes memory for what arrived of a fragment; where there is none, what it had is given back.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::charge(Want& want, std::uint64_t bytes) {
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
  Status full = detail::error(ErrorCode::quota_exceeded, bytes, " bytes of a fragment by member ",
                              want.manifest_from, ", which has ", of_peer, " of ",
                              options_.max_peer_fetch_bytes, " on their way, all have ",
                              fetch_bytes_, " of ", options_.max_fetch_bytes);
  drop_assembler(want);
  return full;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::drop_assembler(Want& want) {
  want.assembler.reset();
  want.in_flight = 0;
  discharge(want, want.charged);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::discharge(Want& want, std::uint64_t bytes) {
  fetch_bytes_ -= bytes;
  want.charged -= bytes;
  if (const auto peer = peers_.find(want.manifest_from); peer != peers_.end()) {
    peer->second.fetch_bytes -= (std::min)(peer->second.fetch_bytes, bytes);
  }
}

/// Looks for some of what is due: named members' first, and each author's in turn.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::pursue_some() {
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
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
MemberId Replica<Store, Auth, Hash, C>::next_holder(Want& want) {
  for (std::size_t tries = 0; tries < peers_.size(); ++tries) {
    auto at = peers_.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(want.rotation++ % peers_.size()));
    if (at->second.trusted_from <= elapsed_) return at->first;
  }
  return everyone;
}

/// Leaves the present holder for the next one, which `pursue` then asks: were it to step on too,
/// every second peer would be passed over.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::turn(Want& want) {
  want.holder = next_holder(want);
  want.answered = want.holder != everyone;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::strike(MemberId member) {
  ++counters_.strikes;
  Peer* const peer = peer_of(member);
  if (peer == nullptr || ++peer->strikes < options_.max_strikes) return;
  peer->strikes = 0;
  peer->trusted_from = elapsed_ + options_.max_retry_ms;
}

/// One attempt: what the store has, then a request to a peer.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::pursue(const FragmentId& id, Want& want) {
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::ask(const FragmentId& id, Want& want) {
  if (want.holder == everyone || want.holder == options_.self) return {};
  detail::Fetch fetch{id, {}};
  if (want.assembler) {
    const std::size_t room =
        (std::max<std::size_t>)(1, options_.max_message_bytes /
                                       (want.assembler->manifest().chunk_bytes + 1));
    fetch.chunks = want.assembler->missing((std::min)(room * 8, detail::Fetch::max_chunks));
  }
  want.in_flight = (std::max<std::size_t>)(1, fetch.chunks.size());
  return post(want.holder, ReplicaMessage::fetch, detail::encode(fetch));
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_fetch(MemberId from, std::span<const std::byte> body) {
  const auto fetch = detail::decode_fetch(body);
  if (!fetch) return fetch.error();
  // Asks of a few bytes do not fill this replica's memory; the asker tries again.
  if (outbox_bytes_ > max_outbox_bytes) return {};
  const auto answer = [&](ReplicaMessage type, const BlobKey& key,
                          std::span<const std::byte> bytes) {
    return post(from, type, detail::encode(detail::Piece{fetch->id, key, bytes}));
  };
  const Fragment here = set_.payload(fetch->id);
  const bool whole =
      here.valid() && std::all_of(here.payloads().begin(), here.payloads().end(),
                                  [](const Payload& p) { return p.bytes != nullptr; });
  std::optional<Manifest> manifest;
  const auto made = [&]() -> const Manifest* {
    if (!manifest && whole) {
      if (auto fresh = make_manifest<Hash>(here, options_.format.chunk_bytes))
        manifest = *std::move(fresh);
    }
    return manifest ? &*manifest : nullptr;
  };
  // What rotted in the store is not sent, or the asker would take this replica for a liar; what is
  // in memory takes its place.
  const auto rotten = [](const Status& loaded) { return detail::proves_damage(loaded.code()); };
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
        const auto bytes = encode_chunk(
            raw_chunk(payload, index, options_.format.chunk_bytes), options_.format.compressor,
            chunk_form(here.geometry(), payload, index, options_.format.chunk_bytes));
        if (rotten(stored.error())) (void)store_->put(key, bytes);
        KVMELD_TRY(answer(ReplicaMessage::chunk, key, bytes));
      }
    }
    lacks = lacks || !found;
  }
  return lacks ? answer(ReplicaMessage::lacking, manifest_key(fetch->id), {}) : Status();
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_piece(MemberId from, ReplicaMessage type,
                                               std::span<const std::byte> body) {
  const auto piece = detail::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = wants_.find(piece->id);
  const auto peer = peers_.find(from);
  if (at == wants_.end() || peer == peers_.end() || peer->second.trusted_from > elapsed_) return {};
  Want& want = at->second;
  if (type == ReplicaMessage::manifest) {
    if (want.assembler) return {};
    want.manifest_from = from;
    KVMELD_TRY(charge(want, detail::manifest_memory(piece->bytes.size())));
    auto manifest = decode_manifest<Hash>(piece->bytes, options_.format.limits());
    if (!manifest || manifest->fragment.id() != piece->id) {
      drop_assembler(want);
      strike(from);
      turn(want);
      return !manifest ? manifest.error()
                       : detail::error(ErrorCode::id_mismatch, "member ", from,
                                       " sent another fragment's manifest for ", piece->id.hex());
    }
    want.assembler = std::make_unique<Assembler<Hash>>(*std::move(manifest));
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
    const auto added = want.assembler->add(piece->key, piece->bytes, options_.format.compressor);
    if (!added) {
      discharge(want, bytes);
      strike(from);
      turn(want);
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::finish(const FragmentId& id, Want& want) {
  const auto fragment = want.assembler->finish();
  if (!fragment) {
    strike(want.manifest_from);
    drop_assembler(want);
    turn(want);
    look_at(id, want, elapsed_);
    return fragment.error();
  }
  const Status stored = store_fragment(*store_, *fragment, options_.format).status();
  ++counters_.fragments_fetched;
  end_want(FragmentId(id));
  if (set_.find(fragment->id()) != nullptr) KVMELD_TRY(set_.restore(*fragment));
  return stored;  // the set has the bytes in any case
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_lacking(MemberId from, std::span<const std::byte> body) {
  const auto piece = detail::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = wants_.find(piece->id);
  if (at == wants_.end() || at->second.holder != from) return {};
  turn(at->second);
  at->second.in_flight = 0;
  const std::int64_t soon = elapsed_ + options_.retry_ms;
  look_at(piece->id, at->second, (std::min)(at->second.next, soon));
  return {};
}

KVMELD_NAMESPACE_END
