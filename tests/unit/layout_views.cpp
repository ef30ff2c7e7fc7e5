// check_view, footprint, overlaps and check_writable against sets of addresses enumerated one by
// one; rings; scales.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <kvmeld/check_view.hpp>
#include <kvmeld/fragment.hpp>

#include "support/catch.hpp"
#include "support/layout_cases.hpp"

namespace {

using namespace test;
using kvmeld::ErrorCode;
using kvmeld::MutablePlaneRef;
using kvmeld::PlaneRef;

// Every byte that a view names, relative to `data`, straight from the formula in PlaneRef's
// documentation.
std::vector<std::int64_t> bytes_named(const PlaneRef& v) {
  std::vector<std::int64_t> out;
  for (std::int64_t t = 0; t < v.tokens; ++t) {
    const std::int64_t slot = v.slots.slot(t);
    if (slot < 0) continue;
    const std::int64_t n = v.slots.block_size;
    const std::int64_t at = n == 0 ? slot * v.token_stride
                                   : slot / n * v.slots.block_stride + slot % n * v.token_stride;
    for (std::int64_t h = 0; h < v.shape.heads; ++h) {
      for (std::int64_t c = 0; c < v.shape.channels; ++c) {
        const std::int64_t x = v.channel_split;
        const std::int64_t e =
            at + h * v.head_stride +
            (x == 0 ? c * v.channel_stride : c / x * v.split_stride + c % x * v.channel_stride);
        for (std::int64_t b = 0; b < 2; ++b) out.push_back(2 * e + b);
      }
    }
  }
  return out;
}

struct Random {
  explicit Random(std::uint32_t seed) : engine(seed) {}
  std::mt19937 engine;
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(engine() % static_cast<std::uint32_t>(n));
  }
  std::int64_t between(std::int64_t a, std::int64_t b) { return a + below(b - a + 1); }
};

struct RandomView {
  PlaneRef plane;
  std::vector<std::int64_t> table;
};
// Small, f16, any strides at all: negative, zero, interleaved.
void make_random(RandomView& r, Random& random, const std::byte* data) {
  r.plane = {};
  r.plane.data = data;
  r.plane.shape = {.type = ElementType::f16,
                   .heads = static_cast<std::int32_t>(random.between(1, 3)),
                   .channels = static_cast<std::int32_t>(2 * random.between(1, 3))};
  r.plane.tokens = random.between(0, 6);
  r.plane.token_stride = random.between(-9, 20);
  r.plane.head_stride = random.between(-9, 20);
  r.plane.channel_stride = random.between(-2, 5);
  if (random.below(3) == 0) {
    r.plane.channel_split = 2;
    r.plane.split_stride = random.between(-9, 20);
  }
  if (random.below(2) == 0) {
    r.plane.slots.block_size = random.between(1, 3);
    r.plane.slots.block_stride = random.between(-40, 40);
  }
  const bool paged = r.plane.slots.block_size > 0 && random.below(2) == 0;
  if (paged || random.below(2) == 0) {
    r.table.clear();
    for (int i = 0; i < 6; ++i) r.table.push_back(random.between(-1, 5));
    r.plane.slots.kind = paged ? SlotKind::block_table_i64 : SlotKind::slot_list_i64;
    r.plane.slots.table = r.table.data();
  } else {
    r.plane.slots.first = random.below(3);
  }
}
kvmeld::KvCacheRef cache_of(const PlaneRef& plane) {
  kvmeld::Geometry g;
  g.layers.resize(1);
  g.layers[0].planes = {plane.shape};
  return {std::make_shared<const kvmeld::Geometry>(g), {plane}, plane.tokens};
}
MutablePlaneRef writable(const PlaneRef& p) {
  MutablePlaneRef out;
  out.data = const_cast<std::byte*>(p.data);
  out.shape = p.shape;
  out.tokens = p.tokens;
  out.token_stride = p.token_stride;
  out.head_stride = p.head_stride;
  out.channel_stride = p.channel_stride;
  out.channel_split = p.channel_split;
  out.split_stride = p.split_stride;
  out.slots = p.slots;
  return out;
}

}  // namespace

