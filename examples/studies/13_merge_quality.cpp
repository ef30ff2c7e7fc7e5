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
// the merged caches of all others, N rounds (akin to Graph-KV's message passing, 2506.07334);
// `epic_16` and `seam_25` compute the beginning of each later fragment again.

#include "support/engine.hpp"
#include "support/prompt.hpp"
#include "support/quality_caches.hpp"
#include "support/quality_data.hpp"
#include "support/quality_leads.hpp"
#include "support/quality_made.hpp"
#include "support/quality_measure.hpp"
#include "support/quality_method.hpp"
#include "support/quality_policies.hpp"
#include "support/quality_results.hpp"
#include "support/splice.hpp"
#include "support/study.hpp"
#include "support/summaries.hpp"

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
  std::vector<std::string> methods{"full_text", "one_agent", "none",      "concat",
                                   "lead_in",   "neighbour", "refresh_1", "refresh_2"};
  std::vector<std::uint64_t> seeds{1};
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  bool table = false;
};

constexpr const char* system_text =
    "Answer the question from the passages. Answer with a few words.\n\nPassages:\n";
constexpr const char* summary_text =
    "Summarise these passages in a few short sentences for a colleague who has not read them.";
constexpr double summary_share = 0.5;
constexpr std::size_t recall_tokens = 24, greedy_tokens = 24;
constexpr llama_seq_id first_free = 16;  // 0 the cache, 1 the spare, up to 8 agents
constexpr std::uint64_t made_seed = 1;

kvmeld::Status refused() {
  return {kvmeld::ErrorCode::engine_failure, "the engine refused a prompt; is it too long?"};
}

/// What a method left for the question to be put to.
struct Filled {
  std::vector<Held> held;
  Join join;
  Before before;
  Cost cost;  ///< after the question is known
};

/// One question dealt to some agents.
struct Dealt {
  const Item& item;
  const std::vector<Item>& items;
  std::vector<std::vector<std::size_t>> shares;  // (agent, passage)
  Tokens prefix;
  std::vector<Tokens> notes;  // (agent, token)
  Asked asked;
};

Dealt make_dealt(const Engine& engine, const Item& item, const std::vector<Item>& items,
                 std::size_t agents, std::uint64_t seed) {
  Dealt out{item, items, deal(item, agents, seed), {}, {}, {}};
  const example::Frame frame = example::make_frame(engine, system_text, item.question);
  out.prefix = engine.tokens(frame.prefix, true, true);
  for (const auto& share : out.shares) {
    Tokens notes;
    for (const std::size_t p : share)
      example::append(notes, engine.tokens(line_of(item.passages[p])));
    out.notes.push_back(std::move(notes));
  }
  // of the passages, any may be asked for
  example::Draw draw(seed * 31 + agents + item.question.size());
  draw.next();
  const Passage& passage = item.passages[draw.below(item.passages.size())];
  const example::Frame recall =
      example::make_frame(engine, system_text, "Repeat the passage titled " + passage.title + ":");
  out.asked.question = engine.tokens(frame.middle, true);
  out.asked.gold = engine.tokens(item.answers[0]);
  out.asked.request = engine.tokens(recall.middle, true);
  out.asked.passage = engine.tokens(passage.text);
  if (out.asked.passage.size() > recall_tokens) out.asked.passage.resize(recall_tokens);
  out.asked.answers = item.answers;
  return out;
}

