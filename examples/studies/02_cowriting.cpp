// Two copies of one model write a story together: each writes a sentence from the same state, then
// they share what they wrote.
//
// Compares four ways to share after each sentence, `--sync` tokens at most: not at all, as text
// that is read again, as caches put one after the other, and as the element-wise mean of both
// caches, the naive start. Writes build/cowriting.json.

#include "support/asking.hpp"
#include "support/dataset.hpp"
#include "support/engine.hpp"
#include "support/prompt.hpp"
#include "support/study.hpp"

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace example;

constexpr std::array<std::string_view, 4> openings{
    "The old lighthouse had been dark for years when Mara rowed out to the island with a lamp and "
    "a letter.",
    "On the first day of winter the baker of the village found a silver bird asleep in his oven.",
    "Nobody in the valley believed the clockmaker when he said that the mountain had begun to hum.",
    "The last train left the station at midnight, and only then did Tom notice the child on the "
    "bench."};
constexpr std::array<std::string_view, 4> modes{"alone", "text", "concat", "mean"};

struct Flags {
  std::string model;
  std::string output = "build/cowriting.json";
  std::size_t sync = 32;  ///< Most tokens that a writer writes between two exchanges.
  std::size_t rounds = 4;
  std::size_t stories = 4;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  bool show = false;
};

/// Draws from the 40 most likely tokens at temperature 0.8; never ends the text.
llama_token sample(const Engine& engine, std::span<const float> logits, Draw& draw) {
  std::vector<std::pair<float, llama_token>> best;
  for (std::size_t i = 0; i < logits.size(); ++i)
    best.emplace_back(logits[i], static_cast<llama_token>(i));
  std::partial_sort(best.begin(), best.begin() + 48, best.end(), std::greater<>());
  best.resize(48);
  std::erase_if(best, [&](const auto& entry) { return engine.ends(entry.second); });
  best.resize(std::min<std::size_t>(best.size(), 40));
  std::vector<double> mass;
  double total = 0;
  for (const auto& [logit, token] : best)
    mass.push_back(total += std::exp((static_cast<double>(logit) - best[0].first) / 0.8));
  const double at = static_cast<double>(draw.next() >> 11) * 0x1p-53 * total;
  const auto found = std::upper_bound(mass.begin(), mass.end(), at) - mass.begin();
  return best[std::min(static_cast<std::size_t>(found), best.size() - 1)].second;
}

struct Story {
  Tokens text;                 ///< Everything in sequence 0: prompt, opening, passages.
  std::size_t begin = 0;       ///< Where the passages begin.
  std::size_t read_again = 0;  ///< Tokens decoded to take in what the other wrote.
  double share_ms = 0;         ///< Time the exchanges took.
};

/// Puts both passages behind the common state by the library: sequence 0 becomes what `merger`
/// makes of the three.
template <class M>
kvmeld::Status merge(Engine& engine, const std::shared_ptr<const kvmeld::Geometry>& geometry,
                     const Tokens& common, const std::array<Tokens, 2>& passages, const M& merger,
                     std::size_t& tokens) {
  using namespace kvmeld;
  const auto base = llama::read(engine.context(), 0, geometry);
  if (!base) return base.error();
  const auto prefix =
      seal(base->view(), {.role = Role::prefix, .tokens = common, .positions = base->positions()});
  if (!prefix) return prefix.error();
  FragmentSet set;
  KVMELD_TRY(set.insert(*prefix));
  for (std::size_t w = 0; w < 2; ++w) {
    const auto state = llama::read(engine.context(), static_cast<llama_seq_id>(w) + 1, geometry);
    if (!state) return state.error();
    Tokens all = common;
    append(all, passages[w]);
    const auto passage =
        seal(state->view(), {.tokens = all,
                             .positions = state->positions(),
                             .drop_first = static_cast<std::int64_t>(common.size()),
                             .context = {.prefix = prefix->id()}});
    if (!passage) return passage.error();
    KVMELD_TRY(set.insert(*passage, Dot{w, 0}));
  }
  const auto plan = kvmeld::plan(set, merger, {.geometry = *geometry});
  if (!plan) return plan.error();
  auto blob = llama::make_state(geometry, base->form(), plan->positions(), plan->token_ids());
  if (!blob) return blob.error();
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto report = run(exec::cpu, *plan, workspace, blob->mutable_ref());
  if (!report) return report.error();
  tokens = static_cast<std::size_t>(report->tokens);
  return llama::write(engine.context(), 0, 3, *blob);
}

