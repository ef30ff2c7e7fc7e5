// Fits of maps between models: planted maps come back, streams sum up to one batch, and what cannot
// be fitted is refused.
#include <cstdio>
#include <cstdlib>

#include "support/catch.hpp"

#ifndef KVMELD_TEST_EIGEN
TEST_CASE("fits of projections") {
  std::puts("skipped: no Eigen (Debian: libeigen3-dev)");
  std::exit(77);
}
#else

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <kvmeld/fit/fit.hpp>

#include "support/comma_locale.hpp"
#include "support/projection_maps.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::LinearMap;
using kvmeld::fit::NormalEquations;

struct Rows {
  std::vector<double> x, y;
};

// Rows about a mean far from zero, and what a map makes of them.
Rows planted(const LinearMap& map, std::size_t count, std::uint64_t seed, double noise = 0) {
  test::Random random(seed);
  Rows rows;
  std::vector<double> x(static_cast<std::size_t>(map.inputs)),
      y(static_cast<std::size_t>(map.outputs));
  for (std::size_t i = 0; i < count; ++i) {
    for (double& v : x) v = 3.0 + static_cast<double>(random.value());
    kvmeld::apply(map, x.data(), y.data());
    for (double& v : y) v += noise * static_cast<double>(random.value());
    rows.x.insert(rows.x.end(), x.begin(), x.end());
    rows.y.insert(rows.y.end(), y.begin(), y.end());
  }
  return rows;
}

double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

double distance_of_products(const LinearMap& a, const LinearMap& b) {  // of W, whatever the form
  double most = 0;
  std::vector<double> x(static_cast<std::size_t>(a.inputs), 0.0),
      u(static_cast<std::size_t>(a.outputs)), v(u.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = 1;
    kvmeld::apply(a, x.data(), u.data());
    kvmeld::apply(b, x.data(), v.data());
    most = std::max(most, farthest(u, v));
    x[i] = 0;
  }
  return most;
}

}  // namespace

TEST_CASE("a planted map comes back as the ridge goes to zero, and a stream sums up to one batch") {
  test::Random random(1);
  for (const bool bias : {true, false}) {
    const LinearMap map = test::random_matrix(7, 20, 0, bias, random);
    const Rows rows = planted(map, 400, 2);
    NormalEquations once(20, 7, bias), stream(20, 7, bias);
    REQUIRE(once.add(rows.x, rows.y).ok());
    for (std::size_t at = 0, size = 1; at < 400; at += size, size = size % 37 + 1) {
      size = std::min(size, 400 - at);
      REQUIRE(stream
                  .add(std::span(rows.x).subspan(at * 20, size * 20),
                       std::span(rows.y).subspan(at * 7, size * 7))
                  .ok());
    }
    CHECK(stream.rows() == 400);
    const auto a = once.ridge(0), b = stream.ridge(0), small = once.ridge(1e-13),
               large = once.ridge(0.5);
    REQUIRE((a.ok() && b.ok() && small.ok() && large.ok()));
    CHECK(farthest(a->weight, map.weight) < 1e-10);
    CHECK(farthest(small->weight, map.weight) < 1e-10);
    if (bias) CHECK(farthest(a->bias, map.bias) < 1e-10);
    CHECK(a->bias.empty() != bias);
    CHECK(farthest(b->weight, a->weight) < 1e-12);
    CHECK(farthest(large->weight, map.weight) > 1e-3);
    const auto none = once.relative_error(*a), some = once.relative_error(*large);
    REQUIRE((none.ok() && some.ok()));
    CHECK(*none < 1e-12);
    CHECK(*some > 1e-3);
  }
}

