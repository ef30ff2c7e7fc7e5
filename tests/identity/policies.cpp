// The policies that compute before or beside the rows: projection, attention, gates, matches by edits and by neighbours. One digest,
// whatever built and ran them; tests/identity.cmake compares the builds.
#include <cstdio>

#include <kvmeld/align/attention.hpp>
#include <kvmeld/align/attention_attend.hpp>
#include <kvmeld/align/chain.hpp>
#include <kvmeld/align/projection.hpp>
#include <kvmeld/fuse/gated.hpp>
#include <kvmeld/fuse/norm_preserving_mean.hpp>
#include <kvmeld/kvmeld.hpp>

#include "support/identity_render.hpp"
#include "support/projection_maps.hpp"

namespace {

using kvmeld::ElementType;
using test::Layout;
using test::require;

std::vector<float> numbers(std::size_t n, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<float> out(n);
  for (float& x : out) x = random.value() / 8;
  return out;
}

// Every aligner that reads ids or keys, behind one type: a plan is compiled once a fuser and not once a pair.
struct AnyAligner {
  static constexpr bool reproducible = true;
  int which = 0;
  kvmeld::Projection projection{};
  kvmeld::Attention attention{};

  [[nodiscard]] kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source> ordered, std::int64_t first_position) const {
    if (which == 0) return kvmeld::TokenMatch{.mode = kvmeld::MatchMode::index}.align(ordered, first_position);
    if (which == 1) return kvmeld::TokenMatch{.mode = kvmeld::MatchMode::edit_distance}.align(ordered, first_position);
    if (which == 2) return kvmeld::TokenMatch{.mode = kvmeld::MatchMode::neighbours, .threshold = 0.1F}.align(ordered, first_position);
    return attention.align(ordered, first_position);
  }
  [[nodiscard]] kvmeld::Status accepts(const kvmeld::Geometry& from, const kvmeld::Geometry& to) const { return projection.accepts(from, to); }
  [[nodiscard]] kvmeld::Result<kvmeld::Payload> transform(const kvmeld::Fragment& fragment, std::size_t payload, const kvmeld::Geometry& to) const {
    return projection.transform(fragment, payload, to);
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.value(which);
    projection.digest(hasher);
    attention.digest(hasher);
  }
};

// Five fragments of a few ids that differ here and there; one of another model, which the map leads to the target's.
void render_all(test::Sink& sink, ElementType type, bool rules) {
  const auto g = test::geometry({.type = type, .heads = 2, .channels = 48, .first = 6, .rotary = 34});
  auto other = test::geometry({.type = type, .layers = 3, .heads = 3, .channels = 32, .pairing = kvmeld::RopePairing::interleaved});
  other->model = "source model";
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 5; ++s) {
    const auto n = static_cast<std::int64_t>(rules ? 4 : 3 + s);  // rules have a least number of contributions
    std::vector<kvmeld::TokenId> ids;
    for (std::int64_t t = 0; t < n; ++t) ids.push_back(static_cast<kvmeld::TokenId>(t % 3 == static_cast<std::int64_t>(s) ? 50 + s : 10 + t));
    const auto positions = test::gapped_positions(n, static_cast<std::int64_t>(7 * s));
    const auto span = test::sealed(s == 3 ? other : g, n, 90 + s, {.tokens = ids, .positions = positions});
    require(span.fragment.valid() && set.insert(span.fragment, {s, s}).ok(), "seal failed");
  }
  const auto map = kvmeld::ProjectionMap::make(test::random_parts(*other, *g, test::Sharing::layer, 2, 0, true, 7));
  require(map.ok(), "map failed");
  AnyAligner aligner{0, {.map = *map}, {}};
  const std::int64_t queries = 2;
  aligner.attention = {.queries = std::make_shared<const std::vector<float>>(numbers(static_cast<std::size_t>(queries) * 2 * 2 * 48, 5)), .count = queries};
  const kvmeld::GateShape shape{.key_channels = 48, .value_channels = 48, .hidden = 6};
  const auto gate = kvmeld::GateWeights::make(shape, numbers(static_cast<std::size_t>(shape.size()), 6));
  require(gate.ok(), "gate failed");
  kvmeld::GateShape by_channel = shape;
  by_channel.kind = kvmeld::GateKind::channel;
  const auto channel_gate = kvmeld::GateWeights::make(by_channel, numbers(static_cast<std::size_t>(by_channel.size()), 8));
  require(channel_gate.ok(), "gate failed");
  kvmeld::Target target{*g};
  target.first_position = 131;
  using kvmeld::Aligner, kvmeld::Fuser, kvmeld::merger;
  for (aligner.which = 0; aligner.which < 4; ++aligner.which) {
    render(sink, set, merger(kvmeld::ById{}, Aligner{aligner}), target, Layout::canonical);
    if (aligner.which == 3) continue;
    render(sink, set, merger(kvmeld::ById{}, Aligner{aligner}, Fuser{kvmeld::NormPreservingMean{}}), target, Layout::paged);
    if (aligner.which != 0) continue;
    const auto fused = [&](const auto& fuser) { render(sink, set, merger(kvmeld::ById{}, Aligner{aligner}, Fuser{fuser}), target, Layout::canonical); };
    fused(kvmeld::Gated{*gate});
    if (!rules) continue;
    fused(kvmeld::GatedChannels{*channel_gate});
    fused(kvmeld::Cluster{.threshold = 0.2F});
    fused(kvmeld::Cluster{.k = 2, .result = kvmeld::ClusterResult::centre});
    fused(kvmeld::Medoid{});
    fused(kvmeld::MultiKrum{.f = 1, .m = 2});
    fused(kvmeld::TrimmedMean{.f = 1});
  }
}

}  // namespace

int main() {
  test::Sink sink;
  for (const ElementType type : {ElementType::f32, ElementType::bf16}) render_all(sink, type, false);
  render_all(sink, ElementType::bf16, true);
  std::printf("%s\n", sink.hash.digest().hex().c_str());
}
