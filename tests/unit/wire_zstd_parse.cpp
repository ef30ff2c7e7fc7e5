// Compressed chunks: every bit pattern comes back, and hostile ones cost no more than their
// declared size.
#include <cstdio>

#include "support/catch.hpp"

#ifndef KVMELD_TEST_ZSTD
TEST_CASE("compressed chunks") {
  std::puts("skipped: no zstd (Debian: libzstd-dev)");
  std::exit(77);
}
#else

#include <kvmeld/replica/wire.hpp>
#include <kvmeld/replica/zstd.hpp>

#include "support/random_cache.hpp"

namespace {

using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::replica::ChunkForm;
using kvmeld::replica::Zstd;
using Bytes = std::vector<std::byte>;

const Zstd zstd;

Bytes noise(std::size_t n, std::uint64_t seed) {
  test::Random random(seed);
  Bytes out(n);
  for (auto& b : out) b = static_cast<std::byte>(random.next());
  return out;
}

void round_trip(const Bytes& raw, const ChunkForm& form) {
  Bytes packed{std::byte{42}};
  if (!zstd.compress(raw, form, packed)) {
    CHECK(packed == Bytes{std::byte{42}});
    return;
  }
  REQUIRE(packed[0] == std::byte{42});
  Bytes back(raw.size());
  const auto status = zstd.decompress(std::span(packed).subspan(1), back);
  INFO(status.message());
  REQUIRE(status.ok());
  CHECK(back == raw);
}

}  // namespace

TEST_CASE("compression is lossless for any bytes, rows and tails") {
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32,
                                 ElementType::f64, ElementType::q8_0}) {
    for (const std::uint32_t row : {0U, 1U, 3U, 64U, 1000U, 4000000000U}) {
      for (const std::size_t n : {0U, 1U, 2U, 3U, 5U, 130U, 4096U, 70001U}) {
        CAPTURE(kvmeld::to_string(type), row, n);
        round_trip(noise(n, n + row), {type, row});
        round_trip(Bytes(n, std::byte{0x80}), {type, row});
      }
    }
  }
  Bytes all(65536 * 2);  // every 16-bit pattern, NaNs and infinities too
  for (std::size_t i = 0; i < 65536; ++i) {
    all[2 * i] = static_cast<std::byte>(i);
    all[2 * i + 1] = static_cast<std::byte>(i >> 8U);
  }
  for (const std::uint32_t row : {1U, 7U, 256U}) {
    round_trip(all, {ElementType::f16, row});
    round_trip(all, {ElementType::bf16, row});
    round_trip(all, {ElementType::f32, row});
  }
}

TEST_CASE("floats whose channels differ in magnitude get shorter, noise stays as it is") {
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32}) {
    const auto g = test::geometry({.type = type, .layers = 1, .heads = 2, .channels = 64});
    test::TestCache cache(g, 500);
    test::Random random(5);
    for (std::size_t p = 0; p < 2; ++p)
      for (std::int64_t t = 0; t < 500; ++t)
        for (std::int64_t h = 0; h < 2; ++h)
          for (std::int64_t c = 0; c < 64; ++c)
            cache.set(p, t, h, c,
                      (random.value() + random.value()) * static_cast<float>(1 + c * c) * 0.001F);
    const auto fragment = kvmeld::seal(cache.ref());
    REQUIRE(fragment.ok());
    const kvmeld::Payload& payload = fragment->payloads()[0];
    const std::size_t cut = 100000;
    const auto manifest = kvmeld::replica::make_manifest(*fragment, cut);
    REQUIRE(manifest.ok());
    kvmeld::replica::Assembler assembler(*manifest);
    std::size_t stored = 0;
    for (std::size_t c = 0; c < manifest->chunks[0].size(); ++c) {
      const auto form = kvmeld::replica::chunk_form(*g, payload, c, cut);
      CHECK(form.row_elements == 128);
      CHECK(form.type == type);
      const Bytes chunk =
          kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(payload, c, cut), &zstd, form);
      stored += chunk.size();
      CHECK(chunk[0] == std::byte{1});
      CHECK(assembler.add(manifest->chunks[0][c], chunk).error().code() == ErrorCode::unsupported);
      REQUIRE(assembler.add(manifest->chunks[0][c], chunk, &zstd).ok());
      CHECK(kvmeld::replica::decode_chunk(chunk, manifest->chunks[0][c], cut, &zstd).ok());
    }
    CHECK(assembler.finish().ok());
    const double ratio = static_cast<double>(payload.byte_count) / static_cast<double>(stored);
    CAPTURE(kvmeld::to_string(type), ratio);
    CHECK(ratio > (type == ElementType::bf16 ? 1.4 : 1.12));
  }
  const Bytes random = noise(5000, 1);
  const Bytes kept = kvmeld::replica::encode_chunk(random, &zstd, {ElementType::f16, 64});
  CHECK(kept[0] == std::byte{0});
  CHECK(kept.size() == 5003);
  CHECK(kvmeld::replica::decode_chunk(kept, kvmeld::replica::chunk_key(random), 5000, &zstd).ok());
}

TEST_CASE("bent compressed chunks are refused") {
  Bytes raw(3000);
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = static_cast<std::byte>(i % 7);
  const kvmeld::BlobKey key = kvmeld::replica::chunk_key(raw);
  for (const ElementType type :
       {ElementType::i8, ElementType::f16, ElementType::bf16, ElementType::f32}) {
    const Bytes good = kvmeld::replica::encode_chunk(raw, &zstd, {type, 50});
    REQUIRE(good[0] == std::byte{1});
    const auto read = [&](std::span<const std::byte> bytes) {
      return kvmeld::replica::decode_chunk(bytes, key, 3000, &zstd);
    };
    CHECK(read(good).ok());
    for (std::size_t n = 0; n < good.size(); ++n) CHECK_FALSE(read(std::span(good).first(n)).ok());
    for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
      Bytes flipped = good;
      flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      const auto got = read(flipped);  // zstd's frames have bits that mean nothing
      CHECK((!got.ok() || *got == raw));
    }
    Bytes longer = good;
    longer.push_back(std::byte{0});
    CHECK(read(longer).error().code() == ErrorCode::oversized);
    Bytes unknown = good;
    unknown[3] = std::byte{4};
    CHECK(read(unknown).error().code() == ErrorCode::unknown_field);
    CHECK(kvmeld::replica::decode_chunk(good, key, 2999, &zstd).error().code() ==
          ErrorCode::oversized);
  }
}
#endif
