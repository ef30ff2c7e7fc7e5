// Bytes of anchors and of records that nobody vouches for: what is taken is sound, what is not is
// refused and changes nothing.
#include "support/anchor_peers.hpp"
#include "support/catch.hpp"

#include <cstdlib>
#include <new>

namespace {
std::size_t largest_array = 0;  // that was asked for
}
void* operator new[](std::size_t bytes) {
  largest_array = (std::max)(largest_array, bytes);
  if (void* const out = std::malloc(bytes > 0 ? bytes : 1)) return out;
  std::abort();
}
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

namespace {

using kvmeld::ErrorCode;
using kvmeld::anchors::AnchorRecord;

const kvmeld::Digest128 space{3, 4};
const kvmeld::replica::FragmentFormat format{.chunk_bytes = 64, .max_payload_bytes = 1U << 20U};

std::vector<AnchorRecord> some_records() {
  std::vector<AnchorRecord> out;
  for (std::uint64_t n = 1; n <= 6; ++n) {
    AnchorRecord r;
    r.id.bytes[0] = 1, r.id.bytes[9] = static_cast<std::uint8_t>(n);
    r.context = {n, 7};
    r.owner = 1000 * n;
    r.version = n * n * 100;
    r.removed = n % 3 == 0;
    if (!r.removed) {
      r.text = {n, n};
      r.signature = 0x0123456789ABCDEFU * n;
      r.tokens = static_cast<std::int64_t>(100 * n);
      r.bytes = 1000 * n;
      r.payload.bytes[0] = 0x81, r.payload.bytes[31] = static_cast<std::uint8_t>(n);
      r.approximate = n % 2 == 0;
    }
    out.push_back(r);
  }
  return out;
}
std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    for (const unsigned half :
         {std::to_integer<unsigned>(b) >> 4U, std::to_integer<unsigned>(b) & 15U})
      out += "0123456789abcdef"[half];
  }
  return out;
}
/// Cuts, extends, flips and overwrites bytes that were right.
std::vector<std::byte> damaged(std::vector<std::byte> bytes, kvmeld::testing::Random& random) {
  for (std::size_t edits = 1 + random.below(3); edits > 0 && !bytes.empty(); --edits) {
    const std::size_t at = random.below(bytes.size());
    switch (random.below(5)) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                     static_cast<std::byte>(random.next()));
        break;
      case 2:
        bytes[at] = std::byte{0xFF};
        break;
      case 3:
        bytes[at] = static_cast<std::byte>(random.next());
        break;
      default:
        bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
        break;
    }
  }
  return bytes;
}
std::vector<std::byte> noise(kvmeld::testing::Random& random, std::size_t most) {
  std::vector<std::byte> out(random.below(most));
  for (std::byte& b : out) b = static_cast<std::byte>(random.next());
  return out;
}
/// The list of an anchor as it lies in a store, raw.
std::vector<std::byte> list_bytes(const kvmeld::anchors::Anchor& anchor,
                                  const kvmeld::Digest128& context) {
  return kvmeld::anchors::encode_anchor_list(
      *kvmeld::anchors::detail::list_anchor(anchor, context, format));
}

}  // namespace

TEST_CASE("records have the bytes that they had") {
  const auto all = some_records();
  CHECK(hex(kvmeld::anchors::encode_records(space, std::span(all).first(1))) ==
        "01"
        "0300000000000000"
        "0400000000000000"
        "01"
        "0100000000000000000100000000000000000000000000000000000000000000"
        "0100000000000000"
        "0700000000000000"
        "e803000000000000"
        "64"
        "00"
        "0100000000000000"
        "0100000000000000"
        "efcdab8967452301"
        "64"
        "e807"
        "8100000000000000000000000000000000000000000000000000000000000001");
  CHECK(hex(kvmeld::anchors::encode_records(space, std::span(all).subspan(2, 1))) ==
        "01"
        "0300000000000000"
        "0400000000000000"
        "01"
        "0100000000000000000300000000000000000000000000000000000000000000"
        "0300000000000000"
        "0700000000000000"
        "b80b000000000000"
        "8407"
        "01");
}