TEST_CASE(
    "a ridge is what its normal equations say, and held-out error is Σ‖y − W·x − b‖² over Σ‖y − "
    "mean‖²") {
  test::Random random(3);
  const LinearMap map = test::random_matrix(2, 3, 0, true, random);
  const Rows rows = planted(map, 50, 4, 0.3), others = planted(map, 40, 5, 0.3);
  NormalEquations fit(3, 2), held(3, 2);
  REQUIRE(fit.add(rows.x, rows.y).ok());
  REQUIRE(held.add(others.x, others.y).ok());
  const double strength = 0.25;
  const auto ridge = fit.ridge(strength);
  REQUIRE(ridge.ok());
  // Zero gradient: Σ (y − W·x − b)·xᵀ = strength · W · diag(Σ (x − mean)²), and Σ (y − W·x − b) =
  // 0.
  double mean[3] = {}, square[3] = {};
  for (std::size_t i = 0; i < 150; ++i) mean[i % 3] += rows.x[i] / 50;
  for (std::size_t i = 0; i < 150; ++i)
    square[i % 3] += (rows.x[i] - mean[i % 3]) * (rows.x[i] - mean[i % 3]);
  double gradient[2][3] = {}, sum[2] = {};
  for (std::size_t i = 0; i < 50; ++i) {
    double y[2];
    kvmeld::apply(*ridge, rows.x.data() + 3 * i, y);
    for (std::size_t o = 0; o < 2; ++o) {
      sum[o] += rows.y[2 * i + o] - y[o];
      for (std::size_t c = 0; c < 3; ++c)
        gradient[o][c] += (rows.y[2 * i + o] - y[o]) * rows.x[3 * i + c];
    }
  }
  for (std::size_t o = 0; o < 2; ++o) {
    CHECK(std::abs(sum[o]) < 1e-9);
    for (std::size_t c = 0; c < 3; ++c)
      CHECK(std::abs(gradient[o][c] - strength * ridge->weight[3 * o + c] * square[c]) < 1e-8);
  }
  double errors = 0, total = 0, centre[2] = {};
  for (std::size_t i = 0; i < 80; ++i) centre[i % 2] += others.y[i] / 40;
  for (std::size_t i = 0; i < 40; ++i) {
    double y[2];
    kvmeld::apply(*ridge, others.x.data() + 3 * i, y);
    for (std::size_t o = 0; o < 2; ++o) {
      errors += (others.y[2 * i + o] - y[o]) * (others.y[2 * i + o] - y[o]);
      total += (others.y[2 * i + o] - centre[o]) * (others.y[2 * i + o] - centre[o]);
    }
  }
  const auto error = held.relative_error(*ridge);
  REQUIRE(error.ok());
  CHECK(*error == Approx(errors / total).epsilon(1e-9));
}

TEST_CASE("low rank: a planted product comes back, and full rank is the ridge itself") {
  test::Random random(6);
  const LinearMap map = test::random_matrix(9, 16, 3, true, random);
  const Rows rows = planted(map, 300, 7);
  NormalEquations fit(16, 9);
  REQUIRE(fit.add(rows.x, rows.y).ok());
  const auto low = fit.low_rank(0, 3), full = fit.low_rank(0.1, 9), ridge = fit.ridge(0.1);
  REQUIRE((low.ok() && full.ok() && ridge.ok()));
  CHECK(low->rank == 3);
  CHECK(validate(*low).ok());
  LinearMap unbiased = map;
  unbiased.bias.clear();
  LinearMap found = *low, whole = *full, dense = *ridge;
  CHECK(farthest(found.bias, map.bias) < 1e-9);
  found.bias.clear();
  CHECK(distance_of_products(found, unbiased) < 1e-10);
  whole.bias.clear();
  dense.bias.clear();
  CHECK(distance_of_products(whole, dense) < 1e-10);
  const auto rank_one = fit.low_rank(0, 1);
  REQUIRE(rank_one.ok());
  CHECK(*fit.relative_error(*rank_one) > *fit.relative_error(*low) + 1e-3);
  CHECK(fit.low_rank(0, 0).status().code() == ErrorCode::invalid_argument);
  CHECK(fit.low_rank(0, 10).status().code() == ErrorCode::invalid_argument);
}

