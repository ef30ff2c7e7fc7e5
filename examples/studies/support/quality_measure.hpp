#pragma once
// What is measured of one way to hold the passages: the gold answer and a passage teacher-forced
// against full text, and a free answer.

#include "asking.hpp"
#include "engine.hpp"
#include "quality_score.hpp"

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace quality {

using example::Engine;
using example::Tokens;

/// Next-token logits, one vector a token.
using Logits = std::vector<std::vector<float>>;

/// A sequence of the engine that a question is put to, and its length.
struct Held {
  llama_seq_id sequence = 0;
  llama_pos length = 0;
};

/// Makes one distribution of those that the sequences give for the same next token.
using Join = std::function<std::vector<float>(std::span<const std::vector<float>>)>;

/// Puts tokens behind one sequence, or behind several at once whose logits are joined; the
/// sequences themselves stay as they were.
class Asker {
 public:
  /// Uses the sequences from `first_free` on, as many as are held.
  Asker(Engine& engine, std::vector<Held> held, Join join, llama_seq_id first_free)
      : engine_(engine), held_(std::move(held)), join_(std::move(join)), first_(first_free) {
    for (std::size_t k = 0; k < held_.size(); ++k) engine_.branch(held_[k].sequence, branch(k));
  }
  Asker(const Asker&) = delete;
  Asker& operator=(const Asker&) = delete;
  ~Asker() {
    for (std::size_t k = 0; k < held_.size(); ++k) engine_.forget(branch(k));
  }

  /// Logits behind each of the last `outputs` tokens; empty where the engine refused.
  [[nodiscard]] Logits feed(std::span<const llama_token> tokens, std::size_t outputs) {
    example::Batch batch;
    std::vector<std::vector<std::int32_t>> rows(held_.size());
    for (std::size_t k = 0; k < held_.size(); ++k)
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const bool output = i + outputs >= tokens.size();
        const llama_pos at = held_[k].length + fed_ + static_cast<llama_pos>(i);
        const std::int32_t row = batch.add(tokens[i], at, branch(k), output);
        if (output) rows[k].push_back(row);
      }
    if (batch.empty() || !engine_.decode(batch)) return {};
    fed_ += static_cast<llama_pos>(tokens.size());
    Logits out;
    for (std::size_t i = 0; i < outputs; ++i) {
      Logits each;
      for (std::size_t k = 0; k < held_.size(); ++k) {
        const std::span<const float> logits = engine_.logits(rows[k][i]);
        each.emplace_back(logits.begin(), logits.end());
      }
      out.push_back(join_ ? join_(each) : std::move(each[0]));
    }
    return out;
  }

  [[nodiscard]] std::size_t fed() const { return static_cast<std::size_t>(fed_); }
  /// Forgets what was fed behind the first `kept` tokens.
  void rewind(std::size_t kept) {
    fed_ = static_cast<llama_pos>(kept);
    for (std::size_t k = 0; k < held_.size(); ++k)
      llama_memory_seq_rm(engine_.memory(), branch(k), held_[k].length + fed_, -1);
  }

 private:
  [[nodiscard]] llama_seq_id branch(std::size_t k) const {
    return first_ + static_cast<llama_seq_id>(k);
  }

  Engine& engine_;
  std::vector<Held> held_;
  Join join_;
  llama_seq_id first_;
  llama_pos fed_ = 0;
};

/// What is asked of every method, as tokens: a question with its gold answer, and a request to
/// repeat a passage with the passage's beginning.
struct Asked {
  Tokens question, gold;
  Tokens request, passage;
  std::vector<std::string> answers;
};

/// Full text's distributions, kept for the other methods of the question.
struct Reference {
  Logits gold, passage;
};

struct Figures {
  double kl = 0, nll = 0, recall = 0;
  Score score;
  std::string text;        ///< the free answer
  double question_ms = 0;  ///< until the first token of the answer is known
};

namespace detail {

/// Logits that predict each token of `forced` behind what was fed, whose last logits are `first`.
inline Logits teacher_forced(Asker& asker, std::vector<float> first,
                             std::span<const llama_token> forced) {
  Logits out{std::move(first)};
  if (forced.size() == 1) return out;
  Logits rest = asker.feed(forced.first(forced.size() - 1), forced.size() - 1);
  if (rest.empty()) return {};
  for (std::vector<float>& logits : rest) out.push_back(std::move(logits));
  return out;
}

inline double mean_divergence(const Logits& full, const Logits& other) {
  double sum = 0;
  for (std::size_t i = 0; i < full.size(); ++i) sum += example::divergence(full[i], other[i]);
  return sum / static_cast<double>(full.size());
}

}  // namespace detail

/// Puts what is asked to the sequences held. Fills `reference` where it is empty, and compares with
/// it. Null where the engine refused.
inline std::optional<Figures> measure(Engine& engine, const std::vector<Held>& held,
                                      const Join& join, llama_seq_id first_free, const Asked& asked,
                                      Reference& reference, std::size_t greedy_tokens) {
  Figures out;
  Logits gold, passage;
  {
    const example::Stopwatch watch;
    Asker asker(engine, held, join, first_free);
    const Logits first = asker.feed(asked.question, 1);
    if (first.empty()) return std::nullopt;
    out.question_ms = watch.milliseconds();
    gold = detail::teacher_forced(asker, first[0], asked.gold);
    asker.rewind(asked.question.size());
    std::vector<float> next = first[0];
    for (std::size_t step = 0; step < greedy_tokens; ++step) {
      const llama_token token = example::detail::top_token(next);
      if (engine.ends(token)) break;
      out.text += engine.text(token);
      if (out.text.find('\n') != std::string::npos || step + 1 == greedy_tokens) break;
      Logits more = asker.feed({&token, 1}, 1);
      if (more.empty()) return std::nullopt;
      next = std::move(more[0]);
    }
  }
  {
    Asker asker(engine, held, join, first_free);
    const Logits first = asker.feed(asked.request, 1);
    if (first.empty()) return std::nullopt;
    passage = detail::teacher_forced(asker, first[0], asked.passage);
  }
  if (gold.empty() || passage.empty()) return std::nullopt;
  for (std::size_t i = 0; i < gold.size(); ++i)
    out.nll += (example::log_sum_exp(gold[i]) - gold[i][static_cast<std::size_t>(asked.gold[i])]) /
               static_cast<double>(gold.size());
  out.score = best_score(out.text, asked.answers);
  if (reference.gold.empty()) reference = {gold, passage};
  out.kl = detail::mean_divergence(reference.gold, gold);
  out.recall = detail::mean_divergence(reference.passage, passage);
  return out;
}

}  // namespace quality
