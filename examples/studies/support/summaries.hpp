#pragma once
// Text summaries that agents write of their notes, the rival of moving caches.

#include "asking.hpp"
#include "engine.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace example {

/// Every agent but the first sums up its notes, read behind `prefix` and asked by `request`, in at
/// most `share` of their tokens, all in one batch. False where the engine refused.
inline bool write_summaries(Engine& engine, const Tokens& prefix, const std::vector<Tokens>& notes,
                            const Tokens& request, double share, std::vector<Tokens>& summaries) {
  engine.forget_all();
  const std::size_t count = notes.size();
  summaries.assign(count, {});
  std::vector<llama_token> next(count);
  std::vector<llama_pos> at(count);
  std::vector<bool> done(count, false);
  done[0] = true;
  if (!engine.prefill(prefix, 0, 0)) return false;
  for (std::size_t i = 1; i < count; ++i) {
    const auto sequence = static_cast<llama_seq_id>(i);
    engine.branch(0, sequence);
    Tokens prompt = notes[i];
    append(prompt, request);
    if (!engine.prefill(prompt, static_cast<llama_pos>(prefix.size()), sequence, true))
      return false;
    next[i] = detail::top_token(engine.last_logits());
    at[i] = static_cast<llama_pos>(prefix.size() + prompt.size());
  }
  for (;;) {
    Batch batch;
    std::vector<std::int32_t> rows(count);
    for (std::size_t i = 1; i < count; ++i) {
      done[i] =
          done[i] || engine.ends(next[i]) ||
          static_cast<double>(summaries[i].size()) >= share * static_cast<double>(notes[i].size());
      if (done[i]) continue;
      summaries[i].push_back(next[i]);
      rows[i] = batch.add(next[i], at[i]++, static_cast<llama_seq_id>(i), true);
    }
    if (batch.empty()) break;
    if (!engine.decode(batch)) return false;
    for (std::size_t i = 1; i < count; ++i)
      if (!done[i]) next[i] = detail::top_token(engine.logits(rows[i]));
  }
  engine.forget_all();
  return true;
}

/// What all the summaries say, as the tokens of their texts; `bytes` gains those of the texts.
inline Tokens joined(const Engine& engine, const std::vector<Tokens>& summaries,
                     std::size_t& bytes) {
  Tokens all;
  for (const Tokens& summary : summaries) {
    std::string text = summary.empty() ? "" : " ";
    for (const llama_token token : summary) text += engine.text(token);
    bytes += text.size();
    append(all, engine.tokens(text));
  }
  return all;
}

}  // namespace example