/// Ids that end a sentence or a line, among those of the notes.
std::vector<kvmeld::TokenId> sentence_ends(const Engine& engine, const std::vector<Tokens>& notes) {
  std::vector<kvmeld::TokenId> out;
  for (const Tokens& some : notes) out.insert(out.end(), some.begin(), some.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  std::erase_if(out, [&](kvmeld::TokenId id) {
    const std::string text = engine.text(id);
    return text.empty() || std::string(".!?\n").find(text.back()) == std::string::npos;
  });
  return out;
}

/// Sequence 0 holds text that an agent reads: what it knew before the question, and what it reads
/// after.
kvmeld::Status fill_text(Engine& engine, const Dealt& dealt, const Method& method, Filled& out) {
  using Source = Method::Source;
  Tokens known = dealt.prefix, after;
  if (method.source == Source::full_text) {
    after = std::move(known);
    known = {};
    for (const Tokens& notes : dealt.notes) example::append(after, notes);
  } else if (method.source != Source::none) {
    example::append(known, dealt.notes[0]);
  }
  out.before.tokens = known.size();
  if (method.source == Source::text_summary) {
    const Tokens request =
        engine.tokens(example::make_frame(engine, system_text, summary_text).middle, true);
    std::vector<Tokens> summaries;
    const std::size_t decoded = engine.decoded();
    if (!example::write_summaries(engine, dealt.prefix, dealt.notes, request, summary_share,
                                  summaries))
      return refused();
    out.before.tokens += engine.decoded() - decoded;
    after = example::joined(engine, summaries, out.cost.bytes);
  }
  engine.forget_all();
  if (!known.empty() && !engine.prefill(known, 0, 0)) return refused();
  const example::Stopwatch watch;
  if (!after.empty() && !engine.prefill(after, static_cast<llama_pos>(known.size()), 0))
    return refused();
  out.cost.prefill_ms = watch.milliseconds();
  out.cost.prefilled_tokens = after.size();
  out.cost.length = static_cast<llama_pos>(known.size() + after.size());
  out.held = {{0, out.cost.length}};
  return {};
}

kvmeld::Result<Fragments> fragments_of(Engine& engine, const Dealt& dealt, const Method& method,
                                       Caches& caches, Before& before) {
  if (method.rounds > 0) return caches.refreshed(method.rounds, before);
  if (method.lead == Method::Lead::none) return caches.plain(method.rotate, before);
  return caches.led(leads_of(engine, method.lead, dealt.items, dealt.item, dealt.shares), before);
}

/// Sequence 0 holds the agents' merged caches.
kvmeld::Status fill_merged(Engine& engine, const Dealt& dealt, const Method& method, Caches& caches,
                           const Fragments& fragments, Filled& out) {
  kvmeld::Status status;
  switch (method.seam) {
    case Method::Seam::none:
      status = caches.render(fragments, kvmeld::SeamNone{}, method.rotate, out.cost);
      break;
    case Method::Seam::first:
      status = caches.render(fragments, SeamFirst{static_cast<std::int64_t>(method.amount)},
                             method.rotate, out.cost);
      break;
    case Method::Seam::share: {
      const kvmeld::SeamShare seam{.share = method.amount,
                                   .boundary_tokens = sentence_ends(engine, dealt.notes)};
      status = caches.render(fragments, seam, method.rotate, out.cost);
      break;
    }
  }
  out.cost.bytes += out.before.bytes;
  out.held = {{0, out.cost.length}};
  return status;
}

class Run {
 public:
  Run(const Flags& flags, Engine& engine, const example::Geometries& geometries, Results& results)
      : flags_(flags),
        engine_(engine),
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
    if (method.source == Method::Source::merged) {
      auto fragments = fragments_of(engine_, dealt, method, caches, filled.before);
      if (!fragments) return fragments.error();
      if (kvmeld::Status status = permute(caches, *fragments, method); !status) return status;
      if (kvmeld::Status status = fill_merged(engine_, dealt, method, caches, *fragments, filled);
          !status)
        return status;
    } else if (kvmeld::Status status = fill_text(engine_, dealt, method, filled); !status) {
      return status;
    }
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

  example::Engine::Options options{.model = flags.model, .threads = flags.threads};
  {
    const std::unique_ptr<Engine> engine = Engine::open({.model = flags.model, .cells = 256});
    if (!engine) return std::fprintf(stderr, "llama.cpp cannot open %s\n", flags.model.c_str()), 1;
    options.cells = static_cast<std::uint32_t>(2048 + 3 * longest(*engine, *items));
  }
  const std::unique_ptr<Engine> engine = Engine::open(options);
  if (!engine) return std::fprintf(stderr, "llama.cpp cannot open %s\n", flags.model.c_str()), 1;
  const auto geometries = example::make_geometries(*engine, flags.model);
  if (!geometries) return std::fprintf(stderr, "%s\n", geometries.error().message().c_str()), 1;
  const kvmeld::Status status = Run(flags, *engine, *geometries, results).all(*items, chosen);
  if (!status) return std::fprintf(stderr, "\n%s\n", status.message().c_str()), 1;
  results.print();
  std::printf("rows: %s\n", flags.output.c_str());
  return results.permuted_renders() > 0 && !results.digests_equal() ? 1 : 0;
}
