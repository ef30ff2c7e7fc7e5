// A planner, a solver, a checker and a writer work on the same question about the same document,
// and quote each other: each one's prompt is a template whose slots are filled, in turn, with the
// document, the question and what the others said.
//
// Compares reading every prompt anew with placing what is known of its pieces: rotated to their
// places alone, or corrected, the pieces and the template's text behind them, by what the same
// slots did to other pieces before. The anchors are made on the way, from nothing. Writes
// build/template_chain.json. docs/quality.md has the table.

#include "support/anchored.hpp"
#include "support/anchored_texts.hpp"
#include "support/asking.hpp"
#include "support/lead_in.hpp"
#include "support/prompt.hpp"
#include "support/question_prompt.hpp"
#include "support/series.hpp"
#include "support/study.hpp"

#include <kvmeld/anchors/prompt.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace example;
using Json = nlohmann::ordered_json;
using kvmeld::anchors::PromptRun;

struct Flags {
  std::string model;
  std::string output = "build/template_chain.json";
  std::vector<std::string> texts{"structured", "free"};
  std::vector<std::string> loads{"light", "heavy"};
  std::size_t documents = 8;
  std::size_t questions = 2;
  std::size_t facts = 8;
  std::int32_t min_anchors = 4;
  std::size_t lead_in = 0;
  double temperature = 0;
  double gamma = 1;
  std::size_t budget_mib = 1024;
  std::uint64_t seed = 2;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
};

/// Values begin with the space that parts them from what precedes: " it" is one token, " " and "it"
/// are two that no prompt holds. The checker's template has a boundary that this tokenizer does not
/// keep, "." before a blank line, to show what becomes of it.
struct Role {
  const char* name;
  const char* text;
};
constexpr std::array<Role, 4> roles{{
    {"planner",
     "You plan. These are the notes:{document} The task:{question} Say first whom the thing "
     "belongs to."},
    {"solver",
     "You solve tasks. Notes:{document} The task:{question} The planner said:{planner} Say where "
     "that person keeps the thing."},
    {"checker",
     "You check the work of others. The planner said:{planner} The solver said:{solver}\n\nThey "
     "read these notes:{document} The "
     "task was:{question} See whether the notes say so."},
    {"writer",
     "You write the answer. To the last task you wrote:{writer} Now your colleagues "
     "say:{planner}{solver}{checker} The task "
     "is:{question} The notes:{document} Once more, the task:{question}"},
}};
constexpr const char* request_text = "Complete the statement as the notes say.";
constexpr const char* base_text = "Notes:";
constexpr llama_seq_id first_branch = 16;

/// A document of facts, and what is known of each.
struct Notes {
  std::string text;
  std::vector<Fact> facts;
};

Notes make_notes(const Engine& engine, bool structured, std::uint64_t seed, std::size_t index,
                 std::size_t count) {
  Notes out;
  const std::vector<Fact> facts =
      make_facts(seed * 7919u + (structured ? 51000 : 97000) + index, detail::places.size());
  Draw draw(seed * 131u + index * 29u + 7u);
  std::vector<std::string> sentences;
  if (!structured) sentences = draw.pick(detail::free_sentences, draw.below(6));
  for (const Fact& fact : facts) {
    if (out.facts.size() == count) break;
    const std::string text = sentence(fact, structured ? 0 : draw.below(fit_forms));
    if (structured && engine.tokens(text).size() != 12) continue;  // one length for all
    sentences.push_back(text);
    out.facts.push_back(fact);
  }
  if (!structured) draw.shuffle(sentences);
  for (const std::string& text : sentences) out.text += text;
  return out;
}

/// What a role is asked about a fact; `owner`: whom the planner named.
Ask ask_of(const Notes& notes, std::size_t fact, std::size_t role, const std::string& owner) {
  const Fact& asked = notes.facts[fact];
  const std::string thing = "the " + asked.colour + " " + asked.thing;
  Ask out{role == 0   ? "T" + thing.substr(1) + " belongs to"
          : role == 3 ? "T" + thing.substr(1) + " is in the"
                      : owner + " keeps " + thing + " in the",
          role == 0 ? asked.person : asked.place,
          {}};
  for (const Fact& other : notes.facts)
    out.candidates.push_back(role == 0 ? other.person : other.place);
  return out;
}

