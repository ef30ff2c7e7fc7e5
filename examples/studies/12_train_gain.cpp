// Trains what says how much of an offset is left behind a prefix of another length: a ridge and a
// small LSTM, each layer by itself, on offsets of one model. The same documents are read behind
// prefixes of several lengths; an offset measured behind one of them should give the offset behind
// another.
//
//   bash examples/run.sh 12 [--documents N] [--steps N]
//
// Documents, prefixes and their lengths of the three parts differ: what is fitted, what scores are
// measured on (they go into the files, and a layer is used only where it beats identity there), and
// what is reported last. Writes build/gain_ridge.safetensors, build/gain_lstm.safetensors and
// build/train_gain.json.

#include "support/adam.hpp"
#include "support/anchored.hpp"
#include "support/anchored_texts.hpp"
#include "support/reader.hpp"
#include "support/study.hpp"

#include <kvmeld/anchors/gain.hpp>
#include <kvmeld/fit/fit.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace example;
using Json = nlohmann::ordered_json;
using kvmeld::Result;
using kvmeld::anchors::GainKind;
using kvmeld::anchors::GainPredictor;
using kvmeld::anchors::GainSample;
using Numbers = std::vector<double>;
using Predictor = std::shared_ptr<const GainPredictor>;

struct Flags {
  std::string model;
  std::size_t documents = 12, others = 6;
  std::int32_t hidden = 8;
  int steps = 300;
  std::uint64_t seed = 3;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
};

/// What a document is alone, and by prefix: in context, and the offset.
struct Known {
  kvmeld::Fragment base;
  std::vector<kvmeld::Fragment> real, offsets;
};

/// Prefixes of one text each, cut at ends of sentences: behind how many tokens the documents of a
/// part stand.
struct Part {
  const char* name;
  std::vector<std::size_t> texts;    // which of the agents' instructions begin
  std::vector<std::size_t> lengths;  // at least
  std::size_t documents = 0;
  std::vector<GainSample> samples{};  // one for each pair of lengths: sums over documents
  std::vector<Known> read{};
  std::vector<std::int64_t> behind{};  // (prefix) its tokens
};

/// Reads a part's documents behind its prefixes; document numbers go on from `first`.
kvmeld::Status measure(Anchored& place, Part& part, std::size_t first, const Flags& flags) {
  Engine& engine = place.engine();
  for (const std::size_t text : part.texts) {
    std::vector<std::size_t> prefixes;
    Draw draw(flags.seed * 97u + text);
    for (const std::size_t length : part.lengths) {
      Tokens prefix = engine.tokens(agent_instructions[text], true, true);
      while (prefix.size() < length)
        append(prefix,
               engine.tokens(detail::free_sentences[draw.below(detail::free_sentences.size())]));
      const auto number = place.add_prefix(std::move(prefix));
      if (!number) return number.error();
      prefixes.push_back(*number);
    }
    std::vector<GainSample> sums(prefixes.size() * prefixes.size());
    for (std::size_t d = 0; d < part.documents; ++d) {
      const Tokens document = structured_document(engine, flags.seed, first + d).tokens;
      const auto base = place.base_of(document);
      if (!base) return base.error();
      Known known{base->base, {}, {}};
      const std::vector<kvmeld::Fragment>& offsets = known.offsets;
      for (const std::size_t prefix : prefixes) {
        place.start(prefix);
        auto real = place.encode(document);
        if (!real) return real.error();
        auto offset = kvmeld::anchors::measure_offset(*real, base->base);
        if (!offset) return offset.error();
        known.offsets.push_back(*std::move(offset));
        known.real.push_back(*std::move(real));
      }
      for (std::size_t p = 0; p < prefixes.size(); ++p) {
        for (std::size_t q = 0; q < prefixes.size(); ++q) {
          if (p == q) continue;
          auto sample = kvmeld::anchors::gain_sample(
              offsets[p], offsets[q],
              {std::ssize(place.prefix(prefixes[p])), std::ssize(place.prefix(prefixes[q])),
               std::ssize(document)});
          if (!sample) return sample.error();
          GainSample& sum = sums[p * prefixes.size() + q];
          if (sum.layers == 0) {
            sum = *std::move(sample);
          } else {
            sum.add(*sample);
          }
        }
      }
      part.read.push_back(std::move(known));
      std::printf("\r%-9s prefix text %zu, document %2zu of %2zu ", part.name, text, d + 1,
                  part.documents);
      std::fflush(stdout);
    }
    for (const std::size_t prefix : prefixes)
      part.behind.push_back(std::ssize(place.prefix(prefix)));
    for (GainSample& sum : sums) {
      if (sum.layers != 0) part.samples.push_back(std::move(sum));
    }
  }
  return {};
}