/// Writes one story. Sequence 0 is the common state, 1 and 2 are the writers.
kvmeld::Status write_story(Engine& engine, const std::shared_ptr<const kvmeld::Geometry>& geometry,
                           const Flags& flags, std::string_view mode, std::size_t number,
                           Story& story) {
  const kvmeld::Status refused{kvmeld::ErrorCode::engine_failure,
                               "the engine refused a passage; is the context too small?"};
  engine.forget_all();
  const Frame frame =
      make_frame(engine, "You write stories.", "Continue this story in plain sentences.");
  story.text = engine.tokens(frame.prefix + frame.middle, true, true);
  append(story.text, engine.tokens(std::string(openings[number % openings.size()])));
  story.begin = story.text.size();
  if (!engine.prefill(story.text, 0, 0, true)) return refused;
  std::vector<float> logits(engine.last_logits().begin(), engine.last_logits().end());
  // tokens in sequence 0, fewer than were written where passages were averaged
  std::size_t length = story.text.size();
  std::array<Draw, 2> draws{Draw(2 * number + 1), Draw(2 * number + 2)};
  const std::size_t writers = mode == "alone" ? 1 : 2;
  const std::size_t sentences = 2 / writers;    // alone writes as much, in twice the steps
  const Tokens pause = engine.tokens(" Then");  // every round goes on with it, in all modes

  for (std::size_t round = 0; round < flags.rounds; ++round) {
    std::array<Tokens, 2> passages;
    const Tokens common = story.text;
    std::array<std::vector<float>, 2> next{logits, logits};
    for (std::size_t w = 0; w < writers; ++w) engine.branch(0, static_cast<llama_seq_id>(w) + 1);
    std::array<std::size_t, 2> left{sentences, writers == 2 ? sentences : 0};
    for (std::size_t i = 0; i < flags.sync * sentences && left[0] + left[1] > 0; ++i) {
      Batch batch;
      std::array<std::int32_t, 2> rows{-1, -1};
      for (std::size_t w = 0; w < writers; ++w) {
        if (left[w] == 0) continue;
        passages[w].push_back(sample(engine, next[w], draws[w]));
        const std::string text = engine.text(passages[w].back());
        if (text.find_first_of(".!?") != std::string::npos) --left[w];
        rows[w] = batch.add(passages[w].back(), static_cast<llama_pos>(length + i),
                            static_cast<llama_seq_id>(w) + 1, true);
      }
      if (!engine.decode(batch)) return refused;
      for (std::size_t w = 0; w < writers; ++w)
        if (rows[w] >= 0)
          next[w].assign(engine.logits(rows[w]).begin(), engine.logits(rows[w]).end());
    }

    const Stopwatch watch;
    for (std::size_t w = 0; w < writers; ++w) append(story.text, passages[w]);
    if (mode == "alone") {
      engine.forget(0);
      engine.branch(1, 0);
      length += passages[0].size();
    } else if (mode == "text") {
      Tokens both = passages[0];
      append(both, passages[1]);
      for (const llama_seq_id writer : {1, 2}) engine.forget(writer);
      if (!engine.prefill(both, static_cast<llama_pos>(length), 0)) return refused;
      story.read_again += both.size();
      length += both.size();
    } else {
      using namespace kvmeld;
      // What the state holds: in `mean` the ids of averaged tokens are not meaningful, only their
      // number is.
      Tokens held(common.begin(),
                  common.begin() + static_cast<std::ptrdiff_t>(std::min(length, common.size())));
      held.resize(length, pause[0]);
      const Status status =
          mode == "concat" ? merge(engine, geometry, held, passages, merger(ByDot{}), length)
                           : merge(engine, geometry, held, passages,
                                   merger(ByDot{}, Aligner{TokenMatch{.mode = MatchMode::index}},
                                          Fuser{WeightedMean{}}),
                                   length);
      if (!status) return status;
    }
    for (const llama_seq_id writer : {1, 2}) engine.forget(writer);
    story.share_ms += watch.milliseconds();
    // both go on from here
    if (!engine.prefill(pause, static_cast<llama_pos>(length), 0, true)) return refused;
    append(story.text, pause);
    length += pause.size();
    logits.assign(engine.last_logits().begin(), engine.last_logits().end());
  }
  return {};
}