Json json_of(const Series& series) {
  return {{"mean", series.mean()}, {"deviation", series.deviation()}, {"n", series.values.size()}};
}

struct Row {
  std::string mode, load, text;
  std::size_t asked = 0, reused = 0;                    // slots
  std::size_t tokens = 0, read_tokens = 0, joined = 0;  // behind each prompt's first text
  std::size_t right = 0, total = 0;
  std::map<std::string, std::size_t> reasons;
  Series first_token, look_up, blend, import, read, question, kl, key, value;
  // Of what `blended` reused, in every mode: slots, texts behind them, and prompts all of whose
  // slots were.
  Series slot_key, slot_value, text_key, text_value, whole_first_token, whole_kl, whole_key,
      whole_value;

  [[nodiscard]] Json json() const {
    return {
        {"mode", mode},
        {"load", load},
        {"text", text},
        {"agents", roles.size()},
        {"reuse_rate", asked == 0 ? 0 : static_cast<double>(reused) / static_cast<double>(asked)},
        {"reasons", reasons},
        {"first_token_ms", first_token.median()},
        {"right", right},
        {"total", total},
        {"kl", kl.mean()},
        {"k_error", key.mean()},
        {"v_error", value.mean()},
        {"prompts", total},
        {"slots", asked},
        {"prompt_tokens", tokens},
        {"read_tokens", read_tokens},
        {"joined_tokens", joined},
        {"first_token_parts_ms",
         {{"look_up_and_decision", look_up.median()},
          {"plan_and_blend", blend.median()},
          {"import", import.median()},
          {"read", read.median()},
          {"question", question.median()}}},
        {"spread", {{"kl", json_of(kl)}, {"k_error", json_of(key)}, {"v_error", json_of(value)}}},
        {"blended_slots", {{"k_error", json_of(slot_key)}, {"v_error", json_of(slot_value)}}},
        {"blended_following_texts",
         {{"k_error", json_of(text_key)}, {"v_error", json_of(text_value)}}},
        {"blended_prompts",
         {{"prompts", whole_kl.values.size()},
          {"first_token_ms", whole_first_token.median()},
          {"kl", json_of(whole_kl)},
          {"k_error", json_of(whole_key)},
          {"v_error", json_of(whole_value)}}}};
  }
};

enum Mode : std::size_t { full_prefill, rotated_reuse, blended };
constexpr std::array<const char*, 3> mode_names{"full_prefill", "rotated_reuse", "blended"};

kvmeld::Status refused() {
  return {kvmeld::ErrorCode::engine_failure,
          "the engine refused a prompt; is the context too small?"};
}

/// Tokens [first, first + tokens) of a fragment.
kvmeld::Result<kvmeld::Fragment> cut(const kvmeld::Fragment& from, std::int64_t first,
                                     std::int64_t tokens) {
  const kvmeld::FragmentView view(from);
  const auto last = static_cast<std::size_t>(first + tokens);
  return kvmeld::seal(view.ref().first(first + tokens),
                      {.tokens = from.tokens().first(last),
                       .positions = std::span(from.payloads()[0].positions).first(last),
                       .drop_first = first});
}

class Chain {
 public:
  Chain(const Flags& flags, Engine& engine, Anchored& anchored)
      : flags_(flags), engine_(engine), anchored_(anchored) {}

