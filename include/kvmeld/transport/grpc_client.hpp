#pragma once

/// The members' side of a coordinator (CMake component kvmeld::grpc).

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

#include <kvmeld/transport/coordinator.grpc.pb.h>
#include <kvmeld/session/round_cut.hpp>
#include <kvmeld/transport/grpc_convert.hpp>
#include <kvmeld/transport/grpc_status.hpp>

KVMELD_NAMESPACE_BEGIN

/// How a member reaches its coordinator, and how long it tries.
template <Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
struct CoordinatorClientOptions {
  MemberId self = 0;
  FrameOptions<Auth> frame{};  ///< namespace and secret, as the coordinator's
  FragmentFormat<Hash, C> format{};
  SetHash set_hash = set_hash_of<Hash>();
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
  std::vector<MemberId> ready{};
  /// Of the coordinator's whole state when it answered, which `wait_for_change` compares with what
  /// is known.
  Digest256 state{};
};

/// Talks to one coordinator; every call is bounded by the options' timeout, and repeated while the
/// coordinator cannot be reached.
///
/// Repeating is safe: joins and payloads are idempotent. What comes is verified against the ids
/// before it is believed. Not thread-safe; a thread that waits for merges has a client of its own.
template <Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
class CoordinatorClient {
 public:
  using Options = CoordinatorClientOptions<Auth, Hash, C>;

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
  template <BlobStore Store>
  Result<StateVersion> sync(Replica<Store, Auth, Hash, C>& replica, Store& store);

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
  ///              its cut, which leaves out what is superseded and what has no payload yet. A
  ///              payload that comes later changes no state.
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
    std::map<FragmentId, Assembler<Hash>> parts;
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
        return detail::error(ErrorCode::timed_out, "a call of ", options_.timeout_ms,
                             " ms is over, with more to be asked of the coordinator");
      grpc::ClientContext context;
      // gRPC makes a span of it at once
      const auto ends = std::chrono::system_clock::now() + std::chrono::milliseconds(remaining_ms);
      context.set_deadline(ends);
      const auto expires =
          std::chrono::duration_cast<std::chrono::seconds>(ends.time_since_epoch()).count() + 1;
      const auto token = detail::make_token(options_.frame, options_.self, expires);
      if (!token) return token.error();
      context.AddMetadata(detail::namespace_entry,
                          detail::namespace_bytes(options_.frame.name_space));
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

KVMELD_NAMESPACE_END

#include <kvmeld/transport/grpc_client_calls.hpp>
