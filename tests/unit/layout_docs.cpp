// The snippets of docs/layouts.md, compiled and run; the last case checks that the page shows them
// word for word.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <kvmeld/check_view.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/gather.hpp>
#include <kvmeld/layouts.hpp>

#include "support/catch.hpp"
#include "support/page_snippets.hpp"

namespace {

using namespace kvmeld;

// Two layers of two heads of 32 f16 channels.
std::shared_ptr<const Geometry> make_geometry() {
  Geometry g;
  g.layers.assign(2, attention_layer(ElementType::f16, 2, 32, RopeSpec::none()));
  return std::make_shared<const Geometry>(g);
}
std::shared_ptr<const Geometry> make_latent_geometry() {
  Geometry g;
  LayerShape layer;
  layer.planes = {{.plane = Plane::latent, .type = ElementType::bf16, .heads = 1, .channels = 512},
                  {.plane = Plane::rope_part,
                   .type = ElementType::bf16,
                   .heads = 1,
                   .channels = 64,
                   .rotary = true}};
  layer.rope = RopeSpec::rotary(64, 1e4, RopePairing::interleaved);
  g.layers.assign(2, layer);
  return std::make_shared<const Geometry>(g);
}

// Memory for `count` tensors of `slots` rows: two heads of 32 channels and 2 bytes, or whatever
// `row_bytes` says.
struct Engine {
  Engine(std::size_t count, std::size_t slots, std::size_t row_bytes = 2 * 32 * 2)
      : memory(count, std::vector<std::byte>(slots * row_bytes)) {}
  std::vector<std::vector<std::byte>> memory;

