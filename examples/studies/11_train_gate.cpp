// Trains what decides how much of each agent enters, where the right shares are known: a gate that
// reads rows, and a predictor that reads features of fragments. Both are written as safetensors,
// read back, and used by renders of data they never saw.
//
//   bash examples/run.sh 11 [--steps N]        (no model is run; its flags are ignored)
//
// The task. Several agents hold the same tokens, each with noise of its own size. What is true lies
// in a part of the channels' space, so that rows show their noise in the rest of it; the best
// shares are 1/σ². Numbers are the mean squared error of a fused row against the truth, on held-out
// tokens.

#include "support/adam.hpp"
#include "support/study.hpp"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/policies/gate_weights.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/mean.hpp>

namespace {

using example::Adam;
using Json = nlohmann::json;
using Numbers = std::vector<double>;

constexpr std::size_t agents = 4, channels = 32, truth_channels = 12, hidden = 32;

/// SplitMix64, and normal numbers of it: the same run everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  double uniform() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  std::uint64_t state_;
};

/// What all agents saw: the truth lies in a random subspace, the same for the whole task.
class Task {
 public:
  Task() {
    Random random(1);
    basis_.resize(truth_channels * channels);
    for (double& x : basis_) x = random.normal() / std::sqrt(static_cast<double>(truth_channels));
  }
  [[nodiscard]] Numbers truth(Random& random) const {
    Numbers out(channels);
    for (std::size_t k = 0; k < truth_channels; ++k) {
      const double z = random.normal();
      for (std::size_t c = 0; c < channels; ++c) out[c] += z * basis_[k * channels + c];
    }
    return out;
  }
  /// Sizes of noise from .05 to 2, each octave as likely as the next.
  static double noise(Random& random) { return 0.05 * std::exp(random.uniform() * std::log(40.0)); }

 private:
  Numbers basis_;  // (truth channel, channel)
};

/// One token of the training set.
struct Sample {
  Numbers truth = Numbers(channels);
  Numbers values = Numbers(agents * channels);
  Numbers sigma = Numbers(agents);
};

Sample draw(const Task& task, Random& random) {
  Sample s;
  s.truth = task.truth(random);
  for (std::size_t i = 0; i < agents; ++i) {
    s.sigma[i] = Task::noise(random);
    for (std::size_t c = 0; c < channels; ++c)
      s.values[i * channels + c] = s.truth[c] + s.sigma[i] * random.normal();
  }
  return s;
}

double squared_error(const Numbers& row, const Numbers& truth, Numbers& cotangent, double scale) {
  double sum = 0;
  for (std::size_t c = 0; c < row.size(); ++c) {
    const double d = row[c] - truth[c];
    sum += d * d / static_cast<double>(row.size());
    cotangent[c] = 2 * d / static_cast<double>(row.size()) * scale;
  }
  return sum;
}

std::vector<float> narrowed(const Numbers& parameters) {
  return {parameters.begin(), parameters.end()};
}

/// A step size that falls to nothing along a cosine.
double rate_at(int step, int steps, double highest) {
  return highest * 0.5 * (1 + std::cos(3.141592653589793 * step / steps));
}

// ---- The gate
// -------------------------------------------------------------------------------------------------

