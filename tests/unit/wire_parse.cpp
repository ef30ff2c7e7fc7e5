// Manifests, chunks and frames: whole round trips, the exact bytes, and every way in which they can
// be cut or bent.
#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/stores/memory.hpp>

#include <fstream>
#include <stdexcept>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::BlobKey;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::replica::Assembler;
using kvmeld::replica::Manifest;
using Bytes = std::vector<std::byte>;

/// Memory of this process that is there, not only promised.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * 4096;
}

/// All fields that a fragment has, so that one that the wire forgot is seen.
void same(const Fragment& a, const Fragment& b) {
  REQUIRE(a.id() == b.id());
  CHECK(a.geometry() == b.geometry());
  CHECK(a.role() == b.role());
  CHECK(a.prefix() == b.prefix());
  CHECK(a.token_count() == b.token_count());
  CHECK(std::ranges::equal(a.tokens(), b.tokens()));
  REQUIRE(a.payloads().size() == b.payloads().size());
  for (std::size_t p = 0; p < a.payloads().size(); ++p) {
    const kvmeld::Payload &x = a.payloads()[p], &y = b.payloads()[p];
    CHECK(x.lead_in == y.lead_in);
    CHECK(x.positions == y.positions);
    CHECK(x.token_sets == y.token_sets);
    CHECK(x.layer_set == y.layer_set);
    CHECK(x.plane_offsets == y.plane_offsets);
    CHECK(x.scale_offsets == y.scale_offsets);
    CHECK(x.byte_count == y.byte_count);
    CHECK(x.digest == y.digest);
    if (x.bytes != nullptr && y.bytes != nullptr)
      CHECK(std::equal(x.bytes.get(), x.bytes.get() + x.byte_count, y.bytes.get()));
  }
}

/// Two payloads, layers that hold fewer tokens than others, a prefix, a lead-in, names and gaps.
const Fragment& rich() {
  static const Fragment fragment = [] {
    auto g = test::geometry({.type = kvmeld::ElementType::f16,
                             .layers = 3,
                             .heads = 2,
                             .channels = 32,
                             .value_channels = 64});
    g->tenant = "tenant";
    g->bos = 1;
    g->layers[1].window = 4;
    g->layers[2].rope.scaling = kvmeld::RopeScaling::explicit_factors;
    g->layers[2].rope.factors.assign(16, 1.5F);
    const auto tokens = test::token_ids(9);
    const auto positions = test::gapped_positions(9);
    const auto prefix = test::sealed(g, 2, 1, {.role = kvmeld::Role::prefix}).fragment;
    kvmeld::SealOptions options{
        .tokens = tokens,
        .positions = positions,
        .drop_first = 2,
        .context = {.prefix = prefix.id(),
                    .lead_in = kvmeld::lead_in_digest(std::span(tokens).first(2))}};
    const auto first = test::sealed(g, 9, 7, options, test::Layout::slot_list, {0, 5, 0}).fragment;
    test::TestCache other(g, 7);
    other.fill(8);
    const auto rest = std::span(tokens).subspan(2);
    const auto both = kvmeld::with_variant(
        first, other.ref(), {.tokens = rest, .context = {.prefix = prefix.id(), .lead_in = {}}});
    if (!both) std::abort();
    return *both;
  }();
  return fragment;
}

/// The stored chunks of a fragment, by payload.
std::vector<std::vector<Bytes>> stored(const Fragment& fragment, std::size_t chunk_bytes) {
  std::vector<std::vector<Bytes>> out;
  for (const kvmeld::Payload& payload : fragment.payloads()) {
    out.emplace_back();
    for (std::size_t c = 0; c < kvmeld::replica::chunk_count(payload.byte_count, chunk_bytes);
         ++c) {
      out.back().push_back(
          kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(payload, c, chunk_bytes)));
    }
  }
  return out;
}

