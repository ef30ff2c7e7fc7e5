// What a declaration can get wrong: each factory says which code, and names the numbers.
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/layout_cases.hpp"

namespace {

using namespace test;
using kvmeld::ErrorCode;
using Code = kvmeld::ErrorCode;

Memory memory_of(const LayoutCase& c, std::int64_t change = 0) {
  Memory m;
  for (const std::int64_t bytes : c.tensor_bytes)
    m.emplace_back(static_cast<std::size_t>(bytes + change));
  return m;
}
template <class T>
void refused(const kvmeld::Result<T>& result, ErrorCode code, const std::string& number = "") {
  INFO(kvmeld::to_string(result.status().code()) << ": " << result.status().message());
  CHECK(result.status().code() == code);
  CHECK(result.status().message().find(number) != std::string::npos);
}
Setup setup_of(const NamedLayout& layout) {
  return {.tokens = 7,
          .kind = layout.by_slot ? SlotKind::slot_list_i64 : SlotKind::block_table_i32,
          .holes = false};
}

// A factory called with options that differ from a good call in one thing.
const std::int64_t H = 2, D = 32, N = 4, B = 5;
const Setup small_setup{.heads = H, .channels = D};
const std::shared_ptr<const kvmeld::Geometry> geometry = key_value_geometry(small_setup);
const std::vector<std::int32_t> table = {3, 0, 4};

struct Pair {
  explicit Pair(std::int64_t elements)
      : memory(4, std::vector<std::byte>(static_cast<std::size_t>(elements * 2))) {}
  Memory memory;
  kvmeld::KeyValueBuffers<const std::byte> read() const { return split<const std::byte>(memory); }
  kvmeld::KeyValueBuffers<std::byte> write() { return split<std::byte>(memory); }
};
struct One {
  explicit One(std::int64_t elements, std::size_t tensors = 2)
      : memory(tensors, std::vector<std::byte>(static_cast<std::size_t>(elements * 2))) {}
  Memory memory;
  kvmeld::Buffers<const std::byte> read() const { return all_of<const std::byte>(memory); }
  kvmeld::Buffers<std::byte> write() { return all_of<std::byte>(memory); }
};

}  // namespace

TEST_CASE("a buffer that is not exactly the declared tensor is refused, and says both sizes") {
  for (const NamedLayout& layout : every_layout()) {
    INFO(layout.name);
    const LayoutCase c = layout.make(setup_of(layout));
    Memory less = memory_of(c, -2), more = memory_of(c, 2);
    refused(c.read(less), Code::truncated, std::to_string(c.tensor_bytes[0]));
    refused(c.write(less), Code::output_too_small, std::to_string(c.tensor_bytes[0] - 2));
    refused(c.read(more), Code::oversized, std::to_string(c.tensor_bytes[0] + 2));
    Memory fewer = memory_of(c);
    fewer.pop_back();
    if (!fewer.empty()) refused(c.read(fewer), Code::invalid_argument);
  }
}

TEST_CASE("tables: too short, out of bounds, shared slots, unknown kinds") {
  for (const NamedLayout& layout : every_layout()) {
    INFO(layout.name);
    const LayoutCase c = layout.make(setup_of(layout));
    Memory memory = memory_of(c);
    REQUIRE(c.read(memory).ok());
    auto& wide = c.tokens->wide;
    if (!layout.by_slot) continue;  // TensorRT-LLM has its own case
    const std::int64_t kept = wide[3];
    wide[3] = case_capacity;
    refused(c.read(memory), Code::invalid_argument, std::to_string(case_capacity));
    wide[3] = std::numeric_limits<std::int64_t>::max();
    refused(c.read(memory), Code::invalid_argument, "entry 3");
    wide[3] = wide[5];
    CHECK(c.read(memory).ok());  // two readers of one slot disturb nobody
    refused(c.write(memory), Code::aliasing, "3 and 5");
    wide[3] = kept;
    CHECK(c.write(memory).ok());
  }
  const One pool(2 * B * N * H * D);
  const auto with = [&](TokenPlacement tokens) {
    return kvmeld::paged_view(geometry, pool.read(),
                              kvmeld::PagedOptions{.tokens = tokens, .blocks = B, .block_size = N});
  };
  CHECK(with(TokenPlacement::block_table(table, 12)).ok());
  refused(with(TokenPlacement::block_table(table, 13)), Code::token_count_mismatch,
          "3 entries; 13 tokens need 4");
  refused(with({.tokens = 1, .kind = static_cast<SlotKind>(9)}), Code::unknown_layout, "9");
  refused(with({.tokens = 1, .kind = SlotKind::slot_list_i32, .entries = 1}),
          Code::invalid_argument, "table");
  refused(with(TokenPlacement::in_order(-1)), Code::invalid_argument, "-1");
  refused(with(TokenPlacement::in_order(21)), Code::truncated, "20");
  refused(with(TokenPlacement::in_order(1, -3)), Code::invalid_argument, "-3");
  const std::vector<std::int64_t> beyond = {3, B};
  refused(with(TokenPlacement::block_table(beyond, 8)), Code::invalid_argument,
          "block 5; there are 5");
}