/// One layer's LSTM by the gradient over all samples, with a step size that falls along a cosine.
Numbers train_layer(const std::vector<GainSample>& samples, std::size_t layer, const Flags& flags) {
  const kvmeld::anchors::detail::LstmShape shape{kvmeld::anchors::gain_feature_count,
                                                 static_cast<std::size_t>(flags.hidden)};
  Draw draw(flags.seed * 1009u + layer);
  Numbers parameters(shape.size()), gradient(shape.size());
  for (std::size_t i = 0; i < shape.bias(); ++i)
    parameters[i] = (static_cast<double>(draw.below(2001)) - 1000) / 2000;
  // remember; and start at a gain of 1
  for (std::size_t k = 0; k < shape.hidden; ++k) parameters[shape.bias() + shape.hidden + k] = 1;
  double total = 0;
  std::vector<Numbers> inputs;
  for (const GainSample& sample : samples) {
    total += sample.total(layer);
    inputs.push_back(*kvmeld::anchors::gain_features(sample.query));
  }
  if (total == 0) return parameters;
  Adam adam(shape.size());
  kvmeld::anchors::detail::LstmTrace trace;
  for (int step = 0; step < flags.steps; ++step) {
    gradient.assign(gradient.size(), 0);
    for (std::size_t s = 0; s < samples.size(); ++s) {
      const auto n = static_cast<std::size_t>(samples[s].query.tokens);
      Numbers out(n), cotangent(n);
      kvmeld::anchors::detail::run_lstm(shape, parameters, inputs[s], out, &trace);
      for (std::size_t t = 0; t < n; ++t) {
        const double squashed = std::tanh(out[t]), gain = 1 + squashed;
        const std::size_t i = layer * n + t;
        cotangent[t] = 2 * (gain * samples[s].measured[i] - samples[s].both[i]) *
                       (1 - squashed * squashed) / total;
      }
      kvmeld::anchors::detail::lstm_vjp(shape, parameters, inputs[s], trace, cotangent, gradient);
    }
    adam.step(parameters, gradient,
              0.02 * 0.5 * (1 + std::cos(3.141592653589793 * step / flags.steps)));
  }
  return parameters;
}

double mean_error(const std::vector<kvmeld::anchors::GainScore>& scores) {
  double sum = 0, layers = 0;
  for (const kvmeld::anchors::GainScore& s : scores) {
    if (std::isnan(s.predictor)) continue;
    sum += s.predictor;
    ++layers;
  }
  return sum / layers;
}

/// Adds held-out scores, writes the predictor, and returns what a reader of the file gets.
Result<Predictor> through_file(const std::string& path, const GainPredictor& fitted,
                               const std::vector<GainSample>& held_out,
                               const kvmeld::Geometry& geometry) {
  auto scores = kvmeld::anchors::held_out_scores(fitted, held_out);
  if (!scores) return scores.error();
  const auto scored = GainPredictor::make(fitted.kind(), fitted.hidden(), fitted.layers(),
                                          fitted.parameters(), *std::move(scores), fitted.model());
  if (!scored) return scored.error();
  const auto bytes = to_safetensors(**scored);
  if (!bytes) return bytes.error();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes->data()),
             static_cast<std::streamsize>(bytes->size()));
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> read((std::istreambuf_iterator<char>(in)), {});
  return kvmeld::anchors::gain_from_safetensors(std::as_bytes(std::span(read)), geometry);
}

/// Σ‖Δ' − g·Δ‖² ÷ Σ‖Δ'‖², mean over layers, by the gains that the library gives out: 1 where a
/// layer is not trusted.
Result<double> error_as_used(const GainPredictor& predictor,
                             const std::vector<GainSample>& samples) {
  Numbers off(predictor.layers()), total(predictor.layers());
  for (const GainSample& sample : samples) {
    const auto gains = predictor.gains(sample.query);
    if (!gains) return gains.error();
    const auto n = static_cast<std::size_t>(sample.query.tokens);
    for (std::size_t l = 0; l < off.size(); ++l) {
      Numbers row(n, 1.0);
      for (std::size_t t = 0; t < n && !gains->empty(); ++t)
        row[t] = static_cast<double>((*gains)[l * n + t]);
      off[l] += sample.squared_error(l, row);
      total[l] += sample.total(l);
    }
  }
  double sum = 0, layers = 0;
  for (std::size_t l = 0; l < off.size(); ++l) {
    if (total[l] == 0) continue;
    sum += off[l] / total[l];
    ++layers;
  }
  return sum / layers;
}