Bytes bytes_of(const kvmeld::Result<Bytes>& made) {
  REQUIRE(made.ok());
  return *made;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    out += "0123456789abcdef"[std::to_integer<unsigned>(b) >> 4U];
    out += "0123456789abcdef"[std::to_integer<unsigned>(b) & 15U];
  }
  return out;
}

}  // namespace

TEST_CASE("a fragment crosses as manifest and chunks, in any order and repeatedly") {
  for (const std::size_t chunk_bytes :
       {std::size_t{1000}, std::size_t{64}, kvmeld::replica::default_chunk_bytes}) {
    const Bytes wire = bytes_of(kvmeld::replica::encode_manifest(rich(), chunk_bytes));
    auto manifest = kvmeld::replica::decode_manifest(wire);
    INFO(manifest.error().message());
    REQUIRE(manifest.ok());
    CHECK(manifest->chunk_bytes == chunk_bytes);
    for (const auto& payload : manifest->fragment.payloads()) CHECK(payload.bytes == nullptr);
    same(manifest->fragment, rich());
    CHECK(kvmeld::replica::encode_manifest(*manifest) == wire);

    Assembler assembler(*manifest);
    const auto chunks = stored(rich(), chunk_bytes);
    const auto early = assembler.finish();
    REQUIRE(!early.ok());
    CHECK(early.error().code() == ErrorCode::payload_missing);
    for (std::size_t p = chunks.size(); p-- > 0;) {
      for (std::size_t c = chunks[p].size(); c-- > 0;) {
        const BlobKey& key = manifest->chunks[p][c];
        const auto missing = assembler.missing();
        REQUIRE(missing.size() == assembler.left());
        CHECK(std::find(missing.begin(), missing.end(), key) != missing.end());
        CHECK_FALSE(assembler.complete());
        CHECK(assembler.missing(1).size() == 1);
        Bytes wrong = chunks[p][c];
        wrong.back() ^= std::byte{1};
        CHECK(assembler.add(key, wrong).error().code() == ErrorCode::id_mismatch);
        const auto taken = assembler.add(key, chunks[p][c]);
        REQUIRE(taken.ok());
        CHECK(*taken);
        const auto again = assembler.add(key, chunks[p][c]);
        REQUIRE(again.ok());
        CHECK_FALSE(*again);
      }
    }
    CHECK(assembler.complete());
    const auto back = assembler.finish();
    REQUIRE(back.ok());
    same(*back, rich());
    CHECK(kvmeld::verify_fragment(*back).ok());
  }
}

TEST_CASE("one payload of two is fetched alone") {
  const auto manifest = kvmeld::replica::make_manifest(rich(), 500);
  REQUIRE(manifest.ok());
  Assembler assembler(*manifest, 1);
  const auto chunks = stored(rich(), 500);
  CHECK(assembler.left() == chunks[1].size());
  for (std::size_t c = 0; c < chunks[1].size(); ++c)
    REQUIRE(assembler.add(manifest->chunks[1][c], chunks[1][c]).ok());
  const auto back = assembler.finish();
  REQUIRE(back.ok());
  CHECK(back->payloads()[0].bytes == nullptr);
  CHECK(back->payloads()[1].bytes != nullptr);
  CHECK(kvmeld::verify_fragment(*back).ok());
}

