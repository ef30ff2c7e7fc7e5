// What a rope declaration means (frequencies against the published formulas, written out again
// here) and which are refused.
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include <kvmeld/geometry.hpp>
#include <kvmeld/rope.hpp>

#include "support/catch.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::RopeKind;
using kvmeld::RopePairing;
using kvmeld::RopeScaling;
using kvmeld::RopeSpec;

constexpr double pi = std::numbers::pi;

RopeSpec rotary(int channels, double base = 10000.0) {
  return RopeSpec::rotary(channels, base, RopePairing::half_split);
}

RopeSpec llama31() {
  RopeSpec rope = rotary(128, 500000.0);
  rope.scaling = RopeScaling::llama3;
  rope.factor = 8.0;
  rope.original_context = 8192;
  return rope;
}

RopeSpec yarn4(int channels = 128, double base = 1000000.0) {
  RopeSpec rope = rotary(channels, base);
  rope.scaling = RopeScaling::yarn;
  rope.factor = 4.0;
  rope.original_context = 32768;
  rope.attention_factor = 0.1 * std::log(4.0) + 1.0;
  return rope;
}

RopeSpec longrope(int channels) {
  RopeSpec rope = rotary(channels);
  rope.scaling = RopeScaling::longrope;
  rope.original_context = 4096;
  for (int i = 0; i < channels / 2; ++i) {
    rope.short_factors.push_back(1.0f + 0.01f * static_cast<float>(i));
    rope.long_factors.push_back(1.0f + 0.5f * static_cast<float>(i));
  }
  return rope;
}

std::vector<double> frequencies(const RopeSpec& rope, std::int64_t length = 0) {
  const auto result = kvmeld::inverse_frequencies(rope, length);
  REQUIRE(result.ok());
  return *result;
}

double plain(double base, int channels, int pair) {
  return std::exp(-std::log(base) * 2.0 * pair / channels);
}

// Relative: logarithms of bases up to 1e6 cost this reference some 14 units in the last place.
bool near(double a, double b) { return std::abs(a - b) <= 1e-14 * std::abs(b); }

ErrorCode code(const RopeSpec& rope, int channels) {
  return kvmeld::validate(rope, channels).code();
}

}  // namespace

