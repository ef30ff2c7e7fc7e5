// Views over tensors of others: DLPack by its fields, and any mdspan-shaped type.
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <kvmeld/check_view.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/layouts.hpp>

#include "support/catch.hpp"
#include "support/layout_cases.hpp"

namespace framework {

// dlpack.h's structures, as any binding has them.
struct Device {
  int device_type;
  std::int32_t device_id;
};
struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

// Somebody's own half type takes part through element_type_of.
struct half {
  std::uint16_t bits;
};
// The shape of std::mdspan, which these compilers lack.
template <class T>
struct Span3 {
  using element_type = T;
  T* pointer;
  std::ptrdiff_t extents[3], steps[3];
  static constexpr std::size_t rank() { return 3; }
  std::ptrdiff_t extent(std::size_t a) const { return extents[a]; }
  std::ptrdiff_t stride(std::size_t a) const { return steps[a]; }
  T* data_handle() const { return pointer; }
};

}  // namespace framework

template <>
struct kvmeld::element_type_of<framework::half>
    : std::integral_constant<kvmeld::ElementType, kvmeld::ElementType::f16> {};

namespace {

using namespace test;
using kvmeld::DlpackAxes;
using kvmeld::DlpackOptions;
using kvmeld::ErrorCode;
using kvmeld::FixedAxis;

struct Owned {
  std::vector<std::int64_t> shape, strides;
  std::vector<std::uint16_t> memory;
  framework::Tensor tensor;

  // `order`: the axes of `shape` as they lie in memory, outermost first (torch's permuted tensors).
  Owned(std::vector<std::int64_t> extents, const std::vector<std::size_t>& order)
      : shape(std::move(extents)), strides(shape.size()) {
    std::int64_t step = 1;
    for (std::size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = step;
      step *= shape[order[i]];
    }
    memory.resize(static_cast<std::size_t>(step) + 8);
    std::iota(memory.begin(), memory.end(), std::uint16_t{0});
    tensor = {
        memory.data(),  {1, 0}, static_cast<std::int32_t>(shape.size()), {2, 16, 1}, shape.data(),
        strides.data(), 0};
  }
};

kvmeld::Result<kvmeld::KvCacheRef> view_of(const Setup& s, const std::vector<framework::Tensor>& t,
                                           const DlpackOptions& o) {
  return kvmeld::dlpack_view(key_value_geometry(s), t, o);
}
std::uint16_t element(const kvmeld::PlaneRef& p, std::int64_t token, std::int64_t head,
                      std::int64_t channel) {
  std::uint16_t out = 0;
  std::memcpy(
      &out,
      p.data + p.byte_offset(p.row_offset(p.slots.slot(token), head) + p.channel_offset(channel)),
      2);
  return out;
}

}  // namespace

