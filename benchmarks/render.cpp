// Rendering against the speed of memory: concatenation and rotation against memcpy, means against
// the triad a[i] = b[i] + s * c[i], threads against one thread.

#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using kvmeld::ElementType;

// Half of the bytes are keys, and all of them are rotated: gather, rotate, store.
void concat(benchmark::State& state, ElementType type, kvmeld::RopePairing pairing, int agents,
            std::int64_t mebibytes) {
  const auto geometry = bench::small_model(type, pairing);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry) / agents;
  auto render =
      bench::rendering(bench::agents(geometry, agents, tokens), geometry, kvmeld::merger());
  bench::Copy copy(render.plan.bytes());
  bench::paired(
      state, 2 * render.plan.bytes(), [&] { render.run(kvmeld::exec::seq); },
      2 * render.plan.bytes(), [&] { copy(); });
}

void mean(benchmark::State& state, ElementType type, int agents, std::int64_t mebibytes) {
  const auto geometry = bench::plain_layer(type);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  auto render = bench::rendering(bench::agents(geometry, agents, tokens), geometry,
                                 kvmeld::merger(kvmeld::Aligner{kvmeld::TokenMatch{}}));
  const auto n = static_cast<std::size_t>(render.plan.bytes() / 4);
  std::vector<float> a(n), b(n, 1.0F), c(n, 2.0F);
  const auto triad = [&] {
    float* const x = a.data();
    const float* const y = b.data();
    const float* const z = c.data();
    for (std::size_t i = 0; i < n; ++i) x[i] = y[i] + 3.0F * z[i];
  };
  bench::paired(
      state, (agents + 1) * render.plan.bytes(), [&] { render.run(kvmeld::exec::seq); },
      3 * render.plan.bytes(), triad);
}

// One shift over rows of 128 channels, without the plan around it.
void rotate(benchmark::State& state, ElementType type, kvmeld::RopePairing pairing,
            std::int64_t mebibytes) {
  const auto rope = kvmeld::RopeSpec::rotary(128, 10000.0, pairing);
  const std::vector<std::int64_t> shifts{0, 37};
  const auto table = kvmeld::RopeTable::build(rope, shifts, 0);
  if (!table) return state.SkipWithError("no table");
  const std::int64_t row = kvmeld::byte_size(type, 128);
  const std::int64_t rows = mebibytes * bench::mebibyte / row;
  bench::Copy copy(rows * row);
  std::vector<std::byte> in(copy.from.size()), out(in.size());
  bench::fill(in, 1);
  const kvmeld::extend::Rotation rotation{table->row(1), 128, 0, 128, pairing};
  const auto work = [&] {
    kvmeld::detail::rotate_stored_rows(type, kvmeld::best_isa(), rotation, in.data(), row,
                                       out.data(), row, rows);
  };
  bench::paired(state, 2 * rows * row, work, 2 * rows * row, [&] { copy(); });
}

// The ways to write past the caches against memcpy, which decides by itself: what the choice for a
// processor stands on.
void stream(benchmark::State& state, [[maybe_unused]] kvmeld::exec::StreamWay way,
            std::int64_t mebibytes) {
  bench::Copy copy(mebibytes * bench::mebibyte);
  std::vector<std::byte> out(copy.to.size() + 64);
  std::byte* const to = out.data() + (64 - reinterpret_cast<std::uintptr_t>(out.data()) % 64) % 64;
  const auto work = [&] {
#if KVMELD_X86_DISPATCH
    using namespace kvmeld::detail;
    way == kvmeld::exec::StreamWay::one_page
        ? stream_one_page(to, copy.from.data(), copy.from.size())
        : stream_four_pages(to, copy.from.data(), copy.from.size());
    stream_fence();
#else
    std::memcpy(to, copy.from.data(), copy.from.size());
#endif
  };
  const std::int64_t bytes = 2 * mebibytes * bench::mebibyte;
  bench::paired(state, bytes, work, bytes, [&] { copy(); });
}

void threads(benchmark::State& state, std::size_t count) {
  const auto geometry = bench::small_model(ElementType::f16);
  auto render = bench::rendering(bench::agents(geometry, 4, 512), geometry, kvmeld::merger());
  const auto exec = kvmeld::exec::threads(count);
  const std::int64_t bytes = 2 * render.plan.bytes();
  bench::paired(
      state, bytes, [&] { render.run(exec); }, bytes, [&] { render.run(kvmeld::exec::seq); });
}

const bool registered = [] {
  using bench::add;
  using bench::mib;
  using bench::name;
  using kvmeld::RopePairing;
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32}) {
    const std::string_view dtype = kvmeld::to_string(type);
    for (const std::int64_t size : {3, 12, 48, 192}) {
      add(name({"render/concat/", dtype, mib(size), "/agents:4"}), concat, type,
          RopePairing::half_split, 4, size);
    }
    add(name({"render/concat/", dtype, mib(12), "/agents:2"}), concat, type,
        RopePairing::half_split, 2, std::int64_t{12});
    add(name({"render/concat/", dtype, mib(12), "/agents:16"}), concat, type,
        RopePairing::half_split, 16, std::int64_t{12});
    add(name({"render/concat_interleaved/", dtype, mib(12), "/agents:4"}), concat, type,
        RopePairing::interleaved, 4, std::int64_t{12});
    for (const std::int64_t size : {1, 4, 16})
      add(name({"render/mean/", dtype, mib(size), "/agents:3"}), mean, type, 3, size);
    add(name({"render/mean/", dtype, mib(16), "/agents:8"}), mean, type, 8, std::int64_t{16});
    for (const std::int64_t size : {1, 16}) {
      add(name({"rotate/half_split/", dtype, mib(size)}), rotate, type, RopePairing::half_split,
          size);
      add(name({"rotate/interleaved/", dtype, mib(size)}), rotate, type, RopePairing::interleaved,
          size);
    }
  }
  for (const auto way : {kvmeld::exec::StreamWay::one_page, kvmeld::exec::StreamWay::four_pages}) {
    if (way == kvmeld::exec::StreamWay::one_page && kvmeld::best_isa() == kvmeld::Isa::baseline)
      continue;
    for (const std::int64_t size : {6, 12, 48, 192})
      add(name({"stream/", to_string(way), mib(size)}), stream, way, size);
  }
  const std::size_t cores = (std::max)(1U, std::thread::hardware_concurrency());
  for (std::size_t count = 1; count <= cores; count *= 2) {
    add(name({"threads/concat/f16/threads:", std::to_string(count)}), threads, count);
  }
  return true;
}();

}  // namespace