/// @return the parameters of one network, in double.
Numbers train_gate(const Task& task, int steps, Json& progress) {
  kvmeld::gradients::GateTape<double> tape(kvmeld::GateKind::token, channels, hidden);
  Random random(2);
  Numbers parameters(tape.parameter_count()), gradient(parameters.size()), row(channels),
      cotangent(channels);
  for (std::size_t i = 0; i < hidden * 2 * channels; ++i)
    parameters[i] = random.normal() / std::sqrt(static_cast<double>(channels));
  for (std::size_t i = hidden * 2 * channels; i < parameters.size(); ++i)
    parameters[i] = 0.1 * random.normal();
  Adam adam(parameters.size());
  const Numbers ones(agents, 1.0);
  constexpr int batch = 16;
  double seen = 0;
  for (int step = 1; step <= steps; ++step) {
    gradient.assign(gradient.size(), 0);
    for (int b = 0; b < batch; ++b) {
      const Sample s = draw(task, random);
      if (!tape.forward({parameters, s.values, ones}, row)) std::abort();
      seen += squared_error(row, s.truth, cotangent, 1.0 / batch) / batch;
      if (!tape.vjp(cotangent, {gradient, {}, {}})) std::abort();
    }
    adam.step(parameters, gradient, rate_at(step, steps, 0.01));
    if (step % (steps < 5 ? 1 : steps / 5) == 0) {
      seen /= steps < 5 ? 1 : steps / 5;
      std::printf("gate       step %5d   error %.4f (training data, seen once)\n", step, seen);
      progress.push_back({{"step", step}, {"error", seen}});
      seen = 0;
    }
  }
  return parameters;
}

// ---- Fragments of the held-out set
// -------------------------------------------------------------------------------------------------

std::shared_ptr<const kvmeld::Geometry> one_layer() {
  auto geometry = std::make_shared<kvmeld::Geometry>();
  geometry->layers.push_back(
      kvmeld::attention_layer(kvmeld::ElementType::f32, 1, channels, kvmeld::RopeSpec::none()));
  return geometry;
}

/// Several agents' fragments of the same tokens. `by_token`: noise changes from token to token;
/// otherwise each agent has one size, which its confidence tells roughly.
struct HeldOut {
  kvmeld::FragmentSet set;
  std::vector<kvmeld::Fragment> fragments;
  Numbers confidence, sigma;           // (agent), (token, agent)
  std::vector<Numbers> truth, values;  // (token)
};

HeldOut held_out(const Task& task, const std::shared_ptr<const kvmeld::Geometry>& geometry,
                 std::size_t tokens, std::uint64_t seed, bool by_token) {
  Random random(seed);
  HeldOut out;
  Numbers sizes(agents);
  for (double& s : sizes) s = Task::noise(random);
  for (std::size_t t = 0; t < tokens; ++t) {
    Sample s = draw(task, random);
    for (std::size_t i = 0; i < agents; ++i) {
      if (!by_token) {
        for (std::size_t c = 0; c < channels; ++c) {
          double& x = s.values[i * channels + c];
          x = s.truth[c] + (x - s.truth[c]) / s.sigma[i] * sizes[i];
        }
        s.sigma[i] = sizes[i];
      }
      out.sigma.push_back(s.sigma[i]);
    }
    out.truth.push_back(s.truth);
    out.values.push_back(s.values);
  }
  for (std::size_t i = 0; i < agents; ++i) {
    kvmeld::HostCache cache(geometry, static_cast<std::int64_t>(tokens));
    const auto plane_bytes = cache.bytes().size() / 2;
    for (std::size_t p = 0; p < 2; ++p) {
      auto* const rows = reinterpret_cast<float*>(cache.bytes().data() + p * plane_bytes);
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t c = 0; c < channels; ++c)
          rows[t * channels + c] = static_cast<float>(out.values[t][i * channels + c]);
      }
    }
    auto sealed = kvmeld::seal(cache.kv_cache_ref());
    if (!sealed) std::abort();
    // An agent's own word on how sure it is: log-noise, misjudged by half an octave or so.
    out.confidence.push_back(1 / (1 + std::exp(std::log(sizes[i]) + 0.4 * random.normal())));
    if (!out.set.insert(*sealed, {.agent = i + 1, .sequence = 0},
                        static_cast<float>(out.confidence[i])))
      std::abort();
    out.fragments.push_back(*std::move(sealed));
  }
  return out;
}

