// The policies that compute before or beside the rows: projection, attention, gates, learned
// weights, matches by edits and by neighbours, selections by keys. One digest, whatever built and
// ran them; tests/identity.cmake compares the builds.
#include <cmath>
#include <cstdio>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/policies/attention.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/select.hpp>

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

// Every aligner that reads ids or keys, behind one type: a plan is compiled once a fuser and not
// once a pair.
struct AnyAligner {
  static constexpr bool reproducible = true;
  int which = 0;
  kvmeld::Projection projection{};
  kvmeld::Attention attention{};

  [[nodiscard]] kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source> ordered,
                                                        std::int64_t first_position) const {
    if (which == 0)
      return kvmeld::TokenMatch{.mode = kvmeld::MatchMode::index}.align(ordered, first_position);
    if (which == 1)
      return kvmeld::TokenMatch{.mode = kvmeld::MatchMode::edit_distance}.align(ordered,
                                                                                first_position);
    if (which == 2)
      return kvmeld::TokenMatch{.mode = kvmeld::MatchMode::neighbours, .threshold = 0.1F}.align(
          ordered, first_position);
    return attention.align(ordered, first_position);
  }
  [[nodiscard]] kvmeld::Status accepts(const kvmeld::Geometry& from,
                                       const kvmeld::Geometry& to) const {
    return projection.accepts(from, to);
  }
  [[nodiscard]] kvmeld::Result<kvmeld::Payload> transform(const kvmeld::Fragment& fragment,
                                                          std::size_t payload,
                                                          const kvmeld::Geometry& to) const {
    return projection.transform(fragment, payload, to);
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.value(which);
    projection.digest(hasher);
    attention.digest(hasher);
  }
};

// In the same way: whole fragments, their last tokens, or those whose keys say most.
struct AnySelect {
  static constexpr bool reproducible = true;
  int which = 0;

  [[nodiscard]] kvmeld::Result<kvmeld::TokenSet> select(const kvmeld::Source& source) const {
    if (which == 1) return kvmeld::SelectKeyFrames{.budget = 3, .queries = 3}.select(source);
    if (which == 2) return kvmeld::SelectMedoids{.budget = 2}.select(source);
    if (which == 3) return kvmeld::SelectLast{.tokens = 2}.select(source);
    return kvmeld::SelectAll{}.select(source);
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.value(which); }
};

// And means by the weights of agents, by confidence, or by what a network makes of a fragment.
struct AnyWeights {
  static constexpr bool reproducible = true;
  static constexpr kvmeld::MetadataFields metadata =
      kvmeld::MetadataFields::confidence | kvmeld::MetadataFields::provenance;
  int which = 0;
  kvmeld::PredictedWeights predicted{};
  kvmeld::AgentWeights agents{};

  [[nodiscard]] kvmeld::Result<float> weight(const kvmeld::Source& source) const {
    if (which == 1) return predicted.weight(source);
    if (which == 2) return agents.weight(source);
    return kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}.weight(source);
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.value(which);
    predicted.digest(hasher);
    agents.digest(hasher);
  }
};

// Context vectors of each of two caches, and of both together; then the states of the two merged.
void attend_all(test::Sink& sink, ElementType type) {
  const auto g =
      test::geometry({.type = type, .heads = 2, .channels = 48, .first = 6, .rotary = 34});
  std::int64_t heads = 0;
  for (const auto& layer : g->layers) heads += layer.planes[0].heads;
  const std::int64_t count = 5, channels = g->layers[0].planes[1].channels;
  const auto size = static_cast<std::size_t>(count * heads);
  const std::vector<float> queries = numbers(size * 48, 11);
  std::vector<float> outputs[3], lse[3];
  std::vector<kvmeld::attention::MutableAttentionState<kvmeld::attention::LseNatural>> states;
  for (int i = 0; i < 3; ++i) {
    outputs[i].resize(size * static_cast<std::size_t>(channels));
    lse[i].resize(size);
    states.push_back({outputs[i], lse[i], count, heads, channels});
  }
  test::TestCache first(g, 70), second(g, 9);
  first.fill(21);
  second.fill(22);
  const auto early = test::gapped_positions(70, 3), late = test::gapped_positions(9, 400);
  const kvmeld::AttentionQueries asked{queries, count, kvmeld::QueryFrame::pre_rope,
                                       {},      0.0F,  1.0F};
  const kvmeld::AttendSource both[] = {{first.ref(), early, {}}, {second.ref(), late, {}}};
  require(attend(asked, first.ref(), states[0], early).ok() &&
              attend(asked, second.ref(), states[1], late).ok() &&
              attend(asked, both, states[2]).ok(),
          "attend failed");
  const auto add = [&](int i) {
    sink.bytes(outputs[i].data(), outputs[i].size() * sizeof(float));
    sink.bytes(lse[i].data(), lse[i].size() * sizeof(float));
  };
  for (int i = 0; i < 3; ++i) add(i);
  require(merge_attention_states(states[0], states[1], states[0]).ok(), "merge failed");
  add(0);
  for (std::size_t i = 0; i < outputs[0].size(); ++i)
    require(std::fabs(outputs[0][i] - outputs[2][i]) < 1e-5F, "merged states differ from one call");
}