  kvmeld::Status all() {
    const auto tokenizer =
        [this](std::string_view text) -> kvmeld::Result<std::vector<kvmeld::TokenId>> {
      const Tokens ids = engine_.tokens(text);
      return std::vector<kvmeld::TokenId>(ids.begin(), ids.end());
    };
    // A prompt stands where the model's chat template wants the system's words; what the template
    // begins with is read once, and kept.
    frame_ = make_frame(engine_, "", request_text);
    head_ = engine_.tokens(frame_.prefix, true, true);
    Tokens base = head_;
    append(base, engine_.tokens(base_text));
    append(base, engine_.tokens(lead_in(flags_.lead_in)));
    if (auto added = anchored_.add_prefix(std::move(base)); !added) return added.error();
    space_ = anchored_.space();
    for (const Role& role : roles) {
      auto parsed = kvmeld::anchors::PromptTemplate::parse(role.text, tokenizer);
      if (!parsed) return parsed.error();
      Tokens prefix = head_;
      append(prefix, parsed->text_tokens()[0]);
      if (auto added = anchored_.add_prefix(std::move(prefix)); !added) return added.error();
      templates_.push_back(*std::move(parsed));
    }
    for (const std::string& load : flags_.loads)
      left_ += flags_.texts.size() * flags_.documents * (load == "heavy" ? flags_.questions : 1);
    for (const std::string& text : flags_.texts)
      for (const std::string& load : flags_.loads)
        if (kvmeld::Status status = stream(text, load, tokenizer); !status) return status;
    std::fprintf(stderr, "\r%-100s\r", "");
    return {};
  }
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  [[nodiscard]] const Json& figures() const { return figures_; }

 private:
  struct Base {
    kvmeld::anchors::Anchor anchor;
    double ms = 0;
  };

  /// Light: every question has a document of its own. Heavy: each document is asked about several
  /// times, one round after the other.
  template <class T>
  kvmeld::Status stream(const std::string& text, const std::string& load, const T& tokenizer) {
    const bool heavy = load == "heavy";
    const std::size_t budget = flags_.budget_mib << 20;
    const kvmeld::anchors::AnchorPreset preset =
        heavy ? kvmeld::anchors::presets::heavy(budget) : kvmeld::anchors::presets::light(budget);
    rule_ = preset.rule;
    rule_.gamma = flags_.gamma;
    rule_.min_anchors = flags_.min_anchors;
    pool_ = std::make_unique<Pool>(space_, preset.capacity, kvmeld::anchors::EmbeddingHash{},
                                   preset.eviction);
    bases_.clear();
    std::array<Row, 3> rows;
    for (std::size_t m = 0; m < rows.size(); ++m) {
      rows[m].mode = mode_names[m];
      rows[m].load = load;
      rows[m].text = text;
    }
    std::vector<Notes> notes;
    for (std::size_t d = 0; d < flags_.documents; ++d)
      notes.push_back(make_notes(engine_, text == "structured", flags_.seed, d, flags_.facts));
    if (kvmeld::Status status = choose_temperature(notes); !status) return status;
    std::vector<kvmeld::anchors::PlaceholderHistory> said;  // by each role, over all chains
    // nothing before the first task
    for (const Role& role : roles) said.push_back({role.name, {{}}});
    for (std::size_t round = 0; round < (heavy ? flags_.questions : 1); ++round)
      for (std::size_t d = 0; d < notes.size(); ++d) {
        if (kvmeld::Status status =
                chain(notes[d], (d + round) % notes[d].facts.size(), said, rows, tokenizer);
            !status)
          return status;
        --left_;
        ++done_;
        const double minutes = watch_.milliseconds() / 6e4;
        std::fprintf(stderr,
                     "\r%s notes, %s load: task %zu of %zu, %5.1f min done, about %5.1f min left ",
                     text.c_str(), load.c_str(), round * notes.size() + d + 1,
                     notes.size() * (heavy ? flags_.questions : 1), minutes,
                     minutes / static_cast<double>(done_) * static_cast<double>(left_));
      }
    double base_ms = 0;
    for (const auto& [tokens, base] : bases_) base_ms += base.ms;
    figures_.push_back({{"text", text},
                        {"load", load},
                        {"temperature", rule_.temperature},
                        {"anchors", pool_->size()},
                        {"pool_bytes", pool_->bytes()},
                        {"bases", bases_.size()},
                        {"bases_ms_a_prompt", base_ms / static_cast<double>(rows[0].total)}});
    for (Row& row : rows) rows_.push_back(std::move(row));
    return save();
  }
  /// After each stream, so that a run that is stopped leaves those that are done.
  [[nodiscard]] kvmeld::Status save() const {
    Json all{{"model", study::model_name(flags_.model)},
             {"seed", flags_.seed},
             {"gamma", flags_.gamma},
             {"min_anchors", flags_.min_anchors}};
    all["rows"] = Json::array();
    for (const Row& row : rows_) all["rows"].push_back(row.json());
    all["streams"] = figures_;
    if (!study::write_results(flags_.output, all))
      return {kvmeld::ErrorCode::invalid_argument, "cannot write " + flags_.output};
    return {};
  }

