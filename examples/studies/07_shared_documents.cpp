// Five agents with different instructions read the same documents: each reads them anew, or takes
// what is known of them and rotates it to its place, or corrects that by what its instructions did
// to documents seen before.
//
// Compares these ways on one model, over documents of one template and of free text, with few
// anchors and with more: first-token time and its parts, how much was reused and why not, answers,
// the next token's distribution and K/V against full prefill. Writes build/shared_documents.json.
// docs/quality.md has the table.

#include "support/anchored.hpp"
#include "support/anchored_texts.hpp"
#include "support/asking.hpp"
#include "support/lead_in.hpp"
#include "support/prompt.hpp"
#include "support/question_prompt.hpp"
#include "support/series.hpp"
#include "support/study.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using namespace example;
using Json = nlohmann::ordered_json;

struct Flags {
  std::string model;
  std::string output = "build/shared_documents.json";
  std::vector<std::size_t> anchors{5, 10};
  std::vector<std::string> texts{"structured", "free"};
  std::size_t documents = 3;
  std::size_t questions = 1;
  std::size_t long_tokens = 1000;
  std::size_t long_agents = 1;
  std::size_t long_questions = 42;
  std::size_t lead_in = 16;
  std::uint64_t seed = 2;
  double temperature = 0;
  double gamma = 1;
  std::size_t budget_mib = 1024;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
};

constexpr const char* request_text = "Complete the statement as the document says.";
constexpr llama_seq_id first_branch = 16;
constexpr std::size_t agents = agent_instructions.size();
/// The prefix for bases of documents that will stand behind others.
constexpr std::size_t led_bases = agents + 1;

/// What one request took until its first token, in milliseconds.
struct Times {
  double look_up = 0;  ///< Look-up and decision.
  double weigh = 0;    ///< Weights by token.
  BlendCost blend{};
  double prefill = 0;   ///< The documents, where the agent reads them itself.
  double question = 0;  ///< What follows the documents, up to the first token's logits.
  [[nodiscard]] double first_token() const {
    return look_up + weigh + blend.total() + prefill + question;
  }
};

/// Null for a figure that nothing was measured of.
Json json_of(const Series& series) {
  if (series.values.empty()) return nullptr;
  const auto [low, high] = std::minmax_element(series.values.begin(), series.values.end());
  return {{"mean", series.mean()},
          {"deviation", series.deviation()},
          {"min", *low},
          {"max", *high},
          {"n", series.values.size()}};
}

/// One row of the table.
struct Row {
  std::string mode, load, text;
  std::size_t documents = 0, anchors = 0, requests = 0, reused = 0, right = 0, total = 0;
  std::map<std::string, std::size_t> reasons;
  Series kl, key, value, following_key, following_value, first_token, look_up, weigh, plan, blend,
      import, prefill, question;

  void add(const Times& times) {
    first_token.add(times.first_token());
    look_up.add(times.look_up);
    weigh.add(times.weigh);
    plan.add(times.blend.plan);
    blend.add(times.blend.blend);
    import.add(times.blend.import);
    prefill.add(times.prefill);
    question.add(times.question);
  }
  [[nodiscard]] Json json() const {
    Json row{{"mode", mode},
             {"load", load},
             {"text", text},
             {"agents", agents},
             {"documents", documents},
             {"anchors", anchors},
             {"requests", requests},
             {"reuse_rate",
              requests == 0 ? 0 : static_cast<double>(reused) / static_cast<double>(requests)},
             {"reasons", reasons},
             {"first_token_ms", first_token.median()},
             {"right", right},
             {"total", total},
             {"kl", kl.mean()},
             {"k_error", key.mean()},
             {"v_error", value.mean()}};
    row["first_token_parts_ms"] = {{"look_up_and_decision", look_up.median()},
                                   {"weights_by_token", weigh.median()},
                                   {"plan", plan.median()},
                                   {"blend_and_rotation", blend.median()},
                                   {"import", import.median()},
                                   {"prefill", prefill.median()},
                                   {"question", question.median()}};
    row["spread"] = {{"kl", json_of(kl)}, {"k_error", json_of(key)}, {"v_error", json_of(value)}};
    if (!following_key.values.empty())
      row["following_text"] = {{"k_error", json_of(following_key)},
                               {"v_error", json_of(following_value)}};
    return row;
  }
};

struct Mode {
  const char* name;
  bool anchors, by_token, following;
};
constexpr std::array<Mode, 3> blends{{{"blended", true, false, false},
                                      {"blended_by_token", true, true, false},
                                      {"blended_and_following", true, false, true}}};

/// A document with what is known of it alone.
struct Known {
  Document document;
  kvmeld::anchors::Anchor anchor;  // without offsets
  kvmeld::anchors::AnchorSpace space;
  double base_ms = 0;
};

/// How the documents of a long prompt are known, those of anchors and those that are asked about.
struct Bases {
  const char* suffix;
  std::vector<Known> before, all;
  Pool* pool;  // anchors of documents that stood behind others
  [[nodiscard]] double milliseconds() const {
    double sum = 0;
    for (const Known& known : all) sum += known.base_ms;
    return sum;
  }
};

/// What full prefill made of one request: the others are compared with it.
struct Reference {
  kvmeld::Fragment real, following;
  std::vector<Answer> answers;
  Times times;
};

kvmeld::Status refused() {
  return {kvmeld::ErrorCode::engine_failure,
          "the engine refused a question; is the context too small?"};
}

