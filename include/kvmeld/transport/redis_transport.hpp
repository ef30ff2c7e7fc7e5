#pragma once

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/session/transport.hpp>
#include <kvmeld/transport/redis_connection.hpp>

KVMELD_NAMESPACE_BEGIN

struct RedisTransportOptions {
  RedisOptions server{};
  /// Members of one namespace hear each other; neither { nor } in it.
  std::string name_space = "kvmeld";
  MemberId self = 0;  ///< one of its own for each member
  std::size_t max_message_bytes = std::size_t{4} << 20U;
  /// After so long without a message the server is asked whether it is still there.
  std::int64_t silence_ms = 10'000;
};

/// What a member has sent and heard, in messages; bytes as the sockets counted them.
struct RedisTransportCounters {
  std::uint64_t sent = 0;
  std::uint64_t unheard = 0;  ///< of those, what nobody was subscribed to
  std::uint64_t received = 0;
  /// What was published to this member and is no message, or too long.
  std::uint64_t discarded = 0;
  /// Of the subscription; each stands for a gap in which messages were lost.
  std::uint64_t reconnects = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
};

/// Messages between members over the publish/subscribe channels of a Redis or Valkey server.
///
/// Models `Transport`. One channel for everyone and one for each member, `{namespace}:news` and
/// `{namespace}:to:…`; a message is its sender's id and its bytes. It loses on purpose: what is
/// published while a member is not subscribed, and all that waits for a member which reads so
/// slowly that the server's output buffer (`client-output-buffer-limit pubsub`, 32 MiB as shipped)
/// runs over, since the server cuts that connection then. Anti-entropy above repairs it;
/// `counters().reconnects` tells of a gap. Two connections: `send` and `receive` may be called by
/// two threads at once, and each by several in turn. A lost connection is made again by later
/// calls, with backoff; `send` tries once more within the call, and waits as `RedisConnection`
/// does. `receive` keeps to its timeout, but where it connects anew it may take `connect_timeout_ms
/// + command_timeout_ms` more.
class RedisTransport {
 public:
  /// Connects and subscribes: what is sent after this returned arrives.
  ///
  /// Errors: `invalid_argument`, `unavailable`, `unauthenticated`.
  [[nodiscard]] static Result<RedisTransport> open(RedisTransportOptions options) {
    KVMELD_TRY(detail::check_redis(options.server));
    KVMELD_TRY(detail::check_redis_namespace(options.name_space));
    constexpr std::size_t limit = (std::size_t{512} << 20U) - header_bytes;
    if (options.self == everyone)
      return detail::error(ErrorCode::invalid_argument, "member ", options.self,
                           " stands for everyone");
    if (options.max_message_bytes < 1 || options.max_message_bytes > limit ||
        options.silence_ms < 1) {
      return detail::error(ErrorCode::invalid_argument, "messages of at most ",
                           options.max_message_bytes, " bytes (redis takes ", limit,
                           "), silence of ", options.silence_ms, " ms");
    }
    RedisTransport transport(std::move(options));
    KVMELD_TRY(transport.state_->subscribe());
    transport.state_->in = transport.state_->subscriber.traffic();
    return Result(std::move(transport));  // spelled out for nvcc, which would copy
  }

  [[nodiscard]] MemberId self() const noexcept { return state_->options.self; }
  [[nodiscard]] std::size_t max_message_bytes() const noexcept {
    return state_->options.max_message_bytes;
  }

  /// One round trip; without error the server has it. Errors: `unavailable`, `oversized`,
  /// `unauthenticated`.
  Status send(MemberId to, std::span<const std::byte> bytes) {
    State& s = *state_;
    if (bytes.size() > max_message_bytes()) {
      return detail::error(ErrorCode::oversized, "a message of ", bytes.size(),
                           " bytes; this transport takes ", max_message_bytes());
    }
    if (to == self()) return {};
    const std::lock_guard lock(s.send_mutex);
    const Result<RedisReply> heard = s.publish(to, bytes);
    const std::lock_guard count(s.count_mutex);
    s.out = s.publisher.traffic();
    if (!heard) return as_transport(heard.error());
    ++s.counters.sent;
    s.counters.unheard += heard->number() == 0U ? 1U : 0U;
    return {};
  }