TEST_CASE("rope frequencies follow the published formulas") {
  SECTION("none, at every head size in use") {
    for (const int channels : {2, 64, 80, 96, 128, 256}) {
      const auto f = frequencies(rotary(channels));
      REQUIRE(f.size() == static_cast<std::size_t>(channels / 2));
      CHECK(f[0] == 1.0);
      for (int i = 0; i < channels / 2; ++i)
        CHECK(near(f[static_cast<std::size_t>(i)], plain(10000.0, channels, i)));
    }
  }
  SECTION("linear") {
    RopeSpec rope = rotary(96, 5e5);
    rope.scaling = RopeScaling::linear;
    rope.factor = 2.5;
    const auto f = frequencies(rope);
    for (int i = 0; i < 48; ++i)
      CHECK(near(f[static_cast<std::size_t>(i)], plain(5e5, 96, i) / 2.5));
  }
  SECTION("llama3, by wavelength as its configuration states it") {
    const auto f = frequencies(llama31());
    int kept = 0, slowed = 0;
    for (int i = 0; i < 64; ++i) {
      const double p = plain(5e5, 128, i), wavelength = 2.0 * pi / p;
      double expected = 0.0;
      if (wavelength < 8192.0 / 4.0) {
        expected = p;
        ++kept;
      } else if (wavelength > 8192.0 / 1.0) {
        expected = p / 8.0;
        ++slowed;
      } else {
        const double smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
        expected = (1.0 - smooth) * p / 8.0 + smooth * p;
      }
      CHECK(near(f[static_cast<std::size_t>(i)], expected));
    }
    CHECK(kept == 29);
    CHECK(slowed == 29);
  }
  SECTION("yarn, index ramp") {
    const RopeSpec rope = yarn4();
    const auto f = frequencies(rope);
    const auto index = [&](double rotates) {
      return 128.0 * std::log(32768.0 / (rotates * 2.0 * pi)) / (2.0 * std::log(1e6));
    };
    const double low = std::floor(index(32.0)), high = std::ceil(index(1.0));
    CHECK(low == 23.0);
    CHECK(high == 40.0);
    for (int i = 0; i < 64; ++i) {
      const double ramp = std::min(1.0, std::max(0.0, (i - low) / (high - low)));
      const double p = plain(1e6, 128, i);
      CHECK(near(f[static_cast<std::size_t>(i)], p / 4.0 * ramp + p * (1.0 - ramp)));
    }
    RopeSpec untruncated = rope;
    untruncated.yarn_truncate = false;
    const auto g = frequencies(untruncated);
    for (int i = 0; i < 64; ++i) {
      const double ramp =
          std::min(1.0, std::max(0.0, (i - index(32.0)) / (index(1.0) - index(32.0))));
      const double p = plain(1e6, 128, i);
      CHECK(near(g[static_cast<std::size_t>(i)], p / 4.0 * ramp + p * (1.0 - ramp)));
    }
  }
  SECTION("yarn keeps every pair when even the slowest turns fast") {
    RopeSpec rope = yarn4(16, 1.5);
    rope.original_context = 1 << 20;
    const auto f = frequencies(rope);
    for (int i = 0; i < 8; ++i) CHECK(near(f[static_cast<std::size_t>(i)], plain(1.5, 16, i)));
  }
  SECTION("longrope picks its list by the length") {
    const RopeSpec rope = longrope(96);
    const auto at = [&](std::int64_t length, const std::vector<float>& list) {
      const auto f = frequencies(rope, length);
      for (int i = 0; i < 48; ++i) {
        const auto p = static_cast<std::size_t>(i);
        CHECK(near(f[p], plain(10000.0, 96, i) / static_cast<double>(list[p])));
      }
    };
    at(1, rope.short_factors);
    at(4096, rope.short_factors);
    at(4097, rope.long_factors);
  }
  SECTION("dynamic NTK") {
    RopeSpec rope = rotary(64);
    rope.scaling = RopeScaling::dynamic_ntk;
    rope.factor = 2.0;
    rope.original_context = 2048;
    CHECK(frequencies(rope, 2048) == frequencies(rotary(64)));
    const double base = 10000.0 * std::pow(2.0 * 6000.0 / 2048.0 - 1.0, 64.0 / 62.0);
    const auto f = frequencies(rope, 6000);
    for (int i = 0; i < 32; ++i) CHECK(near(f[static_cast<std::size_t>(i)], plain(base, 64, i)));
  }
  SECTION("explicit factors, as llama.cpp applies its tensor and its frequency scale") {
    RopeSpec rope = rotary(8);
    rope.scaling = RopeScaling::explicit_factors;
    rope.factor = 2.0;
    rope.factors = {1.0f, 2.0f, 4.0f, 32.0f};
    const auto f = frequencies(rope);
    for (int i = 0; i < 4; ++i) {
      const auto p = static_cast<std::size_t>(i);
      CHECK(near(f[p], plain(10000.0, 8, i) / 2.0 / static_cast<double>(rope.factors[p])));
    }
  }
  SECTION("a layer without rope has none") { CHECK(frequencies(RopeSpec::none()).empty()); }
}

