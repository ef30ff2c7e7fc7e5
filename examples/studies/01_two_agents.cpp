// Several agents read different notes; their caches are merged; questions are answered as if one
// agent had read all.
//
// Compares the ways to do that on one model, over fact sets made from seeds: `--help` lists the
// flags. Writes build/two_agents.json and goes on from the rows that are there. docs/quality.md
// reads the table.

#include "support/asking.hpp"
#include "support/dataset.hpp"
#include "support/engine.hpp"
#include "support/lead_in.hpp"
#include "support/method.hpp"
#include "support/prompt.hpp"
#include "support/question_prompt.hpp"
#include "support/results.hpp"
#include "support/splice.hpp"
#include "support/study.hpp"
#include "support/summaries.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace example;

struct Flags {
  std::string model;
  std::string output = "build/two_agents.json";
  std::vector<std::size_t> agents{2, 4};
  std::size_t questions = 32;
  std::vector<std::string> tasks{"single"};
  std::vector<std::string> methods{
      "full_text", "one_agent",         "text_summary",        "concat",
      "lead_in",   "lead_in_canonical", "lead_in_no_rotation", "mean"};
  std::vector<std::uint64_t> seeds{2};
  std::size_t context_tokens = 0;
  std::size_t facts = 8;
  std::size_t lead_in_sentences = 8;
  std::size_t variants = 2;
  double summary_share = 0.5;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  std::vector<std::string> include;
  bool table = false;
};

constexpr const char* system_text = "You answer questions about the notes below. Notes:";
constexpr const char* request_text = "Complete the statement as the notes say.";
constexpr const char* summary_text =
    "Summarise these notes in a few short sentences for a colleague who has not read them.";
constexpr std::size_t questions_per_set = 8;
constexpr llama_seq_id first_branch = 16;  // 0 the cache, 1 … 8 the questions

/// The prompt's fixed parts and one fact set's notes, tokenised apart.
struct Texts {
  Frame frame;
  Tokens prefix, lead_in;
  std::vector<Tokens> notes;  // (agent, token)
  std::vector<kvmeld::TokenId> sentence_ends;
};

Tokens tokens_of(const Engine& engine, const std::vector<std::string>& sentences) {
  Tokens out;
  for (const std::string& sentence : sentences) append(out, engine.tokens(sentence));
  return out;
}

/// Neutral sentences an agent needs so that a prompt of all notes has about as many tokens as asked
/// for.
std::size_t neutral_sentences(const Engine& engine, const Flags& flags, std::size_t agents,
                              Task task, std::size_t prefix) {
  if (flags.context_tokens == 0) return 0;
  const auto total = [&](std::size_t neutral) {
    const FactSet set = make_fact_set(task, agents, 0, 0, flags.facts, questions_per_set, neutral);
    std::size_t count = prefix;
    for (const auto& notes : set.notes) count += tokens_of(engine, notes).size();
    return count;
  };
  std::size_t neutral = 0;
  while (total(neutral) < flags.context_tokens) ++neutral;
  return neutral;
}

/// Asks all questions of a fact set on sequence 0 and counts right answers into `row`; `full` holds
/// full text's logits.
bool answer(Engine& engine, const Frame& frame, const FactSet& set, llama_pos length,
            bool reference, std::vector<std::vector<float>>& full, Row& row) {
  std::vector<Ask> asks;
  bool steps = false;
  for (const Question& question : set.questions) {
    steps = steps || !question.link.start.empty();
    asks.push_back(steps ? question.link : question.last);
  }
  std::vector<Prompt> prompts;
  for (const Ask& ask : asks) prompts.push_back(make_prompt(engine, frame, ask));
  std::vector<Answer> answers = ask(engine, length, prompts, first_branch, &row.decode_ms);
  if (answers.empty()) return false;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (reference) full.push_back(answers[i].logits);
    row.kl += divergence(full[i], answers[i].logits) / static_cast<double>(answers.size());
  }
  // the name that the model gave goes into the second question; it may be wrong, or none
  if (steps) {
    prompts.clear();
    for (std::size_t i = 0; i < answers.size(); ++i) {
      const std::string link = asks[i].candidates[answers[i].named.value_or(answers[i].ranked)];
      asks[i] = set.questions[i].last;
      std::string& start = asks[i].start;
      for (std::size_t at = start.find('@'); at != std::string::npos; at = start.find('@'))
        start.replace(at, 1, link);
      prompts.push_back(make_prompt(engine, frame, asks[i]));
    }
    answers = ask(engine, length, prompts, first_branch, nullptr);
    if (answers.empty()) return false;
  }
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const std::string& answer = asks[i].answer;
    ++row.total;
    row.right += answers[i].named && asks[i].candidates[*answers[i].named] == answer ? 1U : 0U;
    row.ranked_right += asks[i].candidates[answers[i].ranked] == answer ? 1U : 0U;
  }
  return true;
}