  /// The next message; none when none came within the time. Errors: `unavailable`, at the end of
  /// the timeout; `unauthenticated`.
  Result<std::optional<Envelope>> receive(std::int64_t timeout_ms) {
    State& s = *state_;
    const std::lock_guard lock(s.receive_mutex);
    constexpr std::int64_t year_ms = 31'536'000'000;
    auto got = s.next(detail::monotonic_ms() + std::clamp(timeout_ms, std::int64_t{0}, year_ms));
    const std::lock_guard count(s.count_mutex);
    s.in = s.subscriber.traffic();
    s.counters.discarded = s.discarded;
    if (!got) return as_transport(got.error());
    s.counters.received += got->has_value() ? 1U : 0U;
    return got;
  }

  /// As of the last call that has returned; does not wait for one that is under way.
  [[nodiscard]] RedisTransportCounters counters() const {
    const State& s = *state_;
    const std::lock_guard count(s.count_mutex);
    RedisTransportCounters counters = s.counters;
    counters.reconnects = s.in.connects == 0 ? 0 : s.in.connects - 1;
    counters.bytes_sent = s.out.bytes_sent + s.in.bytes_sent;
    counters.bytes_received = s.out.bytes_received + s.in.bytes_received;
    return counters;
  }

 private:
  static constexpr std::string_view mark = "kvm1";
  static constexpr std::size_t header_bytes = mark.size() + sizeof(MemberId);

  struct State {
    RedisTransportOptions options;
    std::string prefix;
    std::mutex send_mutex;
    RedisConnection publisher;
    std::vector<std::byte> frame;
    std::mutex receive_mutex;
    RedisConnection subscriber;
    bool subscribed = false;
    bool asked = false;         // whether the server is still there
    std::int64_t heard_at = 0;  // or asked at, less the silence that is to go before
    std::deque<Envelope> arrived;
    std::uint64_t discarded = 0;
    mutable std::mutex count_mutex;
    RedisTransportCounters counters;
    RedisTraffic out;
    RedisTraffic in;

    explicit State(RedisTransportOptions given)
        : options(std::move(given)),
          prefix("{" + options.name_space + "}:"),
          publisher(options.server),
          subscriber(options.server) {}

    [[nodiscard]] std::string channel(MemberId to) const {
      return to == everyone ? prefix + "news" : prefix + "to:" + detail::decimal(to);
    }

    /// Tried again where the connection was lost: not after a timeout, which may have delivered it,
    /// nor a refusal.
    [[nodiscard]] Result<RedisReply> publish(MemberId to, std::span<const std::byte> bytes) {
      frame.resize(header_bytes + bytes.size());
      std::memcpy(frame.data(), mark.data(), mark.size());
      std::memcpy(frame.data() + mark.size(), &options.self, sizeof(MemberId));
      std::copy(bytes.begin(), bytes.end(), frame.begin() + header_bytes);
      for (bool again = publisher.connected();; again = false) {
        auto heard = publisher.command({"PUBLISH", channel(to), std::span<const std::byte>(frame)});
        if (heard || !again || publisher.connected() ||
            heard.error().code() != ErrorCode::unavailable)
          return heard;
      }
    }

    [[nodiscard]] Result<std::optional<Envelope>> next(std::int64_t deadline) {
      for (;;) {
        if (!arrived.empty()) {
          std::optional<Envelope> first(std::move(arrived.front()));
          arrived.pop_front();
          return first;
        }
        const Status status = listen(deadline);
        // waiting is no use
        if (!status && status.code() != ErrorCode::unavailable &&
            status.code() != ErrorCode::timed_out)
          return status;
        if (!arrived.empty() || detail::monotonic_ms() < deadline) continue;
        if (!status) return status;
        return std::optional<Envelope>();
      }
    }

