#pragma once
// An ask of a fact set as the tokens that an engine is given.

#include "asking.hpp"
#include "dataset.hpp"
#include "prompt.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace example {

inline Prompt make_prompt(const Engine& engine, const Frame& frame, const Ask& ask) {
  Prompt prompt;
  prompt.tokens = engine.tokens(frame.middle, true);
  const Tokens started = engine.tokens(ask.start);
  append(prompt.tokens, started);
  prompt.candidates = ask.candidates;
  for (const std::string& candidate : ask.candidates) {
    Tokens word = engine.tokens(ask.start + " " + candidate);
    word.erase(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(
                                                std::min(started.size(), word.size() - 1)));
    prompt.words.push_back(std::move(word));
  }
  return prompt;
}

}  // namespace example
