// Renders on the device: the bytes of exec::seq, for every merger, layout and element type, a
// user's own fuser included.
#include <kvmeld/cuda/render.cuh>
#include <kvmeld/replica/session_memory.hpp>

#include <kvmeld/policies/attention.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>

#include "cuda/device_cache.cuh"
#include "support/lane_work.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using test::Layout;
using test::Tables;
using test::TestCache;

kvmeld::Target at(const std::shared_ptr<const kvmeld::Geometry>& g,
                  std::int64_t first_position = 7) {
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = first_position;
  return target;
}

kvmeld::FragmentSet spans(const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t tokens) {
  std::vector<test::Sealed> out;
  for (const std::int64_t n : {std::int64_t{1}, tokens - 1, tokens}) {
    const auto positions = test::gapped_positions(n, n);
    const auto ids = test::token_ids(n);
    out.push_back(
        test::sealed(g, n, static_cast<std::uint64_t>(n), {.tokens = ids, .positions = positions}));
  }
  return test::set_of(out);
}

template <class M>
void compare(const kvmeld::FragmentSet& set, const M& merger,
             const std::shared_ptr<const kvmeld::Geometry>& g, Layout layout, Tables tables) {
  const auto plan = kvmeld::plan(set, merger, at(g));
  INFO(plan.status().message());
  REQUIRE(plan.ok());
  const auto expected = test::run_in(kvmeld::exec::seq, *plan, layout);
  TestCache host(g, plan->tokens(), layout);
  test::DeviceCache out(host, tables);
  const test::TestStream stream;
  const test::DeviceBytes workspace(kvmeld::gpu::workspace_bytes(*plan, out.out()));
  const auto report = kvmeld::run(stream.get(), *plan, workspace.span(), out.out());
  INFO(report.status().message());
  REQUIRE(report.ok());
  CHECK(report->render_id == plan->render_id());
  out.spoil_tables();
  stream.wait();
  CHECK(out.download() == expected->buffers());
}

}  // namespace

TEST_CASE("every merger renders the host's bytes on the device") {
  const auto type =
      GENERATE(ElementType::f64, ElementType::f32, ElementType::f16, ElementType::bf16,
               ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::q8_0);
  const Layout layout =
      GENERATE(Layout::canonical, Layout::head_first, Layout::paged, Layout::slot_list,
               Layout::transposed_values, Layout::split_channels);
  const Tables tables = GENERATE(Tables::host, Tables::device);
  CAPTURE(kvmeld::to_string(type), static_cast<int>(layout), static_cast<int>(tables));
  const auto g = test::geometry(
      {.type = type, .heads = 3, .channels = 96, .value_channels = 64, .first = 8, .rotary = 72});
  const auto set = spans(g, 9);
  const Aligner match{kvmeld::TokenMatch{}};
  compare(set, kvmeld::merger(ById{}), g, layout, tables);
  compare(set, kvmeld::merger(ById{}, match, Fuser{kvmeld::WeightedMean{}}), g, layout, tables);
  compare(set, kvmeld::merger(ById{}, match, Fuser{kvmeld::Sum{}}), g, layout, tables);
  compare(set, kvmeld::merger(ById{}, match, Fuser{kvmeld::Max{}}), g, layout, tables);
  compare(set, kvmeld::merger(ById{}, match, Fuser{test::SignedPower{}}), g, layout, tables);
}

TEST_CASE("crowds of contributions are joined by the host's tree on the device") {
  const std::int64_t count = GENERATE(2, 64, 65, 400);
  const auto g = test::geometry({.layers = 1,
                                 .channels = 96,
                                 .first = 8,
                                 .rotary = 80,
                                 .pairing = kvmeld::RopePairing::interleaved});
  const test::Given given{std::make_shared<const kvmeld::Alignment>(test::crowd(count, 40))};
  const auto positions = test::gapped_positions(40, 1);
  const auto set = test::set_of({test::sealed(g, 40, 1, {.positions = positions}),
                                 test::sealed(g, 40, 2, {.positions = positions})});
  compare(set, kvmeld::merger(ById{}, Aligner{given}, Fuser{kvmeld::WeightedMean{}}), g,
          Layout::paged, Tables::host);
  compare(set, kvmeld::merger(ById{}, Aligner{given}, Fuser{kvmeld::Max{}}), g, Layout::paged,
          Tables::host);
}

