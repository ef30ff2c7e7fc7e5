// Hostile sequence-state bytes. With -DKVMELD_LIBFUZZER and clang's -fsanitize=fuzzer this is a
// fuzzer; otherwise a test that mutates a fixed corpus for a fixed number of rounds, the same ones
// every time.

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/engine/detail/llama_state.hpp>

#include "support/llama_blob.hpp"

namespace {

using namespace kvmeld;

/// What is accepted must be safe to read to the last byte, with positions that ascend.
void try_one(std::span<const std::byte> bytes, const std::shared_ptr<const Geometry>& geometry) {
  const auto view = llama::view_state(bytes, geometry);
  if (!view) {
    if (view.error().message().empty()) std::abort();
    return;
  }
  for (std::size_t i = 1; i < view->positions.size(); ++i)
    if (view->positions[i - 1] >= view->positions[i]) std::abort();
  unsigned sum = 0;
  std::vector<std::byte> row;
  for (const PlaneRef& plane : view->cache.planes()) {
    row.resize(static_cast<std::size_t>(byte_size(plane.shape.type, plane.shape.channels)));
    for (std::int64_t t = 0; t < plane.tokens; ++t) {
      const std::int64_t slot = plane.slots.slot(t);
      for (std::int64_t head = 0; slot >= 0 && head < plane.shape.heads; ++head) {
        extend::gather_row(plane, slot, head, row.data());
        for (const std::byte b : row) sum += std::to_integer<unsigned>(b);
      }
    }
  }
  if (sum == 0xffffffffU) std::abort();  // a use, so that no read is optimised away
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::shared_ptr<const Geometry> geometries[] = {
      test::blob_geometry(ElementType::f16, ElementType::f16),
      test::blob_geometry(ElementType::q8_0, ElementType::f32),
      test::blob_geometry(ElementType::f16, ElementType::bf16, 2),
  };
  const std::vector<std::byte> exact(reinterpret_cast<const std::byte*>(data),
                                     reinterpret_cast<const std::byte*>(data) + size);
  for (const auto& geometry : geometries) try_one(exact, geometry);
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("mutated states never read past their end") {
  std::vector<std::vector<std::byte>> corpus;
  const auto add = [&](const std::shared_ptr<const Geometry>& geometry, std::int32_t ext,
                       bool basis, bool transposed, bool two) {
    test::BlobSpec spec;
    spec.form.prefix = ext != 8;
    spec.form.cell_ext_bytes = ext;
    spec.form.basis_words = basis;
    spec.form.transposed_values = transposed;
    spec.cells = {{3, 1, 2}};
    if (two) spec.cells.push_back({2, 3});
    corpus.push_back(test::write_blob(*geometry, spec));
  };
  for (const std::int32_t ext : {0, 8, 12})
    for (const bool flag : {false, true}) {
      add(test::blob_geometry(ElementType::f16, ElementType::f16), ext, flag, flag, false);
      add(test::blob_geometry(ElementType::q8_0, ElementType::f32), ext, !flag, flag, false);
      add(test::blob_geometry(ElementType::f16, ElementType::bf16, 2), ext, flag, !flag, true);
    }
  std::uint64_t state = 88172645463325252ULL;
  const auto next = [&state](std::size_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::size_t>(state % below);
  };
  static constexpr std::uint32_t words[] = {0,          1,          2,          3,
                                            0x7fffffff, 0x80000000, 0xffffffff, 0xaf143cd8};
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes = corpus[next(corpus.size())];
    for (std::size_t edits = 1 + next(3); edits > 0 && !bytes.empty(); --edits) {
      // Headers are what decides; rows are only data.
      const std::size_t at =
          next(next(4) == 0 ? bytes.size() : std::min<std::size_t>(bytes.size(), 120));
      switch (next(4)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1U << next(8));
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), next(64), std::byte{0});
          break;
        default:
          for (std::size_t b = 0; b < 4 && (at & ~std::size_t{3}) + b < bytes.size(); ++b)
            bytes[(at & ~std::size_t{3}) + b] = static_cast<std::byte>(words[next(8)] >> (8 * b));
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  SUCCEED("20000 rounds");
}
#endif