  /// As docs/anchors.md advises: what parts unlike documents, and of that a quarter.
  kvmeld::Status choose_temperature(const std::vector<Notes>& notes) {
    rule_.temperature = flags_.temperature;
    if (flags_.temperature > 0) return {};
    Series apart;
    std::vector<const Base*> bases;
    for (const Notes& one : notes) {
      auto base = base_of(engine_.tokens(one.text));
      if (!base) return base.error();
      for (const Base* other : bases)
        apart.add(kvmeld::anchors::l2_distance((*base)->anchor.vector, other->anchor.vector));
      bases.push_back(*base);
    }
    rule_.temperature = apart.mean() / 4;
    return {};
  }

  template <class T>
  kvmeld::Status chain(const Notes& notes, std::size_t fact,
                       std::vector<kvmeld::anchors::PlaceholderHistory>& said,
                       std::array<Row, 3>& rows, const T& tokenizer) {
    const Fact& asked = notes.facts[fact];
    const std::vector<kvmeld::anchors::PlaceholderHistory> given{
        {"document", {{notes.text, {}}}},
        {"question", {{" Where is the " + asked.colour + " " + asked.thing + "?", {}}}}};
    std::string owner;
    for (std::size_t role = 0; role < roles.size(); ++role) {
      std::vector<kvmeld::anchors::PlaceholderHistory> values;
      for (const auto* histories : {&given, &std::as_const(said)})
        for (const kvmeld::anchors::PlaceholderHistory& one : *histories) {
          const auto slots = templates_[role].slots();
          if (std::any_of(
                  slots.begin(), slots.end(),
                  [&](const kvmeld::anchors::PromptPlaceholder& s) { return s.name == one.name; }))
            values.push_back(one);
        }
      const auto prompt = kvmeld::anchors::fill_placeholders(
          templates_[role], values, tokenizer,
          {.first_position = static_cast<std::int64_t>(head_.size()),
           .trained_context = llama_model_n_ctx_train(engine_.model()),
           .before = {.prefix = {}, .lead_in = kvmeld::lead_in_digest(head_)},
           .agent = roles[role].name});
      if (!prompt) return prompt.error();
      const Ask ask = ask_of(notes, fact, role, owner);
      Answer answer;
      if (kvmeld::Status status = one_prompt(role, *prompt, ask, rows, answer); !status)
        return status;
      if (role == 0) owner = ask.candidates[answer.named.value_or(answer.ranked)];
      said[role].turns.push_back({" " + ask.start + answer.text + ".", {}});
    }
    return {};
  }