TEST_CASE("footprint and check_view are exact for any strides") {
  Random random(7);
  static const std::byte anchor[1] = {};
  for (int i = 0; i < 4000; ++i) {
    RandomView r;
    make_random(r, random, anchor);
    const auto named = bytes_named(r.plane);
    const kvmeld::Footprint f = footprint(r.plane);
    if (named.empty()) {
      REQUIRE(f.empty());
      REQUIRE(check_view(r.plane, 0).ok());
      continue;
    }
    const std::int64_t low = *std::min_element(named.begin(), named.end()),
                       high = *std::max_element(named.begin(), named.end());
    INFO(f.first_byte << " " << low << " " << f.last_byte << " " << high << " kind "
                      << static_cast<int>(r.plane.slots.kind) << " block "
                      << r.plane.slots.block_size);
    REQUIRE((f.first_byte == low && f.last_byte == high));
    const auto before = static_cast<std::size_t>(low < 0 ? -low : 0),
               size = before + static_cast<std::size_t>(high < 0 ? 0 : high + 1);
    REQUIRE(check_view(r.plane, size, before).ok());
    if (high >= 0) REQUIRE(check_view(r.plane, size - 1, before).code() == ErrorCode::truncated);
    if (low < 0) REQUIRE(check_view(r.plane, size, before - 1).code() == ErrorCode::truncated);
  }
}

TEST_CASE(
    "overlaps says whether a byte has two owners, and check_writable whether it has two names") {
  Random random(11);
  static const std::byte arena[4096] = {};
  int shared = 0, apart = 0, refused = 0;
  for (int i = 0; i < 4000; ++i) {
    RandomView a, b;
    make_random(a, random, arena + 2048);
    make_random(b, random, arena + 2048 + 2 * random.between(-60, 60));
    if (random.below(3) == 0) {  // the same pool, other slots
      const std::int64_t tokens = b.plane.tokens;
      const auto slots = b.plane.slots;
      b.plane = a.plane;
      b.plane.tokens = tokens;
      if (slots.kind == SlotKind::slot_list_i64) {
        b.plane.slots.kind = slots.kind;
        b.plane.slots.table = b.table.data();
      } else {
        b.plane.slots.kind = SlotKind::identity;
        b.plane.slots.first = random.below(5);
      }
    }
    const auto x = bytes_named(a.plane), y = bytes_named(b.plane);
    std::set<std::int64_t> mine;
    for (const std::int64_t at : x) mine.insert(at);
    const std::int64_t delta = b.plane.data - a.plane.data;
    const bool expected = std::any_of(y.begin(), y.end(),
                                      [&](std::int64_t at) { return mine.count(at + delta) > 0; });
    REQUIRE(overlaps(cache_of(a.plane), cache_of(b.plane)) == expected);
    REQUIRE(overlaps(cache_of(b.plane), cache_of(a.plane)) == expected);
    ++(expected ? shared : apart);
    const bool twice = mine.size() != x.size();
    const kvmeld::Status status = check_writable(writable(a.plane));
    if (twice) REQUIRE(status.code() == ErrorCode::aliasing);
    refused += !status.ok() && !twice;
  }
  CHECK(shared > 500);
  CHECK(apart > 500);
  // strides that interleave without colliding are refused too; no engine has them
  CHECK(refused < 1000);
}

TEST_CASE("two sequences of one pool are apart, in every layout") {
  for (const NamedLayout& layout : every_layout()) {
    INFO(layout.name);
    const Setup setup{.tokens = 7,
                      .kind = layout.by_slot ? SlotKind::slot_list_i64 : SlotKind::block_table_i32,
                      .holes = false};
    const LayoutCase c = layout.make(setup);
    Memory memory;
    for (const std::int64_t bytes : c.tensor_bytes)
      memory.emplace_back(static_cast<std::size_t>(bytes));
    const auto view = c.read(memory);
    REQUIRE(view.ok());
    CHECK(overlaps(*view, *view));
    if (!layout.by_slot) continue;
    // The views share their table, so take the planes apart: tokens 0 to 3 against 4 to 6.
    std::vector<PlaneRef> front(view->planes().begin(), view->planes().end()), back = front;
    for (PlaneRef& plane : front) plane.tokens = 4;
    for (PlaneRef& plane : back) {
      plane.tokens = 3;
      plane.slots.table = c.tokens->wide.data() + 4;
    }
    CHECK_FALSE(overlaps(kvmeld::KvCacheRef(view->shared_geometry(), front, 4),
                         kvmeld::KvCacheRef(view->shared_geometry(), back, 3)));
    for (PlaneRef& plane : back) plane.slots.table = c.tokens->wide.data() + 3;
    CHECK(overlaps(kvmeld::KvCacheRef(view->shared_geometry(), front, 4),
                   kvmeld::KvCacheRef(view->shared_geometry(), back, 3)));
    CHECK_FALSE(overlaps(kvmeld::KvCacheRef(view->shared_geometry(),
                                            std::vector<PlaneRef>(view->planes().size()), 0),
                         *view));
  }
}

