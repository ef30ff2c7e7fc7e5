// A record log that was torn or damaged at every place; also built under address and undefined.
#include <kvmeld/stores/file.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "support/store_laws.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::stores::FileStore;
using test::Bytes;

const kvmeld::stores::FileStoreOptions fast{.durability = kvmeld::stores::Durability::none};

Bytes read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> text((std::istreambuf_iterator<char>(in)), {});
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
void write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

bool has(const kvmeld::replica::RecordBatch& batch, const Bytes& record) {
  return std::find(batch.records.begin(), batch.records.end(), record) != batch.records.end();
}

constexpr std::size_t head = 64, record_head = 32;

/// A log of three records, the last of which begins at `last`; `before` is the file without it.
struct Log {
  test::TempFolder folder;
  std::string path = folder / "store/records";
  std::vector<Bytes> records{test::blob_bytes(1, 40), test::blob_bytes(2, 0),
                             test::blob_bytes(3, 77)};
  Bytes before, whole;
  std::size_t first = head, last = 0;

  Log() {
    auto store = open();
    for (std::size_t i = 0; i < records.size(); ++i) {
      before = read_file(path);
      last = before.size();
      REQUIRE(store.add_record(records[i]).ok());
    }
    whole = read_file(path);
    REQUIRE(whole.size() > last);
  }
  [[nodiscard]] FileStore open() const {
    auto store = FileStore::open(folder / "store", fast);
    REQUIRE(store.ok());
    return *store;
  }
  /// A writer that died when `size` bytes of the file were written: nobody has set the mark.
  [[nodiscard]] Bytes torn(std::size_t size) const {
    Bytes bytes = before;
    bytes.insert(bytes.end(), whole.begin() + static_cast<std::ptrdiff_t>(last),
                 whole.begin() + static_cast<std::ptrdiff_t>(size));
    return bytes;
  }
};

}  // namespace

TEST_CASE(
    "a record that its writer did not finish is not there, is no damage, and the next writer cuts "
    "off what is left of it") {
  Log log;
  for (std::size_t size = log.last; size < log.whole.size(); ++size) {
    INFO("torn at byte " << size - log.last << " of the last record");
    write_file(log.path, log.torn(size));
    FileStore old = log.open(), store = log.open();
    for (FileStore* s : {&old, &store}) {
      const auto batch = s->records(0);
      REQUIRE(batch.ok());
      CHECK(batch->records.size() == 2);
      CHECK((has(*batch, log.records[0]) && has(*batch, log.records[1])));
    }
    const auto cursor = store.records(0)->cursor;
    const Bytes more = test::blob_bytes(size, 5);
    REQUIRE(store.add_record(more).ok());
    CHECK(store.torn_bytes() == size - log.last);
    for (FileStore* s : {&old, &store}) {
      const auto after = s->records(cursor);
      REQUIRE(after.ok());
      CHECK((after->records == std::vector<Bytes>{more}));
      CHECK(s->records(0)->records.size() == 3);
      CHECK(s->damage().places == 0);
    }
    CHECK(read_file(log.path).size() == log.last + record_head + more.size());
  }
  // All of it, and the mark did not follow: it is a record.
  write_file(log.path, log.torn(log.whole.size()));
  CHECK(log.open().records(0)->records == log.records);
}