  /// Puts one prompt into the engine in every mode, and asks. `answer` is what full prefill gave.
  kvmeld::Status one_prompt(std::size_t role, const kvmeld::anchors::FilledPrompt& prompt,
                            const Ask& asked, std::array<Row, 3>& rows, Answer& answer) {
    std::vector<const PromptRun*> runs;  // behind text 0, which is kept
    for (const PromptRun& run : prompt.runs)
      if (run.source != PromptRun::Source::text || run.index > 0) runs.push_back(&run);
    std::vector<const Base*> bases;
    for (const PromptRun* run : runs) {
      bases.push_back(nullptr);
      if (run->source == PromptRun::Source::joined ||
          (run->source == PromptRun::Source::text && run->slot < 0))
        continue;
      auto base = base_of(tokens_of(prompt, *run));
      if (!base) return base.error();
      bases.back() = *base;
    }

    anchored_.start(role + 1);
    const llama_pos behind = anchored_.length();
    const auto head =
        static_cast<std::ptrdiff_t>(behind) - static_cast<std::ptrdiff_t>(head_.size());
    Stopwatch watch;
    if (kvmeld::Status status =
            anchored_.read(Tokens(prompt.tokens.begin() + head, prompt.tokens.end()));
        !status)
      return status;
    rows[full_prefill].read.add(watch.milliseconds());
    std::vector<Prompt> question{make_prompt(engine_, frame_, asked)};
    double question_ms = 0;
    const std::vector<Answer> reference =
        ask(engine_, anchored_.length(), question, first_branch, &question_ms);
    if (reference.empty()) return refused();
    answer = reference[0];
    rows[full_prefill].first_token.add(rows[full_prefill].read.values.back() + question_ms);
    rows[full_prefill].question.add(question_ms);
    rows[full_prefill].key.add(0);
    rows[full_prefill].value.add(0);
    rows[full_prefill].read_tokens += prompt.tokens.size() - static_cast<std::size_t>(head);
    score(rows[full_prefill], prompt, head, asked, reference[0], reference[0]);
    const auto real = anchored_.taken(behind);
    if (!real) return real.error();

    std::vector<kvmeld::anchors::AnchorLookup> found(runs.size());
    // by `blended`, which comes first, so that the other counts the same runs
    std::vector<bool> corrected(runs.size());
    for (const Mode mode : {blended, rotated_reuse}) {
      if (kvmeld::Status status = reuse(mode, rows[mode], role, prompt, runs, bases, found,
                                        corrected, question, asked, reference[0], *real);
          !status)
        return status;
    }
    const auto lacks = [&](std::size_t r) {
      return runs[r]->source == PromptRun::Source::slot && !corrected[r];
    };
    bool whole = true;
    for (std::size_t r = 0; r < runs.size(); ++r) whole = whole && !lacks(r);
    for (Row& row : rows) {
      if (!whole) break;
      row.whole_first_token.add(row.first_token.values.back());
      row.whole_kl.add(row.kl.values.back());
      row.whole_key.add(row.key.values.back());
      row.whole_value.add(row.value.values.back());
    }
    // Off the critical path: what the decisions asked for is measured in the prompt that was read
    // in full.
    for (std::size_t r = 0; r < runs.size(); ++r) {
      if (runs[r]->source != PromptRun::Source::slot || found[r].decision.reuses()) continue;
      if (kvmeld::Status status = learn(*real, behind, runs, bases, r); !status) return status;
    }
    return {};
  }

