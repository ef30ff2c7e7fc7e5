// Hostile bytes in the place of a store's record log. With -DKVMELD_LIBFUZZER and clang's
// -fsanitize=fuzzer this is a fuzzer; otherwise a test that mutates a fixed corpus for a fixed
// number of rounds, the same ones every time.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include <kvmeld/stores/file.hpp>

#include "support/temp_folder.hpp"

namespace {

using namespace kvmeld;
using Bytes = std::vector<std::byte>;

const test::TempFolder& folder() {
  static const test::TempFolder one(
      std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path());
  return one;
}

std::string log_path() { return folder() / "store/records"; }

Result<stores::FileStore> open_store() {
  return stores::FileStore::open(folder() / "store", {.durability = stores::Durability::none});
}

void write_log(std::span<const std::byte> bytes) {
  const stores::detail::FileHandle file =
      stores::detail::open_file(AT_FDCWD, log_path(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  if (stores::detail::write_at(file.get(), bytes, 0) != 0) std::abort();
}

void must(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool made = open_store().ok();
  must(made);
  write_log(std::as_bytes(std::span(data, size)));
  auto store = open_store();
  if (!store) {
    must(!store.error().message().empty());
    return 0;
  }
  const auto found = store->records(0);
  must(found.ok());
  std::size_t total = 0;
  for (const Bytes& record : found->records)
    total += record.size() + stores::detail::record_head_bytes;
  must(total <= size);
  // Whatever was found stays found, whatever is added or replaced on top of it.
  const Bytes more(100, std::byte{7});
  must(store->add_record(more).ok());
  auto after = store->records(0);
  must(after.ok());
  Bytes expected_last = after->records.back();
  must(expected_last == more);
  after->records.pop_back();
  must(after->records == found->records);
  must(store->records(found->cursor)->records == std::vector<Bytes>{more});
  must(store->replace_records(found->cursor, more).ok());
  must(store->records(0)->records == (std::vector<Bytes>{more, more}));
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("a store opens on any log, or says why not, and loses none of what it found there") {
  std::vector<Bytes> corpus{{}};
  for (const std::vector<std::size_t>& sizes :
       {std::vector<std::size_t>{}, {0}, {5, 0, 70}, {300, 1, 1, 40}}) {
    std::filesystem::remove_all(folder() / "store");
    auto store = open_store();
    REQUIRE(store.ok());
    for (const std::size_t size : sizes)
      REQUIRE(store->add_record(Bytes(size, std::byte{0xC4})).ok());
    Bytes log(std::filesystem::file_size(log_path()));
    const stores::detail::FileHandle file =
        stores::detail::open_file(AT_FDCWD, log_path(), O_RDONLY);
    REQUIRE(stores::detail::read_at(file.get(), log, 0) == 0);
    corpus.push_back(log);
  }
  std::uint64_t state = 88172645463325252ULL;
  const auto next = [&state](std::size_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::size_t>(state % below);
  };
  for (int round = 0; round < 4000; ++round) {
    Bytes bytes = corpus[next(corpus.size())];
    for (std::size_t edits = 1 + next(3); edits > 0 && !bytes.empty(); --edits) {
      const std::size_t at = next(bytes.size());
      const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(at);
      switch (next(5)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1U << next(8));
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(from, next(64), std::byte{0});
          break;
        case 3: {  // a piece of the log at its end: whole records, in the wrong place
          const Bytes piece(from, bytes.end());
          bytes.insert(bytes.end(), piece.begin(), piece.end());
          break;
        }
        default:  // lengths near the limits
          for (std::size_t b = 0; b < 8 && (at & ~std::size_t{7}) + b < bytes.size(); ++b)
            bytes[(at & ~std::size_t{7}) + b] = std::byte{0xFF};
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  SUCCEED("4000 rounds");
}
#endif
