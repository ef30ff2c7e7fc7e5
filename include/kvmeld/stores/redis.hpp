#pragma once

/// A store and a transport over Redis.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <time.h>

#include <kvmeld/config.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/stores/detail/redis_connection.hpp>

KVMELD_NAMESPACE_BEGIN

namespace stores {

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

  Result<replica::RecordBatch> read(RedisConnection& connection, std::uint64_t cursor) {
    replica::RecordBatch batch;
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
          {"LRANGE", list_key_, extend::decimal(first), extend::decimal(first + page - 1)});
      connection.queue({"GET", content_key_});
      connection.queue({"GET", base_key_});
      auto replies = connection.exchange();
      if (!replies) return replies.error();
      for (const RedisReply& reply : *replies) KVMELD_TRY(connection.status_of(reply));
      const RedisReply& list = (*replies)[2];
      if ((*replies)[3].text() != content_) {
        identified_ = false;
        return extend::error(ErrorCode::unavailable, connection.address(),
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
        return extend::error(ErrorCode::corrupt, connection.address(), ": ", page,
                             " records asked for, ", list.size(), " given");
      }
      for (std::size_t i = 0; i < list.size(); ++i) {
        const RedisReply record = list[i];
        if (!record.is_bulk())
          return extend::error(ErrorCode::corrupt, connection.address(), ": record ", number + i,
                               " is no string");
        batch.records.emplace_back(record.bytes().begin(), record.bytes().end());
      }
      number += list.size();
      if (number >= goal) {
        batch.cursor = cursor_of(number);
        return batch;
      }
      if (list.size() == 0) {
        return extend::error(ErrorCode::corrupt, connection.address(), ": record ", number, " of ",
                             end, " is not in the list ", list_key_);
      }
    }
    return extend::error(ErrorCode::unavailable, connection.address(),
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
        return extend::error(ErrorCode::invalid_argument, "cursor ", cursor, " stands at record ",
                             number, " of a store that has had ", end);
      }
      const std::uint64_t replaced = same && number > base_ ? number - base_ : 0;
      connection.queue({"MULTI"});
      connection.queue({"RPUSH", list_key_, bytes});
      if (replaced > 0) {
        connection.queue({"LTRIM", list_key_, extend::decimal(replaced), "-1"});
        connection.queue({"SET", base_key_, extend::decimal(base_ + replaced)});
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
    return extend::error(ErrorCode::corrupt, connection.address(), ": ", *count,
                         " records from number ", *first, " on; numbers go to ", most);
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
    return extend::error(ErrorCode::oversized, "a record of ", bytes.size(), " bytes; redis takes ",
                         limit);
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

/// The server of a store, and what its keys begin with.
struct RedisStoreOptions {
  RedisOptions server{};
  /// Stores of one namespace share their content; neither { nor } in it.
  std::string scope = "kvmeld";
  /// Blobs of at least so many bytes are asked for (STRLEN) before they are sent.
  std::size_t ask_first_bytes = 1024;
  /// Take a server that throws keys away when its memory is full. Not only blobs may go then: the
  /// records are one key, and with it all operations of all replicas, with no word but another
  /// `generation()` where `content` went, too.
  bool allow_eviction = false;
};

/// What a store has moved and saved since it was opened.
struct RedisStoreCounters {
  std::uint64_t bytes_sent = 0;  ///< as the socket counted them, commands included
  std::uint64_t bytes_received = 0;
  std::uint64_t round_trips = 0;
  std::uint64_t reconnects = 0;
  std::uint64_t dedup_hits = 0;   ///< puts of blobs that were there
  std::uint64_t dedup_bytes = 0;  ///< of those, what was not sent
};

/// A blob to put among others.
struct RedisBlob {
  BlobKey key{};
  std::span<const std::byte> bytes{};
};

/// Keeps blobs and records in a Redis or Valkey server, where the replicas of a namespace meet.
///
/// An `ArbiterStore`. All keys are `{namespace}:…`: one hash slot. A blob is a string, the records
/// are a list; every write is one command or one MULTI/EXEC, so a server that dies in the middle of
/// it has all of it or nothing. Acknowledged means what the server's own settings promise: with
/// `appendonly yes` a killed server comes back with everything (`appendfsync always`: also a
/// machine that lost power), with snapshots only it comes back with the last one, and a failover to
/// a replica may lose the last writes. What cannot be prevented is noticed: `generation()` changes
/// with every restart, failover or flush, and who adds its records and blobs again then has lost
/// nothing (known ones are not sent a second time). Calls are thread-safe, one at a time; another
/// store is another connection. A lost connection is made again within the call, once; after that,
/// see `RedisConnection` for when, and for how long a call waits. Errors of every call:
/// `unavailable`, `store_full` (memory or disk), `unauthenticated`, `invalid_argument`; `corrupt`
/// where the namespace holds somebody else's types; `unsupported` for a server that evicts keys, or
/// a cluster's wrong node.
class RedisStore final : public replica::ArbiterStore {
 public:
  /// Connects. Nothing is retried here: where the server may start later than the caller, the
  /// caller tries again.
  [[nodiscard]] static Result<RedisStore> open(RedisStoreOptions options) {
    KVMELD_TRY(detail::check_redis(options.server));
    KVMELD_TRY(detail::check_redis_namespace(options.scope));
    RedisStore store(std::move(options));
    KVMELD_TRY(store.state_->ready());
    return Result(std::move(store));  // spelled out for nvcc, which would copy
  }

  /// Two round trips for a large blob and a known one, one for a small new one. One that is there
  /// is fetched and compared: it costs as much as sending it, the other way. One of other bytes is
  /// replaced. Errors: also `oversized` beyond 512 MiB, the server's limit.
  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) override {
    const RedisBlob one{key, bytes};
    auto created = put_all(std::span(&one, 1));
    if (!created) return created.error();
    return static_cast<bool>((*created)[0]);
  }

  /// As `ArbiterStore` has it, in one round trip. Where the connection is lost under it, it may be
  /// there and answer false: look at what is there. Errors: also `oversized`.
  Result<bool> put_if_absent(const BlobKey& key, std::span<const std::byte> bytes) override {
    KVMELD_TRY(check_size(bytes));
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&]() -> Result<bool> {
      const auto reply = s.connection.command({"SET", s.key_of(key), bytes, "NX"});
      if (!reply) return reply.error();
      return !reply->is_nil();
    });
  }

  /// As `put` of each, in two round trips for all. After an error some may be stored, each whole.
  Result<std::vector<bool>> put_all(std::span<const RedisBlob> blobs) {
    for (const RedisBlob& blob : blobs) KVMELD_TRY(check_size(blob.bytes));
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&]() -> Result<std::vector<bool>> {
      std::vector<bool> known(blobs.size(), false), other(blobs.size(), false),
          created(blobs.size(), false);
      std::vector<std::size_t> order, there;
      for (std::size_t i = 0; i < blobs.size(); ++i) {
        if (blobs[i].bytes.size() < s.options.ask_first_bytes) continue;
        s.connection.queue({"STRLEN", s.key_of(blobs[i].key)});
        order.push_back(i);
      }
      KVMELD_TRY(s.for_each_reply(order, [&](std::size_t i, const RedisReply& reply) {
        const bool as_long = reply.number() == blobs[i].bytes.size();
        other[i] = !as_long && reply.number() != 0U;
        if (as_long) there.push_back(i);
      }));
      const auto compare = [&](std::size_t i, const RedisReply& reply) {
        known[i] = !reply.is_nil() && std::ranges::equal(reply.bytes(), blobs[i].bytes);
        other[i] = !known[i];
      };
      KVMELD_TRY(s.get_some(
          there, [&](std::size_t i) { return blobs[i].key; }, compare));
      const auto send = [&](const auto& wanted, std::vector<std::size_t>* refused) -> Status {
        order.clear();
        for (std::size_t i = 0; i < blobs.size(); ++i) {
          if (!wanted(i)) continue;
          if (other[i])
            s.connection.queue({"SET", s.key_of(blobs[i].key), blobs[i].bytes});
          else
            s.connection.queue({"SET", s.key_of(blobs[i].key), blobs[i].bytes, "NX"});
          order.push_back(i);
        }
        return s.for_each_reply(order, [&](std::size_t i, const RedisReply& reply) {
          created[i] = !reply.is_nil();
          if (!created[i] && refused != nullptr) refused->push_back(i);
        });
      };
      there.clear();
      const std::vector<bool> unsent = known;
      KVMELD_TRY(send([&](std::size_t i) { return !known[i]; }, &there));
      KVMELD_TRY(s.get_some(
          there, [&](std::size_t i) { return blobs[i].key; }, compare));
      KVMELD_TRY(send([&](std::size_t i) { return !known[i] && !created[i]; }, nullptr));
      for (std::size_t i = 0; i < blobs.size(); ++i) {
        s.dedup_hits += created[i] ? 0U : 1U;
        s.dedup_bytes += unsent[i] ? blobs[i].bytes.size() : 0;
      }
      return created;
    });
  }

  /// One copy behind the socket's. Errors: also `not_found`.
  Result<Blob> get(const BlobKey& key) override {
    auto blobs = get_all(std::span(&key, 1));
    if (!blobs) return blobs.error();
    if ((*blobs)[0].data == nullptr)
      return extend::error(ErrorCode::not_found, state_->connection.address(), " has no blob ",
                           key.hex());
    return std::move((*blobs)[0]);
  }

  /// As many in a round trip as make about a MiB, since more at once only fill the server's
  /// buffers; null `data` for what is not there.
  Result<std::vector<Blob>> get_all(std::span<const BlobKey> keys) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&]() -> Result<std::vector<Blob>> {
      std::vector<Blob> blobs(keys.size());
      std::vector<std::size_t> all(keys.size());
      std::iota(all.begin(), all.end(), std::size_t{0});
      KVMELD_TRY(s.get_some(
          all, [&](std::size_t i) { return keys[i]; },
          [&](std::size_t i, const RedisReply& reply) {
            if (!reply.is_nil()) blobs[i] = {reply.shared_bytes(), reply.bytes().size()};
          }));
      return blobs;
    });
  }

  Result<bool> contains(const BlobKey& key) override {
    auto all = contains_all(std::span(&key, 1));
    if (!all) return all.error();
    return static_cast<bool>((*all)[0]);
  }

  /// In one round trip.
  Result<std::vector<bool>> contains_all(std::span<const BlobKey> keys) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&]() -> Result<std::vector<bool>> {
      std::vector<std::size_t> order;
      for (const BlobKey& key : keys) {
        s.connection.queue({"TYPE", s.key_of(key)});
        order.push_back(order.size());
      }
      std::vector<bool> there(keys.size(), false);
      Status odd;
      KVMELD_TRY(s.for_each_reply(order, [&](std::size_t i, const RedisReply& reply) {
        there[i] = reply.text() == "string";
        if (there[i] || reply.text() == "none") return;
        odd = extend::error(ErrorCode::corrupt, s.connection.address(), ": ", s.key_of(keys[i]),
                            " is a ", reply.text().substr(0, 40), ", and no string");
      }));
      KVMELD_TRY(odd);
      return there;
    });
  }

  /// What is not there is erased already. The server's memory is free when this returns (DEL, not
  /// UNLINK), so that a full one takes on.
  Status erase(const BlobKey& key) override {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.connection.command({"DEL", s.key_of(key)}).status(); });
  }

  Status add_record(std::span<const std::byte> bytes) override {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.records.add(s.connection, bytes); });
  }

  /// Cursors of an earlier generation read from the beginning: what they had seen may be gone or
  /// stand elsewhere.
  Result<replica::RecordBatch> records(std::uint64_t cursor) override {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.records.read(s.connection, cursor); });
  }

  /// Replaces nothing, and only adds, where the cursor is of an earlier generation.
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.records.replace(s.connection, cursor, bytes); });
  }

  /// Changes when the server may have lost something that it had acknowledged: it restarted,
  /// another took over, or its data were flushed. As the last call saw it, so compare it after
  /// each; `records` always looks. Whoever sees another value adds its records and blobs again.
  /// Never 0, and equal for all stores of a namespace.
  [[nodiscard]] std::uint64_t generation() const override {
    const std::lock_guard lock(state_->mutex);
    return state_->records.generation();
  }

  [[nodiscard]] RedisStoreCounters counters() const {
    const State& s = *state_;
    const std::lock_guard lock(s.mutex);
    const RedisTraffic& t = s.connection.traffic();
    return {t.bytes_sent, t.bytes_received, t.round_trips, t.connects == 0 ? 0 : t.connects - 1,
            s.dedup_hits, s.dedup_bytes};
  }

 private:
  [[nodiscard]] static Status check_size(std::span<const std::byte> bytes) {
    constexpr std::size_t limit = std::size_t{512} << 20U;
    if (bytes.size() <= limit) return {};
    return extend::error(ErrorCode::oversized, "a blob of ", bytes.size(), " bytes; redis takes ",
                         limit);
  }

  struct State {
    RedisStoreOptions options;
    std::string prefix;
    RedisConnection connection;
    detail::RedisRecords records;
    std::uint64_t identified_at = 0;  // the connection's number
    std::uint64_t dedup_hits = 0;
    std::uint64_t dedup_bytes = 0;
    mutable std::mutex mutex;

    explicit State(RedisStoreOptions given)
        : options(std::move(given)),
          prefix("{" + options.scope + "}:"),
          connection(options.server),
          records(prefix) {}

    [[nodiscard]] std::string key_of(const BlobKey& key) const {
      return prefix + "blob:" + key.hex();
    }

    /// Connected, and to a server whose identity is known.
    [[nodiscard]] Status ready() {
      KVMELD_TRY(connection.connect());
      if (connection.traffic().connects == identified_at && records.identified()) return {};
      auto identity = detail::redis_identity(connection, records.content_key());
      if (!identity) return identity.error();
      if (identity->evicts() && !options.allow_eviction) {
        return extend::error(
            ErrorCode::unsupported, connection.address(), " throws keys away at ",
            identity->max_memory, " bytes (maxmemory-policy ", identity->policy,
            "): set noeviction, or allow_eviction where blobs and all operations may go missing");
      }
      identified_at = connection.traffic().connects;
      records.identify(*identity);
      return {};
    }

    /// Runs an operation, and once more where the connection was lost under it. All operations may
    /// be run twice.
    template <class Operation>
    auto attempt(const Operation& operation) -> decltype(operation()) {
      for (bool again = true;; again = false) {
        if (Status status = ready(); !status) return as_store(status);
        auto result = operation();
        const Status status = code_of(result);
        if (status) {
          if (!records.identified()) (void)ready();  // flushed under it: `generation` tells
          return result;
        }
        // A master that became a replica keeps its connections; whoever connects anew may be led to
        // the new master.
        if (status.message().find("READONLY") != std::string::npos) connection.disconnect();
        const bool lost = !connection.connected() && status.code() == ErrorCode::unavailable;
        if (!again || (!lost && records.identified())) return as_store(status);
      }
    }
    static Status code_of(const Status& status) { return status; }
    template <class T>
    static Status code_of(const Result<T>& result) {
      return result.status();
    }
    static Status as_store(const Status& status) {
      return status.code() == ErrorCode::timed_out
                 ? Status(ErrorCode::unavailable, status.message())
                 : status;
    }

    /// GETs of `key_at(i)` for all of `wanted`, as many in a round trip as make about a MiB;
    /// `visit(i, answer)`.
    template <class KeyAt, class Visit>
    [[nodiscard]] Status get_some(const std::vector<std::size_t>& wanted, const KeyAt& key_at,
                                  const Visit& visit) {
      std::vector<std::size_t> order;
      for (std::size_t next = 0, together = 1; next < wanted.size();) {
        order.clear();
        for (; next < wanted.size() && order.size() < together; ++next) {
          connection.queue({"GET", key_of(key_at(wanted[next]))});
          order.push_back(wanted[next]);
        }
        std::size_t bytes = 0;
        KVMELD_TRY(for_each_reply(order, [&](std::size_t i, const RedisReply& reply) {
          bytes += reply.bytes().size();
          visit(i, reply);
        }));
        if (bytes < (std::size_t{1} << 18U)) together *= 4;
        if (bytes > (std::size_t{1} << 21U) && together > 1) together /= 2;
      }
      return {};
    }

    /// Sends what is queued; `visit(order[i], answer i)` for all, or the first error among the
    /// answers.
    template <class Visit>
    [[nodiscard]] Status for_each_reply(const std::vector<std::size_t>& order, const Visit& visit) {
      if (order.empty()) return {};
      auto replies = connection.exchange();
      if (!replies) return replies.error();
      for (const RedisReply& reply : *replies) KVMELD_TRY(connection.status_of(reply));
      for (std::size_t i = 0; i < order.size(); ++i) visit(order[i], (*replies)[i]);
      return {};
    }
  };

  explicit RedisStore(RedisStoreOptions options)
      : state_(std::make_unique<State>(std::move(options))) {}

  std::unique_ptr<State> state_;
};