TEST_CASE("Procrustes recovers a rotation and keeps norms where rows are noisy") {
  // Products of plane rotations: orthogonal, 6 x 6.
  LinearMap rotation{.outputs = 6, .inputs = 6};
  rotation.weight.assign(36, 0.0);
  for (std::size_t i = 0; i < 6; ++i) rotation.weight[7 * i] = 1;
  for (std::size_t i = 0; i < 6; ++i) {
    const std::size_t j = (i + 1) % 6;
    for (std::size_t c = 0; c < 6; ++c) {
      const double a = rotation.weight[6 * i + c], b = rotation.weight[6 * j + c];
      rotation.weight[6 * i + c] = a * 0.8 - b * 0.6;
      rotation.weight[6 * j + c] = a * 0.6 + b * 0.8;
    }
  }
  const Rows rows = planted(rotation, 100, 8), noisy = planted(rotation, 100, 9, 0.2);
  NormalEquations exact(6, 6, false), fit(6, 6);
  REQUIRE(exact.add(rows.x, rows.y).ok());
  REQUIRE(fit.add(noisy.x, noisy.y).ok());
  const auto found = exact.procrustes(), near = fit.procrustes();
  REQUIRE((found.ok() && near.ok()));
  CHECK(farthest(found->weight, rotation.weight) < 1e-10);
  for (std::size_t a = 0; a < 6; ++a) {
    for (std::size_t b = 0; b < 6; ++b) {
      double product = 0;
      for (std::size_t o = 0; o < 6; ++o)
        product += near->weight[6 * o + a] * near->weight[6 * o + b];
      CHECK(product == Approx(a == b ? 1.0 : 0.0).margin(1e-12));
    }
  }
  NormalEquations shrinking(6, 4);
  CHECK(shrinking.procrustes().status().code() == ErrorCode::invalid_argument);
}

TEST_CASE("what cannot be fitted has a clear code, and leaves sums alone") {
  NormalEquations fit(3, 2);
  const std::vector<double> x{1, 2, 3, 4, 5, 7}, y{1, 2, 3, 5};
  CHECK(fit.add(std::span(x).first(5), y).code() == ErrorCode::invalid_argument);
  CHECK(fit.add(x, std::span(y).first(2)).code() == ErrorCode::invalid_argument);
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    std::vector<double> broken = x;
    broken[4] = bad;
    CHECK(fit.add(broken, y).code() == ErrorCode::non_finite);
  }
  CHECK(fit.rows() == 0);
  CHECK(fit.ridge(1).status().code() == ErrorCode::invalid_argument);
  REQUIRE(fit.add(x, y).ok());
  CHECK(fit.ridge(0).status().code() == ErrorCode::invalid_argument);  // 2 rows for 3 inputs
  CHECK(fit.ridge(0).status().message().find("2 rows") != std::string::npos);
  CHECK(fit.procrustes().status().code() == ErrorCode::invalid_argument);
  CHECK(fit.ridge(-1).status().code() == ErrorCode::invalid_argument);
  CHECK(fit.ridge(std::numeric_limits<double>::quiet_NaN()).status().code() ==
        ErrorCode::invalid_argument);
  CHECK(fit.ridge(1e-3).ok());
  CHECK(fit.relative_error(LinearMap{.outputs = 2, .inputs = 2, .weight = std::vector<double>(4)})
            .status()
            .code() == ErrorCode::invalid_argument);
  // Two equal inputs: refused without a ridge, shared with one. An input that never varies gets
  // nothing.
  NormalEquations twins(3, 1);
  test::Random random(10);
  for (int i = 0; i < 50; ++i) {
    const double v = static_cast<double>(random.value());
    REQUIRE(twins.add(std::vector<double>{v, v, 5.0}, std::vector<double>{2 * v + 1}).ok());
  }
  CHECK(twins.ridge(0).status().code() == ErrorCode::invalid_argument);
  const auto shared = twins.ridge(1e-6);
  REQUIRE(shared.ok());
  CHECK(shared->weight[0] == Approx(1.0).epsilon(1e-4));
  CHECK(shared->weight[1] == Approx(1.0).epsilon(1e-4));
  CHECK(shared->weight[2] == 0.0);
}

