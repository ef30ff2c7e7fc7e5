#pragma once

/// How exchanges come to the same directory: rumours, digests, and reconciliation where those
/// differ.

#include <kvmeld/transport/anchor_exchange.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Whether an error says that a message is wrong, and not that this peer's store or bounds could
/// not take it.
[[nodiscard]] constexpr bool blames_message(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::not_found:
    case ErrorCode::unavailable:
    case ErrorCode::timed_out:
    case ErrorCode::store_full:
    case ErrorCode::quota_exceeded:
      return false;
    default:
      return true;
  }
}

}  // namespace detail

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::receive(MemberId from,
                                                     std::span<const std::byte> bytes) {
  const auto frame = decode_frame(bytes, options_.frame, from);
  Status status = frame.status();
  if (status.ok() && from != options_.self) {
    switch (static_cast<AnchorMessage>(frame->type)) {
      case AnchorMessage::gossip:
        status = on_gossip(from, frame->body);
        break;
      case AnchorMessage::records:
        status = take(from, frame->body);
        break;
      case AnchorMessage::reconcile:
        status = on_reconcile(from, frame->body);
        break;
      case AnchorMessage::fetch:
        status = on_fetch(from, frame->body);
        break;
      case AnchorMessage::piece:
        status = on_piece(from, frame->body);
        break;
      case AnchorMessage::lacking:
        status = on_lacking(from, frame->body);
        break;
      default:
        break;  // of a newer minor version
    }
  }
  if (!status && detail::blames_message(status.code())) ++counters_.refused;
  return status;
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::tick(std::int64_t now_ms) {
  elapsed_ = clock_.advance(now_ms);
  Status status;
  const auto also = [&status](Status other) {
    if (!other && status) status = std::move(other);
  };
  if (elapsed_ >= next_round_) {
    next_round_ = elapsed_ + jitter(options_.round_ms);
    also(gossip());
  }
  also(run_sessions());
  std::vector<FragmentId> due;
  for (const auto& [key, pull] : pulls_) {
    if (pull.next <= elapsed_) due.push_back(key);
  }
  for (const FragmentId& key : due) {
    const auto at = pulls_.find(key);
    if (at == pulls_.end()) continue;
    // whoever was asked was silent
    also(at->second.in_flight > 0 ? step_on(key, at->second) : pursue(key, at->second));
  }
  drop_tombstones();
  return status;
}

/// What follows from a record that is news here.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void AnchorExchange<Store, Auth, Hash, C>::heard(const FragmentId& key,
                                                 const AnchorRecord& record) {
  rumours_[key] = round_;
  if (record.removed)
    graves_.dig(key);
  else
    graves_.fill(key);
  const auto held = held_.find(key);
  if (held == held_.end()) return;
  const bool gone = record.removed || record.payload != held->second.stored.payload;
  if (gone || (held->second.adopted && record.owner != options_.self)) release(key);
}

/// A record that says that this peer has something, and this peer does not know of it: an earlier
/// life of it wrote that. What the store kept is held again, and what it did not keep is buried, so
/// that nobody asks for it in vain.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::reclaim(const FragmentId& key,
                                                     const AnchorRecord& record) {
  const auto missing = missing_blobs(record);
  if (!missing && missing.error().code() == ErrorCode::unavailable) return missing.error();
  if (missing && missing->empty() && may_adopt(record.bytes)) {
    const auto list = detail::load_list(*store_, record, options_.format);
    if (!list) return list.error();
    hold(key, detail::stored_anchor(record.payload, *list), true);
    return {};
  }
  return bury(AnchorRecord(record));
}

/// Joins records of a peer, all or none, and sends back what is newer here.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::take(MemberId from,
                                                  std::span<const std::byte> records) {
  const auto decoded = decode_records(records, options_.frame.name_space);
  if (!decoded) return decoded.error();
  AnchorDirectory batch(decoded->size());
  for (const AnchorRecord& record : *decoded) KVMELD_TRY(batch.join(record).status());
  std::vector<const AnchorDirectory::Entry*> other;
  for (const auto& [key, entry] : batch.entries()) {
    const AnchorRecord* const mine = directory_.newest(key);
    if (mine == nullptr || !(*mine == entry.record)) other.push_back(&entry);
  }
  KVMELD_TRY(directory_.join(batch));
  std::vector<AnchorRecord> newer;
  for (const AnchorDirectory::Entry* const entry : other) {
    const FragmentId key = record_key(entry->record);
    const AnchorRecord& now = *directory_.newest(key);
    if (!(now == entry->record)) {
      newer.push_back(now);
      continue;
    }
    heard(key, now);
    // what the store refuses now is found out when it is asked for
    if (now.owner == options_.self && !now.removed && !holds(key)) (void)reclaim(key, now);
  }
  return newer.empty() || outbox_bytes_ > max_outbox_bytes
             ? Status()
             : tell(from, AnchorMessage::records, std::move(newer));
}

/// Sends records in messages that are not too long. The last one is of the type given: `gossip` has
/// the digest before its records.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::tell(MemberId to, AnchorMessage last,
                                                  std::vector<AnchorRecord> records) {
  const std::size_t room =
      options_.max_message_bytes > 512 ? options_.max_message_bytes - 256 : 256;
  const std::size_t most = (std::max)(room / detail::max_record_bytes, std::size_t{1});
  std::span<const AnchorRecord> left(records);
  for (; left.size() > most; left = left.subspan(most)) {
    KVMELD_TRY(post(to, AnchorMessage::records,
                    encode_records(options_.frame.name_space, left.first(most))));
  }
  ByteWriter w;
  if (last == AnchorMessage::gossip) {
    for (const std::uint64_t word : directory_.digest().words) w.value(word);
  }
  w.bytes(encode_records(options_.frame.name_space, left));
  return post(to, last, w.written());
}

