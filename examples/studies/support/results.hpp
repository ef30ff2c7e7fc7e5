#pragma once
// Rows of an example's table: kept in one JSON file, so that a stopped run goes on where it was,
// and summed up with intervals.

#include "dataset.hpp"
#include "study.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace example {

using Json = nlohmann::json;

/// One (fact set, method): counts over its questions, means over them where a figure is no count.
struct Row {
  std::size_t agents = 0;
  std::string task, method;
  std::uint64_t seed = 0;
  std::size_t fact_set = 0;
  std::size_t context_tokens = 0;  ///< Asked for, a prompt; 0: the facts alone.
  std::size_t facts = 0;           ///< In the set.
  std::size_t lead_in_sentences = 0;
  std::size_t variants = 1;  ///< 2: whoever comes first is read in its encoding without lead-in.
  std::size_t right = 0, total = 0, ranked_right = 0;
  double kl = 0;
  std::size_t prefilled_tokens = 0, bytes = 0, length = 0;
  double first_token_ms = 0, export_ms = 0, merge_ms = 0, import_ms = 0, recompute_ms = 0,
         prefill_ms = 0, decode_ms = 0;

  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Row, agents, task, method, seed, fact_set, context_tokens, facts,
                                 lead_in_sentences, variants, right, total, ranked_right, kl,
                                 prefilled_tokens, bytes, length, first_token_ms, export_ms,
                                 merge_ms, import_ms, recompute_ms, prefill_ms, decode_ms)

  /// What rows must share to be summed up together.
  [[nodiscard]] auto group() const {
    return std::tie(agents, task, context_tokens, facts, lead_in_sentences, variants);
  }
  [[nodiscard]] auto set() const { return std::pair(seed, fact_set); }
};

struct Summary {
  std::size_t agents = 0;
  std::string task, method;
  std::size_t context_tokens = 0, facts = 0, lead_in_sentences = 0, variants = 1, fact_sets = 0;
  std::size_t right = 0, total = 0, ranked_right = 0;
  /// Right ÷ full text's right on the same questions, and its 95 % interval.
  double ratio = 0, low = 0, high = 0;
  double kl = 0, first_token_ms = 0, export_ms = 0, merge_ms = 0, import_ms = 0, recompute_ms = 0,
         prefill_ms = 0, decode_ms = 0, prefilled_tokens = 0, bytes = 0;

  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Summary, agents, task, method, context_tokens, facts,
                                 lead_in_sentences, variants, fact_sets, right, total, ranked_right,
                                 ratio, low, high, kl, first_token_ms, export_ms, merge_ms,
                                 import_ms, recompute_ms, prefill_ms, decode_ms, prefilled_tokens,
                                 bytes)
};

/// Bootstrap over fact sets, each drawn with both its counts: (right, full text's right) pairs to a
/// ratio's 95 % interval.
inline std::pair<double, double> interval(const std::vector<std::pair<double, double>>& sets) {
  constexpr std::size_t draws = 4000;
  Draw draw(20);
  std::vector<double> ratios;
  for (std::size_t d = 0; d < draws; ++d) {
    double right = 0, full = 0;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      const auto& [r, f] = sets[draw.below(sets.size())];
      right += r;
      full += f;
    }
    ratios.push_back(full > 0 ? right / full : 0);
  }
  std::sort(ratios.begin(), ratios.end());
  return {ratios[draws / 40], ratios[draws - 1 - draws / 40]};
}

class Results {
 public:
  /// Takes over the rows of `path` if they are of the same model; otherwise starts anew.
  Results(std::string path, std::string model) : path_(std::move(path)), model_(std::move(model)) {
    take(path_);
  }

  /// Adds the rows of another file of the same model, but for those that are there.
  void take(const std::string& path) {
    std::ifstream file(path);
    if (!file) return;
    const Json json = Json::parse(file, nullptr, false);
    if (json.is_discarded() || json.value("model", "") != model_) return;
    for (const Json& entry : json.at("rows"))
      if (const Row row = entry.get<Row>(); !has(row)) rows_.push_back(row);
    equal_ = equal_ && (json.value("content_digests_equal_under_permutation", true) ||
                        json.value("permuted_renders", 0) == 0);
    for (const Json& what : json.value("permuted", Json::array())) {
      if (permuted(what.at("what"))) continue;
      renders_ += what.at("renders").get<std::size_t>();
      checked_.push_back(what);
    }
  }

  [[nodiscard]] bool has(const Row& like) const {
    return std::any_of(rows_.begin(), rows_.end(), [&](const Row& row) {
      return row.group() == like.group() && row.set() == like.set() && row.method == like.method;
    });
  }
  void add(Row row) { rows_.push_back(std::move(row)); }

  [[nodiscard]] bool permuted(const std::string& what) const {
    return std::any_of(checked_.begin(), checked_.end(),
                       [&](const Json& entry) { return entry.at("what") == what; });
  }
  void add_permutations(const std::string& what, std::size_t renders, bool equal) {
    checked_.push_back({{"what", what}, {"renders", renders}});
    renders_ += renders;
    equal_ = equal_ && equal;
  }
  [[nodiscard]] std::size_t permuted_renders() const { return renders_; }
  [[nodiscard]] bool digests_equal() const { return equal_ && renders_ > 0; }

