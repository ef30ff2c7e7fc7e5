#pragma once
// Questions over passages in the documented JSONL form, and how passages are dealt to agents.

#include "dataset.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace quality {

using Json = nlohmann::json;

struct Passage {
  std::string title, text;
};
inline void from_json(const Json& json, Passage& passage) {
  json.at("title").get_to(passage.title);
  json.at("text").get_to(passage.text);
}

/// One line of the file: `{id, source, question, answers, passages: [{title, text}]}`. The first of
/// `answers` is the one that figures are taken of; a free answer may match any.
struct Item {
  std::string id, source, question;
  std::vector<std::string> answers;
  std::vector<Passage> passages;
};
inline void from_json(const Json& json, Item& item) {
  json.at("id").get_to(item.id);
  item.source = json.value("source", "");
  json.at("question").get_to(item.question);
  json.at("answers").get_to(item.answers);
  json.at("passages").get_to(item.passages);
}

/// Null where the file cannot be read or a line is not of the form; `why` says which.
inline std::optional<std::vector<Item>> load(const std::string& path, std::string& why) {
  std::ifstream file(path);
  if (!file) return why = "cannot read " + path, std::nullopt;
  std::vector<Item> items;
  std::string line;
  for (std::size_t number = 1; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    const Json json = Json::parse(line, nullptr, false);
    try {
      items.push_back(json.get<Item>());
    } catch (const Json::exception&) {
      why = path + ":" + std::to_string(number) +
            " is not {id, source, question, answers, passages: [{title, text}]}";
      return std::nullopt;
    }
    const Item& item = items.back();
    if (item.answers.empty() || item.passages.empty())
      return why = path + ":" + std::to_string(number) + " has no answer or no passage",
             std::nullopt;
  }
  return items;
}

/// Which passages each agent reads: shuffled by the seed, then dealt out in turn. With fewer
/// passages than agents, only as many agents as passages read one.
inline std::vector<std::vector<std::size_t>> deal(const Item& item, std::size_t agents,
                                                  std::uint64_t seed) {
  std::uint64_t mixed = seed;
  for (const char c : item.id) mixed = mixed * 1099511628211u + static_cast<unsigned char>(c);
  example::Draw draw(mixed);
  std::vector<std::size_t> order(item.passages.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  draw.shuffle(order);
  std::vector<std::vector<std::size_t>> out(std::min(agents, order.size()));
  for (std::size_t i = 0; i < order.size(); ++i) out[i % out.size()].push_back(order[i]);
  return out;
}

/// A passage as it stands in a prompt.
inline std::string line_of(const Passage& passage) {
  return passage.title + ": " + passage.text + "\n";
}

}  // namespace quality