/// Mean squared error of what a merger renders, keys and values.
template <class F>
double error_of(const HeldOut& data, const std::shared_ptr<const kvmeld::Geometry>& geometry,
                const F& fuser) {
  const auto tokens = data.truth.size();
  kvmeld::HostCache out(geometry, static_cast<std::int64_t>(tokens));
  const auto merger =
      kvmeld::merger(kvmeld::ById{}, kvmeld::Aligner{kvmeld::TokenMatch{}}, kvmeld::Fuser{fuser});
  const auto report = kvmeld::render(kvmeld::exec::seq, data.set, merger, out.mutable_ref());
  if (!report) {
    std::fprintf(stderr, "render: %s\n", report.error().message().c_str());
    std::exit(1);
  }
  double sum = 0;
  const auto* const rows = reinterpret_cast<const float*>(out.bytes().data());
  for (std::size_t at = 0; at < 2 * tokens * channels; ++at) {
    const double d =
        static_cast<double>(rows[at]) - data.truth[at / channels % tokens][at % channels];
    sum += d * d / static_cast<double>(2 * tokens * channels);
  }
  return sum;
}

/// The same by the known best shares, 1/σ².
double best_error(const HeldOut& data) {
  double sum = 0;
  for (std::size_t t = 0; t < data.truth.size(); ++t) {
    for (std::size_t c = 0; c < channels; ++c) {
      double row = 0, total = 0;
      for (std::size_t i = 0; i < agents; ++i) {
        const double w = 1 / (data.sigma[t * agents + i] * data.sigma[t * agents + i]);
        row += w * data.values[t][i * channels + c];
        total += w;
      }
      const double d = row / total - data.truth[t][c];
      sum += d * d / static_cast<double>(data.truth.size() * channels);
    }
  }
  return sum;
}

// ---- The predictor
// -------------------------------------------------------------------------------------------------

constexpr std::size_t predictor_inputs = kvmeld::fragment_feature_count, predictor_hidden = 12;

/// Features as the library reads them, standardised for training; the scales go into the first
/// layer afterwards.
struct Round {
  HeldOut data;
  Numbers features;  // (agent, input)
};

