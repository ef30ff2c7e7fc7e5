// The wire: keys and stored forms of chunks, compression, manifests and frames.

#include <cmath>

#include <kvmeld/replica/wire.hpp>
#include <kvmeld/tensor.hpp>

#if defined(KVMELD_BENCH_OPENSSL)
#include <kvmeld/replica/openssl.hpp>
#endif
#if defined(KVMELD_BENCH_ZSTD)
#include <kvmeld/replica/zstd.hpp>
#endif

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::ElementType;
using Bytes = std::vector<std::byte>;

constexpr auto chunk_bytes = static_cast<std::int64_t>(kvmeld::replica::default_chunk_bytes);

Bytes noise(std::size_t size) {
  Bytes bytes(size);
  bench::fill(bytes, 7);
  return bytes;
}

// The stored form against one copy; nothing could do with less.
void encode_chunk(benchmark::State& state) {
  const Bytes raw = noise(kvmeld::replica::default_chunk_bytes);
  bench::Copy copy(chunk_bytes);
  bench::paired(
      state, chunk_bytes, [&] { benchmark::DoNotOptimize(kvmeld::replica::encode_chunk(raw)); },
      chunk_bytes, [&] { copy(); });
}

// Verified raw bytes against one copy and one hash.
void decode_chunk(benchmark::State& state) {
  const Bytes raw = noise(kvmeld::replica::default_chunk_bytes);
  const Bytes stored = kvmeld::replica::encode_chunk(raw);
  const kvmeld::BlobKey key = kvmeld::replica::chunk_key(raw);
  bench::Copy copy(chunk_bytes);
  bench::paired(
      state, chunk_bytes,
      [&] { benchmark::DoNotOptimize(kvmeld::replica::decode_chunk(stored, key)); }, chunk_bytes,
      [&] {
        copy();
        benchmark::DoNotOptimize(XXH3_128bits(copy.to.data(), copy.to.size()));
      });
}

// A frame against one copy and one hash of its body.
void frame(benchmark::State& state) {
  const Bytes body = noise(kvmeld::replica::default_chunk_bytes);
  bench::Copy copy(chunk_bytes);
  const auto work = [&] {
    const auto made = kvmeld::replica::encode_frame(1, body);
    benchmark::DoNotOptimize(kvmeld::replica::decode_frame(*made));
  };
  bench::paired(state, chunk_bytes, work, chunk_bytes, [&] {
    copy();
    benchmark::DoNotOptimize(XXH3_64bits(copy.from.data(), copy.from.size()));
    benchmark::DoNotOptimize(XXH3_64bits(copy.to.data(), copy.to.size()));
  });
}

// A manifest of 64 tokens in 24 layers, against computing the id that it must have.
void decode_manifest(benchmark::State& state) {
  const auto geometry = bench::small_model(ElementType::f16);
  kvmeld::HostCache cache(geometry, 64);
  bench::fill(cache.bytes(), 1);
  const auto fragment = kvmeld::seal(cache.kv_cache_ref());
  const auto wire = kvmeld::replica::encode_manifest(*fragment);
  const auto bytes = static_cast<std::int64_t>(wire->size());
  bench::paired(
      state, bytes,
      [&] { benchmark::DoNotOptimize(kvmeld::replica::decode_manifest(*wire, {}, {}, geometry)); },
      bytes,
      [&] {
        benchmark::DoNotOptimize(kvmeld::extend::fragment_id<kvmeld::Xxh3_128>(*fragment->body()));
      });
}

// All that a receiver does for a fragment of 8 MiB, against a copy and the two hashes that verify
// it.
void assemble(benchmark::State& state) {
  const auto geometry = bench::small_model(ElementType::f16);
  kvmeld::HostCache cache(geometry, 8 * bench::mebibyte / bench::token_bytes(*geometry));
  bench::fill(cache.bytes(), 1);
  const auto fragment = kvmeld::seal(cache.kv_cache_ref());
  const kvmeld::Payload& payload = fragment->payloads()[0];
  const auto manifest = kvmeld::replica::make_manifest(*fragment);
  const Bytes wire = kvmeld::replica::encode_manifest(*manifest);
  std::vector<Bytes> stored;
  for (std::size_t c = 0; c < manifest->chunks[0].size(); ++c)
    stored.push_back(kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(payload, c)));
  const auto bytes = static_cast<std::int64_t>(payload.byte_count);
  bench::Copy copy(bytes);
  const auto work = [&] {
    kvmeld::replica::Assembler assembler(*kvmeld::replica::decode_manifest(wire, {}, {}, geometry));
    for (std::size_t c = 0; c < stored.size(); ++c)
      (void)assembler.add(manifest->chunks[0][c], stored[c]);
    benchmark::DoNotOptimize(assembler.finish());
  };
  bench::paired(state, bytes, work, bytes, [&] {
    copy();
    benchmark::DoNotOptimize(XXH3_128bits(copy.to.data(), copy.to.size()));
    benchmark::DoNotOptimize(XXH3_128bits(copy.from.data(), copy.from.size()));
  });
}