TEST_CASE("check_view survives hostile numbers") {
  constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  static const std::byte anchor[64] = {};
  PlaneRef plane;
  plane.data = anchor;
  plane.shape = {.type = ElementType::f64, .heads = 1, .channels = 8};
  plane.tokens = 1;
  CHECK(check_view(plane, 64).ok());
  CHECK(check_view(plane, 63).code() == ErrorCode::truncated);
  const auto with = [&](auto change) {
    PlaneRef p = plane;
    change(p);
    return check_view(p, 64).code();
  };
  CHECK(with([](PlaneRef& p) { p.tokens = huge; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) {
          p.tokens = std::int64_t{1} << 48;
          p.token_stride = std::int64_t{1} << 48;
        }) == ErrorCode::truncated);
  CHECK(with([](PlaneRef& p) {
          p.tokens = 2;
          p.token_stride = -huge - 1;
        }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.head_stride = huge; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.slots.first = huge; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) {
          p.slots.first = std::int64_t{1} << 40;
          p.token_stride = 8;
        }) == ErrorCode::truncated);
  CHECK(with([](PlaneRef& p) { p.slots.block_size = -1; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.slots.kind = static_cast<SlotKind>(5); }) ==
        ErrorCode::unknown_layout);
  CHECK(with([](PlaneRef& p) { p.slots.kind = SlotKind::slot_list_i32; }) ==
        ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.slots = {.kind = SlotKind::block_table_i32, .table = anchor}; }) ==
        ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.shape.type = static_cast<ElementType>(8); }) ==
        ErrorCode::unknown_field);
  CHECK(with([](PlaneRef& p) { p.shape.channels = -8; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.channel_split = 3; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.data = nullptr; }) == ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) { p.shape.scales = kvmeld::ScaleScheme::per_tensor; }) ==
        ErrorCode::invalid_argument);
  CHECK(with([](PlaneRef& p) {
          p.shape = {.type = ElementType::q8_0, .heads = 1, .channels = 32};
          p.channel_stride = 2;
        }) == ErrorCode::unsupported);
  CHECK(with([](PlaneRef& p) {
          p.shape = {.type = ElementType::q8_0, .heads = 1, .channels = 32};
          p.token_stride = 16;
        }) == ErrorCode::invalid_argument);
  const std::int64_t entry = huge / 2;
  CHECK(with([&](PlaneRef& p) {
          p.slots = {.kind = SlotKind::block_table_i64,
                     .table = &entry,
                     .block_size = 16,
                     .block_stride = 16};
        }) == ErrorCode::invalid_argument);
}

