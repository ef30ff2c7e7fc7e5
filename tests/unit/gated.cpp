// Fusers that mix a head's rows: against plain loops in double, the same bytes in every instruction
// set and in lanes, laws, and what they refuse.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/policies/gate_weights.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>

#include "support/lane_work.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using kvmeld::Gated;
using kvmeld::GatedChannels;
using kvmeld::GateKind;
using kvmeld::GateShape;
using kvmeld::GateWeights;
using kvmeld::NormPreservingMean;
using kvmeld::Plane;

std::vector<float> random_parameters(const GateShape& shape, std::uint64_t seed,
                                     float scale = 0.25F) {
  test::Random random(seed);
  std::vector<float> out(static_cast<std::size_t>(shape.size()));
  for (float& w : out) w = random.value() / 4 * scale;
  return out;
}
std::shared_ptr<const GateWeights> random_weights(const GateShape& shape, std::uint64_t seed = 7,
                                                  float scale = 0.25F) {
  const auto made = GateWeights::make(shape, random_parameters(shape, seed, scale));
  INFO(made.status().message());
  REQUIRE(made.ok());
  return *made;
}

// Rows side by side as a host's render lays them out.
struct Rows {
  std::vector<float> values, weights;
  kvmeld::HeadRows rows;

  Rows(int count, int channels, std::uint64_t seed, int layer = 0, Plane plane = Plane::key) {
    const int stride = (channels + 31) / 32 * 32;
    test::Random random(seed);
    values.assign(static_cast<std::size_t>(count * stride), 0.0F);
    for (int i = 0; i < count; ++i) {
      for (int c = 0; c < channels; ++c)
        values[static_cast<std::size_t>(i * stride + c)] = random.value();
      weights.push_back(0.25F * static_cast<float>(1 + random.below(8)));
    }
    rows = {values.data(), stride, weights.data(), count, channels, layer, 0, plane};
  }
  [[nodiscard]] double at(int i, int c) const { return static_cast<double>(rows.value(i, c)); }
};

// The lane form over the same rows, and every instruction set's: the same bytes.
template <class Mix>
std::vector<float> mixed(const Mix& mix, const Rows& r) {
  std::vector<float> out;
  const auto prepared = mix.prepare(r.rows);
  for (int c = 0; c < r.rows.width; ++c) out.push_back(mix.channel(r.rows, prepared, c));
  for (const kvmeld::Isa isa : test::instruction_sets()) {
    alignas(64) float row[1024] = {};
    mix.mix(isa, r.rows, row);
    INFO(kvmeld::to_string(isa));
    REQUIRE(std::equal(out.begin(), out.end(), row,
                       [](float a, float b) { return std::memcmp(&a, &b, 4) == 0; }));
  }
  return out;
}

// A gate in double, from the parameters as users know them.
std::vector<double> reference(const GateShape& shape, const float* w, const Rows& r) {
  const int n = r.rows.contributions, channels = r.rows.width, h = shape.hidden;
  const int outputs = shape.kind == GateKind::token ? 1 : channels;
  std::vector<double> mean(static_cast<std::size_t>(channels)), logits;
  for (int c = 0; c < channels; ++c) {
    for (int i = 0; i < n; ++i) mean[static_cast<std::size_t>(c)] += r.at(i, c) / n;
  }
  const float* const bias = w + h * 2 * channels;
  const float* const second = bias + h;
  for (int i = 0; i < n; ++i) {
    std::vector<double> units;
    for (int j = 0; j < h; ++j) {
      double sum = static_cast<double>(bias[j]);
      for (int c = 0; c < channels; ++c)
        sum += static_cast<double>(w[j * 2 * channels + c]) * r.at(i, c);
      for (int c = 0; c < channels; ++c)
        sum += static_cast<double>(w[j * 2 * channels + channels + c]) *
               mean[static_cast<std::size_t>(c)];
      units.push_back(std::tanh(sum));
    }
    for (int o = 0; o < outputs; ++o) {
      double sum = static_cast<double>(second[outputs * h + o]);
      for (int j = 0; j < h; ++j)
        sum += static_cast<double>(second[o * h + j]) * units[static_cast<std::size_t>(j)];
      logits.push_back(sum);
    }
  }
  std::vector<double> out;
  for (int c = 0; c < channels; ++c) {
    double total = 0, sum = 0;
    for (int i = 0; i < n; ++i) {
      const double g =
          static_cast<double>(r.weights[static_cast<std::size_t>(i)]) *
          std::exp(logits[static_cast<std::size_t>(i * outputs + (outputs == 1 ? 0 : c))]);
      total += g;
      sum += g * r.at(i, c);
    }
    out.push_back(sum / total);
  }
  return out;
}

