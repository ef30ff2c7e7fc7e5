// Questions over passages that are dealt to several agents, answered from merged caches: every
// training-free way to merge in one table.
//
//   bash examples/run.sh quality                                   made data
//   bash examples/run.sh quality --data FILE --agents 2,4,8        public questions
//
// A data file has one JSON object a line, `{id, source, question, answers, passages: [{title,
// text}]}`; without one, questions are made: of one hop, two hops, comparisons, and such that no
// passage answers. Passages are shuffled by the seed and dealt to the agents in turn; the merged
// order is the agents'. Writes build/merge_quality.json after every question and goes on from the
// rows that are there.
//
// Measures, for each question and method: `kl`, the mean over the gold answer's tokens
// (teacher-forced) of KL(full text || method) of next-token distributions; `nll`, the gold answer's
// negative log-likelihood a token; `f1` and `em` of a greedy answer by SQuAD's normalisation;
// `recall`, the mean KL over the first 24 tokens of a passage that the model is asked to repeat;
// tokens decoded by all agents before the question (`computed_before`) and by the answering agent
// once it is known (`computed_after`, the question's own included); `first_token_ms`, which counts
// merge, import, recomputed tokens and the question; bytes of K/V moved, or of text.
//
// Methods: `full_text` reads all passages in one sequence; `one_agent` is the first agent alone and
// `none` the question alone; `text_summary` has the others write summaries; `naive` puts caches one
// behind the other without rotating their keys and `concat` with; `bos_4` (EPIC's LegoLink-0, arXiv
// 2410.15332), `lead_in`, `similar_text` (after FusionRAG, 2601.12904) and `neighbour` encode
// passages behind text that is dropped; in `refresh_N` every agent reads its passages again behind
// the merged caches of all others, N rounds (akin to Graph-KV's message passing, 2506.07334), or in
// `refresh_1_top_N` of the N others that share most tokens with it;
// `epic_16` and `seam_25` compute the beginning of each later fragment again; `cacheblend_15` the
// 15 % of tokens that are furthest from full text (their choice, by a full prefill that is not
// counted, is the upper bound of CacheBlend's, 2405.16444), `query_15` the 15 % that the question
// attends to most (InfoFlow, 2603.05353); `seam_offset` adds the mean change of `seam_25` to the
// other tokens (AgentKVShift, 2607.21604); `ape` sharpens attention to passages by a temperature of
// .9 (APE, 2502.05431); `pced` merges no caches but joins every agent's logits (PCED, 2601.08670).

#include "support/engine.hpp"
#include "support/quality_caches.hpp"
#include "support/quality_data.hpp"
#include "support/quality_fill.hpp"
#include "support/quality_made.hpp"
#include "support/quality_measure.hpp"
#include "support/quality_method.hpp"
#include "support/quality_results.hpp"
#include "support/study.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace quality;

struct Flags {
  std::string model, data;
  std::string output = "build/merge_quality.json";
  std::vector<std::size_t> agents{4};
  std::size_t questions = 8;
  std::vector<std::string> methods{"full_text", "one_agent", "concat",
                                   "lead_in",   "neighbour", "refresh_1"};
  std::vector<std::uint64_t> seeds{1};
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  bool table = false;
};

constexpr std::size_t greedy_tokens = 24;
constexpr llama_seq_id first_free = 16;  // 0 the cache, 1 the spare, then those that are joined
constexpr std::uint64_t made_seed = 1;

class Run {
 public:
  Run(const Flags& flags, Engine& engine, QueryTap& tap, const example::Geometries& geometries,
      Results& results)
      : flags_(flags),
        engine_(engine),
        tap_(tap),
        geometries_(geometries),
        results_(results),
        exec_(static_cast<std::size_t>(flags.threads)) {}