TEST_CASE("empty fragments, and chunks that occur twice") {
  const auto g = test::geometry({.heads = 1, .channels = 32});
  const auto empty = test::sealed(g, 0, 1).fragment;
  auto manifest =
      kvmeld::replica::decode_manifest(bytes_of(kvmeld::replica::encode_manifest(empty)));
  REQUIRE(manifest.ok());
  Assembler none(*manifest);
  CHECK(none.complete());
  const auto back = none.finish();
  REQUIRE(back.ok());
  REQUIRE(back->payloads()[0].bytes != nullptr);
  same(*back, empty);

  test::TestCache zeros(g, 8);
  for (auto& buffer : zeros.buffers()) std::fill(buffer.begin(), buffer.end(), std::byte{0});
  const auto flat = kvmeld::seal(zeros.ref());
  REQUIRE(flat.ok());
  const auto twice = kvmeld::replica::make_manifest(*flat, 128);
  REQUIRE(twice.ok());
  Assembler assembler(*twice);
  CHECK(twice->chunks[0].size() > 1);
  CHECK(assembler.left() == 1);  // of one key all
  CHECK(assembler.missing() == std::vector<BlobKey>{twice->chunks[0][0]});
  REQUIRE(assembler.add(twice->chunks[0][0], stored(*flat, 128)[0][0]).ok());
  CHECK(assembler.complete());
  CHECK(assembler.held_bytes() == 128);  // not once for each place
  const auto whole = assembler.finish();
  REQUIRE(whole.ok());
  CHECK(kvmeld::verify_fragment(*whole).ok());
  CHECK(assembler.held_bytes() == 0);
  CHECK(assembler.finish().error().code() == ErrorCode::invalid_argument);
}

TEST_CASE("memory follows the chunks that came, and a few of them make no payload of gigabytes") {
  // As many zeros as a manifest can name, of which one chunk ever comes: 2 GiB, of a message of 66
  // KB.
  auto geometry = std::make_shared<kvmeld::Geometry>();
  geometry->model = "m";
  geometry->tokenizer = "t";
  geometry->layers.push_back(
      kvmeld::attention_layer(kvmeld::ElementType::f32, 64, 64, kvmeld::RopeSpec::none()));
  auto body = std::make_shared<kvmeld::Fragment::Body>();
  body->geometry = geometry;
  body->token_count = 65536;  // of 32 KiB
  kvmeld::Payload payload;
  for (std::int64_t i = 0; i < body->token_count; ++i) payload.positions.push_back(i);
  payload.token_sets.push_back({});
  payload.layer_set = {0};
  REQUIRE(kvmeld::replica::lay_out(*geometry, payload, std::uint64_t{1} << 40U).ok());
  REQUIRE(payload.byte_count == std::size_t{1} << 31U);
  kvmeld::replica::Manifest manifest;
  const Bytes zeros(manifest.chunk_bytes);
  const BlobKey key = kvmeld::replica::chunk_key(std::span<const std::byte>(zeros));
  manifest.chunks.emplace_back(2048, key);
  body->payloads.push_back(payload);
  body->id = kvmeld::extend::fragment_id<kvmeld::Xxh3_128>(*body);
  manifest.fragment = kvmeld::Fragment(body);
  const Bytes wire = kvmeld::replica::encode_manifest(manifest);
  const auto refused = kvmeld::replica::decode_manifest(wire);
  CHECK(refused.error().code() == ErrorCode::oversized);
  CHECK(refused.error().message().find("2146435072 bytes") != std::string::npos);

  // Whoever raises the bound has the chunk once until it gives the payload out.
  const auto believed =
      kvmeld::replica::decode_manifest(wire, {.max_repeated_bytes = std::uint64_t{1} << 31U});
  REQUIRE(believed.ok());
  Assembler assembler(*believed);
  CHECK(assembler.bytes_of(key) == zeros.size());
  CHECK(assembler.bytes_of(BlobKey{}) == 0);
  REQUIRE(
      assembler.add(key, kvmeld::replica::encode_chunk(std::span<const std::byte>(zeros))).ok());
  CHECK(assembler.complete());
  CHECK(assembler.held_bytes() == zeros.size());
  CHECK(assembler.bytes_of(key) == 0);
  CHECK(resident_bytes() < std::size_t{1} << 30U);

  // What nobody would read again is not stored either.
  test::TestCache flat(test::geometry({.heads = 1, .channels = 32}), 64);
  for (auto& buffer : flat.buffers()) std::fill(buffer.begin(), buffer.end(), std::byte{0});
  const auto fragment = kvmeld::seal(flat.ref());
  REQUIRE(fragment.ok());
  kvmeld::stores::MemoryStore store;
  kvmeld::replica::FragmentFormat format;
  format.chunk_bytes = 128;
  format.max_repeated_bytes = 1000;
  CHECK(kvmeld::replica::store_fragment(store, *fragment, format).error().code() ==
        ErrorCode::oversized);
  format.max_repeated_bytes = 1 << 20;
  CHECK(kvmeld::replica::store_fragment(store, *fragment, format).ok());
  CHECK(kvmeld::replica::load_fragment(store, fragment->id(), format).ok());
}

