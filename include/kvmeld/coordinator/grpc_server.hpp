#pragma once

/// A coordinator served over gRPC.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <kvmeld/coordinator/coordinator.grpc.pb.h>
#include <kvmeld/config.hpp>
#include <kvmeld/coordinator/detail/grpc_convert.hpp>

KVMELD_NAMESPACE_BEGIN

namespace coordinator {

// A coordinator behind gRPC (CMake component kvmeld::grpc).

/// Serves a `Coordinator` to clients of any language: coordinator.proto says what they may ask.
///
/// Calls are callbacks: a client that is slow, or gone, holds one message and no thread, and is
/// cancelled at `max_call_ms`. Barriers are looked at by one thread, some hundred times a second
/// while anybody waits.
class CoordinatorServer {
 public:
  using Core = Coordinator;
  using Options = CoordinatorOptions;

  /// @param store as for `Coordinator`, and durable where a restart shall lose nothing.
  CoordinatorServer(replica::ArbiterStore& store, Options options)
      : core_(store, std::move(options)) {}
  CoordinatorServer(const CoordinatorServer&) = delete;
  CoordinatorServer& operator=(const CoordinatorServer&) = delete;
  ~CoordinatorServer() { stop(); }

  /// Takes up what the store has, and listens on "HOST:PORT" (port 0: any) or "unix:PATH".
  ///
  /// Errors: those of `Coordinator::open`; `unavailable` where the address cannot be used, or
  /// certificate and key do not fit.
  Status start(const std::string& address, const TlsOptions& tls = {}) {
    if (server_ != nullptr)
      return extend::error(ErrorCode::invalid_argument,
                           "this coordinator listens already, on port ", port_);
    KVMELD_TRY(core_.open());
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, detail::server_credentials(tls), &port_);
    const auto most = static_cast<int>(core_.options().replica.max_message_bytes);
    builder.SetMaxReceiveMessageSize(most);
    builder.SetMaxSendMessageSize(most);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr)
      return extend::error(ErrorCode::unavailable, "cannot listen on ", address);
    stopping_ = false;
    clock_ = std::thread([this] { watch(); });
    return {};
  }
  /// Ends every call and waits for them. What was answered is in the store.
  void stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    clock_.join();
    server_.reset();
  }

  /// The TCP port that it listens on; 1 for a Unix socket.
  [[nodiscard]] int port() const noexcept { return port_; }
  [[nodiscard]] Core& core() noexcept { return core_; }

 private:
  using Clock = std::chrono::steady_clock;
  [[nodiscard]] static std::int64_t now_ms() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch())
        .count();
  }

  /// What the clock must know of a call that has not ended, and who makes it.
  class Call {
   public:
    Call(CoordinatorServer& server, grpc::CallbackServerContext* context)
        : server_(server), context_(context), member_(who()) {
      const std::lock_guard lock(server_.mutex_);
      const auto& options = server_.core_.options();
      number_ = ++server_.calls_begun_;
      if (server_.calls_.size() >= options.max_calls) {
        member_ = extend::error(ErrorCode::quota_exceeded, options.max_calls,
                                " calls are open; come back later");
      }
      if (member_) {
        const replica::MemberId member = *member_;
        if (std::size_t& open = server_.member_calls_[member]; ++open > options.max_member_calls) {
          --open;
          member_ = extend::error(ErrorCode::quota_exceeded, options.max_member_calls,
                                  " calls of member ", member, " are open; come back later");
        } else {
          counted_ = member;
        }
      }
      server_.calls_.emplace(number_, Limit{context, now_ms() + options.max_call_ms});
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      const std::lock_guard lock(server_.mutex_);
      server_.calls_.erase(number_);
      if (!counted_) return;
      const auto at = server_.member_calls_.find(*counted_);
      if (--at->second == 0) server_.member_calls_.erase(at);
    }
    /// Who calls. Errors: `unauthenticated`, `quota_exceeded` where too many calls are open.
    [[nodiscard]] const Result<replica::MemberId>& member() const noexcept { return member_; }

   protected:
    CoordinatorServer& server_;
    grpc::CallbackServerContext* context_;
    std::uint64_t number_ = 0;

   private:
    [[nodiscard]] Result<replica::MemberId> who() const {
      const auto& options = server_.core_.options();
      const auto& entries = context_->client_metadata();
      const auto entry = [&](const char* name) {
        const auto at = entries.find(name);
        return at == entries.end() ? std::string_view()
                                   : std::string_view(at->second.data(), at->second.size());
      };
      const auto now = std::chrono::system_clock::now().time_since_epoch();
      const auto now_s = std::chrono::duration_cast<std::chrono::seconds>(now).count();
      return detail::check_token(options.replica.frame, entry(detail::namespace_entry),
                                 entry(detail::token_entry), now_s, options.token_lifetime_s,
                                 options.clock_difference_s);
    }

    Result<replica::MemberId> member_;
    std::optional<replica::MemberId> counted_;
  };
  struct Limit {
    grpc::CallbackServerContext* context;
    std::int64_t until_ms;
  };

  class UpdateCall final : public grpc::ServerReadReactor<detail::rpc::UpdateRequest>, Call {
   public:
    UpdateCall(CoordinatorServer& server, grpc::CallbackServerContext* context,
               detail::rpc::UpdateReply* reply)
        : Call(server, context),
          update_(server.core_.begin_update(this->member() ? *this->member() : nobody)),
          reply_(reply) {
      const auto& member = this->member();
      if (member) {
        this->StartRead(&request_);
      } else {
        this->Finish(to_grpc(member.error()));
      }
    }
    void OnReadDone(bool ok) override {
      if (!ok) return end();
      if (const Status status = take(); !status) return this->Finish(to_grpc(status));
      this->StartRead(&request_);
    }
    void OnDone() override { delete this; }

   private:
    static constexpr replica::MemberId nobody =
        replica::everyone - 1;  // whose call ends before it brings anything

    Status take() {
      using Item = detail::rpc::UpdateRequest;
      if (update_.ended())
        return extend::error(ErrorCode::invalid_argument, "an item behind the end of an update");
      switch (request_.item_case()) {
        case Item::kSet:
          return update_.add_set(detail::as_bytes(request_.set()));
        case Item::kManifest: {
          const auto id =
              detail::fixed_field<FragmentId>(request_.manifest().id(), "a fragment's id");
          return id ? update_.add_manifest(*id, detail::as_bytes(request_.manifest().encoded()))
                    : id.error();
        }
        case Item::kChunk: {
          const auto key = detail::fixed_field<BlobKey>(request_.chunk().key(), "a chunk's key");
          return key ? update_.add_chunk(*key, detail::as_bytes(request_.chunk().stored()))
                     : key.error();
        }
        case Item::kItems:
          return update_.end(request_.items());
        case Item::ITEM_NOT_SET:
          break;
      }
      return extend::error(ErrorCode::unknown_field, "item ", update_.items(),
                           " of an update is none that this build knows");
    }
    void end() {
      if (this->context_->IsCancelled()) return this->Finish(grpc::Status::CANCELLED);
      const auto applied = this->server_.core_.apply(update_);
      if (!applied) return this->Finish(to_grpc(applied.error()));
      detail::fill(*reply_->mutable_version(), applied->version);
      for (const FragmentId& id : applied->lacking) reply_->add_lacking(detail::to_field(id));
      this->server_.changed_.notify_all();
      this->Finish(grpc::Status::OK);
    }

    Core::Update update_;
    detail::rpc::UpdateRequest request_;
    detail::rpc::UpdateReply* reply_;
  };

  class StateCall;
  class MergeCall;

  class Service final : public detail::rpc::Coordinator::CallbackService {
   public:
    explicit Service(CoordinatorServer& server) : server_(server) {}
    grpc::ServerReadReactor<detail::rpc::UpdateRequest>* UpdateCache(
        grpc::CallbackServerContext* context, detail::rpc::UpdateReply* reply) override {
      return new UpdateCall(server_, context, reply);
    }
    grpc::ServerWriteReactor<detail::rpc::StateReply>* GetGlobalState(
        grpc::CallbackServerContext* context, const detail::rpc::StateRequest* request) override;
    grpc::ServerUnaryReactor* WaitForMerge(grpc::CallbackServerContext* context,
                                           const detail::rpc::MergeRequest* request,
                                           detail::rpc::MergeReply* reply) override;

   private:
    CoordinatorServer& server_;
  };

  void watch();

  Core core_;
  Service service_{*this};
  std::unique_ptr<grpc::Server> server_;
  std::thread clock_;
  // Guards what follows. Recursive: to cancel a call may run its callbacks on the thread that
  // cancels it, and only under this lock is it certain that the call still exists.
  std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  std::map<std::uint64_t, Limit> calls_;
  std::map<std::uint64_t, MergeCall*> waiting_;
  std::map<replica::MemberId, std::size_t> member_calls_;
  std::uint64_t calls_begun_ = 0;
  bool stopping_ = false;
  int port_ = 0;
};

