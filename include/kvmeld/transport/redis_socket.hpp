#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/transport/redis_options.hpp>
#include <kvmeld/transport/redis_reply.hpp>

KVMELD_NAMESPACE_BEGIN

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
    return error(code, address_, ": ", parts...);
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

KVMELD_NAMESPACE_END