TEST_CASE("a payload whose bytes cannot be counted is refused, however much is allowed") {
  const auto geometry = std::make_shared<kvmeld::Geometry>();
  geometry->layers.assign(1, kvmeld::attention_layer(kvmeld::ElementType::f32, 1 << 30, 1 << 30,
                                                     kvmeld::RopeSpec::none()));
  kvmeld::Payload payload;  // 2^63 bytes of keys, as many of values
  payload.positions = {0, 1};
  payload.token_sets.push_back(kvmeld::TokenSet{});
  payload.layer_set.assign(1, 0);
  CHECK(kvmeld::replica::lay_out(*geometry, payload, ~std::uint64_t{0}).code() ==
        ErrorCode::oversized);
#if defined(__cpp_exceptions)
  CHECK_THROWS_AS(kvmeld::HostCache(geometry, 2), std::length_error);
  CHECK_THROWS_AS(kvmeld::HostCache(geometry, -1), std::length_error);
#endif
}

TEST_CASE("planes with scales, of several shapes, and layers without any") {
  kvmeld::Geometry g =
      *test::geometry({.type = kvmeld::ElementType::i8, .layers = 3, .heads = 3, .channels = 34});
  g.layers[0].planes[0].scales = kvmeld::ScaleScheme::per_token_head;
  g.layers[0].planes[1].scales = kvmeld::ScaleScheme::per_channel_group;
  g.layers[0].planes[1].scale_group = 17;
  g.layers[1].planes.clear();
  g.layers[2].planes[1].type = kvmeld::ElementType::f32;
  kvmeld::HostCache cache(std::make_shared<const kvmeld::Geometry>(g), 5);
  test::Random random(1);
  // finite as f32, too
  for (std::byte& b : cache.bytes()) b = static_cast<std::byte>(random.below(64));
  const auto fragment = kvmeld::seal(cache.kv_cache_ref());
  REQUIRE(fragment.ok());
  const auto manifest =
      kvmeld::replica::decode_manifest(bytes_of(kvmeld::replica::encode_manifest(*fragment, 100)));
  REQUIRE(manifest.ok());
  Assembler assembler(*manifest);
  const auto chunks = stored(*fragment, 100);
  for (std::size_t c = 0; c < chunks[0].size(); ++c)
    REQUIRE(assembler.add(manifest->chunks[0][c], chunks[0][c]).ok());
  const auto back = assembler.finish();
  REQUIRE(back.ok());
  same(*back, *fragment);
}