/// A document of the part behind prefix q, from its base and the mean offset of the other documents
/// behind prefix p; p above all: no offset.
Result<RelativeError> blend_error(const Part& part, std::size_t document, std::size_t p,
                                  std::size_t q, const GainPredictor& predictor) {
  const Known& own = part.read[document];
  kvmeld::anchors::ReusePart reuse{
      .base = own.base, .position = part.behind[q], .rotated_only = p >= part.behind.size()};
  for (std::size_t d = 0; d < part.read.size() && !reuse.rotated_only; ++d) {
    if (d == document) continue;
    auto gains = predictor.gains({part.behind[p], part.behind[q], own.base.token_count()});
    if (!gains) return gains.error();
    reuse.offsets.push_back({.anchor = part.read[d].base.id(),
                             .delta = part.read[d].offsets[p],
                             .weight = 1 / static_cast<float>(part.read.size() - 1),
                             .gains = *std::move(gains)});
  }
  const auto plan =
      kvmeld::anchors::plan_reuse({&reuse, 1}, own.base.geometry(), {.compute_last = false});
  if (!plan) return plan.error();
  kvmeld::HostCache out(plan->shared_geometry(), plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  if (const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.mutable_ref());
      !report)
    return report.error();
  const auto sealed = kvmeld::seal(out.kv_cache_ref(), {.positions = plan->positions()});
  if (!sealed) return sealed.error();
  return relative_error(own.real[q], *sealed);
}