TEST_CASE(
    "gates with their parameters, norm-preserving means and weights by head render on the device") {
  const auto type = GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0);
  CAPTURE(kvmeld::to_string(type));
  const auto g =
      test::geometry({.type = type, .heads = 2, .channels = 64, .first = 6, .rotary = 34});
  const auto set = spans(g, 5);
  const auto numbers = [](std::size_t n) {
    test::Random random(n);
    std::vector<float> out(n);
    for (float& x : out) x = random.value() / 8;
    return out;
  };
  kvmeld::GateShape shape{.key_channels = 64, .value_channels = 64, .hidden = 5};
  const auto gate =
      kvmeld::GateWeights::make(shape, numbers(static_cast<std::size_t>(shape.size())));
  REQUIRE(gate.ok());
  const Aligner match{kvmeld::TokenMatch{}};
  compare(set, kvmeld::merger(ById{}, match, Fuser{kvmeld::Gated{*gate}}), g, Layout::paged,
          Tables::host);
  compare(set, kvmeld::merger(ById{}, match, Fuser{kvmeld::NormPreservingMean{}}), g,
          Layout::canonical, Tables::host);
  // Weights whose products are rounded: a compiler that joined them with the sums of gates would
  // show.
  auto unequal = test::crowd(4, 5);
  for (std::size_t i = 0; i < unequal.groups[0].contributions.size(); ++i)
    unequal.groups[0].contributions[i].weight = i % 2 == 0 ? 0.3F : 0.7F;
  const Aligner given{test::Given{std::make_shared<const kvmeld::Alignment>(unequal)}};
  const auto positions = test::gapped_positions(5, 3);
  const auto pair = test::set_of({test::sealed(g, 5, 1, {.positions = positions}),
                                  test::sealed(g, 5, 2, {.positions = positions})});
  compare(pair, kvmeld::merger(ById{}, given, Fuser{kvmeld::Gated{*gate}}), g, Layout::canonical,
          Tables::host);
  shape.kind = kvmeld::GateKind::channel;
  const auto channels =
      kvmeld::GateWeights::make(shape, numbers(static_cast<std::size_t>(shape.size())));
  REQUIRE(channels.ok());
  compare(pair, kvmeld::merger(ById{}, given, Fuser{kvmeld::GatedChannels{*channels}}), g,
          Layout::canonical, Tables::host);
  kvmeld::Attention attention{
      .queries = std::make_shared<const std::vector<float>>(numbers(3 * 2 * 2 * 64)), .count = 3};
  compare(set, kvmeld::merger(ById{}, Aligner{attention}), g, Layout::paged, Tables::host);
}

TEST_CASE("resident payloads, and render with a workspace from the stream's pool") {
  const auto g = test::geometry({.type = ElementType::f16});
  const auto set = spans(g, 300);
  const auto merger = kvmeld::merger(ById{});
  const auto plan = kvmeld::plan(set, merger, at(g));
  REQUIRE(plan.ok());
  const auto expected = test::run_in(kvmeld::exec::seq, *plan, Layout::canonical);
  std::vector<test::DeviceBytes> payloads;
  std::vector<kvmeld::gpu::ResidentPayload> resident;
  for (const auto& entry : set.entries()) {
    const kvmeld::Payload& payload = entry.fragment.payloads()[0];
    payloads.emplace_back(payload.byte_count);
    payloads.back().upload(payload.bytes.get());
    resident.push_back({entry.fragment.id(), 0, payloads.back().data()});
  }
  TestCache host(g, plan->tokens());
  const test::DeviceCache first(host, Tables::host), second(host, Tables::host);
  const test::TestStream stream;
  const std::size_t bytes = kvmeld::gpu::workspace_bytes(*plan, first.out(), {resident});
  CHECK(bytes < payloads[0].span().size() + payloads[1].span().size());
  const test::DeviceBytes workspace(bytes + 3);
  REQUIRE(
      kvmeld::run(stream.get(), *plan, workspace.span().subspan(3), first.out(), {resident}).ok());
  REQUIRE(kvmeld::render(stream.get(), set, merger, second.out(), at(g)).ok());
  stream.wait();
  CHECK(first.download() == expected->buffers());
  CHECK(second.download() == expected->buffers());
}

