#pragma once
// Rows of the table: kept in one JSON file, so that a stopped run goes on where it was, and summed
// up beside full text.

#include "results.hpp"
#include "study.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace quality {

/// One question answered by one method.
struct Row {
  std::string id;
  std::size_t agents = 0;
  std::string method;
  std::uint64_t seed = 0;
  double kl = 0, nll = 0, f1 = 0, em = 0, recall = 0;
  std::size_t computed_before = 0, computed_after = 0;
  double first_token_ms = 0;
  /// Parts of `first_token_ms`.
  double merge_ms = 0, import_ms = 0, recompute_ms = 0, prefill_ms = 0, question_ms = 0;
  std::size_t bytes = 0;
  std::string answer;  ///< as it was given

  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Row, id, agents, method, seed, kl, nll, f1, em, recall,
                                 computed_before, computed_after, first_token_ms, merge_ms,
                                 import_ms, recompute_ms, prefill_ms, question_ms, bytes, answer)

  [[nodiscard]] auto asked() const { return std::tie(id, agents, seed); }
};

/// Means over the questions of a method, and its F1 ÷ full text's on the same questions with the
/// 95 % interval of a bootstrap over questions.
struct Summary {
  std::size_t agents = 0;
  std::string method;
  std::size_t questions = 0;
  double kl = 0, nll = 0, f1 = 0, em = 0, recall = 0, f1_ratio = 0, low = 0, high = 0;
  double computed_before = 0, computed_after = 0, first_token_ms = 0, bytes = 0;

  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Summary, agents, method, questions, kl, nll, f1, em, recall,
                                 f1_ratio, low, high, computed_before, computed_after,
                                 first_token_ms, bytes)
};

class Results {
 public:
  using Json = nlohmann::json;

  /// Takes over the rows of `path` if they are of the same model and data; otherwise starts anew.
  Results(std::string path, std::string model, std::string data)
      : path_(std::move(path)), model_(std::move(model)), data_(std::move(data)) {
    std::ifstream file(path_);
    if (!file) return;
    const Json json = Json::parse(file, nullptr, false);
    if (json.is_discarded() || json.value("model", "") != model_ || json.value("data", "") != data_)
      return;
    for (const Json& entry : json.at("rows")) rows_.push_back(entry.get<Row>());
    renders_ = json.value("permuted_renders", std::size_t{0});
    equal_ = renders_ == 0 || json.value("content_digests_equal_under_permutation", false);
  }

  [[nodiscard]] bool has(const Row& like) const {
    return std::any_of(rows_.begin(), rows_.end(), [&](const Row& row) {
      return row.asked() == like.asked() && row.method == like.method;
    });
  }
  void add(Row row) { rows_.push_back(std::move(row)); }
  void add_permutations(std::size_t renders, bool equal) {
    renders_ += renders;
    equal_ = equal_ && equal;
  }
  [[nodiscard]] bool digests_equal() const { return equal_ && renders_ > 0; }
  [[nodiscard]] std::size_t permuted_renders() const { return renders_; }

  /// One entry for each number of agents and method, in the order of first appearance.
  [[nodiscard]] std::vector<Summary> summary() const {
    std::vector<Summary> out;
    for (const Row& first : rows_) {
      const bool seen = std::any_of(out.begin(), out.end(), [&](const Summary& s) {
        return s.method == first.method && s.agents == first.agents;
      });
      if (!seen) out.push_back(sum(first.agents, first.method));
    }
    std::stable_sort(out.begin(), out.end(),
                     [](const Summary& a, const Summary& b) { return a.agents < b.agents; });
    return out;
  }

  [[nodiscard]] bool save() const {
    return study::write_results(path_,
                                {{"model", model_},
                                 {"data", data_},
                                 {"rows", rows_},
                                 {"summary", summary()},
                                 {"content_digests_equal_under_permutation", digests_equal()},
                                 {"permuted_renders", renders_}});
  }

  void print() const {
    std::size_t agents = 0;
    for (const Summary& s : summary()) {
      if (s.agents != agents)
        std::printf("\n%zu agents, %s\n%-20s %5s %7s %7s %7s %6s %6s %6s %15s %8s %8s %11s %9s\n",
                    s.agents, data_.c_str(), "method", "asked", "KL", "nll", "recall", "F1", "EM",
                    "ratio", "95 % interval", "before", "after", "1st token", "KiB moved");
      agents = s.agents;
      std::printf(
          "%-20s %5zu %7.3f %7.3f %7.3f %6.3f %6.3f %6.3f  %6.3f - %5.3f %8.0f %8.0f %8.0f ms "
          "%9.0f\n",
          s.method.c_str(), s.questions, s.kl, s.nll, s.recall, s.f1, s.em, s.f1_ratio, s.low,
          s.high, s.computed_before, s.computed_after, s.first_token_ms, s.bytes / 1024);
    }
    std::printf("\ncontent digests of %zu renders after permuted insertion and joins: %s\n",
                renders_,
                renders_ == 0 ? "not checked"
                : equal_      ? "equal"
                              : "DIFFERENT");
  }

 private:
  [[nodiscard]] Summary sum(std::size_t agents, const std::string& method) const {
    Summary s;
    s.agents = agents;
    s.method = method;
    std::vector<std::pair<double, double>> pairs;
    for (const Row& row : rows_) {
      if (row.agents != agents || row.method != method) continue;
      ++s.questions;
      s.kl += row.kl;
      s.nll += row.nll;
      s.f1 += row.f1;
      s.em += row.em;
      s.recall += row.recall;
      s.computed_before += static_cast<double>(row.computed_before);
      s.computed_after += static_cast<double>(row.computed_after);
      s.first_token_ms += row.first_token_ms;
      s.bytes += static_cast<double>(row.bytes);
      const auto full = std::find_if(rows_.begin(), rows_.end(), [&](const Row& other) {
        return other.method == "full_text" && other.asked() == row.asked();
      });
      if (full != rows_.end()) pairs.emplace_back(row.f1, full->f1);
    }
    for (double* mean : {&s.kl, &s.nll, &s.f1, &s.em, &s.recall, &s.computed_before,
                         &s.computed_after, &s.first_token_ms, &s.bytes})
      *mean /= static_cast<double>(s.questions);
    double own = 0, full = 0;
    for (const auto& pair : pairs) own += pair.first, full += pair.second;
    s.f1_ratio = full > 0 ? own / full : 0;
    if (!pairs.empty()) std::tie(s.low, s.high) = example::interval(pairs);
    return s;
  }

  std::string path_, model_, data_;
  std::vector<Row> rows_;
  bool equal_ = true;
  std::size_t renders_ = 0;
};

}  // namespace quality