template <class F>
auto given(const kvmeld::Alignment& a, F fuser) {
  return kvmeld::merger(ById{}, Aligner{test::Given{std::make_shared<const kvmeld::Alignment>(a)}},
                        Fuser{fuser});
}
template <class F>
auto matched(F fuser) {
  return kvmeld::merger(ById{}, Aligner{kvmeld::TokenMatch{}}, Fuser{fuser});
}

}  // namespace

TEST_CASE(
    "a gate is the network in double, and the same bytes in lanes and in every instruction set") {
  const int count = GENERATE(1, 2, 3, 5, 6, 11, 64);
  const auto [channels, hidden] = GENERATE(std::pair{1, 1}, std::pair{80, 64}, std::pair{96, 33},
                                           std::pair{128, 64}, std::pair{64, 128});
  CAPTURE(count, channels, hidden);
  const Rows rows(count, channels, 11);
  GateShape shape{.key_channels = channels, .value_channels = channels, .hidden = hidden};
  const auto token = random_weights(shape);
  const auto check = [&](const std::vector<float>& got, const std::vector<double>& want) {
    for (std::size_t c = 0; c < want.size(); ++c)
      REQUIRE(std::abs(static_cast<double>(got[c]) - want[c]) <= 1e-5 * (1 + std::abs(want[c])));
  };
  check(mixed(Gated{token}.mixing(), rows), reference(shape, token->parameters().data(), rows));
  if (!GatedChannels{token}.check(count)) return;
  shape.kind = GateKind::channel;
  const auto channel = random_weights(shape, 8);
  check(mixed(GatedChannels{channel}.mixing(), rows),
        reference(shape, channel->parameters().data(), rows));
}

TEST_CASE("every layer and plane has its network") {
  GateShape shape{
      .key_channels = 40, .value_channels = 24, .hidden = 8, .layers = 3, .planes_apart = true};
  for (const GateKind kind : {GateKind::token, GateKind::channel}) {
    shape.kind = kind;
    const auto weights = random_weights(shape);
    const float* network = weights->parameters().data();
    for (int layer = 0; layer < 3; ++layer) {
      for (const Plane plane : {Plane::key, Plane::value}) {
        const int p = plane == Plane::value ? 1 : 0;
        const Rows rows(4, shape.channels(p), 5, layer, plane);
        const auto got = kind == GateKind::token ? mixed(Gated{weights}.mixing(), rows)
                                                 : mixed(GatedChannels{weights}.mixing(), rows);
        const auto want = reference(shape, network, rows);
        for (std::size_t c = 0; c < want.size(); ++c)
          REQUIRE(std::abs(static_cast<double>(got[c]) - want[c]) <=
                  1e-5 * (1 + std::abs(want[c])));
        network += shape.network_size(p);
      }
    }
  }
}

TEST_CASE("a norm-preserving mean is as long as its rows are on average") {
  const int count = GENERATE(1, 2, 7, 64);
  const int channels = GENERATE(1, 80, 96, 128);
  const Rows rows(count, channels, 3);
  const auto got = mixed(NormPreservingMean{}.mixing(), rows);
  std::vector<double> mean(static_cast<std::size_t>(channels));
  double norms = 0, total = 0, length = 0;
  for (int i = 0; i < count; ++i) {
    double square = 0;
    const auto w = static_cast<double>(rows.weights[static_cast<std::size_t>(i)]);
    for (int c = 0; c < channels; ++c) {
      square += rows.at(i, c) * rows.at(i, c);
      mean[static_cast<std::size_t>(c)] += w * rows.at(i, c);
    }
    norms += w * std::sqrt(square);
    total += w;
  }
  for (const double x : mean) length += x * x;
  length = std::sqrt(length);
  for (std::size_t c = 0; c < mean.size(); ++c) {
    REQUIRE(std::abs(static_cast<double>(got[c]) - mean[c] * norms / total / length) <=
            1e-6 * norms / total);
  }
}