/// The server of a transport, who this member is, and how long it waits.
struct RedisTransportOptions {
  RedisOptions server{};
  /// Members of one namespace hear each other; neither { nor } in it.
  std::string scope = "kvmeld";
  replica::MemberId self = 0;  ///< one of its own for each member
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
/// One channel for everyone and one for each member, `{namespace}:news` and
/// `{namespace}:to:…`; a message is its sender's id and its bytes. It loses on purpose: what is
/// published while a member is not subscribed, and all that waits for a member which reads so
/// slowly that the server's output buffer (`client-output-buffer-limit pubsub`, 32 MiB as shipped)
/// runs over, since the server cuts that connection then. Anti-entropy above repairs it;
/// `counters().reconnects` tells of a gap. Two connections: `send` and `receive` may be called by
/// two threads at once, and each by several in turn. A lost connection is made again by later
/// calls, with backoff; `send` tries once more within the call, and waits as `RedisConnection`
/// does. `receive` keeps to its timeout, but where it connects anew it may take
/// `connect_timeout_ms` and `command_timeout_ms` more.
class RedisTransport final : public replica::Transport {
 public:
  /// Connects and subscribes: what is sent after this returned arrives.
  ///
  /// Errors: `invalid_argument`, `unavailable`, `unauthenticated`.
  [[nodiscard]] static Result<RedisTransport> open(RedisTransportOptions options) {
    KVMELD_TRY(detail::check_redis(options.server));
    KVMELD_TRY(detail::check_redis_namespace(options.scope));
    constexpr std::size_t limit = (std::size_t{512} << 20U) - header_bytes;
    if (options.self == replica::everyone)
      return extend::error(ErrorCode::invalid_argument, "member ", options.self,
                           " stands for everyone");
    if (options.max_message_bytes < 1 || options.max_message_bytes > limit ||
        options.silence_ms < 1) {
      return extend::error(ErrorCode::invalid_argument, "messages of at most ",
                           options.max_message_bytes, " bytes (redis takes ", limit,
                           "), silence of ", options.silence_ms, " ms");
    }
    RedisTransport transport(std::move(options));
    KVMELD_TRY(transport.state_->subscribe());
    transport.state_->in = transport.state_->subscriber.traffic();
    return Result(std::move(transport));  // spelled out for nvcc, which would copy
  }