TEST_CASE("a manifest that lies is found out, at the latest when its bytes are there") {
  const auto manifest = kvmeld::replica::make_manifest(rich(), 1000);
  REQUIRE(manifest.ok());
  const auto refused = [](const Manifest& m, ErrorCode code) {
    const auto made = kvmeld::replica::decode_manifest(kvmeld::replica::encode_manifest(m));
    REQUIRE(!made.ok());
    INFO(made.error().message());
    CHECK(kvmeld::to_string(made.error().code()) == kvmeld::to_string(code));
  };
  const auto bent = [&](auto&& change) {
    Manifest m = *manifest;
    auto body = std::make_shared<Fragment::Body>(*m.fragment.body());
    auto g = std::make_shared<kvmeld::Geometry>(*body->geometry);
    change(*body, *g);
    body->geometry = std::move(g);
    m.fragment = Fragment(std::move(body));
    return m;
  };
  using Body = Fragment::Body;
  using kvmeld::Geometry;
  refused(bent([](Body& b, Geometry&) { b.tokens[0] = 5; }), ErrorCode::id_mismatch);
  refused(bent([](Body&, Geometry& g) { g.model = "another model"; }), ErrorCode::id_mismatch);
  refused(bent([](Body&, Geometry& g) { g.layers[0].rope.base = 5000; }), ErrorCode::id_mismatch);
  refused(bent([](Body& b, Geometry&) { b.payloads[1].digest[3] ^= 1; }), ErrorCode::id_mismatch);
  refused(bent([](Body& b, Geometry&) { b.id.bytes[9] ^= 1; }), ErrorCode::id_mismatch);
  refused(bent([](Body& b, Geometry&) { b.id.bytes[0] = 2; }), ErrorCode::hash_mismatch);
  refused(bent([](Body& b, Geometry&) { b.prefix = {}; }), ErrorCode::id_mismatch);
  refused(bent([](Body& b, Geometry&) { b.role = kvmeld::Role::prefix; }), ErrorCode::corrupt);
  refused(bent([](Body& b, Geometry&) { b.role = kvmeld::Role{2}; }), ErrorCode::unknown_field);
  refused(bent([](Body& b, Geometry&) { b.tokens.pop_back(); }), ErrorCode::token_count_mismatch);
  refused(bent([](Body&, Geometry& g) { g.layers[0].planes[0].type = kvmeld::ElementType{8}; }),
          ErrorCode::unknown_field);
  refused(bent([](Body&, Geometry& g) { g.layers[1].key_form = kvmeld::KeyForm{2}; }),
          ErrorCode::unknown_field);
  refused(bent([](Body&, Geometry& g) { g.layers[1].rope.scaling = kvmeld::RopeScaling{7}; }),
          ErrorCode::unknown_field);
  refused(bent([](Body&, Geometry& g) { g.layers[1].rope = {}; }),
          ErrorCode::unknown_field);  // undeclared has no byte
  refused(bent([](Body&, Geometry& g) { g.layers[1].rope = kvmeld::RopeSpec::none(); }),
          ErrorCode::invalid_argument);
  refused(bent([](Body&, Geometry& g) { g.layers[0].planes[0].heads = -1; }),
          ErrorCode::invalid_argument);
  // other byte count
  refused(bent([](Body&, Geometry& g) { g.layers[0].planes[1].heads = 3; }), ErrorCode::corrupt);
  refused(bent([](Body&, Geometry& g) {
            g.layers[0].planes[1].heads = g.layers[0].planes[1].channels = 1 << 30;
          }),
          ErrorCode::oversized);
  refused(bent([](Body&, Geometry& g) {
            g.layers[2].rope.factor = std::numeric_limits<double>::quiet_NaN();
          }),
          ErrorCode::corrupt);
  refused(bent([](Body& b, Geometry&) { b.payloads[0].byte_count += 1; }), ErrorCode::corrupt);
  refused(bent([](Body& b, Geometry&) {
            std::swap(b.payloads[0].positions[2], b.payloads[0].positions[3]);
          }),
          ErrorCode::corrupt);
  refused(
      bent([](Body& b, Geometry&) { b.payloads[0].positions.back() = kvmeld::max_position + 1; }),
      ErrorCode::corrupt);
  refused(bent([](Body& b, Geometry&) { b.payloads[0].layer_set[1] = 2; }), ErrorCode::corrupt);
  // tokens 0 to 6
  refused(bent([](Body& b, Geometry&) { b.payloads[0].token_sets[1].present.back() = 7; }),
          ErrorCode::corrupt);
  refused(bent([](Body&, Geometry& g) {  // a layer that is written once, and asked for often
            g.layers[0].rope.factors.assign(100000, 1.0F);
            g.layers.assign(200, g.layers[0]);
          }),
          ErrorCode::oversized);
  Manifest chunky = *manifest;
  chunky.chunk_bytes = 0;
  refused(chunky, ErrorCode::oversized);
  chunky.chunk_bytes = kvmeld::replica::max_chunk_bytes + 1;
  refused(chunky, ErrorCode::oversized);
  chunky.chunk_bytes = 1;
  refused(chunky, ErrorCode::truncated);  // needs more keys than there are bytes

  // What only the payload's digest covers: positions, and which layer holds which token.
  const auto assembled = [&](const Manifest& m) {
    auto made = kvmeld::replica::decode_manifest(kvmeld::replica::encode_manifest(m));
    REQUIRE(made.ok());
    Assembler assembler(*made);
    const auto chunks = stored(rich(), 1000);
    for (std::size_t p = 0; p < 2; ++p)
      for (std::size_t c = 0; c < chunks[p].size(); ++c)
        (void)assembler.add(manifest->chunks[p][c], chunks[p][c]);
    return assembler.finish().error().code();
  };
  CHECK(assembled(*manifest) == ErrorCode::ok);
  CHECK(assembled(bent([](Body& b, Geometry&) { b.payloads[0].positions.back() += 1; })) ==
        ErrorCode::id_mismatch);
  CHECK(assembled(bent([](Body& b, Geometry&) { b.payloads[1].lead_in.low = 1; })) ==
        ErrorCode::id_mismatch);
  Manifest swapped = *manifest;
  std::swap(swapped.chunks[0][0], swapped.chunks[0][1]);
  CHECK(assembled(swapped) == ErrorCode::id_mismatch);
  swapped = *manifest;
  swapped.chunks[0].back() = swapped.chunks[0][0];  // one key for two sizes
  refused(swapped, ErrorCode::corrupt);

  CHECK(kvmeld::replica::make_manifest(test::evicted(rich(), 1)).error().code() ==
        ErrorCode::payload_missing);
  CHECK(kvmeld::replica::make_manifest(rich(), 0).error().code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::replica::make_manifest(Fragment{}).error().code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::replica::decode_manifest(kvmeld::replica::encode_manifest(*manifest),
                                         {.max_payload_bytes = 100})
            .error()
            .code() == ErrorCode::oversized);
}