  /// One entry a method of each group, in the order of first appearance.
  [[nodiscard]] std::vector<Summary> summary() const {
    std::vector<Summary> out;
    for (const Row& first : rows_) {
      const bool seen = std::any_of(out.begin(), out.end(), [&](const Summary& s) {
        return s.method == first.method &&
               std::tie(s.agents, s.task, s.context_tokens, s.facts, s.lead_in_sentences,
                        s.variants) == first.group();
      });
      if (!seen) out.push_back(sum(first));
    }
    std::stable_sort(out.begin(), out.end(), [](const Summary& a, const Summary& b) {
      return std::tie(a.task, a.context_tokens, a.facts, a.lead_in_sentences, a.variants,
                      a.agents) <
             std::tie(b.task, b.context_tokens, b.facts, b.lead_in_sentences, b.variants, b.agents);
    });
    return out;
  }

  [[nodiscard]] bool save() const {
    return study::write_results(path_,
                                {{"model", model_},
                                 {"rows", rows_},
                                 {"summary", summary()},
                                 {"content_digests_equal_under_permutation", digests_equal()},
                                 {"permuted_renders", renders_},
                                 {"permuted", checked_}});
  }

  void print() const {
    std::string group;
    for (const Summary& s : summary()) {
      const std::string now =
          s.task + ", " + std::to_string(s.agents) + " agents, " + std::to_string(s.facts) +
          " facts a set" +
          (s.context_tokens > 0 ? ", prompts of " + std::to_string(s.context_tokens) + " tokens"
                                : "") +
          ", lead-in of " + std::to_string(s.lead_in_sentences) + " sentences" +
          (s.variants == 2 ? ", none for the first" : "");
      if (now != group)
        std::printf("\n%s\n%-20s %5s %6s %6s %6s %15s %7s %9s %7s %7s %7s %7s %9s %9s\n",
                    now.c_str(), "method", "asked", "right", "ranked", "ratio", "95 % interval",
                    "KL", "prefilled", "export", "merge", "import", "seam", "1st token",
                    "KiB moved");
      group = now;
      const auto share = [&](std::size_t count) {
        return static_cast<double>(count) / static_cast<double>(s.total);
      };
      std::printf(
          "%-20s %5zu %6.3f %6.3f %6.3f  %6.3f - %5.3f %7.3f %9.0f %7.1f %7.1f %7.1f %7.1f %6.0f "
          "ms %9.0f\n",
          s.method.c_str(), s.total, share(s.right), share(s.ranked_right), s.ratio, s.low, s.high,
          s.kl, s.prefilled_tokens, s.export_ms, s.merge_ms, s.import_ms, s.recompute_ms,
          s.first_token_ms, s.bytes / 1024);
    }
    std::printf("\ncontent digests of %zu renders after permuted insertion and joins: %s\n",
                renders_,
                renders_ == 0 ? "not checked"
                : equal_      ? "equal"
                              : "DIFFERENT");
  }

 private:
  [[nodiscard]] Summary sum(const Row& first) const {
    Summary s;
    std::tie(s.agents, s.task, s.context_tokens, s.facts, s.lead_in_sentences, s.variants) =
        first.group();
    s.method = first.method;
    std::vector<std::pair<double, double>> pairs;
    double full_right = 0;
    for (const Row& row : rows_) {
      if (row.group() != first.group() || row.method != first.method) continue;
      const auto full = std::find_if(rows_.begin(), rows_.end(), [&](const Row& other) {
        return other.method == "full_text" && other.group() == row.group() &&
               other.set() == row.set();
      });
      ++s.fact_sets;
      s.right += row.right;
      s.total += row.total;
      s.ranked_right += row.ranked_right;
      s.kl += row.kl;
      s.first_token_ms += row.first_token_ms;
      s.export_ms += row.export_ms;
      s.merge_ms += row.merge_ms;
      s.import_ms += row.import_ms;
      s.recompute_ms += row.recompute_ms;
      s.prefill_ms += row.prefill_ms;
      s.decode_ms += row.decode_ms;
      s.prefilled_tokens += static_cast<double>(row.prefilled_tokens);
      s.bytes += static_cast<double>(row.bytes);
      if (full == rows_.end()) continue;
      full_right += static_cast<double>(full->right);
      pairs.emplace_back(static_cast<double>(row.right), static_cast<double>(full->right));
    }
    for (double* mean :
         {&s.kl, &s.first_token_ms, &s.export_ms, &s.merge_ms, &s.import_ms, &s.recompute_ms,
          &s.prefill_ms, &s.decode_ms, &s.prefilled_tokens, &s.bytes})
      *mean /= static_cast<double>(s.fact_sets);
    double paired_right = 0;
    for (const auto& pair : pairs) paired_right += pair.first;
    s.ratio = full_right > 0 ? paired_right / full_right : 0;
    if (!pairs.empty()) std::tie(s.low, s.high) = interval(pairs);
    return s;
  }

  std::string path_, model_;
  std::vector<Row> rows_;
  bool equal_ = true;
  std::size_t renders_ = 0;
  std::vector<Json> checked_;  // (what, renders)
};

}  // namespace example