TEST_CASE(
    "what was acknowledged and is cut off or changed is damage: counted by who opens, and after "
    "the next writer, too") {
  Log log;
  const auto check = [&](std::size_t at, std::uint64_t bytes) {
    INFO("at byte " << at << " of a log of " << log.whole.size());
    FileStore store = log.open();
    CHECK(store.damage().places == 1);
    CHECK(store.damage().bytes == bytes);
    REQUIRE(store.records(0)->records.size() == 2);
    CHECK(store.damage().places == 1);  // met twice, and counted once
    REQUIRE(store.add_record(log.records[2]).ok());
    CHECK(store.torn_bytes() == 0);
    FileStore later = log.open();
    for (FileStore* s : {&store, &later}) {
      REQUIRE(s->records(0)->records == log.records);
      CHECK(s->damage().places == 1);
      CHECK(s->damage().bytes == bytes);
    }
    const auto cursor = later.records(0)->cursor;
    REQUIRE(later.replace_records(cursor, log.records[0]).ok());
    CHECK(log.open().damage().bytes == bytes);  // also when nothing of it is left in the file
  };
  for (std::size_t at = log.last; at < log.whole.size(); ++at) {
    for (const auto flip : {std::byte{1}, std::byte{0x80}, std::byte{0xFF}}) {
      Bytes bytes = log.whole;
      bytes[at] ^= flip;
      write_file(log.path, bytes);
      check(at, log.whole.size() - log.last);
    }
  }
  for (std::size_t size = log.last; size < log.whole.size(); ++size) {
    write_file(log.path, std::span(log.whole).first(size));
    check(size, log.whole.size() - log.last);
  }
  for (std::size_t size = 1; size < 60; ++size) {
    Bytes bytes = log.whole;
    const Bytes torn(bytes.begin() + static_cast<std::ptrdiff_t>(log.first),
                     bytes.begin() + static_cast<std::ptrdiff_t>(log.first + size));
    // a record's own bytes, at another place, behind the mark
    bytes.insert(bytes.end(), torn.begin(), torn.end());
    write_file(log.path, bytes);
    FileStore store = log.open();
    REQUIRE(store.records(0)->records == log.records);
    REQUIRE(store.add_record({}).ok());
    REQUIRE(store.records(0)->records.size() == 4);
    REQUIRE(store.torn_bytes() == size);
    REQUIRE(store.damage().places == 0);
  }
}

TEST_CASE(
    "damage to a record in the middle costs that record alone, and is counted, also when the log "
    "grows and is replaced") {
  Log log;
  const std::size_t second = log.first + record_head + log.records[0].size();
  for (std::size_t at = log.first; at < second; ++at) {
    Bytes bytes = log.whole;
    bytes[at] ^= std::byte{0x11};
    write_file(log.path, bytes);
    FileStore store = log.open();
    CHECK(store.damage().places == 1);
    CHECK(store.damage().bytes == second - log.first);
    const auto batch = store.records(0);
    REQUIRE(batch.ok());
    REQUIRE(batch->records == std::vector<Bytes>{log.records[1], log.records[2]});
    const Bytes more = test::blob_bytes(4, 30);
    REQUIRE(store.add_record(more).ok());
    REQUIRE(store.records(batch->cursor)->records == std::vector<Bytes>{more});
    REQUIRE(store.replace_records(batch->cursor, log.records[0]).ok());
    REQUIRE(store.records(0)->records == std::vector<Bytes>{log.records[0], more});
    FileStore later = log.open();
    CHECK(later.damage().places == 1);
    CHECK(later.damage().bytes == second - log.first);
  }
  // The mark itself: what it knew is gone, the records are not, and the next writer makes it anew.
  for (std::size_t at = 32; at < head; ++at) {
    Bytes bytes = log.whole;
    bytes[at] ^= std::byte{0x11};
    write_file(log.path, bytes);
    FileStore store = log.open();
    CHECK(store.damage().places == 1);
    REQUIRE(store.records(0)->records == log.records);
    REQUIRE(store.add_record({}).ok());
    CHECK(log.open().damage().places == 0);
  }
}