Numbers train_predictor(const Task& task, const std::shared_ptr<const kvmeld::Geometry>& geometry,
                        int steps, Json& progress) {
  std::vector<Round> rounds;
  Numbers shift(predictor_inputs), scale(predictor_inputs);
  for (std::uint64_t r = 0; r < 200; ++r) {
    Round round{held_out(task, geometry, 8, 1000 + r, false), {}};
    for (std::size_t i = 0; i < agents; ++i) {
      const kvmeld::Fragment& fragment = round.data.fragments[i];
      const kvmeld::Metadata metadata{
          {kvmeld::Mark{{i + 1, 0}, static_cast<float>(round.data.confidence[i])}}, false};
      const auto features =
          kvmeld::fragment_features({&fragment, &fragment.payloads()[0], &metadata, {}});
      if (!features) std::abort();
      round.features.insert(round.features.end(), features->begin(), features->end());
    }
    rounds.push_back(std::move(round));
  }
  const double count = static_cast<double>(rounds.size() * agents);
  const auto each = [&](const auto& f) {
    for (Round& round : rounds) {
      for (std::size_t at = 0; at < round.features.size(); ++at)
        f(round.features[at], at % predictor_inputs);
    }
  };
  each([&](double& x, std::size_t k) { shift[k] += x / count; });
  each([&](double& x, std::size_t k) { scale[k] += (x - shift[k]) * (x - shift[k]) / count; });
  // a feature that never changes tells nothing
  for (double& s : scale) s = s > 1e-12 ? 1 / std::sqrt(s) : 0.0;
  each([&](double& x, std::size_t k) { x = (x - shift[k]) * scale[k]; });

  Random random(3);
  const std::size_t bias = predictor_hidden * predictor_inputs, second = bias + predictor_hidden,
                    last = second + predictor_hidden;
  Numbers parameters(last + 1), gradient(parameters.size()), row(channels), cotangent(channels),
      d_values(agents * channels);
  for (double& x : parameters) x = 0.5 * random.normal();
  Adam adam(parameters.size());
  Numbers units(agents * predictor_hidden), weights(agents), d_weights(agents);
  double seen = 0;
  for (int step = 1; step <= steps; ++step) {
    gradient.assign(gradient.size(), 0);
    const Round& round =
        rounds[static_cast<std::size_t>(random.uniform() * static_cast<double>(rounds.size()))];
    for (std::size_t i = 0; i < agents; ++i) {
      double logit = parameters[last];
      for (std::size_t j = 0; j < predictor_hidden; ++j) {
        double sum = parameters[bias + j];
        for (std::size_t k = 0; k < predictor_inputs; ++k)
          sum += parameters[j * predictor_inputs + k] * round.features[i * predictor_inputs + k];
        units[i * predictor_hidden + j] = std::tanh(sum);
        logit += parameters[second + j] * units[i * predictor_hidden + j];
      }
      weights[i] = std::exp(std::min(40.0, std::max(-40.0, logit)));
    }
    d_weights.assign(agents, 0);
    const std::size_t tokens = round.data.truth.size();
    for (std::size_t t = 0; t < tokens; ++t) {
      double total = 0;
      for (const double w : weights) total += w;
      for (std::size_t c = 0; c < channels; ++c) {
        row[c] = 0;
        for (std::size_t i = 0; i < agents; ++i)
          row[c] += weights[i] / total * round.data.values[t][i * channels + c];
      }
      seen +=
          squared_error(row, round.data.truth[t], cotangent, 1.0 / static_cast<double>(tokens)) /
          static_cast<double>(tokens);
      if (!kvmeld::gradients::weighted_mean_vjp<double>({round.data.values[t], weights, cotangent},
                                                        {d_values, d_weights}))
        std::abort();
    }
    for (std::size_t i = 0; i < agents; ++i) {
      const double d_logit = d_weights[i] * weights[i];
      gradient[last] += d_logit;
      for (std::size_t j = 0; j < predictor_hidden; ++j) {
        const double unit = units[i * predictor_hidden + j];
        gradient[second + j] += d_logit * unit;
        const double d = d_logit * parameters[second + j] * (1 - unit * unit);
        gradient[bias + j] += d;
        for (std::size_t k = 0; k < predictor_inputs; ++k)
          gradient[j * predictor_inputs + k] += d * round.features[i * predictor_inputs + k];
      }
    }
    adam.step(parameters, gradient, rate_at(step, steps, 0.01));
    if (step % (steps < 5 ? 1 : steps / 5) == 0) {
      seen /= steps < 5 ? 1 : steps / 5;
      std::printf("predictor  step %5d   error %.4f (training data)\n", step, seen);
      progress.push_back({{"step", step}, {"error", seen}});
      seen = 0;
    }
  }
  // Raw features from now on: w·(x − shift)·scale + b.
  for (std::size_t j = 0; j < predictor_hidden; ++j) {
    for (std::size_t k = 0; k < predictor_inputs; ++k) {
      parameters[j * predictor_inputs + k] *= scale[k];
      parameters[bias + j] -= parameters[j * predictor_inputs + k] * shift[k];
    }
  }
  return parameters;
}

// ---- Files
// -------------------------------------------------------------------------------------------------

template <class Written>
std::vector<std::byte> through_file(const std::string& path, const Written& written) {
  const auto bytes = kvmeld::to_safetensors(*written);
  if (!bytes) std::abort();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes->data()),
             static_cast<std::streamsize>(bytes->size()));
  std::ifstream in(path, std::ios::binary);
  std::vector<char> read((std::istreambuf_iterator<char>(in)), {});
  std::vector<std::byte> back(read.size());
  for (std::size_t i = 0; i < read.size(); ++i) back[i] = static_cast<std::byte>(read[i]);
  return back;
}

}  // namespace