// Five fragments of a few ids that differ here and there; one of another model, which the map leads
// to the target's.
void render_all(test::Sink& sink, ElementType type, bool rules) {
  const auto g =
      test::geometry({.type = type, .heads = 2, .channels = 48, .first = 6, .rotary = 34});
  auto other = test::geometry({.type = type,
                               .layers = 3,
                               .heads = 3,
                               .channels = 32,
                               .pairing = kvmeld::RopePairing::interleaved});
  other->model = "source model";
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 5; ++s) {
    // rules have a least number of contributions
    const auto n = static_cast<std::int64_t>(rules ? 4 : 3 + s);
    std::vector<kvmeld::TokenId> ids;
    for (std::int64_t t = 0; t < n; ++t)
      ids.push_back(
          static_cast<kvmeld::TokenId>(t % 3 == static_cast<std::int64_t>(s) ? 50 + s : 10 + t));
    const auto positions = test::gapped_positions(n, static_cast<std::int64_t>(7 * s));
    const auto span =
        test::sealed(s == 3 ? other : g, n, 90 + s, {.tokens = ids, .positions = positions});
    require(span.fragment.valid() &&
                set.insert(span.fragment, {s, s}, 0.3F + 0.1F * static_cast<float>(s)).ok(),
            "seal failed");
  }
  const auto map = kvmeld::ProjectionMap::make(
      test::random_parts(*other, *g, test::Sharing::layer, 2, 0, true, 7));
  require(map.ok(), "map failed");
  AnyAligner aligner{0, {.map = *map}, {}};
  const std::int64_t queries = 2;
  aligner.attention = {.queries = std::make_shared<const std::vector<float>>(
                           numbers(static_cast<std::size_t>(queries) * 2 * 2 * 48, 5)),
                       .count = queries};
  const kvmeld::GateShape shape{.key_channels = 48, .value_channels = 48, .hidden = 6};
  const auto gate =
      kvmeld::GateWeights::make(shape, numbers(static_cast<std::size_t>(shape.size()), 6));
  require(gate.ok(), "gate failed");
  kvmeld::GateShape by_channel = shape;
  by_channel.kind = kvmeld::GateKind::channel;
  const auto channel_gate = kvmeld::GateWeights::make(
      by_channel, numbers(static_cast<std::size_t>(by_channel.size()), 8));
  require(channel_gate.ok(), "gate failed");
  kvmeld::Target target{*g};
  target.first_position = 131;
  using kvmeld::Aligner, kvmeld::Fuser, kvmeld::merger;
  const auto predictor = kvmeld::WeightPredictor::make(
      4, 3, numbers(static_cast<std::size_t>(kvmeld::WeightPredictor::size(4, 3)), 9));
  require(predictor.ok(), "predictor failed");
  AnyWeights weights{
      0, {.predictor = *predictor}, {.weights = {{1, 0.7F}, {3, 0.1F}}, .otherwise = 0.9F}};
  AnySelect select;
  const auto mean = [&] {
    render(sink, set, merger(select, kvmeld::ById{}, Aligner{aligner}, Fuser{weights}), target,
           Layout::canonical);
  };
  for (weights.which = 1; weights.which < 3; ++weights.which) mean();
  weights.which = 0;
  for (select.which = 1; select.which < 4; ++select.which) mean();
  select.which = 0;
  const auto low_rank = kvmeld::ProjectionMap::make(
      test::random_parts(*other, *g, test::Sharing::head, 2, 5, true, 10));
  require(low_rank.ok(), "map failed");
  aligner.projection.map = *low_rank;
  mean();
  aligner.projection.map = *map;
  for (aligner.which = 0; aligner.which < 4; ++aligner.which) {
    mean();
    if (aligner.which == 3) continue;
    render(sink, set, merger(kvmeld::ById{}, Aligner{aligner}, Fuser{kvmeld::NormPreservingMean{}}),
           target, Layout::paged);
    if (aligner.which != 0) continue;
    const auto fused = [&](const auto& fuser) {
      render(sink, set, merger(kvmeld::ById{}, Aligner{aligner}, Fuser{fuser}), target,
             Layout::canonical);
    };
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
  for (const ElementType type : {ElementType::f32, ElementType::bf16})
    render_all(sink, type, false);
  render_all(sink, ElementType::bf16, true);
  for (const ElementType type : {ElementType::f32, ElementType::f16, ElementType::bf16})
    attend_all(sink, type);
  std::printf("%s\n", sink.hash.digest().hex().c_str());
}
