#pragma once
// One model that reads notes behind the shared prefix: what it holds of them then, as a fragment,
// and what it answers.

#include "asking.hpp"
#include "engine.hpp"
#include "fact_text.hpp"
#include "prompt.hpp"

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/policies/token_match.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace example {

class Reader {
 public:
  static kvmeld::Result<std::unique_ptr<Reader>> open(const std::string& model, int threads) {
    auto reader = std::unique_ptr<Reader>(new Reader);
    reader->engine_ =
        Engine::open({.model = model, .threads = threads, .cells = 4096, .sequences = 64});
    if (!reader->engine_) return refused("llama.cpp cannot open " + model);
    auto geometry =
        kvmeld::llama::geometry(reader->engine_->model(), reader->engine_->parameters(),
                                {.adapters = kvmeld::Adapters::none(), .gguf_path = model});
    if (!geometry) return geometry.error();
    reader->geometry_ = std::make_shared<const kvmeld::Geometry>(*std::move(geometry));
    reader->frame_ =
        make_frame(*reader->engine_, "You answer questions about the notes below. Notes:",
                   "Complete the statement as the notes say.");
    reader->prefix_ = reader->engine_->tokens(reader->frame_.prefix, true, true);
    return reader;
  }

  [[nodiscard]] Engine& engine() { return *engine_; }
  [[nodiscard]] const std::shared_ptr<const kvmeld::Geometry>& geometry() const {
    return geometry_;
  }

  [[nodiscard]] Tokens tokens(const std::vector<std::string>& sentences) const {
    Tokens out;
    for (const std::string& sentence : sentences) append(out, engine_->tokens(sentence));
    return out;
  }
  /// Where each token's text ends and begins, for models with different tokenizers.
  [[nodiscard]] std::vector<kvmeld::CharSpan> spans(const Tokens& tokens) const {
    std::vector<kvmeld::CharSpan> out;
    std::int64_t at = 0;
    for (const llama_token token : tokens) {
      const std::int64_t end = at + static_cast<std::int64_t>(engine_->text(token).size());
      out.push_back({at, end});
      at = end;
    }
    return out;
  }

  /// Reads notes behind the prefix; sequence 0 holds both then. Returns its length.
  kvmeld::Result<llama_pos> read(const Tokens& notes) {
    if (kvmeld::Status status = only_prefix(); !status) return status;
    if (!engine_->prefill(notes, static_cast<llama_pos>(prefix_.size()), 0))
      return refused("the engine refused the notes");
    return static_cast<llama_pos>(prefix_.size() + notes.size());
  }
  /// Reads notes and seals what the cache holds of them, without the prefix.
  kvmeld::Result<kvmeld::Fragment> sealed(const Tokens& notes) {
    if (auto length = read(notes); !length) return length.error();
    auto state = kvmeld::llama::read(engine_->context(), 0, geometry_);
    if (!state) return state.error();
    Tokens all = prefix_;
    append(all, notes);
    return kvmeld::seal(state->view(), {.tokens = all,
                                        .positions = state->positions(),
                                        .drop_first = static_cast<std::int64_t>(prefix_.size())});
  }

  /// Renders a set of fragments behind this model's own prefix, which it reads itself. Returns the
  /// length of the sequence.
  template <class M>
  kvmeld::Result<llama_pos> take(const kvmeld::FragmentSet& set, const M& merger) {
    if (kvmeld::Status status = only_prefix(); !status) return status;
    const auto form = kvmeld::llama::read(engine_->context(), 0, geometry_);
    if (!form) return form.error();
    kvmeld::Target target{.geometry = *geometry_};
    target.first_position = static_cast<std::int64_t>(prefix_.size());
    target.prefix_in_place = true;
    const auto plan = kvmeld::plan(set, merger, target);
    if (!plan) return plan.error();
    auto blob =
        kvmeld::llama::make_state(geometry_, form->form(), plan->positions(), plan->token_ids());
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, blob->mutable_ref());
    if (!report) return report.error();
    if (kvmeld::Status status = kvmeld::llama::append(engine_->context(), 0, 1, *blob); !status)
      return status;
    return static_cast<llama_pos>(prefix_.size()) + static_cast<llama_pos>(report->tokens);
  }
  kvmeld::Result<llama_pos> forget() {
    if (kvmeld::Status status = only_prefix(); !status) return status;
    return static_cast<llama_pos>(prefix_.size());
  }

  /// Answers from sequence 0, which holds `length` tokens and is left as it was.
  kvmeld::Result<std::vector<Answer>> answers(const std::vector<Ask>& questions, llama_pos length) {
    std::vector<Prompt> prompts;
    for (const Ask& question : questions) {
      Prompt prompt;
      prompt.tokens = engine_->tokens(frame_.middle, true);
      const Tokens started = engine_->tokens(question.start);
      append(prompt.tokens, started);
      prompt.candidates = question.candidates;
      for (const std::string& candidate : question.candidates) {
        Tokens word = engine_->tokens(question.start + " " + candidate);
        word.erase(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(
                                                    std::min(started.size(), word.size() - 1)));
        prompt.words.push_back(std::move(word));
      }
      prompts.push_back(std::move(prompt));
    }
    std::vector<Answer> out = ask(*engine_, length, prompts, 16, nullptr);
    if (out.empty()) return refused("the engine refused a question");
    return out;
  }

 private:
  Reader() = default;
  static kvmeld::Status refused(const std::string& why) {
    return {kvmeld::ErrorCode::engine_failure, why};
  }
  kvmeld::Status only_prefix() {
    engine_->forget_all();
    return engine_->prefill(prefix_, 0, 0) ? kvmeld::Status()
                                           : refused("the engine refused the prefix");
  }

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<const kvmeld::Geometry> geometry_;
  Frame frame_;
  Tokens prefix_;
};

}  // namespace example