TEST_CASE("fragments of one model share its geometry") {
  const Bytes wire = bytes_of(kvmeld::replica::encode_manifest(rich()));
  const auto known = std::make_shared<const kvmeld::Geometry>(rich().geometry());
  CHECK(kvmeld::replica::decode_manifest(wire, {}, {}, known)->fragment.shared_geometry() == known);
  const std::shared_ptr<const kvmeld::Geometry> other = test::geometry();
  CHECK(kvmeld::replica::decode_manifest(wire, {}, {}, other)->fragment.geometry() ==
        rich().geometry());
}

TEST_CASE("stored chunks declare what they hold") {
  const Bytes raw(300, std::byte{7});
  const BlobKey key = kvmeld::replica::chunk_key(raw);
  CHECK(key.bytes[0] == 0x81);
  CHECK(key.is_chunk());
  const Bytes good = kvmeld::replica::encode_chunk(raw);
  CHECK(good.size() == 303);
  CHECK(*kvmeld::replica::decode_chunk(good, key) == raw);
  CHECK(kvmeld::replica::decode_chunk(good, key, 299).error().code() == ErrorCode::oversized);
  CHECK(kvmeld::replica::decode_chunk(good, kvmeld::manifest_key(rich().id())).error().code() ==
        ErrorCode::hash_mismatch);
  BlobKey other = key;
  other.bytes[31] ^= 1;
  CHECK(kvmeld::replica::decode_chunk(good, other).error().code() == ErrorCode::id_mismatch);
  for (std::size_t n = 0; n < good.size(); ++n)
    CHECK_FALSE(kvmeld::replica::decode_chunk(std::span(good).first(n), key).ok());
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes flipped = good;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    CHECK_FALSE(kvmeld::replica::decode_chunk(flipped, key).ok());
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  CHECK(kvmeld::replica::decode_chunk(longer, key).error().code() == ErrorCode::oversized);
  Bytes foreign = good;
  foreign[0] = std::byte{1};
  CHECK(kvmeld::replica::decode_chunk(foreign, key).error().code() == ErrorCode::unsupported);
}