/// Fills sequence 0 as the method says.
kvmeld::Status fill(Engine& engine, const Texts& texts, double summary_share, Splicer& splicer,
                    const Method& method, Cost& cost) {
  if (method.source == Method::Source::merged || method.source == Method::Source::mean) {
    return splicer.merge(method, cost);
  }
  const kvmeld::Status refused{kvmeld::ErrorCode::engine_failure,
                               "the engine refused a prompt; is the context too small?"};
  Tokens all = texts.prefix;
  append(all, texts.notes[0]);
  if (method.source == Method::Source::full_text)
    for (std::size_t i = 1; i < texts.notes.size(); ++i) append(all, texts.notes[i]);
  // the first agent reads its own notes and what the others wrote
  if (method.source == Method::Source::text_summary) {
    const Stopwatch writing;
    const Tokens request =
        engine.tokens(make_frame(engine, system_text, summary_text).middle, true);
    std::vector<Tokens> summaries;
    if (!write_summaries(engine, texts.prefix, texts.notes, request, summary_share, summaries))
      return refused;
    cost.export_ms = writing.milliseconds();
    append(all, joined(engine, summaries, cost.bytes));
  }
  engine.forget_all();
  const Stopwatch watch;
  if (!engine.prefill(all, 0, 0)) return refused;
  cost.prefill_ms = watch.milliseconds();
  cost.prefilled_tokens = all.size();
  cost.length = static_cast<llama_pos>(all.size());
  return {};
}

/// Inserts the fragments in every order (up to five agents) or in 200 random ones; all must render
/// the same bytes.
kvmeld::Status permute(Splicer& splicer, std::size_t agents, bool lead_in, std::size_t& renders,
                       bool& equal) {
  std::vector<std::size_t> order(agents);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto first = splicer.digest_of(lead_in, order);
  if (!first) return first.error();
  Draw draw(agents);
  for (renders = 1; agents > 5 ? renders < 200 : std::next_permutation(order.begin(), order.end());
       ++renders) {
    if (agents > 5) draw.shuffle(order);
    const auto again = splicer.digest_of(lead_in, order);
    if (!again) return again.error();
    equal = equal && *again == *first;
  }
  return {};
}

class Run {
 public:
  Run(const Flags& flags, Engine& engine, const Geometries& geometries, Results& results)
      : flags_(flags), engine_(engine), geometries_(geometries), results_(results) {}

  kvmeld::Status all(const std::vector<Task>& tasks, const std::vector<const Method*>& chosen) {
    const std::size_t sets = (flags_.questions + questions_per_set - 1) / questions_per_set;
    left_ = tasks.size() * flags_.agents.size() * flags_.seeds.size() * sets * chosen.size();
    for (const Task task : tasks)
      for (const std::size_t agents : flags_.agents)
        for (const std::uint64_t seed : flags_.seeds)
          for (std::size_t set = 0; set < sets; ++set) {
            const std::size_t questions =
                std::min(questions_per_set, flags_.questions - set * questions_per_set);
            if (kvmeld::Status status = one_set(task, agents, seed, set, questions, chosen);
                !status)
              return status;
          }
    std::fprintf(stderr, "\r%-100s\r", "");
    return {};
  }

