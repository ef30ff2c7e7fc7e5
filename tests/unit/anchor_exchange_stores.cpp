// The forms of an exchange that others' tests do not take: one store for all, files, SHA-256 names,
// compressed K/V; and what rotted in each.
#include <filesystem>
#include <fstream>

#include <kvmeld/stores/file.hpp>
#ifdef KVMELD_TEST_OPENSSL
#include <kvmeld/replica/openssl.hpp>
#endif
#ifdef KVMELD_TEST_ZSTD
#include <kvmeld/replica/zstd.hpp>
#endif

#include "support/anchor_peers.hpp"
#include "support/catch.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::BlobKey;
using kvmeld::ErrorCode;
using kvmeld::FragmentId;
using kvmeld::anchors::AnchorMessage;
using kvmeld::replica::MemberId;
using kvmeld::stores::MemoryStore;

/// Members 1 to n over the stores given, in simulated time; `forge` may change a frame on its way.
template <class Store>
struct Net {
  using Exchange = kvmeld::anchors::AnchorExchange;
  std::deque<Exchange> peers;
  std::vector<kvmeld::anchors::PulledAnchor> pulled;
  std::int64_t now = 0;
  std::size_t forged = 0;

  Net(const std::vector<Store*>& stores, bool shared, std::size_t chunk_bytes = 64,
      kvmeld::replica::FragmentFormat format = {}) {
    Exchange::Options options;
    for (std::size_t i = 0; i < stores.size(); ++i) options.members.push_back(i + 1);
    options.format = std::move(format);
    options.format.chunk_bytes = chunk_bytes;
    options.shared_store = shared;
    options.round_ms = 50;
    options.retry_ms = 30;
    options.max_retry_ms = 200;
    for (std::size_t i = 0; i < stores.size(); ++i) {
      options.self = i + 1;
      options.seed = i + 1;
      peers.emplace_back(*stores[i], options);
    }
  }
  Exchange& peer(MemberId member) { return peers[member - 1]; }
  void step(bool forge = false) {
    now += 10;
    for (Exchange& from : peers) {
      REQUIRE(from.tick(now).ok());
      for (kvmeld::replica::Outgoing& out : from.take_outbox()) {
        if (forge && out.type == static_cast<std::uint8_t>(AnchorMessage::piece)) {
          const auto frame = kvmeld::replica::decode_frame(out.bytes, from.options().frame);
          REQUIRE(frame.ok());
          auto piece = *kvmeld::replica::messages::decode_piece(frame->body);
          std::vector<std::byte> bytes(piece.bytes.begin(), piece.bytes.end());
          bytes.back() ^= std::byte{1};
          piece.bytes = bytes;
          out.bytes = *kvmeld::replica::encode_frame(
              out.type, kvmeld::replica::messages::encode(piece), from.options().frame);
          ++forged;
        }
        (void)peer(out.to).receive(from.options().self, out.bytes);
      }
    }
    for (Exchange& p : peers) {
      for (kvmeld::anchors::PulledAnchor& one : p.take_pulled()) pulled.push_back(std::move(one));
    }
  }
  void run(int steps) {
    while (steps-- > 0) step();
  }
  /// How the pull of one member ends.
  kvmeld::anchors::PulledAnchor pull(MemberId member, const FragmentId& key) {
    pulled.clear();
    REQUIRE(peer(member).pull(key).ok());
    for (int i = 0; i < 1000 && pulled.empty(); ++i) step();
    REQUIRE(pulled.size() == 1);
    return pulled[0];
  }
  std::uint64_t sent(MemberId member, AnchorMessage type) {
    return peer(member).counters().sent[static_cast<std::size_t>(type)];
  }
};

/// An anchor of which so many members are not the owner by rank, so that nobody adopts it.
template <class Exchange>
kvmeld::anchors::Anchor owned_by(const Exchange& exchange, MemberId owner,
                                 std::int64_t tokens = 9) {
  for (std::uint64_t number = 1;; ++number) {
    kvmeld::anchors::Anchor out = test::anchor(number, {1, 2}, tokens);
    if (exchange.owner(kvmeld::anchors::record_key(out.id, test::place(2))) == owner) return out;
  }
}
template <class Exchange>
FragmentId publish(Exchange& exchange, const kvmeld::anchors::Anchor& anchor) {
  const auto record = exchange.publish(anchor, test::place(2), 1);
  INFO(record.status().message());
  REQUIRE(record.ok());
  return kvmeld::anchors::record_key(*record);
}

void rot(MemoryStore& store, const BlobKey& blob) {
  const kvmeld::Blob had = *store.get(blob);
  std::vector<std::byte> bytes(had.bytes().begin(), had.bytes().end());
  bytes[bytes.size() / 2] ^= std::byte{4};
  REQUIRE(store.erase(blob).ok());
  REQUIRE(*store.put(blob, bytes));
}

