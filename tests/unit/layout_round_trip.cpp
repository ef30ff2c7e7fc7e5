// Every layout × element type: engine memory -> view -> fragment -> view of other memory, byte for
// byte (-0 becomes +0), and not a byte beside. Expected addresses are the layouts' own definitions
// (support/layout_cases.hpp).
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <kvmeld/fragment.hpp>

#include "support/catch.hpp"
#include "support/layout_cases.hpp"

namespace {

using namespace test;

std::vector<std::byte> noise(std::mt19937& random, std::int64_t count) {
  std::vector<std::byte> out(static_cast<std::size_t>(count));
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

// Random bytes of a finite element (or q8_0 block); one in eight is -0.
std::vector<std::byte> finite(std::mt19937& random, ElementType type) {
  auto bytes = noise(random, bytes_of(type, step_of(type)));
  const bool negative_zero = random() % 8 == 0;
  const auto clear = [&](std::size_t at, unsigned mask) {
    bytes[at] &= static_cast<std::byte>(~mask);
  };
  std::size_t last = bytes.size() - 1;
  if (type == ElementType::i8) return bytes;
  if (type == ElementType::q8_0) last = 1;
  if (negative_zero) {
    for (std::size_t i = 0; i <= last; ++i) bytes[i] = std::byte{0};
    bytes[last] = std::byte{0x80};
  } else if (type == ElementType::f8_e4m3) {
    clear(0, 0x08);
  } else {
    clear(last, 0x04);  // an exponent bit of every other type, so that the exponent is not all ones
  }
  return bytes;
}

std::vector<std::byte> without_negative_zero(std::vector<std::byte> bytes, ElementType type) {
  if (type == ElementType::i8) return bytes;
  const std::size_t count = type == ElementType::q8_0 ? 2 : bytes.size();
  bool zero = bytes[count - 1] == std::byte{0x80};
  for (std::size_t i = 0; i + 1 < count; ++i) zero = zero && bytes[i] == std::byte{0};
  if (zero) bytes[count - 1] = std::byte{0};
  return bytes;
}

template <class Byte>
Byte* element(const kvmeld::BasicPlaneRef<Byte>& plane, std::int64_t slot, std::int64_t head,
              std::int64_t channel) {
  return plane.data +
         plane.byte_offset(plane.row_offset(slot, head) + plane.channel_offset(channel));
}

template <class Visit>
void each_element(const LayoutCase& c, Visit visit) {
  for (std::size_t l = 0; l < c.geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < c.geometry->layers[l].planes.size(); ++p) {
      const kvmeld::PlaneShape& shape = c.geometry->layers[l].planes[p];
      for (std::size_t t = 0; t < c.tokens->slots.size(); ++t) {
        if (c.tokens->slots[t] < 0) continue;
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          for (std::int64_t ch = 0; ch < shape.channels; ch += step_of(shape.type))
            visit(l, p, t, h, ch, shape);
        }
      }
    }
  }
}

