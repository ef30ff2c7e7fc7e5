#pragma once
// One agent with a model of its own: reads notes behind the shared prefix and a lead-in, seals them, and answers questions
// from whatever set of fragments it is given.

#include "asking.hpp"
#include "dataset.hpp"
#include "engine.hpp"
#include "lead_in.hpp"
#include "prompt.hpp"

#include <kvmeld/engine/llama_cpp.hpp>
#include <kvmeld/kvmeld.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace example {

class NoteAgent {
 public:
  /// What an agent took over, and how long that took.
  struct Taken {
    kvmeld::Digest128 content_digest;
    llama_pos tokens = 0;
    double render_ms = 0;
    double import_ms = 0;
  };

  static kvmeld::Result<std::unique_ptr<NoteAgent>> open(const std::string& model, int threads) {
    auto agent = std::unique_ptr<NoteAgent>(new NoteAgent);
    agent->engine_ = Engine::open({.model = model, .threads = threads, .cells = 4096, .sequences = 64});
    if (!agent->engine_) return refused("llama.cpp cannot open " + model);
    auto geometry = kvmeld::llama::geometry(agent->engine_->model(), agent->engine_->parameters(), {.model = "", .tenant = "", .gguf_path = model});
    if (!geometry) return geometry.error();
    agent->geometry_ = std::make_shared<const kvmeld::Geometry>(*std::move(geometry));
    agent->frame_ = make_frame(*agent->engine_, "You answer questions about the notes below. Notes:", "Complete the statement as the notes say.");
    agent->prefix_ = agent->engine_->tokens(agent->frame_.prefix, true, true);
    agent->lead_in_ = agent->engine_->tokens(lead_in(8));
    if (kvmeld::Status status = agent->read_prefix(); !status) return status;
    return agent;
  }

  [[nodiscard]] const std::shared_ptr<const kvmeld::Geometry>& geometry() const { return geometry_; }
  /// What every agent sees first. Agents on one kind of machine compute the same bytes, so it is one fragment in their set.
  [[nodiscard]] const kvmeld::Fragment& prefix() const { return prefix_fragment_; }

  [[nodiscard]] Tokens tokens(const std::vector<std::string>& sentences) const {
    Tokens out;
    for (const std::string& sentence : sentences) append(out, engine_->tokens(sentence));
    return out;
  }

  /// Reads notes and seals them: behind the lead-in, which is dropped, and once more without it for whoever comes first.
  kvmeld::Result<kvmeld::Fragment> read(const std::vector<std::string>& sentences) {
    const Tokens notes = tokens(sentences);
    auto led = encode(notes, true);
    if (!led) return led.error();
    auto plain = encode(notes, false);
    if (!plain) return plain.error();
    const auto led_view = kvmeld::llama::view_state(led->bytes(), geometry_);
    if (!led_view) return led_view.error();
    const auto plain_view = kvmeld::llama::view_state(plain->bytes(), geometry_);
    if (!plain_view) return plain_view.error();
    const auto options = [&](const kvmeld::llama::SequenceState& state, const Tokens& all, bool behind) {
      return kvmeld::SealOptions{.tokens = all, .positions = state.positions(), .drop_first = static_cast<std::int64_t>(all.size() - notes.size()),
                                 .context = {prefix_fragment_.id(), behind ? kvmeld::lead_in_digest(lead_in_) : kvmeld::Digest128{}}};
    };
    const Tokens with = whole(notes, true), without = whole(notes, false);
    auto sealed = kvmeld::seal(led_view->cache, options(*led, with, true));
    if (!sealed) return sealed.error();
    return kvmeld::with_variant(*sealed, plain_view->cache, options(*plain, without, false));
  }