  kvmeld::Status reuse(Mode mode, Row& row, std::size_t role,
                       const kvmeld::anchors::FilledPrompt& prompt,
                       const std::vector<const PromptRun*>& runs,
                       const std::vector<const Base*>& bases,
                       std::vector<kvmeld::anchors::AnchorLookup>& found,
                       std::vector<bool>& corrected, const std::vector<Prompt>& question,
                       const Ask& asked, const Answer& reference, const kvmeld::Fragment& real) {
    anchored_.start(role + 1);
    const llama_pos behind = anchored_.length();
    double look_up_ms = 0, read_ms = 0, question_ms = 0;
    BlendCost cost;
    std::vector<kvmeld::anchors::ReusePart> parts;
    const auto flush = [&]() -> kvmeld::Status {
      if (parts.empty()) return {};
      const kvmeld::Status status = anchored_.place(parts, &cost);
      parts.clear();
      return status;
    };
    for (std::size_t r = 0; r < runs.size(); ++r) {
      const PromptRun& run = *runs[r];
      const bool is_slot = run.source == PromptRun::Source::slot;
      bool placed = bases[r] != nullptr;
      if (placed && mode == rotated_reuse) {
        parts.push_back(rotated_part(bases[r]->anchor.base, run.position));
        if (is_slot) ++row.reused;
      } else if (placed && is_slot) {
        const Stopwatch watch;
        found[r] = look_up(bases[r]->anchor, run);
        look_up_ms += watch.milliseconds();
        ++row.reasons[std::string(to_string(found[r].decision.reason))];
        placed = found[r].decision.reuses();
        if (placed) {
          parts.push_back(blended_part(bases[r]->anchor.base, run.position, found[r], run.context));
          ++row.reused;
        }
      } else if (placed) {  // the anchors that were found for the slot before it know what their
                            // like did to this text
        const std::size_t of = slot_before(runs, r);
        placed = of < r && found[of].decision.reuses();
        for (std::size_t i = 0; placed && i < found[of].decision.chosen.size(); ++i) {
          const kvmeld::Fragment& delta =
              found[of].anchors[found[of].decision.chosen[i]]->find(run.context)->following;
          placed = delta.valid() && delta.token_count() == run.tokens;
        }
        if (placed)
          parts.push_back(
              blended_part(bases[r]->anchor.base, run.position, found[of], run.context, true));
      }
      if (is_slot) ++row.asked;
      if (mode == blended) corrected[r] = placed;
      if (placed) continue;
      if (kvmeld::Status status = flush(); !status) return status;
      const Stopwatch watch;
      if (kvmeld::Status status = anchored_.read(tokens_of(prompt, run)); !status) return status;
      read_ms += watch.milliseconds();
      row.read_tokens += static_cast<std::size_t>(run.tokens);
    }
    if (kvmeld::Status status = flush(); !status) return status;
    const std::vector<Answer> answers =
        ask(engine_, anchored_.length(), question, first_branch, &question_ms);
    if (answers.empty()) return refused();
    row.look_up.add(look_up_ms);
    row.blend.add(cost.plan + cost.blend);
    row.import.add(cost.import);
    row.read.add(read_ms);
    row.question.add(question_ms);
    row.first_token.add(look_up_ms + cost.total() + read_ms + question_ms);
    score(row, prompt,
          static_cast<std::ptrdiff_t>(behind) - static_cast<std::ptrdiff_t>(head_.size()), asked,
          answers[0], reference);
    const auto like = anchored_.taken(behind);
    if (!like) return like.error();
    const RelativeError all = relative_error(real, *like);
    row.key.add(all.key);
    row.value.add(all.value);
    for (std::size_t r = 0; r < runs.size(); ++r) {
      if (!corrected[r]) continue;
      const PromptRun* const run = runs[r];
      const auto x = cut(real, run->position - behind, run->tokens),
                 y = cut(*like, run->position - behind, run->tokens);
      if (!x) return x.error();
      if (!y) return y.error();
      const RelativeError one = relative_error(*x, *y);
      const bool is_slot = run->source == PromptRun::Source::slot;
      (is_slot ? row.slot_key : row.text_key).add(one.key);
      (is_slot ? row.slot_value : row.text_value).add(one.value);
    }
    return {};
  }

  void score(Row& row, const kvmeld::anchors::FilledPrompt& prompt, std::ptrdiff_t head,
             const Ask& asked, const Answer& answer, const Answer& reference) const {
    row.kl.add(divergence(reference.logits, answer.logits));
    ++row.total;
    row.right += answer.named && asked.candidates[*answer.named] == asked.answer ? 1U : 0U;
    row.tokens += prompt.tokens.size() - static_cast<std::size_t>(head);
    for (const PromptRun& run : prompt.runs)
      row.joined +=
          run.source == PromptRun::Source::joined ? static_cast<std::size_t>(run.tokens) : 0;
  }

