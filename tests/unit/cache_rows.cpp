// What a view promises: no derived view has more tokens than its parent, planes are the geometry's,
// memory that the host cannot reach is refused by every entry, and single rows are read and written
// as numbers.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/calibrate.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/gather.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/layouts.hpp>
#include <kvmeld/policies/attention.hpp>
#include <kvmeld/replica/session_memory.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::CacheRow;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Geometry;
using kvmeld::KvCacheRef;
using kvmeld::MemorySpace;
using kvmeld::TokenPlacement;
using test::Layout;
using test::TestCache;

constexpr std::int64_t far_beyond = std::numeric_limits<std::int64_t>::max();

}  // namespace

TEST_CASE("a derived view never has more tokens than its parent, and no fewer than none") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 4, .rotary = 0});
  const std::vector<float> tensor(8 * 4, 1.0F);  // for 8 tokens, of which the view names 3
  const kvmeld::KeyValueBuffers<const std::byte> buffers{
      .keys = {std::as_bytes(std::span(tensor))}, .values = {std::as_bytes(std::span(tensor))}};
  const std::vector<std::int32_t> slots{2, 0, 1};
  for (const auto& placement : {TokenPlacement::in_order(3), TokenPlacement::slot_list(slots)}) {
    const auto view = kvmeld::contiguous_view(std::shared_ptr<const Geometry>(g), buffers,
                                              {.tokens = placement, .max_tokens = 8});
    REQUIRE(view.ok());
    for (const auto& [asked, held] : {std::pair<std::int64_t, std::int64_t>{5, 3},
                                      {3, 3},
                                      {2, 2},
                                      {0, 0},
                                      {-1, 0},
                                      {far_beyond, 3},
                                      {-far_beyond, 0}}) {
      CAPTURE(asked);
      const KvCacheRef part = view->first(asked);
      CHECK(part.tokens() == held);
      for (const kvmeld::PlaneRef& plane : part.planes()) CHECK(plane.tokens == held);
      const auto sealed = kvmeld::seal(part);
      REQUIRE(sealed.ok());
      CHECK(sealed->token_count() == held);
    }
    CHECK(view->first(2).first(3).tokens() == 2);
  }
  TestCache cache(g, 4);
  for (const auto& [begin, held] :
       {std::pair<std::int64_t, std::int64_t>{3, 1}, {4, 0}, {5, 0}, {-1, 4}, {far_beyond, 0}}) {
    const KvCacheRef rest = kvmeld::replica::detail::rows_from(cache.ref(), begin);
    CHECK(rest.tokens() == held);
    for (const kvmeld::PlaneRef& plane : rest.planes()) CHECK(plane.tokens == held);
  }
}

TEST_CASE("views of fragments without such a payload, or without its bytes, are no views") {
  const auto g = test::geometry({.channels = 32});
  const auto fragment = test::sealed(g, 3, 1).fragment;
  CHECK(kvmeld::FragmentView(fragment).ref().tokens() == 3);
  const auto refused = [](const kvmeld::FragmentView& view) {
    CHECK_FALSE(view.ref().valid());
    CHECK(kvmeld::seal(view.ref()).error().code() == ErrorCode::invalid_argument);
  };
  refused(kvmeld::FragmentView(fragment, 1));
  refused(kvmeld::FragmentView(kvmeld::Fragment()));
  auto evicted = std::make_shared<kvmeld::Fragment::Body>(*fragment.body());
  evicted->payloads[0].bytes = nullptr;
  refused(kvmeld::FragmentView(kvmeld::Fragment(evicted)));
}