TEST_CASE("what every factory refuses") {
  const Pair slots(H * 8 * D), blocks_memory(B * H * D * N);
  const One pool(2 * B * N * H * D);
  const kvmeld::KeyValueBuffers<const std::byte> kv = slots.read();
  refused(kvmeld::contiguous_view(std::shared_ptr<const kvmeld::Geometry>(), kv,
                                  kvmeld::ContiguousOptions{.max_tokens = 8}),
          Code::invalid_argument);
  auto odd = std::make_shared<kvmeld::Geometry>(*geometry);
  odd->layers[1].planes.pop_back();
  refused(kvmeld::contiguous_view(std::shared_ptr<const kvmeld::Geometry>(odd), kv,
                                  kvmeld::ContiguousOptions{.max_tokens = 8}),
          Code::unsupported, "layer 1");
  const auto bad_type = std::make_shared<kvmeld::Geometry>(*geometry);
  bad_type->layers[0].planes[0].type = static_cast<ElementType>(99);
  refused(kvmeld::contiguous_view(std::shared_ptr<const kvmeld::Geometry>(bad_type), kv,
                                  kvmeld::ContiguousOptions{.max_tokens = 8}),
          Code::unknown_field);
  const auto undeclared = std::make_shared<kvmeld::Geometry>(*geometry);
  undeclared->layers[1].rope = {};
  refused(kvmeld::contiguous_view(std::shared_ptr<const kvmeld::Geometry>(undeclared), kv,
                                  kvmeld::ContiguousOptions{.max_tokens = 8}),
          Code::invalid_argument, "layer 1: rope: nobody said");
  refused(kvmeld::contiguous_view(geometry, kv,
                                  kvmeld::ContiguousOptions{
                                      .max_tokens = 8, .order = static_cast<kvmeld::AxisOrder>(7)}),
          Code::unknown_layout, "7");
  refused(
      kvmeld::contiguous_view(
          geometry, kv, kvmeld::ContiguousOptions{.max_tokens = 4, .batch = 2, .batch_index = 2}),
      Code::invalid_argument, "2 of 2");
  refused(kvmeld::contiguous_view(geometry, kv, kvmeld::ContiguousOptions{.max_tokens = -8}),
          Code::invalid_argument);
  refused(kvmeld::contiguous_view(geometry, kv,
                                  kvmeld::ContiguousOptions{.max_tokens = std::int64_t{1} << 62}),
          Code::invalid_argument);
  refused(kvmeld::contiguous_view(
              geometry, kv,
              kvmeld::ContiguousOptions{.max_tokens = std::vector<std::int64_t>{8, 8, 8}}),
          Code::invalid_argument, "3");
  refused(kvmeld::contiguous_view(
              geometry, kv,
              kvmeld::ContiguousOptions{
                  .tokens = std::vector<TokenPlacement>{TokenPlacement::in_order(3),
                                                        TokenPlacement::in_order(2)},
                  .max_tokens = 8}),
          Code::token_count_mismatch, "layer 1 places 2");
  refused(kvmeld::contiguous_view(
              geometry, kv,
              kvmeld::ContiguousOptions{.tokens = TokenPlacement::block_table(table, 4),
                                        .max_tokens = 8}),
          Code::invalid_argument, "slot list");
  refused(
      kvmeld::llama_view(geometry, kv, kvmeld::LlamaOptions{.cells = 8, .streams = 1, .stream = 1}),
      Code::invalid_argument, "1 of 1");
  refused(
      kvmeld::ort_view(geometry, kv,
                       kvmeld::OrtOptions{.tokens = TokenPlacement::in_order(9), .max_length = 8}),
      Code::truncated, "of 8");

  refused(kvmeld::paged_view(
              geometry, pool.read(),
              kvmeld::PagedOptions{
                  .layout = static_cast<kvmeld::PagedLayout>(8), .blocks = B, .block_size = N}),
          Code::unknown_layout, "8");
  const auto pages = blocks_memory.read();
  const auto apart = [&](kvmeld::PagedOptions options) {
    options.blocks = B, options.block_size = N;
    return kvmeld::paged_view(geometry, pages, options);
  };
  CHECK(apart({.layout = kvmeld::PagedLayout::block_head_token}).ok());
  refused(apart({}), Code::invalid_argument, "one tensor a layer");
  refused(apart({.layout = static_cast<kvmeld::PagedLayout>(8)}), Code::unknown_layout, "8");
  refused(apart({.layout = kvmeld::PagedLayout::block_token_head, .block_stride = 8}),
          Code::invalid_argument, "8");
  refused(kvmeld::paged_view(
              geometry, pool.read(),
              kvmeld::PagedOptions{
                  .layout = kvmeld::PagedLayout::block_token_head, .blocks = B, .block_size = N}),
          Code::invalid_argument, "tensors apart");
  refused(kvmeld::paged_view(geometry, pool.read(), kvmeld::PagedOptions{.blocks = B}),
          Code::invalid_argument, "blocks of 0");
  refused(
      kvmeld::paged_view(geometry, pool.read(),
                         kvmeld::PagedOptions{.layout = kvmeld::PagedLayout::block_kv_head_token,
                                              .blocks = B,
                                              .block_size = N,
                                              .block_stride = 8}),
      Code::invalid_argument, "8");
  refused(
      kvmeld::paged_view(geometry, pool.read(),
                         kvmeld::PagedOptions{.blocks = B, .block_size = N, .block_stride = 4096}),
      Code::invalid_argument, "4096");
  const auto uneven = key_value_geometry(small_setup, 64);
  refused(
      kvmeld::paged_view(uneven, pool.read(), kvmeld::PagedOptions{.blocks = B, .block_size = N}),
      Code::geometry_mismatch, "64");
  refused(
      kvmeld::cross_layer_view(
          geometry, std::span<const std::byte>(pool.memory[0]),
          kvmeld::CrossLayerOptions{
              .layout = static_cast<kvmeld::CrossLayerLayout>(5), .blocks = B, .block_size = N}),
      Code::unknown_layout, "5");
  const auto mixed = std::make_shared<kvmeld::Geometry>(*geometry);
  for (kvmeld::PlaneShape& plane : mixed->layers[1].planes) plane.heads = 3;
  refused(kvmeld::cross_layer_view(std::shared_ptr<const kvmeld::Geometry>(mixed),
                                   std::span<const std::byte>(pool.memory[0]),
                                   kvmeld::CrossLayerOptions{.blocks = B, .block_size = N}),
          Code::geometry_mismatch, "layer 1");
  refused(kvmeld::split_channel_view(
              geometry, blocks_memory.read(),
              kvmeld::SplitChannelOptions{.blocks = B, .block_size = N, .split_bytes = 15}),
          Code::invalid_argument, "15");
  refused(kvmeld::split_channel_view(
              geometry, blocks_memory.read(),
              kvmeld::SplitChannelOptions{.blocks = B, .block_size = N, .split_bytes = 48}),
          Code::invalid_argument, "24");
  const auto q8 = key_value_geometry(Setup{.type = ElementType::q8_0, .heads = H, .channels = D});
  const Memory q8_memory(4, std::vector<std::byte>(static_cast<std::size_t>(B * H * N * 34)));
  refused(
      kvmeld::split_channel_view(q8, split<const std::byte>(q8_memory),
                                 kvmeld::SplitChannelOptions{.tokens = TokenPlacement::in_order(1),
                                                             .blocks = B,
                                                             .block_size = N,
                                                             .split_bytes = 34}),
      Code::unsupported, "blocks of 32");
}