// The calls that give out state, and those that wait for a merge.

/// Streams deltas and payloads; one message exists at a time, made when the client has taken the
/// one before.
class CoordinatorServer::StateCall final : public grpc::ServerWriteReactor<detail::rpc::StateReply>,
                                           Call {
 public:
  StateCall(CoordinatorServer& server, grpc::CallbackServerContext* context,
            const detail::rpc::StateRequest* request)
      : Call(server, context), request_(request) {
    if (const Status status = begin(); !status) {
      this->Finish(to_grpc(status));
    } else {
      this->StartWrite(&reply_);
    }
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return this->Finish(grpc::Status::CANCELLED);
    reply_.Clear();
    const auto more = next();
    if (!more) return this->Finish(to_grpc(more.error()));
    if (!*more) return this->Finish(grpc::Status::OK);
    this->StartWrite(&reply_);
  }
  void OnDone() override { delete this; }

 private:
  static constexpr int most_wanted = 4096;

  Status begin() {
    const auto member = this->member();
    if (!member) return member.error();
    if (request_->wants_size() > most_wanted || request_->probes_size() > most_wanted) {
      return extend::error(ErrorCode::oversized, "a request for ", request_->wants_size(),
                           " fragments and ", request_->probes_size(), " probes; at most ",
                           most_wanted, " of each");
    }
    auto& core = this->server_.core_;
    StateVersion version = core.version();
    if (request_->has_context()) {
      const auto seen = detail::context_field(request_->context(), core.options().max_ranges);
      if (!seen) return seen.error();
      core.saw(*member, *seen);
      auto deltas = core.deltas(*seen);
      if (!deltas) return deltas.error();
      deltas_ = *std::move(deltas);
    }
    detail::fill(*reply_.mutable_version(), version);
    return {};
  }
  /// Fills the next reply; false at the end.
  Result<bool> next() {
    if (delta_ < deltas_.size()) {
      reply_.set_delta(detail::to_field(deltas_[delta_]));
      deltas_[delta_++].clear();
      return true;
    }
    while (probe_ < request_->probes_size()) {
      const std::string& field = request_->probes(probe_++);
      const auto id = detail::fixed_field<FragmentId>(field, "a fragment's id");
      if (!id) return id.error();
      if (this->server_.core_.fragment(*id)) continue;
      reply_.set_lacking(field);
      return true;
    }
    while (want_ < request_->wants_size()) {
      const auto given = next_of(request_->wants(want_));
      if (!given || *given) return given;
      ++want_;
      step_ = 0;
      manifest_.reset();
    }
    return false;
  }
  /// Step 0 is the manifest, where it is wanted; the others are chunks.
  Result<bool> next_of(const detail::rpc::Want& want) {
    if (!manifest_) {
      const auto id = detail::fixed_field<FragmentId>(want.id(), "a fragment's id");
      if (!id) return id.error();
      const auto fragment = this->server_.core_.fragment(*id);
      const auto& format = this->server_.core_.options().replica.format;
      auto manifest = fragment ? load_manifest(this->server_.core_.store(), *id, format)
                               : Result<replica::Manifest>(fragment.error());
      if (fragment && !manifest)
        manifest = replica::make_manifest(*fragment, format.chunk_bytes, format.hash);
      if (!manifest) {
        if (step_++ > 0) return false;
        reply_.set_lacking(want.id());
        return true;
      }
      manifest_ = *std::move(manifest);
      fragment_ = *fragment;
      wanted_.clear();
      list_chunks(want);
      if (want.whole() || want.chunks_size() == 0) {
        give_manifest();
        return true;
      }
    }
    if (step_ >= wanted_.size()) return false;
    const auto [payload, chunk] = wanted_[step_++];
    if (payload >= manifest_->chunks.size()) {
      reply_.set_lacking(want.id());
      return true;
    }
    const BlobKey& key = manifest_->chunks[payload][chunk];
    reply_.mutable_chunk()->set_key(detail::to_field(key));
    if (const auto stored = this->server_.core_.store().get(key)) {
      reply_.mutable_chunk()->set_stored(detail::to_field(stored->bytes()));
    } else {
      const Payload& of = fragment_.payloads()[payload];
      const std::size_t bytes = manifest_->chunk_bytes;
      reply_.mutable_chunk()->set_stored(detail::to_field(std::span<const std::byte>(
          replica::encode_chunk(replica::raw_chunk(of, chunk, bytes),
                                this->server_.core_.options().replica.format.compressor.get(),
                                replica::chunk_form(fragment_.geometry(), of, chunk, bytes)))));
    }
    return true;
  }
  /// Where the wanted chunks lie, as (payload, chunk); beyond the last payload: nowhere.
  void list_chunks(const detail::rpc::Want& want) {
    for (std::size_t p = 0; want.whole() && p < manifest_->chunks.size(); ++p) {
      for (std::size_t c = 0; c < manifest_->chunks[p].size(); ++c) wanted_.emplace_back(p, c);
    }
    if (want.whole() || want.chunks_size() == 0) return;
    std::map<std::string, std::pair<std::size_t, std::size_t>> places;
    for (std::size_t p = 0; p < manifest_->chunks.size(); ++p) {
      for (std::size_t c = 0; c < manifest_->chunks[p].size(); ++c)
        places.emplace(detail::to_field(manifest_->chunks[p][c]), std::pair(p, c));
    }
    for (const std::string& key : want.chunks()) {
      const auto at = places.find(key);
      wanted_.push_back(at == places.end() ? std::pair(manifest_->chunks.size(), std::size_t{0})
                                           : at->second);
    }
  }
  void give_manifest() {
    auto& out = *reply_.mutable_manifest();
    out.set_id(detail::to_field(manifest_->fragment.id()));
    out.set_encoded(
        detail::to_field(std::span<const std::byte>(replica::encode_manifest(*manifest_))));
    for (std::size_t p = 0; p < manifest_->chunks.size(); ++p) {
      auto& plan = *out.add_plan();
      plan.set_bytes(manifest_->fragment.payloads()[p].byte_count);
      for (const BlobKey& key : manifest_->chunks[p]) plan.add_chunks(detail::to_field(key));
    }
  }

  const detail::rpc::StateRequest* request_;
  detail::rpc::StateReply reply_;
  std::vector<std::vector<std::byte>> deltas_;
  std::size_t delta_ = 0;
  int probe_ = 0;
  int want_ = 0;
  std::optional<replica::Manifest> manifest_;  // of the fragment that is being given
  Fragment fragment_;
  std::vector<std::pair<std::size_t, std::size_t>> wanted_;
  std::size_t step_ = 0;
};

