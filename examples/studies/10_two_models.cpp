// A small model reads notes; a larger one of another shape answers from the small one's cache,
// mapped into its own. The map is fitted here, on notes that both models read; how good it is, is
// printed as it is.
//
//   bash examples/run.sh 10
//   bash examples/run.sh 10 --fit-tokens 60000 --source-layers 8 --questions 64 --pairs pairs.bin

#include "support/pair_file.hpp"
#include "support/reader.hpp"
#include "support/study.hpp"

#include <kvmeld/fit/fit.hpp>
#include <kvmeld/policies/projection.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

using namespace example;
using Map = std::shared_ptr<const kvmeld::ProjectionMap>;

namespace {

struct Flags {
  std::string model, target, output = "build/two_models.json", pairs;
  std::size_t fit_tokens = 16000, source_layers = 8, questions = 32, held_out_notes = 8;
  double bar = 0.9;
  int threads = 2;
  bool refit = false;
};

kvmeld::Status failed(const std::string& why) { return {kvmeld::ErrorCode::invalid_argument, why}; }

/// Where fitted maps are kept: outside the repository, by what they were made of.
std::filesystem::path cache_folder() {
  const auto from = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (!from("KVMELD_CACHE").empty()) return from("KVMELD_CACHE");
  if (!from("XDG_CACHE_HOME").empty()) return from("XDG_CACHE_HOME") + "/kvmeld";
  return from("HOME") + "/.cache/kvmeld";
}

/// Lets both models read fit notes until there are enough tokens, and fits a map; the first notes
/// are held out.
class Fitting {
 public:
  Fitting(const Flags& flags, Reader& source, Reader& target)
      : flags_(flags), source_(source), target_(target) {}

  /// The map of an earlier run with equal models, text and options, or a new one, kept for later.
  /// Its record holds the gate's score.
  kvmeld::Result<Map> map() {
    kvmeld::Hasher hasher;
    for (const std::string& text :
         {source_.geometry()->model, target_.geometry()->model, std::string(fact_text_version)})
      hasher.text(text);
    for (const std::size_t n : {flags_.fit_tokens, flags_.source_layers, flags_.held_out_notes})
      hasher.value(static_cast<std::uint64_t>(n));
    const std::filesystem::path path =
        cache_folder() / "maps" / ("two_models_" + hasher.digest().hex() + ".safetensors");
    if (!flags_.refit && std::filesystem::exists(path)) {
      std::fprintf(stderr, "map: taken from %s\n", path.c_str());
      std::ifstream file(path, std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      return kvmeld::projection_from_safetensors(std::as_bytes(std::span(bytes)));
    }
    auto made = fit();
    if (!made) return made;
    auto rounded = kvmeld::rounded_to_f32(**made);
    if (!rounded) return rounded;
    const auto bytes = kvmeld::to_safetensors(**rounded);
    if (!bytes) return bytes.error();
    std::error_code error;
    std::filesystem::create_directories(path.parent_path(), error);
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes->data()),
               static_cast<std::streamsize>(bytes->size()));
    std::fprintf(
        stderr,
        file.good() ? "map: %.0f MB kept in %s\n" : "map: %.0f MB could not be kept in %s\n",
        static_cast<double>(bytes->size()) / 1e6, path.c_str());
    return rounded;
  }

 private:
  kvmeld::Result<Map> fit() {
    auto file =
        PairFile::open(flags_.pairs, source_.geometry(), target_.geometry(), fact_text_version);
    if (!file) return file.error();
    const kvmeld::fit::ProjectionFitOptions options{
        .nearest = static_cast<std::int32_t>(flags_.source_layers), .with_first = true};
    auto fit = kvmeld::fit::ProjectionFit::make(*source_.geometry(), *target_.geometry(), options);
    auto held = kvmeld::fit::ProjectionFit::make(*source_.geometry(), *target_.geometry(), options);
    if (!fit) return fit.error();
    if (!held) return held.error();
    std::vector<Paired> held_out;
    const Stopwatch watch;
    for (std::size_t note = 0; static_cast<std::size_t>(fit->tokens()) < flags_.fit_tokens;
         ++note) {
      auto pair = paired(**file, fit_note(note));
      if (!pair) return pair.error();
      const bool is_held = note < flags_.held_out_notes;
      const std::vector<kvmeld::TokenPair> pairs = matched(*pair);
      if (kvmeld::Status status = (is_held ? *held : *fit).add(pair->source, pair->target, pairs);
          !status)
        return status;
      if (is_held) held_out.push_back(*std::move(pair));
      const auto done = static_cast<double>(fit->tokens());
      std::fprintf(stderr, "\rfit: %6.0f of %zu tokens, %5.1f min done, about %5.1f min left ",
                   done, flags_.fit_tokens, watch.milliseconds() / 6e4,
                   done > 0 ? watch.milliseconds() / 6e4 *
                                  std::max(0.0, static_cast<double>(flags_.fit_tokens) / done - 1)
                            : 0.0);
    }
    std::fprintf(stderr, "\nfit: solving %zu matrices\n", 2 * target_.geometry()->layers.size());
    const double strengths[] = {3e-3, 1e-2, 3e-2, 1e-1};
    auto map = fit->ridge(strengths, *held);
    if (!map) return map;
    const auto errors = held->relative_errors(**map);
    if (!errors) return errors.error();
    std::fprintf(
        stderr,
        "fit: %.1f min; share of variance missed on held-out notes: keys %.3f, values %.3f\n",
        watch.milliseconds() / 6e4, errors->first, errors->second);
    kvmeld::fit::AttentionGate gate(*map);
    for (const Paired& pair : held_out)
      if (kvmeld::Status status = gate.add(pair.source, pair.target, matched(pair)); !status)
        return status;
    return gate.recorded(flags_.bar);
  }