TEST_CASE("a view that may be written wants memory of its own in every tensor") {
  Pair slots(H * 8 * D);
  kvmeld::KeyValueBuffers<std::byte> same = slots.write();
  same.values[1] = same.keys[0];
  refused(kvmeld::contiguous_view(
              geometry, same,
              kvmeld::ContiguousOptions{.tokens = TokenPlacement::in_order(8), .max_tokens = 8}),
          Code::aliasing, "share");
  kvmeld::KeyValueBuffers<const std::byte> read = slots.read();
  read.values[1] = read.keys[0];
  CHECK(kvmeld::contiguous_view(
            geometry, read,
            kvmeld::ContiguousOptions{.tokens = TokenPlacement::in_order(8), .max_tokens = 8})
            .ok());
}

TEST_CASE("SGLang: slot 0 is padding") {
  const Pair slots(H * 8 * D);
  const std::vector<std::int64_t> list = {5, 0, 2};
  refused(kvmeld::sglang_view(
              geometry, slots.read(),
              kvmeld::SglangOptions{.tokens = TokenPlacement::slot_list(list), .slots = 8}),
          Code::invalid_argument, "token 1 is in slot 0");
  refused(
      kvmeld::sglang_view(geometry, slots.read(),
                          kvmeld::SglangOptions{.tokens = TokenPlacement::in_order(3), .slots = 8}),
      Code::invalid_argument, "slot 0");
  CHECK(kvmeld::sglang_view(
            geometry, slots.read(),
            kvmeld::SglangOptions{.tokens = TokenPlacement::in_order(3, 1), .slots = 8})
            .ok());
  CHECK(kvmeld::sglang_view(
            geometry, slots.read(),
            kvmeld::SglangOptions{
                .tokens = TokenPlacement::slot_list(list), .slots = 8, .reserved_slots = 0})
            .ok());
  refused(kvmeld::sglang_view(
              geometry, slots.read(),
              kvmeld::SglangOptions{.tokens = TokenPlacement::block_table(table, 1), .slots = 8}),
          Code::unsupported, "slot list");
}