  Buffers<const std::byte> tensors() const {
    Buffers<const std::byte> out;
    for (const auto& tensor : memory) out.push_back(tensor);
    return out;
  }
  KeyValueBuffers<const std::byte> keys_and_values() const {
    const Buffers<const std::byte> all = tensors();
    return {.keys = {all[0], all[2]}, .values = {all[1], all[3]}};
  }
};
struct DLTensorLike {
  void* data;
  struct {
    int device_type, device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};

const std::shared_ptr<const Geometry> geometry = make_geometry();

}  // namespace

TEST_CASE("evenly spaced slots") {
  const Engine engine(4, 8);
  const auto tensors = engine.keys_and_values();
  {
    // example-begin: contiguous
    auto view = contiguous_view(geometry, tensors,
                                {.tokens = TokenPlacement::in_order(6),
                                 .max_tokens = 8,
                                 .order = AxisOrder::head_token_channel});
    // the layer, what was declared, what was found
    if (!view) std::puts(view.error().message().c_str());
    // example-end
    CHECK(view->tokens() == 6);
  }
  {
    // example-begin: ort
    std::int64_t past_sequence_length = 6;  // not the tensor's extent
    auto view =
        ort_view(geometry, tensors,
                 {.tokens = TokenPlacement::in_order(past_sequence_length), .max_length = 8});
    // example-end
    CHECK(view.ok());
  }
  {
    // example-begin: llama
    std::vector<std::int32_t> cells = {4, 0, 1, 7};  // the sequence's, sorted by position
    auto view = llama_view(
        geometry, tensors,
        {.tokens = TokenPlacement::slot_list(cells), .cells = 8, .transposed_values = true});
    // example-end
    CHECK(view.ok());
  }
  {
    // example-begin: sglang
    // a row of req_to_token, cut to the sequence's length
    std::vector<std::int64_t> slots = {5, 3, 7};
    auto view =
        sglang_view(geometry, tensors, {.tokens = TokenPlacement::slot_list(slots), .slots = 8});
    // example-end
    CHECK(view.ok());
  }
  {
    // example-begin: ring
    auto slots = ring_slots(20, 8);  // 20 tokens seen, window 8: 4 5 6 7 0 1 2 3
    auto view = contiguous_view(geometry, tensors,
                                {.tokens = TokenPlacement::slot_list(*slots), .max_tokens = 8});
    // example-end
    CHECK(view.ok());
  }
  {
    const Engine swa(4, 8);
    auto mixed = swa.keys_and_values();
    const Engine large(2, 32);
    mixed.keys[0] = large.memory[0];
    mixed.values[0] = large.memory[1];
    // example-begin: window
    auto recent = ring_slots(20, 8, 20);  // 12 holes, then the 8 tokens that the window holds
    std::vector<TokenPlacement> tokens = {TokenPlacement::in_order(20),
                                          TokenPlacement::slot_list(*recent)};
    auto view =
        llama_view(geometry, mixed, {.tokens = tokens, .cells = std::vector<std::int64_t>{32, 8}});
    // example-end
    INFO(view.status().message());
    CHECK(view.ok());
  }
}

TEST_CASE("pages") {
  const Engine engine(2, 4 * 16 * 2);
  const auto tensors = engine.tensors();
  std::vector<std::int32_t> block_table = {2, 0};
  {
    // example-begin: vllm
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = paged_view(geometry, tensors,
                           {.tokens = tokens,
                            .layout = PagedLayout::kv_block_token_head,
                            .blocks = 4,
                            .block_size = 16});
    // example-end
    CHECK(view.ok());
  }
  {
    // example-begin: vllm-packed
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = paged_view(geometry, tensors,
                           {.tokens = tokens,
                            .layout = PagedLayout::block_head_token_packed,
                            .blocks = 4,
                            .block_size = 16});
    // example-end
    CHECK(view.ok());
  }
  {
    // example-begin: flashinfer
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = paged_view(geometry, tensors,
                           {.tokens = tokens,
                            .layout = PagedLayout::block_kv_head_token,
                            .blocks = 4,
                            .block_size = 16});
    // example-end
    CHECK(view.ok());
  }
  const Engine apart(4, 4 * 16);
  const auto keys_and_values = apart.keys_and_values();
  {
    // example-begin: apart
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = paged_view(
        geometry, keys_and_values,
        {.tokens = tokens, .layout = PagedLayout::block_token_head, .blocks = 4, .block_size = 16});
    // example-end
    CHECK(view.ok());
  }
  const Engine pool(1, 4 * 2 * 16 * 2);
  const std::span<const std::byte> tensor = pool.memory[0];
  {
    // example-begin: cross-layer
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = cross_layer_view(geometry, tensor,
                                 {.tokens = tokens,
                                  .layout = CrossLayerLayout::block_layer_kv_token_head,
                                  .blocks = 4,
                                  .block_size = 16});
    // example-end
    CHECK(view.ok());
  }
  {
    const auto pools = pool.tensors();
    // example-begin: trtllm
    // blocks 2 and 0 of a pool of 2 layers
    std::vector<std::int32_t> key_offsets = {8, 0}, value_offsets = {9, 1};
    auto view = trtllm_view(geometry, pools,
                            {.keys = TokenPlacement::block_table(key_offsets, 20),
                             .values = TokenPlacement::block_table(value_offsets, 20),
                             .blocks = {4},
                             .block_size = 16});
    // example-end
    INFO(view.status().message());
    CHECK(view.ok());
  }
  {
    const Engine halves(4, 4 * 16);
    const auto tensors_of_split = halves.keys_and_values();
    // example-begin: split
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = split_channel_view(geometry, tensors_of_split,
                                   {.tokens = tokens, .blocks = 4, .block_size = 16});
    // example-end
    CHECK(view.ok());
  }
  {
    const auto latent_geometry = make_latent_geometry();
    const Engine rows(2, 4 * 16, (512 + 64) * 2);
    const auto latent_tensors = rows.tensors();
    // example-begin: latent
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    auto view = latent_view(
        latent_geometry, latent_tensors,
        {.tokens = tokens, .row = LatentRow::latent_rope, .blocks = 4, .block_size = 16});
    // example-end
    INFO(view.status().message());
    CHECK(view.ok());
  }
  {
    auto scaled = std::make_shared<Geometry>(*geometry);
    for (LayerShape& layer : scaled->layers) {
      for (PlaneShape& plane : layer.planes) {
        plane.type = ElementType::i8;
        plane.scales = ScaleScheme::per_token_head;
      }
    }
    const std::shared_ptr<const Geometry> int8_geometry = scaled;
    const Engine bytes(2, 4 * 16 * 2, 2 * 32);
    const auto int8_tensors = bytes.tensors();
    const std::vector<float> keys(4 * 16 * 2, 0.5F), values(4 * 16 * 2, 0.25F);
    // example-begin: scales
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    // (slots, heads) for each plane, layer by layer
    ScaleTables scales = {keys, values, keys, values};
    auto view = paged_view(int8_geometry, int8_tensors,
                           {.tokens = tokens, .blocks = 4, .block_size = 16, .scales = scales});
    // example-end
    INFO(view.status().message());
    CHECK(view.ok());
  }
  {
    std::int64_t shape[] = {2, 4, 16, 2, 32};
    const auto wrap = [&](const std::vector<std::byte>& m) {
      return DLTensorLike{
          const_cast<std::byte*>(m.data()), {1, 0}, 5, {2, 16, 1}, shape, nullptr, 0};
    };
    const DLTensorLike layer0 = wrap(engine.memory[0]), layer1 = wrap(engine.memory[1]);
    // example-begin: dlpack
    auto tokens = TokenPlacement::block_table(block_table, 20);  // 20 tokens, in blocks 2 and 0
    DlpackAxes key = {
        .token = 2, .head = 3, .channel = 4, .block = 1, .fixed = {{.axis = 0, .index = 0}}};
    DlpackAxes value = {
        .token = 2, .head = 3, .channel = 4, .block = 1, .fixed = {{.axis = 0, .index = 1}}};
    auto view = dlpack_view(geometry, std::vector{layer0, layer0, layer1, layer1},
                            {.tokens = tokens, .axes = {key, value}});
    // example-end
    INFO(view.status().message());
    CHECK(view.ok());
  }
}

TEST_CASE("tensors of one's own, and two views of one pool") {
  std::vector<f16> memory(4 * 6 * 2 * 32);
  {
    // example-begin: tensor
    std::vector<StridedView<f16, 3>> tensors;  // or any mdspan-shaped type: (token, head, channel)
    for (std::size_t i = 0; i < 4; ++i) tensors.push_back({memory.data() + i * 384, {6, 2, 32}});
    auto view = cache_from_tensors(geometry, tensors);
    // example-end
    CHECK(view.ok());
  }
  const Engine engine(4, 8);
  const auto tensors = engine.keys_and_values();
  // example-begin: overlap
  auto a = contiguous_view(geometry, tensors,
                           {.tokens = TokenPlacement::in_order(4, 0), .max_tokens = 8});
  auto b = contiguous_view(geometry, tensors,
                           {.tokens = TokenPlacement::in_order(4, 4), .max_tokens = 8});
  bool disturbed = overlaps(*a, *b);  // false: other slots of the same tensors
  // example-end
  CHECK_FALSE(disturbed);
  // example-begin: rows
  auto seen = a->first(3);  // at most as many tokens as `a` has
  auto row =
      read_row(seen, {.layer = 1, .plane = 0, .token = 2, .head = 1});  // its channels as f32
  auto on_device = seen.in(MemorySpace::device);  // says so; entries on the host refuse it
  // example-end
  REQUIRE(row.ok());
  CHECK(row->size() == 32);
  CHECK(seal(on_device).status().code() == ErrorCode::memory_space);
}

TEST_CASE("docs/layouts.md shows these snippets word for word") {
  test::check_page("docs/layouts.md", {"tests/unit/layout_docs.cpp"});
}
