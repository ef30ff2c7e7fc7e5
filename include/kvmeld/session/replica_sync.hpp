#pragma once

/// How replicas come to the same set: news, requests, deltas, and records of a store.

#include <kvmeld/session/replica.hpp>

KVMELD_NAMESPACE_BEGIN

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Result<std::optional<FrameView>> Replica<Store, Auth, Hash, C>::receive(
    MemberId from, std::span<const std::byte> bytes) {
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_message(MemberId from, ReplicaMessage type,
                                                 std::span<const std::byte> bytes) {
  if (type > ReplicaMessage::lacking) return {};  // of a newer minor version
  if (from == options_.self || from == everyone) {
    return detail::error(ErrorCode::unauthenticated, "a message in the name of member ", from,
                         from == everyone ? ", which nobody is" : ", which is this one");
  }
  const auto body = detail::decode_body(bytes);
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::tick(std::int64_t now_ms) {
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_delta(MemberId from, std::span<const std::byte> body) {
  const auto delta = decode_set(body, options_.set_hash);
  return delta ? take(*delta, from, false) : delta.error();
}

/// Takes operations from a peer or from the store. Those of a peer are written down first, unless
/// their author wrote them to the shared store; `everyone` as the sender says that they came by
/// another way, and nobody wrote them.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::take(const FragmentSet& all, MemberId from, bool from_store) {
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
    return detail::error(
        ErrorCode::quota_exceeded, refused, " operations were left out: an author may do ",
        options_.max_operations,
        " in one life, nobody may act for this replica, and nobody may change what another did");
  }
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::read_records() {
  auto batch = store_->records(cursor_);
  if (!batch) return batch.error();
  if constexpr (requires {
                  { store_->damage() } -> std::same_as<StoreDamage>;
                }) {
    counters_.store_damage = store_->damage();
  }
  if constexpr (requires {
                  { store_->generation() } -> std::convertible_to<std::uint64_t>;
                }) {
    // A server that came back may have come back with less: what this replica holds is written
    // there again.
    const std::uint64_t generation = store_->generation();
    if (generation_ && *generation_ != generation) KVMELD_TRY(republish());
    generation_ = generation;
  }
  for (const std::vector<std::byte>& record : batch->records) {
    const auto set = decode_record(record, options_.set_hash);
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_news(MemberId from, std::span<const std::byte> body) {
  auto news = detail::decode_news(body, range_limit());
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

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::heard(MemberId member, const CausalContext& seen) {
  Peer* const peer = peer_of(member);
  if (peer == nullptr)
    return detail::error(ErrorCode::quota_exceeded, "news of member ", member, ", one more than ",
                         max_peers);
  if (options_.members.empty() || !is_member(member)) {
    // Who is not named shares room with all others that are not, and has a part of it at most.
    const std::size_t others = unnamed_ranges_ - peer->context.ranges().size();
    const std::size_t ranges = seen.ranges().size();
    if (ranges > range_limit() / 16 || others + ranges > range_limit()) {
      return detail::error(ErrorCode::quota_exceeded, "news of ", ranges, " ranges by member ",
                           member, ", which nobody named; all such have ", others, " and may have ",
                           range_limit(), ", each a sixteenth");
    }
    unnamed_ranges_ = others + ranges;
  }
  peer->context = seen;
  note_word(member, seen);
  return check_own(member, seen);
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_want(MemberId from, std::span<const std::byte> body) {
  ByteReader r(body);
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
    for (const FragmentSet& part : detail::cut(delta, most)) {
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

KVMELD_NAMESPACE_END
