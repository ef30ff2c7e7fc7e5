#pragma once
// Questions put to one finished cache: next-token logits, greedy answer, and the candidates ranked
// by log-probability.

#include "engine.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace example {

struct Prompt {
  Tokens tokens;  ///< Everything after the notes.
  std::vector<std::string> candidates;
  std::vector<Tokens> words;  ///< Tokens that each candidate would add.
};

struct Answer {
  std::vector<float> logits;         ///< Of the first answer token.
  std::string text;                  ///< Greedy, cut at the first candidate named.
  std::optional<std::size_t> named;  ///< The candidate that `text` names first.
  std::size_t ranked = 0;            ///< The candidate of highest log-probability.
};

/// log(sum(exp(logits))), accumulated in double.
inline double log_sum_exp(std::span<const float> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - top);
  return top + std::log(sum);
}

/// Kullback-Leibler divergence KL(p || q) in nats of two next-token distributions given by their
/// logits.
inline double divergence(std::span<const float> p, std::span<const float> q) {
  const double p_total = log_sum_exp(p);
  const double q_total = log_sum_exp(q);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double log_p = p[i] - p_total;
    if (log_p > -30) sum += std::exp(log_p) * (log_p - (q[i] - q_total));
  }
  return sum;
}

namespace detail {

inline std::string lower(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

/// The candidate whose spelling comes first in `text`, as a whole word at its start.
inline std::optional<std::size_t> first_named(const std::string& text,
                                              const std::vector<std::string>& candidates) {
  const std::string in = lower(text);
  std::optional<std::size_t> best;
  std::size_t best_at = std::string::npos;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const std::size_t at = in.find(lower(candidates[i]));
    if (at == std::string::npos || at >= best_at) continue;
    if (at > 0 && in[at - 1] >= 'a' && in[at - 1] <= 'z') continue;
    best = i;
    best_at = at;
  }
  return best;
}

inline llama_token top_token(std::span<const float> logits) {
  return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Log-probability of every candidate after the cache of `sequence`; words of several tokens take
/// one decode, all in a batch over branches of the sequence.
inline std::size_t rank(Engine& engine, llama_seq_id sequence, llama_pos length,
                        std::span<const float> logits, const std::vector<Tokens>& words,
                        llama_seq_id first_branch) {
  const double total = log_sum_exp(logits);
  std::vector<double> score(words.size());
  std::vector<std::vector<std::int32_t>> rows(words.size());
  Batch batch;
  for (std::size_t i = 0; i < words.size(); ++i) {
    score[i] = logits[static_cast<std::size_t>(words[i][0])] - total;
    if (words[i].size() == 1) continue;
    const llama_seq_id branch = first_branch + static_cast<llama_seq_id>(i);
    engine.branch(sequence, branch);
    for (std::size_t k = 0; k + 1 < words[i].size(); ++k)
      rows[i].push_back(batch.add(words[i][k], length + static_cast<llama_pos>(k), branch, true));
  }
  if (!batch.empty() && engine.decode(batch)) {
    for (std::size_t i = 0; i < words.size(); ++i)
      for (std::size_t k = 0; k < rows[i].size(); ++k) {
        const std::span<const float> next = engine.logits(rows[i][k]);
        score[i] += next[static_cast<std::size_t>(words[i][k + 1])] - log_sum_exp(next);
      }
    for (std::size_t i = 0; i < words.size(); ++i)
      engine.forget(first_branch + static_cast<llama_seq_id>(i));
  }
  return static_cast<std::size_t>(std::max_element(score.begin(), score.end()) - score.begin());
}

}  // namespace detail

/// Asks every prompt on its own branch of sequence 0, which holds `length` tokens and is left as it
/// was.
///
/// The first prompt is decoded alone and timed (`first_ms`); the others share one batch, and the
/// tokens that all prompts begin with. Sequences 1 … prompts.size() and those from `first_branch`
/// on are used and emptied. Empty where the engine refused a batch.
inline std::vector<Answer> ask(Engine& engine, llama_pos length, const std::vector<Prompt>& prompts,
                               llama_seq_id first_branch, double* first_ms,
                               std::size_t greedy_tokens = 8) {
  const std::size_t count = prompts.size();
  std::size_t shared = prompts[0].tokens.size() - 1;
  for (const Prompt& prompt : prompts) {
    const auto common = std::mismatch(prompt.tokens.begin(), prompt.tokens.end() - 1,
                                      prompts[0].tokens.begin(), prompts[0].tokens.end() - 1);
    shared = std::min(shared, static_cast<std::size_t>(common.first - prompt.tokens.begin()));
  }
  std::vector<Answer> answers(count);
  const auto sequence_of = [](std::size_t i) { return static_cast<llama_seq_id>(i) + 1; };

  const Stopwatch watch;
  engine.branch(0, 1);
  if (!engine.prefill(prompts[0].tokens, length, 1, true)) return {};
  answers[0].logits.assign(engine.last_logits().begin(), engine.last_logits().end());
  if (first_ms != nullptr) *first_ms = watch.milliseconds();

  Batch batch;
  std::vector<std::int32_t> rows(count);
  for (std::size_t i = 1; i < count; ++i) {
    llama_memory_seq_cp(engine.memory(), 1, sequence_of(i), 0,
                        length + static_cast<llama_pos>(shared));
    for (std::size_t t = shared; t < prompts[i].tokens.size(); ++t)
      rows[i] = batch.add(prompts[i].tokens[t], length + static_cast<llama_pos>(t), sequence_of(i),
                          t + 1 == prompts[i].tokens.size());
  }
  if (count > 1) {
    if (!engine.decode(batch)) return {};
    for (std::size_t i = 1; i < count; ++i)
      answers[i].logits.assign(engine.logits(rows[i]).begin(), engine.logits(rows[i]).end());
  }
  for (std::size_t i = 0; i < count; ++i)
    answers[i].ranked = detail::rank(engine, sequence_of(i),
                                     length + static_cast<llama_pos>(prompts[i].tokens.size()),
                                     answers[i].logits, prompts[i].words, first_branch);

  std::vector<llama_token> next(count);
  std::vector<bool> done(count, false);
  for (std::size_t i = 0; i < count; ++i) next[i] = detail::top_token(answers[i].logits);
  for (std::size_t step = 0; step < greedy_tokens; ++step) {
    Batch continued;
    for (std::size_t i = 0; i < count; ++i) {
      if (done[i]) continue;
      if (engine.ends(next[i])) {
        done[i] = true;
        continue;
      }
      answers[i].text += engine.text(next[i]);
      answers[i].named = detail::first_named(answers[i].text, prompts[i].candidates);
      done[i] = answers[i].named.has_value() || step + 1 == greedy_tokens;
      if (!done[i])
        rows[i] =
            continued.add(next[i], length + static_cast<llama_pos>(prompts[i].tokens.size() + step),
                          sequence_of(i), true);
    }
    if (continued.empty()) break;
    if (!engine.decode(continued)) return {};
    for (std::size_t i = 0; i < count; ++i)
      if (!done[i]) next[i] = detail::top_token(engine.logits(rows[i]));
  }
  for (std::size_t i = 0; i < count; ++i) engine.forget(sequence_of(i));
  return answers;
}

}  // namespace example
