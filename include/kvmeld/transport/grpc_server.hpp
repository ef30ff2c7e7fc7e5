#pragma once

/// A coordinator behind gRPC (CMake component kvmeld::grpc).

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

#include <kvmeld/transport/coordinator.grpc.pb.h>
#include <kvmeld/transport/grpc_convert.hpp>
#include <kvmeld/transport/grpc_status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Serves a `Coordinator` to clients of any language: coordinator.proto says what they may ask.
///
/// Calls are callbacks: a client that is slow, or gone, holds one message and no thread, and is
/// cancelled at `max_call_ms`. Barriers are looked at by one thread, some hundred times a second
/// while anybody waits.
/// @tparam Store as for `Coordinator`, and durable where a restart shall lose nothing.
template <BlobStore Store, Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128,
          Compressor C = NoCompression>
class CoordinatorServer {
 public:
  using Core = Coordinator<Store, Auth, Hash, C>;
  using Options = typename Core::Options;

  CoordinatorServer(Store& store, Options options) : core_(store, std::move(options)) {}
  CoordinatorServer(const CoordinatorServer&) = delete;
  CoordinatorServer& operator=(const CoordinatorServer&) = delete;
  ~CoordinatorServer() { stop(); }

  /// Takes up what the store has, and listens on "HOST:PORT" (port 0: any) or "unix:PATH".
  ///
  /// Errors: those of `Coordinator::open`; `unavailable` where the address cannot be used, or
  /// certificate and key do not fit.
  Status start(const std::string& address, const TlsOptions& tls = {}) {
    if (server_ != nullptr)
      return detail::error(ErrorCode::invalid_argument,
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
      return detail::error(ErrorCode::unavailable, "cannot listen on ", address);
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
        member_ = detail::error(ErrorCode::quota_exceeded, options.max_calls,
                                " calls are open; come back later");
      }
      if (member_) {
        const MemberId member = *member_;
        if (std::size_t& open = server_.member_calls_[member]; ++open > options.max_member_calls) {
          --open;
          member_ = detail::error(ErrorCode::quota_exceeded, options.max_member_calls,
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
    [[nodiscard]] const Result<MemberId>& member() const noexcept { return member_; }

   protected:
    CoordinatorServer& server_;
    grpc::CallbackServerContext* context_;
    std::uint64_t number_ = 0;

   private:
    [[nodiscard]] Result<MemberId> who() const {
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

    Result<MemberId> member_;
    std::optional<MemberId> counted_;
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
    static constexpr MemberId nobody = everyone - 1;  // whose call ends before it brings anything

    Status take() {
      using Item = detail::rpc::UpdateRequest;
      if (update_.ended())
        return detail::error(ErrorCode::invalid_argument, "an item behind the end of an update");
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
      return detail::error(ErrorCode::unknown_field, "item ", update_.items(),
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

    typename Core::Update update_;
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
        grpc::CallbackServerContext* context, const detail::rpc::StateRequest* request) override {
      return new StateCall(server_, context, request);
    }
    grpc::ServerUnaryReactor* WaitForMerge(grpc::CallbackServerContext* context,
                                           const detail::rpc::MergeRequest* request,
                                           detail::rpc::MergeReply* reply) override {
      return new MergeCall(server_, context, request, reply);
    }

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
  std::map<MemberId, std::size_t> member_calls_;
  std::uint64_t calls_begun_ = 0;
  bool stopping_ = false;
  int port_ = 0;
};

KVMELD_NAMESPACE_END

#include <kvmeld/transport/grpc_server_calls.hpp>
