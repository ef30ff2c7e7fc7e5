// Gather by position map: against the layouts' own addresses, in host rows, on threads and in the
// form that devices run.
#include <cstdint>
#include <memory>
#include <vector>

#include <kvmeld/exec.hpp>
#include <kvmeld/gather.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::ElementType;
using kvmeld::ErrorCode;
using test::Layout;
using test::TestCache;

const std::vector<std::int32_t> map32{4, 5, 6, -1, 0, 0, 8, -1, 2};

std::vector<std::int64_t> map64() { return {map32.begin(), map32.end()}; }

// Whether row o holds the input's bytes, or was left as it was.
bool right_row(const TestCache& in, const TestCache& out, std::size_t plane, std::int64_t o) {
  const std::int64_t from = map32[static_cast<std::size_t>(o)];
  const bool moved = from >= 0 && in.holds(plane, from);
  const auto size = static_cast<std::size_t>(kvmeld::block_bytes(out.shape(plane).type));
  const std::vector<std::byte> untouched(size, TestCache::untouched);
  for (std::int64_t h = 0; h < out.shape(plane).heads; ++h) {
    for (std::int64_t c = 0; c < out.shape(plane).channels; ++c) {
      const std::byte* expected = moved ? in.bytes(plane, from, h, c) : untouched.data();
      if (std::memcmp(expected, out.bytes(plane, o, h, c), size) != 0) return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("gather moves rows between all layouts, the same bytes in every executor") {
  const auto type =
      GENERATE(ElementType::f16, ElementType::f64, ElementType::f8_e4m3, ElementType::q8_0);
  const auto g =
      test::geometry({.type = type, .layers = 2, .heads = 3, .channels = 64, .value_channels = 32});
  const auto tokens = static_cast<std::int64_t>(map32.size());
  for (const Layout from : test::all_layouts) {
    // A slot list can leave tokens out: token 0 is missing in layer 1.
    TestCache in(
        g, 10, from,
        from == Layout::slot_list ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{});
    in.fill(7);
    for (const Layout to : test::all_layouts) {
      CAPTURE(kvmeld::to_string(type), static_cast<int>(from), static_cast<int>(to));
      TestCache rows(g, tokens + 1, to), lanes(g, tokens + 1, to), threads(g, tokens + 1, to);
      const auto report = kvmeld::gather(kvmeld::exec::seq, in.ref(), map32, rows.out());
      INFO(report.status().message());
      REQUIRE(report.ok());
      CHECK(report->tokens == tokens);
      using Tokens = std::vector<std::int64_t>;
      CHECK(report->holes == (from == Layout::slot_list ? Tokens{3, 4, 5, 7} : Tokens{3, 7}));
      for (std::size_t p = 0; p < rows.planes(); ++p) {
        for (std::int64_t o = 0; o < tokens; ++o) REQUIRE(right_row(in, rows, p, o));
      }
      REQUIRE(kvmeld::gather(kvmeld::exec::lanes, in.ref(), map64(), lanes.out()).ok());
      REQUIRE(kvmeld::gather(kvmeld::exec::threads(3), in.ref(), map64(), threads.out()).ok());
      // the token behind the map's end included: nobody wrote it
      CHECK(lanes.buffers() == rows.buffers());
      CHECK(threads.buffers() == rows.buffers());
    }
  }
}

TEST_CASE("gather of nothing, and into nothing, is nothing") {
  const auto g = test::geometry();
  TestCache in(g, 3), out(g, 3), empty(g, 0);
  in.fill(1);
  const std::vector<std::int32_t> none, holes{-1, -1, -1};
  CHECK(kvmeld::gather(kvmeld::exec::seq, in.ref(), none, empty.out()).ok());
  const auto report = kvmeld::gather(kvmeld::exec::lanes, empty.ref(), holes, out.out());
  REQUIRE(report.ok());
  CHECK(report->holes.size() == 3);
  CHECK(out.is_untouched());
}

TEST_CASE("gather refuses what it cannot do, with the number, and writes nothing") {
  const auto g = test::geometry();
  TestCache in(g, 4), out(g, 3);
  in.fill(1);
  const auto refused = [&](const kvmeld::KvCacheRef& from, const std::vector<std::int32_t>& map,
                           const kvmeld::MutableKvCacheRef& to, ErrorCode code,
                           const char* number) {
    const auto report = kvmeld::gather(kvmeld::exec::seq, from, map, to);
    INFO(report.status().message());
    CHECK(report.status().code() == code);
    CHECK(report.status().message().find(number) != std::string::npos);
    CHECK(out.is_untouched());
  };
  refused(in.ref(), {0, 4}, out.out(), ErrorCode::invalid_argument, "entry 1 is 4");
  refused(in.ref(), {0, 1, -2}, out.out(), ErrorCode::invalid_argument, "entry 2 is -2");
  refused(in.ref(), {0, 1, 2, 3}, out.out(), ErrorCode::output_too_small, "4 tokens");
  refused(in.ref(), {0}, {}, ErrorCode::invalid_argument, "no geometry");
  TestCache other(test::geometry({.heads = 3}), 4);
  refused(other.ref(), {0}, out.out(), ErrorCode::geometry_mismatch, "3");
  auto undeclared = std::make_shared<kvmeld::Geometry>(*g);
  undeclared->layers[1].rope = {};
  TestCache nobody_said(undeclared, 4);
  refused(nobody_said.ref(), {0}, nobody_said.out(), ErrorCode::invalid_argument,
          "layer 1: rope: nobody said");

  const std::vector<std::vector<std::byte>> before = in.buffers();
  refused(in.ref(), {1, 0}, in.out(), ErrorCode::aliasing, "another cache");
  CHECK(in.buffers() == before);

  auto scaled = std::make_shared<kvmeld::Geometry>(*g);
  for (auto& plane : scaled->layers[0].planes) plane.scales = kvmeld::ScaleScheme::per_token_head;
  std::vector<kvmeld::MutablePlaneRef> from(in.out().planes().begin(), in.out().planes().end());
  std::vector<kvmeld::MutablePlaneRef> to(out.out().planes().begin(), out.out().planes().end());
  for (auto* plane : {&from[0], &from[1], &to[0], &to[1]})
    plane->shape.scales = kvmeld::ScaleScheme::per_token_head;
  const kvmeld::MutableKvCacheRef scaled_in(scaled, from, 4), scaled_out(scaled, to, 3);
  refused(scaled_in, {0}, scaled_out, ErrorCode::unsupported, "scales");
}

TEST_CASE("two sequences of one pool do not alias, one slot with two names does") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 8});
  TestCache pool(g, 8, Layout::slot_list);
  pool.fill(3);
  const std::int64_t first[] = {0, 1, 2, 3}, second[] = {6, 4, 7, 5}, twice[] = {4, 5, 4, 6};
  const auto sequence = [&](const std::int64_t* slots) {
    std::vector<kvmeld::MutablePlaneRef> planes;
    for (auto plane : pool.out().planes()) {
      plane.slots.table = slots;
      plane.tokens = 4;
      planes.push_back(plane);
    }
    return kvmeld::MutableKvCacheRef(pool.out().shared_geometry(), planes, 4);
  };
  const std::vector<std::int32_t> map{3, 2, 1, 0};
  CHECK(kvmeld::gather(kvmeld::exec::seq, sequence(first), map, sequence(second)).ok());
  CHECK(kvmeld::gather(kvmeld::exec::seq, sequence(first), map, sequence(twice)).status().code() ==
        ErrorCode::aliasing);
}
