#pragma once

/// How payloads follow ids: asked for until they are whole, verified, and never believed before.

#include <kvmeld/session/replica.hpp>

KVMELD_NAMESPACE_BEGIN

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::want(const FragmentSet::Entry& entry, MemberId holder) {
  if (entry.complete()) return;
  const auto [at, fresh] = wants_.try_emplace(entry.id);
  if (fresh) at->second.patience = options_.retry_ms;
  if (!fresh && at->second.holder != everyone) return;
  at->second.holder = holder;
  at->second.answered = holder != everyone;  // is asked first
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

/// Leaves the present holder for the next one, which `pursue` then asks: were it to step on too, every second peer would be passed over.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::turn(Want& want) {
  want.holder = next_holder(want);
  want.answered = want.holder != everyone;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void Replica<Store, Auth, Hash, C>::strike(MemberId member) {
  ++counters_.strikes;
  Peer& peer = peers_[member];
  if (++peer.strikes < options_.max_strikes) return;
  peer.strikes = 0;
  peer.trusted_from = elapsed_ + options_.max_retry_ms;
}

/// One attempt: what the store has, then a request to a peer.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::pursue(const FragmentId& id, Want& want) {
  const FragmentSet::Entry* const entry = set_.find(id);
  if (entry == nullptr || entry->complete()) {  // removed, or here by another way
    wants_.erase(id);
    return {};
  }
  want.next = elapsed_ + jitter(want.patience);
  want.patience = (std::min)(want.patience * 2, options_.max_retry_ms);
  if (want.assembler && ++want.barren > peers_.size() + 1) {
    // Everybody was asked and nobody sent these chunks: the manifest's list of them, which the id does not cover, may be a lie, or all are
    // slow. So nobody is blamed, and another is asked for a manifest.
    want.assembler.reset();
    want.barren = 0;
    want.patience = options_.retry_ms;
  }
  if (!want.assembler) {
    auto loaded = load_fragment(*store_, id, options_.format);
    if (loaded) {
      ++counters_.fragments_loaded;
      wants_.erase(id);
      return set_.restore(*loaded);
    }
    if (loaded.error().code() == ErrorCode::unavailable) return loaded.error();
  }
  if (want.holder == everyone || !std::exchange(want.answered, false)) want.holder = next_holder(want);  // one that was silent
  return ask(id, want);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::ask(const FragmentId& id, Want& want) {
  if (want.holder == everyone || want.holder == options_.self) return {};
  detail::Fetch fetch{id, {}};
  if (want.assembler) {
    const std::size_t room = (std::max<std::size_t>)(1, options_.max_message_bytes / (want.assembler->manifest().chunk_bytes + 1));
    fetch.chunks = want.assembler->missing((std::min)(room * 8, detail::Fetch::max_chunks));
  }
  want.in_flight = (std::max<std::size_t>)(1, fetch.chunks.size());
  return post(want.holder, ReplicaMessage::fetch, detail::encode(fetch));
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_fetch(MemberId from, std::span<const std::byte> body) {
  const auto fetch = detail::decode_fetch(body);
  if (!fetch) return fetch.error();
  const auto answer = [&](ReplicaMessage type, const BlobKey& key, std::span<const std::byte> bytes) {
    return post(from, type, detail::encode(detail::Piece{fetch->id, key, bytes}));
  };
  const Fragment here = set_.payload(fetch->id);
  const bool whole = here.valid() && std::all_of(here.payloads().begin(), here.payloads().end(), [](const Payload& p) { return p.bytes != nullptr; });
  std::optional<Manifest> manifest;
  const auto made = [&]() -> const Manifest* {
    if (!manifest && whole) {
      if (auto fresh = make_manifest<Hash>(here, options_.format.chunk_bytes)) manifest = *std::move(fresh);
    }
    return manifest ? &*manifest : nullptr;
  };
  // What rotted in the store is not sent, or the asker would take this replica for a liar; what is in memory takes its place.
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
    if (outbox_bytes_ > max_outbox_bytes) return {};  // asks of a few bytes do not fill this replica's memory; the asker tries again
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
        const auto bytes = encode_chunk(raw_chunk(payload, index, options_.format.chunk_bytes), options_.format.compressor,
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
Status Replica<Store, Auth, Hash, C>::on_piece(MemberId from, ReplicaMessage type, std::span<const std::byte> body) {
  const auto piece = detail::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = wants_.find(piece->id);
  if (at == wants_.end() || (peers_.count(from) != 0 && peers_[from].trusted_from > elapsed_)) return {};
  Want& want = at->second;
  if (type == ReplicaMessage::manifest) {
    if (want.assembler) return {};
    auto manifest = decode_manifest<Hash>(piece->bytes, options_.format.limits());
    if (!manifest || manifest->fragment.id() != piece->id) {
      strike(from);
      turn(want);
      return !manifest ? manifest.error() : detail::error(ErrorCode::id_mismatch, "member ", from, " sent another fragment's manifest for ", piece->id.hex());
    }
    want.assembler.emplace(*std::move(manifest));
    want.manifest_from = from;
    KVMELD_TRY(load_chunks(*store_, *want.assembler, options_.format));
  } else {
    if (!want.assembler) return {};
    const auto added = want.assembler->add(piece->key, piece->bytes, options_.format.compressor);
    if (!added) {
      strike(from);
      turn(want);
      return added.error();
    }
    if (!*added) return {};
    want.in_flight -= want.in_flight > 0 ? 1U : 0U;
  }
  want.answered = true;
  want.barren = 0;
  want.patience = options_.retry_ms;
  want.next = elapsed_ + jitter(want.patience);
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
    want.assembler.reset();
    want.in_flight = 0;
    turn(want);
    want.next = elapsed_;
    return fragment.error();
  }
  const Status stored = store_fragment(*store_, *fragment, options_.format).status();
  ++counters_.fragments_fetched;
  wants_.erase(FragmentId(id));
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
  at->second.next = (std::min)(at->second.next, elapsed_ + options_.retry_ms);
  return {};
}

KVMELD_NAMESPACE_END