class Study {
 public:
  Study(const Flags& flags, Engine& engine, Anchored& anchored, Frame frame)
      : flags_(flags), engine_(engine), anchored_(anchored), frame_(std::move(frame)) {
    middle_ = engine_.tokens(frame_.middle, true);
    space_ = anchored_.space();
  }

  kvmeld::Status all() {
    expect();
    auto following = following_base();
    if (!following) return following.error();
    following_ = *std::move(following);
    for (const std::string& text : flags_.texts) {
      if (kvmeld::Status status = one_text(text); !status) return status;
      if (!save()) return {kvmeld::ErrorCode::invalid_argument, "cannot write " + flags_.output};
    }
    std::fprintf(stderr, "\r%-100s\r", "");
    return {};
  }

  /// Writes what there is so far.
  [[nodiscard]] bool save() const {
    Json all{
        {"model", study::model_name(flags_.model)}, {"seed", flags_.seed}, {"gamma", flags_.gamma}};
    all["rows"] = Json::array();
    for (const Row& row : rows_) all["rows"].push_back(row.json());
    for (const auto& [name, value] : figures_.items()) all[name] = value;
    return study::write_results(flags_.output, all);
  }
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  [[nodiscard]] const Json& figures() const { return figures_; }

 private:
  kvmeld::Status one_text(const std::string& text) {
    const bool structured = text == "structured";
    const std::size_t most = *std::max_element(flags_.anchors.begin(), flags_.anchors.end());
    std::vector<Known> seen, held_out;
    for (std::size_t i = 0; i < most + flags_.documents; ++i) {
      auto known = learn(structured ? structured_document(engine_, flags_.seed, i)
                                    : free_document(engine_, flags_.seed, i));
      if (!known) return known.error();
      (i < most ? seen : held_out).push_back(*std::move(known));
    }
    const double token_temperature =
        flags_.temperature > 0 ? flags_.temperature : token_spread(seen);

    std::vector<std::vector<kvmeld::anchors::ContextOffset>> offsets(most);  // (document, agent)
    Series read_ms, measure_ms;
    for (std::size_t i = 0; i < most; ++i)
      for (std::size_t agent = 0; agent < agents; ++agent) {
        auto offset = measure(seen[i], agent, read_ms, measure_ms);
        if (!offset) return offset.error();
        offsets[i].push_back(*std::move(offset));
        progress(text + ": what instructions do to documents");
      }

    struct Load {
      std::string name;
      std::size_t anchors = 0;
      kvmeld::anchors::ReuseRule rule;
      std::unique_ptr<Pool> pool;
      Series distances;  // between its documents
      std::array<Row, blends.size()> rows;
    };
    std::array<Load, 2> loads;
    for (std::size_t l = 0; l < loads.size(); ++l) {
      Load& load = loads[l];
      const std::size_t budget = flags_.budget_mib << 20;
      const kvmeld::anchors::AnchorPreset preset = l == 0 ? kvmeld::anchors::presets::light(budget)
                                                          : kvmeld::anchors::presets::heavy(budget);
      load.name = l == 0 ? "light" : "heavy";
      load.anchors = flags_.anchors[l];
      load.rule = preset.rule;
      load.rule.gamma = flags_.gamma;
      load.rule.min_anchors = static_cast<std::int32_t>(load.anchors);
      load.pool = std::make_unique<Pool>(space_, preset.capacity, kvmeld::anchors::EmbeddingHash{},
                                         preset.eviction);
      for (std::size_t m = 0; m < blends.size(); ++m)
        load.rows[m] = row(blends[m].name, load.name, text, load.anchors);
      for (std::size_t i = 0; i < load.anchors; ++i)
        for (std::size_t agent = 0; agent < agents; ++agent) {
          const kvmeld::anchors::AnchorLookup found =
              look_up(*load.pool, load.rule, seen[i], agent);
          for (Row& r : load.rows) count(r, found);
          if (kvmeld::Status status = commit(*load.pool, seen[i].anchor, offsets[i][agent]);
              !status)
            return status;
        }
      // A pool is filled first; from then on a part of its anchors is enough, since some are
      // shorter than the document.
      load.rule.min_anchors = static_cast<std::int32_t>(std::max<std::size_t>(1, load.anchors / 4));
      load.distances.values = kvmeld::anchors::anchor_distances(load.pool->snapshot()->table);
      load.rule.temperature = flags_.temperature > 0          ? flags_.temperature
                              : load.distances.values.empty() ? 1
                                                              : load.distances.mean();
    }

    Row full = row("full_prefill", "", text, 0), rotated = row("rotated_reuse", "", text, 0);
    std::vector<Reference> first;  // of the first document
    for (std::size_t d = 0; d < held_out.size(); ++d)
      for (std::size_t agent = 0; agent < agents; ++agent) {
        const Known& known = held_out[d];
        const std::vector<Ask> asks = questions(known.document, agent);
        auto reference = read(known, agent, asks);
        if (!reference) return reference.error();
        if (d == 0) first.push_back(*reference);
        ++full.requests;
        full.add(reference->times);
        score(full, asks, reference->answers, *reference);
        full.key.add(0), full.value.add(0);
        progress(text + ": full prefill");

        ++rotated.requests, ++rotated.reused;
        const auto in_place = [&](llama_pos at) {
          return std::vector{rotated_part(known.anchor.base, at)};
        };
        if (kvmeld::Status status = reuse(rotated, {}, in_place, agent, asks, false, *reference);
            !status)
          return status;
        progress(text + ": rotated reuse");

        for (Load& load : loads) {
          const Stopwatch watch;
          const kvmeld::anchors::AnchorLookup found = look_up(*load.pool, load.rule, known, agent);
          const double look_up_ms = watch.milliseconds();
          for (std::size_t m = 0; m < blends.size(); ++m) {
            Row& r = load.rows[m];
            count(r, found);
            if (!found.decision.reuses()) {  // the agent reads the document itself
              Times times = reference->times;
              times.look_up = look_up_ms;
              r.add(times);
              score(r, asks, reference->answers, *reference);
              continue;
            }
            Times times{.look_up = look_up_ms};
            const auto parts = [&](llama_pos at) {
              std::vector<kvmeld::anchors::ReusePart> out;
              out.push_back(blended_part(known.anchor.base, at, found, place_of(agent, 0)));
              if (blends[m].by_token) weigh_by_token(out[0], found, token_temperature);
              if (blends[m].following) {
                const auto behind = at + static_cast<llama_pos>(known.document.tokens.size());
                out.push_back(blended_part(following_, behind, found, place_of(agent, 0), true));
              }
              return out;
            };
            if (kvmeld::Status status =
                    reuse(r, times, parts, agent, asks, blends[m].following, *reference);
                !status)
              return status;
            progress(text + ": " + load.name + ", " + blends[m].name);
          }
          if (!found.decision.reuses())
            if (kvmeld::Status status = learn_context(*load.pool, known, agent, *reference);
                !status)
              return status;
        }
      }

    Json figures{{"temperature_by_token", token_temperature}};
    for (Load& load : loads) {
      // what the default of γ says of the same requests, at the temperature that goes with it
      kvmeld::anchors::ReuseRule strict = load.rule;
      strict.gamma = kvmeld::anchors::ReuseRule{}.gamma;
      strict.temperature =
          kvmeld::anchors::spread_temperature(load.distances.values, strict.gamma, load.anchors);
      std::map<std::string, std::size_t> at_default_gamma;
      for (const Known& known : held_out)
        for (std::size_t agent = 0; agent < agents; ++agent)
          ++at_default_gamma[std::string(
              to_string(look_up(*load.pool, strict, known, agent).decision.reason))];
      full.load = rotated.load = load.name;
      rows_.push_back(full);
      rows_.push_back(rotated);
      for (const Row& r : load.rows) rows_.push_back(r);
      // The whole stream, anchors being made included, against every agent reading every document.
      double with = 0, without = 0;
      const double n = static_cast<double>(agents);
      for (std::size_t i = 0; i < load.anchors; ++i) with += seen[i].base_ms;
      for (const Known& known : held_out) with += known.base_ms;
      with += n * static_cast<double>(load.anchors) *
              (read_ms.mean() + measure_ms.mean() + full.question.mean());
      with += static_cast<double>(load.rows[0].first_token.values.size()) *
              load.rows[0].first_token.mean();
      without = n * (static_cast<double>(load.anchors) * (read_ms.mean() + full.question.mean()) +
                     static_cast<double>(held_out.size()) * full.first_token.mean());
      double bases = 0, blended = 0;
      for (const Known& known : held_out) bases += known.base_ms;
      blended = load.rows[0].first_token.mean() * n * static_cast<double>(held_out.size());
      figures[load.name] = {
          {"temperature", load.rule.temperature},
          {"distances", json_of(load.distances)},
          {"measuring_one_offset_ms", measure_ms.mean()},
          {"five_agents_with_bases",
           full.first_token.mean() * n * static_cast<double>(held_out.size()) / (bases + blended)},
          {"five_agents_with_bases_and_anchors", without / with},
          {"pool_bytes", load.pool->bytes()},
          {"reasons_at_default_gamma", at_default_gamma},
          {"temperature_at_default_gamma", strict.temperature}};
    }
    figures_["streams"][text] = figures;
    if (kvmeld::Status status = first_layer(text, held_out[0], first); !status) return status;
    if (structured && flags_.long_tokens > 0)
      return long_prompt(std::move(seen), std::move(held_out), *loads[1].pool, loads[1].rule,
                         token_temperature);
    return {};
  }

