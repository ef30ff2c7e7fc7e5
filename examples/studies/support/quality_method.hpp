#pragma once
// The training-free ways to hold several agents' passages that the table compares.

#include <array>
#include <cstddef>
#include <string_view>

namespace quality {

/// A method is what agents encode (behind which lead-in, in how many rounds), how that is merged,
/// and what is computed again.
struct Method {
  enum class Source { full_text, one_agent, none, text_summary, merged };
  /// What stands before an agent's passages when it reads them, and is dropped.
  enum class Lead { none, bos, neutral, similar, neighbour };
  /// Tokens of later fragments that are computed again: the first `amount` of each; the first share
  /// up to a sentence end.
  enum class Seam { none, first, share };

  std::string_view name;
  Source source = Source::merged;
  Lead lead = Lead::none;
  std::size_t rounds = 0;  ///< of refresh
  bool rotate = true;
  Seam seam = Seam::none;
  float amount = 0;
};

inline constexpr std::array<Method, 15> methods{{
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
    {.name = "epic_16", .seam = Method::Seam::first, .amount = 16},
    {.name = "seam_25", .seam = Method::Seam::share, .amount = .25F},
}};

inline const Method* find_method(std::string_view name) {
  for (const Method& method : methods)
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace quality
