// A fragment is what the tokens hold, not where an engine keeps them.
#include <cstring>
#include <vector>

#include <kvmeld/fragment.hpp>

#include "support/catch.hpp"
#include "support/law.hpp"
#include "support/layout_cases.hpp"

namespace {

using namespace test;

// Bytes of one element (or q8_0 block) as a function of where it belongs; finite in every type.
std::vector<std::byte> content(std::size_t l, std::size_t p, std::size_t t, std::int64_t h,
                               std::int64_t c, ElementType type) {
  std::vector<std::byte> out(static_cast<std::size_t>(bytes_of(type, step_of(type))));
  std::uint64_t x = l * 1000003 + p * 10007 + t * 1009 + static_cast<std::uint64_t>(h * 101 + c);
  for (std::byte& b : out) {
    x = x * 6364136223846793005ULL + 1442695040888963407ULL;
    b = static_cast<std::byte>((x >> 56) & 0x33U);
  }
  return out;
}

kvmeld::FragmentId id_of(const kvmeld::KvCacheRef& view) {
  const auto fragment = kvmeld::seal(view);
  RC_ASSERT(fragment.ok());
  return fragment->id();
}

kvmeld::FragmentId id_in_layout(const LayoutCase& c) {
  Memory memory;
  for (const std::int64_t bytes : c.tensor_bytes)
    memory.emplace_back(static_cast<std::size_t>(bytes), std::byte{0xff});
  for (std::size_t l = 0; l < c.geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < c.geometry->layers[l].planes.size(); ++p) {
      const kvmeld::PlaneShape& shape = c.geometry->layers[l].planes[p];
      for (std::size_t t = 0; t < c.tokens->slots.size(); ++t) {
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          for (std::int64_t ch = 0; ch < shape.channels; ch += step_of(shape.type)) {
            const Address a = c.address(l, p, c.tokens->slots[t], h, ch);
            const auto bytes = content(l, p, t, h, ch, shape.type);
            std::memcpy(memory[a.tensor].data() + a.byte, bytes.data(), bytes.size());
          }
        }
      }
    }
  }
  const auto view = c.read(memory);
  RC_ASSERT(view.ok());
  return id_of(*view);
}

kvmeld::FragmentId id_in_canonical_order(const std::shared_ptr<const kvmeld::Geometry>& geometry,
                                         std::int64_t tokens) {
  kvmeld::HostCache cache(geometry, tokens);
  for (std::size_t l = 0; l < geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < geometry->layers[l].planes.size(); ++p) {
      const kvmeld::PlaneShape& shape = geometry->layers[l].planes[p];
      std::byte* at = cache.mutable_ref().plane(l, p).data;
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          for (std::int64_t ch = 0; ch < shape.channels; ch += step_of(shape.type)) {
            const auto bytes = content(l, p, static_cast<std::size_t>(t), h, ch, shape.type);
            at =
                static_cast<std::byte*>(std::memcpy(at, bytes.data(), bytes.size())) + bytes.size();
          }
        }
      }
    }
  }
  return id_of(cache.kv_cache_ref());
}

}  // namespace

TEST_CASE("a fragment's id does not depend on layout, block table or slot list") {
  law("view in any layout, over any permutation of its slots -> one id", [] {
    // Small draws come first in RapidCheck, so every layout takes its turn in every round.
    const auto types =
        std::vector<ElementType>{ElementType::f32,     ElementType::f16, ElementType::bf16,
                                 ElementType::f8_e4m3, ElementType::i8,  ElementType::q8_0};
    const std::uint32_t seed =
        *rc::gen::resize(rc::kNominalSize, rc::gen::arbitrary<std::uint32_t>());
    const std::int64_t tokens = *rc::gen::inRange<std::int64_t>(0, 20),
                       heads = *rc::gen::inRange<std::int64_t>(1, 4);
    std::uint32_t rotation = seed;
    for (const NamedLayout& layout : every_layout()) {
      std::vector<SlotKind> kinds;
      if (layout.by_block)
        kinds.insert(kinds.end(), {SlotKind::block_table_i32, SlotKind::block_table_i64});
      if (layout.by_slot) {
        kinds.insert(kinds.end(),
                     {SlotKind::identity, SlotKind::slot_list_i32, SlotKind::slot_list_i64});
      }
      rotation = rotation * 1664525U + 1013904223U;
      Setup s{.type = types[(rotation >> 8) % types.size()],
              .heads = heads,
              .channels = 32 * (1 + static_cast<std::int64_t>((rotation >> 16) % 3)),
              .tokens = tokens,
              .kind = kinds[(rotation >> 24) % kinds.size()],
              .holes = false,
              .seed = rotation};
      if (!layout.block_types && s.type == ElementType::q8_0) s.type = ElementType::f16;
      RC_LOG() << layout.name << ", " << kvmeld::to_string(s.type) << ", slot kind "
               << static_cast<int>(s.kind) << "\n";
      const LayoutCase c = layout.make(s);
      RC_ASSERT(id_in_layout(c) == id_in_canonical_order(c.geometry, s.tokens));
    }
  });
}