  // ---- one request

  kvmeld::Result<Known> learn(Document document, std::size_t prefix = 0) {
    Known known;
    const Stopwatch watch;
    auto base = anchored_.base_of(document.tokens, prefix);
    if (!base) return base.error();
    known.base_ms = watch.milliseconds();
    known.anchor = *std::move(base);
    known.space = anchored_.space(prefix);
    known.document = std::move(document);
    return known;
  }
  /// The text between a document and a question, by itself behind the bases' prefix.
  kvmeld::Result<kvmeld::Fragment> following_base() {
    anchored_.start(0);
    const auto sealed = anchored_.encode(middle_);
    if (!sealed) return sealed.error();
    return kvmeld::anchors::unrotated(*sealed);
  }

  kvmeld::Result<kvmeld::anchors::ContextOffset> measure(const Known& known, std::size_t agent,
                                                         Series& read_ms, Series& measure_ms) {
    anchored_.start(agent + 1);
    Stopwatch watch;
    const llama_pos at = anchored_.length();
    if (kvmeld::Status status = anchored_.read(known.document.tokens); !status) return status;
    read_ms.add(watch.milliseconds());
    watch = {};
    const auto real = anchored_.taken(at);
    if (!real) return real.error();
    measure_ms.add(watch.milliseconds());
    const auto following = anchored_.encode(middle_);
    if (!following) return following.error();
    watch = {};
    auto offset = offset_of(known, agent, *real, *following);
    measure_ms.values.back() += watch.milliseconds();
    return offset;
  }
  kvmeld::Result<kvmeld::anchors::ContextOffset> offset_of(const Known& known, std::size_t agent,
                                                           const kvmeld::Fragment& real,
                                                           const kvmeld::Fragment& following) {
    auto segment = kvmeld::anchors::measure_offset(real, known.anchor.base);
    if (!segment) return segment.error();
    auto behind = kvmeld::anchors::measure_offset(following, following_);
    if (!behind) return behind.error();
    return kvmeld::anchors::ContextOffset{place_of(agent, 0), *std::move(segment),
                                          *std::move(behind)};
  }
  static kvmeld::Status commit(Pool& pool, const kvmeld::anchors::Anchor& anchor,
                               const kvmeld::anchors::ContextOffset& offset) {
    auto done = pool.commit(anchor.id, offset);
    if (!done && done.error().code() == kvmeld::ErrorCode::not_found) {
      kvmeld::anchors::Anchor first = anchor;
      if (auto added = kvmeld::anchors::add_offset(first, offset); !added) return added.error();
      done = pool.commit(first);
    }
    return done ? kvmeld::Status() : done.error();
  }
  kvmeld::Status learn_context(Pool& pool, const Known& known, std::size_t agent,
                               const Reference& reference) {
    const auto offset = offset_of(known, agent, reference.real, reference.following);
    if (!offset) return offset.error();
    return commit(pool, known.anchor, *offset);
  }