  /// Renders a set into the engine, in the place of whatever was there.
  template <class M>
  kvmeld::Result<Taken> take(const kvmeld::FragmentSet& set, const M& merger) {
    engine_->forget_all();
    const Stopwatch render;
    const auto plan = kvmeld::plan(set, merger, {.geometry = *geometry_});
    if (!plan) return plan.error();
    auto blob = kvmeld::llama::make_state(geometry_, form_->form(), plan->positions(), plan->token_ids());
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, blob->mutable_ref(), {.content_digest = true});
    if (!report) return report.error();
    Taken taken{*report->content_digest, static_cast<llama_pos>(report->tokens), render.milliseconds(), 0};
    const Stopwatch import;
    if (kvmeld::Status status = kvmeld::llama::write(engine_->context(), 0, 1, *blob); !status) return status;
    taken.import_ms = import.milliseconds();
    return taken;
  }
  /// Reads all notes as text, the ceiling.
  kvmeld::Result<llama_pos> read_text(const std::vector<std::vector<std::string>>& notes) {
    engine_->forget_all();
    Tokens all = prefix_;
    for (const auto& one : notes) append(all, tokens(one));
    if (!engine_->prefill(all, 0, 0)) return refused("the engine refused the whole text");
    return static_cast<llama_pos>(all.size());
  }

  /// Questions of a set that are answered right (greedily) from the cache in place, which holds `length` tokens.
  kvmeld::Result<std::size_t> right_answers(const std::vector<Question>& questions, llama_pos length) {
    std::vector<Prompt> prompts;
    for (const Question& question : questions) {
      Prompt prompt;
      prompt.tokens = engine_->tokens(frame_.middle, true);
      const Tokens started = engine_->tokens(question.last.start);
      append(prompt.tokens, started);
      prompt.candidates = question.last.candidates;
      for (const std::string& candidate : question.last.candidates) {
        Tokens word = engine_->tokens(question.last.start + " " + candidate);
        word.erase(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(std::min(started.size(), word.size() - 1)));
        prompt.words.push_back(std::move(word));
      }
      prompts.push_back(std::move(prompt));
    }
    const std::vector<Answer> answers = ask(*engine_, length, prompts, 16, nullptr);
    if (answers.empty()) return refused("the engine refused a question");
    std::size_t right = 0;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      right += answers[i].named && questions[i].last.candidates[*answers[i].named] == questions[i].last.answer ? 1U : 0U;
    }
    return right;
  }

 private:
  NoteAgent() = default;
  static kvmeld::Status refused(const std::string& why) { return {kvmeld::ErrorCode::engine_failure, why}; }

  [[nodiscard]] Tokens whole(const Tokens& notes, bool behind_lead_in) const {
    Tokens all = prefix_;
    if (behind_lead_in) append(all, lead_in_);
    append(all, notes);
    return all;
  }
  kvmeld::Result<kvmeld::llama::SequenceState> encode(const Tokens& notes, bool behind_lead_in) {
    engine_->forget_all();
    const Tokens all = whole(notes, behind_lead_in);
    if (!engine_->prefill(prefix_, 0, 0)) return refused("the engine refused the prefix");
    const auto rest = std::span(all).subspan(prefix_.size());
    if (!engine_->prefill(rest, static_cast<llama_pos>(prefix_.size()), 0)) return refused("the engine refused the notes");
    auto state = kvmeld::llama::read(engine_->context(), 0, geometry_);
    engine_->forget_all();
    return state;
  }
  kvmeld::Status read_prefix() {
    engine_->forget_all();
    if (!engine_->prefill(prefix_, 0, 0)) return refused("the engine refused the prefix");
    auto state = kvmeld::llama::read(engine_->context(), 0, geometry_);
    if (!state) return state.error();
    form_ = std::make_unique<kvmeld::llama::SequenceState>(*std::move(state));
    const auto view = kvmeld::llama::view_state(form_->bytes(), geometry_);
    if (!view) return view.error();
    auto sealed = kvmeld::seal(view->cache, {.role = kvmeld::Role::prefix, .tokens = prefix_, .positions = form_->positions()});
    if (!sealed) return sealed.error();
    prefix_fragment_ = *std::move(sealed);
    return {};
  }

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<const kvmeld::Geometry> geometry_;
  Frame frame_;
  Tokens prefix_, lead_in_;
  std::unique_ptr<kvmeld::llama::SequenceState> form_;
  kvmeld::Fragment prefix_fragment_;
};

}  // namespace example