  /// The slot that a text directly follows, or the text itself: joined tokens may lie between.
  static std::size_t slot_before(const std::vector<const PromptRun*>& runs, std::size_t text) {
    for (std::size_t r = text; r-- > 0;)
      if (runs[r]->source == PromptRun::Source::slot)
        return runs[r]->index == runs[text]->slot ? r : text;
    return text;
  }

  kvmeld::Status learn(const kvmeld::Fragment& real, llama_pos behind,
                       const std::vector<const PromptRun*>& runs,
                       const std::vector<const Base*>& bases, std::size_t r) {
    const auto measured = [&](std::size_t of) -> kvmeld::Result<kvmeld::Fragment> {
      const auto in_context = cut(real, runs[of]->position - behind, runs[of]->tokens);
      return in_context ? kvmeld::anchors::measure_offset(*in_context, bases[of]->anchor.base)
                        : in_context;
    };
    auto segment = measured(r);
    if (!segment) return segment.error();
    kvmeld::anchors::ContextOffset offset{runs[r]->context, *std::move(segment), {}};
    for (std::size_t t = r + 1; t < runs.size() && t <= r + 2; ++t) {
      if (runs[t]->source != PromptRun::Source::text || runs[t]->slot != runs[r]->index) continue;
      auto following = measured(t);
      if (!following) return following.error();
      offset.following = *std::move(following);
    }
    kvmeld::anchors::Anchor anchor = bases[r]->anchor;
    if (auto added = kvmeld::anchors::add_offset(anchor, std::move(offset)); !added)
      return added.error();
    const auto done = pool_->commit(anchor);
    return done ? kvmeld::Status() : done.error();
  }

  kvmeld::anchors::AnchorLookup look_up(const kvmeld::anchors::Anchor& anchor,
                                        const PromptRun& run) const {
    kvmeld::anchors::AnchorQuery query{.space = &space_,
                                       .signature = {anchor.base.tokens(), anchor.vector},
                                       .vector = anchor.vector,
                                       .context = run.context,
                                       .request = {}};
    query.request.tokens = run.tokens;
    query.request.last_position = run.position + run.tokens - 1;
    query.request.trained_context = llama_model_n_ctx_train(engine_.model());
    return pool_->look_up(rule_, query);
  }

  /// A piece alone, read once and kept: whoever meets it later takes it from there.
  kvmeld::Result<const Base*> base_of(const Tokens& tokens) {
    const auto known = bases_.find(tokens);
    if (known != bases_.end()) return &known->second;
    const Stopwatch watch;
    auto anchor = anchored_.base_of(tokens);
    if (!anchor) return anchor.error();
    return &bases_.emplace(tokens, Base{*std::move(anchor), watch.milliseconds()}).first->second;
  }
  [[nodiscard]] Tokens tokens_of(const kvmeld::anchors::FilledPrompt& prompt,
                                 const PromptRun& run) const {
    const auto from =
        prompt.tokens.begin() + (run.position - static_cast<std::int64_t>(head_.size()));
    return Tokens(from, from + run.tokens);
  }

  const Flags& flags_;
  Engine& engine_;
  Anchored& anchored_;
  Frame frame_;
  Tokens head_;
  std::vector<kvmeld::anchors::PromptTemplate> templates_;
  kvmeld::anchors::AnchorSpace space_;
  kvmeld::anchors::ReuseRule rule_;
  std::unique_ptr<Pool> pool_;
  std::map<Tokens, Base> bases_;
  std::vector<Row> rows_;
  Json figures_ = Json::array();
  Stopwatch watch_;
  std::size_t left_ = 0, done_ = 0;
};