 private:
  kvmeld::Status one_set(Task task, std::size_t agents, std::uint64_t seed, std::size_t index,
                         std::size_t questions, const std::vector<const Method*>& chosen) {
    Row row;
    row.agents = agents;
    row.task = name(task);
    row.seed = seed;
    row.fact_set = index;
    row.context_tokens = flags_.context_tokens;
    row.facts = task == Task::single ? flags_.facts : 16;
    row.lead_in_sentences = flags_.lead_in_sentences;
    row.variants = flags_.variants;
    const auto missing = [&](const Method* method) {
      row.method = method->name;
      return !results_.has(row);
    };
    if (std::none_of(chosen.begin(), chosen.end(), missing)) {
      left_ -= chosen.size();
      return {};
    }

    Texts texts;
    texts.frame = make_frame(engine_, system_text, request_text);
    texts.prefix = engine_.tokens(texts.frame.prefix, true, true);
    texts.lead_in = engine_.tokens(lead_in(flags_.lead_in_sentences));
    const std::size_t neutral =
        neutral_sentences(engine_, flags_, agents, task, texts.prefix.size());
    const FactSet set = make_fact_set(task, agents, seed, index, flags_.facts, questions, neutral);
    for (const auto& notes : set.notes) texts.notes.push_back(tokens_of(engine_, notes));
    texts.sentence_ends = {texts.notes[0].back()};
    check_tokens(texts, set);

    Splicer splicer(engine_, geometries_, texts.prefix, texts.lead_in, texts.notes,
                    texts.sentence_ends, flags_.variants == 2, flags_.threads);
    std::vector<std::vector<float>> full;
    for (const Method* method : chosen) {
      const bool reference = method->source == Method::Source::full_text;
      if (reference || missing(method)) {
        Row result = row;
        result.method = method->name;
        Cost cost;
        engine_.forget_all();
        if (kvmeld::Status status =
                fill(engine_, texts, flags_.summary_share, splicer, *method, cost);
            !status)
          return status;
        if (!answer(engine_, texts.frame, set, cost.length, reference, full, result))
          return {kvmeld::ErrorCode::engine_failure,
                  "the engine refused a question; is the context too small?"};
        result.export_ms = cost.export_ms;
        result.merge_ms = cost.merge_ms;
        result.import_ms = cost.import_ms;
        result.recompute_ms = cost.recompute_ms;
        result.prefill_ms = cost.prefill_ms;
        result.first_token_ms = cost.export_ms + cost.merge_ms + cost.import_ms +
                                cost.recompute_ms + cost.prefill_ms + result.decode_ms;
        result.prefilled_tokens = cost.prefilled_tokens;
        result.bytes = cost.bytes;
        result.length = static_cast<std::size_t>(cost.length);
        if (!results_.has(result)) results_.add(result);
      }
      progress(row, *method);
    }
    for (const bool led : {false, true}) {
      const std::string what = row.task + "/" + std::to_string(agents) + "/" +
                               std::to_string(seed) + "/" + std::to_string(index) + "/" +
                               std::to_string(flags_.context_tokens) +
                               (led ? "/lead_in" : "/plain");
      const auto merges = [led](const Method* m) {
        return m->source == Method::Source::merged && m->lead_in == led;
      };
      if (results_.permuted(what) || std::none_of(chosen.begin(), chosen.end(), merges)) continue;
      std::size_t renders = 0;
      bool equal = true;
      if (kvmeld::Status status = permute(splicer, agents, led, renders, equal); !status)
        return status;
      results_.add_permutations(what, renders, equal);
    }
    return results_.save() ? kvmeld::Status()
                           : kvmeld::Status(kvmeld::ErrorCode::invalid_argument,
                                            "cannot write " + flags_.output);
  }

  /// Pieces tokenised apart must be what the whole text gives, or full text is no ceiling; says so
  /// once where they differ.
  void check_tokens(const Texts& texts, const FactSet& set) {
    std::string text = texts.frame.prefix;
    Tokens pieces = texts.prefix;
    for (std::size_t i = 0; i < set.notes.size(); ++i) {
      for (const std::string& sentence : set.notes[i]) text += sentence;
      append(pieces, texts.notes[i]);
    }
    if (pieces == engine_.tokens(text, true, true) || warned_) return;
    warned_ = true;
    std::fprintf(
        stderr,
        "note: this tokenizer joins words across pieces; full text uses the pieces' tokens too\n");
  }

  void progress(const Row& row, const Method& method) {
    --left_;
    ++done_;
    const double seconds = watch_.milliseconds() / 1000;
    std::fprintf(
        stderr,
        "\r%s, %zu agents, seed %llu, fact set %zu: %-20s %5.1f min done, about %5.1f min left ",
        row.task.c_str(), row.agents, static_cast<unsigned long long>(row.seed), row.fact_set,
        std::string(method.name).c_str(), seconds / 60,
        seconds / 60 / static_cast<double>(done_) * static_cast<double>(left_));
  }

