// The launch itself, the device check, and gather by position map.
#include <kvmeld/cuda/gather.cuh>

#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/exec.hpp>

#include "cuda/device_cache.cuh"
#include "support/lane_work.hpp"

namespace {

using kvmeld::ErrorCode;
using test::Layout;
using test::Tables;
using test::TestCache;

}  // namespace

TEST_CASE("this device computes as the host does") {
  const kvmeld::Status status = kvmeld::gpu::check_device();
  INFO(status.message());
  CHECK(status.ok());
  CHECK(kvmeld::gpu::check_device().ok());
}

TEST_CASE("a warp joins its lanes as the lane form does") {
  const std::int64_t rows = GENERATE(1, 3, 1000);
  const int channels = GENERATE(1, 31, 32, 33, 257);
  std::vector<float> values(static_cast<std::size_t>(rows * channels));
  test::Random random(5);
  for (float& x : values) x = random.value() * random.value();
  std::vector<float> expected(static_cast<std::size_t>(rows)), got(expected.size());
  REQUIRE(
      kvmeld::exec::lanes.bulk(rows, test::RowSum{values.data(), expected.data(), channels}).ok());
  const test::DeviceBytes in(values.size() * sizeof(float)), out(got.size() * sizeof(float));
  in.upload(values.data());
  const test::TestStream stream;
  const test::RowSum work{reinterpret_cast<const float*>(in.data()),
                          reinterpret_cast<float*>(out.data()), channels};
  REQUIRE(stream.get().bulk(0, work).ok());
  REQUIRE(stream.get().bulk(rows, work).ok());
  stream.wait();
  out.download(got.data());
  CHECK(got == expected);
}

TEST_CASE("a warp joins in the tree 16, 8, 4, 2, 1, and every lane gets the total") {
  constexpr std::int64_t rows = 5;
  std::vector<std::uint64_t> expected(rows * 32), got(rows * 32);
  REQUIRE(kvmeld::exec::lanes.bulk(rows, test::Bracket{expected.data()}).ok());
  const test::DeviceBytes out(got.size() * sizeof(got[0]));
  const test::TestStream stream;
  REQUIRE(
      stream.get().bulk(rows, test::Bracket{reinterpret_cast<std::uint64_t*>(out.data())}).ok());
  stream.wait();
  out.download(got.data());
  CHECK(got == expected);
}

TEST_CASE("a device finds the nearest anchors of a pool's version that the host finds") {
  constexpr std::size_t count = 1000, asked = 7;
  test::Random random(3);
  std::vector<std::uint32_t> low(count), high(count, 0);
  std::vector<std::int32_t> tokens(count), lengths(asked);
  std::vector<std::uint64_t> queries(asked);
  for (std::uint32_t& s : low) s = static_cast<std::uint32_t>(random.below(1 << 16));
  for (std::int32_t& t : tokens) t = static_cast<std::int32_t>(random.below(9));
  for (std::int32_t& t : lengths) t = static_cast<std::int32_t>(random.below(10));
  for (std::uint64_t& q : queries) q = random.below(1 << 16);
  std::vector<kvmeld::anchors::NearestAnchor> expected(asked), got(asked);
  const kvmeld::anchors::AnchorPoolRef host{{low.data(), high.data(), count}, tokens.data(), 1};
  REQUIRE(kvmeld::exec::lanes
              .bulk(asked, kvmeld::anchors::FindNearestAnchor{host, queries.data(), lengths.data(),
                                                              3, expected.data()})
              .ok());
  const test::DeviceBytes l(4 * count), h(4 * count), t(4 * count), q(8 * asked), n(4 * asked),
      out(sizeof(got[0]) * asked);
  l.upload(low.data());
  h.upload(high.data());
  t.upload(tokens.data());
  q.upload(queries.data());
  n.upload(lengths.data());
  const auto words = [](const test::DeviceBytes& bytes) {
    return reinterpret_cast<const std::uint32_t*>(bytes.data());
  };
  const kvmeld::anchors::FindNearestAnchor work{
      {{words(l), words(h), count}, reinterpret_cast<const std::int32_t*>(t.data()), 1},
      reinterpret_cast<const std::uint64_t*>(q.data()),
      reinterpret_cast<const std::int32_t*>(n.data()),
      3,
      reinterpret_cast<kvmeld::anchors::NearestAnchor*>(out.data())};
  const test::TestStream stream;
  REQUIRE(stream.get().bulk(asked, work).ok());
  stream.wait();
  out.download(got.data());
  CHECK(got == expected);
}

