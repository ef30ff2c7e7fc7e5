// What OpenSSL does for the wire: SHA-256 ids through manifests and chunks, and authenticated
// frames.
#include <cstdio>

#include "support/catch.hpp"

#ifndef KVMELD_TEST_OPENSSL
TEST_CASE("SHA-256 and HMAC") {
  std::puts("skipped: no OpenSSL (Debian: libssl-dev)");
  std::exit(77);
}
#else

#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/openssl.hpp>
#include <kvmeld/replica/wire.hpp>

#include "support/random_cache.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::replica::HmacSha256;
using kvmeld::replica::Sha256;
using Bytes = std::vector<std::byte>;

std::span<const std::byte> text(std::string_view s) {
  return std::as_bytes(std::span(s.data(), s.size()));
}

template <class Range>
std::string hex(const Range& bytes) {
  std::string out;
  for (const auto b : bytes) {
    out += "0123456789abcdef"[static_cast<unsigned>(b) >> 4U];
    out += "0123456789abcdef"[static_cast<unsigned>(b) & 15U];
  }
  return out;
}

}  // namespace

TEST_CASE("SHA-256 gives the published digests, however the bytes are cut") {
  // FIPS 180-4 examples
  CHECK(hex(Sha256{}.digest32()) ==
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 hash;
  hash.update(text("a"));
  const Sha256 copy = hash;
  hash.update(text("bc"));
  CHECK(hex(hash.digest32()) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(hash.finish()) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015");
  hash.update(text("d"));
  CHECK(hex(hash.digest32()) == "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589");
  CHECK(hex(copy.digest32()) == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb");
  hash = copy;
  CHECK(hash.digest32() == copy.digest32());
  CHECK(kvmeld::replica::sha256_set.digest(text("abc")).words[0] == 0xeacf018fbf1678baULL);
}

TEST_CASE("a SHA-256 fragment crosses, and never as one of another hash") {
  const auto g = test::geometry({.type = kvmeld::ElementType::f16, .channels = 32});
  test::TestCache cache(g, 20);
  cache.fill(3);
  const auto fragment = kvmeld::seal<Sha256>(cache.ref());
  REQUIRE(fragment.ok());
  CHECK(fragment->id().tag() == 2);
  CHECK(kvmeld::verify_fragment<Sha256>(*fragment).ok());
  const auto wire = kvmeld::replica::encode_manifest(*fragment, 1000, kvmeld::replica::sha256_set);
  REQUIRE(wire.ok());
  CHECK(kvmeld::replica::encode_manifest(*fragment).error().code() == ErrorCode::hash_mismatch);
  CHECK(kvmeld::replica::decode_manifest(*wire).error().code() == ErrorCode::hash_mismatch);
  const auto manifest = kvmeld::replica::decode_manifest(*wire, {}, kvmeld::replica::sha256_set);
  REQUIRE(manifest.ok());
  kvmeld::replica::Assembler assembler(*manifest, {}, kvmeld::replica::sha256_set);
  for (std::size_t c = 0; c < manifest->chunks[0].size(); ++c) {
    const auto raw = kvmeld::replica::raw_chunk(fragment->payloads()[0], c, 1000);
    CHECK(manifest->chunks[0][c].bytes[0] == 0x82);
    // another hash's key is no chunk of this one
    CHECK(assembler.add(kvmeld::replica::chunk_key(raw), kvmeld::replica::encode_chunk(raw)).ok());
    CHECK(assembler.left() == manifest->chunks[0].size() - c);
    REQUIRE(assembler.add(manifest->chunks[0][c], kvmeld::replica::encode_chunk(raw)).ok());
  }
  const auto back = assembler.finish();
  REQUIRE(back.ok());
  CHECK(kvmeld::verify_fragment<Sha256>(*back).ok());
}

TEST_CASE("HMAC-SHA-256 gives the published tags") {
  Bytes tag(32);
  // RFC 4231, case 2
  REQUIRE(HmacSha256("Jefe").sign(text("what do ya want "), text("for nothing?"), tag));
  CHECK(hex(tag) == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_FALSE(HmacSha256().sign(text("a"), text("b"), tag));
  CHECK_FALSE(HmacSha256("Jefe").sign(text("a"), text("b"), std::span(tag).first(31)));
}

TEST_CASE("only members with the key are heard") {
  const kvmeld::replica::FrameOptions keyed{
      .auth = std::make_shared<HmacSha256>("a secret of the session")};
  const kvmeld::replica::FrameOptions other{
      .auth = std::make_shared<HmacSha256>("a secret of the sessioN")};
  const auto frame = kvmeld::replica::encode_frame(5, text("body"), keyed);
  REQUIRE(frame.ok());
  const auto view = kvmeld::replica::decode_frame(*frame, keyed);
  REQUIRE(view.ok());
  CHECK(std::ranges::equal(view->body, text("body")));
  CHECK(kvmeld::replica::decode_frame(*frame, keyed)
            .ok());  // a replay is valid: what is above bears it
  CHECK(kvmeld::replica::decode_frame(*frame, other).error().code() == ErrorCode::unauthenticated);
  CHECK(kvmeld::replica::decode_frame(*frame, kvmeld::replica::FrameOptions{}).error().code() ==
        ErrorCode::unauthenticated);
  CHECK(kvmeld::replica::decode_frame(*kvmeld::replica::encode_frame(5, text("body")), keyed)
            .error()
            .code() == ErrorCode::unauthenticated);
  CHECK(kvmeld::replica::encode_frame(5, text("body"), {.auth = std::make_shared<HmacSha256>()})
            .error()
            .code() == ErrorCode::unsupported);
  for (std::size_t n = 0; n < frame->size(); ++n)
    CHECK_FALSE(kvmeld::replica::decode_frame(std::span(*frame).first(n), keyed).ok());
  for (std::size_t bit = 0; bit < frame->size() * 8; ++bit) {
    Bytes flipped = *frame;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    CHECK_FALSE(kvmeld::replica::decode_frame(flipped, keyed).ok());
  }
  // A forger can mend the checksum, not the tag.
  Bytes forged = *frame;
  forged[6] = std::byte{6};
  const std::uint64_t sum =
      kvmeld::replica::detail::frame_sum(forged, std::span(forged).subspan(40, 4));
  std::memcpy(forged.data() + 32, &sum, 8);
  CHECK(kvmeld::replica::decode_frame(forged, keyed).error().code() == ErrorCode::unauthenticated);
  // Nor take the tag off.
  Bytes bare(frame->begin(), frame->end() - 32);
  bare[7] = std::byte{0};
  const std::uint64_t bare_sum =
      kvmeld::replica::detail::frame_sum(bare, std::span(bare).subspan(40, 4));
  std::memcpy(bare.data() + 32, &bare_sum, 8);
  CHECK(kvmeld::replica::decode_frame(bare, kvmeld::replica::FrameOptions{}).ok());
  CHECK(kvmeld::replica::decode_frame(bare, keyed).error().code() == ErrorCode::unauthenticated);
}
#endif

TEST_CASE("a signed frame proves its sender") {
  using kvmeld::replica::Ed25519;
  Ed25519::Key one{}, two{};
  one[0] = std::byte{1};
  two[0] = std::byte{2};
  const auto public_one = Ed25519::public_key(one), public_two = Ed25519::public_key(two);
  REQUIRE(public_one.ok());
  REQUIRE(public_two.ok());
  const std::map<kvmeld::replica::MemberId, Ed25519::Key> all{{1, *public_one}, {2, *public_two}};
  const kvmeld::replica::FrameOptions first{.auth = std::make_shared<Ed25519>(one, all)},
      second{.auth = std::make_shared<Ed25519>(two, all)};
  const auto frame = kvmeld::replica::encode_frame(5, text("body"), first);
  REQUIRE(frame.ok());
  CHECK(kvmeld::replica::decode_frame(*frame, second, 1).ok());
  // in another's name
  CHECK(kvmeld::replica::decode_frame(*frame, second, 2).error().code() ==
        ErrorCode::unauthenticated);
  CHECK(kvmeld::replica::decode_frame(*frame, second, 3).error().code() ==
        ErrorCode::unauthenticated);
  CHECK(kvmeld::replica::decode_frame(*frame, second).error().code() == ErrorCode::unauthenticated);
  for (std::size_t byte = 0; byte < frame->size(); ++byte) {
    auto flipped = *frame;
    flipped[byte] ^= std::byte{4};
    CHECK_FALSE(kvmeld::replica::decode_frame(flipped, second, 1).ok());
  }
  CHECK(kvmeld::replica::encode_frame(5, text("body"), {.auth = std::make_shared<Ed25519>()})
            .error()
            .code() == ErrorCode::unsupported);
}