  kvmeld::Result<Paired> paired(PairFile& file, const std::vector<std::string>& note) {
    const Tokens source = source_.tokens(note), target = target_.tokens(note);
    if (source == target) {
      auto kept = file.next(source);
      if (!kept) return kept.error();
      if (*kept) return **std::move(kept);
    }
    auto a = source_.sealed(source);
    if (!a) return a.error();
    auto b = target_.sealed(target);
    if (!b) return b.error();
    Paired pair{*std::move(a), *std::move(b)};
    file.add(pair);
    return pair;
  }
  /// Which tokens hold the same text, also where the models cut it differently.
  std::vector<kvmeld::TokenPair> matched(const Paired& pair) const {
    const auto all = [](std::span<const kvmeld::TokenId> ids) {
      return Tokens(ids.begin(), ids.end());
    };
    auto pairs = kvmeld::pair_by_spans(source_.spans(all(pair.source.tokens())),
                                       target_.spans(all(pair.target.tokens())));
    return pairs ? *std::move(pairs) : std::vector<kvmeld::TokenPair>();
  }

  const Flags& flags_;
  Reader& source_;
  Reader& target_;
};

/// Right answers of one way to fill the answering model's cache.
struct Tally {
  std::string method;
  std::size_t right = 0, total = 0;
  double kl = 0;

  void add(const std::vector<Ask>& questions, const std::vector<Answer>& answers,
           const std::vector<Answer>* reference) {
    for (std::size_t i = 0; i < questions.size(); ++i) {
      right += answers[i].named && questions[i].candidates[*answers[i].named] == questions[i].answer
                   ? 1U
                   : 0U;
      if (reference != nullptr) kl += divergence((*reference)[i].logits, answers[i].logits);
    }
    total += questions.size();
  }
  [[nodiscard]] nlohmann::json json(bool compared) const {
    nlohmann::json row{{"method", method}, {"right", right}, {"total", total}, {"kl", nullptr}};
    if (compared && total > 0) row["kl"] = kl / static_cast<double>(total);
    return row;
  }
};

/// Asks about test notes of one kind, in every way.
kvmeld::Status ask_about(const Flags& flags, Reader& source, Reader& target,
                         const kvmeld::Projection& projection, bool unseen, nlohmann::json& rows) {
  const std::string suffix = unseen ? "_unseen_templates" : "";
  Tally own{"target_own" + suffix}, mapped{"mapped" + suffix}, itself{"source_itself" + suffix},
      none{"no_notes" + suffix};
  const Stopwatch watch;
  for (std::size_t note = 0; own.total < flags.questions; ++note) {
    FactNote test = test_note(note, unseen);
    test.questions.resize(std::min(test.questions.size(), flags.questions - own.total));
    std::vector<Answer> reference;
    // The source's cache of the notes, sealed: what would travel between two processes.
    auto fragment = source.sealed(source.tokens(test.sentences));
    if (!fragment) return fragment.error();
    kvmeld::FragmentSet set;
    if (kvmeld::Status status = set.insert(*fragment); !status) return status;
    const auto merger = kvmeld::merger(kvmeld::Aligner{projection});
    const auto answer = [&](Reader& reader, kvmeld::Result<llama_pos> length, Tally& tally,
                            bool compared) -> kvmeld::Status {
      if (!length) return length.error();
      auto answers = reader.answers(test.questions, *length);
      if (!answers) return answers.error();
      if (reference.empty()) reference = *answers;
      tally.add(test.questions, *answers, compared ? &reference : nullptr);
      return {};
    };
    if (kvmeld::Status status =
            answer(target, target.read(target.tokens(test.sentences)), own, true);
        !status)
      return status;
    if (kvmeld::Status status = answer(target, target.take(set, merger), mapped, true); !status)
      return status;
    if (kvmeld::Status status =
            answer(source, source.read(source.tokens(test.sentences)), itself, false);
        !status)
      return status;
    if (!unseen)
      if (kvmeld::Status status = answer(target, target.forget(), none, true); !status)
        return status;
    std::fprintf(stderr, "\rquestions%s: %zu of %zu, own %zu, mapped %zu, %5.1f min ",
                 unseen ? " in unseen templates" : "", own.total, flags.questions, own.right,
                 mapped.right, watch.milliseconds() / 6e4);
  }
  std::fprintf(stderr, "\n");
  rows.push_back(own.json(true));
  rows.push_back(mapped.json(true));
  // other weights: its distribution is no distortion of the target's
  rows.push_back(itself.json(false));
  if (!unseen) rows.push_back(none.json(true));
  return {};
}

