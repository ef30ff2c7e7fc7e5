// Gradients of fusers against central differences in double, and the forward pass against the fuser
// itself.
#include <cmath>
#include <cstring>
#include <vector>

#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using Numbers = std::vector<double>;

Numbers random_numbers(std::size_t n, std::uint64_t seed, double scale = 1, double offset = 0) {
  test::Random random(seed);
  Numbers out(n);
  for (double& x : out) x = offset + scale * static_cast<double>(random.value());
  return out;
}

// d loss / d x by central differences.
template <class Loss>
Numbers differences(Numbers& x, const Loss& loss) {
  Numbers out;
  for (double& value : x) {
    const double old = value, step = 1e-5 * (1 + std::abs(old));
    value = old + step;
    const double above = loss();
    value = old - step;
    const double below = loss();
    value = old;
    out.push_back((above - below) / (2 * step));
  }
  return out;
}
void check_close(const Numbers& got, const Numbers& want) {
  REQUIRE(got.size() == want.size());
  double size = 0, error = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    size = std::max(size, std::abs(want[i]));
    error = std::max(error, std::abs(got[i] - want[i]));
  }
  CAPTURE(size, error);
  CHECK(size > 0);
  CHECK(error <= 1e-6 * size);  // 1e-4 is asked
}
double inner(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Loss = cotangent · y for a fuser y(values, weights) written out here.
template <class Fuse, class Vjp>
void check_mean(const Fuse& fuse, const Vjp& vjp) {
  for (const std::size_t n : {1U, 2U, 5U}) {
    for (const std::size_t channels : {1U, 7U, 40U}) {
      CAPTURE(n, channels);
      Numbers values = random_numbers(n * channels, 3, 1, 1),
              weights = random_numbers(n, 4, 0.2, 1);
      const Numbers cotangent = random_numbers(channels, 5);
      Numbers d_values(values.size(), 0.5), d_weights(n, 0.25);  // gradients are added
      REQUIRE(vjp(kvmeld::gradients::MixPullback<double>{values, weights, cotangent},
                  kvmeld::gradients::MixGradients<double>{d_values, d_weights})
                  .ok());
      for (double& d : d_values) d -= 0.5;
      for (double& d : d_weights) d -= 0.25;
      const auto loss = [&] { return inner(cotangent, fuse(values, weights, channels)); };
      check_close(d_values, differences(values, loss));
      if (n > 1) check_close(d_weights, differences(weights, loss));
      // a mean of one does not depend on its weight
      for (const double d : d_weights) CHECK((n > 1 || std::abs(d) < 1e-9));
    }
  }
}

Numbers weighted_mean(const Numbers& values, const Numbers& weights, std::size_t channels) {
  Numbers out(channels);
  double total = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    total += weights[i];
    for (std::size_t c = 0; c < channels; ++c) out[c] += weights[i] * values[i * channels + c];
  }
  for (double& x : out) x /= total;
  return out;
}

}  // namespace

TEST_CASE("gradients through weighted means") {
  check_mean(weighted_mean, kvmeld::gradients::weighted_mean_vjp<double>);
}

TEST_CASE("gradients through norm-preserving means") {
  check_mean(
      [](const Numbers& values, const Numbers& weights, std::size_t channels) {
        Numbers out = weighted_mean(values, weights, channels);
        double norms = 0, total = 0;
        for (std::size_t i = 0; i < weights.size(); ++i) {
          const Numbers row(values.begin() + static_cast<std::ptrdiff_t>(i * channels),
                            values.begin() + static_cast<std::ptrdiff_t>((i + 1) * channels));
          norms += weights[i] * std::sqrt(inner(row, row));
          total += weights[i];
        }
        const double scale = norms / total / std::sqrt(inner(out, out));
        for (double& x : out) x *= scale;
        return out;
      },
      kvmeld::gradients::norm_preserving_mean_vjp<double>);
  // Opposite rows: the mean counts as zero, and nothing comes back.
  const Numbers values{1, 2, -1, -2}, weights{1, 1}, cotangent{1, 1};
  Numbers d_values(4), d_weights(2);
  REQUIRE(kvmeld::gradients::norm_preserving_mean_vjp<double>({values, weights, cotangent},
                                                              {d_values, d_weights})
              .ok());
  CHECK(d_values == Numbers(4));
  CHECK(d_weights == Numbers(2));
}