TEST_CASE("equal rows fuse to themselves, opposite and zero rows to zero") {
  const GateShape shape{.key_channels = 48, .value_channels = 48, .hidden = 64};
  const GateShape by_channel{
      .kind = GateKind::channel, .key_channels = 48, .value_channels = 48, .hidden = 64};
  const int count = GENERATE(2, 3, 7, 64);
  Rows rows(count, 48, 21);
  for (int i = 1; i < count; ++i)
    std::copy_n(rows.values.begin(), 64, rows.values.begin() + i * 64);
  const std::vector<float> row(rows.values.begin(), rows.values.begin() + 48);
  CHECK(mixed(Gated{random_weights(shape)}.mixing(), rows) == row);
  CHECK(mixed(GatedChannels{random_weights(by_channel)}.mixing(), rows) == row);
  CHECK(mixed(NormPreservingMean{}.mixing(), rows) == row);
  if (count == 2) {
    for (std::size_t c = 0; c < 48; ++c) rows.values[64 + c] = -rows.values[c];
    rows.weights.assign(2, 1.0F);
    CHECK(mixed(NormPreservingMean{}.mixing(), rows) == std::vector<float>(48, 0.0F));
  }
  std::fill(rows.values.begin(), rows.values.end(), 0.0F);
  CHECK(mixed(Gated{random_weights(shape)}.mixing(), rows) == std::vector<float>(48, 0.0F));
  CHECK(mixed(GatedChannels{random_weights(by_channel)}.mixing(), rows) ==
        std::vector<float>(48, 0.0F));
  CHECK(mixed(NormPreservingMean{}.mixing(), rows) == std::vector<float>(48, 0.0F));
}

TEST_CASE("weights multiply what the network opens, and the largest numbers stay numbers") {
  GateShape shape{.key_channels = 32, .value_channels = 32, .hidden = 16};
  Rows rows(3, 32, 2);
  // No network: a weighted mean.
  const auto silent =
      *GateWeights::make(shape, std::vector<float>(static_cast<std::size_t>(shape.size())));
  const auto got = mixed(Gated{silent}.mixing(), rows);
  for (int c = 0; c < 32; ++c) {
    double sum = 0, total = 0;
    for (int i = 0; i < 3; ++i) {
      sum += static_cast<double>(rows.weights[static_cast<std::size_t>(i)]) * rows.at(i, c);
      total += static_cast<double>(rows.weights[static_cast<std::size_t>(i)]);
    }
    REQUIRE(std::abs(static_cast<double>(got[static_cast<std::size_t>(c)]) - sum / total) <= 1e-6);
  }
  // Sums that overflow to both infinities.
  for (float& x : rows.values)
    x = x < 0 ? -std::numeric_limits<float>::max() : std::numeric_limits<float>::max();
  rows.weights = {std::numeric_limits<float>::denorm_min(), 1.0F,
                  std::numeric_limits<float>::max()};
  for (const GateKind kind : {GateKind::token, GateKind::channel}) {
    shape.kind = kind;
    const auto huge = random_weights(shape, 3, 0x1p62F);
    for (const float x : kind == GateKind::token ? mixed(Gated{huge}.mixing(), rows)
                                                 : mixed(GatedChannels{huge}.mixing(), rows))
      REQUIRE(std::isfinite(x));
  }
  for (const float x : mixed(NormPreservingMean{}.mixing(), rows)) REQUIRE(std::isfinite(x));
}

TEST_CASE("gates render to the same bytes in every executor") {
  const auto type = GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0);
  const std::int64_t count = 4;
  const auto g = test::geometry({.type = type,
                                 .layers = 2,
                                 .heads = 2,
                                 .channels = 32,
                                 .value_channels = 64,
                                 .first = 8,
                                 .rotary = 20});
  std::vector<test::Sealed> spans;
  for (const std::uint64_t seed : {1U, 2U})
    spans.push_back(test::sealed(
        g, 12, seed, {.positions = test::gapped_positions(12, static_cast<std::int64_t>(seed))}));
  const auto set = test::set_of(test::by_id(spans));
  kvmeld::Alignment alignment = test::crowd(count, 12);
  kvmeld::Target target;
  target.geometry = *g;
  GateShape shape{
      .key_channels = 32, .value_channels = 64, .hidden = 24, .layers = 2, .planes_apart = true};
  for (const bool by_head : {false, true}) {
    if (by_head) {
      // the last of which stands alone in its row
      const std::size_t n = alignment.groups[0].contributions.size();
      for (std::size_t i = 0; i < 4 * n; ++i)
        alignment.groups[0].head_weights.push_back(
            (i % n + i / n) % 3 == 1 && i % n + 1 < n ? 0.0F : 0.5F);
    }
    shape.kind = GateKind::token;
    test::render_everywhere(set, given(alignment, Gated{random_weights(shape)}), target);
    shape.kind = GateKind::channel;
    test::render_everywhere(set, given(alignment, GatedChannels{random_weights(shape)}), target,
                            test::Layout::paged);
    test::render_everywhere(set, given(alignment, NormPreservingMean{}), target);
  }
  // Weights whose products are rounded, so that a product joined with its sum would show.
  alignment.groups[0].head_weights.clear();
  for (std::size_t i = 0; i < alignment.groups[0].contributions.size(); ++i)
    alignment.groups[0].contributions[i].weight = i % 2 == 0 ? 0.3F : 0.7F;
  shape.kind = GateKind::token;
  test::render_everywhere(set, given(alignment, Gated{random_weights(shape)}), target);
  shape.kind = GateKind::channel;
  test::render_everywhere(set, given(alignment, GatedChannels{random_weights(shape)}), target);
}