/// One round: one message to one neighbour.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::gossip() {
  const std::size_t n = options_.members.size();
  if (n < 2) return {};
  const auto self = static_cast<std::size_t>(
      std::lower_bound(options_.members.begin(), options_.members.end(), options_.self) -
      options_.members.begin());
  const MemberId to = options_.members[(self + (std::size_t{1} << (round_ % neighbours_))) % n];
  std::erase_if(rumours_,
                [&](const auto& rumour) { return rumour.second + 2 * neighbours_ <= round_; });
  std::vector<AnchorRecord> fresh;
  for (const auto& [key, round] : rumours_) {
    if (const AnchorRecord* const record = directory_.newest(key)) fresh.push_back(*record);
  }
  ++round_;
  return tell(to, AnchorMessage::gossip, std::move(fresh));
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::on_gossip(MemberId from,
                                                       std::span<const std::byte> body) {
  ByteReader r(body);
  Digest256 theirs;
  for (std::uint64_t& word : theirs.words) word = r.value<std::uint64_t>();
  KVMELD_TRY(r.status("gossip"));
  const auto records = body.subspan(r.offset());
  KVMELD_TRY(take(from, records));
  if (theirs == directory_.digest()) {
    agreed_ = round_;
    return {};
  }
  // While news is under way digests differ and nothing is wrong; but not for ever.
  const bool quiet = rumours_.empty() && records.size() == detail::no_records_bytes;
  if ((quiet || round_ - agreed_ > 4 * neighbours_) && elapsed_ >= next_session_)
    return begin_session(from);
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::begin_session(MemberId with) {
  // One of this peer's own at a time, and none with whom one is under way already.
  const auto running = std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& s) {
    return (s.first.second || s.first.first == with) && !s.second.done;
  });
  if (running) return {};
  Session session;
  session.salt = detail::mix_bits(options_.seed ^
                                  detail::mix_bits(options_.self + (counters_.sessions << 32U)));
  session.items = directory_.reconcile_items();
  session.session = std::make_unique<Reconciliation>(session.items);
  session.patience = options_.retry_ms;
  auto first = session.session->start(session.salt);
  if (!first) return first.error();
  session.last = *std::move(first);
  ++counters_.sessions;
  agreed_ = round_;
  next_session_ = elapsed_ + options_.round_ms * static_cast<std::int64_t>(
                                                     neighbours_ + random_() % (neighbours_ + 1));
  Session& placed = sessions_[{with, true}] = std::move(session);
  return send_step(with, true, placed);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::send_step(MemberId to, bool from_starter,
                                                       Session& session) {
  session.next = elapsed_ + jitter(session.patience);
  session.until = elapsed_ + 20 * options_.retry_ms;
  ByteWriter w;
  w.value(session.salt);
  w.value(static_cast<std::uint8_t>(from_starter));
  w.bytes(session.last);
  return post(to, AnchorMessage::reconcile, w.written());
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::on_reconcile(MemberId from,
                                                          std::span<const std::byte> body) {
  ByteReader r(body);
  const auto salt = r.value<std::uint64_t>();
  const bool from_starter = detail::read_bool(r);
  KVMELD_TRY(r.status("reconciliation"));
  auto at = sessions_.find({from, !from_starter});
  if (at == sessions_.end() || at->second.salt != salt) {
    // one that has ended, or too many: it begins another
    if (!from_starter || sessions_.size() >= max_sessions) return {};
    Session fresh;
    fresh.salt = salt;
    fresh.items = directory_.reconcile_items();
    fresh.session = std::make_unique<Reconciliation>(fresh.items);
    fresh.patience = options_.retry_ms;
    at = sessions_.insert_or_assign({from, false}, std::move(fresh)).first;
  }
  Session& session = at->second;
  session.until = elapsed_ + 20 * options_.retry_ms;
  auto reply = session.session->receive(body.subspan(r.offset()));
  if (!reply) {
    sessions_.erase(at);
    return reply.error();
  }
  if (reply->message) {
    session.patience = options_.retry_ms;
    session.last = *std::move(reply->message);
    KVMELD_TRY(send_step(from, !from_starter, session));
  }
  if (!reply->done || std::exchange(session.done, true)) return {};
  std::vector<AnchorRecord> lacking;
  const ReconcileDifference& difference = session.session->result();
  for (const std::vector<FragmentId>* const keys : {&difference.mine_only, &difference.different}) {
    for (const FragmentId& key : *keys) {
      if (const AnchorRecord* const record = directory_.newest(key)) lacking.push_back(*record);
    }
  }
  return lacking.empty() ? Status() : tell(from, AnchorMessage::records, std::move(lacking));
}

/// Sends again what was not answered; forgets sessions that nobody goes on with.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status AnchorExchange<Store, Auth, Hash, C>::run_sessions() {
  std::erase_if(sessions_, [&](const auto& s) { return s.second.until <= elapsed_; });
  for (auto& [who, session] : sessions_) {
    if (session.done || !who.second || session.next > elapsed_) continue;
    const std::int64_t until = session.until;  // sending again keeps nothing alive
    session.patience = (std::min)(session.patience * 2, options_.max_retry_ms);
    KVMELD_TRY(send_step(who.first, true, session));
    session.until = until;
  }
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
void AnchorExchange<Store, Auth, Hash, C>::drop_tombstones() {
  graves_.date(elapsed_);
  while (graves_.size() > 0 && (graves_.size() > options_.max_tombstones ||
                                elapsed_ - graves_.oldest().since >= options_.tombstone_ms)) {
    const FragmentId key = graves_.oldest().key;
    graves_.fill(key);
    directory_.forget(key);
  }
}

KVMELD_NAMESPACE_END
