#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/transport/redis_identity.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// The records of a namespace: a list whose element i has the number `base + i`. Replacing appends
/// the new record, cuts the old ones off the front and moves `base`, in one transaction; so a
/// number never names two records, and a number once read stays read.
///
/// A cursor is the number behind the last record read, under 20 bits of the generation in which it
/// was.
class RedisRecords {
 public:
  explicit RedisRecords(const std::string& prefix)
      : list_key_(prefix + "records"),
        base_key_(prefix + "records:base"),
        content_key_(prefix + "content") {}

  [[nodiscard]] const std::string& content_key() const noexcept { return content_key_; }
  [[nodiscard]] bool identified() const noexcept { return identified_; }
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  void identify(const RedisIdentity& identity) {
    identified_ = true;
    content_ = identity.content;
    if (identity.generation() != generation_) base_ = 0;
    generation_ = identity.generation();
  }

  Status add(RedisConnection& connection, std::span<const std::byte> bytes) {
    KVMELD_TRY(check_size(bytes));
    connection.queue({"RPUSH", list_key_, bytes});
    connection.queue({"GET", content_key_});
    auto replies = connection.exchange();
    if (!replies) return replies.error();
    KVMELD_TRY(connection.status_of((*replies)[0]));
    // flushed; this record is there, and the caller will learn of it
    if ((*replies)[1].text() != content_) identified_ = false;
    return {};
  }

  Result<RecordBatch> read(RedisConnection& connection, std::uint64_t cursor) {
    RecordBatch batch;
    std::uint64_t number = number_of(cursor);
    // the end when first seen: who adds faster than this reads is read the next time
    std::uint64_t goal = ~std::uint64_t{0};
    for (int others = 0; others < 1000;) {
      number = (std::max)(number, base_);
      const std::uint64_t first = number - base_;
      // No MULTI: a full server refuses it even for reading. `base` only grows, so what lies
      // between two equal ones is of one state; and a flush shows in the content's name, which is
      // read behind the list.
      connection.queue({"GET", base_key_});
      connection.queue({"LLEN", list_key_});
      connection.queue(
          {"LRANGE", list_key_, detail::decimal(first), detail::decimal(first + page - 1)});
      connection.queue({"GET", content_key_});
      connection.queue({"GET", base_key_});
      auto replies = connection.exchange();
      if (!replies) return replies.error();
      for (const RedisReply& reply : *replies) KVMELD_TRY(connection.status_of(reply));
      const RedisReply& list = (*replies)[2];
      if ((*replies)[3].text() != content_) {
        identified_ = false;
        return error(ErrorCode::unavailable, connection.address(),
                     ": the data were flushed while records were read");
      }
      const auto before = number_in((*replies)[0], base_key_, connection);
      const auto span = span_of((*replies)[4], (*replies)[1], connection);
      if (!before) return before.error();
      if (!span) return span.error();
      const auto [base, end] = *span;
      if (base != base_ || base != *before) {  // replaced since: looked at the wrong place
        base_ = base;
        ++others;
        continue;
      }
      if (number > end) {  // a cursor that nobody gave
        number = 0;
        ++others;
        continue;
      }
      goal = (std::min)(goal, end);
      if (!list.is_array() || list.size() > page) {
        return error(ErrorCode::corrupt, connection.address(), ": ", page, " records asked for, ",
                     list.size(), " given");
      }
      for (std::size_t i = 0; i < list.size(); ++i) {
        const RedisReply record = list[i];
        if (!record.is_bulk())
          return error(ErrorCode::corrupt, connection.address(), ": record ", number + i,
                       " is no string");
        batch.records.emplace_back(record.bytes().begin(), record.bytes().end());
      }
      number += list.size();
      if (number >= goal) {
        batch.cursor = cursor_of(number);
        return batch;
      }
      if (list.size() == 0) {
        return error(ErrorCode::corrupt, connection.address(), ": record ", number, " of ", end,
                     " is not in the list ", list_key_);
      }
    }
    return error(ErrorCode::unavailable, connection.address(),
                 ": records were replaced faster than they could be read");
  }