void round_trip(const LayoutCase& c, std::uint32_t seed) {
  std::mt19937 random(seed);
  Memory source, target;
  for (const std::int64_t bytes : c.tensor_bytes) {
    source.push_back(noise(random, bytes));
    target.push_back(noise(random, bytes));
  }
  Memory expected = target;
  std::size_t wrong = 0, count = 0;
  each_element(c, [&](std::size_t l, std::size_t p, std::size_t t, std::int64_t h, std::int64_t ch,
                      const kvmeld::PlaneShape& shape) {
    const Address a = c.address(l, p, c.tokens->slots[t], h, ch);
    const auto bytes = finite(random, shape.type);
    REQUIRE(a.byte >= 0);
    REQUIRE(static_cast<std::size_t>(a.byte) + bytes.size() <= source[a.tensor].size());
    std::memcpy(source[a.tensor].data() + a.byte, bytes.data(), bytes.size());
    const auto clean = without_negative_zero(bytes, shape.type);
    std::memcpy(expected[a.tensor].data() + a.byte, clean.data(), clean.size());
    ++count;
  });

  const auto view = c.read(source);
  INFO(view.status().message());
  REQUIRE(view.ok());
  REQUIRE(view->tokens() == static_cast<std::int64_t>(c.tokens->slots.size()));
  for (std::size_t t = 0; t < c.tokens->slots.size(); ++t) {
    REQUIRE((view->plane(1, 1).slots.slot(static_cast<std::int64_t>(t)) < 0) ==
            (c.tokens->slots[t] < 0));
  }
  each_element(c, [&](std::size_t l, std::size_t p, std::size_t t, std::int64_t h, std::int64_t ch,
                      const kvmeld::PlaneShape&) {
    const kvmeld::PlaneRef& plane = view->plane(l, p);
    const Address a = c.address(l, p, c.tokens->slots[t], h, ch);
    wrong += element(plane, plane.slots.slot(static_cast<std::int64_t>(t)), h, ch) !=
             source[a.tensor].data() + a.byte;
  });
  REQUIRE(wrong == 0);

  const auto fragment = kvmeld::seal(*view);
  INFO(fragment.status().message());
  REQUIRE(fragment.ok());
  REQUIRE(fragment->token_count() == view->tokens());
  const kvmeld::FragmentView sealed(*fragment);
  const auto out = c.write(target);
  INFO(out.status().message());
  REQUIRE(out.ok());
  for (std::size_t l = 0; l < c.geometry->layers.size(); ++l) {
    for (std::size_t p = 0; p < c.geometry->layers[l].planes.size(); ++p) {
      const kvmeld::PlaneRef& from = sealed.ref().plane(l, p);
      const kvmeld::MutablePlaneRef& to = out->plane(l, p);
      for (std::int64_t t = 0; t < view->tokens(); ++t) {
        REQUIRE((from.slots.slot(t) < 0) == (to.slots.slot(t) < 0));
        if (from.slots.slot(t) < 0) continue;
        for (std::int64_t h = 0; h < from.shape.heads; ++h) {
          kvmeld::extend::scatter_row(to, to.slots.slot(t), h,
                                      element(from, from.slots.slot(t), h, 0));
        }
      }
    }
  }
  for (std::size_t i = 0; i < target.size(); ++i) REQUIRE(target[i] == expected[i]);
}

const ElementType every_type[] = {ElementType::f64,  ElementType::f32,     ElementType::f16,
                                  ElementType::bf16, ElementType::f8_e4m3, ElementType::f8_e5m2,
                                  ElementType::i8,   ElementType::q8_0};
const SlotKind every_kind[] = {SlotKind::identity, SlotKind::block_table_i32,
                               SlotKind::block_table_i64, SlotKind::slot_list_i32,
                               SlotKind::slot_list_i64};

bool takes(const NamedLayout& layout, SlotKind kind) {
  return kind == SlotKind::block_table_i32 || kind == SlotKind::block_table_i64 ? layout.by_block
                                                                                : layout.by_slot;
}

}  // namespace

TEST_CASE("every layout holds every element type") {
  for (const NamedLayout& layout : every_layout()) {
    for (const ElementType type : every_type) {
      INFO(layout.name << ", " << kvmeld::to_string(type));
      const Setup setup{
          .type = type,
          .kind = layout.by_slot ? SlotKind::slot_list_i64 : SlotKind::block_table_i32};
      if (type == ElementType::q8_0 && !layout.block_types) {
        // Blocks would be cut. (x = 16 / size needs an element size, so split channels are refused
        // in layout_refusals.cpp.)
        if (std::string(layout.name) == "split channel") continue;
        const LayoutCase c = layout.make(setup);
        Memory memory;
        for (const std::int64_t bytes : c.tensor_bytes)
          memory.emplace_back(static_cast<std::size_t>(bytes));
        CHECK(c.read(memory).status().code() == kvmeld::ErrorCode::unsupported);
        continue;
      }
      round_trip(layout.make(setup), 17);
    }
  }
}

TEST_CASE("every layout is reached by identity, block table and slot list, with holes") {
  for (const NamedLayout& layout : every_layout()) {
    for (const SlotKind kind : every_kind) {
      if (!takes(layout, kind)) continue;
      for (const std::int64_t tokens : {0, 1, 4, 5, 19}) {
        INFO(layout.name << ", slot kind " << static_cast<int>(kind) << ", " << tokens
                         << " tokens");
        round_trip(layout.make(Setup{
                       .heads = 1, .channels = 32, .tokens = tokens, .kind = kind, .seed = 5}),
                   23);
      }
    }
  }
}

TEST_CASE("every layout takes odd head counts and the head sizes of models") {
  for (const NamedLayout& layout : every_layout()) {
    for (const std::int64_t channels : {64, 80, 96, 128, 256}) {
      INFO(layout.name << ", head size " << channels);
      const Setup setup{
          .type = ElementType::bf16,
          .heads = 5,
          .channels = channels,
          .tokens = 3,
          .kind = layout.by_block ? SlotKind::block_table_i32 : SlotKind::slot_list_i32,
          .holes = false};
      round_trip(layout.make(setup), 31);
    }
  }
}