TEST_CASE("a launch that CUDA refuses says so in CUDA's words") {
  int other_device = 0;
  REQUIRE(cudaGetDeviceCount(&other_device) == cudaSuccess);
  // the one way to be refused without breaking the context: a stream of another device
  if (other_device < 2) return test::skip("one CUDA device, where two are needed");
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  const test::TestStream stream;
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  const kvmeld::Status status = stream.get().bulk(1, test::RowSum{nullptr, nullptr, 0});
  CHECK(status.code() == ErrorCode::engine_failure);
  CHECK(status.message().find("cudaError") != std::string::npos);
}

TEST_CASE("gather by position map: the host's bytes, holes left and reported") {
  const auto type = GENERATE(kvmeld::ElementType::f16, kvmeld::ElementType::q8_0);
  const Tables tables = GENERATE(Tables::host, Tables::device);
  const auto g = test::geometry({.type = type, .heads = 3, .channels = 64, .value_channels = 32});
  const std::vector<std::int32_t> map{4, 5, 6, -1, 0, 0, 8, -1, 2};
  const std::vector<std::int64_t> wide(map.begin(), map.end());
  for (const Layout from : test::all_layouts) {
    TestCache in(g, 10, from);
    in.fill(7);
    for (const Layout to : test::all_layouts) {
      test::DeviceCache device_in(in, tables);
      TestCache expected(g, 10, to), untouched(g, 10, to);
      const auto host_report = kvmeld::gather(kvmeld::exec::seq, in.ref(), map, expected.out());
      REQUIRE(host_report.ok());
      test::DeviceCache narrow_out(untouched, tables), wide_out(untouched, tables);
      std::vector<std::int32_t> passing = map;
      const test::TestStream stream;
      const std::size_t bytes =
          kvmeld::gpu::gather_workspace_bytes(device_in.out(), map.size(), narrow_out.out());
      const test::DeviceBytes first(bytes), second(bytes);
      const auto report =
          kvmeld::gather(stream.get(), device_in.out(), passing, narrow_out.out(), first.span());
      INFO(report.status().message());
      REQUIRE(report.ok());
      CHECK(report->holes == host_report->holes);
      REQUIRE(
          kvmeld::gather(stream.get(), device_in.out(), wide, wide_out.out(), second.span()).ok());
      for (test::DeviceCache* cache : {&device_in, &narrow_out, &wide_out}) cache->spoil_tables();
      passing.assign(passing.size(), 9);
      stream.wait();
      CHECK(narrow_out.download() == expected.buffers());
      CHECK(wide_out.download() == expected.buffers());
    }
  }
}

TEST_CASE("gather refuses in place, a map out of range and host memory, and launches nothing") {
  const auto g = test::geometry();
  TestCache cache(g, 4, Layout::slot_list), other(g, 4);
  cache.fill(1);
  const test::DeviceCache host_tables(cache, Tables::host), device_tables(cache, Tables::device),
      out(other, Tables::host);
  const test::TestStream stream;
  const test::DeviceBytes workspace(std::size_t{1} << 20);
  const auto code = [&](const kvmeld::KvCacheRef& from, const std::vector<std::int32_t>& map,
                        const kvmeld::MutableKvCacheRef& to) {
    return kvmeld::gather(stream.get(), from, map, to, workspace.span()).status().code();
  };
  CHECK(code(host_tables.out(), {1, 0}, host_tables.out()) == ErrorCode::aliasing);
  CHECK(code(device_tables.out(), {1, 0}, device_tables.out()) == ErrorCode::aliasing);
  CHECK(code(host_tables.out(), {4}, out.out()) == ErrorCode::invalid_argument);
  CHECK(code(cache.ref(), {0}, out.out()) == ErrorCode::memory_space);
  CHECK(code(cache.ref().in(kvmeld::MemorySpace::device), {0}, out.out()) ==
        ErrorCode::memory_space);
  CHECK(code(host_tables.out(), {0}, out.out().in(kvmeld::MemorySpace::host)) ==
        ErrorCode::memory_space);
  CHECK(kvmeld::gather(kvmeld::exec::seq, host_tables.out(), std::vector<std::int32_t>{0},
                       other.out())
            .status()
            .code() == ErrorCode::memory_space);
  CHECK(code(host_tables.out(), {0, 0, 0, 0, 0}, out.out()) == ErrorCode::output_too_small);
  stream.wait();
  CHECK(out.download() == other.buffers());
}
