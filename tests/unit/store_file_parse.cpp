// A record log that was torn or damaged at every place; also built under address and undefined.
#include <kvmeld/transport/file_store.hpp>

#include <fstream>
#include <iterator>

#include "support/store_laws.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::FileStore;
using test::Bytes;

const kvmeld::FileStoreOptions fast{.durability = kvmeld::Durability::none};

Bytes read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> text((std::istreambuf_iterator<char>(in)), {});
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
void write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

bool has(const kvmeld::RecordBatch& batch, const Bytes& record) {
  return std::find(batch.records.begin(), batch.records.end(), record) != batch.records.end();
}

/// A log of three records, the last of which begins at `last`.
struct Log {
  test::TempFolder folder;
  std::string path = folder / "store/records";
  std::vector<Bytes> records{test::blob_bytes(1, 40), test::blob_bytes(2, 0), test::blob_bytes(3, 77)};
  Bytes whole;
  std::size_t first = 24, last = 0;

  Log() {
    auto store = FileStore::open(folder / "store", fast);
    REQUIRE(store.ok());
    for (std::size_t i = 0; i < records.size(); ++i) {
      last = read_file(path).size();
      REQUIRE(store->add_record(records[i]).ok());
    }
    whole = read_file(path);
    REQUIRE(whole.size() > last);
  }
};

}  // namespace

TEST_CASE("a last record cut off at any byte is not there, and the next writer cuts off what is left of it") {
  Log log;
  // An old handle, which knows where the log ended; and one that opens it as it finds it.
  auto old = FileStore::open(log.folder / "store", fast);
  REQUIRE(old.ok());
  for (std::size_t size = log.last; size < log.whole.size(); ++size) {
    INFO("cut at byte " << size - log.last << " of the last record");
    write_file(log.path, std::span(log.whole).first(size));
    auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE(store.ok());
    for (FileStore* s : {&*old, &*store}) {
      const auto batch = s->records(0);
      REQUIRE(batch.ok());
      CHECK(batch->records.size() == 2);
      CHECK((has(*batch, log.records[0]) && has(*batch, log.records[1])));
    }
    const auto cursor = store->records(0)->cursor;
    const Bytes more = test::blob_bytes(size, 5);
    REQUIRE(store->add_record(more).ok());
    CHECK(store->skipped_bytes() == size - log.last);
    for (FileStore* s : {&*old, &*store}) {
      const auto after = s->records(cursor);
      REQUIRE(after.ok());
      CHECK((after->records == std::vector<Bytes>{more}));
      CHECK(s->records(0)->records.size() == 3);
    }
    CHECK(read_file(log.path).size() == log.last + 24 + more.size());
  }
}

TEST_CASE("a last record with any byte changed, or with foreign bytes behind it, never reads as one") {
  Log log;
  for (std::size_t at = log.last; at < log.whole.size(); ++at) {
    for (const auto flip : {std::byte{1}, std::byte{0x80}, std::byte{0xFF}}) {
      Bytes bytes = log.whole;
      bytes[at] ^= flip;
      write_file(log.path, bytes);
      auto store = FileStore::open(log.folder / "store", fast);
      REQUIRE(store.ok());
      REQUIRE(store->records(0)->records.size() == 2);
      REQUIRE(store->add_record(log.records[2]).ok());
      REQUIRE(store->records(0)->records == log.records);
      REQUIRE(read_file(log.path) == log.whole);
    }
  }
  for (std::size_t size = 1; size < 60; ++size) {
    Bytes bytes = log.whole;
    const Bytes torn(bytes.begin() + static_cast<std::ptrdiff_t>(log.first), bytes.begin() + static_cast<std::ptrdiff_t>(log.first + size));
    bytes.insert(bytes.end(), torn.begin(), torn.end());  // a record's own bytes, at another place
    write_file(log.path, bytes);
    auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE(store.ok());
    REQUIRE(store->records(0)->records == log.records);
    REQUIRE(store->add_record({}).ok());
    REQUIRE(store->records(0)->records.size() == 4);
    REQUIRE(store->skipped_bytes() == size);
  }
}

TEST_CASE("damage to a record in the middle costs that record alone, also when the log grows and is replaced") {
  Log log;
  const std::size_t second = log.first + 24 + log.records[0].size();
  for (std::size_t at = log.first; at < second; ++at) {
    Bytes bytes = log.whole;
    bytes[at] ^= std::byte{0x11};
    write_file(log.path, bytes);
    auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE(store.ok());
    const auto batch = store->records(0);
    REQUIRE(batch.ok());
    REQUIRE(batch->records == std::vector<Bytes>{log.records[1], log.records[2]});
    const Bytes more = test::blob_bytes(4, 30);
    REQUIRE(store->add_record(more).ok());
    REQUIRE(store->records(batch->cursor)->records == std::vector<Bytes>{more});
    REQUIRE(store->replace_records(batch->cursor, log.records[0]).ok());
    REQUIRE(store->records(0)->records == std::vector<Bytes>{log.records[0], more});
    REQUIRE(store->skipped_bytes() > 0);
  }
}

TEST_CASE("a record that holds a whole log does not read as one, torn or not") {
  Log log;
  auto store = FileStore::open(log.folder / "store", fast);
  REQUIRE(store.ok());
  Bytes hostile = log.whole;
  hostile.insert(hostile.end(), log.whole.begin(), log.whole.end());
  REQUIRE(store->add_record(hostile).ok());
  CHECK(store->records(0)->records.size() == 4);
  const Bytes full = read_file(log.path);
  for (std::size_t size = log.whole.size(); size < full.size(); size += 7) {
    write_file(log.path, std::span(full).first(size));
    auto again = FileStore::open(log.folder / "store", fast);
    REQUIRE(again.ok());
    REQUIRE(again->records(0)->records == log.records);
  }
}

TEST_CASE("a log whose head is damaged, of a newer version, or no log is refused, not overwritten") {
  Log log;
  for (std::size_t at = 0; at < 24; ++at) {
    Bytes bytes = log.whole;
    bytes[at] ^= std::byte{4};
    write_file(log.path, bytes);
    const auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE_FALSE(store.ok());
    CHECK(store.error().code() == (at == 7 ? ErrorCode::version_mismatch : ErrorCode::corrupt));
    CHECK((read_file(log.path) == bytes));
  }
  // Shorter than its head: no record can have been acknowledged.
  for (std::size_t size = 0; size < 24; ++size) {
    write_file(log.path, std::span(log.whole).first(size));
    auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE(store.ok());
    CHECK(store->records(0)->records.empty());
    CHECK(store->add_record(log.records[0]).ok());
    CHECK((store->records(0)->records == std::vector<Bytes>{log.records[0]}));
  }
}

TEST_CASE("cursors of another store, of another life, or of nowhere read from the start") {
  Log log;
  auto store = FileStore::open(log.folder / "store", fast);
  REQUIRE(store.ok());
  const std::uint64_t good = store->records(0)->cursor;
  for (const std::uint64_t cursor : {std::uint64_t{1}, ~std::uint64_t{0}, good + 1, good ^ (std::uint64_t{1} << 60U), std::uint64_t{24}}) {
    const auto batch = store->records(cursor);
    REQUIRE(batch.ok());
    CHECK((batch->records == log.records));
    CHECK(batch->cursor == good);
  }
  CHECK(store->records(good)->records.empty());
  REQUIRE(store->replace_records(~std::uint64_t{0}, log.records[0]).ok());  // knows nothing, replaces nothing
  CHECK(store->records(0)->records.size() == 4);
}
