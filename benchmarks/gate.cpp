// Gates against Eigen's product of the same floating-point operations: rows · first layer, and for
// gates per channel the second. Ours is all of a gate: means, both layers, tanh, softmax and the
// gated sum; rows come in as a render hands them over.

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>

#include "caches.hpp"
#include "eigen_products.hpp"
#include "paired.hpp"

namespace {

using kvmeld::GateKind;
using kvmeld::GateShape;
using kvmeld::GateWeights;

std::shared_ptr<const GateWeights> weights_of(const GateShape& shape) {
  std::vector<float> parameters(static_cast<std::size_t>(shape.size()));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    parameters[i] = static_cast<float>(static_cast<int>(i * 2654435761U % 2001) - 1000) * 1e-4F;
  auto made = GateWeights::make(shape, parameters);
  if (!made) std::abort();
  return *std::move(made);
}

// The baseline: all rows of all heads at once, so that Eigen's blocks are as large as it likes.
struct Network {
  std::ptrdiff_t rows, channels, hidden, outputs;
  std::vector<float> in, first, units, second, logits;

  Network(std::ptrdiff_t row_count, const GateShape& shape)
      : rows(row_count),
        channels(shape.key_channels),
        hidden(shape.hidden),
        outputs(shape.kind == GateKind::token ? 0 : channels),
        in(static_cast<std::size_t>(rows * 2 * channels), 0.5F),
        first(static_cast<std::size_t>(2 * channels * hidden), 0.25F),
        units(static_cast<std::size_t>(rows * hidden)),
        second(static_cast<std::size_t>(hidden * outputs), 0.25F),
        logits(static_cast<std::size_t>(rows * outputs)) {}
  void operator()() {
    bench::eigen_product(in.data(), first.data(), units.data(), rows, 2 * channels, hidden);
    if (outputs > 0)
      bench::eigen_product(units.data(), second.data(), logits.data(), rows, hidden, outputs);
  }
  [[nodiscard]] std::int64_t flops() const { return 2 * rows * hidden * (2 * channels + outputs); }
};

template <class F>
void gate(benchmark::State& state, GateShape shape, int agents, std::ptrdiff_t heads) {
  const auto weights = weights_of(shape);
  const auto mix = F{weights}.mixing();
  const std::ptrdiff_t width = shape.key_channels;
  std::vector<float> values(static_cast<std::size_t>(heads * agents * width + 16));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(static_cast<int>(i * 40503U % 4001) - 2000) * 1e-3F;
  float* const begin =
      values.data() + (64 - reinterpret_cast<std::uintptr_t>(values.data()) % 64) % 64 / 4;
  const std::vector<float> ones(64, 1.0F);
  alignas(64) float out[1024];
  Network network(heads * agents, shape);
  const auto ours = [&] {
    for (std::ptrdiff_t h = 0; h < heads; ++h) {
      const kvmeld::HeadRows rows{
          begin + h * agents * width,       width, ones.data(), agents,
          static_cast<std::int32_t>(width), 0,     0,           kvmeld::Plane::key};
      mix.mix(kvmeld::best_isa(), rows, out);
      benchmark::DoNotOptimize(out[0]);
    }
  };
  bench::paired_with_setup(
      state, network.flops(), [] {}, ours, [&] { network(); });
  state.counters["best_GFLOPS"] =
      static_cast<double>(network.flops()) / state.counters["best_us"] * 1e-3;
}

// A whole render: loads, turns and stores too.
template <class F>
void gate_render(benchmark::State& state, const F& fuser, GateShape shape, kvmeld::ElementType type,
                 int agents, std::int64_t mebibytes) {
  const auto geometry = bench::small_model(type);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  const auto set = bench::agents(geometry, agents, tokens);
  auto render = bench::rendering(
      set, geometry,
      kvmeld::merger(kvmeld::ById{}, kvmeld::Aligner{kvmeld::TokenMatch{}}, kvmeld::Fuser{fuser}));
  Network network(tokens * 24 * 2 * 2 * agents, shape);
  bench::paired_with_setup(
      state, network.flops(), [] {}, [&] { render.run(kvmeld::exec::seq); }, [&] { network(); });
}

const bool registered = [] {
  using bench::add;
  using bench::name;
  const auto shape = [](GateKind kind, std::int32_t channels) {
    return GateShape{
        .kind = kind, .key_channels = channels, .value_channels = channels, .hidden = 64};
  };
  for (const std::int32_t channels : {64, 128}) {
    for (const int agents : {2, 3, 5, 8}) {
      const std::string size =
          name({"/channels:", std::to_string(channels), "/agents:", std::to_string(agents)});
      add(name({"fuse/gate/token", size}), gate<kvmeld::Gated>, shape(GateKind::token, channels),
          agents, std::ptrdiff_t{512});
      add(name({"fuse/gate/channel", size}), gate<kvmeld::GatedChannels>,
          shape(GateKind::channel, channels), agents, std::ptrdiff_t{512});
    }
  }
  add("fuse/gate/render/bf16/MiB:1/agents:5", gate_render<kvmeld::Gated>,
      kvmeld::Gated{weights_of(shape(GateKind::token, 64))}, shape(GateKind::token, 64),
      kvmeld::ElementType::bf16, 5, std::int64_t{1});
  return true;
}();

}  // namespace
