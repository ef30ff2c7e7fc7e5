// Gains of offsets behind prefixes of other lengths: features, ridge and LSTM against plain loops,
// gradients, what makes a predictor trusted, files, and blends that use them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include <kvmeld/anchors/gain.hpp>
#ifdef KVMELD_TEST_EIGEN
#include <kvmeld/fit/fit.hpp>
#endif

#include "support/anchor_segments.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::anchors::GainKind;
using kvmeld::anchors::GainPredictor;
using kvmeld::anchors::GainQuery;
using kvmeld::anchors::GainReason;
using kvmeld::anchors::GainScore;
using kvmeld::anchors::ReusePart;
using test::Segment;
using Numbers = std::vector<double>;
constexpr std::size_t features = kvmeld::anchors::gain_feature_count;

const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 3, .heads = 2, .channels = 8});

std::vector<float> random_numbers(std::size_t count, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<float> out(count);
  for (float& x : out) x = random.value() / 8;
  return out;
}
std::shared_ptr<const GainPredictor> made(GainKind kind, std::int32_t hidden,
                                          std::vector<GainScore> scores = {},
                                          std::uint64_t seed = 1) {
  auto out = GainPredictor::make(kind, hidden, 3,
                                 random_numbers(3 * GainPredictor::size(kind, hidden), seed),
                                 std::move(scores), "test model");
  REQUIRE(out.ok());
  return *out;
}

/// Two offsets of one segment, the second g(layer, token) times the first.
template <class G>
std::pair<kvmeld::Fragment, kvmeld::Fragment> offsets(std::int64_t tokens, std::uint64_t seed,
                                                      const G& g) {
  const Segment alone(shape, tokens, seed), first = alone.in_context(seed + 1);
  Segment second = first;
  for (std::size_t p = 0; p < second.values.size(); ++p) {
    for (std::size_t i = 0; i < second.values[p].size(); ++i) {
      second.values[p][i] = alone.values[p][i] + g(second.layer_of(p), i / 16) *
                                                     (first.values[p][i] - alone.values[p][i]);
    }
  }
  const auto a = kvmeld::anchors::measure_offset(first.at(30), alone.at(2)),
             b = kvmeld::anchors::measure_offset(second.at(90), alone.at(2));
  REQUIRE(a.ok());
  REQUIRE(b.ok());
  return {*a, *b};
}

}  // namespace