TEST_CASE("TensorRT-LLM: offsets say which half, and whether the block is on board") {
  const One pool(B * 2 * 2 * H * N * D, 1);
  const std::vector<std::int32_t> keys = {4, 16}, values = {5, 17},
                                  secondary = {4, static_cast<std::int32_t>(0x80000008U)},
                                  far = {5, 21};
  const auto with = [&](std::span<const std::int32_t> k, std::span<const std::int32_t> v,
                        std::vector<kvmeld::PoolLayer> mapping = {}) {
    return kvmeld::trtllm_view(geometry, pool.read(),
                               kvmeld::TrtllmOptions{.keys = TokenPlacement::block_table(k, 6),
                                                     .values = TokenPlacement::block_table(v, 6),
                                                     .mapping = std::move(mapping),
                                                     .blocks = {B},
                                                     .block_size = N});
  };
  CHECK(with(keys, values).ok());
  refused(with(values, keys), Code::invalid_argument, "offset 0 is 5");
  refused(with(secondary, values), Code::unsupported, "secondary");
  refused(with(keys, far), Code::invalid_argument, "21");
  refused(with(keys, values, {{0, 0}}), Code::invalid_argument, "1 pool mappings for 2");
  refused(with(keys, values, {{0, 0}, {1, 0}}), Code::invalid_argument, "pool 1");
  refused(with(keys, values, {{0, 0}, {0, 5}}), Code::invalid_argument, "layer 5 of a pool");
  refused(kvmeld::trtllm_view(geometry, pool.read(),
                              kvmeld::TrtllmOptions{.keys = TokenPlacement::in_order(1),
                                                    .values = TokenPlacement::in_order(1),
                                                    .blocks = {B},
                                                    .block_size = N}),
          Code::unsupported);
}

