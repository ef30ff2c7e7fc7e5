// Weights of fragments that a network predicts or a history gives, through real renders.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>

#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using kvmeld::PredictedWeights;
using kvmeld::WeightPredictor;

const auto model = test::geometry({.layers = 2, .heads = 1, .channels = 32, .rotary = 0});

std::vector<float> random_parameters(std::int32_t inputs, std::int32_t hidden) {
  test::Random random(5);
  std::vector<float> out(static_cast<std::size_t>(WeightPredictor::size(inputs, hidden)));
  for (float& w : out) w = random.value() / 8;
  return out;
}
std::shared_ptr<const WeightPredictor> predictor(std::int32_t inputs, std::int32_t hidden = 6) {
  const auto made = WeightPredictor::make(inputs, hidden, random_parameters(inputs, hidden));
  REQUIRE(made.ok());
  return *made;
}
template <class F>
auto matched(F fuser) {
  return kvmeld::merger(ById{}, Aligner{kvmeld::TokenMatch{}}, Fuser{fuser});
}
kvmeld::Target target() {
  kvmeld::Target t;
  t.geometry = *model;
  return t;
}

struct Pair {
  std::vector<test::Sealed> spans =
      test::by_id({test::sealed(model, 5, 1), test::sealed(model, 7, 2)});
  kvmeld::FragmentSet set;
  std::vector<float> confidence{0.25F, 0.75F};

  Pair() {
    for (std::size_t i = 0; i < 2; ++i)
      REQUIRE(set.insert(spans[i].fragment, kvmeld::Dot{i + 1, 0}, confidence[i]).ok());
  }
};

}  // namespace

TEST_CASE("a predictor's weights are those of its network, and enter a mean") {
  const Pair pair;
  std::vector<kvmeld::FragmentFeatures> extra;
  for (std::size_t i = 0; i < 2; ++i)
    extra.push_back({pair.spans[i].fragment.id(), {0.5F + static_cast<float>(i), -1.0F}});
  const auto network = predictor(6);
  const PredictedWeights fuser{network, extra};
  std::vector<kvmeld::FragmentWeight> weights;
  for (std::size_t i = 0; i < 2; ++i) {
    // Features and network in double.
    const kvmeld::Fragment& fragment = pair.spans[i].fragment;
    const auto tokens = static_cast<double>(fragment.token_count());
    double norm = 0;
    const float* const rows = reinterpret_cast<const float*>(
        fragment.payloads()[0].bytes.get() + fragment.payloads()[0].plane_offsets[2]);
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      double square = 0;
      for (std::size_t c = 0; c < 32; ++c)
        square += static_cast<double>(rows[t * 32 + c]) * static_cast<double>(rows[t * 32 + c]);
      norm += std::sqrt(square) / tokens;
    }
    const double features[] = {
        static_cast<double>(pair.confidence[i]),
        std::log(1 + tokens),
        norm,
        std::log(1 + static_cast<double>(fragment.payloads()[0].positions[0])),
        static_cast<double>(extra[i].values[0]),
        static_cast<double>(extra[i].values[1])};
    const auto w = random_parameters(6, 6);
    double logit = static_cast<double>(w.back());
    for (std::size_t j = 0; j < 6; ++j) {
      double sum = static_cast<double>(w[36 + j]);
      for (std::size_t k = 0; k < 6; ++k) sum += static_cast<double>(w[j * 6 + k]) * features[k];
      logit += static_cast<double>(w[42 + j]) * std::tanh(sum);
    }
    const kvmeld::Metadata metadata{{kvmeld::Mark{{i + 1, 0}, pair.confidence[i]}}, false};
    const auto got = fuser.weight({&fragment, &fragment.payloads()[0], &metadata, {}});
    REQUIRE(got.ok());
    CHECK(std::abs(static_cast<double>(*got) / std::exp(logit) - 1) <= 1e-6);
    weights.push_back({fragment.id(), *got});
  }
  CHECK(weights[0].weight != weights[1].weight);
  const auto learned = test::render_everywhere(pair.set, matched(fuser), target());
  const auto told =
      test::render_everywhere(pair.set, matched(kvmeld::FragmentWeights{weights}), target());
  CHECK(learned->buffers() == told->buffers());
  auto other = fuser;
  other.features[0].values[0] += 1;
  CHECK(matched(other).digest() != matched(fuser).digest());
  other = fuser;
  other.predictor = predictor(6, 7);
  CHECK(matched(other).digest() != matched(fuser).digest());
}