  [[nodiscard]] kvmeld::anchors::AnchorLookup look_up(const Pool& pool,
                                                      const kvmeld::anchors::ReuseRule& rule,
                                                      const Known& known, std::size_t agent,
                                                      std::size_t slot = 0) const {
    const std::vector<float>& vector = known.anchor.vector;
    kvmeld::anchors::AnchorQuery query{.space = &known.space,
                                       .signature = {known.anchor.base.tokens(), vector},
                                       .vector = vector,
                                       .context = place_of(agent, slot),
                                       .request = {}};
    query.request.tokens = known.anchor.base.token_count();
    query.request.last_position =
        static_cast<std::int64_t>(anchored_.prefix(agent + 1).size()) + query.request.tokens - 1;
    query.request.trained_context = llama_model_n_ctx_train(engine_.model());
    query.request.cost = meter_.cost(query.request.tokens);
    return pool.look_up(rule, query);
  }
  static void count(Row& row, const kvmeld::anchors::AnchorLookup& found) {
    ++row.requests;
    row.reused += found.decision.reuses() ? 1U : 0U;
    ++row.reasons[std::string(to_string(found.decision.reason))];
  }

  /// Each agent asks about other facts.
  [[nodiscard]] std::vector<Ask> questions(const Document& document, std::size_t agent) const {
    std::vector<Ask> out;
    for (std::size_t q = 0; q < std::min(flags_.questions, document.asks.size()); ++q)
      out.push_back(document.asks[(agent + q) % document.asks.size()]);
    return out;
  }
  [[nodiscard]] std::vector<Prompt> prompts(const std::vector<Ask>& asks, bool placed) const {
    std::vector<Prompt> out;
    for (const Ask& ask : asks) {
      Prompt prompt;
      if (!placed) prompt.tokens = middle_;
      append(prompt.tokens, engine_.tokens(ask.start));
      prompt.candidates = ask.candidates;
      out.push_back(std::move(prompt));
    }
    return out;
  }

  kvmeld::Result<Reference> read(const Known& known, std::size_t agent,
                                 const std::vector<Ask>& asks) {
    Reference out;
    anchored_.start(agent + 1);
    const llama_pos at = anchored_.length();
    const Stopwatch watch;
    if (kvmeld::Status status = anchored_.read(known.document.tokens); !status) return status;
    out.times.prefill = watch.milliseconds();
    meter_.prefilled(static_cast<std::int64_t>(known.document.tokens.size()),
                     out.times.prefill / 1000);
    out.answers =
        ask(engine_, anchored_.length(), prompts(asks, false), first_branch, &out.times.question);
    if (out.answers.empty()) return refused();
    auto real = anchored_.taken(at);
    if (!real) return real.error();
    out.real = *std::move(real);
    auto following = anchored_.encode(middle_);
    if (!following) return following.error();
    out.following = *std::move(following);
    return out;
  }

  /// Makes the parts, puts them behind the agent's instructions and asks.
  template <class Parts>
  kvmeld::Status reuse(Row& row, Times times, const Parts& parts, std::size_t agent,
                       const std::vector<Ask>& asks, bool following, const Reference& reference) {
    anchored_.start(agent + 1);
    const llama_pos at = anchored_.length();
    const Stopwatch watch;
    const std::vector<kvmeld::anchors::ReusePart> made = parts(at);
    times.weigh = watch.milliseconds();
    if (kvmeld::Status status = anchored_.place(made, &times.blend); !status) return status;
    const std::vector<Answer> answers =
        ask(engine_, anchored_.length(), prompts(asks, following), first_branch, &times.question);
    if (answers.empty()) return refused();
    row.add(times);
    score(row, asks, answers, reference);
    const std::int64_t tokens = reference.real.token_count();
    if (times.look_up > 0) meter_.blended(tokens, (times.weigh + times.blend.total()) / 1000);
    const auto got = anchored_.taken(at);
    if (!got) return got.error();
    const RelativeError error = relative_error(reference.real, *got);
    row.key.add(error.key);
    row.value.add(error.value);
    if (!following) return {};
    const auto behind = anchored_.taken(at + static_cast<llama_pos>(tokens));
    if (!behind) return behind.error();
    const RelativeError other = relative_error(reference.following, *behind);
    row.following_key.add(other.key);
    row.following_value.add(other.value);
    return {};
  }
  static void score(Row& row, const std::vector<Ask>& asks, const std::vector<Answer>& answers,
                    const Reference& reference) {
    for (std::size_t i = 0; i < asks.size(); ++i) {
      ++row.total;
      row.right +=
          answers[i].named && asks[i].candidates[*answers[i].named] == asks[i].answer ? 1U : 0U;
      row.kl.add(divergence(reference.answers[i].logits, answers[i].logits));
    }
  }
  [[nodiscard]] Row row(const char* mode, const std::string& load, const std::string& text,
                        std::size_t anchors) const {
    Row r;
    r.mode = mode;
    r.load = load;
    r.text = text;
    r.documents = flags_.documents;
    r.anchors = anchors;
    return r;
  }