TEST_CASE(
    "records: every cut is refused, damage is refused or gives sound records, noise does no harm") {
  const auto all = some_records();
  const auto bytes = kvmeld::anchors::encode_records(space, all);
  REQUIRE(*kvmeld::anchors::decode_records(bytes, space) == all);
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    REQUIRE_FALSE(kvmeld::anchors::decode_records(cut, space).ok());
  }
  auto changed = bytes;
  changed.push_back(std::byte{0});
  CHECK(kvmeld::anchors::decode_records(changed, space).error().code() == ErrorCode::oversized);
  changed = bytes, changed[0] = std::byte{2};
  CHECK(kvmeld::anchors::decode_records(changed, space).error().code() ==
        ErrorCode::version_mismatch);
  CHECK(kvmeld::anchors::decode_records(bytes, {3, 5}).error().code() ==
        ErrorCode::geometry_mismatch);
  changed = bytes, changed[18 + 32 + 16 + 8 + 1] |= std::byte{4};
  CHECK(kvmeld::anchors::decode_records(changed, space).error().code() == ErrorCode::unknown_field);
  kvmeld::testing::Random random(1);
  std::size_t taken = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto hostile = i % 4 == 0 ? noise(random, 400) : damaged(bytes, random);
    const auto got = kvmeld::anchors::decode_records(hostile, space);
    if (!got) {
      REQUIRE_FALSE(got.error().message().empty());
      continue;
    }
    ++taken;
    for (const AnchorRecord& r : *got) REQUIRE(kvmeld::anchors::check_record(r).ok());
    REQUIRE(kvmeld::anchors::encode_records(space, *got) == hostile);  // one form for each content
  }
  CHECK(taken > 0);
}

TEST_CASE(
    "an anchor's list: round trips, every cut is refused, damage and noise are refused or give a "
    "sound list") {
  std::vector<kvmeld::anchors::Anchor> anchors{test::anchor(1), test::anchor(2, {2}),
                                               test::anchor(3, {}), test::anchor(4, {1, 2}, 1)};
  anchors[1].approximate = true;
  anchors[1].embedding = {1, 2, 3};
  auto behind = std::make_shared<kvmeld::Fragment::Body>(*anchors[1].base.body());
  behind->prefix = anchors[0].id;
  behind->payloads[0].lead_in = {5, 6};
  anchors[1].base = kvmeld::Fragment(std::move(behind));
  const std::vector<kvmeld::Digest128> contexts{test::place(1), test::place(2), {}, test::place(2)};
  kvmeld::testing::Random random(2);
  for (std::size_t a = 0; a < anchors.size(); ++a) {
    const auto bytes = list_bytes(anchors[a], contexts[a]);
    const auto list = kvmeld::anchors::decode_anchor_list(bytes);
    REQUIRE(list.ok());
    CHECK(kvmeld::anchors::encode_anchor_list(*list) == bytes);
    CHECK(list->anchor.id == anchors[a].id);
    CHECK(list->anchor.vector == anchors[a].vector);
    CHECK(list->anchor.embedding == anchors[a].embedding);
    CHECK(list->anchor.approximate == anchors[a].approximate);
    CHECK(list->context == contexts[a]);
    CHECK(kvmeld::anchors::AnchorSpace::of(list->anchor.base) ==
          kvmeld::anchors::AnchorSpace::of(anchors[a].base));
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      REQUIRE_FALSE(
          kvmeld::anchors::decode_anchor_list(
              std::vector<std::byte>(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n)))
              .ok());
    }
    auto changed = bytes;
    changed.push_back(std::byte{0});
    CHECK(kvmeld::anchors::decode_anchor_list(changed).error().code() == ErrorCode::oversized);
    CHECK(bytes[4] == std::byte{3});
    for (const int version : {1, 2, 9}) {  // 1: parts without their prefix; 2: without placeholders
      changed = bytes, changed[4] = static_cast<std::byte>(version);
      CHECK(kvmeld::anchors::decode_anchor_list(changed).error().code() ==
            ErrorCode::version_mismatch);
    }
    changed = bytes, changed[5] |= std::byte{1};
    CHECK(kvmeld::anchors::decode_anchor_list(changed).error().code() == ErrorCode::unknown_field);
    CHECK(kvmeld::anchors::decode_anchor_list(bytes, {.max_payload_bytes = 10}).error().code() ==
          ErrorCode::oversized);
    for (int i = 0; i < 6'000; ++i) {
      const auto hostile = i % 6 == 0 ? noise(random, 600) : damaged(bytes, random);
      const auto got =
          kvmeld::anchors::decode_anchor_list(hostile, {.max_payload_bytes = 1U << 20U});
      if (!got) {
        REQUIRE_FALSE(got.error().message().empty());
        continue;
      }
      REQUIRE(kvmeld::anchors::decode_anchor_list(kvmeld::anchors::encode_anchor_list(*got)).ok());
      REQUIRE(got->anchor.base.token_count() > 0);
      REQUIRE(got->chunks.size() == got->parts().size());
    }
  }
}