kvmeld::Status run(const Flags& flags) {
  auto reader = Reader::open(flags.model, flags.threads);
  if (!reader) return reader.error();
  Anchored place((*reader)->engine(), (*reader)->geometry(), flags.threads);
  if (const auto base = place.add_prefix((*reader)->engine().tokens(base_instructions, true, true));
      !base)
    return base.error();
  Part fit{"fit", {0, 1}, {16, 40, 110, 280}, flags.documents},
      held_out{"held out", {2}, {50, 90, 180, 330}, flags.others},
      test{"test", {4}, {90, 140, 220, 380}, flags.others};
  const Stopwatch watch;
  if (kvmeld::Status status = measure(place, fit, 0, flags); !status) return status;
  if (kvmeld::Status status = measure(place, held_out, flags.documents, flags); !status)
    return status;
  if (kvmeld::Status status = measure(place, test, flags.documents + flags.others, flags); !status)
    return status;
  const double measured_ms = watch.milliseconds();

  const kvmeld::Geometry& geometry = *(*reader)->geometry();
  const std::size_t layers = geometry.layers.size();
  Predictor ridge;
  double strength = 0, least = HUGE_VAL;
  for (const double s : {1e-4, 1e-3, 1e-2, 1e-1, 1.0}) {
    const auto fitted = kvmeld::fit::fit_gain_ridge(fit.samples, s, geometry.model);
    if (!fitted) return fitted.error();
    const auto scores = kvmeld::anchors::held_out_scores(**fitted, held_out.samples);
    if (!scores) return scores.error();
    if (const double error = mean_error(*scores); error < least) {
      least = error;
      strength = s;
      ridge = *fitted;
    }
  }
  std::vector<float> numbers;
  for (std::size_t l = 0; l < layers; ++l) {
    for (const double x : train_layer(fit.samples, l, flags))
      numbers.push_back(static_cast<float>(x));
    std::printf("\rLSTM of layer %2zu of %2zu%-30s", l + 1, layers, "");
    std::fflush(stdout);
  }
  const auto lstm =
      GainPredictor::make(GainKind::lstm, flags.hidden, layers, numbers, {}, geometry.model);
  if (!lstm) return lstm.error();
  const auto ridge_read =
      through_file("build/gain_ridge.safetensors", *ridge, held_out.samples, geometry);
  if (!ridge_read) return ridge_read.error();
  const auto lstm_read =
      through_file("build/gain_lstm.safetensors", **lstm, held_out.samples, geometry);
  if (!lstm_read) return lstm_read.error();

  Json json{{"model", geometry.model},    {"documents", flags.documents},
            {"others", flags.others},     {"hidden", flags.hidden},
            {"steps", flags.steps},       {"ridge_strength", strength},
            {"measured_ms", measured_ms}, {"rows", Json::array()}};
  std::printf(
      "\r%-50s\nheld-out error of predicted offsets, squared and relative\nlayer  identity   ridge "
      "   LSTM\n",
      "");
  for (std::size_t l = 0; l < layers; ++l) {
    const kvmeld::anchors::GainScore r = (*ridge_read)->scores()[l], m = (*lstm_read)->scores()[l];
    if (std::isnan(r.identity)) continue;
    std::printf("%5zu    %.4f  %.4f  %.4f\n", l, r.identity, r.predictor, m.predictor);
    json["rows"].push_back({{"layer", l},
                            {"identity", r.identity},
                            {"ridge", r.predictor},
                            {"lstm", m.predictor},
                            {"ridge_reason", to_string((*ridge_read)->reason(l))},
                            {"lstm_reason", to_string((*lstm_read)->reason(l))}});
  }
  const auto identity = GainPredictor::make(GainKind::identity, 0, layers, {}, {}, geometry.model);
  if (!identity) return identity.error();
  std::printf(
      "\nother documents, prefixes and lengths, as the library uses it (1 where a layer is not "
      "trusted)\n");
  for (const auto& [name, predictor] : {std::pair<const char*, Predictor>{"identity", *identity},
                                        {"ridge", *ridge_read},
                                        {"LSTM", *lstm_read}}) {
    const auto error = error_as_used(*predictor, test.samples);
    if (!error) return error.error();
    std::size_t trusted = 0;
    for (std::size_t l = 0; l < layers; ++l)
      trusted += predictor->reason(l) == kvmeld::anchors::GainReason::predicted ? 1U : 0U;
    std::printf("%-9s error %.4f, %zu layers predicted\n", name, *error, trusted);
    json["test"].push_back({{"predictor", name}, {"error", *error}, {"layers_predicted", trusted}});
  }
  std::printf(
      "\nthe same documents blended from the others' mean offset, relative error of keys and of "
      "values\n");
  struct Way {
    const char* name;
    const GainPredictor* predictor;
    bool rotated, here;
  };
  for (const Way& way : {Way{"turned, no offset", identity->get(), true, false},
                         Way{"offset of another length", identity->get(), false, false},
                         Way{"... with the ridge's gains", ridge_read->get(), false, false},
                         Way{"... with the LSTM's gains", lstm_read->get(), false, false},
                         Way{"offset of this length", identity->get(), false, true}}) {
    double key = 0, value = 0, count = 0;
    for (std::size_t d = 0; d < test.read.size() && test.read.size() > 1; ++d) {
      for (std::size_t q = 0; q < test.behind.size(); ++q) {
        for (std::size_t p = 0; p < test.behind.size(); ++p) {
          if ((p == q) != (way.here || way.rotated)) continue;
          const auto error =
              blend_error(test, d, way.rotated ? test.behind.size() : p, q, *way.predictor);
          if (!error) return error.error();
          key += error->key;
          value += error->value;
          ++count;
        }
      }
    }
    std::printf("%-28s K %.4f  V %.4f\n", way.name, key / count, value / count);
    json["blended"].push_back(
        {{"way", way.name}, {"key_error", key / count}, {"value_error", value / count}});
  }
  if (!study::write_results("build/train_gain.json", json))
    return {kvmeld::ErrorCode::store_full, "cannot write build/train_gain.json"};
  std::printf("build/train_gain.json, build/gain_ridge.safetensors, build/gain_lstm.safetensors\n");
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Fits how much of an offset is left behind a prefix of another length.");
  study::add_common(app, flags);
  app.add_option("--documents", flags.documents, "documents to fit on")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--others", flags.others,
                 "documents to measure scores on, and as many to report on")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--hidden", flags.hidden, "units of the LSTM")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_option("--steps", flags.steps, "of its training")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const kvmeld::Status status = run(flags);
  if (!status)
    return std::fprintf(stderr, "\n%s: %s\n", std::string(kvmeld::to_string(status.code())).c_str(),
                        status.message().c_str()),
           1;
  return 0;
}