  const Flags& flags_;
  Engine& engine_;
  const Geometries& geometries_;
  Results& results_;
  Stopwatch watch_;
  std::size_t left_ = 0, done_ = 0;
  bool warned_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Merges the caches of agents that read different notes, and asks questions about all of "
      "them.");
  study::add_common(app, flags);
  app.add_option("--agents", flags.agents, "numbers of agents, e.g. 2,4,8")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--questions", flags.questions,
                 "questions for each number of agents, task and seed")
      ->capture_default_str();
  app.add_option("--tasks", flags.tasks, "single, two_hop, two_hop_steps")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--methods", flags.methods, "names as in the table, or all")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--seeds", flags.seeds, "seeds of the fact sets; 1 served to choose the lead-in")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--context-tokens", flags.context_tokens,
                 "neutral notes are added up to this prompt length")
      ->capture_default_str();
  app.add_option("--facts", flags.facts, "facts in a set, dealt out to the agents (task single)")
      ->check(CLI::Range(8, 32))
      ->capture_default_str();
  app.add_option("--lead-in", flags.lead_in_sentences, "sentences of the lead-in, up to 16")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  app.add_option("--variants", flags.variants,
                 "2: agents also seal their notes without lead-in, for whoever comes first")
      ->check(CLI::Range(1, 2))
      ->capture_default_str();
  app.add_option("--summary-share", flags.summary_share,
                 "longest text summary, as a share of the notes' tokens")
      ->capture_default_str();
  app.add_option("--include", flags.include,
                 "further JSON files of the same model whose rows are taken over")
      ->delimiter(',');
  app.add_flag("--table", flags.table,
               "print and save the table of the rows that are there, and run nothing");
  CLI11_PARSE(app, argc, argv);

  std::vector<Task> tasks;
  for (const std::string& text : flags.tasks) {
    const Task all[] = {Task::single, Task::two_hop, Task::two_hop_steps};
    const auto* at =
        std::find_if(std::begin(all), std::end(all), [&](Task task) { return name(task) == text; });
    if (at == std::end(all)) return std::fprintf(stderr, "no task is called %s\n", text.c_str()), 2;
    tasks.push_back(*at);
  }
  // first: the others are compared with it
  std::vector<const Method*> chosen{find_method("full_text")};
  for (const Method& method : methods) {
    const bool named =
        std::any_of(flags.methods.begin(), flags.methods.end(),
                    [&](const std::string& m) { return m == method.name || m == "all"; });
    if (named && &method != chosen[0]) chosen.push_back(&method);
  }
  for (const std::string& text : flags.methods)
    if (text != "all" && find_method(text) == nullptr)
      return std::fprintf(stderr, "no method is called %s\n", text.c_str()), 2;
  for (const std::size_t agents : flags.agents)
    if (agents < 1 || agents > 8)
      return std::fprintf(stderr, "%zu agents: 1 to 8 share the facts of a set\n", agents), 2;

  const std::string file = study::model_name(flags.model);
  Results results(flags.output, file);
  for (const std::string& path : flags.include) results.take(path);
  if (flags.table) return results.print(), results.save() ? 0 : 1;

  const std::size_t cells = 4096 + 12 * flags.context_tokens;
  const std::unique_ptr<Engine> engine = Engine::open({.model = flags.model,
                                                       .threads = flags.threads,
                                                       .cells = static_cast<std::uint32_t>(cells),
                                                       .sequences = 64});
  if (!engine) return std::fprintf(stderr, "llama.cpp cannot open %s\n", flags.model.c_str()), 1;
  const kvmeld::Result<Geometries> geometries = make_geometries(*engine, flags.model);
  if (!geometries) return std::fprintf(stderr, "%s\n", geometries.error().message().c_str()), 1;
  const kvmeld::Status status = Run(flags, *engine, *geometries, results).all(tasks, chosen);
  if (!status) return std::fprintf(stderr, "\n%s\n", status.message().c_str()), 1;
  results.print();
  std::printf("rows: %s\n", flags.output.c_str());
  return results.permuted_renders() > 0 && !results.digests_equal() ? 1 : 0;
}
