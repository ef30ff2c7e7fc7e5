#pragma once
// What BlobStore asks for and no compiler checks. Any store, also one that holds other
// things already: keys and records come from a seed, so that two runs on one server do not meet.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include <kvmeld/replica/stores.hpp>

#include "catch.hpp"

namespace test {

using Bytes = std::vector<std::byte>;

inline kvmeld::BlobKey blob_key(std::uint64_t seed, std::uint64_t number) {
  kvmeld::BlobKey key;
  std::mt19937_64 random(seed * 1'000'003 + number);
  for (std::uint8_t& byte : key.bytes) byte = static_cast<std::uint8_t>(random());
  return key;
}

/// Bytes that only this number has, each of which depends on it.
inline Bytes blob_bytes(std::uint64_t number, std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((number + i * i + (i >> 9U)) * 0x9E3779B1U >> 11U);
  return bytes;
}

inline bool equal(const kvmeld::Blob& blob, const Bytes& bytes) {
  return std::ranges::equal(blob.bytes(), bytes);
}

/// A record of the seed that holds some numbers.
inline Bytes number_record(std::uint64_t seed, const std::set<std::uint64_t>& numbers) {
  std::vector<std::uint64_t> words{seed};
  words.insert(words.end(), numbers.begin(), numbers.end());
  Bytes bytes(words.size() * sizeof(std::uint64_t));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

/// The numbers that the seed's records of a batch hold.
inline std::set<std::uint64_t> numbers_in(std::uint64_t seed,
                                          const kvmeld::replica::RecordBatch& batch) {
  std::set<std::uint64_t> numbers;
  for (const Bytes& record : batch.records) {
    std::vector<std::uint64_t> words(record.size() / sizeof(std::uint64_t));
    if (!words.empty())
      std::memcpy(words.data(), record.data(), words.size() * sizeof(std::uint64_t));
    if (words.empty() || words[0] != seed) continue;
    numbers.insert(words.begin() + 1, words.end());
  }
  return numbers;
}

/// Who comes second learns that, and changes nothing.
template <class Store>
void arbiter_laws(Store& store, Store& other, std::uint64_t seed) {
  for (const std::size_t size : {0U, 7U, 1048593U}) {
    const kvmeld::BlobKey key = blob_key(seed, 1'000'000 + size);
    const Bytes bytes = blob_bytes(1, size);
    const auto first = store.put_if_absent(key, bytes);
    REQUIRE(first.ok());
    CHECK(*first);
    for (Store* s : {&store, &other}) {
      for (const std::size_t longer : {0U, 1U}) {
        const auto later = s->put_if_absent(key, blob_bytes(2, size + longer));
        REQUIRE(later.ok());
        CHECK_FALSE(*later);
      }
      const auto got = s->get(key);
      REQUIRE(got.ok());
      CHECK(equal(*got, bytes));
    }
    REQUIRE(store.erase(key).ok());
    const auto anew = other.put_if_absent(key, bytes);
    REQUIRE(anew.ok());
    CHECK(*anew);
    REQUIRE(store.erase(key).ok());
  }
}

template <class Store>
void blob_laws(Store& store, Store& other, std::uint64_t seed) {
  std::uint64_t number = 0;
  for (const std::size_t size : {0U, 1U, 31U, 4095U, 4096U, 4097U, 1048593U}) {
    INFO("a blob of " << size << " bytes");
    const kvmeld::BlobKey key = blob_key(seed, ++number);
    const Bytes bytes = blob_bytes(number, size);
    const Bytes others = blob_bytes(number + 1000, size + 1);
    for (Store* s : {&store, &other}) {
      const auto absent = s->get(key);
      REQUIRE_FALSE(absent.ok());
      CHECK(absent.error().code() == kvmeld::ErrorCode::not_found);
      const auto contains = s->contains(key);
      REQUIRE(contains.ok());
      CHECK_FALSE(*contains);
    }
    CHECK(store.erase(key).ok());  // erased already
    const auto put = store.put(key, bytes);
    REQUIRE(put.ok());
    CHECK(*put);
    for (Store* s : {&store, &other}) {
      const auto again = s->put(key, bytes);
      REQUIRE(again.ok());
      CHECK_FALSE(*again);
      const auto contains = s->contains(key);
      REQUIRE(contains.ok());
      CHECK(*contains);
      const auto got = s->get(key);
      REQUIRE(got.ok());
      CHECK(equal(*got, bytes));
      CHECK(got->data != nullptr);
    }
    const auto held = store.get(key);
    REQUIRE(held.ok());
    // Other bytes in its place, of another length and of the same one, are not taken for it: they
    // are replaced.
    Bytes one_bit = bytes;
    if (size > 0) one_bit[size / 2] ^= std::byte{16};
    for (const Bytes& wrong : {others, one_bit}) {
      if (wrong == bytes) continue;
      const auto replaced = other.put(key, wrong);
      REQUIRE(replaced.ok());
      CHECK(*replaced);
      const auto got = store.get(key);
      REQUIRE(got.ok());
      CHECK(equal(*got, wrong));
      const auto back = store.put(key, bytes);
      REQUIRE(back.ok());
      CHECK(*back);
      const auto right = other.get(key);
      REQUIRE(right.ok());
      CHECK(equal(*right, bytes));
    }
    REQUIRE(other.erase(key).ok());
    CHECK(equal(*held, bytes));  // whoever holds a blob keeps its bytes
    CHECK_FALSE(store.get(key).ok());
    const auto back = store.put(key, others);
    REQUIRE(back.ok());
    CHECK(*back);
    const auto got = other.get(key);
    REQUIRE(got.ok());
    CHECK(equal(*got, others));
    CHECK(equal(*held, bytes));
    REQUIRE(store.erase(key).ok());
  }
}

template <class Store>
void record_laws(Store& store, Store& other, std::uint64_t seed) {
  const auto has = [](const kvmeld::replica::RecordBatch& batch, const Bytes& record) {
    return std::find(batch.records.begin(), batch.records.end(), record) != batch.records.end();
  };
  const auto start = store.records(0);
  REQUIRE(start.ok());
  std::uint64_t number = 0;
  std::vector<Bytes> added;
  std::uint64_t cursor = start->cursor;
  for (const std::size_t size : {8U, 0U, 1U, 100U, 5000U, 300'007U}) {
    added.push_back(blob_bytes(seed + ++number, size));
    Store& writer = number % 2 == 0 ? store : other;
    REQUIRE(writer.add_record(added.back()).ok());
    for (Store* s : {&store, &other}) {
      const auto after = s->records(cursor);
      REQUIRE(after.ok());
      CHECK(has(*after, added.back()));
      const auto all = s->records(0);
      REQUIRE(all.ok());
      for (const Bytes& record : added) CHECK(has(*all, record));
    }
    const auto next = store.records(cursor);
    REQUIRE(next.ok());
    cursor = next->cursor;
    const auto first = store.records(start->cursor);  // an old cursor stays good
    REQUIRE(first.ok());
    for (const Bytes& record : added) CHECK(has(*first, record));
  }

  // Histories: what was added and never replaced is there; what is there was once added.
  const std::uint64_t histories = seed * 16 + 1;
  std::mt19937_64 random(seed);
  struct Seen {
    std::uint64_t cursor;
    std::set<std::uint64_t> numbers;  // that were in the store when the cursor was given
  };
  std::vector<Seen> cursors{{0, {}}};
  std::set<std::uint64_t> all;
  for (int step = 0; step < 200; ++step) {
    Store& s = random() % 2 == 0 ? store : other;
    const auto what = random() % 8;
    if (what < 4) {
      const std::uint64_t n = random();
      REQUIRE(s.add_record(number_record(histories, {n})).ok());
      all.insert(n);
    } else if (what < 7) {
      const Seen& from = cursors[random() % cursors.size()];
      const auto batch = s.records(from.cursor);
      REQUIRE(batch.ok());
      const auto numbers = numbers_in(histories, *batch);
      std::set<std::uint64_t> later;
      std::ranges::set_difference(all, from.numbers, std::inserter(later, later.end()));
      CHECK(std::ranges::includes(numbers, later));
      CHECK(std::ranges::includes(all, numbers));
      cursors.push_back({batch->cursor, all});
    } else {
      // Any cursor, also one that is outdated by replacements since: nothing may be lost that r
      // does not hold.
      const Seen& from = cursors[random() % cursors.size()];
      REQUIRE(s.replace_records(from.cursor, number_record(histories, from.numbers)).ok());
    }
  }
  const auto end = store.records(0);
  REQUIRE(end.ok());
  CHECK((numbers_in(histories, *end) == all));

  // With the newest cursor the replaced ones do go.
  REQUIRE(store.replace_records(end->cursor, number_record(histories, all)).ok());
  const auto compact = other.records(0);
  REQUIRE(compact.ok());
  CHECK((numbers_in(histories, *compact) == all));
  std::set<Bytes> distinct(compact->records.begin(), compact->records.end());
  CHECK((distinct == std::set<Bytes>{number_record(histories, all)}));
  // An older cursor sees what came in the place of what it had seen.
  const auto again = store.records(start->cursor);
  REQUIRE(again.ok());
  CHECK((numbers_in(histories, *again) == all));
}

/// Threads over two handles; for stores whose calls are thread-safe. Asserts only behind the
/// threads: Catch is not thread-safe.
template <class Store>
void concurrent_laws(Store& store, Store& other, std::uint64_t seed, int rounds = 40) {
  constexpr int writers = 4;
  const std::uint64_t tag = seed * 16 + 2;
  std::atomic<int> errors{0}, partial{0}, created{0}, returned_absent{0};
  std::atomic<bool> stop{false};
  const auto key = [seed](int round) {
    return blob_key(seed, 77'000 + static_cast<std::uint64_t>(round));
  };
  const auto bytes = [](int round) {
    return blob_bytes(static_cast<std::uint64_t>(round), 10'000 + static_cast<std::size_t>(round));
  };
  std::vector<std::thread> threads;
  for (int w = 0; w < writers; ++w) {
    threads.emplace_back([&, w] {
      Store& s = w % 2 == 0 ? store : other;
      for (int r = 0; r < rounds; ++r) {
        const auto put = s.put(key(r), bytes(r));
        if (!put) ++errors;
        if (put && *put) ++created;
        const auto got = s.get(key(r));
        if (!got) ++returned_absent;
        if (got && !equal(*got, bytes(r))) ++partial;
        if (!s.add_record(number_record(tag, {static_cast<std::uint64_t>(w * rounds + r)})).ok())
          ++errors;
      }
    });
  }
  threads.emplace_back([&] {  // sees a blob whole or not at all
    for (int r = 0; !stop; r = (r + 1) % rounds) {
      const auto got = other.get(key(r));
      if (!got && got.error().code() != kvmeld::ErrorCode::not_found) ++errors;
      if (got && !equal(*got, bytes(r))) ++partial;
    }
  });
  threads.emplace_back([&] {  // keeps replacing what it has read by one record that holds it all
    while (!stop) {
      const auto batch = store.records(0);
      if (!batch) {
        ++errors;
        continue;
      }
      if (!store.replace_records(batch->cursor, number_record(tag, numbers_in(tag, *batch))).ok())
        ++errors;
      std::this_thread::yield();
    }
  });
  for (int w = 0; w < writers; ++w) threads[static_cast<std::size_t>(w)].join();
  stop = true;
  threads[writers].join();
  threads[writers + 1].join();
  CHECK(errors == 0);
  CHECK(partial == 0);
  CHECK(returned_absent == 0);
  CHECK(created == rounds);  // of four that put the same, one is told that it is new
  std::set<std::uint64_t> expected;
  for (int n = 0; n < writers * rounds; ++n) expected.insert(static_cast<std::uint64_t>(n));
  for (Store* s : {&store, &other}) {
    const auto end = s->records(0);
    REQUIRE(end.ok());
    CHECK((numbers_in(tag, *end) == expected));
  }
  for (int r = 0; r < rounds; ++r) CHECK(store.erase(key(r)).ok());
}

/// All of them. @param other another handle on the same content, or the same store.
template <class Store>
void store_laws(Store& store, Store& other, std::uint64_t seed, bool threads = true) {
  blob_laws(store, other, seed);
  if constexpr (std::is_base_of_v<kvmeld::replica::ArbiterStore, Store>)
    arbiter_laws(store, other, seed);
  record_laws(store, other, seed);
  if (threads) concurrent_laws(store, other, seed);
}

/// The payloads of a store under the names that its blobs have.
template <class Store>
struct Payloads {
  Store& store;
  auto put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) {
    return store.put_payload(key, bytes);
  }
  auto get(const kvmeld::BlobKey& key) { return store.map_payload(key); }
  auto erase(const kvmeld::BlobKey& key) { return store.erase_payload(key); }
  kvmeld::Result<bool> contains(const kvmeld::BlobKey& key) { return store.map_payload(key).ok(); }
};

template <class Store>
void payload_laws(Store& store, Store& other, std::uint64_t seed) {
  Payloads<Store> payloads{store}, other_payloads{other};
  blob_laws(payloads, other_payloads, seed);
  // Blobs and payloads do not share their keys.
  const kvmeld::BlobKey key = blob_key(seed, 99);
  const Bytes bytes = blob_bytes(1, 50'000);
  REQUIRE(store.put_payload(key, bytes).ok());
  CHECK(store.get(key).error().code() == kvmeld::ErrorCode::not_found);
  REQUIRE(store.put(key, blob_bytes(2, 100)).ok());
  REQUIRE(store.erase(key).ok());
  const auto mapped = other.map_payload(key);
  REQUIRE(mapped.ok());
  CHECK(equal(*mapped, bytes));
  CHECK(reinterpret_cast<std::uintptr_t>(mapped->data.get()) % 16 == 0);
  REQUIRE(store.erase_payload(key).ok());
}

/// A store that is about to refuse: `store_full`, and nothing that was there has changed. Ends with
/// a full store.
///
/// @param step bytes of each blob put, until one is refused; the store must refuse before `limit`
/// bytes.
template <class Store>
void full_laws(Store& store, std::uint64_t seed, std::size_t step, std::size_t limit) {
  std::uint64_t number = 0;
  const Bytes early = number_record(seed, {1});
  REQUIRE(store.add_record(early).ok());
  bool refused = false;
  while (!refused && number * step < limit) {
    const auto put = store.put(blob_key(seed, number), blob_bytes(number, step));
    refused = !put.ok();
    if (refused) CHECK(put.error().code() == kvmeld::ErrorCode::store_full);
    if (!refused) ++number;
  }
  REQUIRE(refused);
  REQUIRE(number > 0);
  const auto absent = store.get(blob_key(seed, number));
  REQUIRE_FALSE(absent.ok());
  CHECK(absent.error().code() == kvmeld::ErrorCode::not_found);
  const kvmeld::Status record = store.add_record(blob_bytes(9, step));
  CHECK(record.code() == kvmeld::ErrorCode::store_full);
  const auto before = store.records(0);
  REQUIRE(before.ok());
  CHECK((numbers_in(seed, *before) == std::set<std::uint64_t>{1}));
  const kvmeld::Status replaced = store.replace_records(before->cursor, blob_bytes(9, step));
  CHECK(replaced.code() == kvmeld::ErrorCode::store_full);
  const auto after = store.records(0);
  REQUIRE(after.ok());
  CHECK((after->records == before->records));
  for (std::uint64_t n = 0; n < number; ++n) {
    const auto got = store.get(blob_key(seed, n));
    REQUIRE(got.ok());
    CHECK(equal(*got, blob_bytes(n, step)));
  }
  // Room again: it goes on.
  REQUIRE(store.erase(blob_key(seed, 0)).ok());
  const auto put = store.put(blob_key(seed, number), blob_bytes(number, step));
  REQUIRE(put.ok());
  CHECK(*put);
}

}  // namespace test
