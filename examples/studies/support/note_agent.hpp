#pragma once
// One agent with a model of its own: reads notes behind the shared prefix and a lead-in, seals
// them, and answers questions from whatever set of fragments it is given.

#include "asking.hpp"
#include "dataset.hpp"
#include "engine.hpp"
#include "lead_in.hpp"
#include "prompt.hpp"
#include "question_prompt.hpp"

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
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
    agent->engine_ =
        Engine::open({.model = model, .threads = threads, .cells = 4096, .sequences = 64});
    if (!agent->engine_) return refused("llama.cpp cannot open " + model);
    auto geometry =
        kvmeld::llama::geometry(agent->engine_->model(), agent->engine_->parameters(),
                                {.adapters = kvmeld::Adapters::none(), .gguf_path = model});
    if (!geometry) return geometry.error();
    agent->geometry_ = std::make_shared<const kvmeld::Geometry>(*std::move(geometry));
    agent->frame_ =
        make_frame(*agent->engine_, "You answer questions about the notes below. Notes:",
                   "Complete the statement as the notes say.");
    agent->prefix_ = agent->engine_->tokens(agent->frame_.prefix, true, true);
    agent->lead_in_ = agent->engine_->tokens(lead_in(8));
    if (kvmeld::Status status = agent->read_prefix(); !status) return status;
    return agent;
  }

  [[nodiscard]] const std::shared_ptr<const kvmeld::Geometry>& geometry() const {
    return geometry_;
  }
  /// What every agent sees first. Agents on one kind of machine compute the same bytes, so it is
  /// one fragment in their set.
  [[nodiscard]] const kvmeld::Fragment& prefix() const { return prefix_fragment_; }

  [[nodiscard]] const Engine& engine() const { return *engine_; }
  [[nodiscard]] const Frame& frame() const { return frame_; }
  [[nodiscard]] const Tokens& lead_in_tokens() const { return lead_in_; }

  [[nodiscard]] Tokens tokens(const std::vector<std::string>& sentences) const {
    Tokens out;
    for (const std::string& sentence : sentences) append(out, engine_->tokens(sentence));
    return out;
  }

  /// Reads notes and seals them: behind the lead-in, which is dropped, and once more without it for
  /// whoever comes first.
  kvmeld::Result<kvmeld::Fragment> read(const std::vector<std::string>& sentences) {
    return read(tokens(sentences), lead_in_, true);
  }
  /// Likewise behind another lead-in, or none; `variant`: with the second encoding.
  kvmeld::Result<kvmeld::Fragment> read(const Tokens& notes, const Tokens& lead_in, bool variant) {
    const auto encoded = [&](const Tokens& before,
                             const kvmeld::Fragment* first) -> kvmeld::Result<kvmeld::Fragment> {
      auto state = encode(notes, before);
      if (!state) return state.error();
      const auto view = kvmeld::llama::view_state(state->bytes(), geometry_);
      if (!view) return view.error();
      Tokens all = head(before);
      append(all, notes);
      const kvmeld::SealOptions options{
          .tokens = all,
          .positions = state->positions(),
          .drop_first = static_cast<std::int64_t>(all.size() - notes.size()),
          .context = {prefix_fragment_.id(), kvmeld::lead_in_digest(before)}};
      return first == nullptr ? kvmeld::seal(view->cache, options)
                              : kvmeld::with_variant(*first, view->cache, options);
    };
    const auto led = encoded(lead_in, nullptr);
    return led && variant ? encoded({}, &*led) : led;
  }

  /// Renders a set into the engine, in the place of whatever was there.
  template <class M>
  kvmeld::Result<Taken> take(const kvmeld::FragmentSet& set, const M& merger) {
    forget();
    const Stopwatch render;
    const auto plan = kvmeld::plan(set, merger, {.geometry = *geometry_});
    if (!plan) return plan.error();
    auto blob = make_state(plan->positions(), plan->token_ids());
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, blob->mutable_ref(),
                                    {.content_digest = true});
    if (!report) return report.error();
    Taken taken{*report->content_digest, static_cast<llama_pos>(report->tokens),
                render.milliseconds(), 0};
    const Stopwatch import;
    if (kvmeld::Status status = load(*blob); !status) return status;
    taken.import_ms = import.milliseconds();
    return taken;
  }
  /// Bytes to render into, for `load`.
  [[nodiscard]] kvmeld::Result<kvmeld::llama::StateBlob> make_state(
      std::span<const std::int64_t> positions, std::span<const kvmeld::TokenId> ids) const {
    return kvmeld::llama::make_state(geometry_, form_->form(), positions, ids);
  }
  /// Puts rendered bytes into the engine, in the place of whatever was there.
  kvmeld::Status load(const kvmeld::llama::StateBlob& blob) {
    forget();
    return kvmeld::llama::write(engine_->context(), 0, 1, blob);
  }
  /// Reads all notes as text, the ceiling.
  kvmeld::Result<llama_pos> read_text(const std::vector<std::vector<std::string>>& notes) {
    forget();
    Tokens all = prefix_;
    for (const auto& one : notes) append(all, tokens(one));
    if (!engine_->prefill(all, 0, 0)) return refused("the engine refused the whole text");
    return static_cast<llama_pos>(all.size());
  }

  /// Asks on the cache in place, which holds `length` tokens; `greedy_tokens` 0: only logits and
  /// ranks.
  kvmeld::Result<std::vector<Answer>> answers(const std::vector<Question>& questions,
                                              llama_pos length, std::size_t greedy_tokens = 8) {
    std::vector<Prompt> prompts;
    for (const Question& question : questions)
      prompts.push_back(make_prompt(*engine_, frame_, question.last));
    std::vector<Answer> out = ask(*engine_, length, prompts, 16, nullptr, greedy_tokens);
    if (out.empty()) return refused("the engine refused a question");
    return out;
  }
  /// Questions of a set that are answered right (greedily) from the cache in place, which holds
  /// `length` tokens.
  kvmeld::Result<std::size_t> right_answers(const std::vector<Question>& questions,
                                            llama_pos length) {
    const auto given = answers(questions, length);
    if (!given) return given.error();
    std::size_t right = 0;
    for (std::size_t i = 0; i < given->size(); ++i) {
      right += (*given)[i].named &&
                       questions[i].last.candidates[*(*given)[i].named] == questions[i].last.answer
                   ? 1U
                   : 0U;
    }
    return right;
  }

 private:
  NoteAgent() = default;
  static kvmeld::Status refused(const std::string& why) {
    return {kvmeld::ErrorCode::engine_failure, why};
  }

  void forget() {
    engine_->forget_all();
    head_.clear();
  }
  [[nodiscard]] Tokens head(const Tokens& lead_in) const {
    Tokens all = prefix_;
    append(all, lead_in);
    return all;
  }
  /// Fragments behind one lead-in share its encoding, which stays in a sequence of its own until
  /// something else is loaded.
  kvmeld::Result<kvmeld::llama::SequenceState> encode(const Tokens& notes, const Tokens& lead_in) {
    constexpr llama_seq_id kept = 60;  // beyond those that questions use
    const Tokens before = head(lead_in);
    if (head_ != before) {
      forget();
      if (!engine_->prefill(prefix_, 0, kept)) return refused("the engine refused the prefix");
      if (!engine_->prefill(lead_in, static_cast<llama_pos>(prefix_.size()), kept))
        return refused("the engine refused the lead-in");
      head_ = before;
    }
    engine_->forget(0);
    engine_->branch(kept, 0);
    if (!engine_->prefill(notes, static_cast<llama_pos>(before.size()), 0))
      return refused("the engine refused the notes");
    auto state = kvmeld::llama::read(engine_->context(), 0, geometry_);
    engine_->forget(0);
    return state;
  }
  kvmeld::Status read_prefix() {
    forget();
    if (!engine_->prefill(prefix_, 0, 0)) return refused("the engine refused the prefix");
    auto state = kvmeld::llama::read(engine_->context(), 0, geometry_);
    if (!state) return state.error();
    form_ = std::make_unique<kvmeld::llama::SequenceState>(*std::move(state));
    const auto view = kvmeld::llama::view_state(form_->bytes(), geometry_);
    if (!view) return view.error();
    auto sealed = kvmeld::seal(
        view->cache,
        {.role = kvmeld::Role::prefix, .tokens = prefix_, .positions = form_->positions()});
    if (!sealed) return sealed.error();
    prefix_fragment_ = *std::move(sealed);
    return {};
  }

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<const kvmeld::Geometry> geometry_;
  Frame frame_;
  Tokens prefix_, lead_in_, head_;
  std::unique_ptr<kvmeld::llama::SequenceState> form_;
  kvmeld::Fragment prefix_fragment_;
};

}  // namespace example
