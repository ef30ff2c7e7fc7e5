#pragma once
// The training-free ways to hold several agents' passages that the table compares.

#include <array>
#include <cstddef>
#include <string_view>

namespace quality {

/// A method is what agents encode (behind which lead-in, in how many rounds), how that is merged,
/// and what is computed again.
struct Method {
  enum class Source { full_text, one_agent, none, text_summary, merged, logits };
  /// What stands before an agent's passages when it reads them, and is dropped.
  enum class Lead { none, bos, neutral, similar, neighbour };
  /// Tokens of later fragments that are computed again: the first `amount` of each; the first share
  /// up to a sentence end; the share of all that the question attends to most, or that is furthest
  /// from full text.
  enum class Seam { none, first, share, query, deviation };

  std::string_view name;
  Source source = Source::merged;
  Lead lead = Lead::none;
  std::size_t rounds = 0;  ///< of refresh
  std::size_t top = 0;     ///< Others that an agent refreshes behind; 0: all.
  bool rotate = true;
  Seam seam = Seam::none;
  float amount = 0;
  bool offset = false;       ///< The others gain the mean of what the seam changed.
  bool temperature = false;  ///< Passages' keys are sharpened.
};

inline constexpr std::array<Method, 29> methods{{
    {.name = "full_text", .source = Method::Source::full_text},
    {.name = "one_agent", .source = Method::Source::one_agent},
    {.name = "none", .source = Method::Source::none},
    {.name = "text_summary", .source = Method::Source::text_summary},
    {.name = "naive", .rotate = false},
    {.name = "concat"},
    {.name = "bos_4", .lead = Method::Lead::bos},
    {.name = "lead_in", .lead = Method::Lead::neutral},
    {.name = "similar_text", .lead = Method::Lead::similar},
    {.name = "neighbour", .lead = Method::Lead::neighbour},
    {.name = "refresh_1", .rounds = 1},
    {.name = "refresh_2", .rounds = 2},
    {.name = "refresh_3", .rounds = 3},
    {.name = "refresh_1_top_1", .rounds = 1, .top = 1},
    {.name = "refresh_1_top_2", .rounds = 1, .top = 2},
    {.name = "epic_4", .seam = Method::Seam::first, .amount = 4},
    {.name = "epic_16", .seam = Method::Seam::first, .amount = 16},
    {.name = "epic_32", .seam = Method::Seam::first, .amount = 32},
    {.name = "seam_25", .seam = Method::Seam::share, .amount = .25F},
    {.name = "cacheblend_5", .seam = Method::Seam::deviation, .amount = .05F},
    {.name = "cacheblend_15", .seam = Method::Seam::deviation, .amount = .15F},
    {.name = "cacheblend_30", .seam = Method::Seam::deviation, .amount = .3F},
    {.name = "query_5", .seam = Method::Seam::query, .amount = .05F},
    {.name = "query_15", .seam = Method::Seam::query, .amount = .15F},
    {.name = "query_30", .seam = Method::Seam::query, .amount = .3F},
    {.name = "refresh_1_query_15", .rounds = 1, .seam = Method::Seam::query, .amount = .15F},
    {.name = "seam_offset", .seam = Method::Seam::share, .amount = .25F, .offset = true},
    {.name = "ape", .temperature = true},
    {.name = "pced", .source = Method::Source::logits},
}};

inline const Method* find_method(std::string_view name) {
  for (const Method& method : methods)
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace quality
