// Which way to merge? Every aligner and fuser that makes sense, on agents that read different notes
// and on readers of one document, tried by `calibrate` on a real model: one table, and the best of
// each task.
//
//   bash examples/run.sh 09 [--questions 16] [--tasks NAMES] [--policies NAMES]
//
// Writes build/policies.json. docs/quality.md reads the table.

#include "support/note_agent.hpp"
#include "support/readers.hpp"
#include "support/study.hpp"

#include <kvmeld/calibrate.hpp>
#include <kvmeld/policies/attention.hpp>
#include <kvmeld/policies/mean.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace example;
using Json = nlohmann::json;

struct Flags {
  std::string model;
  std::string output = "build/policies.json";
  std::size_t questions = 16;
  std::vector<std::string> tasks{"all"};
  std::vector<std::string> policies{"all"};
  std::uint64_t seed = 2;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
};

constexpr std::size_t questions_per_case = 8;

/// A task: what agents read, and how many of them.
struct Trial {
  const char* name;
  std::vector<std::size_t> agents;
  enum class Kind { partitioned, document } kind;
  /// Partitioned: behind the lead-in; readers of a document always have one each.
  bool lead_in = true;
  bool edited = false;     ///< readers' copies differ by a few words
  bool byzantine = false;  ///< the last reader's keys and values are noisy
};

const std::vector<Trial>& all_tasks() {
  using Kind = Trial::Kind;
  static const std::vector<Trial> tasks{
      {"partitioned_facts", {2, 4}, Kind::partitioned, false},
      {"partitioned_facts_lead_in", {2, 4}, Kind::partitioned, true},
      {"same_document", {2}, Kind::document},
      {"same_document_edited", {3}, Kind::document, true, true},
      {"same_document_liar", {5}, Kind::document, true, false, true},
  };
  return tasks;
}

bool chosen(const std::vector<std::string>& names, const std::string& name) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& n) { return n == name || n == "all"; });
}

/// Pools all tokens by the keys of each fragment's own sentence ends, as queries that stand where
/// they were read: as many output tokens as there are sentences. An aligner of one's own around the
/// library's.
struct SentencePooling {
  static constexpr bool reproducible = true;
  std::vector<kvmeld::TokenId> ends;

  [[nodiscard]] kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source> ordered,
                                                        std::int64_t first_position) const {
    auto queries = std::make_shared<std::vector<float>>();
    kvmeld::Attention pooling{.count = 0, .frame = kvmeld::QueryFrame::post_rope};
    for (const kvmeld::Source& source : ordered) {
      // The first span is rendered in its encoding without lead-in, if it has one.
      const kvmeld::FragmentView view(
          *source.fragment,
          &source == ordered.data() && source.fragment->payloads().size() > 1 ? 1 : 0);
      for (std::int64_t t = 0; t < source.fragment->token_count(); ++t) {
        if (std::find(ends.begin(), ends.end(), source.token_id(t)) == ends.end()) continue;
        ++pooling.count;
        append_keys(view, t, *queries);
      }
    }
    if (pooling.count == 0)
      return {
          kvmeld::ErrorCode::invalid_argument,
          "SentencePooling: no sentence ends in " + std::to_string(ordered.size()) + " fragments"};
    pooling.queries = std::move(queries);
    return pooling.align(ordered, first_position);
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.text("example.SentencePooling");
    hasher.values(std::span<const kvmeld::TokenId>(ends));
  }

  /// The keys of one token, all layers and heads.
  static void append_keys(const kvmeld::FragmentView& view, std::int64_t token,
                          std::vector<float>& out) {
    for (std::size_t l = 0; l < view.ref().geometry().layers.size(); ++l) {
      const kvmeld::PlaneRef& keys = view.ref().plane(l, 0);
      const std::int64_t width = std::int64_t{keys.shape.heads} * keys.shape.channels;
      for (std::int64_t c = 0; c < width; ++c)
        out.push_back(static_cast<float>(element(keys.data, token * width + c)));
    }
  }
};

/// Keeps one token of a fragment.
struct OnlyToken {
  static constexpr bool reproducible = true;
  std::int32_t token = 0;