  kvmeld::Status all(const std::vector<Item>& items, const std::vector<const Method*>& chosen) {
    const std::size_t count = std::min(flags_.questions, items.size());
    left_ = flags_.agents.size() * flags_.seeds.size() * count;
    for (const std::size_t agents : flags_.agents)
      for (const std::uint64_t seed : flags_.seeds)
        for (std::size_t i = 0; i < count; ++i, --left_)
          if (kvmeld::Status status = one(items, i, agents, seed, chosen); !status) return status;
    std::fprintf(stderr, "\r%-100s\r", "");
    return {};
  }

 private:
  kvmeld::Status one(const std::vector<Item>& items, std::size_t index, std::size_t agents,
                     std::uint64_t seed, const std::vector<const Method*>& chosen) {
    Row row;
    row.id = items[index].id;
    row.agents = agents;
    row.seed = seed;
    const auto missing = [&](const Method* method) {
      row.method = method->name;
      return !results_.has(row);
    };
    if (std::none_of(chosen.begin(), chosen.end(), missing)) return {};
    const Dealt dealt = make_dealt(engine_, items[index], items, agents, seed);
    Caches caches(engine_, geometries_, exec_, dealt.prefix, dealt.notes);
    Reference reference;
    for (const Method* method : chosen) {
      const bool wanted = missing(method);
      if (!wanted && method->source != Method::Source::full_text) continue;
      progress(row, *method);
      if (kvmeld::Status status = answer(dealt, *method, caches, reference, row); !status)
        return status;
      if (wanted) results_.add(row);
    }
    return results_.save() ? kvmeld::Status()
                           : kvmeld::Status(kvmeld::ErrorCode::invalid_argument,
                                            "cannot write " + flags_.output);
  }

  /// Fills the engine as the method says, asks, and notes what came of it in `row`.
  kvmeld::Status answer(const Dealt& dealt, const Method& method, Caches& caches,
                        Reference& reference, Row& row) {
    row.method = method.name;
    Filled filled;
    const auto inspect = [&](const Fragments& fragments) {
      return permute(caches, fragments, method);
    };
    if (kvmeld::Status status = fill(engine_, tap_, dealt, method, caches, inspect, filled);
        !status)
      return status;
    const auto figures = measure(engine_, filled.held, filled.join, first_free, dealt.asked,
                                 reference, greedy_tokens);
    if (!figures) return refused();
    row.kl = figures->kl;
    row.nll = figures->nll;
    row.recall = figures->recall;
    row.f1 = figures->score.f1;
    row.em = figures->score.em;
    row.answer = figures->text;
    row.computed_before = filled.before.tokens;
    row.computed_after = filled.cost.prefilled_tokens + dealt.asked.question.size();
    row.merge_ms = filled.cost.merge_ms;
    row.import_ms = filled.cost.import_ms;
    row.recompute_ms = filled.cost.recompute_ms;
    row.prefill_ms = filled.cost.prefill_ms;
    row.question_ms = figures->question_ms;
    row.first_token_ms =
        row.merge_ms + row.import_ms + row.recompute_ms + row.prefill_ms + row.question_ms;
    row.bytes = filled.cost.bytes;
    return {};
  }

  /// Inserts a method's fragments in three further orders; all must render the same bytes.
  kvmeld::Status permute(Caches& caches, const Fragments& fragments, const Method& method) {
    std::vector<std::size_t> order = caches.everyone();
    const auto first = caches.digest_of(fragments, method.rotate, order);
    if (!first) return first.error();
    std::reverse(order.begin(), order.end());
    bool equal = true;
    example::Draw draw(order.size());
    for (int again = 0; again < 3; ++again, draw.shuffle(order)) {
      const auto digest = caches.digest_of(fragments, method.rotate, order);
      if (!digest) return digest.error();
      equal = equal && *digest == *first;
    }
    results_.add_permutations(4, equal);
    return {};
  }

  void progress(const Row& row, const Method& method) {
    std::fprintf(stderr, "\r%zu agents, seed %llu, %zu questions left, %5.1f min done: %-20s ",
                 row.agents, static_cast<unsigned long long>(row.seed), left_,
                 watch_.milliseconds() / 60000, std::string(method.name).c_str());
  }