TEST_CASE("gradients through gates: rows, weights and every parameter") {
  const auto kind = GENERATE(kvmeld::GateKind::token, kvmeld::GateKind::channel);
  const std::size_t n = GENERATE(1U, 2U, 5U);
  const std::size_t channels = GENERATE(1U, 6U), hidden = GENERATE(1U, 9U);
  CAPTURE(n, channels, hidden);
  kvmeld::gradients::GateTape<double> tape(kind, channels, hidden);
  Numbers parameters = random_numbers(tape.parameter_count(), 1, 0.2),
          values = random_numbers(n * channels, 2, 0.3), weights = random_numbers(n, 3, 0.2, 1);
  const Numbers cotangent = random_numbers(channels, 4);
  Numbers out(channels), d_parameters(parameters.size(), 0.5), d_values(values.size(), 0.25),
      d_weights(n, 0.125);
  const auto loss = [&] {
    REQUIRE(tape.forward({parameters, values, weights}, out).ok());
    return inner(cotangent, out);
  };
  loss();
  REQUIRE(tape.vjp(cotangent, {d_parameters, d_values, d_weights}).ok());
  for (double& d : d_parameters) d -= 0.5;
  for (double& d : d_values) d -= 0.25;
  for (double& d : d_weights) d -= 0.125;
  check_close(d_values, differences(values, loss));
  if (n == 1) return;  // a gate of one is open, whatever the network says
  check_close(d_weights, differences(weights, loss));
  check_close(d_parameters, differences(parameters, loss));

  // The same row through the fuser: f32 from f64.
  const kvmeld::GateShape shape{.kind = kind,
                                .key_channels = static_cast<std::int32_t>(channels),
                                .value_channels = static_cast<std::int32_t>(channels),
                                .hidden = static_cast<std::int32_t>(hidden)};
  REQUIRE(static_cast<std::size_t>(shape.size()) == parameters.size());
  const auto made =
      kvmeld::GateWeights::make(shape, std::vector<float>(parameters.begin(), parameters.end()));
  REQUIRE(made.ok());
  std::vector<float> rows(n * 32), row_weights(weights.begin(), weights.end());
  for (std::size_t at = 0; at < values.size(); ++at)
    rows[at / channels * 32 + at % channels] = static_cast<float>(values[at]);
  const kvmeld::HeadRows head{rows.data(),
                              32,
                              row_weights.data(),
                              static_cast<std::int32_t>(n),
                              static_cast<std::int32_t>(channels),
                              0,
                              0,
                              kvmeld::Plane::key};
  alignas(64) float mixed[1024];
  if (kind == kvmeld::GateKind::token) {
    kvmeld::Gated{*made}.mixing().mix(kvmeld::best_isa(), head, mixed);
  } else {
    kvmeld::GatedChannels{*made}.mixing().mix(kvmeld::best_isa(), head, mixed);
  }
  loss();
  for (std::size_t c = 0; c < channels; ++c)
    CHECK(std::abs(static_cast<double>(mixed[c]) - out[c]) <= 1e-5);
}

TEST_CASE("sizes that do not fit are refused, and nothing is added") {
  using kvmeld::ErrorCode;
  const Numbers values(6, 1.0), weights(2, 1.0), cotangent(3, 1.0);
  Numbers d_values(6), d_weights(2);
  CHECK(kvmeld::gradients::weighted_mean_vjp<double>(
            {std::span(values).first(5), weights, cotangent}, {d_values, d_weights})
            .code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::gradients::weighted_mean_vjp<double>({values, weights, cotangent},
                                                     {d_values, std::span(d_weights).first(1)})
            .code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::gradients::norm_preserving_mean_vjp<double>({{}, {}, cotangent}, {{}, {}}).code() ==
        ErrorCode::invalid_argument);
  kvmeld::gradients::GateTape<double> tape(kvmeld::GateKind::token, 3, 4);
  Numbers parameters(tape.parameter_count(), 0.1), out(3), d_parameters(parameters.size());
  // no row yet
  CHECK(tape.vjp(cotangent, {d_parameters, d_values, d_weights}).code() ==
        ErrorCode::invalid_argument);
  CHECK(tape.forward({std::span<const double>(parameters).first(5), values, weights}, out).code() ==
        ErrorCode::invalid_argument);
  CHECK(tape.forward({parameters, {}, {}}, out).code() == ErrorCode::invalid_argument);
  REQUIRE(tape.forward({parameters, values, weights}, out).ok());
  CHECK(tape.vjp(std::span(cotangent).first(2), {d_parameters, d_values, d_weights}).code() ==
        ErrorCode::invalid_argument);
  CHECK(tape.vjp(cotangent, {d_parameters, std::span(d_values).first(2), {}}).code() ==
        ErrorCode::invalid_argument);
  CHECK(d_values == Numbers(6));
  CHECK(tape.vjp(cotangent, {d_parameters, {}, {}}).ok());  // parameters alone
}
