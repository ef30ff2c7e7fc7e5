// Digests name every parameter: replicas whose policies differ must notice, since they would render
// different bytes.
#include <cxxabi.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <typeinfo>

#include <kvmeld/anchors/decision.hpp>
#include <kvmeld/anchors/detail/blend_rows.hpp>
#include <kvmeld/anchors/signature.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/policies/attention.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/select.hpp>

#include "support/catch.hpp"
#include "support/fields.hpp"
#include "support/projection_maps.hpp"

namespace {

using namespace kvmeld;
using test::elements;
using test::every_field;
using test::field;
using test::parts;

/// "Krum" of kvmeld::v0::Krum, "GatedBy" of kvmeld::v0::GatedBy<...>: the name as a header writes
/// it.
template <class P>
std::string name_of() {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(typeid(P).name(), nullptr, nullptr, &status);
  REQUIRE(status == 0);
  std::string name(demangled);
  std::free(demangled);
  name.resize((std::min)(name.size(), name.find('<')));
  return name.substr(name.rfind(':') + 1);
}

/// The policies whose digests were looked at, and whose digest is whose.
class Digests {
 public:
  template <class P>
  void add(const std::vector<test::FieldChanges<P>>& fields) {
    CAPTURE(name_of<P>());
    policies.insert(name_of<P>());
    take(P{});
    std::set<std::size_t> offsets;
    for (const test::FieldChanges<P>& changes : fields) {
      CAPTURE(changes.name);
      CHECK(offsets.insert(changes.offset).second);
      REQUIRE(changes.values.size() > 1);
      std::set<Digest128> unlike;
      for (const P& policy : changes.values) {
        take(policy);
        unlike.insert(digest_of(policy));
      }
      CHECK(unlike.size() == changes.values.size());
    }
  }
  template <class P>
  static Digest128 digest_of(const P& policy) {
    Hasher hasher;
    policy.digest(hasher);
    return hasher.digest();
  }

  std::set<std::string> policies;

 private:
  // No two policies have a digest in common, whatever their parameters.
  template <class P>
  void take(const P& policy) {
    const auto [at, fresh] = owners_.emplace(digest_of(policy), typeid(P).name());
    CAPTURE(at->second);
    CHECK(at->second == typeid(P).name());
  }

  std::map<Digest128, std::string> owners_;
};

FragmentId id(std::uint8_t first, std::uint8_t last = 0) {
  FragmentId out;
  out.bytes[0] = first;
  out.bytes[31] = last;
  return out;
}

std::shared_ptr<const WeightPredictor> predictor(float last) {
  return *WeightPredictor::make(1, 1, std::vector<float>{1, 2, 3, last});
}
std::shared_ptr<const GateWeights> gate(GateKind kind, float last) {
  const GateShape shape{.kind = kind, .key_channels = 1, .value_channels = 1, .hidden = 1};
  std::vector<float> numbers(static_cast<std::size_t>(shape.size()), 1.0F);
  numbers.back() = last;
  return *GateWeights::make(shape, numbers);
}
std::shared_ptr<const ProjectionMap> map(std::uint64_t seed) {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 4, .rotary = 4});
  return *ProjectionMap::make(test::random_parts(*g, *g, test::Sharing::layer, 1, 0, false, seed));
}
std::shared_ptr<const std::vector<float>> numbers(std::vector<float> all) {
  return std::make_shared<const std::vector<float>>(std::move(all));
}