TEST_CASE("every prefix and every flipped bit of a message is an error") {
  const kvmeld::replica::FrameOptions options{
      .scope = kvmeld::replica::frame_namespace("tenant", "model", "tokenizer")};
  const Bytes manifest = bytes_of(kvmeld::replica::encode_manifest(rich(), 256));
  const Bytes frame = bytes_of(kvmeld::replica::encode_frame(3, manifest, options));
  CHECK(frame.size() > 1500);
  CHECK(frame.size() < 2700);
  const auto view = kvmeld::replica::decode_frame(frame, options);
  REQUIRE(view.ok());
  CHECK(view->type == 3);
  CHECK(std::ranges::equal(view->body, manifest));
  std::size_t accepted = 0;
  for (std::size_t n = 0; n < frame.size(); ++n)
    accepted += kvmeld::replica::decode_frame(
                    Bytes(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(n)), options)
                    .ok();
  for (std::size_t n = 0; n < manifest.size(); ++n)
    accepted += kvmeld::replica::decode_manifest(
                    Bytes(manifest.begin(), manifest.begin() + static_cast<std::ptrdiff_t>(n)))
                    .ok();
  for (std::size_t bit = 0; bit < frame.size() * 8; ++bit) {
    Bytes flipped = frame;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const auto got = kvmeld::replica::decode_frame(flipped, options);
    accepted += got.ok();
    if (!got.ok() && got.error().message().empty()) accepted += 1000;
  }
  CHECK(accepted == 0);

  // A manifest whose checksum was made to fit: whatever still passes names the same id, and is the
  // same fragment or is found out later.
  std::size_t passed = 0, other = 0;
  const auto chunks = stored(rich(), 256);
  const auto keys = kvmeld::replica::make_manifest(rich(), 256)->chunks;
  for (std::size_t bit = 0; bit < (manifest.size() - 8) * 8; bit += 5) {
    Bytes flipped(manifest.begin(), manifest.end() - 8);
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    kvmeld::extend::ByteWriter w;
    w.bytes(flipped);
    w.value(kvmeld::replica::detail::accident_sum(flipped));
    const auto got = kvmeld::replica::decode_manifest(w.written());
    if (!got.ok()) continue;
    ++passed;
    if (got->fragment.id() != rich().id()) ++other;
    Assembler assembler(*got);
    for (std::size_t p = 0; p < 2; ++p)
      for (std::size_t c = 0; c < chunks[p].size(); ++c)
        (void)assembler.add(keys[p][c], chunks[p][c]);
    const auto whole = assembler.finish();
    if (whole.ok() && !kvmeld::verify_fragment(*whole).ok()) ++other;
  }
  INFO(passed);
  CHECK(other == 0);
}

TEST_CASE("frames of newer versions, other namespaces and hostile lengths") {
  const kvmeld::replica::FrameOptions options{
      .scope = kvmeld::replica::frame_namespace("a", "b", "c"), .max_body_bytes = 100};
  const Bytes body(100, std::byte{1});
  const Bytes frame = bytes_of(kvmeld::replica::encode_frame(9, body, options));
  const auto code = [&](std::size_t at, int value) {
    Bytes bent = frame;
    bent[at] = static_cast<std::byte>(value);
    return kvmeld::replica::decode_frame(bent, options).error().code();
  };
  CHECK(code(4, 1) == ErrorCode::version_mismatch);
  CHECK(code(4, 3) == ErrorCode::version_mismatch);
  CHECK(code(4, 255) == ErrorCode::version_mismatch);
  CHECK(code(7, 2) == ErrorCode::unknown_field);
  CHECK(code(0, 'X') == ErrorCode::corrupt);
  CHECK(code(24, 101) == ErrorCode::oversized);
  CHECK(code(31, 255) == ErrorCode::oversized);
  CHECK(code(24, 99) == ErrorCode::oversized);
  CHECK(code(6, 8) == ErrorCode::corrupt);
  Bytes newer = frame;
  newer[4] = std::byte{3};
  CHECK(
      kvmeld::replica::decode_frame(newer, options).error().message() ==
      "frame of wire version 3.0; this build reads version 2: update the older of the two members");
  CHECK(kvmeld::replica::decode_frame(frame, kvmeld::replica::FrameOptions{}).error().code() ==
        ErrorCode::unauthenticated);
  CHECK(kvmeld::replica::frame_namespace("ab", "", "c") !=
        kvmeld::replica::frame_namespace("a", "b", "c"));
  CHECK(kvmeld::replica::encode_frame(9, Bytes(101), options).error().code() ==
        ErrorCode::oversized);
  CHECK(
      kvmeld::replica::decode_frame(bytes_of(kvmeld::replica::encode_frame(0, {})))->body.empty());
}