  /// The mean distance between tokens of documents, for weights by token.
  static double token_spread(const std::vector<Known>& seen) {
    Series distances;
    for (std::size_t i = 1; i < seen.size(); ++i) {
      const std::vector<float> a = value_rows(seen[i].anchor.base, 1),
                               b = value_rows(seen[i - 1].anchor.base, 1);
      const std::size_t channels = seen[i].anchor.vector.size();
      for (std::size_t t = 0; (t + 1) * channels <= std::min(a.size(), b.size()); ++t)
        distances.add(kvmeld::anchors::l2_distance(std::span(a).subspan(t * channels, channels),
                                                   std::span(b).subspan(t * channels, channels)));
    }
    return distances.values.empty() ? 1 : distances.mean();
  }

  // ---- the first layer, which sees tokens alone

  /// How far from 0 measured offsets of layer 0 are, and what they would be if positions were off
  /// by one. `references`: (agent).
  kvmeld::Status first_layer(const std::string& text, const Known& known,
                             const std::vector<Reference>& references) {
    Series key, value, wrong, noise;
    for (std::size_t agent = 0; agent < agents; ++agent) {
      anchored_.start(agent + 1);
      const llama_pos at = anchored_.length();
      const auto middle = known.document.tokens.begin() +
                          static_cast<std::ptrdiff_t>(known.document.tokens.size() / 2);
      // In two batches: what the engine's own arithmetic leaves open.
      if (kvmeld::Status status = anchored_.read({known.document.tokens.begin(), middle}); !status)
        return status;
      if (kvmeld::Status status = anchored_.read({middle, known.document.tokens.end()}); !status)
        return status;
      const auto again = anchored_.taken(at), misplaced = anchored_.taken(at, 1);
      if (!again) return again.error();
      if (!misplaced) return misplaced.error();
      noise.add(relative_error(references[agent].real, *again, 0, 1).value);
      const auto offset = kvmeld::anchors::measure_offset(references[agent].real, known.anchor.base,
                                                          {.context_free_layers = 0});
      const auto wrong_offset = kvmeld::anchors::measure_offset(*misplaced, known.anchor.base,
                                                                {.context_free_layers = 0});
      if (!offset) return offset.error();
      if (!wrong_offset) return wrong_offset.error();
      const RelativeError size = norms(known.anchor.base), off = norms(*offset);
      key.add(off.key / size.key);
      value.add(off.value / size.value);
      wrong.add(norms(*wrong_offset).key / size.key);
      progress(text + ": the first layer");
    }
    figures_["layer_0"][text] = {{"k_offset", json_of(key)},
                                 {"v_offset", json_of(value)},
                                 {"v_engine_noise", json_of(noise)},
                                 {"k_offset_one_position_off", json_of(wrong)}};
    return {};
  }
  static RelativeError norms(const kvmeld::Fragment& fragment) {
    const kvmeld::FragmentView view(fragment);
    double sum[2] = {};
    for (std::size_t p = 0; p < 2; ++p) {
      const kvmeld::PlaneRef& plane = view.ref().plane(0, p);
      for (std::int64_t i = 0; i < fragment.token_count() * plane.token_stride; ++i)
        sum[p] += element(plane.data, i) * element(plane.data, i);
    }
    return {std::sqrt(sum[0]), std::sqrt(sum[1])};
  }

  // ---- a prompt of many documents

  /// Where a document stands: right behind the instructions, or behind them and other documents.
  /// Both are measured apart.
  [[nodiscard]] kvmeld::Digest128 place_of(std::size_t agent, std::size_t slot) const {
    return anchored_.place_of(agent + 1, slot == 0 ? 0 : 1);
  }