void print(const std::vector<Row>& rows, const Json& figures) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    if (i % mode_names.size() == 0) {
      std::printf(
          "\n%s notes, %s load: all %zu prompts, then the %zu whose slots `blended` had anchors "
          "for, slots and texts behind them\n",
          r.text.c_str(), r.load.c_str(), r.total, r.whole_kl.values.size());
      std::printf("%-14s %7s %9s %11s %8s   %-15s %-15s | %11s %8s   %-15s %-15s | %-13s %-13s\n",
                  "mode", "reused", "right", "first token", "KL", "K error", "V error",
                  "first token", "KL", "K error", "V error", "slots K V", "texts K V");
    }
    std::printf(
        "%-14s %6.0f%% %4zu/%-4zu %8.0f ms %8.4f   %.4f ± %.4f %.4f ± %.4f | %8.0f ms %8.4f   %.4f "
        "± %.4f %.4f ± %.4f | %.4f %.4f %.4f %.4f\n",
        r.mode.c_str(),
        r.asked == 0 ? 0.0 : 100 * static_cast<double>(r.reused) / static_cast<double>(r.asked),
        r.right, r.total, r.first_token.median(), r.kl.mean(), r.key.mean(), r.key.deviation(),
        r.value.mean(), r.value.deviation(), r.whole_first_token.median(), r.whole_kl.mean(),
        r.whole_key.mean(), r.whole_key.deviation(), r.whole_value.mean(),
        r.whole_value.deviation(), r.slot_key.mean(), r.slot_value.mean(), r.text_key.mean(),
        r.text_value.mean());
    for (const auto& [reason, count] : r.reasons) std::printf("  %s %zu", reason.c_str(), count);
    if (!r.reasons.empty())
      std::printf("  (the engine read %zu of %zu tokens, %zu of them across boundaries)\n",
                  r.read_tokens, r.tokens, r.joined);
  }
  std::printf("\n%s\n", figures.dump(1).c_str());
}

kvmeld::Status run(const Flags& flags) {
  const std::unique_ptr<Engine> engine = Engine::open(
      {.model = flags.model, .threads = flags.threads, .cells = 4096, .sequences = 64});
  if (!engine) return {kvmeld::ErrorCode::engine_failure, "llama.cpp cannot open " + flags.model};
  auto geometry =
      kvmeld::llama::geometry(engine->model(), engine->parameters(),
                              {.adapters = kvmeld::Adapters::none(), .gguf_path = flags.model});
  if (!geometry) return geometry.error();
  Anchored anchored(*engine, std::make_shared<const kvmeld::Geometry>(*std::move(geometry)),
                    flags.threads);
  Chain chain(flags, *engine, anchored);
  if (kvmeld::Status status = chain.all(); !status) return status;
  print(chain.rows(), chain.figures());
  std::printf("rows: %s\n", flags.output.c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Agents whose prompts quote each other: read anew, or placed slot by slot from what is known "
      "of the pieces.");
  study::add_common(app, flags);
  app.add_option("--texts", flags.texts, "structured, free")
      ->delimiter(',')
      ->check(CLI::IsMember({"structured", "free"}))
      ->capture_default_str();
  app.add_option("--loads", flags.loads,
                 "light (a document for each task), heavy (several tasks about each)")
      ->delimiter(',')
      ->check(CLI::IsMember({"light", "heavy"}))
      ->capture_default_str();
  app.add_option("--documents", flags.documents, "in each stream of tasks")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--questions", flags.questions, "about each document, under heavy load")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--facts", flags.facts, "in a document")
      ->check(CLI::Range(2, 16))
      ->capture_default_str();
  app.add_option("--min-anchors", flags.min_anchors, "before a slot is reused")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--lead-in", flags.lead_in, "neutral sentences before the bases of all pieces")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
  app.add_option("--temperature", flags.temperature,
                 "of the weights; 0: a quarter of the mean distance between documents")
      ->capture_default_str();
  app.add_option("--gamma", flags.gamma,
                 "a new anchor where H(w) > gamma log |A|; 1: never for that")
      ->capture_default_str();
  app.add_option("--budget", flags.budget_mib, "MiB of K/V that a pool may hold")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const kvmeld::Status status = run(flags);
  if (!status)
    return std::fprintf(stderr, "\n%s: %s\n", std::string(kvmeld::to_string(status.code())).c_str(),
                        status.message().c_str()),
           1;
  return 0;
}