TEST_CASE("features of a token") {
  const auto x =
      kvmeld::anchors::gain_features({.measured_behind = 3, .placed_behind = 7, .tokens = 2});
  REQUIRE(x->size() == 2 * features);
  const double expected[] = {
      std::log(2), std::log(2),     std::log(4) / 8, 0,   0.75,         0.125, std::log(2),
      std::log(2), std::log(4) / 8, std::log(2) / 8, 0.6, 7.0 / 9 - 0.6};
  for (std::size_t i = 0; i < x->size(); ++i) REQUIRE((*x)[i] == Approx(expected[i]).margin(1e-15));
  REQUIRE(kvmeld::anchors::gain_features({.measured_behind = 9, .placed_behind = 0, .tokens = 1})
              ->at(1) == Approx(std::log(10)));
  REQUIRE(kvmeld::anchors::gain_features({.measured_behind = 0, .placed_behind = 0, .tokens = 1})
              ->at(4) == 0);
  REQUIRE(kvmeld::anchors::gain_features({})->empty());
  REQUIRE(kvmeld::anchors::gain_features({.measured_behind = -1}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(
      kvmeld::anchors::gain_features({.placed_behind = kvmeld::max_position + 1}).status().code() ==
      ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::gain_features({.tokens = std::int64_t{1} << 40}).status().code() ==
          ErrorCode::oversized);
  REQUIRE(kvmeld::anchors::gain_features({.tokens = -5}).status().code() ==
          ErrorCode::invalid_argument);
}

TEST_CASE("ridge and LSTM against plain loops") {
  const GainQuery query{.measured_behind = 12, .placed_behind = 100, .tokens = 9};
  const auto x = kvmeld::anchors::gain_features(query);
  const auto ridge = made(GainKind::ridge, 0);
  Numbers out(9);
  for (std::size_t l = 0; l < 3; ++l) {
    ridge->evaluate(l, *x, out);
    const auto w = ridge->parameters().subspan(l * (features + 1));
    for (std::size_t t = 0; t < 9; ++t) {
      double sum = 1 + static_cast<double>(w[features]);
      for (std::size_t k = 0; k < features; ++k)
        sum += static_cast<double>(w[k]) * (*x)[t * features + k];
      REQUIRE(out[t] == Approx(std::min(2.0, std::max(0.0, sum))).epsilon(1e-12));
    }
  }
  for (const std::size_t h : {std::size_t{1}, std::size_t{5}, std::size_t{32}}) {
    const auto lstm = made(GainKind::lstm, static_cast<std::int32_t>(h));
    lstm->evaluate(2, *x, out);
    const auto w = lstm->parameters().subspan(2 * lstm->parameters().size() / 3);
    const auto number = [&](std::size_t i) { return static_cast<double>(w[i]); };
    const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
    Numbers state(h), cell(h);
    for (std::size_t t = 0; t < 9; ++t) {
      Numbers sums(4 * h), next(h);
      for (std::size_t r = 0; r < 4 * h; ++r) {
        sums[r] = number(4 * h * (features + h) + r);
        for (std::size_t k = 0; k < features; ++k)
          sums[r] += number(r * features + k) * (*x)[t * features + k];
        for (std::size_t k = 0; k < h; ++k)
          sums[r] += number(4 * h * features + r * h + k) * state[k];
      }
      double y = number(4 * h * (features + h + 1) + h);
      for (std::size_t k = 0; k < h; ++k) {
        cell[k] = sigmoid(sums[h + k]) * cell[k] + sigmoid(sums[k]) * std::tanh(sums[2 * h + k]);
        next[k] = sigmoid(sums[3 * h + k]) * std::tanh(cell[k]);
        y += number(4 * h * (features + h + 1) + k) * next[k];
      }
      state = next;
      REQUIRE(out[t] == Approx(1 + std::tanh(y)).epsilon(1e-10));
    }
  }
}

TEST_CASE("the LSTM's gradient is that of central differences") {
  const kvmeld::anchors::detail::LstmShape lstm{features, 4};
  const auto x =
      kvmeld::anchors::gain_features({.measured_behind = 5, .placed_behind = 60, .tokens = 7});
  Numbers parameters, cotangent, gradient(lstm.size()), out(7);
  for (const float p : random_numbers(lstm.size(), 3)) parameters.push_back(static_cast<double>(p));
  for (const float p : random_numbers(7, 4)) cotangent.push_back(static_cast<double>(p));
  kvmeld::anchors::detail::LstmTrace trace;
  kvmeld::anchors::detail::run_lstm(lstm, parameters, *x, out, &trace);
  kvmeld::anchors::detail::lstm_vjp(lstm, parameters, *x, trace, cotangent, gradient);
  const auto loss = [&] {
    Numbers y(7);
    kvmeld::anchors::detail::run_lstm(lstm, parameters, *x, y);
    double sum = 0;
    for (std::size_t t = 0; t < 7; ++t) sum += cotangent[t] * y[t];
    return sum;
  };
  double largest = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const double kept = parameters[i], step = 1e-5;
    parameters[i] = kept + step;
    const double above = loss();
    parameters[i] = kept - step;
    const double below = loss();
    parameters[i] = kept;
    REQUIRE(gradient[i] == Approx((above - below) / (2 * step)).epsilon(1e-5).margin(1e-8));
    largest = std::max(largest, std::abs(gradient[i]));
  }
  REQUIRE(largest > 0.01);
}

TEST_CASE("a layer is trusted where its held-out error beats identity's, and only there") {
  const GainQuery query{.measured_behind = 12, .placed_behind = 100, .tokens = 4};
  const auto mixed = made(GainKind::lstm, 3, {{0.5, 0.4}, {0.5, 0.5}, {NAN, 0.1}});
  REQUIRE(mixed->reason(0) == GainReason::predicted);
  REQUIRE(mixed->reason(1) == GainReason::not_better);
  REQUIRE(mixed->reason(2) == GainReason::no_score);
  REQUIRE(mixed->predicts());
  const auto gains = mixed->gains(query);
  REQUIRE(gains->size() == 12);
  Numbers row(4);
  mixed->evaluate(0, *kvmeld::anchors::gain_features(query), row);
  for (std::size_t t = 0; t < 4; ++t) {
    REQUIRE((*gains)[t] == static_cast<float>(row[t]));
    REQUIRE((*gains)[t] != 1.0F);
    REQUIRE((*gains)[4 + t] == 1.0F);
    REQUIRE((*gains)[8 + t] == 1.0F);
  }
  REQUIRE(made(GainKind::ridge, 0)->gains(query)->empty());  // nobody measured it
  REQUIRE_FALSE(made(GainKind::ridge, 0, {{0.1, 0.2}, {0.1, 0.2}, {0.1, 0.2}})->predicts());
  REQUIRE(made(GainKind::identity, 0, {{1, 0}, {1, 0}, {1, 0}})->reason(0) == GainReason::identity);
  REQUIRE(made(GainKind::identity, 0)->gains(query)->empty());
  REQUIRE(mixed->gains({.tokens = -1}).status().code() == ErrorCode::invalid_argument);
  REQUIRE(to_string(GainReason::not_better) == "not_better");
  REQUIRE(to_string(static_cast<GainReason>(9)) == "unknown");
}

TEST_CASE("predictors that mean nothing are refused") {
  const auto refused = [](GainKind kind, std::int32_t hidden, std::vector<float> numbers,
                          std::vector<GainScore> scores = {}) {
    return GainPredictor::make(kind, hidden, 3, numbers, std::move(scores)).status().code();
  };
  const std::vector<float> ridge(21);
  REQUIRE(refused(GainKind::ridge, 0, ridge) == ErrorCode::ok);
  REQUIRE(refused(GainKind::ridge, 0, std::vector<float>(20)) == ErrorCode::invalid_argument);
  REQUIRE(refused(GainKind::ridge, 2, ridge) == ErrorCode::invalid_argument);
  REQUIRE(refused(GainKind::ridge, 0, ridge, {{1, 1}}) == ErrorCode::invalid_argument);
  REQUIRE(refused(GainKind::ridge, 0, ridge, {{1, 1}, {-1, 1}, {1, 1}}) == ErrorCode::non_finite);
  REQUIRE(refused(GainKind::ridge, 0, ridge, {{1, 1}, {1, INFINITY}, {1, 1}}) ==
          ErrorCode::non_finite);
  REQUIRE(refused(GainKind::lstm, 0, {}) == ErrorCode::invalid_argument);
  REQUIRE(refused(GainKind::lstm, 33,
                  std::vector<float>(3 * GainPredictor::size(GainKind::lstm, 33))) ==
          ErrorCode::invalid_argument);
  REQUIRE(refused(static_cast<GainKind>(7), 0, {}) == ErrorCode::unknown_field);
  for (const float bad : {NAN, INFINITY}) {
    std::vector<float> numbers = ridge;
    numbers[20] = bad;
    REQUIRE(refused(GainKind::ridge, 0, numbers) == ErrorCode::non_finite);
  }
}

TEST_CASE("files read back as what they were, and other files are refused") {
  for (const auto& predictor : {made(GainKind::identity, 0),
                                made(GainKind::ridge, 0, {{0.5, 0.25}, {0.1, 0.3}, {NAN, NAN}}),
                                made(GainKind::lstm, 8, {{1, 0.5}, {1, 2}, {1, 0}})}) {
    const auto file = to_safetensors(*predictor);
    REQUIRE(file.ok());
    const auto back = kvmeld::anchors::gain_from_safetensors(*file, *shape);
    REQUIRE(back.ok());
    REQUIRE((*back)->kind() == predictor->kind());
    REQUIRE(std::ranges::equal((*back)->parameters(), predictor->parameters()));
    for (std::size_t l = 0; l < 3; ++l) REQUIRE((*back)->reason(l) == predictor->reason(l));
    REQUIRE(*to_safetensors(**back) == *file);
    REQUIRE(kvmeld::anchors::gain_from_safetensors(*file, *test::geometry({.layers = 2})).ok() ==
            false);
    auto other = *shape;
    other.model = "another";
    REQUIRE(kvmeld::anchors::gain_from_safetensors(*file, other).status().code() ==
            ErrorCode::geometry_mismatch);
    for (std::size_t cut = 0; cut < file->size(); cut += 7)
      REQUIRE_FALSE(kvmeld::anchors::gain_from_safetensors({file->data(), cut}, *shape).ok());
  }
  const auto read = [](const auto& write) {
    kvmeld::SafetensorsWriter writer;
    write(writer);
    return kvmeld::anchors::gain_from_safetensors(*writer.finish(), *shape).status().code();
  };
  const std::vector<float> numbers(512);
  const auto start = [](kvmeld::SafetensorsWriter& w, const char* kind) {
    w.metadata("kind", kind);
    w.metadata("model", "test model");
  };
  const auto floats = [&](kvmeld::SafetensorsWriter& w, const char* name,
                          std::vector<std::uint64_t> dims) {
    std::uint64_t count = 1;
    for (const std::uint64_t d : dims) count *= d;
    w.floats(name, std::move(dims),
             std::span<const float>(numbers).first(static_cast<std::size_t>(count)));
  };
  const auto ridge = [&](auto& w) {
    start(w, "ridge");
    floats(w, "weight", {3, features});
    floats(w, "bias", {3});
  };
  REQUIRE(read(ridge) == ErrorCode::ok);  // without scores: no layer is trusted
  REQUIRE(read([&](auto& w) { floats(w, "bias", {3}); }) == ErrorCode::not_found);
  REQUIRE(read([&](auto& w) { start(w, "forest"); }) == ErrorCode::unknown_field);
  REQUIRE(read([&](auto& w) { start(w, "lstm"); }) == ErrorCode::geometry_mismatch);
  REQUIRE(read([&](auto& w) { start(w, "ridge"); }) == ErrorCode::unknown_field);
  REQUIRE(read([&](auto& w) {
            ridge(w);
            floats(w, "more", {1});
          }) == ErrorCode::unknown_field);
  REQUIRE(read([&](auto& w) {
            start(w, "ridge");
            floats(w, "weight", {3, features});
            floats(w, "bios", {3});
          }) == ErrorCode::not_found);
  REQUIRE(read([&](auto& w) {
            start(w, "ridge");
            floats(w, "weight", {features, 3});
            floats(w, "bias", {3});
          }) == ErrorCode::geometry_mismatch);
  REQUIRE(read([&](auto& w) {
            ridge(w);
            floats(w, "held_out", {2, 3});
          }) == ErrorCode::geometry_mismatch);
  REQUIRE(read([&](auto& w) {
            start(w, "lstm");
            floats(w, "out.weight", {3, 33});
          }) == ErrorCode::invalid_argument);
}

TEST_CASE("samples of offsets: sums by layer and token, scores of predictors") {
  const GainQuery query{.measured_behind = 20, .placed_behind = 80, .tokens = 5};
  const auto [a, b] = offsets(5, 1, [](std::size_t layer, std::size_t token) {
    return 0.5 + 0.25 * static_cast<double>(layer) - 0.1 * static_cast<double>(token);
  });
  auto sample = kvmeld::anchors::gain_sample(a, b, query);
  REQUIRE(sample.ok());
  for (std::size_t l = 1; l < 3; ++l) {
    double total = 0;
    for (std::size_t t = 0; t < 5; ++t) {
      const double g = 0.5 + 0.25 * static_cast<double>(l) - 0.1 * static_cast<double>(t);
      const std::size_t i = l * 5 + t;
      REQUIRE(sample->both[i] / sample->measured[i] == Approx(g).epsilon(1e-4));
      REQUIRE(sample->wanted[i] / sample->measured[i] == Approx(g * g).epsilon(1e-4));
      total += sample->wanted[i];
    }
    REQUIRE(total == Approx(1));
  }
  REQUIRE(sample->measured[0] == 0);  // layer 0 has no offset
  const auto ridge = made(GainKind::ridge, 0);
  const auto scores = kvmeld::anchors::held_out_scores(*ridge, {&*sample, 1});
  REQUIRE(std::isnan((*scores)[0].identity));
  Numbers gains(5);
  ridge->evaluate(2, *kvmeld::anchors::gain_features(query), gains);
  double identity = 0, predictor = 0;
  for (std::size_t t = 0; t < 5; ++t) {
    const std::size_t i = 10 + t;
    identity += sample->wanted[i] - 2 * sample->both[i] + sample->measured[i];
    predictor += sample->wanted[i] - 2 * gains[t] * sample->both[i] +
                 gains[t] * gains[t] * sample->measured[i];
  }
  REQUIRE((*scores)[2].identity == Approx(identity).epsilon(1e-9));
  REQUIRE((*scores)[2].predictor == Approx(predictor).epsilon(1e-9));
  auto twice = *sample;
  twice.add(*sample);
  REQUIRE((*kvmeld::anchors::held_out_scores(*ridge, {&twice, 1}))[2].predictor ==
          Approx(predictor).epsilon(1e-9));
  REQUIRE(kvmeld::anchors::gain_sample(a, b, {.tokens = 4}).status().code() ==
          ErrorCode::token_count_mismatch);
  REQUIRE(kvmeld::anchors::gain_sample(a, Segment(shape, 5, 3).at(4), query).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::gain_sample({}, b, query).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(
      kvmeld::anchors::gain_sample(a, b, {.measured_behind = -1, .tokens = 5}).status().code() ==
      ErrorCode::invalid_argument);
  sample->layers = 2;
  REQUIRE(kvmeld::anchors::held_out_scores(*ridge, {&*sample, 1}).status().code() ==
          ErrorCode::geometry_mismatch);
}

TEST_CASE("gains multiply offsets layer by layer and token by token, and 1 changes no byte") {
  const std::int64_t n = 6;
  const Segment query(shape, n, 1), alone(shape, n, 2);
  const auto delta = kvmeld::anchors::measure_offset(alone.in_context(3).at(0), alone.at(0));
  ReusePart part{.base = query.at(0),
                 .position = 50,
                 .offsets = {{.anchor = test::anchor_id(1), .delta = *delta, .weight = 0.75F}}};
  const auto plain = test::rendered({&part, 1}, shape);
  part.offsets[0].gains.assign(3 * n, 1.0F);
  REQUIRE(test::rendered({&part, 1}, shape) == plain);
  // 0 among them
  for (std::size_t i = 0; i < part.offsets[0].gains.size(); ++i)
    part.offsets[0].gains[i] = static_cast<float>(i % 5) / 2;
  Segment expected = query;
  const Segment context = alone.in_context(3);
  for (std::size_t p = 0; p < expected.values.size(); ++p) {
    const std::size_t layer = expected.layer_of(p);
    for (std::size_t i = 0; i < expected.values[p].size(); ++i) {
      const double g =
          0.75 *
          static_cast<double>(part.offsets[0].gains[layer * static_cast<std::size_t>(n) + i / 16]);
      expected.values[p][i] += g * (context.values[p][i] - alone.values[p][i]);
    }
  }
  test::TestCache cache(shape, n);
  expected.write(cache, 50);
  const auto out = test::rendered({&part, 1}, shape);
  REQUIRE(test::difference(out, cache.buffers()) < 1e-5);
  REQUIRE(out == test::rendered({&part, 1}, shape, {.compute_last = false}, kvmeld::exec::lanes));
  ReusePart without = part;
  without.offsets[0].gains.clear();
  REQUIRE(kvmeld::anchors::plan_reuse({&part, 1}, *shape)->render_id() !=
          kvmeld::anchors::plan_reuse({&without, 1}, *shape)->render_id());
}

#ifdef KVMELD_TEST_EIGEN
TEST_CASE(
    "a ridge finds gains that are linear in the features, and blends behind other prefixes come "
    "nearer by it") {
  const double truth[3][features + 1] = {
      {}, {-0.1, 0.05, 0.3, -0.2, 0.4, -0.3, -0.25}, {0.08, -0.12, -0.4, 0.3, -0.2, 0.25, 0.1}};
  const auto gain = [&](const GainQuery& q, std::size_t layer, std::size_t token) {
    const auto x = *kvmeld::anchors::gain_features(q);
    double sum = 1 + truth[layer][features];
    for (std::size_t k = 0; k < features; ++k) sum += truth[layer][k] * x[token * features + k];
    return sum;
  };
  std::vector<kvmeld::anchors::GainSample> fitted, held_out;
  const std::int64_t lengths[] = {4, 17, 60, 150, 400};
  std::uint64_t seed = 10;
  for (const std::int64_t p : lengths) {
    for (const std::int64_t q : lengths) {
      const GainQuery query{p, q, 8};
      const auto [a, b] =
          offsets(8, seed += 5, [&](std::size_t l, std::size_t t) { return gain(query, l, t); });
      (seed % 3 == 0 ? held_out : fitted).push_back(*kvmeld::anchors::gain_sample(a, b, query));
    }
  }
  const auto ridge = kvmeld::fit::fit_gain_ridge(fitted, 1e-9, "test model");
  REQUIRE(ridge.ok());
  REQUIRE_FALSE((*ridge)->predicts());  // no scores yet
  for (std::size_t l = 1; l < 3; ++l) {
    for (std::size_t k = 0; k <= features; ++k)
      REQUIRE(static_cast<double>((*ridge)->parameters()[l * (features + 1) + k]) ==
              Approx(truth[l][k]).margin(2e-3));
  }
  const auto scored =
      GainPredictor::make(GainKind::ridge, 0, 3, (*ridge)->parameters(),
                          *kvmeld::anchors::held_out_scores(**ridge, held_out), "test model");
  REQUIRE((*scored)->reason(0) == GainReason::no_score);
  REQUIRE((*scored)->reason(1) == GainReason::predicted);
  REQUIRE((*scored)->reason(2) == GainReason::predicted);
  REQUIRE((*scored)->scores()[1].predictor < 1e-5);

  const GainQuery query{30, 200, 8};
  const Segment alone(shape, 8, 99), near = alone.in_context(100);
  Segment far = alone;
  for (std::size_t p = 0; p < far.values.size(); ++p) {
    for (std::size_t i = 0; i < far.values[p].size(); ++i)
      far.values[p][i] +=
          gain(query, far.layer_of(p), i / 16) * (near.values[p][i] - alone.values[p][i]);
  }
  ReusePart part{
      .base = alone.at(0),
      .position = 200,
      .offsets = {{.anchor = test::anchor_id(1),
                   .delta = *kvmeld::anchors::measure_offset(near.at(30), alone.at(0))}}};
  test::TestCache real(shape, 8);
  far.write(real, 200);
  const double without = test::difference(test::rendered({&part, 1}, shape), real.buffers());
  part.offsets[0].gains = *(*scored)->gains(query);
  REQUIRE(test::difference(test::rendered({&part, 1}, shape), real.buffers()) < 0.02 * without);
  REQUIRE(kvmeld::fit::fit_gain_ridge({}, 1, "").status().code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::fit::fit_gain_ridge(fitted, -1, "").status().code() ==
          ErrorCode::invalid_argument);
}
#else
TEST_CASE("fits of gains") { test::skip("no Eigen (Debian: libeigen3-dev)"); }
#endif