void add_selections(Digests& digests) {
  digests.add(every_field<SelectAll>());
  digests.add(every_field<SelectLast>(field(SelectLast{}, "tokens", &SelectLast::tokens, {0, 1})));
  const SelectKeyFrames frames;
  const TokenScores score{id(1), {1, 2}};
  digests.add(every_field<SelectKeyFrames>(
      field(frames, "budget", &SelectKeyFrames::budget, {0, 255}),
      field(frames, "layer", &SelectKeyFrames::layer, {0, 1}),
      field(frames, "queries", &SelectKeyFrames::queries, {0, 9}),
      elements(frames, "scores", &SelectKeyFrames::scores, score,
               field(score, "fragment", &TokenScores::fragment, {id(2), id(1, 1)}),
               field(score, "mass", &TokenScores::mass, {{1}, {1, 3}, {1, 2, 0}}))));
  const SelectMedoids medoids;
  digests.add(
      every_field<SelectMedoids>(field(medoids, "budget", &SelectMedoids::budget, {0, 65}),
                                 field(medoids, "layer", &SelectMedoids::layer, {0, 1}),
                                 field(medoids, "iterations", &SelectMedoids::iterations, {0, 9})));
}

void add_orders_and_seams(Digests& digests) {
  digests.add(every_field<ByKeyNorm>(field(ByKeyNorm{}, "layer", &ByKeyNorm::layer, {0, 1})));
  digests.add(every_field<ById>());
  digests.add(every_field<ByDot>(field(ByDot{}, "reversed", &ByDot::reversed, {true})));
  digests.add(every_field<SeamNone>());
  digests.add(every_field<SeamAll>());
  const SeamShare share;
  digests.add(every_field<SeamShare>(
      field(share, "share", &SeamShare::share, {0.0F, 0.5F}),
      field(share, "boundary_tokens", &SeamShare::boundary_tokens, {{1}, {2}, {1, 2}}),
      field(share, "past_boundary", &SeamShare::past_boundary, {1, -1})));
}

void add_aligners(Digests& digests) {
  digests.add(every_field<Concat>());
  // A parameter that the mode does not read is no part of the digest.
  const TokenMatch index;
  const TokenMatch edits{.mode = MatchMode::edit_distance};
  const TokenMatch near{.mode = MatchMode::neighbours};
  const TokenEmbeddings embedding{id(1), 2, {1, 2}};
  digests.add(every_field<TokenMatch>(
      field(index, "mode", &TokenMatch::mode,
            {MatchMode::common_prefix, MatchMode::edit_distance, MatchMode::neighbours}),
      parts(edits, "edit", &TokenMatch::edit,
            field(EditOptions{}, "exact_tokens", &EditOptions::exact_tokens, {0, 9}),
            field(EditOptions{}, "seed_tokens", &EditOptions::seed_tokens, {8, 9})),
      field(near, "threshold", &TokenMatch::threshold, {0.5F, -1.0F}),
      field(near, "layer", &TokenMatch::layer, {0, 1}),
      elements(near, "embeddings", &TokenMatch::embeddings, embedding,
               field(embedding, "fragment", &TokenEmbeddings::fragment, {id(2), id(1, 1)}),
               field(embedding, "channels", &TokenEmbeddings::channels, {1, 3}),
               field(embedding, "values", &TokenEmbeddings::values, {{1, 3}, {1}, {1, 2, 0}}))));
  const Attention attention;
  digests.add(every_field<Attention>(
      field(attention, "queries", &Attention::queries,
            {numbers({1, 2}), numbers({1, 3}), numbers({1, 2, 0})}),
      field(attention, "count", &Attention::count, {0, 2}),
      field(attention, "frame", &Attention::frame, {QueryFrame::at_positions}),
      field(attention, "positions", &Attention::positions, {{0}, {1}, {0, 1}}),
      field(attention, "scale", &Attention::scale, {1.0F, 2.0F}),
      field(attention, "temperature", &Attention::temperature, {0.5F, 2.0F}),
      field(attention, "mode", &Attention::mode, {AttentionMode::per_agent_mean})));
  const Projection projection;
  digests.add(every_field<Projection>(field(projection, "map", &Projection::map, {map(1), map(2)}),
                                      field(projection, "bar", &Projection::bar, {-1.0F, 0.5F})));
}