namespace {

/// Every entry that reads rows on the host, each with its answer to a view.
template <class Answer>
void for_each_host_reader(const std::shared_ptr<Geometry>& g, const KvCacheRef& view,
                          Answer&& answer) {
  const std::int64_t n = 3;
  TestCache mine(g, n), out(g, 2 * n);
  mine.fill(5);
  const std::vector<std::int64_t> map{0, 1, 2}, at{0, 1, 2};
  const auto seq = kvmeld::exec::seq;
  answer("seal", kvmeld::seal(view).status());
  answer("with_variant", kvmeld::with_variant(test::sealed(g, n, 1).fragment, view, {}).status());
  answer("content_digest", kvmeld::content_digest(view).status());
  answer("gather", kvmeld::gather(seq, view, map, out.out()).status());
  answer("soft_update fused", kvmeld::soft_update(seq, view, at, mine.ref(), at, 0.5F, out.out()));
  answer("soft_update local", kvmeld::soft_update(seq, mine.ref(), at, view, at, 0.5F, out.out()));
  answer("read_row", kvmeld::read_row(view, {}).status());
  kvmeld::replica::SpanBuffer span(g, {});
  answer("append", span.append(view));
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(test::sealed(g, n, 2).fragment, {1, 0}).ok());
  kvmeld::Target target{*g};
  target.layers.layers = {0, 1};
  target.local = view;
  answer("plan", kvmeld::plan(set, kvmeld::merger(kvmeld::ById{}), target).status());
  std::size_t width = 0;
  for (const kvmeld::LayerShape& layer : g->layers)
    width += static_cast<std::size_t>(layer.planes[0].heads * layer.planes[0].channels);
  const std::vector<float> query(width, 0.25F);
  std::vector<float> sums(width), lse(4);
  kvmeld::AttentionQueries queries;
  queries.values = query;
  queries.count = 1;
  queries.frame = kvmeld::QueryFrame::pre_rope;
  kvmeld::attention::MutableAttentionState<kvmeld::attention::LseNatural> state;
  state.outputs = sums;
  state.lse = lse;
  state.rows = 1;
  state.heads = 4;
  state.channels = 32;
  answer("attend", kvmeld::attend(queries, view, state, at));
}

/// And every one that writes them.
template <class Answer>
void for_each_host_writer(const std::shared_ptr<Geometry>& g, const kvmeld::MutableKvCacheRef& out,
                          Answer&& answer) {
  const std::int64_t n = 3;
  TestCache mine(g, n);
  mine.fill(5);
  const std::vector<std::int64_t> map{0, 1, 2};
  const auto seq = kvmeld::exec::seq;
  answer("gather", kvmeld::gather(seq, mine.ref(), map, out).status());
  answer("soft_update", kvmeld::soft_update(seq, mine.ref(), map, mine.ref(), map, 0.5F, out));
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(test::sealed(g, n, 2).fragment, {1, 0}).ok());
  answer("render", kvmeld::render(seq, set, kvmeld::merger(kvmeld::ById{}), out).status());
  answer("render lanes",
         kvmeld::render(kvmeld::exec::lanes, set, kvmeld::merger(kvmeld::ById{}), out).status());
  answer("write_row", kvmeld::write_row(out, {}, std::vector<float>(32, 1.0F)));
}

}  // namespace

TEST_CASE(
    "memory that the host cannot reach is refused by every entry that would touch it, before it "
    "does") {
  const auto g = test::geometry({.channels = 32});
  TestCache cache(g, 3), out(g, 3);
  cache.fill(1);
  const auto refuses = [](const char* who, const kvmeld::Status& status) {
    INFO(who << ": " << status.message());
    CHECK(status.code() == ErrorCode::memory_space);
    CHECK(status.message().find("device") != std::string::npos);
    CHECK(status.message().find("copy it to host memory") != std::string::npos);
  };
  const auto takes = [](const char* who, const kvmeld::Status& status) {
    INFO(who << ": " << status.message());
    CHECK(status.ok());
  };
  // No host could read these addresses: an entry that looked first would crash.
  std::vector<kvmeld::MutablePlaneRef> planes(out.out().planes().begin(), out.out().planes().end());
  for (std::size_t p = 0; p < planes.size(); ++p) {
    planes[p].data = reinterpret_cast<std::byte*>(std::uintptr_t{0x1000} * (p + 1));
    planes[p].space = MemorySpace::device;
  }
  const kvmeld::MutableKvCacheRef nowhere(g, planes, 3);
  for_each_host_reader(g, nowhere, refuses);
  for_each_host_writer(g, nowhere, refuses);
  // One plane of several is enough.
  planes.assign(out.out().planes().begin(), out.out().planes().end());
  planes[0].space = MemorySpace::device;
  for_each_host_writer(g, {g, planes, 3}, refuses);
  for (const MemorySpace space : {MemorySpace::host, MemorySpace::pinned, MemorySpace::managed}) {
    CAPTURE(kvmeld::to_string(space));
    for_each_host_reader(g, cache.ref().in(space), takes);
    for_each_host_writer(g, out.out().in(space), takes);
  }
  // The declaration follows a view into whatever is derived from it.
  CHECK(cache.ref().in(MemorySpace::device).first(2).planes()[1].space == MemorySpace::device);
  CHECK(KvCacheRef(nowhere).planes()[1].space == MemorySpace::device);
}