/// Waits without a thread: `watch` looks whether there is an answer. Whoever takes the call out of
/// `waiting_` ends it.
class CoordinatorServer::MergeCall final : public grpc::ServerUnaryReactor, Call {
 public:
  MergeCall(CoordinatorServer& server, grpc::CallbackServerContext* context,
            const detail::rpc::MergeRequest* request, detail::rpc::MergeReply* reply)
      : Call(server, context), reply_(reply) {
    Status status = begin(*request);
    if (status) status = server.core_.arrive(*ask_, now_ms());
    arrived_ = status.ok();
    if (!arrived_) {
      this->Finish(to_grpc(status));
      return;
    }
    {
      const std::lock_guard lock(server.mutex_);
      server.waiting_.emplace(this->number_, this);
    }
    server.changed_.notify_all();
  }
  void OnCancel() override {
    {
      const std::lock_guard lock(this->server_.mutex_);
      if (this->server_.waiting_.erase(this->number_) == 0) return;
    }
    this->Finish(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    if (arrived_) this->server_.core_.leave(*ask_);
    delete this;
  }
  [[nodiscard]] std::shared_ptr<const MergeAsk> ask() const noexcept { return ask_; }
  /// Only for whoever took the call out of `waiting_`.
  void answer(const Result<MergeAnswer>& answer) {
    if (!answer) return this->Finish(to_grpc(answer.error()));
    const FragmentSet& set = answer->cut.set;
    reply_->set_round(answer->cut.round);
    detail::fill(*reply_->mutable_version(), {set.context(), set.digest(), answer->cut.merger});
    reply_->set_set(detail::to_field(std::span<const std::byte>(replica::encode_set(set))));
    for (const replica::MemberId member : answer->ready) reply_->add_ready(member);
    if (answer->cut.round == 0) reply_->set_state(detail::to_field(answer->state));
    this->Finish(grpc::Status::OK);
  }

 private:
  Status begin(const detail::rpc::MergeRequest& request) {
    const auto member = this->member();
    if (!member) return member.error();
    ask_->member = *member;
    ask_->session = request.session();
    ask_->round = request.round();
    const auto merger = detail::fixed_field<Digest128>(request.merger(), "a merger digest");
    if (!merger) return merger.error();
    ask_->merger = *merger;
    auto context =
        detail::context_field(request.context(), this->server_.core_.options().max_ranges);
    if (!context) return context.error();
    ask_->context = *std::move(context);
    if (ask_->round == 0 && !request.known().empty()) {
      const auto known = detail::fixed_field<Digest256>(request.known(), "a set digest");
      if (!known) return known.error();
      ask_->known = *known;
    }
    const auto most = static_cast<std::uint64_t>(this->server_.core_.options().max_wait_ms);
    ask_->timeout_ms = static_cast<std::int64_t>((std::min)(request.timeout_ms(), most));
    return {};
  }

  // `watch` looks at it while the call may end
  std::shared_ptr<MergeAsk> ask_ = std::make_shared<MergeAsk>();
  detail::rpc::MergeReply* reply_;
  bool arrived_ = false;
};

inline grpc::ServerWriteReactor<detail::rpc::StateReply>*
CoordinatorServer::Service::GetGlobalState(grpc::CallbackServerContext* context,
                                           const detail::rpc::StateRequest* request) {
  return new StateCall(server_, context, request);
}
inline grpc::ServerUnaryReactor* CoordinatorServer::Service::WaitForMerge(
    grpc::CallbackServerContext* context, const detail::rpc::MergeRequest* request,
    detail::rpc::MergeReply* reply) {
  return new MergeCall(server_, context, request, reply);
}

/// Ends calls that have waited or lasted long enough.
inline void CoordinatorServer::watch() {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  while (!stopping_) {
    const std::int64_t now = now_ms();
    std::vector<std::uint64_t> late;
    for (const auto& [number, limit] : calls_) {
      if (now >= limit.until_ms) late.push_back(number);
    }
    for (const std::uint64_t number : late) {
      const auto at = calls_.find(number);
      if (at == calls_.end()) continue;
      at->second.until_ms = now + 1000;
      at->second.context->TryCancel();
    }
    // Asked without the lock, which calls need to come and go; then whoever is still there gets the
    // answer.
    std::vector<std::pair<std::uint64_t, std::shared_ptr<const MergeAsk>>> asks;
    for (const auto& [number, call] : waiting_) asks.emplace_back(number, call->ask());
    lock.unlock();
    for (const auto& [number, ask] : asks) {
      const auto answer = core_.poll(*ask, now);
      if (!answer) continue;
      MergeCall* call = nullptr;
      {
        const std::lock_guard again(mutex_);
        if (const auto at = waiting_.find(number); at != waiting_.end()) {
          call = at->second;
          waiting_.erase(at);
        }
      }
      if (call != nullptr) call->answer(*answer);
    }
    lock.lock();
    if (!stopping_) changed_.wait_for(lock, std::chrono::milliseconds(waiting_.empty() ? 100 : 5));
  }
}

}  // namespace coordinator

KVMELD_NAMESPACE_END