int main(int argc, char** argv) {
  int steps = 3000;
  CLI::App app("Trains a gate and a predictor of weights on made-up rows, and compares them.");
  app.add_option("--steps", steps, "of the training")->check(CLI::Range(1, 10000000));
  app.allow_extras();  // the model that run.sh names is not needed
  CLI11_PARSE(app, argc, argv);
  std::filesystem::create_directories("build");
  const Task task;
  const auto geometry = one_layer();
  Json json{{"steps", steps}, {"agents", agents}, {"channels", channels}, {"rows", Json::array()}};

  // ---- Train, write, read back.
  const kvmeld::GateShape shape{
      .key_channels = channels, .value_channels = channels, .hidden = hidden};
  const auto gate =
      kvmeld::GateWeights::make(shape, narrowed(train_gate(task, steps, json["gate_progress"])));
  if (!gate) return std::fprintf(stderr, "%s\n", gate.error().message().c_str()), 1;
  const auto gate_file = through_file("build/gate.safetensors", *gate);
  const auto gate_back = kvmeld::gate_from_safetensors(gate_file);
  const auto predictor = kvmeld::WeightPredictor::make(
      static_cast<std::int32_t>(predictor_inputs), static_cast<std::int32_t>(predictor_hidden),
      narrowed(train_predictor(task, geometry, steps, json["predictor_progress"])));
  if (!predictor) return std::fprintf(stderr, "%s\n", predictor.error().message().c_str()), 1;
  const auto predictor_file = through_file("build/predictor.safetensors", *predictor);
  const auto predictor_back = kvmeld::predictor_from_safetensors(predictor_file);
  const bool same_files = gate_back && predictor_back &&
                          *kvmeld::to_safetensors(**gate_back) == gate_file &&
                          *kvmeld::to_safetensors(**predictor_back) == predictor_file;
  if (!same_files) return std::fprintf(stderr, "the files do not read back as what they were\n"), 1;

  // ---- Held out: renders by the library.
  bool better = true;
  const auto report = [&](const char* name, bool by_token, const auto& learned,
                          const char* learned_name) {
    double uniform = 0, medoid = 0, trained = 0, best = 0;
    constexpr int sets = 40;
    for (std::uint64_t s = 0; s < sets; ++s) {
      const HeldOut data = held_out(task, geometry, 32, 9000 + s, by_token);
      uniform += error_of(data, geometry, kvmeld::WeightedMean{}) / sets;
      medoid += error_of(data, geometry, kvmeld::Medoid{}) / sets;
      trained += error_of(data, geometry, learned) / sets;
      best += best_error(data) / sets;
    }
    std::printf("\n%s, %d held-out sets of 32 tokens: mean squared error\n", name, sets);
    for (const auto& [method, error] : {std::pair<const char*, double>{"uniform mean", uniform},
                                        {"medoid", medoid},
                                        {learned_name, trained},
                                        {"best shares, 1/sigma^2", best}}) {
      std::printf("  %-24s %.4f\n", method, error);
      json["rows"].push_back({{"task", name}, {"method", method}, {"error", error}});
    }
    better = better && trained < uniform && trained < medoid;
  };
  report("noise by token", true, kvmeld::Gated{*gate_back}, "gate");
  report("noise by agent", false, kvmeld::PredictedWeights{*predictor_back}, "predictor");

  json["files_read_back_equal"] = same_files;
  json["gate_digest"] = (*gate_back)->digest().hex();
  json["predictor_digest"] = (*predictor_back)->digest().hex();
  json["better_than_uniform_and_medoid"] = better;
  if (!study::write_results("build/train_gate.json", json)) return 1;
  std::printf("\n%s; build/train_gate.json\n",
              better ? "what was trained beats the uniform mean and the medoid"
                     : "what was trained does NOT beat the uniform mean and the medoid");
  return better || steps < 1000 ? 0 : 1;
}