TEST_CASE("agents in another order give the same bytes; one alone is a copy") {
  const auto g = test::geometry({.type = ElementType::f16, .channels = 80});
  const GateShape shape{.key_channels = 80, .value_channels = 80, .hidden = 16};
  std::vector<test::Sealed> spans;
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) spans.push_back(test::sealed(g, 1, seed));
  kvmeld::Target target;
  target.geometry = *g;
  const auto check = [&](const auto& fuser) {
    std::vector<test::Sealed> order = spans;
    const auto first = test::render_everywhere(test::set_of(order), matched(fuser), target);
    for (int rotation = 0; rotation < 3; ++rotation) {
      std::rotate(order.begin(), order.begin() + 1, order.end());
      test::TestCache again(g, 1);
      REQUIRE(
          kvmeld::render(kvmeld::exec::seq, test::set_of(order), matched(fuser), again.out()).ok());
      CHECK(again.buffers() == first->buffers());
    }
    const auto alone = test::render_everywhere(test::set_of({spans[0]}), matched(fuser), target);
    const auto copied =
        test::render_everywhere(test::set_of({spans[0]}), matched(kvmeld::WeightedMean{}), target);
    CHECK(alone->buffers() == copied->buffers());
  };
  check(Gated{random_weights(shape)});
  check(NormPreservingMean{});
}

TEST_CASE("weights go to a file and come back") {
  GateShape shape{.key_channels = 24, .value_channels = 24, .hidden = 5};
  const int form = GENERATE(0, 1, 2, 3);
  shape.kind = GENERATE(GateKind::token, GateKind::channel);
  if ((form & 1) != 0) shape.layers = 3;
  if ((form & 2) != 0) {
    shape.planes_apart = true;
    shape.value_channels = 40;
  }
  const auto weights = random_weights(shape);
  const auto file = kvmeld::to_safetensors(*weights);
  REQUIRE(file.ok());
  const auto back = kvmeld::gate_from_safetensors(*file);
  INFO(back.status().message());
  REQUIRE(back.ok());
  CHECK((*back)->shape() == shape);
  CHECK((*back)->digest() == weights->digest());
  CHECK(*kvmeld::to_safetensors(**back) == *file);
  // Another number is another name, of weights and of a merger.
  auto other = random_parameters(shape, 7);
  other.back() = std::nextafter(other.back(), 1.0F);
  const auto changed = GateWeights::make(shape, other);
  REQUIRE(changed.ok());
  CHECK((*changed)->digest() != weights->digest());
  CHECK(matched(Gated{*changed}).digest() != matched(Gated{weights}).digest());
  // One element not finite.
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    auto broken = *file;
    std::memcpy(broken.data() + broken.size() - 4, &bad, 4);
    CHECK(kvmeld::gate_from_safetensors(broken).status().code() == ErrorCode::non_finite);
  }
  for (std::size_t cut = 0; cut < file->size(); cut += 97)
    CHECK_FALSE(kvmeld::gate_from_safetensors(std::span(*file).first(cut)).ok());
}

TEST_CASE("files that are no gate are refused") {
  const auto refused = [](ErrorCode code, const char* text, const auto& change) {
    std::vector<std::pair<std::string, std::vector<std::uint64_t>>> tensors = {
        {"first.weight", {4, 16}},
        {"first.bias", {4}},
        {"second.weight", {1, 4}},
        {"second.bias", {1}}};
    kvmeld::SafetensorsWriter writer;
    change(tensors, writer);
    for (const auto& [name, shape] : tensors) {
      std::size_t count = 1;
      for (const auto n : shape) count *= n;
      writer.floats(name, shape, std::span<const float>(std::vector<float>(count, 0.5F)));
    }
    const auto file = writer.finish();
    REQUIRE(file.ok());
    const auto got = kvmeld::gate_from_safetensors(*file).status();
    INFO(got.message());
    CHECK(got.code() == code);
    CHECK(got.message().find(text) != std::string::npos);
  };
  refused(ErrorCode::ok, "", [](auto&, auto&) {});
  refused(ErrorCode::unknown_field, "relu",
          [](auto&, auto& w) { w.metadata("activation", "relu"); });
  refused(ErrorCode::unknown_field, "5 tensors", [](auto& t, auto&) {
    t.push_back({"third.weight", {2}});
  });
  refused(ErrorCode::not_found, "first.bias", [](auto& t, auto&) { t[1].first = "first.bais"; });
  refused(ErrorCode::not_found, "second.weight", [](auto& t, auto&) { t[2].first = "second"; });
  refused(ErrorCode::geometry_mismatch, "first.bias", [](auto& t, auto&) { t[1].second = {5}; });
  refused(ErrorCode::geometry_mismatch, "first.weight", [](auto& t, auto&) {
    t[0].second = {4, 15};
  });
  refused(ErrorCode::geometry_mismatch, "first.weight", [](auto& t, auto&) {
    t[2].second = {3, 4};
  });
  refused(ErrorCode::geometry_mismatch, "first.weight", [](auto& t, auto&) {
    t[0].second = {300, 16};
  });
  refused(ErrorCode::invalid_argument, "hidden", [](auto& t, auto&) {
    t[0].second = {0, 16};
    t[1].second = {0};
    t[2].second = {1, 0};
  });
}

