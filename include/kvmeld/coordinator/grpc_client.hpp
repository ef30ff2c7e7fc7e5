#pragma once

/// A member's client of a coordinator over gRPC.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <kvmeld/coordinator/coordinator.grpc.pb.h>
#include <kvmeld/config.hpp>
#include <kvmeld/coordinator/detail/grpc_convert.hpp>
#include <kvmeld/replica/rounds.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace coordinator {

// The members' side of a coordinator (CMake component kvmeld::grpc).

/// How a member reaches its coordinator, and how long it tries.
struct CoordinatorClientOptions {
  replica::MemberId self = 0;
  replica::FrameOptions frame{};  ///< namespace and secret, as the coordinator's
  replica::FragmentFormat format{};
  TlsOptions tls{};
  std::size_t max_message_bytes = std::size_t{1} << 24;
  /// Raw payloads that one update carries; more of them take several.
  std::uint64_t max_update_bytes = 1U << 28U;
  /// Of one call of this class, whatever it takes: all its requests and their attempts together.
  std::int64_t timeout_ms = 30'000;
  std::int64_t retry_ms = 50;  ///< before the second attempt; doubled each time
  std::int64_t max_retry_ms = 2'000;
  bool use_proxy = false;  ///< whether the environment's http_proxy is between the two
  std::uint64_t seed = 1;  ///< of jitter
};

/// What a client moved so far. Bytes are protobuf messages, without HTTP/2 and TLS around them.
struct CoordinatorTraffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t payload_bytes = 0;  ///< of those, chunks, both ways
  std::uint64_t fragments_sent = 0;
  std::uint64_t fragments_fetched = 0;
  std::uint64_t dedup_hits = 0;  ///< fragments that the coordinator had already
  std::uint64_t retries = 0;
};

/// A round's cut as a member gets it: what to render, ids and metadata. `sync` brings the payloads.
struct MergedCut {
  std::uint64_t round = 0;
  StateVersion version{};
  FragmentSet set{};
  std::vector<replica::MemberId> ready{};
  /// Of the coordinator's whole state when it answered, which `wait_for_change` compares with what
  /// is known.
  Digest256 state{};
};

/// Talks to one coordinator; every call is bounded by the options' timeout, and repeated while the
/// coordinator cannot be reached.
///
/// Repeating is safe: joins and payloads are idempotent. What comes is verified against the ids
/// before it is believed. Not thread-safe; a thread that waits for merges has a client of its own.
class CoordinatorClient {
 public:
  using Options = CoordinatorClientOptions;