TEST_CASE("tokens of two tokenizers are paired by where their text ends") {
  using kvmeld::CharSpan;
  using kvmeld::TokenPair;
  const auto pairs = [](std::vector<CharSpan> a, std::vector<CharSpan> b) {
    return kvmeld::pair_by_spans(a, b);
  };
  // "unbelievable": un|believ|able against unb|eliev|a|ble, and a first token that ends before any
  // source token does.
  const auto some = pairs({{0, 2}, {2, 8}, {8, 12}}, {{0, 1}, {1, 3}, {3, 8}, {8, 9}, {9, 12}});
  REQUIRE(some.ok());
  CHECK(*some == std::vector<TokenPair>{{0, 1}, {1, 2}, {1, 3}, {2, 4}});
  const auto same = pairs({{0, 3}, {3, 3}, {3, 5}}, {{0, 3}, {3, 5}});
  REQUIRE(same.ok());
  // of two that end at 3 the later one has seen more
  CHECK(*same == std::vector<TokenPair>{{1, 0}, {2, 1}});
  const auto none = pairs({}, {{0, 3}});
  REQUIRE(none.ok());
  CHECK(none->empty());
  CHECK(pairs({{0, 3}, {1, 2}}, {}).status().code() == ErrorCode::invalid_argument);
  CHECK(pairs({}, {{4, 3}}).status().code() == ErrorCode::invalid_argument);
  CHECK(pairs({}, {{-1, 3}}).status().code() == ErrorCode::invalid_argument);
}