TEST_CASE("sizes, models and crowds that do not fit are refused") {
  const GateShape shape{.key_channels = 64, .value_channels = 64, .hidden = 64};
  const auto make = [](GateShape s) {
    return GateWeights::make(s, std::vector<float>(static_cast<std::size_t>(s.size())))
        .status()
        .code();
  };
  CHECK(make(shape) == ErrorCode::ok);
  CHECK(make({.key_channels = 64, .value_channels = 32, .hidden = 64}) ==
        ErrorCode::invalid_argument);
  CHECK(make({.key_channels = 64, .value_channels = 64, .hidden = 257}) ==
        ErrorCode::invalid_argument);
  CHECK(make({.key_channels = 1025, .value_channels = 1025, .hidden = 8}) ==
        ErrorCode::invalid_argument);
  CHECK(make({.key_channels = 64, .value_channels = 64, .hidden = 8, .layers = 0}) ==
        ErrorCode::invalid_argument);
  CHECK(GateWeights::make(shape, std::vector<float>(3)).status().code() ==
        ErrorCode::invalid_argument);
  std::vector<float> far = random_parameters(shape, 1);
  far[5] = 0x1.1p64F;
  CHECK(GateWeights::make(shape, far).status().code() == ErrorCode::oversized);

  const auto plan = [](const test::Model& model, const auto& fuser, std::int64_t count = 2) {
    const auto g = test::geometry(model);
    const auto set = test::set_of(test::by_id({test::sealed(g, 40, 1), test::sealed(g, 40, 2)}));
    kvmeld::Target target;
    target.geometry = *g;
    const auto got = kvmeld::plan(set, given(test::crowd(count, 40), fuser), target).status();
    INFO(got.message());
    CHECK((got.ok() || !got.message().empty()));
    return got.code();
  };
  const auto weights = random_weights(shape);
  GateShape other = shape;
  other.kind = GateKind::channel;
  const auto channels = random_weights(other);
  CHECK(plan({.channels = 64}, Gated{weights}) == ErrorCode::ok);
  CHECK(plan({.channels = 64}, Gated{weights}, 64) == ErrorCode::ok);
  CHECK(plan({.channels = 64}, Gated{weights}, 65) == ErrorCode::oversized);
  CHECK(plan({.channels = 64}, NormPreservingMean{}, 65) == ErrorCode::oversized);
  CHECK(plan({.channels = 64}, GatedChannels{channels}, 64) == ErrorCode::ok);
  CHECK(plan({.channels = 80}, Gated{weights}) == ErrorCode::geometry_mismatch);
  CHECK(plan({.channels = 64, .value_channels = 32}, Gated{weights}) ==
        ErrorCode::geometry_mismatch);
  CHECK(plan({.channels = 64}, Gated{channels}) == ErrorCode::invalid_argument);
  CHECK(plan({.channels = 64}, GatedChannels{weights}) == ErrorCode::invalid_argument);
  CHECK(plan({.channels = 64}, Gated{}) == ErrorCode::invalid_argument);
  other.layers = 3;
  CHECK(plan({.layers = 2, .channels = 64}, GatedChannels{random_weights(other)}) ==
        ErrorCode::geometry_mismatch);
  other = {.kind = GateKind::channel, .key_channels = 64, .value_channels = 64, .hidden = 256};
  CHECK(plan({.channels = 64}, GatedChannels{random_weights(other)}, 16) == ErrorCode::ok);
  CHECK(plan({.channels = 64}, GatedChannels{random_weights(other)}, 17) == ErrorCode::oversized);
}
