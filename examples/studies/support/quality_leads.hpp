#pragma once
// The text that each agent reads before its own passages and drops, by kind.

#include "engine.hpp"
#include "lead_in.hpp"
#include "quality_data.hpp"
#include "quality_method.hpp"
#include "quality_score.hpp"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace quality {

inline std::set<std::string> words_of(const std::string& text) {
  const std::vector<std::string> words = normalised(text);
  return {words.begin(), words.end()};
}

/// The passage of another question that shares most words with `text`: FusionRAG's choice of real
/// text as a dropped prefix (arXiv 2601.12904), by words where it takes embeddings.
inline std::string most_similar(const std::vector<Item>& items, const Item& own,
                                const std::string& text) {
  const std::set<std::string> wanted = words_of(text);
  std::string best;
  std::size_t most = 0;
  for (const Item& item : items) {
    if (item.id == own.id) continue;
    for (const Passage& passage : item.passages) {
      const bool in_own =
          std::any_of(own.passages.begin(), own.passages.end(),
                      [&](const Passage& mine) { return mine.text == passage.text; });
      if (in_own) continue;
      std::size_t shared = 0;
      for (const std::string& word : words_of(line_of(passage))) shared += wanted.count(word);
      if (shared > most) {
        most = shared;
        best = line_of(passage);
      }
    }
  }
  return best;
}

/// One lead-in an agent. `shares` are the passages that each agent reads.
inline std::vector<example::Tokens> leads_of(const example::Engine& engine, Method::Lead kind,
                                             const std::vector<Item>& items, const Item& item,
                                             const std::vector<std::vector<std::size_t>>& shares) {
  std::vector<example::Tokens> out;
  for (std::size_t agent = 0; agent < shares.size(); ++agent) {
    switch (kind) {
      case Method::Lead::none:
        out.emplace_back();
        break;
      case Method::Lead::bos:  // EPIC's LegoLink-0, arXiv 2410.15332
        out.emplace_back(4, llama_vocab_bos(engine.vocabulary()));
        break;
      case Method::Lead::neutral:
        out.push_back(engine.tokens(example::lead_in(8)));
        break;
      case Method::Lead::similar: {
        std::string own;
        for (const std::size_t p : shares[agent]) own += line_of(item.passages[p]);
        out.push_back(engine.tokens(most_similar(items, item, own)));
        break;
      }
      case Method::Lead::neighbour: {  // what stands right before in the merged order
        const auto& before = shares[(agent + shares.size() - 1) % shares.size()];
        out.push_back(engine.tokens(line_of(item.passages[before.back()])));
        break;
      }
    }
  }
  return out;
}

}  // namespace quality