TEST_CASE(
    "a stored anchor comes back byte for byte; what rotted, or is another anchor's, is refused") {
  for (const std::uint64_t at : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{0}}) {
    kvmeld::stores::MemoryStore store;
    const kvmeld::anchors::Anchor anchor = test::anchor(5, {1, 2}, 7);
    const kvmeld::Digest128 context = at == 0 ? kvmeld::Digest128{} : test::place(at);
    const auto stored = kvmeld::anchors::store_anchor(store, anchor, context, format);
    REQUIRE(stored.ok());
    AnchorRecord record{anchor.id,
                        context,
                        kvmeld::anchors::text_digest(anchor.base.tokens()),
                        0,
                        7,
                        stored->bytes,
                        stored->payload,
                        1,
                        1,
                        false,
                        false};
    const auto again = kvmeld::anchors::load_anchor(store, record, format);
    REQUIRE(again.ok());
    CHECK(test::same_anchor(*again, anchor, context));
    CHECK(store.blob_count() ==
          std::set<kvmeld::BlobKey>(stored->blobs.begin(), stored->blobs.end()).size());
    for (const kvmeld::BlobKey& key : stored->blobs) {
      const kvmeld::Blob blob = *store.get(key);
      std::vector<std::byte> bytes(blob.bytes().begin(), blob.bytes().end());
      REQUIRE(store.erase(key).ok());
      CHECK(kvmeld::anchors::load_anchor(store, record, format).error().code() ==
            ErrorCode::not_found);
      bytes[bytes.size() / 2] ^= std::byte{16};
      REQUIRE(*store.put(key, bytes));
      CHECK_FALSE(kvmeld::anchors::load_anchor(store, record, format).ok());
      CHECK_FALSE(*store.contains(key));  // it is not what its key names
      bytes[bytes.size() / 2] ^= std::byte{16};
      REQUIRE(*store.put(key, bytes));
    }
    REQUIRE(kvmeld::anchors::load_anchor(store, record, format).ok());
    AnchorRecord other = record;
    other.tokens = 8;
    CHECK(kvmeld::anchors::load_anchor(store, other, format).error().code() ==
          ErrorCode::id_mismatch);
    other = record, other.bytes += 4;
    CHECK(kvmeld::anchors::load_anchor(store, other, format).error().code() ==
          ErrorCode::id_mismatch);
    other = record, other.approximate = true;
    CHECK(kvmeld::anchors::load_anchor(store, other, format).error().code() ==
          ErrorCode::id_mismatch);
    other = record, other.context = {9, 9};
    CHECK(kvmeld::anchors::load_anchor(store, other, format).error().code() ==
          ErrorCode::id_mismatch);
  }
  kvmeld::stores::MemoryStore store;
  CHECK(kvmeld::anchors::store_anchor(store, {}, {}, format).error().code() ==
        ErrorCode::invalid_argument);
  CHECK(kvmeld::anchors::store_anchor(store, test::anchor(1), test::place(8), format)
            .error()
            .code() == ErrorCode::not_found);
  CHECK(store.used_bytes() == 0);
}