  /// @param address "HOST:PORT" or "unix:PATH". Nothing is connected before the first call.
  explicit CoordinatorClient(const std::string& address, Options options = {})
      : options_(std::move(options)), random_(options_.seed) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(static_cast<int>(options_.max_message_bytes));
    arguments.SetMaxSendMessageSize(static_cast<int>(options_.max_message_bytes));
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, options_.use_proxy ? 1 : 0);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, static_cast<int>(options_.retry_ms));
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(options_.retry_ms));
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, static_cast<int>(options_.max_retry_ms));
    if (!options_.tls.server_name.empty())
      arguments.SetSslTargetNameOverride(options_.tls.server_name);
    stub_ = detail::rpc::Coordinator::NewStub(
        grpc::CreateCustomChannel(address, detail::channel_credentials(options_.tls), arguments));
  }

  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const CoordinatorTraffic& traffic() const noexcept { return traffic_; }

  /// The coordinator's version. Errors: `timed_out`, `unavailable`, `unauthenticated`.
  [[nodiscard]] Result<StateVersion> version() {
    Received got;
    KVMELD_TRY(get({}, got, deadline()));
    return *std::move(got.version);
  }

  /// Gives the coordinator every operation and every payload of a set that it lacks. Durable there
  /// when it returns without error.
  ///
  /// Errors: `timed_out`, `unavailable`, `unauthenticated`, `quota_exceeded`, `payload_missing`
  /// where neither side has a payload, and what the coordinator says. It has then taken over all or
  /// nothing of each update; removals and supersessions come with the last.
  [[nodiscard]] Result<StateVersion> publish(const FragmentSet& set);

  /// Joins what the coordinator has and fetches the payloads that the set lacks, verified.
  ///
  /// Errors: as `publish`; `corrupt` and the like for an answer that is wrong. Operations may have
  /// been joined then, and payloads that were whole are kept: call again. A payload that nobody has
  /// stays evicted, and is no error.
  Result<StateVersion> sync(FragmentSet& set);
  /// As `sync`, into a replica and the store that it stands on.
  Result<StateVersion> sync(replica::Replica& replica, replica::BlobStore& store);

  /// Waits at the barrier of a round, from 1 on, for its cut.
  ///
  /// @param seen what this member has published or joined, which the coordinator then waits for
  /// too. Errors: `timed_out` with who is missing, `merger_mismatch`, and those of `version`.
  [[nodiscard]] Result<MergedCut> wait_for_merge(std::uint64_t session, std::uint64_t round,
                                                 const Digest128& merger, const CausalContext& seen,
                                                 std::int64_t timeout_ms) {
    detail::rpc::MergeRequest request;
    request.set_round(round);
    return wait(request, session, merger, seen, timeout_ms);
  }
  /// Waits until the coordinator's state is another than the known one, and holds what was `seen`.
  ///
  /// @param known `version()->set` or an earlier answer's `state`. An answer's `version.set` is of
  ///              its cut, which leaves out what has no payload yet. A payload that comes later
  ///              changes no state.
  [[nodiscard]] Result<MergedCut> wait_for_change(const Digest256& known, const CausalContext& seen,
                                                  std::int64_t timeout_ms) {
    detail::rpc::MergeRequest request;
    request.set_known(detail::to_field(known));
    return wait(request, 0, {}, seen, timeout_ms);
  }

 private:
  using Clock = std::chrono::steady_clock;  // when a call began, nobody sets back
  using Deadline = Clock::time_point;
  [[nodiscard]] Deadline deadline() const {
    return Clock::now() + std::chrono::milliseconds(options_.timeout_ms);
  }
  [[nodiscard]] static std::int64_t left_ms(Deadline until) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
  }

  /// What a state call brought.
  struct Received {
    std::optional<StateVersion> version;
    std::vector<FragmentSet> deltas;
    std::vector<FragmentId> lacking;
    std::map<FragmentId, replica::Assembler> parts;
    std::optional<FragmentId> current;  // whose chunks come
  };

  Result<MergedCut> wait(detail::rpc::MergeRequest& request, std::uint64_t session,
                         const Digest128& merger, const CausalContext& seen,
                         std::int64_t timeout_ms);
  Status get(const detail::rpc::StateRequest& request, Received& into, Deadline until);
  Status take(const detail::rpc::StateReply& reply, Received& into);
  Status send(const FragmentSet& delta, const std::vector<Fragment>& payloads,
              detail::rpc::UpdateReply& reply, Deadline until);
  Result<std::optional<Fragment>> fetch(const FragmentId& id, Deadline until);
  Result<StateVersion> pull(const CausalContext& seen, FragmentSet& into, Deadline until);

  /// Runs a call until it succeeds, is refused, or time is up.
  template <class Attempt>
  Status attempt(Deadline until, const Attempt& call) {
    std::int64_t pause = options_.retry_ms;
    while (true) {
      const std::int64_t remaining_ms = left_ms(until);
      if (remaining_ms <= 0)
        return extend::error(ErrorCode::timed_out, "a call of ", options_.timeout_ms,
                             " ms is over, with more to be asked of the coordinator");
      grpc::ClientContext context;
      // gRPC makes a span of it at once
      const auto ends = std::chrono::system_clock::now() + std::chrono::milliseconds(remaining_ms);
      context.set_deadline(ends);
      const auto expires =
          std::chrono::duration_cast<std::chrono::seconds>(ends.time_since_epoch()).count() + 1;
      const auto token = detail::make_token(options_.frame, options_.self, expires);
      if (!token) return token.error();
      context.AddMetadata(detail::namespace_entry, detail::namespace_bytes(options_.frame.scope));
      context.AddMetadata(detail::token_entry, *token);
      const Status status = call(context);
      if (status || status.code() != ErrorCode::unavailable) return status;
      const auto jittered =
          pause + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(pause / 4 + 1));
      if (left_ms(until) <= jittered) return status;
      ++traffic_.retries;
      std::this_thread::sleep_for(std::chrono::milliseconds(jittered));
      pause = (std::min)(pause * 2, options_.max_retry_ms);
    }
  }

  Options options_;
  std::minstd_rand random_;
  std::unique_ptr<detail::rpc::Coordinator::Stub> stub_;
  CoordinatorTraffic traffic_;
};