kvmeld::Status run(const Flags& flags) {
  auto source = Reader::open(flags.model, flags.threads);
  if (!source) return source.error();
  auto target = Reader::open(flags.target, flags.threads);
  if (!target) return target.error();
  const auto map = Fitting(flags, **source, **target).map();
  if (!map) return map.error();

  const kvmeld::MapRecord& record = (*map)->record();
  kvmeld::Projection projection{*map, static_cast<float>(flags.bar)};
  const kvmeld::Status gate = projection.accepts(*(*source)->geometry(), *(*target)->geometry());
  if (!gate && gate.code() != kvmeld::ErrorCode::gate_refused) return gate;
  std::printf("gate: attention cosine %.4f on %lld held-out tokens, bar %.2f: %s\n",
              record.attention_cosine, static_cast<long long>(record.held_out_tokens), flags.bar,
              gate ? "passed" : "refused");
  if (!gate) {
    std::printf(
        "%s\nthe mapped rows below were rendered past the gate, to show what it holds back\n",
        gate.message().c_str());
    projection.bar = -1;
  }
  nlohmann::json rows = nlohmann::json::array();
  for (const bool unseen : {false, true})
    if (kvmeld::Status status = ask_about(flags, **source, **target, projection, unseen, rows);
        !status)
      return status;
  for (nlohmann::json& row : rows)
    if (row["method"].get<std::string>().starts_with("mapped")) row["past_gate"] = !gate;

  std::printf("%-30s %7s %7s\n", "method", "right", "KL");
  for (const nlohmann::json& row : rows) {
    const double right = row["right"].get<double>() / row["total"].get<double>();
    if (row["kl"].is_null())
      std::printf("%-30s %7.3f %7s\n", row["method"].get<std::string>().c_str(), right, "-");
    else
      std::printf("%-30s %7.3f %7.3f\n", row["method"].get<std::string>().c_str(), right,
                  row["kl"].get<double>());
  }
  const nlohmann::json all{{"source", study::model_name(flags.model)},
                           {"target", flags.target.substr(flags.target.find_last_of('/') + 1)},
                           {"fit_tokens", record.fit_tokens},
                           {"source_layers", flags.source_layers},
                           {"map", (*map)->digest().hex()},
                           {"gate",
                            {{"score", record.attention_cosine},
                             {"bar", flags.bar},
                             {"passed", gate.ok()},
                             {"held_out_tokens", record.held_out_tokens}}},
                           {"rows", rows}};
  if (!study::write_results(flags.output, all)) return failed("cannot write " + flags.output);
  std::printf("rows: %s\n", flags.output.c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Maps a small model's cache of some notes into a larger model of another shape, which "
      "answers questions about them.");
  study::add_common(app, flags);
  app.add_option("--target", flags.target, "target model, a GGUF file")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--fit-tokens", flags.fit_tokens, "tokens that the map is fitted on")
      ->check(CLI::Range(500, 10000000))
      ->capture_default_str();
  app.add_option("--source-layers", flags.source_layers,
                 "source layers for each target layer, beside the first")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--questions", flags.questions, "questions of each kind")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--bar", flags.bar, "least attention cosine that the gate lets through")
      ->capture_default_str();
  app.add_option(
      "--pairs", flags.pairs,
      "file that keeps what both models made of the text (41 KB a token), to fit again or on more");
  app.add_flag("--refit", flags.refit, "fit anew, though a map is kept");
  CLI11_PARSE(app, argc, argv);
  const kvmeld::Status status = run(flags);
  if (!status)
    return std::fprintf(stderr, "\n%s: %s\n", std::string(kvmeld::to_string(status.code())).c_str(),
                        status.message().c_str()),
           1;
  return 0;
}
