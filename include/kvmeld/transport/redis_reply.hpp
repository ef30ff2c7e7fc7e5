#pragma once

#if !__has_include(<hiredis/hiredis.h>)
#error "kvmeld's Redis headers need hiredis: install libhiredis-dev (and link kvmeld::redis)"
#endif
#include <hiredis/hiredis.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

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
    return error(ErrorCode::corrupt, where, ": ", what, " is ", *number, ", and at most ", most);
  return error(ErrorCode::corrupt, where, ": ", what, " is '", reply.text().substr(0, 40),
               "', and no number");
}

/// Good, or what the server said, cut at 200 bytes.
[[nodiscard]] inline Status redis_status(const RedisReply& reply, std::string_view where) {
  if (!reply.is_error()) return {};
  const ErrorCode code = redis_error_code(reply.text());
  const std::string_view what = code == ErrorCode::store_full ? " takes no more: " : " says: ";
  return error(code, where, what, reply.text().substr(0, 200));
}

}  // namespace detail

KVMELD_NAMESPACE_END