// Fragments in a file, for whoever publishes them without this library (CMake component
// kvmeld::grpc).

/// The bytes of a `Parcel` (coordinator.proto): operations with the payloads that are here.
/// O(bytes).
///
/// Errors: those of `make_manifest`; `oversized` for a set of more than 2^31 bytes with its
/// payloads, protobuf's bound.
[[nodiscard]] inline Result<std::string> make_parcel(const FragmentSet& set,
                                                     const replica::FragmentFormat& format = {}) {
  detail::rpc::Parcel out;
  out.set_set(detail::to_field(std::span<const std::byte>(replica::encode_set(set))));
  for (const FragmentSet::Entry& entry : set.entries()) {
    if (!entry.complete()) continue;
    const auto manifest = replica::make_manifest(entry.fragment, format.chunk_bytes, format.hash);
    if (!manifest) return manifest.error();
    auto& sent = *out.add_manifests();
    sent.set_id(detail::to_field(entry.id));
    sent.set_encoded(
        detail::to_field(std::span<const std::byte>(replica::encode_manifest(*manifest))));
    for (std::size_t p = 0; p < manifest->chunks.size(); ++p) {
      const Payload& payload = entry.fragment.payloads()[p];
      for (std::size_t c = 0; c < manifest->chunks[p].size(); ++c) {
        auto& chunk = *out.add_chunks();
        chunk.set_key(detail::to_field(manifest->chunks[p][c]));
        chunk.set_stored(detail::to_field(std::span<const std::byte>(replica::encode_chunk(
            replica::raw_chunk(payload, c, format.chunk_bytes), format.compressor.get(),
            replica::chunk_form(entry.fragment.geometry(), payload, c, format.chunk_bytes)))));
      }
    }
  }
  std::string bytes;
  if (out.ByteSizeLong() >= (std::size_t{1} << 31U) || !out.SerializeToString(&bytes)) {
    return extend::error(ErrorCode::oversized, "a parcel of ", out.ByteSizeLong(),
                         " bytes; protobuf takes less than 2^31");
  }
  return bytes;
}

// How a member gives its coordinator what that lacks, and gets what it lacks itself.