TEST_CASE("a DLPack tensor of any axis order is viewed by naming its axes") {
  constexpr std::int64_t B = 3, N = 4, H = 3, D = 8;
  const Setup s{.heads = H, .channels = D};
  const std::vector<std::int32_t> table = {2, 0};
  const std::vector<std::vector<std::size_t>> orders = {
      {0, 1, 2, 3, 4}, {0, 1, 3, 2, 4}, {1, 0, 2, 3, 4}, {1, 3, 0, 2, 4}};
  for (const auto& order : orders) {  // vLLM's logical [2,B,N,H,D] over four physical orders
    Owned own({2, B, N, H, D}, order);
    const std::vector<framework::Tensor> tensors(4, own.tensor);
    const DlpackAxes key{
        .token = 2, .head = 3, .channel = 4, .block = 1, .fixed = {FixedAxis{0, 0}}};
    const DlpackAxes value{
        .token = 2, .head = 3, .channel = 4, .block = 1, .fixed = {FixedAxis{0, 1}}};
    const auto view = view_of(
        s, tensors, {.tokens = TokenPlacement::block_table(table, 7), .axes = {key, value}});
    INFO(view.status().message());
    REQUIRE(view.ok());
    for (std::size_t p = 0; p < 2; ++p) {
      for (std::int64_t t = 0; t < 7; ++t) {
        for (std::int64_t h = 0; h < H; ++h) {
          for (std::int64_t c = 0; c < D; ++c) {
            const std::int64_t index[5] = {static_cast<std::int64_t>(p),
                                           table[static_cast<std::size_t>(t / N)], t % N, h, c};
            std::int64_t at = 0;
            for (std::size_t a = 0; a < 5; ++a) at += index[a] * own.strides[a];
            REQUIRE(element(view->plane(1, p), t, h, c) ==
                    own.memory[static_cast<std::size_t>(at)]);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "DLPack: null strides are compact, byte_offset and negative strides count, packed and split "
    "channels have names") {
  constexpr std::int64_t T = 5, H = 2, D = 4;
  Owned own({T, H, 2 * D}, {0, 1, 2});
  own.tensor.strides = nullptr;
  own.tensor.byte_offset = 6;
  const DlpackAxes key{}, value{.first_channel = D};
  const Setup s{.heads = H, .channels = D};
  const auto packed = view_of(s, std::vector<framework::Tensor>(4, own.tensor),
                              {.tokens = TokenPlacement::in_order(3, 1), .axes = {key, value}});
  INFO(packed.status().message());
  REQUIRE(packed.ok());
  CHECK(element(packed->plane(0, 0), 2, 1, 3) == own.memory[3 + 3 * 16 + 8 + 3]);
  CHECK(element(packed->plane(1, 1), 0, 1, 0) == own.memory[3 + 1 * 16 + 8 + 4]);

  std::int64_t backward[3] = {-2 * H * D, 2 * D, 1};  // token 0 is the last in memory
  own.tensor.strides = backward;
  own.tensor.byte_offset = 2 * 4 * 2 * H * D;
  const auto reversed = view_of(s, std::vector<framework::Tensor>(4, own.tensor),
                                {.tokens = TokenPlacement::in_order(5), .axes = {key, value}});
  INFO(reversed.status().message());
  REQUIRE(reversed.ok());
  CHECK(element(reversed->plane(0, 0), 0, 0, 0) == own.memory[64]);
  CHECK(element(reversed->plane(0, 1), 4, 1, 3) == own.memory[8 + 4 + 3]);

  Owned split({3, H, D / 2, 4, 2}, {0, 1, 2, 3, 4});  // [B, H, D/x, N, x]
  const DlpackAxes axes{.token = 3, .head = 1, .channel = 4, .block = 0, .channel_outer = 2};
  const auto view = view_of(s, std::vector<framework::Tensor>(4, split.tensor),
                            {.tokens = TokenPlacement::in_order(9), .axes = {axes}});
  INFO(view.status().message());
  REQUIRE(view.ok());
  CHECK(element(view->plane(0, 0), 6, 1, 3) ==
        split.memory[static_cast<std::size_t>(flat({3, H, D / 2, 4, 2}, {1, 1, 1, 2, 1}))]);
}

TEST_CASE("DLPack: latent rows without a head axis; 8-bit floats kept as raw bytes") {
  Owned own({3, 4, 12}, {0, 1, 2});
  kvmeld::Geometry g;
  g.layers.resize(1);
  g.layers[0].planes = {{.plane = Plane::latent, .heads = 1, .channels = 8},
                        {.plane = Plane::rope_part, .heads = 1, .channels = 4, .rotary = true}};
  g.layers[0].rope = kvmeld::RopeSpec::rotary(4, 10000.0, kvmeld::RopePairing::interleaved);
  const auto geometry = std::make_shared<const kvmeld::Geometry>(g);
  const DlpackAxes row{.token = 1, .head = -1, .channel = 2, .block = 0},
      rope{.token = 1, .head = -1, .channel = 2, .block = 0, .first_channel = 8};
  const auto view =
      kvmeld::dlpack_view(geometry, std::vector<framework::Tensor>{own.tensor, own.tensor},
                          {.tokens = TokenPlacement::in_order(12), .axes = {row, rope}});
  INFO(view.status().message());
  REQUIRE(view.ok());
  CHECK(element(view->plane(0, 1), 7, 0, 3) == own.memory[7 * 12 + 8 + 3]);

  std::vector<std::byte> bytes(5 * 3 * 8);
  std::int64_t shape[3] = {5, 3, 8};
  const framework::Tensor raw{bytes.data(), {2, 0}, 3, {1, 8, 1}, shape, nullptr, 0};
  for (const ElementType type : {ElementType::f8_e4m3, ElementType::f8_e5m2}) {
    const Setup s{.type = type, .heads = 3, .channels = 8};
    const std::vector<framework::Tensor> tensors(4, raw);
    CHECK(view_of(s, tensors, {.tokens = TokenPlacement::in_order(5), .raw_bytes = true}).ok());
    CHECK(view_of(s, tensors, {.tokens = TokenPlacement::in_order(5)}).status().code() ==
          ErrorCode::unsupported);
  }
}

TEST_CASE("DLPack: every element type, and bf16 handed in as f16") {
  std::vector<double> memory(5 * 3 * 8);
  std::int64_t shape[3] = {5, 3, 8};
  const struct {
    std::uint8_t code, bits;
    ElementType type;
  } types[] = {{2, 64, ElementType::f64},    {2, 32, ElementType::f32},
               {2, 16, ElementType::f16},    {4, 16, ElementType::bf16},
               {0, 8, ElementType::i8},      {10, 8, ElementType::f8_e4m3},
               {12, 8, ElementType::f8_e5m2}};
  for (const auto& t : types) {
    const std::vector<framework::Tensor> tensors(
        4, framework::Tensor{memory.data(), {1, 0}, 3, {t.code, t.bits, 1}, shape, nullptr, 0});
    for (const auto& declared : types) {
      const auto view = view_of({.type = declared.type, .heads = 3, .channels = 8}, tensors,
                                {.tokens = TokenPlacement::in_order(5)});
      CHECK(view.status().code() ==
            (declared.type == t.type ? ErrorCode::ok : ErrorCode::geometry_mismatch));
    }
  }
}

TEST_CASE("DLPack: what cannot be viewed is refused") {
  const Setup s{.heads = 3, .channels = 8};
  const auto code = [&](auto change,
                        DlpackOptions options = {.tokens = TokenPlacement::in_order(5)}) {
    Owned own({5, 3, 8}, {0, 1, 2});
    change(own);
    const auto view = view_of(s, std::vector<framework::Tensor>(4, own.tensor), options);
    INFO(view.status().message());
    return view.status().code();
  };
  CHECK(code([](Owned&) {}) == ErrorCode::ok);
  CHECK(code([](Owned& o) { o.tensor.device.device_type = 8; }) == ErrorCode::unsupported);
  CHECK(code([](Owned& o) { o.tensor.dtype.lanes = 4; }) == ErrorCode::unsupported);
  CHECK(code([](Owned& o) { o.tensor.dtype = {5, 64, 1}; }) == ErrorCode::unsupported);
  CHECK(code([](Owned& o) { o.tensor.ndim = 0; }) == ErrorCode::invalid_argument);
  CHECK(code([](Owned& o) { o.tensor.ndim = 2; }) == ErrorCode::invalid_argument);
  CHECK(code([](Owned& o) { o.tensor.data = nullptr; }) == ErrorCode::invalid_argument);
  CHECK(code([](Owned& o) { o.shape[0] = -1; }) == ErrorCode::invalid_argument);
  CHECK(code([](Owned& o) { o.shape[0] = std::int64_t{1} << 60; }) == ErrorCode::invalid_argument);
  CHECK(code([](Owned& o) { o.strides[1] = std::int64_t{1} << 60; }) ==
        ErrorCode::invalid_argument);
  CHECK(code([](Owned& o) { o.shape[0] = 4; }) == ErrorCode::truncated);
  CHECK(code([](Owned& o) { o.shape[1] = 2; }) == ErrorCode::geometry_mismatch);
  CHECK(code([](Owned& o) { o.shape[2] = 7; }) == ErrorCode::geometry_mismatch);
  const auto axes = [&](DlpackAxes a) {
    return code([](Owned&) {}, {.tokens = TokenPlacement::in_order(1), .axes = {a}});
  };
  CHECK(axes({.token = 0, .head = 0, .channel = 2}) == ErrorCode::invalid_argument);
  CHECK(axes({.token = 3, .head = 1, .channel = 2}) == ErrorCode::invalid_argument);
  CHECK(axes({.token = 0, .head = -1, .channel = 2}) == ErrorCode::invalid_argument);
  CHECK(axes({.fixed = {FixedAxis{0, 0}}}) == ErrorCode::invalid_argument);
  CHECK(axes({.fixed = {FixedAxis{7, 0}}}) == ErrorCode::invalid_argument);
  CHECK(axes({.first_channel = 1}) == ErrorCode::geometry_mismatch);
  CHECK(axes({.first_channel = -1}) == ErrorCode::geometry_mismatch);
  Owned four({5, 3, 8, 2}, {0, 1, 2, 3});
  const std::vector<framework::Tensor> tensors(4, four.tensor);
  const auto with = [&](std::vector<FixedAxis> fixed) {
    return view_of(s, tensors,
                   {.tokens = TokenPlacement::in_order(5),
                    .axes = {DlpackAxes{.fixed = std::move(fixed)}}})
        .status()
        .code();
  };
  CHECK(with({}) == ErrorCode::invalid_argument);  // an axis of extent 2 that nobody named
  CHECK(with({{3, 1}}) == ErrorCode::ok);
  CHECK(with({{3, 2}}) == ErrorCode::invalid_argument);
  CHECK(view_of(s, {four.tensor}, {}).status().code() == ErrorCode::invalid_argument);
  std::int64_t broadcast[3] = {0, 8, 1};
  const std::vector<framework::Tensor> same(
      4, framework::Tensor{
             four.memory.data(), {1, 0}, 3, {2, 16, 1}, four.shape.data(), broadcast, 0});
  CHECK(kvmeld::dlpack_view<const std::byte>(key_value_geometry(s), same,
                                             {.tokens = TokenPlacement::in_order(5)})
            .ok());
  CHECK(kvmeld::dlpack_view<std::byte>(key_value_geometry(s), same,
                                       {.tokens = TokenPlacement::in_order(5)})
            .status()
            .code() == ErrorCode::aliasing);
}

TEST_CASE("a caller's own tensor type is a plane, transposed or not") {
  std::vector<framework::half> memory(5 * 3 * 8);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i].bits = static_cast<std::uint16_t>(i);
  const kvmeld::PlaneShape shape{.type = ElementType::f16, .heads = 3, .channels = 8};
  using Read = framework::Span3<const framework::half>;
  using Write = framework::Span3<framework::half>;
  const auto rows = kvmeld::plane_from_tensor(Read{memory.data(), {5, 3, 8}, {24, 8, 1}}, shape);
  REQUIRE(rows.ok());
  CHECK(element(*rows, 4, 2, 7) == 119);
  const auto transposed =
      // (head, channel, token)
      kvmeld::plane_from_tensor(Write{memory.data(), {5, 3, 8}, {1, 40, 5}}, shape);
  REQUIRE(transposed.ok());
  CHECK(element(*transposed, 4, 2, 7) == 2 * 40 + 7 * 5 + 4);
  CHECK(kvmeld::plane_from_tensor(Read{memory.data(), {5, 3, 8}, {0, 8, 1}}, shape).ok());
  const auto code = [&](auto view, kvmeld::PlaneShape s) {
    return kvmeld::plane_from_tensor(view, s).status().code();
  };
  CHECK(code(Write{memory.data(), {5, 3, 8}, {0, 8, 1}}, shape) == ErrorCode::aliasing);
  CHECK(code(Read{memory.data(), {5, 3, 8}, {24, 8, 1}},
             {.type = ElementType::bf16, .heads = 3, .channels = 8}) ==
        ErrorCode::geometry_mismatch);
  CHECK(code(Read{memory.data(), {5, 2, 8}, {24, 8, 1}}, shape) == ErrorCode::geometry_mismatch);
  CHECK(code(Read{memory.data(), {5, 3, 4}, {24, 8, 1}}, shape) == ErrorCode::geometry_mismatch);
  CHECK(code(Read{memory.data(), {-5, 3, 8}, {24, 8, 1}}, shape) == ErrorCode::invalid_argument);
  CHECK(code(Read{nullptr, {5, 3, 8}, {24, 8, 1}}, shape) == ErrorCode::invalid_argument);
  CHECK(code(Read{nullptr, {0, 3, 8}, {24, 8, 1}}, shape) == ErrorCode::ok);

  const kvmeld::q8_0_block q8[10] = {};
  const kvmeld::PlaneShape wide{.type = ElementType::q8_0, .heads = 1, .channels = 64};
  using Blocks = kvmeld::StridedView<const kvmeld::q8_0_block, 3>;
  const auto plane = kvmeld::plane_from_tensor(Blocks(q8, {5, 1, 2}), wide);
  REQUIRE(plane.ok());
  CHECK(footprint(*plane).last_byte == 5 * 68 - 1);
  CHECK(code(Blocks(q8, {5, 1, 2}, {1, 5, 5}), wide) == ErrorCode::unsupported);
}

TEST_CASE("tensors of one type make a cache that seals") {
  std::vector<float> memory(4 * 5 * 3 * 8, 0.5F);
  using View = kvmeld::StridedView<const float, 3>;
  std::vector<View> tensors;
  for (std::size_t i = 0; i < 4; ++i)
    tensors.emplace_back(memory.data() + i * 120, View::Shape{5, 3, 8});
  const auto geometry = key_value_geometry({.type = ElementType::f32, .heads = 3, .channels = 8});
  const auto cache = kvmeld::cache_from_tensors(geometry, tensors);
  INFO(cache.status().message());
  REQUIRE(cache.ok());
  CHECK(kvmeld::seal(*cache)->token_count() == 5);
  tensors[3] = View(memory.data(), {4, 3, 8});
  CHECK(kvmeld::cache_from_tensors(geometry, tensors).status().code() ==
        ErrorCode::token_count_mismatch);
  tensors.pop_back();
  CHECK(kvmeld::cache_from_tensors(geometry, tensors).status().code() ==
        ErrorCode::invalid_argument);
  tensors.assign(5, tensors[0]);
  CHECK(kvmeld::cache_from_tensors(geometry, tensors).status().code() ==
        ErrorCode::invalid_argument);
}
