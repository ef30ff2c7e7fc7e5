// Hostile frames, manifests and chunks. With -DKVMELD_LIBFUZZER and clang's -fsanitize=fuzzer this
// is a fuzzer; otherwise a test that mutates a fixed corpus for a fixed number of rounds, the same
// ones every time.

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/wire.hpp>

#ifdef KVMELD_TEST_ZSTD
#include <kvmeld/replica/zstd.hpp>
#endif

#include "support/random_cache.hpp"

namespace {

using namespace kvmeld;
using Bytes = std::vector<std::byte>;

#ifdef KVMELD_TEST_ZSTD
const replica::Zstd zstd;
const replica::Compressor* codec = &zstd;
#else
const replica::Compressor* codec = nullptr;
#endif

constexpr std::size_t cut = 200;

void need(bool holds) {
  if (!holds) std::abort();
}

/// The fragments of the corpus; the first byte of an input picks how the rest is read.
const std::vector<Fragment>& fragments() {
  static const std::vector<Fragment> all = [] {
    std::vector<Fragment> out;
    for (const ElementType type : {ElementType::f16, ElementType::f32, ElementType::q8_0}) {
      auto g = test::geometry({.type = type, .layers = 2, .heads = 1, .channels = 32});
      g->layers[1].rope.scaling = RopeScaling::explicit_factors;
      g->layers[1].rope.factors.assign(16, 2.0F);
      const auto tokens = test::token_ids(6);
      out.push_back(test::sealed(g, 6, 1, {.tokens = tokens, .drop_first = 1},
                                 test::Layout::slot_list, {0, 3})
                        .fragment);
    }
    return out;
  }();
  return all;
}

/// What is accepted is the fragment that its id names, or is found out when its bytes are there.
void try_manifest(std::span<const std::byte> bytes) {
  const auto manifest = kvmeld::replica::decode_manifest(bytes, {.max_payload_bytes = 1 << 20});
  if (!manifest) return need(!manifest.error().message().empty());
  need(replica::encode_manifest(*manifest).size() <= bytes.size());
  replica::Assembler assembler(*manifest);
  for (const Fragment& known : fragments()) {
    if (known.id() != manifest->fragment.id()) continue;
    const Payload& payload = known.payloads()[0];
    for (std::size_t c = 0; c < replica::chunk_count(payload.byte_count, cut); ++c) {
      const auto raw = replica::raw_chunk(payload, c, cut);
      (void)assembler.add(kvmeld::replica::chunk_key(raw), replica::encode_chunk(raw));
    }
  }
  const auto whole = assembler.finish();
  if (whole) need(verify_fragment(*whole).ok());
}

void try_chunk(std::span<const std::byte> bytes) {
  static const BlobKey key =
      kvmeld::replica::chunk_key(replica::raw_chunk(fragments()[0].payloads()[0], 0, cut));
  const auto got = replica::decode_chunk(bytes, key, 4096, codec);
  if (got) need(replica::chunk_key(*got) == key);
  // Past the key, which a fuzzer never guesses: what the decompressor itself does with it.
  const auto open = replica::detail::open_chunk(bytes, 4096);
  if (!open || codec == nullptr || open->codec != codec->codec()) return;
  Bytes raw(open->raw_bytes);
  (void)codec->decompress(open->data, raw);
}

/// Messages as they should be, the kind of `LLVMFuzzerTestOneInput` before each.
const std::vector<Bytes>& corpus() {
  static const std::vector<Bytes> all = [] {
    std::vector<Bytes> out;
    const auto add = [&out](int kind, std::span<const std::byte> bytes) {
      out.emplace_back(1, static_cast<std::byte>(kind));
      out.back().insert(out.back().end(), bytes.begin(), bytes.end());
    };
    for (const Fragment& fragment : fragments()) {
      const Bytes manifest = *replica::encode_manifest(fragment, cut);
      add(0, *kvmeld::replica::encode_frame(1, manifest));
      add(1, manifest);
      add(2, manifest);
      add(2, manifest);
      const auto raw = replica::raw_chunk(fragment.payloads()[0], 0, cut);
      add(3, replica::encode_chunk(raw));
      add(3, replica::encode_chunk(Bytes(3000, std::byte{5}), codec, {ElementType::f16, 64}));
      add(3, replica::encode_chunk(Bytes(3000, std::byte{5}), codec, {ElementType::f32, 64}));
    }
    return out;
  }();
  return all;
}

void mend(Bytes& bytes) {
  if (bytes.size() < 8) return;
  const std::uint64_t sum = replica::detail::accident_sum(std::span(bytes).first(bytes.size() - 8));
  std::memcpy(bytes.data() + bytes.size() - 8, &sum, 8);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  Bytes exact(first + 1, first + size);
  unsigned kind = data[0] % 5;
  // edits of a good message: place (2 bytes) and new byte; a fuzzer that starts from nothing would
  // never find one
  if (kind == 4) {
    if (size < 2) return 0;
    exact = corpus()[data[1] % corpus().size()];
    for (std::size_t i = 2; i + 2 < size; i += 3)
      exact[(data[i] | static_cast<std::size_t>(data[i + 1]) << 8U) % exact.size()] = first[i + 2];
    kind = std::to_integer<unsigned>(exact[0]) % 4;
    exact.erase(exact.begin());
  }
  switch (kind) {
    case 0: {
      const auto view = replica::decode_frame(exact);
      if (view) try_manifest(view->body);
      break;
    }
    case 1:
      try_manifest(exact);
      break;
    case 2:  // a Byzantine peer computes checksums, too
      mend(exact);
      try_manifest(exact);
      break;
    default:
      try_chunk(exact);
  }
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("mutated messages never read past their end, nor become other fragments") {
  test::Random random(1);
  for (int round = 0; round < 40000; ++round) {
    Bytes bytes = corpus()[random.below(corpus().size())];
    for (std::size_t edits = 1 + random.below(3); edits > 0; --edits) {
      const std::size_t at = 1 + random.below(bytes.size());
      switch (random.below(4)) {
        case 0:
          if (at < bytes.size()) bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
          break;
        case 1:
          if (random.below(8) == 0) bytes.resize(at);
          break;
        case 2:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), random.below(9),
                       static_cast<std::byte>(random.next()));
          break;
        default:
          if (at < bytes.size())
            bytes[at] = static_cast<std::byte>(random.below(2) == 0 ? 0xFF : random.next());
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  SUCCEED("40000 rounds");
}
#endif