void add_fusers(Digests& digests) {
  digests.add(every_field<WeightedMean>(
      field(WeightedMean{}, "weighting", &WeightedMean::weighting, {Weighting::confidence})));
  digests.add(every_field<Sum>());
  digests.add(every_field<kvmeld::anchors::detail::BlendSum>());
  digests.add(every_field<Max>());
  digests.add(every_field<Median>());
  digests.add(every_field<TrimmedMean>(field(TrimmedMean{}, "f", &TrimmedMean::f, {0, 2})));
  digests.add(every_field<Krum>(field(Krum{}, "f", &Krum::f, {0, 2})));
  digests.add(every_field<MultiKrum>(field(MultiKrum{}, "f", &MultiKrum::f, {0, 2}),
                                     field(MultiKrum{}, "m", &MultiKrum::m, {1, 3})));
  digests.add(every_field<Bulyan>(field(Bulyan{}, "f", &Bulyan::f, {0, 2})));
  digests.add(every_field<Medoid>());
  digests.add(every_field<GeometricMedian>());
  const Cluster cluster;
  digests.add(
      every_field<Cluster>(field(cluster, "threshold", &Cluster::threshold, {0.5F, -1.0F}),
                           field(cluster, "k", &Cluster::k, {1, 2}),
                           field(cluster, "result", &Cluster::result, {ClusterResult::centre})));
  digests.add(every_field<NormPreservingMean>());
  digests.add(every_field<Gated>(field(Gated{}, "weights", &Gated::weights,
                                       {gate(GateKind::token, 1), gate(GateKind::token, 2)})));
  digests.add(
      every_field<GatedChannels>(field(GatedChannels{}, "weights", &GatedChannels::weights,
                                       {gate(GateKind::channel, 1), gate(GateKind::channel, 2)})));
}

void add_weights(Digests& digests) {
  const AgentWeights agents;
  const AgentWeight agent{1, 0.5F};
  digests.add(every_field<AgentWeights>(
      elements(agents, "weights", &AgentWeights::weights, agent,
               field(agent, "agent", &AgentWeight::agent, {2, std::uint64_t{1} << 63U}),
               field(agent, "weight", &AgentWeight::weight, {0.0F, 0.25F})),
      field(agents, "otherwise", &AgentWeights::otherwise, {0.0F, 0.5F})));
  const FragmentWeights fragments;
  const FragmentWeight fragment{id(1), 0.5F};
  digests.add(every_field<FragmentWeights>(
      elements(fragments, "weights", &FragmentWeights::weights, fragment,
               field(fragment, "fragment", &FragmentWeight::fragment, {id(2), id(1, 1)}),
               field(fragment, "weight", &FragmentWeight::weight, {0.0F, 0.25F})),
      field(fragments, "otherwise", &FragmentWeights::otherwise, {0.0F, 0.5F})));
  const PredictedWeights predicted;
  const FragmentFeatures features{id(1), {1, 2}};
  digests.add(every_field<PredictedWeights>(
      field(predicted, "predictor", &PredictedWeights::predictor, {predictor(1), predictor(2)}),
      elements(predicted, "features", &PredictedWeights::features, features,
               field(features, "fragment", &FragmentFeatures::fragment, {id(2), id(1, 1)}),
               field(features, "values", &FragmentFeatures::values, {{1}, {1, 3}, {1, 2, 0}})),
      field(predicted, "layer", &PredictedWeights::layer, {0, 1})));
}

void add_anchor_policies(Digests& digests) {
  const anchors::SimHash simhash;
  digests.add(every_field<anchors::SimHash>(
      field(simhash, "seed", &anchors::SimHash::seed, {0, std::uint64_t{1} << 63U}),
      field(simhash, "gram_tokens", &anchors::SimHash::gram_tokens, {1, 2}),
      field(simhash, "first_tokens", &anchors::SimHash::first_tokens, {1, 2})));
  digests.add(every_field<anchors::EmbeddingHash>(field(anchors::EmbeddingHash{}, "seed",
                                                        &anchors::EmbeddingHash::seed,
                                                        {0, std::uint64_t{1} << 63U})));
  digests.add(every_field<anchors::XxHash>(
      field(anchors::XxHash{}, "seed", &anchors::XxHash::seed, {1, std::uint64_t{1} << 63U})));
  digests.add(every_field<anchors::LRU>());
  digests.add(every_field<anchors::LFU>());
  digests.add(every_field<anchors::WindowLFU>(
      field(anchors::WindowLFU{}, "window", &anchors::WindowLFU::window, {0, 1})));
}