TEST_CASE("latent rows: planes, scales inside, unknown rows") {
  const One pool(B * N * 96);
  refused(kvmeld::latent_view(geometry, pool.read(),
                              kvmeld::LatentOptions{.blocks = B, .block_size = N}),
          Code::unsupported, "latent");
  const LayoutCase good = latent(Setup{.channels = 32, .kind = SlotKind::slot_list_i64},
                                 kvmeld::LatentRow::latent_rope, false);
  const Memory memory = memory_of(good);
  refused(kvmeld::latent_view(good.geometry, all_of<const std::byte>(memory),
                              kvmeld::LatentOptions{.row = static_cast<kvmeld::LatentRow>(3),
                                                    .blocks = case_blocks,
                                                    .block_size = N}),
          Code::unknown_layout, "3");
  refused(kvmeld::latent_view(good.geometry, all_of<const std::byte>(memory),
                              kvmeld::LatentOptions{.row = kvmeld::LatentRow::latent_scales_rope,
                                                    .blocks = case_blocks,
                                                    .block_size = N}),
          Code::geometry_mismatch);
  const auto mixed = std::make_shared<kvmeld::Geometry>(*good.geometry);
  for (kvmeld::LayerShape& layer : mixed->layers) {
    layer.planes[0] = {.plane = Plane::latent, .type = ElementType::i8, .heads = 1, .channels = 31};
    layer.planes[1].type = ElementType::f16;
  }
  refused(kvmeld::latent_view(std::shared_ptr<const kvmeld::Geometry>(mixed),
                              all_of<const std::byte>(memory),
                              kvmeld::LatentOptions{.blocks = case_blocks, .block_size = N}),
          Code::unsupported, "159");
}

TEST_CASE("extents beyond any memory are refused, also beside an extent of 0") {
  const Pair slots(H * 8 * D);
  const One pool(2 * B * N * H * D);
  auto none = std::make_shared<kvmeld::Geometry>(*geometry);
  for (kvmeld::LayerShape& layer : none->layers) {
    for (kvmeld::PlaneShape& plane : layer.planes) plane.heads = 0;
  }
  const LayoutCase rows = latent(Setup{.channels = 32}, kvmeld::LatentRow::latent_rope, false);
  for (const std::shared_ptr<const kvmeld::Geometry>& g :
       {geometry, std::shared_ptr<const kvmeld::Geometry>(none)}) {
    for (const std::int64_t big :
         {std::int64_t{1} << 46, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
      const auto refuses = [](const auto& result) {
        return !result.ok() && result.status().code() != Code::ok;
      };
      const auto kv = slots.read();
      const auto one = pool.read();
      CHECK(refuses(
          kvmeld::contiguous_view(g, kv, {.max_tokens = big, .batch = 8, .batch_index = 7})));
      CHECK(refuses(
          kvmeld::contiguous_view(g, kv, {.max_tokens = 8, .batch = big, .batch_index = big - 1})));
      CHECK(refuses(kvmeld::llama_view(
          g, kv, {.cells = big, .transposed_values = true, .streams = 9, .stream = 8})));
      CHECK(refuses(kvmeld::split_channel_view(g, kv, {.blocks = 3, .block_size = big})));
      CHECK(refuses(kvmeld::split_channel_view(g, kv, {.blocks = big, .block_size = 4})));
      CHECK(refuses(kvmeld::paged_view(g, one, {.blocks = big, .block_size = 16})));
      CHECK(refuses(kvmeld::paged_view(g, one, {.blocks = 5, .block_size = big})));
      CHECK(refuses(kvmeld::paged_view(
          g, kv,
          {.layout = kvmeld::PagedLayout::block_token_head, .blocks = big, .block_size = 16})));
      CHECK(refuses(kvmeld::paged_view(
          g, kv,
          {.layout = kvmeld::PagedLayout::block_head_token, .blocks = 5, .block_size = big})));
      CHECK(refuses(kvmeld::paged_view(g, one,
                                       {.layout = kvmeld::PagedLayout::block_kv_head_token,
                                        .blocks = 5,
                                        .block_size = 4,
                                        .block_stride = big})));
      CHECK(refuses(kvmeld::cross_layer_view(g, one[0], {.blocks = big, .block_size = big})));
      CHECK(refuses(kvmeld::sglang_view(g, kv, {.slots = big})));
      CHECK(refuses(kvmeld::trtllm_view(g, one, {.blocks = {big, big}, .block_size = big})));
      CHECK(refuses(kvmeld::latent_view(rows.geometry, one, {.blocks = 5, .block_size = big})));
      CHECK(refuses(kvmeld::latent_view(rows.geometry, one, {.blocks = big, .block_size = 64})));
    }
    Pair empty(0);
    if (g != geometry)
      CHECK(kvmeld::contiguous_view(g, empty.write(),
                                    {.tokens = TokenPlacement::in_order(5), .max_tokens = 8})
                .ok());
  }
}