TEST_CASE("rings of different fill come out in temporal order") {
  CHECK(*kvmeld::ring_slots(5, 8) == std::vector<std::int64_t>{0, 1, 2, 3, 4});
  CHECK(*kvmeld::ring_slots(20, 8) == std::vector<std::int64_t>{4, 5, 6, 7, 0, 1, 2, 3});
  CHECK(*kvmeld::ring_slots(8, 8) == std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(*kvmeld::ring_slots(10, 4, 6) == std::vector<std::int64_t>{-1, -1, 2, 3, 0, 1});
  CHECK(kvmeld::ring_slots(10, 4, 2)->size() == 2);
  CHECK(kvmeld::ring_slots(0, 8)->empty());
  CHECK(kvmeld::ring_slots(5, 0).status().code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::ring_slots(-1, 8).status().code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::ring_slots(5, 8, 6).status().code() == ErrorCode::invalid_argument);

  // Window 8, sequences of 5 and 20 tokens in one batch [2, H, 8, D]; a row holds its token's
  // number.
  const auto geometry = key_value_geometry({.type = ElementType::f32, .heads = 2, .channels = 4});
  std::vector<std::vector<float>> tensors(4, std::vector<float>(2 * 2 * 8 * 4, 99.0F));
  const std::int64_t seen[] = {5, 20};
  for (auto& tensor : tensors) {
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t t = 0; t < seen[b]; ++t) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t c = 0; c < 4; ++c)
            tensor[static_cast<std::size_t>(flat({2, 2, 8, 4}, {b, h, t % 8, c}))] =
                static_cast<float>(t);
        }
      }
    }
  }
  kvmeld::KeyValueBuffers<const std::byte> buffers;
  for (std::size_t i = 0; i < 4; ++i)
    (i % 2 == 0 ? buffers.keys : buffers.values)
        .push_back(std::as_bytes(std::span<const float>(tensors[i])));
  for (std::int64_t b = 0; b < 2; ++b) {
    const auto slots = kvmeld::ring_slots(seen[b], 8);
    const auto view = kvmeld::contiguous_view(
        geometry, buffers,
        kvmeld::ContiguousOptions{.tokens = TokenPlacement::slot_list(*slots),
                                  .max_tokens = 8,
                                  .batch = 2,
                                  .batch_index = b});
    REQUIRE(view.ok());
    const auto fragment = kvmeld::seal(*view);
    REQUIRE(fragment.ok());
    const kvmeld::FragmentView sealed(*fragment);
    const std::int64_t count = std::min<std::int64_t>(seen[b], 8);
    REQUIRE(fragment->token_count() == count);
    for (std::int64_t t = 0; t < count; ++t) {
      float value = -1.0F;
      const PlaneRef& plane = sealed.ref().plane(1, 0);
      std::memcpy(&value, plane.data + plane.byte_offset(plane.row_offset(t, 1)), sizeof value);
      CHECK(value == static_cast<float>(seen[b] - count + t));
    }
  }
}

TEST_CASE("scales follow their rows, for every scheme, and wrong tables are refused") {
  using kvmeld::ScaleScheme;
  constexpr std::int64_t H = 2, D = 64, S = 8;
  const std::vector<std::int64_t> list = {6, 1, -1, 3};
  for (const ElementType type : {ElementType::i8, ElementType::f8_e4m3, ElementType::f8_e5m2}) {
    for (const ScaleScheme scheme :
         {ScaleScheme::per_tensor, ScaleScheme::per_token_head, ScaleScheme::per_channel_group}) {
      auto g = std::make_shared<kvmeld::Geometry>(
          *key_value_geometry({.type = type, .heads = H, .channels = D}));
      for (kvmeld::LayerShape& layer : g->layers) {
        for (kvmeld::PlaneShape& plane : layer.planes) {
          plane.scales = scheme;
          plane.scale_group = scheme == ScaleScheme::per_channel_group ? 16 : 0;
        }
      }
      const std::shared_ptr<const kvmeld::Geometry> geometry = g;
      const std::int64_t groups = scheme == ScaleScheme::per_channel_group ? 4 : 1;
      const std::int64_t count = scheme == ScaleScheme::per_tensor ? 1 : S * H * groups;
      std::vector<std::vector<float>> tables(4);
      kvmeld::ScaleTables scales;
      for (std::size_t i = 0; i < 4; ++i) {
        for (std::int64_t j = 0; j < count; ++j)
          tables[i].push_back(static_cast<float>(1000 * (i + 1)) + static_cast<float>(j));
        scales.push_back(tables[i]);
      }
      const Memory memory(4, std::vector<std::byte>(static_cast<std::size_t>(S * H * D)));
      const auto buffers = split<const std::byte>(memory);
      kvmeld::SglangOptions options{
          .tokens = TokenPlacement::slot_list(list), .slots = S, .scales = scales};
      const auto view = kvmeld::sglang_view(geometry, buffers, options);
      INFO(view.status().message());
      REQUIRE(view.ok());
      const auto fragment = kvmeld::seal(*view);
      REQUIRE(fragment.ok());
      const kvmeld::FragmentView sealed(*fragment);
      for (std::size_t l = 0; l < 2; ++l) {
        for (std::size_t p = 0; p < 2; ++p) {
          for (std::int64_t t = 0; t < 4; ++t) {
            if (list[static_cast<std::size_t>(t)] < 0) continue;
            for (std::int64_t h = 0; h < H; ++h) {
              for (std::int64_t k = 0; k < groups; ++k) {
                const std::int64_t at =
                    count == 1 ? 0
                               : flat({S, H, groups}, {list[static_cast<std::size_t>(t)], h, k});
                const float expected = tables[2 * l + p][static_cast<std::size_t>(at)];
                CHECK(view->plane(l, p).scales.at(view->plane(l, p).slots.slot(t), h, k) ==
                      expected);
                CHECK(sealed.ref().plane(l, p).scales.at(sealed.ref().plane(l, p).slots.slot(t), h,
                                                         k) == expected);
              }
            }
          }
        }
      }
      options.scales[3] = std::span<const float>(tables[3]).first(tables[3].size() - 1);
      CHECK(kvmeld::sglang_view(geometry, buffers, options).status().code() ==
            ErrorCode::truncated);
      options.scales.pop_back();
      CHECK(kvmeld::sglang_view(geometry, buffers, options).status().code() ==
            ErrorCode::invalid_argument);
      options.scales.clear();
      CHECK(kvmeld::sglang_view(geometry, buffers, options).status().code() ==
            ErrorCode::truncated);
    }
  }
}

