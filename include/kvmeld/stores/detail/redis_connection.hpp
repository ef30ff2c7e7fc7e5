#pragma once

/// A connection to a Redis server within time and size bounds.

#if !__has_include(<hiredis/hiredis.h>)
#error "kvmeld's Redis headers need hiredis: install libhiredis-dev (and link kvmeld::redis)"
#endif

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <kvmeld/config.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace stores {

namespace detail {

/// The number that digits spell; none for other bytes, leading zeros, or more than 64 bits.
[[nodiscard]] inline std::optional<std::uint64_t> redis_digits(std::string_view digits) noexcept {
  std::uint64_t value = 0;
  if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) return std::nullopt;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (failed != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

}  // namespace detail

/// What a server answered to one command: an owner, whose copies share the bytes.
///
/// Elements of an array are given as the same type and keep the whole answer alive.
class RedisReply {
 public:
  RedisReply() = default;
  /// Takes ownership of what hiredis parsed.
  explicit RedisReply(redisReply* reply)
      : reply_(reply, [](redisReply* r) { freeReplyObject(r); }) {}

  struct FreeBytes {
    void operator()(char* bytes) const noexcept { std::free(bytes); }
  };
  using OwnedBytes = std::unique_ptr<char[], FreeBytes>;  ///< of `std::malloc`

  /// A string whose bytes are already where they shall stay.
  RedisReply(OwnedBytes bytes, std::size_t size) {
    struct Owner {
      redisReply reply{};
      OwnedBytes bytes;
    };
    const auto owner = std::make_shared<Owner>();
    owner->bytes = std::move(bytes);
    owner->reply.type = REDIS_REPLY_STRING;
    owner->reply.str = owner->bytes.get();
    owner->reply.len = size;
    reply_ = std::shared_ptr<redisReply>(owner, &owner->reply);
  }

  [[nodiscard]] bool is_nil() const noexcept {
    return reply_ == nullptr || reply_->type == REDIS_REPLY_NIL;
  }
  [[nodiscard]] bool is_error() const noexcept {
    return reply_ != nullptr && reply_->type == REDIS_REPLY_ERROR;
  }
  [[nodiscard]] bool is_integer() const noexcept {
    return reply_ != nullptr && reply_->type == REDIS_REPLY_INTEGER;
  }
  [[nodiscard]] bool is_array() const noexcept {
    return reply_ != nullptr && reply_->type == REDIS_REPLY_ARRAY;
  }
  [[nodiscard]] bool is_bulk() const noexcept {
    return reply_ != nullptr && reply_->type == REDIS_REPLY_STRING;
  }

  /// Of a string, status or error; else empty.
  [[nodiscard]] std::string_view text() const noexcept {
    if (!is_bulk() && !is_error() && (reply_ == nullptr || reply_->type != REDIS_REPLY_STATUS))
      return {};
    return {reply_->str, reply_->len};
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return std::as_bytes(std::span(text().data(), text().size()));
  }
  /// The bytes with a share in their ownership.
  [[nodiscard]] std::shared_ptr<const std::byte[]> shared_bytes() const noexcept {
    return {reply_, reinterpret_cast<const std::byte*>(text().data())};
  }
  /// An integer that is not negative, or the one that a string spells in digits and nothing else;
  /// else none.
  [[nodiscard]] std::optional<std::uint64_t> number() const noexcept {
    if (!is_integer()) return detail::redis_digits(text());
    if (reply_->integer < 0) return std::nullopt;
    return static_cast<std::uint64_t>(reply_->integer);
  }
  [[nodiscard]] std::size_t size() const noexcept { return is_array() ? reply_->elements : 0; }
  /// Element i of an array, nil beyond its end.
  [[nodiscard]] RedisReply operator[](std::size_t i) const {
    RedisReply element;
    if (i < size()) element.reply_ = std::shared_ptr<redisReply>(reply_, reply_->element[i]);
    return element;
  }

 private:
  std::shared_ptr<redisReply> reply_;
};

namespace detail {

/// Why a server refused, from the first word of its answer.
[[nodiscard]] inline ErrorCode redis_error_code(std::string_view text) noexcept {
  const auto starts = [&text](std::string_view word) {
    return text.substr(0, word.size()) == word;
  };
  const auto holds = [&text](std::string_view words) {
    return text.find(words) != std::string_view::npos;
  };
  if (starts("OOM ") || starts("MISCONF") ||
      holds("EXECABORT Transaction discarded because of: OOM"))
    return ErrorCode::store_full;
  if (starts("NOAUTH") || starts("WRONGPASS") || starts("NOPERM") || holds("invalid password") ||
      holds("invalid username") || holds("without any password")) {
    return ErrorCode::unauthenticated;
  }
  if (starts("WRONGTYPE")) return ErrorCode::corrupt;
  if (starts("ERR DB index") || starts("ERR invalid DB")) return ErrorCode::invalid_argument;
  if (starts("MOVED") || starts("CROSSSLOT") || starts("ERR unknown command"))
    return ErrorCode::unsupported;
  // LOADING, READONLY, MASTERDOWN, CLUSTERDOWN, NOREPLICAS, BUSY, too many clients, …
  return ErrorCode::unavailable;
}

/// A number of a server's that is at most `most`; no value at all is 0. Errors: `corrupt`, naming
/// what it should have been.
[[nodiscard]] inline Result<std::uint64_t> redis_number(const RedisReply& reply, std::uint64_t most,
                                                        std::string_view what,
                                                        std::string_view where) {
  if (reply.is_nil()) return std::uint64_t{0};
  const auto number = reply.number();
  if (number && *number <= most) return *number;
  if (number)
    return extend::error(ErrorCode::corrupt, where, ": ", what, " is ", *number, ", and at most ",
                         most);
  return extend::error(ErrorCode::corrupt, where, ": ", what, " is '", reply.text().substr(0, 40),
                       "', and no number");
}

/// Good, or what the server said, cut at 200 bytes.
[[nodiscard]] inline Status redis_status(const RedisReply& reply, std::string_view where) {
  if (!reply.is_error()) return {};
  const ErrorCode code = redis_error_code(reply.text());
  const std::string_view what = code == ErrorCode::store_full ? " takes no more: " : " says: ";
  return extend::error(code, where, what, reply.text().substr(0, 200));
}

}  // namespace detail

/// Where a Redis or Valkey server is, how to log in, and how long to wait for it.
///
/// There is no TLS here: across machines that do not trust the network, put a tunnel (stunnel,
/// WireGuard, a service mesh) in between and name its local end.
struct RedisOptions {
  std::string host = "127.0.0.1";
  int port = 6379;
  /// Path of the server's socket; when given, host and port are not used.
  std::string unix_socket{};
  std::string user{};      ///< empty: the server's default user
  std::string password{};  ///< empty: no AUTH is sent
  int database = 0;
  /// For the connection alone; a host name is resolved before, at the system's own pace.
  std::int64_t connect_timeout_ms = 1000;
  /// Longest wait in which no byte moves, or less than 64 KiB of a call that goes on; afterwards
  /// the connection counts as lost.
  std::int64_t command_timeout_ms = 5000;
  /// After the first failure; doubles with each, times a random factor in [0.5, 1).
  std::int64_t backoff_ms = 20;
  std::int64_t backoff_limit_ms = 2000;
  /// Of that factor; 0: another one for each process and connection.
  std::uint64_t backoff_seed = 0;
};

namespace detail {

[[nodiscard]] inline std::string redis_address(const RedisOptions& options) {
  if (!options.unix_socket.empty()) return "redis at " + options.unix_socket;
  return "redis at " + options.host + ":" + extend::decimal(options.port);
}

[[nodiscard]] inline Status check_redis(const RedisOptions& options) {
  // sockaddr_un; hiredis would cut it short without a word
  constexpr std::size_t longest_path = 107;
  if (options.unix_socket.size() > longest_path) {
    return extend::error(ErrorCode::invalid_argument, "a socket path of ",
                         options.unix_socket.size(), " bytes; the system takes ", longest_path);
  }
  if (options.unix_socket.empty() &&
      (options.host.empty() || options.port < 1 || options.port > 65535)) {
    return extend::error(ErrorCode::invalid_argument, "redis host '", options.host, "', port ",
                         options.port, " (1 to 65535)");
  }
  if (options.database < 0)
    return extend::error(ErrorCode::invalid_argument, "redis database ", options.database);
  if (!options.user.empty() && options.password.empty()) {
    return extend::error(ErrorCode::invalid_argument, "redis user '", options.user,
                         "' without a password");
  }
  if (options.connect_timeout_ms < 1 || options.command_timeout_ms < 1) {
    return extend::error(ErrorCode::invalid_argument, "timeouts of ", options.connect_timeout_ms,
                         " and ", options.command_timeout_ms, " ms; at least 1");
  }
  if (options.backoff_ms < 1 || options.backoff_limit_ms < options.backoff_ms) {
    return extend::error(ErrorCode::invalid_argument, "backoff from ", options.backoff_ms, " to ",
                         options.backoff_limit_ms, " ms");
  }
  return {};
}

/// Namespaces become a cluster's hash tag, so that all keys of one lie in one slot.
[[nodiscard]] inline Status check_redis_namespace(const std::string& name) {
  if (!name.empty() && name.find_first_of("{}") == std::string::npos) return {};
  return extend::error(ErrorCode::invalid_argument, "redis namespace '", name,
                       "': at least one byte, and neither { nor }");
}

}  // namespace detail

/// What a connection has moved since it was made, over all its reconnects; bytes as the socket
/// counted them.
struct RedisTraffic {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t round_trips = 0;
  std::uint64_t connects = 0;
};

namespace detail {

[[nodiscard]] inline std::int64_t monotonic_ms() noexcept {
  timespec now{};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

/// Which of `events` a socket is ready for, 0 after the time. Signals do not shorten it; an error
/// counts as all of them, so that the next call shows it.
[[nodiscard]] inline int wait_ready(int socket, int events, std::int64_t timeout_ms) noexcept {
  const std::int64_t deadline = monotonic_ms() + timeout_ms;
  for (;;) {
    const std::int64_t left = (std::max)(deadline - monotonic_ms(), std::int64_t{0});
    pollfd one{socket, static_cast<short>(events), 0};
    const int ready =
        poll(&one, 1, static_cast<int>((std::min)(left, std::int64_t{1'000'000'000})));
    if (ready > 0) return (one.revents & ~events) != 0 ? events : one.revents;
    if (ready < 0 && errno != EINTR) return events;
    if (ready == 0 && left == 0) return 0;
  }
}

/// Reads the lengths that a server announces, before hiredis does, which allocates an array by its
/// announced length and then walks it. O(headers): what a string holds is passed over.
class RedisBounds {
 public:
  // what is asked for here has 256 at most
  static constexpr std::uint64_t most_elements = std::uint64_t{1} << 16U;
  // the protocol's own limit
  static constexpr std::uint64_t most_bytes = std::uint64_t{512} << 20U;

  /// Takes the next bytes of the stream; false where they announce too much, or no number.
  [[nodiscard]] bool take(std::string_view bytes) {
    while (!bytes.empty()) {
      if (passing_ > 0) {
        const std::size_t step = (std::min)(bytes.size(), static_cast<std::size_t>(passing_));
        bytes.remove_prefix(step);
        passing_ -= step;
        continue;
      }
      const std::size_t end = (std::min)(bytes.find('\n'), bytes.size());
      line_ += bytes.substr(
          0, (std::min)(end, longest_header - (std::min)(line_.size(), longest_header)));
      if (end == bytes.size()) return true;
      bytes.remove_prefix(end + 1);
      if (!header()) return false;
      line_.clear();
    }
    return true;
  }
  /// The header that `take` did not like.
  [[nodiscard]] const std::string& refused() const noexcept { return line_; }

 private:
  // of what follows in an error's or a status's line, nothing is looked at
  static constexpr std::size_t longest_header = 24;

  [[nodiscard]] bool header() {
    if (!line_.empty() && line_.back() == '\r') line_.pop_back();
    const char type = line_.empty() ? ' ' : line_.front();
    // Of the third protocol, which nobody asked for: hiredis may know them, and allocates maps and
    // sets as it does arrays.
    constexpr std::string_view third = "%~>|=";
    if (third.find(type) != std::string_view::npos) return false;
    // others are hiredis' to judge
    if ((type != '*' && type != '$') || line_ == "*-1" || line_ == "$-1") return true;
    const auto length = redis_digits(std::string_view(line_).substr(1));
    if (!length || *length > (type == '*' ? most_elements : most_bytes)) return false;
    if (type == '$') passing_ = *length + 2;
    return true;
  }

  std::string line_;
  std::uint64_t passing_ = 0;
};

/// The bytes' way to a server and back, which never blocks but in `open`. hiredis finds the server
/// and parses its answers; the bytes do not pass through its buffer, so that large values are
/// copied once less and a lost peer raises no SIGPIPE. A signal ends none of its calls for good:
/// what EINTR stopped is made again, and a socket that does not block is connected without waiting,
/// so that no signal can come between.
///
/// Closed by every error.
class RedisSocket {
 public:
  RedisTraffic traffic{};

  [[nodiscard]] bool is_open() const noexcept { return context_ != nullptr; }
  void close() noexcept {
    context_.reset();
    large_.reset();
  }

  [[nodiscard]] Status open(const RedisOptions& options) {
    address_ = redis_address(options);
    context_.reset(options.unix_socket.empty()
                       ? redisConnectNonBlock(options.host.c_str(), options.port)
                       : redisConnectUnixNonBlock(options.unix_socket.c_str()));
    if (context_ == nullptr) return lose(ErrorCode::unavailable, "no memory for a connection");
    if (context_->err == REDIS_ERR_IO) return lose_by_errno("connect", errno);
    if (context_->err != 0)
      return lose(ErrorCode::unavailable, "connect: ", std::string(context_->errstr));
    if (wait(POLLOUT, options.connect_timeout_ms) == 0) {
      return lose(ErrorCode::unavailable, "no connection within ", options.connect_timeout_ms,
                  " ms (errno ", ETIMEDOUT, ")");
    }
    int failed = 0;
    socklen_t size = sizeof failed;
    (void)getsockopt(context_->fd, SOL_SOCKET, SO_ERROR, &failed, &size);
    if (failed != 0) return lose_by_errno("connect", failed);
    const int on = 1;
    (void)setsockopt(context_->fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    context_->reader->maxbuf = std::size_t{4} << 20U;  // what stays allocated between answers
    bounds_ = RedisBounds();
    return {};
  }

  [[nodiscard]] int wait(int events, std::int64_t timeout_ms) const noexcept {
    return wait_ready(context_->fd, events, timeout_ms);
  }

  /// Sends what goes at once, from piece `first` on, and moves `first` and that piece's begin.
  /// `moved` where something went.
  [[nodiscard]] Status send(std::vector<iovec>& pieces, std::size_t& first, bool& moved) {
    msghdr message{};
    message.msg_iov = pieces.data() + first;
    message.msg_iovlen = (std::min)(pieces.size() - first, std::size_t{64});
    const ssize_t n = sendmsg(context_->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return {};
    if (n < 0) return lose_by_errno("send", errno);
    moved = true;
    traffic.bytes_sent += static_cast<std::uint64_t>(n);
    for (auto left = static_cast<std::size_t>(n); left > 0;) {
      iovec& piece = pieces[first];
      const std::size_t step = (std::min)(left, piece.iov_len);
      piece.iov_base = static_cast<char*>(piece.iov_base) + step;
      piece.iov_len -= step;
      left -= step;
      if (piece.iov_len == 0) ++first;
    }
    return {};
  }

  /// Takes what is there, if anything.
  [[nodiscard]] Status receive(bool& moved) {
    if (buffer_ == nullptr) buffer_ = std::make_unique<char[]>(receive_bytes);
    if (large_ != nullptr && !make_room())
      return lose(ErrorCode::unavailable, "no memory for an answer of ", large_size_, " bytes");
    char* const to = large_ == nullptr ? buffer_.get() : large_.get() + large_here_;
    const std::size_t room = large_ == nullptr ? receive_bytes : large_room_ - large_here_;
    const ssize_t n = recv(context_->fd, to, room, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return {};
    if (n < 0) return lose_by_errno("receive", errno);
    if (n == 0)
      return lose(ErrorCode::unavailable, "the server closed the connection (errno ", ECONNRESET,
                  ")");
    moved = true;
    const auto size = static_cast<std::size_t>(n);
    traffic.bytes_received += size;
    if (large_ != nullptr) {
      large_here_ += size;
      return {};
    }
    if (begin_large(size)) return {};
    if (!bounds_.take({buffer_.get(), size})) {
      return lose(ErrorCode::unavailable, "an answer announces ", bounds_.refused(),
                  "; arrays have at most ", RedisBounds::most_elements, " elements here, strings ",
                  RedisBounds::most_bytes, " bytes");
    }
    return redisReaderFeed(context_->reader, buffer_.get(), size) == REDIS_OK ? Status()
                                                                              : unreadable();
  }

  /// The next answer, where it is here whole.
  [[nodiscard]] Status parse(std::optional<RedisReply>& out) {
    out.reset();
    if (large_ != nullptr) {
      if (large_here_ == large_size_ + 2) out.emplace(std::move(large_), large_size_);
      return {};
    }
    void* reply = nullptr;
    if (redisReaderGetReply(context_->reader, &reply) != REDIS_OK) return unreadable();
    if (reply != nullptr) out.emplace(static_cast<redisReply*>(reply));
    return {};
  }

  template <class... Parts>
  [[nodiscard]] Status lose(ErrorCode code, const Parts&... parts) {
    close();
    return extend::error(code, address_, ": ", parts...);
  }

 private:
  static constexpr std::size_t receive_bytes = std::size_t{256} << 10U;

  /// Space for what comes next of a long string: by what has come, not by what was announced.
  /// Doubled, by moving pages.
  [[nodiscard]] bool make_room() {
    if (large_here_ < large_room_ || large_room_ == large_size_ + 2) return true;
    const std::size_t room = (std::min)(large_size_ + 2, large_room_ * 2);
    void* const moved = std::realloc(large_.get(), room);
    if (moved == nullptr) return false;
    (void)large_.release();
    large_.reset(static_cast<char*>(moved));
    large_room_ = room;
    return true;
  }

  /// Where the buffer begins with a string that is an answer of its own, and longer than the
  /// buffer, the rest is received to where it will stay: hiredis would copy it twice.
  [[nodiscard]] bool begin_large(std::size_t size) {
    const redisReader& reader = *context_->reader;
    const bool between_answers = reader.len == reader.pos && reader.ridx < 0;
    if (!between_answers || buffer_[0] != '$') return false;
    std::size_t length = 0;
    std::size_t at = 1;
    for (; at < size && at < 11 && buffer_[at] >= '0' && buffer_[at] <= '9'; ++at)
      length = length * 10 + static_cast<std::size_t>(buffer_[at] - '0');
    if (at + 1 >= size || buffer_[at] != '\r' || buffer_[at + 1] != '\n') return false;
    at += 2;
    // shorter ones come several at a time
    if (length > RedisBounds::most_bytes || length < receive_bytes) return false;
    large_room_ = (std::min)(length + 2, receive_bytes * 4);
    large_.reset(static_cast<char*>(std::malloc(large_room_)));
    if (large_ == nullptr) return false;
    large_size_ = length;
    large_here_ = size - at;
    std::memcpy(large_.get(), buffer_.get() + at, large_here_);
    return true;
  }

  struct Free {
    void operator()(redisContext* context) const noexcept { redisFree(context); }
  };

  [[nodiscard]] Status lose_by_errno(std::string_view what, int number) {
    return lose(ErrorCode::unavailable, what, ": ", std::strerror(number), " (errno ", number, ")");
  }
  [[nodiscard]] Status unreadable() {
    return lose(ErrorCode::unavailable,
                "not what a redis server says: ", std::string(context_->reader->errstr));
  }

  std::string address_;
  std::unique_ptr<redisContext, Free> context_;
  RedisBounds bounds_;
  std::unique_ptr<char[]> buffer_;
  RedisReply::OwnedBytes large_;  // a string on its way, and its \r\n
  std::size_t large_size_ = 0;
  std::size_t large_room_ = 0;
  std::size_t large_here_ = 0;
};

}  // namespace detail

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
      return extend::error(last_error_.code(), last_error_.message(), "; next attempt in ", wait,
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
    text_ += extend::decimal(arguments.size());
    for (const RedisArgument& argument : arguments) {
      const std::string_view bytes = argument.text();
      text_ += "\r\n$";
      text_ += extend::decimal(bytes.size());
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
    return static_cast<double>(extend::mix_bits(jitter_ += 0x9E3779B97F4A7C15U) >> 11U) * 0x1p-53;
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
    if (options_.database != 0) queue({"SELECT", extend::decimal(options_.database)});
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
      const auto rotates = static_cast<std::int64_t>(bytes / slowest_bytes);
      if (spent / options_.command_timeout_ms > rotates) {
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

namespace detail {

/// What a server says about itself, and what it holds: who asks again later sees whether it is
/// still the same.
struct RedisIdentity {
  std::string run_id;   // another one for each process of the server
  std::string content;  // written once by whoever came first; gone when the data are
  std::string policy;   // what happens at `maxmemory`
  std::uint64_t max_memory = 0;

  [[nodiscard]] bool evicts() const noexcept {
    return max_memory != 0 && policy.substr(0, 8) == "allkeys-";
  }
  /// Never 0.
  [[nodiscard]] std::uint64_t generation() const {
    Hasher h;
    h.text(run_id);
    h.text(content);
    return h.digest().low | 1U;
  }
};

/// The value of `name:` in the lines of an INFO answer.
[[nodiscard]] inline std::string redis_info(std::string_view lines, std::string_view name) {
  for (std::size_t at = lines.find(name); at != std::string_view::npos;
       at = lines.find(name, at + 1)) {
    const bool begins = at == 0 || lines[at - 1] == '\n';
    const std::size_t value = at + name.size() + 1;
    if (!begins || value > lines.size() || lines[value - 1] != ':') continue;
    return std::string(lines.substr(value, lines.find_first_of("\r\n", value) - value));
  }
  return {};
}

/// A name that no earlier content of a server has had.
[[nodiscard]] inline std::string fresh_redis_content(const void* salt) {
  timespec now{};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  Hasher h;
  h.value(static_cast<std::int64_t>(now.tv_sec));
  h.value(static_cast<std::int64_t>(now.tv_nsec));
  h.value(static_cast<std::int64_t>(getpid()));
  h.value(reinterpret_cast<std::uintptr_t>(salt));
  return h.digest().hex();
}

/// Asks for it, and names the content where nobody has. A server that refuses INFO, or the write,
/// is known by less.
[[nodiscard]] inline Result<RedisIdentity> redis_identity(RedisConnection& connection,
                                                          const std::string& content_key) {
  connection.queue({"INFO", "server"});
  connection.queue({"INFO", "memory"});
  connection.queue({"GET", content_key});
  auto replies = connection.exchange();
  if (!replies) return replies.error();
  if ((*replies)[2].is_nil()) {
    connection.queue({"SET", content_key, fresh_redis_content(&connection), "NX"});
    connection.queue({"GET", content_key});
    auto written = connection.exchange();
    if (!written) return written.error();
    (*replies)[2] = (*written)[1];
  }
  KVMELD_TRY(connection.status_of((*replies)[2]));
  RedisIdentity identity;
  identity.run_id = redis_info((*replies)[0].text(), "run_id");
  identity.policy = redis_info((*replies)[1].text(), "maxmemory_policy");
  const std::string most = redis_info((*replies)[1].text(), "maxmemory");
  if (!most.empty()) {
    const auto number = redis_digits(most);
    if (!number)
      return extend::error(ErrorCode::corrupt, connection.address(), ": maxmemory is '",
                           most.substr(0, 40), "', and no number");
    identity.max_memory = *number;
  }
  identity.content = (*replies)[2].text();
  return identity;
}

}  // namespace detail

}  // namespace stores

KVMELD_NAMESPACE_END