namespace {

/// Device memory that a worker renders into.
struct DeviceBacking {
  struct Buffer {
    TestCache host;
    test::DeviceCache device;

    Buffer(const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t tokens)
        : host(g, tokens), device(host, Tables::host) {}
    [[nodiscard]] const kvmeld::MutableKvCacheRef& mutable_ref() const { return device.out(); }
  };
  kvmeld::Result<std::unique_ptr<Buffer>> make(const std::shared_ptr<const kvmeld::Geometry>& g,
                                               std::span<const std::int64_t> positions,
                                               std::span<const kvmeld::TokenId>,
                                               std::unique_ptr<Buffer>) const {
    return std::make_unique<Buffer>(g, static_cast<std::int64_t>(positions.size()));
  }
};

}  // namespace

TEST_CASE("a worker renders on the device and hands out what the stream has finished") {
  const auto g = test::geometry({.type = ElementType::f16});
  const auto set = spans(g, 40);
  const auto merger = kvmeld::merger(ById{});
  const auto plan = kvmeld::plan(set, merger, at(g));
  REQUIRE(plan.ok());
  const auto expected = test::run_in(kvmeld::exec::seq, *plan, Layout::canonical);
  const test::TestStream stream;
  kvmeld::replica::RenderWorker worker(merger, DeviceBacking{}, stream.get());
  for (std::uint64_t request = 1; request <= 3; ++request) {
    REQUIRE(worker.request(set, at(g)) == request);
    REQUIRE(worker.wait_idle(60'000));
    const auto outcome = worker.take();
    REQUIRE(outcome.has_value());
    INFO(outcome->status.message());
    REQUIRE(outcome->status.ok());
    // nobody waited for the stream here
    CHECK(outcome->rendered->buffer->device.download() == expected->buffers());
    CHECK(outcome->rendered->report.render_id == plan->render_id());
  }
}

TEST_CASE("the lines of docs/cuda.md") {
  const auto g = test::geometry({.type = ElementType::bf16});
  const auto set = spans(g, 6);
  const auto merger = kvmeld::merger(ById{});
  const auto target = at(g);
  TestCache host(g, 12), expected(g, 12);
  const test::DeviceCache cache(host, Tables::host);
  const kvmeld::MutableKvCacheRef out = cache.out();
  const test::TestStream own;
  const cudaStream_t cuda_stream = own.get().get();
  std::vector<test::DeviceBytes> memory;
  const auto device_allocate = [&](std::size_t bytes) { return memory.emplace_back(bytes).data(); };
  // begin docs/cuda.md
  kvmeld::gpu::Stream stream{cuda_stream};        // yours, not owned
  auto plan = kvmeld::plan(set, merger, target);  // on the host
  REQUIRE(plan.ok());
  std::size_t bytes = kvmeld::gpu::workspace_bytes(*plan, out);
  std::byte* workspace = device_allocate(bytes);  // yours, until the stream has passed
  // enqueued; `plan` stays as long
  auto report = kvmeld::run(stream, *plan, {workspace, bytes}, out);
  // end docs/cuda.md
  REQUIRE(report.ok());
  own.wait();
  REQUIRE(kvmeld::render(kvmeld::exec::seq, set, merger, expected.out(), target).ok());
  CHECK(cache.download() == expected.buffers());
}

TEST_CASE("layers that are left out come from the host's local cache") {
  const auto g = test::geometry({.type = ElementType::f16, .layers = 3});
  const auto set = spans(g, 5);
  const auto merger = kvmeld::merger(ById{});
  kvmeld::Target target = at(g);
  TestCache local(g, 10), host(g, 10);
  local.fill(99);
  target.local = local.ref();
  target.layers.layers = {1, 0, 1};
  TestCache expected(g, 10);
  REQUIRE(kvmeld::render(kvmeld::exec::seq, set, merger, expected.out(), target).ok());
  const test::DeviceCache out(host, Tables::host), device_local(local, Tables::host);
  const test::TestStream stream;
  REQUIRE(kvmeld::render(stream.get(), set, merger, out.out(), target).ok());
  stream.wait();
  CHECK(out.download() == expected.buffers());
  target.local = device_local.out();
  CHECK(kvmeld::render(stream.get(), set, merger, out.out(), target).status().code() ==
        ErrorCode::memory_space);
  target.local = device_local.out().in(kvmeld::MemorySpace::host);  // which is not true
  CHECK(kvmeld::render(stream.get(), set, merger, out.out(), target).status().code() ==
        ErrorCode::memory_space);
}

TEST_CASE("what a device cannot do is refused with nothing launched") {
  const auto g = test::geometry();
  const auto set = spans(g, 5);
  const auto plan = kvmeld::plan(set, kvmeld::merger(ById{}), at(g));
  REQUIRE(plan.ok());
  TestCache host(g, plan->tokens()), small(g, plan->tokens() - 1);
  const test::DeviceCache out(host, Tables::host), short_out(small, Tables::host);
  const test::TestStream stream;
  const test::DeviceBytes workspace(kvmeld::gpu::workspace_bytes(*plan, out.out()));
  const auto code = [&](const kvmeld::MutableKvCacheRef& to, std::span<std::byte> memory) {
    return kvmeld::run(stream.get(), *plan, memory, to).status().code();
  };
  CHECK(code(host.out(), workspace.span()) == ErrorCode::memory_space);
  CHECK(code(host.out().in(kvmeld::MemorySpace::device), workspace.span()) ==
        ErrorCode::memory_space);
  CHECK(code(out.out().in(kvmeld::MemorySpace::host), workspace.span()) == ErrorCode::memory_space);
  std::vector<std::byte> on_host(plan->workspace_bytes());
  CHECK(kvmeld::run(kvmeld::exec::seq, *plan, on_host, out.out()).status().code() ==
        ErrorCode::memory_space);
  CHECK(code(short_out.out(), workspace.span()) == ErrorCode::output_too_small);
  CHECK(code(out.out(), workspace.span().first(100)) == ErrorCode::workspace_too_small);
  CHECK(code({}, workspace.span()) == ErrorCode::invalid_argument);
  kvmeld::MutableKvCacheRef inside = out.out();
  std::vector<kvmeld::MutablePlaneRef> planes(inside.planes().begin(), inside.planes().end());
  planes[1].data = workspace.data() + 64;
  CHECK(code({inside.shared_geometry(), planes, inside.tokens()}, workspace.span()) ==
        ErrorCode::aliasing);
  std::vector<std::int32_t> slots(static_cast<std::size_t>(plan->tokens()));
  std::iota(slots.begin(), slots.end(), 0);
  const auto with_slots = [&](std::size_t index, std::int32_t slot) {
    std::vector<kvmeld::MutablePlaneRef> listed(out.out().planes().begin(),
                                                out.out().planes().end());
    slots[index] = slot;
    for (auto& plane : listed)
      plane.slots = {.kind = kvmeld::SlotKind::slot_list_i32, .table = slots.data()};
    return code({out.out().shared_geometry(), listed, plan->tokens()}, workspace.span());
  };
  CHECK(with_slots(1, 0) == ErrorCode::aliasing);
  CHECK(with_slots(1, -1) == ErrorCode::output_too_small);
  stream.wait();
  CHECK(out.download() == host.buffers());

  REQUIRE(cudaStreamBeginCapture(stream.get().get(), cudaStreamCaptureModeRelaxed) == cudaSuccess);
  CHECK(code(out.out(), workspace.span()) == ErrorCode::unsupported);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(stream.get().get(), &graph) == cudaSuccess);
  cudaGraphDestroy(graph);
}