  [[nodiscard]] kvmeld::Result<kvmeld::TokenSet> select(const kvmeld::Source&) const {
    return kvmeld::TokenSet{false, {token}};
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.text("example.OnlyToken");
    hasher.value(token);
  }
};

/// Un-rotated keys of the request's last `count` tokens, read behind the prefix: each is rendered
/// alone to position 0.
kvmeld::Result<std::shared_ptr<const std::vector<float>>> request_keys(NoteAgent& agent,
                                                                       std::size_t count) {
  const Tokens request = agent.engine().tokens(agent.frame().middle, true);
  const auto fragment = agent.read(request, {}, false);
  if (!fragment) return fragment.error();
  kvmeld::FragmentSet set;
  if (kvmeld::Status status = set.insert(*fragment); !status) return status;
  auto out = std::make_shared<std::vector<float>>();
  for (std::size_t i = request.size() - std::min(count, request.size()); i < request.size(); ++i) {
    kvmeld::HostCache one(agent.geometry(), 1);
    kvmeld::Target target;
    target.prefix_in_place = true;
    const auto report = kvmeld::render(kvmeld::exec::seq, set,
                                       kvmeld::merger(OnlyToken{static_cast<std::int32_t>(i)}),
                                       one.mutable_ref(), target);
    if (!report) return report.error();
    const auto sealed = kvmeld::seal(one.kv_cache_ref());
    if (!sealed) return sealed.error();
    SentencePooling::append_keys(kvmeld::FragmentView(*sealed), 0, *out);
  }
  return std::shared_ptr<const std::vector<float>>(std::move(out));
}

/// One line of the table.
struct Line {
  std::string aligner, fuser, task;
  std::size_t agents = 0, right = 0, total = 0;
  double kl = 0, merge_ms = 0;
  std::string refused{};
  bool best = false;
};

/// The mergers that make sense on a task, by name "aligner/fuser".
class Mergers {
 public:
  Mergers(const Flags& flags, std::shared_ptr<const std::vector<float>> request,
          std::int64_t request_count, std::vector<kvmeld::TokenId> sentence_ends)
      : flags_(flags),
        request_(std::move(request)),
        request_count_(request_count),
        sentence_ends_(std::move(sentence_ends)) {}

  [[nodiscard]] std::vector<kvmeld::Candidate> of(const Trial& task, std::size_t agents) const {
    using namespace kvmeld;
    std::vector<Candidate> out;
    const auto add = [&](const std::string& aligner, const auto& align, const std::string& fuser,
                         const auto& fuse) {
      if (!chosen(flags_.policies, aligner) && !chosen(flags_.policies, fuser) &&
          !chosen(flags_.policies, aligner + "/" + fuser))
        return;
      out.emplace_back(aligner + "/" + fuser, merger(Aligner{align}, Fuser{fuse}));
    };
    const auto match = [](MatchMode mode) { return TokenMatch{.mode = mode}; };
    const auto all_fusers = [&](const std::string& aligner, const TokenMatch& align) {
      add(aligner, align, "weighted_mean", WeightedMean{});
      add(aligner, align, "norm_preserving_mean", NormPreservingMean{});
      add(aligner, align, "max", Max{});
      add(aligner, align, "median", Median{});
      if (agents >= 3) add(aligner, align, "trimmed_mean", TrimmedMean{.f = 1});
      add(aligner, align, "medoid", Medoid{});
      if (agents >= 5) {
        add(aligner, align, "krum", Krum{.f = 1});
        add(aligner, align, "multi_krum", MultiKrum{.f = 1, .m = 3});
      }
      add(aligner, align, "geometric_median", GeometricMedian{});
      add(aligner, align, "cluster_cosine",
          Cluster{.threshold = .95F, .result = ClusterResult::centre});
      if (agents >= 3)
        add(aligner, align, "cluster_two", Cluster{.k = 2, .result = ClusterResult::centre});
    };
    add("concat", Concat{}, "weighted_mean", WeightedMean{});
    if (task.kind == Trial::Kind::partitioned) {
      add("index", match(MatchMode::index), "weighted_mean", WeightedMean{});
      add("index", match(MatchMode::index), "norm_preserving_mean", NormPreservingMean{});
      add("index", match(MatchMode::index), "medoid", Medoid{});
      add("edit_distance", match(MatchMode::edit_distance), "weighted_mean", WeightedMean{});
    } else if (task.edited) {
      add("common_prefix", match(MatchMode::common_prefix), "weighted_mean", WeightedMean{});
      all_fusers("edit_distance", match(MatchMode::edit_distance));
    } else {
      all_fusers("common_prefix", match(MatchMode::common_prefix));
    }
    add("neighbours", match(MatchMode::neighbours), "weighted_mean", WeightedMean{});
    add("attention_request", Attention{.queries = request_, .count = request_count_},
        "weighted_mean", WeightedMean{});
    add("attention_sentences", SentencePooling{sentence_ends_}, "weighted_mean", WeightedMean{});
    return out;
  }