  const Flags& flags_;
  Engine& engine_;
  QueryTap& tap_;
  const example::Geometries& geometries_;
  Results& results_;
  kvmeld::exec::Threads exec_;
  example::Stopwatch watch_;
  std::size_t left_ = 0;
};

void add_flags(CLI::App& app, Flags& flags) {
  study::add_common(app, flags);
  app.add_option("--data", flags.data, "a JSONL file of questions over passages; none: made ones")
      ->check(CLI::ExistingFile);
  app.add_option("--agents", flags.agents, "numbers of agents, e.g. 2,4,8")
      ->delimiter(',')
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--questions", flags.questions, "of the data, from its beginning")
      ->capture_default_str();
  app.add_option("--methods", flags.methods, "names as in the table, or all")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--seeds", flags.seeds, "by which passages are dealt")
      ->delimiter(',')
      ->capture_default_str();
  app.add_flag("--table", flags.table,
               "print and save the table of the rows that are there, and run nothing");
}

/// The methods named, full text first; empty, with a line on stderr, where a name is unknown.
std::vector<const Method*> choose(const std::vector<std::string>& names) {
  std::vector<const Method*> chosen{find_method("full_text")};
  for (const std::string& text : names)
    if (text != "all" && find_method(text) == nullptr)
      return std::fprintf(stderr, "no method is called %s\n", text.c_str()),
             std::vector<const Method*>{};
  for (const Method& method : methods) {
    const bool named = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return name == method.name || name == "all";
    });
    if (named && &method != chosen[0]) chosen.push_back(&method);
  }
  return chosen;
}

/// Tokens of the longest prompt of all passages and a question.
std::size_t longest(const Engine& engine, const std::vector<Item>& items) {
  std::size_t most = 0;
  for (const Item& item : items) {
    std::size_t count = 256;
    for (const Passage& passage : item.passages) count += engine.tokens(line_of(passage)).size();
    most = std::max(most, count);
  }
  return most;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Deals passages to agents, merges their caches, and answers questions from them.");
  add_flags(app, flags);
  CLI11_PARSE(app, argc, argv);

  const std::vector<const Method*> chosen = choose(flags.methods);
  if (chosen.empty()) return 2;
  std::string why;
  const auto items =
      flags.data.empty() ? make_items(flags.questions, made_seed) : load(flags.data, why);
  if (!items) return std::fprintf(stderr, "%s\n", why.c_str()), 2;
  Results results(flags.output, study::model_name(flags.model),
                  flags.data.empty() ? "made" : study::model_name(flags.data));
  if (flags.table) return results.print(), results.save() ? 0 : 1;

  QueryTap tap;
  example::Engine::Options options{.model = flags.model,
                                   .threads = flags.threads,
                                   .observe = &QueryTap::observe,
                                   .observer = &tap};
  {
    const std::unique_ptr<Engine> engine = Engine::open({.model = flags.model, .cells = 256});
    if (!engine) return std::fprintf(stderr, "llama.cpp cannot open %s\n", flags.model.c_str()), 1;
    options.cells = static_cast<std::uint32_t>(2048 + 3 * longest(*engine, *items));
  }
  const std::unique_ptr<Engine> engine = Engine::open(options);
  if (!engine) return std::fprintf(stderr, "llama.cpp cannot open %s\n", flags.model.c_str()), 1;
  const auto geometries = example::make_geometries(*engine, flags.model);
  if (!geometries) return std::fprintf(stderr, "%s\n", geometries.error().message().c_str()), 1;
  const kvmeld::Status status = Run(flags, *engine, tap, *geometries, results).all(*items, chosen);
  if (!status) return std::fprintf(stderr, "\n%s\n", status.message().c_str()), 1;
  results.print();
  std::printf("rows: %s\n", flags.output.c_str());
  return results.permuted_renders() > 0 && !results.digests_equal() ? 1 : 0;
}