inline Status CoordinatorClient::take(const detail::rpc::StateReply& reply, Received& into) {
  using Item = detail::rpc::StateReply;
  switch (reply.item_case()) {
    case Item::kVersion: {
      auto version = detail::read_version(reply.version());
      if (!version) return version.error();
      into.version = *std::move(version);
      return {};
    }
    case Item::kDelta: {
      auto delta = replica::decode_set(detail::as_bytes(reply.delta()), options_.format.hash);
      if (!delta) return delta.error();
      into.deltas.push_back(*std::move(delta));
      return {};
    }
    case Item::kManifest: {
      auto manifest = replica::decode_manifest(detail::as_bytes(reply.manifest().encoded()),
                                               options_.format.limits(), options_.format.hash);
      if (!manifest) return manifest.error();
      into.current = manifest->fragment.id();
      into.parts.insert_or_assign(
          *into.current,
          replica::Assembler(*std::move(manifest), std::nullopt, options_.format.hash));
      return {};
    }
    case Item::kChunk: {
      const auto key = detail::fixed_field<BlobKey>(reply.chunk().key(), "a chunk's key");
      if (!key) return key.error();
      if (!into.current)
        return extend::error(ErrorCode::corrupt, "chunk ", key->hex(), " came before any manifest");
      traffic_.payload_bytes += reply.chunk().stored().size();
      return into.parts.at(*into.current)
          .add(*key, detail::as_bytes(reply.chunk().stored()), options_.format.compressor.get())
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

inline Status CoordinatorClient::get(const detail::rpc::StateRequest& request, Received& into,
                                     Deadline until) {
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
    return extend::error(ErrorCode::corrupt, "the coordinator's answer names no version");
  return {};
}

inline Status CoordinatorClient::send(const FragmentSet& delta,
                                      const std::vector<Fragment>& payloads,
                                      detail::rpc::UpdateReply& reply, Deadline until) {
  std::vector<replica::Manifest> manifests;
  for (const Fragment& fragment : payloads) {
    auto manifest =
        replica::make_manifest(fragment, options_.format.chunk_bytes, options_.format.hash);
    if (!manifest) return manifest.error();
    manifests.push_back(*std::move(manifest));
  }
  std::vector<std::vector<std::byte>> sets;
  for (std::size_t most = 1024;; most /= 2) {
    sets.clear();
    std::size_t largest = 0;
    for (const FragmentSet& part : replica::messages::cut(delta, most)) {
      sets.push_back(replica::encode_set(part));
      largest = (std::max)(largest, sets.back().size());
    }
    if (largest + 1024 <= options_.max_message_bytes) break;
    if (most == 1)
      return extend::error(ErrorCode::oversized, "one entry of ", largest,
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
          detail::to_field(std::span<const std::byte>(replica::encode_manifest(manifests[f]))));
      open = write();
      for (std::size_t p = 0; open && p < manifests[f].chunks.size(); ++p) {
        const Payload& payload = payloads[f].payloads()[p];
        for (std::size_t c = 0; open && c < manifests[f].chunks[p].size(); ++c) {
          const auto stored = replica::encode_chunk(
              replica::raw_chunk(payload, c, options_.format.chunk_bytes),
              options_.format.compressor.get(),
              replica::chunk_form(payloads[f].geometry(), payload, c, options_.format.chunk_bytes));
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

inline Result<StateVersion> CoordinatorClient::publish(const FragmentSet& set) {
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
        return extend::error(ErrorCode::corrupt, "the coordinator lacks fragment ", id.hex(),
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
    return extend::error(ErrorCode::payload_missing,
                         "neither this member nor the coordinator has the payloads of ",
                         reply.lacking_size(), " fragments");
  }
  return detail::read_version(reply.version());
}

/// A payload by id, whole and verified; none where the coordinator has not got it.
inline Result<std::optional<Fragment>> CoordinatorClient::fetch(const FragmentId& id,
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
      return extend::error(ErrorCode::corrupt, "the coordinator neither gave fragment ", id.hex(),
                           " nor said that it lacks it");
    return Fetched();
  }
  auto fragment = part->second.finish();
  if (!fragment) return fragment.error();
  ++traffic_.fragments_fetched;
  return Fetched(*std::move(fragment));
}

inline Result<StateVersion> CoordinatorClient::pull(const CausalContext& seen, FragmentSet& into,
                                                    Deadline until) {
  detail::rpc::StateRequest request;
  request.set_context(detail::to_field(seen));
  Received got;
  KVMELD_TRY(get(request, got, until));
  for (const FragmentSet& delta : got.deltas) KVMELD_TRY(into.join(delta));
  return *std::move(got.version);
}

inline Result<StateVersion> CoordinatorClient::sync(FragmentSet& set) {
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

inline Result<StateVersion> CoordinatorClient::sync(replica::Replica& replica,
                                                    replica::BlobStore& store) {
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
  KVMELD_TRY(replica.join(news, replica::everyone));
  return version;
}

inline Result<MergedCut> CoordinatorClient::wait(detail::rpc::MergeRequest& request,
                                                 std::uint64_t session, const Digest128& merger,
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
  auto set = replica::decode_set(detail::as_bytes(reply.set()), options_.format.hash);
  if (!set) return set.error();
  if (set->digest() != version->set) {
    return extend::error(ErrorCode::id_mismatch, "the cut of round ", reply.round(), " is of set ",
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

}  // namespace coordinator

KVMELD_NAMESPACE_END