TEST_CASE("of rotten and absent chunks one pass finds all, and says what was first") {
  const kvmeld::anchors::Anchor anchor = test::anchor(5, {1, 2}, 7);
  const kvmeld::Digest128 context = test::place(2);
  // of every three
  for (const std::size_t absent : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
    kvmeld::stores::MemoryStore store;
    const auto stored = kvmeld::anchors::store_anchor(store, anchor, context, format);
    REQUIRE(stored.ok());
    const AnchorRecord record{anchor.id,
                              context,
                              kvmeld::anchors::text_digest(anchor.base.tokens()),
                              0,
                              7,
                              stored->bytes,
                              stored->payload,
                              1,
                              1,
                              false,
                              false};
    const auto list = kvmeld::anchors::detail::load_list(store, record, format);
    REQUIRE(list->chunks.size() == 3);
    for (const auto& part : list->chunks) REQUIRE(part.size() > 3);
    const std::span chunks = std::span(stored->blobs).subspan(1);
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      const kvmeld::Blob blob = *store.get(chunks[c]);
      std::vector<std::byte> bytes(blob.bytes().begin(), blob.bytes().end());
      REQUIRE(store.erase(chunks[c]).ok());
      bytes.back() ^= std::byte{16};
      if (c % 3 != absent) REQUIRE(*store.put(chunks[c], bytes));
    }
    const auto first = kvmeld::anchors::load_anchor(store, record, format);
    REQUIRE_FALSE(first.ok());
    CHECK((first.error().code() == ErrorCode::not_found) == (absent == 0));
    CHECK(kvmeld::replica::proves_damage(first.error().code()) == (absent != 0));
    CHECK(store.blob_count() == 1);  // the list
    REQUIRE(kvmeld::anchors::store_anchor(store, anchor, context, format).ok());
    const auto mended = kvmeld::anchors::load_anchor(store, record, format);
    REQUIRE(mended.ok());
    CHECK(test::same_anchor(*mended, anchor, context));
  }
}

TEST_CASE("hostile bodies in frames that are right change no directory, and the peer goes on") {
  kvmeld::testing::Random random(3);
  kvmeld::stores::MemoryStore mine, theirs;
  test::Exchange::Options options;
  options.members = {1, 2};
  options.format = format;
  options.round_ms = options.retry_ms = 20;
  options.self = 1;
  test::Exchange a(mine, options);
  options.self = 2;
  test::Exchange b(theirs, options);
  for (std::uint64_t n = 1; n <= 3; ++n)
    REQUIRE(a.publish(test::anchor(n), test::place(1), n).ok());
  for (std::uint64_t n = 4; n <= 6; ++n)
    REQUIRE(b.publish(test::anchor(n), test::place(1), n).ok());
  // Every message that two peers send each other, and damaged ones of it.
  std::size_t refused = 0, seen = 0;
  std::set<std::uint8_t> types;
  for (std::int64_t now = 0; now < 2000; now += 10) {
    if (now == 300) {  // b has nothing any more, which only a reconciliation finds out
      b = test::Exchange(theirs, options);
      for (std::uint64_t n = 7; n <= 9; ++n)
        REQUIRE(b.publish(test::anchor(n), test::place(1), n).ok());
    }
    if (now == 1400) {
      for (const auto& [key, entry] : b.directory().entries()) REQUIRE(b.pull(key).ok());
    }
    REQUIRE(a.tick(now).ok());
    REQUIRE(b.tick(now).ok());
    for (const bool from_a : {true, false}) {
      test::Exchange& to = from_a ? b : a;
      for (const kvmeld::replica::Outgoing& out : (from_a ? a : b).take_outbox()) {
        ++seen;
        types.insert(out.type);
        const auto view = kvmeld::replica::decode_frame(out.bytes, options.frame);
        const std::vector<std::byte> body(view->body.begin(), view->body.end());
        for (int i = 0; i < 12; ++i) {
          const auto hostile = i % 5 == 0 ? noise(random, 200) : damaged(body, random);
          const kvmeld::anchors::AnchorDirectory before = to.directory();
          // Records that are sound are believed, and a session ends with the first wrong step: a
          // third peer takes those.
          const auto type = static_cast<kvmeld::anchors::AnchorMessage>(out.type);
          const bool changes = type == kvmeld::anchors::AnchorMessage::gossip ||
                               type == kvmeld::anchors::AnchorMessage::records ||
                               (type == kvmeld::anchors::AnchorMessage::reconcile && now > 500);
          kvmeld::stores::MemoryStore scratch;
          test::Exchange third(scratch, options);
          test::Exchange& target = changes ? third : to;
          const kvmeld::anchors::AnchorDirectory was = target.directory();
          const auto status = target.receive(
              from_a ? 1 : 2, *kvmeld::replica::encode_frame(out.type, hostile, options.frame));
          if (!status) {
            ++refused;
            REQUIRE_FALSE(status.message().empty());
            REQUIRE(target.directory() == was);
          }
          REQUIRE(to.directory().size() <= before.size());
        }
        (void)to.receive(from_a ? 1 : 2, out.bytes);
      }
    }
  }
  CHECK(seen > 40);
  CHECK(refused > 200);
  CHECK(types.size() >= 5);
  // A frame of another namespace, and one that is none.
  kvmeld::replica::FrameOptions stranger;
  stranger.scope = {1, 1};
  const std::vector<std::byte> nothing;
  CHECK(a.receive(2, *kvmeld::replica::encode_frame(65, nothing, stranger)).code() ==
        ErrorCode::unauthenticated);
  CHECK_FALSE(a.receive(2, noise(random, 100)).ok());
  // of a newer minor version
  CHECK(a.receive(2, *kvmeld::replica::encode_frame(99, nothing, options.frame)).ok());
}