/// How surprising the passages are to the model when it reads the whole story as text: nats a
/// token.
double surprise(Engine& engine, const Story& story) {
  engine.forget_all();
  const std::span<const llama_token> text(story.text);
  if (!engine.prefill(text.first(story.begin - 1), 0, 0)) return -1;
  double sum = 0;
  Batch batch;
  for (std::size_t i = story.begin - 1; i + 1 < text.size(); ++i)
    batch.add(text[i], static_cast<llama_pos>(i), 0, true);
  if (!engine.decode(batch)) return -1;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const std::span<const float> logits = engine.logits(static_cast<std::int32_t>(i));
    sum += log_sum_exp(logits) -
           static_cast<double>(logits[static_cast<std::size_t>(text[story.begin + i])]);
  }
  return sum / static_cast<double>(batch.size());
}

/// Share of the passages' token pairs that occur once: repetition lowers it.
double distinct_pairs(const Story& story) {
  std::set<std::pair<llama_token, llama_token>> pairs;
  for (std::size_t i = story.begin; i + 1 < story.text.size(); ++i)
    pairs.emplace(story.text[i], story.text[i + 1]);
  return static_cast<double>(pairs.size()) /
         static_cast<double>(story.text.size() - story.begin - 1);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Two copies of a model write one story and share it as text or as merged caches.");
  study::add_common(app, flags);
  app.add_option("--sync", flags.sync, "most tokens that each writes between two exchanges")
      ->check(CLI::Range(2, 256))
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "exchanges a story")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  app.add_option("--stories", flags.stories, "stories, four openings in turn")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_flag("--show", flags.show, "print the stories");
  CLI11_PARSE(app, argc, argv);

  const auto cells = static_cast<std::uint32_t>(1024 + 8 * flags.rounds * flags.sync);
  const auto engine = Engine::open(
      {.model = flags.model, .threads = flags.threads, .cells = cells, .sequences = 4});
  if (!engine) return std::fprintf(stderr, "llama.cpp cannot open %s\n", flags.model.c_str()), 1;
  kvmeld::Result<kvmeld::Geometry> declared = kvmeld::llama::geometry(
      engine->model(), engine->parameters(), {.adapters = kvmeld::Adapters::none()});
  if (!declared) return std::fprintf(stderr, "%s\n", declared.error().message().c_str()), 1;
  const auto geometry = std::make_shared<const kvmeld::Geometry>(*std::move(declared));

  nlohmann::json rows = nlohmann::json::array();
  nlohmann::json summary = nlohmann::json::array();
  std::printf(
      "%zu stories, two writers, %zu exchanges, each after a sentence a writer of at most %zu "
      "tokens\n\n%-8s %14s %15s %18s %16s\n",
      flags.stories, flags.rounds, flags.sync, "sharing", "nats a token", "distinct pairs",
      "tokens read again", "ms an exchange");
  for (const std::string_view mode : modes) {
    double nats = 0, pairs = 0, again = 0, share = 0;
    for (std::size_t number = 0; number < flags.stories; ++number) {
      Story story;
      if (const kvmeld::Status status = write_story(*engine, geometry, flags, mode, number, story);
          !status)
        return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
      const double surprised = surprise(*engine, story);
      const double exchange_ms = story.share_ms / static_cast<double>(flags.rounds);
      rows.push_back({{"mode", mode},
                      {"story", number},
                      {"nats_per_token", surprised},
                      {"distinct_pairs", distinct_pairs(story)},
                      {"read_again_tokens", story.read_again},
                      {"exchange_ms", exchange_ms}});
      nats += surprised, pairs += distinct_pairs(story),
          again += static_cast<double>(story.read_again), share += exchange_ms;
      if (flags.show) {
        std::string text;
        for (std::size_t i = story.begin; i < story.text.size(); ++i)
          text += engine->text(story.text[i]);
        std::printf("--- %s, story %zu: %s%s\n", std::string(mode).c_str(), number,
                    std::string(openings[number % openings.size()]).c_str(), text.c_str());
      }
    }
    const auto count = static_cast<double>(flags.stories);
    summary.push_back({{"mode", mode},
                       {"nats_per_token", nats / count},
                       {"distinct_pairs", pairs / count},
                       {"read_again_tokens", again / count},
                       {"exchange_ms", share / count}});
    std::printf("%-8s %14.2f %15.2f %18.0f %16.1f\n", std::string(mode).c_str(), nats / count,
                pairs / count, again / count, share / count);
    std::fflush(stdout);
  }
  std::printf(
      "\nnats a token: how surprising the passages are to the model that reads the finished story "
      "as text. Lower is more\n"
      "fluent; a text that repeats itself is low too, and shows it in the pairs. `alone` has "
      "nothing to take in.\n");
  return study::write_results(
             flags.output,
             {{"model", study::model_name(flags.model)}, {"rows", rows}, {"summary", summary}})
             ? 0
             : 1;
}