TEST_CASE("rope declarations that no engine can mean are refused, with the number") {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  CHECK(code(RopeSpec::none(), 64) == ErrorCode::ok);
  CHECK(code(rotary(64), 64) == ErrorCode::ok);
  CHECK(code(rotary(64), 0) == ErrorCode::invalid_argument);
  CHECK(code(rotary(63), 64) == ErrorCode::invalid_argument);
  CHECK(code(rotary(0), 64) == ErrorCode::invalid_argument);
  CHECK(code(rotary(-2), 64) == ErrorCode::invalid_argument);
  CHECK(code(rotary(66), 64) == ErrorCode::invalid_argument);
  CHECK(kvmeld::validate(rotary(63), 64).message().find("63") != std::string::npos);
  for (const double base : {0.0, -10000.0, 1.0, nan, inf, -inf})
    CHECK(code(rotary(64, base), 64) == ErrorCode::invalid_argument);

  RopeSpec rope = rotary(32);
  for (const int first :
       {-1, 33, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    rope.first_channel = first;
    CHECK(code(rope, 64) == ErrorCode::invalid_argument);
    if (first != 33)
      CHECK(kvmeld::inverse_frequencies(rope, 0).error().code() == ErrorCode::invalid_argument);
  }
  rope.first_channel = 32;
  CHECK(code(rope, 64) == ErrorCode::ok);

  RopeSpec axes = rotary(64);
  axes.kind = RopeKind::multi_axis;
  CHECK(code(axes, 64) == ErrorCode::rope_unsupported);
  CHECK(kvmeld::inverse_frequencies(axes, 0).error().code() == ErrorCode::rope_unsupported);
  CHECK(kvmeld::check_shift(axes, 1, 1).code() == ErrorCode::rope_unsupported);
  for (const auto contradict :
       {+[](RopeSpec& r) { r.rotary_channels = 64; }, +[](RopeSpec& r) { r.first_channel = 8; },
        +[](RopeSpec& r) { r.scaling = RopeScaling::linear; }}) {
    RopeSpec still = RopeSpec::none();
    contradict(still);
    CHECK(code(still, 64) == ErrorCode::invalid_argument);
  }

  RopeSpec newer = rotary(64);
  newer.kind = static_cast<RopeKind>(9);
  CHECK(code(newer, 64) == ErrorCode::unknown_field);
  newer = rotary(64);
  newer.pairing = static_cast<RopePairing>(9);
  CHECK(code(newer, 64) == ErrorCode::unknown_field);
  newer = rotary(64);
  newer.original_context = 1;
  newer.scaling = static_cast<RopeScaling>(9);
  CHECK(code(newer, 64) == ErrorCode::unknown_field);

  for (const double factor : {0.0, -1.0, nan, inf}) {
    for (const auto scaling :
         {RopeScaling::linear, RopeScaling::llama3, RopeScaling::yarn, RopeScaling::dynamic_ntk}) {
      RopeSpec bad = llama31();
      bad.scaling = scaling;
      bad.factor = factor;
      CHECK(code(bad, 128) == ErrorCode::invalid_argument);
    }
  }
  RopeSpec bad = yarn4();
  bad.factor = 0.5;
  CHECK(code(bad, 128) == ErrorCode::invalid_argument);
  bad = yarn4();
  bad.original_context = 0;
  CHECK(code(bad, 128) == ErrorCode::invalid_argument);
  bad = yarn4();
  bad.beta_slow = 32.0;
  CHECK(code(bad, 128) == ErrorCode::invalid_argument);
  bad = yarn4();
  bad.attention_factor = nan;
  CHECK(code(bad, 128) == ErrorCode::invalid_argument);
  bad = llama31();
  bad.high_freq_factor = 1.0;
  CHECK(code(bad, 128) == ErrorCode::invalid_argument);
  bad = longrope(64);
  bad.short_factors.pop_back();
  CHECK(code(bad, 64) == ErrorCode::invalid_argument);
  CHECK(kvmeld::validate(bad, 64).message().find("31 values for 32") != std::string::npos);
  bad = longrope(64);
  bad.long_factors[3] = 0.0f;
  CHECK(code(bad, 64) == ErrorCode::invalid_argument);
  bad = rotary(8);
  bad.scaling = RopeScaling::explicit_factors;
  bad.factors = {1.0f, 1.0f, 1.0f};
  CHECK(code(bad, 8) == ErrorCode::invalid_argument);
  bad.factors.push_back(std::numeric_limits<float>::quiet_NaN());
  CHECK(code(bad, 8) == ErrorCode::invalid_argument);
  bad = rotary(2);
  bad.scaling = RopeScaling::dynamic_ntk;
  bad.original_context = 2048;
  CHECK(code(bad, 2) == ErrorCode::invalid_argument);
  bad = rotary(8);
  bad.scaling = RopeScaling::explicit_factors;
  bad.factors = {1.0f, 1.0f, 1e-30f, 1.0f};
  CHECK(kvmeld::inverse_frequencies(bad, 0).error().message().find("pair 2") != std::string::npos);
  CHECK(kvmeld::inverse_frequencies(longrope(64), 0).error().code() == ErrorCode::invalid_argument);
}

TEST_CASE("keys are shifted only where frequencies stay the same") {
  CHECK(kvmeld::check_shift(rotary(64), 10, 1000000).ok());
  CHECK(kvmeld::check_shift(llama31(), 10, 1000000).ok());
  CHECK(kvmeld::check_shift(yarn4(), 10, 1000000).ok());
  CHECK(kvmeld::check_shift(RopeSpec::none(), 10, 1000000).ok());
  CHECK(kvmeld::check_shift(rotary(64), -1, 5).code() == ErrorCode::invalid_argument);

  const RopeSpec phi = longrope(64);
  CHECK(kvmeld::check_shift(phi, 4096, 17).ok());
  CHECK(kvmeld::check_shift(phi, 4097, 100000).ok());
  CHECK(kvmeld::check_shift(phi, 4096, 4097).code() == ErrorCode::rope_length_dependent);
  CHECK(kvmeld::check_shift(phi, 4097, 4096).code() == ErrorCode::rope_length_dependent);

  RopeSpec dynamic = rotary(64);
  dynamic.scaling = RopeScaling::dynamic_ntk;
  dynamic.original_context = 2048;
  CHECK(kvmeld::check_shift(dynamic, 1, 2048).ok());
  CHECK(kvmeld::check_shift(dynamic, 3000, 3000).ok());
  CHECK(kvmeld::check_shift(dynamic, 2048, 2049).code() == ErrorCode::rope_length_dependent);
  CHECK(kvmeld::check_shift(dynamic, 3000, 3001).code() == ErrorCode::rope_length_dependent);
  CHECK(kvmeld::check_shift(dynamic, 3000, 100).message().find("3000") != std::string::npos);
}

TEST_CASE("specs are equal only field by field") {
  RopeSpec a = yarn4(), b = yarn4();
  CHECK(a == b);
  b.attention_factor = 1.0;
  CHECK_FALSE(a == b);
  a = longrope(64), b = longrope(64);
  b.long_factors[5] += 1.0f;
  CHECK_FALSE(a == b);
}

TEST_CASE("named constructors set what their scaling reads, and each is sound as it comes") {
  const RopeSpec plain = RopeSpec::rotary(64, 5e5, RopePairing::interleaved);
  CHECK(plain.kind == RopeKind::rotary);
  CHECK(plain.pairing == RopePairing::interleaved);
  CHECK(plain.rotary_channels == 64);
  CHECK(plain.base == 5e5);
  CHECK(plain.scaling == RopeScaling::none);
  CHECK(RopeSpec::none().kind == RopeKind::none);
  CHECK(RopeSpec::none().rotary_channels == 0);

  const std::vector<float> near_list(32, 1.5F), far_list(32, 4.0F);
  const RopeSpec yarn = RopeSpec::yarn(plain, 4.0, 32768);
  CHECK(std::abs(yarn.attention_factor - (0.1 * std::log(4.0) + 1.0)) < 1e-15);
  CHECK(RopeSpec::yarn(plain, 1.0, 32768).attention_factor == 1.0);
  const RopeSpec long_rope = RopeSpec::longrope(plain, near_list, far_list, 4096);
  CHECK(long_rope.short_factors == near_list);
  CHECK(long_rope.long_factors == far_list);
  const RopeSpec factors = RopeSpec::with_factors(plain, far_list);
  CHECK(factors.factors == far_list);
  const struct {
    RopeSpec spec;
    RopeScaling scaling;
    double factor;
    std::int32_t original;
  } made[] = {{RopeSpec::linear(plain, 2.0), RopeScaling::linear, 2.0, 0},
              {RopeSpec::llama3(plain, 8.0, 8192), RopeScaling::llama3, 8.0, 8192},
              {yarn, RopeScaling::yarn, 4.0, 32768},
              {long_rope, RopeScaling::longrope, 1.0, 4096},
              {RopeSpec::dynamic_ntk(plain, 2.0, 2048), RopeScaling::dynamic_ntk, 2.0, 2048},
              {factors, RopeScaling::explicit_factors, 1.0, 0}};
  for (const auto& [spec, scaling, factor, original] : made) {
    CAPTURE(static_cast<int>(scaling));
    CHECK(spec.scaling == scaling);
    CHECK(spec.factor == factor);
    CHECK(spec.original_context == original);
    CHECK(spec.pairing == RopePairing::interleaved);
    CHECK(spec.base == 5e5);
    CHECK(code(spec, 64) == ErrorCode::ok);
  }
}

TEST_CASE("a rope that nobody declared is refused wherever it could be taken for none") {
  RopeSpec forgotten;  // channels and base set, kind forgotten
  forgotten.rotary_channels = 64;
  forgotten.base = 1e6;
  for (const RopeSpec& rope : {RopeSpec{}, forgotten}) {
    CHECK(code(rope, 64) == ErrorCode::invalid_argument);
    CHECK(kvmeld::inverse_frequencies(rope, 0).error().code() == ErrorCode::invalid_argument);
    CHECK(kvmeld::check_shift(rope, 1, 2).code() == ErrorCode::invalid_argument);
    const std::string message = kvmeld::validate(rope, 64).message();
    CHECK(message.find("RopeSpec::rotary(channels, base, pairing)") != std::string::npos);
    CHECK(message.find("RopeSpec::none()") != std::string::npos);
    kvmeld::Geometry g;
    g.layers.assign(3, kvmeld::attention_layer(kvmeld::ElementType::f16, 2, 64, rotary(64)));
    CHECK(kvmeld::validate(g).ok());
    for (const bool marked : {false, true}) {
      g.layers[2].rope = rope;
      g.layers[2].planes[0].rotary = marked;
      const kvmeld::Status status = kvmeld::validate(g);
      CHECK(status.code() == ErrorCode::invalid_argument);
      CHECK(status.message().find("layer 2") != std::string::npos);
    }
    g.layers[2].planes.clear();  // a layer that stores nothing says it too
    CHECK(kvmeld::validate(g).code() == ErrorCode::invalid_argument);
  }
}

namespace {

using kvmeld::Plane;

// One layer between two sound ones: what `validate` says of it.
std::string layer_refusal(const RopeSpec& rope, std::vector<std::pair<Plane, bool>> planes,
                          kvmeld::KeyForm form = kvmeld::KeyForm::post_rope) {
  kvmeld::Geometry g;
  g.layers.assign(3, kvmeld::attention_layer(kvmeld::ElementType::f16, 2, 64, rotary(64)));
  kvmeld::LayerShape& layer = g.layers[1];
  layer.rope = rope;
  layer.key_form = form;
  layer.planes.clear();
  for (const auto& [plane, marked] : planes)
    layer.planes.push_back({.plane = plane,
                            .type = kvmeld::ElementType::f16,
                            .heads = 1,
                            .channels = 64,
                            .rotary = marked});
  const kvmeld::Status status = kvmeld::validate(g);
  if (status.ok()) return {};
  CHECK(status.code() == ErrorCode::invalid_argument);
  CHECK(status.message().find("layer 1") != std::string::npos);
  return status.message();
}

}  // namespace

TEST_CASE("a rope and the planes' rotary flags do not contradict each other") {
  const RopeSpec rotates = rotary(64), still = RopeSpec::none();
  const auto says = [](const std::string& message, const char* part) {
    CAPTURE(message);
    CHECK(message.find(part) != std::string::npos);
  };
  for (const auto form : {kvmeld::KeyForm::post_rope, kvmeld::KeyForm::pre_rope}) {
    CHECK(layer_refusal(rotates, {{Plane::key, true}, {Plane::value, false}}, form).empty());
    CHECK(layer_refusal(still, {{Plane::key, false}, {Plane::value, false}}, form).empty());
    says(layer_refusal(rotates, {{Plane::key, false}, {Plane::value, false}}, form),
         "not marked rotary");
    says(layer_refusal(still, {{Plane::key, true}, {Plane::value, false}}, form),
         "plane 0 is marked rotary");
    says(layer_refusal(rotates, {{Plane::key, true}, {Plane::value, true}}, form), "values");
  }
  // Latent attention: the part with position is rotated, the latent is not; index keys as their
  // model has it.
  CHECK(layer_refusal(rotates, {{Plane::latent, false}, {Plane::rope_part, true}}).empty());
  CHECK(layer_refusal(rotates,
                      {{Plane::latent, false}, {Plane::rope_part, true}, {Plane::index_key, false}})
            .empty());
  CHECK(layer_refusal(rotates,
                      {{Plane::latent, false}, {Plane::rope_part, true}, {Plane::index_key, true}})
            .empty());
  CHECK(
      layer_refusal(rotates, {{Plane::key, false}, {Plane::value, false}, {Plane::rope_part, true}})
          .empty());
  CHECK(
      layer_refusal(rotates, {{Plane::latent, true}}).empty());  // one plane that holds both parts
  says(layer_refusal(rotates, {{Plane::latent, false}, {Plane::rope_part, false}}), "rope part");
  says(layer_refusal(rotates, {{Plane::latent, false}}), "no plane");
  says(layer_refusal(rotates, {{Plane::index_key, true}, {Plane::scale, true}}), "scales");
  // The spec is looked at whether or not a plane says rotary.
  CHECK(layer_refusal(rotates, {}).empty());
  says(layer_refusal(rotary(63), {}), "63");
  says(layer_refusal(rotary(66), {{Plane::key, true}, {Plane::value, false}}), "66");
  RopeSpec half = still;
  half.rotary_channels = 32;
  says(layer_refusal(half, {{Plane::key, false}, {Plane::value, false}}), "32 rotary channels");
}