TEST_CASE("predictors and features that do not fit are refused") {
  const Pair pair;
  const auto refused = [&](const PredictedWeights& fuser, ErrorCode code, const char* text) {
    const auto got = kvmeld::plan(pair.set, matched(fuser), target()).status();
    INFO(got.message());
    CHECK(got.code() == code);
    CHECK(got.message().find(text) != std::string::npos);
  };
  refused({}, ErrorCode::invalid_argument, "no predictor");
  refused({predictor(4)}, ErrorCode::ok, "");
  refused({predictor(3)}, ErrorCode::invalid_argument, "reads 3");
  refused({predictor(5)}, ErrorCode::not_found, "reads 1");
  refused({predictor(4), {}, 2}, ErrorCode::invalid_argument, "layer 2");
  const auto a = pair.spans[0].fragment.id(), b = pair.spans[1].fragment.id();
  refused({predictor(5), {{b, {1}}, {a, {1}}}}, ErrorCode::invalid_argument, "ascends");
  refused({predictor(5), {{a, {1}}}}, ErrorCode::not_found, b.hex().c_str());
  refused({predictor(5), {{a, {1}}, {b, {1, 2}}}}, ErrorCode::invalid_argument, "6 features");
  refused({predictor(5), {{a, {1}}, {b, {std::nanf("")}}}}, ErrorCode::non_finite, "feature 4");
  CHECK(WeightPredictor::make(0, 4, {}).status().code() == ErrorCode::invalid_argument);
  CHECK(WeightPredictor::make(2, 2000, {}).status().code() == ErrorCode::invalid_argument);
  CHECK(WeightPredictor::make(2, 2, std::vector<float>(3)).status().code() ==
        ErrorCode::invalid_argument);
  // A network that shouts is cut.
  auto loud = random_parameters(4, 6);
  loud.back() = 1e30F;
  refused({*WeightPredictor::make(4, 6, loud)}, ErrorCode::ok, "");
}

TEST_CASE("a predictor goes to a file and comes back") {
  const auto network = predictor(7, 5);
  const auto file = kvmeld::to_safetensors(*network);
  REQUIRE(file.ok());
  const auto back = kvmeld::predictor_from_safetensors(*file);
  REQUIRE(back.ok());
  CHECK((*back)->digest() == network->digest());
  CHECK(*kvmeld::to_safetensors(**back) == *file);
  for (std::size_t cut = 0; cut < file->size(); cut += 13)
    CHECK_FALSE(kvmeld::predictor_from_safetensors(std::span(*file).first(cut)).ok());
  auto broken = *file;
  const float bad = std::numeric_limits<float>::infinity();
  std::memcpy(broken.data() + broken.size() - 4, &bad, 4);
  CHECK(kvmeld::predictor_from_safetensors(broken).status().code() == ErrorCode::non_finite);
  kvmeld::SafetensorsWriter writer;
  const std::vector<float> numbers(6, 0.5F);
  writer.floats("first.weight", {2, 3}, std::span(numbers));
  writer.floats("first.bias", {3}, std::span(numbers).first(3));
  writer.floats("second.weight", {1, 2}, std::span(numbers).first(2));
  writer.floats("second.bias", {1}, std::span(numbers).first(1));
  CHECK(kvmeld::predictor_from_safetensors(*writer.finish()).status().code() ==
        ErrorCode::geometry_mismatch);
}

TEST_CASE("a history fades, and weighs agents") {
  kvmeld::AgentHistory history(0.5, 0.5);
  CHECK(history.weight(3) == 0.5F);
  REQUIRE(history.record(3, 1).ok());
  CHECK(history.weight(3) == 0.75F);  // (0.5 + 1) / 2
  REQUIRE(history.record(3, 0).ok());
  CHECK(history.weight(3) == 0.4F);  // (0.5 + 0.5) / 2.5
  REQUIRE(history.record(1, 1).ok());
  const auto weights = history.weights();
  REQUIRE(weights.weights.size() == 2);
  CHECK((weights.weights[0].agent == 1 && weights.weights[0].weight == 0.75F &&
         weights.weights[1].agent == 3 && weights.otherwise == 0.5F));
  // Agents' outcomes may come interleaved otherwise.
  kvmeld::AgentHistory other(0.5, 0.5);
  for (const auto& [agent, success] : {std::pair{1U, 1.0}, {3U, 1.0}, {3U, 0.0}})
    REQUIRE(other.record(agent, success).ok());
  CHECK(other.weights().weights[1].weight == weights.weights[1].weight);
  CHECK(history.record(1, 1.5).code() == ErrorCode::invalid_argument);
  CHECK(history.record(1, std::nan("")).code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::AgentHistory(2).record(1, 1).code() == ErrorCode::invalid_argument);
  CHECK(history.weight(1) == 0.75F);
  const Pair pair;
  test::render_everywhere(pair.set, matched(weights), target());
}