TEST_CASE(
    "a map planted between two models comes back from their fragments, and the gate knows it from "
    "a bad one") {
  using namespace kvmeld;
  const auto from =
      test::geometry({.layers = 3, .heads = 1, .channels = 8, .pairing = RopePairing::interleaved});
  const auto to = test::geometry({.layers = 4, .heads = 2, .channels = 4, .base = 500.0});
  from->model = "source model";
  const auto truth =
      ProjectionMap::make(test::random_parts(*from, *to, test::Sharing::layer, 2, 0, true, 11));
  REQUIRE(truth.ok());
  std::vector<Fragment> sources, targets;
  for (std::uint64_t i = 0; i < 8; ++i) {
    const auto positions = test::gapped_positions(40, static_cast<std::int64_t>(i));
    const test::Sealed source = test::sealed(from, 40, 20 + i, {.positions = positions});
    REQUIRE(source.fragment.valid());
    test::TestCache cache(to, 40);
    for (std::size_t p = 0; p < cache.planes(); ++p) {
      const Plane plane = cache.shape(p).plane;
      const auto made = test::mapped(**truth, *from, source, p / 2, plane);
      for (std::int64_t t = 0; t < 40; ++t) {
        for (std::int64_t h = 0; h < 2; ++h) {
          std::vector<double> row(made.values.begin() + (t * 2 + h) * 4,
                                  made.values.begin() + (t * 2 + h + 1) * 4);
          if (plane == Plane::key)
            reference::rotation(to->layers[0].rope,
                                static_cast<double>(positions[static_cast<std::size_t>(t)]), row);
          for (std::int64_t c = 0; c < 4; ++c)
            cache.set(p, t, h, c, static_cast<float>(row[static_cast<std::size_t>(c)]));
        }
      }
    }
    const auto target = seal(cache.ref(), {.positions = positions});
    REQUIRE(target.ok());
    sources.push_back(source.fragment);
    targets.push_back(*target);
  }
  auto fit = fit::ProjectionFit::make(*from, *to, {.nearest = 2});
  auto held = fit::ProjectionFit::make(*from, *to, {.nearest = 2});
  REQUIRE((fit.ok() && held.ok()));
  for (std::size_t i = 0; i < 7; ++i) REQUIRE(fit->add(sources[i], targets[i]).ok());
  REQUIRE(held->add(sources[7], targets[7]).ok());
  CHECK(fit->tokens() == 280);
  const auto found = fit->ridge(0), poor = fit->ridge(30);
  REQUIRE((found.ok() && poor.ok()));
  CHECK((*found)->record().fit_tokens == 280);
  CHECK((*found)->layers()[1] == (*truth)->layers()[1]);
  for (std::size_t m = 0; m < (*truth)->matrices().size(); ++m) {
    // fragments hold f32
    CHECK(farthest((*found)->matrices()[m].weight, (*truth)->matrices()[m].weight) < 2e-6);
    CHECK(farthest((*found)->matrices()[m].bias, (*truth)->matrices()[m].bias) < 2e-6);
  }
  const double strengths[] = {30, 1e-9, 1};
  const auto chosen = fit->ridge(strengths, *held);
  REQUIRE(chosen.ok());
  CHECK(farthest((*chosen)->matrices()[0].weight, (*truth)->matrices()[0].weight) < 2e-6);
  const auto errors = held->relative_errors(**found);
  REQUIRE(errors.ok());
  CHECK(errors->first < 1e-9);
  CHECK(errors->second < 1e-9);

  fit::AttentionGate good(*found), bad(*poor);
  REQUIRE(good.add(sources[7], targets[7]).ok());
  REQUIRE(bad.add(sources[7], targets[7]).ok());
  CHECK(good.score()->cosine > 0.99999);
  CHECK(bad.score()->cosine < 0.99);
  CHECK(good.score()->layer_cosines.size() == 4);
  // Queries of the caller: two query heads for each KV head.
  std::vector<float> values(4 * 3 * 4 * 4);
  test::Random random(12);
  for (float& x : values) x = random.value();
  fit::AttentionGate asked(*found);
  CHECK(asked.add(sources[7], targets[7], {}, {.values = values, .count = 2, .heads = 4}).code() ==
        ErrorCode::invalid_argument);
  CHECK(asked.score().status().code() == ErrorCode::invalid_argument);
  REQUIRE(asked.add(sources[7], targets[7], {}, {.values = values, .count = 3, .heads = 4}).ok());
  CHECK(asked.score()->cosine > 0.99999);
  const auto recorded = asked.recorded(0.9);
  REQUIRE(recorded.ok());
  CHECK((*recorded)->record().held_out_tokens == 40);
  CHECK(Projection{*recorded, 0.9F}.accepts(*from, *to).ok());
  CHECK(Projection{*bad.recorded(0.9), 0.995F}.accepts(*from, *to).code() ==
        ErrorCode::gate_refused);

  // Pairs instead of equal places; and what does not fit.
  auto paired = fit::ProjectionFit::make(*from, *to, {.nearest = 2});
  std::vector<TokenPair> pairs;
  for (std::int32_t i = 39; i >= 0; --i) pairs.push_back({i, i});
  for (std::size_t i = 0; i < 7; ++i) REQUIRE(paired->add(sources[i], targets[i], pairs).ok());
  const auto again = paired->ridge(0);
  REQUIRE(again.ok());
  CHECK(farthest((*again)->matrices()[3].weight, (*found)->matrices()[3].weight) < 1e-9);
  CHECK((*again)->record().fit_data != (*found)->record().fit_data);
  pairs.push_back({40, 0});
  CHECK(paired->add(sources[0], targets[0], pairs).code() == ErrorCode::invalid_argument);
  CHECK(paired->add(targets[0], sources[0]).code() == ErrorCode::geometry_mismatch);
  CHECK(paired->add(test::evicted(sources[0]), targets[0]).code() == ErrorCode::payload_missing);
  CHECK(paired->add(test::sealed(from, 39, 1).fragment, targets[0]).code() ==
        ErrorCode::token_count_mismatch);
  CHECK(paired->tokens() == 280);
  CHECK(fit::ProjectionFit::make(*from, *to, {.source_layers = {{0}, {1}, {2}}}).status().code() ==
        ErrorCode::invalid_argument);
  CHECK(fit::ProjectionFit::make(*from, *to, {.source_layers = {{0}, {1}, {2}, {3}}})
            .status()
            .code() == ErrorCode::invalid_argument);
  // Other ways to share, on the same fragments.
  for (const fit::FitSharing sharing : {fit::FitSharing::per_head, fit::FitSharing::per_model}) {
    auto other = fit::ProjectionFit::make(*from, *to, {.nearest = 0, .sharing = sharing});
    REQUIRE(other.ok());
    REQUIRE(other->add(sources[0], targets[0]).ok());
    const auto map = other->ridge(1e-3);
    REQUIRE(map.ok());
    CHECK((*map)->matrices().size() == (sharing == fit::FitSharing::per_head ? 16U : 2U));
    CHECK(other->low_rank(1e-3, 2).ok());
  }
}