#if defined(KVMELD_BENCH_OPENSSL)
// The baseline is OpenSSL's own one-call digest.
void sha256(benchmark::State& state) {
  const Bytes raw = noise(kvmeld::replica::default_chunk_bytes);
  bench::paired(
      state, chunk_bytes,
      [&] {
        benchmark::DoNotOptimize(kvmeld::replica::chunk_key(raw, kvmeld::replica::sha256_set));
      },
      chunk_bytes,
      [&] {
        unsigned char out[32];
        (void)EVP_Digest(raw.data(), raw.size(), out, nullptr, EVP_sha256(), nullptr);
        benchmark::DoNotOptimize(out);
      });
}
#endif

#if defined(KVMELD_BENCH_ZSTD)
/// Rows of 128 channels as keys and values have them: each channel normal about its own mean, with
/// its own width.
Bytes channels(ElementType type) {
  const std::size_t elements =
      kvmeld::replica::default_chunk_bytes / static_cast<std::size_t>(kvmeld::block_bytes(type));
  Bytes out(kvmeld::replica::default_chunk_bytes);
  std::uint64_t state = 1;
  const auto uniform = [&state] {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (static_cast<double>(state >> 33U) + 0.5) * 0x1p-31;
  };
  for (std::size_t i = 0; i < elements; ++i) {
    const auto channel = static_cast<double>(i % 128);
    const double normal =
        std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform());
    const auto value =
        static_cast<float>(std::exp2(channel / 32 - 2) * (normal + (channel > 96 ? 2 : 0)));
    if (type == ElementType::f32) std::memcpy(&out[4 * i], &value, 4);
    const std::uint16_t half = type == ElementType::f16
                                   ? kvmeld::from_float<kvmeld::f16>(value).bits
                                   : kvmeld::from_float<kvmeld::bf16>(value).bits;
    if (type != ElementType::f32) std::memcpy(&out[2 * i], &half, 2);
  }
  return out;
}

// Against zstd alone at the same level. `shorter`: raw bytes / stored bytes, and what zstd alone
// makes of it.
void compress(benchmark::State& state, ElementType type, bool back) {
  const Bytes raw = channels(type);
  const kvmeld::replica::ChunkForm form{type, 128};
  const kvmeld::BlobKey key = kvmeld::replica::chunk_key(raw);
  const kvmeld::replica::Zstd zstd;
  const Bytes split = kvmeld::replica::encode_chunk(raw, &zstd, form),
              plain = kvmeld::replica::encode_chunk(raw, &zstd);
  if (back) {
    bench::paired(
        state, chunk_bytes,
        [&] {
          benchmark::DoNotOptimize(kvmeld::replica::decode_chunk(split, key, raw.size(), &zstd));
        },
        chunk_bytes,
        [&] {
          benchmark::DoNotOptimize(kvmeld::replica::decode_chunk(plain, key, raw.size(), &zstd));
        });
  } else {
    bench::paired(
        state, chunk_bytes,
        [&] { benchmark::DoNotOptimize(kvmeld::replica::encode_chunk(raw, &zstd, form)); },
        chunk_bytes, [&] { benchmark::DoNotOptimize(kvmeld::replica::encode_chunk(raw, &zstd)); });
  }
  state.counters["shorter"] = static_cast<double>(raw.size()) / static_cast<double>(split.size());
  state.counters["shorter_alone"] =
      static_cast<double>(raw.size()) / static_cast<double>(plain.size());
}
#endif

const bool registered = [] {
  using bench::add;
  add("codec/encode_chunk", encode_chunk);
  add("codec/decode_chunk", decode_chunk);
  add("codec/frame", frame);
  add("codec/decode_manifest", decode_manifest);
  add("codec/assemble/MiB:8", assemble);
#if defined(KVMELD_BENCH_OPENSSL)
  add("codec/chunk_key/sha256", sha256);
#endif
#if defined(KVMELD_BENCH_ZSTD)
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32}) {
    add(bench::name({"codec/compress/", kvmeld::to_string(type)}), compress, type, false);
    add(bench::name({"codec/decompress/", kvmeld::to_string(type)}), compress, type, true);
  }
#endif
  return true;
}();

}  // namespace