    [[nodiscard]] Status subscribe() {
      if (subscribed && subscriber.connected()) return {};
      subscribed = false;
      KVMELD_TRY(subscriber.connect());
      subscriber.queue({"SUBSCRIBE", channel(everyone), channel(options.self)});
      KVMELD_TRY(subscriber.post());
      for (int confirmed = 0; confirmed < 2;) {
        auto reply = subscriber.next_reply(options.server.command_timeout_ms);
        if (!reply) return reply.error();
        if (!reply->has_value()) {
          subscriber.disconnect();
          return detail::error(ErrorCode::unavailable, subscriber.address(),
                               ": no subscription within ", options.server.command_timeout_ms,
                               " ms");
        }
        if (Status refused = subscriber.status_of(**reply); !refused) {
          subscriber.disconnect();
          return refused;
        }
        if ((**reply)[0].text() == "subscribe")
          ++confirmed;
        else
          take(**reply);
      }
      subscribed = true;
      asked = false;
      heard_at = detail::monotonic_ms();
      return {};
    }

    /// Waits for one answer until the deadline at most, and once for the next attempt to connect
    /// where there is no connection.
    [[nodiscard]] Status listen(std::int64_t deadline) {
      const std::int64_t left = deadline - detail::monotonic_ms();
      if (const std::int64_t wait = (std::min)(subscriber.retry_in_ms(), left); wait > 0) {
        const timespec pause{static_cast<time_t>(wait / 1000),
                             static_cast<long>(wait % 1000) * 1'000'000};
        (void)nanosleep(&pause, nullptr);
      }
      KVMELD_TRY(subscribe());
      const std::int64_t silence =
          asked ? options.silence_ms + options.server.command_timeout_ms : options.silence_ms;
      const std::int64_t quiet_until = heard_at + silence;
      const std::int64_t now = detail::monotonic_ms();
      auto reply = subscriber.next_reply(
          std::clamp((std::min)(deadline, quiet_until) - now, std::int64_t{0}, deadline));
      if (!reply) return reply.error();
      if (reply->has_value()) {
        heard_at = detail::monotonic_ms();
        asked = false;
        take(**reply);
      } else if (detail::monotonic_ms() >= quiet_until) {
        if (asked) {
          subscriber.disconnect();
          return detail::error(ErrorCode::unavailable, subscriber.address(), ": no answer for ",
                               silence, " ms");
        }
        subscriber.queue({"PING"});
        asked = true;
        heard_at = now - options.silence_ms;
        return subscriber.post();
      }
      return {};
    }

    /// Keeps what is a message of another member.
    void take(const RedisReply& reply) {
      if (reply.size() != 3 || reply[0].text() != "message") return;
      const RedisReply payload = reply[2];
      const auto bytes = payload.bytes();
      if (bytes.size() < header_bytes || payload.text().substr(0, mark.size()) != mark ||
          bytes.size() - header_bytes > options.max_message_bytes) {
        ++discarded;
        return;
      }
      Envelope envelope;
      std::memcpy(&envelope.from, bytes.data() + mark.size(), sizeof(MemberId));
      if (envelope.from == options.self) return;  // the server gives us our own, too
      envelope.bytes.assign(bytes.begin() + header_bytes, bytes.end());
      arrived.push_back(std::move(envelope));
    }
  };

  static Status as_transport(const Status& status) {
    return status.code() == ErrorCode::timed_out ? Status(ErrorCode::unavailable, status.message())
                                                 : status;
  }

  explicit RedisTransport(RedisTransportOptions options)
      : state_(std::make_unique<State>(std::move(options))) {}

  std::unique_ptr<State> state_;
};

KVMELD_NAMESPACE_END