  /// Documents of a pool's anchors and new ones, until there are as many tokens as asked for.
  kvmeld::Result<std::vector<Known>> gather(std::vector<Known> first, std::size_t& next) {
    std::size_t tokens = 0, kept = 0;
    while (kept < first.size() && tokens < flags_.long_tokens)
      tokens += first[kept++].document.tokens.size();
    first.resize(kept);
    while (tokens < flags_.long_tokens) {
      auto known = learn(structured_document(engine_, flags_.seed, next++));
      if (!known) return known.error();
      tokens += known->document.tokens.size();
      first.push_back(*std::move(known));
      progress("long prompt: documents alone");
    }
    return first;
  }
  /// The same documents, known behind a lead-in where they stand behind others.
  kvmeld::Result<std::vector<Known>> led(const std::vector<Known>& documents) {
    std::vector<Known> out;
    for (const Known& known : documents) {
      auto again = out.empty() ? kvmeld::Result<Known>(known) : learn(known.document, led_bases);
      if (!again) return again.error();
      out.push_back(*std::move(again));
      progress("long prompt: documents behind a lead-in");
    }
    return out;
  }
  /// An agent reads a prompt of documents one after the other; what stands before them is their
  /// context.
  kvmeld::Status measure_behind(const std::array<Bases, 2>& kinds, std::size_t agent) {
    anchored_.start(agent + 1);
    for (std::size_t d = 0; d < kinds[0].before.size(); ++d) {
      const auto real = anchored_.encode(kinds[0].before[d].document.tokens);
      if (!real) return real.error();
      if (d == 0) continue;  // measured before
      for (const Bases& bases : kinds) {
        auto segment = kvmeld::anchors::measure_offset(*real, bases.before[d].anchor.base);
        if (!segment) return segment.error();
        kvmeld::anchors::ContextOffset offset{place_of(agent, d), *std::move(segment), {}};
        if (kvmeld::Status status = commit(*bases.pool, bases.before[d].anchor, offset); !status)
          return status;
      }
    }
    const auto following = anchored_.encode(middle_);
    if (!following) return following.error();
    auto behind = kvmeld::anchors::measure_offset(*following, following_);
    if (!behind) return behind.error();
    following_long_[agent] = *std::move(behind);
    return {};
  }