/// Every form: K/V goes over as it was, forged pieces are refused and asked for again, what rotted
/// in a store goes to nobody.
void go_over(const kvmeld::replica::FragmentFormat& format) {
  MemoryStore one, two;
  Net<MemoryStore> net({&one, &two}, false, 4096, format);
  const kvmeld::anchors::Anchor anchor = owned_by(net.peer(1), 1, 300);
  const FragmentId key = publish(net.peer(1), anchor);
  const auto record = *net.peer(1).directory().find(key);
  CHECK(record.payload.bytes[0] == (format.hash.tag | 0x80U));
  if (format.compressor != nullptr) CHECK(one.used_bytes() < record.bytes);
  net.run(20);
  REQUIRE(net.peer(2).directory().find(key) != nullptr);
  // The first pieces are forged: each is told from its key.
  REQUIRE(net.peer(2).pull(key).ok());
  for (int i = 0; i < 100 && net.forged == 0; ++i) net.step(true);
  REQUIRE(net.forged > 0);
  CHECK(net.peer(2).counters().strikes == net.forged);
  CHECK(net.peer(2).counters().refused == net.forged);
  CHECK(two.blob_count() == 0);
  for (int i = 0; i < 1000 && net.pulled.empty(); ++i) net.step();
  REQUIRE(net.pulled.size() == 1);
  INFO(net.pulled[0].anchor.status().message());
  REQUIRE(net.pulled[0].anchor.ok());
  CHECK(test::same_anchor(*net.pulled[0].anchor, anchor, test::place(2)));
  CHECK(one.blob_count() == two.blob_count());
  CHECK(one.used_bytes() == two.used_bytes());

  // A blob that rotted where the pull finds it is erased and asked for; one that rotted at its
  // owner's is not sent.
  const auto chunks =
      kvmeld::anchors::detail::load_list(two, record, net.peer(2).options().format)->chunks;
  rot(two, chunks[1][0]);
  const auto again = net.pull(2, key);
  REQUIRE(again.anchor.ok());
  CHECK(test::same_anchor(*again.anchor, anchor, test::place(2)));
  rot(one, chunks[0][0]);
  REQUIRE(net.peer(2).withdraw(key).ok());
  CHECK(two.blob_count() == 0);
  const auto none = net.pull(2, key);
  REQUIRE_FALSE(none.anchor.ok());
  CHECK(none.anchor.error().code() == ErrorCode::not_found);
  CHECK(two.blob_count() == 0);
  net.run(20);
  CHECK(net.peer(2).directory().find(key) == nullptr);  // its owner says so itself
}

}  // namespace

TEST_CASE("K/V goes over as it was, and what is forged or rotted does not") { go_over({}); }

#ifdef KVMELD_TEST_OPENSSL
TEST_CASE("K/V goes over under SHA-256 names; who knows other names only takes nothing") {
  go_over({.hash = kvmeld::replica::sha256_set});
  MemoryStore one, two;
  Net<MemoryStore> net({&one, &two}, true, 64, {.hash = kvmeld::replica::sha256_set});
  const kvmeld::anchors::Anchor anchor = owned_by(net.peer(1), 1);
  const auto record = *net.peer(1).directory().find(publish(net.peer(1), anchor));
  kvmeld::replica::FragmentFormat other;
  CHECK(kvmeld::anchors::load_anchor(one, record, other).status().code() ==
        ErrorCode::hash_mismatch);
  // and it is still there
  CHECK(kvmeld::anchors::load_anchor(one, record, net.peer(2).options().format).ok());
}
#else
TEST_CASE("K/V goes over under SHA-256 names") { test::skip("no OpenSSL (Debian: libssl-dev)"); }
#endif

#ifdef KVMELD_TEST_ZSTD
TEST_CASE("K/V goes over compressed; who cannot read that says so, and keeps it") {
  go_over({.compressor = std::make_shared<kvmeld::replica::Zstd>()});
  MemoryStore store;
  Net<MemoryStore> net({&store}, false, 4096,
                       {.compressor = std::make_shared<kvmeld::replica::Zstd>()});
  const kvmeld::anchors::Anchor anchor = test::anchor(1, {2}, 300);
  const auto record = *net.peer(1).directory().find(publish(net.peer(1), anchor));
  const std::size_t blobs = store.blob_count();
  kvmeld::replica::FragmentFormat plain;
  CHECK(kvmeld::anchors::load_anchor(store, record, plain).status().code() ==
        ErrorCode::unsupported);
  CHECK(store.blob_count() == blobs);
}
#else
TEST_CASE("K/V goes over compressed") { test::skip("no zstd (Debian: libzstd-dev)"); }
#endif

#if defined(KVMELD_TEST_OPENSSL) && defined(KVMELD_TEST_ZSTD)
TEST_CASE("K/V goes over compressed under SHA-256 names") {
  go_over({.compressor = std::make_shared<kvmeld::replica::Zstd>(),
           .hash = kvmeld::replica::sha256_set});
}
#endif