 private:
  const Flags& flags_;
  std::shared_ptr<const std::vector<float>> request_;
  std::int64_t request_count_;
  std::vector<kvmeld::TokenId> sentence_ends_;
};

class Run {
 public:
  Run(const Flags& flags, NoteAgent& agent, const Mergers& mergers)
      : flags_(flags), agent_(agent), mergers_(mergers), model_(study::model_name(flags.model)) {
    for (const Trial& task : all_tasks()) {
      if (!chosen(flags_.tasks, task.name)) continue;
      for (const std::size_t agents : task.agents)
        left_ += cases() * (mergers_.of(task, agents).size() + 2);
    }
  }

  kvmeld::Status all() {
    for (const Trial& task : all_tasks()) {
      if (!chosen(flags_.tasks, task.name)) continue;
      for (const std::size_t agents : task.agents) {
        KVMELD_TRY(one(task, agents));
        if (!save()) return {kvmeld::ErrorCode::invalid_argument, "cannot write " + flags_.output};
      }
    }
    std::fprintf(stderr, "\r%-100s\r", "");
    return {};
  }

  void print() const {
    std::string group;
    for (const Line& line : lines_) {
      const std::string here = line.task + ", " + std::to_string(line.agents) + " agents";
      if (here != group)
        std::printf("\n%s\n  %-20s %-22s %8s %8s %8s\n", here.c_str(), "aligner", "fuser", "right",
                    "KL", "merge ms");
      group = here;
      std::printf("%s %-20s %-22s ", line.best ? "*" : " ", line.aligner.c_str(),
                  line.fuser.c_str());
      if (!line.refused.empty()) {
        std::printf("refused: %s\n", line.refused.c_str());
      } else {
        std::printf("%3zu /%3zu %8.3f %8.2f\n", line.right, line.total, line.kl, line.merge_ms);
      }
    }
    std::printf(
        "\n*: the best of its task by calibrate's rule (score, then divergence, then cost)\n");
  }

 private:
  /// What the engine knows of a case: the questions, and full text's answers.
  struct Reference {
    std::vector<Question> questions;
    std::vector<Answer> full;
  };

  [[nodiscard]] std::size_t cases() const {
    return (flags_.questions + questions_per_case - 1) / questions_per_case;
  }

