#pragma once

/// How a member gives its coordinator what that lacks, and gets what it lacks itself.

#include <kvmeld/transport/grpc_client.hpp>

KVMELD_NAMESPACE_BEGIN

template <Authenticator Auth, ContentHash Hash, Compressor C>
Status CoordinatorClient<Auth, Hash, C>::take(const detail::rpc::StateReply& reply,
                                              Received& into) {
  using Item = detail::rpc::StateReply;
  switch (reply.item_case()) {
    case Item::kVersion: {
      auto version = detail::read_version(reply.version());
      if (!version) return version.error();
      into.version = *std::move(version);
      return {};
    }
    case Item::kDelta: {
      auto delta = decode_set(detail::as_bytes(reply.delta()), options_.set_hash);
      if (!delta) return delta.error();
      into.deltas.push_back(*std::move(delta));
      return {};
    }
    case Item::kManifest: {
      auto manifest = decode_manifest<Hash>(detail::as_bytes(reply.manifest().encoded()),
                                            options_.format.limits());
      if (!manifest) return manifest.error();
      into.current = manifest->fragment.id();
      into.parts.insert_or_assign(*into.current, Assembler<Hash>(*std::move(manifest)));
      return {};
    }
    case Item::kChunk: {
      const auto key = detail::fixed_field<BlobKey>(reply.chunk().key(), "a chunk's key");
      if (!key) return key.error();
      if (!into.current)
        return detail::error(ErrorCode::corrupt, "chunk ", key->hex(), " came before any manifest");
      traffic_.payload_bytes += reply.chunk().stored().size();
      return into.parts.at(*into.current)
          .add(*key, detail::as_bytes(reply.chunk().stored()), options_.format.compressor)
          .status();
    }
    case Item::kLacking: {
      const auto id = detail::fixed_field<FragmentId>(reply.lacking(), "a fragment's id");
      if (!id) return id.error();
      into.lacking.push_back(*id);
      return {};
    }
    case Item::ITEM_NOT_SET:
      break;
  }
  return {};  // of a newer minor version
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
Status CoordinatorClient<Auth, Hash, C>::get(const detail::rpc::StateRequest& request,
                                             Received& into, Deadline until) {
  const Status status = attempt(until, [&](grpc::ClientContext& context) {
    into.version.reset();
    into.deltas.clear();
    into.lacking.clear();
    into.current.reset();
    traffic_.sent_bytes += request.ByteSizeLong();
    const auto reader = stub_->GetGlobalState(&context, request);
    detail::rpc::StateReply reply;
    while (reader->Read(&reply)) {
      traffic_.received_bytes += reply.ByteSizeLong();
      if (Status taken = take(reply, into); !taken) {
        context.TryCancel();
        (void)reader->Finish();
        return taken;
      }
    }
    return from_grpc(reader->Finish());
  });
  if (!status) return status;
  if (!into.version)
    return detail::error(ErrorCode::corrupt, "the coordinator's answer names no version");
  return {};
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
Status CoordinatorClient<Auth, Hash, C>::send(const FragmentSet& delta,
                                              const std::vector<Fragment>& payloads,
                                              detail::rpc::UpdateReply& reply, Deadline until) {
  std::vector<Manifest> manifests;
  for (const Fragment& fragment : payloads) {
    auto manifest = make_manifest<Hash>(fragment, options_.format.chunk_bytes);
    if (!manifest) return manifest.error();
    manifests.push_back(*std::move(manifest));
  }
  std::vector<std::vector<std::byte>> sets;
  for (std::size_t most = 1024;; most /= 2) {
    sets.clear();
    std::size_t largest = 0;
    for (const FragmentSet& part : detail::cut(delta, most)) {
      sets.push_back(encode_set(part));
      largest = (std::max)(largest, sets.back().size());
    }
    if (largest + 1024 <= options_.max_message_bytes) break;
    if (most == 1)
      return detail::error(ErrorCode::oversized, "one entry of ", largest,
                           " bytes where messages have at most ", options_.max_message_bytes);
  }
  return attempt(until, [&](grpc::ClientContext& context) {
    reply.Clear();
    const auto writer = stub_->UpdateCache(&context, &reply);
    detail::rpc::UpdateRequest request;
    std::uint64_t items = 0;
    const auto write = [&] {
      traffic_.sent_bytes += request.ByteSizeLong();
      ++items;
      return writer->Write(request);
    };
    bool open = true;
    for (std::size_t s = 0; open && s < sets.size(); ++s) {
      request.set_set(detail::to_field(std::span<const std::byte>(sets[s])));
      open = write();
    }
    for (std::size_t f = 0; open && f < manifests.size(); ++f) {
      request.mutable_manifest()->set_id(detail::to_field(payloads[f].id()));
      request.mutable_manifest()->set_encoded(
          detail::to_field(std::span<const std::byte>(encode_manifest(manifests[f]))));
      open = write();
      for (std::size_t p = 0; open && p < manifests[f].chunks.size(); ++p) {
        const Payload& payload = payloads[f].payloads()[p];
        for (std::size_t c = 0; open && c < manifests[f].chunks[p].size(); ++c) {
          const auto stored = encode_chunk(
              raw_chunk(payload, c, options_.format.chunk_bytes), options_.format.compressor,
              chunk_form(payloads[f].geometry(), payload, c, options_.format.chunk_bytes));
          request.mutable_chunk()->set_key(detail::to_field(manifests[f].chunks[p][c]));
          request.mutable_chunk()->set_stored(detail::to_field(std::span<const std::byte>(stored)));
          traffic_.payload_bytes += stored.size();
          open = write();
        }
      }
    }
    if (open) {
      request.set_items(items);
      (void)write();
      (void)writer->WritesDone();
    }
    const Status status = from_grpc(writer->Finish());
    if (status) traffic_.received_bytes += reply.ByteSizeLong();
    return status;
  });
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
Result<StateVersion> CoordinatorClient<Auth, Hash, C>::publish(const FragmentSet& set) {
  const Deadline until = deadline();
  std::vector<const FragmentSet::Entry*> complete;
  for (const FragmentSet::Entry& entry : set.entries()) {
    if (entry.complete()) complete.push_back(&entry);
  }
  // What the coordinator lacks, in questions of a bounded size; then its payloads, and the
  // operations with the first of them.
  Received known;
  std::vector<Fragment> payloads;
  constexpr std::size_t most = 1024;
  for (std::size_t begin = 0; begin == 0 || begin < complete.size(); begin += most) {
    detail::rpc::StateRequest request;
    for (std::size_t i = begin; i < (std::min)(begin + most, complete.size()); ++i)
      request.add_probes(detail::to_field(complete[i]->id));
    KVMELD_TRY(get(request, known, until));
    for (const FragmentId& id : known.lacking) {
      const FragmentSet::Entry* const entry = set.find(id);
      if (entry == nullptr || !entry->complete())
        return detail::error(ErrorCode::corrupt, "the coordinator lacks fragment ", id.hex(),
                             ", which was not named");
      payloads.push_back(entry->fragment);
    }
  }
  const FragmentSet delta = set.delta_since(known.version->context);
  traffic_.dedup_hits += complete.size() - payloads.size();
  // Entries without provenance are in every delta, since no context tells of them; equal sets have
  // them alike.
  if (payloads.empty() && leq(set.context(), known.version->context) &&
      (delta.empty() || set.digest() == known.version->set))
    return *std::move(known.version);
  detail::rpc::UpdateReply reply;
  std::vector<Fragment> batch;
  std::uint64_t bytes = 0;
  for (Fragment& fragment : payloads) {
    std::uint64_t more = 0;
    for (const Payload& payload : fragment.payloads()) more += payload.byte_count;
    if (!batch.empty() && bytes + more > options_.max_update_bytes) {
      std::vector<FragmentSet::Entry> entries;
      for (const Fragment& one : batch) {
        if (const FragmentSet::Entry* const entry = delta.find(one.id())) entries.push_back(*entry);
      }
      std::sort(entries.begin(), entries.end(),
                [](const auto& a, const auto& b) { return a.id < b.id; });
      const auto part = FragmentSet::from_parts(delta.hash(), std::move(entries), {}, {});
      if (!part) return part.error();
      KVMELD_TRY(send(*part, batch, reply, until));
      traffic_.fragments_sent += batch.size();
      batch.clear();
      bytes = 0;
    }
    bytes += more;
    batch.push_back(std::move(fragment));
  }
  KVMELD_TRY(send(delta, batch, reply, until));
  traffic_.fragments_sent += batch.size();
  if (reply.lacking_size() > 0) {
    return detail::error(ErrorCode::payload_missing,
                         "neither this member nor the coordinator has the payloads of ",
                         reply.lacking_size(), " fragments");
  }
  return detail::read_version(reply.version());
}

/// A payload by id, whole and verified; none where the coordinator has not got it.
template <Authenticator Auth, ContentHash Hash, Compressor C>
Result<std::optional<Fragment>> CoordinatorClient<Auth, Hash, C>::fetch(const FragmentId& id,
                                                                        Deadline until) {
  using Fetched = std::optional<Fragment>;
  detail::rpc::StateRequest request;
  auto& want = *request.add_wants();
  want.set_id(detail::to_field(id));
  want.set_whole(true);
  Received got;
  KVMELD_TRY(get(request, got, until));
  const auto part = got.parts.find(id);
  if (part == got.parts.end()) {
    if (got.lacking.empty())
      return detail::error(ErrorCode::corrupt, "the coordinator neither gave fragment ", id.hex(),
                           " nor said that it lacks it");
    return Fetched();
  }
  auto fragment = part->second.finish();
  if (!fragment) return fragment.error();
  ++traffic_.fragments_fetched;
  return Fetched(*std::move(fragment));
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
Result<StateVersion> CoordinatorClient<Auth, Hash, C>::pull(const CausalContext& seen,
                                                            FragmentSet& into, Deadline until) {
  detail::rpc::StateRequest request;
  request.set_context(detail::to_field(seen));
  Received got;
  KVMELD_TRY(get(request, got, until));
  for (const FragmentSet& delta : got.deltas) KVMELD_TRY(into.join(delta));
  return *std::move(got.version);
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
Result<StateVersion> CoordinatorClient<Auth, Hash, C>::sync(FragmentSet& set) {
  const Deadline until = deadline();
  FragmentSet after = set;
  auto version = pull(set.context(), after, until);
  if (!version) return version;
  set = std::move(after);
  std::vector<FragmentId> lacking;
  for (const FragmentSet::Entry& entry : set.entries()) {
    if (!entry.complete()) lacking.push_back(entry.id);
  }
  for (const FragmentId& id : lacking) {
    const auto fragment = fetch(id, until);
    if (!fragment) return fragment.error();
    if (fragment->has_value()) KVMELD_TRY(set.restore(**fragment));
  }
  return version;
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
template <BlobStore Store>
Result<StateVersion> CoordinatorClient<Auth, Hash, C>::sync(Replica<Store, Auth, Hash, C>& replica,
                                                            Store& store) {
  const Deadline until = deadline();
  FragmentSet news(replica.set().hash());
  auto version = pull(replica.set().context(), news, until);
  if (!version) return version;
  // What lacks a payload after this, known since long or new: the coordinator may have got one
  // meanwhile.
  FragmentSet after = replica.set();
  KVMELD_TRY(after.join(news));
  for (const FragmentSet::Entry& entry : after.entries()) {
    if (entry.complete()) continue;
    const auto fragment = fetch(entry.id, until);
    if (!fragment) return fragment.error();
    if (!fragment->has_value()) continue;
    if (const auto stored = store_fragment(store, **fragment, options_.format); !stored)
      return stored.error();
  }
  // The replica writes the operations down and finds the payloads in its store with its next ticks.
  KVMELD_TRY(replica.join(news, everyone));
  return version;
}

template <Authenticator Auth, ContentHash Hash, Compressor C>
Result<MergedCut> CoordinatorClient<Auth, Hash, C>::wait(detail::rpc::MergeRequest& request,
                                                         std::uint64_t session,
                                                         const Digest128& merger,
                                                         const CausalContext& seen,
                                                         std::int64_t timeout_ms) {
  request.set_session(session);
  request.set_merger(detail::to_field(merger));
  request.set_context(detail::to_field(seen));
  const Deadline until = Clock::now() + std::chrono::milliseconds(timeout_ms);
  detail::rpc::MergeReply reply;
  // The coordinator says why nothing came; should it be gone, the call ends a little later by
  // itself.
  KVMELD_TRY(attempt(until + std::chrono::milliseconds(1'000), [&](grpc::ClientContext& context) {
    request.set_timeout_ms(static_cast<std::uint64_t>((std::max<std::int64_t>)(left_ms(until), 0)));
    traffic_.sent_bytes += request.ByteSizeLong();
    return from_grpc(stub_->WaitForMerge(&context, request, &reply));
  }));
  traffic_.received_bytes += reply.ByteSizeLong();
  auto version = detail::read_version(reply.version());
  if (!version) return version.error();
  auto set = decode_set(detail::as_bytes(reply.set()), options_.set_hash);
  if (!set) return set.error();
  if (set->digest() != version->set) {
    return detail::error(ErrorCode::id_mismatch, "the cut of round ", reply.round(), " is of set ",
                         set->digest().hex(), ", its version says ", version->set.hex());
  }
  MergedCut out{reply.round(),
                *std::move(version),
                *std::move(set),
                {reply.ready().begin(), reply.ready().end()},
                {}};
  if (reply.state().empty()) return out;  // of an older coordinator, or of a round
  const auto state = detail::fixed_field<Digest256>(reply.state(), "a state's digest");
  if (!state) return state.error();
  out.state = *state;
  return out;
}

KVMELD_NAMESPACE_END