TEST_CASE("a fit has one name in every locale, and strengths keep all their digits") {
  using namespace kvmeld;
  const auto model = test::geometry({.layers = 1, .heads = 1, .channels = 4});
  const auto fitted = [&](double strength) {
    auto fit = fit::ProjectionFit::make(*model, *model, {});
    REQUIRE(fit.ok());
    for (std::uint64_t i = 0; i < 4; ++i) {
      REQUIRE(fit->add(test::sealed(model, 20, i).fragment, test::sealed(model, 20, 9 + i).fragment)
                  .ok());
    }
    const auto map = fit->ridge(strength);
    REQUIRE(map.ok());
    return *map;
  };
  CHECK(fitted(1e-7)->record().method == "ridge 1e-07");
  CHECK(fitted(4e-7)->record().method == "ridge 4e-07");
  const auto plain = fitted(0.015625);
  CHECK(plain->record().method == "ridge 0.015625");
  const test::CommaLocale comma;
  comma.require();
  const auto other = fitted(0.015625);
  CHECK(other->record().method == plain->record().method);
  CHECK(other->digest() == plain->digest());
}

TEST_CASE(
    "heads that do not divide, ropes that no fit can undo; one matrix for all layers where the "
    "first lacks a plane") {
  using namespace kvmeld;
  const auto three = test::geometry({.layers = 2, .heads = 3, .channels = 4}),
             two = test::geometry({.layers = 2, .heads = 2, .channels = 4});
  const auto undivided =
      fit::ProjectionFit::make(*three, *two, {.nearest = 1, .sharing = fit::FitSharing::per_head});
  REQUIRE(undivided.status().code() == ErrorCode::invalid_argument);
  CHECK(undivided.status().message().find("3 heads of source layer 0 and 2 of target layer 0") !=
        std::string::npos);
  CHECK(fit::ProjectionFit::make(*three, *two, {.nearest = 1}).ok());
  const auto six = test::geometry({.layers = 2, .heads = 6, .channels = 4});
  CHECK(fit::ProjectionFit::make(*six, *two, {.nearest = 1, .sharing = fit::FitSharing::per_head})
            .ok());
  CHECK(fit::ProjectionFit::make(*two, *six, {.nearest = 1, .sharing = fit::FitSharing::per_head})
            .ok());

  auto keys_first = *test::geometry({.layers = 3, .heads = 2, .channels = 4});
  keys_first.layers[0].planes.pop_back();
  const auto shared = std::make_shared<Geometry>(keys_first);
  auto fit = fit::ProjectionFit::make(keys_first, keys_first,
                                      {.nearest = 0, .sharing = fit::FitSharing::per_model});
  INFO(fit.status().message());
  REQUIRE(fit.ok());
  REQUIRE(
      fit->add(test::sealed(shared, 40, 1).fragment, test::sealed(shared, 40, 2).fragment).ok());
  const auto map = fit->ridge(1e-3);
  REQUIRE(map.ok());
  CHECK((*map)->matrices().size() == 2);
  CHECK((*map)->layers()[0].value.empty());
  CHECK((*map)->layers()[1].value[0].matrix == (*map)->layers()[2].value[0].matrix);
  CHECK((*map)->layers()[1].value[0].matrix != (*map)->layers()[1].key[0].matrix);

  auto axes = *two;
  axes.layers[1].rope.kind = RopeKind::multi_axis;
  CHECK(fit::ProjectionFit::make(axes, *two).status().code() == ErrorCode::rope_unsupported);
  CHECK(
      fit::detail::plane_frequencies(axes.layers[1], axes.layers[1].planes[0], 9).status().code() ==
      ErrorCode::rope_unsupported);
  const auto grown = std::make_shared<Geometry>(*two);
  for (LayerShape& layer : grown->layers) {
    layer.rope.scaling = RopeScaling::dynamic_ntk;
    layer.rope.factor = 2.0;
    layer.rope.original_context = 20;
  }
  auto lengths = fit::ProjectionFit::make(*grown, *two);
  REQUIRE(lengths.ok());
  CHECK(lengths->add(test::sealed(grown, 20, 1).fragment, test::sealed(two, 20, 2).fragment).ok());
  CHECK(
      lengths->add(test::sealed(grown, 21, 1).fragment, test::sealed(two, 21, 2).fragment).code() ==
      ErrorCode::rope_length_dependent);
  CHECK(lengths->tokens() == 20);
}
#endif