  Status replace(RedisConnection& connection, std::uint64_t cursor,
                 std::span<const std::byte> bytes) {
    KVMELD_TRY(check_size(bytes));
    const std::uint64_t number = number_of(cursor);
    for (int others = 0; others < 4; ++others) {
      connection.queue({"WATCH", base_key_, content_key_});
      connection.queue({"GET", content_key_});
      connection.queue({"GET", base_key_});
      connection.queue({"LLEN", list_key_});
      auto replies = connection.exchange();
      if (!replies) return replies.error();
      for (const RedisReply& reply : *replies) KVMELD_TRY(connection.status_of(reply));
      const bool same = (*replies)[1].text() == content_;
      const auto span = span_of((*replies)[2], (*replies)[3], connection);
      if (!span) {
        (void)connection.command({"UNWATCH"});
        return span.error();
      }
      base_ = span->base;
      const std::uint64_t end = span->end;
      if (same && number > end) {
        KVMELD_TRY(connection.command({"UNWATCH"}).status());
        return error(ErrorCode::invalid_argument, "cursor ", cursor, " stands at record ", number,
                     " of a store that has had ", end);
      }
      const std::uint64_t replaced = same && number > base_ ? number - base_ : 0;
      connection.queue({"MULTI"});
      connection.queue({"RPUSH", list_key_, bytes});
      if (replaced > 0) {
        connection.queue({"LTRIM", list_key_, detail::decimal(replaced), "-1"});
        connection.queue({"SET", base_key_, detail::decimal(base_ + replaced)});
      }
      connection.queue({"EXEC"});
      auto done = connection.exchange();
      if (!done) return done.error();
      for (const RedisReply& reply : *done) KVMELD_TRY(connection.status_of(reply));
      // another replaced at the same time, and nothing was done
      if (done->back().is_nil()) continue;
      for (std::size_t i = 0; i < done->back().size(); ++i)
        KVMELD_TRY(connection.status_of(done->back()[i]));
      if (!same) identified_ = false;
      return {};
    }
    return add(connection, bytes);  // the old ones stay until the next time
  }

 private:
  static constexpr unsigned number_bits = 44;
  static constexpr std::uint64_t page = 256;  // records an answer

  static constexpr std::uint64_t most = (std::uint64_t{1} << number_bits) - 1;  // a record's number

  struct Span {
    std::uint64_t base;  // number of the first record in the list
    std::uint64_t end;   // behind the last one
  };
  [[nodiscard]] static Result<std::uint64_t> number_in(const RedisReply& reply,
                                                       std::string_view what,
                                                       const RedisConnection& connection) {
    return redis_number(reply, most, what, connection.address());
  }
  /// Errors: `corrupt` for what no list of records has.
  [[nodiscard]] Result<Span> span_of(const RedisReply& base, const RedisReply& length,
                                     const RedisConnection& connection) const {
    const auto first = number_in(base, base_key_, connection);
    if (!first) return first.error();
    const auto count = number_in(length, "the length of " + list_key_, connection);
    if (!count) return count.error();
    if (*count <= most - *first) return Span{*first, *first + *count};
    return error(ErrorCode::corrupt, connection.address(), ": ", *count, " records from number ",
                 *first, " on; numbers go to ", most);
  }

  [[nodiscard]] std::uint64_t tag() const noexcept { return generation_ >> number_bits; }
  [[nodiscard]] std::uint64_t cursor_of(std::uint64_t number) const noexcept {
    return (tag() << number_bits) | number;
  }
  /// 0, the beginning, for cursors of another generation.
  [[nodiscard]] std::uint64_t number_of(std::uint64_t cursor) const noexcept {
    return cursor >> number_bits == tag() ? cursor & most : 0;
  }
  [[nodiscard]] static Status check_size(std::span<const std::byte> bytes) {
    constexpr std::size_t limit = std::size_t{512} << 20U;
    if (bytes.size() <= limit) return {};
    return error(ErrorCode::oversized, "a record of ", bytes.size(), " bytes; redis takes ", limit);
  }

  std::string list_key_;
  std::string base_key_;
  std::string content_key_;
  std::string content_;
  std::uint64_t base_ = 0;  // as last seen
  std::uint64_t generation_ = 0;
  bool identified_ = false;
};

}  // namespace detail

KVMELD_NAMESPACE_END