Digests all_policies() {
  Digests digests;
  add_selections(digests);
  add_orders_and_seams(digests);
  add_aligners(digests);
  add_fusers(digests);
  add_weights(digests);
  add_anchor_policies(digests);
  return digests;
}

/// The types of the headers that have a digest of policies, or derive from one that has, by name.
std::set<std::string> policies_of_headers() {
  std::map<std::string, std::string> base_of;  // of every type with a base
  std::set<std::string> out;
  for (const auto& file : std::filesystem::recursive_directory_iterator("include/kvmeld")) {
    std::ifstream in(file.path());
    std::string type;
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("struct ", 0) == 0 || line.rfind("class ", 0) == 0) {
        std::string rest = line.substr(line.find(' ') + 1);
        type = rest.substr(0, rest.find_first_of(" :;{<"));
        if (const std::size_t colon = rest.find(" : "); colon != std::string::npos) {
          rest = rest.substr(colon + 3);
          if (rest.rfind("public ", 0) == 0) rest = rest.substr(7);
          base_of[type] = rest.substr(0, rest.find_first_of(" ,{<"));
        }
      }
      // In the sentences of static_asserts and comments it stands behind a quotation mark.
      const std::size_t at = line.find("void digest(Hasher&");
      if (at != std::string::npos && (at == 0 || (line[at - 1] != '\'' && line[at - 1] != '`')))
        out.insert(type);
    }
  }
  for (std::size_t before = 0; before != out.size();) {
    before = out.size();
    for (const auto& [type, base] : base_of) {
      if (out.count(base) != 0) out.insert(type);
    }
  }
  return out;
}

}  // namespace

TEST_CASE("the digest of every policy names every field, and no two policies share one") {
  all_policies();
}

TEST_CASE("a policy of the headers whose digest nobody looks at is found") {
  std::set<std::string> looked_at = all_policies().policies;
  looked_at.insert("Chain");  // below
  CHECK(policies_of_headers() == looked_at);
}

TEST_CASE("the digest of a chain names its parts, their order and their number") {
  const auto digest = [](const auto&... part) { return Digests::digest_of(Chain{part...}); };
  const Projection projection{.map = map(1)};
  const std::set<Digest128> all{
      Digests::digest_of(TokenMatch{}),
      Digests::digest_of(projection),
      digest(TokenMatch{}),
      digest(TokenMatch{.mode = MatchMode::common_prefix}),
      digest(Concat{}),
      digest(projection),
      digest(projection, Concat{}),
      digest(projection, TokenMatch{}),
      digest(projection, TokenMatch{.mode = MatchMode::common_prefix}),
      digest(Projection{.map = map(2)}, TokenMatch{}),
      digest(Projection{.map = map(1), .bar = 0.5F}, TokenMatch{}),
  };
  CHECK(all.size() == 11);
}

TEST_CASE("the digest of a gate's weights names every field of their shape, and every number") {
  const GateShape shape{.kind = GateKind::channel,
                        .key_channels = 2,
                        .value_channels = 2,
                        .hidden = 1,
                        .layers = 2,
                        .planes_apart = true};
  const auto changes =
      every_field<GateShape>(field(shape, "kind", &GateShape::kind, {GateKind::token}),
                             field(shape, "key_channels", &GateShape::key_channels, {1, 3}),
                             field(shape, "value_channels", &GateShape::value_channels, {1, 3}),
                             field(shape, "hidden", &GateShape::hidden, {2, 3}),
                             field(shape, "layers", &GateShape::layers, {1, 3}),
                             field(shape, "planes_apart", &GateShape::planes_apart, {false}));
  const auto digest = [](const GateShape& of, std::vector<float> all) {
    all.resize(static_cast<std::size_t>(of.size()), 1.0F);
    return (*GateWeights::make(of, all))->digest();
  };
  const Digest128 base = digest(shape, {});
  for (const auto& [name, offset, values] : changes) {
    CAPTURE(name, offset);
    for (std::size_t i = 1; i < values.size(); ++i) CHECK(digest(values[i], {}) != base);
  }
  std::set<Digest128> numbers{base};
  for (std::int64_t i = 0; i < shape.size(); ++i) {
    std::vector<float> all(static_cast<std::size_t>(i + 1), 1.0F);
    all.back() = 2.0F;
    CHECK(numbers.insert(digest(shape, all)).second);
  }
}