  [[nodiscard]] replica::MemberId self() const noexcept override { return state_->options.self; }
  [[nodiscard]] std::size_t max_message_bytes() const noexcept override {
    return state_->options.max_message_bytes;
  }

  /// One round trip; without error the server has it. Errors: `unavailable`, `oversized`,
  /// `unauthenticated`.
  Status send(replica::MemberId to, std::span<const std::byte> bytes) override {
    State& s = *state_;
    if (bytes.size() > max_message_bytes()) {
      return extend::error(ErrorCode::oversized, "a message of ", bytes.size(),
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
  Result<std::optional<replica::Envelope>> receive(std::int64_t timeout_ms) override {
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
  static constexpr std::size_t header_bytes = mark.size() + sizeof(replica::MemberId);

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
    std::deque<replica::Envelope> arrived;
    std::uint64_t discarded = 0;
    mutable std::mutex count_mutex;
    RedisTransportCounters counters;
    RedisTraffic out;
    RedisTraffic in;

    explicit State(RedisTransportOptions given)
        : options(std::move(given)),
          prefix("{" + options.scope + "}:"),
          publisher(options.server),
          subscriber(options.server) {}

    [[nodiscard]] std::string channel(replica::MemberId to) const {
      return to == replica::everyone ? prefix + "news" : prefix + "to:" + extend::decimal(to);
    }

    /// Tried again where the connection was lost: not after a timeout, which may have delivered it,
    /// nor a refusal.
    [[nodiscard]] Result<RedisReply> publish(replica::MemberId to,
                                             std::span<const std::byte> bytes) {
      frame.resize(header_bytes + bytes.size());
      std::memcpy(frame.data(), mark.data(), mark.size());
      std::memcpy(frame.data() + mark.size(), &options.self, sizeof(replica::MemberId));
      std::copy(bytes.begin(), bytes.end(), frame.begin() + header_bytes);
      for (bool again = publisher.connected();; again = false) {
        auto heard = publisher.command({"PUBLISH", channel(to), std::span<const std::byte>(frame)});
        if (heard || !again || publisher.connected() ||
            heard.error().code() != ErrorCode::unavailable)
          return heard;
      }
    }

    [[nodiscard]] Result<std::optional<replica::Envelope>> next(std::int64_t deadline) {
      for (;;) {
        if (!arrived.empty()) {
          std::optional<replica::Envelope> first(std::move(arrived.front()));
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
        return std::optional<replica::Envelope>();
      }
    }

    [[nodiscard]] Status subscribe() {
      if (subscribed && subscriber.connected()) return {};
      subscribed = false;
      KVMELD_TRY(subscriber.connect());
      subscriber.queue({"SUBSCRIBE", channel(replica::everyone), channel(options.self)});
      KVMELD_TRY(subscriber.post());
      for (int confirmed = 0; confirmed < 2;) {
        auto reply = subscriber.next_reply(options.server.command_timeout_ms);
        if (!reply) return reply.error();
        if (!reply->has_value()) {
          subscriber.disconnect();
          return extend::error(ErrorCode::unavailable, subscriber.address(),
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
          return extend::error(ErrorCode::unavailable, subscriber.address(), ": no answer for ",
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
      replica::Envelope envelope;
      std::memcpy(&envelope.from, bytes.data() + mark.size(), sizeof(replica::MemberId));
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

}  // namespace stores

KVMELD_NAMESPACE_END