  kvmeld::Status long_prompt(std::vector<Known> seen, std::vector<Known> held_out, Pool& pool,
                             const kvmeld::anchors::ReuseRule& rule, double token_temperature) {
    std::size_t next = seen.size() + held_out.size();
    auto before = gather(std::move(seen), next);
    if (!before) return before.error();
    auto all = gather(std::move(held_out), next);
    if (!all) return all.error();
    auto led_before = led(*before), led_all = led(*all);
    if (!led_before) return led_before.error();
    if (!led_all) return led_all.error();
    const kvmeld::anchors::AnchorPreset preset =
        kvmeld::anchors::presets::heavy(flags_.budget_mib << 20);
    Pool led_pool(anchored_.space(led_bases), preset.capacity, kvmeld::anchors::EmbeddingHash{},
                  preset.eviction);
    const std::array<Bases, 2> kinds{
        {{"", *std::move(before), *std::move(all), &pool},
         {"_lead_in", *std::move(led_before), *std::move(led_all), &led_pool}}};
    const std::vector<Known>& documents = kinds[0].all;
    Known whole;
    for (const Known& known : documents) append(whole.document.tokens, known.document.tokens);
    std::vector<Ask> asks;
    for (std::size_t q = 0; q < flags_.long_questions; ++q) {
      const std::size_t d = q * documents.size() / flags_.long_questions;
      asks.push_back(documents[d].document.asks[q % 4]);
    }

    Row full = row("full_prefill", "long", "structured", 0);
    std::vector<Row> rows;  // for each kind: rotated, then the blends
    for (const Bases& bases : kinds) {
      rows.push_back(row("rotated_reuse", "long", "structured", 0));
      for (const Mode& blend : blends)
        rows.push_back(row(blend.name, "long", "structured", bases.before.size()));
      for (std::size_t r = rows.size() - 1 - blends.size(); r < rows.size(); ++r)
        rows[r].mode += bases.suffix;
    }
    Series measuring_ms;
    for (std::size_t agent = 0; agent < std::min(flags_.long_agents, agents); ++agent) {
      const Stopwatch measuring;
      if (kvmeld::Status status = measure_behind(kinds, agent); !status) return status;
      measuring_ms.add(measuring.milliseconds());
      progress("long prompt: what documents do to each other");
      auto reference = read(whole, agent, asks);
      if (!reference) return reference.error();
      ++full.requests;
      full.add(reference->times);
      score(full, asks, reference->answers, *reference);
      full.key.add(0), full.value.add(0);
      progress("long prompt: full prefill");
      Row* of_kind = rows.data();
      for (const Bases& bases : kinds) {
        if (kvmeld::Status status = long_request(bases, agent, asks, rule, pool, token_temperature,
                                                 *reference, of_kind);
            !status)
          return status;
        of_kind += 1 + blends.size();
      }
    }
    full.documents = documents.size();
    rows_.push_back(full);
    Json ratios;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Bases& bases = kinds[r / (1 + blends.size())];
      rows[r].documents = documents.size();
      if (rows[r].anchors > 0 && rows[r].first_token.median() > 0)
        ratios[rows[r].mode] =
            paid(rows[r], full, bases, static_cast<double>(agents) * measuring_ms.mean());
      rows_.push_back(std::move(rows[r]));
    }
    figures_["speed"] = {{"shared_tokens", whole.document.tokens.size()},
                         {"documents", documents.size()},
                         {"anchors", kinds[0].before.size()},
                         {"full_prefill_ms", full.first_token.median()},
                         {"bases_ms", kinds[0].milliseconds()},
                         {"blends", ratios}};
    return {};
  }
  /// One prompt of many documents, from bases of one kind: rotated, then blended in each mode.
  /// `pool` has the anchors of what stands first.
  kvmeld::Status long_request(const Bases& bases, std::size_t agent, const std::vector<Ask>& asks,
                              const kvmeld::anchors::ReuseRule& rule, const Pool& pool,
                              double token_temperature, const Reference& reference, Row* rows) {
    const auto placed = [&](llama_pos at, auto&& part) {
      std::vector<kvmeld::anchors::ReusePart> out;
      for (std::size_t d = 0; d < bases.all.size(); ++d) {
        out.push_back(part(d, at));
        at += static_cast<llama_pos>(bases.all[d].document.tokens.size());
      }
      return out;
    };
    ++rows[0].requests, ++rows[0].reused;
    const auto rotated = [&](llama_pos at) {
      return placed(at, [&](std::size_t d, llama_pos where) {
        return rotated_part(bases.all[d].anchor.base, where);
      });
    };
    if (kvmeld::Status status = reuse(rows[0], {}, rotated, agent, asks, false, reference); !status)
      return status;
    for (std::size_t m = 0; m < blends.size(); ++m) {
      Row& r = rows[1 + m];
      const Stopwatch watch;
      std::vector<kvmeld::anchors::AnchorLookup> found;
      for (std::size_t d = 0; d < bases.all.size(); ++d)
        found.push_back(look_up(d == 0 ? pool : *bases.pool, rule, bases.all[d], agent, d));
      const Times times{.look_up = watch.milliseconds()};
      for (const kvmeld::anchors::AnchorLookup& one : found) count(r, one);
      // the row says why
      if (std::any_of(found.begin(), found.end(), [](const kvmeld::anchors::AnchorLookup& one) {
            return !one.decision.reuses();
          }))
        continue;
      const auto parts = [&](llama_pos at) {
        auto out = placed(at, [&](std::size_t d, llama_pos where) {
          kvmeld::anchors::ReusePart part =
              blended_part(bases.all[d].anchor.base, where, found[d], place_of(agent, d));
          if (blends[m].by_token) weigh_by_token(part, found[d], token_temperature);
          return part;
        });
        if (blends[m].following) {  // measured once behind a prompt like this one
          kvmeld::anchors::ReusePart behind{
              .base = following_,
              .position = at + static_cast<llama_pos>(reference.real.token_count())};
          behind.offsets.push_back(
              {.anchor = bases.before.back().anchor.id, .delta = following_long_[agent]});
          out.push_back(std::move(behind));
        }
        return out;
      };
      if (kvmeld::Status status =
              reuse(r, times, parts, agent, asks, blends[m].following, reference);
          !status)
        return status;
      progress("long prompt: " + r.mode);
    }
    return {};
  }
  /// Against every agent reading the whole prompt itself.
  static Json paid(const Row& blended, const Row& full, const Bases& bases, double measuring_ms) {
    const double n = static_cast<double>(agents), full_ms = full.first_token.median(),
                 one = blended.first_token.median(), bases_ms = bases.milliseconds();
    double anchors_ms = measuring_ms;
    for (const Known& known : bases.before) anchors_ms += known.base_ms;
    const double saved = n * full_ms - (bases_ms + n * one);
    return {
        {"first_token_ms", one},
        {"sooner", full_ms / one},
        {"five_agents_with_bases", n * full_ms / (bases_ms + n * one)},
        {"five_agents_with_bases_and_anchors", n * full_ms / (bases_ms + n * one + anchors_ms)},
        {"prompts_until_anchors_pay", saved > 0 ? Json(std::ceil(anchors_ms / saved)) : Json()}};
  }

  // ---- progress, in tokens that the engine decodes

  void expect() {
    const double q =
        static_cast<double>(flags_.questions) * 10 + static_cast<double>(middle_.size());
    const double n = static_cast<double>(agents);
    const double most =
        static_cast<double>(*std::max_element(flags_.anchors.begin(), flags_.anchors.end()));
    for (const std::string& text : flags_.texts) {
      const double length = text == "structured" ? 48 : 75;
      const double held = static_cast<double>(flags_.documents);
      expected_ += (most + held) * length * (n + 1) +
                   most * n * static_cast<double>(middle_.size()) + held * n * (8 * q + 18) +
                   n * length;
      if (text == "structured" && flags_.long_tokens > 0)
        expected_ += static_cast<double>(flags_.long_tokens) *
                         static_cast<double>(3 + 2 * flags_.long_agents) +
                     static_cast<double>(flags_.long_agents * 9 * flags_.long_questions) * 18;
    }
  }
  void progress(const std::string& what) {
    const double minutes = watch_.milliseconds() / 6e4;
    const auto done = static_cast<double>(engine_.decoded());
    std::fprintf(stderr, "\r%-52s %5.1f min done, about %5.1f min left ", what.c_str(), minutes,
                 minutes * std::max(0.0, expected_ / done - 1));
  }

  const Flags& flags_;
  Engine& engine_;
  Anchored& anchored_;
  Frame frame_;
  Tokens middle_;
  kvmeld::anchors::AnchorSpace space_;
  kvmeld::anchors::ReuseMeter meter_;  // what blending and prefilling cost here, for decisions
  kvmeld::Fragment following_;
  std::array<kvmeld::Fragment, agents> following_long_;
  std::vector<Row> rows_;
  Json figures_;
  Stopwatch watch_;
  double expected_ = 0;
};