TEST_CASE("vLLM's 656-byte latent row: 512 e4m3, four scales, 64 bf16") {
  kvmeld::Geometry g;
  g.layers.resize(1);
  g.layers[0].planes = {{.plane = Plane::latent,
                         .type = ElementType::f8_e4m3,
                         .heads = 1,
                         .channels = 512,
                         .scales = kvmeld::ScaleScheme::per_channel_group,
                         .scale_group = 128},
                        {.plane = Plane::rope_part,
                         .type = ElementType::bf16,
                         .heads = 1,
                         .channels = 64,
                         .rotary = true}};
  g.layers[0].rope = kvmeld::RopeSpec::rotary(64, 10000.0, kvmeld::RopePairing::interleaved);
  const auto geometry = std::make_shared<const kvmeld::Geometry>(g);
  constexpr std::size_t B = 3, N = 64, row = 656;
  alignas(16) static std::byte memory[B * N * row] = {};
  for (std::size_t slot = 0; slot < B * N; ++slot) {
    std::byte* at = memory + slot * row;
    at[0] = static_cast<std::byte>(slot % 100);
    at[511] = static_cast<std::byte>(slot % 90);
    for (std::size_t k = 0; k < 4; ++k) {
      const float scale = static_cast<float>(slot) + 0.25F * static_cast<float>(k + 1);
      std::memcpy(at + 512 + 4 * k, &scale, 4);
    }
    const std::uint16_t rope = static_cast<std::uint16_t>(0x3f80 + slot);
    std::memcpy(at + 528 + 2 * 63, &rope, 2);
  }
  const std::vector<std::int32_t> table = {2, 0};
  const kvmeld::LatentOptions options{.tokens = TokenPlacement::block_table(table, 100),
                                      .row = kvmeld::LatentRow::latent_scales_rope,
                                      .blocks = 3,
                                      .block_size = 64};
  const auto view =
      kvmeld::latent_view(geometry, kvmeld::Buffers<const std::byte>{memory}, options);
  INFO(view.status().message());
  REQUIRE(view.ok());
  const auto fragment = kvmeld::seal(*view);
  REQUIRE(fragment.ok());
  const kvmeld::FragmentView sealed(*fragment);
  const PlaneRef& latent_plane = sealed.ref().plane(0, 0);
  const PlaneRef& rope_plane = sealed.ref().plane(0, 1);
  for (std::int64_t t = 0; t < 100; ++t) {
    const auto slot = static_cast<std::size_t>(t < 64 ? 128 + t : t - 64);
    CHECK(latent_plane.data[t * 512] == static_cast<std::byte>(slot % 100));
    CHECK(latent_plane.data[t * 512 + 511] == static_cast<std::byte>(slot % 90));
    for (std::int64_t k = 0; k < 4; ++k)
      CHECK(latent_plane.scales.at(t, 0, k) ==
            static_cast<float>(slot) + 0.25F * static_cast<float>(k + 1));
    std::uint16_t rope = 0;
    std::memcpy(&rope, rope_plane.data + (t * 64 + 63) * 2, 2);
    CHECK(rope == 0x3f80 + slot);
  }
  const auto odd = kvmeld::latent_view(
      geometry,
      kvmeld::Buffers<const std::byte>{std::span<const std::byte>(memory + 1, 2 * N * row)},
      kvmeld::LatentOptions{
          .row = kvmeld::LatentRow::latent_scales_rope, .blocks = 2, .block_size = 64});
  CHECK(odd.status().code() == ErrorCode::invalid_argument);
}