  kvmeld::Status one(const Trial& task, std::size_t agents) {
    std::vector<kvmeld::ValidationCase> validation;
    std::vector<Reference> references;
    Line full{"full_text", "none", task.name, agents},
        single{"one_agent", "none", task.name, agents};
    for (std::size_t index = 0; index < cases(); ++index) {
      const std::size_t questions =
          std::min(questions_per_case, flags_.questions - index * questions_per_case);
      const bool parts = task.kind == Trial::Kind::partitioned;
      const FactSet facts =
          make_fact_set(Task::single, parts ? agents : 1, flags_.seed, index, 8, questions, 0);
      references.push_back({facts.questions, {}});
      validation.push_back({{}, {.geometry = *agent_.geometry()}});
      KVMELD_TRY(fill(task, agents, index, facts, validation.back().set));
      KVMELD_TRY(read_text(facts.notes, true, references.back(), full));
      if (parts) KVMELD_TRY(read_text({facts.notes[0]}, false, references.back(), single));
      left_ -= 2;
    }
    lines_.push_back(full);
    if (task.kind == Trial::Kind::partitioned) lines_.push_back(single);

    const std::vector<kvmeld::Candidate> candidates = mergers_.of(task, agents);
    if (candidates.empty()) return {};
    std::vector<std::size_t> asked(candidates.size(), 0);
    const auto engine = [&](kvmeld::CandidateRender& render,
                            std::size_t index) -> kvmeld::Result<kvmeld::CaseScore> {
      progress(task, agents, render.candidate().name());
      auto blob = agent_.make_state(render.plan().positions(), render.plan().token_ids());
      if (!blob) return blob.error();
      const auto report = render.into(blob->mutable_ref());
      if (!report) return report.error();
      KVMELD_TRY(agent_.load(*blob));
      const Reference& reference = references[index];
      const auto answers = agent_.answers(
          reference.questions, static_cast<llama_pos>(render.plan().positions().back() + 1), 0);
      if (!answers) return answers.error();
      Line counts;
      count(reference, *answers, counts);
      return kvmeld::CaseScore{.score = static_cast<double>(counts.right), .divergence = counts.kl};
    };
    const auto table = kvmeld::calibrate(validation, candidates, engine,
                                         {.threads = static_cast<std::size_t>(flags_.threads)});
    if (!table) return table.error();
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      const kvmeld::CalibrationRow& row = table->rows[c];
      const std::size_t slash = row.name.find('/');
      Line line{row.name.substr(0, slash), row.name.substr(slash + 1), task.name, agents};
      line.total = full.total;
      line.right =
          static_cast<std::size_t>(std::llround(row.score * static_cast<double>(row.cases)));
      line.kl = row.divergence;
      line.merge_ms = row.cost_ms;
      line.refused = row.status.message();
      line.best = table->best == c;
      if (row.cases < cases()) left_ -= cases() - row.cases;  // those it was not asked
      lines_.push_back(line);
    }
    return {};
  }

  /// The agents' fragments of one case, behind the shared prefix.
  kvmeld::Status fill(const Trial& task, std::size_t agents, std::size_t index,
                      const FactSet& facts, kvmeld::FragmentSet& set) {
    KVMELD_TRY(set.insert(agent_.prefix()));
    for (std::size_t i = 0; i < agents; ++i) {
      progress(task, agents, "reading");
      const bool parts = task.kind == Trial::Kind::partitioned;
      const Tokens notes = agent_.tokens(parts         ? facts.notes[i]
                                         : task.edited ? edited_copy(facts.notes[0], i)
                                                       : facts.notes[0]);
      const Tokens before = !parts         ? agent_.tokens({lead_in_of(i)})
                            : task.lead_in ? agent_.lead_in_tokens()
                                           : Tokens{};
      auto fragment = agent_.read(notes, before, parts && task.lead_in);
      if (fragment && task.byzantine && i + 1 == agents)
        fragment = with_noise(*fragment, index + 1);
      if (!fragment) return fragment.error();
      KVMELD_TRY(set.insert(*fragment, kvmeld::Dot{i, 0}));
    }
    return {};
  }

  /// Asks on text; `reference`: its answers are what the others are compared with.
  kvmeld::Status read_text(const std::vector<std::vector<std::string>>& notes, bool is_reference,
                           Reference& reference, Line& line) {
    const auto length = agent_.read_text(notes);
    if (!length) return length.error();
    auto answers = agent_.answers(reference.questions, *length, 0);
    if (!answers) return answers.error();
    if (is_reference) reference.full = *answers;
    Line counts;
    count(reference, *answers, counts);
    line.right += counts.right;
    line.total += reference.questions.size();
    line.kl += counts.kl / static_cast<double>(cases());
    return {};
  }

  /// Right answers by rank among the candidates, and the mean divergence of the next token from
  /// full text's.
  static void count(const Reference& reference, const std::vector<Answer>& answers, Line& line) {
    for (std::size_t i = 0; i < answers.size(); ++i) {
      const Ask& ask = reference.questions[i].last;
      line.right += ask.candidates[answers[i].ranked] == ask.answer ? 1U : 0U;
      line.kl += divergence(reference.full[i].logits, answers[i].logits) /
                 static_cast<double>(answers.size());
    }
  }

  /// Everything so far, so that a run that is stopped leaves what it has.
  [[nodiscard]] bool save() const {
    Json json{{"model", model_},
              {"seed", flags_.seed},
              {"rows", Json::array()},
              {"refused", Json::array()},
              {"best", Json::array()}};
    for (const Line& line : lines_) {
      Json row{{"aligner", line.aligner},
               {"fuser", line.fuser},
               {"task", line.task},
               {"agents", line.agents}};
      if (line.best) json["best"].push_back(row);
      if (!line.refused.empty()) {
        row["reason"] = line.refused;
        json["refused"].push_back(row);
        continue;
      }
      row.update({{"right", line.right},
                  {"total", line.total},
                  {"kl", line.kl},
                  {"merge_ms", line.merge_ms}});
      json["rows"].push_back(row);
    }
    return study::write_results(flags_.output, json);
  }

  void progress(const Trial& task, std::size_t agents, const std::string& what) {
    const bool reading = what == "reading";
    const double minutes = watch_.milliseconds() / 60000;
    std::fprintf(
        stderr, "\r%s, %zu agents: %-36s %5.1f min done, about %5.1f min left ", task.name, agents,
        what.c_str(), minutes,
        done_ == 0 ? 0.0 : minutes / static_cast<double>(done_) * static_cast<double>(left_));
    if (reading) return;
    ++done_;
    --left_;
  }

  const Flags& flags_;
  NoteAgent& agent_;
  const Mergers& mergers_;
  std::string model_;
  Stopwatch watch_;
  std::size_t left_ = 0, done_ = 0;
  std::vector<Line> lines_;
};

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Tries every way to merge that makes sense on several tasks, and says which is best.");
  study::add_common(app, flags);
  app.add_option("--questions", flags.questions, "questions for each task and number of agents")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--tasks", flags.tasks, "names as in the table, or all")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--policies", flags.policies,
                 "aligners, fusers or aligner/fuser as in the table, or all")
      ->delimiter(',')
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  for (const std::string& name : flags.tasks) {
    const bool known =
        name == "all" || std::any_of(all_tasks().begin(), all_tasks().end(),
                                     [&](const Trial& task) { return name == task.name; });
    if (!known) return std::fprintf(stderr, "no task is called %s\n", name.c_str()), 2;
  }

  const auto agent = NoteAgent::open(flags.model, flags.threads);
  if (!agent) return std::fprintf(stderr, "%s\n", agent.error().message().c_str()), 1;
  constexpr std::size_t queries = 16;
  const auto request = request_keys(**agent, queries);
  if (!request) return std::fprintf(stderr, "%s\n", request.error().message().c_str()), 1;
  std::size_t per_query = 0;
  for (const kvmeld::LayerShape& layer : (*agent)->geometry()->layers)
    per_query += static_cast<std::size_t>(layer.planes[0].heads * layer.planes[0].channels);
  const Tokens sentence =
      (*agent)->engine().tokens(" The nurse named Emma keeps the red hat in the attic.");
  const Mergers mergers(flags, *request, static_cast<std::int64_t>((*request)->size() / per_query),
                        {sentence.back()});
  const Flags every;
  const Mergers all(every, *request, 1, {});
  for (const std::string& name : flags.policies) {
    bool known = name == "all";
    for (const Trial& task : all_tasks())
      for (const kvmeld::Candidate& candidate : all.of(task, task.agents.back()))
        known = known || candidate.name() == name || candidate.name().starts_with(name + "/") ||
                candidate.name().ends_with("/" + name);
    if (!known) return std::fprintf(stderr, "no aligner or fuser is called %s\n", name.c_str()), 2;
  }
  Run run(flags, **agent, mergers);
  const kvmeld::Status status = run.all();
  if (!status) return std::fprintf(stderr, "\n%s\n", status.message().c_str()), 1;
  run.print();
  std::printf("rows: %s\n", flags.output.c_str());
  return 0;
}