void print(const std::vector<Row>& rows, const Json& figures) {
  std::string group;
  for (const Row& r : rows) {
    const std::string now = r.text + ", " + r.load;
    if (now != group)
      std::printf("\n%s\n%-22s %8s %7s %9s %10s %8s %7s %7s %9s %8s   %-14s %-14s\n", now.c_str(),
                  "mode", "requests", "reused", "right", "1st token", "look-up", "blend", "import",
                  "question", "KL", "K error", "V error");
    group = now;
    std::printf(
        "%-22s %8zu %7.2f %4zu/%-4zu %7.0f ms %8.2f %7.2f %7.2f %9.1f %8.4f   %.4f ± %.4f %.4f ± "
        "%.4f\n",
        r.mode.c_str(), r.requests,
        r.requests == 0 ? 0.0 : static_cast<double>(r.reused) / static_cast<double>(r.requests),
        r.right, r.total, r.first_token.median(), r.look_up.median(),
        r.weigh.median() + r.plan.median() + r.blend.median(), r.import.median(),
        r.question.median(), r.kl.mean(), r.key.mean(), r.key.deviation(), r.value.mean(),
        r.value.deviation());
    if (!r.reasons.empty()) {
      std::printf("%22s", "");
      for (const auto& [reason, count] : r.reasons) std::printf(" %s %zu", reason.c_str(), count);
      std::printf("\n");
    }
  }
  std::printf("\n");
  for (const auto& [text, f] : figures["layer_0"].items())
    std::printf(
        "layer 0, %s: measured offsets of K %.5f, of V %.2g (the engine's own noise %.2g); K one "
        "position off %.3f\n",
        text.c_str(), f["k_offset"]["mean"].get<double>(), f["v_offset"]["mean"].get<double>(),
        f["v_engine_noise"]["mean"].get<double>(),
        f["k_offset_one_position_off"]["mean"].get<double>());
  for (const auto& [text, f] : figures["streams"].items())
    for (const char* load : {"light", "heavy"})
      std::printf(
          "five agents, %s, %s: all requests %.2f times sooner with bases counted, %.2f with "
          "anchors counted too\n",
          text.c_str(), load, f[load]["five_agents_with_bases"].get<double>(),
          f[load]["five_agents_with_bases_and_anchors"].get<double>());
  if (!figures.contains("speed")) return;
  const Json& speed = figures["speed"];
  std::printf("%zu shared tokens in %zu documents, %zu anchors, full prefill %.0f ms\n",
              speed["shared_tokens"].get<std::size_t>(), speed["documents"].get<std::size_t>(),
              speed["anchors"].get<std::size_t>(), speed["full_prefill_ms"].get<double>());
  for (const auto& [mode, f] : speed["blends"].items())
    std::printf(
        "  %-22s first token after %.0f ms, %.1f times sooner; five agents %.1f times with bases "
        "counted, %.2f with anchors counted too\n",
        mode.c_str(), f["first_token_ms"].get<double>(), f["sooner"].get<double>(),
        f["five_agents_with_bases"].get<double>(),
        f["five_agents_with_bases_and_anchors"].get<double>());
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
  const auto prefix = [&](std::string_view text) {
    return engine->tokens(make_frame(*engine, std::string(text), request_text).prefix, true, true);
  };
  if (auto added = anchored.add_prefix(prefix(base_instructions)); !added) return added.error();
  for (const std::string_view text : agent_instructions)
    if (auto added = anchored.add_prefix(prefix(text)); !added) return added.error();
  Tokens led = prefix(base_instructions);
  append(led, engine->tokens(lead_in(flags.lead_in)));
  if (auto added = anchored.add_prefix(std::move(led)); !added) return added.error();

  Study study(flags, *engine, anchored,
              make_frame(*engine, std::string(base_instructions), request_text));
  if (kvmeld::Status status = study.all(); !status) return status;
  print(study.rows(), study.figures());
  std::printf("rows: %s\n", flags.output.c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Five agents with different instructions share documents: read anew, turned to their place, "
      "or corrected by anchors.");
  study::add_common(app, flags);
  app.add_option("--anchors", flags.anchors,
                 "documents that anchors are made of, under light and under heavy load")
      ->delimiter(',')
      ->expected(2)
      ->capture_default_str();
  app.add_option("--documents", flags.documents, "held-out documents that all agents ask about")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--questions", flags.questions, "questions of each agent about each document")
      ->check(CLI::Range(1, 4))
      ->capture_default_str();
  app.add_option("--texts", flags.texts, "structured, free")
      ->delimiter(',')
      ->check(CLI::IsMember({"structured", "free"}))
      ->capture_default_str();
  app.add_option("--long-tokens", flags.long_tokens,
                 "least tokens of the prompt of many documents; 0: leave it out")
      ->check(CLI::Range(0, 3000))
      ->capture_default_str();
  app.add_option("--long-agents", flags.long_agents, "agents that read it in full, to compare")
      ->check(CLI::Range(1, 5))
      ->capture_default_str();
  app.add_option("--long-questions", flags.long_questions, "about that prompt")
      ->check(CLI::Range(1, 84))
      ->capture_default_str();
  app.add_option("--lead-in", flags.lead_in,
                 "neutral sentences before the bases of documents that stand behind others there")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
  app.add_option("--temperature", flags.temperature,
                 "of the weights; 0: the mean distance between documents")
      ->capture_default_str();
  app.add_option("--gamma", flags.gamma,
                 "a new anchor where H(w) > gamma log |A|; 1: never for that")
      ->capture_default_str();
  app.add_option("--budget", flags.budget_mib, "MiB of K/V that a pool may hold")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  for (const std::size_t anchors : flags.anchors)
    if (anchors < 1) return std::fprintf(stderr, "a load needs at least 1 anchor\n"), 2;
  const kvmeld::Status status = run(flags);
  if (!status)
    return std::fprintf(stderr, "\n%s: %s\n", std::string(kvmeld::to_string(status.code())).c_str(),
                        status.message().c_str()),
           1;
  return 0;
}