TEST_CASE("the bytes stay what docs/wire.md says") {
  auto g =
      test::geometry({.type = kvmeld::ElementType::f16, .layers = 2, .heads = 1, .channels = 2});
  const auto tokens = test::token_ids(2);
  test::TestCache cache(g, 2);
  cache.fill(1);
  const auto made = kvmeld::seal(cache.ref(), {.tokens = tokens});
  REQUIRE(made.ok());
  const Bytes manifest = bytes_of(kvmeld::replica::encode_manifest(*made, 16));
  const Bytes frame = bytes_of(kvmeld::replica::encode_frame(1, std::span(manifest).first(4),
                                                             kvmeld::replica::FrameOptions{}));
  CHECK(hex(manifest) ==
        "4b564d4d"
        "02"
        "00"                                                                // magic, version, flags
        "013ae26951099d7d49a09d503a74e23ec8000000000000000000000000000000"  // id
        "01"
        "0000000000000000000000000000000000000000000000000000000000000000"  // role, prefix
        "02"
        "02"
        "64000000"
        "65000000"  // tokens: how many, token ids
        "0a"
        "74657374206d6f64656c"  // model
        "0e"
        "7465737420746f6b656e697a6572"
        "00"  // tokenizer, tenant
        "ffffffff"
        "0000000000000000"
        "00"  // bos, trained context, placeholders
        "01"  // distinct layers
        "00"
        "00000000"  // key form, window
        "01"
        "01"
        "00000000"
        "02000000"
        "000000000088c340"  // rope: kind, pairing, first, rotary, base
        "00"
        "000000000000f03f"
        "00000000"  // scaling, factor, original context
        "000000000000f03f"
        "0000000000001040"  // low and high frequency factor
        "0000000000004040"
        "000000000000f03f"
        "01"
        "000000000000f03f"  // beta fast and slow, truncate, attention factor
        "00"
        "00"
        "00"  // factors: short, long, explicit
        "02"  // planes
        "00"
        "02"
        "01000000"
        "02000000"
        "01"
        "00"
        "00000000"
        "00000000"  // key: type, heads, channels, rotary, scales
        "01"
        "02"
        "01000000"
        "02000000"
        "00"
        "00"
        "00000000"
        "00000000"  // value
        "02"
        "00"
        "00"  // layers: which of the distinct ones
        "10"
        "01"                                                              // chunk bytes, payloads
        "00000000000000000000000000000000"                                // lead-in
        "2a592c8f300ee9d2b035a528321f11c7000000000000000000000000000000"  // digest
        "00"
        "00"  // positions 0, 1
        "01"
        "01"
        "00"
        "00"  // token sets: one, all tokens; each layer's
        "20"  // payload bytes
        "81b76d9592d7f133a078a9735452e5b148000000000000000000000000000000"  // chunk keys
        "81315f7d9f9c6b98ff088db527ac6f7723000000000000000000000000000000"
        "8b0b25f3a22ca846");  // checksum
  CHECK(hex(frame) ==
        "4b564d46"
        "02"
        "00"
        "01"
        "00"                                // magic, major, minor, type, flags
        "00000000000000000000000000000000"  // namespace
        "0400000000000000"
        "5198dc9b22b32757"  // body bytes, checksum
        "4b564d4d");
}
