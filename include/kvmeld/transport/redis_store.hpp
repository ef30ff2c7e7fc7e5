#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/session/blob_store.hpp>
#include <kvmeld/transport/redis_identity.hpp>
#include <kvmeld/transport/redis_records.hpp>

KVMELD_NAMESPACE_BEGIN

struct RedisStoreOptions {
  RedisOptions server{};
  /// Stores of one namespace share their content; neither { nor } in it.
  std::string name_space = "kvmeld";
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
/// Models `BlobStore`. All keys are `{namespace}:…`: one hash slot. A blob is a string, the records
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
class RedisStore {
 public:
  /// Connects. Nothing is retried here: where the server may start later than the caller, the
  /// caller tries again.
  [[nodiscard]] static Result<RedisStore> open(RedisStoreOptions options) {
    KVMELD_TRY(detail::check_redis(options.server));
    KVMELD_TRY(detail::check_redis_namespace(options.name_space));
    RedisStore store(std::move(options));
    KVMELD_TRY(store.state_->ready());
    return Result(std::move(store));  // spelled out for nvcc, which would copy
  }

  /// Two round trips for a large blob and a known one, one for a small new one. One that is there
  /// is fetched and compared: it costs as much as sending it, the other way. One of other bytes is
  /// replaced. Errors: also `oversized` beyond 512 MiB, the server's limit.
  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) {
    const RedisBlob one{key, bytes};
    auto created = put_all(std::span(&one, 1));
    if (!created) return created.error();
    return static_cast<bool>((*created)[0]);
  }

  /// As `ArbiterStore` has it, in one round trip. Where the connection is lost under it, it may be
  /// there and answer false: look at what is there. Errors: also `oversized`.
  Result<bool> put_if_absent(const BlobKey& key, std::span<const std::byte> bytes) {
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
  Result<Blob> get(const BlobKey& key) {
    auto blobs = get_all(std::span(&key, 1));
    if (!blobs) return blobs.error();
    if ((*blobs)[0].data == nullptr)
      return detail::error(ErrorCode::not_found, state_->connection.address(), " has no blob ",
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

  Result<bool> contains(const BlobKey& key) {
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
        odd = detail::error(ErrorCode::corrupt, s.connection.address(), ": ", s.key_of(keys[i]),
                            " is a ", reply.text().substr(0, 40), ", and no string");
      }));
      KVMELD_TRY(odd);
      return there;
    });
  }

  /// What is not there is erased already. The server's memory is free when this returns (DEL, not
  /// UNLINK), so that a full one takes on.
  Status erase(const BlobKey& key) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.connection.command({"DEL", s.key_of(key)}).status(); });
  }

  Status add_record(std::span<const std::byte> bytes) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.records.add(s.connection, bytes); });
  }

  /// Cursors of an earlier generation read from the beginning: what they had seen may be gone or
  /// stand elsewhere.
  Result<RecordBatch> records(std::uint64_t cursor) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.records.read(s.connection, cursor); });
  }

  /// Replaces nothing, and only adds, where the cursor is of an earlier generation.
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    return s.attempt([&] { return s.records.replace(s.connection, cursor, bytes); });
  }

  /// Changes when the server may have lost something that it had acknowledged: it restarted,
  /// another took over, or its data were flushed. As the last call saw it, so compare it after
  /// each; `records` always looks. Whoever sees another value adds its records and blobs again.
  /// Never 0, and equal for all stores of a namespace.
  [[nodiscard]] std::uint64_t generation() const {
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
    return detail::error(ErrorCode::oversized, "a blob of ", bytes.size(), " bytes; redis takes ",
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
          prefix("{" + options.name_space + "}:"),
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
        return detail::error(
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

KVMELD_NAMESPACE_END
