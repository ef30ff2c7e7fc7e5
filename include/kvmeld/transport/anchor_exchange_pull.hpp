#pragma once

/// How K/V follows records: asked for by whoever needs it, blob by blob, verified before it counts.

#include <kvmeld/transport/anchor_exchange.hpp>

KVMELD_NAMESPACE_BEGIN

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::pull(const FragmentId& key) {
  const AnchorRecord* const record = directory_.find(key);
  if (record == nullptr)
    return detail::error(ErrorCode::not_found, "no record under ", key.hex(),
                         "; it was removed, or never heard of");
  if (const auto running = pulls_.find(key); running != pulls_.end()) {
    running->second.asked = true;
    return {};
  }
  return begin_pull(key, *record, true);
}

/// What the store lacks of an anchor: the blob that lists its chunks, or else some of those. A list
/// that is not the record's is an error.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Result<std::vector<BlobKey>> AnchorExchange<Store, Auth, Hash, C>::missing_blobs(
    const AnchorRecord& record, Pull* pull) {
  const auto list = detail::load_list(*store_, record, options_.format);
  if (!list) {
    const ErrorCode code = list.error().code();
    const auto there = store_->contains(record.payload);
    if (!there) return there.error();
    // also where it was wrong and is erased
    if (!*there && code != ErrorCode::unavailable) return std::vector<BlobKey>{record.payload};
    return list.error();
  }
  std::vector<BlobKey> out;
  const auto share = [&](const BlobKey& blob) {
    if (pull != nullptr && uses_.count(blob) != 0) use(*pull, blob);
  };
  share(record.payload);
  for (const std::vector<BlobKey>& chunks : list->chunks) {
    for (const BlobKey& key : chunks) {
      const auto there = store_->contains(key);
      if (!there) return there.error();
      if (*there)
        share(key);
      else
        out.push_back(key);
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::begin_pull(const FragmentId& key,
                                                        const AnchorRecord& record, bool asked) {
  Pull& pull = pulls_[key];
  pull.asked = asked;
  aim(key, record, pull);
  auto missing = missing_blobs(record, &pull);
  Status begun = missing.status();
  if (missing) {
    pull.missing = *std::move(missing);
    begun = pursue(key, pull);
  }
  const auto at = pulls_.find(key);
  if (!begun && at != pulls_.end()) {
    drop_uses(at->second.uses);
    pulls_.erase(at);
  }
  return begun;
}

/// From the first candidate on, for the version of a record.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void AnchorExchange<Store, Auth, Hash, C>::aim(const FragmentId& key, const AnchorRecord& record,
                                               Pull& pull) {
  drop_uses(std::exchange(pull.uses, {}));
  pull.missing.clear();
  pull.at = pull.in_flight = 0;
  pull.cycles = 0;
  pull.next = 0;
  pull.payload = record.payload;
  pull.patience = options_.retry_ms;
  pull.candidates =
      rendezvous_rank(key, options_.members, static_cast<std::size_t>(neighbours_) + 2);
  if (lives(record.owner)) {
    std::erase(pull.candidates, record.owner);
    pull.candidates.insert(
        pull.candidates.begin() + (pull.candidates.empty() || owner(key) == record.owner ? 0 : 1),
        record.owner);
  }
  std::erase(pull.candidates, options_.self);
  pull.lacks.assign(pull.candidates.size(), 0);
}

/// Goes on with what is missing, and ends where nothing is. Errors: `unavailable`, behind which the
/// pull stays and the next tick goes on.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::pursue(const FragmentId& key, Pull& pull) {
  const AnchorRecord* const record = directory_.find(key);
  if (record == nullptr)
    return fail(key, detail::error(ErrorCode::not_found, "the record under ", key.hex(),
                                   " was removed while its K/V was on the way"));
  if (record->payload != pull.payload) aim(key, *record, pull);  // another version
  const auto look = [&]() -> Status {
    auto missing = missing_blobs(*record, &pull);
    if (!missing) return missing.error();
    pull.missing = *std::move(missing);
    return {};
  };
  const auto stop = [&](const Status& why) {
    return why.code() == ErrorCode::unavailable ? why : fail(key, why);
  };
  if (pull.missing.empty()) {
    if (const Status looked = look(); !looked) return stop(looked);
  }
  if (pull.missing.empty()) {
    auto list = detail::load_list(*store_, *record, options_.format);
    auto anchor =
        list ? detail::fill_list(*store_, *list, options_.format) : Result<Anchor>(list.error());
    if (anchor) return complete(key, AnchorRecord(*record), *list, *std::move(anchor), pull.asked);
    if (anchor.error().code() == ErrorCode::unavailable) return anchor.error();
    // What rotted in the store is erased, what another record let go of is not there: both are
    // asked for.
    if (!detail::is_lost(anchor.error().code()) || ++pull.cycles > max_cycles)
      return fail(key, anchor.error());
    if (const Status looked = look(); !looked) return stop(looked);
    if (pull.missing.empty()) return fail(key, anchor.error());
  }
  if (pull.candidates.empty())
    return fail(key, detail::error(ErrorCode::not_found, "no other member lives who could have ",
                                   key.hex()));
  if (pull.lacks[pull.at] != 0) return step_on(key, pull);
  return ask(key, pull);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::ask(const FragmentId& key, Pull& pull) {
  detail::Fetch fetch{key, {}};
  const std::size_t room =
      (std::max<std::size_t>)(1, options_.max_message_bytes / (options_.format.chunk_bytes + 1));
  const std::size_t most = (std::min)({pull.missing.size(), room * 8, detail::Fetch::max_chunks});
  fetch.chunks.assign(pull.missing.begin(),
                      pull.missing.begin() + static_cast<std::ptrdiff_t>(most));
  pull.in_flight = most;
  pull.next = elapsed_ + jitter(pull.patience);
  return post(pull.candidates[pull.at], AnchorMessage::fetch, detail::encode(fetch));
}

/// The next candidate that is trusted and did not say that it lacks the anchor.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
bool AnchorExchange<Store, Auth, Hash, C>::next_candidate(Pull& pull) {
  for (std::size_t tries = 0; tries < pull.candidates.size(); ++tries) {
    pull.at = (pull.at + 1) % pull.candidates.size();
    if (pull.at == 0) {
      ++pull.cycles;
      pull.patience = (std::min)(pull.patience * 2, options_.max_retry_ms);
    }
    const auto peer = peers_.find(pull.candidates[pull.at]);
    if (pull.lacks[pull.at] == 0 && (peer == peers_.end() || peer->second.trusted_from <= elapsed_))
      return true;
  }
  return false;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::step_on(const FragmentId& key, Pull& pull) {
  const AnchorRecord* const record = directory_.find(key);
  // what they lack is not what is told of now
  if (record == nullptr || record->payload != pull.payload) return pursue(key, pull);
  const auto lacking =
      static_cast<std::size_t>(std::count(pull.lacks.begin(), pull.lacks.end(), std::uint8_t{1}));
  if (lacking == pull.candidates.size()) {
    Status why = detail::error(ErrorCode::not_found, "none of ", lacking,
                               " members asked has the K/V of ", key.hex());
    // who wrote it is gone, and took it along; behind the last version it stays
    if (!lives(record->owner)) (void)bury(AnchorRecord(*record));
    return fail(key, std::move(why));
  }
  const bool other = next_candidate(pull);
  if (pull.cycles >= max_cycles)
    return fail(key, detail::error(ErrorCode::unavailable, pull.candidates.size() - lacking,
                                   " members did not give the K/V of ", key.hex(), " when asked ",
                                   max_cycles, " times; try later"));
  if (other) return ask(key, pull);
  pull.in_flight = 1;  // nobody to be asked just now
  pull.next = elapsed_ + jitter(pull.patience);
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::complete(const FragmentId& key,
                                                      const AnchorRecord& record,
                                                      const AnchorList& list, Anchor anchor,
                                                      bool asked) {
  AnchorRecord now = record;
  const auto pull = pulls_.find(key);
  const std::set<BlobKey> uses = std::move(pull->second.uses);
  pulls_.erase(pull);
  ++counters_.pulled;
  const auto before = held_.find(key);
  bool adopted = before != held_.end() && before->second.adopted;
  if (!adopted && record.owner != options_.self && owner(key) == options_.self &&
      may_adopt(record.bytes)) {
    now.owner = options_.self;
    adopted = write(now).ok();
    if (adopted)
      ++counters_.adopted;
    else
      now = record;
  }
  hold(key, detail::stored_anchor(record.payload, list), adopted);
  drop_uses(uses);
  if (asked) pulled_.push_back({key, now, std::move(anchor)});
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::fail(const FragmentId& key, Status why) {
  const auto at = pulls_.find(key);
  ++counters_.pulls_failed;
  const AnchorRecord* const record = directory_.newest(key);
  if (at->second.asked)
    pulled_.push_back({key, record == nullptr ? AnchorRecord{} : *record, std::move(why)});
  drop_uses(at->second.uses);  // parts of an anchor, which nobody here will ask for
  pulls_.erase(at);
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::on_fetch(MemberId from,
                                                      std::span<const std::byte> body) {
  auto fetch = detail::decode_fetch(body);
  if (!fetch) return fetch.error();
  std::sort(fetch->chunks.begin(), fetch->chunks.end());
  fetch->chunks.erase(std::unique(fetch->chunks.begin(), fetch->chunks.end()), fetch->chunks.end());
  std::optional<BlobKey> lacking;
  for (const BlobKey& key : fetch->chunks) {
    // asks of a few bytes do not fill this peer's memory; the asker tries again
    if (outbox_bytes_ > max_outbox_bytes) return {};
    const auto stored = load_chunk(*store_, key, options_.format);  // what rotted is not sent
    if (stored)
      KVMELD_TRY(post(from, AnchorMessage::piece,
                      detail::encode(detail::Piece{fetch->id, key, stored->bytes()})));
    else if (stored.error().code() == ErrorCode::unavailable)
      return stored.error();
    else
      lacking = key;
  }
  if (!lacking) return {};
  KVMELD_TRY(
      post(from, AnchorMessage::lacking, detail::encode(detail::Piece{fetch->id, *lacking, {}})));
  const AnchorRecord* const record = directory_.find(fetch->id);
  if (record == nullptr || pulls_.count(fetch->id) != 0) return {};
  // it says so itself: after a restart, or a disk that rotted
  if (record->owner == options_.self) {
    const auto missing = missing_blobs(*record);
    if (!missing && missing.error().code() == ErrorCode::unavailable) return missing.error();
    return missing && missing->empty() ? Status() : bury(AnchorRecord(*record));
  }
  const bool adopts = owner(fetch->id) == options_.self && may_adopt(record->bytes);
  return adopts ? begin_pull(fetch->id, AnchorRecord(*record), false) : Status();
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void AnchorExchange<Store, Auth, Hash, C>::strike(MemberId member) {
  ++counters_.strikes;
  if (!lives(member)) return;
  Peer& peer = peers_[member];
  if (++peer.strikes < options_.max_strikes) return;
  peer.strikes = 0;
  peer.trusted_from = elapsed_ + options_.max_retry_ms;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::on_piece(MemberId from,
                                                      std::span<const std::byte> body) {
  const auto piece = detail::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = pulls_.find(piece->id);
  if (at == pulls_.end()) return {};
  Pull& pull = at->second;
  const auto wanted = std::lower_bound(pull.missing.begin(), pull.missing.end(), piece->key);
  if (wanted == pull.missing.end() || *wanted != piece->key) return {};
  const FragmentId key = piece->id;
  const Status whole =
      decode_chunk<Hash>(piece->bytes, piece->key, max_chunk_bytes, options_.format.compressor)
          .status();
  if (!whole) {
    strike(from);
    if (pull.candidates[pull.at] == from) KVMELD_TRY(step_on(key, pull));
    return whole;
  }
  const auto fresh = store_->put(piece->key, piece->bytes);
  if (!fresh) return fresh.error();
  if (*fresh || uses_.count(piece->key) != 0) use(pull, piece->key);
  pull.missing.erase(wanted);
  pull.in_flight -= pull.in_flight > 0 ? 1U : 0U;
  pull.next = elapsed_ + jitter(pull.patience);
  if (pull.in_flight > 0 && !pull.missing.empty()) return {};
  pull.in_flight = 0;
  return pursue(key, pull);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::on_lacking(MemberId from,
                                                        std::span<const std::byte> body) {
  const auto piece = detail::decode_piece(body);
  if (!piece) return piece.error();
  const auto at = pulls_.find(piece->id);
  if (at == pulls_.end()) return {};
  Pull& pull = at->second;
  const auto who = std::find(pull.candidates.begin(), pull.candidates.end(), from);
  if (who == pull.candidates.end()) return {};
  const auto index = static_cast<std::size_t>(who - pull.candidates.begin());
  pull.lacks[index] = 1;
  return index == pull.at ? step_on(FragmentId(piece->id), pull) : Status();
}

KVMELD_NAMESPACE_END