TEST_CASE("the digest of a map names every field of its parts") {
  const auto geometry = [](const char* model) {
    Geometry out = *test::geometry({.layers = 1, .heads = 1, .channels = 4, .rotary = 4});
    out.model = model;
    return out;
  };
  const ProjectionParts base{.source = geometry("a"), .target = geometry("b")};
  const LinearMap matrix{
      .outputs = 1, .inputs = 2, .rank = 1, .weight = {1}, .inner = {1, 2}, .bias = {1}};
  const HeadRef head{1, 2};
  const MapBlock block{.first_head = 1, .matrix = 2};
  const auto blocks = [&](const LayerMap& layer, const char* name,
                          std::vector<MapBlock> LayerMap::*member) {
    return elements(layer, name, member, block,
                    field(block, "first_head", &MapBlock::first_head, {0, 2}),
                    field(block, "matrix", &MapBlock::matrix, {0, 1}),
                    elements(block, "inputs", &MapBlock::inputs, head,
                             field(head, "layer", &HeadRef::layer, {0, 2}),
                             field(head, "head", &HeadRef::head, {0, 1})));
  };
  const LayerMap layer;
  const MapRecord record;
  const auto changes = every_field<ProjectionParts>(
      field(base, "source", &ProjectionParts::source, {geometry("b"), geometry("c")}),
      field(base, "target", &ProjectionParts::target, {geometry("a"), geometry("c")}),
      field(base, "kind", &ProjectionParts::kind, {MapKind::permutation}),
      elements(base, "matrices", &ProjectionParts::matrices, matrix,
               field(matrix, "outputs", &LinearMap::outputs, {0, 2}),
               field(matrix, "inputs", &LinearMap::inputs, {0, 1}),
               field(matrix, "rank", &LinearMap::rank, {0, 2}),
               field(matrix, "weight", &LinearMap::weight, {{}, {2}}),
               field(matrix, "inner", &LinearMap::inner, {{}, {1}, {1, 3}}),
               field(matrix, "bias", &LinearMap::bias, {{}, {2}})),
      elements(base, "layers", &ProjectionParts::layers, layer,
               blocks(layer, "key", &LayerMap::key), blocks(layer, "value", &LayerMap::value)),
      parts(base, "record", &ProjectionParts::record,
            field(record, "method", &MapRecord::method, {"a", "b"}),
            parts(record, "fit_data", &MapRecord::fit_data,
                  field(Digest128{}, "low", &Digest128::low, {1, 2}),
                  field(Digest128{}, "high", &Digest128::high, {1, 2})),
            field(record, "fit_tokens", &MapRecord::fit_tokens, {1, 2}),
            field(record, "held_out_tokens", &MapRecord::held_out_tokens, {1, 2}),
            field(record, "attention_cosine", &MapRecord::attention_cosine, {0, 0.5}),
            field(record, "downstream", &MapRecord::downstream, {0, 0.5}),
            field(record, "bar", &MapRecord::bar, {-1, 0.5})));
  std::set<Digest128> unlike;
  std::size_t values = 1;  // the base, with which every field begins
  for (const auto& field : changes) {
    CAPTURE(field.name);
    for (const ProjectionParts& all : field.values)
      unlike.insert(kvmeld::detail::projection_digest(all));
    values += field.values.size() - 1;
    CHECK(unlike.size() == values);
  }
}