TEST_CASE("a list that announces gigabytes and names small chunks costs no more than those") {
  const std::shared_ptr<const kvmeld::Geometry> wide =
      test::geometry({.layers = 8, .heads = 8, .channels = 512});
  for (const bool first_is_whole : {false, true}) {
    kvmeld::stores::MemoryStore store;
    kvmeld::replica::FragmentFormat wide_format;
    wide_format.chunk_bytes = 1U << 16U;
    kvmeld::anchors::AnchorList list;
    list.anchor = test::anchor(1, {}, 4096);
    auto body = std::make_shared<kvmeld::Fragment::Body>(*list.anchor.base.body());
    body->geometry = wide;
    kvmeld::Payload& payload = body->payloads[0];
    payload.layer_set.assign(wide->layers.size(), 0);
    REQUIRE(kvmeld::replica::lay_out(*wide, payload, std::uint64_t{1} << 34U).ok());
    REQUIRE(payload.byte_count >= std::size_t{1} << 29U);
    payload.bytes = nullptr;
    list.anchor.base = kvmeld::Fragment(body);
    list.chunk_bytes = wide_format.chunk_bytes;
    const auto put = [&](std::size_t size) {
      const std::vector<std::byte> raw(size, std::byte{1});
      const kvmeld::BlobKey key = kvmeld::replica::chunk_key(raw);
      REQUIRE(store.put(key, kvmeld::replica::encode_chunk(raw)).ok());
      return key;
    };
    list.chunks.emplace_back(kvmeld::replica::chunk_count(payload.byte_count, list.chunk_bytes),
                             put(1));
    if (first_is_whole) list.chunks[0][0] = put(list.chunk_bytes);
    const auto raw = kvmeld::anchors::encode_anchor_list(list);
    const kvmeld::BlobKey key = kvmeld::replica::chunk_key(raw);
    REQUIRE(store.put(key, kvmeld::replica::encode_chunk(raw)).ok());
    const AnchorRecord record{list.anchor.id,
                              {},
                              kvmeld::anchors::text_digest(list.anchor.base.tokens()),
                              0,
                              4096,
                              list.bytes(),
                              key,
                              1,
                              1,
                              false,
                              false};
    largest_array = 0;
    const auto repeats = kvmeld::anchors::load_anchor(store, record, wide_format);
    CHECK(repeats.error().code() == ErrorCode::oversized);
    auto believing = wide_format;
    believing.max_repeated_bytes = std::uint64_t{1} << 34U;
    const auto loaded = kvmeld::anchors::load_anchor(store, record, believing);
    REQUIRE_FALSE(loaded.ok());
    INFO(loaded.error().message());
    CHECK(loaded.error().code() == ErrorCode::corrupt);
    CHECK(largest_array <= kvmeld::replica::max_chunk_bytes);
  }
}
