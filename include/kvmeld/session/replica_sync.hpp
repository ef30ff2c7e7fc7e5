#pragma once

/// How replicas come to the same set: news, requests, deltas, and records of a store.

#include <kvmeld/session/replica.hpp>

KVMELD_NAMESPACE_BEGIN

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Result<std::optional<FrameView>> Replica<Store, Auth, Hash, C>::receive(MemberId from, std::span<const std::byte> bytes) {
  const auto frame = decode_frame(bytes, options_.frame);
  if (!frame) {
    ++counters_.refused_frames;
    return frame.error();
  }
  counters_.received_bytes[frame->type] += bytes.size();
  if (frame->type >= static_cast<std::uint8_t>(ReplicaMessage::application)) return std::optional(*frame);
  const auto type = static_cast<ReplicaMessage>(frame->type);
  Status status;
  switch (type) {
    case ReplicaMessage::news: status = on_news(from, frame->body); break;
    case ReplicaMessage::want: status = on_want(from, frame->body); break;
    case ReplicaMessage::delta: status = take(frame->body, from, false); break;
    case ReplicaMessage::fetch: status = on_fetch(from, frame->body); break;
    case ReplicaMessage::manifest:
    case ReplicaMessage::chunk: status = on_piece(from, type, frame->body); break;
    case ReplicaMessage::lacking: status = on_lacking(from, frame->body); break;
    default: break;  // of a newer minor version
  }
  if (!status) {
    ++counters_.refused_frames;
    return status;
  }
  return std::optional<FrameView>();
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::tick(std::int64_t now_ms) {
  if (now_ms > last_now_) elapsed_ += (std::min)(now_ms - last_now_, options_.max_retry_ms);
  last_now_ = now_ms;
  Status status;
  // A store of this replica's own holds nothing that is not joined; it is read so that many records become one.
  if (options_.shared_store || records_read_ + records_written_ >= options_.max_records) status = read_records();
  if (elapsed_ >= next_news_) {
    next_news_ = elapsed_ + jitter(options_.news_interval_ms);
    if (Status posted = post_news(everyone); !posted && status) status = posted;
  }
  // Some a tick, in turn: ids that nobody serves do not keep others waiting.
  std::vector<FragmentId> due;
  auto at = wants_.upper_bound(last_pursued_);
  for (std::size_t seen = 0; seen < wants_.size() && due.size() < 64; ++seen, ++at) {
    if (at == wants_.end()) at = wants_.begin();
    if (at->second.next <= elapsed_) due.push_back(at->first);
  }
  if (!due.empty()) last_pursued_ = due.back();
  for (const FragmentId& id : due) {
    if (Status pursued = pursue(id, wants_.at(id)); !pursued && status) status = pursued;
  }
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

/// Leaves out what no replica takes: operations beyond an author's quota, and such as claim to be this replica's and are not.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Result<FragmentSet> Replica<Store, Auth, Hash, C>::admitted(FragmentSet delta) {
  const auto refused = [&](const Provenance& dot) {
    const bool forged = dot.agent == options_.self && dot.epoch == options_.epoch && dot.sequence >= next_sequence_;
    return (opened_ && forged) || dot.sequence >= options_.max_operations;
  };
  const auto ranges = delta.context().ranges();
  if (std::none_of(ranges.begin(), ranges.end(), [&](const DotRange& r) { return refused({r.agent, r.last, r.epoch}); })) return delta;
  std::vector<FragmentSet::Entry> entries;
  for (FragmentSet::Entry entry : delta.entries()) {
    counters_.refused_operations += std::erase_if(entry.metadata.marks, [&](const Mark& mark) { return refused(mark.dot); });
    if (!entry.metadata.marks.empty() || entry.metadata.unattributed) entries.push_back(std::move(entry));
  }
  std::vector<Removal> removals;
  for (Removal removal : delta.removals()) {
    std::erase_if(removal.removed, refused);
    if (refused(removal.dot)) ++counters_.refused_operations; else removals.push_back(std::move(removal));
  }
  CausalContext compacted;
  for (DotRange range : delta.compacted().ranges()) {
    std::uint64_t end = options_.max_operations;
    if (opened_ && range.agent == options_.self && range.epoch == options_.epoch) end = (std::min)(end, next_sequence_);
    if (range.first >= end) continue;
    range.last = (std::min)(range.last, end - 1);
    compacted.append(range);
  }
  return FragmentSet::from_parts(delta.hash(), std::move(entries), std::move(removals), compacted);
}

/// Takes a delta from a peer or from the store. One from a peer is written down first, unless its author wrote it to the shared store;
/// `everyone` as the sender says that it came by another way, and nobody wrote it.
template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::take(std::span<const std::byte> bytes, MemberId from, bool from_store) {
  auto decoded = from_store ? decode_record(bytes, options_.set_hash) : decode_set(bytes, options_.set_hash);
  if (!decoded) return decoded.error();
  const std::uint64_t refused_before = counters_.refused_operations;
  auto delta = admitted(*std::move(decoded));
  if (!delta) return delta.error();
  const bool news = !leq(delta->context(), set_.context()) || std::any_of(delta->entries().begin(), delta->entries().end(), [&](const auto& entry) {
    const FragmentSet::Entry* const mine = entry.metadata.unattributed ? set_.find(entry.id) : &entry;
    return mine == nullptr || (entry.metadata.unattributed && !mine->metadata.unattributed);
  });
  if (news) {
    if (!from_store && (!options_.shared_store || from == everyone)) KVMELD_TRY(write_down(encode_set(*delta)));
    KVMELD_TRY(set_.join(*delta));
    for (const FragmentSet::Entry& entry : delta->entries()) {
      const FragmentSet::Entry* const mine = set_.find(entry.id);
      if (mine != nullptr) want(*mine, from);
    }
  }
  if (const std::uint64_t refused = counters_.refused_operations - refused_before; refused > 0) {
    return detail::error(ErrorCode::quota_exceeded, refused, " operations were left out: an author may do ", options_.max_operations,
                         " in one life, and nobody may act for this replica");
  }
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::read_records() {
  auto batch = store_->records(cursor_);
  if (!batch) return batch.error();
  if constexpr (requires { { store_->generation() } -> std::convertible_to<std::uint64_t>; }) {
    // A server that came back may have come back with less: what this replica holds is written there again.
    const std::uint64_t generation = store_->generation();
    if (generation_ && *generation_ != generation) KVMELD_TRY(republish());
    generation_ = generation;
  }
  for (const std::vector<std::byte>& record : batch->records) {
    const Status status = take(record, everyone, true);
    if (status) continue;
    const ErrorCode code = status.code();
    if (code != ErrorCode::quota_exceeded) ++counters_.corrupt_records;
    // Damage may go. What this build does not read, or does not take, others may: it stays in the store.
    keep_records_ = keep_records_ || code == ErrorCode::quota_exceeded || code == ErrorCode::version_mismatch || code == ErrorCode::unknown_field ||
                    code == ErrorCode::hash_mismatch;
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
  auto news = detail::decode_news(body);
  if (!news) return news.error();
  if (from == options_.self) return {};
  if (peers_.count(from) == 0 && peers_.size() >= max_peers) return detail::error(ErrorCode::quota_exceeded, "news of member ", from, ", one more than ", max_peers);
  Peer& peer = peers_[from];
  peer.other_merger = news->merger != options_.merger;
  peer.context = std::move(news->context);
  // Equal contexts of unequal sets: one knows a fragment without provenance, which deltas always carry.
  const bool lacks = !leq(peer.context, set_.context()) || (news->digest != set_.digest() && leq(set_.context(), peer.context));
  if (lacks && elapsed_ >= peer.next_want) {
    peer.next_want = elapsed_ + jitter(options_.retry_ms);
    ByteWriter w;
    write_context(w, set_.context());
    KVMELD_TRY(post(from, ReplicaMessage::want, w.written()));
  }
  if (!leq(set_.context(), peer.context) && elapsed_ >= peer.next_news) {
    peer.next_news = elapsed_ + jitter(options_.retry_ms);
    KVMELD_TRY(post_news(from));
  }
  return {};
}

template <BlobStore Store, Authenticator Auth, ContentHash Hash, Compressor C>
Status Replica<Store, Auth, Hash, C>::on_want(MemberId from, std::span<const std::byte> body) {
  ByteReader r(body);
  const CausalContext seen = read_context(r);
  KVMELD_TRY(r.finish("want"));
  if (const auto peer = peers_.find(from); peer != peers_.end()) {  // a whole set for three bytes is not given at any rate
    if (elapsed_ < peer->second.next_delta) return {};
    peer->second.next_delta = elapsed_ + options_.retry_ms / 2;
  }
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