TEST_CASE(
    "where three share a folder only records cross, nobody erases for the others, and a rotten "
    "file is found out and mended") {
  const test::TempFolder folder;
  std::deque<kvmeld::stores::FileStore> stores;
  for (int i = 0; i < 3; ++i) {
    auto opened = kvmeld::stores::FileStore::open(folder / "store",
                                                  {.durability = kvmeld::stores::Durability::none});
    REQUIRE(opened.ok());
    stores.push_back(*std::move(opened));
  }
  Net<kvmeld::stores::FileStore> net({&stores[0], &stores[1], &stores[2]}, true);
  const kvmeld::anchors::Anchor anchor = owned_by(net.peer(1), 1);
  const FragmentId key = publish(net.peer(1), anchor);
  const auto record = *net.peer(1).directory().find(key);
  net.run(60);
  const auto files = [&] {
    std::vector<std::filesystem::path> out;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(folder.path() / "store/blobs")) {
      if (entry.is_regular_file()) out.push_back(entry.path());
    }
    return out;
  };
  const std::size_t count = files().size();
  REQUIRE(count > 3);
  const auto got = net.pull(3, key);
  REQUIRE(got.anchor.ok());
  CHECK(test::same_anchor(*got.anchor, anchor, test::place(2)));
  CHECK(net.sent(3, AnchorMessage::fetch) == 0);
  CHECK(files().size() == count);

  // Whoever is done with it takes nothing from the others.
  REQUIRE(net.peer(3).withdraw(key).ok());
  CHECK_FALSE(net.peer(3).holds(key));
  CHECK(files().size() == count);
  const auto by_two = net.pull(2, key);
  REQUIRE(by_two.anchor.ok());
  CHECK(test::same_anchor(*by_two.anchor, anchor, test::place(2)));

  // One byte of every file. A pull finds the list rotten, the next one, behind a list put there
  // anew, all chunks at once: then all are mended.
  for (const auto& file : files()) {
    std::filesystem::permissions(file, std::filesystem::perms::owner_write,
                                 std::filesystem::perm_options::add);
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekg(-1, std::ios::end);
    const char last = static_cast<char>(damaged.get());
    damaged.seekp(-1, std::ios::end);
    damaged.put(static_cast<char>(last ^ 1));
  }
  for (int failures = 0; failures < 2; ++failures) {
    const auto rotten = net.pull(3, key);
    REQUIRE_FALSE(rotten.anchor.ok());
    CHECK(rotten.anchor.error().code() == ErrorCode::not_found);
    CHECK(net.peer(3).counters().pulled == 1);
    net.run(60);
    CHECK(net.peer(2).directory().find(key) == nullptr);  // whom it asked has no other, and says so
    // as `publish_pool` does where the pool still has it
    REQUIRE(publish(net.peer(1), anchor) == key);
    net.run(60);
  }
  const auto mended = net.pull(3, key);
  INFO(mended.anchor.status().message());
  REQUIRE(mended.anchor.ok());
  CHECK(test::same_anchor(*mended.anchor, anchor, test::place(2)));
  CHECK(mended.record.version > record.version);
  // The owner ends it for all, and its files stay: nobody knows who else reads them.
  REQUIRE(net.peer(1).withdraw(key).ok());
  net.run(60);
  CHECK(net.peer(3).directory().find(key) == nullptr);
  CHECK(files().size() >= count);
}

TEST_CASE("an anchor whose chunks are rotten, absent and equal to each other mends in two rounds") {
  MemoryStore store;
  Net<MemoryStore> net({&store, &store, &store}, true);
  kvmeld::anchors::Anchor anchor = owned_by(net.peer(1), 1);
  // all of its chunks but the last are one blob
  auto blank = std::make_shared<kvmeld::Fragment::Body>(*anchor.base.body());
  blank->payloads[0].bytes =
      std::shared_ptr<const std::byte[]>(new std::byte[blank->payloads[0].byte_count]{});
  anchor.base = kvmeld::Fragment(std::move(blank));
  const FragmentId key = publish(net.peer(1), anchor);
  const auto record = *net.peer(1).directory().find(key);
  net.run(60);
  const auto list =
      *kvmeld::anchors::detail::load_list(store, record, net.peer(1).options().format);
  REQUIRE(list.chunks.size() == 3);
  REQUIRE(list.chunks[0][0] == list.chunks[0][1]);
  std::set<BlobKey> all{record.payload};
  for (const auto& part : list.chunks) all.insert(part.begin(), part.end());
  for (const BlobKey& blob : all) rot(store, blob);
  REQUIRE(store.erase(list.chunks[1][1]).ok());
  REQUIRE(store.erase(list.chunks[2][0]).ok());
  for (int failures = 0; failures < 2; ++failures) {
    const auto rotten = net.pull(3, key);
    REQUIRE_FALSE(rotten.anchor.ok());
    CHECK(rotten.anchor.error().code() == ErrorCode::not_found);
    net.run(60);
    REQUIRE(publish(net.peer(1), anchor) == key);
    net.run(60);
  }
  const auto mended = net.pull(3, key);
  INFO(mended.anchor.status().message());
  REQUIRE(mended.anchor.ok());
  CHECK(test::same_anchor(*mended.anchor, anchor, test::place(2)));
}