namespace {

// A tensor as frameworks hand it over.
struct Tensor {
  void* data;
  struct {
    int device_type;
    int device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

}  // namespace

TEST_CASE("a tensor's device is the view's memory space") {
  const auto g = test::geometry({.layers = 1, .heads = 2, .channels = 4, .rotary = 0});
  std::vector<float> numbers(5 * 2 * 4, 1.5F);
  std::int64_t shape[3] = {5, 2, 4};
  const auto view = [&](int key_device, int value_device) {
    const auto tensor = [&](int device) {
      return Tensor{numbers.data(), {device, 0}, 3, {2, 32, 1}, shape, nullptr, 0};
    };
    return kvmeld::dlpack_view(std::shared_ptr<const Geometry>(g),
                               std::vector<Tensor>{tensor(key_device), tensor(value_device)},
                               {.tokens = TokenPlacement::in_order(5)});
  };
  const struct {
    int device;
    MemorySpace space;
    ErrorCode code;
  } kinds[] = {{1, MemorySpace::host, ErrorCode::ok},
               {2, MemorySpace::device, ErrorCode::memory_space},
               {3, MemorySpace::pinned, ErrorCode::ok},
               {13, MemorySpace::managed, ErrorCode::ok}};
  for (const auto& kind : kinds) {
    for (const bool key : {true, false}) {
      const auto made = view(key ? kind.device : 1, key ? 1 : kind.device);
      REQUIRE(made.ok());
      CHECK(made->plane(0, key ? 0 : 1).space == kind.space);
      CHECK(made->plane(0, key ? 1 : 0).space == MemorySpace::host);
      CHECK(kvmeld::seal(*made).status().code() == kind.code);
    }
  }
  CHECK(view(10, 1).status().code() == ErrorCode::unsupported);
}

TEST_CASE("views that their own planes belie are refused, whoever reads or writes them") {
  const auto g = test::geometry({.channels = 32});
  TestCache cache(g, 3), wide(test::geometry({.heads = 3, .channels = 64}), 3);
  cache.fill(1);
  const std::vector<kvmeld::MutablePlaneRef> sound(cache.out().planes().begin(),
                                                   cache.out().planes().end());
  const auto expect = [&](ErrorCode code, const char* part,
                          std::vector<kvmeld::MutablePlaneRef> planes, std::int64_t tokens) {
    const auto answer = [&](const char* who, const kvmeld::Status& status) {
      INFO(who << ": " << status.message());
      CHECK(status.code() == code);
      CHECK(status.message().find(part) != std::string::npos);
    };
    const kvmeld::MutableKvCacheRef made(g, std::move(planes), tokens);
    for_each_host_reader(g, made, answer);
    for_each_host_writer(g, made, answer);
  };
  auto planes = sound;
  planes[0].tokens = 2;  // the view says 3
  expect(ErrorCode::token_count_mismatch, "layer 0 plane 0 holds 2 tokens, the view says 3", planes,
         3);
  planes = sound;
  planes[0].shape = wide.out().planes()[0].shape;  // more bytes a row than the geometry has
  expect(ErrorCode::geometry_mismatch, "layer 0 plane 0 is viewed as 3 heads of 64", planes, 3);
  planes = sound;
  planes.pop_back();
  expect(ErrorCode::invalid_argument, "3 planes over a geometry of 4", planes, 3);
}

TEST_CASE("a geometry that is none is refused before a row is read, though planes agree with it") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  TestCache cache(g, 3);
  cache.fill(1);
  const auto refused = [&](auto&& change, const char* part) {
    const auto bad = std::make_shared<Geometry>(*g);
    change(bad->layers[0]);
    std::vector<kvmeld::PlaneRef> planes(cache.out().planes().begin(), cache.out().planes().end());
    for (std::size_t p = 0; p < planes.size(); ++p) planes[p].shape = bad->layers[0].planes[p];
    const KvCacheRef view(bad, planes, 3);
    for (const kvmeld::Status& status :
         {kvmeld::content_digest(view).status(), kvmeld::seal(view).status()}) {
      INFO(status.message());
      CHECK(status.code() == ErrorCode::invalid_argument);
      CHECK(status.message().find(part) != std::string::npos);
    }
  };
  refused([](kvmeld::LayerShape& layer) { layer.rope = {}; }, "nobody said");
  refused([](kvmeld::LayerShape& layer) { layer.planes[1].channels = -8; }, "-8 channels");
}

TEST_CASE("rows are read and written as numbers, whatever the layout") {
  for (const ElementType type :
       {ElementType::f64, ElementType::f32, ElementType::f16, ElementType::bf16,
        ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::q8_0}) {
    const auto g = test::geometry({.type = type, .heads = 2, .channels = 32, .value_channels = 64});
    for (const Layout layout : test::all_layouts) {
      CAPTURE(kvmeld::to_string(type), static_cast<int>(layout));
      TestCache cache(g, 5, layout), copy(g, 5, layout);
      cache.fill(3);
      for (std::size_t l = 0; l < 2; ++l) {
        for (std::size_t p = 0; p < 2; ++p) {
          for (std::int64_t t = 0; t < 5; ++t) {
            for (std::int32_t h = 0; h < 2; ++h) {
              const auto row =
                  kvmeld::read_row(cache.ref(), {.layer = l, .plane = p, .token = t, .head = h});
              REQUIRE(row.ok());
              REQUIRE(row->size() == (p == 0 ? 32U : 64U));
              bool same = true;
              for (std::size_t c = 0; c < row->size(); ++c)
                same = same && static_cast<float>(cache.get(
                                   2 * l + p, t, h, static_cast<std::int64_t>(c))) == (*row)[c];
              CHECK(same);
              REQUIRE(kvmeld::write_row(copy.out(), {.layer = l, .plane = p, .token = t, .head = h},
                                        *row)
                          .ok());
            }
          }
        }
      }
      CHECK(*kvmeld::content_digest(copy.ref()) == *kvmeld::content_digest(cache.ref()));
    }
  }
}

TEST_CASE("scales that a plane declares and does not give are refused by all that read them") {
  auto scaled = test::geometry(
      {.type = ElementType::i8, .layers = 1, .heads = 2, .channels = 8, .rotary = 0});
  scaled->layers[0].planes[1].scales = kvmeld::ScaleScheme::per_token_head;
  TestCache integers(scaled, 3);  // its planes point to no scales
  integers.fill(1);
  const auto refused = [](const kvmeld::Status& status) {
    INFO(status.message());
    CHECK(status.code() == ErrorCode::invalid_argument);
    CHECK(status.message().find("declares scales and gives none") != std::string::npos);
  };
  refused(kvmeld::seal(integers.ref()).status());
  refused(kvmeld::content_digest(integers.ref()).status());
  refused(kvmeld::read_row(integers.ref(), {.plane = 1}).status());
  refused(kvmeld::replica::SpanBuffer(scaled, {}).append(integers.ref()));
  CHECK(kvmeld::read_row(integers.ref(), {.plane = 0}).ok());
}

TEST_CASE("a row's scales are applied; they are not written through a view") {
  auto scaled = test::geometry(
      {.type = ElementType::i8, .layers = 1, .heads = 2, .channels = 8, .rotary = 0});
  scaled->layers[0].planes[1].scales = kvmeld::ScaleScheme::per_channel_group;
  scaled->layers[0].planes[1].scale_group = 4;
  TestCache integers(scaled, 3);
  integers.fill(1);
  std::vector<float> scales;  // (token, head, group)
  for (int i = 0; i < 3 * 2 * 2; ++i) scales.push_back(0.5F + static_cast<float>(i));
  std::vector<kvmeld::MutablePlaneRef> planes(integers.out().planes().begin(),
                                              integers.out().planes().end());
  planes[1].scales = {.data = scales.data(), .slot_stride = 4, .head_stride = 2, .group_stride = 1};
  const kvmeld::MutableKvCacheRef view(scaled, planes, 3);
  const CacheRow row{.plane = 1, .token = 2, .head = 1};
  const auto read = kvmeld::read_row(view, row);
  REQUIRE(read.ok());
  for (std::int64_t c = 0; c < 8; ++c) {
    const float stored = static_cast<float>(integers.get(1, 2, 1, c));
    CHECK((*read)[static_cast<std::size_t>(c)] ==
          stored * scales[static_cast<std::size_t>(2 * 4 + 2 + c / 4)]);
  }
  CHECK(kvmeld::write_row(view, row, *read).code() == ErrorCode::unsupported);
  CHECK(kvmeld::write_row(view, {.token = 2, .head = 1}, std::vector<float>(8, 3.0F)).ok());
  CHECK(integers.get(0, 2, 1, 7) == 3.0);
}

TEST_CASE(
    "rows that a cache does not have, and numbers that it cannot hold, are refused and nothing is "
    "written") {
  const auto g = test::geometry({.type = ElementType::f16, .channels = 32});
  TestCache cache(g, 4, Layout::slot_list, {0, 2});  // layer 1 holds tokens 2 and 3 only
  cache.fill(1);
  const auto before = cache.buffers();
  const std::vector<float> values(32, 1.0F);
  const auto refused = [&](const CacheRow& row, ErrorCode code, const char* part) {
    const auto read = kvmeld::read_row(cache.ref(), row);
    INFO(read.status().message());
    CHECK(read.status().code() == code);
    CHECK(read.status().message().find(part) != std::string::npos);
    CHECK(kvmeld::write_row(cache.out(), row, values).code() == code);
  };
  refused({.layer = 2}, ErrorCode::invalid_argument, "layer 2 of 2");
  refused({.plane = 2}, ErrorCode::invalid_argument, "plane 2 of 2");
  refused({.token = 4}, ErrorCode::invalid_argument, "token 4 of 4");
  refused({.token = -1}, ErrorCode::invalid_argument, "token -1");
  refused({.head = 2}, ErrorCode::invalid_argument, "head 2 of 2");
  refused({.head = -1}, ErrorCode::invalid_argument, "head -1");
  refused({.layer = 1, .token = 1}, ErrorCode::not_found, "layer 1 holds no row of token 1");
  CHECK(kvmeld::read_row(cache.ref(), {.layer = 1, .token = 2}).ok());
  const auto write = [&](std::vector<float> numbers) {
    return kvmeld::write_row(cache.out(), {}, numbers).code();
  };
  CHECK(write(std::vector<float>(31, 1.0F)) == ErrorCode::token_count_mismatch);
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::nanf(""), 70000.0F, -70000.0F}) {
    std::vector<float> numbers(32, 1.0F);
    numbers[9] = bad;
    CHECK(write(numbers) == ErrorCode::non_finite);
  }
  CHECK(cache.buffers() == before);
}
