#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/tensor/mix_bits.hpp>
#include <kvmeld/transport/redis_socket.hpp>

KVMELD_NAMESPACE_BEGIN

/// One argument of a command: any bytes. More than 4096 are not copied and must live until the
/// exchange.
class RedisArgument {
 public:
  RedisArgument(std::string_view text) : text_(text) {}    // NOLINT: implicit on purpose
  RedisArgument(const std::string& text) : text_(text) {}  // NOLINT
  RedisArgument(const char* text) : text_(text) {}         // NOLINT
  RedisArgument(std::span<const std::byte> bytes)          // NOLINT
      : text_(reinterpret_cast<const char*>(bytes.data()), bytes.size()) {}

  [[nodiscard]] std::string_view text() const noexcept { return text_; }

 private:
  std::string_view text_;
};

/// A connection to one server, made at the first need and again after a loss.
///
/// Not thread-safe. After a failed attempt to connect the next one waits (exponential backoff with
/// jitter), and calls until then fail at once. The first wait without a byte ends a call:
/// `connect_timeout_ms + command_timeout_ms` on a server that stands still. Errors of every call:
/// `unavailable`; `timed_out` (no byte moved for `command_timeout_ms`, or less than 64 KiB in each
/// such time while the call goes on; whether the server acted is unknown); `unauthenticated`;
/// `invalid_argument` for options out of range. Nothing is queued after them, and what was sent is
/// not sent again: whether that is right, the caller knows.
class RedisConnection {
 public:
  explicit RedisConnection(RedisOptions options)
      : options_(std::move(options)),
        address_(detail::redis_address(options_)),
        jitter_(options_.backoff_seed) {
    const auto here = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(this));
    if (jitter_ == 0)
      jitter_ = here ^ (static_cast<std::uint64_t>(detail::monotonic_ms()) << 20U) ^
                static_cast<std::uint64_t>(getpid());
  }

  [[nodiscard]] bool connected() const noexcept { return socket_.is_open(); }
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  [[nodiscard]] const RedisOptions& options() const noexcept { return options_; }
  [[nodiscard]] const RedisTraffic& traffic() const noexcept { return socket_.traffic; }
  /// How long until `connect` would try again; 0: now.
  [[nodiscard]] std::int64_t retry_in_ms() const noexcept {
    return connected() ? 0 : (std::max)(retry_at_ - detail::monotonic_ms(), std::int64_t{0});
  }

  /// Connects, logs in and selects the database, where that is not done and the time for it has
  /// come.
  Status connect() {
    if (connected()) return {};
    if (const std::int64_t wait = retry_in_ms(); wait > 0) {
      return detail::error(last_error_.code(), last_error_.message(), "; next attempt in ", wait,
                           " ms");
    }
    Status status = detail::check_redis(options_);
    if (status) status = socket_.open(options_);
    if (status) status = greet();
    if (status) {
      failures_ = 0;
      ++socket_.traffic.connects;
      return {};
    }
    disconnect();
    const double doubled = static_cast<double>(options_.backoff_ms) *
                           static_cast<double>(1U << (std::min)(failures_++, 30U));
    const double longest = (std::min)(doubled, static_cast<double>(options_.backoff_limit_ms));
    retry_at_ = detail::monotonic_ms() +
                static_cast<std::int64_t>(longest * (0.5 + 0.5 * random_fraction()));
    last_error_ = status;
    return status;
  }
  void disconnect() noexcept {
    socket_.close();
    drop_queue();
  }

  /// Appends a command to what the next `exchange` sends.
  void queue(std::initializer_list<RedisArgument> arguments) {
    text_ += '*';
    text_ += detail::decimal(arguments.size());
    for (const RedisArgument& argument : arguments) {
      const std::string_view bytes = argument.text();
      text_ += "\r\n$";
      text_ += detail::decimal(bytes.size());
      text_ += "\r\n";
      if (bytes.size() <= copied_bytes) {
        text_ += bytes;
      } else {
        outside_.push_back({text_.size(), bytes});
      }
    }
    text_ += "\r\n";
    ++queued_;
  }

  /// Sends what is queued and gives an answer for each command, in order. An answer may be an error
  /// of that command alone.
  [[nodiscard]] Result<std::vector<RedisReply>> exchange() {
    if (Status status = connect(); !status) {
      drop_queue();
      return status;
    }
    return transfer();
  }

  /// One command, one answer; an error in the answer is the call's.
  [[nodiscard]] Result<RedisReply> command(std::initializer_list<RedisArgument> arguments) {
    queue(arguments);
    auto replies = exchange();
    if (!replies) return replies.error();
    KVMELD_TRY(status_of(replies->front()));
    return std::move(replies->front());
  }

  /// Sends what is queued and waits for no answer: `next_reply` gives them.
  Status post() {
    if (Status status = connect(); !status) {
      drop_queue();
      return status;
    }
    queued_ = 0;
    return transfer().status();
  }

  /// The next answer that no `exchange` waited for (a subscription's); none when none came within
  /// the time.
  [[nodiscard]] Result<std::optional<RedisReply>> next_reply(std::int64_t timeout_ms) {
    KVMELD_TRY(connect());
    const std::int64_t deadline = detail::monotonic_ms() + timeout_ms;
    for (std::optional<RedisReply> reply;;) {
      KVMELD_TRY(socket_.parse(reply));
      if (reply) return reply;
      bool moved = false;
      KVMELD_TRY(socket_.receive(moved));
      const std::int64_t left = deadline - detail::monotonic_ms();
      if (moved && left > 0) continue;
      if (moved) KVMELD_TRY(socket_.parse(reply));  // a part of an answer stays for the next call
      if (reply) return reply;
      if (left <= 0 || socket_.wait(POLLIN, left) == 0) return std::optional<RedisReply>();
    }
  }

  /// Good, or the error that an answer holds.
  [[nodiscard]] Status status_of(const RedisReply& reply) const {
    return detail::redis_status(reply, address_);
  }

 private:
  static constexpr std::size_t copied_bytes = 4096;
  static constexpr std::uint64_t slowest_bytes = 65'536;  // in each `command_timeout_ms`

  struct Outside {
    std::size_t at;  // where in `text_` these bytes belong
    std::string_view bytes;
  };

  [[nodiscard]] double random_fraction() noexcept {  // splitmix64
    return static_cast<double>(detail::mix_bits(jitter_ += 0x9E3779B97F4A7C15U) >> 11U) * 0x1p-53;
  }

  [[nodiscard]] std::uint64_t bytes_moved() const noexcept {
    return socket_.traffic.bytes_sent + socket_.traffic.bytes_received;
  }

  void drop_queue() noexcept {
    text_.clear();
    outside_.clear();
    queued_ = 0;
  }

  /// Logs in ahead of what is queued already, and sees whether the server serves.
  [[nodiscard]] Status greet() {
    std::string text = std::exchange(text_, {});
    std::vector<Outside> outside = std::exchange(outside_, {});
    const std::size_t queued = std::exchange(queued_, 0);
    if (!options_.user.empty()) {
      queue({"AUTH", options_.user, options_.password});
    } else if (!options_.password.empty()) {
      queue({"AUTH", options_.password});
    }
    if (options_.database != 0) queue({"SELECT", detail::decimal(options_.database)});
    queue({"PING"});
    auto replies = transfer();
    if (!replies) return replies.error();
    for (const RedisReply& reply : *replies) {
      // a server that cannot write to its disk says so even to PING, and still serves readers
      Status status = status_of(reply);
      if (!status && status.code() != ErrorCode::store_full) return status;
    }
    const RedisReply& pong = replies->back();
    if (!pong.is_error() && pong.text() != "PONG")
      return socket_.lose(ErrorCode::unavailable, "not what a redis server says to PING");
    text_ = std::move(text);
    outside_ = std::move(outside);
    queued_ = queued;
    return {};
  }

  /// Text and outside bytes in the order in which they go out.
  [[nodiscard]] std::vector<iovec> pieces() {
    std::vector<iovec> out;
    std::size_t at = 0;
    const auto text_until = [&](std::size_t end) {
      if (end > at) out.push_back({text_.data() + at, end - at});
      at = end;
    };
    for (const Outside& one : outside_) {
      text_until(one.at);
      out.push_back({const_cast<char*>(one.bytes.data()), one.bytes.size()});
    }
    text_until(text_.size());
    return out;
  }

  [[nodiscard]] Result<std::vector<RedisReply>> transfer() {
    auto done = transfer_queued();
    drop_queue();
    return done;
  }
  [[nodiscard]] Result<std::vector<RedisReply>> transfer_queued() {
    std::vector<iovec> out = pieces();
    std::size_t first = 0;
    std::vector<RedisReply> replies;
    replies.reserve(queued_);
    const std::int64_t start = detail::monotonic_ms();
    const std::uint64_t bytes_before = bytes_moved();
    // Both ways at once, so that the server need not keep the answers; they are looked for where
    // poll says that there are some.
    for (bool look = false; first < out.size() || replies.size() < queued_;) {
      bool moved = false;
      if (first < out.size()) KVMELD_TRY(socket_.send(out, first, moved));
      if (look) {
        bool received = false;
        KVMELD_TRY(socket_.receive(received));
        for (std::optional<RedisReply> reply; replies.size() < queued_;) {
          KVMELD_TRY(socket_.parse(reply));
          if (!reply) break;
          replies.push_back(*std::move(reply));
        }
        look = received;
        moved = moved || received;
      }
      if (first == out.size() && replies.size() == queued_) break;
      const std::uint64_t bytes = bytes_moved() - bytes_before;
      const std::int64_t spent = detail::monotonic_ms() - start;
      const auto turns = static_cast<std::int64_t>(bytes / slowest_bytes);
      if (spent / options_.command_timeout_ms > turns) {
        return socket_.lose(ErrorCode::timed_out, bytes, " bytes moved in ", spent, " ms, and ",
                            slowest_bytes, " should in each ", options_.command_timeout_ms,
                            " ms, with ", replies.size(), " of ", queued_, " answers here");
      }
      if (moved && (look || first < out.size())) continue;
      const int ready =
          socket_.wait(first < out.size() ? POLLIN | POLLOUT : POLLIN, options_.command_timeout_ms);
      if (ready == 0) {
        return socket_.lose(ErrorCode::timed_out, "no byte moved for ", options_.command_timeout_ms,
                            " ms, with ", replies.size(), " of ", queued_, " answers here");
      }
      look = (ready & POLLIN) != 0;
    }
    if (queued_ > 0) ++socket_.traffic.round_trips;
    return replies;
  }

  RedisOptions options_;
  std::string address_;
  std::uint64_t jitter_;
  detail::RedisSocket socket_;
  std::string text_;  // queued commands, but for the bytes outside
  std::vector<Outside> outside_;
  std::size_t queued_ = 0;
  Status last_error_;
  std::int64_t retry_at_ = 0;
  unsigned failures_ = 0;
};

KVMELD_NAMESPACE_END