TEST_CASE("opening takes time in proportion to the log, whatever was written into it") {
  // Heads whose checksums are right, each of which announces all that follows; and such as only
  // begin as one.
  Log log;
  const auto seconds = [&](std::size_t count, bool right) {
    Bytes bytes = log.whole;
    for (std::size_t i = 0; i < count; ++i) {
      const Bytes rest((count - i - 1) * record_head);
      kvmeld::stores::detail::RecordHead one(bytes.size(), rest);
      one.bytes_checksum ^= right ? 0U : 1U;
      const auto words = std::as_bytes(std::span(&one, 1));
      bytes.insert(bytes.end(), words.begin(), words.end());
    }
    write_file(log.path, bytes);
    const std::int64_t begin = kvmeld::stores::detail::monotonic_ns();
    CHECK(log.open().records(0)->records == log.records);
    return static_cast<double>(kvmeld::stores::detail::monotonic_ns() - begin) * 1e-9;
  };
  for (const bool right : {true, false}) {
    INFO("of 8000 heads, checksums " << (right ? "right" : "wrong"));
    // hashing 8000 times what follows is a gigabyte, under the address sanitizer
    CHECK(seconds(8000, right) < 2);
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

TEST_CASE(
    "a log whose head is damaged or cut, of another version, or no log is refused, not "
    "overwritten") {
  Log log;
  for (std::size_t at = 0; at < 32; ++at) {
    Bytes bytes = log.whole;
    bytes[at] ^= std::byte{4};
    write_file(log.path, bytes);
    const auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE_FALSE(store.ok());
    CHECK(store.error().code() == (at == 7 ? ErrorCode::version_mismatch : ErrorCode::corrupt));
    CHECK((read_file(log.path) == bytes));
  }
  for (std::size_t size = 0; size < head; ++size) {
    write_file(log.path, std::span(log.whole).first(size));
    const auto store = FileStore::open(log.folder / "store", fast);
    REQUIRE_FALSE(store.ok());
    CHECK(store.error().code() == ErrorCode::corrupt);
    CHECK(store.error().message().find("cut to " + std::to_string(size) + " bytes") !=
          std::string::npos);
    CHECK(read_file(log.path).size() == size);
  }
}

TEST_CASE(
    "a folder or log that was replaced by an earlier one is another generation, and cursors of the "
    "later one read from the start") {
  Log log;
  FileStore store = log.open();
  const std::uint64_t first = store.generation();
  CHECK(first != 0);
  const auto cursor = store.records(0)->cursor;
  REQUIRE(store.add_record(test::blob_bytes(4, 9)).ok());
  REQUIRE(store.replace_records(cursor, log.records[0]).ok());
  REQUIRE(store.records(0)->records.size() == 2);
  CHECK(store.generation() == first);  // its own doing is none
  const std::uint64_t compacted = store.records(0)->cursor;

  write_file(log.path, log.whole);  // in place, of an earlier generation of the log
  CHECK(store.records(compacted)->records == log.records);
  const std::uint64_t second = store.generation();
  CHECK(second != first);
  const auto seen = store.records(0)->cursor;
  write_file(log.path, log.torn(log.last));  // in place, before the last record; others went on
  CHECK(log.open().add_record(Bytes(log.records[2].size())).ok());
  CHECK(store.records(seen)->records.size() == 3);
  const std::uint64_t third = store.generation();
  CHECK(third != second);

  std::filesystem::copy(log.folder / "store", log.folder / "copy",
                        std::filesystem::copy_options::recursive);
  std::filesystem::rename(log.folder / "store", log.folder / "gone");
  CHECK(store.records(0)->records.size() == 3);
  CHECK(store.generation() == third);  // only moved
  std::filesystem::rename(log.folder / "copy", log.folder / "store");
  REQUIRE(store.add_record(log.records[0]).ok());
  CHECK(store.generation() != third);
  CHECK(log.open().records(0)->records.size() == 4);  // written where others look
  const kvmeld::BlobKey key = test::blob_key(1, 1);
  REQUIRE(store.put(key, Bytes(100)).ok());
  CHECK(*log.open().contains(key));
}

TEST_CASE("cursors of another store, of another life, or of nowhere read from the start") {
  Log log;
  auto store = FileStore::open(log.folder / "store", fast);
  REQUIRE(store.ok());
  const std::uint64_t good = store->records(0)->cursor;
  for (const std::uint64_t cursor : {std::uint64_t{1}, ~std::uint64_t{0}, good + 1,
                                     good ^ (std::uint64_t{1} << 60U), std::uint64_t{24}}) {
    const auto batch = store->records(cursor);
    REQUIRE(batch.ok());
    CHECK((batch->records == log.records));
    CHECK(batch->cursor == good);
  }
  CHECK(store->records(good)->records.empty());
  // knows nothing, replaces nothing
  REQUIRE(store->replace_records(~std::uint64_t{0}, log.records[0]).ok());
  CHECK(store->records(0)->records.size() == 4);
}
